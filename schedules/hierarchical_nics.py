"""`hierarchical` on servers whose NICs belong to GPUs: every hop over the fabric to another GPU's NIC is charged.

Behind a core the shard of a GPU that has lost its NIC is at one of the GPUs that kept theirs, in turn from segment to
segment, so all NICs that are left carry as much. Rail-only there is a shard for each rail that all servers have, as
NCCL's rings are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from optcc.dsl import Program, schedule
from optcc.schedules.hierarchical import equal_servers
from optcc.schedules.nccl_ring import heads_of_channels, owners_of_nics
from optcc.topology import Topology


def homes_of_shards(topology: Topology) -> Mapping[str, Any]:
    """The GPUs of a server, and for each server the ranks that have each shard, in turn.

    Raises TopologyError where NICs do not belong to GPUs, servers have not equally many of them, or no rail is left at
    all servers.
    """
    owners, gpus = owners_of_nics(topology), equal_servers(topology)["gpus"]
    if topology.rail_only:
        _, heads = heads_of_channels(topology)
        return {"gpus": gpus, "homes": tuple(zip(*[[(rank,) for rank in each] for each in heads], strict=True))}
    homes = []
    for server, kept in enumerate(owners):
        ranks = range(server * gpus, (server + 1) * gpus)
        homes.append(tuple((rank,) if rank in kept else tuple(dict.fromkeys(kept)) for rank in ranks))
    return {"gpus": gpus, "homes": tuple(homes)}


@schedule(
    name="hierarchical-nics",
    accepts="servers with equally many GPUs, whose NICs belong to them; rail-only: of which some rail is left at all",
    paper="Cho et al., 'BlueConnect: decomposing all-reduce for deep learning ...', MLSys 2019; NCCL: PXN",
    configure=homes_of_shards,
    one_topology="which GPU has a shard depends on the NICs that each server has left",
)
def hierarchical_nics(program: Program, gpus: int, homes: Sequence[Sequence[Sequence[int]]]) -> None:
    """Reduce-scatter in each server, a ring over the servers for every shard, all-gather in each server.

    Inside, a shard is added up along a chain of the server's g GPUs that ends at the one that has it. With N servers,
    the slowest server's NICs of rate b together and fabrics of rate f a GPU it takes, for many segments,

        n * max(2(N - 1)/N / b, 2(g - 1)/g / f)

    and up to 2 n / f inside where a GPU has several shards.

    >>> built = hierarchical_nics(n_ranks=4, gpus=2, homes=[[(0,), (1,)], [(3,), (3,)]])
    >>> [str(each) for each in built if each.stage == "reduce-scatter across"][:2]
    ['0->3 s0 c0 reduce [reduce-scatter across]', '1->3 s0 c2 reduce [reduce-scatter across]']
    """
    n_servers, n_shards = len(homes), len(homes[0])
    everywhere = list(product(range(n_servers), range(n_shards)))
    for segment in program.pipeline(sections=n_shards * n_servers):
        at = [[ranks[(shard + segment.index) % len(ranks)] for shard, ranks in enumerate(each)] for each in homes]
        chains = {
            (server, shard): list(pairwise(_chain(server * gpus, gpus, at[server][shard])))
            for server, shard in everywhere
        }
        with program.stage("reduce-scatter inside"):
            for turn, step, (server, shard) in product(range(n_servers), range(gpus - 1), everywhere):
                src, dst = chains[server, shard][step]
                segment[shard * n_servers + (server - turn) % n_servers].reduce(src=src, dst=dst)
        with program.stage("reduce-scatter across"):
            for step, (server, shard) in product(range(n_servers - 1), everywhere):
                part, after = (server - step) % n_servers, (server + 1) % n_servers
                segment[shard * n_servers + part].reduce(src=at[server][shard], dst=at[after][shard])
        with program.stage("all-gather across"):
            for step, (server, shard) in product(range(n_servers - 1), everywhere):
                part, after = (server + 1 - step) % n_servers, (server + 1) % n_servers
                segment[shard * n_servers + part].copy(src=at[server][shard], dst=at[after][shard])
        with program.stage("all-gather inside"):
            for turn, step, (server, shard) in product(range(n_servers), range(gpus - 1), everywhere):
                dst, src = chains[server, shard][-1 - step]
                segment[shard * n_servers + (server + 1 - turn) % n_servers].copy(src=src, dst=dst)


def _chain(first: int, gpus: int, home: int) -> list[int]:
    """The ranks of a server in the order of their numbers, so turned that `home` is the last."""
    return [*range(home + 1, first + gpus), *range(first, home + 1)]
