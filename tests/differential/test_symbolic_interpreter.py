"""The symbolic interpreter against CPython: generated schedule functions write the same transfers, or are not read.

Programs have loops, conditions, reassignments, helpers, comprehensions, and names that are locals, globals, arguments
and variables of comprehensions at once. A program is run with few ranks, under a program that records what is written
and refuses nothing. Where Python raises an error, the symbolic program must not be one.
"""

from __future__ import annotations

import ast
import linecache
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from optcc.dsl import Definition
from optcc.schedule import COPY, DATA, REDUCE
from optcc.verify.all_ranks.cases import cases_of
from optcc.verify.all_ranks.names import Names
from optcc.verify.all_ranks.symbolic import OutsideSubset, transfers_of
from optcc.verify.all_ranks.symbolic_expressions import Expressions
from optcc.verify.all_ranks.symbolic_interpreter import read

Row = tuple[int, ...]
RANKS = (2, 3, 4, 5, 7)
SEGMENTS = (1, 2, 3)
ROWS_MAX = 20_000
NAMES = ("a", "b", "c", "d")
HEAD = "from itertools import product\nimport numpy as np\nfrom optcc.dsl import schedule\n"
NUMBER = count()


# What is generated ----------------------------------------------------------------------------------------------------


@dataclass
class Author:
    """Writes a program by somebody's choices; `known` are the names that surely have a value."""

    choose: Callable[[Sequence[str]], str]
    between: Callable[[int, int], int]
    known: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    in_segment: bool = False
    in_made: bool = False

    def one_of(self, *choices: str) -> str:
        return self.choose(choices)

    def chance(self, percent: int) -> bool:
        return self.between(0, 99) < percent

    def name(self) -> str:
        """Mostly one that has a value."""
        return self.one_of(*self.known) if self.known and not self.chance(6) else self.one_of(*NAMES)

    def number(self, depth: int = 2) -> str:
        if depth == 0 or self.chance(45):
            return self.one_of("0", "1", "2", "p", "p", "late") if self.chance(40) else self.name()
        one, other = self.number(depth - 1), self.number(depth - 1)
        form = self.one_of(
            *("({0} + {1})", "({0} - {1})", "({0} + {1})", "({0} - {1})", "({0} * {1})", "(({0}) % p)", "(({0}) % p)"),
            *("(-{0})", "({0} if {2} else {1})", "max({0}, {1})", "min({0}, {1})", "divmod({0}, p)[1]", "({0} // p)"),
            *(("{5}[{0}]", "{5}[{0}]", "len({5})") if self.lists else ()),
            *("({0} ^ {1})", "(2**(({0}) % 3))", "(1 << p.bit_length() - 1)", "2**((p - 1).bit_length())", "(p ^ {0})"),
            *("({0} // {1})", "({0} % {1})", "({0} >> {1})", "len(range({0}, {1}))", "([{0}, {1}] * {0})[{3}]"),
            *("len([{0}] * 2)", "divmod({0}, {1})[{3}]", "{6}"),
            *("[{0}, {1}][{3}]", "len([{0}, {1}])", "{4}({0})", "{4}({0})", "({0}, {1})[-1]"),
        )
        helper = self.one_of(*self.helpers) if self.helpers else "int" if self.chance(5) else ""
        several = self.one_of(*self.lists) if self.lists else ""
        index = "segment.index" if self.in_segment else "len(range(p))"
        return form.format(one, other, self.truth(depth - 1), self.one_of("0", "1"), helper, several, index)

    def truth(self, depth: int = 1) -> str:
        one, other = self.number(min(depth, 1)), self.number(min(depth, 1))
        form = self.one_of(
            *("{0} < {1}", "{0} <= {1}", "{0} == {1}", "{0} != {1}", "0 <= {0} < {1}", "{0} in range({1})", "{0}"),
            *("not {0} > {1}", "({0} < {1} and {0} != 2)", "({0} < 1 or {1} > 1)", "{0} in [{1}, 1]", "{2} is None"),
        )
        return form.format(one, other, self.name())

    def several(self, bound: str) -> str:
        """What a loop goes over, one number at a time; `bound` is a name that a comprehension binds."""
        one = self.number(1)
        return self.one_of(
            *(
                "range(p)",
                "range(p - 1)",
                f"range({one}, p)",
                "program.ranks" if self.in_made else "range(p)",
                *((self.one_of(*self.lists),) if self.lists else ()),
                *((f"[{bound} + 1 for {bound} in {self.one_of(*self.lists)}]",) if self.lists else ()),
                f"range({one})",
                "range(2)",
                "[0, 2, 1]",
            ),
            *(f"[{bound} for {bound} in range(p)]", f"[({bound} + {one}) % p for {bound} in range(p - 1)]"),
            *(f"[{bound} for {bound} in range(p) if {bound} != {one}]", f"({bound} * 1 for {bound} in range(3))"),
            *(
                f"[{one} for {bound} in range(2)]",
                f"[{one}, p - 1]",
                f"[{bound} for _ in range(2) for {bound} in [{one}]]",
            ),
            *(f"list(range({one}))", "numbers", "(0, 1)"),
            *(f"reversed(range({one}, p))", "reversed(range(p))", "reversed([0, 2, 1])", f"range(min({one}, p - 1))"),
            *(f"(2**{bound} for {bound} in range(p.bit_length()))", f"(2**{bound} for {bound} in reversed(range(3)))"),
        )

    def some_lines(self, depth: int, indent: str, most: int = 3) -> list[str]:
        found: list[str] = []
        for _ in range(self.between(1, most)):
            found += [indent + line for line in self.statement(depth)]
        return found

    def block(self, depth: int, bound: tuple[str, ...] = ()) -> list[str]:
        """Indented lines; what they bind has surely no value afterwards, or perhaps another."""
        before, lists = list(self.known), list(self.lists)
        self.known = [*before, *bound]
        found = self.some_lines(depth, "    ", 2)
        self.known, self.lists = before, lists
        return found

    def statement(self, depth: int) -> list[str]:
        if self.in_segment and self.chance(40):
            return self.transfer()
        form = self.one_of(
            "assign",
            "assign",
            "pair",
            "list",
            *(("for", "for", "if", *(("stage",) if self.in_made else ()), "counted") if depth else ()),
        )
        target, other = self.one_of(*NAMES), self.one_of(*NAMES)
        match form:
            case "assign":
                lines = [f"{target} = {self.number()}"]
                self.known.append(target)
            case "list":
                name = self.one_of("xs", "ys")
                lines = [f"{name} = {self.several(other)}"]
                self.lists.append(name)
            case "pair":
                lines = [f"{target}, {other} = {self.number(1)}, {self.number(1)}"]
                self.known += [target, other]
            case "for":
                over = self.several(other)
                lines = [f"for {target} in {over}:", *self.block(depth - 1, (target,))]
            case "counted":
                over = self.one_of(
                    "enumerate(range(p))", f"product(range(2), {self.several(other)})", "enumerate([3, 1])"
                )
                lines = [f"for {target}, {other} in {over}:", *self.block(depth - 1, (target, other))]
            case "stage":
                name = self.one_of("'one'", f"f'{{{self.number(0)}}}'")
                lines = [f"with program.stage({name}):", *self.block(0)]
            case _:
                lines = [f"if {self.truth()}:", *self.block(depth - 1)]
                if self.chance(40):
                    lines += ["else:", *self.block(depth - 1)]
        return lines

    def transfer(self) -> list[str]:
        op, section, src, dst = self.one_of("reduce", "copy"), self.number(1), self.number(1), self.number(1)
        form = self.one_of(
            "segment[{1}].{0}(src={2}, dst={3})",
            "segment[({1}) % p].{0}({2}, ({3}) % p)",
            "segment[{4}].{0}(src={4}, dst=({4} + {3}) % p)",
            "segment[{1}].{0}(src={2}, dst={3}, into=segment.scratch({1}))",
            "segment.scratch({4}, 1).{0}(src={2}, dst={3}, into=segment[{4}])",
            "segment.{0}((lanes + {1}) % p, src=lanes, dst=(lanes + {2}) % p)"
            if self.in_made
            else "segment[0].{0}(0, 1)",
            "write(segment, {1}, {2})" if self.in_made else "segment[p - 1].{0}(1, 0)",
        )
        return [form.format(op, section, src, dst, self.name())]

    def program(self) -> str:
        lines = [f"{name} = {self.between(0, 2)}" for name in (*NAMES, "late") if self.chance(50) or name == "late"]
        lines += ["numbers = (0, 1)"]
        for number in range(self.between(0, 2)):
            argument, default = self.one_of(*NAMES), self.between(0, 2)
            self.known, self.lists = [argument], []
            parameters = f"{argument}, p=3" if self.chance(50) else f"{argument}, p={default}, late=1"
            body = [*self.some_lines(1, "    ", 2), f"    return {self.number(1)}"]
            lines += [f"def helper_{number}({parameters}):", *body]
            self.helpers.append(f"helper_{number}")
        self.known, self.lists, self.in_segment = ["at", "p"], [], True
        lines += ["def write(segment, at, p):", *self.some_lines(1, "    ", 2)]
        self.known, self.lists, self.in_segment, self.in_made = ["p"], [], False, True
        lines += ["@schedule", "def made(program):", "    p = program.n_ranks", "    lanes = np.arange(p)"]
        if self.chance(60):
            lines += self.some_lines(1, "    ", 3)
        lines += ["    for segment in program.pipeline(sections=p, scratch=2):"]
        self.in_segment = True
        lines += self.some_lines(2, "        ", 4)
        return HEAD + "\n".join(lines) + "\n"


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Programs by Hypothesis's choices: it makes the first one that differs short, and takes 12 ms for each."""
    return Author(
        lambda choices: draw(st.sampled_from(choices)), lambda low, high: draw(st.integers(low, high))
    ).program()


