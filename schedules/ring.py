"""The ring: what NCCL and Open MPI run for large messages, and what waits for its slowest member."""

from __future__ import annotations

from optcc.dsl import Program, schedule


@schedule(paper="Patarasuk and Yuan, 'Bandwidth optimal all-reduce algorithms', JPDC 69(2), 2009")
def ring(program: Program) -> None:
    """Reduce-scatter, then all-gather, each in p - 1 steps around the ring of all ranks.

    Every rank sends and receives 2(p - 1)/p of the message, so the time is 2(p - 1)/p * n / b with the slowest
    rank's bandwidth b: a ring with one rank at half bandwidth takes twice as long.

    >>> len(ring(n_ranks=4)), str(ring(n_ranks=4)[0])
    (24, '0->1 s0 c0 reduce [reduce-scatter]')
    """
    p = program.n_ranks
    for segment in program.pipeline(sections=p):
        with program.stage("reduce-scatter"):
            for step in range(p - 1):
                for rank in program.ranks:
                    segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
        with program.stage("all-gather"):
            for step in range(p - 1):
                for rank in program.ranks:
                    segment[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)
