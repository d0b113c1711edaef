"""Shares of a message for hosts whose NICs reach only NICs of their own rail.

A schedule for pooled NICs gives a host what all its NICs carry together. Over rails that is too much for a host with a
NIC that few others can reach: with seven hosts of one to three NICs such plans took 2.1 times the bound.
`shares_by_rail` finds the shares of `optcc.schedules.fair_optimum` for which the busiest NIC is done first. A linear
program: how much of the message is reduced at u and broadcast from v, which part of what i sends to j goes over which
rail, and the time T of the busiest NIC.

    minimise T    such that    the shares w(u, v) add up to one
                               over all rails i sends j what the shares ask of it     for each pair (i, j)
                               a NIC sends, and receives, at most T times its rate    for each NIC, each way

Messages are then striped by what the whole plan carries (`optcc.runtime.striping`), which comes within 2 % of the
program's rails. Over random hosts it is the bound T*, or up to 1.11 of it: there no plan of these shares is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from optcc.schedules.fair_optimum import PARTS, RankShare, divide
from optcc.topology import Nic, Topology
from optcc.verify.bounds.solvers import AT_MOST, EQUAL, HighsSolver, LinearProgram, Solved

SERVERS_MAX = 32
"""With more servers the NICs are pooled: the program has variables for all pairs, and is to be solved at start-up."""
WORTH_IT = 1.01
"""NICs are pooled if the pooled shares take at most so many times the bound of pooled NICs."""
_LIMIT_S = 10.0
_SPREAD = 1e-3
"""A share that is reduced at one server and broadcast from another costs so much of T: it makes plans longer."""
_RATE_PARTS = 2**16


class RailShares(NamedTuple):
    """`usable`: the topology with one NIC a server, of what the server can use of its NICs together; and the shares."""

    usable: Topology
    shares: tuple[RankShare, ...]


@lru_cache(maxsize=16)
def shares_by_rail(topology: Topology) -> RailShares | None:
    """The shares for NICs that reach only those of their rail; None where the shares of pooled NICs are as good.

    None, too, for more than `SERVERS_MAX` servers, and if no shares are possible since no server reaches all others.

    >>> from optcc.topology import Server
    >>> one, other = Nic(0, Fraction(10), Fraction(10)), Nic(1, Fraction(10), Fraction(10))
    >>> servers = [Server(f"h{n}", 1, nics) for n, nics in enumerate([(one, other), (one,), (one,)])]
    >>> topology = Topology(tuple(servers))
    >>> found = shares_by_rail(topology)
    >>> [int(rate) for rate in topology.out], [int(rate) for rate in found.usable.out]
    ([20, 10, 10], [10, 10, 10])
    """
    p = len(topology.servers)
    nics = {
        (number, nic.rail): (float(nic.out), float(nic.in_))
        for number, server in enumerate(topology.servers)
        for nic in server.nics
        if not nic.failed
    }
    own = [sorted((rail, rates) for (server, rail), rates in nics.items() if server == number) for number in range(p)]
    if not 3 <= p <= SERVERS_MAX or len(nics) < sum(map(len, own)) or all(each == own[0] for each in own):
        return None
    pooled = divide(*(np.array([float(rate) for rate in side]) for side in (topology.out, topology.in_)))
    bound_s = max(
        load / float(rates[server])
        for side, rates in enumerate((topology.out, topology.in_))
        for server, load in enumerate(_loads(pooled, p)[side])
    )
    fixed = _solve(nics, p, pooled)
    if fixed is not None and fixed[0] <= WORTH_IT * bound_s:
        return None
    found = _solve(nics, p, None)
    if found is None:
        return None
    seconds, shares = found
    loads = _loads(shares, p)
    best = max(max(side) for side in loads) / seconds
    servers = tuple(
        replace(server, nics=(Nic(0, _rate(out / seconds, best), _rate(in_ / seconds, best)),))
        for server, out, in_ in zip(topology.servers, *loads, strict=True)
    )
    return RailShares(replace(topology, servers=servers, rail_only=False, text=""), shares)


def usable(topology: Topology) -> Topology:
    """The topology as a schedule over all pairs can use it over rails: what `auto` predicts times with."""
    found = shares_by_rail(topology)
    return topology if found is None else found.usable


def _rate(rate: float, best: float) -> Fraction:
    """Rounded: ranks that find slightly different floats agree on the plan."""
    return Fraction(round(rate / best * _RATE_PARTS)) * Fraction(round(best)) / _RATE_PARTS


def _loads(shares: Sequence[RankShare], p: int) -> tuple[list[float], list[float]]:
    """What each server sends, and receives, as a multiple of the message."""
    out, in_ = [1.0] * p, [1.0] * p
    for reduced, broadcast, weight in shares:
        out[broadcast] += (p - 2) * float(weight)
        in_[reduced] += (p - 2) * float(weight)
    return out, in_


def _flows(reduced: int, broadcast: int, p: int) -> dict[tuple[int, int], int]:
    """How often a share goes from a server to a server."""
    flows = {(src, reduced): 1 for src in range(p) if src not in (reduced, broadcast)}
    if reduced != broadcast:
        flows[reduced, broadcast] = 1
    for dst in range(p):
        if dst != broadcast:
            flows[broadcast, dst] = flows.get((broadcast, dst), 0) + 1
    return flows


def _solve(
    nics: Mapping[tuple[int, int], tuple[float, float]], p: int, given: Sequence[RankShare] | None
) -> tuple[float, tuple[RankShare, ...]] | None:
    """The time of the busiest NIC for a message of one byte, and the shares: those `given`, or else the best ones."""
    program = LinearProgram()
    time = program.variable("T", cost=1)
    total = sum(min(rates) for rates in nics.values())
    scale = 2 * (p - 1) / total  # about the time, so that T is about 1
    carried: dict[tuple[int, int], list[tuple[int, Fraction]]] = {
        (src, dst): [] for src in range(p) for dst in range(p) if src != dst
    }
    places = [each[:2] for each in given] if given is not None else [(u, v) for u in range(p) for v in range(p)]
    weights = [program.variable(f"share {u} {v}") for u, v in places]
    for variable, (u, v) in zip(weights, places, strict=True):
        if u != v:
            program.objective[variable] = Fraction(_SPREAD)
        for pair, count in _flows(u, v, p).items():
            carried[pair].append((variable, Fraction(count)))
    if given is None:
        program.constraint("whole", tuple((variable, Fraction(1)) for variable in weights), EQUAL, Fraction(1))
    else:
        for variable, each in zip(weights, given, strict=True):
            program.constraint("given", ((variable, Fraction(1)),), EQUAL, each.weight)
    loads: list[dict[tuple[int, int], list[tuple[int, Fraction]]]] = [{nic: [] for nic in nics} for _ in range(2)]
    for (src, dst), wanted in carried.items():
        rails = [rail for server, rail in nics if server == src and (dst, rail) in nics]
        parts = [program.variable(f"{src} to {dst} over {rail}") for rail in rails]
        for rail, part in zip(rails, parts, strict=True):
            loads[0][src, rail].append((part, Fraction(1)))
            loads[1][dst, rail].append((part, Fraction(1)))
        program.constraint(f"{src} to {dst}", (*wanted, *((part, Fraction(-1)) for part in parts)), EQUAL, Fraction(0))
    for side, by_nic in enumerate(loads):
        for nic, entries in by_nic.items():
            capacity = (time, -Fraction(nics[nic][side] * scale))
            program.constraint(f"NIC {nic}", (*entries, capacity), AT_MOST, Fraction(0))
    solved = HighsSolver(program).solve(_LIMIT_S)
    if not isinstance(solved, Solved):
        return None
    if given is not None:
        return solved.values[time] * scale, tuple(given)
    whole = [max(0, round(solved.values[variable] * PARTS)) for variable in weights]
    whole[int(np.argmax(whole))] += PARTS - sum(whole)
    shares = tuple(RankShare(u, v, Fraction(n, PARTS)) for (u, v), n in zip(places, whole, strict=True) if n)
    return solved.values[time] * scale, shares
