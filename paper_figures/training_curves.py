"""The figure of training while a NIC is slow, lost and back: losses and the time of each step, against the steps.

    data(record) -> TrainingTable   what is drawn, all from the record
    draw(table) -> Figure           the picture, all from the table
    numbers(table)                  its numbers for prose

A column for DDP and one for FSDP2, as far as the record has them. Above, the loss, the mean of all ranks: a wide pale
line is the healthy job, a thin one that with the events. Below, the time of each step. Grey bands are the steps in
which the NIC is slow or lost; a cross is the last step of a job that ended early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optcc.experiments.training_failures import WARM_STEPS, NicEvent, TrainedRun, TrainingFailures
from optcc.paper_figures import style
from optcc.paper_figures.numbers import Number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "training-failures"
SAYS = (
    "A training job while a NIC is slow, lost and back: the losses are those of the healthy job, steps "
    "are longer while bandwidth lacks, and Gloo's job ends."
)
"""What the figure says, for a gallery."""
_LOOK = {
    ("optcc", "stay"): ("optcc, plans stay", style.colour("optcc")),
    ("optcc", "change"): ("optcc, plans change", style.colour("optimal")),
    ("optcc", "order"): ("optcc, rank order", style.colour("hierarchical")),
    ("gloo", ""): ("Gloo", style.FAINT),
}
"""For each way to train: its name and colour; other libraries are grey in every figure."""
_TITLES = {"ddp": "DDP", "fsdp": "FSDP2"}
_SHADES = {"half": "#f0f0f0", "down": "#dcdcdc"}
_LOSS_PT, _STEP_PT = 92.0, 112.0
_LEFT_PT, _RIGHT_PT, _GAP_PT, _ROW_PT = 33.0, 8.0, 30.0, 14.0
_HEAD_PT, _FOOT_PT = 58.0, 25.0


@dataclass(frozen=True)
class TrainingTable:
    """The record, and its jobs by column."""

    record: TrainingFailures
    columns: tuple[tuple[str, tuple[TrainedRun, ...]], ...]


def data(record: TrainingFailures) -> TrainingTable:
    """The jobs of DDP, and of FSDP2."""
    columns = ((wrap, tuple(run for run in record.runs if run.wrap == wrap)) for wrap in _TITLES)
    return TrainingTable(record, tuple((wrap, runs) for wrap, runs in columns if runs))


def numbers(table: TrainingTable) -> dict[str, Number]:
    """The median step of each phase, the last loss, and in how many steps a job's loss is that of its healthy job."""
    found = {}
    for wrap, runs in table.columns:
        for run in runs:
            way = "-".join(each for each in (run.backend, run.plans) if each)
            key = f"{wrap}/{way}/{'events' if run.events else 'healthy'}"
            for place, (state, steps) in enumerate(run.phases()):
                median_s = run.median_s(steps)
                if median_s is not None:
                    found[f"{key}/{place}-{state}/step-seconds"] = Number.seconds(median_s)
                    found[f"{key}/{place}-{state}/bound-seconds"] = Number.seconds(table.record.bound_s(run, state))
            found[f"{key}/steps"] = Number.whole(len(run.losses))
            found[f"{key}/last-loss"] = Number.seconds(run.losses[-1])
            healthy = table.record.healthy(run)
            if run.events and healthy is not None:
                equal = sum(mine == other for mine, other in zip(run.losses, healthy.losses, strict=False))
                found[f"{key}/steps-with-the-healthy-loss"] = Number.whole(equal)
    return found


def draw(table: TrainingTable) -> Figure:
    """The picture, as wide as a page. Ids: `loss:JOB` and `step:JOB`."""
    with style.applied():
        return _draw(table)


def _draw(table: TrainingTable) -> Figure:
    width = style.PAGE_IN * style.POINTS_IN
    height = _HEAD_PT + _LOSS_PT + _ROW_PT + _STEP_PT + _FOOT_PT
    figure = style.new_figure(width, height)
    record = table.record

    def put(y_pt: float, text: str, **how: Any) -> None:
        figure.text(3 / width, 1 - y_pt / height, text, va="top", **how)

    title = "Training while a NIC is slow, lost and back: losses, and the time of each step"
    put(3, title, size=style.TITLE_PT, weight="bold")
    nics = ", ".join(dict.fromkeys(event.nic for run in record.runs for event in run.events))
    said = (
        f"GPT of {record.parameters / 1e6:.1f} M parameters, {record.hosts} hosts of {record.nics} NICs of "
        f"{style.spaced(style.label(record.nic_rate, 20))}; {style.label(nics, 30)} is at half, down and back. "
        "Wide and pale: healthy; thin: with the events; cross: the job ended."
    )
    put(4 + style.TITLE_PT * style.LINE, said, size=style.SMALL_PT, color=style.FAINT)
    count = max(len(table.columns), 1)
    panel_pt = (width - _LEFT_PT - _RIGHT_PT - (count - 1) * _GAP_PT) / count
    for number, (wrap, runs) in enumerate(table.columns):
        x = (_LEFT_PT + number * (panel_pt + _GAP_PT)) / width
        low = (_FOOT_PT + _STEP_PT + _ROW_PT) / height
        losses = figure.add_axes((x, low, panel_pt / width, _LOSS_PT / height))
        steps = figure.add_axes((x, _FOOT_PT / height, panel_pt / width, _STEP_PT / height))
        _draw_losses(losses, wrap, runs, record.steps, _ways(record))
        _draw_steps(steps, runs, record.steps)
        if not number:
            losses.set_ylabel("loss")
            steps.set_ylabel("seconds a step")
            for axes in (losses, steps):
                axes.yaxis.set_label_coords(-(_LEFT_PT - 9) / panel_pt, 0.5)
    _draw_legend(figure, table, width, height)
    return figure


