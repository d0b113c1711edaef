"""`DeviceStreams`: what one engine queues on one GPU, and what goes on when the GPU has done it.

There are three streams, so that a GPU's two copy engines and its processors work at once: COMPUTE for kernels, INTO for
copies from the host's memory, OUT for copies to it. None of them waits for the legacy default stream. Within a stream
work runs in the order in which it was queued; `order` lets a stream wait for another, on the GPU, and `after` lets the
host go on. Events are recorded once a turn of the engine's loop, not once a step: whatever was queued on a stream since
the last turn has one event, however many wait for it. Events are used again; a run makes none but that of its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from optcc.errors import InputError
from optcc.runtime.cupy_kernels import load_cupy

COMPUTE, INTO, OUT = range(3)
_NOT_READY = 600
"""`cudaErrorNotReady`: what was queued before an event is not done."""


class Collects(Protocol):
    """Who has work for a GPU that is queued together."""

    def flush(self) -> None:
        """Queues it."""
        ...


class Ready:
    """An event on the GPU: the output of a run is there once it has passed."""

    __slots__ = ("_streams", "event")

    def __init__(self, streams: DeviceStreams, event: Any) -> None:
        self._streams, self.event = streams, event

    def order(self, stream: Any) -> None:
        """Work that is queued on `stream` from now on comes after the run; the host does not wait. Raises InputError if
        `stream` captures a graph."""
        self._streams.refuse_capture(stream)
        with self._streams.device:
            stream.wait_event(self.event)

    def order_current(self, ordered: Any) -> None:
        """`order` for CuPy's current stream of the device, unless that is `ordered`: it is behind the run already."""
        current = self._streams.current_stream()
        if current != ordered:
            self.order(current)

    def synchronize(self) -> None:
        """The host waits."""
        self.event.synchronize()


