"""OptCC for one straggler and several, one GPU a server and several: proved, and its ports carry what it says."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.passes.bind import bind
from optcc.schedule import Schedule
from optcc.schedules.optcc import find_stragglers, optcc
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds import predictions
from optcc.verify.bounds.closed_forms import allreduce_bound
from optcc.verify.plan import verify_plan

COUNTS = (0, 1, 13, 97, 360)
"""Elements: none, fewer than ranks, primes, and a number that divides well."""
FOUR = ("1 reduce-scatter", "2 to straggler", "3 from straggler", "4 all-gather")
ONE_STRAGGLER = "45e0767d55ba408d42a65353394bf6aa46a08547ce29ad5757d58574116ba63f"
"""Over every column but `line`, as written when the schedule knew one straggler and one GPU a server only."""
CROWDS = [(p, m) for p in range(2, 13) for m in (1, 2, 3) if m == 1 or p - m >= 2]
CLUSTERS = [(n, m, gpus) for n in (2, 3, 4) for m in (1, 2) if m == 1 or n - m >= 2 for gpus in (1, 2, 4)]


def spread(n_servers: int, m: int) -> tuple[int, ...]:
    """m stragglers that are not neighbours where there is room, in no particular order."""
    return tuple(n_servers - 1 - i * (n_servers // m) for i in range(m))


def fingerprint(schedule: Schedule) -> bytes:
    """A hash of what `schedule` means."""
    shapes = [(str(shape.share), shape.sections) for shape in schedule.segments]
    digest = hashlib.sha256(repr((schedule.stages, shapes)).encode())
    s = schedule
    for each in (s.src, s.dst, s.op, s.segment, s.section, s.src_slot, s.dst_slot, s.stage):
        digest.update(each.astype("<i8").tobytes())
    return digest.digest()


def nic_bytes(schedule: Schedule, gpus: int, count: int) -> tuple[list[int], list[int]]:
    """What each server sends to others, and receives from them, for `count` elements of 4 bytes."""
    transfers = bind(schedule, 4 * count, "float32", "sum")
    src, dst = transfers.src // gpus, transfers.dst // gpus
    outside = src != dst
    sent, received = (
        np.bincount(end[outside], transfers.bytes[outside], schedule.n_ranks // gpus).astype(int) for end in (src, dst)
    )
    return sent.tolist(), received.tolist()


def proved(schedule: Schedule, count: int, topology: Topology | None = None) -> bool:
    """Compiled for `topology`, or in the author's order, the plan is right under every interleaving."""
    verdict = verify_plan(compile_schedule(schedule, size_bytes=4 * count, topology=topology))
    assert verdict.verdict == PROVED, verdict.counterexample
    return True


