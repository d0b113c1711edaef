"""The timeline of a predicted run as a Chrome trace (JSON), which ui.perfetto.dev reads.

    process        a server; its threads are its ports `out` and `in`, and of each GPU `gpu 0 out`, `gpu 0 in` for what
                   stays in the server and `gpu 0 local` for local operations; threads that nothing uses are left out
    slice (X)      a transfer at a port, from its first byte there to its last, named by its stage: one at its source
                   and one at its destination, with an arrow (s, f) from the one to the other
    instant (i)    a local operation, which takes no time
    args           of slices and instants: transfer, from, to, op, bytes, offset (in the destination's buffer), segment,
                   and the author's line where it is known
    otherData      schedule, collective, size, port model, seconds, and for each port the share of the time it is busy

Times are whole nanoseconds, written in microseconds as the format wants them. Slices that overlap at one port (which
several transfers may share in the model `fair`) stand in further threads, `out (2)`, `out (3)`, ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from optcc.arrays import Column
from optcc.errors import PlanError, TopologyError
from optcc.plan import Plan
from optcc.schedule import OPS
from optcc.timing import Timing
from optcc.topology import Topology

_NS = 1e9
_LINE = ',"line":%d'
_SERVER_THREADS = ("out", "in")
_GPU_THREADS = ("out", "in", "local")
_SHARERS_MAX = 10_000
"""Threads of one port are sorted as one number: no plan has so many transfers at one port at once that it matters."""


def write_perfetto(plan: Plan, topology: Topology, timing: Timing) -> bytes:
    """What `plan` does when on `topology`, as `timing` (of `optcc.simulate`, for this plan and topology) predicts it.

    Raises TopologyError if the topology has another number of ranks, PlanError if the times are those of another plan.
    """
    if topology.n_ranks != plan.n_ranks:
        raise TopologyError(f"topology of {topology.n_ranks} ranks: the plan is for {plan.n_ranks} ranks")
    if len(timing.start_s) != len(plan.transfers):
        raise PlanError(f"perfetto: times of {len(timing.start_s)} transfers: must be {len(plan.transfers)}")
    other = {
        "schedule": plan.name,
        "collective": plan.collective.name,
        "size_bytes": plan.size_bytes,
        "ports": timing.model,
        "seconds": timing.seconds,
        "busy": timing.utilisation(),
    }
    head = f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(other)},\n"traceEvents": [\n'
    return (head + ",\n".join(_events(plan, topology, timing)) + "\n]}\n").encode()


def _events(plan: Plan, topology: Topology, timing: Timing) -> Iterator[str]:
    """The names of processes and threads, then the slices of each thread in their order, arrows behind their slices."""
    transfers, server_of = plan.transfers, np.array(topology.rank_server)
    gpu_of = np.array([gpu for server in topology.servers for gpu in range(server.gpus)])
    server = np.stack((server_of[transfers.src], server_of[transfers.dst]))
    gpu = np.stack((gpu_of[transfers.src], gpu_of[transfers.dst]))
    outside, moves = server[0] != server[1], transfers.src != transfers.dst
    thread = np.where(outside, 0, len(_SERVER_THREADS) + len(_GPU_THREADS) * gpu)
    thread[1] += moves
    thread[1, ~moves] += _GPU_THREADS.index("local")
    first, stop = _intervals(plan, topology, timing, outside)
    sharer = np.zeros_like(thread)
    for side in (0, 1):
        which = np.flatnonzero(moves)
        sharer[side, which] = _separate(server[side, which], thread[side, which], first[side, which], stop[side, which])
    places = np.stack((server, thread, sharer), axis=1)  # side, coordinate, transfer
    seen = np.concatenate((places[0][:, moves], places[1]), axis=1)
    yield from _names(topology, np.unique(seen, axis=1).T.tolist())
    names, args = [json.dumps(stage) for stage in transfers.stages], _args(plan)
    stage = transfers.stage.tolist()
    for side in (0, 1):
        which = np.flatnonzero(moves | (side == 1))
        order = which[np.lexsort((first[side, which], sharer[side, which], thread[side, which], server[side, which]))]
        columns = [each[side, order].tolist() for each in (server, thread, sharer, first, stop)]
        for t, moving, process, base, share, start, end in zip(
            order.tolist(), moves[order].tolist(), *columns, strict=True
        ):
            place = f'"pid":{process + 1},"tid":{base * _SHARERS_MAX + share + 1}'
            name = names[stage[t]]
            if not moving:
                yield f'{{"ph":"i","s":"t","name":{name},{place},"ts":{_us(end)},"args":{args[t]}}}'
                continue
            yield (
                f'{{"ph":"X","name":{name},"cat":"transfer",{place},"ts":{_us(start)},"dur":{_us(end - start)},'
                f'"args":{args[t]}}}'
            )
            # In the middle of the slice, where it cannot be taken for one of its neighbours.
            ends = '"f","bp":"e"' if side else '"s"'
            yield f'{{"ph":{ends},"id":{t},"name":"message","cat":"message",{place},"ts":{_us((start + end) // 2)}}}'


def _intervals(plan: Plan, topology: Topology, timing: Timing, outside: np.ndarray) -> tuple[Column, Column]:
    """For each transfer from when to when it is at its source and at its destination, in nanoseconds."""
    server_of = np.array(topology.rank_server)[plan.transfers.dst]
    port = np.array([float(server.in_) for server in topology.servers])[server_of]
    fabric = np.array([float(server.fabric or 0) for server in topology.servers])[server_of]
    rate = np.where(outside, port, fabric)
    needed = np.divide(plan.transfers.bytes, rate, out=np.zeros(len(rate)), where=rate > 0)
    stay_s = timing.landed_s(np.arange(len(needed)), needed)
    local = plan.transfers.src == plan.transfers.dst
    first = np.stack((timing.start_s, timing.taken_s))
    stop = np.stack((timing.sent_s, np.where(local, timing.end_s, stay_s)))
    return np.rint(first * _NS).astype(np.int64), np.rint(stop * _NS).astype(np.int64)


def _separate(process: Column, thread: Column, first: Column, stop: Column) -> Column:
    """For each interval which of its thread's sharers it is, such that the intervals of one do not overlap."""
    sharer = np.zeros(len(first), dtype=np.int64)
    order = np.lexsort((stop, first, thread, process))
    same = (process[order[1:]] == process[order[:-1]]) & (thread[order[1:]] == thread[order[:-1]])
    if not (same & (first[order[1:]] < stop[order[:-1]])).any():
        return sharer
    busy: list[tuple[int, int]] = []
    idle: list[int] = []
    before = (-1, -1)
    for index in order.tolist():
        here = (int(process[index]), int(thread[index]))
        if here != before:
            busy, idle, before = [], [], here
        while busy and busy[0][0] <= first[index]:
            heappush(idle, heappop(busy)[1])
        number = heappop(idle) if idle else len(busy)
        sharer[index] = number
        heappush(busy, (int(stop[index]), number))
    return sharer


