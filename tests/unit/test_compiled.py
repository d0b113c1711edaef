"""Compiled kernels: the same results as in plain Python, and one version of each."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from optcc.arrays import Column
from optcc.compiled import compiled


def _next(number: int, step: int) -> int:
    return number + step


def _walk(steps: Column) -> int:
    now = 0
    for step in steps:
        now = _next(now, step)
    return _next(_next(now, 1), 2)


def test_callers_share_one_version_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, a variable that begins as one, and numbers of 32 and of 64 bits."""
    numba = pytest.importorskip("numba")
    njit = numba.njit
    # What comes from the cache has needed no callees.
    monkeypatch.setattr(numba, "njit", lambda *given, cache=False, **options: njit(*given, **options))
    kernels = compiled((_next, _walk), globals())
    for dtype in (np.int32, np.int64):
        assert kernels.walk(np.array([3, 4], dtype=dtype)) == _walk(np.array([3, 4])) == 10
    assert len(kernels.walk.signatures) == 2
    assert kernels.next.signatures == [(numba.int64, numba.int64)]


def test_without_numba_the_functions_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "numba":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert compiled((_next, _walk), globals()).walk is _walk
