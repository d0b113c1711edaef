"""Exports, read back by independent readers and run by machines: results, orders, times, refusals, and the command.

The machines (tests/golden/readers.py) perform a file as the tool that it is for does, in an order drawn from the seed,
and find races whatever the order. Planted faults show that they would notice.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc import cli
from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.commands.compile import FORMATS
from optcc.compiler import compile_schedule
from optcc.errors import InputError, OptccError, PlanError, TopologyError
from optcc.export import (
    chakra,
    goal,
    msccl,
    write_chakra,
    write_goal,
    write_msccl_xml,
    write_mscclpp_json,
    write_perfetto,
)
from optcc.passes.lower import lower
from optcc.plan import Plan
from optcc.planner import build_plan
from optcc.schedule import COPY, OPS, REDUCE
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.timing import MODELS
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verify.plan import verify_plan
from tests.golden.readers import (
    Fault,
    MscclppMachine,
    check_allreduce,
    parse_json,
    read_chakra,
    read_goal,
    run_chakra,
    run_goal,
    run_msccl,
)
from tests.negative.edits import Draft
from tests.sample import sampled

RAGGED = {2: 4 * 7, 3: 4 * 17, 4: 4 * 31}
"""Elements of float32 that no schedule cuts evenly."""


def plan_of(name: str, n_ranks: int, size: int, segments: int = 1, **options: Any) -> tuple[Plan, Topology]:
    """A schedule of the library with its last rank at half rate."""
    topology = Topology.parse(f"{n_ranks}@1GB/s,{n_ranks - 1}=500MB/s" if n_ranks > 1 else "1@1GB/s")
    schedule = SCHEDULES[name].build(topology, segments)
    return compile_schedule(schedule, size_bytes=size, topology=topology, **options), topology


def library(
    sizes: Callable[[int], int], segments: int = 2, counts: Sequence[int] = (2, 3, 4)
) -> Iterator[tuple[Plan, Topology]]:
    """Every schedule at these numbers of ranks, as far as it can be built, for both models of ports."""
    for name in SCHEDULES:
        for n_ranks in counts:
            for ports in MODELS:
                try:
                    yield plan_of(name, n_ranks, sizes(n_ranks), segments, ports=ports)
                except OptccError:
                    continue


def even(n_ranks: int) -> int:
    """A size that pipelines of all kinds cut into whole 16 B."""
    return 16 * 5040


def ragged(n_ranks: int) -> int:
    return RAGGED[n_ranks]


both_sizes = pytest.mark.parametrize("sizes", [pytest.param(even, marks=pytest.mark.slow), ragged])


def hand(rows: list[tuple[int, int, int, int]], **options: Any) -> Plan:
    """A plan of copies (src, dst, offset, bytes), unfused; options: n_ranks, size, scratch, slots, after, op, ends."""
    n = len(rows)
    src, dst, offset, length = (column(each) for each in zip(*rows, strict=True))
    zero = column([0] * n)
    transfers = Transfers(
        *(Collective("allreduce", options.get("n_ranks", 2)), "sum", "float32"),
        *(options.get("size", 1024), options.get("scratch", 0), ("all",)),
        *(src, dst, column([options.get("op", COPY)] * n), offset, column(options.get("ends", offset))),
        *(length, zero, zero, zero),
        after=Lists.of(options.get("after", [[]] * n)),
        order=Lists.empty(n),
    )
    return lower("hand", transfers, column(range(n)), options.get("slots", 2))


# GOAL


@both_sizes
def test_goal_says_every_message_once_and_runs_to_its_end(sizes: Callable[[int], int]) -> None:
    for plan, topology in library(sizes):
        ranks = read_goal(write_goal(plan, topology, simulate(plan, topology, model="fifo")).decode())
        run_goal(ranks)
        transfers = plan.transfers
        sent = {
            step.tag: (rank, step.peer)
            for rank, steps in enumerate(ranks)
            for step in steps.values()
            if step.kind == "send" and step.nic == 0
        }
        moving = np.flatnonzero(transfers.src != transfers.dst).tolist()
        assert sent == {t: (transfers.src[t], transfers.dst[t]) for t in moving}, plan.name
        data = [step for steps in ranks for step in steps.values() if step.nic == 0]
        assert len(data) == 2 * len(moving) + int((transfers.src == transfers.dst).sum())


def test_goal_orders_what_the_plan_orders() -> None:
    """Every dependency between two transfers is a path of `requires` on the rank where they meet."""
    for plan, topology in library(ragged):
        ranks = read_goal(write_goal(plan, topology, simulate(plan, topology, model="fifo")).decode())
        t = plan.transfers
        for later in range(len(t)):
            for earlier in t.after[later].tolist():
                for rank in {int(t.src[later]), int(t.dst[later])} & {int(t.dst[earlier])}:
                    steps = ranks[rank]
                    wanted = {f"r{earlier}", f"c{earlier}"} & set(steps)
                    start = {f"s{later}", f"c{later}"} if t.src[later] == rank else {f"r{later}"}
                    seen, todo = set(), list(start & set(steps))
                    while todo:
                        label = todo.pop()
                        if label not in seen:
                            seen.add(label)
                            todo += steps[label].after_done
                    assert wanted <= seen, f"{plan.name}: {t.describe(later)} after {t.describe(earlier)}"


@pytest.mark.parametrize("n_ranks", [4, 16])
def test_goal_of_a_ring_with_a_slow_rank_takes_what_theory_says(n_ranks: int) -> None:
    """2 (p - 1) steps at half rate, in ticks of a byte at the best rate; LogGOPSim was measured to find the same."""
    plan, topology = plan_of("ring", n_ranks, 1000 * n_ranks)
    ticks = run_goal(read_goal(write_goal(plan, topology).decode()))
    assert ticks == 2 * (n_ranks - 1) * 2 * 1000
    assert Fraction(ticks, 10**9) == Fraction(str(simulate(plan, topology, model="exclusive").seconds))


def test_goal_rounds_sizes_up_and_takes_the_slower_port() -> None:
    plan = hand([(0, 1, 0, 100), (1, 0, 0, 100), (2, 0, 200, 100)], n_ranks=3)
    ranks = read_goal(write_goal(plan, Topology.parse("3@3GB/s,1=2GB/s:1GB/s,2=7GB/s")).decode())
    assert [ranks[0]["s0"].size, ranks[1]["s1"].size, ranks[2]["s2"].size] == [700, 350, 234]
    assert ranks[1]["r0"].size == 700


def test_goal_passes_a_chunk_on_with_the_cpu_that_received_it() -> None:
    plan, topology = plan_of("ring", 4, 4096, 128)
    cpus = set()
    for steps in read_goal(write_goal(plan, topology).decode()):
        for label, step in steps.items():
            cpus.add(step.cpu)
            if label.startswith("s"):
                passed = [steps[each].cpu for each in step.after_done if each.startswith("r")]
                assert not passed or step.cpu in passed
    assert max(cpus) == goal.CPUS - 1


def test_goal_has_a_rank_for_each_server() -> None:
    topology = Topology.parse("2x2@1GB/s")
    plan = build_plan("hierarchical", topology, 4096, segments=1)
    text = write_goal(plan, topology).decode()
    ranks = read_goal(text)
    assert len(ranks) == 2 and "calc 0" in text
    run_goal(ranks)
    crossing = [t for t in range(len(plan.transfers)) if plan.transfers.src[t] // 2 != plan.transfers.dst[t] // 2]
    sends = [step for steps in ranks for step in steps.values() if step.kind == "send" and step.nic == 0]
    assert len(sends) == len(crossing)


def test_goal_tells_of_what_goes_first_at_a_port() -> None:
    """Two that begin at one time; and one that is on its way when the other, which is taken first, begins."""
    plan = hand([(0, 2, 0, 100), (1, 2, 200, 100), (1, 0, 400, 100)], n_ranks=3)
    topology = Topology.parse("3@1GB/s")
    timing = simulate(plan, topology, model="fifo")
    zero, one, other = read_goal(write_goal(plan, topology, timing).decode())
    assert zero["o1"].after_start == ["s0"] and "w1" in one["s1"].after_done and "o1" not in other
    assert not any(label[0] in "ow" for steps in read_goal(write_goal(plan, topology).decode()) for label in steps)
    begins = timing.start_s.copy()
    begins[0] = timing.sent_s[1] / 2
    late = replace(timing, start_s=begins, sent_s=timing.sent_s + begins)
    assert "o1" in read_goal(write_goal(plan, topology, late).decode())[0]
    begins[0] = timing.sent_s[1]
    gone = replace(timing, start_s=begins)
    assert "o1" not in read_goal(write_goal(plan, topology, gone).decode())[0], "it may wait for what has left"


def test_goal_needs_the_plans_topology() -> None:
    plan, _ = plan_of("ring", 3, 96)
    with pytest.raises(TopologyError, match="topology of 4 ranks: the plan is for 3 ranks"):
        write_goal(plan, Topology.parse("4@1GB/s"))


def test_the_goal_reader_notices_faults() -> None:
    plan, topology = plan_of("ring", 3, 96)
    text = write_goal(plan, topology).decode()
    for wrong, what in (
        (text.replace("tag 3", "tag 0"), "twice|differ"),
        (text.replace("recv 32b", "recv 31b", 1), "ends differ|no statement"),
        (re.sub(r"r\d+: recv.*\n", "", text, count=1), "defined|never"),
        (text.replace("}\nrank 1", "s0 requires nobody\n}\nrank 1"), "defined before"),
    ):
        with pytest.raises(Fault, match=what):
            run_goal(read_goal(wrong))


# Chakra


@both_sizes
def test_chakra_says_every_transfer_and_every_wait(sizes: Callable[[int], int]) -> None:
    for plan, _ in library(sizes):
        t = plan.transfers
        files = [read_chakra(data) for data in write_chakra(plan)]
        assert {version for version, _ in files} <= {chakra.VERSION}
        traces = [nodes for _, nodes in files]
        n = run_chakra(traces)
        moving, reducing = t.src != t.dst, t.op == REDUCE
        assert n == 2 * moving.sum() + (moving & reducing).sum() + (~moving).sum(), plan.name
        for rank, nodes in enumerate(traces):
            assert [node["id"] for node in nodes] == list(range(len(nodes)))
            for node in nodes:
                assert node["is_cpu_op"] == (27, 0)
                number = int(node["name"][1:].split()[0])
                assert f"{t.src[number]}->{t.dst[number]} {OPS[t.op[number]]}" in node["name"]
                if node["type"] in (chakra.SEND, chakra.RECV):
                    wanted = (7, t.src[number]), (7, t.dst[number]), (7, number), (9, t.bytes[number])
                    assert tuple(node[f"comm_{key}"] for key in ("src", "dst", "tag", "size")) == wanted
                    assert rank == (t.src[number] if node["type"] == chakra.SEND else t.dst[number])


def test_chakra_orders_what_the_plan_orders() -> None:
    """Every dependency between two transfers is a path of data_deps on the rank where they meet."""
    for plan, _ in library(ragged):
        t = plan.transfers
        traces = [{node["id"]: node for node in read_chakra(data)[1]} for data in write_chakra(plan)]
        last = [
            {int(node["name"][1:].split()[0]): key for key, node in nodes.items() if node["type"] != chakra.SEND}
            for nodes in traces
        ]
        for later in range(len(t)):
            for earlier in t.after[later].tolist():
                rank = int(t.src[later])
                if rank != t.dst[earlier] or t.src[later] == t.dst[later]:
                    continue
                nodes = traces[rank]
                start = next(
                    k for k, node in nodes.items() if node["type"] == chakra.SEND and node["comm_tag"][1] == later
                )
                seen, todo = set(), [start]
                while todo:
                    key = todo.pop()
                    if key not in seen:
                        seen.add(key)
                        todo += nodes[key]["data_deps"]
                assert last[rank][earlier] in seen, f"{plan.name}: {t.describe(later)} after {t.describe(earlier)}"


@pytest.mark.slow
def test_chakra_in_pieces_says_the_same() -> None:
    """The same bytes between the same ranks, each message once, and every wait of the whole for all of its pieces."""
    pieces = 3
    for plan, _ in library(ragged):
        whole, parts = ([read_chakra(data)[1] for data in write_chakra(plan, each)] for each in (1, pieces))
        assert run_chakra(parts) == sum(map(len, parts))
        carried = np.zeros((2, len(plan.transfers)), dtype=np.int64)
        for nodes, cut in zip(whole, parts, strict=True):
            assert [node["id"] for node in cut] == list(range(len(cut)))
            kinds = {node["id"]: node["type"] for node in cut}
            named: dict[str, list[int]] = {}
            for node in cut:
                named.setdefault(f"{node['name']} {node['type']}", []).append(node["id"])
                assert node["type"] != chakra.SEND or chakra.SEND not in {kinds[each] for each in node["data_deps"]}
                if node["type"] == chakra.COMP and (received := named.get(f"{node['name']} {chakra.RECV}")):
                    assert node["data_deps"] == received and len(received) == pieces
                elif node["type"] in (chakra.SEND, chakra.RECV):
                    carried[int(node["type"] == chakra.SEND), node["comm_tag"][1] // pieces] += node["comm_size"][1]
                    assert chakra.RECV not in {kinds[each] for each in node["data_deps"]}, "it waits for all of them"
            assert sum(node["type"] == chakra.SEND for node in cut) == pieces * sum(
                node["type"] == chakra.SEND for node in nodes
            )
        moving = np.where(plan.transfers.src != plan.transfers.dst, plan.transfers.bytes, 0)
        assert (carried == moving).all()


def test_chakra_cannot_be_in_more_pieces_than_bytes() -> None:
    plan = hand([(0, 1, 0, 8)], size=8)
    with pytest.raises(PlanError, match="9 pieces: must be at most 8, the bytes of the shortest message"):
        write_chakra(plan, 9)
    with pytest.raises(InputError, match="pieces 0: must be one or more"):
        write_chakra(plan, 0)


def test_chakra_writes_numbers_of_any_length() -> None:
    nodes = [read_chakra(data)[1] for data in write_chakra(hand([(0, 1, 0, 2**40)] * 200, size=2**41))]
    assert [node["comm_size"] for node in nodes[1]] == [(9, 2**40)] * 200
    assert [node["comm_tag"][1] for node in nodes[0]] == list(range(200))
    plan, _ = plan_of("ring", 4, 4 * 31, segments=40)
    waits = [node["data_deps"] for node in read_chakra(write_chakra(plan)[0])[1]]
    assert any(each > 127 for deps in waits for each in deps)


def test_a_chakra_send_does_not_wait_for_the_one_before_it_in_its_lane() -> None:
    """In ASTRA-sim it ends when its message has arrived: one message would be on its way at a time."""
    plan = hand([(0, 1, 0, 8), (0, 1, 8, 8), (0, 1, 16, 8)], size=24)
    assert len(plan.lanes) == 2
    nodes = read_chakra(write_chakra(plan)[0])[1]
    assert [node["data_deps"] for node in nodes] == [[], [], []]


@both_sizes
def test_no_chakra_send_waits_for_a_send(sizes: Callable[[int], int]) -> None:
    """In the library, in other lanes too, and for fused instructions."""
    waits = 0
    for plan, _ in library(sizes):
        for data in write_chakra(plan):
            nodes = {node["id"]: node for node in read_chakra(data)[1]}
            for node in nodes.values():
                if node["type"] == chakra.SEND:
                    waits += len(node["data_deps"])
                    assert chakra.SEND not in {nodes[each]["type"] for each in node["data_deps"]}, plan.name
    assert waits > 1000


def test_the_chakra_reader_notices_faults() -> None:
    plan, _ = plan_of("ring", 3, 96)
    files = list(write_chakra(plan))
    with pytest.raises(Fault, match="cut within"):
        read_chakra(files[0][:-3])
    traces = [read_chakra(data)[1] for data in files]
    traces[0][0]["data_deps"] = [traces[0][0]["id"]]
    with pytest.raises(Fault, match="never issued"):
        run_chakra(traces)


# Perfetto


@pytest.mark.parametrize("model", sampled(["exclusive", "fifo", "fair"], every=3))
def test_perfetto_shows_the_simulated_times(model: Any) -> None:
    for plan, topology in library(ragged):
        timing = simulate(plan, topology, model=model)
        document = parse_json(write_perfetto(plan, topology, timing))
        events, t = document["traceEvents"], plan.transfers
        assert document["otherData"]["seconds"] == timing.seconds
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for event in events:
            if event["ph"] != "X":
                continue
            number = event["args"]["transfer"]
            place = names[event["pid"], event["tid"]].split(" (")[0]
            side = {"out": t.src, "in": t.dst}[place.split()[-1]]
            assert event["pid"] == side[number] + 1
            first = (timing.start_s if side is t.src else timing.taken_s)[number]
            assert event["ts"] == pytest.approx(1e6 * first, abs=1e-3)
            if side is t.src:
                assert event["ts"] + event["dur"] == pytest.approx(1e6 * timing.sent_s[number], abs=2e-3)
            assert event["name"] == t.stages[t.stage[number]] and event["args"]["bytes"] == t.bytes[number]
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        for slices in tracks.values():
            assert slices == sorted(slices)
            assert all(stop <= start + 1e-6 for (_, stop), (start, _) in pairwise(slices))
        moving = set(np.flatnonzero(t.src != t.dst).tolist())
        for kind in "sf":
            assert {event["id"] for event in events if event["ph"] == kind} == moving
        instants = [event for event in events if event["ph"] == "i"]
        assert len(instants) == len(t) - len(moving)


def test_perfetto_arrows_lie_in_their_slices_and_never_point_back() -> None:
    plan, topology = plan_of("optcc", 4, even(4), 3)
    events = parse_json(write_perfetto(plan, topology, simulate(plan, topology, model="fifo")))["traceEvents"]
    slices: dict[tuple[int, int], Any] = {}
    starts: dict[int, float] = {}
    for before, event in pairwise(events):
        if event["ph"] in "sf":
            assert before["ph"] == "X" and (before["pid"], before["tid"]) == (event["pid"], event["tid"])
            assert before["ts"] <= event["ts"] <= before["ts"] + before["dur"]
            slices[event["id"], event["ph"] == "f"] = before["args"]["transfer"]
            starts.setdefault(event["id"], event["ts"])
            assert event["ts"] >= starts[event["id"]]
    assert all(number == transfer for (number, _), transfer in slices.items())


def test_perfetto_separates_transfers_that_share_a_port() -> None:
    plan, topology = plan_of("direct", 4, even(4))
    events = parse_json(write_perfetto(plan, topology, simulate(plan, topology, model="fair")))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"out", "in", "in (2)"} <= names


def test_perfetto_names_what_stays_in_a_server() -> None:
    topology = Topology.parse("2x2@1GB/s")
    plan = build_plan("hierarchical", topology, 4096, segments=1)
    events = parse_json(write_perfetto(plan, topology, simulate(plan, topology, model="exclusive")))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"out", "in", "gpu 0 out", "gpu 1 in"} <= names
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["h0", "h1"]
    copies = hand([(0, 0, 0, 16)], n_ranks=2, ends=[64])
    local = parse_json(write_perfetto(copies, Topology.parse("2@1GB/s"), simulate(copies, Topology.parse("2@1GB/s"))))
    assert [event["ph"] for event in local["traceEvents"]][-1] == "i"


def test_perfetto_refuses_the_times_of_another_plan() -> None:
    plan, topology = plan_of("ring", 3, 96)
    other, _ = plan_of("ring", 3, 96, 2)
    with pytest.raises(PlanError, match="perfetto: times of 24 transfers: must be 12"):
        write_perfetto(plan, topology, simulate(other, topology))
    with pytest.raises(TopologyError, match="the plan is for 3 ranks"):
        write_perfetto(plan, Topology.parse("2@1GB/s"), simulate(plan, topology))


# MSCCL


def allreduces(sizes: Callable[[int], int], segments: int = 2, counts: Sequence[int] = (2, 3, 4)) -> Iterator[Plan]:
    for plan, _ in library(sizes, segments, counts):
        if plan.collective.name == "allreduce":
            yield plan


@pytest.mark.parametrize("sizes", [even, pytest.param(ragged, marks=pytest.mark.slow)])
def test_msccl_files_reduce_right_in_any_order(sizes: Callable[[int], int], seed: int) -> None:
    """With as few messages in a connection as Simple has, with as many as LL has, each of one chunk or of a step."""
    reasons = []
    plans = list(allreduces(sizes))
    for plan in plans:
        try:
            data = write_msccl_xml(plan)
        except PlanError as error:
            reasons.append(str(error))
            continue
        for slots, chunks in ((2, 1), (8, 1), (2, 71), (8, 71)):
            try:
                check_allreduce(run_msccl(data, seed=seed, slots=slots, chunks_per_message=chunks))
            except Fault as fault:
                pytest.fail(f"{plan.name} on {plan.n_ranks} ranks, {slots} slots, {chunks} chunks: {fault}")
    assert all("steps wait for each other" in reason for reason in reasons)
    assert len(reasons) <= len(plans) * (0.1 if sizes is even else 0.4), (len(plans), reasons)


@pytest.mark.slow
def test_gpu_files_of_more_ranks_reduce_right_in_any_order(seed: int) -> None:
    written = [0, 0]
    for plan in allreduces(even, counts=(5, 6, 8)):
        try:
            data = write_msccl_xml(plan)
            check_allreduce(run_msccl(data, seed=seed))
            written[0] += 1
            data = write_mscclpp_json(plan)
            check_allreduce(MscclppMachine(parse_json(data), seed, calls=2).run(), 2)
            written[1] += 1
        except OptccError:
            continue
    assert written[0] > 40 and written[1] > 10, written


def test_msccl_refuses_steps_that_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of uneven sections sends several chunks before it receives any, and a connection holds two."""
    plan, _ = plan_of("ring", 4, RAGGED[4])
    assert verify_plan(plan).verdict == "proved"
    with pytest.raises(PlanError, match=r"steps wait for each other, one of them for rank \d lane \d #\d+ send bytes"):
        write_msccl_xml(plan)
    monkeypatch.setattr(msccl, "_check_progress", lambda plan, blocks: None)
    data = write_msccl_xml(plan)
    with pytest.raises(Fault, match="deadlock"):
        run_msccl(data, slots=2)
    check_allreduce(run_msccl(data, slots=8))


