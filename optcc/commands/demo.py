"""`optcc demo`: one server lost half of its NIC bandwidth; verify, run and compare every schedule."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from optcc.cli import echo_card, json_option, run
from optcc.errors import EXIT_DONE, EXIT_REFUTED, RuntimeFault
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, NicRates, can_make_namespaces
from optcc.experiments.peers import MPI_RING
from optcc.experiments.record import Record, command_line
from optcc.files import VerdictCache
from optcc.planner import build_plan, prove
from optcc.topology import Topology
from optcc.units import show_size, show_time
from optcc.verify.bounds.closed_forms import allreduce_bound
from optcc.verify.plan import VERSION

HOSTS, NICS, NIC_RATE, HALF_RATE = 4, 2, "200Mbit/s", "100Mbit/s"
DEGRADED = HOSTS - 1
SCHEDULES = ("ring", "r2ccl-balance", "r2ccl-allreduce", "optcc", "optimal")
RUN_TIMEOUT_S = 400.0


@click.command("demo", epilog="Example: optcc demo --quick")
@click.option("--quick", is_flag=True, help="A smaller message and fewer runs, for a smoke test.")
@click.option("--full", is_flag=True, help="More runs, for a record that is kept.")
@click.option("--loopback", is_flag=True, help="Threads on shaped ports even where namespaces could be made.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True)
@json_option
def command(quick: bool, full: bool, loopback: bool, out: Path, as_json: bool) -> int:
    """Four servers of two NICs; one of them keeps half of its bandwidth. Verify, run under mpirun, compare, draw.

    With the right to make network namespaces the ranks sit on emulated hosts with shaped NICs; without it they are
    threads on shaped ports of this process.
    """
    size = 16 * 2**20 if quick else 64 * 2**20
    iterations = 2 if quick else 7 if full else 3
    healthy = Topology.parse(f"{HOSTS}@50MB/s")
    degraded = Topology.parse(f"{HOSTS}@50MB/s,{DEGRADED}=25MB/s")
    say = (lambda text: click.echo(text, err=True)) if as_json else click.echo

    reason = "asked for" if loopback else can_make_namespaces()
    say(f"One of {HOSTS} servers keeps half of its bandwidth; AllReduce of {show_size(size)} float32.")
    _prove(degraded, size, say)
    out.mkdir(parents=True, exist_ok=True)
    flags = ("-b", str(size), "-n", str(iterations), "-w", "1", "--mode", "out")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="optcc-demo-") as scratch:
        if reason is None:
            say(f"Ranks sit on {HOSTS} emulated hosts (network namespaces) with {NICS} NICs of {NIC_RATE} each.")
            record = _on_fabric(healthy, degraded, flags, Path(scratch), say)
        else:
            say(f"Ranks are threads on shaped ports of this process (no network namespaces: {reason}).")
            record = _on_loopback(healthy, degraded, flags, Path(scratch), say)
    file = out / "demo.json"
    record.write_made(file)
    if as_json:
        click.echo(record.to_bytes().decode(), nl=False)
    else:
        echo_card(record)
    if any(row.schedule == "shares" for row in record.rows):
        say("shares is the optimum for ports that flows share, as those of TCP are: it stands for `optimal` there.")
    say(f"Took {time.monotonic() - started:.0f} s. Record: {file}")
    wrong = sum(row.wrong for row in record.rows)
    style = [*(("--quick",) if quick else ()), *(("--quiet",) if as_json else ())]
    drawn = run(["figures", "--record", str(file), "--out", str(out), *style])
    return EXIT_REFUTED if wrong or drawn != EXIT_DONE else EXIT_DONE


def _prove(topology: Topology, size: int, say: Callable[[str], None]) -> None:
    """Compiles and verifies every schedule; raises as `prove` if one is not proved."""
    bound = allreduce_bound(topology, size)
    say(f"No AllReduce is faster than {show_time(float(bound.seconds))} there ({', '.join(bound.binding)} bind).")
    for name in SCHEDULES:
        started = time.perf_counter()
        plan = build_plan(name, topology, size)
        compiled = time.perf_counter()
        verdict = prove(plan, VerdictCache(None, VERSION))
        say(
            f"  {name}: {len(plan)} instructions compiled in {compiled - started:.2f} s, "
            f"{', '.join(verdict.properties)} proved in {time.perf_counter() - compiled:.2f} s"
        )


def _on_fabric(
    healthy: Topology, degraded: Topology, flags: Sequence[str], scratch: Path, say: Callable[[str], None]
) -> Record:
    """Under mpirun across emulated hosts, over our TCP, by plans for its ports; and Open MPI's own ring."""
    name = f"demo-{os.getpid()}"
    spec = FabricSpec.parse(f"{HOSTS}x{NICS}@{NIC_RATE}", name=name)
    with Fabric.up(spec) as fabric:

        def job(bed: str, topology: Topology, schedules: Sequence[str], *more: str) -> Record:
            file = scratch / f"{bed}{len(schedules)}.json"
            words = [*_words(flags, bed, topology, schedules, file), *more]
            say(f"  mpirun -n {HOSTS} optcc {' '.join(words)}")
            argv = [sys.executable, "-m", "optcc", *words, "--wire-overhead", WIRE_OVERHEAD]
            result = fabric.run(argv, timeout_s=RUN_TIMEOUT_S, mpi_args=MPI_RING, capture=True)
            if result.exit_code or not file.exists():
                raise RuntimeFault(f"bench on {bed} hosts ended with {result.exit_code}:\n{result.stderr.strip()}")
            return Record.read(file)

        def bench(bed: str, topology: Topology, schedules: Sequence[str]) -> tuple[Record, Record]:
            """Open MPI's ring and ours, each in a job of its own: in one they share the processors."""
            return job(bed, topology, (), "--peer", "mpi"), job(bed, topology, schedules, "--transport", "tcp")

        first = bench("healthy", healthy, ("ring",))
        fabric.set_rate(f"h{DEGRADED}", NicRates.parse(HALF_RATE))
        second = bench("half", degraded, SCHEDULES)
    return _joined((*first, *second), f"{HOSTS} emulated hosts, {NICS} NICs of {NIC_RATE} each")


