"""`Collective`: what every rank holds before, and must hold after, element by element.

The buffer of every rank has `count` elements. A region is a range of elements together with the set of ranks whose
inputs its value reduces; sets of ranks are integers, bit r for rank r.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from optcc.errors import InputError, must_be_one_of
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
RANKS_MAX = 65536
"""Ranks of a collective, and of a topology."""
COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall", "gather", "scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("allreduce", "reducescatter", "reduce")
PERSONALISED = ("alltoall", "gather", "scatter")
"""Every element starts at one rank and is wanted by one rank. The message of an AllToAll is that of all ranks together:
p blocks of each of p ranks, by sender and then by receiver."""

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
class CollectiveCell:
    """A part of the message that one declaration is about: `share` of it.

    The ranks `before` have an input there at the start. For each (rank, contributors) of `after` the rank must end with
    the reduction of the contributors' inputs, or with the input itself if there is one.

    Raises InputError if a share is negative or a contributor has no input.
    """

    share: Fraction
    before: tuple[int, ...]
    after: tuple[tuple[int, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        if self.share < 0:
            raise InputError(f"share {self.share}: must not be negative")
        for rank, contributors in self.after:
            missing = sorted(set(contributors).difference(self.before))
            if missing or not contributors:
                raise InputError(f"after: rank {rank} of {contributors}: contributors must be among {self.before}")
        if len({rank for rank, _ in self.after}) < len(self.after):
            raise InputError("after: a rank must be named once for an element")


@dataclass(frozen=True, slots=True)
class Collective(Shown):
    """One of `COLLECTIVES` over `n_ranks` ranks, or with `cells` one that is declared; `root` matters to `ROOTED`.

    >>> Collective("reduce", 3, root=1).after(1, 10)
    [(0, 10, 7)]

    Raises InputError if the name, the number of ranks, the root or the cells cannot be.
    """

    name: str
    n_ranks: int
    root: int = 0
    cells: tuple[CollectiveCell, ...] = ()

    def __post_init__(self) -> None:
        if (self.name in COLLECTIVES) == bool(self.cells):
            rule = "must have no cells" if self.cells else f"must be one of {', '.join(COLLECTIVES)}"
            raise InputError(f"collective {self.name!r}: {rule}")
        if self.n_ranks < 1:
            raise InputError(f"{self.n_ranks} ranks: must be at least one")
        if not 0 <= self.root < self.n_ranks:
            raise InputError(f"root {self.root}: must be a rank below {self.n_ranks}")
        if self.cells:
            self._check_cells()

    def _check_cells(self) -> None:
        total = sum((cell.share for cell in self.cells), Fraction(0))
        if total != 1:
            raise InputError(f"collective {self.name!r}: shares of its cells add up to {total}: must be 1")
        ranks = {rank for cell in self.cells for rank in (*cell.before, *(rank for rank, _ in cell.after))}
        if ranks and not 0 <= min(ranks) <= max(ranks) < self.n_ranks:
            raise InputError(
                f"collective {self.name!r}: ranks {min(ranks)}..{max(ranks)}: must be below {self.n_ranks}"
            )

    @classmethod
    def declared(
        cls,
        name: str,
        n_ranks: int,
        *,
        before: Iterable[tuple[int, int]],
        after: Iterable[tuple[int, int, Iterable[int]]],
        sizes: Sequence[int] | None = None,
    ) -> Collective:
        """A collective as a set of (rank, element, contributors).

        `before` has the (rank, element) at which a rank has an input, `after` what each rank must end with. Elements
        count from 0; they are equal parts of the message unless `sizes` has how large each is beside the others.

        >>> swap = Collective.declared("swap", 2, before=[(0, 0), (1, 1)], after=[(1, 0, [0]), (0, 1, [1])])
        >>> swap.before(0, 10), swap.after(0, 10)
        ([(0, 5, 1)], [(5, 10, 2)])

        Raises InputError if an element has no size, and what the constructors raise.
        """
        given, wanted = list(before), [(rank, element, tuple(sorted(set(ranks)))) for rank, element, ranks in after]
        elements = [element for _, element in given] + [element for _, element, _ in wanted]
        weights = [1] * (1 + max(elements, default=-1)) if sizes is None else list(sizes)
        if elements and not 0 <= min(elements) <= max(elements) < len(weights):
            raise InputError(f"elements {min(elements)}..{max(elements)}: must be from 0 to {len(weights) - 1}")
        if min(weights, default=0) < 0 or not sum(weights):
            raise InputError(f"sizes {weights}: must not be negative, and not all zero")
        holders: list[list[int]] = [[] for _ in weights]
        takers: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in weights]
        for rank, element in given:
            holders[element].append(rank)
        for rank, element, contributors in wanted:
            takers[element].append((rank, contributors))
        cells = (
            CollectiveCell(
                Fraction(weight, sum(weights)), tuple(sorted(set(holders[element]))), tuple(sorted(takers[element]))
            )
            for element, weight in enumerate(weights)
        )
        return cls(name, n_ranks, 0, tuple(cells))

    @classmethod
    def all_to_all_v(cls, counts: Sequence[Sequence[int]]) -> Collective:
        """An AllToAll of unequal blocks: rank s has `counts[s][d]` elements for rank d; not all are zero.

        >>> Collective.all_to_all_v([[1, 2], [0, 3]]).after(1, 6)
        [(1, 3, 1), (3, 6, 2)]
        """
        n_ranks = len(counts)
        if any(len(row) != n_ranks for row in counts):
            raise InputError(f"counts: rows of {[len(row) for row in counts]}: must be {n_ranks} by {n_ranks}")
        pairs = [(src, dst) for src in range(n_ranks) for dst in range(n_ranks)]
        return cls.declared(
            "alltoallv",
            n_ranks,
            before=[(src, element) for element, (src, _) in enumerate(pairs)],
            after=[(dst, element, [src]) for element, (src, dst) in enumerate(pairs)],
            sizes=[counts[src][dst] for src, dst in pairs],
        )

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

    @property
    def reduces(self) -> bool:
        """True if some rank must end with a reduction, so that the reduction matters."""
        if self.cells:
            return any(len(contributors) > 1 for cell in self.cells for _, contributors in cell.after)
        return self.name in REDUCING

    @property
    def shares(self) -> list[Fraction]:
        """The shares of the message of which a declaration, an AllToAll, a Gather or a Scatter consists, in order."""
        if self.cells:
            return [cell.share for cell in self.cells]
        parts = self.n_ranks**2 if self.name == "alltoall" else self.n_ranks
        return [Fraction(1, parts)] * parts

    def before(self, rank: int, count: int) -> list[Region]:
        """What `rank` holds at the start; elements in no region are undefined."""
        p, own = self.n_ranks, 1 << rank
        if self.cells:
            return _joined((*at, own) for at, cell in self._placed(count) if rank in cell.before)
        match self.name:
            case "allgather" | "gather":
                return [(*_part(count, p, rank), own)]
            case "alltoall":
                return [(count * p * rank // p**2, count * p * (rank + 1) // p**2, own)]
            case "broadcast" | "scatter" if rank != self.root:
                return []
        return [(0, count, own)]

    def after(self, rank: int, count: int) -> list[Region]:
        """What `rank` must hold at the end; elements in no region may hold anything."""
        p = self.n_ranks
        if self.cells:
            return _joined(
                (*at, sum(1 << each for each in contributors))
                for at, cell in self._placed(count)
                for taker, contributors in cell.after
                if taker == rank
            )
        match self.name:
            case "allreduce":
                return [(0, count, self.everyone)]
            case "reducescatter":
                return [(*_part(count, p, rank), self.everyone)]
            case "allgather":
                return [(*_part(count, p, owner), 1 << owner) for owner in range(p)]
            case "gather":
                return [(*_part(count, p, owner), 1 << owner) for owner in range(p)] if rank == self.root else []
            case "broadcast":
                return [(0, count, 1 << self.root)]
            case "scatter":
                return [(*_part(count, p, rank), 1 << self.root)]
            case "alltoall":
                return [(*_part(count, p * p, src * p + rank), 1 << src) for src in range(p)]
            case _:
                return [(0, count, self.everyone)] if rank == self.root else []

    def _placed(self, count: int) -> Iterator[tuple[tuple[int, int], CollectiveCell]]:
        """The elements of each cell."""
        total = Fraction(0)
        for cell in self.cells:
            start = floor(count * total)
            total += cell.share
            yield (start, floor(count * total)), cell


def _part(count: int, parts: int, part: int) -> tuple[int, int]:
    """One of the ranges of `split`."""
    return count * part // parts, count * (part + 1) // parts


def _joined(regions: Iterable[Region]) -> list[Region]:
    """Neighbouring regions of the same contributors as one; empty ones are left out."""
    found: list[Region] = []
    for start, stop, ranks in regions:
        if found and found[-1][1:] == (start, ranks):
            found[-1] = found[-1][0], stop, ranks
        elif stop > start:
            found.append((start, stop, ranks))
    return found


def check_dtype(dtype: str) -> int:
    """The size in bytes of an element; raises InputError for a type that is not in `DTYPE_BYTES`."""
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r}: {must_be_one_of(dtype, DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def check_reduction(reduction: str) -> str:
    """The reduction itself; raises InputError for one that is not in `REDUCTIONS`."""
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction {reduction!r}: {must_be_one_of(reduction, REDUCTIONS)}")
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
