"""The buffers of a collective's GPUs, and what they must hold when it is done.

In place, the input and the output of a GPU are one buffer; of an AllGather the input is a part of the output, of a
ReduceScatter the output a part of the input. Out of place they are two, and the input must be left as it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from optcc.verify.gpu.contents import NOTHING, GpuContents, Leaf, SumNodes
from optcc.verify.gpu.operations import GpuOp, StepCounterexample, StepPlace, counter


def calls_of_message(collective: str, n_gpus: int) -> int:
    """How many times the size of a call the message has: in an AllToAll a call has the blocks of one rank."""
    return n_gpus if collective == "alltoall" else 1


class GpuBuffers:
    """The cells of all GPUs: `i`, `o` and `s` of each, of `capacity[gpu][buffer]` chunks."""

    def __init__(self, collective: str, capacity: Sequence[dict[str, int]], in_place: bool) -> None:
        self.collective, self.in_place, self._capacity = collective, in_place, capacity
        self.n_gpus = len(capacity)
        self._base: list[dict[str, int]] = []
        self._start: list[int] = []
        self.n_cells = 0
        for gpu, chunks in enumerate(capacity):
            self._start.append(self.n_cells)
            base = {"i": self.n_cells, "o": self.n_cells}
            if not in_place:
                base["o"] += chunks["i"]
                data = chunks["i"] + chunks["o"]
            else:
                data = max(chunks["i"], chunks["o"])
                if collective == "allgather":
                    base["i"] += gpu * chunks["i"]
                elif collective == "reducescatter":
                    base["o"] += gpu * chunks["o"]
            base["s"] = self.n_cells + data
            self._base.append(base)
            self.n_cells += data + chunks["s"]

    def chunks(self, gpu: int, buffer: str) -> int:
        """How many chunks a buffer has."""
        return self._capacity[gpu][buffer]

    def cell(self, gpu: int, buffer: str, chunk: int) -> int:
        """The cell of a chunk."""
        return self._base[gpu][buffer] + chunk

    def first(self, gpu: int) -> int:
        """The first cell of a GPU."""
        return self._start[gpu]

    def owner(self, cell: int) -> int:
        """The GPU whose cell it is."""
        return bisect_right(self._start, cell) - 1

    def named(self, cell: int) -> str:
        """What a cell is called: `GPU 3 i[5]`."""
        gpu = self.owner(cell)
        order = "oi" if self.collective == "allgather" else "io"
        for buffer in ("s", *order):
            first = self._base[gpu][buffer]
            if first <= cell < first + self._capacity[gpu][buffer]:
                return f"GPU {gpu} {buffer}[{cell - first}]"
        raise AssertionError(cell)

    def contents(self) -> GpuContents:
        """Memory before the first step: inputs, and nothing elsewhere."""
        nodes = SumNodes()
        cells = [NOTHING] * self.n_cells
        for gpu in range(self.n_gpus):
            for chunk in range(self.chunks(gpu, "i")):
                cells[self.cell(gpu, "i", chunk)] = nodes.leaf((gpu, chunk))
        return GpuContents(nodes, cells, [-1] * self.n_cells)

    def wanted(self, gpu: int, chunk: int, root: int) -> dict[Leaf, int] | None:
        """The contributions that chunk `chunk` of the output of `gpu` must have; None if it may hold anything."""
        share = self.chunks(gpu, "i" if self.collective == "allgather" else "o")
        if self.collective == "allreduce":
            return {(other, chunk): 1 for other in range(self.n_gpus)}
        if self.collective == "reducescatter":
            return {(other, gpu * share + chunk): 1 for other in range(self.n_gpus)}
        if self.collective == "allgather":
            return {(chunk // share, chunk % share): 1}
        if self.collective == "alltoall":
            part = self.chunks(gpu, "o") // self.n_gpus
            return {(chunk // part, gpu * part + chunk % part): 1}
        if self.collective == "broadcast":
            return {(root, chunk): 1}
        assert self.collective == "reduce"
        return {(other, chunk): 1 for other in range(self.n_gpus)} if gpu == root else None


def check_gpu_result(
    file: str, buffers: GpuBuffers, contents: GpuContents, ops: Sequence[GpuOp], lines: Sequence[int]
) -> tuple[StepCounterexample | None, int]:
    """What a GPU ends with that the collective does not promise, if anything; and the root, -1 where there is none.

    The file of a rooted collective does not say its root: it is right if it is for one of them. `lines` are those of
    the GPUs.
    """
    counts: dict[int, dict[Leaf, int]] = {}

    def wrong_for(root: int) -> tuple[int, int, dict[Leaf, int]] | None:
        for gpu in range(buffers.n_gpus):
            for chunk in range(buffers.chunks(gpu, "o")):
                wanted = buffers.wanted(gpu, chunk, root)
                node = contents.cells[buffers.cell(gpu, "o", chunk)]
                if wanted is None:
                    continue
                if node != NOTHING and node not in counts:
                    counts[node] = contents.nodes.counts(node)
                if node == NOTHING or counts[node] != wanted:
                    return gpu, chunk, wanted
        return None

    rooted = buffers.collective in ("broadcast", "reduce")
    first = None
    for root in range(buffers.n_gpus if rooted else 1):
        wrong = wrong_for(root)
        if wrong is None:
            return _changed_input(file, buffers, contents, ops), root if rooted else -1
        first = first or wrong
    assert first is not None
    return _explain(file, buffers, contents, ops, lines, *first), -1


def _how(buffers: GpuBuffers) -> str:
    return "in place" if buffers.in_place else "out of place"


def _explain(
    file: str,
    buffers: GpuBuffers,
    contents: GpuContents,
    ops: Sequence[GpuOp],
    lines: Sequence[int],
    gpu: int,
    chunk: int,
    wanted: dict[Leaf, int],
) -> StepCounterexample:
    """What is wrong with a chunk of the output, and where it went wrong."""
    cell = buffers.cell(gpu, "o", chunk)
    name = buffers.named(cell).split(" ", 2)[2]
    node, writer = contents.cells[cell], contents.writer[cell]
    home = StepPlace(lines[gpu], gpu) if writer < 0 else ops[writer].place
    trace = [_how(buffers)]
    if writer >= 0:
        trace.append(f"last written by {ops[writer].place}")
    if node == NOTHING:
        if writer < 0 or ops[writer].place.step < 0:
            return counter(file, "result", f"{name} of the output is never written", home, trace[:1])
        index, empty = contents.empty_reads[0]
        trace.append(f"{buffers.named(empty)} is read there, and nothing had written it")
        return counter(file, "result", f"{name} depends on what was never written", ops[index].place, trace)
    held = contents.nodes.counts(node)
    twice = next((leaf for leaf, times in held.items() if times > 1 and leaf in wanted), None)
    foreign = next((leaf for leaf in held if leaf not in wanted), None)
    if twice is not None:
        at = contents.nodes.first_sum_with(node, twice, 2)
        what = f"{name} has {_leaf(twice)} {held[twice]} times"
    elif foreign is not None:
        at = contents.nodes.first_sum_with(node, foreign, 1)
        what = f"{name} has {_leaf(foreign)}, which does not belong there"
    else:
        lacking = next(leaf for leaf in wanted if leaf not in held)
        at = -1
        what = f"{name} lacks {_leaf(lacking)}"
    if at >= 0:
        home = ops[at].place
    return counter(file, "result", what, home, trace)


def _leaf(leaf: Leaf) -> str:
    return f"the contribution i[{leaf[1]}] of GPU {leaf[0]}"


def _changed_input(
    file: str, buffers: GpuBuffers, contents: GpuContents, ops: Sequence[GpuOp]
) -> StepCounterexample | None:
    """A step that has changed the input of a call out of place, if any."""
    if buffers.in_place:
        return None
    for gpu in range(buffers.n_gpus):
        for chunk in range(buffers.chunks(gpu, "i")):
            cell = buffers.cell(gpu, "i", chunk)
            writer = contents.writer[cell]
            if writer >= 0 and contents.cells[cell] != contents.nodes.leaf((gpu, chunk)):
                what = f"changes i[{chunk}], the caller's input, of a call out of place"
                return counter(file, "result", what, ops[writer].place)
    return None


def check_gpu_agreement(
    file: str, buffers: GpuBuffers, contents: GpuContents, ops: Sequence[GpuOp]
) -> StepCounterexample | None:
    """Two GPUs for which an AllReduce has added up a chunk in two orders, so that their bits may differ."""
    if buffers.collective != "allreduce":
        return None
    for chunk in range(buffers.chunks(0, "o")):
        cells = [buffers.cell(gpu, "o", chunk) for gpu in range(buffers.n_gpus)]
        for cell in cells[1:]:
            if contents.cells[cell] != contents.cells[cells[0]]:
                writers = [contents.writer[each] for each in (cells[0], cell)]
                places = [ops[each].place for each in writers if each >= 0]
                what = f"{buffers.named(cell)} and {buffers.named(cells[0])} are sums in different orders"
                return counter(file, "agreement", what, places[-1], places)
    return None
