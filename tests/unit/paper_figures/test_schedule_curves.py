"""The record of schedules in simulation is what simulation gives; the figure draws exactly the record."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace as changed

from optcc.compiler import compile_schedule
from optcc.errors import CodecError, InputError
from optcc.experiments import schedule_record
from optcc.experiments.cells import Partial, RecordCells
from optcc.experiments.made import unstamped
from optcc.experiments.schedule_cases import (
    FULL,
    NO_TIME,
    RATE,
    SIZE_BYTES,
    SchedulePlan,
    ScheduleRatio,
    Unit,
    formula_of,
    one_straggler,
    random_rates,
    run_unit,
    units,
)
from optcc.experiments.schedule_record import COLUMNS, FORMULA_GOAL, ScheduleRatios, command, curve, make
from optcc.experiments.workers import Workers
from optcc.paper_figures import build, schedule_curves, style
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import Model, simulate
from optcc.topology import Topology
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.predictions import fault_free, one_straggler_optimum, optcc, ring

pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF = Fraction(2)
TINY = SchedulePlan(
    ranks=(4, 5),
    slowdowns=(Fraction(4, 3), HALF),
    segments={"ring": (1, 2), "r2ccl-allreduce": (4,), "optcc": (8, 16, 4096), "optimal": (32, 64)},
    transfers_max=2**11,
    exclusive_ranks=(4,),
    exclusive_segments=(4, 8),
    random={4: 2},
    many={6: 32},
    many_slowdowns={"fifo": (HALF,), "fair": (HALF,)},
    fair_segments={4: (16, 32), 6: (8,)},
)


@cache
def small() -> ScheduleRatios:
    """A record of a few cases."""
    return make(TINY, ("make",))


@cache
def committed() -> ScheduleRatios:
    """The record that comes with the package."""
    return ScheduleRatios.read(ScheduleRatios.own_path)


def cluster(case: ScheduleRatio) -> Topology:
    """The cluster of a case."""
    if case.slowdown is not None:
        return one_straggler(case.ranks, case.slowdown)
    assert case.seed is not None
    return random_rates(case.ranks, case.seed)


def line(figure: Figure, gid: str) -> list[tuple[float, float]]:
    """The points of the only line with this id."""
    (found,) = figure.findobj(lambda each: each.get_gid() == gid)
    data: Any = found
    return [(float(x), float(y)) for x, y in zip(*data.get_data(), strict=True)]


# The record


def test_a_case_says_what_simulation_says() -> None:
    """The best of the segments tried, under the model of the plan."""
    topology = one_straggler(4, HALF)
    (case,) = (case for case in small().select("optimal", straggler=True) if (case.ranks, case.slowdown) == (4, HALF))
    seconds = {}
    for segments in (32, 64):
        schedule = SCHEDULES["optimal"].build(topology, segments)
        plan = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=topology, ports="fifo")
        seconds[segments] = simulate(plan, topology).seconds
    assert case.seconds == min(seconds.values()) == seconds[case.segments]
    assert case.tried == (32, 64)
    assert case.transfers == 6 * case.segments
    assert case.bound == collective_bound(topology, SIZE_BYTES).seconds
    assert case.fault_free == fault_free(topology, SIZE_BYTES)


def test_formulas_are_those_of_the_predictions() -> None:
    """OptCC's is what its ports need with the segments of the case, and the latency of the 2(p - 1) steps of its first
    section; the optimum's is the bound."""
    for case in small().cases:
        if case.slowdown is not None:
            topology = one_straggler(case.ranks, case.slowdown)
            if case.schedule == "optcc":
                steps = 2 * (case.ranks - 1)
                q, k, passing = case.ranks - 1, case.segments, case.slowdown if case.model == "exclusive" else 1
                least = max(case.slowdown + Fraction(q - 1, q * k), (2 * (q - 1) + passing) / Fraction(q))
                assert case.formula == least * SIZE_BYTES / RATE + steps * topology.latency_s
                if case.model != "exclusive":
                    assert optcc(topology, SIZE_BYTES) <= case.formula
            if case.schedule == "ring":
                assert case.formula == ring(topology, SIZE_BYTES)
        if case.schedule in ("optimal", "shares"):
            assert case.formula == case.bound


def test_segments_are_tried_as_far_as_the_plan_stays_small() -> None:
    """4,096 segments of OptCC are too many."""
    assert {case.tried for case in small().select("optcc", straggler=True)} == {(8, 16)}


