"""The only module that calls an LP solver: HiGHS directly, CBC through PuLP as a cross-check.

A solver's answer is a claim. `Solved` has its floats and its basis, and `exact_vertex` computes the rational vertex of
the basis: the linear system is solved by iterative refinement (float factorisation, exact residuals) until the solution
can be rounded to fractions that satisfy every equation exactly
(Gleixner, Steffy, Wolter: Iterative refinement for linear programming, INFORMS J. Computing 28, 2016).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from math import ceil, isfinite, lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from optcc.errors import EnvironmentMissing

AT_LEAST, AT_MOST, EQUAL = ">=", "<=", "="
STEP_BITS = 24
BITS_MAX = 6144
Entry = tuple[int, Fraction]
Coefficients = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """sum of coefficient * variable, then `sense`, then `rhs`."""

    name: str
    coefficients: Coefficients
    sense: str
    rhs: Fraction


@dataclass(slots=True)
class LinearProgram:
    """Minimise `objective` over variables that are not negative, subject to constraints; more can be added."""

    variables: list[str] = field(default_factory=list)
    objective: dict[int, Fraction] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)

    def variable(self, name: str, cost: int = 0) -> int:
        """Adds a variable; returns its number."""
        self.variables.append(name)
        if cost:
            self.objective[len(self.variables) - 1] = Fraction(cost)
        return len(self.variables) - 1

    def constraint(self, name: str, coefficients: Coefficients, sense: str, rhs: Fraction) -> int:
        """Adds a constraint; returns its number."""
        self.constraints.append(Constraint(name, coefficients, sense, rhs))
        return len(self.constraints) - 1


@dataclass(frozen=True, slots=True)
class Solved:
    """An optimum as claimed: floats, and the basis (basic variables, tight constraints)."""

    objective: float
    values: list[float]
    duals: list[float]
    basic_variables: list[int]
    tight_constraints: list[int]


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The solver claims that no values satisfy all constraints."""


@dataclass(frozen=True, slots=True)
class Unsolved:
    """The solver found neither an optimum nor a contradiction."""

    reason: str


Outcome = Solved | Infeasible | Unsolved


class Solver(Protocol):
    """Solves one program repeatedly while constraints are added to it."""

    def solve(self, time_limit_s: float) -> Outcome:
        """The outcome within `time_limit_s`."""
        ...


MakeSolver = Callable[[LinearProgram], Solver]


class HighsSolver:
    """HiGHS, simplex, one thread, warm-started from the last basis."""

    def __init__(self, program: LinearProgram) -> None:
        self.program = program
        self.highspy = _import("highspy")
        self.highs = _silent_highs(self.highspy)
        for option, value in (("threads", 1), ("solver", "simplex"), ("random_seed", 0)):
            self.highs.setOptionValue(option, value)
        self.highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
        self.highs.setOptionValue("dual_feasibility_tolerance", 1e-9)
        self.given = 0
        infinity = self.highspy.kHighsInf
        for column in range(len(program.variables)):
            self.highs.addCol(float(program.objective.get(column, 0)), 0.0, infinity, 0, [], [])

    def solve(self, time_limit_s: float) -> Outcome:
        infinity = self.highspy.kHighsInf
        for row in self.program.constraints[self.given :]:
            low = -infinity if row.sense == AT_MOST else float(row.rhs)
            high = infinity if row.sense == AT_LEAST else float(row.rhs)
            columns = [column for column, _ in row.coefficients]
            self.highs.addRow(low, high, len(columns), columns, [float(value) for _, value in row.coefficients])
        self.given = len(self.program.constraints)
        if time_limit_s <= 0:
            return Unsolved("no time left")
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + time_limit_s)
        self.highs.run()
        status = self.highs.getModelStatus()
        statuses = self.highspy.HighsModelStatus
        if status == statuses.kInfeasible:
            return Infeasible()
        if status != statuses.kOptimal:
            return Unsolved(f"HiGHS: {self.highs.modelStatusToString(status)}")
        solution, basis = self.highs.getSolution(), self.highs.getBasis()
        basic = self.highspy.HighsBasisStatus.kBasic
        return Solved(
            self.highs.getObjectiveValue(),
            list(solution.col_value),
            list(solution.row_dual),
            [number for number, status in enumerate(basis.col_status) if status == basic],
            [number for number, status in enumerate(basis.row_status) if status != basic],
        )


