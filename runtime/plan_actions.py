"""What the actions of a plan do at one rank: messages are posted, and what has come is reduced or copied.

The engine says which actions are due (`state` decides), `buffers` where their bytes are. Where the arrays are in device
memory, which the transport does not reach, messages go through host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from optcc.runtime.buffers import COPY, RECV, REDUCE, REDUCE_FIRST, REDUCE_SLOT, SEND, BoundAction, Staging
from optcc.runtime.kernels import Kernels
from optcc.runtime.transport import Binds, Bytes, Transport

_FIRST_BLOCK_BYTES = 1 << 18


class PlanActions:
    """The actions of one plan, none of whose messages is longer than `longest_bytes`.

    `then(go_on)` calls `go_on` now, or once everything is done that has been queued on the device. `lent` is host
    memory that is being sent from, by channel, oldest first.
    """

    def __init__(
        self,
        transport: Transport,
        kernels: Kernels,
        staging: Staging | None,
        longest_bytes: int,
        itemsize: int,
        then: Callable[[Callable[[], None]], None],
    ) -> None:
        self._transport, self._kernels, self._staging = transport, kernels, staging
        self._longest, self._itemsize, self._then = longest_bytes, itemsize, then
        self._reduce, self._copy = kernels.reduce, kernels.copy
        # Of device memory: where a message lands on its way from a slot, and what is free for the next that is sent.
        self._landing = None if staging is None else staging.device(longest_bytes)
        self.lent: dict[int, deque[Bytes]] = {}
        self._spare: list[Bytes] = []

    def send_staged(self, handle: int, view: Any) -> None:
        """Sends from device memory: through host memory, which is taken back once it is sent."""
        assert self._staging is not None
        host = self._spare.pop() if self._spare else self._staging.host(self._longest)
        self.lent.setdefault(handle, deque()).append(host)
        self._staging.store(host[: view.nbytes], view)
        self._then(lambda: self._transport.post_send(handle, host[: view.nbytes]))

    def take_back(self, handle: int) -> None:
        """A message has been sent from host memory, which is free for another."""
        self._spare.append(self.lent[handle].popleft())

    def compute(self, entry: BoundAction) -> None:
        """Does a computation, or queues it on the device."""
        code, _, target, source = entry
        if code == REDUCE:
            self._reduce(target, source)
        elif code == COPY:
            self._copy(target, source)
        elif code == REDUCE_FIRST:
            self._reduce_first(target, source)
        else:
            self._compute_staged(code, target, source)

    def _reduce_first(self, target: Any, both: tuple[Any, Any]) -> None:
        """target = first op source, block by block, so that what is copied is still in the cache."""
        first, source = both
        step = _FIRST_BLOCK_BYTES // self._itemsize
        for at in range(0, len(target), step):
            block = slice(at, at + step)
            self._copy(target[block], first[block])
            self._reduce(target[block], source[block])

    def _compute_staged(self, code: int, target: Any, slot: Bytes) -> None:
        """A computation on device memory with what has come into host memory."""
        assert self._staging is not None and self._landing is not None
        landing = self._landing[: slot.nbytes]
        self._staging.load(landing, slot)
        if code == REDUCE_SLOT:
            self._reduce(target, self._kernels.view(landing))
        else:
            self._copy(target, self._kernels.view(landing))

    def as_call(self, entry: BoundAction) -> Callable[[], Any]:
        """An action in host memory as a call, for a driver that does it again and again."""
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
