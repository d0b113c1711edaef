"""One bound for one topology: what `optcc bound` certifies is what `simulate`, `verify`, `bench` and its figure compare
with, and what the linear program over cuts finds, on random clusters with fabrics, rails and pods."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optcc import cli
from optcc.codec import write_plan
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.experiments import bench
from optcc.experiments.record import BenchTiming, Record
from optcc.paper_figures import allreduce_bars
from optcc.schedules.direct import direct
from optcc.topology import Nic, Pod, Server, Topology
from optcc.verify.bounds.certified import is_closed, least_seconds
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.plan.timing import check_timing
from tests.sample import sampled

SIZE = 10**6
COLLECTIVES = ("allreduce", "broadcast", "reducescatter", "allgather", "reduce")
CASES = range(100)


def drawn(seed: int) -> Topology:
    """2 to 5 servers of 1 to 4 GPUs: fabrics, out and in apart, lost NICs, rails that do not meet, pods."""
    rng = random.Random(f"one bound {seed}")
    rails = rng.randint(1, 3)
    servers: list[Server] = []
    for index in range(rng.randint(2, 5)):
        nics = []
        for rail in range(rails):
            out = Fraction(rng.randint(1, 8))
            in_ = out if rng.random() < 0.6 else Fraction(rng.randint(1, 8))
            nics.append(Nic(rail, out, in_, failed=rail > 0 and rng.random() < 0.3))
        fabric = Fraction(rng.randint(1, 20)) if rng.random() < 0.7 else None
        servers.append(Server(f"h{index}", rng.randint(1, 4), tuple(nics), fabric))
    pods: tuple[Pod, ...] = ()
    if len(servers) > 2 and rng.random() < 0.4:
        first = rng.randint(1, len(servers) - 1)
        members = range(first), range(first, len(servers))
        pods = tuple(
            Pod(f"pod{name}", tuple(own), Fraction(rng.randint(1, 12)), Fraction(rng.randint(1, 12)))
            for name, own in zip("ab", members, strict=True)
        )
    return Topology(tuple(servers), rail_only=rng.random() < 0.4, pods=pods)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def benched(topology: Topology, wanted: Collective) -> BenchTiming:
    """What `optcc bench` would write for a peer that took a second."""
    peer: Any = SimpleNamespace(name="mpi")
    settings: Any = SimpleNamespace(
        wired=topology,
        topology=topology,
        transport="tcp",
        ports="fifo",
        bed="healthy",
        dtype="float32",
        reduction="sum",
        collective=wanted.name,
        root=wanted.root,
    )
    return bench._row(settings, wanted, SIZE, peer, {"in": bench.Tally([1.0], [0.0])})


@pytest.mark.parametrize("seed", sampled(CASES, every=8))
def test_every_command_has_the_same_bound(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = drawn(seed)
    file = tmp_path / "cluster.toml"
    file.write_text(topology.to_toml(), encoding="utf-8")
    wanted = Collective(COLLECTIVES[seed % len(COLLECTIVES)], topology.n_ranks)
    best = lp_bound(topology, wanted, SIZE, fabric=True, primal=False).seconds
    assert least_seconds(topology, SIZE, wanted) == best
    told = printed(capsys, "bound", str(file), "--size", f"{SIZE}B", "--collective", wanted.name)
    assert Fraction(told["seconds_exact"]) == best
    everyone = Collective("allreduce", topology.n_ranks)
    row = benched(topology, wanted)
    assert row.bound_s == float(best)
    drawn_at = allreduce_bars.data([Record("", (), "", 1.0, {}, {}, (row,))])
    assert [group.bound_s for group in drawn_at.groups] == [float(best)]
    least = least_seconds(topology, SIZE, everyone)
    plan = compile_schedule(direct(n_ranks=topology.n_ranks, segments=2), size_bytes=SIZE, topology=topology)
    filed = tmp_path / "plan.json"
    filed.write_bytes(write_plan(plan))
    timed = printed(capsys, "simulate", "--plan", str(filed), "--topology", str(file))
    assert timed["bound_seconds"] == float(least)
    assert timed["ratio"] >= 1
    if topology.rail_only and (topology.pods or len(topology.rails_kept) > 1):
        with pytest.raises(TopologyError, match=r"rails|pods"):
            check_timing(plan, topology, model="fifo", within=Fraction(1))
        return
    _, makespan = check_timing(plan, topology, model="fifo")
    assert makespan is not None
    assert check_timing(plan, topology, model="fifo", within=makespan.seconds / least)[0] is None
    assert check_timing(plan, topology, model="fifo", within=makespan.seconds / least - Fraction(1, 10**6))[0]


def test_all_kinds_are_drawn() -> None:
    every = [drawn(seed) for seed in CASES]
    assert sum(bool(each.pods) for each in every) > 20
    assert sum(each.rail_only and len(each.rails_kept) > 1 for each in every) > 10
    assert sum(any(server.fabric is not None and server.gpus > 1 for server in each.servers) for each in every) > 60
    assert 20 < sum(map(is_closed, every)) < 80
