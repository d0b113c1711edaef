"""Timing collectives: schedules and peers interleaved in one run, every element checked.

Every case runs once in each round, so that a drift of the machine touches all alike. A time is from a barrier to the
moment at which the slowest rank is done. Inputs are those of `optcc.runtime.check`: every reduction of them is exact,
so a single wrong element shows.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from optcc.collective import Collective
from optcc.experiments.record import Samples, stolen_jiffies, stolen_share
from optcc.runtime.check import expected_output, make_input
from optcc.runtime.transport import Transport

Array = npt.NDArray[np.generic]
MODES = ("out", "in")
_POISON = 0x7B


class Case(Protocol):
    """Something that reduces: a schedule on our run-time, or a peer."""

    name: str

    def all_reduce(self, send: Array, recv: Array) -> None:
        """recv = the reduction of every rank's send; send may be recv."""
        ...


@dataclass
class Tally:
    """What one case has given so far in one mode."""

    seconds: list[float] = field(default_factory=list)
    steal: list[float] = field(default_factory=list)
    wrong: int = 0

    def samples(self) -> Samples:
        """The tally, frozen."""
        return Samples(self.seconds, self.steal, self.wrong)


def measure(
    transport: Transport,
    cases: Sequence[Case],
    *,
    count: int,
    dtype: str,
    reduction: str,
    iterations: int,
    warmup: int,
    check: bool,
    modes: Sequence[str] = MODES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Samples]]:
    """For each case, its samples by mode ("out" of place, "in" place); collective over the transport's ranks.

    `progress` is told how many of how many runs are over.
    """
    source = make_input(transport.rank, count, dtype, reduction)
    collective = Collective("allreduce", transport.n_ranks)
    wanted = expected_output(collective, count, dtype, reduction, transport.rank)[0] if check else None
    target = np.zeros_like(source)
    tallies = [{mode: Tally() for mode in modes} for _ in cases]
    turns = list(_turns(len(cases), modes, warmup, iterations))
    for position, (number, mode, counted) in enumerate(turns):
        seconds, steal, wrong = _run(transport, cases[number], mode, source, target, wanted)
        tally = tallies[number][mode]
        tally.wrong += wrong
        if counted:
            tally.seconds.append(seconds)
            tally.steal.append(steal)
        progress(position + 1, len(turns))
    return [{mode: tally.samples() for mode, tally in each.items()} for each in tallies]


def _turns(n_cases: int, modes: Sequence[str], warmup: int, iterations: int) -> Iterator[tuple[int, str, bool]]:
    """Case, mode and whether it counts, in the order of running: round by round."""
    for round_ in range(warmup + iterations):
        for mode in modes:
            for number in range(n_cases):
                yield number, mode, round_ >= warmup


def _run(
    transport: Transport, case: Case, mode: str, source: Array, target: Array, wanted: Array | None
) -> tuple[float, float, int]:
    """One run: seconds of the slowest rank, stolen share, wrong elements over all ranks."""
    if mode == "in":
        np.copyto(target, source)
        send = target
    else:
        target.view(np.uint8).fill(_POISON)
        send = source
    stolen = stolen_jiffies()
    transport.barrier()
    started = time.perf_counter()
    case.all_reduce(send, target)
    own = time.perf_counter() - started
    steal = stolen_share(stolen, stolen_jiffies())
    wrong = 0 if wanted is None else int(np.count_nonzero(target != wanted))
    everyone = [struct.unpack("<ddq", each) for each in transport.allgather(struct.pack("<ddq", own, steal, wrong))]
    return max(e[0] for e in everyone), max(e[1] for e in everyone), sum(e[2] for e in everyone)
