"""The classic schedules: proved for every number of ranks, structured as published, as fast as their formulas say."""

from __future__ import annotations

import doctest
import inspect
import sys
from collections import Counter
from fractions import Fraction

import pytest

from optcc.collective import split
from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import ScheduleError, TopologyError
from optcc.schedule import Layout
from optcc.schedules.direct import direct
from optcc.schedules.double_tree import double_binary_tree, two_colours, two_trees
from optcc.schedules.logarithmic import bruck, rabenseifner, recursive_doubling
from optcc.schedules.ring import bidirectional_ring, ring
from optcc.simulate import simulate
from optcc.timing import Timing
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

CLASSICS = (ring, bidirectional_ring, recursive_doubling, rabenseifner, bruck, double_binary_tree, direct)
RANKS = (*range(1, 10), 13, 16, 17)
LATENCIES = (Fraction(0), Fraction(1, 100), Fraction(1, 8), Fraction(3))
"""In units of n/B."""

named = pytest.mark.parametrize("definition", CLASSICS, ids=lambda definition: definition.name)


def timing(
    definition: Definition, p: int, *, segments: int = 1, latency: Fraction = Fraction(0), slots: int = 2, written: bool
) -> Timing:
    """On equal endpoints, in units of n/B; sections come out equal. The ports are in the order written or found."""
    size_bytes = 4 * p * 2**12
    topology = Topology.parse(f"{p}@{size_bytes}B/s").with_latency(latency)
    schedule = definition(n_ranks=p, segments=segments)
    plan = compile_schedule(schedule, size_bytes=size_bytes, topology=None if written else topology, slots=slots)
    return simulate(plan, topology, model="fifo")


@named
@pytest.mark.parametrize("p", RANKS)
def test_every_plan_is_proved(definition: Definition, p: int) -> None:
    """No element, one, fewer than ranks, a prime, and a number that divides well; any slots, ports in either order."""
    topology = Topology.parse(f"{p}@50MB/s,{p // 2}=20MB/s")
    for case, count in enumerate((0, 1, p - 1, 101, 60 * p)):
        schedule = definition(n_ranks=p, segments=1 + case % 3)
        ports = topology if case % 2 else None
        plan = compile_schedule(schedule, size_bytes=4 * count, topology=ports, slots=1 + case % 2)
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, (count, verdict.counterexample)


@named
def test_one_rank_has_nothing_to_do(definition: Definition) -> None:
    schedule = definition(n_ranks=1, segments=3)
    assert len(schedule) == 0
    assert sum(shape.share for shape in schedule.segments) == 1


@named
def test_servers_of_several_gpus_are_refused_but_by_the_ring(definition: Definition) -> None:
    if definition.name == "ring":
        assert definition.build(Topology.parse("2x2@50GB/s")).n_ranks == 4
        return
    with pytest.raises(TopologyError, match=f"schedule {definition.name} accepts any endpoints: .*one GPU a server"):
        definition.build(Topology.parse("2x2@50GB/s"))


@named
def test_no_segments_are_refused(definition: Definition) -> None:
    with pytest.raises(ScheduleError, match=r"pipeline\(0\): must have from 1 to"):
        definition(n_ranks=4, segments=0)


@named
def test_the_example_in_the_docstring_runs(definition: Definition) -> None:
    function = definition.function
    module = sys.modules[function.__module__]
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(function) or "", vars(module).copy(), definition.name, module.__file__, 0
    )
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_names_and_collectives() -> None:
    """What users write on the command line."""
    assert [definition.name for definition in CLASSICS] == [
        *("ring", "bidirectional-ring", "recursive-doubling", "rabenseifner", "bruck", "double-binary-tree", "direct")
    ]
    assert [definition.name for definition in CLASSICS if definition.collective != "allreduce"] == ["bruck"]
    assert bruck.collective == "allgather"


@pytest.mark.parametrize("p", RANKS)
def test_numbers_of_transfers(p: int) -> None:
    q = 2 ** (p.bit_length() - 1)
    rounds = q.bit_length() - 1
    for segments in (1, 3):
        counts = {definition.name: len(definition(n_ranks=p, segments=segments)) for definition in CLASSICS}
        assert counts == {
            "ring": 2 * p * (p - 1) * segments,
            "bidirectional-ring": 4 * p * (p - 1) * segments,
            "recursive-doubling": (2 * q * rounds + 2 * (p - q)) * segments,
            "rabenseifner": (2 * q * (q - 1) + 2 * q * (p - q)) * segments,
            "bruck": p * (p - 1) * segments,
            "double-binary-tree": 4 * (p - 1) * segments,
            "direct": 2 * p * (p - 1) * segments,
        }


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("written", [True, False], ids=["written", "timetable"])
def test_exact_formulas(p: int, latency: Fraction, written: bool) -> None:
    """One segment on equal endpoints: the time is the docstring's to the last digit."""
    step = Fraction(1, p)
    fold = 0 if p.bit_count() == 1 else 2
    for definition, slots, formula in (
        (ring, 2, 2 * (p - 1) * (step + latency)),
        (bidirectional_ring, 2, (2 * p - 3) * max(step, step / 2 + latency) + step + latency),
        (direct, p, 2 * (p - 1) * step + 2 * latency),
        (recursive_doubling, 2, (p.bit_length() - 1 + fold) * (1 + latency)),
    ):
        seconds = timing(definition, p, latency=latency, slots=slots, written=written).seconds
        if definition is recursive_doubling and fold:  # what a rank sends before it is folded into need not wait
            assert seconds <= float(formula) * (1 + 1e-9)
        else:
            assert seconds == pytest.approx(float(formula), rel=1e-9), definition.name


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 13, 16])
@pytest.mark.parametrize("written", [True, False], ids=["written", "timetable"])
def test_rounds_cost_a_latency_each_at_most(p: int, latency: Fraction, written: bool) -> None:
    """Rabenseifner and Bruck: exact without latency and for two ranks, at most the formula otherwise."""
    rounds = (p - 1).bit_length()
    cases = [(bruck, rounds, Fraction(p - 1, p))]
    if p.bit_count() == 1:
        cases.append((rabenseifner, 2 * rounds, Fraction(2 * (p - 1), p)))
    for definition, latencies, transmission in cases:
        seconds = timing(definition, p, latency=latency, slots=p, written=written).seconds
        formula = float(latencies * latency + transmission)
        assert float(transmission) * (1 - 1e-9) <= seconds <= formula * (1 + 1e-9)
        if latency == 0 or p == 2:  # otherwise a round starts while the one before is still arriving
            assert seconds == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 11, 12, 17])
