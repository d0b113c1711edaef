"""Classes 4, 5, 17, 18, 20: messages that do not meet, on whichever channel, and instructions that do something else
than the transfers they come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.plan import Channel, Plan
from optcc.schedule import Schedule
from optcc.schedules.registry import SCHEDULES
from optcc.verdict import Counterexample
from optcc.verify.plan.translation import check_translation
from tests.negative.cases import ITEM, Case, Corpus, hand, library
from tests.negative.edits import Draft, edit_transfers, transfer_rows

CASES: list[Case] = []
case = Corpus(CASES)

# --- 4 send/receive count, size or order ---


@case(4, "matching", "channel 0->1: message 0 goes out with 12 B of transfer", rank=1)
def another_order_at_the_sender() -> Plan:
    draft = library("ring", 2, 12, segments=2)
    lane = draft.lane_of(draft.find(0, "send"))
    lane[0], lane[1] = lane[1], lane[0]
    return draft.build()


@case(4, "matching", "channel 0->1: 2 sends and 1 receives", "has no receive to meet at position 1", rank=0)
def a_send_without_receive() -> Plan:
    draft = library("ring", 2, 6)
    draft.remove(draft.find(1, "receive"))
    return draft.build()


@case(4, "matching", "goes out with 8 B of transfer #0, its receive wants 12 B", rank=1)
def a_message_shorter_than_expected() -> Plan:
    draft = library("ring", 2, 6)
    draft.find(0, "send").bytes = 8
    return draft.build()


@case(4, "matching", "1 sends and 2 receives", "has no send to meet at position 1", rank=2)
def a_receive_without_send() -> Plan:
    """The middle of a chain forgets its second segment."""
    draft = library("chain-broadcast", 3, 4, segments=2)
    draft.remove(draft.find(1, "send", 1))
    return draft.build()


@case(4, "matching", "channel 0->1: message 0", rank=1)
def two_received_in_the_order_b_a() -> Plan:
    """By hand: equal lengths, so that nothing but the order is wrong."""
    return hand(
        2,
        """
        0>1 copy 0:2
        0>1 copy 2:4
        """,
        {0: "s0 s1", 1: "r1 r0"},
        elements=4,
        collective="broadcast",
    )


@case(4, "matching", "goes out with 16 B of transfer #0, its receive wants 8 B", rank=1)
def one_long_message_for_two_receives() -> Plan:
    """Fused before the cut into two: 16 B go out at once, 8 B are awaited twice."""
    made = Draft.of(
        hand(
            2,
            """
            0>1 copy 0:2
            0>1 copy 2:4
            """,
            {0: "s0 s1", 1: "r0 r1"},
            elements=4,
            collective="broadcast",
        )
    )
    made.remove(made.find(0, "send", 1))
    made.find(0, "send").bytes = 16
    return made.build()


@case(4, "matching", "message 1 goes out with", rank=2)
def fused_in_another_order_than_it_is_awaited() -> Plan:
    """Two fused receives of a rank swap what they pass on with what they receive, the next rank does not know."""
    draft = library("chain-broadcast", 3, 6, segments=3, fused=True)
    lane = next(lane for lane in draft.lanes if any(row.name == "receive-copy-send" for row in lane))
    lane[1], lane[2] = lane[2], lane[1]
    send = [row for row in draft.rows if row.name == "send"]
    lane_of_sends = draft.lane_of(send[0])
    lane_of_sends[1], lane_of_sends[2] = lane_of_sends[2], lane_of_sends[1]
    return draft.build()


@case(4, "matching", "sends more or fewer bytes than its transfer says", rank=0)
def both_ends_agree_on_another_length() -> Plan:
    """Two elements of three go out and are received: the message is whole, and not the transfer."""
    draft = library("ring", 2, 6)
    draft.find(0, "send").bytes = draft.find(1, "receive-reduce").bytes = 8
    return draft.build()


# --- 5 tag or channel mismatch ---


@case(5, "matching", "channel 0->1: message 0 goes out with 12 B of transfer #2, its receive wants 12 B of #0", rank=1)
def sent_on_one_channel_awaited_on_another() -> Plan:
    draft = library("ring", 2, 6)
    draft.channels.append(Channel(0, 1, 2))
    send = draft.find(0, "send")
    draft.lane_of(send).remove(send)
    send.out_channel = len(draft.channels) - 1
    draft.lane_rank.insert(0, 0)
    draft.lanes.insert(0, [send])
    return draft.build()


@case(5, "PlanError", "out_channel 1->0 is another rank's")
def a_channel_of_another_rank() -> Plan:
    draft = library("ring", 2, 6)
    send = draft.find(0, "send")
    send.out_channel = 1 - send.out_channel
    return draft.build()


@case(5, "matching", "channel 0->1: 2 sends and 1 receives", rank=0)
def sent_to_another_peer() -> Plan:
    """The star's second message goes to the first leaf again."""
    draft = library("tree-broadcast", 3, 4)
    one, two = (row for row in draft.rows if row.name == "send")
    two.out_channel = one.out_channel
    return draft.build()


