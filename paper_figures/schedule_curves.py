"""The figure of schedules in simulation: time over the fault-free ring, and over the bound, against lost bandwidth.

    data(record) -> ScheduleTable    what is drawn, all from the record
    draw(table) -> Figure            the picture, all from the table
    numbers(table)                   its numbers for prose

A column for each number of ranks. Lines are formulas, marks are simulated; the thick line is the bound. Above, time
over the fault-free ring, as papers state it; below, the same as percent over the bound, both on logarithmic scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from optcc.experiments.schedule_cases import ScheduleRatio
from optcc.experiments.schedule_record import COLUMNS, FormulaCurve, ScheduleRatios
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_rate, show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "schedule-curves"
SAYS = (
    "One straggler, simulated: a ring and R2CCL's schedules follow the straggler, OptCC and `optimal` "
    "stay within some percent of the bound T*."
)
"""What the figure says, for a gallery."""
MODEL = "fifo"
"""The port model of the marks."""
_LOOK = {
    "ring": ("ring; R2CCL-Balance is the same", "s", 3.2),
    "r2ccl-allreduce": ("R2CCL-AllReduce", "^", 3.6),
    "optimal": ("optimal (ours)", "o", 5.0),
    "optcc": ("OptCC", "D", 2.9),
}
"""For each schedule that is drawn: its name, its mark and the mark's size; later ones on top of the others."""
_TOP_PT, _BOTTOM_PT = 126.0, 92.0
_LEFT_PT, _RIGHT_PT, _GAP_PT, _BETWEEN_PT = 31.0, 8.0, 9.0, 8.0
_HEAD_PT, _FOOT_PT = 52.0, 25.0
_PERCENT_MIN, _PERCENT_MAX = 0.05, 130.0
_RATIO_MIN, _RATIO_MAX = 0.97, 8.6
_HALF = Fraction(1, 2)


@dataclass(frozen=True)
class ScheduleTable:
    """The record, and for each number of ranks the formulas and the simulated cases with one straggler."""

    record: ScheduleRatios
    panels: tuple[tuple[FormulaCurve, tuple[ScheduleRatio, ...]], ...]


def data(record: ScheduleRatios) -> ScheduleTable:
    """The curves of a record by rising number of ranks, each with its cases."""
    drawn = [case for name in _LOOK for case in record.select(name, MODEL, straggler=True)]
    return ScheduleTable(
        record,
        tuple(
            (curve, tuple(sorted((c for c in drawn if c.ranks == curve.ranks), key=lambda case: case.slowdown or 0)))
            for curve in sorted(record.curves, key=lambda curve: curve.ranks)
        ),
    )


def lost(case: ScheduleRatio) -> Fraction:
    """The share of its bandwidth that the straggler lost."""
    assert case.slowdown is not None
    return 1 - 1 / case.slowdown


def numbers(table: ScheduleTable) -> dict[str, Number]:
    """Percent over the fault-free ring and the bound: of each case, the range where at most half is lost, the worst."""
    found = {}
    for _, cases in table.panels:
        for case in cases:
            key = f"{case.ranks}-ranks/{100 * lost(case)}-percent-lost/{case.schedule}"
            found[f"{key}/over-fault-free-percent"] = Number.percent(_percent(case.over_fault_free))
            found[f"{key}/over-bound-percent"] = Number.percent(_percent(case.over_bound))
    for curve, cases in table.panels:
        for name in _LOOK:
            own = [_percent(case.over_fault_free) for case in cases if case.schedule == name and lost(case) <= _HALF]
            if own:
                key = f"half-or-less-lost/{curve.ranks}-ranks/{name}/over-fault-free-percent"
                found[f"{key}-least"] = Number.percent(min(own))
                found[f"{key}-most"] = Number.percent(max(own))
    for kind, straggler in (("one-straggler", True), ("random", False)):
        for schedule, model in sorted({(case.schedule, case.model) for case in table.record.cases}):
            own = [_percent(case.over_bound) for case in table.record.select(schedule, model, straggler=straggler)]
            if own:
                key = f"worst/{kind}/{schedule}/{model}"
                found[f"{key}/over-bound-percent"] = Number.percent(max(own), 2)
                found[f"{key}/cases"] = Number.whole(len(own))
    every = [case for case in table.record.cases if case.schedule == "optimal" and case.model == MODEL]
    if every:
        worst = _percent(max(case.over_bound for case in every))
        found["worst/optimal/over-bound-percent"] = Number.percent(worst, 2)
        found["worst/optimal/cases"] = Number.whole(len(every))
        found["worst/optimal/beyond-goal"] = Number.whole(sum(case.over_bound > case.goal for case in every))
    return found


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def draw(table: ScheduleTable) -> Figure:
    """The picture, as wide as a page.

    Ids of lines: `formula:RANKS:SCHEDULE`, `simulated:RANKS:SCHEDULE`, `bound:RANKS`; in the lower row `log-...`.
    """
    with style.applied():
        return _draw(table)


