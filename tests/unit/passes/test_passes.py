"""Each pass alone: bytes, dependencies, order, lanes, fusion."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from optcc.arrays import Lists, column
from optcc.compiler import SAVING, choose_segments, compile_schedule, costed_s, plan_transfers, try_segments
from optcc.dsl import Definition, Program, schedule
from optcc.errors import InputError, TopologyError
from optcc.passes import timetable as timetable_module
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.list_schedule import Jobs, list_exclusive
from optcc.passes.lower import lower
from optcc.passes.timetable import families, timetable
from optcc.planner import find_schedule
from optcc.schedule import Layout
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import MODELS, simulate
from optcc.simulate.tick_clock import make_clock
from optcc.timing import Model
from optcc.topology import Nic, Server, Topology
from optcc.transfers import Transfers
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.property.strategies import Trees
from tests.sample import sampled

FULL = Fraction(25_000_000)


def reaches(after: Lists, later: int, earlier: int) -> bool:
    """True if transfer `later` comes after `earlier` by dependencies."""
    stack, seen = [later], {later}
    while stack:
        for each in after[stack.pop()].tolist():
            if each == earlier:
                return True
            if each not in seen:
                seen.add(each)
                stack.append(each)
    return False


def conflict(transfers: Transfers, i: int, j: int) -> bool:
    """True if two transfers touch the same bytes of a rank, one of them writing."""
    size_i, size_j = int(transfers.bytes[i]), int(transfers.bytes[j])

    def ends(k: int, size: int) -> list[tuple[int, int, int, bool]]:
        src, dst = int(transfers.src_offset[k]), int(transfers.dst_offset[k])
        return [(int(transfers.src[k]), src, src + size, False), (int(transfers.dst[k]), dst, dst + size, True)]

    return any(
        a[0] == b[0] and max(a[1], b[1]) < min(a[2], b[2]) and (a[3] or b[3])
        for a in ends(i, size_i)
        for b in ends(j, size_j)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 97])
def test_layout_covers_ragged_sizes_exactly(count: int) -> None:
    """Chunks follow one another from 0 to count, whatever the shares."""

    @schedule
    def parts(program: Program) -> None:
        for share, sections in ((Fraction(1, 3), 2), (Fraction(1, 7), 3), (Fraction(11, 21), 1)):
            for _ in program.pipeline(sections=sections, share=share):
                pass

    layout = Layout.of(parts(n_ranks=2, segments=3).segments, 8 * count, "float64")
    edges = [
        edge for first, stop in zip(layout.first, layout.stop, strict=True) for edge in zip(first, stop, strict=True)
    ]
    assert [first for first, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == count


def test_empty_chunks_are_dropped_and_scratch_lies_behind() -> None:
    """One element for three sections; scratch slot j is j + 1 messages further on."""

    @schedule
    def through(program: Program) -> None:
        for segment in program.pipeline(sections=3, scratch=2):
            for c in range(3):
                segment[c].copy(src=0, dst=1, into=segment.scratch(c, 1))

    bound = bind(through(n_ranks=2), 4, "float32", "sum")
    assert len(bound) == 1
    assert bound.dst_offset.tolist() == [8]
    assert bound.scratch_bytes == 8
    assert len(bind(through(n_ranks=2), 0, "float32", "sum")) == 0
    with pytest.raises(InputError):
        bind(through(n_ranks=2), 6, "float32", "sum")
    with pytest.raises(InputError):
        bind(through(n_ranks=2), 4, "float32", "xor")


@pytest.mark.parametrize("case", range(40))
def test_dependencies_order_every_conflict(case: int) -> None:
    """Random transfers of overlapping ranges: two that conflict are ordered as written, and nothing points forward."""
    rng = random.Random(case)
    n, ranks, elements = 14, 3, 8
    rows = []
    for _ in range(n):
        size = rng.randint(1, 3)
        rows.append(
            (
                *rng.sample(range(ranks), 2),
                rng.randrange(2),
                rng.randrange(elements - 2),
                rng.randrange(elements - 2),
                size,
            )
        )
    base = bind(SCHEDULES["ring"](n_ranks=ranks), 4 * elements, "float32", "sum")
    empty = Lists.of([[]] * n)
    columns: dict[str, Any] = {
        name: column(row[i] * (4 if i > 2 else 1) for row in rows)
        for i, name in enumerate(("src", "dst", "op", "src_offset", "dst_offset", "bytes"))
    }
    zeros: dict[str, Any] = {name: column([0] * n) for name in ("segment", "stage", "line")}
    transfers = depend(replace(base, **columns, **zeros, after=empty, order=empty))
    for j in range(n):
        assert all(each < j for each in transfers.after[j].tolist())
        for i in range(j):
            if conflict(transfers, i, j):
                assert reaches(transfers.after, j, i), (i, j)
        for each in transfers.after[j].tolist():
            assert conflict(transfers, each, j), "a dependency without a reason"


@pytest.mark.parametrize("ports", MODELS)
@pytest.mark.parametrize("text", ["4@50MB/s", "4@50MB/s,1=5MB/s:25MB/s", "4@50MB/s,3=1MB/s", "5@50MB/s,0=1MB/s"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_timetable_is_an_order(name: str, text: str, ports: Model) -> None:
    """Every transfer once; another number of ranks is refused. Under exclusive ports there is one order, and none comes
    before what it depends on. Under fifo it starts after that has started, unless it is a sibling; and it is done after
    that is done, unless it only must not overwrite what that one sends. Channels keep their order either way."""
    topology = Topology.parse(text)
    transfers = depend(bind(SCHEDULES[name].build(topology, 3), 4 * 97, "float32", "sum"))
    family = families(transfers).tolist()
    src, dst = transfers.src.tolist(), transfers.dst.tolist()
    for slots in (1, 2, 64):
        arranged, order = timetable(transfers, topology, slots, ports)
        assert len(arranged) == len(transfers)
        for side in (order.sends, order.receives):
            assert sorted(side.tolist()) == list(range(len(transfers)))
        sent, received = ({t: i for i, t in enumerate(side.tolist())} for side in (order.sends, order.receives))
        for t, after in enumerate(arranged.after):
            for each in after:
                assert sent[each] < sent[t] or (family[each] == family[t] and ports == "fifo")
                assert received[each] < received[t] or (ports == "fifo" and dst[each] not in (src[t], dst[t]))
        if ports == "exclusive":
            assert order.sends.tolist() == order.receives.tolist()
        for channel in set(zip(src, dst, strict=True)):
            there, here = (
                [t for t in side.tolist() if (src[t], dst[t]) == channel] for side in (order.sends, order.receives)
            )
            assert there == here
    with pytest.raises(TopologyError):
        timetable(transfers, Topology.parse("6@50MB/s"), 2, ports)


FIFO_TOPOLOGIES = ("4@50MB/s", "4@50MB/s,1=5MB/s:25MB/s", "4@50MB/s,3=1MB/s", "5@50MB/s,0=1MB/s")


@pytest.mark.parametrize(("name", "text", "slots"), sampled(product(SCHEDULES, FIFO_TOPOLOGIES, (1, 2, None)), every=5))
def test_the_fifo_order_runs_with_its_slots(name: str, text: str, slots: int | None) -> None:
    """The plan is proved, which includes that it is free of deadlock, and has a time under every port model."""
    topology = Topology.parse(text)
    for size_bytes in (0, 4, 124, 388):
        built = SCHEDULES[name].build(topology, 3)
        plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, slots=slots, ports="fifo")
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, (size_bytes, verdict.counterexample)
        for model in MODELS:
            assert (simulate(plan, topology, model=model).seconds > 0) == (len(plan.transfers) > 0)


def arranged_after(definition: Definition, text: str) -> tuple[Transfers, Transfers]:
    """The transfers of one segment of one element, before and after the timetable; the plan of those is proved."""
    topology = Topology.parse(text)
    built = definition.build(topology)
    for slots in (1, 2, 64):
        plan = compile_schedule(built, size_bytes=4, topology=topology, slots=slots, ports="fifo")
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, (slots, verdict.counterexample)
    transfers = depend(bind(built, 4, "float32", "sum"))
    return transfers, timetable(transfers, topology, 64, "fifo")[0]


def test_siblings_are_seated_in_the_order_in_which_they_come() -> None:
    """Three ranks of one parent, the slowest written first: each waits for the next faster one, the sum for all."""

    @schedule
    def star(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            for src in program.ranks[1:]:
                segment[0].reduce(src=src, dst=0)
            for dst in program.ranks[1:]:
                segment[0].copy(src=0, dst=dst)

    written, arranged = arranged_after(star, "4@50MB/s,1=1MB/s,2=10MB/s")
    assert families(written).tolist() == [2, 2, 2, 3, 4, 5]
    assert list(map(list, written.after)) == [[], [0], [1], [0, 2], [1, 2], [2]]
    # What is written to rank 3 must not only follow the sum (#0), but spare what 3 itself sent (#2).
    assert list(map(list, arranged.after)) == [[1], [2], [], [0], [0, 1], [0, 2]]


def test_siblings_keep_their_order_if_the_first_must_wait_at_the_receiver() -> None:
    """Rank 0 keeps a copy of its part before it is added to: whoever came first would overwrite it."""

    @schedule
    def kept(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=0, dst=0, into=segment.scratch(0))
            for src in (3, 2, 1):
                segment[0].reduce(src=src, dst=0)
            for dst in (1, 2, 3):
                segment[0].copy(src=0, dst=dst)

    for text in ("4@50MB/s", "4@50MB/s,3=1MB/s", "4@50MB/s,2=1MB/s,3=1MB/s"):
        written, arranged = arranged_after(kept, text)
        assert families(written).tolist() == list(range(len(written)))
        assert list(map(list, arranged.after)) == list(map(list, written.after))


def test_siblings_keep_their_order_if_a_part_goes_in_more_than_once() -> None:
    """Recursive doubling, whose partners both add; and a rank that computes the sum for itself, in the same order."""

    @schedule
    def twice(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            segment[0].copy(src=0, dst=2, into=segment.scratch(0))
            segment[0].copy(src=1, dst=2, into=segment.scratch(0, 1))
            segment.scratch(0, 1).reduce(src=2, dst=2, into=segment.scratch(0))
            segment[0].reduce(src=1, dst=0)
            segment[0].reduce(src=2, dst=0)
            segment.scratch(0).reduce(src=2, dst=2, into=segment[0])
            segment[0].copy(src=0, dst=1)

    cases = [(twice, "3@50MB/s,1=1MB/s")]
    cases += [(SCHEDULES["recursive-doubling"], f"{p}@50MB/s,1=1MB/s") for p in (2, 4, 6, 7, 8)]
    for definition, text in cases:
        written, arranged = arranged_after(definition, text)
        assert families(written).tolist() == list(range(len(written)))
        assert list(map(list, arranged.after)) == list(map(list, written.after))


def test_messages_of_a_channel_do_not_overtake_each_other() -> None:
    """A part of rank 1 must wait at rank 0 for that of slow rank 2; what rank 1 sends next waits behind it."""

    @schedule
    def three_sections(program: Program) -> None:
        for segment in program.pipeline(sections=3, scratch=1):
            segment[0].copy(src=0, dst=0, into=segment.scratch(0))
            for section, src in ((2, 1), (0, 2), (0, 1), (1, 1), (1, 2), (2, 2)):
                segment[section].reduce(src=src, dst=0)
            for section, dst in product(range(3), (1, 2)):
                segment[section].copy(src=0, dst=dst)

    topology = Topology.parse("3@50MB/s,2=1MB/s")
    for slots in (1, 2, 64):
        plan = compile_schedule(
            three_sections.build(topology), size_bytes=12, topology=topology, slots=slots, ports="fifo", fused=False
        )
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, verdict.counterexample


@pytest.mark.parametrize("seed", range(5))
def test_lowering_keeps_the_order_of_every_port(seed: int) -> None:
    """Send and receive lanes stand in the orders given, and every transfer is one send and one receive."""
    topology = Topology.parse("4@50MB/s,3=25MB/s")
    transfers = depend(bind(SCHEDULES["optcc"].build(topology, 3), 4 * 97, "float32", "sum"))
    rng = random.Random(seed)
    sends, receives = (column(rng.sample(range(len(transfers)), len(transfers))) for _ in range(2))
    sent, received = ({t: i for i, t in enumerate(side.tolist())} for side in (sends, receives))
    plan = lower("x", transfers, sends, 2, receives)
    assert sorted(t for t in plan.send_transfer.tolist() if t >= 0) == list(range(len(transfers)))
    assert sorted(t for t in plan.recv_transfer.tolist() if t >= 0) == list(range(len(transfers)))
    for lane in plan.lanes:
        if plan.send_transfer[lane[0]] >= 0:
            places = [sent[int(plan.send_transfer[i])] for i in lane]
        else:
            places = [received[int(plan.recv_transfer[i])] for i in lane]
        assert places == sorted(places)


@schedule
def two_local_operations(program: Program) -> None:
    """What rank 1 receives first is added there; then it sends something else, then what it received."""
    for segment in program.pipeline(sections=2, scratch=2):
        segment[0].copy(src=0, dst=1, into=segment.scratch(0))
        segment.scratch(0).reduce(src=1, dst=1, into=segment[0])
        segment[1].copy(src=1, dst=1, into=segment.scratch(1))
        segment.scratch(1).reduce(src=1, dst=0, into=segment[1])
        segment.scratch(0).copy(src=1, dst=0, into=segment.scratch(0, 1))
        segment[0].copy(src=1, dst=0)
        segment[1].copy(src=0, dst=1)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_fusing_respects_the_lane_of_local_operations(slots: int, segments: int) -> None:
    """A receive that a local operation waits for must not be put off behind a send that a later local one feeds."""
    for fused in (False, True):
        plan = compile_schedule(
            two_local_operations(n_ranks=2, segments=segments), size_bytes=8 * segments, slots=slots, fused=fused
        )
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, (fused, verdict.counterexample)


def test_fusing_saves_instructions_and_keeps_transfers() -> None:
    """The ring's inner hops become one instruction each; every transfer is still sent and received once."""
    for slots in (1, 2, 4):
        apart = compile_schedule(SCHEDULES["ring"](n_ranks=4, segments=2), size_bytes=4 * 64, slots=slots, fused=False)
        fused = compile_schedule(SCHEDULES["ring"](n_ranks=4, segments=2), size_bytes=4 * 64, slots=slots)
        assert len(fused) < len(apart)
        for plan in (apart, fused):
            assert sorted(plan.send_transfer[plan.send_transfer >= 0].tolist()) == list(range(len(plan.transfers)))
            assert sorted(plan.recv_transfer[plan.recv_transfer >= 0].tolist()) == list(range(len(plan.transfers)))