def _on_loopback(
    healthy: Topology, degraded: Topology, flags: Sequence[str], scratch: Path, say: Callable[[str], None]
) -> Record:
    """In this process, on ports shaped to the same rates."""

    def bench(bed: str, topology: Topology, schedules: Sequence[str]) -> Record:
        file = scratch / f"{bed}.json"
        words = [*_words(flags, bed, topology, schedules, file), "--transport", "loopback"]
        say(f"  optcc {' '.join(words)}")
        code = run([*words, "--quiet"])
        if code:
            raise RuntimeFault(f"bench on {bed} ports ended with {code}")
        return Record.read(file)

    first, second = bench("healthy", healthy, ("ring",)), bench("half", degraded, SCHEDULES)
    return _joined((first, second), f"{HOSTS} threads on shaped ports")


def _words(flags: Sequence[str], bed: str, topology: Topology, schedules: Sequence[str], file: Path) -> list[str]:
    chosen = [word for name in schedules for word in ("--schedule", name)]
    return ["bench", *flags, *chosen, "--topology", topology.text, "--bed", bed, "-J", str(file)]


def _joined(records: Sequence[Record], where: str) -> Record:
    first = records[0]
    size = show_size(first.rows[0].size_bytes)
    title = f"AllReduce of {size} float32 on {where}; `half`: one of them at half rate"
    rows = tuple(row for record in records for row in record.rows)
    nics = tuple(nic for record in records for nic in record.nics)
    return replace(first, title=title, bed=where, command=command_line(), rows=rows, nics=nics)
