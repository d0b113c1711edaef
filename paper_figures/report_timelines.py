"""What the report's interactive timelines show, all from the record of a NIC that fails in a training run.

    groups(record) -> tuple[TimelineGroup, ...]

First the run: what each NIC received and how long each step took, with the failure. Then two AllReduces of it, one
before and one after the failure, each as predicted and as measured, a row for each port and a bar for each transfer; at
last what other schedules are predicted to do on what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from optcc.experiments.seen_failure import AFTER, BEFORE, TOPOLOGIES, SeenFailure, TracedStep
from optcc.paper_figures import style
from optcc.paper_figures.interactive import BarChart, BarLayer, TimeMark
from optcc.paper_figures.measured_timeline import timeline_pair
from optcc.paper_figures.timeline import (
    MEASURED,
    OTHER,
    STAGE_COLOURS,
    PortIntervals,
    Timeline,
    port_intervals,
    timeline,
)
from optcc.plan import Plan
from optcc.planner import build_plan
from optcc.runtime.observe.trace import MeasuredRun
from optcc.schedule import OPS
from optcc.topology import Topology
from optcc.units import show_time
from optcc.verify.bounds.closed_forms import allreduce_bound

OTHERS, OTHERS_SEGMENTS = ("ring", "r2ccl-allreduce", "optcc", "optimal"), 8
"""What is predicted beside, in few segments, so that each transfer can be seen."""
_MS, _MB = 1e3, 1e6
_UP, _STEP, _TRACED = style.colour("ring"), style.colour("optimal"), style.colour("optcc")
_TRANSFER_HOVER = tuple((each, each) for each in ("transfer", "stage", "op", "bytes", "segment", "port", "from", "to"))


@dataclass(frozen=True)
class TimelineGroup:
    """Charts that are read together, on one time axis, and what they show."""

    title: str
    says: str
    charts: tuple[BarChart, ...]


def groups(record: SeenFailure) -> tuple[TimelineGroup, ...]:
    """All timelines of a record. A traced step whose plan is not made any more is left out."""
    titles = {BEFORE: f"An AllReduce before {record.failed} failed", AFTER: "An AllReduce after, by the new plan"}
    traced = (_traced_group(titles[trace.when], record, trace) for trace in record.traces)
    return (_run_group(record), *(each for each in traced if each is not None), _others_group(record))


# The run


def _run_group(record: SeenFailure) -> TimelineGroup:
    marks = (
        TimeMark(0.0, f"{record.failed} goes down", style.WRONG),
        TimeMark(record.replanned_s, "new plans", style.FAINT),
    )
    begin_s, end_s = record.samples[0].at_s, record.steps[-1].ended_s
    layers = (*_nic_layers(record), *_step_layers(record, begin_s))
    chart = BarChart("", "seconds since the failure", (*record.nics, "steps"), begin_s, end_s, layers, marks)
    says = (
        f"Measured on {record.hosts}: each step averages {record.n_bytes / _MB:g} MB of gradients. A bar of a NIC "
        "is as high as what it received, said by `optcc status`; the lowest row is the steps of rank 0."
    )
    return TimelineGroup(f"{record.failed} fails in a training run", says, (chart,))


def _nic_layers(record: SeenFailure) -> Iterator[BarLayer]:
    """What each NIC received from one look to the next, by its state."""
    ends = [*(sample.at_s for sample in record.samples[1:]), record.steps[-1].ended_s]
    greatest = max(max(sample.receiving) for sample in record.samples)
    columns: dict[str, dict[str, list[Any]]] = {}
    for sample, end_s in zip(record.samples, ends, strict=True):
        for row, (name, state, rate) in enumerate(zip(record.nics, sample.states, sample.receiving, strict=True)):
            own = columns.setdefault(state, {})
            # A NIC that is not up is shown, though it carries nothing.
            height = 0.8 * rate / greatest if state == "up" else 0.8
            _append(own, left=sample.at_s, right=max(sample.at_s, end_s), top=row + 0.9 - height, bottom=row + 0.9)
            _append(own, NIC=name, state=state, receives=f"{rate / _MB:.1f} MB/s", at=f"{sample.at_s:.3f} s")
    hover = tuple((each, each) for each in ("NIC", "state", "receives", "at"))
    for state, own in sorted(columns.items(), key=lambda each: each[0] != "up"):
        yield BarLayer(f"NIC {state}", _UP if state == "up" else style.WRONG, own, hover)


def _step_layers(record: SeenFailure, begin_s: float) -> Iterator[BarLayer]:
    """The steps, and apart from them those whose AllReduce was traced."""
    traced = {trace.step for trace in record.traces}
    row = len(record.nics)
    hover = tuple((each, each) for each in ("step", "takes", "loss", "epoch of plans"))
    for name, colour, among in (("step", _STEP, False), ("step that is traced", _TRACED, True)):
        own: dict[str, list[Any]] = {each: [] for each in ("left", "right", "top", "bottom")}
        for each in record.steps:
            if each.ended_s > begin_s and (each.step in traced) == among:
                _append(own, left=max(each.began_s, begin_s), right=each.ended_s, top=row + 0.1, bottom=row + 0.9)
                _append(own, step=each.step, takes=show_time(each.ended_s - each.began_s), loss=f"{each.loss:.4f}")
                _append(own, **{"epoch of plans": each.epoch})
        yield BarLayer(name, colour, own, hover if own["left"] else ())


def _append(columns: dict[str, list[Any]], **values: Any) -> None:
    for name, value in values.items():
        columns.setdefault(name, []).append(value)


# AllReduces


def traced_plan(record: SeenFailure, trace: TracedStep) -> Plan | None:
    """The plan of a traced step, of which the record has the ends of each transfer; None if it is not made any more.

    The number of its segments follows from the number of its transfers.
    """
    topology = Topology.parse(TOPOLOGIES[trace.when])
    one = build_plan(trace.plan, topology, record.n_bytes, segments=1, ports="fair")
    segments, rest = divmod(len(trace.src), len(one.transfers))
    if rest or not segments:
        return None
    plan = build_plan(trace.plan, topology, record.n_bytes, segments=segments, ports="fair")
    ends = plan.transfers.src.tolist(), plan.transfers.dst.tolist()
    return plan if ends == (list(trace.src), list(trace.dst)) else None


def _traced_group(title: str, record: SeenFailure, trace: TracedStep) -> TimelineGroup | None:
    plan = traced_plan(record, trace)
    if plan is None:
        return None
    topology = Topology.parse(TOPOLOGIES[trace.when])
    posted_s, arrived_s = np.array(trace.posted_s), np.array(trace.arrived_s)
    pair = timeline_pair(MeasuredRun(plan, 0, 0.0, posted_s, arrived_s, arrived_s, arrived_s), topology, "fair")
    charts = tuple(_transfer_chart(each, topology) for each in (pair.predicted, pair.measured))
    says = (
        f"Step {trace.step}, by `{trace.plan}` on {TOPOLOGIES[trace.when]}: "
        f"{show_time(trace.predicted_s)} predicted, {show_time(trace.seconds)} measured. "
        "A bar is a transfer, at its source's out port and at its destination's in port; a measured one reaches from "
        "when it was posted until it had arrived. Where several are on their way at one port, they stand below each "
        "other. Dashed: the lower bound T*."
    )
    return TimelineGroup(title, says, charts)


def _others_group(record: SeenFailure) -> TimelineGroup:
    topology = Topology.parse(TOPOLOGIES[AFTER])
    charts = []
    for name in OTHERS:
        plan = build_plan(name, topology, record.n_bytes, segments=OTHERS_SEGMENTS)
        charts.append(_transfer_chart(timeline(plan, topology), topology))
    says = (
        f"The same AllReduce on what is left, {TOPOLOGIES[AFTER]}, by other schedules in {OTHERS_SEGMENTS} segments: "
        "predicted, one message at a time at a port. Dashed: the lower bound T*."
    )
    return TimelineGroup("What other schedules would do after the failure", says, tuple(charts))


def _transfer_chart(shown: Timeline, topology: Topology) -> BarChart:
    """A row for each port, a bar for each transfer, a layer for each stage."""
    intervals = port_intervals(shown.transfers, topology, shown.timing)
    lane, lanes = _lanes(intervals)
    names = shown.timing.port_names
    transfers = shown.transfers
    columns: dict[int, dict[str, list[Any]]] = {}
    for number in range(len(intervals.port)):
        index, port = int(intervals.transfer[number]), int(intervals.port[number])
        own = columns.setdefault(int(transfers.stage[index]), {})
        start_s, end_s = float(intervals.start_s[number]), float(intervals.end_s[number])
        top = port + 0.08 + 0.84 * lane[number] / lanes[port]
        _append(own, left=round(_MS * start_s, 6), right=round(_MS * end_s, 6))
        _append(own, top=round(top, 4), bottom=round(top + 0.84 / lanes[port], 4))
        _append(own, transfer=f"{transfers.src[index]} → {transfers.dst[index]}", op=OPS[transfers.op[index]])
        _append(own, stage=transfers.stages[transfers.stage[index]], segment=int(transfers.segment[index]))
        _append(own, bytes=f"{int(transfers.bytes[index]):,}", port=names[port])
        _append(own, to=show_time(end_s), **{"from": show_time(start_s)})
    layers = tuple(
        BarLayer(
            transfers.stages[stage],
            STAGE_COLOURS[stage] if stage < len(STAGE_COLOURS) else OTHER,
            own,
            _TRANSFER_HOVER,
        )
        for stage, own in sorted(columns.items())
    )
    measured = shown.timing.model == MEASURED
    how = MEASURED if measured else f"predicted, {shown.timing.model} ports"
    title = f"{shown.name}, {how}: {show_time(shown.seconds)}, {len(transfers)} transfers"
    bound_s = float(allreduce_bound(topology, transfers.size_bytes).seconds)
    mark = TimeMark(_MS * bound_s, f"T* {show_time(bound_s)}")
    return BarChart(title, "ms since the beginning", names, 0.0, 1.02 * _MS * shown.seconds, layers, (mark,))


def _lanes(intervals: PortIntervals) -> tuple[list[int], list[int]]:
    """For each interval a lane of its port in which no other one overlaps it, and for each port how many it needs."""
    lane = [0] * len(intervals.port)
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}
    count = [1] * (int(intervals.port.max(initial=-1)) + 1)
    for number in np.lexsort((intervals.end_s, intervals.start_s)).tolist():
        port, start_s = int(intervals.port[number]), float(intervals.start_s[number])
        unused, used = free.setdefault(port, [0]), busy.setdefault(port, [])
        while used and used[0][0] <= start_s:
            heapq.heappush(unused, heapq.heappop(used)[1])
        if not unused:
            unused.append(count[port])
            count[port] += 1
        lane[number] = heapq.heappop(unused)
        heapq.heappush(used, (float(intervals.end_s[number]), lane[number]))
    return lane, count
