"""Queries to Z3: each in its own context, with three outcomes. The only module that imports z3.

    sat       `Sat`      a model; callers re-check its values
    unsat     `Claim`    the solver's claim, without a proof that could be checked
    unknown   `Unknown`  time, steps or memory ran out: nothing is decided

`Checked` is a statement decided in exact arithmetic or by enumeration, without a solver: a type of its own, so that a
claim cannot pass for it.

A query is a list of named families of constraints over variables that are looked up by meaning:

    >>> from optcc.verify.smt import Query
    >>> query = Query("two different ranks below two")
    >>> first, second = query.flag("first", 1), query.flag("second", 1)
    >>> query.require("different", first != second)
    >>> answer = query.ask()
    >>> answer.values["first", 1] != answer.values["second", 1]
    True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

from optcc.errors import EnvironmentMissing, InputError, SolverUnknown

Key = tuple[str | int, ...]
"""The meaning of a variable: ("holds", 3, 0, 2)."""
Value = bool | Fraction
Term = Any
"""A formula or number of z3, which has no type annotations; values leave a `Query` only through `Sat.values`."""

_STEPS_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """The budget of a query, in seconds and in the solver's own steps (the same on every machine).

    Raises InputError for a budget that is not above zero.
    """

    seconds: float = 60.0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 10**6:
            raise InputError(f"limit of {self.seconds} s: must be above 0 and below 10^6")
        if self.steps is not None and not 0 < self.steps <= _STEPS_MAX:
            raise InputError(f"limit of {self.steps} steps: must be from 1 to {_STEPS_MAX}")

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (f" or {self.steps} steps" if self.steps else "")


DEFAULT_LIMIT = Limit()


@dataclass(frozen=True, slots=True)
class Sat:
    """`statement` holds for these values."""

    statement: str
    values: Mapping[Key, Value]


@dataclass(frozen=True, slots=True)
class Claim:
    """A solver claims that `statement` holds, without a checkable proof."""

    statement: str
    solver: str

    def __str__(self) -> str:
        return f"{self.statement} (claimed by {self.solver}, not checked)"


@dataclass(frozen=True, slots=True)
class Checked:
    """`statement` was decided without a solver, by `how`."""

    statement: str
    how: str

    def __str__(self) -> str:
        return f"{self.statement} (checked: {self.how})"


@dataclass(frozen=True, slots=True)
class Unknown:
    """`statement` is undecided: `reason` is why the search stopped, `reached` what was decided before."""

    statement: str
    reason: str
    reached: str = ""

    def __str__(self) -> str:
        reached = f"; {self.reached}" if self.reached else ""
        return f"{self.statement} (unknown: {self.reason}{reached})"


T = TypeVar("T")


def require_known(answer: T | Unknown) -> T:
    """The answer if it is decided, for commands.

    Raises SolverUnknown (exit code 3) for `Unknown`.
    """
    if isinstance(answer, Unknown):
        raise SolverUnknown(str(answer))
    return answer


class Query:
    """One query: is there a model of all families of constraints?

    `statement` is what a `Sat` shows, `denial` what a `Claim` claims.

    Raises EnvironmentMissing if z3 is not installed.
    """

    def __init__(self, statement: str, denial: str = "") -> None:
        self.statement = statement
        self.denial = denial or f"not: {statement}"
        self.z3 = _import_z3()
        self.context: Any = self.z3.Context()
        self._variables: dict[Key, Term] = {}
        self._constraints: list[tuple[str, Term]] = []

    # --- variables, by meaning ----------------------------------------------------------------------------------------

    def flag(self, *meaning: str | int) -> Term:
        """The Boolean variable of this meaning."""
        return self._variable(meaning, self.z3.Bool)

    def real(self, *meaning: str | int) -> Term:
        """The real variable of this meaning."""
        return self._variable(meaning, self.z3.Real)

    def integer(self, *meaning: str | int) -> Term:
        """The integer variable of this meaning."""
        return self._variable(meaning, self.z3.Int)

    def _variable(self, meaning: Key, make: Any) -> Term:
        if meaning not in self._variables:
            self._variables[meaning] = make(" ".join(map(str, meaning)), self.context)
        return self._variables[meaning]

    # --- formulas in this query's context; empty lists are allowed ----------------------------------------------------

    @cached_property
    def true(self) -> Term:
        """True."""
        return self.z3.BoolVal(True, self.context)

    @cached_property
    def false(self) -> Term:
        """False."""
        return self.z3.BoolVal(False, self.context)

    def number(self, value: Fraction | int) -> Term:
        """An exact rational constant."""
        return self.z3.RealVal(str(Fraction(value)), self.context)

    def whole(self, value: int) -> Term:
        """An integer constant, for terms over `integer`s."""
        return self.z3.IntVal(value, self.context)

    def all_of(self, terms: Iterable[Term]) -> Term:
        """Conjunction."""
        return self.z3.And(self.true, *terms)

    def any_of(self, terms: Iterable[Term]) -> Term:
        """Disjunction."""
        return self.z3.Or(self.false, *terms)

    def no(self, term: Term) -> Term:
        """Negation."""
        return self.z3.Not(term)

    def implies(self, cause: Term, effect: Term) -> Term:
        """Implication."""
        return self.z3.Implies(cause, effect)

    def either(self, condition: Term, then: Term, otherwise: Term) -> Term:
        """If-then-else."""
        return self.z3.If(condition, then, otherwise)

    def at_most(self, count: int, terms: Iterable[Term]) -> Term:
        """At most `count` of them hold."""
        listed = [(term, 1) for term in terms]
        return self.z3.PbLe(listed, count) if listed else self.true

    def exactly_one(self, terms: Iterable[Term]) -> Term:
        """Exactly one of them holds."""
        return self.z3.PbEq([(term, 1) for term in terms], 1)

    # --- the query ----------------------------------------------------------------------------------------------------

    def require(self, family: str, *constraints: Term) -> None:
        """Adds constraints to a family."""
        self._constraints += [(family, constraint) for constraint in constraints]

    @property
    def families(self) -> tuple[str, ...]:
        """The names of the families, in order of their first constraint."""
        return tuple(dict.fromkeys(family for family, _ in self._constraints))

    def as_smt_lib(self) -> str:
        """The query in SMT-LIB 2.6, for another solver: what is claimed is that it has no model."""
        solver = self.z3.Solver(ctx=self.context)
        solver.add([constraint for _, constraint in self._constraints])
        return f"(set-logic ALL)\n{solver.to_smt2()}"

    def ask(
        self, limit: Limit = DEFAULT_LIMIT, *, logic: str = "", without: Iterable[str] = ()
    ) -> Sat | Claim | Unknown:
        """The answer. `logic` selects z3's solver for a fragment; `without` leaves families out.

        Does not raise for failures of the solver: an outcome that is neither sat nor unsat is `Unknown`.
        """
        left_out = set(without)
        if not left_out <= set(self.families):
            raise InputError(f"families {sorted(left_out - set(self.families))}: must be among {self.families}")
        try:
            solver = self.z3.SolverFor(logic, ctx=self.context) if logic else self.z3.Solver(ctx=self.context)
            solver.set("timeout", max(1, int(limit.seconds * 1000)))
            if limit.steps is not None:
                solver.set("rlimit", limit.steps)
            solver.add([constraint for family, constraint in self._constraints if family not in left_out])
            outcome = str(solver.check())
            if outcome == "sat":
                model = solver.model()
                values = {key: _value(model.eval(each, True)) for key, each in self._variables.items()}
                return Sat(self.statement, values)
            reason = str(solver.reason_unknown())
        except self.z3.Z3Exception as error:
            return Unknown(self.statement, f"z3: {error}")
        if outcome == "unsat":
            return Claim(self.denial, f"z3 {self.z3.get_version_string()}")
        return Unknown(self.statement, f"z3 stopped ({reason}) within {limit}")


def _value(term: Term) -> Value:
    """The exact value of a number or Boolean in a model."""
    text = str(term)
    if text in ("True", "False"):
        return text == "True"
    return Fraction(term.as_long() if term.is_int() else term.as_fraction())


def _import_z3() -> Any:
    try:
        import z3
    except ImportError:
        raise EnvironmentMissing("z3 is not installed: pip install z3-solver") from None
    return z3
