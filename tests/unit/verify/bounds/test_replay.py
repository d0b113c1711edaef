"""Every number that `replay` checks, changed by hand so that only this check can notice."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from optcc.errors import SolverError
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Achieved, Certificate, Cut, PackedTree
from optcc.verify.bounds.flow import ResidualGraph, narrow_cuts
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.network import BROADCAST, REDUCE, FlowNetwork
from optcc.verify.bounds.packing import pack
from optcc.verify.bounds.replay import replay

TOPOLOGY = Topology.parse("3@4B/s,0=3B/s")
BOUND = lp_bound(TOPOLOGY, "allreduce", 66).certificate
PACKED = pack(BOUND)
ONE = Fraction(1)


def done(certificate: Certificate = PACKED) -> Achieved:
    """What it achieves."""
    assert certificate.achieved is not None
    return certificate.achieved


def trees(certificate: Certificate = PACKED) -> tuple[PackedTree, ...]:
    """Its trees."""
    found = done(certificate).trees
    assert found is not None
    return found


def with_tree(tree: PackedTree) -> Certificate:
    """PACKED with its first tree replaced."""
    return replace(PACKED, achieved=replace(done(), trees=(tree, *trees()[1:])))


def first(values: tuple[Fraction, ...], value: Fraction) -> tuple[Fraction, ...]:
    """`values` with another first one."""
    return (value, *values[1:])


def test_the_certificates_are_good() -> None:
    for certificate in (BOUND, PACKED):
        replay(certificate, TOPOLOGY)


@pytest.mark.parametrize(
    ("certificate", "message"),
    [
        (replace(BOUND, seconds=BOUND.seconds + Fraction(1, 10**12)), "seconds"),
        (replace(BOUND, seconds=-BOUND.seconds), "seconds"),
        (replace(BOUND, crossing=BOUND.crossing * 2, seconds=BOUND.seconds * 2), "demand"),
        (replace(BOUND, supply=BOUND.supply / 2, seconds=BOUND.seconds * 2), "supply"),
        (replace(BOUND, size_bytes=67), "seconds"),
        (replace(BOUND, cuts=(replace(BOUND.cuts[0], weight=-ONE), *BOUND.cuts[1:])), "weight -1"),
        (replace(BOUND, cuts=(replace(BOUND.cuts[0], weight=ONE * 9), *BOUND.cuts[1:])), "cuts weigh"),
        (replace(BOUND, cuts=(*BOUND.cuts, Cut(BROADCAST, (3,), ONE))), "must hold an endpoint|weigh"),
        (replace(BOUND, prices=(Fraction(0),) * len(BOUND.prices)), "cost 0"),
        (replace(BOUND, prices=tuple(-price for price in BOUND.prices)), "must not be negative"),
        (replace(BOUND, potentials={REDUCE: (ONE * 9,), BROADCAST: (ONE * 9,)}), "weigh"),
        (replace(BOUND, cuts=(), prices=(Fraction(0),) * 6), "demand|cost 0"),
        (replace(BOUND, achieved=replace(done(), roots=(ONE, ONE, -ONE))), "roots"),
        (replace(BOUND, achieved=replace(done(), seconds=BOUND.seconds / 2)), "port"),
        (replace(BOUND, achieved=replace(done(BOUND), roots=(ONE, Fraction(0), Fraction(0)))), "only"),
        (
            replace(BOUND, achieved=replace(done(BOUND), loads={k: (Fraction(0),) * 6 for k in (REDUCE, BROADCAST)})),
            "only",
        ),
        (
            replace(
                BOUND,
                achieved=replace(done(BOUND), loads={k: first(v, -ONE) for k, v in done(BOUND).loads.items()}),
            ),
            "must not be negative",
        ),
        (
            replace(
                BOUND,
                achieved=replace(
                    done(BOUND),
                    seconds=Fraction(10**6),
                    loads={k: first(v, v[0] + 1) for k, v in done(BOUND).loads.items()},
                ),
            ),
            "keeps",
        ),
        (with_tree(replace(trees()[0], weight=trees()[0].weight / 2)), "rooted"),
        (with_tree(replace(trees()[0], weight=-trees()[0].weight)), "above zero"),
        (with_tree(replace(trees()[0], root=(trees()[0].root + 1) % 3)), "one parent|span"),
        (with_tree(replace(trees()[0], paths=trees()[0].paths[:1])), "span"),
        (with_tree(replace(trees()[0], paths=(*trees()[0].paths, trees()[0].paths[0]))), "one parent"),
        (with_tree(replace(trees()[0], paths=tuple(path[:1] for path in trees()[0].paths))), "endpoint to endpoint"),
        (with_tree(replace(trees()[0], paths=tuple(path[::-1] for path in trees()[0].paths))), "endpoint to endpoint"),
        (
            replace(PACKED, achieved=replace(done(), loads={k: (Fraction(0),) * 6 for k in (REDUCE, BROADCAST)})),
            "trees load",
        ),
    ],
)
def test_a_number_that_does_not_follow(certificate: Certificate, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        replay(certificate)


def test_one_way_collectives_have_one_kind() -> None:
    """A broadcast cut in a Reduce, reduce loads in a Broadcast."""
    reduce = lp_bound(TOPOLOGY, "reduce", 66).certificate
    with pytest.raises(SolverError, match="no such trees"):
        replay(replace(reduce, cuts=(*reduce.cuts, Cut(BROADCAST, (0,), ONE))))
    broadcast = lp_bound(TOPOLOGY, "broadcast", 66).certificate
    loads = dict(done(broadcast).loads) | {REDUCE: (ONE,) * 6}
    with pytest.raises(SolverError, match="no such trees"):
        replay(replace(broadcast, achieved=replace(done(broadcast), loads=loads)))
    with pytest.raises(SolverError, match="roots"):
        replay(replace(broadcast, achieved=replace(done(broadcast), roots=(Fraction(0), ONE, Fraction(0)))))


def test_a_cycle_is_no_tree() -> None:
    """Two endpoints that are each other's parent, beside the root."""
    network = FlowNetwork.from_links("abc", [(a, b, 1) for a in "abc" for b in "abc" if a != b])
    certificate = lp_bound(network, "broadcast", 1).certificate
    number = {(link.tail, link.head): n for n, link in enumerate(network.links)}
    cycle = PackedTree(BROADCAST, 0, ONE, ((number[1, 2],), (number[2, 1],)))
    loads = {REDUCE: (Fraction(0),) * 6, BROADCAST: (ONE,) * 6}
    with pytest.raises(SolverError, match="span"):
        replay(replace(certificate, achieved=Achieved(ONE, (ONE, Fraction(0), Fraction(0)), loads, (cycle,))))


