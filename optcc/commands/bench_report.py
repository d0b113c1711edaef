"""What `optcc bench` prints: a header and nccl-tests' columns as the rows come, or JSON, or CSV; and its record."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import msgspec

from optcc.cli import echo_json
from optcc.collective import DTYPE_BYTES, REDUCING
from optcc.errors import EXIT_DONE, EXIT_REFUTED
from optcc.experiments.bench import DEFAULT_SCHEDULES, BenchSettings
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
from optcc.runtime.launchers import find_launch
from optcc.runtime.protocol.settings import NicEntry
from optcc.topology import Topology
from optcc.units import show_rate
from optcc.verify.bounds.closed_forms import TITLES

NicEntries = Sequence[Sequence[NicEntry]]
"""By rank, its NICs, where our own transport knows them."""
PERCENTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_HOSTS_SHOWN = 8


class BenchReport:
    """What rank 0 says of a bench, in `form`: a table whose rows come one after the other, JSON or CSV at the end."""

    def __init__(self, settings: BenchSettings, output: Path | None, form: str) -> None:
        self._settings, self._output, self._form = settings, output, form
        self._head: dict[str, Any] = {}
        self._has_begun = False
        # By rank, the GPU where its arrays are, and which way messages take from there; empty for the host's memory.
        self.devices: tuple[str, ...] = ()
        # How ranks of one host exchange what is in its memory, and why, where our TCP carries messages.
        self.inside = ""

    def begin(
        self,
        n_ranks: int,
        hosts: Sequence[str],
        settings: BenchSettings,
        given: Topology | None,
        nics: NicEntries = (),
    ) -> None:
        """What is known before the first run: `hosts` by rank, the settings for what was measured, what was given."""
        self._settings = settings
        source = None
        if settings.topology is not None:
            source = "given" if given is not None and repr(given) == repr(settings.topology) else "measured"
        self._head = {
            "versions": these_versions(),
            "ranks": n_ranks,
            "hosts": list(dict.fromkeys(hosts)),
            "launcher": find_launch(os.environ).launcher,
            "transport": settings.transport,
            "nics": sorted({nic[0] for each in nics for nic in each}),
            "nic_rates": {host: _rates(each) for host, each in zip(hosts, nics, strict=False)},
            "inside": self.inside,
            "topology_source": source,
        }

    def add(self, rows: Sequence[BenchTiming]) -> None:
        """The rows of a size are there. The header comes with the first: a schedule that is refused has none."""
        if self._settings.quiet or self._form != "table":
            return
        if not self._has_begun:
            self._has_begun = True
            click.echo(header(self._head | {"devices": self.devices}, self._settings.topology))
            click.echo(columns())
        for row in rows:
            click.echo(line(row, is_checked=self._settings.check != 0))

    def end(self, rows: Sequence[BenchTiming], nics: Sequence[NicTraffic] = ()) -> int:
        """Writes the record, prints what is left to print, and returns the exit code: 1 for wrong elements."""
        settings = self._settings
        wrong, is_checked = sum(row.wrong for row in rows), settings.check != 0
        if self._output is not None:
            machine = this_machine() | ({"devices": list(self.devices)} if self.devices else {})
            where = command_line(), settings.bed, float(settings.wire_overhead), machine, these_versions()
            Record(TITLES.get(settings.collective, settings.collective), *where, tuple(rows), tuple(nics)).write_made(
                self._output
            )
        if settings.quiet:
            pass
        elif self._form == "json":
            echo_json(
                {
                    "config": self._head | {"devices": list(self.devices)} | _config(settings),
                    "results": [json_row(row, is_checked=is_checked) for row in rows],
                    "out_of_bounds": wrong if is_checked else None,
                    "nics": [msgspec.to_builtins(each) for each in nics],
                }
            )
        elif self._form == "csv":
            click.echo(as_csv(rows, is_checked=is_checked), nl=False)
        else:
            click.echo("\n".join(footer(rows, is_checked=is_checked)))
        return EXIT_REFUTED if wrong else EXIT_DONE


def _rates(nics: Sequence[NicEntry]) -> dict[str, str]:
    """By name, the rate of a NIC out, and in if that differs; of equal NICs of which nothing is known, nothing."""
    return {
        name: ":".join(show_rate(Fraction(rate)) for rate in dict.fromkeys((out, into)))
        for name, _, _, out, into in nics
        if max(out, into) > 1
    }


def header(head: dict[str, Any], topology: Topology | None) -> str:
    """The lines before the columns: versions, ranks, hosts, launcher, transport, NICs and their rates, topology."""
    launcher = "" if head["launcher"] == "none" else f", launched by {head['launcher']}"
    hosts = head["hosts"]
    named = ", ".join(hosts[:_HOSTS_SHOWN]) + (", ..." if len(hosts) > _HOSTS_SHOWN else "")
    where = f" on {len(hosts)} host{'s' if len(hosts) > 1 else ''} ({named})"
    lines = [
        "# " + ", ".join(f"{package} {version}" for package, version in head["versions"].items()),
        f"# {head['ranks']} ranks{where}{launcher}, messages by {head['transport']}",
    ]
    if head["nics"]:
        by_rates: dict[str, list[str]] = {}
        for host, rates in head["nic_rates"].items():
            shown = ", ".join(f"{nic} {rate}" for nic, rate in rates.items()) or ", ".join(head["nics"])
            by_rates.setdefault(shown, []).append(host)
        lines += [
            f"# NICs of {'each host' if len(by_rates) == 1 else ', '.join(those[:_HOSTS_SHOWN])}: {shown}"
            for shown, those in by_rates.items()
        ]
    if head.get("inside"):
        lines.append(f"# inside a host: {head['inside']}")
    for number, device in enumerate(dict.fromkeys(head.get("devices", ()))):
        ranks = [str(rank) for rank, each in enumerate(head["devices"]) if each == device]
        if number < _HOSTS_SHOWN:
            lines.append(f"# arrays of rank {', '.join(ranks)} on {device}")
    if topology is not None:
        text = repr(topology)[len("Topology('") : -len("')")]
        lines.append(f"# topology {text}, {head['topology_source']}")
    return "\n".join(lines)


def columns() -> str:
    """The heads of nccl-tests' columns, then %bound and the schedule."""
    side = f"{'time':>11}{'algbw':>8}{'busbw':>8}{'#wrong':>8}"
    unit = f"{'(us)':>11}{'(GB/s)':>8}{'(GB/s)':>8}{'':>8}"
    return "\n".join(
        (
            f"#{'out-of-place':>77}{'in-place':>36}",
            f"#{'size':>12}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}{side}{side}{'%bound':>8}  schedule",
            f"#{'(B)':>12}{'(elements)':>14}{'':>26}{unit}{unit}",
        )
    )


