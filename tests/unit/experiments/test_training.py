"""The training step is its closed forms where they exist, and the record is what the model gives."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optcc.commands.study import command
from optcc.errors import CodecError, InputError
from optcc.experiments import training
from optcc.experiments.cells import Partial, RecordCells
from optcc.experiments.failure_model import Cluster, Damage, Left, Uniform, draw
from optcc.experiments.failure_times import COLUMNS, fluid
from optcc.experiments.made import unstamped
from optcc.experiments.training import FULL, TrainingPlan, TrainingStudy, healthy_step, make, serve
from optcc.experiments.training_jobs import CLAIMS, JOBS, SERVINGS
from optcc.experiments.training_model import (
    NICS,
    NOTHING_LOST,
    TrainingJob,
    allreduce_s,
    exposed_s,
    finish,
    step_s,
    steps_s,
)
from optcc.experiments.workers import Workers

DEAD = Fraction(0)
ONE_LOST: Damage = {0: (DEAD,)}
PLAIN = next(job for job in JOBS if job.name == "6.7B on 64 servers")
PIPED = next(job for job in JOBS if job.name == "175B on 128 servers")
LLAMA = next(job for job in JOBS if job.name == "405B on 2048 servers")
TINY = TrainingPlan(((JOBS[1], Uniform(2)), (PIPED, Uniform(3))))


def over(damage: Damage, job: TrainingJob, schedule: str) -> Fraction:
    """The AllReduce of the whole group over the fault-free ring."""
    assert job.group is not None
    return fluid(Left.of(damage), job.group)[COLUMNS.index(schedule)]


def ring_s(job: TrainingJob, size_bytes: int) -> Fraction:
    """The fault-free ring, written out."""
    p = job.servers // job.pipeline
    return Fraction(2 * (p - 1), p) * size_bytes / (8 * job.nic_rate)


# Closed forms of a step


@pytest.mark.parametrize("schedule", COLUMNS)
def test_without_overlap_a_step_is_compute_and_then_the_allreduces(schedule: str) -> None:
    job = replace(PLAIN, overlap=False)
    size = job.model.parameters * job.gradient_bytes
    latencies = len(job.buckets_bytes) * job.latency_s
    wanted = job.compute_s + latencies + ring_s(job, size) * over(ONE_LOST, job, schedule)
    assert step_s(job, ONE_LOST, schedule) == wanted


@pytest.mark.parametrize("overlap", [False, True])
def test_one_bucket_has_nothing_to_overlap(overlap: bool) -> None:
    """It is ready when the backward pass ends."""
    size = PLAIN.model.parameters * PLAIN.gradient_bytes
    job = replace(PLAIN, bucket_bytes=size, overlap=overlap)
    assert job.buckets_bytes == (size,)
    wanted = job.compute_s + job.latency_s + ring_s(job, size) * over(ONE_LOST, job, "r2ccl-balance")
    assert step_s(job, ONE_LOST, "r2ccl-balance") == wanted


def test_with_full_overlap_only_the_last_bucket_is_exposed() -> None:
    """Where a bucket is reduced faster than the next one becomes ready."""
    job = replace(PLAIN, bucket_bytes=PLAIN.model.parameters * PLAIN.gradient_bytes // 100)
    assert len(set(job.buckets_bytes)) == 1
    last = allreduce_s(job, job.bucket_bytes, Left.of(ONE_LOST), "ring")
    assert last < job.backward_s / 100
    assert step_s(job, ONE_LOST, "ring") == job.compute_s + last


@pytest.mark.parametrize("count", [1, 2, 8, 50])
@pytest.mark.parametrize("rate", [10**6, 10**8, 10**9, 10**10])
def test_equal_buckets_end_with_the_last_one_or_without_a_pause(count: int, rate: int) -> None:
    """max(ready + t, first ready + count t): the last bucket alone, or the stream busy from the first on."""
    size = PLAIN.model.parameters * PLAIN.gradient_bytes
    job = replace(PLAIN, bucket_bytes=size // count, nic_rate=Fraction(rate))
    assert job.buckets_bytes == (size // count,) * count
    each = allreduce_s(job, job.bucket_bytes, Left(()), "optimal")
    gap = job.backward_s / count
    wanted = max(each, count * each - (count - 1) * gap)
    assert exposed_s(job, Left(()), "optimal") == wanted


def test_a_stream_is_the_longest_chain() -> None:
    """Its end is the largest of ready_i + lasting_i + ... + lasting_last, for random transfers."""
    rng = random.Random(5)
    for _ in range(50):
        ready = sorted(Fraction(rng.randrange(100)) for _ in range(rng.randint(1, 12)))
        lasting = [Fraction(rng.randrange(1, 30)) for _ in ready]
        assert finish(ready, lasting) == max(ready[i] + sum(lasting[i:]) for i in range(len(ready)))


def test_a_stage_on_one_server_reduces_nothing_between_servers() -> None:
    job = replace(PIPED, pipeline=128, name="alone")
    assert job.group is None and job.latency_s == 0
    assert exposed_s(job, Left(()), "ring") == 0
    assert step_s(job, {}, "ring") == job.compute_s + 2 * 127 * job.hop_s


def test_stages_are_through_one_backward_pass_after_the_other() -> None:
    """So the last stage's AllReduce has most time: with a slow server there, nothing or little is seen of it."""
    healthy = step_s(PIPED, {}, "ring-failover")
    data = PIPED.servers // PIPED.pipeline
    lost = (DEAD,) * 4
    times = [step_s(PIPED, {stage * data: lost}, "ring-failover") for stage in range(PIPED.pipeline)]
    assert times == sorted(times, reverse=True)
    tail = exposed_s(PIPED, Left.of({0: lost}), "ring-failover")
    hops = 2 * (PIPED.pipeline - 1) * PIPED.hop_s
    # Stage 0 stands at one end: one hop passes its slow server, twice.
    assert times[0] == PIPED.compute_s + hops + 2 * PIPED.hop_s + tail
    assert healthy == PIPED.compute_s + hops + exposed_s(PIPED, Left(()), "ring-failover")


