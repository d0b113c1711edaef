"""`Plan`: one ordered program per rank, ready to verify and to run.

Each rank runs lanes of instructions. The rule of a lane is small: instructions are *issued* in the lane's order, each
only when everything in its `after` is done, and may then be done in any order. Nothing else orders the instructions of
a rank.

A channel (src, dst) is FIFO. Its sends stand in one lane and so do its receives: the lane's order is the channel's.
Messages land in slots. A lane offers its slots to its receives in the lane's order, whichever channels they are on: a
message that goes to the (i + slots)-th receive of a lane may arrive, and its send be done, only after the i-th receive
has taken its own out of its slot (a receive that is not fused is done by that). So one lane for all that a rank
receives keeps its in port in the plan's order.

A run-time may hold back more (it may wait for an instruction before it issues the next one), never less; the verifier
proves deadlock freedom for the most patient run-time and race freedom for the least patient one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, freeze
from optcc.collective import Collective
from optcc.errors import PlanError
from optcc.show import Card, Shown
from optcc.timing import Model
from optcc.transfers import Transfers
from optcc.units import show_size

SEND, RECV, RECV_REDUCE, RECV_REDUCE_SEND, RECV_COPY_SEND, LOCAL_COPY, LOCAL_REDUCE = range(7)
KINDS = (
    "send",
    "receive",
    "receive-reduce",
    "receive-reduce-send",
    "receive-copy-send",
    "copy",
    "reduce",
)
RECEIVES = frozenset((RECV, RECV_REDUCE, RECV_REDUCE_SEND, RECV_COPY_SEND))
SENDS = frozenset((SEND, RECV_REDUCE_SEND, RECV_COPY_SEND))
REDUCES = frozenset((RECV_REDUCE, RECV_REDUCE_SEND, LOCAL_REDUCE))
LOCALS = frozenset((LOCAL_COPY, LOCAL_REDUCE))
FORMAT = "optcc-plan/1"
SLOTS_MAX = 65536


@dataclass(frozen=True, slots=True)
class Channel:
    """A FIFO from a rank to a rank; `slots` is how many messages its receiving lane takes ahead of their receives."""

    src: int
    dst: int
    slots: int

    def __str__(self) -> str:
        return f"{self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One row of a plan, for reading. `recv_transfer` and `send_transfer` point back; -1 where there is none."""

    index: int
    rank: int
    lane: int
    kind: str
    in_channel: int
    out_channel: int
    src_offset: int
    dst_offset: int
    bytes: int
    recv_transfer: int
    send_transfer: int
    after: tuple[int, ...]

    def __str__(self) -> str:
        at = self.src_offset if self.kind == "send" else self.dst_offset
        return f"rank {self.rank} lane {self.lane} #{self.index} {self.kind} bytes {at}..{at + self.bytes - 1}"


class PlanRequest(NamedTuple):
    """What a plan is wanted for."""

    collective: Collective
    size_bytes: int
    dtype: str
    reduction: str

    def __str__(self) -> str:
        what, n_ranks = self.collective.name, self.collective.n_ranks
        return f"{what} of {self.size_bytes} B {self.dtype} by {self.reduction} on {n_ranks} ranks"


_COLUMNS = (
    *("lane_rank", "kind", "in_channel", "out_channel", "src_offset", "dst_offset", "bytes"),
    *("recv_transfer", "send_transfer"),
)


