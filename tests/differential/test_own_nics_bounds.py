"""GPUs with several NICs each, rail-only: the bound holds for every way to use them, whatever is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.collective import Collective
from optcc.errors import TopologyError
from optcc.planner import build
from optcc.servers import bundle
from optcc.simulate import simulate
from optcc.topology import Nic, Pod, Server, Topology
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.network import FlowNetwork
from tests.sample import sampled

RATE, SIZE_BYTES = Fraction(50_000_000), 1 << 24
Lost = frozenset[tuple[int, int]]
"""NICs, as (server, rail)."""


def cluster(n_servers: int, gpus: int, per_gpu: int, lost: Lost, *, rail_only: bool = True) -> Topology:
    """Equal servers whose GPUs have `per_gpu` NICs each, in order."""
    servers = tuple(
        Server(
            f"h{number}",
            gpus,
            tuple(
                Nic(rail, RATE, RATE, failed=(number, rail) in lost, gpu=rail // per_gpu)
                for rail in range(gpus * per_gpu)
            ),
            fabric=9 * RATE,
        )
        for number in range(n_servers)
    )
    return Topology(servers, rail_only=rail_only)


def least_s(topology: Topology) -> float:
    """The certified bound of an AllReduce."""
    return float(least_seconds(topology, SIZE_BYTES, Collective("allreduce", topology.n_ranks)))


def draw(seed: int) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Servers, GPUs, NICs of a GPU, and NICs to lose one after the other: every server keeps one."""
    rng = random.Random(seed)
    n_servers, gpus, per_gpu = rng.randint(2, 4), 2, rng.randint(2, 3)
    count = gpus * per_gpu
    keeps = [rng.randrange(count) for _ in range(n_servers)]
    losable = [(server, rail) for server in range(n_servers) for rail in range(count) if rail != keeps[server]]
    return n_servers, gpus, per_gpu, rng.sample(losable, rng.randint(1, 4))


@pytest.mark.parametrize("seed", sampled(range(40), 8))
def test_a_nic_more_that_is_lost_never_lowers_the_bound(seed: int) -> None:
    n_servers, gpus, per_gpu, losing = draw(seed)
    clusters = [cluster(n_servers, gpus, per_gpu, frozenset(losing[:count])) for count in range(len(losing) + 1)]
    bounds = [least_s(each) for each in clusters if each.wired is not None and each.wired.is_joined]
    assert bounds == sorted(bounds) and len(bounds) > 1


@pytest.mark.parametrize("seed", sampled(range(40), 8))
def test_no_plan_beats_the_bound_and_a_joined_core_is_no_slower(seed: int) -> None:
    n_servers, gpus, per_gpu, losing = draw(seed)
    apart = cluster(n_servers, gpus, per_gpu, frozenset(losing))
    if apart.wired is None or not apart.wired.is_joined:
        with pytest.raises(TopologyError, match="cannot reach"):
            least_s(apart)
        return
    joined = replace(apart, rail_only=False)
    bound_s = least_s(apart)
    assert least_s(joined) <= bound_s
    plan = build("auto", apart, SIZE_BYTES, ports="fair").plan
    assert simulate(plan, apart, model="fair").seconds >= bound_s * (1 - 1e-9)


def test_fewer_routes_than_ways_are_no_bound_on_what_nics_carry() -> None:
    apart = cluster(4, 2, 2, frozenset({(1, 2), (2, 3), (3, 1)}))
    routed = FlowNetwork.from_topology(apart, fabric=True, as_routed=True)
    routed_s = float(lp_bound(routed, "allreduce", SIZE_BYTES).certificate.seconds)
    assert least_s(apart) < routed_s
    plan = build("packed", apart, SIZE_BYTES, ports="fair").plan
    assert simulate(plan, apart, model="fair").seconds >= routed_s


def test_servers_without_a_way_between_them_have_no_bound() -> None:
    apart = cluster(2, 2, 2, frozenset({(0, 0), (0, 2), (1, 1), (1, 3)}))
    assert apart.wired is not None and not apart.wired.is_joined
    with pytest.raises(TopologyError, match="cannot reach"):
        least_s(apart)


def test_all_nics_of_gpus_count() -> None:
    """As many rails as NICs, or one for each GPU whose NIC is as fast as those: the same bound, and plans near it."""
    several = cluster(4, 2, 2, frozenset())
    one = replace(
        several,
        servers=tuple(
            replace(server, nics=tuple(Nic(gpu, 2 * RATE, 2 * RATE, gpu=gpu) for gpu in range(2)))
            for server in several.servers
        ),
    )
    assert least_s(several) == least_s(one)
    plan = build("auto", several, SIZE_BYTES, ports="fair").plan
    assert simulate(plan, several, model="fair").seconds < 1.05 * least_s(several)


def test_gpus_without_a_common_rail_have_no_route_and_no_lower_bound_for_it() -> None:
    apart = cluster(3, 2, 2, frozenset({(0, 0), (1, 1)}))
    assert bundle(apart.servers)[0] == (0,) and bundle(apart.servers, widest=True)[0] == (0, 1)
    wired = apart.wired
    assert wired is not None and apart.widest is not None
    assert 2 not in wired.routes[0] and 2 in apart.widest.routes[0]  # GPU 0 of two servers
    assert cluster(3, 2, 2, frozenset({(0, 0), (1, 0)})).widest is cluster(3, 2, 2, frozenset({(0, 0), (1, 0)})).wired
    assert least_s(cluster(3, 2, 2, frozenset({(0, 0)}))) <= least_s(apart)
    with pytest.raises(TopologyError, match="no route"):
        simulate(build("ring", replace(apart, rail_only=False), SIZE_BYTES).plan, apart, model="fair")


def test_the_uplinks_of_bundled_rails_are_added() -> None:
    pods = (Pod("left", (0, 1), RATE / 4, RATE / 4), Pod("right", (2, 3), RATE / 4, RATE / 4))
    several = replace(cluster(4, 2, 2, frozenset()), pods=pods)
    one = replace(
        cluster(4, 2, 1, frozenset()),
        servers=tuple(
            replace(server, nics=tuple(Nic(gpu, 2 * RATE, 2 * RATE, gpu=gpu) for gpu in range(2)))
            for server in several.servers
        ),
        pods=tuple(replace(pod, up=2 * pod.up, down=2 * pod.down) for pod in pods),
    )
    assert least_s(several) == least_s(one) > least_s(cluster(4, 2, 2, frozenset()))