def test_slow_servers_of_one_pipeline_add_up_and_those_of_two_do_not() -> None:
    """A step waits for the slowest pipeline: where activations are all that a failure touches."""
    job = replace(PIPED, servers=16, pipeline=8, nic_rate=Fraction(10**9), batch_sequences=1536, name="two pipelines")
    lost = (DEAD,) * 4
    one = step_s(job, {15: lost}, "optimal")
    same, other = step_s(job, {15: lost, 13: lost}, "optimal"), step_s(job, {15: lost, 12: lost}, "optimal")
    assert one < other <= same


def test_more_damage_never_helps_and_no_schedule_beats_the_optimum() -> None:
    for trial in range(30):
        damage = dict(draw(Uniform(6), Cluster(PIPED.servers, NICS), 8, trial))
        times = dict(zip(COLUMNS, steps_s(PIPED, damage), strict=True))
        assert times["optimal"] == min(times.values())
        assert max(times.values()) == times["ring-failover"]
        less = dict(list(damage.items())[1:])
        for schedule in ("ring", "r2ccl-balance", "optimal"):
            assert step_s(PIPED, less, schedule) <= times[schedule]


# Named jobs


def test_compute_is_what_the_papers_say() -> None:
    """GPT-3 on 1,024 A100: 300 G tokens in 34 days. Llama 3 405B: 15.6 T tokens in about the 54 days of its report, or
    somewhat more, since that run grew its batch and lost time."""
    steps = 300e9 / (PIPED.batch_sequences * PIPED.sequence_tokens)
    assert 33 < steps * float(PIPED.compute_s) / 86_400 < 36
    steps = 15.6e12 / (LLAMA.batch_sequences * LLAMA.sequence_tokens)
    assert 54 < steps * float(LLAMA.compute_s) / 86_400 < 80
    assert LLAMA.gpus == 16_384 and LLAMA.replicas == 128 and LLAMA.microbatches == 16


