"""Reductions that NumPy lacks or does slowly, as loops that numba compiles: bfloat16, float16, and the two zeros.

Every kernel takes its arrays as the bits of their elements, unsigned integers of the same size, and changes the first
in place. Sums and products of 16-bit floats are computed in float32 and rounded to nearest even, which gives the same
as one rounding of the exact result: float32 has more than twice their digits, and two. `optcc.runtime.kernels` has the
same arithmetic in NumPy, for machines without numba, bit for bit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from optcc.collective import FLOATS
from optcc.compiled import compiled_at_once, once

Kernel = Callable[[Any, Any], None]

_16 = np.uint32(16)
_ONE = np.uint32(1)
_HALF_ULP = np.uint32(0x7FFF)
_NAN = np.uint32(0x7FC0)
_widen: Any = None
_narrow: Any = None
"""float16 to float32 and back; what stands here is put in by `_load`."""


def _sum_bfloat16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a = np.uint32(np.uint32(dst[i]) << _16).view(np.float32)
        b = np.uint32(np.uint32(src[i]) << _16).view(np.float32)
        result = np.float32(a + b)
        bits = np.uint32(result.view(np.uint32))
        rounded = np.uint32(np.uint32(bits + _HALF_ULP + np.uint32(np.uint32(bits >> _16) & _ONE)) >> _16)
        dst[i] = np.uint16(_NAN if result != result else rounded)


def _prod_bfloat16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a = np.uint32(np.uint32(dst[i]) << _16).view(np.float32)
        b = np.uint32(np.uint32(src[i]) << _16).view(np.float32)
        result = np.float32(a * b)
        bits = np.uint32(result.view(np.uint32))
        rounded = np.uint32(np.uint32(bits + _HALF_ULP + np.uint32(np.uint32(bits >> _16) & _ONE)) >> _16)
        dst[i] = np.uint16(_NAN if result != result else rounded)


def _min_bfloat16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint16(dst[i]), np.uint16(src[i])
        x = np.uint32(np.uint32(a) << _16).view(np.float32)
        y = np.uint32(np.uint32(b) << _16).view(np.float32)
        lower = a if x < y or x != x else b
        dst[i] = np.uint16(a | b) if x == y else lower


def _max_bfloat16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint16(dst[i]), np.uint16(src[i])
        x = np.uint32(np.uint32(a) << _16).view(np.float32)
        y = np.uint32(np.uint32(b) << _16).view(np.float32)
        upper = a if x > y or x != x else b
        dst[i] = np.uint16(a & b) if x == y else upper


def _sum_float16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        dst[i] = _narrow(np.float32(_widen(dst[i]) + _widen(src[i])))


def _prod_float16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        dst[i] = _narrow(np.float32(_widen(dst[i]) * _widen(src[i])))


def _min_float16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint16(dst[i]), np.uint16(src[i])
        x, y = _widen(a), _widen(b)
        lower = a if x < y or x != x else b
        dst[i] = np.uint16(a | b) if x == y else lower


def _max_float16(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint16(dst[i]), np.uint16(src[i])
        x, y = _widen(a), _widen(b)
        upper = a if x > y or x != x else b
        dst[i] = np.uint16(a & b) if x == y else upper


def _min_float32(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint32(dst[i]), np.uint32(src[i])
        x, y = a.view(np.float32), b.view(np.float32)
        lower = a if x < y or x != x else b
        dst[i] = np.uint32(a | b) if x == y else lower


def _max_float32(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint32(dst[i]), np.uint32(src[i])
        x, y = a.view(np.float32), b.view(np.float32)
        upper = a if x > y or x != x else b
        dst[i] = np.uint32(a & b) if x == y else upper


def _min_float64(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint64(dst[i]), np.uint64(src[i])
        x, y = a.view(np.float64), b.view(np.float64)
        lower = a if x < y or x != x else b
        dst[i] = np.uint64(a | b) if x == y else lower


def _max_float64(dst: Any, src: Any) -> None:
    for i in range(len(dst)):
        a, b = np.uint64(dst[i]), np.uint64(src[i])
        x, y = a.view(np.float64), b.view(np.float64)
        upper = a if x > y or x != x else b
        dst[i] = np.uint64(a & b) if x == y else upper


def _divide_bfloat16(data: Any, divisor: Any) -> None:
    for i in range(len(data)):
        result = np.float32(np.uint32(np.uint32(data[i]) << _16).view(np.float32) / divisor)
        bits = np.uint32(result.view(np.uint32))
        rounded = np.uint32(np.uint32(bits + _HALF_ULP + np.uint32(np.uint32(bits >> _16) & _ONE)) >> _16)
        data[i] = np.uint16(_NAN if result != result else rounded)


def _divide_float16(data: Any, divisor: Any) -> None:
    for i in range(len(data)):
        data[i] = _narrow(np.float32(_widen(data[i]) / divisor))


_LOOPS = (
    *(_sum_bfloat16, _prod_bfloat16, _min_bfloat16, _max_bfloat16, _divide_bfloat16),
    *(_min_float32, _max_float32, _min_float64, _max_float64),
)
_HALF_LOOPS = (_sum_float16, _prod_float16, _min_float16, _max_float16, _divide_float16)


def find_compiled(dtype: str, reduction: str) -> Kernel | None:
    """The compiled kernel over the bits of `dtype`, or None where there is none, or numba or the processor lacks it.

    `reduction` is one, for a kernel of (dst, src), or "divide", for one of (data, divisor in float32).
    """
    if dtype not in FLOATS or find_spec("numba") is None:
        return None
    kernel: Kernel | None = getattr(_load(), f"{'sum' if reduction == 'avg' else reduction}_{dtype}", None)
    return kernel


def _load_all() -> Any:
    """All kernels that this processor can run; imports numba."""
    if not _converts_half():
        return compiled_at_once(_LOOPS, globals())
    widen, narrow = _half_casts()
    return compiled_at_once((*_LOOPS, *_HALF_LOOPS), {**globals(), "_widen": widen, "_narrow": narrow})


_load = once(_load_all)


def _converts_half() -> bool:
    """Whether the processor converts float16 itself; else a library would, which need not be there."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("f16c"))


def _half_casts() -> tuple[Any, Any]:
    """The processor's own conversions between the bits of a float16 and a float32, for the kernels to call."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def widen(_context: Any, _bits: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.uint16), emit

    def narrow(_context: Any, _value: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

        return types.uint16(types.float32), emit

    return intrinsic(widen), intrinsic(narrow)
