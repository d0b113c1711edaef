"""Has the inner loops compiled and kept for later processes: what most tests need first comes first.

    python -m tests.compile_kernels

A session that runs all tests starts this beside itself, so that on a fresh clone another core compiles while this one
collects tests; see `tests/conftest.py`. Where everything is compiled already it is over at once.
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
    plan = plan_of("optimal", slow_one)
    simulate(plan, slow_one)
    judge(plan, Questions(SCHEDULES["optimal"].build(slow_one, 2)))
    for model in MODELS[1:]:
        simulate(plan, slow_one, model=model)
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