def test_maximum_flow_against_all_cuts() -> None:
    """Every set of nodes of small random graphs: the narrowest one is found, contracted or not."""
    for seed in range(60):
        rng = random.Random(seed)
        n = rng.randint(2, 6)
        p = rng.randint(1, n)
        arcs = [(a, b) for a in range(n) for b in range(n) if a != b and rng.random() < 0.6]
        capacities = [rng.randint(0, 9) for _ in arcs]
        roots = [rng.randint(0, 5) for _ in range(p)]

        def into(nodes: set[int], arcs: list[tuple[int, int]] = arcs, c: list[int] = capacities) -> int:
            return sum(each for each, (a, b) in zip(c, arcs, strict=True) if b in nodes and a not in nodes)

        sums = [
            into(nodes) + sum(roots[v] for v in nodes if v < p)
            for size in range(1, n + 1)
            for nodes in map(set, combinations(range(n), size))
            if min(nodes) < p
        ]
        for need in (min(sums), min(sums) + 1):
            for contract in (True, False):
                found = narrow_cuts(n, arcs, capacities, roots, need, contract=contract)
                assert bool(found) == (min(sums) < need)
                for share, nodes in found:
                    assert share == into(set(nodes)) + sum(roots[v] for v in nodes if v < p) < need
    graph = ResidualGraph(3, [(0, 1), (1, 2), (0, 2)], [5, 3, 4])
    graph.merge(0)
    assert graph.flow_to(2, 100) == 7


def test_replay_needs_no_solver() -> None:
    """Reading and replaying import neither a solver nor numpy."""
    code = (
        "import sys; from optcc.verify.bounds.certificate_file import read_certificate; "
        "from optcc.verify.bounds.replay import replay; "
        "replay(read_certificate(sys.stdin.buffer.read())); "
        "print([m for m in ('highspy', 'pulp', 'scipy', 'numpy', 'z3', 'networkx') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], input=PACKED.to_bytes(), capture_output=True, check=True)
    assert result.stdout.decode().strip() == "[]"