def program_of(seed: int) -> str:
    """A program by a generator's choices: a hundredth of that, and hardly one of them twice."""
    chance = random.Random(seed)
    return Author(chance.choice, chance.randint).program()


# What Python does with it ---------------------------------------------------------------------------------------------


class TooLong(Exception):
    pass


@dataclass
class Recorded:
    """A chunk, a segment or a program, as far as generated schedules use them."""

    rows: list[Row]
    n_ranks: int = 0
    segments: int = 0
    index: int = 0
    section: int = -1
    slot: int = DATA

    @property
    def ranks(self) -> range:
        return range(self.n_ranks)

    def pipeline(self, *, sections: int, scratch: int) -> Iterator[Recorded]:
        return (Recorded(self.rows, index=index) for index in range(self.segments))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield

    def __getitem__(self, section: int) -> Recorded:
        return Recorded(self.rows, index=self.index, section=section)

    def scratch(self, section: int, slot: int = 0) -> Recorded:
        return Recorded(self.rows, index=self.index, section=section, slot=slot)

    def _write(self, op: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        into = named.pop("into", self)
        assert into.section == self.section
        names = ("src", "dst") if self.section != -1 or len(given) + len(named) == 2 else ("section", "src", "dst")
        values = dict(zip(names, given, strict=False)) | named
        columns = [np.atleast_1d(values.get(name, self.section)) for name in ("src", "dst", "section")]
        for src, dst, section in zip(*(each.tolist() for each in columns), strict=True):
            self.rows.append((src, dst, op, self.index, section, self.slot, into.slot))
        if len(self.rows) > ROWS_MAX:
            raise TooLong

    def reduce(self, *given: Any, **named: Any) -> None:
        self._write(REDUCE, given, named)

    def copy(self, *given: Any, **named: Any) -> None:
        self._write(COPY, given, named)


def definition_of(source: str) -> Definition:
    """The schedule in this source, which `inspect` finds though there is no file."""
    name = f"generated_{next(NUMBER)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), scope)
    found = scope["made"]
    assert isinstance(found, Definition)
    return found


def compare(source: str) -> str:
    """`read` if the symbolic program writes what Python writes, `outside` if there is none; else it fails."""
    definition = definition_of(source)
    covered = cases_of(definition)[0]
    try:
        reading = read(definition, covered.case)
    except OutsideSubset:
        return "outside"
    finally:
        linecache.cache.pop(definition.function.__code__.co_filename, None)
    for p in RANKS:
        for segments in SEGMENTS:
            rows: list[Row] = []
            error = ""
            try:
                definition.function(Recorded(rows, n_ranks=p, segments=segments))
            except TooLong:
                continue
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            try:
                found = transfers_of(reading, {"p": p}, segments)
            except AssertionError:
                continue  # an entry that the proof would require to exist
            assert not error, f"p = {p}, {segments} segments: Python raises {error}, and the program was read\n{source}"
            if not reading.has_scratch:
                found = [(*row, DATA, DATA) for row in found]
            assert found == rows, f"p = {p}, {segments} segments:\n{found}\n{rows}\n{source}"
    return "read"


def differential(examples: int, *, shrinks: bool = True) -> dict[str, int]:
    seen = {"read": 0, "outside": 0}

    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)

    @settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(programs())
    def judged(source: str) -> None:
        how = compare(source)
        seen[how] += 1
        event(how)

    judged()
    return seen


