"""`mpirun -n P optcc bench`: nccl-tests' flags and columns, then %bound."""

from __future__ import annotations

import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import msgspec

from optcc.cli import CollectiveType, OneOf, SecondsType, SegmentsType, SizeType, TopologyType, echo_json, json_option
from optcc.collective import DTYPE_BYTES, ROOTED, reductions_of
from optcc.commands.launched import abort_on_failure, carried_by, mpi_of
from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments.bench import (
    MODES,
    BenchSettings,
    Progress,
    measured,
    nic_traffic,
    run_cases,
    run_on_loopback,
)
from optcc.experiments.peers import PEERS
from optcc.experiments.record import (
    BenchTiming,
    NicTraffic,
    Record,
    Samples,
    algbw,
    busbw,
    command_line,
    these_versions,
    this_machine,
)
from optcc.plan import SLOTS_MAX
from optcc.planner import verdict_cache
from optcc.runtime.launchers import find_launch
from optcc.runtime.state import WINDOW
from optcc.runtime.transports.tcp import TcpTransport
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.units import parse_time

_DTYPES = {"float": "float32", "double": "float64", "half": "float16"} | {name: name for name in DTYPE_BYTES}
_DEFAULT_SCHEDULES = {
    "allreduce": "ring",
    "reducescatter": "ring-reduce-scatter",
    "allgather": "ring-all-gather",
    "broadcast": "chain-broadcast",
    "reduce": "chain-reduce",
    "alltoall": "direct-all-to-all",
    "gather": "direct-gather",
    "scatter": "direct-scatter",
}
_TITLES = {"allreduce": "AllReduce", "reducescatter": "ReduceScatter", "allgather": "AllGather"}
_TITLES |= {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "alltoall": "AllToAll",
    "gather": "Gather",
    "scatter": "Scatter",
}
_MODES = {"both": MODES, "out": ("out",), "in": ("in",)}
TRANSPORTS = ("mpi", "tcp", "ucx", "loopback")
SIZES_MAX = 1000


