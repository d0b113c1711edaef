"""Asking Z3: one question, its own context, three answers. The only place that imports z3.

    sat       `Sat`      values for every variable; whoever asked replays them before he believes them
    unsat     `Claim`    a solver says so; nothing that a person could check comes with it
    unknown   `Unknown`  time, steps or memory ran out: nothing is decided

`Checked` is what a claim is not: a statement that was decided in exact arithmetic or by going through all cases,
without a solver. The two are different types, so that nobody passes one off as the other.

A question is a list of named families of constraints over variables that are looked up by what they mean:

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
"""What a variable means: ("holds", 3, 0, 2)."""
Value = bool | Fraction
Term = Any
"""A formula or a number of z3, which has no types; it never leaves a `Query` but through `Sat.values`."""

_STEPS_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a question may take, in seconds and in the solver's own steps (the same on every machine).

    Raises InputError for a limit that is not above zero.
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
    """There are values for which `statement` holds; these are some."""

    statement: str
    values: Mapping[Key, Value]


@dataclass(frozen=True, slots=True)
class Claim:
    """A solver says that `statement` holds, and gives no reason that could be checked."""

    statement: str
    solver: str

    def __str__(self) -> str:
        return f"{self.statement} (claimed by {self.solver}, not checked)"


@dataclass(frozen=True, slots=True)
class Checked:
    """`statement` was decided without a solver; `how` says by what, in words that can be followed."""

    statement: str
    how: str

    def __str__(self) -> str:
        return f"{self.statement} (checked: {self.how})"


@dataclass(frozen=True, slots=True)
class Unknown:
    """`statement` is open: `reason` is why the search stopped, `reached` what is known nevertheless."""

    statement: str
    reason: str
    reached: str = ""

    def __str__(self) -> str:
        reached = f"; {self.reached}" if self.reached else ""
        return f"{self.statement} (unknown: {self.reason}{reached})"


T = TypeVar("T")


def require_known(answer: T | Unknown) -> T:
    """For commands: the answer if there is one.

    Raises SolverUnknown (exit code 3) for one that stayed open.
    """
    if isinstance(answer, Unknown):
        raise SolverUnknown(str(answer))
    return answer


class Query:
    """One question: are there values for which all families of constraints hold?

    `statement` says what a `Sat` shows, `denial` what a `Claim` claims.

    Raises EnvironmentMissing if z3 is not installed.
    """

    def __init__(self, statement: str, denial: str = "") -> None:
        self.statement = statement
        self.denial = denial or f"not: {statement}"
        self.z3 = _import_z3()
        self.context: Any = self.z3.Context()
        self._variables: dict[Key, Term] = {}
        self._constraints: list[tuple[str, Term]] = []

    # --- variables, by what they mean ---------------------------------------------------------------------------------

    def flag(self, *meaning: str | int) -> Term:
        """The truth value of this meaning."""
        return self._variable(meaning, self.z3.Bool)

    def real(self, *meaning: str | int) -> Term:
        """The real number of this meaning."""
        return self._variable(meaning, self.z3.Real)

    def integer(self, *meaning: str | int) -> Term:
        """The whole number of this meaning."""
        return self._variable(meaning, self.z3.Int)

    def _variable(self, meaning: Key, make: Any) -> Term:
        if meaning not in self._variables:
            self._variables[meaning] = make(" ".join(map(str, meaning)), self.context)
        return self._variables[meaning]

    # --- formulas: z3's, in this question's context, and right for empty lists ----------------------------------------

    @cached_property
    def true(self) -> Term:
        """What always holds."""
        return self.z3.BoolVal(True, self.context)

    @cached_property
    def false(self) -> Term:
        """What never holds."""
        return self.z3.BoolVal(False, self.context)

    def number(self, value: Fraction | int) -> Term:
        """An exact number."""
        return self.z3.RealVal(str(Fraction(value)), self.context)

    def whole(self, value: int) -> Term:
        """An exact whole number, for terms over `integer`s."""
        return self.z3.IntVal(value, self.context)

    def all_of(self, terms: Iterable[Term]) -> Term:
        """Every one holds."""
        return self.z3.And(self.true, *terms)

    def any_of(self, terms: Iterable[Term]) -> Term:
        """At least one holds."""
        return self.z3.Or(self.false, *terms)

    def no(self, term: Term) -> Term:
        """It does not hold."""
        return self.z3.Not(term)

    def implies(self, cause: Term, effect: Term) -> Term:
        """Where `cause` holds, `effect` does."""
        return self.z3.Implies(cause, effect)

    def either(self, condition: Term, then: Term, otherwise: Term) -> Term:
        """`then` where `condition` holds, else `otherwise`."""
        return self.z3.If(condition, then, otherwise)

    def at_most(self, count: int, terms: Iterable[Term]) -> Term:
        """No more than `count` of them hold."""
        listed = [(term, 1) for term in terms]
        return self.z3.PbLe(listed, count) if listed else self.true

    def exactly_one(self, terms: Iterable[Term]) -> Term:
        """One of them holds, and no other."""
        return self.z3.PbEq([(term, 1) for term in terms], 1)

    # --- the question -------------------------------------------------------------------------------------------------

    def require(self, family: str, *constraints: Term) -> None:
        """Adds constraints to a family."""
        self._constraints += [(family, constraint) for constraint in constraints]

    @property
    def families(self) -> tuple[str, ...]:
        """The names of the families, in the order in which they came."""
        return tuple(dict.fromkeys(family for family, _ in self._constraints))

    def ask(
        self, limit: Limit = DEFAULT_LIMIT, *, logic: str = "", without: Iterable[str] = ()
    ) -> Sat | Claim | Unknown:
        """The answer. `logic` names z3's solver for a fragment; `without` leaves families out, to see what they do.

        Never raises for what the solver does: an answer that is neither sat nor unsat is `Unknown`.
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
    """A number or truth value of a model, exact."""
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
