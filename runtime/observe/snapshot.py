"""The state of a job on this host at one moment, from the pages of its ranks: what `optcc status` shows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from rich.filesize import decimal

from optcc.runtime.observe.dump import GONE, STOPPED, FlightDump
from optcc.runtime.observe.explain import explain
from optcc.runtime.observe.jobs import boot_id
from optcc.runtime.observe.merged import MergedDumps
from optcc.runtime.observe.status import CLOSED, FAILED, RailStatus, RunningRun
from optcc.runtime.observe.waiting import silent_s, stragglers, wait_edges
from optcc.show import Card
from optcc.units import show_time

_SHOWN_WAITS = 3


class RunView(msgspec.Struct, frozen=True):
    """A collective, or a message, that is under way at a rank; `progress` is the share of its instructions done."""

    run: int
    plan: str
    progress: float
    seconds: float
    idle_s: float


class RankView(msgspec.Struct, frozen=True):
    """A rank at one moment; `doing` is in words, `heard_s` how long ago it last said something."""

    rank: int
    host: str
    pid: int
    process: str
    state: str
    doing: str
    heard_s: float
    epoch: int
    shares: str
    begun: int
    done: int
    running: tuple[RunView, ...]
    rails: tuple[RailStatus, ...]
    counts: dict[str, int]
    failure: str


class WaitView(msgspec.Struct, frozen=True):
    """`rank` waits for `on`, which is to send (`arrives`) or to take a message, since so many seconds, in a run."""

    rank: int
    on: int
    arrives: bool
    seconds: float
    run: int


class JobSnapshot(msgspec.Struct, frozen=True):
    """A job at one moment: its ranks on this host, who waits for whom, the stragglers, and what `explain` says.

    `missing` are ranks without a page here: on other hosts, or gone without a trace.
    """

    job: str
    n_ranks: int
    state: str
    ranks: tuple[RankView, ...]
    waits: tuple[WaitView, ...]
    stragglers: tuple[tuple[int, str], ...]
    missing: tuple[int, ...]
    kind: str
    text: str

    def rank_card(self) -> Card:
        """A row for each rank."""
        rows = []
        for each in self.ranks:
            waits = [wait for wait in self.waits if wait.rank == each.rank][:_SHOWN_WAITS]
            waiting = ", ".join(f"{wait.on} for {show_time(wait.seconds)}" for wait in waits)
            runs = ", ".join(f"{run.run}: {run.progress:.0%} of {run.plan}" for run in each.running)
            rows.append(
                (str(each.rank), f"{each.host}/{each.pid}", each.doing, f"{each.done}/{each.begun}", runs, waiting)
            )
        columns = ("rank", "host/pid", "state", "done/begun", "under way", "waits for rank")
        epochs = sorted({each.epoch for each in self.ranks})
        title = f"job {self.job}: {self.state}, {len(self.ranks)} of {self.n_ranks} ranks here, epoch {epochs[-1]}"
        return Card(title, columns, tuple(rows))

    def rail_card(self) -> Card:
        """A row for each NIC of each rank."""
        rows = tuple(
            (
                *(str(each.rank), rail.name, rail.state),
                _rates(rail),
                f"{min(rail.out_share, rail.in_share):.0%}",
                f"{decimal(int(rail.sending))}/s : {decimal(int(rail.receiving))}/s",
                f"{decimal(rail.sent_bytes)} : {decimal(rail.received_bytes)}",
                *(str(each.counts.get("resent", 0)), str(rail.doubts), rail.last_failure),
            )
            for each in self.ranks
            for rail in each.rails
        )
        columns = ("rank", "NIC", "state", "rate out:in", "carries", "now", "bytes", "resent", "doubts", "last failure")
        return Card("rails", columns, rows)


def _rates(rail: RailStatus) -> str:
    """Rates out and in; of a NIC whose rates nobody has declared or measured they are 1."""
    if max(rail.out_rate, rail.in_rate) <= 1:
        return "undeclared"
    return f"{decimal(int(rail.out_rate))}/s : {decimal(int(rail.in_rate))}/s"


def snapshot(dumps: Sequence[FlightDump], read_s: float | None = None) -> JobSnapshot:
    """What the pages of a job said when they were read, at `read_s` of this host's clock, or just now.

    Raises InputError if they are not of one job.
    """
    now_s = time.perf_counter() if read_s is None else read_s
    merged = MergedDumps(dumps)
    edges = wait_edges(dumps)
    views = tuple(_view(dump, now_s if dump.identity.boot == boot_id() else dump.status.now_s) for dump in dumps)
    found = explain(dumps)
    waits = tuple(
        WaitView(edge.waiter, edge.rank, edge.arrives, merged.dumps[edge.waiter].status.now_s - edge.since_s, edge.run)
        for edge in sorted(edges)
    )
    at_fault = tuple((each.rank, each.reason) for each in stragglers(dumps, edges))
    return JobSnapshot(
        *(merged.job, merged.n_ranks, _state(dumps, bool(edges)), views, waits, at_fault, merged.missing),
        *(found.kind, found.text),
    )


def _state(dumps: Sequence[FlightDump], is_stuck: bool) -> str:
    states = {dump.status.state for dump in dumps}
    if FAILED in states:
        return "failed"
    if any(dump.process == GONE and dump.status.state != CLOSED for dump in dumps):
        return "ranks are gone"
    if any(dump.process == STOPPED for dump in dumps):
        return "ranks are stopped"
    return "stuck" if is_stuck else "running"


def _view(dump: FlightDump, now_s: float) -> RankView:
    identity, status = dump.identity, dump.status
    plans = {plan.number: plan.text for plan in status.plans}
    is_over = status.state != "running" or dump.process == GONE
    at_s = status.now_s if is_over else now_s
    failure = "" if status.failure is None else status.failure.text.partition("\n")[0]
    return RankView(
        *(identity.rank, identity.host, identity.pid, dump.process, status.state, _doing(dump, at_s)),
        *(max(now_s - status.now_s, 0.0), status.epoch, status.shares, dump.begun, dump.done),
        tuple(_run_view(run, plans, at_s) for run in status.running if run.number > dump.done or run.number < 0),
        *(status.rails, status.counts, failure),
    )


def _run_view(run: RunningRun, plans: dict[int, str], now_s: float) -> RunView:
    progress = run.done / run.total if run.total else 0.0
    text = plans.get(run.plan, "a message")
    return RunView(run.number, text, progress, max(now_s - run.since_s, 0.0), max(now_s - run.moved_s, 0.0))


def _doing(dump: FlightDump, now_s: float) -> str:
    status = dump.status
    if status.failure is not None:
        return f"failed: {status.failure.error}"
    if dump.process in (GONE, STOPPED):
        return dump.process
    if status.state == CLOSED:
        return "closed"
    silent = silent_s(dump, now_s)
    said = f", silent for {show_time(silent)}" if silent else ""
    if not dump.is_driven:
        return f"in the program{said}"
    return ("agrees on a plan" if status.preparing else "in a collective") + said
