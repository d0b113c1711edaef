"""Wrong schedules and wrong plans, one for each class of bug that can be written down, and what each must get.

The numbers are those of the classes in docs of the field (27 of them); the ones that are missing here need what the
library cannot express yet: reuse across launches (13, 20b), out-of-place buffers (14, 15), claims of time (25, 26) and
limits of other runtimes (24).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.plan import Channel, Plan
from optcc.schedules.ring import ring
from tests.negative.edits import Draft, edit_transfers, transfer_rows

Author = Callable[[Program], None]


@dataclass(frozen=True)
class Case:
    """A plan that must be refuted by `expected`, a property, or refused by the error of that name."""

    number: int
    what: str
    make: Callable[[], Plan]
    expected: str


def compiled(function: Author, ranks: int, elements: int = 6, collective: str = "allreduce", slots: int = 2) -> Plan:
    """The plan of an author's function."""
    return compile_schedule(
        schedule(collective=collective)(function)(n_ranks=ranks), size_bytes=4 * elements, slots=slots, fused=False
    )


def draft(ranks: int = 2, segments: int = 1, slots: int = 2, fused: bool = False) -> Draft:
    """A ring to be spoiled."""
    return Draft.of(
        compile_schedule(ring(n_ranks=ranks, segments=segments), size_bytes=24 * segments, slots=slots, fused=fused)
    )


def double_reduction() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    return compiled(author, 2)


def double_reduction_by_two_ways() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=1)
            segment[0].reduce(src=0, dst=2)
            segment[0].reduce(src=1, dst=2)
            segment[0].copy(src=2, dst=0)
            segment[0].copy(src=2, dst=1)

    return compiled(author, 3)


def missing_hop() -> Plan:
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


def copy_for_a_reduction() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    return compiled(author, 2)


def wrong_offset() -> Plan:
    made = draft()
    rows = transfer_rows(made.transfers)
    rows[0]["dst_offset"], old = 12, rows[0]["dst_offset"]
    assert old == 0
    made.transfers = edit_transfers(made.transfers, rows)
    receive = next(row for row in made.rows if row.recv_transfer == 0)
    receive.dst_offset = 12
    return made.build()


def offset_unlike_its_transfer() -> Plan:
    made = draft()
    made.find(0, "send").src_offset = 12
    return made.build()


def other_order_on_a_channel() -> Plan:
    made = draft(segments=2)
    lane = made.lane_of(made.find(0, "send"))
    lane[0], lane[1] = lane[1], lane[0]
    return made.build()


def send_without_receive() -> Plan:
    made = draft()
    made.remove(made.find(1, "receive"))
    return made.build()


def other_length() -> Plan:
    made = draft()
    made.find(0, "send").bytes = 8
    return made.build()


def other_channel() -> Plan:
    made = draft()
    made.channels.append(Channel(0, 1, 2))
    send = made.find(0, "send")
    made.lane_of(send).remove(send)
    send.out_channel = len(made.channels) - 1
    made.lane_rank.insert(0, 0)
    made.lanes.insert(0, [send])
    return made.build()


def channel_of_another_rank() -> Plan:
    made = draft()
    send = made.find(0, "send")
    send.out_channel = 1 - send.out_channel
    return made.build()


def rendezvous() -> Plan:
    made = draft()
    for rank in (0, 1):
        send = made.find(rank, "send")
        send.after = [made.find(rank, "receive-reduce")]
    return made.build()


def three_then_three_with_two_slots() -> Plan:
    made = draft(segments=2, slots=2)
    for rank in (0, 1):
        sends = [row for at, lane in zip(made.lane_rank, made.lanes, strict=True) if at == rank for row in lane]
        made.find(rank, "receive-reduce").after.append([row for row in sends if row.name == "send"][2])
    return made.build()


def waits_for_itself() -> Plan:
    made = draft()
    made.find(0, "send").after.append(made.find(0, "send", 1))
    return made.build()


