"""Three answers and no fourth; the makespan as an exact function of the straggler's slowdown, and its proofs."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise, product

import pytest

from optcc.arrays import column
from optcc.compiler import compile_schedule
from optcc.errors import EXIT_UNKNOWN, EnvironmentMissing, InputError, PlanError, SolverError, SolverUnknown
from optcc.plan import Plan
from optcc.schedules.fair_optimum import shares
from optcc.schedules.optcc import optcc
from optcc.schedules.ring import ring
from optcc.simulate import simulate
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_forms import allreduce_bound
from optcc.verify.plan import parametric
from optcc.verify.plan.parametric import (
    IntervalPart,
    RatioProof,
    Refutation,
    ask_ratio,
    best_parts,
    bound_at,
    bound_breakpoint,
    makespan_of,
    prove_ratio,
    ratio_query,
    study_ratio,
    timetable_of,
)
from optcc.verify.smt import Checked, Claim, Limit, Query, Sat, Unknown, require_known
from tests.sample import sampled

ONE, EIGHT = Fraction(1), Fraction(8)

# Three answers --------------------------------------------------------------------------------------------------------


def third(query: Query) -> None:
    query.require("a third", query.real("x", 1) * 3 == query.number(1))


def test_sat_has_exact_values() -> None:
    query = Query("x is a third")
    third(query)
    query.require("a flag", query.no(query.flag("off")))
    answer = query.ask()
    assert isinstance(answer, Sat)
    assert answer.values == {("x", 1): Fraction(1, 3), ("off",): False}


def test_unsat_is_a_claim_and_says_so() -> None:
    query = Query("x is a third and above one", "no third is above one")
    third(query)
    query.require("above one", query.real("x", 1) > query.number(1))
    answer = query.ask()
    assert isinstance(answer, Claim)
    assert str(answer).startswith("no third is above one (claimed by z3 ")
    assert not isinstance(answer, Checked)
    assert isinstance(query.ask(without=["above one"]), Sat)
    assert query.families == ("a third", "above one")


def pigeons(holes: int) -> Query:
    query = Query(f"{holes + 1} pigeons in {holes} holes")
    for pigeon in range(holes + 1):
        query.require("somewhere", query.any_of(query.flag("in", pigeon, hole) for hole in range(holes)))
    for hole in range(holes):
        query.require("alone", *(query.no(query.all_of((query.flag("in", a, hole), query.flag("in", b, hole))))
                                 for a in range(holes + 1) for b in range(a)))  # fmt: skip
    return query


def test_a_limit_makes_it_unknown_and_not_an_exception() -> None:
    """In steps of the solver, so that it is the same on every machine; and in time."""
    answer = pigeons(12).ask(Limit(steps=1000))
    assert isinstance(answer, Unknown)
    assert "1000 steps" in str(answer)
    assert isinstance(pigeons(12).ask(Limit(seconds=0.05)), Unknown)


def test_what_the_solver_cannot_parse_is_unknown() -> None:
    query = pigeons(2)
    assert isinstance(query.ask(logic="QF_FD"), Claim)
    other = Query("another context")
    query.require("foreign", other.flag("x"))
    answer = query.ask()
    assert isinstance(answer, Unknown)
    assert "z3" in answer.reason


def test_only_a_command_raises_for_unknown() -> None:
    with pytest.raises(SolverUnknown, match=r"is it\? \(unknown: time; at least 3\)") as caught:
        require_known(Unknown("is it?", "time", "at least 3"))
    assert caught.value.exit_code == EXIT_UNKNOWN
    assert require_known(3) == 3


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"seconds": float("nan")}, {"steps": 0}, {"steps": 2**40}])
def test_limits_that_are_none(bad: dict[str, int]) -> None:
    with pytest.raises(InputError, match="limit of"):
        Limit(**bad)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InputError, match="nonsense"):
        pigeons(1).ask(without=["nonsense"])


def test_without_z3_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    with pytest.raises(EnvironmentMissing, match="pip install z3-solver"):
        Query("anything")


# The makespan as a function of l --------------------------------------------------------------------------------------


def one_straggler(p: int, slowdown: Fraction) -> Topology:
    """10^9 B/s, the last one slower."""
    rates = [Fraction(10**9)] * (p - 1) + [10**9 / slowdown]
    return Topology(tuple(Server(f"h{i}", 1, (Nic(0, rate, rate),)) for i, rate in enumerate(rates)))


@cache
def optcc_plan(p: int, segments: int, at: Fraction, slots: int = 2, fused: bool = True) -> Plan:
    """OptCC with rank p - 1 as straggler, its ports ordered for l = `at`; every chunk is 60 elements."""
    return compile_schedule(
        optcc(p, segments, stragglers=(p - 1,)),
        size_bytes=4 * (p - 1) * segments * 60,
        topology=one_straggler(p, at),
        slots=slots,
        fused=fused,
    )


def simulated(plan: Plan, slowdown: Fraction) -> float:
    """In units of n/B."""
    return simulate(plan, one_straggler(plan.n_ranks, slowdown), model="exclusive").seconds * 1e9 / plan.size_bytes


@pytest.mark.parametrize("p", [3, 4, 5])
@pytest.mark.parametrize("segments", [2, 8])
@pytest.mark.parametrize("at", [ONE, Fraction(2), Fraction(4)])
def test_the_function_is_what_the_simulator_takes(p: int, segments: int, at: Fraction) -> None:
    """With one slot a lane's next message starts when the one before it is done: a port has nothing to decide."""
    plan = optcc_plan(p, segments, at, slots=1)
    function = makespan_of(plan, p - 1, ONE, EIGHT)
    rng = random.Random(p * segments)
    for _ in range(50):
        slowdown = Fraction(rng.randint(60, 480), 60)
        assert float(function(slowdown)) == pytest.approx(simulated(plan, slowdown), abs=1e-9)


