"""AllToAll, Gather and Scatter: every block has one sender and one receiver, so no byte needs to travel twice.

Rank s has a block for each rank d. The least time is that of the busiest port: what a server sends to others over its
out rate, or receives over its in rate. With p equal ranks, S bytes in each rank's blocks, and k segments:

    collective    schedule               time
    AllToAll      direct-all-to-all      (p - 1)/p * S/B + alpha
    AllToAll      matched-all-to-all     the bound, in rounds, for any rates and numbers of GPUs
    Gather        direct-gather          (p - 1)/p * S/B + alpha
    Scatter       direct-scatter         (p - 1)/p * S/B + alpha
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.collective import Collective
from optcc.dsl import Chunk, Program, pure, schedule
from optcc.topology import Topology

Matrix = npt.NDArray[np.float64]
_PAIRWISE = (
    "Thakur, Rabenseifner and Gropp, 'Optimization of collective communication operations in MPICH', "
    "IJHPCA 19(1), 2005: pairwise exchange"
)
_OPEN_SHOP = "Gonzalez and Sahni, 'Open shop scheduling to minimize finish time', JACM 23(4), 1976: with preemption"


def any_servers(topology: Topology) -> Mapping[str, Any]:
    """Accepts every topology; the schedule has no parameters."""
    del topology
    return {}


def server_rates(topology: Topology) -> Mapping[str, Any]:
    """The server of each rank, and what servers send and receive, for schedules that follow the rates."""
    return {"server": topology.rank_server, "rates": list(zip(topology.out, topology.in_, strict=True))}


def alltoallv(n_ranks: int) -> Collective:
    """An AllToAll-v to try schedules on: the blocks of rank s for rank d have (s + d) mod p parts, p for none."""
    ranks = range(n_ranks)
    return Collective.all_to_all_v([[(src + dst) % n_ranks or n_ranks for dst in ranks] for src in ranks])


@schedule(
    name="direct-all-to-all", collective="alltoall", accepts="any servers", paper=_PAIRWISE, configure=any_servers
)
def direct_all_to_all(program: Program) -> None:
    """In step s every rank sends its block for rank i + s to it, so that no port is used twice in a step.

    All transfers are independent: with equal rates (p - 1)/p * S/B + alpha for S bytes of blocks at each rank.

    >>> [str(transfer) for transfer in direct_all_to_all(n_ranks=3)][:2]
    ['0->1 s1 c0 copy [all-to-all]', '1->2 s5 c0 copy [all-to-all]']
    """
    _direct(program)


@schedule(
    name="direct-all-to-all-v", collective=alltoallv, accepts="any servers", paper=_PAIRWISE, configure=any_servers
)
def direct_all_to_all_v(program: Program) -> None:
    """`direct-all-to-all` for blocks of different sizes; blocks of none are left out.

    >>> [str(each) for each in direct_all_to_all_v.of(Collective.all_to_all_v([[0, 1], [2, 3]]))(2)]
    ['0->1 s0 c0 copy [all-to-all]', '1->0 s1 c0 copy [all-to-all]']
    """
    _direct(program)


@schedule(
    name="matched-all-to-all",
    collective="alltoall",
    accepts="any servers, out and in apart; NICs of a server pooled",
    paper=_OPEN_SHOP,
    configure=server_rates,
)
def matched_all_to_all(
    program: Program, server: Sequence[int] = (), rates: Sequence[tuple[Fraction, Fraction]] = ()
) -> None:
    """Rounds in which every server sends to one and receives from one, those with most left to do first.

    A round is a matching of the servers, of greatest weight where a pair weighs what is left at its two ports, in
    seconds: so no port with much to do waits for others. For servers of several GPUs and blocks of different sizes,
    where shifts by rank leave ports idle; with equal ranks it is `direct-all-to-all` in another order.

    >>> len(matched_all_to_all(n_ranks=4)), str(matched_all_to_all(n_ranks=4)[0]).split()[3:]
    (12, ['copy', '[all-to-all]'])
    """
    _matched(program, server, rates)


@schedule(
    name="matched-all-to-all-v",
    collective=alltoallv,
    accepts="any servers, out and in apart; NICs of a server pooled",
    paper=_OPEN_SHOP,
    configure=server_rates,
)
def matched_all_to_all_v(
    program: Program, server: Sequence[int] = (), rates: Sequence[tuple[Fraction, Fraction]] = ()
) -> None:
    """`matched-all-to-all` for blocks of different sizes: large blocks and busy ports come first.

    >>> [str(each) for each in matched_all_to_all_v.of(Collective.all_to_all_v([[0, 1], [2, 3]]))(2)]
    ['0->1 s0 c0 copy [all-to-all]', '1->0 s1 c0 copy [all-to-all]']
    """
    _matched(program, server, rates)


@schedule(
    name="direct-gather",
    collective="gather",
    accepts="any servers",
    paper="MPI, every rank to the root",
    configure=any_servers,
)
def direct_gather(program: Program) -> None:
    """Every rank sends its part to the root: all that the root's in port must receive, and nothing twice.

    >>> [str(transfer) for transfer in direct_gather(n_ranks=3, root=1)]
    ['0->1 s0 c0 copy [gather]', '2->1 s2 c0 copy [gather]']
    """
    root = program.collective.root
    with program.stage("gather"):
        for parts in program.cells():
            for rank, part in enumerate(parts):
                if rank != root and part is not None:
                    part.copy(src=rank, dst=root)


@schedule(
    name="direct-scatter",
    collective="scatter",
    accepts="any servers",
    paper="MPI, the root to every rank",
    configure=any_servers,
)
def direct_scatter(program: Program) -> None:
    """The root sends every rank its part: all that its out port must send, and nothing twice.

    >>> [str(transfer) for transfer in direct_scatter(n_ranks=3, root=1)]
    ['1->0 s0 c0 copy [scatter]', '1->2 s2 c0 copy [scatter]']
    """
    root = program.collective.root
    with program.stage("scatter"):
        for parts in program.cells():
            for rank, part in enumerate(parts):
                if rank != root and part is not None:
                    part.copy(src=root, dst=rank)


def _direct(program: Program) -> None:
    p = program.n_ranks
    with program.stage("all-to-all"):
        for blocks in program.cells():
            for step in range(1, p):
                for rank in program.ranks:
                    _send(blocks, p, rank, (rank + step) % p)


def _matched(program: Program, server: Sequence[int], rates: Sequence[tuple[Fraction, Fraction]]) -> None:
    p = program.n_ranks
    order = program.pairs(_order(program.collective.shares, server, rates, p))
    with program.stage("all-to-all"):
        for blocks in program.cells():
            for src, dst in order:
                _send(blocks, p, src, dst)


@pure
def _order(
    shares: Sequence[Fraction], server: Sequence[int], rates: Sequence[tuple[Fraction, Fraction]], p: int
) -> list[tuple[int, int]]:
    """Every pair of ranks with a block, in the order in which they send."""
    out, in_ = (np.array([float(each[side]) for each in rates] or [1.0] * p) for side in (0, 1))
    return list(_rounds(np.array([float(share) for share in shares]).reshape(p, p), server or range(p), out, in_))


def _send(blocks: Sequence[Chunk | None], p: int, src: int, dst: int) -> None:
    block = blocks[src * p + dst]
    if block is not None:
        block.copy(src=src, dst=dst)


def _rounds(shares: Matrix, server: Sequence[int], out: Matrix, in_: Matrix) -> Iterator[tuple[int, int]]:
    """Every pair of ranks with a block, in rounds of one pair of servers each; those within a server come last."""
    n = len(out)
    waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
    p = len(shares)
    left_out, left_in = np.zeros(n), np.zeros(n)
    for step in range(1, p):
        for src in range(p):
            dst = (src + step) % p
            a, b = server[src], server[dst]
            if shares[src, dst]:
                waiting.setdefault((a, b), []).append((src, dst))
                if a != b:
                    left_out[a] += shares[src, dst] / out[a]
                    left_in[b] += shares[src, dst] / in_[b]
    inside = [pair for (a, b), pairs in waiting.items() if a == b for pair in pairs]
    for pairs in waiting.values():  # the largest at the end, from where they are taken
        pairs.reverse()
        pairs.sort(key=lambda pair: shares[pair])
    # Every process imports this module, and SciPy's optimizers take longer to import than all of optcc.
    from scipy.optimize import linear_sum_assignment

    weight = np.zeros((n, n))
    while any(pairs for (a, b), pairs in waiting.items() if a != b):
        weight[:] = 0.0
        for (a, b), pairs in waiting.items():
            if a != b and pairs:
                weight[a, b] = left_out[a] + left_in[b]
        for a, b in zip(*linear_sum_assignment(weight, maximize=True), strict=True):
            if weight[a, b]:
                src, dst = waiting[int(a), int(b)].pop()
                left_out[a] -= shares[src, dst] / out[a]
                left_in[b] -= shares[src, dst] / in_[b]
                yield src, dst
    yield from inside
