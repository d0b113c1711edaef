"""The cut LP against the closed form, against all pairs of trees, against CBC, and on rail failures from above."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import count, product

import pytest

from optcc.collective import Collective
from optcc.errors import TopologyError
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.certificate_file import read_certificate
from optcc.verify.bounds.closed_form_certificates import certify, closed_forms
from optcc.verify.bounds.closed_forms import allreduce_bound, collective_bound
from optcc.verify.bounds.lp import CertifiedBound, lp_bound
from optcc.verify.bounds.network import KINDS_OF, Demand, FlowNetwork
from optcc.verify.bounds.packing import pack
from optcc.verify.bounds.replay import replay
from optcc.verify.bounds.solvers import AT_MOST, EQUAL, CbcSolver, HighsSolver, LinearProgram, Solved, exact_vertex
from tests.sample import sampled

TREE_COLLECTIVES = tuple(KINDS_OF)
"""Those whose bounds are about trees."""

ALLREDUCE = Demand("allreduce", None)


def pooled(seed: int, most: int = 64) -> Topology:
    """Different out and in at every endpoint; one to four stragglers that lost up to nine tenths."""
    rng = random.Random(seed)
    rates = [[Fraction(rng.randint(20, 50)), Fraction(rng.randint(20, 50))] for _ in range(rng.randint(2, most))]
    for straggler in rng.sample(range(len(rates)), min(len(rates), rng.randint(1, 4))):
        rates[straggler] = [rate * rng.randint(1, 10) / 10 for rate in rates[straggler]]
    return Topology(tuple(Server(f"h{i}", 1, (Nic(0, out, in_),)) for i, (out, in_) in enumerate(rates)))


def failed_rails(seed: int, *, n_servers: int | None = None, n_failed: int | None = None) -> Topology:
    """4..16 servers of eight NICs on a rail-only network, of which 1..8 NICs failed."""
    rng = random.Random(seed)
    p = n_servers or rng.randint(4, 16)
    every = [(server, rail) for server in range(p) for rail in range(8)]
    failed = set(rng.sample(every, n_failed or rng.randint(1, 8)))
    rate = Fraction(50 * 10**9)
    return Topology(
        tuple(
            Server(f"h{i}", 8, tuple(Nic(rail, rate, rate, (i, rail) in failed) for rail in range(8))) for i in range(p)
        ),
        rail_only=True,
    )


def uneven_rails(seed: int, most: int) -> Topology:
    """Few servers on few rails, every NIC different, nearly half of them failed; TopologyError if that cuts one off."""
    rng = random.Random(seed)
    n_rails = rng.randint(2, 3)
    return Topology(
        tuple(
            Server(
                f"h{i}",
                1,
                tuple(
                    Nic(rail, Fraction(rng.randint(1, 20)), Fraction(rng.randint(1, 20)), rng.random() < 0.4)
                    for rail in range(n_rails)
                ),
            )
            for i in range(rng.randint(2, most))
        ),
        rail_only=True,
    )


def check_closed_form(seed: int) -> None:
    """LP = closed form exactly, gap 0, and its certificate survives writing, reading and replaying."""
    topology, size = pooled(seed), 1 + seed
    bound, wanted = lp_bound(topology, "allreduce", size), allreduce_bound(topology, size)
    assert bound.seconds == wanted.seconds
    assert bound.gap == 0
    assert certify(wanted, topology).seconds == wanted.seconds
    again = read_certificate(bound.certificate.to_bytes())
    assert again == bound.certificate
    replay(again, topology)


@pytest.mark.parametrize("seed", sampled(range(40), every=2))
def test_the_lp_is_the_closed_form(seed: int) -> None:
    check_closed_form(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 140))
def test_the_lp_is_the_closed_form_on_more(seed: int) -> None:
    check_closed_form(seed)


@pytest.mark.parametrize("seed", sampled(range(60), every=3))
def test_the_lp_is_the_closed_form_of_every_collective(seed: int) -> None:
    """Servers of one to three GPUs, fabrics of finite rate, any root: the LP on GPUs is the closed form."""
    rng = random.Random(seed)
    servers = [
        Server(
            f"h{i}",
            rng.randint(1, 3),
            (Nic(0, Fraction(rng.randint(1, 20)), Fraction(rng.randint(1, 20))),),
            Fraction(rng.randint(1, 20)) if rng.random() < 0.7 else None,
        )
        for i in range(rng.randint(2, 4))
    ]
    topology = Topology(tuple(servers))
    name, root = rng.choice(TREE_COLLECTIVES), rng.randrange(topology.n_ranks)
    collective = Collective(name, topology.n_ranks, root)
    form = collective_bound(topology, 60, name, root)
    bound = lp_bound(topology, collective, 60, fabric=True)
    replay(bound.certificate, topology)
    assert bound.gap == 0
    assert bound.seconds == form.seconds if form.tight else bound.seconds >= form.seconds
    pooled_form = collective_bound(topology, 60, name, root, fabric=False)
    assert lp_bound(topology, collective, 60).seconds == pooled_form.seconds
    assert certify(pooled_form, topology, root).seconds == pooled_form.seconds


def out_trees(p: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Every rooted tree on p endpoints, as its root and its arcs away from the root: p**(p-1) of them."""
    for root in range(p):
        others = [v for v in range(p) if v != root]
        for parents in product(range(p), repeat=p - 1):
            above = dict(zip(others, parents, strict=True))
            for start in others:
                node, steps = start, 0
                while node != root and steps < p:
                    node, steps = above[node], steps + 1
                if node != root:
                    break
            else:
                yield root, tuple((above[v], v) for v in others)


