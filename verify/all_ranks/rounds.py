"""Induction over rounds: one chunk on all ranks, where a whole step happens at once, and scratch space is used.

`optcc.verify.all_ranks.induction` follows a chunk transfer by transfer. Where all ranks exchange at once, at distances
that double or halve, that is no way: here a loop whose turns cannot see each other is one *step*. A place is a rank's
chunk of the message, or of a scratch slot, and the state is

    live(place)          its value is known, and `has` says exactly which contributions are in it, each once
    has(place, y)        rank y's contribution is in it
    alike(one, other)    both are the same tree of reductions, up to the order of two operands

`live` and `alike` may be false where they could be true, so an invariant need not describe what nobody reads again. A
copy of what is not live is not live; the sum of live values with a common contribution is a failed lemma.

A step. Turn i of a loop reads `src(i)` and writes `dst(i)`, if its conditions hold, and `turn(place)` solves `dst` for
i. Proved: turn(dst(i)) = i, so no two turns write one place; and no turn reads what a turn writes, other than the place
it writes itself. Then the order of the turns does not matter, and all read the state before the loop.

An invariant of any other loop is guessed from runs with few ranks (a value is live there if it is read before it is
overwritten) and proved: it follows from the state before the loop, and from itself after a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from optcc.schedule import DATA, REDUCE
from optcc.verify.all_ranks.chunk_program import (
    At,
    ChunkNode,
    ChunkProgram,
    ProofStops,
    Step,
    Turns,
    When,
    is_rank,
    isolate,
)
from optcc.verify.all_ranks.induction import InductionLemma, ask, iff, why
from optcc.verify.all_ranks.symbolic import SPREAD, Loop, Move, Reading
from optcc.verify.all_ranks.symbolic_terms import (
    FALSE,
    TRUE,
    Formula,
    Pow,
    Term,
    both,
    choose,
    either,
    eq,
    le,
    lt,
    no,
    put,
)

R, Y, T = (Term.var(name) for name in ("r0", "y0", "t0"))
"""Any rank, the rank of any contribution, and another rank."""
EXCHANGES = ("alltoall", "alltoallv", "gather", "scatter")
"""Collectives of cells, each from one rank to one."""
_PLACE = "place"
Place = tuple[int, Term]
"""A slot, and a rank."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """What the places hold."""

    live: Callable[[Place], Formula]
    has: Callable[[Place, Term], Formula]
    alike: Callable[[Place, Place], Formula]


@dataclass(frozen=True, slots=True)
class RoundInvariant:
    """The state before each turn of a loop: `live` and `has` by slot, over rank r0 and contribution y0; `alike` by two
    slots, over ranks r0 and t0. A slot without an entry is not live."""

    live: Mapping[int, Formula]
    has: Mapping[int, Formula]
    alike: Mapping[tuple[int, int], Formula]

    def at(self, values: Mapping[str, Term]) -> RoundState:
        """The state, for these values of variables."""

        def alike(one: Place, other: Place) -> Formula:
            known = self.alike.get((one[0], other[0]), FALSE)
            return put(known, {**values, "r0": one[1], "t0": other[1]})

        return RoundState(
            lambda place: put(self.live.get(place[0], FALSE), {**values, "r0": place[1]}),
            lambda place, y: put(self.has.get(place[0], FALSE), {**values, "r0": place[1], "y0": y}),
            alike,
        )


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A loop as a step: in the turn of number `loop.var` the move from rank `src` to `dst`, if `test`; `turn` is the
    turn that writes the rank called `_PLACE`."""

    loop: Turns
    move: Move
    src: Term
    dst: Term
    test: Formula
    turn: Term

    @classmethod
    def of(cls, loop: Turns, values: Mapping[str, Term]) -> WholeStep | None:
        """The loop as a step; None if it has more than one transfer, or no rank determines the turn."""
        found = _only_step(loop.body, values)
        if found is None:
            return None
        step, test, values = found
        if step.move.op == SPREAD:
            return None
        (src,), (dst,) = (tuple(each.put(values) for each in end) for end in (step.src, step.dst))
        low, high = loop.low.put(values), loop.high.put(values)
        turn = isolate(dst, Term.var(_PLACE), Loop(loop.var, low, high, (), loop.line))
        if turn is None:
            return None
        inside = both(le(low, Term.var(loop.var)), lt(Term.var(loop.var), high))
        return cls(loop, step.move, src, dst, both(inside, put(step.hits, values), test), turn)

    def turn_of(self, rank: Term) -> dict[str, Term]:
        """The turn that writes this rank's place, if any does."""
        return {self.loop.var: self.turn.put({_PLACE: rank})}

    def writes(self, place: Place) -> Formula:
        """Whether a turn writes the place."""
        slot, rank = place
        if slot != self.move.dst_slot:
            return FALSE
        turn = self.turn_of(rank)
        return both(put(self.test, turn), eq(self.dst.put(turn), rank))

    def source(self, place: Place) -> Place:
        """What the turn that writes the place reads."""
        return self.move.src_slot, self.src.put(self.turn_of(place[1]))


