"""Proves a schedule for every number of ranks and of segments: `prove_all_ranks`.

What is proved. For every number of ranks p, every number of segments k and every chunk, of the author's transfers in
program order: each names two different, existing ranks and an existing section; at the end every rank has the result of
the collective, with every contribution exactly once and from its own place (`result`: a chunk is the same bytes on all
ranks, and this proof does not cover scratch space); and for allreduce the values of all ranks are copies of one, so
there is one tree of reductions (`agreement`).

How. The symbolic interpreter turns the function's source into a symbolic program, and
`optcc.verify.all_ranks.induction` proves it by induction over its loops, with Z3. Both are cross-checked: the symbolic
program against the transfers that the function itself writes, for many p and k, and the proof against the plan verifier
for many p. The plan verifier runs first, so an error at small p is refuted with the smallest one. A contradiction
between the two is an internal error (assertion).

Why the other three properties follow. Number the author's transfers in program order, and compile a plan `as written`.
A lane holds the sends, or the receives, of one rank in that order, so the i-th send and the i-th receive of a channel
belong to one transfer: *matching*. All predecessors of an instruction belong to its own transfer (a receive waits for
its send) or to earlier ones: those in its lane; those of `optcc.passes.depend`, which refers to earlier transfers only;
and for its slot, with any number of slots, the previous receive in it, which is earlier in the same lane. So the
wait-for graph is acyclic: *no deadlock* under any interleaving. And `depend` orders any two accesses to one rank's
bytes of which one writes, the earlier before the later: *no races*, and every interleaving has the result of program
order. This is an argument about the passes and no proof of their code: each compiled plan is still judged by
`optcc.verify.plan`, which is necessary where a timetable changes the order of the ports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.compiler import compile_schedule
from optcc.domain import ANY_NUMBER, Domain
from optcc.dsl import Definition
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN, ScheduleError, SolverError
from optcc.schedule import COPY, DATA, REDUCE, Schedule
from optcc.show import Card, Shown
from optcc.verdict import PROVED, REFUTED, UNKNOWN, Counterexample
from optcc.verify.all_ranks.cases import Covered, Instance, cases_of, instances_of
from optcc.verify.all_ranks.chunk_program import ProofStops, chunk_of
from optcc.verify.all_ranks.induction import InductionLemma, ask, check_along, prove_chunk, prove_moves, prove_tree, why
from optcc.verify.all_ranks.round_invariants import prove_rounds
from optcc.verify.all_ranks.rounds import EXCHANGES, uses_rounds
from optcc.verify.all_ranks.symbolic import OWNER, SPREAD, Along, Move, OutsideSubset, Reading, transfers_of
from optcc.verify.all_ranks.symbolic_interpreter import read
from optcc.verify.all_ranks.symbolic_terms import FALSE, Term, holds
from optcc.verify.plan import verify_plan
from optcc.verify.smt import Checked, Claim, Sat

P_FIRST = 16
"""Numbers of ranks that the plan verifier checks before the proof."""
SEGMENTS_FIRST = 3
"""Segments of these plans; plans for more ranks have one."""
SEGMENTS_COMPARED = 3
TRANSFERS_MAX = 20_000
"""Limit on the transfers of a schedule that is verified or compared concretely."""


@dataclass(frozen=True, slots=True)
class AllRanks(Shown):
    """The verdict on a schedule for every number of ranks of its domain.

    `lemmas` are the steps of the proof; `cases` the ranks and parameters that it covers; `checked` the range of
    concretely verified plans; `assumptions` what is assumed without proof; `reached` why an unknown verdict is so, and
    how far the proof got.
    """

    name: str
    verdict: str
    lemmas: tuple[InductionLemma, ...]
    cases: tuple[str, ...]
    checked: str
    seconds: float
    assumptions: tuple[str, ...] = ()
    counterexample: Counterexample | None = None
    smallest_p: int | None = None
    reached: str = ""
    domain: str = "every number of ranks"

    def __post_init__(self) -> None:
        refuted = self.verdict == REFUTED
        if refuted != (self.counterexample is not None) or refuted != (self.smallest_p is not None):
            raise AssertionError(f"{self.verdict}: {self.counterexample}")
        if self.verdict == PROVED and not (self.lemmas and all(lemma.proved for lemma in self.lemmas)):
            raise AssertionError("proved by lemmas that are not")
        if (self.verdict == UNKNOWN) != bool(self.reached):
            raise AssertionError(f"{self.verdict}: {self.reached}")

    @property
    def exit_code(self) -> int:
        """The exit code of a command for this verdict."""
        return {PROVED: EXIT_DONE, REFUTED: EXIT_REFUTED, UNKNOWN: EXIT_UNKNOWN}[self.verdict]

    def as_smt_lib(self) -> dict[str, str]:
        """Each lemma that Z3 claims, in SMT-LIB 2.6, by the name of a file: any solver must find it unsat."""
        claimed = [lemma for lemma in self.lemmas if isinstance(lemma.answer, Claim)]
        return {
            f"{number:03}.smt2": f"; {self.name}, {lemma.name}\n; {lemma.statement}\n{lemma.smt_lib}"
            for number, lemma in enumerate(claimed, 1)
        }

    def card(self) -> Card:
        head = f"{self.name}, for {self.domain}: {self.verdict}"
        rows = [("covers", "", "", "", case) for case in self.cases]
        rows += [("one by one", "proved", "checked", "", self.checked)] if self.checked else []
        rows += [("assumes", "", "", "", each) for each in self.assumptions]
        rows += [("reached", "", "", "", self.reached)] if self.reached else []
        if self.counterexample is not None:
            rows.append(("smallest", "refuted", "checked", "", f"p = {self.smallest_p}: {self.counterexample.summary}"))
        rows += [
            (lemma.name, lemma.verdict, lemma.by, f"{lemma.seconds:.2f}", lemma.statement) for lemma in self.lemmas
        ]
        return Card(head, ("lemma", "verdict", "by", "s", "statement"), tuple(rows))

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        wrong = self.counterexample
        return {
            "name": self.name,
            "domain": self.domain,
            "verdict": self.verdict,
            "lemmas": [
                {
                    "name": lemma.name,
                    "statement": lemma.statement,
                    "verdict": lemma.verdict,
                    "by": lemma.by,
                    "seconds": lemma.seconds,
                }
                for lemma in self.lemmas
            ],
            "cases": list(self.cases),
            "checked": self.checked,
            "seconds": self.seconds,
            "assumptions": list(self.assumptions),
            "smallest_p": self.smallest_p,
            "counterexample": None
            if wrong is None
            else {
                "property": wrong.property,
                "summary": wrong.summary,
                "rank": wrong.rank,
                "first_byte": wrong.first_byte,
                "last_byte": wrong.last_byte,
                "trace": list(wrong.trace),
            },
            "reached": self.reached,
        }


class _Refuted(Exception):
    def __init__(self, p: int, counterexample: Counterexample) -> None:
        self.p, self.counterexample = p, counterexample


def prove_all_ranks(definition: Definition, *, p_checked: int = 64, budget_s: float = 50) -> AllRanks:
    """The verdict on `definition` for every number of ranks from 2 up, and of segments.

    The plan verifier judges plans for p = 2..16, then the proof for all p is tried, then the plan verifier continues up
    to `p_checked`, all within `budget_s` seconds.

    >>> from optcc.schedules.ring import ring
    >>> prove_all_ranks(ring, p_checked=6).verdict
    'proved'

    Raises EnvironmentMissing if z3 is not installed.
    """
    started = time.monotonic()
    stop_at = started + budget_s
    lemmas: list[InductionLemma] = []
    cases: list[str] = []
    assumptions: list[str] = []
    reached = ""
    all_proved = False

    def ended(verdict: str, checked: str, **more: Any) -> AllRanks:
        seconds = time.monotonic() - started
        return AllRanks(
            definition.name,
            verdict,
            tuple(lemmas),
            tuple(cases),
            checked,
            seconds,
            tuple(assumptions),
            domain=str(definition.domain),
            **more,
        )

    try:
        first = min(P_FIRST, p_checked)
        checked, all_first = _check_each(definition, range(2, first + 1), SEGMENTS_FIRST, started + 0.4 * budget_s)
        try:
            for covered in cases_of(definition):
                proved, assumed = _prove_case(definition, covered, p_checked, stop_at)
                lemmas += proved
                assumptions += [each for each in assumed if each not in assumptions]
                cases.append(covered.case.name)
            all_proved = True
        except OutsideSubset as outside:
            reached = f"line {outside.line} is outside of what is read: {outside.construct}"
        except ProofStops as stops:
            reached = f"no proof: {stops}"
        if all_first:
            checked += _check_each(definition, range(first + 1, p_checked + 1), 1, stop_at)[0]
    except _Refuted as refuted:
        contradiction = f"{definition.name}: proved for every number of ranks, refuted for {refuted.p}"
        if all_proved:
            raise AssertionError(f"{contradiction}: {refuted.counterexample}") from refuted
        lemmas.clear()
        cases.clear()
        assumptions.clear()
        return ended(REFUTED, "", counterexample=refuted.counterexample, smallest_p=refuted.p)
    words = f"plans compiled as written, p = {_ranges(checked, definition.domain)}" if checked else ""
    if not reached and not checked:
        reached = "no concrete number of ranks could be checked in time"
    if reached:
        return ended(UNKNOWN, words, reached=_only(definition) + reached + (f"; {words} are proved" if words else ""))
    return ended(PROVED, words)


def _only(definition: Definition) -> str:
    """What of a schedule is made for one topology, if anything is, as the beginning of a sentence."""
    only = definition.one_topology
    return f"every plan is judged on its own, for its topology: {only}; " if only else ""


def _ranges(ps: Sequence[int], domain: Domain) -> str:
    """Numbers of ranks in words: 2..16, 24, 32; for a domain from the first to the last."""
    if domain != ANY_NUMBER:
        return f"2..{ps[-1]}, of {domain}"
    runs: list[list[int]] = []
    for p in ps:
        if runs and p == runs[-1][-1] + 1:
            runs[-1].append(p)
        else:
            runs.append([p])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _check_each(
    definition: Definition, ps: Sequence[int], segments: int, stop_at: float
) -> tuple[tuple[int, ...], bool]:
    """The numbers of ranks for which there are plans, all of them right, and whether there was time for all.

    Raises _Refuted for the smallest p with a wrong plan.
    """
    right: list[int] = []
    for p in ps:
        if time.monotonic() > stop_at:
            return tuple(right), False
        instances = instances_of(definition, p)
        for instance in instances:
            if time.monotonic() > stop_at or not _check(definition, instance, segments):
                return tuple(right), False
        right += [p] if instances else []
    return tuple(right), True


def _build(definition: Definition, instance: Instance, segments: int) -> Schedule:
    """The schedule; raises _Refuted if the author's function raises an error."""
    try:
        return definition(instance.n_ranks, segments, root=instance.root, **instance.parameters)
    except ScheduleError as error:
        summary = f"no schedule for {instance}: {error}"
        raise _Refuted(instance.n_ranks, Counterexample("result", summary)) from None


