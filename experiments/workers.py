"""The processes that measure the cells of a record: this one, others of this machine, or the ranks of an MPI job.

Under `mpirun -n N` rank 0 runs the experiment, and the other ranks serve it through `mpi4py.futures`, on as many
machines as the job has. What is made does not depend on which process made it, nor in which order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from optcc.errors import EnvironmentMissing, InputError
from optcc.experiments.record import text_of
from optcc.runtime.launchers import MPI as BY_MPI
from optcc.runtime.launchers import Launch, check_count, find_launch

JOBS_MAX = 256
Named = tuple[str, Any]
"""The name of a cell, and what it is made from or what has come of it."""


@dataclass(frozen=True)
class Workers:
    """So many processes; `executor` is that of an MPI job, and without one they are started here."""

    count: int = 1
    executor: Any = field(default=None, compare=False)

    def results(self, work: Callable[[Any], Any], units: Mapping[str, Any]) -> Iterator[Named]:
        """`work` of every unit as it is done, as values of JSON. `work` is a function of a module."""
        call, items = partial(_named, work), list(units.items())
        if self.executor is not None:
            yield from self.executor.map(call, items, unordered=True)
        elif self.count == 1 or len(items) < 2:
            yield from map(call, items)
        else:
            # Spawned: a fork would copy the locks of threads that the parent has started.
            context = multiprocessing.get_context("spawn")
            with context.Pool(min(self.count, len(items)), initializer=_leave_interrupts) as pool:
                yield from pool.imap_unordered(call, items)


def plain(value: Any) -> Any:
    """A result as values of JSON; rationals are text."""
    return msgspec.to_builtins(value, enc_hook=text_of)


@contextmanager
def open_workers(jobs: int) -> Iterator[Workers | None]:
    """`jobs` processes, or in an MPI job of several ranks all but rank 0; None in those, once they have served.

    Raises InputError for jobs out of range, or for a launcher that says another number of ranks than MPI.
    """
    if not 1 <= jobs <= JOBS_MAX:
        raise InputError(f"--jobs {jobs}: must be from 1 to {JOBS_MAX}")
    launch = find_launch(os.environ)
    if launch.launcher != BY_MPI or launch.n_ranks == 1:
        yield Workers(jobs)
        return
    with _mpi_executor(launch) as (executor, count):
        yield None if executor is None else Workers(count, executor)


@contextmanager
def _mpi_executor(launch: Launch) -> Iterator[tuple[Any, int]]:
    """The executor, at rank 0, and how many ranks work for it; None at those, after their work."""
    try:
        import mpi4py

        # A thread of the executor sends and receives, and no other does.
        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        raise EnvironmentMissing(f"MPI: {error}: pip install 'optcc[mpi]'") from error
    world = MPI.COMM_WORLD
    check_count(launch, world.Get_rank(), world.Get_size())
    with MPICommExecutor(world, root=0) as executor:
        yield executor, world.Get_size() - 1


def _leave_interrupts() -> None:
    """Ignores Ctrl-C, which reaches the whole process group: the parent handles it and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _named(work: Callable[[Any], Any], unit: Named) -> Named:
    return unit[0], plain(work(unit[1]))
