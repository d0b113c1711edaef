"""Swarm testing of the protocol: a seed makes hosts, messages and faults, and every promise is checked.

A run has two phases. While faults come and go, *safety*: what a rank is told was received is right to the byte, each
message once and in order; a buffer that was reported is never touched again; memory is bounded. Then the faults end,
and *liveness*: everything is delivered and reported within `GRACE_S`, without the help of the sender's 5 s timer; or,
if a rank was killed or some pair has no rail left for good, every rank that does not finish ends in an error, and all
of them name the same ranks or rails and the same cause.

    optcc experiment swarm --seed 7 --trace
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from optcc.errors import AllRailsFailed, RankLost
from optcc.runtime.protocol.endpoint import CLOSE_S
from optcc.runtime.protocol.failure_agreement import Judgement, judge
from optcc.runtime.protocol.frames import crc32
from optcc.runtime.sim.faults import FaultInjector
from optcc.runtime.sim.host import SimulatedHost
from optcc.runtime.sim.network import SimulatedNetwork
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.sim.recorder import Recorder
from optcc.runtime.sim.scenario import INFINITY, STALL_S, Scenario, make_scenario
from optcc.runtime.sim.swarm_program import SwarmProgram, Violation

GRACE_S = 4.0
_PATHS_S = 4.0
_CHECK_S = 0.25
_HALF_OPEN_S = 0.6
_CORRUPT_S = 2.0
"""Bits flip for so long at most. A chunk of 140 segments, 4 % of which are damaged, comes whole once in 300 times."""
_STAYS_S = 1.5 * CLOSE_S
"""Ranks that are to stay do not leave until so long after the last fault: by then nothing may be suspected any more."""
_EVENTS_MAX = 500_000
HOLES = ("down", "hole", "hole-out", "hole-in")


class Swarm:
    """One run of a scenario. `log` collects what happens, if it is given."""

    def __init__(self, scenario: Scenario, log: Callable[[str], None] | None = None) -> None:
        self.scenario, self._log = scenario, log
        self.rng = random.Random(scenario.seed + 1)
        self.network = SimulatedNetwork(
            self.rng,
            latency_s=scenario.latency_s,
            segment_bytes=scenario.segment_bytes,
            buffer_bytes=scenario.buffer_bytes,
        )
        self.network.corrupt = scenario.corrupt
        book = []
        for rank, nics in enumerate(scenario.rates):
            entries = []
            for number, (out, in_) in enumerate(nics):
                self.network.nics[rank, number] = SimulatedNic(rank, number, float(out), float(in_))
                entries.append((scenario.names[rank][number], str(rank), number, out, in_))
            book.append(tuple(entries))
        secret, job = self.rng.randbytes(32), self.rng.randbytes(16)
        checksum = crc32 if scenario.settings.crc else None
        faults = scenario.faults
        # One rank is killed or cut off; what the faults may last.
        lasting = {(fault.rank, fault.nic) for fault in faults if fault.kind in HOLES and fault.for_s == INFINITY}
        self.cut_off = {
            rank for rank, nics in enumerate(scenario.names) if all((rank, nic) in lasting for nic in range(len(nics)))
        }
        # Of all others, whatever befalls them ends.
        self.is_one_cut_off = len(self.cut_off) == 1 and {rank for rank, _ in lasting} == self.cut_off
        self.is_cut = bool(self.cut_off) or any(fault.kind == "crash" for fault in faults)
        self.faults_end_s = max(
            [0.0, *(fault.begins_by_s + (fault.for_s if fault.for_s < INFINITY else 0.0) for fault in faults)]
        )
        self.sleeps = any(fault.kind == "busy" and fault.for_s > GRACE_S for fault in faults)
        self.lasts_on_nics = bool(lasting)
        self.lasts = any(fault.for_s == INFINITY for fault in faults)
        self.stays_to_s = self.faults_end_s + _STAYS_S if scenario.stays and faults else 0.0
        self.n_events = 0
        # By number, the epoch of each collective.
        self.epochs: dict[int, int] = {}
        # By rank, peer and session: since when only the source holds a connection.
        self._half_open: dict[tuple[int, int, int], float] = {}
        self.programs = [
            SwarmProgram(
                self,
                SimulatedHost(
                    *(self.network, scenario.settings, rank, book),
                    secret=secret,
                    job=job,
                    rng=random.Random(scenario.seed * 64 + rank),
                    checksum=checksum,
                    turn_s=scenario.turn_s,
                ),
            )
            for rank in range(len(book))
        ]
        hosts = [program.host for program in self.programs]
        self.faults = FaultInjector(self.network, hosts, scenario.rates, self.note)

    def note(self, what: str) -> None:
        """Something for the story."""
        if self._log is not None:
            self._log(f"{self.network.clock.now_s:9.5f}  {what}")

    def run(self) -> None:
        """Runs it; raises Violation."""
        clock = self.network.clock
        self.faults.plan(self.scenario.faults)
        if self.scenario.corrupt:
            clock.after(_CORRUPT_S, self.end_corruption)
        size_bytes = sum(sum(lane.sizes) for lane in self.scenario.lanes)
        size_bytes += 2 * len(self.programs) ** 2 * self.scenario.payload_bytes
        slowest = min(rate for nics in self.scenario.rates for nic in nics for rate in nic)
        until_s = self.faults_end_s + GRACE_S + 8 * size_bytes / slowest
        # Where a rank may be lost, or no rail is left, that takes its time to be found.
        until_s += 2 * STALL_S + 3.0 if self.is_cut or self._may_refuse() else 0.0
        # Pairs that are severed try path after path, some only once others have found theirs.
        until_s += _PATHS_S if self.scenario.is_severed else 0.0
        while clock.now_s < until_s and not self._is_over():
            self.n_events += clock.run(min(until_s, clock.now_s + _CHECK_S), _EVENTS_MAX)
            if self.n_events > _EVENTS_MAX:
                raise Violation(f"{self.n_events} events in {clock.now_s:.3f} s")
            for program in self.programs:
                program.check(is_over=False)
            self._check_half_open()
        if not self._is_over():
            waiting = "\n".join(each.pending() for each in self.programs if not each.is_done)
            raise Violation(f"not over {until_s:.2f} s after the start:\n{waiting}")
        for program in self.programs:
            program.check(is_over=True)
        failed = [program for program in self.programs if program.failure is not None]
        if failed:
            first = min(failed, key=lambda program: program.failed_at_s)
            if not self._may_fail(first):
                raise Violation(f"a rank gave up: {first.failure}")
            self._check_truth(first)
        if self.is_cut and not self.lasts_on_nics and not self._may_refuse():
            for program in self.programs:
                if isinstance(program.failure, AllRailsFailed):
                    raise Violation(f"a rank was killed and refuses connections: {program.failure}")
        self._check_counts()

    def _check_truth(self, first: SwarmProgram) -> None:
        """All ranks that fail name the same ranks and rails, and the same cause; a rank that was killed is named."""
        verdicts: dict[Judgement, list[int]] = {}
        away = {each.host.rank for each in self.programs if self._is_away(each, first.failed_at_s)}
        for program in self.programs:
            agreement, rank = program.host.endpoint.membership.agreement, program.host.rank
            # Ranks that computed, or were cut off, until all others had left may have heard of each other alone; and
            # one that computed until then, part of what they said.
            others_s = [each.failed_at_s for each in self.programs if each is not program and each.failure is not None]
            is_alone = agreement.heard <= away or program.host.busy_to_s > max(others_s, default=INFINITY)
            if program.failure is not None and not program.host.is_killed and not is_alone:
                verdicts.setdefault(judge(agreement.findings), []).append(rank)
        said = "; ".join(f"ranks {ranks} say {verdict}" for verdict, ranks in verdicts.items())
        if self._may_refuse():
            return
        has_left = any(program.left_at_s < INFINITY for program in self.programs)
        if self.cut_off and has_left:
            # A rank that is cut off cannot know who has left since.
            for verdict in verdicts:
                if not self.cut_off & set(itertools.chain(verdict.culprits, *verdict.pairs)):
                    raise Violation(f"ranks {self.cut_off} are cut off: {said}")
        elif len(verdicts) > 1:
            raise Violation(said)
        if (
            self.is_one_cut_off
            and len(self.programs) > 2
            and not any(each.left_at_s < INFINITY for each in self.programs)
        ):
            for verdict, ranks in verdicts.items():
                if set(verdict.culprits) != self.cut_off and set(ranks) - self.cut_off:
                    raise Violation(f"rank {self.cut_off} alone is cut off: {said}")
        killed = {program.host.rank for program in self.programs if program.host.is_killed}
        if killed and not self.lasts_on_nics and not all(killed & set(verdict.culprits) for verdict in verdicts):
            raise Violation(f"ranks {killed} were killed: {said}")

    def end_corruption(self) -> None:
        """From now on no bit flips; a NIC that had lost all of its connections to that is in use again before long."""
        if self.network.corrupt and self.scenario.stays:
            self.stays_to_s = max(self.stays_to_s, self.network.clock.now_s + _STAYS_S)
        self.network.corrupt = 0.0

    def _check_half_open(self) -> None:
        """A source hears before long, if nothing is broken, that the destination has given up a connection."""
        now_s, half_open = self.network.clock.now_s, dict[tuple[int, int, int], float]()
        for source in self.programs:
            endpoint = source.host.endpoint
            for peer, outbound in endpoint.outbounds.items():
                destination = self.programs[peer]
                if source.host.is_stopped or destination.host.is_stopped or peer in endpoint.left:
                    continue
                inbound = destination.host.endpoint.inbounds.get(endpoint.rank)
                known = (
                    [each.session for each in inbound.connections if each is not None] if inbound is not None else []
                )
                for connection in outbound.connections:
                    if connection.session not in known:
                        key = endpoint.rank, peer, connection.session
                        half_open[key] = self._half_open.get(key, now_s)
        self._half_open = half_open
        quiet_s = max((begin_s + fault.for_s for fault, begin_s in self.faults.begun), default=0.0)
        for (rank, peer, _), since_s in half_open.items():
            quiet_s = max(quiet_s, *(self.programs[each].host.busy_to_s for each in (rank, peer)))
            if now_s - max(since_s, quiet_s) > _HALF_OPEN_S:
                raise Violation(f"rank {rank}: a connection to rank {peer} is up there alone since {since_s:.4f} s")

    def _check_counts(self) -> None:
        """Nothing is damaged unless bits flip; and where nothing befalls anybody, nothing is done in vain."""
        counts = [program.host.endpoint.counts for program in self.programs]
        if not self.scenario.corrupt and any(each.damaged for each in counts):
            raise Violation("a connection counts as damaged, and no bit was flipped")
        if not self.scenario.faults and not self.scenario.corrupt:
            rails = [rail for program in self.programs for rail in program.host.endpoint.rail_counts]
            if any((each.resent, each.suppressed, each.refused, each.changes) != (0, 0, 0, 0) for each in counts):
                raise Violation(f"without a fault: {counts}")
            if any(rail.failures for rail in rails):
                raise Violation("a connection was given up without a fault")

    def _may_refuse(self) -> bool:
        return any(fault.kind == "refuse" for fault in self.scenario.faults)

    def _may_fail(self, first: SwarmProgram) -> bool:
        """True if an error is a right end: a rank was killed, cut off or refused others; or the first that failed had
        lost the last words of one that left, because something befell all rails of the pair at that time, or because
        they were damaged while it computed."""
        if self.is_cut or self._may_refuse():
            return True
        if self.scenario.is_severed and self.sleeps:
            # The one rank that could pass on bytes was stopped for longer than a missing rail is waited for.
            return True
        rank, left = first.host.rank, [each for each in self.programs if each.left_at_s <= first.failed_at_s]
        failure, counts = first.failure, first.host.endpoint.counts
        unread = {each.host.rank for each in left if first.host.busy_to_s > each.left_at_s}
        if counts.damaged and isinstance(failure, RankLost) and unread.issuperset(failure.culprits):
            # It reads only now what lies before the bye on the same connection.
            return True
        return any(
            all(
                self._befell(rank, mine, each.left_at_s) or self._befell(each.host.rank, theirs, each.left_at_s)
                for mine, theirs in first.host.endpoint.pairs(rank, each.host.rank)
            )
            for each in left
        )

    def _is_away(self, program: SwarmProgram, at_s: float) -> bool:
        """True if a rank computes, or something befell all of its NICs, at this time."""
        rank = program.host.rank
        nics = range(len(self.scenario.names[rank]))
        return program.host.busy_to_s > at_s or all(self._befell(rank, nic, at_s) for nic in nics)

    def _befell(self, rank: int, nic: int, at_s: float) -> bool:
        """True if something befell a NIC about this time that may keep a rank's last words from coming through."""
        return any(
            (fault.rank, fault.nic) == (rank, nic)
            and fault.kind not in ("busy", "loss", "slow")
            and begin_s - CLOSE_S <= at_s <= begin_s + fault.for_s + CLOSE_S
            for fault, begin_s in self.faults.begun
        )

    def note_stop(self) -> None:
        """A rank has left, failed or been killed."""
        if self._is_over():
            self.network.clock.end()

    def _is_over(self) -> bool:
        return all(program.is_done or program.host.is_stopped for program in self.programs)

    def outcome(self) -> Outcome:
        """What it took."""
        counts: Counter[str] = Counter()
        for program in self.programs:
            counts.update(asdict(program.host.endpoint.counts))
            counts["failures"] += program.failure is not None
        counts.update(collectives=len(self.epochs), epochs=max(self.epochs.values(), default=0))
        counts.update(lost_segments=self.network.n_lost, corrupted_segments=self.network.n_corrupted)
        return Outcome(self.n_events, self.network.clock.now_s, dict(counts))


@dataclass(frozen=True)
class Outcome:
    """What a run took: events, simulated seconds, and the counts of all ranks and of the network."""

    n_events: int
    simulated_s: float
    counts: dict[str, int]


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> Outcome:
    """Runs the scenario of a seed; raises Violation, with the seed, if a promise is broken. `log` is told the story."""
    # A run is short and drops little before its end: an eighth of its time would go into looking for garbage. What it
    # leaves refers to itself, and is freed at once: the next run then finds its memory in the processor's cache.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _run(make_scenario(seed), log)
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()


def _run(scenario: Scenario, log: Callable[[str], None] | None) -> Outcome:
    swarm = Swarm(scenario, log)
    if log is None:
        swarm.run()
    else:
        log(scenario.describe())
        with Recorder(lambda rank, what: swarm.note(f"rank {rank} {what}")):
            swarm.run()
    return swarm.outcome()
