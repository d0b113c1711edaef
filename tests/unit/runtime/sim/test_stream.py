"""Simulated connections end as Linux ends them: whoever still sends to a socket that is gone finds a reset."""

from __future__ import annotations

import random

from optcc.runtime.sim.network import End, SimulatedNetwork
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.sim.stream import RTO_S_MIN, Flow

BUFFER_BYTES = 4096


class Pair:
    """A connection between two hosts of one NIC each; `n_resets` are those that the caller's end has found."""

    def __init__(self) -> None:
        self.network = network = SimulatedNetwork(
            random.Random(0), latency_s=1e-5, segment_bytes=1024, buffer_bytes=(BUFFER_BYTES, BUFFER_BYTES)
        )
        self.nics = [SimulatedNic(rank, 0, 1e8, 1e8) for rank in range(2)]
        callers: list[End] = []
        listeners: list[End] = []
        network.accept[1] = lambda _, end: listeners.append(end)
        network.connect(self.nics[0], self.nics[1], "0-1", callers.append, lambda: None)
        self.run(0.01)
        (self.caller,), (self.listener,) = callers, listeners
        self.n_resets = self.n_fins = 0
        self.caller.watch(lambda: None, lambda: None, self._count)

    def _count(self) -> None:
        self.n_resets += 1

    def count_fins(self) -> None:
        """Counts in `n_fins` how often the end of a stream is sent from now on."""
        carry = self.network.carry

        def count(flow: Flow, start: int, data: bytes, *, is_fin: bool = False) -> None:
            self.n_fins += is_fin
            carry(flow, start, data, is_fin=is_fin)

        self.network.carry = count  # type: ignore[method-assign]

    def run(self, seconds: float) -> None:
        self.network.clock.run(self.network.clock.now_s + seconds)

    def cut(self, *, out: bool, in_: bool) -> None:
        """Lets pass what the listener's NIC sends, or receives, or neither."""
        self.network.set_open(self.nics[1], out=out, in_=in_)


def test_a_probe_of_a_closed_window_finds_that_the_process_was_killed() -> None:
    # As measured on Linux 6: nothing is on its way, the reset of the kill was lost, and the next probe is reset.
    pair = Pair()
    assert pair.caller.outgoing.write([bytes(BUFFER_BYTES)]) == BUFFER_BYTES
    pair.run(0.01)
    assert pair.caller.outgoing.write([bytes(100)]) == 100
    pair.run(0.01)
    report = pair.caller.outgoing.report()
    assert (report.in_flight_bytes, report.unsent_bytes, report.window_bytes) == (0, 100, 0)
    pair.cut(out=False, in_=False)
    pair.listener.abandon()
    pair.run(0.1)
    pair.cut(out=True, in_=True)
    assert pair.n_resets == 0
    pair.run(1.0)
    assert pair.n_resets == 1


def test_a_probe_of_a_process_that_computes_is_acknowledged() -> None:
    pair = Pair()
    pair.caller.outgoing.write([bytes(BUFFER_BYTES)])
    pair.run(0.01)
    pair.caller.outgoing.write([bytes(100)])
    pair.run(2.0)
    report = pair.caller.outgoing.report()
    assert (pair.n_resets, report.probes, report.unsent_bytes) == (0, 0, 100)


def test_data_to_a_closed_socket_is_sent_again_until_a_reset_gets_through() -> None:
    pair = Pair()
    pair.listener.close()
    pair.run(0.01)
    pair.cut(out=False, in_=True)
    pair.caller.outgoing.write([bytes(100)])
    pair.run(0.3)
    assert pair.n_resets == 0
    pair.cut(out=True, in_=True)
    pair.run(1.0)
    assert pair.n_resets == 1


def test_what_came_before_a_reset_can_be_read_and_nothing_comes_after_it() -> None:
    pair = Pair()
    pair.listener.outgoing.write([b"before"])
    pair.run(0.01)
    # What is lost now would be sent again; the socket is gone before that.
    pair.cut(out=False, in_=True)
    pair.listener.outgoing.write([b"behind"])
    pair.listener.close()
    pair.run(0.01)
    pair.cut(out=True, in_=True)
    pair.caller.outgoing.write([bytes(100)])
    pair.run(2.0)
    assert pair.n_resets == 1
    into = bytearray(100)
    assert pair.caller.incoming.take([memoryview(into)]) == 6
    assert into[:6] == b"before"


def test_the_end_of_a_stream_is_sent_once_behind_what_is_on_its_way() -> None:
    pair = Pair()
    pair.count_fins()
    assert pair.caller.outgoing.write([bytes(BUFFER_BYTES)]) == BUFFER_BYTES
    pair.caller.close()
    pair.run(2.0)
    assert pair.listener.incoming.fin_arrived
    assert pair.listener.incoming.available() == BUFFER_BYTES
    assert pair.n_fins == 1


def test_the_end_of_a_stream_that_is_lost_is_sent_again_by_the_timer_alone() -> None:
    pair = Pair()
    pair.count_fins()
    pair.cut(out=True, in_=False)
    pair.caller.outgoing.write([bytes(100)])
    pair.caller.close()
    pair.run(0.9 * RTO_S_MIN)
    assert pair.n_fins == 1
    # What is acknowledged then brings no further one.
    pair.cut(out=True, in_=True)
    pair.run(0.2 * RTO_S_MIN)
    assert pair.listener.incoming.fin_arrived
    pair.run(10.0)
    assert pair.n_fins == 2
