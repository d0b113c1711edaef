"""The verifier of execution plans of MSCCL++ (JSON).

limits     the loader, of 0.7 or of 0.8 and 0.9, has room for the plan
matching   every channel is waited for as often as it is signalled, and every semaphore ends as it began
deadlock   all operations end
races      conflicting accesses are ordered, also between a call and the next, and with what the caller does
result     every GPU ends with what the collective promises, in the first call and in later ones
agreement  an AllReduce adds up each chunk in one order for all GPUs

A plan is judged for one call, and for calls that follow each other at once: two, or three if it has two halves of
scratch space for packets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from optcc.errors import CodecError
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Verdict
from optcc.verify.gpu.collective_result import GpuBuffers, check_gpu_agreement, check_gpu_result
from optcc.verify.gpu.mscclpp_executor import PACKETS, MscclppExecutor
from optcc.verify.gpu.mscclpp_file import CELLS_MAX, MscclppFile, MscclppOp
from optcc.verify.gpu.mscclpp_file_07 import is_mscclpp_07, parse_mscclpp_07
from optcc.verify.gpu.mscclpp_pipeline import has_pipelines, sizes_to_judge, written_out
from optcc.verify.gpu.operations import StepCounterexample, StepPlace, counter
from optcc.verify.plan import VERSION

_LOADERS = {
    "0.7": "the loader of MSCCL++ 0.7; chunks of a multiple of 16 B, in buffers that are whole allocations",
    "0.8": "the loader of MSCCL++ 0.8 and 0.9",
}
_COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "reduce")


def verify_mscclpp(data: bytes, name: str = "file.json") -> Verdict:
    """The verdict on the plan with these bytes.

    >>> verify_mscclpp(
    ...     b'{"name": "a", "collective": "allreduce", "protocol": "Simple", "inplace": true, "gpus": [{"id": 0,'
    ...     b'"input_chunks": 1, "output_chunks": 1, "scratch_chunks": 0, "threadblocks": []}]}'
    ... ).verdict
    'proved'

    Raises CodecError for what is not such a plan, or has something that is not judged.
    """
    file = read_mscclpp(data)
    properties = {"limits": UNKNOWN, **dict.fromkeys(PROPERTIES, UNKNOWN)}
    conditions: list[tuple[str, str]] = []
    found = None
    for property_, found in _findings(name, file, conditions):
        if found is not None:
            properties[property_] = REFUTED
            break
        properties[property_] = PROVED
    return Verdict(hashlib.sha256(data).hexdigest(), properties, found, VERSION, tuple(conditions))


def read_mscclpp(data: bytes) -> MscclppFile:
    """The plan with these bytes, in the form of 0.8; raises CodecError for what is of neither format, or not judged."""
    return parse_mscclpp_07(data) if is_mscclpp_07(data) else MscclppFile.parse(data)


def _findings(
    name: str, file: MscclppFile, conditions: list[tuple[str, str]]
) -> Iterator[tuple[str, StepCounterexample | None]]:
    """Each property with its counterexample, None if it holds."""
    plan = file.plan
    conditions.append(("limits", _LOADERS[file.version]))
    crowded = check_room(name, file)
    if crowded is not None:
        yield "limits", crowded
    later = 3 if plan.use_double_scratch_buffer else 2
    runs = []
    for each in _of_sizes(file, conditions):
        buffers = buffers_of(each)
        runs += [(buffers, MscclppExecutor(name, each, buffers, calls)) for calls in (1, later)]
    yield "limits", _first(run.find_outside() for _, run in runs[::2])
    yield "matching", _first(run.match() for _, run in runs[::2])
    for _, run in runs:
        run.run()
    for property_ in ("deadlock", "races"):
        conditions += [("races", f"{later} calls one after the other, and so for all")] if property_ == "races" else []
        yield property_, _first(run.found for _, run in runs if run.found and run.found.property == property_)
    if runs[0][0].collective == "custom":
        return
    for buffers, run in runs:
        wrong_result, root = check_gpu_result(name, buffers, run.captured, run.ops, file.lines)
        yield "result", wrong_result
    conditions += [("result", f"root {root}")] if root >= 0 else []
    for buffers, run in runs:
        yield "agreement", check_gpu_agreement(name, buffers, run.captured, run.ops)


def _first(found: Iterable[StepCounterexample | None]) -> StepCounterexample | None:
    return next((each for each in found if each is not None), None)


def _of_sizes(file: MscclppFile, conditions: list[tuple[str, str]]) -> list[MscclppFile]:
    """The plan as it is performed; one with pipelines for some sizes of its chunks."""
    if not has_pipelines(file):
        return [file]
    cell, chunks = sizes_to_judge(file)
    conditions.append(("deadlock", f"pipelines: chunks of {', '.join(str(each * cell) for each in chunks)} B"))
    return [written_out(file, cell, each) for each in chunks]


def buffers_of(file: MscclppFile) -> GpuBuffers:
    """The cells of the GPUs of a plan; of `collective` "custom" where its name is none that is known.

    Plans in place may name the chunks of one side only, and `output_chunks` 0 must not mean that nothing is promised:
    a side that has fewer chunks than the collective gives it has as many.

    Raises CodecError if these would be too many.
    """
    collective = file.plan.collective.lower().replace("_", "")
    collective = collective if collective in _COLLECTIVES else "custom"
    in_place, n_gpus = file.plan.inplace, len(file.plan.gpus)
    inputs = [gpu.input_chunks for gpu in file.plan.gpus]
    outputs = [gpu.output_chunks for gpu in file.plan.gpus]
    least_in, least_out = 0, max(*inputs, *outputs)
    if collective == "allgather":
        least_in = max(*inputs, max(outputs) // n_gpus)
        least_out = n_gpus * least_in
    elif collective == "reducescatter":
        least_out = max(*outputs, max(inputs) // n_gpus)
        least_in = n_gpus * least_out
    elif collective == "custom":
        least_out = 0
    elif in_place or collective in ("allreduce", "alltoall"):
        least_in = least_out
    capacity = [
        {"i": max(least_in, gpu.input_chunks), "o": max(least_out, gpu.output_chunks), "s": gpu.scratch_chunks}
        for gpu in file.plan.gpus
    ]
    cells = file.parts * sum(sum(each.values()) for each in capacity)
    if cells > CELLS_MAX:
        raise CodecError(f"$.gpus: {cells} parts of chunks, with what {collective} needs: must be at most {CELLS_MAX}")
    return GpuBuffers(
        collective, [{name: count * file.parts for name, count in each.items()} for each in capacity], in_place
    )


def check_room(name: str, file: MscclppFile) -> StepCounterexample | None:
    """The first thing that the loader has no room for."""
    plan = file.plan
    if plan.min_message_size > plan.max_message_size:
        what = f"min_message_size {plan.min_message_size}: must be at most max_message_size {plan.max_message_size}"
        return counter(name, "limits", what, StepPlace(1))
    for number, what in file.unloadable[:1]:
        return counter(name, "limits", what, StepPlace(file.lines[number], number))
    for gpu in plan.gpus:
        if file.version != "0.7" and any(
            each.channel_type == "switch" and each.buffer_type is None for each in gpu.channels
        ):
            what = "a switch channel without buffer_type, which the loader reads"
            return counter(name, "limits", what, StepPlace(file.lines[gpu.id], gpu.id))
        if plan.min_message_size >= 2**31:
            what = f"min_message_size {plan.min_message_size}: must be below 2^31, it is read as an int"
            return counter(name, "limits", what, StepPlace(1))
        for block in gpu.threadblocks:
            lines = file.op_lines[gpu.id][block.id]
            place = StepPlace(lines[0] if lines else file.lines[gpu.id], gpu.id, block.id)
            channels = [len(each.channel_ids) for each in block.channels]
            buffers = [len(each.remote_buffer_ids) for each in block.remote_buffer_refs]
            for what, amount, most in (
                ("operations", len(block.listed()), 64),
                ("channels of a type", max(channels, default=0), 16),
                ("remote buffers of a type", max(buffers, default=0), 16),
            ):
                if amount > most:
                    return counter(name, "limits", f"{amount} {what}: must be at most {most}", place)
            for k, op in enumerate(block.listed()):
                rule = _op_limit(op)
                if op.name in PACKETS and plan.protocol != "LL":
                    rule = f"protocol {plan.protocol}: must be LL for packets, which need twice the scratch space"
                if rule is not None:
                    return counter(name, "limits", rule, StepPlace(lines[k], gpu.id, block.id, k, op.word))
    return None


def _op_limit(op: MscclppOp) -> str | None:
    """What is too much for an operation, if anything is."""
    if len(op.channel_ids) > 8:
        return f"{len(op.channel_ids)} channels: must be at most 8"
    if len(op.semaphore_ids) > 16:
        return f"{len(op.semaphore_ids)} semaphores: must be at most 16"
    if op.barrier_id is not None and op.barrier_id >= 16:
        return f"barrier_id {op.barrier_id}: must be below 16"
    return None