def _check(definition: Definition, instance: Instance, segments: int) -> bool:
    """True if it was proved, False if it has too many transfers; raises _Refuted if it is wrong."""
    schedule = _build(definition, instance, segments)
    if len(schedule) > TRANSFERS_MAX:
        return False
    chunks = sum(shape.sections for shape in schedule.segments)
    verdict = verify_plan(compile_schedule(schedule, size_bytes=8 * max(1, chunks)))
    if verdict.counterexample is not None:
        raise _Refuted(instance.n_ranks, verdict.counterexample)
    return verdict.verdict == PROVED


def _prove_case(
    definition: Definition, covered: Covered, p_checked: int, stop_at: float
) -> tuple[list[InductionLemma], list[str]]:
    """The lemmas of a case, and what they assume.

    Raises OutsideSubset or ProofStops.
    """
    reading = read(definition, covered.case)
    _check_shares(reading)
    label = f"{covered.case.name}: "
    lemmas = [_consistent(reading, label), _compared(definition, covered, reading, p_checked, label)]
    for each in reading.lemmas:
        lemmas.append(ask(label + each.name, each.statement, [*reading.case.facts(), *each.facts], each.goal))
        if not lemmas[-1].proved:
            raise ProofStops(f"lemma {each.name!r} ({each.statement}): {why(lemmas[-1])}")
    assumptions = list(reading.assumed)
    if any(isinstance(node, Along) for node in reading.nodes()):
        words = check_along(reading, definition.collective)
        lemmas.append(InductionLemma(f"{label}trees", words, Checked(words, "read from the source"), 0.0))
        return [*lemmas, *prove_tree()], assumptions
    if definition.collective not in ("allreduce", "reducescatter", "allgather", *EXCHANGES):
        raise ProofStops(f"{definition.collective} by single transfers is not covered")
    if definition.collective in EXCHANGES and not reading.has_cells:
        raise ProofStops(f"{definition.collective} by other pipelines than its cells is not covered")
    if definition.collective == "alltoallv":
        assumptions.append("what it declares is an AllToAll-v, of any sizes (`Collective.all_to_all_v`)")
    if reading.relabelled:
        if definition.collective != "allreduce":
            raise ProofStops(f"{definition.collective} by ranks that are entries of a list")
        words = "every rank is an entry of one list that has each once, and an allreduce asks the same of all ranks"
        lemmas.append(InductionLemma(f"{label}order", words, Checked(words, "read from the source"), 0.0))
    lemmas += prove_moves(reading, label)
    walked = set()
    for walk in reading.walks:
        for family in walk.families:
            walked.add(family)
            for residue, body in enumerate(walk.bodies):
                kind = f"pipeline {family + 1}, " if len(reading.families) > 1 else ""
                kind += f"segments {residue} mod {len(walk.bodies)}, " if len(walk.bodies) > 1 else ""
                chunk = chunk_of(reading, family, body)
                if uses_rounds(reading):
                    lemmas += prove_rounds(chunk, definition.collective, label + kind)
                else:
                    lemmas += prove_chunk(chunk, definition.collective, label + kind, stop_at)[0]
    if walked != set(range(len(reading.families))):
        raise ProofStops("a pipeline that is never walked")
    return lemmas, assumptions


