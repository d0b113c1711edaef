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

Links that automorphisms exchange have one variable together (`optcc.verify.bounds.symmetry`), and likewise ports,
switches and the images of a cut one row. What the program says of an orbit is written out for each of its members: the
certificate, and its replay, are of the whole network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite

from optcc.collective import Collective
from optcc.errors import SolverError, SolverUnknown
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Achieved, Certificate, Cut, whole_or_fraction
from optcc.verify.bounds.closed_form_certificates import closed_forms
from optcc.verify.bounds.network import (
    BROADCAST,
    REDUCE,
    Borders,
    Demand,
    FlowNetwork,
    endpoint_gpus,
    require_connected,
)
from optcc.verify.bounds.replay import carried_by_ports, cut_finder, find_starved, in_units, replay, worth_of_links
from optcc.verify.bounds.solvers import (
    AT_LEAST,
    AT_MOST,
    EQUAL,
    Coefficients,
    HighsSolver,
    Infeasible,
    LinearProgram,
    MakeSolver,
    Solved,
    Unsolved,
    exact_vertex,
)
from optcc.verify.bounds.symmetry import Symmetry, find_symmetry

TIME_LIMIT_S = 60.0
CLAIM_TOLERANCE = 1e-6
_FLOAT_ROUNDING = Fraction(1, 10**12)
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
    symmetric: bool = False,
    solver: MakeSolver = HighsSolver,
    clock: Callable[[], float] = time.monotonic,
) -> CertifiedBound:
    """The optimum of the tree model for `collective` of `size_bytes`, certified from below and (`primal`) from above.

    >>> bound = lp_bound(Topology.parse("4@50MB/s,3=25MB/s"), "allreduce", 100_000_000)
    >>> str(bound.seconds), str(bound.gap), bound.binding
    ('4', '0', ('in h3',))

    With `fabric`, GPUs behind fabrics of finite rate are endpoints of their own. If `symmetric`, links that are alike
    get the same load, which is much faster for many equal servers; otherwise loads are those of a vertex, which pack
    into fewer trees. A collective given by its name has root 0. Raises TopologyError if some endpoints cannot reach
    others, BoundUnknown with the best bound so far at the time limit, SolverError if the solver's claim differs from
    what its own numbers prove.
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
    group = find_symmetry(network, demand) if symmetric else Symmetry.none(network)
    search = _Search(CutProgram(network, demand, unit_s, best.cuts, group=group), best, primal, solver)
    search.run(lambda: time_limit_s - (clock() - started))
    if primal and search.best.gap != 0 and any(port.rate * unit_s < _NEGLIGIBLE for port in network.ports):
        # The range of rates is too wide for floats: ignore the slowest ports, and let the gap say what that costs.
        coarse = CutProgram(network, demand, unit_s, best.cuts, _NEGLIGIBLE, group=group)
        again = _Search(coarse, search.best, primal, solver)
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
        if self.best.seconds < claim - _FLOAT_ROUNDING * self.best.seconds:
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
    program well scaled for any rates. With a `group`, variables are those of orbits.
    """

    def __init__(
        self,
        network: FlowNetwork,
        demand: Demand,
        unit_s: Fraction,
        with_cuts: Sequence[Cut] = (),
        negligible: Fraction = Fraction(0),
        *,
        group: Symmetry | None = None,
    ) -> None:
        self.network, self.demand, self.unit_s, self.negligible = network, demand, unit_s, negligible
        self.group = group = group or Symmetry.none(network)
        self.program = LinearProgram()
        p, nodes = len(network.endpoints), network.nodes
        self.every_node = frozenset(range(network.n_nodes))
        self.chosen = [v for v in group.nodes.first if v < p]  # an endpoint of each orbit
        self.time = self.program.variable("T", cost=1)
        self.root = [self.program.variable(f"root {nodes[v]}") for v in self.chosen] if demand.roots is None else []
        self.load = {
            kind: [
                self.program.variable(
                    f"{kind} {nodes[network.links[number].tail]} to {nodes[network.links[number].head]} link {number}"
                )
                for number in group.links.first
            ]
            for kind in demand.kinds
        }
        self.borders = Borders(network)
        self.finders = {kind: cut_finder(network, kind) for kind in demand.kinds}
        self.port_constraint = self._ports_have_room()
        self.switch_constraint = self._switches_pass_on()
        if demand.roots is None:
            whole = [(column, group.nodes.sizes[orbit]) for orbit, column in enumerate(self.root)]
            self.program.constraint("roots", _summed(whole), EQUAL, Fraction(1))
        self.cut_constraint: dict[tuple[str, frozenset[int]], int] = {}
        self.known: set[tuple[str, bool, frozenset[int]]] = set()
        for cut in with_cuts:
            self.add_cut(cut.kind, frozenset(cut.nodes))
        for kind in demand.kinds:
            for v in self.chosen:
                self.add_cut(kind, frozenset((v,)))
                self.add_cut(kind, self.every_node - {v})

    def _columns(self, kind: str, links: Sequence[int], factor: int = 1) -> list[tuple[int, int]]:
        """(variable, factor) for the load of each of `links`."""
        return [(self.load[kind][self.group.links.of[link]], factor) for link in links]

    def _ports_have_room(self) -> list[int]:
        users: list[list[int]] = [[] for _ in self.network.ports]
        for number, link in enumerate(self.network.links):
            for used in link.ports:
                users[used].append(number)
        found = []
        for number in self.group.ports.first:
            port = self.network.ports[number]
            carried = _summed([each for kind in self.demand.kinds for each in self._columns(kind, users[number])])
            coefficients = ((self.time, -self._in_one_unit(port.rate)), *carried)
            found.append(self.program.constraint(f"port {port.name}", coefficients, AT_MOST, Fraction(0)))
        return found

    def _in_one_unit(self, rate: Fraction) -> Fraction:
        """Messages that a port of this rate carries in one unit of T."""
        most = 2 * len(self.demand.kinds) * len(self.network.endpoints)
        messages = rate * self.unit_s
        return Fraction(0) if messages < self.negligible else min(messages, Fraction(most))

    def _switches_pass_on(self) -> dict[str, list[int]]:
        nodes, borders = self.network.nodes, self.borders
        return {
            kind: [
                self.program.constraint(
                    f"{kind} through {nodes[switch]}",
                    _summed(
                        [
                            *self._columns(kind, borders.into[switch]),
                            *self._columns(kind, borders.outof[switch], factor=-1),
                        ]
                    ),
                    EQUAL,
                    Fraction(0),
                )
                for switch in self.group.nodes.first[len(self.chosen) :]
            ]
            for kind in self.demand.kinds
        }

    def add_cut(self, kind: str, nodes: frozenset[int]) -> bool:
        """load(across the border of `nodes`) + x(nodes) >= 1, unless it or an image of it is present, or it is trivial,
        or has too many images; True if added."""
        p = len(self.network.endpoints)
        held = [v for v in range(p) if v in nodes]
        given = Fraction(0) if self.demand.roots is None else sum((self.demand.roots[v] for v in held), Fraction(0))
        inverted, small = self._smaller_side(nodes)
        if (kind, inverted, small) in self.known or given == 1 or len(held) == p:
            return False
        images = self.group.images(small)
        if images is None:
            return False
        self.known.update((kind, inverted, image) for image in images)
        entries = self._columns(kind, self.borders.crossed(kind, nodes))
        if self.demand.roots is None:
            entries += [(self.root[self.group.nodes.of[v]], 1) for v in held]
        name = f"{kind} cut {len(self.cut_constraint)}"
        self.cut_constraint[kind, nodes] = self.program.constraint(name, _summed(entries), AT_LEAST, 1 - given)
        return True

    def _smaller_side(self, nodes: frozenset[int]) -> tuple[bool, frozenset[int]]:
        """Whether the complement of `nodes` is smaller, and the smaller one."""
        inverted = 2 * len(nodes) > self.network.n_nodes
        return inverted, self.every_node - nodes if inverted else nodes

    def add_violated(self, values: Sequence[float]) -> int:
        """Adds cuts that float `values` violate beyond rounding; returns their number.

        The narrowest cuts that hold an endpoint are as symmetric as this endpoint, and so have few images.
        """
        roots = self.demand.roots or [values[column] for column in self._root_columns()]
        added = 0
        for kind in self.demand.kinds:
            whole = [max(0, round(values[column] * _FLOAT_UNIT)) for column in self.load[kind]]
            for _, nodes in self.finders[kind].find(
                [whole[orbit] for orbit in self.group.links.of],
                [max(0, round(float(x) * _FLOAT_UNIT)) for x in roots],
                _FLOAT_UNIT - _FLOAT_SLACK,
                alike=self.group.nodes.of,
            ):
                added += self.add_cut(kind, nodes)
        return added

    def add_violated_exactly(self, values: Sequence[Fraction]) -> int:
        """Adds all cuts that exact `values` violate; returns their number."""
        roots, loads = self._packing(values)
        added = 0
        for kind in self.demand.kinds:
            for _, nodes in self._starved(kind, loads[kind], roots):
                added += self.add_cut(kind, nodes)
        return added

    def _starved(
        self, kind: str, loads: Sequence[Fraction], roots: Sequence[Fraction]
    ) -> list[tuple[Fraction, frozenset[int]]]:
        """`starved_sets` of loads that are equal in every orbit."""
        return find_starved(self.finders[kind], loads, roots, self.group.nodes.of)

    def _root_columns(self) -> list[int]:
        """The variable for the root share of each endpoint."""
        return [self.root[orbit] for orbit in self.group.nodes.of[: len(self.network.endpoints)]]

    def _packing(self, values: Sequence[Fraction]) -> tuple[tuple[Fraction, ...], dict[str, tuple[Fraction, ...]]]:
        """Roots and loads of `values`, negative ones set to zero."""
        zero = Fraction(0)
        roots = self.demand.roots
        if roots is None:
            roots = tuple(max(zero, values[column]) for column in self._root_columns())
        loads = {kind: (zero,) * len(self.network.links) for kind in _KINDS}
        for kind in self.demand.kinds:
            chosen = [max(zero, values[column]) for column in self.load[kind]]
            loads[kind] = tuple(chosen[orbit] for orbit in self.group.links.of)
        return roots, loads

    def _passed_on(self, loads: dict[str, tuple[Fraction, ...]]) -> bool:
        """True if every switch conserves flow."""
        into, outof = self.borders.into, self.borders.outof
        return all(
            sum((loads[kind][link] for link in into[switch]), Fraction(0))
            == sum((loads[kind][link] for link in outof[switch]), Fraction(0))
            for kind in self.demand.kinds
            for switch in self.group.nodes.first[len(self.chosen) :]
        )

    def certificate(self, duals: Sequence[Fraction], size_bytes: int) -> Certificate:
        """The bound that `duals` prove after repair: no negative weight or price, and inequality (1) of `replay` holds.

        What an orbit is worth is shared among its members. Where the cuts of a link weigh more than its ports cost, the
        price of its slowest port rises by the difference.
        """
        group, zero = self.group, Fraction(0)
        cuts: list[tuple[str, frozenset[int], Fraction]] = []
        for (kind, nodes), row in self.cut_constraint.items():
            if duals[row] > 0:
                inverted, small = self._smaller_side(nodes)
                images = group.images(small)
                assert images is not None
                sides = [self.every_node - image if inverted else image for image in images]
                cuts += [(kind, side, duals[row] / len(sides)) for side in sides]
        costs = [
            max(zero, -duals[row]) / size for row, size in zip(self.port_constraint, group.ports.sizes, strict=True)
        ]
        levels = [self._spread_over_switches(duals, rows) for rows in self.switch_constraint.values()]
        # a certificate only depends on the ratios of its numbers: whole ones are much faster to add
        unit, _ = in_units([*(weight for _, _, weight in cuts), *costs, *(each for level in levels for each in level)])
        return self._mended(
            [Cut(kind, tuple(sorted(side)), weight * unit) for kind, side, weight in cuts],
            [costs[orbit] * unit for orbit in group.ports.of],
            {
                kind: tuple(each * unit for each in level)
                for kind, level in zip(self.switch_constraint, levels, strict=True)
            },
            size_bytes,
        )

    def _mended(
        self,
        cuts: Sequence[Cut],
        prices: Sequence[Fraction],
        potentials: Mapping[str, tuple[Fraction, ...]],
        size_bytes: int,
    ) -> Certificate:
        """The certificate of these, with prices raised until inequality (1) of `replay` holds."""
        network = self.network
        whole = [whole_or_fraction(price) for price in prices]
        for kind in self.demand.kinds:
            worths = worth_of_links(network, cuts, potentials[kind], kind)
            for link, worth in zip(network.links, worths, strict=True):
                missing = worth - sum(whole[port] for port in link.ports) if worth > 0 else 0
                if missing > 0:
                    whole[min(link.ports, key=lambda port: network.ports[port].rate)] += missing
        return Certificate.of(
            network, self.demand, size_bytes, tuple(cuts), tuple(Fraction(price) for price in whole), potentials
        )

    def _spread_over_switches(self, duals: Sequence[Fraction], rows: Sequence[int]) -> tuple[Fraction, ...]:
        """The potential of every switch, from those of the orbits' rows."""
        orbits, p, first = self.group.nodes, len(self.network.endpoints), len(self.chosen)
        return tuple(duals[rows[orbit - first]] / orbits.sizes[orbit] for orbit in orbits.of[p:])

    def achieved(self, values: Sequence[Fraction], size_bytes: int) -> Achieved | None:
        """The packing of `values` with loads scaled up until every cut holds; None if it is not one."""
        roots, loads = self._packing(values)
        if min(values) < 0 or sum(roots) != 1 or not self._passed_on(loads):
            return None
        for kind in self.demand.kinds:
            while starved := self._starved(kind, loads[kind], roots):
                inside = [sum((roots[v] for v in nodes if v < len(roots)), Fraction(0)) for _, nodes in starved]
                if any(share == x for (share, _), x in zip(starved, inside, strict=True)):
                    return None
                factor = max((1 - x) / (share - x) for (share, _), x in zip(starved, inside, strict=True))
                loads[kind] = tuple(load * factor for load in loads[kind])
        carried = carried_by_ports(self.network, loads)
        slowest = max(load / port.rate for load, port in zip(carried, self.network.ports, strict=True))
        return Achieved(slowest * size_bytes, roots, loads)


def _summed(entries: Iterable[tuple[int, int]]) -> Coefficients:
    """(variable, coefficient), the factors of each variable added up; without zeros."""
    sums: dict[int, int] = {}
    for column, factor in entries:
        sums[column] = sums.get(column, 0) + factor
    return tuple((column, Fraction(factor)) for column, factor in sums.items() if factor)


def _check_finite(cuts: CutProgram, solved: Solved) -> None:
    """Raises SolverError for a solution of the wrong shape, or with values that are not finite."""
    shapes = (len(solved.values), len(solved.duals))
    wanted = (len(cuts.program.variables), len(cuts.program.constraints))
    if shapes != wanted:
        raise SolverError(f"solver: {shapes} values and duals: the program has {wanted} variables and constraints")
    for number in (solved.objective, *solved.values, *solved.duals):
        if not isfinite(number):
            raise SolverError(f"solver: {number}: must be a number")
