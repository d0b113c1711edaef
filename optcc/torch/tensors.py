"""The memory of tensors, as arrays for a `Communicator`.

A contiguous tensor is used where it is. Of any other a copy is made on the thread of the group when the operation
begins, and copied back when it is done. What is not computed with travels as bytes, so that there any type will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from optcc.runtime.kernels import Array

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
REDUCTIONS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_OF_BOOL = {"sum": "bor", "prod": "band", "min": "band", "max": "bor", "band": "band", "bor": "bor", "bxor": "bxor"}
"""A sum of truth values is true if one is."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_BITWISE = ("band", "bor", "bxor")


class Reduction(NamedTuple):
    """How optcc calls what torch asks for."""

    op: str
    dtype: str


def reduction_of(reduce_op: Any, tensor: Any) -> Reduction:
    """The reduction for the elements of `tensor`; raises ValueError for one that they do not have."""
    name = getattr(reduce_op, "op", reduce_op).name
    if name not in REDUCTIONS:
        raise ValueError(f"optcc: reduction {name}: must be one of {', '.join(REDUCTIONS)}")
    op = REDUCTIONS[name]
    if tensor.dtype is torch.bool:
        if op not in _OF_BOOL:
            raise ValueError(f"optcc: reduction {name} of torch.bool: must be another one")
        return Reduction(_OF_BOOL[op], "uint8")
    if tensor.dtype not in DTYPES:
        known = ", ".join(map(str, (*DTYPES, torch.bool)))
        raise ValueError(f"optcc: reduction of {tensor.dtype}: must be one of {known}")
    dtype = DTYPES[tensor.dtype]
    if op in _BITWISE and dtype in _FLOATS:
        raise ValueError(f"optcc: reduction {name} of {tensor.dtype}: must be of integers or truth values")
    return Reduction(op, dtype)


def check(what: str, tensors: Sequence[Any]) -> None:
    """Raises ValueError for tensors that are sparse or not in the host's memory."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"optcc {what}: tensor on {tensor.device}: must be on the CPU")
        if tensor.layout is not torch.strided:
            raise ValueError(f"optcc {what}: {tensor.layout}: must be dense (torch.strided)")


def span(tensor: Any) -> tuple[int, int]:
    """The first byte of the memory of a tensor, and that after its last."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def joined(tensors: Sequence[Any]) -> Any:
    """One flat tensor over the memory of several that are equal, contiguous and lie one behind the other; else None."""
    first, count = tensors[0], tensors[0].numel()
    n_bytes = count * first.element_size()
    storage = first.untyped_storage().data_ptr()
    for index, each in enumerate(tensors):
        is_next = each.data_ptr() == first.data_ptr() + index * n_bytes and each.numel() == count
        if not is_next or not each.is_contiguous() or each.untyped_storage().data_ptr() != storage:
            return None
    return first.detach().as_strided((count * len(tensors),), (1,))


class TensorMemory:
    """The memory of the tensors of one operation, from its beginning to its end."""

    def __init__(self) -> None:
        self._back: list[tuple[Any, Any]] = []

    def bytes_of(self, tensor: Any, *, is_read: bool = True, is_written: bool = False) -> Array:
        """The bytes of a tensor."""
        own = tensor.detach()
        flat = own if own.is_contiguous() and not own.is_conj() and not own.is_neg() else None
        if flat is None:
            flat = (own.resolve_conj().resolve_neg() if is_read else torch.empty_like(own)).contiguous()
            if is_written:
                self._back.append((own, flat))
        array: Array = flat.reshape(-1).view(torch.uint8).numpy()
        return array

    def elements_of(self, tensor: Any, dtype: str, *, is_read: bool = True, is_written: bool = False) -> Array:
        """The elements of a tensor, as an array for what optcc calls `dtype`."""
        data = self.bytes_of(tensor, is_read=is_read, is_written=is_written)
        return data.view(np.uint16 if dtype == "bfloat16" else dtype)

    def scratch(self, tensors: Sequence[Any], *, is_read: bool = False, is_written: bool = False) -> Any:
        """A flat tensor for the elements of several, one behind the other; theirs if they lie so already."""
        whole = joined(tensors)
        if whole is not None:
            return whole
        flats = [each.detach().reshape(-1) for each in tensors]
        whole = torch.cat(flats) if is_read else flats[0].new_empty(sum(each.numel() for each in flats))
        if is_written:
            first = 0
            for each, flat in zip(tensors, flats, strict=True):
                self._back.append((each.detach(), whole[first : first + flat.numel()].view(each.shape)))
                first += flat.numel()
        return whole

    def finish(self) -> None:
        """The operation is done: what went to copies goes to the tensors."""
        for own, copy in self._back:
            own.copy_(copy)
        self._back.clear()


class SparseSum:
    """The sum of the sparse tensors of all ranks, which replaces this rank's `tensor`."""

    def __init__(self, tensor: Any, n_ranks: int) -> None:
        self._tensor, self._n_ranks = tensor, n_ranks
        whole = tensor.detach().coalesce()
        self._indices, self._values = whole.indices().contiguous(), whole.values().contiguous()
        self.n_own = int(self._indices.shape[1])
        self._parts: list[tuple[Any, Any]] = []

    @property
    def own(self) -> tuple[Array, Array]:
        """What this rank has: the bytes of its indices, and of its values."""
        memory = TensorMemory()
        return memory.bytes_of(self._indices), memory.bytes_of(self._values)

    def make_room(self, counts: Sequence[int]) -> tuple[list[Array], list[Array]]:
        """Memory for the indices and the values of every rank, which has so many of them."""
        indices, values = self._indices, self._values
        self._parts = [
            (indices.new_empty((indices.shape[0], count)), values.new_empty((count, *values.shape[1:])))
            for count in counts
        ]
        memory = TensorMemory()
        return [memory.bytes_of(each) for each, _ in self._parts], [memory.bytes_of(each) for _, each in self._parts]

    def finish(self) -> None:
        """Adds up what has come, in the order of the ranks: the same bits everywhere."""
        indices = torch.cat([each for each, _ in self._parts], dim=1)
        values = torch.cat([each for _, each in self._parts])
        sum_ = torch.sparse_coo_tensor(indices, values, self._tensor.shape).coalesce()
        # Not of `detach`: that would get the indices for itself.
        with torch.no_grad():
            self._tensor.copy_(sum_)
