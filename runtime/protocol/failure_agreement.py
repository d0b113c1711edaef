"""All ranks that are left name the same failure: which rank or rail, and the first cause. No I/O, no clock.

One rank of a ring finds that its neighbour is gone; the others wait for neighbours that are well. So whoever finds
something, or hears of it for the first time, tells everybody it reaches. The parties are the ranks of the job. There is
one message, the state of a rank:

    findings    all it knows: a set that only grows, by what it finds and by what it hears
    holders     the ranks that are known to hold exactly these findings
    is_decided  whether it has decided

A rank sends its state over all connections whenever it changes, and over each new one. It decides once all ranks that
must hold its findings do (`quorum`), or once the driver says that it has waited long enough for those that do not
answer. It adopts the findings of a rank that has decided, and from then on never changes them.

Why two ranks do not decide differently, as long as no rank of a quorum is given up without a finding: to decide, a rank
needs the very same findings of every other one. Of two ranks that decide, the later one needs the earlier one's word,
which is a decision, and adopts it. What a rank says that this one holds to be gone is ignored when it comes directly,
so a decision of one that has died counts only where it came before. `tests/unit/runtime/protocol` explores every order
of events for 3 and 4 ranks.

The verdict is a function of the findings alone (`judge`): of the kind that comes first, all ranks that are named.

    ERROR   a rank has raised an exception, or given its run up
    GONE    the process of a rank has ended without a word
    CUT     no rail joins two ranks; named are the fewest ranks whose loss of all rails explains all such pairs
    SILENT  a rank is connected and has not answered
    LATE    a rank's deadline has passed, and nobody is known to be at fault
    LEFT    no failure: a rank has left in good order, unheard by one that holds it to be cut off; such pairs are not
            judged
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

ERROR, GONE, CUT, SILENT, LATE, LEFT = range(6)
_CAUSE_CHARACTERS = 300
_CUT_OFF_MAX = 6
"""If more ranks are cut off at once, the pairs are named."""


class FailureFinding(NamedTuple):
    """One failure. Of the kind `CUT`, between `rank` and the higher rank `other`."""

    kind: int
    rank: int
    other: int = -1
    cause: str = ""

    @classmethod
    def of(cls, kind: int, rank: int, cause: str) -> FailureFinding:
        """A finding about a rank, its cause on one line of limited length.

        >>> FailureFinding.of(ERROR, 1, "ValueError: 3\\nis odd").cause
        'ValueError: 3 is odd'
        """
        return cls(kind, rank, -1, " ".join(cause.split())[:_CAUSE_CHARACTERS])

    @classmethod
    def cut(cls, rank: int, other: int) -> FailureFinding:
        """No rail joins two ranks: the same finding at both."""
        return cls(CUT, min(rank, other), max(rank, other))


Findings = frozenset[FailureFinding]


class AgreementState(NamedTuple):
    """What a rank tells the others; see the head of this file."""

    findings: Findings
    holders: frozenset[int]
    is_decided: bool


class Judgement(NamedTuple):
    """What is to be said of findings: their `kind`, the ranks at fault with the cause of each, and the pairs that no
    rail joins if it cannot be said which rank of them has lost its rails."""

    kind: int
    causes: tuple[tuple[int, str], ...]
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks at fault, each once."""
        return tuple(dict.fromkeys(rank for rank, _ in self.causes))


def judge(findings: Collection[FailureFinding]) -> Judgement:
    """The verdict on findings: the same at every rank that has them.

    >>> judge([FailureFinding.of(GONE, 2, "it refuses connections"), FailureFinding.of(LATE, 0, "not done after 2 s")])
    Judgement(kind=1, causes=((2, 'it refuses connections'),), pairs=())
    >>> judge([FailureFinding.cut(0, 1), FailureFinding.cut(1, 2)]).culprits
    (1,)
    >>> judge([FailureFinding.cut(0, 1)])
    Judgement(kind=2, causes=(), pairs=((0, 1),))

    Rank 0 is not cut off from a rank that has left:

    >>> judge([FailureFinding.cut(0, 1), FailureFinding.cut(0, 2), FailureFinding.of(LEFT, 1, "")]).pairs
    ((0, 2),)
    """
    left = {finding.rank for finding in findings if finding.kind == LEFT}
    failures = [finding for finding in findings if finding.kind != LEFT]
    judged = [each for each in failures if each.kind != CUT or left.isdisjoint((each.rank, each.other))] or failures
    kind = min(finding.kind for finding in judged)
    named = sorted(finding for finding in judged if finding.kind == kind)
    if kind != CUT:
        return Judgement(kind, tuple((finding.rank, finding.cause) for finding in named))
    pairs = tuple((finding.rank, finding.other) for finding in named)
    for size in range(1, _CUT_OFF_MAX + 1):
        explanations = set(_explanations(pairs, size))
        if len(explanations) == 1:
            return Judgement(kind, tuple((rank, "") for rank in sorted(explanations.pop())))
        if explanations:
            break
    return Judgement(kind, (), pairs)


