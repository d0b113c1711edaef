"""StragglAR (arXiv 2505.23523): a reduce-scatter without the late rank, and exchanges once it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from optcc.dsl import Program, any_flat, pure, schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.topology import Topology


def one_straggler(topology: Topology) -> Mapping[str, Any]:
    """The slowest endpoint, by the slower of its two ways, when all others are equal; the last one when all are.

    >>> one_straggler(Topology.parse("4@50GB/s,1=50GB/s:25GB/s"))
    {'straggler': 1}

    Raises TopologyError if servers have several GPUs, or the others differ from each other.
    """
    any_flat(topology)
    rates = [min(out, in_) for out, in_ in zip(topology.out, topology.in_, strict=True)]
    slow = min(rates)
    straggler = len(rates) - 1 if rates.count(slow) > 1 else rates.index(slow)
    others = rates[:straggler] + rates[straggler + 1 :]
    if len(set(others)) > 1:
        raise TopologyError(f"{topology!r}: endpoints other than {straggler} differ from each other")
    return {"straggler": straggler}


class ExchangeRound(NamedTuple):
    """Concurrent transfers: every rank sends at most one section and receives at most one.

    Rank `owner` and the late rank exchange section `owner` (None: no exchange); each (section, src, dst) of `copies`
    forwards a finished section. Ranks 0 to p - 2 are on time, p - 1 is the late one.
    """

    owner: int | None
    copies: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ExchangeRounds:
    """Rounds over p ranks in which every section from 0 to p - 2 is exchanged once, by the rank of its number and the
    last rank, and later reaches every rank by copies from ranks that had it before the round.

    Raises ScheduleError for other rounds.
    """

    n_ranks: int
    rounds: tuple[ExchangeRound, ...]

    def __post_init__(self) -> None:
        having: dict[int, set[int]] = {}
        for number, (owner, copies) in enumerate(self.rounds):
            before = {section: set(ranks) for section, ranks in having.items()}
            for section, src, dst in copies:
                if src not in before.get(section, ()) or dst not in range(self.n_ranks) or src == dst:
                    raise ScheduleError(f"round {number}: section {section} from {src} to {dst}: must be there before")
                having[section].add(dst)
            if owner is not None:
                if owner in having or owner not in range(self.n_ranks - 1):
                    raise ScheduleError(f"round {number}: section {owner}: must be exchanged once")
                having[owner] = {owner, self.n_ranks - 1}
        missing = [section for section in range(self.n_ranks - 1) if len(having.get(section, ())) < self.n_ranks]
        if missing:
            raise ScheduleError(f"sections {missing[:3]}: must reach every rank")

    def __iter__(self) -> Iterator[ExchangeRound]:
        return iter(self.rounds)


@pure
def stragglar_rounds(p: int) -> tuple[ExchangeRound, ...]:
    """The rounds after the late rank arrives: p - 2 + ceil(log2 p) of them, the fewest there can be, or one more.

    Counted for every p from 2 to 130: one more if p is 6, 12 or 96, the fewest for all others.

    The late rank receives at most one of the p - 1 sections in a round, and the section that it exchanges last is then
    at two ranks, which at most double in each further round: p - 1 + ceil(log2 p) - 1.

    In every round the newest section in flight is assigned first, so that it doubles. Its senders are the holders with
    the fewest sections in flight, its receivers the ranks whose own newest section is the oldest, which have nothing
    newer to send. The next owner is chosen by the same rule, since it sends nothing else in its round.

    >>> [len(stragglar_rounds(p)) for p in (2, 4, 8, 16, 32)]
    [1, 4, 9, 18, 35]
    >>> stragglar_rounds(4)[1]
    ExchangeRound(owner=1, copies=((0, 0, 2),))

    Raises ScheduleError unless p is at least one.
    """
    if p < 1:
        raise ScheduleError(f"rounds of {p} ranks: must be at least one rank")
    late = p - 1
    rounds: list[ExchangeRound] = []
    holders: dict[int, set[int]] = {}  # by section, in the order of the exchanges, until all have it
    waiting = list(range(p - 1))
    while waiting or holders:
        place = {section: age for age, section in enumerate(holders)}
        held = [[place[section] for section, having in holders.items() if rank in having] for rank in range(p)]
        newest = [max(places, default=-1) for places in held]
        owner = min(waiting, key=lambda rank: newest[rank]) if waiting else None
        senders = {rank for rank in range(p) if owner is None or rank not in (owner, late)}
        receivers = set(range(p - 1)) - {owner}
        copies: list[tuple[int, int, int]] = []
        for section in reversed(holders):
            having = holders[section]
            sources = sorted(senders & having, key=lambda rank: (len(held[rank]), rank))
            targets = sorted(receivers - having, key=lambda rank: (newest[rank], rank))
            pairs = list(zip(sources, targets, strict=False))
            copies += [(section, src, dst) for src, dst in pairs]
            senders -= {src for src, _ in pairs}
            receivers -= {dst for _, dst in pairs}
        for section, _, dst in copies:
            holders[section].add(dst)
        if owner is not None:
            waiting.remove(owner)
            holders[owner] = {owner, late}
        holders = {section: having for section, having in holders.items() if len(having) < p}
        rounds.append(ExchangeRound(owner, tuple(copies)))
    return tuple(rounds)


@schedule(
    accepts="endpoints of one rate, one of them slower or none; the slowest is taken to be late",
    paper="StragglAR, arXiv 2505.23523",
    configure=one_straggler,
)
def stragglar(program: Program, straggler: int) -> None:
    """Reduce-scatter among the p - 1 ranks on time; then each owner exchanges with the late rank, and sections spread.

    For a rank that is late, not slow. Once it arrives it takes p + log2 p - 2 rounds of n/(p - 1) bytes if p is a power
    of two: (p + log2 p - 2)/(p - 1) * n/B + (p + log2 p - 2) alpha, where a ring that waited for it takes
    2(p - 1)/p * n/B. For other p see `stragglar_rounds`. The reduce-scatter takes (p - 2)/(p - 1) * n/B before that,
    which costs nothing if the delay is at least as long.

    In an exchange the owner sends its partial sum and the late rank its input, at the same time, and both add the two.
    Both therefore receive into scratch space, which takes as much memory as the message. The paper's are the exchange
    and the number of rounds for powers of two; ours are which rank sends what in a round, and every other p.

    >>> built = stragglar(n_ranks=4, straggler=3)
    >>> built.stages
    ('1 reduce-scatter', '2 exchange', '3 spread')
    >>> [str(each) for each in built if each.stage == "2 exchange" and each.src != each.dst][:2]
    ['0->3 s0 c0 copy [2 exchange]', '3->0 s0 c0 copy [2 exchange]']

    Raises ScheduleError if the straggler is no rank.
    """
    p = program.n_ranks
    ranks = program.in_order(_late_last(p, straggler))
    rounds = ExchangeRounds(p, stragglar_rounds(p))
    q = p - 1
    for segment in program.pipeline(sections=max(q, 1), scratch=1):
        with program.stage("1 reduce-scatter"):
            for step in range(q - 1):
                for i in range(q):
                    segment[(i - step - 1) % q].reduce(src=ranks[i], dst=ranks[(i + 1) % q])
        for owner, copies in rounds:
            if owner is not None:
                own, other = segment[owner], segment.scratch(owner)
                with program.stage("2 exchange"):
                    own.copy(src=ranks[owner], dst=ranks[q], into=other)
                    own.copy(src=ranks[q], dst=ranks[owner], into=other)
                    for rank in (ranks[owner], ranks[q]):
                        other.reduce(src=rank, dst=rank, into=own)
            with program.stage("3 spread"):
                for section, src, dst in copies:
                    segment[section].copy(src=ranks[src], dst=ranks[dst])


@pure
def _late_last(p: int, straggler: int) -> list[int]:
    """Every rank, the straggler last."""
    if not 0 <= straggler < p:
        raise ScheduleError(f"straggler {straggler}: must be a rank from 0 to {p - 1}")
    return [*(rank for rank in range(p) if rank != straggler), straggler]