def test_msccl_judges_progress_as_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused does deadlock, at every seed: no file is refused without need."""
    checked: list[Exception | None] = []
    judge = msccl._check_progress

    def note(plan: Plan, blocks: Any) -> None:
        try:
            judge(plan, blocks)
            checked.append(None)
        except PlanError as error:
            checked.append(error)

    monkeypatch.setattr(msccl, "_check_progress", note)
    for plan in allreduces(ragged):
        data = write_msccl_xml(plan)
        said = "none"
        try:
            run_msccl(data, seed=len(checked))
        except Fault as fault:
            said = str(fault)
        assert ("deadlock" in said) == (checked[-1] is not None), f"{plan.name}: {said}, {checked[-1]}"
    assert any(checked) and not all(checked)


def _edit(data: bytes, pattern: str, by: str, nth: int = 0) -> bytes:
    text = data.decode()
    found = list(re.finditer(pattern, text))[nth]
    return (text[: found.start()] + found.expand(by) + text[found.end() :]).encode()


@pytest.mark.parametrize(
    ("pattern", "by", "what"),
    [
        ('type="rrc"', 'type="r"', "wrong result"),
        ('type="rrc" srcbuf="i" srcoff="0"', 'type="rrc" srcbuf="i" srcoff="2"', "wrong result|being"),
        (r'type="s" srcbuf="i" srcoff="(\d+)"', 'type="s" srcbuf="i" srcoff="99"', "out of the buffer"),
        (r"<step [^>]*/>\n(?=</tb>)", "", "left over|deadlock|waits for no step"),
        ('hasdep="1"', 'hasdep="0"', "waits for ever"),
        ('(type="s" .*) depid="\\d+" deps="\\d+"', '\\1 depid="-1" deps="-1"', "being"),
        ('cnt="1"', 'cnt="72"', "count"),
        ('<tb id="0"', '<tb id="7"', "dense"),
        ("<algo", '<?xml version="1.0"?>\n<algo', "more than the reader knows"),
    ],
)
def test_the_msccl_machine_notices_faults(pattern: str, by: str, what: str) -> None:
    plan, _ = plan_of("direct", 3, 16 * 9)
    data = write_msccl_xml(plan)
    check_allreduce(run_msccl(data))
    with pytest.raises(Fault, match=what):
        check_allreduce(run_msccl(_edit(data, pattern, by)))


def test_most_waits_of_an_msccl_file_are_needed() -> None:
    """Of the waits in a file each is left out in turn; races are found at most of them, whatever the order."""
    plan, _ = plan_of("direct", 4, 16 * 16)
    data = write_msccl_xml(plan)
    pattern = r' depid="\d+" deps="\d+"'
    n, found = len(re.findall(pattern, data.decode())), 0
    for nth in range(n):
        try:
            check_allreduce(run_msccl(_edit(data, pattern, ' depid="-1" deps="-1"', nth)))
        except Fault:
            found += 1
    assert n > 20 and found > n / 2, (n, found)


def test_gpu_formats_refuse_plans_that_cannot_run() -> None:
    """What nobody receives, and what waits for its own successor."""
    plan = hand([(0, 1, 0, 16), (0, 1, 16, 16)])
    lost, backwards = Draft.of(plan), Draft.of(plan)
    lost.remove(lost.find(1, "receive", 1))
    backwards.find(0, "send").after = [backwards.find(0, "send", 1)]
    for write in (write_msccl_xml, write_mscclpp_json):
        with pytest.raises(PlanError, match=r"transfer #1 0->1 copy .*: must be received once"):
            write(lost.build())
        with pytest.raises(PlanError, match="must not wait for a later one of its lane"):
            write(backwards.build())


def test_gpu_formats_refuse_a_plan_that_leans_on_the_order_of_a_lane() -> None:
    """The second send passes on what the first one waits for, and waits for nothing but its turn."""
    plan = hand([(1, 0, 0, 16), (0, 2, 0, 16), (0, 3, 0, 16)], n_ranks=4, after=[[], [0], [0]])
    draft = Draft.of(plan)
    draft.find(0, "send", 1).after = []
    assert verify_plan(draft.build()).properties["races"] == "proved"
    for write in (write_msccl_xml, write_mscclpp_json):
        write(plan)
        with pytest.raises(PlanError, match=r"rank 0 lane 1 #2 send .*: must wait itself for rank 0 lane 0 #0 receive"):
            write(draft.build())


@pytest.mark.parametrize(
    ("rows", "options", "what"),
    [
        ([(0, 1, 4 * i, 4) for i in range(257)], {"size": 2048}, "steps of a thread block: 257: must be at most 256"),
        ([(0, 1, 0, 4), (0, 1, 0, 288)], {}, "chunks of a step: 72: must be at most 71; rank 0"),
        ([(0, 1, 2**17, 4)], {"size": 2**18}, "highest chunk offset: 32768: must be at most 32767"),
        ([(0, 1, 1020, 8)], {"scratch": 64}, "must not reach from the message into the scratch space"),
        ([(0, 1, 0, 4)], {"n_ranks": 3}, "rank 2 has no instructions: every rank must take part"),
        ([(0, 1, 0, 8), (1, 0, 0, 4)], {"after": [[1], [0]]}, "steps wait for each other"),
    ],
)
def test_msccl_refuses_what_the_format_lacks(rows: Any, options: Any, what: str) -> None:
    with pytest.raises(PlanError, match=f"^msccl-xml: .*{what}"):
        write_msccl_xml(hand(rows, **options))


@pytest.mark.parametrize("write", [write_msccl_xml, write_mscclpp_json])
def test_gpu_formats_refuse_what_they_cannot_say(write: Callable[[Plan], bytes]) -> None:
    gather, _ = plan_of("direct-gather", 3, 96)
    with pytest.raises(InputError, match="collective gather: must be one of allreduce"):
        write(gather)
    average, _ = plan_of("ring", 3, 96, reduction="avg")
    with pytest.raises(InputError, match="reduction avg: must be one of sum"):
        write(average)
    ring, _ = plan_of("ring", 3, 96)
    for name in ('a"b', "a b", "", "a\n", "é"):
        with pytest.raises(InputError, match="must be named with letters, digits"):
            write(replace(ring, name=name))
    alone, _ = plan_of("ring", 1, 96)
    with pytest.raises(PlanError, match="rank 0 has no instructions"):
        write(alone)
    empty, _ = plan_of("ring", 3, 0)
    with pytest.raises(PlanError, match="rank 0 has no instructions"):
        write(empty)


def test_msccl_refuses_a_long_name() -> None:
    plan, _ = plan_of("ring", 3, 96)
    assert b'name="' + 63 * b"x" + b'"' in write_msccl_xml(replace(plan, name=63 * "x"))
    with pytest.raises(PlanError, match="bytes of the name: 64: must be at most 63"):
        write_msccl_xml(replace(plan, name=64 * "x"))


def test_msccl_splits_an_instruction_whose_peers_fall_to_two_thread_blocks() -> None:
    """Rank 1 receives from 0, which it sends to as well, and then passes on to 2 what came from 0."""
    rows = [(1, 0, 0, 16), (0, 1, 16, 16), (1, 2, 16, 16), (0, 1, 32, 16)]
    draft = Draft.of(hand(rows, n_ranks=3, after=[[], [], [1], []]))
    lane = next(lane for lane, rank in zip(draft.lanes, draft.lane_rank, strict=True) if rank == 1)
    sends = next(each for each in draft.lanes if each is not lane and draft.find(1, "send") in each)
    receive, send = draft.find(1, "receive"), draft.find(1, "send", 1)
    receive.become("receive-copy-send")
    receive.out_channel, receive.send_transfer = send.out_channel, send.send_transfer
    sends[:] = [sends[0], receive, *lane[1:]]
    del draft.lane_rank[draft.lanes.index(lane)]
    draft.lanes.remove(lane)
    text = write_msccl_xml(draft.build()).decode()
    own = text.split("<gpu ")[2]
    assert own.count("<tb ") == 2 and 'send="2" recv="-1"' in own
    assert re.search(r'type="r" srcbuf="i" srcoff="1" .* hasdep="1"', own)
    assert re.search(r'type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="0" deps="1"', own)
    run_msccl(text.encode())


# MSCCL++


@pytest.mark.parametrize("segments", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_mscclpp_files_reduce_right_in_any_order_and_twice(segments: int, seed: int) -> None:
    """A second call follows the first at once, on ranks that others are still behind."""
    reasons = []
    plans = list(allreduces(even, segments))
    for plan in plans:
        try:
            data = write_mscclpp_json(plan)
        except PlanError as error:
            reasons.append(str(error))
            continue
        try:
            check_allreduce(MscclppMachine(parse_json(data), seed, calls=2).run(), 2)
        except Fault as fault:
            pytest.fail(f"{plan.name} on {plan.n_ranks} ranks: {fault}")
    assert all("operations of a thread block" in reason for reason in reasons)
    assert len(reasons) < len(plans) / 2, (len(plans), reasons)


def _without(plan: dict[str, Any], choice: random.Random, wanted: Callable[[dict[str, Any]], bool]) -> None:
    lists = [block["ops"] for gpu in plan["gpus"] for block in gpu["threadblocks"]]
    places = [(ops, at) for ops in lists for at, op in enumerate(ops) if wanted(op)]
    ops, at = choice.choice(places)
    del ops[at]


@pytest.mark.parametrize("name", ["nop", "wait", "signal", "put", "res", "copy", "sem_acquire", "sem_release", "re"])
def test_the_mscclpp_machine_notices_what_is_missing(name: str, seed: int) -> None:
    """Any one operation that is left out is found, at any seed: the files have none too many."""
    choice = random.Random(seed)
    found = False
    for schedule in ("ring", "direct", "optcc"):
        plan, _ = plan_of(schedule, 3, 16 * 48)
        good = write_mscclpp_json(plan)
        for attempt in range(4):
            wrong = parse_json(good)
            if not any(
                op["name"] == name for gpu in wrong["gpus"] for each in gpu["threadblocks"] for op in each["ops"]
            ):
                continue
            _without(wrong, choice, lambda op: op["name"] == name)
            with pytest.raises(Fault):
                check_allreduce(MscclppMachine(wrong, seed + attempt, calls=2).run(), 2)
            found = True
    assert found


def test_mscclpp_refuses_what_the_format_lacks() -> None:
    plan, _ = plan_of("ring", 3, 96, dtype="float64")
    with pytest.raises(InputError, match="dtype float64: must be one of float32, int32"):
        write_mscclpp_json(plan)
    plan, _ = plan_of("ring", 3, 96, reduction="max")
    with pytest.raises(InputError, match="reduction max: must be one of sum"):
        write_mscclpp_json(plan)
    plan, _ = plan_of("ring", 3, 40)
    with pytest.raises(PlanError, match="chunks of 4 B: must be multiples of 16 B"):
        write_mscclpp_json(plan)
    plan, _ = plan_of("ring", 12, 12 * 16)
    with pytest.raises(
        PlanError, match=r"operations of a thread block: \d+: must be at most 64; rank 0 thread block 0"
    ):
        write_mscclpp_json(plan)


def test_mscclpp_slots_are_behind_the_plans_own_scratch_space() -> None:
    plan = hand([(0, 1, 1024, 32), (1, 0, 0, 32)], scratch=64, slots=3)
    document = parse_json(write_mscclpp_json(plan))
    puts = {
        gpu["id"]: op
        for gpu in document["gpus"]
        for each in gpu["threadblocks"]
        for op in each["ops"]
        if op["name"] == "put"
    }
    assert puts[0]["src_buff"] == [{"type": "s", "index": 0, "size": 1}]
    assert puts[0]["dst_buff"] == [{"buffer_id": 0, "index": 2, "size": 1}]
    assert [gpu["scratch_chunks"] for gpu in document["gpus"]] == [3, 3]


# The command

FLAT = ["--topology", "3@50MB/s,2=25MB/s", "--size", "12KiB", "--segments", "2"]


@pytest.mark.parametrize("form", FORMATS)
def test_compile_writes_every_format(form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert cli.run(["compile", "optcc", *FLAT, "--format", form, "-o", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    keys = {"file", "format", "digest", "ranks", "transfers", "instructions", "ports", "verdict", "certificate"}
    assert set(answer) == keys
    assert answer["verdict"] == "proved"
    assert (answer["file"], answer["format"]) == (str(path), form)
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ([f"out.{rank}.et" for rank in range(3)] if form == "chakra" else ["out"])
    assert all(each.stat().st_size > 100 for each in tmp_path.iterdir())


def test_compile_writes_traces_into_a_folder(tmp_path: Path) -> None:
    assert cli.run(["compile", "ring", *FLAT, "--format", "chakra", "-o", str(tmp_path)]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"trace.{rank}.et" for rank in range(3)]


def test_compile_predicts_times_with_the_model_of_the_ports(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for model in MODELS:
        assert cli.run(["compile", "ring", *FLAT, "--format", "perfetto", "--ports", model, "-o", str(path)]) == 0
        assert json.loads(path.read_bytes())["otherData"]["ports"] == model


def test_traces_are_replaced_all_or_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The last of the files cannot be written, as a folder has its name."""
    for rank in range(2):
        (tmp_path / f"out.{rank}.et").write_bytes(b"old")
    (tmp_path / "out.2.et").mkdir()
    assert cli.run(["compile", "ring", *FLAT, "--format", "chakra", "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "out.2.et" in said and "Is a directory" in said
    assert [(tmp_path / f"out.{rank}.et").read_bytes() for rank in range(2)] == [b"old", b"old"]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["ring", *FLAT, "--format", "goal", "--pieces", "2"], "--pieces 2: needs --format chakra"),
        (["ring", *FLAT, "--format", "msccl"], "must be one of plan, transfers, goal, chakra, perfetto, msccl-xml"),
        (["direct-gather", *FLAT, "--format", "msccl-xml"], "collective gather: must be one of allreduce"),
        (["ring", *FLAT, "--format", "mscclpp-json", "--dtype", "int64"], "dtype int64: must be one of"),
        (["ring", *FLAT, "--format", "msccl-xml", "--reduction", "avg"], "reduction avg: must be one of"),
        pytest.param(
            ["ring", "--topology", "64@1GB/s", "--size", "1M", "--format", "mscclpp-json"],
            "must be at most 64",
            marks=pytest.mark.slow,
        ),
        (["ring", *FLAT, "--format", "chakra", "-o", "/no/such/folder/out"], "/no/such/folder"),
    ],
)
def test_compile_says_in_one_line_what_a_format_lacks(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = words if "-o" in words else [*words, "-o", str(tmp_path / "out")]
    assert cli.run(["compile", *words]) == 2
    said = capsys.readouterr().err
    assert what in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_equal_plans_give_equal_files() -> None:
    files = []
    for _ in range(2):
        plan, topology = plan_of("optcc", 4, even(4), 2)
        timing = simulate(plan, topology)
        singles = (write_msccl_xml(plan), write_goal(plan, topology), write_perfetto(plan, topology, timing))
        files.append((*singles, *write_chakra(plan)))
    assert files[0] == files[1]
