"""What MSCCL's interpreter makes of the steps of a thread block: its transmissions, in the order in which it does them.

The loader of the run-time, which is nearly the same in msccl, RCCL and msccl-executor, turns steps into transmissions:

- A `nop` is none. What it waits for is added to the waits of the next transmission, which must itself wait for
  something, or the loader refuses the file. Its `hasdep` is not read.
- A `re` joins the one before it if their places at `dst` and their buffers at `src` are equal, it waits for nothing and
  that one has no dependents. Then all have the `cnt` of the last. (A `nop` between them delays its wait past both.)
- A chain of them ends at the 16th `re` of the thread block, counted from the block's first.

A transmission that has dependents sets the flag of its block to its number when it is done, and one that waits for
(block, step) goes on when that flag is at least `step`. Numbers count waits and joined `re`s, not steps as written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from optcc.verify.gpu.msccl_file import READS, RECEIVES, SENDS, WRITES, ChunkPlace, MscclBlock, MscclFile, MscclStep
from optcc.verify.gpu.operations import StepPlace

CHAIN_MAX = 16


@dataclass(slots=True)
class Transmission:
    """A transmission; `sources` has a place for each `re` that it consists of. `number` is what its flag is set to."""

    step: MscclStep
    sources: list[ChunkPlace]
    count: int
    waits: list[tuple[int, int]]
    sets_flag: bool
    number: int = 0

    @property
    def receives(self) -> bool:
        return self.step.kind in RECEIVES

    @property
    def sends(self) -> bool:
        return self.step.kind in SENDS

    def reads(self) -> list[ChunkPlace]:
        """The places that are read, in the order of the sum."""
        read = list(self.sources) if self.step.kind in READS else []
        return [self.step.dst, *read] if self.step.kind == "re" else read

    def written(self) -> ChunkPlace | None:
        """The place that is written, if any."""
        return self.step.dst if self.step.kind in WRITES else None

    def place(self, block: MscclBlock) -> StepPlace:
        """Where it is in the file, and what it does."""
        return StepPlace(self.step.line, block.gpu, block.number, self.step.number, self._words(block))

    def _words(self, block: MscclBlock) -> str:
        def shown(place: ChunkPlace) -> str:
            buffer, first = place
            return f"{buffer}[{first}]" if self.count == 1 else f"{buffer}[{first}:{first + self.count}]"

        reads = [shown(each) for each in self.sources] if self.step.kind in READS else []
        reads = [*reads[:3], "..."] if len(reads) > 4 else reads
        words = [self.step.kind, " + ".join(reads)]
        words += [f"from GPU {block.recv}"] if self.receives else []
        written = self.written()
        words += [f"into {shown(written)}"] if written is not None else []
        words += [f"to GPU {block.send}"] if self.sends else []
        return " ".join(word for word in words if word)


@dataclass(slots=True)
class LoadedBlock:
    """A thread block as loaded; `refusal` is the line and the reason of a loader that refuses it, if any does."""

    block: MscclBlock
    transmissions: list[Transmission] = field(default_factory=list)
    refusal: tuple[int, str] | None = None


def load_block(block: MscclBlock) -> LoadedBlock:
    """The transmissions of a thread block.

    >>> from optcc.verify.gpu.msccl_file import MscclBlock, MscclStep
    >>> nop = MscclStep(3, 0, "nop", ("i", -1), ("o", -1), 0, (1, 0), False)
    >>> first = MscclStep(4, 1, "re", ("s", 0), ("i", 0), 1, (2, 0), False)
    >>> second = MscclStep(5, 2, "re", ("s", 1), ("i", 0), 1, None, True)
    >>> [one] = load_block(MscclBlock(2, 0, 0, -1, -1, 0, (nop, first, second))).transmissions
    >>> one.sources, one.waits, one.number
    ([('s', 0), ('s', 1)], [(1, 0), (2, 0)], 2)
    """
    loaded = LoadedBlock(block)
    made = loaded.transmissions
    pending: list[tuple[int, int]] = []
    chain: tuple[ChunkPlace, str] | None = None  # dst and the buffer of src that a further `re` must have to join
    reductions = 0
    for step in block.steps:
        if step.waits is not None:
            pending.append(step.waits)
        if step.kind == "nop":
            continue
        if step.kind == "re" and chain == (step.dst, step.src[0]) and step.waits is None:
            last = made[-1]
            last.step, last.count, last.sets_flag = step, step.count, step.has_dependents
            last.sources.append(step.src)
        else:
            if pending and step.waits is None and loaded.refusal is None:
                loaded.refusal = (step.line, "a step behind nops that wait must itself wait for something")
            made.append(Transmission(step, [step.src], step.count, pending, step.has_dependents))
            pending = []
        chain = None
        if step.kind == "re":
            reductions += 1
            if not step.has_dependents and reductions != CHAIN_MAX:
                chain = (step.dst, step.src[0])
            if len(made[-1].sources) > CHAIN_MAX and loaded.refusal is None:
                loaded.refusal = (step.line, f"more than {CHAIN_MAX} re in a row are one reduction")
    number = 0
    for each in made:
        number += max(0, len(each.waits) - 1) + len(each.sources) - 1
        each.number = number
        number += 1
    return loaded


def load_file(file: MscclFile) -> list[LoadedBlock]:
    """All thread blocks, by GPU and number."""
    return [load_block(block) for gpu in file.gpus for block in sorted(gpu.blocks, key=lambda block: block.number)]
