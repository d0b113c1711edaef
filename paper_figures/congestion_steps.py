"""The figure of congestion that comes and goes at a NIC: what each AllReduce takes beside what the NICs could carry.

    data(record) -> CongestionTable    what is drawn, all from the record
    draw(table) -> Figure              the picture, all from the table
    numbers(table)                     its numbers for prose

A panel for each contender and each length of the congestion, against time. A run is a line from its beginning to its
end; its height is the number of AllReduces that the NICs, as they were meanwhile, could have carried: 1 is the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optcc.experiments.passing_congestion import CONTENDERS, OURS, PassingCongestion
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "passing-congestion"
SAYS = (
    "A NIC falls to half of its rate and rises again, for as long each: what each AllReduce takes over the least that "
    "the NICs allow at that moment, ours told nothing beside Open MPI's ring."
)
"""What the figure says, for a gallery."""
SHOWN_PERIODS, SHOWN_S = 3, 8.0
"""So many periods are shown, and so long, at least."""
_HEAD_PT, _FOOT_PT, _LEFT_PT, _RIGHT_PT = 34.0, 26.0, 40.0, 6.0
_PANEL_PT, _GAP_PT, _BETWEEN_PT = 62.0, 9.0, 8.0
_SHADE = "#e3e3e3"


@dataclass(frozen=True)
class CongestionPanel:
    """Runs as (begin, end, AllReduces that were possible), and the congestion, seconds since the first run."""

    lasting_s: float
    contender: str
    until_s: float
    runs: tuple[tuple[float, float, float], ...]
    congested: tuple[tuple[float, float], ...]
    ratio: float
    changes: int


@dataclass(frozen=True)
class CongestionTable:
    """The panels: a row of them for each contender, a column for each length of the congestion."""

    hosts: str
    size: str
    rows: tuple[tuple[CongestionPanel, ...], ...]


def data(record: PassingCongestion) -> CongestionTable:
    """The panels of a record."""
    lasting = sorted({row.lasting_s for row in record.rows})
    found = {(row.contender, row.lasting_s): row for row in record.rows}
    rows = []
    for contender in CONTENDERS:
        panels = []
        for each in lasting:
            row = found.get((contender, each))
            if row is not None:
                until_s = max(SHOWN_S, 2 * SHOWN_PERIODS * each)
                runs = tuple((run.began_s, run.began_s + run.seconds, row.possible_in(run)) for run in row.runs)
                panels.append(CongestionPanel(each, contender, until_s, runs, row.congested, row.ratio, row.changes))
        if panels:
            rows.append(tuple(panels))
    return CongestionTable(record.hosts, show_size(record.size_bytes), tuple(rows))


def numbers(table: CongestionTable) -> dict[str, Number]:
    """The time over the least of each panel, and how often ours changed plans."""
    found: dict[str, Number] = {}
    for panel in (each for row in table.rows for each in row):
        name = f"{panel.lasting_s:g}-s/{panel.contender.lower().replace(' ', '-')}"
        found[f"{name}/time-over-least"] = Number(panel.ratio, f"{panel.ratio:.2f}")
        if panel.contender == OURS:
            found[f"{name}/changes-of-plans"] = Number.whole(panel.changes)
    return found


def draw(table: CongestionTable) -> Figure:
    """The picture, as wide as a page. Ids: `runs:CONTENDER:SECONDS`, `least:CONTENDER:SECONDS`."""
    with style.applied():
        width = style.PAGE_IN * style.POINTS_IN
        n_rows = len(table.rows)
        height = _HEAD_PT + n_rows * _PANEL_PT + (n_rows - 1) * _GAP_PT + _FOOT_PT
        figure = style.new_figure(width, height)
        title = f"Congestion that comes and goes at one NIC of {table.hosts}: AllReduces of {style.spaced(table.size)}"
        figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold")
        said = "Grey: the NIC at half of its rate. Green line: the least that the NICs allow. A line for each run; "
        said += "in a panel, the time of all over the least."
        where = 1 - (4 + style.TITLE_PT * style.LINE) / height
        figure.text(3 / width, where, said, va="top", size=style.SMALL_PT, color=style.FAINT)
        most = max(taken for row in table.rows for panel in row for *_, taken in panel.runs)
        for number, row in enumerate(table.rows):
            bottom = height - _HEAD_PT - (number + 1) * _PANEL_PT - number * _GAP_PT
            panel_width = (width - _LEFT_PT - _RIGHT_PT - (len(row) - 1) * _BETWEEN_PT) / len(row)
            for column, panel in enumerate(row):
                left = _LEFT_PT + column * (panel_width + _BETWEEN_PT)
                rect = (left / width, bottom / height, panel_width / width, _PANEL_PT / height)
                axes = figure.add_axes(rect)
                _draw_panel(axes, panel, 1.1 * most)
                if column:
                    axes.tick_params(axis="y", labelleft=False)
                else:
                    axes.set_ylabel(f"{panel.contender}\ntime / least")
                    axes.yaxis.set_label_coords(-16 / panel_width, 0.5)
                if number:
                    axes.set_xlabel("seconds", labelpad=1.5)
                else:
                    axes.set_title(
                        f"{panel.lasting_s:g} s at half, {panel.lasting_s:g} s at full rate",
                        pad=2,
                        fontsize=style.SMALL_PT,
                    )
                    axes.tick_params(axis="x", labelbottom=False)
        return figure


def _draw_panel(axes: Axes, panel: CongestionPanel, most: float) -> None:
    axes.set_xlim(0, panel.until_s)
    axes.set_ylim(0, most)
    axes.tick_params(labelsize=style.SMALL_PT)
    for begin, end in panel.congested:
        axes.axvspan(begin, end, color=_SHADE, linewidth=0, zorder=0)
    name = f"{panel.contender}:{panel.lasting_s:g}"
    axes.axhline(1, color=style.colour("optimal"), linewidth=1.4, zorder=2, gid=f"least:{name}")
    colour = style.colour("optcc" if panel.contender == OURS else "mpi")
    begins, ends, taken = zip(*panel.runs, strict=True)
    axes.hlines(taken, begins, ends, color=colour, linewidth=1.6, zorder=4, gid=f"runs:{name}")
    axes.text(
        0.97, 0.06, f"{panel.ratio:.2f}", ha="right", va="bottom", transform=axes.transAxes, weight="bold", zorder=6
    )
