"""NICs over real sockets whose addresses change while AllReduces go on. Loopback has every address of 127.0.0.0/8."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from optcc.runtime.nics import Interface
from optcc.runtime.transports import tcp
from optcc.runtime.transports.nic_watch import NicChange
from optcc.runtime.transports.tcp import TcpTransport
from optcc.runtime.transports.tcp_sockets import open_socket
from tests.unit.runtime.transports.tcp_ranks import plan_of, reduce_over, run_tcp, without_faults

NEW = "127.0.2.77"
RUNS = 3


def wait_until_back(transport: TcpTransport) -> None:
    """Until all ranks have dialled again, and see it in the same round: one that went on alone would be missed."""
    is_back = False
    while set(transport.allgather(bytes([is_back]))) != {b"\1"}:
        is_back = transport._endpoint.addresses.keys() == {(1, 1)} and len(transport._endpoint.up_over(1)) >= 2


def connected_at(transport: TcpTransport) -> set[str]:
    """This rank's addresses, as its connections over NIC 1 have them."""
    return {each.wire.sock.getsockname()[0] for each in transport._endpoint.up if each.nic == 1}


@pytest.mark.parametrize("was_down", [False, True])
def test_rails_are_joined_at_the_new_address_and_no_bit_differs(
    was_down: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel says that the address is another one, or first that it is gone. Rank 1 is dialled, and dials."""
    plan, verdict = plan_of("ring", 60_001, "float32")

    def body(rank: int, transport: TcpTransport) -> tuple[list[bytes], list[int]]:
        results = reduce_over(transport, plan, verdict, 1)
        port = transport._endpoint.book[1][1][2]
        if rank == 1:
            news = [NicChange(1, not was_down, "127.0.2.2" if was_down else NEW), NicChange(1, True, NEW)]
            transport._nic_news += news
        results += reduce_over(transport, plan, verdict, RUNS)[:1]
        wait_until_back(transport)
        before = [rail.sent_bytes for rail in transport.rails]
        # Of one run a busy processor may send most over the rail that it comes to first.
        results += reduce_over(transport, plan, verdict, RUNS)[:1]
        if rank == 1:
            assert connected_at(transport) == {NEW}
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.2.2", port)):
                pass
        moved = [rail.sent_bytes - sent for rail, sent in zip(transport.rails, before, strict=True)]
        transport.barrier()
        return results, moved

    seen = run_tcp(4, body)
    assert [results for results, _ in seen] == [[ring] * 3 for (ring,) in without_faults("ring", 60_001, "float32", 1)]
    assert all(0.5 < slow / fast < 2 for _, (fast, slow) in seen)
    assert "optcc: rank 1: r1 has address 127.0.2.77 now, not 127.0.2.2" in caplog.text


def test_a_rank_without_netlink_finds_the_new_address_when_it_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[str] = set()

    def refuse(*_: object) -> None:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))

    def open_unless_gone(address: str, buffer_bytes: int) -> socket.socket:
        if address in gone:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return open_socket(address, buffer_bytes)

    # r0 has an address beside its own, which is no reason to leave that one.
    found = [Interface("r0", "127.0.1.99", False), Interface("r1", "127.0.2.2", False), Interface("r1", NEW, False)]
    monkeypatch.setattr(tcp, "NicWatch", refuse)
    monkeypatch.setattr(tcp, "open_socket", open_unless_gone)
    monkeypatch.setattr(tcp, "interfaces", lambda: found)

    def body(rank: int, transport: TcpTransport) -> dict[tuple[int, int], tuple[str, int]]:
        assert transport._watch is None
        transport.barrier()
        if rank == 1:
            gone.add("127.0.2.2")
            for connection in transport._endpoint.up_over(1):
                connection.wire.sock.shutdown(socket.SHUT_RDWR)
        wait_until_back(transport)
        assert rank != 1 or connected_at(transport) == {NEW}
        return transport._endpoint.addresses

    first, second = run_tcp(2, body)
    assert first == second and first.keys() == {(1, 1)} and first[1, 1][0] == NEW


def test_an_address_that_is_gone_again_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, transport: TcpTransport) -> bool:
        transport.barrier()
        if rank:
            # Nobody can listen there.
            transport._nic_news += [NicChange(1, False, "127.0.2.2"), NicChange(1, True, "192.0.2.1")]
        transport.barrier()
        transport.barrier()
        return bool(transport._endpoint.addresses) or transport._endpoint.nic_up[1]

    assert run_tcp(2, body) == [True, False]
