"""A plan's predicted timetable: a row for each port, a bar for each transfer, coloured by stage.

    timeline(plan, topology) -> Timeline     what happens when, simulated
    Timeline.stages()                        for each stage its transfers, bytes, first start and last end
    Timeline.save(path)                      the picture; in a notebook a Timeline shows it by itself

The other modules here draw records. This one draws a prediction, so `optcc figures` leaves it out; it lies here because
this is the only floor that may use both the simulator and `style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, column
from optcc.errors import InputError, PlanError, TopologyError
from optcc.files import replace_file
from optcc.paper_figures import style
from optcc.plan import Plan
from optcc.schedule import OPS
from optcc.show import Card, WholeCard
from optcc.simulate import Model, simulate
from optcc.simulate.ports import PortMap
from optcc.timing import Timing
from optcc.topology import Topology, endpoint_text
from optcc.transfers import Transfers
from optcc.units import show_size, show_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED = "measured"
"""The model of times that were not predicted."""
FORMATS = (".svg", ".png", ".pdf")
"""Endings of a picture's file."""
BARS_MAX = 4000
"""With more bars than this the picture is an image: the file stays small, and one bar could not be seen anyway."""
PORTS_MAX = 256
"""Of more ports than this only the busiest are drawn."""

STAGE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#332288", "#f0e442", "#661100", "#56b4e9")
"""Told apart with any colour vision: with full deuteranopia, protanopia or tritanopia (Machado, Oliveira and Fernandes,
IEEE TVCG 15(6), 2009) no two of them, `OTHER` and `IDLE` come closer than 16 in CIELAB."""
OTHER = "#555555"
IDLE = "#e6e6e6"

_ROW_PT, _BAR_SHARE, _PAIR_GAP = 11.0, 0.84, 0.35
_ROWS_PT_MAX = 540.0
_EDGE_PT, _TICK_PT, _FOOT_PT, _GAP_PT, _SWATCH_PT = 3.0, 4.0, 25.0, 5.0, 20.0
_LABEL_PITCH_PT = 7.5
_ROOMY_PT = 5.0
"""Rows that are flatter than this touch each other."""
_WRAP_SHARE = 0.97
"""Of the width, for text: drawn on pixels it comes out a little wider than measured."""
_NAME_LENGTH_MAX, _WHERE_LENGTH_MAX = 24, 160
_BAR_PT_MIN = 1.5
"""Bars that are mostly thinner than this are drawn as an image."""
_NUMBERED_MAX = 600
_NUMBER_MARGIN_PT, _NUMBER_HEIGHT_PT = 2.0, 7.0
_DARK = 0.25
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PortIntervals:
    """When which transfer is at which port, in columns of equal length; `share` is its part of the port's rate."""

    transfer: Column
    port: Column
    start_s: Seconds
    end_s: Seconds
    share: Seconds


def port_intervals(transfers: Transfers, topology: Topology, timing: Timing) -> PortIntervals:
    """For every transfer its time at the out port of its source and at the in port of its destination.

    `share` is a mean, lower than 1 where the other port is slower or several transfers share a port.
    Ports are positions in `timing.port_names`; a transfer that needs no port has no interval, and none has one on an
    uplink, for which `timing` has no times.

    Raises TopologyError if the topology has a port for each rail: a transfer would be at several of them.
    """
    ports = PortMap.of(topology)
    if ports.names != timing.port_names:
        raise TopologyError(f"{topology!r}: rails have ports of their own, which are not drawn: must be pooled")
    rates = np.array([float(rate) for rate in ports.rates])
    out, in_ = ports.used_by(transfers)
    used = np.flatnonzero(out >= 0)
    out, in_, size = out[used], in_[used], transfers.bytes[used]
    port = np.concatenate((out, in_))
    start_s = np.concatenate((timing.start_s[used], timing.taken_s[used]))
    # What was measured has arrived when it has, be it faster than the declared rate.
    landed_s = timing.sent_s[used] if timing.model == MEASURED else timing.landed_s(used, size / rates[in_])
    end_s = np.concatenate((timing.sent_s[used], landed_s))
    share = np.tile(size, 2) / rates[port] / (end_s - start_s)
    return PortIntervals(column(np.tile(used, 2)), column(port), start_s, end_s, share)


