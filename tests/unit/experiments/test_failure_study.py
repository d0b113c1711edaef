"""The study of failures gives the formulas' times, honest statistics, and the same bytes however it was made."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optcc.commands.study import command
from optcc.errors import CodecError, InputError, OptccError
from optcc.experiments import failure_study
from optcc.experiments.cells import Partial, RecordCells
from optcc.experiments.failure_model import Cluster, Left, Uniform, draw
from optcc.experiments.failure_study import FULL, FailurePlan, FailureStudy, make
from optcc.experiments.failure_times import (
    COLUMNS,
    NICS,
    SEGMENTS,
    Rates,
    SimulatedRun,
    builds,
    endpoints,
    finite,
    fluid,
    optcc_choice,
    optcc_time,
    optimal_time,
    r2ccl_time,
    ring_time,
    whole_channels,
)
from optcc.experiments.made import unstamped
from optcc.experiments.trial_statistics import interval_ranks, mean, quantile
from optcc.experiments.workers import Workers
from optcc.schedules import r2ccl
from optcc.topology import Topology
from optcc.verify.bounds import predictions
from tests.sample import sampled

SMALL = FailurePlan(
    patterns=((Uniform(1), 8), (Uniform(3), 8), (Uniform(10), 64)),
    simulated=((Uniform(3), 8, 2**22),),
    segments={"ring": (1,), "r2ccl-allreduce": (4,), "optcc": (4, 8), "optimal": (16, 32)},
)
TRIALS = 60


@cache
def small() -> FailureStudy:
    """Made at once, by one process."""
    return make(SMALL, trials=TRIALS, seed=3)


@cache
def committed() -> FailureStudy:
    """The record that comes with the package."""
    return FailureStudy.read()


def topology_of(rates: Rates) -> Topology:
    return endpoints(rates, Fraction(8), Fraction(0))


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """`total` as a sum of numbers up to `most`, largest first."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        yield from ((first, *rest) for rest in partitions(total - first, first))


def exactly(failed: int, cluster: Cluster) -> dict[Left, Fraction]:
    """The probability of everything that `Uniform(failed)` can leave, by counting, cut-off servers left out."""
    ways: dict[Left, int] = {}
    for parts in partitions(failed, cluster.nics - 1):
        kinds = [parts.count(size) for size in sorted(set(parts))]
        arrangements = math.factorial(cluster.servers) // math.factorial(cluster.servers - len(parts))
        for kind in kinds:
            arrangements //= math.factorial(kind)
        left = Left.of({server: (Fraction(0),) * size for server, size in enumerate(parts)})
        ways[left] = arrangements * math.prod(math.comb(cluster.nics, size) for size in parts)
    return {left: Fraction(count, sum(ways.values())) for left, count in ways.items()}


# Times


@pytest.mark.parametrize("servers", [3, 4, 8, 64])
def test_times_with_one_degraded_server_are_the_predictions(servers: int) -> None:
    """Exactly, for every number of lost NICs; of OptCC and the ring the faster counts."""
    for lost in range(1, NICS):
        rates = Left.of({1: (Fraction(0),) * lost}).rates(Cluster(servers, NICS))
        topology, unit = topology_of(rates), 8
        assert ring_time(rates) == predictions.r2ccl_balance(topology, unit) == predictions.ring(topology, unit)
        assert r2ccl_time(rates) == predictions.r2ccl_allreduce(topology, unit)
        assert optcc_time(rates) == min(predictions.optcc(topology, unit), predictions.ring(topology, unit))
        assert optimal_time(rates) == predictions.one_straggler_optimum(servers, 1 / rates[0][0])


def random_rates(rng: random.Random) -> Rates:
    """Up to four kinds of servers."""
    shares = rng.sample(range(1, 17), rng.randint(1, 4))
    rates = [(Fraction(share, max(shares)), rng.randint(1, 5)) for share in sorted(shares)]
    return tuple(rates) if sum(count for _, count in rates) > 2 else random_rates(rng)


def test_r2ccl_with_several_is_the_busiest_port_of_its_recursion(seed: int) -> None:
    """Counted from the rings that the library's schedule is built of."""
    rng = random.Random(seed)
    for _ in range(100):
        rates = random_rates(rng)
        each = [rate for rate, count in rates for _ in range(count)]
        p = len(each)
        carried = [Fraction(0)] * p
        for ranks, share in r2ccl.peel(each):
            m = len(ranks)
            for rank in range(p):
                carried[rank] += share * (Fraction(2 * (m - 1) + p - m, m) if rank in ranks else 1)
        assert r2ccl_time(rates) == max(load / rate for load, rate in zip(carried, each, strict=True)), rates


