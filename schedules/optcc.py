"""OptCC (arXiv 2606.01680): four pipelined stages around a ring of the healthy ranks, the straggler beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optcc.dsl import Program, any_flat, schedule
from optcc.errors import TopologyError
from optcc.topology import Topology


def one_straggler(topology: Topology) -> Mapping[str, Any]:
    """The slowest endpoint, when all others are equal; the last one when all are."""
    any_flat(topology)
    rates = [min(out, in_) for out, in_ in zip(topology.out, topology.in_, strict=True)]
    slow = min(rates)
    straggler = len(rates) - 1 if rates.count(slow) > 1 else rates.index(slow)
    others = rates[:straggler] + rates[straggler + 1 :]
    if len(set(others)) > 1:
        raise TopologyError(f"{topology!r}: endpoints other than {straggler} differ from each other")
    return {"straggler": straggler}


@schedule(
    accepts="endpoints of one rate, one of them slower or none",
    paper="OptCC, arXiv 2606.01680",
    configure=one_straggler,
)
def optcc(program: Program, straggler: int) -> None:
    """Reduce-scatter among the healthy, owner to straggler and back, all-gather: patterns 1-2-3-4 and 3-1-4-2.

    The p - 1 healthy ranks own a section each. Even segments run the stages 1-2-3-4; odd ones 3-1-4-2, where the
    straggler seeds each section with its own data and receives it when it is finished, so that the straggler's two
    ports are busy from the start to the end. With k segments: (k + 1)/k * max(l, 2 - 1/(p - 1)) * n / B.

    >>> schedule = optcc(n_ranks=4, segments=2, straggler=3)
    >>> schedule.stages
    ('1 reduce-scatter', '2 to straggler', '3 from straggler', '4 all-gather')
    """
    healthy = [rank for rank in program.ranks if rank != straggler]
    q = len(healthy)
    for segment in program.pipeline(sections=max(q, 1)):
        seeded = segment.index % 2 == 1
        if seeded:
            with program.stage("3 from straggler"):
                for owner in range(q):
                    segment[owner].reduce(src=straggler, dst=healthy[(owner + 1) % q])
        with program.stage("1 reduce-scatter"):
            for step in range(q - 1):
                for i in range(q):
                    segment[(i - step - 1) % q].reduce(src=healthy[i], dst=healthy[(i + 1) % q])
        if not seeded:
            with program.stage("2 to straggler"):
                for owner in range(q):
                    segment[owner].reduce(src=healthy[owner], dst=straggler)
            with program.stage("3 from straggler"):
                for owner in range(q):
                    segment[owner].copy(src=straggler, dst=healthy[owner])
        with program.stage("4 all-gather"):
            for step in range(q - 1):
                for i in range(q):
                    segment[(i - step) % q].copy(src=healthy[i], dst=healthy[(i + 1) % q])
        if seeded:
            with program.stage("2 to straggler"):
                for owner in range(q):
                    segment[owner].copy(src=healthy[owner], dst=straggler)
