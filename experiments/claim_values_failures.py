"""Our values beside papers' claims about failures, training, inference and observation: each a function of a record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from fractions import Fraction

from optcc.experiments.chunk_counts import ALLREDUCE as ALLREDUCE_CHUNKED
from optcc.experiments.chunk_counts import BALANCE, ChunkCounts
from optcc.experiments.claim_values import ONE_OF_EIGHT, over, spread
from optcc.experiments.claims import ClaimValue
from optcc.experiments.failover_speed import FailoverSpeed, percentile
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.late_rank import OURS as LATE_OURS
from optcc.experiments.late_rank import RING as LATE_RING
from optcc.experiments.late_rank import LateRank
from optcc.experiments.mid_collective import MidCollective
from optcc.experiments.observation_cost import (
    ALONE,
    DRAINED,
    FABRIC,
    LONG,
    LOOPBACK,
    NORMS,
    OFF,
    ON,
    SHORT,
    TENTH,
    ObservationCost,
)
from optcc.experiments.recovery_models import ADAPCC, RecoveryModels
from optcc.experiments.reranking import Reranking
from optcc.experiments.schedule_record import ScheduleRatios
from optcc.experiments.swarm import SwarmRuns
from optcc.experiments.training import TrainingStudy
from optcc.experiments.training_failures import TrainedRun, TrainingFailures
from optcc.units import show_size

R2CCL, OPTIMUM = ("r2ccl-balance", "r2ccl-allreduce"), ("optimal",)
ALLREDUCE = ("r2ccl-allreduce",)
REPORTED, SILENT = ("down", "carrier"), ("blackhole", "blackhole-out", "blackhole-in")
"""Failures of a NIC that its host is told of, and those that only show by silence."""


_GPU_LESS = "a GPU less (AdapCC, a model) over what R2CCL states, data parallel over 16 and 32"


# --- Training and inference -------------------------------------------------------------------------------------------


def training(job: str, failed: int, schedules: tuple[str, ...] = R2CCL) -> Callable[[TrainingStudy], ClaimValue]:
    """The mean overhead of a step of the jobs whose names begin so, with so many failed NICs, in percent."""

    def compute(record: TrainingStudy) -> ClaimValue:
        return spread(_overheads(record, job, failed, schedules), " %", 3, f"{job}, {_nics(failed)}")

    return compute


def training_at_95(job: str, failed: int) -> Callable[[TrainingStudy], ClaimValue]:
    """As `training` of R2CCL-AllReduce, with the 95th percentiles in the text."""

    def compute(record: TrainingStudy) -> ClaimValue:
        means = training(job, failed, ALLREDUCE)(record)
        cells = [each for each in record.cells if each.job.startswith(job) and each.pattern == f"uniform {failed}"]
        high = spread((100 * each.of(ALLREDUCE[0]).p95 for each in cells), " %", 1, "")
        return ClaimValue(means.least, means.most, f"{means.text}, the mean; 95th percentile {high.text}")

    return compute


def training_kept(job: str) -> Callable[[TrainingStudy], ClaimValue]:
    """The share of the healthy throughput that is kept with one failed NIC, in percent."""

    def compute(record: TrainingStudy) -> ClaimValue:
        kept = [100 / (1 + each / 100) for each in _overheads(record, job, 1, R2CCL)]
        return spread(kept, " %", 3, f"{job}, {_nics(1)}")

    return compute


def _overheads(record: TrainingStudy, job: str, failed: int, schedules: tuple[str, ...]) -> Iterator[float]:
    for cell in record.cells:
        if cell.job.startswith(job) and cell.pattern == f"uniform {failed}":
            for name in schedules:
                yield 100 * cell.of(name).mean


def _nics(failed: int) -> str:
    return f"{failed} failed NIC{'s' if failed > 1 else ''}"


def first_token(schedule: str) -> Callable[[TrainingStudy], ClaimValue]:
    """The overhead of the first token with one failed NIC, in percent."""

    def compute(record: TrainingStudy) -> ClaimValue:
        case = next(each for each in record.served if (each.schedule, each.failed) == (schedule, 1))
        further = f"each further token {100 * case.token_overhead:.1f} %"
        return spread([100 * case.first_token_overhead], " %", 1, f"first token, {case.serving}; {further}")

    return compute


def _step_of(run: TrainedRun, state: str) -> float:
    steps = next(steps for name, steps in run.phases() if name == state)
    found = run.median_s(steps)
    if found is None:
        raise LookupError(state)
    return found


def _with_failures(record: TrainingFailures, backend: str) -> Iterator[TrainedRun]:
    return (run for run in record.runs if run.backend == backend and run.events)


def step_with_nic_down(record: TrainingFailures) -> ClaimValue:
    """By how much a measured step is longer with a NIC down, of a job that its network limits, in percent."""
    runs = [run for run in _with_failures(record, "optcc") if run.plans == "change"]
    longer = [over(_step_of(run, "down") / _step_of(run, "healthy")) for run in runs]
    left = over(record.bound_s(runs[0], "down") / record.bound_s(runs[0], "healthy"))
    where = f"a NIC of {record.hosts} x {record.nics} down, network-bound (T* of the gradients {left:+z.0f} %)"
    return spread(longer, " %", 0, where)


def perplexity(record: TrainingFailures) -> ClaimValue:
    """By how much the last perplexity differs from the healthy job's with failures and unchanged plans, in percent."""

    def difference(run: TrainedRun) -> float:
        healthy = record.healthy(run)
        if healthy is None or run.ended:
            raise LookupError(run.name)
        return 100 * abs(math.exp(run.losses[-1] - healthy.losses[-1]) - 1)

    runs = list(_with_failures(record, "optcc"))
    stay = [run for run in runs if run.plans == "stay"]
    same = sum(record.is_same(run) for run in stay)
    change = max((difference(run) for run in runs if run.plans != "stay"), default=0.0)
    what = f"{record.parameters / 1e6:.0f} M parameters, {record.steps} steps"
    where = f"{what}, {same} of {len(stay)} jobs bit-identical; with new plans {change:.3f} %"
    return spread((difference(run) for run in stay), " %", 3, where)


