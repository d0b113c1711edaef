"""`optcc status`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
import msgspec

from optcc.cli import SecondsType, echo_card, echo_json, json_option
from optcc.errors import EXIT_DONE, InputError
from optcc.files import replace_file
from optcc.runtime.observe.jobs import jobs_in, pages_folder, read_job
from optcc.runtime.observe.metrics import openmetrics, serve
from optcc.runtime.observe.snapshot import JobSnapshot, snapshot

_PORT_MAX = 65535


@click.command("status", epilog="Example: optcc status --json")
@click.argument("job", required=False)
@click.option("--list", "lists", is_flag=True, help="Name the jobs of this user on this host, the last one first.")
@click.option("--once", is_flag=True, help="Print once, also on a terminal.")
@click.option("--interval", type=SecondsType(), default=1.0, show_default=True, help="Seconds between refreshes.")
@click.option(
    "--openmetrics",
    "metrics",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the numbers in the OpenMetrics format.",
)
@click.option("--serve", "port", type=click.IntRange(1, _PORT_MAX), metavar="PORT", help="Answer scrapes at this port.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where --serve listens.")
@json_option
def command(
    job: str | None,
    lists: bool,
    once: bool,
    interval: float,
    metrics: Path | None,
    port: int | None,
    address: str,
    as_json: bool,
) -> int:
    """Show a running job of this host: what each rank does, its NICs, and who waits for whom.

    JOB is its name or the beginning of it, the last one if left out. A rank that hangs, has failed or was killed is
    shown as it was last. On a terminal it refreshes until interrupted.
    """
    folder = pages_folder(os.environ)
    if lists:
        jobs = {} if folder is None else {name: len(pages) for name, pages in jobs_in(folder).items()}
        if as_json:
            echo_json({"jobs": [{"job": name, "ranks": count} for name, count in jobs.items()]})
        for name, count in jobs.items() if not as_json else ():
            click.echo(f"{name}  {count} {'rank' if count == 1 else 'ranks'}")
        return EXIT_DONE

    def take() -> JobSnapshot:
        dumps = read_job(folder, job)
        return snapshot(dumps, time.perf_counter())

    if port is not None:
        return _serve(take, port, address, interval)
    now = take()
    if metrics is not None:
        replace_file(metrics, openmetrics(now))
    if as_json:
        echo_json(msgspec.to_builtins(now))
    elif metrics is None or sys.stdout.isatty():
        if sys.stdout.isatty() and not once and metrics is None:
            _refresh(take, interval)
        else:
            _print(now)
    return EXIT_DONE


def _print(now: JobSnapshot) -> None:
    echo_card(now.rank_card())
    if any(each.rails for each in now.ranks):
        click.echo()
        echo_card(now.rail_card())
    if now.missing:
        click.echo(f"\nnot on this host: ranks {', '.join(map(str, now.missing))}")
    if now.kind != "nothing":
        click.echo(f"\n{now.text}")


def _refresh(take: object, interval: float) -> None:
    """Redraws until interrupted, or until the job's pages are gone."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    assert callable(take)

    def draw(now: JobSnapshot) -> Group:
        return Group(now.rank_card(), now.rail_card(), Text("" if now.kind == "nothing" else now.text))

    with Live(draw(take()), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(draw(take()), refresh=True)
            except InputError:
                return


def _serve(take: object, port: int, address: str, interval: float) -> int:
    """Answers scrapes until interrupted, or until the job's pages are gone."""
    assert callable(take)
    take()
    try:
        stop = serve(take, port, address)
    except OSError as error:
        raise InputError(f"--serve {port}: {error.strerror}") from None
    try:
        while True:
            time.sleep(interval)
            try:
                take()
            except InputError:
                return EXIT_DONE
    finally:
        stop()
