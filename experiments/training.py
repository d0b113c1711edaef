"""What failed NICs cost a training step or an answer of a language model: a model of time, trials, and a record.

A step has a compute part, taken from the FLOP/s that a run of that kind was reported to reach, and an AllReduce of the
gradients among the servers of each pipeline stage:

    compute_s = tokens * f (P + 2 L h s) / (GPUs * achieved FLOP/s)         P parameters, L layers, h hidden, s sequence

with f = 6 FLOPs for each parameter and token, or 8 if activations are computed again in the backward pass; 2 L h s is
attention. Of m microbatches on S pipeline stages (1F1B, one chunk a stage) each takes compute_s/(m + S - 1), a third of
it forward. Gradients become ready during the backward pass of the last microbatch, the last layer's first, in buckets
of equal size; one communication stream reduces one bucket after the other (`finish`). Stage j is through with its
backward pass j backward times before stage 0, plus what activations take between stages. The step ends with the last
bucket of the slowest stage.

Who uses the NICs: the AllReduce among the servers of a stage, and activations between stages. Tensor-parallel groups
are inside a server, on its fabric, which is never the bottleneck; so is the part of an AllReduce inside a server. The
two uses are taken not to slow each other down, the optimizer to take no time, and steps not to vary. The AllReduce
takes `latency_s` and the fluid time of `optcc.experiments.failure_study`, under every schedule.

Its format is `optcc-training/1`; the record that comes with the package is made by

    optcc study training -o experiments/records/training.json
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from optcc.errors import InputError
from optcc.experiments import failure_model
from optcc.experiments.failure_model import (
    LLAMA_NETWORK,
    REPAIRS_S,
    Cluster,
    Damage,
    Instant,
    Left,
    OneServer,
    Pattern,
    Uniform,
    down_probability,
)
from optcc.experiments.failure_study import (
    COLUMNS,
    MEDIAN,
    P95,
    TRIALS_MAX,
    Assumption,
    Partial,
    Report,
    assumptions,
    check_numbers,
    command_for,
    complete,
    fluid,
    mean,
    quantile,
    quiet,
)
from optcc.experiments.record import RECORDS, Recorded, decode, lines_of, rational, text_of
from optcc.show import Card, Shown
from optcc.units import show_time

TITLE = "Training steps and inference with failed NICs"
NICS = 8
FORWARD = Fraction(1, 3)
"""The forward pass's share of a microbatch: two of six FLOPs for each parameter and token."""
DIGITS = 12
"""Overheads are rounded to so many decimals, so that their sums stay exact and short."""


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer, with the table that its numbers are from."""

    name: str
    parameters: int
    layers: int
    hidden: int
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """What its maker states: dense BF16 FLOP/s and bytes/s of its memory."""

    name: str
    flops_per_s: int
    memory_bytes_per_s: int
    source: str


GPT3_TABLE = "GPT-3 (arXiv 2005.14165, Table 2.1)"
GPT3_3B = Model("GPT-3 2.7B", 2_700_000_000, 32, 2560, GPT3_TABLE)
GPT3_7B = Model("GPT-3 6.7B", 6_700_000_000, 32, 4096, GPT3_TABLE)
GPT3_175B = Model("GPT-3 175B", 175_000_000_000, 96, 12_288, GPT3_TABLE)
LLAMA_405B = Model("Llama 3 405B", 405_000_000_000, 126, 16_384, "Llama 3 (arXiv 2407.21783, Table 3)")
A100 = Gpu("A100", 312 * 10**12, 2_039 * 10**9, "NVIDIA A100 80 GB SXM data sheet")
H100 = Gpu("H100", 989_400_000_000_000, 3_350 * 10**9, "NVIDIA H100 SXM data sheet")


@dataclass(frozen=True, slots=True)
class Job:
    """A training run. `source` says where the numbers are from, and `assumed` which of them nobody states.

    `tensor` GPUs of a server share a layer, `pipeline` stages share the layers; a stage is on a whole number of
    servers, stage after stage. `batch_sequences` of `sequence_tokens` are a step, `microbatch_sequences` go through the
    pipeline at once. `achieved_flops_per_s` of a GPU are counted with `flops_per_parameter_token`; a reported figure
    has the exposed communication of that run in it, so compute is a little overestimated and overheads are under.
    `bucket_bytes` is what the GPUs of a server reduce together, replicas counted once. `latency_s` is added to every
    AllReduce: two ways up and down a tree of servers, whatever the schedule. Without `overlap` all buckets come after
    the backward pass.

    Raises InputError if the parts do not fit.
    """

    name: str
    model: Model
    gpu: Gpu
    servers: int
    nic_rate: Fraction
    tensor: int
    pipeline: int
    sequence_tokens: int
    batch_sequences: int
    microbatch_sequences: int
    achieved_flops_per_s: int
    flops_per_parameter_token: int
    gradient_bytes: int
    bucket_bytes: int
    message_latency_s: Fraction
    overlap: bool
    source: str
    assumed: str
    gpus_per_server: int = 8
    activation_bytes: int = 2

    def __post_init__(self) -> None:
        def check(what: str, value: int, of: int) -> None:
            if value < 1 or of % value:
                raise InputError(f"job {self.name!r}: {what} {value}: must divide {of}")

        check("tensor", self.tensor, self.gpus_per_server)
        check("pipeline", self.pipeline, self.servers)
        check("microbatches of all replicas", self.replicas * self.microbatch_sequences, self.batch_sequences)
        if min(self.achieved_flops_per_s, self.bucket_bytes, self.gradient_bytes) < 1 or self.nic_rate <= 0:
            raise InputError(f"job {self.name!r}: FLOP/s, bytes and rates must be above zero")
        if self.achieved_flops_per_s > self.gpu.flops_per_s:
            raise InputError(f"job {self.name!r}: {self.achieved_flops_per_s} FLOP/s: must be at most the GPU's")

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.servers * self.gpus_per_server

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def group(self) -> Cluster | None:
        """The servers among which a stage's gradients are reduced; None if a stage is on one server."""
        data = self.servers // self.pipeline
        return Cluster(data, NICS) if data > 1 else None

    @property
    def microbatches(self) -> int:
        """Of a replica in a step."""
        return self.batch_sequences // (self.replicas * self.microbatch_sequences)

    @property
    def compute_s(self) -> Fraction:
        """What the step takes without any gradient communication, the pipeline's bubble included."""
        attention = 2 * self.model.layers * self.model.hidden * self.sequence_tokens
        flops = self.flops_per_parameter_token * (self.model.parameters + attention)
        tokens = self.batch_sequences * self.sequence_tokens
        return Fraction(flops * tokens, self.gpus * self.achieved_flops_per_s)

    @property
    def backward_s(self) -> Fraction:
        """The backward pass of one microbatch on one stage."""
        return (1 - FORWARD) * self.compute_s / (self.microbatches + self.pipeline - 1)

    @property
    def server_rate(self) -> Fraction:
        """Bytes/s of a healthy server each way."""
        return NICS * self.nic_rate

    @property
    def hop_s(self) -> Fraction:
        """What a microbatch's activations take from one healthy stage to the next."""
        replicas = self.gpus_per_server // self.tensor
        tokens = self.microbatch_sequences * self.sequence_tokens
        return replicas * tokens * self.model.hidden * self.activation_bytes / self.server_rate

    @property
    def buckets_bytes(self) -> tuple[int, ...]:
        """The gradients of a stage, the last bucket perhaps smaller."""
        total = -(-self.model.parameters // self.pipeline) * self.gradient_bytes
        whole, rest = divmod(total, self.bucket_bytes)
        return (self.bucket_bytes,) * whole + ((rest,) if rest else ())

    @property
    def latency_s(self) -> Fraction:
        """2 ceil(log2 p) messages."""
        return (
            0 * self.message_latency_s if self.group is None else self.message_latency_s * 2 * _log2(self.group.servers)
        )


def _log2(count: int) -> int:
    return (count - 1).bit_length()


def finish(ready_s: Sequence[Fraction], lasting_s: Sequence[Fraction]) -> Fraction:
    """When one stream is through with transfers that become ready at `ready_s`, in this order, and last `lasting_s`.

    >>> finish([Fraction(1), Fraction(2), Fraction(9)], [Fraction(3), Fraction(1), Fraction(1)])
    Fraction(10, 1)
    """
    end = Fraction(0)
    for ready, lasting in zip(ready_s, lasting_s, strict=True):
        end = max(end, ready) + lasting
    return end


@lru_cache(maxsize=2**14)
def over_fault_free(left: Left, group: Cluster, schedule: str) -> Fraction:
    """The fluid AllReduce time over the fault-free ring."""
    return _fluid(left, group)[COLUMNS.index(schedule)]


@lru_cache(maxsize=2**14)
def _fluid(left: Left, group: Cluster) -> tuple[Fraction, ...]:
    return fluid(left, group)


def allreduce_s(job: Job, size_bytes: int, left: Left, schedule: str) -> Fraction:
    """An AllReduce of `size_bytes` among the servers of a stage, of which `left` is left."""
    group = job.group
    if group is None:
        return Fraction(0)
    p = group.servers
    return job.latency_s + Fraction(2 * (p - 1), p) * size_bytes / job.server_rate * over_fault_free(
        left, group, schedule
    )


@lru_cache(maxsize=2**16)
def exposed_s(job: Job, left: Left, schedule: str) -> Fraction:
    """How long the gradients of a stage go on after its backward pass.

    A bucket is ready when the bytes up to its end have been computed, at an even rate; without overlap, at the end.
    """
    if job.group is None:
        return Fraction(0)
    sizes = job.buckets_bytes
    total = sum(sizes)
    ready = [job.backward_s * Fraction(done, total) if job.overlap else job.backward_s for done in accumulate(sizes)]
    by_size = {size: allreduce_s(job, size, left, schedule) for size in set(sizes)}
    return finish(ready, [by_size[size] for size in sizes]) - job.backward_s


@lru_cache(maxsize=2**16)
def _ends(job: Job, shares: tuple[tuple[int, Fraction], ...]) -> tuple[Fraction, ...]:
    """When each stage's backward passes end in a pipeline whose servers keep `shares` by stage, healthy ones left out.

    Activations are exposed while the pipeline fills and, the other way, while it drains.
    """
    kept = dict(shares)
    one = Fraction(1)
    hops = [job.hop_s / min(kept.get(j, one), kept.get(j + 1, one)) for j in range(job.pipeline - 1)]
    total = sum(hops, Fraction(0))
    behind = [Fraction(0), *accumulate(hops)]
    # Stage j waits for the way there and for the way back from the last stage to itself.
    return tuple(job.compute_s + 2 * total - behind[j] - j * job.backward_s for j in range(job.pipeline))


NOTHING_LOST = Left(())


def steps_s(job: Job, damage: Damage) -> tuple[Fraction, ...]:
    """The time of a step with `damage` to the job's servers, its AllReduce by each of `COLUMNS`.

    Server number j D + i is the i-th of the D servers of stage j, and in the i-th of the pipelines.
    """
    data = job.servers // job.pipeline
    stages: dict[int, dict[int, tuple[Fraction, ...]]] = {}
    pipelines: dict[int, list[tuple[int, Fraction]]] = {}
    for server, shares in sorted(damage.items()):
        stage, place = divmod(server, data)
        stages.setdefault(stage, {})[server] = shares
        kept = 1 - sum((1 - share for share in shares), Fraction(0)) / NICS
        pipelines.setdefault(place, []).append((stage, kept))
    lefts = tuple((stage, Left.of(found)) for stage, found in sorted(stages.items()))
    return _steps_s(job, lefts, tuple(sorted({tuple(found) for found in pipelines.values()})))


@lru_cache(maxsize=2**16)
def _steps_s(
    job: Job, lefts: tuple[tuple[int, Left], ...], pipelines: tuple[tuple[tuple[int, Fraction], ...], ...]
) -> tuple[Fraction, ...]:
    every = [_ends(job, shares) for shares in ((), *pipelines)]
    # A stage reduces its gradients when all of its servers are through; whole stages are alike but for when that is.
    ends = [max(pipeline[stage] for pipeline in every) for stage in range(job.pipeline)]
    damaged = dict(lefts)
    whole = max((end for stage, end in enumerate(ends) if stage not in damaged), default=None)
    times = []
    for schedule in COLUMNS:
        found = [ends[stage] + exposed_s(job, left, schedule) for stage, left in lefts]
        if whole is not None:
            found.append(whole + exposed_s(job, NOTHING_LOST, schedule))
        times.append(max(found))
    return tuple(times)


def step_s(job: Job, damage: Damage, schedule: str) -> Fraction:
    """One of `steps_s`."""
    return steps_s(job, damage)[COLUMNS.index(schedule)]


# Inference


@dataclass(frozen=True, slots=True)
class Serving:
    """A model served by tensor parallelism over all GPUs of `servers`: the only use of NICs that is modelled.

    Every layer has two AllReduces, after attention and after the MLP, of one activation for each token; nothing
    overlaps them. A prompt is bound by FLOPs, of which `prefill_share` is reached; a token by reading the weights, at
    `memory_share` of the memory's rate. Both shares are assumed; the cache of keys and values is left out, so compute
    is short and overheads are over. Between servers an AllReduce takes `latency_s` besides its bytes.
    """

    name: str
    model: Model
    gpu: Gpu
    servers: int
    nic_rate: Fraction
    batch_sequences: int
    prompt_tokens: int
    prefill_share: Fraction
    memory_share: Fraction
    message_latency_s: Fraction
    source: str
    gpus_per_server: int = 8
    activation_bytes: int = 2
    weight_bytes: int = 2

    def _allreduces_s(self, tokens: int, left: Left, schedule: str) -> Fraction:
        """All of a forward pass over `tokens`."""
        group, p = Cluster(self.servers, NICS), self.servers
        size_bytes = tokens * self.model.hidden * self.activation_bytes
        bandwidth = Fraction(2 * (p - 1), p) * size_bytes / (NICS * self.nic_rate)
        latency = 2 * _log2(p) * self.message_latency_s
        return 2 * self.model.layers * (latency + bandwidth * over_fault_free(left, group, schedule))

    def first_token_s(self, left: Left, schedule: str) -> Fraction:
        """The time to the first token: one prompt's forward pass."""
        per_token = 2 * (self.model.parameters + self.model.layers * self.model.hidden * self.prompt_tokens)
        flops_per_s = self.servers * self.gpus_per_server * self.gpu.flops_per_s * self.prefill_share
        return self.prompt_tokens * per_token / flops_per_s + self._allreduces_s(self.prompt_tokens, left, schedule)

    def token_s(self, left: Left, schedule: str) -> Fraction:
        """The time for one more token of every sequence of the batch."""
        rate = self.servers * self.gpus_per_server * self.gpu.memory_bytes_per_s * self.memory_share
        reading = self.model.parameters * self.weight_bytes / rate
        return reading + self._allreduces_s(self.batch_sequences, left, schedule)


def exposed_share(job: Job) -> Fraction:
    """The share of a fault-free step in which nothing but the AllReduce goes on.

    If nothing hides the AllReduce, a step with failures takes longer by this share times what the AllReduce does.
    """
    return exposed_s(job, NOTHING_LOST, "optimal") / step_s(job, {}, "optimal")


@dataclass(frozen=True, slots=True)
class Claim:
    """A published overhead of a training step, and with which failures it was found."""

    pattern: Pattern
    servers: int
    overhead: Fraction
    source: str


CLAIMS = (
    Claim(Uniform(1), 64, Fraction(15, 1000), "R2CCL's simulation of 512 GPUs, 1 failure: 1.5 % (secondary source)"),
    Claim(Uniform(10), 64, Fraction(43, 1000), "R2CCL's simulation of 512 GPUs, 10 failures: 4.3 % (secondary source)"),
)


# What is studied

_FAST, _HALF_FAST = Fraction(50 * 10**9), Fraction(25 * 10**9)
_MESSAGE_S = Fraction(5, 10**6)
_BUCKET = 40_000_000 * 4
"""Megatron-LM's bucket of a GPU with few replicas: 40 million parameters, of four bytes."""
_ASSUMED_40 = "40 % of the GPU's peak"


def _plain(
    name: str,
    model: Model,
    gpu: Gpu,
    servers: int,
    batch: int,
    micro: int,
    source: str,
    overlap: bool,
    nic_rate: Fraction = _FAST,
) -> Job:
    """Data parallel only."""
    return Job(
        name=name,
        model=model,
        gpu=gpu,
        servers=servers,
        nic_rate=nic_rate,
        tensor=1,
        pipeline=1,
        sequence_tokens=2048,
        batch_sequences=batch,
        microbatch_sequences=micro,
        achieved_flops_per_s=gpu.flops_per_s * 2 // 5,
        flops_per_parameter_token=6,
        gradient_bytes=4,
        bucket_bytes=_BUCKET,
        message_latency_s=_MESSAGE_S,
        overlap=overlap,
        source=source,
        assumed=f"{_ASSUMED_40}; microbatches of {micro}; 4-byte gradients; buckets of 40 M parameters; 5 us a message",
    )


_R2CCL_TESTBED = (
    "R2CCL (arXiv 2512.25059): {servers} servers of 8 H100 and 8 x 400 Gbit/s; batch of a step from " + GPT3_TABLE
)
_R2CCL_SIMULATED = (
    "R2CCL's simulation of 512 GPUs, 1 to 10 failures; its model, parallelism and network are not known to us. "
    "Batch of a step from " + GPT3_TABLE
)
SIMAI = (
    "R2CCL's simulation: SimAI, A100, Spectrum-X, 512 GPUs, 1 to 10 failures (secondary sources); model and batch are "
    "not known to us. SimAI's tutorial (aliyun/SimAI, docs/Tutorial.md): 400 Gbit/s a NIC is Spectrum-X's default, "
    "200 Gbit/s is in an example with A100, and there is no overlap unless a ratio is given"
)
_ONE_EACH = 512
"""A sequence for each of 512 GPUs, the smallest step that uses all of them."""
JOBS = (
    _plain("2.7B on 2 servers", GPT3_3B, H100, 2, 512, 4, _R2CCL_TESTBED.format(servers=2), True),
    _plain("2.7B on 4 servers", GPT3_3B, H100, 4, 512, 4, _R2CCL_TESTBED.format(servers=4), True),
    _plain("6.7B on 64 servers", GPT3_7B, A100, 64, 1024, 1, _R2CCL_SIMULATED, True),
    _plain("6.7B on 64 servers, no overlap", GPT3_7B, A100, 64, 1024, 1, _R2CCL_SIMULATED, False),
    _plain("6.7B as in SimAI, 400 Gbit/s", GPT3_7B, A100, 64, _ONE_EACH, 1, SIMAI, False),
    _plain("6.7B as in SimAI, 200 Gbit/s", GPT3_7B, A100, 64, _ONE_EACH, 1, SIMAI, False, _HALF_FAST),
    Job(
        name="175B on 128 servers",
        model=GPT3_175B,
        gpu=A100,
        servers=128,
        nic_rate=_HALF_FAST,
        tensor=8,
        pipeline=8,
        sequence_tokens=2048,
        batch_sequences=1536,
        microbatch_sequences=1,
        achieved_flops_per_s=140 * 10**12,
        flops_per_parameter_token=8,
        gradient_bytes=4,
        bucket_bytes=8 * _BUCKET,
        message_latency_s=_MESSAGE_S,
        overlap=True,
        source="Megatron-LM (arXiv 2104.04473, section 5.1): 1,024 A100, batch 1,536, 140 TFLOP/s a GPU, recomputation",
        assumed="pipeline of 8 without interleaving; microbatches of 1; 8 x 200 Gbit/s a server; 5 us a message",
    ),
    Job(
        name="405B on 2048 servers",
        model=LLAMA_405B,
        gpu=H100,
        servers=2048,
        nic_rate=_FAST,
        tensor=8,
        pipeline=16,
        sequence_tokens=8192,
        batch_sequences=2048,
        microbatch_sequences=1,
        achieved_flops_per_s=400 * 10**12,
        flops_per_parameter_token=6,
        gradient_bytes=4,
        bucket_bytes=8 * _BUCKET,
        message_latency_s=_MESSAGE_S,
        overlap=True,
        source="Llama 3 (arXiv 2407.21783, Table 4): 16,384 H100, TP 8, PP 16, DP 128, 16 M tokens, 400 TFLOP/s a GPU",
        assumed="1F1B without interleaving; AllReduce in place of FSDP; buckets as Megatron-LM; 5 us a message",
    ),
)
SERVINGS = (
    Serving(
        name="405B on 2 servers",
        model=LLAMA_405B,
        gpu=H100,
        servers=2,
        nic_rate=_FAST,
        batch_sequences=32,
        prompt_tokens=2000,
        prefill_share=Fraction(1, 2),
        memory_share=Fraction(7, 10),
        message_latency_s=_MESSAGE_S,
        source="Model and servers as in R2CCL's inference tests; batch, prompt and shares are assumed",
    ),
)
LOST = (1, 2, 3, 4)


@dataclass(frozen=True)
class TrainingPlan:
    """Which jobs under which patterns."""

    cells: tuple[tuple[Job, Pattern], ...]


def _patterns(job: Job) -> Iterator[Pattern]:
    most = 10 if job.servers >= 64 else 2
    yield from (Uniform(failed) for failed in range(1, most + 1))
    if job.servers >= 64:
        yield Instant(f"{LLAMA_NETWORK.name} 3d", down_probability(LLAMA_NETWORK, REPAIRS_S["3d"]))


FULL = TrainingPlan(tuple((job, pattern) for job in JOBS for pattern in _patterns(job)))
QUICK = TrainingPlan(tuple((job, Uniform(failed)) for job in (JOBS[1], JOBS[4]) for failed in (1, 2)))


# The record


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a schedule: by what share a step is longer than the fault-free one, over the trials."""

    schedule: str
    mean: float
    mean_low: float
    mean_high: float
    median: float
    p95: float
    worst: float


class TrainingCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job under a pattern."""

    job: str
    pattern: str
    overheads: tuple[Overhead, ...]

    def of(self, schedule: str) -> Overhead:
        """The overhead of a schedule."""
        return next(each for each in self.overheads if each.schedule == schedule)


class HealthyStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job with nothing failed, in seconds: compute, its AllReduces one after the other, what of them is exposed.

    `assumptions` are the fields of the job.
    """

    job: str
    compute_s: float
    allreduce_s: float
    exposed_s: float
    step_s: float
    assumptions: dict[str, Any]


class ServingCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A served model, one of its servers without `failed` NICs: seconds, and by what share they are longer."""

    serving: str
    schedule: str
    failed: int
    first_token_s: float
    token_s: float
    first_token_overhead: float
    token_overhead: float


class Explained(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of a step that `schedule`'s AllReduce must be, with nothing to hide it, for the `claimed` overhead.

    For the mean of the trials to be as claimed, for the 95th percentile, or for the worst. Above 1: it cannot be.
    """

    source: str
    pattern: str
    servers: int
    claimed: float
    schedule: str
    for_mean: float
    for_p95: float
    for_worst: float


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    assumptions: tuple[Assumption, ...]
    columns: tuple[str, ...]
    jobs: tuple[HealthyStep, ...]
    servings: tuple[dict[str, Any], ...]
    cells: tuple[TrainingCell, ...]
    served: tuple[ServingCase, ...]
    claims: tuple[Explained, ...]


_LISTS = ("jobs", "servings", "cells", "served", "claims")


@dataclass(frozen=True)
class TrainingStudy(Recorded, Shown):
    """The record: options, assumptions, fault-free steps, overheads of training cells, and inference."""

    format: ClassVar[str] = "optcc-training/1"
    own_path: ClassVar[Path] = RECORDS / "training.json"

    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    assumptions: tuple[Assumption, ...]
    jobs: tuple[HealthyStep, ...]
    servings: tuple[dict[str, Any], ...]
    cells: tuple[TrainingCell, ...]
    served: tuple[ServingCase, ...]
    claims: tuple[Explained, ...]

    def card(self) -> Card:
        """Mean overheads of training steps."""
        names = [name for name in COLUMNS if name != "ring"]
        rows = []
        for cell in self.cells:
            failed = cell.pattern.removeprefix("uniform ")
            if not failed.isdecimal() or int(failed) in (1, 2, 5, 10):
                shown = (cell.of(name) for name in names)
                rows.append((cell.job, failed, *(f"{100 * each.mean:.3f} / {100 * each.worst:.3f}" for each in shown)))
        title = f"Training step, overhead in %: mean / worst of {self.trials} trials"
        return Card(title, ("job", "failed NICs", *names), tuple(rows))

    def healthy(self) -> Card:
        """The fault-free steps."""
        rows = tuple(
            (
                each.job,
                show_time(each.compute_s),
                show_time(each.allreduce_s),
                show_time(each.exposed_s),
                show_time(each.step_s),
            )
            for each in self.jobs
        )
        return Card("Nothing failed", ("job", "compute", "AllReduce", "of it exposed", "step"), rows)

    def inference(self) -> Card:
        """Inference, as times and overheads."""
        rows = tuple(
            (
                each.serving,
                each.schedule,
                str(each.failed),
                f"{show_time(each.first_token_s)} ({100 * each.first_token_overhead:+.2f} %)",
                f"{show_time(each.token_s)} ({100 * each.token_overhead:+.2f} %)",
            )
            for each in self.served
        )
        return Card("Inference", ("model", "schedule", "failed NICs", "first token", "each token"), rows)

    def explained(self) -> Card:
        """How much of a step the AllReduce must be for what papers state."""
        rows = tuple(
            (
                f"{100 * each.claimed:.1f} %",
                each.pattern,
                each.schedule,
                *(f"{100 * share:.1f}" for share in (each.for_mean, each.for_p95, each.for_worst)),
            )
            for each in self.claims
        )
        columns = ("stated", "failed", "schedule", "mean", "95th percentile", "worst")
        return Card("Exposed AllReduce, in % of a step, that would give what is stated", columns, rows)

    def as_json(self) -> dict[str, Any]:
        """Everything, as the file has it."""
        found: dict[str, Any] = json.loads(self.to_bytes())
        return found

    def to_bytes(self) -> bytes:
        """The record as a file, a line for each item of a list."""
        file = _File(
            self.format,
            self.title,
            self.command,
            self.trials,
            self.seed,
            self.assumptions,
            COLUMNS,
            self.jobs,
            self.servings,
            self.cells,
            self.served,
            self.claims,
        )
        built = msgspec.to_builtins(file, enc_hook=text_of)
        lists = {name: built.pop(name) for name in _LISTS}
        return lines_of(built, lists)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> TrainingStudy:
        file, check = decode(data, name, _File, cls.format, rational)
        check("columns", file.columns, file.columns == COLUMNS, f"be {list(COLUMNS)}")
        check("trials", file.trials, 1 <= file.trials <= TRIALS_MAX, f"be from 1 to {TRIALS_MAX}")
        jobs = {each.job for each in file.jobs}
        for number, each in enumerate(file.jobs):
            check(f"jobs[{number}].step_s", each.step_s, 0 < each.compute_s <= each.step_s < math.inf, "be the longest")
        for number, cell in enumerate(file.cells):
            check(f"cells[{number}].job", cell.job, cell.job in jobs, "be one of $.jobs")
            names = tuple(each.schedule for each in cell.overheads)
            check(f"cells[{number}].overheads", names, names == COLUMNS, f"be {list(COLUMNS)}")
            for place, over in enumerate(cell.overheads):
                rising = 0 <= over.median <= over.p95 <= over.worst < math.inf and over.mean <= over.worst
                check(f"cells[{number}].overheads[{place}]", over.schedule, rising, "have median <= p95 <= worst")
        return cls(
            file.title,
            file.command,
            file.trials,
            file.seed,
            file.assumptions,
            file.jobs,
            file.servings,
            file.cells,
            file.served,
            file.claims,
        )


@dataclass(frozen=True)
class _Unit:
    """A unit of work: all trials of a job under a pattern."""

    job: Job
    pattern: Pattern
    seed: int
    trials: int


def _work(unit: _Unit) -> list[dict[str, Any]]:
    """The overheads of all schedules, as JSON has them."""
    job = unit.job
    cluster = Cluster(job.servers, NICS)
    fault_free = step_s(job, {}, "optimal")
    found: dict[str, Counter[Fraction]] = {name: Counter() for name in COLUMNS}
    for trial in range(unit.trials):
        damage = failure_model.draw(unit.pattern, cluster, unit.seed, trial)
        for name, time in zip(COLUMNS, steps_s(job, damage), strict=True):
            found[name][time] += 1
    overheads = []
    for name, times in found.items():
        values = sorted((round(time / fault_free - 1, DIGITS), count) for time, count in times.items())
        average = mean(values)
        overheads.append(
            Overhead(
                name,
                average.value,
                average.low,
                average.high,
                quantile(values, MEDIAN).value,
                quantile(values, P95).value,
                float(values[-1][0]),
            )
        )
    built: list[dict[str, Any]] = msgspec.to_builtins(overheads)
    return built


def healthy_step(job: Job) -> HealthyStep:
    """The fault-free step."""
    all_s = sum((allreduce_s(job, size, NOTHING_LOST, "optimal") for size in job.buckets_bytes), Fraction(0))
    return HealthyStep(
        job.name,
        float(job.compute_s),
        float(all_s),
        float(exposed_s(job, NOTHING_LOST, "optimal")),
        float(step_s(job, {}, "optimal")),
        msgspec.to_builtins(job, enc_hook=text_of),
    )


def serve(serving: Serving) -> Iterator[ServingCase]:
    """A served model while one of its servers lacks none, one, ... of its NICs."""
    cluster = Cluster(serving.servers, NICS)
    for failed in (0, *LOST):
        left = Left.of(failure_model.draw(OneServer(failed), cluster, 0, 0)) if failed else NOTHING_LOST
        for name in COLUMNS if failed else ("optimal",):
            first, token = serving.first_token_s(left, name), serving.token_s(left, name)
            before = serving.first_token_s(NOTHING_LOST, name), serving.token_s(NOTHING_LOST, name)
            over = [float(now / then - 1) for now, then in zip((first, token), before, strict=True)]
            yield ServingCase(serving.name, name, failed, float(first), float(token), *over)


def explain(claim: Claim, seed: int, trials: int) -> Iterator[Explained]:
    """What each schedule would need to be as `claim` says."""
    cluster = Cluster(claim.servers, NICS)
    lefts = Counter(Left.of(failure_model.draw(claim.pattern, cluster, seed, trial)) for trial in range(trials))
    for place, name in enumerate(COLUMNS):
        found: Counter[Fraction] = Counter()
        for left, count in lefts.items():
            found[_fluid(left, cluster)[place] - 1] += count
        values = sorted(found.items())
        overheads = (mean(values).value, quantile(values, P95).value, float(values[-1][0]))
        shares = (float(claim.overhead) / each for each in overheads)
        yield Explained(claim.source, str(claim.pattern), claim.servers, float(claim.overhead), name, *shares)


def make(
    plan: TrainingPlan,
    *,
    trials: int,
    seed: int,
    jobs: int = 1,
    partial: Partial | None = None,
    report: Report = quiet,
    quick: bool = False,
) -> TrainingStudy:
    """Draws every cell of `plan`; the result depends on `trials` and `seed`, and on nothing else.

    Raises InputError for options that cannot be, CodecError if `partial` holds what this study did not write.
    """
    check_numbers(trials, seed, jobs)
    units = {f"{job.name}, {pattern}": _Unit(job, pattern, seed, trials) for job, pattern in plan.cells}
    done = complete(units, _work, jobs=jobs, partial=partial, report=report)
    cells = tuple(
        TrainingCell(unit.job.name, str(unit.pattern), msgspec.convert(done[name], tuple[Overhead, ...]))
        for name, unit in units.items()
    )
    return TrainingStudy(
        TITLE,
        command_for("training", trials, seed, quick=quick),
        trials,
        seed,
        assumptions(),
        tuple(healthy_step(job) for job in dict.fromkeys(job for job, _ in plan.cells)),
        tuple(msgspec.to_builtins(serving, enc_hook=text_of) for serving in SERVINGS),
        cells,
        tuple(case for serving in SERVINGS for case in serve(serving)),
        tuple(each for claim in CLAIMS for each in explain(claim, seed, trials)),
    )
