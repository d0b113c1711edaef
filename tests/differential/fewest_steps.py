"""How few steps an AllReduce can have if ports serve whole chunks: the second assumption of the fluid bound.

Ports serve whole chunks in lock-step: in a step, rank v sends at most `out[v]` chunks and receives at most
`in_[v]`, all read before any arrives (SCCL, PPoPP 2021). Two models of what a rank remembers:

    any memory   a transfer carries all that its sender ever learned of the chunk, doubled or not: whatever ranks keep
                 in whatever buffers, what cannot be done here cannot be done at all
    in place     a rank holds one value a chunk, contributions exactly once: what schedules without private scratch do

What a solver finds is replayed here before it is returned (`SolverError` if it does not hold); what it refutes is a
`Claim`. Enumeration and counting give `Checked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise, permutations, product
from math import ceil
from typing import Literal

from optcc.collective import Collective
from optcc.dsl import Program
from optcc.errors import InputError, SolverError
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.topology import Nic, Server, Topology
from optcc.verify.smt import DEFAULT_LIMIT, Checked, Claim, Limit, Query, Sat, Term, Unknown
from tests.differential.fewest_transfers import CHUNKS_MAX, STATES_MAX, Op, check_ranks, prove_schedule

# Steps ----------------------------------------------------------------------------------------------------------------

Memory = Literal["any memory", "in place"]


@dataclass(frozen=True, slots=True)
class Instance:
    """Rank v sends at most `out[v]` chunks a step and receives at most `in_[v]`; the message is `chunks` chunks.

    >>> Instance.one_straggler(3, chunks=2, healthy=2, slow=1)
    Instance(out=(2, 2, 1), in_=(2, 2, 1), chunks=2)

    Raises InputError for ports or chunks that cannot be.
    """

    out: tuple[int, ...]
    in_: tuple[int, ...]
    chunks: int

    def __post_init__(self) -> None:
        check_ranks(len(self.out))
        if len(self.out) != len(self.in_):
            raise InputError(f"ports {self.out} out, {self.in_} in: must be as many each way")
        if min(*self.out, *self.in_) < 1:
            raise InputError(f"ports {self.out} out, {self.in_} in: must carry at least one chunk a step")
        if not 1 <= self.chunks <= CHUNKS_MAX:
            raise InputError(f"{self.chunks} chunks: must be from 1 to {CHUNKS_MAX}")

    @classmethod
    def one_straggler(cls, p: int, chunks: int, healthy: int, slow: int) -> Instance:
        """p - 1 ranks with `healthy` chunks a step each way, and a last one with `slow`."""
        ports = (healthy,) * (p - 1) + (slow,)
        return cls(ports, ports, chunks)

    @property
    def p(self) -> int:
        """Ranks."""
        return len(self.out)

    @property
    def topology(self) -> Topology:
        """The same ports in bytes/s, if a chunk is a byte and a step a second."""
        return Topology(
            tuple(
                Server(f"h{v}", 1, (Nic(0, Fraction(out), Fraction(in_)),))
                for v, (out, in_) in enumerate(zip(self.out, self.in_, strict=True))
            )
        )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every (src, dst)."""
        return list(permutations(range(self.p), 2))

    @property
    def bound(self) -> int:
        """T* in whole steps: the ceiling of the largest demand over capacity."""
        c, all_chunks = Fraction(self.chunks), Fraction(2 * (self.p - 1) * self.chunks)
        ports = [c / each for each in (*self.out, *self.in_)]
        return max(ceil(each) for each in (*ports, all_chunks / sum(self.out), all_chunks / sum(self.in_)))

    def __str__(self) -> str:
        ports = f"ports {self.out}" if self.out == self.in_ else f"ports {self.out} out, {self.in_} in"
        return f"AllReduce of {self.chunks} chunks over {self.p} ranks, {ports}"


@dataclass(frozen=True, slots=True)
class Send:
    """One chunk in one step; in the model of any memory `op` is always reduce."""

    step: int
    src: int
    dst: int
    chunk: int
    op: Op

    def __str__(self) -> str:
        return f"step {self.step}: {self.src}->{self.dst} c{self.chunk} {self.op}"


