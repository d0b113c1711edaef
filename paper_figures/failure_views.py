"""The figure of a NIC that dies in a training run, as `optcc status`, taps and traces show it.

    data(record) -> SeenTable    what is drawn, all from the record
    draw(table) -> Figure        the picture, all from the table
    numbers(table)               its numbers for prose

Above, against the time since the failure: what each NIC receives, how long each step takes, and the norms of the
gradients before and after they are averaged. Below: what each host sends and receives in an AllReduce before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optcc.experiments.seen_failure import SeenFailure, TracedStep
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "seen-failure"
SAYS = (
    "A NIC goes down in a training run, as `optcc status`, taps and traces show it: named at once, "
    "planned around within seconds, no gradient lost."
)
"""What the figure says, for a gallery."""
_HEAD_PT, _FOOT_PT, _LEFT_PT, _RIGHT_PT = 30.0, 24.0, 50.0, 8.0
_PANEL_PT, _GAP_PT, _TRACE_PT = 78.0, 15.0, 92.0
_MB = 1e6
_FAILED = "#d55e00"


@dataclass(frozen=True)
class SeenTable:
    """What is drawn: `receiving` by NIC, `norms` by point and rank: points (seconds, value); `steps` (from, to)."""

    record: SeenFailure
    receiving: dict[str, list[tuple[float, float]]]
    norms: dict[str, list[tuple[float, float]]]
    steps: list[tuple[float, float]]


def data(record: SeenFailure) -> SeenTable:
    """The lines of a record."""
    receiving = {
        name: [(sample.at_s, sample.receiving[number] / _MB) for sample in record.samples]
        for number, name in enumerate(record.nics)
    }
    norms: dict[str, list[tuple[float, float]]] = {}
    for each in record.norms:
        norms.setdefault(f"{each.point}:{each.rank}", []).append((each.at_s, each.l2))
    since_s = record.samples[0].at_s
    steps = [(each.began_s, each.ended_s) for each in record.steps if each.ended_s > since_s]
    return SeenTable(record, receiving, norms, steps)


def numbers(table: SeenTable) -> dict[str, Number]:
    """For prose: when it was named and planned around, and steps before and after."""
    record = table.record
    found = {
        "named-after/seconds": Number.seconds(record.first_down_s),
        "replanned-after/seconds": Number.seconds(record.replanned_s),
        "before/step-seconds": Number.seconds(record.seconds(record.steps[0].epoch)),
        "after/step-seconds": Number.seconds(record.seconds(record.steps[-1].epoch)),
    }
    for trace in record.traces:
        found[f"{trace.when}/allreduce-seconds"] = Number.seconds(trace.seconds)
        found[f"{trace.when}/predicted-seconds"] = Number.seconds(trace.predicted_s)
    return found


def draw(table: SeenTable) -> Figure:
    """The picture, as wide as a page. Ids: `nic:NAME`, `steps`, `norm:POINT:RANK`, `trace:WHEN:RANK:WAY`."""
    with style.applied():
        return _draw(table)


def _draw(table: SeenTable) -> Figure:
    record = table.record
    width = style.PAGE_IN * style.POINTS_IN
    height = _HEAD_PT + 3 * (_PANEL_PT + _GAP_PT) + 26 + _TRACE_PT + _FOOT_PT
    figure = style.new_figure(width, height)
    title = f"{record.failed} goes down in a training run on {record.hosts}: what is seen of it"
    figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold")
    said = f"Gradients of {record.n_bytes / _MB:.1f} MB, averaged in each step. "
    said += (
        "Dotted: the failure, then new plans. Rings: steps that are traced. Below, messages: darker where several are."
    )
    where = 1 - (4 + style.TITLE_PT * style.LINE) / height
    figure.text(3 / width, where, said, va="top", size=style.SMALL_PT, color=style.FAINT)
    top_pt, panels = _HEAD_PT, []
    for draw_panel in (_draw_receiving, _draw_steps, _draw_norms):
        rect = (_LEFT_PT, height - top_pt - _PANEL_PT, width - _LEFT_PT - _RIGHT_PT, _PANEL_PT)
        axes = figure.add_axes((rect[0] / width, rect[1] / height, rect[2] / width, rect[3] / height))
        draw_panel(axes, table)
        axes.set_xlim(record.samples[0].at_s, record.steps[-1].ended_s)
        for at_s in (0.0, record.replanned_s):
            axes.axvline(at_s, color=style.FAINT, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)
        axes.grid(axis="y")
        axes.yaxis.set_label_coords(-(_LEFT_PT - 20) / rect[2], 0.5)
        panels.append(axes)
        top_pt += _PANEL_PT + _GAP_PT
    for axes in panels[:2]:
        axes.tick_params(axis="x", labelbottom=False)
    panels[-1].set_xlabel("seconds since the failure", labelpad=1.5)
    _draw_traces(figure, record.traces, width, height)
    return figure


def _draw_receiving(axes: Axes, table: SeenTable) -> None:
    failed = table.record.failed
    for name, points in table.receiving.items():
        look: dict[str, Any] = {"color": style.FAINT, "linewidth": 0.6, "alpha": 0.5, "zorder": 3}
        if name == failed:
            look = {"color": _FAILED, "linewidth": 1.6, "zorder": 5}
        axes.plot(*zip(*points, strict=True), gid=f"nic:{name}", label=name if name == failed else None, **look)
    axes.plot([], [], color=style.FAINT, linewidth=0.6, label="the other NICs")
    axes.legend(loc="upper right", ncols=2)
    axes.set_ylabel("MB/s in\n(status)")
    axes.set_ylim(0, None)


def _draw_steps(axes: Axes, table: SeenTable) -> None:
    x = [end for _, end in table.steps]
    y = [end - begin for begin, end in table.steps]
    axes.plot(x, y, color=style.colour("optimal"), marker="o", markersize=2.5, linewidth=0.8, gid="steps")
    traced = {trace.step for trace in table.record.traces}
    rings = [(each.ended_s, each.ended_s - each.began_s) for each in table.record.steps if each.step in traced]
    axes.plot(
        *zip(*rings, strict=True), "o", markersize=6, markerfacecolor="none", color=style.INK, markeredgewidth=0.6
    )
    axes.set_ylabel("seconds\na step")
    axes.set_ylim(0, 1.08 * max(y))


def _draw_norms(axes: Axes, table: SeenTable) -> None:
    for key, points in table.norms.items():
        point, _, rank = key.partition(":")
        colour = style.colour("ring" if point == "input" else "optimal")
        label = {"input": "gradient of a rank", "output": "their mean"}[point] if rank == "0" else None
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, gid=f"norm:{key}", label=label)
    axes.legend(loc="upper right", ncols=2)
    axes.set_ylabel("norm\n(taps)")
    axes.set_ylim(0, 1.35 * max(norm for points in table.norms.values() for _, norm in points))


def _draw_traces(figure: Figure, traces: tuple[TracedStep, ...], width: float, height: float) -> None:
    gap_pt = 24.0
    each_pt = (width - _LEFT_PT - _RIGHT_PT - gap_pt) / 2
    longest_s = max(trace.seconds for trace in traces)
    for number, trace in enumerate(traces):
        x = _LEFT_PT + number * (each_pt + gap_pt)
        axes = figure.add_axes((x / width, _FOOT_PT / height, each_pt / width, _TRACE_PT / height))
        ranks = sorted({*trace.src, *trace.dst})
        rows = [(rank, way) for rank in ranks for way in ("out", "in")]
        for place, (rank, way) in enumerate(rows):
            ends = trace.src if way == "out" else trace.dst
            spans = [
                (begin, end - begin)
                for own, begin, end in zip(ends, trace.posted_s, trace.arrived_s, strict=True)
                if own == rank
            ]
            colour = style.colour("ring" if way == "out" else "optcc")
            axes.broken_barh(
                spans, (place - 0.4, 0.8), color=colour, alpha=0.25, linewidth=0, gid=f"trace:{trace.when}:{rank}:{way}"
            )
        axes.axvline(trace.predicted_s, color=style.INK, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.set_yticks(range(len(rows)), [f"h{rank} {way}" for rank, way in rows])
        axes.tick_params(axis="y", labelsize=style.SMALL_PT)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.04 * longest_s)
        axes.set_xlabel("seconds in the AllReduce", labelpad=1.5)
        title = f"{trace.when}, by {trace.plan}: {trace.seconds:.3f} s; predicted, dashed, {trace.predicted_s:.3f} s"
        axes.set_title(title, size=style.LABEL_PT, weight="bold", loc="left", pad=3)
