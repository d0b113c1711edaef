"""Pipelines of MSCCL++: operations that a thread block repeats, each turn on the next part of their places.

A pipeline with a unit of u bytes and n chunks has ceil(n * chunk / u) turns, whatever its operations name. In turn i
each of them does bytes i * u to (i + 1) * u of its places, and no more than these have; signals, waits and semaphores
are whole ones in every turn. Where places are shorter than n chunks, a turn begins behind their end: their length less
where the turn begins is then a large number, as the kernel subtracts without a sign, and a whole unit is moved there.

So the number of turns depends on the size of the call, and a plan is judged for several sizes of its chunks, in halves
of the units' greatest common divisor: `sizes_to_judge`. `written_out` is the plan for one of them, turn after turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, gcd

import msgspec

from optcc.errors import CodecError
from optcc.verify.gpu.mscclpp_file import UNIT_STEP, MscclppBlock, MscclppFile, MscclppGpu, MscclppOp, MscclppPlan

SMALL = 4
"""As many sizes are judged from the least one on, and one large size."""
DEPTH_MAX = 16
"""Turns of the large size, at most; at least three more than any semaphore lets a block be ahead."""
OPS_MAX = 2**16
"""Operations of a plan that is written out."""
_SCRATCH_BYTES = 2**26
"""Scratch space of a plan that reuses resources; larger chunks would be cut short there."""


class TurnOp(MscclppOp, frozen=True):
    """An operation in a turn of a pipeline: cells `first` to `last` of each of its places."""

    turn: int = 0
    first: int = 0
    last: int = 0


def has_pipelines(file: MscclppFile) -> bool:
    """Whether what the plan does depends on the size of the call."""
    return any(op.ops for op in _ops(file.plan))


def _ops(plan: MscclppPlan) -> Iterator[MscclppOp]:
    return (op for gpu in plan.gpus for block in gpu.threadblocks for op in block.ops)


def _units(plan: MscclppPlan) -> list[int]:
    return [op.iter_context.unit_size for op in _ops(plan) if op.iter_context is not None]


def sizes_to_judge(file: MscclppFile) -> tuple[int, list[int]]:
    """Half of what divides all units, in bytes, and how many of these the chunks have, in each size to be judged.

    (All of it, where its half is none of words.)

    Raises CodecError if the plan allows no size in which its scratch space has room for whole chunks.
    """
    whole = gcd(*_units(file.plan))
    half = whole if whole // 2 % UNIT_STEP else whole // 2
    chunks = max(max(gpu.input_chunks, gpu.output_chunks) for gpu in file.plan.gpus)
    least = max(1, ceil(file.plan.min_message_size / max(1, chunks * half)))
    most = max(least, ceil(file.plan.max_message_size / max(1, chunks * half)))
    if file.plan.reuse_resources:
        most = min(most, *(_whole_chunks(file.plan, gpu) // half for gpu in file.plan.gpus))
    if least > most:
        size = file.plan.min_message_size
        raise CodecError(f"$.min_message_size: {size}: chunks cut short in scratch space: is not judged")
    ahead = max((each.init_value for gpu in file.plan.gpus for each in gpu.semaphores), default=0)
    turn = max(_units(file.plan)) // half
    deep = least - 1 + turn * min(ahead + 3, DEPTH_MAX) - turn // 2
    return half, sorted({each for each in (*range(least, least + SMALL), deep) if each <= most})


def _whole_chunks(plan: MscclppPlan, gpu: MscclppGpu) -> int:
    """Bytes of the longest chunks that scratch space of a fixed size holds whole, in all turns."""
    if not gpu.scratch_chunks:
        return 2**62
    longest = max(op.iter_context.num_chunks for op in _ops(plan) if op.iter_context is not None)
    return _SCRATCH_BYTES // (2 if plan.use_double_scratch_buffer else 1) // gpu.scratch_chunks // longest


def written_out(file: MscclppFile, cell: int, chunk: int) -> MscclppFile:
    """The plan for chunks of `chunk` times `cell` bytes, which divide all units; each turn's operations one by one.

    Raises CodecError if these are too many.
    """
    count = sum(1 + len(op.ops) * _turns(op, cell, chunk) for op in _ops(file.plan))
    if count > OPS_MAX:
        raise CodecError(f"$.gpus: {count} operations in all turns of pipelines: must be at most {OPS_MAX}")
    gpus, lines, steps = [], [], []
    for gpu, own in zip(file.plan.gpus, file.op_lines, strict=True):
        blocks, block_lines, block_steps = [], [], []
        for block, listed in zip(gpu.threadblocks, own, strict=True):
            written = list(_of_block(block, cell, chunk, file.parts))
            blocks.append(msgspec.structs.replace(block, ops=[op for _, op in written]))
            block_lines.append([listed[step] for step, _ in written])
            block_steps.append([step for step, _ in written])
        gpus.append(msgspec.structs.replace(gpu, threadblocks=blocks))
        lines.append(block_lines)
        steps.append(block_steps)
    plan = msgspec.structs.replace(file.plan, gpus=gpus)
    return replace(file, plan=plan, op_lines=lines, parts=file.parts * chunk, steps=steps)


def written_for(file: MscclppFile, chunk_bytes: int) -> MscclppFile:
    """`written_out` for chunks of so many bytes.

    Raises CodecError also where scratch space of a fixed size would cut them short.
    """
    if file.plan.reuse_resources and any(_whole_chunks(file.plan, gpu) < chunk_bytes for gpu in file.plan.gpus):
        raise CodecError(f"chunks of {chunk_bytes} B: cut short in scratch space: is not judged")
    cell = gcd(chunk_bytes, *_units(file.plan))
    return written_out(file, cell, chunk_bytes // cell)


def _turns(op: MscclppOp, cell: int, chunk: int) -> int:
    context = op.iter_context
    return 0 if context is None else -(-context.num_chunks * chunk * cell // context.unit_size)


def _of_block(block: MscclppBlock, cell: int, chunk: int, parts: int) -> Iterator[tuple[int, MscclppOp]]:
    """The operations of a block with the number that the loader gives each."""
    step = 0
    for op in block.ops:
        if op.iter_context is None:
            yield step, op
        else:
            width = op.iter_context.unit_size // cell * parts
            for turn in range(_turns(op, cell, chunk)):
                for number, each in enumerate(op.ops, 1):
                    fields = {name: getattr(each, name) for name in MscclppOp.__struct_fields__}
                    yield step + number, TurnOp(**fields, turn=turn, first=turn * width, last=(turn + 1) * width)
        step += 1 + len(op.ops)
