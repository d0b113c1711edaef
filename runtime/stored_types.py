"""How an element type of a plan is stored in NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.collective import check_dtype


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """What NumPy calls an array of `dtype`; a bfloat16 is kept as its bits. Raises InputError for an unknown type.

    >>> stored_dtype("bfloat16")
    dtype('uint16')
    """
    check_dtype(dtype)
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def is_stored_as(array: npt.NDArray[Any], dtype: str) -> bool:
    """Whether `array` is one of `dtype`: its NumPy type, or another package's of the same name, bytes in our order.

    >>> is_stored_as(np.zeros(3, dtype=np.uint16), "bfloat16"), is_stored_as(np.zeros(3), "bfloat16")
    (True, False)
    """
    return bool(array.dtype == stored_dtype(dtype) or (array.dtype.name == dtype and array.dtype.isnative))
