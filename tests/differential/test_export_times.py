"""GOAL and Chakra, timed by small interpreters of the two simulators' rules, against `optcc simulate` with fifo ports.

Both know a network in which a port carries one message at a time and the core stores: an out port is busy for a
message's time, an in port from then on that the message has come to it and the port is free. They differ in what a
statement is:

    GOAL (LogGOPSim with -L 0 -o 0 -g 0 -O 0 -G 1)   a send ends when its last byte has left; a message of b bytes
                                                      takes b - 1 ticks; NICs of other numbers are other ports
    Chakra (ASTRA-sim, analytical)                    a SEND ends when its message has arrived; ports serve in the order
                                                      in which SENDs are issued; a COMP takes no time here
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import pytest

from optcc.collective import Collective
from optcc.experiments.simulator_exports import (
    ASTRA_SIM,
    CHAKRA_PIECES,
    CHAKRA_SCHEDULES,
    CHAKRA_SLOTS,
    GOAL_SCHEDULES,
    GOAL_SLOTS,
    LOGGOPSIM,
    RATE,
    SHAPES,
    SimulatorExports,
    plans,
)
from optcc.export import chakra, write_chakra, write_goal
from optcc.plan import Plan
from optcc.planner import LIBRARY, build
from optcc.simulate import simulate
from optcc.topology import Topology
from tests.golden.readers import read_chakra, read_goal

WITHIN = 0.02
OVERTAKEN = {("double-binary-tree", 8, 8, 8)}
"""Schedule, slots, ranks, segments, where a message that comes first is served behind another one: that is not in the
file, and costs 3 %."""
Node = tuple[int, str]
"""A rank, and the name of what it does."""
BYTES = 240_000


class Network:
    """Ports in time: what is sent leaves, arrives, and then things wait for that no more."""

    def __init__(self) -> None:
        self.out_free: dict[tuple[int, int], float] = {}
        self.in_free: dict[tuple[int, int], float] = {}

    def send(self, src: int, dst: int, port: int, lasts: float, now: float) -> tuple[float, float]:
        """When the message has left, and when its first byte is at the other end."""
        start = max(now, self.out_free.get((src, port), 0.0))
        self.out_free[src, port] = start + lasts
        return start + lasts, start

    def take(self, dst: int, port: int, lasts: float, now: float) -> float:
        """When the message has arrived whole that is at the in port `now`."""
        self.in_free[dst, port] = max(now, self.in_free.get((dst, port), 0.0)) + lasts
        return self.in_free[dst, port]


class Dependencies:
    """Counts down what each node waits for."""

    def __init__(self, waits: dict[Node, list[Node]]) -> None:
        self.missing = {node: len(before) for node, before in waits.items()}
        self.opens: dict[Node, list[Node]] = {}
        for node, before in waits.items():
            for each in before:
                self.opens.setdefault(each, []).append(node)

    def done(self, node: Node) -> Iterator[Node]:
        for each in self.opens.get(node, ()):
            self.missing[each] -= 1
            if self.missing[each] == 0:
                yield each


def time_goal(text: str) -> float:
    """Ticks of LogGOPSim."""
    steps = {(rank, label): step for rank, own in enumerate(read_goal(text)) for label, step in own.items()}
    started = {node: (node[0], f"{node[1]} posted") for node in steps}
    waits = {
        node: [(node[0], each) for each in step.after_done] + [started[node[0], each] for each in step.after_start]
        for node, step in steps.items()
    }
    receiver = {step.tag: node for node, step in steps.items() if step.kind == "recv"}
    waiting, network = Dependencies(waits), Network()
    heap: list[tuple[float, int, str, Node]] = []
    posted: set[Node] = set()
    arrived: set[Node] = set()
    number = now = 0.0
    ended = 0

    def push(time: float, what: str, node: Node) -> None:
        nonlocal number
        number += 1
        heappush(heap, (time, int(number), what, node))

    def happen(node: Node) -> None:
        for each in waiting.done(node):
            push(now, "start", each)

    for node, count in waiting.missing.items():
        if not count:
            push(0.0, "start", node)
    while heap:
        now, _, what, node = heappop(heap)
        step = steps[node]
        if what == "start":
            happen(started[node])
            if step.kind == "calc":
                push(now + step.size, "end", node)
            elif step.kind == "send":
                left, at_port = network.send(node[0], step.peer, step.nic, step.size - 1, now)
                push(left, "end", node)
                push(at_port, "at port", node)
            else:
                posted.add(node)
                if node in arrived:
                    push(now, "end", node)
        elif what == "at port":
            push(network.take(step.peer, step.nic, step.size - 1, now), "arrive", node)
        elif what == "arrive":
            other = receiver[step.tag]
            arrived.add(other)
            if other in posted:
                push(now, "end", other)
        else:
            ended += 1
            happen(node)
    assert ended == len(steps), "statements never end"
    return now


def time_chakra(files: tuple[bytes, ...], *, stores: bool = False) -> float:
    """Bytes at the rate of a port until ASTRA-sim would be done; `stores`: on its `Switch`, which has a message whole
    before it forwards it."""
    nodes = {(rank, str(each["id"])): each for rank, data in enumerate(files) for each in read_chakra(data)[1]}
    waiting = Dependencies({key: [(key[0], str(each)) for each in node["data_deps"]] for key, node in nodes.items()})
    receiver = {node["comm_tag"][1]: key for key, node in nodes.items() if node["type"] == chakra.RECV}
    network = Network()
    heap: list[tuple[float, tuple[int, int], str, Node]] = []
    issued: set[Node] = set()
    arrived: set[Node] = set()
    now = 0.0
    ended = number = 0

    def push(time: float, what: str, key: Node) -> None:
        nonlocal number
        number += 1
        # At one time a rank issues in the order of the ids.
        heappush(heap, (time, (1, int(key[1])) if what == "issue" else (0, number), what, key))

    for key, count in waiting.missing.items():
        if not count:
            push(0.0, "issue", key)
    while heap:
        now, _, what, key = heappop(heap)
        node = nodes[key]
        ends: list[Node] = []
        if what == "issue" and node["type"] == chakra.SEND:
            size = node["comm_size"][1]
            left, first_byte = network.send(key[0], node["comm_dst"][1], 0, size, now)
            push(left if stores else first_byte, "at port", key)
        elif what == "issue":
            issued.add(key)
            if node["type"] == chakra.COMP or key in arrived:
                ends.append(key)
        elif what == "at port":
            push(network.take(node["comm_dst"][1], 0, node["comm_size"][1], now), "arrive", key)
        else:
            other = receiver[node["comm_tag"][1]]
            arrived.add(other)
            ends += [key, *([other] if other in issued else [])]
        for each in ends:
            ended += 1
            for freed in waiting.done(each):
                push(now, "issue", freed)
    assert ended == len(nodes), "nodes are never issued"
    return now


def made(name: str, n_ranks: int, segments: int, slots: int, **others: Any) -> tuple[Plan, Topology, float]:
    """The plan, its topology, and how long it takes, in bytes at the rate of a port."""
    topology = Topology.parse(f"{n_ranks}@1GB/s")
    plan = build(name, topology, BYTES, segments=segments, slots=slots, ports="fifo", **others).plan
    return plan, topology, simulate(plan, topology, model="fifo").seconds * 1e9


def goal_of(plan: Plan, topology: Topology) -> str:
    return write_goal(plan, topology, simulate(plan, topology, model="fifo")).decode()


def cases(names: tuple[str, ...]) -> list[Any]:
    """Thirty and more, of which those with little to time are in the default tests."""
    found = [(name, *shape) for name in names for shape in SHAPES]
    assert len(found) >= 30
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each[1] * each[2] > 16)) for each in found]


@pytest.mark.parametrize(("name", "n_ranks", "segments"), cases(GOAL_SCHEDULES))
def test_goal_takes_what_simulate_says_with_one_slot(name: str, n_ranks: int, segments: int) -> None:
    plan, topology, wanted = made(name, n_ranks, segments, 1)
    assert time_goal(goal_of(plan, topology)) == pytest.approx(wanted, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["double-binary-tree", "optcc", "optimal", "packed", "shares", "direct"])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_goal_takes_what_simulate_says_with_more_slots(name: str, slots: int) -> None:
    for n_ranks, segments in SHAPES:
        plan, topology, wanted = made(name, n_ranks, segments, slots)
        within = 0.03 if (name, slots, n_ranks, segments) in OVERTAKEN else WITHIN
        assert time_goal(goal_of(plan, topology)) == pytest.approx(wanted, rel=within), (n_ranks, segments)


def test_goal_without_whose_turn_it_is_takes_another_time() -> None:
    plan, topology, wanted = made("optimal", 4, 4, 2)
    assert time_goal(goal_of(plan, topology)) == pytest.approx(wanted, rel=WITHIN)
    assert time_goal(write_goal(plan, topology).decode()) > 1.1 * wanted


@pytest.mark.parametrize(("name", "n_ranks", "segments"), cases(CHAKRA_SCHEDULES))
def test_chakra_takes_what_simulate_says_where_slots_do_not_bind(name: str, n_ranks: int, segments: int) -> None:
    plan, _, wanted = made(name, n_ranks, segments, 64)
    assert time_chakra(write_chakra(plan)) == pytest.approx(wanted, rel=WITHIN)


OTHERS = {
    name: each.collective
    for name, each in LIBRARY.items()
    if each.collective not in ("allreduce", "alltoallv") and not name.startswith("star-")
}
"""Schedules by the collective that they perform; stars want NICs of GPUs, which neither format has."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow), CHAKRA_SLOTS])
@pytest.mark.parametrize("name", OTHERS)
def test_other_collectives_take_what_simulate_says(name: str, slots: int) -> None:
    """GOAL with any slots; Chakra, which has none, where none is waited for."""
    root = {"root": 1} if OTHERS[name] in ROOTED else {}
    for n_ranks, segments in ((3, 2), (8, 2)) if slots != 2 else ((3, 2), (4, 1), (4, 4), (8, 2)):
        plan, topology, wanted = made(name, n_ranks, segments, slots, **root)
        assert plan.transfers.collective.name == OTHERS[name]
        assert time_goal(goal_of(plan, topology)) == pytest.approx(wanted, rel=WITHIN)
        if slots == CHAKRA_SLOTS:
            assert time_chakra(write_chakra(plan)) == pytest.approx(wanted, rel=WITHIN)


