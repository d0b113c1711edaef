"""Classes 1, 2, 3, 21, 22, 27: contributions that come in twice, not at all, at another place or in another order.

22 (wrong identity): nothing here fills a buffer with an identity. What that mistake becomes is an operation on bytes
that hold nothing, padding read as if it were zeros (or ones, or the largest number), and a root that counts itself
again because its reduction forgives it: idempotent ones (min, max) are held to the same rule, so that a schedule is
right for all reductions or for none.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from optcc.dsl import Program
from optcc.plan import Plan
from tests.negative.cases import ITEM, Case, Corpus, change, compiled, hand, library
from tests.negative.edits import Draft, edit_transfers, transfer_rows

CASES: list[Case] = []
case = Corpus(CASES)

# --- 1 double reduction ---


@case(1, "result", "contribution of rank 0 counted twice", "0->1 reduce", rank=0, at=(0, 23))
def the_same_reduction_written_twice() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    return compiled(author, 2)


@case(1, "result", "contribution of rank 0 counted twice", "1->2 reduce", rank=0, at=(0, 23))
def one_contribution_by_two_ways() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=0, dst=2)
            segment[0].reduce(src=1, dst=2)
            segment[0].copy(src=2, dst=0)
            segment[0].copy(src=2, dst=1)

    return compiled(author, 3)


@case(1, "result", "counted twice", "first where these two met")
def a_ring_with_a_hop_too_many() -> Plan:
    def author(program: Program) -> None:
        p = program.n_ranks
        for segment in program.pipeline(sections=p):
            for step in range(p):
                for rank in program.ranks:
                    segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
            for step in range(p - 1):
                for rank in program.ranks:
                    segment[(rank - step) % p].copy(src=rank, dst=(rank + 1) % p)

    return compiled(author, 3, 7, fused=True)


@case(1, "result", "contribution of rank 0 counted twice", "1->0 reduce", rank=0, at=(0, 11))
def an_exchange_in_place_one_after_the_other() -> Plan:
    """The second of two partners gets a sum that has its own input in it."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, segments=2):
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=1, dst=0)
            segment[0].copy(src=0, dst=1)

    return compiled(author, 2)


@case(1, "result", "counted twice", "reduce", rank=0)
def an_all_gather_that_reduces() -> Plan:
    draft = library("ring", 4, 9, segments=2)
    rows = transfer_rows(draft.transfers)
    for t, row in enumerate(rows):
        if row["op"] == 1:
            change(draft, t, op=0)
    for each in draft.rows:
        if each.name == "receive":
            each.become("receive-reduce")
    return draft.build()


@case(1, "result", "contribution of rank 3 counted twice", rank=0, at=(4, 11))
def a_leaf_that_is_asked_twice_for_part_of_the_message() -> Plan:
    """By hand: a star; rank 3 sends elements 0 to 2, and then 1 and 2 again."""
    return hand(
        4,
        """
        1>0 reduce 0:3
        2>0 reduce 0:3
        3>0 reduce 0:3
        3>0 reduce 1:3
        """,
        {0: "r0 r1<r0 r2<r1 r3<r2", 1: "s0", 2: "s1", 3: "s2 s3"},
        elements=3,
        collective="reduce",
    )


