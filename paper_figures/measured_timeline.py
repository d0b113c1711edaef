"""A measured run beside the predicted one: the same picture, and the difference by stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optcc.errors import TopologyError
from optcc.paper_figures.timeline import MEASURED, StageSpan, Timeline, timeline
from optcc.runtime.observe.trace import MeasuredRun
from optcc.show import Card
from optcc.simulate.ports import PortMap
from optcc.timing import Model, Timing
from optcc.topology import Topology
from optcc.units import show_time


def measured_timing(measured: MeasuredRun, topology: Topology) -> Timing:
    """The times of a run in the form of a prediction: a transfer is at both its ports from when it was posted until it
    has arrived. How long a port was busy is what its bytes take at its rate.

    Raises TopologyError if the topology has another number of ranks.
    """
    plan = measured.plan
    if topology.n_ranks != plan.n_ranks:
        raise TopologyError(f"topology of {topology.n_ranks} ranks: the trace is of {plan.n_ranks} ranks")
    ports = PortMap.of(topology)
    rates = np.array([float(rate) for rate in ports.rates])
    carried = np.zeros(len(rates))
    for used in ports.used_by(plan.transfers):
        np.add.at(carried, used[used >= 0], plan.transfers.bytes[used >= 0])
    return Timing(
        *(MEASURED, measured.posted_s, measured.arrived_s, measured.posted_s, measured.done_s),
        critical=(),
        port_names=ports.names,
        port_busy_s=tuple((carried / rates).tolist()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TimelinePair:
    """A run as it was measured and as it was predicted; both of one plan on one topology."""

    measured: Timeline
    predicted: Timeline

    def stage_card(self) -> Card:
        """For each stage when it began and ended, predicted and measured, and by how much the two differ."""
        rows = tuple(
            (
                *(was.name, *_span(was), *_span(is_)),
                _difference(was.end_s, is_.end_s),
                "-" if was.end_s is None or is_.end_s is None else _difference(_length(was), _length(is_)),
            )
            for was, is_ in zip(self.predicted.stages(), self.measured.stages(), strict=True)
        )
        columns = ("stage", "predicted from", "to", "measured from", "to", "ends later by", "is longer by")
        seconds = f"{show_time(self.measured.seconds)} measured, {show_time(self.predicted.seconds)} predicted"
        model = self.predicted.timing.model
        return Card(f"{self.measured.name}: {seconds} ({model} ports)", columns, rows)

    def as_json(self) -> dict[str, object]:
        """Both, and for each stage by how many seconds it ended later than predicted."""
        later = {
            was.name: None if was.end_s is None or is_.end_s is None else is_.end_s - was.end_s
            for was, is_ in zip(self.predicted.stages(), self.measured.stages(), strict=True)
        }
        return {"measured": self.measured.as_json(), "predicted": self.predicted.as_json(), "later_s": later}


def timeline_pair(measured: MeasuredRun, topology: Topology, model: Model) -> TimelinePair:
    """A measured run, and what `optcc.simulate` predicts of its plan on `topology`; raises what those raise."""
    plan = measured.plan
    shown = Timeline(plan.name, plan.transfers, topology, measured_timing(measured, topology))
    return TimelinePair(shown, timeline(plan, topology, model))


def _span(stage: StageSpan) -> tuple[str, str]:
    if stage.start_s is None or stage.end_s is None:
        return "-", "-"
    return show_time(stage.start_s), show_time(stage.end_s)


def _length(stage: StageSpan) -> float:
    assert stage.start_s is not None and stage.end_s is not None
    return stage.end_s - stage.start_s


def _difference(was: float | None, is_: float | None) -> str:
    if was is None or is_ is None:
        return "-"
    sign = "-" if is_ < was else ""
    return f"{sign}{show_time(abs(is_ - was))}"
