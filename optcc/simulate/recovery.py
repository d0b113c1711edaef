"""Recovery from faults: converts a fault plan and a policy to port rates over time.

    policy    after a NIC goes down
    wait      no action: every message of the server has a stripe on that NIC, so the port stops until the NIC is up
    migrate   the port stops for detection and migration, then continues at the total rate of the surviving NICs
              (R2CCL's hot repair: the same plan, less bandwidth); a NIC that comes up is used again at once
    replan    as migrate; in addition, after detection and agreement, the segments that have not started run under a
              new plan for the remaining bandwidth; each port switches to it when it has finished the old plan

A NIC that loses a share of its rate reduces the port's total at once, under any policy. When a NIC goes down, bytes
sent but not acknowledged are retransmitted: of the transfer that the port is serving (under fair ports: of the first
transfer of each pair of servers), up to `unacknowledged_bytes` of the bytes sent. The port of the server with the fault
carries them again; under fifo the other port does not, since the network has buffered what the other end sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column
from optcc.errors import InputError
from optcc.faults import Direction, Fault, FaultPlan
from optcc.plan import Plan
from optcc.simulate.ports import PortMap
from optcc.simulate.tick_clock import Change
from optcc.topology import Nic, Topology
from optcc.transfers import Transfers

PolicyName = Literal["wait", "migrate", "replan"]
NewPlan = Callable[[Topology, int], "Plan | Transfers"]
WAYS: tuple[Direction, Direction] = ("out", "in")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a run recovers, and the cost of recovery. Times in seconds.

    `new_plan`, for replan, makes a plan for a topology and a number of bytes: the message size of the segments that
    have not started.

    Raises InputError for an unknown name, a negative cost, and replan without `new_plan`.
    """

    name: PolicyName = "migrate"
    detection_s: Fraction = Fraction(0)
    migration_s: Fraction = Fraction(0)
    agreement_s: Fraction = Fraction(0)
    unacknowledged_bytes: int = 0
    new_plan: NewPlan | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyName):
            raise InputError(f"policy {self.name!r}: must be one of {', '.join(get_args(PolicyName))}")
        for label, value in (
            ("detection", self.detection_s),
            ("migration", self.migration_s),
            ("agreement", self.agreement_s),
            ("unacknowledged bytes", self.unacknowledged_bytes),
        ):
            if value < 0:
                raise InputError(f"policy {self.name}: {label} {value}: must not be negative")
        if (self.new_plan is None) != (self.name != "replan"):
            raise InputError(f"policy {self.name}: new_plan must be given for replan, and only for it")

    def still_until(self, fault: Fault) -> Fraction | None:
        """When a port that `fault` stops continues; None: never."""
        if fault.share > 0:
            return fault.at_s
        if self.name == "wait":
            return fault.until_s
        over = fault.at_s + self.detection_s + self.migration_s
        return over if fault.until_s is None else min(over, fault.until_s)

    def switches(self, faults: FaultPlan) -> tuple[Fraction, ...]:
        """When a run switches to another plan, in order of time; empty unless the policy is replan."""
        if self.new_plan is None:
            return ()
        return tuple(sorted({fault.at_s + self.detection_s + self.agreement_s for fault in faults}))


def port_changes(ports: PortMap, topology: Topology, faults: FaultPlan, policy: Policy) -> tuple[Change, ...]:
    """The rate changes of ports that `faults` cause, in order of time."""
    changes: list[Change] = []
    for server in sorted({fault.server for fault in faults}):
        for side, way in enumerate(WAYS):
            port = int(ports.server_port[server]) + side
            if ports.server_port[server] >= 0:
                everything = range(len(topology.servers[server].nics))
                changes += changes_of(port, server, everything, way, topology, faults, policy)
    return tuple(sorted(changes, key=lambda each: (each.at_s, each.port)))


