"""The simulator against a slow and obvious one in exact numbers, on random transfers and random plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.errors import PlanError
from optcc.graph import Graph, GraphLink
from optcc.plan import LOCAL_COPY, RECV, RECV_COPY_SEND, SEND, Channel, Plan
from optcc.servers import enclose
from optcc.simulate import MODELS, Model, simulate
from optcc.simulate.ports import PortMap
from optcc.simulate.rails import run_striped
from optcc.simulate.run import PortNetwork, run_once
from optcc.simulate.tick_clock import Change
from optcc.timing import Timing
from optcc.topology import Nic, Pod, Server, Topology
from optcc.transfers import Transfers
from tests.sample import sampled

SEEDS = range(100)
POD_SEEDS = range(15)
RateChanges = Sequence[tuple[Fraction, str, Fraction, int]]
"""Time, port, new rate (0: down), bytes to be sent again."""


class Reference:
    """Steps from instant to instant; at each one, does whatever the rules allow until nothing more is allowed.

    What a port serves has `rest` bytes left there. `changes` are (time, port, rate, bytes lost).
    """

    def __init__(
        self,
        transfers: Transfers,
        topology: Topology,
        model: Model,
        overhead: Fraction,
        changes: RateChanges = (),
    ) -> None:
        self.transfers, self.topology, self.model, self.overhead = transfers, topology, model, overhead
        self.changes = list(changes)
        self.rates: dict[str, Fraction] = {}
        self.n_rails: dict[str, int] = {}
        self.ports = [self.ports_of(src, dst) for src, dst in zip(transfers.src, transfers.dst, strict=True)]
        self.down = set[str]()
        self.ready = dict[int, Fraction]()
        self.start = dict[int, Fraction]()
        self.sent = dict[int, Fraction]()
        self.come = dict[int, Fraction]()  # under fifo: when it came to its in port, was taken by it, and was through
        self.taken = dict[int, Fraction]()
        self.landed = dict[int, Fraction]()
        self.done = dict[int, Fraction]()
        self.turn = dict[int, int]()  # its place in its receive lane
        self.rest = [(self.size(t), self.size(t)) for t in range(len(transfers))]  # at its out and its in port
        self.ways = [self.uplinks(src, dst) for src, dst in zip(transfers.src, transfers.dst, strict=True)]
        self.passed = [dict[str, tuple[Fraction, Fraction]]() for _ in self.ways]  # under fifo: taken, and for how long
        self.waits = dict[int, Fraction]()  # under exclusive: until uplinks are free for it
        if model != "fifo":
            self.ports = [(*ports, *way) for ports, way in zip(self.ports, self.ways, strict=True)]

    def together(self, rail: int) -> list[int]:
        """The rails that are one with this one: their NICs belong to the same GPUs; alone, if two of these GPUs have
        lost all that they had in common."""
        servers = self.topology.servers

        def owners(each: int) -> list[tuple[int, int | None]]:
            return sorted((at, nic.gpu) for at, server in enumerate(servers) for nic in server.nics if nic.rail == each)

        every = sorted({nic.rail for server in servers for nic in server.nics})
        alike = [each for each in every if owners(each) == owners(rail)]
        left = [{nic.rail for nic in server.nics if nic.rail in alike and not nic.failed} for server in servers]
        apart = any(a and b and not a & b for a in left for b in left)
        return [rail] if apart else alike

    def common(self, src: int, dst: int) -> tuple[str, Fraction, Fraction]:
        """Where a message between the own NICs of two GPUs is fastest: on the core or on rails that are one, and their
        rates there."""
        found: dict[str, list[Fraction]] = {}
        for side, rank in enumerate((src, dst)):
            server, gpu = self.gpu(rank)
            for nic in server.nics:
                if nic.gpu == gpu and not nic.failed:
                    rails = self.together(nic.rail) if self.topology.rail_only else []
                    hub = " ".join(map(str, rails)) or "core"
                    self.n_rails[hub] = max(1, len(rails))
                    found.setdefault(hub, [Fraction(0), Fraction(0)])[side] += nic.in_ if side else nic.out
        ups = [self.rates[name] for name in self.pod_links(src, dst)]
        # The first of several.
        hub = max(found, key=lambda hub: min(*found[hub], *(self.n_rails[hub] * rate for rate in ups)))
        out, in_ = found[hub]
        return hub, out, in_

    def gpu(self, rank: int) -> tuple[Server, int]:
        """Its server, and its number there."""
        at = self.topology.rank_server
        return self.topology.servers[at[rank]], rank - at.index(at[rank])

    def uplinks(self, src: int, dst: int) -> tuple[str, ...]:
        """What a transfer takes between two servers of different pods; rail-only, that of its rail."""
        names = self.pod_links(src, dst)
        if not (names and self.topology.rail_only and self.topology.wired is not None):
            return names
        hub = self.common(src, dst)[0]
        self.rates |= {f"{name} {hub}": self.n_rails[hub] * self.rates[name] for name in names}
        return tuple(f"{name} {hub}" for name in names)

    def pod_links(self, src: int, dst: int) -> tuple[str, ...]:
        """What a transfer goes up and comes down between two servers of different pods."""
        a, b = (self.topology.server_pod[self.topology.rank_server[rank]] for rank in (src, dst))
        pods = self.topology.pods
        self.rates |= {f"up {pod.name}": pod.up for pod in pods} | {f"down {pod.name}": pod.down for pod in pods}
        up = (f"up {pods[a].name}",) if a >= 0 else ()
        down = (f"down {pods[b].name}",) if b >= 0 else ()
        return () if a == b else (*up, *down)

    def next_uplink(self, t: int) -> str | None:
        """The first one that has not taken it."""
        return next((uplink for uplink in self.ways[t] if uplink not in self.passed[t]), None)

    def reaches(self, t: int) -> Fraction:
        """When the first byte comes to the next uplink, or has passed all."""
        return max([self.begins(t), *(begins for begins, _ in self.passed[t].values())])

    def is_over(self, t: int) -> Fraction:
        """When the uplinks have nothing more to do for it."""
        return max([end for _, end in self.passed[t].values()], default=Fraction(0))

    def ports_of(self, src: int, dst: int) -> tuple[str, ...]:
        a, b = (self.topology.servers[self.topology.rank_server[rank]] for rank in (src, dst))
        if src == dst or (a is b and a.fabric is None):
            return ()
        if a is b:
            assert a.fabric is not None
            names = f"out {a.name} gpu {src}", f"in {a.name} gpu {dst}"
            self.rates |= dict.fromkeys(names, a.fabric)
            return names
        if self.topology.graph is not None:
            names = f"out {src}->{dst}", f"in {src}->{dst}"  # the ends of a cable
            self.rates |= dict.fromkeys(
                names, next(link.rate for link in self.topology.graph.links if link[:2] == (src, dst))
            )
            return names
        if a.has_own_nics:
            hub, out, in_ = self.common(src, dst)
            names = f"out {hub} of {src}", f"in {hub} of {dst}"
            self.rates |= dict(zip(names, (out, in_), strict=True))
            return names
        self.rates |= {f"out {a.name}": a.out, f"in {b.name}": b.in_}
        return f"out {a.name}", f"in {b.name}"

    def size(self, t: int) -> Fraction:
        return Fraction(int(self.transfers.bytes[t]))

    def is_local(self, t: int) -> bool:
        return bool(self.transfers.src[t] == self.transfers.dst[t])

    def begins(self, t: int) -> Fraction:
        """When the first byte of a transfer that has started leaves."""
        at = self.start[t] + (0 if self.is_local(t) else self.overhead)
        return max(at, self.waits.get(t, at))

    def serving(self, side: int) -> list[int]:
        """What flows out of ports, or is being taken by in ports."""
        if side == 0:
            return [t for t in self.start if self.ports[t] and t not in self.sent]
        return [t for t in self.taken if t not in self.landed]

    def speed(self, t: int, side: int, flowing: list[int]) -> Fraction:
        """Bytes/s at which a transfer goes out of its out port or into its in port."""
        if self.model == "fair":
            return self.fair_speeds(flowing)[t]
        ports = self.ports[t] if self.model == "exclusive" else (self.ports[t][side],)
        return min(Fraction(0) if port in self.down else self.rates[port] for port in ports)

    def fair_speeds(self, flowing: list[int]) -> dict[int, Fraction]:
        speed: dict[int, Fraction] = {}
        left = {port: Fraction(0) if port in self.down else rate for port, rate in self.rates.items()}
        while rest := [t for t in flowing if t not in speed]:
            users = {port: [t for t in rest if port in self.ports[t]] for port in left}
            full = min((port for port in left if users[port]), key=lambda port: left[port] / len(users[port]))
            share = left[full] / len(users[full])
            for t in users[full]:
                speed[t] = share
                for port in self.ports[t]:
                    left[port] -= share
        return speed

    def comes(self, t: int, now: Fraction) -> Fraction | None:
        """When a transfer has come so far that its in port can take it without a pause."""
        out, in_ = self.ports[t]
        if self.next_uplink(t) is not None or (t not in self.sent and out in self.down):
            return None
        ends = self.sent[t] if t in self.sent else max(now, self.begins(t)) + self.rest[t][0] / self.rates[out]
        return max(self.reaches(t), max(ends, self.is_over(t)) - self.size(t) / self.rates[in_])

    def coming(self) -> list[int]:
        """What has left, or is leaving, and has not come to its in port."""
        return [t for t in self.start if self.ports[t] and t not in self.come]

    def pass_uplinks(self, now: Fraction) -> None:
        """Each takes what has come to it, in turn: all ways up first, then the ways down."""
        for way in ("up", "down"):
            for t in sorted(self.coming()):
                uplink = self.next_uplink(t)
                if uplink is None or not uplink.startswith(way) or self.reaches(t) > now:
                    continue
                if not self.passed[t] and t not in self.sent and self.ports[t][0] in self.down:
                    continue
                free = max((each[uplink][1] for each in self.passed if uplink in each), default=now)
                begins = max(now, free)
                self.passed[t][uplink] = begins, begins + self.size(t) / self.rates[uplink]

    def change(self, port: str, rate: Fraction, lost: int, now: Fraction) -> None:
        for side in (0, 1):
            serving = [t for t in self.serving(side) if self.ports[t][side if self.model == "fifo" else 0] == port]
            if self.model != "fifo":
                serving = [t for t in self.serving(0) if port in self.ports[t]] if side == 0 else []
            if self.model == "fair":  # the first of each pair of ports that is flowing
                first: dict[tuple[str, ...], int] = {}
                flowing = [t for t in serving if self.begins(t) <= now]
                for t in sorted(flowing, key=lambda t: (self.rest[t][0], self.begins(t), t)):
                    first.setdefault(self.ports[t], t)
                serving = list(first.values())
            for t in serving:
                rest = list(self.rest[t])
                rest[side] = min(self.size(t), rest[side] + lost)
                self.rest[t] = (rest[0], rest[1])
        if rate:
            self.rates[port] = rate
            self.down.discard(port)
        else:
            self.down.add(port)

    def run(self, may_start: Callable[[int], bool], may_be_done: Callable[[int], bool]) -> bool:
        """False if some transfer never is done."""
        latency, now = self.topology.latency_s, Fraction(0)
        while True:
            self.finish(now, may_start, may_be_done)
            for at, port, rate, lost in self.changes:
                if at == now and port in self.rates:
                    self.change(port, rate, lost, now)
            self.begin(now)
            instants = [at for at, *_ in self.changes] if len(self.done) < len(self.transfers) else []
            instants += [self.begins(t) for t in self.start]
            instants += [self.landed[t] + (0 if self.is_local(t) else latency) for t in self.landed]
            flows = {side: [t for t in self.serving(side) if side or self.begins(t) <= now] for side in (0, 1)}
            speeds = {(t, side): self.speed(t, side, flows[side]) for side in (0, 1) for t in flows[side]}
            instants += [now + self.rest[t][side] / speed for (t, side), speed in speeds.items() if speed]
            if self.model == "fifo":
                instants += [at for at in (self.comes(t, now) for t in self.coming()) if at is not None]
                instants += [self.reaches(t) for t in self.coming()]
                instants += [self.is_over(t) for t in self.taken]
            instants = [at for at in instants if at > now]
            if not instants:
                return len(self.done) == len(self.transfers)
            for (t, side), speed in speeds.items():
                rest = list(self.rest[t])
                rest[side] = max(Fraction(0), rest[side] - speed * (min(instants) - now))
                self.rest[t] = (rest[0], rest[1])
            now = min(instants)

    def finish(self, now: Fraction, may_start: Callable[[int], bool], may_be_done: Callable[[int], bool]) -> None:
        """All that ends at `now`, and what that allows."""
        moments = self.ready, self.start, self.sent, self.come, self.landed, self.done
        before = -1
        while before != sum(map(len, moments)):
            before = sum(map(len, moments))
            for t in range(len(self.transfers)):
                if t not in self.ready and may_start(t):
                    self.ready[t] = now
                if t in self.ready and t not in self.start and (self.model == "fair" or not self.ports[t]):
                    self.start[t] = now
                if t in self.start and t not in self.sent and self.begins(t) <= now:
                    if self.model == "fifo" and self.ports[t] and t not in self.come:
                        comes = self.comes(t, now)
                        if comes is not None and comes <= now:
                            self.come[t] = now
                    if self.rest[t][0] == 0 or not self.ports[t]:
                        self.sent[t] = now
                through = self.model != "fifo" or not self.ports[t] or (t in self.taken and self.rest[t][1] == 0)
                passed = self.model != "fifo" or self.is_over(t) <= now
                if t in self.sent and t not in self.landed and through and passed:
                    self.landed[t] = now
                latency = 0 if self.is_local(t) else self.topology.latency_s
                if t in self.landed and t not in self.done and self.landed[t] + latency <= now and may_be_done(t):
                    self.done[t] = now

    def begin(self, now: Fraction) -> None:
        """All that ports take at `now`."""
        if self.model == "fair":
            return
        for t in sorted(self.ready.keys() - self.start.keys(), key=lambda t: (self.ready[t], t)):
            held = {port for other in self.serving(0) for port in self.ports[other][:2]} | self.down
            if not held & set(self.ports[t][: 2 if self.model == "exclusive" else 1]):
                self.start[t] = now
                if self.model == "exclusive" and self.ways[t]:
                    free = [each[uplink][1] for each in self.passed for uplink in self.ways[t] if uplink in each]
                    self.waits[t] = begins = max([self.begins(t), *free])
                    self.passed[t] = {
                        uplink: (begins, begins + self.size(t) / self.rates[uplink]) for uplink in self.ways[t]
                    }
        if self.model == "exclusive":
            return
        self.pass_uplinks(now)
        for t in self.coming():
            comes = self.comes(t, now)
            if comes is not None and comes <= now:
                self.come[t] = now
        for t in sorted(self.come.keys() - self.taken.keys(), key=lambda t: (self.turn.get(t, 0), self.come[t], t)):
            held = {self.ports[other][1] for other in self.serving(1)} | self.down
            if self.ports[t][1] not in held:
                self.taken[t] = now


def refer_transfers(
    transfers: Transfers, topology: Topology, model: Model, overhead: Fraction, changes: RateChanges = ()
) -> Reference:
    reference = Reference(transfers, topology, model, overhead, changes)
    assert reference.run(
        lambda t: (
            all(int(u) in reference.done for u in transfers.after[t])
            and all(int(u) in reference.sent for u in transfers.order[t])
        ),
        lambda t: True,
    )
    return reference


def refer_plan(
    plan: Plan,
    topology: Topology,
    model: Model,
    overhead: Fraction,
    changes: RateChanges = (),
    made: Callable[..., Reference] = Reference,
) -> Reference | None:
    """The rules of a plan, read off its instructions; None if it never ends."""
    reference = made(plan.transfers, topology, model, overhead, changes)
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


def in_pods(rng: random.Random, topology: Topology) -> Topology:
    """The same servers, most of them in two or three pods whose uplinks are slower or faster than their NICs."""

    def rate() -> Fraction:
        return Fraction(rng.choice((1, 1, 2, 3, 4, 6)), rng.choice((1, 2, 3)))

    members: dict[int, list[int]] = {}
    for server in range(len(topology.servers)):
        members.setdefault(rng.choice((0, 0, 1, 1, 2, -1)), []).append(server)
    members.pop(-1, None)
    return replace(topology, pods=tuple(Pod(f"p{k}", tuple(own), rate(), rate()) for k, own in members.items()))


def with_own_nics(rng: random.Random) -> Topology:
    """Two or three servers of one to three GPUs behind a fabric, each GPU with a NIC or two; some NICs are lost."""

    def rate(most: int) -> Fraction:
        return Fraction(rng.randint(1, most), rng.choice((1, 1, 3)))

    servers: list[Server] = []
    for index in range(rng.randint(2, 3)):
        gpus = rng.randint(1, 3)
        nics = tuple(
            Nic(rng.randrange(2), rate(4), rate(4), failed=gpu > 0 and rng.random() < 0.3, gpu=gpu)
            for gpu in range(gpus)
            for _ in range(rng.choice((1, 1, 2)))
        )
        servers.append(Server(f"h{index}", gpus, nics, rng.randint(8, 9) + rate(4)))
    if all(server.gpus == 1 for server in servers):
        servers[0] = Server("h0", 2, (*servers[0].nics, Nic(1, rate(4), rate(4), gpu=1)), Fraction(8))
    latency_s = rng.choice((Fraction(0), Fraction(1), Fraction(1, 3)))
    topology = Topology(tuple(servers), latency_s, rail_only=rng.random() < 0.5)
    return in_pods(rng, topology) if rng.random() < 0.4 else topology


def cabled(rng: random.Random) -> Topology:
    """Three to six GPUs in a ring of cables each way, and a few more cables."""
    n = rng.randint(3, 6)
    pairs = {(a, (a + step) % n) for a in range(n) for step in (1, n - 1)}
    pairs |= {(a, b) for a in range(n) for b in range(n) if a != b and rng.random() < 0.2}
    links = tuple(GraphLink(a, b, Fraction(rng.randint(1, 4), rng.choice((1, 1, 3)))) for a, b in sorted(pairs))
    names = tuple(f"h{rank}" for rank in range(n))
    graph = Graph(names, (), links)
    return Topology(enclose(graph, names), rng.choice((Fraction(0), Fraction(1, 3))), graph=graph)


def random_transfers(rng: random.Random, n_ranks: int, routes: Sequence[Collection[int]] | None = None) -> Transfers:
    """Up to 18 between any two ranks or, with `routes`, from a rank to those that it has a route to."""
    n = rng.randint(1, 18)
    ends = [(rng.randrange(n_ranks), rng.randrange(n_ranks)) for _ in range(n)]
    if routes is not None:
        ends = [(src, rng.choice(sorted({src, *routes[src]}))) for src, _ in ends]
    after = [[u for u in range(t) if rng.random() < 0.1] for t in range(n)]
    order = [[u for u in range(t) if ends[u][0] == ends[t][0] and rng.random() < 0.2] for t in range(n)]
    return transfers_of(ends, [rng.choice((4, 8, 8, 16, 24)) for _ in range(n)], after, order, n_ranks)


def transfers_of(
    ends: list[tuple[int, int]], sizes: list[int], after: list[list[int]], order: list[list[int]], n_ranks: int
) -> Transfers:
    zero = column([0] * len(ends))
    return Transfers(
        *(Collective("allreduce", n_ranks), "sum", "float32", 64, 0, ("all",)),
        column(src for src, _ in ends),
        column(dst for _, dst in ends),
        *(zero, zero, zero),
        column(sizes),
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


def random_changes(rng: random.Random, topology: Topology) -> RateChanges:
    """Up to four of the rates of NIC ports; no port stays down for good."""
    changes: list[tuple[Fraction, str, Fraction, int]] = []
    for _ in range(rng.randint(1, 3)):
        server = rng.choice(topology.servers)
        port = f"{rng.choice(('out', 'in'))} {server.name}"
        at = Fraction(rng.randint(0, 40), rng.choice((1, 2)))
        if any(port == other and abs(at - when) < 4 for when, other, _, _ in changes):
            continue
        rate = Fraction(rng.choice((0, 0, 1, 2, 3, 4)), rng.choice((1, 1, 3)))
        changes.append((at, port, rate, rng.choice((0, 0, 2, 6, 100))))
        if rate == 0:
            changes.append((at + rng.randint(1, 3), port, Fraction(rng.choice((1, 2, 3))), 0))
    changes.sort()
    return changes


def run(
    plan: Plan | Transfers, topology: Topology, model: Model, overhead: Fraction, changes: RateChanges = ()
) -> Timing:
    if not changes:
        return simulate(plan, topology, model=model, overhead_s=float(overhead))
    ports = PortMap.of(topology)
    mine = [Change(at, ports.names.index(port), rate, lost) for at, port, rate, lost in changes]
    return run_once(plan, PortNetwork(ports, ports.rates, topology.latency_s, overhead, mine), model)


def check(timing: Timing, wanted: Reference) -> None:
    """To the last bit where the clock is exact."""
    for found, moments in ((timing.start_s, wanted.start), (timing.sent_s, wanted.sent), (timing.end_s, wanted.done)):
        exact = [float(moments[t]) for t in range(len(found))]
        if timing.model == "fair":
            assert found.tolist() == pytest.approx(exact, rel=1e-9, abs=1e-12)
        else:
            assert found.tolist() == exact
    if timing.model == "fifo":
        assert {t: timing.taken_s[t] for t in wanted.taken} == {t: float(at) for t, at in wanted.taken.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_transfers(seed: int, model: Model) -> None:
    rng = random.Random(seed)
    topology = random_topology(rng)
    transfers = random_transfers(rng, topology.n_ranks)
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    check(run(transfers, topology, model, overhead), refer_transfers(transfers, topology, model, overhead))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", sampled(SEEDS, every=2))
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
        check(run(plan, topology, model, overhead), wanted)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(20))
def test_striping_over_equal_rails_is_pooling(seed: int, model: Model) -> None:
    """Where every transfer has bytes for each of the rails in proportion, and they keep step."""
    rng = random.Random(3000 + seed)
    n_rails = rng.choice((2, 4))
    servers = tuple(
        Server(f"h{index}", 1, tuple(Nic(rail, rate, rate) for rail in range(n_rails)))
        for index in range(rng.randint(2, 5))
        for rate in [Fraction(rng.choice((1, 2, 3)))]
    )
    topology = Topology(servers, rng.choice((Fraction(0), Fraction(1, 3))), rail_only=True)
    plan = random_plan(rng, random_transfers(rng, topology.n_ranks))
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    try:
        pooled = simulate(plan, topology, model=model, overhead_s=float(overhead))
    except PlanError:
        with pytest.raises(PlanError, match="never"):
            run_striped(plan, topology, overhead, model)
        return
    striped = run_striped(plan, topology, overhead, model)
    assert striped.start_s.tolist() == pytest.approx(pooled.start_s.tolist(), rel=1e-9)
    assert striped.sent_s.tolist() == pytest.approx(pooled.sent_s.tolist(), rel=1e-9)
    assert striped.end_s.tolist() == pytest.approx(pooled.end_s.tolist(), rel=1e-9)


def check_with_changes(seed: int, model: Model) -> None:
    rng = random.Random(2000 + seed)
    topology = random_topology(rng)
    plan = random_plan(rng, random_transfers(rng, topology.n_ranks))
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    changes = random_changes(rng, topology)
    wanted = refer_plan(plan, topology, model, overhead, changes)
    if wanted is None:
        with pytest.raises(PlanError, match="never"):
            run(plan, topology, model, overhead, changes)
    else:
        check(run(plan, topology, model, overhead, changes), wanted)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", sampled(SEEDS, every=2))
def test_random_plans_whose_rates_change(seed: int, model: Model) -> None:
    check_with_changes(seed, model)


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", POD_SEEDS)
def test_random_plans_on_pods(seed: int, model: Model, changing: bool) -> None:
    """Uplinks between the ports, with and without rates of NICs that change."""
    check_on_pods(seed, model, changing)


def check_on_pods(seed: int, model: Model, changing: bool) -> None:
    rng = random.Random(4000 + seed)
    topology = in_pods(rng, random_topology(rng))
    plan = random_plan(rng, random_transfers(rng, topology.n_ranks))
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    changes = random_changes(rng, topology) if changing else ()
    wanted = refer_plan(plan, topology, model, overhead, changes)
    if wanted is None:
        with pytest.raises(PlanError, match="never"):
            run(plan, topology, model, overhead, changes)
    else:
        check(run(plan, topology, model, overhead, changes), wanted)


def check_wired(seed: int, model: Model) -> None:
    rng = random.Random(6000 + seed)
    topology = cabled(rng) if seed % 3 == 0 else with_own_nics(rng)
    assert topology.wired is not None
    plan = random_plan(rng, random_transfers(rng, topology.n_ranks, topology.wired.routes))
    overhead = rng.choice((Fraction(0), Fraction(1, 2)))
    wanted = refer_plan(plan, topology, model, overhead)
    if wanted is None:
        with pytest.raises(PlanError, match="never"):
            run(plan, topology, model, overhead)
    else:
        check(run(plan, topology, model, overhead), wanted)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", sampled(range(120), every=2))
def test_random_plans_on_nics_of_gpus_and_on_cables(seed: int, model: Model) -> None:
    """A GPU's fabric and its NIC work at the same time; rails and pods beyond the NIC; cables have two ends."""
    check_wired(seed, model)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_random_plans_on_nics_of_gpus_and_on_cables(model: Model) -> None:
    for seed in range(120, 1120):
        print(f"seed {seed}")
        check_wired(seed, model)


