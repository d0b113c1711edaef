"""All checks over one system."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from optcc.runtime.doctor.cpu import check_cpu
from optcc.runtime.doctor.finding import Finding, Need
from optcc.runtime.doctor.gpu import check_gpu
from optcc.runtime.doctor.limits import check_limits
from optcc.runtime.doctor.mpi import check_mpi
from optcc.runtime.doctor.namespaces import check_namespaces
from optcc.runtime.doctor.nics import check_nics
from optcc.runtime.doctor.packages import check_cache, check_packages
from optcc.runtime.doctor.shared_memory import check_shared_memory
from optcc.runtime.doctor.system import System
from optcc.runtime.doctor.ucx import check_ucx

Check = Callable[[System, Need], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    check_nics,
    check_mpi,
    check_ucx,
    check_gpu,
    check_limits,
    check_shared_memory,
    check_namespaces,
    check_cpu,
    check_packages,
    check_cache,
)


def examine(system: System, need: Need | None = None) -> list[Finding]:
    """Every check over `system`, for a job of the size that `need` says."""
    need = need or Need()
    return [finding for check in CHECKS for finding in check(system, need)]