def best_of_all_tree_pairs(topology: Topology) -> Fraction:
    """Seconds a byte: every pair of an in-tree and an out-tree with the same root, every edge on every rail."""
    network = FlowNetwork.from_topology(topology)
    hubs = range(len(network.endpoints), network.n_nodes)
    port = {(link.tail, link.head): link.ports[0] for link in network.links}
    labelled: dict[int, list[tuple[tuple[int, int, int], ...]]] = {}
    for root, arcs in out_trees(len(network.endpoints)):
        ways = [[(a, hub, b) for hub in hubs if (a, hub) in port and (hub, b) in port] for a, b in arcs]
        labelled.setdefault(root, []).extend(product(*ways))
    program = LinearProgram()
    time = program.variable("T", cost=1)
    pairs: list[int] = []
    load: dict[int, dict[int, int]] = {each: {} for each in range(len(network.ports))}
    for trees in labelled.values():
        for in_tree, out_tree in product(trees, trees):
            pairs.append(program.variable(f"pair {len(pairs)}"))
            for a, hub, b in [*((head, hub, tail) for tail, hub, head in in_tree), *out_tree]:
                for each in (port[a, hub], port[hub, b]):
                    load[each][pairs[-1]] = load[each].get(pairs[-1], 0) + 1
    program.constraint("everything", tuple((pair, Fraction(1)) for pair in pairs), EQUAL, Fraction(1))
    for each, used in load.items():
        coefficients = [(time, -network.ports[each].rate), *((pair, Fraction(n)) for pair, n in used.items())]
        program.constraint(network.ports[each].name, tuple(coefficients), AT_MOST, Fraction(0))
    solved = HighsSolver(program).solve(300.0)
    assert isinstance(solved, Solved)
    vertex = exact_vertex(program, solved)
    assert vertex is not None
    return vertex[0][time]


@pytest.mark.parametrize("seed", sampled(range(30), every=3))
def test_the_lp_is_the_best_of_all_tree_pairs(seed: int) -> None:
    """Pooled, two to four endpoints: every pair of trees there is, mixed as well as can be."""
    topology = pooled(seed, most=4)
    assert lp_bound(topology, "allreduce", 1).seconds == best_of_all_tree_pairs(topology)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_lp_is_the_best_of_all_tree_pairs_of_five(seed: int) -> None:
    rng = random.Random(seed)
    rates = [(Fraction(rng.randint(1, 50)), Fraction(rng.randint(1, 50))) for _ in range(5)]
    topology = Topology(tuple(Server(f"h{i}", 1, (Nic(0, *pair),)) for i, pair in enumerate(rates)))
    assert lp_bound(topology, "allreduce", 1).seconds == best_of_all_tree_pairs(topology)


@pytest.mark.parametrize("seed", sampled(range(40), every=3))
def test_the_lp_is_the_best_of_all_tree_pairs_on_rails(seed: int) -> None:
    """Rail-only, two or three servers: also every choice of rail for every edge."""
    try:
        topology = uneven_rails(seed, 3)
        bound = lp_bound(topology, "allreduce", 1)
    except TopologyError:
        return
    assert bound.seconds == best_of_all_tree_pairs(topology)
    assert bound.gap == 0


