"""Explanations: gains against the bound of the changed topology, prices against differences, true sentences."""

from __future__ import annotations

import doctest
import json
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.explain import MORE, Gain, explain
from optcc.verify.bounds.network import KINDS_OF

TREE_COLLECTIVES = tuple(KINDS_OF)
"""Those whose bounds are about trees."""


def drawn(seed: int, fabrics: bool) -> Topology:
    """A few servers with one to three NICs, one of them failed at times."""
    rng = random.Random(seed)
    servers = []
    for index in range(rng.randint(2, 4)):
        nics = tuple(
            Nic(rail, Fraction(rng.randint(1, 6)), Fraction(rng.randint(1, 6)), failed=rail == 1 and rng.random() < 0.5)
            for rail in range(rng.randint(1, 3))
        )
        fabric = Fraction(rng.randint(1, 6), 2) if fabrics and rng.random() < 0.7 else None
        servers.append(Server(f"h{index}", rng.randint(1, 3) if fabrics else 1, nics, fabric))
    return Topology(tuple(servers))


def more(topology: Topology, gain: Gain, share: Fraction, out: bool = True, in_: bool = True) -> Topology:
    """The topology with `share` more bandwidth where the gain says, by building it anew."""
    name = gain.where.replace(" fabric", "").partition(", ")[0]
    (index,) = (i for i, server in enumerate(topology.servers) if server.name == name)
    server = topology.servers[index]
    if gain.kind == "fabric":
        assert server.fabric is not None
        changed = replace(server, fabric=server.fabric * (1 + share))
    else:
        alike = [
            i for i, nic in enumerate(server.nics) if not nic.failed and (nic.out, nic.in_) == (gain.out, gain.in_)
        ]
        places = [i for i, nic in enumerate(server.nics) if not nic.failed] if gain.kind == "endpoint" else alike[:1]
        nics = list(server.nics)
        for place in places:
            nic = nics[place]
            nics[place] = replace(nic, out=nic.out * (1 + share * out), in_=nic.in_ * (1 + share * in_))
        changed = replace(server, nics=tuple(nics))
    return replace(topology, servers=(*topology.servers[:index], changed, *topology.servers[index + 1 :]))