@dataclass(frozen=True, slots=True)
class StageSpan:
    """What a stage moves, and from when to when; a stage without transfers has no times."""

    name: str
    transfers: int
    bytes: int
    start_s: float | None
    end_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The transfers of the plan `name` with their predicted times on `topology`.

    Raises PlanError if the times are not those of the transfers.
    """

    name: str
    transfers: Transfers
    topology: Topology
    timing: Timing

    def __post_init__(self) -> None:
        if len(self.timing.start_s) != len(self.transfers):
            raise PlanError(
                f"timeline of {self.name}: times of {len(self.timing.start_s)} transfers: must be {len(self.transfers)}"
            )

    @property
    def seconds(self) -> float:
        """The end of the last transfer."""
        return self.timing.seconds

    @property
    def n_segments(self) -> int:
        """Segments that move."""
        return len(np.unique(self.transfers.segment))

    def stages(self) -> tuple[StageSpan, ...]:
        """What each stage moves and when, in the schedule's order."""
        spans = []
        for number, name in enumerate(self.transfers.stages):
            own = self.transfers.stage == number
            n, size = int(own.sum()), int(self.transfers.bytes[own].sum())
            start_s = float(self.timing.start_s[own].min()) if n else None
            spans.append(StageSpan(name, n, size, start_s, float(self.timing.end_s[own].max()) if n else None))
        return tuple(spans)

    def stage_card(self) -> Card:
        """The stages as a table."""
        rows = tuple(
            (
                stage.name,
                str(stage.transfers),
                show_size(stage.bytes),
                "-" if stage.start_s is None else show_time(stage.start_s),
                "-" if stage.end_s is None else show_time(stage.end_s),
            )
            for stage in self.stages()
        )
        title = f"{self._title()} ({self.timing.model} ports), {self._counts()}"
        return Card(title, ("stage", "transfers", "bytes", "first start", "last end"), rows)

    def transfer_card(self, rows: int) -> Card:
        """The first `rows` transfers by their start as a table, all of which is shown."""
        shown = np.argsort(self.timing.start_s, kind="stable")[:rows].tolist()
        title = f"{len(shown)} of {len(self.transfers)} transfers, by their start"
        columns = ("start", "end", "transfer", "op", "bytes", "segment", "offset", "stage")
        return WholeCard(title, columns, tuple(self._row(index) for index in shown))

    def _row(self, index: int) -> tuple[str, ...]:
        transfers = self.transfers
        return (
            show_time(float(self.timing.start_s[index])),
            show_time(float(self.timing.end_s[index])),
            f"{transfers.src[index]}->{transfers.dst[index]}",
            OPS[transfers.op[index]],
            show_size(int(transfers.bytes[index])),
            str(transfers.segment[index]),
            str(transfers.dst_offset[index]),
            transfers.stages[transfers.stage[index]],
        )

    def as_json(self) -> dict[str, object]:
        """Seconds, the share of them in which each port is busy, the stages, the number of transfers."""
        return {
            "seconds": self.seconds,
            "ports": self.timing.utilisation(),
            "stages": {
                stage.name: {
                    "transfers": stage.transfers,
                    "bytes": stage.bytes,
                    "start": stage.start_s,
                    "end": stage.end_s,
                }
                for stage in self.stages()
            },
            "transfers": len(self.transfers),
        }

    def save(self, path: Path | str) -> None:
        """Draws the timeline into the file at `path`, an SVG, PNG or PDF; the same timeline gives the same bytes.

        Raises InputError for another ending or a file that cannot be written, EnvironmentMissing without matplotlib.
        """
        ending = picture_ending(Path(path))
        replace_file(Path(path), style.render(draw(self), ending))

    def _repr_svg_(self) -> str:
        return style.render(draw(self), ".svg").decode()

    def __repr__(self) -> str:
        return f"Timeline({self.name!r}, {self.seconds:.6g} s, transfers={len(self.transfers)})"

    def _title(self) -> str:
        collective, size = self.transfers.collective.name, show_size(self.transfers.size_bytes)
        return f"{style.label(self.name, _NAME_LENGTH_MAX)}: {collective} of {size} in {show_time(self.seconds)}"

    def _counts(self) -> str:
        n = self.n_segments
        return f"{len(self.transfers)} transfers in {n} segment{'' if n == 1 else 's'}"


