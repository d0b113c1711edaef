"""Messages from and into a GPU's memory: through page-locked memory of the host, over every transport.

A message is taken from the GPU before `send` returns, behind what the caller has queued on its stream; what has come is
copied to the GPU when it is there, and the caller's stream comes behind the copy, as after a collective
(`optcc.runtime.handle.Handle`). A plan makes its memory once; a message makes its own each time, from CuPy's pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optcc.runtime.buffers import device_of
from optcc.runtime.cupy_kernels import address_of
from optcc.runtime.device_streams import COMPUTE, INTO, OUT, DeviceStreams
from optcc.runtime.engine import Engine
from optcc.runtime.handle import Handle
from optcc.runtime.transport import Bytes


def take_message(engine: Engine, view: Any, stream: Any) -> Bytes:
    """The bytes of a message: `view` itself in the host's memory, else a copy behind what is queued on `stream`."""
    (taken,) = take_messages(engine, [view], [stream])
    return taken


def take_messages(engine: Engine, views: Sequence[Any], streams_of_views: Sequence[Any]) -> list[Bytes]:
    """`take_message` of several, each behind its own stream; all copies are queued before any is waited for."""
    taken: list[Bytes] = []
    used: dict[DeviceStreams, None] = {}
    for view, stream in zip(views, streams_of_views, strict=True):
        if isinstance(view, np.ndarray):
            taken.append(view)
            continue
        streams = engine.streams_of(device_of(view))
        host = _pinned(streams, view.nbytes)
        with streams.device:
            streams.wait_for_mark(streams.mark_stream(stream))
            streams.order(OUT, COMPUTE)
            streams.copy_out(address_of(host), address_of(view), view.nbytes)
        used[streams] = None
        taken.append(host)
    for streams in used:
        streams.streams[OUT].synchronize()
    return taken


class IncomingMessage:
    """Where a message into `view` lands: there, or in page-locked memory on its way to the GPU."""

    __slots__ = ("_mark", "_stream", "_streams", "_view", "host")

    def __init__(self, engine: Engine, view: Any, stream: Any) -> None:
        self.host: Bytes = view
        self._streams: DeviceStreams | None = None
        if not isinstance(view, np.ndarray):
            self._streams = engine.streams_of(device_of(view))
            self._view, self._stream = view, stream
            self._mark = self._streams.mark_stream(stream)
            self.host = _pinned(self._streams, view.nbytes)

    def follow(self, handle: Handle) -> Handle:
        """`handle`, whose message is copied to the GPU once it is here."""
        if self._streams is not None:
            handle.stream = self._stream
            if handle.done:
                self._load(handle)
            else:
                handle.then = lambda: self._load(handle)
        return handle

    def _load(self, handle: Handle) -> None:
        streams = self._streams
        assert streams is not None
        with streams.device:
            streams.wait_for_mark(self._mark)
            streams.order(INTO, COMPUTE)
            streams.copy_into(address_of(self._view), address_of(self.host), self._view.nbytes)
            streams.order(COMPUTE, INTO)
        handle.ready = streams.end(self._stream, (self.host, self._view))


def _pinned(streams: DeviceStreams, n_bytes: int) -> Bytes:
    with streams.device:
        memory = streams.cupy.cuda.alloc_pinned_memory(max(n_bytes, 1))
    return np.frombuffer(memory, dtype=np.uint8, count=n_bytes)
