"""OptCC in closed form: no port is double-booked, everything waits for what it needs, and nothing can be faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from optcc.arrays import column
from optcc.compiler import SLOTS, compile_schedule
from optcc.errors import InputError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.lower import lower
from optcc.schedules.optcc import optcc
from optcc.schedules.optcc_timetable import ClosedForm, Model, Start
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from optcc.verify.plan.timing import exact_makespan
from optcc.verify.smt import Claim, Limit, Query
from tests.sample import sampled

MODELS: tuple[Model, ...] = ("fifo", "exclusive")
SLOWDOWNS = tuple(
    map(Fraction, ("1", "8/7", "4/3", "3/2", "8/5", "5/3", "7/4", "9/5", "19/10", "2", "9/4", "3", "4", "8"))
)


def times(form: ClosedForm) -> tuple[Transfers, list[Start], list[tuple[Fraction, Fraction]]]:
    """The transfers of OptCC with an element a section; when they start; and the slots on their out and in ports."""
    straggler, q = form.ranks - 1, form.healthy
    schedule = optcc(n_ranks=form.ranks, segments=form.segments, stragglers=[straggler])
    transfers = depend(bind(schedule, 4 * q * form.segments, "float32", "sum"))
    starts, busy = [], []
    columns = (schedule.src, schedule.dst, schedule.stage, schedule.segment, schedule.section)
    for src, dst, stage, segment, section in zip(*(each.tolist() for each in columns), strict=True):
        step = {0: (src - section - 1) % q, 3: (src - section) % q}.get(stage, 0)
        starts.append(form.starts(stage + 1, segment, section, step))
        out, in_ = (form.slowdown if rank == straggler else Fraction(1) for rank in (src, dst))
        busy.append((out, in_) if form.model == "fifo" else (max(out, in_),) * 2)
    return transfers, starts, busy


def check(form: ClosedForm) -> None:
    """Exactly: ports, dependencies, the whole time; and which port never idles once the first transfer has come."""
    transfers, starts, busy = times(form)
    what = str(form)
    on: dict[tuple[str, int], list[tuple[Fraction, Fraction]]] = {}
    done = []
    for t, ((leaves, taken), (out, in_)) in enumerate(zip(starts, busy, strict=True)):
        assert leaves >= 0, what
        assert taken >= leaves + max(Fraction(0), out - in_), f"{what}: transfer {t} is taken before it can be"
        on.setdefault(("out", int(transfers.src[t])), []).append((leaves, leaves + out))
        on.setdefault(("in", int(transfers.dst[t])), []).append((taken, taken + in_))
        done.append(taken + in_)
    for port, intervals in on.items():
        for one, other in pairwise(sorted(intervals)):
            assert one[1] <= other[0], f"{what}: {port} is double-booked at {other[0]}"
    for t, start in enumerate(starts):
        assert all(done[before] <= start.leaves for before in transfers.after[t].tolist()), f"{what}: transfer {t}"
    assert max(done) == form.total >= form.least, what
    straggler = form.ranks - 1
    if form.period == form.slowdown * form.healthy:  # the straggler decides
        first, last = min(on["in", straggler])[0], max(on["in", straggler])[1]
        assert last - first == form.segments * form.period, what
    if form.model == "fifo" and form.period == 2 * form.healthy - 1:  # the healthy decide
        for way in ("out", "in"):
            begin = form.lead + (form.returned_after + 1) * form.period
            end = form.lead + (form.segments - 1) * form.period
            carried = sum(max(Fraction(0), min(b, end) - max(a, begin)) for a, b in on[way, 0])
            assert carried == max(end - begin, 0), what


@pytest.mark.parametrize(("p", "model"), sampled(product(range(3, 25), MODELS), every=3))
def test_no_port_is_double_booked_and_every_transfer_has_what_it_needs(p: int, model: Model) -> None:
    """For p = 3..24 and a few slowdowns each; the slow test has all."""
    rng = random.Random(f"{p} {model}")
    for slowdown in rng.sample(SLOWDOWNS, 14 if p <= 6 else 2 if p <= 12 else 1):
        check(ClosedForm(p, slowdown, 6 if p <= 8 else 4, model))


@pytest.mark.slow
@pytest.mark.parametrize("p", [*range(3, 9), 13, 24])
@pytest.mark.parametrize("model", MODELS)
def test_no_port_is_double_booked_for_many_slowdowns(p: int, model: Model) -> None:
    """For few ranks also with two segments, where nothing is steady, and with ten."""
    rng = random.Random(p)
    for slowdown in (*SLOWDOWNS, *(1 + Fraction(rng.randrange(1, 400), 97) for _ in range(6))):
        for segments in (2, 4, 10) if p <= 8 else (4,):
            check(ClosedForm(p, slowdown, segments, model))


@pytest.mark.parametrize("segments", [2, 8, 100])
@pytest.mark.parametrize("p", [3, 4, 9, 64])
def test_the_times_are_these_formulas(p: int, segments: int) -> None:
    """In units of n/B, q = p - 1: from l = 2 on l + (1 - 1/q)/k, which nothing is below; else (2 - 1/q) and a fill."""
    q, k = p - 1, segments
    for slowdown in SLOWDOWNS:
        form = ClosedForm(p, slowdown, k)
        unit = q * k
        assert form.least / unit == max(slowdown + Fraction(q - 1, q * k), 2 - Fraction(1, q))
        if slowdown >= 2:
            assert form.total == form.least
        elif slowdown * (q + 1) <= 2 * q:
            assert form.total / unit == 2 - Fraction(1, q) + (slowdown - Fraction(1, q)) / k
        assert form.total / unit <= max(slowdown, 2 - Fraction(1, q)) * Fraction(k + 4, k)
        fixed = ClosedForm(p, slowdown, k, "exclusive")
        assert fixed.total / unit <= max(slowdown, Fraction(2)) * Fraction(k + 3, k)
        assert fixed.least / unit == max(slowdown + Fraction(q - 1, q * k), 2 - (2 - slowdown) / q)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", ["4/3", "2", "4"])
def test_a_plan_in_this_order_is_proved_and_takes_no_longer(text: str, model: Model) -> None:
    """By the exact longest path through the plan's own waits, which knows nothing of the closed form; and no plan in
    this or the compiler's order takes less than what the ports need."""
    form = ClosedForm(5, Fraction(text), 8, model)
    transfers, starts, busy = times(form)
    leaves = np.array([float(start.leaves) for start in starts])
    done = np.array([float(start.taken + in_) for start, (_, in_) in zip(starts, busy, strict=True)])
    sends, receives = (column(np.lexsort((np.arange(len(each)), each))) for each in (leaves, done))
    plan = lower("optcc", transfers, sends, SLOTS["fifo"], receives)
    assert verify_plan(plan).verdict == PROVED
    topology = Topology.parse(f"5@4B/s,4={4 / Fraction(text)}B/s")
    assert exact_makespan(plan, topology, model=model).seconds <= form.total
    listed = compile_schedule(
        optcc(n_ranks=5, segments=8, stragglers=[4]), size_bytes=4 * 4 * 8, topology=topology, ports=model
    )
    for each in (plan, listed):
        assert simulate(each, topology, model=model).seconds >= form.least


