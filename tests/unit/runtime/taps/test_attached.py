"""What taps take of a run is what the interpreter has at every stage; what has no room is dropped, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import InputError
from optcc.plan import Plan
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.taps.findings import by_run, check_stages, statistics, trace_nans
from optcc.runtime.taps.policy import POINTS, Tap
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from tests.unit.runtime.taps.tapped_ranks import EVERYTHING, inputs_of, run_tapped

DEFAULT = [("ring", 3), ("recursive-doubling", 4), ("optcc", 5)]
"""Long messages one by one, short ones whose steps are remembered, and one with scratch."""


def plan_of(name: str, n_ranks: int, size_bytes: int = 1 << 10, n_segments: int = 2) -> Plan:
    topology = Topology.parse(f"{n_ranks}@1GB/s")
    return compile_schedule(SCHEDULES[name].build(topology, n_segments), size_bytes=size_bytes)


def check_all(plan: Plan) -> None:
    """Every byte at every point of two runs is the interpreter's, and nothing is missing."""
    records, counters = run_tapped(plan, EVERYTHING, n_runs=2)
    checks = check_stages(plan, records)
    assert [check.run for check in checks] == [(1, 1), (1, 2)]
    assert all(not check.wrong for check in checks), checks[0].wrong[:1]
    n_transfers = len(plan.transfers)
    n_local = int((plan.transfers.src == plan.transfers.dst).sum())
    wholes = sum(plan.collective.before(r, 64) != [] for r in range(plan.n_ranks))
    wholes += sum(plan.collective.after(r, 64) != [] for r in range(plan.n_ranks))
    for check in checks:
        assert check.n_compared == 3 * n_transfers - 2 * n_local + wholes
    assert sum(each["records"] for each in counters) == len(records)
    keys = [record.key for record in records]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("name", "n_ranks"), DEFAULT)
def test_every_byte_is_the_interpreters(name: str, n_ranks: int) -> None:
    check_all(plan_of(name, n_ranks))


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", range(2, 9))
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_byte_of_every_schedule(name: str, n_ranks: int) -> None:
    try:
        plans = [plan_of(name, n_ranks), plan_of(name, n_ranks, 1 << 18, 3)]
    except InputError as error:
        pytest.skip(str(error))
    for plan in plans:
        check_all(plan)


def test_condensed_records_are_those_of_the_interpreter() -> None:
    plan = plan_of("ring", 3)
    tap = Tap(("sample", "norms", "histogram", "checksum", "guard"), points=POINTS, stride=3)
    records, _ = run_tapped(plan, tap)
    inputs = dict(enumerate(inputs_of(plan)))
    (check,) = check_stages(plan, records, {rank: each for rank, each in inputs.items() if each is not None})
    assert check.n_compared == len(records) == 5 * (3 * len(plan.transfers) + 6)
    assert check.wrong == ()
    with pytest.raises(InputError, match="input of rank 0: must be given, or taken"):
        check_stages(plan, records)


def test_averages_are_divided_in_the_output_alone() -> None:
    topology = Topology.parse("3@1GB/s")
    schedule = SCHEDULES["ring"].build(topology, 1)
    plan = compile_schedule(schedule, size_bytes=768, reduction="avg")
    records, _ = run_tapped(plan, EVERYTHING)
    (check,) = check_stages(plan, records)
    assert check.wrong == ()
    assert check.n_compared == 3 * len(plan.transfers) + 6


class _WrongAt(NumpyKernels):
    """Sums are one too large in one element, once."""

    def __init__(self) -> None:
        super().__init__("float32", "sum")
        add, self.n_calls = self.reduce, 0

        def reduce(target: Any, source: Any) -> None:
            add(target, source)
            self.n_calls += 1
            if self.n_calls == 2:
                target[5] += 1

        self.reduce = reduce

    __slots__ = ("n_calls",)


