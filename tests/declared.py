"""A user's file with a schedule of a collective of its own, for commands that read one."""

from __future__ import annotations

ADD_EDGES = """
from optcc import Collective
from optcc.dsl import schedule


def edges(p):
    sides = [(rank, element % p) for rank in range(p) for element in (rank - 1, rank)]
    after = [(rank, element, [element, (element + 1) % p]) for rank, element in sides]
    return Collective.declared("edges", p, before=sides, after=after)


@schedule(collective=edges)
def add_edges(program):
    p = program.n_ranks
    for parts in program.cells():
        for rank, part in enumerate(parts):
            part.reduce(src=rank, dst=(rank + 1) % p)
            part.copy(src=(rank + 1) % p, dst=rank)
"""
"""Each rank has two elements, of which it shares each with a neighbour, and ends with the sums of two."""