@pytest.mark.parametrize("slowdown", ["8/7", "3/2", "2", "4", "8"])
def test_the_compilers_order_fills_about_as_well(slowdown: str) -> None:
    """Within a segment's worth of what no order is below; from l = 2 on with nothing more."""
    for p in (4, 8, 16):
        form = ClosedForm(p, Fraction(slowdown), 32)
        topology = Topology.parse(f"{p}@840B/s,{p - 1}={840 / Fraction(slowdown)}B/s")
        schedule = optcc.under("fifo").build(topology, 32)
        plan = compile_schedule(schedule, size_bytes=840 * 4 * (p - 1) * 32, topology=topology, ports="fifo")
        slots = simulate(plan, topology).seconds / 4
        assert form.least * (1 - Fraction(1, 10**9)) <= slots
        assert slots <= form.least + (form.period if form.slowdown < 2 else Fraction(1, 10**6))


@pytest.mark.parametrize(
    ("ranks", "slowdown", "segments", "model", "rule"),
    [
        (2, "2", 4, "fifo", "2 ranks: must be at least 3"),
        (4, "1/2", 4, "fifo", "slowdown 1/2: must be at least 1"),
        (4, "2", 3, "fifo", "3 segments: must be even"),
        (4, "2", 0, "fifo", "0 segments: must be even, and at least 2"),
        (4, "2", 4, "fair", "model 'fair': must be fifo or exclusive"),
    ],
)
def test_what_has_no_timetable_is_refused(ranks: int, slowdown: str, segments: int, model: Model, rule: str) -> None:
    """With the value, and the rule."""
    with pytest.raises(InputError, match=rule):
        ClosedForm(ranks, Fraction(slowdown), segments, model)


