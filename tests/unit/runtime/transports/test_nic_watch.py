"""What the kernel says of NICs: messages made by hand, and a veth pair in a network namespace of its own."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

import pytest

from optcc.runtime.transports.nic_watch import NicChange, NicWatch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="netlink is Linux's")

NEW_LINK, DELETED_LINK, NEW_ADDRESS, DELETED_ADDRESS = 16, 17, 20, 21
UP, CARRIER = 0x1, 0x40


def message(kind: int, body: bytes) -> bytes:
    data = struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body
    return data + bytes(-len(data) % 4)


def link(index: int, flags: int, kind: int = NEW_LINK, name: bytes = b"") -> bytes:
    attribute = struct.pack("=HH", 5 + len(name), 3) + name + bytes(4 - len(name) % 4) if name else b""
    return message(kind, struct.pack("=BxHiII", 0, 1, index, flags, 0) + attribute)


def address(index: int, text: str, kind: int = NEW_ADDRESS) -> bytes:
    local = struct.pack("=HH", 8, 2) + socket.inet_aton(text)
    label = struct.pack("=HH", 7, 3) + b"e0\0" + b"\0"
    return message(kind, struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, index) + label + local)


class Scripted(NicWatch):
    """A watch whose kernel says what a test has written."""

    def __init__(self, addresses: list[str], *first: bytes) -> None:
        self.first, self.texts = first, addresses
        super().__init__(addresses)
        self._socket.close()
        self.writer, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def _ask(self) -> None:
        for data in self.first:
            self._take(data)

    def hears(self, *messages: bytes) -> list[tuple[int, bool]]:
        """What has changed, at the addresses that were there first."""
        changes = self.moves(*messages)
        assert all(change.address == self.texts[change.nic] for change in changes)
        return [change[:2] for change in changes]

    def moves(self, *messages: bytes) -> list[NicChange]:
        for data in messages:
            self.writer.send(data)
        return self.read()

    def close(self) -> None:
        self.writer.close()
        super().close()


@pytest.fixture
def watch() -> Scripted:
    return Scripted(
        ["10.0.0.1", "10.0.1.1", "10.9.9.9"],
        link(2, UP | CARRIER) + link(3, UP) + address(2, "10.0.0.1"),
        address(3, "10.0.1.1"),
    )


def test_a_nic_is_up_if_it_is_switched_on_has_a_carrier_and_its_address(watch: Scripted) -> None:
    assert watch.is_up == [True, False, True], "the third is nobody's, and not watched"
    for down, up in (
        (link(2, CARRIER), link(2, UP | CARRIER)),
        (link(2, UP), link(2, UP | CARRIER)),
        (link(2, 0, DELETED_LINK), link(2, UP | CARRIER)),
        (address(2, "10.0.0.1", DELETED_ADDRESS), address(2, "10.0.0.1")),
    ):
        assert watch.hears(down) == [(0, False)] and watch.is_up[0] is False
        assert watch.hears(down) == [], "once is enough"
        assert watch.hears(up) == [(0, True)]
    assert watch.hears(link(3, UP | CARRIER), link(2, 0)) == [(0, False), (1, True)]
    assert watch.hears(link(9, 0), address(9, "10.9.9.9"), address(3, "10.0.0.7", DELETED_ADDRESS)) == []
    watch.close()


def test_an_address_that_moves_is_where_it_is_now(watch: Scripted) -> None:
    assert watch.hears(address(3, "10.0.0.1"), address(2, "10.0.0.1", DELETED_ADDRESS)) == [(0, False)]
    assert watch.hears(link(3, UP | CARRIER)) == [(0, True), (1, True)]
    watch.close()


def test_a_nic_has_the_address_that_its_interface_was_given_last() -> None:
    """After its own is gone, or at once if it was given before; not one that it had from the start, nor another's."""
    watch = Scripted(
        ["10.0.0.1", "10.0.1.1"],
        link(2, UP | CARRIER) + link(3, UP | CARRIER),
        address(2, "10.0.0.1") + address(2, "10.0.0.99") + address(3, "10.0.1.1"),
    )
    gone = address(2, "10.0.0.1", DELETED_ADDRESS)
    assert watch.moves(gone, address(3, "10.0.1.7")) == [(0, False, "10.0.0.1")]
    assert watch.moves(address(2, "10.0.0.7"), address(2, "10.0.0.8")) == [(0, True, "10.0.0.8")]
    assert watch.moves(address(2, "10.0.0.1")) == [], "it keeps what it has"
    assert watch.moves(address(2, "10.0.0.8", DELETED_ADDRESS)) == [(0, True, "10.0.0.1")]
    assert watch.moves(address(3, "10.0.1.1", DELETED_ADDRESS), link(3, UP)) == [(1, False, "10.0.1.7")]
    assert watch.moves(link(3, UP | CARRIER), address(2, "10.0.1.7")) == [(1, True, "10.0.1.7")]
    watch.close()


