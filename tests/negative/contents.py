"""Classes 13, 14, 15, 16: bytes that hold something old, something else's, or nothing.

Three of these classes mean something else here:

13 (stale read across iterations): a plan is one launch, and scratch space holds nothing when it starts. So a read of
what only an earlier launch wrote is a read of nothing (result); what one segment, stage or pipeline left in scratch
space is stale for the next one that uses the same place (race, or a wrong sum where the order is fixed); and in the
language a segment's scratch is its own, so that to read another's is refused (ScheduleError).
14, 15 (aliases; clobbered input): all buffers are in place, input and output are the same bytes. An alias is two chunks
of a schedule in one place; a clobbered input is one overwritten before it went into the sum, or an input that is also
the output (a broadcast's root, an all-gather's own slice) and must still be there at the end.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from optcc.dsl import Program
from optcc.plan import Plan
from tests.negative.cases import Case, Corpus, change, compiled, hand, library
from tests.negative.edits import transfer_rows

CASES: list[Case] = []
case = Corpus(CASES)

# --- 13 stale reads ---


@case(13, "ScheduleError", "rank 0 never wrote s1 c0 scratch 0")
def scratch_of_the_segment_before() -> Plan:
    """Only the first segment fills its scratch space; the second one finds nothing in its own."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            if segment.index == 0:
                segment[0].copy(src=1, dst=0, into=segment.scratch(0))
            segment.scratch(0).reduce(src=0, dst=0, into=segment[0])

    return compiled(author, 2, segments=2, collective="reduce")


@case(13, "ScheduleError", "both must be the same section of the same segment")
def scratch_of_another_pipeline() -> Plan:
    def author(program: Program) -> None:
        (first,) = program.pipeline(1, sections=1, share=Fraction(1, 2), scratch=1)
        (second,) = program.pipeline(1, sections=1, share=Fraction(1, 2), scratch=1)
        first[0].copy(src=1, dst=0, into=first.scratch(0))
        first.scratch(0).reduce(src=0, dst=0, into=second[0])

    return compiled(author, 2, collective="reduce")


@case(13, "races", rank=0, at=(8, 11))
def phase_two_waits_for_phase_ones_message() -> Plan:
    """Both phases use one piece of scratch; the second sum waits for the first message alone."""
    return hand(
        2,
        """
        1>0 copy 0:1@2
        0>0 reduce 2:3@0
        1>0 copy 1:2@2
        0>0 reduce 2:3@1
        """,
        {0: "r0 r2<l1 | l1<r0 l3<l1", 1: "s0 s2"},
        elements=2,
        scratch=1,
        collective="reduce",
    )


@case(13, "result", "holds bytes from another place of the message", rank=0, at=(4, 7))
def phase_two_reads_phase_ones_scratch() -> Plan:
    """Ordered well, but the second sum is of the first phase's message."""
    return hand(
        2,
        """
        1>0 copy 0:1@2
        0>0 reduce 2:3@0
        1>0 copy 1:2@3
        0>0 reduce 2:3@1
        """,
        {0: "r0 r2 | l1<r0 l3<l1,r2", 1: "s0 s2"},
        elements=2,
        scratch=2,
        slots=2,
        collective="reduce",
    )


@case(13, "result", "uses bytes never written", "what arrives", rank=1, at=(24, 47))
def what_only_an_earlier_launch_wrote() -> Plan:
    """The first launch would send nothing, the second what the first one left."""
    return hand(
        2,
        """
        0>1 copy 6:12
        0>0 copy 0:6@6
        """,
        {0: "s0 | l1<s0", 1: "r0"},
        elements=6,
        scratch=6,
        collective="reduce",
    )


@case(13, "result", "contribution of rank 2 missing", rank=0)
def a_forward_of_the_value_before_the_last_sum() -> Plan:
    """Rank 1 sends what it had before rank 2's part came in: in order, and stale."""
    return hand(
        3,
        """
        2>1 reduce 0:2
        1>0 reduce 0:2
        """,
        {0: "r1", 1: "s1 | r0<s1", 2: "s0"},
        elements=2,
        collective="reduce",
    )


# --- 14 aliases in place ---


@case(14, "races", "overwrites what the other reads")
def an_exchange_without_scratch() -> Plan:
    """Both partners add what comes to what they are still sending."""
    return hand(
        2,
        """
        0>1 reduce 0:2
        1>0 reduce 0:2
        """,
        {0: "s0 | r1", 1: "s1 | r0"},
        elements=2,
    )


