"""The figure of a soak: the faults that befell a job, and what each AllReduce took meanwhile.

    data(record) -> SoakTable    what is drawn, all from the record
    draw(table) -> Figure        the picture, all from the table
    numbers(table)               its numbers for prose

Above, a line for each run from its beginning to its end, at its time over T* of healthy hosts. Below, a row for each
NIC and each host, in which a bar is a fault: a NIC that is lost, or slow, a rank that is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from optcc.experiments.fabric import FabricSpec
from optcc.experiments.soak import LOSSES, SLOW, STOPPED, Soak
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number
from optcc.units import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "soak"
SAYS = (
    "A job under random faults, several at once: what befell which NIC or rank when, and what each AllReduce took "
    "meanwhile. Every sum was checked."
)
"""What the figure says, for a gallery."""
LOST = "lost"
COLOURS = {LOST: "optcc", SLOW: "r2ccl-balance", STOPPED: "mpi"}
SAID = {LOST: "NIC lost", SLOW: "NIC slow", STOPPED: "rank stopped"}
_HEAD_PT, _FOOT_PT, _LEFT_PT, _RIGHT_PT = 34.0, 26.0, 56.0, 8.0
_RUNS_PT, _GAP_PT, _ROW_PT = 70.0, 8.0, 9.0


@dataclass(frozen=True)
class SoakTable:
    """Runs as (begin, end, time over T*), seconds since the first one; by row, (begin, end, kind) of the faults; how
    many faults of each kind there were, and wrong elements."""

    hosts: str
    size: str
    runs: tuple[tuple[float, float, float], ...]
    rows: dict[str, tuple[tuple[float, float, str], ...]]
    counts: dict[str, int]
    wrong: int
    splits: int


def data(record: Soak) -> SoakTable:
    """What a record has: for each host a row for each NIC, and one for its ranks."""
    spec = FabricSpec.parse(record.hosts)
    names = {(host, nic): f"h{host}.eth{nic}" for host in range(spec.hosts) for nic in range(spec.nics)}
    names |= {(host, -1): f"h{host}" for host in range(spec.hosts)}
    rows: dict[str, list[tuple[float, float, str]]] = {names[each]: [] for each in sorted(names)}
    counts = dict.fromkeys(COLOURS, 0)
    for fault in record.faults:
        kind = LOST if fault.kind in LOSSES else fault.kind
        counts[kind] += 1
        rows[names[fault.host, fault.nic]].append((fault.began_s, fault.began_s + fault.lasting_s, kind))
    return SoakTable(
        record.hosts,
        show_size(record.size_bytes),
        tuple((run.began_s, run.began_s + run.seconds, run.seconds / record.bound_s) for run in record.runs),
        {name: tuple(faults) for name, faults in rows.items()},
        counts,
        record.wrong,
        record.splits,
    )


def numbers(table: SoakTable) -> dict[str, Number]:
    """How many faults and runs there were, what those took, and how many elements were wrong."""
    taken = [ratio for *_, ratio in table.runs]
    whole = {f"faults/{kind}": count for kind, count in table.counts.items()}
    whole |= {"runs": len(taken), "wrong": table.wrong, "splits": table.splits}
    ratios = {"median": median(taken), "most": max(taken)}
    return {name: Number.whole(count) for name, count in whole.items()} | {
        f"time-over-bound/{what}": Number(ratio, f"{ratio:.2f}") for what, ratio in ratios.items()
    }


def draw(table: SoakTable) -> Figure:
    """The picture, as wide as a page. Ids: `runs` of lines, `bound` of T*, `faults:KIND` of bars."""
    from matplotlib.patches import Patch

    with style.applied():
        rows_pt = _ROW_PT * len(table.rows)
        width = style.PAGE_IN * style.POINTS_IN
        height = _HEAD_PT + _RUNS_PT + _GAP_PT + rows_pt + _FOOT_PT
        figure = style.new_figure(width, height)
        title = f"AllReduces of {style.spaced(table.size)} on {table.hosts} under {sum(table.counts.values())} faults: "
        title += f"{table.wrong} wrong elements"
        figure.text(3 / width, 1 - 3 / height, title, va="top", size=style.TITLE_PT, weight="bold")
        figure.legend(
            [Patch(color=style.colour(name)) for name in COLOURS.values()],
            [f"{SAID[kind]} ({table.counts[kind]})" for kind in COLOURS],
            loc="upper left",
            bbox_to_anchor=(_LEFT_PT / width, 1 - 15 / height),
            ncols=len(COLOURS),
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.2,
        )
        left, span = _LEFT_PT / width, (width - _LEFT_PT - _RIGHT_PT) / width
        until_s = max(end for _, end, _ in table.runs)
        below = figure.add_axes((left, _FOOT_PT / height, span, rows_pt / height))
        above = figure.add_axes((left, (_FOOT_PT + rows_pt + _GAP_PT) / height, span, _RUNS_PT / height))
        for axes in (below, above):
            axes.set_xlim(0, until_s)
        _draw_runs(above, table)
        _draw_faults(below, table)
        return figure


def _draw_runs(axes: Axes, table: SoakTable) -> None:
    begins, ends, taken = zip(*table.runs, strict=True)
    axes.set_ylim(0, 1.06 * max(taken))
    axes.set_ylabel("time / T*")
    axes.tick_params(axis="x", labelbottom=False)
    axes.axhline(1, color=style.colour("optimal"), linewidth=1.2, zorder=2, gid="bound")
    axes.hlines(taken, begins, ends, color=style.INK, linewidth=1.2, zorder=4, gid="runs")


def _draw_faults(axes: Axes, table: SoakTable) -> None:
    axes.set_ylim(len(table.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(table.rows)), table.rows)
    axes.tick_params(labelsize=style.SMALL_PT)
    axes.set_xlabel("seconds", labelpad=1.5)
    for kind, name in COLOURS.items():
        bars = [
            (number, begin, end - begin)
            for number, faults in enumerate(table.rows.values())
            for begin, end, its in faults
            if its == kind
        ]
        if bars:
            places, begins, lengths = zip(*bars, strict=True)
            axes.barh(places, lengths, 0.7, begins, color=style.colour(name), linewidth=0, zorder=3)
            for patch in axes.containers[-1]:
                patch.set_gid(f"faults:{kind}")
