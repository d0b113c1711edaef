"""The cut LP on small cases worked out by hand, on wide rates, and with solvers that give up or lie."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest

from optcc.collective import Collective
from optcc.errors import EXIT_UNKNOWN, EnvironmentMissing, SolverError, TopologyError
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_form_certificates import closed_forms
from optcc.verify.bounds.lp import BoundUnknown, CutProgram, lp_bound
from optcc.verify.bounds.network import Demand, FlowLink, FlowNetwork, SharedPort
from optcc.verify.bounds.replay import replay
from optcc.verify.bounds.solvers import (
    CbcSolver,
    HighsSolver,
    Infeasible,
    LinearProgram,
    MakeSolver,
    Outcome,
    Solved,
    Unsolved,
    _silent_highs,
    exact_vertex,
    pulp_problem,
)


def rails(*alive: str, rate: int = 1) -> Topology:
    """One server for each text, rail-only: "x.x" has NICs on rails 0 and 2."""
    return Topology(
        tuple(
            Server(f"h{i}", 1, tuple(Nic(r, Fraction(rate), Fraction(rate), c == ".") for r, c in enumerate(text)))
            for i, text in enumerate(alive)
        ),
        rail_only=True,
    )


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [("allreduce", "4"), ("reducescatter", "2"), ("allgather", "2"), ("broadcast", "3"), ("reduce", "3")],
)
def test_every_collective_on_three_equal_endpoints(collective: str, seconds: str) -> None:
    """Three bytes at 1 B/s: 2(p - 1)/p, (p - 1)/p and 1 times the message."""
    bound = lp_bound(Topology.parse("3@1B/s"), collective, 3)
    assert bound.seconds == Fraction(seconds)
    assert bound.gap == 0
    assert sum(bound.prices.values()) == 1


def test_roots_and_gpus_matter() -> None:
    """Broadcast from a slow sender waits for it, to a slow sender not; a server with three of four GPUs' shards."""
    topology = Topology.parse("3@4B/s,0=1B/s:4B/s")
    assert lp_bound(topology, Collective("broadcast", 3, root=0), 4).seconds == 4
    assert lp_bound(topology, Collective("broadcast", 3, root=1), 4).seconds < 4
    uneven = Topology(
        (Server("a", 1, (Nic(0, Fraction(1), Fraction(1)),)), Server("b", 3, (Nic(0, Fraction(1), Fraction(1)),)))
    )
    assert lp_bound(uneven, "allgather", 4).seconds == 3


def test_servers_that_lost_different_rails() -> None:
    """h0 and h1 share no rail, and everything between them passes h2: 1 B/s each way on each of its two rails.

    Reduced to h2 and broadcast from it, one byte takes each of its ports once: so 1 s.
    """
    bound = lp_bound(rails("x.", ".x", "xx"), "allreduce", 1)
    assert bound.seconds == bound.achievable == 1


def test_cuts_that_no_closed_form_sees() -> None:
    """Two pairs of servers, each with fast rails of their own, joined by one slow rail on one server of each."""
    fast, slow = Fraction(10), Fraction(1)

    def server(name: str, *nics: tuple[int, Fraction]) -> Server:
        return Server(name, 1, tuple(Nic(rail, rate, rate) for rail, rate in nics))

    topology = Topology(
        (
            server("a", (0, fast)),
            server("b", (0, fast), (1, slow)),
            server("c", (2, fast), (1, slow)),
            server("d", (2, fast)),
        ),
        rail_only=True,
    )
    bound = lp_bound(topology, "allreduce", 1)
    assert bound.seconds == bound.achievable == 1
    assert set(bound.binding) <= {"out b rail 1", "in b rail 1", "out c rail 1", "in c rail 1"}


