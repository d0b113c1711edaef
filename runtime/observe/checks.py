"""Reductions done twice: by the kernel of the job, and by NumPy, which must agree to the bit.

A kernel that computes something else, on one rank of many, spreads its mistake to all of them, which then agree. Here
each rank looks at a share of its own reductions, so that what is found names the rank, the plan and the instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from optcc.errors import InputError
from optcc.runtime.buffers import REDUCE, REDUCE_FIRST, BoundAction
from optcc.runtime.kernels import NumpyKernels

_NOTES_MAX = 16


class ReductionCheck:
    """Checks every `every`-th reduction of host memory; `note` is told of what is wrong, the first few times."""

    def __init__(self, every: int, note: Callable[[str], None]) -> None:
        if every < 1:
            raise InputError(f"check of every {every} reductions: must be at least 1")
        self._every, self._note = every, note
        self._kernels: dict[tuple[str, str], NumpyKernels] = {}
        self.n_seen = self.n_checked = self.n_wrong = 0

    def begin(self, entry: BoundAction, dtype: str, reduction: str) -> Any:
        """Before a computation: what it must give, or None if this one is not checked."""
        code, _, target, source = entry
        if code not in (REDUCE, REDUCE_FIRST) or not isinstance(target, np.ndarray):
            return None
        self.n_seen += 1
        if (self.n_seen - 1) % self._every:
            return None
        kernels = self._kernels.get((dtype, reduction))
        if kernels is None:
            kernels = self._kernels[dtype, reduction] = NumpyKernels(dtype, reduction)
        first, source = (target, source) if code == REDUCE else source
        wanted = first.copy()
        kernels.reduce(wanted, source)
        return wanted

    def end(self, entry: BoundAction, wanted: Any, what: str) -> None:
        """After it: compares the bytes."""
        _, instruction, target, _ = entry
        self.n_checked += 1
        differs = np.flatnonzero(target.view(np.uint8) != wanted.view(np.uint8))
        if len(differs):
            self.n_wrong += 1
            if self.n_wrong <= _NOTES_MAX:
                at = int(differs[0]) // target.itemsize
                self._note(
                    f"instruction {instruction} of {what}: element {at} is {target.flat[at]}, must be {wanted.flat[at]}"
                )
