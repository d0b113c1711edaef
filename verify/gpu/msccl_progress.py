"""Matching and deadlock of an MSCCL algorithm: which send meets which receive, and whether all steps end.

A connection is a pair of GPUs and a channel. It has one thread block that sends on it and one that receives, and its
messages arrive in the order in which they were sent; a step of `cnt` chunks sends up to `cnt` messages, as many as the
step that receives them expects only if that has the same `cnt`. It holds 2 messages (protocol Simple) or 8 (LL and
LL128); a send into a full one waits.

How many chunks make a message depends on the size of the call: as many as a slot of the connection's buffer has room
for, but one at least. One chunk each is the worst case: with longer messages a connection holds more, and whatever
waits then waits with shorter ones too. So a file that ends with single chunks does so for all sizes; one that does not
may still be safe for those up to its `maxBytes`, with buffers as large as the run-times' own.

What a thread block does next depends on its own steps alone, and nothing that it waits for is taken away again; so
every order ends in the same place, and one is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from optcc.verify.gpu.msccl_interpreter import LoadedBlock, Transmission
from optcc.verify.gpu.operations import StepCounterexample, StepPlace, counter

SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
SLOT_BYTES = {"Simple": 2**19, "LL": 2**14, "LL128": 50_176}
"""What a message holds by default, the least of the three run-times and all machines: half of Simple's buffer, of
2^20 B on ARM; half of an eighth of LL's 2^18 B in RCCL, and 7/8 of an eighth of LL128's 458,752 B there."""

Connection = tuple[int, int, int]
"""Sending GPU, receiving GPU, channel."""
Step = tuple[int, int]
"""A thread block, counted over all GPUs, and a transmission of it."""


@dataclass(slots=True)
class Progress:
    """All transmissions in an order in which they may end.

    `sender[step]` is the step whose message a receiving one takes, `awaited[step]` are the steps whose flags it waits
    for.
    """

    order: list[Step] = field(default_factory=list)
    sender: dict[Step, Step] = field(default_factory=dict)
    awaited: dict[Step, list[Step]] = field(default_factory=dict)


def match(file: str, blocks: Sequence[LoadedBlock]) -> tuple[StepCounterexample | None, Progress]:
    """The sender of every message; or what does not meet."""
    progress = Progress()
    senders: dict[Connection, int] = {}
    receivers: dict[Connection, int] = {}
    for at, loaded in enumerate(blocks):
        block = loaded.block
        for ends, key, side in (
            (senders, (block.gpu, block.send, block.channel), "sends to"),
            (receivers, (block.recv, block.gpu, block.channel), "receives from"),
        ):
            if -1 in key:
                continue
            if key in ends:
                peer = block.send if ends is senders else block.recv
                what = f"{side} GPU {peer} on channel {block.channel}, as thread block {blocks[ends[key]].block.number}"
                return counter(file, "matching", f"{what} does: a connection has one", _place(loaded)), progress
            ends[key] = at
    for connection in (*senders, *receivers):
        src, dst, channel = connection
        where = f"channel {channel} from GPU {src} to GPU {dst}"
        if connection not in receivers:
            what = f"no thread block of GPU {dst} receives from GPU {src} on channel {channel}"
            return counter(file, "matching", what, _first(blocks[senders[connection]], True)), progress
        if connection not in senders:
            what = f"no thread block of GPU {src} sends to GPU {dst} on channel {channel}"
            return counter(file, "matching", what, _first(blocks[receivers[connection]], False)), progress
        found = _match_connection(file, where, blocks, senders[connection], receivers[connection], progress)
        if found is not None:
            return found, progress
    return None, progress


def _match_connection(
    file: str, where: str, blocks: Sequence[LoadedBlock], sender: int, receiver: int, progress: Progress
) -> StepCounterexample | None:
    """Pairs the k-th send of a connection with its k-th receive."""
    sends = [k for k, each in enumerate(blocks[sender].transmissions) if each.sends]
    receives = [k for k, each in enumerate(blocks[receiver].transmissions) if each.receives]
    for number, (out, into) in enumerate(zip(sends, receives, strict=False)):
        sent, taken = blocks[sender].transmissions[out], blocks[receiver].transmissions[into]
        if sent.count != taken.count:
            places = (sent.place(blocks[sender].block), taken.place(blocks[receiver].block))
            what = f"message {number} of {where}: {sent.count} chunks are sent, {taken.count} are received"
            return counter(file, "matching", what, places[1], places)
        progress.sender[receiver, into] = (sender, out)
    if len(sends) == len(receives):
        return None
    at, steps = (sender, sends) if len(sends) > len(receives) else (receiver, receives)
    extra = blocks[at].transmissions[steps[min(len(sends), len(receives))]]
    what = f"{where} has {len(sends)} messages sent and {len(receives)} received: this step's is never "
    what += "received" if at == sender else "sent"
    return counter(file, "matching", what, extra.place(blocks[at].block))


def _place(loaded: LoadedBlock) -> StepPlace:
    return StepPlace(loaded.block.line, loaded.block.gpu, loaded.block.number)


def _first(loaded: LoadedBlock, sends: bool) -> StepPlace:
    """The first step that sends or receives, or the block if it has none."""
    for each in loaded.transmissions:
        if each.sends if sends else each.receives:
            return each.place(loaded.block)
    return _place(loaded)


@dataclass(slots=True)
class _State:
    """How far a thread block has come: transmissions done, and messages of the next one."""

    done: int = 0
    messages: int = 0


class _Run:
    """Runs the steps of all thread blocks as far as they go."""

    def __init__(self, blocks: Sequence[LoadedBlock], slots: int, chunks: int, progress: Progress) -> None:
        self.blocks, self.slots, self.chunks, self.progress = blocks, slots, chunks, progress
        self.number = {(each.block.gpu, each.block.number): at for at, each in enumerate(blocks)}
        self.state = [_State() for _ in blocks]
        self.receiver = {(each.block.recv, each.block.gpu, each.block.channel): at for at, each in enumerate(blocks)}
        self.sender = {(each.block.gpu, each.block.send, each.block.channel): at for at, each in enumerate(blocks)}
        self.in_flight: dict[Connection, int] = {}

    def into(self, at: int) -> Connection:
        block = self.blocks[at].block
        return block.recv, block.gpu, block.channel

    def out(self, at: int) -> Connection:
        block = self.blocks[at].block
        return block.gpu, block.send, block.channel

    def next(self, at: int) -> Transmission | None:
        """The transmission that a block is at, if it is not done."""
        done, made = self.state[at].done, self.blocks[at].transmissions
        return made[done] if done < len(made) else None

    def flagged(self, at: int, wait: tuple[int, int]) -> Step | None:
        """The transmission whose flag ends a wait of block `at`, if there is one in the file: the first of them."""
        other = self.number.get((self.blocks[at].block.gpu, wait[0]))
        if other is None:
            return None
        for k, each in enumerate(self.blocks[other].transmissions):
            if each.sets_flag and each.number >= wait[1]:
                return other, k
        return None

    def missing(self, at: int, one: Transmission) -> tuple[tuple[int, int], Step | None] | None:
        """The first wait of `one` that has not ended, with the transmission that would end it, if any would."""
        for wait in one.waits:
            flag = self.flagged(at, wait)
            if flag is None or self.state[flag[0]].done <= flag[1]:
                return wait, flag
        return None

    def run(self) -> None:
        """Until all blocks are done or wait."""
        ready = deque(range(len(self.blocks)))
        waiting: dict[int, list[int]] = {}
        while ready:
            at = ready.popleft()
            state = self.state[at]
            before = (state.done, state.messages)
            while (one := self.next(at)) is not None:
                missing = self.missing(at, one)
                if missing is not None:
                    if missing[1] is not None:
                        waiting.setdefault(missing[1][0], []).append(at)
                    break
                if not self._move(at, one):
                    break
                flags = (self.flagged(at, wait) for wait in one.waits)
                self.progress.awaited[at, state.done] = [flag for flag in flags if flag is not None]
                self.progress.order.append((at, state.done))
                state.done, state.messages = state.done + 1, 0
            if (state.done, state.messages) != before:
                ready += waiting.pop(at, [])
                ready += [
                    peer
                    for peer in (self.sender.get(self.into(at)), self.receiver.get(self.out(at)))
                    if peer is not None
                ]

    def _move(self, at: int, one: Transmission) -> bool:
        """Moves as many messages of `one` as it can; whether that were all."""
        if not (one.receives or one.sends):
            return True
        state, into, out = self.state[at], self.into(at), self.out(at)
        messages = -(-one.count // self.chunks)
        room = messages - state.messages
        if one.receives:
            room = min(room, self.in_flight.get(into, 0))
        if one.sends:
            room = min(room, self.slots - self.in_flight.get(out, 0))
        if one.receives:
            self.in_flight[into] = self.in_flight.get(into, 0) - room
        if one.sends:
            self.in_flight[out] = self.in_flight.get(out, 0) + room
        state.messages += room
        return state.messages == messages


def run(
    file: str, blocks: Sequence[LoadedBlock], slots: int, chunks: int, progress: Progress
) -> StepCounterexample | None:
    """Fills `progress` with the order in which the steps end; or finds steps that wait for each other.

    A connection holds `slots` messages, each of `chunks` chunks or what is left of a step.
    """
    progress.order.clear()
    progress.awaited.clear()
    machine = _Run(blocks, slots, chunks, progress)
    machine.run()
    stuck = [at for at in range(len(blocks)) if machine.next(at) is not None]
    if not stuck:
        return None
    trace: list[str] = []
    at, seen = stuck[0], dict[int, int]()
    while at not in seen:
        seen[at] = len(trace)
        one = machine.next(at)
        assert one is not None, "a block waits for one that is done"
        place = one.place(blocks[at].block)
        missing = machine.missing(at, one)
        if missing is not None and missing[1] is None:
            (block, step), _ = missing
            what = f"waits for a flag of thread block {block} of at least {step}, which nothing sets"
            return counter(file, "deadlock", what, place, ["a step sets a flag if it has hasdep=1 and is no nop"])
        if missing is not None and missing[1] is not None:
            at, why = missing[1][0], f"waits for thread block {missing[0][0]} to come to {missing[0][1]}"
        elif one.receives and not machine.in_flight.get(machine.into(at), 0):
            peer = blocks[at].block.recv
            at, why = machine.sender[machine.into(at)], f"waits for a message of GPU {peer}"
        else:
            peer = blocks[at].block.send
            at, why = (
                machine.receiver[machine.out(at)],
                f"waits for GPU {peer} to take one of {slots} messages of {chunks} chunks",
            )
        trace.append(f"{place}, {why}")
    cycle = trace[seen[at] :]
    one = machine.next(at)
    assert one is not None
    what = f"{len(cycle)} steps wait for each other" if len(cycle) > 1 else "waits for itself"
    return counter(file, "deadlock", what, one.place(blocks[at].block), [*cycle, "the first of these"])
