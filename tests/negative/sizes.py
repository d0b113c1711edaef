"""Classes 23, 24, 25, 26: ragged ends, more than there is room for, links that are not there, and false claims of time.

25 and 26 are one question here, `optcc.verify.plan.timing.check_timing`: a link is a port of a server, and what a port
must carry takes its time. A missing link is two servers whose surviving NICs share no rail, or a rank that does not
exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.plan import SLOTS_MAX, Channel, Plan
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Nic, Server, Topology
from optcc.verdict import Counterexample
from optcc.verify.plan.limits import check_limits
from optcc.verify.plan.port_graph import ExactModel
from optcc.verify.plan.timing import check_timing
from tests.negative.cases import Case, Corpus, change, compiled, hand, library
from tests.negative.edits import Draft, edit_transfers, transfer_rows

CASES: list[Case] = []
case = Corpus(CASES)

# --- 23 ragged ends ---


@case(23, "result", "contribution of rank 1 missing", rank=0, at=(24, 27))
def the_last_element_is_nobodys() -> Plan:
    """Sections of three elements; the seventh is in none."""
    draft = library("ring", 2, 6)
    draft.transfers = replace(draft.transfers, size_bytes=28)
    return draft.build()


@case(23, "PlanError", "src_offset 10: must be a multiple of 4, the size of a float32")
def half_an_element() -> Plan:
    draft = library("ring", 2, 6)
    rows = transfer_rows(draft.transfers)
    for row in rows:
        cut = 2 if row["src_offset"] else 0
        row["src_offset"] -= cut
        row["dst_offset"] -= cut
        row["bytes"] += 2 if cut else -2
    draft.transfers = edit_transfers(draft.transfers, rows)
    return draft.build()


@case(23, "matching", "goes out with 12 B of transfer #0, its receive wants 16 B of #0", rank=1)
def a_sender_that_rounds_down_and_a_receiver_that_rounds_up() -> Plan:
    """Seven elements on two ranks: sections of three and four, or of four and three."""
    draft = library("ring", 2, 7)
    rows = transfer_rows(draft.transfers)
    short = next(t for t, row in enumerate(rows) if row["bytes"] == 12)
    for row in draft.rows:
        if row.recv_transfer == short:
            row.bytes = 16
    return draft.build()


@case(23, "result", "missing", "bytes 12..15", rank=0, at=(12, 15))
def reduced_in_rounded_down_sections_and_gathered_in_rounded_up_ones() -> Plan:
    """Element 3 is reduced by no one: the first half of the sums ends before it, the second begins behind it."""
    draft = library("chain-reduce", 2, 7, segments=2)
    rows = transfer_rows(draft.transfers)
    second = max(range(len(rows)), key=lambda t: rows[t]["src_offset"])
    change(draft, second, src_offset=16, dst_offset=16, bytes=12)
    return draft.build()


@case(23, "result", "missing", rank=1)
def slices_that_are_not_the_collectives() -> Plan:
    """Seven elements on three ranks: 2, 2, 3. A schedule of sections of 3, 3, 1 leaves an element to the wrong rank."""
    return hand(
        3,
        """
        1>0 reduce 0:3
        2>0 reduce 0:3
        0>1 reduce 3:6
        2>1 reduce 3:6
        0>2 reduce 6:7
        1>2 reduce 6:7
        """,
        {0: "s2 s4 | r0 r1<r0", 1: "s0 s5 | r2 r3<r2", 2: "s1 s3 | r4 r5<r4"},
        elements=7,
        slots=2,
        collective="reducescatter",
    )


@case(23, "PlanError", "plan: bytes 0..4: must be from 1")
def an_empty_section_that_is_sent_all_the_same() -> Plan:
    """One element on two ranks: the section without one has no message."""
    draft = library("ring", 2, 1)
    row = replace(draft.find(0, "send"), bytes=0, after=[])
    draft.lane_of(draft.find(0, "send")).append(row)
    return draft.build()


@case(23, "result", "never written", rank=1, at=(16, 19))
def a_last_segment_shorter_than_the_others() -> Plan:
    """A broadcast in segments of two elements; of five, the last segment has one, and is dropped as incomplete."""
    draft = library("chain-broadcast", 2, 4, segments=2)
    draft.transfers = replace(draft.transfers, size_bytes=20)
    return draft.build()


# --- 24 resource limits ---


@dataclass(frozen=True)
class ForTarget:
    """A plan and the run-time that it should fit."""

    plan: Plan
    target: str


def _limits(asked: ForTarget) -> Counterexample | None:
    return check_limits(asked.plan, asked.target)


@case(24, "limits", "mscclpp-json: operations of a thread block: ", "must be at most 64; rank 0", check=_limits)
def sixty_five_operations() -> ForTarget:
    return ForTarget(compile_schedule(SCHEDULES["ring"](n_ranks=24), size_bytes=24 * 64), "mscclpp-json")


@case(24, "limits", "msccl-xml: steps of a thread block: 258: must be at most 256; rank 0", check=_limits)
def two_hundred_and_fifty_eight_steps() -> ForTarget:
    """A ring of two ranks and 129 segments, a send and a fused receive or a receive for each."""
    plan = compile_schedule(SCHEDULES["ring"](n_ranks=2, segments=129), size_bytes=258 * 4, fused=False)
    return ForTarget(plan, "msccl-xml")


@case(24, "limits", "msccl-xml: channels: 33: must be at most 32", check=_limits)
def thirty_three_channels() -> ForTarget:
    """33 channels between two ranks, a lane for each."""
    count = 33
    rows = "\n".join(f"0>1 copy {i}:{i + 1}" for i in range(count))
    draft = Draft.of(
        hand(
            2,
            rows,
            {0: " ".join(f"s{i}" for i in range(count)), 1: " ".join(f"r{i}" for i in range(count))},
            elements=count,
        )
    )
    sends, receives = draft.rows[:count], draft.rows[count:]
    draft.channels = [Channel(0, 1, 1) for _ in range(count)]
    for i, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        send.out_channel = receive.in_channel = i
    draft.lanes = [[row] for row in (*sends, *receives)]
    draft.lane_rank = [0] * count + [1] * count
    return ForTarget(replace(draft.build(), name="channels"), "msccl-xml")


@case(24, "limits", "msccl-xml: chunks of a step: 72: must be at most 71", check=_limits)
def a_size_that_does_not_divide() -> ForTarget:
    """Chunks are of one element: sections are of 73 and 72."""
    return ForTarget(compile_schedule(SCHEDULES["ring"](n_ranks=2), size_bytes=145 * 4), "msccl-xml")


@case(24, "limits", "mscclpp-json: chunks of 4 B: must be multiples of 16 B", check=_limits)
def a_ragged_size_for_a_run_time_of_whole_vectors() -> ForTarget:
    return ForTarget(library("ring", 2, 7).build(), "mscclpp-json")


@case(24, "limits", "mpi: bytes of a message: 2147483648, must be at most 2147483647", check=_limits, rank=0)
def two_gibibytes_in_one_message() -> ForTarget:
    return ForTarget(library("chain-reduce", 2, 2**29).build(), "mpi")


@case(24, "PlanError", f"{SLOTS_MAX + 1} slots: must be from 1 to {SLOTS_MAX}")
def more_slots_than_there_can_be() -> Plan:
    draft = library("ring", 2, 6)
    draft.channels[0] = replace(draft.channels[0], slots=SLOTS_MAX + 1)
    return draft.build()


@case(24, "InputError", "0 slots: must be from 1")
def no_slot_at_all() -> Plan:
    return library("ring", 2, 6, slots=0).build()


@case(24, "PlanError", "instruction", "dst ends past the buffer of 24 B")
def past_the_end_of_the_buffer() -> Plan:
    draft = library("ring", 2, 6)
    draft.find(1, "receive-reduce").dst_offset = 16
    return draft.build()


@case(24, "ScheduleError", "scratch 1: must be below 1")
def more_scratch_than_was_asked_for() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=0, dst=1, into=segment.scratch(0, 1))

    return compiled(author, 2)


# --- 25 missing link, oversubscription ---


@dataclass(frozen=True)
class Claim:
    """A plan, a machine and what is claimed of its time."""

    plan: Plan
    topology: Topology
    model: ExactModel = "exclusive"
    within: Fraction | None = None
    promise_s: Fraction | None = None


def _timing(claim: Claim) -> Counterexample | None:
    return check_timing(claim.plan, claim.topology, model=claim.model, within=claim.within, promise_s=claim.promise_s)[
        0
    ]


def _servers(*rails: tuple[int, ...], rate: int = 4) -> Topology:
    """Servers of one GPU with a NIC of `rate` B/s on each of these rails, on a network of rails."""
    nics = [tuple(Nic(rail, Fraction(rate), Fraction(rate)) for rail in own) for own in rails]
    return Topology(tuple(Server(f"h{i}", 1, own) for i, own in enumerate(nics)), rail_only=True)


def _ring(ranks: int, elements: int, *, slots: int = 2) -> Plan:
    return library("ring", ranks, elements, slots=slots).build()


@case(25, "ScheduleError", "dst 2 must be a rank from 0 to 1")
def an_endpoint_that_does_not_exist() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=2)

    return compiled(author, 2)


@case(25, "timing", "no link, the servers share no rail", "h1 keeps 1", "h2 keeps 0", "1->2", check=_timing, rank=1)
def two_servers_that_share_no_rail() -> Claim:
    """A ring over three servers of which the second has lost rail 0 and the third rail 1."""
    return Claim(_ring(3, 6), _servers((0, 1), (1,), (0,)), promise_s=Fraction(1000))


@case(25, "PlanError", "channel 0->3: src and dst must be two ranks below 3")
def a_channel_to_a_rank_that_is_not_there() -> Plan:
    draft = library("ring", 3, 6)
    draft.channels[0] = replace(draft.channels[0], dst=3)
    return draft.build()


@case(25, "TopologyError", "topology of 4 ranks", "3 ranks", check=_timing)
def a_machine_of_another_size() -> Claim:
    return Claim(_ring(3, 6), Topology.parse("4@4B/s"), promise_s=Fraction(1000))


@case(25, "timing", "port in h0 must carry 48 B at 4B/s, which takes 12", "3/2 T*", check=_timing, rank=0)
def a_star_that_needs_three_times_the_roots_port() -> Claim:
    """Three leaves send 16 B each to one root; an optimal reduction takes 4 s, 1.5 times that is allowed."""

    @schedule(collective="reduce")
    def star(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            for leaf in (1, 2, 3):
                segment[0].reduce(src=leaf, dst=0)

    plan = compile_schedule(star(n_ranks=4), size_bytes=16)
    return Claim(plan, Topology.parse("4@4B/s"), within=Fraction(3, 2))


@case(25, "timing", "port out h0 must carry", "promised", check=_timing)
def two_gpus_that_both_count_on_the_servers_nic() -> Claim:
    """Each GPU alone would be done in time; both go out through one NIC of the server."""
    plan = hand(
        4,
        """
        0>2 reduce 0:4
        1>3 reduce 0:4
        """,
        {0: "s0", 1: "s1", 2: "r0", 3: "r1"},
        elements=4,
    )
    nic = (Nic(0, Fraction(4), Fraction(4)),)
    machine = Topology((Server("h0", 2, nic, fabric=None), Server("h1", 2, nic, fabric=None)))
    return Claim(plan, machine, promise_s=Fraction(6))


# --- 26 false claims of time ---


@case(26, "timing", "port out h2 must carry 64 B at 1B/s, which takes 64", check=_timing, rank=2)
def a_slow_link_with_the_load_of_a_fast_one() -> Claim:
    """The ring's time for equal rates, on a machine with one slow server."""
    return Claim(_ring(3, 6 * 2), Topology.parse("3@2B/s,2=1B/s"), promise_s=Fraction(16))


