"""Partition of a rank's bytes into atoms, the ranges that no instruction splits: byte ranges become atom ranges."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.collective import DTYPE_BYTES
from optcc.plan import LOCALS, SEND, Plan

ROUNDS_MAX = 64
CUTS_MAX = 2**22


class CutsUnknown(Exception):
    """The partition did not converge: copies that shift bytes split the message into ever more pieces."""


class Ranges(NamedTuple):
    """Per instruction, the half-open range of atoms `low` to `high` out of `n_atoms`; empty if both are equal."""

    low: Column
    high: Column
    n_atoms: int


def accesses(plan: Plan) -> tuple[Ranges, Ranges]:
    """The atoms that each instruction reads only, and those that it writes; the partition is the same on all ranks."""
    reads = (plan.kind == SEND) | np.isin(plan.kind, list(LOCALS))
    writes = plan.dst_offset >= 0
    starts = np.concatenate((plan.src_offset[reads], plan.dst_offset[writes]))
    cuts = np.unique(np.concatenate((starts, starts + np.concatenate((plan.bytes[reads], plan.bytes[writes])))))
    return ranges(plan, cuts, plan.src_offset, reads), ranges(plan, cuts, plan.dst_offset, writes)


def ranges(plan: Plan, cuts: Column, offset: Column, present: npt.NDArray[np.bool_]) -> Ranges:
    """The atoms between `cuts` of the bytes at `offset`, for the instructions that are `present`."""
    low = np.where(present, np.searchsorted(cuts, offset), 0)
    high = np.where(present, np.searchsorted(cuts, offset + plan.bytes), 0)
    return Ranges(low, high, len(cuts))


def carried_cuts(plan: Plan) -> Column:
    """Offsets at which transfers and regions of the collective start or end, closed under transfers that shift bytes.

    Raises CutsUnknown if the closure does not converge.
    """
    transfers = plan.transfers
    itemsize = DTYPE_BYTES[transfers.dtype]
    count = plan.size_bytes // itemsize
    regions = {
        bound * itemsize
        for rank in range(plan.n_ranks)
        for first, stop, _ in (*plan.collective.before(rank, count), *plan.collective.after(rank, count))
        for bound in (first, stop)
    }
    src, dst, size = transfers.src_offset, transfers.dst_offset, transfers.bytes
    cuts = np.unique(
        np.concatenate((src, src + size, dst, dst + size, [0, plan.size_bytes, plan.buffer_bytes], [*regions]))
    ).astype(np.int64)
    moved = np.flatnonzero(src != dst)
    shifts = np.unique(np.stack((src[moved], dst[moved], size[moved])), axis=1)
    start = np.concatenate((shifts[0], shifts[1]))
    stop = start + np.concatenate((shifts[2], shifts[2]))
    by = np.concatenate((shifts[1] - shifts[0], shifts[0] - shifts[1]))
    for _ in range(ROUNDS_MAX):
        low, high = np.searchsorted(cuts, start, side="right"), np.searchsorted(cuts, stop, side="left")
        many = high - low
        if many.sum() > CUTS_MAX:
            break
        inner = np.repeat(low - (np.cumsum(many) - many), many) + np.arange(many.sum())
        more = np.union1d(cuts, cuts[inner] + np.repeat(by, many))
        if len(more) == len(cuts):
            return cuts
        cuts = more
    raise CutsUnknown(f"shifting copies cut the message into more than {len(cuts)} pieces")