@pytest.mark.parametrize("what", ["full", "checksum"])
def test_a_corrupted_reduction_is_named(what: str) -> None:
    """The first wrong chunk is that of the transfer whose reduction went wrong; what follows from it comes behind."""
    plan = plan_of("ring", 4, 1 << 18, 1)
    tap = Tap((what,), points=("sent", "arrived", "result"))  # type: ignore[arg-type]
    records, _ = run_tapped(plan, tap, Tap(("full",), points=("input",)), kernels={2: _WrongAt()})
    (check,) = check_stages(plan, records)
    first = check.wrong[0].record
    assert (first.rank, first.dst, first.point, first.stage) == (2, 2, "result", "reduce-scatter")
    assert "rank 2 has computed it wrongly" in check.wrong[0].text
    assert f"transfer #{first.transfer} 1->2" in check.wrong[0].text
    assert check.wrong[0].element == (5 if what == "full" else -1)
    assert len(check.wrong) > 1


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "optcc"])
def test_a_nan_is_traced_to_its_rank(name: str, culprit: int) -> None:
    plan = plan_of(name, 4)
    inputs = [np.ones(plan.size_bytes // 4, np.float32) for _ in range(4)]
    inputs[culprit][100] = np.nan
    records, _ = run_tapped(plan, Tap(("guard",), points=("sent", "arrived", "result")), inputs=list(inputs))
    origins = trace_nans(plan, records)
    assert [origin.ranks for origin in origins] == [(culprit,)]
    assert f"comes from rank {culprit}" in origins[0].text


def test_two_nans_and_one_that_a_reduction_makes() -> None:
    plan = plan_of("ring", 4)
    guard = Tap(("guard",), points=("sent", "arrived", "result"))
    inputs = [np.ones(256, np.float32) for _ in range(4)]
    inputs[1][3] = inputs[2][200] = np.nan
    records, _ = run_tapped(plan, guard, inputs=list(inputs))
    assert sorted(origin.ranks for origin in trace_nans(plan, records)) == [(1,), (2,)]
    inputs = [np.full(256, 3e38 if rank < 2 else 0.0, np.float32) for rank in range(4)]
    guard = Tap(("guard",), points=("input", "sent", "arrived", "result"))
    records, _ = run_tapped(plan, guard, inputs=list(inputs))
    assert [origin.ranks for origin in trace_nans(plan, records)] == [()]
    assert trace_nans(plan, run_tapped(plan, guard)[0]) == []


def test_statistics_of_gradients() -> None:
    plan = plan_of("ring", 3)
    inputs = [np.full(256, rank + 1.0, np.float32) for rank in range(3)]
    records, _ = run_tapped(plan, Tap(("norms",), points=("input", "output")), inputs=list(inputs))
    rows = {(row.rank, row.point): row for row in statistics(records)}
    assert rows[2, "input"].l2 == pytest.approx(3 * 16)
    assert [rows[rank, "output"].l2 for rank in range(3)] == [pytest.approx(6 * 16)] * 3
    assert (rows[0, "output"].least, rows[0, "output"].largest, rows[0, "output"].n) == (6.0, 6.0, 256)


# --- what is not taken


def test_overflow_is_counted_exactly() -> None:
    """Without a drain as many runs are taken as have room, the same number at every rank, and the rest is counted."""
    plan = plan_of("ring", 3)
    n_runs = 50
    _, counters = run_tapped(plan, EVERYTHING, n_runs=n_runs, ring_bytes=1 << 15, is_drained=False)
    whole, _ = run_tapped(plan, EVERYTHING)
    per_run = len(whole) // 3
    for rank, each in enumerate(counters):
        bytes_per_run = sum(len(record.data) for record in whole if record.rank == rank)
        assert 0 < each["runs"] < n_runs
        assert each["runs"] + each["full_runs"] == n_runs
        assert each["records"] == per_run * each["runs"]
        assert each["full_records"] == per_run * each["full_runs"]
        assert each["bytes"] == bytes_per_run * each["runs"]
        assert each["full_bytes"] == bytes_per_run * each["full_runs"]


def test_as_much_is_taken_as_has_room() -> None:
    plan = plan_of("ring", 3)
    tap = Tap(("full",), points=POINTS, when_full="sample")
    n_runs = 20
    records, counters = run_tapped(plan, tap, n_runs=n_runs, ring_bytes=1 << 12)
    whole, _ = run_tapped(plan, tap)
    per_run = len(whole) // 3
    for rank, each in enumerate(counters):
        assert each["full_runs"] == 0
        assert each["records"] + each["full_records"] == n_runs * per_run
        assert each["records"] == sum(record.rank == rank for record in records) > 0
    inputs = dict(enumerate(inputs_of(plan)))
    assert all(not c.wrong for c in check_stages(plan, records, {r: v for r, v in inputs.items() if v is not None}))


def test_budgets_of_bytes_and_time() -> None:
    plan = plan_of("ring", 3)
    _, counters = run_tapped(plan, Tap(("full",), budget_bytes=64), n_runs=3)
    assert [(each["runs"], each["budget_runs"]) for each in counters] == [(0, 3)] * 3
    _, counters = run_tapped(plan, Tap(("full",), share=1e-9), n_runs=5)
    # The first run has been taken before its cost was known.
    assert [(each["runs"], each["time_runs"]) for each in counters] == [(1, 4)] * 3


def test_one_of_so_many_runs_and_chunks() -> None:
    """Chunks take turns: over as many runs as there are turns each was taken once."""
    plan = plan_of("ring", 3)
    tap = Tap(("full",), points=("result",), every=2, chunks=3, ranks=(1,))
    records, counters = run_tapped(plan, tap, n_runs=6)
    assert sorted(by_run(records, plan)) == [(1, 1), (1, 3), (1, 5)]
    mine = np.flatnonzero(plan.transfers.dst == 1)
    assert sorted(record.transfer for record in records) == mine.tolist()
    assert [each["full_runs"] for each in counters] == [0] * 3


def test_stages_and_segments() -> None:
    plan = plan_of("ring", 3)
    records, _ = run_tapped(plan, Tap.parse("checksum stage=reduce* segments=1 points=sent"))
    assert {(record.stage, record.segment, record.point) for record in records} == {("reduce-scatter", 1, "sent")}
    assert records
    assert run_tapped(plan, Tap.parse("full collective=broadcast"))[0] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Invalid enum value"),
        ("full,full", "what: full, full: must be one or more, each once"),
        ("full evry=2", "'evry=2': must be one of .*every"),
        ("full every=0", "every: Expected `int` >= 1"),
        ("full ranks=3-1", "ranks: '3-1': must be a number, or several as 0,2-5"),
        ("full full=wait", "when_full: Invalid enum value 'wait'"),
        ("full share=2", "share: Expected `float` <= 1"),
    ],
)
def test_wrong_taps_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Tap.parse(text)
