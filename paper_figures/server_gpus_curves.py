"""The figure of OptCC's claim by GPUs a server: overhead over the fault-free ring with half of one server's NICs lost.

    data(record) -> ServerGpusTable    what is drawn, all from the record
    draw(table) -> Figure              the picture, all from the table
    numbers(table)                     its numbers for prose

A panel for each number of servers, on a logarithmic scale from one percent up; the thick line is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optcc.experiments.lost_nics import CLAIM_GPUS, FIELD, LostNicsRecord
from optcc.paper_figures import style
from optcc.paper_figures.lost_nics_curves import BOUND, LOOK, OURS, draw_panels, look_of
from optcc.paper_figures.numbers import Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "server-gpus"
SAYS = (
    "One server loses half of its NICs: overhead over the fault-free ring by GPUs a server, beside the "
    "certified bound T*."
)
"""What the figure says, for a gallery."""
LINES = tuple(name for name in LOOK if name in (*FIELD, OURS))
"""The schedules; `bound` is a line of its own."""
_BOUND = "bound"
_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class ServerGpusTable:
    """For each number of servers and each line the GPUs a server, and percent over the fault-free ring."""

    panels: tuple[tuple[int, dict[str, list[tuple[int, float]]]], ...]


def data(record: LostNicsRecord) -> ServerGpusTable:
    """The lines of a record, by rising number of servers."""
    panels: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for case in record.claimed:
        lines = panels.setdefault(case.servers, {name: [] for name in (*LINES, _BOUND)})
        found, ours = record.of(case), record.ours(case)
        over = {name: row.over_fault_free for name, row in found.items() if name in LINES}
        over |= {OURS: ours.over_fault_free, _BOUND: ours.bound_s / ours.fault_free_s}
        for name, each in over.items():
            lines[name].append((case.gpus, 100 * (each - 1)))
    return ServerGpusTable(tuple(panels.items()))


def numbers(table: ServerGpusTable) -> dict[str, Number]:
    """Percent over the fault-free ring of each line and case."""
    return {
        f"{servers}-servers/{gpus}-gpus/{name}/over-fault-free-percent": Number.percent(percent)
        for servers, lines in table.panels
        for name, points in lines.items()
        for gpus, percent in points
    }


def draw(table: ServerGpusTable) -> Figure:
    """The picture, as wide as a page. Ids of lines: `line:SERVERS:NAME`, where the bound's NAME is `bound`."""
    with style.applied():
        most = max((over for _, lines in table.panels for each in lines.values() for _, over in each), default=1)
        panels = dict(table.panels)

        def draw_panel(axes: Axes, servers: int) -> None:
            _draw_panel(axes, servers, panels[servers], 1.2 * max(1, most))

        title = "One server loses half of its NICs: what schedules of an AllReduce take, by GPUs a server"
        return draw_panels(title, "% over fault-free ring", LINES, tuple(panels), draw_panel)


def _draw_panel(axes: Axes, servers: int, lines: dict[str, list[tuple[int, float]]], most: float) -> None:
    axes.set_yscale("symlog", linthresh=1, linscale=0.25)
    axes.set_ylim(min(0, *(percent for points in lines.values() for _, percent in points)), most)
    ticks = [each for each in _TICKS if each <= most]
    axes.set_yticks(ticks, [str(each) for each in ticks])
    axes.minorticks_off()
    axes.set_xscale("log", base=2)
    axes.set_xlim(CLAIM_GPUS[0] / 1.15, 1.15 * CLAIM_GPUS[-1])
    axes.set_xticks(CLAIM_GPUS, [str(gpus) for gpus in CLAIM_GPUS])
    axes.set_xlabel("GPUs and NICs a server", labelpad=1.5)
    for name, points in lines.items():
        xs, ys = [gpus for gpus, _ in points], [percent for _, percent in points]
        how = {**BOUND, "zorder": 3} if name == _BOUND else {**look_of(name), "zorder": 5}
        axes.plot(xs, ys, **how, gid=f"line:{servers}:{name}")
