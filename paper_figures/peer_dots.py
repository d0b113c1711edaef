"""The figure of ours and peers: a panel for each state of the hosts, a dot for each contender, time over the bound.

    data(record, size_bytes) -> PeerTable    what is drawn, all from the record
    draw(table) -> Figure                    the picture, all from the table
    numbers(table)                           the same numbers for prose

A dot is the median of the undisturbed runs, the line through it reaches from the least to the greatest of all. 1 is the
lower bound T*, with the wire's headers in it. A contender that did not survive the loss of a NIC has a word in place of
a dot, and one that was not run says so, with a letter for the reason; notes under the panels say what both mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optcc.experiments.peers_contenders import LEFT_OUT
from optcc.experiments.peers_record import OURS, PeerComparison, PeerRun, shown_state
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "peer-dots"
SAYS = (
    "AllReduce on emulated hosts, measured: our schedules, told the rates of the NICs, beside other libraries. Time "
    "over the lower bound T*, for each state of the hosts, and after the loss of a NIC in mid-run."
)
"""What the figure says, for a gallery."""
LOST = "after the loss"
_SHOWN_BEDS = {LOST: "after a NIC was lost in mid-run"}
"""Panels whose heading says more than their key."""
_MARKS = {("o", True): "ours over TCP", ("o", False): "ours over MPI", ("s", True): "other libraries"}
"""What marks mean."""
HUNG, FAILED = "hung", "failed"
NOT_RUN = "not run"
NO_LOSS = "this is the job of ours that loses a NIC in mid-run"
ONE_JOB = "of ours another job loses a NIC: it begins with ring and goes on with optimal"
_ROW_PT = 11.0
_TITLE_PT, _HEAD_PT, _FOOT_PT, _NOTE_PT = 37.0, 24.0, 24.0, 8.0
_RIGHT_PT, _GAP_PT = 5.0, 7.0
_NAME_LENGTH_MAX = 30
_BED_LENGTH_MAX = 60
_BED_LINES_MAX = 2
_PANELS_A_LINE = 4
_ROOM = 1.32
"""How far the scale goes beyond the last dot, for the number beside it."""


@dataclass(frozen=True)
class PeerPanel:
    """A state of so many hosts: a run for each contender that has one, and a word for those that did not end."""

    bed: str
    hosts: int
    bound_s: float
    runs: tuple[tuple[str, PeerRun], ...]
    words: tuple[tuple[str, str], ...] = ()

    @property
    def contenders(self) -> set[str]:
        """Those of whom there is a run or a word."""
        return {contender for contender, _ in (*self.runs, *self.words)}

    @property
    def key(self) -> str:
        """Its name in the keys of numbers."""
        return f"{self.hosts}-hosts/{self.bed}"

    @property
    def greatest(self) -> float:
        """The largest median over the bound."""
        return max((run.median_s / run.bound_s for _, run in self.runs), default=1.0)


@dataclass(frozen=True)
class PeerTable:
    """The record, the size of the message, the contenders from top to bottom, and the panels from left to right."""

    record: PeerComparison
    size_bytes: int
    contenders: tuple[tuple[str, str], ...]
    panels: tuple[PeerPanel, ...]

    def lines(self) -> list[PeerTable]:
        """The panels as they stand below each other, each line with the contenders that it has."""
        found = []
        for at in range(0, max(1, len(self.panels)), _PANELS_A_LINE):
            panels = self.panels[at : at + _PANELS_A_LINE]
            there = set().union(*(panel.contenders for panel in panels))
            found.append(replace(self, panels=panels, contenders=tuple(c for c in self.contenders if c[0] in there)))
        return found

    def not_run(self, panel: PeerPanel, contender: str) -> str:
        """Why the record has no run of a contender in a panel."""
        state = shown_state((panel.hosts, self.size_bytes, panel.bed))
        absent = self.record.absent
        for what in (f"{contender}: {state}", f"{contender}: further states", contender):
            if what in absent:
                return absent[what]
        only_lost = all(contender not in other.contenders for other in self.panels if other.bed != LOST)
        if panel.bed != LOST:
            return NO_LOSS if only_lost else LEFT_OUT
        return ONE_JOB if dict(self.contenders)[contender] == OURS else LEFT_OUT

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason why a row of the figure is empty, once each; a letter stands for its place."""
        found = (
            self.not_run(panel, contender)
            for line in self.lines()
            for panel in line.panels
            for contender, _ in line.contenders
            if contender not in panel.contenders
        )
        return tuple(dict.fromkeys(found))

    @property
    def notes(self) -> tuple[str, ...]:
        """What stands under the panels: what each word and each letter means."""
        words = {word for panel in self.panels for _, word in panel.words}
        limits = {f"{loss.limit_s:g} s" for loss in self.record.losses if loss.size_bytes == self.size_bytes}
        hung = f"{HUNG}: the AllReduce in which the NIC was lost had not ended after {' or '.join(sorted(limits))}"
        failed = f"{FAILED}: the job ended with an error when the NIC was lost"
        said = {HUNG: f"{hung}, and the job was ended.", FAILED: f"{failed}."}
        letters = (f"{NOT_RUN} ({_letter(at)}): {why}." for at, why in enumerate(self.reasons))
        return (*self._late_notes(), *(text for word, text in said.items() if word in words), *letters)

    def _late_notes(self) -> list[str]:
        """What a host that is late means, if one is."""
        late = sorted({f"{run.late_s:.1f} s" for panel in self.panels for _, run in panel.runs if run.late_s})
        return [f"late: by {' or '.join(late)}; time and T* count from when that host begins."] if late else []

    @property
    def nic_rates(self) -> dict[int, str]:
        """What a healthy NIC carries, by number of hosts; several rates of one number in one text."""
        runs = [run for panel in self.panels for _, run in panel.runs]
        return {
            hosts: " and ".join(dict.fromkeys(run.nic_rate for run in runs if run.hosts == hosts))
            for hosts in dict.fromkeys(run.hosts for run in runs)
        }


