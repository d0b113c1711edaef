"""Direct exchange: every rank talks to every other one, and nothing takes more than two hops."""

from __future__ import annotations

import numpy as np

from optcc.dsl import Program, schedule


@schedule(
    paper="Thakur, Rabenseifner and Gropp, 'Optimization of collective communication operations in MPICH', "
    "IJHPCA 19(1), 2005: pairwise exchange"
)
def direct(program: Program) -> None:
    """Every rank owns 1/p of the message: all send each owner its section, and the owner sends it back to all.

    In step s rank i sends to rank i + s, so no port is used twice in a step. The steps of a half are independent, so
    each half costs one latency: with one segment 2(p - 1)/p * n / B + 2 alpha, a ring's bytes in two
    hops. This requires slots for p - 1 messages at each receiver, and full rate between every pair of ranks.

    >>> [str(transfer) for transfer in direct(n_ranks=3)][1:4]
    ['1->2 s0 c2 reduce [reduce-scatter]', '2->0 s0 c0 reduce [reduce-scatter]', '0->2 s0 c2 reduce [reduce-scatter]']
    """
    p = program.n_ranks
    ranks = np.arange(p)
    for segment in program.pipeline(sections=p):
        with program.stage("reduce-scatter"):
            for step in range(1, p):
                owners = (ranks + step) % p
                segment.reduce(owners, src=ranks, dst=owners)
        with program.stage("all-gather"):
            for step in range(1, p):
                segment.copy(ranks, src=ranks, dst=(ranks + step) % p)
