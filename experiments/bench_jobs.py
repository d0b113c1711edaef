"""Jobs of `optcc bench` on emulated hosts whose NICs are in some state, as experiments run them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from optcc.errors import RuntimeFault
from optcc.experiments.fabric import Fabric, NicRates
from optcc.experiments.record import Record

STATES: Mapping[str, Mapping[str, str]] = {
    "healthy": {},
    "one NIC at half": {"h3.eth1": "100Mbit/s"},
    "one NIC down": {"h3.eth1": "down"},
}
"""States of hosts with two NICs of 200 Mbit/s: what befell which NIC."""


def befall(fabric: Fabric, nic: str, what: str) -> None:
    """A NIC gets a rate, or goes down."""
    if what == "down":
        fabric.fail(nic)
    else:
        fabric.set_rate(nic, NicRates.parse(what))


@contextmanager
def in_state(fabric: Fabric, nics: Mapping[str, str]) -> Iterator[None]:
    """The hosts with what befell these NICs, which are healed at the end."""
    try:
        for nic, what in nics.items():
            befall(fabric, nic, what)
        yield
    finally:
        for nic in nics:
            fabric.heal(nic)


def run_bench(fabric: Fabric, what: str, words: Sequence[str], timeout_s: float, *, mpi: Sequence[str] = ()) -> Record:
    """The record of one job of `optcc bench`; `mpi` are arguments of mpirun. The topology of the hosts is kept from the
    job. Raises RuntimeFault, which says `what` it was, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        bench = [sys.executable, "-P", "-m", "optcc", "bench", *words, "--quiet", "-J", str(path)]
        command = ["env", "-u", "OPTCC_TOPOLOGY", *bench]
        done = fabric.run(command, capture=True, timeout_s=timeout_s, mpi_args=tuple(mpi))
        if done.exit_code:
            raise RuntimeFault(f"{what}: {done.stderr.strip()[-500:]}")
        return Record.read(path)


def times_of(records: Sequence[Record]) -> tuple[tuple[float, ...], int]:
    """The undisturbed seconds of all runs of the first row, and how many elements were wrong."""
    rows = [record.rows[0] for record in records]
    samples = [each for row in rows for each in (row.out_of_place, row.in_place) if each is not None]
    return tuple(second for each in samples for second in each.undisturbed_s), sum(each.wrong for each in samples)
