"""Agreement on epochs: every order of the steps of a few ranks, and random orders of more."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest

from optcc.runtime.protocol.agreement import AHEAD, EPOCHS_MAX, NICS_MAX, RANKS_MAX, Agreement, Shares

State = tuple[object, ...]


class World:
    """Ranks of one NIC in all, at rank 0, and which words each has yet to hear; any may come next. One that is ready
    begins one of `aheads` collectives before it knows that all are.

    `begun[rank][number]` is the epoch of each collective that a rank has begun.
    """

    def __init__(self, n_ranks: int, n_collectives: int, n_epochs: int, aheads: Sequence[int]) -> None:
        self.ranks = [Agreement(rank, [1] + [0] * (n_ranks - 1)) for rank in range(n_ranks)]
        self.n_collectives, self.n_epochs, self.aheads = n_collectives, n_epochs, aheads
        self.begun: list[list[int]] = [[] for _ in self.ranks]
        self.coming: list[frozenset[int]] = [frozenset()] * n_ranks
        self.heard: list[frozenset[int]] = [frozenset()] * n_ranks
        # What `state` has of each rank; None since its last step.
        self._known: list[object] = [None] * n_ranks

    def steps(self) -> Iterator[Callable[[World], None]]:
        """All that can happen next, as functions of a copy of this world."""
        for rank, each in enumerate(self.ranks):
            if len(self.begun[rank]) < self.n_collectives:
                yield lambda world, rank=rank: world.begin(rank)  # type: ignore[misc]
            elif rank not in each._left:
                yield lambda world, rank=rank: world.leave(rank)  # type: ignore[misc]
            if each.wanted is not None and rank not in each._left:
                for ahead in self.aheads:
                    yield lambda world, rank=rank, ahead=ahead: world.ready(rank, ahead)  # type: ignore[misc]
            for word in self.coming[rank]:
                yield lambda world, rank=rank, word=word: world.hear(rank, word)  # type: ignore[misc]
        if self.ranks[0].may_propose and self.ranks[0].epoch.number < self.n_epochs:
            yield World.propose

    def begin(self, rank: int) -> None:
        epoch = self._take(rank).begin()
        if epoch is not None:
            self.begun[rank] = [*self.begun[rank], epoch]

    def ready(self, rank: int, ahead: int) -> None:
        self._take(rank).ready(ahead)
        self.spread(rank)

    def leave(self, rank: int) -> None:
        self._take(rank).leave()
        self.spread(rank)

    def hear(self, rank: int, word: int) -> None:
        self.coming[rank] -= {word}
        self._take(rank).hear(word)
        self.spread(rank)

    def propose(self) -> None:
        number = self.ranks[0].epoch.number + 1
        self._take(0).propose((((1 / (1 + number), 1.0),), *((),) * (len(self.ranks) - 1)))
        self.spread(0)

    def spread(self, rank: int) -> None:
        """What a rank says goes to all others that have not heard it: a second time, it changes nothing.

        Of the words of a proposal, which count together, one stands for all.
        """
        for word in self.ranks[rank].to_say:
            self.heard[rank] |= {word}
            for other, words in enumerate(self.coming):
                if word not in self.heard[other]:
                    self.coming[other] = words | {word}
        self.ranks[rank].to_say.clear()

    def _take(self, rank: int) -> Agreement:
        """The rank of which this is a step, apart from that of other worlds."""
        self.ranks[rank], self._known[rank] = _copied(self.ranks[rank]), None
        return self.ranks[rank]

    def copy(self) -> World:
        """Another one; a rank is the same until its next step."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.ranks, new._known = list(self.ranks), list(self._known)
        new.begun, new.coming, new.heard = list(self.begun), list(self.coming), list(self.heard)
        return new

    def check(self) -> None:
        """No collective runs under two epochs, and an epoch means the same to all."""
        for number in range(self.n_collectives):
            epochs = {begun[number] for begun in self.begun if len(begun) > number}
            assert len(epochs) < 2, f"collective {number} runs under epochs {sorted(epochs)}"
        meanings = {each.epoch for each in self.ranks}
        assert len(meanings) == len({each.number for each in meanings}), meanings

    def is_over(self) -> bool:
        return all(len(begun) == self.n_collectives for begun in self.begun)

    def state(self) -> State:
        """What decides all that can follow, and what is checked."""
        for rank, each in enumerate(self.ranks):
            if self._known[rank] is None:
                self._known[rank] = each.next, tuple(each._epochs), frozenset(each.words())
        return tuple(self._known), tuple(map(tuple, self.begun)), tuple(self.heard)