def test_every_kind_of_case_is_there_once() -> None:
    """OptCC for all ports, the optimum for two; random rates under fifo and under fair ports."""
    models = {(case.schedule, case.ranks, case.model) for case in small().cases if case.slowdown == HALF}
    plain = {(name, ranks, "fifo") for name in TINY.segments for ranks in TINY.ranks}
    both = {("optcc", 4, "exclusive"), ("optcc", 4, "fair"), ("optimal", 4, "exclusive")}
    many = {("optimal", 6, "fifo"), ("shares", 6, "fair")}
    assert models == plain | both | many | {("shares", 4, "fair")}
    drawn = small().select("shares", "fair", straggler=False)
    assert [(case.ranks, case.seed, case.tried) for case in drawn] == [(4, 0, (16, 32)), (4, 1, (16, 32)), (6, 0, (8,))]
    random = small().select("optimal", straggler=False)
    assert [(case.ranks, case.seed) for case in random] == [(4, 0), (4, 1), (6, 0)]
    assert small().not_run == ()


@pytest.mark.slow
def test_two_processes_make_the_same_record_and_the_cheap_cases_come_first(tmp_path: Path) -> None:
    """All but the planning seconds; and what is done is not done again."""
    told: list[str] = []

    def tell(done: int, of: int, name: str) -> None:
        told.extend([name] if name else [])

    partial = Partial.open(tmp_path / "partial", "tiny", resume=False)
    record = make(TINY, ("make",), RecordCells(partial, Workers(2), tell))
    plain = [changed(case, planning_s=0.0) for case in record.cases]
    assert plain == [changed(case, planning_s=0.0) for case in small().cases]
    assert sorted(told) == sorted(str(unit) for unit in units(TINY))
    assert told[-1].endswith("fair")
    again = Partial.open(tmp_path / "partial", "tiny", resume=True)
    told.clear()
    assert make(TINY, ("make",), RecordCells(again, report=tell)) == record
    assert told == []
    (name, *_) = (str(unit) for unit in units(TINY) if unit.schedule == "ring")
    del again.done[name]
    short = make(TINY, ("make",), RecordCells(again), finish=True)
    assert len(short.cases) == len(record.cases) - 1
    assert {(f"{each.schedule}, p = {each.ranks}", each.reason) for each in short.not_run} == {("ring, p = 4", NO_TIME)}
    assert ScheduleRatios.from_bytes(short.to_bytes(), "short") == short


def test_what_does_not_fit_into_memory_is_listed_with_the_reason() -> None:
    """Few segments fit, many do not; the first are a case. A schedule that refuses is listed too."""
    here_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    unit = Unit("ring", 64, HALF, None, "fifo", (1, 256), memory_bytes=here_bytes + 2**28)
    outcome = run_unit(unit)
    assert [(case.segments, case.tried) for case in outcome.cases] == [(1, (1,))]
    (missing,) = outcome.not_run
    assert (missing.segments, missing.ports) == (256, "fifo")
    assert missing.reason.startswith("memory of ")
    many = run_unit(replace(unit, segments=(2 * 10**6,)))
    assert many.cases == ()
    assert "must have from 1 to 1000000 segments" in many.not_run[0].reason
    record = replace(small(), not_run=(missing,))
    assert ScheduleRatios.from_bytes(record.to_bytes(), "x") == record
    assert str(missing).startswith("ring, p = 64, l = 2, fifo, 256 segments: not run: memory")


def test_random_rates_lie_where_they_should() -> None:
    """10 to 50 GB/s, out and in never equal, others for another seed."""
    for ranks in (2, 64):
        topology = random_rates(ranks, 3)
        assert all(10 * 10**9 <= rate <= 50 * 10**9 for rate in (*topology.out, *topology.in_))
        assert all(out != in_ for out, in_ in zip(topology.out, topology.in_, strict=True))
        assert topology != random_rates(ranks, 4)


def test_curves_are_the_formulas() -> None:
    """Over the fault-free ring, from nothing lost to where the caller says."""
    for own in small().curves:
        assert (own.points[0][0], own.points[-1][0]) == (Fraction(0), Fraction(1, 2))
        unit = Fraction(2 * (own.ranks - 1), own.ranks)
        for point in own.points:
            values = dict(zip(COLUMNS, point, strict=True))
            slowdown = 1 / (1 - values["lost"])
            assert values["ring"] == slowdown
            assert values["bound"] * unit == one_straggler_optimum(own.ranks, slowdown)
            assert values["optcc"] * unit == max(slowdown, 2 - Fraction(1, own.ranks - 1))


