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
    trial   what two ranks say to find out which end of a rail is slow (see `TrialWord`)
    address where a NIC of the sender's listens now that its address has changed (see `AddressWord`)
    padding the receiver of this frame is to send padding over a connection (see `PaddingWord`)
    burst   the same, so many bytes at once (see `BurstWord`)
    pad     `length` bytes that mean nothing follow
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
against an attacker; the handshake (`hello`) authenticates the peer,
and records around the frames what it sends, if that is asked for (`sealing`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from enum import IntEnum
from ipaddress import IPv4Address
from typing import NamedTuple

try:
    # The same sums as zlib's, by wider instructions: 57 GB/s from the cache instead of 4.
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

Checksum = Callable[[bytes | bytearray | memoryview, int], int]
"""(bytes, checksum of the bytes before them or 0) -> checksum of both."""
crc32: Checksum = _crc32

VERSION = 12
DATA_FRAME, CHANGE_FRAME, STATE_FRAME, BYE_FRAME = range(1, 5)
GONE_FRAME, BACK_FRAME, PROBE_FRAME, DOUBT_FRAME, RATE_FRAME, NEWS_FRAME, EPOCH_FRAME = range(5, 12)
TRIAL_FRAME, PADDING_FRAME, PAD_FRAME, ADDRESS_FRAME, BURST_FRAME = range(12, 17)
CONTROL_FRAMES = (
    GONE_FRAME,
    BACK_FRAME,
    PROBE_FRAME,
    DOUBT_FRAME,
    RATE_FRAME,
    NEWS_FRAME,
    EPOCH_FRAME,
    TRIAL_FRAME,
    PADDING_FRAME,
    ADDRESS_FRAME,
    BURST_FRAME,
)
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
_RATE_PARTS, _RATE_STEPS, _TRIAL_TURNS, _ADDRESS_TURNS = (1 << 10) - 1, 1 << 10, 1 << 16, 1 << 8
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
        out, in_ = (number >> 10 & _RATE_PARTS) / _RATE_PARTS, (number & _RATE_PARTS) / _RATE_PARTS
        return cls(number >> 44, number >> 28 & RATE_RANKS_MAX - 1, number >> 20 & RATE_NICS_MAX - 1, out, in_)

    def is_after(self, turn: int) -> bool:
        """True if it was said after the word of that turn."""
        return 0 < (self.turn - turn) % RATE_TURNS < RATE_TURNS // 2


class TrialKind(IntEnum):
    """What a `TrialWord` says: a sender asks for a third rank's padding to the receiver's NIC; that has come; the NIC
    is slow; or it is so no longer."""

    ASKS, CAME, BLAMES, CLEARS = range(4)


class TrialWord(NamedTuple):
    """The number of a `TRIAL_FRAME`: the `turn`-th word of a rank is about the rail from its NIC `mine` to the peer's
    NIC `theirs` (in an answer, from that to this), which carries a `share` of what it should; padding has a `rate`,
    bytes/s.

    >>> TrialWord.read(TrialWord(3, 1, 0, TrialKind.ASKS, 1.0, 2.0**20).number)
    TrialWord(turn=3, mine=1, theirs=0, kind=<TrialKind.ASKS: 0>, share=1.0, rate=1048576.0)
    """

    turn: int
    mine: int
    theirs: int
    kind: TrialKind
    share: float
    rate: float

    @property
    def number(self) -> int:
        """All of it in 64 bits; the rate to a thousandth."""
        nics = (self.mine % RATE_NICS_MAX) << 40 | (self.theirs % RATE_NICS_MAX) << 32
        share = max(1, round(min(1.0, self.share) * _RATE_PARTS))
        return self.turn % _TRIAL_TURNS << 48 | nics | self.kind << 26 | share << 16 | _logarithm(self.rate)

    @classmethod
    def read(cls, number: int) -> TrialWord:
        """What a number says."""
        nics = RATE_NICS_MAX - 1
        return cls(
            *(number >> 48, number >> 40 & nics, number >> 32 & nics),
            *(TrialKind(number >> 26 & len(TrialKind) - 1), (number >> 16 & _RATE_PARTS) / _RATE_PARTS),
            _power(number & 0xFFFF),
        )

    def is_after(self, turn: int) -> bool:
        """True if it was said after the word of that turn."""
        return 0 < (self.turn - turn) % _TRIAL_TURNS < _TRIAL_TURNS // 2


class PaddingWord(NamedTuple):
    """The number of a `PADDING_FRAME`: the peer is to send padding over the connection `session`, so many bytes/s.

    >>> PaddingWord.read(PaddingWord(7, 2.0**20).number)
    PaddingWord(session=7, rate=1048576.0)
    """

    session: int
    rate: float

    @property
    def number(self) -> int:
        """Both in 64 bits; the rate to a thousandth."""
        return self.session << 32 | _logarithm(self.rate)

    @classmethod
    def read(cls, number: int) -> PaddingWord:
        """What a number says."""
        return cls(number >> 32, _power(number & 0xFFFF))


BURST_BYTES_MAX = 1 << 20
"""A peer sends no more padding for one word."""


class BurstWord(NamedTuple):
    """The number of a `BURST_FRAME`: the peer is to send so many bytes of padding over the connection `session`.

    >>> BurstWord.read(BurstWord(7, 1 << 20).number)
    BurstWord(session=7, n_bytes=1048576)
    """

    session: int
    n_bytes: int

    @property
    def number(self) -> int:
        """Both in 64 bits."""
        return self.session << 32 | self.n_bytes

    @classmethod
    def read(cls, number: int) -> BurstWord:
        """What a number says."""
        return cls(number >> 32, number & 0xFFFFFFFF)


class AddressWord(NamedTuple):
    """The number of an `ADDRESS_FRAME`: by the `turn`-th word of a rank about this, its NIC `nic` listens at this IPv4
    `address` and `port`.

    >>> AddressWord.read(AddressWord(3, 1, "10.0.1.9", 5000).number)
    AddressWord(turn=3, nic=1, address='10.0.1.9', port=5000)
    """

    turn: int
    nic: int
    address: str
    port: int

    @property
    def number(self) -> int:
        """All of it in 64 bits."""
        return self.turn % _ADDRESS_TURNS << 56 | self.nic << 48 | int(IPv4Address(self.address)) << 16 | self.port

    @classmethod
    def read(cls, number: int) -> AddressWord:
        """What a number says."""
        address = str(IPv4Address(number >> 16 & 0xFFFFFFFF))
        return cls(number >> 56, number >> 48 & RATE_NICS_MAX - 1, address, number & 0xFFFF)

    def is_after(self, turn: int) -> bool:
        """True if it was said after the word of that turn."""
        return 0 < (self.turn - turn) % _ADDRESS_TURNS < _ADDRESS_TURNS // 2


def _logarithm(rate: float) -> int:
    """Bytes/s, from 1 on, in 16 bits."""
    return min(round(_RATE_STEPS * math.log2(max(1.0, rate))), 0xFFFF)


def _power(logarithm: int) -> float:
    return float(2.0 ** (logarithm / _RATE_STEPS))


def pad_header(session: int, n_bytes: int) -> bytes:
    """So many bytes follow that mean nothing.

    >>> decode(pad_header(7, 5), 7)
    (14, 0, 0, 0, 0, 5, 0)
    """
    return _sealed(_DATA.pack(PAD_FRAME, 0, 0, session, 0, 0, 0, n_bytes, 0))


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
    if not DATA_FRAME <= kind <= BURST_FRAME or zero or flags > 1:
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
