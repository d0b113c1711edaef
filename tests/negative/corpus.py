"""Wrong schedules, wrong plans and wrong claims, at least five for each class of bug that a verifier must reject.

The classes are the 27 that have been found in the field's compilers, tools and algorithms. Most mean here what they
mean there. Those that our model expresses differently are explained where their cases are:

    contributions  1 double reduction, 2 missing contribution, 3 wrong chunk or offset, 21 order of reductions,
                   22 wrong identity, 27 vacuous program
    messages       4 count, size or order, 5 tag or channel, 17 fusion and replication, 18 operand mix-up,
                   20 unconsumed message or credit
    waiting        6 rendezvous cycle, 7 finite-buffer cycle, 8 waiting for oneself, 12 slot reuse before the
                   acknowledgement
    memory         9 read after write, 10 write after read, 11 receive into a live buffer, 19 overlapping copy
    contents       13 stale read, 14 alias in place, 15 input clobbered, 16 read of what was never written
    sizes          23 ragged tail, 24 resource limits, 25 missing link or oversubscription, 26 false claim of time

A plan's verdict comes from `verify_plan`; limits, timing and translation are asked for by the cases of 24, of 25 and
26, and of 17.
"""

from __future__ import annotations

from tests.negative import contents, contributions, memory, messages, sizes, waiting
from tests.negative.cases import Case

CLASSES = range(1, 28)
CASES: tuple[Case, ...] = tuple(
    sorted(
        (case for part in (contributions, messages, waiting, memory, contents, sizes) for case in part.CASES),
        key=lambda case: case.number,
    )
)
