"""What the drivers of the protocol share, over a driver that does nothing but what a test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optcc.errors import RankLost, RuntimeFault
from optcc.runtime.protocol.endpoint import LINGER_S, Endpoint
from optcc.runtime.protocol.failure_agreement import ERROR, FailureFinding
from optcc.runtime.protocol.frames import BYE_FRAME, FAILED, HEADER_BYTES, decode
from optcc.runtime.protocol.liveness import Connection
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.membership import FAREWELL_S
from optcc.runtime.transports.endpoint_transport import CONCLUDE_S, EndpointTransport
from tests.unit.runtime.protocol.network import SESSION, TwoRails


class Scripted(EndpointTransport):
    """A driver that writes nothing; `happens` is what comes while it waits, `waits` how long it would have."""

    def __init__(self) -> None:
        self.rails_of_test = TwoRails()
        self._endpoint = self.rails_of_test.endpoint
        self.happens: Callable[[], None] = lambda: None
        self.waits: list[float] = []
        self.byes: list[int] = []
        self.n_flushes = 0
        self._clock = self

    def now_s(self) -> float:
        """See `Clock`."""
        return 1.0

    def sleep_s(self, seconds: float) -> None:
        """See `Clock`."""

    def _write(self, connection: Established) -> None:
        raise AssertionError(f"{connection}: nothing is sent here")

    def _report(self, connection: Connection) -> None:
        raise AssertionError(f"{connection}: nothing is sent here")

    def _flush(self) -> None:
        self.n_flushes += 1

    def _progress(self, holds: Callable[[], bool] | None, timeout_s: float) -> None:
        if not (self._endpoint.events if holds is None else holds()):
            self.waits.append(timeout_s)
            self.happens()

    def _hang_up(self) -> None:
        for connection in self._endpoint.up:
            words = self._endpoint.bye(connection)
            if words:
                kind, flags, *_ = decode(words[-HEADER_BYTES:], SESSION)
                assert kind == BYE_FRAME
                self.byes.append(flags)

    def _renew(self, endpoint: Endpoint) -> None:
        raise AssertionError(f"{endpoint}: nothing begins anew here")

    def _give_back(self) -> None:
        raise AssertionError("nothing is kept here")

    def fill_a_socket(self) -> None:
        """A report is half written on one of the two connections, so that the rank may not leave."""
        connection = self.rails_of_test.connections[0]
        connection.states[0] = None
        connection.views()
        connection.written(1)


def test_a_rank_that_leaves_in_good_order_says_so_though_another_is_found_lost_meanwhile() -> None:
    """Else its peers would end in an error because of it, and theirs because of them."""
    transport = Scripted()
    transport.fill_a_socket()
    transport.happens = lambda: transport._endpoint.fail(RankLost("rank 1: rank 0 is lost: it refuses connections"))
    transport.close()
    assert transport.waits == [2 * LINGER_S] and transport.byes == [0]
    transport.close()
    assert transport.byes == [0], "once"


def test_a_rank_that_aborts_says_why_and_waits_only_for_the_others_to_know() -> None:
    transport = Scripted()
    transport.fill_a_socket()
    transport.abort("a test")
    assert transport.waits == [CONCLUDE_S, FAREWELL_S] and transport.byes == [FAILED]
    assert transport._endpoint.membership.agreement.findings == {FailureFinding.of(ERROR, 1, "a test")}
    with pytest.raises(RuntimeFault, match="rank 1: a test"):
        transport.poll(0.0)


def test_a_rank_that_may_leave_does_not_wait() -> None:
    transport = Scripted()
    transport._endpoint.left[0] = False
    transport.close()
    assert transport.waits == [] and transport.byes == [0, 0] and transport.n_flushes == 1


def test_a_rank_that_owes_nothing_waits_for_its_probes_alone() -> None:
    transport = Scripted()
    waits: list[bool] = []

    def is_answered() -> None:
        for connection in transport.rails_of_test.connections:
            waits.append(transport._endpoint.may_leave())
            connection.written(sum(map(len, connection.views())))
            connection.awaits = False
        waits.append(transport._endpoint.may_leave())

    transport.happens = is_answered
    transport.close()
    assert waits == [False, True, True], "one connection will do"
    assert transport.waits == [2 * LINGER_S] and transport.byes == [0, 0]
