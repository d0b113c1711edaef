"""The symbolic interpreter: executes a schedule function's source on symbolic integers.

It supports a subset of Python: integers with + - * // % and comparisons, `range`, `np.arange`, `product`,
`enumerate`, `divmod`, comprehensions, helpers made of assignments and returns, `if`, `for` and `with program.stage`.
Anything else raises `OutsideSubset` with its line. A loop must not carry a variable from one iteration to the next.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import product
from math import lcm
from typing import Any

import numpy as np

from optcc import trees
from optcc.arrays import column
from optcc.dsl import PURE, Definition
from optcc.schedule import COPY, DATA, REDUCE
from optcc.verify.all_ranks.names import Uncertain, read_function
from optcc.verify.all_ranks.symbolic import (
    SEGMENT_TURN,
    Along,
    Family,
    Guard,
    Move,
    OutsideSubset,
    ParameterCase,
    Reading,
    ReadingLemma,
    Require,
    Touch,
    Walk,
)
from optcc.verify.all_ranks.symbolic_arithmetic import NeedsModulus
from optcc.verify.all_ranks.symbolic_calls import Calls
from optcc.verify.all_ranks.symbolic_expressions import PROGRAM, TEXT
from optcc.verify.all_ranks.symbolic_loops import UNROLLED_MAX
from optcc.verify.all_ranks.symbolic_terms import FALSE, TRUE, Formula, Term, both, no
from optcc.verify.all_ranks.symbolic_values import (
    Cells,
    Endless,
    Groups,
    Lanes,
    Method,
    Opaque,
    Pipelines,
    Product,
    Relabelled,
    RingTurn,
    RingTurns,
    SegmentList,
    Slices,
    Span,
    SymbolicChunk,
    SymbolicOwner,
    SymbolicSegment,
    SymbolicTree,
    TreeSegments,
    TreeTurns,
    TurnPart,
    Zipped,
    is_once,
    shown,
)
from optcc.verify.all_ranks.waves import NoWave, read_waves

_DEPTH_MAX = 8


TAKEN_AT_THEIR_WORD = {
    "optcc.schedules.optimal.tree_pairs": "yields pairs of trees over all ranks, the two of a pair with one root, and "
    "never ends",
}
"""Helpers that are not interpreted, with the assumption about each; a proof that uses one reports it."""


def _taken(called: Any) -> str:
    """The name of a helper in `TAKEN_AT_THEIR_WORD`; empty for everything else."""
    for name in TAKEN_AT_THEIR_WORD:
        if inspect.isfunction(called) and _is_in_library(called, name):
            return name
    return ""


def _is_in_library(called: Any, name: str) -> bool:
    """True for the library's function or class of this name."""
    module, _, function = name.rpartition(".")
    return module in sys.modules and callable(called) and vars(sys.modules[module]).get(function) is called