# --- Schedules of R2CCL -----------------------------------------------------------------------------------------------


def balance_kept(record: ScheduleRatios) -> ClaimValue:
    """What share of the fault-free bandwidth R2CCL-Balance keeps with one NIC of eight lost, in percent."""
    cases = [each for each in record.select("r2ccl-balance", straggler=True) if each.slowdown == ONE_OF_EIGHT]
    return spread((100 / each.over_fault_free for each in cases), " %", 1, "AllReduce, one NIC of eight lost")


def optimal_kept(record: FailureStudy) -> ClaimValue:
    """The same of the bound."""
    cells = [cell for failed, cell in record.uniform() if failed == 1]
    return spread((100 / cell.worst("optimal") for cell in cells), " %", 1, "AllReduce, 8 to 1024 servers")


def allreduce_begins(record: ScheduleRatios) -> ClaimValue:
    """The least share lost at which R2CCL-AllReduce is simulated to be faster than Balance on all clusters, or 1."""

    def faster(slowdown: Fraction) -> bool:
        seconds = {
            (name, each.ranks): each.seconds
            for name in R2CCL
            for each in record.select(name, straggler=True)
            if each.slowdown == slowdown
        }
        ranks = [p for name, p in seconds if name == R2CCL[0] and (R2CCL[1], p) in seconds]
        return bool(ranks) and all(seconds[R2CCL[1], p] < seconds[R2CCL[0], p] for p in ranks)

    slowdowns = {each.slowdown for each in record.select(R2CCL[1], straggler=True)}
    lost = min((float(1 - 1 / each) for each in slowdowns if each is not None and faster(each)), default=1.0)
    return spread([lost], "", 3, "lost: the least that was simulated at which it is faster")


