"""A chunk condensed to a record of a size that is known before, and read again.

Elements are those of the plan's type. Sums are added up in double precision from blocks of `_BLOCK` elements, so that
the same bytes give the same record at every rank and in the interpreter.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.collective import FLOATS, check_dtype
from optcc.runtime.kernels import from_bfloat16
from optcc.runtime.stored_types import stored_dtype
from optcc.runtime.taps.policy import CHECKSUM, FULL, GUARD, HISTOGRAM, NORMS, SAMPLE

try:  # ten times as fast, and the same number
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    _crc32 = zlib.crc32

_BLOCK = 1 << 14
"""Elements that are looked at at once: they stay in the nearest caches."""
EXPONENT_MIN, EXPONENT_MAX = -40, 23
N_BINS = EXPONENT_MAX - EXPONENT_MIN + 3
"""Bins of a histogram: zeros; elements x with 2^(e-1) <= |x| < 2^e for each exponent e, the first and the last of them
with all that is below or above; what is not finite."""
_NORMS = struct.Struct("<q3d2q")
_GUARD = struct.Struct("<4q")
_CHECKSUM = struct.Struct("<Q")
Bytes = npt.NDArray[np.uint8]


class Norms(NamedTuple):
    """Of a chunk: how many elements, the sum of their squares, the least and the largest (NaN if one is), and how many
    are NaN and infinite."""

    n: int
    square_sum: float
    least: float
    largest: float
    n_nan: int
    n_inf: int


class NonFinite(NamedTuple):
    """Of a chunk: how many elements, how many are NaN, how many infinite, and which is the first of these, or -1."""

    n: int
    n_nan: int
    n_inf: int
    first: int


def record_bytes(what: str, chunk_bytes: int, dtype: str, stride: int) -> int:
    """The length of a record of a chunk of `chunk_bytes`, bytes."""
    if what == FULL:
        return chunk_bytes
    if what == SAMPLE:
        itemsize = check_dtype(dtype)
        return -(-(chunk_bytes // itemsize) // stride) * itemsize
    return {NORMS: _NORMS.size, HISTOGRAM: 8 * N_BINS, CHECKSUM: _CHECKSUM.size, GUARD: _GUARD.size}[what]


def condenser(what: str, dtype: str, stride: int) -> Callable[[Bytes, Bytes], None]:
    """What writes the record of a chunk: (where to, the chunk), both bytes."""
    if what == FULL:
        return _copy
    if what == SAMPLE:
        return partial(_sample, stored_dtype(dtype), stride)
    if what == CHECKSUM:
        return _checksum
    wide = _widener(dtype)
    return partial({NORMS: _norms, HISTOGRAM: _histogram, GUARD: _guard}[what], wide)


def condense(what: str, chunk: Bytes, dtype: str, stride: int) -> bytes:
    """The record of a chunk."""
    made = np.zeros(record_bytes(what, chunk.nbytes, dtype, stride), dtype=np.uint8)
    condenser(what, dtype, stride)(made, chunk)
    return made.tobytes()


def value_of(what: str, data: bytes, dtype: str) -> Any:
    """What a record says: an array of elements (a bfloat16 as its bits), `Norms`, an array of counts, a number, or
    `NonFinite`."""
    if what in (FULL, SAMPLE):
        return np.frombuffer(data, dtype=stored_dtype(dtype))
    if what == NORMS:
        return Norms(*_NORMS.unpack(data))
    if what == HISTOGRAM:
        return np.frombuffer(data, dtype="<u8")
    if what == CHECKSUM:
        return _CHECKSUM.unpack(data)[0]
    return NonFinite(*_GUARD.unpack(data))


def _widener(dtype: str) -> Callable[[Bytes], npt.NDArray[Any]]:
    """Bytes as numbers on which NumPy computes in float32 or float64."""
    stored = stored_dtype(dtype)
    if dtype in ("float32", "float64"):
        return lambda data: data.view(stored)
    if dtype == "bfloat16":
        return lambda data: from_bfloat16(data.view(np.uint16))
    wide = np.float32 if dtype in FLOATS else np.float64
    return lambda data: data.view(stored).astype(wide)


def _copy(into: Bytes, chunk: Bytes) -> None:
    into[...] = chunk


def _sample(stored: np.dtype[Any], stride: int, into: Bytes, chunk: Bytes) -> None:
    into.view(stored)[...] = chunk.view(stored)[::stride]


def _checksum(into: Bytes, chunk: Bytes) -> None:
    _CHECKSUM.pack_into(into.data, 0, _crc32(chunk))


def _norms(wide: Callable[[Bytes], npt.NDArray[Any]], into: Bytes, chunk: Bytes) -> None:
    numbers = wide(chunk)
    squares, least, largest = 0.0, np.inf, -np.inf
    n_nan = n_inf = 0
    with np.errstate(all="ignore"):
        for at in range(0, len(numbers), _BLOCK):
            block = numbers[at : at + _BLOCK]
            square = float(np.dot(block, block))
            if not np.isfinite(square):
                nan, inf, _ = _count(block)
                n_nan, n_inf = n_nan + nan, n_inf + inf
                square = float(np.dot(block.astype(np.float64), block))
            squares += square
            least, largest = np.minimum(least, block.min()), np.maximum(largest, block.max())
    _NORMS.pack_into(into.data, 0, len(numbers), squares, float(least), float(largest), n_nan, n_inf)


def _guard(wide: Callable[[Bytes], npt.NDArray[Any]], into: Bytes, chunk: Bytes) -> None:
    numbers = wide(chunk)
    n_nan = n_inf = 0
    first = -1
    with np.errstate(all="ignore"):
        for at in range(0, len(numbers), _BLOCK):
            block = numbers[at : at + _BLOCK]
            # The square of what is not finite is not; few blocks of finite numbers have a sum that is not.
            if not np.isfinite(np.dot(block, block)):
                nan, inf, found = _count(block)
                n_nan, n_inf = n_nan + nan, n_inf + inf
                if first < 0 <= found:
                    first = at + found
    _GUARD.pack_into(into.data, 0, len(numbers), n_nan, n_inf, first)


def _count(block: npt.NDArray[Any]) -> tuple[int, int, int]:
    """How many are NaN, how many infinite, and the first of these or -1."""
    wrong = ~np.isfinite(block)
    n_nan = int(np.isnan(block).sum())
    n_wrong = int(wrong.sum())
    return n_nan, n_wrong - n_nan, int(wrong.argmax()) if n_wrong else -1


def _histogram(wide: Callable[[Bytes], npt.NDArray[Any]], into: Bytes, chunk: Bytes) -> None:
    numbers, counts = wide(chunk), into.view(np.uint64)
    counts[...] = 0
    for at in range(0, len(numbers), _BLOCK):
        block = numbers[at : at + _BLOCK]
        finite = block[np.isfinite(block)]
        other = finite[finite != 0]
        exponents = np.clip(np.frexp(other)[1], EXPONENT_MIN, EXPONENT_MAX) - EXPONENT_MIN + 1
        counts += np.bincount(exponents, minlength=N_BINS).astype(np.uint64)
        counts[0] += np.uint64(len(finite) - len(other))
        counts[-1] += np.uint64(len(block) - len(finite))
