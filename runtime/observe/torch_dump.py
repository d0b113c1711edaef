"""Dumps in the format of PyTorch's flight recorder, which `torchfrtrace` reads.

That program takes pickled files only. What is written here are plain dictionaries, lists, numbers and texts; nothing of
optcc reads such a file, as reading one can run code. So this is a conversion that the user asks for, and the dumps
themselves are JSON. Collectives alone are converted: PyTorch's recorder has no messages within one.

The format is that of `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`, version 2.9.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optcc.collective import DTYPE_BYTES
from optcc.files import replace_file
from optcc.runtime.observe.dump import FlightDump
from optcc.runtime.observe.merged import runs_of
from optcc.runtime.observe.recorder import KnownPlan

VERSION = "2.9"
PREFIX = "optcc_trace_rank_"
_GROUP, _DESCRIPTION = "0", "default_pg"
_NAMES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
}
_DTYPES = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"} | {
    "int64": "Long",
    "int32": "Int",
    "int8": "Char",
    "uint8": "Byte",
}
_TIMEOUT_MS = 60_000
_NS = 10**9


def write_torch_dumps(dumps: Sequence[FlightDump], folder: Path) -> list[Path]:
    """Writes `optcc_trace_rank_R` for each rank into a folder, which is made; raises InputError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for dump in dumps:
        path = folder / f"{PREFIX}{dump.rank}"
        # Of protocol 4, which every Python reads that PyTorch runs on.
        replace_file(path, pickle.dumps(torch_dump(dump), protocol=4))
        paths.append(path)
    return paths


def torch_dump(dump: FlightDump) -> dict[str, Any]:
    """What PyTorch's flight recorder would have dumped at this rank; collectives that it does not know are left out."""
    identity = dump.identity
    begun, done = dump.begun, dump.done
    return {
        "version": VERSION,
        "pg_config": {
            _GROUP: {"name": _GROUP, "desc": _DESCRIPTION, "ranks": str(list(range(identity.n_ranks)))},
        },
        "pg_status": {
            _GROUP: {
                "last_enqueued_collective": begun,
                "last_started_collective": begun,
                "last_completed_collective": done,
            },
        },
        "host_name": identity.host,
        "entries": _entries(dump),
    }


def _entries(dump: FlightDump) -> list[dict[str, Any]]:
    """The collectives that were begun, and that on which the ranks have not agreed, if there is one."""
    entries = [
        _entry(dump, number, run.plan, run.begin_s, run.end_s)
        for number, run in runs_of(dump).items()
        if run.plan is not None and run.plan.collective in _NAMES
    ]
    wanted = dump.status.wanted
    # What has been begun since in its place is another one.
    if wanted is not None and wanted.run == dump.begun + 1 and wanted.plan.collective in _NAMES:
        refused = _entry(dump, wanted.run, wanted.plan, wanted.at_s, None)
        entries.append(refused | {"state": "scheduled", "time_discovered_started_ns": None})
    return entries


def _entry(dump: FlightDump, number: int, plan: KnownPlan, begin_s: float, end_s: float | None) -> dict[str, Any]:
    identity = dump.identity

    def wall_ns(seconds: float) -> int:
        return int((seconds - identity.clock_s + identity.wall_s) * _NS)

    given, got = _elements(plan, identity.n_ranks)
    dtype = _DTYPES.get(plan.dtype, plan.dtype)
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": (_GROUP, _DESCRIPTION),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{_NAMES[plan.collective]}",
        "time_created_ns": wall_ns(begin_s),
        "time_discovered_started_ns": wall_ns(begin_s),
        "time_discovered_completed_ns": None if end_s is None else wall_ns(end_s),
        "input_sizes": [[given]],
        "input_dtypes": [dtype],
        "output_sizes": [[got]],
        "output_dtypes": [dtype],
        "state": "started" if end_s is None else "completed",
        "timeout_ms": _TIMEOUT_MS,
        "is_p2p": False,
        "retired": end_s is not None,
        "frames": [],
    }


def _elements(plan: KnownPlan, n_ranks: int) -> tuple[int, int]:
    """Elements that a rank gives and gets; the message of a gathering collective is what all have together."""
    whole = plan.n_bytes // DTYPE_BYTES[plan.dtype]
    given = whole // n_ranks if plan.collective in ("allgather", "gather") else whole
    got = whole // n_ranks if plan.collective in ("reducescatter", "scatter") else whole
    return given, got
