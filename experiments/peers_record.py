"""`PeerComparison`: the record of ours and peers on the same emulated hosts, format `optcc-peers/2`.

A `PeerRun` is one contender in one state of the hosts, timed several times; a `Loss` is what became of a contender that
lost a NIC during a collective, and of the next ones. What could not be run is named with the reason. States may have
been measured in several sessions, each with its command, machine and versions; all contenders in a state are of one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import structs

from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments.record import RECORDS, Check, undisturbed
from optcc.experiments.recorder import Measured
from optcc.show import Card, Shown
from optcc.units import show_size

OURS, PEER = "ours", "peer"
State = tuple[int, int, str]
"""Hosts, size of the message in bytes, and what is wrong with the hosts."""
HEALTHY, AFTER_LOSS = "healthy", "after the loss"
RING, BEST, FOR_LATE = "ring (tcp)", "optimal (tcp)", "stragglar (tcp)"
"""Our contenders in the summary; the name of the one after a loss ends with the second. The last is for late ranks."""


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured in one go: by which command, until when (UTC), on which machine, with which versions."""

    command: list[str]
    finished: str
    machine: dict[str, Any]
    versions: dict[str, str]


class PeerRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contender in one state of the hosts, measured in session number `session`.

    `nic_rate` is what a healthy NIC carries each way. `seconds` are from one start for all to the end of the slowest
    rank. If the last rank began `late_s` after the others, they count from there, and so do `bound_s` and
    `predicted_s`, which include the wire's headers; a peer has no prediction. `steal` is the hypervisor's share of
    each run; `cpu_s` are processor seconds of all ranks, `busy_s` those of the whole machine, its kernel included;
    `rejected` runs were repeated because of steal.
    """

    contender: str
    side: str
    bed: str
    topology: str
    hosts: int
    nics: int
    nic_rate: str
    size_bytes: int
    dtype: str
    settings: str
    bound_s: float
    predicted_s: float | None
    seconds: list[float]
    steal: list[float]
    cpu_s: list[float]
    busy_s: list[float]
    rejected: int
    wrong: int
    session: int = 0
    late_s: float = 0.0

    @property
    def state(self) -> State:
        """The state in which all contenders were compared."""
        return self.hosts, self.size_bytes, self.bed

    @property
    def median_s(self) -> float:
        """The median of the undisturbed times, of all if none is."""
        return statistics.median(undisturbed(self.seconds, self.steal))

    @property
    def over_bound(self) -> str:
        """The median over the bound, with the least and the greatest of the runs."""
        least, middle, most = (each / self.bound_s for each in (min(self.seconds), self.median_s, max(self.seconds)))
        return f"{middle:.3f} ({least:.3f} to {most:.3f})"

    @property
    def bound_percent(self) -> float:
        """The bound as a share of the time, in percent; 100 is the best there can be."""
        return 100 * self.bound_s / self.median_s

    @property
    def moved_gb(self) -> float:
        """GB that the ranks of a ring send for such a message; processor seconds of all contenders are per such GB."""
        return 2 * (self.hosts - 1) * self.size_bytes / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor seconds of the ranks for each GB."""
        return statistics.median(undisturbed(self.cpu_s, self.steal)) / self.moved_gb

    @property
    def busy_s_per_gb(self) -> float:
        """Processor seconds of the whole machine for each GB."""
        return statistics.median(undisturbed(self.busy_s, self.steal)) / self.moved_gb


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome for one contender that lost a NIC in mid-run.

    `before_s` is its time without a loss, `after_s` when the NIC was lost, `run_s` how long that run took (None if it
    did not end within `limit_s`), `outcome` what happened; `next` are the runs after it, none if there were none.
    """

    contender: str
    side: str
    hosts: int
    size_bytes: int
    before_s: float
    after_s: float
    limit_s: float
    run_s: float | None
    outcome: str
    next: PeerRun | None
    session: int = 0

    @property
    def state(self) -> State:
        """As of a run; `next` is in it too."""
        return self.hosts, self.size_bytes, AFTER_LOSS

    @property
    def stall_s(self) -> float | None:
        """By how much the run took longer than one without a loss; None if it did not end."""
        return None if self.run_s is None else self.run_s - self.before_s


@dataclass(frozen=True)
class PeerComparison(Measured):
    """All runs and losses of a comparison, and the sessions in which they were measured.

    `wire_overhead` is bytes on the wire for each byte of payload; `absent` says why something was not run: a contender,
    or a contender in a state (`Gloo: 4 hosts, healthy, 64MiB`), or a state.
    """

    title: str
    wire_overhead: float
    sessions: tuple[Session, ...]
    absent: Mapping[str, str]
    runs: tuple[PeerRun, ...]
    losses: tuple[Loss, ...]

    format: ClassVar[str] = "optcc-peers/2"
    own_path: ClassVar[Path] = RECORDS / "peers-on-fabric.json"
    docs_page: ClassVar[str] = "fabric.md"

    @property
    def wrong(self) -> int:
        """Wrong elements over everything that ended."""
        return sum(run.wrong for run in self.every_run())

    def cards(self) -> tuple[Card, ...]:
        return (*self.parts(), self.summary(), *((self.losses_card(),) if self.losses else ()))

    def remarks(self) -> list[str]:
        overhead = f"T* and predictions have {self.wire_overhead} bytes on the wire for each byte of payload"
        absent = (f"not run: {name}: {reason}" for name, reason in self.absent.items())
        sessions = (f"measured until {past.finished}: {' '.join(past.command)}" for past in self.sessions)
        return [overhead, *absent, *sessions]

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.wrong else EXIT_DONE

    def check_fields(self, check: Check) -> None:
        for number, run in enumerate(self.runs):
            _check(run, f"runs[{number}]", check, len(self.sessions))
        for number, loss in enumerate(self.losses):
            _check_session(loss, f"losses[{number}]", check, len(self.sessions))
            if loss.next is not None:
                _check(loss.next, f"losses[{number}].next", check, len(self.sessions))

    def check_overhead(self, wire_overhead: float) -> None:
        """Raises InputError unless a record to be joined has the same bytes on the wire for each byte of payload."""
        if wire_overhead != self.wire_overhead:
            raise InputError(f"wire overhead {wire_overhead}: must be the {self.wire_overhead} of the record")

    def with_newer(self, newer: PeerComparison) -> PeerComparison:
        """This record with the states of `newer`, which replace those that both have, all their contenders together.

        Raises InputError if their bytes on the wire differ.
        """
        self.check_overhead(newer.wire_overhead)
        states = {each.state for each in newer.runs} | {each.state for each in newer.losses}
        runs = _joined(self.runs, newer.runs, states, len(self.sessions))
        losses = _joined(self.losses, newer.losses, states, len(self.sessions))
        kept = {run.session for run in runs} | {loss.session for loss in losses}
        sessions = [*self.sessions, *newer.sessions]
        number = {old: new for new, old in enumerate(sorted(kept))}
        anew = {shown_state(state) for state in states}
        contenders = {run.contender for run in runs} | {loss.contender for loss in losses}
        absent = {
            what: why
            for what, why in {**self.absent, **newer.absent}.items()
            if what not in contenders and (what in newer.absent or not any(what.endswith(each) for each in anew))
        }
        return PeerComparison(
            newer.title,
            newer.wire_overhead,
            tuple(sessions[each] for each in sorted(kept)),
            absent,
            tuple(_in_session(each, number[each.session]) for each in runs),
            tuple(_in_session(each, number[each.session]) for each in losses),
        )

    def fault_free_s(self, run: PeerRun) -> float | None:
        """The best median of a peer on healthy hosts, for the same message and as many hosts."""
        return min(
            (
                each.median_s
                for each in self.runs
                if each.bed == HEALTHY
                and each.side == PEER
                and (each.hosts, each.size_bytes) == (run.hosts, run.size_bytes)
            ),
            default=None,
        )

    def card(self) -> Card:
        return StateRuns(self, self.title, self.every_run()).card()

    def markdown(self) -> str:
        """The summary, as in docs/fabric.md."""
        return self.summary().markdown()

    def summary(self) -> Card:
        """Of each state, the times of ours over TCP and of the best peer over the bound, with their spread."""
        rows = []
        for part in self.parts():
            first = part.runs[0]
            best = next((run for run in part.runs if run.contender.endswith(BEST)), None)
            ring = next((run for run in part.runs if run.contender == RING), None)
            for_late = next((run for run in part.runs if run.contender == FOR_LATE), None)
            peer = min((run for run in part.runs if run.side == PEER), key=lambda run: run.median_s, default=None)
            predicted = None if best is None or best.predicted_s is None else best.predicted_s / best.bound_s
            rows.append(
                (
                    f"{first.hosts}",
                    first.nic_rate,
                    show_size(first.size_bytes),
                    first.bed,
                    f"{first.bound_s:.3f} s",
                    "-" if best is None else best.over_bound,
                    "-" if predicted is None else f"{predicted:.3f}",
                    "-" if ring is None else ring.over_bound,
                    "-" if for_late is None else for_late.over_bound,
                    "-" if peer is None else peer.over_bound,
                    "-" if peer is None else peer.contender,
                    f"{min(len(run.seconds) for run in part.runs)}",
                )
            )
        ours = ("our optimal", "as simulated", "our ring", "our StragglAR")
        over = (*(f"{each} / T*" for each in ours), "best peer / T*")
        columns = ("hosts", "a NIC", "size", "state", "T*", *over, "which", "runs")
        return Card(self.title, columns, tuple(rows))

    def losses_card(self) -> Card:
        """The outcome for each contender that lost a NIC."""
        rows = tuple(
            (
                loss.contender,
                f"{loss.hosts}",
                show_size(loss.size_bytes),
                f"{loss.after_s:.2f}",
                "-" if loss.run_s is None else f"{loss.run_s:.3f}",
                "-" if loss.stall_s is None else f"{loss.stall_s:+z.3f}",
                loss.outcome,
            )
            for loss in self.losses
        )
        columns = ("contender", "hosts", "size", "NIC lost at (s)", "run (s)", "longer by (s)", "outcome")
        return Card("A NIC is lost in mid-run", columns, rows)

    def every_run(self) -> tuple[PeerRun, ...]:
        """All runs, those after a loss at the end."""
        return (*self.runs, *(loss.next for loss in self.losses if loss.next is not None))

    def parts(self) -> tuple[StateRuns, ...]:
        """The runs of each size, number of hosts and state, to be shown one after the other."""
        groups: dict[State, list[PeerRun]] = {}
        for run in self.every_run():
            groups.setdefault(run.state, []).append(run)
        return tuple(
            StateRuns(
                self,
                f"{shown_state(state)}, NICs of {runs[0].nic_rate}, T* {runs[0].bound_s:.4g} s",
                tuple(runs),
            )
            for state, runs in groups.items()
        )


Member = TypeVar("Member", PeerRun, Loss)


def shown_state(state: State) -> str:
    """What a state is called.

    >>> shown_state((4, 2**26, "one NIC at half"))
    '4 hosts, one NIC at half, 64MiB'
    """
    hosts, size_bytes, bed = state
    return f"{hosts} hosts, {bed}, {show_size(size_bytes)}"


def _joined(older: Iterable[Member], newer: Iterable[Member], states: set[State], before: int) -> list[Member]:
    """Those of `older` in no state of `states`, and those of `newer`, whose sessions come after the `before` first."""
    found = [each for each in older if each.state not in states]
    found += [_in_session(each, before + each.session) for each in newer]
    return sorted(found, key=lambda each: (each.size_bytes, each.hosts, each.state[2] != HEALTHY))


def _in_session(each: Member, session: int) -> Member:
    if isinstance(each, Loss) and each.next is not None:
        return structs.replace(each, session=session, next=structs.replace(each.next, session=session))
    return structs.replace(each, session=session)


@dataclass(frozen=True)
class StateRuns(Shown):
    """Some runs of a comparison, to be shown."""

    whole: PeerComparison
    title: str
    runs: tuple[PeerRun, ...]

    def card(self) -> Card:
        columns = ("hosts", "contender", "time (s)", "busbw (GB/s)", "%bound", "over best healthy peer")
        more = ("predicted (s)", "ranks CPU-s/GB", "all CPU-s/GB", "n", "#wrong")
        return Card(self.title, (*columns, *more), tuple(self._row(run) for run in self.runs))

    def _row(self, run: PeerRun) -> tuple[str, ...]:
        reference = self.whole.fault_free_s(run)
        busbw = 2 * (run.hosts - 1) / run.hosts * run.size_bytes / run.median_s / 1e9
        return (
            f"{run.hosts}x{run.nics} {run.bed}",
            run.contender,
            f"{run.median_s:.4g}",
            f"{busbw:.4f}",
            f"{run.bound_percent:.1f}",
            f"{100 * (run.median_s / reference - 1):+z.1f} %" if reference else "-",
            "-" if run.predicted_s is None else f"{run.predicted_s:.4g}",
            f"{run.cpu_s_per_gb:.2f}",
            f"{run.busy_s_per_gb:.2f}",
            f"{len(run.seconds)}",
            f"{run.wrong}",
        )


def _check_session(each: PeerRun | Loss, where: str, check: Check, sessions: int) -> None:
    """Raises CodecError if `each` is of no session that the record has."""
    good = 0 <= each.session < sessions
    check(f"{where}.session", each.session, good, f"be the number of one of {sessions} sessions")


def _check(run: PeerRun, where: str, check: Check, sessions: int) -> None:
    """Raises CodecError if `run` cannot be a measurement."""
    _check_session(run, where, check, sessions)

    def must(field: str, holds: bool, rule: str) -> None:
        check(f"{where}.{field}", getattr(run, field), holds, rule)

    must("contender", bool(run.contender), "be a name")
    must("side", run.side in (OURS, PEER), f"be {OURS} or {PEER}")
    must("hosts", run.hosts >= 2, "be at least 2")
    must("size_bytes", run.size_bytes > 0, "be above zero")
    must("bound_s", 0 < run.bound_s < math.inf, "be above zero")
    must("seconds", bool(run.seconds) and all(0 < each < math.inf for each in run.seconds), "be above zero")
    for field in ("steal", "cpu_s", "busy_s"):
        same = len(getattr(run, field)) == len(run.seconds)
        must(field, same, f"have as many numbers as seconds, {len(run.seconds)}")
    must("wrong", run.wrong >= 0, "not be negative")
