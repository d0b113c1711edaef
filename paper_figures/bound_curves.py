"""The figure of the bound: T* over the fault-free ring against lost bandwidth, a column for each number of stragglers.

    data(curves) -> BoundTable    what is drawn, all from the record
    draw(table) -> Figure         the picture, all from the table
    numbers(table)                its numbers for prose

Above T*/T_ff, below T*/T_ff - 1 in percent on a logarithmic scale, where large clusters part. The dashed line is a ring
over all ranks, which waits for its slowest member: 1/(1 - X).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from optcc.experiments.bound_record import BoundCurve, BoundCurves
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "bound-curves"
SAYS = (
    "What lost bandwidth must cost: with one straggler of many ranks that keeps half of its bandwidth "
    "almost nothing, where a ring takes twice as long."
)
"""What the figure says, for a gallery."""
_COLOURS = ("#c7a90c", "#7fb53b", "#2a9d6f", "#1f7f8c", "#31608f", "#3b2a6b")
"""From few ranks to many: one ramp, light to dark, that also reads in grey."""
_TOP_PT, _BOTTOM_PT = 112.0, 92.0
_LEFT_PT, _RIGHT_PT, _GAP_PT, _BETWEEN_PT = 31.0, 7.0, 13.0, 7.0
_HEAD_PT, _FOOT_PT = 50.0, 25.0
_CEILING_SHARE = 1.03
_PERCENT_MIN = 0.01
"""The lowest overhead that the lower row shows; its scale is logarithmic."""
_WORDS = {1: "one straggler", 2: "two stragglers", 3: "three stragglers", 4: "four stragglers"}
_HALF = Fraction(1, 2)


@dataclass(frozen=True)
class BoundTable:
    """Panels by number of stragglers; in each the curves by number of ranks, both rising."""

    panels: tuple[tuple[int, tuple[BoundCurve, ...]], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every number of ranks there is."""
        return tuple(sorted({curve.ranks for _, curves in self.panels for curve in curves}))

    @property
    def optimal_max(self) -> Fraction:
        """The highest point of any T*."""
        return max(point.optimal for _, curves in self.panels for curve in curves for point in curve.points)

    @property
    def lost_max(self) -> Fraction:
        """The most that is lost."""
        return max(curve.points[-1].lost for _, curves in self.panels for curve in curves)


def data(record: BoundCurves) -> BoundTable:
    """The curves of a record, sorted into panels."""
    counts = sorted({curve.stragglers for curve in record.curves})
    return BoundTable(
        tuple(
            (
                count,
                tuple(sorted((c for c in record.curves if c.stragglers == count), key=lambda curve: curve.ranks)),
            )
            for count in counts
        )
    )


def numbers(table: BoundTable) -> dict[str, Number]:
    """By how much T* is above the fault-free ring, in percent, where half of the bandwidth is lost."""
    found = {}
    for count, curves in table.panels:
        for curve in curves:
            for point in curve.points:
                if point.lost == _HALF:
                    key = f"half/{count}-stragglers/{curve.ranks}-ranks"
                    found[f"{key}/overhead-percent"] = Number.percent(float(100 * (point.optimal - 1)))
                    found[f"{key}/ring-overhead-percent"] = Number.percent(float(100 * (point.ring - 1)))
    return found


def draw(table: BoundTable) -> Figure:
    """The picture, as wide as a page. Ids of lines: `optimal:STRAGGLERS:RANKS`, `ring:STRAGGLERS`; below, `log-...`."""
    with style.applied():
        return _draw(table)


