"""Classes 9, 10, 11, 19: bytes that are read or written at the wrong time, and copies that overlap themselves."""

from __future__ import annotations

from optcc.dsl import Program
from optcc.plan import Plan
from tests.negative.cases import Case, Corpus, change, compiled, hand, library
from tests.negative.edits import Draft

CASES: list[Case] = []
case = Corpus(CASES)

# --- 9 read after write ---


@case(9, "races", "send bytes 12..23", "receive-reduce bytes 12..23", rank=0, at=(12, 23))
def sent_on_before_it_has_come() -> Plan:
    draft = library("ring", 2, 6)
    next(row for row in draft.rows if row.name == "send" and row.after).after.clear()
    return draft.build()


@case(9, "races", "reduce bytes 0..11", "receive bytes 12..23", rank=0, at=(12, 23))
def a_local_sum_of_what_has_not_come() -> Plan:
    """Recursive doubling: the sum does not wait for the partner's input in scratch space."""
    draft = library("recursive-doubling", 2, 3)
    row = draft.find(0, "reduce")
    row.after = [each for each in row.after if each.name == "send"]
    return draft.build()


@case(9, "races", "reads what the other writes", rank=1, at=(8, 15))
def waits_for_the_neighbouring_segment() -> Plan:
    """The second segment is sent on after the first one has come."""
    draft = library("chain-broadcast", 3, 4, segments=2)
    draft.find(1, "send", 1).after = [draft.find(1, "receive")]
    return draft.build()


@case(9, "races", "reads what the other writes", rank=1, at=(4, 7))
def only_the_last_element_is_early() -> Plan:
    """Two elements are sent on, of which the second comes in a message of its own."""
    return hand(
        3,
        """
        0>1 copy 0:1
        0>1 copy 1:2
        1>2 copy 0:2
        """,
        {0: "s0 s1", 1: "r0 r1 | s2<r0", 2: "r2"},
        elements=2,
        slots=2,
        collective="broadcast",
    )


@case(9, "races", "reads what the other writes", "send", rank=1)
def a_second_child_served_beside_the_fused_one() -> Plan:
    """A fused receive serves the first child; the send to the second one does not wait for it."""
    return hand(
        4,
        """
        0>1 copy 0:2
        1>2 copy 0:2
        1>3 copy 0:2
        """,
        {0: "s0", 1: "r0s1 s2", 2: "r1", 3: "r2"},
        elements=2,
        collective="broadcast",
    )


@case(9, "races", "reads what the other writes", rank=0, at=(8, 11))
def a_chain_of_local_copies_with_a_link_left_out() -> Plan:
    return hand(
        2,
        """
        1>0 copy 0:1@1
        0>0 copy 1:2@2
        0>0 reduce 2:3@0
        """,
        {0: "r0 | l1<r0 l2<r0", 1: "s0"},
        elements=1,
        scratch=2,
        collective="reduce",
    )


# --- 10 write after read ---


@case(10, "races", "overwrites what the other reads")
def received_before_the_old_one_is_out() -> Plan:
    draft = library("ring", 2, 6)
    next(row for row in draft.rows if row.name == "receive" and row.after).after.clear()
    return draft.build()


@case(10, "races", "overwrites what the other reads", "reduce", rank=1)
def scratch_refilled_while_it_is_being_added() -> Plan:
    """Recursive doubling on four ranks: the second round's message comes while the first one's is in use."""
    draft = library("recursive-doubling", 4, 2)
    row = draft.find(1, "receive", 1)
    row.after = [each for each in row.after if each.name != "reduce"]
    return draft.build()


@case(10, "races", "overwrites what the other reads", rank=1, at=(0, 7))
def a_local_result_over_what_is_being_sent() -> Plan:
    return hand(
        3,
        """
        0>1 copy 0:2@2
        1>2 copy 0:2@2
        1>1 reduce 2:4@0
        2>2 reduce 2:4@0
        """,
        {0: "s0", 1: "s1 | r0 | l2<r0", 2: "r1 | l3<r1"},
        elements=2,
        scratch=2,
        collective="reduce",
        root=2,
    )


@case(10, "races", "overwrites what the other reads", rank=1, at=(8, 15))
def waits_for_the_send_of_another_segment() -> Plan:
    """OptCC's straggler would do that: the result of segment 1 comes in once segment 0 has gone out."""
    return hand(
        2,
        """
        1>0 reduce 0:2
        1>0 reduce 2:4
        0>1 copy 0:2
        0>1 copy 2:4
        """,
        {0: "r0 r1 | s2<r0 s3<r1", 1: "s0 s1 | r2<s0 r3<s0"},
        elements=4,
        slots=2,
    )


@case(10, "races", "overwrites what the other reads", "receive", rank=0, at=(0, 3))
def one_of_two_readers_forgotten() -> Plan:
    """A root sends to two leaves and then takes the result; it waits for the first send alone."""
    return hand(
        3,
        """
        0>1 reduce 0:1
        0>2 copy 0:1@1
        1>0 copy 0:1
        """,
        {0: "s0 | s1 | r2<s0", 1: "r0 s2<r0", 2: "r1"},
        elements=1,
        scratch=1,
        collective="broadcast",
    )


