"""Send/Recv between neighbours: proved for any servers, and as fast as the busiest port."""

from __future__ import annotations

import pytest

from optcc.planner import build, find_schedule, prove, verdict_cache
from optcc.schedules.send_recv import send_recv, sendrecv
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import least_seconds


@pytest.mark.parametrize("name", ["send-recv", "auto"])
@pytest.mark.parametrize("text", ["1@1GB/s", "2@1GB/s", "5@1GB/s,3=500MB/s:1GB/s", "3x2@1GB/s"])
def test_it_is_proved_and_takes_what_the_busiest_port_takes(name: str, text: str) -> None:
    topology = Topology.parse(text)
    wanted, size_bytes = sendrecv(topology.n_ranks), topology.n_ranks * 2**20
    plan = build(name, topology, size_bytes, collective=wanted).plan
    assert (plan.name, plan.collective) == ("send-recv", wanted)
    assert prove(plan, verdict_cache()).verdict == PROVED
    seconds = simulate(plan, topology).seconds
    assert seconds == pytest.approx(float(least_seconds(topology, size_bytes, wanted)), rel=0.01)


def test_it_is_found_by_its_name() -> None:
    assert find_schedule("send-recv") is send_recv
