"""The frames of a connection: every damaged bit is noticed, and checksums are zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from optcc.runtime.protocol.frames import (
    BYE_FRAME,
    CHECKED,
    CONTROL_FRAMES,
    DATA_FRAME,
    DATA_STATE_BYTES,
    DATA_STATE_FRAME,
    HEADER_BYTES,
    RATE_FRAME,
    RATE_TURNS,
    RateWord,
    WireError,
    bye_header,
    change_header,
    control_header,
    crc32,
    data_header,
    data_state_header,
    decode,
    decode_data_state,
    state_header,
)


def test_a_damaged_header_is_no_header() -> None:
    headers = (data_header(9, 1, 2, 3, 4, 5), change_header(9, 1, 2), bye_header(9, True), state_header(9, 1, 2, 3, 4))
    for header in headers:
        assert len(header) == HEADER_BYTES
        decode(header, 9)
        with pytest.raises(WireError, match="of another connection"):
            decode(header, 8)
        for bit in range(8 * len(header)):
            damaged = bytearray(header)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                decode(damaged, 9)
            assert damaged[0] != DATA_STATE_FRAME, "more bytes would be waited for"
    assert decode(headers[2], 9)[:2] == (BYE_FRAME, 1)


def test_a_damaged_header_of_data_and_state_is_none() -> None:
    header = data_state_header(9, 1, 2, 3, 4, 5, (6, 7, 8, 10))
    assert len(header) == DATA_STATE_BYTES
    assert decode_data_state(header, 9) == ((DATA_FRAME, CHECKED, 1, 2, 3, 4, 5), (6, 7, 8, 10))
    with pytest.raises(WireError, match="of another connection"):
        decode_data_state(header, 8)
    with pytest.raises(WireError):
        decode(header, 9)
    for bit in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            (decode_data_state if damaged[0] == DATA_STATE_FRAME else decode)(damaged, 9)


def test_control_frames_are_of_the_size_of_the_others_and_keep_their_numbers() -> None:
    for kind in CONTROL_FRAMES:
        for number in (0, 1, (1 << 64) - 1):
            header = control_header(9, kind, number)
            assert len(header) == HEADER_BYTES
            assert decode(header, 9) == (kind, 0, 0, 0, number, 0, 0)
    for rank, nic, out, in_ in ((0, 0, 0.0, 0.0), (2**16 - 1, 2**8 - 1, 1.0, 1.0), (7, 3, 0.25, 1e-9)):
        for count in (1, RATE_TURNS - 1):
            said = RateWord(count, rank, nic, out, in_)
            kind, _, _, _, number, _, _ = decode(control_header(9, RATE_FRAME, said.number), 9)
            heard = RateWord.read(number)
            assert kind == RATE_FRAME and heard[:3] == said[:3]
            assert heard[3:] == pytest.approx((out, in_), abs=1e-3) and all(heard[3:]) == all(said[3:])


def test_wide_checksums_are_those_of_zlib() -> None:
    data = np.random.default_rng(5).integers(0, 256, 100_003, np.uint8)
    for n_bytes in (0, 1, 32, 1000, 100_003):
        view = data[:n_bytes].data
        assert crc32(view, 0) == zlib.crc32(view)
        assert crc32(view[n_bytes // 3 :], crc32(view[: n_bytes // 3], 0)) == zlib.crc32(view)