def test_whose_nic_it_is_makes_a_difference() -> None:
    """Else the tests above would show nothing: with pooled NICs other times come out."""
    for model in MODELS:
        other = 0
        for seed in range(1, 40):
            rng = random.Random(6000 + seed)
            topology = with_own_nics(rng)
            assert topology.wired is not None
            transfers = random_transfers(rng, topology.n_ranks, topology.wired.routes)
            nics = [tuple(replace(nic, gpu=None) for nic in server.nics) for server in topology.servers]
            servers = tuple(replace(server, nics=own) for server, own in zip(topology.servers, nics, strict=True))
            pooled = replace(topology, servers=servers, rail_only=False)
            times = [simulate(transfers, each, model=model).end_s.tolist() for each in (topology, pooled)]
            other += times[0] != times[1]
        assert other >= 15


@pytest.mark.parametrize(
    ("model", "seed"),
    [
        ("fifo", 584),  # the first byte would come to an uplink at the instant at which its out port goes down
        ("fifo", 1694),  # what has left would come to its in port at the instant at which that becomes faster
        ("fifo", 2378),
        ("fair", 2854),  # bytes are lost by the first of two transfers that have sent none
        ("fair", 2716),  # and while a transfer that has less to send is still in its overhead
        ("fair", 3129),
    ],
)
def test_rates_that_change_at_the_instant_of_a_message(model: Model, seed: int) -> None:
    check_on_pods(seed, model, True)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_random_plans_on_pods(model: Model) -> None:
    for seed in range(len(POD_SEEDS), len(POD_SEEDS) + 1000):
        print(f"seed {seed}")
        check_on_pods(seed, model, seed % 2 == 0)


