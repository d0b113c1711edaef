"""A size and a number of segments for which a schedule's plan fits a format or a run-time.

The formats for GPUs are scale-free, but the chunks of a file are the greatest common divisor of all offsets: a size
that the schedule does not cut evenly, or many segments, need more steps and chunks than a run-time has room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optcc.errors import OptccError
from optcc.planner import build
from optcc.topology import Topology
from optcc.verify.plan.limits import check_limits

SEGMENTS = (1, 2, 4, 8)
INSTRUCTIONS_MAX = 50_000


def find_fitting(name: str, topology: Topology, size_bytes: int, target: str, **options: Any) -> tuple[int, int] | None:
    """The bytes, at least `size_bytes`, and the segments of a plan that fits `target`; None if none is found.

    `options` are those of `optcc.planner.build`. Few sizes and numbers of segments are tried.

    >>> find_fitting("ring", Topology.parse("4@50GB/s"), 1_000_000, "msccl-xml")
    (1000448, 8)
    """
    found = None
    for pieces in SEGMENTS:  # what does not fit with one segment does not with more
        sizes = _sizes(topology.n_ranks, pieces, size_bytes)
        size = next((each for each in sizes if _fits(name, topology, each, pieces, target, options)), None)
        if size is None and found is None:
            return None
        found = found if size is None else (size, pieces)
    return found


def _fits(name: str, topology: Topology, size_bytes: int, segments: int, target: str, options: dict[str, Any]) -> bool:
    try:
        plan = build(name, topology, size_bytes, segments=segments, **options).plan
    except OptccError:
        return False
    return len(plan) <= INSTRUCTIONS_MAX and check_limits(plan, target) is None


def _sizes(n_ranks: int, segments: int, size_bytes: int) -> Iterator[int]:
    """Sizes that schedules cut evenly: into a section for each rank, for each but one, for both, or for each pair of
    ranks, each of 16 B."""
    for sections in dict.fromkeys((n_ranks, max(1, n_ranks - 1), n_ranks * max(1, n_ranks - 1), n_ranks**2)):
        unit = 16 * segments * sections
        yield -(-size_bytes // unit) * unit
