"""`RankMachine`: one rank's protocol as pure state. Events go in, actions come out; no I/O, no clock, no data.

    event in                  action out
    start()                   PostRecv(channel, slot)      give the transport a slot for a channel's next message
    arrived(channel)          Compute(instruction)         reduce or copy, from a slot or inside the buffer
    local_done(instruction)   PostSend(instruction)        give the transport bytes of the buffer
    sent(channel)

A lane issues its instructions in order, each once everything in its `after` is done and while fewer than `window` of
the lane's instructions are issued and not done; window 1 is the most patient run-time. A lane that receives has
`slots` staging slots: its (i + slots)-th receive is posted once its i-th has computed with what came. The i-th send
and the i-th receive of a channel are the i-th in the plan's numbering; a send that is ready early waits for its turn.
A fused instruction computes, frees its slot, then sends what it has written, and is done when that is sent.

`Memory` remembers what the machine did: runs of small programs look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optcc.errors import InputError, PlanError
from optcc.plan import LOCALS, RECEIVES, REDUCES, SEND, SENDS, Plan
from optcc.runtime.transport import SENT

WINDOW = 1
"""One instruction at a time in a lane: more would let messages share a port that the plan serves one after the other.
Four hosts of 2 x 200 Mbit/s, one at half: OptCC with 32 segments 1.08 of the bound with 1, 1.24 with 2."""
PLACES_MAX = 1024
STEPS_MAX = 64
"""So many states of a program a `Memory` keeps."""
_REPORT_LINES_MAX = 12
_WAITING, _ISSUED, _COMPUTING, _SENDING, _DONE = range(5)
_LISTS = (
    *("_arrived", "_expected", "_in_flight", "_lane_next", "_missing", "_posted", "_ready", "_send_next", "_sent"),
    "_state",
)
"""What changes in a machine, but for how many instructions are done and which slots are consumed."""


@dataclass(frozen=True, slots=True)
class PostRecv:
    """Post a receive of `bytes` from `channel` into `slot` of the rank's `lane`, for `instruction`."""

    index: int
    instruction: int
    channel: int
    lane: int
    slot: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PostSend:
    """Send `bytes` of the buffer from `offset` as the next message of `channel`, for `instruction`."""

    index: int
    instruction: int
    channel: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Reduce or copy `bytes` to `dst_offset`, from `slot` of `lane` or, if `slot` is -1, from `src_offset`."""

    index: int
    instruction: int
    reduce: bool
    lane: int
    slot: int
    src_offset: int
    dst_offset: int
    bytes: int


Action = PostRecv | PostSend | Compute
"""What the engine must do; `index` numbers the actions of a rank's program, so that it can prepare them."""


Snapshot = tuple[tuple[int, ...], ...]


