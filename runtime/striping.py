"""How messages are divided between the rails of a pair of ranks, when its NICs are shared with other pairs.

A NIC carries what all pairs of its rank give it, so the best division for one pair depends on the others. Where one
NIC of a rank is slow, its peers give it little, and have more left on that rail for each other: divided by the rates of
each pair alone, the other rail would be the bottleneck. All ranks know all rates and the whole plan, and each finds the
same division by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column

PARTS = 1 << 12
"""Shares are told in so many parts of a message."""
_SHARPNESS = 6
_STEPS = 300
_CHANGE_MIN = 1e-6
_KEPT = 64
"""Results are kept: all ranks of one process ask for the same, and so does a rank whose NIC
fails and comes back."""

Pair = tuple[int, int]
Floats = npt.NDArray[np.float64]


def divide(
    carried: Mapping[Pair, int],
    joined: Mapping[Pair, Sequence[tuple[int, int]]],
    rates: Sequence[Sequence[tuple[int, int]]],
    paths: Mapping[tuple[int, int, int, int], float] | None = None,
    hosts: Sequence[int] = (),
) -> dict[Pair, tuple[int, ...]]:
    """The share of each rail in what a pair carries, in parts of `PARTS`, so that the busiest NIC is soon done.

    `carried` is bytes from a rank to a rank, `joined` the NICs at both ends of each rail that joins them, `rates` what
    each NIC of each rank sends and receives, `paths` what a rail carries whose path is slower than the NICs at both
    ends, by source, destination and their NICs. `hosts` is for each rank the first one of its host, whose NICs they
    share; every rank has a host of its own if it is left out.

    The least possible time of the busiest NIC is a linear program; this comes
    within two per cent of it (`tests/unit/test_striping.py`) without a solver: it makes the sum over all NICs of the
    2^6-th power of their times small, each pair moving towards its less busy rails. Nothing in it depends on
    the machine: additions in order, products, quotients and square roots, which IEEE 754 rounds alike everywhere.

    Three ranks of two NICs, one of which is slow: its peers give each other less over the rail on which it has more.

    >>> rates = [[(100, 100), (100, 100)], [(100, 100), (100, 100)], [(100, 100), (50, 50)]]
    >>> pairs = [(src, dst) for src in range(3) for dst in range(3) if src != dst]
    >>> shares = divide(dict.fromkeys(pairs, 1), dict.fromkeys(pairs, [(0, 0), (1, 1)]), rates)
    >>> [[round(part / PARTS, 2) for part in shares[pair]] for pair in [(0, 1), (0, 2)]]
    [[0.33, 0.67], [0.67, 0.33]]
    """
    pairs = tuple(pair for pair in joined if carried.get(pair, 0) > 0)
    if not pairs:
        return {}
    return dict(
        _divide(
            pairs,
            tuple(carried[pair] for pair in pairs),
            tuple(tuple(map(tuple, joined[pair])) for pair in pairs),
            tuple(tuple(map(tuple, nics)) for nics in rates),
            tuple((paths or {}).items()),
            tuple(hosts) or tuple(range(len(rates))),
        )
    )


@lru_cache(_KEPT)
def _divide(
    pairs: Sequence[Pair],
    carried: Sequence[int],
    joined: Sequence[Sequence[tuple[int, int]]],
    rates: Sequence[Sequence[tuple[int, int]]],
    slow_paths: Sequence[tuple[tuple[int, int, int, int], float]],
    hosts: Sequence[int],
) -> Mapping[Pair, tuple[int, ...]]:
    first = np.cumsum([0, *(len(nics) for nics in rates)])[list(hosts)]
    rails = [(number, *pairs[number], *rail) for number, each in enumerate(joined) for rail in each]
    pair, src, dst, mine, theirs = np.array(rails, dtype=np.int64).T
    out, in_ = first[src] + mine, first[dst] + theirs
    out_rate, in_rate = (
        np.array([float(nic[side]) for nics in rates for nic in nics]) / max(max(nic) for nics in rates for nic in nics)
        for side in (0, 1)
    )
    wanted = np.array(carried, dtype=np.float64)
    path_rate = None
    if slow_paths:
        paths, unit = dict(slow_paths), max(max(nic) for nics in rates for nic in nics)
        path_rate = np.array([paths.get((*pairs[rail[0]], *rail[3:]), np.inf) / unit for rail in rails])
    flow = _settle(pair, out, in_, wanted / wanted.max(), out_rate, in_rate, path_rate)
    shares = flow / np.bincount(pair, flow)[pair]
    parts = np.split(np.rint(shares * PARTS).astype(np.int64), np.flatnonzero(np.diff(pair)) + 1)
    return {each: tuple(part.tolist()) for each, part in zip(pairs, parts, strict=True)}


def divide_plan(
    carried: Mapping[Pair, int],
    joined: Mapping[Pair, Sequence[tuple[int, int]]],
    rates: Sequence[Sequence[tuple[int, int]]],
    hosts: Sequence[int] = (),
) -> dict[Pair, tuple[int, ...]]:
    """`divide` for what a plan carries, no part being 0; nothing where each pair may divide by its own rates: where all
    NICs are equal, for pairs with one rail, and if it is not known what is carried.

    >>> divide_plan({(0, 1): 1}, {(0, 1): [(0, 0), (1, 1)]}, [[(5, 5), (5, 5)]] * 2)
    {}
    >>> divide_plan({(0, 1): 1}, {(0, 1): [(0, 0), (1, 1)]}, [[(5, 5), (5, 5)], [(5, 5), (1, 1)]])
    {(0, 1): (3421, 675)}
    """
    if not carried or all(each == [rates[0][0]] * len(rates[0]) for each in rates):
        return {}
    parts = divide(carried, joined, rates, hosts=hosts)
    return {pair: tuple(max(1, part) for part in each) for pair, each in parts.items() if len(each) > 1}


def least_of_hosts(rates: Sequence[Sequence[tuple[int, int]]], hosts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """By rank and NIC, the least that the ranks of its host say of a NIC, which they share.

    >>> least_of_hosts([[(4, 4)], [(2, 3)], [(9, 9)]], [0, 0, 2])
    [[(2, 3)], [(2, 3)], [(9, 9)]]
    """
    of_host: dict[int, list[tuple[int, int]]] = {}
    for host, nics in zip(hosts, rates, strict=True):
        before = of_host.setdefault(host, list(nics))
        of_host[host] = [(min(a, c), min(b, d)) for (a, b), (c, d) in zip(before, nics, strict=True)]
    return [of_host[host] for host in hosts]


def _settle(
    pair: Column,
    out: Column,
    in_: Column,
    wanted: Floats,
    out_rate: Floats,
    in_rate: Floats,
    path_rate: Floats | None,
) -> Floats:
    """What goes over each rail of each pair, from a division by the rates of the pair alone."""
    flow = np.minimum(out_rate[out], in_rate[in_])
    if path_rate is not None:
        flow = np.minimum(flow, path_rate)
    flow *= (wanted / np.bincount(pair, flow))[pair]
    for _ in range(_STEPS):
        out_load = np.bincount(out, flow, minlength=len(out_rate)) / out_rate
        in_load = np.bincount(in_, flow, minlength=len(in_rate)) / in_rate
        peak = max(out_load.max(), in_load.max())
        path_load = None if path_rate is None else flow / path_rate
        if path_load is not None:
            peak = max(peak, path_load.max())
        out_load, in_load = out_load / peak, in_load / peak
        for _ in range(_SHARPNESS):
            out_load, in_load = out_load * out_load, in_load * in_load
        # What a byte more on this rail costs; its 2^7-th root, since the powers react as strongly as that.
        cost = (out_load / out_rate)[out] + (in_load / in_rate)[in_]
        if path_load is not None:
            path_load = path_load / peak
            for _ in range(_SHARPNESS):
                path_load = path_load * path_load
            cost = cost + path_load / path_rate
        for _ in range(_SHARPNESS + 1):
            cost = np.sqrt(cost)
        before = flow
        flow = flow / np.maximum(cost, _CHANGE_MIN)
        flow *= (wanted / np.bincount(pair, flow))[pair]
        if np.abs(flow - before).max() < _CHANGE_MIN:
            break
    return flow