def _silent_highs(highspy: Any) -> Any:
    """A solver that prints nothing. From 1.16 on the constructor enables callbacks, which prints the version."""

    def enable(highs: Any) -> None:
        highs.silent()
        highspy.Highs.enableCallbacks(highs)

    highs = type("SilentHighs", (highspy.Highs,), {"enableCallbacks": enable})()
    highs.silent()
    return highs


def exact_vertex(program: LinearProgram, solved: Solved) -> tuple[list[Fraction], list[Fraction]] | None:
    """The exact values and duals of the basis of `solved`; None if the basis is singular or does not converge.

    They satisfy the tight constraints exactly; the caller must check feasibility.
    """
    columns, tight = solved.basic_variables, solved.tight_constraints
    if len(columns) != len(tight):
        return None
    place = {column: position for position, column in enumerate(columns)}
    by_row: list[list[Entry]] = [[] for _ in tight]
    by_column: list[list[Entry]] = [[] for _ in columns]
    for position, row in enumerate(tight):
        for column, value in program.constraints[row].coefficients:
            if column in place:
                by_row[position].append((place[column], value))
                by_column[place[column]].append((position, value))
    factors = _factorise(by_row)
    if factors is None:
        return None
    basic_values = _solve_exactly(by_row, [program.constraints[row].rhs for row in tight], factors.solve)
    if basic_values is None:
        return None
    costs = [program.objective.get(column, Fraction(0)) for column in columns]
    tight_duals = _solve_exactly(by_column, costs, lambda residual: factors.solve(residual, "T"))
    if tight_duals is None:
        return None
    values, duals = [Fraction(0)] * len(program.variables), [Fraction(0)] * len(program.constraints)
    for column, value in zip(columns, basic_values, strict=True):
        values[column] = value
    for row, dual in zip(tight, tight_duals, strict=True):
        duals[row] = dual
    return values, duals


