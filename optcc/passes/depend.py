"""Dependencies from bytes: read after write, write after read, write after write.

before  #0 0->1 bytes 0..9   #1 1->2 bytes 5..9        after  #1 after #0: it reads what #0 wrote
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from optcc.arrays import Column, Lists, column, sort_part
from optcc.compiled import compiled
from optcc.transfers import Transfers

_MIX = 0x1E3779B97F4A7C15
"""Spreads numbers over a hash table."""


def depend(transfers: Transfers) -> Transfers:
    """The same transfers with `after` filled: executing them in any order that respects it means what the order means
    in which they stand.

    A transfer comes after the last writer of what it reads or reduces into, and after whoever read what it overwrites;
    what follows from these is left out.
    """
    starts = np.zeros(len(transfers) + 1, dtype=np.int64)
    after = _kernels().find_after(_touched(transfers), starts)
    return replace(transfers, after=Lists(column(starts), column(after)))


class _Touched(NamedTuple):
    """Which atoms each transfer reads, `read[t]` up to `read_stop[t]`, and writes.

    An atom is a range of a rank's bytes that no transfer cuts; the atoms of a rank have consecutive numbers.
    """

    read: Column
    read_stop: Column
    write: Column
    write_stop: Column
    atoms: int


def _touched(transfers: Transfers) -> _Touched:
    t = transfers
    cuts, place = _numbered(
        np.concatenate((t.src_offset, t.src_offset + t.bytes, t.dst_offset, t.dst_offset + t.bytes))
    )
    place += np.concatenate((t.src, t.src, t.dst, t.dst)) * len(cuts)
    atoms = t.n_ranks * len(cuts)
    if atoms > len(place):  # most of them untouched
        known, place = _numbered(place)
        atoms = len(known)
    read, read_stop, write, write_stop = np.split(place, 4)
    return _Touched(read, read_stop, write, write_stop, atoms)


def _numbered(values: Column) -> tuple[Column, Column]:
    """The distinct values, sorted, and for each entry the position of its value."""
    number = np.empty(len(values), dtype=np.int64)
    distinct = _kernels().distinct(values, np.zeros(2 << len(values).bit_length(), dtype=np.int64), number)
    order = np.argsort(distinct)
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return distinct[order], position[number]


@cache
def _kernels() -> Any:
    """The functions of `_KERNELS` by name, compiled if numba is there."""
    return compiled(_KERNELS, globals())


def _distinct(values: Column, table: Column, number: Column) -> Column:
    """The distinct values in the order in which they come, and in `number` for each entry the place of its value.

    `table` has zeros, a power of two of them and more than there are values.
    """
    mask = len(table) - 1
    found = np.empty(len(values), dtype=np.int64)
    count = 0
    for index in range(len(values)):
        value = int(values[index])
        at = ((value * _MIX) >> 24) & mask
        while table[at] and found[table[at] - 1] != value:
            at = (at + 1) & mask
        if not table[at]:
            found[count] = value
            count += 1
            table[at] = count
        number[index] = table[at] - 1
    return found[:count].copy()


def _find_after(touched: _Touched, starts: Column) -> Column:
    """What each transfer comes after, list behind list, ascending; `starts[t + 1]` becomes the end of t's.

    `writer` is the last writer of each atom. Who has read it since is a linked list of entries, the newest first.
    """
    n = len(touched.read)
    reads = writes = 0
    for index in range(n):
        reads += touched.read_stop[index] - touched.read[index]
        writes += touched.write_stop[index] - touched.write[index]
    writer = np.full(touched.atoms, -1, dtype=np.int64)
    newest = np.full(touched.atoms, -1, dtype=np.int64)
    reader, older = np.empty(reads, dtype=np.int64), np.empty(reads, dtype=np.int64)
    named = np.full(n + 1, -1, dtype=np.int64)  # the last transfer that came after this one; the last entry is for none
    after = np.empty(2 * reads + writes, dtype=np.int64)
    entry = used = 0
    for index in range(n):
        begin = used
        named[-1] = index
        for atom in range(touched.read[index], touched.read_stop[index]):
            if named[writer[atom]] != index:
                named[writer[atom]] = index
                after[used] = writer[atom]
                used += 1
        for atom in range(touched.write[index], touched.write_stop[index]):
            at = newest[atom]
            if at < 0 and named[writer[atom]] != index:
                named[writer[atom]] = index
                after[used] = writer[atom]
                used += 1
            while at >= 0:  # each of these already comes after the last writer
                if named[reader[at]] != index:
                    named[reader[at]] = index
                    after[used] = reader[at]
                    used += 1
                at = older[at]
        for atom in range(touched.read[index], touched.read_stop[index]):
            reader[entry], older[entry] = index, newest[atom]
            newest[atom] = entry
            entry += 1
        for atom in range(touched.write[index], touched.write_stop[index]):
            writer[atom], newest[atom] = index, -1
        sort_part(after, begin, used)
        starts[index + 1] = used
    return after[:used]


_KERNELS = (sort_part, _distinct, _find_after)
