"""Our values beside papers' claims, each a function of one record: the cells of `optcc.experiments.paper_claims`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.claims import ClaimValue
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.lost_nics import CLAIM_SERVERS, LostNics, LostNicsRecord
from optcc.experiments.peers_record import FOR_LATE, PeerComparison, PeerRun
from optcc.experiments.schedule_record import ScheduleRatios
from optcc.units import show_size

HALF, ONE_OF_EIGHT = Fraction(2), Fraction(8, 7)
"""Slowdowns of a straggler: half of its bandwidth is lost, one NIC of eight."""
SIZE_64M = 64 * 2**20


def spread(values: Iterable[float], unit: str, digits: int, where: str) -> ClaimValue:
    """The range of values, as text with a unit, and where they hold.

    >>> spread([2.0, 1.04], " %", 1, "p = 4").text, spread([1.0], " ms", 0, "").text
    ('1.0 to 2.0 %, p = 4', '1 ms')
    """
    found = list(values)
    low, high = (f"{each:.{digits}f}" for each in (min(found), max(found)))
    said = f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
    return ClaimValue(min(found), max(found), f"{said}, {where}" if where else said)


def over(times: float) -> float:
    """By how many percent so many times are above one."""
    return 100 * (times - 1)


# --- OptCC ------------------------------------------------------------------------------------------------------------

OPTCC_RANKS = 32
"""On how many endpoints both of OptCC's headline numbers are possible (docs/studies.md)."""


def optcc_up_to_half(record: ScheduleRatios) -> ClaimValue:
    """OptCC over the fault-free ring, one straggler that lost up to half, in percent."""
    cases = record.select("optcc", straggler=True)
    kept = [each for each in cases if each.ranks == OPTCC_RANKS and each.slowdown is not None and each.slowdown <= HALF]
    return spread((over(each.over_fault_free) for each in kept), " %", 1, f"{OPTCC_RANKS} endpoints")


def bound_one_server(record: FailureStudy) -> ClaimValue:
    """The bound over the fault-free ring, one server of 32 without one to four NICs, in percent."""
    cells = [record.cell(f"one server {lost}", OPTCC_RANKS) for lost in (1, 2, 3, 4)]
    return spread(
        (over(cell.worst("optimal")) for cell in cells if cell is not None), " %", 1, f"{OPTCC_RANKS} servers"
    )


def prior_at_half(record: ScheduleRatios) -> ClaimValue:
    """R2CCL-AllReduce over the fault-free ring at half lost, in percent."""
    cases = [each for each in record.select("r2ccl-allreduce", straggler=True) if each.slowdown == HALF]
    ranks = [each.ranks for each in cases]
    return spread((over(each.over_fault_free) for each in cases), " %", 1, f"{min(ranks)} to {max(ranks)} endpoints")


def bound_at_half(record: BoundCurves) -> ClaimValue:
    """The bound over the fault-free ring at half lost, by number of endpoints, in percent."""
    points = [(c.ranks, p) for c in record.curves if c.stragglers == 1 for p in c.points if p.lost == 1 - 1 / HALF]
    ranks = [each for each, _ in points]
    return spread((over(float(p.optimal)) for _, p in points), " %", 1, f"{min(ranks)} to {max(ranks)} endpoints")


def bound_exponent(record: BoundCurves) -> ClaimValue:
    """The exponent of p in the bound's overhead at half lost, between the two largest numbers of endpoints."""
    points = [(c.ranks, p) for c in record.curves if c.stragglers == 1 for p in c.points if p.lost == 1 - 1 / HALF]
    (fewer, one), (more, other) = sorted(points, key=lambda each: each[0])[-2:]
    power = math.log((other.optimal - 1) / (one.optimal - 1)) / math.log(more / fewer)
    return spread([power], "", 3, f"exponent of p, {fewer} to {more} endpoints")


def optimal_at_half(record: ScheduleRatios) -> ClaimValue:
    """Our optimum over the fault-free ring at half lost, in percent."""
    cases = [each for each in record.select("optimal", straggler=True) if each.slowdown == HALF]
    ranks = [each.ranks for each in cases]
    where = f"`optimal`, {min(ranks)} to {max(ranks)} endpoints"
    return spread((over(each.over_fault_free) for each in cases), " %", 1, where)


