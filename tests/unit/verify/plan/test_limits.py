"""Every limit of every target: a plan that is exactly at it passes, one that needs one more is refused there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import InputError
from optcc.export import msccl, mscclpp
from optcc.passes.lower import lower
from optcc.plan import Channel, Plan
from optcc.planner import build
from optcc.runtime.buffers import ALIGNMENT
from optcc.runtime.transports.mpi import MESSAGE_BYTES_MAX
from optcc.schedule import COPY
from optcc.schedules.registry import SCHEDULES
from optcc.schedules.ring import ring
from optcc.topology import RANKS_MAX, Topology
from optcc.transfers import Transfers
from optcc.verdict import Counterexample
from optcc.verify.plan import limits
from optcc.verify.plan.limits import COUNTED, check_limits
from tests.negative.edits import Draft

Row = tuple[int, int, int, int]
"""src, dst, offset, bytes."""


def hand(
    rows: Sequence[Row],
    *,
    n_ranks: int = 2,
    size: int = 2**16,
    scratch: int = 0,
    slots: int = 1,
    numbers: Sequence[int] | None = None,
    after: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """A plan of copies; the i-th goes over channel `numbers[i]` of its pair of ranks."""
    n = len(rows)
    columns = [column(each) for each in zip(*rows, strict=True)] if rows else [column([])] * 4
    src, dst, offset, length = columns
    zero = column([0] * n)
    transfers = Transfers(
        *(Collective("allreduce", n_ranks), "sum", "float32", size, scratch, ("all",)),
        *(src, dst, column([COPY] * n), offset, offset, length, zero, zero, column(range(100, 100 + n))),
        after=Lists.of(after or [[]] * n),
        order=Lists.empty(n),
    )
    plan = lower("hand", transfers, column(range(n)), slots)
    if numbers is None:
        return plan
    names = list(zip(numbers, src.tolist(), dst.tolist(), strict=True))
    keys = {key: i for i, key in enumerate(sorted({key for key in names if key[1] != key[2]}))}
    of = np.array([keys.get(key, -1) for key in names])
    return replace(
        plan,
        channels=tuple(Channel(src, dst, slots) for _, src, dst in keys),
        in_channel=column(np.where(plan.in_channel >= 0, of[plan.recv_transfer], -1)),
        out_channel=column(np.where(plan.out_channel >= 0, of[plan.send_transfer], -1)),
    )


def over(peers: int, count: int, *, back: bool = False) -> tuple[list[Row], list[int], int]:
    """`count` messages from rank 0 to `peers` others in turn (or to it), each on a channel of its own."""
    ends = [(1 + i % peers, 0) if back else (0, 1 + i % peers) for i in range(count)]
    rows = [(src, dst, 16 * i, 16) for i, (src, dst) in enumerate(ends)]
    return rows, [i // peers for i in range(count)], peers + 1


def channels(count: int) -> Plan:
    rows, numbers, n_ranks = over(1, count)
    return hand(rows, numbers=numbers, n_ranks=n_ranks, size=max(16 * count, 2**16))


def named(length: int) -> Plan:
    return replace(hand([(0, 1, 0, 16)]), name="x" * length)


def spread(count: int) -> Plan:
    rows, numbers, n_ranks = over(count, count)
    return hand(rows, numbers=numbers, n_ranks=n_ranks)


def gathered(count: int) -> Plan:
    rows, numbers, n_ranks = over(count, count, back=True)
    return hand(rows, numbers=numbers, n_ranks=n_ranks)


def blocks(count: int) -> Plan:
    rows, numbers, n_ranks = over(31, count)
    return hand(rows, numbers=numbers, n_ranks=n_ranks)


def waited_for(count: int) -> Plan:
    """Rank 0 copies what it has received from each channel."""
    rows, numbers, n_ranks = over(32, count, back=True)
    rows += [(0, 0, 16 * i, 16) for i in range(count)]
    after: list[list[int]] = [[]] * count + [[i] for i in range(count)]
    return hand(rows, numbers=numbers + [0] * count, n_ranks=n_ranks, after=after)


def messages(count: int, slots: int = 1) -> Plan:
    """On one channel."""
    return hand([(0, 1, 16 * i, 16) for i in range(count)], slots=slots)


def nodes(count: int) -> Plan:
    """`count` messages over 16 channels."""
    return hand([(0, 1, 16 * i, 16) for i in range(count)], numbers=[i % 16 for i in range(count)])


def message_of(size: int) -> Plan:
    return hand([(0, 1, 0, size)], size=size)


def step_of(chunks: int) -> Plan:
    return hand([(0, 1, 0, 4), (0, 1, 4, 4 * chunks)])


def offset_of(chunk: int) -> Plan:
    return hand([(0, 1, 4 * chunk, 4)], size=4 * (chunk + 1))


def scratch_offset_of(chunk: int) -> Plan:
    return hand([(0, 1, 2**10 + 4 * chunk, 4)], size=2**10, scratch=4 * (chunk + 1))


def star_of_ranks(count: int) -> Plan:
    return hand([(0, peer, 16 * peer, 16) for peer in range(1, count + 1)], n_ranks=count + 1)


def semaphores(count: int) -> Plan:
    """Rank 0 receives in as many lanes, and then copies."""
    rows, numbers, n_ranks = over(count, count, back=True)
    plan = hand(
        [*rows, (0, 0, 0, 16)], numbers=[*numbers, 0], n_ranks=n_ranks, after=[[]] * count + [list(range(count))]
    )
    draft = Draft.of(plan)
    (lane,) = [i for i, rows_ in enumerate(draft.lanes) if rows_[0].name == "receive" and draft.lane_rank[i] == 0]
    draft.lanes[lane : lane + 1] = [[row] for row in draft.lanes[lane]]
    draft.lane_rank[lane : lane + 1] = [0] * count
    return draft.build()


def ranks(count: int) -> Plan:
    return hand([], n_ranks=count, size=0)


def cut_element(shift: int) -> Plan:
    draft = Draft.of(hand([(0, 1, 16, 16)]))
    draft.find(1, "receive").dst_offset += shift
    return draft.build()


def memory(size: int) -> Plan:
    """Of rank 1: its buffer, and three slots of 128 B for messages of 100 B."""
    return hand([(0, 1, 100 * i, 100) for i in range(4)], size=size - 3 * 128, slots=3)


def long_message(size: int) -> Plan:
    return hand([(0, 1, 0, size)], size=2**33)


AT_LIMIT: list[tuple[str, str, Callable[[int], Plan], int, int]] = [
    ("msccl-xml", "bytes of the name", named, 63, 64),
    ("msccl-xml", "channels", channels, 32, 33),
    ("msccl-xml", "sending thread blocks of a GPU's channel", spread, 32, 33),
    ("msccl-xml", "receiving thread blocks of a GPU's channel", gathered, 32, 33),
    ("msccl-xml", "thread blocks of a GPU", blocks, 216, 217),
    ("msccl-xml", "thread blocks of a GPU that others wait for", waited_for, 128, 129),
    ("msccl-xml", "steps of a thread block", messages, 256, 257),
    ("msccl-xml", "chunks of a step", step_of, 71, 72),
    ("msccl-xml", "highest chunk offset", offset_of, 2**15 - 1, 2**15),
    ("msccl-xml", "highest chunk offset", scratch_offset_of, 2**15 - 1, 2**15),
    ("msccl-xml", "XML nodes that a GPU reads", nodes, 4095 - 1 - 2 - 16, 4095 - 1 - 2 - 16 + 1),
    ("mscclpp-json", "bytes of the message", message_of, 2**31 - 16, 2**31),
    ("mscclpp-json", "channels of a thread block", star_of_ranks, 16, 17),
    ("mscclpp-json", "semaphores of an operation", semaphores, 16, 17),
    ("optcc", "ranks", ranks, 2**16, 2**16 + 1),
    ("optcc", "bytes past a whole element", cut_element, 0, 1),
    ("optcc", "bytes of a rank, slots included", memory, 2**47, 2**47 + 4),
    ("mpi", "bytes of a message", long_message, 2**31 - 4, 2**31),
    ("mpi", "channels of a pair of ranks", channels, 2**15, 2**15 + 1),
    ("mpi", "ranks", ranks, 2**16, 2**16 + 1),
    ("mpi", "bytes past a whole element", cut_element, 0, 2),
    ("mpi", "bytes of a rank, slots included", memory, 2**47, 2**47 + 4),
]
"""Target, what is limited, a plan that needs so much of it, the most that fits, the least that does not."""


def refused(plan: Plan, target: str) -> Counterexample:
    wrong = check_limits(plan, target)
    assert wrong is not None
    assert wrong.property == "limits"
    assert wrong.summary.startswith(f"{target}: ")
    assert len(str(wrong).splitlines()) <= 20
    return wrong


@pytest.mark.parametrize(("target", "what", "make", "fits", "too_much"), AT_LIMIT)
def test_at_the_limit_a_plan_fits_and_one_step_further_it_does_not(
    target: str, what: str, make: Callable[[int], Plan], fits: int, too_much: int
) -> None:
    assert check_limits(make(fits), target) is None
    wrong = refused(make(too_much), target)
    assert wrong.summary.startswith(f"{target}: {what}: ")
    if wrong.trace:
        assert "(line " in wrong.trace[0]


def test_every_limit_has_such_a_pair_of_plans() -> None:
    """Those counted in the plan; of the writers, those that a few instructions can reach (others: `test_export`)."""
    tested = {(target, what) for target, what, *_ in AT_LIMIT}
    counted = {(target.name, limit.what) for target in COUNTED.values() for limit in target.limits}
    written = {("msccl-xml", what) for what in msccl.LIMITS} | {("mscclpp-json", what) for what in mscclpp.LIMITS}
    assert counted <= tested
    assert tested - counted <= written
    assert {("msccl-xml", what) for what in msccl.LIMITS} <= tested


def test_a_limit_is_exact_where_the_grain_of_the_plan_is_coarser() -> None:
    """Lengths are multiples of an element: what is counted is still what the plan has."""
    needs = {need.what: need.amount for need in COUNTED["mpi"].needs(long_message(2**31 - 4))}
    assert needs["bytes of a message"] == MESSAGE_BYTES_MAX - 3


def test_the_limits_of_our_run_time_are_its_own() -> None:
    stated = {limit.what: limit.at_most for limit in COUNTED["mpi"].limits}
    assert stated["bytes of a message"] == MESSAGE_BYTES_MAX
    assert stated["ranks"] == RANKS_MAX
    assert limits._SLOT_ALIGNMENT == ALIGNMENT


def test_a_refusal_names_the_place() -> None:
    """In the file, or in the plan and with the author's line."""
    wrong = refused(compile_schedule(ring(n_ranks=256), size_bytes=256 * 64), "msccl-xml")
    assert wrong.summary == "msccl-xml: steps of a thread block: 511: must be at most 256; rank 0"
    plan = long_message(2**31)
    wrong = refused(plan, "mpi")
    receive = next(row for row in plan if row.kind == "receive")
    assert (wrong.rank, wrong.first_byte, wrong.last_byte) == (1, 0, 2**31 - 1)
    assert wrong.trace == (f"{receive}: {plan.transfers.describe(0)}",)
    assert "(line 100)" in wrong.trace[0]