class RankProgram:
    """What one rank needs of a plan, in Python lists; made once and shared by its machines.

    Actions name instructions and channels by the plan's numbers, lanes by the rank's own; inside, instruction i is the
    plan's `first` + i. `slots[lane]` is 0 for a lane that does not receive.

    Raises PlanError if the lanes of the plan are not sorted by rank.
    """

    __slots__ = (
        "actions",
        "after_count",
        "computes",
        "dependents",
        "first",
        "kind",
        "lane_of",
        "lanes",
        "n_instructions",
        "plan",
        "rank",
        "receivers",
        "recv_channel",
        "recv_message",
        "recv_turn",
        "recvs",
        "send_channel",
        "senders",
        "sends",
        "slots",
    )

    def __init__(self, plan: Plan, rank: int) -> None:
        if not 0 <= rank < plan.n_ranks:
            raise InputError(f"rank {rank}: must be below {plan.n_ranks}")
        if (np.diff(plan.lane_rank) < 0).any():
            raise PlanError("plan: lanes must be sorted by rank")
        self.plan, self.rank = plan, rank
        own = np.flatnonzero(plan.lane_rank == rank)
        low = int(plan.lanes.starts[own[0]]) if len(own) else 0
        high = int(plan.lanes.starts[own[-1] + 1]) if len(own) else 0
        self.first, self.n_instructions = low, high - low
        self.lanes: list[list[int]] = [(plan.lanes[int(lane)] - low).tolist() for lane in own]
        self.lane_of: list[int] = [0] * (high - low)
        for lane, instructions in enumerate(self.lanes):
            for i in instructions:
                self.lane_of[i] = lane
        self.kind: list[int] = plan.kind[low:high].tolist()
        self.recv_channel: list[int] = plan.in_channel[low:high].tolist()
        self.send_channel: list[int] = plan.out_channel[low:high].tolist()

        self.dependents: list[list[int]] = [[] for _ in range(high - low)]
        self.after_count: list[int] = [0] * (high - low)
        starts = plan.after.starts[low : high + 1].tolist()
        befores = (plan.after.values[starts[0] : starts[-1]] - low).tolist() if high > low else []
        for i in range(high - low):
            own_befores = befores[starts[i] - starts[0] : starts[i + 1] - starts[0]]
            self.after_count[i] = len(own_befores)
            for before in own_befores:
                self.dependents[before].append(i)
        self._make_actions()

    def _make_actions(self) -> None:
        """Every action that a run can ask for, and which message of its channel each instruction takes or sends."""
        plan, low, high = self.plan, self.first, self.first + self.n_instructions
        # Per channel, its instructions in the plan's order: message i is between senders[c][i] and receivers[c][i].
        self.receivers: list[list[int]] = [[] for _ in plan.channels]
        self.senders: list[list[int]] = [[] for _ in plan.channels]
        # Per lane, its receives in order, and for each instruction its place among them and in its channel.
        self.recvs: list[list[PostRecv]] = [[] for _ in self.lanes]
        self.slots = [0] * len(self.lanes)
        self.recv_turn: list[int] = [-1] * self.n_instructions
        self.recv_message: list[int] = [-1] * self.n_instructions
        self.sends: list[PostSend | None] = [None] * self.n_instructions
        self.computes: list[Compute | None] = [None] * self.n_instructions
        self.actions: list[Action] = []
        src_offset, dst_offset = plan.src_offset[low:high].tolist(), plan.dst_offset[low:high].tolist()
        length = plan.bytes[low:high].tolist()
        for i, kind in enumerate(self.kind):
            lane, slot = self.lane_of[i], -1
            if kind in RECEIVES:
                channel, turn = self.recv_channel[i], len(self.recvs[lane])
                self.slots[lane] = self.slots[lane] or plan.channels[channel].slots
                slot = turn % self.slots[lane]
                self.recv_turn[i], self.recv_message[i] = turn, len(self.receivers[channel])
                self.receivers[channel].append(i)
                recv = PostRecv(len(self.actions), low + i, channel, lane, slot, length[i])
                self.recvs[lane].append(recv)
                self.actions.append(recv)
            if kind in RECEIVES or kind in LOCALS:
                compute = Compute(
                    *(len(self.actions), low + i, kind in REDUCES, lane, slot),
                    *(src_offset[i], dst_offset[i], length[i]),
                )
                self.computes[i] = compute
                self.actions.append(compute)
            if kind in SENDS:
                self.senders[self.send_channel[i]].append(i)
                offset = src_offset[i] if kind == SEND else dst_offset[i]
                send = PostSend(len(self.actions), low + i, self.send_channel[i], offset, length[i])
                self.sends[i] = send
                self.actions.append(send)


