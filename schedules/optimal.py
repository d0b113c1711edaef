"""The exact optimum for any bandwidths, from small trees: every chunk is reduced along one tree and broadcast along
another, and the trees alternate so that each port carries traffic in proportion to its rate.

Why this is optimal. In the tree model endpoint v sends 1 - x_v + B_v times the message: its own part of the reduction
unless it is the root (a share x_v of the time), and its children B_v in the broadcast; it receives 1 - x_v + R_v times,
with R_v children in the reduction. B and R add up to p - 1. The out loads and the in loads may be chosen apart, as any
numbers of at least 1 that add up to 2(p - 1): a star around u on the way up and a star around w on the way down,
joined by one step from u to w, load each port once except u's in port and w's out port, and every choice of loads is a
mixture of such pairs. So the time is the bound n * max(1/out, 1/in, 2(p-1)/sum out, 2(p-1)/sum in).

A star serialises p - 1 transfers of a chunk at its centre; trees of small degree have the same average loads and pass a
chunk in degree * log(p) steps. `tree_pairs` keeps for every endpoint its deficit of children, and the inner nodes for
each chunk are the endpoints with the largest deficits.

Many servers of one rate have equal deficits, so the order of trees is arbitrary, and trees of depth three and more add
jitter at every level. With `fifo` ports they form rows instead (`optcc.schedules.grid_trees`): all but an eighth of a
server's traffic stays in its row, and the rows stay in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from optcc.arrays import Column, column
from optcc.compiled import compiled
from optcc.dsl import Program, schedule
from optcc.passes.lane_assignment import ALL_PAIRS_MAX
from optcc.schedules.fair_optimum import shares
from optcc.schedules.loads import Loads, port_loads, rates, with_gpus
from optcc.trees import Tree

ROWS_SEGMENTS = 1024
"""With fewer segments the fill time of rows outweighs their gain: with 256 servers and one at half rate, rows
are 1.02 of the bound and trees 1.05 with 2048 segments, 1.08 and 1.07 with 512, 1.30 and 1.14 with 128."""
ACCEPTS = "any servers, out and in apart; NICs of a server pooled"
PAPER = "optcc, docs/bounds.md: the fluid optimum by tree packing"


@schedule(name="optimal", accepts=ACCEPTS, paper=PAPER, configure=rates)
def optimal_stored(program: Program, rates: Sequence[tuple[Fraction, Fraction]], gpus: Sequence[int] = ()) -> None:
    """`optimal` for ports that serve one at a time while the network stores: more than 64 servers, most of them of one
    rate, form rows if there are 1024 segments or more.

    >>> optimal.under("fifo").name, optimal.under("exclusive") is optimal
    ('optimal', True)
    """
    commonest = max(Counter(rates).values(), default=0)
    in_rows = len(rates) > ALL_PAIRS_MAX and 2 * commonest > len(rates) and program.segments >= ROWS_SEGMENTS
    (shares if in_rows else optimal).function(program, rates, gpus)


@schedule(accepts=ACCEPTS, paper=PAPER, configure=rates, fair=shares, fifo=optimal_stored)
def optimal(program: Program, rates: Sequence[tuple[Fraction, Fraction]], gpus: Sequence[int] = ()) -> None:
    """Each segment is reduced along one tree and broadcast along another; loads follow the rates of the servers.

    With k segments: n * max(1/out_v, 1/in_v, 2(p-1)/sum out, 2(p-1)/sum in) for any rates, and a fill of about
    degree * log(p) segments. The GPUs of a server form a star around one of them, in turn.

    >>> schedule = optimal(n_ranks=4, segments=3, rates=[(2, 2), (2, 2), (2, 2), (1, 1)])
    >>> schedule.stages, len(schedule)
    (('reduce', 'broadcast'), 18)
    """
    out, in_ = (np.array([float(pair[side]) for pair in rates]) for side in (0, 1))
    trees = tree_pairs(out, in_, gpus or [1] * len(rates))
    for segment, (up, down) in zip(program.pipeline(sections=1), trees, strict=False):
        with program.stage("reduce"):
            segment[0].reduce_along(up)
        with program.stage("broadcast"):
            segment[0].broadcast_along(down)


def degree_for(endpoints: int) -> int:
    """Children per inner node: fewer make more steps, more make each step longer."""
    return 2 if endpoints <= 8 else 4 if endpoints <= 128 else 8


def tree_pairs(out: Loads, in_: Loads, gpus: Sequence[int]) -> Iterator[tuple[Tree, Tree]]:
    """Endless pairs of trees over the ranks with a common root: to reduce along, and to broadcast along.

    `out` and `in_` are the rates of the servers and `gpus` the number of ranks of each, numbered consecutively.
    """
    n_servers = len(gpus)
    children = [port_loads(rates, 2.0 * (n_servers - 1)) - 1 if n_servers > 1 else np.zeros(1) for rates in (out, in_)]
    tightness = np.maximum((children[0] + 1) / out, (children[1] + 1) / in_)
    urgent = np.argsort(-tightness, kind="stable")
    owed = np.zeros((2, n_servers))
    degree = degree_for(n_servers)
    for turn in count():
        owed += children
        root = int(np.minimum(owed[0], owed[1]).argmax())
        owed[:, root] += 1  # the root sends nothing up and receives nothing down
        up = grow(owed[1], root, degree, urgent, leaves_last=True)
        down = grow(owed[0], root, degree, urgent)
        yield (up, down) if max(gpus) == 1 else (with_gpus(up, gpus, turn), with_gpus(down, gpus, turn))


def grow(owed: Loads, root: int, degree: int, urgent: Column, *, leaves_last: bool = False) -> Tree:
    """A tree at `root` whose inner nodes are those with the largest deficits `owed`, which are then reduced.

    A node gets its deficit, at least `degree` children (the root at least one). The leaf with the largest deficit is a
    child of the root, where it waits least; the others follow the inner nodes, in order of deficit. `leaves_last` puts
    all leaves after the inner nodes, those near the root last: a reduction starts with independent transfers.
    """
    order, parent = np.empty(len(owed), dtype=np.int64), np.empty(len(owed), dtype=np.int64)
    _kernels().grow(owed, root, degree, urgent, leaves_last, order, parent)
    return Tree(column(order), column(parent))


@cache
def _kernels() -> Any:
    return compiled((_grow,), globals())


def _grow(
    owed: Loads, root: int, degree: int, urgent: Column, leaves_last: bool, order: Column, parent: Column
) -> None:
    p = len(owed)
    children = np.zeros(p, dtype=np.int64)
    line, above = np.empty(p, dtype=np.int64), np.empty(p, dtype=np.int64)  # breadth first
    left = p - 1
    n_inner = 0
    for v in np.concatenate((np.array([root]), np.argsort(-np.asarray(owed), kind="mergesort"))):
        if left == 0:
            break
        if children[v] > 0:
            continue
        children[v] = min(left, max(int(np.floor(owed[v] + 0.5)), degree if v != root else 1))
        owed[v] -= children[v]
        left -= children[v]
        line[n_inner] = v
        n_inner += 1
    filled = max(n_inner, 1)
    line[0] = root
    for v in urgent:
        if children[v] == 0 and v != root:
            line[filled] = v
            filled += 1
    if 1 < n_inner < p and children[root] > 1:
        leaf = line[n_inner]
        line[2 : n_inner + 1] = line[1:n_inner].copy()
        line[1] = leaf
    above[0] = -1
    reached = 1
    for at in range(p):
        for _ in range(children[line[at]]):
            above[reached] = line[at]
            reached += 1
    n_front, n_back = 0, p
    for at in range(p):
        if leaves_last and children[line[at]] == 0 and at > 0:
            n_back -= 1
            order[n_back], parent[n_back] = line[at], above[at]
        else:
            order[n_front], parent[n_front] = line[at], above[at]
            n_front += 1
