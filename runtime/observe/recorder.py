"""The flight recorder: the last events of a rank, in a ring that was allocated before the first of them.

    BEGIN     a = plan, 0 for a message of `send` and `recv`, x = run
    END       a = plan, x = run, y = nanoseconds that the rank has waited for the network in it
    POSTED    a = plan, b = destination, c = channel, d = message of the channel, x = run, y = bytes
    SENT      a = plan, b = destination, c = channel, d = message of the channel, x = run
    ARRIVED   a = plan, b = source, c = channel, d = message of the channel, x = run
    COMPUTED  a = plan, b = instruction, x = run, y = nanoseconds that it took
    FAILED    the run-time has given up

The engine calls a `FlightRecorder` if it has one. A collective costs one record, and two if it begins while another
one is open (`optcc.runtime.observe.page`). Its messages are recorded one by one
where the plan is long; where every step of a short plan is remembered (`optcc.runtime.state.Memory`) they are not: a
record costs more than such a step. Which messages a rank waits for, its status says in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from optcc.plan import Plan
from optcc.runtime.observe.checks import ReductionCheck
from optcc.runtime.observe.page import (
    BEGIN,
    BEGUN,
    DONE,
    END,
    OPEN_AT,
    RECORD_BYTES,
    RECORDS_AT,
    RING_AT,
    RUN,
    RUN_BEGINS,
    RUN_ENDS,
    RUN_RECORD,
    PageWriter,
)
from optcc.runtime.state import RankProgram
from optcc.units import show_size

POSTED, SENT, ARRIVED, COMPUTED, FAILED = range(3, 8)
KINDS = ("", "begin", "end", "posted", "sent", "arrived", "computed", "failed")
MISMATCH = "mismatch"
"""The kind of a note: the ranks do not agree on what they are about to run."""
_NS = 1e9


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


class RecordedRun(Protocol):
    """What is recorded of a run."""

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

    `waited_s` is how long the engine has waited for the network so far, which it adds up itself.
    """

    def __init__(self, page: PageWriter, n_ranks: int, now_s: Callable[[], float]) -> None:
        self._write, self.words, self._now_s = page.recorder(), page.words, now_s
        self._n_ranks = n_ranks
        self.waited_s = 0.0
        self.plans: dict[int, KnownPlan] = {}
        self._routes: dict[int, _Routes] = {}
        # The plans of all ranks.
        self._whole: set[int] = set()
        # Whether the messages of short plans are recorded too, whose steps are not remembered then.
        self.in_detail = False
        self.check: ReductionCheck | None = None
        # A run begins, just now: its `due_s` was computed from the present; and a run is over.
        self.begin, self.end = self._ends_of_runs(page)

    # --- what the engine calls

    def add_plan(self, prepared: RecordedPlan, ranks: Sequence[int]) -> None:
        """A plan was made ready, for these ranks of the transport."""
        number = prepared.observed = len(self.plans) + 1
        plan, rank = prepared.plan, prepared.program.rank
        others = () if len(ranks) == self._n_ranks else tuple(ranks)
        self.plans[number] = known_plan(plan, number, prepared.program.n_instructions, others)
        if not self.plans[number].ranks:
            self._whole.add(number)
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
        begin, end = self.begin, self.end

        def begin_and_say(plan: int, run: RecordedRun) -> None:
            begin(plan, run)
            say(False, plan, run.number)

        def end_and_say(plan: int, run: RecordedRun) -> None:
            end(plan, run)
            say(True, plan, run.number)

        self.begin, self.end = begin_and_say, end_and_say

    def _ends_of_runs(self, page: PageWriter) -> tuple[Callable[[int, RecordedRun], None], ...]:
        """`begin` and `end`. Where ranks wait for each other, the processor has forgotten both by their next call, and
        fetches each object that they touch from memory: hence one frame, few objects, and few stores."""
        memory, words, limit, now_s, write = page.memory, page.words, page.n_events, self._now_s, self._write
        store_begin, store_run, store_end = RUN_BEGINS.pack_into, RUN_RECORD.pack_into, RUN_ENDS.pack_into
        whole, n_begun, n_done, n_others, open_run = self._whole, 0, 0, 0, 0

        def begin(plan: int, run: RecordedRun) -> None:
            nonlocal n_begun, n_others, open_run
            if plan in whole:
                n_begun = number = n_begun + 1
            else:
                n_others = number = n_others - 1
            run.number, run.waited_from_s = number, self.waited_s
            if not open_run:
                open_run = number
                store_begin(memory, OPEN_AT, number, plan, run.due_s - run.deadline_s, n_begun)
            else:
                words[BEGUN] = n_begun
                write(run.due_s - run.deadline_s, BEGIN, plan, 0, 0, 0, number, 0)

        def end(plan: int, run: RecordedRun) -> None:
            nonlocal n_done, open_run
            number, waited_s = run.number, self.waited_s - run.waited_from_s
            if number > 0:
                n_done += 1
            if number != open_run:
                write(now_s(), END, plan, 0, 0, 0, number, int(waited_s * _NS))
                words[DONE] = n_done
                return
            count, open_run = words[0], 0
            at = RING_AT + count % limit * RECORD_BYTES
            store_run(memory, at, count + 1, now_s(), RUN, plan, run.due_s - run.deadline_s, number, waited_s)
            store_end(memory, RECORDS_AT, count + 1, n_done, 0)

        return begin, end

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