def _factorise(rows: Sequence[Sequence[Entry]]) -> Any:
    """The LU factors of a square sparse matrix in floats; None if it is singular."""
    numpy, sparse, linalg = _import("numpy"), _import("scipy.sparse"), _import("scipy.sparse.linalg")
    triples = [(row, column, float(value)) for row, entries in enumerate(rows) for column, value in entries]
    where_row, where_column, data = zip(*triples, strict=True) if triples else ((), (), ())
    matrix = sparse.csc_matrix((numpy.array(data), (where_row, where_column)), shape=(len(rows), len(rows)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return linalg.splu(matrix)
    except (RuntimeError, Warning):
        return None


def _solve_exactly(
    rows: Sequence[Sequence[Entry]], rhs: Sequence[Fraction], solve_floats: Callable[[Any], Any]
) -> list[Fraction] | None:
    """The rational solution of a square system, given a way to solve it in floats; None if that does not converge."""
    numpy = _import("numpy")
    scales = [lcm(b.denominator, *(v.denominator for _, v in entries)) for entries, b in zip(rows, rhs, strict=True)]
    whole = [
        [(column, value.numerator * (scale // value.denominator)) for column, value in entries]
        for entries, scale in zip(rows, scales, strict=True)
    ]
    residual = [b.numerator * (scale // b.denominator) for b, scale in zip(rhs, scales, strict=True)]
    solution = [0] * len(rows)  # in units of 2**-bits
    bits, attempt = 0, 2 * STEP_BITS
    while bits < BITS_MAX:
        bits += STEP_BITS
        residual = [each << STEP_BITS for each in residual]
        step = solve_floats(numpy.array([each / scale for each, scale in zip(residual, scales, strict=True)]))
        if not all(isfinite(each) and abs(each) < 2.0**62 for each in step):
            return None
        whole_step = [round(float(each)) for each in step]
        solution = [(each << STEP_BITS) + more for each, more in zip(solution, whole_step, strict=True)]
        for row, entries in enumerate(whole):
            residual[row] -= sum(value * whole_step[column] for column, value in entries)
        if bits >= attempt:
            attempt *= 2
            found = [Fraction(each, 1 << bits).limit_denominator(1 << (bits // 2 - 2)) for each in solution]
            if all(
                sum(value * found[column] for column, value in entries) == b
                for entries, b in zip(rows, rhs, strict=True)
            ):
                return found
    return None


class CbcSolver:
    """CBC through PuLP, simplex: PuLP writes the program with its names, CBC solves it and writes its last basis."""

    def __init__(self, program: LinearProgram) -> None:
        self.program = program
        self.pulp = _import("pulp")
        self.problem, self.variables, self.constraints = pulp_problem(program)
        self.names = {constraint.name for constraint in self.constraints}

    def solve(self, time_limit_s: float) -> Outcome:
        if time_limit_s <= 0:
            return Unsolved("no time left")
        with _quiet_pulp():
            for row in self.program.constraints[len(self.constraints) :]:
                self.constraints.append(_add_to_pulp(self.problem, self.variables, row, self.names))
            # PuLP splits the command line at blanks; names of temporary folders have none.
            with TemporaryDirectory() as folder:
                basis = Path(folder) / "last.bas"
                command = self._command(["initialSolve", f"basisO {basis}"], time_limit_s)
                try:
                    self.problem.solve(command)
                except self.pulp.PulpSolverError as error:
                    return Unsolved(f"CBC: {error}")
                text = basis.read_text(encoding="utf-8") if basis.is_file() else ""
            if self.problem.sol_status == self.pulp.LpSolutionInfeasible:
                return Infeasible()
            if self.problem.sol_status != self.pulp.LpSolutionOptimal:
                return Unsolved(f"CBC: {self.pulp.LpSolution[self.problem.sol_status]}")
            return Solved(
                float(self.pulp.value(self.problem.objective)),
                [float(variable.varValue or 0) for variable in self.variables],
                [float(constraint.pi or 0) for constraint in self.constraints],
                *self._basis(text),
            )

    def _command(self, options: list[str], time_limit_s: float) -> Any:
        """CBC: the binary bundled with PuLP, else the one on the PATH."""
        for kind in (getattr(self.pulp, "PULP_CBC_CMD", None), self.pulp.COIN_CMD):
            command = kind and kind(mip=False, msg=False, timeLimit=max(1, ceil(time_limit_s)), options=options)
            if command and command.available():
                return command
        raise EnvironmentMissing("CBC is not installed: PuLP has none for this machine: pip install 'pulp[cbc]'")

    def _basis(self, text: str) -> tuple[list[int], list[int]]:
        """The basic variables and the tight constraints of a basis in the MPS format.

        `XU` and `XL` list a basic variable and a constraint at its upper or lower side; all other variables are at zero
        and all other constraints slack.
        """
        rows, columns, _ = self.problem.normalisedNames()
        variable = {columns[each.name]: number for number, each in enumerate(self.variables) if each.name in columns}
        constraint = {name: number for number, name in enumerate(rows.values())}
        named = [line.split() for line in text.splitlines() if line.startswith((" XU", " XL"))]
        return sorted(variable[words[1]] for words in named), sorted(constraint[words[2]] for words in named)


DEFAULT_SOLVER = "highs"
SOLVERS: Mapping[str, MakeSolver] = {DEFAULT_SOLVER: HighsSolver, "cbc": CbcSolver}


def pulp_problem(program: LinearProgram) -> tuple[Any, list[Any], list[Any]]:
    """`program` as a PuLP problem, with its variables and constraints in order; `str(problem)` is readable."""
    pulp = _import("pulp")
    with _quiet_pulp():
        problem, names = pulp.LpProblem("bound", pulp.LpMinimize), set[str]()
        variables = [pulp.LpVariable(_plain(name, names), lowBound=0) for name in program.variables]
        cost = pulp.lpSum(float(cost) * variables[number] for number, cost in program.objective.items())
        problem += cost, "least_time"
        names = set()
        return problem, variables, [_add_to_pulp(problem, variables, row, names) for row in program.constraints]


def _add_to_pulp(problem: Any, variables: Sequence[Any], row: Constraint, names: set[str]) -> Any:
    """Adds a constraint and its name; returns PuLP's constraint."""
    left = _import("pulp").lpSum(float(value) * variables[number] for number, value in row.coefficients)
    right = float(row.rhs)
    constraint = left >= right if row.sense == AT_LEAST else left <= right if row.sense == AT_MOST else left == right
    problem.addConstraint(constraint, _plain(row.name, names))
    return constraint


def _plain(name: str, names: set[str]) -> str:
    """`name` in letters, digits and _, with a number if it is already in `names`; added to them."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    number = 1
    while plain in names:
        number += 1
        plain = re.sub(r"\W", "_", f"{name} {number}", flags=re.ASCII)
    names.add(plain)
    return plain


@contextmanager
def _quiet_pulp() -> Iterator[None]:
    """Silences PuLP 3's warnings about names that change in version 4; the old ones work in all supported versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _import(name: str) -> Any:
    """A solver, imported when it is needed."""
    try:
        return import_module(name)
    except ImportError:
        raise EnvironmentMissing(f"{name.split('.')[0]} is not installed: pip install {name.split('.')[0]}") from None
