"""The resources that a plan needs of a run-time or format, against the limits of that.

`msccl-xml`, `mscclpp-json`: the formats of `optcc.export`. Their writers count resources in the file that they would
write, and what they refuse is refused here; then the file is read back, and what the loader checks is checked anew. The
limits are those in the interpreters' sources: for MSCCL the constants of `msccl.h` (MAXCHANNELS 32,
MSCCL_MAX_NUM_STEPS 256, MSCCL_MAX_NUM_THREAD_BLOCKS 216, MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL 32, MSCCL_MAX_COUNT
72, names of 64 bytes with the last one zero, and of its parser, which holds 4,096 nodes) and the widths of its fields
(a transfer's chunk offsets are int16, the thread block that a step waits for is int8); for MSCCL++ the constants of
`execution_common.hpp` (MAX_CHANNEL 16, MAX_OPERATION 64, MAX_DEVICE_SEMAPHORES 16, offsets and sizes of 32 bits;
`min_message_size` is read as an int) and the default alignment of its plans, 16 B. Only resources are counted: an
exported file orders steps in its own way (docs/exports.md).

`msccl`, `rccl`, `msccl-executor`: the same file must also be taken by the checks of that run-time's loader
(`optcc.verify.gpu.msccl_limits`).

`optcc`: our run-time, over any transport. Ranks as many as a topology may have (`optcc.topology.RANKS_MAX`); offsets
and lengths in whole elements; and the bytes of a rank, its buffer and its staging slots of whole 64 B each, within an
address space of 47 bits. (The number of slots is bounded by the plan itself, `optcc.plan.SLOTS_MAX`.)

`mpi`: the same over MPI. Counts are C ints, so a message has at most 2^31 - 1 B; the k-th channel of a pair of ranks is
tag k, and the standard promises tags up to 32767 (MPI_TAG_UB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import MappingProxyType

import numpy as np

from optcc.arrays import Column
from optcc.collective import RANKS_MAX, check_dtype
from optcc.errors import CodecError, InputError, PlanError
from optcc.export import write_msccl_xml, write_mscclpp_json
from optcc.plan import RECEIVES, Plan
from optcc.verdict import Counterexample
from optcc.verify.gpu.msccl_file import MscclFile
from optcc.verify.gpu.msccl_interpreter import load_file
from optcc.verify.gpu.msccl_limits import RUNTIMES, MscclRuntime, check_loader
from optcc.verify.gpu.mscclpp import check_room
from optcc.verify.gpu.mscclpp_file import MscclppFile

_SLOT_ALIGNMENT = 64


def _msccl_refusal(runtime: MscclRuntime, data: bytes) -> str | None:
    """Why the loader of `runtime` refuses the file, if it does."""
    try:
        file = MscclFile.parse(data)
    except CodecError as error:
        return f"the file cannot be read back: {error}"
    refusal = check_loader(file, data, load_file(file), runtime)
    return None if refusal is None else f"{refusal[1]}; {refusal[0]}"


def _mscclpp_refusal(data: bytes) -> str | None:
    """Why the loader of MSCCL++ refuses the file, if it does."""
    try:
        refusal = check_room("the file", MscclppFile.parse(data))
    except CodecError as error:
        return f"the file cannot be read back: {error}"
    return None if refusal is None else refusal.summary


Write = Callable[[Plan], bytes]
Refuse = Callable[[bytes], str | None]
FILES: Mapping[str, tuple[Write, Refuse]] = MappingProxyType(
    {
        "msccl-xml": (write_msccl_xml, partial(_msccl_refusal, RUNTIMES[0])),
        "mscclpp-json": (write_mscclpp_json, _mscclpp_refusal),
        **{
            each.name: (partial(write_msccl_xml, runtime=each.name), partial(_msccl_refusal, each)) for each in RUNTIMES
        },
    }
)
"""The targets whose limits are counted in the file: what writes it, and what reads it back as the loader does."""
WRITERS = ("msccl-xml", "mscclpp-json")
"""Those that are formats."""
LOADERS = tuple(each.name for each in RUNTIMES)
"""Those that are run-times, for a file of the first."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """`what` may be at most `at_most`, by `source`."""

    what: str
    at_most: int
    source: str


@dataclass(frozen=True, slots=True)
class ResourceNeed:
    """The largest need of `what` in a plan, `where` in words; `instruction` is one there (-1: none)."""

    what: str
    amount: int
    where: str = ""
    rank: int | None = None
    instruction: int = -1


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """A run-time with its limits; `needs` counts a plan's largest need of each."""

    name: str
    limits: tuple[ResourceLimit, ...]
    needs: Callable[[Plan], Iterator[ResourceNeed]]


def check_limits(plan: Plan, target: str) -> Counterexample | None:
    """None if `plan` fits the limits of the target of that name, else the first limit it breaks.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> plan = compile_schedule(ring(n_ranks=48), size_bytes=48 * 64)
    >>> print(check_limits(plan, "msccl-xml"))
    None
    >>> check_limits(plan, "mscclpp-json").summary
    'mscclpp-json: operations of a thread block: 521: must be at most 64; rank 0 thread block 0'

    Raises InputError for a target that is not in `TARGETS`.
    """
    if target in FILES:
        write, refusal_of = FILES[target]
        try:
            data = write(plan)
        except (InputError, PlanError) as error:
            return Counterexample("limits", str(error))
        refusal = refusal_of(data)
        return None if refusal is None else Counterexample("limits", f"{target}: {refusal}")
    if target not in COUNTED:
        raise InputError(f"target {target!r}: must be one of {', '.join(TARGETS)}")
    chosen = COUNTED[target]
    needs = {need.what: need for need in chosen.needs(plan)}
    assert set(needs) <= {limit.what for limit in chosen.limits}, "a need without a limit"
    for limit in chosen.limits:
        need = needs.get(limit.what)
        if need is not None and need.amount > limit.at_most:
            return _exceeded(plan, target, limit, need)
    return None


