"""Shares for NICs that reach only their own rail: near the certified bound where pooled ones are twice as slow."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.collective import Collective
from optcc.planner import build
from optcc.rail_shares import RailShares, shares_by_rail, usable
from optcc.runtime.striping import PARTS, divide
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import certified_bound, explain_if_pooled
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import verify_plan

SIZE_BYTES = 16 << 20


def hosts(*nics: str) -> Topology:
    """Hosts with a NIC on each rail: `100:50` MB/s out and in, `100` for both, `-` where it has failed.

    The cost of a message is what eight ranks on two cores were measured to have.
    """
    servers = []
    for number, host in enumerate(nics):
        rates = [each.partition(":")[::2] for each in host.split()]
        servers.append(
            Server(
                f"h{number}",
                1,
                tuple(
                    Nic(rail, Fraction(1), Fraction(1), failed=True)
                    if out == "-"
                    else Nic(rail, Fraction(out) * 10**6, Fraction(in_ or out) * 10**6)
                    for rail, (out, in_) in enumerate(rates)
                ),
            )
        )
    return Topology(tuple(servers), latency_s=Fraction(200, 10**6), overhead_s=Fraction(500, 10**6))


FAR_FROM_POOLED = {
    # Two of twenty random fabrics on which plans for pooled NICs took 2.18 and 1.64 of the bound.
    "random 6": hosts("25 - -", "25 25 -", "4:14 22:23 -", "25 - -", "16:19 - -", "25 - -", "25 25 -"),
    "random 17": hosts(
        "25 23:9 -", "25 22:21 -", "25 25 -", "25 15.5:6.75 -", "25 - -", "22.5:15 25 25", "6.4:19 12.5:14.5 25"
    ),
    "a NIC that one other host reaches": hosts("10 30", "10 30", "10 -", "10 -", "10 -"),
}
OVER_BOUND = {"random 6": 1.02, "random 17": 1.13, "a NIC that one other host reaches": 1.13}
"""What the busiest NIC may take, over the bound: the shares of the last two reach 1.11 at best."""
POOLED = {
    "alike": hosts("10 10", "10 10", "10 10"),
    "one NIC at half": hosts("10 10", "10 10", "10 5", "10 10", "10 10"),
    "one NIC down": hosts("10 10", "10 10", "10 -", "10 10", "10 10"),
    "two hosts": hosts("10 10", "10 -"),
    "no rail in common": hosts("10 - -", "- 10 -", "- - 10"),
}


def bound_s(topology: Topology) -> float:
    """The certified bound, rail by rail."""
    wanted = Collective("allreduce", topology.n_ranks)
    by_rail = replace(topology, rail_only=True)
    told = explain_if_pooled(by_rail, SIZE_BYTES, wanted)
    return float(certified_bound(by_rail, SIZE_BYTES, wanted, told)[0].seconds)


def over_rails_s(carried: dict[tuple[int, int], int], topology: Topology) -> float:
    """When the busiest NIC is done if the run-time stripes what the pairs carry."""
    nics = [{nic.rail: nic for nic in server.nics if not nic.failed} for server in topology.servers]
    order = [sorted(own) for own in nics]
    joined = {
        (src, dst): [(order[src].index(rail), order[dst].index(rail)) for rail in order[src] if rail in nics[dst]]
        for src, dst in carried
    }
    rates = [[(int(own[rail].out), int(own[rail].in_)) for rail in order[host]] for host, own in enumerate(nics)]
    parts = divide(carried, joined, rates)
    busy = {(host, nic, way): 0.0 for host, own in enumerate(rates) for nic in range(len(own)) for way in (0, 1)}
    for (src, dst), shares in parts.items():
        for share, (mine, theirs) in zip(shares, joined[src, dst], strict=True):
            sent = carried[src, dst] * share / PARTS
            busy[src, mine, 0] += sent / rates[src][mine][0]
            busy[dst, theirs, 1] += sent / rates[dst][theirs][1]
    return max(busy.values())


def carried_by(topology: Topology, *, by_rail: bool) -> dict[tuple[int, int], int]:
    """Bytes from rank to rank in the plan that `auto` makes, which is proved."""
    plan = build("auto", topology, SIZE_BYTES, ports="fair", slots=2, by_rail=by_rail).plan
    assert verify_plan(plan).verdict == PROVED
    transfers = plan.transfers
    carried: dict[tuple[int, int], int] = {}
    for src, dst, n_bytes in zip(
        *(each.tolist() for each in (transfers.src, transfers.dst, transfers.bytes)), strict=True
    ):
        if src != dst:
            carried[src, dst] = carried.get((src, dst), 0) + n_bytes
    return carried


@pytest.mark.parametrize("name", FAR_FROM_POOLED)
def test_a_plan_by_rail_loads_no_nic_much_longer_than_the_bound(name: str) -> None:
    topology = FAR_FROM_POOLED[name]
    least_s = bound_s(topology)
    by_rail_s = over_rails_s(carried_by(topology, by_rail=True), topology)
    pooled_s = over_rails_s(carried_by(topology, by_rail=False), topology)
    assert by_rail_s < OVER_BOUND[name] * least_s
    assert pooled_s > 1.1 * by_rail_s


@pytest.mark.parametrize("name", FAR_FROM_POOLED)
def test_the_predicted_time_is_that_of_the_busiest_nic_and_of_filling_the_pipeline(name: str) -> None:
    topology = FAR_FROM_POOLED[name]
    found = shares_by_rail(topology)
    assert isinstance(found, RailShares) and sum(each.weight for each in found.shares) == 1
    assert all(len(server.nics) == 1 for server in found.usable.servers)
    assert (found.usable.latency_s, found.usable.overhead_s) == (topology.latency_s, topology.overhead_s)
    built = build("auto", topology, SIZE_BYTES, ports="fair", slots=2, by_rail=True)
    assert built.choice is not None and built.choice.taken.name == "shares" and built.choice.taken.seconds is not None
    busiest_s = over_rails_s(carried_by(topology, by_rail=True), topology)
    assert 0.98 * busiest_s < built.choice.taken.seconds < 1.2 * busiest_s


@pytest.mark.parametrize("name", POOLED)
def test_nics_are_pooled_where_that_is_as_good(name: str) -> None:
    assert shares_by_rail(POOLED[name]) is None
    assert usable(POOLED[name]) is POOLED[name]


def test_more_servers_than_a_program_is_made_for_are_pooled() -> None:
    assert shares_by_rail(hosts("10 10", "10 10", *["10 -"] * 31)) is None


def test_short_messages_are_not_forced_into_shares() -> None:
    built = build("auto", FAR_FROM_POOLED["random 6"], 256, ports="fair", slots=2, by_rail=True)
    assert built.choice is not None and {each.name for each in built.choice.candidates} == {
        "shares",
        "recursive-doubling",
    }


@pytest.mark.parametrize("slow", ["12.4 6.2", "12.4 -"])
def test_eight_hosts_of_which_one_has_a_slow_nic_are_planned_within_five_per_cent_of_the_bound(slow: str) -> None:
    """With the cost of a message that eight ranks on two cores have."""
    topology = hosts(*["12.4 12.4"] * 3, slow, *["12.4 12.4"] * 4)
    size_bytes = 64 << 20
    built = build("auto", topology, size_bytes, ports="fair", slots=2, by_rail=True)
    assert built.choice is not None and built.choice.taken.seconds is not None
    assert built.choice.taken.seconds < 1.05 * float(collective_bound(topology, size_bytes).seconds)
