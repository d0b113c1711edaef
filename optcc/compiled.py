"""Inner loops written as plain functions over arrays: numba compiles them on first use, and without numba they run as
they are, slower and with the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

_ALLOCATES = {"copy", "empty", "full", "sort", "zeros"}
"""What a kernel that makes arrays, or has them sorted, calls."""

_SHORT = 1500
"""Bytes of code of a kernel that is put into those that call it."""


def compiled(kernels: Sequence[Callable[..., Any]], namespace: dict[str, Any]) -> Any:
    """The functions `kernels` by their names without the leading underscore; each may call those before it.

    `namespace` is the module's `globals()`. Keep the result (functools.cache): the first call imports numba.
    """
    try:
        import numba
    except ImportError:
        return SimpleNamespace(**{kernel.__name__.removeprefix("_"): kernel for kernel in kernels})
    known = dict(namespace)
    for kernel in kernels:
        assert isinstance(kernel, FunctionType)
        # A copy that sees the compiled versions of those before it: numba resolves names in the function's globals.
        copy = FunctionType(kernel.__code__, known, kernel.__name__)
        copy.__module__ = kernel.__module__
        # Without memory of its own a kernel need not count references to the arrays that it is given, and two atomic
        # additions for each of them in each call are most of what a short one costs.
        options = {} if _ALLOCATES & set(kernel.__code__.co_names) else {"_nrt": False}
        if options and len(kernel.__code__.co_code) < _SHORT:  # else an array is passed on as seven numbers
            options["forceinline"] = True
        try:
            known[kernel.__name__] = numba.njit(copy, cache=True, **options)
        except RuntimeError:  # no place to write the cache to
            known[kernel.__name__] = numba.njit(copy, **options)
    return SimpleNamespace(**{kernel.__name__.removeprefix("_"): known[kernel.__name__] for kernel in kernels})
