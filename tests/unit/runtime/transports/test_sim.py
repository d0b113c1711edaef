"""The protocol in simulated time: a transport's promises, and AllReduces through failures, bit for bit."""

from __future__ import annotations

import ast
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import optcc.runtime.sim
from optcc.errors import AllRailsFailed, InputError, OptccError, RankLost, TopologyError
from optcc.faults import FaultPlan
from optcc.plan import Channel, Plan
from optcc.runtime.conformance import check_transport
from optcc.runtime.executor import Executor
from optcc.runtime.transports import sim, tcp
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from optcc.verdict import Verdict
from tests.sample import sampled
from tests.unit.runtime.transports.tcp_ranks import input_of, plan_of

RATE = "4@50MB/s"


def reduce_over(transport: SimTransport | LoopbackTransport, plan: Plan, verdict: Verdict, n_runs: int) -> list[bytes]:
    clock = transport.clock if isinstance(transport, SimTransport) else None
    executor = Executor(plan, transport.rank, transport, verdict, clock=clock)
    results: list[bytes] = []
    for run in range(n_runs):
        recv = np.empty(plan.size_bytes // 4, np.float32)
        executor.all_reduce(input_of(plan, transport.rank, run), recv)
        results.append(recv.tobytes())
    return results


@pytest.mark.parametrize(("faulty", "n_ranks"), sampled(product((False, True), (3, 1, 2, 4)), every=4))
def test_keeps_the_promises_of_a_transport(n_ranks: int, faulty: bool) -> None:
    """No damage on the way here: a message that is lost with its connection while its sender sleeps comes when that
    wakes, and one of the promises is about time."""
    faults = FaultPlan.parse("0/0@1ms..40ms, 0/1@300ms..350ms") if faulty else None
    network = SimNetwork(n_ranks, crc=True, nic_faults=faults, chunk_bytes=4096, seed=n_ranks)
    names = run_sim(network, lambda _, transport: check_transport(lambda: transport, clock=transport.clock))
    assert len(names[0]) == 14


def test_ranks_of_a_server_share_its_nics_and_are_joined_inside_it() -> None:
    """They keep the promises of a transport; what two of them send over a NIC takes as long as what one sends of both;
    a fault of a server's NIC is one of theirs."""
    nics = (Nic(0, Fraction(10**8), Fraction(10**8)),)
    topology = Topology(tuple(Server(name, 2, nics, Fraction(4 * 10**8)) for name in ("h0", "h1")))
    names = run_sim(
        SimNetwork(topology), lambda _, transport: check_transport(lambda: transport, clock=transport.clock)
    )
    assert len(names[0]) == 14

    def body(rank: int, transport: SimTransport) -> list[float]:
        took_s: list[float] = []
        for pairs in ([(0, 2)], [(0, 2), (1, 3)], [(0, 1)]):
            handles = transport.open([Channel(*pair, 1) for pair in pairs])
            transport.barrier()
            began_s, n_left = transport.clock.now_s(), 0
            for handle, pair in zip(handles, pairs, strict=True):
                if rank in pair:
                    (transport.post_send if rank == pair[0] else transport.post_recv)(
                        handle, np.zeros(1 << 22, np.uint8)
                    )
                    n_left += 1
            while n_left:
                n_left -= len(transport.poll(1.0))
            transport.barrier()
            took_s.append(transport.clock.now_s() - began_s)
        assert transport.hosts == (0, 0, 2, 2)
        return took_s

    for faults, share in (("", 1.0), ("1/0@0s=1/2", 0.5)):
        network = SimNetwork(topology, nic_faults=FaultPlan.parse(faults))
        alone_s, both_s, inside_s = run_sim(network, body)[0]
        assert [alone_s, both_s, inside_s] == pytest.approx(
            [(1 << 22) / (1e8 * share), (1 << 23) / (1e8 * share), (1 << 22) / 4e8], rel=0.2
        )


@pytest.mark.parametrize("name", ["ring", "optcc"])
@pytest.mark.parametrize(
    "faults",
    [
        "",
        "1/0@2ms",
        "1/0@2ms..60ms, 1/1@90ms..200ms",
        "0/0@1ms:out, 2/0@3ms:in",
        "0/0@1ms=1/10, 2/0@2ms..4ms=1/3:out, 2/0@3ms..50ms",
    ],
)
def test_failures_of_nics_change_no_bit(name: str, faults: str) -> None:
    plan, verdict = plan_of(name, 10_001, "float32")
    wanted = run_ranks(4, lambda _, transport: reduce_over(transport, plan, verdict, 2))
    network = SimNetwork(4, nic_faults=FaultPlan.parse(faults), chunk_bytes=8192, seed=3)
    assert run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, 2)) == wanted


