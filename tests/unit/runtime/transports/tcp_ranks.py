"""Ranks over TCP, as threads of one process: rail i of rank r is 127.0.(i+1).(r+1). What they reduce, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from optcc.compiler import compile_schedule
from optcc.plan import Plan
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.tcp import TcpTransport
from optcc.schedules.optcc import optcc
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import verify_plan
from tests.unit.rank_threads import Room, run_threads

T = TypeVar("T")
Array = npt.NDArray[Any]
DONE_S = 40.0
SMALL: dict[str, Any] = {"chunk_bytes": 8192, "buffer_bytes": 8192, "window": 8}
"""Small chunks and buffers, so that much is on its way, in parts, at any moment."""


def nics_of(rank: int, n_rails: int, rates: Sequence[int] = ()) -> list[HostNic]:
    rates = rates or [1] * n_rails
    return [HostNic(f"r{i}", f"127.0.{i + 1}.{rank + 1}", rates[i], rates[i]) for i in range(n_rails)]


def run_tcp(
    n_ranks: int,
    function: Callable[[int, TcpTransport], T],
    *,
    n_rails: int = 2,
    rates: Sequence[int] = (),
    kind: type[TcpTransport] = TcpTransport,
    room: Room | None = None,
    **settings: Any,
) -> list[T]:
    """`function` once a rank, in threads; raises the first exception that is not a consequence of another's."""
    made_in = room or Room(n_ranks)

    def make(rank: int) -> TcpTransport:
        return kind(made_in.meet(rank), nics_of(rank, n_rails, rates), **settings)

    return run_threads(n_ranks, make, function)


@cache
def plan_of(name: str, count: int, dtype: str) -> tuple[Plan, Verdict]:
    size_bytes = count * np.dtype(dtype).itemsize
    if name in ("ring", "recursive-doubling"):
        schedule = SCHEDULES[name].build(Topology.parse("4@1GB/s"), 1)
        plan = compile_schedule(schedule, size_bytes=size_bytes, dtype=dtype)
    else:
        topology = Topology.parse("4@1GB/s,3=500MB/s")
        plan = compile_schedule(optcc.build(topology, 2), size_bytes=size_bytes, dtype=dtype, topology=topology)
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED
    return plan, verdict


def input_of(plan: Plan, rank: int, run: int) -> Array:
    """Numbers whose sum depends on the order of adding, and whose every double or missing addition shows."""
    dtype = np.dtype(plan.transfers.dtype)
    random_ = np.random.default_rng((rank, run))
    count = plan.size_bytes // dtype.itemsize
    if dtype.kind == "f":
        return random_.standard_normal(count).astype(dtype)
    return random_.integers(-(2**31), 2**31, count).astype(dtype)


def reduce_over(transport: Transport, plan: Plan, verdict: Verdict, n_runs: int) -> list[bytes]:
    executor = Executor(plan, transport.rank, transport, verdict, deadline_s=DONE_S / 2)
    results: list[bytes] = []
    for run in range(n_runs):
        recv = np.empty(plan.size_bytes // np.dtype(plan.transfers.dtype).itemsize, plan.transfers.dtype)
        executor.all_reduce(input_of(plan, transport.rank, run), recv)
        results.append(recv.tobytes())
    return results


@cache
def without_faults(name: str, count: int, dtype: str, n_runs: int) -> list[list[bytes]]:
    plan, verdict = plan_of(name, count, dtype)
    return run_ranks(plan.n_ranks, lambda _, transport: reduce_over(transport, plan, verdict, n_runs))


def poll_for_ever(transport: TcpTransport) -> None:
    while True:
        transport.poll(1.0)