def _copied(rank: Agreement) -> Agreement:
    new = object.__new__(type(rank))
    for name in Agreement.__slots__:
        setattr(new, name, getattr(rank, name))
    new._epochs, new.to_say = list(rank._epochs), list(rank.to_say)
    new._left = dict(rank._left)
    new._proposed = {number: dict(shares) for number, shares in rank._proposed.items()}
    new._ready = {number: dict(ready) for number, ready in rank._ready.items()}
    return new


def explore(world: World) -> int:
    """Visits every state: all are right, and from each one the collectives of all ranks can be begun. How many."""
    numbers = {world.state(): 0}
    before: list[list[int]] = [[]]
    ended: list[int] = []
    queue = deque([(0, world)])
    while queue:
        number, here = queue.popleft()
        here.check()
        if here.is_over():
            ended.append(number)
        for step in here.steps():
            there = here.copy()
            step(there)
            state = there.state()
            if state not in numbers:
                numbers[state] = len(numbers)
                before.append([])
                queue.append((numbers[state], there))
            before[numbers[state]].append(number)
    alive, left = set(ended), list(ended)
    while left:
        for number in before[left.pop()]:
            if number not in alive:
                alive.add(number)
                left.append(number)
    assert len(alive) == len(numbers), f"from {len(numbers) - len(alive)} states not all collectives can be begun"
    return len(numbers)


@pytest.mark.battery(26)
@pytest.mark.parametrize(
    ("n_ranks", "n_collectives", "n_epochs", "aheads", "n_states"),
    [(2, 3, 1, (2,), 1755), (2, 2, 2, (AHEAD,), None), (2, 4, 1, (0, AHEAD, 2), None)],
)
def test_no_order_of_the_steps_splits_a_collective_or_stops_one(
    n_ranks: int, n_collectives: int, n_epochs: int, aheads: Sequence[int], n_states: int | None
) -> None:
    found = explore(World(n_ranks, n_collectives, n_epochs, aheads))
    print(f"{found} states")
    assert n_states in (None, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "n_collectives", "n_epochs", "aheads"),
    [(2, 3, 3, (1,)), (3, 2, 1, (0, 1)), (2, 5, 2, (2,)), (2, 3, 2, (0, 1, 2))],
)
def test_nor_does_any_of_more(n_ranks: int, n_collectives: int, n_epochs: int, aheads: Sequence[int]) -> None:
    print(f"{explore(World(n_ranks, n_collectives, n_epochs, aheads))} states")


class Broken(Agreement):
    """What an exploration must find: a rank goes on after it has said that it is ready."""

    def begin(self) -> int | None:
        said = self._ready.get(self.epoch.number + 1, {}).pop(self.rank, None)
        try:
            return super().begin()
        finally:
            if said is not None:
                self._ready[self.epoch.number + 1][self.rank] = said


def test_a_rank_that_does_not_wait_is_found() -> None:
    world = World(2, 5, 1, (AHEAD,))
    world.ranks = [Broken(rank, [1, 0]) for rank in range(2)]
    with pytest.raises(AssertionError, match="runs under epochs"):
        explore(world)


