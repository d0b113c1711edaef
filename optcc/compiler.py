"""From a schedule to a plan: the default pipeline of passes.

bind       chunks become bytes
depend     bytes become dependencies
timetable  dependencies and bandwidths become an order for every port
lower      the order becomes lanes of instructions
fuse       a receive and the send that passes it on become one
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from optcc.arrays import Lists, column
from optcc.dsl import Definition
from optcc.errors import InputError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.fuse import fuse
from optcc.passes.lower import lower
from optcc.passes.timetable import timetable
from optcc.plan import SLOTS_MAX, Plan
from optcc.schedule import Schedule
from optcc.simulate import plan_edges, simulate
from optcc.topology import Topology
from optcc.transfers import Transfers

SLOTS = 2
LATENCY_S = Fraction(20, 10**6)
"""What a message is taken to cost where the topology does not say."""
SEGMENTS_AUTO_MAX = 128
CHUNK_BYTES_MIN = 2**16
"""Chunks are not chosen smaller: MPI libraries send short messages before their receive is posted, and then the
receiver no longer decides which comes next. OptCC of 16 MiB over four hosts, one at half rate, takes 1.02 of the bound
with chunks of 85 KiB and 1.33 with chunks of 43 KiB."""
CHUNK_BYTES_MAX = 2**20
"""Chunks are not chosen larger: slots stay small, and a message never fills the queues between two hosts. A ring with
chunks of 16 MiB over a port at half rate took 1.52 to 1.83 of the bound from run to run, with 1 MiB 1.52 each time."""
TRANSFERS_AUTO_MAX = 60_000


def compile_schedule(
    schedule: Schedule,
    *,
    size_bytes: int,
    dtype: str = "float32",
    reduction: str = "sum",
    topology: Topology | None = None,
    slots: int = SLOTS,
    fused: bool = True,
) -> Plan:
    """The plan of `schedule` for a message of `size_bytes`, its ports ordered for `topology` (else as written).

    Raises InputError for a size, type, reduction or number of slots that cannot be, TopologyError for a topology of
    another number of ranks.
    """
    if not 1 <= slots <= SLOTS_MAX:
        raise InputError(f"{slots} slots: must be from 1 to {SLOTS_MAX}")
    transfers = depend(bind(schedule, size_bytes, dtype, reduction))
    order = column(np.arange(len(transfers))) if topology is None else timetable(transfers, topology)
    plan = lower(schedule.name, transfers, order, slots)
    return fuse(plan, order) if fused else plan


def plan_transfers(plan: Plan) -> Transfers:
    """The plan's transfers with `order` filled: what its lanes and its slots enforce beyond the dependencies."""
    edges = plan_edges(plan)
    order = [
        sorted({*lane, *credit} - set(after))
        for lane, credit, after in zip(edges.order, edges.credit, plan.transfers.after, strict=True)
    ]
    return replace(plan.transfers, order=Lists.of(order))


def choose_segments(
    definition: Definition, topology: Topology, *, size_bytes: int, dtype: str = "float32", slots: int = SLOTS
) -> int:
    """The power of two of segments whose plan is predicted to be fastest: more segments fill and drain the pipeline
    faster, fewer of them pay the latency less often. The topology's latency decides, `LATENCY_S` if it has none.

    Raises what building and compiling the schedule raises.
    """
    timed = topology if topology.latency_s else topology.with_latency(LATENCY_S)

    def seconds(segments: int) -> float:
        schedule = definition.build(topology, segments)
        return simulate(
            compile_schedule(schedule, size_bytes=size_bytes, dtype=dtype, topology=timed, slots=slots), timed
        ).seconds

    single = definition.build(topology, 1)
    sections = sum(shape.sections for shape in single.segments) or 1
    most = TRANSFERS_AUTO_MAX // max(1, len(single))
    segments = 1
    while size_bytes > CHUNK_BYTES_MAX * sections * segments and 2 * segments <= most:
        segments *= 2
    candidates = [segments]
    while 2 * segments <= min(most, SEGMENTS_AUTO_MAX) and size_bytes >= CHUNK_BYTES_MIN * sections * 2 * segments:
        segments *= 2
        candidates.append(segments)
    return min(candidates, key=seconds) if len(candidates) > 1 else candidates[0]
