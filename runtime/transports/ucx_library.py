"""UCP, the protocol layer of UCX, as far as the `ucx` transport needs it: one context, worker and NIC a `Port`.

The library is that of the wheel `libucx-cu12`, or the system's `libucp.so.0`; it is called through ctypes, so nothing
is compiled. Every structure says by a mask which of its fields count, so the layouts below are those of UCX 1.13 and of
all that came after it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from optcc.errors import EnvironmentMissing

IN_PROGRESS, OK, NO_MESSAGE, BUSY, CANCELED, TRUNCATED = 1, 0, -1, -15, -16, -9
_NO_DEVICE, _ERROR_LAST = -14, -100
_API = (1, 13)
_FEATURES = 1 << 0 | 1 << 4
"""Tag matching, and waking up."""
_CLOSE_FORCE = 1
_MEMORY_TYPES_FIELD, _MEMORY_TYPE_FIELD = 1 << 2, 1 << 6
HOST_MEMORY, CUDA_MEMORY = 0, 1
"""`ucs_memory_type_t`."""
_SPARE = 256
"""Bytes behind each structure, for fields that later versions know and no mask names."""

_Status = c_int8
"""UCX packs its codes into a byte."""

ErrorHandler = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, _Status)


class _Params(ctypes.Structure):
    _fields_ = (("field_mask", c_uint64), ("features", c_uint64), ("spare", c_char * _SPARE))


class _WorkerParams(ctypes.Structure):
    _fields_ = (("field_mask", c_uint64), ("thread_mode", c_int), ("spare", c_char * _SPARE))


class _EndpointParams(ctypes.Structure):
    _fields_ = (
        *(("field_mask", c_uint64), ("address", c_char_p), ("error_mode", c_int), ("on_error", ErrorHandler)),
        *(("argument", c_void_p), ("user_data", c_void_p), ("spare", c_char * _SPARE)),
    )


class _RequestParams(ctypes.Structure):
    """`ucp_request_param_t`, as far as `memory_type`."""

    _fields_ = (
        *(("mask", c_uint32), ("flags", c_uint32), ("request", c_void_p), ("callback", c_void_p)),
        *(("datatype", c_uint64), ("user_data", c_void_p), ("reply_buffer", c_void_p), ("memory_type", c_int)),
        ("spare", c_char * _SPARE),
    )


class _ContextAttributes(ctypes.Structure):
    """`ucp_context_attr_t`, as far as `memory_types`."""

    _fields_ = (
        *(("field_mask", c_uint64), ("request_size", c_size_t), ("thread_mode", c_int), ("memory_types", c_uint64)),
        ("spare", c_char * _SPARE),
    )


class _Received(ctypes.Structure):
    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


_DECLARATIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ucp_get_version_string": (c_char_p, ()),
    "ucp_config_read": (_Status, (c_char_p, c_char_p, POINTER(c_void_p))),
    "ucp_config_modify": (_Status, (c_void_p, c_char_p, c_char_p)),
    "ucp_config_release": (None, (c_void_p,)),
    "ucp_init_version": (_Status, (c_uint, c_uint, POINTER(_Params), c_void_p, POINTER(c_void_p))),
    "ucp_cleanup": (None, (c_void_p,)),
    "ucp_context_query": (_Status, (c_void_p, POINTER(_ContextAttributes))),
    "ucp_context_print_info": (None, (c_void_p, c_void_p)),
    "ucp_worker_create": (_Status, (c_void_p, POINTER(_WorkerParams), POINTER(c_void_p))),
    "ucp_worker_destroy": (None, (c_void_p,)),
    "ucp_worker_progress": (c_uint, (c_void_p,)),
    "ucp_worker_get_efd": (_Status, (c_void_p, POINTER(c_int))),
    "ucp_worker_arm": (_Status, (c_void_p,)),
    "ucp_worker_get_address": (_Status, (c_void_p, POINTER(c_void_p), POINTER(c_size_t))),
    "ucp_worker_release_address": (None, (c_void_p, c_void_p)),
    "ucp_worker_flush_nbx": (c_void_p, (c_void_p, POINTER(_RequestParams))),
    "ucp_ep_create": (_Status, (c_void_p, POINTER(_EndpointParams), POINTER(c_void_p))),
    "ucp_ep_close_nbx": (c_void_p, (c_void_p, POINTER(_RequestParams))),
    "ucp_tag_send_sync_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, POINTER(_RequestParams))),
    "ucp_tag_send_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, POINTER(_RequestParams))),
    "ucp_tag_probe_nb": (c_void_p, (c_void_p, c_uint64, c_uint64, c_int, POINTER(_Received))),
    "ucp_tag_recv_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, POINTER(_RequestParams))),
    "ucp_tag_recv_request_test": (_Status, (c_void_p, POINTER(_Received))),
    "ucp_request_check_status": (_Status, (c_void_p,)),
    "ucp_request_cancel": (None, (c_void_p, c_void_p)),
    "ucp_request_free": (None, (c_void_p,)),
}


class UcxError(Exception):
    """A call of the library that did not succeed; `status` is its code."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(f"{what}: {load().text(status)}")
        self.status = status