class DeviceStreams:
    """Three streams of device `device_id`. Raises EnvironmentMissing without CuPy or a GPU."""

    def __init__(self, device_id: int) -> None:
        self.cupy = cupy = load_cupy()
        self.device_id, self.device = device_id, cupy.cuda.Device(device_id)
        self._event = cupy.cuda.Event
        runtime = cupy.cuda.runtime
        self._memcpy, self._query = runtime.memcpyAsync, runtime.eventQuery
        self._to_device, self._to_host = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
        self._is_capturing, self._runtime_error = runtime.streamIsCapturing, runtime.CUDARuntimeError
        # CUDA finds from the addresses which GPUs they are of.
        self._across = runtime.memcpyDefault
        with self.device:
            self.streams = tuple(cupy.cuda.Stream(non_blocking=True) for _ in range(3))
            self._turns = tuple(self._event(disable_timing=True) for _ in range(3))
        # By stream: how much was queued, how much of it is known to be done, and how far others wait for it.
        self._queued, self._reached = [0, 0, 0], [0, 0, 0]
        self._waits = [[0, 0, 0] for _ in range(3)]
        # What goes on: that has no event yet, and that has one.
        self._pending: tuple[list[Callable[[], None]], ...] = ([], [], [])
        self._flights: tuple[deque[tuple[Any, int, list[Callable[[], None]]]], ...] = (deque(), deque(), deque())
        self._spare: list[Any] = []
        self._collecting: dict[Collects, None] = {}
        self._retired: deque[tuple[Any, Any]] = deque()

    @property
    def is_idle(self) -> bool:
        """True if nobody waits for the GPU."""
        return not self._collecting and not any(self._pending) and not any(self._flights)

    @property
    def n_queued(self) -> int:
        """How much was queued on COMPUTE so far."""
        return self._queued[COMPUTE]

    def is_reached(self, place: int) -> bool:
        """Whether what was queued on COMPUTE up to `place` is known to be done."""
        return self._reached[COMPUTE] >= place

    def collect(self, who: Collects) -> None:
        """`who` has work, and is flushed at the next turn."""
        self._collecting[who] = None

    def note(self, stream: int) -> None:
        """Something was queued."""
        self._queued[stream] += 1

    def order(self, later: int, earlier: int) -> None:
        """What is queued on stream `later` from now on comes after what was queued on `earlier`."""
        queued = self._queued[earlier]
        if queued == self._reached[earlier] or queued == self._waits[later][earlier]:
            return
        event = self._turns[earlier]
        # A wait takes the event as it is recorded now, so that it can be recorded again at once.
        event.record(self.streams[earlier])
        self.streams[later].wait_event(event)
        self._waits[later][earlier] = queued
        self.note(later)

    def after(self, stream: int, go_on: Callable[[], None]) -> None:
        """`go_on()` once everything is done that was queued on `stream`; at once if it is."""
        if self._queued[stream] == self._reached[stream]:
            go_on()
        else:
            self._pending[stream].append(go_on)

    def copy_into(self, dst: int, src: int, n_bytes: int) -> None:
        """Queues a copy from page-locked memory on INTO."""
        self._memcpy(dst, src, n_bytes, self._to_device, self.streams[INTO].ptr)
        self.note(INTO)

    def copy_out(self, dst: int, src: int, n_bytes: int) -> None:
        """Queues a copy to page-locked memory on OUT."""
        self._memcpy(dst, src, n_bytes, self._to_host, self.streams[OUT].ptr)
        self.note(OUT)

    def copy_across(self, dst: int, src: int, n_bytes: int) -> None:
        """Queues a copy on OUT from the memory of this GPU to that of any."""
        self._memcpy(dst, src, n_bytes, self._across, self.streams[OUT].ptr)
        self.note(OUT)

    # --- the caller's streams -----------------------------------------------------------------------------------------

    def current_stream(self) -> Any:
        """The stream of this device that is current in the caller's thread."""
        return self.cupy.cuda.get_current_stream(self.device_id)

    def refuse_capture(self, stream: Any) -> None:
        """Raises InputError if `stream` captures a graph: what is launched later, by the graph, has no host beside it
        that posts messages, and an event outside of a graph cannot be waited for within."""
        with self.device:
            try:
                captures = self._is_capturing(stream.ptr)
            except self._runtime_error as error:
                # Of the legacy default stream CUDA says so where a blocking stream captures.
                if "Capture" not in str(error):
                    raise
                captures = True
        if captures:
            raise InputError("stream: captures a CUDA graph: must not while collectives and messages use it")

    def mark_stream(self, stream: Any) -> Any:
        """An event behind what the caller has queued on its stream so far, for `wait_for_mark`. Raises InputError if
        the stream captures a graph."""
        self.refuse_capture(stream)
        with self.device:
            event = self._take_event()
            event.record(stream)
        return event

    def wait_for_mark(self, event: Any) -> None:
        """COMPUTE waits for what came before an event of `mark_stream`."""
        self.streams[COMPUTE].wait_event(event)
        self.note(COMPUTE)
        self._spare.append(event)

    def end(self, stream: Any, kept: Any) -> Ready:
        """The end of a run: the caller's stream waits for what is queued on COMPUTE, and `kept` lives until then.

        The pool of CuPy may hand out an array's memory as soon as nobody refers to it, on another stream than that
        which waits.
        """
        with self.device:
            event = self._event(disable_timing=True)
            event.record(self.streams[COMPUTE])
            ready = Ready(self, event)
            ready.order(stream)
        while self._retired and self._retired[0][0].done:
            self._retired.popleft()
        self._retired.append((event, kept))
        return ready

    # --- the host goes on ---------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Queues what was collected, and goes on with what the GPU has done; whether there was anything."""
        went_on = False
        while self._collecting:
            went_on = True
            collecting, self._collecting = self._collecting, {}
            for each in collecting:
                each.flush()
        for number, stream in enumerate(self.streams):
            flights, pending = self._flights[number], self._pending[number]
            if pending:
                with self.device:
                    event = self._take_event()
                    event.record(stream)
                flights.append((event, self._queued[number], pending[:]))
                pending.clear()
            while flights and self._is_done(flights[0][0]):
                event, queued, waiting = flights.popleft()
                self._spare.append(event)
                self._reached[number] = max(self._reached[number], queued)
                went_on = True
                for go_on in waiting:
                    go_on()
        return went_on

    def _is_done(self, event: Any) -> bool:
        """Whether the GPU has passed an event; raises CuPy's error if it has failed: `Event.done` is False for ever."""
        status = self._query(event.ptr)
        if status not in (0, _NOT_READY):
            event.synchronize()
        return bool(status == 0)

    def _take_event(self) -> Any:
        return self._spare.pop() if self._spare else self._event(disable_timing=True)

    def settle(self) -> None:
        """Forgets who waits, and waits until nothing that was queued touches memory any more."""
        self._collecting.clear()
        for number, stream in enumerate(self.streams):
            self._pending[number].clear()
            self._flights[number].clear()
            stream.synchronize()
            self._reached[number] = self._queued[number]
        self._retired.clear()
