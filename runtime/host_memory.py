"""Memory of the host that processes share, and which ranks can.

    SharedSegment  memory of this process, which others open by its name
    open_segment   another process's in this one
    try_sharing    which ranks of a host reach each other's memory, found by trying
    path_of        what was found for a transport

A segment is a file in `/dev/shm` that has a name only until those have it open that are to; afterwards it ends with the
last process that has it, however that ends. Only this user can open it. Its pages are all there when it is made: that
there is no room is an error then, and no signal later.

Ranks that run on one kernel, in one network namespace, and use the same NICs are on one host (`nics.inside_of`); they
share memory if each can open what the others have made. In containers that have a `/dev/shm` each they cannot.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import finalize

import numpy as np

from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Bytes, Transport

logger = logging.getLogger("optcc.hosts")

FOLDER = "/dev/shm"
_PREFIX = "optcc-lanes-"
_NAME_BYTES = 16
_RECORD = struct.Struct(f"<{_NAME_BYTES}sQ")
RECORD_BYTES = _RECORD.size
_FORGOTTEN_S = 3600.0
"""A name that is older was left by a process that was killed while others were to open it."""
_TEXT_BYTES = 160
_FAILED = ctypes.c_void_p(-1).value


class HostPath(NamedTuple):
    """How ranks of one host exchange what is in its memory, and why. `hosts`: for each rank the first of those that
    share memory with it, -1 for none; empty if nobody does."""

    hosts: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        return f"{'shared memory' if self.hosts else 'TCP'}: {self.why}"


@runtime_checkable
class SharesMemory(Protocol):
    """A transport some ranks of which may share the memory of their host; None before it was tried."""

    host_path: HostPath | None

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank the first one of its host."""
        ...


def path_of(transport: Transport) -> HostPath:
    """How ranks of one host exchange what is in its memory over `transport`."""
    if not isinstance(transport, SharesMemory):
        return HostPath((), f"{type(transport).__name__} has a way of its own inside a host")
    return transport.host_path or HostPath((), "not tried: optcc.runtime.host_memory.share_memory tries it")


class SharedSegment:
    """`n_bytes` of memory of this process that others can open by `record` until `forget`; `array` are its bytes.

    Raises OSError if there is no `/dev/shm`, or no room in it.
    """

    def __init__(self, n_bytes: int) -> None:
        name = os.urandom(_NAME_BYTES)
        self.record = _RECORD.pack(name, n_bytes)
        self._path: str | None = _path(name)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, n_bytes)
            self.array = _map(file, n_bytes)
        except OSError:
            self.forget()
            raise
        finally:
            os.close(file)

    def forget(self) -> None:
        """Nobody else is to open it: from now on it has no name."""
        if self._path is not None:
            with suppress(OSError):
                Path(self._path).unlink()
            self._path = None

    def free(self) -> None:
        """Gives its pages back, whoever still refers to it; nobody writes into it any more."""
        array = self.array
        _libc().madvise(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), mmap.MADV_REMOVE)


def open_segment(record: bytes) -> Bytes:
    """Another process's segment; raises OSError if it is not there or is not what it must be."""
    name, n_bytes = _RECORD.unpack(record)
    file = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if found.st_size != n_bytes or found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            raise OSError(f"{_path(name)}: {found.st_size} B of user {found.st_uid}: must be {n_bytes} B of this user")
        return _map(file, n_bytes)
    finally:
        os.close(file)


def _path(name: bytes) -> str:
    return f"{FOLDER}/{_PREFIX}{name.hex()}"


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def _map(file: int, n_bytes: int) -> Bytes:
    """The bytes of a file, until nobody refers to them. That of `mmap` would keep a file open for each segment."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    libc = _libc()
    size = ctypes.c_size_t(n_bytes)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, ctypes.c_long(0))
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    block: Any = (ctypes.c_uint8 * n_bytes).from_address(address)
    finalize(block, libc.munmap, ctypes.c_void_p(address), size).atexit = False
    array: Bytes = np.frombuffer(block, dtype=np.uint8)
    return array


def share_memory(transport: Transport, *, refused: str = "", timeout_s: float = COLLECTIVE_TIMEOUT_S) -> HostPath:
    """Tries which ranks of `transport` share the memory of their host, and has plans use it from now on; collective,
    before the transport has an engine. The same at every rank; a host none of whose ranks share it has a rank that
    cannot, or that has `refused` to, which says why.

    Raises as `Transport.allgather`.
    """
    if not isinstance(transport, SharesMemory):
        return path_of(transport)
    hosts = transport.hosts
    if len(set(hosts)) == len(hosts):
        path = HostPath((), "no two ranks are known to be on one host")
    else:
        path = _try_sharing(transport, hosts, refused, timeout_s)
    transport.host_path = path
    if not transport.rank:
        logger.info("optcc: inside a host: %s", path)
    return path


def _try_sharing(transport: Transport, hosts: Sequence[int], refused: str, timeout_s: float) -> HostPath:
    """Each rank makes a segment with its own name in it, and looks for that in those of the others."""
    rank, segment, wrong = transport.rank, None, refused
    mates = [mate for mate, host in enumerate(hosts) if host == hosts[rank] and mate != rank]
    if mates and not refused:
        _remove_forgotten()
        try:
            segment = SharedSegment(RECORD_BYTES)
            segment.array[:] = np.frombuffer(segment.record, dtype=np.uint8)
        except OSError as error:
            wrong = f"no segment in {FOLDER}: {error.strerror or error}"
    try:
        records = transport.allgather(bytes(RECORD_BYTES) if segment is None else segment.record, timeout_s)
        for mate in mates if not wrong else ():
            wrong = wrong or _look_at(records[mate], mate)
        told = transport.allgather(wrong.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES), timeout_s)
    finally:
        if segment is not None:
            segment.forget()
    texts = [text.decode(errors="replace").rstrip() for text in told]
    whys: dict[int, str] = {}
    for mate, text in enumerate(texts):
        if text:
            whys.setdefault(hosts[mate], f"rank {mate}: {text}")
    found = tuple(-1 if host in whys or hosts.count(host) < 2 else host for host in hosts)
    n_sharing = sum(host >= 0 for host in found)
    why = "; ".join((*([f"{n_sharing} of {len(hosts)} ranks"] if n_sharing else []), *whys.values()))
    return HostPath(found if n_sharing else (), why)


def _look_at(record: bytes, mate: int) -> str:
    """What is wrong with the segment of another rank."""
    if not any(record):
        return ""  # that rank says why
    try:
        if open_segment(record).tobytes() == record:
            return ""
    except OSError as error:
        return f"cannot open the segment of rank {mate} in {FOLDER}: {error.strerror or error}"
    return f"the segment of rank {mate} in {FOLDER} is another one"


def _remove_forgotten() -> None:
    """Names of this user that nobody is going to open any more; to one that is late, messages go by TCP."""
    with suppress(OSError):
        for path in Path(FOLDER).glob(f"{_PREFIX}*"):
            found = path.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _FORGOTTEN_S:
                path.unlink()


def probe_segment() -> str:
    """How many bytes there are for segments, after making one; or why none can be made. For `optcc doctor`."""
    try:
        segment = SharedSegment(mmap.PAGESIZE)
    except OSError as error:
        return f"no segment in {FOLDER}: {error.strerror or error}"
    segment.forget()
    found = os.statvfs(FOLDER)
    return str(found.f_bavail * found.f_frsize)
