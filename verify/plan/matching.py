"""Matching: the i-th send of a channel meets the i-th receive, with the same bytes; each does what its transfer says.

A message without a receive is a hang; a message longer than its receive is a buffer overflow.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from optcc.plan import KINDS, LOCALS, REDUCES, Channel, Plan
from optcc.schedule import REDUCE
from optcc.verdict import Counterexample
from optcc.verify.plan.plan_graph import by_channel


def check_matching(plan: Plan) -> Counterexample | None:
    """None if every send meets its receive, else the first that does not."""
    sends, receives = by_channel(plan.out_channel), by_channel(plan.in_channel)
    sending, receiving = plan.out_channel[sends], plan.in_channel[receives]
    if len(sends) == len(receives):
        unlike = (sending != receiving) | (plan.bytes[sends] != plan.bytes[receives])
        unlike |= plan.send_transfer[sends] != plan.recv_transfer[receives]
        if not unlike.any():
            return _check_provenance(plan)
    for number, channel in enumerate(plan.channels):
        wrong = _check_channel(plan, channel, sends[sending == number].tolist(), receives[receiving == number].tolist())
        if wrong is not None:
            return wrong
    raise AssertionError("some channel is unlike")


def _check_channel(plan: Plan, channel: Channel, sends: list[int], receives: list[int]) -> Counterexample | None:
    """None if every send of `channel` meets its receive, else the first that does not."""
    for position, (send, receive) in enumerate(zip_longest(sends, receives)):
        if send is None or receive is None:
            here = plan[receive if send is None else send]
            missing = "send" if send is None else "receive"
            return _unmatched(
                f"channel {channel}: {len(sends)} sends and {len(receives)} receives",
                (f"{here} has no {missing} to meet at position {position}",),
                here.rank,
            )
        if plan.bytes[send] != plan.bytes[receive] or plan.send_transfer[send] != plan.recv_transfer[receive]:
            return _unmatched(
                f"channel {channel}: message {position} goes out with {plan.bytes[send]} B of transfer "
                f"#{plan.send_transfer[send]}, its receive wants {plan.bytes[receive]} B of "
                f"#{plan.recv_transfer[receive]}",
                (str(plan[send]), str(plan[receive])),
                channel.dst,
            )
    return None


def _check_provenance(plan: Plan) -> Counterexample | None:
    """Every transfer is sent once and received once, by instructions with its ranks, bytes and operation."""
    transfers = plan.transfers
    n = len(transfers)
    remote = transfers.src != transfers.dst
    for what, which, wanted in (("sent", plan.send_transfer, remote), ("received", plan.recv_transfer, True)):
        counts = np.bincount(which[which >= 0], minlength=n)
        unlike = np.flatnonzero(counts != np.broadcast_to(wanted, n))
        if len(unlike):
            t = int(unlike[0])
            return _unmatched(f"transfer #{t} is {what} {counts[t]} times", (transfers.describe(t),), None)
    sends = np.flatnonzero(plan.send_transfer >= 0)
    receives = np.flatnonzero(plan.recv_transfer >= 0)
    local = np.flatnonzero(np.isin(plan.kind, list(LOCALS)))
    sent, received, done = plan.send_transfer[sends], plan.recv_transfer[receives], plan.recv_transfer[local]
    read = np.where(plan.src_offset >= 0, plan.src_offset, plan.dst_offset)  # a fused one sends what it has written
    rank, reduces = plan.instruction_rank, np.isin(plan.kind, list(REDUCES))
    for what, instructions, of, wrong in (
        ("sends from another rank", sends, sent, rank[sends] != transfers.src[sent]),
        ("sends other bytes", sends, sent, read[sends] != transfers.src_offset[sent]),
        ("sends more or fewer bytes", sends, sent, plan.bytes[sends] != transfers.bytes[sent]),
        ("receives at another rank", receives, received, rank[receives] != transfers.dst[received]),
        ("writes other bytes", receives, received, plan.dst_offset[receives] != transfers.dst_offset[received]),
        ("writes more or fewer bytes", receives, received, plan.bytes[receives] != transfers.bytes[received]),
        ("does another operation", receives, received, reduces[receives] != (transfers.op[received] == REDUCE)),
        ("reads other bytes", local, done, plan.src_offset[local] != transfers.src_offset[done]),
        ("stays on another rank", local, done, rank[local] != transfers.src[done]),
    ):
        bad = np.flatnonzero(wrong)
        if len(bad):
            instruction, transfer = int(instructions[bad[0]]), int(of[bad[0]])
            return _unmatched(
                f"{KINDS[plan.kind[instruction]]} #{instruction} {what} than its transfer says",
                (str(plan[instruction]), transfers.describe(transfer)),
                int(rank[instruction]),
            )
    return None


def _unmatched(summary: str, trace: tuple[str, ...], rank: int | None) -> Counterexample:
    return Counterexample("matching", summary, rank=rank, trace=trace)
