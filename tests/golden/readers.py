"""Readers of the exported formats, written from the formats and not from the writers, and machines that run them.

A machine performs the steps of a GPU run-time's file in an order that a seed chooses, on memory whose cells hold
numbers modulo 2**64, and keeps vector clocks: two accesses to a cell, one of them a write, that nothing in the file
orders are a fault even if this order happened to be kind. What a machine finds wrong is a `Fault`.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any
from xml.etree import ElementTree

WORD = 2**64


class Fault(Exception):
    """What is wrong with a file or with what it does."""


def demand(holds: bool, message: str) -> None:
    """Raises `Fault` unless `holds`."""
    if not holds:
        raise Fault(message)


# GOAL -----------------------------------------------------------------------------------------------------------------

_STATEMENT = re.compile(
    r"(?P<label>[A-Za-z][A-Za-z0-9_]*): (?:send (?P<sent>\d+)b to (?P<to>\d+) tag (?P<send_tag>\d+)"
    r" cpu (?P<send_cpu>\d+) nic (?P<send_nic>[01])|recv (?P<received>\d+)b from (?P<origin>\d+) tag (?P<recv_tag>\d+)"
    r" cpu (?P<recv_cpu>\d+) nic (?P<recv_nic>[01])"
    r"|calc (?P<calc>\d+) cpu (?P<calc_cpu>\d+))"
)
_WAIT = re.compile(r"(\w+) (i?)requires (\w+)")


@dataclass
class GoalStep:
    """A statement of a rank."""

    kind: str
    size: int
    peer: int = -1
    tag: int = -1
    cpu: int = 0
    nic: int = 0
    after_done: list[str] = field(default_factory=list)
    after_start: list[str] = field(default_factory=list)


def read_goal(text: str) -> list[dict[str, GoalStep]]:
    """For each rank its statements by label."""
    lines = iter(text.splitlines())
    head = re.fullmatch(r"num_ranks (\d+)", next(lines))
    demand(head is not None and text.endswith("}\n"), "num_ranks must come first, a closing brace last")
    assert head is not None
    ranks: list[dict[str, GoalStep]] = []
    for number in range(int(head[1])):
        demand(next(lines) == f"rank {number} {{", f"rank {number} must come next")
        steps: dict[str, GoalStep] = {}
        for line in lines:
            if line == "}":
                break
            if wait := _WAIT.fullmatch(line):
                demand(wait[1] in steps and wait[3] in steps, f"{line}: labels must be defined before")
                step = steps[wait[1]]
                (step.after_start if wait[2] else step.after_done).append(wait[3])
                continue
            found = _STATEMENT.fullmatch(line)
            demand(found is not None, f"{line}: no statement")
            assert found is not None
            demand(found["label"] not in steps, f"{line}: label twice")
            if found["sent"]:
                size, peer, tag, cpu = (int(found[each]) for each in ("sent", "to", "send_tag", "send_cpu"))
                step = GoalStep("send", size, peer, tag, cpu, int(found["send_nic"]))
            elif found["received"]:
                size, peer, tag, cpu = (int(found[each]) for each in ("received", "origin", "recv_tag", "recv_cpu"))
                step = GoalStep("recv", size, peer, tag, cpu, int(found["recv_nic"]))
            else:
                step = GoalStep("calc", int(found["calc"]), cpu=int(found["calc_cpu"]))
            demand(0 <= step.cpu <= 255 and step.tag < 2**32, f"{line}: cpu is a byte, tag 32 bits")
            steps[found["label"]] = step
        ranks.append(steps)
    demand(next(lines, None) is None, "nothing must follow the last rank")
    return ranks


def run_goal(ranks: list[dict[str, GoalStep]]) -> int:
    """Ticks until all is done, a message taking its size in ticks at both of its ports; ports take turns as asked."""
    tags: dict[int, tuple[int, str]] = {}
    for rank, steps in enumerate(ranks):
        for label, step in steps.items():
            if step.kind == "send":
                demand(step.tag not in tags, f"tag {step.tag} twice")
                tags[step.tag] = (rank, label)
    missing = {
        (r, key): len(s.after_done) + len(s.after_start) for r, steps in enumerate(ranks) for key, s in steps.items()
    }
    waiting: dict[tuple[int, str, bool], list[tuple[int, str]]] = {}
    for rank, steps in enumerate(ranks):
        for label, step in steps.items():
            for at_start, names in ((False, step.after_done), (True, step.after_start)):
                for name in names:
                    waiting.setdefault((rank, name, at_start), []).append((rank, label))
    posted: dict[tuple[int, str], int] = {}
    arrived: dict[int, int] = {}
    done = 0
    out, in_, now = [0] * len(ranks), [0] * len(ranks), 0
    heap: list[tuple[int, int, str, int, str]] = []
    count = 0

    def push(time: int, what: str, rank: int, label: str) -> None:
        nonlocal count
        count += 1
        heappush(heap, (time, count, what, rank, label))

    for (rank, label), left in missing.items():
        if left == 0:
            push(0, "ready", rank, label)
    while heap:
        now, _, what, rank, label = heappop(heap)
        step = ranks[rank][label]
        if what == "ready":
            opened = waiting.get((rank, label, True), [])
            if step.kind == "calc":
                push(now + step.size, "done", rank, label)
            elif step.kind == "send":
                if step.nic:  # one byte, which costs nothing
                    demand(step.size == 1, f"{label}: only bytes that tell of slots have a NIC of their own")
                    push(now, "sent", rank, label)
                else:
                    start = max(now, out[rank], in_[step.peer])
                    out[rank] = in_[step.peer] = start + step.size
                    push(start + step.size, "sent", rank, label)
            else:
                demand(step.tag in tags, f"nobody sends tag {step.tag}")
                sender = ranks[tags[step.tag][0]][tags[step.tag][1]]
                ends = (step.peer, step.size, rank, step.nic)
                demand(
                    ends == (tags[step.tag][0], sender.size, sender.peer, sender.nic), f"tag {step.tag}: ends differ"
                )
                posted[rank, label] = step.tag
                if step.tag in arrived:
                    push(now, "done", rank, label)
        elif what == "sent":
            arrived[step.tag] = now
            opened = waiting.get((rank, label, False), [])
            done += 1
            for (other, name), tag in posted.items():
                if tag == step.tag:
                    push(now, "done", other, name)
        else:
            opened = waiting.get((rank, label, False), [])
            done += 1
        for next_rank, name in opened:
            missing[next_rank, name] -= 1
            if missing[next_rank, name] == 0:
                push(now, "ready", next_rank, name)
    demand(done == len(missing), f"{len(missing) - done} of {len(missing)} statements never happen")
    return now


# Chakra ---------------------------------------------------------------------------------------------------------------


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        demand(at < len(data), "cut within a number")
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        demand(key & 7 in (0, 2), f"wire type {key & 7}")
        if key & 7 == 0:
            yield key >> 3, value
            continue
        demand(at + value <= len(data), "cut within a field")
        yield key >> 3, data[at : at + value]
        at += value


def read_chakra(data: bytes) -> tuple[str, list[dict[str, Any]]]:
    """The version, and the nodes: id, name, type, data_deps, and the attributes by their names."""
    messages = []
    at = 0
    while at < len(data):
        length, at = _varint(data, at)
        demand(at + length <= len(data), "cut within a message")
        messages.append(data[at : at + length])
        at += length
    version = dict(_fields(messages[0]))[1]
    assert isinstance(version, bytes)
    nodes = []
    for message in messages[1:]:
        node: dict[str, Any] = {"data_deps": []}
        for number, value in _fields(message):
            if number == 5:
                assert isinstance(value, bytes)
                place = 0
                while place < len(value):
                    each, place = _varint(value, place)
                    node["data_deps"].append(each)
            elif number == 10:
                assert isinstance(value, bytes)
                (one, name), (kind, given) = _fields(value)
                assert one == 1 and isinstance(name, bytes)
                node[name.decode()] = (kind, given)
            else:
                key = {1: "id", 2: "name", 3: "type"}[number]
                node[key] = value.decode() if isinstance(value, bytes) else value
        nodes.append(node)
    return version.decode(), nodes


def run_chakra(traces: list[list[dict[str, Any]]]) -> int:
    """Issues every node once what it waits for is done, and a RECV once its message is sent; returns how many."""
    sends: dict[int, tuple[Any, ...]] = {}
    sent: set[int] = set()
    done: list[set[int]] = [set() for _ in traces]
    for rank, nodes in enumerate(traces):
        demand(len({node["id"] for node in nodes}) == len(nodes), f"rank {rank}: an id twice")
        for node in nodes:
            if node["type"] == 5:
                tag = node["comm_tag"][1]
                demand(tag not in sends, f"tag {tag} twice")
                demand(node["comm_src"][1] == rank, "a send must be its sender's")
                sends[tag] = tuple(node[key] for key in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
    left = [list(nodes) for nodes in traces]
    moved = True
    while moved:
        moved = False
        for rank, nodes in enumerate(left):
            rest = []
            for node in nodes:
                is_ready = set(node["data_deps"]) <= done[rank]
                if node["type"] == 6:
                    tag = node["comm_tag"][1]
                    ends = tuple(node[key] for key in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                    demand(sends.get(tag) == ends and node["comm_dst"][1] == rank, f"tag {tag}: ends differ")
                    is_ready = is_ready and tag in sent
                if not is_ready:
                    rest.append(node)
                    continue
                moved = True
                done[rank].add(node["id"])
                if node["type"] == 5:
                    sent.add(node["comm_tag"][1])
            left[rank] = rest
    demand(not any(left), f"{sum(map(len, left))} nodes are never issued")
    return sum(map(len, traces))


# Memory with clocks ---------------------------------------------------------------------------------------------------

Clock = dict[int, int]


def joined(*clocks: Clock) -> Clock:
    """The latest of what each clock knows."""
    result: Clock = {}
    for clock in clocks:
        for agent, time in clock.items():
            result[agent] = max(result.get(agent, 0), time)
    return result


@dataclass
class Agent:
    """A thread with its clock."""

    number: int
    clock: Clock

    def tick(self) -> None:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1


class Memory:
    """Cells by any key; an unordered pair of accesses, one of them a write, is a fault, and so is reading nothing."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}
        self.written: dict[Any, tuple[int, int]] = {}
        self.read_by: dict[Any, dict[int, int]] = {}

    def read(self, agent: Agent, cell: Any) -> int:
        demand(cell in self.values, f"{cell}: read before anything was written")
        self._check(agent, cell, self.written.get(cell), "reads what is being written")
        self.read_by.setdefault(cell, {})[agent.number] = agent.clock[agent.number]
        return self.values[cell]

    def write(self, agent: Agent, cell: Any, value: int) -> None:
        self._check(agent, cell, self.written.get(cell), "writes what is being written")
        for access in self.read_by.pop(cell, {}).items():
            self._check(agent, cell, access, "overwrites what is being read")
        self.written[cell] = (agent.number, agent.clock[agent.number])
        self.values[cell] = value % WORD

    def _check(self, agent: Agent, cell: Any, access: tuple[int, int] | None, how: str) -> None:
        demand(access is None or agent.clock.get(access[0], 0) >= access[1], f"{cell}: {how}")


