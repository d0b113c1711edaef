"""When and by which code a record was made: one line of its file, which `optcc experiment` writes for every kind.

The line is the second of the file, `"made": {"date": ..., "rooms": {...}}`. A room is a package of this project, or
the module of the experiment, with a digest of its source files: a record is older than what it measures if one of them
has another digest now. A record of simulated time, whose results are the same however it was made, has no date in that
line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import msgspec

EVERY_ROOM = ("optcc", "schedules", "verify", "runtime")
"""The packages that a measurement can depend on; `optcc` stands for what the others share, without the commands."""
PLANNED_ROOMS = ("optcc", "schedules", "verify")
"""Those of what is planned, proved and simulated, and not run."""
UNDATED = "before dates were recorded"
NO_DATE = "no date: simulated, the same results each time"
CURRENT = "as it is now"
UNKNOWN = "not recorded"
_TOP = Path(__file__).resolve().parents[1]
_LEFT_OUT = {"__pycache__", "commands"}
_SOURCES = {".py", ".cu", ".cuh", ".c", ".h", ".cpp"}
_DIGITS = 16
_LINE = re.compile(rb'\A(\{\n "format": "[^"\n]*",\n) "made": (\{[^\n]*\}),\n')
_HEAD_BYTES = 4096


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When (UTC; empty if the record has no time in it), the digest of each room that is measured, and whether it is
    the smaller version of the experiment."""

    date: str
    rooms: dict[str, str]
    quick: bool = False

    @classmethod
    def now(cls, rooms: Sequence[str], *, dated: bool = True, quick: bool = False) -> Made:
        """By the code as it is, at this moment."""
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC") if dated else ""
        return cls(date, {room: room_digest(room) for room in rooms}, quick)

    def joined_to(self, former: Made | None) -> Made:
        """Of a record that has kept rows of a former one: by the code of that one, as far as it is known."""
        known = {} if former is None else former.rooms
        return Made(self.date, {room: known.get(room, "") for room in self.rooms}, self.quick)

    def changed(self, rooms: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The rooms whose source is another now, or as `rooms` says; one that there is no more is one of them."""
        found = {room: room_digest(room) for room in self.rooms} if rooms is None else rooms
        return tuple(room for room, digest in self.rooms.items() if found.get(room) != digest)


def said_date(made: Made | None) -> str:
    """When a record was made, in words, and whether it is a quick one."""
    if made is None:
        return UNDATED
    return f"{made.date or NO_DATE}{', quick' if made.quick else ''}"


def said_code(made: Made | None) -> str:
    """Whether a record is older than the code that it measures, in words."""
    if made is None:
        return UNKNOWN
    changed = made.changed()
    return f"older than {', '.join(changed)}" if changed else CURRENT


def stamped(data: bytes, made: Made) -> bytes:
    """The file of a record with the line of `made`, in the place of one that it has."""
    first, rest = unstamped(data).split(b",\n", 1)
    line = json.dumps(msgspec.to_builtins(made)).encode()
    return first + b',\n "made": ' + line + b",\n" + rest


def unstamped(data: bytes) -> bytes:
    """The file of a record without that line."""
    return _LINE.sub(rb"\1", data)


def made_of(data: bytes) -> Made | None:
    """What the file of a record says; None if it says nothing that can be read."""
    found = _LINE.match(data)
    try:
        return None if found is None else msgspec.json.decode(found[2], type=Made)
    except msgspec.MsgspecError:
        return None


def made_at(path: Path) -> Made | None:
    """What the record at `path` says; None too if it is not there."""
    try:
        with path.open("rb") as file:
            return made_of(file.read(_HEAD_BYTES))
    except OSError:
        return None


@cache
def room_digest(room: str) -> str:
    """A digest of the names and bytes of a room's source files; empty if it has none."""
    total, count = hashlib.sha256(), 0
    for path, name in _sources(room):
        content = path.read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
        count += 1
    return total.hexdigest()[:_DIGITS] if count else ""


def _sources(room: str) -> Iterator[tuple[Path, str]]:
    """Source files of a room in a fixed order, with their names within it. `experiments.x` is one module."""
    package, _, module = room.partition(".")
    top = next((each for each in (_TOP / package, _TOP / "optcc" / package) if each.is_dir()), None)
    if top is None:
        return
    if module:
        path = top / f"{module}.py"
        if path.is_file():
            yield path, path.name
        return
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(each for each in folders if each not in _LEFT_OUT and each not in EVERY_ROOM)
        for each in sorted(files):
            path = Path(folder, each)
            if path.suffix in _SOURCES:
                yield path, path.relative_to(top).as_posix()
