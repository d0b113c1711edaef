"""The figure of a NIC that fails amid a collective draws exactly its record, here one that is made up in the test."""

from __future__ import annotations

from statistics import median

import pytest

from optcc.experiments.mid_collective import ARMS, LOSSES, LossTrial, MidCollective, MidCollectiveRow
from optcc.paper_figures import mid_collective_dots
from tests.unit.paper_figures.test_figures import check_legible

collections = pytest.importorskip("matplotlib.collections", reason="no matplotlib: pip install 'optcc[viz]'")
lines = pytest.importorskip("matplotlib.lines", reason="no matplotlib: pip install 'optcc[viz]'")

RECORD = MidCollective(
    *({}, {}, "4x2@400Mbit/s", 1 << 28),
    tuple(
        MidCollectiveRow(
            *(state, arm, 1.0, 1.5, 1.01),
            tuple(
                LossTrial(0.5, 2.0 + 0.1 * (each * 7 % 5) + 0.3 * number, 2.0, 1, 1.6, 0, 0.0)
                for each in range(5 - number)
            ),
        )
        for number, (state, arm) in enumerate([(state, arm) for state in list(LOSSES)[-2:] for arm in ARMS])
    ),
)


def test_every_trial_is_the_records() -> None:
    figure = mid_collective_dots.draw(mid_collective_dots.data(RECORD))
    found = {artist.get_gid(): artist for artist in figure.findobj() if artist.get_gid()}
    for number, row in enumerate(RECORD.rows):
        dots = found[f"trials:{row.state}:{row.arm}"]
        assert isinstance(dots, lines.Line2D)
        ratios = sorted(each.ratio for each in row.trials)
        assert list(dots.get_xdata()) == ratios
        places = list(dots.get_ydata())
        assert places == sorted(places, reverse=True) and all(abs(each - number) < 0.5 for each in places)
        mark = found[f"median:{row.state}:{row.arm}"]
        assert isinstance(mark, collections.LineCollection)
        (segment,) = mark.get_segments()
        assert [x for x, _ in segment] == [median(ratios)] * 2
    least = found["least"]
    assert isinstance(least, lines.Line2D) and list(least.get_xdata()) == [1, 1]
    low, high = figure.axes[0].get_xlim()
    assert low < 1 and high > max(each.ratio for row in RECORD.rows for each in row.trials)
    check_legible(figure)


def test_numbers_are_those_of_the_rows() -> None:
    found = mid_collective_dots.numbers(mid_collective_dots.data(RECORD))
    assert len(found) == 3 * len(RECORD.rows)
    row = RECORD.rows[-1]
    assert found["no-rail-in-common/whole/median"].value == median(each.ratio for each in row.trials)
    assert found["no-rail-in-common/whole/most"].value == max(each.ratio for each in row.trials)
    assert found["nic-at-1-percent/slices/least"].value == min(each.ratio for each in RECORD.rows[0].trials)