# MSCCL ----------------------------------------------------------------------------------------------------------------

_LINE = re.compile(r'<(?:/?[a-z]+|[a-z]+(?: [A-Za-z_]+="[^"<>&\']*")+/?)>')


@dataclass
class Block:
    """A thread block of MSCCL: where it is, and what the interpreter of the run-time keeps of it."""

    rank: int
    send: int
    recv: int
    channel: int
    steps: list[dict[str, str]]
    agent: Agent
    at: int = 0
    chunk: int = 0
    flags: list[tuple[int, Clock]] = field(default_factory=list)


def run_msccl(data: bytes, *, seed: int = 0, slots: int = 2, chunks_per_message: int = 1) -> dict[tuple[int, int], int]:
    """Runs an MSCCL file as its interpreter does and returns what the message of each rank holds, by (rank, chunk).

    A connection holds `slots` messages. Freed slots order nothing here: a run-time may have more of them.
    """
    text = data.decode("ascii")
    for line in text.splitlines():
        demand(_LINE.fullmatch(line) is not None, f"{line}: more than the reader knows of XML")
    algo = ElementTree.fromstring(text)
    n_chunks, n_ranks = int(algo.attrib["nchunksperloop"]), int(algo.attrib["ngpus"])
    demand(algo.attrib["coll"] == "allreduce" and algo.attrib["proto"] == "Simple", "not an allreduce")
    demand((algo.attrib["inplace"], algo.attrib["outofplace"]) == ("1", "0"), "in place only")
    memory, inputs = Memory(), _inputs(n_ranks, n_chunks)
    blocks: dict[tuple[int, int], Block] = {}
    scratch = {}
    for gpu in algo:
        rank = int(gpu.attrib["id"])
        demand(gpu.attrib["i_chunks"] == gpu.attrib["o_chunks"] == str(n_chunks), "chunks differ")
        scratch[rank] = int(gpu.attrib["s_chunks"])
        for chunk in range(n_chunks):
            memory.values[rank, "i", chunk] = inputs[rank, chunk]
        for number, tb in enumerate(gpu):
            demand(int(tb.attrib["id"]) == number and number < 216, "numbers of blocks must be dense")
            steps = [dict(step.attrib) for step in tb]
            demand([int(step["s"]) for step in steps] == list(range(len(steps))) and len(steps) <= 256, "step numbers")
            send, recv, channel = (int(tb.attrib[each]) for each in ("send", "recv", "chan"))
            demand(channel < int(algo.attrib["nchannels"]) <= 32 and rank not in (send, recv), "channel or peer")
            agent = Agent(len(blocks), {len(blocks): 0})
            blocks[rank, number] = Block(rank, send, recv, channel, steps, agent)
    demand(sorted(scratch) == list(range(n_ranks)), "ranks")
    sending = [(block.rank, block.send, block.channel) for block in blocks.values() if block.send >= 0]
    receiving = [(block.recv, block.rank, block.channel) for block in blocks.values() if block.recv >= 0]
    for ends in (sending, receiving):
        demand(len(set(ends)) == len(ends), "a connection in two blocks")
    for block in blocks.values():
        _check_msccl_block(block, blocks, n_chunks, scratch)
    fifo: dict[tuple[int, int, int], deque[list[tuple[int, Clock]]]] = {}
    choice = random.Random(seed)
    running = [block for block in blocks.values() if block.steps]
    while running:
        choice.shuffle(running)
        moved = False
        for block in running:
            for _ in range(choice.randint(1, 8)):
                if not _advance(block, blocks, memory, fifo, slots, chunks_per_message):
                    break
                moved = True
        if not moved:
            raise Fault(f"deadlock: {len(running)} thread blocks wait, one at {running[0].steps[running[0].at]}")
        running = [block for block in running if block.at < len(block.steps)]
    demand(not any(fifo.values()), "messages are left over")
    return {(rank, chunk): memory.values[rank, "i", chunk] for rank in range(n_ranks) for chunk in range(n_chunks)}