def _check_shares(reading: Reading) -> None:
    """Raises ProofStops if the shares of the pipelines may not add up to the message."""
    total = Fraction(0)
    for family in reading.families:
        if isinstance(family.share, Fraction):
            if family.count.constant is None or not family.share:
                raise ProofStops(f"line {family.line}: shares that are not known to add up to one")
            total += family.share * family.count.constant
        elif family.share == family.count:
            total += 1
        else:
            raise ProofStops(f"line {family.line}: shares that are not known to add up to one")
    if total != 1:
        raise ProofStops(f"shares of the pipelines add up to {total}")


def _consistent(reading: Reading, label: str) -> InductionLemma:
    """The lemma that the assumptions of the case are satisfiable: Z3 finds values, which are substituted."""
    name, facts = f"{label}not empty", reading.case.facts()
    lemma = ask(name, "the case is empty", facts, FALSE)
    if not isinstance(lemma.answer, Sat):
        raise ProofStops(f"{name}: {lemma.answer}")
    sizes = {name: int(lemma.answer.values[name,]) for name in reading.case.variables if (name,) in lemma.answer.values}
    values = reading.case.with_bits(sizes)
    if not all(holds(fact, values) for fact in facts):
        raise SolverError(f"z3: {values}: are no such numbers of ranks")
    example = ", ".join(f"{name} = {value}" for name, value in values.items()) or "2 ranks"
    statement = f"there are such numbers of ranks: {example}"
    return InductionLemma(name, statement, Checked(statement, "the numbers were put in"), lemma.seconds)


