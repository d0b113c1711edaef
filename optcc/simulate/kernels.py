"""The inner loops of all port models, compiled together: they share the smaller ones."""

from __future__ import annotations

from functools import cache
from typing import Any

from optcc import fifo_port
from optcc.compiled import compiled
from optcc.simulate import dependencies, event_queue, exclusive, fair, fifo, max_min, ports, tick_clock, uplinks

_MODULES = (fifo_port, dependencies, ports, tick_clock, event_queue, fifo, exclusive, max_min, fair, uplinks)


@cache
def kernels() -> Any:
    """The functions in the `KERNELS` of these modules by name, compiled if numba is there."""
    namespace: dict[str, Any] = {}
    for module in _MODULES:
        for name, value in vars(module).items():
            # They are compiled in one namespace, so a constant may not mean two things.
            assert not isinstance(value, int) or namespace.get(name, value) == value, name
            namespace[name] = value
    return compiled([kernel for module in _MODULES for kernel in module.KERNELS], namespace)
