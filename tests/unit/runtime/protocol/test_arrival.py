"""Over which rail bytes arrive first, from samples of connections; and what both ends of a direction make of it."""

from __future__ import annotations

import numpy as np
import pytest

from optcc.runtime.protocol.arrival import UNEVEN_S, Arrivals, is_uneven
from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.liveness import Connection, KernelReport
from optcc.runtime.protocol.settings import RailCount
from optcc.runtime.transport import RECEIVED
from tests.unit.runtime.protocol.network import Network

NEAR_S, FAR_S = 0.002, 0.1
RATE = 100e6
LAG_BYTES = int(RATE * (FAR_S - NEAR_S) / 2)
"""What the near rail sends in the time by which the far one is later."""


def sample(
    round_trip_s: float, *, in_flight: int = 0, unsent: int = 0, acked: int = 0, window: int = 0
) -> KernelReport:
    return KernelReport(
        *(0, in_flight, unsent, 1000, window, acked, round_trip_s),
        least_round_trip_s=round_trip_s,
        congestion_bytes=0,
    )


def connection_of(report: KernelReport) -> SendConnection:
    connection = SendConnection(1, 0, 7, RailCount("eth0"), None)
    connection.kernel = report
    return connection


def arrivals_of(
    *reports: KernelReport, now_s: float = 0.0, rates: tuple[float, float] = (RATE, RATE), is_known: bool = True
) -> Arrivals:
    arrivals = Arrivals(2)
    arrivals.take([connection_of(report) for report in reports], rates, now_s, is_known=is_known)
    return arrivals


def test_latencies_that_are_about_equal_or_unknown_are_even() -> None:
    def paths(*round_trips_s: float) -> list[Connection]:
        return [connection_of(sample(each)) for each in round_trips_s]

    assert not is_uneven(paths()) and not is_uneven([Connection(), *paths(FAR_S)])
    assert not is_uneven(paths(NEAR_S, NEAR_S + 2 * UNEVEN_S)) and not is_uneven(paths(0.0, FAR_S))
    assert is_uneven(paths(NEAR_S, NEAR_S + 2.1 * UNEVEN_S)) and is_uneven(paths(0.0, FAR_S, NEAR_S))


