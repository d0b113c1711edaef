"""Suspicion: connections that may have failed are avoided before they are given up. No I/O.

An end suspects a connection when `Connection.is_silent` says so (see `liveness`), and tells the peer. While either end
suspects it, and another rail of the pair is not suspected, the connection is *avoided*: the failover table sees its
rails as down, so what is out on it goes out elsewhere as well, and nothing new goes there. An acknowledgement ends the
suspicion. If nothing is acknowledged the connection is closed (`Outbound.lose`, `Inbound.lose`). In the same way a
connection is avoided while the NIC at one of its ends is out of use (`Rates.down`): it may carry next to nothing.

A NIC that has failed takes all connections over it: when one of them is suspected or given up, idle ones of the NIC are
probed, and the limit for the others is halved for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from optcc.runtime.protocol.connection import Broken, RecvConnection, SendConnection
from optcc.runtime.protocol.frames import DOUBT_FRAME, PROBE_FRAME
from optcc.runtime.protocol.liveness import CLOSE_WATCH_S, WATCH_S, Connection
from optcc.runtime.protocol.local import Established, LocalRank

DOUBTED_HERE, DOUBTED_THERE, OUT_OF_USE = 1, 2, 4
_SUSPICION_S = 1.0
PROBE_S = 1.0
"""Idle connections to a peer that is waited for get a frame to acknowledge so often."""

C = TypeVar("C", SendConnection, RecvConnection)
L = TypeVar("L", SendConnection, RecvConnection, contravariant=True)


class Direction(Protocol[L]):
    """Whose connections are judged (`Outbound`, `Inbound`)."""

    def lose(self, connection: L, error: Broken) -> None:
        """A connection is given up."""
        ...

    def update_avoided(self) -> None:
        """Connections may have become suspect, or are so no longer."""
        ...


class Suspicion:
    """Judges the connections over each NIC of a rank."""

    def __init__(self, local: LocalRank) -> None:
        self._local = local
        self._until_s = [0.0] * len(local.nic_up)
        self._round_trip_s = [0.0] * len(local.nic_up)

    def is_silent(self, connection: Connection, elapsed_s: float, nic: int) -> bool:
        """True if a connection over `nic` is to be given up; probes the others there while it may have to be."""
        local = self._local
        was_suspect, limit_s, round_trip_s = connection.suspect, local.settings.silent_s, self._round_trip_s[nic]
        path_s = min(round_trip_s, limit_s)
        if local.now_s < self._until_s[nic]:
            limit_s /= 2
        is_silent = connection.is_silent(elapsed_s, limit_s, path_s)
        round_trip_s *= 1 - elapsed_s
        self._round_trip_s[nic] = max(round_trip_s, connection.round_trip_s) if connection.fills_path else round_trip_s
        if is_silent:
            self.suspect_nic(nic)
        elif connection.suspect and not was_suspect:
            self._probe(nic)
        return is_silent

    def judge(self, connection: C, elapsed_s: float, direction: Direction[C]) -> None:
        """Of a connection that `awaits`: gives it up if it is silent, and has it avoided if it may be."""
        if self.is_silent(connection, elapsed_s, connection.nic):
            direction.lose(connection, Broken("no answer"))
        elif connection.suspect != connection.doubts_said & 1:
            self.tell(connection)
            direction.update_avoided()
        self.watch(connection)

    def suspect_nic(self, nic: int) -> None:
        """A connection over a NIC of this rank was given up: the others there are watched closely for a while."""
        self._until_s[nic] = self._local.now_s + _SUSPICION_S
        self._probe(nic)

    def tell(self, connection: Established) -> None:
        """Tells the peer that this end suspects a connection, or no longer.

        One such frame may overtake another on a faster connection, hence the count, odd while there is suspicion.
        """
        connection.doubts_said += 1
        kind = "suspected" if connection.suspect else "trusted"
        self._local.note(kind, "", connection.peer, connection.nic)
        connection.doubt = connection.doubt & ~DOUBTED_HERE | (DOUBTED_HERE if connection.suspect else 0)
        self._local.say(connection.peer, DOUBT_FRAME, connection.doubts_said << 32 | connection.session)

    def hear(self, connection: Established, count: int) -> bool:
        """The peer's word about a connection; False if a later one has come before.

        A sender whose data is being acknowledged ignores the peer's suspicion: only acknowledgements of reports are
        late.
        """
        if count <= connection.doubts_heard:
            return False
        connection.doubts_heard = count
        is_doubted = bool(count & 1)
        if isinstance(connection, SendConnection):
            is_doubted &= not (connection.awaits and connection.answers)
        connection.doubt = connection.doubt & ~DOUBTED_THERE | (DOUBTED_THERE if is_doubted else 0)
        return True

    @staticmethod
    def take_out_of_use(connection: Established, *, is_out: bool) -> bool:
        """The NIC at one end of a connection is out of use, or is not; True if that is news."""
        before = connection.doubt
        connection.doubt = before & ~OUT_OF_USE | (OUT_OF_USE if is_out else 0)
        return connection.doubt != before

    def watch(self, connection: Connection) -> None:
        """A connection that still waits for acknowledgements is sampled again, and sooner if none comes."""
        if connection.awaits:
            self._local.watch_within(CLOSE_WATCH_S if connection.stalls else WATCH_S)

    def probe_idle(self, peer: int) -> None:
        """This rank waits for a peer: a connection on which nothing is sent would never be found silent."""
        self._probe_idle(self._local.up_to(peer))

    def _probe(self, nic: int) -> None:
        """Something may be wrong with a NIC: idle connections over it get a frame to acknowledge."""
        self._probe_idle(self._local.up_over(nic))

    def _probe_idle(self, connections: Sequence[Established]) -> None:
        for connection in connections:
            if not connection.awaits:
                connection.say(PROBE_FRAME, 0)
                self._local.wake(connection)


def avoid(connections: Sequence[C]) -> Iterator[C]:
    """Of the connections of a direction, those that become avoided, or no longer are: suspected ones are, unless all
    are.

    Those that are used again come first, so that the table is never left without a rail.
    """
    is_needed = all(connection.doubt for connection in connections)
    for connection in sorted(connections, key=lambda each: bool(each.doubt)):
        avoided = bool(connection.doubt) and not is_needed
        if avoided != connection.is_avoided:
            connection.is_avoided = avoided
            yield connection