@case(5, "matching", "message 0 goes out with 8 B of transfer #0, its receive wants 8 B of #1", rank=1)
def two_channels_of_a_pair_crossed() -> Plan:
    """Two messages on two channels between the same two ranks, each awaited on the other one."""
    made = library("chain-broadcast", 2, 4, segments=2)
    made.channels.append(Channel(0, 1, 2))
    sends = made.lane_of(made.find(0, "send"))
    receives = made.lane_of(made.find(1, "receive"))
    for rows, side, moved in ((sends, "out_channel", 1), (receives, "in_channel", 0)):
        row = rows.pop(moved)
        setattr(row, side, 1)
        at = next(i for i, lane in enumerate(made.lanes) if lane is rows)
        made.lanes.insert(at, [row])
        made.lane_rank.insert(at, made.lane_rank[at])
    return made.build()


@case(5, "PlanError", "out_channel stands in several lanes: must stand in one")
def one_channel_shared_by_two_lanes() -> Plan:
    draft = library("ring", 2, 6)
    lane = draft.lane_of(draft.find(0, "send"))
    at = next(i for i, each in enumerate(draft.lanes) if each is lane)
    draft.lanes.insert(at + 1, [lane.pop()])
    draft.lane_rank.insert(at + 1, 0)
    return draft.build()


@case(5, "PlanError", "channel 1->1: src and dst must be two ranks below 2")
def a_channel_to_oneself() -> Plan:
    draft = library("ring", 2, 6)
    draft.channels[0] = Channel(1, 1, 2)
    return draft.build()


# --- 17 fusion and replication ---


@case(17, "matching", "does another operation than its transfer says")
def forwarded_without_its_own_part() -> Plan:
    draft = library("ring", 3, 6, fused=True)
    next(row for row in draft.rows if row.name == "receive-reduce-send").become("receive-copy-send")
    return draft.build()


@case(17, "matching", "message")
def fused_across_two_transfers() -> Plan:
    draft = library("ring", 3, 6, fused=True)
    one, two = [row for row in draft.rows if row.name == "receive-reduce-send"][:2]
    one.recv_transfer, two.recv_transfer = two.recv_transfer, one.recv_transfer
    return draft.build()


@case(17, "result", "contribution of rank 1 missing", rank=2, at=(4, 7))
def received_two_updated_one_forwarded_two() -> Plan:
    """By hand: rank 1 adds its own second element after the two have gone on, as they came."""
    return hand(
        3,
        """
        0>1 reduce 0:1
        0>1 copy 1:2@3
        1>2 reduce 0:1
        1>2 reduce 3:4@1
        1>1 reduce 1:2@3
        """,
        {0: "s0 s1", 1: "r0s2 r1s3 | l4<r1", 2: "r2 r3"},
        elements=2,
        scratch=2,
        collective="reduce",
        root=2,
    )


@case(17, "races", "overwrites what the other reads", rank=1, at=(0, 7))
def fusion_that_leaves_the_update_behind() -> Plan:
    """The update between receive and send stays a separate instruction, and nothing brings it in before."""
    return hand(
        3,
        """
        0>1 reduce 0:2
        1>1 reduce 2:4@0
        1>2 reduce 0:2
        """,
        {0: "s0", 1: "r0 s2<r0 | l1<r0", 2: "r2"},
        elements=2,
        scratch=2,
        collective="reduce",
        root=2,
    )


@case(17, "races", "writes what the other writes", rank=1, at=(8, 11))
def two_instances_in_one_slot_of_scratch() -> Plan:
    """Replicated twice, but both replicas receive into the first one's scratch space."""
    return hand(
        2,
        """
        0>1 copy 0:1@2
        0>1 copy 1:2@2
        1>1 reduce 2:3@0
        1>1 reduce 2:3@1
        """,
        {0: "s0 s1", 1: "r0 r1 | l2<r0 l3<r1"},
        elements=2,
        scratch=1,
        slots=2,
        collective="reduce",
        root=1,
    )


@case(17, "matching", "sends other bytes than its transfer says", rank=1)
def fused_though_it_passes_on_something_else() -> Plan:
    """A receive and the next send of its rank made one, though the send is of other bytes."""
    return Draft.of(
        hand(
            3,
            """
            0>1 reduce 0:1
            1>2 reduce 1:2
            0>1 copy 0:1@2
            """,
            {0: "s0 s2", 1: "r0s1 r2", 2: "r1"},
            elements=2,
            scratch=1,
            collective="reduce",
            root=2,
        )
    ).build()


