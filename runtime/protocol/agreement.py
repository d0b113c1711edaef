"""Agreement on epochs: which plans the collectives of a job run under. No I/O, no clock.

An *epoch* is a statement of what every NIC carries. Its collectives run on plans for that; all ranks must change to it
before the same collective. Ranks begin collectives in the same order, and number them from 0; they may be at different
ones at any moment.

    rank 0    proposes the next epoch, once every rank is ready for the last one
    a rank    makes its plans, says that it is ready and that it begins none of the collectives from n on before it
              knows the same of every rank
    all       the epoch counts from the largest n on: no rank has begun that one

What is said are facts that never change: a *word* is a part of a proposal (what one NIC carries in the epoch), or that
a rank is ready, or has left. Words may come late, twice and in any order, over any rank, for whoever learns one passes
it on. So two ranks need no connection with each other, and a rail that is lost takes nothing along that is not said
again on the next. Nothing rests on clocks.

A rank keeps the words of its epoch and of the next. That is enough: an epoch is proposed only when all are ready for
the one before, and a rank says so only when it has changed to the one before that.

A rank that closes has begun all its collectives: it says how many, and from which epoch on it will say no more, and
counts as ready for those. A rank whose word is awaited is looked after like one whose message is: if it is lost, the
others need not wait for a deadline.

`tests/unit/runtime/protocol/test_agreement.py` explores every order of these steps for two and three ranks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

AHEAD = 1
"""Collectives that a rank may begin between being ready and the change: they hide that others are ready later."""
RANKS_MAX = 1 << 12
NICS_MAX = 1 << 6
EPOCHS_MAX = (1 << 14) - 1
SHARE_MAX = 7.0
CHANGE = 0.1
"""Plans change for NICs that carry more or less by a tenth, not for noise."""
_PROPOSAL, _READY, _LEFT = 1, 2, 3
_PARTS = 1 << 12
Share = tuple[float, float]
"""What a NIC sends and receives, as a share of what `LocalRank.book` says."""
Shares = tuple[tuple[Share, ...], ...]
"""By rank and NIC."""


def is_change(new: float, old: float) -> bool:
    """True if plans change for it."""
    return abs(new - old) > CHANGE * max(new, old)


class Epoch(NamedTuple):
    """An epoch, the number of the first collective under it (-1 until that is agreed), and what the NICs carry."""

    number: int
    first: int
    shares: Shares


class Agreement:
    """What rank `rank` knows of the epochs; `n_nics` has the NICs of each rank.

    `epoch` is the last one that is agreed on; `wanted` the one that is proposed, if this rank knows all of it and has
    not said that it is ready; `to_say` are words for all peers. Where a limit of the words does not hold (`RANKS_MAX`,
    `NICS_MAX`), nothing is ever proposed.

    >>> one, other = Agreement(0, [1, 1]), Agreement(1, [1, 1])
    >>> one.propose((((1.0, 1.0),), ((0.5, 1.0),)))
    >>> one.ready(), [other.hear(word) for word in one.to_say]
    (None, [True, True, True])
    >>> other.wanted.shares[1], other.begin(), other.ready()
    (((0.5, 1.0),), 0, None)
    >>> any(map(one.hear, other.to_say)), one.epoch.number, one.epoch.first
    (True, 1, 2)
    >>> [one.begin() for _ in range(3)], [other.begin() for _ in range(3)]
    ([0, 0, 1], [0, 1, 1])
    """

    __slots__ = (
        *("_epochs", "_is_possible", "_keys", "_left", "_n_ranks", "_proposed", "_ready"),
        *("next", "rank", "to_say", "wanted"),
    )

    def __init__(self, rank: int, n_nics: Sequence[int]) -> None:
        self.rank = rank
        self._is_possible = len(n_nics) <= RANKS_MAX and max(n_nics) <= NICS_MAX
        self._n_ranks = len(n_nics)
        self._keys = dict.fromkeys((each, nic) for each, count in enumerate(n_nics) for nic in range(count))
        # The agreed ones under which collectives may still begin; number of the next collective.
        self._epochs = [Epoch(0, 0, tuple(((1.0, 1.0),) * count for count in n_nics))]
        self.next = 0
        # By epoch: the shares of the NICs, and of each rank that is ready, the first collective that it does not begin.
        self._proposed: dict[int, dict[tuple[int, int], Share]] = {}
        self._ready: dict[int, dict[int, int]] = {}
        # Of a rank that has left, the first epoch for which it has not said that it is ready, and its next collective.
        self._left: dict[int, tuple[int, int]] = {}
        self.to_say: list[int] = []
        self.wanted: Epoch | None = None

    # --- collectives

    @property
    def epoch(self) -> Epoch:
        """The last epoch that is agreed on."""
        return self._epochs[-1]

    def begin(self) -> int | None:
        """The epoch of the next collective, which begins now; None if it must wait for words of other ranks."""
        said = self._ready.get(self.epoch.number + 1, {}).get(self.rank)
        if said is not None and self.next >= said:
            return None
        while len(self._epochs) > 1 and self._epochs[1].first <= self.next:
            del self._epochs[0]
        self.next += 1
        return self._epochs[0].number

    def _find_wanted(self) -> Epoch | None:
        number = self.epoch.number + 1
        shares = self._proposed.get(number, {})
        if len(shares) < len(self._keys) or self.rank in self._ready.get(number, {}):
            return None
        return Epoch(number, -1, self._in_order(shares))

    def ready(self, ahead: int = AHEAD) -> None:
        """This rank has the plans of `wanted`, and begins so many collectives before it knows that all have."""
        wanted = self.wanted
        assert wanted is not None, "nothing is proposed"
        self.hear(_word(_READY, wanted.number, self.rank, self.next + ahead))

    @property
    def has_begun(self) -> bool:
        """True if a collective of the last epoch that is agreed on has begun."""
        return len(self._epochs) == 1

    def correct(self, shares: Shares) -> None:
        """The NICs were found to carry this in the epoch of the collective that began last; all ranks know it."""
        self._epochs[0] = self._epochs[0]._replace(shares=shares)

    @property
    def awaited(self) -> set[int]:
        """The ranks that are not known to be ready for the epoch for which this one is."""
        ready = self._ready.get(self.epoch.number + 1)
        if ready is None or self.rank not in ready:
            return set()
        return set(range(self._n_ranks)) - ready.keys() - self._left.keys()

    @property
    def leaving(self) -> Set[int]:
        """The ranks that begin no more collectives, as far as known."""
        return self._left.keys()

    def leave(self) -> None:
        """This rank begins no more collectives."""
        number = self.epoch.number + 1
        if self.rank not in self._left:
            self.hear(_word(_LEFT, number + (self.rank in self._ready.get(number, {})), self.rank, self.next))

    # --- the next epoch

    @property
    def may_propose(self) -> bool:
        """True at rank 0 once all ranks are ready for the last epoch that it has proposed."""
        last = self.epoch.number
        return self._is_possible and not self.rank and last < EPOCHS_MAX and not self._proposed.get(last + 1)

    def propose(self, shares: Shares) -> None:
        """Proposes the next epoch, in which the NICs carry this."""
        assert self.may_propose
        for (rank, nic), share in zip(self._keys, (share for nics in shares for share in nics), strict=True):
            self.hear(_word(_PROPOSAL, self.epoch.number + 1, rank, _packed(nic, share)))

    # --- words

    def words(self) -> list[int]:
        """All that a peer may not know yet, for one that has just been connected."""
        last = self.epoch.number
        words = [_word(_LEFT, number, rank, n) for rank, (number, n) in self._left.items()]
        for number in (last, last + 1):
            shares, ready = self._proposed.get(number, {}), self._ready.get(number, {})
            words += [_word(_PROPOSAL, number, rank, _packed(nic, share)) for (rank, nic), share in shares.items()]
            words += [_word(_READY, number, rank, n) for rank, n in ready.items()]
        return words

    def hear(self, word: int) -> bool:
        """Takes a word of a peer; True if it is news, which is passed on.

        A word that no rank of this job can have said is ignored.
        """
        kind, number, rank, rest = _read(word)
        key = rank, rest >> 30
        if kind == _LEFT:
            if rank in self._left or rank >= self._n_ranks:
                return False
            self._left[rank] = number, rest
        elif not 1 <= number - self.epoch.number <= 2:
            return False
        elif kind == _PROPOSAL:
            shares = self._proposed.setdefault(number, {})
            if key in shares or key not in self._keys:
                return False
            shares[key] = _share(rest)
        else:
            ready = self._ready.setdefault(number, {})
            if kind != _READY or rank in ready or rank >= self._n_ranks:
                return False
            ready[rank] = rest
        self.to_say.append(word)
        while self._agree():
            pass
        self.wanted = self._find_wanted()
        return True

    def _agree(self) -> bool:
        """The epoch that is proposed is agreed on once all ranks are known to be ready; whether it is."""
        number = self.epoch.number + 1
        left = {rank: n for rank, (first, n) in self._left.items() if first <= number}
        ready, shares = left | self._ready.get(number, {}), self._proposed.get(number, {})
        if len(ready) < self._n_ranks or len(shares) < len(self._keys):
            return False
        self._epochs.append(Epoch(number, max(ready.values()), self._in_order(shares)))
        self._ready.pop(number - 1, None)
        self._proposed.pop(number - 1, None)
        return True

    def _in_order(self, known: dict[tuple[int, int], Share]) -> Shares:
        """What is known of all NICs, by rank; those of which nothing is known carry what they should."""
        shares: list[list[Share]] = [[] for _ in range(self._n_ranks)]
        for rank, nic in self._keys:
            shares[rank].append(known.get((rank, nic), (1.0, 1.0)))
        return tuple(map(tuple, shares))


def rounded(share: Share) -> Share:
    """A share as words tell it.

    >>> rounded((0.1, 9.0))
    (0.10009765625, 7.0)
    """
    return _share(_packed(0, share))


def _packed(nic: int, share: Share) -> int:
    out, in_ = (round(min(each, SHARE_MAX) * _PARTS) for each in share)
    return nic << 30 | out << 15 | in_


def _share(rest: int) -> Share:
    return (rest >> 15 & 0x7FFF) / _PARTS, (rest & 0x7FFF) / _PARTS


def _word(kind: int, number: int, rank: int, rest: int) -> int:
    """A word of 64 bits: its kind, the epoch, a rank, and what it says."""
    return kind << 62 | number << 48 | rank << 36 | rest


def _read(word: int) -> tuple[int, int, int, int]:
    return word >> 62, word >> 48 & 0x3FFF, word >> 36 & 0xFFF, word & 0xFFFFFFFFF