def test_misses_are_listed() -> None:
    """The optimum beyond its goal, OptCC off its formula; nothing else."""
    (good, *_) = small().select("optimal", straggler=True)
    bad = changed(good, seconds=1.021 * float(good.bound))
    fine = changed(good, seconds=1.019 * float(good.bound))
    ring_case = changed(bad, schedule="ring")
    record = replace(small(), cases=(bad, ring_case))
    assert len(record.misses()) == 1
    assert "optimal, p = 4, l = 4/3, fifo" in record.misses()[0]
    assert replace(record, cases=(fine, ring_case)).misses() == ()
    slow = changed(bad, schedule="optcc", formula=bad.bound)
    assert "of its formula" in replace(record, cases=(slow,)).misses()[0]
    assert "of its formula" in replace(record, cases=(changed(slow, formula=2 * bad.bound),)).misses()[0]
    near = changed(slow, formula=bad.bound * Fraction(102, 100))
    assert replace(record, cases=(near,)).misses() == ()
    fair = changed(bad, schedule="shares", model="fair")
    assert len(replace(record, cases=(fair, changed(bad, model="fair"))).misses()) == 1
    for ranks, misses in ((64, 1), (256, 0)):
        drawn = changed(good, ranks=ranks, slowdown=None, seed=0, seconds=1.04 * float(good.bound))
        assert len(replace(record, cases=(drawn,)).misses()) == misses


def test_round_trip(tmp_path: Path) -> None:
    """Written and read."""
    small().write(tmp_path / "a.json")
    assert ScheduleRatios.read(tmp_path / "a.json") == small()


def edited(edit: Callable[[Any], object]) -> bytes:
    """The small record with one thing changed."""
    value = json.loads(small().to_bytes())
    edit(value)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda v: v.update(format="optcc-schedules/1"), r"\$\.format"),
        (lambda v: v.update(more=1), "more"),
        (lambda v: v.pop("columns"), "columns"),
        (lambda v: v["columns"].reverse(), r"\$\.columns"),
        (lambda v: v.update(size_bytes=0), r"\$\.size_bytes"),
        (lambda v: v.update(rate="0/1"), r"\$\.rate"),
        (lambda v: v["curves"].append(v["curves"][0]), r"\$\.curves.*different"),
        (lambda v: v["curves"][1].update(ranks=2), r"\$\.curves\[1\]\.ranks: 2"),
        (lambda v: v["curves"][0]["points"].reverse(), "must rise"),
        (lambda v: v["curves"][0].update(points=[]), "at least two"),
        (lambda v: v["curves"][0]["points"][2].pop(), "5 numbers"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(1, "4/2"), r"'4/2': must be a/b.*points"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(1, 0.5), "must be a/b"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(4, "9/1"), "end with the bound"),
        (lambda v: v["curves"][0]["points"][-1].__setitem__(0, "1/1"), "below 1"),
        (lambda v: v["cases"].append(v["cases"][0]), "be there once"),
        (lambda v: v["cases"][0].update(schedule=""), r"cases\[0\]\.schedule"),
        (lambda v: v["cases"][0].update(ranks=1), r"cases\[0\]\.ranks"),
        (lambda v: v["cases"][0].update(seed=1), "and not both"),
        (lambda v: v["cases"][0].update(slowdown=None), "and not both"),
        (lambda v: v["cases"][0].update(slowdown="1/2"), "be at least 1"),
        (lambda v: v["cases"][0].update(slowdown="1/0"), "a/b in lowest terms"),
        (lambda v: v["cases"][0].update(model="new"), r"cases\[0\]\.model"),
        (lambda v: v["cases"][0].update(segments=99), "one of those tried"),
        (lambda v: v["cases"][0].update(seconds=1e-9), r"cases\[0\]\.seconds.*at least the bound"),
        (lambda v: v["cases"][0].update(bound="0/1"), r"cases\[0\]\.bound"),
        (lambda v: v["cases"][0].update(planning_s=-1.0), r"cases\[0\]\.planning_s"),
        (lambda v: v.update(not_run=[{}]), r"not_run\[0\]"),
    ],
)
def test_what_is_no_record_is_refused(edit: Callable[[Any], object], why: str) -> None:
    """With the path to the field."""
    with pytest.raises(CodecError, match=why):
        ScheduleRatios.from_bytes(edited(edit), "r.json")


def test_no_json() -> None:
    """Nor is this."""
    for data in (b"", b"[]", b"[" * 100_000, b"\xff"):
        with pytest.raises(CodecError, match=r"r\.json"):
            ScheduleRatios.from_bytes(data, "r.json")


