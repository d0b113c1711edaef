"""OptCC (arXiv 2606.01680): four pipelined stages around a ring of the healthy servers, the stragglers beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from optcc.dsl import Program, schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.topology import Topology

STAGES = ("1 reduce-scatter", "2 to straggler", "3 from straggler", "4 all-gather")
INSIDE = ("reduce-scatter inside", "all-gather inside")
"""The stages around the four in servers of several GPUs."""


def find_stragglers(topology: Topology) -> Mapping[str, Any]:
    """The servers slower than the fastest, by the slower way of their pooled NICs; the last one when all are equal.

    >>> find_stragglers(Topology.parse("4x8@50GB/s,2=3/8"))
    {'stragglers': (2,), 'gpus': 8}

    Raises TopologyError if servers differ in GPUs, or several stragglers leave fewer than two healthy servers.
    """
    gpus = {server.gpus for server in topology.servers}
    if len(gpus) > 1:
        raise TopologyError(f"{topology!r}: servers of {sorted(gpus)} GPUs: must have equally many")
    rates = [min(out, in_) for out, in_ in zip(topology.out, topology.in_, strict=True)]
    n_servers, fastest = len(rates), max(rates)
    stragglers = tuple(server for server, rate in enumerate(rates) if rate < fastest) or (n_servers - 1,)
    if len(stragglers) > 1 and n_servers - len(stragglers) < 2:
        slow = f"{len(stragglers)} of {n_servers} servers are slower than the fastest"
        raise TopologyError(f"{topology!r}: {slow}: at least 2 must be as fast as it")
    return {"stragglers": stragglers, "gpus": gpus.pop()}


def find_when_stored(topology: Topology) -> Mapping[str, Any]:
    """What `find_stragglers` gives, and whose turn is first where the network stores messages.

    >>> find_when_stored(Topology.parse("4@50GB/s,2=25GB/s"))
    {'stragglers': (2,), 'gpus': 1, 'turn': 1}
    """
    found = find_stragglers(topology)
    rates = [min(out, in_) for out, in_ in zip(topology.out, topology.in_, strict=True)]
    alone = len(found["stragglers"]) == 1 and found["gpus"] == 1
    return {**found, "turn": int(alone and 2 * min(rates) <= max(rates))}


ACCEPTS = "equally many GPUs a server, servers of one rate and any slower ones beside at least two of them"
PAPER = "OptCC, arXiv 2606.01680"


@schedule(name="optcc", accepts=ACCEPTS, paper=PAPER, configure=find_when_stored)
def optcc_stored(program: Program, stragglers: Sequence[int], gpus: int, turn: int) -> None:
    """`optcc` for ports that serve one at a time while the network stores: one straggler of at most half the rate,
    among servers of one GPU, seeds the first segment and passes on the last, if their number is even.

    So its port out has work from the start and its port in to the end; nothing takes less than that
    (`optcc.schedules.optcc_timetable`). Of an odd number the last one would be seeded, too, and come back late.
    """
    optcc.function(program, stragglers, gpus, turn if program.segments % 2 == 0 else 0)


@schedule(accepts=ACCEPTS, paper=PAPER, configure=find_stragglers, fifo=optcc_stored)
def optcc(program: Program, stragglers: Sequence[int], gpus: int = 1, turn: int = 0) -> None:
    """Reduce-scatter among the healthy, owner to straggler and back, all-gather: patterns 1-2-3-4 and 3-1-4-2.

    Of p servers m are stragglers; the q = p - m healthy ones own a section each. A straggler sends and receives the
    message once, the least there is, so per section it has two choices. Either it seeds the section with its own data
    and receives it when it is finished: 3-1-4-2. Or it gets the sum of all others from the owner, adds its own data and
    returns the result: 1-2-3-4. Only one can be last in a sum, so a section passes through at most one straggler,
    and the others seed it. One straggler alternates between the choices, segment by segment; of several each is passed
    through in turn, section by section. So both ports of a straggler are busy early and late. `turn` is the first
    turn: with 1 instead of 0 and one straggler, it seeds segment 0.

    A healthy server sends and receives (q - 1)/q of the message in stage 1, as much in stage 4, and in stages 2 and 3
    one section to and one from every straggler: together (2(q - 1) + m)/q. With rates B and B/l, l of the slowest:

        max(l, (2(q - 1) + m)/q) * n / B        max(l, 2 - 1/(p - 1)) * n / B for one straggler

    which is the lower bound if it is l. Filling and draining the pipeline adds O(1/k) of that with k segments. For one
    straggler no order of the ports can take less than

        max(l + (1 - 1/q)/k, 2 - 1/q) * n / B

    as the straggler's port in has nothing to do before a section has been around the ring. For l >= 2 and an even k a
    timetable in closed form takes just that (`optcc.schedules.optcc_timetable`).

    With g `gpus` a server, each server first reduces shard j, a g-th of each segment, to its j-th GPU; the j-th GPUs
    of all servers run the four stages on it, all shards side by side over pooled NICs; then GPUs inside a server copy
    the shards from each other. The NICs carry what they carry with one GPU. The fabric of rate f carries 2(g - 1)/g of
    the message for each GPU and way, so the time is at least 2(g - 1)/g * n / f.

    >>> schedule = optcc(n_ranks=4, segments=2, stragglers=[3])
    >>> schedule.stages
    ('1 reduce-scatter', '2 to straggler', '3 from straggler', '4 all-gather')

    Raises ScheduleError if ranks do not fill the servers, or stragglers are not as `find_stragglers` gives them.
    """
    servers = _servers(program, stragglers, gpus)
    shards = range(gpus)
    healthy = [server for server in servers if server not in stragglers]
    q = len(healthy)
    ring = [[server * gpus + shard for server in healthy] for shard in shards]
    sections = max(q, 1)
    for name in STAGES if gpus == 1 else (INSIDE[0], *STAGES, INSIDE[1]):
        with program.stage(name):  # named in the paper's order, in whatever order segments come to them
            pass
    for segment in program.pipeline(sections=gpus * sections):
        last = [_last(stragglers, segment.index + turn, owner) for owner in range(q)]
        passed = [(owner, straggler) for owner, straggler in enumerate(last) if straggler is not None]
        seeded = [(owner, straggler) for owner, straggler in product(range(q), stragglers) if straggler != last[owner]]
        if gpus > 1:
            with program.stage("reduce-scatter inside"):
                for section, server, shard, other in product(range(sections), servers, shards, shards):
                    if other != shard:
                        chunk = segment[shard * sections + section]
                        chunk.reduce(src=server * gpus + other, dst=server * gpus + shard)
        with program.stage("3 from straggler"):
            for (owner, straggler), shard in product(seeded, shards):
                chunk = segment[shard * q + owner]
                chunk.reduce(src=straggler * gpus + shard, dst=ring[shard][(owner + 1) % q])
        with program.stage("1 reduce-scatter"):
            for step, i, shard in product(range(q - 1), range(q), shards):
                chunk = segment[shard * q + (i - step - 1) % q]
                chunk.reduce(src=ring[shard][i], dst=ring[shard][(i + 1) % q])
        with program.stage("2 to straggler"):
            for (owner, straggler), shard in product(passed, shards):
                segment[shard * q + owner].reduce(src=ring[shard][owner], dst=straggler * gpus + shard)
        with program.stage("3 from straggler"):
            for (owner, straggler), shard in product(passed, shards):
                segment[shard * q + owner].copy(src=straggler * gpus + shard, dst=ring[shard][owner])
        with program.stage("4 all-gather"):
            for step, i, shard in product(range(q - 1), range(q), shards):
                chunk = segment[shard * q + (i - step) % q]
                chunk.copy(src=ring[shard][i], dst=ring[shard][(i + 1) % q])
        with program.stage("2 to straggler"):
            for (owner, straggler), shard in product(seeded, shards):
                segment[shard * q + owner].copy(src=ring[shard][owner], dst=straggler * gpus + shard)
        if gpus > 1:
            with program.stage("all-gather inside"):
                for section, server, shard, other in product(range(sections), servers, shards, shards):
                    if other != shard:
                        chunk = segment[shard * sections + section]
                        chunk.copy(src=server * gpus + shard, dst=server * gpus + other)


def _servers(program: Program, stragglers: Sequence[int], gpus: int) -> range:
    """The servers, once it is certain that a schedule for them can be written."""
    if gpus < 1 or program.n_ranks % gpus:
        raise ScheduleError(f"{program.n_ranks} ranks, {gpus} GPUs a server: must fill a whole number of servers")
    servers = range(program.n_ranks // gpus)
    m = len(set(stragglers) & set(servers))
    if m != len(stragglers) or m == 0:
        raise ScheduleError(f"stragglers {tuple(stragglers)}: must be different servers from 0 to {len(servers) - 1}")
    if m > 1 and len(servers) - m < 2:
        raise ScheduleError(f"stragglers {tuple(stragglers)} of {len(servers)} servers: must leave at least 2 healthy")
    return servers


def passed_and_seeded(
    stragglers: Sequence[int], turn: int, q: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (section, straggler) that pass through the straggler in this turn, and those that it seeds."""
    last = [_last(stragglers, turn, owner) for owner in range(q)]
    passed = [(owner, straggler) for owner, straggler in enumerate(last) if straggler is not None]
    return passed, [each for each in product(range(q), stragglers) if each[1] != last[each[0]]]


def _last(stragglers: Sequence[int], segment: int, owner: int) -> int | None:
    """The straggler that section `owner` passes through, the last to add its data; None if all seed it."""
    if len(stragglers) == 1:
        return stragglers[0] if segment % 2 == 0 else None
    return stragglers[(segment + owner) % len(stragglers)]
