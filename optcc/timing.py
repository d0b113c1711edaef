"""`Timing`: how long a plan is predicted to take on a topology, and which transfers decide that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optcc.show import Card, Shown
from optcc.units import show_time


@dataclass(frozen=True, slots=True, eq=False)
class Timing(Shown):
    """Start and end of every transfer in seconds, as the port model `model` predicts them.

    A transfer takes its out port at `start_s`, its last byte leaves it at `sent_s`; it takes its in port at `taken_s`
    and is done at `end_s`.
    `critical` are transfers from the first to the last one, each of which waited for the one before it;
    `port_names` and `port_busy_s` say how long each port was carrying bytes.
    """

    model: str
    start_s: npt.NDArray[np.float64]
    sent_s: npt.NDArray[np.float64]
    taken_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    critical: tuple[int, ...]
    port_names: tuple[str, ...]
    port_busy_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The end of the last transfer."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0

    def utilisation(self) -> dict[str, float]:
        """For each port, the share of the makespan in which it carried bytes."""
        total = self.seconds
        return {
            name: busy / total if total else 0.0 for name, busy in zip(self.port_names, self.port_busy_s, strict=True)
        }

    def card(self) -> Card:
        rows = tuple((name, f"{100 * share:.1f} %") for name, share in self.utilisation().items())
        return Card(f"{show_time(self.seconds)} ({self.model} ports)", ("port", "busy"), rows)

    def __repr__(self) -> str:
        return f"Timing({self.seconds:.6g} s, model={self.model!r}, transfers={len(self.end_s)})"
