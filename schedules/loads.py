"""Target loads of the ports of every server, for schedules that follow the rates; and expansion of trees over servers
to trees over their GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import column
from optcc.errors import TopologyError
from optcc.topology import Topology
from optcc.trees import Tree

Loads = npt.NDArray[np.float64]


def rates(topology: Topology) -> Mapping[str, Any]:
    """The rates of the servers and their GPUs; surviving NICs of a server are pooled."""
    if topology.rail_only and len(topology.rails_kept) > 1:
        raise TopologyError(f"{topology!r}: rail-only, and servers keep different rails: must be pooled")
    one = len(topology.servers) == 1
    pooled = [(Fraction(1), Fraction(1))] if one else list(zip(topology.out, topology.in_, strict=True))
    return {"rates": tuple(pooled), "gpus": tuple(server.gpus for server in topology.servers)}


def port_loads(rates: Loads, total: float) -> Loads:
    """The load of each port in messages: `total` in sum, in proportion to `rates`, and at least one each.

    >>> port_loads(np.array([2.0, 2.0, 2.0, 1.0]), 6).round(3).tolist()
    [1.667, 1.667, 1.667, 1.0]
    """
    at_least = np.zeros(len(rates), dtype=np.bool_)
    while not at_least.all():
        level = (total - at_least.sum()) / rates[~at_least].sum()
        below = ~at_least & (level * rates < 1)
        if not below.any():
            return np.where(at_least, 1.0, level * rates)
        at_least |= below
    return np.ones(len(rates))


def with_gpus(tree: Tree, gpus: Sequence[int], turn: int) -> Tree:
    """The tree over ranks for a tree over servers: one rank per server in turn, its other ranks around it."""
    first = np.concatenate(([0], np.cumsum(gpus)))[:-1]
    speaker = first + turn % np.array(gpus)
    ranks = np.arange(sum(gpus))
    server = np.repeat(np.arange(len(gpus)), gpus)
    silent = ranks[ranks != speaker[server]]
    parent = np.where(tree.parent < 0, -1, speaker[tree.parent])
    return Tree(
        column(np.concatenate((speaker[tree.order], silent))), column(np.concatenate((parent, speaker[server[silent]])))
    )