def _compared(definition: Definition, covered: Covered, reading: Reading, p_max: int, label: str) -> InductionLemma:
    """The lemma that the symbolic program has the transfers that the function writes, compared for many sizes.

    Raises ProofStops at a difference: the function is read wrongly.
    """
    started = time.perf_counter()
    count = largest = 0
    for p, instance, sizes in _sizes(definition, covered, p_max):
        for segments in range(1, SEGMENTS_COMPARED + 1):
            if reading.case.members is not None:
                count, largest = count + _compare_groups(definition, reading, instance, sizes, segments), p
                continue
            if reading.in_rings:
                count, largest = count + _compare_rings(definition, reading, instance, sizes, segments), p
                continue
            schedule = _build(definition, instance, segments)
            if any(isinstance(node, Along) for node in reading.nodes()):
                _compare_trees(reading, schedule)
            else:
                columns = [schedule.src, schedule.dst, schedule.op, schedule.segment, schedule.section]
                columns += [schedule.src_slot, schedule.dst_slot] if reading.has_scratch else []
                written = np.stack(columns, axis=1)
                try:
                    rows = transfers_of(reading, sizes, segments)
                except AssertionError as error:
                    raise ProofStops(f"read wrongly for {instance}, {segments} segments: {error}") from None
                found = np.array(rows, dtype=np.int64).reshape(-1, len(columns))
                spread = {node.line for node in reading.nodes() if isinstance(node, Move) and node.op == SPREAD}
                if spread:
                    found = found[found[:, 2] != SPREAD]
                    written = written[~np.isin(schedule.line, sorted(spread))]
                if reading.relabelled and found.size and found[:, :2].min() >= 0 and found[:, :2].max() < p:
                    order = instance.parameters.get("order") or _order_of(definition, instance) or range(p)
                    found[:, :2] = np.array(order)[found[:, :2]]
                if reading.unordered:
                    found, written = _sorted(found), _sorted(written)
                if found.shape != written.shape or not (found == written).all():
                    raise ProofStops(f"read wrongly for {instance}, {segments} segments")
            count, largest = count + len(schedule), p
            if len(schedule) * (segments + 1) > TRANSFERS_MAX or p > 2 * P_FIRST:
                break
    if not count:
        raise ProofStops(f"{covered.case.name}: no concrete schedule was found to compare the reading with")
    statement = f"the symbolic program is what the function writes: {count} transfers compared, p up to {largest}"
    how = f"transfer by transfer, for 1 to {SEGMENTS_COMPARED} segments"
    return InductionLemma(f"{label}reading", statement, Checked(statement, how), time.perf_counter() - started)


