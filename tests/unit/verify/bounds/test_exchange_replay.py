"""Certificates of exchanges: every number that `replay_exchange` checks, changed so that only this check can notice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from optcc.cli import run
from optcc.collective import Collective
from optcc.errors import CodecError, SolverError, TopologyError
from optcc.topology import Topology
from optcc.verify.bounds.certificate_file import read_certificate, read_either, read_exchange
from optcc.verify.bounds.exchange import BlockDemand, BlockFlow, ExchangeCertificate, distances
from optcc.verify.bounds.exchange_bound import ExchangeUnknown, exchange_bound
from optcc.verify.bounds.exchange_replay import replay_exchange
from optcc.verify.bounds.network import FlowNetwork
from optcc.verify.bounds.priced import digest_of
from optcc.verify.bounds.solvers import SOLVERS

TOPOLOGY = Topology.parse("3x2@4B/s,0=3B/s")
BOUND, _ = exchange_bound(TOPOLOGY, Collective("alltoall", 6), 72)
TORUS = Topology.parse("torus:2x3@1B/s")
SAMPLES = [
    (TOPOLOGY, BOUND),
    (TOPOLOGY, exchange_bound(TOPOLOGY, Collective("gather", 6, 5), 72)[0]),
    (TORUS, exchange_bound(TORUS, Collective("scatter", 6, 2), 72)[0]),
    (TORUS, exchange_bound(TORUS, Collective("alltoall", 6), 72)[0]),
    (TORUS, exchange_bound(TORUS, Collective.all_to_all_v([[1, 2, 0, 0, 0, 3]] * 6), 72)[0]),
]
ONE = Fraction(1)


def done(certificate: ExchangeCertificate = BOUND) -> BlockFlow:
    """What it achieves."""
    assert certificate.achieved is not None
    return certificate.achieved


def with_loads(change: Callable[[list[tuple[int, Fraction]]], object], endpoint: int = 0) -> ExchangeCertificate:
    """BOUND with the flow of one endpoint changed in place."""
    loads = list(done().loads[endpoint])
    change(loads)
    return replace(BOUND, achieved=replace(done(), loads={**done().loads, endpoint: tuple(loads)}))


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_written_read_and_replayed(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology, certificate = SAMPLES[number]
    replay_exchange(certificate, topology)
    assert certificate.gap == 0
    again = read_exchange(certificate.to_bytes())
    assert again == certificate == read_either(certificate.to_bytes())
    assert again.to_bytes() == certificate.to_bytes()
    with pytest.raises(SolverError, match=r"endpoints|rate|topology"):
        replay_exchange(again, Topology.parse("3x2@5B/s,0=3B/s"))
    file = tmp_path / "c.json"
    file.write_bytes(certificate.to_bytes())
    assert run(["replay", str(file), "--json"]) == 0
    assert Fraction(json.loads(capsys.readouterr().out)["seconds_exact"]) == certificate.seconds


def test_what_is_proved_by_hand() -> None:
    """Server 0 sends 2 x 4 of 36 blocks of 2 B at 2 x 3 B/s."""
    assert BOUND.seconds == Fraction(8 * 2, 6)
    assert BOUND.binding in (("out h0",), ("in h0",))
    assert BOUND.demand.demands[0, 1] == 4 and BOUND.demand.parts == 36


def test_the_ranks_are_those_of_the_topology() -> None:
    """Three ranks on one server and one on another: as many in all, and the servers' ports are the same."""
    forged = ExchangeCertificate.of(BOUND.network, BlockDemand("alltoall", (3, 2, 1)), BOUND.size_bytes, BOUND.prices)
    replay_exchange(forged)
    with pytest.raises(SolverError, match=r"ranks \[3, 2, 1\]"):
        replay_exchange(forged, TOPOLOGY)


