"""The closed form against the formula written out, and certificates that no altered number survives."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from optcc.errors import InputError, SolverError, TopologyError
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds import allreduce_bound, ring_seconds
from optcc.verify.certificate import Certificate, certify, replay


def endpoints(rates: list[tuple[int, int]]) -> Topology:
    """One server of one NIC for each (out, in)."""
    return Topology(
        tuple(Server(f"h{i}", 1, (Nic(0, Fraction(out), Fraction(in_)),)) for i, (out, in_) in enumerate(rates))
    )


@pytest.mark.parametrize("case", range(100))
def test_the_bound_is_the_formula(case: int) -> None:
    """Random asymmetric rates: the maximum of the theorem, in exact arithmetic; binding ports attain it."""
    rng = random.Random(case)
    p, n = rng.randint(2, 9), rng.randint(1, 10**6)
    rates = [(rng.randint(1, 50), rng.randint(1, 50)) for _ in range(p)]
    wanted = max(
        *(Fraction(n, out) for out, _ in rates),
        *(Fraction(n, in_) for _, in_ in rates),
        Fraction(2 * (p - 1) * n, sum(out for out, _ in rates)),
        Fraction(2 * (p - 1) * n, sum(in_ for _, in_ in rates)),
    )
    topology = endpoints(rates)
    bound = allreduce_bound(topology, n)
    assert bound.seconds == wanted
    ports = {f"out h{i}" for i, (out, _) in enumerate(rates) if Fraction(n, out) == wanted}
    ports |= {f"in h{i}" for i, (_, in_) in enumerate(rates) if Fraction(n, in_) == wanted}
    assert {port for port in bound.binding if "together" not in port} == ports
    assert bound.binding
    assert certify(bound, topology).seconds == wanted


@pytest.mark.parametrize("p", range(2, 12))
@pytest.mark.parametrize("slow", [1, 2, 3, 7])
def test_one_straggler(p: int, slow: int) -> None:
    """max(l, 2l(p-1)/(l(p-1)+1)) times n/B, and the ring takes l times its fault-free time."""
    topology = endpoints([(42, 42)] * (p - 1) + [(42 // slow, 42 // slow)])
    unit = Fraction(420, 42)
    assert allreduce_bound(topology, 420).seconds == unit * max(
        Fraction(slow), Fraction(2 * slow * (p - 1), slow * (p - 1) + 1)
    )
    assert ring_seconds(topology, 420) == unit * slow * Fraction(2 * (p - 1), p)


def test_nothing_to_send_takes_no_time() -> None:
    """One endpoint, or no bytes."""
    for topology, size in ((Topology.parse("1@1GB/s"), 10**6), (Topology.parse("4@1GB/s"), 0)):
        bound = allreduce_bound(topology, size)
        assert bound.seconds == 0
        assert certify(bound, topology).seconds == 0


def test_servers_pool_their_nics() -> None:
    """Four servers of eight NICs, one with three left: 8/3 of the message time of a whole server."""
    topology = Topology.parse("4x8@50GB/s,2=3/8")
    assert allreduce_bound(topology, 3 * 10**9).seconds == Fraction(3 * 10**9, 150 * 10**9)


def test_refusals() -> None:
    """Negative sizes, and rail-only servers that lost different rails."""
    with pytest.raises(InputError, match="-4"):
        allreduce_bound(Topology.parse("2@1GB/s"), -4)
    with pytest.raises(TopologyError, match="rail"):
        allreduce_bound(replace(Topology.parse("2x2@1GB/s,1=1/2"), rail_only=True), 4)
    assert allreduce_bound(replace(Topology.parse("2x2@1GB/s"), rail_only=True), 4).seconds > 0


CASES = ["4@50MB/s,3=25MB/s", "4@50MB/s,3=49MB/s", "5@50MB/s,1=10MB/s:20MB/s", "2@3B/s,1=2B/s"]


@pytest.mark.parametrize("text", CASES)
def test_no_altered_number_survives_replay(text: str) -> None:
    """Every number and every port of a certificate, changed, is refused."""
    topology = Topology.parse(text)
    certificate = certify(allreduce_bound(topology, 9000), topology)
    replay(certificate, topology)
    p = len(topology.servers)
    altered = [
        replace(certificate, seconds=certificate.seconds + Fraction(1, 10**12)),
        replace(certificate, seconds=certificate.seconds * 2),
        replace(certificate, seconds=-certificate.seconds),
        replace(certificate, seconds=Fraction(0)),
        replace(certificate, bytes=certificate.bytes + 1),
        replace(certificate, bytes=certificate.bytes * 2, seconds=certificate.seconds * 2),
        replace(certificate, size_bytes=certificate.size_bytes + 1),
        replace(certificate, size_bytes=0),
        replace(certificate, ports=()),
        replace(certificate, ports=("out nobody",)),
        replace(certificate, ports=("sideways h0",)),
        replace(certificate, ports=(*certificate.ports, certificate.ports[0])),
        replace(certificate, ports=(*(f"out h{i}" for i in range(p - 1)), "in h0")),
    ]
    if p > 3:
        altered.append(replace(certificate, ports=("out h0", "out h1")))
    for each in altered:
        with pytest.raises(SolverError):
            replay(each, topology)


def test_a_certificate_does_not_fit_another_topology() -> None:
    """Replay recomputes from the topology it is given."""
    certificate = certify(allreduce_bound(Topology.parse(CASES[0]), 9000), Topology.parse(CASES[0]))
    for text in ("4@50MB/s,3=26MB/s", "4@50MB/s", "3@50MB/s"):
        with pytest.raises(SolverError):
            replay(certificate, Topology.parse(text))


@pytest.mark.parametrize(
    ("text", "certificate"),
    [
        ("1@1B/s", Certificate("m", 100, ("out h0",), Fraction(100), Fraction(100))),
        ("1@1B/s", Certificate("m", 100, ("in h0",), Fraction(0), Fraction(0))),
        ("3@1B/s", Certificate("m", 0, (), Fraction(5), Fraction(0))),
        ("3@1B/s", Certificate("m", -7, ("out h0",), Fraction(-7), Fraction(-7))),
        ("1@1B/s", Certificate("m", -7, (), Fraction(0), Fraction(0))),
    ],
)
def test_forged_certificates_of_degenerate_cases(text: str, certificate: Certificate) -> None:
    """A lone endpoint need not send anything; no port carries no bytes; no message is shorter than nothing."""
    with pytest.raises(SolverError):
        replay(certificate, Topology.parse(text))


def test_a_server_may_have_any_name(tmp_path: Path) -> None:
    """A server named like a sum of ports still gets its own certificate."""
    path = tmp_path / "names.toml"
    path.write_text(
        '[[servers]]\nname = "of all endpoints together"\nnics = [{rail = 0, rate = "1GB/s"}]\n'
        '[[servers]]\nnics = [{rail = 0, rate = "5GB/s"}]\n',
        encoding="utf-8",
    )
    topology = Topology.parse(str(path))
    assert certify(allreduce_bound(topology, 100), topology).seconds == Fraction(100, 10**9)
