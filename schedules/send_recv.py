"""Send/Recv: every rank sends its buffer to the next rank, and receives that of the rank before.

What nccl-tests' `sendrecv_perf` times. With equal ranks and buffers of S bytes the time is S/B + alpha, that of the
busiest port. A buffer goes the direct way, so where NICs belong to GPUs, through that of its rank alone: the bound, by
way of other GPUs and their NICs, may be less.
"""

from __future__ import annotations

from optcc.collective import Collective
from optcc.dsl import Program, schedule
from optcc.schedules.all_to_all import any_servers


def sendrecv(n_ranks: int) -> Collective:
    """Element r is the buffer of rank r, which rank r + 1 must end with, the first rank that of the last.

    >>> sendrecv(3).before(0, 6), sendrecv(3).after(0, 6)
    ([(0, 2, 1)], [(4, 6, 4)])
    """
    ranks = range(n_ranks)
    return Collective.declared(
        "sendrecv",
        n_ranks,
        before=[(rank, rank) for rank in ranks],
        after=[((rank + 1) % n_ranks, rank, [rank]) for rank in ranks],
    )


@schedule(
    name="send-recv",
    collective=sendrecv,
    accepts="any servers",
    paper="nccl-tests, sendrecv_perf",
    configure=any_servers,
)
def send_recv(program: Program) -> None:
    """Every rank sends its buffer to the next one; all transfers are independent.

    >>> [str(transfer) for transfer in send_recv(n_ranks=2)]
    ['0->1 s0 c0 copy [send]', '1->0 s1 c0 copy [send]']
    """
    p = program.n_ranks
    with program.stage("send"):
        for buffers in program.cells():
            for rank, buffer in enumerate(buffers):
                if buffer is not None and p > 1:
                    buffer.copy(src=rank, dst=(rank + 1) % p)
