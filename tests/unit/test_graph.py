"""Graphs of GPUs and switches: routes, text forms, TOML files, networkx, and what cannot be."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import networkx as nx
import pytest

from optcc.errors import InputError, TopologyError
from optcc.graph import Graph, GraphLink, mi250, torus
from optcc.servers import enclose
from optcc.simulate import simulate
from optcc.topology import Nic, Server, Topology
from optcc.transfers import Transfers
from tests.differential.test_simulate_reference import transfers_of

GB = 10**9


def toml(folder: Path, text: str) -> Topology:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return Topology.parse(str(path))


def route(topology: Topology, src: int, dst: int) -> list[str]:
    """The links from one rank to another, by name."""
    graph = topology.wired
    assert graph is not None
    return [graph.name_of(graph.links[number]) for number in graph.routes[src][dst]]


def one(src: int, dst: int, n_ranks: int) -> Transfers:
    return transfers_of([(src, dst)], [8], [[]], [[]], n_ranks)


def test_a_gpu_reaches_its_server_by_the_fabric_and_others_by_its_own_nic() -> None:
    topology = Topology.parse("2x2@50GB/s+450GB/s")
    assert route(topology, 0, 1) == ["h0 gpu 0->fabric h0", "fabric h0->h0 gpu 1"]
    assert route(topology, 0, 3) == ["h0 gpu 0->core", "core->h1 gpu 1"]
    assert Topology.parse("2x2@50GB/s").wired is None
    assert Topology.parse("2@50GB/s+450GB/s").wired is None  # one GPU a server: its NIC is the server's


def test_a_gpu_without_a_nic_has_no_route_out_of_its_server() -> None:
    topology = Topology.parse("2x4@50GB/s+450GB/s,1=2..3/4")
    graph = topology.wired
    assert graph is not None
    assert sorted(graph.routes[4]) == [5, 6, 7]
    assert sorted(graph.routes[6]) == [0, 1, 2, 3, 4, 5, 7]
    with pytest.raises(TopologyError, match="no route from h0 gpu 0 to h1 gpu 0 but through GPUs"):
        simulate(one(0, 4, 8), topology)


def test_rail_only_a_nic_reaches_its_own_rail() -> None:
    topology = Topology.parse("3x4@50GB/s+450GB/s/rails")
    graph = topology.wired
    assert graph is not None
    assert topology.rail_only
    assert sorted(graph.routes[5]) == [1, 4, 6, 7, 9]


def test_pods_are_leaf_switches() -> None:
    topology = Topology.parse("4x2@50GB/s+450GB/s/2:2,0=1/2")
    assert route(topology, 0, 2) == ["h0 gpu 0->pod0 core", "pod0 core->h1 gpu 0"]
    assert route(topology, 0, 5) == [
        "h0 gpu 0->pod0 core",
        "pod0 core->core",
        "core->pod1 core",
        "pod1 core->h2 gpu 1",
    ]
    assert topology.pods[0].up == 100 * GB
    railed = Topology.parse("4x2@50GB/s+450GB/s/rails/2:2")
    assert railed.rail_only
    assert railed.pods[0].up == 50 * GB
    assert route(railed, 0, 4)[1:3] == ["pod0 rail 0->rail 0", "rail 0->pod1 rail 0"]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("4xdgx-h100,3=4/8", "4x8@50GB/s+450GB/s,3=0..3/8"),
        ("2xdgx-a100/rails", "2x8@25GB/s+300GB/s/rails"),
        ("4xdgx-a100/2:4", "4x8@200Gbit/s+300GB/s/2:4"),
    ],
)
def test_presets_are_short_for_texts(text: str, other: str) -> None:
    assert Topology.parse(text) == replace(Topology.parse(other), text=text)


def test_of_several_routes_the_fastest_of_the_shortest_is_taken() -> None:
    links = [("a", "s", 2), ("s", "b", 2), ("a", "t", 3), ("t", "b", 3), ("t", "u", 9), ("u", "b", 9), ("b", "a", 1)]
    number = {name: at for at, name in enumerate("abstu")}
    made = Graph(
        ("a", "b"), tuple("stu"), tuple(GraphLink(number[x], number[y], Fraction(rate)) for x, y, rate in links)
    )
    assert made.routes[0][1] == (2, 3)
    assert made.routes[1][0] == (6,)


def test_a_torus_and_boxes_of_mi250() -> None:
    topology = Topology.parse("torus:4x3@50GB/s:25GB/s")
    assert topology.n_ranks == 12
    assert topology.out[0] == 2 * 75 * GB
    graph = torus([4, 3], Fraction(50 * GB), Fraction(25 * GB))
    assert topology.graph == graph
    assert sorted(graph.routes[0]) == [1, 2, 3, 9]
    boxes = Topology.parse("2xmi250")
    assert (boxes.n_ranks, len(boxes.servers), boxes.servers[0].gpus) == (32, 2, 16)
    assert boxes.out == (Fraction(16 * 16 * GB),) * 2
    for gpu, ways in enumerate(mi250(1).routes):  # every die has at least six links to others
        links = [link for link in mi250(1).links if link.tail == gpu]
        assert sum(link.rate for link in links) / (50 * GB) in (6, 7)
        assert len(ways) == len(links)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("torus:4x1@1GB/s", "every dimension must be at least two"),
        ("torus:300x300@1GB/s", "at most 65536 ranks"),
        ("0xmi250", "at least one box"),
        ("2xdgx-h200", "no such file"),
        ("2x4@1GB/s+2", "rate '2'"),
        ("2x4@1GB/s+2GB/s,1=2..4/4", "I..J/4"),
        ("2x4@1GB/s+2GB/s,1=3..2/4", "no NIC is left"),
        ("4x2@1GB/s+2GB/s/3:2", "must divide"),
    ],
)
def test_texts_that_are_refused(text: str, part: str) -> None:
    with pytest.raises((InputError, TopologyError)) as refusal:
        Topology.parse(text)
    assert part in str(refusal.value)


FILE = """
latency = "5us"
switches = ["leaf"]
gpus = [{ name = "a", server = "h0" }, { name = "b", server = "h0" }, { name = "c" }]
links = [
  { from = "a", to = "b", rate = "100GB/s" },
  { from = "a", to = "leaf", rate = "50GB/s" },
  { from = "b", to = "leaf", rate = "50GB/s", back = "25GB/s" },
  { from = "c", to = "leaf", rate = "50GB/s", one_way = true },
  { from = "leaf", to = "c", rate = "40GB/s", one_way = true },
]
"""


def test_a_file_of_links(tmp_path: Path) -> None:
    topology = toml(tmp_path, FILE)
    assert [(server.name, server.gpus) for server in topology.servers] == [("h0", 2), ("c", 1)]
    assert [*topology.out] == [100 * GB, 50 * GB]
    assert [*topology.in_] == [75 * GB, 40 * GB]
    assert route(topology, 0, 1) == ["a->b"]
    assert route(topology, 2, 1) == ["c->leaf", "leaf->b"]
    again = toml(tmp_path, topology.to_toml())
    assert again == topology


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('from = "a", to = "b"', 'from = "x", to = "b"', "links[0].from: 'x': must be one of gpus or switches"),
        ('to = "b"', 'to = "a"', "links[0].to: 'a': must be another node"),
        ('"100GB/s"', '"100"', "links[0].rate: rate '100'"),
        ('"25GB/s"', '"0GB/s"', "links[2].back: rate '0GB/s'"),
        ('"40GB/s", one_way = true', '"40GB/s", one_way = true, back = "1GB/s"', "links[4].back: must be absent"),
        ('"leaf", to = "c"', '"leaf", to = "b"', "links[4]: 'leaf' and 'b' are linked already"),
        ('switches = ["leaf"]', 'switches = ["leaf", "a"]', "switches[1]: 'a': the name is used twice"),
        (
            '{ name = "c" }',
            '{ name = "c" }, { name = "d", server = "h0" }',
            "gpus[3].server: 'h0': its GPUs must follow",
        ),
        ('{ name = "c" }', '{ name = "c", rank = 1 }', "`rank` - at `$.gpus[2]`"),
        ("latency", "rail_only = true\nlatency", "must stand without servers, pods and rail_only"),
        ("5us", "5", "latency: time '5'"),
        ('{ name = "c" }', '{ name = "c" }, { name = "d" }', "server d: no NIC is left"),
    ],
)
def test_files_of_links_that_are_refused(tmp_path: Path, old: str, new: str, part: str) -> None:
    assert old in FILE
    with pytest.raises((InputError, TopologyError)) as refusal:
        toml(tmp_path, FILE.replace(old, new, 1))
    assert part in str(refusal.value)


def test_a_file_whose_nics_belong_to_gpus(tmp_path: Path) -> None:
    topology = Topology.parse("4x2@50GB/s+450GB/s/rails/2:2,0=1/2")
    again = toml(tmp_path, topology.to_toml())
    assert again == topology
    assert again.wired == topology.wired
    text = topology.to_toml()
    for old, new, part in (
        ("gpu = 1", "gpu = 2", "NIC of GPU 2: must be below 2"),
        (", gpu = 1", "", "NICs of GPUs and NICs of none"),
        ('fabric = "450GB/s"\n', "", "must have a fabric"),
    ):
        with pytest.raises((InputError, TopologyError), match=part):
            toml(tmp_path, text.replace(old, new, 1))
    pooled = Server("p", 2, (Nic(0, Fraction(1), Fraction(1)),), Fraction(2))
    with pytest.raises(TopologyError, match="server p: its NICs must belong to its GPUs"):
        Topology((*topology.servers, pooled))


def test_a_graph_fits_its_servers() -> None:
    graph = torus([3], Fraction(1), Fraction(1))
    topology = Topology(enclose(graph, graph.gpus), graph=graph)
    with pytest.raises(TopologyError, match="graph of 3 GPUs: the servers have 2"):
        replace(topology, servers=topology.servers[:2])
    with pytest.raises(TopologyError, match="must stand without pods and rails"):
        replace(topology, rail_only=True)
    with pytest.raises(TopologyError, match="a graph has links"):
        topology.under([[(1.0, 1.0)]] * 3)
    with pytest.raises(TopologyError, match="not supported for a graph"):
        topology.of_ranks([0, 1])
    scaled = topology.scaled(Fraction(1, 2))
    assert scaled.graph is not None
    assert {link.rate for link in scaled.graph.links} == {Fraction(1, 2)}


@pytest.mark.parametrize(
    ("links", "part"),
    [
        ((GraphLink(0, 0, Fraction(1)),), "must join two nodes"),
        ((GraphLink(0, 3, Fraction(1)),), "must join two nodes of 3"),
        ((GraphLink(0, 1, Fraction(0)),), "a->b: rate 0"),
        ((GraphLink(0, 2, Fraction(1)), GraphLink(0, 2, Fraction(2))), "a->s: is there twice"),
    ],
)
def test_links_that_cannot_be(links: tuple[GraphLink, ...], part: str) -> None:
    with pytest.raises(TopologyError, match=part):
        Graph(("a", "b"), ("s",), links)
    with pytest.raises(TopologyError, match="a: the name is used twice"):
        Graph(("a", "b"), ("a",), ())


def test_networkx_and_back() -> None:
    for text in ("torus:3x3@50GB/s", "2xmi250", "4xdgx-h100/2:2,3=4..7/8", "4x2@50GB/s+450GB/s/rails"):
        topology = Topology.parse(text)
        again = Topology.from_networkx(topology.to_networkx())
        assert again.wired is not None
        assert topology.wired is not None
        assert (again.wired.gpus, again.wired.switches) == (topology.wired.gpus, topology.wired.switches)
        assert sorted(again.wired.links) == sorted(topology.wired.links)
        assert [server.gpus for server in again.servers] == [server.gpus for server in topology.servers]


def test_networkx_graphs_that_are_refused() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_edge("a", "b", capacity="50GB/s")
    graph.add_edge("b", "a", capacity=2)
    assert Topology.from_networkx(graph).out == (Fraction(50 * GB), Fraction(2))
    for wrong in (0, -1, None, "50", True, float("nan"), float("inf")):
        graph.edges["b", "a"]["capacity"] = wrong
        with pytest.raises(InputError, match=r"networkx: edges\['b', 'a'\].capacity"):
            Topology.from_networkx(graph)
    with pytest.raises(InputError, match="MultiDiGraph: must be a DiGraph"):
        Topology.from_networkx(nx.MultiDiGraph(graph))
    with pytest.raises(InputError, match="Graph: must be a DiGraph"):
        Topology.from_networkx(nx.Graph(graph))


def test_what_pooled_servers_can_exchange_is_the_flow_of_networkx() -> None:
    """From a GPU to a GPU of another server: the least of what the two servers send and receive, and of uplinks."""
    rng = random.Random(7)
    for _ in range(30):
        servers = tuple(
            Server(
                f"h{index}",
                rng.randint(1, 3),
                tuple(Nic(rail, Fraction(rng.randint(1, 9)), Fraction(rng.randint(1, 9))) for rail in range(2)),
            )
            for index in range(rng.randint(2, 5))
        )
        topology = Topology(servers, rail_only=rng.random() < 0.5)
        graph = topology.to_networkx()
        names = [name for name, data in graph.nodes(data=True) if not data.get("switch")]
        at = topology.rank_server
        for src in range(topology.n_ranks):
            for dst in range(topology.n_ranks):
                if at[src] == at[dst]:
                    continue
                a, b = servers[at[src]], servers[at[dst]]
                if topology.rail_only:  # a third server may forward, so there may be more
                    direct = sum(min(one.out, two.in_) for one, two in zip(a.nics, b.nics, strict=True))
                else:
                    direct = min(a.out, b.in_)
                flow = nx.maximum_flow_value(graph, names[src], names[dst])
                assert direct <= flow <= min(a.out, b.in_)
                assert topology.rail_only or flow == direct