class Library:
    """The functions of UCP, and how its codes read."""

    def __init__(self, ucp: ctypes.CDLL, ucs: ctypes.CDLL) -> None:
        for name, (result, arguments) in _DECLARATIONS.items():
            function = getattr(ucp, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ucp_"), function)
        self._status_string = ucs.ucs_status_string
        self._status_string.restype, self._status_string.argtypes = c_char_p, (_Status,)
        self.version: str = ucp.ucp_get_version_string().decode()

    def __getattr__(self, name: str) -> Any:
        """Only what `_DECLARATIONS` lists is there; this is for the type checker."""
        raise AttributeError(name)

    def text(self, status: int) -> str:
        """What a status means."""
        text: bytes = self._status_string(status)
        return text.decode()


@cache
def load() -> Library:
    """The library; raises EnvironmentMissing if there is none.

    Two copies in one process do not get along, so the copy of an MPI library that is loaded already is taken. Whoever
    would rather have the other one loads it first.
    """
    folder = _loaded_folder()
    try:
        if not folder:
            with contextlib.suppress(ImportError):
                import libucx

                libucx.load_library()
                folder = f"{libucx.__path__[0]}/lib/"
        return Library(ctypes.CDLL(f"{folder}libucp.so.0"), ctypes.CDLL(f"{folder}libucs.so.0"))
    except (OSError, AttributeError) as error:
        raise EnvironmentMissing(f"UCX: {error}: pip install 'optcc[ucx]', or apt-get install libucx0") from error


def _loaded_folder() -> str:
    """Where a UCX library lies that this process has loaded, with the slash; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            folder, _, name = line.rpartition("/")
            if name.startswith("libucs.so.0"):
                return f"/{folder.partition('/')[2]}/"
    return ""


def _status_of(pointer: int | None) -> int:
    """OK for no pointer, the status that an error's pointer is, IN_PROGRESS for a request."""
    if not pointer:
        return OK
    signed = pointer - (1 << 64) if pointer >> 63 else pointer
    return signed if _ERROR_LAST <= signed < 0 else IN_PROGRESS


_no_options = _RequestParams()
_OPTIONS = {
    memory_type: _RequestParams(mask=_MEMORY_TYPE_FIELD, memory_type=memory_type)
    for memory_type in (HOST_MEMORY, CUDA_MEMORY)
}
"""UCX need not find out where the bytes are."""


class Request:
    """Something under way on a port."""

    __slots__ = ("_handle", "_n_bytes", "_port", "status")

    def __init__(self, port: Port, handle: int | None, n_bytes: int) -> None:
        """`n_bytes` is what a receive must get, -1 for a send."""
        self._port, self._handle, self._n_bytes = port, handle, n_bytes
        self.status = _status_of(handle)
        if self.status != IN_PROGRESS:
            self._handle = None

    def is_over(self) -> bool:
        """True once it is done or has failed; then `status` says which. A wrong length is TRUNCATED."""
        if self._handle is None:
            return True
        library = self._port.library
        if self._n_bytes < 0:
            status = library.request_check_status(self._handle)
        else:
            received = _Received()
            status = library.tag_recv_request_test(self._handle, byref(received))
            if status == OK and received.length != self._n_bytes:
                status = TRUNCATED
        if status == IN_PROGRESS:
            return False
        self.status = status
        library.request_free(self._handle)
        self._handle = None
        return True

    def cancel(self) -> None:
        """Asks for an early end, which later shows as CANCELED."""
        if self._handle is not None:
            self._port.library.request_cancel(self._port.worker, self._handle)


class Port:
    """A context and a worker that use one device ("eth0", "mlx5_0:1"), or what the environment says if it is empty.

    UCX's own variables (`UCX_TLS` and the others) count. Used by one thread. `on_failure(peer, status)` is called
    inside `progress` for a peer that is no longer reached. Raises EnvironmentMissing if there is no such device.
    """

    def __init__(self, device: str, on_failure: Callable[[int, int], None]) -> None:
        self.library = load()
        self.device = device
        self._endpoints: dict[int, tuple[int, Any]] = {}
        self._on_failure = on_failure
        self._retired: list[Any] = []
        self._context, self.worker = c_void_p(), c_void_p()
        try:
            self._start()
        except UcxError as error:
            self._stop()
            raise EnvironmentMissing(f"UCX {self.library.version}, device {device or 'any'}: {error}") from error

    def _start(self) -> None:
        library, config = self.library, c_void_p()
        self._check("configuration", library.config_read(None, None, byref(config)))
        try:
            if self.device:
                status = library.config_modify(config, b"NET_DEVICES", self.device.encode())
                self._check("NET_DEVICES", status)
            params = _Params(field_mask=1, features=_FEATURES)
            self._check("context", library.init_version(*_API, byref(params), config, byref(self._context)))
        finally:
            library.config_release(config)
        # A device that is not there is only a warning to UCX, which would go on with what other ways there are.
        if self.device and f"/{self.device}" not in self._resources():
            raise UcxError("not among its devices", _NO_DEVICE)
        # Thread mode 0: one thread uses the worker.
        self._check(
            "worker",
            library.worker_create(self._context, byref(_WorkerParams(field_mask=1, thread_mode=0)), byref(self.worker)),
        )
        fd = c_int(-1)
        self._check("event file", library.worker_get_efd(self.worker, byref(fd)))
        self.fd = fd.value

    def _resources(self) -> set[str]:
        """The ways that the context may use, as "/device"."""
        libc = ctypes.CDLL(None)
        libc.open_memstream.restype = c_void_p
        libc.free.argtypes = libc.fclose.argtypes = (c_void_p,)
        text, length = c_void_p(), c_size_t()
        stream = libc.open_memstream(byref(text), byref(length))
        self.library.context_print_info(self._context, stream)
        libc.fclose(stream)
        try:
            words = ctypes.string_at(text, length.value).decode().split()
        finally:
            libc.free(text)
        return {word[word.index("/") :] for word in words if "/" in word}

    def _check(self, what: str, status: int) -> None:
        if status != OK:
            raise UcxError(what, status)

    def address(self) -> bytes:
        """What a peer must know to connect."""
        start, length = c_void_p(), c_size_t()
        self._check("address", self.library.worker_get_address(self.worker, byref(start), byref(length)))
        try:
            return ctypes.string_at(start, length.value)
        finally:
            self.library.worker_release_address(self.worker, start)

    def connect(self, peer: int, address: bytes) -> None:
        """Opens the way to `peer`, unless it is open; raises EnvironmentMissing if there is none."""
        if peer in self._endpoints:
            return

        def on_error(_argument: int, _endpoint: int, status: int) -> None:
            self._on_failure(peer, status)

        handler = ErrorHandler(on_error)
        # Fields: address, error mode (1: the peer may fail), error handler.
        params = _EndpointParams(field_mask=7, address=address, error_mode=1, on_error=handler)
        endpoint = c_void_p()
        status = self.library.ep_create(self.worker, byref(params), byref(endpoint))
        if status != OK:
            text = self.library.text(status)
            raise EnvironmentMissing(f"UCX, device {self.device or 'any'}: no way to rank {peer}: {text}")
        assert endpoint.value is not None
        # The library keeps the handler's address as long as the endpoint.
        self._endpoints[peer] = endpoint.value, handler

    def memory_types(self) -> int:
        """Whose memory the context reaches: bit t for the type t of memory."""
        attributes = _ContextAttributes(field_mask=_MEMORY_TYPES_FIELD)
        self._check("memory types", self.library.context_query(self._context, byref(attributes)))
        return int(attributes.memory_types)

    def send(self, peer: int, address: int, n_bytes: int, tag: int, memory_type: int = HOST_MEMORY) -> Request:
        """Sends; over once the peer has matched it with a receive."""
        endpoint, _ = self._endpoints[peer]
        pointer = self.library.tag_send_sync_nbx(endpoint, address, n_bytes, tag, byref(_OPTIONS[memory_type]))
        return Request(self, pointer, -1)

    def notify(self, peer: int, tag: int) -> Request:
        """Sends a message without bytes that nobody needs to receive."""
        endpoint, _ = self._endpoints[peer]
        return Request(self, self.library.tag_send_nbx(endpoint, None, 0, tag, byref(_no_options)), -1)

    def probe(self, tag: int, mask: int) -> int:
        """The whole tag of a message that has come, is not received, and fits; -1 if there is none."""
        found = _Received()
        there = self.library.tag_probe_nb(self.worker, tag, mask, 0, byref(found))
        return int(found.sender_tag) if there else -1

    def receive(self, address: int, n_bytes: int, tag: int, memory_type: int = HOST_MEMORY) -> Request:
        """Receives the next message of this very tag."""
        options = byref(_OPTIONS[memory_type])
        pointer = self.library.tag_recv_nbx(self.worker, address, n_bytes, tag, 2**64 - 1, options)
        return Request(self, pointer, n_bytes)

    def progress(self) -> int:
        """Lets the library work; how much it did."""
        count: int = self.library.worker_progress(self.worker)
        return count

    def arm(self) -> bool:
        """Has `fd` become readable with the next event; False if there is one already."""
        return bool(self.library.worker_arm(self.worker) == OK)

    def begin_flush(self) -> Request:
        """Over once all that was sent has been taken by the other ends."""
        return Request(self, self.library.worker_flush_nbx(self.worker, byref(_no_options)), -1)

    def begin_close(self, *, force: bool) -> list[Request]:
        """Closes every endpoint; what is under way on it is lost if `force`."""
        options = _RequestParams(mask=1 << 4, flags=_CLOSE_FORCE) if force else _RequestParams()
        closing = [
            Request(self, self.library.ep_close_nbx(endpoint, byref(options)), -1)
            for endpoint, _ in self._endpoints.values()
        ]
        # Handlers live on: the library may still call them while it closes.
        self._retired += [handler for _, handler in self._endpoints.values()]
        self._endpoints = {}
        return closing

    def close(self) -> None:
        """Gives everything back."""
        if self._endpoints:
            self.begin_close(force=True)
        self._stop()

    def _stop(self) -> None:
        if self.worker.value:
            self.library.worker_destroy(self.worker)
            self.worker = c_void_p()
        if self._context.value:
            self.library.cleanup(self._context)
            self._context = c_void_p()
