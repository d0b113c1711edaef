"""Trees for many servers whose ports are shared fairly: rows of servers, each around one of its own.

A star for everyone, as in `optcc.schedules.fair_optimum`, has p^2 pairs of ranks, too many for hundreds of them. Here
the servers stand in rows, and a tree is a star in every row and a small tree, of few children a node, over the centres
of these stars. So a rank exchanges nearly all its bytes with its row. All rows do the same at the same time: every rank
sends to all centres of its row, which the trees take in turn. With equal rates, and with one straggler, fair ports give
all these transfers the same rate, and that is the rate that they need.

Two accounts see to the loads, for the trees that reduce and for those that broadcast, in rows of their own. In each, a
rank is the centre of its row as often as its load asks for, compared with the loads of the others in its row; and the
top of the tree goes to those that owe most children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from optcc.arrays import Column, column
from optcc.schedules.loads import Loads, port_loads, with_gpus
from optcc.trees import Tree

ROW = 8
"""Servers of a row, or a few more: with many of them many trees are on their way at once, with few the top is deep."""


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """What the ports of one direction have carried and are to carry, in units of the message.

    `members` has a line for each row, with -1 behind the shorter ones. A server is to have `children` children in the
    mean and be centre of its row for the part `share` of the message; `owed` and `due` are what it lacks of that.
    """

    members: Column
    row: Column
    children: Loads
    share: Loads
    owed: Loads
    due: Loads

    @classmethod
    def of(cls, rates: Loads, n_rows: int) -> Account:
        """For ports of these rates."""
        children = port_loads(rates, 2.0 * (len(rates) - 1)) - 1
        row = balance(children, n_rows)
        width = int(np.bincount(row).max())
        members = np.full((n_rows, width), -1, dtype=np.int64)
        for number in range(n_rows):
            own = np.flatnonzero(row == number)
            members[number, : len(own)] = own
        total = np.bincount(row, children, minlength=n_rows)
        share = np.where(total[row] > 0, children / np.where(total > 0, total, 1.0)[row], 1 / np.bincount(row)[row])
        return cls(members, row, children, share, np.zeros(len(rates)), np.zeros(len(rates)))

    def earn(self) -> None:
        """One more tree is to come."""
        self.owed[:] += self.children
        self.due[:] += self.share

    def grow(self, root: int) -> Tree:
        """The next tree, over servers, at `root`."""
        due = np.where(self.members >= 0, self.due[self.members], -np.inf)
        centres = self.members[np.arange(len(due)), due.argmax(axis=1)]
        centres[self.row[root]] = root
        self.due[centres] -= 1
        self.owed[centres] -= (self.members >= 0).sum(axis=1) - 1
        self.owed[root] += 1  # a root sends nothing up and receives nothing down
        top = centres[centres != root]
        top = np.concatenate(([root], top[np.argsort(-self.owed[top], kind="stable")]))
        above = top[np.arange(len(top) - 1) // degree_for(len(top))]
        np.subtract.at(self.owed, above, 1)
        leaves = np.setdiff1d(np.arange(len(self.row)), centres)
        order = np.concatenate((top, leaves))
        return Tree(column(order), column(np.concatenate(([-1], above, centres[self.row[leaves]]))))


def degree_for(n_rows: int) -> int:
    """Children of a node of the tree over the centres: fewer make it deeper, more load its nodes unevenly."""
    return 4 if n_rows <= 64 else 8


def row_trees(out: Loads, in_: Loads, gpus: Sequence[int]) -> Iterator[tuple[Tree, Tree]]:
    """Without end: a tree to reduce along and one to broadcast along, of one root, over the ranks.

    `out` and `in_` are the rates of the servers and `gpus` how many ranks each has, numbered one after the other.

    >>> rates = np.ones(9)
    >>> [(up.root, down.root) for (up, down), _ in zip(row_trees(rates, rates, [1] * 9), range(3))]
    [(0, 0), (1, 1), (2, 2)]
    """
    n_rows = max(1, len(out) // ROW)
    up, down = Account.of(in_, n_rows), Account.of(out, n_rows)
    fit = (up.share > 0) & (down.share > 0)
    fit |= ~fit.any()
    for turn in count():
        up.earn()
        down.earn()
        root = int(np.where(fit, np.minimum(up.owed, down.owed), -np.inf).argmax())
        trees = up.grow(root), down.grow(root)
        yield trees if max(gpus) == 1 else (with_gpus(trees[0], gpus, turn), with_gpus(trees[1], gpus, turn))


def balance(children: Loads, n_rows: int) -> Column:
    """For each server its row: rows of nearly one length whose servers have nearly as many children together.

    >>> balance(np.array([3.0, 2.0, 2.0, 1.0]), 2).tolist()
    [0, 1, 1, 0]
    """
    place = np.arange(len(children))
    turn = place % n_rows
    row = np.empty(len(children), dtype=np.int64)
    row[np.argsort(-children, kind="stable")] = np.where(place // n_rows % 2 == 0, turn, n_rows - 1 - turn)
    spare = children - 1  # of the children of a row, one is in another row
    for _ in range(4 * n_rows):
        sums = np.bincount(row, spare, minlength=n_rows)
        full, empty = int(sums.argmax()), int(sums.argmin())
        gap = sums[full] - sums[empty]
        givers, takers = np.flatnonzero(row == full), np.flatnonzero(row == empty)
        left = np.abs(gap - 2 * (spare[givers][:, None] - spare[takers][None, :]))
        giver, taker = np.unravel_index(int(left.argmin()), left.shape)
        if left[giver, taker] >= gap * (1 - 1e-9):
            break
        row[givers[giver]], row[takers[taker]] = empty, full
    return column(row)
