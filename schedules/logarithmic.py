"""Schedules of about log2 p rounds: from round to round the distance between partners doubles or halves.

    name                 collective   rounds               bytes of a rank, in units of n (p a power of two)
    recursive-doubling   allreduce    log2 p               log2 p
    rabenseifner         allreduce    2 log2 p             2(p - 1)/p
    bruck                allgather    ceil(log2 p)         (p - 1)/p, for any p

A section is a message of its own, so in a round a rank sends several. Upper bounds on the time assume slots for the
messages of a round at the receiver; the time is less where a round starts with its first section while the others are
still in flight.
"""

from __future__ import annotations

from fractions import Fraction

from optcc.dsl import Program, schedule


@schedule(
    name="recursive-doubling",
    paper="Thakur, Rabenseifner and Gropp, 'Optimization of collective communication operations in MPICH', "
    "IJHPCA 19(1), 2005",
)
def recursive_doubling(program: Program) -> None:
    """Partners at distance 1, 2, 4, ... exchange and add their values: the fewest rounds, for small messages.

    With one segment and p a power of two, log2 p * (alpha + n / B). Otherwise the first q = 2^floor(log2 p) ranks do
    that, and each further rank adds its message to one of theirs before and receives the result after: at most
    (log2 q + 2) * (alpha + n / B). Partners send their values from before the exchange, so arrivals are buffered in a
    scratch slot. Both add the same two values: all ranks end with the same reduction tree.

    >>> [str(transfer) for transfer in recursive_doubling(n_ranks=2)][1:3]
    ['1->0 s0 c0 copy [exchange]', '0->0 s0 c0 reduce [exchange]']
    """
    p = program.n_ranks
    rounds = p.bit_length() - 1
    q = 2**rounds
    for segment in program.pipeline(sections=1, scratch=1):
        with program.stage("fold in"):
            for rank in range(q, p):
                segment[0].reduce(src=rank, dst=rank - q)
        with program.stage("exchange"):
            for distance in (2**i for i in range(rounds)):
                for rank in range(q):
                    segment[0].copy(src=rank, dst=rank ^ distance, into=segment.scratch(0))
                for rank in range(q):
                    segment.scratch(0).reduce(src=rank, dst=rank, into=segment[0])
        with program.stage("fold out"):
            for rank in range(q, p):
                segment[0].copy(src=rank - q, dst=rank)


@schedule(paper="Rabenseifner, 'Optimization of collective reduction operations', ICCS 2004, LNCS 3036")
def rabenseifner(program: Program) -> None:
    """Recursive halving as reduce-scatter, recursive doubling as all-gather: a ring's bytes in 2 log2 p rounds.

    Halving: partners at distance p/2, ..., 2, 1 send each other the half of their part that the other one keeps.
    Doubling: the same backwards. With one segment and p a power of two at most 2 log2 p * alpha + 2(p - 1)/p * n / B,
    exact for alpha = 0 and for p = 2. Otherwise each rank beyond the first q = 2^floor(log2 p) is folded in and out:
    round by round that is (2 log2 q + 2) * alpha + (4 - 2/q) * n / B, and a port is busy for (3 - 2/q) * n / B, which
    many segments come close to. With one, ranks that are not folded start early and cause contention: up to 1.15 times.

    >>> [str(transfer) for transfer in rabenseifner(n_ranks=4) if transfer.src == 0][:3]
    ['0->2 s0 c3 reduce [halving]', '0->2 s0 c2 reduce [halving]', '0->1 s0 c1 reduce [halving]']
    """
    p = program.n_ranks
    rounds = p.bit_length() - 1
    q = 2**rounds
    # Section r ^ x leaves rank r, or comes back to it, in the round whose distance is the highest bit of x. So x counts
    # down while halving and up while doubling: the sections go in the order in which the next round needs them.
    for segment in program.pipeline(sections=q):
        with program.stage("fold in"):
            for x in reversed(range(q)):
                for rank in range(q, p):
                    segment[(rank - q) ^ x].reduce(src=rank, dst=rank - q)
        with program.stage("halving"):
            for distance in (2**i for i in reversed(range(rounds))):
                for x in reversed(range(distance, 2 * distance)):
                    for rank in range(q):
                        segment[rank ^ x].reduce(src=rank, dst=rank ^ distance)
        with program.stage("doubling"):
            for distance in (2**i for i in range(rounds)):
                for x in range(distance, 2 * distance):
                    for rank in range(q):
                        segment[rank ^ x].copy(src=rank ^ distance, dst=rank)
        with program.stage("fold out"):
            for x in range(q):
                for rank in range(q, p):
                    segment[(rank - q) ^ x].copy(src=rank - q, dst=rank)


@schedule(
    collective="allgather",
    paper="Bruck, Ho, Kipnis, Upfal and Weathersby, 'Efficient algorithms for all-to-all communications in multiport "
    "message-passing systems', IEEE TPDS 8(11), 1997",
)
def bruck(program: Program) -> None:
    """All-gather: at distance 1, 2, 4, ... every rank sends all its slices, or as many as are missing.

    Before the round of distance d rank r has the slices r, ..., r + d - 1, and sends them to rank r - d. For any p
    and with one segment at most ceil(log2 p) * alpha + (p - 1)/p * n / B, exact for alpha = 0 and for p = 2. Slices
    are at their final place, so the paper's final rotation is not needed.

    >>> [str(transfer) for transfer in bruck(n_ranks=3)][2:5]
    ['2->1 s2 c0 copy [all-gather]', '0->1 s0 c0 copy [all-gather]', '1->2 s1 c0 copy [all-gather]']
    """
    p = program.n_ranks
    owned_by = [program.pipeline(sections=1, share=Fraction(1, p)) for _ in program.ranks]
    for slices in zip(*owned_by, strict=True):
        with program.stage("all-gather"):
            for distance in (2**i for i in range((p - 1).bit_length())):
                for ahead in range(min(distance, p - distance)):
                    for rank in program.ranks:
                        slices[(rank + ahead) % p][0].copy(src=rank, dst=(rank - distance) % p)