class RankMachine:
    """The protocol of one rank over one run; `start` begins the next run.

    An event that cannot happen (an arrival that was not posted, a send that was not asked for) is an AssertionError:
    the engine or the transport is wrong.

    Raises InputError if `window` is below one.
    """

    __slots__ = (
        "_arrived",
        "_consumed",
        "_expected",
        "_in_flight",
        "_lane_next",
        "_missing",
        "_n_done",
        "_posted",
        "_ready",
        "_send_next",
        "_sent",
        "_state",
        "program",
        "window",
    )

    def __init__(self, program: RankProgram, window: int = WINDOW) -> None:
        if window < 1:
            raise InputError(f"window {window}: must be at least one")
        self.program = program
        self.window = window
        self._reset()

    def _reset(self) -> None:
        program, n_channels = self.program, len(self.program.plan.channels)
        self._n_done = 0
        self._missing = program.after_count.copy()
        self._state = bytearray(program.n_instructions)
        self._ready = bytearray(program.n_instructions)
        self._lane_next = [0] * len(program.lanes)
        self._in_flight = [0] * len(program.lanes)
        self._arrived = [0] * n_channels
        self._expected = [0] * n_channels
        self._posted = [0] * len(program.lanes)
        self._consumed = [bytearray(len(each)) for each in program.recvs]
        self._send_next = [0] * n_channels
        self._sent = [0] * n_channels

    @property
    def done(self) -> bool:
        """True once every instruction is."""
        return self._n_done == self.program.n_instructions

    @property
    def n_done(self) -> int:
        """Instructions done in this run."""
        return self._n_done

    def copy(self) -> RankMachine:
        """Another machine, in the same state."""
        other = RankMachine(self.program, self.window)
        other._n_done, other._consumed = self._n_done, [each[:] for each in self._consumed]
        for name in _LISTS:
            setattr(other, name, getattr(self, name)[:])
        return other

    def snapshot(self) -> Snapshot:
        """The state: equal for two machines of one program that do the same from now on."""
        lists = [tuple(getattr(self, name)) for name in _LISTS]
        return (*lists, *(tuple(each) for each in self._consumed))

    def start(self) -> list[Action]:
        """Begins a run; the former one must be over or given up."""
        self._reset()
        actions: list[Action] = []
        for lane in range(len(self.program.lanes)):
            self._post_receives(lane, actions)
        for lane in range(len(self.program.lanes)):
            self._issue(lane, actions)
        return actions

    def arrived(self, channel: int) -> list[Action]:
        """The next message of an in-channel is in its slot."""
        message = self._arrived[channel]
        assert message < self._expected[channel], f"channel {channel}: message {message} arrived but was not posted"
        self._arrived[channel] = message + 1
        i = self.program.receivers[channel][message]
        if self._state[i] != _ISSUED:
            return []
        self._state[i] = _COMPUTING
        compute = self.program.computes[i]
        assert compute is not None
        return [compute]

    def local_done(self, instruction: int) -> list[Action]:
        """The computation of `instruction` is done."""
        program = self.program
        i = instruction - program.first
        assert self._state[i] == _COMPUTING, f"instruction {instruction}: no computation is under way"
        actions: list[Action] = []
        turn = program.recv_turn[i]
        if turn >= 0:
            lane = program.lane_of[i]
            self._consumed[lane][turn] = 1
            self._post_receives(lane, actions)
        if program.send_channel[i] >= 0:
            self._state[i] = _SENDING
            self._send(i, actions)
        else:
            self._finish(i, actions)
        return actions

    def sent(self, channel: int) -> list[Action]:
        """The oldest message of an out-channel that is not yet reported has been sent."""
        message = self._sent[channel]
        assert message < self._send_next[channel], f"channel {channel}: message {message} sent but was not posted"
        self._sent[channel] = message + 1
        actions: list[Action] = []
        self._finish(self.program.senders[channel][message], actions)
        return actions

    def _post_receives(self, lane: int, actions: list[Action]) -> None:
        """Posts, in the lane's order, every receive whose slot is free."""
        recvs, consumed, slots = self.program.recvs[lane], self._consumed[lane], self.program.slots[lane]
        turn = self._posted[lane]
        while turn < len(recvs) and (turn < slots or consumed[turn - slots]):
            actions.append(recvs[turn])
            self._expected[recvs[turn].channel] += 1
            turn += 1
        self._posted[lane] = turn

    def _issue(self, lane: int, actions: list[Action]) -> None:
        """Issues what the lane's order, its window and `after` allow."""
        program, instructions, missing = self.program, self.program.lanes[lane], self._missing
        position, in_flight = self._lane_next[lane], self._in_flight[lane]
        while in_flight < self.window and position < len(instructions):
            i = instructions[position]
            if missing[i]:
                break
            position += 1
            in_flight += 1
            message = program.recv_message[i]
            if message >= 0 and self._arrived[program.recv_channel[i]] <= message:
                self._state[i] = _ISSUED
                continue
            compute = program.computes[i]
            if compute is not None:
                self._state[i] = _COMPUTING
                actions.append(compute)
            else:
                self._state[i] = _SENDING
                self._send(i, actions)
        self._lane_next[lane], self._in_flight[lane] = position, in_flight

    def _send(self, i: int, actions: list[Action]) -> None:
        """Instruction i has bytes to send: posts what is next on its channel, in the channel's order."""
        program, channel = self.program, self.program.send_channel[i]
        senders, ready = program.senders[channel], self._ready
        ready[i] = 1
        message = self._send_next[channel]
        while message < len(senders) and ready[senders[message]]:
            send = program.sends[senders[message]]
            assert send is not None
            actions.append(send)
            message += 1
        self._send_next[channel] = message

    def _finish(self, i: int, actions: list[Action]) -> None:
        lane_of, dependents = self.program.lane_of, self.program.dependents[i]
        self._state[i] = _DONE
        self._n_done += 1
        lane = lane_of[i]
        self._in_flight[lane] -= 1
        missing = self._missing
        for j in dependents:
            missing[j] -= 1
        self._issue(lane, actions)
        for j in dependents:
            if not missing[j] and lane_of[j] != lane:
                self._issue(lane_of[j], actions)

    def n_sent(self, channel: int) -> int:
        """Messages of an out-channel that are reported as sent."""
        return self._sent[channel]

    def n_arrived(self, channel: int) -> int:
        """Messages of an in-channel that have arrived."""
        return self._arrived[channel]

    def awaited(self) -> list[tuple[int, bool]]:
        """The channels whose next message the issued instructions wait for: (channel, whether it is to arrive)."""
        program = self.program
        found: dict[tuple[int, bool], None] = {}
        for lane, instructions in enumerate(program.lanes):
            for i in instructions[: self._lane_next[lane]]:
                if self._state[i] == _ISSUED:
                    found[program.recv_channel[i], True] = None
                elif self._state[i] == _SENDING:
                    found[program.send_channel[i], False] = None
        return list(found)

    def report(self) -> str:
        """What the run waits for, an instruction a line: the text of a deadline error."""
        program, plan = self.program, self.program.plan
        lines: list[str] = []
        for lane, instructions in enumerate(program.lanes):
            for i in instructions[: self._lane_next[lane]]:
                if self._state[i] != _DONE:
                    lines.append(f"{plan[program.first + i]} waits for {self._waits_for(i)}")
            if self._lane_next[lane] < len(instructions) and self._in_flight[lane] < self.window:
                i = instructions[self._lane_next[lane]]
                lines.append(f"{plan[program.first + i]} waits for {self._blockers(i)}")
        left_out = len(lines) - _REPORT_LINES_MAX
        if left_out > 0:
            lines[_REPORT_LINES_MAX:] = [f"... and {left_out} more"]
        head = f"rank {program.rank}: {self._n_done} of {program.n_instructions} instructions done"
        return "\n  ".join([head, *lines])

    def _waits_for(self, i: int) -> str:
        """Why an issued instruction is not done."""
        program, channels = self.program, self.program.plan.channels
        if self._state[i] == _ISSUED:
            return f"message {program.recv_message[i]} of channel {channels[program.recv_channel[i]]}"
        if self._state[i] == _COMPUTING:
            return "its computation"
        channel = program.send_channel[i]
        message = program.senders[channel].index(i)
        turn = "to be taken" if message < self._send_next[channel] else "to get its turn"
        return f"its message {message} of channel {channels[channel]} {turn}"

    def _blockers(self, i: int) -> str:
        """Which of `after` are not done, for the next instruction of a lane."""
        first = self.program.first
        after = self.program.plan.after[first + i].tolist()
        open_ = [f"#{before}" for before in after if self._state[before - first] != _DONE]
        return f"instructions {', '.join(open_[:4])}{', ...' if len(open_) > 4 else ''}"


