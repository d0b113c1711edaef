"""The clock of the fifo and exclusive models: what a byte costs at each port in ticks, and how that changes.

A tick divides every duration if 64 bits suffice for that, and every remainder of one that a change of rate makes; then
ties are ties and nothing is rounded. Else durations are rounded to a tick of 2**-61 of the time that all transfers
would take one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column

TICKS_MAX = 2**62


@dataclass(frozen=True, slots=True)
class Change:
    """From `at_s` on, port `port` carries `rate` bytes/s; 0: it stands still, and what it serves with it.

    Of what it is serving, up to `lost_bytes` that it has carried already are to be carried again.
    """

    at_s: Fraction
    port: int
    rate: Fraction
    lost_bytes: int = 0


class Paces(NamedTuple):
    """Ticks for a byte at each port, as whole numbers if `exact`, else as floats; of a port that is down, the last
    before.
    """

    exact: bool
    ticks: Column
    ticks_float: npt.NDArray[np.float64]
    down: npt.NDArray[np.bool_]


class Changes(NamedTuple):
    """The changes to come, in order of time: columns, the time and the paces in ticks."""

    at: Column
    port: Column
    ticks: Column
    ticks_float: npt.NDArray[np.float64]
    down: npt.NDArray[np.bool_]
    lost: Column


@dataclass(frozen=True, slots=True)
class TickClock:
    """Ticks."""

    per_s: int
    latency: int
    overhead: int
    paces: Paces
    changes: Changes


def at_start(
    port_rates: Sequence[Fraction], changes: Sequence[Change]
) -> tuple[list[Fraction], list[bool], list[Change]]:
    """The rates before the first transfer starts, which ports are down then, and the changes that are still to come.

    A port that is down has the rate before or, if it has had none, the one that it is going to have.
    """
    rates, down = list(port_rates), [rate == 0 for rate in port_rates]
    for each in changes:
        if each.at_s <= 0:
            down[each.port] = each.rate == 0
        if each.rate and (each.at_s <= 0 or rates[each.port] == 0):
            rates[each.port] = each.rate
    return [rate or Fraction(1) for rate in rates], down, [each for each in changes if each.at_s > 0]


def make_clock(
    port_rates: Sequence[Fraction],
    down: Sequence[bool],
    carried: Sequence[int],
    count: int,
    latency_s: Fraction,
    overhead_s: Fraction,
    changes: Sequence[Change] = (),
    slack_s: Fraction | None = None,
) -> TickClock:
    """The clock for ports of `port_rates` that carry `carried` bytes, in `count` transfers.

    `changes` are in order of time; a port that is `down` at first has the rate that it had before. `slack_s` is what
    latencies may add to the makespan beyond `latency_s`: given, the tick is as small as it can be, whatever it divides.
    """
    # Ports have few rates, and fractions are slow: what follows is done once for each rate.
    parts = [(rate.numerator, rate.denominator) for rate in port_rates]
    number = {part: index for index, part in enumerate(dict.fromkeys(parts))}
    distinct = [Fraction(*part) for part in number]
    kind = np.array([number[part] for part in parts], dtype=np.int64)
    loads = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(loads, kind, np.array(carried, dtype=np.int64))
    load = {rate: total for rate, total in zip(distinct, loads.tolist(), strict=True) if total}
    busy = {*load, *(each.rate for each in changes if carried[each.port] and each.rate)}
    horizon = count * (latency_s + overhead_s) + (slack_s or 0) + _longest(load, port_rates, carried, changes)
    per_s = lcm(latency_s.denominator, overhead_s.denominator, *{rate.numerator for rate in busy})
    per_s = lcm(per_s, *{each.at_s.denominator for each in changes})
    finer = _refinement(busy) if changes else 1
    for _, together in groupby(changes, key=lambda each: each.at_s):
        if any(carried[each.port] and each.rate for each in together):
            per_s *= finer
    exact = horizon * per_s < TICKS_MAX and slack_s is None
    if not exact:
        per_s = max(1, int(TICKS_MAX / 2 / horizon)) if horizon else 1
    ticks = [per_s / rate for rate in distinct]
    new = [per_s / each.rate if each.rate else Fraction(0) for each in changes]
    paces = Paces(
        exact,
        # Of these types where there is no port, too: kernels are compiled anew for others.
        np.array(
            [int(each) if exact and rate in load else 0 for each, rate in zip(ticks, distinct, strict=True)],
            dtype=np.int64,
        )[kind],
        np.array([float(each) for each in ticks], dtype=np.float64)[kind],
        np.array(down, dtype=np.bool_),
    )
    columns = Changes(
        np.array([round(each.at_s * per_s) for each in changes], dtype=np.int64),
        np.array([each.port for each in changes], dtype=np.int64),
        np.array([int(a) if exact and carried[b.port] else 0 for a, b in zip(new, changes, strict=True)], np.int64),
        np.array([float(each) for each in new], dtype=np.float64),
        np.array([each.rate == 0 for each in changes], dtype=np.bool_),
        np.array([each.lost_bytes for each in changes], dtype=np.int64),
    )
    return TickClock(per_s, round(latency_s * per_s), round(overhead_s * per_s), paces, columns)


FLOAT_MAX = 2**53
"""Floats represent all whole numbers up to this."""
SHARED_BY = (3 * 3 * 5 * 7, 3 * 5, 3, 1)
"""A port's rate is a multiple of the first of these that fits, so its shares among so many flows are whole numbers.
Powers of two need no factor: floats represent halves."""


def fair_units(port_rates: Iterable[Fraction], moments: Iterable[Fraction], span_s: Fraction) -> tuple[int, Fraction]:
    """Ticks per second and units per byte for the fair model, such that its floats are whole numbers where possible.

    Max-min fair sharing amplifies perturbations: in one plan of 480 transfers, delaying a start by 1e-17 s moves the
    makespan by 4e-7 s. So rounding must not separate events that are simultaneous. `moments` are all times given,
    `span_s` is the order of magnitude of the makespan; if 53 bits do not suffice, a tick is a second and a unit a byte.
    """
    rates = {rate for rate in port_rates if rate}
    whole = 1
    for each in {*(rate.numerator for rate in rates), *(moment.denominator for moment in moments)}:
        whole = lcm(whole, each)
        if whole * span_s > FLOAT_MAX:
            return 1, Fraction(1)
    shared_by = next((each for each in SHARED_BY if each * whole * span_s <= FLOAT_MAX), 1)
    step = Fraction(gcd(*(rate.numerator for rate in rates)), lcm(*(rate.denominator for rate in rates)))
    per_s = whole * shared_by
    return per_s, shared_by * per_s / step if rates else Fraction(1)


def _longest(
    load: Mapping[Fraction, int], port_rates: Sequence[Fraction], carried: Sequence[int], changes: Sequence[Change]
) -> Fraction:
    """Seconds that no run exceeds by more than its latencies: one byte after the other, all that change first."""
    longest = sum((total / rate for rate, total in load.items()), changes[-1].at_s if changes else Fraction(0))
    for port in {each.port for each in changes}:
        mine = [each for each in changes if each.port == port]
        slowest = min([each.rate for each in mine if each.rate], default=port_rates[port])
        longest += (carried[port] + sum(each.lost_bytes for each in mine)) / slowest
    return longest


def _refinement(rates: Iterable[Fraction]) -> int:
    """By how much finer ticks must be for a change between any two of `rates` to leave whole ticks.

    A rest of r ticks at the old rate is r * old / new at the new one.

    >>> _refinement([Fraction(8), Fraction(6)]), _refinement([Fraction(5, 2)])
    (12, 1)
    """
    rates = list(rates)
    whole = lcm(*(rate.denominator for rate in rates))
    numbers = [int(rate * whole) for rate in rates]
    return lcm(*(number // gcd(*numbers) for number in numbers))


def cost(paces: Paces, size: int, port: int) -> int:
    """Ticks that `size` bytes take at `port`."""
    if paces.exact:
        return int(size * paces.ticks[port])
    return max(1, int(np.rint(size * paces.ticks_float[port])))


def rescale(rest: int, old: int, new: int, old_float: float, new_float: float, exact: bool) -> int:
    """`rest` ticks at `old` ticks for a byte, when it is `new` ticks for a byte."""
    if exact:
        if old == new:
            return rest
        whole = rest // old
        return whole * new + int(np.rint((rest - whole * old) * (new / old)))
    return int(np.rint(rest * (new_float / old_float)))


def resent(paces: Paces, size: int, rest: int, lost: int, old: int, old_float: float) -> int:
    """Ticks that a transfer of `size` bytes must be served again, of those that it has been served."""
    if paces.exact:
        return max(0, min(lost * old, size * old - rest))
    return max(0, min(int(np.rint(lost * old_float)), int(np.rint(size * old_float)) - rest))


def change_rate(paces: Paces, changes: Changes, index: int) -> None:
    """Change `index` happens."""
    port = changes.port[index]
    paces.down[port] = changes.down[index]
    if not changes.down[index]:
        paces.ticks[port] = changes.ticks[index]
        paces.ticks_float[port] = changes.ticks_float[index]


KERNELS: tuple[Callable[..., Any], ...] = (cost, rescale, resent, change_rate)
