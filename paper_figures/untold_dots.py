"""The figure of hosts of which nobody declares anything: ours and other libraries over the bound.

    data(record) -> UntoldTable    what is drawn, all from the record
    draw(table) -> Figure          the picture, all from the table
    numbers(table)                 its numbers for prose

A row for each state of the hosts, with the median of each contender; the random fabrics, on which ours ran alone, share
the last row, a dot for each. The scale is logarithmic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

from optcc.experiments.untold import Untold, UntoldRow
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "untold"
SAYS = (
    "AllReduce on emulated hosts of which nobody declares anything: ours measures the NICs and is near the lower bound "
    "T* in every named state, and farther from it on some random fabrics; other libraries wait for the slowest."
)
"""What the figure says, for a gallery."""
OURS = "ours"
_MARKS = ("s", "^", "D", "v", "P", "X")
"""Marks of the peers, by name."""
_TICKS = (1, 1.5, 2, 3, 5, 10)
_LEAST = 0.55
"""Where the scale begins: before the bound there is room for our ratios."""
_LEFT_PT, _RIGHT_PT, _FOOT_PT, _ROW_PT, _HEAD_PT, _LEGEND_PT, _GAP_PT = 108.0, 8.0, 24.0, 13.0, 22.0, 10.0, 3.0
_LEGEND_COLUMNS = 2
_SPREAD = 0.6
"""Of the row of the random fabrics, from the nearest to the bound to the farthest."""


@dataclass(frozen=True)
class UntoldTable:
    """The states that have peers, those that are random, and the names of the peers."""

    states: tuple[UntoldRow, ...]
    random: tuple[UntoldRow, ...]
    peers: tuple[str, ...]

    @property
    def lacks_a_result(self) -> bool:
        """Whether a peer that ran elsewhere has no times in a state: it did not end there."""
        return any(name not in row.peers_s for row in self.states for name in self.peers)

    @property
    def random_ratios(self) -> tuple[float, ...]:
        """Of the random fabrics, our medians over the bound in rising order."""
        return tuple(sorted(row.ratio for row in self.random))


def data(record: Untold) -> UntoldTable:
    """The rows of a record, in its order."""
    peers = sorted({name for row in record.rows for name in row.peers_s})
    states = tuple(row for row in record.rows if not row.is_random)
    return UntoldTable(states, tuple(row for row in record.rows if row.is_random), tuple(peers))


def numbers(table: UntoldTable) -> dict[str, Number]:
    """Of each state what each contender takes over the bound; of the random fabrics the median, the least, the most."""
    found = {f"{row.state}/{OURS}": _ratio(row.ratio) for row in table.states}
    found |= {f"{row.state}/{name}": _ratio(row.ratio_of(name)) for row in table.states for name in row.peers_s}
    ratios = table.random_ratios
    if ratios:
        for what, ratio in (("median", median(ratios)), ("least", ratios[0]), ("most", ratios[-1])):
            found[f"random/{what}"] = _ratio(ratio)
    return found


def _ratio(value: float) -> Number:
    return Number(value, f"{value:.2f}")


def draw(table: UntoldTable) -> Figure:
    """The picture, as wide as a column. Ids: `dot:STATE:CONTENDER`, `value:STATE`, `random`, `bound`."""
    with style.applied():
        width = style.COLUMN_IN * style.POINTS_IN
        rows = len(table.states) + bool(table.random)
        said = ["Medians over the lower bound T*, which nothing can beat."]
        if table.lacks_a_result:
            said.append("A library without a mark in a row did not end there.")
        head_pt = _HEAD_PT + (len(said) - 1) * style.SMALL_PT * style.LINE
        legend_pt = _LEGEND_PT * -(-(1 + len(table.peers)) // _LEGEND_COLUMNS) + _GAP_PT
        height = head_pt + legend_pt + _ROW_PT * rows + _FOOT_PT
        figure = style.new_figure(width, height)
        title = "AllReduce where nobody declares anything"
        figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold")
        where = 1 - (4 + style.TITLE_PT * style.LINE) / height
        figure.text(3 / width, where, "\n".join(said), va="top", size=style.SMALL_PT, color=style.FAINT)
        rect = (_LEFT_PT / width, _FOOT_PT / height, (width - _LEFT_PT - _RIGHT_PT) / width, _ROW_PT * rows / height)
        axes = figure.add_axes(rect)
        _draw_scale(axes, table, rows)
        for number, row in enumerate(table.states):
            _draw_state(axes, row, number, table.peers)
        if table.random:
            _draw_random(axes, table, rows - 1)
        _draw_legend(figure, table, 1 - head_pt / height)
        return figure


def _draw_scale(axes: Axes, table: UntoldTable, rows: int) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    reached = [row.ratio for row in (*table.states, *table.random)]
    reached += [row.ratio_of(name) for row in table.states for name in row.peers_s]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_TICKS, [f"{each:g}" for each in _TICKS])
    axes.set_xlim(_LEAST, 1.08 * max(1.5, *reached))
    names = [row.state for row in table.states]
    axes.set_yticks(range(rows), [*names, *([f"{len(table.random)} random fabrics"] if table.random else [])])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlabel("time / T*", labelpad=1.5)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.axvline(1, color=style.INK, linewidth=0.9, zorder=2, gid="bound")


def _draw_state(axes: Axes, row: UntoldRow, place: int, peers: tuple[str, ...]) -> None:
    for name, marker in _marked(peers):
        if name in row.peers_s:
            look = _peer_look(marker)
            axes.plot([row.ratio_of(name)], [place], zorder=3, gid=f"dot:{row.state}:{name}", **look)
    axes.plot([row.ratio], [place], zorder=4, gid=f"dot:{row.state}:{OURS}", **_our_look())
    style.put_ratio(axes, row.ratio, _LEAST, place, f"value:{row.state}")


def _draw_random(axes: Axes, table: UntoldTable, place: int) -> None:
    ratios = table.random_ratios
    places = style.stacked(place, len(ratios), _SPREAD)
    axes.plot(ratios, places, zorder=4, gid="random", **{**_our_look(), "markersize": 2.4})
    axes.axhline(place - 0.5, color=style.FAINT, linewidth=0.4, zorder=1)


def _marked(peers: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every peer with its mark; two have the same if there are more of them than marks."""
    return list(zip(peers, cycle(_MARKS), strict=False))


def _our_look() -> dict[str, Any]:
    return {"marker": "o", "markersize": 4.2, "color": style.colour("optimal"), "linestyle": "none"}


def _peer_look(marker: str) -> dict[str, Any]:
    look = {"markerfacecolor": "white", "markeredgecolor": style.FAINT, "markeredgewidth": 0.8}
    return {"marker": marker, "markersize": 3.8, "linestyle": "none", **look}


def _draw_legend(figure: Figure, table: UntoldTable, top: float) -> None:
    from matplotlib.lines import Line2D

    peers = _marked(table.peers)
    shown = [Line2D([], [], **_our_look()), *(Line2D([], [], **_peer_look(marker)) for _, marker in peers)]
    figure.legend(
        shown,
        [OURS, *(name for name, _ in peers)],
        loc="upper left",
        bbox_to_anchor=(0.01, top),
        ncols=_LEGEND_COLUMNS,
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.25,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1.6,
    )