def sends_complete(instance: Instance, sends: Iterable[Send], steps: int, memory: Memory) -> bool:
    """True if these sends respect the ports and the model of memory, and leave every rank with every chunk complete."""
    held = [[1 << v] * instance.chunks for v in range(instance.p)]
    by_step: list[list[Send]] = [[] for _ in range(steps)]
    for each in sends:
        by_step[each.step].append(each)
    for now in by_step:
        for v in range(instance.p):
            if sum(each.src == v for each in now) > instance.out[v]:
                return False
            if sum(each.dst == v for each in now) > instance.in_[v]:
                return False
        carried = [held[each.src][each.chunk] for each in now]  # all read before any arrives
        for each in now:
            if each.op == "copy":
                if sum((other.dst, other.chunk) == (each.dst, each.chunk) for other in now) > 1:
                    return False  # replaced and added to at once
                held[each.dst][each.chunk] = 0
        for each, value in zip(now, carried, strict=True):
            if memory == "in place" and held[each.dst][each.chunk] & value:
                return False
            held[each.dst][each.chunk] |= value
    return all(value == (1 << instance.p) - 1 for row in held for value in row)


def steps_query(
    instance: Instance, steps: int, memory: Memory, *, agreement: bool = False, symmetry: bool = True
) -> Query:
    """Is there an AllReduce of `instance` in `steps` steps?

    Variables: `reduces s u v c`, `copies s u v c`: in step s, u sends chunk c to v, who adds it or replaces his own by
    it; `holds s v c w`: before step s, v's value of chunk c has w's contribution. With any memory nothing is replaced.

    `agreement` (in place) asks for bitwise equal results as well: a rank reduces at most one message of a chunk in a
    step, and no two ranks put the same set of contributions of a chunk together from different parts.

    Raises InputError for a number of steps that cannot be.
    """
    if steps < 0:
        raise InputError(f"{steps} steps: must not be negative")
    what = f"{instance}, {memory}{', bitwise agreement' if agreement else ''}"
    query = Query(f"{what}: possible in {steps} steps", f"{what}: impossible in {steps} steps")
    _chunks_start_with_their_own(query, instance)
    for s in range(steps):
        _ports_carry_whole_chunks(query, instance, s, memory)
        for v, c in product(range(instance.p), range(instance.chunks)):
            _a_chunk_is_replaced_or_added_to(query, instance, s, v, c, memory)
            _a_chunk_holds_what_came_and_what_stayed(query, instance, s, v, c, memory)
            if memory == "in place":
                _nothing_comes_in_twice(query, instance, s, v, c)
            if agreement:
                _one_message_of_a_chunk_at_a_time(query, instance, s, v, c)
    if agreement:
        for c in range(instance.chunks):
            _one_tree_for_each_set(query, instance, steps, c)
    _chunks_end_with_everything(query, instance, steps)
    if symmetry and steps:
        _equal_ranks_are_sorted(query, instance, memory)
        _chunks_are_sorted(query, instance, memory)
    return query


def _sent(query: Query, memory: Memory, s: int, u: int, v: int, c: int) -> Term:
    """u sends chunk c to v in step s, either way."""
    ways = [query.flag("reduces", s, u, v, c)]
    if memory == "in place":
        ways.append(query.flag("copies", s, u, v, c))
    return query.any_of(ways)


def _peers(instance: Instance, v: int) -> list[int]:
    return [u for u in range(instance.p) if u != v]


def _chunks_start_with_their_own(query: Query, instance: Instance) -> None:
    for v, c, w in product(range(instance.p), range(instance.chunks), range(instance.p)):
        holds = query.flag("holds", 0, v, c, w)
        query.require("start", holds if v == w else query.no(holds))


def _chunks_end_with_everything(query: Query, instance: Instance, steps: int) -> None:
    for v, c, w in product(range(instance.p), range(instance.chunks), range(instance.p)):
        query.require("end", query.flag("holds", steps, v, c, w))


def _ports_carry_whole_chunks(query: Query, instance: Instance, s: int, memory: Memory) -> None:
    chunks = range(instance.chunks)
    for v in range(instance.p):
        others = list(product(_peers(instance, v), chunks))
        query.require(
            "out ports", query.at_most(instance.out[v], (_sent(query, memory, s, v, u, c) for u, c in others))
        )
        query.require("in ports", query.at_most(instance.in_[v], (_sent(query, memory, s, u, v, c) for u, c in others)))