@pytest.mark.parametrize("name", [name for name, each in LIBRARY.items() if each.collective == "alltoallv"])
def test_blocks_of_different_sizes_take_what_simulate_says(name: str) -> None:
    counts = Collective.all_to_all_v([[1, 9, 0, 2], [3, 0, 4, 0], [0, 0, 0, 7], [5, 1, 6, 2]])
    plan, topology, wanted = made(name, 4, 2, 2, collective=counts)
    assert time_goal(goal_of(plan, topology)) == pytest.approx(wanted, rel=WITHIN)
    assert time_chakra(write_chakra(plan)) == pytest.approx(wanted, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [LOGGOPSIM, ASTRA_SIM])
def test_the_simulators_themselves_take_what_their_interpreters_say(tool: str) -> None:
    """Of the record: the rows whose plans are still compiled alike, which must be most; in pieces the small ones."""
    record = SimulatorExports.read()
    recorded = {
        (row.schedule, row.slots, row.ranks, row.segments, row.pieces): row for row in record.rows if row.tool == tool
    }
    slots, names = (GOAL_SLOTS, GOAL_SCHEDULES) if tool == LOGGOPSIM else ((CHAKRA_SLOTS,), CHAKRA_SCHEDULES)
    alike, apart = 0, []
    for count in slots:
        for name, ranks, segments, plan, topology, _ in plans(names, count):
            for pieces in (1,) if tool == LOGGOPSIM else CHAKRA_PIECES:
                row = recorded.pop((name, count, ranks, segments, pieces))
                if row.digest != plan.digest or (pieces > 1 and ranks * segments > 16):
                    continue
                alike += 1
                if tool == LOGGOPSIM:
                    wanted = time_goal(goal_of(plan, topology)) / RATE
                else:
                    wanted = time_chakra(write_chakra(plan, pieces), stores=True) / RATE
                if row.took_s != pytest.approx(wanted, rel=2e-3):
                    apart.append((name, count, ranks, segments, pieces))
    assert not recorded and alike >= 20
    assert not apart


def test_goal_without_what_tells_of_slots_takes_another_time() -> None:
    plan, topology, wanted = made("optcc", 8, 2, 1)
    lines = [
        line
        for line in write_goal(plan, topology).decode().splitlines()
        if not line.startswith(("k", "q")) and " requires q" not in line
    ]
    assert time_goal("\n".join(lines) + "\n") != pytest.approx(wanted, rel=WITHIN)
