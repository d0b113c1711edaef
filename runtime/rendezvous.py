"""How the ranks of a job find each other: they meet once, before they connect.

A `Meet` publishes the record of this rank and returns those of all, with the secret of the job:

    alone()                              a job of one rank
    over_mpi(comm)                       the ranks were started by mpirun
    optcc.runtime.meeting_file.in_file   a file that all can write to, of a name that no other job has
    at_address(address, rank, n_ranks, secret)   rank 0 listens there; all know a secret
    over_store(store, rank, n_ranks)     a key-value store of the launcher, such as torch's

`read_secret` takes the last one's secret from a file of mode 0600: a command line or an environment is read by others.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from optcc.errors import DeadlineExceeded, InputError, MismatchError
from optcc.runtime.mpi_library import StartUp
from optcc.runtime.protocol.frames import WireError
from optcc.runtime.protocol.hello import (
    ANSWER_BYTES,
    HELLO_BYTES,
    JOB_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    Caller,
    Hello,
    Listener,
)
from optcc.runtime.transport import MonotonicClock

if TYPE_CHECKING:
    from mpi4py import MPI

MEET_S = 60.0
RECORD_BYTES_MAX = 4096
RANKS_MAX = 65536
_HELLO_S = 5.0
_CALLERS_SPARE = 128
_ACCEPTS_AT_ONCE = 64
_BACKLOG_SPARE = 1024
"""Strangers may connect faster than rank 0 sends them away: a rank whose connect is dropped tries again in a second."""
_CONNECT_S = 0.25
"""A rank tries so long at first to connect to rank 0, then twice as long, and so on."""
LOOK_S = 0.01
_RETRY_S = 0.05
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the ranks of a job know once they have met: the job, its secret, and each rank's record."""

    rank: int
    n_ranks: int
    job: bytes
    secret: bytes
    records: tuple[bytes, ...]

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Meeting(rank {self.rank} of {self.n_ranks})"


Meet = Callable[[bytes], Meeting]
"""Publishes this rank's record, of at most `RECORD_BYTES_MAX`, and waits for those of the others; collective."""


def alone() -> Meet:
    """A job of one rank."""

    def meet(record: bytes) -> Meeting:
        check_record(record)
        return Meeting(0, 1, os.urandom(JOB_BYTES), os.urandom(SECRET_BYTES), (record,))

    return meet


# --- meeting over MPI -------------------------------------------------------------------------------------------------


def over_mpi(comm: MPI.Intracomm, *, timeout_s: float = MEET_S) -> Meet:
    """The ranks of a communicator. MPI's own start-up has joined them, and carries the secret.

    Raises DeadlineExceeded, naming the ranks that have not come, after `timeout_s` seconds.
    """

    def meet(record: bytes) -> Meeting:
        check_record(record)
        rank, n_ranks = comm.Get_rank(), comm.Get_size()
        start = StartUp(comm, MonotonicClock(), timeout_s)
        keys = np.frombuffer(os.urandom(SECRET_BYTES + JOB_BYTES), np.uint8).copy()
        start.wait(comm.Ibcast(keys, 0))
        mine = np.zeros(_LENGTH.size + RECORD_BYTES_MAX, np.uint8)
        framed = _LENGTH.pack(len(record)) + record
        mine[: len(framed)] = np.frombuffer(framed, np.uint8)
        everyone = np.empty((n_ranks, len(mine)), np.uint8)
        start.wait(comm.Iallgather(mine, everyone))
        start.end()
        records = tuple(
            row.tobytes()[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(row.tobytes())[0]] for row in everyone
        )
        secret = keys.tobytes()
        return Meeting(rank, n_ranks, secret[SECRET_BYTES:], secret[:SECRET_BYTES], records)

    return meet


# --- meeting over a store ---------------------------------------------------------------------------------------------


class Store(Protocol):
    """A key-value store of the job, as torch.distributed has them: `get` waits until the key is set."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key; raises after the store's own timeout."""
        ...


def over_store(store: Store, rank: int, n_ranks: int, *, name: str = "") -> Meet:
    """The ranks that share a store, which carries the secret; `name` tells meetings of one store apart.

    Raises InputError for a rank that cannot be, DeadlineExceeded when the store gives up waiting for a rank.
    """
    check_ranks(rank, n_ranks)

    def meet(record: bytes) -> Meeting:
        check_record(record)
        if rank == 0:
            store.set(f"{name}/keys", os.urandom(SECRET_BYTES + JOB_BYTES).hex())
        store.set(f"{name}/record/{rank}", record.hex())
        keys = _value_of(store, f"{name}/keys", 0)
        records = tuple(_value_of(store, f"{name}/record/{other}", other) for other in range(n_ranks))
        store.set(f"{name}/seen/{rank}", "00")
        if rank == 0:
            # The store may be in this process: it stays until everyone has read it.
            for other in range(n_ranks):
                _value_of(store, f"{name}/seen/{other}", other)
        return Meeting(rank, n_ranks, keys[SECRET_BYTES:], keys[:SECRET_BYTES], records)

    return meet


