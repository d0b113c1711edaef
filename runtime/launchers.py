"""How this process was launched: which rank it is, of how many, and how the ranks can meet.

    mpirun, mpiexec    OMPI_COMM_WORLD_RANK, PMI_RANK or MV2_COMM_WORLD_RANK, and the same with SIZE; PMIX_RANK
    torchrun           RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    srun               SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_JOB_ID, SLURM_STEP_ID

MPI's count first, then torchrun's: either may run inside a Slurm step, whose tasks are then nodes. OPTCC_LAUNCHER (mpi,
torchrun, slurm or none) says which count if that is not what is meant. PMIX_RANK has no size beside it: it counts if it
is alone, and MPI says how many ranks there are. No variable at all is a job of one rank.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from optcc.errors import EnvironmentMissing, InputError
from optcc.runtime.meeting_file import in_file
from optcc.runtime.mpi_library import load_mpi
from optcc.runtime.rendezvous import MEET_S, Meet, alone, over_mpi, over_store

LAUNCHER_VARIABLE, FOLDER_VARIABLE = "OPTCC_LAUNCHER", "OPTCC_RENDEZVOUS_DIR"
PMIX_VARIABLE = "PMIX_RANK"
MPI, TORCHRUN, SLURM, NONE = "mpi", "torchrun", "slurm", "none"
_VARIABLES = {
    MPI: (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ),
    TORCHRUN: (("RANK", "WORLD_SIZE"),),
    SLURM: (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A process of a job: the launcher, this rank and the number of ranks, and the variable that says the latter.

    Under PMIx no variable says it: it is 0, and `variable` is that of the rank.
    """

    launcher: str
    rank: int
    n_ranks: int
    variable: str = ""


def find_launch(environ: Mapping[str, str]) -> Launch:
    """How this process was launched, by its variables.

    Raises InputError for a variable that is no number, lacks the other one of its pair, or contradicts another
    launcher's.

    >>> find_launch({"RANK": "1", "WORLD_SIZE": "4"})
    Launch(launcher='torchrun', rank=1, n_ranks=4, variable='WORLD_SIZE')
    """
    wanted = environ.get(LAUNCHER_VARIABLE, "")
    if wanted and wanted not in (*_VARIABLES, NONE):
        raise InputError(f"{LAUNCHER_VARIABLE} {wanted!r}: must be one of {', '.join((*_VARIABLES, NONE))}")
    found = {launcher: launch for launcher in _VARIABLES if (launch := _launch_by(launcher, environ)) is not None}
    if wanted and wanted != NONE:
        if wanted not in found:
            ranks = [rank for rank, _ in _VARIABLES[wanted]] + [PMIX_VARIABLE] * (wanted == MPI)
            names = " or ".join(ranks)
            raise InputError(f"{LAUNCHER_VARIABLE} {wanted!r}: must come with {names}")
        return found[wanted]
    if wanted == NONE or not found:
        return Launch(NONE, 0, 1)
    if len(found) > 1 and MPI in found and not found[MPI].n_ranks:
        del found[MPI]
    first = found.get(MPI) or found.get(TORCHRUN) or found[SLURM]
    other = found.get(TORCHRUN)
    if other is not None and (first.rank, first.n_ranks) != (other.rank, other.n_ranks):
        raise InputError(
            f"{first.variable} says rank {first.rank} of {first.n_ranks}, {other.variable} rank {other.rank} of "
            f"{other.n_ranks}: must agree, or {LAUNCHER_VARIABLE} must say which counts"
        )
    return first