@pytest.mark.parametrize("fabrics", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_gains_are_what_the_changed_topology_saves(seed: int, fabrics: bool) -> None:
    """Exactly, for every place, both ways and each way; and the price is the slope at zero."""
    topology = drawn(seed, fabrics)
    root, tiny = seed % topology.n_ranks, Fraction(1, 10**9)
    for collective in TREE_COLLECTIVES:
        bound = collective_bound(topology, 60, collective, root)
        told = explain(topology, 60, collective, root)
        places = sum(len([nic for nic in server.nics if not nic.failed]) > 1 for server in topology.servers)
        assert len(told.gains) >= len(topology.servers) + places
        for gain in told.gains:

            def left(share: Fraction, *ways: bool, gain: Gain = gain, collective: str = collective) -> Fraction:
                return collective_bound(more(topology, gain, share, *ways), 60, collective, root).seconds

            assert gain.both_s == bound.seconds - left(MORE)
            if gain.kind != "fabric":
                assert gain.out_s == bound.seconds - left(MORE, True, False)
                assert gain.in_s == bound.seconds - left(MORE, False, True)
            slope = (bound.seconds - left(tiny)) / tiny / bound.seconds
            assert abs(slope - gain.price) <= 2 * tiny
        assert list(told.gains) == sorted(told.gains, key=lambda each: -each.both_s)


def test_the_straggler_decides() -> None:
    """Both ways bind, so one way alone buys nothing."""
    told = explain(Topology.parse("4@50MB/s,3=25MB/s"), 10**8, segments=8)
    first, *others = told.gains
    assert (first.where, first.price, first.both_s) == ("h3", Fraction(1), 4 - Fraction(40, 11))
    assert first.out_s == first.in_s == 0
    assert not any(gain.both_s for gain in others)
    assert told.words == (
        "h3 decides: 100000000B must leave it at 25MB/s, and as much must reach it, which takes 4.000 s.",
        "A pipelined mixture of trees comes as close to it as one likes: no bound can be higher.",
        "10 % more bandwidth at h3 would save 363.636 ms (9.09 %).",
    )
    assert [row[0] for row in told.gain_card().card().rows] == ["h3", "anywhere else"]
    rows = {row[0]: row[2] for row in told.card().rows}
    assert rows == {
        "ring": "1.5000",
        "r2ccl-balance": "1.5000",
        "r2ccl-allreduce": "1.2500",
        "optcc, 8 segments": "1.1250",
        "optcc": "1.0000",
        "optimal": "1.0000",
    }


def test_everybody_decides() -> None:
    """A mild straggler: the sum binds, and every endpoint's bandwidth counts by its share."""
    told = explain(Topology.parse("4@50MB/s,3=40MB/s"), 10**8)
    assert told.words[0].startswith("All endpoints together decide: 600000000B must cross the network")
    assert sum(gain.price for gain in told.gains) == 1


def test_several_bind_at_once() -> None:
    """Two stragglers: more for one of them saves nothing, and the words say so."""
    told = explain(Topology.parse("4@50MB/s,2=10MB/s,3=10MB/s"), 10**8)
    assert [word.split(" ")[0] for word in told.words[:2]] == ["h2", "h3"]
    assert "would save nothing" in told.words[-1]
    assert told.gain_card().card().rows[0][0] == "anywhere"
    assert {row[0]: row[1] for row in told.card().rows}["optcc"] == "n/a"


def test_one_way_only() -> None:
    """A slow out-port is named as such."""
    told = explain(Topology.parse("4@50MB/s,3=10MB/s:50MB/s"), 10**8)
    assert told.words[0] == "h3 decides: 100000000B must leave it at 10MB/s, which takes 10.000 s."
    assert told.gains[0].out_s == told.gains[0].both_s > told.gains[0].in_s == 0


def test_a_lost_nic_is_worth_a_third_of_what_is_left() -> None:
    """Three of eight NICs are left: each is a third of the server."""
    told = explain(Topology.parse("4x8@50GB/s,2=3/8"), 2**30)
    assert [gain.where for gain in told.gains[:2]] == ["h2", "h2, each of 3 NICs"]
    assert [gain.price for gain in told.gains[:2]] == [1, Fraction(1, 3)]


def test_latency_is_mentioned() -> None:
    """Above and below the rounds."""
    topology = Topology.parse("8@50GB/s").with_latency(Fraction(5, 10**6))
    assert explain(topology, 2**30).words[-1].startswith("With 5.000 us a message it is ")
    assert "3 of them in a row" in explain(topology, 1024).words[-1]


def test_nothing_to_explain() -> None:
    """One endpoint, or no bytes."""
    for text, size in (("1@1GB/s", 64), ("4@1GB/s", 0)):
        told = explain(Topology.parse(text), size)
        assert told.gains == ()
        assert "takes no time" in told.words[0]
        told.card()


@pytest.mark.parametrize("collective", TREE_COLLECTIVES)
def test_json_is_plain(collective: str) -> None:
    """It survives a round trip, and fractions are written as a/b."""
    value = explain(drawn(7, True), 64, collective, segments=4).as_json()
    assert json.loads(json.dumps(value)) == value
    gains = value["gains"]
    assert isinstance(gains, list)
    assert all("/" in gain["price"] for gain in gains)


def test_the_manuals_examples_run() -> None:
    """What docs/bounds.md shows is what happens."""
    page = Path(__file__).parents[4] / "docs" / "bounds.md"
    assert doctest.testfile(str(page), module_relative=False, optionflags=doctest.REPORT_NDIFF).failed == 0
