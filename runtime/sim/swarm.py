"""Swarm testing of the protocol: a seed makes hosts, messages and faults, and every promise is checked.

A run has two phases. While faults come and go, *safety*: what a rank is told was received is right to the byte, each
message once and in order; a buffer that was reported is never touched again; memory is bounded. Then the faults end,
and *liveness*: everything is delivered and reported within `GRACE_S`, without the help of the sender's 5 s timer; or,
if a rank was killed or some pair has no rail left for good, every rank that does not finish ends in an error, and all
of them name the same ranks or rails and the same cause.

    python -m optcc.experiments.swarm --seed 7 --trace
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from optcc.errors import AllRailsFailed, OptccError
from optcc.failover import NOWHERE
from optcc.plan import Channel
from optcc.runtime.protocol.endpoint import CLOSE_S, LINGER_S
from optcc.runtime.protocol.exchange import Exchange
from optcc.runtime.protocol.failure_agreement import Judgement, judge
from optcc.runtime.protocol.frames import crc32
from optcc.runtime.protocol.membership import FAREWELL_S
from optcc.runtime.sim.faults import FaultInjector
from optcc.runtime.sim.host import SimulatedHost
from optcc.runtime.sim.invariants import broken_invariants
from optcc.runtime.sim.network import SimulatedNetwork
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.sim.recorder import Recorder
from optcc.runtime.sim.scenario import INFINITY, STALL_S, Scenario, SwarmChannel, make_scenario
from optcc.runtime.transport import EPOCH_NEWS, RECEIVED

GRACE_S = 4.0
_NEARLY_S, _CHECK_S = 4.8, 0.1
"""Nothing that stands still may count on the sender's timer, which rings after 5 s."""
_HALF_OPEN_S = 0.6
_CORRUPT_S = 2.0
"""Bits flip for so long at most. A chunk of 140 segments, 4 % of which are damaged, comes whole once in 300 times."""
_EVENTS_MAX = 500_000
HOLES = ("down", "hole", "hole-out", "hole-in")
_BLOB = random.Random(0).randbytes(1 << 19)
_GARBAGE = 0xEE


class Violation(AssertionError):
    """A promise was broken; the message says which."""


def message(lane: SwarmChannel, number: int) -> bytes:
    """The bytes of a message: no two messages of a run are alike beyond a few bytes."""
    size = lane.sizes[number]
    at = (lane.src * 7919 + lane.dst * 104_729 + lane.group * 1_299_709 + number * 15_485_863) % (len(_BLOB) - size)
    return _BLOB[at : at + size]


@dataclass
class _End:
    """One end of a lane, at one rank."""

    lane: SwarmChannel
    handle: int
    is_sender: bool
    posted: int = 0
    reported: int = 0
    buffers: list[bytearray] = field(default_factory=list)