@pytest.mark.parametrize(
    ("certificate", "message"),
    [
        (replace(BOUND, seconds=BOUND.seconds + Fraction(1, 10**12)), "seconds"),
        (replace(BOUND, crossing=BOUND.crossing * 2, seconds=BOUND.seconds * 2), "demand"),
        (replace(BOUND, supply=BOUND.supply / 2, seconds=BOUND.seconds * 2), "supply"),
        (replace(BOUND, size_bytes=73), "seconds"),
        (replace(BOUND, prices=(ONE,) * 6), "demand"),
        (replace(BOUND, demand=BlockDemand("gather", (2, 2, 2))), "demand"),
        (replace(BOUND, achieved=replace(done(), seconds=BOUND.seconds / 2)), "port"),
        (replace(BOUND, achieved=BlockFlow(done().seconds, {0: done().loads[0]})), "flows of"),
        (with_loads(lambda loads: loads.pop()), "keeps"),
        (with_loads(lambda loads: loads.append((0, ONE))), "keeps"),
        (with_loads(lambda loads: loads.append((0, -ONE))), "not negative"),
        (with_loads(lambda loads: loads.append((99, ONE))), "of a link"),
        (replace(BOUND, achieved=replace(done(), seconds=BOUND.seconds - Fraction(1, 10**9))), "port|less than"),
    ],
)
def test_altered_numbers_are_refused(certificate: ExchangeCertificate, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        replay_exchange(certificate)


@pytest.mark.parametrize(
    "prices", [(Fraction(-1), *BOUND.prices[1:]), (Fraction(1, 2), *BOUND.prices[1:]), BOUND.prices[1:]]
)
def test_prices_are_whole_numbers_and_one_a_port(prices: tuple[Fraction, ...]) -> None:
    with pytest.raises(SolverError, match=r"whole number|5 prices"):
        replace(BOUND, prices=prices)


def alter(rng: random.Random, document: dict[str, Any]) -> None:
    """Changes one number somewhere in the file."""
    key = rng.choice(("seconds", "demand", "supply", "prices", "gpus", "size_bytes", "achieved", "ports", "links"))
    value = document[key]
    if key == "size_bytes":
        document[key] = value - 1
    elif key == "gpus":
        value[rng.randrange(len(value))] += 1
    elif key == "prices":
        at = rng.randrange(len(value))
        value[at] = f"{int(value[at].split('/')[0]) + 1}/1"
    elif key == "achieved":
        loads = rng.choice(value["flows"])["loads"]
        loads[rng.randrange(len(loads))] = "1/7"
    elif key == "ports":
        rng.choice(value)["rate"] = "9/1"
    elif key == "links":
        link = rng.choice(value)
        link["tail"], link["head"] = link["head"], link["tail"]
    else:
        document[key] = f"{int(value.split('/')[0]) + 1}/1"


def test_forged_files_prove_nothing_untrue_of_the_topology() -> None:
    refused = 0
    for seed in range(120):
        rng = random.Random(seed)
        topology, certificate = rng.choice(SAMPLES)
        document = json.loads(certificate.to_bytes())
        alter(rng, document)
        with pytest.raises((SolverError, CodecError)):
            read_exchange(json.dumps(document).encode())
        content = {key: value for key, value in document.items() if key not in ("digest", "format")}
        document["digest"] = digest_of(certificate.FORMAT, content)
        try:
            forged = read_exchange(json.dumps(document).encode())
            replay_exchange(forged, topology)
        except (SolverError, CodecError, TopologyError):
            refused += 1
            continue
        assert forged.seconds <= certificate.seconds
    assert refused >= 110


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("collective", "allreduce", r"\$.collective: exchange 'allreduce'"),
        ("root", 1, r"\$.collective: alltoall: root 1"),
        ("blocks", [], r"\$.collective: exchange 'alltoall'"),
        ("gpus", [2, 2, 0], r"\$.gpus\[2\]: 0"),
        ("prices", ["1/2"] * 6, r"\$.prices: certificate: price 1/2"),
        ("prices", [], r"\$.prices: an array of 0"),
        ("extra", 1, r"\$.extra"),
        ("format", "optcc-exchange/2", r"\$.format"),
    ],
)
def test_files_are_read_strictly(key: str, value: object, message: str) -> None:
    document = json.loads(BOUND.to_bytes())
    document[key] = value
    with pytest.raises(CodecError, match=message):
        read_exchange(json.dumps(document).encode())
    with pytest.raises(CodecError):
        read_certificate(json.dumps(document).encode())


def test_a_flow_is_there_once_for_each_endpoint() -> None:
    document = json.loads(BOUND.to_bytes())
    document["achieved"]["flows"].append(document["achieved"]["flows"][0])
    with pytest.raises(CodecError, match=r"\$.achieved.flows\[3\].endpoint: 0: must be there once"):
        read_exchange(json.dumps(document).encode())


def test_distances_of_huge_prices_are_exact() -> None:
    """Beyond 63 bits whole numbers of any size are used."""
    network = FlowNetwork.from_links("abc", [("a", "b", 1), ("b", "c", 1), ("a", "c", 1)])
    huge = 10**30
    assert distances(network, [huge, 1, huge + 2], [0])[:, 0].tolist() == [0, huge, huge + 1]
    assert distances(network, [4, 1, 6], [2], backward=True)[:, 0].tolist() == [5, 1, 0]


def test_what_cannot_be_is_refused() -> None:
    apart = FlowNetwork.from_links("abc", [("a", "b", 1), ("b", "a", 1), ("c", "a", 1)])
    with pytest.raises(TopologyError, match=r"a cannot reach c: alltoall needs a way"):
        exchange_bound(apart, Collective("alltoall", 3), 9)
    assert exchange_bound(apart, Collective("gather", 3), 9)[0].seconds == 3
    with pytest.raises(TopologyError, match="one sender and one receiver"):
        exchange_bound(apart, Collective("allgather", 3), 9)
    with pytest.raises(ExchangeUnknown) as caught:
        exchange_bound(TORUS, Collective("alltoall", 6), 72, time_limit_s=0, solver=SOLVERS["highs"])
    assert caught.value.best.seconds > 0


def test_the_command_writes_what_replay_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    words = ["bound", "torus:2x3@1GB/s", "--size", "6MB", "--collective", "alltoall", "--json"]
    assert run([*words, "--solver", "cbc", "--certificate", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["solver"], told["gap"], told["seconds_exact"]) == ("cbc", "0/1", told["achievable_exact"])
    assert run(["replay", str(file), "--topology", "torus:2x3@1GB/s"]) == 0
    assert "gap 0" in capsys.readouterr().out
    assert run(["replay", str(file), "--topology", "torus:2x3@2GB/s"]) == 1
    assert run([*words, "--time-limit", "1e-9", "--solver", "highs"]) != 0
    assert "best certified bound so far" in capsys.readouterr().err
