"""The figure of the GPU battery: kernels against the device's own copy, and times against what they are compared with.

    data(record) -> BatteryTable    what is drawn, all from the record
    draw(table) -> Figure           the picture, all from the table
    numbers(table)                  its numbers for prose

A panel for each length of message has a dot for each kernel and type, at its share of the copy's bandwidth; a last one
has the times of collectives, of a step and of overlapped copies over what was measured beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optcc.experiments.gpu_battery import COPY_SHARE_MIN, GpuBattery
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "gpu-battery"
SAYS = (
    "On a GPU: every kernel's share of the device's copy bandwidth, and collectives against the copies they must make."
)
"""What the figure says, for a gallery."""
_HEAD_PT, _FOOT_PT, _LEFT_PT, _RIGHT_PT, _GAP_PT, _ROW_PT = 46.0, 26.0, 46.0, 8.0, 14.0, 11.0
_LABELS_PT = 188.0
"""Left of the last panel, for what was timed."""
_DEVICE_CHARS, _WHAT_CHARS = 40, 56
_MARKERS = "os^DvP*Xph<>"


@dataclass(frozen=True)
class BatteryTable:
    """The device; how many elements were wrong in how many cases; for each length, by kernel, (type, percent of the
    copy's bandwidth); and (what was timed, ratio, what it is compared with)."""

    device: str
    wrong: int
    cases: int
    panels: tuple[tuple[int, dict[str, list[tuple[str, float]]]], ...]
    ratios: tuple[tuple[str, float, str], ...]


def data(record: GpuBattery) -> BatteryTable:
    """The dots of a record, by rising length."""
    panels: dict[int, dict[str, list[tuple[str, float]]]] = {}
    for row in sorted(record.kernels, key=lambda each: each.size_bytes):
        panels.setdefault(row.size_bytes, {}).setdefault(row.kernel, []).append((row.dtype, 100 * row.copy_share))
    ratios = tuple((f"{row.part}: {row.what}", row.ratio, row.against) for row in record.timings)
    wrong, cases = (sum(getattr(line, what) for line in record.lines) for what in ("wrong", "cases"))
    return BatteryTable(str(record.device["name"]), wrong, cases, tuple(panels.items()), ratios)


def numbers(table: BatteryTable) -> dict[str, Number]:
    """Each dot, the least share of each length, and how many elements were wrong."""
    found = {
        f"{show_size(size)}/{kernel}/{dtype}/copy-share-percent": Number.percent(share)
        for size, kernels in table.panels
        for kernel, points in kernels.items()
        for dtype, share in points
    }
    for size, kernels in table.panels:
        least = min(share for points in kernels.values() for _, share in points)
        found[f"{show_size(size)}/least/copy-share-percent"] = Number.percent(least)
    found |= {f"{what}/ratio": Number(ratio, f"{ratio:.2f}") for what, ratio, _ in table.ratios}
    return found | {"wrong": Number(table.wrong, str(table.wrong)), "cases": Number(table.cases, str(table.cases))}


def draw(table: BatteryTable) -> Figure:
    """The picture, as wide as a page. Ids: `kernel:SIZE:KERNEL` of dots, `ratio` of the others, `least:SIZE` and `one`
    of the lines that they are beside."""
    with style.applied():
        return _draw(table)


def _draw(table: BatteryTable) -> Figure:
    from matplotlib.lines import Line2D

    dtypes = list(dict.fromkeys(dtype for _, kernels in table.panels for each in kernels.values() for dtype, _ in each))
    names = list(dict.fromkeys(name for _, kernels in table.panels for name in kernels))
    rows = max(len(dtypes), len(table.ratios), 3)
    width, height = style.PAGE_IN * style.POINTS_IN, _HEAD_PT + _ROW_PT * rows + _FOOT_PT
    figure = style.new_figure(width, height)
    said = f"{table.wrong} wrong elements in {table.cases} cases"
    title = f"GPU battery on {style.label(table.device, _DEVICE_CHARS)}: {said}"
    colour = style.WRONG if table.wrong else style.INK
    figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold", color=colour)
    n_panels = len(table.panels) + 1
    panel = (width - _LEFT_PT - _RIGHT_PT - _LABELS_PT - (n_panels - 1) * _GAP_PT) / n_panels
    for number in range(n_panels):
        is_last = number == n_panels - 1
        x = _LEFT_PT + number * (panel + _GAP_PT) + (_LABELS_PT if is_last else 0)
        axes = figure.add_axes((x / width, _FOOT_PT / height, panel / width, _ROW_PT * rows / height))
        axes.grid(axis="both")
        if is_last:
            _draw_ratios(axes, table)
        else:
            _draw_kernels(axes, *table.panels[number], dtypes, names)
            axes.tick_params(axis="y", labelleft=number == 0)
    figure.legend(
        [Line2D([], [], **_look(number)) for number in range(len(names))],
        names,
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - 15 / height),
        ncols=max(1, len(names)),
        borderaxespad=0,
        borderpad=0,
        handletextpad=0.2,
        columnspacing=1.2,
    )
    return figure


