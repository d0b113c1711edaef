"""The figure of hosts of which nobody declares anything draws exactly its record, here one made up in the test."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from optcc.experiments.untold import RANDOM, Untold, UntoldRow
from optcc.paper_figures import untold_dots
from optcc.paper_figures.untold_dots import OURS
from tests.unit.paper_figures.test_figures import check_legible

text = pytest.importorskip("matplotlib.text", reason="no matplotlib: pip install 'optcc[viz]'")
lines = pytest.importorskip("matplotlib.lines", reason="no matplotlib: pip install 'optcc[viz]'")


def row(state: str, seconds: float, **peers_s: tuple[float, ...]) -> UntoldRow:
    times = (seconds * 1.5, seconds, seconds * 0.99)
    return UntoldRow(state, "4x2@400Mbit/s", {}, "4@100MB/s", 1 << 26, 2.0, times, 2.0, "shares", 384, 0, peers_s)


RECORD = Untold(
    *({}, {}),
    (
        row("healthy", 2.02, Gloo=(2.0, 2.2, 2.1), MPICH=(3.0, 9.0, 3.2)),
        row("one NIC at half", 2.1, Gloo=(4.0, 4.2, 4.1)),
        *(row(f"{RANDOM} {number}", 2.0 + 0.3 * (number * 3 % 5)) for number in range(5)),
    ),
)


def test_every_mark_is_the_records() -> None:
    figure = untold_dots.draw(untold_dots.data(RECORD))
    found = {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}
    places = {}
    for each in RECORD.rows[:2]:
        wanted = {OURS: each.ratio} | {name: median(times) / 2.0 for name, times in each.peers_s.items()}
        for name, ratio in wanted.items():
            dot = found[f"dot:{each.state}:{name}"]
            assert isinstance(dot, lines.Line2D) and list(dot.get_xdata()) == [ratio]
            places[each.state] = list(dot.get_ydata())
        value = found[f"value:{each.state}"]
        assert isinstance(value, text.Text) and value.get_text() == f"{each.ratio:.2f}"
    assert places == {"healthy": [0], "one NIC at half": [1]}
    assert sum(str(gid).startswith("dot:") for gid in found) == 5, "MPICH was not run with a NIC at half"
    dots = found["random"]
    assert isinstance(dots, lines.Line2D)
    assert list(dots.get_xdata()) == sorted(each.ratio for each in RECORD.rows[2:])
    assert all(abs(place - 2) < 0.5 for place in dots.get_ydata())
    bound = found["bound"]
    assert isinstance(bound, lines.Line2D) and list(bound.get_xdata()) == [1, 1]
    low, high = figure.axes[0].get_xlim()
    assert low < 1 and high > 1.6, "MPICH's median"
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()][-1] == "5 random fabrics"
    assert any("did not end there" in each.get_text() for each in figure.texts), "MPICH, with a NIC at half"
    check_legible(figure)


def test_a_record_without_random_fabrics_or_peers_is_drawn_too() -> None:
    few = replace(RECORD, rows=(row("healthy", 2.02),))
    figure = untold_dots.draw(untold_dots.data(few))
    assert len(figure.axes[0].get_yticks()) == 1
    assert not any("did not end there" in each.get_text() for each in figure.texts)
    check_legible(figure)
    assert set(untold_dots.numbers(untold_dots.data(few))) == {f"healthy/{OURS}"}


def test_numbers_are_those_of_the_rows() -> None:
    found = untold_dots.numbers(untold_dots.data(RECORD))
    assert found["healthy/Gloo"].value == pytest.approx(1.05)
    assert found[f"one NIC at half/{OURS}"].text == "1.05"
    assert found["random/most"].value == max(each.ratio for each in RECORD.rows[2:])
    assert found["random/median"].value == median(each.ratio for each in RECORD.rows[2:])
    assert len(found) == 2 + 3 + 3
