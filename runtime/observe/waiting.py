"""Who waits for whom, and who is at the end of it: the straggler.

A rank waits for those whose messages its runs need next, or, if it needs none, for those that have yet to take its own.
Whoever is waited for, in one step or several, and waits for nobody is to blame. Where all wait in a circle, it is what
lies between them: the ranks whose messages were sent and have not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import networkx as nx

from optcc.runtime.observe.dump import GONE, STOPPED, FlightDump
from optcc.runtime.observe.status import CLOSED

STUCK_S = 0.25
"""A run that has not gone on for so long is stuck; a status is rewritten every 0.1 s."""
_SILENT_S = 1.0


class WaitEdge(NamedTuple):
    """`waiter` waits for `rank`, which is to send (`arrives`) or to take what was sent, since this second of its clock,
    in this run."""

    waiter: int
    rank: int
    arrives: bool
    since_s: float
    run: int


class RankAtFault(NamedTuple):
    """A rank that keeps others waiting, and what is known of it, in words."""

    rank: int
    reason: str


def wait_edges(dumps: Sequence[FlightDump], stuck_s: float = STUCK_S) -> list[WaitEdge]:
    """The waits of runs that have not gone on for `stuck_s`, by rank."""
    found: dict[tuple[int, int], WaitEdge] = {}
    for dump in dumps:
        if dump.process in (GONE, STOPPED):
            continue
        for run in dump.status.running:
            if dump.status.now_s - run.moved_s < stuck_s:
                continue
            arriving = [each for each in run.waits if each.arrives]
            for wait in arriving or run.waits:
                key = dump.rank, wait.rank
                edge = WaitEdge(dump.rank, wait.rank, wait.arrives, run.moved_s, run.number)
                if key not in found or edge.since_s < found[key].since_s:
                    found[key] = edge
    return list(found.values())


def stragglers(dumps: Sequence[FlightDump], edges: Sequence[WaitEdge]) -> list[RankAtFault]:
    """The ranks at the end of the waits, lowest first; none if nobody waits, or all wait in a circle."""
    if not edges:
        return []
    graph = nx.DiGraph((edge.waiter, edge.rank) for edge in edges)
    by_rank = {dump.rank: dump for dump in dumps}
    ends = [rank for rank in graph if not graph.out_degree(rank)]
    # Some have not begun what others wait in.
    furthest = max((edge.run for edge in edges), default=0)
    behind = [rank for rank in ends if rank in by_rank and by_rank[rank].begun < furthest]
    certain = [rank for rank in ends if rank not in by_rank or by_rank[rank].process in (GONE, STOPPED)]
    return [RankAtFault(rank, describe(by_rank, rank, furthest)) for rank in sorted(certain or behind or ends)]


def describe(by_rank: Mapping[int, FlightDump], rank: int, run: int) -> str:
    """What is known of a rank that others wait for in a run."""
    dump = by_rank.get(rank)
    if dump is None:
        return "there is nothing of it: no page, no dump"
    if dump.process == GONE and dump.status.state != CLOSED:
        return f"its process {dump.identity.pid} is gone"
    if dump.process == STOPPED:
        return f"its process {dump.identity.pid} is stopped"
    if dump.status.state == CLOSED:
        return "it has left in good order"
    where = "inside the run-time" if dump.is_driven else "in the program, not in a collective"
    if 0 < dump.begun < run:
        return f"it has not begun run {run}, its last was run {dump.begun}; it is {where}"
    if dump.begun < run:
        return f"it has begun no run yet; it is {where}"
    return f"it waits for nobody; it is {where}"


def silent_s(dump: FlightDump, latest_s: float) -> float:
    """How long ago a rank has said something, at `latest_s` of its clock; 0 if that is no longer than usual."""
    last = max([dump.status.now_s, *(each.at_s for each in dump.records[-1:])])
    return latest_s - last if latest_s - last >= _SILENT_S else 0.0
