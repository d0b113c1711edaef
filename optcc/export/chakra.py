"""Chakra execution traces (MLCommons): what ASTRA-sim replays, a file for each rank.

A file is a sequence of protobuf messages, each with its length before it as a varint: a GlobalMetadata, then the rank's
nodes. Protobuf's wire format is public and small, so no package is needed for it. The fields written here, by the
numbers of the schema `et_def.proto`:

    GlobalMetadata   1 version (string)
    Node             1 id (uint64)   2 name (string)   3 type (enum)   5 data_deps (uint64s of the same file)   10 attr
    AttributeProto   1 name (string), and one of   7 int32   9 int64   27 bool   29 string

Types are COMP 4, SEND 5, RECV 6, COMM_COLL 7. The attributes of a SEND or RECV are comm_src, comm_dst, comm_tag (int32)
and comm_size (int64, bytes); all nodes have is_cpu_op = false.
"""

from __future__ import annotations

from collections.abc import Iterator

from optcc.errors import InputError, PlanError
from optcc.plan import Plan
from optcc.schedule import OPS

VERSION = "0.0.4"
COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
TAGS = 2**31
_VARINT, _BYTES = 0, 2


def write_chakra(plan: Plan, pieces: int = 1) -> tuple[bytes, ...]:
    """For each rank its trace, for the files `NAME.0.et`, `NAME.1.et`, ...

    In `pieces` above one, every message of so many bytes is that many messages of the same transfer, one after the
    other: a switch that stores a message before it forwards it is then late by one piece, not by the whole. Behind the
    RECVs of a transfer is a COMP, which waits for all of them. The tag of piece i of transfer t is `t * pieces + i`.

    A send is a SEND; a receive is a RECV, and a COMP behind it if it reduces; a local operation is a COMP. A COMP has
    no duration. A node waits (`data_deps`) for what its instruction waits for; a SEND also for what the instructions of
    its lane since the last one waited for; a fused send for its receive. No SEND waits for a SEND, in its lane or in
    another one: in ASTRA-sim a SEND ends when its message has arrived, so there would be one message on its way at a
    time. It waits for what that one waits for, and for a fused one for its receive: both only read. There a port
    carries messages in the order in which they are issued, that of the ids. The tag is the transfer's number.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> len(write_chakra(compile_schedule(ring(n_ranks=4), size_bytes=16)))
    4

    Raises InputError for fewer than one piece, PlanError if there are more messages than tags.
    """
    if pieces < 1:
        raise InputError(f"pieces {pieces}: must be one or more")
    if len(plan.transfers) * pieces > TAGS:
        what = f"{len(plan.transfers)} transfers in {pieces} pieces"
        raise PlanError(f"chakra: {what}: must be at most {TAGS} messages, as each one has a tag")
    shortest = int(plan.transfers.bytes.min()) if len(plan.transfers) else pieces
    if shortest < pieces:
        raise PlanError(f"chakra: {pieces} pieces: must be at most {shortest}, the bytes of the shortest message")
    traces: list[list[bytes]] = [[_delimited(_text(1, VERSION))] for _ in range(plan.n_ranks)]
    for rank, node in _nodes(plan, pieces):
        traces[rank].append(_delimited(node))
    return tuple(b"".join(trace) for trace in traces)


def all_reduce_workload(size_bytes: int) -> bytes:
    """The trace of a rank whose workload is one AllReduce of so many bytes, which ASTRA-sim performs as its system
    says: the same for all ranks.

    >>> len(all_reduce_workload(2**20))
    72
    """
    kind, size = (_text(1, name) + _key(9, _VARINT) for name in ("comm_type", "comm_size"))
    node = _node(0, "allreduce", COLLECTIVE, [], _attribute(kind, 0) + _attribute(size, size_bytes))
    return _delimited(_text(1, VERSION)) + _delimited(node)


