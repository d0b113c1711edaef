"""A stand-in for CuPy whose GPUs are as asynchronous as CUDA lets them be, for tests on machines without one.

    cupy = StandIn(seed=7, n_devices=2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

It is written from what CUDA and CuPy document, and is as unkind as that permits:

- A GPU's memory is no memory of the processor: addresses are such that to follow one is a fault, and arrays have
  `__cuda_array_interface__` and no `__array_interface__`; NumPy refuses them. A kernel reaches the memory of its own
  GPU and page-locked memory, and nothing else.
- Fresh memory holds anything: it is poisoned. What is freed goes to the pool of the stream on which it was made, and is
  handed out again at once, although work that was queued may still use it (cupy.cuda.MemoryPool): right for that
  stream, whose work is in order, and wrong for every other.
- Calls queue work. Streams are ordered in themselves; between them there is no order but by events, by the legacy
  default stream (which waits for the blocking streams, and they for it), and by waiting. Which of the works that may
  run runs next, and how much has run when the host looks, is drawn from the seed: some streams are starved for long.
- An event that was never recorded is done, and to wait for it is to wait for nothing. `wait_event` takes the event as
  it was last recorded when it is called.
- An error of a kernel stays: later calls raise it, and what is looked at is never done (`Event.done` is False).
- A handle of memory (CUDA IPC) is that of a whole allocation of `cudaMalloc`: the pool's blocks are parts of one, which
  begins before them. The process that made it cannot open it. In another one it is at another address, for the device
  that was current there, until it is closed as often as it was opened. `process` says which process this is: tests
  have the threads of one be several.
- On a stream that captures a graph nothing runs, and other streams must not wait for it.
- Streams belong to a device, and can be entered only while that is the current one. What is current is the thread's.

Kernels are those of `kernels.cu`: in NumPy's arithmetic, or in that of the text itself (`tests.unit.device_code`).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import struct
import tempfile
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np

from optcc.runtime.kernels import NumpyKernels, divide
from optcc.runtime.stored_types import stored_dtype

BASE = 0x4000_0000_0000_0000
"""No address of a process on x86-64 or arm64: to follow it is a fault."""
DEVICE_BYTES = 1 << 44
POOL_UNIT = 512
POISON = 0xA5
LEGACY = 0
POISONED_BYTES_MAX = 1 << 20
"""Of an allocation of `cudaMalloc` so much is poisoned, and the rest is zero: it is a file."""
_HANDLE = struct.Struct("<48sQ8s")
_FILES = itertools.count()
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE, _DEFAULT = 1, 2, 3, 4
_EAGERNESS = (0.0, 0.05, 0.3, 0.8)

RunKernel = Callable[["StandIn", int, str, tuple[int, ...], tuple[int, ...], list[int]], None]
"""(the stand-in, the device, the kernel's name, grid, block, arguments)"""


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA."""


class _Block:
    """Memory of a device: handed out, or in the pool of a stream."""

    def __init__(self, cupy: StandIn, device: int, address: int, n_bytes: int, stream: int) -> None:
        self.cupy, self.device, self.address, self.n_bytes, self.stream = cupy, device, address, n_bytes, stream
        # How much was queued on that stream when the block was freed.
        self.freed_at = 0


class _Owner:
    """One use of a block, which goes to the pool once nobody refers to this."""

    def __init__(self, block: _Block) -> None:
        self.block = block

    def __del__(self) -> None:
        self.block.cupy._take_back(self.block)


class MemoryPointer:
    """Where an array begins."""

    def __init__(self, cupy: StandIn, owner: Any, ptr: int, device_id: int) -> None:
        self.cupy, self.mem, self.ptr, self.device_id = cupy, owner, ptr, device_id


class Memory:
    """`cupy.cuda.Memory`: an allocation of `cudaMalloc` on the device that is current, which no pool divides.

    Its bytes are a file that every process maps which has opened its handle.
    """

    def __init__(self, cupy: StandIn, n_bytes: int) -> None:
        self.cupy, self.size, self.device_id = cupy, n_bytes, cupy._device()
        folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        self.path = folder / f"stand-in-{os.getpid()}-{next(_FILES)}"
        self.path.touch(0o600)
        os.truncate(self.path, n_bytes)
        finalize(self, self.path.unlink, missing_ok=True)
        cupy.n_allocations += 1
        self.ptr = cupy._map(self.device_id, self.path, n_bytes)
        cupy._bytes(self.ptr, min(n_bytes, POISONED_BYTES_MAX), self.device_id)[:] = POISON
        cupy._exports[self.ptr] = self.path, n_bytes, cupy.process()


class Stream:
    """Work in order."""

    def __init__(self, cupy: StandIn, ptr: int, device_id: int, *, non_blocking: bool) -> None:
        self.cupy, self.ptr, self.device_id, self.non_blocking = cupy, ptr, device_id, non_blocking
        self.queue: deque[tuple[tuple[tuple[Stream, int], ...], Callable[[], None]]] = deque()
        self.n_queued = self.n_done = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Stream, _NullStream)) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return self.ptr

    @property
    def done(self) -> bool:
        return self.cupy._look(self, self.n_queued)

    def synchronize(self) -> None:
        self.cupy._run_until(self, self.n_queued)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self.cupy)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.place is not None:
            self.cupy._queue(self, lambda: None, (event.place,))

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        self.cupy._queue(self, lambda: callback(arg))

    def __enter__(self) -> Stream:
        self.cupy._enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.cupy._leave()


class _NullStream:
    """`Stream.null`: the legacy default stream of the device that is current."""

    ptr, device_id = LEGACY, -1

    def __init__(self, cupy: StandIn) -> None:
        self.cupy = cupy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cupy._null(), name)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "ptr", None) == LEGACY

    def __hash__(self) -> int:
        return LEGACY

    def __enter__(self) -> _NullStream:
        self.cupy._enter(self.cupy._null())
        return self

    def __exit__(self, *error: object) -> None:
        self.cupy._leave()


class Event:
    """A place in a stream, as it was last recorded; with the time at which the GPU came by, ms."""

    def __init__(self, cupy: StandIn) -> None:
        self.cupy = cupy
        self.place: tuple[Stream, int] | None = None
        self.ms = 0.0
        # Its address, for `runtime.eventQuery`.
        self.ptr = id(self)
        cupy._events[self.ptr] = self

    def record(self, stream: Any = None) -> None:
        stream = self.cupy._resolve(stream)

        def come_by() -> None:
            self.ms = self.cupy.ms

        with self.cupy._lock:
            self.cupy._queue(stream, come_by)
            self.place = stream, stream.n_queued

    @property
    def done(self) -> bool:
        return self.place is None or self.cupy._look(*self.place)

    def synchronize(self) -> None:
        if self.place is not None:
            self.cupy._run_until(*self.place)


class Device:
    """A GPU; entered, it is the current one of the thread."""

    def __init__(self, cupy: StandIn, number: int | None) -> None:
        self.cupy = cupy
        self.id = cupy._device() if number is None else int(number)
        if not 0 <= self.id < cupy.n_devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 2 + self.id}

    def synchronize(self) -> None:
        for stream in list(self.cupy._streams.values()):
            if stream.device_id == self.id:
                stream.synchronize()

    def use(self) -> None:
        self.cupy._here.devices = (*self.cupy._devices()[:-1], self.id)

    def __enter__(self) -> Device:
        self.cupy._here.devices = (*self.cupy._devices(), self.id)
        return self

    def __exit__(self, *error: object) -> None:
        self.cupy._here.devices = self.cupy._devices()[:-1]


class DeviceArray:
    """A contiguous array in a device's memory: `cupy.ndarray`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer) -> None:
        self.cupy, self.data, self.shape, self.dtype = memptr.cupy, memptr, shape, np.dtype(dtype)
        self.size = int(np.prod(shape, dtype=np.int64))
        self.nbytes, self.ndim, self.itemsize = self.size * self.dtype.itemsize, len(shape), self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=True)
        self.device = Device(self.cupy, memptr.device_id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = self.cupy.cuda.get_current_stream(self.device.id).ptr
        return {
            **{"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "version": 3},
            **{"data": (self.data.ptr, False), "strides": None, "stream": stream or 1},
        }

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, dtype: Any) -> DeviceArray:
        dtype = np.dtype(dtype)
        assert self.nbytes % dtype.itemsize == 0
        return DeviceArray((*self.shape[:-1], self.nbytes // dtype.itemsize), dtype, self.data)

    def reshape(self, *shape: Any) -> DeviceArray:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if wanted == (-1,):
            wanted = (self.size,)
        assert int(np.prod(wanted, dtype=np.int64)) == self.size
        return DeviceArray(wanted, self.dtype, self.data)

    def ravel(self) -> DeviceArray:
        return self.reshape(-1)

    def __getitem__(self, key: Any) -> DeviceArray:
        assert isinstance(key, slice) and self.ndim == 1
        start, stop, step = key.indices(self.size)
        assert step == 1
        stop = max(start, stop)
        pointer = MemoryPointer(self.cupy, self.data.mem, self.data.ptr + start * self.itemsize, self.device.id)
        return DeviceArray((stop - start,), self.dtype, pointer)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self if key is Ellipsis else self[key]
        cupy, here = self.cupy, self.device.id
        place, length, dtype = target.data.ptr, target.nbytes, target.dtype
        if isinstance(value, DeviceArray):
            source, given, n_bytes = value.data.ptr, value.dtype, value.nbytes

            def store() -> None:
                into = cupy._bytes(place, length, here).view(dtype)
                into[...] = cupy._bytes(source, n_bytes, here).view(given)
        else:
            scalar = np.array(value).astype(dtype)

            def store() -> None:
                cupy._bytes(place, length, here).view(dtype)[...] = scalar

        cupy._queue(cupy._current(here), store)

    def fill(self, value: Any) -> None:
        self.reshape(-1)[:] = value

    def copy(self) -> DeviceArray:
        with Device(self.cupy, self.device.id):
            made = self.cupy.empty(self.shape, self.dtype)
        made[...] = self
        return made

    def get(self, stream: Any = None) -> Any:
        """As CuPy: the copy is queued on the stream, and waited for."""
        self.cupy._resolve(stream, self.device.id).synchronize()
        return self.cupy._bytes(self.data.ptr, self.nbytes, self.device.id).view(self.dtype).reshape(self.shape).copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __int__(self) -> int:
        return int(self.get())

    def __ne__(self, other: object) -> Any:
        assert isinstance(other, DeviceArray) and other.size == self.size
        with Device(self.cupy, self.device.id):
            made = self.cupy.empty(self.shape, np.bool_)
        cupy, here, width, dtype = self.cupy, self.device.id, self.nbytes, self.dtype
        out, a, b = made.data.ptr, self.data.ptr, other.data.ptr

        def compare() -> None:
            own, theirs = (cupy._bytes(each, width, here).view(dtype) for each in (a, b))
            cupy._bytes(out, width // dtype.itemsize, here).view(np.bool_)[:] = own != theirs

        cupy._queue(cupy._current(here), compare)
        return made

    __hash__ = None  # type: ignore[assignment]

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """The consumer's stream waits for the producer's current one; -1: it does not."""
        if stream != -1:
            event = self.cupy._current(self.device.id).record()
            self.cupy._by_pointer(stream or 0, self.device.id).wait_event(event)
        return self


class StandIn(ModuleType):
    """What of CuPy the product uses, on `n_devices` GPUs that are not there."""

    __version__ = "14.2.0"
    ndarray = DeviceArray

    def __init__(self, seed: int = 0, n_devices: int = 1, run_kernel: RunKernel | None = None) -> None:
        super().__init__("cupy")
        self.n_devices, self.run_kernel = n_devices, run_kernel or run_in_numpy
        self.launches: list[str] = []
        self.n_allocations = 0
        self.ms = 0.0
        self.draw(seed)
        self._lock = threading.RLock()
        self._here = threading.local()
        self._streams: dict[tuple[int, int], Stream] = {
            (device, LEGACY): Stream(self, LEGACY, device, non_blocking=False) for device in range(n_devices)
        }
        self._next = [BASE + device * DEVICE_BYTES for device in range(n_devices)]
        self._starts: list[list[int]] = [[] for _ in range(n_devices)]
        self._backing: dict[int, Any] = {}
        self._pools: dict[tuple[int, int, int], list[_Block]] = {}
        self._pinned_starts: list[int] = []
        self._pinned: dict[int, int] = {}
        self._kept: list[Any] = []
        self._events: WeakValueDictionary[int, Event] = WeakValueDictionary()
        self.error: CUDARuntimeError | None = None
        # The streams that capture a graph, by their numbers.
        self.capturing: set[int] = set()
        self.process: Callable[[], Any] = os.getpid
        # By address: the file, the length and the process of what handles are of; and, by process, device and file,
        # where it is open and how often.
        self._exports: dict[int, tuple[Path, int, Any]] = {}
        self._opened: dict[tuple[Any, int, Path], list[int]] = {}
        self.cuda = self._make_cuda()

    def draw(self, seed: int) -> None:
        """From now on another order."""
        self.rng = random.Random(seed)
        self.eagerness = self.rng.choice(_EAGERNESS)
        self._weights: dict[tuple[int, int], float] = {}

    # --- arrays -------------------------------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> DeviceArray:
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        dtype = np.dtype(dtype)
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        device = self._device()
        return DeviceArray(shape, dtype, self._allocate(device, n_bytes, self._current(device).ptr))

    def zeros(self, shape: Any, dtype: Any = np.float64) -> DeviceArray:
        made = self.empty(shape, dtype)
        made[...] = 0
        return made

    def empty_like(self, like: DeviceArray, dtype: Any = None) -> DeviceArray:
        return self.empty(like.shape, dtype or like.dtype)

    def asarray(self, given: Any) -> DeviceArray:
        """Of an array of NumPy: from pageable memory, which is free again when the call returns."""
        if isinstance(given, DeviceArray):
            return given
        interface = getattr(given, "__cuda_array_interface__", None)
        if interface is not None:
            pointer = interface["data"][0]
            mine = (pointer - BASE) // DEVICE_BYTES
            return DeviceArray(interface["shape"], interface["typestr"], MemoryPointer(self, given, pointer, mine))
        given = np.ascontiguousarray(given)
        made, device = self.empty(given.shape, given.dtype), self._device()
        staged, place = given.reshape(-1).view(np.uint8).copy(), made.data.ptr

        def copy() -> None:
            self._bytes(place, staged.nbytes, device)[:] = staged

        self._queue(self._current(device), copy)
        return made

    array = asarray

    def asnumpy(self, given: DeviceArray, stream: Any = None) -> Any:
        return given.get(stream)

    def count_nonzero(self, given: DeviceArray) -> DeviceArray:
        with Device(self, given.device.id):
            made = self.empty((), np.int64)
        a, n, out, here, dtype = given.data.ptr, given.nbytes, made.data.ptr, given.device.id, given.dtype

        def count() -> None:
            self._bytes(out, 8, here).view(np.int64)[0] = np.count_nonzero(self._bytes(a, n, here).view(dtype))

        self._queue(self._current(here), count)
        return made

    def from_dlpack(self, given: Any) -> DeviceArray:
        device = int(given.__dlpack_device__()[1])
        stream = self._current(device).ptr or 1
        return self.asarray(given.__dlpack__(stream=stream))

    def RawModule(self, code: str, options: tuple[str, ...] = ()) -> Any:  # noqa: N802
        def get_function(name: str) -> Callable[..., None]:
            def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
                device = self._device()
                values = [each.data.ptr if isinstance(each, DeviceArray) else int(each) for each in arguments]
                self.launches.append(name)
                self._queue(self._current(device), lambda: self.run_kernel(self, device, name, grid, block, values))

            return call

        return SimpleNamespace(get_function=get_function)

    # --- the module cupy.cuda -----------------------------------------------------------------------------------------

    def _make_cuda(self) -> Any:
        def make_stream(null: bool = False, non_blocking: bool = False) -> Any:
            return self.cuda.Stream.null if null else self._new_stream(non_blocking)

        def external(ptr: int, device_id: int = -1) -> Stream:
            return self._by_pointer(ptr, self._device() if device_id < 0 else device_id)

        runtime = SimpleNamespace(
            memcpyAsync=self._memcpy_async,
            eventQuery=self._query,
            memcpyHostToDevice=_HOST_TO_DEVICE,
            memcpyDeviceToHost=_DEVICE_TO_HOST,
            memcpyDeviceToDevice=_DEVICE_TO_DEVICE,
            memcpyDefault=_DEFAULT,
            ipcGetMemHandle=self._get_handle,
            ipcOpenMemHandle=self._open_handle,
            ipcCloseMemHandle=self._close_handle,
            streamIsCapturing=self._is_capturing,
            getDeviceCount=lambda: self.n_devices,
            getDevice=self._device,
            getDeviceProperties=lambda device: {"name": b"stand-in", "multiProcessorCount": 2 + device},
            runtimeGetVersion=lambda: 12090,
            driverGetVersion=lambda: 12090,
            deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
            memGetInfo=lambda: (1 << 30, 1 << 30),
            CUDARuntimeError=CUDARuntimeError,
        )
        make_stream.null = _NullStream(self)  # type: ignore[attr-defined]
        make_stream.from_external = lambda other: external(other.__cuda_stream__()[1])  # type: ignore[attr-defined]
        return SimpleNamespace(
            Device=lambda number=None: Device(self, number),
            Memory=lambda n_bytes: Memory(self, n_bytes),
            MemoryPointer=lambda memory, offset: MemoryPointer(self, memory, memory.ptr + offset, memory.device_id),
            Stream=make_stream,
            ExternalStream=external,
            Event=lambda block=False, disable_timing=False, interprocess=False: Event(self),
            get_current_stream=lambda device_id=-1: self._current(self._device() if device_id < 0 else device_id),
            get_elapsed_time=lambda first, last: last.ms - first.ms,
            alloc_pinned_memory=self._allocate_pinned,
            runtime=runtime,
        )

    def _query(self, event: int) -> int:
        is_done = self._events[event].done
        return 0 if is_done else 600 if self.error is None else 700

    def _new_stream(self, non_blocking: bool) -> Stream:
        with self._lock:
            device = self._device()
            stream = Stream(self, 0x1000 + len(self._streams), device, non_blocking=non_blocking)
            self._streams[device, stream.ptr] = stream
            return stream

    def _allocate_pinned(self, n_bytes: int) -> Any:
        """Page-locked memory: longer than asked for, as CuPy's pool has it, and with anything in it."""
        room = np.full(-(-max(n_bytes, 1) // POOL_UNIT) * POOL_UNIT, POISON, dtype=np.uint8)
        with self._lock:
            self.n_allocations += 1
            self._kept.append(room)
            address = room.__array_interface__["data"][0]
            self._pinned_starts.insert(bisect_right(self._pinned_starts, address), address)
            self._pinned[address] = room.nbytes
        return memoryview(room)  # type: ignore[arg-type]

    def _memcpy_async(self, dst: int, src: int, n_bytes: int, kind: int, stream: int) -> None:
        device = self._device()
        queue = self._by_pointer(stream, device)
        host = {_HOST_TO_DEVICE: src, _DEVICE_TO_HOST: dst}.get(kind)
        assert kind != _DEFAULT or min(dst, src) >= BASE, "no copy of this kind is made from or to the host's memory"
        assert (dst >= BASE) == (kind != _DEVICE_TO_HOST) and (src >= BASE) == (kind != _HOST_TO_DEVICE), "kind"

        def copy() -> None:
            self._bytes(dst, n_bytes, device)[:] = self._bytes(src, n_bytes, device)

        if host is None or self._is_pinned(host, n_bytes):
            self._queue(queue, copy)
        elif kind == _HOST_TO_DEVICE:  # pageable memory is taken before the call returns
            taken = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(src)).copy()
            self._queue(queue, lambda: self._bytes(dst, n_bytes, device).__setitem__(slice(None), taken))
        else:  # to pageable memory, the call returns when it is there
            queue.synchronize()
            ctypes.memmove(dst, self._bytes(src, n_bytes, device).ctypes.data, n_bytes)

    # --- memory of other processes ------------------------------------------------------------------------------------

    def _map(self, device: int, path: Path, n_bytes: int) -> int:
        """Another address for a file's bytes in the memory of a device."""
        with self._lock:
            address = self._next[device]
            self._next[device] += n_bytes + POOL_UNIT
            self._starts[device].append(address)
            self._backing[address] = np.memmap(path, np.uint8, "r+", shape=(n_bytes,))
            return address

    def _get_handle(self, address: int) -> bytes:
        for start, (path, n_bytes, process) in self._exports.items():
            if start <= address < start + n_bytes:
                return _HANDLE.pack(str(path).encode(), n_bytes, str(process).encode()[-8:])
        # A part of what the pool has allocated, which begins where nobody outside of the pool knows.
        return _HANDLE.pack(b"pool", 0, b"")

    def _open_handle(self, handle: bytes, flags: int = 1) -> int:
        assert len(handle) == 64 and flags == 1
        name, n_bytes, process = _HANDLE.unpack(handle)
        path, device = Path(name.rstrip(b"\0").decode()), self._device()
        if process.rstrip(b"\0") == str(self.process()).encode()[-8:]:
            raise CUDARuntimeError("cudaErrorDeviceUninitialized: invalid device context")
        if not path.exists():
            raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        with self._lock:
            known = self._opened.setdefault((self.process(), device, path), [0, 0])
            if not known[1]:
                known[0] = self._map(device, path, n_bytes)
            known[1] += 1
            return known[0]

    def _close_handle(self, address: int) -> None:
        with self._lock:
            for known in self._opened.values():
                if known[0] == address and known[1]:
                    known[1] -= 1
                    if not known[1]:
                        # To use it is a fault from now on.
                        self._backing[address] = np.empty(0, np.uint8)
                    return
        raise CUDARuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")

    def _is_capturing(self, stream: int) -> bool:
        if stream == LEGACY and self.capturing & {each.ptr for each in self._streams.values() if not each.non_blocking}:
            raise CUDARuntimeError("cudaErrorStreamCaptureImplicit: the legacy stream would depend on it")
        return stream in self.capturing

    # --- memory -------------------------------------------------------------------------------------------------------

    def _allocate(self, device: int, n_bytes: int, stream: int) -> MemoryPointer:
        n_bytes = -(-max(n_bytes, 1) // POOL_UNIT) * POOL_UNIT
        with self._lock:
            self.n_allocations += 1
            pool = self._pools.get((device, stream, n_bytes))
            if pool:
                block = pool.pop()
            else:
                address = self._next[device]
                self._next[device] += n_bytes + POOL_UNIT
                block = _Block(self, device, address, n_bytes, stream)
                self._starts[device].append(address)
                room = np.empty(n_bytes + 256, dtype=np.uint8)
                first = -room.__array_interface__["data"][0] % 256
                self._backing[address] = room[first : first + n_bytes]
            # Work that was queued on the block's own stream before it was freed may still use it, and nothing that its
            # next owner queues there comes before.
            if self._streams[device, stream].n_done >= block.freed_at:
                self._backing[block.address][:] = POISON
        return MemoryPointer(self, _Owner(block), block.address, device)

    def _take_back(self, block: _Block) -> None:
        block.freed_at = self._streams[block.device, block.stream].n_queued
        self._pools.setdefault((block.device, block.stream, block.n_bytes), []).append(block)

    def _is_pinned(self, address: int, n_bytes: int) -> bool:
        place = bisect_right(self._pinned_starts, address) - 1
        if place < 0:
            return False
        start = self._pinned_starts[place]
        return address + n_bytes <= start + self._pinned[start]

    def _bytes(self, address: int, n_bytes: int, device: int) -> Any:
        """The memory behind an address that a GPU uses."""
        if not n_bytes:
            return np.empty(0, dtype=np.uint8)
        if address < BASE:
            if not self._is_pinned(address, n_bytes):
                raise CUDARuntimeError(f"cudaErrorIllegalAddress: {address:#x} is not page-locked")
            return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
        owner = (address - BASE) // DEVICE_BYTES
        if owner != device:
            raise CUDARuntimeError(f"cudaErrorIllegalAddress: memory of device {owner} on device {device}")
        starts = self._starts[device]
        place = bisect_right(starts, address) - 1
        if place < 0 or address + n_bytes > starts[place] + len(self._backing[starts[place]]):
            raise CUDARuntimeError(f"cudaErrorIllegalAddress: {address:#x} of {n_bytes} B")
        start = starts[place]
        return self._backing[start][address - start : address - start + n_bytes]

    def host_address(self, value: int, device: int) -> int:
        """An argument of a kernel, as the processor reaches it: what is no address stays as it is."""
        if value < BASE:
            return value
        return int(self._bytes(value, 1, device).ctypes.data)

    def host_bytes(self, array: Any) -> Any:
        """What a library sees that reaches a GPU's memory: the bytes of an array as they are now."""
        return self._bytes(array.data.ptr, array.nbytes, array.device.id)

    # --- what is current ----------------------------------------------------------------------------------------------

    def _devices(self) -> tuple[int, ...]:
        return getattr(self._here, "devices", (0,))

    def _device(self) -> int:
        return self._devices()[-1]

    def _entered(self) -> list[Stream]:
        if not hasattr(self._here, "streams"):
            self._here.streams = []
        entered: list[Stream] = self._here.streams
        return entered

    def _enter(self, stream: Stream) -> None:
        if stream.device_id != self._device():
            raise RuntimeError(
                f"The device that the stream is created on ({stream.device_id}) does not match with the current device"
                f" ({self._device()})"
            )
        self._entered().append(stream)

    def _leave(self) -> None:
        self._entered().pop()

    def _current(self, device: int) -> Stream:
        return next((each for each in reversed(self._entered()) if each.device_id == device), self._null(device))

    def _null(self, device: int | None = None) -> Stream:
        return self._streams[self._device() if device is None else device, LEGACY]

    def _by_pointer(self, pointer: int, device: int) -> Stream:
        found = self._streams.get((device, 0 if pointer == 1 else pointer))
        if found is None:
            raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: stream {pointer:#x} is not of device {device}")
        return found

    def _resolve(self, stream: Any, device: int | None = None) -> Stream:
        if stream is None:
            return self._current(self._device() if device is None else device)
        return self._null(device) if isinstance(stream, _NullStream) else stream

    # --- what runs when -----------------------------------------------------------------------------------------------

    def _queue(self, stream: Any, work: Callable[[], None], after: Sequence[tuple[Stream, int]] = ()) -> None:
        stream = self._resolve(stream)
        with self._lock:
            if self.error is not None:
                raise self.error
            if stream.ptr in self.capturing:
                raise CUDARuntimeError("cudaErrorStreamCaptureIsolation: not in a graph")
            waits: list[tuple[Stream, int]] = []
            if stream.ptr == LEGACY:
                for each in self._streams.values():
                    if each is not stream and each.device_id == stream.device_id and not each.non_blocking:
                        waits.append((each, each.n_queued))
            elif not stream.non_blocking:
                null = self._null(stream.device_id)
                waits.append((null, null.n_queued))
            stream.queue.append(((*after, *waits), work))
            stream.n_queued += 1
            if self.rng.random() < self.eagerness:
                self._step()

    def _ready(self) -> Iterator[Stream]:
        for stream in self._streams.values():
            if stream.queue and all(other.n_done >= count for other, count in stream.queue[0][0]):
                yield stream

    def _step(self) -> bool:
        """One of the works that may run."""
        ready = list(self._ready())
        if not ready or self.error is not None:
            return False
        if self.rng.random() < 0.05:
            # Other streams are starved from now on.
            self._weights = {}
        weights = self._weights
        for each in ready:
            if (each.device_id, each.ptr) not in weights:
                weights[each.device_id, each.ptr] = 10 ** self.rng.uniform(-4, 0)
        chosen = self.rng.choices(ready, [weights[each.device_id, each.ptr] for each in ready])[0]
        _, work = chosen.queue.popleft()
        self.ms += 0.001
        try:
            work()
        except CUDARuntimeError as error:
            self.error = error
        if self.error is None:
            chosen.n_done += 1
        return True

    def _look(self, stream: Stream, count: int) -> bool:
        """The host looks; meanwhile the GPUs go on."""
        with self._lock:
            for _ in range(self.rng.choice((0, 1, 1, 2, 5))):
                self._step()
            return stream.n_done >= count

    def _run_until(self, stream: Stream, count: int) -> None:
        with self._lock:
            while stream.n_done < count:
                went_on = self._step()
                if self.error is not None:
                    raise self.error
                assert went_on, "the GPU waits for itself"

    def run_all(self) -> None:
        """Everything that was queued is done."""
        with self._lock:
            while self._step():
                pass


def run_in_numpy(
    cupy: StandIn, device: int, name: str, grid: tuple[int, ...], block: tuple[int, ...], values: list[int]
) -> None:
    """A kernel of `kernels.cu`, in NumPy's arithmetic; arguments see there."""
    kind, dtype, *reduction = name.split("_")
    stored = stored_dtype(dtype)

    def at(address: int, count: int) -> Any:
        return cupy._bytes(address, count * stored.itemsize, device).view(stored)

    with np.errstate(all="ignore"):
        if kind == "copy":
            dst, src, count = values
            at(dst, count)[:] = at(src, count)
        elif kind == "divide":
            data, n, count = values
            divide(at(data, count), n, dtype)
        elif kind == "reduce":
            dst, src, count = values
            _steps(dtype, reduction[0])(at(dst, count), at(src, count))
        elif kind == "forward":
            dst, src, out, count = values
            _steps(dtype, reduction[0])(at(dst, count), at(src, count))
            at(out, count)[:] = at(dst, count)
        else:
            assert kind == "batch", name
            table = cupy._bytes(values[0], grid[1] * 40, device).view(np.uint64).reshape(-1, 5)
            for dst, src, out, count, is_reduce in table.tolist():
                if is_reduce:
                    _steps(dtype, reduction[0])(at(dst, count), at(src, count))
                else:
                    at(dst, count)[:] = at(src, count)
                if out:
                    at(out, count)[:] = at(dst, count)


_KERNELS: dict[tuple[str, str], NumpyKernels] = {}


def _steps(dtype: str, reduction: str) -> Callable[[Any, Any], Any]:
    key = dtype, reduction
    if key not in _KERNELS:
        _KERNELS[key] = NumpyKernels(dtype, reduction, compiled=False)
    return _KERNELS[key].reduce
