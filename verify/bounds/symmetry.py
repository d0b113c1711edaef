"""Servers that are alike, and GPUs that are: automorphisms of a flow network, and the orbits under them.

A linear program that an automorphism maps to itself has an optimum that the automorphism maps to itself: the mean over
the group. So the loads of all links of an orbit may be one variable (Bödi, Herr, Joswig: Algorithms for highly
symmetric linear and integer programs, Mathematical Programming 137, 2013). What is found is written out for the whole
network and replayed there: nothing here is trusted.

How automorphisms are found. Colours are refined until nodes of one colour have the same links to each colour
(Weisfeiler and Leman 1968). Then the nodes that are alone in their colour, such as the core, are left out, and the rest
falls into parts that links join: the servers, say. Where most pairs of two colours are linked, the pairs that are not
count as joined instead: a server's own switch leads to all GPUs but its own. Parts of the same colours may be
exchanged, node by node; a cycle through all of them and a swap of two generate every order. Inside of one part the same
is repeated: its GPUs. Where nothing is alone, as on rails, the nodes of the rarest colour are kept in place. Every
permutation found must map links to links and ports to ports of the same rate, or it is not used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from optcc.verify.bounds.network import Demand, FlowNetwork

KEPT_MAX = 64
"""Nodes of one colour that are kept in place where no node is alone in its colour."""
_Colours = dict[int, int]
_Typed = Sequence[tuple[int, int, int]]  # tail, head, type of a link
_Moves = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Orbits:
    """0..n-1 in classes: `of[i]` is the class of i, `first[c]` the least member of class c, `sizes[c]` their number.

    Classes are numbered in the order of their least members.
    """

    of: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def joined(cls, count: int, pairs: Iterable[tuple[int, int]]) -> Orbits:
        """The finest classes in which both of each pair are in one.

        >>> Orbits.joined(4, [(1, 3)])
        Orbits(of=(0, 1, 2, 1), first=(0, 1, 2), sizes=(1, 2, 1))
        """
        parent = list(range(count))
        for a, b in pairs:
            a, b = _root(parent, a), _root(parent, b)
            parent[max(a, b)] = min(a, b)
        roots = [_root(parent, each) for each in range(count)]
        number = {root: index for index, root in enumerate(sorted(set(roots)))}
        sizes = Counter(roots)
        return cls(tuple(number[root] for root in roots), tuple(number), tuple(sizes[root] for root in number))


@dataclass(frozen=True, slots=True)
class Symmetry:
    """The orbits of nodes, links and ports of a network under the group that `generators` generate.

    A generator maps the nodes that it moves. Endpoints are moved to endpoints with the same share of the roots.
    """

    nodes: Orbits
    links: Orbits
    ports: Orbits
    generators: tuple[_Moves, ...]

    @classmethod
    def none(cls, network: FlowNetwork) -> Symmetry:
        """Everything is an orbit of its own."""
        return cls.generated_by((), network, ((), (), ()))

    @classmethod
    def generated_by(
        cls, generators: Sequence[_Moves], network: FlowNetwork, pairs: Sequence[Iterable[tuple[int, int]]]
    ) -> Symmetry:
        """`pairs`: nodes, links and ports and where each generator maps them."""
        counts = (network.n_nodes, len(network.links), len(network.ports))
        nodes, links, ports = (Orbits.joined(count, each) for count, each in zip(counts, pairs, strict=True))
        return cls(nodes, links, ports, tuple(generators))

    def images(self, nodes: frozenset[int]) -> list[frozenset[int]] | None:
        """The images of a set of nodes under the group, the set first; None if they are more than the nodes."""
        found = {nodes: None}
        todo = [nodes]
        for here in todo:
            for moves in self.generators:
                if moves.keys().isdisjoint(here):
                    continue
                image = frozenset(moves.get(node, node) for node in here)
                if image not in found:
                    found[image] = None
                    todo.append(image)
            if len(found) > len(self.nodes.of):
                return None
        return todo


def find_symmetry(network: FlowNetwork, demand: Demand) -> Symmetry:
    """A group of automorphisms of `network` that keep the roots of `demand`; not always the largest.

    >>> from optcc.topology import Topology
    >>> network = FlowNetwork.from_topology(Topology.parse("4x8@50GB/s+450GB/s,3=4..7/8"))
    >>> len(network.links), find_symmetry(network, Demand("allreduce", None)).links.sizes
    (176, (24, 4, 4, 48, 12, 24, 24, 4, 24, 4, 4))
    """
    rate_of = _rates(network)
    types: dict[tuple[int, ...], int] = {}
    edges = []
    for link in network.links:
        kind = tuple(sorted(rate_of[port] for port in link.ports))
        edges.append((link.tail, link.head, types.setdefault(kind, len(types))))
    roots = demand.roots or (Fraction(0),) * len(network.endpoints)
    shares = {share: number for number, share in enumerate(sorted(set(roots)))}
    start = dict.fromkeys(range(network.n_nodes), 0) | {v: 1 + shares[x] for v, x in enumerate(roots)}
    colours = _refine(start, edges)
    for _ in range(len(set(start.values())) + 1):
        sizes = Counter(colours.values())
        if min(sizes.values()) == 1 or min(sizes.values()) > KEPT_MAX:
            break
        rarest = min(sizes, key=lambda colour: (sizes[colour], colour))
        kept = [node for node, colour in colours.items() if colour == rarest]
        colours = _refine(colours | {node: -1 - number for number, node in enumerate(kept)}, edges)
    maps = _Maps(network)
    joined: tuple[list[tuple[int, int]], ...] = ([], [], [])
    generators = []
    for moves in _permutations(colours, edges, len(network.endpoints)):
        pairs = maps.follow(moves)
        if pairs is not None:
            generators.append(moves)
            for known, more in zip(joined, (moves.items(), *pairs), strict=True):
                known.extend(more)
    return Symmetry.generated_by(generators, network, joined)


class _Maps:
    """Decides whether a permutation of the nodes is an automorphism of the network."""

    def __init__(self, network: FlowNetwork) -> None:
        self.network = network
        self.rate_of = _rates(network)
        self.at: list[list[int]] = [[] for _ in range(network.n_nodes)]
        self.between: dict[tuple[int, int], list[int]] = {}
        self.users = Counter(port for link in network.links for port in link.ports)
        for number, link in enumerate(network.links):
            self.at[link.tail].append(number)
            self.at[link.head].append(number)
            self.between.setdefault((link.tail, link.head), []).append(number)

    def follow(self, moves: _Moves) -> tuple[list[tuple[int, int]], list[tuple[int, int]]] | None:
        """Where links and ports go when nodes go as `moves` says; None if they cannot follow."""
        network = self.network
        ports: dict[int, int] = {}
        moved = Counter[int]()
        links: list[tuple[int, int]] = []
        for number in sorted({number for node in moves for number in self.at[node]}):
            link = network.links[number]
            here = self.between[link.tail, link.head]
            there = self.between.get((moves.get(link.tail, link.tail), moves.get(link.head, link.head)), [])
            if len(there) != len(here):
                return None
            image = there[here.index(number)]
            links.append((number, image))
            onto = network.links[image].ports
            if len(onto) != len(link.ports):
                return None
            for port, to in zip(link.ports, onto, strict=True):
                moved[port] += 1
                if ports.setdefault(port, to) != to or self.rate_of[port] != self.rate_of[to]:
                    return None
        away = [port for port, to in ports.items() if port != to]
        onto_itself = len(set(ports.values())) == len(ports) and set(ports.values()) == ports.keys()
        if not onto_itself or any(moved[port] != self.users[port] for port in away):
            return None
        return links, list(ports.items())


def _rates(network: FlowNetwork) -> list[int]:
    """Equal numbers for ports of equal rates."""
    number: dict[Fraction, int] = {}
    return [number.setdefault(port.rate, len(number)) for port in network.ports]


def _refine(colours: _Colours, edges: _Typed) -> _Colours:
    """The coarsest finer colours in which nodes of one colour have the same links to each colour."""
    while True:
        seen = dict.fromkeys(colours, 0)
        for tail, head, kind in edges:
            seen[tail] += hash((kind, colours[head], 0))
            seen[head] += hash((kind, colours[tail], 1))
        signs = {node: (colour, seen[node]) for node, colour in colours.items()}
        number = {sign: index for index, sign in enumerate(sorted(set(signs.values())))}
        if len(number) == len(set(colours.values())):
            return colours
        colours = {node: number[sign] for node, sign in signs.items()}


def _permutations(colours: _Colours, edges: _Typed, p: int) -> list[_Moves]:
    """Permutations that may be automorphisms: orders of parts that are alike, then of parts of one of these. Endpoints
    are the nodes below `p`."""
    parts = _parts(colours, edges, p)
    if len(parts) < 2 and len(parts[0] if parts else ()) == len(colours):
        return []
    alike: defaultdict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for part in parts:
        part.sort(key=lambda node: (colours[node], node))
        alike[tuple(colours[node] for node in part)].append(part)
    found: list[_Moves] = []
    where = {part[0]: sorted(part) for same in alike.values() for part in same[:1]}
    home = {node: first for first, part in where.items() for node in part}
    inside: dict[int, list[tuple[int, int, int]]] = {first: [] for first in where}
    for edge in edges:
        first = home.get(edge[0])
        if first is not None and home.get(edge[1]) == first:
            inside[first].append(edge)
    for same in alike.values():
        orders = [(same, same[1:] + same[:1])] if len(same) > 1 else []
        orders += [(same[:2], same[1::-1])] if len(same) > 2 else []
        for here, there in orders:
            ends = [zip(part, to, strict=True) for part, to in zip(here, there, strict=True)]
            found.append(dict(pair for each in ends for pair in each))
        within = inside[same[0][0]]
        found += _permutations(_refine({node: colours[node] for node in same[0]}, within), within, p)
    return found


def _parts(colours: _Colours, edges: _Typed, p: int) -> list[list[int]]:
    """The nodes that are not alone in their colour, in parts that links join; between colours of which most pairs are
    linked, in one way and type, the pairs that are not. Where half of them are, what switches send to counts only if
    nothing else joins them."""
    cells: defaultdict[int, set[int]] = defaultdict(set)
    for node, colour in colours.items():
        cells[colour].add(node)
    rest = [node for node, colour in colours.items() if len(cells[colour]) > 1]
    place = {node: index for index, node in enumerate(rest)}
    between = [edge for edge in edges if edge[0] in place and edge[1] in place]
    counts = Counter((colours[tail], colours[head], kind) for tail, head, kind in between)
    most = {key: 2 * count - len(cells[key[0]]) * len(cells[key[1]]) for key, count in counts.items()}
    pairs: list[tuple[int, int]] = []
    half: list[tuple[int, int]] = []
    heads: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
    for tail, head, kind in between:
        over = most[colours[tail], colours[head], kind]
        if over > 0:
            heads[tail, colours[head], kind].add(head)
        else:
            (pairs if over < 0 or tail < p else half).append((place[tail], place[head]))
    for (tail, colour, _), linked in heads.items():
        pairs += ((place[tail], place[head]) for head in cells[colour] - linked if head != tail)
    lone = Orbits.joined(len(rest), pairs)
    pairs += [(tail, head) for tail, head in half if lone.sizes[lone.of[tail]] == 1]
    orbits = Orbits.joined(len(rest), pairs)
    parts: list[list[int]] = [[] for _ in orbits.first]
    for node, part in zip(rest, orbits.of, strict=True):
        parts[part].append(node)
    return parts


def _root(parent: list[int], node: int) -> int:
    """The least member of the class of `node`; shortens the way there."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
