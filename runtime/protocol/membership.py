"""When a rank is lost, when no rail is left, and how all ranks come to name the same one. No I/O.

A rank says bye on every connection when it closes, and whether it does so because of a failure. A rank that is gone
without a bye refuses connections: its listeners live as long as it does. A rank that no rail reaches for
`cut_off_s` may be alive. What a rank finds in this way, and its own errors, it tells all others
(`failure_agreement`): the state of a rank travels in `NEWS_FRAME`s, eight bytes each, over every connection, and over
each new one.

A rank that computes does not answer. So nobody waits for it if somebody is known to be at fault; else, where a deadline
has passed, it is the one that is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from optcc.errors import AllRailsFailed, DeadlineExceeded, RankLost, RuntimeFault
from optcc.runtime.protocol.connection import Broken
from optcc.runtime.protocol.failure_agreement import (
    CUT,
    ERROR,
    GONE,
    LATE,
    LEFT,
    SILENT,
    AgreementState,
    FailureAgreement,
    FailureFinding,
    judge,
)
from optcc.runtime.protocol.frames import NEWS_FRAME
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.local import Established, LocalRank
from optcc.runtime.protocol.outbound import Outbound

_REFUSED_S = 1.0
_ENDED = "its process has ended: it refuses connections"
_LOOK_S = 0.01
_DIAL_S = 0.05
"""From the first finding: ranks that are not connected are dialled if it is not over by then."""
_ANSWER_S = 0.25
"""Since the last change: nobody waits longer for a rank that does not answer, if it makes no difference."""
_REACH_S, _SILENT_S = 0.5, 1.0
"""From the first finding: a rank that has not answered and has no connection is out of reach; one that has is silent.
"""
FAREWELL_S = 0.25
"""A rank that leaves after a failure waits so long for the others to know of it."""
_NEIGHBOURS_ONLY = 32
"""In a job of more ranks, each dials those at distances that are powers of two."""
_NEWS_BYTES_MAX = 1 << 16
_WORD_BYTES = 8


class _News(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An `AgreementState` as it travels."""

    is_decided: bool
    holders: tuple[int, ...]
    findings: tuple[tuple[int, int, int, str], ...]


class Parties(Protocol):
    """What this needs of the endpoint."""

    outbounds: dict[int, Outbound]
    inbounds: dict[int, Inbound]

    def outbound(self, peer: int) -> Outbound:
        """The direction to a peer; a new one is dialled at the next tick."""
        ...