@pytest.mark.parametrize("case", range(60))
def test_fused_trees_with_one_slot(case: int) -> None:
    """The claim of the pass: fusing never makes a circle, here where slots are scarcest."""
    rng = random.Random(case)
    trees = Trees(case, rng.randint(2, 6), rng.randint(1, 4), rng.randint(1, 3), rng.random() < 0.5, True)
    plan = compile_schedule(trees.build(), size_bytes=4 * 60, slots=1)
    assert verify_plan(plan).verdict == PROVED


@pytest.mark.parametrize("slots", [0, -1])
def test_slots_that_cannot_be(slots: int) -> None:
    """At least one slot."""
    with pytest.raises(InputError, match="slots"):
        compile_schedule(SCHEDULES["ring"](n_ranks=2), size_bytes=8, slots=slots)


def test_the_order_handed_out_is_acyclic_with_the_dependencies() -> None:
    """`plan_transfers` fills `order` so that `after` and `order` together can still be run."""
    topology = Topology.parse("4@50MB/s,3=25MB/s")
    for name in SCHEDULES:
        for slots in (1, 2):
            built = SCHEDULES[name].build(topology, 2)
            transfers = plan_transfers(compile_schedule(built, size_bytes=4 * 48, topology=topology, slots=slots))
            done: set[int] = set()
            while len(done) < len(transfers):
                ready = [
                    t
                    for t in range(len(transfers))
                    if t not in done and {*transfers.after[t].tolist(), *transfers.order[t].tolist()} <= done
                ]
                assert ready, "after and order form a circle"
                done.update(ready)