def timeline(plan: Plan, topology: Topology, model: Model = "fifo") -> Timeline:
    """What `plan` does when on `topology`, as `optcc.simulate.simulate` predicts it.

    >>> from optcc.planner import build_plan
    >>> topology = Topology.parse("4@1GB/s,3=500MB/s")
    >>> shown = timeline(build_plan("ring", topology, 4096, segments=1), topology)
    >>> shown
    Timeline('ring', 1.2288e-05 s, transfers=24)
    >>> shown.stages()[0]
    StageSpan(name='reduce-scatter', transfers=12, bytes=12288, start_s=0.0, end_s=6.144e-06)

    Raises what `simulate` raises.
    """
    return Timeline(plan.name, plan.transfers, topology, simulate(plan, topology, model=model))


def picture_ending(path: Path) -> str:
    """The ending of a picture's file; raises InputError if it is none of `FORMATS`."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise InputError(f"picture {str(path)!r}: must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    return ending


# The picture


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Which ports are drawn, from top to bottom, and where, in points from the top of the axes."""

    ports: Column
    top_pt: npt.NDArray[np.float64]
    pitch_pt: float
    bar_pt: float
    height_pt: float

    @classmethod
    def of(cls, timing: Timing) -> _Rows:
        """All ports, or those of the servers and GPUs with the busiest one, in their order; out and in are a pair."""
        busy = np.array(timing.port_busy_s).reshape(-1, 2).max(axis=1)
        pairs = np.sort(np.argsort(-busy, kind="stable")[: PORTS_MAX // 2])
        ports = column((2 * pairs[:, None] + [0, 1]).ravel())
        n = len(ports)
        roomy = n * _ROOMY_PT <= _ROWS_PT_MAX
        place = np.arange(n) + (_PAIR_GAP if roomy else 0.0) * (np.arange(n) // 2)
        pitch = min(_ROW_PT, _ROWS_PT_MAX / (place[-1] + 1)) if n else _ROW_PT
        bar_pt = pitch * (_BAR_SHARE if roomy else 1.0)
        return cls(ports, place * pitch, pitch, bar_pt, float(place[-1] * pitch + bar_pt) if n else pitch)

    @property
    def labelled(self) -> range:
        """The rows that have room for a line of text: all of them, or every other pair, ..."""
        needed = _LABEL_PITCH_PT / self.pitch_pt
        return range(0, len(self.ports), 1 if needed <= 1 else 2 * ceil(needed / 2))

    @property
    def centre_pt(self) -> npt.NDArray[np.float64]:
        """The middle of each row."""
        return self.top_pt + self.bar_pt / 2


@dataclass(frozen=True, slots=True)
class _Paint:
    """The colours in use, their names, and for each stage which of them it has."""

    names: tuple[str, ...]
    colours: tuple[str, ...]
    of_stage: tuple[int, ...]

    @classmethod
    def of(cls, stages: Sequence[StageSpan]) -> _Paint:
        """A colour for each stage; if they are too many, the stages with the fewest bytes share a grey one."""
        used = [number for number, stage in enumerate(stages) if stage.transfers]
        most = len(STAGE_COLOURS)
        own = used if len(used) <= most else sorted(sorted(used, key=lambda each: -stages[each].bytes)[:most])
        names = [style.label(stages[each].name, _NAME_LENGTH_MAX) for each in own]
        colours = list(STAGE_COLOURS[: len(own)])
        if len(own) < len(used):
            names.append(f"{len(used) - len(own)} other stages")
            colours.append(OTHER)
        of_stage = tuple(own.index(number) if number in own else len(own) for number in range(len(stages)))
        return cls(tuple(names), tuple(colours), of_stage)


def draw(shown: Timeline) -> Figure:
    """The picture, as wide as a page. Ids: `idle`, `bars:STAGE` or `image`."""
    with style.applied():
        return _draw(shown)


def _draw(shown: Timeline) -> Figure:
    rows = _Rows.of(shown.timing)
    paint = _Paint.of(shown.stages())
    intervals = port_intervals(shown.transfers, shown.topology, shown.timing)
    names = [style.label(shown.timing.port_names[port], _NAME_LENGTH_MAX) for port in rows.ports]
    width = style.PAGE_IN * style.POINTS_IN
    left = _EDGE_PT + _TICK_PT + max((style.text_width_pt(name, style.LABEL_PT) for name in names), default=0.0)
    right = _EDGE_PT + _TICK_PT + style.text_width_pt("100 %", style.LABEL_PT)
    wide = width - left - right
    as_bars = _fit_as_bars(shown, intervals, wide)
    words = _caption(shown, rows, intervals, as_bars, wide).split(" ")
    said = style.wrapped(words, " ", _WRAP_SHARE * width, style.SMALL_PT, 4)
    entries = [*zip(paint.names, paint.colours, strict=True), ("idle", IDLE)]
    entry_pt = _SWATCH_PT + max(style.text_width_pt(name, style.LABEL_PT) for name, _ in entries)
    n_columns = min(len(entries), max(1, int((width - 2 * _EDGE_PT) // entry_pt)))
    title_pt, said_pt = style.TITLE_PT * style.LINE, len(said) * style.SMALL_PT * style.LINE
    legend_pt = ceil(len(entries) / n_columns) * style.LABEL_PT * 1.5
    head = _EDGE_PT + title_pt + said_pt + 2 * _GAP_PT + legend_pt
    height = head + rows.height_pt + _FOOT_PT
    figure = style.new_figure(width, height)
    x = _EDGE_PT / width
    figure.text(x, 1 - _EDGE_PT / height, shown._title(), va="top", size=style.TITLE_PT, weight="bold")
    for number, line in enumerate(said):
        y_pt = _EDGE_PT + title_pt + number * style.SMALL_PT * style.LINE
        figure.text(x, 1 - y_pt / height, line, va="top", size=style.SMALL_PT, color=style.FAINT)
    axes = figure.add_axes((left / width, _FOOT_PT / height, wide / width, rows.height_pt / height))
    if as_bars:
        _draw_bars(axes, shown, rows, paint, intervals, wide)
    else:
        _draw_image(axes, shown, rows, paint, intervals, wide)
    if not names:
        axes.set_axis_off()
        return figure
    _draw_frame(axes, shown, rows, names)
    legend_y = 1 - (_EDGE_PT + title_pt + said_pt + _GAP_PT) / height
    _draw_legend(figure, axes, entries, n_columns, (x, legend_y))
    return figure


def _caption(shown: Timeline, rows: _Rows, intervals: PortIntervals, as_bars: bool, wide: float) -> str:
    """What is drawn, and how to read it."""
    topology = shown.topology
    where = style.label(topology.text or endpoint_text(topology.out, topology.in_), _WHERE_LENGTH_MAX)
    latency = f"latency {show_time(float(topology.latency_s))}" if topology.latency_s else "no latency"
    how = f"Predicted on {where}: {shown.timing.model} ports, {latency}"
    if shown.timing.model == MEASURED:
        how = f"Measured, against the rates of {where}"
    said = [f"{how}, {shown._counts()}."]
    if len(rows.ports) < len(shown.timing.port_names):
        said.append(f"{len(rows.ports)} of {len(shown.timing.port_names)} ports, those of the busiest servers.")
    if topology.pods:
        said.append("Transfers are not drawn at uplinks, of which only the load is known.")
    if len(intervals.port) == 0:
        said.append("No transfer uses a port.")
    elif as_bars:
        numbered = ", numbered by segment," if len(intervals.port) <= _NUMBERED_MAX else ""
        said.append(f"A bar is a transfer{numbered} and as high as its share of the port's rate.")
    else:
        mean = show_time(shown.seconds / _columns(wide))
        said.append(
            f"Drawn as an image: a column of pixels is the mean over {mean}, a stage as high as its share of the "
            "port's rate."
        )
    return " ".join(said)


def _fit_as_bars(shown: Timeline, intervals: PortIntervals, wide: float) -> bool:
    """True if there are not too many bars, they can be seen, and no two lie on each other."""
    if len(intervals.port) == 0:
        return True
    if len(intervals.port) > BARS_MAX:
        return False
    if float(np.median(intervals.end_s - intervals.start_s)) / shown.seconds * wide < _BAR_PT_MIN:
        return False
    order = np.lexsort((intervals.start_s, intervals.port))
    port, start_s, end_s = intervals.port[order], intervals.start_s[order], intervals.end_s[order]
    overlap_s = np.where(port[1:] == port[:-1], end_s[:-1] - start_s[1:], 0.0)
    return float(overlap_s.max(initial=0.0)) <= 1e-9 * shown.seconds


def _draw_bars(axes: Axes, shown: Timeline, rows: _Rows, paint: _Paint, intervals: PortIntervals, wide: float) -> None:
    stage = np.array(paint.of_stage, dtype=np.int64)[shown.transfers.stage[intervals.transfer]]
    share = np.minimum(intervals.share, 1.0).round(6)
    numbered = len(intervals.port) <= _NUMBERED_MAX
    for port, top_pt in zip(rows.ports.tolist(), rows.top_pt.tolist(), strict=True):
        axes.broken_barh([(0, shown.seconds or 1)], (top_pt, rows.bar_pt), facecolor=IDLE, linewidth=0, gid="idle")
        own = np.flatnonzero(intervals.port == port)
        for kind, height in sorted(set(zip(stage[own].tolist(), share[own].tolist(), strict=True))):
            alike = own[(stage[own] == kind) & (share[own] == height)]
            start_s, end_s = intervals.start_s[alike], intervals.end_s[alike]
            bar = (top_pt + rows.bar_pt * (1 - height), rows.bar_pt * height)
            axes.broken_barh(
                list(zip(start_s.tolist(), (end_s - start_s).tolist(), strict=True)),
                bar,
                facecolor=paint.colours[kind],
                edgecolor="white",
                linewidth=0.4,
                gid=f"bars:{kind}",
            )
            if not numbered or bar[1] < _NUMBER_HEIGHT_PT:
                continue
            for begin_s, stop_s, segment in zip(
                start_s, end_s, shown.transfers.segment[intervals.transfer[alike]].tolist(), strict=True
            ):
                room = (stop_s - begin_s) / shown.seconds * wide - _NUMBER_MARGIN_PT
                if style.text_width_pt(str(segment), style.SMALL_PT) <= room:
                    axes.text(
                        (begin_s + stop_s) / 2,
                        bar[0] + bar[1] / 2,
                        str(segment),
                        size=style.SMALL_PT,
                        color="white" if _luminance(paint.colours[kind]) < _DARK else style.INK,
                        ha="center",
                        va="center_baseline",
                    )


def _luminance(colour: str) -> float:
    """How light `#rrggbb` is, from 0 to 1.

    >>> _luminance("#000000"), round(_luminance("#ffffff"), 3), _luminance("#0072b2") < _luminance("#e69f00")
    (0.0, 1.0, True)
    """
    weights = (0.2126, 0.7152, 0.0722)
    return float(sum(weight * (part / 255) ** 2.2 for weight, part in zip(weights, _rgb(colour), strict=True)))


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _columns(wide: float) -> int:
    """Pixels of an image beside each other."""
    return round(wide * style.PNG_DPI / style.POINTS_IN)


def _draw_image(axes: Axes, shown: Timeline, rows: _Rows, paint: _Paint, intervals: PortIntervals, wide: float) -> None:
    """All bars as one image, in which a pixel of a row has the colour of the stage that reaches its height."""
    per_pt = style.PNG_DPI / style.POINTS_IN
    n_columns = _columns(wide)
    palette = np.array([_rgb(each) for each in (*paint.colours, IDLE)], dtype=np.uint8)
    image = np.full((round(rows.height_pt * per_pt), n_columns, 3), 255, dtype=np.uint8)
    stage = np.array(paint.of_stage, dtype=np.int64)[shown.transfers.stage[intervals.transfer]]
    order = np.argsort(intervals.port, kind="stable")
    first = np.searchsorted(intervals.port[order], np.arange(len(shown.timing.port_names) + 1))
    for port, top_pt in zip(rows.ports.tolist(), rows.top_pt.tolist(), strict=True):
        own = order[first[port] : first[port + 1]]
        n_bins, n_kinds, bin_s = n_columns, len(paint.colours), shown.seconds / n_columns
        weight = intervals.share[own]
        mean = _integrated(intervals.start_s[own] / bin_s, stage[own], weight, n_kinds, n_bins)
        mean -= _integrated(intervals.end_s[own] / bin_s, stage[own], weight, n_kinds, n_bins)
        reach = np.cumsum(mean, axis=0)
        top, bottom = round(top_pt * per_pt), round((top_pt + rows.bar_pt) * per_pt)
        level = (bottom - np.arange(top, bottom) - 0.5) / max(bottom - top, 1)
        image[top:bottom] = palette[(reach[None] <= level[:, None, None]).sum(axis=1)]
    axes.imshow(image, extent=(0, shown.seconds, rows.height_pt, 0), aspect="auto", interpolation="none", gid="image")


def _integrated(at: Seconds, kind: Column, weight: Seconds, n_kinds: int, n_bins: int) -> Seconds:
    """For each kind and bin, the mean over the bin of the sum of the weights that begin at `at`, counted in bins.

    >>> _integrated(np.array([0.25]), column([0]), np.array([1.0]), 1, 3).tolist()
    [[0.75, 1.0, 1.0]]
    """
    bins = np.clip(at.astype(np.int64), 0, n_bins)
    key = kind * (n_bins + 2) + bins
    room = n_kinds * (n_bins + 2)
    begun = np.bincount(key, weight * (bins + 1 - at), room).reshape(n_kinds, -1)
    full = np.bincount(key + 1, weight, room).reshape(n_kinds, -1).cumsum(axis=1)
    mean: Seconds = (begun + full)[:, :n_bins]
    return mean


def _draw_frame(axes: Axes, shown: Timeline, rows: _Rows, names: Sequence[str]) -> None:
    """Time below, names at the left, busy shares at the right."""
    total = shown.seconds or 1.0
    axes.set_xlim(0, total)
    axes.set_ylim(rows.height_pt, 0)
    for spine in ("left", "bottom"):
        axes.spines[spine].set_visible(False)
    axes.set_yticks(rows.centre_pt[rows.labelled], [names[row] for row in rows.labelled])
    axes.tick_params(axis="y", length=0, pad=_TICK_PT)
    busy = list(shown.timing.utilisation().values())
    beside = [(f"{100 * busy[rows.ports[row]]:.0f} %", rows.centre_pt[row], style.INK) for row in rows.labelled]
    for text, y_pt, ink in [("busy", -style.LABEL_PT, style.FAINT), *beside]:
        axes.annotate(
            text,
            (1, y_pt),
            xycoords=("axes fraction", "data"),
            xytext=(_TICK_PT + style.text_width_pt("100 %", style.LABEL_PT), 0),
            textcoords="offset points",
            ha="right",
            va="center_baseline",
            size=style.LABEL_PT,
            color=ink,
            annotation_clip=False,
        )
    if shown.seconds == 0:
        axes.set_xticks([0])
        axes.set_xlabel("time (s)", labelpad=1.5)
        return
    unit, factor = next((each for each in _UNITS if total * each[1] >= 1), _UNITS[-1])
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * factor:.10g}")
    axes.tick_params(axis="x", labelsize=style.LABEL_PT, length=2.5, width=0.6)
    axes.set_xlabel(f"time ({unit})", labelpad=1.5)


def _draw_legend(
    figure: Figure, axes: Axes, entries: Sequence[tuple[str, str]], n_columns: int, corner: tuple[float, float]
) -> None:
    """The names of the colours, read line by line although a legend is filled column by column."""
    swatches = [axes.broken_barh([], (0, 0), facecolor=colour, linewidth=0) for _, colour in entries]
    order = list(chain.from_iterable(range(len(entries))[start::n_columns] for start in range(n_columns)))
    figure.legend(
        [swatches[each] for each in order],
        [entries[each][0] for each in order],
        loc="upper left",
        bbox_to_anchor=corner,
        ncols=n_columns,
        fontsize=style.LABEL_PT,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.35,
    )