def changes_of(
    port: int,
    server: int,
    numbers: Collection[int],
    way: Direction,
    topology: Topology,
    faults: FaultPlan,
    policy: Policy,
) -> list[Change]:
    """The changes of the rate of `port`, which is the total of the NICs `numbers` of a server in one direction."""
    mine = [fault for fault in faults if fault.server == server and fault.nic in numbers and fault.goes(way)]
    moments = {at for each in mine for at in (each.at_s, each.until_s, policy.still_until(each)) if at is not None}
    nics = {number: topology.servers[server].nics[number] for number in numbers}
    changes: list[Change] = []
    last = sum((_rate(nic, way) for nic in nics.values() if not nic.failed), Fraction(0))
    for at in sorted(moments):
        still = any(
            each.at_s <= at and (until is None or at < until) for each in mine for until in [policy.still_until(each)]
        )
        rate = Fraction(0)
        if not still:
            for number, nic in nics.items():
                rate += 0 if nic.failed else _rate(nic, way) * faults.share(server, number, way, at)
        lost = policy.unacknowledged_bytes * sum(each.at_s == at and each.share == 0 for each in mine)
        if rate != last or lost:
            changes.append(Change(at, port, rate, lost))
        last = rate
    return changes


def _rate(nic: Nic, way: Direction) -> Fraction:
    return nic.out if way == "out" else nic.in_


def opening(rates: Sequence[Fraction], changes: Sequence[Change], opens_s: Sequence[Fraction]) -> tuple[Change, ...]:
    """The changes of a run that starts at time 0 with all ports down; port q comes up at `opens_s[q]`.

    `changes` are those of the previous run, on the same clock; of changes before time 0 only the rate remains.
    """
    mine: list[Change] = []
    for port, (rate, opens) in enumerate(zip(rates, opens_s, strict=True)):
        own = [each for each in changes if each.port == port]
        for each in own:
            if each.at_s <= opens:
                rate = each.rate
        mine.append(Change(opens, port, rate))
        mine += [each for each in own if each.at_s > opens]
    return tuple(sorted(mine, key=lambda each: (each.at_s, each.port)))


def without(plan: Plan | Transfers, dropped: Column) -> Plan | Transfers:
    """`plan` without the transfers `dropped` and without the dependencies on them, direct or through them only."""
    transfers = plan.transfers if isinstance(plan, Plan) else plan
    n = len(transfers)
    kept = np.ones(n, dtype=np.bool_)
    kept[dropped] = False
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    columns: dict[str, Any] = {
        name: column(getattr(transfers, name)[kept])
        for name in ("src", "dst", "op", "src_offset", "dst_offset", "bytes", "segment", "stage", "line")
    }
    rest = replace(
        transfers,
        **columns,
        after=_chosen(transfers.after, kept, number),
        order=_chosen(transfers.order, kept, number),
    )
    if not isinstance(plan, Plan):
        return rest
    does = np.where(plan.recv_transfer >= 0, plan.recv_transfer, plan.send_transfer)
    stays = kept[does]
    place = np.where(stays, np.cumsum(stays) - 1, -1)
    counts = np.bincount(plan.instruction_lane[stays], minlength=len(plan.lanes))
    starts = column(np.concatenate(([0], np.cumsum(counts))))
    columns = {
        name: column(getattr(plan, name)[stays])
        for name in ("kind", "in_channel", "out_channel", "src_offset", "dst_offset", "bytes")
    }
    return replace(
        plan,
        transfers=rest,
        lanes=Lists(starts, column(np.arange(int(stays.sum())))),
        **columns,
        recv_transfer=column(np.where(plan.recv_transfer >= 0, number[plan.recv_transfer], -1)[stays]),
        send_transfer=column(np.where(plan.send_transfer >= 0, number[plan.send_transfer], -1)[stays]),
        after=_chosen(plan.after, stays, place),
    )


def _chosen(lists: Lists, kept: npt.NDArray[np.bool_], number: Column) -> Lists:
    """The lists of the kept owners, restricted to kept members, renumbered."""
    owner = np.repeat(np.arange(len(lists)), np.diff(lists.starts))
    stays = kept[owner] & kept[lists.values]
    counts = np.bincount(owner[stays], minlength=len(lists))[kept]
    return Lists(column(np.concatenate(([0], np.cumsum(counts)))), column(number[lists.values[stays]]))


def message_bytes(transfers: Transfers, which: Column) -> int:
    """Bytes of the message that the transfers `which` read or write, without scratch space."""
    firsts = np.concatenate((transfers.src_offset[which], transfers.dst_offset[which]))
    ends = np.minimum(firsts + np.tile(transfers.bytes[which], 2), transfers.size_bytes)
    order = np.argsort(firsts, kind="stable")
    firsts, ends = firsts[order], np.maximum.accumulate(ends[order])
    begins = np.maximum(firsts[1:], ends[:-1])
    return int(max(0, ends[0] - firsts[0]) + np.maximum(ends[1:] - begins, 0).sum()) if len(firsts) else 0