@pytest.mark.parametrize(("examples", "read_min"), [(120, 12), pytest.param(300, 30, marks=pytest.mark.slow)])
def test_generated_programs_are_read_as_python_runs_them(examples: int, read_min: int) -> None:
    seen = differential(examples)
    assert seen["read"] >= read_min, seen


PROGRAMS = 20_000
FIRST = [range(at, at + 1_500) for at in range(0, 6_000, 1_500)]
OTHERS = [range(at, at + 3_500) for at in range(6_000, PROGRAMS, 3_500)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [*FIRST, *(pytest.param(each, marks=pytest.mark.search) for each in OTHERS)], ids=lambda part: f"{part[0]}"
)
def test_20000_generated_programs_are_read_as_python_runs_them(part: range, seed: int) -> None:
    sources = {
        program_of(number): number for number in range(seed * PROGRAMS + part[0], seed * PROGRAMS + part[-1] + 1)
    }
    seen: Counter[str] = Counter()
    for source, number in sources.items():
        try:
            seen[compare(source)] += 1
        except AssertionError as error:
            error.add_note(f"program_of({number})")
            raise
    assert len(sources) >= 0.98 * len(part) and seen["read"] >= len(part) / 10, (len(sources), seen)


def looked_up_among_globals(self: Names, name: str) -> Any:
    """What the interpreter once did: a local that a loop or a condition has set is taken for a global."""
    return self.globals[name] if name in self.globals else look_up(self, name)


def without_targets(scope: dict[str, Any], body: list[ast.stmt]) -> None:
    """What it once did: the variable of a loop has its former value afterwards."""
    forget(scope, [part for each in body for part in (each.body if isinstance(each, ast.For) else [each])])


look_up, forget = Names.look_up, Expressions._forget


@pytest.mark.slow
def test_a_former_fault_is_found_in_generated_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Names, "look_up", looked_up_among_globals)
    with pytest.raises(AssertionError, match=r"^p = \d+, \d segments"):
        differential(3000, shrinks=False)


def test_the_comparison_finds_a_variable_that_keeps_its_former_value(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "    a = 0\n    for a in range(1, program.n_ranks):\n        pass\n"
    walk = "    for segment in program.pipeline(sections=1):\n        segment[0].copy(src=a, dst=1)\n"
    source = f"{HEAD}@schedule\ndef made(program):\n{body}{walk}"
    assert compare(source) == "outside"
    monkeypatch.setattr(Expressions, "_forget", staticmethod(without_targets))
    with pytest.raises(AssertionError, match=r"^p = 2, 1 segments"):
        compare(source)