class Place:
    """A state of a run: the machine in it, whether every instruction is done, and what is remembered: for each event
    that came in this state, the numbers of the actions that followed, and the state after them."""

    __slots__ = ("done", "is_kept", "machine", "steps")

    def __init__(self, machine: RankMachine, is_kept: bool) -> None:
        self.machine, self.done, self.is_kept = machine, machine.done, is_kept
        # Those of several events at once are found by all of these.
        self.steps: dict[tuple[Any, ...], Step] = {}


Step = tuple[tuple[int, ...], Place]


class Memory:
    """What a `RankMachine` has done, remembered, for computations that are done at once: a step is an event of the
    network and all that follows from it, with the computations and what they lead to, in the machine's order.

    A program of few instructions has met its states soon, and from then on a step is one look into a dictionary. At
    most `places_max` states are kept; steps into others are the machine's each time.
    """

    __slots__ = ("_places", "_places_max", "start")

    def __init__(self, program: RankProgram, window: int = WINDOW, places_max: int = PLACES_MAX) -> None:
        self._places: dict[Snapshot, Place] = {}
        self._places_max = places_max
        machine = RankMachine(program, window)
        self.start = self._settle(machine, machine.start())

    def step(self, place: Place, event: tuple[int, int], channel: int) -> Step:
        """What follows in `place` from `event`: (SENT or RECEIVED, what the caller calls `channel`)."""
        step = place.steps.get(event)
        if step is None:
            machine = place.machine.copy()
            step = self._settle(machine, machine.sent(channel) if event[0] == SENT else machine.arrived(channel))
            if step[1].is_kept:
                place.steps[event] = step
        return step

    def steps(self, place: Place, events: Sequence[tuple[int, int]], channels: Sequence[int]) -> Step | None:
        """What follows in `place` from events that came at once, one `step` after another; None if the run is over
        before the last of them, which then belongs to another run."""
        if len(events) == 1:
            return self.step(place, events[0], channels[0])
        key = tuple(events)
        step = place.steps.get(key)
        if step is None:
            actions: tuple[int, ...] = ()
            after = place
            for event, channel in zip(events, channels, strict=True):
                if after.done:
                    return None
                more, after = self.step(after, event, channel)
                actions += more
            step = actions, after
            if after.is_kept and len(place.steps) < STEPS_MAX:
                place.steps[key] = step
        return step

    def _settle(self, machine: RankMachine, actions: list[Action]) -> Step:
        """Has the machine go on until only the network can: all its actions, and the state then."""
        for action in actions:  # grows meanwhile
            if isinstance(action, Compute):
                actions += machine.local_done(action.instruction)
        key = machine.snapshot()
        place = self._places.get(key)
        if place is None:
            place = Place(machine, len(self._places) < self._places_max)
            if place.is_kept:
                self._places[key] = place
        return tuple(action.index for action in actions), place
