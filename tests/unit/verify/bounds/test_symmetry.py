"""Symmetry only saves time: orbits are those of automorphisms, and the certified bound is that of the whole program."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from optcc.collective import Collective
from optcc.errors import SolverError
from optcc.topology import Topology
from optcc.verify.bounds import lp
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.network import Demand, FlowNetwork, SharedPort
from optcc.verify.bounds.replay import replay
from optcc.verify.bounds.symmetry import Orbits, Symmetry, find_symmetry

SIZE = 2**30
ALLREDUCE = Demand("allreduce", None)
TEXTS = {
    "2xdgx-h100": (4, 4),
    "3x4@50GB/s+450GB/s,1=0..1/4": (8, 11),
    "4x2@50GB/s+450GB/s,1=1/2,2=1/2": (7, 12),
    "4x2@50GB/s+450GB/s/rails": (5, 8),
    "4x2@50GB/s+450GB/s/2:2": (5, 8),
    "4@1GB/s,3=1GB/s:2GB/s": (3, 4),
}


def network_of(text: str) -> FlowNetwork:
    return FlowNetwork.from_topology(Topology.parse(text), fabric=True)


@pytest.mark.parametrize("text", TEXTS)
def test_generators_are_automorphisms(text: str) -> None:
    """They map the links between nodes, with their rates, onto themselves, and leave the expected number of orbits of
    nodes and links."""
    network = network_of(text)
    group = find_symmetry(network, ALLREDUCE)
    links = Counter((link.tail, link.head, network.ports[link.ports[0]].rate) for link in network.links)
    for moves in group.generators:
        assert sorted(moves) == sorted(moves.values())
        assert links == Counter(
            {(moves.get(a, a), moves.get(b, b), rate): count for (a, b, rate), count in links.items()}
        )
    assert (len(group.nodes.first), len(group.links.first)) == TEXTS[text]


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bound_is_that_without_symmetry(text: str, collective: str) -> None:
    """To the last digit, packing included, and the certificate is one of the topology."""
    topology = Topology.parse(text)
    wanted = Collective(collective, topology.n_ranks)
    found = lp_bound(topology, wanted, SIZE, fabric=True, symmetric=True)
    assert found.seconds == lp_bound(topology, wanted, SIZE, fabric=True).seconds
    assert found.gap == 0
    replay(found.certificate, topology)


def test_the_root_stays_in_place() -> None:
    """A Broadcast's root is alone in its orbit; without a root all four servers are alike."""
    network = network_of("4@1GB/s")
    assert find_symmetry(network, ALLREDUCE).nodes.sizes == (4, 1)
    roots = tuple(Fraction(int(v == 2)) for v in range(4))
    assert find_symmetry(network, Demand("broadcast", roots)).nodes.of == (0, 0, 1, 0, 2)


def test_ports_follow_their_links() -> None:
    """Three equal links into a switch: all are alike, but not where a third shares a port with one of the first two,
    nor where ports of the same rates come in another order."""
    into, outof = [(each, "s", 1) for each in "abc"], [("s", each, 1) for each in "abc"]
    network = FlowNetwork.from_links("abc", into + outof, "s")
    assert find_symmetry(network, ALLREDUCE).nodes.of == (0, 0, 0, 1)
    a, b, c, *others = network.links
    shared = replace(network, links=(a, b, replace(c, ports=a.ports), *others))
    assert find_symmetry(shared, ALLREDUCE).nodes.of == (0, 1, 2, 3)
    cables = tuple(SharedPort(f"cable {number}", Fraction(2)) for number in range(3))
    crossed = replace(
        network,
        ports=(*network.ports, *cables),
        links=(replace(a, ports=(0, 6)), replace(b, ports=(7, 1)), replace(c, ports=(2, 8)), *others),
    )
    assert find_symmetry(crossed, ALLREDUCE).nodes.of == (0, 1, 2, 3)


def test_images_are_the_whole_orbit() -> None:
    """Of one GPU, of a server, of all but one; more images than nodes are not listed."""
    network = network_of("4x2@50GB/s+450GB/s")
    group = find_symmetry(network, ALLREDUCE)
    every = frozenset(range(network.n_nodes))
    for held, count in ((frozenset({0}), 8), (every - {0}, 8), (frozenset({0, 1}), 4), (every, 1)):
        images = group.images(held)
        assert images is not None
        assert images[0] == held
        assert len(set(images)) == len(images) == count
    # one GPU of each of three servers: 4 * 2 * 2 * 2, more than 17 nodes
    assert group.images(frozenset({0, 2, 4})) is None


def test_a_false_symmetry_proves_nothing_untrue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever two orbits are taken for one, the certificate holds, and no bound is above the true one."""
    topology = Topology.parse("3x2@50GB/s+450GB/s,1=1/2")
    network = FlowNetwork.from_topology(topology)
    truth = lp_bound(topology, "allreduce", SIZE)
    less = refused = 0
    p = len(network.endpoints)
    for a, b in combinations(range(p), 2):

        def wrong(network: FlowNetwork, demand: Demand, a: int = a, b: int = b) -> Symmetry:
            true = find_symmetry(network, demand)
            return replace(true, nodes=Orbits.joined(network.n_nodes, [*enumerate(_least(true.nodes)), (a, b)]))

        monkeypatch.setattr(lp, "find_symmetry", wrong)
        try:
            bound = lp_bound(topology, "allreduce", SIZE, symmetric=True)
        except SolverError:
            refused += 1
            continue
        replay(bound.certificate, topology)
        assert bound.seconds <= truth.seconds
        assert bound.achievable is None or bound.achievable >= truth.seconds
        less += 1
    assert less > 0


def _least(orbits: Orbits) -> list[int]:
    """The least member of each node's orbit."""
    return [orbits.first[orbit] for orbit in orbits.of]


def test_the_program_does_not_grow_with_the_servers() -> None:
    """24 servers of eight GPUs, one with half of its NICs: as many orbits as with 4, and its NICs are the bound."""
    sizes = []
    for count in (4, 24):
        network = network_of(f"{count}xdgx-h100,1=4..7/8")
        group = find_symmetry(network, ALLREDUCE)
        sizes.append((len(group.nodes.first), len(group.links.first), len(group.ports.first)))
    assert sizes[0] == sizes[1] == (8, 11, 10)
    topology = Topology.parse("24xdgx-h100,1=4..7/8")
    bound = lp_bound(topology, "allreduce", SIZE, fabric=True, symmetric=True)
    assert bound.seconds == bound.achievable == Fraction(SIZE, 4 * 50 * 10**9)
    replay(bound.certificate, topology)