def _translated(pair: Any) -> Counterexample | None:
    written, plan = pair
    return check_translation(written, plan)


@case(17, "translation", "the plan lacks 0->1", "reduce", check=_translated)
def another_schedule_with_the_same_result() -> tuple[Schedule, Plan]:
    """The plan is a right AllReduce, but of a ring that goes the other way round."""

    @schedule
    def backwards(program: Program) -> None:
        p = program.n_ranks
        for segment in program.pipeline(sections=p):
            with program.stage("reduce-scatter"):
                for step in range(p - 1):
                    for rank in program.ranks:
                        segment[(rank + step) % p].reduce(src=rank, dst=(rank - 1) % p)
            with program.stage("all-gather"):
                for step in range(p - 1):
                    for rank in program.ranks:
                        segment[(rank - 1 + step) % p].copy(src=rank, dst=(rank - 1) % p)

    return SCHEDULES["ring"](n_ranks=3), compile_schedule(backwards(n_ranks=3), size_bytes=24)


@case(17, "translation", "the plan lacks 0->1 s0 c0 copy", "never written", rank=1, at=(0, 7), check=_translated)
def a_segment_that_the_compiler_dropped() -> tuple[Schedule, Plan]:
    """A chain of two segments, of which the plan has made one."""
    right = SCHEDULES["chain-broadcast"](n_ranks=3, segments=2)
    return right, compile_schedule(SCHEDULES["chain-broadcast"](n_ranks=3), size_bytes=16)


# --- 18 operand mix-up ---


@case(18, "matching", "receive-reduce-send #1 sends other bytes than its transfer says", rank=0)
def the_remote_offset_used_at_home() -> Plan:
    draft = library("ring", 3, 6, fused=True)
    rows = [row for row in draft.rows if row.in_channel >= 0 and row.out_channel >= 0]
    rows[0].dst_offset, rows[1].dst_offset = rows[1].dst_offset, rows[0].dst_offset
    return draft.build()


@case(18, "matching", "reads other bytes than its transfer says")
def a_local_sum_with_its_operands_swapped() -> Plan:
    draft = library("recursive-doubling", 2, 3)
    row = draft.find(0, "reduce")
    rows = transfer_rows(draft.transfers)
    rows[row.recv_transfer]["dst_offset"] = row.src_offset
    draft.transfers = edit_transfers(draft.transfers, rows)
    row.src_offset, row.dst_offset = row.dst_offset, row.src_offset
    return draft.build()


@case(18, "matching", "sends other bytes than its transfer says", rank=0)
def a_send_from_where_it_goes_to() -> Plan:
    """Recursive doubling sends from the message into the partner's scratch; here from its own scratch."""
    draft = library("recursive-doubling", 2, 3)
    send = draft.find(0, "send")
    send.src_offset = transfer_rows(draft.transfers)[send.send_transfer]["dst_offset"]
    return draft.build()


@case(18, "matching", "sends from another rank than its transfer says", rank=1)
def performed_at_the_other_end() -> Plan:
    """The transfer says 0 to 1, the channel and its instructions say 1 to 0."""
    draft = Draft.of(hand(2, "0>1 reduce 0:2", {0: "s0", 1: "r0"}, elements=2, collective="reduce", root=1))
    draft.lanes.reverse()
    draft.channels = [Channel(1, 0, 1)]
    return draft.build()


@case(18, "matching", "sends from another rank than its transfer says", rank=2)
def sent_by_one_who_was_not_asked() -> Plan:
    """The transfer says 0 to 1, the channel and its instructions say 2 to 1."""
    draft = Draft.of(hand(3, "0>1 reduce 0:2", {0: "s0", 1: "r0"}, elements=2, collective="reduce", root=1))
    draft.lanes.reverse()
    draft.lane_rank = [1, 2]
    draft.channels = [Channel(2, 1, 1)]
    return draft.build()


@case(18, "matching", "receives at another rank than its transfer says", rank=2)
def received_by_the_next_but_one() -> Plan:
    """The transfer says 0 to 1, the channel and its instructions say 0 to 2."""
    draft = Draft.of(hand(3, "0>1 reduce 0:2", {0: "s0", 1: "r0"}, elements=2, collective="reduce", root=1))
    draft.lane_rank = [0, 2]
    draft.channels = [Channel(0, 2, 1)]
    return draft.build()


@case(18, "matching", "reduce #2 receives at another rank than its transfer says", rank=1)
def a_local_operation_of_another_rank() -> Plan:
    draft = Draft.of(
        hand(
            2,
            """
            0>1 copy 0:1@1
            1>1 reduce 1:2@0
            """,
            {0: "s0", 1: "r0 | l1<r0"},
            elements=1,
            scratch=1,
            collective="reduce",
            root=1,
        )
    )
    rows = transfer_rows(draft.transfers)
    rows[1]["src"] = rows[1]["dst"] = 0
    draft.transfers = edit_transfers(draft.transfers, rows)
    return draft.build()


