"""Trees for many servers whose ports are shared fairly: rows of servers, each around one of its own.

A star for everyone, as in `optcc.schedules.fair_optimum`, has p^2 pairs of ranks, too many for hundreds of them. Here
the servers stand in rows, and a tree is a star in every row and a small tree, of few children a node, over the centres
of these stars. So a rank exchanges nearly all its bytes with its row. All rows do the same concurrently: every rank
sends to all centres of its row, which the trees use in turn. With equal rates, and with one straggler, fair ports give
all these transfers the same rate, and that is the rate that they need.

The loads are balanced by deficits, separately for the trees that reduce and for those that broadcast, with rows of
their own. A rank is the centre of its row in proportion to its load within the row, and the inner nodes at the top are
the ranks with the largest deficit of children.
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
"""Servers per row, or a few more: long rows have many trees in flight at once, short rows a deep top."""


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """The load so far and the target load of the ports of one direction, in units of the message.

    `members` has one line per row, padded with -1. A server is to have `children` children on average and to be centre
    of its row for the part `share` of the message; `owed` and `due` are its deficits in these.
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
        """Adds the demand of one more tree."""
        self.owed[:] += self.children
        self.due[:] += self.share

    def grow(self, root: int) -> Tree:
        """The next tree, over servers, at `root`."""
        due = np.where(self.members >= 0, self.due[self.members], -np.inf)
        centres = self.members[np.arange(len(due)), due.argmax(axis=1)]
        centres[self.row[root]] = root
        self.due[centres] -= 1
        self.owed[centres] -= (self.members >= 0).sum(axis=1) - 1
        self.owed[root] += 1  # the root sends nothing up and receives nothing down
        top = centres[centres != root]
        top = np.concatenate(([root], top[np.argsort(-self.owed[top], kind="stable")]))
        above = top[np.arange(len(top) - 1) // degree_for(len(top))]
        np.subtract.at(self.owed, above, 1)
        leaves = np.setdiff1d(np.arange(len(self.row)), centres)
        order = np.concatenate((top, leaves))
        return Tree(column(order), column(np.concatenate(([-1], above, centres[self.row[leaves]]))))


def degree_for(n_rows: int) -> int:
    """Children per node of the tree over the centres: fewer make it deeper, more make the loads uneven."""
    return 4 if n_rows <= 64 else 8


def row_trees(out: Loads, in_: Loads, gpus: Sequence[int]) -> Iterator[tuple[Tree, Tree]]:
    """Endless pairs of trees over the ranks with a common root: to reduce along, and to broadcast along.

    `out` and `in_` are the rates of the servers and `gpus` the number of ranks of each, numbered consecutively.

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
    """The row of each server: rows of nearly equal length, with nearly equal sums of children.

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
