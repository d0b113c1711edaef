"""What waits for what: `Constraints` between transfers, read off a plan's instructions or off a neutral `Transfers`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column
from optcc.compiled import compiled
from optcc.errors import PlanError
from optcc.plan import Plan
from optcc.transfers import Transfers

DONE_START, SENT_START, DONE_DONE, SENT_DONE = range(4)
"""Kinds of an edge: what must have happened to `before`, and what it holds back of `after`.

Bit 0: only the last byte of `before` must have left. Bit 1: only the completion of `after` is held back, not its bytes.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Constraints between transfers, in columns: `before[i]` holds back `after[i]` in the way `kind[i]` says.

    `is_credit[i]` tells those that stand for a free slot of a lane.
    """

    n_transfers: int
    before: Column
    after: Column
    kind: Column
    is_credit: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def order(self) -> Lists:
        """For each transfer, those that hold back its start for another reason than a free slot; each once."""
        return self._starts(~self.is_credit)

    @property
    def credit(self) -> Lists:
        """For each transfer, the one that must free its slot, if any."""
        return self._starts(self.is_credit)

    def _starts(self, which: npt.NDArray[np.bool_]) -> Lists:
        chosen = which & (self.kind < DONE_DONE)
        code = np.unique(self.after[chosen] * self.n_transfers + self.before[chosen])
        counts = np.bincount(code // max(self.n_transfers, 1), minlength=self.n_transfers)
        return Lists(column(np.concatenate(([0], np.cumsum(counts)))), column(code % max(self.n_transfers, 1)))


def transfer_constraints(transfers: Transfers) -> Constraints:
    """Constraints of the neutral form: a transfer starts when those in its `after` are done, those in `order` sent."""
    n = np.arange(len(transfers))
    after, order = transfers.after, transfers.order
    return Constraints(
        len(transfers),
        column(np.concatenate((after.values, order.values))),
        column(np.concatenate((np.repeat(n, np.diff(after.starts)), np.repeat(n, np.diff(order.starts))))),
        column(np.repeat([DONE_START, SENT_START], [len(after.values), len(order.values)])),
        np.zeros(len(after.values) + len(order.values), dtype=np.bool_),
    )


def plan_constraints(plan: Plan) -> Constraints:
    """The constraints that the instructions of `plan` put between its transfers.

    An instruction has happened when all that it does has: its receive is done, its send has left. Then:

    - what an instruction is `after` of has happened before its send starts, or before its receive is done: bytes may
      flow into a slot before the receiver wants them;
    - as a lane issues in order, what an instruction waits for also holds back the later ones of its lane;
    - a lane sends one transfer at a time, and receives are done in the lane's order;
    - a fused instruction sends what it has received, so the receive is done before the send starts;
    - what a lane receives (i + slots)-th starts when its i-th receive is done and has freed its slot.

    Raises PlanError if a transfer between two ranks does not have one instruction that sends and one that receives.
    """
    n = len(plan.transfers)
    receives = plan.in_channel >= 0
    for verb, owners in (
        ("send", plan.send_transfer[plan.send_transfer >= 0]),
        ("receive", plan.recv_transfer[receives]),
    ):
        counts = np.bincount(owners, minlength=n)
        wrong = np.flatnonzero((counts != 1) & (plan.transfers.src != plan.transfers.dst))
        if len(wrong):
            index = int(wrong[0])
            raise PlanError(f"transfer {plan.transfers.describe(index)}: {counts[index]} {verb}s: must be one")
    room = 3 * len(plan.after.values) + 4 * len(plan)
    before, after, kind = (np.empty(room, dtype=np.int64) for _ in range(3))
    used = _kernels().lane_constraints(
        plan.lanes.starts,
        plan.after.starts,
        plan.after.values,
        plan.send_transfer,
        np.where(receives, plan.recv_transfer, -1),
        np.where(receives, -1, plan.recv_transfer),
        before,
        after,
        kind,
    )
    receiving = np.flatnonzero(receives)
    lane = plan.instruction_lane[receiving]
    slots = np.array([each.slots for each in plan.channels], dtype=np.int64)[plan.in_channel[receiving]]
    freed = np.arange(len(receiving)) - slots
    waits = np.flatnonzero((freed >= 0) & (lane[np.maximum(freed, 0)] == lane))
    return Constraints(
        n,
        column(np.concatenate((before[:used], plan.recv_transfer[receiving[freed[waits]]]))),
        column(np.concatenate((after[:used], plan.recv_transfer[receiving[waits]]))),
        column(np.concatenate((kind[:used], np.full(len(waits), DONE_START)))),
        np.arange(used + len(waits)) >= used,
    )


@cache
def _kernels() -> Any:
    return compiled((_lane_constraints,), globals())


def _lane_constraints(
    lane_first: Column,
    after_first: Column,
    after: Column,
    send: Column,
    recv: Column,
    local: Column,
    edge_before: Column,
    edge_after: Column,
    edge_kind: Column,
) -> int:
    """Writes the constraints of all lanes and returns their number.

    `send`, `recv` and `local` are for each instruction the transfer that it sends, receives or does by itself, or -1.
    In a lane, the sends are a chain, the receives are one and the local operations are one. What instruction i waits
    for is therefore needed once in each chain: at the first member from i on.
    """
    used = 0
    for lane in range(len(lane_first) - 1):
        begin = lane_first[lane]
        for chain in range(3):
            last = -1  # the previous transfer of this chain
            since = begin  # the first instruction whose `after` this chain has not seen
            for index in range(begin, lane_first[lane + 1]):
                transfer = send[index] if chain == 0 else recv[index] if chain == 1 else local[index]
                if transfer < 0:
                    continue
                held = 2 if chain == 1 else 0  # DONE_DONE or DONE_START; bit 0 says that leaving is enough
                if last >= 0:
                    edge_before[used], edge_after[used] = last, transfer
                    edge_kind[used] = held + (1 if chain == 0 else 0)
                    used += 1
                for at in range(after_first[since], after_first[index + 1]):
                    other = after[at]
                    if send[other] >= 0:
                        edge_before[used], edge_kind[used] = send[other], held + 1
                    else:
                        edge_before[used], edge_kind[used] = max(recv[other], local[other]), held
                    edge_after[used] = transfer
                    used += 1
                if chain == 0 and recv[index] >= 0:
                    edge_before[used], edge_after[used], edge_kind[used] = recv[index], transfer, 0
                    used += 1
                last = transfer
                since = index + 1
    return used
