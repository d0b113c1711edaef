"""The figure of servers of several GPUs that lost NICs: time over the certified bound against the NICs lost.

    data(record) -> LostNicsTable    what is drawn, all from the record
    draw(table) -> Figure            the picture, all from the table
    numbers(table)                   its numbers for prose

A panel for each number of servers of eight GPUs, on a logarithmic scale: the field's schedules, ForestColl's value and
ours; the thick line at 1 is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optcc.experiments.lost_nics import GPUS, PORTS, SIZE_BYTES, LostNics, LostNicsRecord
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "lost-nics"
SAYS = (
    "One server of eight GPUs loses NICs: the schedules of NCCL, R2CCL, OptCC and of trees against the "
    "certified bound T*; ours stay within some percent of it."
)
"""What the figure says, for a gallery."""
OURS, FORESTCOLL = "ours", "forestcoll"
LOOK = {
    "nccl-ring": ("NCCL ring; R2CCL-Balance is the same", "ring", "s"),
    "r2ccl-nics": ("R2CCL-AllReduce", "r2ccl-allreduce", "^"),
    "hierarchical-nics": ("hierarchical, pipelined", "hierarchical", "P"),
    FORESTCOLL: ("ForestColl's value: reduce-scatter, then all-gather", "mpi", ""),
    "nccl-tree": ("NCCL double tree", "nccl-tree", "X"),
    "optcc-nics": ("OptCC", "optcc", "D"),
    OURS: ("ours", "optimal", "o"),
}
"""For each line its name, whose colour it has, and its mark; later ones on top of the others."""
BOUND: dict[str, Any] = {"color": style.INK, "linewidth": 1.6}
"""How the bound is drawn."""
_HIGH_PT, _HEAD_PT, _FOOT_PT = 150.0, 62.0, 27.0
_LEFT_PT, _RIGHT_PT, _GAP_PT = 31.0, 6.0, 9.0
_TICKS = (1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4)


@dataclass(frozen=True)
class LostNicsTable:
    """For each number of servers and each line the NICs lost, and the time over the bound."""

    panels: tuple[tuple[int, dict[str, list[tuple[float, float]]]], ...]


def data(record: LostNicsRecord) -> LostNicsTable:
    """The lines of a record, by rising number of servers."""
    panels = []
    eights = [case for case in record.cases if case.gpus == GPUS]
    for servers in sorted({case.servers for case in eights}):
        own = [case for case in eights if case.servers == servers]
        panels.append((servers, {name: _line(record, own, name) for name in LOOK}))
    return LostNicsTable(tuple(panels))


def _line(record: LostNicsRecord, cases: Sequence[LostNics], name: str) -> list[tuple[float, float]]:
    points = []
    for case in cases:
        ours = record.ours(case)
        if name == OURS:
            points.append((case.lost, ours.ratio))
        elif name == FORESTCOLL:
            points.append((case.lost, ours.forestcoll_s / ours.bound_s))
        elif name in record.of(case):
            points.append((case.lost, record.of(case)[name].ratio))
    return points


def numbers(table: LostNicsTable) -> dict[str, Number]:
    """Percent over the bound: of each line and case, and the most of each line."""
    found = {}
    for servers, lines in table.panels:
        for name, points in lines.items():
            for lost, ratio in points:
                key = f"{servers}-servers/{lost:g}-lost/{name}/over-bound-percent"
                found[key] = Number.percent(100 * (ratio - 1))
    for name in LOOK:
        every = [ratio for _, lines in table.panels for _, ratio in lines[name]]
        if every:
            found[f"most/{name}/over-bound-percent"] = Number.percent(100 * (max(every) - 1))
    return found


def draw(table: LostNicsTable) -> Figure:
    """The picture, as wide as a page. Ids of lines: `line:SERVERS:NAME`, and `bound:SERVERS`."""
    with style.applied():
        return _draw(table)


def _draw(table: LostNicsTable) -> Figure:
    most = max((ratio for _, lines in table.panels for each in lines.values() for _, ratio in each), default=1)
    lines = dict(table.panels)

    def draw_panel(axes: Axes, servers: int) -> None:
        _draw_panel(axes, servers, lines[servers], 1.06 * most)

    title = f"One server of {GPUS} GPUs loses NICs: what schedules of an AllReduce take"
    return draw_panels(title, "time / T*", tuple(LOOK), tuple(lines), draw_panel)


def draw_panels(
    title: str, measured: str, names: Sequence[str], servers: Sequence[int], draw_panel: Callable[[Axes, int], None]
) -> Figure:
    """A figure as wide as a page: title, conditions, a legend of the lines `names` and the bound, and a panel for each
    number of servers, drawn by `draw_panel`; `measured` is on the common vertical axis. Call it within the style."""
    from matplotlib.lines import Line2D

    width, height = style.PAGE_IN * style.POINTS_IN, _HEAD_PT + _HIGH_PT + _FOOT_PT
    figure = style.new_figure(width, height)

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(3 / width, 1 - y_pt / height, text, va="top", **how)

    put(3, title, size=8, weight="bold")
    size = style.spaced(show_size(SIZE_BYTES))
    said = (
        f"{size}, NICs of 50 GB/s, fabric 450 GB/s a GPU, {PORTS} ports, PXN charged; each with its best segments, "
        "at most 2\u00b2\u2070 transfers."
    )
    put(4 + 8 * style.LINE, said, size=style.SMALL_PT, color=style.FAINT)
    panel = (width - _LEFT_PT - _RIGHT_PT - (len(servers) - 1) * _GAP_PT) / max(1, len(servers))
    for number, each in enumerate(servers):
        x = _LEFT_PT + number * (panel + _GAP_PT)
        axes = figure.add_axes((x / width, _FOOT_PT / height, panel / width, _HIGH_PT / height))
        axes.set_title(f"{each} servers", size=style.LABEL_PT, weight="bold", loc="left", pad=3)
        axes.grid(axis="both")
        draw_panel(axes, each)
        if number:
            axes.tick_params(axis="y", which="both", labelleft=False)
        else:
            axes.set_ylabel(measured, labelpad=1)
    figure.legend(
        [*(Line2D([], [], **look_of(name)) for name in names), Line2D([], [], **BOUND)],
        [*(LOOK[name][0] for name in names), "certified bound T*"],
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - 26 / height),
        ncols=4,
        borderaxespad=0,
        borderpad=0,
        handlelength=2.0,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    return figure


def look_of(name: str) -> dict[str, Any]:
    """How the line of a name in `LOOK` is drawn."""
    _, coloured, marker = LOOK[name]
    look: dict[str, Any] = {"color": style.colour(coloured), "linewidth": 0.9}
    if not marker:
        return {**look, "linestyle": (0, (4, 2))}
    return {**look, "marker": marker, "markersize": 4.0, "markeredgecolor": "white", "markeredgewidth": 0.4}


def _draw_panel(axes: Axes, servers: int, lines: dict[str, list[tuple[float, float]]], most: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(0.97, most)
    ticks = [each for each in _TICKS if each <= most]
    axes.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axes.minorticks_off()
    axes.set_xlim(-0.3, GPUS - 0.7)
    axes.set_xticks(range(GPUS))
    axes.set_xlabel("NICs lost", labelpad=1.5)
    axes.axhline(1, **BOUND, zorder=3, gid=f"bound:{servers}")
    for name, points in lines.items():
        xs, ys = [lost for lost, _ in points], [ratio for _, ratio in points]
        axes.plot(xs, ys, **look_of(name), zorder=5, gid=f"line:{servers}:{name}")