@case(1, "result", "contribution of rank 1 counted twice", "1->1 reduce", rank=1)
def a_scratch_sum_that_already_has_ones_own() -> Plan:
    """Recursive doubling that keeps its own input in scratch space and adds the sum to it."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=1, dst=1, into=segment.scratch(0))
            segment[0].reduce(src=0, dst=1)
            segment.scratch(0).reduce(src=1, dst=1, into=segment[0])
            segment[0].copy(src=1, dst=1, into=segment.scratch(0))

    return compiled(author, 2, collective="reduce", root=1, fused=True)


@case(1, "result", "contribution of rank 1 counted twice", rank=0, at=(0, 7))
def one_leaf_in_the_place_of_another() -> Plan:
    """As many contributions as there are ranks, but rank 1's twice and rank 2's not at all."""
    return hand(
        3,
        """
        1>0 reduce 0:2
        1>0 reduce 0:2
        """,
        {0: "r0 r1<r0", 1: "s0 s1"},
        elements=2,
        collective="reduce",
    )


# --- 2 missing contribution ---


@case(2, "result", "missing")
def a_ring_with_a_hop_too_few() -> Plan:
    def author(program: Program) -> None:
        p = program.n_ranks
        for segment in program.pipeline(sections=p):
            for step in range(p - 2):
                for rank in program.ranks:
                    segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
            for step in range(p - 1):
                for rank in program.ranks:
                    segment[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)

    return compiled(author, 3)


@case(2, "result", "contribution of rank 1 missing", "0->1 copy", rank=0, at=(0, 23))
def a_copy_where_a_reduction_belongs() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    return compiled(author, 2)


@case(2, "result", "contribution of rank 3 missing", "never left it", rank=0)
def a_leaf_of_the_tree_that_nobody_asks() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, segments=2):
            segment[0].reduce(src=2, dst=1)
            segment[0].reduce(src=1, dst=0)

    return compiled(author, 4, collective="reduce", slots=1)


@case(2, "result", "missing", rank=0)
def the_straggler_left_out_of_one_segment() -> Plan:
    """OptCC without the first transfer that gets the straggler's part into the sum."""
    draft = library("optcc", 3, 8, segments=2)
    rows = transfer_rows(draft.transfers)
    gone = next(t for t, row in enumerate(rows) if row["op"] == 0 and row["dst"] == 2)
    change(draft, gone, op=1)
    for row in draft.rows:
        if row.recv_transfer == gone:
            row.become("receive")
    return draft.build()


@case(2, "result", "never written", rank=2)
def a_slice_that_one_rank_never_gets() -> Plan:
    """Bruck's all-gather without its last message."""
    draft = library("bruck", 3, 6)
    rows = transfer_rows(draft.transfers)
    last = max(t for t, row in enumerate(rows) if row["dst"] == 2)
    send = next(row for row in draft.rows if row.send_transfer == last)
    draft.remove(next(row for row in draft.rows if row.recv_transfer == last))
    draft.remove(send)
    for row in draft.rows:
        row.recv_transfer -= row.recv_transfer > last
        row.send_transfer -= row.send_transfer > last
    draft.transfers = edit_transfers(draft.transfers, rows[:last] + rows[last + 1 :])
    return draft.build()


@case(2, "result", "contribution of rank 2 missing", "rank 2 had all contributions after", rank=0)
def sent_down_before_it_came_up() -> Plan:
    """The chain's last reduction is written behind the copies down."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=2):
            for section in range(2):
                segment[section].reduce(src=0, dst=1)
                segment[section].copy(src=1, dst=0)
                segment[section].reduce(src=1, dst=2)
                segment[section].copy(src=2, dst=1)

    return compiled(author, 3, fused=True)


@case(2, "result", "contribution of rank 1 missing", "was overwritten at rank 1", rank=0, at=(0, 3))
def ones_own_input_overwritten_before_it_went_in() -> Plan:
    """By hand: rank 1 gets rank 0's element where it should add it."""
    return hand(
        2,
        """
        0>1 copy 0:1
        0>1 reduce 1:2
        1>0 copy 0:2
        """,
        {0: "s0 s1 | r2<s0,s1", 1: "r0 r1 | s2<r0,r1"},
        elements=2,
    )


# --- 3 wrong chunk or offset ---


@case(3, "races", "overwrites what the other reads", rank=1, at=(12, 23))
def reduced_into_the_wrong_chunk() -> Plan:
    """Transfer 0 goes to the other half, where nothing waits for it."""
    draft = library("ring", 2, 6)
    assert transfer_rows(draft.transfers)[0]["dst_offset"] == 0
    change(draft, 0, dst_offset=12)
    return draft.build()


