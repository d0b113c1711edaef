"""R2CCL (arXiv 2512.25059): the ring after NICs failed, as it is, beside a second ring, or beside several.

    name              what it does                                     time, fluid, in units of n/B
    r2ccl-balance     the ring; a server's surviving NICs are pooled   2(p - 1)/p * l
    r2ccl-allreduce   and a ring of the healthy ranks on the share X   2(p - 1)/p + X l
    r2ccl-recursive   and a ring for every faster group of ranks       see there

B is the rate of a healthy endpoint, b = B/l that of the slowest, X = 1 - b/B the share that it lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations
from typing import Any

from optcc.dsl import Program, any_flat, pure, schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.schedules.stragglar import one_straggler
from optcc.topology import Server, Topology

Level = tuple[tuple[int, ...], Fraction]
"""The ranks of a ring, and the share of the message that goes around it."""
EXACT_SERVERS_MAX = 8
"""Up to this many servers `rerank` tries every order around the ring."""


def rerank(topology: Topology) -> tuple[int, ...]:
    """The order of the ranks around a ring; by number unless the topology is rail-only.

    On a rail-only network two neighbours only use the rails that both of them still have, and the ring is as fast as
    its slowest link. Servers that keep all rails serve as bridges between neighbours that lost different ones: this
    idea is R2CCL's, the search is ours. An order is better if its weakest link is stronger, or, if that is equal, its
    next weakest, and so on. Up to eight servers it is the best of all orders, the first in numbered order; for more, a
    local optimum: 2-opt from the numbered order.

    >>> from optcc.topology import Nic
    >>> kept = [(0, 1), (1,), (0,), (0, 1)]
    >>> nics = [tuple(Nic(rail, Fraction(1), Fraction(1)) for rail in rails) for rails in kept]
    >>> rerank(Topology(tuple(Server(f"h{i}", 1, own) for i, own in enumerate(nics)), rail_only=True))
    (0, 1, 3, 2)

    Raises TopologyError if no order is found in which all neighbours share a rail.
    """
    ranks_of: list[list[int]] = [[] for _ in topology.servers]
    for rank, home in enumerate(topology.rank_server):
        ranks_of[home].append(rank)
    return tuple(rank for server in server_order(topology) for rank in ranks_of[server])


def server_order(topology: Topology) -> tuple[int, ...]:
    """The order of the servers in `rerank`."""
    servers = topology.servers
    n = len(servers)
    if not topology.rail_only or n == 1:
        return tuple(range(n))

    @cache
    def link(a: int, b: int) -> Fraction:
        return min(_shared(servers[a], servers[b]), _shared(servers[b], servers[a]))

    def links(order: Sequence[int]) -> list[Fraction]:
        return sorted(link(server, order[i + 1 - n]) for i, server in enumerate(order))

    if n <= EXACT_SERVERS_MAX:
        order: Sequence[int] = max(((0, *rest) for rest in permutations(range(1, n))), key=links)
    else:
        order = _two_opt(n, link)
    if not links(order)[0]:
        raise TopologyError(f"{topology!r}: no ring was found in which all neighbours share a surviving rail")
    return tuple(order)


def _two_opt(n: int, link: Callable[[int, int], Fraction]) -> list[int]:
    """2-opt on the order 0..n - 1: reverses parts of it while the two links at their ends improve."""
    order = list(range(n))
    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(n), 2):
            a, b, c, d = order[i], order[i + 1], order[j], order[j + 1 - n]
            if len({a, b, c, d}) == 4 and sorted((link(a, c), link(b, d))) > sorted((link(a, b), link(c, d))):
                order[i + 1 : j + 1] = reversed(order[i + 1 : j + 1])
                improved = True
    return order


def _shared(src: Server, dst: Server) -> Fraction:
    """Bytes/s from `src` to `dst` over the rails that both still have."""
    rails = {nic.rail for nic in src.nics if not nic.failed}
    return sum(
        (
            min(
                sum((nic.out for nic in src.nics if nic.rail == rail and not nic.failed), Fraction(0)),
                sum((nic.in_ for nic in dst.nics if nic.rail == rail and not nic.failed), Fraction(0)),
            )
            for rail in rails
        ),
        Fraction(0),
    )


def _reranked(topology: Topology) -> Mapping[str, Any]:
    any_flat(topology)
    return {"order": rerank(topology)}


def _one_degraded(topology: Topology) -> Mapping[str, Any]:
    straggler = one_straggler(topology)["straggler"]
    rates = _rates(topology)
    return {"straggler": straggler, "lost": 1 - rates[straggler] / max(rates)}


def _every_rate(topology: Topology) -> Mapping[str, Any]:
    any_flat(topology)
    return {"rates": _rates(topology)}


def _rates(topology: Topology) -> tuple[Fraction, ...]:
    """The rate of each endpoint both ways, in bytes/s."""
    return tuple(min(out, in_) for out, in_ in zip(topology.out, topology.in_, strict=True))


@schedule(name="r2ccl-balance", paper="R2CCL, arXiv 2512.25059", configure=_reranked)
def r2ccl_balance(program: Program, order: Sequence[int] = ()) -> None:
    """The ring, unchanged: Balance spreads what a failed NIC carried over the surviving NICs of its server.

    That is what pooling a server's NICs means here, so the time is the ring's with the degraded server's rate b = B/l:
    2(p - 1)/p * l * n/B. On a rail-only network the ring visits the ranks as `rerank` says, and b is what its weakest
    pair of neighbours shares.

    >>> str(r2ccl_balance(n_ranks=4, order=(0, 2, 1, 3))[1])
    '2->1 s0 c1 reduce [reduce-scatter]'

    Raises ScheduleError unless `order` names every rank once, or none for their own order.
    """
    p = program.n_ranks
    ranks = tuple(order) or tuple(program.ranks)
    if sorted(ranks) != list(program.ranks):
        raise ScheduleError(f"order {ranks}: must name every rank from 0 to {p - 1} once")
    for segment in program.pipeline(sections=p):
        with program.stage("reduce-scatter"):
            for step in range(p - 1):
                for i in range(p):
                    segment[(i - step) % p].reduce(src=ranks[i], dst=ranks[(i + 1) % p])
        with program.stage("all-gather"):
            for step in range(p - 1):
                for i in range(p):
                    segment[(i + 1 - step) % p].copy(src=ranks[i], dst=ranks[(i + 1) % p])


@schedule(
    name="r2ccl-allreduce",
    accepts="endpoints of one rate, one of them slower or none",
    paper="R2CCL, arXiv 2512.25059",
    configure=_one_degraded,
)
def r2ccl_allreduce(program: Program, straggler: int, lost: Fraction) -> None:
    """A ring of all ranks on 1 - Y of the message, beside it a ring of the healthy on Y, which the straggler then gets.

    Y = X = `lost`, what the straggler's rate lacks of the others'. The paper counts max(T1, T2) + T3 in units of n/B:

        T1 = 2(p - 1)/p * (1 - Y) l       the ring of all, at the straggler's rate
        T2 = 2(p - 2)/(p - 1) * Y/X       the ring of the healthy, in the remaining bandwidth
        T3 = Y l                          Y goes to the straggler

    and with Y = X that is 2(p - 1)/p + X l. We read T3 as covering both ways: the straggler's own part of Y must be
    added, and can be while the result returns, since ports are full duplex. Here the straggler sends its part
    *before*: it seeds each section at the healthy rank where its chain starts, as in OptCC's pattern 3-1-4-2, and
    gets the finished section at the end from the rank where the chain ended. Each of its ports carries
    2(p - 1)/p * (1 - Y) + Y of the message, the bytes of T1 and T3, so the fluid time is the paper's. Stages
    overlap: segments of both rings alternate and share the ports. With nothing lost this is
    the ring.

    >>> built = r2ccl_allreduce(n_ranks=4, segments=8, straggler=3, lost=Fraction(1, 4))
    >>> built.stages, len(built.segments)
    (('hand over', 'reduce-scatter', 'all-gather', 'deliver'), 16)
    >>> [str(each) for each in built if each.src == 3 and each.stage == "hand over"][0]
    '3->0 s8 c0 reduce [hand over]'

    Raises ScheduleError if the straggler is no rank.
    """
    _side_by_side(program, _without_one(program.n_ranks, straggler, lost))


@pure
def _without_one(p: int, straggler: int, lost: Fraction) -> list[Level]:
    """Everyone's ring, and that without the straggler."""
    if not 0 <= straggler < p:
        raise ScheduleError(f"straggler {straggler}: must be a rank from 0 to {p - 1}")
    return [(tuple(range(p)), 1 - lost), (tuple(rank for rank in range(p) if rank != straggler), lost)]


