"""optcc: AllReduce at the speed that the surviving bandwidth allows, with proofs.

What programs use is importable from here and loaded on first use, so that `import optcc` stays fast. Functions that
share their name with a module are imported from it: `optcc.dsl.schedule`, `optcc.simulate.simulate`.

>>> from optcc import Collective, Planner, Topology
>>> plan, proof = Planner(Topology.parse("4@1GB/s"))(Collective("allreduce", 4), 1024, "float32", "sum")
>>> proof.verdict
'proved'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optcc.collective import Collective
    from optcc.compiler import compile_schedule
    from optcc.dsl import Program
    from optcc.errors import OptccError
    from optcc.job import init
    from optcc.plan import Plan
    from optcc.planner import Planner, build_plan, find_schedule
    from optcc.runtime.communicator import Communicator
    from optcc.runtime.probe import probe
    from optcc.runtime.transports.loopback import run_ranks
    from optcc.runtime.transports.mpi import MpiTransport
    from optcc.runtime.transports.tcp import TcpTransport
    from optcc.schedule import Schedule
    from optcc.timing import Timing
    from optcc.topology import Topology
    from optcc.verdict import Verdict
    from optcc.verify.plan import verify_plan

__version__ = "0.1.0"

_MODULE_OF = {
    "Collective": "optcc.collective",
    "Communicator": "optcc.runtime.communicator",
    "MpiTransport": "optcc.runtime.transports.mpi",
    "OptccError": "optcc.errors",
    "Plan": "optcc.plan",
    "Planner": "optcc.planner",
    "Program": "optcc.dsl",
    "Schedule": "optcc.schedule",
    "TcpTransport": "optcc.runtime.transports.tcp",
    "Timing": "optcc.timing",
    "Topology": "optcc.topology",
    "Verdict": "optcc.verdict",
    "build_plan": "optcc.planner",
    "compile_schedule": "optcc.compiler",
    "find_schedule": "optcc.planner",
    "init": "optcc.job",
    "probe": "optcc.runtime.probe",
    "run_ranks": "optcc.runtime.transports.loopback",
    "verify_plan": "optcc.verify.plan",
}

__all__ = [
    "Collective",
    "Communicator",
    "MpiTransport",
    "OptccError",
    "Plan",
    "Planner",
    "Program",
    "Schedule",
    "TcpTransport",
    "Timing",
    "Topology",
    "Verdict",
    "build_plan",
    "compile_schedule",
    "find_schedule",
    "init",
    "probe",
    "run_ranks",
    "verify_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'optcc' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
