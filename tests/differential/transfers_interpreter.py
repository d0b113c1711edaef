"""An interpreter of `optcc-transfers/1` that shares no code with optcc: what the form means, said a second time.

It is the referee between the compiler and the proofs, so it takes nothing from them. `check` reads the text with the
standard library and holds it to the four promises of the form:

1. the file is well formed, and `after` and `order` together have no cycle;
2. no two transfers that `after` leaves unordered touch the same bytes of a rank, one of them writing (by brute force
   over all pairs; a reduce both reads and writes what it changes). Then any overlap of two transfers in time gives
   what one after the other gives, so trying whole transfers in some sequence is enough;
3. in several random sequences that `after` allows, counted exactly: every element of every rank ends as the sum of
   the same element of each rank, each once;
4. in the same sequences on real numbers: the result is what numpy says.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_KEYS = {"format", "ranks", "collective", "reduction", "dtype", "size_bytes", "scratch_bytes"}
_OFFSETS = {"src_offset", "dst_offset", "bytes"}
TRANSFER_KEYS = {"id", "src", "dst", "op", "segment", "stage", "after", "order"} | _OFFSETS
ITEM_BYTES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
RANGES = {"float16": 100, "bfloat16": 20}
"""Summands up to this are exact in short types, for a few ranks; up to 1000 in the others, where bytes wrap around."""
SEEDS = (1, 2, 3)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Transfer:
    """A line of the file."""

    id: int
    src: int
    dst: int
    op: str
    src_offset: int
    dst_offset: int
    bytes: int
    after: tuple[int, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"#{self.id} {self.src}->{self.dst} {self.op} {self.dst_offset}..{self.dst_offset + self.bytes - 1}"


@dataclass(frozen=True)
class File:
    """The header and the lines."""

    ranks: int
    reduction: str
    dtype: str
    size_bytes: int
    scratch_bytes: int
    transfers: tuple[Transfer, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """Elements of the message."""
        return self.size_bytes // self.item_bytes

    @property
    def scratch_count(self) -> int:
        """Elements of scratch space."""
        return self.scratch_bytes // self.item_bytes


class Malformed(Exception):
    """The text is not of the form."""


def check(text: str, seeds: Sequence[int] = SEEDS) -> list[str]:
    """What is wrong with an AllReduce in the transfers form; an empty list if it is correct.

    Problems are named in the order of the promises above, and a later promise is only asked if the earlier ones hold,
    except that a race does not hide a wrong result.
    """
    try:
        file = parse(text)
        below = ancestors(file)
        next(linear_extensions(file, [transfer.after + transfer.order for transfer in file.transfers], [0]))
    except Malformed as error:
        return [f"malformed: {error}"]
    problems = [f"race: {race}" for race in races(file, below)]
    after = [transfer.after for transfer in file.transfers]
    for seed, sequence in zip(seeds, linear_extensions(file, after, seeds), strict=True):
        problems += [f"seed {seed}: {problem}" for problem in contributions(file, sequence)]
        problems += [f"seed {seed}: {problem}" for problem in numbers(file, sequence, seed)]
    return problems


def parse(text: str) -> File:
    """The file in `text`; raises Malformed."""
    lines = text.split("\n")
    require(lines.pop() == "", "the last line does not end")
    require(bool(lines), "no header")
    documents = []
    for number, line in enumerate(lines, start=1):
        try:
            documents.append(json.loads(line))
        except ValueError as error:
            raise Malformed(f"line {number}: {error}") from None
        require(type(documents[-1]) is dict, f"line {number}: not an object")
    header, *rows = documents
    require(set(header) == HEADER_KEYS, f"header has the keys {sorted(header)}")
    require(header["format"] == "optcc-transfers/1", "format")
    require(header["collective"] == "allreduce", "this interpreter knows AllReduce alone")
    require(header["dtype"] in ITEM_BYTES, "dtype")
    bitwise = ("band", "bor", "bxor") if "int" in header["dtype"] else ()
    require(header["reduction"] in ("sum", "prod", "min", "max", "avg", *bitwise), "reduction")
    for key in ("ranks", "size_bytes", "scratch_bytes"):
        require(type(header[key]) is int and header[key] >= (key == "ranks"), f"header {key}")
    item_bytes, buffer_bytes = ITEM_BYTES[header["dtype"]], header["size_bytes"] + header["scratch_bytes"]
    require(header["size_bytes"] % item_bytes == 0 and header["scratch_bytes"] % item_bytes == 0, "not whole elements")
    transfers = []
    for index, row in enumerate(rows):
        where = f"line {index + 2}"
        require(set(row) == TRANSFER_KEYS, f"{where}: keys {sorted(row)}")
        require(row["id"] == index, f"{where}: id {row['id']} is not {index}")
        require(row["op"] in ("reduce", "copy"), f"{where}: op")
        require(type(row["stage"]) is str, f"{where}: stage")
        for key in ("src", "dst", "src_offset", "dst_offset", "bytes", "segment"):
            require(type(row[key]) is int and row[key] >= 0, f"{where}: {key} {row[key]}")
        require(row["src"] < header["ranks"] and row["dst"] < header["ranks"], f"{where}: no such rank")
        require(row["bytes"] > 0, f"{where}: nothing to do")
        for key in ("src_offset", "dst_offset", "bytes"):
            require(row[key] % item_bytes == 0, f"{where}: {key} cuts an element")
        for key in ("src_offset", "dst_offset"):
            require(row[key] + row["bytes"] <= buffer_bytes, f"{where}: {key} leaves the buffer")
        for key in ("after", "order"):
            require(all(type(each) is int and 0 <= each < len(rows) for each in row[key]), f"{where}: {key}")
        numbers = {key: row[key] for key in ("id", "src", "dst", "src_offset", "dst_offset", "bytes")}
        transfers.append(Transfer(**numbers, op=row["op"], after=tuple(row["after"]), order=tuple(row["order"])))
    sizes = {key: header[key] for key in ("ranks", "size_bytes", "scratch_bytes")}
    return File(**sizes, reduction=header["reduction"], dtype=header["dtype"], transfers=tuple(transfers))


def require(condition: bool, complaint: str) -> None:
    """Raises Malformed unless `condition`."""
    if not condition:
        raise Malformed(complaint)


def linear_extensions(file: File, waits: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[Transfer]]:
    """For each seed a random sequence of all transfers in which i comes after all of `waits[i]`; Malformed: a cycle.

    Seeds of even place prefer what became ready last, which drives a few ranks far ahead of the others.
    """
    unlocks: list[list[int]] = [[] for _ in waits]
    for index, each in enumerate(waits):
        for earlier in set(each):
            unlocks[earlier].append(index)
    for place, seed in enumerate(seeds):
        draw = random.Random(seed)
        missing = [len(set(each)) for each in waits]
        ready = [index for index, count in enumerate(missing) if count == 0]
        sequence: list[Transfer] = []
        while ready:
            latest = place % 2 == 0 and draw.random() < 0.8
            position = len(ready) - 1 if latest else draw.randrange(len(ready))
            ready[position], ready[-1] = ready[-1], ready[position]
            index = ready.pop()
            sequence.append(file.transfers[index])
            for later in unlocks[index]:
                missing[later] -= 1
                if missing[later] == 0:
                    ready.append(later)
        if len(sequence) < len(waits):
            stuck = [index for index, count in enumerate(missing) if count > 0]
            raise Malformed(f"a cycle among transfers {stuck[:8]}")
        yield sequence


def ancestors(file: File) -> list[int]:
    """For each transfer, the set of all transfers that `after` puts before it, as bits; raises Malformed on a cycle."""
    below = [0] * len(file.transfers)
    for transfer in next(linear_extensions(file, [each.after for each in file.transfers], [0])):
        for earlier in transfer.after:
            below[transfer.id] |= below[earlier] | 1 << earlier
    return below


@dataclass(frozen=True)
class Access:
    """Bytes `start` up to `stop` of a rank that `transfer` reads or writes."""

    start: int
    stop: int
    writes: bool
    transfer: Transfer


def races(file: File, below: Sequence[int], shown_max: int = 3) -> list[str]:
    """Pairs that may meet: unordered by `after`, on common bytes of a rank, at least one of them writing."""
    accesses: list[list[Access]] = [[] for _ in range(file.ranks)]
    for each in file.transfers:
        accesses[each.src].append(Access(each.src_offset, each.src_offset + each.bytes, False, each))
        accesses[each.dst].append(Access(each.dst_offset, each.dst_offset + each.bytes, True, each))
    found: list[str] = []
    for rank, own in enumerate(accesses):
        own.sort(key=lambda access: access.start)
        for index, first in enumerate(own):
            for second in own[index + 1 :]:
                if second.start >= first.stop:
                    break
                a, b = first.transfer, second.transfer
                ordered = below[a.id] >> b.id & 1 or below[b.id] >> a.id & 1
                if (first.writes or second.writes) and not ordered:
                    stop = min(first.stop, second.stop)
                    found.append(f"rank {rank}, bytes {second.start}..{stop - 1}: {a} and {b}")
                    if len(found) == shown_max:
                        return found
    return found


def contributions(file: File, sequence: Sequence[Transfer]) -> list[str]:
    """Runs `sequence` on multisets: what reaches each element, how often. Names the first element that is wrong."""
    everything = file.count + file.scratch_count
    held: list[list[Counter[tuple[int, int]]]] = [
        [Counter({(rank, element): 1}) for element in range(everything)] for rank in range(file.ranks)
    ]
    for each in sequence:
        length = each.bytes // file.item_bytes
        source = held[each.src][each.src_offset // file.item_bytes :][:length]
        first = each.dst_offset // file.item_bytes
        if each.op == "reduce":
            source = [old + new for old, new in zip(held[each.dst][first:][:length], source, strict=True)]
        held[each.dst][first : first + length] = source
    for rank in range(file.ranks):
        for element in range(file.count):
            got = held[rank][element]
            want = Counter({(contributor, element): 1 for contributor in range(file.ranks)})
            if got != want:
                missing = sorted(contributor for contributor, _ in (want - got))
                return [
                    f"rank {rank} element {element}: misses the inputs of ranks {missing}, "
                    f"has {sorted((got - want).items())} too much"
                ]
    return []


def numbers(file: File, sequence: Sequence[Transfer], seed: int) -> list[str]:
    """Runs `sequence` on numbers for which the reduction is exact in every type, and compares with numpy's.

    `avg` is a sum here: the division by the number of ranks is not part of the form.
    """
    draw = np.random.default_rng(seed)
    reduce = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    reduce |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    step = reduce[file.reduction]
    largest = RANGES.get(file.dtype, 1000)
    choices = [-2, -1, 1, 2] if file.reduction == "prod" else range(-largest, largest + 1)
    dtype = "float32" if file.dtype == "bfloat16" else file.dtype
    inputs = draw.choice(np.array(choices), size=(file.ranks, file.count)).astype(dtype)
    garbage = draw.integers(10**3, 2 * 10**3, size=(file.ranks, file.scratch_count)).astype(dtype)
    buffers: Array = np.concatenate((inputs, garbage), axis=1)
    for each in sequence:
        length = each.bytes // file.item_bytes
        first, at = each.src_offset // file.item_bytes, each.dst_offset // file.item_bytes
        source = buffers[each.src, first : first + length].copy()
        target = buffers[each.dst, at : at + length]
        target[:] = step(target, source) if each.op == "reduce" else source
    wrong = np.argwhere(buffers[:, : file.count] != step.reduce(inputs, axis=0, dtype=inputs.dtype))
    if not len(wrong):
        return []
    rank, element = wrong[0]
    return [f"{len(wrong)} wrong numbers, the first at rank {rank} element {element}"]