@schedule(name="r2ccl-recursive", paper="R2CCL, arXiv 2512.25059", configure=_every_rate)
def r2ccl_recursive(program: Program, rates: Sequence[Fraction]) -> None:
    """A ring of all ranks, beside it one without the slowest, beside it one without the next slowest, and so on.

    R2CCL's, according to secondary sources: with several failures the decomposition is applied recursively, peeling off
    ever faster sub-rings that carry the extra share. Ours is the rest: ranks of equal rate are peeled off together; the
    shares (`peel`); and every rank outside of a ring exchanges its part of that ring's share with a member directly,
    not through the ranks peeled off later.

    With rates r_1 < ... < r_m, m_j ranks of at least r_j, and the ring of those on the share (r_j - r_(j-1))/r_m, each
    port of a member of ring j carries (2(m_j - 1) + p - m_j)/m_j of that share, of everyone else all of it. The time is
    n times the largest sum over the port's rate; for the slowest it is r2ccl-allreduce's 2(p - 1)/p + X l.

    >>> built = r2ccl_recursive(n_ranks=4, rates=(Fraction(4), Fraction(4), Fraction(2), Fraction(1)))
    >>> [(str(shape.share), shape.sections) for shape in built.segments]
    [('1/4', 4), ('1/4', 3), ('1/2', 2)]

    Raises ScheduleError unless there is a rate above zero for every rank.
    """
    _side_by_side(program, _peeled(program.n_ranks, rates))


