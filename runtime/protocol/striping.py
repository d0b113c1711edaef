"""How a message is cut into chunks, and which rail each chunk is for. No I/O.

Both ends of a channel cut a message alike, from the length that the plan gives and the parts of the rails; nothing
about the cut goes over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from optcc.errors import InputError
from optcc.failover import RAILS_MAX
from optcc.runtime.protocol.frames import EAGER_BYTES

_PART_BYTES_MIN = 1 << 13
_CUT_ALIGNMENT = 64


class Piece(NamedTuple):
    """Bytes of a message from `start` to before `end`, and the rail that they go over."""

    start: int
    end: int
    rail: int


@dataclass(frozen=True, slots=True)
class Striping:
    """How the messages of a channel are striped over the rails of its pair, in proportion to `parts`.

    A long message has a chunk or more on every rail; short ones go whole over one rail each, in the order of `turns`.
    The failover table knows `n_turns` virtual rails and gives chunk n to virtual rail n mod `n_turns`; the sender maps
    a virtual rail to a physical one when the chunk goes out, so `parts` may change from plan to plan.

    >>> [list(piece) for piece in Striping.of([200, 100]).cut(3 << 20, 1 << 20)]
    [[0, 1048576, 0], [2097152, 3145728, 1], [1048576, 2097152, 0]]
    >>> Striping.of([2, 1, 1]).turns[:4]
    (0, 1, 2, 0)
    >>> Striping.of([2, 1, 1], 1).turns[:4]
    (1, 2, 0, 0)
    """

    parts: tuple[int, ...]
    turns: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[int], first: int = 0) -> Striping:
        """Striping in this proportion that begins with turn number `first`.

        Raises InputError for no parts, too many, or one that is not above 0.
        """
        if not 1 <= len(parts) <= RAILS_MAX:
            raise InputError(f"{len(parts)} rails: must be from 1 to {RAILS_MAX}")
        for part in parts:
            if part < 1:
                raise InputError(f"rate {part} B/s: must be at least 1")
        turns = _turns(tuple(parts))
        first %= len(turns)
        return cls(tuple(parts), turns[first:] + turns[:first])

    @classmethod
    def only(cls, rail: int, n_rails: int) -> Striping:
        """Striping over one rail of `n_rails` alone.

        >>> [list(piece) for piece in Striping.only(1, 2).cut(1 << 20, 1 << 19)]
        [[0, 524288, 1], [524288, 1048576, 1]]
        """
        parts = tuple(int(number == rail) for number in range(n_rails))
        return cls(parts, (rail,) * (1 if n_rails == 1 else RAILS_MAX))

    @classmethod
    def among(cls, parts: Sequence[int], first: int = 0) -> Striping:
        """Striping in this proportion, over the rails alone that have a part above 0, as long as they are up.

        >>> Striping.among([0, 2, 1]).turns[:4], Striping.among([0, 2, 1]).is_fixed
        ((1, 2, 1, 1), True)
        """
        rails = [rail for rail, part in enumerate(parts) if part]
        chosen = cls.of([parts[rail] for rail in rails], first)
        if len(rails) == len(parts):
            return chosen
        turns = tuple(rails[turn] for turn in chosen.turns)
        return cls(tuple(parts), turns * (RAILS_MAX // len(turns)))

    @property
    def is_fixed(self) -> bool:
        """True if it is over some rails alone, whatever the rates."""
        return 0 in self.parts

    @property
    def n_turns(self) -> int:
        """Virtual rails, those of the failover table."""
        return len(self.turns)

    @property
    def cut_bytes_min(self) -> int:
        """Messages of at least this size are striped over all rails; shorter ones go over one rail each."""
        return max(len(self.parts) * _PART_BYTES_MIN, EAGER_BYTES + 1)

    def cut(self, n_bytes: int, chunk_bytes: int) -> tuple[Piece, ...]:
        """The pieces of a message, in the order in which they go out. Both ends cut alike, from the length that the
        plan gives."""
        return _cut(self.parts, n_bytes, chunk_bytes)


class Striped(Protocol):
    """A channel: its striping, and how many of its messages went whole over one rail."""

    striping: Striping
    n_whole: int


def cut(channel: Striped, n_bytes: int, chunk_bytes: int) -> Sequence[Piece]:
    """The pieces of the next message of a channel, alike at both ends."""
    striping = channel.striping
    if n_bytes >= striping.cut_bytes_min or n_bytes > chunk_bytes:
        return striping.cut(n_bytes, chunk_bytes)
    rail = striping.turns[channel.n_whole % striping.n_turns]
    channel.n_whole += 1
    return (Piece(0, n_bytes, rail),)


@lru_cache(maxsize=1024)
def _cut(parts: tuple[int, ...], n_bytes: int, chunk_bytes: int) -> tuple[Piece, ...]:
    total, so_far, at = sum(parts), 0, 0
    # By the place of its middle on its rail: floating-point numbers are exact enough to order those of 2^25 pieces.
    pieces: list[tuple[float, Piece]] = []
    for rail, part in enumerate(parts):
        if not part:
            continue
        so_far += part
        rail_end = n_bytes if so_far == total else n_bytes * so_far // total // _CUT_ALIGNMENT * _CUT_ALIGNMENT
        count = max(1, -(-(rail_end - at) // chunk_bytes))
        begin, length = at, rail_end - at
        for i in range(count):
            end = rail_end if i == count - 1 else begin + length * (i + 1) // count // _CUT_ALIGNMENT * _CUT_ALIGNMENT
            pieces.append(((2 * i + 1) / (2 * count), Piece(at, max(at, end), rail)))
            at = max(at, end)
    return tuple(piece for _, piece in sorted(pieces))


@lru_cache(maxsize=1024)
def _turns(parts: tuple[int, ...]) -> tuple[int, ...]:
    return interleave(count_turns(parts, 1 if len(parts) == 1 else RAILS_MAX))


def count_turns(rates: Sequence[int], n_turns: int) -> list[int]:
    """Turns of each rail, at least one, the rest where they are missed most."""
    total = sum(rates)
    counts = [1] * len(rates)
    for _ in range(n_turns - len(rates)):
        # In units of 1 / total: whole numbers.
        missed = [rate * n_turns - count * total for rate, count in zip(rates, counts, strict=True)]
        counts[missed.index(max(missed))] += 1
    return counts


def interleave(counts: Sequence[int]) -> tuple[int, ...]:
    """Each rail as often as `counts` says, spread evenly."""
    places = [((2 * turn + 1) / (2 * count), rail) for rail, count in enumerate(counts) for turn in range(count)]
    return tuple(rail for _, rail in sorted(places))
