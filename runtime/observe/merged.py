"""The dumps of a job's ranks, merged: one time for all, and the runs of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from optcc.errors import InputError
from optcc.runtime.observe.clocks import ClockOffset, HappenedBefore, align
from optcc.runtime.observe.dump import FlightDump
from optcc.runtime.observe.page import BEGIN, END, UNKNOWN_NS
from optcc.runtime.observe.recorder import ARRIVED, COMPUTED, POSTED, KnownPlan

_GATHERING = ("allreduce", "allgather", "alltoall")
"""Collectives that end nowhere before every rank has begun."""


class RunSpan(NamedTuple):
    """A run at a rank, seconds of its own clock; `end_s` None if it has not ended. `waited_s` is how long it has waited
    for the network, None if that was not clocked, `computed_s` how long it has computed, where that is recorded."""

    plan: KnownPlan | None
    begin_s: float
    end_s: float | None
    waited_s: float | None
    computed_s: float


class MessageSpan(NamedTuple):
    """A message, in the time of the reference: posted at its source, arrived at its destination."""

    run: int
    src: int
    dst: int
    channel: int
    number: int
    bytes: int
    posted_s: float
    arrived_s: float


class MergedDumps:
    """Dumps of ranks of one job, each rank's once; raises InputError if they are not."""

    def __init__(self, dumps: Sequence[FlightDump]) -> None:
        if not dumps:
            raise InputError("dumps: none: must be at least one")
        jobs = {(each.identity.job, each.identity.n_ranks) for each in dumps}
        if len(jobs) > 1:
            named = ", ".join(f"{job} of {n} ranks" for job, n in sorted(jobs))
            raise InputError(f"dumps of {named}: must be of one job")
        self.dumps = {each.rank: each for each in sorted(dumps, key=lambda each: each.rank)}
        if len(self.dumps) < len(dumps):
            raise InputError("dumps: two of one rank: must be one of each")
        first = next(iter(self.dumps.values()))
        self.job, self.n_ranks = first.identity.job, first.identity.n_ranks
        self.missing = tuple(rank for rank in range(self.n_ranks) if rank not in self.dumps)
        self.runs = {rank: runs_of(dump) for rank, dump in self.dumps.items()}
        hosts = {rank: dump.identity.boot for rank, dump in self.dumps.items()}
        self.clocks: dict[int, ClockOffset] = align(self.dumps, self._orders(), hosts)

    def at_s(self, rank: int, seconds: float) -> float:
        """A time of a rank's clock, by that of the reference."""
        return seconds + self.clocks[rank].offset_s

    @property
    def within_s(self) -> float:
        """How well the clocks are aligned."""
        return max(each.within_s for each in self.clocks.values())

    def _orders(self) -> Iterator[HappenedBefore]:
        sent: dict[tuple[int, int, int, int], tuple[int, float]] = {}
        for rank, dump in self.dumps.items():
            for each in dump.records:
                if each.kind == POSTED and each.x > 0:
                    sent[each.x, each.c, each.d, each.b] = rank, each.at_s
        for rank, dump in self.dumps.items():
            for each in dump.records:
                if each.kind == ARRIVED and (each.x, each.c, each.d, rank) in sent:
                    src, at_s = sent[each.x, each.c, each.d, rank]
                    if src == each.b:
                        yield HappenedBefore(src, at_s, rank, each.at_s)
        for rank, runs in self.runs.items():
            for number, run in runs.items():
                if run.end_s is None or run.plan is None or run.plan.collective not in _GATHERING:
                    continue
                for other, theirs in self.runs.items():
                    begun = theirs.get(number)
                    if other == rank or begun is None or begun.plan is None:
                        continue
                    if begun.plan.digest == run.plan.digest:
                        yield HappenedBefore(other, begun.begin_s, rank, run.end_s)

    def messages(self) -> list[MessageSpan]:
        """The messages that are recorded at both ends, by their arrival."""
        sent = {
            (each.x, rank, each.b, each.c, each.d): (each.y, self.at_s(rank, each.at_s))
            for rank, dump in self.dumps.items()
            for each in dump.records
            if each.kind == POSTED and each.x > 0
        }
        found = []
        for rank, dump in self.dumps.items():
            for each in dump.records:
                key = each.x, each.b, rank, each.c, each.d
                if each.kind == ARRIVED and key in sent:
                    size, posted_s = sent[key]
                    found.append(MessageSpan(*key, size, posted_s, self.at_s(rank, each.at_s)))
        return sorted(found, key=lambda each: each.arrived_s)


def runs_of(dump: FlightDump) -> dict[int, RunSpan]:
    """The runs of plans of all ranks whose beginning is still recorded, by number."""
    plans = {each.number: each for each in dump.status.plans}
    found: dict[int, RunSpan] = {}
    computed: dict[int, float] = {}
    for each in dump.records:
        if each.kind == BEGIN and each.x > 0:
            found[each.x] = RunSpan(plans.get(each.a), each.at_s, None, None, 0.0)
        elif each.kind == COMPUTED:
            computed[each.x] = computed.get(each.x, 0.0) + each.y * 1e-9
        elif each.kind == END and each.x in found:
            found[each.x] = found[each.x]._replace(
                end_s=each.at_s,
                waited_s=each.y * 1e-9 if each.y != UNKNOWN_NS else None,
                computed_s=computed.get(each.x, 0.0),
            )
    return found
