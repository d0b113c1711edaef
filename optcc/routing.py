"""The route of each transfer through a `Graph` of GPUs and switches."""

from __future__ import annotations

import numpy as np

from optcc.arrays import Column, column
from optcc.errors import TopologyError
from optcc.graph import Graph
from optcc.transfers import Transfers


def first_and_last(transfers: Transfers, graph: Graph) -> tuple[Column, Column]:
    """The first link of each transfer's route and its last one; -1 for a local operation.

    Raises TopologyError for a transfer between GPUs that no route joins.
    """
    pair = transfers.src * transfers.n_ranks + transfers.dst
    used, place = np.unique(pair, return_inverse=True)
    ends = np.full((2, len(used)), -1, dtype=np.int64)
    for number, code in enumerate(used.tolist()):
        src, dst = divmod(code, transfers.n_ranks)
        if src == dst:
            continue
        route = graph.routes[src].get(dst)
        if route is None:
            at = transfers.describe(int(np.flatnonzero(pair == code)[0]))
            raise TopologyError(f"transfer {at}: no route from {graph.gpus[src]} to {graph.gpus[dst]} but through GPUs")
        ends[:, number] = route[0], route[-1]
    return column(ends[0][place]), column(ends[1][place])


def lanes_of_ports(transfers: Transfers, graph: Graph) -> tuple[Column, Column]:
    """For each transfer, the number of its out port among those of its sender, and of its in port at its receiver."""
    first, last = first_and_last(transfers, graph)
    out, in_ = ([0] * len(graph.links) for _ in "io")
    counts = [[0] * len(graph.nodes) for _ in "io"]
    for number, link in enumerate(graph.links):
        for lane, count, node in ((out, counts[0], link.tail), (in_, counts[1], link.head)):
            lane[number] = count[node]
            count[node] += 1
    return (
        column(np.where(first < 0, 0, np.array(out, dtype=np.int64)[first])),
        column(np.where(last < 0, 0, np.array(in_, dtype=np.int64)[last])),
    )
