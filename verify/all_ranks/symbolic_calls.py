"""Calls of the schedule language and of Python's builtins on symbolic values: what each gives, and what it writes."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from optcc.dsl import Definition, any_flat
from optcc.schedule import REDUCE
from optcc.verify.all_ranks.names import Uncertain, is_constant, may_give, note_module
from optcc.verify.all_ranks.symbolic import (
    OWNER,
    Along,
    Family,
    Move,
    Touch,
)
from optcc.verify.all_ranks.symbolic_expressions import PROGRAM, Expressions
from optcc.verify.all_ranks.symbolic_terms import FALSE, TRUE, Term, le, least
from optcc.verify.all_ranks.symbolic_values import (
    AnyOrder,
    Cells,
    Endless,
    Enumerated,
    EveryPair,
    FirstOf,
    Groups,
    Lanes,
    Lazy,
    Opaque,
    Pipelines,
    Product,
    RanksInOrder,
    Reversed,
    RingTurns,
    SegmentList,
    Set,
    Skipping,
    Span,
    SymbolicChunk,
    SymbolicEdges,
    SymbolicRing,
    SymbolicRounds,
    SymbolicSegment,
    SymbolicTree,
    TreeSegments,
    TreeTurns,
    Zipped,
    root_key,
    shown,
)

_LISTED = (list, tuple, Span, AnyOrder, RanksInOrder, Skipping, FirstOf, Lazy, Product, Enumerated, Reversed)
"""What `list` takes."""


@dataclass(eq=False)
class Calls(Expressions):
    """Values of calls; `in_segment`: inside of a loop over segments, `numbered`: ranks have been written as numbers."""

    definition: Definition = field(kw_only=True)
    in_segment: bool = False
    numbered: bool = False
    listed: SegmentList | None = None
    edges: SymbolicEdges | None = None
    in_rings: bool = False
    set_elsewhere: set[str] = field(default_factory=set)

    def _unvaried(self, name: str, default: Any) -> Any:
        """A parameter that the case does not vary: its default, which `configure` must not seem to replace."""
        configure = self.definition.configure
        if configure is not any_flat:
            if may_give(configure, name):
                raise self._outside(f"parameter {name!r}: configure may give it another value than {default!r}")
            self.assumed.append(f"configure never gives {name}, which is then {default!r}")
        return self._default(name, default)

    def _check_configure(self) -> None:
        """It is run for each topology, and may change what names mean; that it does not, its module must show."""
        configure = self.definition.configure
        if configure is any_flat:
            return
        if not inspect.isfunction(configure):
            raise self._outside("configure: is no plain function")
        try:
            hides = note_module(configure.__code__.co_filename, self.set_elsewhere)
        except Uncertain as why:
            raise self._outside(f"configure: {why}") from None
        if hides:
            self.assumed.append("configure binds no name of the schedule anew by a way that its source hides")

    def _default(self, name: str, value: Any) -> Any:
        """The default value of a parameter, if it can be no other one in the next call."""
        if not is_constant(value):
            raise self._outside(f"{name}=...: a default that can be changed in place")
        return self._constant(value)

    def _cells(self, args: list[Any], named: dict[str, Any], node: ast.Call) -> Cells:
        """The segments of the cells of an exchange."""
        p = self.case.ranks
        shapes = {"alltoall": (p * p, p), "alltoallv": (p * p, p), "gather": (p, None), "scatter": (p, None)}
        count, inner = shapes.get(self.definition.collective, (None, None))
        if args or named or count is None or self.in_segment or self.ranges or self.nested or self.families:
            raise self._outside(ast.unparse(node))
        self.families.append(Family(count, Term.of(1), count, self.line, cells=True, inner=inner))
        return Cells(0)

    def _rounds(self, node: ast.Call, scope: dict[str, Any]) -> SymbolicRounds:
        """`ExchangeRounds` over all ranks, of rounds that are not read."""
        if len(node.args) != 2 or node.keywords or self._value(node.args[0], scope) != self.case.ranks:
            raise self._outside(ast.unparse(node))
        self._check_pure(node.args[1], scope)
        self.assumed.append(f"{ast.unparse(node.args[1])} (line {self.line}): is not read, and raises no error")
        self.assumed.append(
            f"line {self.line}: each section is exchanged once and then copied to every rank (else `ExchangeRounds` "
            "refuses it)"
        )
        return SymbolicRounds()

    def _groups(self, args: list[Any], named: dict[str, Any], node: ast.Call) -> Groups:
        """What `Program.groups` makes of a list that is not read: any group of ranks stands for all."""
        if len(args) != 1 or named or not isinstance(args[0], Opaque) or self.case.inner is not None:
            raise self._outside(ast.unparse(node))
        if self.families or self.in_segment or self.ranges or self.nested:
            raise self._outside(f"{ast.unparse(node)}: beside other pipelines, or in a loop or a condition")
        self.assumed.append(f"line {self.line}: no group of ranks names one twice (else `groups` refuses it)")
        # No size of a case may have this name: the members of a group are any number of the ranks.
        self.case = replace(self.case, members="members")
        self.families.append(Family(Term.of(1), Term.var("members"), Fraction(1), self.line))
        return Groups(0)

    def _unread_pipelines(self, node: ast.Call, scope: dict[str, Any], sections: Term) -> int:
        """The family that stands for the pipelines that a function of the library makes of what is not read."""
        program, *others = node.args
        # Their scratch space is for `reduce_in_order` alone: the family has none that an author could name.
        known = {keyword.arg for keyword in node.keywords} <= {"scratch"}
        if self._value(program, scope) is not PROGRAM or not others or not known or self.case.inner is not None:
            raise self._outside(ast.unparse(node))
        if self.families or self.in_segment or self.ranges or self.nested:
            raise self._outside(f"{ast.unparse(node)}: beside other pipelines, or in a loop or a condition")
        for each in others:
            self._check_pure(each, scope)
        self.families.append(Family(Term.of(1), sections, Fraction(1), self.line))
        return 0

    def _tree_turns(self, node: ast.Call, scope: dict[str, Any]) -> TreeTurns:
        """`together` or `in_proportion`, of trees that are not read."""
        family = self._unread_pipelines(node, scope, Term.of(1))
        self.assumed.append(
            f"line {self.line}: the two trees of a segment are over all ranks and have one root, and each segment has "
            f"one turn (else `{ast.unparse(node.func)}` refuses them)"
        )
        return TreeTurns(family, f"the root of a segment's trees (line {self.line}, call {self._number()})")

    def _tree_segments(self, node: ast.Call, scope: dict[str, Any]) -> TreeSegments:
        """`in_trees`, of trees that are not read."""
        family = self._unread_pipelines(node, scope, Term.of(1))
        of_parts = self.definition.collective in ("reducescatter", "allgather")
        if not of_parts and self.definition.collective not in ("reduce", "broadcast"):
            raise self._outside(f"{ast.unparse(node)}: one tree for a segment of {self.definition.collective}")
        whose = OWNER if of_parts else "the collective's"
        self.assumed.append(
            f"line {self.line}: the tree of a segment is over all ranks, its root is {whose}, and each segment has one "
            f"turn (else `{ast.unparse(node.func)}` refuses it)"
        )
        return TreeSegments(family, OWNER if of_parts else Term.var("root"))

    def _reduce_in_order(self, node: ast.Call, scope: dict[str, Any]) -> None:
        """`reduce_in_order`: along a tree, some of it through scratch space that nothing else reads."""
        if len(node.args) not in (2, 3) or node.keywords or not self.in_segment:
            raise self._outside(ast.unparse(node))
        segment, tree = (self._value(each, scope) for each in node.args[:2])
        for each in node.args[2:]:
            self._check_pure(each, scope)
        if not isinstance(segment, SymbolicSegment) or not isinstance(tree, SymbolicTree):
            raise self._outside(ast.unparse(node))
        chunk = self._item(segment, Term(()))
        self.assumed.append(
            f"line {self.line}: a tree is a star over servers, of whose ranks the others are around one (else "
            f"`{ast.unparse(node.func)}` refuses it)"
        )
        self.numbered = True
        line = self.names.first_line + node.lineno - 1
        self.nodes.append(Along(REDUCE, tree.root, chunk.family, chunk.pipeline, chunk.section, line))

    def _ring_turns(self, node: ast.Call, scope: dict[str, Any]) -> RingTurns:
        """`around`, of rings that are not read."""
        family = self._unread_pipelines(node, scope, self.case.ranks)
        self.in_rings = self.relabelled = True
        self.assumed.append(
            f"line {self.line}: a ring has every rank once (else `{ast.unparse(node.func)}` refuses it)"
        )
        return RingTurns(family)

    def _hop(self, op: int, node: ast.Call, scope: dict[str, Any]) -> None:
        """`reduce_next` or `copy_next`: a section goes from a place of a ring to the next one.

        Through another rank it is copied into scratch space that is read by the next transfer, and by nothing else: the
        family has none that an author could name. So the chunk sees one transfer.
        """
        if len(node.args) != 4 or node.keywords or not self.in_segment:
            raise self._outside(ast.unparse(node))
        segment, ring, place, section = (self._value(each, scope) for each in node.args)
        known = isinstance(segment, SymbolicSegment) and isinstance(ring, SymbolicRing)
        if not known or not isinstance(place, Term) or not isinstance(section, Term):
            raise self._outside(ast.unparse(node))
        p = self.case.ranks
        self._require(place, p)
        chunk = self._item(segment, section)
        line = self.names.first_line + node.lineno - 1
        self.nodes.append(Move(op, place, self._mod(place + 1, p), chunk.family, chunk.pipeline, chunk.section, line))

    def _pairs(self, args: list[Any], named: dict[str, Any], node: ast.Call) -> EveryPair:
        """What `Program.pairs` makes of a list that is not read."""
        if len(args) != 1 or named or not isinstance(args[0], Opaque) or self.case.inner is not None:
            raise self._outside(ast.unparse(node))
        self.assumed.append(
            f"line {self.line}: every pair of ranks with a block is named once (else `pairs` refuses it)"
        )
        return EveryPair()

    def _tree_edges(self, args: list[Any], node: ast.Call) -> SymbolicEdges:
        """What `Program.edges` makes of trees and edges that are not read."""
        given, edges = args
        known = isinstance(given, list | tuple) and given and all(isinstance(each, Opaque) for each in given)
        if not known or not isinstance(edges, Opaque) or self.case.inner is not None:
            raise self._outside(ast.unparse(node))
        if self.edges is not None or self.in_segment or self.nested:
            raise self._outside(f"{ast.unparse(node)}: other edges of trees")
        self.assumed.append(
            f"line {self.line}: every edge of trees over all ranks is named once (else `edges` refuses it)"
        )
        self.edges = SymbolicEdges(len(given), 1)
        return self.edges

    def _scratch(self, of: SymbolicSegment, args: list[Any], node: ast.Call) -> SymbolicChunk:
        """The chunk of a scratch slot."""
        section, slot = [*args, Term(())][:2] if args else (None, None)
        scratch = self.families[of.family].scratch
        known = slot.constant if isinstance(slot, Term) else None
        if len(args) > 2 or not isinstance(section, Term) or known is None or not 0 <= known < scratch:
            raise self._outside(ast.unparse(node))
        self.nodes.append(Touch(of.family, of.pipeline, section, self.line))
        return SymbolicChunk(of.family, of.pipeline, section, known)

    def _step(self, op: int, of: SymbolicSegment, given: dict[str, Any], line: int) -> None:
        self.numbered = True
        lanes = [given[each] for each in ("src", "dst", "section")]
        if not all(isinstance(each, Lanes) and each.count == lanes[0].count for each in lanes):
            raise self._outside("a whole step of other things than arrays of one length")

        def lane(number: Term) -> None:
            src, dst, section = (each.value.put({each.lane: number}) for each in lanes)
            self.nodes.append(Move(op, src, dst, of.family, of.pipeline, section, line))

        self._loop("lane", Term(()), lanes[0].count, lane)

    def _tree(self, ranks: Any) -> SymbolicTree:
        """A tree over a list of which the first entry, its root, is known."""
        self.assumed.append(f"line {self.line}: the tree names every rank once (else `Tree` and the DSL refuse it)")
        return SymbolicTree(root_key(ranks.first if isinstance(ranks, FirstOf) else self._item(ranks, Term(()))))

    def _column(self, values: Any, node: ast.Call) -> Any:
        """An array of these numbers."""
        if isinstance(values, list | tuple):
            for each in values:
                if not isinstance(each, Term):
                    raise self._outside(f"{ast.unparse(node)}: other values than numbers")
                self._check_fits(each)
        elif not isinstance(values, Span | FirstOf):
            raise self._outside(f"{ast.unparse(node)}: of {shown(values)}")
        return values

    def _builtin(self, name: str, args: list[Any], named: dict[str, Any], node: ast.Call) -> Any:
        if any(keyword != "strict" or name != "zip" for keyword in named):
            raise self._outside(ast.unparse(node).partition("\n")[0])
        if name == "range" and all(isinstance(each, Term) for each in args) and len(args) in (1, 2):
            return Span(*([Term(()), *args] if len(args) == 1 else args))
        if name == "enumerate" and len(args) == 1 and not named:
            return Enumerated(args[0])
        if name == "zip" and all(isinstance(each, Pipelines | Endless) for each in args):
            return Zipped(tuple(args))
        if name == "divmod" and len(args) == 2 and all(isinstance(each, Term) for each in args):
            return self._floordiv(*args), self._mod(*args)
        if name in ("set", "list", "len", "tuple", "sorted") and len(args) != 1:
            raise self._outside(ast.unparse(node).partition("\n")[0])
        if name == "set" and isinstance(args[0], list | Span):
            return Set(tuple(dict.fromkeys(args[0])) if isinstance(args[0], list) else args[0])
        if name in ("list", "tuple") and isinstance(args[0], Span | AnyOrder):
            return replace(args[0], kind=name)
        if name == "sorted" and isinstance(args[0], RanksInOrder):
            return Span(Term(()), args[0].count, "list")
        if name == "list" and isinstance(args[0], Pipelines) and not args[0].many and self.listed is None:
            self.listed = SegmentList(args[0].family)
            return self.listed
        if name == "list" and isinstance(args[0], _LISTED):
            return args[0]
        if name == "list" and isinstance(args[0], Opaque):
            return self._opaque(f"{ast.unparse(node)} (line {self.line})")
        if name == "len":
            return self._length(args[0])
        if name in ("max", "min") and len(args) == 2 and all(isinstance(each, Term) for each in args):
            first, second = self._decided(le(args[0], args[1])), self._decided(le(args[1], args[0]))
            if first in (TRUE, FALSE):
                return args[1] if (first == TRUE) == (name == "max") else args[0]
            if second == TRUE:
                return args[0] if name == "max" else args[1]
            return least(*args) if name == "min" else -least(-args[0], -args[1])
        if name == "reversed" and len(args) == 1 and isinstance(args[0], Span | list | tuple):
            return Reversed(args[0])
        raise self._outside(ast.unparse(node).partition("\n")[0])
