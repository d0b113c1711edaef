"""What the actions of a plan do at one rank: messages are posted, and what has come is reduced or copied.

The engine says which actions are due (`state` decides), `buffers` where their bytes are. Where arrays are in a GPU's
memory, `device_actions` does this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from optcc.runtime.buffers import COPY, RECV, REDUCE, REDUCE_FIRST, SEND, BoundAction
from optcc.runtime.kernels import Kernels
from optcc.runtime.transport import Binds, Transport

_FIRST_BLOCK_BYTES = 1 << 18


class PlanActions:
    """The actions of one plan on elements of `itemsize` bytes in the host's memory."""

    def __init__(self, transport: Transport, kernels: Kernels, itemsize: int) -> None:
        self._transport, self._kernels, self._itemsize = transport, kernels, itemsize
        self._reduce, self._copy = kernels.reduce, kernels.copy

    def compute(self, entry: BoundAction) -> None:
        """Does a computation."""
        code, _, target, source = entry
        if code == REDUCE:
            self._reduce(target, source)
        elif code == COPY:
            self._copy(target, source)
        else:
            assert code == REDUCE_FIRST
            self._reduce_first(target, source)

    def _reduce_first(self, target: Any, both: tuple[Any, Any]) -> None:
        """target = first op source, block by block, so that what is copied is still in the cache."""
        first, source = both
        step = _FIRST_BLOCK_BYTES // self._itemsize
        for at in range(0, len(target), step):
            block = slice(at, at + step)
            self._copy(target[block], first[block])
            self._reduce(target[block], source[block])

    def as_call(self, entry: BoundAction) -> Callable[[], Any]:
        """An action as a call, for a driver that does it again and again."""
        code, where, first, second = entry
        if code in (SEND, RECV):
            transport = self._transport
            if isinstance(transport, Binds):
                return transport.bind_send(where, first) if code == SEND else transport.bind_recv(where, first)
            return partial(transport.post_send if code == SEND else transport.post_recv, where, first)
        if code == REDUCE_FIRST:
            return partial(self._reduce_first, first, second)
        assert code in (REDUCE, COPY)
        bind = self._kernels.bind_reduce if code == REDUCE else self._kernels.bind_copy
        return bind(first, second)
