"""A bound with a certificate, whichever way it is found: a closed form, or a linear program."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from functools import lru_cache

from optcc.collective import Collective
from optcc.errors import InputError, SolverError, SolverUnknown, TopologyError
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Certificate
from optcc.verify.bounds.closed_form_certificates import certify
from optcc.verify.bounds.closed_forms import FABRIC, Bound, collective_bound, require_pooled
from optcc.verify.bounds.exchange import ExchangeCertificate, is_exchange
from optcc.verify.bounds.exchange_bound import exchange_bound
from optcc.verify.bounds.explain import Explanation, explain
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.packing import pack
from optcc.verify.bounds.solvers import DEFAULT_SOLVER, SOLVERS, MakeSolver


def explain_if_pooled(
    topology: Topology, size_bytes: int, wanted: Collective, segments: int | None = None
) -> Explanation | None:
    """What the closed forms say; None where servers cannot be treated as pooled endpoints.

    Raises InputError for a size that cannot be.
    """
    collective_bound(topology.healthy(), size_bytes, wanted.name, wanted.root)
    try:
        require_pooled(topology)
    except TopologyError:
        return None
    return explain(topology, size_bytes, wanted.name, wanted.root, segments=segments)


def least_seconds(topology: Topology, size_bytes: int, wanted: Collective, *, time_limit_s: float = 60.0) -> Fraction:
    """The bound on `wanted`, fabrics included, with which every command compares: that of `optcc bound`, in seconds.

    The closed form where it says all, else the linear program.

    >>> least_seconds(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000, Collective("allreduce", 4))
    Fraction(4, 1)

    Raises InputError for a negative size, TopologyError if some servers cannot reach others, `BoundUnknown`, with the
    best bound so far, if the time is over.
    """
    if is_exchange(wanted) and not is_closed_for_blocks(topology):
        if size_bytes < 0:
            raise InputError(f"size {size_bytes}: must not be negative")
        return size_bytes * _least_of_blocks(topology, wanted, time_limit_s)
    if is_exchange(wanted) or wanted.cells or is_closed(topology):
        return collective_bound(topology, size_bytes, wanted).seconds
    return certified_bound(topology, size_bytes, wanted, None, time_limit_s=time_limit_s)[0].seconds


@lru_cache(maxsize=64)
def _least_of_blocks(topology: Topology, wanted: Collective, time_limit_s: float) -> Fraction:
    """The bound on an exchange by linear program, in seconds per byte: for all sizes of a benchmark at once."""
    return exchange_bound(topology, wanted, 1, time_limit_s=time_limit_s)[0].seconds


def is_closed_for_blocks(topology: Topology) -> bool:
    """False if the bound on an exchange needs more than the ports of servers and pods: fabrics of finite rate, and
    where `is_closed` is false."""
    return is_closed(topology) and all(server.fabric is None or server.gpus == 1 for server in topology.servers)


def is_closed(topology: Topology) -> bool:
    """False if only the linear program gives the bound of a collective of trees: rails that cannot be pooled, or
    fabrics behind the uplinks of pods."""
    try:
        require_pooled(topology)
    except TopologyError:
        return False
    if not topology.pods:
        return True
    rates = {(nic.out, nic.in_) for server in topology.servers for nic in server.nics if not nic.failed}
    if topology.rail_only and len(rates) > 1:
        return False
    return all(server.fabric is None or server.gpus == 1 for server in topology.servers)


def certified_bound(
    topology: Topology,
    size_bytes: int,
    wanted: Collective,
    told: Explanation | None,
    *,
    solver_name: str | None = None,
    time_limit_s: float = 60.0,
    achievable: bool = False,
) -> tuple[Certificate, str | None]:
    """The certified bound, and which solver solved a linear program for it, if one did.

    The closed form `told` has a certificate of its own, except where fabrics decide. Where it is not all that is
    known (`is_closed`), and without it, the linear program decides. With `solver_name`, one of
    `optcc.verify.bounds.solvers.SOLVERS`, the linear program is solved in any case: it must not certify less than the
    closed form. With `achievable` the certificate has a packing of trees, too, if one is found.

    Raises `BoundUnknown`, with the best bound so far, if the time is over; SolverError if the two contradict.
    """
    closed = told is not None and is_closed(topology)
    if told is not None and closed and not achievable and solver_name is None:
        with suppress(SolverError):
            return certify(told.bound, topology, wanted.root), None
    name = solver_name or DEFAULT_SOLVER
    certificate = lp_bound(
        topology,
        wanted,
        size_bytes,
        time_limit_s=time_limit_s,
        primal=achievable or told is None,
        fabric=not closed or (told is not None and told.bound.model.startswith(FABRIC)),
        symmetric=not achievable,
        solver=SOLVERS[name],
    ).certificate
    if told is not None and (solver_name or not achievable) and certificate.seconds < told.bound.seconds:
        raise SolverError(
            f"linear program: {name} and its certificate say {certificate.seconds} s: "
            f"must not be less than the closed form, {told.bound.seconds} s"
        )
    return (_with_trees(certificate, SOLVERS[name]) if achievable else certificate), name


def certified_exchange(
    topology: Topology,
    size_bytes: int,
    wanted: Collective,
    *,
    solver_name: str | None = None,
    time_limit_s: float = 60.0,
) -> tuple[ExchangeCertificate, Bound | None, str | None]:
    """The certified bound on an exchange, the closed form where there is one, and which solver solved a linear program.

    With `solver_name` the linear program is solved in any case. Raises what `exchange_bound` raises, and SolverError if
    the certificate and the closed form contradict.
    """
    solver = None if solver_name is None else SOLVERS[solver_name]
    certificate, solved = exchange_bound(topology, wanted, size_bytes, time_limit_s=time_limit_s, solver=solver)
    solved_by = (solver_name or DEFAULT_SOLVER) if solved else None
    if not is_closed_for_blocks(topology):
        return certificate, None, solved_by
    told = collective_bound(topology, size_bytes, wanted)
    if certificate.seconds != told.seconds:
        raise SolverError(f"bound {told.seconds} s: its certificate gives {certificate.seconds} s")
    return certificate, told, solved_by


def _with_trees(certificate: Certificate, solver: MakeSolver) -> Certificate:
    """The certificate with every tree of its packing, where they can be listed; else with the loads alone."""
    try:
        return pack(certificate, solver=solver)
    except SolverUnknown:
        return certificate