def test_the_same_seed_is_the_same_run() -> None:
    plan, verdict = plan_of("ring", 10_001, "float32")

    def run(seed: int) -> tuple[float, int]:
        faults = FaultPlan.parse("2/0@1ms..30ms")
        network = SimNetwork(4, loss=0.02, crc=True, corrupt=0.01, nic_faults=faults, seed=seed)
        run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, 2))
        return network.now_s, network.network.n_lost

    assert run(1) == run(1) != run(2)


def test_a_ring_takes_about_the_time_of_its_bytes() -> None:
    """Headers, acknowledgements and the handshakes come on top."""
    plan, verdict = plan_of("ring", 1_000_000, "float32")
    network = SimNetwork(Topology.parse(RATE))

    def body(_: int, transport: SimTransport) -> float:
        transport.barrier()
        began_s = transport.clock.now_s()
        reduce_over(transport, plan, verdict, 1)
        return transport.clock.now_s() - began_s

    least_s = 2 * 3 / 4 * plan.size_bytes / 50e6
    assert least_s < max(run_sim(network, body)) < 1.1 * least_s


def test_no_rail_left_is_a_named_error_and_a_failure_ends_the_others() -> None:
    def body(rank: int, transport: SimTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.zeros(1 << 20, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        while not transport.poll(30.0):
            pass

    for faults in ("1/0@1ms, 1/1@2ms", "1/0@1ms:in, 1/1@1ms:in"):
        network = SimNetwork(2, nic_faults=FaultPlan.parse(faults), seed=1)
        with pytest.raises(AllRailsFailed, match="no rail between rank 0 and rank 1"):
            run_sim(network, body)

    def fails(rank: int, transport: SimTransport) -> None:
        transport.barrier()
        if rank == 1:
            raise ZeroDivisionError("a test")
        with pytest.raises(RankLost, match="ZeroDivisionError"):
            transport.barrier()
        raise RankLost("known")

    with pytest.raises(ZeroDivisionError):
        run_sim(SimNetwork(3), fails)


@pytest.mark.parametrize(
    ("arguments", "kind", "rule"),
    [
        ({"topology": 0}, InputError, "must be at least one"),
        ({"topology": 2, "loss": 1.0}, InputError, "loss 1.0"),
        ({"topology": 2, "corrupt": 0.1}, InputError, "with crc"),
        ({"topology": 2, "window": 0}, InputError, "window 0"),
        ({"topology": 2, "nic_faults": FaultPlan.parse("0/2@1s")}, TopologyError, "must be one that a rank has"),
    ],
)
def test_wrong_networks_are_refused(arguments: dict[str, object], kind: type[OptccError], rule: str) -> None:
    with pytest.raises(kind, match=rule):
        SimNetwork(**arguments)  # type: ignore[arg-type]


def test_the_simulation_has_no_protocol_of_its_own() -> None:
    """Both drivers run the same `Endpoint`; neither knows the failover table or an end of a channel."""
    assert sim.SimTransport.__mro__[1] is tcp.TcpTransport.__mro__[1]
    folder = Path(optcc.runtime.sim.__file__).parent
    drivers = [folder / f"{name}.py" for name in ("clock", "host", "network", "nic", "stream")]
    texts = [*drivers, Path(sim.__file__), Path(tcp.__file__)]
    imported: set[str] = set()
    for path in texts:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert "optcc.runtime.protocol.endpoint.Endpoint" in imported
    forbidden = ("optcc.failover", "optcc.runtime.protocol.channel", "optcc.runtime.protocol.outbound")
    assert not [name for name in imported if name.startswith((*forbidden, "optcc.runtime.protocol.inbound"))]
