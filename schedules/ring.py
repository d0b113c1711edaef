"""The ring: the algorithm of NCCL and Open MPI for large messages, limited by its slowest member."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from optcc.dsl import Program, schedule
from optcc.topology import Topology


def any_servers(_: Topology) -> Mapping[str, Any]:
    """Accepts every topology: a ring of ranks needs only a route between neighbours."""
    return {}


@schedule(
    accepts="any servers",
    paper="Patarasuk and Yuan, 'Bandwidth optimal all-reduce algorithms', JPDC 69(2), 2009",
    configure=any_servers,
)
def ring(program: Program) -> None:
    """Reduce-scatter, then all-gather, each in p - 1 steps around the ring of all ranks.

    Every rank sends and receives 2(p - 1)/p of the message, so the time is 2(p - 1)/p * n / b with the slowest
    rank's bandwidth b: a ring with one rank at half bandwidth takes twice as long. c channels, that is c such rings on
    1/c of the message each, are here c segments: a rank has one lane to its neighbour for all segments. On servers of
    several GPUs with pooled NICs b is the slowest server's rate: ranks of a server are neighbours. Where NICs belong to
    GPUs the commands take `nccl-ring` in its place.

    >>> len(ring(n_ranks=4)), str(ring(n_ranks=4)[0])
    (24, '0->1 s0 c0 reduce [reduce-scatter]')
    """
    p = program.n_ranks
    ranks = np.arange(p)
    right = (ranks + 1) % p
    for segment in program.pipeline(sections=p):
        with program.stage("reduce-scatter"):
            for step in range(p - 1):
                segment.reduce((ranks - step) % p, src=ranks, dst=right)
        with program.stage("all-gather"):
            for step in range(p - 1):
                segment.copy((right - step) % p, src=ranks, dst=right)


@schedule(
    name="bidirectional-ring",
    paper="Jain and Sabharwal, 'Optimal bucket algorithms for large MPI collectives on torus interconnects', ICS 2010",
)
def bidirectional_ring(program: Program) -> None:
    """Two rings side by side, half of the message each way round.

    Where every pair of neighbours has a link of its own, both links of a rank are busy and the time is half of a
    ring's. Here a rank has one port each way, and the gain is that one half is sent while the other is received:
    with one segment (2p - 3) * max(t, t/2 + alpha) + t + alpha, where t = n/(pB) is the time of a step. The ring
    takes 2(p - 1) * (t + alpha).

    >>> [str(transfer) for transfer in bidirectional_ring(n_ranks=3) if transfer.src == 0][:2]
    ['0->1 s0 c0 reduce [reduce-scatter]', '0->2 s1 c0 reduce [reduce-scatter]']
    """
    p = program.n_ranks
    halves = [program.pipeline(sections=p, share=Fraction(1, 2)) for _ in range(2)]
    for up, down in zip(*halves, strict=True):
        with program.stage("reduce-scatter"):
            for step in range(p - 1):
                for rank in program.ranks:
                    up[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
                for rank in program.ranks:
                    down[(rank + step) % p].reduce(src=rank, dst=(rank - 1) % p)
        with program.stage("all-gather"):
            for step in range(p - 1):
                for rank in program.ranks:
                    up[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)
                for rank in program.ranks:
                    down[(rank - 1 + step) % p].copy(src=rank, dst=(rank - 1) % p)
