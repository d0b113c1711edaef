"""optcc: AllReduce at the speed that the surviving bandwidth allows, with proofs.

The nouns are importable from here and loaded on first use, so that `import optcc` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optcc.collective import Collective
    from optcc.compiler import compile_schedule
    from optcc.dsl import Program
    from optcc.plan import Plan
    from optcc.schedule import Schedule
    from optcc.timing import Timing
    from optcc.topology import Topology
    from optcc.verdict import Verdict

__version__ = "0.1.0"

_WHERE = {
    "Collective": "optcc.collective",
    "Plan": "optcc.plan",
    "Program": "optcc.dsl",
    "Schedule": "optcc.schedule",
    "Timing": "optcc.timing",
    "Topology": "optcc.topology",
    "Verdict": "optcc.verdict",
    "compile_schedule": "optcc.compiler",
}

__all__ = [
    "Collective",
    "Plan",
    "Program",
    "Schedule",
    "Timing",
    "Topology",
    "Verdict",
    "compile_schedule",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'optcc' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
