"""Files of the user and of the cache: read with a limit, replaced whole or not at all."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from optcc.errors import InputError
from optcc.verdict import PROPERTIES, PROVED, Verdict, sealed

logger = logging.getLogger("optcc.cache")

VERDICT_FORMAT = "optcc-verdict/2"
KEY_BYTES = 32
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


def replace_file(path: Path, data: bytes, *, lasts: bool = True) -> None:
    """Makes `data` the content of the file at `path`: afterwards it is all there, or the old file is untouched.

    The new file keeps the mode of the old one; a link is followed, and a device or a pipe is written to as it is. If it
    `lasts` that holds after a power cut too, for which the disk is waited for; a cache is without it.
    Raises InputError, naming the path and the cause, if that fails; no temporary file is left.
    """
    try:
        target = path.resolve()
        try:
            mode = target.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is None or stat.S_ISREG(mode):
            _replace(target, data, mode, lasts=lasts)
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


def cache_key(directory: Path) -> bytes | None:
    """The secret with which this user seals what lies in the cache `directory`, made when it is first needed; None if
    there is none: the directory cannot be written, or something else lies in the place of the key."""
    path = directory / "key"
    for _ in range(2):
        try:
            key = _read_own(path)
            return key if len(key) == KEY_BYTES else None
        except FileNotFoundError:
            with suppress(OSError):
                _make_key(path)
        except OSError:
            return None
    return None


def _make_key(path: Path) -> None:
    """Of all that make the key at once one does: the others find it there, and whole."""
    temporary, descriptor = _create_beside(path, 0o600)
    try:
        try:
            _write(descriptor, secrets.token_bytes(KEY_BYTES))
        finally:
            os.close(descriptor)
        path.hardlink_to(temporary)
    finally:
        temporary.unlink()


class _VerdictFile(msgspec.Struct, forbid_unknown_fields=True):
    """A plan that was proved, by which verifier; `properties` are all of `PROPERTIES`, `seal` is over the others."""

    format: str
    digest: str
    version: str
    properties: dict[str, str]
    seal: str

    def sealed_by(self, key: bytes) -> str:
        """What `seal` must be."""
        said = msgspec.json.encode([self.format, self.digest, self.version, sorted(self.properties.items())])
        return hmac.digest(key, said, "sha256").hex()


class VerdictCache:
    """Proved verdicts in `directory`, one file for each plan digest and verifier version; without one it keeps nothing.

    Only the verifier's proofs are kept: a refuted plan is worth a fresh counterexample. Every entry is sealed with the
    user's key (`cache_key`). A cache never fails: what is not exactly a file that `put` has written is a miss, with a
    line in the log, and what cannot be written is not kept.
    """

    def __init__(self, directory: Path | None, version: str) -> None:
        self.directory = directory
        self.version = version

    def get(self, digest: str) -> Verdict | None:
        """The proof of the plan with this digest by this version of the verifier, if there is one."""
        if self.directory is None:
            return None
        path = self._path(self.directory, digest)
        try:
            data = _read_own(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _say_miss(path, str(error))
            return None
        try:
            file = msgspec.json.decode(data, type=_VerdictFile)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            _say_miss(path, "is no verdict")
            return None
        proved = dict.fromkeys(PROPERTIES, PROVED)
        if (file.format, file.digest, file.version) != (VERDICT_FORMAT, digest, self.version):
            _say_miss(path, "is of another plan, or by another version of the verifier")
            return None
        key = cache_key(self.directory)
        if key is None or not hmac.compare_digest(file.seal.encode(), file.sealed_by(key).encode()):
            _say_miss(path, "is not sealed with this user's key")
            return None
        if file.properties != proved:
            _say_miss(path, "is no proof")
            return None
        return sealed(Verdict(digest, proved, verifier=self.version))

    def put(self, verdict: Verdict) -> None:
        """Keeps `verdict` if it is a proof by this version of the verifier."""
        if self.directory is None or verdict.properties != dict.fromkeys(PROPERTIES, PROVED):
            return
        if not verdict.is_sealed or verdict.verifier != self.version:
            return
        key = cache_key(self.directory)
        if key is None:
            return
        file = _VerdictFile(VERDICT_FORMAT, verdict.digest, self.version, verdict.properties, "")
        file.seal = file.sealed_by(key)
        with suppress(OSError):
            _replace(self._path(self.directory, verdict.digest), msgspec.json.encode(file), None, lasts=False)

    def _path(self, directory: Path, digest: str) -> Path:
        """A name made of hexadecimal digits alone, whatever `digest` and `version` are."""
        key = msgspec.json.encode([VERDICT_FORMAT, digest, self.version])
        return directory / f"{hashlib.sha256(key).hexdigest()}.json"


def _say_miss(path: Path, why: str) -> None:
    logger.warning("cache entry %s %s: the plan is judged again", path, why)


def _read_own(path: Path) -> bytes:
    """The content of a short regular file of this user's, not through a symbolic link; OSError for anything else."""
    # A pipe in its place must not make us wait, hence O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _VERDICT_BYTES_MAX:
            raise OSError(f"{path}: not a file of the cache")
        return file.read(_VERDICT_BYTES_MAX)


def _replace(target: Path, data: bytes, mode: int | None, *, lasts: bool) -> None:
    """Writes a temporary file beside `target` and renames it: readers see the old content or the new."""
    temporary, descriptor = _create_beside(target)
    try:
        try:
            if mode is not None:
                os.fchmod(descriptor, mode & 0o777)
            _write(descriptor, data)
            if lasts:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    # The file is in place; a directory that cannot be synced only makes it less certain to survive a power cut.
    if not lasts:
        return
    with suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _create_beside(target: Path, mode: int = 0o666) -> tuple[Path, int]:
    """A new file in the directory of `target`, and its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(_TEMPORARY_NAMES):
        temporary = target.parent / f".optcc-{os.getpid()}-{attempt}.tmp"
        with suppress(FileExistsError):
            return temporary, os.open(temporary, flags, mode)
    raise OSError(f"{_TEMPORARY_NAMES} temporary files are in the way in {target.parent}")


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
