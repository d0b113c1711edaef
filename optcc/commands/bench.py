"""`mpirun -n P optcc bench`: nccl-tests' flags and columns, then %bound."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from socket import gethostname

import click

from optcc.cli import (
    CollectiveType,
    OneOf,
    ScheduleType,
    SecondsType,
    SegmentsType,
    SizeType,
    TopologyType,
    json_option,
)
from optcc.collective import DTYPE_BYTES, REDUCING, REDUCTIONS, ROOTED, reductions_of
from optcc.commands.bench_report import BenchReport, NicEntries
from optcc.commands.launched import abort_on_failure, carried_by, mpi_of
from optcc.dsl import Definition
from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments.bench import (
    AVERAGES,
    DEFAULT_SCHEDULES,
    MODES,
    BenchSettings,
    Progress,
    Variant,
    collective_of,
    measured,
    nic_traffic,
    run_cases,
    run_on_loopback,
)
from optcc.experiments.bench_messages import CPU, check_device, device_of_rank, devices_on_loopback
from optcc.experiments.peers import PEERS
from optcc.experiments.record import BenchTiming
from optcc.job import keep_to_own_nics
from optcc.plan import SLOTS_MAX
from optcc.planner import verdict_cache
from optcc.runtime.device_paths import PATHS
from optcc.runtime.host_memory import path_of
from optcc.runtime.launchers import find_launch
from optcc.runtime.state import WINDOW
from optcc.runtime.transports.tcp import TcpTransport
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.units import parse_time

_DTYPES = {"float": "float32", "double": "float64", "half": "float16"} | {name: name for name in DTYPE_BYTES}
_MODES = {"both": MODES, "out": ("out",), "in": ("in",)}
TRANSPORTS = ("mpi", "tcp", "ucx", "loopback")
SIZES_MAX = 1000
ALL = "all"
"""Every type, every reduction, or every root."""
_HOST_BYTES, _DEVICE_BYTES = 64, 256


@click.command("bench", epilog="Example: mpirun -n 4 optcc bench -b 1M -e 64M -f 4 --schedule ring --topology 4@1GB/s")
@click.option("-b", "--minbytes", type=SizeType(), default="32M", show_default=True, help="Smallest size.")
@click.option("-e", "--maxbytes", type=SizeType(), default=None, help="Largest size; the smallest if absent.")
@click.option("-i", "--stepbytes", type=SizeType(), default=None, help="Bytes between sizes, in the place of a factor.")
@click.option("-f", "--stepfactor", type=int, default=None, help="Factor between sizes.  [default: 2]")
@click.option("-n", "--iters", type=click.IntRange(1), default=20, show_default=True, help="Timed runs of each.")
@click.option("-w", "--warmup_iters", type=click.IntRange(0), default=1, show_default=True, help="Runs before.")
@click.option("-m", "--agg_iters", type=click.IntRange(1), default=1, show_default=True, help="Operations in a run.")
@click.option(
    "-a",
    "--average",
    type=click.IntRange(0, 3),
    default=3,
    show_default=True,
    help="A run's time: 0 of rank 0, 1 mean, 2 fastest, 3 slowest rank.",
)
@click.option(
    "-c", "--check", type=click.IntRange(0), help="Check so many runs, the last ones, 0 none.  [default: all]"
)
@click.option(
    "-z",
    "--blocking",
    type=click.IntRange(0, 1),
    default=1,
    show_default=True,
    help="0: the -m operations of a run are all begun before the first is waited for.",
)
@click.option("-G", "--cudagraph", type=click.IntRange(0), default=0, help="0: a graph cannot hold a collective.")
@click.option(
    "--device", default="cpu", show_default=True, help="Where arrays are: cpu, gpu (one a rank) or gpu:N (all on it)."
)
@click.option(
    "--device-path",
    "paths",
    type=OneOf(PATHS),
    multiple=True,
    help="Which ways messages from GPU to GPU may take: direct, ipc, staged; all unless given, may be repeated.",
)
@click.option("-t", "--nthreads", type=click.IntRange(1), default=1, help="Ranks of this process, on loopback.")
@click.option("-g", "--ngpus", type=click.IntRange(1), default=1, help="The same, for each of -t.")
@click.option(
    "-d",
    "--datatype",
    type=OneOf((*_DTYPES, ALL)),
    default="float",
    show_default=True,
    help="half, float, double, bfloat16, int8, ..., all.",
)
@click.option(
    "-o",
    "--op",
    type=OneOf((*REDUCTIONS, ALL)),
    default="sum",
    show_default=True,
    help="sum, prod, min, max, avg; band, bor, bxor; all.",
)
@click.option(
    "--collective",
    type=CollectiveType(DEFAULT_SCHEDULES),
    default=None,
    help="What is timed; all_gather_perf is allgather.  [default: that of the schedules, else allreduce]",
)
@click.option("-r", "--root", default="0", show_default=True, help=f"Of {', '.join(ROOTED)}; all.")
@click.option(
    "--schedule",
    "schedules",
    type=ScheduleType(),
    multiple=True,
    help="A schedule, or FILE.py:FUNCTION; may be repeated.",
)
@click.option(
    "--peer",
    "peers",
    type=OneOf(PEERS),
    multiple=True,
    help="mpi: the MPI library's own collective; gloo: torch's; may be repeated. nccl: NVIDIA's, alone, on GPUs.",
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
    help="For which ports transfers are ordered; exclusive, or fair if NICs are measured or all ranks are on one host.",
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
@click.option(
    "--shared-memory/--no-shared-memory",
    default=True,
    show_default=True,
    help="Ranks of one host exchange by memory that they share, where they can (tcp).",
)
@click.option("--latency", default="200us", show_default=True, help="What a message costs besides its bytes.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option(
    "--deadline",
    "-T",
    "--timeout",
    "deadline",
    type=SecondsType(),
    default=120.0,
    show_default=True,
    help="Seconds a single run may take.",
)
@click.option("-J", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a record to this file.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the last run's measured timeline, for optcc show --measured; its recording is part of the times.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, percentiles included.")
@json_option
def command(
    minbytes: int,
    maxbytes: int | None,
    stepbytes: int | None,
    stepfactor: int | None,
    iters: int,
    warmup_iters: int,
    agg_iters: int,
    average: int,
    check: int | None,
    blocking: int,
    cudagraph: int,
    device: str,
    paths: tuple[str, ...],
    nthreads: int,
    ngpus: int,
    datatype: str,
    op: str,
    collective: str | None,
    root: str,
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
    shared_memory: bool,
    latency: str,
    quiet: bool,
    deadline: float,
    output: Path | None,
    trace: Path | None,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Time schedules of a collective and peers, interleaved, and check every element.

    One process a rank under mpirun, whose messages MPI carries, or with `--transport tcp` or `ucx` our own TCP, or
    UCX, over the NICs that OPTCC_SOCKET_IFNAME leaves; or `--transport loopback`, where the ranks are threads of this
    process on ports shaped to the topology. Times are medians over the timed runs; sizes are rounded down to whole
    elements. Flags are those of nccl-tests where they have a meaning here.
    """
    if cudagraph:
        raise InputError(f"-G {cudagraph}: must be 0: messages need the host, so that no graph holds a collective")
    _check_peers(check_device(device), peers, schedules)
    if paths and device == CPU:
        raise InputError(f"--device-path {paths[0]}: must be with --device gpu: messages are in the host's memory")
    n_local = nthreads * ngpus
    if transport == "loopback":
        topology = _loopback_topology(topology, n_local)
    elif n_local > 1:
        raise InputError(f"-t {nthreads} -g {ngpus}: must be 1: one rank a process, so start {n_local} under mpirun")
    sizes = minbytes, minbytes if maxbytes is None else maxbytes, stepfactor, stepbytes
    timed, definitions = collective_of(schedules, collective)
    variants = _variants(datatype, op, root, timed, definitions, sizes, topology)
    settings = BenchSettings(
        schedules or (() if peers else (DEFAULT_SCHEDULES[timed],)),
        peers,
        topology,
        parse_time(latency),
        _overhead(wire_overhead),
        bed,
        variants[0].sizes,
        iters,
        warmup_iters,
        check,
        variants[0].dtype,
        variants[0].reduction,
        segments,
        slots,
        ports,
        window,
        _MODES[mode],
        deadline,
        quiet,
        probe,
        transport,
        timed,
        variants[0].root,
        agg_iters,
        AVERAGES[average],
        variants,
        blocking=bool(blocking),
        device=device,
        trace=trace,
        shared_memory=shared_memory,
        definitions=definitions,
    )
    if trace is not None and (len(settings.schedules), settings.n_cases) != (1, 1):
        raise InputError("--trace: must be with one schedule, of one size, type and root")
    report = BenchReport(settings, output, "json" if as_json else "csv" if as_csv else "table")
    if transport == "loopback":
        assert topology is not None
        if peers:
            raise InputError(f"--peer {peers[0]}: needs --transport mpi, tcp or ucx")
        report.begin(topology.n_ranks, (gethostname(),) * topology.n_ranks, settings, topology)
        if device != CPU:
            report.devices = devices_on_loopback(device, topology.n_ranks)
        rows = run_on_loopback(settings, _progress, lambda rank: report.add if rank == 0 else _say_nothing)
        return report.end(rows)
    return _under_mpi(settings, report, paths or PATHS)


