"""`Graph`: GPUs and switches joined by directed links, each with a rate of its own, and the route between two GPUs.

GPUs send and receive; switches only forward. A message between two GPUs takes one route: through switches alone, over
as few links as possible, and of these over the ones whose slowest link is fastest; from one switch to another always
over the same links. GPUs that no such route joins can
only exchange data through other GPUs, in several transfers of a schedule: NVLink to the GPU beside a NIC, then that
NIC (NCCL calls it PXN), takes a fabric port of both GPUs and is charged there.

    torus       a grid of GPUs, closed to a ring in each dimension
    mi250       boxes of 16 GPU dies that are linked directly, and joined by one switch

Text forms of both are in `optcc.topology`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from optcc.errors import TopologyError

SWITCHES_MAX = 3
"""Of a route between two GPUs: up from a leaf, and down to another one."""


_Onward = tuple[dict[int, tuple[int, tuple[int, ...]]], dict[int, frozenset[int]]]
"""For each GPU that is reached, which of the first links its route takes, and the links after it; and for each of the
first links the GPUs that it leads to over a single switch."""


class GraphLink(NamedTuple):
    """From node `tail` to node `head`, `rate` bytes/s. GPUs are nodes 0..p-1, switches the ones after them."""

    tail: int
    head: int
    rate: Fraction


@dataclass(frozen=True)
class Graph:
    """The links between GPUs 0..p-1, by rank, and switches.

    >>> ends = (0, 2), (2, 1), (1, 0)
    >>> pair = Graph(("a", "b"), ("s",), tuple(GraphLink(*each, Fraction(1)) for each in ends))
    >>> pair.routes[0][1], pair.routes[1][0]
    ((0, 1), (2,))

    Raises TopologyError for a name that is used twice, a link that is there twice or joins no two nodes.
    """

    gpus: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[GraphLink, ...]

    def __post_init__(self) -> None:
        names = self.nodes
        if len(set(names)) < len(names):
            raise TopologyError(f"node {next(name for name in names if names.count(name) > 1)}: the name is used twice")
        seen: set[tuple[int, int]] = set()
        for number, link in enumerate(self.links):
            if not (0 <= link.tail < len(names) and 0 <= link.head < len(names)) or link.tail == link.head:
                raise TopologyError(f"link {number}: {link.tail}->{link.head}: must join two nodes of {len(names)}")
            if link.rate <= 0:
                raise TopologyError(f"link {self.name_of(link)}: rate {link.rate}: must be above zero")
            if (link.tail, link.head) in seen:
                raise TopologyError(
                    f"link {self.name_of(link)}: is there twice: must be one, with the sum of the rates"
                )
            seen.add((link.tail, link.head))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, GPUs first."""
        return self.gpus + self.switches

    @cached_property
    def is_joined(self) -> bool:
        """True if links lead from each GPU to every other one, whichever way they carry."""
        beside: list[set[int]] = [set() for _ in self.nodes]
        for link in self.links:
            beside[link.tail].add(link.head)
            beside[link.head].add(link.tail)
        reached, new = {0}, {0}
        while new:
            new = set().union(*(beside[node] for node in new)) - reached
            reached |= new
        return reached >= set(range(len(self.gpus)))

    def name_of(self, link: GraphLink) -> str:
        """`tail->head`, by name."""
        return f"{self.nodes[link.tail]}->{self.nodes[link.head]}"

    @cached_property
    def routes(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """For each GPU, the links to each GPU that it can reach without passing another one."""
        firsts = self._outof
        return tuple(
            {to: (firsts[gpu][first], *rest) for to, (first, rest) in table.items() if to != gpu}
            for gpu, (table, _) in enumerate(self._onward)
        )

    def led_by_one_switch(self, gpu: int) -> dict[int, frozenset[int]]:
        """By the number of a link from `gpu` into a switch: the GPUs to which its route goes on with a single link."""
        return {
            self._outof[gpu][first]: reached - {gpu} if gpu in reached else reached
            for first, reached in self._onward[gpu][1].items()
        }

    @cached_property
    def _outof(self) -> list[list[int]]:
        """The links that leave each node."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, link in enumerate(self.links):
            found[link.tail].append(number)
        return found

    @cached_property
    def _speed(self) -> list[int]:
        """For each link, how many rates are lower: in the order of the rates, and faster to compare."""
        lower = {rate: number for number, rate in enumerate(sorted({link.rate for link in self.links}))}
        return [lower[link.rate] for link in self.links]

    @cached_property
    def _onward(self) -> list[_Onward]:
        """What `_find_onward` finds for each GPU: once where links lead to the same nodes at the same rates."""
        between = [self._between(switch, self._outof) for switch in range(len(self.gpus), len(self.nodes))]
        known: dict[tuple[tuple[int, int], ...], _Onward] = {}
        found: list[_Onward] = []
        for gpu in range(len(self.gpus)):
            firsts = tuple((self.links[number].head, self._speed[number]) for number in self._outof[gpu])
            if firsts not in known:
                known[firsts] = self._find_onward(firsts, between)
            found.append(known[firsts])
        return found

    def _find_onward(self, firsts: Sequence[tuple[int, int]], between: Sequence[dict[int, tuple[int, ...]]]) -> _Onward:
        """The best routes over first links to these (node, speed)."""
        p, speed = len(self.gpus), self._speed
        best: dict[int, tuple[tuple[int, int], tuple[int, tuple[int, ...]]]] = {}
        for first, (head, rate) in enumerate(firsts):
            if head < p:
                best[head] = (-1, rate), (first, ())
                continue
            for middle in between[head - p].values():
                slowest = min((rate, *(speed[number] for number in middle)))
                for last in self._outof[self.links[middle[-1]].head if middle else head]:
                    to = self.links[last].head
                    merit = (-2 - len(middle), min(slowest, speed[last]))
                    if to < p and (to not in best or merit > best[to][0]):
                        best[to] = merit, (first, (*middle, last))
        table = {to: route for to, (_, route) in best.items()}
        single: dict[int, set[int]] = {}
        for to, (first, rest) in table.items():
            if len(rest) == 1:
                single.setdefault(first, set()).add(to)
        return table, {first: frozenset(reached) for first, reached in single.items()}

    def _between(self, switch: int, outof: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """The links from `switch` to each switch on the way to which there is at most one other."""
        found: dict[int, tuple[int, ...]] = {switch: ()}
        reached = [switch]
        for _ in range(SWITCHES_MAX - 1):
            best: dict[int, tuple[Fraction, tuple[int, ...]]] = {}
            for node in reached:
                for number in outof[node]:
                    head = self.links[number].head
                    if head < len(self.gpus) or head in found:
                        continue
                    links = (*found[node], number)
                    rate = min(self.links[each].rate for each in links)
                    if head not in best or rate > best[head][0]:
                        best[head] = rate, links
            found |= {node: links for node, (_, links) in best.items()}
            reached = list(best)
        return found

    def scaled(self, factor: Fraction) -> Graph:
        """The rate of every link times `factor`."""
        return Graph(self.gpus, self.switches, tuple(link._replace(rate=link.rate * factor) for link in self.links))


def torus(sizes: Sequence[int], out: Fraction, in_: Fraction) -> Graph:
    """A grid of GPUs, closed to a ring in each dimension; a link to the next GPU has the rate `out`, back `in_`.

    >>> len(torus([4, 3], Fraction(1), Fraction(1)).links), len(torus([2], Fraction(1), Fraction(1)).links)
    (48, 2)

    Raises TopologyError for a dimension of less than two.
    """
    if min(sizes) < 2:
        raise TopologyError(f"torus {'x'.join(map(str, sizes))}: every dimension must be at least two")
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    rates: dict[tuple[int, int], Fraction] = {}
    for place in product(*map(range, sizes)):
        here = sum(at * stride for at, stride in zip(place, strides, strict=True))
        for at, size, stride in zip(place, sizes, strides, strict=True):
            there = here + ((at + 1) % size - at) * stride
            rates[here, there] = out
            if size > 2:
                rates[there, here] = in_
    names = tuple(f"h{rank}" for rank in range(prod(sizes)))
    return Graph(names, (), tuple(GraphLink(tail, head, rate) for (tail, head), rate in rates.items()))


MI250_GPUS = 16
MI250_LINK, MI250_NIC = Fraction(50 * 10**9), Fraction(16 * 10**9)
_MI250_LINKS = (
    *((4, pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15))),
    *((2, pair) for pair in ((0, 4), (3, 7), (8, 12), (11, 15))),
    *((1, pair) for pair in ((0, 8), (1, 5), (1, 9), (1, 10), (2, 6), (2, 9), (2, 10), (3, 11))),
    *((1, pair) for pair in ((4, 6), (5, 6), (5, 7), (9, 13), (10, 14), (12, 14), (13, 14), (13, 15))),
)
"""How many links of `MI250_LINK` join which two GPU dies of a box of eight MI250."""


def mi250(n_boxes: int) -> Graph:
    """Boxes of eight MI250, 16 GPU dies each; every die is on a switch that joins the boxes, where there are several.

    >>> len(mi250(1).links), len(mi250(2).links)
    (56, 176)
    """
    names = tuple(f"h{box} gpu {gpu}" for box in range(n_boxes) for gpu in range(MI250_GPUS))
    links: list[GraphLink] = []
    for first in range(0, len(names), MI250_GPUS):
        for count, (a, b) in _MI250_LINKS:
            links += [GraphLink(first + x, first + y, count * MI250_LINK) for x, y in ((a, b), (b, a))]
    if n_boxes == 1:
        return Graph(names, (), tuple(links))
    core = len(names)
    for gpu in range(len(names)):
        links += [GraphLink(gpu, core, MI250_NIC), GraphLink(core, gpu, MI250_NIC)]
    return Graph(names, ("core",), tuple(links))
