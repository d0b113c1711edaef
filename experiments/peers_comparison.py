"""Ours and peers in one state of the hosts, interleaved round by round, and while they lose a NIC."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from optcc.collective import Collective
from optcc.errors import OptccError, RuntimeFault
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, NicRates
from optcc.experiments.late_rank import seconds_after
from optcc.experiments.peers import MPI_RING
from optcc.experiments.peers_contenders import (
    FEW,
    LATENCY,
    LEAST,
    LEFT_OUT,
    LEFT_OUT_LEAST,
    LONG,
    NICS,
    OURS_ALL,
    OURS_FEW,
    OURS_LATE,
    OURS_STANDARD,
    READY_S,
    STANDARD,
    Bed,
    Contender,
    PeerJob,
    jobs,
    our_case,
)
from optcc.experiments.peers_rank import plan_of, wires_of
from optcc.experiments.peers_record import AFTER_LOSS, Loss, PeerRun, shown_state
from optcc.experiments.peers_team import START_S, Team, Turn
from optcc.experiments.rank_lines import Hung
from optcc.experiments.record import STEAL_MAX
from optcc.planner import prove, verdict_cache
from optcc.runtime.exact_inputs import expected_output, make_input
from optcc.topology import Topology
from optcc.units import parse_rate, show_size
from optcc.verify.bounds.certified import least_seconds

T = TypeVar("T")
WARMUP = 1
REPEATS_MAX = 3
"""Times that a run is repeated because of steal; after that it is kept, marked by its steal."""
NEXT_RUNS = 3
DTYPE, REDUCTION = "float32", "sum"
LOST_NIC = "h3.eth1"
LOST_AT = 0.4
"""When the NIC is lost: this share of the contender's own time into the run."""
LOSS_LIMIT_S = 30.0
DEADLINE_S, RINGS_MAX = 60.0, 4
"""A run may take so long, and the time of so many rings on healthy hosts."""
OVERHEAD = float(Fraction(WIRE_OVERHEAD))
_CONTROL_SHARE_MAX = 0.05