@pytest.mark.parametrize(("p", "segments"), [(3, 2), (3, 4), (4, 2), (5, 2)])
@pytest.mark.parametrize("fused", [True, False])
def test_two_slots_where_ports_keep_the_order(p: int, segments: int, fused: bool) -> None:
    """Two messages to one rank may both be ready: a port then goes by which was first, here it never matters."""
    plan = optcc_plan(p, segments, Fraction(2), fused=fused)
    function = makespan_of(plan, p - 1, ONE, EIGHT)
    for i in range(50):
        slowdown = ONE + Fraction(i, 7)
        assert float(function(slowdown)) == pytest.approx(simulated(plan, slowdown), abs=1e-9)


@pytest.mark.parametrize(("p", "segments", "at"), [(4, 8, Fraction(4)), (5, 8, Fraction(2)), (5, 4, Fraction(4))])
def test_the_pieces_are_convex_exact_and_complete(p: int, segments: int, at: Fraction) -> None:
    """At any l the longest path is on the envelope; slopes grow; every breakpoint is one."""
    plan = optcc_plan(p, segments, at)
    function = makespan_of(plan, p - 1, ONE, EIGHT)
    assert len(function.pieces) > 2
    assert all(left.slope < right.slope for left, right in pairwise(function.pieces))
    assert all(left.intercept > right.intercept for left, right in pairwise(function.pieces))
    network = parametric._Network(plan, p - 1)
    rng = random.Random(segments)
    for slowdown in (*function.breakpoints, *(Fraction(rng.randint(1000, 8000), 1000) for _ in range(30))):
        assert max(network.times(slowdown)) == function(slowdown) * plan.size_bytes


def test_part_of_an_interval_is_a_restriction() -> None:
    plan = optcc_plan(4, 8, Fraction(4))
    whole, part = makespan_of(plan, 3, ONE, EIGHT), makespan_of(plan, 3, Fraction(5, 3), Fraction(3))
    for i in range(50):
        slowdown = Fraction(5, 3) + Fraction(4, 3) * Fraction(i, 49)
        assert whole(slowdown) == part(slowdown)
    assert set(part.breakpoints) == {cut for cut in whole.breakpoints if Fraction(5, 3) < cut < 3}
    single = makespan_of(plan, 3, Fraction(2), Fraction(2))
    assert single(Fraction(2)) == whole(Fraction(2))
    assert single.breakpoints == ()
    with pytest.raises(InputError, match="must be from"):
        part(Fraction(4))


def test_a_ring_waits_for_its_straggler_at_every_slowdown() -> None:
    """2(p - 1)/p * l with one segment: one piece, through the origin."""
    plan = compile_schedule(ring(n_ranks=4), size_bytes=4 * 4 * 60)
    (piece,) = makespan_of(plan, 2, ONE, EIGHT).pieces
    assert (piece.intercept, piece.slope) == (Fraction(0), Fraction(3, 2))


@pytest.mark.parametrize("p", range(2, 9))
def test_the_bound_is_the_closed_form(p: int) -> None:
    for i in range(1, 40):
        slowdown = 1 + Fraction(i, 10)
        bound = allreduce_bound(one_straggler(p, slowdown), 10**9)
        assert bound_at(p, slowdown) == bound.seconds
        straggler_binds = f"out h{p - 1}" in bound.binding
        assert straggler_binds == (slowdown >= bound_breakpoint(p))