def _replaced(query: Query, instance: Instance, s: int, v: int, c: int, memory: Memory) -> Term:
    if memory == "any memory":
        return query.false
    return query.any_of(query.flag("copies", s, u, v, c) for u in _peers(instance, v))


def _a_chunk_is_replaced_or_added_to(query: Query, instance: Instance, s: int, v: int, c: int, memory: Memory) -> None:
    if memory == "any memory":
        return
    peers = _peers(instance, v)
    query.require("one copy", query.at_most(1, (query.flag("copies", s, u, v, c) for u in peers)))
    replaced = _replaced(query, instance, s, v, c, memory)
    added = query.any_of(query.flag("reduces", s, u, v, c) for u in peers)
    query.require("copy or reduce", query.no(query.all_of((replaced, added))))


def _a_chunk_holds_what_came_and_what_stayed(
    query: Query, instance: Instance, s: int, v: int, c: int, memory: Memory
) -> None:
    stays = query.no(_replaced(query, instance, s, v, c, memory))
    for w in range(instance.p):
        came = [
            query.all_of((_sent(query, memory, s, u, v, c), query.flag("holds", s, u, c, w)))
            for u in _peers(instance, v)
        ]
        stayed = query.all_of((stays, query.flag("holds", s, v, c, w)))
        query.require("holds", query.flag("holds", s + 1, v, c, w) == query.any_of((stayed, *came)))


def _nothing_comes_in_twice(query: Query, instance: Instance, s: int, v: int, c: int) -> None:
    """Of v's own value and all that is added to it, at most one has w's contribution.

    Nothing is lost by forbidding it: a doubled value is never part of a right result, so the sends that make it or pass
    it on can be left out, and what it would overwrite may stay.
    """
    for w in range(instance.p):
        own = query.flag("holds", s, v, c, w)
        added = [
            query.all_of((query.flag("reduces", s, u, v, c), query.flag("holds", s, u, c, w)))
            for u in _peers(instance, v)
        ]
        query.require("exactly once", query.at_most(1, (own, *added)))


def _one_message_of_a_chunk_at_a_time(query: Query, instance: Instance, s: int, v: int, c: int) -> None:
    query.require(
        "one message of a chunk", query.at_most(1, (query.flag("reduces", s, u, v, c) for u in _peers(instance, v)))
    )


def _one_tree_for_each_set(query: Query, instance: Instance, steps: int, c: int) -> None:
    """Of chunk c, a set of contributions comes from the same two parts wherever it is put together.

    By induction over the size of the set, all values of it then have one and the same tree (a sum of two commutes).
    A set of two has only one pair of parts.
    """
    ranks = range(instance.p)
    for size in range(3, instance.p + 1):
        for members in combinations(ranks, size):
            splits = []
            for taken in range(size - 1):
                for others in combinations(members[1:], taken):
                    part = {members[0], *others}
                    rest = set(members) - part
                    split = query.flag("split", c, sum(1 << w for w in members), sum(1 << w for w in part))
                    splits.append(split)
                    for s, (u, v), (kept, added) in product(range(steps), instance.pairs, ((part, rest), (rest, part))):
                        met = [query.flag("reduces", s, u, v, c)]
                        met += [
                            query.flag("holds", s, v, c, w) == (query.true if w in kept else query.false) for w in ranks
                        ]
                        met += [
                            query.flag("holds", s, u, c, w) == (query.true if w in added else query.false)
                            for w in ranks
                        ]
                        query.require("agreement", query.implies(query.all_of(met), split))
            query.require("agreement", query.at_most(1, splits))