def _draw(table: BoundTable) -> Figure:
    width = style.PAGE_IN * style.POINTS_IN
    height = _HEAD_PT + _TOP_PT + _BETWEEN_PT + _BOTTOM_PT + _FOOT_PT
    figure = style.new_figure(width, height)

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(3 / width, 1 - y_pt / height, text, va="top", **how)

    put(3, "What lost bandwidth must cost: the least time T* of an AllReduce", size=style.TITLE_PT, weight="bold")
    said = (
        f"{style.T_FF}: the ring before anything was lost. All stragglers have lost the same share, out and in. "
        "Fluid limit, no latency; from the closed form."
    )
    put(4 + style.TITLE_PT * style.LINE, said, size=style.SMALL_PT, color=style.FAINT, parse_math=True)
    n_columns = len(table.panels)
    panel = (width - _LEFT_PT - _RIGHT_PT - (n_columns - 1) * _GAP_PT) / n_columns
    rows = (
        (_FOOT_PT + _BOTTOM_PT + _BETWEEN_PT, _TOP_PT, False, f"T* / {style.T_FF}"),
        (_FOOT_PT, _BOTTOM_PT, True, f"T* / {style.T_FF} − 1 (%)"),
    )
    lines: dict[str, Artist] = {}
    for y, tall, log, label in rows:
        for number, (count, curves) in enumerate(table.panels):
            x = _LEFT_PT + number * (panel + _GAP_PT)
            axes = figure.add_axes((x / width, y / height, panel / width, tall / height))
            _draw_panel(axes, table, count, curves, log)
            lines |= {str(line.get_gid()): line for line in axes.lines}
            if number:
                axes.tick_params(axis="y", which="both", labelleft=False)
            else:
                axes.set_ylabel(label, parse_math=True)
                axes.yaxis.set_label_coords(-(_LEFT_PT - 9) / panel, 0.5)
    shown = [next(line for gid, line in lines.items() if gid.endswith(f":{ranks}")) for ranks in table.ranks]
    figure.legend(
        [*shown, next(line for gid, line in lines.items() if gid.startswith("ring:"))],
        [*(f"{ranks} ranks" for ranks in table.ranks), "ring over all ranks, of any number"],
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - (_HEAD_PT - 24) / height),
        ncols=len(shown) + 1,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.6,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    return figure


def _draw_panel(axes: Axes, table: BoundTable, count: int, curves: tuple[BoundCurve, ...], log: bool) -> None:
    def height(ratio: Fraction) -> float:
        return float(100 * (ratio - 1)) if log else float(ratio)

    axes.set_xlim(0, float(100 * table.lost_max))
    axes.set_xticks([0, 25, 50, 75])
    axes.tick_params(axis="x", labelbottom=log)
    top = 1 + (table.optimal_max - 1) * Fraction(_CEILING_SHARE)
    if log:
        axes.set_yscale("log")
        axes.set_ylim(_PERCENT_MIN, height(top))
        decades = [_PERCENT_MIN * 10**power for power in range(6) if _PERCENT_MIN * 10**power <= height(top)]
        axes.set_yticks(decades, [f"{each:g}" for each in decades])
        axes.minorticks_off()
        axes.set_xlabel("lost bandwidth (%)", labelpad=1.5)
    else:
        axes.set_ylim(1, height(top))
        axes.set_title(_WORDS.get(count, f"{count} stragglers"), size=style.LABEL_PT, weight="bold", loc="left", pad=3)
    axes.tick_params(axis="x", labelsize=style.LABEL_PT, length=2.5, width=0.6)
    axes.grid(axis="both")
    prefix = "log-" if log else ""
    ranks = table.ranks
    for curve in curves:
        points = [point for point in curve.points if not log or point.optimal > 1]
        axes.plot(
            [float(100 * point.lost) for point in points],
            [height(point.optimal) for point in points],
            color=_COLOURS[ranks.index(curve.ranks) * (len(_COLOURS) - 1) // max(len(ranks) - 1, 1)],
            linewidth=1.3,
            solid_joinstyle="miter",
            zorder=3 + ranks.index(curve.ranks) / 100,
            gid=f"{prefix}optimal:{count}:{curve.ranks}",
        )
    longest = max(curves, key=lambda curve: curve.points[-1].lost)
    points = [point for point in longest.points if not log or point.ring > 1]
    axes.plot(
        [float(100 * point.lost) for point in points],
        [height(point.ring) for point in points],
        color=style.INK,
        linewidth=0.8,
        linestyle=(0, (4, 2.5)),
        zorder=4,
        gid=f"{prefix}ring:{count}",
    )