# Proofs for an interval -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("segments", "p"), sampled(product((2, 4, 8), (3, 4, 5)), every=4))
def test_the_least_eps_is_proved_and_a_smaller_one_refuted(p: int, segments: int) -> None:
    """Exactly and by z3; the fractions between the deciding points confirm it."""
    plan = optcc_plan(p, segments, Fraction(2))
    study = study_ratio([IntervalPart(plan, ONE, EIGHT)], p - 1)
    assert {point.slowdown for point in study.points} == {ONE, bound_breakpoint(p), EIGHT}
    eps = study.least_eps
    for i in range(200):
        slowdown = 1 + Fraction(7 * i, 199)
        assert study.makespans[0](slowdown) <= (1 + eps) * bound_at(p, slowdown)
    proof = prove_ratio(plan, p - 1, ONE, EIGHT, eps, solver=Limit(60))
    assert isinstance(proof, RatioProof)
    assert isinstance(proof.solver, Claim)
    assert proof.checked.statement == proof.solver.statement
    assert proof.study.order == "one order of the ports throughout"
    refutation = prove_ratio(plan, p - 1, ONE, EIGHT, eps - Fraction(1, 10**9), solver=Limit(60))
    assert isinstance(refutation, Refutation)
    assert isinstance(refutation.solver, Sat)
    assert refutation.at.eps == eps


def test_a_plan_for_every_slowdown_is_never_worse() -> None:
    """Each part runs the plan that takes least there; where parts meet, both plans take the same."""
    plans = [optcc_plan(4, 4, at) for at in (ONE, Fraction(2), Fraction(4), EIGHT)]
    parts = best_parts(plans, 3, ONE, EIGHT)
    assert len(parts) > 1
    functions = [makespan_of(plan, 3, ONE, EIGHT) for plan in plans]
    for left, right in pairwise(parts):
        assert left.high == right.low
        meet = [makespan_of(part.plan, 3, ONE, EIGHT)(left.high) for part in (left, right)]
        assert meet[0] == meet[1]
    for i in range(100):
        slowdown = 1 + Fraction(7 * i, 99)
        part = next(part for part in parts if part.low <= slowdown <= part.high)
        assert makespan_of(part.plan, 3, ONE, EIGHT)(slowdown) == min(each(slowdown) for each in functions)
    study = study_ratio(parts, 3)
    assert study.least_eps <= min(study_ratio([IntervalPart(plan, ONE, EIGHT)], 3).least_eps for plan in plans)
    assert study.order == f"{len(parts)} orders, one for each part"
    proof = prove_ratio(parts, 3, ONE, EIGHT, study.least_eps, solver=Limit(60))
    assert isinstance(proof, RatioProof)
    assert isinstance(proof.solver, Claim)


def test_a_single_slowdown_is_an_interval() -> None:
    proof = prove_ratio(optcc_plan(3, 2, Fraction(2)), 2, Fraction(2), Fraction(2), Fraction(1), solver=Limit(60))
    assert isinstance(proof, RatioProof)
    assert isinstance(proof.solver, Claim)


def test_z3_out_of_steps_leaves_the_exact_proof() -> None:
    plan = optcc_plan(5, 8, Fraction(2))
    proof = prove_ratio(plan, 4, ONE, EIGHT, Fraction(1), solver=Limit(steps=1))
    assert isinstance(proof, RatioProof)
    assert isinstance(proof.solver, Unknown)
    assert prove_ratio(plan, 4, ONE, EIGHT, Fraction(1)) == replace(proof, solver=None)


def test_too_large_a_plan_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parametric, "TRANSFERS_MAX", 10)
    answer = prove_ratio(optcc_plan(3, 2, Fraction(2)), 2, ONE, EIGHT, Fraction(1))
    assert isinstance(answer, Unknown)
    assert "16 transfers" in answer.reason


# What must not go unnoticed -------------------------------------------------------------------------------------------


def test_a_timetable_that_starts_too_early_is_found() -> None:
    """Each time of the timetable at either end, made a byte smaller, breaks a wait or nothing before it: z3 sees it."""
    plan = optcc_plan(3, 2, Fraction(2))
    timetable = timetable_of(plan, 2, bound_breakpoint(3), EIGHT)
    assert isinstance(ratio_query(plan, 2, timetable, Fraction(1)).ask(), Claim)
    for node in range(len(timetable.at_low)):
        low, high = list(timetable.at_low), list(timetable.at_high)
        low[node] -= 1
        high[node] -= 1
        for early in (replace(timetable, at_low=tuple(low)), replace(timetable, at_high=tuple(high))):
            assert isinstance(ratio_query(plan, 2, early, Fraction(1)).ask(), Sat)


def test_a_timetable_that_ends_too_late_is_found() -> None:
    plan = optcc_plan(3, 2, Fraction(2))
    timetable = timetable_of(plan, 2, bound_breakpoint(3), EIGHT)
    times = list(timetable.at_high)
    times[times.index(max(times))] *= 2
    assert isinstance(ratio_query(plan, 2, replace(timetable, at_high=tuple(times)), Fraction(1)).ask(), Sat)