def _equal_ranks_are_sorted(query: Query, instance: Instance, memory: Memory) -> None:
    """Of two ranks with equal ports the first does not send more chunks in the first step.

    Ranks with equal ports can be renamed into that order, whatever the chunks are called: the number does not change
    when chunks are renamed, so the next family can be required as well.
    """
    for u, v in combinations(range(instance.p), 2):
        if (instance.out[u], instance.in_[u]) == (instance.out[v], instance.in_[v]):
            chunks = range(instance.chunks)
            fewer = [_sent(query, memory, 0, u, x, c) for x, c in product(_peers(instance, u), chunks)]
            more = [_sent(query, memory, 0, v, x, c) for x, c in product(_peers(instance, v), chunks)]
            # fewer <= more, as a count: those of `fewer` and those missing in `more` are together at most all of `more`
            query.require("symmetry", query.at_most(len(more), (*fewer, *(query.no(each) for each in more))))


def _chunks_are_sorted(query: Query, instance: Instance, memory: Memory) -> None:
    """What the first step does with chunk c, read as a binary number, does not fall with c: chunks can be renamed."""
    rows = [[_sent(query, memory, 0, u, v, c) for u, v in instance.pairs] for c in range(instance.chunks)]
    for row, following in pairwise(rows):
        equal_so_far = query.true
        for first, second in zip(row, following, strict=True):
            query.require("symmetry", query.implies(query.all_of((equal_so_far, first)), second))
            equal_so_far = query.all_of((equal_so_far, first == second))


def ask_steps(
    instance: Instance,
    steps: int,
    memory: Memory,
    limit: Limit = DEFAULT_LIMIT,
    *,
    agreement: bool = False,
    symmetry: bool = True,
) -> tuple[Send, ...] | Claim | Unknown:
    """The sends of an AllReduce of `instance` in `steps` steps; or the claim that there is none.

    Raises SolverError if the solver's sends do not do what it says.
    """
    query = steps_query(instance, steps, memory, agreement=agreement, symmetry=symmetry)
    answer = query.ask(limit, logic="QF_FD")
    if not isinstance(answer, Sat):
        return answer
    sends = _decode_sends(answer, instance, steps, memory)
    if not sends_complete(instance, sends, steps, memory):
        raise SolverError(f"z3: {answer.statement}: its {len(sends)} sends do not do it")
    return sends


def _decode_sends(answer: Sat, instance: Instance, steps: int, memory: Memory) -> tuple[Send, ...]:
    ways: tuple[tuple[str, Op], ...] = (("reduces", "reduce"), ("copies", "copy"))
    return tuple(
        Send(s, u, v, c, op)
        for s, (u, v), c in product(range(steps), instance.pairs, range(instance.chunks))
        for verb, op in ways[: 1 if memory == "any memory" else 2]
        if answer.values[verb, s, u, v, c]
    )


def steps_schedule(instance: Instance, sends: Sequence[Send]) -> Schedule:
    """In-place sends as a schedule of the language.

    All sends of a step read before any arrives. Where a rank receives a chunk that it sends in the same step, the
    message therefore lands in scratch first and is added, or copied, at the end of the step.
    """
    program = Program("least_steps", Collective("allreduce", instance.p))
    scratch = instance.p - 1
    for segment in program.pipeline(sections=instance.chunks, scratch=scratch):
        for s in range(max((each.step for each in sends), default=-1) + 1):
            now = [each for each in sends if each.step == s]
            sending = {(each.src, each.chunk) for each in now}
            landed: dict[tuple[int, int], list[Send]] = {}
            with program.stage(f"step {s}"):
                for each in now:
                    if (each.dst, each.chunk) in sending:
                        waiting = landed.setdefault((each.dst, each.chunk), [])
                        slot = segment.scratch(each.chunk, len(waiting))
                        segment[each.chunk].copy(src=each.src, dst=each.dst, into=slot)
                        waiting.append(each)
                    elif each.op == "reduce":
                        segment[each.chunk].reduce(src=each.src, dst=each.dst)
                    else:
                        segment[each.chunk].copy(src=each.src, dst=each.dst)
                for (rank, chunk), waiting in landed.items():
                    for place, each in enumerate(waiting):
                        slot = segment.scratch(chunk, place)
                        merge = slot.reduce if each.op == "reduce" else slot.copy
                        merge(src=rank, dst=rank, into=segment[chunk])
    return program.finish()


