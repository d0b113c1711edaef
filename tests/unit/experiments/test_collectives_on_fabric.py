"""Six collectives beside Open MPI: the bounds, its algorithms, and the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from optcc import cli
from optcc.collective import Collective
from optcc.errors import EXIT_DONE, CodecError, RuntimeFault
from optcc.experiments import collectives_on_fabric as module
from optcc.experiments.bench import message_bytes
from optcc.experiments.bench_jobs import STATES
from optcc.experiments.collectives_on_fabric import (
    ALGORITHMS,
    DEFAULT,
    FABRIC,
    PEER,
    CollectivesOnFabric,
    CollectivesRow,
)
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, NicRates, NicTarget, can_make_namespaces
from optcc.experiments.fabric.state import FabricState, NicState
from optcc.experiments.record import BenchTiming, Record, Samples
from optcc.experiments.untold import topology_of
from optcc.verify.bounds.certified import least_seconds

ROW = CollectivesRow(
    *("broadcast", "healthy", 1 << 25, 0.5, "chain-broadcast", 64, (0.52, 0.51, 0.6), 0),
    *("ring", "--transport mpi", (0.55, 0.54, 0.56), 0, {"ring": 0.55}),
)
RECORD = CollectivesOnFabric({"cores": 2}, {"optcc": "0"}, FABRIC, (ROW,))


def _standing(state: str) -> FabricState:
    spec = FabricSpec.parse(FABRIC)
    standing = FabricState.fresh(spec, "up", 1)
    for name, what in STATES[state].items():
        host, nic = NicTarget.parse(name).nics_of(spec)[0]
        is_down = what == "down"
        rates = spec.rates[host][nic] if is_down else NicRates.parse(what)
        standing = standing.with_nics({(host, nic): NicState(rates, "down" if is_down else None)})
    return standing


@pytest.mark.parametrize(
    ("collective", "times"),
    [
        ("allreduce", (1.5, 1.6, 2.0)),
        ("reducescatter", (0.75, 1.0, 1.5)),
        ("allgather", (0.75, 1.0, 1.5)),
        ("broadcast", (1.0, 4 / 3, 2.0)),
        ("reduce", (1.0, 4 / 3, 2.0)),
        ("alltoall", (0.75, 1.0, 1.5)),
    ],
)
def test_the_bound_is_what_the_busiest_nics_take(collective: str, times: tuple[float, ...]) -> None:
    """In units of the message over what a healthy host carries."""
    wanted = Collective(collective, 4)
    size = 32 << 20
    unit = float(Fraction(WIRE_OVERHEAD)) * size / 50e6
    topologies = [topology_of(_standing(state)) for state in STATES]
    bounds = [float(least_seconds(each, message_bytes(wanted, size), wanted)) / unit for each in topologies]
    assert bounds == pytest.approx(times, rel=1e-6)


def _job(median_s: Mapping[tuple[str, ...], float]) -> object:
    """In place of `run_job`: what a job takes, by its arguments of mpirun; none of them for ours."""

    def run_job(
        fabric: object, collective: str, size_bytes: int, words: tuple[str, ...], mpi: tuple[str, ...] = ()
    ) -> Record:
        seconds = median_s[mpi] if words == PEER else 0.5
        samples = Samples([seconds] * 3, [0.0] * 3, 0)
        row = BenchTiming("a plan", "", "", 4, size_bytes, "float32", "sum", 8, "", None, None, samples, None)
        return Record("", (), "", 1.0, {}, {}, (row,))

    return run_job


def test_the_fastest_algorithm_of_the_peer_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ALGORITHMS["reduce"]
    times = {(): 3.0, **dict.fromkeys(known.values(), 2.0), known["Rabenseifner"]: 1.0}
    monkeypatch.setattr(module, "run_job", _job(times))

    class Hosts:
        """A fabric that only says what is declared."""

        def state(self) -> FabricState:
            return _standing("healthy")

    row = module.measure(Hosts(), "reduce", "healthy", 1 << 20, 2)  # type: ignore[arg-type]
    assert (row.algorithm, row.speed, row.schedule, row.segments) == ("Rabenseifner", 2.0, "a plan", 8)
    assert row.tried == {DEFAULT: 3.0, **dict.fromkeys(known, 2.0), "Rabenseifner": 1.0}
    assert row.peer_settings.endswith("coll_tuned_reduce_algorithm 7")
    assert len(row.seconds) == len(row.peer_seconds) == 6


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert CollectivesOnFabric.read(path) == RECORD
    assert "| 1.040 (1.020 to 1.200) | 1.100 (1.080 to 1.120) | 1.058 |" in RECORD.markdown()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"collective": "gather"}, "collective"),
        ({"state": "fine"}, "state"),
        ({"bound_s": 0.0}, "bound_s"),
        ({"seconds": ()}, "seconds"),
        ({"peer_seconds": (1.0, 0.0)}, "peer_seconds"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], path: str, tmp_path: Path) -> None:
    wrong = tmp_path / "record.json"
    replace(RECORD, rows=(msgspec.structs.replace(ROW, **change),)).write(wrong)
    with pytest.raises(CodecError, match=rf"rows\[0\]\.{path}"):
        CollectivesOnFabric.read(wrong)


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.skipif(can_make_namespaces() is not None, reason="no right to make network namespaces")
def test_the_smaller_version_runs(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    assert cli.run(["experiment", "collectives-on-fabric", "--quick", "-o", str(path)]) == EXIT_DONE
    (row,) = CollectivesOnFabric.read(path).rows
    assert (row.collective, row.state, row.wrong, row.peer_wrong) == ("broadcast", "healthy", 0, 0)
    assert set(row.tried) == {DEFAULT, *ALGORITHMS["broadcast"]}
    assert row.algorithm == min(row.tried, key=lambda name: row.tried[name])


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.skipif(can_make_namespaces() is not None, reason="no right to make network namespaces")
def test_a_job_that_fails_says_which() -> None:
    with (
        Fabric.up(FabricSpec.parse("2x1@100Mbit/s", name="collectives-test")) as fabric,
        pytest.raises(RuntimeFault, match=r"broadcast, --transport nowhere: .*nowhere"),
    ):
        module.run_job(fabric, "broadcast", 1024, ("--transport", "nowhere"))
