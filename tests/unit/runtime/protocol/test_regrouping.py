"""Every order of the steps by which ranks go on without others: no collective is delivered with two sets of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import NamedTuple

import pytest

from optcc.errors import AllRailsFailed, MismatchError
from optcc.runtime.protocol.regrouping import (
    REQUEST_BYTES,
    GroupProgress,
    Merging,
    Offer,
    Standing,
    SurvivorGroup,
    find_merging,
)

JOB = b"the job of a test"[:16]


class Rank(NamedTuple):
    """A rank of the model: its progress, whether it has joined its group, and whether its input is on its way."""

    group: SurvivorGroup
    next: int = 0
    held: SurvivorGroup | None = None
    has_joined: bool = True
    has_given: bool = False

    @property
    def progress(self) -> GroupProgress:
        made = GroupProgress(self.group)
        made.next, made.held = self.next, self.held
        return made

    def after(self, progress: GroupProgress, *, has_joined: bool = True, has_given: bool | None = None) -> Rank:
        given = self.has_given if has_given is None else has_given
        return Rank(progress.group, progress.next, progress.held, has_joined, given)


Given = tuple[bytes, int, int]
"""Of a group, a collective and a rank: that its input is on its way, or that it holds the result."""


class World(NamedTuple):
    """What all ranks have done, and said, which stays true; any of it may be heard late or never."""

    ranks: tuple[Rank, ...]
    given: frozenset[Given] = frozenset()
    held: frozenset[Given] = frozenset()
    said: frozenset[tuple[bytes, int, Standing]] = frozenset()
    delivered: frozenset[tuple[int, tuple[int, ...]]] = frozenset()

    def with_rank(self, number: int, rank: Rank, **changes: object) -> World:
        ranks = (*self.ranks[:number], rank, *self.ranks[number + 1 :])
        return self._replace(ranks=ranks, **changes)  # type: ignore[arg-type]


@cache
def group_without(group: SurvivorGroup, lost: tuple[int, ...], n_hosts: int) -> SurvivorGroup | None:
    return group.without(lost, range(n_hosts))


def steps(world: World, n_collectives: int) -> Iterator[World]:
    """All that may happen next. Whether a rank moves has nothing to do with what has failed: it may be wrong."""
    for number, rank in enumerate(world.ranks):
        group, now = rank.group, (rank.group.job, rank.next)
        for size in range(1, len(group.members)):
            for lost in combinations(group.members, size):
                other = group_without(group, lost, len(world.ranks))
                if other is not None and number not in lost:
                    progress = rank.progress
                    progress.group = other
                    moved = rank.after(progress, has_joined=False, has_given=False)
                    yield world.with_rank(number, moved, said=world.said | {(other.job, number, progress.standing)})
        if not rank.has_joined:
            told = [each for job, _, each in world.said if job == group.job]
            if len(told) == len(group.members):
                progress = rank.progress
                if progress.settle(told):
                    result = rank.next, progress.deliver().members
                    yield world.with_rank(number, rank.after(progress), delivered=world.delivered | {result})
                else:
                    yield world.with_rank(number, rank.after(progress))
        elif rank.next == n_collectives:
            continue
        elif not rank.has_given:
            yield world.with_rank(number, rank._replace(has_given=True), given=world.given | {(*now, number)})
        elif rank.held is None and all((*now, each) in world.given for each in group.members):
            progress = rank.progress
            progress.hold()
            yield world.with_rank(number, rank.after(progress), held=world.held | {(*now, number)})
        elif rank.held is not None and all((*now, each) in world.held for each in group.members):
            progress = rank.progress
            result = rank.next, progress.deliver().members
            yield world.with_rank(number, rank.after(progress, has_given=False), delivered=world.delivered | {result})


@pytest.mark.parametrize(
    ("n_ranks", "n_collectives"),
    [(3, 1), pytest.param(3, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_no_order_of_the_steps_delivers_a_collective_of_two_sets_of_ranks(n_ranks: int, n_collectives: int) -> None:
    whole = SurvivorGroup(JOB, tuple(range(n_ranks)))
    first = World((Rank(whole),) * n_ranks)
    seen, waiting, ends = {first}, [first], set[frozenset[tuple[int, tuple[int, ...]]]]()
    while waiting:
        world = waiting.pop()
        assert len({collective for collective, _ in world.delivered}) == len(world.delivered), world
        ends.add(world.delivered)
        for new in steps(world, n_collectives):
            if new not in seen:
                seen.add(new)
                waiting.append(new)
    # And each set that has more than half of the ranks delivers the last collective in some order.
    last = {members for each in ends for collective, members in each if collective == n_collectives - 1}
    assert last == {
        part for size in range(n_ranks // 2 + 1, n_ranks + 1) for part in combinations(range(n_ranks), size)
    }
    print(len(seen), "states")


@pytest.mark.parametrize(
    ("lost", "hosts", "left"),
    [
        ((3,), (0, 1, 2, 3), (0, 1, 2)),
        ((2, 3), (0, 1, 2, 3), None),
        ((2, 3), (0, 1, 2, 2), (0, 1)),
        ((1, 2, 3), (0, 0, 2, 2), None),
        ((), (0, 1, 2, 3), None),
        ((7,), (0, 1, 2, 3), None),
    ],
)
def test_more_than_half_of_the_hosts_must_be_left(
    lost: tuple[int, ...], hosts: tuple[int, ...], left: tuple[int, ...] | None
) -> None:
    group = SurvivorGroup(JOB, (0, 1, 2, 3)).without(lost, hosts)
    assert (None if group is None else group.members) == left


def test_groups_have_names_of_their_own() -> None:
    whole = SurvivorGroup(JOB, (0, 1, 2))
    left = whole.without((2,), (0, 1, 2))
    assert left is not None
    names = {whole.job, left.job, whole.lobby(3).job, left.successor((0, 1)), whole.successor((0, 1, 2))}
    assert len(names) == 5 and whole.without((2,), (0, 1, 2)) == left


def offer(number: int, is_merging: bool = False, request: bytes = b"sum", previous: bytes = b"max") -> Offer:
    packed = Offer(number, is_merging, request.ljust(REQUEST_BYTES, b"\0"), previous.ljust(REQUEST_BYTES, b"\0")).pack()
    return Offer.unpack(packed)


def test_each_rank_that_returns_gives_its_input_once_all_have_come_to_the_collective() -> None:
    others = offer(7, True), offer(7, True)
    assert find_merging([offer(6), *others, offer(6)]) == Merging(1, (), (0, 3))
    assert find_merging([offer(5, request=b"max"), *others, offer(6)]) == Merging(1, (0,), (3,))
    assert find_merging([offer(7, request=b"any"), *others, offer(6)]) == Merging(1, (), (3,))


@pytest.mark.parametrize(
    "returning",
    [offer(6, request=b"max"), offer(5, request=b"sum"), offer(4), offer(8), offer(6, True), offer(7, True, b"prod")],
)
def test_ranks_that_stand_elsewhere_are_named(returning: Offer) -> None:
    with pytest.raises(MismatchError, match="rank 1 differs from rank 0") as caught:
        find_merging([offer(7, True), returning, offer(7, True)])
    assert caught.value.culprits == (0, 1)


def test_where_nobody_has_gone_on_there_is_nothing_to_merge() -> None:
    with pytest.raises(AllRailsFailed, match="cut off from each other"):
        find_merging([offer(3), offer(3)])