def test_an_oversubscribed_spine() -> None:
    """Two leaves of two endpoints; each way between the leaves shares a quarter of what the endpoints send."""
    ports = [SharedPort(f"{way} e{i}", Fraction(2)) for i in range(4) for way in ("out", "in")]
    ports += [SharedPort("up", Fraction(1)), SharedPort("down", Fraction(1))]
    links = [FlowLink(i, 4 + i // 2, (2 * i,)) for i in range(4)] + [
        FlowLink(4 + i // 2, i, (2 * i + 1,)) for i in range(4)
    ]
    links += [FlowLink(4, 5, (8,)), FlowLink(5, 4, (9,))]
    network = FlowNetwork(("e0", "e1", "e2", "e3"), ("leaf0", "leaf1"), tuple(ports), tuple(links))
    bound = lp_bound(network, "allreduce", 1)
    assert bound.seconds == bound.achievable == 1
    assert set(bound.binding) & {"up", "down"}


@pytest.mark.parametrize("slow", ["1B/s", "7B/s"])
def test_rates_that_differ_by_a_million_millions(slow: str) -> None:
    """The slowest endpoint decides, exactly."""
    topology = Topology.parse(f"4@7000GB/s,2={slow}")
    bound = lp_bound(topology, "allreduce", 10**6)
    assert bound.seconds == Fraction(10**6, int(slow[0]))
    assert bound.gap == 0


def test_a_negligible_link_costs_at_most_itself() -> None:
    """Two good links, and one of a million-millionth: bound and packing are certified, the gap is stated."""
    links = [
        ("a", "s", 10**12),
        ("s", "a", 10**12),
        ("b", "s", 10**12),
        ("s", "b", 10**12),
        ("a", "b", 1),
        ("b", "a", 1),
    ]
    bound = lp_bound(FlowNetwork.from_links("ab", links, "s"), "allreduce", 10**12)
    assert Fraction(10**12, 10**12 + 1) >= bound.seconds > Fraction(999_999, 10**6)
    assert bound.gap is not None and 0 <= bound.gap < Fraction(1, 10**9)


def test_nothing_to_do() -> None:
    """A lone endpoint, and no bytes."""
    alone = lp_bound(Topology.parse("1@1B/s"), "allreduce", 100)
    assert alone.seconds == alone.achievable == alone.gap == 0
    assert lp_bound(Topology.parse("3@1B/s"), "allreduce", 0).seconds == 0


def test_who_cannot_reach_whom() -> None:
    """Named both ways; one way only where one way is needed."""
    with pytest.raises(TopologyError, match="h0 cannot reach h1; h1 cannot reach h0"):
        lp_bound(rails("x.", ".x"), "allreduce", 1)
    with pytest.raises(TopologyError, match="h0, h1 cannot reach h2, h3; h2, h3 cannot reach h0, h1"):
        lp_bound(rails("x.", "x.", ".x", ".x"), "allreduce", 1)
    one_way = FlowNetwork.from_links("ab", [("a", "b", 1)])
    assert lp_bound(one_way, Collective("broadcast", 2, root=0), 1).seconds == 1
    assert lp_bound(one_way, Collective("reduce", 2, root=1), 1).seconds == 1
    for collective in (Collective("broadcast", 2, root=1), Collective("allgather", 2), Collective("allreduce", 2)):
        with pytest.raises(TopologyError, match="b cannot reach a"):
            lp_bound(one_way, collective, 1)


def test_bad_networks() -> None:
    """Value first, then the rule."""
    with pytest.raises(TopologyError, match="rate 0"):
        FlowNetwork.from_links("ab", [("a", "b", 0)])
    with pytest.raises(TopologyError, match="c: no such"):
        FlowNetwork.from_links("ab", [("a", "c", 1)])
    with pytest.raises(TopologyError, match="used twice"):
        FlowNetwork.from_links("ab", [("a", "b", 1), ("a", "b", 2)])
    with pytest.raises(TopologyError, match="2 ranks"):
        lp_bound(Topology.parse("3@1B/s"), Collective("allreduce", 2), 1)


UNEVEN = rails("xx.", ".xx", "x.x", "xxx")


def test_a_solver_without_time() -> None:
    """Exit code 3, with the best closed form, certified."""
    with pytest.raises(BoundUnknown, match="no time left") as caught:
        lp_bound(UNEVEN, "allreduce", 12, time_limit_s=0)
    assert caught.value.exit_code == EXIT_UNKNOWN
    assert caught.value.best.seconds > 0
    replay(caught.value.best.certificate, UNEVEN)


@pytest.mark.parametrize("solver", [HighsSolver, CbcSolver])
def test_a_solver_prints_nothing(solver: MakeSolver, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output is the command's own: with --json it is read by a program."""
    assert lp_bound(UNEVEN, "allreduce", 12, solver=solver).seconds > 0
    assert capfd.readouterr() == ("", "")


def test_a_solver_is_silent_before_it_enables_callbacks() -> None:
    """As the constructor of HiGHS 1.16 does, which then prints its version."""

    class Highs:
        def __init__(self) -> None:
            self.is_silent, self.was_silent = False, False
            self.enableCallbacks()

        def silent(self) -> None:
            self.is_silent = True

        def enableCallbacks(self) -> None:  # noqa: N802
            self.was_silent = self.is_silent

    made = _silent_highs(SimpleNamespace(Highs=Highs))
    assert isinstance(made, Highs) and made.was_silent and not Highs().was_silent


class GivesUpLater:
    """Solves once, then has had enough."""

    def __init__(self, program: LinearProgram) -> None:
        self.inner = HighsSolver(program)
        self.solved = 0

    def solve(self, time_limit_s: float) -> Outcome:
        self.solved += 1
        return Unsolved("tired") if self.solved > 1 else self.inner.solve(time_limit_s)


def test_a_solver_that_gives_up_half_way() -> None:
    """What its first duals prove is kept, certified; on some graphs it is more than every closed form knows."""
    gave_up = better = 0
    for seed in range(40):
        rng = random.Random(seed)
        names = "abcdef"
        around = [(a, b, 1 + rng.randrange(9)) for a, b in zip(names, names[1:] + names[0], strict=True)]
        across = [(a, b, 1 + rng.randrange(9)) for a in names for b in names if a != b and rng.random() < 0.5]
        network = FlowNetwork.from_links(names, {(a, b): (a, b, rate) for a, b, rate in [*around, *across]}.values())
        truth = lp_bound(network, "allreduce", 60)
        try:
            lp_bound(network, "allreduce", 60, solver=GivesUpLater)
            continue
        except BoundUnknown as unknown:
            best = unknown.best
        gave_up += 1
        assert 0 < best.seconds <= truth.seconds
        replay(best.certificate)
        better += best.seconds > max(form.seconds for form in closed_forms(network, Demand("allreduce", None), 60))
    assert gave_up > 5
    assert better > 0


def lying(change: Callable[[Solved], Outcome]) -> type:
    """HiGHS with its answers changed."""

    class Liar:
        def __init__(self, program: LinearProgram) -> None:
            self.inner = HighsSolver(program)

        def solve(self, time_limit_s: float) -> Outcome:
            outcome = self.inner.solve(time_limit_s)
            return change(outcome) if isinstance(outcome, Solved) else outcome

    return Liar


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda solved: replace(solved, objective=solved.objective * 1.1), "claims"),
        (lambda solved: replace(solved, objective=solved.objective * 0.9), "claims"),
        (lambda solved: replace(solved, objective=float("nan")), "must be a number"),
        (lambda solved: replace(solved, duals=[float("inf")] * len(solved.duals)), "must be a number"),
        (lambda solved: replace(solved, values=[]), "values"),
        (lambda solved: Infeasible(), "infeasible"),
    ],
)
def test_a_solver_that_returns_nonsense(change: Callable[[Solved], Outcome], message: str) -> None:
    """The claim is compared with what the numbers support."""
    with pytest.raises(SolverError, match=message):
        lp_bound(UNEVEN, "allreduce", 12, solver=lying(change))