def test_an_interface_in_the_place_of_one_that_is_gone_is_known_by_its_name() -> None:
    watch = Scripted(["10.0.0.1"], link(2, UP | CARRIER, name=b"eth0"), address(2, "10.0.0.1"))
    assert watch.moves(link(2, 0, DELETED_LINK), address(2, "10.0.0.1", DELETED_ADDRESS)) == [(0, False, "10.0.0.1")]
    assert watch.moves(link(7, UP | CARRIER, name=b"eth1"), address(7, "10.0.0.5")) == []
    assert watch.moves(link(8, UP, name=b"eth0"), address(8, "10.0.0.7")) == [(0, False, "10.0.0.7")]
    assert watch.moves(link(8, UP | CARRIER, name=b"eth0")) == [(0, True, "10.0.0.7")]
    watch.close()


def test_after_lost_events_all_is_asked_again_and_no_address_counts_as_given() -> None:
    first = address(2, "10.0.0.1") + address(2, "10.0.0.99")
    watch = Scripted(["10.0.0.1"], link(2, UP | CARRIER), first)
    watch._homes.clear()
    watch._ask()
    assert watch.moves(address(2, "10.0.0.1", DELETED_ADDRESS)) == [(0, False, "10.0.0.1")]
    watch.close()


def test_messages_that_are_cut_off_or_unknown_do_no_harm(watch: Scripted) -> None:
    for whole in (link(2, 0), address(2, "10.0.0.1", DELETED_ADDRESS)):
        for end in range(1, len(whole) - 8):
            watch.hears(whole[:end])
    watch.hears(bytes(64), os.urandom(200), message(99, b"?"))
    assert watch.is_up[:2] == [True, False]
    watch.close()


def test_this_machines_loopback_is_up_and_other_addresses_are_not_watched() -> None:
    watch = NicWatch(["127.0.0.1", "127.0.7.7"])
    assert watch.is_up == [True, True] and watch.read() == []
    watch.close()


PROGRAM = """
import select, subprocess
from optcc.runtime.transports.nic_watch import NicWatch
watch = NicWatch(["10.9.0.1"])
seen = []
for lines in ("link set eth0 down", "link set eth0 up", "link set far0 down", "link set far0 up",
        "addr del 10.9.0.1/24 dev eth0", "addr add 10.9.0.1/24 dev eth0", "addr del 10.9.0.1/24 dev eth0",
        "addr add 10.9.0.7/24 dev eth0", "link del eth0",
        "link add eth0 type veth peer name far0; link set far0 up; link set eth0 up; addr add 10.9.0.8/24 dev eth0"):
    for words in lines.split(";"):
        subprocess.run(["ip", *words.split()], check=True)
    changes = []
    while not changes and select.select([watch], [], [], 2.0)[0]:
        changes = watch.read()
    seen += map(tuple, changes)
print(seen)
"""
SET_UP = "ip link add eth0 type veth peer name far0 && ip addr add 10.9.0.1/24 dev eth0 && ip link set eth0 up"


@pytest.mark.netns
def test_the_kernel_tells_of_links_carriers_and_addresses() -> None:
    script = f'ip link set lo up && {SET_UP} && ip link set far0 up && exec "$0" -c "$1"'
    command = ["unshare", "-n", "bash", "-c", script, sys.executable, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    texts = ["10.9.0.1"] * 7 + ["10.9.0.7"] * 2 + ["10.9.0.8"]
    assert done.stdout == f"{[(0, i % 2 == 1, text) for i, text in enumerate(texts)]}\n", done.stderr
