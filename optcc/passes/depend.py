"""Dependencies from bytes: read after write, write after read, write after write.

before  #0 0->1 bytes 0..9   #1 1->2 bytes 5..9        after  #1 after #0: it reads what #0 wrote
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optcc.arrays import Column, Lists
from optcc.transfers import Transfers


def depend(transfers: Transfers) -> Transfers:
    """The same transfers with `after` filled: executing them in any order that respects it means what the order means
    in which they stand.

    A transfer comes after the last writer of what it reads or reduces into, and after whoever read what it overwrites;
    what follows from these is left out.
    """
    ends = (transfers.src_offset + transfers.bytes, transfers.dst_offset + transfers.bytes)
    cuts = np.unique(np.concatenate((transfers.src_offset, transfers.dst_offset, *ends)))
    src_atoms = _atoms(cuts, transfers.src_offset, ends[0], transfers.src)
    dst_atoms = _atoms(cuts, transfers.dst_offset, ends[1], transfers.dst)
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    after: list[list[int]] = []
    for index, (reads, writes) in enumerate(zip(src_atoms, dst_atoms, strict=True)):
        before: set[int] = set()
        for atom in reads:
            if atom in writer:
                before.add(writer[atom])
        for atom in writes:
            if readers.get(atom):
                before.update(readers[atom])  # each of these already comes after the last writer
            elif atom in writer:
                before.add(writer[atom])
        for atom in reads:
            readers.setdefault(atom, []).append(index)
        for atom in writes:
            writer[atom] = index
            readers[atom] = []
        after.append(sorted(before))
    return replace(transfers, after=Lists.of(after))


def _atoms(cuts: Column, start: Column, stop: Column, rank: Column) -> list[range]:
    """For each byte range, the numbers of the atoms (ranges between cuts, counted rank by rank) that it covers."""
    base = rank * len(cuts)
    first = (base + np.searchsorted(cuts, start)).tolist()
    last = (base + np.searchsorted(cuts, stop)).tolist()
    return [range(low, high) for low, high in zip(first, last, strict=True)]
