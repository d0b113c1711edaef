"""Topologies: every text of the contract, TOML files, and everything that cannot be a cluster."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from optcc.errors import InputError, OptccError, TopologyError
from optcc.topology import Nic, Server, Topology, endpoint_text

GB = 10**9
NIC = 'nics = [{rail = 0, rate = "1GB/s"}]'


def toml(folder: Path, text: str) -> Topology:
    """The topology of a TOML file with that text."""
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return Topology.parse(str(path))


@pytest.mark.parametrize(
    ("text", "out", "in_"),
    [
        ("8@50GB/s", [50] * 8, [50] * 8),
        ("8@50GB/s,3=25GB/s,5=10GB/s", [50, 50, 50, 25, 50, 10, 50, 50], [50, 50, 50, 25, 50, 10, 50, 50]),
        ("8@50GB/s,3=25GB/s:50GB/s", [50, 50, 50, 25, 50, 50, 50, 50], [50] * 8),
        ("4x8@50GB/s,2=3/8", [400, 400, 150, 400], [400, 400, 150, 400]),
        ("3@50GB/s:25GB/s", [50] * 3, [25] * 3),
        ("2x4@400Gbit/s,1=100Gbit/s:200Gbit/s", [200, 50], [200, 100]),
        ("1@1GB/s", [1], [1]),
        ("2@1GB/s,1=1/1", [1, 1], [1, 1]),
    ],
)
def test_every_text_form_of_the_contract(text: str, out: list[int], in_: list[int]) -> None:
    """Rates of all endpoints, both ways, exact."""
    topology = Topology.parse(text)
    assert topology.out == tuple(rate * GB for rate in out)
    assert topology.in_ == tuple(rate * GB for rate in in_)


def test_servers_of_several_gpus() -> None:
    """Ranks are GPUs, numbered through the servers; lost NICs keep their place."""
    topology = Topology.parse("4x8@50GB/s,2=3/8")
    assert topology.n_ranks == 32
    assert topology.rank_server == tuple(rank // 8 for rank in range(32))
    assert not topology.is_flat
    assert [nic.failed for nic in topology.servers[2].nics] == [False] * 3 + [True] * 5
    assert list(topology.healthy().out) == [400 * GB] * 4


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("@", "must be of a form like"),
        ("8@", "must be of a form like"),
        ("8@50", "'50'"),
        ("8@50GB", "'50GB'"),
        ("8@50GB/s:", "rate ''"),
        ("8@0GB/s", "above zero"),
        ("8@-5GB/s", "above zero"),
        ("0@1GB/s", "at least one server"),
        ("1x0@1GB/s", "one GPU"),
        ("999999@1GB/s", "65536"),
        ("256x257@1GB/s", "65536"),
        ("8@50GB/s,8=1GB/s", "server 8 does not exist"),
        ("8@50GB/s,3=1GB/s,3=2GB/s", "server 3 is named twice"),
        ("8@50GB/s,3=1GB/s,03=2GB/s", "server 3 is named twice"),
        ("8@50GB/s,", "must look like"),
        ("8@50GB/s,3", "must look like"),
        ("8@50GB/s,x=1GB/s", "must look like"),
        ("8@50GB/s,-1=1GB/s", "must look like"),
        ("8@50GB/s,3=", "rate ''"),
        ("8@50GB/s,3=0GB/s", "above zero"),
        ("4x8@50GB/s,2=9/8", "K at most 8"),
        ("4x8@50GB/s,2=3/7", "must be K/8"),
        ("4x8@50GB/s,2=0/8", "h2: no NIC is left"),
        ("2@1GB/s,1=0/1", "h1: no NIC is left"),
        ("no-such-file", "no such file"),
        ("4xdgx-h200", "4x and one of dgx-a100, dgx-h100, mi250"),
        ("", "cannot be read"),
    ],
)
def test_texts_that_are_no_topology(text: str, part: str) -> None:
    """The message says which part and which rule."""
    with pytest.raises(OptccError) as refusal:
        Topology.parse(text)
    assert part in str(refusal.value)


def test_toml_says_everything(tmp_path: Path) -> None:
    """Counts, names, failed NICs, asymmetric rates, fabric, latency and rails."""
    topology = toml(
        tmp_path,
        """
        latency = "5us"
        rail_only = true
        [[servers]]
        count = 2
        gpus = 4
        fabric = "300GB/s"
        nics = [{rail = 0, rate = "50GB/s"}, {rail = 1, out = "50GB/s", in = "25GB/s"}]
        [[servers]]
        name = "slow"
        nics = [{rail = 0, rate = "50GB/s", failed = true}, {rail = 1, rate = "10GB/s"}]
        """,
    )
    assert [server.name for server in topology.servers] == ["h0", "h1", "slow"]
    assert topology.n_ranks == 9
    assert list(topology.out) == [100 * GB, 100 * GB, 10 * GB]
    assert list(topology.in_) == [75 * GB, 75 * GB, 10 * GB]
    assert topology.servers[0].fabric == 300 * GB
    assert topology.latency_s == Fraction(5, 10**6)
    assert topology.rail_only


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[[servers]]\nnics = [{rail = 0, rate = "1GB/s", speed = 3}]', ["speed", "servers[0].nics[0]"]),
        (f"[[servers]]\n{NIC}\ncolour = 1", ["colour", "servers[0]"]),
        (f"extra = 1\n[[servers]]\n{NIC}", ["extra"]),
        (f"[[servers]]\n{NIC}\ncount = 0", ["servers[0].count"]),
        (f"[[servers]]\n{NIC}\ngpus = 'four'", ["servers[0].gpus"]),
        ("[[servers]]\nnics = [{rail = -1, rate = '1GB/s'}]", ["servers[0].nics[0].rail"]),
        ("[[servers]]\nnics = [{rail = 0}]", ["servers[0]", "give rate, or both out and in"]),
        ("[[servers]]\nnics = [{rail = 0, rate = '1GB/s', out = '1GB/s'}]", ["servers[0]", "either rate"]),
        ("[[servers]]\nnics = [{rail = 0, out = '1GB/s'}]", ["servers[0]", "both out and in"]),
        (f"[[servers]]\n{NIC}\n[[servers]]\nnics = [{{rail = 0, rate = '0GB/s'}}]", ["servers[1]", "above zero"]),
        (f"[[servers]]\n{NIC}\nfabric = 'fast'", ["servers[0]", "'fast'"]),
        (f"[[servers]]\n{NIC}\ncount = 2\nname = 'a'", ["servers[0].name", "'a'"]),
        (f"[[servers]]\n{NIC}\nname = 'a'\n[[servers]]\n{NIC}\nname = 'a'", ["a", "twice"]),
        (f"[[servers]]\n{NIC}\nname = 'h1'\n[[servers]]\n{NIC}", ["h1", "twice"]),
        (f"[[servers]]\nnics = []\n[[servers]]\n{NIC}", ["h0", "no NIC is left"]),
        ("servers = []", ["at least one server"]),
        ("", ["servers"]),
        ("servers = [", ["not TOML"]),
        (f"latency = '5'\n[[servers]]\n{NIC}", ["'5'", "latency"]),
        (f"[[servers]]\ncount = 65536\n{NIC}\n[[servers]]\n{NIC}", ["65536"]),
    ],
)
def test_toml_faults_name_the_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    """Unknown fields, wrong types, rates that cannot be, servers cut off: value, place and rule."""
    with pytest.raises(OptccError) as refusal:
        toml(tmp_path, text)
    for part in parts:
        assert part in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Bytes that are no text, a folder, a name that no file can have, brackets without end: an InputError each."""
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 3000, encoding="utf-8")
    for name in (str(tmp_path / "binary.toml"), str(tmp_path), "a\0b", "x" * 5000, str(tmp_path / "deep.toml")):
        with pytest.raises(InputError, match="topology"):
            Topology.parse(name)