def _check_peers(device: str, peers: tuple[str, ...], schedules: tuple[str, ...]) -> None:
    """Peers are where the arrays are, and NCCL is in a job of its own: its threads and kernels wait by running."""
    if "nccl" in peers and (len(peers) > 1 or schedules):
        others = ", ".join((*(f"--schedule {each}" for each in schedules), *(f"--peer {each}" for each in peers)))
        raise InputError(f"{others}: --peer nccl must be alone in its job")
    if "nccl" in peers and device == CPU:
        raise InputError("--peer nccl: must be with --device gpu: its arrays are in a GPU's memory")
    if peers and "nccl" not in peers and device != CPU:
        raise InputError(f"--device {device}: must be cpu with --peer {peers[0]}, which reads the host's memory")


def _under_mpi(settings: BenchSettings, report: BenchReport, paths: Collection[str]) -> int:
    """This process is one rank. Only rank 0 speaks, unless what went wrong is not the same everywhere."""
    mpi = mpi_of(settings.transport)
    with abort_on_failure(mpi):
        _check_ranks(settings.topology, mpi.n_ranks)
        cache = verdict_cache()
        given = settings.topology
        names = mpi.allgather(gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES))
        hosts = tuple(name.decode(errors="replace").rstrip() for name in names)
        settings = replace(settings, one_host=len(set(hosts)) == 1)
        how = {"shared_memory": settings.shared_memory, "may_be_down": settings.probe}
        with carried_by(mpi, settings.transport, os.environ, **how) as transport:
            entries: NicEntries = ()
            if isinstance(transport, TcpTransport):
                settings = measured(settings, transport, os.environ)
                keep_to_own_nics(transport, settings.topology)
                entries = transport.nics
                report.inside = str(path_of(transport)) if len(set(hosts)) < len(hosts) else ""
            report.begin(mpi.n_ranks, hosts, settings, given, entries)
            say = report.add if mpi.rank == 0 else _say_nothing
            device = device_of_rank(settings.device, transport, hosts, paths)
            if device is not None:
                told = mpi.allgather(str(device).encode()[:_DEVICE_BYTES].ljust(_DEVICE_BYTES))
                report.devices = tuple(each.decode(errors="replace").rstrip() for each in told)
            rows = run_cases(settings, transport, mpi.comm, cache, _progress(mpi.rank), say, device)
            nics = nic_traffic(transport) if isinstance(transport, TcpTransport) else ()
    if mpi.rank == 0:
        code = report.end(rows, nics)
    else:
        code = EXIT_REFUTED if any(row.wrong for row in rows) else EXIT_DONE
    mpi.close()
    return code


