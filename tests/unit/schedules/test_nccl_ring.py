"""The ring of each NIC: proved, and as slow as the formula of NCCL's rings and R2CCL-Balance says."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.planner import find_schedule
from optcc.schedules.nccl_ring import Ring, channels, nccl_ring
from optcc.simulate import MODELS, simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

NIC = Fraction(50 * 10**9)
CASES = (
    ("3x2@50GB/s+450GB/s", 2, 1),
    ("3x2@50GB/s+450GB/s,1=1/2", 2, 2),
    ("2x4@50GB/s+450GB/s,0=2..3/4", 4, 2),
    ("3x4@50GB/s+450GB/s,0=0..2/4,2=1/4", 4, 4),
    ("3x4@50GB/s+450GB/s/rails", 4, 1),
    ("3x4@50GB/s+450GB/s/rails,0=0..2/4,2=1..3/4", 2, 1),
)
"""Topology, channels, and how many of them the busiest NIC carries."""


@pytest.mark.parametrize(("text", "n_channels", "most"), CASES)
def test_every_channel_is_proved_and_the_busiest_nic_carries_what_the_formula_says(
    text: str, n_channels: int, most: int
) -> None:
    topology = Topology.parse(text)
    p, size = topology.n_ranks, 2**20
    schedule = nccl_ring.build(topology, 2)
    assert len(schedule.segments) == 2 * n_channels
    formula = Fraction(2 * (p - 1) * size * most, p * n_channels) / NIC
    for model in MODELS:
        plan = compile_schedule(schedule, size_bytes=size, topology=topology, ports=model)
        assert verify_plan(plan).verdict == PROVED
        timing = simulate(plan, topology, model=model)
        assert max(timing.port_busy_s) == pytest.approx(float(formula), rel=0.01)
        assert timing.seconds >= float(formula) * 0.99


def test_rings_differ_inside_and_use_every_nic_once_each_way() -> None:
    rings = channels(Topology.parse("2x3@50GB/s+450GB/s"))["rings"]
    assert rings[0] == Ring((0, 1, 2, 3, 4, 5), (-1,) * 6)
    assert rings[1] == Ring((1, 2, 0, 4, 5, 3), (-1,) * 6)
    assert rings[2] == Ring((2, 0, 1, 5, 3, 4), (-1,) * 6)


def test_on_rails_the_last_gpu_sends_through_the_one_with_the_nic() -> None:
    rings = channels(Topology.parse("2x2@50GB/s+450GB/s/rails"))["rings"]
    assert rings == (Ring((0, 1, 2, 3), (-1, 0, -1, 2)), Ring((1, 0, 3, 2), (-1, 1, -1, 3)))


def test_large_messages_reach_the_formula() -> None:
    """Healthy DGX H100: 1.25 of the certified bound; four NICs of one server lost: twice that time."""
    for text, most in (("4xdgx-h100", 1), ("4xdgx-h100,3=4/8", 2)):
        topology = Topology.parse(text)
        plan = compile_schedule(nccl_ring.build(topology, 2), size_bytes=2**30, topology=topology, ports="fair")
        formula = float(Fraction(62, 32) * 2**30 * most / (8 * NIC))
        assert formula <= simulate(plan, topology, model="fair").seconds <= 1.02 * formula


def test_what_is_refused() -> None:
    assert find_schedule("nccl-ring") is nccl_ring
    for text, rule in (
        ("4@50GB/s", "NICs must belong to GPUs"),
        ("torus:3x3@50GB/s", "NICs must belong to GPUs"),
        ("1x4@50GB/s+450GB/s", "several servers"),
        ("3x4@50GB/s+450GB/s/rails,0=0..1/4,2=2..3/4", "no rail is left"),
    ):
        with pytest.raises(TopologyError, match=rule):
            nccl_ring.build(Topology.parse(text))
