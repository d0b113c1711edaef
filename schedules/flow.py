"""The flow that achieves the bound of an exchange, as a schedule: blocks forwarded through other ranks.

In an AllToAll, a Gather or a Scatter every block goes from one rank to another one. Where these two share no link, or
the links between them are busy while others are idle, a block travels by way of ranks between, and part of it by one
way and part of it by another. Which parts and ways, says the flow of the bound's certificate (`optcc.flow_paths`): no
port carries more than it can in the time of the bound. Basu et al. (below) call this a path-based multi-commodity flow.
Each part is a pipeline of its own, so a rank forwards one chunk while the next one comes in: with k segments the bound,
and about (hops of the longest way - 1) / k of it to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from optcc.collective import Collective
from optcc.dsl import Program, Segment, schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.schedules.all_to_all import alltoallv
from optcc.topology import Topology


class BlockPath(NamedTuple):
    """A share of the message and the ranks that it passes, its sender first; of one rank alone: it stays there."""

    share: Fraction
    ranks: tuple[int, ...]


FindPaths = Callable[[Collective], Sequence[BlockPath]]
"""The parts of the message in their order, each within one block, with the path that each of them takes."""


def unplanned(topology: Topology) -> Mapping[str, Any]:
    """Refuses: the paths come from the flow of a certificate (`optcc.flow_paths`)."""
    raise TopologyError(f"{topology!r}: its flow must be found first: use the planner")


_OF_FLOW: Mapping[str, Any] = {
    "accepts": "any graph, and any servers but those of several GPUs that pool their NICs",
    "paper": "Basu, Zhao, Fantl, Pal, Krishnamurthy and Khoury, 'Efficient all-to-all collective communication "
    "schedules for direct-connect topologies', HPDC 2024: path-based multi-commodity flow",
    "configure": unplanned,
    "one_topology": "its paths are those of a flow, which a linear program finds for one topology",
}


@schedule(name="flow-all-to-all", collective="alltoall", **_OF_FLOW)
def flow_all_to_all(program: Program, find: FindPaths, server: Sequence[int] = ()) -> None:
    """Every block by the ways of the flow that achieves the bound, through other ranks where it is faster.

    >>> half, whole = Fraction(1, 8), Fraction(1, 4)
    >>> by_hand = (whole, (0,)), (whole, (0, 1)), (half, (1, 0)), (half, (1, 0)), (whole, (1,))
    >>> print(*flow_all_to_all(n_ranks=2, find=lambda collective: [BlockPath(*each) for each in by_hand]))
    0->1 s1 c0 copy [hop 1] 1->0 s3 c0 copy [hop 1] 1->0 s4 c0 copy [hop 1] 0->1 s2 c0 copy [hop 1]
    """
    _along(program, find, server)


@schedule(name="flow-all-to-all-v", collective=alltoallv, **_OF_FLOW)
def flow_all_to_all_v(program: Program, find: FindPaths, server: Sequence[int] = ()) -> None:
    """`flow-all-to-all` for blocks of different sizes: their flow is another one.

    >>> counts = Collective.all_to_all_v([[0, 1], [0, 0]])
    >>> paths = [BlockPath(Fraction(1), (0, 1))]
    >>> print(*flow_all_to_all_v.of(counts)(n_ranks=2, find=lambda collective: paths))
    0->1 s0 c0 copy [hop 1]
    """
    _along(program, find, server)


@schedule(name="flow-gather", collective="gather", **_OF_FLOW)
def flow_gather(program: Program, find: FindPaths, server: Sequence[int] = ()) -> None:
    """Every part by the ways of the flow to the root, so that all links into the root are busy.

    >>> third = Fraction(1, 3)
    >>> paths = [BlockPath(third, (0,)), BlockPath(third, (1, 0)), BlockPath(third, (2, 1, 0))]
    >>> print(*flow_gather(n_ranks=3, find=lambda collective: paths))
    2->1 s2 c0 copy [hop 1] 1->0 s2 c0 copy [hop 2] 1->0 s1 c0 copy [hop 1]
    """
    _along(program, find, server)


@schedule(name="flow-scatter", collective="scatter", **_OF_FLOW)
def flow_scatter(program: Program, find: FindPaths, server: Sequence[int] = ()) -> None:
    """Every part by the ways of the flow from the root, those with most hops to go first.

    >>> third = Fraction(1, 3)
    >>> paths = [BlockPath(third, (0,)), BlockPath(third, (0, 1)), BlockPath(third, (0, 1, 2))]
    >>> print(*flow_scatter(n_ranks=3, find=lambda collective: paths))
    0->1 s2 c0 copy [hop 1] 1->2 s2 c0 copy [hop 2] 0->1 s1 c0 copy [hop 1]
    """
    _along(program, find, server)


def _along(program: Program, find: FindPaths, server: Sequence[int]) -> None:
    """Sends every segment along the path of its part; parts take turns, in proportion to their shares."""
    paths = [BlockPath(*each) for each in find(program.collective)]
    _check(program, paths)
    for segment, ranks in _in_turns(program, paths, server or program.ranks):
        for hop, (src, dst) in enumerate(pairwise(ranks), 1):
            with program.stage(f"hop {hop}"):
                segment[0].copy(src=src, dst=dst)


def _in_turns(
    program: Program, paths: Sequence[BlockPath], server: Sequence[int]
) -> list[tuple[Segment, tuple[int, ...]]]:
    """The segments with their paths, as they take turns: `program.segments` of each part that travels, on average.

    Of a turn, those that have most hops to go come first, and of these each rank's in the order of pairwise exchange:
    with the next server, with the one after it, and at last within the server.
    """
    n_servers = max(server) + 1
    moving = [path.share for path in paths if len(path.ranks) > 1]
    per_share = program.segments * len(moving) / sum(moving, Fraction(0)) if moving else Fraction(0)
    turns = []
    for share, ranks in paths:
        count = max(1, round(per_share * share)) if len(ranks) > 1 else 1
        across = (server[ranks[-1]] - server[ranks[0]]) % n_servers or n_servers
        far = (across, (ranks[-1] - ranks[0]) % program.n_ranks)
        for turn, segment in enumerate(program.pipeline(count, sections=1, share=share)):
            turns.append((Fraction(2 * turn + 1, count), -len(ranks), far, segment.index, segment, ranks))
    turns.sort(key=lambda each: each[:4])
    return [each[4:] for each in turns]


def _check(program: Program, paths: Sequence[BlockPath]) -> None:
    """Raises ScheduleError unless the paths go from the sender of each block to its receiver, with the whole of it."""
    collective, done = program.collective, Fraction(0)
    ends = iter(block_ends(collective))
    stop, pair = Fraction(0), (0, 0)
    for share, ranks in paths:
        while done == stop:
            begun = next(ends, None)
            if begun is None:
                raise ScheduleError(f"paths: a path after the last block, {ranks}: must be in the order of the blocks")
            stop, pair = stop + begun[0], begun[1]
        done += share
        if share <= 0 or done > stop or (ranks[0], ranks[-1]) != pair or len(set(ranks)) < len(ranks):
            at = f"a share of {share} along {ranks}"
            raise ScheduleError(f"paths: {at}: must be a part of the block of rank {pair[0]} for rank {pair[1]}")
    if done != 1:
        raise ScheduleError(f"paths: of {done} of the message: must be the whole of it")


def block_ends(collective: Collective) -> list[tuple[Fraction, tuple[int, int]]]:
    """The share, the sender and the receiver of each block, in the order of the message; a block that nobody wants
    stays where it is."""
    shares, p, root = collective.shares, collective.n_ranks, collective.root
    if collective.name == "gather":
        return [(share, (rank, root)) for rank, share in enumerate(shares)]
    if collective.name == "scatter":
        return [(share, (root, rank)) for rank, share in enumerate(shares)]
    if not collective.cells:
        return [(share, divmod(number, p)) for number, share in enumerate(shares)]
    found = []
    for cell in collective.cells:
        here = cell.before[0] if cell.before else 0
        found.append((cell.share, (cell.after[0][1][0], cell.after[0][0]) if cell.after else (here, here)))
    return found
