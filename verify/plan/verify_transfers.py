"""The verifier of `Transfers`: properties 1 to 5 of the neutral form, which other tools can write.

The form constrains less than a plan: a transfer starts when all of its `after` are done, transfers that `after` does
not order may overlap in any way, and `order` is optional for the run-time. So:

matching   holds by form: a line is a send and its receive
deadlock   `after` and `order` together have no cycle
races      conflicting accesses are ordered by `after` alone; an access lasts as long as its transfer
result     as for plans, in one order that `after` allows; without races all orders give the same
agreement  as for plans
"""

from __future__ import annotations

import numpy as np

from optcc.arrays import Column, Lists, column
from optcc.plan import LOCAL_COPY, LOCAL_REDUCE, RECV, RECV_REDUCE, SEND, Channel, Plan
from optcc.schedule import REDUCE
from optcc.transfers import Transfers
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Counterexample, Verdict
from optcc.verify.plan import VERSION, conclude
from optcc.verify.plan.plan_graph import build_graph
from optcc.verify.plan.races import HOW, ITSELF, OVERWRITE, READ, WRITE, Causes, find_race
from optcc.verify.plan.topological_order import pack_edges, topological_order


def verify_transfers(transfers: Transfers) -> Verdict:
    """The verdict on `transfers`; its digest is that of `free_plan`, which it does not allow to run: it has no seal.

    >>> from optcc.passes.bind import bind
    >>> from optcc.passes.depend import depend
    >>> from optcc.schedules.ring import ring
    >>> bound = bind(ring(n_ranks=3), 12, "float32", "sum")
    >>> verify_transfers(depend(bound)).verdict, verify_transfers(bound).properties["races"]
    ('proved', 'refuted')
    """
    plan = free_plan(transfers)
    properties = dict.fromkeys(PROPERTIES, UNKNOWN) | {"matching": PROVED}

    def refuted(found: Counterexample) -> Verdict:
        return Verdict(plan.digest, properties | {found.property: REFUTED}, found, VERSION)

    cycle, sequence = _check_cycle(transfers)
    if cycle is not None:
        return refuted(cycle)
    properties["deadlock"] = PROVED
    race = _check_races(transfers, sequence)
    if race is not None:
        return refuted(race)
    return conclude(plan, plan.digest, build_graph(plan), _events(plan, sequence), properties | {"races": PROVED})


def free_plan(transfers: Transfers) -> Plan:
    """A plan as unconstrained as the form: each instruction has its own lane, each message its own channel. It has no
    dependencies; the verifier takes these from `after`.
    """
    n = len(transfers)
    remote = transfers.src != transfers.dst
    # By rank; the send of transfer t is 2 * t, its receive or local operation 2 * t + 1.
    of = np.concatenate((2 * np.flatnonzero(remote), 2 * np.arange(n) + 1))
    rank = np.where(of & 1, transfers.dst[of >> 1], transfers.src[of >> 1])
    of = of[np.lexsort((of, rank))]
    transfer, sends = of >> 1, of & 1 == 0
    channel = np.where(remote, np.cumsum(remote) - 1, -1)[transfer]
    local, receives = ~remote[transfer], remote[transfer] & ~sends
    reduces = transfers.op[transfer] == REDUCE
    ends = zip(transfers.src[remote].tolist(), transfers.dst[remote].tolist(), strict=True)
    return Plan(
        "transfers",
        transfers,
        tuple(Channel(src, dst, 1) for src, dst in ends),
        lane_rank=column(np.where(sends, transfers.src[transfer], transfers.dst[transfer])),
        lanes=Lists(column(np.arange(len(of) + 1)), column(np.arange(len(of)))),
        kind=column(
            np.where(
                sends,
                SEND,
                np.where(local, np.where(reduces, LOCAL_REDUCE, LOCAL_COPY), np.where(reduces, RECV_REDUCE, RECV)),
            )
        ),
        in_channel=column(np.where(receives, channel, -1)),
        out_channel=column(np.where(sends, channel, -1)),
        src_offset=column(np.where(receives, -1, transfers.src_offset[transfer])),
        dst_offset=column(np.where(sends, -1, transfers.dst_offset[transfer])),
        bytes=column(transfers.bytes[transfer]),
        recv_transfer=column(np.where(sends, -1, transfer)),
        send_transfer=column(np.where(sends, transfer, -1)),
        after=Lists.empty(len(of)),
    )


