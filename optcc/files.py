"""Files of the user and of the cache: read with a limit, replaced whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from optcc.errors import InputError
from optcc.verdict import PROPERTIES, PROVED, Verdict

VERDICT_FORMAT = "optcc-verdict/1"
_PIECE_BYTES = 2**20
_VERDICT_BYTES_MAX = 2**16
_TEMPORARY_NAMES = 1000
_NAME_IN_A_FOLDER = "trace"
Files = Mapping[str, bytes]
"""The contents of files by the endings of their names."""


def read_file(path: Path, size_max: int) -> bytes:
    """The bytes of the file at `path`, at most `size_max` of them.

    Raises InputError if the file cannot be read or is longer.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # to open one waits for a writer, perhaps for ever
            raise InputError(f"file {str(path)!r}: must be a file, not a pipe")
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > size_max:
                    raise InputError(f"file {str(path)!r}: must be at most {size_max} B")
    except (OSError, ValueError) as error:
        raise InputError(f"file {str(path)!r}: cannot be read: {_cause(error)}") from None
    return b"".join(pieces)


def replace_file(path: Path, data: bytes) -> None:
    """Makes `data` the content of the file at `path`: afterwards it is all there, or the old file is untouched.

    The new file keeps the mode of the old one; a link is followed, and a device or a pipe is written to as it is.
    Raises InputError, naming the path and the cause, if that fails; no temporary file is left.
    """
    try:
        target = path.resolve()
        try:
            mode = target.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is None or stat.S_ISREG(mode):
            _replace(target, data, mode)
        else:
            with target.open("wb", buffering=0) as file:
                _write(file.fileno(), data)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"file {str(path)!r}: cannot be written: {_cause(error)}") from None


def replace_files(path: Path, files: Files) -> None:
    """Replaces the files whose names start with `path`, which may be a folder; none before all of them are written.

    Raises InputError, naming the path and the cause, if that fails; no temporary file is left.
    """
    if list(files) == [""]:
        replace_file(path, files[""])
        return
    prefix = path / _NAME_IN_A_FOLDER if path.is_dir() else path
    targets = [prefix.parent / f"{prefix.name}{ending}" for ending in files]
    for target in targets:
        if target.is_dir():
            raise InputError(f"file {str(target)!r}: cannot be written: Is a directory")
    written = [target.with_name(f".{target.name}.{os.getpid()}.tmp") for target in targets]
    try:
        for temporary, data in zip(written, files.values(), strict=True):
            replace_file(temporary, data)
        for temporary, target in zip(written, targets, strict=True):
            temporary.replace(target)
    except OSError as error:
        raise InputError(f"file {str(path)!r}: cannot be written: {error.strerror}") from None
    finally:
        for temporary in written:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """The directory for what can be computed again: `optcc` in $XDG_CACHE_HOME, else in ~/.cache, made with mode 0700.

    None, that is no cache, if it cannot be made or written, or if somebody else could have put files there: it is a
    symbolic link, belongs to another user, or is writable by others.
    """
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # The XDG rule: a relative path counts as absent.
        base = Path(environ.get("HOME", "")) / ".cache"
    directory = base / "optcc"
    if not directory.is_absolute():
        return None
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None
        if stat.S_IMODE(status.st_mode) != 0o700:
            directory.chmod(0o700)
    except (OSError, ValueError):
        return None
    return directory if os.access(directory, os.R_OK | os.W_OK | os.X_OK) else None


class _VerdictFile(msgspec.Struct, forbid_unknown_fields=True):
    """A plan that was proved, by which verifier; `properties` are all of `PROPERTIES`."""

    format: str
    digest: str
    version: str
    properties: dict[str, str]


class VerdictCache:
    """Proved verdicts in `directory`, one file for each plan digest and verifier version; without one it keeps nothing.

    Only proofs are kept: a refuted plan is worth a fresh counterexample. A cache never fails: what is not exactly a
    file that `put` has written, by this user, is a miss, and what cannot be written is not kept.
    """

    def __init__(self, directory: Path | None, version: str) -> None:
        self.directory = directory
        self.version = version

    def get(self, digest: str) -> Verdict | None:
        """The proof of the plan with this digest by this version of the verifier, if there is one."""
        if self.directory is None:
            return None
        try:
            file = msgspec.json.decode(_read_own(self._path(self.directory, digest)), type=_VerdictFile)
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
            return None
        proved = dict.fromkeys(PROPERTIES, PROVED)
        if (file.format, file.digest, file.version) != (VERDICT_FORMAT, digest, self.version):
            return None
        return Verdict(digest, proved) if file.properties == proved else None

    def put(self, verdict: Verdict) -> None:
        """Keeps `verdict` if it is a proof."""
        if self.directory is None or verdict.verdict != PROVED:
            return
        file = _VerdictFile(VERDICT_FORMAT, verdict.digest, self.version, verdict.properties)
        with suppress(OSError):
            _replace(self._path(self.directory, verdict.digest), msgspec.json.encode(file), None)

    def _path(self, directory: Path, digest: str) -> Path:
        """A name made of hexadecimal digits alone, whatever `digest` and `version` are."""
        key = msgspec.json.encode([VERDICT_FORMAT, digest, self.version])
        return directory / f"{hashlib.sha256(key).hexdigest()}.json"


def _read_own(path: Path) -> bytes:
    """The content of a short regular file of this user's, not through a symbolic link; OSError for anything else."""
    # A pipe in its place must not make us wait, hence O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _VERDICT_BYTES_MAX:
            raise OSError(f"{path}: not a file of the cache")
        return file.read(_VERDICT_BYTES_MAX)


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    """Writes a temporary file beside `target` and renames it: readers see the old content or the new."""
    temporary, descriptor = _create_beside(target)
    try:
        try:
            if mode is not None:
                os.fchmod(descriptor, mode & 0o777)
            _write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    # The file is in place; a directory that cannot be synced only makes it less certain to survive a power cut.
    with suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _create_beside(target: Path) -> tuple[Path, int]:
    """A new file in the directory of `target`, and its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(_TEMPORARY_NAMES):
        temporary = target.parent / f".optcc-{os.getpid()}-{attempt}.tmp"
        with suppress(FileExistsError):
            return temporary, os.open(temporary, flags, 0o666)
    raise OSError(f"{_TEMPORARY_NAMES} temporary files are in the way in {target.parent}")


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