class Membership:
    """One rank's view of which ranks and rails are lost; `agreement` is empty as long as none is."""

    def __init__(self, local: LocalRank, parties: Parties) -> None:
        self._local, self._parties = local, parties
        self.agreement = FailureAgreement(local.rank, len(local.book))
        # Time that this rank has watched: since the first finding, and since the last change.
        self._waited_s = self._quiet_s = 0.0
        self._has_dialled = False
        self._refusing: set[int] = set()
        # By connection: the part of a state that has come.
        self._coming: dict[Established, bytearray] = {}

    # --- what is found

    def find_error(self, cause: str, *, is_late: bool) -> None:
        """This rank has an error of its own, which the others are told; `is_late`: its deadline has passed."""
        if self._local.rank not in {each.rank for each in self.agreement.findings if each.kind in (ERROR, LATE)}:
            self._note(self.agreement.find([FailureFinding.of(LATE if is_late else ERROR, self._local.rank, cause)]))

    def tick(self, elapsed_s: float) -> None:
        """Finds what is to be found, and decides."""
        agreement = self.agreement
        if agreement.is_decided:
            return
        self._note(agreement.find(self._find()))
        if not agreement.findings:
            return
        self._waited_s += elapsed_s
        self._quiet_s += elapsed_s
        self._local.watch_within(_LOOK_S)
        if self._waited_s >= _DIAL_S and not self._has_dialled:
            self._dial()
        if not agreement.has_evidence and self._waited_s >= _REACH_S:
            self._note(agreement.find(self._call_roll()))
        has_asked = agreement.has_evidence or self._waited_s >= _SILENT_S
        if not self._missing() or (has_asked and self._quiet_s >= _ANSWER_S):
            agreement.decide()
            self._note(True)

    def _find(self) -> Iterator[FailureFinding]:
        parties = self._parties
        return find_failures(self._local, parties.outbounds, parties.inbounds, self.agreement)

    def _missing(self) -> set[int]:
        return self.agreement.missing(self._local.left.keys() | self._refusing)

    def _call_roll(self) -> Iterator[FailureFinding]:
        """Who has not answered, and why."""
        local, agreement = self._local, self.agreement
        is_late = all(each.kind in (SILENT, LATE) for each in agreement.findings)
        for peer in self._missing() - agreement.heard:
            outbound = self._parties.outbounds.get(peer)
            if outbound is not None and outbound.has_been_refused():
                # It may have left in good order, and its bye was lost: whoever waits for it knows better.
                self._refusing.add(peer)
            elif not (local.up_to(peer) or (outbound is not None and outbound.is_joined())):
                if outbound is not None or not local.up:
                    yield FailureFinding.cut(local.rank, peer)
            elif is_late and self._waited_s >= _SILENT_S:
                yield FailureFinding.of(SILENT, peer, "it does not answer")

    # --- what is said and heard

    def greet(self, connection: Established) -> None:
        """A connection is up: the peer is told what there is to tell."""
        if self.agreement.findings:
            self._tell(connection, self._encode())

    def take_word(self, connection: Established, word: int) -> None:
        """Eight bytes of a peer's state. Raises Broken for one that cannot be."""
        coming = self._coming.setdefault(connection, bytearray())
        coming += word.to_bytes(_WORD_BYTES, "big")
        n_bytes = int.from_bytes(coming[:_WORD_BYTES], "big")
        if n_bytes > _NEWS_BYTES_MAX:
            raise Broken(f"news of {n_bytes} B", is_damage=True)
        if len(coming) >= _WORD_BYTES + n_bytes:
            del self._coming[connection]
            state = self._decode(bytes(coming[_WORD_BYTES : _WORD_BYTES + n_bytes]))
            self._note(self.agreement.hear(connection.peer, state))

    def _decode(self, data: bytes) -> AgreementState:
        n_ranks = len(self._local.book)
        try:
            news = msgspec.msgpack.decode(data, type=_News)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Broken(f"news: {error}", is_damage=True) from error
        findings = frozenset(FailureFinding(*each) for each in news.findings)
        is_sound = all(
            ERROR <= each.kind <= LEFT
            and 0 <= each.rank < n_ranks
            and (each.rank < each.other < n_ranks if each.kind == CUT else each.other == -1)
            for each in findings
        )
        if not (findings and is_sound and all(0 <= rank < n_ranks for rank in news.holders)):
            raise Broken("news: of ranks or kinds that are not there", is_damage=True)
        return AgreementState(findings, frozenset(news.holders), news.is_decided)

    def _encode(self) -> bytes:
        state = self.agreement.state
        findings = tuple(tuple(each) for each in sorted(state.findings))
        data = msgspec.msgpack.encode((state.is_decided, sorted(state.holders), findings))
        return len(data).to_bytes(_WORD_BYTES, "big") + data.ljust(-(-len(data) // _WORD_BYTES) * _WORD_BYTES, b"\0")

    def _tell(self, connection: Established, data: bytes) -> None:
        for at in range(0, len(data), _WORD_BYTES):
            connection.say(NEWS_FRAME, int.from_bytes(data[at : at + _WORD_BYTES], "big"))
        self._local.wake(connection)

    def _note(self, has_changed: bool) -> None:
        """The state of this rank may have changed: the others are told, and a decision ends every wait."""
        if not has_changed:
            return
        self._quiet_s = 0.0
        data = self._encode()
        for connection in list(self._local.up):
            self._tell(connection, data)
        self._local.look_within(0.0)
        if self.agreement.is_decided:
            self._local.fail(self.failure())

    def _dial(self) -> None:
        """Connects to ranks that may not have heard: so that what one knows reaches all, whoever is lost."""
        self._has_dialled = True
        rank, n_ranks = self._local.rank, len(self._local.book)
        distances: set[int] = set(range(1, n_ranks))
        if n_ranks > _NEIGHBOURS_ONLY:
            distances = {way << i for i in range((n_ranks - 1).bit_length()) for way in (1, -1)}
        for peer in sorted({(rank + distance) % n_ranks for distance in distances} - self._local.left.keys()):
            if not self._local.up_to(peer):
                self._parties.outbound(peer).dial_anew()

    # --- what is decided

    def is_known(self) -> bool:
        """True if everybody that is left has said that it knows the decision, or has left."""
        return not self._missing()

    def conclude(self, own: RuntimeFault) -> RuntimeFault:
        """What this rank raises that has an error of its `own`: that, with the rank that has kept it waiting, unless
        its deadline has passed because of what all others raise."""
        if not self.agreement.is_decided:
            return own
        agreed = self.failure()
        kind = judge(self.agreement.findings).kind
        if not isinstance(own, DeadlineExceeded):
            return own
        if kind == LATE:
            return DeadlineExceeded(str(own), culprits=agreed.culprits)
        if kind == SILENT:
            silent = str(agreed).removeprefix(f"rank {self._local.rank}: ")
            return DeadlineExceeded(f"{own}; {silent}", culprits=agreed.culprits)
        return agreed

    def failure(self) -> RuntimeFault:
        """The decision as this rank raises it: the same error, ranks and cause at all."""
        local = self._local
        verdict = judge(self.agreement.findings)
        me, culprits = f"rank {local.rank}: ", verdict.culprits
        if verdict.kind != CUT:
            lost = "; ".join(f"rank {rank} is lost: {cause}" for rank, cause in verdict.causes)
            return RankLost(me + lost, culprits=culprits)
        if culprits:
            nics = [(rank, nic[0]) for rank in culprits for nic in local.book[rank]]
            what = "; ".join(
                f"no rail to rank {rank} ({', '.join(name for owner, name in nics if owner == rank)})"
                for rank in culprits
            )
            return AllRailsFailed(f"{me}{what}", culprits=culprits, nics=nics)
        joined = [(src, dst, local.pairs(src, dst)) for src, dst in verdict.pairs]
        what = "; ".join(
            f"no rail between rank {src} and rank {dst} ({', '.join(local.entry(src, nic)[0] for nic, _ in rails)})"
            for src, dst, rails in joined
        )
        ends = {(rank, pair[i]) for src, dst, rails in joined for pair in rails for i, rank in enumerate((src, dst))}
        return AllRailsFailed(f"{me}{what}", nics=[(rank, local.entry(rank, nic)[0]) for rank, nic in sorted(ends)])


def find_failures(
    local: LocalRank,
    outbounds: Mapping[int, Outbound],
    inbounds: Mapping[int, Inbound],
    agreement: FailureAgreement,
) -> Iterator[FailureFinding]:
    """The failures that make further waiting useless."""
    for peer, has_failed in local.left.items():
        if has_failed:
            # Whoever leaves after a failure says before what it was.
            if not agreement.findings:
                yield FailureFinding.of(ERROR, peer, "it has left after a failure")
            continue
        to, from_ = outbounds.get(peer), inbounds.get(peer)
        # A rank that leaves repeats its last states: what it has taken is acknowledged.
        misses = to is not None and to.has_work() and not to.is_joined()
        if misses or (from_ is not None and from_.has_work() and not from_.is_joined()):
            yield FailureFinding.of(GONE, peer, "it has left before it had taken and sent all")
        elif any(each.kind == CUT and peer in (each.rank, each.other) for each in agreement.findings):
            # Whoever holds it to be cut off has not heard its bye.
            yield FailureFinding.of(LEFT, peer, "")
    for peer, to in outbounds.items():
        if to.dark_s and peer not in local.left and not to.is_joined():
            yield from _find_unreachable(local, peer, to, inbounds.get(peer))


def _find_unreachable(local: LocalRank, peer: int, to: Outbound, from_: Inbound | None) -> Iterator[FailureFinding]:
    """What follows from no rail of a peer being joined."""
    if not (to.has_work() or (from_ is not None and from_.has_work())):
        # If it refuses, it may have left in good order, and its bye was lost.
        return
    is_heard = from_ is not None and from_.is_joined()
    refusals = [rail.refused for rail in to.direct]
    # If all refuse, it is gone. One alone may be a NIC's trouble. The bye may still come over connections of its own,
    # which break if it said none.
    is_refused = all(refusals) or (any(refusals) and to.dark_s >= _REFUSED_S)
    if is_refused and not is_heard:
        yield FailureFinding.of(GONE, peer, _ENDED)
    elif to.dark_s >= local.settings.cut_off_s and (to.has_work() or not is_heard):
        # What only the peer has to send still comes, over its own connections.
        yield FailureFinding.cut(local.rank, peer)
