"""AllReduce by linear codes over GF(2): ranks know subspaces, and a transfer adds a vector that its sender knows.

p ranks have n elements each; the vectors have p n bits, bit v n + i being element i of rank v. Rank v knows at first
the n bits of its own, X_v, and must know S, the n sums, in the end. A transfer to v either brings v nearer to S (its
vector lies in what v knows and S together; it takes n of these for each rank), or is an *extra*. So a scheme has p n
transfers and its extras, and transfers that are no extras may be made at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

Space = tuple[int, ...]
"""A basis in reduced echelon form, the highest leading bit first."""


def reduced(vector: int, space: Space) -> int:
    """What is left of a vector modulo a space; 0 if it lies in it."""
    for each in space:
        vector = min(vector, vector ^ each)
    return vector


def joined(space: Space, vectors: Sequence[int]) -> Space:
    """The space spanned by a space and further vectors."""
    basis = list(space)
    for vector in vectors:
        left = reduced(vector, tuple(basis))
        if left:
            top = 1 << (left.bit_length() - 1)
            basis = sorted([each ^ left if each & top else each for each in basis] + [left], reverse=True)
    return tuple(basis)


def own(rank: int, n: int) -> Space:
    return tuple(1 << (rank * n + i) for i in reversed(range(n)))


def sums(p: int, n: int) -> Space:
    return joined((), [sum(1 << (rank * n + i) for rank in range(p)) for i in range(n)])


def common(one: Space, other: Space, bits: int) -> Space:
    """The intersection of two spaces (Zassenhaus)."""
    rows = [(each << bits) | each for each in one] + [each << bits for each in other]
    low = (1 << bits) - 1
    return joined((), [each & low for each in joined((), rows) if not each >> bits])


State = tuple[Space, ...]


def with_free_transfers(state: State, p: int, n: int) -> State:
    """The state after all transfers that are no extras, as long as there are any."""
    known, wanted = list(state), sums(p, n)
    moved = True
    while moved:
        moved = False
        for src, dst in permutations(range(p), 2):
            within = joined(known[dst], wanted)
            if len(within) > len(known[dst]):
                grown = joined(known[dst], common(known[src], within, p * n))
                moved, known[dst] = moved or len(grown) > len(known[dst]), grown
    return tuple(known)


def extras(state: State, p: int, n: int) -> Iterator[State]:
    """Every state after one extra."""
    wanted = sums(p, n)
    for src, dst in permutations(range(p), 2):
        within = joined(state[dst], wanted)
        left = [each for each in (reduced(vector, within) for vector in state[src]) if each]
        new = joined((), left)
        for size in range(1, len(new) + 1):
            for chosen in combinations(new, size):
                vector = 0
                for each in chosen:
                    vector ^= each
                found = list(state)
                # What is sent is a vector of the sender, which differs from this one by what the receiver will know.
                found[dst] = joined(state[dst], [sent_for(vector, state[src], within)])
                yield tuple(found)


def sent_for(vector: int, known: Space, within: Space) -> int:
    """A vector of `known` that is `vector` modulo `within`."""
    for size in range(1, len(known) + 1):
        for chosen in combinations(known, size):
            total = 0
            for each in chosen:
                total ^= each
            if reduced(total ^ vector, within) == 0:
                return total
    raise AssertionError("no such vector")


def is_done(state: State, p: int, n: int) -> bool:
    wanted = sums(p, n)
    return all(reduced(each, known) == 0 for known in state for each in wanted)


def fewest_extras(p: int, n: int, at_most: int) -> int | None:
    """The least number of extras of any scheme over GF(2), None if it is above `at_most`."""
    start = with_free_transfers(tuple(own(rank, n) for rank in range(p)), p, n)
    states = {start}
    for used in range(at_most + 1):
        if any(is_done(each, p, n) for each in states):
            return used
        if used == at_most:
            return None
        found = {with_free_transfers(each, p, n) for state in states for each in extras(state, p, n)}
        if used == 0:  # the first transfer is an extra, of some vector of some rank to another one: all are alike
            states = {min(found)}
        else:
            states = found if used + 1 == at_most else {canonical(each, p, n) for each in found}
    return None


def canonical(state: State, p: int, n: int) -> State:
    """One of the states that differ from this one by a renumbering of ranks."""
    low = (1 << n) - 1
    best = state
    for order in permutations(range(p)):
        moved = [
            joined((), [sum(((each >> (rank * n)) & low) << (order[rank] * n) for rank in range(p)) for each in known])
            for known in state
        ]
        named: list[Space] = [()] * p
        for rank in range(p):
            named[order[rank]] = moved[rank]
        best = min(best, tuple(named))
    return best
