"""`Transfers`: a schedule in bytes, the neutral form that `optcc compile --format transfers` writes.

Every rank owns a buffer of `size_bytes + scratch_bytes`; the first `size_bytes` hold its input at the start and its
output at the end. Transfer i starts when all of `after[i]` and `order[i]` are done; when it is done, the bytes at
`dst` are their reduction with the bytes at `src` (reduce), or the bytes at `src` (copy). `after` holds the dependencies
that correctness needs, `order` the further ones that a plan enforces. src = dst is a local operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optcc.arrays import Column, Lists, freeze
from optcc.collective import Collective, check_count, check_dtype, check_reduction_of
from optcc.errors import PlanError
from optcc.schedule import OPS
from optcc.show import Card, Shown
from optcc.units import show_size


@dataclass(frozen=True, slots=True, eq=False)
class Transfers(Shown):
    """Columns of equal length, one entry per transfer; offsets and lengths in bytes.

    The arrays are copied unless nobody else can change them.

    Raises PlanError if a transfer exceeds the buffer or names a rank, stage or transfer that does not exist.
    """

    collective: Collective
    reduction: str
    dtype: str
    size_bytes: int
    scratch_bytes: int
    stages: tuple[str, ...]
    src: Column
    dst: Column
    op: Column
    src_offset: Column
    dst_offset: Column
    bytes: Column
    segment: Column
    stage: Column
    line: Column
    after: Lists
    order: Lists

    def __post_init__(self) -> None:
        columns = ("src", "dst", "op", "src_offset", "dst_offset", "bytes", "segment", "stage", "line")
        freeze(self, columns, ("after", "order"))
        check_reduction_of(self.reduction, self.dtype)
        check_count(self.size_bytes, self.dtype)
        check_count(self.scratch_bytes, self.dtype)
        n = len(self.src)
        if {len(getattr(self, name)) for name in (*columns, "after", "order")} != {n}:
            raise PlanError("transfers: columns must have one length")
        if n == 0:
            return
        buffer_bytes = self.size_bytes + self.scratch_bytes
        for label, values, low, high in (
            ("src", self.src, 0, self.n_ranks - 1),
            ("dst", self.dst, 0, self.n_ranks - 1),
            ("op", self.op, 0, len(OPS) - 1),
            ("stage", self.stage, 0, len(self.stages) - 1),
            ("bytes", self.bytes, 1, buffer_bytes),
            ("src_offset", self.src_offset, 0, buffer_bytes),
            ("dst_offset", self.dst_offset, 0, buffer_bytes),
            ("end of src", self.src_offset + self.bytes, 1, buffer_bytes),
            ("end of dst", self.dst_offset + self.bytes, 1, buffer_bytes),
        ):
            if values.min() < low or values.max() > high:
                raise PlanError(f"transfers: {label} {values.min()}..{values.max()}: must be from {low} to {high}")
        itemsize = check_dtype(self.dtype)
        for label, values in (("src_offset", self.src_offset), ("dst_offset", self.dst_offset), ("bytes", self.bytes)):
            cut = np.flatnonzero(values % itemsize)
            if len(cut):
                rule = f"must be a multiple of {itemsize}, the size of a {self.dtype}"
                raise PlanError(f"transfer #{cut[0]}: {label} {values[cut[0]]}: {rule}")
        for label, lists in (("after", self.after), ("order", self.order)):
            if len(lists.values) and (lists.values.min() < 0 or lists.values.max() >= n):
                raise PlanError(f"transfers: {label} must name transfers below {n}")

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return self.collective.n_ranks

    @property
    def busiest_messages(self) -> int:
        """How many messages the rank sends and receives that has most of them."""
        return int(np.bincount(np.concatenate((self.src, self.dst)), minlength=1).max())

    def __len__(self) -> int:
        return len(self.src)

    def describe(self, index: int) -> str:
        """One transfer in words.

        Like `#12 1->2 reduce bytes 4096..8191 [reduce-scatter] (line 30)`.
        """
        start = int(self.dst_offset[index])
        line = f" (line {self.line[index]})" if self.line[index] > 0 else ""
        return (
            f"#{index} {self.src[index]}->{self.dst[index]} {OPS[self.op[index]]} "
            f"bytes {start}..{start + int(self.bytes[index]) - 1} [{self.stages[self.stage[index]]}]{line}"
        )

    def card(self) -> Card:
        rows = tuple((self.describe(index),) for index in range(len(self)))
        return Card(f"{len(self)} transfers of {show_size(self.size_bytes)}", ("transfer",), rows)

    def __repr__(self) -> str:
        return f"Transfers({self.collective.name!r}, ranks={self.n_ranks}, size_bytes={self.size_bytes}, n={len(self)})"
