"""Hosts of several ranks beside Open MPI: the states, and the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from optcc.errors import CodecError, RuntimeFault
from optcc.experiments.bench_jobs import STATES
from optcc.experiments.fabric import Fabric, FabricSpec, NicRates, NicTarget
from optcc.experiments.fabric.state import FabricState, NicState
from optcc.experiments.servers_on_fabric import CONTENDERS, FABRIC, OURS, ServersOnFabric, ServersRow, run_job
from optcc.experiments.untold import bound_of

ROW = ServersRow("healthy", OURS, "--transport tcp", "equal-trees", 256, 1 << 26, 2.0, (2.04, 2.1, 2.02), 0)
RECORD = ServersOnFabric({"cores": 2}, {"optcc": "0"}, FABRIC, (ROW,))


def test_the_bound_is_that_of_hosts_whichever_rank_uses_a_nic() -> None:
    spec = FabricSpec.parse(FABRIC)
    bounds = []
    for state in STATES.values():
        standing = FabricState.fresh(spec, "up", 1)
        for name, what in state.items():
            host, nic = NicTarget.parse(name).nics_of(spec)[0]
            rates = spec.rates[host][nic] if what == "down" else NicRates.parse(what)
            standing = standing.with_nics({(host, nic): NicState(rates, "down" if what == "down" else None)})
        bounds.append(bound_of(standing, 64 << 20) / (1.0074 * (64 << 20) / 50e6))
    assert bounds == pytest.approx([1.5, 1.6, 2.0], rel=1e-4)


def test_no_job_is_told_the_topology() -> None:
    commands: list[list[str]] = []

    class Hosts:
        def run(self, command: list[str], **_options: Any) -> Any:
            commands.append(command)
            return SimpleNamespace(exit_code=1, stderr="")

    for contender in CONTENDERS:
        with pytest.raises(RuntimeFault):
            run_job(cast(Fabric, Hosts()), contender, 1 << 20)
    assert [command[:3] for command in commands] == [["env", "-u", "OPTCC_TOPOLOGY"]] * len(CONTENDERS)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert ServersOnFabric.read(path) == RECORD
    assert "| 1.020 | 1.010 to 1.050 | equal-trees, 256 |" in RECORD.markdown()


@pytest.mark.parametrize(
    ("change", "path"), [({"state": "fine"}, "state"), ({"bound_s": 0.0}, "bound_s"), ({"seconds": ()}, "seconds")]
)
def test_what_cannot_be_is_refused(change: dict[str, object], path: str, tmp_path: Path) -> None:
    wrong = tmp_path / "record.json"
    replace(RECORD, rows=(msgspec.structs.replace(ROW, **change),)).write(wrong)
    with pytest.raises(CodecError, match=rf"rows\[0\]\.{path}"):
        ServersOnFabric.read(wrong)
