"""Small trees over servers whose NICs belong to GPUs: every tree enters and leaves a server by the NIC of one GPU.

`optcc.schedules.optimal` says how the trees over servers must be mixed so that each server sends and receives what its
NICs allow. Here a tree passes a server through one of its GPUs, its *home* there, and inside the server all GPUs form a
small tree around the home. The homes of a server are its GPUs with NICs, in turn, each as often as its NICs' share of
the server's rate asks for; the trees inside follow from deficits like those outside, so that every GPU carries as much
of the traffic inside. So a GPU without a NIC sends to a home by the fabric, which is the way over another GPU's NIC
that NCCL calls PXN, and it costs nothing more than a tree over all GPUs costs anyway: g - 1 transfers in a server.

On a rail-only network all homes of a tree are on one rail. Rails that some server has lost carry nothing then; the
packing of the linear program (`packed`) uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import cycle
from typing import Any

import numpy as np

from optcc.arrays import column
from optcc.dsl import Program, pure, schedule
from optcc.errors import TopologyError
from optcc.schedules.loads import Loads
from optcc.schedules.optimal import grow, tree_pairs
from optcc.schedules.tree_turns import Trees, together
from optcc.topology import Server, Topology
from optcc.trees import Tree

Rates = Sequence[Sequence[Fraction]]
"""By rail (one for all where the core joins them), server and GPU: the rate of its NICs, the smaller way."""
WHOLE = (Fraction(1),)
"""One pipeline over the whole message."""
DEGREE = 2
"""Children of an inner node inside a server."""


def nics_of_gpus(topology: Topology) -> Mapping[str, Any]:
    """The rates of the servers, and of the NICs of their GPUs on each rail that can be used."""
    if topology.graph is not None or topology.wired is None:
        raise TopologyError(f"{topology!r}: NICs must belong to GPUs")
    if len(topology.servers) == 1:
        raise TopologyError(f"{topology!r}: must have several servers")
    rails: Sequence[int | None] = (None,)
    if topology.rail_only:
        rails = sorted(set.intersection(*(set(kept) for kept in topology.rails_kept)))
        if not rails:
            raise TopologyError(f"{topology!r}: rail-only, and no rail is left at all servers")
    by_rail = [[_by_gpu(server, rail) for server in topology.servers] for rail in rails]
    return {"rails": tuple(by_rail), "rates": tuple(zip(topology.out, topology.in_, strict=True))}


def _by_gpu(server: Server, rail: int | None) -> tuple[Fraction, ...]:
    found = [Fraction(0)] * server.gpus
    for nic in server.nics:
        if not nic.failed and rail in (None, nic.rail):
            found[nic.gpu or 0] += min(nic.out, nic.in_)
    return tuple(found)


@schedule(
    name="nic-trees",
    accepts="servers whose NICs belong to GPUs",
    paper="optcc, docs/schedules.md",
    configure=nics_of_gpus,
)
def nic_trees(program: Program, rails: Sequence[Rates], rates: Sequence[tuple[Fraction, Fraction]]) -> None:
    """Each segment goes along small trees over servers, which pass a server through a GPU with a NIC, in turn.

    With k segments: n * max(1/out_v, 1/in_v, 2(p-1)/sum out, 2(p-1)/sum in) over servers, and a fill of about degree *
    log(GPUs) segments, as long as the fabrics are faster: a GPU carries 2(g-1)/g of the message there, each way.

    >>> one, none = Fraction(1), Fraction(0)
    >>> nics = [(one, one), (one, none)]
    >>> schedule = nic_trees(n_ranks=4, segments=2, rails=[nics], rates=[(2 * one, 2 * one), (one, one)])
    >>> schedule.stages, len(schedule)
    (('reduce', 'broadcast'), 12)
    """
    for reducing, broadcasting in together(program, WHOLE, trees_in_turn(rails, rates)):
        with program.stage("reduce"):
            for _, segment, up in reducing:
                segment[0].reduce_along(up)
        with program.stage("broadcast"):
            for _, segment, down in broadcasting:
                segment[0].broadcast_along(down)


@pure
def trees_in_turn(rails: Sequence[Rates], rates: Sequence[tuple[Fraction, Fraction]]) -> Iterator[list[Trees]]:
    """For segment after segment its pair of trees, of one rail after the other; endless."""
    for homes in cycle([_Homes(servers, rates) for servers in rails]):
        yield [next(homes)]


class _Homes(Iterator[tuple[Tree, Tree]]):
    """Endless pairs of trees over the GPUs with a common root, on one rail or on all together.

    `due[s][g]` is how much GPU g of server s is to carry between servers and has not; `owed[way][s][g]` its deficit of
    children inside, in trees that reduce (0) and that broadcast (1).
    """

    def __init__(self, nics: Rates, rates: Sequence[tuple[Fraction, Fraction]]) -> None:
        out, in_ = (np.array([float(pair[side]) for pair in rates]) for side in (0, 1))
        self.gpus = [len(server) for server in nics]
        self.first = np.concatenate(([0], np.cumsum(self.gpus)))
        self.share: list[Loads] = [np.array([float(each / sum(server)) for each in server]) for server in nics]
        self.due = [np.zeros(gpus) for gpus in self.gpus]
        self.owed = [[np.zeros(gpus) for gpus in self.gpus] for _ in range(2)]
        self.over_servers = tree_pairs(out, in_, [1] * len(self.gpus))

    def __next__(self) -> tuple[Tree, Tree]:
        pair = next(self.over_servers)
        edges = np.zeros(len(self.gpus))
        for tree in pair:
            np.add.at(edges, tree.order[1:], 1)
            np.add.at(edges, tree.parent[1:], 1)
        homes = [self._home(server, edges[server]) for server in range(len(self.gpus))]
        return self._over_gpus(pair[0], 0, homes), self._over_gpus(pair[1], 1, homes)

    def _home(self, server: int, edges: float) -> int:
        """The GPU with a NIC that is furthest behind, which is then charged with these edges."""
        due, share = self.due[server], self.share[server]
        due += share * edges
        home = int(np.where(share > 0, due, -np.inf).argmax())
        due[home] -= edges
        return home

    def _over_gpus(self, tree: Tree, way: int, homes: Sequence[int]) -> Tree:
        """The tree over the GPUs for a tree over the servers."""
        order: list[int] = []
        parent: list[int] = []
        for server, above in zip(tree.order.tolist(), tree.parent.tolist(), strict=True):
            first, gpus, owed = int(self.first[server]), self.gpus[server], self.owed[way][server]
            order.append(first + homes[server])
            parent.append(-1 if above < 0 else int(self.first[above]) + homes[above])
            if gpus > 1:
                # A home has no parent inside, so it has as much more time for children.
                owed += (gpus - 2) / gpus + self.share[server]
                urgent = np.argsort(-owed, kind="stable")
                inside = grow(owed, homes[server], DEGREE, urgent, leaves_last=way == 0)
                order += (first + inside.order[1:]).tolist()
                parent += (first + inside.parent[1:]).tolist()
        return Tree(column(order), column(parent))
