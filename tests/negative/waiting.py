"""Classes 6, 7, 8, 12: instructions that wait for each other, and slots that are taken before they are free.

12 (slot reuse before the acknowledgement): a plan has no credits of its own to forget, the slots of a lane are offered
in the lane's order and a message waits for its slot. What is left of the mistake is to rely on another order or number:
a lane that takes messages in an order for which it offers too few slots (deadlock), a plan that is ordered only as long
as it has one slot (race), a slot thought free while its bytes are still being passed on (race), and numbers of slots
that no lane can have (refused).
"""

from __future__ import annotations

from dataclasses import replace

from optcc.plan import Plan
from tests.negative.cases import Case, Corpus, hand, library
from tests.negative.edits import Row

CASES: list[Case] = []
case = Corpus(CASES)

# --- 6 rendezvous cycle ---


@case(6, "deadlock", "instructions wait for each other", "rank 0", "rank 1", "send", "receive-reduce")
def receive_before_send_on_both() -> Plan:
    draft = library("ring", 2, 6)
    for rank in (0, 1):
        draft.find(rank, "send").after = [draft.find(rank, "receive-reduce")]
    return draft.build()


@case(6, "deadlock", "6 instructions wait for each other", "rank 0", "rank 1", "rank 2")
def a_ring_in_which_nobody_begins() -> Plan:
    """Every rank sends its first section only once it has received one."""
    draft = library("ring", 3, 6)
    for rank in range(3):
        draft.find(rank, "send").after.append(draft.find(rank, "receive-reduce"))
    return draft.build()


@case(6, "deadlock", "receive-copy-send", "rank 0", "rank 1", "rank 2")
def a_ring_of_fused_receives() -> Plan:
    """All pass on what they get, and nobody has sent anything."""
    return hand(
        3,
        """
        0>1 copy 0:1
        1>2 copy 0:1
        2>0 copy 0:1
        """,
        {0: "r2s0", 1: "r0s1", 2: "r1s2"},
        elements=1,
        collective="broadcast",
    )


@case(6, "deadlock", "rank 0", "rank 1", "send", "receive")
def one_lane_for_both_ways() -> Plan:
    """A single lane a rank, receive in front of send: fine for a chain, not for an exchange."""
    return hand(
        2,
        """
        0>1 copy 0:1@1
        1>0 copy 0:1@1
        0>0 reduce 1:2@0
        1>1 reduce 1:2@0
        """,
        {0: "r1 s0 l2<r1,s0", 1: "r0 s1 l3<r0,s1"},
        elements=1,
        scratch=1,
    )


@case(6, "deadlock", "rank 2", "rank 0")
def a_leaf_that_waits_for_the_result_before_it_gives_its_part() -> Plan:
    return hand(
        3,
        """
        1>0 reduce 0:1
        2>0 reduce 0:1
        0>1 copy 0:1
        0>2 copy 0:1
        """,
        {0: "r0 r1<r0 | s2<r1 s3<r1", 1: "s0 | r2<s0", 2: "r3 | s1<r3"},
        elements=1,
    )


@case(6, "deadlock", "rank 0", "rank 1", "rank 2", "rank 3")
def a_cycle_through_four_ranks_and_two_stages() -> Plan:
    """Pairs exchange, then partners across; 0 and 3 begin with the second stage."""
    return hand(
        4,
        """
        0>1 copy 0:1@1
        1>2 copy 0:1@1
        2>3 copy 0:1@1
        3>0 copy 0:1@1
        """,
        {0: "r3 | s0<r3", 1: "r0 | s1<r0", 2: "r1 | s2<r1", 3: "r2 | s3<r2"},
        elements=1,
        scratch=1,
        slots=3,
    )


# --- 7 finite-buffer cycle ---


@case(7, "deadlock", "(slots: 2)", "rank 0", "rank 1")
def three_sends_then_three_receives_with_two_slots() -> Plan:
    draft = library("ring", 2, 12, segments=2)
    for rank in (0, 1):
        sends = [row for at, lane in zip(draft.lane_rank, draft.lanes, strict=True) if at == rank for row in lane]
        draft.find(rank, "receive-reduce").after.append([row for row in sends if row.name == "send"][2])
    return draft.build()


def _sixteen(slots: int, messages: int = 16) -> Plan:
    """Both ranks send all in one lane and then receive all in the same one, as one thread block would."""
    there = "\n".join(f"0>1 copy {i}:{i + 1}@{messages + i}" for i in range(messages))
    back = "\n".join(f"1>0 copy {i}:{i + 1}@{messages + i}" for i in range(messages))
    first, second = range(messages), range(messages, 2 * messages)
    return hand(
        2,
        f"{there}\n{back}",
        {
            0: " ".join([f"s{i}" for i in first] + [f"r{i}" for i in second]),
            1: " ".join([f"s{i}" for i in second] + [f"r{i}" for i in first]),
        },
        elements=messages,
        scratch=messages,
        slots=slots,
    )


