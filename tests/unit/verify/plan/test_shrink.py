"""The smallest failing case: found where it is known, by the same property, within a budget."""

from __future__ import annotations

from optcc.compiler import compile_schedule
from optcc.dsl import Definition, Program, schedule
from optcc.plan import Plan
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import verify_plan
from optcc.verify.plan.shrink import Smallest, shrink


@schedule
def short_ring(program: Program) -> None:
    """A ring that stops one hop early, but only from five ranks and the third segment on."""
    p = program.n_ranks
    for segment in program.pipeline(sections=p):
        hops = p - 2 if p >= 5 and segment.index >= 2 else p - 1
        for step in range(hops):
            for rank in program.ranks:
                segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
        for step in range(p - 1):
            for rank in program.ranks:
                segment[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)


def smallest(definition: Definition, topology: Topology, segments: int, size_bytes: int) -> Smallest:
    """What `shrink` makes of a schedule that fails."""

    def make(part: Topology, count: int, size: int) -> tuple[Plan, Verdict]:
        plan = compile_schedule(definition.build(part, count), size_bytes=size, topology=part)
        return plan, verify_plan(plan)

    _, verdict = make(topology, segments, size_bytes)
    assert verdict.counterexample is not None
    return shrink(make, verdict.counterexample, topology, segments, size_bytes, 4)


def test_the_fewest_ranks_and_segments_are_found() -> None:
    """Nine ranks and sixteen segments fail; five ranks and three segments are the least that do."""
    found = smallest(short_ring, Topology.parse("9@1GB/s"), 16, 4 * 9 * 16)
    assert (found.topology.n_ranks, found.segments) == (5, 3)
    assert found.size_bytes == 4 * 5 * 3
    assert found.counterexample.property == "result"
    assert "missing" in found.counterexample.summary
    assert "line" in " ".join(found.counterexample.trace)
    assert str(found) == "smallest case that fails: 5 ranks, 3 segments, 60 B"


def test_a_case_that_is_smallest_stays() -> None:
    """With four ranks or two segments the ring is right."""
    topology = Topology.parse("5@1GB/s")
    found = smallest(short_ring, topology, 3, 4 * 15)
    assert (found.topology, found.segments, found.size_bytes) == (topology, 3, 60)
    part = compile_schedule(short_ring(n_ranks=4, segments=3), size_bytes=48)
    assert verify_plan(part).verdict == PROVED


def test_the_slow_server_stays_in_if_only_that_fails() -> None:
    """A schedule that is wrong where a slow rank 7 is asks for topologies with it."""

    @schedule(
        configure=lambda topology: {"slow": topology.out.index(min(topology.out)), "wrong": len(set(topology.out)) > 1}
    )
    def lame(program: Program, slow: int, wrong: bool) -> None:
        for segment in program.pipeline(sections=1):
            for rank in program.ranks:
                if rank != slow:
                    segment[0].reduce(src=rank, dst=slow)
            for rank in program.ranks:
                if rank != slow and not (wrong and rank == 0):
                    segment[0].copy(src=slow, dst=rank)

    found = smallest(lame, Topology.parse("8@1GB/s,7=500MB/s"), 1, 64)
    assert found.topology.n_ranks == 2
    assert len(set(found.topology.out)) == 2


def test_a_smaller_case_that_fails_otherwise_is_not_it() -> None:
    """Two ranks lose a contribution; three add in different orders, which is what was asked about."""

    @schedule
    def orders(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            if program.n_ranks < 3:
                segment[0].copy(src=0, dst=1)
                continue
            for src in program.ranks:
                for dst in program.ranks:
                    others = [rank for rank in program.ranks if rank != dst]
                    if src != dst:
                        segment[0].copy(src=src, dst=dst, into=segment.scratch(0, others.index(src)))
            for rank in program.ranks:
                for slot in range(2):
                    segment.scratch(0, slot).reduce(src=rank, dst=rank, into=segment[0])

    found = smallest(orders, Topology.parse("3@1GB/s"), 2, 64)
    assert (found.topology.n_ranks, found.counterexample.property) == (3, "agreement")
