"""Reductions and copies on typed arrays, in place.

A reduction is always `dst = dst op incoming`, so floating-point results follow the plan's order and are the same at
every rank whose plan applies one reduction tree. Integers wrap around. A NaN in either operand makes a NaN in all of
sum, prod, min and max (`np.minimum` and `np.maximum` propagate it; C's fmin would not).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from optcc.collective import check_dtype, check_reduction
from optcc.runtime.transport import Bytes

Array = npt.NDArray[Any]

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Kernels(Protocol):
    """What the engine asks of the arithmetic; one object a (dtype, reduction)."""

    def view(self, data: Bytes) -> Array:
        """`data` as elements; no copy."""
        ...

    def reduce(self, dst: Array, src: Array) -> None:
        """dst = dst op src."""
        ...

    def copy(self, dst: Array, src: Array) -> None:
        """dst = src; the two may overlap."""
        ...

    def finish(self, data: Array, n_ranks: int) -> None:
        """What is left to do once every contribution is in: `avg` divides, the others do nothing."""
        ...


class NumpyKernels:
    """Kernels on the processor.

    >>> kernels = NumpyKernels("int32", "avg")
    >>> total = np.array([-7, 7], dtype=np.int32)
    >>> kernels.finish(total, 2)
    >>> total.tolist()
    [-3, 3]

    Raises InputError for a dtype or reduction that does not exist.
    """

    __slots__ = ("_average", "_dtype", "_ufunc")

    def __init__(self, dtype: str, reduction: str) -> None:
        check_dtype(dtype)
        self._dtype = np.dtype(dtype)
        self._ufunc = UFUNCS[check_reduction(reduction)]
        self._average = reduction == "avg"

    def view(self, data: Bytes) -> Array:
        return data.view(self._dtype)

    def reduce(self, dst: Array, src: Array) -> None:
        self._ufunc(dst, src, out=dst)

    def copy(self, dst: Array, src: Array) -> None:
        np.copyto(dst, src)

    def finish(self, data: Array, n_ranks: int) -> None:
        """Divides an average: floats by one rounded division, integers truncating toward zero as in C."""
        if self._average:
            divide(data, n_ranks)


def divide(data: Array, divisor: int) -> None:
    """data = data / divisor in place, integers truncating toward zero."""
    if data.dtype.kind == "f":
        np.divide(data, data.dtype.type(divisor), out=data)
        return
    quotient = data // divisor
    quotient += (data < 0) & (quotient * divisor != data)
    data[...] = quotient
