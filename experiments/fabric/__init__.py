"""Emulated multi-NIC hosts: network namespaces, one shaped link a NIC, one bridge a rail, and MPI across them.

    host i                 namespace optcc-NAME-h{i}, host name h{i}
      eth{j}               10.{100+j}.0.{i+1}/24, NIC j; a token bucket on this end is its send rate
      ctl                  10.99.0.{i+1}/24, unshaped, for start-up and out-of-band messages only
    the fabric             namespace optcc-NAME-core
      rail{j}              bridge of rail j with the ports h{i}e{j}; a token bucket on a port is a receive rate
      ctl                  bridge of the control network with the ports h{i}c

Every pair of interfaces is made inside these namespaces, so nothing of a fabric is ever seen in the root namespace, and
two fabrics may use the same addresses side by side. What is declared (the spec, the rates of now, the failures) is in
`/run/optcc/NAME/state.json`, replaced atomically; `Fabric.status` holds it against what the kernel says.

    with Fabric.up(FabricSpec.parse("4x2@200Mbit/s", name="trial")) as fabric:
        fabric.set_rate("h3", NicRates.parse("100Mbit/s"))
        fabric.run(["python", "allreduce.py"])

Rates are exact to 0.3 % on a quiet machine: payload takes 1.0074 times bytes / rate, the headers at an MTU of 9000.
Linux with iproute2, as root; nftables for blackholes; Open MPI 5 for `Fabric.run`.

`spec` is what a fabric is to be, `scripts` the text that makes it, `state` what is declared, `status` what the kernel
says, `lifecycle` the `Fabric` itself; `programs`, `processes` and `mpi` are what it is made with.
"""

from __future__ import annotations

from optcc.experiments.fabric.lifecycle import RUN_ROOT, RUN_TIMEOUT_S, Fabric, fabrics
from optcc.experiments.fabric.mpi import (
    LOCAL_JOB,
    exported_variables,
    find_mpirun,
    launch_agent,
    mpirun_arguments,
    run_local_job,
)
from optcc.experiments.fabric.programs import can_make_namespaces
from optcc.experiments.fabric.scripts import (
    WIRE_OVERHEAD,
    blackhole_rules,
    core_batch,
    core_port,
    core_shapers,
    host_batch,
    host_shapers,
    namespaces_of,
    no_blackhole_rules,
    shaper_line,
)
from optcc.experiments.fabric.spec import (
    FabricSpec,
    NicRates,
    NicTarget,
    check_name,
    control_address,
    core_namespace,
    exact_rate,
    host_namespace,
    nic_address,
)
from optcc.experiments.fabric.state import FAILURES, FabricState, NicState
from optcc.experiments.fabric.status import FabricStatus, HostStatus

__all__ = [
    "FAILURES",
    "LOCAL_JOB",
    "RUN_ROOT",
    "RUN_TIMEOUT_S",
    "WIRE_OVERHEAD",
    "Fabric",
    "FabricSpec",
    "FabricState",
    "FabricStatus",
    "HostStatus",
    "NicRates",
    "NicState",
    "NicTarget",
    "blackhole_rules",
    "can_make_namespaces",
    "check_name",
    "control_address",
    "core_batch",
    "core_namespace",
    "core_port",
    "core_shapers",
    "exact_rate",
    "exported_variables",
    "fabrics",
    "find_mpirun",
    "host_batch",
    "host_namespace",
    "host_shapers",
    "launch_agent",
    "mpirun_arguments",
    "namespaces_of",
    "nic_address",
    "no_blackhole_rules",
    "run_local_job",
    "shaper_line",
]
