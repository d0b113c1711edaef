"""The ratio of a plan's makespan to the bound over an interval of slowdowns: `optcc verify --slowdown`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from optcc.errors import ArgumentError
from optcc.plan import Plan
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.verify.bounds.predictions import straggler_of
from optcc.verify.plan.parametric import IntervalPart, RatioProof, RatioStudy, Refutation, prove_ratio, study_ratio
from optcc.verify.smt import Limit, require_known

SOLVER_LIMIT = Limit(60.0)


@dataclass(frozen=True, slots=True)
class Ratio(Shown):
    """The ratio on the interval; `answer` if an eps was to be proved."""

    straggler: int
    low: Fraction
    high: Fraction
    study: RatioStudy
    answer: RatioProof | Refutation | None
    slots: int

    @property
    def conditions(self) -> str:
        """What the ratio holds under."""
        return (
            f"every slowdown from {self.low} to {self.high}, both included, of rank {self.straggler} alone; exclusive "
            f"ports in the lanes' order, {self.slots} slots, no latency"
        )

    @property
    def holds(self) -> bool:
        """True if no eps was given, or it was proved."""
        return not isinstance(self.answer, Refutation)

    def card(self) -> Card:
        title = (
            f"time <= (1 + {self.study.least_eps}) T* for every slowdown of rank {self.straggler} from {self.low} to "
            f"{self.high}; equal at l = {self.study.worst.slowdown}"
        )
        if isinstance(self.answer, RatioProof):
            title += f"\n(1 + {self.answer.eps}) T* is enough: proved, {self.answer.checked}"
        elif isinstance(self.answer, Refutation):
            title += f"\n(1 + {self.answer.eps}) T* is not enough: refuted at l = {self.answer.at.slowdown}"
        title += f"\nholds for {self.conditions}"
        (makespan,) = self.study.makespans
        return Card(title, makespan.card().columns, makespan.card().rows)

    def as_json(self) -> dict[str, object]:
        """Plain values; fractions as text."""
        (makespan,) = self.study.makespans
        return {
            "straggler": self.straggler,
            "low": str(self.low),
            "high": str(self.high),
            "conditions": self.conditions,
            "least_eps": str(self.study.least_eps),
            "worst_slowdown": str(self.study.worst.slowdown),
            "breakpoints": [str(each) for each in makespan.breakpoints],
            "bound_breakpoint": str(self.study.bound_breakpoint),
            "eps": None if self.answer is None else str(self.answer.eps),
            "verdict": None if self.answer is None else "proved" if self.holds else "refuted",
            "solver": None if self.answer is None else str(self.answer.solver),
        }


def judge_ratio(plan: Plan, topology: Topology, low: Fraction, high: Fraction, eps: Fraction | None) -> Ratio:
    """The ratio of `plan` for slowdowns from `low` to `high` of its straggler, the slowest endpoint of `topology`.

    Raises ArgumentError without a single slowest endpoint, SolverUnknown if the question stays open, and what
    `study_ratio` raises.
    """
    straggler = straggler_of(topology).index
    if straggler is None:
        raise ArgumentError("slowdown: the topology must have one endpoint that is slower than the others")
    slots = max((channel.slots for channel in plan.channels), default=0)
    if eps is None:
        return Ratio(straggler, low, high, study_ratio([IntervalPart(plan, low, high)], straggler), None, slots)
    answer = prove_ratio(plan, straggler, low, high, eps, solver=SOLVER_LIMIT)
    known = require_known(answer)
    assert isinstance(known, RatioProof | Refutation)
    return Ratio(straggler, low, high, known.study, known, slots)
