"""Plans that no reader of a target takes, each by another trick: none gets "limits proved"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from optcc.compiler import compile_schedule
from optcc.plan import Plan
from optcc.planner import build
from optcc.schedules.ring import ring
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED
from optcc.verify.plan.limits import LOADERS, check_limits
from optcc.verify.plan.report import Questions, judge
from tests.unit.verify.plan.test_limits import (
    blocks,
    channels,
    gathered,
    hand,
    messages,
    named,
    offset_of,
    scratch_offset_of,
    semaphores,
    spread,
    star_of_ranks,
    step_of,
    waited_for,
)


def library(name: str, topology: str, size: int) -> Callable[[], Plan]:
    return lambda: build(name, Topology.parse(topology), size).plan


def called(name: str) -> Callable[[], Plan]:
    return lambda: replace(hand([(0, 1, 0, 16), (1, 0, 16, 16)]), name=name)


ATTACKS: dict[str, tuple[str, Callable[[], Plan], str]] = {
    "a step too many for RCCL alone": ("rccl", lambda: messages(65), "65 steps: must be at most 64"),
    "a step too many for msccl-executor": ("msccl-executor", lambda: messages(65), "65 steps"),
    "a step too many for all": ("msccl", lambda: messages(257), "257: must be at most 256"),
    "a block too many for RCCL alone": ("rccl", lambda: blocks(65), "65 thread blocks: must be at most 64"),
    "a block too many for msccl": ("msccl", lambda: blocks(217), "217"),
    "a channel too many for msccl-executor": ("msccl-executor", lambda: channels(33), "33"),
    "a sender too many on RCCL's channel": ("rccl", lambda: spread(33), "33"),
    "a receiver too many on its channel": ("msccl-executor", lambda: gathered(33), "33"),
    "a wait for block 128": ("msccl-executor", lambda: waited_for(129), "129: must be at most 128"),
    "blocks that wait, beyond RCCL's": ("rccl", lambda: waited_for(100), "thread blocks: must be at most 64"),
    "a step of 72 chunks": ("rccl", lambda: step_of(72), "72: must be at most 71"),
    "an offset of 16 bits and a sign": ("rccl", lambda: offset_of(2**15), "32768: must be at most 32767"),
    "that offset in scratch space": ("msccl-executor", lambda: scratch_offset_of(2**15), "32768"),
    "a name that fills its field": ("rccl", lambda: named(64), "64: must be at most 63"),
    "a name that ends its attribute": ("msccl-xml", called('a" proto="LL'), "must be named with"),
    "a name of two lines": ("mscclpp-json", called("a\nb"), "must be named with"),
    "nodes that RCCL reads though the blocks are few": (
        "rccl",
        library("shares", "16@50GB/s", 2**30),
        "must be at most",
    ),
    "the long way round for two loaders": ("msccl-executor", library("ring", "48@50GB/s", 48 * 64), "95 steps"),
    "a rank that does nothing": ("rccl", lambda: hand([(0, 1, 0, 16)], n_ranks=3), "rank 2 has no instructions"),
    "halves of an element": ("mpi", lambda: replace(messages(2), bytes=messages(2).bytes - 2), "whole element"),
    "operations of a block": ("mscclpp-json", library("ring", "16@50GB/s", 2**20), "must be at most 64"),
    "channels of a block": ("mscclpp-json", lambda: star_of_ranks(17), "17: must be at most 16"),
    "semaphores of an operation": ("mscclpp-json", lambda: semaphores(17), "17: must be at most 16"),
    "a size of 31 bits": ("mscclpp-json", lambda: hand([(0, 1, 0, 16)], size=2**31), "2147483648"),
    "a chunk of four bytes": (
        "mscclpp-json",
        lambda: compile_schedule(ring(n_ranks=4), size_bytes=4 * 28),
        "multiples of 16 B",
    ),
    "a type that kernels lack": (
        "mscclpp-json",
        lambda: compile_schedule(ring(n_ranks=4), size_bytes=1024, dtype="float64"),
        "float64",
    ),
    "a division": ("rccl", lambda: compile_schedule(ring(n_ranks=4), size_bytes=1024, reduction="avg"), "avg"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_limits_that_do_not_hold_are_not_proved(name: str) -> None:
    target, make, rule = ATTACKS[name]
    plan = make()
    wrong = check_limits(plan, target)
    assert wrong is not None and wrong.property == "limits", "fits"
    assert rule in wrong.summary
    judged = judge(plan, Questions(target=target)).verdict
    assert judged.properties["limits"] != PROVED
    if judged.properties["agreement"] == PROVED:
        assert judged.properties["limits"] == REFUTED and judged.exit_code == 1


def test_there_are_twenty_and_each_target_fits_something() -> None:
    assert len(ATTACKS) >= 20
    for target in {target for target, *_ in ATTACKS.values()} | set(LOADERS):
        assert check_limits(compile_schedule(ring(n_ranks=3), size_bytes=3 * 64), target) is None
