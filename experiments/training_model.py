"""A model of time: a training step, or an answer of a language model, with failed NICs.

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
takes `latency_s` and the fluid time of `optcc.experiments.failure_times`, under every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from optcc.errors import InputError
from optcc.experiments.failure_model import Cluster, Damage, Left
from optcc.experiments.failure_times import COLUMNS, fluid

NICS = 8
FORWARD = Fraction(1, 3)
"""The forward pass's share of a microbatch: two of six FLOPs for each parameter and token."""


@dataclass(frozen=True, slots=True)
class TransformerModel:
    """A dense transformer, with the table that its numbers are from."""

    name: str
    parameters: int
    layers: int
    hidden: int
    source: str


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What its maker states: dense BF16 FLOP/s and bytes/s of its memory."""

    name: str
    flops_per_s: int
    memory_bytes_per_s: int
    source: str


@dataclass(frozen=True, slots=True)
class TrainingJob:
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
    model: TransformerModel
    gpu: GpuModel
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
        return Fraction(0) if self.group is None else self.message_latency_s * 2 * log2_ceiling(self.group.servers)


def log2_ceiling(count: int) -> int:
    """The levels of a binary tree with so many leaves."""
    return (count - 1).bit_length()


def finish(ready_s: Sequence[Fraction], lasting_s: Sequence[Fraction]) -> Fraction:
    """When one stream completes transfers that become ready at `ready_s`, in this order, and take `lasting_s`.

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
    return fluid_times(left, group)[COLUMNS.index(schedule)]


@lru_cache(maxsize=2**14)
def fluid_times(left: Left, group: Cluster) -> tuple[Fraction, ...]:
    return fluid(left, group)


def allreduce_s(job: TrainingJob, size_bytes: int, left: Left, schedule: str) -> Fraction:
    """An AllReduce of `size_bytes` among the servers of a stage, of which `left` is left."""
    group = job.group
    if group is None:
        return Fraction(0)
    p = group.servers
    return job.latency_s + Fraction(2 * (p - 1), p) * size_bytes / job.server_rate * over_fault_free(
        left, group, schedule
    )


@lru_cache(maxsize=2**16)
def exposed_s(job: TrainingJob, left: Left, schedule: str) -> Fraction:
    """By how long the AllReduce of a stage's gradients outlasts its backward pass.

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
def _ends(job: TrainingJob, shares: tuple[tuple[int, Fraction], ...]) -> tuple[Fraction, ...]:
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


def steps_s(job: TrainingJob, damage: Damage) -> tuple[Fraction, ...]:
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
    job: TrainingJob, lefts: tuple[tuple[int, Left], ...], pipelines: tuple[tuple[tuple[int, Fraction], ...], ...]
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


def step_s(job: TrainingJob, damage: Damage, schedule: str) -> Fraction:
    """One of `steps_s`."""
    return steps_s(job, damage)[COLUMNS.index(schedule)]


@dataclass(frozen=True, slots=True)
class Serving:
    """A model served by tensor parallelism over all GPUs of `servers`: the only use of NICs that is modelled.

    Every layer has two AllReduces, after attention and after the MLP, of one activation for each token; nothing
    overlaps them. A prompt is bound by FLOPs, of which `prefill_share` is reached; a token by reading the weights, at
    `memory_share` of the memory's rate. Both shares are assumed; the cache of keys and values is left out, so compute
    is short and overheads are over. Between servers an AllReduce takes `latency_s` besides its bytes.
    """

    name: str
    model: TransformerModel
    gpu: GpuModel
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
        latency = 2 * log2_ceiling(p) * self.message_latency_s
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
