"""Pods with uplinks: texts and files, times by closed forms, bounds, and what refuses them."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from optcc import cli
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import OptccError, TopologyError
from optcc.faults import FaultPlan
from optcc.runtime.transports.loopback import LoopbackNetwork
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import MODELS, Jitter, Model, Policy, simulate
from optcc.topology import Nic, Pod, Server, Topology
from optcc.verify.bounds.closed_form_certificates import certify
from optcc.verify.bounds.closed_forms import allreduce_bound, collective_bound
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.network import FlowNetwork

GB = 10**9
SIZE = 8_000_000


def toml(folder: Path, text: str) -> Topology:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return Topology.parse(str(path))


def seconds(name: str, topology: Topology, model: Model, segments: int = 1, size_bytes: int = SIZE) -> float:
    plan = compile_schedule(SCHEDULES[name].build(topology, segments), size_bytes=size_bytes, topology=topology)
    return simulate(plan, topology, model=model).seconds


def test_the_text_form_makes_pods_of_equal_size() -> None:
    topology = Topology.parse("16@50GB/s:20GB/s/4:2,3=25GB/s")
    assert [pod.servers for pod in topology.pods] == [tuple(range(k, k + 4)) for k in (0, 4, 8, 12)]
    assert {(pod.up, pod.down) for pod in topology.pods} == {(Fraction(100 * GB), Fraction(40 * GB))}
    assert topology.server_pod == tuple(server // 4 for server in range(16))
    assert topology.out[3] == 25 * GB
    assert Topology.parse("4x8@50GB/s/2:4,2=3/8").pods[1].up == 200 * GB
    assert Topology.parse("8@50GB/s/4:1.5").pods[0].up == Fraction(400 * GB, 3)
    assert "4 pods" in topology.card().title


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("16@50GB/s/5:2", "must divide the 16 servers"),
        ("16@50GB/s/16:2", "two or more"),
        ("16@50GB/s/0:2", "must divide"),
        ("16@50GB/s/4:0", "oversubscribed 0"),
        ("16@50GB/s/4:", "rate '50GB/s/4'"),
        ("16@50GB/s/4", "rate '50GB/s/4'"),
        ("16@50GB/s/4:x", "rate '50GB/s/4'"),
    ],
)
def test_texts_that_are_no_pods(text: str, part: str) -> None:
    with pytest.raises(OptccError) as refusal:
        Topology.parse(text)
    assert part in str(refusal.value)


NIC = 'nics = [{rail = 0, rate = "1GB/s"}]'


def test_a_file_names_pods(tmp_path: Path) -> None:
    """Servers without a pod are on the core; the two ways of an uplink may differ."""
    topology = toml(
        tmp_path,
        f"""
        [[pods]]
        name = "east"
        rate = "2GB/s"
        [[pods]]
        name = "west"
        up = "1GB/s"
        down = "3GB/s"
        [[servers]]
        count = 2
        pod = "west"
        {NIC}
        [[servers]]
        {NIC}
        [[servers]]
        pod = "east"
        {NIC}
        """,
    )
    assert topology.pods == (
        Pod("east", (3,), Fraction(2 * GB), Fraction(2 * GB)),
        Pod("west", (0, 1), Fraction(GB), Fraction(3 * GB)),
    )
    assert topology.server_pod == (1, 1, -1, 0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"[[servers]]\npod = 'a'\n{NIC}", ["servers[0].pod", "'a'"]),
        (f"[[pods]]\nname = 'a'\nrate = '1GB/s'\n[[servers]]\n{NIC}", ["pods[0]", "at least one server"]),
        (f"[[pods]]\nname = 'a'\n[[servers]]\npod = 'a'\n{NIC}", ["pods[0]", "give rate, or both up and down"]),
        (f"[[pods]]\nname = 'a'\nup = '1GB/s'\nrate = '1GB/s'\n[[servers]]\npod = 'a'\n{NIC}", ["either rate"]),
        (f"[[pods]]\nname = 'a'\nrate = '0GB/s'\n[[servers]]\npod = 'a'\n{NIC}", ["pods[0]", "above zero"]),
        (f"[[pods]]\nname = 'a'\nrate = '1GB/s'\nspeed = 1\n[[servers]]\n{NIC}", ["pods[0]", "speed"]),
        (f"[[pods]]\nrate = '1GB/s'\n[[servers]]\n{NIC}", ["pods[0]", "name"]),
    ],
)
def test_faults_in_a_file_name_the_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(OptccError) as refusal:
        toml(tmp_path, text)
    for part in parts:
        assert part in str(refusal.value)


def test_pods_that_cannot_be() -> None:
    servers = Topology.parse("3@1GB/s").servers
    rate = Fraction(GB)
    for pods, part in (
        ((Pod("a", (3,), rate, rate),), "server 3"),
        ((Pod("a", (0,), rate, rate), Pod("a", (1,), rate, rate)), "used twice"),
        ((Pod("a", (0,), rate, rate), Pod("b", (1, 0), rate, rate)), "must be in one pod"),
    ):
        with pytest.raises(TopologyError, match=part):
            Topology(servers, pods=pods)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("over", "slowdown"), [(1, 1), (4, 1), (8, 2), (16, 4)])
def test_a_ring_crosses_each_uplink_with_one_flow(model: Model, over: int, slowdown: int) -> None:
    """Pods of four: oversubscribed 1:4 the uplink is as fast as a NIC, and a ring has one flow there each way."""
    fault_free = 2 * 7 / 8 * SIZE / GB
    found = seconds("ring", Topology.parse(f"8@1GB/s/4:{over}"), model)
    assert found == pytest.approx(slowdown * fault_free, rel=1e-12)


@pytest.mark.parametrize("model", ["fifo", "fair"])
def test_everybody_to_everybody_fills_the_uplinks(model: Model) -> None:
    """Each of four servers sends an eighth of the message to each of four outside, twice: 4 n in all each way."""
    topology = Topology.parse("8@1GB/s/4:8")
    found = seconds("direct", topology, model)
    least = Fraction(4 * SIZE, 1) / topology.pods[0].up
    assert least <= found <= 1.02 * float(least)


def test_two_flows_share_an_uplink_and_then_one_has_it() -> None:
    """Fair: 1 GB/s for two NICs of 1 GB/s, so half each; the ring's other flows do not notice."""
    topology = Topology(
        Topology.parse("4@1GB/s").servers,
        pods=(Pod("a", (0, 1), Fraction(GB), Fraction(GB)), Pod("b", (2, 3), Fraction(GB), Fraction(GB))),
    )
    plan = compile_schedule(SCHEDULES["direct"].build(topology, 1), size_bytes=SIZE, topology=None)
    open_core = simulate(plan.transfers, replace(topology, pods=()), model="fair").seconds
    assert open_core == pytest.approx(2 * 3 / 4 * SIZE / GB)
    # Each round crosses a pod's uplink with four quarters of the message.
    assert simulate(plan.transfers, topology, model="fair").seconds == pytest.approx(2 * SIZE / GB)


