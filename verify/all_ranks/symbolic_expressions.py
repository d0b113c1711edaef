"""Expressions of the symbolic interpreter: values, lists, attributes and items; calls are its own."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np

from optcc import trees
from optcc.dsl import PURE
from optcc.verify.all_ranks.names import BUILTINS, PURE_BUILTINS, PURE_NUMPY, Uncertain
from optcc.verify.all_ranks.symbolic import (
    SEGMENT_TURN,
    Along,
    Move,
    Require,
    Touch,
)
from optcc.verify.all_ranks.symbolic_loops import UNBOUND, Loops, all_nodes, names_of
from optcc.verify.all_ranks.symbolic_terms import (
    FALSE,
    TRUE,
    All,
    AnyOf,
    Eq,
    Formula,
    IfThenElse,
    Le,
    Not,
    Skip,
    Term,
    both,
    either,
    eq,
    le,
    lt,
    no,
)
from optcc.verify.all_ranks.symbolic_values import (
    AnyOrder,
    Cells,
    Endless,
    Enumerated,
    FirstOf,
    Groups,
    Lazy,
    Method,
    Opaque,
    Pipelines,
    RanksInOrder,
    Relabelled,
    Reversed,
    SegmentList,
    Skipping,
    Slices,
    Span,
    SymbolicChunk,
    SymbolicEdges,
    SymbolicOwner,
    SymbolicRing,
    SymbolicSegment,
    SymbolicTree,
    Thing,
    TruthOnly,
    Zipped,
    in_range,
    is_once,
    shown,
)

PROGRAM, _COLLECTIVE = Thing("program"), Thing("program.collective")
TEXT = Thing("text")
"""A text of which nothing is known but that it is one."""


_OF_THE_PROGRAM = (
    SegmentList,
    Cells,
    Groups,
    Thing,
    Pipelines,
    Zipped,
    SymbolicSegment,
    Slices,
    SymbolicChunk,
    Method,
    Endless,
)


@dataclass(eq=False)
class Expressions(Loops):
    """Values of expressions; `order_from` says where the order of the ranks comes from, if there is one."""

    order_from: str = ""

    def _call(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _truth(self, node: ast.expr, scope: dict[str, Any]) -> Formula:
        return self._truth_of(self._value(node, scope), node)

    def _truth_of(self, value: Any, node: ast.expr) -> Formula:
        """The truth of the value of `node`."""
        if _is_truth(value):
            return value
        if isinstance(value, TruthOnly):
            return value.truth
        if isinstance(value, Term):
            return no(self._decided(eq(value, 0)))
        if value is None:
            return FALSE
        if isinstance(value, list | tuple | str):
            return TRUE if value else FALSE
        raise self._outside(f"truth of {ast.unparse(node)}")

    def _value(self, node: ast.expr, scope: dict[str, Any], *, once: bool = False) -> Any:
        """The value; an iterator, which is used up, only where it is traversed there and then (`once`)."""
        line = self.line
        self._at(node)
        found = self._evaluate(node, scope)
        if is_once(found) and not once and not _is_of_pipelines(found):
            raise self._outside(f"{ast.unparse(node)}: an iterator may be used up")
        self.line = line
        return found

    def _global(self, name: str) -> Any:
        try:
            value = self.names.look_up(name)
        except Uncertain as why:
            raise self._outside(str(why)) from None
        return Method(None, name) if value is BUILTINS.get(name) else self._constant(value)

    def _number(self) -> int:
        """Another number each time."""
        self.n_values += 1
        return self.n_values

    def _opaque(self, text: str) -> Opaque:
        """A value that is not read: equal to itself alone."""
        self.assumed.append(f"{text}: is not read, and raises no error")
        return Opaque(text, self._number())

    def _is_pure(self, node: ast.AST, scope: dict[str, Any]) -> bool:
        """True if to evaluate it changes nothing: it calls only what is known or declared to be so."""
        allowed = (
            *(ast.Constant, ast.Name, ast.expr_context, ast.Tuple, ast.List, ast.Starred, ast.Subscript, ast.Slice),
            *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator, ast.unaryop, ast.boolop),
            *(ast.cmpop, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.JoinedStr, ast.FormattedValue),
            *(ast.Call, ast.keyword, ast.Attribute),
        )
        functions = {id(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
        bound = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        declared = []
        for each in ast.walk(node):
            if not isinstance(each, allowed):
                return False
            if isinstance(each, ast.Attribute) and id(each) not in functions and not _is_plain(each, scope):
                return False
            if not isinstance(each, ast.Call):
                continue
            function = None if bound & names_of(each.func) else self._function(each.func, scope)
            if any(function is one for one in (*PURE_BUILTINS, *(getattr(np, name) for name in PURE_NUMPY))):
                continue
            if not inspect.isfunction(function) or getattr(function, PURE, False) is not True:
                return False
            declared.append(f"{function.__name__} changes nothing and returns the same for the same (@pure)")
        if _reaches_program(node, scope):
            return False
        self.assumed += declared
        return True

    def _function(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        """The function of the module, of NumPy or of Python that is called; None for anything else."""
        match node:
            case ast.Name(id=name) if name not in scope:
                with suppress(Uncertain):
                    return self.names.look_up(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name not in scope:
                with suppress(Uncertain):
                    return getattr(np, attribute, None) if self.names.look_up(name) is np else None
        return None

    def _check_pure(self, node: ast.expr, scope: dict[str, Any]) -> None:
        if not self._is_pure(node, scope):
            raise self._outside(f"{ast.unparse(node)}: is not evaluated, and may do something")

    def _at(self, node: ast.AST) -> None:
        self.line = self.names.first_line + getattr(node, "lineno", 1) - 1

    def _evaluate(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return self._constant(value)
            case ast.Name(id=name):
                if name in scope:
                    if scope[name] is UNBOUND:
                        raise self._outside(f"{name}: has no value yet in this comprehension")
                    return scope[name]
                return self._global(name)
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
                if any(isinstance(each, SymbolicChunk | SymbolicOwner) for each in values):
                    raise self._outside(f"{ast.unparse(node)}: other than whether to access this cell, or to exchange")
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
            case ast.ListComp() | ast.GeneratorExp():
                found = self._comprehension(node, scope)
                if isinstance(found, Lazy):
                    self._check_elements(found)
                return found
            case ast.Call():
                return self._call(node, scope)
            case ast.JoinedStr(values=parts):
                return self._text(parts, scope)
        raise self._outside(ast.unparse(node))

    def _list(self, parts: Sequence[ast.expr], scope: dict[str, Any]) -> Any:
        found: list[Any] = []
        for part in parts:
            if isinstance(part, ast.Starred):
                more = (
                    self._unrolled(self._value(part.value, scope, once=True))
                    if not isinstance(part.value, ast.GeneratorExp)
                    else None
                )
                if more is None:
                    if not found or not self._is_pure(part.value, scope):
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
            if isinstance(first, AnyOrder):
                own = Span(Term(()), self.case.ranks, "tuple")
                if first.kind != "tuple" or self._value(values[1], scope) != own:
                    raise self._outside(f"{ast.unparse(values[1])}: must be the tuple of all ranks")
                self.assumed.append(f"line {self.line}: {ast.unparse(values[0])} has every rank once, or is empty")
                return self._ranks_in_order("order")
            if isinstance(first, Opaque):
                self._check_pure(values[1], scope)
                return self._opaque(f"{first.text} or {ast.unparse(values[1])}")
        found: Formula = TRUE if isinstance(op, ast.And) else FALSE
        is_truth = True
        for node in values:
            value = self._value(node, scope)
            is_truth = is_truth and _is_truth(value)
            truth = self._truth_of(value, node)
            found = both(found, truth) if isinstance(op, ast.And) else either(found, truth)
            if found == (FALSE if isinstance(op, ast.And) else TRUE):
                break
        return found if is_truth else TruthOnly(found)

    def _ranks_in_order(self, source: str) -> RanksInOrder:
        """Every rank once, in the order from this source: the same place in another order is another rank."""
        if self.order_from not in ("", source):
            raise self._outside(f"two orders of the ranks: {self.order_from}, and {source}")
        self.order_from = source
        return RanksInOrder(self.case.ranks)

    def _text(self, parts: Sequence[ast.expr], scope: dict[str, Any]) -> Thing:
        """A text with numbers and texts in it, as they are; any other might not be made."""
        for part in parts:
            if isinstance(part, ast.FormattedValue):
                value = self._value(part.value, scope)
                known = value is TEXT or isinstance(value, Term | str | Opaque)
                if not known or part.format_spec is not None:
                    raise self._outside(f"{ast.unparse(part.value)}: in a text")
        return TEXT

    def _attribute(self, of: Any, name: str) -> Any:
        if of is PROGRAM:
            if name == "n_ranks":
                return self.case.ranks
            if name == "ranks":
                return Span(Term(()), self.case.ranks)
            if name == "collective":
                return _COLLECTIVE
            if name in ("pipeline", "stage", "cells", "pairs", "groups", "edges", "in_order"):
                return Method(PROGRAM, name)
        if of is _COLLECTIVE and name == "root":
            return Term.var("root")
        if of is _COLLECTIVE and name == "shares":
            return Opaque("the collective's shares")
        if isinstance(of, SymbolicSegment) and name == "index":
            if of.family != 0:
                raise self._outside("the index of a segment of a later pipeline")
            return Term.var(SEGMENT_TURN) * self.modulus + self.residue
        if isinstance(of, SymbolicSegment | SymbolicChunk):
            return Method(of, name)
        if isinstance(of, Term) and name == "bit_length":
            return Method(of, name)
        if isinstance(of, SymbolicRing) and name == "ranks":
            return self._ranks_in_order("rings")
        if isinstance(of, SymbolicEdges) and name == "depth":
            return of.depth
        if isinstance(of, SymbolicTree) and name == "root":
            return of.root if isinstance(of.root, Term) else Opaque(of.root, 0)
        if isinstance(of, ModuleType) and of is np and name == "arange":
            return np.arange
        if of is trees.Tree and name == "chain":
            return Method(trees.Tree, name)
        raise self._outside(f"{shown(of)}.{name}")

    def _item(self, of: Any, index: Any) -> Any:
        if isinstance(of, Slices) and isinstance(index, Term):
            return SymbolicSegment(of.family, index)
        if isinstance(of, SymbolicSegment) and isinstance(index, Term):
            self.nodes.append(Touch(of.family, of.pipeline, index, self.line))
            return SymbolicChunk(of.family, of.pipeline, index)
        if isinstance(of, SegmentList) and self.in_beats and isinstance(index, Term):
            return SymbolicSegment(of.family, index)
        if isinstance(of, Cells) and of.walked and isinstance(index, Term):
            self.nodes.append(Touch(of.family, index, Term(()), self.line))
            return SymbolicChunk(of.family, index, Term(()))
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
        """Entry `index` of a list of symbolic length; records the requirement that it is in range."""
        match of:
            case Span(low, high):
                self._require(index, high - low)
                return low + index
            case RanksInOrder(count):
                self._require(index, count)
                return Relabelled(index)
            case Skipping(count, gap):
                self._require(index, count)
                return Term.of(Skip(index, gap))
            case Enumerated(inner):
                return index, self._entry(inner, index)
            case Lazy(node, scope, home) if len(node.generators) == 1 and not node.generators[0].ifs:
                inner = dict(scope)
                one = node.generators[0]
                outside, self.names = self.names, home
                self._bind(one.target, self._entry(self._value(one.iter, inner, once=True), index), inner)
                found = self._value(node.elt, inner)
                self.names = outside
                return found
        raise self._outside(f"entry {index} of {shown(of)}")

    def _check_elements(self, lazy: Lazy) -> None:
        """Python makes all elements of a list at once, used or not: each must have a value, none may do anything."""
        nodes = self._inside(lambda: self._each(lazy, lambda value, index: None))
        kinds = {type(each) for each in all_nodes(nodes)}
        if kinds & {Move, Along}:
            raise self._outside("a transfer in a comprehension")
        if Require in kinds:
            self.nodes += nodes

    def _require(self, index: Term, count: Term) -> None:
        test = both(le(0, index), lt(index, count))
        if test != TRUE and not in_range(index, count, self.ranges):
            self.nodes.append(Require(test, self.line))

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp, scope: dict[str, Any]) -> Any:
        one = node.generators[0]
        if isinstance(node.elt, ast.Call) and self._calls_pipeline(node.elt, scope):
            over = self._value(one.iter, scope, once=True)
            known = self._unrolled(over)
            if len(node.generators) != 1 or one.ifs:
                raise self._outside(ast.unparse(node))
            if known is not None:
                made = []
                for each in known:
                    inner = dict(scope)
                    self._bind(one.target, each, inner)
                    made.append(self._value(node.elt, inner))
                return made
            if not isinstance(over, Span) or names_of(one.target) & names_of(node.elt):
                raise self._outside(ast.unparse(node))
            single = self._value(node.elt, scope)
            family = self.families[single.family]
            self.families[single.family] = replace(family, count=self._count(over))
            return Pipelines(single.family, True)
        if isinstance(node.elt, ast.Name) and isinstance(one.target, ast.Name) and len(node.generators) == 1:
            over = self._value(one.iter, scope, once=True)
            gap = self._gap(one, node.elt, over, scope)
            if gap is not None and isinstance(over, Span):
                return Skipping(over.high - 1, gap)
        return Lazy(node, dict(scope), self.names)

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
                return scope.get(name) is PROGRAM
        return False

    def _is_opaque(self, node: ast.expr, scope: dict[str, Any]) -> bool:
        known = [scope[name] for name in names_of(node) if name in scope]
        return any(isinstance(each, Opaque) for each in known) and self._is_pure(node, scope)

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


def _is_truth(value: Any) -> TypeGuard[Formula]:
    return isinstance(value, Le | Eq | All | AnyOf | Not | IfThenElse)


def _is_plain(node: ast.Attribute, scope: dict[str, Any]) -> bool:
    """True for the numbers that a program has."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr="n_ranks" | "ranks" | "collective"):
            return scope.get(name) is PROGRAM
        case ast.Attribute(value=ast.Attribute(attr="collective") as inner, attr="root" | "shares"):
            return _is_plain(inner, scope)
    return False


def _reaches_program(node: ast.AST, scope: dict[str, Any]) -> bool:
    """True if the program, a pipeline or a chunk is handed on, other than to ask for the program's numbers."""
    asked = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Attribute) and _is_plain(each, scope)}
    used = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in asked]
    return any(_has_program(scope[name]) for name in used if name in scope)


def _has_program(value: Any) -> bool:
    match value:
        case list() | tuple():
            return any(map(_has_program, value))
        case Lazy(node, scope):
            return _reaches_program(node, scope)
        case Enumerated(inner) | FirstOf(inner) | Reversed(inner):
            return _has_program(inner)
    return isinstance(value, _OF_THE_PROGRAM)


def _is_of_pipelines(value: Any) -> bool:
    """True for pipelines side by side, of which it is counted elsewhere that they are walked once."""
    return isinstance(value, Zipped) and all(isinstance(each, Pipelines) for each in value.parts)
