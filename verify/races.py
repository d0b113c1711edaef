"""Race freedom: two accesses to the same bytes of a rank, one of them a write, are ordered by happens-before.

Happens-before is that of the least patient run-time: lanes order only the *issue* of instructions, so accesses are
ordered by dependencies, by messages and by slots that were freed, never by standing in the same lane. An access takes
from its instruction's issue to its done; A is before B if A's done happens before B's issue.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from optcc.plan import LOCALS, SEND, Plan
from optcc.verdict import Counterexample


class HappensBefore:
    """Answers "is A done before B is issued", by walking back from B; `place` is any order in which events happen."""

    def __init__(self, plan: Plan, place: list[int]) -> None:
        self._after = list(plan.after)
        self._place = place
        self._lane_before = [-1] * len(plan)
        for lane in plan.lanes:
            for before, behind in pairwise(lane):
                self._lane_before[behind] = before
        self._sent_by = [-1] * len(plan)
        self._freed_by = [-1] * len(plan)  # an event: a fused receive frees its slot before it is done
        for sends, receives in plan.channel_ends:
            for send, receive in zip(sends, receives, strict=True):
                self._sent_by[receive] = send
        for receives, slots in plan.lane_receives:
            for receive, later in zip(receives, receives[slots:], strict=False):
                self._freed_by[self._sent_by[later]] = 2 * receive + (plan.out_channel[receive] < 0)

    def __call__(self, before: int, behind: int) -> bool:
        """True if instruction `before` is done before instruction `behind` is issued, in every run."""
        if before in self._after[behind]:
            return True
        horizon = self._place[before]
        seen = {2 * behind}
        stack = [2 * behind]  # 2 * i: issue of i; 2 * i + 1: done of i
        while stack:
            event = stack.pop()
            instruction, done = divmod(event, 2)
            if done:
                causes = [2 * instruction]
                if self._sent_by[instruction] >= 0:
                    causes.append(2 * self._sent_by[instruction])
                if self._freed_by[instruction] >= 0:
                    causes.append(self._freed_by[instruction])
            else:
                causes = [2 * each + 1 for each in self._after[instruction]]
                if self._lane_before[instruction] >= 0:
                    causes.append(2 * self._lane_before[instruction])
            for cause in causes:
                if cause == 2 * before + 1:
                    return True
                if cause not in seen and self._place[cause // 2] >= horizon:
                    seen.add(cause)
                    stack.append(cause)
        return False


def check_races(plan: Plan, order: list[int]) -> Counterexample | None:
    """None if all conflicting accesses are ordered, else two that are not. `order`: events in an order that happens.

    Checking each access against the last writer and the readers since is enough: orders compose.
    """
    place = [0] * len(plan)
    for position, event in enumerate(order):
        place[event // 2] = position
    sequence = sorted(range(len(plan)), key=place.__getitem__)
    happens_before = HappensBefore(plan, place)
    reads, writes = _accesses(plan)
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for instruction in sequence:
        if reads[instruction] != writes[instruction] and _overlap(reads[instruction], writes[instruction]):
            return _race(plan, instruction, instruction, "reads what it writes at another place")
        for atom in reads[instruction]:
            last = writer.get(atom, -1)
            if last >= 0 and not happens_before(last, instruction):
                return _race(plan, last, instruction, "reads what the other writes")
        for atom in writes[instruction]:
            earlier = readers.get(atom) or ([writer[atom]] if atom in writer else [])
            for each in earlier:
                if not happens_before(each, instruction):
                    how = "overwrites what the other reads" if readers.get(atom) else "writes what the other writes"
                    return _race(plan, each, instruction, how)
        for atom in reads[instruction]:
            readers.setdefault(atom, []).append(instruction)
        for atom in writes[instruction]:
            writer[atom] = instruction
            readers[atom] = []
    return None


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _accesses(plan: Plan) -> tuple[list[range], list[range]]:
    """For each instruction, the atoms it reads without writing them, and those it writes; atoms are per rank."""
    reads = (plan.kind == SEND) | np.isin(plan.kind, list(LOCALS))
    writes = plan.dst_offset >= 0
    starts = np.concatenate((plan.src_offset[reads], plan.dst_offset[writes]))
    cuts = np.unique(np.concatenate((starts, starts + np.concatenate((plan.bytes[reads], plan.bytes[writes])))))
    base = plan.instruction_rank * len(cuts)

    def atoms(offset: np.ndarray, present: np.ndarray) -> list[range]:
        low = np.searchsorted(cuts, offset)
        high = np.searchsorted(cuts, offset + plan.bytes)
        return [
            range(b + first, b + last) if there else range(0)
            for b, first, last, there in zip(base.tolist(), low.tolist(), high.tolist(), present.tolist(), strict=True)
        ]

    return atoms(plan.src_offset, reads), atoms(plan.dst_offset, writes)


def _race(plan: Plan, first: int, second: int, how: str) -> Counterexample:
    a, b = plan[first], plan[second]
    spans = [
        (offset, offset + each.bytes)
        for each in (a, b)
        for offset in ((each.dst_offset if each.dst_offset >= 0 else each.src_offset),)
    ]
    low, high = max(span[0] for span in spans), min(span[1] for span in spans) - 1
    return Counterexample(
        "races",
        f"rank {a.rank} bytes {low}..{high}: nothing orders two accesses; the second {how}",
        a.rank,
        low,
        high,
        tuple(f"{each}: {plan.transfers.describe(max(each.recv_transfer, each.send_transfer))}" for each in (a, b)),
    )