def overhead_exponent(schedule: str) -> Callable[[FailureStudy], ClaimValue]:
    """How fast the overhead with one failed NIC grows from 64 to 256 GPUs: the exponent of the number of GPUs."""

    def compute(record: FailureStudy) -> ClaimValue:
        few, many = record.cell("uniform 1", 8), record.cell("uniform 1", 32)
        if few is None or many is None:
            raise LookupError("uniform 1")
        ratio = (many.worst(schedule) - 1) / (few.worst(schedule) - 1)
        return spread([math.log(ratio) / math.log(32 / 8)], "", 2, f"exponent, `{schedule}`, 64 to 256 GPUs")

    return compute


RERANKED = 4
"""On how many servers R2CCL's text has its larger testbed: one rail lost on each of two of them."""


def reranking_gain(record: Reranking) -> ClaimValue:
    """By how much re-ranking raises the bandwidth of the rings, in percent."""
    gains = [over(row.gain) for row in record.rows]
    case = next(row for row in record.rows if (row.servers, row.degraded, row.lost) == (RERANKED, 2, 1))
    others = f"{min(gains):+z.0f} to {max(gains):+z.0f} % in {len(gains)} cases"
    return spread([over(case.gain)], " %", 1, f"{RERANKED} servers, 2 lost a rail each; {others}")


def reranking_bound(record: Reranking) -> ClaimValue:
    """By how much a schedule at the bound would raise it, in percent."""
    case = next(row for row in record.rows if (row.servers, row.degraded, row.lost) == (RERANKED, 2, 1))
    ours = over(case.seconds["nccl-ring"] / case.seconds["equal-trees"])
    return spread([over(case.seconds["nccl-ring"] / case.bound_s)], " %", 1, f"the same; `equal-trees` {ours:.1f} %")


def most_chunks(record: ChunkCounts) -> ClaimValue:
    """R2CCL-AllReduce in the most chunks over the fault-free ring; in one, and Balance, in the text."""
    rows = record.of(ALLREDUCE_CHUNKED)
    balance = record.of(BALANCE)[-1].over_fault_free
    where = f"{rows[-1].chunks} chunks; {rows[0].over_fault_free:.3f}x in one, Balance {balance:.3f}x"
    return spread([rows[-1].over_fault_free], "x", 3, where)


def bound_of_chunks(record: ChunkCounts) -> ClaimValue:
    """The bound on those hosts over the fault-free ring; ours in the most chunks in the text."""
    ours = min(record.of(name)[-1].over_fault_free for name in ("optcc", "optimal"))
    return spread([record.bound], "x", 3, f"our best in {record.of('optcc')[-1].chunks} chunks {ours:.3f}x")


# --- A late rank ------------------------------------------------------------------------------------------------------

LATE_FEW, LATE_MANY = 8, 256
"""On how many GPUs StragglAR is measured, and simulated."""


def _late_and_slow(record: LateRank, ranks: int) -> str:
    ours = min(min(record.row(ranks, 0.5, name).seconds) for name in LATE_OURS)
    ring = min(record.row(ranks, 0.5, LATE_RING).seconds)
    return f"late and at half its rate too: {record.gain(ranks, 0.5):.2f}x of the ring, our best {ring / ours:.2f}x"


def time_saved_if_late(record: LateRank) -> ClaimValue:
    """By how much StragglAR takes less time than a ring, from the arrival of the late rank, in percent."""
    saved = 100 * (1 - 1 / record.gain(LATE_FEW))
    return spread([saved], " % of the time", 1, f"{LATE_FEW} ranks; {_late_and_slow(record, LATE_FEW)}")


def speed_up_if_late(record: LateRank) -> ClaimValue:
    """The ring's time over StragglAR's, from the arrival of the late rank."""
    where = f"{LATE_MANY} ranks; {_late_and_slow(record, LATE_MANY)}"
    return spread([record.gain(LATE_MANY)], "x", 2, where)


# --- Failover ---------------------------------------------------------------------------------------------------------


def stalls(record: FailoverSpeed) -> ClaimValue:
    """Median stalls when a NIC fails and its host is told, in ms; those that only show by silence in the text."""

    def medians(kinds: tuple[str, ...]) -> list[float]:
        return [1e3 * percentile(record.stalls_s(kind), 0.5) for kind in kinds]

    silent = medians(SILENT)
    where = f"link lost; packets dropped silently: {min(silent):.0f} to {max(silent):.0f} ms"
    return spread(medians(REPORTED), " ms", 0, where)


