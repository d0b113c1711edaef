"""Certificates as files: strict to read, and none that was altered is believed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from optcc.cli import run
from optcc.errors import CodecError, OptccError, SolverError
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.certificate import Certificate
from optcc.verify.bounds.certificate_file import read_certificate
from optcc.verify.bounds.closed_form_certificates import certify
from optcc.verify.bounds.closed_forms import BoundTerm, allreduce_bound
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.packing import pack
from optcc.verify.bounds.priced import digest_of
from optcc.verify.bounds.replay import replay

TEXTS = ["4@50MB/s,3=25MB/s", "4@50MB/s,3=49MB/s", "5@50MB/s,1=10MB/s:20MB/s", "2@3B/s,1=2B/s", "3@1B/s"]


def uneven_rails() -> Topology:
    """Three servers on two rails, one NIC of h1 failed."""
    return Topology(
        tuple(
            Server(f"h{i}", 1, tuple(Nic(r, Fraction(2 + i), Fraction(3 + r), (i, r) == (1, 0)) for r in range(2)))
            for i in range(3)
        ),
        rail_only=True,
    )


def samples() -> list[tuple[Topology, Certificate]]:
    """Closed form, LP, LP with loads, LP with trees."""
    topology, rails = Topology.parse(TEXTS[1]), uneven_rails()
    return [
        (topology, certify(allreduce_bound(topology, 9000), topology)),
        (topology, lp_bound(topology, "allgather", 9000).certificate),
        (rails, lp_bound(rails, "allreduce", 70).certificate),
        (rails, pack(lp_bound(rails, "allreduce", 70).certificate)),
    ]


SAMPLES = samples()


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_written_read_and_replayed(number: int) -> None:
    """The same bytes again; the topology is recognised, another one is not."""
    topology, certificate = SAMPLES[number]
    data = certificate.to_bytes()
    again = read_certificate(data)
    assert again == certificate
    assert again.to_bytes() == data
    replay(again)
    replay(again, topology)
    for other in ("4@50MB/s,3=26MB/s", "4@50MB/s", "3@50MB/s"):
        with pytest.raises(SolverError):
            replay(again, Topology.parse(other))


@pytest.mark.parametrize("text", TEXTS)
def test_closed_forms_are_cut_certificates(text: str) -> None:
    topology = Topology.parse(text)
    bound = allreduce_bound(topology, 9000)
    certificate = certify(bound, topology)
    assert certificate.seconds == bound.seconds
    assert certificate.as_json()["seconds"] == f"{bound.seconds.numerator}/{bound.seconds.denominator}"


def test_a_bound_that_no_cut_proves() -> None:
    topology = Topology.parse(TEXTS[0])
    bound = allreduce_bound(topology, 9000)
    with pytest.raises(SolverError, match="best certificate"):
        certify(replace(bound, terms=(*bound.terms, BoundTerm("out h0", Fraction(10**9), Fraction(1)))), topology)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a document that is not a container, and to every list."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
        return
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    yield path


def alter(rng: random.Random, document: Any) -> None:
    """Changes one thing in `document`."""
    *above, last = rng.choice(list(leaves(document)))
    for step in above:
        document = document[step]
    value = document[last]
    if isinstance(value, list):
        document[last] = [*value, value[0]] if value and rng.random() < 0.5 else value[:-1] if value else [1]
    elif isinstance(value, int):
        document[last] = value + rng.choice([-1, 1, 2, 10**6])
    elif value is None:
        document[last] = rng.choice([0, "0/1", []])
    elif re.fullmatch(r"-?\d+/\d+", value):
        old = Fraction(value)
        others = [old + 1, old * 2, -old - 1, old + Fraction(1, 10**12), old / 3 + 1]
        number = rng.choice([other for other in others if other != old])
        document[last] = f"{number.numerator}/{number.denominator}"
    else:
        document[last] = value[:-1] + ("0" if value[-1] != "0" else "1")


@pytest.mark.battery(37)
@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_altered_certificates_are_refused(number: int) -> None:
    """A thousand in all, each with one number, name or list changed."""
    _, certificate = SAMPLES[number]
    rng = random.Random(number)
    plain = json.loads(certificate.to_bytes())
    for _ in range(250):
        document = json.loads(certificate.to_bytes())
        alter(rng, document)
        assert document != plain
        with pytest.raises((SolverError, CodecError)):
            replay(read_certificate(json.dumps(document).encode()))


@pytest.mark.battery(37)
@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_forged_certificates_prove_nothing_untrue(number: int) -> None:
    """Altered, and given a new digest: for the topology as it is, only what is true can still replay."""
    topology, certificate = SAMPLES[number]
    truth = lp_bound(topology, certificate.demand, certificate.size_bytes)
    rng = random.Random(number + 1000)
    refused = 0
    for _ in range(250):
        document = json.loads(certificate.to_bytes())
        alter(rng, document)
        content = {key: value for key, value in document.items() if key not in ("digest", "format")}
        document["digest"] = digest_of(certificate.FORMAT, content)
        try:
            forged = read_certificate(json.dumps(document).encode())
            replay(forged, topology)
        except (SolverError, CodecError):
            refused += 1
            continue
        seconds = truth.seconds * forged.size_bytes / certificate.size_bytes
        assert forged.seconds <= seconds
        assert forged.achieved is None or forged.achieved.seconds >= seconds
    assert refused > 200


def edited(**changes: object) -> bytes:
    """A good file with other values at the top."""
    document = json.loads(SAMPLES[0][1].to_bytes())
    document |= changes
    return json.dumps(document).encode()


GOOD = SAMPLES[0][1].to_bytes().decode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", r"^\$: not UTF-8"),
        (b"{", r"^\$: not JSON"),
        (b"[" * 10**5, r"^\$: Expected `object`"),
        (b"[]", r"^\$: an array of 0: must be an object"),
        (b"{}", r"^\$\.format: missing"),
        (edited(format="optcc-certificate/2"), r'^\$\.format: "optcc-certificate/2": must be'),
        (edited(extra=1), r"^\$\.extra: unknown key"),
        (GOOD.replace('"model"', '"model": "x",\n"model"').encode(), r"^\$\.model: must be there once"),
        (edited(seconds=1.5), r"^\$\.seconds: 1\.5: must be a string"),
        (edited(seconds="1.5"), r'^\$\.seconds: "1\.5": must be a rational'),
        (edited(seconds="2/4"), r'^\$\.seconds: "2/4": must be in lowest terms'),
        (edited(seconds="1/0"), r"^\$\.seconds"),
        (edited(seconds="٣/1"), r"^\$\.seconds"),
        (edited(seconds="1/" + "9" * 5000), r"^\$\.seconds"),
        (edited(size_bytes=2**61), r"^\$\.size_bytes: 2305843009213693952: must be"),
        (edited(size_bytes=-1), r"^\$\.size_bytes: -1"),
        (edited(size_bytes=True), r"^\$\.size_bytes: true"),
        (edited(size_bytes="9000"), r'^\$\.size_bytes: "9000"'),
        (GOOD.replace("9000", "9" * 10**5, 1).encode(), r"^\$\.size_bytes"),
        (GOOD.replace("9000", "9000.0", 1).encode(), r"^\$\.size_bytes: 9000\.0"),
        (GOOD.replace("9000", "NaN", 1).encode(), r"^\$\.size_bytes: NaN"),
        (edited(collective="scan"), r'^\$\.collective: "scan"'),
        (edited(roots=["1/1"]), r"^\$\.roots: an array of 1: must be an array of 4"),
        (edited(endpoints=[]), r"^\$\.links"),
        (edited(prices=[]), r"^\$\.prices"),
        (edited(ports=[{"name": "x", "rate": "0/1"}]), r"^\$\.ports\[0\]\.rate: port x: rate 0"),
        (edited(cuts=[{"kind": "broadcast", "nodes": [99], "weight": "1/1"}]), r"^\$\.cuts\[0\]\.nodes\[0\]: 99"),
        (edited(cuts=[{"kind": "broadcast", "nodes": [1, 0], "weight": "1/1"}]), r"^\$\.cuts: .*in order"),
        (edited(links=[{"tail": 0, "head": 0, "ports": [0]}]), r"^\$\.links: link 0"),
    ],
)
def test_files_that_are_no_certificates(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        read_certificate(data)


def test_noise_is_no_certificate() -> None:
    """Any byte of a file changed: a named error, never another exception, never a certificate."""
    rng = random.Random(5)
    data = SAMPLES[3][1].to_bytes()
    for _ in range(300):
        place = rng.randrange(len(data))
        changed = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        try:
            certificate = read_certificate(changed)
        except OptccError:
            continue
        assert certificate == SAMPLES[3][1], "only a change that means nothing is let through"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for what replays, 1 for what was altered, 2 for what is no certificate."""
    from optcc.cli import COMMANDS

    if "replay" not in COMMANDS:
        pytest.skip("optcc replay is not at the door yet")
    _, certificate = SAMPLES[2]
    file = tmp_path / "bound.json"
    file.write_bytes(certificate.to_bytes())
    assert run(["replay", str(file)]) == 0
    assert "gap 0" in capsys.readouterr().out
    assert run(["replay", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert Fraction(answer["seconds_exact"]) == certificate.seconds
    assert answer["verdict"] == "proved"
    assert run(["replay", str(file), "--topology", "3@1GB/s"]) == 1
    text = certificate.to_bytes().decode()
    file.write_text(text.replace('"size_bytes": 70', '"size_bytes": 71'), encoding="utf-8")
    assert run(["replay", str(file)]) == 1
    file.write_text("{}", encoding="utf-8")
    assert run(["replay", str(file)]) == 2
    assert run(["replay", str(tmp_path / "missing.json")]) == 2
