"""The figure of failures: overhead over the fault-free ring against the number of failed NICs, for each schedule.

    data(record) -> FailureTable    what is drawn, all from the record
    draw(table) -> Figure           the picture, all from the table
    numbers(table)                  its numbers for prose

A column for each number of servers. Lines are medians over the trials, fluid, by formula; the shade above a line goes
up to the 95th percentile, and bars are the worst trials. Marks are medians of what was simulated, with a size and a
latency. The scale is logarithmic.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from optcc.experiments.failure_study import Cell, FailureStudy
from optcc.experiments.failure_times import SEGMENTS
from optcc.experiments.trial_statistics import MEDIAN, P95, quantile
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_rate, show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "failure-curves"
SAYS = (
    "NICs that fail anywhere in a cluster: how much longer an AllReduce takes by each schedule, in the "
    "median, in bad and in the worst of the trials."
)
"""What the figure says, for a gallery."""
PANELS_MAX = 4
_LOOK = {
    "ring-failover": ("ring, whole channels", "ring", "s"),
    "r2ccl-balance": ("R2CCL-Balance", "r2ccl-balance", "v"),
    "r2ccl-allreduce": ("R2CCL-AllReduce", "r2ccl-allreduce", "^"),
    "optcc": ("OptCC", "optcc", "D"),
    "optimal": ("optimal (ours)", "optimal", "o"),
}
"""For each column that is drawn: its name, whose colour it has, and its mark."""
_SIMULATED = {"ring": "r2ccl-balance"}
"""Balance on a plan is the ring's plan: the run of the one is the mark of the other."""
_WIDE_PT, _TALL_PT = 4.0, 150.0
_LEFT_PT, _RIGHT_PT, _GAP_PT = 33.0, 8.0, 9.0
_HEAD_PT, _FOOT_PT = 52.0, 25.0
_PERCENT_MIN, _PERCENT_MAX = 0.008, 1100.0


@dataclass(frozen=True)
class FailurePanel:
    """A number of servers: its cells by failed NICs, and simulated medians in percent by column and failed NICs."""

    servers: int
    cells: tuple[tuple[int, Cell], ...]
    simulated: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True)
class FailureTable:
    """The record, its panels by rising number of servers, and the size of the simulated messages, if there are any."""

    record: FailureStudy
    panels: tuple[FailurePanel, ...]
    size_bytes: int | None


def data(record: FailureStudy) -> FailureTable:
    """The smallest and the largest clusters of a record, and between them those with simulated cases first."""
    size_bytes = max((run.size_bytes for run in record.runs), default=None)
    counts = sorted({cell.servers for _, cell in record.uniform()})
    panels = [_panel(record, servers, size_bytes) for servers in counts]
    ends = {counts[0], counts[-1]} if counts else set()
    wanted = sorted(panels, key=lambda panel: (panel.servers not in ends, -len(panel.simulated), panel.servers))
    return FailureTable(record, tuple(sorted(wanted[:PANELS_MAX], key=lambda panel: panel.servers)), size_bytes)


def _panel(record: FailureStudy, servers: int, size_bytes: int | None) -> FailurePanel:
    cells = tuple(each for each in record.uniform() if each[1].servers == servers)
    runs = record.simulated(servers, size_bytes) if size_bytes is not None else {}
    simulated = []
    for name in SEGMENTS:
        for failed, cell in cells:
            if all((outcome.left, name) in runs for outcome in cell.outcomes):
                values = sorted((Fraction(runs[o.left, name].over_fault_free), o.trials) for o in cell.outcomes)
                median = _percent(quantile(values, MEDIAN).value)
                simulated.append((_SIMULATED.get(name, name), failed, median))
    return FailurePanel(servers, cells, tuple(simulated))


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def numbers(table: FailureTable) -> dict[str, Number]:
    """Overheads in percent: median, mean with its interval, 95th percentile, worst; and the simulated medians."""
    found = {}
    for panel in table.panels:
        for failed, cell in panel.cells:
            for name in _LOOK:
                key = f"{panel.servers}-servers/{failed}-failed/{name}"
                average = cell.mean(name)
                for what, ratio in (
                    ("median", cell.quantile(name, MEDIAN).value),
                    ("p95", cell.quantile(name, P95).value),
                    ("worst", cell.worst(name)),
                    ("mean", average.value),
                    ("mean-low", average.low),
                    ("mean-high", average.high),
                ):
                    found[f"{key}/{what}-percent"] = Number.percent(_percent(ratio), 2)
        for name, failed, median in panel.simulated:
            key = f"{panel.servers}-servers/{failed}-failed/{name}/simulated-median-percent"
            found[key] = Number.percent(median, 2)
    found["trials"] = Number.whole(table.record.trials)
    return found