@case(14, "result", "holds bytes from another place of the message", "1->0 copy", rank=0, at=(0, 7))
def two_slices_of_an_all_gather_in_one_place() -> Plan:
    """Rank 1's slice lands on rank 0's own: in[0] is out[0] here, and must not be anything else."""
    draft = library("ring-all-gather", 2, 4)
    rows = transfer_rows(draft.transfers)
    into = next(t for t, row in enumerate(rows) if row["dst"] == 0)
    change(draft, into, dst_offset=0)
    receive = next(row for row in draft.rows if row.recv_transfer == into)
    receive.after.append(draft.find(0, "send"))
    return draft.build()


@case(14, "races", rank=1)
def sections_that_overlap_by_one_element() -> Plan:
    """Ragged: seven elements in two sections of four, which share the fourth."""
    return hand(
        2,
        """
        0>1 reduce 0:4
        0>1 reduce 3:7
        """,
        {0: "s0 s1", 1: "r0 r1"},
        elements=7,
        slots=2,
        collective="reduce",
        root=1,
    )


@case(14, "result", "counted twice", rank=1, at=(12, 15))
def sections_that_overlap_in_order() -> Plan:
    """The same overlap with its sums ordered: the shared element is added twice."""
    return hand(
        2,
        """
        0>1 reduce 0:4
        0>1 reduce 3:7
        """,
        {0: "s0 s1", 1: "r0 r1<r0"},
        elements=7,
        slots=2,
        collective="reduce",
        root=1,
    )


@case(14, "result", "contribution of rank 0 missing", rank=1, at=(8, 15))
def slices_of_a_reduce_scatter_in_one_place() -> Plan:
    """All slices are gathered where slice 0 lies; what rank 1 ends with is nobody's sum."""

    def author(program: Program) -> None:
        shares = [program.pipeline(sections=1, share=Fraction(1, 2)) for _ in range(2)]
        for one, _two in zip(*shares, strict=True):
            one[0].reduce(src=0, dst=1)
            one[0].copy(src=1, dst=0)

    return compiled(author, 2, 4, collective="reducescatter")


@case(14, "result", "contribution of rank 0 missing", "was overwritten at rank 0", rank=0)
def scratch_that_lies_in_the_message() -> Plan:
    """The partner's input goes where one's own still is."""
    return hand(
        2,
        """
        1>0 copy 0:2
        1>0 copy 0:2@2
        """,
        {0: "r0 r1", 1: "s0 s1"},
        elements=2,
        scratch=2,
        slots=2,
        collective="reduce",
    )


# --- 15 input clobbered that must survive ---


@case(15, "result", "bytes 0..7", rank=0, at=(0, 7))
def a_broadcast_that_overwrites_its_root() -> Plan:
    """What comes back to the root is the other half of its message."""
    return hand(
        2,
        """
        0>1 copy 0:4
        1>0 copy 2:4@0
        """,
        {0: "s0 | r1<s0", 1: "r0 s1<r0"},
        elements=4,
        collective="broadcast",
    )


@case(15, "result", "holds bytes from another place of the message", "0->0 reduce", rank=0, at=(0, 7))
def an_all_gather_that_adds_to_its_own_slice() -> Plan:
    return hand(
        2,
        """
        0>1 copy 0:2
        1>0 copy 2:4
        0>0 reduce 2:4@0
        """,
        {0: "s0 | r1 | l2<r1,s0", 1: "s1 | r0"},
        elements=4,
        collective="allgather",
    )


@case(15, "result", "contribution of rank 1 missing", "was overwritten at rank 1", rank=0)
def a_stragglers_input_overwritten_by_the_partial_sum() -> Plan:
    """OptCC's stage 2 for a section that the straggler has not seeded: a copy where it must add."""
    draft = library("optcc", 2, 2)
    rows = transfer_rows(draft.transfers)
    into = next(t for t, row in enumerate(rows) if row["dst"] == 1 and row["op"] == 0)
    change(draft, into, op=1)
    for row in draft.rows:
        if row.recv_transfer == into:
            row.become("receive")
    return draft.build()


@case(15, "result", "contribution of rank 0 missing", "was overwritten at rank 0", rank=0)
def the_roots_own_part_replaced_by_the_sum_of_the_others() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=2, dst=1)
            segment[0].copy(src=1, dst=0)

    return compiled(author, 3, 4, collective="reduce", fused=True)