def read_after_write() -> Plan:
    made = draft()
    send = next(row for row in made.rows if row.name == "send" and row.after)
    send.after.clear()
    return made.build()


def write_after_read() -> Plan:
    made = draft()
    receive = next(row for row in made.rows if row.name == "receive" and row.after)
    receive.after.clear()
    return made.build()


def receive_into_a_buffer_in_flight() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=0, dst=1, into=segment.scratch(0))
            segment[0].reduce(src=1, dst=0)
            segment[0].copy(src=0, dst=1)

    made = Draft.of(compiled(author, 2))
    made.find(0, "receive-reduce").after.clear()
    return made.build()


def slot_taken_before_it_is_free() -> Plan:
    """Rank 1 takes its messages out of the order in which they come, with a single slot."""
    made = draft(ranks=3, segments=1, slots=1)
    lane = made.lane_of(made.find(1, "receive-reduce"))
    lane[0].after.append(made.find(1, "send", 1))
    return made.build()


def scratch_never_written() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment.scratch(0).reduce(src=0, dst=1, into=segment[0])

    return compiled(author, 2)


def read_of_nothing() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=1, dst=0)

    return compiled(author, 2, collective="broadcast")


def scratch_of_another_rank() -> Plan:
    made = draft()
    made.transfers = replace(made.transfers, scratch_bytes=24)
    rows = transfer_rows(made.transfers)
    rows[0]["src_offset"] = 24
    made.transfers = edit_transfers(made.transfers, rows)
    made.find(0, "send").src_offset = 24
    return made.build()


def forwarded_unmodified() -> Plan:
    made = draft(ranks=3, fused=True)
    next(row for row in made.rows if row.name == "receive-reduce-send").become("receive-copy-send")
    return made.build()


def forwarded_with_another_transfer() -> Plan:
    made = draft(ranks=3, fused=True)
    one, two = [row for row in made.rows if row.name == "receive-reduce-send"][:2]
    one.recv_transfer, two.recv_transfer = two.recv_transfer, one.recv_transfer
    return made.build()


def remote_offset_used_at_home() -> Plan:
    made = draft(ranks=3, fused=True)
    rows = [row for row in made.rows if row.in_channel >= 0 and row.out_channel >= 0]
    rows[0].dst_offset, rows[1].dst_offset = rows[1].dst_offset, rows[0].dst_offset
    return made.build()


def overlapping_copy() -> Plan:
    """Two local copies: the message into scratch space, then scratch space onto itself, one element further on."""

    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)
            segment[0].copy(src=0, dst=0, into=segment.scratch(0))
            segment.scratch(0).copy(src=0, dst=0, into=segment.scratch(0, 1))

    made = Draft.of(compiled(author, 2))
    rows = transfer_rows(made.transfers)
    rows[3]["dst_offset"] = rows[3]["src_offset"] + 4
    made.transfers = edit_transfers(made.transfers, rows)
    next(row for row in made.rows if row.recv_transfer == 3).dst_offset = rows[3]["dst_offset"]
    return made.build()


def one_send_too_many() -> Plan:
    made = draft()
    lane = made.lane_of(made.find(0, "send"))
    lane.append(replace(lane[-1], after=[]))
    return made.build()


def reduced_in_different_orders() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            for src in program.ranks:
                for place, dst in enumerate(rank for rank in program.ranks if rank != src):
                    others = [rank for rank in program.ranks if rank != dst]
                    segment[0].copy(src=src, dst=dst, into=segment.scratch(0, others.index(src)))
                    assert place < 2
            for rank in program.ranks:
                for slot in range(2):
                    segment.scratch(0, slot).reduce(src=rank, dst=rank, into=segment[0])

    return compiled(author, 3)


def last_block_unsent() -> Plan:
    """Sections of two elements; the seventh element is nobody's."""
    made = draft()
    rows = transfer_rows(made.transfers)
    made.transfers = replace(edit_transfers(made.transfers, rows), size_bytes=28)
    return made.build()


