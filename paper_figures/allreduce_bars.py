"""The figure of AllReduce times: a group for each state of the hosts, a bar for each schedule, the bound over both.

    data(records) -> BarTable    the numbers, all from records
    draw(table) -> Figure        the picture, all from the table
    numbers(table)               the same numbers for prose

A bar is the median of the undisturbed runs, its whisker their least and greatest, a diamond the simulator's
prediction. The line across a group is the lower bound T*, with the wire's headers in it, as in the record.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optcc.errors import CodecError, InputError
from optcc.experiments.record import STEAL_MAX, BenchTiming, Record, Samples
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.paper_figures.sources import require_drawable
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "allreduce-bars"
SAYS = (
    "Time of an AllReduce by each schedule, measured, for each state of the hosts: how far above the "
    "lower bound T* it is, and what the simulator predicted."
)
"""What the figure says, for a gallery."""
_HEALTHY = "healthy"
_NAME_LENGTH_MAX = 24
_WHERE_LENGTH_MAX = 160
_ID_LENGTH_MAX = 200
_TOPOLOGY_LINES_MAX = 3

_AXES_HEIGHT_PT = 118.0
_RIGHT_PT, _EDGE_PT = 2.0, 3.0
_TICKS_MAX = 6
_PITCH_SHARE_MAX = 0.13
"""Largest share of the figure's width from bar to bar, so that a single bar is not drawn as a block."""
_GAP_PT = 7.0
_BAR_SHARE = 0.74
_BEYOND_PT = 3.0
"""How far the line of the bound stands out from the bars at either side."""
_SLOPE_DEGREES = 35.0
_ON_WHITE = {"facecolor": "white", "linewidth": 0, "pad": 0.4}
"""Behind text over the grid."""


@dataclass(frozen=True)
class BarCase:
    """What all bars of one figure have in common."""

    size_bytes: int
    dtype: str
    reduction: str
    ranks: int
    where: str
    wire_overhead: float

    @property
    def name(self) -> str:
        """The name of the figure's files; it depends on the case alone, not on other cases in the records."""
        kind = "" if (self.dtype, self.reduction) == ("float32", "sum") else f"-{self.dtype}-{self.reduction}"
        return f"{NAME}-{show_size(self.size_bytes)}-{self.ranks}ranks{kind}"


@dataclass(frozen=True)
class Bar:
    """One schedule on one bed. `least_s` and `greatest_s` are of the undisturbed runs, `quiet` of `runs` in number."""

    schedule: str
    seconds: float
    least_s: float
    greatest_s: float
    quiet: int
    runs: int
    predicted_s: float | None
    over_bound_percent: float | None
    wrong: int