def _explanations(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[frozenset[int]]:
    """The sets of at most so many ranks of which each pair has one: those that may have lost all rails."""
    if not pairs:
        yield frozenset()
    elif size:
        for rank in pairs[0]:
            for others in _explanations([pair for pair in pairs if rank not in pair], size - 1):
                yield others | {rank}


def _sides(findings: Collection[FailureFinding], ranks: Iterable[int]) -> list[set[int]]:
    """The parts into which the ranks fall whose pairs are cut."""
    left, sides = set(ranks), list[set[int]]()
    cut = {pair for each in findings if each.kind == CUT for pair in ((each.rank, each.other), (each.other, each.rank))}
    while left:
        side: set[int] = set()
        reached = [min(left)]
        while reached:
            rank = reached.pop()
            side.add(rank)
            left.discard(rank)
            new = [other for other in left if (rank, other) not in cut]
            left.difference_update(new)
            reached += new
        sides.append(side)
    return sides


class FailureAgreement:
    """One rank's part of the agreement; `heard` are the ranks that have taken part in it."""

    __slots__ = ("_n_ranks", "_rank", "findings", "heard", "holders", "is_decided")

    def __init__(self, rank: int, n_ranks: int) -> None:
        self._rank, self._n_ranks = rank, n_ranks
        self.findings: Findings = frozenset()
        self.holders = self.heard = frozenset((rank,))
        self.is_decided = False

    @property
    def state(self) -> AgreementState:
        """What to tell the others."""
        return AgreementState(self.findings, self.holders, self.is_decided)

    def find(self, found: Iterable[FailureFinding]) -> bool:
        """This rank has found something; True if its state has changed."""
        return not self.is_decided and self._add(frozenset(found))

    def hear(self, sender: int, state: AgreementState) -> bool:
        """The state of a rank has come over a connection of it; True if the state of this rank has changed."""
        if self.is_excluded(sender):
            return False
        self.heard |= state.holders
        before = self.state
        if state.is_decided and not self.is_decided:
            self.findings, self.holders, self.is_decided = state.findings, state.holders | {self._rank}, True
        elif not self.is_decided:
            self._add(state.findings)
        if state.findings == self.findings and state.is_decided == self.is_decided:
            self.holders |= state.holders
        return self.state != before

    def _add(self, found: Findings) -> bool:
        if found <= self.findings:
            return False
        self.findings |= found
        self.holders = frozenset((self._rank,))
        return True

    def is_excluded(self, rank: int) -> bool:
        """True if what this rank says directly does not count: it is held to be gone."""
        return any(
            (finding.kind in (GONE, SILENT) and finding.rank == rank) or finding == FailureFinding.cut(self._rank, rank)
            for finding in self.findings
        )

    @property
    def has_evidence(self) -> bool:
        """True if a rank is known to be at fault, so that nobody else has to be looked for."""
        return any(finding.kind in (ERROR, GONE) for finding in self.findings)

    def quorum(self, left: Collection[int] = ()) -> set[int]:
        """The ranks that must hold the findings before this one decides.

        Not those that have `left`, here or as another rank has found, that are held to be gone, or that have an error
        of their own to raise; and only those on this rank's side of what is cut apart.
        """
        named = {finding.rank for finding in self.findings if finding.kind in (ERROR, GONE, SILENT, LEFT)}
        others = set(range(self._n_ranks)) - named - set(left) | {self._rank}
        side = next(each for each in _sides(self.findings, others) if self._rank in each)
        return side - named

    def missing(self, left: Collection[int] = ()) -> set[int]:
        """The ranks of the quorum that are not known to hold the findings; once decided: the decision."""
        return self.quorum(left) - self.holders

    def decide(self) -> None:
        """This rank decides what it has found and heard."""
        self.is_decided, self.holders = True, frozenset((self._rank,))
