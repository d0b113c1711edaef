"""The exact optimum of the tree model on any network, as a linear program over cuts.

    minimise  T
    subject to, for every port P:                sum over links e that use P of (reduce_e + broadcast_e) <= rate_P T
                for every switch, each kind:     flow in = flow out
                for every S with an endpoint:    sum of broadcast_e over links into S    + x(S) >= 1
                                                 sum of reduce_e over links out of S     + x(S) >= 1
                                                 sum of x_v = 1        (x free: AllReduce; otherwise x is given)

By Edmonds' theorem the cuts say exactly that broadcast_e packs out-trees and reduce_e in-trees with roots spread as x
(`optcc.verify.bounds.flow`), so the optimum is a bound on every schedule that reduces and broadcasts each element
along trees, and a mixture of such trees attains it. There are 2^p cuts; violated ones are found by minimum cuts and
added as rows. The duals of the cuts, ports and switches are the certificate (`optcc.verify.bounds.replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite

from optcc.collective import Collective
from optcc.errors import SolverError, SolverUnknown
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Achieved, Certificate, Cut
from optcc.verify.bounds.closed_form_certificates import closed_forms
from optcc.verify.bounds.flow import narrow_cuts
from optcc.verify.bounds.network import BROADCAST, REDUCE, Demand, FlowNetwork, endpoint_gpus, require_connected
from optcc.verify.bounds.replay import replay, starved_sets
from optcc.verify.bounds.solvers import (
    AT_LEAST,
    AT_MOST,
    EQUAL,
    HighsSolver,
    Infeasible,
    LinearProgram,
    MakeSolver,
    Solved,
    Unsolved,
    exact_vertex,
)

TIME_LIMIT_S = 60.0
CLAIM_TOLERANCE = 1e-6
_FLOAT_UNIT = 2**40
_FLOAT_SLACK = 2**14
_DENOMINATORS = (10, 1000, 10**6, 10**9, 10**12)
_NEGLIGIBLE = Fraction(1, 10**8)
_ROUNDS_MAX = 1000
Vertex = tuple[list[Fraction], list[Fraction]]
_KINDS = (REDUCE, BROADCAST)


@dataclass(frozen=True, slots=True)
class CertifiedBound(Shown):
    """A bound whose certificate has been replayed; `achievable` and `gap` (relative) if a packing is certified too."""

    certificate: Certificate

    @property
    def seconds(self) -> Fraction:
        """No schedule of the model is faster."""
        return self.certificate.seconds

    @property
    def achievable(self) -> Fraction | None:
        """The time of a packing of trees, without pipeline fill."""
        return None if self.certificate.achieved is None else self.certificate.achieved.seconds

    @property
    def gap(self) -> Fraction | None:
        """achievable / seconds - 1."""
        return self.certificate.gap

    @property
    def binding(self) -> tuple[str, ...]:
        """The ports with a nonzero price."""
        return self.certificate.binding

    @property
    def prices(self) -> dict[str, Fraction]:
        """The share of each binding port in the bound: 1 % more rate there lowers it by share %, to first order."""
        return self.certificate.shares

    def card(self) -> Card:
        return self.certificate.card()


class BoundUnknown(SolverUnknown):
    """The time limit was reached; `best` is the best bound certified until then."""

    def __init__(self, message: str, best: CertifiedBound) -> None:
        super().__init__(message)
        self.best = best


def lp_bound(
    topology: Topology | FlowNetwork,
    collective: Collective | Demand | str,
    size_bytes: int,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    primal: bool = True,
    fabric: bool = False,
    solver: MakeSolver = HighsSolver,
    clock: Callable[[], float] = time.monotonic,
) -> CertifiedBound:
    """The optimum of the tree model for `collective` of `size_bytes`, certified from below and (`primal`) from above.

    >>> bound = lp_bound(Topology.parse("4@50MB/s,3=25MB/s"), "allreduce", 100_000_000)
    >>> str(bound.seconds), str(bound.gap), bound.binding
    ('4', '0', ('in h3',))

    With `fabric`, GPUs behind fabrics of finite rate are endpoints of their own. A collective given by its name has
    root 0. Raises TopologyError if some endpoints cannot reach others, BoundUnknown with the best bound so far at the
    time limit, SolverError if the solver's claim differs from what its own numbers prove.
    """
    started = clock()
    network = topology if isinstance(topology, FlowNetwork) else FlowNetwork.from_topology(topology, fabric=fabric)
    demand = _demand(topology, collective, fabric)
    require_connected(network, demand)
    best = max(closed_forms(network, demand, size_bytes), key=lambda each: each.seconds)
    if best.seconds == 0:
        if primal and len(network.endpoints) == 1:
            loads = {kind: (Fraction(0),) * len(network.links) for kind in _KINDS}
            best = replace(best, achieved=Achieved(Fraction(0), (Fraction(1),), loads))
        replay(best)
        return CertifiedBound(best)
    unit_s = best.seconds / size_bytes
    search = _Search(CutProgram(network, demand, unit_s, best.cuts), best, primal, solver)
    search.run(lambda: time_limit_s - (clock() - started))
    if primal and search.best.gap != 0 and any(port.rate * unit_s < _NEGLIGIBLE for port in network.ports):
        # The range of rates is too wide for floats: ignore the slowest ports, and let the gap say what that costs.
        again = _Search(CutProgram(network, demand, unit_s, best.cuts, _NEGLIGIBLE), search.best, primal, solver)
        with suppress(BoundUnknown):
            again.run(lambda: time_limit_s - (clock() - started))
        search = again
    replay(search.best)
    return CertifiedBound(search.best)


class _Search:
    """The cutting-plane loop; `best` is the best certificate so far, from below and above."""

    def __init__(self, cuts: CutProgram, best: Certificate, primal: bool, solver: MakeSolver) -> None:
        self.cuts, self.best, self.primal = cuts, best, primal
        self.solve = solver(cuts.program).solve

    def run(self, seconds_left: Callable[[], float]) -> None:
        """Runs to the optimum; raises BoundUnknown or SolverError as `lp_bound` does."""
        last: Solved | None = None
        vertex: Vertex | None = None
        for _ in range(_ROUNDS_MAX):
            outcome = self.solve(seconds_left())
            if isinstance(outcome, Infeasible):
                raise SolverError("solver: infeasible: where all endpoints reach each other there is a packing")
            if isinstance(outcome, Unsolved):
                self._keep_rounded(last)
                replay(self.best)
                raise BoundUnknown(
                    f"bound of {self.cuts.demand.collective}: {outcome.reason}", CertifiedBound(self.best)
                )
            last = outcome
            _check_finite(self.cuts, last)
            if self.cuts.add_violated(last.values):
                continue
            vertex = exact_vertex(self.cuts.program, last)
            if vertex is None or not self.cuts.add_violated_exactly(vertex[0]):
                break
        assert last is not None
        if vertex is not None:
            self._keep(self.cuts.certificate(vertex[1], self.best.size_bytes))
        claim = self.cuts.unit_s * self.best.size_bytes * Fraction(last.objective)
        if self.best.seconds < claim:
            self._keep_rounded(last)
        if not abs(claim - self.best.seconds) <= CLAIM_TOLERANCE * self.best.seconds:
            raise SolverError(f"solver: claims {float(claim)} s: its numbers support {float(self.best.seconds)} s")
        if self.primal and vertex is not None:
            achieved = self.cuts.achieved(vertex[0], self.best.size_bytes)
            before = self.best.achieved
            if achieved is not None and (before is None or achieved.seconds < before.seconds):
                self.best = replace(self.best, achieved=achieved)

    def _keep(self, certificate: Certificate) -> None:
        if certificate.seconds > self.best.seconds:
            self.best = replace(certificate, achieved=self.best.achieved)

    def _keep_rounded(self, last: Solved | None) -> None:
        """Keeps what the float duals prove when rounded, ever more finely, and repaired."""
        for most in _DENOMINATORS if last is not None else ():
            assert last is not None
            duals = [Fraction(dual).limit_denominator(most) for dual in last.duals]
            duals += [Fraction(0)] * (len(self.cuts.program.constraints) - len(duals))
            self._keep(self.cuts.certificate(duals, self.best.size_bytes))


def _demand(topology: Topology | FlowNetwork, collective: Collective | Demand | str, fabric: bool) -> Demand:
    if isinstance(collective, Demand):
        return collective
    if isinstance(topology, FlowNetwork):
        gpus = [1] * len(topology.endpoints)
    else:
        gpus = endpoint_gpus(topology, fabric=fabric)
    return Demand.of(Collective(collective, sum(gpus)) if isinstance(collective, str) else collective, gpus)


class CutProgram:
    """The linear program of one network and demand, with the cuts so far; T is in units of `unit_s` (s per byte).

    A port that could carry every tree in one unit never binds (T >= 1), so rates are capped there: this keeps the
    program well scaled for any rates.
    """

    def __init__(
        self,
        network: FlowNetwork,
        demand: Demand,
        unit_s: Fraction,
        with_cuts: Sequence[Cut] = (),
        negligible: Fraction = Fraction(0),
    ) -> None:
        self.network, self.demand, self.unit_s, self.negligible = network, demand, unit_s, negligible
        self.program = LinearProgram()
        p, nodes = len(network.endpoints), network.nodes
        self.time = self.program.variable("T", cost=1)
        self.root = [self.program.variable(f"root {nodes[v]}") for v in range(p)] if demand.roots is None else []
        self.load = {
            kind: [
                self.program.variable(f"{kind} {nodes[link.tail]} to {nodes[link.head]} link {number}")
                for number, link in enumerate(network.links)
            ]
            for kind in demand.kinds
        }
        self.into: dict[int, list[int]] = {node: [] for node in range(network.n_nodes)}
        self.outof: dict[int, list[int]] = {node: [] for node in range(network.n_nodes)}
        for number, link in enumerate(network.links):
            self.outof[link.tail].append(number)
            self.into[link.head].append(number)
        self.port_constraint = self._ports_have_room()
        self.switch_constraint = self._switches_pass_on()
        if demand.roots is None:
            self.program.constraint("roots", tuple((column, Fraction(1)) for column in self.root), EQUAL, Fraction(1))
        self.cut_constraint: dict[tuple[str, frozenset[int]], int] = {}
        everything = frozenset(range(network.n_nodes))
        for cut in with_cuts:
            self.add_cut(cut.kind, frozenset(cut.nodes))
        for kind in demand.kinds:
            for v in range(p):
                self.add_cut(kind, frozenset((v,)))
                self.add_cut(kind, everything - {v})

    def _ports_have_room(self) -> list[int]:
        users: list[list[int]] = [[] for _ in self.network.ports]
        for number, link in enumerate(self.network.links):
            for port in link.ports:
                users[port].append(number)
        return [
            self.program.constraint(
                f"port {port.name}",
                (
                    (self.time, -self._in_one_unit(port.rate)),
                    *((self.load[kind][link], Fraction(1)) for kind in self.demand.kinds for link in users[number]),
                ),
                AT_MOST,
                Fraction(0),
            )
            for number, port in enumerate(self.network.ports)
        ]

    def _in_one_unit(self, rate: Fraction) -> Fraction:
        """Messages that a port of this rate carries in one unit of T."""
        most = 2 * len(self.demand.kinds) * len(self.network.endpoints)
        messages = rate * self.unit_s
        return Fraction(0) if messages < self.negligible else min(messages, Fraction(most))

    def _switches_pass_on(self) -> dict[str, list[int]]:
        p = len(self.network.endpoints)
        return {
            kind: [
                self.program.constraint(
                    f"{kind} through {name}",
                    (
                        *((self.load[kind][link], Fraction(1)) for link in self.into[p + switch]),
                        *((self.load[kind][link], Fraction(-1)) for link in self.outof[p + switch]),
                    ),
                    EQUAL,
                    Fraction(0),
                )
                for switch, name in enumerate(self.network.switches)
            ]
            for kind in self.demand.kinds
        }

    def add_cut(self, kind: str, nodes: frozenset[int]) -> bool:
        """load(across the border of `nodes`) + x(nodes) >= 1, unless it is present or trivial; True if added."""
        held = [v for v in range(len(self.network.endpoints)) if v in nodes]
        given = Fraction(0) if self.demand.roots is None else sum((self.demand.roots[v] for v in held), Fraction(0))
        if (kind, nodes) in self.cut_constraint or given == 1 or len(held) == len(self.network.endpoints):
            return False
        links, far = (self.into, "tail") if kind == BROADCAST else (self.outof, "head")
        crossing = [
            link
            for node in sorted(nodes)
            for link in links[node]
            if getattr(self.network.links[link], far) not in nodes
        ]
        coefficients = [(self.load[kind][link], Fraction(1)) for link in crossing]
        if self.demand.roots is None:
            coefficients += [(self.root[v], Fraction(1)) for v in held]
        name = f"{kind} cut {len(self.cut_constraint)}"
        self.cut_constraint[kind, nodes] = self.program.constraint(name, tuple(coefficients), AT_LEAST, 1 - given)
        return True

    def add_violated(self, values: Sequence[float]) -> int:
        """Adds cuts that float `values` violate beyond rounding; returns their number."""
        roots = (
            [float(x) for x in self.demand.roots] if self.demand.roots is not None else [values[c] for c in self.root]
        )
        added = 0
        for kind in self.demand.kinds:
            for _, nodes in narrow_cuts(
                self.network.n_nodes,
                [
                    (link.tail, link.head) if kind == BROADCAST else (link.head, link.tail)
                    for link in self.network.links
                ],
                [max(0, round(values[column] * _FLOAT_UNIT)) for column in self.load[kind]],
                [max(0, round(x * _FLOAT_UNIT)) for x in roots],
                _FLOAT_UNIT - _FLOAT_SLACK,
            ):
                added += self.add_cut(kind, nodes)
        return added

    def add_violated_exactly(self, values: Sequence[Fraction]) -> int:
        """Adds all cuts that exact `values` violate; returns their number."""
        roots, loads = self._packing(values)
        added = 0
        for kind in self.demand.kinds:
            for _, nodes in starved_sets(self.network, loads[kind], roots, kind):
                added += self.add_cut(kind, nodes)
        return added

    def _packing(self, values: Sequence[Fraction]) -> tuple[tuple[Fraction, ...], dict[str, tuple[Fraction, ...]]]:
        """Roots and loads of `values`, negative ones set to zero."""
        zero = Fraction(0)
        roots = self.demand.roots
        if roots is None:
            roots = tuple(max(zero, values[column]) for column in self.root)
        loads = {kind: (zero,) * len(self.network.links) for kind in _KINDS}
        for kind in self.demand.kinds:
            loads[kind] = tuple(max(zero, values[column]) for column in self.load[kind])
        return roots, loads

    def _passed_on(self, loads: dict[str, tuple[Fraction, ...]]) -> bool:
        """True if every switch conserves flow."""
        return all(
            sum((loads[kind][link] for link in self.into[switch]), Fraction(0))
            == sum((loads[kind][link] for link in self.outof[switch]), Fraction(0))
            for kind in self.demand.kinds
            for switch in range(len(self.network.endpoints), self.network.n_nodes)
        )

    def certificate(self, duals: Sequence[Fraction], size_bytes: int) -> Certificate:
        """The bound that `duals` prove after repair: no negative weight or price, and inequality (1) of `replay` holds.

        Where the cuts of a link weigh more than its ports cost, the price of its slowest port rises by the difference.
        """
        network, zero = self.network, Fraction(0)
        cuts = tuple(
            Cut(kind, tuple(sorted(nodes)), duals[row])
            for (kind, nodes), row in self.cut_constraint.items()
            if duals[row] > 0
        )
        prices = [max(zero, -duals[row]) for row in self.port_constraint]
        potentials = {kind: tuple(duals[row] for row in rows) for kind, rows in self.switch_constraint.items()}
        for kind in self.demand.kinds:
            level = [zero] * len(network.endpoints) + list(potentials[kind])
            holding: list[set[int]] = [set() for _ in range(network.n_nodes)]
            for number, cut in enumerate(cuts):
                if cut.kind == kind:
                    for node in cut.nodes:
                        holding[node].add(number)
            for link in network.links:
                outside, inside = (link.tail, link.head) if kind == BROADCAST else (link.head, link.tail)
                worth = sum((cuts[each].weight for each in holding[inside] - holding[outside]), zero)
                missing = worth + level[link.head] - level[link.tail] - sum((prices[port] for port in link.ports), zero)
                if missing > 0:
                    prices[min(link.ports, key=lambda port: network.ports[port].rate)] += missing
        return Certificate.of(network, self.demand, size_bytes, cuts, tuple(prices), potentials)

    def achieved(self, values: Sequence[Fraction], size_bytes: int) -> Achieved | None:
        """The packing of `values` with loads scaled up until every cut holds; None if it is not one."""
        roots, loads = self._packing(values)
        if min(values) < 0 or sum(roots) != 1 or not self._passed_on(loads):
            return None
        for kind in self.demand.kinds:
            while starved := starved_sets(self.network, loads[kind], roots, kind):
                inside = [sum((roots[v] for v in nodes if v < len(roots)), Fraction(0)) for _, nodes in starved]
                if any(share == x for (share, _), x in zip(starved, inside, strict=True)):
                    return None
                factor = max((1 - x) / (share - x) for (share, _), x in zip(starved, inside, strict=True))
                loads[kind] = tuple(load * factor for load in loads[kind])
        carried = [Fraction(0)] * len(self.network.ports)
        for kind in self.demand.kinds:
            for link, load in zip(self.network.links, loads[kind], strict=True):
                for port in link.ports:
                    carried[port] += load
        slowest = max(load / port.rate for load, port in zip(carried, self.network.ports, strict=True))
        return Achieved(slowest * size_bytes, roots, loads)


def _check_finite(cuts: CutProgram, solved: Solved) -> None:
    """Raises SolverError for a solution of the wrong shape, or with values that are not finite."""
    shapes = (len(solved.values), len(solved.duals))
    wanted = (len(cuts.program.variables), len(cuts.program.constraints))
    if shapes != wanted:
        raise SolverError(f"solver: {shapes} values and duals: the program has {wanted} variables and constraints")
    for number in (solved.objective, *solved.values, *solved.duals):
        if not isfinite(number):
            raise SolverError(f"solver: {number}: must be a number")