@pytest.mark.parametrize("model", MODELS)
def test_each_rail_has_its_own_uplink(model: Model) -> None:
    """Two rails, uplinks of a NIC's rate each: as fast as without pods, and half as fast with half of it."""

    def cluster(up: Fraction) -> Topology:
        nics = (Nic(0, Fraction(GB), Fraction(GB)), Nic(1, Fraction(GB), Fraction(GB)))
        servers = tuple(Server(f"h{index}", 1, nics) for index in range(4))
        pods = tuple(Pod(f"p{k}", (2 * k, 2 * k + 1), up, up) for k in range(2))
        return Topology(servers, rail_only=True, pods=pods)

    fault_free = 2 * 3 / 4 * SIZE / (2 * GB)
    assert seconds("ring", cluster(Fraction(GB)), model) == pytest.approx(fault_free, rel=1e-9)
    assert seconds("ring", cluster(Fraction(GB, 2)), model) == pytest.approx(2 * fault_free, rel=1e-9)
    assert cluster(Fraction(GB)).pooled_pods[0].up == 2 * GB
    assert cluster(Fraction(GB)).healthy().pods[0].up == 2 * GB


@pytest.mark.parametrize("model", MODELS)
def test_faults_and_jitter_work_in_pods(model: Model) -> None:
    """A server outside the slow pod loses half of its rate: a ring then takes as long as by the slower of the two."""
    topology = Topology.parse("8@1GB/s/4:8")
    plan = compile_schedule(SCHEDULES["ring"].build(topology, 1), size_bytes=SIZE, topology=topology)
    whole = simulate(plan, topology, model=model)
    slower = simulate(plan, topology, model=model, faults=FaultPlan.parse("2/0@0s=1/4"))
    assert slower.seconds == pytest.approx(2 * whole.seconds, rel=1e-9)
    noisy = simulate(plan, topology, model=model, jitter=Jitter(1, 1e-6, 0.02))
    assert noisy.seconds == simulate(plan, topology, model=model, jitter=Jitter(1, 1e-6, 0.02)).seconds != whole.seconds
    assert whole.utilisation()["up pod0"] == pytest.approx(1, rel=1e-9)


