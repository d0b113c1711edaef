"""OptCC's extension to several GPUs a server (arXiv 2606.01680), where NICs belong to GPUs: every hop over the fabric
to another GPU's NIC is charged.

A server first adds up shard j, a g-th of each segment, at its j-th GPU; the j-th GPUs of all servers run the four
stages of `optcc.schedules.optcc` on it; then the shards are copied inside each server. Where the j-th GPU has lost its
NIC, its shard is at one of the GPUs that kept theirs, in turn from segment to segment, so all NICs that are left carry
as much: PXN makes the whole server a straggler, as slow as its NICs together. Inside such a server each shard goes
along a chain of its GPUs, as a GPU that has the shards of two would otherwise receive twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from optcc.dsl import Program, schedule
from optcc.errors import TopologyError
from optcc.schedules.nccl_ring import owners_of_nics
from optcc.schedules.optcc import ACCEPTS, INSIDE, PAPER, STAGES, find_stragglers, passed_and_seeded
from optcc.topology import Topology


def stragglers_and_owners(topology: Topology) -> Mapping[str, Any]:
    """What `find_stragglers` gives, and for each server its GPUs with a NIC.

    Raises TopologyError also for a rail-only network where NICs are lost: a shard stays on one rail.
    """
    owners = owners_of_nics(topology)
    found = find_stragglers(topology)
    gpus = found["gpus"]
    inside = tuple(tuple(sorted({rank % gpus for rank in each})) for each in owners)
    if topology.rail_only and any(len(each) < gpus for each in inside):
        raise TopologyError(f"{topology!r}: rail-only: no NIC may be lost")
    return {**found, "owners": inside}


@schedule(
    name="optcc-nics",
    accepts=f"servers whose NICs belong to GPUs; {ACCEPTS}",
    paper=PAPER,
    configure=stragglers_and_owners,
    one_topology="which GPU has a shard depends on the NICs that each server has left",
)
def optcc_nics(program: Program, stragglers: Sequence[int], gpus: int, owners: Sequence[Sequence[int]]) -> None:
    """`optcc` for shards of a segment, each at a GPU with a NIC in every server.

    With q healthy servers of rate B, m stragglers, the slowest of rate B/l, and fabrics of rate f a GPU:

        n * max(l / B, (2(q - 1) + m)/q / B, 2(g - 1)/g / f)

    where the NICs of a server that are left share what it carries; `optcc` says what few segments cost.

    >>> built = optcc_nics(n_ranks=6, stragglers=[2], gpus=2, owners=[(0, 1), (0, 1), (1,)])
    >>> print(*[each for each in built if each.src == 5 and each.stage == "3 from straggler"][:2])
    5->0 s0 c0 copy [3 from straggler] 5->1 s0 c2 copy [3 from straggler]
    """
    servers = range(len(owners))
    healthy = [server for server in servers if server not in stragglers]
    q = len(healthy)
    for name in (INSIDE[0], *STAGES, INSIDE[1]):
        with program.stage(name):
            pass
    for segment in program.pipeline(sections=gpus * q):
        at = [
            [_home(server * gpus, owners[server], shard, segment.index) for shard in range(gpus)] for server in servers
        ]
        passed, seeded = passed_and_seeded(stragglers, segment.index, q)
        chunks = list(product(range(q), range(gpus)))
        with program.stage(INSIDE[0]):
            for (section, shard), server in product(chunks, servers):
                for src, dst in _up(server, gpus, at[server][shard], len(owners[server]) < gpus):
                    segment[shard * q + section].reduce(src=src, dst=dst)
        with program.stage(STAGES[2]):
            for (owner, slow), shard in product(seeded, range(gpus)):
                after = healthy[(owner + 1) % q]
                segment[shard * q + owner].reduce(src=at[slow][shard], dst=at[after][shard])
        with program.stage(STAGES[0]):
            for step, i, shard in product(range(q - 1), range(q), range(gpus)):
                src, dst = at[healthy[i]][shard], at[healthy[(i + 1) % q]][shard]
                segment[shard * q + (i - step - 1) % q].reduce(src=src, dst=dst)
        with program.stage(STAGES[1]):
            for (owner, slow), shard in product(passed, range(gpus)):
                segment[shard * q + owner].reduce(src=at[healthy[owner]][shard], dst=at[slow][shard])
        with program.stage(STAGES[2]):
            for (owner, slow), shard in product(passed, range(gpus)):
                segment[shard * q + owner].copy(src=at[slow][shard], dst=at[healthy[owner]][shard])
        with program.stage(STAGES[3]):
            for step, i, shard in product(range(q - 1), range(q), range(gpus)):
                src, dst = at[healthy[i]][shard], at[healthy[(i + 1) % q]][shard]
                segment[shard * q + (i - step) % q].copy(src=src, dst=dst)
        with program.stage(STAGES[1]):
            for (owner, slow), shard in product(seeded, range(gpus)):
                segment[shard * q + owner].copy(src=at[healthy[owner]][shard], dst=at[slow][shard])
        with program.stage(INSIDE[1]):
            for (section, shard), server in product(chunks, servers):
                for dst, src in reversed([*_up(server, gpus, at[server][shard], len(owners[server]) < gpus)]):
                    segment[shard * q + section].copy(src=src, dst=dst)


def _home(first: int, owners: Sequence[int], shard: int, turn: int) -> int:
    """The rank that has a shard in a server whose ranks begin with `first`."""
    return first + (shard if shard in owners else owners[(shard + turn) % len(owners)])


def _up(server: int, gpus: int, home: int, in_chain: bool) -> Iterator[tuple[int, int]]:
    """Child and parent, the deepest first, of a chain of the server's ranks that ends at `home`, or of a star."""
    ranks = range(server * gpus, (server + 1) * gpus)
    if in_chain:
        yield from pairwise([*range(home + 1, ranks.stop), *range(ranks.start, home + 1)])
    else:
        yield from ((rank, home) for rank in ranks if rank != home)