def test_what_a_format_cannot_say_does_not_fit_it() -> None:
    """A collective, a reduction, a size."""
    gather = compile_schedule(SCHEDULES["direct-gather"](n_ranks=4), size_bytes=256)
    assert "gather" in refused(gather, "msccl-xml").summary
    assert "avg" in refused(compile_schedule(ring(n_ranks=4), size_bytes=256, reduction="avg"), "mscclpp-json").summary
    assert "multiples of 16 B" in refused(compile_schedule(ring(n_ranks=4), size_bytes=4 * 28), "mscclpp-json").summary


@pytest.mark.parametrize("name", SCHEDULES)
def test_our_run_time_can_run_the_library(name: str) -> None:
    topology = Topology.parse("8@50GB/s,7=25GB/s")
    plan = compile_schedule(SCHEDULES[name].build(topology, 4), size_bytes=2**20, topology=topology)
    assert check_limits(plan, "optcc") is None
    assert check_limits(plan, "mpi") is None


def test_an_empty_plan_fits_our_run_time() -> None:
    for target in COUNTED:
        for plan in (hand([]), compile_schedule(ring(n_ranks=1), size_bytes=64)):
            assert check_limits(plan, target) is None


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(InputError, match="must be one of msccl-xml, mscclpp-json, msccl, rccl, msccl-executor"):
        check_limits(hand([]), "nccl")


def test_a_size_that_does_not_divide_makes_chunks_small() -> None:
    plan = compile_schedule(ring(n_ranks=4), size_bytes=4 * 1001)
    assert refused(plan, "msccl-xml").summary.startswith("msccl-xml: chunks of a step: 250: must be at most 71")
    assert check_limits(compile_schedule(ring(n_ranks=4), size_bytes=4 * 1000), "msccl-xml") is None


def test_what_loaders_have_refused_is_refused() -> None:
    """Files of plans that fitted all other limits: too many nodes for three loaders, and a size read as int."""
    sixteen = build("shares", Topology.parse("16@50GB/s"), 2**30).plan
    assert "XML nodes that a GPU reads: 4783: must be at most 4095" in refused(sixteen, "msccl-xml").summary
    large = build("direct", Topology.parse("3@50GB/s"), 3 * 2**30, segments=1).plan
    assert "bytes of the message: 3221225472: must be at most 2147483647" in refused(large, "mscclpp-json").summary