def _inputs(n_ranks: int, n_chunks: int) -> dict[tuple[int, int], int]:
    choice = random.Random(1)
    return {(rank, chunk): choice.randrange(WORD) for rank in range(n_ranks) for chunk in range(n_chunks)}


def check_allreduce(found: dict[tuple[int, int], int], times: int = 1) -> None:
    """Raises `Fault` unless every rank holds the sum of all inputs; `times` calls one after the other."""
    n_ranks, n_chunks = (max(each) + 1 for each in zip(*found, strict=True))
    inputs = _inputs(n_ranks, n_chunks)
    for (rank, chunk), value in found.items():
        total = sum(inputs[each, chunk] for each in range(n_ranks)) * n_ranks ** (times - 1) % WORD
        demand(value == total, f"rank {rank} chunk {chunk}: wrong result")


def _check_msccl_block(
    block: Block, blocks: dict[tuple[int, int], Block], n_chunks: int, scratch: dict[int, int]
) -> None:
    """What the reader of the run-time refuses, and waits that nobody would ever answer."""
    pending = 0
    for step in block.steps:
        target, at = int(step["depid"]), int(step["deps"])
        if target >= 0:
            other = blocks.get((block.rank, target))
            demand(other is not None and target < 128, f"{step}: waits for no block")
            assert other is not None
            demand(at < len(other.steps), f"{step}: waits for no step")
            demand(other.steps[at]["hasdep"] == "1" and other.steps[at]["type"] != "nop", f"{step}: waits for ever")
        if step["type"] == "nop":
            demand(target >= 0, f"{step}: a nop waits")
            pending += 1
            continue
        demand(pending == 0 or target >= 0, f"{step}: behind nops a step must wait itself")
        pending = 0
        count = int(step["cnt"])
        demand(0 < count < 72, f"{step}: count")
        demand(step["type"] not in ("s", "rrcs", "rcs") or block.send >= 0, f"{step}: nobody to send to")
        demand(step["type"] not in ("r", "rrc", "rrcs", "rcs") or block.recv >= 0, f"{step}: nobody to receive from")
        owners = (("src", block.recv if step["type"] in ("r", "rcs") else block.rank),)
        owners += (("dst", block.send if step["type"] == "s" else block.rank),)  # type: ignore[assignment]
        for end, owner in owners:
            room = n_chunks if step[f"{end}buf"] == "i" else scratch[owner]
            demand(0 <= int(step[f"{end}off"]) <= room - count, f"{step}: out of the buffer")
        demand(step["type"] != "re" or step["hasdep"] == "1", f"{step}: would be merged with the next")
    demand(pending == 0, "nops at the end are lost")


