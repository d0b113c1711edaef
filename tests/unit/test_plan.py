"""What the constructor of a plan refuses, and what its digest covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import PlanError
from optcc.plan import KINDS, Channel, Plan
from optcc.schedules.ring import ring
from optcc.transfers import Transfers
from tests.negative.edits import Draft, edit_transfers, transfer_rows


def plan(fused: bool = True) -> Plan:
    """A ring of three ranks, two segments."""
    return compile_schedule(ring(n_ranks=3, segments=2), size_bytes=96, slots=2, fused=fused)


def far_lane(draft: Draft) -> None:
    draft.lane_rank[0] = 3


def lane_of_another_rank(draft: Draft) -> None:
    draft.lane_rank[0] = draft.lane_rank[-1]


def unknown_channel(draft: Draft) -> None:
    draft.find(0, "send").out_channel = len(draft.channels)


def send_without_channel(draft: Draft) -> None:
    draft.find(0, "send").out_channel = -1


def send_that_writes(draft: Draft) -> None:
    draft.find(0, "send").dst_offset = 0


def receive_that_reads(draft: Draft) -> None:
    draft.find(0, "receive").src_offset = 0


def no_bytes(draft: Draft) -> None:
    draft.find(0, "send").bytes = 0


def past_the_buffer(draft: Draft) -> None:
    draft.find(0, "send").src_offset = 96 - 8


def unknown_transfer(draft: Draft) -> None:
    draft.find(0, "send").send_transfer = len(draft.transfers)


def waits_for_another_rank(draft: Draft) -> None:
    draft.find(0, "send").after = [draft.find(1, "send")]


def no_slots(draft: Draft) -> None:
    draft.channels[0] = replace(draft.channels[0], slots=0)


def uneven_slots(draft: Draft) -> None:
    """The two channels into one lane have different numbers of slots."""
    draft.channels = [Channel(0, 1, 2), Channel(0, 1, 3), *draft.channels[1:]]
    for row in draft.rows:
        row.in_channel += row.in_channel > 0
        row.out_channel += row.out_channel > 0
    sends = [row for row in draft.rows if row.out_channel == 0]
    receives = [row for row in draft.rows if row.in_channel == 0]
    sends[-1].out_channel = receives[-1].in_channel = 1


def channel_to_itself(draft: Draft) -> None:
    draft.channels[0] = replace(draft.channels[0], dst=draft.channels[0].src)


def channel_in_two_lanes(draft: Draft) -> None:
    lane = draft.lane_of(draft.find(0, "send"))
    draft.lane_rank.insert(0, 0)
    draft.lanes.insert(0, [lane.pop()])


def channel_of_another_rank(draft: Draft) -> None:
    send = draft.find(0, "send")
    send.out_channel = next(i for i, channel in enumerate(draft.channels) if channel.src != 0)


def kind_without_its_fields(draft: Draft) -> None:
    draft.find(0, "send").become("copy")


EDITS = (
    *(far_lane, lane_of_another_rank, unknown_channel, send_without_channel, send_that_writes, receive_that_reads),
    *(no_bytes, past_the_buffer, unknown_transfer, waits_for_another_rank, no_slots, uneven_slots, channel_to_itself),
    *(channel_in_two_lanes, channel_of_another_rank, kind_without_its_fields),
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit.__name__))
def test_plans_that_are_none(edit: Callable[[Draft], None]) -> None:
    """The constructor refuses each of them; without the edit the same draft builds."""
    assert Draft.of(plan(fused=False)).build().digest == plan(fused=False).digest
    draft = Draft.of(plan(fused=False))
    edit(draft)
    with pytest.raises(PlanError):
        draft.build()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (channel_in_two_lanes, "channel 0->1: out_channel stands in several lanes: must stand in one"),
        (channel_of_another_rank, "instruction 8 on rank 0: out_channel 1->2 is another rank's"),
        (channel_to_itself, "channel 0->0: src and dst must be two ranks below 3"),
        (far_lane, "plan: lanes must be sorted by rank"),
        (no_slots, "channel 0->1: 0 slots: must be from 1 to 65536"),
        (past_the_buffer, "instruction 8: src ends past the buffer of 96 B"),
        (send_that_writes, "instruction 8 (send): dst_offset must be absent"),
        (send_without_channel, "instruction 8 (send): out_channel must be given"),
        (uneven_slots, "lane 2: channels of 2 and 3 slots: must have one number"),
        (waits_for_another_rank, "plan: after must name instructions of the same rank"),
    ],
    ids=lambda each: str(getattr(each, "__name__", "")),
)
def test_the_refusal_names_value_and_rule(edit: Callable[[Draft], None], message: str) -> None:
    """What is wrong, where, and what must be."""
    draft = Draft.of(plan(fused=False))
    edit(draft)
    with pytest.raises(PlanError) as refused:
        draft.build()
    assert str(refused.value) == message


def test_slots_beyond_any_machine_are_refused() -> None:
    """A number that no column can hold is a PlanError, not an overflow."""
    draft = Draft.of(plan())
    draft.channels = [replace(channel, slots=10**20) for channel in draft.channels]
    with pytest.raises(PlanError):
        draft.build()


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_transfers_keep_elements_whole(offset: int) -> None:
    """Offsets and lengths are multiples of the type's size (contract): half an element cannot be reduced."""
    transfers = plan().transfers
    rows = transfer_rows(transfers)
    rows[0]["bytes"] -= offset
    with pytest.raises(PlanError):
        edit_transfers(transfers, rows)