@dataclass
class Comparison:
    """What is compared, and the results so far.

    Each contender is timed `rounds` times in a state, after `warmup` runs that do not count, on NICs of `rate`.
    """

    size_bytes: int
    rounds: int
    mpich: str
    torch: str
    rate: str
    warmup: int = WARMUP
    runs: list[PeerRun] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    predicted_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def job_config(self, folder: Path, n_ranks: int, late_s: float = 0.0) -> dict[str, Any]:
        """The configuration of all ranks of all jobs; inputs and expected results are files in `folder`.

        The last rank begins each run `late_s` after the others.
        """
        inputs = [folder / f"input-{self.size_bytes}-{rank}.npy" for rank in range(n_ranks)]
        wanted = folder / f"wanted-{self.size_bytes}.npy"
        if not wanted.exists():
            count = self.size_bytes // np.dtype(DTYPE).itemsize
            for rank, path in enumerate(inputs):
                np.save(path, make_input(rank, count, DTYPE, REDUCTION))
            np.save(wanted, expected_output(Collective("allreduce", n_ranks), count, DTYPE, REDUCTION, 0)[0])
        ring_s = 2 * self.size_bytes / float(NICS * parse_rate(self.rate))
        deadline_s = DEADLINE_S + RINGS_MAX * ring_s
        return {
            "size_bytes": self.size_bytes,
            "dtype": DTYPE,
            "inputs": [str(path) for path in inputs],
            "wanted": str(wanted),
            "deadline_s": deadline_s,
            "ready_s": READY_S - 5,
            "late_s": late_s,
        }

    def compare(self, fabric: Fabric, bed: Bed, folder: Path, extent: str = STANDARD) -> None:
        """All contenders in one state of the hosts, interleaved; the hosts are healed at the end."""
        with in_state(fabric, bed, self.rate):
            topology = fabric.topology_text()
            by_extent = {STANDARD: OURS_STANDARD, LONG: OURS_ALL, FEW: OURS_FEW, LEAST: OURS_FEW}
            carried = OURS_LATE if bed.late else by_extent[extent]
            hosts = fabric.state().spec.hosts
            where = shown_state((hosts, self.size_bytes, bed.name))
            wanted = [
                our_case(name, carrier, topology, self.size_bytes)
                for carrier, names in carried.items()
                for name in names
            ]
            late_s = bed.late_s(hosts, self.size_bytes, self.rate)
            ours = [case for case in wanted if self._predict(case, where, late_s)]
            self._take_turns(fabric, bed, topology, folder, *jobs(ours, self.mpich, self.torch, extent))

    def compare_peers(self, fabric: Fabric, state: str, folder: Path) -> None:
        """The peers alone, in the state that the hosts are in; `state` is its name."""
        self._take_turns(fabric, Bed(state), fabric.topology_text(), folder, *jobs((), self.mpich, self.torch))

    def _take_turns(
        self,
        fabric: Fabric,
        bed: Bed,
        topology: str,
        folder: Path,
        started: Sequence[PeerJob],
        absent: Mapping[str, str],
    ) -> None:
        n_ranks = fabric.state().spec.hosts
        where = shown_state((n_ranks, self.size_bytes, bed.name))
        config = self.job_config(folder, n_ranks, float(bed.late_s(n_ranks, self.size_bytes, self.rate)))
        for name, why in absent.items():
            in_states = {LEFT_OUT: f"{name}: further states", LEFT_OUT_LEAST: f"{name}: {where}"}
            self.absent.setdefault(in_states.get(why, name), why)
        with contextlib.ExitStack() as stack:
            teams = []
            for job in started:
                try:
                    team = Team(fabric, job, config, folder, bed.declared(self.rate))
                except RuntimeFault as fault:
                    self.absent |= {f"{case.contender}: {where}": str(fault) for case in job.cases}
                    continue
                stack.callback(team.end)
                teams.append(team)
            self._rounds(fabric, bed, topology, teams)

    def _predict(self, case: Contender, where: str, late_s: Fraction = Fraction(0)) -> bool:
        """Whether there is a plan for it: compiled and verified here, so that ranks find proofs and kernels cached."""
        try:
            plan = plan_of(case.config, self.size_bytes, DTYPE)
            prove(plan, verdict_cache())
        except OptccError as error:
            self.absent[f"{case.contender}: {where}"] = str(error)
            return False
        predicted_s = seconds_after(plan, wires_of(case.config), late_s, case.config["ports"])
        self.predicted_s[case.contender, case.config["topology"]] = predicted_s
        return True

    def _rounds(self, fabric: Fabric, bed: Bed, topology: str, teams: Sequence[Team]) -> None:
        where = shown_state((fabric.state().spec.hosts, self.size_bytes, bed.name))
        tallies = []
        for team in teams:
            for number, case in enumerate(team.job.cases):
                if "absent" in team.made[number]:
                    self.absent[f"{case.contender}: {where}"] = team.made[number]["absent"]
                else:
                    tallies.append(ContenderRuns(team, number, case))
        for round_ in range(self.warmup + self.rounds):
            for tally in [*tallies[round_ % max(1, len(tallies)) :], *tallies[: round_ % max(1, len(tallies))]]:
                if tally.failed:
                    continue
                before = fabric.control_bytes() if round_ == 0 else 0
                if round_ < self.warmup:
                    tally.warm_up()
                else:
                    tally.run()
                if round_ == 0:
                    tally.check_control(fabric.control_bytes() - before, self.size_bytes)
        for tally in tallies:
            if tally.failed or not tally.turns:
                self.absent[f"{tally.case.contender}: {where}"] = tally.failed
            else:
                self.runs.append(self._made(tally, bed, topology, fabric.state().spec))

    def _made(self, tally: ContenderRuns, bed: Bed, topology: str, spec: FabricSpec) -> PeerRun:
        # A plan for other rates has no prediction for these.
        is_for_these = tally.case.config.get("topology") == topology
        wired = Topology.parse(topology).scaled(1 / Fraction(WIRE_OVERHEAD)).with_latency(Fraction(LATENCY))
        turns, late_s = tally.turns, bed.late_s(spec.hosts, self.size_bytes, self.rate)
        return PeerRun(
            tally.case.contender,
            tally.case.side,
            bed.name,
            topology,
            spec.hosts,
            spec.nics,
            self.rate,
            self.size_bytes,
            DTYPE,
            tally.case.settings,
            float(least_seconds_after(wired, self.size_bytes, late_s)),
            self.predicted_s.get((tally.case.contender, topology)) if is_for_these else None,
            [turn.seconds for turn in turns],
            [turn.steal for turn in turns],
            [turn.cpu_s for turn in turns],
            [turn.busy_s for turn in turns],
            tally.rejected,
            tally.wrong,
            late_s=float(late_s),
        )

    def lose(self, fabric: Fabric, folder: Path) -> None:
        """Fails a NIC during a run of each contender on healthy hosts, then times the next collectives.

        Ours runs a plan for healthy hosts, then one for the NICs that are left.
        """
        healthy = fabric.topology_text()
        where = shown_state((fabric.state().spec.hosts, self.size_bytes, AFTER_LOSS))
        with in_state(fabric, Bed("", down=(LOST_NIC,)), self.rate):
            left = fabric.topology_text()
        name = "ring, then optimal (tcp)"
        own = (our_case("ring", "tcp", healthy, self.size_bytes), our_case("optimal", "tcp", left, self.size_bytes))
        for case in own:
            self._predict(replace(case, contender=name), where)
        ours = PeerJob(
            "ours", sys.executable, "openmpi", tuple(replace(case, contender=name) for case in own), MPI_RING
        )
        others, _ = jobs((), self.mpich, self.torch)
        for job in (ours, *others):
            try:
                self._lose(fabric, job, folder, left)
            except RuntimeFault as fault:
                self.absent[f"{job.cases[0].contender}: {where}"] = str(fault)
            fabric.heal(LOST_NIC)

    def _lose(self, fabric: Fabric, job: PeerJob, folder: Path, left: str) -> None:
        config = self.job_config(folder, fabric.state().spec.hosts)
        team = Team(fabric, job, config, folder, Bed("").declared(self.rate))
        case = job.cases[0]
        try:
            before_s = min(team.turn(0).seconds for _ in range(1 + WARMUP))
            after_s = LOST_AT * before_s

            def cut() -> Iterator[None]:
                time.sleep(START_S + after_s)
                fabric.fail(LOST_NIC, "down")
                yield

            tally = ContenderRuns(team, len(job.cases) - 1, job.cases[-1])
            run_s: float | None = None
            try:
                lost = team.turn(0, LOSS_LIMIT_S, cut())
                run_s, outcome = lost.seconds, "went on" if not lost.wrong else f"{lost.wrong} wrong elements"
                tally.wrong += lost.wrong
            except Hung:
                outcome = f"hung for {LOSS_LIMIT_S:g} s, ended"
            except RuntimeFault as fault:
                outcome = str(fault)
            if run_s is not None:
                for _ in range(NEXT_RUNS):
                    tally.run()
                if tally.failed:
                    outcome = f"went on, then {tally.failed}"
            spec = fabric.state().spec
            next_ = self._made(tally, Bed(AFTER_LOSS), left, spec) if tally.turns and not tally.failed else None
            self.losses.append(
                Loss(
                    case.contender,
                    case.side,
                    spec.hosts,
                    self.size_bytes,
                    before_s,
                    after_s,
                    LOSS_LIMIT_S,
                    run_s,
                    outcome,
                    next_,
                )
            )
        finally:
            team.end()


