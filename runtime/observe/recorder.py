"""The flight recorder: the last events of a rank, in a ring that was allocated before the first of them.

    BEGIN     a = plan, 0 for a message of `send` and `recv`, x = run, y = bytes of its message
    END       a = plan, x = run, y = nanoseconds that the rank has waited for the network in it
    POSTED    a = plan, b = destination, c = channel, d = message of the channel, x = run, y = bytes
    SENT      a = plan, b = destination, c = channel, d = message of the channel, x = run
    ARRIVED   a = plan, b = source, c = channel, d = message of the channel, x = run
    COMPUTED  a = plan, b = instruction, x = run, y = nanoseconds that it took
    FAILED    the run-time has given up

The engine calls a `FlightRecorder` if it has one. A collective costs two records. Its messages are recorded one by one
where the plan is long; where every step of a short plan is remembered (`optcc.runtime.state.Memory`) they are not: a
record costs more than such a step. Which messages a rank waits for, its status says in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from optcc.plan import Plan
from optcc.runtime.observe.checks import ReductionCheck
from optcc.runtime.observe.page import BEGUN, DONE, RECORD, RECORD_BYTES, RING_AT, PageWriter
from optcc.runtime.state import RankProgram
from optcc.units import show_size

BEGIN, END, POSTED, SENT, ARRIVED, COMPUTED, FAILED = range(1, 8)
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
        # The bytes of the plans of all ranks.
        self._whole: dict[int, int] = {}
        # Called on each run that begins or ends, if anybody wants to know: (is it the end, plan, run).
        self.tell: Callable[[bool, int, int], None] | None = None
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
        t, name = plan.transfers, plan.collective.name
        self.plans[number] = KnownPlan(
            *(number, plan.name, name, t.dtype, t.reduction, t.size_bytes, plan.digest[:12]),
            prepared.program.n_instructions,
            () if len(ranks) == self._n_ranks else tuple(ranks),
        )
        if not self.plans[number].ranks:
            self._whole[number] = t.size_bytes
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

    def _ends_of_runs(self, page: PageWriter) -> tuple[Callable[[int, RecordedRun], None], ...]:
        """`begin` and `end`. Where ranks wait for each other, the processor has forgotten both by their next call, and
        fetches each object that they touch from memory: hence one frame, and few objects."""
        pack_into, memory, words, limit, now_s = RECORD.pack_into, page.memory, page.words, page.n_events, self._now_s
        whole, n_others = self._whole, 0

        def begin(plan: int, run: RecordedRun) -> None:
            n_bytes = whole.get(plan)
            if n_bytes is not None:
                number = words[BEGUN] + 1
                words[BEGUN] = number
            else:
                nonlocal n_others
                n_others -= 1
                number, n_bytes = n_others, 0
            run.number, run.waited_from_s = number, self.waited_s
            count = words[0]
            at, at_s = RING_AT + count % limit * RECORD_BYTES, run.due_s - run.deadline_s
            pack_into(memory, at, count + 1, at_s, BEGIN, plan, 0, 0, 0, number, n_bytes)
            words[0] = count + 1
            if self.tell is not None:
                self.tell(False, plan, number)

        def end(plan: int, run: RecordedRun) -> None:
            number, count = run.number, words[0]
            if number > 0:
                words[DONE] += 1
            at, waited_ns = RING_AT + count % limit * RECORD_BYTES, int((self.waited_s - run.waited_from_s) * _NS)
            pack_into(memory, at, count + 1, now_s(), END, plan, 0, 0, 0, number, waited_ns)
            words[0] = count + 1
            if self.tell is not None:
                self.tell(True, plan, number)

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
