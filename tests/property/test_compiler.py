"""What holds for every schedule: compiled, it is proved, and equal to running its transfers one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from optcc.collective import Collective
from optcc.compiler import compile_schedule, plan_transfers
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.plan import KINDS, Plan
from optcc.schedules.registry import SCHEDULES
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.differential.naive_verifier import TooManyStates, naive_verify
from tests.property.strategies import Buffer, Trees, interpret, tree_schedules

COUNTS = st.one_of(st.integers(0, 12), st.sampled_from([31, 97, 101, 210]))
"""No element, fewer than ranks, primes, and numbers that divide well."""


def run(plan: Plan, inputs: list[Buffer], seed: int) -> list[Buffer]:
    """What `plan` does to int64 inputs, its instructions started in random order as soon as their lane allows."""
    rng = np.random.default_rng(seed)
    held = [np.concatenate((each, np.zeros(plan.transfers.scratch_bytes // 8, dtype=np.int64))) for each in inputs]
    kinds = [KINDS[kind] for kind in plan.kind.tolist()]
    rank, size = plan.instruction_rank.tolist(), (plan.bytes // 8).tolist()
    src, dst = (plan.src_offset // 8).tolist(), (plan.dst_offset // 8).tolist()
    queues: dict[int, list[Buffer]] = {channel: [] for channel in range(len(plan.channels))}
    rest = [[int(i) for i in lane] for lane in plan.lanes]
    taken: dict[int, int] = dict.fromkeys(range(len(rest)), 0)
    sent: dict[int, int] = dict.fromkeys(queues, 0)
    turn = {
        (channel, n): (lane, place)
        for lane, instructions in enumerate(plan.lanes)
        for receives in [[i for i in instructions if plan.in_channel[i] >= 0]]
        for place, i in enumerate(receives)
        for channel in [int(plan.in_channel[i])]
        for n in [sum(int(plan.in_channel[j]) == channel for j in receives[:place])]
    }
    done: set[int] = set()
    half: set[int] = set()
    while any(rest):
        moved = False
        for lane in rng.permutation(len(rest)).tolist():
            if not rest[lane]:
                continue
            i = rest[lane][0]
            if not set(plan.after[i].tolist()) <= done:
                continue
            buffer, kind = held[rank[i]], kinds[i]
            if kind.startswith("receive") and i not in half:
                queue = queues[int(plan.in_channel[i])]
                if not queue:
                    continue
                at = slice(dst[i], dst[i] + size[i])
                buffer[at] = buffer[at] + queue[0] if "reduce" in kind else queue[0]
                queue.pop(0)
                taken[lane] += 1
                half.add(i)
                moved = True
            if kind.endswith("send"):
                channel = int(plan.out_channel[i])
                there, place = turn[channel, sent[channel]]
                if place >= taken[there] + plan.channels[channel].slots:
                    continue
                first = dst[i] if kind.startswith("receive") else src[i]
                queues[channel].append(buffer[first : first + size[i]].copy())
                sent[channel] += 1
            elif not kind.startswith("receive"):
                value = buffer[src[i] : src[i] + size[i]].copy()
                at = slice(dst[i], dst[i] + size[i])
                buffer[at] = buffer[at] + value if kind == "reduce" else value
            rest[lane].pop(0)
            done.add(i)
            moved = True
        assert moved, "stuck"
    count = plan.size_bytes // 8
    return [each[:count] for each in held]


@settings(max_examples=150)
@given(
    definition=st.sampled_from(list(SCHEDULES.values())),
    ranks=st.integers(1, 9),
    segments=st.integers(1, 5),
    count=COUNTS,
    slots=st.integers(1, 4),
    fused=st.booleans(),
    straggler=st.integers(0, 8),
    rates=st.sampled_from(["25MB/s", "1MB/s", "50MB/s:10MB/s", "49MB/s"]),
    ports=st.sampled_from(MODELS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_library_is_proved_and_means_its_collective(
    definition: Definition,
    ranks: int,
    segments: int,
    count: int,
    slots: int,
    fused: bool,
    straggler: int,
    rates: str,
    ports: Model,
    seed: int,
) -> None:
    """Any size, ragged or none, any straggler: proved, the same digest twice, and the sums that the collective wants,
    whatever lies where it defines no input."""
    topology = Topology.parse(f"{ranks}@50MB/s,{straggler % ranks}={rates}")
    try:
        built = [definition.build(topology, segments) for _ in range(2)]
    except TopologyError:
        reject()
    plans = [
        compile_schedule(
            each, size_bytes=8 * count, dtype="int64", topology=topology, slots=slots, fused=fused, ports=ports
        )
        for each in built
    ]
    assert plans[0].digest == plans[1].digest
    verdict = verify_plan(plans[0])
    assert verdict.verdict == PROVED, verdict.counterexample
    inputs = [np.random.default_rng((seed, rank)).integers(-(10**6), 10**6, size=count) for rank in range(ranks)]
    outputs = run(plans[0], inputs, seed)
    for rank, (output, wanted) in enumerate(zip(outputs, results(built[0].collective, inputs), strict=True)):
        for first, stop, value in wanted:
            assert np.array_equal(output[first:stop], value), (rank, first, stop)


def results(collective: Collective, inputs: list[Buffer]) -> list[list[tuple[int, int, Buffer]]]:
    """For each rank the regions that it must hold at the end, with what must be in them."""
    count = len(inputs[0])
    wanted = []
    for rank in range(collective.n_ranks):
        own: list[tuple[int, int, Buffer]] = []
        for first, stop, contributors in collective.after(rank, count):
            value = np.zeros(stop - first, dtype=np.int64)
            for other in range(collective.n_ranks):
                if contributors >> other & 1:
                    value += inputs[other][first:stop]
            own.append((first, stop, value))
        wanted.append(own)
    return wanted


@settings(max_examples=150)
@given(
    trees=tree_schedules(),
    count=COUNTS,
    slots=st.integers(1, 3),
    fused=st.booleans(),
    slow=st.one_of(st.none(), st.integers(1, 50)),
    ports=st.sampled_from(MODELS),
    seed=st.integers(0, 2**32 - 1),
)
def test_trees_of_any_author_are_proved_and_mean_what_they_say(
    trees: Trees, count: int, slots: int, fused: bool, slow: int | None, ports: Model, seed: int
) -> None:
    """Random reduce trees and copy trees, through scratch too: proved, and equal to the transfers one by one."""
    built = trees.build()
    topology = None if slow is None else Topology.parse(f"{trees.n_ranks}@50MB/s,0={slow}MB/s")
    plan = compile_schedule(
        built, size_bytes=8 * count, dtype="int64", topology=topology, slots=slots, fused=fused, ports=ports
    )
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED, verdict.counterexample
    inputs, outputs = interpret(built, count, seed)
    for output, wanted in zip(run(plan, inputs, seed), outputs, strict=True):
        assert np.array_equal(output, wanted)
        assert np.array_equal(output, sum(inputs))


@settings(max_examples=60)
@given(trees=tree_schedules(4), slots=st.integers(1, 2), count=st.integers(1, 30))
def test_fusing_changes_neither_transfers_nor_verdict(trees: Trees, slots: int, count: int) -> None:
    """Fused or not: the same transfers, each sent and received once, both proved; never more instructions."""
    built = trees.build()
    apart, fused = (
        compile_schedule(built, size_bytes=4 * count, slots=slots, fused=choice) for choice in (False, True)
    )
    assert [verify_plan(plan).verdict for plan in (apart, fused)] == [PROVED, PROVED]
    assert len(fused) <= len(apart)
    for plan in (apart, fused):
        assert sorted(plan.recv_transfer[plan.recv_transfer >= 0].tolist()) == list(range(len(plan.transfers)))
        assert len(plan_transfers(plan)) == len(plan.transfers)
    assert np.array_equal(apart.transfers.src_offset, fused.transfers.src_offset)


@settings(max_examples=40)
@given(
    trees=st.builds(
        Trees,
        seed=st.integers(0, 2**32 - 1),
        n_ranks=st.integers(2, 3),
        sections=st.integers(1, 2),
        segments=st.just(1),
        scratch=st.booleans(),
        mixed=st.booleans(),
    ),
    slots=st.integers(1, 2),
    fused=st.booleans(),
)
def test_small_trees_survive_every_interleaving(trees: Trees, slots: int, fused: bool) -> None:
    """What the verifier proves, trying everything confirms."""
    plan = compile_schedule(trees.build(), size_bytes=4 * trees.sections, slots=slots, fused=fused)
    try:
        problems = naive_verify(plan, limit=20_000).problems
    except TooManyStates:
        problems = naive_verify(plan, windows=(1,), limit=200_000).problems
    assert problems == {}
