"""The sockets of the TCP transport: how they are opened, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import socket
import struct

from optcc.runtime.protocol.liveness import KernelReport

_INFO_BYTES = 256
# struct tcp_info (linux/tcp.h): timeouts and probes of a closed window since the last acknowledgement, segment size,
# segments not acknowledged; round trip and its variation (us); segments of the congestion window; bytes acknowledged;
# bytes that were never sent; the least round trip (us) of the last five minutes; time (us) with bytes on their way,
# and the parts of it in which the receiver's window was closed, and the send buffer too small; the receiver's window.
# The last since Linux 5.4.
_INFO = struct.Struct("=2xBB12xI4xI40xII4xI36xQ16xII16xQQQ36xI")
_INFO_OLD = struct.Struct("=2xBB12xI4xI40xII44xQ")
_NEVER_MEASURED_US = 0xFFFFFFFF
_KEEPALIVE_S = 1
_KEEPALIVE_PROBES = 3
_DISCARD_BYTES_MAX = 8 << 20
# linux/in.h: binds to an address that no interface has at the time, as is that of one that is down.
_IP_FREEBIND = 15
# linux/tcp.h; -1 leaves the limit to the system.
_TCP_NOTSENT_LOWAT, _UNSENT_BYTES, _ANY_UNSENT = 25, 1 << 17, -1


def open_socket(address: str, buffer_bytes: int) -> socket.socket:
    """A non-blocking TCP socket bound to the NIC's address; `buffer_bytes` 0 leaves its buffers to the system."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune(sock, buffer_bytes)
        # The port is chosen when it connects, so that many connections may share one.
        if hasattr(socket, "IP_BIND_ADDRESS_NO_PORT"):
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((address, 0))
    except BaseException:
        sock.close()
        raise
    return sock


def listen(address: str, backlog: int, buffer_bytes: int, *, may_be_down: bool = False) -> socket.socket:
    """A non-blocking listener on a free port of the NIC's address; it hears once the NIC is up, if it `may_be_down`."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if buffer_bytes:
            # The window scale of an accepted connection follows from this, before it is accepted.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        if may_be_down:
            sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        sock.bind((address, 0))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """No delay, sized buffers, and the kernel's own probes against a host that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def sample(sock: socket.socket) -> KernelReport | None:
    """The kernel's counters of a connection (TCP_INFO); None where it has none."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) >= _INFO.size:
        (
            timeouts,
            probes,
            segment,
            unacked,
            rtt_us,
            variation_us,
            congestion,
            acked,
            unsent,
            least_us,
            busy_us,
            full_us,
            small_us,
            window,
        ) = _INFO.unpack_from(info)
    elif len(info) >= _INFO_OLD.size:
        timeouts, probes, segment, unacked, rtt_us, variation_us, acked = _INFO_OLD.unpack_from(info)
        unsent = busy_us = full_us = small_us = window = congestion = 0
        least_us = _NEVER_MEASURED_US
    else:
        return None
    # Before the first measurement the kernel only guesses: one second, or three if it had to repeat the SYN.
    round_trip_s = (rtt_us + 4 * variation_us) / 1e6 if rtt_us else 0.0
    least_s = least_us / 1e6 if least_us != _NEVER_MEASURED_US else 0.0
    # A segment in flight without a known size is one byte, not none.
    return KernelReport(
        *(timeouts, unacked * max(1, segment), unsent, segment, window, acked, round_trip_s),
        *(busy_us / 1e6, (busy_us - full_us - small_us) / 1e6, probes, least_s, congestion * segment),
    )


def limit_unsent(sock: socket.socket, little: bool) -> None:
    """Has the kernel take little more than what is in flight, so that the rest can still go elsewhere; or all that it
    has room for.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES if little else _ANY_UNSENT)


def wake_from(sock: socket.socket, n_bytes: int) -> None:
    """Has the socket count as readable only once so many bytes have come."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, n_bytes)


def send_last(sock: socket.socket, frame: bytes) -> None:
    """Sends a frame and discards what can be read: closing with unread bytes would reset the connection, and cut the
    frame off."""
    if not frame:
        return
    sink = bytearray(1 << 18)
    try:
        sock.send(frame)
        for _ in range(_DISCARD_BYTES_MAX // len(sink)):
            if not sock.recv_into(sink):
                return
    except OSError:
        return
