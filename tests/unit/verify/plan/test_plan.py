"""The verifier's values: what a proof says, what a counterexample points at, and its limits."""

from __future__ import annotations

import pytest

from optcc.arrays import Lists, column
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN
from optcc.passes.depend import depend
from optcc.passes.lower import lower
from optcc.schedule import COPY, REDUCE
from optcc.schedules.registry import SCHEDULES
from optcc.transfers import Transfers
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Verdict
from optcc.verify.plan import verify_plan
from tests.negative.edits import Draft


def transfers(
    rows: list[tuple[int, int, int, int, int, int]],
    *,
    ranks: int = 2,
    elements: int = 2,
    scratch: int = 0,
    collective: str = "allreduce",
) -> Transfers:
    """Transfers from (src, dst, op, first element at src, at dst, elements)."""
    from optcc.collective import Collective

    scaled = [(s, d, op, 4 * a, 4 * b, 4 * n) for s, d, op, a, b, n in rows]
    src, dst, op, src_offset, dst_offset, size = (column(row[i] for row in scaled) for i in range(6))
    zeros, empty = column([0] * len(rows)), Lists.of([[]] * len(rows))
    head = (Collective(collective, ranks), "sum", "float32", 4 * elements, 4 * scratch, ("x",))
    body = (src, dst, op, src_offset, dst_offset, size)
    return depend(Transfers(*head, *body, zeros, zeros, zeros, empty, empty))


def judge(rows: list[tuple[int, int, int, int, int, int]], **shape: object) -> Verdict:
    """The verdict on the plan that performs `rows` in the order in which they stand."""
    made = transfers(rows, **shape)  # type: ignore[arg-type]
    return verify_plan(lower("x", made, column(range(len(made))), 2))


PAIR = [(0, 1, REDUCE, 0, 0, 2), (1, 0, COPY, 0, 0, 2)]


def test_a_proof_names_every_property() -> None:
    """All five, and the digest of the plan that was looked at."""
    plan = compile_schedule(SCHEDULES["ring"](n_ranks=3), size_bytes=24)
    verdict = verify_plan(plan)
    assert verdict.properties == dict.fromkeys(PROPERTIES, PROVED)
    assert (verdict.verdict, verdict.exit_code, verdict.counterexample) == (PROVED, EXIT_DONE, None)
    assert verdict.digest == plan.digest


def test_a_missing_contribution_is_named() -> None:
    """Rank, bytes, whose contribution, and the transfers that wrote there."""
    verdict = judge([PAIR[0], (1, 0, COPY, 0, 0, 1)])
    found = verdict.counterexample
    assert found is not None
    assert (verdict.verdict, verdict.exit_code) == (REFUTED, EXIT_REFUTED)
    assert (found.property, found.rank, found.first_byte, found.last_byte) == ("result", 0, 4, 7)
    assert "rank 1" in found.summary
    assert verdict.properties == {
        **{"matching": PROVED, "deadlock": PROVED, "races": PROVED, "result": REFUTED, "agreement": UNKNOWN}
    }


def test_a_contribution_counted_twice_shows_both_transfers() -> None:
    """The two transfers that met are in the trace."""
    verdict = judge([PAIR[0], PAIR[0], PAIR[1]])
    found = verdict.counterexample
    assert found is not None
    assert "rank 0 counted twice" in found.summary
    assert any("#0 0->1" in line for line in found.trace)
    assert any("#1 0->1" in line for line in found.trace)


def test_bytes_from_another_place_are_noticed() -> None:
    """A copy shifted by one element is not the result, though every rank contributed."""
    verdict = judge([PAIR[0], (1, 0, COPY, 1, 0, 1), (1, 0, COPY, 0, 1, 1)])
    assert verdict.counterexample is not None
    assert "another place" in verdict.counterexample.summary


def test_ranks_that_reduce_in_different_orders_disagree() -> None:
    """Both results are sums of everybody, but by different trees: refuted as agreement only."""
    rows = [
        *((0, 1, COPY, 0, 1, 1), (0, 2, COPY, 0, 1, 1), (1, 0, COPY, 0, 1, 1), (1, 2, COPY, 0, 2, 1)),
        *((2, 0, COPY, 0, 2, 1), (2, 1, COPY, 0, 2, 1)),
        *((rank, rank, REDUCE, each, 0, 1) for rank in range(3) for each in (1, 2)),
    ]
    verdict = judge(rows, ranks=3, elements=1, scratch=2)
    assert verdict.counterexample is not None
    assert verdict.counterexample.property == "agreement"
    assert verdict.properties["result"] == PROVED