@case(7, "deadlock", "(slots: 8)", "rank 0", "rank 1")
def sixteen_sends_then_sixteen_receives_in_one_lane() -> Plan:
    return _sixteen(8)


@case(7, "deadlock", "(slots: 15)", "rank 0", "rank 1")
def one_slot_too_few() -> Plan:
    """With sixteen it would be right."""
    return _sixteen(15)


@case(7, "deadlock", "(slots: 1)", "rank 0", "rank 1", "rank 2")
def a_circle_of_three_with_one_slot() -> Plan:
    """Each sends two to the next and receives only then."""
    lines = [f"{rank}>{(rank + 1) % 3} copy {i}:{i + 1}@{2 + i}" for rank in range(3) for i in range(2)]
    lanes = {
        rank: f"s{2 * rank} s{2 * rank + 1} r{2 * ((rank - 1) % 3)} r{2 * ((rank - 1) % 3) + 1}" for rank in range(3)
    }
    return hand(3, "\n".join(lines), lanes, elements=2, scratch=2)


@case(7, "deadlock", "(slots: 1)", "rank 1")
def two_peers_that_share_a_receive_lane() -> Plan:
    """Rank 1 takes from 0, 0, 2. Rank 2 sends only after it has heard from 0, which first gets rid of both."""
    return hand(
        3,
        """
        0>1 copy 0:1
        0>1 copy 1:2
        2>1 copy 2:3
        0>2 copy 0:1
        """,
        {0: "s0 s1 s3", 1: "r2 r0 r1", 2: "r3 | s2<r3"},
        elements=3,
        slots={1: 1, 2: 1},
        collective="broadcast",
    )


@case(7, "deadlock", "(slots: 1)")
def a_reply_to_each_message_awaited_after_all() -> Plan:
    """Rank 0 sends four and then takes the replies; rank 1 replies at once, from the lane that receives."""
    return hand(
        2,
        """
        0>1 copy 0:1@4
        1>0 copy 4:5@4
        0>1 copy 1:2@5
        1>0 copy 5:6@5
        0>1 copy 2:3@6
        1>0 copy 6:7@6
        0>1 copy 3:4@7
        1>0 copy 7:8@7
        """,
        {0: "s0 s2 s4 s6 r1 r3 r5 r7", 1: "r0 s1<r0 r2 s3<r2 r4 s5<r4 r6 s7<r6"},
        elements=4,
        scratch=4,
    )


# --- 8 dependency on oneself ---


@case(8, "deadlock", "2 instructions wait for each other", "rank 0", rank=0)
def waits_for_what_stands_behind_it() -> Plan:
    draft = library("ring", 2, 6)
    draft.find(0, "send").after.append(draft.find(0, "send", 1))
    return draft.build()


@case(8, "deadlock", "1 instructions wait for each other", "rank 1", rank=1)
def waits_for_itself() -> Plan:
    draft = library("chain-reduce", 3, 4, fused=True)
    row = next(row for row in draft.rows if row.name == "receive-reduce-send")
    row.after.append(row)
    return draft.build()


@case(8, "deadlock", "4 instructions wait for each other", rank=0)
def two_lanes_that_wait_for_each_others_second_step() -> Plan:
    """Step 0 of each lane waits for step 1 of the other one."""
    return hand(
        2,
        """
        0>1 copy 0:1@2
        0>1 copy 1:2@3
        0>0 copy 0:1@2
        0>0 copy 1:2@3
        """,
        {0: "s0<l3 s1 | l2<s1 l3", 1: "r0 r1"},
        elements=2,
        scratch=2,
        slots=2,
    )


@case(8, "deadlock", "3 instructions wait for each other", "reduce", rank=1)
def three_local_operations_in_a_circle() -> Plan:
    return hand(
        2,
        """
        0>1 copy 0:1@1
        1>1 copy 0:1@2
        1>1 reduce 1:2@2
        1>1 copy 2:3@0
        """,
        {0: "s0", 1: "r0 | l1<l3 | l2<l1,r0 | l3<l2"},
        elements=1,
        scratch=2,
    )


@case(8, "deadlock", "receive-reduce-send", rank=1)
def fusion_that_moves_a_receive_behind_what_waits_for_it() -> Plan:
    """A chain of two segments: the second is fused first in the lane, and waits for the first one's sum behind it."""
    draft = library("chain-reduce", 3, 4, segments=2, fused=True)
    rows: list[Row] = [row for row in draft.rows if row.name == "receive-reduce-send"]
    rows[0].after.append(rows[1])
    return draft.build()


@case(8, "deadlock", "instructions wait for each other", "reduce", rank=0)
def a_hoisted_wait() -> Plan:
    """What waits for a later receive is moved to the front of the lane that has this receive."""
    draft = library("recursive-doubling", 2, 6, segments=2)
    local = draft.find(0, "reduce")
    draft.lane_of(local).remove(local)
    receive = draft.find(0, "receive")
    lane = draft.lane_of(receive)
    lane.insert(0, local)
    return draft.build()