def count_refutes(instance: Instance, steps: int) -> Checked | None:
    """Why `steps` steps are too few, by counting chunks at the ports; None if counting does not tell.

    demand     every rank's contribution to every chunk leaves it, and every chunk's result (or the parts of it) reaches
               every rank; each chunk crosses the network at least 2(p - 1) times (the theorem above)
    departure  a rank's contribution to some chunks leaves it for the first time in the last step: it must then go to
               all p - 1 others in that step, as nobody passes it on
    arrival    the same backwards: of some chunks a rank receives something in the first step only, from everybody
    """
    p, c = instance.p, instance.chunks
    statement = f"{instance}: impossible in {steps} steps"
    for direction, ports in (("sends", instance.out), ("receives", instance.in_)):
        for v, port in enumerate(ports):
            if c > steps * port:
                return Checked(statement, f"rank {v} {direction} {c} chunks, its port carries {steps} x {port}")
        if 2 * (p - 1) * c > steps * sum(ports):
            how = f"{c} chunks cross {2 * (p - 1)} times each, all ports carry {steps} x {sum(ports)}"
            return Checked(statement, how)
    for direction, ports, first_or_last in (
        ("sends", instance.out, "first in the last step"),
        ("receives", instance.in_, "in the first step only"),
    ):
        for v, port in enumerate(ports):
            late = c - (steps - 1) * port
            if late > 0 and late * (p - 1) > port:
                how = f"rank {v} {direction} {late} chunks {first_or_last}, {p - 1} times each; its port carries {port}"
                return Checked(statement, how)
    return None


Known = tuple[tuple[int, ...], ...]
"""For each rank, for each chunk, the set of contributions that it knows."""


def enumerate_steps(instance: Instance, steps: int, *, states_max: int = STATES_MAX) -> bool | Checked | Unknown:
    """The question with any memory answered by going through all that can happen; no solver. True: it is possible.

    A send that teaches its receiver nothing is left out, and a step in which another useful send would have fitted:
    more knowledge never hurts. States that differ by renaming chunks, or ranks with equal ports, are one. A state is
    dropped if the steps to come cannot bring each rank the chunks that it lacks, or carry away what only it knows.
    """
    statement = f"{instance}, any memory: impossible in {steps} steps"
    everyone = (1 << instance.p) - 1
    first: Known = tuple((1 << v,) * instance.chunks for v in range(instance.p))
    level: set[Known] = {first}
    looked_at = distinct = 1
    for done in range(1, steps + 1):
        after: set[Known] = set()
        for known in level:
            for state in _maximal_steps(instance, known):
                looked_at += 1
                if looked_at > states_max:
                    reached = f"impossible in {done - 1} steps"
                    return Unknown(statement, f"enumeration stopped after {states_max} states", reached)
                if state is None or not _can_finish(instance, state, steps - done):
                    continue
                if all(value == everyone for row in state for value in row):
                    return True
                after.add(_least_name(instance, state))
        level = after
        distinct += len(level)
    return Checked(statement, f"enumeration of {looked_at} states, {distinct} of them kept")


def _maximal_steps(instance: Instance, known: Known) -> Iterator[Known | None]:
    """What is known after each choice of useful sends to which no further one could be added; None for another one."""
    useful = [(u, v, c) for (u, v), c in product(instance.pairs, range(instance.chunks)) if known[u][c] & ~known[v][c]]
    out, in_ = list(instance.out), list(instance.in_)
    chosen: list[tuple[int, int, int]] = []
    left_out: list[tuple[int, int, int]] = []

    def choose(place: int) -> Iterator[Known | None]:
        if place == len(useful):
            if any(out[u] and in_[v] for u, v, _ in left_out):
                yield None
                return
            after = [list(row) for row in known]
            for u, v, c in chosen:
                after[v][c] |= known[u][c]
            yield tuple(tuple(row) for row in after)
            return
        u, v, c = useful[place]
        if out[u] and in_[v]:
            out[u] -= 1
            in_[v] -= 1
            chosen.append(useful[place])
            yield from choose(place + 1)
            chosen.pop()
            out[u] += 1
            in_[v] += 1
        behind = useful[place + 1 :]
        if out[u] > sum(each[0] == u for each in behind) and in_[v] > sum(each[1] == v for each in behind):
            return  # left out, it would fit to the end: no later choice can fill either of its ports
        left_out.append(useful[place])
        yield from choose(place + 1)
        left_out.pop()

    return choose(0)