def survived(record: FailoverSpeed) -> ClaimValue:
    """The share of injected failures after which all elements were right, in percent."""
    good = sum(not trial.wrong for trial in record.trials)
    kinds = len({trial.kind for trial in record.trials})
    share = 100 * good / len(record.trials)
    return ClaimValue(
        share, share, f"{good} of {len(record.trials)} injected failures of {kinds} kinds, no job restarted"
    )


def seeds(record: SwarmRuns) -> ClaimValue:
    """The share of seeded runs of the protocol without a violation, in percent."""
    first, last = record.seeds
    bad = len({each.seed for each in record.violations})
    share = 100 * (1 - bad / (last - first))
    return ClaimValue(share, share, f"{last - first - bad:,} of {last - first:,} seeded runs of the protocol")


def cut_iteration(record: MidCollective) -> ClaimValue:
    """The time of a run in which a NIC goes down over a healthy one."""
    row = next(each for each in record.rows if (each.state, each.arm) == ("NIC down", "slices"))
    times = [each.seconds / row.healthy_s for each in row.trials]
    where = f"{record.hosts}, {show_size(record.size_bytes)}, half of a host lost"
    return spread(times, "x", 2, where)


def cut_bound(record: MidCollective) -> ClaimValue:
    """The least time of the same over a healthy one, the NIC lost at the same moments."""
    row = next(each for each in record.rows if (each.state, each.arm) == ("NIC down", "slices"))
    return spread((each.least_s / row.bound_s for each in row.trials), "x", 2, "lost at the same moments")


# --- Observation ------------------------------------------------------------------------------------------------------


def tap_cost(record: ObservationCost) -> ClaimValue:
    """What norms of all chunks, or a tenth of them in full, cost a long message, in percent."""

    def costs(bed: str) -> list[float]:
        spot = (bed, LONG, DRAINED)
        off_s = statistics.median(record.row(spot, OFF).seconds)
        return [100 * record.cost_s(spot, case) / off_s for case in (NORMS, TENTH)]

    slow, fast = costs(FABRIC), costs(LOOPBACK)
    shaped = f"network-bound {min(slow):+z.2f} to {max(slow):+z.2f} %"
    text = f"{shaped}, processor-bound {min(fast):+z.1f} to {max(fast):+z.1f} %, AllReduce of {show_size(LONG)}"
    return ClaimValue(min(slow + fast), max(slow + fast), text)


def recorder_cost(record: ObservationCost) -> ClaimValue:
    """What status and recorder cost a collective of 1 KiB, in us."""
    spots = [row for row in record.rows if (row.size_bytes, row.beside, row.case) == (SHORT, ALONE, ON)]
    values = (1e6 * record.cost_s((row.bed, row.size_bytes, row.beside), row.case) for row in spots)
    return spread(values, " µs", 1, f"status and recorder, a collective of {show_size(SHORT)}, {len(spots)} beds")


def recovery_over_r2ccl(name: str) -> Callable[[RecoveryModels], ClaimValue]:
    """For how many times as long as with R2CCL a failure stops a job under a model."""

    def compute(record: RecoveryModels) -> ClaimValue:
        return spread([record.over_r2ccl(name)], "x", 1, "of the recovery times that pages state")

    return compute


def gpus_gone(record: RecoveryModels) -> ClaimValue:
    """A step's overhead under AdapCC, without the GPU of a failed NIC, over what R2CCL states of the same job."""
    return spread(record.one_down_over_r2ccl(ADAPCC), "x", 1, _GPU_LESS)


def gpus_gone_saved(record: RecoveryModels) -> ClaimValue:
    """By how much the overhead that R2CCL states is below that, in percent."""
    saved = [100 * (1 - 1 / ratio) for ratio in record.one_down_over_r2ccl(ADAPCC)]
    return spread(saved, " %", 1, f"training, {_GPU_LESS}")
