"""Swarm testing of the protocol: a seed makes hosts, messages and faults, and every promise is checked.

A run has two phases. While faults come and go, *safety*: what a rank is told was received is right to the byte, each
message once and in order; a buffer that was reported is never touched again; memory is bounded. Then the faults end,
and *liveness*: everything is delivered and reported within `GRACE_S`, without the help of the sender's 5 s timer; or,
if a rank was killed or some pair has no rail left for good, every rank ends in a named error.

    python -m optcc.experiments.swarm --seed 7 --trace
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from optcc.errors import OptccError
from optcc.plan import Channel
from optcc.runtime.protocol.exchange import Exchange
from optcc.runtime.protocol.frames import EARLY_CHUNKS_MAX, crc32
from optcc.runtime.protocol.settings import Settings
from optcc.runtime.sim.host import SimulatedHost
from optcc.runtime.sim.network import SimulatedNetwork
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.transport import RECEIVED

GRACE_S = 4.0
"""Less than the sender's timer: nothing that stands still may count on that."""
_LEAVE_S = 1.0
_STALL_S = 5.0
_BLOB = random.Random(0).randbytes(1 << 19)
_GARBAGE = 0xEE


class Violation(AssertionError):
    """A promise was broken; the message says which."""


@dataclass(frozen=True)
class SwarmFault:
    """What befalls NIC `nic` of `rank` from `at_s`, for `for_s` seconds (infinity: for good).

    Kinds: `down` (link), `hole`, `hole-out`, `hole-in` (blackholes), `loss`, `slow`, `reset`; and of a whole rank,
    `nic` being -1: `busy` (the process does not look), `crash`.
    """

    at_s: float
    kind: str
    rank: int
    nic: int
    for_s: float

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.nic < 0 else f"rank {self.rank} NIC {self.nic}"
        return f"{self.at_s:.4f} s: {where} {self.kind} for {self.for_s:.3f} s"


@dataclass(frozen=True)
class SwarmChannel:
    """The messages of one channel: their sizes, and how many are posted ahead at each end."""

    src: int
    dst: int
    group: int
    sizes: tuple[int, ...]
    ahead_send: int
    ahead_recv: int


@dataclass(frozen=True)
class Scenario:
    """All that a seed makes."""

    seed: int
    rates: tuple[tuple[tuple[int, int], ...], ...]
    settings: Settings
    lanes: tuple[SwarmChannel, ...]
    faults: tuple[SwarmFault, ...]
    latency_s: float
    segment_bytes: int
    buffer_bytes: tuple[int, int]
    corrupt: float
    ends_with_barrier: bool
    pauses: float

    def describe(self) -> str:
        """A few lines."""
        lines = [
            f"seed {self.seed}: {len(self.rates)} ranks, NICs {'+'.join(str(len(nics)) for nics in self.rates)}, "
            f"{len(self.lanes)} channels, {sum(len(lane.sizes) for lane in self.lanes)} messages of "
            f"{sum(sum(lane.sizes) for lane in self.lanes)} B, chunks of {self.settings.chunk_bytes} B, window "
            f"{self.settings.window}{', crc' if self.settings.crc else ''}{', replan' if self.settings.replan else ''}",
        ]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    n_ranks, n_nics = rng.choice((2, 2, 3, 3, 4, 5, 6)), rng.choice((1, 2, 2, 2, 3, 4))
    base = rng.choice((12_500_000, 25_000_000, 125_000_000))
    uneven = rng.random() < 0.4

    def rate() -> int:
        return int(base * rng.choice((1, 1, 0.5, 0.25))) if uneven else base

    rates = tuple(tuple((rate(), rate()) for _ in range(n_nics)) for _ in range(n_ranks))
    crc = rng.random() < 0.3
    settings = Settings(
        *(rng.choice((1024, 8192, 32768, 1 << 20)), rng.choice((1, 2, 8, 32)), crc, rng.random() < 0.3),
        *(rng.random() < 0.5, 0.1, _STALL_S, 5.0),
    )
    lanes = _make_lanes(rng, n_ranks)
    size_bytes = sum(sum(lane.sizes) for lane in lanes)
    lasts_s = 0.01 + size_bytes / (base * n_nics)
    faults = _make_faults(rng, n_ranks, n_nics, max(0.05, 2 * lasts_s))
    return Scenario(
        *(seed, rates, settings, lanes, faults),
        latency_s=rng.choice((10e-6, 50e-6, 1e-3)),
        segment_bytes=rng.choice((1448, 8948, 65536)),
        buffer_bytes=rng.choice(((4096, 16384), (65536, 262144), (1 << 20, 1 << 20))),
        corrupt=rng.choice((0.0, 0.0, 0.01)) if crc else 0.0,
        ends_with_barrier=rng.random() < 0.7,
        pauses=rng.choice((0.0, 0.0, 0.05)),
    )