def _say_nothing(rows: Sequence[BenchTiming]) -> None:
    """What other ranks than 0 say of the rows."""


def _loopback_topology(given: Topology | None, n_ranks: int) -> Topology:
    """The topology of the threads: as many as -t and -g say, if they do."""
    if given is None:
        if n_ranks == 1:
            raise InputError("--transport loopback: give --topology, which says how many ranks and how fast")
        return Topology.parse(f"{n_ranks}@1GB/s")
    if n_ranks not in (1, given.n_ranks):
        raise InputError(f"-t times -g is {n_ranks}: must be the {given.n_ranks} ranks of --topology, or be left out")
    return given


def _variants(
    datatype: str,
    op: str,
    root: str,
    collective: str,
    definitions: Sequence[Definition],
    sizes: tuple[int, int, int | None, int | None],
    topology: Topology | None,
) -> tuple[Variant, ...]:
    """Every combination of a type, a reduction that it has, and a root."""
    dtypes = [_DTYPES[datatype]] if datatype != ALL else list(DTYPE_BYTES)
    roots = [_root(root)] if root != ALL else list(range(_ranks(topology)))
    if root == ALL and collective not in ROOTED:
        roots = [0]
    reduces = collective in REDUCING
    if definitions and op == ALL:
        reduces = definitions[0].computes(_ranks(topology)).reduces
    found = []
    for dtype in dtypes:
        known = reductions_of(dtype)
        if datatype != ALL and op not in (*known, ALL):
            raise InputError(f"-o {op!r}: must be one of {', '.join(known)}, {ALL}")
        # What does not reduce has no reduction to choose.
        ops = known[:1] if not reduces and op == ALL else known if op == ALL else [op]
        own = _sizes(*sizes[:2], sizes[2], dtype, sizes[3])
        found += [Variant(dtype, each, place, own) for each in ops if each in known for place in roots]
    return tuple(found)


def _root(text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"-r {text!r}: must be a rank, or {ALL}")
    return int(text)


def _ranks(topology: Topology | None) -> int:
    """How many ranks there will be: that of the topology, or what the launcher says."""
    if topology is not None:
        return topology.n_ranks
    return find_launch(os.environ).n_ranks


def _sizes(low: int, high: int, factor: int | None, dtype: str, step: int | None = None) -> tuple[int, ...]:
    """From low to high by a factor, 2 unless given, or by a step; rounded down to whole elements, each once."""
    if high < low:
        raise InputError(f"-e {high}: must not be below -b {low}")
    if factor is not None and step is not None:
        raise InputError(f"-i {step}: must be left out with -f {factor}")
    if factor is not None and factor < 2 and high > low:
        raise InputError(f"-f {factor}: must be at least 2")
    if step is not None and step < 1:
        raise InputError(f"-i {step}: must be at least 1")
    sizes: list[int] = []
    size = low
    while size <= high and len(sizes) < SIZES_MAX:
        rounded = size - size % DTYPE_BYTES[dtype]
        if rounded not in sizes:
            sizes.append(rounded)
        if size == high:
            break
        if step is not None:
            size += step
        else:
            size = size * (factor or 2) or DTYPE_BYTES[dtype]
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