@pytest.mark.battery(37)
@pytest.mark.parametrize(
    "change",
    [
        lambda solved: replace(solved, duals=[-dual for dual in solved.duals]),
        lambda solved: replace(solved, duals=[7.0] * len(solved.duals)),
        lambda solved: replace(solved, basic_variables=solved.basic_variables[1:]),
        lambda solved: replace(solved, basic_variables=list(range(len(solved.tight_constraints)))),
        lambda solved: replace(solved, basic_variables=[], tight_constraints=[]),
    ],
)
def test_wrong_duals_or_a_wrong_basis_never_give_too_much(change: Callable[[Solved], Outcome]) -> None:
    """Either an error, or a certified bound that is true."""
    truth = lp_bound(UNEVEN, "allreduce", 12)
    try:
        bound = lp_bound(UNEVEN, "allreduce", 12, solver=lying(change))
    except SolverError:
        return
    assert bound.seconds <= truth.seconds
    assert bound.achievable is None or bound.achievable >= truth.seconds
    replay(bound.certificate, UNEVEN)


def test_the_program_reads_like_the_formula() -> None:
    """PuLP writes it: named variables, one constraint a port, a switch and a cut."""
    cuts = CutProgram(FlowNetwork.from_topology(Topology.parse("2@1B/s")), Demand("allreduce", None), Fraction(1))
    text = str(pulp_problem(cuts.program)[0])
    for word in ("MINIMIZE", "port_out_h0:", "reduce_through_core:", "cut_0:", "root_h0", "roots:"):
        assert word in text


