"""An AllReduce from one array to another without a copy of the input: the same bits, in every order that can be."""

from __future__ import annotations

import numpy as np
import pytest

from optcc.errors import OptccError
from optcc.plan import RECV, SEND, Channel, Plan
from optcc.planner import build_plan
from optcc.runtime import buffers
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import make_input
from optcc.runtime.input_aliasing import find_first_reads
from optcc.runtime.samples import Draft, ring
from optcc.runtime.state import Compute, PostSend, RankProgram
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.schedule import COPY
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.verify.plan import verify_plan
from tests.sample import sampled

RANKS = 4
SIZE = 4 * 13_001


def plans() -> dict[str, Plan]:
    """Each AllReduce that is for four equal ranks, of one segment and of three."""
    found: dict[str, Plan] = {}
    topology = Topology.parse(f"{RANKS}@1GB/s")
    for name in SCHEDULES:
        for segments in (1, 3):
            try:
                plan = build_plan(name, topology, SIZE, segments=segments)
            except OptccError:
                continue  # for other networks, or for one segment only
            if plan.collective.name == "allreduce" and plan.buffer_bytes == SIZE:
                found[f"{name}, {segments}"] = plan
    return found


PLANS = plans()


def test_a_ring_reads_its_input_where_it_is() -> None:
    """Its own piece is sent, each other one is reduced once before anything else is written there."""
    program = RankProgram(ring(RANKS, SIZE), 1)
    found = find_first_reads(program, in_order=True)
    assert found is not None
    actions = [program.actions[index] for index in sorted(found)]
    assert [type(each) for each in actions].count(PostSend) == 1
    assert [type(each) for each in actions].count(Compute) == RANKS - 1


def test_there_is_no_telling_where_a_lane_is_not_in_order() -> None:
    draft = Draft(channels=[Channel(0, 1, 1), Channel(1, 0, 1)])
    there, back = draft.transfer(0, 1, COPY, 0, 0, 4), draft.transfer(1, 0, COPY, 0, 0, 4)
    draft.add(0, 0, SEND, 4, send=(0, there), src_offset=0)
    draft.add(1, 0, RECV, 4, recv=(0, there), dst_offset=0)
    draft.add(1, 0, SEND, 4, send=(1, back), src_offset=0)
    draft.add(0, 0, RECV, 4, recv=(1, back), dst_offset=0)
    plan = draft.finish("there and back", 2, 4, "int32", "sum")
    first, second = (RankProgram(plan, rank) for rank in range(2))
    assert len(find_first_reads(first, in_order=True) or ()) == 1
    assert find_first_reads(second, in_order=True) == frozenset()
    assert find_first_reads(first, in_order=False) is None


def test_what_is_never_written_must_be_copied() -> None:
    draft = Draft(channels=[Channel(0, 1, 1)])
    draft.add(0, 0, SEND, 4, send=(0, draft.transfer(0, 1, COPY, 0, 0, 4)), src_offset=0)
    draft.add(1, 0, RECV, 4, recv=(0, 0), dst_offset=0)
    plan = draft.finish("one way", 2, 8, "int32", "sum")
    assert [find_first_reads(RankProgram(plan, rank), in_order=True) for rank in range(2)] == [None, None]


def test_most_schedules_need_no_copy() -> None:
    found = [find_first_reads(RankProgram(plan, 0), in_order=True) is not None for plan in PLANS.values()]
    assert len(found) >= 6
    assert sum(found) >= len(found) / 2


@pytest.mark.parametrize("name", sampled(PLANS, every=3))
def test_the_bits_are_those_of_a_run_in_place(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And the input stays as it is; with another input, and another output, at every run."""
    plan, verdict = PLANS[name], verify_plan(PLANS[name])
    monkeypatch.setattr(buffers, "COPIED_BYTES_MAX", 0)
    monkeypatch.setattr(buffers, "TIED_BYTES_MIN", 0)

    def body(rank: int, transport: LoopbackTransport) -> bool:
        prepared = Engine(transport).prepare(plan, verdict)
        same = True
        arrays = [np.full(SIZE // 4, np.nan, np.float32) for _ in range(2)]
        for turn in range(4):
            send = make_input(rank, SIZE // 4, "float32", "sum") * (1 + turn)
            kept = send.copy()
            send.flags.writeable = False
            recv = arrays[turn % 2]
            prepared.start(send, recv).wait()
            in_place = kept.copy()
            prepared.start(in_place, in_place).wait()
            same &= send.tobytes() == kept.tobytes() and recv.tobytes() == in_place.tobytes()
        transport.barrier()
        return same

    assert run_ranks(RANKS, body) == [True] * RANKS
