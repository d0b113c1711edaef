"""The cells of a record: measured one at a time or on many processes, kept as they are finished, counted on a terminal.

Finished cells are in `FILE.partial` beside the record, which is replaced atomically after each and removed once the
record is written; an interrupted experiment goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from optcc.errors import CodecError, InputError
from optcc.experiments.made import Made, made_at
from optcc.experiments.record import RECORD_BYTES_MAX, rational
from optcc.experiments.workers import Workers, plain
from optcc.files import read_file, replace_file

PARTIAL_FORMAT = "optcc-partial/1"
Result = TypeVar("Result")
Report = Callable[[int, int, str], None]
"""Called with (cells done, cells in all, the cell that is begun or done); empty if that is none."""


class _PartialFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    settings: str
    sha256: str
    done: dict[str, Any]


@dataclass
class Partial:
    """Finished cells by name, in a file that is replaced atomically after each; `settings` are those of the record.

    Raises InputError or CodecError from `open` if the file is not such a file, or one of other settings.
    """

    path: Path
    settings: str
    done: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: str, *, resume: bool) -> Partial:
        """The cells finished so far; none if there is no file."""
        if not path.exists():
            return cls(path, settings)
        if not resume:
            raise InputError(f"file {str(path)!r}: an unfinished record: give --resume to go on with it, or delete it")
        data = read_file(path, RECORD_BYTES_MAX)
        try:
            file = msgspec.json.decode(data, type=_PartialFile)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CodecError(f"unfinished record {str(path)!r}: {error}: delete it to start again") from None
        for name, value, wanted in (
            ("format", file.format, PARTIAL_FORMAT),
            ("settings", file.settings, settings),
            ("sha256", file.sha256, _digest(file.done)),
        ):
            if value != wanted:
                raise CodecError(
                    f"unfinished record {str(path)!r}: $.{name}: {value!r}: must be {wanted!r}: "
                    "delete it to start again"
                )
        return cls(path, settings, file.done)

    def add(self, name: str, result: Any) -> None:
        """Adds a finished cell, in values of JSON."""
        self.done[name] = result
        file = _PartialFile(PARTIAL_FORMAT, self.settings, _digest(self.done), self.done)
        replace_file(self.path, msgspec.json.encode(file) + b"\n")

    def close(self) -> None:
        """Removes the file, once the record is written."""
        self.path.unlink(missing_ok=True)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def quiet(done: int, of: int, name: str) -> None:
    """Reports nothing."""


@dataclass
class RecordCells:
    """What measures the cells of one record.

    `partial` is where they are kept, if they are, `workers` who measures those that need no quiet machine, and `report`
    is told how far it is.
    """

    partial: Partial | None = None
    workers: Workers = field(default_factory=Workers)
    report: Report = quiet
    joined: list[Made | None] = field(default_factory=list)
    """What former records say of themselves of which rows are kept."""
    leaves_partial: bool = False
    """Whether what is finished is kept beside the record, for another run to go on with."""

    def join(self, path: Path) -> None:
        """Says that rows of the record at `path` are kept in the one that is made: it is by the code of that one."""
        self.joined.append(made_at(path))

    @property
    def done(self) -> dict[str, Any]:
        """The finished cells by name, in values of JSON."""
        return {} if self.partial is None else self.partial.done

    def each(self, cells: Mapping[str, Callable[[], Result]], kind: Any) -> Iterator[Result]:
        """The cells in their order, each of type `kind`, measured in this process unless they are finished.

        Raises CodecError if what is kept is not of that type.
        """
        for number, (name, measure) in enumerate(cells.items()):
            self.report(number, len(cells), name)
            if name in self.done:
                yield _converted(name, self.done[name], kind)
                continue
            result = measure()
            self._keep(name, plain(result))
            yield result
        self.report(len(cells), len(cells), "")

    def spread(self, units: Mapping[str, Any], work: Callable[[Any], Any], kind: Any) -> dict[str, Any]:
        """`work` of every unit on the workers, by name and in their order, each of type `kind`.

        `work` is a function of a module. Units may be finished in any order; those that are kept are not done again.
        Raises CodecError if what is kept is not of that type.
        """
        done = {name: self.done[name] for name in units if name in self.done}
        lacking = {name: unit for name, unit in units.items() if name not in done}
        self.report(len(done), len(units), "")
        for name, result in self.workers.results(work, lacking):
            done[name] = result
            self._keep(name, result)
            self.report(len(done), len(units), name)
        return {name: _converted(name, done[name], kind) for name in units}

    def _keep(self, name: str, result: Any) -> None:
        if self.partial is not None:
            self.partial.add(name, result)


HERE = RecordCells()
"""Nothing is kept or said, and this process measures all."""


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=rational)
    except msgspec.ValidationError as error:
        raise CodecError(f"unfinished record: {name}: {error}: delete it to start again") from None


@contextmanager
def progress() -> Iterator[Report]:
    """A bar on a terminal that says how far it is, and how long the rest takes; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield quiet
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    said = TextColumn("{task.description}")
    with Progress(*columns, said, console=Console(stderr=True), transient=True, speed_estimate_period=3600) as bar:
        task = bar.add_task("", total=None)

        def report(done: int, of: int, name: str) -> None:
            bar.update(task, completed=done, total=of, description=name)

        yield report