def test_uneven_rails_need_the_lp() -> None:
    """On rails the optimum can be above every closed form; it is achieved all the same, by trees that are counted."""
    above = checked = 0
    for seed in range(120):
        try:
            bound = lp_bound(uneven_rails(seed, 8), "allreduce", 1000)
        except TopologyError:
            continue
        checked += 1
        forms = closed_forms(bound.certificate.network, ALLREDUCE, 1000)
        above += bound.seconds > max(form.seconds for form in forms)
        assert bound.gap == 0
        assert pack(bound.certificate).achieved is not None
    assert checked > 40
    assert above > 1


def check_failed_rails(seed: int) -> None:
    """A certified bound and a certified packing of trees, and nothing between them."""
    topology = failed_rails(seed)
    bound = lp_bound(topology, "allreduce", 2**30)
    assert bound.gap == 0
    assert bound.achievable == bound.seconds
    packed = pack(bound.certificate)
    assert packed.achieved is not None and packed.achieved.trees
    replay(read_certificate(packed.to_bytes()), topology)


@pytest.mark.parametrize("seed", range(10))
def test_failed_rails(seed: int) -> None:
    check_failed_rails(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
def test_more_failed_rails(seed: int) -> None:
    check_failed_rails(seed)


def test_sixty_four_servers_of_eight_rails() -> None:
    """Twenty failed NICs among 512: certified from both sides; the file replays."""
    topology = failed_rails(1, n_servers=64, n_failed=20)
    bound = lp_bound(topology, "allreduce", 2**30)
    assert bound.gap == 0
    replay(read_certificate(bound.certificate.to_bytes()), topology)


def random_graph(seed: int) -> tuple[FlowNetwork, str]:
    """2..8 endpoints, up to four switches, half of all links; every third with rates that differ by 10**12."""
    rng = random.Random(seed)
    ends = [f"e{i}" for i in range(rng.randint(2, 8))]
    switches = [f"s{i}" for i in range(rng.randint(0, 4))]
    nodes = [*ends, *switches]
    links = [
        (a, b, Fraction(rng.randint(1, 20)) * (10 ** rng.choice([0, 0, 0, 12]) if seed % 3 == 0 else 1))
        for a in nodes
        for b in nodes
        if a != b and rng.random() < 0.5
    ]
    collective = rng.choice(["allreduce", "allreduce", "allgather", "reducescatter", "broadcast", "reduce"])
    return FlowNetwork.from_links(ends, links, switches), collective


def drawn(kind: int, seed: int) -> Topology | FlowNetwork:
    """A graph, pooled servers, rails that failed, or rails of any rates."""
    if kind == 0:
        return random_graph(3 * seed + 1)[0]
    if kind == 1:
        return pooled(seed, 8)
    return failed_rails(seed, n_servers=4) if kind == 2 else uneven_rails(seed, 5)


def connected(kind: int, seed: int, collective: str) -> tuple[Topology | FlowNetwork, CertifiedBound]:
    """The first one from `seed` on in which all reach each other, with its bound by HiGHS."""
    for number in count(seed):
        with suppress(TopologyError):
            network = drawn(kind, number)
            return network, lp_bound(network, collective, 1000, solver=HighsSolver)
    raise AssertionError


@pytest.mark.parametrize("seed", sampled(range(48), every=3))
def test_cbc_agrees(seed: int) -> None:
    """Two solvers, each from its own cuts and its own basis: one optimum, to the last digit, and certified by both."""
    collective = TREE_COLLECTIVES[seed % len(TREE_COLLECTIVES)]
    network, bound = connected(seed % 4, 100 * seed, collective)
    again = lp_bound(network, collective, 1000, solver=CbcSolver)
    assert again.seconds == bound.seconds
    assert again.gap == 0
    replay(read_certificate(again.certificate.to_bytes()))


def check_random_graph(seed: int) -> None:
    network, collective = random_graph(seed)
    try:
        bound = lp_bound(network, collective, 1000)
    except TopologyError:
        return
    assert bound.gap is not None
    assert 0 <= bound.gap <= (Fraction(1, 10**6) if seed % 3 == 0 else 0)
    replay(read_certificate(bound.certificate.to_bytes()))


@pytest.mark.parametrize("seed", sampled(range(60), every=3))
def test_graphs_with_switches(seed: int) -> None:
    check_random_graph(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 300))
def test_more_graphs_with_switches(seed: int) -> None:
    check_random_graph(seed)
