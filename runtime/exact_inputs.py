"""Inputs whose reduction is exact in every order, and the count of elements that are not what they must be.

Every element depends on its rank and its place, so that a chunk that is lost, doubled or put in the wrong place shows.
A check needs no tolerance: for up to 127 ranks every partial result is exact in its type, whatever the plan's order.
Sums and averages add small integers (of 128, 16 and 2 at most in float32, float16 and bfloat16), products multiply by 1
or 2, in float16, which ends at 65504, by 1 or -1; what integers are too small for wraps around, the same in any order.
`band` and `bor` get one bit of eight that differs here and there: with more, all ranks together would leave none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from optcc.collective import Collective, check_dtype, check_reduction_of
from optcc.errors import InputError
from optcc.plan import Plan
from optcc.runtime.kernels import UFUNCS, Array, divide, to_bfloat16
from optcc.runtime.stored_types import is_stored_as

_MULTIPLIER = np.uint32(2654435761)
_SUMMAND_BITS = {"float16": 5, "bfloat16": 2}
"""Summands are integers of as many bits, sign included; of 8 in every other type."""


def make_input(rank: int, count: int, dtype: str, reduction: str, seed: int = 0) -> Array:
    """`count` elements of `rank`'s input; the same numbers on every machine, and bits for bfloat16 (`stored_dtype`).

    Raises InputError for a dtype or reduction that does not exist, or that do not go together.
    """
    check_reduction_of(reduction, dtype)
    return _stored(_values(rank, count, dtype, reduction, seed), dtype)


def _values(rank: int, count: int, dtype: str, reduction: str, seed: int) -> Array:
    """The input as numbers that NumPy can reckon with: a bfloat16 is a float32 here."""
    # A hash of (place, rank, seed): two multiplications, and a shift between them, without which ranks whose
    # constant is small get nearly the same element at every other place.
    mixed = np.arange(count, dtype=np.uint32)
    mixed ^= np.uint32((rank * 0x85EBCA6B + seed * 0xC2B2AE35 + 1) & 0xFFFFFFFF)
    mixed *= _MULTIPLIER
    mixed ^= mixed >> np.uint32(16)
    mixed *= _MULTIPLIER
    mixed >>= np.uint32(24)
    values: npt.NDArray[np.int32] = mixed.view(np.int32)
    if reduction == "prod":
        values &= 1
        if dtype == "float16":
            values *= -2
        values += 1
    elif reduction in ("band", "bor"):
        values[...] = np.where(values < 64, 1 << (values & 7), 0)
        if reduction == "band":
            np.invert(values, out=values)
    else:
        shift = 8 - _SUMMAND_BITS.get(dtype, 8)
        values >>= shift
        values -= 128 >> shift
    return values.astype("float32" if dtype == "bfloat16" else dtype)


def expected_output(
    collective: Collective, count: int, dtype: str, reduction: str, rank: int, seed: int = 0
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The `count` elements that `rank` must end with, and which of them the collective defines."""
    check_reduction_of(reduction, dtype)
    defined = np.zeros(count, dtype=bool)
    output = np.zeros(count, dtype="float32" if dtype == "bfloat16" else dtype)
    regions = collective.after(rank, count)
    for contributor in range(collective.n_ranks):
        wanted = [region for region in regions if region[2] >> contributor & 1]
        if not wanted:
            continue
        given = _values(contributor, count, dtype, reduction, seed)
        for start, stop, contributors in wanted:
            if contributors & ((1 << contributor) - 1):
                part = output[start:stop]
                UFUNCS[reduction](part, given[start:stop], out=part)
            else:
                output[start:stop] = given[start:stop]
    for start, stop, ranks in regions:
        defined[start:stop] = True
        if reduction == "avg" and collective.reduces:
            divide(output[start:stop], ranks.bit_count(), "float32" if dtype == "bfloat16" else dtype)
    return _stored(output, dtype), defined


def _stored(values: Array, dtype: str) -> Array:
    return to_bfloat16(values) if dtype == "bfloat16" else values


def wrong_elements(plan: Plan, rank: int, message: Array, seed: int = 0) -> int:
    """How many elements of `message`, what a run with `make_input` left at `rank`, are not exactly as they must be.

    Raises InputError for a message of another type than the plan's.
    """
    transfers = plan.transfers
    if not is_stored_as(message, transfers.dtype):
        raise InputError(f"message: {message.dtype}: must be the plan's {transfers.dtype}")
    count = transfers.size_bytes // check_dtype(transfers.dtype)
    output, defined = expected_output(plan.collective, count, transfers.dtype, transfers.reduction, rank, seed)
    return int(np.count_nonzero((message.reshape(-1).view(output.dtype) != output) & defined))
