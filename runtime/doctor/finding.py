"""What a check reports, and for which job it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from optcc.errors import InputError

OK: Final = "ok"
NOTE: Final = "note"
WRONG: Final = "wrong"
Status = Literal["ok", "note", "wrong"]
"""`note`: something is missing that only some commands need, or is slower than it must be; `wrong`: it keeps a run from
starting, or bends its results."""
RANKS, RANKS_HERE = 64, 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, its value, whether that will do, why it matters and what to do."""

    area: str
    name: str
    value: str
    verdict: Status
    why: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """The largest job that this host is to take part in: ranks in all, and how many of them here."""

    ranks: int = RANKS
    ranks_here: int = RANKS_HERE

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_here < 1:
            raise InputError(f"{self.ranks} ranks, {self.ranks_here} of them here: must be at least 1")
        if self.ranks_here > self.ranks:
            raise InputError(f"{self.ranks_here} ranks here: must be at most all {self.ranks}")

    def connections(self, rails: int) -> int:
        """What one rank may have open: one for each peer, rail and direction."""
        return 2 * rails * (self.ranks - 1)