def _ways(record: TrainingFailures) -> list[tuple[str, str]]:
    """The ways to train of which the record has a job, in any column."""
    return [way for way in _LOOK if any((run.backend, run.plans) == way for run in record.runs)]


def _draw_legend(figure: Figure, table: TrainingTable, width: float, height: float) -> None:
    from matplotlib.lines import Line2D

    ways = _ways(table.record)
    shown = [Line2D([], [], color=_LOOK[way][1], linewidth=1.3) for way in ways]
    figure.legend(
        shown,
        [_LOOK[way][0] for way in ways],
        loc="upper left",
        bbox_to_anchor=(_LEFT_PT / width, 1 - (_HEAD_PT - 32) / height),
        ncols=max(len(shown), 1),
        borderaxespad=0,
        borderpad=0,
        handlelength=2.2,
        handletextpad=0.5,
        columnspacing=1.8,
    )


def _draw_bands(axes: Axes, runs: tuple[TrainedRun, ...], n_steps: int, *, named: bool) -> None:
    events: tuple[NicEvent, ...] = max((run.events for run in runs), key=len, default=())
    ends = [*(event.step for event in events[1:]), n_steps]
    for event, end in zip(events, ends, strict=False):
        if event.kind in _SHADES:
            axes.axvspan(event.step, end, color=_SHADES[event.kind], linewidth=0, zorder=0.5)
        axes.axvline(event.step, color=style.FAINT, linewidth=0.5, linestyle=(0, (2, 2)), zorder=1)
        if named:
            where: dict[str, Any] = {
                "xycoords": ("data", "axes fraction"),
                "xytext": (2, -2),
                "textcoords": "offset points",
            }
            axes.annotate(event.kind, (event.step, 1.0), va="top", size=style.SMALL_PT, color=style.FAINT, **where)
    axes.set_xlim(0, n_steps)
    axes.tick_params(axis="x", labelsize=style.LABEL_PT, length=2.5, width=0.6)
    axes.grid(axis="y")


def _line(run: TrainedRun) -> dict[str, Any]:
    colour = _LOOK[run.backend, run.plans][1]
    if run.events:
        return {"color": colour, "linewidth": 0.8, "zorder": 4}
    return {"color": colour, "linewidth": 3.0, "alpha": 0.3, "zorder": 2, "solid_capstyle": "butt"}


def _name(run: TrainedRun) -> str:
    return f"{run.name}:{'events' if run.events else 'healthy'}"


def _cross(axes: Axes, run: TrainedRun, y: float) -> None:
    if run.ended:
        shade = _LOOK[run.backend, run.plans][1]
        axes.plot([len(run.losses) - 1], [y], "x", color=shade, markersize=5, markeredgewidth=1.5, zorder=5)


def _draw_losses(
    axes: Axes, wrap: str, runs: tuple[TrainedRun, ...], n_steps: int, ways: Sequence[tuple[str, str]]
) -> None:
    axes.set_title(_TITLES[wrap], size=style.LABEL_PT, weight="bold", loc="left", pad=3)
    missing = "; ".join(_LOOK[way][0] for way in ways if all((run.backend, run.plans) != way for run in runs))
    if missing:
        said = f"not run, left out of the record: {missing}"
        axes.set_title(said, size=style.SMALL_PT, color=style.FAINT, loc="right", pad=3)
    for run in runs:
        axes.plot(range(len(run.losses)), run.losses, **_line(run), gid=f"loss:{_name(run)}")
        _cross(axes, run, run.losses[-1])
    _draw_bands(axes, runs, n_steps, named=True)
    axes.tick_params(axis="x", labelbottom=False)


def _draw_steps(axes: Axes, runs: tuple[TrainedRun, ...], n_steps: int) -> None:
    most = 0.0
    for run in runs:
        steps = range(WARM_STEPS, len(run.step_s))
        axes.plot(steps, run.step_s[WARM_STEPS:], **_line(run), gid=f"step:{_name(run)}")
        _cross(axes, run, run.step_s[-1])
        most = max([most, *run.step_s[WARM_STEPS:]])
    _draw_bands(axes, runs, n_steps, named=False)
    axes.set_ylim(0, 1.06 * most or 1.0)
    axes.set_xlabel("step", labelpad=1.5)
