"""The figure of NICs that fail in the middle of a long AllReduce: what each trial takes over the least.

    data(record) -> LossTable    what is drawn, all from the record
    draw(table) -> Figure        the picture, all from the table
    numbers(table)               its numbers for prose

A band for each state of the NICs and each way to run, in which a dot for each trial stands at its time over the least,
the higher the longer it took; a line marks the median.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from optcc.experiments.mid_collective import ARMS, MidCollective
from optcc.experiments.reducing_job import SLICES
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "mid-collective"
SAYS = (
    "A NIC fails in the middle of a long AllReduce, or two hosts lose all rails between them, and nobody is told: what "
    "each trial takes over the time until then and the bound of the rest, in slices, whose plans change, and in one "
    "run, whose plan does not."
)
"""What the figure says, for a gallery."""
_HEAD_PT, _FOOT_PT, _LEFT_PT, _RIGHT_PT, _BAND_PT = 29.0, 26.0, 108.0, 8.0, 22.0
_SPREAD = 0.7
"""Of a band, from the shortest trial to the longest."""


@dataclass(frozen=True)
class LossBand:
    """The trials of a state and a way to run, time over the least in rising order."""

    state: str
    way: str
    ratios: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.ratios)


@dataclass(frozen=True)
class LossTable:
    """The bands, those of a state together."""

    hosts: str
    size: str
    bands: tuple[LossBand, ...]


def data(record: MidCollective) -> LossTable:
    """The bands of a record, in its order."""
    bands = tuple(LossBand(row.state, row.arm, tuple(sorted(each.ratio for each in row.trials))) for row in record.rows)
    return LossTable(record.hosts, show_size(record.size_bytes), bands)


def numbers(table: LossTable) -> dict[str, Number]:
    """Of each band the median, the least and the most."""
    return {
        f"{band.state.lower().replace(' ', '-').replace('-%', '-percent')}/{band.way}/{what}": Number(
            ratio, f"{ratio:.2f}"
        )
        for band in table.bands
        for what, ratio in (("median", band.middle), ("least", band.ratios[0]), ("most", band.ratios[-1]))
    }


def draw(table: LossTable) -> Figure:
    """The picture, as wide as a column. Ids: `trials:STATE:WAY` of dots, `median:STATE:WAY`, `least` of the optimum."""
    with style.applied():
        width = style.COLUMN_IN * style.POINTS_IN
        height = _HEAD_PT + _BAND_PT * len(table.bands) + _FOOT_PT
        figure = style.new_figure(width, height)
        title = f"NICs fail amid an AllReduce of {style.spaced(table.size)}"
        figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold")
        said = f"{table.hosts}. A dot for each trial, a line at the median."
        where = 1 - (4 + style.TITLE_PT * style.LINE) / height
        figure.text(3 / width, where, said, va="top", size=style.SMALL_PT, color=style.FAINT)
        rect = (_LEFT_PT / width, _FOOT_PT / height, (width - _LEFT_PT - _RIGHT_PT) / width)
        axes = figure.add_axes((*rect, _BAND_PT * len(table.bands) / height))
        _draw_bands(axes, table)
        return figure


def _draw_bands(axes: Axes, table: LossTable) -> None:
    bands = table.bands
    axes.set_ylim(len(bands) - 0.5, -0.5)
    axes.set_yticks(range(len(bands)), [f"{band.state}, {ARMS[band.way]}" for band in bands])
    most = max(band.ratios[-1] for band in bands)
    axes.set_xlim(1 - 0.04 * (most - 1), 1 + 1.06 * (most - 1))
    axes.set_xlabel("time / (until the failure + T* of the rest)", labelpad=1.5, size=style.SMALL_PT)
    axes.grid(axis="x")
    axes.axvline(1, color=style.colour("optimal"), linewidth=1.4, zorder=2, gid="least")
    for number, band in enumerate(bands):
        if number and band.state != bands[number - 1].state:
            axes.axhline(number - 0.5, color=style.FAINT, linewidth=0.4, zorder=1)
        colour = style.colour("optcc" if band.way == SLICES else "mpi")
        name = f"{band.state}:{band.way}"
        places = style.stacked(number, len(band.ratios), _SPREAD)
        (dots,) = axes.plot(band.ratios, places, "o", color=colour, markersize=3.0, markeredgewidth=0.0, zorder=4)
        dots.set_gid(f"trials:{name}")
        axes.vlines(
            band.middle, number - 0.42, number + 0.42, color=style.INK, linewidth=1.1, zorder=5, gid=f"median:{name}"
        )
