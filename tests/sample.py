"""Which cases of a long list run by default; the others are slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The first of every so many cases as it is, and the others marked slow; for `parametrize`.

    A case of several arguments is a tuple. Of a grid, `every` should have no factor in common with the lengths of its
    axes but the first: then each value of each axis is among those that run.

    >>> [bool(each.marks) for each in sampled(range(5), every=3)]
    [False, True, True, False, True]
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if number % every == 0 else (pytest.mark.slow,)
        )
        for number, case in enumerate(cases)
    ]
