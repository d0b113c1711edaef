"""`Timing`: how long a plan is predicted to take on a topology, and which transfers decide that."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.show import Card, Shown
from optcc.units import show_time

Model = Literal["fifo", "exclusive", "fair"]
"""How the ports of a topology serve what wants them at the same time; `optcc.simulate` says what each means."""
MODELS: tuple[Model, ...] = ("fifo", "exclusive", "fair")


def with_overhead(seconds: float, messages: float, overhead_s: Fraction) -> float:
    """The time of a plan whose ports take `seconds`, and whose busiest rank sends and receives so many messages, each
    of which costs its processor `overhead_s`.

    Processors work beside the wires and are no loss until they are nearly as busy: the sum of the third powers.

    >>> with_overhead(1.0, 12, Fraction(0)), round(with_overhead(1.0, 12, Fraction(1, 24)), 3)
    (1.0, 1.04)
    """
    if not overhead_s:
        return seconds
    return float((seconds**3 + (messages * float(overhead_s)) ** 3) ** (1 / 3))


@dataclass(frozen=True, slots=True)
class FaultCost:
    """A fault in words, and how much longer the run takes with it than with only the faults before it, seconds."""

    fault: str
    cost_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Recovery:
    """What faults cost: the costs add up to the overhead over `fault_free_s`, the run without any.

    If the run turned to a second plan, `kept` are the transfers of the first one that were still to be done, in the
    order of the first plan's `Timing`, and `second` are the times of the second plan, on the same clock; if it turned
    again, `second` has a `recovery` that says so.
    """

    policy: str
    fault_free_s: float
    costs: tuple[FaultCost, ...]
    kept: Column | None = None
    second: Timing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Timing(Shown):
    """Start and end of every transfer in seconds, as the port model `model` predicts them.

    A transfer takes its out port at `start_s`, its last byte leaves it at `sent_s`; it takes its in port at `taken_s`
    and is done at `end_s`.
    `critical` are transfers from the first to the last one, each of which waited for the one before it;
    `port_names` and `port_busy_s` say how long each port was carrying bytes, at the rate that it has without faults.
    `recovery` is what faults did to the run, if it had any. Where there are uplinks and ports are not fair,
    `uplink_turns[t]` are the places of transfer t among all that pass uplinks, in the order in which they do, on its
    way up and on its way down; below zero: it passes none.
    """

    model: str
    start_s: npt.NDArray[np.float64]
    sent_s: npt.NDArray[np.float64]
    taken_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    critical: tuple[int, ...]
    port_names: tuple[str, ...]
    port_busy_s: tuple[float, ...]
    recovery: Recovery | None = None
    uplink_turns: Column | None = None

    @property
    def seconds(self) -> float:
        """The end of the last transfer, be it the second plan's."""
        last = float(self.end_s.max()) if len(self.end_s) else 0.0
        second = self.recovery.second if self.recovery is not None else None
        return last if second is None else max(last, second.seconds)

    @property
    def overhead(self) -> float:
        """What faults add to the time, as a share of the time without them."""
        if self.recovery is None or self.recovery.fault_free_s == 0:
            return 0.0
        return self.seconds / self.recovery.fault_free_s - 1

    def landed_s(self, which: Column, needed_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """When the transfers `which` leave their in ports, which need `needed_s` for their bytes: not before the last
        byte was sent, nor faster than the port is."""
        return np.maximum(self.sent_s[which], self.taken_s[which] + needed_s)

    def utilisation(self) -> dict[str, float]:
        """For each port, the share of the makespan in which it carried bytes."""
        total = self.seconds
        return {
            name: busy / total if total else 0.0 for name, busy in zip(self.port_names, self.port_busy_s, strict=True)
        }

    def card(self) -> Card:
        rows = tuple((name, f"{100 * share:.1f} %") for name, share in self.utilisation().items())
        if self.recovery is None:
            return Card(f"{show_time(self.seconds)} ({self.model} ports)", ("port", "busy"), rows)
        costs = tuple(
            (each.fault, f"{'-' if each.cost_s < 0 else '+'} {show_time(abs(each.cost_s))}")
            for each in self.recovery.costs
        )
        title = (
            f"{show_time(self.seconds)} ({self.model} ports), {100 * self.overhead:.1f} % over "
            f"{show_time(self.recovery.fault_free_s)} without faults; policy {self.recovery.policy}"
        )
        return Card(title, ("fault, port", "cost, busy"), (*costs, *rows))

    def __repr__(self) -> str:
        return f"Timing({self.seconds:.6g} s, model={self.model!r}, transfers={len(self.end_s)})"