def _only_step(nodes: Sequence[ChunkNode], values: Mapping[str, Term]) -> tuple[Step, Formula, dict[str, Term]] | None:
    """The one transfer in these nodes, with its conditions; None if there are more, or a loop around it."""
    if len(nodes) != 1:
        return None
    match nodes[0]:
        case Step() as step:
            return step, TRUE, dict(values)
        case When(test, body):
            found = _only_step(body, values)
            return None if found is None else (found[0], both(put(test, values), found[1]), found[2])
        case At(var, only, low, high, body):
            lane = only.put(values)
            test = both(le(low.put(values), lane), lt(lane, high.put(values)))
            found = _only_step(body, {**values, var: lane})
            return None if found is None else (found[0], both(test, found[1]), found[2])
    return None


def after_step(state: RoundState, step: WholeStep | SingleStep) -> RoundState:
    """The state after a step, by that before it."""
    is_sum = step.move.op == REDUCE

    def live(place: Place) -> Formula:
        new = state.live(step.source(place))
        return choose(step.writes(place), both(new, state.live(place)) if is_sum else new, state.live(place))

    def has(place: Place, y: Term) -> Formula:
        new = state.has(step.source(place), y)
        return choose(step.writes(place), either(new, state.has(place, y)) if is_sum else new, state.has(place, y))

    def copied(one: Place, other: Place) -> Formula:
        """For a copy: a place that is written is like what its source is like."""
        here, there = step.writes(one), step.writes(other)
        left, right = step.source(one), step.source(other)
        return choose(
            here,
            choose(there, state.alike(left, right), state.alike(left, other)),
            choose(there, state.alike(one, right), state.alike(one, other)),
        )

    def added(one: Place, other: Place) -> Formula:
        """For a sum: two sums are alike if their operands are, in either order."""
        here, there = step.writes(one), step.writes(other)
        left, right = step.source(one), step.source(other)
        same = eq(one[1], other[1]) if one[0] == other[0] else FALSE
        straight = both(state.alike(one, other), state.alike(left, right))
        crossed = both(state.alike(one, right), state.alike(left, other))
        return choose(
            here,
            choose(there, either(same, straight, crossed), FALSE),
            choose(there, FALSE, state.alike(one, other)),
        )

    return RoundState(live, has, added if is_sum else copied)


@dataclass(frozen=True, slots=True)
class SingleStep:
    """One transfer from rank `src` to `dst`, if `test`."""

    move: Move
    src: Term
    dst: Term
    test: Formula

    def writes(self, place: Place) -> Formula:
        """Whether the place is written."""
        return both(self.test, eq(place[1], self.dst)) if place[0] == self.move.dst_slot else FALSE

    def source(self, _: Place) -> Place:
        """What is read."""
        return self.move.src_slot, self.src


def after_two(state: RoundState, one: SingleStep, other: SingleStep) -> RoundState:
    """The state after two sums at different ranks, by that before them."""
    first, second = after_step(state, one), after_step(state, other)

    def alike(left: Place, right: Place) -> Formula:
        a, b, c, d = one.writes(left), other.writes(left), one.writes(right), other.writes(right)

        def sums(first: SingleStep, second: SingleStep) -> Formula:
            """Of the sum in `left` by one step and that in `right` by the other."""
            x, y = first.source(left), second.source(right)
            straight = both(state.alike(left, right), state.alike(x, y))
            return either(straight, both(state.alike(left, y), state.alike(x, right)))

        same = eq(left[1], right[1]) if left[0] == right[0] else FALSE
        return choose(
            a,
            choose(d, sums(one, other), both(c, same)),
            choose(
                b,
                choose(c, sums(other, one), both(d, same)),
                both(no(c), no(d), state.alike(left, right)),
            ),
        )

    return RoundState(
        lambda place: choose(one.writes(place), first.live(place), second.live(place)),
        lambda place, y: choose(one.writes(place), first.has(place, y), second.has(place, y)),
        alike,
    )