def _advance(
    block: Block,
    blocks: dict[tuple[int, int], Block],
    memory: Memory,
    fifo: dict[tuple[int, int, int], deque[list[tuple[int, Clock]]]],
    slots: int,
    chunks_per_message: int,
) -> bool:
    """Performs the next message of the block, or its next step without one; false if it must wait."""
    if block.at == len(block.steps):
        return False
    step, agent = block.steps[block.at], block.agent
    if block.chunk == 0 and int(step["depid"]) >= 0:
        flags = blocks[block.rank, int(step["depid"])].flags
        clock = next((clock for at, clock in flags if at >= int(step["deps"])), None)
        if clock is None:
            return False
        agent.clock = joined(agent.clock, clock)
    kind, count = step["type"], int(step["cnt"])
    takes, gives = kind in ("r", "rrc", "rrcs", "rcs"), kind in ("s", "rrcs", "rcs")
    into = fifo.setdefault((block.recv, block.rank, block.channel), deque()) if takes else deque()
    out = fifo.setdefault((block.rank, block.send, block.channel), deque()) if gives else deque()
    if (takes and not into) or (gives and len(out) >= slots):
        return False
    length = min(chunks_per_message, count - block.chunk) if takes or gives else count
    message = into.popleft() if takes else []
    demand(not takes or len(message) == length, f"{step}: a message of another length")
    passed = []
    agent.tick()
    for at in range(length):
        src = (block.rank, step["srcbuf"], int(step["srcoff"]) + block.chunk + at)
        dst = (block.rank, step["dstbuf"], int(step["dstoff"]) + block.chunk + at)
        value = 0
        if takes:
            value = message[at][0]
            agent.clock = joined(agent.clock, message[at][1])
        if kind in ("s", "cpy", "re", "rrc", "rrcs"):
            value += memory.read(agent, src)
        if kind == "re":
            value += memory.read(agent, dst)
        if kind not in ("s", "nop"):
            memory.write(agent, dst, value)
        passed.append((value % WORD, dict(agent.clock)))
    if gives:
        out.append(passed)
    block.chunk += length
    if block.chunk >= count:
        if step["hasdep"] == "1":
            block.flags.append((block.at, dict(agent.clock)))
        block.at, block.chunk = block.at + 1, 0
    return True