def _names(topology: Topology, seen: list[list[int]]) -> Iterator[str]:
    """Processes and threads that are used, and the order in which they are shown."""
    for process in dict.fromkeys(process for process, _, _ in seen):
        yield _metadata("process_name", process + 1, 0, "name", topology.servers[process].name)
        yield _metadata("process_sort_index", process + 1, 0, "sort_index", process)
    for process, thread, sharer in seen:
        gpu, which = divmod(thread - len(_SERVER_THREADS), len(_GPU_THREADS))
        name = _SERVER_THREADS[thread] if gpu < 0 else f"gpu {gpu} {_GPU_THREADS[which]}"
        tid = thread * _SHARERS_MAX + sharer + 1
        yield _metadata("thread_name", process + 1, tid, "name", name if sharer == 0 else f"{name} ({sharer + 1})")
        yield _metadata("thread_sort_index", process + 1, tid, "sort_index", tid)


def _metadata(kind: str, pid: int, tid: int, key: str, value: str | int) -> str:
    return f'{{"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"args":{{"{key}":{json.dumps(value)}}}}}'


def _args(plan: Plan) -> list[str]:
    """For each transfer what is known of it."""
    t = plan.transfers
    columns = (t.src, t.dst, t.op, t.bytes, t.dst_offset, t.segment, t.line)
    return [
        f'{{"transfer":{index},"from":{src},"to":{dst},"op":"{OPS[op]}","bytes":{size},"offset":{offset},'
        f'"segment":{segment}{_LINE % line if line > 0 else ""}}}'
        for index, (src, dst, op, size, offset, segment, line) in enumerate(
            zip(*(each.tolist() for each in columns), strict=True)
        )
    ]


def _us(nanoseconds: int) -> str:
    """Microseconds, exact.

    >>> _us(1234567), _us(5)
    ('1234.567', '0.005')
    """
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"
