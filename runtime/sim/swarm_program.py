"""The program of one rank in a swarm: it posts ahead, begins collectives, checks all that it is told, and leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Protocol

from optcc.errors import OptccError
from optcc.failover import NOWHERE
from optcc.plan import Channel
from optcc.runtime.protocol.endpoint import CLOSE_S, LINGER_S
from optcc.runtime.protocol.exchange import Exchange
from optcc.runtime.protocol.membership import FAREWELL_S
from optcc.runtime.protocol.suspicion import OUT_OF_USE
from optcc.runtime.sim.faults import FaultInjector
from optcc.runtime.sim.host import SimulatedHost
from optcc.runtime.sim.invariants import broken_invariants, not_looked_for
from optcc.runtime.sim.scenario import INFINITY, Scenario, SwarmChannel
from optcc.runtime.transport import EPOCH_NEWS, RECEIVED

_NEARLY_S = 4.8
"""Nothing that stands still may count on the sender's timer, which rings after 5 s."""
_BLOB = random.Random(0).randbytes(1 << 19)
_GARBAGE = b"\xee"


class SwarmState(Protocol):
    """What a program knows of the swarm that it runs in; see `optcc.runtime.sim.swarm.Swarm`."""

    scenario: Scenario
    rng: random.Random
    programs: list[SwarmProgram]
    faults: FaultInjector
    epochs: dict[int, int]
    is_cut: bool
    sleeps: bool
    lasts: bool
    stays_to_s: float

    def note(self, what: str) -> None:
        """Something for the story."""
        ...

    def note_stop(self) -> None:
        """A rank has left, failed or been killed."""
        ...

    def end_corruption(self) -> None:
        """From now on no bit flips."""
        ...


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
    number: int
    handle: int
    is_sender: bool
    posted: int = 0
    reported: int = 0
    buffers: list[bytearray] = field(default_factory=list)


