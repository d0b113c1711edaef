"""All ranks that are left name the same failure: every order of events, for 3 and 4 ranks, and the verdict itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

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
    Judgement,
    judge,
)

Link = tuple[int, int]


def gone(rank: int) -> FailureFinding:
    return FailureFinding.of(GONE, rank, "it refuses connections")


def error(rank: int) -> FailureFinding:
    return FailureFinding.of(ERROR, rank, f"ValueError: {rank}")


def late(rank: int) -> FailureFinding:
    return FailureFinding.of(LATE, rank, "not done after 2 s")


def left(rank: int) -> FailureFinding:
    return FailureFinding.of(LEFT, rank, "")


# --- every order of events


class World(NamedTuple):
    """What may happen from here: each rank's agreement, what is on its way, and the faults that are still to come.

    A link of which one end has died, or that is cut, carries what is on its way, as far as that is not lost, and then
    its end is seen.
    """

    ranks: tuple[tuple[frozenset[FailureFinding], frozenset[int], frozenset[int], bool], ...]
    wires: tuple[tuple[Link, tuple[AgreementState, ...]], ...]
    dead: frozenset[int]
    faults: tuple[tuple[str, int], ...]
    seen: frozenset[Link]


class Exploration:
    """Every order of events on `n` ranks joined by `links`; `faults` happen at any time, each once.

    `("dies", r)`: who is connected to it sees that, after what had come from it, of which the last part may be lost.
    `("raises", r)`, `("is late", r)`: its own. A rank gives up on those that do not answer only once nothing is on its
    way: messages are faster than its patience.
    """

    def __init__(self, n: int, links: Sequence[Link], faults: Sequence[tuple[str, int]], *, asleep: int = -1) -> None:
        self.n, self.faults, self.asleep = n, tuple(faults), asleep
        self.links = sorted({*links, *((b, a) for a, b in links)})
        self.n_worlds = 0
        self.verdicts: set[Judgement] = set()

    def run(self) -> None:
        me = [(frozenset[FailureFinding](), frozenset((rank,)), frozenset((rank,)), False) for rank in range(self.n)]
        start = World(tuple(me), tuple((link, ()) for link in self.links), frozenset(), self.faults, frozenset())
        reached, todo = {start}, [start]
        while todo:
            world = todo.pop()
            self.check(world)
            following = list(self.next(world))
            if not following:
                following = list(self.lose_patience(world))
            if not following:
                self.check_end(world)
            new = {each for each in following if each not in reached}
            reached |= new
            todo += new
        self.n_worlds = len(reached)

    # --- what may happen

    def next(self, world: World) -> Iterator[World]:
        idle = self.without_idle_messages(world)
        if idle is not None:
            yield idle
            return
        wires = dict(world.wires)
        for number, (kind, rank) in enumerate(world.faults):
            left = world.faults[:number] + world.faults[number + 1 :]
            if rank in world.dead:
                yield world._replace(faults=left)
            elif kind == "dies":
                # Of what it has sent last, some or all is lost; on each link alike, to keep the number down.
                for kept in {0, 1, max(map(len, wires.values()))}:
                    cut = tuple((link, sent[:kept] if link[0] == rank else sent) for link, sent in world.wires)
                    yield world._replace(wires=cut, dead=world.dead | {rank}, faults=left)
            else:
                found = [error(rank) if kind == "raises" else late(rank)]
                yield self.after(world._replace(faults=left), rank, lambda each, found=found: each.find(found))
        for link, sent in world.wires:
            src, dst = link
            if dst in world.dead or dst == self.asleep:
                continue
            if sent:
                rest = tuple((each, messages[1:] if each == link else messages) for each, messages in world.wires)
                yield self.after(
                    world._replace(wires=rest), dst, lambda each, src=src, sent=sent: each.hear(src, sent[0])
                )
            elif src in world.dead and link not in world.seen:
                known = world._replace(seen=world.seen | {link})
                yield self.after(known, dst, lambda each, src=src: each.find([gone(src)]))

    def without_idle_messages(self, world: World) -> World | None:
        """The world without the messages that change nothing where they come, now or later, if there are any.

        So it is not explored when they come. Nothing that a rank hears after its decision changes what it has decided.
        """
        wires = dict(world.wires)
        for src, dst in wires:
            agreement = self.agreement(world, dst)
            while wires[src, dst] and dst != self.asleep:
                heard = agreement.heard
                is_idle = agreement.is_decided or dst in world.dead
                if not (is_idle or (not agreement.hear(src, wires[src, dst][0]) and agreement.heard == heard)):
                    break
                wires[src, dst] = wires[src, dst][1:]
        after = tuple(wires.items())
        return world._replace(wires=after) if after != world.wires else None

    def lose_patience(self, world: World) -> Iterator[World]:
        """Nothing is on its way: who still waits asks who has not answered, and then decides."""
        for rank in range(self.n):
            agreement = self.agreement(world, rank)
            if rank in world.dead or rank == self.asleep or agreement.is_decided or not agreement.findings:
                continue
            silent = [
                FailureFinding.of(SILENT, peer, "it does not answer")
                for peer in agreement.missing() - agreement.heard
                if not agreement.has_evidence
            ]
            if silent:
                yield self.after(world, rank, lambda each, silent=silent: each.find(silent))
            else:
                yield self.after(world, rank, lambda each: each.decide() or True, decides=True)

    def after(self, world: World, rank: int, act: object, *, decides: bool = False) -> World:
        """The world after `rank` has found, heard or decided something, and has told the others."""
        agreement = self.agreement(world, rank)
        was_decided = agreement.is_decided
        has_changed = act(agreement) and not was_decided  # type: ignore[operator]
        if was_decided:
            return world
        if has_changed and agreement.findings and not agreement.is_decided and not agreement.missing():
            agreement.decide()
        ranks = list(world.ranks)
        ranks[rank] = (agreement.findings, agreement.holders, agreement.heard, agreement.is_decided)
        wires = world.wires
        if has_changed:
            wires = tuple(
                (link, (*sent, agreement.state) if link[0] == rank and link[1] not in world.dead else sent)
                for link, sent in wires
            )
        return world._replace(ranks=tuple(ranks), wires=wires)

    def agreement(self, world: World, rank: int) -> FailureAgreement:
        agreement = FailureAgreement(rank, self.n)
        agreement.findings, agreement.holders, agreement.heard, agreement.is_decided = world.ranks[rank]
        return agreement

    # --- what must hold

    def check(self, world: World) -> None:
        decided = [
            (rank, world.ranks[rank][0]) for rank in range(self.n) if world.ranks[rank][3] and rank not in world.dead
        ]
        raising = {rank for kind, rank in self.faults if kind == "raises"}
        verdicts = {judge(findings) for rank, findings in decided if rank not in raising}
        assert len(verdicts) <= 1, f"{decided}"

    def check_end(self, world: World) -> None:
        """Everybody that is left has decided, and names one at which something has happened."""
        happened = set(self.faults) - set(world.faults)
        assert not world.faults
        for rank in set(range(self.n)) - world.dead - {self.asleep}:
            findings, _, _, is_decided = world.ranks[rank]
            assert is_decided, f"rank {rank} waits: {world}"
            verdict = judge(findings)
            self.verdicts.add(verdict)
            for culprit in verdict.culprits:
                assert culprit == self.asleep or any(culprit == at for _, at in happened), f"{verdict}: {happened}"
            if all(kind in ("dies", "raises") for kind, _ in self.faults):
                assert verdict.kind in (ERROR, GONE) and verdict.culprits, f"rank {rank}: {verdict}"


def complete(n: int) -> list[Link]:
    return [(a, b) for a in range(n) for b in range(a)]


RING_4 = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize(
    ("n", "links", "faults"),
    [
        (3, complete(3), [("dies", 2)]),
        (3, complete(3), [("dies", 0), ("dies", 2)]),
        (3, complete(3), [("dies", 1), ("raises", 2)]),
        (3, complete(3), [("dies", 1), ("is late", 0)]),
        (3, complete(3), [("is late", 0), ("is late", 2)]),
        (4, RING_4, [("dies", 1)]),
        (4, RING_4, [("raises", 1)]),
        (4, RING_4, [("is late", 0)]),
        (4, RING_4, [("dies", 1), ("dies", 2)]),
        (4, RING_4, [("dies", 1), ("raises", 2)]),
        (4, complete(4), [("dies", 1)]),
        (4, RING_4, [("dies", 1), ("is late", 3)]),
    ],
)
def test_all_that_are_left_name_the_same_in_every_order_of_events(
    n: int, links: list[Link], faults: list[tuple[str, int]]
) -> None:
    exploration = Exploration(n, links, faults)
    exploration.run()
    print(exploration.n_worlds, exploration.verdicts)
    assert exploration.n_worlds > 20 and exploration.verdicts


@pytest.mark.parametrize(
    ("n", "links", "faults", "verdict"),
    [
        (3, complete(3), [("is late", 0)], Judgement(SILENT, ((1, "it does not answer"),))),
        (3, complete(3), [("is late", 0), ("is late", 2)], Judgement(SILENT, ((1, "it does not answer"),))),
        (4, RING_4, [("is late", 3)], Judgement(SILENT, ((1, "it does not answer"),))),
        (4, RING_4, [("dies", 3)], Judgement(GONE, ((3, "it refuses connections"),))),
        (4, RING_4, [("raises", 2)], Judgement(ERROR, ((2, "ValueError: 2"),))),
    ],
)
def test_a_rank_that_does_not_answer_is_named_only_if_nobody_is_known_to_be_at_fault(
    n: int, links: list[Link], faults: list[tuple[str, int]], verdict: Judgement
) -> None:
    exploration = Exploration(n, links, faults, asleep=1)
    exploration.run()
    assert exploration.verdicts == {verdict}


def decides_at_once(self: FailureAgreement, left: object = ()) -> set[int]:
    return set()


def hears_no_decision(self: FailureAgreement, sender: int, state: AgreementState) -> bool:
    return _HEAR(self, sender, state._replace(is_decided=False))


_HEAR = FailureAgreement.hear


@pytest.mark.parametrize(
    ("method", "mutant", "n", "faults"),
    [
        ("missing", decides_at_once, 3, [("is late", 0), ("is late", 2)]),
        ("missing", decides_at_once, 4, [("dies", 0), ("raises", 2)]),
        ("hear", hears_no_decision, 3, [("is late", 0), ("is late", 2)]),
    ],
)
def test_the_exploration_refutes_wrong_rules(
    method: str, mutant: object, n: int, faults: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailureAgreement, method, mutant)
    with pytest.raises(AssertionError):
        Exploration(n, complete(n) if n == 3 else RING_4, faults).run()


# --- the verdict


@pytest.mark.parametrize(
    ("findings", "culprits"),
    [
        ([gone(2)], (2,)),
        ([gone(2), gone(0), late(1)], (0, 2)),
        ([gone(2), error(1)], (1,)),
        ([FailureFinding.of(SILENT, 3, "it does not answer"), late(0), late(1)], (3,)),
        ([late(0), late(2)], (0, 2)),
        # All NICs of rank 1, seen by everybody, by two of them, and by itself.
        ([FailureFinding.cut(0, 1), FailureFinding.cut(1, 2), FailureFinding.cut(1, 3)], (1,)),
        ([FailureFinding.cut(0, 1), FailureFinding.cut(3, 1)], (1,)),
        # Ranks 1 and 2 of five are cut off together.
        ([FailureFinding.cut(a, b) for a in (1, 2) for b in (0, 3, 4)], (1, 2)),
        # Rank 2 is cut off; that ranks 1 and 3 have left was lost on the way to rank 4 and to rank 0.
        ([FailureFinding.cut(*pair) for pair in ((0, 2), (0, 3), (1, 4), (2, 4))] + [left(1), left(3)], (2,)),
        ([FailureFinding.cut(0, 1), FailureFinding.cut(1, 2), left(1)], (1,)),
    ],
)
def test_the_verdict_names_all_ranks_of_the_kind_that_comes_first(
    findings: list[FailureFinding], culprits: tuple[int, ...]
) -> None:
    assert judge(findings).culprits == judge(findings[::-1]).culprits == culprits


@pytest.mark.parametrize("pairs", [[(0, 1)], [(0, 2), (0, 3), (1, 2), (1, 3)]])
def test_where_either_side_may_be_cut_off_the_pairs_are_named(pairs: list[tuple[int, int]]) -> None:
    assert judge([FailureFinding.cut(*pair) for pair in pairs]) == Judgement(CUT, (), tuple(pairs))