def test_optcc_takes_the_best_choice_of_stragglers(seed: int) -> None:
    """All thresholds written out: q servers of at least t take part in the rings, the others stand beside them."""
    rng = random.Random(seed)
    for _ in range(100):
        rates = random_rates(rng)
        each = [rate for rate, count in rates for _ in range(count)]
        p = len(each)
        times = [Fraction(2 * (p - 1), p) / min(each)]
        for t in set(each):
            q = sum(rate >= t for rate in each)
            if p - q == 1 or (p > q and q >= 2):
                times.append(max(1 / min(each), Fraction(2 * (q - 1) + p - q, q) / t))
        assert optcc_time(rates) == min(times), rates
        assert (optcc_choice(rates)[1] is None) == (optcc_time(rates) == times[0])


def test_nothing_is_faster_than_the_bound_and_r2ccl_never_slower_than_balance(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        rates = random_rates(rng)
        assert optimal_time(rates) <= min(r2ccl_time(rates), optcc_time(rates))
        assert max(r2ccl_time(rates), optcc_time(rates)) <= ring_time(rates)


def test_whole_channels_are_placed_as_well_as_they_can_be() -> None:
    """Against every assignment of three and four channels."""
    for nics, shares in product((3, 4), product((Fraction(0), Fraction(1, 4), Fraction(2, 3)), repeat=2)):
        rates = [*(share for share in shares if share), *[Fraction(1)] * (nics - 2)]
        best = min(
            max(choice.count(nic) / rate for nic, rate in enumerate(rates))
            for choice in product(range(len(rates)), repeat=nics)
        )
        assert whole_channels(Left.of({0: shares}), Cluster(4, nics)) == max(best, 1)


def test_nothing_failed_costs_nothing() -> None:
    assert fluid(Left(()), Cluster(16, NICS)) == (1,) * len(COLUMNS)


def test_a_failed_rail_of_all_servers_costs_everybody_its_share() -> None:
    """All servers alike: seven eighths of the rate, and nothing to balance between them."""
    over = fluid(Left.of({server: (Fraction(0),) for server in range(16)}), Cluster(16, NICS))
    assert set(over[1:]) == {Fraction(8, 7)}
    assert over[0] == 2


@pytest.mark.parametrize("text", ["1[0]", "1[0 0]", "2[0] 1[0 0]"])
def test_plans_take_at_least_the_fluid_time_and_come_near_it(text: str) -> None:
    """A large message on few servers: within a tenth for everybody."""
    left, cluster = Left.parse(text), Cluster(6, NICS)
    over = dict(zip(COLUMNS, fluid(left, cluster), strict=True))
    for name, segments in {"ring": (1, 2), "r2ccl-allreduce": (32,), "optcc": (64,), "optimal": (256,)}.items():
        run = finite(name, left, cluster, 2**30, segments)
        assert run.over_bound >= 1 - 1e-9
        assert run.over_fault_free == pytest.approx(float(over[name]), rel=0.1), run


def test_plans_are_made_for_the_stragglers_that_the_formula_chooses() -> None:
    """And for all who have lost anything; the ring is always there to fall back to, and alone where nobody can help."""

    def names(text: str, servers: int, schedule: str = "optcc") -> list[str]:
        return [name for name, _ in builds(schedule, Left.parse(text).rates(Cluster(servers, NICS)))]

    assert names("1[0]", 8) == ["optcc, 1 stragglers", "ring"]
    assert names("8[0] 1[0 0]", 16) == ["optcc, 1 stragglers", "optcc, 9 stragglers", "ring"]
    assert names("7[0]", 8) == names("8[0]", 8) == ["ring"]
    assert names("1[0]", 8, "r2ccl-allreduce") == ["r2ccl-allreduce", "ring"]
    assert names("2[0]", 8, "r2ccl-allreduce") == ["r2ccl-recursive", "ring"]


def test_of_what_was_tried_the_fastest_counts() -> None:
    """For a short message the ring beats OptCC's four stages."""
    left, cluster = Left.parse("1[0]"), Cluster(8, NICS)
    short, long = (finite("optcc", left, cluster, size, (2, 8)) for size in (2**16, 2**30))
    assert (short.built, long.built) == ("ring", "optcc, 1 stragglers")
    assert short.seconds == finite("ring", left, cluster, 2**16, SEGMENTS["ring"]).seconds
    assert short.tried == long.tried == (1, 2, 4, 8)


# Statistics


def test_intervals_are_those_of_the_tables() -> None:
    """Of the median of 10, 20 and 100: from the 2nd to the 9th, the 6th to the 15th, the 40th to the 61st."""
    half = Fraction(1, 2)
    assert [interval_ranks(n, half) for n in (10, 20, 100)] == [(2, 9), (6, 15), (40, 61)]
    assert interval_ranks(3, half) == (1, 3)


@pytest.mark.parametrize(("n", "share"), [(50, Fraction(1, 2)), (200, Fraction(95, 100)), (77, Fraction(1, 10))])
def test_intervals_cover_as_often_as_they_promise(n: int, share: Fraction) -> None:
    """At most a fortieth beyond each end, exactly; and they are no longer than that needs."""

    def at_most(i: int) -> Fraction:
        return sum((math.comb(n, j) * share**j * (1 - share) ** (n - j) for j in range(i + 1)), Fraction(0))

    low, high = interval_ranks(n, share)
    tail = Fraction(1, 40)
    assert at_most(low - 1) <= tail < at_most(low)
    assert 1 - at_most(high - 1) <= tail < 1 - at_most(high - 2)


def test_quantiles_and_means_of_a_few_values() -> None:
    values = [(Fraction(1), 6), (Fraction(2), 3), (Fraction(10), 1)]
    assert quantile(values, Fraction(1, 2)).value == 1
    assert quantile(values, Fraction(95, 100)).value == 10
    average = mean(values)
    assert average.value == pytest.approx(2.2)
    assert average.high - average.value == pytest.approx(1.96 * 2.7809 / math.sqrt(10), rel=1e-3)
    assert mean([(Fraction(3), 1)]).high == 3


@pytest.mark.parametrize(("failed", "servers"), [(3, 8), pytest.param(10, 64, marks=pytest.mark.slow)])
def test_trials_agree_with_counting(failed: int, servers: int) -> None:
    """The mean overhead of every schedule over 3000 trials, against the exact one: within 4.5 standard errors."""
    cluster, trials = Cluster(servers, NICS), 3000
    exact = exactly(failed, cluster)
    assert sum(exact.values()) == 1
    unit = failure_study._Draw(Uniform(failed), cluster, 17, trials)
    drawn = {Left.parse(text): (count, over) for text, count, over in failure_study._draw(unit)}
    assert set(drawn) <= set(exact)
    for column, name in enumerate(COLUMNS):
        times = {left: fluid(left, cluster)[column] for left in exact}
        wanted = sum((chance * times[left] for left, chance in exact.items()), Fraction(0))
        variance = sum((chance * (times[left] - wanted) ** 2 for left, chance in exact.items()), Fraction(0))
        found = mean([(Fraction(over[column]), count) for count, over in drawn.values()])
        assert abs(found.value - wanted) <= 4.5 * math.sqrt(variance / trials) + 1e-12, name


# The record


@pytest.mark.slow
def test_the_same_options_give_the_same_bytes_with_any_number_of_workers() -> None:
    assert make(SMALL, trials=TRIALS, seed=3, cells=RecordCells(workers=Workers(2))).to_bytes() == small().to_bytes()
    assert make(SMALL, trials=TRIALS, seed=4).to_bytes() != small().to_bytes()


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    small().write(tmp_path / "r.json")
    again = FailureStudy.read(tmp_path / "r.json")
    assert again == small()
    assert again.to_bytes() == small().to_bytes()
    assert not {"machine", "versions"} & set(json.loads(small().to_bytes()))


class Stopped(Exception):
    """Somebody pulled the plug."""


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path: Path, after: int) -> None:
    """Every unit is worked on once, and the record is the same."""
    path = tmp_path / "r.json.partial"
    names: list[str] = []

    def stop(done: int, of: int, name: str) -> None:
        names.extend([name] if name else [])
        if len(names) == after:
            raise Stopped

    with pytest.raises(Stopped):
        make(SMALL, trials=TRIALS, seed=3, cells=RecordCells(Partial.open(path, "this", resume=False), report=stop))
    with pytest.raises(InputError, match="an unfinished record: give --resume"):
        Partial.open(path, "this", resume=False)
    first = len(names)
    cells = RecordCells(
        Partial.open(path, "this", resume=True), report=lambda done, of, name: names.extend([name] if name else [])
    )
    again = make(SMALL, trials=TRIALS, seed=3, cells=cells)
    assert again.to_bytes() == small().to_bytes()
    assert len(names) == len(set(names)) > first