def _is_summed(nodes: Sequence[ChunkNode], number: int) -> bool:
    """True for one of two sums in succession, from scratch space into the message."""

    def is_sum(at: int) -> bool:
        node = nodes[at] if 0 <= at < len(nodes) else None
        return isinstance(node, Step) and node.move.op == REDUCE and node.move.src_slot != DATA == node.move.dst_slot

    found = [at for at in range(len(nodes)) if is_sum(at)]
    return number in found and len(found) == 2 and found[1] == found[0] + 1


def where(test: Formula, then: RoundState, otherwise: RoundState) -> RoundState:
    """`then` where `test` holds."""
    if test in (TRUE, FALSE):
        return then if test == TRUE else otherwise
    return RoundState(
        lambda place: choose(test, then.live(place), otherwise.live(place)),
        lambda place, y: choose(test, then.has(place, y), otherwise.has(place, y)),
        lambda one, other: choose(test, then.alike(one, other), otherwise.alike(one, other)),
    )


class NoStep(ProofStops):
    """It is not proved that the loop over `var` is a step."""

    def __init__(self, var: str, why: str) -> None:
        super().__init__(why)
        self.var = var


@dataclass(eq=False)
class RoundProof:
    """The lemmas of one chunk, their names prefixed by `label`; stops at the first that is not proved."""

    chunk: ChunkProgram
    collective: str
    invariants: Mapping[str, RoundInvariant]
    label: str
    sequential: frozenset[str] = frozenset()
    """Loops that are known to be no steps."""
    lemmas: list[InductionLemma] = field(default_factory=list)

    def run(self) -> None:
        """Proves what the collective asks of the chunk.

        Raises ProofStops at the first lemma that Z3 does not claim, NoStep if that is the one that a loop is a step.
        """
        chunk = self.chunk
        for number, (line, facts, goal) in enumerate(chunk.single):
            statement = f"in line {line} one turn of a loop accesses the chunk: {goal}"
            self._lemma(f"one turn {number + 1}, line {line}", statement, [*chunk.facts, *facts], goal)
        state = self._run(chunk.nodes, start_of(chunk, self.collective), {}, list(chunk.facts))
        ends = [*chunk.facts, *(self._is_rank(each) for each in (R, Y, T))]
        here, there = (DATA, R), (DATA, T)
        if self.collective in EXCHANGES:
            owner, taker = ends_of(chunk, self.collective)
            ends = [*chunk.facts, self._is_rank(Y)]
            words = "in the end the value is known where it is to go"
            self._lemma("known", words, ends, state.live((DATA, taker)))
            words = "in the end it is the owner's, and nothing else"
            self._lemma("result", words, ends, iff(state.has((DATA, taker), Y), eq(Y, owner)))
            return
        self._lemma("known", "in the end the value of every rank is known", ends, state.live(here))
        if self.collective == "allreduce":
            wanted, words = state.has(here, Y), "in the end every rank has every contribution"
        else:
            wanted, words = iff(state.has(here, Y), eq(Y, owner_of(chunk))), "in the end every rank has the owner's"
        self._lemma("result", words, ends, wanted)
        if self.collective == "allreduce":
            words = "in the end all values are one tree, up to the order of two operands"
            self._lemma("agreement", words, ends, state.alike(here, there))

    def _is_rank(self, rank: Term) -> Formula:
        return is_rank((rank,), self.chunk.reading)

    def _lemma(self, name: str, statement: str, facts: Sequence[Formula], goal: Formula) -> None:
        if goal == TRUE:
            return
        lemma = ask(f"{self.label}{name}", statement, facts, goal, relates=True)
        self.lemmas.append(lemma)
        if not lemma.proved:
            raise ProofStops(f"lemma {lemma.name!r} ({statement}): {why(lemma)}")

    def _run(
        self, nodes: Sequence[ChunkNode], state: RoundState, values: dict[str, Term], facts: list[Formula]
    ) -> RoundState:
        for number, node in enumerate(nodes):
            match node:
                case Step() if _is_summed(nodes, number):
                    if number == 0 or not _is_summed(nodes, number - 1):
                        state = self._sums(nodes[number : number + 2], state, values, facts)
                case Step() if node.move.op == SPREAD:
                    state = self._spread(node, state, values, facts)
                case Step():
                    (src,), (dst,) = (tuple(each.put(values) for each in end) for end in (node.src, node.dst))
                    step = SingleStep(node.move, src, dst, put(node.hits, values))
                    state = self._step(step, state, [*facts, step.test])
                case When(test, body):
                    test = put(test, values)
                    state = where(test, self._run(body, state, values, [*facts, test]), state)
                case At(var, only, low, high, body):
                    lane = only.put(values)
                    test = both(le(low.put(values), lane), lt(lane, high.put(values)))
                    state = where(test, self._run(body, state, {**values, var: lane}, [*facts, test]), state)
                case Turns():
                    whole = None if node.var in self.sequential else WholeStep.of(node, values)
                    if whole is None:
                        state = self._turns(node, state, values, facts)
                    else:
                        here = [*facts, whole.test]
                        self._independent(whole, here)
                        state = self._step(whole, state, here)
        return state

    def _independent(self, step: WholeStep, facts: list[Formula]) -> None:
        """The lemmas that the turns of a loop are a step."""
        line, turn = f"line {step.move.line}", Term.var(step.loop.var)
        again = step.turn_of(step.dst)[step.loop.var]
        try:
            self._lemma(f"{line}, step", "no two turns write the same place", facts, eq(again, turn))
            reads = no(step.writes((step.move.src_slot, step.src)))
            self._lemma(f"{line}, apart", "no turn reads what a turn writes", facts, reads)
        except ProofStops as stops:
            raise NoStep(step.loop.var, str(stops)) from None

    def _step(self, step: WholeStep | SingleStep, state: RoundState, facts: list[Formula]) -> RoundState:
        src, dst = (step.move.src_slot, step.src), (step.move.dst_slot, step.dst)
        for place in (src, dst) if step.move.op == REDUCE else (src,):
            # Only the message of an allreduce is written everywhere from the start.
            if place[0] != DATA or self.collective != "allreduce":
                words = "what is read was written before"
                self._lemma(f"line {step.move.line}, written", words, facts, state.live(place))
        if step.move.op == REDUCE:
            known = both(state.live(src), state.live(dst))
            twice = both(state.has(src, Y), state.has(dst, Y))
            self._lemma(
                f"line {step.move.line}, disjoint",
                "no sum has a contribution twice",
                [*facts, self._is_rank(Y), known],
                no(twice),
            )
        return after_step(state, step)

    def _sums(
        self, nodes: Sequence[ChunkNode], state: RoundState, values: dict[str, Term], facts: list[Formula]
    ) -> RoundState:
        """Two sums of different ranks at once: neither reads what the other writes, being from scratch space."""
        steps = []
        for node in nodes:
            assert isinstance(node, Step)
            (src,), (dst,) = (tuple(each.put(values) for each in end) for end in (node.src, node.dst))
            steps.append(SingleStep(node.move, src, dst, put(node.hits, values)))
            self._step(steps[-1], state, [*facts, steps[-1].test])
        one, other = steps
        words = "two sums are at different ranks"
        goal = no(eq(one.dst, other.dst))
        self._lemma(f"line {one.move.line}, two", words, [*facts, one.test, other.test], goal)
        return after_two(state, one, other)

    def _spread(self, step: Step, state: RoundState, values: dict[str, Term], facts: list[Formula]) -> RoundState:
        """Every rank gets a copy of what one of two ranks has, which must be the same."""
        (src,), (dst,) = (tuple(each.put(values) for each in end) for end in (step.src, step.dst))
        test, line = put(step.hits, values), step.move.line
        one, other = (DATA, src), (DATA, dst)
        here = [*facts, test, self._is_rank(Y)]
        self._lemma(f"line {line}, known", "what is copied is known", here, both(state.live(one), state.live(other)))
        words = "both ranks that it is copied from have the same"
        self._lemma(f"line {line}, same", words, here, iff(state.has(one, Y), state.has(other, Y)))
        self._lemma(f"line {line}, alike", f"{words} tree", here, state.alike(one, other))

        def alike(left: Place, right: Place) -> Formula:
            if left[0] == right[0] == DATA:
                return TRUE
            return FALSE if DATA in (left[0], right[0]) else state.alike(left, right)

        after = RoundState(
            lambda place: TRUE if place[0] == DATA else state.live(place),
            lambda place, y: state.has(one, y) if place[0] == DATA else state.has(place, y),
            alike,
        )
        return where(test, after, state)

    def _turns(self, loop: Turns, state: RoundState, values: dict[str, Term], facts: list[Formula]) -> RoundState:
        low, high, turn = loop.low.put(values), loop.high.put(values), Term.var(loop.var)
        if loop.var not in self.invariants:
            raise ProofStops(f"line {loop.line}: a loop that was never reached for small numbers of ranks")
        invariant = self.invariants[loop.var]

        def before(number: Term) -> RoundState:
            return invariant.at({**values, loop.var: number})

        ranks = [self._is_rank(each) for each in (R, Y, T)]
        words = "before the first turn the invariant holds"
        self._imply(f"line {loop.line}, start", words, [*facts, *ranks], state, before(low), invariant)
        inside = [*facts, le(low, turn), lt(turn, high)]
        after = self._run(loop.body, before(turn), {**values, loop.var: turn}, inside)
        has = invariant.has.get(DATA, FALSE)
        words = f"a turn keeps the invariant: where {invariant.live.get(DATA, FALSE)}, a rank has y where {has}"
        self._imply(f"line {loop.line}, turn", words, [*inside, *ranks], after, before(turn + 1), invariant)
        return where(le(low, high), before(high), before(low))

    def _imply(
        self,
        name: str,
        words: str,
        facts: Sequence[Formula],
        state: RoundState,
        wanted: RoundState,
        invariant: RoundInvariant,
    ) -> None:
        """The lemmas that what `wanted` says of a place is so in `state`."""
        for slot in invariant.live:
            here = (slot, R)
            known = [*facts, wanted.live(here)]
            mark = "" if slot == DATA else f", scratch {slot}"
            self._lemma(f"{name}{mark}, live", words, known, state.live(here))
            self._lemma(f"{name}{mark}, has", words, known, iff(state.has(here, Y), wanted.has(here, Y)))
        for one, other in invariant.alike:
            here, there = (one, R), (other, T)
            known = [*facts, wanted.live(here), wanted.live(there), wanted.alike(here, there)]
            mark = "" if one == other == DATA else f", scratch {one} and {other}"
            self._lemma(f"{name}{mark}, alike", words, known, state.alike(here, there))


