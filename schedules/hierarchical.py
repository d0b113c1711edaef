"""AllReduce over servers of several GPUs: traffic inside a server does not load its NICs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optcc.dsl import Program, schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.topology import Topology


def equal_servers(topology: Topology) -> Mapping[str, Any]:
    """The number of GPUs per server, if equal on all."""
    first = topology.servers[0]
    for server in topology.servers:
        if server.gpus != first.gpus:
            raise TopologyError(
                f"{topology!r}: {first.name} has {first.gpus} GPUs, {server.name} {server.gpus}: must be equally many"
            )
    return {"gpus": first.gpus}


@schedule(
    accepts="servers with equally many GPUs",
    paper="Cho et al., 'BlueConnect: decomposing all-reduce for deep learning ...', MLSys 2019",
    configure=equal_servers,
)
def hierarchical(program: Program, gpus: int) -> None:
    """Reduce-scatter in each server, a ring over the servers for every GPU index, all-gather in each server.

    The message has a shard for each of the g = `gpus` GPUs of a server, and a shard a part for each of the N servers.
    In the first stage the j-th GPU of every server gets the server's sum of shard j. In the second and third the j-th
    GPUs of all servers are a ring that reduces shard j: g rings side by side, which use all NICs. In the last one
    every GPU sends its shard to its server. Inside, parts are sent in the order in which the ring across needs them.

    A server sends and receives 2(N - 1)/N of the message, a GPU 2(g - 1)/g through the fabric inside. With the slowest
    server's bandwidth b and fabrics of rate f a GPU, that is 2(N - 1)/N * n / b across and 2(g - 1)/g * n / f inside:
    their sum if sequential, the larger of them with many segments, where a GPU sends inside and across concurrently.
    A rank of a plan sends one message at a time, so there a GPU needs 2(g - 1)/g * n / f + 2(N - 1)/(gN) * n / b.
    Latency adds 2(N + g - 2) alpha to one segment. One GPU a server is the ring, one server the ring inside it.

    If a server has lost NICs, the surviving ones carry the traffic of all its GPUs: a topology pools the NICs of a
    server, and b is their total rate. Forwarding as in NCCL's PXN, where a GPU relays through a peer next to a working
    NIC, has the same NIC loads, so it needs no schedule of its own. Its detour through the fabric is not
    counted.

    >>> schedule = hierarchical(n_ranks=4, gpus=2)
    >>> schedule.stages
    ('reduce-scatter inside', 'reduce-scatter across', 'all-gather across', 'all-gather inside')
    >>> str(schedule[8]), len(schedule)
    ('0->2 s0 c0 reduce [reduce-scatter across]', 24)

    Raises ScheduleError if the ranks are no whole number of servers.
    """
    p, g = program.n_ranks, gpus
    if g < 1 or p % g:
        raise ScheduleError(f"{g} GPUs a server: must divide the number of ranks, {p}")
    n_servers = p // g
    places = [divmod(rank, g) for rank in program.ranks]
    for segment in program.pipeline(sections=g * n_servers):
        with program.stage("reduce-scatter inside"):
            for turn in range(n_servers):
                for step in range(g - 1):
                    for rank, (server, gpu) in enumerate(places):
                        shard, part = (gpu - 1 - step) % g, (server - turn) % n_servers
                        segment[shard * n_servers + part].reduce(src=rank, dst=server * g + (gpu + 1) % g)
        with program.stage("reduce-scatter across"):
            for step in range(n_servers - 1):
                for rank, (server, gpu) in enumerate(places):
                    part = (server - step) % n_servers
                    segment[gpu * n_servers + part].reduce(src=rank, dst=(rank + g) % p)
        with program.stage("all-gather across"):
            for step in range(n_servers - 1):
                for rank, (server, gpu) in enumerate(places):
                    part = (server + 1 - step) % n_servers
                    segment[gpu * n_servers + part].copy(src=rank, dst=(rank + g) % p)
        with program.stage("all-gather inside"):
            for turn in range(n_servers):
                for step in range(g - 1):
                    for rank, (server, gpu) in enumerate(places):
                        shard, part = (gpu - step) % g, (server + 1 - turn) % n_servers
                        segment[shard * n_servers + part].copy(src=rank, dst=server * g + (gpu + 1) % g)
