"""Ranks with arrays on the GPUs of a stand-in, driven by one thread in an order that a seed gives.

`UnkindNetwork` is what their transports share. It reads what is sent at any moment after it was posted, and writes what
is received at any moment after that; before it does, it may write anything there, as a network that delivers a message
in pieces. It reaches the memory of GPUs if it is `direct`, as a library does that knows nothing of streams.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from optcc.plan import Channel, Plan
from optcc.runtime import device_ipc
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.engine import Engine
from optcc.runtime.handle import Handle
from optcc.runtime.host_memory import HostPath
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.transport import RECEIVED, SENT, ChannelNumbers, Event
from optcc.runtime.transports.rank_threads import run_threads
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.unit.stand_in_cupy import StandIn

T = TypeVar("T")
TURNS_MAX = 200_000


@dataclass(eq=False)
class _Fifo:
    """A channel: what was posted and has not met, what was read and is not written, and what is to be reported."""

    src: int
    dst: int
    sends: deque[Any] = field(default_factory=deque)
    recvs: deque[Any] = field(default_factory=deque)
    read: deque[Any] = field(default_factory=deque)


class UnkindNetwork:
    """The network of `n_ranks`."""

    def __init__(self, cupy: StandIn | None, n_ranks: int) -> None:
        self.cupy, self.n_ranks = cupy, n_ranks
        self.rng = random.Random(0)
        self.lock = threading.RLock()
        self.fifos: dict[tuple[int, int, int], int] = {}
        self.channels: list[_Fifo] = []
        self.events: list[deque[Event]] = [deque() for _ in range(n_ranks)]
        self.numbers = [ChannelNumbers() for _ in range(n_ranks)]
        self.rounds: list[list[bytes]] = []
        self.calls = [0] * n_ranks
        self.barrier = threading.Barrier(n_ranks)

    def bytes_of(self, view: Any) -> Any:
        """What the network sees."""
        if isinstance(view, np.ndarray):
            return view
        assert self.cupy is not None
        return self.cupy.host_bytes(view)

    def step(self) -> bool:
        """Something happens, if anything can."""
        with self.lock:
            ready = [
                (channel, act)
                for channel in self.channels
                for act in (self._read, self._scribble, self._write)
                if act(channel, False)
            ]
            if not ready:
                return False
            channel, act = self.rng.choice(ready)
            act(channel, True)
            return True

    def _read(self, channel: _Fifo, now: bool) -> bool:
        if not channel.sends or not channel.recvs or channel.read:
            return False
        if now:
            channel.read.append(self.bytes_of(channel.sends[0]).copy())
        return True

    def _scribble(self, channel: _Fifo, now: bool) -> bool:
        if not channel.recvs or self.rng.random() < 0.7:
            return False
        if now:
            self.bytes_of(channel.recvs[0])[:] = 0x3C
        return True

    def _write(self, channel: _Fifo, now: bool) -> bool:
        if not channel.read:
            return False
        if now:
            handle = self.channels.index(channel)
            self.bytes_of(channel.recvs.popleft())[:] = channel.read.popleft()
            channel.sends.popleft()
            self.events[channel.src].append((SENT, handle))
            self.events[channel.dst].append((RECEIVED, handle))
        return True


class UnkindTransport:
    """A rank's end; `Transport` for one thread at a time."""

    def __init__(self, network: UnkindNetwork, rank: int) -> None:
        self.network, self.rank, self.n_ranks = network, rank, network.n_ranks
        self.lost = ""
        self.host_path: HostPath | None = None

    @property
    def hosts(self) -> tuple[int, ...]:
        """All are on one host."""
        return (0,) * self.n_ranks

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        network, handles = self.network, []
        with network.lock:
            for key in network.numbers[self.rank].take(channels, group):
                if key not in network.fifos:
                    network.fifos[key] = len(network.channels)
                    network.channels.append(_Fifo(key[0], key[1]))
                handles.append(network.fifos[key] if self.rank in key[:2] else -1)
        return handles

    def post_send(self, channel: int, view: Any) -> None:
        with self.network.lock:
            self.network.channels[channel].sends.append(view)

    def post_recv(self, channel: int, view: Any) -> None:
        with self.network.lock:
            self.network.channels[channel].recvs.append(view)

    def poll(self, timeout_s: float) -> list[Event]:
        network = self.network
        with network.lock:
            for _ in range(network.rng.choice((0, 1, 2, 4))):
                network.step()
            events = network.events[self.rank]
            found = [events.popleft() for _ in range(network.rng.randint(0, len(events)))]
        if not found and timeout_s > 0:
            time.sleep(0)
        return found

    def allgather(self, payload: bytes, timeout_s: float = 60.0) -> list[bytes]:
        network = self.network
        with network.lock:
            number = network.calls[self.rank]
            network.calls[self.rank] += 1
            while len(network.rounds) <= number:
                network.rounds.append([b""] * self.n_ranks)
            network.rounds[number][self.rank] = payload
        network.barrier.wait(timeout_s)
        return network.rounds[number]

    def barrier(self, timeout_s: float = 60.0) -> None:
        self.allgather(b"", timeout_s)

    def abort(self, cause: str) -> None:
        self.lost = cause

    def close(self) -> None:
        pass


class Job:
    """A plan made ready at every rank, once; `run` then runs it in any order."""

    def __init__(
        self,
        cupy: StandIn | None,
        plan: Plan,
        *,
        direct: bool = False,
        window: int = 1,
        hosts: tuple[int, ...] | None = None,
    ) -> None:
        self.cupy, self.plan = cupy, plan
        self.network = UnkindNetwork(cupy, plan.n_ranks)
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, verdict

        def prepare(rank: int) -> PersistentPlan:
            place = None if cupy is None else DevicePlace(rank % cupy.n_devices, direct, hosts)
            transport = UnkindTransport(self.network, rank)
            if place is None and hosts is not None:
                transport.host_path = HostPath(hosts, "a test says so")
            engine = Engine(transport)
            return engine.prepare(plan, verdict, window=window, device=place)

        self.plans = run_threads(plan.n_ranks, prepare, lambda rank, cause: self.network.barrier.abort())

    def drive(self, handles: Sequence[Handle], seed: int) -> None:
        """Until all are done, rank after rank as the seed says."""
        rng = random.Random(seed)
        for _ in range(TURNS_MAX):
            left = [each for each in handles if not each.done]
            if not left:
                return
            rng.choice(left).test()
        raise AssertionError(f"seed {seed}: not done: {[each.plan.report() for each in handles if not each.done]}")

    def give_up(self) -> None:
        """Ends what is under way at every rank, after a failure at one."""
        for each in self.plans:
            each.engine.abort("another rank has failed")

    def reference(self, inputs: Sequence[Any], count: int) -> list[Any]:
        """The same plan on arrays of NumPy."""
        outputs = [np.zeros(count, dtype=each.dtype) for each in inputs]
        self.drive([p.start(s, r) for p, s, r in zip(self.plans, inputs, outputs, strict=True)], 0)
        return outputs


def as_processes(cupy: StandIn, patch: pytest.MonkeyPatch) -> None:
    """From now on each thread is a process of its own, to CUDA IPC."""

    def process() -> str:
        return threading.current_thread().name

    patch.setattr(cupy, "process", process)
    for kept in ("_all", "_free"):
        patch.setattr(device_ipc, kept, [])
    patch.setattr(device_ipc, "process_token", lambda: process().encode().rjust(16)[-16:])


def on_threads(n_ranks: int, body: Callable[[int], T]) -> list[T]:
    """`body(rank)` in threads."""
    return run_threads(n_ranks, body, lambda rank, cause: None)