def optcc_over_formula(record: ScheduleRatios) -> ClaimValue:
    """OptCC's simulated time over its closed form, one straggler."""
    ratios = [each.over_formula for each in record.select("optcc", straggler=True) if each.over_formula is not None]
    return spread(ratios, "", 3, f"of the closed form, {len(ratios)} cases")


def optcc_over_bound(record: ScheduleRatios) -> ClaimValue:
    """OptCC's simulated time at half lost over (k + 1)/k of the bound, k its segments."""
    cases = [each for each in record.select("optcc", straggler=True) if each.slowdown == HALF]
    where = f"{len(cases)} numbers of endpoints"
    return spread((each.over_bound * each.segments / (each.segments + 1) for each in cases), "", 3, where)


def theorem_13(ranks: int, slowdown: Fraction) -> Fraction:
    """The bound of OptCC's Theorem 13 as a repository has it, over the fault-free ring, for servers of one GPU.

    >>> theorem_13(3, Fraction(3, 2)) * Fraction(4, 3)  # in units of the message through a healthy NIC
    Fraction(12, 7)
    """
    p = ranks
    return max(2 * slowdown * (p - 1) / (slowdown * (p - 2) + 2), slowdown) / Fraction(2 * (p - 1), p)


def optimal_over_theorem(record: ScheduleRatios) -> ClaimValue:
    """The simulated time of our optimum over that bound, one straggler that lost less than half."""
    cases = [each for each in record.select("optimal", straggler=True) if each.slowdown and 1 < each.slowdown < HALF]
    ratios = [each.over_fault_free / float(theorem_13(each.ranks, each.slowdown or HALF)) for each in cases]
    return spread(ratios, "", 3, f"`optimal`, {len(cases)} cases")


def bound_over_theorem(record: BoundCurves) -> ClaimValue:
    """Our bound, which is reached, over that bound, one straggler that lost less than half."""
    curves = [each for each in record.curves if each.stragglers == 1]
    points = [(c.ranks, p) for c in curves for p in c.points if 0 < p.lost < 1 - 1 / HALF]
    ratios = [float(p.optimal / theorem_13(ranks, 1 / (1 - p.lost))) for ranks, p in points]
    return spread(ratios, "", 3, f"T*, {len(points)} points")


def optcc_on_servers(record: LostNicsRecord) -> ClaimValue:
    """OptCC on servers of several GPUs, half of one server's NICs lost, over the fault-free ring in percent."""
    return _on_servers(record, lambda case: record.of(case)["optcc-nics"].over_fault_free)


def ours_on_servers(record: LostNicsRecord) -> ClaimValue:
    """The bound there, with our best schedule in the text."""
    least = _on_servers(record, lambda case: record.ours(case).bound_s / record.ours(case).fault_free_s)
    ours = _on_servers(record, lambda case: record.ours(case).over_fault_free)
    return ClaimValue(least.least, least.most, f"{least.text}; our best schedule {ours.text}")


def _on_servers(record: LostNicsRecord, ratio: Callable[[LostNics], float]) -> ClaimValue:
    servers = max(CLAIM_SERVERS)
    cases = [each for each in record.claimed if each.servers == servers]
    gpus = [each.gpus for each in cases]
    where = f"{servers} servers of {min(gpus)} to {max(gpus)} GPUs"
    return spread((over(ratio(each)) for each in cases), " %", 1, where)


# --- Measured AllReduce -----------------------------------------------------------------------------------------------


def _run(record: PeerComparison, contender: str, bed: str, hosts: int = 4) -> PeerRun:
    return next(
        each
        for each in record.runs
        if (each.contender, each.bed, each.hosts, each.size_bytes) == (contender, bed, hosts, SIZE_64M)
    )


def _degraded(record: PeerComparison, contender: str) -> ClaimValue:
    """A NIC down, half of one of four hosts: over the formula of the fault-free ring, in percent."""
    ring, run = _run(record, "ring (tcp)", "healthy"), _run(record, contender, "one NIC down")
    # On healthy hosts the bound is what a ring takes.
    where = f"4 hosts, one at half, {show_size(SIZE_64M)} (T*: {over(run.bound_s / ring.bound_s):.1f} %)"
    return spread([over(run.median_s / ring.bound_s)], " %", 1, where)


def optcc_on_fabric(record: PeerComparison) -> ClaimValue:
    """OptCC with a host at half, over the fault-free ring in percent."""
    return _degraded(record, "optcc (tcp)")


def prior_on_fabric(record: PeerComparison) -> ClaimValue:
    """R2CCL-AllReduce with a host at half, over the fault-free ring in percent."""
    return _degraded(record, "r2ccl-allreduce (tcp)")