def test_a_chord_over_the_bend_is_refused() -> None:
    """It would lie above the bound, and prove what is not so."""
    plan = optcc_plan(3, 2, Fraction(2))
    with pytest.raises(InputError, match="where the bound bends"):
        ratio_query(plan, 2, timetable_of(plan, 2, ONE, EIGHT), Fraction(1))


def test_a_solver_that_contradicts_the_exact_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = optcc_plan(3, 2, Fraction(2))
    monkeypatch.setattr(parametric, "ask_ratio", lambda *_: Claim("all is well", "a liar"))
    with pytest.raises(SolverError, match="all is well"):
        prove_ratio(plan, 2, ONE, EIGHT, Fraction(0), solver=Limit())
    monkeypatch.setattr(parametric, "ask_ratio", lambda *_: Sat("all is lost", {}))
    with pytest.raises(SolverError, match="all is lost"):
        prove_ratio(plan, 2, ONE, EIGHT, Fraction(9), solver=Limit())


def test_without_the_order_of_the_in_ports_the_makespan_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages would arrive at one port at once."""
    plan = optcc_plan(4, 4, Fraction(2))
    right = makespan_of(plan, 3, ONE, EIGHT)
    out, (before, after) = parametric.port_order(plan)
    monkeypatch.setattr(parametric, "port_order", lambda _: (out, (before[:0], after[:0])))
    wrong = makespan_of(plan, 3, ONE, EIGHT)
    slowdowns = [1 + Fraction(7 * i, 99) for i in range(100)]
    assert all(wrong(slowdown) <= right(slowdown) for slowdown in slowdowns)
    assert any(wrong(slowdown) < right(slowdown) for slowdown in slowdowns)
    assert any(float(wrong(slowdown)) < simulated(plan, slowdown) - 1e-9 for slowdown in slowdowns)


@pytest.mark.parametrize(
    ("straggler", "low", "high"), [(3, ONE, EIGHT), (-1, ONE, EIGHT), (0, Fraction(1, 2), ONE), (0, EIGHT, ONE)]
)
def test_bad_ranks_and_intervals(straggler: int, low: Fraction, high: Fraction) -> None:
    with pytest.raises(InputError):
        makespan_of(optcc_plan(3, 2, Fraction(2)), straggler, low, high)


def test_parts_that_do_not_fit() -> None:
    plan = optcc_plan(3, 2, Fraction(2))
    three = Fraction(3)
    with pytest.raises(InputError, match="must follow each other"):
        study_ratio([IntervalPart(plan, ONE, Fraction(2)), IntervalPart(plan, three, EIGHT)], 2)
    with pytest.raises(InputError, match="must reach from"):
        prove_ratio([IntervalPart(plan, ONE, three)], 2, ONE, EIGHT, ONE)
    with pytest.raises(InputError, match="at least one"):
        study_ratio([], 2)
    with pytest.raises(InputError, match="at least one"):
        best_parts([], 2, ONE, EIGHT)
    empty = compile_schedule(ring(n_ranks=3), size_bytes=0)
    with pytest.raises(InputError, match="nothing is sent"):
        makespan_of(empty, 0, ONE, EIGHT)


def test_a_port_without_an_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane for each peer; and an order in which a transfer would wait for itself."""
    topology = Topology.parse("4@1GB/s,3=500MB/s")
    lanes = compile_schedule(shares.build(topology), size_bytes=4 * 4 * 12, topology=topology, ports="fair")
    with pytest.raises(PlanError, match="rank 0 sends in lanes 3 and 4"):
        parametric.port_order(lanes)
    plan = optcc_plan(3, 2, Fraction(2))
    (before, after), in_ = parametric.port_order(plan)
    back = column([*before, after[0]]), column([*after, before[0]])
    monkeypatch.setattr(parametric, "port_order", lambda _: (back, in_))
    with pytest.raises(PlanError, match="waits for itself"):
        makespan_of(plan, 2, ONE, EIGHT)


def test_z3_answers_for_every_part_or_says_how_far_it_came() -> None:
    parts = [IntervalPart(optcc_plan(3, 4, at), low, high) for at, low, high in
             ((ONE, ONE, Fraction(2)), (Fraction(4), Fraction(2), EIGHT))]  # fmt: skip
    eps = study_ratio(parts, 2).least_eps
    assert isinstance(ask_ratio(parts, 2, eps, Limit()), Claim)
    assert isinstance(ask_ratio(parts, 2, eps - Fraction(1, 1000), Limit()), Sat)
    assert isinstance(ask_ratio(parts, 2, eps, Limit(steps=1)), Unknown)
