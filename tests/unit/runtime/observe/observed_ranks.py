"""Ranks under observation in simulated time, and what is left of them: a dump of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from optcc.errors import OptccError
from optcc.faults import FaultPlan
from optcc.plan import Plan
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.engine import Engine
from optcc.runtime.kernels import Kernels
from optcc.runtime.observe.dump import FlightDump
from optcc.runtime.observe.observer import Observer
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Topology
from optcc.verdict import Verdict

N_RANKS = 4
Program = Callable[[Communicator, SimTransport], None]


@lru_cache(maxsize=8)
def planner_of(n_ranks: int, schedule: str = "ring") -> Planner:
    return Planner(Topology.parse(f"{n_ranks}@250MB/s"), schedules={"allreduce": schedule})


class Failure(Exception):
    """What a program of a test raises."""


def fly(
    program: Program,
    *,
    n_ranks: int = N_RANKS,
    faults: str = "",
    deadline_s: float = 20.0,
    in_detail: bool = False,
    check_every: int = 0,
    kernels: dict[int, Callable[..., Kernels]] | None = None,
    schedules: dict[int, str] | None = None,
    **network: Any,
) -> list[FlightDump]:
    """Runs `program` at every rank of a simulated network with two NICs a rank; the dumps, by rank."""
    dumps: dict[int, FlightDump] = {}

    def body(rank: int, transport: SimTransport) -> None:
        plans = planner_of(n_ranks, (schedules or {}).get(rank, "ring")).__call__
        comm = Communicator(transport, plans, clock=transport.clock, deadline_s=deadline_s)
        _compute_by((kernels or {}).get(rank), comm.whole_engine, transport)
        observer = Observer(comm.whole_engine, "sim", None, in_detail=in_detail, check_every=check_every)
        try:
            with comm:
                program(comm, transport)
        except (OptccError, Failure, KeyboardInterrupt):
            pass
        finally:
            dumps[rank] = observer.contents()

    plan = FaultPlan.parse(faults) if faults else None
    run_sim(SimNetwork(n_ranks, nic_faults=plan, **network), body)
    return [dumps[rank] for rank in range(n_ranks)]


def _compute_by(make: Callable[..., Kernels] | None, engine: Engine, transport: SimTransport) -> None:
    """From now on plans are computed by other kernels, which `make` makes of (transport, dtype, reduction)."""
    if make is None:
        return
    former = engine.prepare

    def prepare(plan: Plan, verdict: Verdict, **options: Any) -> PersistentPlan:
        t = plan.transfers
        return former(plan, verdict, **options, kernels=make(transport, t.dtype, t.reduction))

    setattr(engine, "prepare", prepare)  # noqa: B010 - mypy refuses it as an assignment