@dataclass(frozen=True)
class Group:
    """One state of the hosts, its bound, and its bars from left to right."""

    bed: str
    topology: str
    bound_s: float | None
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class BarTable:
    """All numbers of one figure."""

    case: BarCase
    groups: tuple[Group, ...]

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all groups, from left to right."""
        return tuple(bar for group in self.groups for bar in group.bars)

    def key(self, group: Group) -> str:
        """Identifies `group`: its bed, and its topology where several beds have the same name."""
        same = [each.bed for each in self.groups].count(group.bed)
        return group.bed if same == 1 else f"{group.bed}-{group.topology}"


def cases(records: Sequence[Record]) -> tuple[BarCase, ...]:
    """What can be drawn from `records`: a figure for each case, in the order in which they first appear."""
    return tuple(dict.fromkeys(_case(record, row) for record in records for row in record.rows))


def data(records: Sequence[Record], case: BarCase | None = None) -> BarTable:
    """The numbers of the figure of `case`, or of the only case there is.

    Raises CodecError for a record whose numbers cannot be a measurement's, or whose bounds contradict each other;
    InputError if no case or several are there to choose from, or a schedule was measured twice on one bed.
    """
    for record in records:
        require_drawable(record, record.title)
    found = cases(records)
    if case is None:
        if len(found) != 1:
            raise InputError(f"{NAME}: {len(found)} cases in the records ({_list(found)}): must be one")
        case = found[0]
    rows = [row for record in records for row in record.rows if _case(record, row) == case]
    if not rows:
        raise InputError(f"{NAME}: {case.name}: must be one of the cases in the records ({_list(found)})")
    beds = sorted(dict.fromkeys((row.bed, row.topology) for row in rows), key=lambda bed: bed[0] != _HEALTHY)
    return BarTable(case, tuple(_group(*bed, [row for row in rows if (row.bed, row.topology) == bed]) for bed in beds))


def numbers(table: BarTable) -> dict[str, Number]:
    """Every number of the figure, by `bed/schedule/what`."""
    case = table.case
    found = {
        "size": Number(case.size_bytes, show_size(case.size_bytes)),
        "ranks": Number.whole(case.ranks),
        "dtype": Number(case.dtype, case.dtype),
        "reduction": Number(case.reduction, case.reduction),
        "hosts": Number(case.where, case.where),
        "wire-overhead-percent": Number.percent(_wire_percent(case), digits=2),
    }
    for group in table.groups:
        bed = table.key(group)
        found[f"{bed}/topology"] = Number(group.topology, group.topology)
        if group.bound_s is not None:
            found[f"{bed}/bound"] = Number.seconds(group.bound_s)
        for bar in group.bars:
            key = f"{bed}/{bar.schedule}"
            found[f"{key}/seconds"] = Number.seconds(bar.seconds)
            found[f"{key}/least"] = Number.seconds(bar.least_s)
            found[f"{key}/greatest"] = Number.seconds(bar.greatest_s)
            found[f"{key}/runs"] = Number.whole(bar.runs)
            found[f"{key}/undisturbed"] = Number.whole(bar.quiet)
            found[f"{key}/wrong"] = Number.whole(bar.wrong)
            if bar.predicted_s is not None:
                found[f"{key}/predicted"] = Number.seconds(bar.predicted_s)
            if bar.over_bound_percent is not None:
                found[f"{key}/over-bound-percent"] = Number.percent(bar.over_bound_percent)
    return found


def draw(table: BarTable) -> Figure:
    """The picture, as wide as a column; as wide as a page or more only where the labels would touch otherwise.

    Artists carry ids: `bar:BED:SCHEDULE`, and likewise `whisker`, `predicted`, `over`, `wrong`; `bound:BED`,
    `bound-label:BED`; BED is the group's key.
    """
    with style.applied():
        return _draw(table)


def _case(record: Record, row: BenchTiming) -> BarCase:
    """The case of a row. The record's `bed` is where it was run, unless it repeats the only bed of its rows."""
    where = "" if all(each.bed == record.bed for each in record.rows) else record.bed
    return BarCase(row.size_bytes, row.dtype, row.reduction, row.ranks, where, record.wire_overhead)


def _list(found: Sequence[BarCase]) -> str:
    return ", ".join(f"{case.name} on {case.where}" if case.where else case.name for case in found) or "none"


