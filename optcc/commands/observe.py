"""`optcc observe`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click

from optcc.cli import SecondsType, SizeType, echo_json, json_option
from optcc.errors import EXIT_DONE, InputError, did_you_mean
from optcc.runtime.observe.jobs import pages_folder
from optcc.runtime.taps.control import RING_BYTES, ask_for
from optcc.runtime.taps.drain import DRAIN_NICENESS, JobDrain
from optcc.runtime.taps.policy import Tap
from optcc.runtime.taps.sinks import Sink, sink_for


@click.command("observe", epilog='Example: optcc observe 3fa4 --tap "norms points=output every=10" -o norms.parquet')
@click.argument("job")
@click.option("--tap", "texts", multiple=True, metavar="TAP", help="What to take from now on; several may be given.")
@click.option("--off", is_flag=True, help="Take nothing any more.")
@click.option("--ring", "ring_bytes", type=SizeType(), default=RING_BYTES, help="Shared memory of each rank.")
@click.option(
    *("-o", "--output", "outputs"),
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Drain the records into a .npz, .parquet, .arrow or .arrows file until the job ends.",
)
@click.option("--seconds", type=SecondsType(), help="Drain for so long at most.")
@json_option
def command(
    job: str,
    texts: tuple[str, ...],
    off: bool,
    ring_bytes: int,
    outputs: tuple[Path, ...],
    seconds: float | None,
    as_json: bool,
) -> int:
    """Take chunks of the collectives of a running job on this host, and write them to files.

    A tap says what is taken (full, sample, norms, histogram, checksum, guard), then where it differs from the defaults:
    collective=, plan=, stage= (names or patterns), segments=, ranks=, points=input,sent,arrived,result,output, every=
    runs, chunks= one of so many, stride=, budget=, share=, full=drop|sample|block, block=.
    """
    folder = pages_folder(os.environ)
    if folder is None:
        raise InputError("job: there is no folder for pages on this host")
    if off and texts:
        raise InputError("tap: must not be given with off")
    job = _named(folder, job)
    taps = [Tap.parse(text) for text in texts]
    sinks: list[Sink] = [sink_for(path) for path in outputs]
    if taps or off:
        ask_for(folder, job, taps, ring_bytes)
    n_records = 0
    if sinks:
        os.nice(DRAIN_NICENESS)
        drain = JobDrain(folder, job, sinks)
        until_s = float("inf") if seconds is None else time.monotonic() + seconds
        with suppress(KeyboardInterrupt), interrupted() as is_interrupted:
            drain.run(goes_on=lambda: not is_interrupted() and time.monotonic() < until_s)
        n_records = drain.n_records
    if as_json:
        echo_json({"job": job, "taps": list(texts), "records": n_records, "outputs": [str(path) for path in outputs]})
    elif sinks:
        click.echo(f"{n_records} records: {', '.join(map(str, outputs))}")
    return EXIT_DONE


@contextmanager
def interrupted() -> Iterator[Callable[[], bool]]:
    """Within, an interrupt is told and does not break off a batch, which would be drained twice; another one does."""
    seen: list[int] = []
    former: Any = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, former)


def _named(folder: Path, begins: str) -> str:
    """The job on this host whose name is, or begins with, this; it has a page or a ring."""
    names = {path.name.partition(".")[0] for suffix in ("page", "ring") for path in folder.glob(f"*.{suffix}")}
    found = [name for name in sorted(names) if name == begins] or [each for each in names if each.startswith(begins)]
    if len(found) != 1:
        known = ", ".join(sorted(names)) or "none"
        raise InputError(f"job {begins!r}: must be one on this host: {known}{did_you_mean(begins, names)}")
    return found[0]
