"""The flight recorder: the last events of a rank, in a ring that was allocated before the first of them.

    BEGIN     a = plan, 0 for a message of `send` and `recv`, x = run
    END       a = plan, x = run, y = nanoseconds that the rank has waited for the network in it, -1 if unknown
    POSTED    a = plan, b = destination, c = channel, d = message of the channel, x = run, y = bytes
    SENT      a = plan, b = destination, c = channel, d = message of the channel, x = run
    ARRIVED   a = plan, b = source, c = channel, d = message of the channel, x = run
    COMPUTED  a = plan, b = instruction, x = run, y = nanoseconds that it took
    FAILED    the run-time has given up

The engine calls a `FlightRecorder` if it has one. A collective costs one record, and two if it begins while another
one is open (`optcc.runtime.observe.page`). Its messages are recorded one by one
where the plan is long; where every step of a short plan is remembered (`optcc.runtime.state.Memory`) they are not: a
record costs more than such a step. Which messages a rank waits for, its status says in either case.

Most collectives are short, of all ranks, and alone: `begin` and `end` do these at once, and all others in `_begin_any`
and `_end_any`. How long a rank waits for the network is clocked at each wait of long plans, and of a sample of the
short ones, which are over in a few times what the clock takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple, Protocol

import msgspec

from optcc.plan import Plan
from optcc.runtime.observe.checks import ReductionCheck
from optcc.runtime.observe.page import (
    BEGIN,
    BEGIN_LONG,
    BEGUN,
    DONE,
    END,
    END_LONG,
    LONGS_AT,
    MARK_LONG,
    OPEN,
    PLAN,
    RECORD,
    RECORD_LONGS,
    RECORDS,
    RING_LONG,
    RUN,
    RUN_RECORD,
    SINCE,
    UNKNOWN_NS,
    UNKNOWN_S,
    PageWriter,
    plain_mark,
    plan_of_mark,
)
from optcc.runtime.state import RankProgram
from optcc.units import show_size

POSTED, SENT, ARRIVED, COMPUTED, FAILED = range(3, 8)
KINDS = ("", "begin", "end", "posted", "sent", "arrived", "computed", "failed")
MISMATCH = "mismatch"
"""The kind of a note: the ranks do not agree on what they are about to run."""
_NS = 1e9
CLOCKED_FIRST, CLOCKED_EVERY = 64, 64
"""The waits of so many short runs are clocked, and of one of so many after these."""
_NOTHING, _PLAIN, _SEVERAL = range(3)
"""What is open: nothing, one plain run, or anything else."""


class KnownPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that was made ready, as the recorder numbers it; `ranks` are empty if they are all of the job's."""

    number: int
    name: str
    collective: str
    dtype: str
    reduction: str
    n_bytes: int
    digest: str
    instructions: int
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """For what it is."""
        return _text(self.collective, self.n_bytes, self.dtype, self.reduction, self.name)


def known_plan(plan: Plan, number: int, instructions: int, ranks: tuple[int, ...]) -> KnownPlan:
    """What is told of a plan; `number` 0 if the ranks have not agreed on it."""
    t = plan.transfers
    what = plan.name, plan.collective.name, t.dtype, t.reduction, t.size_bytes, plan.digest[:12]
    return KnownPlan(number, *what, instructions, ranks)


def plan_text(plan: Plan) -> str:
    """For what a plan is."""
    t = plan.transfers
    return _text(plan.collective.name, t.size_bytes, t.dtype, t.reduction, plan.name)


def _text(collective: str, n_bytes: int, dtype: str, reduction: str, name: str) -> str:
    return f"{collective} of {show_size(n_bytes)} ({dtype}, {reduction}) by {name}"


class RecordedPlan(Protocol):
    """What is recorded of a prepared plan: `observed` is its number."""

    observed: int

    @property
    def plan(self) -> Plan:
        """The plan."""
        ...

    @property
    def program(self) -> RankProgram:
        """This rank's part of it."""
        ...

    @property
    def is_remembered(self) -> bool:
        """Whether it is so short that its steps are remembered."""
        ...


class RecordedRun(Protocol):
    """What is recorded of a run; `waited_from_s` is `UNKNOWN_S` before it begins."""

    number: int
    waited_from_s: float
    due_s: float
    deadline_s: float


class _Routes(NamedTuple):
    """By action: (peer, channel, message, bytes) of what is sent; by channel: its other end."""

    actions: list[tuple[int, int, int, int] | None]
    peers: list[int]