def _value_of(store: Store, key: str, rank: int) -> bytes:
    try:
        return bytes.fromhex(store.get(key).decode())
    except Exception as error:  # Stores raise what they like when they give up.
        raise DeadlineExceeded(f"rank {rank} has not come to the store of the job: {error}") from error


# --- meeting at rank 0 ------------------------------------------------------------------------------------------------


class _Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 tells everyone."""

    job: bytes
    records: list[bytes]


def read_secret(path: str | Path) -> bytes:
    """The first 32 bytes of a file that only this user can read; raises InputError for any other."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: must hold the secret of the job") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise InputError(f"{path}: must be a file that this user alone can read (mode 0600)")
        secret = os.read(file, SECRET_BYTES)
    finally:
        os.close(file)
    _check_secret(secret)
    return secret


def at_address(address: tuple[str, int], rank: int, n_ranks: int, secret: bytes, *, timeout_s: float = MEET_S) -> Meet:
    """The ranks that know `secret` and can reach rank 0 at `address`, a host and a port.

    Each proves that it knows the secret, as for any connection; whoever does not, or takes longer than five seconds to
    say so, is sent away, and does not keep the others. Raises InputError for a rank or secret that cannot be or an
    address that rank 0 does not have, DeadlineExceeded after `timeout_s` seconds.
    """
    check_ranks(rank, n_ranks)
    _check_secret(secret)

    def meet(record: bytes) -> Meeting:
        check_record(record)
        deadline_s = time.monotonic() + timeout_s
        if rank == 0:
            reply = _Host(address, n_ranks, secret, record, deadline_s, timeout_s).gather()
        else:
            reply = _visit(address, rank, n_ranks, secret, record, deadline_s, timeout_s)
        return Meeting(rank, n_ranks, reply.job, secret, tuple(reply.records))

    return meet


_MEETING_RAIL = 0xFFFF
_NO_JOB = bytes(JOB_BYTES)


class _Guest:
    """Somebody at the door of rank 0: what has come of what is expected next, and who it is once that is proved."""

    __slots__ = ("deadline_s", "doorman", "got", "rank", "sock", "stage", "wanted_bytes")

    def __init__(self, sock: socket.socket, secret: bytes, deadline_s: float) -> None:
        self.sock, self.deadline_s = sock, deadline_s
        self.doorman = Listener(secret, nonce=os.urandom(32))
        self.got, self.stage, self.wanted_bytes, self.rank = b"", 0, HELLO_BYTES, -1