class _Program:
    """A rank's program: posts ahead, checks what it is told of, and leaves."""

    def __init__(self, swarm: Swarm, host: SimulatedHost) -> None:
        self.swarm, self.host = swarm, host
        self.ends: dict[int, _End] = {}
        self.failure: OptccError | None = None
        self.is_done = False
        self._n_left = self._n_exchanges = 0
        self.left_at_s = self.done_at_s = self.failed_at_s = INFINITY
        self._exchange: Exchange | None = None
        self._phase = "begin"
        self._watched_s = self._watched_to_s = 0.0
        # Slots of the channels to a peer; the last word about a connection.
        self._known: dict[object, int] = {}
        # The rail of each proposal that is out, by the state that would have to change to move it.
        self._proposals: dict[object, int] = {}
        # The epochs of the collectives that it has begun, and when it begins the next; when it has the plans of which.
        self.epochs: list[int] = []
        self._rng = random.Random(swarm.scenario.seed * 64 + host.rank)
        self._begins_s, self._planned = 0.0, (0, INFINITY)
        host.wakes, host.ticked, host.stopped = self.wake, self._ticked, swarm.note_stop

    def wake(self) -> None:
        """Takes what has happened, and goes on."""
        host, endpoint = self.host, self.host.endpoint
        if self.is_done:
            return
        if self.failure is not None:
            self._say_farewell()
            return
        if endpoint.failure is not None and all(handle == EPOCH_NEWS for _, handle in endpoint.events):
            self.fail(endpoint.failure)
            return
        if self._phase == "begin":
            self._exchange = self._begin_exchange()
            self._phase = "barrier"
        if self._phase == "barrier" and self._steps():
            self._open()
            self._phase = "run"
            self._post()
        if self._phase in ("run", "last barrier", "stay"):
            self._begin_collectives()
        if self._phase == "run":
            if self._take_events():
                self._post()
            if not self._n_left and len(self.epochs) == self.swarm.scenario.n_collectives:
                self._end_run()
        if self._phase == "last barrier" and self._steps():
            self._stay()
        if self._phase == "stay" and host.now_s >= self.swarm.stays_to_s:
            self._phase = "leave"
            host.endpoint.begin_leaving()
            self._watched_to_s = host.now_s
            self.swarm.faults.trigger_leaving(host.rank)
        if self._phase == "leave":
            self._leave()
        host.flush()

    def _begin_collectives(self) -> None:
        """Begins collectives, one some time after another; has plans for an epoch some time after it is proposed."""
        swarm, now_s = self.swarm, self.host.now_s
        epochs = self.host.endpoint.epochs
        agreement, wanted = epochs.agreement, epochs.agreement.wanted
        epochs.is_on = swarm.scenario.n_collectives > 0
        if wanted is not None:
            if self._planned[0] != wanted.number:
                self._planned = wanted.number, now_s + self._rng.choice((0.0, 0.002, 0.05))
                self._look_again(self._planned[1])
            if now_s >= self._planned[1]:
                agreement.ready()
                epochs.spread()
        while len(self.epochs) < swarm.scenario.n_collectives and now_s >= self._begins_s:
            epoch = agreement.begin()
            if epoch is None:
                return
            other = swarm.epochs.setdefault(len(self.epochs), epoch)
            if other != epoch:
                number = len(self.epochs)
                raise Violation(f"rank {self.host.rank}: collective {number} under epoch {epoch}, elsewhere {other}")
            self.epochs.append(epoch)
            self._begins_s = now_s + self._rng.choice((0.0, 0.001, 0.01, 0.05))
            self._look_again(self._begins_s)

    def _look_again(self, at_s: float) -> None:
        clock = self.host.network.clock
        clock.after(max(0.0, at_s - clock.now_s), lambda: self.host.look_at(clock.now_s))

    def _steps(self) -> bool:
        assert self._exchange is not None
        if not self._exchange.step():
            return False
        if self._exchange.parts != [self._payload(rank) for rank in range(len(self.swarm.programs))]:
            raise Violation(f"rank {self.host.rank}: wrong parts of an allgather")
        return True

    def _begin_exchange(self) -> Exchange:
        self._n_exchanges += 1
        return Exchange(self.host.endpoint, self._payload(self.host.rank))

    def _payload(self, rank: int) -> bytes:
        at = (rank * 7919 + self._n_exchanges * 104_729) % 400_000
        return _BLOB[at : at + self.swarm.scenario.payload_bytes]

    def _stay(self) -> None:
        """All is done; it leaves at once, or once nothing excuses a failure."""
        self._phase, self.done_at_s = "stay", self.host.now_s
        self.swarm.note(f"rank {self.host.rank} is done")
        # A bye that is damaged on the only rail cannot be told from a rank that is lost.
        self.swarm.end_corruption()
        self.host.network.clock.after(
            max(0.0, self.swarm.stays_to_s - self.host.now_s), lambda: self.host.look_at(self.host.now_s)
        )

    def _end_run(self) -> None:
        if self.swarm.scenario.ends_with_barrier:
            self._exchange = self._begin_exchange()
            self._phase = "last barrier"
        else:
            self._stay()

    def _leave(self) -> None:
        """As `EndpointTransport.close`."""
        endpoint, now_s = self.host.endpoint, self.host.now_s
        self._watched_s += min(now_s - self._watched_to_s, 0.15)
        self._watched_to_s = now_s
        if self.swarm.scenario.stays and not self.swarm.lasts:
            for connection in endpoint.up:
                if connection.doubt or connection.is_avoided:
                    raise Violation(f"rank {self.host.rank}: a connection of {connection.peer} is still suspected")
        endpoint.reports.release_all()
        self.host.flush()
        if not endpoint.may_leave():
            if (
                endpoint.leaving_s > CLOSE_S
                and self.swarm.scenario.stays
                and not (self.swarm.lasts or self.swarm.sleeps)
            ):
                raise Violation(f"rank {self.host.rank}: nothing is broken, and it cannot leave")
            return
        if endpoint.owes_nothing():
            self._check_leave()
        else:
            self._check_giving_up()
        self.is_done, self.left_at_s = True, self.host.now_s
        self.swarm.note(f"rank {self.host.rank} leaves")
        self.host.leave()

    def _check_leave(self) -> None:
        """What this rank has sent was taken by those who are still there, and they can be told that it leaves."""
        endpoint, rank = self.host.endpoint, self.host.rank
        for other in self.swarm.programs:
            peer, theirs = other.host.rank, other.host.endpoint.inbounds.get(rank)
            outbound, inbound = endpoint.outbounds.get(peer), endpoint.inbounds.get(peer)
            if other.host.is_stopped or peer in endpoint.left or other.host.endpoint.failure is not None:
                continue
            for k, channel in outbound._channels.items() if outbound is not None else ():
                taken = theirs._channels[k].receiver.delivered if theirs is not None and k in theirs._channels else 0
                if taken < channel.posted:
                    raise Violation(f"rank {rank} leaves, and rank {peer} has {taken} of {channel.posted} chunks")
            was_joined = any(each is not None and each.was_joined for each in (outbound, inbound))
            if was_joined and not any(each.peer == peer for each in endpoint.up):
                raise Violation(f"rank {rank} leaves, and has no connection to tell rank {peer}")

    def _check_giving_up(self) -> None:
        """It has waited for the peers to which it owes something."""
        endpoint, rank = self.host.endpoint, self.host.rank
        for peer in filter(endpoint._owes, endpoint._peers()):
            if self._watched_s < 0.9 * (LINGER_S if endpoint._is_reached(peer) else CLOSE_S):
                raise Violation(f"rank {rank}: gives rank {peer} up after {self._watched_s:.3f} s that it has watched")

    def _open(self) -> None:
        lanes = self.swarm.scenario.lanes
        for group in sorted({lane.group for lane in lanes}):
            of_group = [lane for lane in lanes if lane.group == group]
            channels = [Channel(lane.src, lane.dst, 4) for lane in of_group]
            handles = self.host.endpoint.open(channels, group, [sum(lane.sizes) for lane in of_group])
            for lane, handle in zip(of_group, handles, strict=True):
                if handle >= 0:
                    self.ends[handle] = _End(lane, handle, lane.src == self.host.rank)
                    self._n_left += len(lane.sizes)

    def _post(self) -> None:
        endpoint = self.host.endpoint
        for end in self.ends.values():
            ahead = end.lane.ahead_send if end.is_sender else end.lane.ahead_recv
            while end.posted < len(end.lane.sizes) and end.posted - end.reported < ahead:
                size = end.lane.sizes[end.posted]
                if end.is_sender:
                    buffer = bytearray(message(end.lane, end.posted))
                    end.buffers.append(buffer)
                    end.posted += 1
                    connection = endpoint.post_send(end.handle, memoryview(buffer))
                    if connection is not None:
                        self.host.write(connection)
                else:
                    buffer = bytearray([_GARBAGE]) * size
                    end.buffers.append(buffer)
                    end.posted += 1
                    endpoint.post_recv(end.handle, memoryview(buffer))
                self.host.flush()

    def _take_events(self) -> bool:
        """True if there were any."""
        events = self.host.endpoint.poll_events()
        for peer, inbound in self.host.endpoint.inbounds.items() if events else ():
            for channel in inbound._channels.values():
                if channel.receiver.delivered > channel.told and not inbound.owes_report:
                    raise Violation(f"rank {self.host.rank}: what it owes rank {peer} is forgotten")
        for kind, handle in events:
            if handle == EPOCH_NEWS:
                continue
            end = self.ends[handle]
            number = end.reported
            if number >= end.posted:
                raise Violation(f"{self._name(end, number)}: reported before it was posted, or twice")
            if (kind == RECEIVED) == end.is_sender:
                raise Violation(f"{self._name(end, number)}: the event of the other end")
            if end.is_sender:
                # The program may use its buffer again.
                end.buffers[number][:] = bytes([_GARBAGE]) * len(end.buffers[number])
                other = self.swarm.programs[end.lane.dst].posted(end.lane)
                if number >= other:
                    raise Violation(f"{self._name(end, number)}: sent, and only {other} slots are posted")
            elif end.buffers[number] != message(end.lane, number):
                raise Violation(f"{self._name(end, number)}: wrong bytes")
            end.reported += 1
            self._n_left -= 1
            if self.swarm.rng.random() < self.swarm.scenario.pauses:
                self.host.compute(self.swarm.rng.choice((0.001, 0.02, 0.15)))
        endpoint = self.host.endpoint
        if all(end.posted == end.reported for end in self.ends.values()):
            for peer, inbound in endpoint.inbounds.items():
                is_owed = any(channel.receiver.delivered > channel.told for channel in inbound._channels.values())
                # What is to be written, or will be once a rail is up, is not held back.
                if is_owed and inbound.is_joined() and not endpoint.to_report.keys() & set(inbound.connections):
                    raise Violation(f"rank {self.host.rank}: waits for nothing, and owes rank {peer} a report")
        return bool(events)

    def posted(self, lane: SwarmChannel) -> int:
        """How many messages of a channel this rank has posted."""
        return sum(end.posted for end in self.ends.values() if end.lane is lane)

    def _name(self, end: _End, number: int) -> str:
        return f"rank {self.host.rank}: message {number} of {end.lane.src}->{end.lane.dst} group {end.lane.group}"

    def fail(self, failure: OptccError) -> None:
        """The program ends in an error, and aborts."""
        self.failure, self.failed_at_s = failure, self.host.now_s
        self.swarm.note(f"{type(failure).__name__}: {failure}")
        self.host.network.clock.after(FAREWELL_S, lambda: self.host.look_at(self.host.now_s))
        self._say_farewell()

    def _say_farewell(self) -> None:
        """As `EndpointTransport.close` after a failure."""
        endpoint = self.host.endpoint
        if endpoint.membership.is_known() or self.host.now_s >= self.failed_at_s + FAREWELL_S:
            self.is_done = True
            self.host.leave()

    def _ticked(self) -> None:
        """After a tick, with which a rank finds failures."""
        endpoint = self.host.endpoint
        if any(endpoint.left.values()) and not (endpoint.membership.agreement.findings or endpoint.is_leaving):
            raise Violation(f"rank {self.host.rank}: a rank has left after a failure, and this one goes on")
        self.check_invariants()

    def check_invariants(self) -> None:
        """What holds between two events."""
        endpoint = self.host.endpoint
        if not self.host.is_stopped and endpoint.failure is None:
            for what in broken_invariants(endpoint):
                raise Violation(f"rank {self.host.rank}: {what}")
            self._check_overtaken()
            self._check_proposals()

    def _check_overtaken(self) -> None:
        """What is known only grows: words that were overtaken on another connection change nothing."""
        endpoint = self.host.endpoint
        slots = (
            ((peer, k), f"slots of channel {k} to rank {peer}", channel.slots)
            for peer, outbound in endpoint.outbounds.items()
            for k, channel in outbound._channels.items()
        )
        words = (
            ((connection, 0), f"words about a connection of rank {connection.peer}", connection.doubts_heard)
            for connection in endpoint.up
        )
        for key, what, count in itertools.chain(slots, words):
            if count < self._known.get(key, 0):
                raise Violation(f"rank {self.host.rank}: {what}: {self._known[key]} were known, and now {count}")
            self._known[key] = count

    def _check_proposals(self) -> None:
        """A proposal stays on the rail that carries it until a connection changes or the sender's timer fires."""
        before, self._proposals = self._proposals, {}
        for peer, outbound in self.host.endpoint.outbounds.items():
            for k, channel in outbound._channels.items():
                sender = channel.sender
                if sender.changing and sender.asked != NOWHERE:
                    up = tuple((each.session, each.doubts_said, each.doubts_heard) for each in outbound.connections)
                    key = peer, k, sender.epoch, sender.asked, channel.since_s, up
                    rail = self._proposals[key] = channel.rails[sender.asked]
                    if before.get(key, rail) != rail:
                        moved = f"moved from rail {before[key]} to {rail}"
                        raise Violation(f"rank {self.host.rank}: channel {k} to {peer}: a proposal is {moved}")

    def check(self, *, is_over: bool) -> None:
        """The invariants hold, and nobody waits for long.

        Once all `is_over`, what was received is still there, and nothing that was posted or kept is left.
        """
        endpoint, rank = self.host.endpoint, self.host.rank
        self.check_invariants()
        for peer, outbound in endpoint.outbounds.items():
            for k, out in outbound._channels.items():
                if (out.sender.out or out.sender.changing) and self._waits_long(out.since_s):
                    raise Violation(f"rank {rank}: channel {k} to {peer} has waited since {out.since_s:.4f} s")
        if not is_over:
            return
        for end in self.ends.values():
            for number in range(end.reported):
                if not end.is_sender and end.buffers[number] != message(end.lane, number):
                    raise Violation(f"{self._name(end, number)}: changed after it was reported")
        if self.failure is None and not self.host.is_killed:
            for inbound in endpoint.inbounds.values():
                for channel in inbound._channels.values():
                    if channel.slots or channel.early or channel.arriving:
                        kept = f"{len(channel.early)} early chunks, {list(channel.arriving)}"
                        what = f"{len(channel.slots)} slots, {kept}"
                        raise Violation(f"rank {self.host.rank}: {what} left on channel {channel.k} of {inbound.peer}")

    def _waits_long(self, since_s: float) -> bool:
        """True if an acknowledgement is waited for nearly until the sender's timer rings, which must not be needed."""
        excused = self.swarm.is_cut or self.swarm.sleeps or self.is_done
        return not excused and self.host.now_s - since_s > _NEARLY_S

    def pending(self) -> str:
        """What it waits for."""
        waits = [
            f"{end.lane.src}->{end.lane.dst} group {end.lane.group}: {end.reported} of {len(end.lane.sizes)} "
            f"{'sent' if end.is_sender else 'received'}"
            for end in self.ends.values()
            if end.reported < len(end.lane.sizes)
        ]
        begun, n_collectives = len(self.epochs), self.swarm.scenario.n_collectives
        if begun < n_collectives:
            waits.append(f"{begun} of {n_collectives} collectives begun")
        return f"rank {self.host.rank} in {self._phase}: {'; '.join(waits) or 'no message'}"


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
        self.is_cut = bool(self.cut_off) or any(fault.kind == "crash" for fault in faults)
        self.faults_end_s = max(
            [0.0, *(fault.begins_by_s + (fault.for_s if fault.for_s < INFINITY else 0.0) for fault in faults)]
        )
        self.sleeps = any(fault.kind == "busy" and fault.for_s > GRACE_S for fault in faults)
        self.lasts_on_nics = bool(lasting)
        self.lasts = any(fault.for_s == INFINITY for fault in faults)
        self.stays_to_s = self.faults_end_s + 1.5 * CLOSE_S if scenario.stays and faults else 0.0
        self.n_events = 0
        # By number, the epoch of each collective.
        self.epochs: dict[int, int] = {}
        # By rank, peer and session: since when only the source holds a connection.
        self._half_open: dict[tuple[int, int, int], float] = {}
        self.programs = [
            _Program(
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

    def _check_truth(self, first: _Program) -> None:
        """All ranks that fail name the same ranks and rails, and the same cause; a rank that was killed is named."""
        verdicts: dict[Judgement, list[int]] = {}
        for program in self.programs:
            agreement, rank = program.host.endpoint.membership.agreement, program.host.rank
            # A rank that computed until all others had left may have heard of nobody.
            is_alone = agreement.heard == {rank} and program.host.busy_to_s > first.failed_at_s
            if program.failure is not None and not program.host.is_killed and not is_alone:
                verdicts.setdefault(judge(agreement.findings), []).append(rank)
        said = "; ".join(f"ranks {ranks} say {verdict}" for verdict, ranks in verdicts.items())
        if self._may_refuse():
            return
        if self.cut_off and any(program.left_at_s < INFINITY for program in self.programs):
            # A rank that is cut off cannot know who has left since.
            for verdict in verdicts:
                if not self.cut_off & set(itertools.chain(verdict.culprits, *verdict.pairs)):
                    raise Violation(f"ranks {self.cut_off} are cut off: {said}")
        elif len(verdicts) > 1:
            raise Violation(said)
        killed = {program.host.rank for program in self.programs if program.host.is_killed}
        if killed and not self.lasts_on_nics and not all(killed & set(verdict.culprits) for verdict in verdicts):
            raise Violation(f"ranks {killed} were killed: {said}")

    def end_corruption(self) -> None:
        """From now on no bit flips."""
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

    def _may_fail(self, first: _Program) -> bool:
        """True if an error is a right end: a rank was killed, cut off or refused others; or the first that failed had
        lost the last words of one that left, because something befell all rails of the pair at that time."""
        if self.is_cut or self._may_refuse():
            return True
        rank, left = first.host.rank, [each for each in self.programs if each.left_at_s <= first.failed_at_s]
        return any(
            all(
                self._befell(rank, mine, each.left_at_s) or self._befell(each.host.rank, theirs, each.left_at_s)
                for mine, theirs in first.host.endpoint.pairs(rank, each.host.rank)
            )
            for each in left
        )

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
    scenario = make_scenario(seed)
    swarm = Swarm(scenario, log)
    try:
        if log is None:
            swarm.run()
        else:
            log(scenario.describe())
            with Recorder(lambda rank, what: swarm.note(f"rank {rank} {what}")):
                swarm.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return swarm.outcome()