def _sizes(record: PeerComparison) -> list[int]:
    return sorted({run.size_bytes for run in record.runs})


def _name_of(size_bytes: int) -> str:
    return f"{NAME}-{show_size(size_bytes)}"


def names(record: PeerComparison) -> list[str]:
    """The names of the figures of a record: one for each size."""
    return [_name_of(size_bytes) for size_bytes in _sizes(record)]


def tables(record: PeerComparison) -> dict[str, PeerTable]:
    """A figure for each size in a record, by the name of its files."""
    return {_name_of(size_bytes): data(record, size_bytes) for size_bytes in _sizes(record)}


def data(record: PeerComparison, size_bytes: int) -> PeerTable:
    """The runs of one size, by number of hosts and state, and those after a loss."""
    runs = [run for run in record.runs if run.size_bytes == size_bytes]
    losses = [loss for loss in record.losses if loss.size_bytes == size_bytes]
    sides = {(run.contender, run.side) for run in runs} | {(loss.contender, loss.side) for loss in losses}
    contenders = tuple(sorted(sides, key=lambda each: (each[1] != OURS, _rank(each[0]), each[0])))
    panels = []
    for hosts in sorted({run.hosts for run in runs}):
        for bed in dict.fromkeys(run.bed for run in runs if run.hosts == hosts):
            own = [run for run in runs if (run.hosts, run.bed) == (hosts, bed)]
            panels.append(PeerPanel(bed, hosts, own[0].bound_s, tuple((run.contender, run) for run in own)))
        lost = [loss for loss in losses if loss.hosts == hosts]
        after = tuple((loss.contender, loss.next) for loss in lost if loss.next is not None)
        words = tuple((loss.contender, _word(loss.outcome)) for loss in lost if loss.next is None)
        if lost:
            panels.append(PeerPanel(LOST, hosts, after[0][1].bound_s if after else 0.0, after, words))
    return PeerTable(record, size_bytes, contenders, tuple(panels))


def _rank(contender: str) -> tuple[bool, tuple[int, str]]:
    """Ours over TCP first, in the order in which bars stand elsewhere."""
    name, _, carrier = contender.rstrip(")").partition(" (")
    return (carrier != "tcp", style.order(name))


def _word(outcome: str) -> str:
    return HUNG if outcome.startswith(HUNG) else FAILED


def _letter(place: int) -> str:
    return chr(ord("a") + place)


def numbers(table: PeerTable) -> dict[str, Number]:
    """Every number of the figure, by `hosts/bed/contender/what`."""
    record = table.record
    found = {
        "size": Number(table.size_bytes, show_size(table.size_bytes)),
        "wire-overhead-percent": Number.percent(100 * (record.wire_overhead - 1), 2),
        "wrong": Number.whole(record.wrong),
    }
    for hosts, rate in table.nic_rates.items():
        found[f"{hosts}-hosts/nic-rate"] = Number(rate, rate)
    for panel in table.panels:
        if panel.bound_s:
            found[f"{panel.key}/bound"] = Number.seconds(panel.bound_s)
        for contender, run in panel.runs:
            key = f"{panel.key}/{contender}"
            found[f"{key}/seconds"] = Number.seconds(run.median_s)
            found[f"{key}/over-bound-percent"] = Number.percent(100 * (run.median_s / run.bound_s - 1))
            found[f"{key}/cpu-seconds-per-gb"] = Number.percent(run.cpu_s_per_gb, 2)
            found[f"{key}/runs"] = Number.whole(len(run.seconds))
        for contender, word in panel.words:
            found[f"{panel.key}/{contender}/outcome"] = Number(word, word)
    for loss in record.losses:
        if loss.stall_s is not None and loss.size_bytes == table.size_bytes:
            found[f"{loss.hosts}-hosts/{LOST}/{loss.contender}/stall"] = Number.seconds(loss.stall_s)
    return found