def random_pods(rng: random.Random) -> Topology:
    n_servers = rng.randint(3, 6)
    rate = [Fraction(rng.choice((1, 2, 3)) * 10**6) for _ in range(2 * n_servers)]
    servers = tuple(
        Server(f"h{index}", 1, (Nic(0, rate[2 * index], rate[2 * index + 1]),)) for index in range(n_servers)
    )
    members: dict[int, list[int]] = {}
    for server in range(n_servers):
        members.setdefault(rng.choice((0, 1, 1, -1)), []).append(server)
    members.pop(-1, None)
    uplinks = [Fraction(rng.choice((1, 2, 4, 8)) * 500_000) for _ in range(4)]
    pods = tuple(Pod(f"p{k}", tuple(own), uplinks[k], uplinks[2 + k]) for k, own in members.items())
    return Topology(servers, pods=pods)


@pytest.mark.parametrize("seed", range(30))
def test_no_simulation_is_faster_than_the_bound(seed: int) -> None:
    topology = random_pods(random.Random(seed))
    bound = float(allreduce_bound(topology, SIZE).seconds)
    for name in ("ring", "direct", "optimal"):
        plan = compile_schedule(SCHEDULES[name].build(topology, 4), size_bytes=SIZE, topology=topology)
        for model in MODELS:
            assert simulate(plan, topology, model=model).seconds >= bound * (1 - 1e-9), (name, model)


@pytest.mark.parametrize("name", ["allreduce", "allgather", "reducescatter", "broadcast", "reduce"])
@pytest.mark.parametrize("seed", range(6))
def test_the_closed_form_is_below_the_linear_program(seed: int, name: str) -> None:
    """Which knows every tree and every cut, and is mostly as high."""
    topology = random_pods(random.Random(100 + seed))
    wanted = Collective(name, topology.n_ranks, 1 if name in ("broadcast", "reduce") else 0)
    form = collective_bound(topology, SIZE, name, wanted.root)
    linear = lp_bound(topology, wanted, SIZE)
    assert form.seconds <= linear.seconds
    if name == "allreduce":
        assert form.seconds == linear.seconds
    assert collective_bound(replace(topology, pods=()), SIZE, name, wanted.root).seconds <= form.seconds


def test_the_uplink_decides_and_the_linear_program_agrees() -> None:
    topology = Topology.parse("8@1GB/s/4:8")
    bound = allreduce_bound(topology, SIZE)
    assert bound.seconds == SIZE / topology.pods[0].up == Fraction(16, 1000)
    assert "up pod0" in bound.binding
    assert not bound.tight
    assert lp_bound(topology, Collective("allreduce", 8), SIZE).seconds == bound.seconds
    assert certify(bound, topology).seconds == bound.seconds
    assert allreduce_bound(Topology.parse("8@1GB/s/4:1"), SIZE).tight


def test_pods_of_two_servers_count_as_one_party_each() -> None:
    """6 pods with uplinks of 0.6: 2 (6 - 1) n over 6 x 0.6, more than n / 0.6 and than 2 (12 - 1) n over 12."""
    topology = Topology.parse("12@1GB/s/2:3.3333")
    rate = topology.pods[0].up
    bound = allreduce_bound(topology, SIZE)
    assert bound.seconds == Fraction(10 * SIZE) / (6 * rate)
    assert lp_bound(topology, Collective("allreduce", 12), SIZE).seconds == bound.seconds


def test_the_network_of_rails_in_pods() -> None:
    servers = tuple(
        Server(f"h{k}", 1, (Nic(0, Fraction(GB), Fraction(GB)), Nic(1, Fraction(GB), Fraction(GB)))) for k in range(3)
    )
    pods = (Pod("a", (0, 1), Fraction(GB), Fraction(GB)),)
    network = FlowNetwork.from_topology(Topology(servers, rail_only=True, pods=pods))
    assert network.switches == ("rail 0", "rail 1", "pod a rail 0", "pod a rail 1")
    assert {"up a rail 0", "down a rail 1"} <= set(network.port_names)


def test_what_does_not_model_uplinks_refuses_them() -> None:
    topology = Topology.parse("4@1GB/s/2:2")
    plan = compile_schedule(SCHEDULES["ring"].build(topology, 1), size_bytes=SIZE, topology=topology)
    with pytest.raises(TopologyError, match="pods"):
        LoopbackNetwork(topology, 4)
    replan = Policy("replan", new_plan=lambda *_: plan)
    with pytest.raises(TopologyError, match="replan and pods"):
        simulate(plan, topology, faults=FaultPlan.parse("1/0@1ms"), policy=replan)


def test_the_commands_take_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "ring", "--topology", "8@1GB/s/4:8", "--size", "8000000"]
    assert cli.run([*words, "--model", "fair"]) == 0
    assert "28.000 ms" in capsys.readouterr().out
    assert cli.run([*words, "--as-written"]) == 0
    assert "28.000 ms" in capsys.readouterr().out