def change(**fields: Any) -> Any:
    """What spoils a partial file: other values of its fields."""

    def spoil(data: bytes) -> bytes:
        return json.dumps(json.loads(data) | fields).encode()

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change(settings="that"), r"\$\.settings: 'that': must be 'this'"),
        (change(format="optcc-record/1"), r"\$\.format: 'optcc-record/1'"),
        (change(done={"draw uniform 1, 8 servers": []}), r"\$\.sha256"),
        (lambda data: data[: len(data) // 2], "unfinished record .*: delete it to start again"),
        (lambda data: b"", "unfinished record"),
        (lambda data: b"[]", "unfinished record"),
    ],
)
def test_a_wrong_or_foreign_partial_file_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    path = tmp_path / "p"
    Partial.open(path, "this", resume=True).add("draw uniform 1, 8 servers", [["1[0]", 60, ["1/1"] * 6]])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CodecError, match=said):
        Partial.open(path, "this", resume=True)


def test_broken_records_are_refused() -> None:
    """With the path to the field, and the rule."""

    def broken(find: str, replacement: str) -> str:
        data = small().to_bytes().decode()
        assert find in data
        with pytest.raises(CodecError) as caught:
            FailureStudy.from_bytes(data.replace(find, replacement, 1).encode(), "r")
        return str(caught.value)

    assert "$.format" in broken("optcc-failures/1", "optcc-failures/2")
    assert "$.trials" in broken('"trials": 60,\n "seed"', '"trials": 0,\n "seed"')
    assert "$.cells[0].outcomes" in broken('"left": "1[0]", "trials": 60', '"left": "1[0]", "trials": 59')
    assert "$.cells[0].pattern" in broken('"pattern": "uniform 1"', '"pattern": "uniform one"')
    assert "must look like" in broken('"left": "1[0]"', '"left": "1(0)"')
    assert "end with the bound" in broken('"64/63"]', '"63/64"]')
    assert "lowest terms" in broken('"64/63"]', '"128/126"]')
    assert "$.runs[0].schedule" in broken('"schedule": "ring"', '"schedule": "rung"')
    first = small().runs[0]
    assert "be at least the bound" in broken(f'"seconds": {first.seconds!r}', '"seconds": 1e-9')