def test_one_straggler_of_single_gpus_is_what_it_always_was() -> None:
    """Stages, transfers and their order: committed records were measured with them."""
    digest = hashlib.sha256()
    for p in range(1, 13):
        for straggler in sorted({0, p // 2, p - 1}):
            for segments in (1, 2, 3, 8):
                digest.update(fingerprint(optcc(p, segments, stragglers=(straggler,))))
    assert digest.hexdigest() == ONE_STRAGGLER


@pytest.mark.parametrize("slowdown", [2, 4, 8])
@pytest.mark.parametrize("p", [4, 8, 16])
def test_a_slow_straggler_seeds_the_first_segment_where_the_network_stores(p: int, slowdown: int) -> None:
    """That takes less time: only what the straggler's port in needs, once a section has come around."""
    topology = Topology.parse(f"{p}@40MB/s,{p - 1}={40 // slowdown}MB/s")
    size_bytes = 4 * 16 * (p - 1) * 1000
    times = []
    for definition in (optcc, optcc.under("fifo")):
        schedule = definition.build(topology, 16)
        plan = compile_schedule(schedule, size_bytes=size_bytes, topology=topology, ports="fifo")
        assert verify_plan(plan).verdict == PROVED
        times.append(simulate(plan, topology).seconds)
    assert times[1] < times[0]
    least = (slowdown + Fraction(p - 2, 16 * (p - 1))) * size_bytes / (40 * 10**6)
    assert times[1] == pytest.approx(float(least), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "segments", "turned"),
    [
        ("4@50GB/s,3=25GB/s", 8, True),
        ("4@50GB/s,3=25GB/s", 7, False),
        ("4@50GB/s,3=26GB/s", 8, False),
        ("4@50GB/s", 8, False),
        ("5@50GB/s,1=10GB/s,3=10GB/s", 8, False),
        ("4x2@50GB/s,3=1/2", 8, False),
    ],
)
def test_whose_turn_is_first(text: str, segments: int, turned: bool) -> None:
    """The straggler's, under fifo ports, if it is the only one, has one GPU and at most half the rate, and segments are
    even; else all ports have the same schedule."""
    topology = Topology.parse(text)
    built = optcc.under("fifo").build(topology, segments)
    assert built.name == "optcc"
    assert optcc.under("exclusive") is optcc.under("fair") is optcc
    assert (fingerprint(built) != fingerprint(optcc.build(topology, segments))) == turned
    if turned:
        assert fingerprint(built) == fingerprint(optcc(4, segments, stragglers=(3,), turn=1))
        first = built.segment == 0
        assert built.src[first][0] == 3


@pytest.mark.parametrize(("p", "m"), CROWDS)
def test_any_stragglers_and_any_size_are_proved(p: int, m: int) -> None:
    """In the author's order and in the timetable's, whole or ragged, fewer segments than stragglers or more."""
    rates = ",".join(f"{straggler}={10 + 5 * i}MB/s" for i, straggler in enumerate(spread(p, m)))
    topology = Topology.parse(f"{p}@50MB/s,{rates}")
    for segments, count in enumerate(COUNTS, start=1):
        assert proved(optcc(p, segments, stragglers=spread(p, m)), count)
        assert proved(optcc.build(topology, segments), count, topology)


@pytest.mark.parametrize(("n_servers", "m", "gpus"), CLUSTERS)
def test_servers_of_several_gpus_are_proved(n_servers: int, m: int, gpus: int) -> None:
    """Any size, in the author's order; and for a topology whose stragglers lost NICs."""
    for segments, count in enumerate(COUNTS, start=1):
        assert proved(optcc(n_servers * gpus, segments, stragglers=spread(n_servers, m), gpus=gpus), count)
    if gpus > 1:
        lost = ",".join(f"{straggler}={gpus // 2}/{gpus}" for straggler in spread(n_servers, m))
        topology = Topology.parse(f"{n_servers}x{gpus}@50MB/s,{lost}")
        assert proved(optcc.build(topology, 2), 101, topology)


def test_more_ranks_are_proved() -> None:
    """As many stragglers as healthy ranks, more of them, and every third of many."""
    for p, stragglers in ((6, (0, 2, 4)), (8, (0, 1, 2, 5, 6, 7)), (23, tuple(range(0, 23, 3)))):
        assert proved(optcc(p, 3, stragglers=stragglers), 211)


@pytest.mark.parametrize("p", [1, 2])
def test_no_healthy_rank_or_one(p: int) -> None:
    """One rank alone has nothing to do; of two, the healthy one owns everything and passes it to the straggler."""
    schedule = optcc.build(Topology.parse(f"{p}@50MB/s"), segments=2)
    assert len(schedule) == 4 * (p - 1)
    assert schedule.stages == FOUR
    assert proved(schedule, 7)


def test_one_server_of_several_gpus_needs_no_network() -> None:
    """Every GPU reduces a shard and hands it to the others."""
    schedule = optcc.build(Topology.parse("1x4@50MB/s"), segments=2)
    assert len(schedule) == 2 * 4 * 2 * 3
    assert nic_bytes(schedule, 4, 101) == ([0], [0])
    assert proved(schedule, 101)


@pytest.mark.parametrize(("n_servers", "m", "gpus"), [*((p, m, 1) for p, m in CROWDS), *CLUSTERS, (5, 3, 2)])
def test_a_straggler_carries_the_message_once_each_way(n_servers: int, m: int, gpus: int) -> None:
    """Not a byte more or less, whatever the size; nobody can do with less."""
    stragglers = spread(n_servers, m)
    for segments, count in enumerate(COUNTS, start=1):
        schedule = optcc(n_servers * gpus, segments, stragglers=stragglers, gpus=gpus)
        for carried in nic_bytes(schedule, gpus, count):
            assert [carried[straggler] for straggler in stragglers] == [4 * count] * m


@pytest.mark.parametrize(("n_servers", "m", "gpus"), [*((p, m, 1) for p, m in CROWDS), *CLUSTERS, (5, 3, 2)])
def test_a_healthy_server_carries_what_the_formula_says(n_servers: int, m: int, gpus: int) -> None:
    """(2(q - 1) + m)/q of the message each way, if it can be cut evenly; each element crosses 2(p - 1) times."""
    stragglers, q, segments = spread(n_servers, m), n_servers - m, 5
    count = segments * q * gpus * 3
    schedule = optcc(n_servers * gpus, segments, stragglers=stragglers, gpus=gpus)
    for carried in nic_bytes(schedule, gpus, count):
        healthy = {carried[server] for server in range(n_servers) if server not in stragglers}
        assert healthy == {Fraction(2 * (q - 1) + m, q) * 4 * count}
        assert sum(carried) == 2 * (n_servers - 1) * 4 * count
    assert len(schedule) == segments * q * gpus * 2 * (n_servers * gpus - 1)


@pytest.mark.parametrize(("n_servers", "m", "gpus"), [each for each in CLUSTERS if each[2] > 1])
def test_every_gpu_gives_its_fabric_the_same(n_servers: int, m: int, gpus: int) -> None:
    """2(g - 1)/g of the message each way, and in the network it meets GPUs of its own place only."""
    count = 2 * (n_servers - m) * gpus * 3
    schedule = optcc(n_servers * gpus, 2, stragglers=spread(n_servers, m), gpus=gpus)
    transfers = bind(schedule, 4 * count, "float32", "sum")
    inside = transfers.src // gpus == transfers.dst // gpus
    for end in (transfers.src, transfers.dst):
        carried = np.bincount(end[inside], transfers.bytes[inside])
        assert set(carried.tolist()) == {Fraction(2 * (gpus - 1), gpus) * 4 * count}
    assert (transfers.src[~inside] % gpus == transfers.dst[~inside] % gpus).all()


@pytest.mark.parametrize(
    ("text", "gpus", "is_bound"),
    [
        ("4@50MB/s,1=25MB/s", 1, True),
        ("4@50MB/s,1=40MB/s", 1, False),
        ("6@60MB/s,0=30MB/s,4=12MB/s", 1, True),
        ("6@60MB/s,0=30MB/s:20MB/s,4=60MB/s:15MB/s", 1, True),
        ("8@60MB/s,0=30MB/s,3=30MB/s,5=40MB/s", 1, False),
        ("9@60MB/s,0=20MB/s,3=30MB/s,5=40MB/s", 1, True),
        ("4x4@10MB/s,2=2/4", 4, True),
        ("4x4@10MB/s,2=3/4", 4, False),
        ("5x8@10MB/s,0=4/8,3=2/8", 8, True),
    ],
)
def test_the_busiest_port_takes_the_time_of_the_formula(text: str, gpus: int, is_bound: bool) -> None:
    """max(l, (2(q - 1) + m)/q) * n/B; it is the lower bound if the slowest straggler needs as long."""
    topology = Topology.parse(text)
    rates = [min(out, in_) for out, in_ in zip(topology.out, topology.in_, strict=True)]
    healthy, n_servers = max(rates), len(rates)
    q = rates.count(healthy)
    count = 4 * q * gpus * 25
    sent, received = nic_bytes(optcc.build(topology, 4), gpus, count)
    seconds = max(
        Fraction(carried) / rate
        for carried, rate in (*zip(sent, topology.out, strict=True), *zip(received, topology.in_, strict=True))
    )
    assert seconds == max(healthy / min(rates), Fraction(2 * (q - 1) + n_servers - q, q)) * 4 * count / healthy
    assert (seconds == allreduce_bound(topology, 4 * count).seconds) == is_bound
    if q == n_servers - 1:
        assert seconds == predictions.optcc(topology, 4 * count)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_stragglers_take_turns_in_coming_last(m: int) -> None:
    """One is passed through in every other segment; several share the sections evenly, and the rest seed each."""
    stragglers, q, segments = tuple(range(m)), 4, 6
    schedule = optcc(m + q, segments, stragglers=stragglers)
    into = [each for each in schedule if each.dst in stragglers]
    last = Counter(each.dst for each in into if each.op == "reduce")
    assert last == dict.fromkeys(stragglers, segments * q // max(m, 2))
    assert {each.stage for each in into} == {"2 to straggler"}
    assert len({(each.segment, each.section) for each in into if each.op == "reduce"}) == last.total()
    out = [each for each in schedule if each.src in stragglers]
    assert {each.stage for each in out} == {"3 from straggler"}
    assert Counter(each.src for each in out if each.op == "reduce") == {
        straggler: segments * q - last[straggler] for straggler in stragglers
    }
    if m == 1:
        assert {each.segment % 2 for each in into if each.op == "reduce"} == {0}


def test_the_four_stages_are_named_in_their_order() -> None:
    """Even though seeding comes first; servers of several GPUs have one more at each end."""
    assert optcc(6, 2, stragglers=(4, 5)).stages == FOUR
    several = optcc(12, 2, stragglers=(4, 5), gpus=2)
    assert several.stages == ("reduce-scatter inside", *FOUR, "all-gather inside")


@pytest.mark.parametrize(
    ("text", "stragglers", "gpus"),
    [
        ("4@50GB/s", (3,), 1),
        ("1@50GB/s", (0,), 1),
        ("2@50GB/s,0=25GB/s", (0,), 1),
        ("4@50GB/s,0=50GB/s:10GB/s", (0,), 1),
        ("5@50GB/s,1=25GB/s,3=10GB/s", (1, 3), 1),
        ("4x8@50GB/s,1=7/8,3=1/8", (1, 3), 8),
        ("3x2@50GB/s", (2,), 2),
    ],
)
def test_stragglers_are_found(text: str, stragglers: tuple[int, ...], gpus: int) -> None:
    """All that are slower than the fastest, either way, NICs pooled; the last one when all are equal."""
    assert find_stragglers(Topology.parse(text)) == {"stragglers": stragglers, "gpus": gpus}


@pytest.mark.parametrize(
    ("topology", "rule"),
    [
        (Topology.parse("3@50GB/s,0=25GB/s,1=10GB/s"), "2 of 3 servers are slower .* at least 2 must be as fast"),
        (Topology.parse("4@50GB/s,2=60GB/s"), "3 of 4 servers are slower .* at least 2 must be as fast"),
        (
            Topology((*Topology.parse("2x2@1GB/s").servers, *Topology.parse("3@1GB/s").servers[2:])),
            r"servers of \[1, 2\] GPUs: must have equally many",
        ),
    ],
)
def test_other_topologies_are_refused(topology: Topology, rule: str) -> None:
    """The message says what is accepted, and what is wrong."""
    with pytest.raises(TopologyError, match=f"schedule optcc accepts equally many GPUs .*{rule}"):
        optcc.build(topology)


@pytest.mark.parametrize(
    ("n_ranks", "stragglers", "gpus", "rule"),
    [
        (4, (), 1, r"stragglers \(\): must be different servers from 0 to 3"),
        (4, (4,), 1, r"stragglers \(4,\): must be different servers from 0 to 3"),
        (4, (-1,), 1, r"stragglers \(-1,\): must be different"),
        (5, (1, 1), 1, r"stragglers \(1, 1\): must be different"),
        (8, (2,), 4, r"stragglers \(2,\): must be different servers from 0 to 1"),
        (3, (0, 1), 1, r"stragglers \(0, 1\) of 3 servers: must leave at least 2 healthy"),
        (2, (0, 1), 1, r"stragglers \(0, 1\) of 2 servers: must leave at least 2 healthy"),
        (6, (0,), 4, "6 ranks, 4 GPUs a server: must fill a whole number of servers"),
        (6, (0,), 0, "6 ranks, 0 GPUs a server: must fill"),
    ],
)
def test_stragglers_that_cannot_be_are_refused(n_ranks: int, stragglers: tuple[int, ...], gpus: int, rule: str) -> None:
    """Called without a topology; a schedule that would leave somebody out is not built."""
    with pytest.raises(ScheduleError, match=rule):
        optcc(n_ranks, stragglers=stragglers, gpus=gpus)


@pytest.mark.parametrize(("p", "slowdown"), [(4, 4 / 3), (4, 2), (8, 8 / 7), (8, 2), (8, 4), (16, 4)])
def test_lanes_for_each_stage_bring_fair_ports_to_the_formula(p: int, slowdown: float) -> None:
    """With one lane a rank sends in one order, and its neighbours wait while it serves the straggler."""
    topology = Topology.parse(f"{p}@50GB/s,{p - 1}={50 / slowdown}GB/s").with_latency(Fraction(5, 10**6))
    built, segments = optcc.build(topology, 64), 64
    seconds, in_order = (
        simulate(
            compile_schedule(built, size_bytes=2**30, topology=topology, ports=ports), topology, model="fair"
        ).seconds
        for ports in ("fair", "exclusive")
    )
    formula = max(slowdown, 2 - 1 / (p - 1)) * 2**30 / 50e9 * (segments + 1) / segments
    assert seconds < 1.017 * formula
    assert seconds < in_order