def test_names_that_differ_only_in_signs_stay_apart() -> None:
    """PuLP tells variables apart by their names, and solvers read letters, digits and _ only."""
    program = LinearProgram()
    three = [program.variable(name, cost=1) for name in ("a-b", "a b", "a_b")]
    for number, variable in enumerate(three):
        program.constraint("at least", ((variable, Fraction(1)),), ">=", Fraction(number))
    _, variables, _ = pulp_problem(program)
    assert [each.name for each in variables] == ["a_b", "a_b_2", "a_b_3"]
    outcome = CbcSolver(program).solve(5.0)
    assert isinstance(outcome, Solved)
    assert outcome.values == [0.0, 1.0, 2.0]
    assert outcome.duals[1:] == [1.0, 1.0]


@pytest.mark.parametrize("solver", [HighsSolver, CbcSolver])
def test_outcomes_of_a_solver(solver: MakeSolver) -> None:
    """An optimum with its basis, constraints added later, a contradiction, and no time."""
    program = LinearProgram()
    x, y = program.variable("x", cost=1), program.variable("y", cost=2)
    program.constraint("sum", ((x, Fraction(1)), (y, Fraction(1))), ">=", Fraction(3))
    solve = solver(program).solve
    first = solve(5.0)
    assert isinstance(first, Solved)
    assert (first.objective, first.values, first.duals) == (3.0, [3.0, 0.0], [1.0])
    assert (first.basic_variables, first.tight_constraints) == ([x], [0])
    program.constraint("little of x", ((x, Fraction(1)),), "<=", Fraction(1))
    second = solve(5.0)
    assert isinstance(second, Solved)
    assert (second.objective, second.values, second.duals) == (5.0, [1.0, 2.0], [2.0, -1.0])
    assert exact_vertex(program, second) == ([Fraction(1), Fraction(2)], [Fraction(2), Fraction(-1)])
    assert isinstance(solve(0.0), Unsolved)
    program.constraint("no y", ((y, Fraction(1)),), "=", Fraction(0))
    assert isinstance(solve(5.0), Infeasible)


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import pulp

    monkeypatch.setattr(pulp.COIN_CMD, "available", lambda self: False)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda self: False)
    with pytest.raises(EnvironmentMissing, match="CBC is not installed"):
        lp_bound(UNEVEN, "allreduce", 12, solver=CbcSolver)
    for name in ("pulp", "highspy"):
        monkeypatch.setitem(sys.modules, name, None)
    for solver, name in ((CbcSolver, "pulp"), (HighsSolver, "highspy")):
        with pytest.raises(EnvironmentMissing, match=rf"{name} is not installed: pip install {name}"):
            lp_bound(UNEVEN, "allreduce", 12, solver=solver)


def test_an_exact_vertex() -> None:
    """x + 3y >= 1/7, 2x + y >= 1/3: the basis says both are tight, and the exact point follows from floats."""
    program = LinearProgram()
    x, y = program.variable("x", cost=1), program.variable("y", cost=1)
    program.constraint("one", ((x, Fraction(1)), (y, Fraction(3))), ">=", Fraction(1, 7))
    program.constraint("two", ((x, Fraction(2)), (y, Fraction(1))), ">=", Fraction(1, 3))
    outcome = HighsSolver(program).solve(1.0)
    assert isinstance(outcome, Solved)
    forced = replace(outcome, basic_variables=[0, 1], tight_constraints=[0, 1])
    assert exact_vertex(program, forced) == ([Fraction(6, 35), Fraction(-1, 105)], [Fraction(1, 5), Fraction(2, 5)])
    assert exact_vertex(program, replace(outcome, basic_variables=[0], tight_constraints=[0, 1])) is None
    program.constraint("three", ((x, Fraction(2)), (y, Fraction(6))), ">=", Fraction(1))
    assert exact_vertex(program, replace(outcome, basic_variables=[0, 1], tight_constraints=[0, 2])) is None


def test_a_vertex_with_long_fractions() -> None:
    """Twelve unknowns whose exact values have denominators far beyond a float."""
    program = LinearProgram()
    columns = [program.variable(f"x{i}", cost=1) for i in range(12)]
    for i in columns:
        entries = ((columns[i], Fraction(1)), (columns[(i + 1) % 12], Fraction(1, 10**5 + 2 * i + 1)))
        program.constraint(f"row {i}", entries, ">=", Fraction(1, 10**4 + i))
    outcome = HighsSolver(program).solve(1.0)
    assert isinstance(outcome, Solved)
    vertex = exact_vertex(program, outcome)
    assert vertex is not None
    values, _ = vertex
    assert max(value.denominator for value in values) > 2**100
    for row in program.constraints:
        assert sum(values[column] * entry for column, entry in row.coefficients) == row.rhs
