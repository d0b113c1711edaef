"""Measured timelines: when each transfer of a plan began and ended in one run, from the flight recorders of all ranks.

    {"format": "optcc-trace/1", "run": 12, "within_s": 0.0, "plan": {... optcc-plan/1 ...},
     "posted_s": [...], "sent_s": [...], "arrived_s": [...], "done_s": [...]}

Seconds are from the beginning of the run at the rank that began first, one number for each transfer of the plan; where
ranks were on several hosts their clocks agree to `within_s`. A transfer is posted when its bytes may be read, sent when
its source may change them, has arrived when all of them are at its destination, and is done when they have been reduced
or copied. When its first byte was on a wire nobody here sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from optcc.codec import read_plan, write_plan
from optcc.errors import CodecError, InputError
from optcc.files import read_file, replace_file
from optcc.plan import LOCALS, Plan
from optcc.runtime.observe.dump import FlightDump
from optcc.runtime.observe.merged import MergedDumps
from optcc.runtime.observe.recorder import ARRIVED, COMPUTED, POSTED, SENT
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S
from optcc.strict_json import decode

FORMAT = "optcc-trace/1"
_TRACE_BYTES_MAX = 1 << 30
_LENGTH_BYTES = 8
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """One run of `plan`: for each transfer its times, seconds from the beginning of the run; see this module."""

    plan: Plan
    run: int
    within_s: float
    posted_s: Seconds
    sent_s: Seconds
    arrived_s: Seconds
    done_s: Seconds

    @property
    def seconds(self) -> float:
        """From the first rank's beginning to the last transfer's end."""
        return float(self.done_s.max()) if len(self.done_s) else 0.0


class _TraceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    run: int
    within_s: float | None
    plan: msgspec.Raw
    posted_s: list[float]
    sent_s: list[float]
    arrived_s: list[float]
    done_s: list[float]


_DECODER = msgspec.json.Decoder(_TraceFile)


class GathersDumps(Protocol):
    """The ranks of a job."""

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """As `Transport.allgather`."""
        ...


def gather_dumps(ranks: GathersDumps, dump: FlightDump) -> list[FlightDump]:
    """Every rank's dump, at every rank; collective."""
    data = msgspec.msgpack.encode(dump)
    lengths = ranks.allgather(len(data).to_bytes(_LENGTH_BYTES, "big"))
    n_bytes = [int.from_bytes(each, "big") for each in lengths]
    parts = ranks.allgather(data.ljust(max(n_bytes), b"\0"))
    return [msgspec.msgpack.decode(part[:n], type=FlightDump) for part, n in zip(parts, n_bytes, strict=True)]


def measured_run(plan: Plan, dumps: list[FlightDump]) -> MeasuredRun:
    """The last run of `plan` of which the dumps have every event.

    Raises InputError if there is none: the plan did not run, or rings or details were too small for it.
    """
    merged = MergedDumps(dumps)
    if merged.missing:
        raise InputError(f"trace of {plan.name}: there is nothing of ranks {', '.join(map(str, merged.missing))}")
    ended = [
        {n for n, run in runs.items() if run.end_s is not None and run.plan and run.plan.digest == plan.digest[:12]}
        for runs in merged.runs.values()
    ]
    for number in sorted(set.intersection(*ended), reverse=True):
        found = _times(plan, merged, number)
        if found is not None:
            return found
    raise InputError(f"trace of {plan.name}: no run of it is whole: must fit the ring of the flight recorder")


def _times(plan: Plan, merged: MergedDumps, number: int) -> MeasuredRun | None:
    n = len(plan.transfers)
    times = np.full((4, n), np.nan)
    posted, sent, arrived, done = times
    begin_s = min(merged.at_s(rank, runs[number].begin_s) for rank, runs in merged.runs.items())
    # By channel, the transfers of its messages in their order, as the receiver and as the sender have them.
    receives = [plan.recv_transfer[plan.in_channel == channel] for channel in range(len(plan.channels))]
    for rank, dump in merged.dumps.items():
        shift_s = merged.clocks[rank].offset_s - begin_s
        for each in dump.records:
            if each.x != number:
                continue
            at_s = each.at_s + shift_s
            if each.kind == COMPUTED:
                transfer = int(plan.recv_transfer[each.b])
                done[transfer] = at_s
                if int(plan.kind[each.b]) in LOCALS:
                    posted[transfer] = at_s - each.y * 1e-9
                    sent[transfer] = arrived[transfer] = at_s
            elif each.kind in (POSTED, SENT, ARRIVED):
                column = {POSTED: posted, SENT: sent, ARRIVED: arrived}[each.kind]
                column[receives[each.c][each.d]] = at_s
    if np.isnan(times).any():
        return None
    # The beginning of a run is known to within the rounding of its deadline.
    posted[:] = np.maximum(posted, 0.0)
    # Two ranks' clocks are read at two moments: what is left of their error must not turn a transfer round.
    arrived[:] = np.maximum(arrived, posted)
    done[:] = np.maximum(done, arrived)
    return MeasuredRun(plan, number, merged.within_s, posted, np.maximum(sent, posted), arrived, done)


def write_trace(measured: MeasuredRun, path: Path) -> None:
    """Writes an `optcc-trace/1` file; raises InputError if that fails."""
    columns = {name: getattr(measured, name).tolist() for name in ("posted_s", "sent_s", "arrived_s", "done_s")}
    file = _TraceFile(
        *(FORMAT, measured.run, measured.within_s if np.isfinite(measured.within_s) else None),
        msgspec.Raw(write_plan(measured.plan)),
        **columns,
    )
    replace_file(path, msgspec.json.encode(file) + b"\n")


def read_trace(path: Path) -> MeasuredRun:
    """The run in an `optcc-trace/1` file. Raises CodecError, naming the file, if it is none, InputError if it cannot be
    read."""
    file = decode(read_file(path, _TRACE_BYTES_MAX), _DECODER, f"file {str(path)!r}: $")
    if file.format != FORMAT:
        raise CodecError(f"file {str(path)!r}: format {file.format!r}: must be {FORMAT!r}")
    plan = read_plan(bytes(file.plan) + b"\n")
    columns = [np.array(each, dtype=np.float64) for each in (file.posted_s, file.sent_s, file.arrived_s, file.done_s)]
    for each in columns:
        if len(each) != len(plan.transfers) or not np.isfinite(each).all():
            raise CodecError(f"file {str(path)!r}: times of {len(each)} transfers: must be {len(plan.transfers)}")
    within_s = float("inf") if file.within_s is None else file.within_s
    return MeasuredRun(plan, file.run, within_s, *columns)
