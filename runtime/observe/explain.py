"""What happened first, and who was waiting for whom: the dumps of a job's ranks to one paragraph.

Each kind of evidence has a function here, which finds it or does not. They are asked in this order, and the first that
finds something gives the verdict:

    wrong       a rank has computed something else than its plan says
    mismatch    ranks did not agree on what they were about to run
    error       a program has raised an exception, or given up
    gone        the process of a rank has ended
    nic         the run-time has named NICs; no rail was left
    stopped     a process is stopped, and others wait for it
    order       ranks have begun different collectives in one place
    late        a rank is at the end of all waits, or of those that kept the others waiting until a deadline
    rails       a NIC was lost, or carries less than it should, and the job goes on
    slow        a rank begins later than all others, computes longer, or its messages take longer

What is named is what the dumps show. A rank of which there is none is said to be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from statistics import median

import msgspec

from optcc.runtime.observe.dump import GONE, STOPPED, FlightDump
from optcc.runtime.observe.merged import MergedDumps, RunSpan
from optcc.runtime.observe.recorder import MISMATCH
from optcc.runtime.observe.status import (
    DOWN,
    LOST,
    NIC_DOWN,
    RUNNING,
    SILENT,
    WRONG,
    FailureStatus,
    Note,
)
from optcc.runtime.observe.waiting import STUCK_S, RankAtFault, WaitEdge, describe, stragglers, wait_edges
from optcc.units import show_time

_CONSEQUENCES = ("RankLost", "AllRailsFailed", "DeadlineExceeded")
"""Errors that a rank raises because of others."""
_SLOW_SHARE, _SLOW_RATE = 0.8, 0.7
_LATE_SHARE, _BUSY_SHARE, _BUSY_RATIO = 0.5, 0.3, 2.0
_SLOW_RUNS_MIN = 3
_MESSAGE_BYTES_MIN = 1 << 12
_WAITS_SAID = 8


class FailureExplanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict: its kind, the ranks and NICs at fault, and a paragraph. `waits` are (who, for whom, seconds)."""

    kind: str
    culprits: tuple[int, ...]
    nics: tuple[tuple[int, str], ...]
    text: str
    waits: tuple[tuple[int, int, float], ...] = ()


class _Finding(msgspec.Struct, frozen=True):
    kind: str
    culprits: tuple[int, ...]
    text: str
    nics: tuple[tuple[int, str], ...] = ()


def explain(dumps: Sequence[FlightDump]) -> FailureExplanation:
    """What the dumps of a job's ranks show; raises InputError if they are not of one job."""
    merged = MergedDumps(dumps)
    edges = wait_edges(list(merged.dumps.values()))
    finding = next((found for find in _EVIDENCE if (found := find(merged, edges)) is not None), None)
    if finding is None:
        finding = _Finding("nothing", (), f"Nothing is wrong with job {merged.job} as far as the dumps say")
    said = [f"{finding.text}.", *_first_event(merged, finding), *_waiting(merged, edges), *_limits(merged)]
    waits = tuple((edge.waiter, edge.rank, _waited_s(merged, edge)) for edge in edges)
    return FailureExplanation(finding.kind, finding.culprits, finding.nics, " ".join(said), waits)


# --- evidence ---------------------------------------------------------------------------------------------------------