def draw(table: PeerTable) -> Figure:
    """The picture, as wide as a page. Ids: `dot:HOSTS:BED:CONTENDER`, likewise `reach`, `value`, `word`, `empty`."""
    with style.applied():
        return _draw(table)


def _draw(table: PeerTable) -> Figure:
    width = style.PAGE_IN * style.POINTS_IN
    names = [style.label(contender, _NAME_LENGTH_MAX) for contender, _ in table.contenders]
    left = 14 + max((style.text_width_pt(name, style.LABEL_PT) for name in names), default=20.0)
    count = min(_PANELS_A_LINE, max(1, len(table.panels)))
    panel_pt = (width - left - _RIGHT_PT - (count - 1) * _GAP_PT) / count
    lines = table.lines()
    heads = [_HEAD_PT + _more_head_pt(line, panel_pt) for line in lines]
    talls = [_ROW_PT * max(1, len(line.contenders)) for line in lines]
    notes_pt = len(table.notes) * _NOTE_PT + (3 if table.notes else 0)
    height = _TITLE_PT + sum(heads) + sum(talls) + len(lines) * _FOOT_PT + notes_pt
    figure = style.new_figure(width, height)
    _draw_words(figure, table, width, height)
    ceiling = 1 + (max([1.2, *(panel.greatest for panel in table.panels)]) - 1) * _ROOM + 0.25
    top = height - _TITLE_PT
    for line, head, tall in zip(lines, heads, talls, strict=True):
        bottom = top - head - tall
        names = [style.label(contender, _NAME_LENGTH_MAX) for contender, _ in line.contenders]
        for number, panel in enumerate(line.panels):
            x = left + number * (panel_pt + _GAP_PT)
            axes = figure.add_axes((x / width, bottom / height, panel_pt / width, tall / height))
            _draw_panel(axes, panel, line, ceiling)
            _draw_head(axes, panel, panel_pt)
            _draw_empty(axes, panel, line, table)
            axes.set_yticks(range(len(names)), names if number == 0 else [""] * len(names))
        top = bottom - _FOOT_PT
    return figure


def _draw_words(figure: Figure, table: PeerTable, width: float, height: float) -> None:
    """Title, conditions, the legend of the marks, and the notes at the bottom."""
    from matplotlib.lines import Line2D

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(3 / width, 1 - y_pt / height, text, va="top", **how)

    record = table.record
    title = f"AllReduce of {style.spaced(show_size(table.size_bytes))} on emulated hosts: time over the lower bound T*"
    put(3, title, size=style.TITLE_PT, weight="bold")
    overhead = 100 * (record.wire_overhead - 1)
    wrong = f"{record.wrong} wrong elements" if record.wrong else "no wrong element"
    rates = ", ".join(f"{style.spaced(rate)} on {hosts} hosts" for hosts, rate in table.nic_rates.items())
    said = f"NICs of {rates}; ours are told the rates; T* includes {overhead:.2f} % of headers; {wrong}."
    put(4 + style.TITLE_PT * style.LINE, said, size=style.SMALL_PT, color=style.FAINT)
    there = {_mark(contender, side == OURS) for contender, side in table.contenders}
    marks = {name: mark for mark, name in _MARKS.items() if mark in there}
    look: dict[str, Any] = {"color": style.FAINT, "linestyle": "none", "markersize": 4.2}
    shown = [
        Line2D([], [], marker=marker, markerfacecolor=style.FAINT if filled else "white", **look)
        for marker, filled in marks.values()
    ]
    figure.legend(
        [*shown, Line2D([], [], color=style.FAINT, linewidth=0.9)],
        [*(f"median, {name}" for name in marks), "from the least run to the greatest"],
        loc="upper left",
        bbox_to_anchor=(3 / width, 1 - (14 + style.TITLE_PT * style.LINE) / height),
        ncols=4,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.6,
        handletextpad=0.4,
        columnspacing=1.6,
    )
    for place, note in enumerate(table.notes):
        put(height - 1 - (len(table.notes) - place) * _NOTE_PT, note, size=style.SMALL_PT, color=style.FAINT)