def least_seconds_after(topology: Topology, size_bytes: int, late_s: Fraction) -> Fraction:
    """A lower bound on the time from when the last rank begins, `late_s` after the others, to the end.

    The whole takes T*; and after its begin its input has to leave the last rank, and the result has to come in.

    >>> topology = Topology.parse("4@1MB/s")
    >>> [float(least_seconds_after(topology, 10**6, Fraction(late, 4))) for late in (0, 1, 8)]
    [1.5, 1.25, 1.0]
    """
    whole_s = least_seconds(topology, size_bytes, Collective("allreduce", topology.n_ranks))
    if not late_s:
        return whole_s
    return max(whole_s - late_s, size_bytes / min(topology.out[-1], topology.in_[-1]))


def repeat_disturbed(run: Callable[[], T], steal_of: Callable[[T], float]) -> list[T]:
    """What a run returns, and its repeats: up to `REPEATS_MAX`, while steal is above `STEAL_MAX`; that with the least
    steal comes first."""
    tries = [run()]
    while steal_of(tries[-1]) > STEAL_MAX and len(tries) <= REPEATS_MAX:
        tries.append(run())
    return sorted(tries, key=steal_of)


class ContenderRuns:
    """The turns of one contender in one state of the hosts."""

    def __init__(self, team: Team, number: int, case: Contender) -> None:
        self.team, self.number, self.case = team, number, case
        self.turns: list[Turn] = []
        self.rejected = self.wrong = 0
        self.failed = ""

    def warm_up(self) -> None:
        """An untimed run."""
        with self._noting_fault():
            self._turn()

    def check_control(self, sneaked: int, size_bytes: int) -> None:
        """Rejects a contender whose data went over the control network: `sneaked` bytes in its first run."""
        if not self.failed and sneaked > _CONTROL_SHARE_MAX * size_bytes:
            self.failed = f"{show_size(sneaked)} went over the control network"

    def run(self) -> None:
        """A timed run, repeated while steal is too high (`repeat_disturbed`)."""
        with self._noting_fault():
            tries = repeat_disturbed(self._turn, lambda turn: turn.steal)
            self.rejected += len(tries) - 1
            self.turns.append(tries[0])

    def _turn(self) -> Turn:
        turn = self.team.turn(self.number)
        self.wrong += turn.wrong
        return turn

    @contextlib.contextmanager
    def _noting_fault(self) -> Iterator[None]:
        try:
            yield
        except RuntimeFault as fault:
            self.failed = str(fault)


@contextlib.contextmanager
def in_state(fabric: Fabric, bed: Bed, rate: str) -> Iterator[None]:
    """Sets the hosts to `bed`; heals them at the end."""
    spec = fabric.state().spec
    try:
        for target, share in bed.rates.items():
            each = parse_rate(rate) * share
            fabric.set_rate(target, NicRates(each, each))
        for target in bed.down:
            fabric.fail(target, "down")
        yield
    finally:
        for host in range(spec.hosts):
            fabric.heal(f"h{host}")
