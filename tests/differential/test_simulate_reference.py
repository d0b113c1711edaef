"""The simulator against a slow and obvious one in exact numbers, on random transfers and random plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.errors import PlanError
from optcc.plan import LOCAL_COPY, RECV, RECV_COPY_SEND, SEND, Channel, Plan
from optcc.simulate import MODELS, Model, simulate
from optcc.topology import Nic, Server, Topology
from optcc.transfers import Transfers

SEEDS = range(150)


class Reference:
    """Steps from instant to instant; at each one, does whatever the rules allow until nothing more is allowed."""

    def __init__(self, transfers: Transfers, topology: Topology, model: Model, overhead: Fraction) -> None:
        self.transfers, self.topology, self.model, self.overhead = transfers, topology, model, overhead
        self.rates: dict[str, Fraction] = {}
        self.ports = [self.ports_of(src, dst) for src, dst in zip(transfers.src, transfers.dst, strict=True)]
        self.ready = dict[int, Fraction]()
        self.start = dict[int, Fraction]()
        self.sent = dict[int, Fraction]()
        self.done = dict[int, Fraction]()
        self.turn = dict[int, int]()  # its place in its receive lane
        self.comes = dict[int, Fraction]()  # under fifo: when it can be taken by its in port, and when it is through
        self.landed = dict[int, Fraction]()

    def ports_of(self, src: int, dst: int) -> tuple[str, ...]:
        a, b = (self.topology.servers[self.topology.rank_server[rank]] for rank in (src, dst))
        if src == dst or (a is b and a.fabric is None):
            return ()
        if a is b:
            assert a.fabric is not None
            self.rates |= {f"{src}>": a.fabric, f">{dst}": a.fabric}
            return f"{src}>", f">{dst}"
        self.rates |= {f"{a.name}>": a.out, f">{b.name}": b.in_}
        return f"{a.name}>", f">{b.name}"

    def speeds(self, flowing: list[int]) -> dict[int, Fraction]:
        """Max-min fair, or simply what the two ports can do where a transfer has them to itself."""
        if self.model != "fair":
            return {t: min(self.rates[port] for port in self.ports[t]) for t in flowing}
        speed: dict[int, Fraction] = {}
        left = dict(self.rates)
        while rest := [t for t in flowing if t not in speed]:
            users = {port: [t for t in rest if port in self.ports[t]] for port in left}
            full = min((port for port in left if users[port]), key=lambda port: left[port] / len(users[port]))
            share = left[full] / len(users[full])
            for t in users[full]:
                speed[t] = share
                for port in self.ports[t]:
                    left[port] -= share
        return speed

    def serve(self, now: Fraction) -> list[Fraction]:
        """Fifo ports: takes what can be taken at `now`, and returns the instants at which something will happen."""
        through = {t: self.start[t] + self.overhead + self.on(t, 0) for t in self.start if self.ports[t]}
        for t in sorted(self.ready.keys() - self.start.keys(), key=lambda t: (self.ready[t], t)):
            if all(end <= now or self.ports[other][0] != self.ports[t][0] for other, end in through.items()):
                self.start[t] = now
                through[t] = now + self.overhead + self.on(t, 0)
                self.comes[t] = max(now + self.overhead, through[t] - self.on(t, 1))
        for t in sorted(self.comes.keys() - self.landed.keys(), key=lambda t: (self.turn.get(t, 0), self.comes[t], t)):
            free = all(end <= now or self.ports[other][1] != self.ports[t][1] for other, end in self.landed.items())
            if self.comes[t] <= now and free:
                self.landed[t] = now + self.on(t, 1)
        latency = self.topology.latency_s
        ends = [*through.values(), *self.comes.values(), *self.landed.values()]
        return [at for at in (*ends, *(end + latency for end in self.landed.values())) if at > now]

    def on(self, t: int, side: int) -> Fraction:
        """Seconds that transfer `t` takes at its out port (0) or its in port (1)."""
        return int(self.transfers.bytes[t]) / self.rates[self.ports[t][side]]

    def run(self, may_start: Callable[[int], bool], may_be_done: Callable[[int], bool]) -> bool:
        """False if some transfer never is done."""
        t_all = range(len(self.transfers))
        local = [self.transfers.src[t] == self.transfers.dst[t] for t in t_all]
        begins = dict[int, Fraction]()
        rest = {t: Fraction(int(self.transfers.bytes[t])) if self.ports[t] else Fraction(0) for t in t_all}
        latency, now = self.topology.latency_s, Fraction(0)
        while True:
            before = -1
            while before != len(self.ready) + len(self.start) + len(self.sent) + len(self.done):
                before = len(self.ready) + len(self.start) + len(self.sent) + len(self.done)
                for t in t_all:
                    if t not in self.ready and may_start(t):
                        self.ready[t] = now
                    waits = self.model != "fair" and self.ports[t]
                    if t in self.ready and t not in self.start and not waits:
                        self.start[t] = now
                        begins[t] = now + (0 if local[t] else self.overhead)
                    if t in begins and t not in self.sent and begins[t] <= now and rest[t] == 0:
                        self.sent[t] = now
                    if t in self.comes and self.start[t] + self.overhead + self.on(t, 0) <= now:
                        self.sent.setdefault(t, now)
                    last = self.landed if t in self.comes else self.sent
                    arrived = t in last and last[t] + (0 if local[t] else latency) <= now
                    if arrived and t not in self.done and may_be_done(t):
                        self.done[t] = now
            instants = self.serve(now) if self.model == "fifo" else []
            for t in sorted(self.ready.keys() - self.start.keys(), key=lambda t: (self.ready[t], t)):
                if self.model == "fifo":
                    break
                taken = {port for other in self.start.keys() - self.sent.keys() for port in self.ports[other]}
                if not taken & set(self.ports[t]):
                    self.start[t], begins[t] = now, now + self.overhead
            flowing = [t for t in begins if begins[t] <= now and t not in self.sent]
            speed = self.speeds(flowing)
            instants += [at for at in begins.values() if at > now]
            instants += [at + latency for at in self.sent.values() if at + latency > now]
            instants += [now + rest[t] / speed[t] for t in flowing]
            if not instants:
                return len(self.done) == len(self.transfers)
            for t in flowing:
                rest[t] -= speed[t] * (min(instants) - now)
            now = min(instants)


def refer_transfers(transfers: Transfers, topology: Topology, model: Model, overhead: Fraction) -> Reference:
    reference = Reference(transfers, topology, model, overhead)
    assert reference.run(
        lambda t: (
            all(int(u) in reference.done for u in transfers.after[t])
            and all(int(u) in reference.sent for u in transfers.order[t])
        ),
        lambda t: True,
    )
    return reference


def refer_plan(plan: Plan, topology: Topology, model: Model, overhead: Fraction) -> Reference | None:
    """The rules of a plan, read off its instructions; None if it never ends."""
    reference = Reference(plan.transfers, topology, model, overhead)
    rows = list(plan)
    sender = {row.send_transfer: row for row in rows if row.send_transfer >= 0}
    receiver = {row.recv_transfer: row for row in rows if row.recv_transfer >= 0}
    reference.turn = {
        row.recv_transfer: plan.lanes[row.lane].tolist().index(row.index) for row in rows if row.in_channel >= 0
    }

    def happened(index: int) -> bool:
        row = rows[index]
        return (row.send_transfer < 0 or row.send_transfer in reference.sent) and (
            row.recv_transfer < 0 or row.recv_transfer in reference.done
        )

    def earlier(index: int) -> list[int]:
        return [other for other in plan.lanes[rows[index].lane].tolist() if other < index]

    def issued(index: int) -> bool:
        return all(happened(other) for at in (*earlier(index), index) for other in rows[at].after)

    def may_start(t: int) -> bool:
        if t not in sender:  # a local operation
            row = receiver[t]
            return issued(row.index) and all(happened(o) for o in earlier(row.index) if rows[o].kind == "copy")
        row = sender[t]
        queue = [other for other in plan.lanes[receiver[t].lane].tolist() if rows[other].in_channel >= 0]
        freed = queue.index(receiver[t].index) - plan.channels[receiver[t].in_channel].slots
        return (
            issued(row.index)
            and all(rows[o].send_transfer in reference.sent for o in earlier(row.index) if rows[o].send_transfer >= 0)
            and (row.recv_transfer < 0 or row.recv_transfer in reference.done)
            and (freed < 0 or rows[queue[freed]].recv_transfer in reference.done)
        )

    def may_be_done(t: int) -> bool:
        row = receiver[t]
        mine = [rows[o] for o in earlier(row.index) if rows[o].in_channel >= 0]
        return t not in sender or (issued(row.index) and all(o.recv_transfer in reference.done for o in mine))

    return reference if reference.run(may_start, may_be_done) else None


def random_topology(rng: random.Random) -> Topology:
    """One to five servers with rates that make ties likely."""

    def rate() -> Fraction:
        return Fraction(rng.choice((1, 2, 2, 2, 3, 4)), rng.choice((1, 1, 3)))

    servers = tuple(
        Server(f"h{index}", rng.choice((1, 1, 2)), (Nic(0, rate(), rate()),), rng.choice((None, rate())))
        for index in range(rng.randint(2, 5))
    )
    return Topology(servers, latency_s=rng.choice((Fraction(0), Fraction(1), Fraction(1, 3))))


def random_transfers(rng: random.Random, n_ranks: int) -> Transfers:
    n = rng.randint(1, 18)
    ends = [(rng.randrange(n_ranks), rng.randrange(n_ranks)) for _ in range(n)]
    after = [[u for u in range(t) if rng.random() < 0.1] for t in range(n)]
    order = [[u for u in range(t) if ends[u][0] == ends[t][0] and rng.random() < 0.2] for t in range(n)]
    zero = column([0] * n)
    return Transfers(
        *(Collective("allreduce", n_ranks), "sum", "float32", 64, 0, ("all",)),
        column(src for src, _ in ends),
        column(dst for _, dst in ends),
        *(zero, zero, zero),
        column(rng.choice((4, 8, 8, 16, 24)) for _ in range(n)),
        *(zero, zero, zero),
        Lists.of(after),
        Lists.of(order),
    )


def random_plan(rng: random.Random, transfers: Transfers) -> Plan:
    """Instructions in the order of the transfers, two lanes a rank; a reckless plan waits for later ones as well."""
    src, dst = transfers.src.tolist(), transfers.dst.tolist()
    channels = sorted({(a, b) for a, b in zip(src, dst, strict=True) if a != b})
    lane_of = {end: rng.randrange(2) for a, b in channels for end in ((a, b, "out"), (a, b, "in"))}
    lanes: dict[tuple[int, int], list[tuple[int, int, int]]] = {
        (rank, lane): [] for rank in range(transfers.n_ranks) for lane in (0, 1)
    }
    for t, (a, b) in enumerate(zip(src, dst, strict=True)):
        if a == b:
            lanes[a, rng.randrange(2)].append((LOCAL_COPY, t, -1))
            continue
        lane = lanes[a, lane_of[a, b, "out"]]
        if lane and lane[-1][0] == RECV and rng.random() < 0.5:
            lane[-1] = (RECV_COPY_SEND, lane[-1][1], t)
        else:
            lane.append((SEND, -1, t))
        lanes[b, lane_of[a, b, "in"]].append((RECV, t, -1))
    rows = [(rank, *row) for (rank, _), lane in sorted(lanes.items()) for row in lane]
    slots = {lane: rng.choice((1, 1, 2, 3)) for lane in lanes}
    names = {pair: index for index, pair in enumerate(channels)}
    reckless = rng.random() < 0.2
    after = [
        [
            other
            for other, (that, _, received, sent) in enumerate(rows)
            if that == rank and (max(received, sent) < max(recv, send) or reckless) and rng.random() < 0.15
        ]
        for rank, _, recv, send in rows
    ]
    return Plan(
        *("random", transfers, tuple(Channel(a, b, slots[b, lane_of[a, b, "in"]]) for a, b in channels)),
        column(rank for rank, _ in sorted(lanes)),
        Lists.of(_numbered([len(lane) for _, lane in sorted(lanes.items())])),
        column(kind for _, kind, _, _ in rows),
        column(names[src[t], dst[t]] if kind not in (SEND, LOCAL_COPY) else -1 for _, kind, t, _ in rows),
        column(names[src[t], dst[t]] if kind not in (RECV, LOCAL_COPY) else -1 for _, kind, _, t in rows),
        column(0 if kind in (SEND, LOCAL_COPY) else -1 for _, kind, _, _ in rows),
        column(0 if kind != SEND else -1 for _, kind, _, _ in rows),
        column(1 for _ in rows),
        column(recv for _, _, recv, _ in rows),
        column(send for _, _, _, send in rows),
        Lists.of(after),
    )


def _numbered(lengths: list[int]) -> list[list[int]]:
    """Consecutive numbers from 0 in lists of these lengths."""
    return [list(range(sum(lengths[:at]), sum(lengths[: at + 1]))) for at in range(len(lengths))]


def check(plan: Plan | Transfers, topology: Topology, model: Model, overhead: Fraction, wanted: Reference) -> None:
    timing = simulate(plan, topology, model=model, overhead_s=float(overhead))
    for t in range(len(timing.start_s)):
        assert timing.start_s[t] == pytest.approx(float(wanted.start[t]), rel=1e-9, abs=1e-12), t
        assert timing.end_s[t] == pytest.approx(float(wanted.done[t]), rel=1e-9, abs=1e-12), t


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_transfers(seed: int, model: Model) -> None:
    rng = random.Random(seed)
    topology = random_topology(rng)
    transfers = random_transfers(rng, topology.n_ranks)
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    check(transfers, topology, model, overhead, refer_transfers(transfers, topology, model, overhead))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans(seed: int, model: Model) -> None:
    rng = random.Random(1000 + seed)
    topology = random_topology(rng)
    plan = random_plan(rng, random_transfers(rng, topology.n_ranks))
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    wanted = refer_plan(plan, topology, model, overhead)
    if wanted is None:
        with pytest.raises(PlanError, match="never"):
            simulate(plan, topology, model=model, overhead_s=float(overhead))
    else:
        check(plan, topology, model, overhead, wanted)