def test_the_command_prints_and_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick run never replaces the package's record."""
    before = ScheduleRatios.own_path.read_bytes()
    monkeypatch.setattr(schedule_record, "make", lambda *_given, **_options: small())
    done = CliRunner().invoke(command, ["--quick"])
    assert done.exit_code == 0, done.output
    assert "r2ccl-allreduce" in done.stdout
    assert CliRunner().invoke(command, ["--quick", "-o", str(tmp_path / "a.json")]).exit_code == 0
    assert ScheduleRatios.read(tmp_path / "a.json") == small()
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert ScheduleRatios.own_path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--quick", "--resume"], "--resume: must come with -o FILE"),
        (["--quick", "--finish"], "--finish: must come with --resume"),
        (["--jobs", "0"], "--jobs 0: must be"),
    ],
)
def test_options_that_cannot_be(words: list[str], why: str) -> None:
    """Nothing is simulated."""
    done = CliRunner().invoke(command, words)
    assert isinstance(done.exception, InputError)
    assert why in str(done.exception)


# The committed record


def test_the_committed_record_holds_every_case_of_the_study() -> None:
    """And is written as this code writes it, with the formulas and the bounds of this code."""
    record = committed()
    assert record.to_bytes() == unstamped(ScheduleRatios.own_path.read_bytes())
    for name in FULL.segments:
        found = [(case.ranks, case.slowdown) for case in record.select(name, straggler=True)]
        assert found[: len(FULL.ranks) * len(FULL.slowdowns)] == [
            (ranks, slowdown) for ranks in FULL.ranks for slowdown in FULL.slowdowns
        ]
    made = {(case.schedule, case.ranks, case.slowdown, case.seed, case.model) for case in record.cases}
    missing = {(each.schedule, each.ranks, each.slowdown, each.seed, each.ports) for each in record.not_run}
    for unit in units(FULL):
        key = (unit.schedule, unit.ranks, unit.slowdown, unit.seed, unit.ports)
        assert key in made | missing, unit
    assert record.curves == tuple(curve(ranks, Fraction(7, 8)) for ranks in FULL.ranks)
    for case in record.cases:
        assert case.bound == collective_bound(cluster(case), SIZE_BYTES).seconds


def test_the_committed_times_are_those_of_this_code() -> None:
    """A case of each schedule, within half a percent: if not, make the record again."""
    for name in FULL.segments:
        case = next(
            case for case in committed().select(name, straggler=True) if (case.ranks, case.slowdown) == (4, HALF)
        )
        schedule = SCHEDULES[name].under("fifo").build(cluster(case), case.segments)
        plan = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=cluster(case), ports="fifo")
        assert case.transfers == len(plan.transfers)
        assert simulate(plan, cluster(case)).seconds == pytest.approx(case.seconds, rel=0.005), str(case)


def test_optcc_takes_what_its_ports_need_in_the_committed_record() -> None:
    """Within 1 %, above and below, with one straggler under fifo and under fair ports; `optimal` reaches its goals."""
    own: list[ScheduleRatio] = []
    models: tuple[Model, ...] = ("fifo", "fair")
    for model in models:
        cases = committed().select("optcc", model, straggler=True)
        assert all(case.formula == formula_of("optcc", cluster(case), case.segments, model) for case in cases)
        own += cases
    assert len(own) > len(FULL.ranks) * len(FULL.slowdowns)
    assert max(abs((case.over_formula or 0) - 1) for case in own) < FORMULA_GOAL
    assert committed().misses() == ()


def test_the_committed_record_shows_what_the_papers_state() -> None:
    """A ring with one rank at half rate takes twice as long, R2CCL half as long again, OptCC less than a tenth more."""
    for ranks in (32, 64):
        at_half = {
            case.schedule: case
            for case in committed().cases
            if (case.ranks, case.slowdown, case.model) == (ranks, HALF, "fifo")
        }
        assert at_half["ring"].over_fault_free == pytest.approx(2, rel=0.01)
        assert at_half["r2ccl-balance"].seconds == at_half["ring"].seconds
        assert 1.5 < at_half["r2ccl-allreduce"].over_fault_free < 1.65
        assert at_half["optcc"].over_fault_free < 1.1
        assert at_half["optimal"].over_bound <= at_half["optcc"].over_bound


def test_formula_and_bound_hold_the_committed_times_from_below() -> None:
    """The fluid formulas have no latency in them, so simulation never beats the ring's or R2CCL's."""
    for case in committed().cases:
        if case.schedule in ("ring", "r2ccl-balance", "optimal") and case.over_formula is not None:
            assert case.over_formula >= 1 - 1e-9


