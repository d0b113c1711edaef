"""Ranks of one host over TCP: they are joined inside it, share its NICs, and send over those that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from optcc.errors import InputError
from optcc.plan import Channel
from optcc.runtime.conformance import check_transport
from optcc.runtime.nics import HostNic, Interface, inside_of
from optcc.runtime.observe.status import LOST, RailReader
from optcc.runtime.transport import RECEIVED, SENT
from optcc.runtime.transports.tcp import TcpTransport
from tests.unit.rank_threads import Room, run_threads
from tests.unit.runtime.transports.tcp_ranks import plan_of, reduce_over, without_faults

T = TypeVar("T")
MIB = 1 << 20
PAIRS = [(0, 1), (0, 2), (1, 3)]


def on_two_hosts(
    function: Callable[[int, TcpTransport], T], n_ranks: int = 4, *, but: int = -1, n_rails: int = 2
) -> list[T]:
    """Ranks 0 and 1 are on a host, those from 2 on are on another; rank `but` does not say where it is."""
    room = Room(n_ranks)

    def make(rank: int) -> TcpTransport:
        host = min(1, rank // 2)
        nics = [HostNic(f"r{i}", f"127.0.{i + 1}.{host + 1}") for i in range(n_rails)]
        inside = None if rank == but else HostNic(f"inside {host}", "127.0.0.1")
        return TcpTransport(room.meet(rank), nics, inside=inside)

    return run_threads(n_ranks, make, function)


def send_along(transport: TcpTransport, pairs: list[tuple[int, int]]) -> None:
    """A MiB from each first to each second rank, checked."""
    handles = transport.open([Channel(*pair, 1) for pair in pairs], 0, [MIB] * len(pairs))
    wanted, slots = 0, {}
    for handle, (src, dst) in zip(handles, pairs, strict=True):
        if transport.rank == src:
            transport.post_send(handle, np.full(MIB, 10 * src + dst, np.uint8))
        elif transport.rank == dst:
            slots[handle] = np.zeros(MIB, np.uint8), 10 * src + dst
            transport.post_recv(handle, slots[handle][0])
        wanted += transport.rank in (src, dst)
    done: set[tuple[int, int]] = set()
    while len(done) < wanted:
        done |= {event for event in transport.poll(10.0) if event[0] in (SENT, RECEIVED)}
    assert all((slot == value).all() for slot, value in slots.values())
    transport.barrier()


def carried(transport: TcpTransport) -> list[int]:
    """Whole MiB that this rank has sent over each NIC, and inside."""
    assert transport.inside is not None
    return [count.sent_bytes // MIB for count in (*transport.rails, transport.inside)]


@pytest.mark.parametrize("n_ranks", [3, 4])
def test_keeps_the_promises_of_a_transport(n_ranks: int) -> None:
    names = on_two_hosts(lambda _, transport: check_transport(lambda: transport), n_ranks)
    assert len(names[0]) == 14


def test_reduces_to_the_bits_of_loopback() -> None:
    plan, verdict = plan_of("optcc", 262_144, "float32")
    results = on_two_hosts(lambda _, transport: reduce_over(transport, plan, verdict, 2))
    assert results == without_faults("optcc", 262_144, "float32", 2)


def test_ranks_of_a_host_exchange_inside_it_and_send_over_their_own_nics() -> None:
    def body(_: int, transport: TcpTransport) -> list[int]:
        transport.keep_to_own_nics()
        send_along(transport, PAIRS)  # until its own NIC has joined, a rank sends over others
        before = carried(transport)
        send_along(transport, PAIRS)
        assert transport.hosts == (0, 0, 2, 2)
        return [after - former for after, former in zip(carried(transport), before, strict=True)]

    assert on_two_hosts(body)[:2] == [[1, 0, 1], [0, 1, 0]]


def test_nics_are_pooled_unless_they_belong_to_ranks() -> None:
    def body(_: int, transport: TcpTransport) -> int:
        for _ in range(3):  # on a loaded machine the second rail may join after the first message
            send_along(transport, PAIRS)
        return min(count.sent_bytes for count in transport.rails)

    assert min(on_two_hosts(body)[:2]) > MIB // 4


def test_a_rank_whose_nic_is_lost_sends_over_those_of_its_host() -> None:
    def body(rank: int, transport: TcpTransport) -> list[int]:
        transport.keep_to_own_nics()
        transport.barrier()
        if rank < 2:
            transport._endpoint.nic_changed(1, False)
        transport.barrier()
        send_along(transport, PAIRS)
        return carried(transport)

    assert on_two_hosts(body)[:2] == [[1, 0, 1], [1, 0, 0]]


def test_nobody_is_joined_inside_unless_all_say_where_they_are() -> None:
    def body(_: int, transport: TcpTransport) -> bool:
        send_along(transport, PAIRS)
        return transport.inside is None and transport.hosts == (0, 1, 2, 3)

    assert all(on_two_hosts(body, but=3))


def test_its_status_has_the_nics_and_names_none_for_what_happens_inside() -> None:
    def body(_: int, transport: TcpTransport) -> tuple[list[str], int]:
        send_along(transport, PAIRS)
        endpoint = transport.endpoint
        endpoint.note(LOST, "a test", 1, len(endpoint.own_nics))
        reader = RailReader(endpoint)
        return [rail.name for rail in reader.read(1.0)], reader.take_notes()[-1].nic

    assert on_two_hosts(body) == [(["r0", "r1"], -1)] * 4


def test_a_rank_is_found_by_its_kernel_namespace_and_nics(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = [HostNic("eth0", "10.0.0.1")]
    here = inside_of(nics, {})
    assert here is not None
    assert here == inside_of([HostNic("eth0", "10.0.0.1", 5, 5)], {})
    assert here.address == "127.0.0.1"
    assert here.name != getattr(inside_of([HostNic("eth0", "10.0.0.2")], {}), "name", "")
    assert inside_of([HostNic("lo", "127.0.0.1")], {}) is None
    found = [Interface(f"in{number}", f"10.98.0.{number + 1}", False) for number in range(2)]
    monkeypatch.setattr("optcc.runtime.nics.interfaces", lambda: found)
    given = {"OPTCC_INSIDE_IFNAME": "in", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert inside_of(nics, given) == HostNic(here.name, "10.98.0.2")
    with pytest.raises(InputError, match="must leave in2, which is up; there is in0, in1"):
        inside_of(nics, {**given, "OMPI_COMM_WORLD_LOCAL_RANK": "2"})
