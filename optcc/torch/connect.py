"""How the ranks of a process group meet and connect, and for which topology its plans are made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from optcc.errors import InputError
from optcc.job import agreed_topology, assumed_topology, is_one_host, keep_to_own_nics, measure_nics, tcp_ports
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.nics import nics_of
from optcc.runtime.probe import Rates
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.rendezvous import Meet, over_store
from optcc.runtime.transports.tcp import open_tcp
from optcc.topology import Topology


@dataclass(frozen=True, slots=True)
class Options:
    """`pg_options` of a group: what `optcc.init` has for a job.

    `topology`, or its text, is that of the ranks of the group; `measure` says whether the NICs of the whole job are
    measured, unless OPTCC_NIC_RATES declares them; `schedules` see `optcc.Planner`.

    Without `replan` plans stay as they are when a NIC is lost or slow: messages avoid it, but each rank still carries
    its share. Then sums are made in one order whatever happens; with declared rates they are the same in every job.

    Ranks of one host exchange data by `shared_memory`, if all of them can and none says False.
    """

    topology: Topology | str | None = None
    measure: bool = True
    schedules: Mapping[str, str] | None = None
    replan: bool = True
    shared_memory: bool = True


@dataclass(frozen=True, slots=True)
class JobNetwork:
    """What was measured when the whole job met, for the groups of some of its ranks."""

    topology: Topology | None
    rates: Rates
    shares: Shares


class TimedStore:
    """A store of torch, for `over_store`: what it waits for, it waits for `timeout` at most."""

    def __init__(self, store: Any, timeout: timedelta) -> None:
        self._store, self._timeout = store, timeout

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        """The value of a key, once there is one."""
        self._store.wait([key], self._timeout)
        value: bytes = self._store.get(key)
        return value


def meet_in(store: Any, rank: int, n_ranks: int, timeout: timedelta) -> Meet:
    """The ranks of a group, in the store that torch has for it, for the first time or again: each counts its own."""
    time = store.add(f"optcc/times/{rank}", 1)
    return over_store(TimedStore(store, timeout), rank, n_ranks, name=f"optcc/{time}")


def connect(
    meet: Meet,
    ranks: Sequence[int],
    options: Options,
    network: JobNetwork | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Communicator, JobNetwork]:
    """A communicator of `ranks` of the job, and what is known of its network: `network`, if that is known, else what is
    measured now; collective. Raises as `optcc.init`."""
    topology = Topology.parse(options.topology) if isinstance(options.topology, str) else options.topology
    transport = open_tcp(
        meet, nics_of(environ, may_be_down=options.measure), environ, shared_memory=options.shared_memory
    )
    try:
        n_ranks = transport.n_ranks
        if topology is not None and topology.n_ranks != n_ranks:
            raise InputError(f"topology of {topology.n_ranks} ranks: must have {n_ranks}, as the group has")
        if network is None:
            measured = measure_nics(transport, environ) if options.measure else None
            rates = tuple(tuple((nic[3], nic[4]) for nic in nics) for nics in transport.nics)
            network = JobNetwork(measured, rates, transport.at_start)
        else:
            measured = None if network.topology is None else network.topology.of_ranks(ranks)
            transport.set_rates([network.rates[rank] for rank in ranks])
            transport.start_from(tuple(network.shares[rank] for rank in ranks))
        found = agreed_topology(topology, measured, transport.rank) or assumed_topology(
            n_ranks, one_host=is_one_host(transport)
        )
        keep_to_own_nics(transport, found)
        planner = Planner(found, schedules=options.schedules, ports=tcp_ports(found), by_rail=True)
        # Plans change where a `Planner` can be asked for others; a function of its type is asked for the first alone.
        plans = planner if options.replan else planner.__call__
        remeasures = measured is not None and options.replan
        # Collectives go on while the thread waits for other ones, so that no slice would be begun after the last.
        comm = Communicator(transport, plans, remeasures=remeasures, slice_s=math.inf)
        # Each group is a job of its own to `optcc status`.
        comm.observe(environ)
        return comm, network
    except BaseException:
        transport.close()
        raise