def half_an_element() -> Plan:
    made = draft()
    rows = transfer_rows(made.transfers)
    for t, row in enumerate(rows):
        cut = 2 if row["src_offset"] else 0
        for name in ("src_offset", "dst_offset"):
            rows[t][name] -= cut
        rows[t]["bytes"] += 2 if cut else -2
    made.transfers = edit_transfers(made.transfers, rows)
    for each in made.rows:
        row = rows[max(each.recv_transfer, each.send_transfer)]
        each.bytes = row["bytes"]
        each.src_offset = row["src_offset"] if each.src_offset >= 0 else -1
        each.dst_offset = row["dst_offset"] if each.dst_offset >= 0 else -1
    return made.build()


def unknown_rank() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=0, dst=2)

    return compiled(author, 2)


def shares_left_out() -> Plan:
    def author(program: Program) -> None:
        for segment in program.pipeline(sections=1, segments=2):
            segment[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)
            break

    return compiled(author, 2)


def empty_allreduce() -> Plan:
    def author(program: Program) -> None:
        for _ in program.pipeline(sections=1):
            pass

    return compiled(author, 2)


def nothing_at_all() -> Plan:
    def author(program: Program) -> None:
        del program

    return compiled(author, 3)


CASES = (
    Case(1, "double reduction", double_reduction, "result"),
    Case(1, "double reduction by two ways", double_reduction_by_two_ways, "result"),
    Case(2, "a ring with a hop too few", missing_hop, "result"),
    Case(2, "a copy where a reduction belongs", copy_for_a_reduction, "result"),
    Case(3, "reduced into the wrong chunk", wrong_offset, "races"),
    Case(3, "offset unlike its transfer's", offset_unlike_its_transfer, "matching"),
    Case(4, "another order on a channel", other_order_on_a_channel, "matching"),
    Case(4, "a send without receive", send_without_receive, "matching"),
    Case(4, "another length", other_length, "matching"),
    Case(5, "sent on one channel, awaited on another", other_channel, "matching"),
    Case(5, "a channel of another rank", channel_of_another_rank, "PlanError"),
    Case(6, "receive before send, on both", rendezvous, "deadlock"),
    Case(7, "three sends, then three receives, two slots", three_then_three_with_two_slots, "deadlock"),
    Case(8, "waits for what stands behind it", waits_for_itself, "deadlock"),
    Case(9, "read after write", read_after_write, "races"),
    Case(10, "write after read", write_after_read, "races"),
    Case(11, "receive into a buffer in flight", receive_into_a_buffer_in_flight, "races"),
    Case(12, "one slot, and a message too early", slot_taken_before_it_is_free, "deadlock"),
    Case(16, "scratch that nobody wrote", scratch_never_written, "ScheduleError"),
    Case(16, "broadcast from who holds nothing", read_of_nothing, "result"),
    Case(16, "scratch that nobody wrote, in a plan", scratch_of_another_rank, "result"),
    Case(17, "forwarded without its own part", forwarded_unmodified, "matching"),
    Case(17, "fused across two transfers", forwarded_with_another_transfer, "matching"),
    Case(18, "the remote offset used at home", remote_offset_used_at_home, "matching"),
    Case(19, "a copy onto itself, shifted", overlapping_copy, "races"),
    Case(20, "one send too many", one_send_too_many, "matching"),
    Case(21, "reduced in different orders", reduced_in_different_orders, "agreement"),
    Case(23, "the last element is nobody's", last_block_unsent, "result"),
    Case(23, "half an element", half_an_element, "PlanError"),
    Case(25, "an endpoint that does not exist", unknown_rank, "ScheduleError"),
    Case(27, "half of the message left out", shares_left_out, "result"),
    Case(27, "an empty AllReduce", empty_allreduce, "result"),
    Case(27, "nothing at all", nothing_at_all, "result"),
)