def _make_lanes(rng: random.Random, n_ranks: int) -> tuple[SwarmChannel, ...]:
    """A few channels, of a ring, of all pairs, or any; short, long and mixed messages."""
    shape = rng.choice(("ring", "pairs", "any"))
    if shape == "ring":
        pairs = [(rank, (rank + 1) % n_ranks) for rank in range(n_ranks)]
    elif shape == "pairs":
        pairs = [(src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst]
        pairs = rng.sample(pairs, min(len(pairs), 8))
    else:
        pairs = [tuple(rng.sample(range(n_ranks), 2)) for _ in range(rng.randint(1, 4))]  # type: ignore[misc]
    kind = rng.choice(("short", "long", "mixed", "cut"))
    largest = {"short": 2000, "long": 200_000, "mixed": 60_000, "cut": 90_000}[kind]
    lanes: list[SwarmChannel] = []
    for src, dst in pairs:
        for group in range(rng.choice((1, 1, 2))):
            n_messages = rng.randint(1, 20 if kind == "short" else 6)
            least = {"short": 0, "long": 20_000, "mixed": 0, "cut": 40_000}[kind]
            sizes = tuple(
                rng.randint(0, 500) if kind == "mixed" and rng.random() < 0.5 else rng.randint(least, largest)
                for _ in range(n_messages)
            )
            lanes.append(SwarmChannel(src, dst, group, sizes, rng.choice((1, 1, 4)), rng.choice((1, 2, 4))))
    return tuple(lanes)


def _make_faults(rng: random.Random, n_ranks: int, n_nics: int, within_s: float) -> tuple[SwarmFault, ...]:
    """Faults that end, now and then one that does not, and seldom a rank that is killed."""
    faults: list[SwarmFault] = []
    kinds = ("down", "hole", "hole", "hole-out", "hole-in", "loss", "slow", "reset")
    style = rng.choice(("none", "few", "few", "same", "storm", "storm"))
    count = {"none": 0, "few": rng.randint(1, 3), "same": rng.randint(2, 6), "storm": rng.randint(4, 12)}[style]
    first = rng.choice(kinds), rng.randrange(n_ranks), rng.randrange(n_nics)
    at_s = 0.0
    for _ in range(count):
        if style == "same":
            # One NIC fails, is healed, and fails again; or another one next.
            kind, rank, nic = first[0], first[1], rng.choice((first[2], rng.randrange(n_nics)))
            at_s += rng.expovariate(4 / within_s) + rng.choice((0.0, 0.05, 0.12))
            for_s = rng.choice((0.03, 0.08, 0.15, 0.3))
            faults.append(SwarmFault(at_s, kind, rank, nic, for_s))
            at_s += for_s
        else:
            for_s = rng.choice((0.002, 0.03, 0.06, 0.15, 0.4, 1.0))
            rank = rng.randrange(n_ranks)
            faults.append(SwarmFault(rng.uniform(0, within_s), rng.choice(kinds), rank, rng.randrange(n_nics), for_s))
    if n_nics > 1 and rng.random() < 0.15:
        # For good, on one rail: no pair is cut off.
        kind = rng.choice(("down", "hole", "hole-out", "hole-in"))
        rail = rng.randrange(n_nics)
        victims = rng.sample(range(n_ranks), rng.randint(1, n_ranks))
        faults += [SwarmFault(rng.uniform(0, within_s), kind, rank, rail, float("inf")) for rank in victims]
    if rng.random() < 0.3:
        faults.append(
            SwarmFault(rng.uniform(0, within_s), "busy", rng.randrange(n_ranks), -1, rng.choice((0.01, 0.2, 0.7)))
        )
    if rng.random() < 0.05:
        faults.append(SwarmFault(rng.uniform(0, within_s), "crash", rng.randrange(n_ranks), -1, float("inf")))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def message(lane: SwarmChannel, number: int) -> bytes:
    """The bytes of a message: no two messages of a run are alike beyond a few bytes."""
    size = lane.sizes[number]
    at = (lane.src * 7919 + lane.dst * 104_729 + lane.group * 1_299_709 + number * 15_485_863) % (len(_BLOB) - size)
    return _BLOB[at : at + size]


@dataclass
class _End:
    """One end of a lane, at one rank."""

    lane: SwarmChannel
    handle: int
    is_sender: bool
    posted: int = 0
    reported: int = 0
    buffers: list[bytearray] = field(default_factory=list)


class _Program:
    """A rank's program: posts ahead, checks what it is told of, and leaves."""

    def __init__(self, swarm: Swarm, host: SimulatedHost) -> None:
        self.swarm, self.host = swarm, host
        self.ends: dict[int, _End] = {}
        self.failure: OptccError | None = None
        self.is_done = False
        self.left_at_s = float("inf")
        self._exchange: Exchange | None = None
        self._phase = "begin"
        self._leaves_at_s = 0.0
        host.wakes = self.wake

    def wake(self) -> None:
        """Takes what has happened, and goes on."""
        host, endpoint = self.host, self.host.endpoint
        if self.is_done:
            return
        if endpoint.failure is not None and not endpoint.events:
            self.fail(endpoint.failure)
            return
        if self._phase == "begin":
            self._exchange = Exchange(endpoint, b"")
            self._phase = "barrier"
        if self._phase == "barrier" and self._steps():
            self._open()
            self._phase = "run"
        if self._phase == "run":
            self._take_events()
            self._post()
            if all(end.reported == len(end.lane.sizes) for end in self.ends.values()):
                self._end_run()
        if self._phase == "last barrier" and self._steps():
            self._phase = "leave"
            self._leaves_at_s = host.now_s + _LEAVE_S
        if self._phase == "leave":
            self._leave()
        host.flush()

    def _steps(self) -> bool:
        assert self._exchange is not None
        return self._exchange.step()

    def _end_run(self) -> None:
        if self.swarm.scenario.ends_with_barrier:
            self._exchange = Exchange(self.host.endpoint, b"")
            self._phase = "last barrier"
        else:
            self._phase = "leave"
            self._leaves_at_s = self.host.now_s + _LEAVE_S

    def _leave(self) -> None:
        """As `TcpTransport.close`: once the last states reach all peers, or a second later."""
        endpoint = self.host.endpoint
        endpoint.reports.release_all()
        self.host.flush()
        if not endpoint.may_leave() and self.host.now_s < self._leaves_at_s:
            return
        self.is_done, self.left_at_s = True, self.host.now_s
        self.swarm.note(f"rank {self.host.rank} leaves")
        self.host.leave()

    def _open(self) -> None:
        lanes = self.swarm.scenario.lanes
        for group in sorted({lane.group for lane in lanes}):
            of_group = [lane for lane in lanes if lane.group == group]
            channels = [Channel(lane.src, lane.dst, 4) for lane in of_group]
            handles = self.host.endpoint.open(channels, group, [sum(lane.sizes) for lane in of_group])
            for lane, handle in zip(of_group, handles, strict=True):
                if handle >= 0:
                    self.ends[handle] = _End(lane, handle, lane.src == self.host.rank)

    def _post(self) -> None:
        endpoint = self.host.endpoint
        for end in self.ends.values():
            ahead = end.lane.ahead_send if end.is_sender else end.lane.ahead_recv
            while end.posted < len(end.lane.sizes) and end.posted - end.reported < ahead:
                size = end.lane.sizes[end.posted]
                if end.is_sender:
                    buffer = bytearray(message(end.lane, end.posted))
                    end.buffers.append(buffer)
                    end.posted += 1
                    connection = endpoint.post_send(end.handle, memoryview(buffer))
                    if connection is not None:
                        self.host.write(connection)
                else:
                    buffer = bytearray([_GARBAGE]) * size
                    end.buffers.append(buffer)
                    end.posted += 1
                    endpoint.post_recv(end.handle, memoryview(buffer))
                self.host.flush()

    def _take_events(self) -> None:
        for kind, handle in self.host.endpoint.poll_events():
            end = self.ends[handle]
            number = end.reported
            if number >= end.posted:
                raise Violation(f"{self._name(end, number)}: reported before it was posted, or twice")
            if (kind == RECEIVED) == end.is_sender:
                raise Violation(f"{self._name(end, number)}: the event of the other end")
            if end.is_sender:
                # The program may use its buffer again.
                end.buffers[number][:] = bytes([_GARBAGE]) * len(end.buffers[number])
            elif end.buffers[number] != message(end.lane, number):
                raise Violation(f"{self._name(end, number)}: wrong bytes")
            end.reported += 1
            if self.swarm.rng.random() < self.swarm.scenario.pauses:
                self.host.compute(self.swarm.rng.choice((0.001, 0.02, 0.15)))

    def _name(self, end: _End, number: int) -> str:
        return f"rank {self.host.rank}: message {number} of {end.lane.src}->{end.lane.dst} group {end.lane.group}"

    def fail(self, failure: OptccError) -> None:
        """The program ends in an error, and aborts."""
        self.failure, self.is_done = failure, True
        self.swarm.note(f"{type(failure).__name__}: {failure}")
        self.host.leave()

    def check_after(self) -> None:
        """What was received is still there, and memory is bounded."""
        for end in self.ends.values():
            for number in range(end.reported):
                if not end.is_sender and end.buffers[number] != message(end.lane, number):
                    raise Violation(f"{self._name(end, number)}: changed after it was reported")
        for inbound in self.host.endpoint.inbounds.values():
            for channel in inbound._channels.values():
                if len(channel.early) > EARLY_CHUNKS_MAX:
                    raise Violation(f"rank {self.host.rank}: {len(channel.early)} early chunks kept")

    def pending(self) -> str:
        """What it waits for."""
        waits = [
            f"{end.lane.src}->{end.lane.dst} group {end.lane.group}: {end.reported} of {len(end.lane.sizes)} "
            f"{'sent' if end.is_sender else 'received'}"
            for end in self.ends.values()
            if end.reported < len(end.lane.sizes)
        ]
        return f"rank {self.host.rank} in {self._phase}: {'; '.join(waits) or 'no message'}"


class Swarm:
    """One run of a scenario. `log` collects what happens, if it is given."""

    def __init__(self, scenario: Scenario, log: Callable[[str], None] | None = None) -> None:
        self.scenario, self._log = scenario, log
        self.rng = random.Random(scenario.seed + 1)
        self.network = SimulatedNetwork(
            self.rng,
            latency_s=scenario.latency_s,
            segment_bytes=scenario.segment_bytes,
            buffer_bytes=scenario.buffer_bytes,
        )
        self.network.corrupt = scenario.corrupt
        book = []
        for rank, nics in enumerate(scenario.rates):
            entries = []
            for number, (out, in_) in enumerate(nics):
                self.network.nics[rank, number] = SimulatedNic(rank, number, float(out), float(in_))
                entries.append((f"eth{number}", str(rank), number, out, in_))
            book.append(tuple(entries))
        secret, job = self.rng.randbytes(32), self.rng.randbytes(16)
        checksum = crc32 if scenario.settings.crc else None
        self.programs = [
            _Program(
                self,
                SimulatedHost(
                    *(self.network, scenario.settings, rank, book),
                    secret=secret,
                    job=job,
                    rng=random.Random(scenario.seed * 64 + rank),
                    checksum=checksum,
                ),
            )
            for rank in range(len(book))
        ]

    def note(self, what: str) -> None:
        """Something for the story."""
        if self._log is not None:
            self._log(f"{self.network.clock.now_s:9.5f}  {what}")

    def run(self) -> None:
        """Runs it; raises Violation."""
        clock, faults = self.network.clock, self.scenario.faults
        for fault in faults:
            clock.after(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
        ends = [fault.at_s + (fault.for_s if fault.for_s < 1e9 else 0.0) for fault in faults]
        size_bytes = sum(sum(lane.sizes) for lane in self.scenario.lanes)
        slowest = min(rate for nics in self.scenario.rates for nic in nics for rate in nic)
        until_s = max([0.0, *ends]) + GRACE_S + 8 * size_bytes / slowest + self._allowance_s()
        clock.run(until_s, self._is_over)
        for program in self.programs:
            program.check_after()
        if not self._is_over():
            waiting = "\n".join(each.pending() for each in self.programs if not each.is_done)
            raise Violation(f"not over {until_s:.2f} s after the start:\n{waiting}")
        if not self._may_fail():
            failed = [each for each in self.programs if each.failure is not None]
            if failed:
                raise Violation(f"a rank gave up: {min(failed, key=lambda each: each.host.now_s).failure}")

    def _allowance_s(self) -> float:
        """Where a rank may be lost, or no rail is left, that takes its time to be found."""
        return 2 * _STALL_S + 3.0 if self._may_fail() else 0.0

    def _may_fail(self) -> bool:
        """True if an error is a right end: a rank was killed, or has left while a fault was on, so that its last states
        may not have come through."""
        faults = self.scenario.faults
        left_s = [program.left_at_s for program in self.programs if program.is_done and program.failure is None]
        return any(fault.kind == "crash" for fault in faults) or any(
            fault.kind != "loss" and fault.at_s <= left + _LEAVE_S and left <= fault.at_s + fault.for_s + _LEAVE_S
            for fault in faults
            for left in left_s
        )

    def _is_over(self) -> bool:
        return all(program.is_done or program.host.is_stopped for program in self.programs)

    # --- faults

    def _begin(self, fault: SwarmFault) -> None:
        host = self.programs[fault.rank].host
        self.note(str(fault))
        if fault.kind == "crash":
            host.crash()
        elif fault.kind == "busy":
            if not host.is_stopped:
                host.compute(fault.for_s)
        else:
            nic = self.network.nics[fault.rank, fault.nic]
            self._change(nic, fault.kind, begins=True)
            if fault.for_s < 1e9 and fault.kind != "reset":
                self.network.clock.after(fault.for_s, lambda: self._heal(nic, fault.kind))

    def _heal(self, nic: SimulatedNic, kind: str) -> None:
        # A fault for good outlives others.
        now_s = self.network.clock.now_s
        for other in self.scenario.faults:
            still = other.at_s <= now_s < other.at_s + other.for_s - 1e-9
            if (other.rank, other.nic, other.kind) == (nic.rank, nic.number, kind) and still:
                return
        self.note(f"rank {nic.rank} NIC {nic.number} healed of {kind}")
        self._change(nic, kind, begins=False)

    def _change(self, nic: SimulatedNic, kind: str, *, begins: bool) -> None:
        network = self.network
        if kind == "down":
            network.set_link(nic, not begins)
        elif kind == "loss":
            nic.loss = 0.05 if begins else 0.0
        elif kind == "slow":
            nic.out_rate = nic.out_rate / 8 if begins else float(self.scenario.rates[nic.rank][nic.number][0])
        elif kind == "reset":
            network.reset_over(nic)
        else:
            holes = {"hole": (True, True), "hole-out": (True, False), "hole-in": (False, True)}[kind]
            network.set_open(
                nic,
                out=not begins if holes[0] else nic.out_open,
                in_=not begins if holes[1] else nic.in_open,
            )


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> None:
    """Runs the scenario of a seed; raises Violation, with the seed, if a promise is broken."""
    scenario = make_scenario(seed)
    if log is not None:
        log(scenario.describe())
    try:
        Swarm(scenario, log).run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