class FlightRecorder:
    """Writes the events of one rank's engine into its page; `now_s` is the clock of the engine.

    `waited_s` is how long the engine has waited for the network while `is_clocking`, which it adds up itself.
    """

    # The caches hold little of it from one run to the next: an object with slots is three of their lines.
    __slots__ = (
        *("_at", "_clock_at", "_end", "_first", "_memory", "_n_done", "_n_open", "_n_others", "_n_ranks", "_open"),
        *("_n_records", "_now_s", "_plain", "_routes", "_say", "_seconds", "check", "in_detail", "is_clocking"),
        *("longs", "n_begun", "plans", "waited_s"),
    )

    def __init__(self, page: PageWriter, n_ranks: int, now_s: Callable[[], float]) -> None:
        self._memory, self.longs, self._seconds = page.memory, page.longs, page.seconds
        self._n_ranks, self._now_s = n_ranks, now_s
        self.waited_s, self.is_clocking = 0.0, False
        self.plans: dict[int, KnownPlan] = {}
        self._routes: dict[int, _Routes] = {}
        # By plan, 0 for messages: what a record of a plain run has for it; 0 if its runs never are plain.
        self._plain = [0]
        # What is open; if that is several, how many, and which of them is in the words.
        self._open, self._n_open, self._first = _NOTHING, 0, 0
        # The records so far, and where in `longs` the next one will be.
        self._n_records, self._at, self._end = 0, RING_LONG, RING_LONG + page.n_events * RECORD_LONGS
        # Collectives; of those that are done, plain ones are not counted.
        self.n_begun = self._n_done = self._n_others = self._clock_at = 0
        self._say: Callable[[bool, int, int], None] | None = None
        # Whether the messages of short plans are recorded too, whose steps are not remembered then.
        self.in_detail = False
        self.check: ReductionCheck | None = None

    # --- what the engine calls

    def add_plan(self, prepared: RecordedPlan, ranks: Sequence[int]) -> None:
        """A plan was made ready, for these ranks of the transport."""
        number = prepared.observed = len(self.plans) + 1
        plan, rank = prepared.plan, prepared.program.rank
        others = () if len(ranks) == self._n_ranks else tuple(ranks)
        self.plans[number] = known_plan(plan, number, prepared.program.n_instructions, others)
        is_plain = not others and prepared.is_remembered and self._say is None
        self._plain.append(plain_mark(number) if is_plain else 0)
        peers = [ranks[each.dst if each.src == rank else each.src] for each in plan.channels]
        actions: list[tuple[int, int, int, int] | None] = [None] * len(prepared.program.actions)
        sends = prepared.program.sends
        for channel, senders in enumerate(prepared.program.senders):
            for message, instruction in enumerate(senders):
                send = sends[instruction]
                assert send is not None
                actions[send.index] = peers[channel], channel, message, send.bytes
        self._routes[number] = _Routes(actions, peers)

    def drop_plan(self, prepared: RecordedPlan) -> None:
        """A plan was closed: what is known of it stays, for the records."""
        self._routes.pop(prepared.observed, None)

    def tell(self, say: Callable[[bool, int, int], None]) -> None:
        """From now on `say` is called on each run that begins or ends: (is it the end, plan, run)."""
        self._say = say
        self._plain = [0] * len(self._plain)

    def begin(self, plan: int, run: RecordedRun, begin_s: float) -> None:
        """A run begins, at `begin_s`."""
        mark, n_begun = self._plain[plan], self.n_begun
        if self._open or n_begun == self._clock_at or not mark:
            self._begin_any(plan, run, begin_s)
            return
        longs, at = self.longs, self._at
        self._open = _PLAIN
        self.n_begun = run.number = longs[at] = n_begun + 1
        self._seconds[at + BEGIN_LONG] = begin_s
        longs[at + MARK_LONG] = mark

    def end(self, plan: int, run: RecordedRun) -> None:
        """A run is over."""
        if self._open != _PLAIN or run.number != self.n_begun:
            self._end_any(plan, run)
            return
        self._open, at = _NOTHING, self._at
        self._seconds[at + END_LONG] = self._now_s()
        self._n_records = self.longs[RECORDS] = self._n_records + 1
        at += RECORD_LONGS
        self._at = at if at < self._end else RING_LONG

    @property
    def n_done(self) -> int:
        """Collectives done."""
        return self._n_done if self._open == _SEVERAL else self.n_begun - self._open

    def _begin_any(self, plan: int, run: RecordedRun, begin_s: float) -> None:
        words, is_alone = self.longs, self._open == _NOTHING
        self._yield_record()
        self._open = _SEVERAL
        if plan and not self.plans[plan].ranks:
            self.n_begun = run.number = self.n_begun + 1
        else:
            self._n_others = run.number = self._n_others - 1
        if self.n_begun > self._clock_at:
            self._clock_at = self.n_begun + (0 if self.n_begun < CLOCKED_FIRST else CLOCKED_EVERY - 1)
        # Where it is not known from the beginning of a run on how long it waits, it never is.
        self.is_clocking = self.is_clocking or is_alone or not self._plain[plan]
        run.waited_from_s = self.waited_s if self.is_clocking else UNKNOWN_S
        self._n_open += 1
        words[BEGUN] = self.n_begun
        if self._first:
            self._write(begin_s, BEGIN, plan, 0, 0, 0, run.number, 0)
        else:
            self._tell_open(run.number, plan, begin_s)
        if self._say is not None:
            self._say(False, plan, run.number)

    def _end_any(self, plan: int, run: RecordedRun) -> None:
        number, words = run.number, self.longs
        if not number:
            # It began before the engine had this recorder.
            return
        if number > 0:
            self._n_done += 1
        begin_s, waited_s = run.due_s - run.deadline_s, UNKNOWN_S
        if run.waited_from_s >= 0:
            waited_s = self.waited_s - run.waited_from_s
        if number == self._first:
            self._first = 0
            self._pack(RUN_RECORD, self._now_s(), RUN, plan, begin_s, number, waited_s)
            words[DONE], words[OPEN] = self._n_done, 0
        else:
            waited_ns = int(waited_s * _NS) if waited_s >= 0 else UNKNOWN_NS
            self._write(self._now_s(), END, plan, 0, 0, 0, number, waited_ns)
            words[DONE] = self._n_done
        self._n_open -= 1
        if self._n_open <= 0:
            self._open, self._n_open, self.is_clocking = _NOTHING, 0, False
        if self._say is not None:
            self._say(True, plan, number)

    def _tell_open(self, number: int, plan: int, begin_s: float) -> None:
        """A run is in the words until it ends."""
        self.longs[PLAN], self._seconds[SINCE] = plan, begin_s
        self.longs[OPEN] = self._first = number

    def _yield_record(self) -> None:
        """Another record comes: a plain run that is open is one no more, and those that are done are counted."""
        if self._open == _NOTHING:
            self._n_done = self.longs[DONE] = self.n_begun
        elif self._open == _PLAIN:
            plan, begin_s = plan_of_mark(self.longs[self._at + MARK_LONG]), self._seconds[self._at + BEGIN_LONG]
            self._n_done = self.longs[DONE] = self.n_begun - 1
            self._open, self._n_open = _SEVERAL, 1
            self._tell_open(self.n_begun, plan, begin_s)

    def _write(self, at_s: float, kind: int, a: int, b: int, c: int, d: int, x: int, y: int) -> None:
        if self._open != _SEVERAL:
            self._yield_record()
        self._pack(RECORD, at_s, kind, a, b, c, d, x, y)

    def _pack(self, record: Struct, *fields: float) -> None:
        at, self._n_records = self._at, self._n_records + 1
        record.pack_into(self._memory, 8 * at + LONGS_AT, self._n_records, *fields)
        self.longs[RECORDS] = self._n_records
        self._at = at + RECORD_LONGS if at + RECORD_LONGS < self._end else RING_LONG

    def posted(self, plan: int, action: int, run: int) -> None:
        """A message was given to the transport."""
        sending = self._routes[plan].actions[action]
        assert sending is not None, f"action {action} of plan {plan} sends nothing"
        peer, channel, message, n_bytes = sending
        self._write(self._now_s(), POSTED, plan, peer, channel, message, run, n_bytes)

    def sent(self, plan: int, channel: int, message: int, run: int) -> None:
        """A message has left."""
        self._write(self._now_s(), SENT, plan, self._routes[plan].peers[channel], channel, message, run, 0)

    def arrived(self, plan: int, channel: int, message: int, run: int) -> None:
        """A message has come."""
        self._write(self._now_s(), ARRIVED, plan, self._routes[plan].peers[channel], channel, message, run, 0)

    def computed(self, plan: int, instruction: int, run: int, since_s: float) -> None:
        """A reduction or copy that began at `since_s` is done, or queued on a device."""
        now_s = self._now_s()
        self._write(now_s, COMPUTED, plan, instruction, 0, 0, run, int((now_s - since_s) * _NS))

    def failed(self) -> None:
        """The run-time gives up."""
        self._write(self._now_s(), FAILED, 0, 0, 0, 0, 0, 0)