def test_rabenseifner_folds_what_is_no_power_of_two(p: int) -> None:
    """A rank folded into carries (3 - 2/q) n; many segments come close to that, one stays near round by round."""
    q = 2 ** (p.bit_length() - 1)
    for latency in (Fraction(0), Fraction(1, 100), Fraction(1)):
        one = timing(rabenseifner, p, latency=latency, slots=p, written=False)
        assert max(one.port_busy_s) == pytest.approx(3 - 2 / q)
        assert one.seconds <= 1.15 * ((2 * q.bit_length()) * float(latency) + 4 - 2 / q)
    assert timing(rabenseifner, p, segments=32, written=False).seconds <= 1.05 * (3 - 2 / q)


@pytest.mark.parametrize("p", RANKS)
def test_bruck_slices_are_those_of_the_collective(p: int) -> None:
    """Pipeline r lies exactly on rank r's slice, whatever the size and the number of segments."""
    for segments in (1, 3):
        schedule = bruck(n_ranks=p, segments=segments)
        for count in (0, 1, p + 1, 101):
            layout = Layout.of(schedule.segments, 4 * count, "float32")
            for rank, (first, stop) in enumerate(split(count, p)):
                own = slice(rank * segments, (rank + 1) * segments)
                assert (layout.first[own][0][0], layout.stop[own][-1][0]) == (first, stop)


@pytest.mark.parametrize("p", [2, 5, 8])
def test_direct_never_asks_for_a_port_twice_in_a_step(p: int) -> None:
    schedule = direct(n_ranks=p)
    for first in range(0, len(schedule), p):
        step = [schedule[index] for index in range(first, first + p)]
        assert len({each.src for each in step}) == len({each.dst for each in step}) == p
    hops = Counter((each.src, each.dst) for each in schedule)
    assert set(hops.values()) == {2}
    assert len(hops) == p * (p - 1)


def test_half_of_the_message_goes_each_way_round() -> None:
    schedule = bidirectional_ring(n_ranks=5, segments=2)
    ways = {(each.segment, (each.dst - each.src) % 5) for each in schedule}
    assert ways == {(0, 1), (1, 1), (2, 4), (3, 4)}
    assert {shape.share for shape in schedule.segments} == {Fraction(1, 4)}


@pytest.mark.parametrize("p", [*range(1, 34), 100, 127, 128])
def test_inner_ranks_of_one_tree_are_leaves_of_the_other(p: int) -> None:
    """Also for odd p; both trees are binary and floor(log2 p) deep."""
    trees = two_trees(p)
    inner = [set(tree.parent.tolist()) - {-1} for tree in trees]
    assert not inner[0] & inner[1]
    for tree in trees:
        assert tree.depth == p.bit_length() - 1
        assert max(Counter(tree.parent.tolist()).values()) <= 2


@pytest.mark.parametrize("p", [*range(1, 34), 100, 127, 128])
def test_two_steps_take_every_edge_once_and_no_port_twice(p: int) -> None:
    trees = two_trees(p)
    steps = two_colours(trees)
    assert sorted((edge.tree, edge.child, edge.parent) for step in steps for edge in step) == sorted(
        (number, child, parent)
        for number, tree in enumerate(trees)
        for child, parent in zip(tree.order.tolist()[1:], tree.parent.tolist()[1:], strict=True)
    )
    for step in steps:
        assert len({edge.child for edge in step}) == len({edge.parent for edge in step}) == len(step)


def test_trees_over_nobody_are_refused() -> None:
    with pytest.raises(ScheduleError, match="0 ranks: must be at least one"):
        two_trees(0)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 13, 16])
def test_double_binary_tree_keeps_its_beat(p: int) -> None:
    """At most k + 2d - 1 beats in the order written; two n/B in the long run; 2d latencies for small messages."""
    depth = p.bit_length() - 1
    for segments in (1, 4, 32):
        for latency in LATENCIES:
            timed = timing(double_binary_tree, p, segments=segments, latency=latency, slots=4, written=True)
            beats = segments + 2 * depth - 1
            assert timed.seconds <= float(beats * (Fraction(2, segments) + latency)) * (1 + 1e-9)
            assert max(timed.port_busy_s) == pytest.approx({2: 1.0, 3: 1.5}.get(p, 2.0))
    found = timing(double_binary_tree, p, segments=64, written=False).seconds
    assert found <= 2 * (64 + 2 * depth - 1) / 64
    small = timing(double_binary_tree, p, latency=Fraction(10**6), written=False).seconds
    assert small == pytest.approx(2 * depth * 10**6, rel=1e-4)
