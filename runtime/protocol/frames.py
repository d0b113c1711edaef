"""The frames of a connection: their layout, encoding and checks. No I/O.

A connection carries the data of one direction of one pair of ranks over one rail. Towards the receiver go

    data    chunk `number` of a channel, in an epoch, and its bytes
    change  the proposal of an epoch
    state   (only before short data frames) the state of a channel of the opposite direction
    data and state   both in one frame: a short chunk, and the state of a channel of the opposite direction

and towards the sender

    state   how many chunks of a channel were delivered, in which epoch, and how many slots were posted

and in both directions control frames about connections, NICs and ranks:

    gone    the connection with session `number` was given up
    back    the sender's NIC `number` can be reached again
    probe   no content; its TCP acknowledgement is the answer
    doubt   the connection with session `number` (low 32 bits; a count above) is suspected, or no longer
    rate    the measured rates of a NIC (see `RateWord`)
    news    eight bytes of what the sender knows of failures (see `membership`)
    epoch   what some rank says of the epochs of the job (see `agreement`)
    bye     the last frame of a rank that closes

A header is 36 bytes, little-endian, as the processors are that this runs on:

    data, change, ...   kind u8, flags u8, 0 u16, session u32, epoch u32, channel u32, number u64, length u32,
                        checksum of the chunk u32, crc of the header u32
    state               kind u8, flags u8, 0 u16, session u32, epoch u32, channel u32, number u64, slots u64,
                        crc of the header u32

or, of data and state, 60 bytes:

                        kind u8, flags u8, 0 u16, session u32, epoch u32, channel u32, number u64, length u32,
                        checksum of the chunk u32, then channel u32, epoch u32, number u64, slots u64 of the state,
                        crc of the header u32

crc is CRC-32, of a chunk as of a header; that of a chunk is 0 unless the flag CHECKED is set. A length is compared with
that of the posted slot and never used to allocate more than an eager message. A checksum protects against errors, not
against an attacker; the handshake (`hello`) authenticates the peer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

try:
    # The same sums as zlib's, by wider instructions: 57 GB/s from the cache instead of 4.
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

Checksum = Callable[[bytes | bytearray | memoryview, int], int]
"""(bytes, checksum of the bytes before them or 0) -> checksum of both."""
crc32: Checksum = _crc32

VERSION = 8
DATA_FRAME, CHANGE_FRAME, STATE_FRAME, BYE_FRAME = range(1, 5)
GONE_FRAME, BACK_FRAME, PROBE_FRAME, DOUBT_FRAME, RATE_FRAME, NEWS_FRAME, EPOCH_FRAME = range(5, 12)
CONTROL_FRAMES = (GONE_FRAME, BACK_FRAME, PROBE_FRAME, DOUBT_FRAME, RATE_FRAME, NEWS_FRAME, EPOCH_FRAME)
"""Frames about connections, NICs and ranks rather than about a channel."""
DATA_STATE_FRAME = 0x30
"""One flipped bit makes it of no other kind, nor any other of it: a header of another length would be waited for."""
CHECKED = 1
"""Flag of a data frame: the chunk has a checksum."""
FAILED = 1
"""Flag of a bye: the rank closes because of a failure."""
CHANNELS_MAX = 1 << 20
"""Channels of one direction of a pair; a frame with a larger number is refused as damaged."""
EXCHANGE = 1 << 31
"""The channel of `allgather` and `barrier`; plans have the channels below."""

EAGER_BYTES = 1 << 14
"""Eager messages: up to this size they are sent from a copy and reported as sent once they are out and have a slot."""
EARLY_CHUNKS_MAX = 4
"""Eager messages of a channel that may be out before their slots are posted; the receiver buffers them."""

RATE_RANKS_MAX, RATE_NICS_MAX = 1 << 16, 1 << 8
"""Ranks, and NICs of a rank, whose rates can be told."""
RATE_TURNS = 1 << 20
"""Words about the rates of a NIC are counted modulo this."""

_DATA = struct.Struct("<BBHIIIQII")
_STATE = struct.Struct("<BBHIIIQQ")
_CRC = struct.Struct("<I")
_RATE_PARTS = (1 << 10) - 1
_SEALED_DATA = struct.Struct("<BBHIIIQIII")
_SEALED_STATE = struct.Struct("<BBHIIIQQI")
_DATA_STATE = struct.Struct("<BBHIIIQIIIIQQ")
_SEALED_DATA_STATE = struct.Struct("<BBHIIIQIIIIQQI")
_BODY_BYTES = _DATA.size
_LONG_BODY_BYTES = _DATA_STATE.size
HEADER_BYTES = _SEALED_DATA.size
DATA_STATE_BYTES = _SEALED_DATA_STATE.size
"""Bytes of the header of data and state."""


class WireError(Exception):
    """Received bytes violate the protocol; the connection must be closed."""


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
    """The last frame of this connection and of all others from this rank."""
    return _sealed(_DATA.pack(BYE_FRAME, FAILED if failed else 0, 0, session, 0, 0, 0, 0, 0))


def control_header(session: int, kind: int, number: int) -> bytes:
    """One of `CONTROL_FRAMES`: the connection `number` is gone, the NIC `number` is back, a probe, a doubt, or a rate.

    >>> decode(control_header(7, GONE_FRAME, 99), 7)[:5]
    (5, 0, 0, 0, 99)
    """
    return _sealed(_DATA.pack(kind, 0, 0, session, 0, 0, number, 0, 0))


class RateWord(NamedTuple):
    """The number of a `RATE_FRAME`: the `turn`-th word of `rank` about its NIC `nic` says which shares of its declared
    rates it sends and receives, at most 1 each; both are 0 if it is down.

    >>> RateWord.read(RateWord(3, 7, 1, 1.0, 1 / 3).number) == RateWord(3, 7, 1, 1.0, 341 / 1023)
    True
    """

    turn: int
    rank: int
    nic: int
    out: float
    in_: float

    @property
    def number(self) -> int:
        """All of it in 64 bits; a share that is not 0 is not told as 0."""
        out, in_ = (max(1, round(share * _RATE_PARTS)) if share else 0 for share in (self.out, self.in_))
        return self.turn % RATE_TURNS << 44 | self.rank << 28 | self.nic << 20 | out << 10 | in_

    @classmethod
    def read(cls, number: int) -> RateWord:
        """What a number says."""
        out, in_ = ((number >> shift & _RATE_PARTS) / _RATE_PARTS for shift in (10, 0))
        return cls(number >> 44, number >> 28 & RATE_RANKS_MAX - 1, number >> 20 & RATE_NICS_MAX - 1, out, in_)

    def is_after(self, turn: int) -> bool:
        """True if it was said after the word of that turn."""
        return 0 < (self.turn - turn) % RATE_TURNS < RATE_TURNS // 2


def state_header(session: int, epoch: int, channel: int, number: int, slots: int) -> bytes:
    """What a receiver has delivered, and how many slots it has posted.

    >>> decode(state_header(7, 1, 2, 3, 9), 7)
    (3, 0, 1, 2, 3, 9, 0)
    """
    body = _STATE.pack(STATE_FRAME, 0, 0, session, epoch, channel, number, slots)
    return body + _CRC.pack(crc32(body, 0))


State = tuple[int, int, int, int]
"""(channel, epoch, chunks delivered, slots posted)."""


def data_state_header(
    session: int, epoch: int, channel: int, number: int, length: int, crc: int | None, state: State
) -> bytes:
    """The header of a short chunk, with a state of the opposite direction.

    >>> decode_data_state(data_state_header(7, 1, 2, 3, 5, None, (4, 1, 8, 9)), 7)
    ((1, 0, 1, 2, 3, 5, 0), (4, 1, 8, 9))
    """
    flags, crc = (0, 0) if crc is None else (CHECKED, crc)
    body = _DATA_STATE.pack(DATA_STATE_FRAME, flags, 0, session, epoch, channel, number, length, crc, *state)
    return body + _CRC.pack(crc32(body, 0))


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(crc32(body, 0))


Header = tuple[int, int, int, int, int, int, int]
"""(kind, flags, epoch, channel, number, length or slots, crc of the chunk)."""


def decode(data: bytes | bytearray | memoryview, session: int, at: int = 0) -> Header:
    """Decodes the header at byte `at`; raises WireError if it is damaged or of another connection."""
    if data[at] == STATE_FRAME:
        kind, flags, zero, its_session, epoch, channel, number, last, seal = _SEALED_STATE.unpack_from(data, at)
        crc = 0
    else:
        kind, flags, zero, its_session, epoch, channel, number, last, crc, seal = _SEALED_DATA.unpack_from(data, at)
    if seal != crc32(data[at : at + _BODY_BYTES], 0):
        raise WireError("header: wrong checksum")
    if its_session != session:
        raise WireError("header: of another connection")
    if not DATA_FRAME <= kind <= EPOCH_FRAME or zero or flags > 1:
        raise WireError(f"header: kind {kind}, flags {flags}: unknown")
    return kind, flags, epoch, channel, number, last, crc


def decode_data_state(data: bytes | bytearray | memoryview, session: int, at: int = 0) -> tuple[Header, State]:
    """Decodes the header of data and state at byte `at`, as one of data and a state; raises as `decode`."""
    _, flags, zero, its_session, epoch, channel, number, length, crc, k, its_epoch, delivered, slots, seal = (
        _SEALED_DATA_STATE.unpack_from(data, at)
    )
    if seal != crc32(data[at : at + _LONG_BODY_BYTES], 0):
        raise WireError("header: wrong checksum")
    if its_session != session:
        raise WireError("header: of another connection")
    if zero or flags > 1:
        raise WireError(f"header: kind {DATA_STATE_FRAME}, flags {flags}: unknown")
    return (DATA_FRAME, flags, epoch, channel, number, length, crc), (k, its_epoch, delivered, slots)