@pytest.mark.parametrize("seed", POD_SEEDS)
def test_without_pods_both_fifo_loops_say_the_same(seed: int) -> None:
    """A pod of one server and an uplink as fast as light is no pod."""
    rng = random.Random(5000 + seed)
    topology = random_topology(rng)
    plan = random_plan(rng, random_transfers(rng, topology.n_ranks))
    changes = random_changes(rng, topology)
    pods = tuple(Pod(f"p{k}", (k,), Fraction(10**9), Fraction(10**9)) for k in range(len(topology.servers)))
    try:
        wanted = run(plan, topology, "fifo", Fraction(0), changes)
    except PlanError:
        return
    found = run(plan, replace(topology, pods=pods), "fifo", Fraction(0), changes)
    assert found.end_s.tolist() == pytest.approx(wanted.end_s.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("out", "up", "faster_at", "ends"),
    [
        (4, 1, 1, 8),  # everything has left, and the uplink has not passed it on
        (1, 4, 1, 8),  # the last byte has not left
        (4, 1, 12, 12.25),  # the uplink is through before
    ],
)
def test_an_in_port_that_becomes_faster_waits_for_what_is_still_to_come(
    out: int, up: int, faster_at: int, ends: float
) -> None:
    """8 bytes to an in port that carries half a byte a second, and then eight."""
    nic, slow, fast = Nic(0, Fraction(out), Fraction(out)), Fraction(1, 2), Fraction(8)
    servers = (Server("a", 1, (nic,)), Server("b", 1, (replace(nic, in_=slow),)))
    pods = (Pod("p", (0,), Fraction(up), Fraction(up)), Pod("q", (1,), Fraction(4), Fraction(4)))
    topology = Topology(servers, pods=pods)
    transfers = transfers_of([(0, 1)], [8], [[]], [[]], 2)
    changes = [(Fraction(faster_at), "in b", fast, 0)]
    found = run(transfers, topology, "fifo", Fraction(0), changes)
    assert found.end_s.tolist() == [ends]
    check(found, refer_transfers(transfers, topology, "fifo", Fraction(0), changes))


