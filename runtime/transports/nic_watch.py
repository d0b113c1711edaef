"""`NicWatch`: the kernel says at once that a NIC has gone down, lost its carrier or its address, has another address,
or is back.

A raw rtnetlink socket (Linux; linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h), without a package. It sees the
network namespace in which it was made. Where there is no netlink, making one raises OSError, and a transport does
without: what is silent is then noticed a little later.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_AF_NETLINK, _NETLINK_ROUTE = 16, 0
_GROUP_LINK, _GROUP_IPV4_ADDRESS = 0x1, 0x10
_DONE, _OVERRUN = 3, 4
_NEW_LINK, _DELETED_LINK, _GET_LINK = 16, 17, 18
_NEW_ADDRESS, _DELETED_ADDRESS, _GET_ADDRESS = 20, 21, 22
_REQUEST_DUMP = 0x1 | 0x300
_ATTRIBUTE_LOCAL, _ATTRIBUTE_NAME = 2, 3
_IS_UP, _HAS_CARRIER = 0x1, 0x40
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_READ_BYTES = 1 << 16
_READS_MAX = 1000
_DUMP_S = 2.0


class NicChange(NamedTuple):
    """A NIC, by its number, has gone down, is back, or has another address."""

    nic: int
    is_up: bool
    address: str


class NicWatch:
    """Watches the NICs that have these IPv4 addresses; an address that no NIC has at first is left out.

    `is_up[i]` says of the i-th how it was when `read` was last called; an address that is not watched counts as up. A
    NIC whose address is gone has the one that its interface was given last, if that was while it was watched and no
    other of these NICs has it. An interface that takes the place of one that is gone is known by its name.

    Raises OSError where the system has no netlink, or does not let us.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.is_up = [True] * len(addresses)
        self._addresses = [socket.inet_aton(address) for address in addresses]
        self._flags: dict[int, int] = {}
        self._homes: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        # The interface of each NIC and its name; and the addresses that interfaces were given since, in order.
        self._interfaces: list[int] = []
        self._own_names: list[bytes] = []
        self._given: dict[bytes, int] = {}
        self._socket = socket.socket(_AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE)
        try:
            self._socket.bind((0, _GROUP_LINK | _GROUP_IPV4_ADDRESS))
            self._ask()
        except BaseException:
            self._socket.close()
            raise
        self._watched = [address in self._homes for address in self._addresses]
        self._interfaces = [self._homes.get(address, -1) for address in self._addresses]
        self._own_names = [self._names.get(index, b"") for index in self._interfaces]
        # The addresses at the last comparison.
        self._known = self._homes.copy()
        self._compare()

    def fileno(self) -> int:
        """Readable when something may have changed."""
        return self._socket.fileno()

    def read(self) -> list[NicChange]:
        """What has changed since the last call; does not wait."""
        for _ in range(_READS_MAX):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    break
                # Events were lost: everything is asked again. What cannot be had now comes with the next event.
                with contextlib.suppress(OSError):
                    self._ask()
                break
            self._take(data)
        return self._compare()

    def close(self) -> None:
        """Gives the socket back."""
        self._socket.close()

    def _ask(self) -> None:
        """All interfaces and addresses, as they are now."""
        self._flags.clear()
        self._homes.clear()
        self._socket.settimeout(_DUMP_S)
        for number, kind in enumerate((_GET_LINK, _GET_ADDRESS), 1):
            body = bytes(_LINK.size) if kind == _GET_LINK else bytes([socket.AF_INET, 0, 0, 0, 0, 0, 0, 0])
            self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST_DUMP, number, 0) + body)
            while not self._take(self._socket.recv(_READ_BYTES)):
                pass
        self._socket.setblocking(False)

    def _take(self, data: bytes) -> bool:
        """Notes what messages say; True if they end a dump."""
        at, is_over = 0, False
        while at + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, at)
            if length < _HEADER.size:
                break
            body = data[at + _HEADER.size : at + length]
            is_over |= kind in (_DONE, _OVERRUN)
            if kind in (_NEW_LINK, _DELETED_LINK) and len(body) >= _LINK.size:
                _, _, index, flags, _ = _LINK.unpack_from(body)
                self._flags[index] = flags if kind == _NEW_LINK else 0
                self._note_name(index, body[_LINK.size :])
            elif kind in (_NEW_ADDRESS, _DELETED_ADDRESS) and len(body) >= _ADDRESS.size:
                *_, index = _ADDRESS.unpack_from(body)
                for what, value in _attributes(body[_ADDRESS.size :]):
                    if what != _ATTRIBUTE_LOCAL:
                        continue
                    if kind == _NEW_ADDRESS:
                        self._homes[value] = index
                    elif self._homes.get(value) == index:
                        del self._homes[value]
            at += (length + 3) & ~3
        return is_over

    def _note_name(self, index: int, attributes: bytes) -> None:
        """The name of an interface, which may take the place of one that is gone."""
        name = next((value.rstrip(b"\0") for what, value in _attributes(attributes) if what == _ATTRIBUTE_NAME), b"")
        if not name:
            return
        self._names[index] = name
        for number, interface in enumerate(self._interfaces):
            if self._own_names[number] == name and not self._flags.get(interface, 0):
                self._interfaces[number] = index

    def _compare(self) -> list[NicChange]:
        changed: list[NicChange] = []
        if self._homes != self._known:
            fresh = {address: index for address, index in self._homes.items() if self._known.get(address) != index}
            kept = {address: index for address, index in self._given.items() if self._homes.get(address) == index}
            self._given, self._known = kept | fresh, self._homes.copy()
        for number in range(len(self._addresses)):
            if not self._watched[number]:
                continue
            is_moved = self._addresses[number] not in self._homes and self._take_given(number)
            address = self._addresses[number]
            flags = self._flags.get(self._homes.get(address, -1), 0)
            is_up = bool(flags & _IS_UP and flags & _HAS_CARRIER)
            if is_moved or is_up != self.is_up[number]:
                self.is_up[number] = is_up
                changed.append(NicChange(number, is_up, socket.inet_ntoa(address)))
        return changed

    def _take_given(self, number: int) -> bool:
        """A NIC's address is gone: True if it has another one."""
        for address, index in reversed(self._given.items()):
            if index == self._interfaces[number] and address not in self._addresses:
                self._addresses[number] = address
                return True
        return False


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, value) of each attribute."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
