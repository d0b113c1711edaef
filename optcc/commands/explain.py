"""`optcc explain`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from optcc.cli import echo_json, json_option
from optcc.errors import EXIT_DONE, InputError
from optcc.runtime.observe.dump import FlightDump, read_dump, write_dump
from optcc.runtime.observe.explain import explain
from optcc.runtime.observe.jobs import pages_folder, read_job
from optcc.runtime.observe.torch_dump import write_torch_dumps

_DUMPS = "flight-*.json"


@click.command("explain", epilog="Example: optcc explain dumps/")
@click.argument("sources", metavar="[DUMPS... | JOB]", nargs=-1)
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write what was read as dumps, to be read elsewhere or later.",
)
@click.option(
    "--torch",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write files for torchfrtrace, which reads pickles only.",
)
@json_option
def command(sources: tuple[str, ...], save: Path | None, torch: Path | None, as_json: bool) -> int:
    """Say what happened first in a job, and who waited for whom, from the dumps of its ranks.

    DUMPS are files of the flight recorder, or folders of them; JOB is a job of this host, the last one if nothing is
    given, whose ranks may be alive, hang, have failed or been killed.
    """
    dumps = _read(sources)
    found = explain(dumps)
    written: list[Path] = [] if save is None else [write_dump(each, save) for each in dumps]
    if torch is not None:
        written += write_torch_dumps(dumps, torch)
    if as_json:
        echo_json(msgspec.to_builtins(found) | {"job": dumps[0].identity.job, "ranks": [each.rank for each in dumps]})
        return EXIT_DONE
    click.echo(found.text)
    for path in written:
        click.echo(f"written: {path}")
    return EXIT_DONE


def _read(sources: Sequence[str]) -> list[FlightDump]:
    paths = [Path(each) for each in sources]
    if not any(path.exists() for path in paths):
        if len(sources) > 1:
            raise InputError(f"file {sources[0]!r}: cannot be read: there is none")
        return read_job(pages_folder(os.environ), sources[0] if sources else None)
    found: list[FlightDump] = []
    for path in paths:
        files = sorted(path.glob(_DUMPS)) if path.is_dir() else [path]
        if not files:
            raise InputError(f"folder {str(path)!r}: must have dumps, files of the name {_DUMPS}")
        found += [read_dump(file) for file in files]
    return found
