"""NICs whose address changes while a job runs: how peers learn of the new one, and dial it. No I/O.

The driver notices that a NIC of this rank has another address (a new lease, a NIC that was replaced), listens there,
and says so (`Endpoint.nic_moved`). What went over the old address is lost, as with a link that is down. The rank tells
each peer over the rails that are left (`AddressWord`), and whoever is connected later as soon as it is; a peer that no
rail reaches any more is dialled, from the new address. A peer that has heard it dials the new address at once.

Invariants:

    a word is read from an established         a caller that does not know the secret of the job moves no address; with
    connection alone                           authenticated frames (`sealing`), who changes bytes on the way neither
    a word is about the NICs of who says it    no member moves the address of another one
    words are counted by the rank that says    one that is overtaken on a faster connection changes nothing
    them

A rank that dials a NIC nobody has told it of, while no other rail of the pair is up, finds the peer through other ranks
(`detour`), and is told there. What cannot be mended: two ranks of one NIC each, both with new addresses, and no third
rank between them that knows one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address

from optcc.runtime.protocol.connection import Broken
from optcc.runtime.protocol.frames import ADDRESS_FRAME, AddressWord
from optcc.runtime.protocol.local import Established, LocalRank
from optcc.runtime.protocol.outbound import Outbound


class Addresses:
    """What one rank says of its own NICs' addresses, and what it has heard of others'."""

    def __init__(self, local: LocalRank, outbounds: Mapping[int, Outbound]) -> None:
        self._local, self._outbounds = local, outbounds
        # By NIC of this rank, the last word on it; by rank and NIC, the turn of the last word that was heard.
        self._said: dict[int, AddressWord] = {}
        self._heard: dict[tuple[int, int], int] = {}

    def move(self, nic: int, address: str, port: int) -> None:
        """A NIC of this rank listens at another address: the peers are told."""
        local = self._local
        before = self._said.get(nic)
        word = self._said[nic] = AddressWord(before.turn + 1 if before else 1, nic, address, port)
        local.addresses[local.rank, nic] = address, port
        local.note("address", f"{local.own_nics[nic][0]} is at {address} port {port} now", nic=nic)
        local.say_to_all(ADDRESS_FRAME, [word.number])

    def take_over(self, before: Addresses) -> None:
        """This rank begins anew among some ranks (`regrouping`): what was said and heard of addresses still holds."""
        self._said.update(before._said)
        self._local.addresses.update(before._local.addresses)

    def greet(self, connection: Established) -> None:
        """A connection is up: the peer is told of all NICs that are not where the ranks met."""
        for word in self._said.values():
            connection.say(ADDRESS_FRAME, word.number)
            self._local.wake(connection)

    def hear(self, peer: int, number: int) -> None:
        """A peer's word on a NIC of its own. Raises Broken for one that cannot be."""
        local, word = self._local, AddressWord.read(number)
        if word.nic >= len(local.book[peer]) or not word.port or not _may_be_dialled(word.address):
            raise Broken(f"address {word.address} port {word.port} of NIC {word.nic}", is_damage=True)
        which = peer, word.nic
        if not word.is_after(self._heard.get(which, 0)):
            return
        self._heard[which] = word.turn
        local.addresses[which] = word.address, word.port
        local.note("address", f"its {local.book[peer][word.nic][0]} is at {word.address} port {word.port} now", peer)
        if peer in self._outbounds:
            self._outbounds[peer].take_address(word.nic, (word.address, word.port))


def _may_be_dialled(text: str) -> bool:
    """True for the address of one host."""
    address = IPv4Address(text)
    return not (address.is_unspecified or address.is_multicast or address == IPv4Address("255.255.255.255"))