def _draw(table: ScheduleTable) -> Figure:
    width = style.PAGE_IN * style.POINTS_IN
    height = _HEAD_PT + _TOP_PT + _BETWEEN_PT + _BOTTOM_PT + _FOOT_PT
    figure = style.new_figure(width, height)

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(3 / width, 1 - y_pt / height, text, va="top", **how)

    record = table.record
    put(3, "One straggler: what schedules of an AllReduce take", size=style.TITLE_PT, weight="bold")
    size, rate = style.spaced(show_size(record.size_bytes)), style.spaced(show_rate(record.rate))
    said = (
        f"{size}, {rate} each way but for the straggler, "
        f"{float(record.latency_s * 10**6):g} µs latency. Marks: simulated, {MODEL} ports. "
        f"Lines: formulas, fluid, without latency. {style.T_FF}: the ring with nothing lost."
    )
    put(4 + style.TITLE_PT * style.LINE, said, size=style.SMALL_PT, color=style.FAINT, parse_math=True)
    panel = (width - _LEFT_PT - _RIGHT_PT - (len(table.panels) - 1) * _GAP_PT) / len(table.panels)
    rows = (
        (_FOOT_PT + _BOTTOM_PT + _BETWEEN_PT, _TOP_PT, False, f"time / {style.T_FF}"),
        (_FOOT_PT, _BOTTOM_PT, True, "time / T* − 1 (%)"),
    )
    for y, tall, below, label in rows:
        for number, (curve, cases) in enumerate(table.panels):
            x = _LEFT_PT + number * (panel + _GAP_PT)
            axes = figure.add_axes((x / width, y / height, panel / width, tall / height))
            _draw_panel(axes, curve, cases, below)
            if number:
                axes.tick_params(axis="y", which="both", labelleft=False)
            else:
                axes.set_ylabel(label, parse_math=True)
                axes.yaxis.set_label_coords(-(_LEFT_PT - 9) / panel, 0.5)
    _draw_legend(figure, width, height)
    return figure


def _draw_legend(figure: Figure, width: float, height: float) -> None:
    from matplotlib.lines import Line2D

    shown = [Line2D([], [], **_mark(name), linewidth=0.8 if name in COLUMNS else 0.0) for name in _LOOK]
    bound = Line2D([], [], color=style.INK, linewidth=1.6)
    figure.legend(
        [*shown, bound],
        [*(label for label, _, _ in _LOOK.values()), "lower bound T*"],
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - (_HEAD_PT - 25) / height),
        ncols=len(shown) + 1,
        borderaxespad=0,
        borderpad=0,
        handlelength=2.0,
        handletextpad=0.5,
        columnspacing=1.8,
    )


def _mark(schedule: str) -> dict[str, Any]:
    """How the marks of a schedule look, and the line of its formula."""
    _, marker, size = _LOOK[schedule]
    colour = style.colour(schedule)
    return {
        "color": colour,
        "marker": marker,
        "markersize": size,
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }


def _draw_panel(axes: Axes, curve: FormulaCurve, cases: tuple[ScheduleRatio, ...], below: bool) -> None:
    most = float(100 * curve.points[-1][0])
    axes.set_xlim(0, most * 1.04)
    axes.set_xticks([each for each in (0, 25, 50, 75, 100) if each <= most])
    axes.tick_params(axis="x", labelbottom=below, labelsize=style.LABEL_PT, length=2.5, width=0.6)
    axes.set_yscale("log")
    if below:
        axes.set_ylim(_PERCENT_MIN, _PERCENT_MAX)
        axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.set_xlabel("lost bandwidth (%)", labelpad=1.5)
    else:
        axes.set_ylim(_RATIO_MIN, _RATIO_MAX)
        axes.set_yticks([1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"])
        axes.set_title(f"{curve.ranks} ranks", size=style.LABEL_PT, weight="bold", loc="left", pad=3)
    axes.minorticks_off()
    axes.grid(axis="both")
    prefix = "log-" if below else ""
    for name in COLUMNS[1:-1]:
        heights = [(point[0], _height(point, name, below)) for point in curve.points]
        points = [(x, y) for x, y in heights if y > 0]
        axes.plot(
            [float(100 * x) for x, _ in points],
            [y for _, y in points],
            color=style.colour(name),
            linewidth=0.8,
            zorder=3,
            gid=f"{prefix}formula:{curve.ranks}:{name}",
        )
    if not below:
        axes.plot(
            [float(100 * point[0]) for point in curve.points],
            [float(point[-1]) for point in curve.points],
            color=style.INK,
            linewidth=1.6,
            zorder=3.5,
            gid=f"bound:{curve.ranks}",
        )
    for name in _LOOK:
        own = [case for case in cases if case.schedule == name]
        axes.plot(
            [float(100 * lost(case)) for case in own],
            [_percent(case.over_bound) if below else case.over_fault_free for case in own],
            **_mark(name),
            linestyle="none",
            zorder=5,
            gid=f"{prefix}simulated:{curve.ranks}:{name}",
        )


def _height(point: tuple[Fraction, ...], name: str, below: bool) -> float:
    """A formula over the fault-free ring, or by how much percent it is above the bound."""
    ratio = point[COLUMNS.index(name)]
    return float(100 * (ratio / point[-1] - 1)) if below else float(ratio)