class _Host:
    """Rank 0 while it gathers the records."""

    def __init__(
        self,
        address: tuple[str, int],
        n_ranks: int,
        secret: bytes,
        record: bytes,
        deadline_s: float,
        timeout_s: float,
    ) -> None:
        self._address, self._n_ranks, self._secret = address, n_ranks, secret
        self._deadline_s, self._timeout_s = deadline_s, timeout_s
        self._records = {0: record}
        self._guests: dict[_Guest, None] = {}
        self._present: dict[int, socket.socket] = {}

    def gather(self) -> _Reply:
        """Waits for everyone, and tells everyone."""
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(
                    socket.create_server(self._address, backlog=self._n_ranks + _BACKLOG_SPARE)
                )
            except OSError as error:
                host, port = self._address
                raise InputError(f"{host}:{port}: {error.strerror}: must be a free port of rank 0's machine") from error
            listener.setblocking(False)
            stack.callback(self._close)
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(listener, selectors.EVENT_READ, None)
            while len(self._records) < self._n_ranks:
                now_s = time.monotonic()
                if now_s >= self._deadline_s:
                    missing = absent(self._records, self._n_ranks)
                    raise DeadlineExceeded(f"rank 0: waited {self._timeout_s:g} s in vain for ranks {missing} to meet")
                for key, _ in selector.select(min(self._deadline_s - now_s, 0.1)):
                    if key.data is None:
                        self._greet(listener, selector)
                    elif key.data in self._guests:
                        self._hear(key.data, selector)
                for guest in [each for each in self._guests if time.monotonic() >= each.deadline_s]:
                    self._send_away(guest, selector)
            reply = _Reply(os.urandom(JOB_BYTES), [self._records[rank] for rank in range(self._n_ranks)])
            data = msgspec.json.encode(reply)
            for sock in self._present.values():
                sock.settimeout(max(LOOK_S, self._deadline_s - time.monotonic()))
                with contextlib.suppress(OSError):
                    sock.sendall(_LENGTH.pack(len(data)) + data)
            return reply

    def _greet(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        """Lets in who waits. A rank says hello as it comes, so it is heard at once, before others make it give way."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            if len(self._guests) >= 2 * self._n_ranks + _CALLERS_SPARE:
                self._make_room(selector)
            guest = _Guest(sock, self._secret, min(self._deadline_s, time.monotonic() + _HELLO_S))
            self._guests[guest] = None
            selector.register(sock, selectors.EVENT_READ, guest)
            self._hear(guest, selector)

    def _make_room(self, selector: selectors.BaseSelector) -> None:
        """Sends the guest away that has come least far, of these the one that came first."""
        self._send_away(min(self._guests, key=lambda guest: guest.stage), selector)

    def _send_away(self, guest: _Guest, selector: selectors.BaseSelector) -> None:
        del self._guests[guest]
        selector.unregister(guest.sock)
        guest.sock.close()

    def _hear(self, guest: _Guest, selector: selectors.BaseSelector) -> None:
        """Hello, proof, length and record, one after another."""
        try:
            data = guest.sock.recv(guest.wanted_bytes - len(guest.got))
            if not data:
                raise WireError("gone")
            guest.got += data
            if len(guest.got) < guest.wanted_bytes:
                return
            got, guest.got = guest.got, b""
            guest.stage += 1
            if guest.stage == 1:
                guest.sock.send(guest.doorman.take_hello(got))
                guest.wanted_bytes = PROOF_BYTES
            elif guest.stage == 2:
                guest.doorman.take_proof(got)
                guest.wanted_bytes = _LENGTH.size
            elif guest.stage == 3:
                (guest.wanted_bytes,) = _LENGTH.unpack(got)
                if not 1 <= guest.wanted_bytes <= RECORD_BYTES_MAX:
                    raise WireError("record too long")
            else:
                self._seat(guest, got, selector)
        except BlockingIOError:
            return
        except (OSError, WireError):
            self._send_away(guest, selector)

    def _seat(self, guest: _Guest, record: bytes, selector: selectors.BaseSelector) -> None:
        hello = guest.doorman.hello
        assert hello is not None
        if hello.dst != self._n_ranks or hello.rail != _MEETING_RAIL or not 0 < hello.src < self._n_ranks:
            raise MismatchError(f"rank {hello.src} of {hello.dst} has come to a meeting of {self._n_ranks} ranks")
        former = self._present.pop(hello.src, None)
        if former is not None:
            # It has dialled again: its first connection broke.
            former.close()
        del self._guests[guest]
        selector.unregister(guest.sock)
        self._records[hello.src], self._present[hello.src] = record, guest.sock

    def _close(self) -> None:
        for sock in [*(guest.sock for guest in self._guests), *self._present.values()]:
            sock.close()


def _visit(
    address: tuple[str, int],
    rank: int,
    n_ranks: int,
    secret: bytes,
    record: bytes,
    deadline_s: float,
    timeout_s: float,
) -> _Reply:
    """A rank above 0: tries until rank 0 is there, and waits for what it says."""
    why, connect_s = "nobody there", _CONNECT_S
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(
                f"rank {rank}: waited {timeout_s:g} s for rank 0 at {address[0]}:{address[1]}: {why}"
            )
        try:
            with socket.create_connection(address, timeout=min(left_s, connect_s)) as sock:
                caller = Caller(secret, Hello(rank, n_ranks, _MEETING_RAIL, _NO_JOB), nonce=os.urandom(32))
                sock.sendall(caller.opening)
                sock.sendall(caller.take(_receive(sock, ANSWER_BYTES, deadline_s)))
                sock.sendall(_LENGTH.pack(len(record)) + record)
                (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size, deadline_s))
                if length > 2 * n_ranks * RECORD_BYTES_MAX:
                    raise WireError("reply too long")
                reply = msgspec.json.decode(_receive(sock, length, deadline_s), type=_Reply)
                if len(reply.records) != n_ranks or len(reply.job) != JOB_BYTES:
                    raise WireError("reply of another job")
                return reply
        except (OSError, WireError, msgspec.DecodeError) as error:
            if isinstance(error, TimeoutError):
                connect_s *= 2
            why = str(error)
        time.sleep(_RETRY_S)


def _receive(sock: socket.socket, n_bytes: int, deadline_s: float) -> bytes:
    """Exactly `n_bytes`."""
    parts: list[bytes] = []
    while n_bytes:
        sock.settimeout(max(LOOK_S, deadline_s - time.monotonic()))
        data = sock.recv(min(n_bytes, 1 << 16))
        if not data:
            raise WireError("rank 0 has closed the connection")
        parts.append(data)
        n_bytes -= len(data)
    return b"".join(parts)


def absent(records: Container[int], n_ranks: int) -> str:
    """The ranks that are not among those of `records`.

    >>> absent({1}, 3)
    '0, 2'
    """
    return ", ".join(str(rank) for rank in range(n_ranks) if rank not in records)


def check_record(record: bytes) -> None:
    """Raises InputError for a record that is too long."""
    if len(record) > RECORD_BYTES_MAX:
        raise InputError(f"record of {len(record)} B: must be at most {RECORD_BYTES_MAX} B (too many NICs?)")


def check_ranks(rank: int, n_ranks: int) -> None:
    """Raises InputError for a rank that cannot be."""
    if not 1 <= n_ranks <= RANKS_MAX or not 0 <= rank < n_ranks:
        raise InputError(f"rank {rank} of {n_ranks}: must be below the number of ranks, at most {RANKS_MAX}")


def _check_secret(secret: bytes) -> None:
    if len(secret) != SECRET_BYTES:
        raise InputError(f"secret of {len(secret)} B: must be {SECRET_BYTES} B")
