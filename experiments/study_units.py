"""Studies as units of work on several processes; finished units are kept in a file, for a restart to continue from."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial as bound_to
from pathlib import Path
from typing import Any

import msgspec

from optcc.errors import CodecError, InputError
from optcc.experiments.failure_model import WORDS
from optcc.experiments.record import RECORD_BYTES_MAX
from optcc.files import read_file, replace_file

PARTIAL_FORMAT = "optcc-study-partial/1"
TRIALS_MAX, JOBS_MAX = 10**5, 256
Report = Callable[[int, int, str], None]
"""Called after every unit with (units done, units in all, name of the unit)."""


@dataclass
class Partial:
    """Finished units, in a file that is replaced atomically after each; `study` names the study and its options.

    Raises InputError or CodecError from `open` if the file is not such a file, or one of another study.
    """

    path: Path
    study: str
    done: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, study: str, *, resume: bool) -> Partial:
        """The units finished so far; none if there is no file."""
        if not path.exists():
            return cls(path, study)
        if not resume:
            raise InputError(f"file {str(path)!r}: an unfinished study: give --resume to go on with it, or delete it")
        data = read_file(path, RECORD_BYTES_MAX)
        try:
            file = msgspec.json.decode(data, type=_PartialFile)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CodecError(f"partial file {str(path)!r}: {error}: delete it to start again") from None
        for name, value, wanted in (
            ("format", file.format, PARTIAL_FORMAT),
            ("study", file.study, study),
            ("sha256", file.sha256, _digest(file.done)),
        ):
            if value != wanted:
                raise CodecError(
                    f"partial file {str(path)!r}: $.{name}: {value!r}: must be {wanted!r}: delete it to start again"
                )
        return cls(path, study, file.done)

    def add(self, name: str, result: Any) -> None:
        """Adds a finished unit."""
        self.done[name] = result
        file = _PartialFile(PARTIAL_FORMAT, self.study, _digest(self.done), self.done)
        replace_file(self.path, msgspec.json.encode(file) + b"\n")

    def close(self) -> None:
        """Removes the file, once the record is written."""
        self.path.unlink(missing_ok=True)


class _PartialFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    study: str
    sha256: str
    done: dict[str, Any]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def complete(
    units: Mapping[str, Any], work: Callable[[Any], Any], *, jobs: int, partial: Partial | None, report: Report
) -> dict[str, Any]:
    """`work` of every unit, by name and in their order, on `jobs` processes; units that are in `partial` are done.

    `work` is a function of a module, and what it returns is made of JSON's types.
    """
    done = dict(partial.done) if partial is not None else {}
    open_ = [(name, unit) for name, unit in units.items() if name not in done]
    n_before = len(units) - len(open_)

    def take(name: str, result: Any) -> None:
        done[name] = result
        if partial is not None:
            partial.add(name, result)
        report(n_before + len([each for each, _ in open_ if each in done]), len(units), name)

    if jobs == 1 or len(open_) < 2:
        for name, unit in open_:
            take(name, work(unit))
    else:
        # Spawned: a fork would copy the locks of threads that the parent has started.
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(jobs, len(open_)), initializer=_leave_interrupts) as pool:
            for name, result in pool.imap_unordered(bound_to(_named, work), open_):
                take(name, result)
    return {name: done[name] for name in units}


def _leave_interrupts() -> None:
    """Ignores Ctrl-C, which reaches the whole process group: the parent handles it and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _named(work: Callable[[Any], Any], unit: tuple[str, Any]) -> tuple[str, Any]:
    return unit[0], work(unit[1])


def check_numbers(trials: int, seed: int, jobs: int) -> None:
    """Raises InputError if an option of a study is out of range."""
    for name, value, least, most in (("trials", trials, 1, TRIALS_MAX), ("jobs", jobs, 1, JOBS_MAX)):
        if not least <= value <= most:
            raise InputError(f"--{name} {value}: must be from {least} to {most}")
    if not 0 <= seed < WORDS:
        raise InputError(f"--seed {seed}: must be from 0 to 2**64 - 1")


def study_name(study: str, trials: int, seed: int, *, quick: bool) -> str:
    """The name of a study with its options, as the partial file has it."""
    return f"{study}, {trials} trials, seed {seed}{', quick' if quick else ''}"


def command_for(study: str, trials: int, seed: int, *, quick: bool) -> tuple[str, ...]:
    """The command that makes the record."""
    options = ("--trials", str(trials), "--seed", str(seed), *(("--quick",) if quick else ()))
    return ("optcc", "study", study, *options)


def quiet(done: int, of: int, name: str) -> None:
    """Reports nothing."""
