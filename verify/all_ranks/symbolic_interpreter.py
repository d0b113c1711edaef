"""The symbolic interpreter: a schedule function's own source, run on symbolic whole numbers.

What is read is a subset of Python: whole numbers with + - * // % and comparisons, `range`, `np.arange`, `product`,
`enumerate`, `divmod`, comprehensions, helpers made of assignments and returns, `if`, `for` and `with program.stage`.
Anything else is `OutsideSubset` with its line. A loop may not carry a variable from one iteration to the next.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from math import lcm
from types import ModuleType
from typing import Any

import numpy as np

from optcc import trees
from optcc.dsl import Definition
from optcc.schedule import COPY, REDUCE
from optcc.verify.all_ranks.symbolic import (
    FALSE,
    SEGMENT_TURN,
    TRUE,
    All,
    Along,
    AnyOf,
    Case,
    Choice,
    Eq,
    Family,
    Formula,
    Guard,
    Le,
    Loop,
    Move,
    Node,
    Not,
    OutsideSubset,
    Reading,
    Require,
    Skip,
    Term,
    Var,
    Walk,
    both,
    either,
    eq,
    le,
    lt,
    mod,
    no,
    quotient,
)
from optcc.verify.all_ranks.symbolic_values import (
    Chunk,
    Endless,
    Enumerated,
    FirstOf,
    Lanes,
    Lazy,
    Method,
    Opaque,
    Pipelines,
    Product,
    Segment,
    Set,
    Skipping,
    Slices,
    Span,
    Thing,
    Tree,
    Zipped,
    digits,
    in_range,
    is_once,
    root_key,
    shown,
)

_UNROLLED_MAX = 16
_DEPTH_MAX = 8


TAKEN_AT_THEIR_WORD = {
    "optcc.schedules.optimal.tree_pairs": "yields pairs of trees over all ranks, the two of a pair with one root, and "
    "never ends",
}
"""Helpers that are not read, and what is believed of them: a proof that rests on one says so."""


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _NeedsModulus(Exception):
    def __init__(self, modulus: int) -> None:
        self.modulus = modulus


_OF_THE_PROGRAM = (Thing, Pipelines, Zipped, Segment, Slices, Chunk, Method, Endless)
_PROGRAM, _COLLECTIVE = Thing("program"), Thing("program.collective")
_COMPARE: dict[type[ast.cmpop], Callable[[Term, Term], Formula]] = {
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: lambda a, b: lt(b, a),
    ast.GtE: lambda a, b: le(b, a),
    ast.Eq: eq,
    ast.NotEq: lambda a, b: no(eq(a, b)),
}


def read(definition: Definition, case: Case) -> Reading:
    """The symbolic program of a schedule in one case.

    Raises OutsideSubset for what is not read.
    """
    modulus = 1
    while True:
        try:
            readers = [_Reader(definition, case, modulus, residue) for residue in range(modulus)]
            for reader in readers:
                reader.run()
            break
        except _NeedsModulus as needs:
            modulus = lcm(modulus, needs.modulus)
            if modulus > _UNROLLED_MAX:
                raise OutsideSubset(f"segments in {modulus} kinds", 0) from None
    one = readers[0]
    walks = [
        Walk(walk.families, tuple(reader.walks[number].bodies[0] for reader in readers))
        for number, walk in enumerate(one.walks)
    ]
    return Reading(case, tuple(one.families), tuple(walks), tuple(dict.fromkeys(one.helpers)))


@dataclass(eq=False)
class _Reader:
    """One walk through a schedule function; of the segments, it sees those whose number is `residue` mod `modulus`."""

    definition: Definition
    case: Case
    modulus: int
    residue: int
    families: list[Family] = field(default_factory=list)
    walks: list[Walk] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    ranges: dict[str, tuple[Term, Term]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    globals: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    first_line: int = 0
    depth: int = 0
    n_loops: int = 0
    nested: int = 0
    in_segment: bool = False
    walked: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Reads the whole function."""
        tree = self._enter(self.definition.function)
        self.line = self.first_line
        names = [each.arg for each in (*tree.args.args, *tree.args.kwonlyargs)]
        given = dict(self.case.values)
        defaults = inspect.signature(self.definition.function).parameters
        scope: dict[str, Any] = {}
        for name in names[1:]:
            if name not in given and defaults[name].default is inspect.Parameter.empty:
                raise self._outside(f"parameter {name!r}: nothing is known of it")
            scope[name] = given[name] if name in given else self._constant(defaults[name].default)
        scope[names[0]] = _PROGRAM
        with suppress(_Return):
            self._block(tree.body, scope)
        if self.nodes:
            raise self._outside("a transfer outside of a pipeline")

    def _enter(self, function: Callable[..., Any]) -> ast.FunctionDef:
        """The syntax of a function, and its globals and lines as those that names and errors refer to."""
        name = getattr(function, "__name__", "?")
        if hasattr(function, "__wrapped__") or not inspect.isfunction(function) or function.__code__.co_freevars:
            raise self._outside(f"{name}: is wrapped, or sees the variables of another function")
        try:
            lines, self.first_line = inspect.getsourcelines(function)
            found = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, TypeError, SyntaxError):
            raise self._outside(f"{name}: has no source") from None
        self.globals = function.__globals__
        if not isinstance(found, ast.FunctionDef):
            raise self._outside(f"{name}: is no plain function")
        return found

    def _outside(self, construct: str) -> OutsideSubset:
        return OutsideSubset(construct, self.line)

    def _at(self, node: ast.AST) -> None:
        self.line = self.first_line + getattr(node, "lineno", 1) - 1

    # statements

    def _block(self, statements: Sequence[ast.stmt], scope: dict[str, Any]) -> None:
        for statement in statements:
            self._statement(statement, scope)

    def _statement(self, statement: ast.stmt, scope: dict[str, Any]) -> None:
        self._at(statement)
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
            case ast.Expr(value=ast.Call() as call):
                self._value(call, scope)
            case ast.Assign(targets=[target], value=value):
                self._assign(target, value, scope)
            case ast.AnnAssign(target=ast.Name() as target, value=value) if value is not None:
                self._bind(target, self._value(value, scope), scope)
            case ast.Return(value=value):
                if self.nested:
                    raise self._outside("a return inside of a loop or a condition")
                raise _Return(None if value is None else self._value(value, scope))
            case ast.If(test=test, body=body, orelse=orelse):
                self._branch(self._truth(test, scope), body, orelse, scope)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=None)], body=body):
                called = self._value(call.func, scope)
                if called != Method(_PROGRAM, "stage"):
                    raise self._outside(ast.unparse(call))
                self._block(body, scope)
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                self._for(target, self._value(over, scope), body, scope)
            case ast.Raise():
                raise self._outside("a raise that may be reached")
            case _:
                raise self._outside(ast.unparse(statement).partition("\n")[0])

    def _assign(self, target: ast.expr, node: ast.expr, scope: dict[str, Any]) -> None:
        """Binds the value; one that is not read, and has nothing of the program in it, as something of which only its
        text is known."""
        before = (self.line, self.globals, self.first_line, self.depth, self.nested, self.nodes, dict(self.ranges))
        try:
            value = self._value(node, scope)
            if isinstance(target, ast.Name) and is_once(value):
                raise self._outside(f"{target.id} = ...: an iterator may be used up")
            self._bind(target, value, scope)
        except OutsideSubset:
            if not self._is_opaque(node, scope):
                raise
            self.line, self.globals, self.first_line, self.depth, self.nested, self.nodes, self.ranges = before
            self._bind(target, Opaque(f"{ast.unparse(node)} (line {self.line})"), scope)

    def _is_opaque(self, node: ast.expr, scope: dict[str, Any]) -> bool:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        known = [scope[name] for name in names if name in scope]
        return any(isinstance(each, Opaque) for each in known) and not any(
            isinstance(each, _OF_THE_PROGRAM) for each in known
        )

    def _branch(
        self, test: Formula, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], scope: dict[str, Any]
    ) -> None:
        if test in (TRUE, FALSE):
            self._block(body if test == TRUE else orelse, scope)
            return
        line = self.line
        for side, statements in ((test, body), (no(test), orelse)):
            if statements:
                inner = self._without(scope, statements)
                found = self._inside(partial(self._block, statements, inner))
                self.nodes.append(Guard(side, found))
        self._forget(scope, [*body, *orelse])
        self.line = line

    def _for(self, target: ast.expr, over: Any, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        if isinstance(over, Pipelines | Zipped):
            self._walk(target, over, body, scope)
            return
        inner = scope

        def each(value: Any, _: Term | None) -> None:
            self._bind(target, value, inner)
            self._block(body, inner)

        if self._is_unrolled(over):
            self._each(over, each)
            return
        inner = self._without(scope, body)
        self._each(over, each)
        self._forget(scope, body)

    def _walk(self, target: ast.expr, over: Any, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        if self.in_segment or self.ranges or self.nested:
            raise self._outside("a pipeline inside of a loop or a condition")
        if isinstance(over, Pipelines):
            value: Any = self._segment(over)
            families: tuple[int, ...] = (over.family,)
        else:
            parts, found = [], []
            for part in over.parts:
                if isinstance(part, Pipelines):
                    parts.append(self._segment(part))
                    found.append(part.family)
                elif isinstance(part, Endless):
                    parts.append(part.value)
                else:
                    raise self._outside("a pipeline side by side with what may end before it")
            families = tuple(found)
            value = parts[0] if isinstance(parts[0], Slices) else tuple(parts)
        if not families or self.walked & set(families) or len(set(families)) != len(families):
            raise self._outside("a pipeline that is walked twice")
        self.walked |= set(families)
        self.in_segment = True
        self.ranges[SEGMENT_TURN] = (Term(()), Term.var("k"))
        inner = self._without(scope, body)

        def once() -> None:
            self._bind(target, value, inner)
            self._block(body, inner)

        self.walks.append(Walk(families, (self._inside(once),)))
        self.in_segment = False
        self.ranges.clear()
        self._forget(scope, body)

    def _segment(self, pipelines: Pipelines) -> Segment | Slices:
        return Slices(pipelines.family) if pipelines.many else Segment(pipelines.family, Term(()))

    def _inside(self, run: Callable[[], None]) -> tuple[Node, ...]:
        outside, self.nodes = self.nodes, []
        self.nested += 1
        run()
        self.nested -= 1
        found, self.nodes = tuple(self.nodes), outside
        return found

    def _without(self, scope: dict[str, Any], body: Sequence[ast.stmt]) -> dict[str, Any]:
        inner = dict(scope)
        self._forget(inner, body)
        return inner

    @staticmethod
    def _forget(scope: dict[str, Any], body: Sequence[ast.stmt]) -> None:
        for statement in body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    scope.pop(node.id, None)

    def _bind(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Tuple(elts=targets):
                values = value if isinstance(value, tuple | list) else None
                if isinstance(value, Opaque):
                    values = [Opaque(f"{number} of {value.text}") for number in range(len(targets))]
                if isinstance(value, Lazy | Span):
                    values = self._unrolled(value)
                if values is None or len(values) != len(targets):
                    raise self._outside(f"{ast.unparse(target)} = ...")
                for each, part in zip(targets, values, strict=True):
                    self._bind(each, part, scope)
            case _:
                raise self._outside(f"{ast.unparse(target)} = ...")

    # iteration

    def _is_unrolled(self, over: Any) -> bool:
        """Whether what is iterated over is a list of known length."""
        match over:
            case list() | tuple():
                return True
            case Span(low, high):
                count = (high - low).constant
                return count is not None and count <= _UNROLLED_MAX
            case Product(parts):
                return all(map(self._is_unrolled, parts))
            case Enumerated(inner):
                return self._is_unrolled(inner)
            case Lazy(node, scope, names) if len(node.generators) == 1:
                outside, self.globals = self.globals, names
                found = self._is_unrolled(self._value(node.generators[0].iter, dict(scope)))
                self.globals = outside
                return found
        return False

    def _unrolled(self, over: Any) -> list[Any] | None:
        if not self._is_unrolled(over):
            return None
        found: list[Any] = []
        nodes = self._inside(lambda: self._each(over, lambda value, index: found.append(value)))
        if nodes:
            return None
        return found

    def _each(self, over: Any, body: Callable[[Any, Term | None], None]) -> None:
        """Runs `body` for every element: (element, its number or None if that is not known)."""
        match over:
            case list() | tuple():
                for number, value in enumerate(over):
                    body(value, Term.of(number))
            case Span(low, high):
                count = (high - low).constant
                if count is not None and count <= _UNROLLED_MAX:
                    for number in range(count):
                        body(low + number, Term.of(number))
                    return
                inner = self.case.inner
                servers = None if inner is None or low.constant != 0 or high == inner else quotient(high, inner)
                if inner is None or servers is None:
                    self._loop("i", low, high, lambda i: body(i, i - low))
                    return
                self._loop(
                    "server",
                    Term(()),
                    servers,
                    lambda server: self._loop(
                        "gpu",
                        Term(()),
                        inner,
                        lambda gpu: body(server * inner + gpu, server * inner + gpu),
                    ),
                )
            case Skipping(count, gap):
                self._loop("i", Term(()), count, lambda i: body(Term.of(Skip(i, gap)), i))
            case Enumerated(listed):

                def counted(value: Any, index: Term | None) -> None:
                    if index is None:
                        raise self._outside("enumerate of a list with conditions")
                    body((index, value), index)

                self._each(listed, counted)
            case Product(parts):
                self._each_of_product(parts, (), body)
            case Lazy(node, scope, names):
                outside = self.globals

                def at_home(value: Any, index: Term | None) -> None:
                    self.globals = outside
                    body(value, index)
                    self.globals = names

                self.globals = names
                self._each_of_lazy(node, list(node.generators), dict(scope), at_home)
                self.globals = outside
            case _:
                raise self._outside(f"a loop over {shown(over)}")

    def _each_of_product(
        self, parts: tuple[Any, ...], chosen: tuple[Any, ...], body: Callable[[Any, Term | None], None]
    ) -> None:
        if not parts:
            body(chosen, None)
            return
        self._each(parts[0], lambda value, index: self._each_of_product(parts[1:], (*chosen, value), body))

    def _each_of_lazy(
        self,
        node: ast.ListComp | ast.GeneratorExp | ast.SetComp,
        generators: list[ast.comprehension],
        scope: dict[str, Any],
        body: Callable[[Any, Term | None], None],
        number: Term | None = None,
    ) -> None:
        if not generators:
            body(self._value(node.elt, scope), number)
            return
        one = generators[0]
        plain = len(node.generators) == 1 and not one.ifs

        def each(value: Any, index: Term | None) -> None:
            inner = dict(scope)
            self._bind(one.target, value, inner)
            test = both(*(self._truth(condition, inner) for condition in one.ifs))
            if test == FALSE:
                return

            def rest() -> None:
                self._each_of_lazy(node, generators[1:], inner, body, index if plain else None)

            if test == TRUE:
                rest()
            else:
                self.nodes.append(Guard(test, self._inside(rest)))

        self._each(self._value(one.iter, scope), each)

    def _loop(self, name: str, low: Term, high: Term, body: Callable[[Term], None]) -> None:
        self.n_loops += 1
        var = f"{name}_{self.n_loops}"
        line = self.line
        self.ranges[var] = (low, high)
        found = self._inside(lambda: body(Term.var(var)))
        del self.ranges[var]
        if found:
            self.nodes.append(Loop(var, low, high, found, line))

    # values

    def _truth(self, node: ast.expr, scope: dict[str, Any]) -> Formula:
        value = self._value(node, scope)
        if isinstance(value, Le | Eq | All | AnyOf | Not | Choice):
            return value
        if isinstance(value, Term):
            return no(self._decided(eq(value, 0)))
        if value is None:
            return FALSE
        if isinstance(value, list | tuple | str):
            return TRUE if value else FALSE
        raise self._outside(f"truth of {ast.unparse(node)}")

    def _value(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        line = self.line
        self._at(node)
        found = self._evaluate(node, scope)
        self.line = line
        return found

    def _evaluate(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return self._constant(value)
            case ast.Name(id=name):
                if name in scope:
                    return scope[name]
                if name in self.globals:
                    return self._constant(self.globals[name])
                if hasattr(builtins, name):
                    return Method(None, name)
                raise self._outside(f"{name}: not known here, or carried from one iteration to the next")
            case ast.Tuple(elts=parts):
                found = self._list(parts, scope)
                return tuple(found) if isinstance(found, list) else found
            case ast.List(elts=parts):
                return self._list(parts, scope)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._arithmetic(ast.Sub(), Term(()), self._value(operand, scope))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return no(self._truth(operand, scope))
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(op, self._value(left, scope), self._value(right, scope))
            case ast.BoolOp(op=op, values=values):
                return self._bool(op, values, scope)
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self._value(each, scope) for each in (left, *others)]
                return both(*(self._compare(op, values[i], values[i + 1]) for i, op in enumerate(ops)))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                decided = self._truth(test, scope)
                if decided not in (TRUE, FALSE):
                    raise self._outside(f"if {ast.unparse(test)}: not the same in all of this case")
                return self._value(body if decided == TRUE else orelse, scope)
            case ast.Attribute(value=of, attr=name):
                return self._attribute(self._value(of, scope), name)
            case ast.Subscript(value=of, slice=index):
                return self._item(self._value(of, scope), self._value(index, scope))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.JoinedStr():
                return "text"
        raise self._outside(ast.unparse(node))

    def _constant(self, value: Any) -> Any:
        if isinstance(value, bool):
            return TRUE if value else FALSE
        if isinstance(value, int | np.integer):
            return Term.of(int(value))
        if isinstance(value, tuple | list):
            return [self._constant(each) for each in value]
        return value

    def _list(self, parts: Sequence[ast.expr], scope: dict[str, Any]) -> Any:
        found: list[Any] = []
        for part in parts:
            if isinstance(part, ast.Starred):
                more = (
                    self._unrolled(self._value(part.value, scope))
                    if not isinstance(part.value, ast.GeneratorExp)
                    else None
                )
                if more is None:
                    if not found or not _is_harmless(part.value):
                        raise self._outside(f"*{ast.unparse(part.value)} in a list")
                    return FirstOf(found[0])
                found += more
            else:
                found.append(self._value(part, scope))
        return found

    def _bool(self, op: ast.boolop, values: Sequence[ast.expr], scope: dict[str, Any]) -> Any:
        if isinstance(op, ast.Or) and len(values) == 2:
            first = self._value(values[0], scope)
            if isinstance(first, list | tuple):
                return first or self._value(values[1], scope)
            if isinstance(first, Opaque):
                return Opaque(f"{first.text} or {ast.unparse(values[1])}")
        found: Formula = TRUE if isinstance(op, ast.And) else FALSE
        for value in values:
            truth = self._truth(value, scope)
            found = both(found, truth) if isinstance(op, ast.And) else either(found, truth)
            if found == (FALSE if isinstance(op, ast.And) else TRUE):
                break
        return found

    def _compare(self, op: ast.cmpop, left: Any, right: Any) -> Formula:
        if isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and (left is None or right is None):
            same = left is None and right is None
            return TRUE if same == isinstance(op, ast.Is | ast.Eq) else FALSE
        if isinstance(op, ast.In | ast.NotIn):
            if isinstance(right, Span):
                found = both(self._compare(ast.LtE(), right.low, left), self._compare(ast.Lt(), left, right.high))
            elif isinstance(right, list):
                found = either(*(self._compare(ast.Eq(), left, each) for each in right))
            else:
                raise self._outside(f"in {shown(right)}")
            return found if isinstance(op, ast.In) else no(found)
        if not isinstance(left, Term) or not isinstance(right, Term) or type(op) not in _COMPARE:
            raise self._outside(f"comparison of {shown(left)} and {shown(right)}")
        return self._decided(_COMPARE[type(op)](left, right))

    def _decided(self, test: Formula) -> Formula:
        """TRUE or FALSE, where lowest values of the variables decide it."""
        match test:
            case Le(term):
                if self._low(-term) is not None and self._low(-term) >= 0:  # type: ignore[operator]
                    return TRUE
                if self._low(term) is not None and self._low(term) > 0:  # type: ignore[operator]
                    return FALSE
            case Eq(term):
                for each in (term, -term):
                    low = self._low(each)
                    if low is not None and low > 0:
                        return FALSE
            case Not(part):
                return no(self._decided(part))
        return test

    def _low(self, term: Term) -> int | None:
        """A number that the term is never below; None if none is known."""
        lowest = dict(self.case.sizes)
        total = 0
        for monomial, factor in term.parts:
            product = factor
            for atom in monomial:
                if not isinstance(atom, Var) or factor < 0:
                    return None
                low: int | None = lowest.get(atom.name)
                if atom.name == self.case.straggler:
                    low = 0
                if atom.name in self.ranges:
                    low = self._low(self.ranges[atom.name][0])
                if low is None or low < 0:
                    return None
                product *= low
            total += product
        return total

    def _arithmetic(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(left, Lanes) or isinstance(right, Lanes):
            return self._lanes(op, left, right)
        if isinstance(left, Set) and isinstance(right, Set) and isinstance(op, ast.BitAnd):
            return self._common(left, right)
        if isinstance(left, list) and isinstance(right, list) and isinstance(op, ast.Add):
            return [*left, *right]
        if isinstance(left, list) and isinstance(op, ast.Mult) and isinstance(right, Term):
            return left * right.constant if right.constant is not None else FirstOf(left[0])
        if not isinstance(left, Term) or not isinstance(right, Term):
            raise self._outside(f"arithmetic with {shown(right if isinstance(left, Term) else left)}")
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Mod():
                return self._mod(left, right)
            case ast.FloorDiv():
                return self._floordiv(left, right)
            case ast.Pow() if left.constant is not None and right.constant is not None and right.constant >= 0:
                return Term.of(left.constant**right.constant)
        raise self._outside(f"operator {type(op).__name__} on numbers that are not known")

    def _lanes(self, op: ast.operator, left: Any, right: Any) -> Lanes:
        lanes = left if isinstance(left, Lanes) else right
        values = []
        for side in (left, right):
            if isinstance(side, Lanes):
                if side.count != lanes.count:
                    raise self._outside("arrays of different lengths")
                side = side.value.put({side.lane: Term.var(lanes.lane)})
            values.append(side)
        self.ranges[lanes.lane] = (Term(()), lanes.count)
        found = Lanes(lanes.lane, lanes.count, self._arithmetic(op, *values))
        del self.ranges[lanes.lane]
        return found

    def _common(self, left: Set, right: Set) -> Set:
        few, many = (left, right) if isinstance(left.values, tuple) else (right, left)
        if not isinstance(few.values, tuple) or not isinstance(many.values, Span):
            raise self._outside("an intersection of sets")
        kept = []
        for value in few.values:
            inside = self._compare(ast.In(), value, many.values)
            if value == Term.var(self.case.straggler or "") and many.values == Span(Term(()), self.case.servers):
                inside = TRUE  # a fact of the case
            if inside not in (TRUE, FALSE):
                raise self._outside(f"whether {value} is among {shown(many.values)}")
            kept += [value] if inside == TRUE else []
        return Set(tuple(kept))

    def _mod(self, value: Term, by: Term) -> Term:
        if by.constant is not None and value.constant is None and value.names() == {SEGMENT_TURN}:
            rest = Term(tuple(part for part in value.parts if part[0] == ()))
            if all(factor % by.constant == 0 for monomial, factor in value.parts if monomial):
                return mod(rest, by)
            raise _NeedsModulus(by.constant)
        low = self._low(by)
        if low is None or low < 1:
            raise self._outside(f"% {by}: may be zero or negative")
        if quotient(value, by) is not None:
            return Term(())
        inner = self.case.inner
        outer = None if inner is None else quotient(by, inner)
        if inner is not None and outer is not None:
            high, digit = digits(value, inner, self.ranges)
            if high is not None:
                return digit if by == inner else self._mod(high, outer) * inner + digit
        return value if in_range(value, by, self.ranges) else mod(value, by)

    def _floordiv(self, value: Term, by: Term) -> Term:
        if value.constant is not None and by.constant:
            return Term.of(value.constant // by.constant)
        exact = quotient(value, by)
        if exact is not None and self._low(by) not in (None, 0):
            return exact
        high, _ = digits(value, by, self.ranges)
        if high is None or self._low(by) in (None, 0):
            raise self._outside(f"{value} // {by}")
        return high

    def _attribute(self, of: Any, name: str) -> Any:
        if of is _PROGRAM:
            if name == "n_ranks":
                return self.case.ranks
            if name == "ranks":
                return Span(Term(()), self.case.ranks)
            if name == "collective":
                return _COLLECTIVE
            if name in ("pipeline", "stage"):
                return Method(_PROGRAM, name)
        if of is _COLLECTIVE and name == "root":
            return Term.var("root")
        if isinstance(of, Segment) and name == "index":
            if of.family != 0:
                raise self._outside("the index of a segment of a later pipeline")
            return Term.var(SEGMENT_TURN) * self.modulus + self.residue
        if isinstance(of, Segment | Chunk):
            return Method(of, name)
        if isinstance(of, Tree) and name == "root":
            return of.root if isinstance(of.root, Term) else Opaque(of.root)
        if isinstance(of, ModuleType) and of is np and name == "arange":
            return np.arange
        if of is trees.Tree and name == "chain":
            return Method(trees.Tree, name)
        raise self._outside(f"{shown(of)}.{name}")

    def _item(self, of: Any, index: Any) -> Any:
        if isinstance(of, Slices) and isinstance(index, Term):
            return Segment(of.family, index)
        if isinstance(of, Segment) and isinstance(index, Term):
            return Chunk(of.family, of.pipeline, index)
        if isinstance(of, FirstOf) and index == Term(()):
            return of.first
        if not isinstance(index, Term):
            raise self._outside(f"{shown(of)}[{shown(index)}]")
        if isinstance(of, list | tuple) or (isinstance(of, Lazy) and self._is_unrolled(of)):
            known = of if isinstance(of, list | tuple) else self._unrolled(of)
            if known is None or index.constant is None or not -len(known) <= index.constant < len(known):
                raise self._outside(f"entry {index} of a list of {len(known or [])}")
            return known[index.constant]
        return self._entry(of, index)

    def _entry(self, of: Any, index: Term) -> Any:
        """Entry `index` of a list of unknown length; that it is within is required at this place."""
        match of:
            case Span(low, high):
                self._require(index, high - low)
                return low + index
            case Skipping(count, gap):
                self._require(index, count)
                return Term.of(Skip(index, gap))
            case Enumerated(inner):
                return index, self._entry(inner, index)
            case Lazy(node, scope, names) if len(node.generators) == 1 and not node.generators[0].ifs:
                inner = dict(scope)
                one = node.generators[0]
                outside, self.globals = self.globals, names
                self._bind(one.target, self._entry(self._value(one.iter, inner), index), inner)
                found = self._value(node.elt, inner)
                self.globals = outside
                return found
        raise self._outside(f"entry {index} of {shown(of)}")

    def _require(self, index: Term, count: Term) -> None:
        test = both(le(0, index), lt(index, count))
        if test != TRUE and not in_range(index, count, self.ranges):
            self.nodes.append(Require(test, self.line))

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: dict[str, Any]) -> Any:
        one = node.generators[0]
        if isinstance(node.elt, ast.Call) and self._calls_pipeline(node.elt, scope):
            over = self._value(one.iter, scope)
            known = self._unrolled(over)
            if len(node.generators) != 1 or one.ifs:
                raise self._outside(ast.unparse(node))
            if known is not None:
                return [self._value(node.elt, scope) for _ in known]
            if not isinstance(over, Span):
                raise self._outside(ast.unparse(node))
            single = self._value(node.elt, scope)
            family = self.families[single.family]
            self.families[single.family] = Family(over.high - over.low, family.sections, family.share, family.line)
            return Pipelines(single.family, True)
        if isinstance(node.elt, ast.Name) and isinstance(one.target, ast.Name) and len(node.generators) == 1:
            over = self._value(one.iter, scope)
            gap = self._gap(one, node.elt, over, scope)
            if gap is not None and isinstance(over, Span):
                return Skipping(over.high - 1, gap)
        return Lazy(node, dict(scope), self.globals)

    def _gap(self, one: ast.comprehension, element: ast.Name, over: Any, scope: dict[str, Any]) -> Term | None:
        """The straggler, in `[x for x in servers if x not in stragglers]`."""
        if over != Span(Term(()), self.case.servers) or len(one.ifs) != 1 or not isinstance(one.target, ast.Name):
            return None
        match one.ifs[0]:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.NotIn()], comparators=[others]):
                listed = self._value(others, scope)
                gap = Term.var(self.case.straggler or "")
                if name == element.id == one.target.id and self.case.straggler and listed == [gap]:
                    return gap
        return None

    def _calls_pipeline(self, node: ast.Call, scope: dict[str, Any]) -> bool:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr="pipeline"):
                return scope.get(name) is _PROGRAM
        return False

    # calls

    def _call(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        called = self._value(node.func, scope)
        if inspect.isfunction(called) and f"{called.__module__}.{called.__qualname__}" in TAKEN_AT_THEIR_WORD:
            for each in (*node.args, *(keyword.value for keyword in node.keywords)):
                if not self._is_opaque(each, scope):
                    self._value(each, scope)
            self.helpers.append(f"{called.__module__}.{called.__qualname__}")
            root = f"the root of a pair from {called.__name__} (line {self.line})"
            return Endless((Tree(root), Tree(root)))
        args: list[Any] = []
        for each in node.args:
            if isinstance(each, ast.Starred):
                value = self._value(each.value, scope)
                args += value if isinstance(value, list | tuple) else [value]
            else:
                args.append(self._value(each, scope))
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._outside(ast.unparse(node))
            named[keyword.arg] = self._value(keyword.value, scope)
        if isinstance(called, Method):
            return self._method(called, args, named, node)
        if called is np.arange and len(args) == 1 and isinstance(args[0], Term) and not named:
            self.n_loops += 1
            return Lanes(f"lane_{self.n_loops}", args[0], Term.var(f"lane_{self.n_loops}"))
        name = getattr(called, "__name__", "")
        module = getattr(called, "__module__", "")
        if called is Fraction and len(args) == 2:
            return self._fraction(*args)
        if (module, name) == ("itertools", "product") and not named:
            return Product(tuple(args))
        if (module, name) == ("optcc.arrays", "column"):
            return args[0]
        if called is trees.Tree and len(args) == 2:
            return Tree(root_key(args[0].first if isinstance(args[0], FirstOf) else self._item(args[0], Term(()))))
        if inspect.isfunction(called) and not inspect.isgeneratorfunction(called):
            return self._helper(called, args, named, node)
        raise self._outside(ast.unparse(node).partition("\n")[0])

    def _fraction(self, top: Any, bottom: Any) -> Fraction | Term:
        if not isinstance(top, Term) or not isinstance(bottom, Term) or top.constant is None:
            raise self._outside("a share that is not known")
        if bottom.constant:
            return Fraction(top.constant, bottom.constant)
        if top.constant != 1:
            raise self._outside(f"a share of {top}/({bottom})")
        return bottom

    def _method(self, called: Method, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        of, name = called.of, called.name
        if of is None:
            return self._builtin(name, args, named, node)
        if of is _PROGRAM and name == "pipeline":
            if args or set(named) - {"sections", "share"} or not isinstance(named.get("sections"), Term):
                raise self._outside(ast.unparse(node))
            if self.in_segment or self.ranges or self.nested:
                raise self._outside("a pipeline inside of a loop or a condition")
            sections = self._low(named["sections"])
            if sections is None or sections < 1:
                raise self._outside(f"{named['sections']} sections: may be fewer than one")
            share = named.get("share", Fraction(1))
            if isinstance(share, Term) and share.constant is not None:
                share = Fraction(share.constant)
            self.families.append(Family(Term.of(1), named["sections"], share, self.line))
            return Pipelines(len(self.families) - 1, False)
        if of is trees.Tree and name == "chain":
            first = args[0].first if isinstance(args[0], FirstOf) else self._item(args[0], Term(()))
            return Tree(root_key(first))
        op = {"reduce": REDUCE, "copy": COPY, "reduce_along": REDUCE, "broadcast_along": COPY}.get(name)
        if op is None or not self.in_segment:
            raise self._outside(ast.unparse(node))
        line = self.first_line + node.lineno - 1
        if isinstance(of, Chunk) and name in ("reduce_along", "broadcast_along"):
            (tree,) = args
            if not isinstance(tree, Tree) or named:
                raise self._outside(f"{name} of {shown(tree)}, of which no root is known")
            self.nodes.append(Along(op, tree.root, of.family, of.pipeline, of.section, line))
            return None
        given = dict(zip(("src", "dst") if isinstance(of, Chunk) else ("section", "src", "dst"), args, strict=False))
        given |= named
        if isinstance(of, Chunk) and set(given) == {"src", "dst"}:
            ends = (given["src"], given["dst"])
            if not all(isinstance(end, Term) for end in ends):
                raise self._outside(ast.unparse(node))
            self.nodes.append(Move(op, *ends, of.family, of.pipeline, of.section, line))
            return None
        if isinstance(of, Segment) and set(given) == {"section", "src", "dst"}:
            self._step(op, of, given, line)
            return None
        raise self._outside(ast.unparse(node))

    def _step(self, op: int, of: Segment, given: dict[str, Any], line: int) -> None:
        lanes = [given[each] for each in ("src", "dst", "section")]
        if not all(isinstance(each, Lanes) and each.count == lanes[0].count for each in lanes):
            raise self._outside("a whole step of other things than arrays of one length")

        def lane(number: Term) -> None:
            src, dst, section = (each.value.put({each.lane: number}) for each in lanes)
            self.nodes.append(Move(op, src, dst, of.family, of.pipeline, section, line))

        self._loop("lane", Term(()), lanes[0].count, lane)

    def _builtin(self, name: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        if name == "range" and all(isinstance(each, Term) for each in args) and len(args) in (1, 2):
            return Span(*([Term(()), *args] if len(args) == 1 else args))
        if name == "enumerate" and len(args) == 1 and not named:
            return Enumerated(args[0])
        if name == "zip" and all(isinstance(each, Pipelines | Endless) for each in args):
            return Zipped(tuple(args))
        if name == "divmod" and all(isinstance(each, Term) for each in args):
            return self._floordiv(*args), self._mod(*args)
        if name == "set" and isinstance(args[0], list | Span):
            return Set(tuple(dict.fromkeys(args[0])) if isinstance(args[0], list) else args[0])
        if name == "list" and not isinstance(args[0], Pipelines):
            return args[0]
        if name == "len":
            return self._length(args[0])
        if name in ("max", "min") and len(args) == 2 and all(isinstance(each, Term) for each in args):
            first = self._decided(le(args[0], args[1]))
            if first in (TRUE, FALSE):
                return args[1] if (first == TRUE) == (name == "max") else args[0]
        raise self._outside(ast.unparse(node).partition("\n")[0])

    def _length(self, value: Any) -> Term:
        match value:
            case list() | tuple():
                return Term.of(len(value))
            case Span(low, high):
                if self._low(high - low) is not None:
                    return high - low
            case Skipping(count):
                return count
            case Set(values) if isinstance(values, tuple):
                if len(values) <= 1:
                    return Term.of(len(values))
        raise self._outside(f"length of {shown(value)}")

    def _helper(self, called: Callable[..., Any], args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        """The value of a helper function, read in its place."""
        if self.depth >= _DEPTH_MAX:
            raise self._outside(f"{node}: too many calls inside of each other")
        if any(is_once(each) for each in (*args, *named.values())):
            raise self._outside(f"{ast.unparse(node)}: an iterator may be used up")
        outside = (self.globals, self.first_line, self.line, self.nested)
        tree = self._enter(called)
        self.nested = 0
        parameters = inspect.signature(called)
        try:
            bound = parameters.bind(*args, **named)
        except TypeError as error:
            raise self._outside(str(error)) from None
        scope = dict(bound.arguments)
        for name, each in parameters.parameters.items():
            if name not in scope:
                scope[name] = self._constant(each.default)
        self.depth += 1
        try:
            self._block(tree.body, scope)
            value = None
        except _Return as returned:
            value = returned.value
        self.depth -= 1
        self.globals, self.first_line, self.line, self.nested = outside
        return value


def _is_harmless(node: ast.expr) -> bool:
    """Whether all that it calls are these, so that it writes no transfers."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return all(isinstance(each, ast.Name) and each.id in ("range", "len", "enumerate", "reversed") for each in calls)