@case(18, "matching", "transfer #0 is sent 0 times")
def a_transfer_between_ranks_performed_at_home() -> Plan:
    """Rank 1 takes its own element where it should take rank 0's."""
    draft = Draft.of(
        hand(
            2,
            """
            0>1 copy 0:1@1
            1>1 copy 1:2@0
            """,
            {0: "s0", 1: "r0 | l1<r0"},
            elements=1,
            scratch=1,
            collective="reduce",
        )
    )
    draft.remove(draft.find(0, "send"))
    receive = draft.find(1, "receive")
    receive.become("copy")
    receive.in_channel, receive.src_offset = -1, 0
    return draft.build()


@case(18, "matching", "receive-reduce #0 writes other bytes than its transfer says", rank=0)
def received_where_the_sender_has_it() -> Plan:
    """The remote offset used at home: what should go from element 2 to element 0 stays at 2."""
    draft = Draft.of(hand(2, "1>0 reduce 2:3@0", {0: "r0", 1: "s0"}, elements=4, collective="reduce"))
    draft.find(0, "receive-reduce").dst_offset = 8
    return draft.build()


@case(18, "matching", "sends from another rank than its transfer says")
def the_next_ranks_transfer_sent_at_home() -> Plan:
    draft = library("ring", 3, 3)
    rows = transfer_rows(draft.transfers)
    one, two = draft.find(0, "send"), draft.find(1, "send")
    one.send_transfer, two.send_transfer = two.send_transfer, one.send_transfer
    receives = {row.recv_transfer: row for row in draft.rows if row.recv_transfer >= 0}
    a, b = receives[two.send_transfer], receives[one.send_transfer]
    a.recv_transfer, b.recv_transfer = b.recv_transfer, a.recv_transfer
    assert rows[0]["bytes"] == rows[1]["bytes"] == ITEM
    return draft.build()


# --- 20 unconsumed message or credit ---


@case(20, "matching", "channel 0->1: 3 sends and 2 receives", rank=0)
def one_send_more_than_receives() -> Plan:
    draft = library("ring", 2, 6)
    lane = draft.lane_of(draft.find(0, "send"))
    lane.append(replace(lane[-1], after=[]))
    return draft.build()


@case(20, "matching", "transfer #", "is sent 2 times")
def a_message_and_its_receive_twice() -> Plan:
    """Send and receive agree, but there is one transfer: nobody asked for the second message."""
    draft = library("chain-reduce", 2, 4)
    for row in (draft.find(1, "send"), draft.find(0, "receive-reduce")):
        draft.lane_of(row).append(replace(row, after=[row]))
    return draft.build()


@case(20, "matching", "has no receive to meet at position", rank=1)
def a_fused_receive_that_passes_on_to_the_last() -> Plan:
    """The last of a chain's middle ranks also sends what should end with it, to the first."""
    draft = library("chain-broadcast", 3, 4, slots=1)
    row = draft.find(1, "send")
    draft.channels.append(Channel(1, 0, 1))
    at = next(i for i, lane in enumerate(draft.lanes) if lane is draft.lane_of(row))
    draft.lanes.insert(at, [replace(row, out_channel=len(draft.channels) - 1, after=list(row.after))])
    draft.lane_rank.insert(at, 1)
    return draft.build()


@case(20, "matching", "transfer #2 is received 2 times")
def a_local_sum_performed_twice() -> Plan:
    """Launch after launch the sum would have one more of it."""
    draft = library("recursive-doubling", 2, 3)
    row = draft.find(0, "reduce")
    row_transfer = row.recv_transfer
    assert row_transfer == 2
    draft.lane_of(row).append(replace(row, after=[row]))
    return draft.build()


@case(20, "matching", "transfer #", "is received 0 times")
def a_local_sum_never_performed() -> Plan:
    draft = library("recursive-doubling", 2, 3, fused=True)
    draft.remove(draft.find(1, "reduce"))
    return draft.build()


@case(20, "matching", "channel 1->0: 1 sends and 0 receives", rank=1)
def an_acknowledgement_that_nobody_takes() -> Plan:
    """The receiver tells the sender that it is done, which the sender does not wait for."""
    draft = Draft.of(
        hand(
            2,
            """
            0>1 copy 0:1
            1>0 copy 0:1@1
            """,
            {0: "s0 | r1", 1: "r0 s1<r0"},
            elements=1,
            scratch=1,
            collective="broadcast",
        )
    )
    draft.remove(draft.find(0, "receive"))
    return draft.build()
