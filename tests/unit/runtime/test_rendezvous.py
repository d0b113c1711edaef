"""Where ranks meet, which NICs they use, and at which rates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from optcc.errors import DeadlineExceeded, EnvironmentMissing, InputError, OptccError
from optcc.runtime.nics import HostNic, Interface, choose_nics, declare_rates, interfaces, nics_of
from optcc.runtime.protocol.frames import WireError
from optcc.runtime.protocol.hello import Hello
from optcc.runtime.rendezvous import Meet, Meeting, at_address, read_secret
from tests.unit.callers import call, enter, is_shut_out

DONE_S = 40.0


def interfaces_here() -> list[Interface]:
    names = ("lo", "docker0", "eth1", "eth0", "eth10", "ib0")
    return [Interface(name, f"10.0.0.{i}", name == "lo", rate=100 * i) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", ["eth0", "eth1", "eth10", "ib0"]),
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1,ib", ["eth1", "eth10", "ib0"]),
        ("=eth1", ["eth1"]),
        ("=eth1,lo", ["eth1", "lo"]),
        ("^eth,lo", ["docker0", "ib0"]),
        ("^=eth1,lo,docker0", ["eth0", "eth10", "ib0"]),
        ("lo", ["lo"]),
    ],
)
def test_nics_are_chosen_as_nccl_does(wanted: str, chosen: list[str]) -> None:
    assert [nic.name for nic in choose_nics(wanted, interfaces_here())] == chosen


def test_nics_that_cannot_be_chosen_are_bad_input() -> None:
    for wanted in ("wlan", "=eth", "^e,l,d,i", "eth,", "=", "^", ","):
        with pytest.raises(InputError, match="OPTCC_SOCKET_IFNAME"):
            choose_nics(wanted, interfaces_here())
    with pytest.raises(EnvironmentMissing, match="no network interface"):
        choose_nics("", [])


def test_loopback_is_chosen_only_if_there_is_nothing_else() -> None:
    lo, docker, eth = interfaces_here()[:3]
    assert [nic.name for nic in choose_nics("", [lo, docker])] == ["lo"]
    assert [nic.name for nic in choose_nics("", [lo, docker, eth])] == ["eth1"]


def test_rates_are_the_drivers_if_all_say_one() -> None:
    fast, slow, silent = (
        Interface("a", "10.0.0.1", False, 200),
        Interface("b", "10.0.0.2", False, 100),
        Interface("c", "10.0.0.3", False),
    )
    assert [nic.out_rate for nic in choose_nics("", [fast, slow])] == [200, 100]
    assert [nic.out_rate for nic in choose_nics("", [fast, slow, silent])] == [1, 1, 1]


def test_a_nic_that_is_down_is_one_if_another_is_up() -> None:
    up = Interface("eth1", "10.0.1.1", False, 200)
    down = Interface("eth0", "10.0.0.1", False, 0, is_up=False)
    assert [(nic.name, nic.out_rate, nic.is_up) for nic in choose_nics("eth", [up, down])] == [
        ("eth0", 200, False),
        ("eth1", 200, True),
    ]
    declared = declare_rates(choose_nics("", [up, down]), "1GB/s,eth0=500MB/s", "h0")
    assert [(nic.out_rate, nic.is_up) for nic in declared] == [(500_000_000, False), (10**9, True)]
    with pytest.raises(InputError, match="must leave an interface that is up; there is eth1"):
        choose_nics("eth0", [up, down])
    with pytest.raises(EnvironmentMissing, match="no network interface is up"):
        choose_nics("", [down])
    loopback = Interface("lo", "127.0.0.1", True)
    assert [nic.name for nic in choose_nics("", [down, loopback])] == ["lo"]


def test_this_machine_has_a_loopback() -> None:
    assert any(each.is_loopback and each.address == "127.0.0.1" for each in interfaces())
    assert [nic.name for nic in nics_of({"OPTCC_SOCKET_IFNAME": "=lo"})] == ["lo"]


def test_rates_are_those_declared_for_this_host() -> None:
    nics = [HostNic("eth0", "10.0.0.1"), HostNic("eth1", "10.0.1.1")]
    text = "200Mbit/s,eth1=100Mbit/s:50Mbit/s,h3.eth0=80Mbit/s"
    rates = [(nic.out_rate, nic.in_rate) for nic in declare_rates(nics, text, "h3")]
    assert rates == [(10_000_000, 10_000_000), (12_500_000, 6_250_000)]
    assert declare_rates(nics, text, "h2")[0].out_rate == 25_000_000
    given = nics_of({"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_NIC_RATES": "1GB/s"})
    assert given[0].in_rate == 10**9
    for wrong in ("", "fast", "1GB/s,eth0", "1GB/s,=1GB/s", "1GB/s,eth0=", "1GB/s,h3.=1GB/s", "0B/s"):
        with pytest.raises(InputError):
            declare_rates(nics, wrong, "h3")


def gather(meets: Sequence[Meet], records: Sequence[bytes]) -> list[Meeting | OptccError]:
    """What each rank has once they have met, in threads."""
    results: dict[int, Meeting | OptccError] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = meets[rank](records[rank])
        except OptccError as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(meets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    return [results[rank] for rank in range(len(meets))]


def check_met(met: Sequence[Meeting | OptccError], records: Sequence[bytes]) -> None:
    meetings = [each for each in met if isinstance(each, Meeting)]
    assert len(meetings) == len(records), met
    for rank, each in enumerate(meetings):
        assert (each.rank, each.n_ranks, each.records) == (rank, len(records), tuple(records))
        assert (each.job, each.secret) == (meetings[0].job, meetings[0].secret)
        assert len(each.job) == 16 and len(each.secret) == 32
        assert each.secret.hex() not in repr(each) and repr(each.secret) not in repr(each)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_ranks_meet_at_rank_0(n_ranks: int) -> None:
    address, secret = ("127.0.0.1", free_port()), os.urandom(32)
    records = [bytes([rank + 1]) * (1 + rank * 7) for rank in range(n_ranks)]
    check_met(gather([at_address(address, rank, n_ranks, secret) for rank in range(n_ranks)], records), records)


@pytest.mark.battery(27)
def test_strangers_at_the_meeting_are_sent_away_and_the_others_meet() -> None:
    address, secret, records = ("127.0.0.1", free_port()), os.urandom(32), [b"a", b"b", b"c"]
    met: list[Meeting | OptccError] = []
    first = threading.Thread(
        target=lambda: met.extend(gather([at_address(address, rank, 3, secret) for rank in range(2)], records[:2]))
    )
    first.start()
    time.sleep(0.2)
    silent = call(address, b"op")
    assert is_shut_out(call(address, os.urandom(200)))
    with pytest.raises((WireError, ConnectionError)):
        enter(address, os.urandom(32), Hello(2, 3, 0xFFFF, bytes(16)))
    greedy, _ = enter(address, secret, Hello(2, 3, 0xFFFF, bytes(16)))
    greedy.sendall(b"\xff\xff\xff\xff")
    assert is_shut_out(greedy), "a record of 4 GiB"
    (wrong,) = gather([at_address(address, 2, 3, os.urandom(32), timeout_s=0.3)], [b"x"])
    assert isinstance(wrong, DeadlineExceeded) and "does not know the secret" in str(wrong)
    last = at_address(address, 2, 3, secret)(b"c")
    first.join(DONE_S)
    check_met([*met, last], records)
    assert is_shut_out(silent)


FLOOD = """
import socket, sys, time
address, held, n, began_s = ("127.0.0.1", int(sys.argv[1])), [], 0, time.monotonic()
while time.monotonic() - began_s < 30:
    while n < 2500 * (time.monotonic() - began_s):
        n += 1
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(address)
        if n % 2:
            try:
                held[-1].send(b"optcc-tc" + bytes(100))
            except OSError:
                pass
        if len(held) > 400:
            held.pop(0).close()
        if n == 200:
            print("flooding", flush=True)
    time.sleep(0.0004)