def draw(table: FailureTable) -> Figure:
    """The picture, as wide as a page.

    Ids: `median:SERVERS:COLUMN`, `p95:...`, `worst:...` and `simulated:...`.
    """
    with style.applied():
        return _draw(table)


def _draw(table: FailureTable) -> Figure:
    width = style.PAGE_IN * style.POINTS_IN
    height = _HEAD_PT + _TALL_PT + _FOOT_PT
    figure = style.new_figure(width, height)
    record = table.record

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(3 / width, 1 - y_pt / height, text, va="top", **how)

    put(3, "Failed NICs anywhere in the cluster: what an AllReduce takes longer", size=style.TITLE_PT, weight="bold")
    said = (
        f"{record.nics} NICs a server, {record.trials:,} trials. Lines: medians, fluid; shade: to the 95th percentile; "
        "bars: worst trials."
    )
    if table.size_bytes is not None:
        rate = style.spaced(show_rate(record.nics * record.nic_rate))
        said += f" Marks: simulated medians, {style.spaced(show_size(table.size_bytes))}, {rate} a server."
    put(4 + style.TITLE_PT * style.LINE, said, size=style.SMALL_PT, color=style.FAINT)
    count = max(len(table.panels), 1)
    panel_pt = (width - _LEFT_PT - _RIGHT_PT - (count - 1) * _GAP_PT) / count
    for number, panel in enumerate(table.panels):
        x = _LEFT_PT + number * (panel_pt + _GAP_PT)
        axes = figure.add_axes((x / width, _FOOT_PT / height, panel_pt / width, _TALL_PT / height))
        _draw_panel(axes, panel)
        if number:
            axes.tick_params(axis="y", which="both", labelleft=False)
        else:
            axes.set_ylabel("over the fault-free ring (%)")
            axes.yaxis.set_label_coords(-(_LEFT_PT - 9) / panel_pt, 0.5)
    _draw_legend(figure, table, width, height)
    return figure


def _draw_legend(figure: Figure, table: FailureTable, width: float, height: float) -> None:
    from matplotlib.lines import Line2D

    simulated = {name for panel in table.panels for name, _, _ in panel.simulated}
    shown = [
        Line2D([], [], linewidth=1.1, **(_mark(name) if name in simulated else {"color": _mark(name)["color"]}))
        for name in _LOOK
    ]
    figure.legend(
        shown,
        [label for label, _, _ in _LOOK.values()],
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - (_HEAD_PT - 25) / height),
        ncols=len(shown),
        borderaxespad=0,
        borderpad=0,
        handlelength=2.2,
        handletextpad=0.5,
        columnspacing=1.8,
    )


def _mark(name: str) -> dict[str, Any]:
    _, colour, marker = _LOOK[name]
    return {
        "color": style.colour(colour),
        "marker": marker,
        "markersize": _WIDE_PT,
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }


def _draw_panel(axes: Axes, panel: FailurePanel) -> None:
    most = max((failed for failed, _ in panel.cells), default=1)
    axes.set_xlim(0.5, most + 0.5)
    axes.set_xticks([failed for failed in (1, 2, 4, 6, 8, 10) if failed <= most])
    axes.set_xlabel("failed NICs", labelpad=1.5)
    axes.set_yscale("log")
    axes.set_ylim(_PERCENT_MIN, _PERCENT_MAX)
    axes.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["0.01", "0.1", "1", "10", "100", "1000"])
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=style.LABEL_PT, length=2.5, width=0.6)
    axes.set_title(f"{panel.servers} servers", size=style.LABEL_PT, weight="bold", loc="left", pad=3)
    axes.grid(axis="both")
    failed = [each for each, _ in panel.cells]
    for name, (_, colour, _) in _LOOK.items():
        shade = style.colour(colour)
        key = f"{panel.servers}:{name}"
        medians = [_percent(cell.quantile(name, MEDIAN).value) for _, cell in panel.cells]
        p95 = [_percent(cell.quantile(name, P95).value) for _, cell in panel.cells]
        worst = [_percent(cell.worst(name)) for _, cell in panel.cells]
        axes.fill_between(failed, medians, p95, color=shade, alpha=0.18, linewidth=0, zorder=2.5)
        axes.plot(failed, medians, color=shade, linewidth=1.1, zorder=3, gid=f"median:{key}")
        axes.plot(failed, p95, color=shade, linewidth=0.4, zorder=2.8, gid=f"p95:{key}")
        axes.plot(
            failed, worst, color=shade, linestyle="none", marker="_", markersize=5.0, zorder=4, gid=f"worst:{key}"
        )
        own = [(count, median) for column, count, median in panel.simulated if column == name]
        if own:
            xs, ys = [count for count, _ in own], [median for _, median in own]
            axes.plot(xs, ys, **_mark(name), linestyle="none", zorder=5, gid=f"simulated:{key}")