def _order_of(definition: Definition, instance: Instance) -> tuple[int, ...]:
    """The last order of ranks that the function has checked; empty if none."""
    made = definition.write(instance.n_ranks, root=instance.root, **instance.parameters).orders_made
    return made[-1] if made else ()


def _compare_rings(
    definition: Definition, reading: Reading, instance: Instance, sizes: Mapping[str, int], segments: int
) -> int:
    """The number of transfers compared: for each ring those of its segments, by its order; what goes through another
    rank counts as one.

    Raises ProofStops unless each ring's segments are what was read.
    """
    program = definition.write(instance.n_ranks, segments, root=instance.root, **instance.parameters)
    schedule = program.finish()
    columns = (schedule.src, schedule.dst, schedule.op, schedule.section, schedule.src_slot, schedule.dst_slot)
    written = np.stack(columns, axis=1)
    rows = transfers_of(reading, sizes, segments)
    compared = 0
    for number, order in enumerate(program.orders_made):
        for segment in range(segments):
            found = [(order[src], order[dst], op, section) for src, dst, op, at, section in rows if at == segment]
            chosen = written[schedule.segment == number * segments + segment].tolist()
            compared += len(chosen)
            if found != _direct(chosen):
                raise ProofStops(f"read wrongly for {instance}, {segments} segments, ring {number}")
    if compared != len(schedule):
        raise ProofStops(f"read wrongly for {instance}, {segments} segments: transfers of no ring")
    return compared


