"""Inputs whose reduction is exact in every order, and the count of elements that are not what they must be.

Every element depends on its rank and its place, so that a chunk that is lost, doubled or put in the wrong place shows.
Sums and averages add small integers, products multiply by 1 or 2 (an integer's wraps around, the same in any order),
so that float32 is exact for up to 127 ranks whatever the plan's order; a check needs no tolerance.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from optcc.collective import Collective, check_dtype, check_reduction
from optcc.plan import Plan
from optcc.runtime.kernels import UFUNCS, Array, divide

_MULTIPLIER = np.uint32(2654435761)


def make_input(rank: int, count: int, dtype: str, reduction: str, seed: int = 0) -> Array:
    """`count` elements of `rank`'s input; the same numbers on every machine.

    Raises InputError for a dtype or reduction that does not exist.
    """
    check_dtype(dtype)
    check_reduction(reduction)
    # A multiplicative hash of (place, rank, seed): cheap, and far from periodic in any chunk size.
    mixed = np.arange(count, dtype=np.uint32)
    mixed *= _MULTIPLIER
    mixed ^= np.uint32((rank * 0x85EBCA6B + seed * 0xC2B2AE35 + 1) & 0xFFFFFFFF)
    mixed *= _MULTIPLIER
    mixed >>= np.uint32(24)
    if reduction == "prod":
        mixed &= np.uint32(1)
        mixed += np.uint32(1)
        return mixed.astype(dtype)
    values: npt.NDArray[np.int32] = mixed.view(np.int32)
    values -= np.int32(128)
    return values.astype(dtype)


def expected_output(
    collective: Collective, count: int, dtype: str, reduction: str, rank: int, seed: int = 0
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The `count` elements that `rank` must end with, and which of them the collective defines."""
    defined = np.zeros(count, dtype=bool)
    output = np.zeros(count, dtype=dtype)
    regions = collective.after(rank, count)
    for contributor in range(collective.n_ranks):
        wanted = [region for region in regions if region[2] >> contributor & 1]
        if not wanted:
            continue
        given = make_input(contributor, count, dtype, reduction, seed)
        for start, stop, contributors in wanted:
            if contributors & ((1 << contributor) - 1):
                part = output[start:stop]
                UFUNCS[reduction](part, given[start:stop], out=part)
            else:
                output[start:stop] = given[start:stop]
    for start, stop, _ in regions:
        defined[start:stop] = True
        if reduction == "avg" and collective.name not in ("broadcast", "allgather"):
            divide(output[start:stop], collective.n_ranks)
    return output, defined


def wrong_elements(plan: Plan, rank: int, message: Array, seed: int = 0) -> int:
    """How many elements of `message`, what a run with `make_input` left at `rank`, are not exactly as they must be."""
    transfers = plan.transfers
    count = transfers.size_bytes // check_dtype(transfers.dtype)
    output, defined = expected_output(plan.collective, count, transfers.dtype, transfers.reduction, rank, seed)
    return int(np.count_nonzero((message.reshape(-1) != output) & defined))
