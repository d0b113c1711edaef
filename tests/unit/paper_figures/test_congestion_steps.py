"""The figure of congestion that comes and goes draws exactly its record, here one that is made up in the test."""

from __future__ import annotations

import pytest

from optcc.experiments.passing_congestion import OPEN_MPI, OURS, CongestionRow, PassingCongestion
from optcc.experiments.reducing_job import TimedRun
from optcc.paper_figures import congestion_steps
from tests.unit.paper_figures.test_figures import check_legible

collections = pytest.importorskip("matplotlib.collections", reason="no matplotlib: pip install 'optcc[viz]'")

LASTING_S = (1.0, 2.0)


def row(lasting_s: float, contender: str, seconds: float) -> CongestionRow:
    """Runs of that length, one after the other, for four periods, of which half the time is congestion."""
    until_s = 8 * lasting_s
    runs = tuple(TimedRun(number * seconds, seconds, number % 2, 0) for number in range(max(1, int(until_s / seconds))))
    spans = tuple((begin * lasting_s, (begin + 1) * lasting_s) for begin in range(1, 8, 2))
    return CongestionRow(lasting_s, contender, 1.0, 2.0, 1.0, spans, runs)


def runs_of(row: CongestionRow) -> str:
    """The id of its lines."""
    return f"runs:{row.contender}:{row.lasting_s:g}"


RECORD = PassingCongestion(
    *({}, {}, "4x2@400Mbit/s", 1 << 26),
    tuple(row(each, who, taken) for each in LASTING_S for who, taken in ((OURS, 1.5), (OPEN_MPI, 3.0))),
)


def test_every_run_is_the_records() -> None:
    table = congestion_steps.data(RECORD)
    assert [[panel.contender for panel in each] for each in table.rows] == [[OURS] * 2, [OPEN_MPI] * 2]
    figure = congestion_steps.draw(table)
    for each in RECORD.rows:
        (lines,) = (artist for artist in figure.findobj() if artist.get_gid() == runs_of(each))
        assert isinstance(lines, collections.LineCollection)
        drawn = [((x0, x1), y0, y1) for (x0, y0), (x1, y1) in lines.get_segments()]
        said = [((run.began_s, run.began_s + run.seconds), *[each.possible_in(run)] * 2) for run in each.runs]
        assert drawn == [(span, pytest.approx(low), pytest.approx(high)) for span, low, high in said]
    texts = {text.get_text() for text in figure.findobj() if hasattr(text, "get_text")}
    assert {f"{each.ratio:.2f}" for each in RECORD.rows} <= texts
    check_legible(figure)


def test_numbers_are_those_of_the_rows() -> None:
    found = congestion_steps.numbers(congestion_steps.data(RECORD))
    ours = next(each for each in RECORD.rows if each.contender == OURS and each.lasting_s == 2)
    assert found["2-s/optcc/time-over-least"].value == ours.ratio
    assert found["2-s/optcc/changes-of-plans"].value == sum(run.epochs for run in ours.runs) > 0
    assert "2-s/open-mpi-ring/changes-of-plans" not in found  # MPI has no plans
    assert len(found) == len(RECORD.rows) + len(LASTING_S)