def owner_of(chunk: ChunkProgram) -> Term:
    """The rank that owns the chunk, where the collective has slices.

    Raises ProofStops if chunks are not the ranks' slices.
    """
    if [name for name, _ in chunk.places] != ["c_pipeline"] or chunk.places[0][1] != chunk.reading.case.ranks:
        raise ProofStops("chunks are not the ranks' slices")
    return Term.var("c_pipeline")


def ends_of(chunk: ChunkProgram, collective: str) -> tuple[Term, Term]:
    """The rank that has the chunk at the start, and the rank that must have it in the end."""
    names = [name for name, _ in chunk.places]
    if names != (["c_pipeline"] if collective in ("gather", "scatter") else ["c_src", "c_dst"]):
        raise ProofStops("chunks are not the cells of the exchange")
    root = Term.var("root")
    match collective:
        case "gather":
            return Term.var("c_pipeline"), root
        case "scatter":
            return root, Term.var("c_pipeline")
        case _:
            return Term.var("c_src"), Term.var("c_dst")


def start_of(chunk: ChunkProgram, collective: str) -> RoundState:
    """The state before the first transfer.

    Raises ProofStops for a collective that is not covered.
    """

    def alike(one: Place, other: Place) -> Formula:
        return eq(one[1], other[1]) if one[0] == other[0] == DATA else FALSE

    if collective == "allreduce":
        return RoundState(lambda place: TRUE if place[0] == DATA else FALSE, lambda place, y: eq(place[1], y), alike)
    if collective == "allgather":
        owner = owner_of(chunk)
        return RoundState(
            lambda place: eq(place[1], owner) if place[0] == DATA else FALSE, lambda place, y: eq(y, owner), alike
        )
    if collective in EXCHANGES:
        owner, _ = ends_of(chunk, collective)
        return RoundState(
            lambda place: eq(place[1], owner) if place[0] == DATA else FALSE, lambda place, y: eq(y, owner), alike
        )
    raise ProofStops(f"{collective} in rounds is not covered")


def loops_of(
    nodes: Sequence[ChunkNode], values: Mapping[str, Term], sequential: frozenset[str]
) -> Iterator[tuple[Turns, dict[str, Term]]]:
    """The loops that are no steps and need an invariant, each with the values of the variables around it."""
    for node in nodes:
        match node:
            case Turns():
                if node.var in sequential or WholeStep.of(node, values) is None:
                    yield node, dict(values)
                    yield from loops_of(node.body, values, sequential)
            case At(var, only, _, _, body):
                yield from loops_of(body, {**values, var: only.put(values)}, sequential)
            case When(_, body):
                yield from loops_of(body, values, sequential)


def uses_rounds(reading: Reading) -> bool:
    """True for a symbolic program with scratch space, of an exchange, of groups, or with distances that double or
    halve."""
    return (
        reading.case.members is not None
        or any(isinstance(node, Move) and node.op == SPREAD for node in reading.nodes())
        or reading.has_scratch
        or reading.has_cells
        or any(isinstance(atom, Pow) for atom in reading.atoms())
    )