def _exceeded(plan: Plan, target: str, limit: ResourceLimit, need: ResourceNeed) -> Counterexample:
    where = f"; {need.where}" if need.where else ""
    summary = f"{target}: {limit.what}: {need.amount}, must be at most {limit.at_most} ({limit.source}){where}"
    if need.instruction < 0:
        return Counterexample("limits", summary, need.rank)
    row = plan[need.instruction]
    first = row.dst_offset if row.dst_offset >= 0 else row.src_offset
    trace = (f"{row}: {plan.transfers.describe(max(row.recv_transfer, row.send_transfer))}",)
    return Counterexample("limits", summary, row.rank, first, first + row.bytes - 1, trace)


def _worst(what: str, amounts: Column, where: Callable[[int], str], instruction: Column) -> Iterator[ResourceNeed]:
    """The largest of `amounts`, None if there are none; `instruction` gives an instruction for each."""
    if len(amounts):
        at = int(amounts.argmax())
        yield ResourceNeed(what, int(amounts[at]), where(at), instruction=int(instruction[at]))


def _nowhere(_: int) -> str:
    return ""


def _channel_numbers(plan: Plan) -> Column:
    """The index of each channel among those of its pair of ranks."""
    seen: dict[tuple[int, int], int] = {}
    numbers = []
    for channel in plan.channels:
        number = seen.get((channel.src, channel.dst), 0)
        seen[channel.src, channel.dst] = number + 1
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def _slots(plan: Plan) -> tuple[Column, Column, Column]:
    """Per receiving lane: the lane, the number of slots in use, and the bytes of its longest message."""
    receives = np.flatnonzero(plan.in_channel >= 0)
    lanes, counts = np.unique(plan.instruction_lane[receives], return_counts=True)
    slots, longest = (np.zeros(len(plan.lanes), dtype=np.int64) for _ in range(2))
    offered = np.array([channel.slots for channel in plan.channels], dtype=np.int64)[plan.in_channel[receives]]
    slots[plan.instruction_lane[receives]] = offered
    np.maximum.at(longest, plan.instruction_lane[receives], plan.bytes[receives])
    return lanes, np.minimum(slots[lanes], counts), longest[lanes]


def _is(plan: Plan, kinds: frozenset[int]) -> Column:
    """The instructions of these kinds."""
    return np.flatnonzero(np.isin(plan.kind, list(kinds)))


# Our run-time ---------------------------------------------------------------------------------------------------------


def _optcc_needs(plan: Plan) -> Iterator[ResourceNeed]:
    yield ResourceNeed("ranks", plan.n_ranks)
    itemsize = check_dtype(plan.transfers.dtype)
    columns = (plan.src_offset, plan.dst_offset, plan.bytes)
    rest = np.maximum.reduce([np.maximum(each, 0) % itemsize for each in columns])
    yield from _worst("bytes past a whole element", rest, _nowhere, np.arange(len(plan)))
    lanes, slots, longest = _slots(plan)
    size = [plan.buffer_bytes] * plan.n_ranks
    for lane, used, message in zip(lanes.tolist(), slots.tolist(), longest.tolist(), strict=True):
        size[plan.lane_rank[lane]] += used * -(-message // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    rank = size.index(max(size))
    yield ResourceNeed("bytes of a rank, slots included", size[rank], f"rank {rank}", rank)


def _mpi_needs(plan: Plan) -> Iterator[ResourceNeed]:
    yield from _optcc_needs(plan)
    receives = _is(plan, RECEIVES)
    yield from _worst("bytes of a message", plan.bytes[receives], _nowhere, receives)
    numbers = _channel_numbers(plan)
    channels = plan.in_channel[receives]
    yield from _worst("channels of a pair of ranks", numbers[channels] + 1, _nowhere, receives)


_OPTCC = (
    ResourceLimit("ranks", RANKS_MAX, "optcc.topology.RANKS_MAX"),
    ResourceLimit("bytes past a whole element", 0, "the executor's views are of whole elements"),
    ResourceLimit("bytes of a rank, slots included", 2**47, "address space"),
)
_MPI = (
    *_OPTCC,
    ResourceLimit("bytes of a message", 2**31 - 1, "counts are C ints"),
    ResourceLimit("channels of a pair of ranks", 2**15, "the standard promises the tags 0..32767"),
)
COUNTED: Mapping[str, TargetLimits] = MappingProxyType(
    {
        target.name: target
        for target in (
            TargetLimits("optcc", _OPTCC, _optcc_needs),
            TargetLimits("mpi", _MPI, _mpi_needs),
        )
    }
)
"""The targets whose limits are counted in the plan."""
_RUN_TIME = f"the run-time of optcc {version('optcc')}"
READERS: Mapping[str, str] = MappingProxyType(
    {
        "msccl-xml": "the interpreter of microsoft/msccl; RCCL's and that of msccl-executor-nccl take 64 steps and 64 "
        "thread blocks",
        "mscclpp-json": "the executor of MSCCL++ 0.8 and 0.9; that of 0.7 lacks remote buffers",
        "msccl": "the loader of microsoft/msccl",
        "rccl": "the loader of RCCL",
        "msccl-executor": "the loader of Azure/msccl-executor-nccl",
        "optcc": _RUN_TIME,
        "mpi": f"{_RUN_TIME} over an MPI of 32-bit counts",
    }
)
"""Whose limits they are, in which version."""
TARGETS = (*FILES, *COUNTED)
"""The names of all targets."""
