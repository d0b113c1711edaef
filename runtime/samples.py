"""Small plans made by hand, for trying out transports and executors without the compiler.

`ring` uses the fused instructions and no scratch; `exchange` uses scratch, plain receives and local instructions. They
are correct, but like every plan they run only with the verifier's verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optcc.arrays import Lists, column
from optcc.collective import Collective, check_dtype, split
from optcc.plan import (
    LOCAL_COPY,
    LOCAL_REDUCE,
    RECV,
    RECV_COPY_SEND,
    RECV_REDUCE_SEND,
    SEND,
    Channel,
    Plan,
)
from optcc.schedule import COPY, REDUCE
from optcc.transfers import Transfers


@dataclass(slots=True)
class Draft:
    """A plan in the making: rows in any order; `finish` sorts them by rank and lane."""

    channels: list[Channel] = field(default_factory=list)
    transfers: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int, int, int, int, int, int, tuple[int, ...]]] = field(default_factory=list)

    def transfer(self, src: int, dst: int, op: int, src_offset: int, dst_offset: int, n_bytes: int) -> int:
        """Adds a transfer; its number."""
        self.transfers.append((src, dst, op, src_offset, dst_offset, n_bytes))
        return len(self.transfers) - 1

    def add(
        self,
        rank: int,
        lane: int,
        kind: int,
        n_bytes: int,
        *,
        recv: tuple[int, int] = (-1, -1),
        send: tuple[int, int] = (-1, -1),
        src_offset: int = -1,
        dst_offset: int = -1,
        after: Sequence[int] = (),
    ) -> int:
        """Adds an instruction; `recv` and `send` are (channel, transfer), `after` rows added before. Its row."""
        self.rows.append(
            (rank, lane, kind, recv[0], send[0], src_offset, dst_offset, n_bytes, recv[1], send[1], tuple(after))
        )
        return len(self.rows) - 1

    def finish(
        self, name: str, n_ranks: int, size_bytes: int, dtype: str, reduction: str, scratch_bytes: int = 0
    ) -> Plan:
        """The plan of an allreduce."""
        src, dst, op, src_offset, dst_offset, n_bytes = (column(each) for each in _columns(self.transfers, 6))
        zeros = column([0] * len(self.transfers))
        nothing = Lists.of([[]] * len(self.transfers))
        transfers = Transfers(
            Collective("allreduce", n_ranks),
            reduction,
            dtype,
            size_bytes,
            scratch_bytes,
            ("all",),
            src,
            dst,
            op,
            src_offset,
            dst_offset,
            n_bytes,
            segment=zeros,
            stage=zeros,
            line=zeros,
            after=nothing,
            order=nothing,
        )
        order = sorted(range(len(self.rows)), key=lambda row: self.rows[row][:2])
        place = {row: index for index, row in enumerate(order)}
        lanes: dict[tuple[int, int], list[int]] = {}
        for index, row in enumerate(order):
            lanes.setdefault(self.rows[row][:2], []).append(index)
        columns = [column(each) for each in _columns([self.rows[row][2:10] for row in order], 8)]
        kind, in_channel, out_channel, src_offset, dst_offset, n_bytes, recv_transfer, send_transfer = columns
        return Plan(
            name,
            transfers,
            tuple(self.channels),
            column(rank for rank, _ in lanes),
            Lists.of(list(lanes.values())),
            kind,
            in_channel,
            out_channel,
            src_offset,
            dst_offset,
            n_bytes,
            recv_transfer,
            send_transfer,
            Lists.of([[place[before] for before in self.rows[row][10]] for row in order]),
        )


def ring(
    n_ranks: int, size_bytes: int, dtype: str = "float32", reduction: str = "sum", *, segments: int = 1, slots: int = 2
) -> Plan:
    """An allreduce round a ring, every segment in a lane and on channels of its own.

    Chunk c starts at rank c; after k hops it is at rank c + k, whole from hop p - 1 on, and known to all at 2p - 2.
    """
    draft, itemsize = Draft(), check_dtype(dtype)
    ends = [(start * itemsize, stop * itemsize) for start, stop in split(size_bytes // itemsize, segments * n_ranks)]
    for segment in range(segments if n_ranks > 1 else 0):
        first = len(draft.channels)
        draft.channels += [Channel(rank, (rank + 1) % n_ranks, slots) for rank in range(n_ranks)]
        passed: dict[tuple[int, int], int] = {}
        rows: dict[tuple[int, int], int] = {}
        for hop in range(2 * n_ranks - 1):
            for rank in range(n_ranks):
                chunk = (rank - hop) % n_ranks
                offset, stop = ends[segment * n_ranks + chunk]
                n_bytes = stop - offset
                if n_bytes == 0:
                    continue
                left, right = (rank - 1) % n_ranks, (rank + 1) % n_ranks
                recv = (first + left, passed[left, hop - 1]) if hop else (-1, -1)
                send = (-1, -1)
                if hop < 2 * n_ranks - 2:
                    op = REDUCE if hop < n_ranks - 1 else COPY
                    passed[rank, hop] = draft.transfer(rank, right, op, offset, offset, n_bytes)
                    send = (first + rank, passed[rank, hop])
                kind = RECV_REDUCE_SEND if hop < n_ranks else RECV_COPY_SEND if hop < 2 * n_ranks - 2 else RECV
                if hop == 0:
                    rows[rank, hop] = draft.add(rank, segment, SEND, n_bytes, send=send, src_offset=offset)
                    continue
                after = [rows[rank, hop - n_ranks]] if hop >= n_ranks else []
                rows[rank, hop] = draft.add(
                    rank, segment, kind, n_bytes, recv=recv, send=send, dst_offset=offset, after=after
                )
    return draft.finish("sample-ring", n_ranks, size_bytes, dtype, reduction)


def exchange(
    n_ranks: int, size_bytes: int, dtype: str = "float32", reduction: str = "sum", *, parts: int = 1, slots: int = 2
) -> Plan:
    """An allreduce in which every rank sends its input, in `parts`, to every other, and all reduce in rank order.

    Scratch holds the input of every rank, one after another.
    """
    draft, itemsize = Draft(), check_dtype(dtype)
    pairs = [(src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst]
    draft.channels += [Channel(src, dst, slots) for src, dst in pairs]
    ends = [(start * itemsize, stop * itemsize) for start, stop in split(size_bytes // itemsize, parts)]
    for offset, stop in ends:
        n_bytes = stop - offset
        if n_bytes == 0:
            continue
        sends: list[list[int]] = [[] for _ in range(n_ranks)]
        stored: list[list[int]] = [[] for _ in range(n_ranks)]
        for channel, (src, dst) in enumerate(pairs):
            at = size_bytes * (src + 1) + offset
            link = (channel, draft.transfer(src, dst, COPY, offset, at, n_bytes))
            sends[src].append(draft.add(src, 1 + 2 * channel, SEND, n_bytes, send=link, src_offset=offset))
            stored[dst].append(draft.add(dst, 2 + 2 * channel, RECV, n_bytes, recv=link, dst_offset=at))
        for rank in range(n_ranks):
            before = [*sends[rank], *stored[rank]]
            for source in range(-1, n_ranks):
                # First aside, so that rank's own input is still there when it is its turn.
                here = offset if source < 0 else size_bytes * (source + 1) + offset
                there = size_bytes * (rank + 1) + offset if source < 0 else offset
                op = REDUCE if source > 0 else COPY
                local = (-1, draft.transfer(rank, rank, op, here, there, n_bytes))
                kind = LOCAL_REDUCE if op == REDUCE else LOCAL_COPY
                before = [
                    draft.add(rank, 0, kind, n_bytes, recv=local, src_offset=here, dst_offset=there, after=before)
                ]
    return draft.finish("sample-exchange", n_ranks, size_bytes, dtype, reduction, size_bytes * n_ranks)


def _columns(rows: Sequence[Sequence[object]], width: int) -> list[list[int]]:
    """The first `width` columns of rows of integers."""
    columns: list[list[int]] = [[] for _ in range(width)]
    for row in rows:
        for each, value in zip(columns, row, strict=True):
            assert isinstance(value, int)
            each.append(value)
    return columns