def _can_finish(instance: Instance, known: Known, steps: int) -> bool:
    everyone = (1 << instance.p) - 1
    for v, row in enumerate(known):
        if sum(value != everyone for value in row) > steps * instance.in_[v]:
            return False
        alone = sum(all(not known[u][c] >> v & 1 for u in _peers(instance, v)) for c in range(instance.chunks))
        if alone > steps * instance.out[v]:
            return False
    return True


def _least_name(instance: Instance, known: Known) -> Known:
    """The least state that ranks with equal ports and chunks can be renamed to."""
    ports = list(zip(instance.out, instance.in_, strict=True))
    best: Known | None = None
    for names in permutations(range(instance.p)):  # rank r becomes names[r]
        if any(ports[r] != ports[names[r]] for r in range(instance.p)):
            continue
        place = [names.index(r) for r in range(instance.p)]
        columns = sorted(
            tuple(sum(1 << names[w] for w in range(instance.p) if known[r][c] >> w & 1) for r in place)
            for c in range(instance.chunks)
        )
        state = tuple(columns)
        best = state if best is None or state < best else best
    assert best is not None
    return tuple(zip(*best, strict=True))


@dataclass(frozen=True, slots=True)
class Refuted:
    """`steps` steps are too few: what a solver says, and what was checked without it, if anything."""

    steps: int
    solver: Claim
    checked: Checked | None


@dataclass(frozen=True, slots=True)
class Least:
    """The least number of steps in one model of memory.

    `steps` is None if a question stayed open; `open` says which. `refuted` are the numbers below that were tried.
    """

    memory: Memory
    steps: int | None
    sends: tuple[Send, ...]
    refuted: tuple[Refuted, ...]
    open: Unknown | None = None


@dataclass(frozen=True, slots=True)
class LeastSteps:
    """What was found for an instance: `bound` steps are needed by T*, `any_memory` by every schedule, `in_place` by one
    that has been found; its plan has been proved right and its ranks agree bit by bit.

    If `in_place_agrees` is False, fewer steps suffice in place for ranks whose results differ in rounding.
    """

    instance: Instance
    bound: int
    any_memory: Least
    in_place: Least
    plan: Plan | None
    in_place_agrees: bool


def least_steps(instance: Instance, limit: Limit = DEFAULT_LIMIT) -> LeastSteps:
    """The least number of steps of an AllReduce, with any memory and in place; `limit` is for each question.

    Starts below the bound, so that the bound is put to the test: it must never be beaten.

    >>> found = least_steps(Instance.one_straggler(3, chunks=2, healthy=2, slow=1))
    >>> found.bound, found.any_memory.steps, found.in_place.steps
    (2, 3, 3)
    """
    any_memory = _least(instance, "any memory", max(instance.bound - 1, 0), limit)
    in_place = _least(instance, "in place", max((any_memory.steps or instance.bound) - 1, 0), limit)
    plan, agrees = None, True
    if in_place.steps is not None:
        bitwise = _least(instance, "in place", in_place.steps, limit, agreement=True)
        agrees = bitwise.steps == in_place.steps
        in_place = Least("in place", bitwise.steps, bitwise.sends, (*in_place.refuted, *bitwise.refuted), bitwise.open)
        if bitwise.steps is not None:
            plan = prove_schedule(steps_schedule(instance, bitwise.sends), instance.topology)
    return LeastSteps(instance, instance.bound, any_memory, in_place, plan, agrees)


def _least(instance: Instance, memory: Memory, start: int, limit: Limit, *, agreement: bool = False) -> Least:
    refuted: list[Refuted] = []
    steps = start
    while True:
        answer = ask_steps(instance, steps, memory, limit, agreement=agreement)
        checked = count_refutes(instance, steps)
        if isinstance(answer, Unknown):
            least = f"at least {refuted[-1].steps + 1} steps" if refuted else ""
            return Least(memory, None, (), tuple(refuted), Unknown(answer.statement, answer.reason, least))
        if not isinstance(answer, Claim):
            assert checked is None, f"{checked}: but here it is: {answer}"
            return Least(memory, steps, answer, tuple(refuted))
        refuted.append(Refuted(steps, answer, checked))
        steps += 1
