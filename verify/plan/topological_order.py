"""Topological sorting by Kahn's algorithm, on edges packed by their tail."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from optcc.arrays import Column
from optcc.compiled import compiled


def pack_edges(n_nodes: int, before: Column, after: Column) -> tuple[Column, Column]:
    """The edges `before[i]` -> `after[i]` as (first, following): node v's are following[first[v] : first[v + 1]].

    Edges of one node keep their given order.
    """
    first = np.zeros(n_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(before, minlength=n_nodes), out=first[1:])
    return first, after[np.argsort(before, kind="stable")]


def topological_order(first: Column, following: Column) -> Column:
    """All nodes in a topological order; shorter if some are on a cycle or behind one.

    Ties are broken first in, first out, starting with the sources by number.

    >>> topological_order(*pack_edges(4, np.array([2, 2, 0]), np.array([1, 0, 1]))).tolist()
    [2, 3, 0, 1]
    >>> topological_order(*pack_edges(3, np.array([0, 1]), np.array([1, 0]))).tolist()
    [2]
    """
    n_nodes = len(first) - 1
    order = np.empty(n_nodes, dtype=np.int64)
    missing = np.bincount(following, minlength=n_nodes)
    return order[: _kernels().sort(first, following, missing, order)]


@cache
def _kernels() -> Any:
    return compiled((_sort,), globals())


def _sort(first: Column, following: Column, missing: Column, order: Column) -> int:
    """Writes the order and returns its length; `missing` is the in-degree of each node."""
    count = 0
    for node in range(len(missing)):
        if missing[node] == 0:
            order[count] = node
            count += 1
    at = 0
    while at < count:
        node = order[at]
        at += 1
        for edge in range(first[node], first[node + 1]):
            missing[following[edge]] -= 1
            if missing[following[edge]] == 0:
                order[count] = following[edge]
                count += 1
    return count