class SwarmProgram:
    """A rank's program: posts ahead, checks what it is told of, and leaves."""

    def __init__(self, swarm: SwarmState, host: SimulatedHost) -> None:
        self.swarm, self.host = swarm, host
        # By handle; and by the place of the lane in the scenario.
        self.ends: dict[int, _End] = {}
        self._end_of: dict[int, _End] = {}
        self.failure: OptccError | None = None
        self.is_done = False
        # Messages that are not reported, and those of them that are posted.
        self._n_left = self._n_out = self._n_exchanges = 0
        self.left_at_s = self.done_at_s = self.failed_at_s = INFINITY
        self._exchange: Exchange | None = None
        self._phase = "begin"
        self._watched_s = self._watched_to_s = 0.0
        # By peer: until when nothing was to be sent to it that would be worth a path through other ranks.
        self._idle_s: dict[int, float] = {}
        self._checked_s = -1.0
        # Of the last tick, see `not_looked_for`.
        self._not_looked_for: set[int] = set()
        # Slots of the channels by peer and number; the last word about each connection.
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
        if not swarm.scenario.n_collectives:
            return
        epochs = self.host.endpoint.epochs
        agreement, wanted = epochs.agreement, epochs.agreement.wanted
        epochs.is_on = True
        if wanted is not None:
            if self._planned[0] != wanted.number:
                self._planned = wanted.number, now_s + self._rng.choice((0.0, 0.002, 0.05))
                self._look_again(self._planned[1])
            if now_s >= self._planned[1]:
                agreement.ready((wanted.number + self.host.rank) % 3)
                epochs.spread()
        while len(self.epochs) < swarm.scenario.n_collectives and now_s >= self._begins_s:
            epoch = agreement.begin()
            if epoch is None:
                return
            other = swarm.epochs.setdefault(len(self.epochs), epoch)
            if other != epoch:
                number = len(self.epochs)
                raise Violation(f"rank {self.host.rank}: collective {number} under epoch {epoch}, elsewhere {other}")
            if self.epochs and epoch != self.epochs[-1]:
                self.host.endpoint.stripe_for(agreement.epoch.shares)
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
        lanes = list(enumerate(self.swarm.scenario.lanes))
        for group in sorted({lane.group for _, lane in lanes}):
            of_group = [(number, lane) for number, lane in lanes if lane.group == group]
            channels = [Channel(lane.src, lane.dst, 4) for _, lane in of_group]
            handles = self.host.endpoint.open(channels, group, [sum(lane.sizes) for _, lane in of_group])
            for (number, lane), handle in zip(of_group, handles, strict=True):
                if handle >= 0:
                    self.ends[handle] = self._end_of[number] = _End(lane, number, handle, lane.src == self.host.rank)
                    self._n_left += len(lane.sizes)

    def _post(self) -> None:
        endpoint = self.host.endpoint
        for end in self.ends.values():
            ahead = end.lane.ahead_send if end.is_sender else end.lane.ahead_recv
            while end.posted < len(end.lane.sizes) and end.posted - end.reported < ahead:
                size = end.lane.sizes[end.posted]
                self._n_out += 1
                if end.is_sender:
                    buffer = bytearray(message(end.lane, end.posted))
                    end.buffers.append(buffer)
                    end.posted += 1
                    connection = endpoint.post_send(end.handle, memoryview(buffer))
                    if connection is not None:
                        self.host.write(connection)
                else:
                    buffer = bytearray(_GARBAGE) * size
                    end.buffers.append(buffer)
                    end.posted += 1
                    endpoint.post_recv(end.handle, memoryview(buffer))
                self.host.flush()

    def _take_events(self) -> bool:
        """True if there were any."""
        endpoint = self.host.endpoint
        events = endpoint.poll_events()
        for peer, inbound in endpoint.inbounds.items() if events else ():
            for channel in inbound._channels.values():
                if channel.delivered > channel.told and not inbound.owes_report:
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
                end.buffers[number][:] = _GARBAGE * len(end.buffers[number])
                other = self.swarm.programs[end.lane.dst].posted(end.number)
                if number >= other:
                    raise Violation(f"{self._name(end, number)}: sent, and only {other} slots are posted")
            elif end.buffers[number] != message(end.lane, number):
                raise Violation(f"{self._name(end, number)}: wrong bytes")
            end.reported += 1
            self._n_left -= 1
            self._n_out -= 1
            if self.swarm.rng.random() < self.swarm.scenario.pauses:
                self.host.compute(self.swarm.rng.choice((0.001, 0.02, 0.15)))
        if not self._n_out:
            for peer, inbound in endpoint.inbounds.items():
                is_owed = any(channel.delivered > channel.told for channel in inbound._channels.values())
                # What is to be written, or will be once a rail is up, is not held back.
                if is_owed and inbound.is_joined() and not endpoint.to_report.keys() & set(inbound.connections):
                    raise Violation(f"rank {self.host.rank}: waits for nothing, and owes rank {peer} a report")
        return bool(events)

    def posted(self, number: int) -> int:
        """How many messages of a lane this rank has posted."""
        end = self._end_of.get(number)
        return 0 if end is None else end.posted

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
        self._check_looked_for()

    def _is_running(self) -> bool:
        """True if the host is not stopped and its endpoint has not failed: only then do invariants hold."""
        return not self.host.is_stopped and self.host.endpoint.failure is None

    def check_invariants(self) -> None:
        """What holds between two events."""
        if self._is_running():
            for what in broken_invariants(self.host.endpoint):
                raise Violation(f"rank {self.host.rank}: {what}")
            self._check_overtaken()
            self._check_proposals()

    def _check_looked_for(self) -> None:
        """Who is waited for is dialled before long; who has just begun to be, by the next tick."""
        if not self._is_running():
            return
        before, self._not_looked_for = self._not_looked_for, not_looked_for(self.host.endpoint)
        for peer in before & self._not_looked_for:
            text = "it is waited for, and nobody finds out whether a rail reaches it"
            raise Violation(f"rank {self.host.rank}: from rank {peer}: {text}")

    def _check_overtaken(self) -> None:
        """What is known only grows: words that were overtaken on another connection change nothing."""
        endpoint = self.host.endpoint
        for connection in endpoint.up:
            self._check_grows(connection, connection.doubts_heard)
        for peer, outbound in endpoint.outbounds.items():
            for k, channel in outbound._channels.items():
                self._check_grows((peer, k), channel.slots)

    def _check_grows(self, key: object, count: int) -> None:
        before = self._known.get(key, 0)
        if count < before:
            what = f"slots of channel {key}" if isinstance(key, tuple) else "words about a connection"
            raise Violation(f"rank {self.host.rank}: {what}: {before} were known, and now {count}")
        if count > before:
            self._known[key] = count

    def _check_proposals(self) -> None:
        """A proposal stays on the rail that carries it until a connection changes or the sender's timer fires."""
        before, self._proposals = self._proposals, {}
        for peer, outbound in self.host.endpoint.outbounds.items():
            for k, channel in outbound._channels.items():
                sender = channel.sender
                if sender.changing and sender.asked != NOWHERE:
                    up = tuple(
                        (each.session, each.doubts_said, each.doubts_heard, each.doubt & OUT_OF_USE)
                        for each in outbound.connections
                    )
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
        if self._checked_s < self.host.turned_s or is_over:
            # Nothing has changed at an endpoint that has not looked.
            self._checked_s = self.host.turned_s
            self.check_invariants()
        for peer, outbound in endpoint.outbounds.items():
            # A change of plan is not worth a path through other ranks: it waits for a message.
            waits = outbound.has_work() or outbound.is_direct or outbound.is_detoured
            if not waits:
                self._idle_s[peer] = self.host.network.clock.now_s
            idle_s = self._idle_s.get(peer, 0.0)
            for k, out in outbound._channels.items():
                if waits and (out.sender.out or out.sender.changing) and self._waits_long(max(out.since_s, idle_s)):
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
