"""What a rank passes on between two others that share no rail (`detour`). No I/O.

A caller that proves that it belongs to the job, and whose hello says `RELAY`, sends a second hello, for another rank.
This rank opens a connection to that one, and from then on passes on bytes both ways as they come: the two ends prove
themselves to each other, number and acknowledge as on any connection, so nothing here need be right for a collective to
be. What comes is read only while at most `QUEUE_BYTES` wait to be passed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from optcc.runtime.protocol.detour import Detours
from optcc.runtime.protocol.handshake import Accepting, Dialing
from optcc.runtime.protocol.hello import Hello
from optcc.runtime.protocol.leg import QUEUE_BYTES, READ_BYTES, Leg
from optcc.runtime.protocol.liveness import CLOSE_WATCH_S
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.suspicion import Suspicion

_CONNECT_S = 0.1
"""A kernel answers within this time; the process behind it may compute."""
_BUSY_S = 1.5
"""A relay over which nothing has gone for so long does not keep a rank from leaving: whoever waits probes more often.
"""
_RELAYS_PER_RANK = 2


class Onward(Dialing):
    """The connection to the next rank, while it is opened: `opening` is the caller's hello to it. `behind` are further
    rails that lead there."""

    __slots__ = ("_hello", "behind", "leg", "since_s")

    def __init__(
        self, leg: Leg, peer: int, rails: Sequence[tuple[int, tuple[str, int]]], hello: bytes, now_s: float
    ) -> None:
        nic, address = rails[0]
        super().__init__(peer, -1, nic, address, ())
        self.leg, self.behind, self._hello, self.since_s = leg, rails[1:], hello, now_s

    @property
    def opening(self) -> bytes:
        """See `Dialing`."""
        return self._hello

    @property
    def wanted(self) -> int:
        """See `Dialing`; whatever comes is passed on."""
        return READ_BYTES


class Relays:
    """The relays of a rank: `legs` and `onwards` are its connections."""

    def __init__(self, local: LocalRank, suspicion: Suspicion, detours: Detours) -> None:
        self._local, self._suspicion, self._detours = local, suspicion, detours
        self.legs: dict[Leg, None] = {}
        self.onwards: dict[Onward, None] = {}
        self._active_s = -_BUSY_S

    def is_busy(self) -> bool:
        """True if two ranks may need this one to pass on more."""
        return bool(self.legs) and self._local.now_s < self._active_s + _BUSY_S

    # --- connections

    def open(self, accepting: Accepting, hello: Hello) -> Leg | None:
        """A caller wants this `hello` of its to be passed on; None if there is no way."""
        local = self._local
        pairs = [pair for pair in local.pairs(local.rank, hello.dst) if local.nic_up[pair[0]]]
        if not pairs or len(self.legs) >= 2 * _RELAYS_PER_RANK * len(local.book):
            return None
        # Those that are up first. What is known of NICs may be late: a NIC that is said to be down comes last.
        up = {each.nic for each in local.up_to(hello.dst)}
        pairs.sort(
            key=lambda pair: (pair[0] not in up, not self._detours.may_be_up(local.rank, pair[0], hello.dst, pair[1]))
        )
        rails = [(mine, local.address(hello.dst, theirs)) for mine, theirs in pairs]
        leg = Leg(self, accepting.nic, local.rail_counts[accepting.nic])
        leg.wire = accepting.wire
        self.legs[leg] = None
        self._active_s = local.now_s
        self._dial(leg, hello.dst, rails, accepting.onward)
        return leg

    def _dial(self, leg: Leg, peer: int, rails: Sequence[tuple[int, tuple[str, int]]], opening: bytes) -> None:
        onward = Onward(leg, peer, rails, opening, self._local.now_s)
        self.onwards[onward] = None
        self._local.to_dial.append(onward)
        self._local.look_within(_CONNECT_S)

    def answered(self, onward: Onward, data: bytes) -> Leg:
        """The next rank has said something: from now on bytes are passed on."""
        local = self._local
        del self.onwards[onward]
        leg = Leg(self, onward.nic, local.rail_counts[onward.nic])
        leg.wire, leg.other = onward.wire, onward.leg
        onward.leg.other = leg
        leg.wants_read = True
        self.legs[leg] = None
        local.counts.relays += 1
        self.pass_on(leg, data)
        self._resume(onward.leg)
        return leg

    def dial_failed(self, onward: Onward) -> None:
        """The next rank is not reached over a rail; another one is tried."""
        if onward not in self.onwards:
            return
        del self.onwards[onward]
        self._local.drop(onward)
        if onward.behind:
            self._dial(onward.leg, onward.peer, onward.behind, onward.opening)
        else:
            self.close(onward.leg)

    def close(self, leg: Leg) -> None:
        """A leg is over: so is the other one, once it has what has come."""
        if leg.is_closed:
            return
        self._drop(leg)
        other = leg.other
        for onward in [each for each in self.onwards if each.leg is leg]:
            del self.onwards[onward]
            self._local.drop(onward)
        if other is not None and not other.is_closed:
            other.is_last = True
            if not other.n_waiting_bytes:
                self._drop(other)

    def _drop(self, leg: Leg) -> None:
        self.legs.pop(leg, None)
        self._local.drop(leg)

    def lose_nic(self, nic: int) -> None:
        """A NIC of this rank is down."""
        for leg in list(self.legs):
            if leg.nic == nic:
                self.close(leg)
        for onward in list(self.onwards):
            if onward.nic == nic:
                self.dial_failed(onward)

    # --- bytes

    def pass_on(self, leg: Leg, data: bytes) -> None:
        """What has come on a leg goes to the other one."""
        self._active_s = self._local.now_s
        other = leg.other
        if other is not None and not other.is_closed and data:
            other.put(data)
            leg.wants_read = other.n_waiting_bytes < QUEUE_BYTES
            self._local.wake(other)

    def note_written(self, leg: Leg, *, was_full: bool) -> None:
        """Some of what waits at a leg was written."""
        if was_full and leg.n_waiting_bytes < QUEUE_BYTES and leg.other is not None:
            self._resume(leg.other)
        if leg.is_last and not leg.n_waiting_bytes:
            self._drop(leg)

    def _resume(self, leg: Leg) -> None:
        if not leg.is_closed:
            leg.wants_read = True
            self._local.to_resume.append(leg)

    # --- time

    def tick(self, watched_s: float) -> None:
        """Gives up what is silent."""
        local = self._local
        for leg in list(self.legs):
            if leg.awaits:
                if self._suspicion.is_silent(leg, watched_s, leg.nic):
                    self.close(leg)
                self._suspicion.watch(leg)
        for onward in list(self.onwards):
            # A caller that has gone is not noticed meanwhile: nothing is read of it.
            limit_s = local.settings.hello_s if onward.established else _CONNECT_S
            if local.now_s >= onward.since_s + limit_s:
                self.dial_failed(onward)
            if not onward.established:
                local.watch_within(CLOSE_WATCH_S)
