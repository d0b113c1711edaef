"""The digests of compiled plans: a change of the compiler, a schedule or a simulator must not change a plan unseen.

Every schedule of the library on flat, asymmetric, multi-GPU and pod topologies, with sizes that no number of chunks
divides, under every port model. `--update-golden` writes the file anew, if that is meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from optcc.compiler import choose_segments, compile_schedule
from optcc.errors import TopologyError
from optcc.schedules.registry import SCHEDULES
from optcc.timing import Model
from optcc.topology import Topology

FILE = Path(__file__).parent / "plan_digests.json"
COUNT_MIN = 200


class Plan(NamedTuple):
    """What is compiled: `segments` 0 stands for the number that is chosen; `topology` None for no topology."""

    schedule: str
    topology: str
    elements: int
    segments: int
    ports: Model
    slots: int | None = None
    fused: bool = True
    peer_lanes: tuple[int, int] | None = None
    latency_us: int = 0

    def __str__(self) -> str:
        return " ".join(str(each) for each in self)


SETTINGS: tuple[tuple[str, int, int, Model, int | None], ...] = (
    ("2@50MB/s", 5, 1, "exclusive", None),
    ("3@1GB/s,2=500MB/s", 1_000, 2, "exclusive", 1),
    ("4@50MB/s,1=25MB/s", 4_099, 3, "fifo", None),
    ("8@50MB/s,5=25MB/s", 65_537, 2, "fifo", 2),
    ("8@50MB/s,5=25MB/s", 65_537, 2, "fair", None),
    ("5@50MB/s,0=1MB/s", 999, 2, "exclusive", None),
    ("6@50MB/s,1=50MB/s:20MB/s,4=20MB/s:50MB/s", 30_011, 2, "exclusive", 4),
    ("6@50MB/s,1=50MB/s:20MB/s,4=20MB/s:50MB/s", 30_011, 1, "fair", 3),
    ("4x2@50GB/s,2=1/2", 10_007, 2, "fifo", None),
    ("8@1GB/s/4:8", 40_961, 1, "fifo", None),
    ("8@1GB/s/4:8,2=500MB/s", 40_961, 1, "fair", None),
    ("9@50MB/s", 777, 2, "exclusive", None),
    ("13@50GB/s,3=10GB/s,7=20GB/s:50GB/s", 200_003, 4, "fifo", None),
    ("16@50GB/s,9=25GB/s", 500_009, 4, "fair", None),
)
CHOSEN: tuple[tuple[str, int, Model], ...] = (
    ("4@50MB/s,3=25MB/s", 2**22, "exclusive"),
    ("4@50MB/s,3=25MB/s", 2**22, "fifo"),
    ("6@50GB/s,3=20GB/s", 2**21, "fair"),
)
"""Topologies, elements and ports for which the number of segments is chosen, with a latency."""


def cases() -> Iterator[Plan]:
    """The plans, those included that a schedule refuses to make."""
    for name in SCHEDULES:
        for text, elements, segments, ports, slots in SETTINGS:
            yield Plan(name, text, elements, segments, ports, slots)
        for text, elements, ports in CHOSEN:
            yield Plan(name, text, elements, 0, ports, latency_us=20)
    for name in ("ring", "optcc", "r2ccl-recursive", "shares"):
        yield Plan(name, "4@50MB/s,3=25MB/s", 4_099, 3, "exclusive", None, False)
        yield Plan(name, "4@50MB/s,3=25MB/s", 4_099, 3, "fair", None, True, (2, 1))
    yield Plan("shares", "72@50MB/s,5=25MB/s", 72 * 71, 2, "fair")
    yield Plan("shares", "72@50MB/s,5=25MB/s,30=10MB/s", 72 * 70, 4, "fair")
    yield Plan("ring", "72@50MB/s,5=25MB/s", 72 * 70, 1, "fair")


def digest(case: Plan) -> str | None:
    """The digest of the plan, None if the schedule does not accept the topology."""
    definition = SCHEDULES[case.schedule].under(case.ports)
    topology = Topology.parse(case.topology).with_latency(Fraction(case.latency_us, 10**6))
    size_bytes = 4 * case.elements
    try:
        segments = case.segments or choose_segments(definition, topology, size_bytes=size_bytes, ports=case.ports)
        schedule = definition.build(topology, segments)
    except TopologyError:
        return None
    return compile_schedule(
        schedule,
        size_bytes=size_bytes,
        topology=topology,
        slots=case.slots,
        fused=case.fused,
        ports=case.ports,
        peer_lanes=case.peer_lanes,
    ).digest


def test_plans_are_what_they_were(request: pytest.FixtureRequest) -> None:
    """All library schedules; each digest is over everything that a run depends on."""
    found = {str(case): digest(case) for case in cases()}
    found = {case: each for case, each in found.items() if each is not None}
    if request.config.getoption("--update-golden"):
        FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    expected = json.loads(FILE.read_text(encoding="utf-8"))
    assert len(expected) >= COUNT_MIN
    assert {case.partition(" ")[0] for case in expected} == set(SCHEDULES)
    assert found.keys() == expected.keys()
    different = [case for case, each in found.items() if each != expected[case]]
    assert not different, f"{len(different)} plans are not what they were (--update-golden, if that is meant)"