def test_the_constructors_refuse_what_cannot_be() -> None:
    """Rates at or below zero, servers without GPUs, negative rails and latencies."""
    nic = Nic(0, Fraction(1), Fraction(1))
    for make in (
        lambda: Nic(-1, Fraction(1), Fraction(1)),
        lambda: Nic(0, Fraction(0), Fraction(1)),
        lambda: Nic(0, Fraction(1), Fraction(-1)),
        lambda: Server("a", 0, (nic,)),
        lambda: Server("a", 1, (nic,), Fraction(0)),
        lambda: Topology(()),
        lambda: Topology((Server("a", 1, (nic,)),), latency_s=Fraction(-1)),
        lambda: Topology((Server("a", 1, (nic,)), Server("a", 1, (nic,)))),
        lambda: Topology((Server("a", 1, (nic,)), Server("b", 1, ()))),
    ):
        with pytest.raises(TopologyError):
            make()


def test_a_server_alone_needs_no_nic() -> None:
    """One server with all NICs lost still reaches itself."""
    assert Topology.parse("1x2@1GB/s,0=0/2").n_ranks == 2


def test_the_shortest_text_reads_back() -> None:
    """`endpoint_text` writes what `parse` reads."""
    text = endpoint_text([Fraction(50), Fraction(50), Fraction(25)], [Fraction(50), Fraction(50), Fraction(12)])
    topology = Topology.parse(text)
    assert list(topology.out) == [50, 50, 25]
    assert list(topology.in_) == [50, 50, 12]


