"""`Collective`: what every rank holds before, and must hold after, element by element.

The buffer of every rank has `count` elements. A region is a range of elements together with the set of ranks whose
inputs its value reduces; sets of ranks are integers, bit r for rank r.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optcc.errors import InputError
from optcc.show import Card, Shown

DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCTIONS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")
"""Bit by bit and, or, exclusive or: of integers only."""
COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "reduce")
ROOTED = ("broadcast", "reduce")

Region = tuple[int, int, int]
"""(first element, element after the last, contributors)."""


def split(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` elements into `parts` ranges whose lengths differ by at most one; some are empty if count < parts.

    >>> list(split(10, 4))
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    for part in range(parts):
        yield count * part // parts, count * (part + 1) // parts


@dataclass(frozen=True, slots=True)
class Collective(Shown):
    """One of `COLLECTIVES` over `n_ranks` ranks; `root` matters to broadcast and reduce.

    >>> Collective("reduce", 3, root=1).after(1, 10)
    [(0, 10, 7)]

    Raises InputError if the name, the number of ranks or the root cannot be.
    """

    name: str
    n_ranks: int
    root: int = 0

    def __post_init__(self) -> None:
        if self.name not in COLLECTIVES:
            raise InputError(f"collective {self.name!r}: must be one of {', '.join(COLLECTIVES)}")
        if self.n_ranks < 1:
            raise InputError(f"{self.n_ranks} ranks: must be at least one")
        if not 0 <= self.root < self.n_ranks:
            raise InputError(f"root {self.root}: must be a rank below {self.n_ranks}")

    def card(self) -> Card:
        """What each rank holds before and after, as shares of the message: for a buffer of one element a rank."""

        def regions(held: list[Region]) -> str:
            return ", ".join(f"[{first}, {stop}) of {ranks.bit_count()} ranks" for first, stop, ranks in held) or "-"

        rows = tuple(
            (str(rank), regions(self.before(rank, self.n_ranks)), regions(self.after(rank, self.n_ranks)))
            for rank in range(self.n_ranks)
        )
        return Card(f"{self.name} over {self.n_ranks} elements", ("rank", "before", "after"), rows)

    @property
    def everyone(self) -> int:
        """The set of all ranks."""
        return (1 << self.n_ranks) - 1

    def before(self, rank: int, count: int) -> list[Region]:
        """What `rank` holds at the start; elements in no region are undefined."""
        if self.name == "allgather":
            start, stop = list(split(count, self.n_ranks))[rank]
            return [(start, stop, 1 << rank)]
        if self.name == "broadcast" and rank != self.root:
            return []
        return [(0, count, 1 << rank)]

    def after(self, rank: int, count: int) -> list[Region]:
        """What `rank` must hold at the end; elements in no region may hold anything."""
        slices = list(split(count, self.n_ranks))
        match self.name:
            case "allreduce":
                return [(0, count, self.everyone)]
            case "reducescatter":
                return [(*slices[rank], self.everyone)]
            case "allgather":
                return [(*owned, 1 << owner) for owner, owned in enumerate(slices)]
            case "broadcast":
                return [(0, count, 1 << self.root)]
            case _:
                return [(0, count, self.everyone)] if rank == self.root else []


def check_dtype(dtype: str) -> int:
    """The size in bytes of an element; raises InputError for a type that is not in `DTYPE_BYTES`."""
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def check_reduction(reduction: str) -> str:
    """The reduction itself; raises InputError for one that is not in `REDUCTIONS`."""
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction {reduction!r}: must be one of {', '.join(REDUCTIONS)}")
    return reduction


def reductions_of(dtype: str) -> tuple[str, ...]:
    """The reductions that elements of `dtype` have; raises InputError for a type that does not exist.

    >>> reductions_of("bfloat16")
    ('sum', 'prod', 'min', 'max', 'avg')
    """
    check_dtype(dtype)
    return tuple(each for each in REDUCTIONS if dtype not in FLOATS or each not in BITWISE)


def check_reduction_of(reduction: str, dtype: str) -> str:
    """The reduction itself; raises InputError if it or `dtype` does not exist, or `dtype` does not have it."""
    check_reduction(reduction)
    if reduction not in reductions_of(dtype):
        raise InputError(f"reduction {reduction!r} of {dtype}: must be one of {', '.join(reductions_of(dtype))}")
    return reduction


def check_count(size_bytes: int, dtype: str) -> int:
    """Elements in `size_bytes`; raises InputError if that is no whole number.

    >>> check_count(64, "float64")
    8
    """
    itemsize = check_dtype(dtype)
    if size_bytes < 0 or size_bytes % itemsize:
        raise InputError(f"size {size_bytes} B: must be a whole number of {dtype} elements of {itemsize} B")
    return size_bytes // itemsize