@dataclass(frozen=True, eq=False)
class Plan(Shown):
    """Instructions in columns, sorted by rank, lane and position.

    `lane_rank[l]` is the rank of lane l and `lanes[l]` its instructions in order. For a send the bytes are read at
    `src_offset`; for a receive they are written at `dst_offset`, and a fused receive sends what it has written there.
    `transfers` is where every instruction points back to. `ports` is the port model that the lanes were ordered for;
    None if they have the author's order, or nobody knows. No run depends on it. The arrays are copied unless nobody
    else can change them, so what was proved of a plan stays true.

    Raises PlanError if an instruction names a lane, channel, transfer, byte or dependency that is not its own.
    """

    name: str
    transfers: Transfers
    channels: tuple[Channel, ...]
    lane_rank: Column
    lanes: Lists
    kind: Column
    in_channel: Column
    out_channel: Column
    src_offset: Column
    dst_offset: Column
    bytes: Column
    recv_transfer: Column
    send_transfer: Column
    after: Lists
    ports: Model | None = None

    def __post_init__(self) -> None:
        freeze(self, _COLUMNS, ("lanes", "after"))
        object.__setattr__(self, "channels", tuple(self.channels))
        _check_columns(self)
        src, dst, slots = _channel_columns(self)
        _check_kinds(self)
        _check_channels(self, "in_channel", self.in_channel, dst)
        _check_channels(self, "out_channel", self.out_channel, src)
        _check_slots(self, slots)

    @property
    def collective(self) -> Collective:
        """What the plan computes."""
        return self.transfers.collective

    @property
    def request(self) -> PlanRequest:
        """What the plan is for."""
        return PlanRequest(self.collective, self.size_bytes, self.transfers.dtype, self.transfers.reduction)

    @property
    def n_ranks(self) -> int:
        """Ranks that take part."""
        return self.transfers.n_ranks

    @property
    def size_bytes(self) -> int:
        """Bytes of the message."""
        return self.transfers.size_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each rank's buffer: the message and the scratch space behind it."""
        return self.transfers.size_bytes + self.transfers.scratch_bytes

    @cached_property
    def instruction_lane(self) -> Column:
        """For each instruction, its lane."""
        return np.repeat(np.arange(len(self.lanes)), np.diff(self.lanes.starts))

    @cached_property
    def instruction_rank(self) -> Column:
        """For each instruction, its rank."""
        return self.lane_rank[self.instruction_lane]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that a run depends on; equal plans have equal digests on every machine."""
        return self.compute_digest()

    def compute_digest(self) -> str:
        """`digest`, computed now: for whoever is about to trust the plan."""
        t = self.transfers
        head: dict[str, Any] = {
            "format": FORMAT,
            "collective": [t.collective.name, t.collective.n_ranks, t.collective.root],
            "data": [t.reduction, t.dtype, t.size_bytes, t.scratch_bytes],
            "channels": [[channel.src, channel.dst, channel.slots] for channel in self.channels],
        }
        if t.collective.cells:
            head["cells"] = [[str(cell.share), cell.before, cell.after] for cell in t.collective.cells]
        digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
        for each in (
            *(self.lane_rank, self.lanes.starts, self.lanes.values, self.kind, self.in_channel, self.out_channel),
            *(self.src_offset, self.dst_offset, self.bytes, self.recv_transfer, self.send_transfer),
            *(self.after.starts, self.after.values),
            *(t.src, t.dst, t.op, t.src_offset, t.dst_offset, t.bytes),
        ):
            digest.update(len(each).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(each, dtype="<i8").data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: int) -> Instruction:
        if not 0 <= index < len(self):
            raise IndexError(f"instruction {index}: must be below {len(self)}")
        return Instruction(
            index,
            int(self.instruction_rank[index]),
            int(self.instruction_lane[index]),
            KINDS[self.kind[index]],
            int(self.in_channel[index]),
            int(self.out_channel[index]),
            int(self.src_offset[index]),
            int(self.dst_offset[index]),
            int(self.bytes[index]),
            int(self.recv_transfer[index]),
            int(self.send_transfer[index]),
            tuple(self.after[index].tolist()),
        )

    def __iter__(self) -> Iterator[Instruction]:
        return (self[index] for index in range(len(self)))

    def card(self) -> Card:
        rows = tuple(
            (
                str(rank),
                str(int((self.lane_rank == rank).sum())),
                *(str(int((self.kind[self.instruction_rank == rank] == kind).sum())) for kind in range(len(KINDS))),
            )
            for rank in range(self.n_ranks)
        )
        title = (
            f"{self.name}: {self.collective.name} of {show_size(self.size_bytes)} {self.transfers.dtype} on "
            f"{self.n_ranks} ranks, {len(self)} instructions, {len(self.channels)} channels, digest {self.digest[:12]}"
        )
        return Card(title, ("rank", "lanes", *KINDS), rows)

    def __repr__(self) -> str:
        return f"Plan({self.name!r}, ranks={self.n_ranks}, size_bytes={self.size_bytes}, instructions={len(self)})"


def _check_columns(plan: Plan) -> None:
    """Lengths, and every index within what it points into."""
    n = len(plan.kind)
    columns = (plan.in_channel, plan.out_channel, plan.src_offset, plan.dst_offset, plan.bytes)
    if {len(each) for each in (*columns, plan.recv_transfer, plan.send_transfer, plan.after)} != {n}:
        raise PlanError("plan: columns must have one length")
    if len(plan.lane_rank) != len(plan.lanes):
        raise PlanError(f"plan: {len(plan.lane_rank)} lane ranks for {len(plan.lanes)} lanes")
    if (np.diff(plan.lane_rank) < 0).any():
        raise PlanError("plan: lanes must be sorted by rank")
    if not np.array_equal(plan.lanes.values, np.arange(n)):
        raise PlanError("plan: instructions must be numbered by lane, each in one lane")
    if len(plan.lane_rank) and (plan.lane_rank.min() < 0 or plan.lane_rank.max() >= plan.n_ranks):
        raise PlanError(f"plan: lane ranks must be below {plan.n_ranks}")
    if n == 0:
        return
    n_channels, n_transfers = len(plan.channels), len(plan.transfers)
    for label, values, low, high in (
        ("kind", plan.kind, 0, len(KINDS) - 1),
        ("in_channel", plan.in_channel, -1, n_channels - 1),
        ("out_channel", plan.out_channel, -1, n_channels - 1),
        ("recv_transfer", plan.recv_transfer, -1, n_transfers - 1),
        ("send_transfer", plan.send_transfer, -1, n_transfers - 1),
        ("bytes", plan.bytes, 1, plan.buffer_bytes),
        ("src_offset", plan.src_offset, -1, plan.buffer_bytes),
        ("dst_offset", plan.dst_offset, -1, plan.buffer_bytes),
    ):
        if values.min() < low or values.max() > high:
            raise PlanError(f"plan: {label} {values.min()}..{values.max()}: must be from {low} to {high}")
    if len(plan.after.values):
        if plan.after.values.min() < 0 or plan.after.values.max() >= n:
            raise PlanError(f"plan: after must name instructions below {n}")
        owner = np.repeat(plan.instruction_rank, np.diff(plan.after.starts))
        if (plan.instruction_rank[plan.after.values] != owner).any():
            raise PlanError("plan: after must name instructions of the same rank")


def _channel_columns(plan: Plan) -> tuple[Column, Column, Column]:
    """The ranks `src` and `dst` and the slots of the channels; each goes from one rank to another."""
    src = np.array([channel.src for channel in plan.channels])
    dst = np.array([channel.dst for channel in plan.channels])
    slots = np.array([channel.slots for channel in plan.channels])
    n = plan.n_ranks
    wrong = np.flatnonzero((src < 0) | (src >= n) | (dst < 0) | (dst >= n) | (src == dst))
    if len(wrong):
        raise PlanError(f"channel {plan.channels[wrong[0]]}: src and dst must be two ranks below {n}")
    wrong = np.flatnonzero((slots < 1) | (slots > SLOTS_MAX))
    if len(wrong):
        channel = plan.channels[wrong[0]]
        raise PlanError(f"channel {channel}: {channel.slots} slots: must be from 1 to {SLOTS_MAX}")
    return src, dst, slots


def _check_kinds(plan: Plan) -> None:
    """Every instruction has exactly the fields that its kind needs, and its bytes lie in the buffer."""
    receives, sends, local = (_is_in(plan.kind, kinds) for kinds in (RECEIVES, SENDS, LOCALS))
    for label, values, wanted in (
        ("in_channel", plan.in_channel, receives),
        ("out_channel", plan.out_channel, sends),
        ("src_offset", plan.src_offset, (plan.kind == SEND) | local),
        ("dst_offset", plan.dst_offset, receives | local),
        ("recv_transfer", plan.recv_transfer, receives | local),
        ("send_transfer", plan.send_transfer, sends),
    ):
        wrong = np.flatnonzero((values >= 0) != wanted)
        if len(wrong):
            index = int(wrong[0])
            rule = "must be given" if wanted[index] else "must be absent"
            raise PlanError(f"instruction {index} ({KINDS[plan.kind[index]]}): {label} {rule}")
    for label, values in (("src", plan.src_offset), ("dst", plan.dst_offset)):
        past = np.flatnonzero((values >= 0) & (values + plan.bytes > plan.buffer_bytes))
        if len(past):
            raise PlanError(f"instruction {past[0]}: {label} ends past the buffer of {plan.buffer_bytes} B")


def _is_in(kind: Column, kinds: frozenset[int]) -> npt.NDArray[np.bool_]:
    return np.array([each in kinds for each in range(len(KINDS))])[kind]


def _check_channels(plan: Plan, label: str, values: Column, rank: Column) -> None:
    """Each channel stands in one lane, and that is a lane of the rank at its end."""
    used = np.flatnonzero(values >= 0)
    channel, lane = values[used], plan.instruction_lane[used]
    wrong = used[rank[channel] != plan.instruction_rank[used]]
    if len(wrong):
        index = int(wrong[0])
        raise PlanError(
            f"instruction {index} on rank {plan.instruction_rank[index]}: {label} "
            f"{plan.channels[values[index]]} is another rank's"
        )
    lane_of = np.zeros(len(plan.channels), dtype=np.int64)
    lane_of[channel] = lane
    split = channel[lane_of[channel] != lane]
    if len(split):
        raise PlanError(f"channel {plan.channels[split.min()]}: {label} stands in several lanes: must stand in one")


def _check_slots(plan: Plan, slots: Column) -> None:
    """All channels into a lane have one number of slots; `slots` are those of the channels."""
    receiving = np.flatnonzero(plan.in_channel >= 0)
    lane, offered = plan.instruction_lane[receiving], slots[plan.in_channel[receiving]]
    of_lane = np.zeros(len(plan.lanes), dtype=np.int64)
    of_lane[lane] = offered
    uneven = lane[of_lane[lane] != offered]
    if len(uneven):
        first = uneven.min()
        low, high = offered[lane == first].min(), offered[lane == first].max()
        raise PlanError(f"lane {first}: channels of {low} and {high} slots: must have one number")
