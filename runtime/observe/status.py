"""What a rank says of itself in its page: nouns that travel as JSON, and how they are read off a transport."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from optcc.runtime.observe.recorder import KnownPlan
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.local import ProtocolNote

UP, DOUBTED, SILENT, DOWN = "up", "doubted", "silent", "down"
"""A NIC of a rank: all is well; a connection over it is suspected or avoided; nothing is joined over it any more; the
kernel says that its link is down."""
RUNNING, FAILED, CLOSED = "running", "failed", "closed"
LOST, NIC_DOWN, WRONG = "lost", "NIC down", "wrong result"
"""Kinds of notes that `explain` and `status` look for."""


class RankIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who writes a page. `boot` names the run of the host's kernel: ranks with one `boot` have one clock, whose seconds
    are `clock_s` when the time of day is `wall_s`."""

    job: str
    rank: int
    n_ranks: int
    host: str
    pid: int
    started_s: float
    boot: str
    clock_s: float
    wall_s: float
    version: str
    transport: str


class WaitedFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run waits for: messages from a rank (`arrives`), or a rank that is to take some."""

    rank: int
    arrives: bool


class RunningRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective, or a message (plan 0), that is under way: instructions done and in all.

    `moved_s` is when it went on last, to within an interval of the status.
    """

    number: int
    plan: int
    since_s: float
    done: int
    total: int
    moved_s: float
    waits: tuple[WaitedFor, ...]


class RailStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A NIC of a rank: rates as declared or measured and as they are now, bytes/s out and in; bytes with headers;
    connections that are up and that are doubted; the last one that was lost, when and why."""

    name: str
    state: str
    out_rate: float
    in_rate: float
    out_share: float
    in_share: float
    sending: float
    receiving: float
    sent_bytes: int
    received_bytes: int
    connections: int
    doubts: int
    failures: int
    last_failure: str = ""
    last_failure_s: float = 0.0


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rare event of a rank; `ranks` are those at fault, if that is known."""

    at_s: float
    kind: str
    text: str
    peer: int = -1
    nic: int = -1
    ranks: tuple[int, ...] = ()


class FailureStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a rank has given up: the error that it raises, and the cause that it has told the others."""

    at_s: float
    error: str
    text: str
    cause: str
    culprits: tuple[int, ...]
    nics: tuple[tuple[int, str], ...]


class WantedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank wanted at `at_s` to run as its collective number `run`, by a plan on which the ranks had to agree
    first: if it never began, they have not, or not yet."""

    run: int
    at_s: float
    plan: KnownPlan


class RankStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a rank says of itself at `now_s` of its clock; `preparing` is for what a plan is being agreed on, or was
    in vain, and `wanted` the same where it is for all ranks of the job."""

    state: str
    now_s: float
    epoch: int
    shares: str
    plans: tuple[KnownPlan, ...]
    running: tuple[RunningRun, ...]
    rails: tuple[RailStatus, ...]
    counts: dict[str, int]
    notes: tuple[Note, ...]
    preparing: str = ""
    failure: FailureStatus | None = None
    wanted: WantedRun | None = None


@runtime_checkable
class HasEndpoint(Protocol):
    """A transport over NICs, whose protocol is `optcc.runtime.protocol`."""

    @property
    def endpoint(self) -> Endpoint:
        """The protocol of this rank."""
        ...


class RailReader:
    """The NICs of a rank, as its endpoint has them; rates are since the last reading."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._read_s = 0.0
        self._bytes = [(0, 0)] * len(endpoint.own_nics)
        self._had_any = [False] * len(endpoint.own_nics)
        self._last_loss: dict[int, ProtocolNote] = {}

    @property
    def has_notes(self) -> bool:
        """Whether there are rare events that were not taken."""
        return bool(self._endpoint.notes)

    def take_notes(self) -> list[Note]:
        """The rare events since the last call."""
        endpoint, found = self._endpoint, []
        while endpoint.notes:
            note = endpoint.notes.popleft()
            if note.kind in (LOST, NIC_DOWN) and note.nic >= 0:
                self._last_loss[note.nic] = note
            found.append(Note(*note))
        return found

    def read(self, now_s: float) -> tuple[RailStatus, ...]:
        """The NICs as they are now."""
        endpoint = self._endpoint
        n_nics = len(endpoint.own_nics)
        n_up, n_doubted = [0] * n_nics, [0] * n_nics
        for each in list(endpoint.up):
            if 0 <= each.nic < n_nics:
                n_up[each.nic] += 1
                n_doubted[each.nic] += each.suspect or each.is_avoided
        is_alone = not (endpoint.outbounds.keys() | endpoint.inbounds.keys()) - endpoint.left.keys()
        elapsed_s = now_s - self._read_s
        self._read_s = now_s
        found = []
        counts = endpoint.rail_counts[:n_nics]
        for nic, ((name, *_, out, in_), count) in enumerate(zip(endpoint.own_nics, counts, strict=True)):
            self._had_any[nic] |= n_up[nic] > 0
            if not endpoint.nic_up[nic]:
                state = DOWN
            elif not n_up[nic] and self._had_any[nic] and not is_alone:
                state = SILENT
            else:
                state = DOUBTED if n_doubted[nic] else UP
            sent, received = self._bytes[nic]
            self._bytes[nic] = count.sent_bytes, count.received_bytes
            loss = self._last_loss.get(nic)
            found.append(
                RailStatus(
                    *(name, state, float(out), float(in_), count.out_share, count.in_share),
                    (count.sent_bytes - sent) / elapsed_s if elapsed_s > 0 else 0.0,
                    (count.received_bytes - received) / elapsed_s if elapsed_s > 0 else 0.0,
                    *(count.sent_bytes, count.received_bytes, n_up[nic], n_doubted[nic], count.failures),
                    loss.text if loss is not None else "",
                    loss.at_s if loss is not None else 0.0,
                )
            )
        return tuple(found)

    @property
    def counts(self) -> dict[str, int]:
        """What `optcc.runtime.protocol.settings.Counts` has."""
        counts = self._endpoint.counts
        return {name: getattr(counts, name) for name in counts.__slots__}