# --- 12 slot reuse before the acknowledgement ---


@case(12, "deadlock", "(slots: 1)", "rank 1")
def one_slot_and_a_message_too_early() -> Plan:
    """Rank 1 takes its messages out of the order in which they come, with a single slot."""
    draft = library("ring", 3, 6, slots=1)
    lane = draft.lane_of(draft.find(1, "receive-reduce"))
    lane[0].after.append(draft.find(1, "send", 1))
    return draft.build()


@case(12, "deadlock", "(slots: 1)", "rank 0", rank=0)
def a_plan_for_two_slots_given_one() -> Plan:
    """Right with two slots: the answer to the first message is sent only after the second one is out."""
    draft = library("ring", 2, 8, segments=2, slots=2)
    for rank in (0, 1):
        draft.find(rank, "receive-reduce").after.append(draft.find(rank, "send", 1))
    draft.channels = [replace(channel, slots=1) for channel in draft.channels]
    return draft.build()


@case(12, "deadlock", "(slots: 1)", "rank 2", "rank 0", "rank 1")
def a_lane_that_takes_the_later_message_first() -> Plan:
    """Rank 2's only slot is offered to rank 1, who answers for rank 0, who waits for its own message to be taken."""
    return hand(
        3,
        """
        0>2 copy 0:1
        0>1 copy 0:1
        1>2 copy 0:1@1
        """,
        {0: "s0 s1<s0", 1: "r1s2", 2: "r2 r0"},
        elements=1,
        scratch=1,
        collective="broadcast",
    )


@case(12, "races", "rank 1", "writes what the other writes", rank=1, at=(0, 3))
def ordered_by_its_only_slot_and_given_three() -> Plan:
    """With one slot the two writes are ordered by when it is free."""
    return freed_slot(slots=3, fused=False)


@case(12, "races", "receive-copy-send", "writes what the other writes", rank=1, at=(0, 3))
def a_fused_receive_whose_slot_is_free_before_it_is_done() -> Plan:
    return freed_slot(slots=1, fused=True)


def freed_slot(*, slots: int, fused: bool) -> Plan:
    """Rank 1 receives element 0, and later overwrites it; nothing but a freed slot stands between the two.

    Rank 0 sends its third message once the second one has arrived, which with one slot is once the first one has left
    its slot; and the overwriting waits for the third message. A plain receive is done when it frees its slot. A fused
    one still has to be passed on, to rank 2, who takes its time.
    """
    transfers = """
        0>1 copy 0:1
        0>1 copy 1:2
        0>1 copy 2:3@3
        1>1 copy 3:4@0
        1>2 copy 0:1
        """
    lanes = {0: "s0 s1 s2<s1", 1: ("r0s4" if fused else "r0") + " r1 r2 | l3<r2", 2: "r4"}
    if not fused:
        transfers, lanes = transfers.replace("1>2 copy 0:1", ""), {0: lanes[0], 1: lanes[1]}
    return hand(3, transfers.strip(), lanes, elements=3, scratch=1, slots=slots, collective="broadcast")


def passed_around(ranks: int) -> Plan:
    """Every rank sends a message to the next one, which passes it on with a fused receive to the next but one."""
    own = [f"{rank}>{(rank + 1) % ranks} copy 0:1@1" for rank in range(ranks)]
    passed = [f"{rank}>{(rank + 1) % ranks} copy 1:2@2" for rank in range(ranks)]
    lanes = {
        rank: f"s{rank} r{before}s{ranks + rank} r{ranks + before}"
        for rank in range(ranks)
        for before in ((rank - 1) % ranks,)
    }
    return hand(ranks, "\n".join(own + passed), lanes, elements=1, scratch=2)


@case(12, "PlanError", "channels of 1 and 2 slots: must have one number")
def a_lane_of_two_numbers_of_slots() -> Plan:
    draft = library("tree-reduce", 3, 4, slots=2)
    draft.channels[0] = replace(draft.channels[0], slots=1)
    return draft.build()


@case(12, "races", rank=1)
def scratch_reused_as_soon_as_it_is_passed_on() -> Plan:
    """A ring of two pieces of scratch: the third message lands where the first one still waits to be added."""
    return hand(
        2,
        """
        0>1 copy 0:1@3
        0>1 copy 1:2@4
        0>1 copy 2:3@3
        1>1 reduce 3:4@0
        1>1 reduce 4:5@1
        1>1 reduce 3:4@2
        """,
        {0: "s0 s1 s2", 1: "r0 r1 r2 | l3<r0 l4<r1 l5<r2"},
        elements=3,
        scratch=2,
        slots=2,
        collective="reduce",
        root=1,
    )
