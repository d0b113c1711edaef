"""The figure of a sweep over sizes: time and bus bandwidth against the size, a line a schedule, and the bound.

    sweeps(record) -> tuple[Sweep, ...]   what is drawn, all from the record: a figure for each state of the hosts
    without_sweeps(record) -> Record      the record's other rows, if there are any
    draw(sweep) -> Figure                 the picture
    numbers(sweep)                        its numbers for prose

A line is the median of the undisturbed runs out of place, in place where there are no others; a shade goes from the
least to the greatest of them. The black line is the bound T*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optcc.experiments.record import BenchTiming, Record, busbw
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "size-curves"
SAYS = (
    "Time and bus bandwidth of an AllReduce against the size of the message, measured: below some size "
    "latency decides, above it the bound T*."
)
"""What the figure says, for a gallery."""
SIZES_MIN = 3
"""Fewer sizes are bars."""
_TITLES = {"allreduce": "AllReduce", "reducescatter": "ReduceScatter", "allgather": "AllGather"}
_TITLES |= {"alltoall": "AllToAll"}
_TALL_PT, _LEFT_PT, _RIGHT_PT, _GAP_PT = 130.0, 36.0, 8.0, 44.0
_HEAD_PT, _FOOT_PT = 48.0, 26.0


@dataclass(frozen=True)
class Sweep:
    """What all points have in common, where they were measured, and the rows of each schedule by rising size."""

    name: str
    title: str
    where: str
    curves: tuple[tuple[str, tuple[BenchTiming, ...]], ...]
    bounds_s: tuple[tuple[int, float], ...]


def _family(row: BenchTiming) -> tuple[str, str, str, str, int, int, str]:
    return row.collective, row.dtype, row.reduction, row.bed, row.ranks, row.root, row.topology


def _is_swept(record: Record) -> Mapping[tuple[str, str, str, str, int, int, str], bool]:
    sizes: dict[tuple[str, str, str, str, int, int, str], set[int]] = {}
    for row in record.rows:
        if row.size_bytes:
            sizes.setdefault(_family(row), set()).add(row.size_bytes)
    return {family: len(found) >= SIZES_MIN for family, found in sizes.items()}


def sweeps(record: Record) -> tuple[Sweep, ...]:
    """The sweeps of a record, in the order in which they were measured."""
    found = []
    for family, is_swept in _is_swept(record).items():
        if not is_swept:
            continue
        rows = sorted((row for row in record.rows if _family(row) == family), key=lambda row: row.size_bytes)
        rows = [row for row in rows if row.size_bytes]
        collective, dtype, reduction, bed, ranks, root, topology = family
        kind = [] if (dtype, reduction) == ("float32", "sum") else [dtype, reduction]
        place = [] if root < 0 else [f"root{root}"]
        named = [] if bed in ("given", "healthy") else ["".join(c if c.isalnum() else "-" for c in bed.lower())[:40]]
        on = f" on {topology}" if topology else ""
        found.append(
            Sweep(
                "-".join([NAME, collective, f"{ranks}ranks", *kind, *place, *named]),
                f"{_TITLES.get(collective, collective.capitalize())} of {dtype}, {ranks} ranks",
                f"{bed}{on}",
                tuple(
                    (name, tuple(row for row in rows if row.schedule == name))
                    for name in sorted({row.schedule for row in rows}, key=style.order)
                ),
                tuple({row.size_bytes: row.bound_s for row in rows if row.bound_s}.items()),
            )
        )
    return tuple(found)


def without_sweeps(record: Record) -> Record | None:
    """The record of the rows that are in no sweep; None if there are none."""
    swept = _is_swept(record)
    rows = tuple(row for row in record.rows if not swept.get(_family(row), False))
    return replace(record, rows=rows) if rows else None


def numbers(sweep: Sweep) -> dict[str, Number]:
    """Seconds, bus bandwidth and percent of the bound by schedule and size."""
    found = {}
    for name, rows in sweep.curves:
        for row in rows:
            key = f"{name}/{show_size(row.size_bytes)}"
            found[f"{key}/seconds"] = Number.seconds(row.seconds)
            found[f"{key}/busbw"] = Number.seconds(row.busbw)
            if row.bound_percent is not None:
                found[f"{key}/bound-percent"] = Number.percent(row.bound_percent)
    return found


def draw(sweep: Sweep) -> Figure:
    """The picture, as wide as a page. Ids: `time:SCHEDULE`, `busbw:SCHEDULE`; `bound` in the place of a schedule."""
    with style.applied():
        return _draw(sweep)


def _draw(sweep: Sweep) -> Figure:
    width = style.PAGE_IN * style.POINTS_IN
    height = _HEAD_PT + _TALL_PT + _FOOT_PT
    figure = style.new_figure(width, height)
    figure.text(3 / width, 1 - 3 / height, sweep.title, va="top", size=style.TITLE_PT, weight="bold")
    y = 1 - (4 + style.TITLE_PT * style.LINE) / height
    where = f"{style.label(sweep.where, 120)}. Lines: medians; shades: least to greatest; black: the bound."
    figure.text(3 / width, y, where, va="top", size=style.SMALL_PT, color=style.FAINT)
    panel_pt = (width - _LEFT_PT - _RIGHT_PT - _GAP_PT) / 2
    row = sweep.curves[0][1][0]
    for place, (label, kind) in enumerate((("time", "time"), ("bus bandwidth (GB/s)", "busbw"))):
        x = _LEFT_PT + place * (panel_pt + _GAP_PT)
        axes = figure.add_axes((x / width, _FOOT_PT / height, panel_pt / width, _TALL_PT / height))
        _draw_panel(axes, sweep, kind, row)
        axes.set_ylabel(label)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - (_HEAD_PT - 22) / height),
        ncols=min(len(labels), 7),
        borderaxespad=0,
        borderpad=0,
        handlelength=2.0,
        handletextpad=0.5,
        columnspacing=1.6,
    )
    return figure


def _draw_panel(axes: Axes, sweep: Sweep, kind: str, first: BenchTiming) -> None:
    from matplotlib.ticker import EngFormatter

    def value(size_bytes: int, seconds: float) -> float:
        return seconds if kind == "time" else busbw(size_bytes, seconds, first.ranks, first.collective, first.bus_share)

    sizes = sorted({row.size_bytes for _, rows in sweep.curves for row in rows})
    axes.set_xscale("log", base=2)
    if kind == "time":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(EngFormatter("s"))  # the default is for mathtext, which figures have off
    for name, rows in sweep.curves:
        look: dict[str, Any] = {"color": style.colour(name), "linewidth": 1.1, "marker": ".", "markersize": 3.5}
        xs = [row.size_bytes for row in rows]
        axes.plot(xs, [value(row.size_bytes, row.seconds) for row in rows], **look, label=name, gid=f"{kind}:{name}")
        ends = [_ends(row) for row in rows]
        lows, highs = ([value(x, end[k]) for x, end in zip(xs, ends, strict=True)] for k in (0, 1))
        axes.fill_between(xs, lows, highs, color=look["color"], alpha=0.15, linewidth=0)
    if sweep.bounds_s:
        xs = [size for size, _ in sweep.bounds_s]
        ys = [value(size, bound_s) for size, bound_s in sweep.bounds_s]
        axes.plot(xs, ys, color=style.INK, linewidth=0.9, label="bound T*", gid=f"{kind}:bound", zorder=1.5)
    shown = sizes[:: -(-len(sizes) // 7)]
    axes.set_xticks(shown, [style.spaced(show_size(size)) for size in shown])
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=style.SMALL_PT, length=2.5, width=0.6)
    axes.set_xlabel("size", labelpad=1.5)
    if kind != "time":
        axes.set_ylim(bottom=0)
    axes.grid(axis="y")


def _ends(row: BenchTiming) -> tuple[float, float]:
    return min(row.samples.undisturbed_s), max(row.samples.undisturbed_s)
