"""What each transfer of a plan waits for if every port serves in a fixed order: a graph whose longest paths are times.

Transfer t has three moments: it *starts*, its in port *takes* it, it is *done*. With o and i the durations of its bytes
at its out port and at its in port:

    exclusive  it holds both ports for m = max(o, i): taken = start; left = start + m; done >= left + latency
    fifo       each port at its own rate, with buffering in between: left = start + o; taken >= start + max(0, o - i),
               so that the in port never pauses; done >= taken + i + latency

A port's next transfer starts when the previous one has left it (fifo: an in port takes the next one when the previous
one is complete). All other dependencies are those of `optcc.simulate.plan_constraints`: on data, on bytes still being
read, on lane order, on a slot.

**Uplinks.** A transfer from pod to pod, or between switches of a graph, *passes* uplinks between its two ports, each
from a moment on and for u, the duration of its bytes there. An uplink serves one transfer at a time as well: the next
one passes u or more after the one before.

    exclusive  it passes all its uplinks when it starts, and m is the longest of all its durations, theirs too (whether
               it holds its ports while it waits for an uplink makes no difference: in their order it is next)
    fifo       it passes the first one at its start or later, each other one when it passes the one before or later
               (first bytes are forwarded at once); taken >= pass + max(0, u - i), so that the last byte is past each
               uplink when the in port is through

With the orders of all ports and all uplinks given, a longest path is therefore exact: it is the time of the one
execution in which everything happens as soon as these rules allow.

This is the exact statement of the port rules. It shares no code with the simulator's, which it checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.errors import PlanError
from optcc.plan import Plan
from optcc.simulate import DONE_DONE, plan_constraints
from optcc.verify.plan.topological_order import pack_edges, topological_order

ExactModel = Literal["exclusive", "fifo"]
Chains = tuple[tuple[Column, Column], tuple[Column, Column]]
"""For out ports and for in ports: transfers, and their successors on the same port."""
START, TAKEN, DONE = range(3)
MOMENTS = 3
BY_ITSELF, BY_INSTRUCTION, BY_SLOT, BY_OUT_PORT, BY_IN_PORT, BY_UPLINK = range(6)
"""Reasons of an edge: the duration of the transfer, an instruction, a slot, its out port, its in port, an uplink."""


class Durations(NamedTuple):
    """For each transfer, in one unit: from start to `left`, from start to `taken` by an idle in port, from `taken` to
    `landed`, and its `latency`."""

    left: npt.NDArray[Any]
    taken: npt.NDArray[Any]
    landed: npt.NDArray[Any]
    latency: npt.NDArray[Any]

    @classmethod
    def of(
        cls, out: npt.NDArray[Any], in_: npt.NDArray[Any], latency: npt.NDArray[Any], model: ExactModel
    ) -> Durations:
        """Those of transfers that occupy their ports for `out` and `in_`."""
        if model == "fifo":
            return cls(out, np.maximum(out - in_, 0), in_, latency)
        both = np.maximum(out, in_)
        return cls(both, np.zeros_like(both), both, latency)

    def beside(self, ways: npt.NDArray[Any], model: ExactModel) -> Durations:
        """Those of transfers that also occupy uplinks, for the times in their rows of `ways`."""
        if model == "fifo" or ways.shape[1] == 0:
            return self
        slowest = np.maximum(self.landed, ways.max(axis=1))
        return self._replace(left=slowest, landed=slowest)


class Passages(NamedTuple):
    """Passage k: transfer `transfer[k]` passes an uplink that it occupies for `lasts[k]`; those of one transfer are
    consecutive, in the order of its way. On their uplinks, passage `after[j]` is the next one after `before[j]`."""

    transfer: Column
    lasts: npt.NDArray[Any]
    before: Column
    after: Column


@dataclass(frozen=True, slots=True, eq=False)
class PortGraph:
    """Node `MOMENTS` * t + `START`, `TAKEN` or `DONE` is a moment of transfer t, `transfer_of[node]`; under fifo the
    nodes that follow are when it passes its uplinks. Edges are sorted by their tail.

    Edge e: node `after[e]` is at least `weight[e]` later than node `before[e]`; `reason[e]` says why.
    """

    order: Column
    first: Column
    before: Column
    after: Column
    weight: npt.NDArray[Any]
    reason: Column
    transfer_of: Column


_Edges = tuple[Column, Column, npt.NDArray[Any], Column | int]
"""From, to, weights, reasons."""


def build_port_graph(
    plan: Plan, chains: Chains, durations: Durations, model: ExactModel, passages: Passages | None = None
) -> PortGraph:
    """The graph of `plan` with its ports in the order of `chains` and its uplinks in that of `passages`; durations may
    be rows, which become its weights.

    Raises PlanError for a plan that `plan_constraints` refuses, or a transfer that would wait for itself.
    """
    n = len(plan.transfers)
    each = MOMENTS * np.arange(n)
    in_moment = TAKEN if model == "fifo" else START
    edges = plan_constraints(plan)
    sent_is_enough = (edges.kind & 1) == 1
    held_back = durations.left[edges.before]
    held_back[~sent_is_enough] = 0
    (out_before, out_after), (in_before, in_after) = chains
    parts: list[_Edges] = [
        (each + START, each + TAKEN, durations.taken, BY_ITSELF),
        (each + TAKEN, each + DONE, durations.landed + durations.latency, BY_ITSELF),
        (MOMENTS * out_before + START, MOMENTS * out_after + START, durations.left[out_before], BY_OUT_PORT),
        (MOMENTS * in_before + in_moment, MOMENTS * in_after + in_moment, durations.landed[in_before], BY_IN_PORT),
        (
            MOMENTS * edges.before + np.where(sent_is_enough, START, DONE),
            MOMENTS * edges.after + np.where(edges.kind >= DONE_DONE, DONE, START),
            held_back,
            np.where(edges.is_credit, BY_SLOT, BY_INSTRUCTION),
        ),
    ]
    transfer_of = np.repeat(np.arange(n), MOMENTS)
    if passages is not None:
        parts += _pass_uplinks(passages, durations, model, MOMENTS * n)
        transfer_of = np.concatenate((transfer_of, passages.transfer)) if model == "fifo" else transfer_of
    nodes = len(transfer_of)
    before, after = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    weight = np.concatenate([part[2] for part in parts])
    reason = np.concatenate([np.broadcast_to(np.int64(0) + part[3], len(part[0])) for part in parts])
    first, by_before = pack_edges(nodes, before, np.arange(len(before)))
    after = after[by_before]
    order = topological_order(first, after)
    if len(order) < nodes:
        stuck = int(transfer_of[np.setdiff1d(np.arange(nodes), order)].min())
        raise PlanError(f"{plan.transfers.describe(stuck)}: waits for itself once the ports keep their order")
    return PortGraph(order, first, before[by_before], after, weight[by_before], reason[by_before], transfer_of)


def _pass_uplinks(passages: Passages, durations: Durations, model: ExactModel, first_node: int) -> list[_Edges]:
    """The edges of `passages`, whose nodes under fifo begin with `first_node`."""
    transfer, lasts, before, after = passages
    start, taken = MOMENTS * transfer + START, MOMENTS * transfer + TAKEN
    if model == "exclusive":
        return [(start[before], start[after], lasts[before], BY_UPLINK)]
    node, none = first_node + np.arange(len(transfer)), np.zeros_like(lasts)
    is_next = np.concatenate(([False], transfer[1:] == transfer[:-1]))
    came_from = np.where(is_next, node - 1, start)
    return [
        (came_from, node, none, BY_ITSELF),
        (node, taken, np.maximum(lasts - durations.landed[transfer], 0), BY_ITSELF),
        (node[before], node[after], lasts[before], BY_UPLINK),
    ]


def instructions_of(plan: Plan) -> tuple[Column, Column]:
    """For each transfer the instruction that sends it and the one that receives it or does it locally; -1: none."""
    sender, receiver = (np.full(len(plan.transfers), -1, dtype=np.int64) for _ in range(2))
    for owner, transfers in ((sender, plan.send_transfer), (receiver, plan.recv_transfer)):
        owned = np.flatnonzero(transfers >= 0)
        owner[transfers[owned]] = owned
    return sender, receiver


def chain(port: Column, *keys: npt.NDArray[Any]) -> tuple[Column, Column]:
    """Consecutive transfers of each port (-1: none), sorted by `keys`."""
    used = np.flatnonzero(port >= 0)
    order = used[np.lexsort((*(key[used] for key in reversed(keys)), port[used]))]
    same = port[order[1:]] == port[order[:-1]]
    return order[:-1][same], order[1:][same]
