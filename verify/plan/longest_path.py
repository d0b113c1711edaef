"""The longest path to every node of an acyclic graph, in whole numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.compiled import compiled


def longest_paths(
    order: Column, first: Column, after: Column, weight: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], Column]:
    """The length of the longest path to each node, and the last edge of that path (-1: the node has no predecessor).

    Edges are packed by their tail (`optcc.verify.plan.topological_order.pack_edges`), `order` is topological, weights
    are not negative. Integers of 64 bits are added compiled and must not overflow; an array of dtype object holds
    Python's integers. (networkx, a dictionary for each edge, takes 3.4 s for a plan of 73,344 transfers, this 2 ms.)

    >>> order, first, after = np.array([0, 1, 2]), np.array([0, 2, 3, 3]), np.array([1, 2, 2])
    >>> length, cause = longest_paths(order, first, after, np.array([5, 9, 6]))
    >>> length.tolist(), cause.tolist()
    ([0, 5, 11], [-1, 0, 2])
    """
    nodes, is_wide = len(first) - 1, weight.dtype == object
    length = np.array([0] * nodes, dtype=object) if is_wide else np.zeros(nodes, dtype=np.int64)
    cause = np.full(nodes, -1, dtype=np.int64)
    extend = _extend_paths if is_wide else _kernels().extend_paths
    extend(order, first, after, weight, length, cause)
    return length, cause


@cache
def _kernels() -> Any:
    return compiled((_extend_paths,), globals())


def _extend_paths(
    order: Column, first: Column, after: Column, weight: npt.NDArray[Any], length: npt.NDArray[Any], cause: Column
) -> None:
    for node in order:
        for edge in range(first[node], first[node + 1]):
            head = after[edge]
            reached = length[node] + weight[edge]
            if cause[head] < 0 or reached > length[head]:
                length[head] = reached
                cause[head] = edge