@case(3, "matching", "sends other bytes than its transfer says", rank=0)
def an_instruction_beside_its_transfer() -> Plan:
    draft = library("ring", 2, 6)
    draft.find(0, "send").src_offset = 12
    return draft.build()


@case(3, "result", "missing")
def an_all_gather_that_is_off_by_one_section() -> Plan:
    def author(program: Program) -> None:
        p = program.n_ranks
        for segment in program.pipeline(sections=p):
            for step in range(p - 1):
                for rank in program.ranks:
                    segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
            for step in range(p - 1):
                for rank in program.ranks:
                    segment[(rank - step) % p].copy(src=rank, dst=(rank + 1) % p)

    return compiled(author, 4, 10, fused=True)


@case(3, "result", "holds bytes from another place of the message", rank=1, at=(0, 3))
def broadcast_to_another_place() -> Plan:
    """By hand: rank 1 gets elements 0 and 1 the other way round."""
    return hand(
        2,
        """
        0>1 copy 0:1@1
        0>1 copy 1:2@0
        """,
        {0: "s0 s1", 1: "r0 r1"},
        elements=2,
        collective="broadcast",
    )


@case(3, "result", "missing", rank=0)
def a_reduce_scatter_whose_slices_end_next_door() -> Plan:
    """The ring's reduce-scatter with its sections numbered as for an AllReduce: rank r ends with slice r + 1."""

    def author(program: Program) -> None:
        p = program.n_ranks
        shares = [program.pipeline(sections=1, share=Fraction(1, p)) for _ in range(p)]
        for slices in zip(*shares, strict=True):
            for step in range(p - 1):
                for rank in program.ranks:
                    slices[(rank - step) % p][0].reduce(src=rank, dst=(rank + 1) % p)

    return compiled(author, 3, collective="reducescatter")


@case(3, "result", "holds bytes from another place of the message", rank=0, at=(0, 3))
def summed_one_element_further_on() -> Plan:
    """Reduced into the right chunk but for a shift of one element, through scratch space."""
    return hand(
        2,
        """
        1>0 copy 0:2@2
        0>0 reduce 2:3@1
        0>0 reduce 3:4@0
        """,
        {0: "r0 | l1<r0 l2<r0", 1: "s0"},
        elements=2,
        scratch=2,
        collective="reduce",
    )


# --- 21 ranks add in different orders ---


def _everyone_adds(orders: dict[int, list[int]], elements: int = 6, fused: bool = False) -> Plan:
    """Everyone sends its input to everyone, who add the others' in these orders."""

    def author(program: Program) -> None:
        n = program.n_ranks
        for segment in program.pipeline(sections=1, scratch=n):
            for src in program.ranks:
                for dst in program.ranks:
                    if src != dst:
                        segment[0].copy(src=src, dst=dst, into=segment.scratch(0, src))
            for rank, order in orders.items():
                for other in order:
                    segment.scratch(0, other).reduce(src=rank, dst=rank, into=segment[0])

    return compiled(author, len(orders), elements, fused=fused)


@case(21, "agreement", "reduced in different orders", "ranks 0 and 2", rank=2, at=(0, 23))
def all_begin_with_their_own() -> Plan:
    return _everyone_adds({0: [1, 2], 1: [0, 2], 2: [0, 1]})


@case(21, "agreement", "ranks 0 and 1", rank=1, at=(0, 15))
def one_rank_adds_backwards() -> Plan:
    return _everyone_adds({0: [1, 2], 1: [2, 0], 2: [1, 0]}, 4, fused=True)


