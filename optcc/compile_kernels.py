"""Has numba compile the inner loops and keep them in its cache for later processes.

    python -m optcc.compile_kernels

takes about a minute, once for an installation; where everything is compiled already, two seconds. Nothing needs it:
without it commands run these loops in plain Python, and compile them where that would take longer (`optcc.compiled`).
A session that runs all tests starts this beside itself, so that on a fresh clone another core compiles while this one
collects tests; what most tests need first comes first.
"""

from __future__ import annotations

import numpy as np

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.compiled import compile_always
from optcc.compiler import compile_schedule
from optcc.plan import Plan
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.stored_types import stored_dtype
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import MODELS, simulate
from optcc.static_order import time_static_order
from optcc.topology import Topology
from optcc.verify.plan.report import Questions, judge
from optcc.verify.plan.timing import exact_makespan

SIZE_BYTES = 1 << 16


def plan_of(name: str, topology: Topology) -> Plan:
    """Two segments of a schedule, in the order of a timetable."""
    return compile_schedule(SCHEDULES[name].build(topology, 2), size_bytes=SIZE_BYTES, topology=topology)


def main() -> None:
    """Each kernel once."""
    compile_always()
    slow_one, pods = Topology.parse("4@50GB/s,3=25GB/s"), Topology.parse("8@1GB/s/4:2")
    schedule, plan = SCHEDULES["optimal"].build(slow_one, 2), plan_of("optimal", slow_one)
    simulate(plan, slow_one)
    judge(plan, Questions(schedule))
    for model in MODELS:
        ordered = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=slow_one, ports=model)
        simulate(ordered, slow_one, model=model)
    simulate(plan_of("ring", pods), pods)
    exact_makespan(plan, slow_one, model="fifo")
    time_static_order(SCHEDULES["ring"], slow_one, size_bytes=SIZE_BYTES)
    for dtype in DTYPE_BYTES:
        values = np.ones(64, stored_dtype(dtype))
        for reduction in reductions_of(dtype):
            kernels = NumpyKernels(dtype, reduction)
            kernels.reduce(values, values.copy())
            kernels.finish(values, 3)


if __name__ == "__main__":
    main()
