"""The figure of a NIC that fails in a job: throughput over time before, while and after, beside the optimum.

    data(record) -> TraceTable    what is drawn, all from the record
    draw(table) -> Figure         the picture, all from the table
    numbers(table)                its numbers for prose

A panel for each state, against time. A run is a line from its beginning to its end; its height is T* of healthy NICs
over its time, so the optimum is 1, and less while the NIC carries less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optcc.experiments.failure_trace import CONTENDERS, FailureTrace
from optcc.experiments.mid_collective import STATES
from optcc.experiments.passing_congestion import OPEN_MPI, OURS
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "failure-trace"
SAYS = (
    "A NIC fails in a running job and is healed later, and nobody is told: throughput over time beside the optimum for "
    "the NICs as they are, ours and Open MPI's ring over TCP and over MPTCP."
)
"""What the figure says, for a gallery."""
COLOURS = dict(zip(CONTENDERS, ("optcc", "mpi", "r2ccl-balance"), strict=True))
_HEAD_PT, _FOOT_PT, _LEFT_PT, _RIGHT_PT = 34.0, 26.0, 40.0, 8.0
_PANEL_PT, _GAP_PT = 74.0, 16.0
_SHADE = "#e3e3e3"
_ENDS_S = 1.0


@dataclass(frozen=True)
class TraceLine:
    """A contender's runs as (begin, end, T* over the time), seconds since the first one, and whether it hung."""

    contender: str
    runs: tuple[tuple[float, float, float], ...]
    has_hung: bool
    ratios: tuple[float | None, ...]


@dataclass(frozen=True)
class TracePanel:
    """A state: when it began and ended for ours, what is left of the optimum meanwhile, and the contenders."""

    state: str
    failed_s: float
    healed_s: float
    left: float
    lines: tuple[TraceLine, ...]


@dataclass(frozen=True)
class TraceTable:
    """The panels, one above the other."""

    hosts: str
    size: str
    panels: tuple[TracePanel, ...]


def data(record: FailureTrace) -> TraceTable:
    """The panels of a record."""
    panels = []
    for state in STATES:
        rows = sorted(
            (row for row in record.rows if row.state == state), key=lambda row: CONTENDERS.index(row.contender)
        )
        if rows:
            lines = tuple(
                TraceLine(
                    row.contender,
                    tuple((run.began_s, run.began_s + run.seconds, row.bound_s / run.seconds) for run in row.runs),
                    row.has_hung,
                    row.ratios(),
                )
                for row in rows
            )
            first = rows[0]
            panels.append(TracePanel(state, first.failed_s, first.healed_s, first.bound_s / first.bound_left_s, lines))
    return TraceTable(record.hosts, show_size(record.size_bytes), tuple(panels))


def numbers(table: TraceTable) -> dict[str, Number]:
    """The time over T* of each contender while the NIC has failed, where it did not hang."""
    found: dict[str, Number] = {}
    for panel in table.panels:
        for line in panel.lines:
            name = (
                f"{panel.state}/{line.contender}".lower().replace(" %", "-percent").replace(",", "").replace(" ", "-")
            )
            for phase, ratio in zip(("before", "during", "after"), line.ratios, strict=True):
                if ratio is not None:
                    found[f"{name}/{phase}/time-over-bound"] = Number(ratio, f"{ratio:.2f}")
    return found


def draw(table: TraceTable) -> Figure:
    """The picture, as wide as a page. Ids: `runs:STATE:CONTENDER`, `optimum:STATE`."""
    from matplotlib.lines import Line2D

    with style.applied():
        width = style.PAGE_IN * style.POINTS_IN
        n_panels = len(table.panels)
        height = _HEAD_PT + n_panels * _PANEL_PT + (n_panels - 1) * _GAP_PT + _FOOT_PT
        figure = style.new_figure(width, height)
        title = f"A NIC of {table.hosts} fails and is healed: AllReduces of {style.spaced(table.size)} in a row"
        figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold")
        shown = [each for each in CONTENDERS if any(line.contender == each for p in table.panels for line in p.lines)]
        handles = [Line2D([], [], color=style.colour("optimal"), linewidth=1.4)]
        handles += [Line2D([], [], color=style.colour(COLOURS[each]), linewidth=1.8) for each in shown]
        figure.legend(
            handles,
            ["optimum", *("optcc, told nothing" if each == OURS else each for each in shown)],
            loc="upper left",
            bbox_to_anchor=(_LEFT_PT / width, 1 - 15 / height),
            ncols=len(handles),
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.2,
        )
        until_s = max(end for panel in table.panels for line in panel.lines for _, end, _ in line.runs)
        for number, panel in enumerate(table.panels):
            bottom = height - _HEAD_PT - (number + 1) * _PANEL_PT - number * _GAP_PT
            rect = (_LEFT_PT / width, bottom / height, (width - _LEFT_PT - _RIGHT_PT) / width, _PANEL_PT / height)
            axes = figure.add_axes(rect)
            _draw_panel(axes, panel, until_s)
            if number == n_panels - 1:
                axes.set_xlabel("seconds", labelpad=1.5)
            else:
                axes.tick_params(axis="x", labelbottom=False)
        return figure


def _draw_panel(axes: Axes, panel: TracePanel, until_s: float) -> None:
    axes.set_xlim(0, until_s)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("T* / time")
    axes.set_title(f"{panel.state} (grey)", pad=2, loc="left", fontsize=style.SMALL_PT)
    axes.tick_params(labelsize=style.SMALL_PT)
    axes.axvspan(panel.failed_s, panel.healed_s, color=_SHADE, linewidth=0, zorder=0)
    begins = [0.0, panel.failed_s, panel.healed_s]
    ends = [panel.failed_s, panel.healed_s, until_s]
    heights = [1.0, panel.left, 1.0]
    gid, colour = f"optimum:{panel.state}", style.colour("optimal")
    axes.hlines(heights, begins, ends, color=colour, linewidth=1.4, zorder=2, gid=gid)
    # Ours last, above the others.
    for line in reversed(panel.lines):
        begins, ends, heights = (list(each) for each in zip(*line.runs, strict=True))
        colour = style.colour(COLOURS[line.contender])
        gid = f"runs:{panel.state}:{line.contender}"
        wide = 1.8 if line.contender == OURS else 1.2
        axes.hlines(heights, begins, ends, color=colour, linewidth=wide, zorder=4, gid=gid)
        if line.has_hung:
            up = 0.06 if line.contender == OPEN_MPI else 0.2
            axes.text(
                ends[-1] + _ENDS_S / 4, up, f"{line.contender}: hung", color=style.WRONG, size=style.SMALL_PT, zorder=5
            )
