"""The ranks of a job meet in a file that all can write to, and remove it when they have met.

A rank locks a byte of the file for as long as it waits. However its process ends, the system unlocks it: so the records
of a job that ended before its ranks had met are told from those of ranks that wait, and the next job drops them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from optcc.errors import DeadlineExceeded, InputError, MismatchError, OptccError
from optcc.runtime.protocol.hello import JOB_BYTES, SECRET_BYTES
from optcc.runtime.rendezvous import LOOK_S, MEET_S, Meet, Meeting, absent, check_ranks, check_record

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, process."""
_SHEET, _RANK_0 = 1 << 40, (1 << 40) + 1
"""Bytes far beyond the end of the file, which may be locked: one for what the file says, one for each rank."""


class _Sheet(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says; `seen` are the ranks that have seen the records of all, `refused` why they cannot meet."""

    n_ranks: int
    secret: bytes
    job: bytes
    records: dict[int, bytes] = {}
    seen: list[int] = []
    refused: str = ""


def in_file(path: str | Path, rank: int, n_ranks: int, *, timeout_s: float = MEET_S) -> Meet:
    """The ranks that can write to `path`, a file of this job alone; the last one that has read it removes it.

    The file has mode 0600 and carries the secret. Whoever finds one of another owner or mode, or one that is full, says
    so; what ranks left there that do not wait any more does not count. Raises InputError for a rank that cannot be or
    such a file, MismatchError at all ranks that do not say the same number of them, DeadlineExceeded after `timeout_s`
    seconds.
    """
    check_ranks(rank, n_ranks)
    path = Path(path)

    def meet(record: bytes) -> Meeting:
        check_record(record)
        deadline_s = time.monotonic() + timeout_s
        with _joined(path, rank, n_ranks, record) as file:
            while (meeting := file.look()) is None:
                if time.monotonic() >= deadline_s:
                    missing = absent(file.waiting(), n_ranks)
                    raise DeadlineExceeded(f"{path}: waited {timeout_s:g} s in vain for ranks {missing} to meet")
                time.sleep(LOOK_S)
            return meeting

    return meet


@contextlib.contextmanager
def _joined(path: Path, rank: int, n_ranks: int, record: bytes) -> Iterator[_MeetingFile]:
    """The file, with this rank's record in it; without it again if the ranks do not meet."""
    while True:
        file = _open(path)
        try:
            joined = _MeetingFile(path, file, rank, n_ranks)
            if not joined.join(record):
                continue
            try:
                yield joined
            except BaseException:
                with contextlib.suppress(OptccError, OSError):
                    joined.leave()
                raise
            return
        finally:
            os.close(file)


def _open(path: Path) -> int:
    """The file, made if it is not there. Follows no link."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: must be a file that this user can write") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(file)
        raise InputError(f"{path}: must be a file of this user alone (mode 0600): it carries the secret of the job")
    return file


class _MeetingFile:
    """The open file at one rank. Its locks are those of this opening of the file, and end with it."""

    def __init__(self, path: Path, file: int, rank: int, n_ranks: int) -> None:
        self._path, self._file, self._rank, self._n_ranks = path, file, rank, n_ranks

    def join(self, record: bytes) -> bool:
        """Adds this rank's record; False if the file has been removed meanwhile."""
        with self._alone():
            if os.fstat(self._file).st_nlink == 0:
                return False
            sheet = self._read()
            waiting = set() if sheet is None else self._waiting(sheet)
            if sheet is None or not waiting:
                sheet = self._new_sheet()
            if sheet.n_ranks != self._n_ranks:
                sheet.refused = f"{self._path}: for {sheet.n_ranks} ranks; rank {self._rank} is one of {self._n_ranks}"
                self._write(sheet)
                raise MismatchError(sheet.refused)
            if self._rank in waiting:
                raise InputError(f"{self._path}: rank {self._rank} is there already: must be a file of this job alone")
            if waiting != set(sheet.records):
                left = {rank: sheet.records[rank] for rank in waiting}
                sheet = msgspec.structs.replace(self._new_sheet(), records=left)
            sheet.records[self._rank] = record
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _RANK_0 + self._rank)
            self._write(sheet)
        return True

    def look(self) -> Meeting | None:
        """What the ranks know once all of them have seen the records of all, None before."""
        with self._alone():
            sheet = self._read()
            if sheet is not None and sheet.refused:
                raise MismatchError(sheet.refused)
            if sheet is None or self._rank not in sheet.records:
                raise InputError(f"{self._path}: somebody has emptied it: must be left to the ranks of this job")
            if self._rank not in sheet.seen and len(self._waiting(sheet) | {self._rank}) == self._n_ranks:
                sheet.seen.append(self._rank)
                self._write(sheet)
                if len(sheet.seen) == self._n_ranks:
                    self._path.unlink()
        if len(sheet.seen) < self._n_ranks:
            return None
        records = tuple(sheet.records[rank] for rank in range(self._n_ranks))
        return Meeting(self._rank, self._n_ranks, sheet.job, sheet.secret, records)

    def waiting(self) -> set[int]:
        """The ranks that wait for each other, this one among them."""
        with self._alone():
            sheet = self._read()
            return {self._rank} if sheet is None else self._waiting(sheet) | {self._rank}

    def leave(self) -> None:
        """Takes this rank's record away, and the file if no other rank waits."""
        with self._alone():
            sheet = self._read()
            if sheet is None or os.fstat(self._file).st_nlink == 0:
                return
            sheet.records.pop(self._rank, None)
            sheet.seen = [rank for rank in sheet.seen if rank != self._rank]
            self._write(sheet)
            if not self._waiting(sheet):
                self._path.unlink()

    def _waiting(self, sheet: _Sheet) -> set[int]:
        """The other ranks with a record that wait: those whose bytes are locked."""
        found = set()
        for rank in sheet.records:
            kind, *_ = _FLOCK.unpack(self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, _RANK_0 + rank))
            if kind != fcntl.F_UNLCK:
                found.add(rank)
        return found

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other rank reads or writes what the file says."""
        self._lock(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, _SHEET)
        try:
            yield
        finally:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _SHEET)

    def _lock(self, command: int, kind: int, byte: int) -> bytes:
        return fcntl.fcntl(self._file, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    def _new_sheet(self) -> _Sheet:
        return _Sheet(self._n_ranks, os.urandom(SECRET_BYTES), os.urandom(JOB_BYTES))

    def _read(self) -> _Sheet | None:
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not data:
            return None
        try:
            return msgspec.json.decode(data, type=_Sheet)
        except msgspec.DecodeError as error:
            raise InputError(f"{self._path}: {error}: must be a file of this job alone") from error

    def _write(self, sheet: _Sheet) -> None:
        data = msgspec.json.encode(sheet)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
