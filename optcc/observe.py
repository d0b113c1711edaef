"""`optcc.observe`: chunks of running collectives, taken by taps and drained by another process.

    from optcc.observe import Tap

    with optcc.init() as comm:
        taps = comm.tap(Tap.parse("norms points=input,output every=10"))
        ...
        taps.set(Tap.parse("guard points=sent,arrived,result"))       # from the next collective on
        print(taps.counters)

The records go to a file by `optcc observe JOB -o gradients.parquet`, started before, meanwhile or afterwards, or to a
function of a program by `JobDrain` with a `CallbackSink`. `docs/observing.md` is the manual, `optcc.runtime.taps` the
theory of operation.
"""

from __future__ import annotations

from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.condense import NonFinite, Norms
from optcc.runtime.taps.control import ask_for
from optcc.runtime.taps.drain import JobDrain
from optcc.runtime.taps.findings import check_stages, statistics, trace_nans
from optcc.runtime.taps.policy import Tap
from optcc.runtime.taps.records import ChunkRecord, take_records
from optcc.runtime.taps.sinks import ArrowSink, CallbackSink, NpzSink, read_records, sink_for
from optcc.runtime.taps.stages import stage_values

__all__ = [
    "ArrowSink",
    "CallbackSink",
    "ChunkRecord",
    "JobDrain",
    "NonFinite",
    "Norms",
    "NpzSink",
    "Tap",
    "TapSet",
    "ask_for",
    "check_stages",
    "read_records",
    "sink_for",
    "stage_values",
    "statistics",
    "take_records",
    "trace_nans",
]
