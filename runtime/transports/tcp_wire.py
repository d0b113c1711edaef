"""The wire of the TCP transport: its frames, the hello of a connection, and how messages are cut. No I/O.

A connection carries the messages of one direction of one pair of ranks over one rail. Towards the receiver go

    data    chunk `number` of a channel, in an epoch, and its bytes
    change  the proposal of an epoch

and back comes only

    state   how many chunks of a channel the application has, in which epoch, and for how many it has given slots

unless there is a short message for the same peer, which takes it along, and either way

    gone    the connection `number` (its session) between the two has been given up
    back    the sender's NIC `number` can be reached again
    probe   nothing; whoever gets it has acknowledged it
    doubt   the connection `number` (its session, and a count above it) is in doubt, or no longer
    rate    what a NIC of the sender has turned out to carry (see `rate_word`)
    bye     the last frame of a rank that closes

A header is 36 bytes, big-endian:

    data, change, ...   kind u8, flags u8, 0 u16, session u32, epoch u32, channel u32, number u64, length u32,
                        checksum of the chunk u32, crc of the header u32
    state               kind u8, flags u8, 0 u16, session u32, epoch u32, channel u32, number u64, slots u64,
                        crc of the header u32

crc is CRC-32, of a chunk as of a header; that of a chunk is 0 unless the flag CHECKED is set. A length is only compared
with that of the slot. A checksum is no protection against intent; the hello is, and only for who is at the other end.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from optcc.errors import InputError
from optcc.failover import RAILS_MAX

try:
    # The same sums as zlib's, by wider instructions: 57 GB/s from the cache instead of 4.
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

Checksum = Callable[[bytes | bytearray | memoryview, int], int]
"""The checksum of some bytes that follow others, whose checksum it is given; 0 if they follow none."""
crc32: Checksum = _crc32

VERSION = 5
DATA_FRAME, CHANGE_FRAME, STATE_FRAME, BYE_FRAME, GONE_FRAME, BACK_FRAME, PROBE_FRAME, DOUBT_FRAME, RATE_FRAME = range(
    1, 10
)
WORDS = (GONE_FRAME, BACK_FRAME, PROBE_FRAME, DOUBT_FRAME, RATE_FRAME)
"""Frames from one rank to another that are about their connections and not about a channel."""
CHECKED = 1
"""Flag of a data frame: the chunk has a checksum."""
FAILED = 1
"""Flag of a bye: the rank closes because of a failure."""
CHANNELS_MAX = 1 << 20
"""Channels of one direction of a pair; no number beyond is believed."""
EXCHANGE = 1 << 31
"""The channel of the small exchanges, beside those of the plans."""

EAGER_BYTES = 1 << 14
"""Messages up to this are sent from a copy, and count as sent once they are on their way to a slot."""
EARLY_CHUNKS_MAX = 4
"""So many of them, on a channel, may go out before there are slots; the receiver keeps them until there are."""

RATE_NICS_MAX = 1 << 16
"""NICs of a rank of which it can be told what they carry."""

_DATA = struct.Struct("!BBHIIIQII")
_STATE = struct.Struct("!BBHIIIQQ")
_CRC = struct.Struct("!I")
_RATE_PARTS = 10_000
_SEALED_DATA = struct.Struct("!BBHIIIQIII")
_SEALED_STATE = struct.Struct("!BBHIIIQQI")
_BODY_BYTES = _DATA.size
HEADER_BYTES = _SEALED_DATA.size

SECRET_BYTES = 32
JOB_BYTES = 16
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAGIC = b"optcc-tc"
_HELLO = struct.Struct(f"!8sHHII{JOB_BYTES}s{_NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
ANSWER_BYTES = _NONCE_BYTES + _MAC_BYTES
PROOF_BYTES = _MAC_BYTES

TURN_TOLERANCE = Fraction(1, 10)
PIECE_BYTES_MIN = 1 << 16
"""A message is not cut into pieces below this only to use more rails."""
_PART_BYTES_MIN = 1 << 13
_CUT_ALIGNMENT = 64


class WireError(Exception):
    """What has come over a connection is not what it must be; the connection is of no more use."""


def data_header(session: int, epoch: int, channel: int, number: int, length: int, crc: int | None) -> bytes:
    """The header of a chunk; with its checksum unless that is None.

    >>> decode(data_header(7, 1, 2, 3, 5, None), 7)
    (1, 0, 1, 2, 3, 5, 0)
    """
    flags, crc = (0, 0) if crc is None else (CHECKED, crc)
    body = _DATA.pack(DATA_FRAME, flags, 0, session, epoch, channel, number, length, crc)
    return body + _CRC.pack(crc32(body, 0))


def change_header(session: int, epoch: int, channel: int) -> bytes:
    """The proposal of an epoch."""
    return _sealed(_DATA.pack(CHANGE_FRAME, 0, 0, session, epoch, channel, 0, 0, 0))


def bye_header(session: int, failed: bool) -> bytes:
    """The end of a connection, and of all others from this rank."""
    return _sealed(_DATA.pack(BYE_FRAME, FAILED if failed else 0, 0, session, 0, 0, 0, 0, 0))


def word_header(session: int, kind: int, number: int) -> bytes:
    """One of `WORDS`: the connection `number` is gone, the NIC `number` is back, a probe, a doubt, or a rate.

    >>> decode(word_header(7, GONE_FRAME, 99), 7)[:5]
    (5, 0, 0, 0, 99)
    """
    return _sealed(_DATA.pack(kind, 0, 0, session, 0, 0, number, 0, 0))


def rate_word(count: int, nic: int, share: float) -> int:
    """The number of a `RATE_FRAME`: the `count`-th word of a rank about rates says which share of its declared rate, at
    most 1, a NIC below `RATE_NICS_MAX` sends; 0 if it is down.

    >>> read_rate_word(rate_word(3, 1, 0.25))
    (3, 1, 0.25)
    """
    return count << 32 | nic << 16 | (max(1, round(share * _RATE_PARTS)) if share else 0)


def read_rate_word(number: int) -> tuple[int, int, float]:
    """What `rate_word` was given."""
    return number >> 32, number >> 16 & RATE_NICS_MAX - 1, (number & 0xFFFF) / _RATE_PARTS


def state_header(session: int, epoch: int, channel: int, number: int, slots: int) -> bytes:
    """What a receiver has, and for how much it has room.

    >>> decode(state_header(7, 1, 2, 3, 9), 7)
    (3, 0, 1, 2, 3, 9, 0)
    """
    body = _STATE.pack(STATE_FRAME, 0, 0, session, epoch, channel, number, slots)
    return body + _CRC.pack(crc32(body, 0))


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(crc32(body, 0))


Header = tuple[int, int, int, int, int, int, int]
"""(kind, flags, epoch, channel, number, length or slots, crc of the chunk)."""


def decode(data: bytes | bytearray | memoryview, session: int, at: int = 0) -> Header:
    """What the header says that begins at byte `at`; raises WireError if it is damaged or of another connection."""
    if data[at] == STATE_FRAME:
        kind, flags, zero, its_session, epoch, channel, number, last, seal = _SEALED_STATE.unpack_from(data, at)
        crc = 0
    else:
        kind, flags, zero, its_session, epoch, channel, number, last, crc, seal = _SEALED_DATA.unpack_from(data, at)
    if seal != crc32(data[at : at + _BODY_BYTES], 0):
        raise WireError("header: wrong checksum")
    if its_session != session:
        raise WireError("header: of another connection")
    if not DATA_FRAME <= kind <= RATE_FRAME or zero or flags > 1:
        raise WireError(f"header: kind {kind}, flags {flags}: unknown")
    return kind, flags, epoch, channel, number, last, crc


# --- the hello --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """What a connection is for: from `src` to `dst`, over the `rail`-th rail that they have in common, in `job`."""

    src: int
    dst: int
    rail: int
    job: bytes


class Caller:
    """The end that opens the connection: sends `opening`, takes the answer, and sends what `take` returns.

    Both ends prove that they know the secret, over both nonces and all that the hello says, each under a label of its
    own, so that an answer sent back is no proof.

    >>> secret, hello = bytes(32), Hello(0, 1, 0, bytes(16))
    >>> caller = Caller(secret, hello, nonce=bytes(32))
    >>> doorman = Doorman(secret, nonce=bytes(range(32)))
    >>> doorman.take_proof(caller.take(doorman.take_hello(caller.opening)))
    >>> doorman.hello == hello, doorman.session == caller.session
    (True, True)
    """

    def __init__(self, secret: bytes, hello: Hello, *, nonce: bytes) -> None:
        self._secret = secret
        self.opening = _HELLO.pack(_MAGIC, VERSION, hello.rail, hello.src, hello.dst, hello.job, nonce)
        self.session = 0

    def take(self, answer: bytes) -> bytes:
        """The proof that answers the answer; raises WireError if the other end does not know the secret."""
        transcript = self.opening + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(self._secret, b"answer", transcript)):
            raise WireError("hello: the other end does not know the secret of this job")
        self.session = _session(self._secret, transcript)
        return _mac(self._secret, b"proof", transcript)


class Doorman:
    """The end that is called: takes the hello, answers it, and takes the proof."""

    def __init__(self, secret: bytes, *, nonce: bytes) -> None:
        self._secret, self._nonce = secret, nonce
        self._transcript = b""
        self.hello: Hello | None = None
        self.session = 0

    def take_hello(self, opening: bytes) -> bytes:
        """The answer; raises WireError if this is no hello of this version."""
        magic, version, rail, src, dst, job, _ = _HELLO.unpack(opening)
        if magic != _MAGIC:
            raise WireError("hello: not one of optcc")
        if version != VERSION:
            raise WireError(f"hello: version {version}: must be {VERSION}")
        self.hello = Hello(src, dst, rail, job)
        self._transcript = opening + self._nonce
        return self._nonce + _mac(self._secret, b"answer", self._transcript)

    def take_proof(self, proof: bytes) -> None:
        """Raises WireError unless the caller knows the secret; then `session` is that of both."""
        if not hmac.compare_digest(proof, _mac(self._secret, b"proof", self._transcript)):
            raise WireError("hello: the caller does not know the secret of this job")
        self.session = _session(self._secret, self._transcript)


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, hashlib.sha256)


def _session(secret: bytes, transcript: bytes) -> int:
    return int.from_bytes(_mac(secret, b"session", transcript)[:4], "big")


# --- cutting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stripes:
    """How the chunks of a channel fall on rails of unequal rates.

    The failover table gives chunk n to its rail n mod R. Its rails are the *turns* here: each stands for a real rail, a
    faster one for more turns, so that R turns in a row come within a tenth of the proportion of the rates; `weights`
    are the relative lengths of the pieces of one message that make it exact.

    >>> Stripes.of([200, 100]).turns
    (0, 1, 0)
    >>> Stripes.of([1, 1, 1]).turns
    (0, 1, 2)
    """

    turns: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, rates: Sequence[int]) -> Stripes:
        """The stripes for rails of these rates; raises InputError for none, too many, or a rate that is not above 0."""
        if not 1 <= len(rates) <= RAILS_MAX:
            raise InputError(f"{len(rates)} rails: must be from 1 to {RAILS_MAX}")
        for rate in rates:
            if rate < 1:
                raise InputError(f"rate {rate} B/s: must be at least 1")
        candidates = [_counts(rates, n_turns) for n_turns in range(len(rates), RAILS_MAX + 1)]
        counts = next((each for each in candidates if _error(rates, each) <= TURN_TOLERANCE), None)
        if counts is None:
            counts = min(candidates, key=lambda each: _error(rates, each))
        common = lcm(*counts)
        turns = _interleave(counts)
        return cls(turns, tuple(rates[rail] * (common // counts[rail]) for rail in turns))

    def cut(self, n_bytes: int, first: int, chunk_bytes: int) -> list[tuple[int, int]]:
        """Where the pieces of a message begin and end, the first of which is chunk `first` of its channel.

        A message of no bytes is one piece. Both ends cut alike, from the length that the plan gives.

        >>> Stripes.of([200, 100]).cut(3 << 20, 0, 1 << 20)
        [(0, 1048576), (1048576, 2097152), (2097152, 3145728)]
        >>> Stripes.of([3, 1]).cut(100, 5, 1 << 20)
        [(0, 100)]
        """
        if n_bytes <= chunk_bytes and n_bytes < PIECE_BYTES_MIN:
            return [(0, n_bytes)]
        n_turns = len(self.turns)
        count = -(-n_bytes // chunk_bytes)
        if len(set(self.turns)) > 1:
            count = max(count, min(n_turns, n_bytes // PIECE_BYTES_MIN))
            if count >= n_turns:
                count = -(-count // n_turns) * n_turns
        count = max(1, count)
        if count % n_turns:
            weights = [1] * count
        else:
            weights = [self.weights[(first + i) % n_turns] for i in range(count)]
        total, so_far, at = sum(weights), 0, 0
        pieces: list[tuple[int, int]] = []
        for weight in weights:
            so_far += weight
            end = n_bytes if so_far == total else n_bytes * so_far // total // _CUT_ALIGNMENT * _CUT_ALIGNMENT
            pieces.append((at, max(at, end)))
            at = pieces[-1][1]
        return pieces


class Piece(NamedTuple):
    """Bytes of a message from `start` to before `end`, and the rail that they go over."""

    start: int
    end: int
    rail: int


@dataclass(frozen=True, slots=True)
class Shares:
    """How the messages of a channel are divided between rails: each rail has a part of every message, or of short ones
    every so many. The failover table gives chunk n to its rail n mod `n_turns`, which is a name: the sender says which
    rail it stands for when the chunk goes out, so that `parts` may differ from plan to plan.

    >>> [list(piece) for piece in Shares.of([200, 100]).cut(3 << 20, 1 << 20)]
    [[0, 1048576, 0], [2097152, 3145728, 1], [1048576, 2097152, 0]]
    >>> Shares.of([2, 1, 1]).turns[:4]
    (0, 1, 2, 0)
    >>> Shares.of([2, 1, 1], 1).turns[:4]
    (1, 2, 0, 0)
    """

    parts: tuple[int, ...]
    turns: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[int], first: int = 0) -> Shares:
        """Shares in this proportion, of whose turns the one of this number comes first; raises InputError for none, too
        many, or one that is not above 0."""
        if not 1 <= len(parts) <= RAILS_MAX:
            raise InputError(f"{len(parts)} rails: must be from 1 to {RAILS_MAX}")
        for part in parts:
            if part < 1:
                raise InputError(f"rate {part} B/s: must be at least 1")
        turns = _interleave(_counts(parts, 1 if len(parts) == 1 else RAILS_MAX))
        first %= len(turns)
        return cls(tuple(parts), turns[first:] + turns[:first])

    @property
    def n_turns(self) -> int:
        """Rails of the failover table."""
        return len(self.turns)

    @property
    def are_equal(self) -> bool:
        """True if every rail has the same share."""
        return len(set(self.parts)) == 1

    @property
    def cut_bytes_min(self) -> int:
        """From so many bytes on every rail has its part of a message; shorter ones go over one rail, each in turn."""
        return max(len(self.parts) * _PART_BYTES_MIN, EAGER_BYTES + 1)

    def cut(self, n_bytes: int, chunk_bytes: int) -> tuple[Piece, ...]:
        """The pieces of a message, in the order in which they go out. Both ends cut alike, from the length that the
        plan gives."""
        return _cut(self.parts, n_bytes, chunk_bytes)


@lru_cache(maxsize=1024)
def _cut(parts: tuple[int, ...], n_bytes: int, chunk_bytes: int) -> tuple[Piece, ...]:
    total, so_far, at = sum(parts), 0, 0
    pieces: list[tuple[Fraction, Piece]] = []
    for rail, part in enumerate(parts):
        so_far += part
        rail_end = n_bytes if so_far == total else n_bytes * so_far // total // _CUT_ALIGNMENT * _CUT_ALIGNMENT
        count = max(1, -(-(rail_end - at) // chunk_bytes))
        begin, length = at, rail_end - at
        for i in range(count):
            end = rail_end if i == count - 1 else begin + length * (i + 1) // count // _CUT_ALIGNMENT * _CUT_ALIGNMENT
            pieces.append((Fraction(2 * i + 1, 2 * count), Piece(at, max(at, end), rail)))
            at = max(at, end)
    return tuple(piece for _, piece in sorted(pieces))


def _counts(rates: Sequence[int], n_turns: int) -> list[int]:
    """Turns of each rail, at least one, the rest where they are missed most."""
    total = sum(rates)
    counts = [1] * len(rates)
    for _ in range(n_turns - len(rates)):
        missed = [Fraction(rate * n_turns, total) - count for rate, count in zip(rates, counts, strict=True)]
        counts[missed.index(max(missed))] += 1
    return counts


def _error(rates: Sequence[int], counts: Sequence[int]) -> Fraction:
    """The largest relative deviation from the proportion of the rates."""
    total, n_turns = sum(rates), sum(counts)
    return max(abs(Fraction(count * total, rate * n_turns) - 1) for rate, count in zip(rates, counts, strict=True))


def _interleave(counts: Sequence[int]) -> tuple[int, ...]:
    """Each rail as often as `counts` says, spread evenly."""
    places = [(Fraction(2 * turn + 1, 2 * count), rail) for rail, count in enumerate(counts) for turn in range(count)]
    return tuple(rail for _, rail in sorted(places))
