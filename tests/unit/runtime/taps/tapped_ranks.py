"""One collective at every rank over loopback, tapped in memory of the process, and what was taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.plan import Plan
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import make_input
from optcc.runtime.kernels import Kernels
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.control import attach_taps
from optcc.runtime.taps.policy import Tap
from optcc.runtime.taps.records import ChunkRecord, take_records
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.verify.plan import verify_plan

EVERYTHING = Tap(("full",), points=("input", "sent", "arrived", "result", "output"))
RING_BYTES = 1 << 22


def inputs_of(plan: Plan) -> list[npt.NDArray[Any] | None]:
    """The input of each rank of an AllReduce-like collective: its part of a message of its own."""
    t = plan.transfers
    itemsize = np.dtype(t.dtype).itemsize
    count = plan.size_bytes // itemsize
    found: list[npt.NDArray[Any] | None] = []
    for rank in range(plan.n_ranks):
        whole = make_input(rank, count, t.dtype, t.reduction)
        parts = [whole[start:stop] for start, stop, _ in plan.collective.before(rank, count)]
        found.append(np.concatenate(parts) if parts else None)
    return found


def run_tapped(
    plan: Plan,
    *taps: Tap,
    n_runs: int = 1,
    ring_bytes: int = RING_BYTES,
    inputs: list[Any] | None = None,
    kernels: dict[int, Kernels] | None = None,
    is_drained: bool = True,
) -> tuple[list[ChunkRecord], list[dict[str, int]]]:
    """The records of all ranks, drained behind each run or not at all, and the counters by rank."""
    given = inputs_of(plan) if inputs is None else inputs
    verdict = verify_plan(plan)
    itemsize = np.dtype(plan.transfers.dtype).itemsize
    count = plan.size_bytes // itemsize

    def body(rank: int, transport: LoopbackTransport) -> tuple[list[ChunkRecord], dict[str, int]]:
        engine = Engine(transport)
        set_: TapSet = attach_taps(engine, "test", None, taps, ring_bytes)
        prepared = engine.prepare(plan, verdict, kernels=(kernels or {}).get(rank))
        n_out = sum(stop - start for start, stop, _ in plan.collective.after(rank, count))
        recv = np.zeros(n_out, plan.transfers.dtype) if n_out else None
        found: list[ChunkRecord] = []
        for _ in range(n_runs):
            prepared.start(given[rank], recv).wait()
            if is_drained:
                found += take_records(set_, "test")
        engine.barrier()
        engine.close()
        return found, set_.counters

    results = run_ranks(plan.n_ranks, body)
    return [record for records, _ in results for record in records], [counters for _, counters in results]