def _nodes(plan: Plan, pieces: int) -> Iterator[tuple[int, bytes]]:
    """The nodes, each with its rank; the ids of a rank run from 0 in the order of its lanes."""
    transfers = plan.transfers
    recv, send, after = plan.recv_transfer.tolist(), plan.send_transfer.tolist(), list(plan.after)
    size, src, dst = transfers.bytes.tolist(), transfers.src.tolist(), transfers.dst.tolist()
    op, stage, segment = transfers.op.tolist(), transfers.stage.tolist(), transfers.segment.tolist()
    reduces = OPS.index("reduce")
    first, last = _ids(plan, pieces)
    instead = _instead_of_sends(plan, after, last, pieces)

    def name(index: int) -> str:
        return (
            f"#{index} {src[index]}->{dst[index]} {OPS[op[index]]} s{segment[index]} {transfers.stages[stage[index]]}"
        )

    for rank, lane in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        pending: list[int] = []
        for index in lane:
            waits = [last[earlier] for earlier in after[index]]
            node, r, t = first[index], recv[index], send[index]
            if r >= 0 and src[r] == dst[r]:
                yield rank, _node(node, name(r), COMP, waits, b"")
            elif r >= 0:
                for at, part in enumerate(_parts(size[r], pieces)):
                    message = _message(src[r], dst[r], r * pieces + at, part)
                    yield rank, _node(node + at, name(r), RECV, waits, message)
                node += pieces - 1
                if op[r] == reduces or pieces > 1:
                    node += 1
                    yield rank, _node(node, name(r), COMP, list(range(node - pieces, node)), b"")
            earlier_nodes = [each for earlier in after[index] for each in instead[earlier]]
            if t < 0:
                pending += earlier_nodes
                continue
            before = dict.fromkeys((*((node,) if r >= 0 else ()), *pending, *earlier_nodes))
            node = last[index] - (pieces - 1)
            for at, part in enumerate(_parts(size[t], pieces)):
                message = _message(src[t], dst[t], t * pieces + at, part)
                yield rank, _node(node + at, name(t), SEND, list(before), message)
            pending = []


def _parts(size: int, pieces: int) -> list[int]:
    """Bytes of the pieces of a message, alike to one byte."""
    return [(at + 1) * size // pieces - at * size // pieces for at in range(pieces)]


def _ids(plan: Plan, pieces: int) -> tuple[list[int], list[int]]:
    """For each instruction the ids of the first and of the last of its nodes."""
    reduces = OPS.index("reduce")
    local, op = (plan.transfers.src == plan.transfers.dst).tolist(), plan.transfers.op.tolist()
    free = [0] * plan.n_ranks
    first, last = [], []
    for rank, r, t in zip(
        plan.instruction_rank.tolist(), plan.recv_transfer.tolist(), plan.send_transfer.tolist(), strict=True
    ):
        first.append(free[rank])
        if r >= 0:
            free[rank] += 1 if local[r] else pieces + (op[r] == reduces or pieces > 1)
        free[rank] += pieces * (t >= 0)
        last.append(free[rank] - 1)
    return first, last


def _instead_of_sends(plan: Plan, after: list[list[int]], last: list[int], pieces: int) -> list[list[int]]:
    """For each instruction the nodes for which a SEND waits in its place: its last one, if that is no SEND."""
    recv, send = plan.recv_transfer.tolist(), plan.send_transfer.tolist()
    wanted: list[list[int]] = [[] for _ in recv]  # of a SEND alone: the instructions that it waits for
    for lane in plan.lanes:
        pending: list[int] = []
        for index in lane:
            pending += after[index]
            if send[index] >= 0:
                wanted[index], pending = pending, []
    found: list[list[int] | None] = [
        None if t >= 0 and r < 0 else [node - pieces * (t >= 0)] for r, t, node in zip(recv, send, last, strict=True)
    ]
    deepest = len(found) + sum(map(len, wanted))
    for index in range(len(found)):
        stack = [index]
        while stack:
            top = stack[-1]
            missing = [each for each in wanted[top] if found[each] is None] if found[top] is None else []
            if missing:
                if len(stack) > deepest:
                    raise PlanError(f"chakra: {plan[top]}: waits for itself")
                stack += missing
                continue
            if found[top] is None:
                found[top] = list(dict.fromkeys(node for each in wanted[top] for node in found[each] or ()))
            stack.pop()
    return [nodes or [] for nodes in found]


def _node(number: int, name: str, kind: int, waits: list[int], attributes: bytes) -> bytes:
    packed = b"".join(map(_varint, waits))
    return b"".join(
        (
            _number(1, number),
            _text(2, name),
            _number(3, kind),
            _key(5, _BYTES) + _varint(len(packed)) + packed if waits else b"",
            attributes,
            _NOT_ON_CPU,
        )
    )


def _message(src: int, dst: int, tag: int, size: int) -> bytes:
    """The attributes of a SEND or RECV."""
    return b"".join(map(_attribute, _MESSAGE, (src, dst, tag, size)))


def _attribute(before: bytes, value: int) -> bytes:
    """An attribute; `before` is what stands before its value."""
    body = before + _varint(value)
    return _ATTRIBUTE + _varint(len(body)) + body


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _text(field: int, value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    return _key(field, _BYTES) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest ones first; all but the last byte have their top bit set.

    >>> _varint(300).hex()
    'ac02'
    """
    if value < 128:
        return _SHORT[value]
    data = bytearray()
    while value >= 128:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)


_SHORT = [bytes((value,)) for value in range(128)]
_ATTRIBUTE = _key(10, _BYTES)
_MESSAGE = [
    _text(1, name) + _key(field, _VARINT)
    for name, field in (("comm_src", 7), ("comm_dst", 7), ("comm_tag", 7), ("comm_size", 9))
]
_NOT_ON_CPU = _attribute(_text(1, "is_cpu_op") + _key(27, _VARINT), 0)