# The figure


def test_lines_are_the_record() -> None:
    """Every formula and every simulated case; above over the fault-free ring, below as percent over the bound."""
    figure = schedule_curves.draw(schedule_curves.data(small()))
    for own in small().curves:
        bound = [(float(100 * point[0]), float(point[-1])) for point in own.points]
        assert line(figure, f"bound:{own.ranks}") == bound
        for name in COLUMNS[1:-1]:
            key, at = f"{own.ranks}:{name}", COLUMNS.index(name)
            whole = [(float(100 * point[0]), float(point[at])) for point in own.points]
            assert line(figure, f"formula:{key}") == whole
            over = [(float(100 * p[0]), float(100 * (p[at] / p[-1] - 1))) for p in own.points if p[at] > p[-1]]
            assert line(figure, f"log-formula:{key}") == over
        for name in TINY.segments:
            mine = [case for case in small().select(name, straggler=True) if case.ranks == own.ranks]
            assert line(figure, f"simulated:{own.ranks}:{name}") == [(x, c.over_fault_free) for x, c in _placed(mine)]
            over = [(x, 100 * (c.over_bound - 1)) for x, c in _placed(mine)]
            assert line(figure, f"log-simulated:{own.ranks}:{name}") == over


def _placed(own: list[ScheduleRatio]) -> list[tuple[float, ScheduleRatio]]:
    return [(float(100 * schedule_curves.lost(case)), case) for case in own]


@pytest.mark.parametrize("record", [small, committed])
def test_everything_drawn_is_within_the_axes_and_no_text_is_cut(record: Callable[[], ScheduleRatios]) -> None:
    """No mark leaves its panel, and all text lies on the paper."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = schedule_curves.draw(schedule_curves.data(record()))
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for each in axes.lines:
            if "simulated" in str(each.get_gid()):
                for x, y in line(figure, str(each.get_gid())):
                    assert left <= x <= right and low <= y <= high, each.get_gid()
    with style.applied():
        canvas: Any = FigureCanvasAgg(figure)
        box = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height


def test_numbers_are_the_record() -> None:
    """Of each case, of each schedule where at most half is lost, and the worst of all."""
    record = small()
    numbers = schedule_curves.numbers(schedule_curves.data(record))
    (at_half,) = (c for c in record.select("ring", straggler=True) if (c.ranks, c.slowdown) == (4, HALF))
    found = numbers["4-ranks/50-percent-lost/ring/over-fault-free-percent"]
    assert found.value == 100 * (at_half.over_fault_free - 1)
    optimal = [case for case in record.cases if case.schedule == "optimal" and case.model == "fifo"]
    worst = numbers["worst/optimal/over-bound-percent"]
    assert worst.value == pytest.approx(100 * (max(case.over_bound for case in optimal) - 1))
    assert numbers["worst/optimal/cases"].value == len(optimal)
    beyond = sum(case.over_bound > case.goal for case in optimal)
    assert numbers["worst/optimal/beyond-goal"].value == beyond
    rings = [case for case in record.select("ring", straggler=True) if case.ranks == 5]
    most = numbers["half-or-less-lost/5-ranks/ring/over-fault-free-percent-most"]
    assert most.value == pytest.approx(100 * (max(case.over_fault_free for case in rings) - 1))
    assert "worst/one-straggler/optcc/fair/over-bound-percent" in numbers
    assert "worst/random/optimal/fifo/over-bound-percent" in numbers


def test_build_draws_it_and_names_its_record(tmp_path: Path) -> None:
    """Beside nothing else; two such records are one too many."""
    for name in ("a.json", "b.json"):
        small().write(tmp_path / name)
    build.build([tmp_path / "a.json"], tmp_path / "out", quick=True)
    manifest = json.loads((tmp_path / "out" / build.MANIFEST).read_bytes())
    assert [each["file"] for each in manifest["figures"]["schedule-curves"]["records"]] == ["a.json"]
    assert (tmp_path / "out" / "schedule-curves.png").read_bytes().startswith(b"\x89PNG")
    tex = (tmp_path / "out" / "numbers.tex").read_bytes()
    assert b"schedule-curves/4-ranks/50-percent-lost/optcc/over-bound-percent" in tex
    with pytest.raises(InputError, match=r"a\.json, b\.json: a second figure schedule-curves"):
        build.build([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "again", quick=True)
    assert not (tmp_path / "again").exists()