def test_what_a_message_costs_lets_chunks_be_longer() -> None:
    """Over a slow port a chunk is at most 1 MiB; over a fast one such chunks would cost more than their bytes."""
    chosen = [
        choose_segments(
            SCHEDULES["ring"], replace(Topology.parse(f"2@{rate}"), overhead_s=Fraction(cost)), size_bytes=2**26
        )
        for rate, cost in (("1GB/s", "0"), ("1GB/s", "1/10000"), ("50GB/s", "0"), ("50GB/s", "1/10000"))
    ]
    assert chosen[:3] == [32, 32, 32]
    assert chosen[3] <= 4


@pytest.mark.parametrize(("name", "size_bytes"), [("equal-trees", 2**26), ("packed-broadcast", 2**23)])
def test_where_gpus_are_linked_no_fewer_segments_cost_less(name: str, size_bytes: int) -> None:
    """There most numbers of segments are skipped on the way to one that fills the pipeline; what messages cost the
    processors of ranks, where the topology says it, sends the search back."""
    servers = [
        Server(f"h{host}", 2, (Nic(0, FULL, FULL), Nic(1, last, last)), fabric=4 * FULL)
        for host, last in enumerate((FULL, FULL, FULL, FULL / 2))
    ]
    hosts = Topology(tuple(servers), latency_s=Fraction(2, 10_000)).with_own_nics()
    costly = replace(hosts, overhead_s=Fraction(6, 10_000))
    definition = find_schedule(name)
    chosen = {
        each.overhead_s: try_segments(definition, each, size_bytes=size_bytes, ports="fair")[0]
        for each in (hosts, costly)
    }
    found = chosen[costly.overhead_s]
    assert 1 < found < chosen[hosts.overhead_s]

    def costs_s(segments: int) -> float:
        made = definition.build(costly, segments)
        plan = compile_schedule(made, size_bytes=size_bytes, topology=costly, ports="fair")
        return costed_s(plan, simulate(plan, costly, model="fair").seconds, costly)

    assert costs_s(found) < min(costs_s(found // 2), costs_s(2 * found))


@pytest.mark.parametrize("ports", ["fair", "fifo"])
@pytest.mark.parametrize("name", ["chain-broadcast", "chain-reduce"])
def test_segments_are_doubled_as_long_as_that_saves_enough(name: str, ports: Model) -> None:
    """Twice the messages for less than a hundredth are no gain where processors are busy."""
    topology, size = Topology.parse("4@25MB/s").with_latency(Fraction(1, 5000)), 8 << 20
    chosen = choose_segments(SCHEDULES[name], topology, size_bytes=size, ports=ports)

    def seconds(segments: int) -> float:
        built = SCHEDULES[name].build(topology, segments)
        plan = compile_schedule(built, size_bytes=size, topology=topology, ports=ports)
        return simulate(plan, topology, model=ports).seconds

    half, found, twice = (seconds(count) for count in (chosen // 2, chosen, 2 * chosen))
    assert found < (1 - SAVING) * half, "too few"
    assert (1 - SAVING) * found <= twice < found, "too many"


def test_segments_are_chosen_for_every_schedule() -> None:
    """A power of two; a schedule that writes nothing, or a message of no bytes, gets one without complaint."""

    @schedule
    def nothing(program: Program) -> None:
        del program

    definitions: list[Definition] = [*SCHEDULES.values(), nothing]
    for definition in definitions:
        for size in (0, 4, 2**20):
            chosen = choose_segments(definition, Topology.parse("3@50MB/s"), size_bytes=size)
            assert chosen & (chosen - 1) == 0
    one, many = (
        choose_segments(SCHEDULES["optcc"], Topology.parse("3@50MB/s,2=25MB/s"), size_bytes=size)
        for size in (64, 2**24)
    )
    assert (one, many > 4) == (1, True)


def test_kernels_get_arrays_of_one_kind_whatever_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of other kinds are compiled again, which takes ten seconds."""
    kinds = []

    def listed(jobs: Jobs, *rest: Any) -> Any:
        kinds.append([(each.dtype, each.flags.writeable) for each in jobs])
        return list_exclusive(jobs, *rest)

    monkeypatch.setattr(timetable_module, "list_exclusive", listed)
    for text, name in (("1@1GB/s", "ring"), ("4@1GB/s", "ring"), ("torus:3@2GB/s:1GB/s", "packed")):
        topology = Topology.parse(text)
        built = find_schedule(name).build(topology, 1)
        compile_schedule(built, size_bytes=4096, topology=topology, ports="exclusive")
    assert kinds and all(each == kinds[0] for each in kinds)
    clock = make_clock((), (), (), 0, Fraction(0), Fraction(0))
    assert clock.paces.ticks.dtype == "int64" and clock.paces.ticks_float.dtype == "float64"
