"""What the commands that run under a launcher share: one process is one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click

from optcc.errors import EXIT_BAD_INPUT, DeadlineExceeded, InputError, MismatchError, OptccError, RuntimeFault
from optcc.runtime.launchers import MPI, check_count, find_launch, meet_of
from optcc.runtime.mpi_library import load_mpi, wait_for
from optcc.runtime.nics import nics_of
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.transport import MonotonicClock, Transport
from optcc.runtime.transports.mpi import MpiTransport
from optcc.runtime.transports.tcp import TcpTransport, open_tcp
from optcc.runtime.transports.ucx import UcxTransport
from optcc.runtime.transports.ucx_library import load as load_ucx

_ALIKE_S = 2.0
"""An error that every rank meets is met by all within this time."""
_SAID_S = 0.5
"""A failure on which all ranks agree is said by another rank within this time, or by this one."""


def mpi_of(carrier: str) -> MpiTransport:
    """The ranks of the job, if `carrier` (mpi, tcp or ucx) is to carry its messages.

    Ends the job if a rank does not come. Raises InputError if the variables of a launcher say another number of ranks.
    """
    if carrier == "ucx":
        # Before MPI, which would load a UCX of its own, perhaps an older one.
        load_ucx()
    launch = find_launch(os.environ)
    try:
        mpi = MpiTransport()
    except DeadlineExceeded as error:
        # To leave MPI in order would be to wait for the rank that has not come.
        click.echo(f"optcc: {error}", err=True)
        sys.stderr.flush()
        load_mpi().COMM_WORLD.Abort(error.exit_code)
        raise
    try:
        check_count(launch, mpi.rank, mpi.n_ranks)
    except InputError:
        mpi.close()
        raise
    return mpi


@contextmanager
def carried_by(
    mpi: MpiTransport,
    carrier: str,
    environ: Mapping[str, str],
    *,
    shared_memory: bool = True,
    may_be_down: bool = False,
) -> Iterator[Transport]:
    """What carries the messages: MPI, or TCP or UCX between the ranks that MPI has brought together; see `open_tcp`.

    The NICs of TCP `may_be_down` where they are measured; see `nics_of`.
    """
    if carrier == "mpi":
        yield mpi
        return
    meet, nics = over_mpi(mpi.comm), nics_of(environ, may_be_down=may_be_down and carrier == "tcp")
    transport: Transport
    if carrier == "tcp":
        transport = open_tcp(meet, nics, environ, shared_memory=shared_memory)
    else:
        transport = UcxTransport(meet, nics)
    try:
        yield transport
    finally:
        transport.close()


@contextmanager
def tcp_of_job(environ: Mapping[str, str]) -> Iterator[TcpTransport]:
    """TCP between the ranks of the job, whatever has launched it. Raises as `optcc.init`."""
    launch = find_launch(environ)
    if launch.launcher == MPI:
        mpi = mpi_of("tcp")
        with abort_on_failure(mpi), carried_by(mpi, "tcp", environ, may_be_down=True) as transport:
            assert isinstance(transport, TcpTransport)
            yield transport
        mpi.close()
        return
    transport = open_tcp(meet_of(launch, environ, 0), nics_of(environ, may_be_down=True), environ)
    try:
        yield transport
    finally:
        transport.close()


def _all_have_failed() -> bool:
    """Whether every rank comes here within `_ALIKE_S`. Nothing else uses this communicator after the start."""
    clock = MonotonicClock()
    return wait_for(load_mpi().COMM_WORLD.Ibarrier(), clock, clock.now_s() + _ALIKE_S)


def _end_job(mpi: MpiTransport, what: str, exit_code: int) -> None:
    """Says what this rank has met and ends all others with it; alone it leaves MPI in order, which says nothing."""
    click.echo(f"optcc: rank {mpi.rank}: {what}", err=True)
    sys.stderr.flush()
    if mpi.n_ranks == 1:
        sys.exit(exit_code)
    mpi.comm.Abort(exit_code)


@contextmanager
def abort_on_failure(mpi: MpiTransport) -> Iterator[None]:
    """Ends the job with the exit code of what one rank alone has met, and says it; what all ranks meet, rank 0 says."""
    try:
        yield
    except MismatchError:
        raise
    except RuntimeFault as fault:
        if fault.culprits and mpi.rank != min(set(range(mpi.n_ranks)) - set(fault.culprits), default=mpi.rank):
            # All ranks that are left raise the same, and the first of them says it: the job ends then.
            MonotonicClock().sleep_s(_SAID_S)
        what = str(fault).removeprefix(f"rank {mpi.rank}: ")
        _end_job(mpi, what, fault.exit_code)
        raise
    except MemoryError as error:
        _end_job(mpi, f"out of memory: {error}", EXIT_BAD_INPUT)
        raise
    except OptccError as error:
        if not _all_have_failed():
            _end_job(mpi, str(error), error.exit_code)
        if mpi.rank == 0:
            raise
        sys.exit(error.exit_code)
