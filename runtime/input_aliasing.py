"""Which actions of a rank read its input, so that a run from one array to another need not copy it first.

In an AllReduce from `send` to `recv`, the plan's buffer is `recv`, and whatever an instruction reads there before
anything has been written there is the input: it may as well be read in `send`. A pass over the whole message less.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from optcc.plan import REDUCES
from optcc.runtime.state import PostRecv, PostSend, RankProgram

INSTRUCTIONS_MAX = 2048
"""Longer programs are not looked at: the order of all their pairs takes the square of them."""


def find_first_reads(program: RankProgram, in_order: bool) -> frozenset[int] | None:
    """The numbers of the actions that must read the input if it is not in the buffer; None if there is no telling, or
    if something of the buffer would be left unwritten.

    A send or local computation reads its source there, a reduction of what was received the former value of its target.
    `in_order` says that each instruction of a lane waits for the one before. Every two accesses to a byte one of which
    writes must be ordered, and each action's bytes must be all input, or none of them.
    """
    if program.n_instructions > INSTRUCTIONS_MAX:
        return None
    before = _all_before(program, in_order)
    reads: list[tuple[int, int, int, int]] = []
    writes: list[tuple[int, int, int]] = []
    for action in program.actions:
        if isinstance(action, PostRecv) or not action.bytes:
            continue
        i = action.instruction - program.first
        if isinstance(action, PostSend):
            # What an instruction has computed itself is no input.
            if program.computes[i] is None:
                reads.append((action.index, i, action.offset, action.offset + action.bytes))
        else:
            target = action.dst_offset, action.dst_offset + action.bytes
            writes.append((i, *target))
            if action.slot < 0:
                # A local computation has two operands; one code for both is enough only if there is one answer.
                return None
            if program.kind[i] in REDUCES:
                reads.append((action.index, i, *target))
    bounds = sorted({0, program.plan.buffer_bytes}.union(*((start, stop) for *_, start, stop in (*reads, *writes))))
    writers: list[list[int]] = [[] for _ in bounds[1:]]
    for i, start, stop in writes:
        for piece in range(bisect_left(bounds, start), bisect_left(bounds, stop)):
            writers[piece].append(i)
    firsts: list[int] = []
    for each in writers:
        first = next((i for i in each if all(j == i or before[j] >> i & 1 for j in each)), -1)
        if first < 0:
            return None
        firsts.append(first)
    found: set[int] = set()
    for index, i, start, stop in reads:
        answers = {
            _reads_input(before, i, firsts[piece])
            for piece in range(bisect_left(bounds, start), bisect_left(bounds, stop))
        }
        if len(answers) > 1 or None in answers:
            return None
        if True in answers:
            found.add(index)
    return frozenset(found)


def _reads_input(before: list[int], reader: int, writer: int) -> bool | None:
    """Whether an instruction reads a byte before `writer`, the first that writes it, has; None if they are not ordered.

    A reduction that is the first to write reads the input.
    """
    if reader == writer or before[writer] >> reader & 1:
        return True
    return False if before[reader] >> writer & 1 else None


def _all_before(program: RankProgram, in_order: bool) -> list[int]:
    """For each instruction, a bit for each that is over before it begins, by `after` and by the lanes."""
    n = program.n_instructions
    nexts = [list(each) for each in program.dependents]
    missing = program.after_count.copy()
    if in_order:
        for lane in program.lanes:
            for i, j in pairwise(lane):
                nexts[i].append(j)
                missing[j] += 1
    before = [0] * n
    ready = [i for i in range(n) if not missing[i]]
    while ready:
        i = ready.pop()
        for j in nexts[i]:
            before[j] |= before[i] | 1 << i
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    return before