@case(21, "agreement", "reduced in different orders", "ranks 0 and 3", rank=3, at=(0, 23))
def recursive_doubling_that_one_rank_takes_apart() -> Plan:
    """Rank 3 gets 0's and 1's inputs one by one, where the others add sums of two."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=3):
            for src in (0, 1):
                segment[0].copy(src=src, dst=3, into=segment.scratch(0, 1 + src))
            for distance in (1, 2):
                for rank in program.ranks:
                    if (distance, rank) != (2, 1):
                        segment[0].copy(src=rank, dst=rank ^ distance, into=segment.scratch(0))
                for rank in program.ranks:
                    slots = (2, 1) if (distance, rank) == (2, 3) else (0,)
                    for slot in slots:
                        segment.scratch(0, slot).reduce(src=rank, dst=rank, into=segment[0])

    return compiled(author, 4)


@case(21, "agreement", "ranks 0 and 2 bytes 8..11", rank=2, at=(8, 11))
def only_the_last_element_differs() -> Plan:
    """Of three elements two come from one sum; for the third, rank 2 has a sum of its own."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, share=Fraction(2, 3)):
            segment[0].reduce(src=1, dst=0)
            segment[0].reduce(src=2, dst=0)
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=0, dst=2)
        for segment in program.pipeline(sections=1, share=Fraction(1, 3), scratch=2):
            segment[0].copy(src=0, dst=2, into=segment.scratch(0, 0))
            segment[0].copy(src=1, dst=2, into=segment.scratch(0, 1))
            segment[0].reduce(src=1, dst=0)
            segment[0].reduce(src=2, dst=0)
            segment[0].copy(src=0, dst=1)
            for slot in range(2):
                segment.scratch(0, slot).reduce(src=2, dst=2, into=segment[0])

    return compiled(author, 3, 3, slots=1)