@pytest.mark.parametrize("where", [(0, 0, 0, 0), (5, 0, 0, 0), (1, 8, 0, 0), (1, 0, 3, 0), (4, 0, 0, 2), (2, 0, 0, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_a_transfer_that_there_is_not_is_refused(where: tuple[int, int, int, int], model: Model) -> None:
    """With all that was asked for."""
    with pytest.raises(InputError, match="stage {}, segment {}, section {}, step {}: must be".format(*where)):
        ClosedForm(4, Fraction(2), 8, model).starts(*where)


# For every p, l and k: the same times as terms of a solver


def places(
    q: Any, w: Any, block: Any, back: int, *, wide: bool, passed: bool, last: bool
) -> dict[str, tuple[int, Any]]:
    """For the section that the straggler takes `w` slots into its block: when things begin, as whole periods after the
    segment's first one and slots of them. `back` is `returned_after` and `block` lq; `last` is the last one 1-2-3-4."""
    end = (back + 1 if passed else 0, 0 if wide else -(q - 1))
    if not passed:
        fourth = (0, q) if wide else (1, -(q - 1))
    elif last:
        fourth = (end[0], end[1] + (0 if wide else q - 1))
    else:
        fourth = (end[0], q) if wide else (end[0] + 1, end[1])
    return {
        "1": (0, 0),
        "2": (0, q - 1),
        "2 taken": (0, q - 1 + w),
        "3": (end[0], end[1] - block + w),
        "3 taken": (end[0], end[1] - 1),
        "4": fourth,
    }


@pytest.mark.parametrize("p", [3, 5, 8, 17])
def test_the_terms_that_are_proved_are_the_times(p: int) -> None:
    """Stage by stage, for every segment and section."""
    for slowdown in SLOWDOWNS:
        form = ClosedForm(p, slowdown, 8)
        q, block = form.healthy, form.healthy * slowdown
        for segment, section in product(range(8), range(q)):
            passed, last = segment % 2 == 0, segment == 6
            found = places(
                q,
                slowdown * section,
                block,
                form.returned_after,
                wide=slowdown >= 2,
                passed=passed,
                last=last,
            )
            at = {name: form.lead + (segment + n) * form.period + x for name, (n, x) in found.items()}
            for stage in range(1, 5):
                start = form.starts(stage, segment, section)
                assert start == Start(at[str(stage)], at.get(f"{stage} taken", at[str(stage)]))


@pytest.mark.parametrize(("wide", "back"), [(True, 1), (False, 1), (False, 3)])
def test_the_fifo_timetable_holds_for_every_p_l_and_k(wide: bool, back: int) -> None:
    """z3 finds no p, l, k and section for which one of these fails: what a transfer needs is done before it starts; in
    a period the uses of a port lie apart; and two segments do the same thing in different periods."""
    pytest.importorskip("z3", reason="no z3: pip install z3-solver")

    def holds(name: str, claim: Callable[[Query], tuple[list[Any], Any]]) -> None:
        query = Query(f"{name} fails", f"{name}: for every p, l and k")
        facts, wanted = claim(query)
        query.require("facts", *facts)
        query.require("it fails", query.no(wanted))
        answer = query.ask(Limit(20))
        assert isinstance(answer, Claim), f"{name}: {answer}"

    def sizes(query: Query) -> tuple[list[Any], Any, Any, Any, Any, Any]:
        q, l, c, period = (query.real(name) for name in ("q", "l", "c", "P"))  # noqa: E741
        block = l * q
        facts = [q >= 2, l >= 1, c >= 0, c <= q - 1, l >= 2 if wide else l < 2]
        facts += [period >= block, period >= 2 * q - 1, query.any_of((period == block, period == 2 * q - 1))]
        if not wide and back == 1:
            facts.append(2 * period >= block + l + 2 * (q - 1))
        return facts, q, l, c, block, period

    def needs(query: Query, passed: bool, last: bool) -> tuple[list[Any], Any]:
        facts, q, l, c, block, period = sizes(query)  # noqa: E741
        found = places(q, l * c, block, back, wide=wide, passed=passed, last=last)
        at = {name: n * period + x for name, (n, x) in found.items()}
        wanted = [at["1"] + q - 1 <= at["2"], at["2"] <= at["2 taken"], at["3"] + l - 1 <= at["3 taken"]]
        wanted.append(at["1"] + q - 1 <= at["4"])
        if passed:
            wanted += [at["2 taken"] + l <= at["3"], at["3 taken"] + 1 <= at["4"]]
        else:
            wanted.append(at["3 taken"] + 1 <= at["1"])
            lead = 0 if wide else block + q - 1 - period
            wanted.append(lead + period + at["3"] >= 0)  # of segment 1, the first of all
        return facts, query.all_of(wanted)

    def apart(query: Query) -> tuple[list[Any], Any]:
        facts, q, _, _, block, period = sizes(query)
        fourth, taken = (q, period - 1) if wide else (period - (q - 1), period - q)
        ways = []
        for single in (q - 1, taken):  # of an out port, and of an in port
            uses = [(0, q - 1), (single, single + 1), (fourth, fourth + q - 1)]
            ways += [begin >= 0 for begin, _ in uses] + [end <= period for _, end in uses]
            ways += [
                query.any_of((uses[a][1] <= uses[b][0], uses[b][1] <= uses[a][0])) for a, b in ((0, 1), (0, 2), (1, 2))
            ]
        idle = query.implies(period == 2 * q - 1, 2 * (q - 1) + 1 == period)
        return facts, query.all_of([*ways, block <= period, idle])

    def once(query: Query) -> tuple[list[Any], Any]:
        one, other = (query.integer(name) for name in ("one", "other"))
        wanted = []
        for passed_shift, seeded_shift in ((0, 0), (back, -1), (back + 1, 0)):  # stages 1 and 2, 3, and 4
            periods = [query.either(each % 2 == 0, each + passed_shift, each + seeded_shift) for each in (one, other)]
            wanted.append(periods[0] != periods[1])
        return [one >= 0, one < other], query.all_of(wanted)

    for passed, last in ((True, False), (True, True), (False, False)):
        holds(f"needs, {passed=}, {last=}", partial(needs, passed=passed, last=last))
    holds("ports", apart)
    holds("periods", once)
