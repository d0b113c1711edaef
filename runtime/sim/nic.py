"""A NIC of a simulated host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class SimulatedNic:
    """NIC `number` of `rank`. Rates in bytes/s; `fails` counts what made it lose what it carried; what it sends takes
    `delay_s` longer than the network's latency; `n_moves` counts the addresses that it has had after its first."""

    rank: int
    number: int
    out_rate: float
    in_rate: float
    is_up: bool = True
    out_open: bool = True
    in_open: bool = True
    loss: float = 0.0
    refuses: bool = False
    fails: int = 0
    out_free_s: float = 0.0
    in_free_s: float = 0.0
    delay_s: float = 0.0
    n_moves: int = 0

    def sends(self) -> bool:
        """True if what is sent leaves it."""
        return self.is_up and self.out_open

    def receives(self) -> bool:
        """True if what arrives gets through."""
        return self.is_up and self.in_open