def test_uplinks_make_a_difference() -> None:
    """Else the tests above would show nothing."""
    for model in MODELS:
        later = 0
        for seed in SEEDS:
            rng = random.Random(4000 + seed)
            topology = random_topology(rng)
            pods = in_pods(rng, topology)
            transfers = random_transfers(rng, topology.n_ranks)
            ends = run(transfers, topology, model, Fraction(0)).end_s.tolist()
            later += run(transfers, pods, model, Fraction(0)).end_s.tolist() != ends
        assert later > len(SEEDS) / 4


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_random_plans_whose_rates_change(model: Model) -> None:
    for seed in range(len(SEEDS), len(SEEDS) + 1000):
        print(f"seed {seed}")
        check_with_changes(seed, model)


def test_the_changes_make_a_difference() -> None:
    """Else the tests above would show nothing: most random changes move the end, and so do the bytes lost."""
    later, lost = 0, 0
    for seed in SEEDS:
        rng = random.Random(2000 + seed)
        topology = random_topology(rng)
        transfers = random_transfers(rng, topology.n_ranks)
        changes = random_changes(rng, topology)
        ends = run(transfers, topology, "fifo", Fraction(0), changes).end_s.tolist()
        later += ends != run(transfers, topology, "fifo", Fraction(0)).end_s.tolist()
        kept = [(at, port, rate, 0) for at, port, rate, _ in changes]
        lost += ends != run(transfers, topology, "fifo", Fraction(0), kept).end_s.tolist()
    assert later > len(SEEDS) / 4
    assert lost > len(SEEDS) / 20