def _launch_by(launcher: str, environ: Mapping[str, str]) -> Launch | None:
    for rank_name, size_name in _VARIABLES[launcher]:
        if launcher == SLURM and environ.get(rank_name, "0") == "0" and size_name not in environ:
            # A batch script has the first alone, and is no task of a step.
            continue
        present = [name for name in (rank_name, size_name) if name in environ]
        if not present:
            continue
        if len(present) == 1:
            missing = size_name if rank_name in environ else rank_name
            raise InputError(f"{present[0]} is set: {missing} must be, too")
        rank, n_ranks = (_number(name, environ[name]) for name in (rank_name, size_name))
        if rank >= n_ranks:
            raise InputError(f"{rank_name} {rank}: must be below {size_name} {n_ranks}")
        return Launch(launcher, rank, n_ranks, size_name)
    if launcher == MPI and PMIX_VARIABLE in environ:
        return Launch(MPI, _number(PMIX_VARIABLE, environ[PMIX_VARIABLE]), 0, PMIX_VARIABLE)
    return None


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name} {text!r}: must be a number from 0")
    return int(text)


def check_count(launch: Launch, rank: int, n_ranks: int) -> None:
    """Raises InputError if MPI has started another number of ranks than the launcher's variables say, or if they say
    another rank and no number."""
    if launch.variable == PMIX_VARIABLE and launch.rank != rank:
        raise InputError(
            f"{PMIX_VARIABLE} says rank {launch.rank}, MPI rank {rank} of {n_ranks}: must be started with the launcher "
            "of the MPI that mpi4py loads"
        )
    if launch.launcher != NONE and launch.n_ranks and launch.n_ranks != n_ranks:
        raise InputError(
            f"{launch.variable} says {launch.n_ranks} ranks, MPI has started {n_ranks}: must be started with the "
            "mpirun of the MPI that mpi4py loads"
        )


def meet_of(launch: Launch, environ: Mapping[str, str], number: int, *, timeout_s: float = MEET_S) -> Meet:
    """How the ranks of a job meet for the `number`-th time.

    Over MPI; in a file of this user if all ranks are on one host, or in the folder that a Slurm job is in
    (OPTCC_RENDEZVOUS_DIR, which all hosts share, if it is set); else over torchrun's store, which needs torch.
    Raises EnvironmentMissing without MPI or torch, InputError if MPI has started another number of ranks.
    """
    if launch.launcher == MPI:
        comm = load_mpi().COMM_WORLD
        check_count(launch, comm.Get_rank(), comm.Get_size())
        return over_mpi(comm, timeout_s=timeout_s)
    if launch.launcher == NONE:
        return alone()
    folder = environ.get(FOLDER_VARIABLE, "")
    if launch.launcher == SLURM:
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        path = Path(folder or ".") / f".optcc-slurm-{job}-{number}"
        return in_file(path, launch.rank, launch.n_ranks, timeout_s=timeout_s)
    if folder or _is_one_host(environ):
        path = Path(folder or tempfile.gettempdir()) / f".optcc-{os.getuid()}-{_torch_job(environ)}-{number}"
        return in_file(path, launch.rank, launch.n_ranks, timeout_s=timeout_s)
    store = _torch_store(environ, launch, timeout_s)
    return over_store(store, launch.rank, launch.n_ranks, name=str(number))


def _is_one_host(environ: Mapping[str, str]) -> bool:
    local = environ.get("LOCAL_WORLD_SIZE")
    if local is not None:
        return local == environ["WORLD_SIZE"]
    address = environ.get("MASTER_ADDR", "localhost")
    return address == "localhost" or address.startswith("127.")


def _torch_job(environ: Mapping[str, str]) -> str:
    """What tells this launch from others on the host: the port of its store, its identity, and its restarts."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    said = "\0".join(environ.get(name, "") for name in names)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _torch_store(environ: Mapping[str, str], launch: Launch, timeout_s: float) -> Any:
    """torchrun's store, or one that rank 0 opens where no agent has."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise InputError(f"{launch.variable} is set: {name} must be, too")
    try:
        from torch.distributed import PrefixStore, TCPStore
    except ImportError as error:
        raise EnvironmentMissing(
            f"ranks on several hosts under torchrun meet over its store, which needs torch ({error}); or set "
            f"{FOLDER_VARIABLE} to a folder that all hosts share"
        ) from error
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        environ["MASTER_ADDR"],
        _number("MASTER_PORT", environ["MASTER_PORT"]),
        launch.n_ranks,
        is_master=launch.rank == 0 and not has_agent,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"optcc/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