@pytest.mark.parametrize("seed", range(60))
def test_random_orders_of_many_ranks_agree(seed: int) -> None:
    """Words come late, twice, and only between some of the ranks."""
    rng = random.Random(seed)
    n_ranks, n_collectives, n_epochs = rng.randint(2, 6), rng.randint(5, 40), rng.randint(1, 5)
    ranks = [Agreement(rank, [2] * n_ranks) for rank in range(n_ranks)]
    peers = [{(rank + 1) % n_ranks, (rank - 1) % n_ranks, rng.randrange(n_ranks)} - {rank} for rank in range(n_ranks)]
    leaves = rng.choice((0.0, 0.01, 0.5))
    coming: list[tuple[int, int]] = []
    begun: list[list[int]] = [[] for _ in ranks]
    for turn in range(100_000):
        rank = rng.randrange(n_ranks)
        each = ranks[rank]
        if rng.random() < 0.3 and len(begun[rank]) < n_collectives and (epoch := each.begin()) is not None:
            begun[rank].append(epoch)
        if len(begun[rank]) == n_collectives and rng.random() < leaves:
            each.leave()
        if rng.random() < 0.2 and each.wanted is not None and rank not in each._left:
            each.ready(rng.randrange(3))
        if rng.random() < 0.05 and each.may_propose and each.epoch.number < n_epochs:
            each.propose(tuple(((rng.random(), 1.0), (0.0, 0.5)) for _ in ranks))
        if coming:
            to, word = coming[rng.randrange(len(coming))]
            if ranks[to].hear(word) or rng.random() < 0.5:
                coming.remove((to, word))
        for number, other in enumerate(ranks):
            coming += [(peer, word) for word in other.to_say for peer in sorted(peers[number])]
            other.to_say.clear()
        if turn % 500 == 0:  # a connection is lost and comes again: what was on its way is lost, and all is said again
            to, via = rng.randrange(n_ranks), rng.randrange(n_ranks)
            coming = [each for each in coming if each[0] != to]
            for number in peers[to] | {via} - {to}:
                coming += [(to, word) for word in ranks[number].words()]
        if not coming and all(len(each) == n_collectives for each in begun):
            break
    assert len(set(map(tuple, begun))) == 1 and len(begun[0]) == n_collectives, begun
    assert begun[0] == sorted(begun[0])
    assert len({each.epoch for each in ranks if each.epoch.number == ranks[0].epoch.number}) == 1


def test_words_that_nobody_can_have_said_change_nothing() -> None:
    rng = random.Random(3)
    rank = Agreement(1, [2, 1])
    right = Agreement(0, [2, 1])
    right.propose((((1.0, 1.0), (0.5, 0.5)), ((1.0, 1.0),)))
    heard = [word for word in (rng.getrandbits(64) | 2 << 36 for _ in range(20_000)) if rank.hear(word)]
    assert heard == [] and rank.words() == []
    assert all(map(rank.hear, right.to_say)) and not any(map(rank.hear, right.to_say))
    assert rank.wanted is not None and rank.wanted.shares[0] == ((1.0, 1.0), (0.5, 0.5))


@pytest.mark.parametrize("n_nics", [[1] * (RANKS_MAX + 1), [1, NICS_MAX + 1]])
def test_jobs_that_words_cannot_tell_of_keep_their_plans(n_nics: list[int]) -> None:
    assert not Agreement(0, n_nics).may_propose


def test_there_is_an_end_of_epochs() -> None:
    alone = Agreement(0, [1])
    shares: Shares = (((0.5, 1.0),),)
    for number in range(EPOCHS_MAX):
        alone.propose(shares)
        alone.ready()
        assert alone.epoch.number == number + 1
        alone.to_say.clear()
    assert not alone.may_propose and len(alone._epochs) > 1
    for _ in range(AHEAD):
        assert alone.begin() is not None
    assert alone.begin() == EPOCHS_MAX and len(alone._epochs) == 1