def test_buckets_hold_all_gradients() -> None:
    for job in JOBS:
        assert sum(job.buckets_bytes) == -(-job.model.parameters // job.pipeline) * job.gradient_bytes
        assert max(job.buckets_bytes) <= job.bucket_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor": 3}, "tensor 3: must divide 8"),
        ({"pipeline": 7}, "pipeline 7: must divide 64"),
        ({"batch_sequences": 1000}, "microbatches of all replicas 512: must divide 1000"),
        ({"bucket_bytes": 0}, "must be above zero"),
        ({"nic_rate": Fraction(0)}, "must be above zero"),
        ({"achieved_flops_per_s": 10**18}, "must be at most the GPU's"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(PLAIN, **changes)


# Inference


def test_inference_is_compute_and_two_allreduces_a_layer() -> None:
    """On two servers any schedule needs the slower one's time."""
    (serving,) = SERVINGS
    left = Left.parse("1[0]")
    size = 2000 * 16_384 * 2
    wait = 2 * 126 * (2 * serving.message_latency_s + Fraction(8, 7) * size / (8 * serving.nic_rate))
    flops = 2000 * 2 * (405 * 10**9 + 126 * 16_384 * 2000)
    compute = flops / (16 * serving.gpu.flops_per_s * Fraction(1, 2))
    assert serving.first_token_s(left, "r2ccl-balance") == compute + wait
    assert serving.first_token_s(left, "optimal") == compute + wait
    assert serving.token_s(left, "ring-failover") > serving.token_s(left, "optimal") > serving.token_s(Left(()), "ring")
    cases = list(serve(serving))
    assert cases[0].failed == 0 and cases[0].first_token_overhead == 0
    assert all(case.first_token_overhead > case.token_overhead > 0 for case in cases[1:])


# The record


@cache
def tiny() -> TrainingStudy:
    return make(TINY, trials=40, seed=2)


@cache
def committed() -> TrainingStudy:
    return TrainingStudy.read()


def test_the_same_options_give_the_same_bytes_with_any_number_of_workers() -> None:
    assert make(TINY, trials=40, seed=2, cells=RecordCells(workers=Workers(2))).to_bytes() == tiny().to_bytes()
    assert make(TINY, trials=40, seed=3).to_bytes() != tiny().to_bytes()


def test_a_record_is_read_as_it_was_written() -> None:
    assert TrainingStudy.from_bytes(tiny().to_bytes(), "r") == tiny()
    assert not {"machine", "versions"} & set(json.loads(tiny().to_bytes()))


def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    partial = Partial.open(tmp_path / "p", "this", resume=False)
    make(TrainingPlan(TINY.cells[:1]), trials=40, seed=2, cells=RecordCells(partial))
    again = make(TINY, trials=40, seed=2, cells=RecordCells(Partial.open(tmp_path / "p", "this", resume=True)))
    assert again.to_bytes() == tiny().to_bytes()


def test_cells_are_what_the_steps_say() -> None:
    """Every trial computed once more, in floating point."""
    job, cell = PIPED, tiny().cells[1]
    healthy = float(step_s(job, {}, "ring"))
    damages = [draw(Uniform(3), Cluster(job.servers, NICS), 2, trial) for trial in range(40)]
    for place, name in enumerate(COLUMNS):
        overheads = sorted(float(steps_s(job, damage)[place]) / healthy - 1 for damage in damages)
        found = cell.of(name)
        assert found.worst == pytest.approx(overheads[-1], abs=1e-11)
        assert found.median == pytest.approx(overheads[19], abs=1e-11)
        assert found.mean == pytest.approx(sum(overheads) / 40, abs=1e-11)
        assert found.mean_low <= found.mean <= found.mean_high


@pytest.mark.parametrize(
    ("find", "replacement", "said"),
    [
        ("optcc-training/1", "optcc-training/0", r"\$\.format"),
        ('"trials": 40,\n "seed"', '"trials": 0,\n "seed"', r"\$\.trials"),
        ('{"job": "2.7B on 4 servers", "pattern"', '{"job": "nobody", "pattern"', r"\$\.cells\[0\]\.job"),
        ('{"schedule": "ring-failover"', '{"schedule": "ring"', r"\$\.cells\[0\]\.overheads"),
        ('"worst": 0.', '"worst": -0.', "median <= p95 <= worst"),
        ('"compute_s": ', '"compute_s": -', r"\$\.jobs\[0\]\.step_s"),
    ],
)
def test_broken_records_are_refused(find: str, replacement: str, said: str) -> None:
    data = tiny().to_bytes().decode()
    assert find in data
    with pytest.raises(CodecError, match=said):
        TrainingStudy.from_bytes(data.replace(find, replacement, 1).encode(), "r")


def test_the_command_writes_and_prints(tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    words = ["training", "--quick", "--trials", "10", "-o", str(output)]
    done = CliRunner().invoke(command, words, standalone_mode=False)
    assert done.exit_code == 0, done.exception
    assert "mean / worst of 10 trials" in done.stdout and "Inference" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    again = CliRunner().invoke(command, ["training", "--quick", "--trials", "10", "--json"], standalone_mode=False)
    assert json.loads(again.stdout) == json.loads(unstamped(output.read_bytes()))


# The committed record


def test_the_committed_record_is_the_full_study_of_this_code() -> None:
    record = committed()
    assert record.to_bytes() == unstamped(TrainingStudy.own_path.read_bytes())
    assert record.trials >= 10_000
    assert [(cell.job, cell.pattern) for cell in record.cells] == [(job.name, str(p)) for job, p in FULL.cells]
    assert record.jobs == tuple(healthy_step(job) for job in JOBS)
    assert record.served == tuple(case for serving in SERVINGS for case in serve(serving))


def test_a_committed_cell_is_drawn_again_alike() -> None:
    record = committed()
    job, pattern = FULL.cells[2 + 2]
    cell = next(each for each in record.cells if (each.job, each.pattern) == (job.name, str(pattern)))
    again = training._work(training._Unit(job, pattern, record.seed, record.trials))
    assert [each["mean"] for each in again] == [each.mean for each in cell.overheads]
    assert [each["worst"] for each in again] == [each.worst for each in cell.overheads]


def test_the_committed_record_shows_what_r2ccl_states() -> None:
    """With one failed NIC: less than 1 % in training where gradients overlap the backward pass, less than 3 % in
    inference; and with its AllReduce about half of what Balance costs where nothing overlaps."""
    for cell in committed().cells:
        if cell.pattern == "uniform 1" and "SimAI" not in cell.job:
            assert cell.of("r2ccl-allreduce").worst < 0.01
            assert cell.of("optimal").worst < 0.001
    assert all(c.first_token_overhead < 0.03 for c in committed().served if c.failed == 1 and c.schedule == "optimal")
    bare = next(c for c in committed().cells if c.job.endswith("no overlap") and c.pattern == "uniform 1")
    assert 0.4 < bare.of("r2ccl-allreduce").mean / bare.of("r2ccl-balance").mean < 0.6


def test_both_rates_of_simai_enclose_what_r2ccl_simulated() -> None:
    """1.5 % with one failed NIC; 4.3 % with ten, as the 95th percentile of trials."""
    found = {(cell.job[-10:], cell.pattern): cell.of("r2ccl-allreduce") for cell in committed().cells}
    assert found["400 Gbit/s", "uniform 1"].mean < 0.015 < found["200 Gbit/s", "uniform 1"].mean
    assert found["400 Gbit/s", "uniform 10"].p95 < 0.043 < found["200 Gbit/s", "uniform 10"].p95
    assert found["200 Gbit/s", "uniform 10"].mean < 0.043


def test_a_claim_is_explained_by_the_share_that_is_exposed() -> None:
    """With nothing to hide it, a step takes longer by the exposed share times what the AllReduce does."""
    record = committed()
    for claim in CLAIMS:
        rows = [each for each in record.claims if each.pattern == str(claim.pattern)]
        assert [each.schedule for each in rows] == list(COLUMNS)
        for job in JOBS:
            if not job.overlap and job.servers == claim.servers:
                share = float(exposed_s(job, NOTHING_LOST, "optimal") / step_s(job, {}, "optimal"))
                cell = next(c for c in record.cells if (c.job, c.pattern) == (job.name, str(claim.pattern)))
                for row in rows:
                    # What is left of the difference is the latency, which does not grow with failures.
                    overhead = cell.of(row.schedule)
                    assert overhead.mean / share == pytest.approx(row.claimed / row.for_mean, rel=0.1)
                    assert overhead.worst / share == pytest.approx(row.claimed / row.for_worst, rel=0.1)
    again = tuple(each for claim in CLAIMS for each in training.explain(claim, record.seed, record.trials))
    assert again == record.claims


def test_the_manual_has_the_shares_of_the_record() -> None:
    text = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
    one, ten = ({row.schedule: row for row in committed().claims if row.pattern == f"uniform {k}"} for k in (1, 10))
    for name, label in (("r2ccl-balance", "`ring`, `r2ccl-balance`"), ("r2ccl-allreduce", "`r2ccl-allreduce`")):
        shares = one[name].for_mean, ten[name].for_mean, ten[name].for_p95, ten[name].for_worst
        assert f"| {label} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |" in text


def test_the_manual_has_the_numbers_of_the_record() -> None:
    text = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in text


def table() -> list[str]:
    """The table of docs/studies.md, from the committed record."""
    rows = []
    for cell in committed().cells:
        failed = cell.pattern.removeprefix("uniform ").removeprefix("instant ")
        if failed in ("1", "2", "10", "llama3-network 3d"):
            shown = (cell.of(name) for name in COLUMNS if name != "ring")
            both = [f"{100 * each.mean:.3f} / {100 * each.worst:.3f}" for each in shown]
            rows.append("| " + " | ".join([cell.job, failed, *both]) + " |")
    return rows