def test_cells_say_what_their_outcomes_say() -> None:
    cell = small().cell("uniform 10", 64)
    assert cell is not None
    drawn = [
        fluid(Left.of(draw(Uniform(10), Cluster(64, NICS), 3, trial)), Cluster(64, NICS)) for trial in range(TRIALS)
    ]
    for column, name in enumerate(COLUMNS):
        times = sorted(float(over[column]) for over in drawn)
        assert cell.quantile(name, Fraction(1, 2)).value == times[TRIALS // 2 - 1]
        assert cell.worst(name) == times[-1]
        assert cell.mean(name).value == pytest.approx(sum(times) / TRIALS)


# The command


def run(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), standalone_mode=False)


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    """A quick study, then the same with two workers: equal bytes, and nothing left beside them."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    done = run("failures", "--quick", "--trials", "30", "-o", str(one), "--json")
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert found["trials"] == 30 and found["over_fault_free"][0]["optimal"]["worst"] >= 1
    assert run("failures", "--quick", "--trials", "30", "-o", str(two), "--jobs", "2").exit_code == 0
    assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]
    assert FailureStudy.read(one).trials == 30


def test_the_command_prints_tables() -> None:
    done = run("failures", "--quick", "--trials", "5")
    assert done.exit_code == 0
    assert "median / p95 / worst of 5 trials" in done.stdout
    assert "Other patterns" in done.stdout and "Simulated" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trials", "0"), "--trials 0: must be from 1 to"),
        (("--trials", "100001"), "--trials 100001: must be from 1 to"),
        (("--jobs", "0"), "--jobs 0: must be from 1 to"),
        (("--seed", "-1"), "--seed -1: must be from 0 to"),
        (("--resume",), "--resume: must come with -o FILE"),
        (("-o", "/nowhere/at/all.json"), "must be a file in a folder that exists"),
    ],
)
@pytest.mark.parametrize("study", ["failures", "training"])
def test_bad_options_are_one_clear_error(study: str, words: tuple[str, ...], said: str) -> None:
    done = run(study, "--quick", *words)
    assert isinstance(done.exception, OptccError)
    assert said in str(done.exception) and done.exception.exit_code == 2


def test_the_command_refuses_the_unfinished_study_of_other_options(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    Partial.open(tmp_path / "r.json.partial", "optcc-failures/1, quick, seed 2", resume=False).add("x", 1)
    refused = run("failures", "--quick", "--trials", "5", "-o", str(output))
    assert isinstance(refused.exception, InputError)
    foreign = run("failures", "--quick", "--trials", "5", "-o", str(output), "--resume")
    assert isinstance(foreign.exception, CodecError)
    assert "must be 'optcc-failures/1, quick, seed 1, trials 5, optcc " in str(foreign.exception)
    assert not output.exists()


# The figure


def drawn_line(figure: Any, gid: str) -> list[tuple[float, float]]:
    """The points of the only line with this id."""
    (found,) = figure.findobj(lambda each: each.get_gid() == gid)
    return [(float(x), float(y)) for x, y in zip(*found.get_data(), strict=True)]


def test_the_figure_draws_the_record() -> None:
    """Medians, percentiles, worst trials and simulated medians of every column, and nothing leaves its panel."""
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")
    from optcc.paper_figures import failure_curves, style

    table = failure_curves.data(small())
    assert [panel.servers for panel in table.panels] == [8, 64]
    figure = failure_curves.draw(table)
    for servers, failed in ((8, (1, 3)), (64, (10,))):
        for name in COLUMNS:
            if name == "ring":
                continue
            cells = [small().cell(f"uniform {count}", servers) for count in failed]
            own = [cell for cell in cells if cell is not None]
            medians = [100 * (cell.quantile(name, Fraction(1, 2)).value - 1) for cell in own]
            p95 = [100 * (cell.quantile(name, Fraction(95, 100)).value - 1) for cell in own]
            worst = [100 * (cell.worst(name) - 1) for cell in own]
            for what, values in (("median", medians), ("p95", p95), ("worst", worst)):
                assert drawn_line(figure, f"{what}:{servers}:{name}") == list(zip(failed, values, strict=True))
    ((failed_nics, median),) = drawn_line(figure, "simulated:8:optimal")
    outcomes = small().cell("uniform 3", 8)
    runs = small().simulated(8, 2**22)
    assert outcomes is not None and failed_nics == 3
    expected = sorted(runs[o.left, "optimal"].over_fault_free for o in outcomes.outcomes for _ in range(o.trials))
    assert median == pytest.approx(100 * (expected[TRIALS // 2 - 1] - 1))
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for line in axes.lines:
            for x, y in drawn_line(figure, str(line.get_gid())):
                assert left <= x <= right and low <= y <= high, line.get_gid()
    assert style.render(figure, ".png").startswith(b"\x89PNG")
    found = failure_curves.numbers(table)
    assert found["64-servers/10-failed/optimal/median-percent"].value == medians[-1]
    assert found["trials"].value == TRIALS


def test_no_text_of_the_figure_is_cut() -> None:
    """Of the committed record: all text lies on the paper."""
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from optcc.paper_figures import failure_curves, style

    figure = failure_curves.draw(failure_curves.data(committed()))
    with style.applied():
        canvas: Any = FigureCanvasAgg(figure)
        box = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height


# The committed record


def test_the_committed_record_is_the_full_study() -> None:
    record = committed()
    assert record.to_bytes() == unstamped(FailureStudy.own_path.read_bytes())
    assert record.trials >= 10_000
    assert record.assumptions == failure_study.assumptions()
    assert [(cell.pattern, cell.servers) for cell in record.cells] == [(str(each), p) for each, p in FULL.patterns]
    for pattern, servers, size_bytes in FULL.simulated:
        cell, runs = record.cell(str(pattern), servers), record.simulated(servers, size_bytes)
        assert cell is not None
        assert {(o.left, name) for o in cell.outcomes for name in SEGMENTS} <= set(runs)


@pytest.mark.parametrize(
    ("pattern", "servers"), sampled([("rail 16", 64), ("uniform 10", 64), ("slow 2", 64)], every=3)
)
def test_committed_cells_are_drawn_again_alike(pattern: str, servers: int) -> None:
    """All trials of three cells."""
    (found,) = [each for each, p in FULL.patterns if (str(each), p) == (pattern, servers)]
    record = committed()
    unit = failure_study._Draw(found, Cluster(servers, NICS), record.seed, record.trials)
    cell = record.cell(pattern, servers)
    assert cell is not None
    drawn = [(left, count, [Fraction(each) for each in over]) for left, count, over in failure_study._draw(unit)]
    assert drawn == [(each.left, each.trials, list(each.over_fault_free)) for each in cell.outcomes]


def test_committed_times_are_the_formulas() -> None:
    """Every outcome of every cell up to 16 servers."""
    known: dict[tuple[str, int], tuple[Fraction, ...]] = {}
    for cell in committed().cells:
        for outcome in cell.outcomes if cell.servers <= 16 else ():
            key = outcome.left, cell.servers
            if key not in known:
                known[key] = fluid(Left.parse(outcome.left), Cluster(cell.servers, NICS))
            assert outcome.over_fault_free == known[key], key


def test_committed_runs_are_simulated_again_alike() -> None:
    """The smallest case of every schedule, within half a percent."""
    for name, segments in SEGMENTS.items():
        run = min((run for run in committed().runs if run.schedule == name), key=lambda run: (run.transfers, run.left))
        again = finite(name, Left.parse(run.left), Cluster(run.servers, NICS), run.size_bytes, segments)
        assert again.seconds == pytest.approx(run.seconds, rel=0.005)
        assert replace_seconds(again) == replace_seconds(run)


def replace_seconds(run: SimulatedRun) -> tuple[str, str, str, tuple[int, ...]]:
    return run.left, run.schedule, run.built, run.tried


def test_the_committed_record_shows_what_the_papers_state() -> None:
    """OptCC: a server that lost up to half of its NICs costs 2 to 6 % on 32 servers, the ring 14 to 100 %. R2CCL: with
    1 to 10 failed NICs among 512, its AllReduce costs about half of what Balance does."""
    record = committed()
    for lost in (1, 2, 3, 4):
        cell = record.cell(f"one server {lost}", 32)
        assert cell is not None
        assert 0.01 < cell.worst("optcc") - 1 < 0.06
        assert cell.worst("ring") == pytest.approx(NICS / (NICS - lost))
    for failed in range(1, 11):
        cell = record.cell(f"uniform {failed}", 64)
        assert cell is not None
        ours, theirs, balance = (cell.mean(name).value - 1 for name in ("optimal", "r2ccl-allreduce", "r2ccl-balance"))
        assert ours < 0.02 < theirs < 0.6 * balance


def test_other_numbers_of_a_record_are_possible() -> None:
    """A record of other options is read as well."""
    other = replace(small(), title="another")
    assert FailureStudy.from_bytes(other.to_bytes(), "x").title == "another"


def tables() -> list[list[str]]:
    """The tables of docs/studies.md, from the committed record."""
    record = committed()
    names = [name for name in COLUMNS if name != "ring"]

    def three(cell: failure_study.Cell, name: str) -> str:
        values = [cell.quantile(name, share).value for share in (Fraction(1, 2), Fraction(95, 100))]
        return " / ".join(f"{100 * (value - 1):.1f}" for value in (*values, cell.worst(name)))

    cells = [record.cell(f"uniform {failed}", servers) for servers in (8, 64, 1024) for failed in (1, 2, 5, 10)]
    fluid_times = [
        [str(cell.servers), cell.pattern.split()[1], *(three(cell, name) for name in names)]
        for cell in cells
        if cell is not None
    ]
    runs = record.simulated(32, 2**30)
    lost = []
    for count in (1, 2, 3, 4):
        cell = record.cell(f"one server {count}", 32)
        assert cell is not None
        left = cell.outcomes[0].left
        both = [
            f"{100 * (cell.worst(name) - 1):.1f} ({100 * (runs[left, name].over_fault_free - 1):.1f})"
            for name in ("ring", "r2ccl-allreduce", "optcc", "optimal")
        ]
        lost.append([str(count), *both])
    wanted = [("16", "64MiB"), ("16", "1GiB"), ("64", "1GiB")]
    means = [
        [servers, size, failed.split()[1], *rest]
        for servers, size, failed, *rest in record.finite().rows
        if (servers, size) in wanted and failed in ("uniform 1", "uniform 2", "uniform 4", "uniform 10")
    ]
    return [["| " + " | ".join(row) + " |" for row in table] for table in (fluid_times, lost, means)]


def test_the_manual_has_the_numbers_of_the_record() -> None:
    text = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
    for table in tables():
        assert "\n".join(table) in text