def test_transfers_that_are_none() -> None:
    """Unknown ranks, operations and stages; bytes outside the buffer; dependencies on nothing."""
    transfers = plan().transfers
    for name, value in (
        *(("src", 3), ("dst", -1), ("op", 2), ("stage", 9), ("bytes", 0), ("src_offset", -4), ("dst_offset", 96)),
    ):
        rows = transfer_rows(transfers)
        rows[0][name] = value
        with pytest.raises(PlanError):
            edit_transfers(transfers, rows)
    with pytest.raises(PlanError):
        replace(transfers, after=Lists.of([[len(transfers)]] + [[]] * (len(transfers) - 1)))
    with pytest.raises(PlanError):
        replace(transfers, op=column([0]))


def test_the_digest_covers_everything_that_a_run_reads() -> None:
    """Changing any column, channel or the type of data changes the digest; the name does not."""
    original = plan(fused=False)

    def edited(edit: Callable[[Draft], None]) -> Plan:
        draft = Draft.of(original)
        edit(draft)
        return draft.build()

    def slots(draft: Draft) -> None:
        draft.channels = [replace(channel, slots=3) for channel in draft.channels]

    def swap(draft: Draft) -> None:
        lane = draft.lane_of(draft.find(0, "receive"))
        lane[-1], lane[-2] = lane[-2], lane[-1]

    def kind(draft: Draft) -> None:
        draft.find(1, "receive").become("receive-reduce")

    def offset(draft: Draft) -> None:
        draft.find(0, "send").src_offset += 4

    def waiting(draft: Draft) -> None:
        next(row for row in draft.rows if row.after).after.clear()

    def reduction(draft: Draft) -> None:
        draft.transfers = replace(draft.transfers, reduction="max")

    def dtype(draft: Draft) -> None:
        draft.transfers = replace(draft.transfers, dtype="int32")

    def root(draft: Draft) -> None:
        draft.transfers = replace(draft.transfers, collective=Collective("reduce", 3, 1))

    def scratch(draft: Draft) -> None:
        draft.transfers = replace(draft.transfers, scratch_bytes=96)

    edits = (slots, swap, kind, offset, waiting, reduction, dtype, root, scratch)
    digests = [original.digest, *(edited(edit).digest for edit in edits)]
    assert len(set(digests)) == len(digests)
    assert replace(original, name="other").digest == original.digest


def test_rows_read_as_they_are() -> None:
    """Indexing gives rows that name their kind, rank, lane and place; past the end is an IndexError."""
    original = plan()
    for i, row in enumerate(original):
        assert row.index == i
        assert row.kind in KINDS
        assert row.rank == original.instruction_rank[i]
        assert i in original.lanes[row.lane]
    with pytest.raises(IndexError):
        original[len(original)]
    assert str(original.channels[0]) == f"{original.channels[0].src}->{original.channels[0].dst}"
    assert isinstance(original.transfers, Transfers)


def test_columns_cannot_be_written() -> None:
    """A plan is frozen down to its columns."""
    original = plan()
    with pytest.raises(ValueError, match="read-only"):
        original.kind[0] = 1
    with pytest.raises(AttributeError):
        original.name = "other"  # type: ignore[misc]