@case(15, "races", "rank 1", rank=1)
def own_contribution_overwritten_while_it_goes_out() -> Plan:
    """Reduce-scatter whose scratch space is the slice that is being sent."""
    return hand(
        2,
        """
        0>1 copy 1:2@0
        1>0 reduce 0:1
        1>1 reduce 0:1@1
        """,
        {0: "s0 | r1", 1: "s1 | r0 | l2<r0"},
        elements=2,
        collective="reducescatter",
    )


@case(15, "result", "contribution of rank 0 counted twice", "1->0 reduce", rank=0, at=(0, 3))
def own_contribution_overwritten_before_it_went_out() -> Plan:
    """The same in order: what goes out is what came in from where it goes to."""
    return hand(
        2,
        """
        0>1 copy 1:2@0
        1>0 reduce 0:1
        """,
        {0: "s0 | r1", 1: "s1<r0 | r0"},
        elements=2,
        collective="reducescatter",
    )


# --- 16 read of what was never written ---


@case(16, "ScheduleError", "rank 0 never wrote s0 c0 scratch 0")
def scratch_that_nobody_wrote() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment.scratch(0).reduce(src=0, dst=1, into=segment[0])

    return compiled(author, 2)


@case(16, "result", "receive uses bytes never written", "what arrives", rank=0, at=(0, 23))
def a_broadcast_from_who_holds_nothing() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=1, dst=0)

    return compiled(author, 2, collective="broadcast")


@case(16, "result", "uses bytes never written", rank=1)
def scratch_that_nobody_wrote_in_a_plan() -> Plan:
    draft = library("ring", 2, 6)
    draft.transfers = replace(draft.transfers, scratch_bytes=24)
    change(draft, 0, src_offset=24)
    return draft.build()


@case(16, "result", "receive-copy-send uses bytes never written", rank=2)
def passed_down_before_it_came() -> Plan:
    """A chain whose middle rank sends first and receives then: no race, the order is fixed, and wrong."""
    return hand(
        4,
        """
        0>1 copy 0:2
        1>2 copy 0:2
        2>3 copy 0:2
        """,
        {0: "s0", 1: "s1 | r0<s1", 2: "r1s2", 3: "r2"},
        elements=2,
        collective="broadcast",
    )


@case(16, "result", "reduce uses bytes never written", "what arrives", rank=0, at=(4, 7))
def half_of_a_scratch_chunk() -> Plan:
    """Two elements are added, of which one has come."""
    return hand(
        2,
        """
        1>0 copy 0:1@2
        0>0 reduce 2:4@0
        """,
        {0: "r0 | l1<r0", 1: "s0"},
        elements=2,
        scratch=2,
        collective="reduce",
    )


@case(16, "result", "receive-reduce uses bytes never written", "what it reduces into", rank=1)
def a_sum_into_a_slice_that_is_not_there_yet() -> Plan:
    """An all-gather of three in which one copy is a reduction."""
    draft = library("bruck", 3, 3)
    rows = transfer_rows(draft.transfers)
    into = next(t for t, row in enumerate(rows) if row["dst"] == 1)
    change(draft, into, op=0)
    for row in draft.rows:
        if row.recv_transfer == into:
            row.become("receive-reduce")
    return draft.build()


@case(16, "result", "receive uses bytes never written", "what arrives", rank=1, at=(8, 11))
def padding_sent_along_though_nobody_uses_it() -> Plan:
    """The broadcast itself is right; beside it an element of scratch space travels that holds nothing."""
    return hand(
        2,
        """
        0>1 copy 0:2
        0>1 copy 2:3
        """,
        {0: "s0 s1", 1: "r0 r1"},
        elements=2,
        scratch=1,
        collective="broadcast",
    )


@case(16, "result", "reduce uses bytes never written", "what it reduces into", rank=1, at=(8, 15))
def a_sum_in_scratch_space_that_nobody_uses() -> Plan:
    """The broadcast itself is right; beside it rank 1 adds what came to what its scratch space does not hold."""
    return hand(
        2,
        """
        0>1 copy 0:2
        1>1 reduce 0:2@2
        """,
        {0: "s0", 1: "r0 | l1<r0"},
        elements=2,
        scratch=2,
        collective="broadcast",
    )