def _look(number: int) -> dict[str, Any]:
    """How the dots of the `number`-th kernel are drawn."""
    spare = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c6bb1", "#999933", "#332288")
    return {
        **{"color": spare[number % len(spare)], "marker": _MARKERS[number % len(_MARKERS)], "linestyle": "none"},
        **{"markersize": 4.0, "markeredgecolor": "white", "markeredgewidth": 0.4},
    }


def _draw_kernels(
    axes: Axes, size: int, kernels: dict[str, list[tuple[str, float]]], dtypes: list[str], names: list[str]
) -> None:
    title = f"{style.spaced(show_size(size))} (line: {100 * COPY_SHARE_MIN:.0f} %)"
    axes.set_title(title, size=style.LABEL_PT, weight="bold", loc="left", pad=3)
    axes.set_ylim(len(dtypes) - 0.5, -0.5)
    axes.set_yticks(range(len(dtypes)), dtypes)
    axes.set_xlim(0, 1.1 * max(100.0, *(share for points in kernels.values() for _, share in points)))
    axes.set_xlabel("% of copy bandwidth", labelpad=1.5)
    axes.axvline(100 * COPY_SHARE_MIN, color=style.INK, linewidth=1.2, zorder=3, gid=f"least:{size}")
    for name, points in kernels.items():
        places, shares = [dtypes.index(dtype) for dtype, _ in points], [share for _, share in points]
        axes.plot(shares, places, **_look(names.index(name)), zorder=5, gid=f"kernel:{size}:{name}")


def _draw_ratios(axes: Axes, table: BatteryTable) -> None:
    axes.set_title("time over time", size=style.LABEL_PT, weight="bold", loc="left", pad=3)
    count = len(table.ratios)
    axes.set_ylim(max(count, 1) - 0.5, -0.5)
    said = [style.label(f"{what} / {against}", _WHAT_CHARS) for what, _, against in table.ratios]
    axes.set_yticks(range(count), said)
    axes.set_xscale("log")
    axes.minorticks_off()
    ratios = [ratio for _, ratio, _ in table.ratios]
    axes.set_xlim(min(0.5, *ratios, 1) / 1.2, 1.2 * max(2.0, *ratios, 1))
    low, high = axes.get_xlim()
    ticks = [each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 100, 1000, 10000) if low <= each <= high]
    ticks = ticks if len(ticks) < 6 else [each for each in ticks if each in (1, 100, 10000)]
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.set_xlabel("time over time", labelpad=1.5)
    axes.axvline(1, color=style.INK, linewidth=1.2, zorder=3, gid="one")
    axes.plot(ratios, range(count), **_look(0), zorder=5, gid="ratio")
