"""`Certificate`: why nothing can be faster, and how nearly that is achieved, in numbers that anybody can add up.

A certificate is self-contained: the network with its exact rates, the cuts with their weights, the ports with their
prices; `optcc.verify.bounds.replay` says what follows from them and checks it. As a file (`optcc-certificate/1`, JSON)
it does not depend on the machine or on the solver that found it; its digest is the SHA-256 of its canonical content.

Files are data from strangers: what is unknown, there twice, a float, or too large is a CodecError that starts with the
path to the field. Rationals are strings "a/b" in lowest terms.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import TypeVar

from optcc.collective import COLLECTIVES, Collective
from optcc.errors import CodecError, OptccError, SolverError
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.units import SIZE_BYTES_MAX, show_rate, show_size, show_time
from optcc.verify.bounds.closed_forms import Bound
from optcc.verify.bounds.network import BROADCAST, KINDS_OF, REDUCE, Demand, Link, Network, Port, endpoint_gpus
from optcc.verify.bounds.replay import least_crossing, replay

FORMAT = "optcc-certificate/1"
MODEL = "trees on the endpoints of this network, fluid, no latency"
FILE_BYTES_MAX = 2**28
DIGITS_MAX = 4000
COUNT_MAX = 2**20
_KINDS = (REDUCE, BROADCAST)
_RATIONAL = re.compile(r"(-?[1-9][0-9]*|0)/([1-9][0-9]*)")
_NAME_LENGTH_MAX = 1000
_SHOWN_LENGTH_MAX = 60


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of nodes that trees of `kind` must enter (broadcast) or leave (reduce), and how much that counts."""

    kind: str
    nodes: tuple[int, ...]
    weight: Fraction


@dataclass(frozen=True, slots=True)
class Tree:
    """An in-tree (reduce) or out-tree (broadcast) for a share `weight` of the message; a path is a list of links."""

    kind: str
    root: int
    weight: Fraction
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Achieved:
    """What can be done: seconds, shares of the roots, the load of each link by kind (in messages), maybe its trees."""

    seconds: Fraction
    roots: tuple[Fraction, ...]
    loads: Mapping[str, tuple[Fraction, ...]]
    trees: tuple[Tree, ...] | None = None


