"""How a rank is set up, and what has happened to it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from optcc.errors import InputError, MismatchError
from optcc.failover import Link

CHUNK_BYTES_MAX = 1 << 30
RATE_MIN = 125_000
"""Declared rates below this, in bytes/s, are proportions; above it they also bound how long a queue drains."""

_AGREED_S = 1.0
"""Within this time after the first rank has found that no rail reaches another one, all raise the same error."""

NicEntry = tuple[str, str, int, int, int]
"""A NIC as the ranks exchange it: name, address, port, rate out, rate in (bytes/s)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a rank is set up; see `optcc.runtime.transports.tcp.TcpTransport`.

    With `authenticate`, every frame after the handshake is under an authentication tag (`sealing`). With `partition_s`
    above 0, a host without a live rail is waited for instead of ending the job after `stall_s`
    (`optcc.runtime.partition`).

    Raises InputError for numbers out of range.
    """

    chunk_bytes: int
    window: int
    crc: bool
    replan: bool
    learn_rates: bool
    silent_s: float
    stall_s: float
    hello_s: float
    authenticate: bool = False
    partition_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise InputError(f"chunks of {self.chunk_bytes} B: must be from 1 B to 1 GiB")
        Link(1, self.window)
        for name in ("silent_s", "stall_s", "hello_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} {getattr(self, name)}: must be above 0")
        if not (isfinite(self.partition_s) and self.partition_s >= 0):
            raise InputError(f"partition_s {self.partition_s}: must be a number of seconds above 0, or 0")

    @property
    def cut_off_s(self) -> float:
        """A rank that no rail has reached for so long is cut off: with `partition_s`, soon enough for all ranks to have
        agreed on that by then."""
        return max(self.partition_s - _AGREED_S, self.partition_s / 2) or self.stall_s


def differs(rank: int, own: int, field: str, theirs: object, ours: object) -> MismatchError:
    """The error where `rank` is set up otherwise than this rank, `own`.

    >>> print(differs(3, 0, "authenticate", True, False))
    rank 3 differs from rank 0: authenticate True instead of False
    """
    return MismatchError(f"rank {rank} differs from rank {own}: {field} {theirs} instead of {ours}")


@dataclass(slots=True)
class Counts:
    """Chunks sent again, chunks that came twice or too late, damaged connections, refused callers, changes of plan, and
    paths through other ranks: those that this rank has used, and those that it has passed bytes on for."""

    resent: int = 0
    suppressed: int = 0
    damaged: int = 0
    refused: int = 0
    changes: int = 0
    detours: int = 0
    relays: int = 0


@dataclass(slots=True)
class RailCount:
    """Traffic of one NIC of this rank: bytes with headers, failed connections, and its measured rates.

    `out_share` and `in_share` are the measured shares of its declared rates, 1 unless it is slower.
    """

    name: str
    sent_bytes: int = 0
    received_bytes: int = 0
    failures: int = 0
    out_share: float = 1.0
    in_share: float = 1.0
