"""Iteration in the symbolic interpreter: over ranges, lists, edges and comprehensions, unrolled or as one loop."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optcc.schedule import COPY, DATA
from optcc.verify.all_ranks.names import Names
from optcc.verify.all_ranks.symbolic import (
    SPREAD,
    Along,
    EachEdge,
    Family,
    Guard,
    Loop,
    Move,
    Node,
    Require,
    Touch,
)
from optcc.verify.all_ranks.symbolic_arithmetic import Arithmetic
from optcc.verify.all_ranks.symbolic_terms import (
    FALSE,
    TRUE,
    Formula,
    Skip,
    Term,
    both,
    eq,
    le,
    lt,
    no,
    quotient,
)
from optcc.verify.all_ranks.symbolic_values import (
    Cells,
    Enumerated,
    EveryPair,
    Lazy,
    Opaque,
    Product,
    Reversed,
    RingTurn,
    Skipping,
    Span,
    SymbolicCopies,
    SymbolicEdges,
    SymbolicOwner,
    SymbolicRing,
    SymbolicRounds,
    SymbolicSegment,
    SymbolicTree,
    Thing,
    TurnPart,
    shown,
)

UNROLLED_MAX = 16
"""Limit on the lengths of lists that are unrolled, and on the residue classes of segments."""
UNBOUND = Thing("a name without a value")


@dataclass(eq=False)
class Loops(Arithmetic):
    """Iteration; of the segments, over those whose number is `residue` mod `modulus`."""

    modulus: int = 1
    residue: int = 0
    families: list[Family] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    names: Names = field(default_factory=lambda: Names("", frozenset(), {}, "", 0, [], set()))
    assumed: list[str] = field(default_factory=list)
    n_loops: int = 0
    nested: int = 0
    n_values: int = 0
    unordered: bool = False
    in_beats: bool = False
    relabelled: bool = False
    owner: Term | None = None
    exchanged: list[Node] = field(default_factory=list)
    spread_line: int = 0
    spread_of: tuple[int, Term] = (-1, Term(()))
    round_nested: int = -1
    broadcast: bool = False
    in_turn: bool = False

    # What evaluates expressions (`Expressions`).

    def _value(self, node: ast.expr, scope: dict[str, Any], *, once: bool = False) -> Any:
        raise NotImplementedError

    def _truth(self, node: ast.expr, scope: dict[str, Any]) -> Formula:
        raise NotImplementedError

    def _item(self, of: Any, index: Any) -> Any:
        raise NotImplementedError

    def _inside(self, run: Callable[[], None]) -> tuple[Node, ...]:
        outside, self.nodes = self.nodes, []
        self.nested += 1
        run()
        self.nested -= 1
        found, self.nodes = self._without_used(self.nodes), outside
        return found

    def _without_used(self, nodes: list[Node]) -> tuple[Node, ...]:
        """These nodes; of a chunk that none of them transfers, it is required that it exists."""
        used = {(each.family, each.pipeline, each.section) for each in nodes if isinstance(each, Move | Along)}
        kept: list[Node] = []
        for node in nodes:
            if not isinstance(node, Touch):
                kept.append(node)
            elif (node.family, node.pipeline, node.section) not in used:
                family = self.families[node.family]
                ranges = ((node.section, family.sections), (node.pipeline, family.count))
                kept.append(Require(both(*(both(le(0, at), lt(at, n)) for at, n in ranges)), node.line))
        return tuple(kept)

    def _loop(self, name: str, low: Term, high: Term, body: Callable[[Term], None]) -> None:
        self.n_loops += 1
        var = f"{name}_{self.n_loops}"
        line = self.line
        self.ranges[var] = (low, high)
        found = self._inside(lambda: body(Term.var(var)))
        del self.ranges[var]
        if found:
            self.nodes.append(Loop(var, low, high, found, line))

    def _is_unrolled(self, over: Any) -> bool:
        """True if the iterable has a small constant length."""
        match over:
            case list() | tuple():
                return True
            case Span(low, high):
                count = (high - low).constant
                return count is not None and count <= UNROLLED_MAX
            case Product(parts):
                return all(map(self._is_unrolled, parts))
            case Enumerated(inner) | Reversed(inner):
                return self._is_unrolled(inner)
            case Lazy(node, scope, home) if len(node.generators) == 1:
                outside, self.names = self.names, home
                found = self._is_unrolled(self._value(node.generators[0].iter, dict(scope), once=True))
                self.names = outside
                return found
        return False

    def _may_skip(self, over: Any) -> bool:
        """True if there are conditions on which elements there are."""
        match over:
            case Lazy(node, scope, home):
                if any(each.ifs for each in node.generators):
                    return True
                outside, self.names = self.names, home
                found = self._may_skip(self._value(node.generators[0].iter, dict(scope), once=True))
                self.names = outside
                return found
            case Product(parts):
                return any(map(self._may_skip, parts))
            case Enumerated(inner) | Reversed(inner):
                return self._may_skip(inner)
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
        """Runs `body` for every element, with its index or None if that is unknown."""
        match over:
            case list() | tuple():
                for number, value in enumerate(over):
                    body(value, Term.of(number))
            case Span(low, high):
                count = (high - low).constant
                if count is not None and count <= UNROLLED_MAX:
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
            case Reversed(list() | tuple() as listed):
                self._each(listed[::-1], body)
            case Reversed(Span(low, high) as span):
                if self._is_unrolled(span):
                    self._each(list(reversed(self._unrolled(span) or [])), body)
                else:
                    self._loop("i", Term(()), high - low, lambda i: body(high - 1 - i, i))
            case Cells(family, walked=True):
                n_cells = self.families[family].count
                self._loop("i", Term(()), n_cells, lambda i: body(self._item(over, i), i))
            case EveryPair():
                self._each_pair(body)
            case SymbolicEdges():
                self._each_edge(over, body)
            case SymbolicRounds():
                self._each_round(body)
            case SymbolicCopies():
                self._each_copy(body)
            case TurnPart():
                self._each_of_turn(over, body)
            case RingTurn():
                self._each_ring(over, body)
            case Enumerated(listed):

                def counted(value: Any, index: Term | None) -> None:
                    if index is None:
                        raise self._outside("enumerate of a list with conditions")
                    body((index, value), index)

                self._each(listed, counted)
            case Product(parts):
                self._each_of_product(parts, (), body)
            case Lazy(node, scope, home):
                outside = self.names

                def at_home(value: Any, index: Term | None) -> None:
                    self.names = outside
                    body(value, index)
                    self.names = home

                self.names = home
                self._each_of_lazy(node, list(node.generators), dict(scope), at_home)
                self.names = outside
            case _:
                raise self._outside(f"a loop over {shown(over)}")

    def _each_round(self, body: Callable[[Any, Term | None], None]) -> None:
        """A round in which a section is exchanged, for all of them, and what later rounds copy of that section.

        A chunk has one section, so it sees its exchange, and after that the copies of it in later rounds.
        """
        if self.owner is not None:
            raise self._outside("rounds inside of rounds")
        owners = self.case.ranks - 1

        def one(owner: Term) -> None:
            self.owner, self.exchanged, self.spread_line, self.round_nested = owner, [], 0, self.nested + 1
            found = self._inside(lambda: body((SymbolicOwner(owner), SymbolicCopies()), None))
            exchanged, line = self.exchanged, self.spread_line
            chunks = {(each.family, each.pipeline, each.section) for each in exchanged if isinstance(each, Move)}
            if found or not line or len(chunks) != 1 or not all(isinstance(each, Move | Require) for each in exchanged):
                raise self._outside("a round of something else than an exchange and copies")
            ((family, pipeline, section),) = chunks
            if section != owner or (family, pipeline) != self.spread_of:
                raise self._outside("an exchange of another section than the owner's")
            self.nodes += exchanged
            self.nodes.append(Move(SPREAD, owner, owners, family, pipeline, section, line))

        self.unordered = self.relabelled = True
        self._loop("owner", Term(()), owners, one)
        self.owner = None

    def _each_of_turn(self, part: TurnPart, body: Callable[[Any, Term | None], None]) -> None:
        """The segments of a turn that are reduced, or broadcast, each with its tree: what is done with one of them.

        It is broadcast in its own turn or in a later one. So it sees what is done with those that are reduced first,
        if that stands first in the turn.
        """
        if self.in_turn:
            raise self._outside("segments of a turn inside of a loop over segments of a turn")
        if self.broadcast and not part.broadcasting:
            raise self._outside("segments that are reduced, behind those that are broadcast")
        self.broadcast = self.broadcast or part.broadcasting
        self.in_turn = True
        number = Opaque("the number of a pipeline")
        body((number, SymbolicSegment(part.turns.family, Term(())), SymbolicTree(part.turns.root)), None)
        self.in_turn = False

    def _each_ring(self, turn: RingTurn, body: Callable[[Any, Term | None], None]) -> None:
        """The segments of a turn, each with its ring: what is done with one of them."""
        if self.in_turn:
            raise self._outside("segments of a turn inside of a loop over segments of a turn")
        self.in_turn = True
        number = Opaque("the number of a ring")
        body((number, SymbolicSegment(turn.family, Term(())), SymbolicRing(self.case.ranks)), None)
        self.in_turn = False

    def _each_copy(self, body: Callable[[Any, Term | None], None]) -> None:
        """The copies of a round, which must each be of its section, from its source to its destination."""
        if self.owner is None or self.spread_line or self.nested != self.round_nested:
            raise self._outside("copies of a round, other than once in it")
        self.n_loops += 1
        section, src, dst = (Term.var(f"{name}_{self.n_loops}") for name in ("copied", "from", "to"))
        for end in (src, dst):
            self.ranges[str(end)] = (Term(()), self.case.ranks)
        found = self._inside(lambda: body((section, src, dst), None))
        for end in (src, dst):
            del self.ranges[str(end)]
        match found:
            case (Move() as move,) if move == replace(
                move, op=COPY, src=src, dst=dst, section=section, src_slot=DATA, dst_slot=DATA
            ):
                self.spread_line, self.spread_of = move.line, (move.family, move.pipeline)
            case _:
                raise self._outside("copies of a round to other ranks, or of another section")

    def _each_edge(self, edges: SymbolicEdges, body: Callable[[Any, Term | None], None]) -> None:
        """Runs `body` for an edge of the trees, in a loop over beats."""
        if not self.in_beats:
            raise self._outside("edges of trees, other than in each beat of a pipeline")
        self.n_loops += 1
        tree, child, parent, level = (
            Term.var(f"{name}_{self.n_loops}") for name in ("tree", "child", "parent", "level")
        )
        line = self.line
        found = self._inside(lambda: body((tree, child, parent, level), None))
        self.nodes.append(EachEdge(edges.number, tree, child, parent, level, found, line))

    def _each_pair(self, body: Callable[[Any, Term | None], None]) -> None:
        """Runs `body` for a pair of ranks; each cell must be accessed for its own pair only, so that their order does
        not matter."""

        def pair(src: Term, dst: Term) -> None:
            found = self._inside(lambda: body((src, dst), None))
            own = src * self.case.ranks + dst
            for node in all_nodes(found):
                of_cell = isinstance(node, Move) and self.families[node.family].cells and node.pipeline == own
                if not of_cell and not isinstance(node, Guard):
                    raise self._outside("pairs of ranks for something else than their own cells")
            self.nodes.append(Guard(no(eq(src, dst)), found))

        p = self.case.ranks
        self.unordered = True
        self._loop("src", Term(()), p, lambda src: self._loop("dst", Term(()), p, lambda dst: pair(src, dst)))

    def _each_of_product(
        self, parts: tuple[Any, ...], chosen: tuple[Any, ...], body: Callable[[Any, Term | None], None]
    ) -> None:
        if not parts:
            body(chosen, None)
            return
        self._each(parts[0], lambda value, index: self._each_of_product(parts[1:], (*chosen, value), body))

    def _each_of_lazy(
        self,
        node: ast.ListComp | ast.GeneratorExp,
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
            if one is node.generators[0]:
                # What a comprehension binds anywhere is its own in all of it, but for what its first part goes over.
                inner |= dict.fromkeys(_bound_by(node), UNBOUND)
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

        self._each(self._value(one.iter, scope, once=True), each)

    def _bind(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Tuple(elts=targets):
                values = value if isinstance(value, tuple | list) else None
                if isinstance(value, Opaque):
                    values = [Opaque(f"{number} of {value.text}", value.number) for number in range(len(targets))]
                if isinstance(value, Lazy | Span):
                    values = self._unrolled(value)
                if values is None or len(values) != len(targets):
                    raise self._outside(f"{ast.unparse(target)} = ...")
                for each, part in zip(targets, values, strict=True):
                    self._bind(each, part, scope)
            case _:
                raise self._outside(f"{ast.unparse(target)} = ...")


def all_nodes(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if isinstance(node, Loop | Guard):
            yield from all_nodes(node.body)


def _bound_by(node: ast.ListComp | ast.GeneratorExp) -> set[str]:
    """The names that the parts of a comprehension bind."""
    return set().union(*(names_of(each.target) for each in node.generators))


def names_of(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