@dataclass(frozen=True, slots=True)
class Certificate(Shown):
    """The bound `seconds` = size_bytes * crossing / supply; see `optcc.verify.bounds.replay` for the inequalities."""

    network: Network
    demand: Demand
    size_bytes: int
    cuts: tuple[Cut, ...]
    prices: tuple[Fraction, ...]
    potentials: Mapping[str, tuple[Fraction, ...]]
    crossing: Fraction
    supply: Fraction
    seconds: Fraction
    achieved: Achieved | None = None

    def __post_init__(self) -> None:
        network = self.network
        if not 0 <= self.size_bytes <= SIZE_BYTES_MAX:
            raise SolverError(f"certificate: size {self.size_bytes}: must be 0 to {SIZE_BYTES_MAX} bytes")
        _check_length("prices", self.prices, len(network.ports))
        if set(self.potentials) != set(_KINDS):
            raise SolverError(f"certificate: potentials of {', '.join(self.potentials)}: must be reduce and broadcast")
        for values in self.potentials.values():
            _check_length("potentials", values, len(network.switches))
        if self.demand.roots is not None:
            _check_length("roots", self.demand.roots, len(network.endpoints))
        for cut in self.cuts:
            if cut.kind not in _KINDS or list(cut.nodes) != sorted({n for n in cut.nodes if 0 <= n < network.n_nodes}):
                raise SolverError(f"certificate: {cut.kind} cut {cut.nodes}: must be nodes of the network in order")
        if self.achieved is not None:
            _check_length("roots", self.achieved.roots, len(network.endpoints))
            if set(self.achieved.loads) != set(_KINDS):
                raise SolverError(
                    f"certificate: loads of {', '.join(self.achieved.loads)}: must be reduce and broadcast"
                )
            for loads in self.achieved.loads.values():
                _check_length("loads", loads, len(network.links))
            for tree in self.achieved.trees or ():
                ends = [link for path in tree.paths for link in path]
                if tree.kind not in _KINDS or not 0 <= tree.root < len(network.endpoints) or not all(tree.paths):
                    raise SolverError(f"certificate: {tree.kind} tree at {tree.root}: must have a root and paths")
                if any(not 0 <= link < len(network.links) for link in ends):
                    raise SolverError(f"certificate: tree at {tree.root}: must use links of the network")

    @classmethod
    def of(
        cls,
        network: Network,
        demand: Demand,
        size_bytes: int,
        cuts: tuple[Cut, ...],
        prices: tuple[Fraction, ...],
        potentials: Mapping[str, tuple[Fraction, ...]] | None = None,
    ) -> Certificate:
        """The certificate with what follows from cuts and prices, all of them scaled to the least whole numbers."""
        potentials = potentials or {}
        zeros = (Fraction(0),) * len(network.switches)
        potentials = {kind: potentials.get(kind, zeros) for kind in _KINDS}
        numbers = [*(cut.weight for cut in cuts), *prices, *(each for kind in _KINDS for each in potentials[kind])]
        scale = Fraction(lcm(*(each.denominator for each in numbers)))
        scale /= gcd(*(int(each * scale) for each in numbers)) or 1
        cuts = tuple(replace(cut, weight=cut.weight * scale) for cut in cuts if cut.weight)
        prices = tuple(price * scale for price in prices)
        crossing = least_crossing(cuts, demand, len(network.endpoints))
        supply = sum((port.rate * price for port, price in zip(network.ports, prices, strict=True)), Fraction(0))
        return cls(
            network,
            demand,
            size_bytes,
            cuts,
            prices,
            {kind: tuple(each * scale for each in potentials[kind]) for kind in _KINDS},
            crossing,
            supply,
            size_bytes * crossing / supply if supply else Fraction(0),
        )

    @property
    def binding(self) -> tuple[str, ...]:
        """The ports that cost something."""
        return tuple(p.name for p, price in zip(self.network.ports, self.prices, strict=True) if price)

    @property
    def shares(self) -> dict[str, Fraction]:
        """For each binding port, its part of the bound: 1 % more of its rate makes the bound share % smaller."""
        return {
            port.name: port.rate * price / self.supply
            for port, price in zip(self.network.ports, self.prices, strict=True)
            if price
        }

    @property
    def gap(self) -> Fraction | None:
        """What is achieved over the bound, minus one; None if nothing is achieved."""
        if self.achieved is None:
            return None
        return self.achieved.seconds / self.seconds - 1 if self.seconds else self.achieved.seconds

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical content: what `as_json` says, keys sorted, no blanks."""
        return _digest(self._content())

    def as_json(self) -> dict[str, object]:
        """The file's content as plain values; fractions as "a/b"."""
        return {"format": FORMAT, "digest": self.digest, **self._content()}

    def to_bytes(self) -> bytes:
        """The file."""
        lines = (f"{json.dumps(key)}: {_canonical(value)}" for key, value in self.as_json().items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    def card(self) -> Card:
        rates = {port.name: port.rate for port in self.network.ports}
        rows = tuple(
            (name, show_rate(rates[name]), f"{float(100 * share):.2f} %")
            for name, share in sorted(self.shares.items(), key=lambda each: -each[1])
        )
        what = f"no {self.demand.collective} of {show_size(self.size_bytes)}"
        title = f"{what} is faster than {show_time(float(self.seconds))}"
        if self.achieved is not None:
            title += f"; {show_time(float(self.achieved.seconds))} can be done"
        return Card(title, ("port", "rate", "of the bound"), rows)

    def _content(self) -> dict[str, object]:
        network, achieved = self.network, self.achieved
        return {
            "model": MODEL,
            "collective": self.demand.collective,
            "roots": None if self.demand.roots is None else [_write(x) for x in self.demand.roots],
            "size_bytes": self.size_bytes,
            "seconds": _write(self.seconds),
            "demand": _write(self.crossing),
            "supply": _write(self.supply),
            "endpoints": list(network.endpoints),
            "switches": list(network.switches),
            "ports": [{"name": port.name, "rate": _write(port.rate)} for port in network.ports],
            "links": [{"tail": link.tail, "head": link.head, "ports": list(link.ports)} for link in network.links],
            "cuts": [{"kind": c.kind, "nodes": list(c.nodes), "weight": _write(c.weight)} for c in self.cuts],
            "prices": [_write(price) for price in self.prices],
            "potentials": {kind: [_write(each) for each in self.potentials[kind]] for kind in _KINDS},
            "achieved": None
            if achieved is None
            else {
                "seconds": _write(achieved.seconds),
                "roots": [_write(x) for x in achieved.roots],
                "loads": {kind: [_write(load) for load in achieved.loads[kind]] for kind in _KINDS},
                "trees": None
                if achieved.trees is None
                else [
                    {"kind": t.kind, "root": t.root, "weight": _write(t.weight), "paths": [list(p) for p in t.paths]}
                    for t in achieved.trees
                ],
            },
        }


def _check_length(what: str, values: tuple[object, ...], length: int) -> None:
    if len(values) != length:
        raise SolverError(f"certificate: {len(values)} {what}: must be {length}")


def _write(number: Fraction) -> str:
    return f"{number.numerator}/{number.denominator}"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest(content: dict[str, object]) -> str:
    return hashlib.sha256(_canonical({"format": FORMAT, **content}).encode()).hexdigest()


# Closed forms.


def certify(bound: Bound, topology: Topology, root: int = 0) -> Certificate:
    """The certificate of a closed-form bound (`root`: the rank, for Broadcast and Reduce), replayed first.

    Raises SolverError if none of the cut certificates of closed forms gives the seconds of the bound; then it takes
    `optcc.verify.bounds.lp.lp_bound`, with `fabric` where fabrics decide.
    """
    demand = Demand.of(Collective(bound.collective, topology.n_ranks, root), endpoint_gpus(topology))
    network = Network.from_topology(topology)
    certificate = max(closed_forms(network, demand, bound.size_bytes), key=lambda each: each.seconds)
    if certificate.seconds != bound.seconds:
        raise SolverError(
            f"bound {bound.seconds} s: the best certificate of a closed form gives {certificate.seconds} s"
        )
    replay(certificate, topology)
    return certificate


def closed_forms(network: Network, demand: Demand, size_bytes: int) -> list[Certificate]:
    """Certificates that need no solver: each endpoint alone, in and out; all ports in, and all ports out, together;
    and the cuts that are left when only the fastest links are kept.

    in v: everybody else's bytes enter {v}, and leave the rest. Together: each endpoint is entered once and left once,
    and what the core takes it must give.
    """
    p, nodes = len(network.endpoints), range(network.n_nodes)
    zeros = [Fraction(0)] * len(network.ports)
    if p == 1 or size_bytes == 0:
        return [Certificate.of(network, demand, size_bytes, (), tuple(zeros))]
    found: list[Certificate] = []
    one = Fraction(1)
    for v in range(p):
        rest = tuple(node for node in nodes if node != v)
        for into in (True, False):
            prices = list(zeros)
            for link in network.links:
                if (link.head if into else link.tail) == v:
                    prices[link.ports[0]] = one
            # what enters v enters {v} and leaves the rest; what leaves v leaves {v} and enters the rest
            sides = {BROADCAST: (v,) if into else rest, REDUCE: rest if into else (v,)}
            cuts = tuple(Cut(kind, sides[kind], one) for kind in demand.kinds)
            found.append(Certificate.of(network, demand, size_bytes, cuts, tuple(prices)))
    found += [
        Certificate.of(network, demand, size_bytes, cuts, prices) for cuts, prices in _bottlenecks(network, demand)
    ]
    hubs = all((link.tail < p) != (link.head < p) for link in network.links)
    if hubs:
        cuts = tuple(Cut(kind, (v,), one) for kind in demand.kinds for v in range(p))
        for into in (True, False):
            prices = list(zeros)
            for link in network.links:
                if (link.head < p) == into:
                    prices[link.ports[0]] = one
            # the potential moves the price of a link into a switch to the link out of it, or back
            level = {BROADCAST: 0 if into else 1, REDUCE: -1 if into else 0}
            potentials = {kind: (Fraction(level[kind]),) * len(network.switches) for kind in demand.kinds}
            found.append(Certificate.of(network, demand, size_bytes, cuts, tuple(prices), potentials))
    return found


def _bottlenecks(network: Network, demand: Demand) -> list[tuple[tuple[Cut, ...], tuple[Fraction, ...]]]:
    """Cuts that only slow links cross: what a root still reaches, or is reached from, over the fastest links.

    The links kept are the most that do not join all endpoints. This is what keeps the unit of time right where a group
    of endpoints, each of them fast, hangs on slow links.
    """
    p = len(network.endpoints)
    root = 0 if demand.roots is None else next(v for v in range(p) if demand.roots[v])
    speed = [min(network.ports[port].rate for port in link.ports) for link in network.links]

    def sides(above: Fraction) -> list[tuple[bool, set[int]]]:
        """(forward, nodes) for each direction in which the links faster than `above` do not join all endpoints."""
        found = []
        for forward in (True, False):
            onward: list[list[int]] = [[] for _ in range(network.n_nodes)]
            for link, rate in zip(network.links, speed, strict=True):
                if rate > above:
                    onward[link.tail if forward else link.head].append(link.head if forward else link.tail)
            seen, todo = {root}, [root]
            while todo:
                for node in onward[todo.pop()]:
                    if node not in seen:
                        seen.add(node)
                        todo.append(node)
            if not seen.issuperset(range(p)):
                found.append((forward, seen))
        return found

    rates = sorted(set(speed))
    low, high = 0, len(rates) - 1  # the first rate such that the links above it leave somebody out
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sides(rates[middle]) else (middle + 1, high)
    found = []
    for forward, seen in sides(rates[low]) if rates else ():
        here, rest = tuple(sorted(seen)), tuple(node for node in range(network.n_nodes) if node not in seen)
        prices = [Fraction(0)] * len(network.ports)
        for link in network.links:
            if (link.tail in seen, link.head in seen) == (forward, not forward):
                prices[min(link.ports, key=lambda port: network.ports[port].rate)] = Fraction(1)
        into = {BROADCAST: rest if forward else here, REDUCE: here if forward else rest}
        found.append((tuple(Cut(kind, into[kind], Fraction(1)) for kind in demand.kinds), tuple(prices)))
    return found


# Reading.

_Value = TypeVar("_Value")


def read_certificate(data: bytes) -> Certificate:
    """The certificate in an `optcc-certificate/1` file.

    Raises CodecError, path first, for a file that is not one; SolverError if its digest does not match its content.
    Whether its numbers follow from each other is for `replay`.
    """
    if len(data) > FILE_BYTES_MAX:
        raise CodecError(f"$: {len(data)} B: must be at most {FILE_BYTES_MAX} B")
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_Object,
            parse_int=_Whole,
            parse_float=_Float,
            parse_constant=_Float,
        )
    except UnicodeDecodeError as error:
        raise CodecError(f"$: not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CodecError(f"$: not JSON: {error}") from None
    file = _Field("$", document).object(
        "format", "digest", "model", "collective", "roots", "size_bytes", "seconds", "demand", "supply", "endpoints",
        "switches", "ports", "links", "cuts", "prices", "potentials", "achieved",
    )  # fmt: skip
    file["format"].one_of((FORMAT,))
    file["model"].one_of((MODEL,))
    collective = file["collective"].one_of(COLLECTIVES)
    endpoints, switches = (tuple(file[key].list(_Field.name)) for key in ("endpoints", "switches"))
    n_nodes = len(endpoints) + len(switches)
    ports = tuple(file["ports"].list(_read_port))
    links = tuple(file["links"].list(lambda each: _read_link(each, n_nodes, len(ports))))
    network = _make(file["links"], lambda: Network(endpoints, switches, ports, links))
    roots = None if file["roots"].value is None else file["roots"].rationals(len(endpoints))
    demand = _make(file["roots"], lambda: Demand(collective, roots))
    potentials = file["potentials"].object(*_KINDS)
    achieved = None if file["achieved"].value is None else _read_achieved(file["achieved"], network)
    certificate = _make(
        file["cuts"],
        lambda: Certificate(
            network,
            demand,
            file["size_bytes"].whole(SIZE_BYTES_MAX),
            tuple(file["cuts"].list(lambda each: _read_cut(each, n_nodes))),
            file["prices"].rationals(len(ports)),
            {kind: potentials[kind].rationals(len(switches)) for kind in _KINDS},
            file["demand"].rational(),
            file["supply"].rational(),
            file["seconds"].rational(),
            achieved,
        ),
    )
    claimed = file["digest"].text()
    if claimed != certificate.digest:
        raise SolverError(
            f"certificate: digest {claimed[:16]}...: its content has {certificate.digest[:16]}...: altered"
        )
    return certificate


def _read_port(field: _Field) -> Port:
    port = field.object("name", "rate")
    name, rate = port["name"].name(), port["rate"].rational()
    return _make(port["rate"], lambda: Port(name, rate))


def _read_link(field: _Field, n_nodes: int, n_ports: int) -> Link:
    link = field.object("tail", "head", "ports")
    tail, head = link["tail"].whole(n_nodes - 1), link["head"].whole(n_nodes - 1)
    return Link(tail, head, tuple(link["ports"].list(lambda each: each.whole(n_ports - 1))))


def _read_cut(field: _Field, n_nodes: int) -> Cut:
    cut = field.object("kind", "nodes", "weight")
    nodes = tuple(cut["nodes"].list(lambda each: each.whole(n_nodes - 1)))
    return Cut(cut["kind"].one_of(_KINDS), nodes, cut["weight"].rational())


def _read_achieved(field: _Field, network: Network) -> Achieved:
    achieved = field.object("seconds", "roots", "loads", "trees")
    loads = achieved["loads"].object(*_KINDS)
    trees = None
    if achieved["trees"].value is not None:
        trees = tuple(achieved["trees"].list(lambda each: _read_tree(each, network)))
    return Achieved(
        achieved["seconds"].rational(),
        achieved["roots"].rationals(len(network.endpoints)),
        {kind: loads[kind].rationals(len(network.links)) for kind in _KINDS},
        trees,
    )


def _read_tree(field: _Field, network: Network) -> Tree:
    tree = field.object("kind", "root", "weight", "paths")
    return Tree(
        tree["kind"].one_of(_KINDS),
        tree["root"].whole(len(network.endpoints) - 1),
        tree["weight"].rational(),
        tuple(
            tuple(path.list(lambda each: each.whole(len(network.links) - 1)))
            for path in tree["paths"].list(lambda e: e)
        ),
    )


def _make(field: _Field, construct: Callable[[], _Value]) -> _Value:
    """A noun; what its constructor refuses, the file has wrong."""
    try:
        return construct()
    except CodecError:
        raise
    except OptccError as error:
        raise CodecError(f"{field.path}: {error}") from None


class _Object(dict[str, object]):
    """A JSON object that remembers a key that stood there twice."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.twice = next((key for key in keys if keys.count(key) > 1), None) if len(self) < len(keys) else None


class _Whole(str):
    """The digits of a JSON integer, not yet a number: they may be millions."""

    __slots__ = ()


class _Float(str):
    """The text of a JSON number that is not whole."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Field:
    """A value of a file, and the path to it."""

    path: str
    value: object

    def refuse(self, rule: str) -> CodecError:
        value = self.value
        if isinstance(value, dict):
            shown = "an object"
        elif isinstance(value, list):
            shown = f"an array of {len(value)}"
        else:
            shown = str(value) if isinstance(value, _Whole | _Float) else json.dumps(value)
            shown = shown if len(shown) <= _SHOWN_LENGTH_MAX else f"{shown[: _SHOWN_LENGTH_MAX - 3]}..."
        return CodecError(f"{self.path}: {shown}: must be {rule}")

    def object(self, *keys: str) -> dict[str, _Field]:
        if not isinstance(self.value, _Object):
            raise self.refuse("an object")
        if self.value.twice is not None:
            raise CodecError(f"{self.path}.{self.value.twice[:_SHOWN_LENGTH_MAX]}: must be there once")
        for key in self.value:
            if key not in keys:
                raise CodecError(
                    f"{self.path}.{key[:_SHOWN_LENGTH_MAX]}: unknown key: must be one of {', '.join(keys)}"
                )
        for key in keys:
            if key not in self.value:
                raise CodecError(f"{self.path}.{key}: missing: must be given")
        return {key: _Field(f"{self.path}.{key}", self.value[key]) for key in keys}

    def list(self, read: Callable[[_Field], _Value]) -> list[_Value]:
        if not isinstance(self.value, list) or len(self.value) > COUNT_MAX:
            raise self.refuse(f"an array of at most {COUNT_MAX}")
        return [read(_Field(f"{self.path}[{index}]", each)) for index, each in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or isinstance(self.value, _Whole | _Float):
            raise self.refuse("a string")
        return self.value

    def name(self) -> str:
        text = self.text()
        if not 0 < len(text) <= _NAME_LENGTH_MAX:
            raise self.refuse(f"a string of 1 to {_NAME_LENGTH_MAX} characters")
        return text

    def one_of(self, names: tuple[str, ...]) -> str:
        text = self.text()
        if text not in names:
            raise self.refuse(" or ".join(json.dumps(name) for name in names))
        return text

    def whole(self, most: int) -> int:
        rule = f"an integer from 0 to {most}"
        if not isinstance(self.value, _Whole) or len(self.value) > len(str(most)):
            raise self.refuse(rule)
        number = int(self.value)
        if not 0 <= number <= most:
            raise self.refuse(rule)
        return number

    def rational(self) -> Fraction:
        text = self.text()
        match = _RATIONAL.fullmatch(text) if len(text) <= 2 * DIGITS_MAX else None
        if match is None or max(len(match[1]), len(match[2])) > DIGITS_MAX:
            raise self.refuse(f'a rational "a/b" of at most {DIGITS_MAX} digits each')
        number = Fraction(int(match[1]), int(match[2]))
        if number.denominator != int(match[2]):
            raise self.refuse("in lowest terms")
        return number

    def rationals(self, length: int) -> tuple[Fraction, ...]:
        numbers = self.list(_Field.rational)
        if len(numbers) != length:
            raise self.refuse(f"an array of {length}")
        return tuple(numbers)


assert set(KINDS_OF) == set(COLLECTIVES), "a new collective needs its kinds of trees"