def _direct(rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Transfers (src, dst, op, section, src_slot, dst_slot) without scratch space: one that is copied into it and goes
    on at once, as the next of its segment, is one transfer.

    Raises ProofStops if what is in scratch space is used otherwise.
    """
    found: list[tuple[int, ...]] = []
    waiting: Sequence[int] | None = None
    for row in rows:
        src, dst, op, section, src_slot, dst_slot = row
        if waiting is not None:
            if [src, section, src_slot] != [waiting[1], waiting[3], waiting[5]] or dst_slot != DATA:
                raise ProofStops(f"transfer {row}: not what was copied into scratch space before it")
            found.append((waiting[0], dst, op, section))
            waiting = None
        elif src_slot != DATA or (dst_slot != DATA and op != COPY):
            raise ProofStops(f"transfer {row}: scratch space that was not copied into before it")
        elif dst_slot != DATA:
            waiting = row
        else:
            found.append((src, dst, op, section))
    if waiting is not None:
        raise ProofStops(f"transfer {waiting}: into scratch space, and not on")
    return found


def _compare_groups(
    definition: Definition, reading: Reading, instance: Instance, sizes: Mapping[str, int], segments: int
) -> int:
    """The number of transfers compared: for each segment, those of its group by the group's order.

    Raises ProofStops unless each group's segments are what was read.
    """
    program = definition.write(instance.n_ranks, segments, root=instance.root, **instance.parameters)
    schedule = program.finish()
    compared = 0
    for number, group in enumerate(program.groups_made):
        rows = transfers_of(reading, {**sizes, reading.case.members or "": group.members}, segments)
        for segment in range(segments):
            found = np.array([row for row in rows if row[3] == segment], dtype=np.int64).reshape(-1, 5)
            if found.size and 0 <= found[:, :2].min() <= found[:, :2].max() < instance.n_ranks:
                found[:, :2] = np.array(group.order)[found[:, :2]]
            at = number * segments + segment
            chosen = schedule.segment == at
            columns = (schedule.src, schedule.dst, schedule.op, schedule.segment - at + segment, schedule.section)
            written = np.stack(columns, axis=1)[chosen]
            if found.shape != written.shape or not (found == written).all():
                raise ProofStops(f"read wrongly for {instance}, {segments} segments, group {number}")
            compared += len(found)
    if compared != len(schedule):
        raise ProofStops(f"read wrongly for {instance}, {segments} segments: transfers of no group")
    return compared


def _sorted(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return rows[np.lexsort(rows.T)]


def _sizes(definition: Definition, covered: Covered, p_max: int) -> Iterator[tuple[int, Instance, dict[str, int]]]:
    for p in range(2, p_max + 1):
        fitting = 0
        for instance in instances_of(definition, p):
            sizes = covered.sizes_of(p, instance.parameters)
            if sizes is not None and covered.case.straggler == "root":
                sizes["root"] = instance.root
            if sizes is not None and (fitting == 0 or p <= P_FIRST):
                fitting += 1
                yield p, instance, sizes


def _past_scratch(schedule: Schedule, compare: Callable[..., None]) -> tuple[Column, Column]:
    """The transfers that are edges of trees, and the operation of each transfer: what `reduce_in_order` adds in scratch
    space and then to the rank's own chunk is a reduction into that chunk."""
    op, is_edge = schedule.op.copy(), schedule.src != schedule.dst
    held: set[tuple[int, int, int]] = set()
    columns = schedule.segment, schedule.section, schedule.src, schedule.dst, schedule.src_slot, schedule.dst_slot
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for at, (segment, section, src, dst, src_slot, dst_slot) in enumerate(rows):
        place = segment, section, dst
        if src == dst:
            compare(src_slot != DATA and dst_slot == DATA and op[at] == REDUCE and place in held, segment)
            held.remove(place)
            continue
        # Whoever passes on its sum has added all of it.
        compare(src_slot == DATA and (segment, section, src) not in held, segment)
        if dst_slot != DATA:
            compare((op[at] == REDUCE) == (place in held), segment)
            held.add(place)
            op[at] = REDUCE
    compare(not held)
    return np.flatnonzero(is_edge), op


def _compare_trees(reading: Reading, schedule: Schedule) -> None:
    """Raises ProofStops unless each segment is a reduction or broadcast along trees with the roots that were read."""
    p = schedule.n_ranks

    def compare(is_so: bool, segment: int = 0) -> None:
        if not is_so:
            raise ProofStops(f"read wrongly for {p} ranks: other trees, or other roots, in segment {segment}")

    nodes = [node for walk in reading.walks for node in walk.bodies[0] if isinstance(node, Along)]
    edges = np.arange(len(schedule))
    op = schedule.op
    if schedule.scratch_slots:
        edges, op = _past_scratch(schedule, compare)
    compare(len(edges) == len(schedule.segments) * len(nodes) * (p - 1))
    for segment in range(len(schedule.segments)):
        begins = sum((shape.share for shape in schedule.segments[:segment]), Fraction(0))
        roots: dict[Term | str, int] = {Term.var("root"): schedule.collective.root, OWNER: floor(begins * p)}
        done: dict[int, int] = {}
        for node in nodes:
            section = node.section.constant or 0
            chunk = edges[(schedule.segment[edges] == segment) & (schedule.section[edges] == section)]
            rows = chunk[done.get(section, 0) :][: p - 1]
            done[section] = done.get(section, 0) + p - 1
            below, above = schedule.src[rows].tolist(), schedule.dst[rows].tolist()
            if node.op != REDUCE:
                below, above = above[::-1], below[::-1]
            compare(len(rows) == p - 1 and bool((op[rows] == node.op).all()), segment)
            missing = set(range(p)) - set(below)
            compare(len(missing) == 1, segment)
            (root,) = missing
            place = {rank: at for at, rank in enumerate([*below, root])}
            compare(len(place) == p, segment)
            compare(all(place[up] > place[down] for down, up in zip(below, above, strict=True)), segment)
            compare(roots.setdefault(node.root, root) == root, segment)