def optimal_on_fabric(record: PeerComparison) -> ClaimValue:
    """Our optimum with a host at half, over the fault-free ring in percent."""
    return _degraded(record, "optimal (tcp)")


def optcc_of_bound_on_fabric(record: PeerComparison) -> ClaimValue:
    """OptCC's measured time over the bound, a host at half."""
    run = _run(record, "optcc (tcp)", "one NIC down")
    return spread([run.median_s / run.bound_s], "", 3, "of T*, 4 hosts, one at half")


def balance_kept_on_fabric(record: PeerComparison) -> ClaimValue:
    """What share of its healthy bandwidth a ring with weighted shares keeps, a NIC at half, in percent."""
    healthy, run = _run(record, "ring (tcp)", "healthy"), _run(record, "ring (tcp)", "one NIC at half")
    return spread([100 * healthy.median_s / run.median_s], " %", 1, "4 hosts, 75 % of one host's bandwidth left")


def balance_over_formula(record: PeerComparison) -> ClaimValue:
    """A ring's time with a host at half over twice its healthy time, which is the formula of Balance."""
    healthy, run = _run(record, "ring (tcp)", "healthy"), _run(record, "ring (tcp)", "one NIC down")
    return spread([run.median_s / healthy.median_s / 2], "", 3, "of the formula, 4 hosts, one at half")


def r2ccl_over_formula(record: PeerComparison) -> ClaimValue:
    """R2CCL-AllReduce's time with a host at half over its formula, 1 + nX/(2(n - 1)(1 - X)) of the healthy time."""
    name = "r2ccl-allreduce (tcp)"
    healthy, run = _run(record, name, "healthy"), _run(record, name, "one NIC down")
    formula = 1 + run.hosts / 2 / (run.hosts - 1)
    predicted = ""
    if run.predicted_s is not None:
        predicted = f"; our plan is predicted to take {run.predicted_s / healthy.bound_s / formula:.3f}"
    where = f"of the formula, 4 hosts, one at half{predicted}"
    return spread([run.median_s / healthy.median_s / formula], "", 3, where)


def time_saved_if_late_on_fabric(record: PeerComparison) -> ClaimValue:
    """By how much StragglAR takes less time than the fastest ring, from when the late host begins, in percent."""
    state = "one host late"
    run = _run(record, FOR_LATE, state, 8)
    rings = [each for each in record.runs if each.state == run.state and "ring" in each.contender]
    ring = min(rings, key=lambda each: each.median_s)
    saved = 100 * (1 - run.median_s / ring.median_s)
    where = (
        f"8 hosts, {show_size(run.size_bytes)}, over {ring.contender}; {run.median_s / run.bound_s:.2f} of the bound"
    )
    return spread([saved], " % of the time", 1, where)


def peers_that_ended(record: PeerComparison) -> ClaimValue:
    """The share of peers that did not survive a NIC lost in mid-run, in percent."""
    peers = [each for each in record.losses if each.side != "ours"]
    ours = [each for each in record.losses if each.side == "ours"]
    ended, went_on = sum(each.run_s is None for each in peers), sum(each.run_s is not None for each in ours)
    others = f"{ended} of {len(peers)} other libraries hung until they were ended"
    text = f"{others}; ours went on in {went_on} of {len(ours)}"
    return ClaimValue(100 * ended / len(peers), 100 * ended / len(peers), text)


def peer_over_ours(record: PeerComparison) -> ClaimValue:
    """What a NIC lost in mid-run costs the best peer that went on, over what it costs ours; if none did, what it had
    cost one that hung when that was ended."""
    peers = [each for each in record.losses if each.side != "ours"]
    ours = min(each.stall_s for each in record.losses if each.side == "ours" and each.stall_s is not None)
    stalls = {each.contender: each.stall_s for each in peers if each.stall_s is not None}
    if stalls:
        best = min(stalls, key=lambda name: stalls[name])
        return spread([stalls[best] / ours], "x", 1, f"{best} over ours, extra time of the run")
    first = min(peers, key=lambda each: each.limit_s - each.before_s)
    ratio = (first.limit_s - first.before_s) / ours
    where = f"extra time of the run: all {len(peers)} other libraries hung, and were ended after {first.limit_s:g} s"
    return ClaimValue(ratio, ratio, f"above {math.floor(ratio)}x, {where}")
