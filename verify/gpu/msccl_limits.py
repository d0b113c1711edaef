"""What the run-times of MSCCL's XML refuse, or have no room for.

`msccl` is microsoft/msccl (b23e9cd), `rccl` ROCm's (0cbce2a), `msccl-executor` Azure/msccl-executor-nccl (c6f6b36).
Their loaders are of one origin; their limits differ, and stand in `msccl.h`, in `msccl_struct.h`, and for the
steps of the last one in `makefiles/common.mk`. Their reader of XML is one of their own: it knows elements, whose
attributes stand in double quotes on one line behind single spaces, and comments.

Counted is what a loader checks, and what would not fit its fields although it does not look: offsets and steps of 16
bits, thread blocks that others wait for of 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optcc.verify.gpu.msccl_file import READS, WRITES, MscclBlock, MscclFile, MscclGpu, MscclStep
from optcc.verify.gpu.msccl_interpreter import LoadedBlock
from optcc.verify.gpu.operations import StepPlace

_TAG = re.compile(rb"""</?[A-Za-z]+( [A-Za-z_]+="[^"<>&]*")*( ?/)?[ ]?>|<!--.*?-->|[ \r\n]+""", re.DOTALL)
COUNT_MAX = 71
NODES_MAX = 4095
MAX_BYTES_DEFAULT = 2**27
"""For what calls msccl takes a file without `maxBytes`; the others refuse it."""
Refusal = tuple[StepPlace, str]
"""Where a run-time has no room, and the rule."""


@dataclass(frozen=True, slots=True)
class MscclRuntime:
    """A run-time, its limits, the spellings of collectives that it knows, and the attributes that it insists on."""

    name: str
    steps: int
    blocks: int
    channels: int
    collectives: tuple[str, ...]
    required: tuple[str, ...]
    checks_chunks: bool


_LATER = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "reduce")
_SIZES = ("outofplace", "minBytes", "maxBytes")
RUNTIMES = (
    MscclRuntime(
        "msccl",
        256,
        216,
        32,
        ("allreduce", "allgather", "reduce", "broadcast", "alltoall", "reduce_scatter", "custom"),
        (),
        True,
    ),
    MscclRuntime("rccl", 64, 64, 128, _LATER, _SIZES, False),
    MscclRuntime("msccl-executor", 64, 1024, 32, _LATER, _SIZES, False),
)


def check_loader(file: MscclFile, data: bytes, loaded: Sequence[LoadedBlock], runtime: MscclRuntime) -> Refusal | None:
    """The first thing that `runtime` refuses or has no room for; None if it takes the file."""
    refusals = iter(
        (
            *_lexical(data),
            *_head(file, runtime),
            *(each for gpu in file.gpus for each in _gpu(file, gpu, runtime)),
            *(
                (StepPlace(each.refusal[0], each.block.gpu, each.block.number), each.refusal[1])
                for each in loaded
                if each.refusal is not None
            ),
        )
    )
    return next(refusals, None)


def _lexical(data: bytes) -> Iterator[Refusal]:
    """What an XML parser reads and theirs does not."""
    at = 0
    while at < len(data):
        found = _TAG.match(data, at)
        if found is None:
            line = data.count(b"\n", 0, at) + 1
            yield StepPlace(line), "must be elements with attributes in double quotes, one space before each"
            return
        at = found.end()


def _head(file: MscclFile, runtime: MscclRuntime) -> Iterator[Refusal]:
    place = StepPlace(file.line)
    coll = file.attributes["coll"]
    if coll not in runtime.collectives:
        yield place, f"coll {coll}: must be one of {', '.join(runtime.collectives)}"
    for name in runtime.required:
        if name not in file.attributes:
            yield place, f"{name}: missing"
    low, high = (int(file.attributes.get(name, 0)) for name in ("minBytes", "maxBytes"))
    if "maxBytes" in file.attributes and low > high and (runtime.checks_chunks or high):
        yield place, f"minBytes {low}: must be at most maxBytes {high}"
    if runtime.checks_chunks and int(file.attributes.get("nthreads", "0") or 0) % 32:
        yield place, f"nthreads {file.attributes['nthreads']}: must be a multiple of 32"
    if file.n_channels > runtime.channels:
        yield place, f"nchannels {file.n_channels}: must be at most {runtime.channels}"


def _gpu(file: MscclFile, gpu: MscclGpu, runtime: MscclRuntime) -> Iterator[Refusal]:
    place = StepPlace(gpu.line, gpu.number)
    if runtime.checks_chunks:
        times = {"allgather": (file.n_gpus, 1), "reducescatter": (1, file.n_gpus)}.get(file.collective, (1, 1))
        for buffer, factor in zip("io", times, strict=True):
            chunks = gpu.chunks[buffer]
            if chunks and chunks * factor != file.n_chunks:
                rule = f"must be 0, or nchunksperloop {file.n_chunks}"
                yield place, f"{buffer}_chunks {chunks}: {rule}" + (f" by {factor} GPUs" if factor > 1 else "")
    if len(gpu.blocks) > runtime.blocks:
        yield place, f"{len(gpu.blocks)} thread blocks: must be at most {runtime.blocks}"
    nodes = 1 + file.n_gpus + len(gpu.blocks) + sum(len(block.steps) for block in gpu.blocks)
    if nodes > NODES_MAX:
        yield place, f"{nodes} elements for this GPU: must be at most {NODES_MAX}"
    for channel in {block.channel for block in gpu.blocks}:
        for side in ("send", "recv"):
            count = sum(block.channel == channel and getattr(block, side) >= 0 for block in gpu.blocks)
            if count > 32:
                yield place, f"{count} thread blocks that {side} on channel {channel}: must be at most 32"
    for block in gpu.blocks:
        yield from _block(file, gpu, block, runtime)


def _block(file: MscclFile, gpu: MscclGpu, block: MscclBlock, runtime: MscclRuntime) -> Iterator[Refusal]:
    place = StepPlace(block.line, gpu.number, block.number)
    if block.channel >= min(file.n_channels, runtime.channels):
        yield place, f"chan {block.channel}: must be below nchannels {file.n_channels} and {runtime.channels}"
    highest = max([len(block.steps), *(step.number + 1 for step in block.steps)])
    if highest > runtime.steps:
        yield place, f"{highest} steps: must be at most {runtime.steps}"
    for step in block.steps:
        at = StepPlace(step.line, gpu.number, block.number, step.number, step.kind)
        for what in _step(gpu, step):
            yield at, what


def _step(gpu: MscclGpu, step: MscclStep) -> Iterator[str]:
    if step.count > COUNT_MAX:
        yield f"cnt {step.count}: must be at most {COUNT_MAX}"
    if step.waits is not None and step.waits[0] > 127:
        yield f"depid {step.waits[0]}: must be at most 127"
    for kinds, (buffer, first), side in ((READS, step.src, "src"), (WRITES, step.dst, "dst")):
        if first > 2**15 - 1:
            yield f"{side}off {first}: must be at most {2**15 - 1}"
        checked = step.kind in kinds and step.kind != "rrc"
        if checked and first >= gpu.chunks[buffer]:
            yield f"{side}off {first}: must be below {buffer}_chunks {gpu.chunks[buffer]}"