def line(row: BenchTiming, *, is_checked: bool) -> str:
    """A row under `columns`."""
    cells = "".join(_side(row, samples, is_checked=is_checked) for samples in (row.out_of_place, row.in_place))
    percent = "N/A" if row.bound_percent is None else f"{row.bound_percent:.1f}"
    what = f"{row.size_bytes:>12}{row.size_bytes // DTYPE_BYTES[row.dtype]:>14}{row.dtype:>10}{_redop(row):>8}"
    return f" {what}{row.root:>8}{cells}{percent:>8}  {row.schedule}"


def _redop(row: BenchTiming) -> str:
    """The reduction, as nccl-tests names it: `none` where the collective is known not to reduce."""
    return "none" if row.collective in DEFAULT_SCHEDULES and row.collective not in REDUCING else row.reduction


def _side(row: BenchTiming, samples: Samples | None, *, is_checked: bool) -> str:
    if samples is None:
        return f"{'N/A':>11}{'N/A':>8}{'N/A':>8}{'N/A':>8}"
    seconds = samples.median_s
    bandwidths = (
        f"{algbw(row.size_bytes, seconds):>8.4f}"
        f"{busbw(row.size_bytes, seconds, row.ranks, row.collective, row.bus_share):>8.4f}"
    )
    return f"{seconds * 1e6:>11.1f}{bandwidths}{samples.wrong if is_checked else 'N/A':>8}"


def footer(rows: Sequence[BenchTiming], *, is_checked: bool) -> list[str]:
    """The lines after the last row."""
    wrong = sum(row.wrong for row in rows)
    found = f"{wrong} {'OK' if not wrong else 'FAILED'}" if is_checked else "N/A"
    lines = [f"# Out of bounds values : {found}"]
    changes, resent, lost, detours = (
        sum(getattr(row, what) for row in rows) for what in ("plan_changes", "resent", "lost", "detours")
    )
    if changes:
        lines.append(f"# Plan changes         : {changes}, for what the NICs carried then")
    if resent or lost:
        lines.append(f"# Lost connections     : {lost}, {resent} chunks were sent again")
    if detours:
        lines.append(f"# Through other hosts  : {detours} connections, between hosts that shared no rail")
    mean = sum(row.busbw for row in rows) / len(rows) if rows else 0.0
    return [*lines, f"# Avg bus bandwidth    : {mean:.6g}"]


def _config(settings: BenchSettings) -> dict[str, Any]:
    return {
        "collective": settings.collective,
        "schedules": [*settings.schedules, *settings.peers],
        "topology": repr(settings.topology) if settings.topology is not None else None,
        "latency_s": float(settings.latency_s),
        "wire_overhead": str(settings.wire_overhead),
        "iterations": settings.iterations,
        "warmup": settings.warmup,
        "operations": settings.operations,
        "time_of": settings.average,
        "check": "all" if settings.check is None else settings.check,
        "segments": settings.segments,
        "window": settings.window,
        "slots": settings.slots,
        "ports": settings.ports,
    }


def json_row(row: BenchTiming, *, is_checked: bool) -> dict[str, Any]:
    """nccl-tests' keys, then ours. Times are in microseconds where nccl-tests has them so, in seconds elsewhere."""

    def side(samples: Samples | None) -> dict[str, Any] | None:
        if samples is None:
            return None
        return {
            "time": samples.median_s * 1e6,
            "alg_bw": algbw(row.size_bytes, samples.median_s),
            "bus_bw": busbw(row.size_bytes, samples.median_s, row.ranks, row.collective, row.bus_share),
            "nwrong": samples.wrong if is_checked else None,
            "percentiles": {name: samples.percentile_s(share) * 1e6 for name, share in PERCENTILES.items()},
        }

    return {
        "size": row.size_bytes,
        "count": row.size_bytes // DTYPE_BYTES[row.dtype],
        "type": row.dtype,
        "redop": _redop(row),
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


def as_csv(rows: Sequence[BenchTiming], *, is_checked: bool) -> str:
    """A head and a line for each row: the keys of `json_row`, those of the two sides with their names before them."""
    flat = []
    for row in rows:
        cells = json_row(row, is_checked=is_checked)
        for name in ("out_of_place", "in_place"):
            side = cells.pop(name)
            own = dict.fromkeys(("time", "alg_bw", "bus_bw", "nwrong"), None) if side is None else side
            percentiles = own.pop("percentiles", dict.fromkeys(PERCENTILES, None))
            cells |= {f"{name}_{key}": value for key, value in (own | percentiles).items()}
        flat.append(cells)
    text = io.StringIO()
    if flat:
        writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    return text.getvalue()