@click.command("bench", epilog="Example: mpirun -n 4 optcc bench -b 1M -e 64M -f 4 --schedule ring --topology 4@1GB/s")
@click.option("-b", "--minbytes", type=SizeType(), default="32M", show_default=True, help="Smallest size.")
@click.option("-e", "--maxbytes", type=SizeType(), default=None, help="Largest size; the smallest if absent.")
@click.option("-f", "--stepfactor", type=int, default=2, show_default=True, help="Factor between sizes.")
@click.option("-n", "--iters", type=click.IntRange(1), default=20, show_default=True, help="Timed runs of each.")
@click.option("-w", "--warmup_iters", type=click.IntRange(0), default=1, show_default=True, help="Runs before.")
@click.option("-c", "--check", type=click.IntRange(0, 1), default=1, show_default=True, help="Check all elements.")
@click.option(
    "-d",
    "--datatype",
    type=OneOf(_DTYPES),
    default="float",
    show_default=True,
    help="half, float, double, bfloat16, int8, ...",
)
@click.option("-o", "--op", default="sum", show_default=True, help="sum, prod, min, max, avg; band, bor, bxor.")
@click.option("--collective", type=CollectiveType(), default="allreduce", show_default=True, help="What is timed.")
@click.option("-r", "--root", type=click.IntRange(0), default=0, show_default=True, help=f"Of {', '.join(ROOTED)}.")
@click.option("--schedule", "schedules", multiple=True, help="A schedule, or FILE.py:FUNCTION; may be repeated.")
@click.option(
    "--peer",
    "peers",
    type=OneOf(PEERS),
    multiple=True,
    help="mpi: the MPI library's own collective; gloo: torch's; may be repeated.",
)
@click.option("--topology", type=TopologyType(), envvar="OPTCC_TOPOLOGY", help="What the hosts can carry.")
@click.option("--wire-overhead", default="1", envvar="OPTCC_WIRE_OVERHEAD", help="Bytes on the wire a payload byte.")
@click.option("--bed", default="given", help="A name for the state of the hosts, kept in the record.")
@click.option("--segments", type=SegmentsType(), default="auto", show_default=True, help="A number, or auto.")
@click.option(
    "--slots", type=click.IntRange(1, SLOTS_MAX), help="Messages taken ahead; 2, 1 on loopback, 128 for fifo."
)
@click.option(
    "--ports",
    type=OneOf(MODELS),
    help="For which ports transfers are ordered; exclusive, or fair if NICs are measured.",
)
@click.option(
    "--window", type=click.IntRange(1, 64), default=WINDOW, show_default=True, help="Instructions at once a lane."
)
@click.option("--mode", type=OneOf(_MODES), default="both", show_default=True, help="out of place, in place, or both.")
@click.option(
    "--transport", type=OneOf(TRANSPORTS), default="mpi", show_default=True, help="mpi, tcp, ucx or loopback (threads)."
)
@click.option(
    "--probe/--no-probe",
    default=True,
    show_default=True,
    help="Measure the NICs first (tcp), unless OPTCC_NIC_RATES declares them.",
)
@click.option("--latency", default="200us", show_default=True, help="What a message costs besides its bytes.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--deadline", type=SecondsType(), default=120.0, show_default=True, help="Seconds a single run may take.")
@click.option("-J", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a record to this file.")
@json_option
def command(
    minbytes: int,
    maxbytes: int | None,
    stepfactor: int,
    iters: int,
    warmup_iters: int,
    check: int,
    datatype: str,
    op: str,
    collective: str,
    root: int,
    schedules: tuple[str, ...],
    peers: tuple[str, ...],
    topology: Topology | None,
    wire_overhead: str,
    bed: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    window: int,
    mode: str,
    transport: str,
    probe: bool,
    latency: str,
    quiet: bool,
    deadline: float,
    output: Path | None,
    as_json: bool,
) -> int:
    """Time schedules of a collective and peers, interleaved, and check every element.

    One process a rank under mpirun, whose messages MPI carries, or with `--transport tcp` or `ucx` our own TCP, or
    UCX, over the NICs that OPTCC_SOCKET_IFNAME leaves; or `--transport loopback`, where the ranks are threads of this
    process on ports shaped to the topology. Times are medians over the timed runs, of the slowest rank each; sizes are
    rounded down to whole elements.
    """
    dtype = _DTYPES[datatype]
    if op not in reductions_of(dtype):
        raise InputError(f"-o {op!r}: must be one of {', '.join(reductions_of(dtype))}")
    settings = BenchSettings(
        schedules or (() if peers else (_DEFAULT_SCHEDULES[collective],)),
        peers,
        topology,
        parse_time(latency),
        _overhead(wire_overhead),
        bed,
        _sizes(minbytes, minbytes if maxbytes is None else maxbytes, stepfactor, dtype),
        iters,
        warmup_iters,
        bool(check),
        dtype,
        op,
        segments,
        slots,
        ports,
        window,
        _MODES[mode],
        deadline,
        quiet,
        probe,
        transport,
        collective,
        root,
    )
    if transport == "loopback":
        if topology is None:
            raise InputError("--transport loopback: give --topology, which says how many ranks and how fast")
        if peers:
            raise InputError(f"--peer {peers[0]}: needs --transport mpi, tcp or ucx")
        head = _head(settings, topology.n_ranks, topology)
        return _report(run_on_loopback(settings, _progress), settings, output, as_json, head)
    return _under_mpi(settings, output, as_json)


def _under_mpi(settings: BenchSettings, output: Path | None, as_json: bool) -> int:
    """This process is one rank. Only rank 0 speaks, unless what went wrong is not the same everywhere."""
    mpi = mpi_of(settings.transport)
    with abort_on_failure(mpi):
        _check_ranks(settings.topology, mpi.n_ranks)
        cache = verdict_cache()
        given = settings.topology
        with carried_by(mpi, settings.transport, os.environ) as transport:
            if isinstance(transport, TcpTransport):
                settings = measured(settings, transport, os.environ)
            rows = run_cases(settings, transport, mpi.comm, cache, _progress(mpi.rank))
            nics = nic_traffic(transport) if isinstance(transport, TcpTransport) else ()
    if mpi.rank == 0:
        code = _report(rows, settings, output, as_json, _head(settings, mpi.n_ranks, given, nics), nics)
    else:
        code = EXIT_REFUTED if any(row.wrong for row in rows) else EXIT_DONE
    mpi.close()
    return code


def _report(
    rows: list[BenchTiming],
    settings: BenchSettings,
    output: Path | None,
    as_json: bool,
    head: dict[str, Any],
    nics: tuple[NicTraffic, ...] = (),
) -> int:
    """Prints the table or the JSON, writes the record, and says whether every element was right."""
    wrong = sum(row.wrong for row in rows)
    resent, lost, detours = (sum(getattr(row, what) for row in rows) for what in ("resent", "lost", "detours"))
    if output is not None:
        record = Record(
            _TITLES[settings.collective],
            command_line(),
            settings.bed,
            float(settings.wire_overhead),
            this_machine(),
            these_versions(),
            tuple(rows),
            nics,
        )
        record.write(output)
    if settings.quiet:
        pass
    elif as_json:
        echo_json(
            {
                "config": head | _config(settings),
                "results": [_json_row(row, is_checked=settings.check) for row in rows],
                "out_of_bounds": wrong if settings.check else None,
                "nics": [msgspec.to_builtins(each) for each in nics],
            }
        )
    else:
        click.echo(_header(head, settings.topology))
        click.echo(_table(rows, is_checked=settings.check))
        found = f"{wrong} {'OK' if not wrong else 'FAILED'}" if settings.check else "N/A"
        click.echo(f"# Out of bounds values : {found}")
        mean = sum(row.busbw for row in rows) / len(rows) if rows else 0.0
        changes = sum(row.plan_changes for row in rows)
        if changes:
            click.echo(f"# Plan changes         : {changes}, for what the NICs carried then")
        if resent or lost:
            click.echo(f"# Lost connections     : {lost}, {resent} chunks were sent again")
        if detours:
            click.echo(f"# Through other hosts  : {detours} connections, between hosts that shared no rail")
        click.echo(f"# Avg bus bandwidth    : {mean:.6g}")
    return EXIT_REFUTED if wrong else EXIT_DONE


def _head(
    settings: BenchSettings, n_ranks: int, given: Topology | None, nics: tuple[NicTraffic, ...] = ()
) -> dict[str, Any]:
    """What ran where: versions, ranks, launcher, transport, NICs, and from where the topology is known."""
    if settings.topology is None:
        source = None
    else:
        source = "given" if given is not None and repr(given) == repr(settings.topology) else "measured"
    return {
        "versions": these_versions(),
        "ranks": n_ranks,
        "launcher": find_launch(os.environ).launcher,
        "transport": settings.transport,
        "nics": sorted({each.nic for each in nics}),
        "topology_source": source,
    }


def _header(head: dict[str, Any], topology: Topology | None) -> str:
    """The lines before the columns."""
    launcher = "" if head["launcher"] == "none" else f", launched by {head['launcher']}"
    over = f" over {', '.join(head['nics'])}" if head["nics"] else ""
    lines = [
        "# " + ", ".join(f"{package} {version}" for package, version in head["versions"].items()),
        f"# {head['ranks']} ranks{launcher}, messages by {head['transport']}{over}",
    ]
    if topology is not None:
        text = repr(topology)[len("Topology('") : -len("')")]
        lines.append(f"# topology {text}, {head['topology_source']}")
    return "\n".join(lines)


def _config(settings: BenchSettings) -> dict[str, Any]:
    return {
        "collective": settings.collective,
        "schedules": [*settings.schedules, *settings.peers],
        "topology": repr(settings.topology) if settings.topology is not None else None,
        "latency_s": float(settings.latency_s),
        "wire_overhead": str(settings.wire_overhead),
        "iterations": settings.iterations,
        "warmup": settings.warmup,
        "check": settings.check,
        "segments": settings.segments,
        "window": settings.window,
        "slots": settings.slots,
        "ports": settings.ports,
    }


def _json_row(row: BenchTiming, *, is_checked: bool) -> dict[str, Any]:
    """nccl-tests' keys, then ours."""

    def side(samples: Samples | None) -> dict[str, Any] | None:
        if samples is None:
            return None
        return {
            "time": samples.median_s * 1e6,
            "alg_bw": algbw(row.size_bytes, samples.median_s),
            "bus_bw": busbw(row.size_bytes, samples.median_s, row.ranks, row.collective),
            "nwrong": samples.wrong if is_checked else None,
        }

    return {
        "size": row.size_bytes,
        "count": row.size_bytes // DTYPE_BYTES[row.dtype],
        "type": row.dtype,
        "redop": row.reduction,
        "root": row.root,
        "out_of_place": side(row.out_of_place),
        "in_place": side(row.in_place),
        "bound_ratio": None if row.bound_s is None or not row.bound_s else row.seconds / row.bound_s,
        "bound_seconds": row.bound_s,
        "predicted_seconds": row.predicted_s,
        "schedule": row.schedule,
        "segments": row.segments,
        "resent": row.resent,
        "lost": row.lost,
        "detours": row.detours,
        "plan_changes": row.plan_changes,
    }


def _table(rows: list[BenchTiming], *, is_checked: bool) -> str:
    """nccl-tests' columns, then %bound and the schedule."""
    head = f"#{'out-of-place':>77}{'in-place':>36}"
    side = f"{'time':>11}{'algbw':>8}{'busbw':>8}{'#wrong':>8}"
    unit = f"{'(us)':>11}{'(GB/s)':>8}{'(GB/s)':>8}{'':>8}"
    lines = [
        head,
        f"#{'size':>12}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}{side}{side}{'%bound':>8}  schedule",
        f"#{'(B)':>12}{'(elements)':>14}{'':>26}{unit}{unit}",
    ]
    for row in rows:
        cells = "".join(
            _table_side(row, samples, is_checked=is_checked) for samples in (row.out_of_place, row.in_place)
        )
        percent = "N/A" if row.bound_percent is None else f"{row.bound_percent:.1f}"
        what = f"{row.size_bytes:>12}{row.size_bytes // DTYPE_BYTES[row.dtype]:>14}{row.dtype:>10}{row.reduction:>8}"
        lines.append(f" {what}{row.root:>8}{cells}{percent:>8}  {row.schedule}")
    return "\n".join(lines)


def _table_side(row: BenchTiming, samples: Samples | None, *, is_checked: bool) -> str:
    if samples is None:
        return f"{'N/A':>11}{'N/A':>8}{'N/A':>8}{'N/A':>8}"
    seconds = samples.median_s
    bandwidths = (
        f"{algbw(row.size_bytes, seconds):>8.4f}{busbw(row.size_bytes, seconds, row.ranks, row.collective):>8.4f}"
    )
    return f"{seconds * 1e6:>11.1f}{bandwidths}{samples.wrong if is_checked else 'N/A':>8}"


def _sizes(low: int, high: int, factor: int, dtype: str) -> tuple[int, ...]:
    """From low to high by a factor, rounded down to whole elements, each once."""
    if high < low:
        raise InputError(f"-e {high}: must not be below -b {low}")
    if factor < 2 and high > low:
        raise InputError(f"-f {factor}: must be at least 2")
    sizes: list[int] = []
    size = low
    while size <= high and len(sizes) < SIZES_MAX:
        rounded = size - size % DTYPE_BYTES[dtype]
        if rounded not in sizes:
            sizes.append(rounded)
        if size == 0 and high > 0:
            size = DTYPE_BYTES[dtype]
            continue
        if size == high:
            break
        size *= factor
    return tuple(sizes)


def _overhead(text: str) -> Fraction:
    try:
        overhead = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"--wire-overhead {text!r}: must be a number such as 1.0074 or 9014/8948") from None
    if not 1 <= overhead <= 2:
        raise InputError(f"--wire-overhead {text!r}: must be from 1 to 2")
    return overhead


def _check_ranks(topology: Topology | None, n_ranks: int) -> None:
    if topology is None or topology.n_ranks == n_ranks:
        return
    wanted = topology.n_ranks
    raise InputError(
        f"--topology has {wanted} ranks but {n_ranks} {'process' if n_ranks == 1 else 'processes'} started: "
        f"run `mpirun -n {wanted} optcc bench ...`, or add --transport loopback"
    )


def _progress(rank: int) -> Progress:
    """A bar on the terminal that says how far the runs of a size are; silent elsewhere and at other ranks."""
    if rank != 0 or not sys.stderr.isatty():
        return lambda done, total: None
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("runs")

    def show(done: int, total: int) -> None:
        if done == 1:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return show
