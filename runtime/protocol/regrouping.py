"""Who goes on without hosts that are cut off, and what becomes of the collective under way. No I/O, no clock.

The parties are the ranks of a job. A *group* is those of them that run collectives together: all at first, later those
that are left. Its name, the `job` of the handshake, is a digest of that of the group before it and of its members, so
that ranks of two groups have no connection with each other. Collectives are counted, and run one after the other.

    a rank    runs a collective in its group into memory of its own: it *holds* the result, tagged with the group
    all       meet at a barrier of the group: who is through knows that all members hold the result, and *delivers* it
    a rank    that learns that members are cut off moves to the group of the others, if they are on more than half of
              all hosts of the job, and never comes back; there it says first where it stands, and waits for the others
    all       if those that have not delivered collective n all hold it with one tag, that is the result: they deliver
              it. Else nobody has delivered it: they drop what they hold, and run it again from the inputs

Why no two ranks deliver a collective with the contributions of different groups, whatever the network does, and
whether or not those that are cut off were rightly taken to be:

- A group delivers nothing before all its members have moved to it. Two groups that follow on one share a member, as
  either has more than half of the hosts; that one moves to one of them, so the other never begins.
- A rank that delivers n in a group knows that all its members held n there. They drop it only after they have moved on,
  and where all have said what they hold: none of them says less, so n is not run again.
- What a group finds from what its members say is the same at all, as a member says it once.

`tests/unit/runtime/protocol/test_regrouping.py` explores every order of these steps for three and four ranks, which
move to any group that the rule allows.

*Merging.* A rank that is cut off moves to one more group of all ranks, the *lobby* of the last group that had all, and
waits there. The others come when their program asks for it, before they run a collective after the first one, n, that
lacks contributions; merging is the next collective by number. In the lobby all say where they stand (`Offer`):

- One that returns has not delivered n - 1, which it may not hold: the others give it that result, it delivers that, and
  all say again where they stand once its program has come to n.
- Else each that has not delivered n gives its input. All add these to the result of n of the others, in the order of
  ranks, into memory of their own, hold that, and deliver it behind a barrier: an input is added once or not at all.

The lobby waits for hosts that are cut off again, as the policy `wait` does. If that takes too long, those that had gone
on do so again, by the rules above: where all of them hold the merged result, that is the result. There is one lobby for
each group of all ranks, hence one name, which no earlier attempt can have used.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from optcc.errors import AllRailsFailed, MismatchError
from optcc.runtime.protocol.hello import JOB_BYTES

_STANDING = struct.Struct(f"<q{JOB_BYTES}s")
_NOTHING = bytes(JOB_BYTES)
REQUEST_BYTES = 40
_OFFER = struct.Struct(f"<q?{REQUEST_BYTES}s{REQUEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class SurvivorGroup:
    """The ranks `members`, ascending, that run collectives together under the name `job`.

    >>> whole = SurvivorGroup(bytes(16), (0, 1, 2))
    >>> left = whole.without({1}, hosts=(0, 1, 2))
    >>> left.members, left.job == whole.job, left.without({2}, hosts=(0, 1, 2))
    ((0, 2), False, None)
    """

    job: bytes
    members: tuple[int, ...]

    def without(self, lost: Collection[int], hosts: Sequence[int]) -> SurvivorGroup | None:
        """The group of the others, `hosts` being the host of every rank of the job; None if none of these is a member,
        or if the others are not on more than half of all hosts."""
        left = tuple(rank for rank in self.members if rank not in lost)
        if left == self.members or 2 * len({hosts[rank] for rank in left}) <= len(set(hosts)):
            return None
        return SurvivorGroup(self.successor(left), left)

    def successor(self, members: Sequence[int]) -> bytes:
        """The name of the group of these ranks that follows on this one."""
        digest = blake2b(self.job, digest_size=JOB_BYTES, person=b"optcc group")
        digest.update(struct.pack(f"<{len(members)}q", *members))
        return digest.digest()

    def lobby(self, n_ranks: int) -> SurvivorGroup:
        """Where the ranks of the job meet again after this group, which had all of them."""
        everyone = tuple(range(n_ranks))
        digest = blake2b(self.successor(everyone), digest_size=JOB_BYTES, person=b"optcc lobby")
        return SurvivorGroup(digest.digest(), everyone)


class Standing(NamedTuple):
    """Where a rank stands that joins a group: the first collective that it has not delivered, and the group in which it
    holds the result of that one (`job`), or zeros."""

    next: int
    held: bytes

    def pack(self) -> bytes:
        """As it travels.

        >>> Standing.unpack(Standing(3, bytes(16)).pack()).next
        3
        """
        return _STANDING.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Standing:
        """What `pack` has made."""
        return cls(*_STANDING.unpack(data))


class Offer(NamedTuple):
    """Where a rank stands in a lobby: the first collective that it has not delivered, which is the merge if it merges;
    what it has asked for, or what the collective before the merge was; and what the one before that was."""

    next: int
    is_merging: bool
    request: bytes
    previous: bytes

    def pack(self) -> bytes:
        """As it travels."""
        return _OFFER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """What `pack` has made."""
        return cls(*_OFFER.unpack(data))


class Merging(NamedTuple):
    """What the ranks in a lobby do: rank `source` gives a result, that of the collective before the last one if one of
    the `behind` lacks it, else the last one, to which the inputs of `adds` are added."""

    source: int
    behind: tuple[int, ...]
    adds: tuple[int, ...]


def find_merging(offers: Sequence[Offer]) -> Merging:
    """What follows from the offers of all ranks. Raises MismatchError if ranks have asked for different collectives,
    AllRailsFailed if none has gone on.

    >>> asked, other = bytes(REQUEST_BYTES), bytes(REQUEST_BYTES)
    >>> find_merging([Offer(5, True, asked, other), Offer(4, False, asked, other), Offer(5, True, asked, other)])
    Merging(source=0, behind=(), adds=(1,))
    >>> find_merging([Offer(5, True, asked, other), Offer(3, False, asked, other), Offer(5, False, asked, other)])
    Merging(source=0, behind=(1,), adds=())
    """
    merging = [rank for rank, offer in enumerate(offers) if offer.is_merging]
    if not merging:
        raise AllRailsFailed("all hosts were cut off from each other: none has gone on without others")
    source, number = merging[0], offers[merging[0]].next
    wanted = {number - 2: offers[source].previous, number - 1: offers[source].request}
    for rank, offer in enumerate(offers):
        is_known = number == offer.next if offer.is_merging else number - 2 <= offer.next <= number
        asked = offers[source].request if offer.is_merging else wanted.get(offer.next, offer.request)
        if not is_known or offer.request != asked:
            what = f"rank {rank} differs from rank {source} in collective {offer.next}, or in what it asks for there"
            raise MismatchError(what, culprits=(source, rank))
    at = {each: tuple(rank for rank, offer in enumerate(offers) if offer.next == each) for each in wanted}
    return Merging(source, at[number - 2], at[number - 1])


class GroupProgress:
    """How far one rank has come: its `group`, the first collective that it has not delivered, and the group in which it
    `held` the result of that one, if it does. `whole` is the last group that had all ranks, and `lacking` the first
    collective since then that was delivered without some."""

    __slots__ = ("group", "held", "lacking", "next", "whole")

    def __init__(self, group: SurvivorGroup) -> None:
        self.group = self.whole = group
        self.next = 0
        self.held: SurvivorGroup | None = None
        self.lacking: int | None = None

    @property
    def may_merge(self) -> bool:
        """True if the last collective is the first one that lacks contributions, and was not merged in vain."""
        return self.lacking is not None and self.lacking == self.next - 1

    def become_whole(self) -> None:
        """All ranks have merged: they go on as one group."""
        everyone = self.group.members
        self.group = self.whole = SurvivorGroup(self.group.successor(everyone), everyone)
        self.lacking = None

    @property
    def standing(self) -> Standing:
        """What to tell the other members of a group that this rank has moved to."""
        return Standing(self.next, _NOTHING if self.held is None else self.held.job)

    def hold(self) -> None:
        """The collective has been run in the group, and its result is here."""
        self.held = self.group

    def deliver(self) -> SurvivorGroup:
        """The result that is held is that of all; the group whose contributions it has."""
        held, self.held = self.held, None
        assert held is not None, "nothing is held"
        if self.lacking is None and len(held.members) < len(self.whole.members):
            self.lacking = self.next
        self.next += 1
        return held

    def settle(self, standings: Sequence[Standing]) -> bool:
        """All members of the group have said where they stand; True if what this rank holds is to be delivered.

        Else it holds nothing from now on, and the collective is run in the group.
        """
        first = min(standing.next for standing in standings)
        if self.next > first:
            # The others are about to deliver what this rank has delivered.
            return False
        tag = self.standing.held
        if tag != _NOTHING and all(each.next > first or each.held == tag for each in standings):
            return True
        assert all(each.next == first for each in standings), "delivered, and not held by all"
        self.held = None
        return False
