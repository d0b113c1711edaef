"""`Source`: a record with the file it came from, fit to be drawn.

Its field `format` says which kind of record it is (`record_kinds`). `optcc.paper_figures.build` says which kinds have a
figure; the manual has others as tables.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from optcc.errors import InputError
from optcc.experiments.made import Made, made_of
from optcc.experiments.record import RECORD_BYTES_MAX, Record, Recorded, Samples, check_of, record_kinds
from optcc.files import read_file


@dataclass(frozen=True)
class Source:
    """A record, the name of its file, the SHA-256 of the file in hexadecimal, and what it says of when it was made."""

    name: str
    sha256: str
    record: Recorded
    made: Made | None = None

    def as_json(self) -> dict[str, str]:
        """Its entry in a manifest."""
        return {"file": self.name, "sha256": self.sha256}


def find(folder: Path) -> tuple[Path, ...]:
    """Every record file in `folder`, by name; raises InputError if there is none."""
    found = tuple(sorted(folder.glob("*.json")))
    if not found:
        raise InputError(f"no record in {str(folder)!r}: make one with optcc demo, or name one with --record FILE")
    return found


def read(paths: Sequence[Path]) -> tuple[Source, ...]:
    """The records in the files at `paths`; a file that is named twice counts once.

    Raises InputError if one cannot be read, CodecError if one is no record or cannot be drawn.
    """
    sources: dict[Path, Source] = {}
    for path in paths:
        data = read_file(path, RECORD_BYTES_MAX)
        # A file without a known format is rejected as a broken measurement.
        record = record_kinds().get(_format(data), Record).from_bytes(data, str(path))
        if isinstance(record, Record):
            require_drawable(record, str(path))
        sources.setdefault(path.resolve(), Source(path.name, hashlib.sha256(data).hexdigest(), record, made_of(data)))
    return tuple(sources.values())


class _Head(msgspec.Struct):
    format: str = ""


def _format(data: bytes) -> str:
    """The `format` of a file; empty if it is no JSON object, which its reader reports."""
    try:
        return msgspec.json.decode(data, type=_Head).format
    except (msgspec.MsgspecError, RecursionError):
        return ""


def require_drawable(record: Record, name: str) -> None:
    """Raises CodecError, with the path to the field, if a number in `record` cannot be one of a measurement."""
    check = check_of(name)

    def check_samples(field: str, samples: Samples) -> None:
        check(f"{field}.seconds", samples.seconds, bool(samples.seconds), "have at least one timing")
        for number, seconds in enumerate(samples.seconds):
            check(f"{field}.seconds[{number}]", seconds, 0 < seconds < math.inf, "be above zero")
        same = len(samples.steal) == len(samples.seconds)
        check(f"{field}.steal", samples.steal, same, f"have as many numbers as seconds, {len(samples.seconds)}")
        check(f"{field}.wrong", samples.wrong, samples.wrong >= 0, "not be negative")

    check("wire_overhead", record.wire_overhead, 1 <= record.wire_overhead < math.inf, "be at least 1")
    check("rows", list(record.rows), bool(record.rows), "have at least one row")
    for number, row in enumerate(record.rows):
        field = f"rows[{number}]"
        check(f"{field}.schedule", row.schedule, bool(row.schedule), "be a name")
        check(f"{field}.bed", row.bed, bool(row.bed), "be a name")
        check(f"{field}.ranks", row.ranks, row.ranks >= 1, "be at least 1")
        check(f"{field}.size_bytes", row.size_bytes, row.size_bytes >= 0, "not be negative")
        for what, seconds in (("bound_s", row.bound_s), ("predicted_s", row.predicted_s)):
            check(f"{field}.{what}", seconds, seconds is None or 0 <= seconds < math.inf, "not be negative")
        run = [(what, each) for what in ("out_of_place", "in_place") if (each := getattr(row, what)) is not None]
        check(f"{field}.out_of_place", None, bool(run), "be given, or in_place")
        for what, samples in run:
            check_samples(f"{field}.{what}", samples)
