"""What the kernel says of a connection (TCP_INFO), from structures that are made here and from a real socket."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import pytest

from optcc.runtime.protocol.liveness import Connection, KernelReport
from optcc.runtime.transports.tcp_sockets import limit_unsent, sample, wake_from

INFO_BYTES, OLD_INFO_BYTES = 232, 144


class FakeSocket:
    """A socket that says what TCP_INFO says of it."""

    def __init__(self, n_bytes: int = INFO_BYTES, **fields: int) -> None:
        self.n_bytes, self.fields = n_bytes, {"segment": 1000, **fields}

    def getsockopt(self, *_: object) -> bytes:
        places = {
            **{
                "timeouts": ("=B", 2),
                "probes": ("=B", 3),
                "segment": ("=I", 16),
                "unacked": ("=I", 24),
                "rtt": ("=I", 68),
            },
            **{"variation": ("=I", 72), "acked": ("=Q", 120), "unsent": ("=I", 144), "busy": ("=Q", 168)},
            **{"full": ("=Q", 176), "window": ("=I", 228), "congestion": ("=I", 80), "least": ("=I", 148)},
        }
        info = bytearray(INFO_BYTES)
        for name, value in self.fields.items():
            form, at = places[name]
            struct.pack_into(form, info, at, value)
        return bytes(info[: self.n_bytes])


def sample_of(n_bytes: int = INFO_BYTES, **fields: int) -> KernelReport | None:
    fake: Any = FakeSocket(n_bytes, **fields)
    return sample(fake)


def test_the_counters_are_where_the_kernel_puts_them() -> None:
    fields = {"timeouts": 2, "unacked": 3, "rtt": 100_000, "variation": 25_000, "acked": 77, "unsent": 5, "window": 9}
    report = KernelReport(2, 3000, 5, 1000, 9, 77, 0.2, 0.5, 0.25, 4)
    assert sample_of(**fields, probes=4, busy=500_000, full=250_000) == report
    near = sample_of(**fields, probes=4, busy=500_000, full=250_000, congestion=10, least=1500)
    assert near == report._replace(least_round_trip_s=0.0015, congestion_bytes=10_000)
    assert sample_of(least=0xFFFFFFFF) == KernelReport(0, 0, 0, 1000, 0, 0, 0.0), "not measured"
    assert sample_of(rtt=0, variation=250_000) == KernelReport(0, 0, 0, 1000, 0, 0, 0.0), "a guess, not a measurement"
    assert sample_of(unacked=3, segment=0) == KernelReport(0, 3, 0, 0, 0, 0, 0.0), "in flight all the same"


@pytest.mark.parametrize(
    ("unsent", "window", "is_silent"), [(5000, 0, False), (5000, 999, False), (5000, 1000, True), (10, 10, True)]
)
def test_an_old_kernel_does_not_tell_of_unsent_bytes(unsent: int, window: int, is_silent: bool) -> None:
    for n_bytes, wanted in ((INFO_BYTES, is_silent), (OLD_INFO_BYTES, False)):
        connection = Connection()
        connection.kernel = sample_of(n_bytes, unsent=unsent, window=window)
        assert any(connection.is_silent(0.1, 0.3) for _ in range(10)) == wanted
    old = sample_of(OLD_INFO_BYTES, unacked=3, acked=77, rtt=200_000)
    assert old == KernelReport(0, 3000, 0, 1000, 0, 77, 0.2)
    assert sample_of(OLD_INFO_BYTES - 20) is None


def test_a_socket_without_counters_has_no_sample() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert sample(left) is None
        # Nor has it limits, and nobody need know.
        limit_unsent(left, little=True)
    wake_from(left, 100)


def test_the_kernel_of_this_machine_acknowledges_what_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            near.sendall(bytes(1000))
            assert len(far.recv(1000, socket.MSG_WAITALL)) == 1000
            deadline_s = time.monotonic() + 5.0
            while (report := sample(near)) is None or report.in_flight_bytes:
                assert time.monotonic() < deadline_s
            assert report.segment_bytes > 0
            assert (report.timeouts, report.in_flight_bytes, report.unsent_bytes) == (0, 0, 0)
            assert report.acked_bytes in (1000, 1001), "the connection's own byte may be counted"
            limit_unsent(near, little=True)
            # linux/tcp.h: TCP_NOTSENT_LOWAT
            assert near.getsockopt(socket.IPPROTO_TCP, 25) == 1 << 17
            wake_from(far, 77)
            assert far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 77
