"""`init`: a communicator for the ranks of a job, however it was launched.

    with optcc.init() as comm:
        total = comm.all_reduce(np.ones(1 << 20, np.float32))

The same program runs under mpirun, torchrun and srun, and alone as a job of one rank (`optcc.runtime.launchers`).
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Literal, overload

from optcc.errors import InputError
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.device_paths import choose_path
from optcc.runtime.engine import DEADLINE_S
from optcc.runtime.launchers import find_launch, meet_of
from optcc.runtime.nics import RATES_VARIABLE, nics_of
from optcc.runtime.partition import Partition, partition_s_of
from optcc.runtime.probe import hosts_of, probe
from optcc.runtime.rendezvous import Meet
from optcc.runtime.slices import SLICE_S
from optcc.runtime.surviving import SurvivingCommunicator
from optcc.runtime.transports.tcp import TcpTransport, open_tcp
from optcc.timing import Model
from optcc.topology import Topology
from optcc.units import show_rate

WRONG_SHARE = 0.1
"""Rates that differ from the declared ones by a larger share are not what was declared."""
LATENCY_S = Fraction(200, 10**6)
"""What a message of this run-time is taken to cost where it is not measured."""
MEMORY = Fraction(5 * 10**9)
"""What ranks of one host exchange by its memory, bytes/s: on two cores. It only has to tell more bytes from fewer."""
_numbers = itertools.count()

logger = logging.getLogger("optcc.nics")
devices = logging.getLogger("optcc.devices")


@overload
def init(
    topology: Topology | str | None = None,
    *,
    meet: Meet | None = None,
    measure: bool = True,
    schedules: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    slice_s: float = SLICE_S,
    device_id: int | None = None,
    authenticate: bool | None = None,
    partition: Literal["fail", "wait"] | None = None,
    partition_s: float | None = None,
    shared_memory: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Communicator: ...


@overload
def init(
    topology: Topology | str | None = None,
    *,
    meet: Meet | None = None,
    measure: bool = True,
    schedules: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    slice_s: float = SLICE_S,
    device_id: int | None = None,
    authenticate: bool | None = None,
    partition: Literal["without"],
    partition_s: float | None = None,
    shared_memory: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> SurvivingCommunicator: ...


def init(
    topology: Topology | str | None = None,
    *,
    meet: Meet | None = None,
    measure: bool = True,
    schedules: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    slice_s: float = SLICE_S,
    device_id: int | None = None,
    authenticate: bool | None = None,
    partition: Partition | None = None,
    partition_s: float | None = None,
    shared_memory: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Communicator | SurvivingCommunicator:
    """A communicator over TCP and all NICs that OPTCC_SOCKET_IFNAME leaves; collective.

    The ranks meet as their launcher lets them, or by `meet` (`optcc.runtime.rendezvous`). The NICs are measured, unless
    `measure` is False or OPTCC_NIC_RATES declares their rates: messages are striped, and plans made, for what they
    carry. A `topology`, or its text, counts unless that is something else. `schedules` see `optcc.planner.Planner`; a
    collective that takes longer than `deadline_s` seconds fails. `slice_s` see `optcc.Communicator`.
    `device_id`, this rank's GPU, given at every rank or at none: what collectives of arrays there exchange goes from
    GPU to GPU where it can (docs/devices.md); without it, it is staged in the host's memory.
    `authenticate`, at every rank or at none, puts an authentication tag on every frame between ranks; None leaves that
    to OPTCC_AUTHENTICATE (docs/transports.md).
    `shared_memory`: ranks of one host exchange what is in the host's memory by memory that they share, if all of them
    can and none says False (docs/transports.md).

    `partition`, the same at every rank, says what becomes of the job if a host has no live rail left: "fail" ends it in
    AllRailsFailed after a few seconds; with "wait" collectives stand still until the host has a rail again, and go on
    where they were. If that takes longer than `partition_s` seconds (60 unless given) the job ends as with "fail".
    Deadlines are later by as much. None leaves the two to OPTCC_PARTITION and OPTCC_PARTITION_S, where "fail" is the
    default. With "without" AllReduces go on without the host, which may be merged again within `partition_s`; what is
    returned then is a `SurvivingCommunicator`, which no page of `optcc status` shows (docs/failover.md).

    Raises InputError for variables of launchers that contradict each other or the number of ranks that MPI has started,
    a topology of another number of ranks, or a partition policy that cannot be, EnvironmentMissing without a NIC,
    what the launcher needs, or the GPU that is named, DeadlineExceeded if some rank does not come.
    """
    if isinstance(topology, str):
        topology = Topology.parse(topology)
    if meet is None:
        meet = meet_of(find_launch(environ), environ, next(_numbers))
    transport = open_tcp(
        *(meet, nics_of(environ, may_be_down=measure), environ),
        authenticate=authenticate,
        partition=partition,
        partition_s=partition_s,
        shared_memory=shared_memory,
    )
    try:
        n_ranks = transport.n_ranks
        if topology is not None and topology.n_ranks != n_ranks:
            raise InputError(f"topology of {topology.n_ranks} ranks: must have {n_ranks}, as the job has")
        measured = measure_nics(transport, environ) if measure else None
        topology = agreed_topology(topology, measured, transport.rank) or assumed_topology(
            n_ranks, one_host=is_one_host(transport)
        )
        keep_to_own_nics(transport, topology)
        planner = Planner(topology, schedules=schedules, ports=tcp_ports(topology), by_rail=True)
        remeasures = measured is not None
        if device_id is not None:
            devices.info("optcc: arrays on a GPU: %s", choose_path(transport, device_id))
        if partition == "without":
            return SurvivingCommunicator(
                *(transport, planner),
                deadline_s=deadline_s,
                remeasures=remeasures,
                slice_s=slice_s,
                partition_s=partition_s_of(environ, partition, partition_s),
            )
        comm = Communicator(transport, planner, deadline_s=deadline_s, remeasures=remeasures, slice_s=slice_s)
        comm.observe(environ)
        return comm
    except BaseException:
        transport.release()
        raise


def measure_nics(transport: TcpTransport, environ: Mapping[str, str]) -> Topology | None:
    """Measures the NICs and what a message costs, and stripes messages by it; collective. What was found, or None.

    Nothing is measured if the rates of NICs are declared (OPTCC_NIC_RATES), or if no NIC is between the ranks. Ranks of
    one host share its NICs; nothing is returned unless they follow one another. What they exchange inside is not
    measured.
    """
    is_local = is_one_host(transport) or all(nic[1].startswith("127.") for nics in transport.nics for nic in nics)
    if is_local or environ.get(RATES_VARIABLE):
        return None
    measured = probe(transport)
    transport.set_rates(measured.usable)
    if list(measured.hosts) != sorted(measured.hosts):
        return None
    topology = measured.topology()
    transport.start_from(measured.shares)
    return topology


def is_one_host(transport: TcpTransport) -> bool:
    """Whether all ranks are on one host."""
    return len(set(hosts_of(transport.nics))) == 1


def keep_to_own_nics(transport: TcpTransport, topology: Topology | None) -> None:
    """Lanes go over the NICs of their GPUs, where they belong to GPUs in the topology that plans are made for."""
    if topology is not None and topology.wired is not None and topology.graph is None:
        transport.keep_to_own_nics()


def agreed_topology(declared: Topology | None, measured: Topology | None, rank: int = 0) -> Topology | None:
    """What plans are made for: the declared topology if the hosts carry that, with the cost of a message as measured.

    If they carry something else, rank 0 warns. What a declared host exchanges inside is believed. Where a NIC is absent
    that may come back, a topology that does not have it says too little.

    >>> declared, measured = Topology.parse("2@50MB/s"), Topology.parse("2@49MB/s")
    >>> agreed_topology(declared, measured) == declared, agreed_topology(None, measured) is measured
    (True, True)
    """
    if declared is None or measured is None:
        return declared or measured
    wrong = differences(declared, measured)
    if not wrong and knows_nics(declared, measured):
        return replace(declared, overhead_s=measured.overhead_s)
    if wrong and rank == 0:
        logger.warning("optcc: topology: %s: plans are for what was measured", "; ".join(wrong))
    return with_insides(measured, declared)


def knows_nics(declared: Topology, measured: Topology) -> bool:
    """Whether a declared topology has the NICs of each server of which one was found to carry nothing."""
    if len(declared.servers) != len(measured.servers):
        return not any(nic.failed for server in measured.servers for nic in server.nics)
    return all(
        len(was.nics) == len(found.nics) or not any(nic.failed for nic in found.nics)
        for was, found in zip(declared.servers, measured.servers, strict=True)
    )


def assumed_topology(n_ranks: int, latency_s: Fraction = LATENCY_S, *, one_host: bool = False) -> Topology:
    """What plans are made for where nothing is declared and nothing can be measured: equal ranks, and `latency_s` is
    also what a message costs a rank's processor. If all ranks are on `one_host` they share its memory.

    >>> topology = assumed_topology(4, one_host=True)
    >>> topology.n_ranks, tcp_ports(topology), topology.memory
    (4, 'fair', Fraction(5000000000, 1))
    """
    equal = with_message_cost(Topology.parse(f"{n_ranks}@1GB/s").with_latency(latency_s))
    return replace(equal, memory=MEMORY) if one_host else equal


def with_message_cost(topology: Topology) -> Topology:
    """The topology with its latency as the processor time of a rank for each message, unless it says what that is.

    >>> topology = Topology.parse("2@1GB/s").with_latency(Fraction(1, 5000))
    >>> [float(with_message_cost(replace(topology, overhead_s=cost)).overhead_s) for cost in (Fraction(0), Fraction(1))]
    [0.0002, 1.0]
    """
    return topology if topology.overhead_s else replace(topology, overhead_s=topology.latency_s)


def with_insides(measured: Topology, declared: Topology) -> Topology:
    """The measured hosts with the fabrics that are declared, if any are, and if those hosts have as many ranks each.

    >>> declared = Topology.parse("2x2@50MB/s+1GB/s")
    >>> float(with_insides(Topology.parse("2x2@20MB/s"), declared).servers[0].fabric)
    1000000000.0
    """
    pairs = list(zip(measured.servers, declared.servers, strict=False))
    if any(new.gpus != old.gpus for new, old in pairs) or all(old.fabric in (None, new.fabric) for new, old in pairs):
        return measured
    servers = tuple(replace(new, fabric=old.fabric or new.fabric) for new, old in pairs)
    return replace(measured, servers=servers, text="")


def differences(declared: Topology, measured: Topology, share: float = WRONG_SHARE) -> list[str]:
    """What the hosts carry otherwise than declared, by more than `share`; nothing for other hosts or ranks.

    >>> differences(Topology.parse("2@50MB/s"), Topology.parse("2@50MB/s,1=25MB/s:49MB/s"))
    ['h1 sends 25MB/s, not 50MB/s']
    """
    if [server.gpus for server in declared.servers] != [server.gpus for server in measured.servers]:
        return []
    return [
        f"{old.name} {verb} {show_rate(is_)}, not {show_rate(was)}"
        for old, new in zip(declared.servers, measured.servers, strict=True)
        for verb, was, is_ in (("sends", old.out, new.out), ("receives", old.in_, new.in_))
        if abs(is_ - was) > Fraction(share) * was
    ]


def tcp_ports(topology: Topology | None) -> Model:
    """Fair ports, which the flows of TCP share, if it is known what a message costs; else exclusive ones.

    Plans for fair ports gain by more segments, up to more messages than a processor keeps up with.
    """
    return "fair" if topology is not None and topology.overhead_s > 0 else "exclusive"
