"""`optcc bench`: sizes, columns, records, and that a wrong element or an unproved schedule cannot pass."""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from socket import gethostname
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from optcc import cli, job
from optcc.collective import COLLECTIVES, DTYPE_BYTES, FLOATS, REDUCING
from optcc.commands.bench import _overhead, _sizes
from optcc.commands.bench_report import as_csv, header, json_row, line
from optcc.compiler import SLOTS
from optcc.errors import EnvironmentMissing, InputError
from optcc.experiments import bench as bench_module
from optcc.experiments.bench import LOOPBACK_SLOTS, BenchSettings, Ours, Tally, measure, measured
from optcc.experiments.peers import PEERS, make_peer
from optcc.experiments.record import BenchTiming, Record, Samples
from optcc.job import LATENCY_S, assumed_topology
from optcc.planner import build_plan
from optcc.runtime.engine import Engine
from optcc.runtime.kernels import Array
from optcc.runtime.probe import MeasuredNics
from optcc.runtime.protocol.settings import Counts, RailCount
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.tcp import TcpTransport
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import verify_plan
from tests.declared import ADD_EDGES
from tests.sample import sampled

LOOPBACK = ("--transport", "loopback", "--topology", "3@1GB/s")


def bench(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What `optcc bench` prints on loopback."""
    capsys.readouterr()
    assert cli.run(["bench", *LOOPBACK, *words]) == code
    return capsys.readouterr().out


def test_sizes_grow_by_the_factor_and_are_whole_elements() -> None:
    assert _sizes(0, 64, 4, "float64") == (0, 8, 32)
    assert _sizes(10, 100, 3, "float32") == (8, 28, 88)
    assert _sizes(7, 7, 2, "int64") == (0,)
    with pytest.raises(InputError, match="-e 1: must not be below"):
        _sizes(2, 1, 2, "int32")
    with pytest.raises(InputError, match="-f 1: must be at least 2"):
        _sizes(1, 2, 1, "int32")
    assert _sizes(0, 10, None, "int8") == (0, 1, 2, 4, 8)
    assert _sizes(8, 40, None, "float32", 15) == (8, 20, 36)
    with pytest.raises(InputError, match="-i 8: must be left out with -f 2"):
        _sizes(1, 2, 2, "int32", 8)
    with pytest.raises(InputError, match="-i 0: must be at least 1"):
        _sizes(1, 2, None, "int32", 0)


def test_the_wire_overhead_is_a_fraction() -> None:
    assert _overhead("9014/8948") == Fraction(9014, 8948)
    for wrong in ("0.9", "x", "1/0", "3"):
        with pytest.raises(InputError, match="--wire-overhead"):
            _overhead(wrong)


def test_columns_are_those_of_nccl_tests_and_then_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    lines = bench(capsys, "-b", "4K", "-e", "16K", "-f", "4", "-n", "2").splitlines()
    assert lines[0].startswith("# optcc ")
    assert lines[1] == f"# 3 ranks on 1 host ({gethostname()}), messages by loopback"
    assert lines[2] == "# topology 3@1GB/s, given"
    heads = lines[4].lstrip("#").split()
    assert heads[:5] == ["size", "count", "type", "redop", "root"]
    assert heads[5:13] == ["time", "algbw", "busbw", "#wrong"] * 2
    assert heads[13:] == ["%bound", "schedule"]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] for row in rows] == [
        ["4096", "1024", "float32", "sum", "-1"],
        ["16384", "4096", "float32", "sum", "-1"],
    ]
    assert all(row[8] == row[12] == "0" and row[-1] == "ring" for row in rows)
    assert "# Out of bounds values : 0 OK" in lines


@pytest.mark.parametrize(
    ("dtype", "op"), sampled([("float", "avg"), ("double", "prod"), ("int32", "min"), ("int64", "max")], every=3)
)
def test_every_element_is_right(capsys: pytest.CaptureFixture[str], dtype: str, op: str) -> None:
    text = bench(capsys, "-b", "1004", "-n", "1", "-d", dtype, "-o", op, "--schedule", "optcc", "--json")
    (row,) = json.loads(text)["results"]
    assert {"size", "count", "type", "redop", "root", "out_of_place", "in_place", "bound_ratio"} <= set(row)
    assert set(row["out_of_place"]) == {"time", "alg_bw", "bus_bw", "nwrong", "percentiles"}
    assert len(set(row["out_of_place"]["percentiles"].values())) == 1
    assert row["out_of_place"]["nwrong"] == row["in_place"]["nwrong"] == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_that_do_not_reduce_have_no_reduction_as_in_nccl_tests(collective: str) -> None:
    row = timing(collective=collective)
    redop = "sum" if collective in REDUCING else "none"
    assert line(row, is_checked=True).split()[3] == redop
    assert json_row(row, is_checked=True)["redop"] == redop
    (told,) = csv.DictReader(io.StringIO(as_csv([row], is_checked=True)))
    assert told["redop"] == redop


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 2.0], [1.0, 2.0, 9.0], [1.0, 2.0, 4.0, 9.0]])
def test_the_time_of_a_row_is_its_p50(seconds: list[float]) -> None:
    side = json_row(timing(out_of_place=Samples(seconds, [0.0] * len(seconds), 0)), is_checked=True)["out_of_place"]
    assert side["percentiles"]["p50"] == side["time"]


def timing(**fields: Any) -> BenchTiming:
    """A row of a bench of two ranks, with these fields."""
    samples = Samples([1.0], [0.0], 0)
    row = BenchTiming("ring", "given", "2@1GB/s", 2, 1024, "float32", "sum", 1, "", None, None, samples, None)
    return msgspec.structs.replace(row, **fields)


def test_what_is_not_checked_is_not_said_to_be_right(capsys: pytest.CaptureFixture[str]) -> None:
    text = bench(capsys, "-b", "4K", "-n", "1", "-c", "0", "--mode", "out")
    assert "# Out of bounds values : N/A" in text.splitlines()
    (row,) = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert row[8] == "N/A"
    printed = json.loads(bench(capsys, "-b", "4K", "-n", "1", "-c", "0", "--json"))
    assert printed["out_of_bounds"] is None and printed["results"][0]["in_place"]["nwrong"] is None
    assert printed["config"]["ranks"] == 3 and printed["config"]["topology_source"] == "given"


@pytest.mark.parametrize(
    ("collective", "schedule", "factor"),
    [
        ("reducescatter", "ring-reduce-scatter", 2 / 3),
        ("allgather", "ring-all-gather", 2 / 3),
        ("broadcast", "chain-broadcast", 1),
        ("reduce", "chain-reduce", 1),
    ],
)
@pytest.mark.parametrize("count", [999, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_collective_is_exact_and_counted_as_nccl_tests_do(
    capsys: pytest.CaptureFixture[str], collective: str, schedule: str, factor: float, count: int
) -> None:
    words = ("--collective", collective, "-r", "1", "-b", str(4 * count), "-n", "2", "-o", "max", "--json")
    printed = json.loads(bench(capsys, *words))
    (row,) = printed["results"]
    assert printed["config"]["collective"] == collective and row["schedule"] == schedule
    assert row["root"] == (1 if factor == 1 else -1)
    for side in (row["out_of_place"], row["in_place"]):
        assert side["nwrong"] == 0
        assert side["bus_bw"] == pytest.approx(factor * side["alg_bw"])
    bound = collective_bound(Topology.parse("3@1GB/s"), 4 * count, collective, 1)
    assert row["bound_seconds"] == float(bound.seconds)


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        pytest.param(("-d", "all", "-o", "max"), [(dtype, "max", -1) for dtype in DTYPE_BYTES], marks=pytest.mark.slow),
        pytest.param(
            ("-d", "all", "-o", "bor"),
            [(dtype, "bor", -1) for dtype in DTYPE_BYTES if dtype not in FLOATS],
            marks=pytest.mark.slow,
        ),
        (("-o", "all"), [("float32", op, -1) for op in ("sum", "prod", "min", "max", "avg")]),
        pytest.param(
            ("-r", "all", "-o", "all", "--collective", "broadcast_perf"),
            [("float32", "none", root) for root in range(3)],
            marks=pytest.mark.slow,
        ),
        pytest.param(("-r", "all"), [("float32", "sum", -1)], marks=pytest.mark.slow),
    ],
)
def test_all_is_every_type_reduction_and_root(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], cases: list[tuple[str, str, int]]
) -> None:
    printed = json.loads(bench(capsys, "-b", "1001", "-n", "1", "-w", "0", "--mode", "out", *words, "--json"))
    assert [(row["type"], row["redop"], row["root"]) for row in printed["results"]] == cases
    assert all(row["size"] == 1001 - 1001 % DTYPE_BYTES[row["type"]] for row in printed["results"])
    assert printed["out_of_bounds"] == 0


def test_operations_follow_each_other_in_a_run_and_only_the_last_runs_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = Ours.run, [0]

    def count(self: Ours, send: Array | None, recv: Array | None) -> None:
        honest(self, send, recv)
        if self._prepared.engine.transport.rank == 1 and recv is not None:
            calls[0] += 1
            if calls[0] <= 12:  # the four operations of three runs
                recv[0] += 1

    monkeypatch.setattr(Ours, "run", count)
    words = ("-b", "4K", "-n", "4", "-w", "1", "-m", "4", "--mode", "out", "--json")
    assert json.loads(bench(capsys, *words, "-c", "2"))["out_of_bounds"] == 0
    assert calls[0] == 20
    calls[0] = 0
    assert json.loads(bench(capsys, *words, "-c", "3", code=1))["out_of_bounds"] == 1
    calls[0] = 0
    assert json.loads(bench(capsys, *words, code=1))["out_of_bounds"] == 3
    # In place each has reduced what the one before left: what is checked is one more.
    calls[0] = 100
    assert json.loads(bench(capsys, *words, "--mode", "in"))["out_of_bounds"] == 0
    assert calls[0] == 125


@pytest.mark.parametrize(("average", "seconds"), [("rank 0", 1.0), ("mean", 2.0), ("fastest", 1.0), ("slowest", 3.0)])
def test_a_time_is_that_of_the_rank_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, average: str, seconds: float
) -> None:
    def body(rank: int, transport: object) -> float:
        times = iter((0.0, 1.0 + rank))
        clock.at[rank] = times
        return _measure_idle(transport, check=0, average=average).seconds[0]

    clock = _RankClock()
    monkeypatch.setattr(bench_module, "time", clock)
    assert run_ranks(3, lambda rank, transport: clock.of(rank, body, transport)) == [seconds] * 3


class _Idle:
    """A contestant that does nothing."""

    name = "idle"
    modes: tuple[str, ...] = ("out",)

    def run(self, send: Array | None, recv: Array | None) -> None:
        del send, recv


def _measure_idle(transport: object, *, iterations: int = 1, **settings: Any) -> Tally:
    """The tally of `_Idle`, 64 elements a run."""
    how = {"count": 64, "dtype": "int32", "reduction": "sum", "iterations": iterations, "warmup": 0, "modes": ("out",)}
    (tallies,) = measure(transport, [_Idle()], **how, **settings)  # type: ignore[arg-type]
    return tallies["out"]


class _RankClock:
    """`time` of a thread that is a rank."""

    def __init__(self) -> None:
        self.at: dict[int, Iterator[float]] = {}
        self._own = threading.local()

    def of(self, rank: int, body: Callable[[int, object], float], transport: object) -> float:
        self._own.rank = rank
        return body(rank, transport)

    def perf_counter(self) -> float:
        return next(self.at[self._own.rank])


def test_csv_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = bench(capsys, "-b", "4K", "-e", "12K", "-i", "4K", "-n", "3", "--mode", "out", "--csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["size"] for row in rows] == ["4096", "8192", "12288"]
    for row in rows:
        low, middle, high = (float(row[f"out_of_place_{each}"]) for each in ("min", "p50", "max"))
        assert 0 < low <= middle == float(row["out_of_place_time"]) <= high
        assert (row["out_of_place_nwrong"], row["in_place_time"], row["schedule"]) == ("0", "", "ring")


def test_ranks_of_this_process_need_no_topology(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.run(["bench", "--transport", "loopback", "-t", "2", "-g", "2", "-b", "4K", "-n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["ranks"] == 4


def test_the_header_has_every_nic_and_its_rate() -> None:
    head = {
        "versions": {"optcc": "0.1"},
        "ranks": 4,
        "hosts": ["h0", "h1"],
        "launcher": "mpi",
        "transport": "tcp",
        "nics": ["eth0", "eth1"],
        "nic_rates": {"h0": {"eth0": "25MB/s", "eth1": "25MB/s"}, "h1": {"eth0": "25MB/s", "eth1": "25MB/s"}},
        "topology_source": "measured",
    }
    lines = header(head, Topology.parse("4@50MB/s")).splitlines()
    assert lines[1:] == [
        "# 4 ranks on 2 hosts (h0, h1), launched by mpi, messages by tcp",
        "# NICs of each host: eth0 25MB/s, eth1 25MB/s",
        "# topology 4@50MB/s, measured",
    ]
    head["nic_rates"] = {"h0": {}, "h1": {"eth0": "25MB/s:5MB/s"}}
    assert header(head, None).splitlines()[2:] == ["# NICs of h0: eth0, eth1", "# NICs of h1: eth0 25MB/s:5MB/s"]


def test_a_schedule_of_another_collective_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", *LOOPBACK, "--collective", "reduce", "--schedule", "ring", "-b", "4K"]) == 2
    assert "--schedule ring: allreduce: must be for reduce" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("collective", "ranks", "schedules", "share"),
    sampled(
        [
            ("alltoallv", 3, (), 5 / 6),
            ("all_to_all_v", 4, ("direct-all-to-all-v", "matched-all-to-all-v"), 4 / 5),
            ("alltoallv_perf", 2, ("auto",), 1 / 3),
            ("AllToAllV", 1, (), 0),
            ("sendrecv", 3, (), 1),
            ("sendrecv_perf", 2, ("auto",), 1),
            ("send_recv", 4, ("send-recv", "auto"), 1),
            ("SendRecv", 1, (), 0),
        ],
        every=3,
    ),
)
def test_collectives_with_the_size_of_a_rank_are_exact(
    capsys: pytest.CaptureFixture[str], collective: str, ranks: int, schedules: tuple[str, ...], share: float
) -> None:
    """Of an AllToAll-v a rank has p(p + 1)/2 parts: of itself 1 at least, or 2 if p is even; it sends the others."""
    words = [word for each in schedules for word in ("--schedule", each)]
    words += ["--topology", f"{ranks}@1GB/s", "-b", "0", "-e", "4004", "-i", "1001", "-n", "2", "--json"]
    printed = json.loads(bench(capsys, "--collective", collective, *words))
    plain = collective.lower().replace("_perf", "").replace("_", "")
    assert printed["config"]["collective"] == plain and printed["out_of_bounds"] == 0
    assert [row["size"] for row in printed["results"][:: len(schedules) or 1]] == [0, 1000, 2000, 3000, 4004]
    for row in printed["results"]:
        assert row["bound_seconds"] == pytest.approx(share * row["size"] / 1e9)
        for side in (row["out_of_place"], row["in_place"]):
            assert side["bus_bw"] == pytest.approx(share * side["alg_bw"])


OWN = f"""{ADD_EDGES}

from functools import partial


def shift(p, by=1):
    return Collective.declared(
        "shift",
        p,
        before=[(rank, rank) for rank in range(p)],
        after=[((rank + by) % p, rank, [rank]) for rank in range(p)],
        sizes=range(1, p + 1),
    )


@schedule(collective=shift)
def to_next(program):
    for parts in program.cells():
        for rank, part in enumerate(parts):
            part.copy(src=rank, dst=(rank + 1) % program.n_ranks)


shift = partial(shift, by=2)
shift.__name__ = "shift"


@schedule(collective=shift)
def to_one_after(program):
    for parts in program.cells():
        for rank, part in enumerate(parts):
            part.copy(src=rank, dst=(rank + 2) % program.n_ranks)


def some(p):
    return Collective.declared("some", p, before=[(0, 0), (0, 1)], after=[(p - 1, 0, [0])])


@schedule(collective=some)
def to_last(program):
    for parts in program.cells():
        parts[0].copy(src=0, dst=program.n_ranks - 1)


@schedule(collective="allgather")
def gather_direct(program):
    for parts in program.cells():
        for rank, part in enumerate(parts):
            for other in program.ranks:
                if other != rank:
                    part.copy(src=rank, dst=other)
"""
"""Schedules of a user's file: of a library's collective, and of declared ones where ranks have parts of other lengths
than they get, several parts, or nothing."""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("schedules", "ops", "collective", "share"),
    sampled(
        [
            (("own.py:gather_direct", "ring-all-gather"), ["none"], "allgather", 2 / 3),
            (("own.py:to_next",), ["sum"], "shift", 1 / 2),
            (("own.py:add_edges",), ["sum", "prod", "min", "max", "avg"], "edges", 2 / 3),
            (("own.py:to_last",), ["sum"], "some", 1 / 2),
            (("ring-reduce-scatter", "auto"), ["sum", "prod", "min", "max", "avg"], "reducescatter", 2 / 3),
            (("auto", "ring"), ["sum", "prod", "min", "max", "avg"], "allreduce", 4 / 3),
        ],
        every=3,
    ),
)
def test_the_collective_is_that_of_the_schedules(
    capsys: pytest.CaptureFixture[str],
    own: Path,
    schedules: tuple[str, ...],
    ops: list[str],
    collective: str,
    share: float,
) -> None:
    words = [word for each in schedules for word in ("--schedule", each.replace("own.py", str(own)))]
    words += ["-b", "0", "-e", "4004", "-i", "4004", "-n", "2", "-w", "0", "-o", "all", "--json"]
    printed = json.loads(bench(capsys, *words))
    assert printed["config"]["collective"] == collective and printed["out_of_bounds"] == 0
    assert [row["redop"] for row in printed["results"]] == [op for op in ops for _ in range(2 * len(schedules))]
    for row in printed["results"]:
        assert row["bound_seconds"] == pytest.approx(share * row["size"] / 1e9)
        for side in (row["out_of_place"], row["in_place"]):
            assert side["bus_bw"] == pytest.approx(share * side["alg_bw"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("own.py:to_next", "ring"), "--schedule ring: allreduce: must be for shift, as --schedule "),
        (("own.py:to_next", "own.py:to_one_after"), "to_one_after: shift: must declare the same elements as to_next"),
        (("own.py:to_next", "auto"), "collective 'shift': the library has no schedule for it"),
        (("own.py:to_next", "--collective", "reduce"), "own.py:to_next: shift: must be for reduce\n"),
    ],
)
def test_schedules_of_several_collectives_are_refused(
    capsys: pytest.CaptureFixture[str], own: Path, words: tuple[str, ...], part: str
) -> None:
    first, *others = (each.replace("own.py", str(own)) for each in words)
    rest = others if others[0].startswith("--") else ["--schedule", *others]
    capsys.readouterr()
    assert cli.run(["bench", *LOOPBACK, "-b", "4K", "--schedule", first, *rest]) == 2
    said = capsys.readouterr().err
    assert part in said and said.count("\n") == 1


def test_one_wrong_element_fails_the_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Ours.run

    def corrupt(self: Ours, send: Array | None, recv: Array | None) -> None:
        honest(self, send, recv)
        if self._prepared.engine.transport.rank == 1 and recv is not None:
            recv[17] += 1

    monkeypatch.setattr(Ours, "run", corrupt)
    text = bench(capsys, "-b", "4K", "-n", "2", "-w", "0", "--mode", "out", "--json", code=1)
    assert json.loads(text)["results"][0]["out_of_place"]["nwrong"] == 2
    assert bench(capsys, "-b", "4K", "-n", "2", "-c", "0", "--mode", "out", "--json")


def test_a_run_that_does_nothing_is_noticed() -> None:
    def body(_rank: int, transport: object) -> int:
        return _measure_idle(transport, check=None).wrong

    assert run_ranks(2, body) == [128, 128]


def test_an_unproved_schedule_does_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(
        "from optcc.dsl import Program, schedule\n\n\n@schedule\ndef half(program: Program) -> None:\n"
        "    for segment in program.pipeline(sections=1):\n        segment[0].reduce(src=0, dst=1)\n",
        encoding="utf-8",
    )
    capsys.readouterr()
    assert cli.run(["bench", *LOOPBACK, "-b", "4K", "--schedule", f"{file}:half"]) == 1
    said = capsys.readouterr().err
    assert "refuted, so it does not run: result: rank 0" in said


def test_a_record_has_everything_that_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    words = ("-b", "64K", "-n", "3", "--schedule", "ring", "--schedule", "optcc", "--bed", "healthy", "-J", str(file))
    bench(capsys, *words, "--quiet")
    record = Record.read(file)
    assert [(row.schedule, row.bed, row.ranks) for row in record.rows] == [
        ("ring", "healthy", 3),
        ("optcc", "healthy", 3),
    ]
    for row in record.rows:
        assert row.out_of_place is not None
        assert len(row.out_of_place.seconds) == len(row.out_of_place.steal) == 3
        assert row.bound_s is not None
        assert row.predicted_s is not None
        assert row.bound_s <= row.predicted_s
        assert row.wrong == 0
    assert record.versions["numpy"] == np.__version__


@pytest.mark.parametrize("ports", ["exclusive", "fifo"])
def test_a_prediction_is_for_the_ports_that_the_plan_was_ordered_for(
    capsys: pytest.CaptureFixture[str], ports: str
) -> None:
    words = ("-b", "96K", "-n", "1", "--mode", "in", "--schedule", "optimal", "--segments", "4", "--latency", "0us")
    text = bench(capsys, *words, "--topology", "3@1GB/s,2=500MB/s", "--slots", "2", "--ports", ports, "--json")
    (row,) = json.loads(text)["results"]
    topology = Topology.parse("3@1GB/s,2=500MB/s").with_latency(Fraction(0))
    plan = build_plan("optimal", topology, 96 * 1024, segments=4, slots=2, ports=ports)
    predicted = {model: simulate(plan, topology, model=model).seconds for model in ("exclusive", "fifo")}
    assert predicted["exclusive"] != predicted["fifo"]
    assert row["predicted_seconds"] == predicted[ports]


class _FourHosts:
    """What `measure_nics` asks of a transport between hosts of one NIC each."""

    rank, n_ranks = 1, 4
    nics = tuple((("eth0", f"10.0.0.{host}", 1, 1, 1),) for host in range(4))

    def set_rates(self, rates: object) -> None:
        self.rates = rates

    def start_from(self, shares: object) -> None:
        self.shares = shares


class _Losing(TcpTransport):
    """One rank without peers. It has lost connections when it is made, and says for how many more it has lost since."""

    def __init__(self, fails: Callable[[], int]) -> None:
        self._fails = fails

    rank, n_ranks = 0, 1

    @property
    def counts(self) -> Counts:
        return Counts(resent=3 * self._fails())

    @property
    def rails(self) -> tuple[RailCount, ...]:
        return (RailCount("eth0", failures=self._fails()), RailCount("eth1"))

    def barrier(self, *_: object) -> None:
        pass

    def allgather(self, data: bytes, *_: object) -> list[bytes]:
        return [data]


def test_what_fails_between_two_runs_is_counted() -> None:
    n_lost = 5

    def fail(done: int, total: int) -> None:
        nonlocal n_lost
        n_lost += (done == 1) + 3 * (done == total)

    tally = _measure_idle(_Losing(lambda: n_lost), iterations=2, check=0, progress=fail)
    assert (tally.lost, tally.resent) == (1, 3)


@pytest.mark.parametrize("declared", ["4@50MB/s,3=25MB/s", "4@50MB/s", None])
def test_what_a_message_costs_is_known_whether_the_topology_is_right_or_wrong(
    monkeypatch: pytest.MonkeyPatch, declared: str | None
) -> None:
    rates = tuple(((rate, rate),) for rate in (49_000_000, 50_000_000, 51_000_000, 25_000_000))
    found_nics = MeasuredNics((("eth0",),) * 4, rates, (0, 1, 2, 3), 50e-6)
    monkeypatch.setattr(job, "probe", lambda transport: found_nics)
    topology = Topology.parse(declared) if declared else None
    settings = _settings(topology)
    assert settings.ports == "exclusive"
    transport = _FourHosts()
    found = measured(settings, cast("TcpTransport", transport), {})
    assert transport.rates == rates
    assert found.ports == "fair" and found.slots == SLOTS["fair"] and replace(found, ports_given="fifo").ports == "fifo"
    assert found.wired is not None and found.wired.overhead_s == Fraction(50, 10**6)
    is_right = declared is not None and "=" in declared
    assert found.wired.out[0] == (50_000_000 if is_right else 49_000_000)
    assert measured(settings, cast("TcpTransport", transport), {"OPTCC_NIC_RATES": "1Gbit/s"}) is settings
    assert measured(replace(settings, probe=False), cast("TcpTransport", transport), {}).ports == "exclusive"


def _settings(topology: Topology | None) -> BenchSettings:
    return BenchSettings(
        schedules=("auto",),
        peers=(),
        topology=topology,
        latency_s=Fraction(0),
        wire_overhead=Fraction(1),
        bed="given",
        sizes=(1 << 20,),
        iterations=1,
        warmup=0,
        check=None,
        dtype="float32",
        reduction="sum",
        segments="auto",
        slots_given=None,
        ports_given=None,
        window=2,
        modes=("out",),
        deadline_s=10.0,
        quiet=True,
        probe=True,
        transport="tcp",
    )


def test_slots_are_those_of_the_ports_where_none_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert SLOTS["fifo"] > LOOPBACK_SLOTS
    for words, slots in ((("--ports", "fifo"), LOOPBACK_SLOTS), (("--ports", "fifo", "--slots", "128"), 128)):
        text = bench(capsys, "-b", "4K", "-n", "1", *words, "--json")
        assert json.loads(text)["config"]["slots"] == slots


class _Alone:
    """A communicator of one rank, as far as peers look at it before they start."""

    def Get_size(self) -> int:  # noqa: N802
        return 1


@pytest.mark.parametrize(
    ("peer", "dtype", "reduction", "part"),
    [("mpi", "float16", "sum", "MPI has no float16"), ("mpi", "bfloat16", "max", "MPI has no bfloat16")],
)
@pytest.mark.mpi
def test_a_peer_says_what_it_does_not_have(peer: str, dtype: str, reduction: str, part: str) -> None:
    assert peer in PEERS
    with pytest.raises(InputError, match=part):
        make_peer(peer, _Alone(), dtype, reduction, 1.0)  # type: ignore[arg-type]


def test_gloo_without_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'optcc\[torch\]'"):
        make_peer("gloo", _Alone(), "float32", "sum", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--peer", "nccl"), "--peer nccl: must be with --device gpu"),
        (("--peer", "ncll"), "--peer 'ncll'"),
        (("--peer", "mpi"), "needs --transport mpi"),
        (("-d", "float8"), "-d 'float8'"),
        (("-o", "xor"), "-o 'xor'"),
        (("--schedule", "none"), "schedule 'none'"),
        (("--latency", "5"), "time '5'"),
        (("--ports", "wide"), "--ports 'wide'"),
        (("-r", "first"), "-r 'first': must be a rank, or all"),
        (("-g", "2"), "-t times -g is 2: must be the 3 ranks of --topology"),
        (("--transport", "mpi", "-g", "2"), "-t 1 -g 2: must be 1: one rank a process, so start 2 under mpirun"),
        (("-d", "flaot"), "did you mean float?"),
        (("--schedule", "optimall"), "did you mean optimal?"),
    ],
)
def test_bad_flags_are_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str) -> None:
    capsys.readouterr()
    assert cli.run(["bench", *LOOPBACK, "-b", "4K", *words]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1


def test_schedules_that_are_compared_have_channels_of_their_own() -> None:
    """Rails divide what a channel carries as suits its plan: no schedule runs with another one's division."""
    topology = Topology.parse("2@1GB/s")
    plans = [build_plan(name, topology, 1 << 16, dtype="float32") for name in ("ring", "optimal")]

    def body(rank: int, transport: Transport) -> list[set[int]]:
        engine = Engine(transport)
        cases = [Ours(plan, engine, verify_plan(plan), 2, 20.0) for plan in plans]
        handles = [{handle for handle in case._prepared.handles if handle >= 0} for case in cases]
        cases[0].close()
        cases.append(Ours(plans[0], engine, verify_plan(plans[0]), 2, 20.0))
        assert set(cases[-1]._prepared.handles) & handles[0], "channels that were given back are used again"
        return handles

    for ring, optimal in run_ranks(2, body):
        assert ring and optimal and not ring & optimal


def test_what_a_message_costs_is_assumed_where_it_is_not_measured() -> None:
    """Over TCP it is measured, or not known; elsewhere it is the latency, and auto does not cut a short message."""
    topology, latency_s = Topology.parse("4@1GB/s"), Fraction(200, 10**6)
    for transport, overhead_s in (("mpi", latency_s), ("loopback", latency_s), ("tcp", Fraction(0))):
        settings = replace(_settings(topology), latency_s=latency_s, transport=transport)
        assert settings.wired is not None
        assert settings.wired.overhead_s == overhead_s
    assumed = replace(_settings(None), latency_s=latency_s, transport="mpi").assumed(4)
    assert (assumed.n_ranks, assumed.overhead_s) == (4, latency_s)
    segments = [
        build_plan("auto", each, 64 << 10, ports="exclusive").transfers.segment.max() + 1
        for each in (assumed, replace(assumed, overhead_s=Fraction(0)))
    ]
    assert segments == [1, 2]


def test_ranks_of_one_host_have_fair_ports_unless_something_is_declared() -> None:
    """Their messages share its memory; over MPI between hosts nothing is known, and flows of MPI share ports badly."""
    for transport, one_host, topology, ports in (
        ("mpi", True, None, "fair"),
        ("mpi", False, None, "exclusive"),
        ("mpi", True, Topology.parse("4@1GB/s"), "exclusive"),
        ("tcp", False, None, "fair"),
        ("tcp", True, Topology.parse("4@1GB/s"), "exclusive"),
    ):
        settings = replace(_settings(topology), latency_s=LATENCY_S, transport=transport, one_host=one_host)
        assert settings.ports == ports, (transport, one_host, topology)
        assert replace(settings, ports_given="fifo").ports == "fifo"
    plan = build_plan("auto", assumed_topology(4), 16 << 20, ports="fair")
    assert plan.name in ("direct", "shares"), "no message waits for more than one other"
