"""The closed forms against brute force: all spanning trees, all sequences of transfers, all rounds of messages.

`tests.differential.trees` shares no code with the closed forms, and its optimum is proved in rationals.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import permutations, product

import pytest

from optcc.planner import build_plan
from optcc.simulate import MODELS, simulate
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_forms import Bound, allreduce_bound, collective_bound, latency_bound, latency_rounds
from optcc.verify.bounds.network import KINDS_OF
from tests.differential.trees import Ports, in_trees, least_time, out_trees, paths, solve
from tests.sample import sampled

TREE_COLLECTIVES = tuple(KINDS_OF)
"""Those whose bounds are about trees."""

pytest.importorskip("scipy", reason="no scipy: pip install scipy")

SMALL = [
    (1, 1),
    (1, 1, 1),
    (1, 1, 1, 1),
    (2,),
    (3,),
    (4,),
    (2, 1),
    (1, 2),
    (2, 2),
    (3, 1),
    (1, 3),
    (2, 1, 1),
    (1, 2, 1),
]
FIVE = [(1, 1, 1, 1, 1), (5,), (4, 1), (1, 4), (3, 2), (2, 2, 1), (3, 1, 1), (2, 1, 1, 1)]


def drawn(rng: random.Random, shape: tuple[int, ...]) -> Topology:
    """Servers of these many GPUs; half of the topologies have out = in, half of the servers a fabric, some slow."""
    same, slow = rng.random() < 0.5, rng.choice((1, 2, 4))
    servers = []
    for index, gpus in enumerate(shape):
        out = Fraction(rng.randint(1, 12))
        in_ = out if same else Fraction(rng.randint(1, 12))
        fabric = Fraction(rng.randint(1, 10), slow) if len(shape) == 1 or rng.random() < 0.5 else None
        servers.append(Server(f"h{index}", gpus, (Nic(0, out, in_),), fabric))
    return Topology(tuple(servers))


def flat(rates: list[tuple[int, int]]) -> Topology:
    """One GPU a server."""
    return Topology(
        tuple(Server(f"h{i}", 1, (Nic(0, Fraction(out), Fraction(in_)),)) for i, (out, in_) in enumerate(rates))
    )


def compare(topology: Topology, rng: random.Random) -> None:
    """Every collective's closed form is the optimum over all trees, or below it where it does not claim to be."""
    for collective in TREE_COLLECTIVES:
        root = rng.randrange(topology.n_ranks)
        bound = collective_bound(topology, 1, collective, root)
        least = least_time(topology, collective, root)
        said = f"{collective} from {root} on {topology.servers}: {bound.seconds} and {least}"
        assert bound.seconds == least if bound.tight else bound.seconds <= least, said


@pytest.mark.parametrize("case", sampled(range(24), every=5))
def test_all_trees_up_to_four_ranks(case: int) -> None:
    """Closed form = linear program over all trees, exactly: flat and with fabrics, asymmetric, all five collectives."""
    rng = random.Random(case)
    for shape in SMALL:
        compare(drawn(rng, shape), rng)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(20))
def test_all_trees_on_five_ranks(case: int) -> None:
    """The same with 125 trees from each root, and all pairs of them."""
    rng = random.Random(case)
    for shape in FIVE:
        compare(drawn(rng, shape), rng)


def kind(bound: Bound, port: str) -> str:
    """A term's label without numbers; for AllReduce, out and in mirror each other and count as one."""
    label = re.sub(r"h\d+(, h\d+)*", "h", port)
    return label.replace("in ", "out ") if bound.collective == "allreduce" else label


KINDS = {
    "allreduce": {
        "out h",
        "out of all endpoints together",
        "fabric h",
        "fabric h and out of all endpoints",
        "fabric h, out h and out h",
        "fabric h and out h",
        "fabric h and out of all but h",
        "fabric h and out and out of all but h",
    },
    "allgather": {
        "out h",
        "in h",
        "out of all endpoints together",
        "fabric h",
        "fabric h and out of all endpoints",
        "fabric h and in h",
        "fabric h and out of all but h",
    },
    "reduce": {
        "out h",
        "in h",
        "in of all endpoints together",
        "fabric h",
        "fabric h and in of all endpoints",
        "fabric h and out h",
        "fabric h and in of all but h",
    },
}


@pytest.mark.parametrize("collective", KINDS)
def test_every_kind_of_term_is_needed(collective: str) -> None:
    """Each is, somewhere, all that keeps the closed form from being too low."""
    rng, wanted = random.Random(3), set(KINDS[collective])
    for _ in range(10_000):
        topology = drawn(rng, rng.choice(SMALL))
        root = rng.randrange(topology.n_ranks)
        bound = collective_bound(topology, 1, collective, root)
        kinds = {kind(bound, port) for port in bound.binding}
        assert kinds <= KINDS[collective]
        if len(kinds) == 1 and kinds <= wanted:
            assert least_time(topology, collective, root) == bound.seconds
            wanted -= kinds
        if not wanted:
            return
    pytest.fail(f"never alone: {wanted}")


def by_hand(*servers: tuple[int, int, int, Fraction | None]) -> Topology:
    """Servers of (GPUs, out, in, fabric)."""
    return Topology(
        tuple(
            Server(f"h{i}", gpus, (Nic(0, Fraction(out), Fraction(in_)),), fabric)
            for i, (gpus, out, in_, fabric) in enumerate(servers)
        )
    )