def _events(plan: Plan, sequence: Column) -> Column:
    """The events of `free_plan` if its transfers run one at a time, in this sequence."""
    sent = np.full(len(plan.transfers), -1, dtype=np.int64)
    sends = np.flatnonzero(plan.send_transfer >= 0)
    sent[plan.send_transfer[sends]] = sends
    ended = np.empty(len(plan.transfers), dtype=np.int64)
    others = np.flatnonzero(plan.recv_transfer >= 0)
    ended[plan.recv_transfer[others]] = others
    both = np.stack((sent[sequence], ended[sequence]), axis=1).reshape(-1)
    both = both[both >= 0]
    return np.stack((2 * both, 2 * both + 1), axis=1).reshape(-1)


def _check_cycle(transfers: Transfers) -> tuple[Counterexample | None, Column]:
    """A cycle of `after` and `order`, or a topological order of all transfers."""
    earlier = [[*a, *b] for a, b in zip(transfers.after, transfers.order, strict=True)]
    owners = np.repeat(np.arange(len(earlier)), [len(waits) for waits in earlier])
    sequence = topological_order(*pack_edges(len(earlier), column(each for waits in earlier for each in waits), owners))
    if len(sequence) == len(earlier):
        return None, sequence
    stuck = set(range(len(earlier))).difference(sequence.tolist())
    walk = [min(stuck)]
    while walk.count(walk[-1]) == 1:  # every stuck transfer waits for another stuck one, so this revisits one
        walk.append(next(other for other in earlier[walk[-1]] if other in stuck))
    cycle = walk[walk.index(walk[-1]) : -1]
    trace = tuple(f"{transfers.describe(each)} waits for" for each in cycle)
    summary = f"{len(cycle)} transfers wait for each other"
    rank = int(transfers.dst[cycle[0]])
    return Counterexample("deadlock", summary, rank=rank, trace=(*trace, "the first of these")), sequence


def _check_races(transfers: Transfers, sequence: Column) -> Counterexample | None:
    """Two conflicting accesses that `after` does not order, if any; `sequence` is a topological order of `after`."""
    t = transfers
    n = len(t)
    ends = (t.src_offset, t.src_offset + t.bytes, t.dst_offset, t.dst_offset + t.bytes)
    cuts = np.unique(np.concatenate(ends))
    read, read_stop, write, write_stop = (np.searchsorted(cuts, each) for each in ends)
    place = np.empty(n, dtype=np.int64)
    place[sequence] = np.arange(n)
    none = np.full(n, -1, dtype=np.int64)
    found = find_race(
        sequence,
        (read + t.src * len(cuts), read_stop + t.src * len(cuts)),
        (write + t.dst * len(cuts), write_stop + t.dst * len(cuts)),
        t.n_ranks * len(cuts),
        Causes(t.after.starts, t.after.values, none, none, none, none, place),
    )
    if found is None:
        return None
    first, second, how = found
    # ITSELF: one transfer reads and writes; else which of the two reads, if one does.
    ranks, offsets = (t.dst, t.src), (t.dst_offset, t.src_offset)
    a, b = {ITSELF: (1, 0), READ: (0, 1), OVERWRITE: (1, 0), WRITE: (0, 0)}[how]
    rank = int(ranks[a][first])
    assert rank == ranks[b][second]
    low = int(max(offsets[a][first], offsets[b][second]))
    high = int(min(offsets[a][first] + t.bytes[first], offsets[b][second] + t.bytes[second])) - 1
    summary = f"rank {rank} bytes {low}..{high}: `after` leaves two transfers unordered; the second {HOW[how]}"
    return Counterexample("races", summary, rank, low, high, (t.describe(first), t.describe(second)))
