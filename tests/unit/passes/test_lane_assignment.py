"""Lanes in exact proportion to what they carry."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from optcc.compiler import find_transfers
from optcc.passes.lane_assignment import lanes_by_weight
from optcc.schedules.packed import TreePair, packed
from optcc.trees import Tree


def lanes_of_shares(*shares: Fraction, most: int = 32) -> list[int]:
    """How many lanes the trees have on the way from rank 0 to rank 1, where tree i carries `shares[i]`."""
    tree = Tree.chain([0, 1])
    pairs = [TreePair(share, tree, tree) for share in shares]
    transfers = find_transfers(packed(n_ranks=2, segments=60, pairs=pairs), 2**20, "float32", "sum")
    assigned = lanes_by_weight(transfers, most, 3)
    assert set(assigned.slots.tolist()) == {3}
    down = transfers.src == 0
    return [
        len(
            np.unique(assigned.send[down & (transfers.stage == transfers.stages.index(f"broadcast along tree {tree}"))])
        )
        for tree in range(len(shares))
    ]


def test_shares_get_lanes_in_whole_proportions() -> None:
    """Rounded to the mean, as `lanes_by_stage` does, 2/5, 2/5 and 1/5 get one lane each."""
    fifth = Fraction(1, 5)
    assert lanes_of_shares(2 * fifth, 2 * fifth, fifth) == [2, 2, 1]
    assert lanes_of_shares(3 * fifth, 2 * fifth) == [3, 2]
    assert lanes_of_shares(Fraction(1, 2), Fraction(1, 2)) == [1, 1]


def test_lanes_are_limited() -> None:
    assert lanes_of_shares(Fraction(9, 10), Fraction(1, 10), most=4) == [4, 1]