@pytest.mark.parametrize("n_bytes", [1, LAG_BYTES // 2, 3 * LAG_BYTES])
def test_a_chunk_goes_where_it_arrives_first(n_bytes: int) -> None:
    """Over the near rail until what waits there takes as long as the far one is later; from then on in turns."""
    arrivals, now_s = arrivals_of(sample(NEAR_S), sample(FAR_S)), 5.0
    waiting = [0, 0]
    for _ in range(12):
        arrives = [each / RATE + latency / 2 for each, latency in zip(waiting, (NEAR_S, FAR_S), strict=True)]
        rail = arrivals.choose([0, 1], n_bytes, now_s)
        assert arrives[rail] == min(arrives) and arrivals.choose([1], n_bytes, now_s) == 1
        arrivals.add(rail, n_bytes, now_s)
        waiting[rail] += n_bytes
    assert (waiting[1] == 0) == (12 * n_bytes <= LAG_BYTES)


def test_what_was_sent_drains_and_what_is_taken_back_counts_no_more() -> None:
    arrivals = arrivals_of(sample(NEAR_S), sample(FAR_S))
    arrivals.add(0, 2 * LAG_BYTES, 0.0)
    assert arrivals.choose([0, 1], 1000, 0.0) == 1 and arrivals.choose([0, 1], 1000, 1.1 * LAG_BYTES / RATE) == 0
    arrivals.add(0, -2 * LAG_BYTES, 0.0)
    assert arrivals.choose([0, 1], 1000, 0.0) == 0


def test_a_sample_says_what_waits_in_the_kernel() -> None:
    """Unsent bytes, and those on their way beyond what fills the path; they count in place of what was assumed."""
    full = int(RATE * NEAR_S)
    assert arrivals_of(sample(NEAR_S, in_flight=full), sample(FAR_S)).choose([0, 1], 1000, 0.0) == 0
    for waits in ({"in_flight": full + 2 * LAG_BYTES}, {"in_flight": full, "unsent": 2 * LAG_BYTES}):
        arrivals = arrivals_of(sample(NEAR_S, **waits), sample(FAR_S))
        assert arrivals.choose([0, 1], 1000, 0.0) == 1
        near, far = connection_of(sample(NEAR_S)), connection_of(sample(FAR_S))
        arrivals.take([near, far], (RATE, RATE), 0.001, is_known=True)
        assert arrivals.choose([0, 1], 1000, 0.001) == 0
        # The same sample once more is no news.
        arrivals.add(0, 2 * LAG_BYTES, 0.001)
        arrivals.take([near, far], (RATE, RATE), 0.002, is_known=True)
        assert arrivals.choose([0, 1], 1000, 0.002) == 1


def test_a_small_window_costs_round_trips() -> None:
    """15 windows take three round trips more than one; a window with unsent bytes is what a round trip carries."""
    arrivals = arrivals_of(sample(NEAR_S, unsent=1, in_flight=1000), sample(0.02, window=10_000))
    # 1000 B in 2 ms against 20 ms a round trip: 50 ms for 25 kB, 30 ms for one window.
    assert arrivals.choose([0, 1], 25_000, 0.0) == 1 and arrivals.choose([0, 1], 1000, 0.0) == 0
    slow = arrivals_of(sample(FAR_S), sample(0.05, window=10_000))
    assert slow.choose([0, 1], 10_000, 0.0) == 1 and slow.choose([0, 1], 150_000, 0.0) == 0


def test_rates_that_are_proportions_are_measured_and_until_then_the_nearest_carries_all() -> None:
    arrivals = arrivals_of(sample(NEAR_S), sample(FAR_S), rates=(1, 1), is_known=False)
    arrivals.add(0, 1 << 40, 0.0)
    assert arrivals.choose([0, 1], 1 << 20, 0.0) == 0
    for at_s in (0.1, 0.2):
        near = sample(NEAR_S, in_flight=10**6, unsent=10**6, acked=int(at_s * RATE))
        arrivals.take([connection_of(near), connection_of(sample(FAR_S))], (1, 1), at_s, is_known=False)
    # 20 ms in the kernel; the far one is 49 ms later.
    assert arrivals.choose([0, 1], 1000, 0.2) == 0
    arrivals.add(0, LAG_BYTES, 0.2)
    assert arrivals.choose([0, 1], 1000, 0.2) == 1


def test_a_rail_that_carries_little_gets_little() -> None:
    arrivals = arrivals_of(sample(NEAR_S), sample(FAR_S), rates=(1.0, RATE))
    assert arrivals.choose([0, 1], 1000, 0.0) == 1


def uneven(network: Network, far: int = 0) -> None:
    """From now on one rail of every pair is later than the others."""
    for endpoint in network.endpoints:
        for connection in endpoint.up:
            round_trip_s = FAR_S if connection.rail == far else NEAR_S
            connection.wire.report = lambda s=round_trip_s: sample(s)
            connection.kernel = sample(round_trip_s)
    network.run(0.2)


@pytest.mark.parametrize("far", [0, 1])
def test_short_messages_and_reports_go_over_the_near_rail(far: int) -> None:
    """Before, both take turns; if the near one is lost, the far one carries them."""
    network = Network(2, rates=(10**8, 10**8))
    (send, _), (receive, _) = network.open((0, 1), (1, 0))
    network.barrier()
    network.until(network.all_up)
    counts = [endpoint.rail_counts for endpoint in network.endpoints]

    def exchange(n_bytes: int) -> list[list[int]]:
        before = [[rail.sent_bytes for rail in each] for each in counts]
        for value in range(8):
            view, into = np.full(n_bytes, value, np.uint8), np.full(n_bytes, 99, np.uint8)
            network.post_recv(1, receive, into)
            network.poll(1)
            network.post_send(0, send, view)
            assert network.poll(1) == [(RECEIVED, receive)] and into[0] == value
            network.poll(0)
        return [
            [rail.sent_bytes - at for rail, at in zip(each, was, strict=True)]
            for each, was in zip(counts, before, strict=True)
        ]

    assert all(min(each) > 0 for each in exchange(1000))
    uneven(network, far)
    near = 1 - far
    for n_bytes in (1000, 100_000):
        sent = exchange(n_bytes)
        assert sent[0][near] >= 8 * n_bytes and sent[1][near] > 0
        assert sent[0][far] == sent[1][far] == 0, "no byte, and no report, waits for the far rail"
    network.unreachable.add((1, near))
    network.endpoints[0].broken(network.outbound(0, 1, near), "reset")
    assert exchange(1000)[0][far] >= 8000