@case(26, "timing", "takes", "with exclusive ports in the lanes' order", "promised", check=_timing)
def a_promise_that_forgets_the_latency() -> Claim:
    """Six steps around three servers: bytes in time, latencies not."""
    machine = Topology.parse("3@4B/s").with_latency(Fraction(1, 100))
    return Claim(_ring(3, 12), machine, promise_s=Fraction(16) + Fraction(1, 100))


@case(26, "timing", "takes", "promised", check=_timing)
def a_pipeline_taken_to_be_full_from_the_start() -> Claim:
    """A chain in two segments through three ranks takes three half messages, not two."""
    plan = library("chain-broadcast", 3, 8, segments=2).build()
    return Claim(plan, Topology.parse("3@4B/s"), promise_s=Fraction(8))


@case(26, "timing", "takes", "a free slot", check=_timing)
def a_time_that_more_slots_would_have() -> Claim:
    """Three short messages to a slow rank, then a long one to another: with one slot it starts late."""
    plan = hand(
        3,
        """
        0>1 copy 0:1
        0>1 copy 1:2
        0>1 copy 2:3
        0>2 copy 0:3
        """,
        {0: "s0 s1 s2 s3", 1: "r0 r1 r2", 2: "r3"},
        elements=3,
        slots=1,
        collective="broadcast",
    )
    return Claim(plan, Topology.parse("3@4B/s,1=1B/s,2=1B/s"), model="fifo", promise_s=Fraction(15))


@case(26, "timing", "T* = ", "promised", check=_timing)
def optimal_but_for_the_straggler() -> Claim:
    """A ring is optimal on equal servers; with one at half rate it takes nearly twice the bound."""
    machine = Topology.parse("4@50MB/s,3=25MB/s")
    return Claim(_ring(4, 4096), machine, within=Fraction(13, 10))


@case(26, "timing", "takes", "promised", check=_timing)
def off_by_a_nanosecond() -> Claim:
    """The exact time of a ring, less a nanosecond: floating point would let it pass."""
    return Claim(
        _ring(3, 3 * 2**20),
        Topology.parse("3@4MB/s"),
        promise_s=Fraction(2**20 * 4 * 4, 4 * 10**6) - Fraction(1, 10**9),
    )