def _wrong(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    found = [(merged.at_s(rank, note.at_s), rank, note) for rank, note in _notes(merged, (WRONG,))]
    if not found:
        return None
    _at_s, rank, note = min(found, key=lambda each: each[0])
    return _Finding("wrong", _ranks(each[1] for each in found), f"Rank {rank} has computed a wrong result: {note.text}")


def _mismatch(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    notes = [(note.ranks, note.text) for _, note in _notes(merged, (MISMATCH,))]
    notes += [(each.culprits, each.text) for _, each in _failures(merged) if each.error == "MismatchError"]
    if not notes:
        return None
    ranks, text = notes[0]
    return _Finding(MISMATCH, tuple(sorted(ranks)), f"The ranks did not agree on what they were about to run: {text}")


def _preparing(merged: MergedDumps, edges: Sequence[WaitEdge]) -> _Finding | None:
    """Some ranks have a plan and run it, others are about to agree on one for something else."""
    dumps = merged.dumps
    found = {rank: dump.status.preparing for rank, dump in dumps.items() if dump.status.preparing}
    runs = [(edge.run, edge.waiter) for edge in edges if edge.run > 0 and edge.waiter not in found]
    behind = [rank for rank in found if runs and dumps[rank].begun < max(runs)[0]]
    if not behind:
        return None
    number, waiter = max(runs)
    plan = merged.runs[waiter][number].plan if number in merged.runs[waiter] else None
    there = "" if plan is None else f", an {plan.text}"
    return _Finding(
        *(MISMATCH, tuple(behind)),
        f"In the place of run {number}{there}, {_name(behind)} {'want' if len(behind) > 1 else 'wants'} another "
        f"collective: an {found[behind[0]]}",
    )


def _error(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    own = [(merged.at_s(rank, each.at_s), rank, each) for rank, each in _failures(merged) if _is_own(each)]
    if not own:
        return None
    _at_s, rank, failure = min(own, key=lambda each: each[0])
    others = [other for _, other, _ in own if other != rank]
    more = f"; rank{'s' if len(others) > 1 else ''} {_list(others)} failed too, later" if others else ""
    return _Finding("error", (rank,), f"Rank {rank} gave up on its own account: {failure.cause}{more}")


def _gone(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    found = [rank for rank, dump in merged.dumps.items() if dump.process == GONE and dump.status.state == RUNNING]
    texts = [f"the process {merged.dumps[rank].identity.pid} of rank {rank} is gone" for rank in found]
    if not found:
        found = [rank for rank in _agreed(merged) if rank in merged.missing]
        texts = [f"rank {rank} is lost, and has left no dump: {_why(merged)}" for rank in found]
    if not found:
        return None
    last = [_last_run(merged, rank) for rank in found if rank in merged.dumps]
    return _Finding("gone", tuple(found), _sentence("; ".join(texts + last)))


def _nic(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    named = [each for _, each in _failures(merged) if each.error == "AllRailsFailed"]
    if not named:
        return None
    culprits = tuple(sorted({rank for each in named for rank in each.culprits}))
    nics = tuple(sorted({nic for each in named for nic in each.nics}))
    return _Finding("nic", culprits, f"No rail was left: {_own_words(named[0].text)}", nics)


def _stopped(merged: MergedDumps, edges: Sequence[WaitEdge]) -> _Finding | None:
    awaited = {edge.rank for edge in edges} | set(_agreed(merged))
    found = [rank for rank, dump in merged.dumps.items() if dump.process == STOPPED and rank in awaited]
    if not found:
        return None
    texts = [f"the process {merged.dumps[rank].identity.pid} of rank {rank} is stopped" for rank in found]
    return _Finding("stopped", tuple(found), _sentence("; ".join(texts)))


def _order(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    """The first run whose plan is not the same at all ranks that have begun it."""
    for number in sorted({number for runs in merged.runs.values() for number in runs}):
        begun = {rank: runs[number].plan for rank, runs in merged.runs.items() if number in runs}
        digests = {rank: plan.digest for rank, plan in begun.items() if plan is not None}
        usual = Counter(digests.values()).most_common(1)
        others = tuple(sorted(rank for rank, digest in digests.items() if digest != usual[0][0])) if usual else ()
        if others:
            right = next(plan for plan in begun.values() if plan is not None and plan.digest == usual[0][0])
            wrong = begun[others[0]]
            assert wrong is not None
            verb = "have" if len(others) > 1 else "has"
            return _Finding(
                *("order", others),
                f"In run {number} {_name(others)} {verb} begun an {wrong.text}, the others an {right.text}",
            )
    return None


def _late(merged: MergedDumps, edges: Sequence[WaitEdge]) -> _Finding | None:
    has_failed = any(True for _ in _failures(merged))
    found = stragglers(list(merged.dumps.values()), edges)
    agreed = _agreed(merged) if has_failed else ()
    if not found and (not edges or len(agreed) < merged.n_ranks):
        found = [RankAtFault(rank, describe(merged.dumps, rank, _furthest(merged))) for rank in agreed]
    if found:
        texts = [f"rank {rank} kept the others waiting: {reason}" for rank, reason in found]
        return _Finding("late", tuple(rank for rank, _ in found), _sentence("; ".join(texts)))
    if edges:
        ranks = _ranks(edge.waiter for edge in edges)
        return _Finding("circle", ranks, f"{_name(ranks).capitalize()} wait for each other in a circle")
    return None


def _rails(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    lost = _lost_nics(merged)
    if lost:
        (rank, nic), (at_s, why, state) = min(lost.items(), key=lambda each: each[1][0])
        name = merged.dumps[rank].status.rails[nic].name
        del at_s
        others = [f"{merged.dumps[r].status.rails[n].name} of rank {r}" for r, n in lost if (r, n) != (rank, nic)]
        more = f"; so did {_list(others)}, later" if others else ""
        named = tuple((r, merged.dumps[r].status.rails[n].name) for r, n in lost)
        text = f"NIC {name} of rank {rank} failed ({why}), and is {state} now{more}"
        return _Finding("rails", _ranks(r for r, _ in lost), text, named)
    slow = [
        (min(rail.out_share, rail.in_share), rank, rail)
        for rank, dump in merged.dumps.items()
        for rail in dump.status.rails
        if min(rail.out_share, rail.in_share) <= _SLOW_SHARE
    ]
    if not slow:
        return None
    share, rank, rail = min(slow, key=lambda each: each[:2])
    text = f"NIC {rail.name} of rank {rank} carries {share:.0%} of its declared rate"
    return _Finding("rails", _ranks(each[1] for each in slow), text, tuple((r, each.name) for _, r, each in slow))


def _slow(merged: MergedDumps, _: Sequence[WaitEdge]) -> _Finding | None:
    """Compares ranks over the runs that all of them have ended; the first is left out, in which memory is touched."""
    common = set.intersection(*(_ended(runs) for runs in merged.runs.values())) if merged.runs else set()
    numbers = sorted(common)[1:]
    if len(merged.runs) < 2 or len(numbers) < _SLOW_RUNS_MIN:
        return None
    spans = {rank: [runs[number] for number in numbers] for rank, runs in merged.runs.items()}
    whole_s = median(
        max(merged.at_s(rank, spans[rank][k].end_s or 0.0) for rank in spans)
        - min(merged.at_s(rank, spans[rank][k].begin_s) for rank in spans)
        for k in range(len(numbers))
    )
    begun_s = {rank: [merged.at_s(rank, each.begin_s) for each in runs] for rank, runs in spans.items()}
    late = {
        rank: median(
            mine - median(begun_s[other][k] for other in spans if other != rank) for k, mine in enumerate(begun_s[rank])
        )
        for rank in spans
    }
    worst = max(late, key=lambda rank: late[rank])
    if late[worst] >= _LATE_SHARE * whole_s and merged.within_s < late[worst]:
        return _Finding(
            "slow",
            (worst,),
            f"Rank {worst} begins {show_time(late[worst])} later than the others, of {show_time(whole_s)}",
        )
    busy = {rank: _busy_s(runs) for rank, runs in spans.items()}
    worst = max(busy, key=lambda rank: busy[rank])
    next_s = max(seconds for rank, seconds in busy.items() if rank != worst)
    if busy[worst] >= max(_BUSY_SHARE * whole_s, _BUSY_RATIO * next_s):
        return _Finding(
            *("slow", (worst,)),
            f"Rank {worst} computes for {show_time(busy[worst])} of {show_time(whole_s)}, the others for "
            f"{show_time(next_s)} at most",
        )
    return _slow_messages(merged)


def _busy_s(runs: Sequence[RunSpan]) -> float:
    """How long a rank has not waited in a run, by the median of those whose waits were clocked; 0 if none was."""
    known = [(each.end_s or 0.0) - each.begin_s - each.waited_s for each in runs if each.waited_s is not None]
    return median(known) if known else 0.0


def _slow_messages(merged: MergedDumps) -> _Finding | None:
    """A rank whose messages take longer than those between the others, however the clocks of hosts differ within what
    is known of them: its highest rates are compared with the lowest of the others."""
    rates: list[tuple[int, int, float, float]] = []
    before: dict[tuple[int, int], float] = {}
    for each in merged.messages():
        within_s = 0.0
        if merged.dumps[each.src].identity.boot != merged.dumps[each.dst].identity.boot:
            within_s = merged.clocks[each.src].within_s + merged.clocks[each.dst].within_s
        # The arrival of the message before is by the same clock.
        last_s = before.get((each.dst, each.channel), -inf)
        before[each.dst, each.channel] = each.arrived_s
        shortest_s = each.arrived_s - max(each.posted_s + within_s, last_s)
        longest_s = each.arrived_s - max(each.posted_s - within_s, last_s)
        if each.bytes >= _MESSAGE_BYTES_MIN and longest_s > 0:
            highest = each.bytes / shortest_s if shortest_s > 0 else inf
            rates.append((each.src, each.dst, each.bytes / longest_s, highest))
    ratios = {}
    for rank in merged.dumps:
        own = [highest for src, dst, _, highest in rates if rank in (src, dst)]
        others = [lowest for src, dst, lowest, _ in rates if rank not in (src, dst)]
        if own and others and median(others) > 0:
            ratios[rank] = median(own) / median(others)
    worst = min(ratios, key=lambda rank: ratios[rank], default=-1)
    if worst < 0 or ratios[worst] > _SLOW_RATE:
        return None
    return _Finding(
        *("slow", (worst,)), f"Messages from and to rank {worst} pass at {ratios[worst]:.0%} of the rate of the others'"
    )


_EVIDENCE: tuple[Callable[[MergedDumps, Sequence[WaitEdge]], _Finding | None], ...] = (
    *(_wrong, _mismatch, _preparing, _error, _gone, _nic, _stopped, _order, _late, _rails, _slow),
)


# --- what they need ---------------------------------------------------------------------------------------------------


def _failures(merged: MergedDumps) -> Iterable[tuple[int, FailureStatus]]:
    for rank, dump in merged.dumps.items():
        if dump.status.failure is not None:
            yield rank, dump.status.failure


def _notes(merged: MergedDumps, kinds: Sequence[str]) -> Iterable[tuple[int, Note]]:
    for rank, dump in merged.dumps.items():
        for note in dump.status.notes:
            if note.kind in kinds:
                yield rank, note


def _is_own(failure: FailureStatus) -> bool:
    """True if a rank has not failed because of others."""
    return failure.error not in (*_CONSEQUENCES, "MismatchError")


def _agreed(merged: MergedDumps) -> tuple[int, ...]:
    """The ranks that most failures name."""
    named = Counter(each.culprits for _, each in _failures(merged) if each.culprits)
    return tuple(sorted(named.most_common(1)[0][0])) if named else ()


def _why(merged: MergedDumps) -> str:
    return next((_own_words(each.text) for _, each in _failures(merged) if each.culprits), "")


def _furthest(merged: MergedDumps) -> int:
    return max(dump.begun for dump in merged.dumps.values())


def _lost_nics(merged: MergedDumps) -> dict[tuple[int, int], tuple[float, str, str]]:
    """By rank and NIC: when it was lost first, why, and its state now.

    A rail has two ends, and both lose it. The NIC at fault is the one that the kernel says is down, else that whose
    rank has lost most peers over it.
    """
    found: dict[tuple[int, int], tuple[float, str]] = {}
    dead = {*merged.missing, *_agreed(merged)} | {rank for rank, dump in merged.dumps.items() if dump.process == GONE}
    peers: dict[tuple[int, int], set[int]] = {}
    for rank, note in _notes(merged, (LOST, NIC_DOWN)):
        failure = merged.dumps[rank].status.failure
        is_consequence = note.peer in dead or (failure is not None and note.at_s >= failure.at_s)
        if note.nic < 0 or (note.kind == LOST and is_consequence):
            continue
        key, at_s = (rank, note.nic), merged.at_s(rank, note.at_s)
        peers.setdefault(key, set()).add(note.peer)
        if key not in found or note.kind == NIC_DOWN:
            found[key] = at_s, "its link is down" if note.kind == NIC_DOWN else note.text
    rails = {key: merged.dumps[key[0]].status.rails for key in found}
    downs = {rank: nic for rank, note in _notes(merged, (NIC_DOWN,)) for nic in (note.nic,)}
    states = {key: rails[key][key[1]].state for key in found if key[1] < len(rails[key])}
    certain = [key for key in states if states[key] == DOWN or downs.get(key[0]) == key[1]]
    if not certain and states:
        most = max(len(peers[key]) for key in states)
        certain = [key for key in states if states[key] == SILENT] or [key for key in states if len(peers[key]) == most]
    return {key: (*found[key], states[key]) for key in sorted(certain, key=lambda key: found[key][0])}


def _ended(runs: dict[int, RunSpan]) -> set[int]:
    return {number for number, run in runs.items() if run.end_s is not None}


def _last_run(merged: MergedDumps, rank: int) -> str:
    dump, runs = merged.dumps[rank], merged.runs[rank]
    last = runs.get(max(runs, default=0))
    if last is None:
        return "it had begun nothing"
    where = "in" if last.end_s is None else "after"
    what = "" if last.plan is None else f", an {last.plan.text}"
    return f"it was {where} run {dump.begun}{what}"


# --- sentences --------------------------------------------------------------------------------------------------------


def _first_event(merged: MergedDumps, finding: _Finding) -> list[str]:
    """The first loss of a NIC, if that came before the failures and is not the verdict."""
    failed_s = [merged.at_s(rank, each.at_s) for rank, each in _failures(merged)]
    lost = _lost_nics(merged) if failed_s and finding.kind not in ("rails", "nic") else {}
    if not lost:
        return []
    (rank, nic), (at_s, why, _) = min(lost.items(), key=lambda each: each[1][0])
    ahead_s = min(failed_s) - at_s
    if ahead_s <= 0:
        return []
    name = merged.dumps[rank].status.rails[nic].name
    return [f"{show_time(ahead_s)} before, NIC {name} of rank {rank} had failed ({why})."]


def _waiting(merged: MergedDumps, edges: Sequence[WaitEdge]) -> list[str]:
    said = []
    for edge in sorted(edges, key=lambda each: -_waited_s(merged, each))[:_WAITS_SAID]:
        what = "" if edge.arrives else " to take its message"
        said.append(
            f"rank {edge.waiter} waited for rank {edge.rank}{what} for {show_time(_waited_s(merged, edge))}"
            + (f" (run {edge.run})" if edge.run > 0 else "")
        )
    if not said:
        return []
    more = f", and {len(edges) - _WAITS_SAID} more" if len(edges) > _WAITS_SAID else ""
    return [_sentence("; ".join(said)) + more + "."]


def _waited_s(merged: MergedDumps, edge: WaitEdge) -> float:
    return max(merged.dumps[edge.waiter].status.now_s - edge.since_s, STUCK_S)


def _limits(merged: MergedDumps) -> list[str]:
    said = []
    if merged.missing:
        said.append(f"There is no dump of {_name(merged.missing)}.")
    if len({each.identity.boot for each in merged.dumps.values()}) > 1:
        within_s = merged.within_s
        how = f"to within {show_time(within_s)}" if within_s < float("inf") else "not for every host"
        said.append(f"Clocks of the hosts are aligned {how}.")
    return said


def _ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}"


def _list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def _own_words(text: str) -> str:
    """An error without the rank that raised it, and its first line alone."""
    head, colon, rest = text.partition("\n")[0].partition(": ")
    return rest if colon and head.startswith("rank ") and head[5:].isdecimal() else text.partition("\n")[0]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