@case(21, "agreement", "reduced in different orders")
def two_reducers_of_a_chain_walked_from_both_ends() -> Plan:
    """0 + 1 + 2 from the left at rank 2, from the right at rank 0; rank 1 has the left one."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            segment[0].copy(src=2, dst=1, into=segment.scratch(0))
            segment[0].copy(src=1, dst=1, into=segment.scratch(0, 1))
            segment.scratch(0).reduce(src=1, dst=1, into=segment.scratch(0, 1))
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=1, dst=2)
            segment.scratch(0, 1).reduce(src=1, dst=0, into=segment[0])
            segment[0].copy(src=2, dst=1)

    return compiled(author, 3, 5, slots=1, fused=True)


# --- 22 wrong identity ---


def _padded(reduction: str, collective: str = "reduce") -> Plan:
    """Rank 1 sends two elements and one of padding that nobody wrote."""
    return hand(
        2,
        """
        1>1 copy 0:2@3
        1>0 copy 3:6@3
        0>0 reduce 3:6@0
        """,
        {0: "r1 | l2<r1", 1: "l0 | s1<l0"},
        elements=3,
        scratch=3,
        collective=collective,
        reduction=reduction,
    )


@case(22, "result", "uses bytes never written", "what arrives", rank=0, at=(20, 23))
def zero_padding_under_max() -> Plan:
    return _padded("max")


@case(22, "result", "reduce uses bytes never written", "what it reduces into", rank=0, at=(8, 15))
def an_accumulator_that_starts_from_nothing_under_prod() -> Plan:
    """Scratch space taken for an accumulator of ones."""
    return hand(
        2,
        """
        1>0 copy 0:2@4
        0>0 reduce 0:2@2
        0>0 reduce 4:6@2
        0>0 copy 2:4@0
        """,
        {0: "r0 | l1 l2<r0,l1 l3<l2", 1: "s0"},
        elements=2,
        scratch=4,
        collective="reduce",
        reduction="prod",
    )


@case(22, "result", "contribution of rank 0 counted twice", rank=0, at=(0, 7))
def a_root_that_counts_itself_again_under_avg() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=0, dst=0, into=segment.scratch(0))
            segment[0].reduce(src=1, dst=0)
            segment.scratch(0).reduce(src=0, dst=0, into=segment[0])

    return compiled(author, 2, 2, collective="reduce", reduction="avg")


@case(22, "result", "contribution of rank 1 counted twice", rank=0)
def twice_under_min_which_would_forgive_it() -> Plan:
    draft = library("chain-reduce", 2, 4, segments=2)
    draft.transfers = replace(draft.transfers, reduction="min")
    rows = transfer_rows(draft.transfers)
    draft.transfers = edit_transfers(draft.transfers, [*rows, dict(rows[0])])
    send, receive = draft.find(1, "send"), draft.find(0, "receive-reduce")
    draft.lane_of(send).append(replace(send, send_transfer=len(rows), after=[]))
    draft.lane_of(receive).append(replace(receive, recv_transfer=len(rows), after=[receive]))
    return draft.build()


@case(22, "result", "receive-reduce-send uses bytes never written", "what it reduces into", rank=1, at=(20, 23))
def a_fused_sum_into_padding() -> Plan:
    """A chain that passes on three elements though rank 1 has put only two into its scratch space."""
    return hand(
        3,
        """
        2>1 reduce 0:3@3
        1>1 copy 0:2@3
        1>0 reduce 3:6@0
        """,
        {0: "r2", 1: "l1 | r0s2<l1", 2: "s0"},
        elements=3,
        scratch=3,
        collective="reduce",
    )


@case(22, "result", "uses bytes never written", rank=0)
def a_sum_into_an_all_gathers_empty_slice() -> Plan:
    """An all-gather written as an AllReduce over zeros: slices are added to what should be zero and is nothing."""
    draft = library("ring-all-gather", 2, 4)
    change(draft, 1, op=0)
    for row in draft.rows:
        if row.recv_transfer == 1:
            row.become("receive-reduce")
    return draft.build()


# --- 27 vacuous ---


@case(27, "result", "missing", rank=0, at=(12, 23))
def half_of_the_message_left_out() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, segments=2):
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)
            break

    return compiled(author, 2)


@case(27, "result", "contribution of rank 1 missing", "no transfer writes these bytes", rank=0, at=(0, 23))
def an_empty_pipeline() -> Plan:
    def author(program: Program) -> None:
        for _ in program.pipeline(sections=1):
            pass

    return compiled(author, 2)


@case(27, "result", "contribution of ranks 1, 2 missing", rank=0, at=(0, 23))
def nothing_at_all() -> Plan:
    def author(program: Program) -> None:
        del program

    return compiled(author, 3)


@case(27, "result", "never written", rank=0, at=(0, 19))
def a_broadcast_that_keeps_it_to_itself() -> Plan:
    """The root only moves its message about."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=1, dst=1, into=segment.scratch(0))
            segment.scratch(0).copy(src=1, dst=1, into=segment[0])

    return compiled(author, 3, 5, collective="broadcast", root=1)


@case(27, "matching", "is sent 0 times")
def transfers_that_no_instruction_performs() -> Plan:
    draft = library("ring", 3, 6)
    return Draft("empty", draft.transfers, draft.channels, [0, 1, 2], [[], [], []]).build()


@case(27, "result", "contribution of rank 1 missing", rank=0)
def only_copies_of_what_everyone_has_already() -> Plan:
    """By hand: rank 1 sends back what it got from rank 0, twice."""
    return hand(
        2,
        """
        0>1 copy 0:2@2
        1>0 copy 2:4@2
        0>0 copy 2:4@0
        """,
        {0: "s0 | r1 | l2<r1,s0", 1: "r0s1"},
        elements=2,
        scratch=2,
    )


@case(27, "result", "missing", rank=0, at=(ITEM, 2 * ITEM - 1))
def all_of_it_but_one_element() -> Plan:
    def author(program: Program) -> None:
        shares = (Fraction(1, 4), Fraction(1, 4), Fraction(1, 2))
        for place, share in enumerate(shares):
            for segment in program.pipeline(sections=1, share=share):
                if place != 1:
                    segment[0].reduce(src=1, dst=0)

    return compiled(author, 2, 4, collective="reduce")
