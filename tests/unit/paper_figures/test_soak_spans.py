"""The figure of a soak draws exactly its record, here one that is made up in the test."""

from __future__ import annotations

import pytest

from optcc.experiments.soak import KINDS, LOSSES, SLOW, STOPPED, Soak, SoakFault, SoakRun
from optcc.paper_figures import soak_spans
from tests.unit.paper_figures.test_figures import check_legible

patches = pytest.importorskip("matplotlib.patches", reason="no matplotlib: pip install 'optcc[viz]'")
collections = pytest.importorskip("matplotlib.collections", reason="no matplotlib: pip install 'optcc[viz]'")

RECORD = Soak(
    *({}, {}, "3x2@400Mbit/s", 1 << 25, 1, 0.5, 0.51),
    tuple(
        SoakFault(kind, number % 3, -1 if kind == STOPPED else number % 2, (0.0, 0.0), 1.0 + number, 0.5 + number / 8)
        for number, kind in enumerate(KINDS)
    ),
    tuple(SoakRun(1.5 * number, 1.0 + 0.25 * (number % 3), 1, number == 4, is_split=False) for number in range(8)),
    1.0,
)


def test_every_run_and_fault_is_the_records() -> None:
    figure = soak_spans.draw(soak_spans.data(RECORD))
    (lines,) = (each for each in figure.findobj() if each.get_gid() == "runs")
    assert isinstance(lines, collections.LineCollection)
    assert [(x0, x1, y) for (x0, y), (x1, _) in lines.get_segments()] == [
        (run.began_s, run.began_s + run.seconds, run.seconds / RECORD.bound_s) for run in RECORD.runs
    ]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["h0", "h0.eth0", "h0.eth1", "h1", "h1.eth0", "h1.eth1", "h2", "h2.eth0", "h2.eth1"]
    for kind, kinds in ((soak_spans.LOST, LOSSES), (SLOW, (SLOW,)), (STOPPED, (STOPPED,))):
        found = [each for each in figure.findobj() if each.get_gid() == f"faults:{kind}"]
        bars = [each for each in found if isinstance(each, patches.Rectangle)]
        drawn = {(names[round(bar.get_y() + bar.get_height() / 2)], bar.get_x(), bar.get_width()) for bar in bars}
        assert drawn == {
            (f"h{each.host}" + (f".eth{each.nic}" if each.nic >= 0 else ""), each.began_s, each.lasting_s)
            for each in RECORD.faults
            if each.kind in kinds
        }
    texts = [each.get_text() for each in figure.findobj() if hasattr(each, "get_text")]
    assert any("1 wrong elements" in text for text in texts)
    check_legible(figure)


def test_numbers_are_those_of_the_record() -> None:
    found = soak_spans.numbers(soak_spans.data(RECORD))
    assert {name: found[name].value for name in ("faults/lost", "faults/slow", "faults/stopped", "runs", "wrong")} == {
        **{"faults/lost": len(LOSSES), "faults/slow": 1, "faults/stopped": 1},
        **{"runs": len(RECORD.runs), "wrong": 1},
    }
    assert found["time-over-bound/most"].value == 3.0 and found["splits"].value == 0
