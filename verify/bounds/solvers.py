"""The only place that calls an LP solver: HiGHS solves, CBC gives a second opinion, PuLP writes what a person reads.

A solver's word is a claim. `Solved` carries it together with the basis, and `exact_vertex` turns the basis into
rationals that can be checked: the linear system that the basis stands for is solved by iterative refinement (a float
factorisation, exact residuals) until its solution can be read off as fractions and satisfies every equation exactly
(Gleixner, Steffy, Wolter: Iterative refinement for linear programming, INFORMS J. Computing 28, 2016).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from math import isfinite, lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from optcc.errors import EnvironmentMissing, SolverError

AT_LEAST, AT_MOST, EQUAL = ">=", "<=", "="
STEP_BITS = 24
BITS_MAX = 6144
Entry = tuple[int, Fraction]
Coefficients = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """sum of coefficient * column, then `sense`, then `rhs`."""

    name: str
    coefficients: Coefficients
    sense: str
    rhs: Fraction


@dataclass(slots=True)
class Program:
    """Minimise `objective` over columns that are not negative, subject to rows; rows may be added later."""

    columns: list[str] = field(default_factory=list)
    objective: dict[int, Fraction] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def column(self, name: str, cost: int = 0) -> int:
        """A new column; its number."""
        self.columns.append(name)
        if cost:
            self.objective[len(self.columns) - 1] = Fraction(cost)
        return len(self.columns) - 1

    def row(self, name: str, coefficients: Coefficients, sense: str, rhs: Fraction) -> int:
        """A new row; its number."""
        self.rows.append(Row(name, coefficients, sense, rhs))
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class Solved:
    """What a solver says is optimal: floats, and the basis (columns that are basic, rows that are not)."""

    objective: float
    values: list[float]
    duals: list[float]
    basic_columns: list[int]
    tight_rows: list[int]


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A solver says that no values satisfy all rows."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A solver gave up."""

    reason: str


Outcome = Solved | Infeasible | Unknown


class Solver(Protocol):
    """Solves one program again and again while rows are added to it."""

    def solve(self, time_limit_s: float) -> Outcome:
        """The outcome within `time_limit_s`."""
        ...


class HighsSolver:
    """HiGHS, simplex, one thread; starts each time from the last basis."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.highspy = _import("highspy")
        self.highs = self.highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("solver", "simplex"), ("random_seed", 0)):
            self.highs.setOptionValue(option, value)
        self.highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
        self.highs.setOptionValue("dual_feasibility_tolerance", 1e-9)
        self.rows_given = 0
        infinity = self.highspy.kHighsInf
        for column in range(len(program.columns)):
            self.highs.addCol(float(program.objective.get(column, 0)), 0.0, infinity, 0, [], [])

    def solve(self, time_limit_s: float) -> Outcome:
        infinity = self.highspy.kHighsInf
        for row in self.program.rows[self.rows_given :]:
            low = -infinity if row.sense == AT_MOST else float(row.rhs)
            high = infinity if row.sense == AT_LEAST else float(row.rhs)
            columns = [column for column, _ in row.coefficients]
            self.highs.addRow(low, high, len(columns), columns, [float(value) for _, value in row.coefficients])
        self.rows_given = len(self.program.rows)
        if time_limit_s <= 0:
            return Unknown("no time left")
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + time_limit_s)
        self.highs.run()
        status = self.highs.getModelStatus()
        statuses = self.highspy.HighsModelStatus
        if status == statuses.kInfeasible:
            return Infeasible()
        if status != statuses.kOptimal:
            return Unknown(f"HiGHS: {self.highs.modelStatusToString(status)}")
        solution, basis = self.highs.getSolution(), self.highs.getBasis()
        basic = self.highspy.HighsBasisStatus.kBasic
        return Solved(
            self.highs.getObjectiveValue(),
            list(solution.col_value),
            list(solution.row_dual),
            [number for number, status in enumerate(basis.col_status) if status == basic],
            [number for number, status in enumerate(basis.row_status) if status != basic],
        )


def exact_vertex(program: Program, solved: Solved) -> tuple[list[Fraction], list[Fraction]] | None:
    """The exact values and duals of the basis of `solved`; None if it has no clear solution.

    They satisfy the rows that the basis makes tight, and nothing more: whether they are feasible is for the caller
    to check.
    """
    columns, tight = solved.basic_columns, solved.tight_rows
    if len(columns) != len(tight):
        return None
    place = {column: position for position, column in enumerate(columns)}
    by_row: list[list[Entry]] = [[] for _ in tight]
    by_column: list[list[Entry]] = [[] for _ in columns]
    for position, row in enumerate(tight):
        for column, value in program.rows[row].coefficients:
            if column in place:
                by_row[position].append((place[column], value))
                by_column[place[column]].append((position, value))
    factors = _factorise(by_row)
    if factors is None:
        return None
    basic_values = _solve_exactly(by_row, [program.rows[row].rhs for row in tight], factors.solve)
    if basic_values is None:
        return None
    costs = [program.objective.get(column, Fraction(0)) for column in columns]
    tight_duals = _solve_exactly(by_column, costs, lambda residual: factors.solve(residual, "T"))
    if tight_duals is None:
        return None
    values, duals = [Fraction(0)] * len(program.columns), [Fraction(0)] * len(program.rows)
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


def read_as_pulp(program: Program, name: str = "bound") -> Any:
    """`program` as a PuLP problem, every variable and constraint under its name; `str` of it is what a person reads."""
    pulp = _import("pulp")
    with _quiet_pulp():
        problem = pulp.LpProblem(name, pulp.LpMinimize)
        columns = [pulp.LpVariable(column.replace(" ", "_"), lowBound=0) for column in program.columns]
        time = pulp.lpSum(float(cost) * columns[column] for column, cost in program.objective.items())
        problem += time, "least_time"
        for row in program.rows:
            left, right = (
                pulp.lpSum(float(value) * columns[column] for column, value in row.coefficients),
                float(row.rhs),
            )
            sides = {AT_LEAST: left >= right, AT_MOST: left <= right, EQUAL: left == right}
            problem += sides[row.sense], row.name.replace(" ", "_")
    return problem


def lp_text(program: Program) -> str:
    """`program` in the CPLEX LP format, by PuLP."""
    problem = read_as_pulp(program)
    with TemporaryDirectory() as folder, _quiet_pulp():
        path = Path(folder) / "bound.lp"
        problem.writeLP(str(path))
        return path.read_text(encoding="utf-8")


def cbc_objective(program: Program, time_limit_s: float) -> float:
    """What CBC says the optimum is; raises SolverError if it does not say that it found one."""
    pulp = _import("pulp")
    problem = read_as_pulp(program)
    with _quiet_pulp():
        status = problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s))
        if status != pulp.LpStatusOptimal:
            raise SolverError(f"CBC: {pulp.LpStatus[status]}: must find an optimum")
        return float(pulp.value(problem.objective))


@contextmanager
def _quiet_pulp() -> Iterator[None]:
    """PuLP 3 warns that version 4 will spell things otherwise; the old spelling works in all that we accept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _import(name: str) -> Any:
    """A solver, imported when it is needed."""
    try:
        return import_module(name)
    except ImportError:
        raise EnvironmentMissing(f"{name.split('.')[0]} is not installed: pip install {name.split('.')[0]}") from None
