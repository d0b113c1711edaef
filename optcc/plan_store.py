"""`PlanStore`: plans in the user's cache directory, for the processes of this machine that need the same ones.

A file has the columns of one plan as they lie in memory, which is hundreds of times faster to read than the plan file
of `optcc.codec`, and is private to the cache. In front stand the plan's digest and a seal over all of that, made with
the secret of this user (`optcc.files.cache_key`): a file without the right one counts for nothing. Nothing that is read
is believed for that: the plan is checked when it is made, and runs only with the verifier's verdict on its digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from optcc.arrays import Column, Lists
from optcc.errors import InputError, OptccError
from optcc.files import cache_key, read_file, replace_file
from optcc.plan import Plan, PlanRequest
from optcc.transfers import Transfers

logger = logging.getLogger("optcc.cache")

FORMAT = "optcc-plan-columns/2"
PLANS_MAX = 64
"""So many files are kept; the oldest give way."""
_PLAN_BYTES_MAX = 1 << 30
_SEAL_BYTES = _DIGEST_BYTES = 32
_ITEM_BYTES = 8


class PlanStore:
    """Plans by key, a text that says all that a plan follows from; a store never fails, it only forgets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "plans"
        with suppress(OSError):
            self.directory.mkdir(mode=0o700, exist_ok=True)

    def get(self, key: str, request: PlanRequest) -> Plan | None:
        """The plan with this key, if it is there and for that."""
        path = self._path(key, ".plan")
        try:
            if not path.exists():
                return None
            data = read_file(path, _PLAN_BYTES_MAX)
            if not hmac.compare_digest(self._seal(key, memoryview(data)[_SEAL_BYTES:]), data[:_SEAL_BYTES]):
                raise ValueError("is not sealed with this user's key")
            head_bytes = _SEAL_BYTES + _DIGEST_BYTES
            plan = unpack_plan(data, head_bytes)
            if plan.request != request:
                raise ValueError(f"is of {plan.request}, and not of {request}")
            # As `put` has computed it, which the seal says: to hash the columns again would double the time of reading.
            # Who runs a plan computes its digest anew (`optcc.runtime.plan_handshake.refuse`).
            vars(plan)["digest"] = data[_SEAL_BYTES:head_bytes].hex()
            return plan
        except Exception as error:  # whatever is wrong with the file, it is made again
            logger.warning("cache entry %s: %s: the plan is made again", path, error)
            return None

    def has(self, key: str) -> bool:
        """Whether there is a file for this key, of whatever worth."""
        return self._path(key, ".plan").exists()

    def put(self, key: str, plan: Plan) -> None:
        """Keeps a plan."""
        with suppress(OptccError, OSError):
            data = bytes.fromhex(plan.compute_digest()) + pack_plan(plan)
            replace_file(self._path(key, ".plan"), self._seal(key, data) + data, lasts=False)
            files = sorted(self.directory.glob("*.plan"), key=lambda path: path.stat().st_mtime)
            for path in files[:-PLANS_MAX]:
                path.unlink(missing_ok=True)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Nobody else makes the plan with this key meanwhile: waits for whoever does.

        The lock's file is that of many keys, and stays: one that is removed may be locked by who has opened it before,
        while others lock a new one.
        """
        with self._locked(self._path(key, "").name[0]):
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else has a process make plans meanwhile: waits for whoever does."""
        with self._locked("turn"):
            yield

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = self._open_lock(name)
        if descriptor is None:
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def take_for_good(self, name: str) -> bool:
        """True if this process has the lock of that name from now on until it ends, and did not have it before."""
        descriptor = self._open_lock(name)
        if descriptor is None:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        return True

    def _open_lock(self, name: str) -> int | None:
        try:
            return os.open(self.directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None

    def _seal(self, key: str, data: bytes | memoryview) -> bytes:
        """The seal of a plan's digest and columns; raises InputError if this user has no secret."""
        secret = cache_key(self.directory.parent)
        if secret is None:
            raise InputError(f"cache {str(self.directory.parent)!r}: has no key to seal with")
        seal = hmac.new(secret, f"{FORMAT} {len(key)} {key}".encode(), "sha256")
        seal.update(data)
        return seal.digest()

    def _path(self, key: str, ending: str) -> Path:
        return self.directory / f"{hashlib.sha256(f'{FORMAT} {key}'.encode()).hexdigest()}{ending}"


def pack_plan(plan: Plan) -> bytes:
    """A plan as bytes: the length of a head, the head as JSON, and the columns one after the other."""
    columns: dict[str, Column] = {}
    head: dict[str, Any] = {"format": FORMAT}
    for prefix, part in (("", plan), ("transfers.", plan.transfers)):
        for field in fields(part):
            value, name = getattr(part, field.name), prefix + field.name
            if isinstance(value, np.ndarray):
                columns[name] = value
            elif isinstance(value, Lists):
                columns[f"{name}.starts"], columns[f"{name}.values"] = value.starts, value.values
            elif not isinstance(value, Transfers):
                head[name] = value
    head["columns"] = {name: len(value) for name, value in columns.items()}
    text = msgspec.json.encode(head, enc_hook=str)
    text += b" " * (-len(text) % _ITEM_BYTES)
    length = len(text).to_bytes(_ITEM_BYTES, "little")
    return b"".join((length, text, *(value.astype("<i8").tobytes() for value in columns.values())))


def unpack_plan(data: bytes, at: int = 0) -> Plan:
    """The plan in such bytes, from `at`.

    Raises ValueError, KeyError, TypeError or an OptccError if they are not one.
    """
    begin = at + _ITEM_BYTES
    end = begin + int.from_bytes(data[at:begin], "little")
    head = msgspec.json.decode(data[begin:end])
    if head["format"] != FORMAT:
        raise ValueError(f"format {head['format']!r}: must be {FORMAT!r}")
    columns: dict[str, Column] = {}
    for name, length in head["columns"].items():
        # The columns stay where they are: nobody can change `data`.
        columns[name] = np.frombuffer(data, "<i8", length, end).astype(np.int64, copy=False)
        end += length * _ITEM_BYTES
    if end != len(data):
        raise ValueError(f"{len(data)} B: must be {end}")
    transfers = Transfers(**_values(Transfers, "transfers.", columns, head))
    return Plan(**{**_values(Plan, "", columns, head), "transfers": transfers})


def _read(value: Any, hint: Any) -> Any:
    """A field from JSON, in which fractions are texts."""
    return msgspec.convert(value, hint, dec_hook=lambda kind, text: kind(text))


def _values(kind: type, prefix: str, columns: dict[str, Column], head: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `Plan` or `Transfers`."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        key = prefix + name
        if hint is Lists:
            values[name] = Lists(columns[f"{key}.starts"], columns[f"{key}.values"])
        elif key in head:
            values[name] = head[key] if hint in (str, int) else _read(head[key], hint)
        elif hint is not Transfers:
            values[name] = columns[key]
    return values