def _heading(panel: PeerPanel, panel_pt: float) -> list[str]:
    """The name of a panel's state in as many lines as it takes."""
    words = style.label(_SHOWN_BEDS.get(panel.bed, panel.bed), _BED_LENGTH_MAX).split(" ")
    return style.wrapped(words, " ", panel_pt, style.LABEL_PT, _BED_LINES_MAX, "bold")


def _more_head_pt(line: PeerTable, panel_pt: float) -> float:
    """What the longest heading of a line of panels takes beyond one line of text."""
    most = max((len(_heading(panel, panel_pt)) for panel in line.panels), default=1)
    return (most - 1) * style.LABEL_PT * style.LINE


def _draw_head(axes: Axes, panel: PeerPanel, panel_pt: float) -> None:
    said = f"{panel.hosts} hosts, T* {panel.bound_s:.3g} s" if panel.bound_s else f"{panel.hosts} hosts"
    bed = "\n".join(_heading(panel, panel_pt))
    axes.set_title(bed, size=style.LABEL_PT, weight="bold", loc="left", pad=style.SMALL_PT * style.LINE + 3)
    axes.annotate(
        said, (0, 1), (0, 2.5), xycoords="axes fraction", textcoords="offset points", size=style.SMALL_PT, va="bottom"
    )


def _draw_panel(axes: Axes, panel: PeerPanel, table: PeerTable, ceiling: float) -> None:
    rows = {contender: row for row, (contender, _) in enumerate(table.contenders)}
    sides = dict(table.contenders)
    ours = sum(side == OURS for side in sides.values())
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(1 - 0.06 * (ceiling - 1), ceiling)
    axes.set_xticks(range(1, int(ceiling) + 1))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.axvline(1, color=style.INK, linewidth=0.9, zorder=2)
    axes.axhline(ours - 0.5, color=style.FAINT, linewidth=0.5, linestyle=":", zorder=1)
    for contender, run in panel.runs:
        _draw_run(axes, f"{panel.hosts}:{panel.bed}:{contender}", run, rows[contender], ceiling)
    for contender, word in panel.words:
        _draw_word(axes, rows[contender], word, style.WRONG, f"word:{panel.hosts}:{panel.bed}:{contender}")
    axes.set_xlabel("time / T*", size=style.SMALL_PT, labelpad=1)
    axes.tick_params(axis="x", labelsize=style.SMALL_PT, pad=1.5, length=2)


def _mark(contender: str, is_ours: bool) -> tuple[str, bool]:
    """The mark of a contender, and whether it is filled."""
    return ("o", not contender.endswith("(mpi)")) if is_ours else ("s", True)


def _draw_run(axes: Axes, known: str, run: PeerRun, row: int, ceiling: float) -> None:
    ratio = run.median_s / run.bound_s
    name = run.contender.partition(" (")[0]
    colour = style.colour(name.split(", then ")[-1]) if run.side == OURS else style.FAINT
    marker, filled = _mark(run.contender, run.side == OURS)
    reach = [min(run.seconds) / run.bound_s, min(max(run.seconds) / run.bound_s, ceiling)]
    axes.plot(reach, [row, row], color=colour, linewidth=0.9, zorder=3, gid=f"reach:{known}")
    axes.plot(
        [ratio],
        [row],
        marker=marker,
        markersize=4.2,
        markerfacecolor=colour if filled else "white",
        markeredgecolor=style.WRONG if run.wrong else colour,
        linestyle="none",
        zorder=4,
        gid=f"dot:{known}",
    )
    style.put_ratio(axes, ratio, max(ratio, reach[1]), row, f"value:{known}")


def _draw_empty(axes: Axes, panel: PeerPanel, line: PeerTable, table: PeerTable) -> None:
    """In the rows of those that were not run, that and the letter of the reason."""
    for row, (contender, _) in enumerate(line.contenders):
        if contender not in panel.contenders:
            letter = _letter(table.reasons.index(table.not_run(panel, contender)))
            known = f"empty:{panel.hosts}:{panel.bed}:{contender}"
            _draw_word(axes, row, f"{NOT_RUN} ({letter})", style.FAINT, known)


def _draw_word(axes: Axes, row: int, word: str, colour: str, known: str) -> None:
    axes.annotate(
        word,
        (1, row),
        (5, 0),
        textcoords="offset points",
        va="center",
        size=style.SMALL_PT,
        color=colour,
        gid=known,
    )