def _asked_of_cell(test: ast.expr) -> tuple[ast.expr, list[ast.expr]] | None:
    """X and the other conditions, in `... and X is not None`; None for another condition."""
    match test:
        case ast.BoolOp(op=ast.And(), values=[*others, last]):
            found = _asked_of_cell(last)
            return None if found is None or found[1] else (found[0], others)
        case ast.Compare(left=ast.Name() as asked, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return asked, []
    return None


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


def read(definition: Definition, case: ParameterCase) -> Reading:
    """The symbolic program of a schedule in one case.

    Raises OutsideSubset for an unsupported construct.
    """
    modulus = 1
    while True:
        try:
            readers = [_Reader(case, modulus, residue, definition=definition) for residue in range(modulus)]
            for reader in readers:
                reader.run()
            break
        except NeedsModulus as needs:
            wanted = lcm(modulus, needs.modulus)
            if wanted == modulus:
                raise OutsideSubset(
                    f"a remainder modulo {needs.modulus} that does not follow from the segment's", 0
                ) from None
            if wanted > UNROLLED_MAX:
                raise OutsideSubset(f"segments in {wanted} kinds", 0) from None
            modulus = wanted
    one = readers[0]
    if any(reader.case != one.case for reader in readers):
        raise OutsideSubset("bit lengths that depend on the segment", 0)
    walks = [
        Walk(walk.families, tuple(reader.walks[number].bodies[0] for reader in readers))
        for number, walk in enumerate(one.walks)
    ]
    assumed = tuple(dict.fromkeys(one.assumed))
    return Reading(
        one.case,
        tuple(one.families),
        tuple(walks),
        assumed,
        one.relabelled,
        one.unordered,
        tuple(one.lemmas),
        one.in_rings,
    )


@dataclass(eq=False)
class _Reader(Calls):
    """One execution of a schedule function: its statements, and calls that write transfers or run helpers."""

    walks: list[Walk] = field(default_factory=list)
    depth: int = 0
    in_stage: bool = False
    walked: set[int] = field(default_factory=set)
    lemmas: list[ReadingLemma] = field(default_factory=list)
    known_cells: list[SymbolicChunk] = field(default_factory=list)

    def run(self) -> None:
        """Executes the function."""
        tree = self._enter(self.definition.function)
        self.line = self.names.first_line
        self._check_configure()
        if tree.args.posonlyargs or tree.args.vararg or tree.args.kwarg:
            raise self._outside("parameters with / or *")
        names = [each.arg for each in (*tree.args.args, *tree.args.kwonlyargs)]
        given = dict(self.case.values)
        defaults = inspect.signature(self.definition.function).parameters
        scope: dict[str, Any] = {}
        for name in names[1:]:
            if name not in given and defaults[name].default is inspect.Parameter.empty:
                raise self._outside(f"parameter {name!r}: nothing is known of it")
            scope[name] = given[name] if name in given else self._unvaried(name, defaults[name].default)
        scope[names[0]] = PROGRAM
        with suppress(_Return):
            self._block(tree.body, scope)
        if self.nodes:
            raise self._outside("a transfer outside of a pipeline")
        if self.relabelled and self.numbered:
            raise self._outside("ranks that are entries of a list, and others")

    def _enter(self, function: Callable[..., Any]) -> ast.FunctionDef:
        """The syntax tree of a function; switches to its names."""
        try:
            found, self.names = read_function(function, self.assumed, self.set_elsewhere)
        except Uncertain as why:
            raise self._outside(str(why)) from None
        return found

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
            case ast.If(test=test, body=body, orelse=[]) if _asked_of_cell(test) is not None:
                self._if_cell(test, body, scope)
            case ast.If(test=test, body=body, orelse=orelse):
                self._branch(self._truth(test, scope), body, orelse, scope)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=None)], body=body):
                called = self._value(call.func, scope)
                if called != Method(PROGRAM, "stage") or len(call.args) != 1 or call.keywords or self.in_stage:
                    raise self._outside(ast.unparse(call))
                name = self._value(call.args[0], scope)
                if name is not TEXT and not isinstance(name, str):
                    raise self._outside(f"{ast.unparse(call)}: its name is no text")
                self.in_stage = True
                self._block(body, scope)
                self.in_stage = False
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                self._for(statement, self._value(over, scope, once=True), scope)
            case ast.Raise():
                raise self._outside("a raise that may be reached")
            case _:
                raise self._outside(ast.unparse(statement).partition("\n")[0])

    def _assign(self, target: ast.expr, node: ast.expr, scope: dict[str, Any]) -> None:
        """Binds the value; one outside the subset that does not involve the program becomes opaque, known only by its
        text."""
        before = (self.line, self.names, self.depth, self.nested, self.nodes, dict(self.ranges))
        may_be_unread = self._is_opaque(node, scope) or self._calls_pure(node, scope)
        n_nodes = len(self.nodes)
        try:
            self._bind(target, self._value(node, scope), scope)
        except OutsideSubset:
            if not may_be_unread or not all(isinstance(each, Require | Touch) for each in before[4][n_nodes:]):
                raise
            del before[4][n_nodes:]
            self.line, self.names, self.depth, self.nested, self.nodes, self.ranges = before
            self._bind(target, self._opaque(f"{ast.unparse(node)} (line {self.line})"), scope)

    def _calls_pure(self, node: ast.expr, scope: dict[str, Any]) -> bool:
        """True for a call of a function that is declared pure, with arguments that are too."""
        if not isinstance(node, ast.Call):
            return False
        return getattr(self._function(node.func, scope), PURE, False) is True and self._is_pure(node, scope)

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

    def _if_cell(self, test: ast.expr, body: Sequence[ast.stmt], scope: dict[str, Any]) -> None:
        """`if ... and cell is not None:`, where only that cell is accessed: in the proof for a cell, it has a share."""
        asked, others = _asked_of_cell(test) or (test, [])
        chunk = self._value(asked, scope)
        if isinstance(chunk, SymbolicOwner):
            if not isinstance(asked, ast.Name) or others or self.exchanged or self.nested != self.round_nested:
                raise self._outside(f"{ast.unparse(test)}: other than once in a round, for all of its exchange")
            inner = self._without(scope, body)
            inner[asked.id] = chunk.owner
            self.exchanged = list(self._inside(lambda: self._block(body, inner)))
            self._forget(scope, body)
            return
        if not isinstance(chunk, SymbolicChunk) or not self.families[chunk.family].cells:
            self._branch(self._truth(test, scope), body, [], scope)
            return
        self.known_cells.append(chunk)

        def only() -> None:
            inner = self._without(scope, body)
            for node in self._inside(lambda: self._block(body, inner)):
                if not isinstance(node, Move) or (node.family, node.pipeline) != (chunk.family, chunk.pipeline):
                    raise self._outside("something else than its transfers where a cell is not None")
                self.nodes.append(node)

        found = self._inside(only)
        truth = both(*(self._truth(each, scope) for each in others))
        self.nodes += found if truth == TRUE else [] if truth == FALSE else [Guard(truth, found)]
        self._forget(scope, body)
        self.known_cells.pop()

    def _for(self, loop: ast.For, over: Any, scope: dict[str, Any]) -> None:
        target, body = loop.target, loop.body
        walked = isinstance(over, Pipelines | Zipped | Groups | TreeTurns | TreeSegments | RingTurns)
        if walked or (isinstance(over, Cells) and not over.walked):
            self._walk(loop, over, scope)
            return
        self._refuse_rebinding(loop)
        if isinstance(over, Span) and self.listed is not None and not self.in_beats:
            self._beats(loop, over, self.listed, scope)
            return
        if self._is_unrolled(over) and not self._may_skip(over):

            def next_one(value: Any, _: Term | None) -> None:
                self._bind(target, value, scope)
                self._block(body, scope)

            self._each(over, next_one)
            return
        outside = self._without(scope, [loop])

        def any_one(value: Any, _: Term | None) -> None:
            inner = dict(outside)  # the turns before may not have been
            self._bind(target, value, inner)
            self._block(body, inner)

        self._each(over, any_one)
        self._forget(scope, [loop])

    def _beats(self, loop: ast.For, over: Span, segments: SegmentList, scope: dict[str, Any]) -> None:
        """A loop over the beats of a pipeline through trees: read as what a chunk sees of it."""
        if self.in_segment or self.ranges or self.nested or self.walked or len(self.families) != 1:
            raise self._outside("beats of a pipeline inside of a loop or a condition, or beside others")
        self.walked.add(segments.family)
        inner, beat = self._without(scope, [loop]), Term.var("beat")
        self.in_segment = self.in_beats = True

        def once() -> None:
            self._bind(loop.target, beat, inner)
            self._block(loop.body, inner)

        nodes = self._inside(once)
        self.in_segment = self.in_beats = False
        sections = self.families[segments.family].sections.constant
        edges = self.edges
        if edges is None or sections != edges.n_trees:
            raise self._outside("beats of a pipeline with another number of sections than of trees")
        try:
            found, lemmas = read_waves(nodes, beat, over.low, over.high, edges.depth, edges.n_trees, segments.family)
        except NoWave as why:
            raise self._outside(str(why)) from None
        self.lemmas += lemmas
        self.walks.append(Walk((segments.family,), (found,)))
        self._forget(scope, [loop])

    def _refuse_rebinding(self, loop: ast.For) -> None:
        """A generator sees what a name means when it is asked for the next element, not when it was made."""
        read = {
            name.id
            for node in ast.walk(loop.iter)
            if isinstance(node, ast.GeneratorExp)
            for name in ast.walk(node)
            if isinstance(name, ast.Name)
        }
        bound = {
            name.id
            for part in (loop.target, *loop.body)
            for name in ast.walk(part)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        own = {
            name.id
            for node in ast.walk(loop.iter)
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
            if isinstance(name, ast.Name)
        }
        for name in sorted((read - own) & bound):
            raise self._outside(f"{name}: bound anew while a generator that reads it goes on")

    def _walk(self, loop: ast.For, over: Any, scope: dict[str, Any]) -> None:
        if self.in_segment or self.ranges or self.nested:
            raise self._outside("a pipeline inside of a loop or a condition")
        families: tuple[int, ...]
        value: Any
        if isinstance(over, Cells):
            value, families = replace(over, walked=True), (over.family,)
        elif isinstance(over, Groups):
            group = (self._ranks_in_order("groups"), Term.var(self.case.members or ""))
            value, families = (SymbolicSegment(over.family, Term(())), group), (over.family,)
        elif isinstance(over, Pipelines):
            value, families = self._segment(over), (over.family,)
        elif isinstance(over, TreeTurns):
            value, families = (TurnPart(over, False), TurnPart(over, True)), (over.family,)
        elif isinstance(over, TreeSegments):
            number, tree = Opaque("the number of a pipeline"), SymbolicTree(over.root)
            value, families = (number, SymbolicSegment(over.family, Term(())), tree), (over.family,)
        elif isinstance(over, RingTurns):
            value, families = RingTurn(over.family), (over.family,)
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
        self._refuse_rebinding(loop)
        inner = self._without(scope, [loop])

        def once() -> None:
            self._bind(loop.target, value, inner)
            self._block(loop.body, inner)

        self.walks.append(Walk(families, (self._inside(once),)))
        self.in_segment = False
        self.ranges.clear()
        self._forget(scope, [loop])

    def _segment(self, pipelines: Pipelines) -> SymbolicSegment | Slices:
        return Slices(pipelines.family) if pipelines.many else SymbolicSegment(pipelines.family, Term(()))

    def _call(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        called = self._value(node.func, scope)
        if _is_in_library(called, "optcc.schedules.stragglar.ExchangeRounds"):
            return self._rounds(node, scope)
        if any(_is_in_library(called, f"optcc.schedules.tree_turns.{name}") for name in ("together", "in_proportion")):
            return self._tree_turns(node, scope)
        if _is_in_library(called, "optcc.schedules.tree_turns.in_trees"):
            return self._tree_segments(node, scope)
        if _is_in_library(called, "optcc.schedules.nccl_ring.around"):
            return self._ring_turns(node, scope)
        if _is_in_library(called, "optcc.schedules.tree_turns.reduce_in_order"):
            self._reduce_in_order(node, scope)
            return None
        for name, op in (("reduce_next", REDUCE), ("copy_next", COPY)):
            if _is_in_library(called, f"optcc.schedules.nccl_ring.{name}"):
                self._hop(op, node, scope)
                return None
        taken = _taken(called)
        if taken:
            for each in (*node.args, *(keyword.value for keyword in node.keywords)):
                if not self._is_opaque(each, scope):
                    self._value(each, scope)
            self.assumed.append(f"{taken} {TAKEN_AT_THEIR_WORD[taken]}")
            root = f"the root of a pair from {called.__name__} (line {self.line}, call {self._number()})"
            return Endless((SymbolicTree(root), SymbolicTree(root)))
        args: list[Any] = []
        for each in node.args:
            if isinstance(each, ast.Starred):
                value = self._value(each.value, scope)
                args += value if isinstance(value, list | tuple) else [self._pipelines(value, each)]
            else:
                args.append(self._value(each, scope, once=True))
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._outside(ast.unparse(node))
            named[keyword.arg] = self._value(keyword.value, scope)
        if is_once(called):
            raise self._outside(ast.unparse(node))
        if isinstance(called, Method):
            return self._method(called, args, named, node)
        if called is np.arange and len(args) == 1 and isinstance(args[0], Term) and not named:
            self.n_loops += 1
            return Lanes(f"lane_{self.n_loops}", args[0], Term.var(f"lane_{self.n_loops}"))
        if called is Fraction and len(args) == 2 and not named:
            return self._fraction(*args)
        if called is product and not named:
            return Product(tuple(args))
        if called is column and len(args) == 1 and not named:
            return self._column(args[0], node)
        if called is trees.Tree and len(args) == 2 and not named:
            return self._tree(args[0])
        if getattr(called, PURE, False) is True and any(isinstance(each, Opaque) for each in (*args, *named.values())):
            self._check_pure(node, scope)
            return self._opaque(f"{ast.unparse(node)} (line {self.line})")
        if inspect.isfunction(called) and not inspect.isgeneratorfunction(called):
            return self._helper(called, args, named, node)
        raise self._outside(ast.unparse(node).partition("\n")[0])

    def _method(self, called: Method, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        of, name = called.of, called.name
        if of is None:
            return self._builtin(name, args, named, node)
        if of is PROGRAM and name == "pipeline":
            if args or set(named) - {"sections", "share", "scratch"} or not isinstance(named.get("sections"), Term):
                raise self._outside(ast.unparse(node))
            scratch = named.get("scratch", Term(()))
            if not isinstance(scratch, Term) or scratch.constant is None or scratch.constant < 0:
                raise self._outside(ast.unparse(node))
            if self.in_segment or self.ranges or self.nested:
                raise self._outside("a pipeline inside of a loop or a condition")
            sections = self._low(named["sections"])
            if sections is None or sections < 1:
                raise self._outside(f"{named['sections']} sections: may be fewer than one")
            share = named.get("share", Fraction(1))
            if isinstance(share, Term) and share.constant is not None:
                share = Fraction(share.constant)
            self.families.append(Family(Term.of(1), named["sections"], share, self.line, scratch.constant))
            return Pipelines(len(self.families) - 1, False)
        if of is PROGRAM and name == "cells":
            return self._cells(args, named, node)
        if of is PROGRAM and name == "edges" and len(args) == 2 and not named:
            return self._tree_edges(args, node)
        if of is PROGRAM and name == "in_order" and len(args) == 1 and not named and isinstance(args[0], Opaque):
            if self.in_segment or self.ranges or self.nested:
                raise self._outside(f"{ast.unparse(node)}: in a loop or a condition")
            self.assumed.append(f"line {self.line}: every rank is named once (else `in_order` refuses it)")
            return self._ranks_in_order(f"in_order, call {self._number()}")
        if of is PROGRAM and name == "groups":
            return self._groups(args, named, node)
        if of is PROGRAM and name == "pairs":
            return self._pairs(args, named, node)
        if of is trees.Tree and name == "chain" and len(args) == 1 and not named:
            return self._tree(args[0])
        if isinstance(of, Term) and not args and not named:
            return self._bit_length(of)
        if isinstance(of, SymbolicSegment) and name == "scratch" and not named:
            return self._scratch(of, args, node)
        op = {"reduce": REDUCE, "copy": COPY, "reduce_along": REDUCE, "broadcast_along": COPY}.get(name)
        if op is None or not self.in_segment:
            raise self._outside(ast.unparse(node))
        line = self.names.first_line + node.lineno - 1
        if isinstance(of, SymbolicChunk) and name in ("reduce_along", "broadcast_along"):
            tree = args[0] if len(args) == 1 else None
            if not isinstance(tree, SymbolicTree) or named or of.slot != DATA:
                raise self._outside(f"{name} of {shown(tree)}, of which no root is known")
            self.numbered = True
            self.nodes.append(Along(op, tree.root, of.family, of.pipeline, of.section, line))
            return None
        if self.families[of.family].cells and of not in self.known_cells and self.definition.declares is not None:
            raise self._outside(f"{ast.unparse(node)}: a cell that may be None")
        places = ("src", "dst") if isinstance(of, SymbolicChunk) else ("section", "src", "dst")
        given = dict(zip(places, args, strict=False))
        if len(args) > len(places) or given.keys() & named.keys():
            raise self._outside(ast.unparse(node))
        given |= named
        into = given.pop("into", of) if isinstance(of, SymbolicChunk) else of
        if isinstance(of, SymbolicChunk) and set(given) == {"src", "dst"}:
            if not isinstance(into, SymbolicChunk) or replace(into, slot=of.slot) != of:
                raise self._outside(f"{ast.unparse(node)}: into what is not surely the same section")
            ends = (given["src"], given["dst"])
            if all(isinstance(end, Relabelled) for end in ends):
                ends = (ends[0].place, ends[1].place)
                self.relabelled = True
            else:
                self.numbered = True
            if not all(isinstance(end, Term) for end in ends):
                raise self._outside(ast.unparse(node))
            self.nodes.append(Move(op, *ends, of.family, of.pipeline, of.section, line, of.slot, into.slot))
            return None
        if isinstance(of, SymbolicSegment) and set(given) == {"section", "src", "dst"}:
            self._step(op, of, given, line)
            return None
        raise self._outside(ast.unparse(node))

    def _pipelines(self, value: Any, node: ast.expr) -> Any:
        if isinstance(value, Pipelines):
            return value
        raise self._outside(ast.unparse(node))

    def _helper(self, called: Callable[..., Any], args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        """The value of a helper function, executed inline."""
        if self.depth >= _DEPTH_MAX:
            raise self._outside(f"{node}: too many calls inside of each other")
        if any(is_once(each) for each in (*args, *named.values())):
            raise self._outside(f"{ast.unparse(node)}: an iterator may be used up")
        outside = (self.names, self.line, self.nested)
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
                scope[name] = self._default(name, each.default)
        self.depth += 1
        try:
            self._block(tree.body, scope)
            value = None
        except _Return as returned:
            value = returned.value
        self.depth -= 1
        self.names, self.line, self.nested = outside
        return value
