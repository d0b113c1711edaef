"""Execution plans of MSCCL++ performed as they are written, byte by unit, threads and proxies in a random order.

Shares no code with the verifier. Memory is that of a machine in which all accesses come one after the other, so what
only weak memory or relaxed signals could spoil is not found; everything else is, in some order. `run` performs calls
that follow each other at once, each with an input of its own, and returns whether every output was the sum.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

LANES = 3
"""Threads of a block: of data each does a part, of the channels of an operation each one."""
CELL = 16
"""Bytes of a cell."""


class Interpreter:
    """A plan with chunks of `chunk` cells, of which pipelines do their unit in each turn."""

    def __init__(self, plan: dict[str, Any], chunk: int, seed: int, calls: int = 2) -> None:
        self.plan, self.chunk, self.calls = plan, chunk, calls
        self.choice = random.Random(seed)
        self.gpus = plan["gpus"]
        self.memory: dict[tuple[int, str, int], int] = {}
        self.flags: dict[tuple[int, str, int], int] = {}
        self.semaphores = [[each["init_value"] for each in gpu["semaphores"]] for gpu in self.gpus]
        self.proxies: dict[tuple[int, int], deque[tuple[Any, ...]]] = {}
        self.at_barrier: dict[tuple[int, int], int] = {}
        self.right = True

    def kind(self, name: str) -> str:
        return "i" if name == "o" and self.plan["inplace"] else name

    def run(self) -> bool:
        """Performs all calls; false for a wrong output, signals left over, or if nothing can go on."""
        for gpu in range(len(self.gpus)):
            self.fill(gpu, 0)
        agents: list[Iterator[bool]] = [self.follow(gpu) for gpu in range(len(self.gpus))]
        agents += [self.serve(gpu, number) for gpu, each in enumerate(self.gpus) for number in range(self.ports(each))]
        haste = [self.choice.choice([1, 1, 1, 0.02]) for _ in agents]
        idle = 0
        living = set(range(len(self.gpus)))
        while living:
            for at in range(len(agents)):
                if self.choice.random() < haste[at] or idle:
                    for _ in range(self.choice.randint(1, 4)):
                        moved = next(agents[at], None)
                        if moved is None:
                            living.discard(at)
                        idle = 0 if moved else idle
                        if not moved:
                            break
            idle += 1
            if idle > 2:
                return False
        for proxy in agents[len(self.gpus) :]:
            while next(proxy):
                pass
        before = [[each["init_value"] for each in gpu["semaphores"]] for gpu in self.gpus]
        return self.right and not any(self.flags.values()) and self.semaphores == before

    def ports(self, gpu: dict[str, Any]) -> int:
        return sum(len(each["connected_to"]) for each in gpu["channels"] if each["channel_type"] == "port")

    def value(self, gpu: int, cell: int, call: int) -> int:
        return (gpu + 1) * 10**6 + cell * 10**3 + 17 * call + 1

    def fill(self, gpu: int, call: int) -> None:
        for cell in range(self.gpus[gpu]["input_chunks"] * self.chunk):
            self.memory[gpu, "i", cell] = self.value(gpu, cell, call)

    def check(self, gpu: int, call: int) -> None:
        for cell in range(self.gpus[gpu]["output_chunks"] * self.chunk):
            total = sum(self.value(each, cell, call) for each in range(len(self.gpus)))
            self.right &= self.memory.get((gpu, self.kind("o"), cell)) == total

    def follow(self, gpu: int) -> Iterator[bool]:
        """All threads of a GPU, call after call; yields whether something was done."""
        for call in range(self.calls):
            self.at_barrier.update({(gpu, block): 0 for block in range(len(self.gpus[gpu]["threadblocks"]))})
            running = [
                self.thread(gpu, block, lane)
                for block in range(len(self.gpus[gpu]["threadblocks"]))
                for lane in range(LANES)
            ]
            haste = {id(each): self.choice.choice([1, 1, 0.05]) for each in running}
            while running:
                self.choice.shuffle(running)
                moved = False
                for each in list(running):
                    if self.choice.random() < haste[id(each)]:
                        moved |= self.step(running, each)
                if not moved:  # those held back go on too
                    moved = any(self.step(running, each) for each in list(running))
                yield moved
            self.check(gpu, call)
            if call + 1 < self.calls:
                self.fill(gpu, call + 1)
                yield True

    def step(self, running: list[Iterator[bool]], thread: Iterator[bool]) -> bool:
        """Lets a thread go on; whether it did something, or ended."""
        done = next(thread, None)
        if done is None:
            running.remove(thread)
        return done is not False

    def thread(self, gpu: int, number: int, lane: int) -> Iterator[bool]:
        """One thread of a block: True when it has done something, False while it waits."""
        block = self.gpus[gpu]["threadblocks"][number]
        met = 0
        for count, (op, first, last) in enumerate(self.listed(block)):
            name = op["name"]
            if name == "nop":
                met += 1
                self.at_barrier[gpu, number] += 1
                while self.at_barrier[gpu, number] < met * LANES:
                    yield False
            elif name.startswith("sem"):
                for each in op["semaphore_ids"][lane : lane + 1]:
                    while name == "sem_acquire" and not self.semaphores[gpu][each]:
                        yield False
                    self.semaphores[gpu][each] += 1 if name == "sem_release" else -1
            elif op.get("channel_ids") and (op["channel_type"] == "port" or "src_buff" not in op):
                yield from self.on_channel(gpu, block, op, lane, first, last)
            else:
                self.move(gpu, block, op, (lane + count) % LANES, first, last)
            yield True

    def listed(self, block: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int, int]]:
        """Each operation as often as it is done, with the cells of its places that it does."""
        for op in block["ops"]:
            if op["name"] != "pipeline":
                yield op, 0, 10**9
                continue
            unit = op["iter_context"]["unit_size"]
            done = 0
            while done < op["iter_context"]["num_chunks"] * self.chunk * CELL:
                for each in op["ops"]:
                    yield each, done // CELL, (done + unit) // CELL
                done += unit

    def ends(self, gpu: int, kind: str) -> list[int]:
        return [
            peer for each in self.gpus[gpu]["channels"] if each["channel_type"] == kind for peer in each["connected_to"]
        ]

    def other_end(self, gpu: int, kind: str, number: int) -> tuple[int, str, int]:
        peers = self.ends(gpu, kind)
        peer, rank = peers[number], peers[:number].count(peers[number])
        back = [at for at, each in enumerate(self.ends(peer, kind)) if each == gpu]
        return peer, kind, back[rank]

    def own(self, block: dict[str, Any], kind: str) -> list[int]:
        return [each for refs in block["channels"] if refs["channel_type"] == kind for each in refs["channel_ids"]]

    def on_channel(
        self, gpu: int, block: dict[str, Any], op: dict[str, Any], lane: int, first: int, last: int
    ) -> Iterator[bool]:
        kind, name = op["channel_type"], op["name"]
        for at, each in enumerate(op["channel_ids"]):
            if at != lane:
                continue
            number = self.own(block, kind)[each]
            if name.endswith("wait"):
                while not self.flags.get((gpu, kind, number)):
                    yield False
                self.flags[gpu, kind, number] -= 1
            elif kind == "memory":
                end = self.other_end(gpu, kind, number)
                self.flags[end] = self.flags.get(end, 0) + 1
            else:
                queue = self.proxies.setdefault((gpu, number), deque())
                if "src_buff" in op:
                    sides = [self.cells(gpu, block, op, op[side][at], first, last) for side in ("src_buff", "dst_buff")]
                    queue.append(("move", *sides))
                if name in ("signal", "rlxsignal", "pws", "pwsf"):
                    queue.append(("signal", self.other_end(gpu, kind, number)))
                if name == "pwsf" or (name == "flush" and at < len(op.get("dst_buff", []))):
                    reached: list[bool] = []
                    queue.append(("flush", reached))
                    while not reached:
                        yield False

    def serve(self, gpu: int, number: int) -> Iterator[bool]:
        """The proxy of a port channel."""
        while True:
            queue = self.proxies.get((gpu, number))
            if not queue:
                yield False
                continue
            what, *words = queue.popleft()
            if what == "move":
                for source, target in zip(*words, strict=True):
                    self.memory[target] = self.memory.get(source, -(10**9))
            elif what == "signal":
                self.flags[words[0]] = self.flags.get(words[0], 0) + 1
            else:
                words[0].append(True)
            yield True

    def cells(
        self, gpu: int, block: dict[str, Any], op: dict[str, Any], operand: dict[str, Any], first: int, last: int
    ) -> list[tuple[int, str, int]]:
        owner, kind = gpu, operand.get("type")
        if "buffer_id" in operand:
            reach = "port" if op.get("channel_type") == "port" else "memory"
            refs = [each for each in block["remote_buffer_refs"] if each["access_channel_type"] == reach]
            numbers = [each for group in refs for each in group["remote_buffer_ids"]]
            buffer = self.gpus[gpu]["remote_buffers"][numbers[operand["buffer_id"]]]
            owner, kind = buffer["rank"], buffer["type"]
        start, length = operand["index"] * self.chunk, operand["size"] * self.chunk
        return [(owner, self.kind(str(kind)), start + at) for at in range(first, min(last, length))]

    def move(self, gpu: int, block: dict[str, Any], op: dict[str, Any], part: int, first: int, last: int) -> None:
        places = [
            [self.cells(gpu, block, op, each, first, last) for each in op[side]] for side in ("src_buff", "dst_buff")
        ]
        sources, targets = places
        for at in range(part, len(sources[0]), LANES):
            values = [self.memory.get(each[at], -(10**9)) for each in sources]
            for number, each in enumerate(targets):
                self.memory[each[at]] = values[number] if op["name"] == "put" else sum(values)
