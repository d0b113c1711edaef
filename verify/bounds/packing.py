"""Decomposes link loads into in-trees and out-trees, each for a share of the message.

Two exact steps. Loads through switches become capacities between endpoints: a small linear program whose optimum
exists by the splitting-off theorems named in `optcc.verify.bounds.flow`. Then trees are peeled off (Lovász, On
two minimax theorems in graphs, 1976, which proves Edmonds' theorem): grow a tree from the root so that after a share of
it is taken every set S still gets what is left of the message; then take the largest share for which that stays true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

from optcc.errors import SolverError, SolverUnknown
from optcc.verify.bounds.certificate import Certificate, PackedTree
from optcc.verify.bounds.flow import Arc, ResidualGraph, narrow_cuts
from optcc.verify.bounds.network import BROADCAST, FlowNetwork
from optcc.verify.bounds.replay import replay
from optcc.verify.bounds.solvers import AT_LEAST, AT_MOST, HighsSolver, LinearProgram, MakeSolver, Solved, exact_vertex

TIME_LIMIT_S = 60.0
_FLOAT_UNIT = 2**40
_FLOAT_SLACK = 2**14
_ROUNDS_MAX = 200
SWITCHES_MAX = 4
"""Of a path between endpoints: a leaf of its own for a server, up, down, and the leaf."""
PATHS_MAX = 500_000


def pack(
    certificate: Certificate,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    solver: MakeSolver = HighsSolver,
) -> Certificate:
    """`certificate` with the trees of its packing, replayed.

    Raises SolverError if it achieves nothing, SolverUnknown if paths are too many or must pass more than
    `SWITCHES_MAX` switches, or if the split of the loads is not found in time.
    """
    achieved = certificate.achieved
    if achieved is None:
        raise SolverError("certificate: must say what is achieved, to be packed into trees")
    network = certificate.network
    paths = _paths(network)
    trees: list[PackedTree] = []
    for kind in certificate.demand.kinds:
        ends = [(network.links[path[0]].tail, network.links[path[-1]].head) for path in paths]
        arcs = ends if kind == BROADCAST else [(head, tail) for tail, head in ends]
        capacities = _split(paths, arcs, achieved.loads[kind], achieved.roots, time_limit_s, solver)
        used = [number for number, capacity in enumerate(capacities) if capacity]
        for weight, root, tree in peel([arcs[n] for n in used], [capacities[n] for n in used], achieved.roots):
            trees.append(PackedTree(kind, root, weight, tuple(paths[used[arc]] for arc in tree)))
    packed = replace(certificate, achieved=replace(achieved, trees=tuple(trees)))
    replay(packed)
    return packed


def _paths(network: FlowNetwork) -> list[tuple[int, ...]]:
    """Paths between endpoints: one link, or several with up to `SWITCHES_MAX` switches between."""
    p = len(network.endpoints)
    outof: list[list[int]] = [[] for _ in range(network.n_nodes)]
    for number, link in enumerate(network.links):
        outof[link.tail].append(number)
    direct: list[tuple[int, ...]] = [
        (number,) for number, link in enumerate(network.links) if link.tail < p and link.head < p
    ]
    found: list[tuple[int, ...]] = []
    begun: list[tuple[int, ...]] = [(at,) for at, link in enumerate(network.links) if link.tail < p <= link.head]
    for _ in range(SWITCHES_MAX):
        longer = [(*path, number) for path in begun for number in outof[network.links[path[-1]].head]]
        passed = [[network.links[path[0]].tail, *(network.links[number].head for number in path)] for path in longer]
        simple = [path for path, nodes in zip(longer, passed, strict=True) if len(set(nodes)) == len(nodes)]
        begun = [path for path in simple if network.links[path[-1]].head >= p]
        found += [path for path in simple if network.links[path[-1]].head < p]
        if len(found) > PATHS_MAX:
            raise SolverUnknown(f"network: more than {PATHS_MAX} paths between endpoints: trees are not looked for")
    return [*direct, *sorted(found, key=lambda path: (len(path), network.links[path[0]].head))]


def _split(
    paths: Sequence[tuple[int, ...]],
    arcs: Sequence[Arc],
    loads: Sequence[Fraction],
    roots: Sequence[Fraction],
    time_limit_s: float,
    solver: MakeSolver,
) -> list[Fraction]:
    """The least path capacities within `loads` that satisfy every cut of the endpoints."""
    p = len(roots)
    program = LinearProgram()
    columns = [program.variable(f"path {number}", cost=1) for number in range(len(paths))]
    users: dict[int, list[int]] = {}
    for column, path in zip(columns, paths, strict=True):
        for link in path:
            users.setdefault(link, []).append(column)
    for link, using in users.items():
        program.constraint(f"link {link}", tuple((column, Fraction(1)) for column in using), AT_MOST, loads[link])
    known: set[frozenset[int]] = set()

    def add(nodes: frozenset[int]) -> int:
        if nodes in known:
            return 0
        known.add(nodes)
        crossing = [c for c, (tail, head) in zip(columns, arcs, strict=True) if head in nodes and tail not in nodes]
        rhs = 1 - sum((roots[v] for v in nodes), Fraction(0))
        program.constraint(f"cut {len(known)}", tuple((column, Fraction(1)) for column in crossing), AT_LEAST, rhs)
        return 1

    for v in range(p):
        add(frozenset((v,)))
    solve = solver(program)
    for _ in range(_ROUNDS_MAX):
        outcome = solve.solve(time_limit_s)
        if not isinstance(outcome, Solved):
            break
        whole = [max(0, round(value * _FLOAT_UNIT)) for value in outcome.values]
        if _add_narrow(add, arcs, whole, [round(x * _FLOAT_UNIT) for x in roots], _FLOAT_UNIT - _FLOAT_SLACK):
            continue
        vertex = exact_vertex(program, outcome)
        if vertex is None:
            break
        values = vertex[0]
        load: dict[int, Fraction] = {}
        for value, path in zip(values, paths, strict=True):
            for link in path if value else ():
                load[link] = load.get(link, Fraction(0)) + value
        if min(values) < 0 or any(each > loads[link] for link, each in load.items()):
            break
        unit = lcm(*(each.denominator for each in (*values, *roots)))
        if not _add_narrow(add, arcs, [int(v * unit) for v in values], [int(x * unit) for x in roots], unit):
            return values
    raise SolverUnknown("packing: no split of the loads into paths was found")


def _add_narrow(
    add: Callable[[frozenset[int]], int],
    arcs: Sequence[Arc],
    capacities: Sequence[int],
    roots: Sequence[int],
    need: int,
) -> int:
    return sum(add(nodes) for _, nodes in narrow_cuts(len(roots), arcs, capacities, roots, need))


def peel(
    arcs: Sequence[Arc], capacities: Sequence[Fraction], roots: Sequence[Fraction]
) -> list[tuple[Fraction, int, list[int]]]:
    """Out-trees (weight, root, arcs) within `capacities`, weights summing to 1, roots spread as `roots`.

    >>> [(str(w), root, tree) for w, root, tree in peel([(0, 1), (1, 0)], [Fraction(1, 3), Fraction(2, 3)],
    ...                                                  [Fraction(1, 3), Fraction(2, 3)])]
    [('2/3', 1, [1]), ('1/3', 0, [0])]

    Raises SolverError if some set of nodes gets less than the whole message: then there are none.
    """
    p = len(roots)
    unit = lcm(*(each.denominator for each in (*capacities, *roots)))
    every = [*arcs, *((p, v) for v in range(p))]
    left = [int(each * unit) for each in (*capacities, *roots)]
    rest = unit
    found: list[tuple[Fraction, int, list[int]]] = []
    while rest:
        tree = _grow(p, every, left, rest)
        share = _largest_share(p, every, left, rest, tree)
        scale = share.denominator
        if scale > 1:
            left, rest, unit = [each * scale for each in left], rest * scale, unit * scale
        weight = int(share * scale)
        for arc in tree:
            left[arc] -= weight
        rest -= weight
        found.append((Fraction(weight, unit), every[tree[0]][1], tree[1:]))
    return found


def _grow(p: int, every: Sequence[Arc], left: Sequence[int], rest: int) -> list[int]:
    """A tree from node p over all others, such that a small share of it leaves every set S enough of the rest.

    An arc (a, b) can be added if every S with b and without a still gets `rest` beside the small shares of the arcs so
    far. A small share is 1 here, a message `fine`.
    """
    fine = 2 * p + 2
    scaled = [each * fine for each in left]
    tree: list[int] = []
    reached = {p}
    refused: set[int] = set()
    while len(reached) <= p:
        frontier = [
            arc
            for arc, (tail, head) in enumerate(every)
            if tail in reached and head not in reached and left[arc] and arc not in refused
        ]
        if not frontier:
            raise SolverError("packing: these capacities do not give every set of nodes the whole message")
        arc = max(frontier, key=lambda each: (left[each], -each))
        tail, head = every[arc]
        graph = ResidualGraph(p + 1, every, scaled)
        for node in {p, tail}:
            graph.merge(node)
        if graph.flow_to(head, rest * fine) < rest * fine:
            refused.add(arc)  # a set that rules it out still does for a larger tree
            continue
        tree.append(arc)
        scaled[arc] -= 1
        reached.add(head)
    return tree


def _largest_share(p: int, every: Sequence[Arc], left: Sequence[int], rest: int, tree: Sequence[int]) -> Fraction:
    """The largest share of `tree` that leaves every S: left(S) - share * (arcs of the tree into S) >= rest - share."""
    share = Fraction(min(rest, *(left[arc] for arc in tree)))
    while True:
        scale = share.denominator
        after = [each * scale for each in left]
        for arc in tree:
            after[arc] -= int(share * scale)
        narrow = narrow_cuts(p, every[:-p], after[:-p], after[-p:], int((rest - share) * scale))
        if not narrow:
            return share
        for _, nodes in narrow:
            entering = sum(every[arc][1] in nodes and every[arc][0] not in nodes for arc in tree)
            into = sum(
                each for each, (tail, head) in zip(left, every, strict=True) if head in nodes and tail not in nodes
            )
            share = min(share, Fraction(into - rest, entering - 1))
