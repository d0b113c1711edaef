"""Small configurations of the failover protocol, to be explored: their size, and which faults may happen."""

from __future__ import annotations

from dataclasses import dataclass

from optcc.errors import InputError
from optcc.failover import Link

BUDGET_MAX = 7
BUDGETS = ("failures", "repairs", "duplications", "losses", "suspicions", "replans", "early")


@dataclass(frozen=True, slots=True)
class Config:
    """A small configuration: its size, and how often each kind of fault may happen in one run.

    `losses` are messages lost or corrupted on a rail that is up, `suspicions` rails that an end takes for down although
    they are up, `replans` changes of plan, `early` timeouts while messages are under way (None: any number). `one_way`:
    a rail may also fail in one direction. Not `notified`: nobody is told of failures, only the timer helps. Not
    `timer`: it never rings. `stepwise`: chunks and slots are offered one by one, else all at once.

    Raises InputError for numbers that cannot be.
    """

    n_rails: int = 2
    n_chunks: int = 3
    window: int = 2
    failures: int = 1
    repairs: int = 0
    duplications: int = 0
    losses: int = 0
    suspicions: int = 0
    replans: int = 0
    early: int | None = 0
    one_way: bool = False
    notified: bool = True
    timer: bool = True
    stepwise: bool = False

    def __post_init__(self) -> None:
        Link(self.n_rails, self.window)
        if not 1 <= self.n_rails <= 4:
            raise InputError(f"{self.n_rails} rails: an exploration takes from 1 to 4")
        if not 1 <= self.n_chunks <= 64:
            raise InputError(f"{self.n_chunks} chunks: an exploration takes from 1 to 64")
        for name in BUDGETS:
            if not 0 <= (getattr(self, name) or 0) <= BUDGET_MAX:
                raise InputError(f"{name} {getattr(self, name)}: must be from 0 to {BUDGET_MAX}")

    def __str__(self) -> str:
        words = [f"{self.n_rails} rails, {self.n_chunks} chunks, window {self.window}"]
        words += [f"{getattr(self, name)} {name}" for name in BUDGETS if getattr(self, name)]
        words += ["timeouts at any moment"] if self.early is None else []
        words += ["one-way failures"] if self.one_way else []
        words += ["nobody is told"] if not self.notified else []
        words += ["no timer"] if not self.timer else []
        words += ["offers one by one"] if self.stepwise else []
        return ", ".join(words)


QUICK = (
    Config(n_chunks=3),
    Config(n_chunks=3, window=1, losses=1, duplications=1),
    Config(n_chunks=2, failures=1, suspicions=1),
    Config(n_chunks=2, replans=1),
    Config(n_chunks=2, replans=1, failures=2, timer=False),
    Config(n_chunks=2, failures=1, replans=2, window=1),
    Config(n_chunks=3, one_way=True, notified=False, early=1),
    Config(n_rails=1, n_chunks=3, failures=2, repairs=2),
    Config(n_rails=3, n_chunks=2, failures=2, timer=False),
)
"""Some 10^5 states, seconds; every row of the table that does anything."""
FULL = (
    *QUICK,
    Config(n_chunks=6, window=3),
    Config(n_chunks=5, early=1),
    Config(n_chunks=3, early=None),
    Config(n_chunks=3, failures=2, repairs=1),
    Config(n_chunks=4, losses=1, duplications=1),
    Config(n_chunks=3, suspicions=1, stepwise=True),
    Config(n_chunks=3, failures=2, repairs=1, one_way=True, notified=False),
    Config(n_chunks=3, replans=1),
    Config(n_chunks=2, window=1, failures=2, replans=1),
    Config(n_chunks=2, repairs=1, replans=1),
    Config(n_chunks=2, losses=1, duplications=1, replans=1),
    Config(n_chunks=1, window=1, repairs=1, replans=2),
    Config(n_rails=3, n_chunks=3, window=3, failures=2),
    Config(n_rails=3, n_chunks=2, failures=2, repairs=1),
    Config(n_rails=3, n_chunks=2, window=1, failures=2, replans=1),
    Config(n_rails=3, n_chunks=2, failures=2, replans=1, timer=False),
)
"""Some 8.6 * 10^6 states, a minute or two and 450 MiB."""