def test_two_ranks_may_swap_and_add() -> None:
    """With two ranks a + b and b + a are the same tree: reduction is commutative, not associative."""
    rows = [(0, 1, COPY, 0, 1, 1), (1, 0, COPY, 0, 1, 1), (0, 0, REDUCE, 1, 0, 1), (1, 1, REDUCE, 1, 0, 1)]
    assert judge(rows, elements=1, scratch=1).verdict == PROVED


@pytest.mark.parametrize(
    ("collective", "rows"),
    [
        ("broadcast", [(0, 1, COPY, 0, 0, 2)]),
        ("reduce", [(1, 0, REDUCE, 0, 0, 2)]),
        ("allgather", [(0, 1, COPY, 0, 0, 1), (1, 0, COPY, 1, 1, 1)]),
        ("reducescatter", [(1, 0, REDUCE, 0, 0, 1), (0, 1, REDUCE, 1, 1, 1)]),
    ],
)
def test_every_collective_can_be_proved_and_refuted(
    collective: str, rows: list[tuple[int, int, int, int, int, int]]
) -> None:
    """The right transfers are proved; without the last one, or with a reduction for a copy, they are refuted."""
    assert judge(rows, collective=collective).verdict == PROVED
    assert judge(rows[:-1], collective=collective).verdict == REFUTED
    turned = [(s, d, 1 - op, a, b, n) for s, d, op, a, b, n in rows]
    assert judge(turned, collective=collective).verdict == REFUTED


def test_reading_what_was_never_written() -> None:
    """Broadcast from a rank that holds nothing."""
    verdict = judge([(1, 0, COPY, 0, 0, 2)], collective="broadcast")
    assert verdict.counterexample is not None
    assert "never written" in verdict.counterexample.summary


def test_copies_that_overlap_themselves_are_refused() -> None:
    """A local copy from bytes to the bytes beside them, overlapping: its result depends on how it is done."""
    rows = [*PAIR, (0, 0, COPY, 0, 2, 2), (0, 0, COPY, 2, 3, 2)]
    assert judge(rows, scratch=4).verdict == REFUTED


def test_shifting_for_ever_is_unknown() -> None:
    """Copies that shift a long message by one element cut it into too many pieces: unknown, not a verdict."""
    rows = [(0, 1, COPY, 0, 1, 900), (1, 0, COPY, 0, 0, 900)]
    verdict = judge(rows, elements=1000)
    assert (verdict.verdict, verdict.exit_code) == (UNKNOWN, EXIT_UNKNOWN)
    assert verdict.properties["races"] == PROVED
    assert verdict.properties["result"] == UNKNOWN


def test_a_deadlock_names_its_circle() -> None:
    """Two ranks that wait for each other's message before they send their own."""
    plan = compile_schedule(SCHEDULES["ring"](n_ranks=2), size_bytes=8, fused=False)
    draft = Draft.of(plan)
    for rank in (0, 1):
        draft.find(rank, "send").after = [draft.find(rank, "receive-reduce")]
    verdict = verify_plan(draft.build())
    assert verdict.counterexample is not None
    assert verdict.counterexample.property == "deadlock"
    assert len(verdict.counterexample.trace) >= 4
    assert verdict.properties["races"] == UNKNOWN


def test_counterexamples_name_the_author_s_line() -> None:
    """The line of the schedule that made the transfer is in the trace."""

    @schedule
    def twice(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    built = twice(n_ranks=2)
    verdict = verify_plan(compile_schedule(built, size_bytes=8))
    assert verdict.counterexample is not None
    assert f"(line {built[1].line})" in str(verdict.counterexample)


@pytest.mark.parametrize(("ranks", "elements", "verdict"), [(1, 4, PROVED), (3, 0, PROVED), (2, 4, REFUTED)])
def test_doing_nothing(ranks: int, elements: int, verdict: str) -> None:
    """An empty plan is right only where there is nothing to do."""
    assert judge([], ranks=ranks, elements=elements).verdict == verdict