@pure
def _peeled(p: int, rates: Sequence[Fraction]) -> list[Level]:
    """`peel`, for `p` rates."""
    if len(rates) != p or min(rates) <= 0:
        shown = ", ".join(map(str, rates))
        raise ScheduleError(f"rates {shown}: must be {p}, one for each rank, and above zero")
    return peel(rates)


def peel(rates: Sequence[Fraction]) -> list[Level]:
    """The rings of r2ccl-recursive, that of all ranks first.

    Ring j gets the share by which its slowest member is faster than that of ring j - 1: with one straggler that is
    R2CCL's Y = X, and with that difference in rate for itself ring j would take 2(m_j - 1)/m_j, less than the first.
    If only few ranks are fast, the exchange may cost them more than the slow ranks gain. So rates are capped;
    the cap is the one of the rates for which the busiest port finishes first, the lowest of equals.

    >>> peel([Fraction(2), Fraction(1), Fraction(2), Fraction(2)])
    [((0, 1, 2, 3), Fraction(1, 2)), ((0, 2, 3), Fraction(1, 2))]
    >>> [str(share) for _, share in peel([Fraction(1)] * 7 + [Fraction(3, 2)])]
    ['1']
    """
    steps = sorted(set(rates))
    candidates = [_levels(rates, steps[: count + 1]) for count in range(len(steps))]
    return min(candidates, key=lambda levels: _busiest(levels, rates))


def _levels(rates: Sequence[Fraction], steps: Sequence[Fraction]) -> list[Level]:
    below = [Fraction(0), *steps]
    return [
        (tuple(rank for rank, rate in enumerate(rates) if rate >= step), (step - last) / steps[-1])
        for last, step in zip(below, steps, strict=False)
    ]


def _busiest(levels: Sequence[Level], rates: Sequence[Fraction]) -> Fraction:
    """The busy time of the busiest port, in units of n over the unit of `rates`."""
    carried = [Fraction(0)] * len(rates)
    for ranks, share in levels:
        m, left_out = len(ranks), len(rates) - len(ranks)
        for rank in range(len(rates)):
            carried[rank] += share * Fraction(2 * (m - 1) + left_out, m) if rank in ranks else share
    return max(load / rate for load, rate in zip(carried, rates, strict=True))


def _side_by_side(program: Program, levels: Sequence[Level]) -> None:
    """A ring for every level that has a share, segment beside segment.

    A rank outside of a ring sends its part to a member before the ring starts, and receives the result afterwards.
    """
    p = program.n_ranks
    for segment, group in program.groups(levels):
        order, members = group
        with program.stage("hand over"):
            for section in range(members):
                for i in range(members, p):
                    segment[section].reduce(src=order[i], dst=order[(section + i - members) % members])
        with program.stage("reduce-scatter"):
            for step in range(members - 1):
                for i in range(members):
                    segment[(i - step) % members].reduce(src=order[i], dst=order[(i + 1) % members])
        with program.stage("all-gather"):
            for step in range(members - 1):
                for i in range(members):
                    segment[(i + 1 - step) % members].copy(src=order[i], dst=order[(i + 1) % members])
        with program.stage("deliver"):
            for section in range(members):
                for i in range(members, p):
                    segment[section].copy(src=order[(section + i - members - 1) % members], dst=order[i])