"""


@pytest.mark.battery(32)
@pytest.mark.parametrize("n_ranks", [2, 8])
def test_ranks_meet_in_a_flood_of_strangers(n_ranks: int) -> None:
    """2,500 connects a second, every other one of which says something, and none of which knows the secret."""
    address, secret = ("127.0.0.1", free_port()), os.urandom(32)
    records = [bytes([rank + 1]) * 9 for rank in range(n_ranks)]
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(address[1])], stdout=subprocess.PIPE, text=True)
    try:
        assert flood.stdout is not None and flood.stdout.readline() == "flooding\n"
        began_s = time.monotonic()
        met = gather([at_address(address, rank, n_ranks, secret, timeout_s=20) for rank in range(n_ranks)], records)
        took_s = time.monotonic() - began_s
        assert flood.poll() is None
    finally:
        flood.kill()
        flood.communicate()
    check_met(met, records)
    assert took_s < 2.0, took_s


@pytest.mark.battery(25)
def test_a_meeting_that_does_not_come_about_says_who_is_missing() -> None:
    address, secret = ("127.0.0.1", free_port()), os.urandom(32)
    met = gather([at_address(address, rank, 4, secret, timeout_s=0.3) for rank in range(2)], [b"a", b"b"])
    assert "rank 0: waited 0.3 s in vain for ranks 2, 3 to meet" in str(met[0])
    assert isinstance(met[1], DeadlineExceeded)
    with pytest.raises(InputError, match="must be a free port"):
        at_address(("192.0.2.1", 1), 0, 1, secret)(b"")
    with pytest.raises(InputError, match="secret of 3 B"):
        at_address(address, 0, 1, b"abc")


def test_a_secret_is_read_only_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(40)))
    path.chmod(0o600)
    assert read_secret(path) == bytes(range(32))
    path.chmod(0o640)
    with pytest.raises(InputError, match="mode 0600"):
        read_secret(path)
    (tmp_path / "short").touch(0o600)
    with pytest.raises(InputError, match="secret of 0 B"):
        read_secret(tmp_path / "short")
    with pytest.raises(InputError, match="must hold the secret"):
        read_secret(tmp_path / "none")


def test_a_nic_sends_and_receives_something() -> None:
    with pytest.raises(InputError, match="at least 1"):
        HostNic("a", "127.0.0.1", 0, 1)
