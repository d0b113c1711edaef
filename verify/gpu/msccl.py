"""The verifier of MSCCL's XML, the algorithms that GPUs interpret.

limits     a run-time's loader takes the file (`optcc.verify.gpu.msccl_limits`): the one named, or one of the three
matching   the k-th send of a connection and its k-th receive have one count, and none is left
deadlock   all steps end, though a connection holds 2 messages (Simple) or 8 (LL, LL128)
races      conflicting accesses to a chunk are ordered by thread blocks, waits and messages
result     every GPU ends with what the collective promises, each contribution once; out of place, its input unchanged
agreement  an AllReduce adds up each chunk in one order for all GPUs

A file is judged for every way in which it may be called: in place (`i` and `o` are one buffer, or one is a part of the
other), out of place, or both.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from optcc.errors import InputError
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Verdict
from optcc.verify.gpu.collective_result import GpuBuffers, check_gpu_agreement, check_gpu_result
from optcc.verify.gpu.msccl_file import MscclFile
from optcc.verify.gpu.msccl_interpreter import load_file
from optcc.verify.gpu.msccl_limits import MAX_BYTES_DEFAULT, RUNTIMES, MscclRuntime, check_loader
from optcc.verify.gpu.msccl_progress import SLOT_BYTES, SLOTS, Progress, match, run
from optcc.verify.gpu.operations import MESSAGE, GpuOp, Region, StepCounterexample, counter
from optcc.verify.gpu.races import find_gpu_race
from optcc.verify.plan import VERSION

MSCCL_TARGETS = tuple(each.name for each in RUNTIMES)


def verify_msccl(data: bytes, name: str = "file.xml", target: str | None = None) -> Verdict:
    """The verdict on the file with these bytes, for one run-time of `MSCCL_TARGETS` or for any of them.

    >>> def gpu(number: int, *kinds: str) -> str:
    ...     places = 'srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"'
    ...     steps = "".join(f'<step s="{s}" type="{kind}" {places}/>' for s, kind in enumerate(kinds))
    ...     block = f'<tb id="0" send="{1 - number}" recv="{1 - number}" chan="0">{steps}</tb>'
    ...     return f'<gpu id="{number}" i_chunks="1" o_chunks="0" s_chunks="0">{block}</gpu>'
    >>> head = '<algo name="a" proto="LL" nchannels="1" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="1">'
    >>> verify_msccl(f'{head}{gpu(0, "s", "r")}{gpu(1, "rrc", "s")}</algo>'.encode()).verdict
    'proved'
    >>> found = verify_msccl(f'{head}{gpu(0, "s", "r")}{gpu(1, "r", "s")}</algo>'.encode()).counterexample
    >>> print(found.summary)
    file.xml: line 1, GPU 0, thread block 0, step 1: r from GPU 1 into i[0]: i[0] lacks the contribution i[0] of GPU 1

    Raises CodecError for what is not such an algorithm, InputError for a target that is unknown.
    """
    runtimes = [each for each in RUNTIMES if target in (None, each.name)]
    if not runtimes:
        raise InputError(f"target {target!r}: must be one of {', '.join(MSCCL_TARGETS)}")
    file = MscclFile.parse(data)
    properties = {"limits": UNKNOWN, **dict.fromkeys(PROPERTIES, UNKNOWN)}
    conditions: list[tuple[str, str]] = []
    found = None
    for property_, found in _Judge(name, file).findings(data, runtimes, conditions):
        if found is not None:
            properties[found.property] = REFUTED
            break
        properties[property_] = PROVED
    return Verdict(hashlib.sha256(data).hexdigest(), properties, found, VERSION, tuple(conditions))


class _Judge:
    """Judges a file, one property after the other."""

    def __init__(self, name: str, file: MscclFile) -> None:
        self.name, self.file = name, file
        self.loaded = load_file(file)

    def findings(
        self, data: bytes, runtimes: Sequence[MscclRuntime], conditions: list[tuple[str, str]]
    ) -> Iterator[tuple[str, StepCounterexample | None]]:
        """Each property with its counterexample, None if it holds; adds what they hold under to `conditions`."""
        yield "limits", self._limits(data, runtimes, conditions)
        found, progress = match(self.name, self.loaded)
        yield "matching", found
        yield "deadlock", self._deadlock(progress, conditions)
        judged = [self._memory(progress, in_place, conditions) for in_place in self.file.places]
        for property_ in ("races", "result", "agreement"):
            for found in (wrong.get(property_) for wrong in judged):
                if found is not None:
                    yield property_, found
            if property_ == "races" or self.file.collective != "custom":
                yield property_, None

    def _limits(
        self, data: bytes, runtimes: Sequence[MscclRuntime], conditions: list[tuple[str, str]]
    ) -> StepCounterexample | None:
        refused = {each.name: check_loader(self.file, data, self.loaded, each) for each in runtimes}
        taken = [name for name, refusal in refused.items() if refusal is None]
        reasons = [f"{name}: {refusal[0]}: {refusal[1]}" for name, refusal in refused.items() if refusal is not None]
        if taken:
            no = f"; not {'; not '.join(reasons)}" if reasons else ""
            conditions.append(("limits", ", ".join(taken) + no))
            return None
        place, rule = next(each for each in refused.values() if each is not None)
        who = "no run-time takes this" if len(runtimes) > 1 else f"{runtimes[0].name} does not take this"
        return counter(self.name, "limits", f"{rule}: {who}", place, reasons if len(reasons) > 1 else ())

    def _deadlock(self, progress: Progress, conditions: list[tuple[str, str]]) -> StepCounterexample | None:
        """Single chunks a message first, then as many as the largest call that the file is for."""
        slots, slot_bytes = SLOTS[self.file.protocol], SLOT_BYTES[self.file.protocol]

        def stuck(chunks: int) -> StepCounterexample | None:
            return run(self.name, self.loaded, slots, chunks, progress)

        found = stuck(1)
        if found is None:
            conditions.append(("deadlock", f"connections with room for {slots} messages, for all sizes"))
            return None
        longest = max(one.count for each in self.loaded for one in each.transmissions)
        if longest == 1 or stuck(longest) is not None:
            return found
        enough = bisect_left(range(1, longest), True, key=lambda chunks: stuck(chunks) is None) + 1
        size = int(self.file.attributes.get("maxBytes", MAX_BYTES_DEFAULT))
        safe = slot_bytes // enough * self.file.n_chunks
        if 0 < size <= safe:
            stuck(enough)
            room = f"{slots} messages of {slot_bytes} B, for calls of up to {size} B"
            conditions.append(("deadlock", f"connections with room for {room}"))
            return None
        offered = f"up to {size} B" if size else "any size"
        ends = f"with messages of {enough} chunks all steps end: in calls of up to {safe} B; the file is for {offered}"
        return replace(found, trace=(*found.trace, ends))

    def _memory(
        self, progress: Progress, in_place: bool, conditions: list[tuple[str, str]]
    ) -> dict[str, StepCounterexample]:
        """What is wrong with the memory of a call in place, or out of place: the first property that fails."""
        file = self.file
        buffers = GpuBuffers(file.collective, [file.capacity(gpu) for gpu in file.gpus], in_place)
        outside = self._outside(buffers)
        if outside is not None:
            return {"races": outside}
        ops = self._ops(progress, buffers)
        race = find_gpu_race(self.name, ops, len(self.loaded), buffers.n_cells, buffers.named)
        if race is not None:
            return {"races": race}
        if file.collective == "custom":
            return {}
        lines = [gpu.line for gpu in file.gpus]
        contents = buffers.contents()
        contents.run(ops)
        wrong, root = check_gpu_result(self.name, buffers, contents, ops, lines)
        if wrong is not None:
            return {"result": wrong}
        if root >= 0 and ("result", f"root {root}") not in conditions:
            conditions.append(("result", f"root {root}"))
        disagreement = check_gpu_agreement(self.name, buffers, contents, ops)
        return {} if disagreement is None else {"agreement": disagreement}

    def _outside(self, buffers: GpuBuffers) -> StepCounterexample | None:
        """A step that reaches beyond a buffer, into memory that is not its own."""
        for loaded in self.loaded:
            for one in loaded.transmissions:
                written = one.written()
                for buffer, first in (*one.reads(), *(() if written is None else (written,))):
                    chunks = buffers.chunks(loaded.block.gpu, buffer)
                    if first < 0 or first + one.count > chunks:
                        what = (
                            f"{buffer}[{first}:{first + one.count}] is outside of {buffer}, which has {chunks} chunks"
                        )
                        return counter(self.name, "races", what, one.place(loaded.block))
        return None

    def _ops(self, progress: Progress, buffers: GpuBuffers) -> list[GpuOp]:
        """The ops in the order in which they end."""
        number = {step: index for index, step in enumerate(progress.order)}
        early = self.file.protocol != "Simple"
        ops = []
        for at, done in progress.order:
            block, one = self.loaded[at].block, self.loaded[at].transmissions[done]

            def region(buffer: str, first: int, gpu: int = block.gpu, count: int = one.count) -> Region:
                cell = buffers.cell(gpu, buffer, first)
                return cell, cell + count

            written = one.written()
            sender = progress.sender.get((at, done))
            ops.append(
                GpuOp(
                    at,
                    one.place(block),
                    (*(region(*each) for each in one.reads()), *((MESSAGE,) if one.receives else ())),
                    () if written is None else (region(*written),),
                    tuple(number[each] for each in progress.awaited[at, done]),
                    -1 if sender is None else number[sender],
                    one.sends,
                    early,
                )
            )
        return ops
