"""Reductions and copies on typed arrays, in place; docs/kernels.md says what each does with each type.

A reduction is always `dst = dst op incoming`, so floating-point results follow the plan's order and are the same at
every rank whose plan applies one reduction tree. Each step is rounded to the type, to nearest even: float16 and
bfloat16 are computed in float32 and rounded once, integers wrap around. A NaN in either operand makes a NaN, in min and
max too (C's fmin would not), and -0 is below +0.

NumPy has no bfloat16: an array of them is an array of their bits, uint16 (or what a package that registers the type
calls `bfloat16`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import setitem
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from optcc.collective import FLOATS, check_dtype, check_reduction_of
from optcc.runtime.compiled_kernels import find_compiled
from optcc.runtime.stored_types import stored_dtype
from optcc.runtime.transport import Bytes

Array = npt.NDArray[Any]

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
BLOCK_BYTES = 1 << 16
"""What arithmetic through wider numbers works on at once: it stays in the nearest caches."""


class Kernels(Protocol):
    """What the engine asks of the arithmetic; one object a (dtype, reduction).

    The arrays of one call have one length and do not overlap, but for `copy`; all is done when a call returns.
    `optcc.runtime.cupy_kernels` has what there is on a GPU.
    """

    def view(self, data: Bytes) -> Array:
        """`data` as elements; no copy."""
        ...

    def reduce(self, dst: Array, src: Array) -> None:
        """dst = dst op src."""
        ...

    def copy(self, dst: Array, src: Array) -> None:
        """dst = src, elements or their bytes; the two may overlap."""
        ...

    def bind_reduce(self, dst: Array, src: Array) -> Callable[[], Any]:
        """`reduce` on these arrays, for many calls."""
        ...

    def bind_copy(self, dst: Array, src: Array) -> Callable[[], Any]:
        """`copy` on these arrays, which do not overlap, for many calls."""
        ...

    def finish(self, data: Array, n_ranks: int) -> None:
        """What is left to do once every contribution is in: `avg` divides, the others do nothing."""
        ...


class NumpyKernels:
    """Kernels on the processor.

    `compiled` takes the kernels of `optcc.runtime.compiled_kernels` where they are faster; the bits are the same.

    >>> kernels = NumpyKernels("int32", "avg")
    >>> total = np.array([-7, 7], dtype=np.int32)
    >>> kernels.finish(total, 2)
    >>> total.tolist()
    [-3, 3]

    Raises InputError for a dtype or reduction that does not exist, or that do not go together.
    """

    __slots__ = ("_divide", "_plain", "_stored", "reduce")

    reduce: Callable[[Array, Array], Any]
    """See `Kernels`; no method, for a short run spends its time on calls."""
    copy = staticmethod(np.copyto)

    def __init__(self, dtype: str, reduction: str, *, compiled: bool = True) -> None:
        self._stored = stored_dtype(dtype)
        check_reduction_of(reduction, dtype)
        self._plain = _find_plain(dtype, reduction)
        self.reduce = _find_reduce(dtype, reduction, compiled)
        self._divide = _find_divide(dtype, compiled) if reduction == "avg" else None

    def view(self, data: Bytes) -> Array:
        return data.view(self._stored)

    def bind_reduce(self, dst: Array, src: Array) -> Callable[[], Any]:
        # No function of Python's around NumPy's: of a short run that would be a tenth.
        return partial(self.reduce, dst, src) if self._plain is None else partial(self._plain, dst, src, out=dst)

    def bind_copy(self, dst: Array, src: Array) -> Callable[[], Any]:
        return partial(setitem, dst, ..., src)

    def finish(self, data: Array, n_ranks: int) -> None:
        """Divides an average; see `divide`."""
        if self._divide is not None:
            self._divide(data, n_ranks)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16, to nearest even; every NaN becomes 0x7fc0.

    >>> [hex(each) for each in to_bfloat16(np.array([1.0, 1.00390625, -np.inf], dtype=np.float32)).tolist()]
    ['0x3f80', '0x3f80', '0xff80']
    """
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The values of bfloat16 bits, exactly.

    >>> from_bfloat16(np.array([0x3F80, 0xC040], dtype=np.uint16)).tolist()
    [1.0, -3.0]
    """
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def divide(data: Array, divisor: int, dtype: str = "") -> None:
    """data = data / divisor in place, for elements of `dtype`, by default what NumPy calls them.

    float64 and float32 by one rounded division; float16 and bfloat16 by one in float32 that is then rounded to the
    type; integers truncating toward zero, as C does.
    """
    dtype = dtype or data.dtype.name
    if dtype in ("float16", "bfloat16"):
        for block in _blocks(data):
            part = data[block]
            if dtype == "float16":
                part[...] = part.astype(np.float32) / np.float32(divisor)
            else:
                part[...] = to_bfloat16(from_bfloat16(part.view(np.uint16)) / np.float32(divisor)).view(part.dtype)
    elif dtype in FLOATS:
        np.divide(data, data.dtype.type(divisor), out=data)
    elif data.dtype.itemsize < 8:
        # A float with room for more than the integer's digits never rounds a quotient up to the next integer, and
        # becoming an integer it loses its fraction.
        wide = np.float32 if data.dtype.itemsize == 1 else np.float64
        for block in _blocks(data):
            data[block] = np.divide(data[block], divisor, dtype=wide)
    else:
        quotient = data // divisor
        quotient += (data < 0) & (quotient * divisor != data)
        data[...] = quotient


def _find_reduce(dtype: str, reduction: str, compiled: bool) -> Callable[[Array, Array], Any]:
    """dst = dst op src, by the fastest that there is."""
    ufunc, is_extreme = UFUNCS[reduction], reduction in ("min", "max")
    if _find_plain(dtype, reduction) is not None:
        return lambda dst, src: ufunc(dst, src, out=dst)
    kernel = find_compiled(dtype, reduction) if compiled else None
    if kernel is not None:
        bits = np.dtype(f"u{check_dtype(dtype)}")
        nothing = np.zeros(0, dtype=bits)
        kernel(nothing, nothing)  # compiled now, not in somebody's first run
        return lambda dst, src: kernel(dst.view(bits), src.view(bits))
    if dtype == "bfloat16":
        return partial(_reduce_bfloat16, _reduce_extreme if is_extreme else _reduce_plain, ufunc)
    return partial(_in_blocks, _reduce_extreme, ufunc) if is_extreme else partial(_reduce_plain, ufunc)


def _find_plain(dtype: str, reduction: str) -> np.ufunc | None:
    """NumPy's own function where it does all that there is to do."""
    is_plain = dtype not in FLOATS or (dtype in ("float32", "float64") and reduction not in ("min", "max"))
    return UFUNCS[reduction] if is_plain else None


