"""`PlanStore`: plans in the user's cache directory, for the processes of this machine that need the same ones.

A file has the columns of one plan as NumPy writes them, which is a hundred times faster to read than the plan file of
`optcc.codec`, and is private to the cache. Nothing that is read is believed: the plan is checked when it is made, and
runs only with the verifier's verdict on its digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from optcc.arrays import Lists
from optcc.errors import OptccError
from optcc.files import read_file, replace_file
from optcc.plan import Plan
from optcc.transfers import Transfers

FORMAT = "optcc-plan-columns/1"
PLANS_MAX = 64
"""So many files are kept; the oldest give way."""
_PLAN_BYTES_MAX = 1 << 30


class PlanStore:
    """Plans by key, a text that says all that a plan follows from; a store never fails, it only forgets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "plans"
        with suppress(OSError):
            self.directory.mkdir(mode=0o700, exist_ok=True)

    def get(self, key: str) -> Plan | None:
        """The plan with this key, if it is there."""
        with suppress(Exception):  # whatever is wrong with the file, it is made again
            return unpack_plan(read_file(self._path(key, ".npz"), _PLAN_BYTES_MAX))
        return None

    def put(self, key: str, plan: Plan) -> None:
        """Keeps a plan."""
        with suppress(OptccError, OSError):
            replace_file(self._path(key, ".npz"), pack_plan(plan))
            files = sorted(self.directory.glob("*.npz"), key=lambda path: path.stat().st_mtime)
            for path in files[:-PLANS_MAX]:
                path.unlink(missing_ok=True)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Nobody else makes the plan with this key meanwhile: waits for whoever does.

        The lock's file is that of many keys, and stays: one that is removed may be locked by who has opened it before,
        while others lock a new one.
        """
        name = self._path(key, "").name[0]
        try:
            descriptor = os.open(self.directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _path(self, key: str, ending: str) -> Path:
        return self.directory / f"{hashlib.sha256(f'{FORMAT} {key}'.encode()).hexdigest()}{ending}"


def pack_plan(plan: Plan) -> bytes:
    """A plan as the bytes of an .npz file: its columns, and the rest as JSON."""
    columns: dict[str, Any] = {}
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
    file = io.BytesIO()
    np.savez(file, head=np.frombuffer(msgspec.json.encode(head), np.uint8), **columns)
    return file.getvalue()


def unpack_plan(data: bytes) -> Plan:
    """The plan in such bytes; raises ValueError, KeyError, TypeError or an OptccError if they are not one."""
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        head = msgspec.json.decode(columns["head"].tobytes())
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}: must be {FORMAT!r}")
        transfers = Transfers(**_values(Transfers, "transfers.", columns, head))
        return Plan(**{**_values(Plan, "", columns, head), "transfers": transfers})


def _values(kind: type, prefix: str, columns: Any, head: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `Plan` or `Transfers`."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        key = prefix + name
        if hint is Lists:
            values[name] = Lists(columns[f"{key}.starts"], columns[f"{key}.values"])
        elif key in head:
            values[name] = head[key] if hint in (str, int) else msgspec.convert(head[key], hint)
        elif hint is not Transfers:
            values[name] = columns[key]
    return values