# MSCCL++ --------------------------------------------------------------------------------------------------------------

THREADS = 2


@dataclass
class Thread:
    """One of the threads of a thread block."""

    rank: int
    block: int
    lane: int
    agent: Agent
    at: int = 0
    call: int = 0


class MscclppMachine:
    """Runs an execution plan as the executor does, with `THREADS` threads a block.

    Of a data operation each thread does a part, another part from operation to operation; of the channels or semaphores
    of an operation each thread does its own; `nop` is a barrier of the block's threads, and nothing else is.
    """

    def __init__(self, plan: dict[str, Any], seed: int, calls: int = 1) -> None:
        self.gpus = plan["gpus"]
        demand([gpu["id"] for gpu in self.gpus] == list(range(len(self.gpus))), "ranks")
        head = (plan["collective"], plan["protocol"], plan["inplace"], plan["reuse_resources"])
        demand(head == ("allreduce", "Simple", True, False), "head")
        self.chunks = self.gpus[0]["input_chunks"]
        demand(plan["min_message_size"] % (self.chunks * plan["buffer_alignment"]) == 0, "size or alignment")
        self.memory, self.calls, self.choice = Memory(), calls, random.Random(seed)
        for (rank, chunk), value in _inputs(len(self.gpus), self.chunks).items():
            for part in range(THREADS):
                self.memory.values[rank, "i", chunk, part] = value
        self.signals: dict[tuple[int, int], deque[Clock]] = {}
        self.semaphores: list[list[deque[Clock]]] = [
            [deque([{}] * each["init_value"]) for each in gpu["semaphores"]] for gpu in self.gpus
        ]
        self.peer = self._connect()
        self.threads: list[Thread] = []
        for rank, gpu in enumerate(self.gpus):
            demand(gpu["input_chunks"] == gpu["output_chunks"] == self.chunks, "chunks differ")
            for number, block in enumerate(gpu["threadblocks"]):
                demand(block["id"] == number and len(block["ops"]) <= 64, "block number or operations")
                for lane in range(THREADS):
                    agent = Agent(len(self.threads), {len(self.threads): 0})
                    self.threads.append(Thread(rank, number, lane, agent))
        self.barriers: dict[tuple[int, int, int, int], list[Thread]] = {}

    def _connect(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each channel of a rank the other end: the k-th to a peer is the peer's k-th back."""
        ends: dict[tuple[int, int], list[int]] = {}
        for rank, gpu in enumerate(self.gpus):
            number = 0
            for channel in gpu["channels"]:
                demand(channel["channel_type"] == "memory", "channel type")
                for other in channel["connected_to"]:
                    ends.setdefault((rank, other), []).append(number)
                    number += 1
        peer = {}
        for (rank, other), own in ends.items():
            theirs = ends.get((other, rank), [])
            demand(len(theirs) == len(own), "channels come in pairs")
            for here, there in zip(own, theirs, strict=True):
                peer[rank, here] = (other, there)
        return peer

    def run(self) -> dict[tuple[int, int], int]:
        """What the message of each rank holds at the end, by (rank, chunk)."""
        running = list(self.threads)
        while running:
            self.choice.shuffle(running)
            moved = False
            for thread in running:
                for _ in range(self.choice.randint(1, 6)):
                    if not self._advance(thread):
                        break
                    moved = True
            demand(moved, f"deadlock: {len(running)} threads wait")
            running = [thread for thread in running if thread.call < self.calls]
        demand(not any(self.signals.values()), "signals are left over")
        for gpu, semaphores in zip(self.gpus, self.semaphores, strict=True):
            left = [len(each) for each in semaphores]
            demand(left == [each["init_value"] for each in gpu["semaphores"]], "semaphores are not as they were")
        found = {}
        for rank in range(len(self.gpus)):
            for chunk in range(self.chunks):
                values = {self.memory.values[rank, "i", chunk, part] for part in range(THREADS)}
                demand(len(values) == 1, f"rank {rank} chunk {chunk}: half done")
                found[rank, chunk] = values.pop()
        return found

    def _advance(self, thread: Thread) -> bool:
        """Performs the thread's next operation; false if it must wait."""
        block = self.gpus[thread.rank]["threadblocks"][thread.block]
        if thread.call == self.calls:
            return False
        if thread.at == len(block["ops"]):  # a rank's next call begins when all of its threads are done with this one
            own = [each for each in self.threads if each.rank == thread.rank]
            if any(each.call < thread.call for each in own) or any(
                each.call == thread.call and each.at < len(self.gpus[each.rank]["threadblocks"][each.block]["ops"])
                for each in own
            ):
                return False
            clock = joined(*(each.agent.clock for each in own))
            for each in own:
                each.agent.clock, each.at, each.call = dict(clock), 0, each.call + 1
            return True
        op = block["ops"][thread.at]
        name = op["name"]
        thread.agent.tick()
        if name == "nop":
            there = self.barriers.setdefault((thread.rank, thread.block, thread.call, thread.at), [])
            if thread not in there:
                there.append(thread)
            if len(there) < THREADS:
                return False
            clock = joined(*(each.agent.clock for each in there))
            for each in there:
                each.agent.clock, each.at = dict(clock), each.at + 1
            return True
        if name in ("wait", "signal"):
            if not self._on_channels(thread, block, op):
                return False
        elif name in ("sem_acquire", "sem_release"):
            demand(len(op["semaphore_ids"]) <= 16, "semaphores of an operation")
            mine = [each for at, each in enumerate(op["semaphore_ids"]) if at % THREADS == thread.lane]
            held = self.semaphores[thread.rank]
            if name == "sem_acquire":
                if not all(held[each] for each in mine):
                    return False
                thread.agent.clock = joined(thread.agent.clock, *(held[each].popleft() for each in mine))
            for each in mine if name == "sem_release" else ():
                held[each].append(dict(thread.agent.clock))
        else:
            self._move(thread, block, op)
        thread.at += 1
        return True

    def _on_channels(self, thread: Thread, block: dict[str, Any], op: dict[str, Any]) -> bool:
        numbers = [each for group in block["channels"] for each in group["channel_ids"]]
        demand(len(numbers) <= 16 and len(op["channel_ids"]) <= 8, "channels")
        demand(len(set(op["channel_ids"])) == len(op["channel_ids"]), "two threads at one channel")
        own = [numbers[each] for at, each in enumerate(op["channel_ids"]) if at % THREADS == thread.lane]
        if op["name"] == "signal":
            for each in own:
                self.signals.setdefault(self.peer[thread.rank, each], deque()).append(dict(thread.agent.clock))
            return True
        if not all(self.signals.get((thread.rank, each)) for each in own):
            return False
        for each in own:
            thread.agent.clock = joined(thread.agent.clock, self.signals[thread.rank, each].popleft())
        return True

    def _move(self, thread: Thread, block: dict[str, Any], op: dict[str, Any]) -> None:
        part = (thread.lane + thread.at) % THREADS
        sources, targets = (
            [self._cells(thread.rank, block, each) for each in op[key]] for key in ("src_buff", "dst_buff")
        )
        shape = {"put": (1, 1), "copy": (1, 1), "re": (2, 1), "res": (2, 2)}.get(op["name"])
        demand((len(sources), len(targets)) == shape, f"{op}: operands")
        demand(len({len(each) for each in (*sources, *targets)}) == 1, f"{op}: lengths differ")
        remote = [("buffer_id" in each) for each in op["dst_buff"]]
        demand(remote == {"put": [True], "res": [False, True]}.get(op["name"], [False]), f"{op}: where to")
        for at in range(len(sources[0])):
            value = sum(self.memory.read(thread.agent, (*each[at], part)) for each in sources)
            for each in targets:
                self.memory.write(thread.agent, (*each[at], part), value)

    def _cells(self, rank: int, block: dict[str, Any], operand: dict[str, Any]) -> list[tuple[int, str, int]]:
        if "buffer_id" in operand:
            numbers = [each for group in block["remote_buffer_refs"] for each in group["remote_buffer_ids"]]
            buffer = self.gpus[rank]["remote_buffers"][numbers[operand["buffer_id"]]]
            owner, kind = buffer["rank"], buffer["type"]
        else:
            owner, kind = rank, operand["type"]
        first, stop = operand["index"], operand["index"] + operand["size"]
        room = self.chunks if kind == "i" else self.gpus[owner]["scratch_chunks"]
        demand(0 <= first < stop <= room, f"{operand}: out of the buffer")
        return [(owner, kind, chunk) for chunk in range(first, stop)]


def parse_json(data: bytes) -> Any:
    """A JSON document in which no key stands twice and no number is more than a number."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        demand(len(dict(pairs)) == len(pairs), "a key twice")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise Fault(f"{word} is not JSON")

    return json.loads(data, object_pairs_hook=once, parse_constant=refuse)
