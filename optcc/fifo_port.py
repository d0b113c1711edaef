"""The service rule of fifo ports, for the compiled loops that apply it.

An out port and an in port each serve one transfer at a time at their own rates, and the network between them buffers.
A transfer that occupies its out port for `out_time` and its in port for `in_time` (numbers of any one unit):

    sent   out_time after its first byte leaves
    taken  when the in port is free, not before `delay_at_in_port` after its first byte leaves
    landed in_time after it is taken

`optcc.simulate.fifo` applies it event by event, `optcc.static_order` to ports that serve in the order written,
`optcc.passes.list_schedule` to choose an order. Two more statements share no code with it, so that they can check it:
`optcc.verify.plan.port_graph` (exact) and the references in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def delay_at_in_port(out_time: Any, in_time: Any) -> Any:
    """How long after its first byte leaves a transfer is taken by an idle in port, so that the in port never pauses.

    A slower in port starts at once (cut-through); a faster one so late that both ports finish together.

    >>> delay_at_in_port(3, 5), delay_at_in_port(5, 3)
    (0, 2)
    """
    return max(out_time - in_time, 0)


def occupy(free_at: Any, arrives: Any, lasts: Any) -> Any:
    """When a port that is free at `free_at` finishes a transfer that arrives at `arrives` and takes `lasts`.

    >>> occupy(free_at=7, arrives=4, lasts=3), occupy(free_at=2, arrives=4, lasts=3)
    (10, 7)
    """
    return max(free_at, arrives) + lasts


KERNELS: tuple[Callable[..., Any], ...] = (delay_at_in_port, occupy)