# --- 11 receive into a live buffer ---


@case(11, "races", "overwrites what the other reads", "receive-reduce", rank=0, at=(0, 23))
def receive_into_a_buffer_in_flight() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=0, dst=1, into=segment.scratch(0))
            segment[0].reduce(src=1, dst=0)
            segment[0].copy(src=0, dst=1)

    made = Draft.of(compiled(author, 2))
    made.find(0, "receive-reduce").after.clear()
    return made.build()


@case(11, "races", "writes what the other writes", rank=0, at=(0, 11))
def two_children_added_at_once() -> Plan:
    """Both sums are in flight in one lane; standing behind one another does not order what they do."""
    draft = library("tree-reduce", 3, 3)
    draft.find(0, "receive-reduce", 1).after.clear()
    return draft.build()


@case(11, "races", "writes what the other writes", rank=0, at=(0, 7))
def two_senders_into_one_place_from_two_lanes() -> Plan:
    return hand(
        3,
        """
        1>0 reduce 0:2
        2>0 reduce 0:2
        """,
        {0: "r0 | r1", 1: "s0", 2: "s1"},
        elements=2,
        collective="reduce",
    )


@case(11, "races", "overwrites what the other reads", "send", rank=2)
def the_result_comes_while_the_input_goes_to_the_second_parent() -> Plan:
    """Double binary tree: a rank's two sends are of different halves; here the wrong one is waited for."""
    draft = library("double-binary-tree", 3, 4)
    receive = next(
        row
        for at, lane in zip(draft.lane_rank, draft.lanes, strict=True)
        for row in lane
        if at == 2 and row.name == "receive" and row.after
    )
    receive.after.clear()
    return draft.build()


@case(11, "races", "writes what the other writes", "receive-copy-send", rank=1, at=(0, 3))
def a_receive_over_bytes_that_are_being_passed_on() -> Plan:
    """A fused receive still sends what the next receive overwrites; it has its slot back, but is not done."""
    return hand(
        3,
        """
        0>1 copy 0:1
        1>2 copy 0:1
        0>1 copy 1:2@0
        """,
        {0: "s0 s2", 1: "r0s1 r2", 2: "r1"},
        elements=2,
        slots=1,
        collective="broadcast",
    )


# --- 19 overlapping copies ---


def _scratch_copies() -> Draft:
    """A message into two pieces of scratch space, one behind the other, and its result onto the second."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)
            segment[0].copy(src=0, dst=0, into=segment.scratch(0))
            segment.scratch(0).copy(src=0, dst=0, into=segment.scratch(0, 1))

    return Draft.of(compiled(author, 2))


@case(19, "races", "copy", "reads what it writes at another place", rank=0)
def a_copy_onto_itself_one_element_on() -> Plan:
    draft = _scratch_copies()
    change(draft, 3, dst_offset=28)
    return draft.build()


@case(19, "races", "reads what it writes at another place", rank=0)
def a_copy_onto_itself_one_element_back() -> Plan:
    return hand(
        2,
        """
        1>0 reduce 0:4
        0>0 copy 1:4@0
        """,
        {0: "r0 | l1<r0", 1: "s0"},
        elements=4,
        collective="reduce",
    )


@case(19, "races", "reduce", "reads what it writes at another place", rank=1)
def a_sum_of_neighbours() -> Plan:
    """s[0:2] added into s[1:3], as a scan would."""
    return hand(
        2,
        """
        0>1 reduce 0:3
        1>1 reduce 0:2@1
        """,
        {0: "s0", 1: "r0 l1<r0"},
        elements=3,
        collective="reduce",
        root=1,
    )


@case(19, "races", "writes what the other writes", rank=0, at=(20, 23))
def two_copies_whose_ends_meet() -> Plan:
    """Two local copies in two lanes, which share the last element of one and the first of the other."""
    return hand(
        2,
        """
        0>0 copy 0:2@4
        0>0 copy 2:4@5
        1>0 reduce 0:4
        """,
        {0: "l0 | l1 | r2<l0,l1", 1: "s2"},
        elements=4,
        scratch=3,
        collective="reduce",
    )


@case(19, "races", "copy bytes 16..23", rank=0, at=(8, 11))
def a_copy_from_where_a_message_lands_by_one_element() -> Plan:
    """Scratch 2:4 is copied while elements 3:5 are being received, as if the chunk ended a place earlier."""
    return hand(
        2,
        """
        1>0 copy 0:2@2
        0>0 copy 1:3@4
        """,
        {0: "r0 | l1", 1: "s0"},
        elements=2,
        scratch=4,
        collective="broadcast",
        root=1,
    )


@case(19, "result", rank=0, at=(4, 7))
def a_copy_in_two_halves_that_repeats_an_element() -> Plan:
    """s[0:2] to s[1:3] element by element, front first: in order, and the first element is smeared over all three."""
    return hand(
        2,
        """
        1>0 reduce 0:3
        0>0 copy 0:1@1
        0>0 copy 1:2@2
        """,
        {0: "r0 | l1<r0 l2<l1", 1: "s0"},
        elements=3,
        collective="reduce",
    )
