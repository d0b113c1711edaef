"""The figure of a NIC that fails in a running job draws exactly its record, here one that is made up in the test."""

from __future__ import annotations

import pytest

from optcc.experiments.failure_trace import CONTENDERS, FailureTrace, TraceRow
from optcc.experiments.mid_collective import STATES
from optcc.experiments.passing_congestion import OPEN_MPI
from optcc.experiments.reducing_job import TimedRun
from optcc.paper_figures import failure_trace_steps
from tests.unit.paper_figures.test_figures import check_legible

collections = pytest.importorskip("matplotlib.collections", reason="no matplotlib: pip install 'optcc[viz]'")


def row(state: str, contender: str, seconds: float) -> TraceRow:
    """Runs one after the other, the last of which ends after twelve seconds; Open MPI's do not, where a NIC is down."""
    has_hung = contender == OPEN_MPI and state == "NIC down"
    count = int((5.0 if has_hung else 12.0) / seconds)
    runs = tuple(TimedRun(number * seconds, seconds, 0, 0) for number in range(count))
    return TraceRow(state, contender, 0.5, 0.6, 4.0, -1.0 if has_hung else 8.0, runs, has_hung)


RECORD = FailureTrace(
    *({}, {}, "4x2@400Mbit/s", 1 << 24),
    tuple(row(state, each, 0.6 + 0.2 * number) for state in STATES for number, each in enumerate(CONTENDERS)),
    {},
)


def test_every_run_is_the_records() -> None:
    table = failure_trace_steps.data(RECORD)
    assert [panel.state for panel in table.panels] == list(STATES)
    figure = failure_trace_steps.draw(table)
    for each in RECORD.rows:
        gid = f"runs:{each.state}:{each.contender}"
        (lines,) = (artist for artist in figure.findobj() if artist.get_gid() == gid)
        assert isinstance(lines, collections.LineCollection)
        assert [(x0, x1, y0, y1) for (x0, y0), (x1, y1) in lines.get_segments()] == [
            (run.began_s, run.began_s + run.seconds, *[pytest.approx(each.bound_s / run.seconds)] * 2)
            for run in each.runs
        ]
    for panel in table.panels:
        (optimum,) = (artist for artist in figure.findobj() if artist.get_gid() == f"optimum:{panel.state}")
        assert isinstance(optimum, collections.LineCollection)
        assert [y for (_, y), _ in optimum.get_segments()] == [1, pytest.approx(0.5 / 0.6), 1]
    texts = [text.get_text() for text in figure.findobj() if hasattr(text, "get_text")]
    assert [each for each in texts if "hung" in each] == [f"{OPEN_MPI}: hung"]
    check_legible(figure)


def test_numbers_are_those_of_the_rows() -> None:
    found = failure_trace_steps.numbers(failure_trace_steps.data(RECORD))
    assert found["nic-at-half/optcc/during/time-over-bound"].value == pytest.approx(0.6 / 0.6)
    assert found["nic-at-1-percent/open-mpi-ring-mptcp/after/time-over-bound"].value == pytest.approx(2.0)
    assert "nic-down/open-mpi-ring/after/time-over-bound" not in found
    # Each contender in each phase of each state, but for the last one of what hung.
    assert len(found) == 3 * len(RECORD.rows) - 1