def _find_divide(dtype: str, compiled: bool) -> Callable[[Array, int], None]:
    """data = data / divisor, by the fastest that there is."""
    kernel = find_compiled(dtype, "divide") if compiled else None
    if kernel is None:
        return lambda data, divisor: divide(data, divisor, dtype)
    kernel(np.zeros(0, dtype=np.uint16), np.float32(1))
    return lambda data, divisor: kernel(data.view(np.uint16), np.float32(divisor))


def _reduce_plain(ufunc: np.ufunc, dst: Array, src: Array) -> None:
    ufunc(dst, src, out=dst)


def _reduce_extreme(ufunc: np.ufunc, dst: Array, src: Array) -> None:
    """min or max, in which NumPy takes either of two zeros: of equal bits but the sign, min has it if one has it."""
    bits = np.dtype(f"u{dst.dtype.itemsize}")
    own, other = dst.view(bits), src.view(bits)
    merged = own | other if ufunc is np.minimum else own & other
    equal = dst == src
    ufunc(dst, src, out=dst)
    np.copyto(own, merged, where=equal)


def _in_blocks(reduce: Callable[[np.ufunc, Array, Array], None], ufunc: np.ufunc, dst: Array, src: Array) -> None:
    for block in _blocks(dst):
        reduce(ufunc, dst[block], src[block])


def _reduce_bfloat16(reduce: Callable[[np.ufunc, Array, Array], None], ufunc: np.ufunc, dst: Array, src: Array) -> None:
    own, other = dst.view(np.uint16), src.view(np.uint16)
    for block in _blocks(own):
        wide = from_bfloat16(own[block])
        reduce(ufunc, wide, from_bfloat16(other[block]))
        own[block] = to_bfloat16(wide)


def _blocks(array: Array, n_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    """Slices of `array`, in order, of `n_bytes` each."""
    step = n_bytes // array.dtype.itemsize
    return (slice(first, first + step) for first in range(0, len(array), step))
