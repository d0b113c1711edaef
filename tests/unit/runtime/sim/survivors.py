"""Programs that go on without hosts that are cut off, in simulated time, and what must be true of what they saw."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from optcc.errors import InputError, RuntimeFault
from optcc.faults import FaultPlan
from optcc.planner import Planner
from optcc.runtime.surviving import SurvivingCommunicator
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Topology

Array = npt.NDArray[np.int64]
STALL_S = 0.2


@dataclass(frozen=True)
class Seen:
    """What a rank saw of one AllReduce: when it returned, whose contributions were missing, the result; and the same
    after a merge, if there was one."""

    at_s: float
    missing: tuple[int, ...]
    result: Array
    merged: tuple[tuple[int, ...], Array] | None = None


@dataclass
class Story:
    """What a rank saw, and the error in which it ended, if in one, and when."""

    seen: list[Seen] = field(default_factory=list)
    error: RuntimeFault | None = None
    ended_s: float = 0.0


@cache
def planner_for(n_hosts: int) -> Planner:
    return Planner(Topology.parse(f"{n_hosts}@1MB/s"))


def given(rank: int, number: int, count: int) -> Array:
    """Numbers whose sums say who has been added, and how often."""
    return np.random.default_rng((rank, number)).integers(-(10**6), 10**6, count)


@dataclass(frozen=True)
class Program:
    """AllReduces one after the other on `n_hosts` of one NIC, with a pause of `idle_s` at each rank after each of them;
    with `merges`, missing contributions are merged, from `merge_at_s` on; hosts are waited for `partition_s` then."""

    faults: str
    n_hosts: int = 3
    n_runs: int = 3
    count: int = 2000
    op: str = "sum"
    merges: bool = True
    partition_s: float = 3.0
    idle_s: tuple[float, ...] = ()
    merge_at_s: float = 0.0
    seed: int = 0

    def run(self) -> list[Story]:
        network = SimNetwork(
            Topology.parse(f"{self.n_hosts}@1MB/s"),
            nic_faults=FaultPlan.parse(self.faults),
            stall_s=STALL_S,
            regroups=True,
            seed=self.seed,
        )
        return run_sim(network, self._at)

    def _at(self, rank: int, transport: SimTransport) -> Story:
        story, clock = Story(), transport.clock
        comm = SurvivingCommunicator(
            transport, planner_for(self.n_hosts), clock=clock, deadline_s=6.0, partition_s=self.partition_s
        )
        try:
            with comm:
                for number in range(self.n_runs):
                    story.seen.append(self._reduce(comm, number, transport))
                    if self.idle_s:
                        clock.sleep_s(self.idle_s[rank])
        except RuntimeFault as error:
            story.error = error
        story.ended_s = clock.now_s()
        return story

    def _reduce(self, comm: SurvivingCommunicator, number: int, transport: SimTransport) -> Seen:
        array = given(comm.rank, number, self.count)
        result = comm.all_reduce(array, self.op)
        assert np.array_equal(array, given(comm.rank, number, self.count)), "inputs are as they were"
        at_s, missing, first, merged = transport.clock.now_s(), comm.missing, result.copy(), None
        if missing and self.merges:
            transport.clock.sleep_s(max(0.0, self.merge_at_s - at_s))
            try:
                comm.merge(result)
                merged = comm.missing, result
            except InputError:
                # Not the first one that lacks contributions: that one was merged in vain.
                assert number
        return Seen(at_s, missing, first, merged)

    def wanted(self, number: int, missing: tuple[int, ...]) -> Array:
        """The reduction of what the others have."""
        arrays = np.stack([given(rank, number, self.count) for rank in range(self.n_hosts) if rank not in missing])
        reduced: dict[str, Array] = {"sum": arrays.sum(0), "max": arrays.max(0), "min": arrays.min(0)}
        return reduced[self.op]

    def check(self, stories: list[Story]) -> Counter[str]:
        """Counts what has happened; raises AssertionError if a promise was broken."""
        counts: Counter[str] = Counter()
        for number in range(self.n_runs):
            at = {rank: story.seen[number] for rank, story in enumerate(stories) if number < len(story.seen)}
            for rank, seen in at.items():
                assert np.array_equal(seen.result, self.wanted(number, seen.missing)), (number, rank, seen.missing)
                counts["lacking" if seen.missing else "full"] += 1
                if seen.merged is not None:
                    missing, result = seen.merged
                    assert missing in ((), seen.missing)
                    assert np.array_equal(result, self.wanted(number, missing)), (number, rank, missing)
                    counts["in vain" if missing else "merged"] += 1
            self._check_agreed(number, at)
        for story in stories:
            counts[type(story.error).__name__ if story.error else "done"] += 1
        return counts

    def _check_agreed(self, number: int, at: dict[int, Seen]) -> None:
        """All that have a result have that of the same ranks; only one that was merged has more."""
        lacking = {seen.missing for seen in at.values() if seen.missing}
        assert len(lacking) <= 1, f"collective {number}: {lacking}"
        if not lacking:
            return
        (missing,) = lacking
        assert 2 * (self.n_hosts - len(missing)) > self.n_hosts
        for rank, seen in at.items():
            assert (rank in missing) == (not seen.missing), f"collective {number}: rank {rank}"
            if rank in missing:
                ends = [other.merged for other in at.values() if other.merged is not None]
                assert all(not each for each, _ in ends) and ends, f"collective {number}: rank {rank} was not merged"


def program_of(seed: int) -> Program:
    """Hosts that lose their NIC at random moments, some for a while, some again later, links or one way only."""
    rng = random.Random(seed)
    n_hosts, faults = rng.choice([3, 3, 4, 5]), list[str]()
    for _ in range(rng.choice([1, 1, 1, 2])):
        host, at_ms = rng.randrange(n_hosts), rng.uniform(1, rng.choice([40, 150]))
        way = rng.choice(["", "", ":in", ":out"])
        for_ms = rng.choice([0.0, 0.0, rng.uniform(1, 700), rng.uniform(300, 2000), rng.uniform(300, 2000)])
        faults.append(f"{host}/0@{at_ms:.3f}ms" + (f"..{at_ms + for_ms:.3f}ms" if for_ms else "") + way)
        if for_ms and rng.random() < 0.4:
            again_ms = at_ms + for_ms + rng.uniform(0, 400)
            faults.append(f"{host}/0@{again_ms:.3f}ms..{again_ms + rng.uniform(1, 1000):.3f}ms")
    return Program(
        ", ".join(faults),
        n_hosts,
        count=rng.choice([1, 300, 2000]),
        merges=rng.random() < 0.75,
        idle_s=tuple(rng.choice([0.0, 0.0, rng.uniform(0, 0.5)]) for _ in range(n_hosts)),
        seed=seed,
    )