@pytest.mark.parametrize(
    ("topology", "binding"),
    [
        (by_hand((3, 3, 3, Fraction(1, 4)), (1, 9, 9, None)), "fabric h0, out h0 and in h0"),
        (by_hand((3, 9, 9, Fraction(1, 4)), (1, 3, 3, None)), "fabric h0 and out and in of all but h0"),
        (by_hand((2, 4, 4, Fraction(1)), (2, 4, 4, Fraction(1))), "fabric h0, h1 and out of all endpoints"),
    ],
)
def test_terms_around_and_without_a_server(topology: Topology, binding: str) -> None:
    """Instances in which these bind."""
    bound = collective_bound(topology, 1)
    assert binding in bound.binding
    assert bound.seconds == least_time(topology)


def test_brute_force_finds_what_it_should() -> None:
    """Cayley's numbers, and the fault-free ring."""
    assert [len(out_trees(p, 0)) for p in range(2, 6)] == [1, 3, 16, 125]
    assert {tuple(sorted(tree)) for tree in in_trees(3, 2)} == {((0, 1), (1, 2)), ((0, 2), (1, 2)), ((0, 2), (1, 0))}
    assert len(paths(4)) == 4 * 12  # each of the 12 paths from each of its nodes
    assert least_time(flat([(1, 1)] * 4)) == Fraction(3, 2)


# Paths suffice while T* <= 2n/B


def with_paths(topology: Topology) -> Fraction:
    """The least time if every tree pair is a path, up and down."""
    ports = Ports(topology)
    found = sorted({(0, ports.loads(path)) for path in paths(topology.n_ranks)})
    return solve(ports.rates, found, [Fraction(1)])


@pytest.mark.parametrize("case", range(40))
def test_paths_suffice_up_to_twice_the_message(case: int) -> None:
    """Equal out and in: paths reach T* iff no endpoint has to carry more than twice the message."""
    rng = random.Random(case)
    p = rng.randint(3, 4)
    rates = [rng.randint(2, 8) for _ in range(p)]
    topology = flat([(rate, rate) for rate in rates])
    least = allreduce_bound(topology, 1).seconds
    if sum(min(Fraction(2), least * rate) for rate in rates) >= 2 * (p - 1):
        assert with_paths(topology) == least
    else:
        assert with_paths(topology) > least
    if least * max(rates) <= 2:
        assert with_paths(topology) == least


def test_many_stragglers_want_degrees_above_two() -> None:
    """One fast endpoint among slow ones: the star is needed."""
    topology = flat([(6, 6), (2, 2), (2, 2), (2, 2)])
    assert allreduce_bound(topology, 1).seconds == Fraction(1, 2)
    assert with_paths(topology) == Fraction(2, 3)


# Transfers of an element, without assuming trees


def transfers_needed(p: int) -> int:
    """The least number of transfers after which everybody knows every contribution, over all sequences."""
    start, everybody = tuple(1 << v for v in range(p)), tuple([(1 << p) - 1] * p)
    seen, level, count = {start}, [start], 0
    while everybody not in seen:
        found = set()
        for known in level:
            for src, dst in permutations(range(p), 2):
                after = (*known[:dst], known[dst] | known[src], *known[dst + 1 :])
                found.add(after)
        level = list(found - seen)
        seen |= found
        count += 1
    return count


@pytest.mark.parametrize("p", [2, 3, 4])
def test_an_element_takes_two_transfers_less_than_two_each(p: int) -> None:
    """2(p - 1), whatever the order and whoever sends what to whom: no tree is assumed."""
    assert transfers_needed(p) == 2 * (p - 1)


def rounds_needed(p: int, collective: str) -> int:
    """The least number of rounds of messages, one out and one in for each rank, over all choices."""
    states, count = {tuple(1 << v for v in range(p))}, 0
    while not any(_finished(known, p, collective) for known in states):
        # More knowledge never hurts, so in each round everybody sends; a fixed point of the permutation is idle.
        states = {
            tuple(known[v] | known[sender] for v, sender in enumerate(senders))
            for known, senders in product(states, permutations(range(p)))
        }
        count += 1
    return count


def _finished(known: tuple[int, ...], p: int, collective: str) -> bool:
    """AllReduce, AllGather and ReduceScatter: everybody knows of everybody. Broadcast: of rank 0. Reduce: 0 of all."""
    everybody = (1 << p) - 1
    if collective == "broadcast":
        return all(each & 1 for each in known)
    if collective == "reduce":
        return known[0] == everybody
    return all(each == everybody for each in known)


@pytest.mark.parametrize("collective", TREE_COLLECTIVES)
@pytest.mark.parametrize("p", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_rounds(p: int, collective: str) -> None:
    """ceil(log2 p), and it can be done."""
    assert rounds_needed(p, collective) == latency_rounds(p)


# The simulator, which knows fabrics and latency, and nothing of bounds


@pytest.mark.parametrize("case", range(30))
def test_no_simulated_plan_beats_the_bound(case: int) -> None:
    """Ring and OptCC on servers of several GPUs, random rates, fabrics and latency, both models of ports."""
    rng = random.Random(case)
    topology = drawn(rng, rng.choice([(2, 2), (3, 1), (4, 4), (2, 1, 1), (3, 3, 2), (1, 1, 1, 1)]))
    topology = topology.with_latency(Fraction(rng.randint(0, 3) * 1000))  # rates are a few B/s, so this is little
    flat_one = Topology.parse(f"{topology.n_ranks}@1GB/s")
    plan = build_plan(rng.choice(["ring", "optcc"]), flat_one, 2**20, segments=4)
    least = latency_bound(topology, 2**20, exclusive=False).seconds
    for model in MODELS:
        assert simulate(plan, topology, model=model).seconds >= float(least) * (1 - 1e-12)