def test_scaling_and_latency_keep_the_rest() -> None:
    """`scaled` and `with_latency` change one thing."""
    topology = Topology.parse("3@10B/s,1=5B/s:7B/s")
    assert list(topology.scaled(Fraction(1, 2)).in_) == [5, Fraction(7, 2), 5]
    assert topology.with_latency(Fraction(1, 3)).latency_s == Fraction(1, 3)
    assert topology.with_latency(Fraction(1, 3)).out == topology.out


@pytest.mark.parametrize(
    "text",
    [
        "2@50GB/s",
        "8@50GB/s,3=25GB/s:1/3GB/s",
        "4x8@50GB/s,2=3/8",
        "16@400Gbit/s/4:2",
    ],
)
def test_a_file_that_was_written_is_read_as_the_same_topology(text: str, tmp_path: Path) -> None:
    """Servers, rates, failed NICs, pods and times come back, exactly."""
    topology = replace(
        Topology.parse(text), latency_s=Fraction(5, 10**6), overhead_s=Fraction(139_271, 10**9), text="", rail_only=True
    )
    path = tmp_path / "cluster.toml"
    path.write_text(topology.to_toml(), encoding="utf-8")
    assert Topology.parse(str(path)) == topology


def test_an_overhead_below_zero_is_refused() -> None:
    with pytest.raises(TopologyError, match="overhead -1: must not be negative"):
        replace(Topology.parse("2@1GB/s"), overhead_s=Fraction(-1))


def test_shares_by_rank_are_the_least_that_a_server_s_ranks_say() -> None:
    cluster = Topology.parse("2x2@100MB/s").with_own_nics()
    by_rank = [[(1.0, 1.0), (0.5, 1.0)], [(1.0, 0.25), (1.0, 1.0)], [(1.0, 1.0)] * 2, [(0.0, 0.0), (1.0, 1.0)]]
    under = cluster.under(by_rank)
    assert [[float(nic.out) for nic in server.nics] for server in under.servers] == [[1e8, 5e7], [1e8, 1e8]]
    assert [float(nic.in_) for nic in under.servers[0].nics] == [2.5e7, 1e8]
    assert [nic.failed for nic in under.servers[1].nics] == [True, False]


def test_a_nic_that_had_failed_and_carries_something_is_back_unless_nics_are_others() -> None:
    up, down = Nic(0, Fraction(100), Fraction(100)), Nic(1, Fraction(50), Fraction(50), failed=True)
    cluster = Topology((Server("h0", 1, (up, down)), Server("h1", 1, (up, up))))
    whole, half, lost = (1.0, 1.0), (0.5, 0.5), (0.0, 0.0)
    assert cluster.under([(whole, half), (whole, whole)]).out[0] == 125
    assert cluster.under([(whole, lost), (whole, whole)]).out[0] == 100
    assert cluster.under([(half,), (whole,)]).out[0] == 50, "one NIC is known, which stands for those that are there"