def _group(bed: str, topology: str, rows: Sequence[BenchTiming]) -> Group:
    bounds = sorted({row.bound_s for row in rows if row.bound_s is not None})
    if len(bounds) > 1:
        raise CodecError(f"{bed} ({topology}): bounds of {bounds[0]!r} s and {bounds[1]!r} s: must be one for all rows")
    bound_s = bounds[0] if bounds else None
    names = [row.schedule for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{bed} ({topology}): {name} was measured {names.count(name)} times: must be once")
    return Group(bed, topology, bound_s, tuple(sorted((_bar(row, bound_s) for row in rows), key=_position)))


def _position(bar: Bar) -> tuple[int, str]:
    return style.order(bar.schedule)


def _bar(row: BenchTiming, bound_s: float | None) -> Bar:
    quiet = _undisturbed(row.samples)
    shown = quiet or row.samples.seconds
    over = 100 * (row.seconds / bound_s - 1) if bound_s else None
    return Bar(
        row.schedule,
        row.seconds,
        min(shown),
        max(shown),
        len(quiet),
        len(row.samples.seconds),
        row.predicted_s,
        over,
        row.wrong,
    )


def _undisturbed(samples: Samples) -> list[float]:
    return [each for each, steal in zip(samples.seconds, samples.steal, strict=True) if steal <= STEAL_MAX]


def _wire_percent(case: BarCase) -> float:
    return 100 * (case.wire_overhead - 1)


class _Percents(enum.Enum):
    """How percents over the bars are written, from wide to narrow: (digits below 10, what follows)."""

    TENTHS = (1, "\u202f%")
    WHOLE = (0, "\u202f%")
    BARE = (0, "")

    def text(self, value: float) -> str:
        """`value` in percent, with its sign; the minus is one, and what rounds to zero has none."""
        digits, unit = self.value
        text = f"{value:+z.0f}" if abs(value) >= 9.95 else f"{value:+z.{digits}f}"
        return text.replace("-", "−") + unit


def _title(case: BarCase) -> str:
    size = style.spaced(show_size(case.size_bytes))
    reduction = "" if case.reduction == "sum" else f" ({case.reduction})"
    return f"AllReduce{reduction} of {size} {case.dtype}, {case.ranks} ranks"


def _caption(table: BarTable) -> list[str]:
    """The caption: where it was run, the overhead of headers, the number of runs."""
    case, bars = table.case, table.bars
    parts = [style.label(case.where, _WHERE_LENGTH_MAX)] if case.where else []
    if case.wire_overhead > 1:
        parts.append(f"bound and prediction include {_wire_percent(case):.2f}\u202f% of headers")
    runs = sorted({bar.runs for bar in bars})
    count = str(runs[0]) if len(runs) == 1 else f"{runs[0]}–{runs[-1]}"
    parts.append("single runs" if runs == [1] else f"medians of {count} runs, whiskers from least to greatest")
    left_out = sum(bar.runs - bar.quiet for bar in bars if bar.quiet)
    if left_out:
        parts.append(f"{left_out} disturbed {'runs' if left_out > 1 else 'run'} left out")
    loud = [bar.schedule for bar in bars if not bar.quiet]
    if loud:
        parts.append(f"all runs disturbed: {', '.join(style.label(name, _NAME_LENGTH_MAX) for name in loud)}")
    return "; ".join(parts).split(" ")


@dataclass(frozen=True)
class _BarNames:
    """Names under the bars, by schedule. They begin `start_pt` from the figure's left edge if they slope, else at 0."""

    texts: Mapping[str, str]
    slope: bool
    height_pt: float
    start_pt: float


@dataclass(frozen=True)
class _Layout:
    """Where everything stands. Across the axes, a unit of x is a point, so widths of text can be added up."""

    width_pt: float
    left_pt: float
    pitch_pt: float
    centres: tuple[tuple[float, ...], ...]
    ends: tuple[float, ...]
    bound_labels: tuple[str, ...]
    percents: _Percents
    ceiling_s: float
    ticks: tuple[tuple[float, str], ...]
    names: _BarNames

    @property
    def room_pt(self) -> float:
        """The width of the axes."""
        return self.width_pt - self.left_pt - _RIGHT_PT


def _layout(table: BarTable, more_left_pt: float = 0.0) -> _Layout:
    """The narrowest figure in which no labels touch: first percents get shorter, then it becomes as wide as a page.

    `more_left_pt` is room for names that slope out of the figure on the left.
    """
    ceiling = _ceiling(table)
    ticks = _ticks(ceiling)
    ticks_pt = max(style.text_width_pt(text, style.LABEL_PT) for _, text in ticks)
    left = more_left_pt + _EDGE_PT + style.LABEL_PT * style.LINE + 7 + ticks_pt
    labels = ["" if group.bound_s is None else f"{Number.seconds(group.bound_s).text} s" for group in table.groups]
    tails = [style.text_width_pt(each, style.SMALL_PT) + 2 * _BEYOND_PT if each else 0.0 for each in labels]
    width, pitch, percents = _widths(table, left, sum(tails))
    centres, ends = _positions(table, width - left - _RIGHT_PT, pitch, tails)
    names = _bar_names(table, pitch, [left + x for each in centres for x in each])
    if names.start_pt < 0:
        return _layout(table, more_left_pt + 1 - names.start_pt)
    return _Layout(width, left, pitch, centres, ends, tuple(labels), percents, ceiling, tuple(ticks), names)


def _widths(table: BarTable, left_pt: float, tails_pt: float) -> tuple[float, float, _Percents]:
    """The figure's width, from bar to bar, and how percents are written. `tails_pt` is what bounds' labels take."""
    bars = table.bars
    fixed = tails_pt + _GAP_PT * (len(table.groups) + 1)

    def pitch_least(percents: _Percents) -> float:
        lines = [line for bar in bars for line in (*_wrong_lines(bar), _over(bar, percents)) if line]
        return 2 + max((style.text_width_pt(line, style.SMALL_PT) for line in lines), default=10.0)

    def needed(percents: _Percents) -> float:
        return left_pt + fixed + len(bars) * pitch_least(percents) + _RIGHT_PT

    column, page = style.COLUMN_IN * style.POINTS_IN, style.PAGE_IN * style.POINTS_IN
    choices = (*((column, each) for each in _Percents), (page, _Percents.TENTHS))
    fallback = (needed(_Percents.TENTHS), _Percents.TENTHS)
    width, percents = next((choice for choice in choices if needed(choice[1]) <= choice[0]), fallback)
    room = width - left_pt - _RIGHT_PT
    return width, max(min(_PITCH_SHARE_MAX * width, (room - fixed) / len(bars)), pitch_least(percents)), percents


def _positions(
    table: BarTable, room_pt: float, pitch_pt: float, tails: Sequence[float]
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """The centres of the bars of each group, and where each group ends, its bound's label included."""
    groups = table.groups
    fixed = sum(tails) + _GAP_PT * (len(groups) + 1)
    spare = (room_pt - fixed - len(table.bars) * pitch_pt) / (len(groups) + 1)
    x, centres, ends = 0.0, [], []
    for group, tail in zip(groups, tails, strict=True):
        x += _GAP_PT + spare
        centres.append(tuple(x + (number + 0.5) * pitch_pt for number in range(len(group.bars))))
        x += len(group.bars) * pitch_pt + tail
        ends.append(x)
    return tuple(centres), tuple(ends)


def _bar_names(table: BarTable, pitch_pt: float, places_pt: Sequence[float]) -> _BarNames:
    """The names of the bars at `places_pt`: broken at hyphens, or sloping where a part is still too long."""
    bars = table.bars
    names = [style.label(bar.schedule, _NAME_LENGTH_MAX) for bar in bars]
    broken = [
        style.wrapped(name.replace("-", "-\n").split("\n"), "", pitch_pt - 2, style.LABEL_PT, 3) for name in names
    ]
    slope = max(style.text_width_pt(line, style.LABEL_PT) for lines in broken for line in lines) > pitch_pt - 2
    height, start = style.LABEL_PT * style.LINE * max(map(len, broken)), 0.0
    if slope:
        broken = [[name] for name in names]
        angle = math.radians(_SLOPE_DEGREES)
        line_pt = style.LABEL_PT * style.LINE
        lengths = [style.text_width_pt(name, style.LABEL_PT) for name in names]
        height = max(lengths) * math.sin(angle) + line_pt * math.cos(angle)
        start = min(x - length * math.cos(angle) - 3 for x, length in zip(places_pt, lengths, strict=True))
    texts = {bar.schedule: "\n".join(lines) for bar, lines in zip(bars, broken, strict=True)}
    return _BarNames(texts, slope, height, start)


def _ticks(ceiling: float) -> list[tuple[float, str]]:
    """Round numbers from 0 to `ceiling`, at most `_TICKS_MAX` of them, and how they are written."""
    rough = ceiling / (_TICKS_MAX - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    values = [number * step for number in range(int(ceiling / step) + 1)]
    return [(value, f"{value:.6g}") for value in values]


def _over(bar: Bar, percents: _Percents) -> str:
    return "" if bar.over_bound_percent is None else percents.text(bar.over_bound_percent)


def _wrong_lines(bar: Bar) -> tuple[str, ...]:
    return (f"{bar.wrong}", "wrong") if bar.wrong else ()


def _draw(table: BarTable) -> Figure:
    layout = _layout(table)
    small, text_pt = style.SMALL_PT * style.LINE, 0.97 * layout.width_pt - 2 * _EDGE_PT
    caption = style.wrapped(_caption(table), " ", text_pt, style.SMALL_PT, 4)
    beds = _bed_lines(table, layout)
    head = _EDGE_PT + style.TITLE_PT * style.LINE + 1 + len(caption) * small + 3
    key = small + 5 if _meanings(table) else 0.0
    foot = 4 + layout.names.height_pt + 2 + style.LABEL_PT * style.LINE + max(map(len, beds)) * small + _EDGE_PT
    height = head + key + _AXES_HEIGHT_PT + foot
    figure = style.new_figure(layout.width_pt, height)

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(_EDGE_PT / layout.width_pt, 1 - y_pt / height, text, va="top", **how)

    put(_EDGE_PT, _title(table.case), size=style.TITLE_PT, weight="bold")
    for number, line in enumerate(caption):
        y_pt = _EDGE_PT + style.TITLE_PT * style.LINE + 1 + number * small
        put(y_pt, line, size=style.SMALL_PT, color=style.FAINT)
    room = layout.room_pt
    box = (layout.left_pt / layout.width_pt, foot / height, room / layout.width_pt, _AXES_HEIGHT_PT / height)
    axes = figure.add_axes(box)
    axes.set_xlim(0, room)
    axes.set_ylim(0, layout.ceiling_s)
    axes.set_xticks([])
    axes.set_ylabel("time (s)")
    axes.yaxis.set_label_coords(-(layout.left_pt - _EDGE_PT - style.LABEL_PT * style.LINE) / room, 0.5)
    axes.set_yticks([value for value, _ in layout.ticks], [text for _, text in layout.ticks])
    axes.grid(axis="y")
    for number, group in enumerate(table.groups):
        _draw_group(axes, group, layout, number, table.key(group))
        _draw_bed(axes, group, layout, number, beds[number])
    meanings = _meanings(table)
    if meanings:
        lines = {str(line.get_gid()).partition(":")[0]: line for line in axes.lines}
        axes.legend(
            [lines[what] for what in meanings],
            list(meanings.values()),
            loc="lower left",
            bbox_to_anchor=(0, 1, 1, 0),
            ncols=len(meanings),
            borderaxespad=0.4,
            borderpad=0,
            handlelength=1.8,
            handletextpad=0.5,
            columnspacing=1.6,
        )
    return figure


def _top(group: Group, bar: Bar) -> float:
    """Above this nothing of the bar is drawn, nor the line that crosses it."""
    return max(bar.greatest_s, bar.predicted_s or 0.0, group.bound_s or 0.0)


def _foot_of_text(group: Group, bar: Bar, ceiling_s: float) -> float:
    """Where the text over a bar begins: above all of it, but not above a diamond with room enough below."""
    foot = max(bar.greatest_s, group.bound_s or 0.0)
    room_pt = ((bar.predicted_s or 0.0) - foot) / ceiling_s * _AXES_HEIGHT_PT
    return foot if room_pt > _text_height_pt(bar) + 3 else _top(group, bar)


def _text_height_pt(bar: Bar) -> float:
    n_lines = (bar.over_bound_percent is not None) + len(_wrong_lines(bar))
    return 4 + n_lines * style.SMALL_PT * style.LINE


def _ceiling(table: BarTable) -> float:
    """The top of the axes: high enough for the lines of text over the highest bar."""

    def needed(group: Group, bar: Bar) -> float:
        return _top(group, bar) / (1 - _text_height_pt(bar) / _AXES_HEIGHT_PT)

    return max(needed(group, bar) for group in table.groups for bar in group.bars)


def _draw_group(axes: Axes, group: Group, layout: _Layout, number: int, key: str) -> None:
    """Bars, whiskers, diamonds, the bound and what stands over the bars; ids end with `key`."""
    key = style.label(key, _ID_LENGTH_MAX)
    centres, width = layout.centres[number], layout.pitch_pt * _BAR_SHARE
    known = [f"{key}:{style.label(bar.schedule, _ID_LENGTH_MAX)}" for bar in group.bars]
    for x, bar, name in zip(centres, group.bars, known, strict=True):
        edge = {"edgecolor": style.WRONG, "linewidth": 1.2} if bar.wrong else {"linewidth": 0}
        patch = axes.bar(x, bar.seconds, width, color=style.colour(bar.schedule), zorder=2, **edge).patches[0]
        patch.set_gid(f"bar:{name}")
    if group.bound_s is not None:
        ends = (centres[0] - width / 2 - _BEYOND_PT, layout.ends[number])
        _draw_bound(axes, group.bound_s, ends, layout.bound_labels[number], key)
    for x, bar, name in zip(centres, group.bars, known, strict=True):
        _draw_marks(axes, bar, x, width, name)
        _draw_text(axes, bar, (x, _foot_of_text(group, bar, layout.ceiling_s)), layout.percents, name)


def _draw_bound(axes: Axes, bound_s: float, ends: tuple[float, float], label: str, key: str) -> None:
    """A line from one end to the other, with its name above and its value below at the right."""
    axes.plot(ends, (bound_s, bound_s), color=style.INK, linewidth=0.9, zorder=4, gid=f"bound:{key}")
    for text, up_pt, va, what in (("T*", 1.5, "bottom", "name"), (label, -2.0, "top", "label")):
        axes.annotate(
            text,
            (ends[1], bound_s),
            xytext=(0, up_pt),
            textcoords="offset points",
            ha="right",
            va=va,
            size=style.SMALL_PT,
            bbox=_ON_WHITE,
            zorder=4,
            gid=f"bound-{what}:{key}",
        )


def _draw_marks(axes: Axes, bar: Bar, x: float, width: float, name: str) -> None:
    """The range of the runs, and a diamond for what was predicted."""
    reach = [[bar.seconds - bar.least_s], [bar.greatest_s - bar.seconds]]
    if bar.runs > 1:
        whisker = axes.errorbar(
            x, bar.seconds, reach, fmt="none", ecolor=style.INK, elinewidth=0.6, capsize=1.8, capthick=0.6, zorder=5
        )
        whisker.lines[2][0].set_gid(f"whisker:{name}")
    if bar.predicted_s is not None:
        axes.plot(
            [x - width * 0.28],
            [bar.predicted_s],
            marker="D",
            markersize=3.2,
            markerfacecolor="white",
            markeredgecolor=style.INK,
            markeredgewidth=0.7,
            linestyle="none",
            zorder=6,
            gid=f"predicted:{name}",
        )


def _draw_text(axes: Axes, bar: Bar, foot: tuple[float, float], percents: _Percents, name: str) -> None:
    """The lines over a bar, from `foot` up: what it takes over the bound, and wrong elements."""
    lines = [(line, style.WRONG, "bold", "wrong") for line in reversed(_wrong_lines(bar))]
    over = _over(bar, percents)
    if over:
        lines.insert(0, (over, style.INK, "normal", "over"))
    for level, (text, ink, weight, what) in enumerate(lines):
        axes.annotate(
            text,
            foot,
            xytext=(0, 2.5 + level * style.SMALL_PT * style.LINE),
            textcoords="offset points",
            ha="center",
            va="bottom",
            size=style.SMALL_PT,
            color=ink,
            weight=weight,
            bbox=_ON_WHITE,
            zorder=7,
            gid=f"{what}:{name}",
        )


def _bed_lines(table: BarTable, layout: _Layout) -> list[list[str]]:
    """For each group its topology, broken at commas so that neighbours do not touch."""
    return [
        style.wrapped(
            style.label(group.topology, 400).split(","),
            ",",
            len(group.bars) * layout.pitch_pt + _GAP_PT,
            style.SMALL_PT,
            _TOPOLOGY_LINES_MAX,
        )
        for group in table.groups
    ]


def _draw_bed(axes: Axes, group: Group, layout: _Layout, number: int, topology: Sequence[str]) -> None:
    """The names under the bars, and under them the state of the hosts."""
    centres = layout.centres[number]

    def put(x: float, down_pt: float, text: str, **how: Any) -> None:
        axes.annotate(text, (x, 0), xytext=(0, -down_pt), textcoords="offset points", annotation_clip=False, **how)

    for x, bar in zip(centres, group.bars, strict=True):
        name = layout.names.texts[bar.schedule]
        if layout.names.slope:
            put(x + 3, 3, name, ha="right", va="top", rotation=_SLOPE_DEGREES, rotation_mode="anchor")
        else:
            put(x, 3, name, ha="center", va="top", linespacing=style.LINE - 0.15)
    middle = (centres[0] + centres[-1]) / 2
    down = 4 + layout.names.height_pt + 2
    put(middle, down, style.label(group.bed, _NAME_LENGTH_MAX), ha="center", va="top", weight="bold")
    for level, line in enumerate(topology):
        below = down + style.LABEL_PT * style.LINE + level * style.SMALL_PT * style.LINE
        put(middle, below, line, ha="center", va="top", size=style.SMALL_PT, color=style.FAINT)


def _meanings(table: BarTable) -> dict[str, str]:
    """What the line and the diamond mean, as far as they are there."""
    meanings = {}
    if any(group.bound_s is not None for group in table.groups):
        meanings["bound"] = "lower bound T*, and % over it"
    if any(bar.predicted_s is not None for bar in table.bars):
        meanings["predicted"] = "predicted by the simulator"
    return meanings
