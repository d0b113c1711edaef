"""AllToAll, Gather and Scatter: proved, near the bound, and the bound counted again from the declared conditions."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product
from math import lcm

import pytest

from optcc.codec import read_plan, read_transfers, write_plan, write_transfers
from optcc.collective import PERSONALISED, Collective
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import CodecError, InputError
from optcc.planner import build
from optcc.schedules.all_to_all import alltoallv, direct_all_to_all, direct_all_to_all_v, matched_all_to_all
from optcc.simulate import simulate
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.exchange_bound import exchange_bound
from optcc.verify.plan import verify_plan
from tests.sample import sampled

EXCHANGES = ("direct-all-to-all", "matched-all-to-all", "direct-all-to-all-v", "matched-all-to-all-v")
CLUSTERS = ("4@1GB/s", "8@1GB/s,3=500MB/s:1GB/s,5=250MB/s", "4x2@1GB/s", "3x4@50GB/s,2=2/4")


@pytest.mark.parametrize(
    ("ports", "text", "names"), sampled(product(MODELS, CLUSTERS, (EXCHANGES[:2], EXCHANGES[2:])), every=5)
)
def test_exchanges_are_proved_and_one_is_within_five_percent_of_the_bound(
    names: tuple[str, str], text: str, ports: Model
) -> None:
    topology = Topology.parse(text)
    ratios = []
    for name in names:
        plan = build(name, topology, topology.n_ranks**2 << 20, ports=ports).plan
        assert verify_plan(plan).verdict == PROVED
        bound = collective_bound(topology, plan.size_bytes, plan.collective)
        assert bound.tight
        ratios.append(simulate(plan, topology, model=ports).seconds / float(bound.seconds))
    assert min(ratios) > 1 - 1e-9
    assert min(ratios) < 1.05 and max(ratios) < 1.15


@pytest.mark.parametrize(("name", "root"), [("direct-gather", 1), ("direct-scatter", 2)])
def test_gather_and_scatter_take_what_the_root_takes(name: str, root: int) -> None:
    topology = Topology.parse("4@1GB/s")
    plan = build(name, topology, 64 << 20, root=root, ports="fair").plan
    assert verify_plan(plan).verdict == PROVED
    bound = float(collective_bound(topology, plan.size_bytes, plan.collective).seconds)
    assert bound == pytest.approx(0.75 * (64 << 20) / 1e9)
    assert simulate(plan, topology, model="fair").seconds < 1.05 * bound


@pytest.mark.parametrize("seed", range(40))
def test_the_closed_form_is_what_the_conditions_say(seed: int) -> None:
    rng = random.Random(seed)
    topology = Topology.parse(rng.choice(("5@1GB/s", "3x2@1GB/s,1=500MB/s", "4x3@2GB/s,0=1GB/s:3GB/s")))
    p = topology.n_ranks
    counts = [[rng.randrange(5) for _ in range(p)] for _ in range(p)]
    counts[0][p - 1] += 1
    wanted = rng.choice(
        [Collective(name, p, rng.randrange(p) if name != "alltoall" else 0) for name in PERSONALISED]
        + [Collective.all_to_all_v(counts)]
    )
    bound = collective_bound(topology, 10**6, wanted)
    assert exchange_bound(topology, wanted, 10**6)[0].seconds == bound.seconds
    said = {term.port: term.bytes for term in bound.terms}
    for number, server in enumerate(topology.servers):
        for way in ("out", "in"):
            assert said.get(f"{way} {server.name}", 0) == count_load(wanted, topology, number, way) * 10**6


def count_load(collective: Collective, topology: Topology, server: int, way: str) -> Fraction:
    """The share of the message that a server must send (`out`) or receive (`in`), by counting elements."""
    count = lcm(*(share.denominator for share in collective.shares))
    own = sum(1 << rank for rank, at in enumerate(topology.rank_server) if at == server)
    moved: set[int] = set()
    for rank, at in enumerate(topology.rank_server):
        for start, stop, contributors in collective.after(rank, count):
            comes_in = way == "in" and at == server and contributors & ~own
            goes_out = way == "out" and at != server and contributors & own
            if comes_in or goes_out:
                moved.update(range(start, stop))
    return Fraction(len(moved), count)


def test_a_block_that_goes_to_the_wrong_rank_is_refuted() -> None:
    @schedule(collective="alltoall")
    def wrong(program: Program) -> None:
        for blocks in program.cells():
            for src in program.ranks:
                for dst in program.ranks:
                    block = blocks[dst * program.n_ranks + src]
                    if src != dst and block is not None:
                        block.copy(src=src, dst=dst)

    verdict = verify_plan(compile_schedule(wrong(n_ranks=3), size_bytes=36 * 4))
    assert verdict.verdict == REFUTED


def test_unequal_contributors_of_one_element_need_not_agree() -> None:
    """A scan: every rank must have the sum of those before it and its own, each of another tree."""

    def scan(n_ranks: int) -> Collective:
        return Collective.declared(
            "scan",
            n_ranks,
            before=[(rank, 0) for rank in range(n_ranks)],
            after=[(rank, 0, range(rank + 1)) for rank in range(n_ranks)],
        )

    @schedule(collective=scan)
    def chain(program: Program) -> None:
        for (whole,) in program.cells():
            assert whole is not None
            for rank in range(1, program.n_ranks):
                whole.reduce(src=rank - 1, dst=rank)

    plan = compile_schedule(chain(n_ranks=4, segments=2), size_bytes=64)
    assert verify_plan(plan).verdict == PROVED
    assert read_plan(write_plan(plan)).digest == plan.digest


def test_files_keep_the_cells() -> None:
    plan = compile_schedule(direct_all_to_all_v(n_ranks=3), size_bytes=4 * 18)
    assert read_plan(write_plan(plan)).collective == plan.collective
    data = write_transfers(plan.transfers)
    assert read_transfers(data).collective == plan.collective
    for wrong in (data.replace(b'"custom"', b'"alltoall"', 1), data.replace(b'"share":"1/6"', b'"share":"1/5"', 1)):
        assert wrong != data
        with pytest.raises(CodecError):
            read_transfers(wrong)


def test_a_schedule_for_another_collective_is_refused() -> None:
    with pytest.raises(InputError, match="schedule direct-all-to-all: alltoall: must be for alltoallv"):
        direct_all_to_all.of(alltoallv(3))
    with pytest.raises(InputError, match="declares alltoallv over 3 ranks: must be alltoallv over 4"):
        direct_all_to_all_v.of(alltoallv(3))(4)


def test_rounds_are_matchings_of_servers() -> None:
    """Consecutive transfers between servers share no port until all have sent."""
    built = matched_all_to_all(n_ranks=5)
    pairs = [(transfer.src, transfer.dst) for transfer in built]
    assert sorted(pairs) == sorted((src, dst) for src in range(5) for dst in range(5) if src != dst)
    for start in range(0, len(pairs), 5):
        assert len({src for src, _ in pairs[start : start + 5]}) == 5
        assert len({dst for _, dst in pairs[start : start + 5]}) == 5
