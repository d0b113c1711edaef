"""`BlockDemand` and `ExchangeCertificate`: collectives of blocks that each go from rank to rank, and their bound.

In an AllToAll, a Gather, a Scatter and an AllToAll-v every element has an input at one rank and is wanted by one rank,
so it must travel a path of links between the two. A bound is a price for each port, a whole number: an element that
goes from endpoint s to endpoint d pays at least the distance from s to d where a link is as long as its ports cost, and
what all elements pay comes out of what the ports can carry. `optcc.verify.bounds.exchange_replay` states the inequality
and checks it. A cut is the case in which just the ports that leave a set of endpoints have a price; by the duality of
linear programs, prices prove all that is true of fluid flows, and cuts do not.

As a file (`optcc-exchange/1`, JSON; `optcc.verify.bounds.certificate_file` reads it) a certificate stands for itself:
the network, the collective and the ranks of each endpoint, prices, and the flow that achieves the bound, if known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Any, ClassVar

from optcc.collective import PERSONALISED, ROOTED, Collective
from optcc.errors import SolverError, TopologyError
from optcc.units import SIZE_BYTES_MAX
from optcc.verify.bounds.network import FlowNetwork
from optcc.verify.bounds.priced import Priced, network_content, write_ratio

EXCHANGE_FORMAT = "optcc-exchange/1"
EXCHANGE_MODEL = "paths between the endpoints of this network, fluid, no latency"
_INT64_MAX = 2**62


def is_exchange(collective: Collective) -> bool:
    """True if every element has one input that matters and at most one rank that wants it.

    >>> is_exchange(Collective("gather", 3)), is_exchange(Collective("allgather", 3))
    (True, False)
    """
    if not collective.cells:
        return collective.name in PERSONALISED
    return all(len(cell.after) <= 1 and all(len(ranks) == 1 for _, ranks in cell.after) for cell in collective.cells)


@dataclass(frozen=True)
class BlockDemand:
    """The demand of an exchange: `gpus` ranks at each endpoint, numbered in order; `root` for a Gather or a Scatter.

    A declared collective has `blocks`: (from rank, to rank, share of the message); those of the others follow from the
    name. Raises TopologyError for what is no exchange, and for ranks that do not exist.
    """

    collective: str
    gpus: tuple[int, ...]
    root: int = 0
    blocks: tuple[tuple[int, int, Fraction], ...] | None = None

    def __post_init__(self) -> None:
        p = self.n_ranks
        if (self.blocks is None) != (self.collective in PERSONALISED):
            raise TopologyError(
                f"exchange {self.collective!r}: must be one of {', '.join(PERSONALISED)} or have blocks"
            )
        if min(self.gpus, default=0) < 1:
            raise TopologyError(f"exchange over endpoints of {list(self.gpus)} ranks: must have at least one each")
        if not 0 <= self.root < (p if self.collective in ROOTED else 1):
            raise TopologyError(f"{self.collective}: root {self.root}: must be a rank below {p}, or 0 without a root")
        for source, sink, share in self.blocks or ():
            if not (0 <= source < p and 0 <= sink < p) or source == sink or share <= 0:
                raise TopologyError(f"block {source}->{sink} of {share}: must join two of {p} ranks, and be above zero")
        if sum(share for _, _, share in self.blocks or ()) > 1:
            raise TopologyError("blocks: must be 1 together at most")

    @classmethod
    def of(cls, collective: Collective, gpus: Sequence[int]) -> BlockDemand:
        """The demand of `collective` on endpoints with these numbers of GPUs, whose ranks are numbered in order.

        >>> demand = BlockDemand.of(Collective("scatter", 4), [1, 3])
        >>> demand.demands, demand.parts
        ({(0, 1): 3}, 4)
        """
        if sum(gpus) != collective.n_ranks:
            raise TopologyError(f"collective over {collective.n_ranks} ranks: the topology has {sum(gpus)}")
        if not is_exchange(collective):
            raise TopologyError(f"{collective.name}: must have one sender and one receiver for each element")
        if not collective.cells:
            return cls(collective.name, tuple(gpus), collective.root)
        shares: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
        for cell in collective.cells:
            for sink, (source,) in cell.after:
                if source != sink and cell.share:
                    shares[source, sink] += cell.share
        return cls(collective.name, tuple(gpus), 0, tuple((*pair, share) for pair, share in sorted(shares.items())))

    @property
    def n_ranks(self) -> int:
        """Ranks of all endpoints."""
        return sum(self.gpus)

    @cached_property
    def parts(self) -> int:
        """Into how many parts the message is cut, of which `demands` counts."""
        if self.blocks is not None:
            return lcm(*(share.denominator for _, _, share in self.blocks))
        return self.n_ranks ** (2 if self.collective == "alltoall" else 1)

    @cached_property
    def demands(self) -> dict[tuple[int, int], int]:
        """The parts of the message that must go from one endpoint to another, for each pair with such a part."""
        gpus = self.gpus
        at = [endpoint for endpoint, count in enumerate(gpus) for _ in range(count)]
        home, every = at[self.root], range(len(gpus))
        if self.blocks is not None:
            found: dict[tuple[int, int], int] = defaultdict(int)
            for source, sink, share in self.blocks:
                if at[source] != at[sink]:
                    found[at[source], at[sink]] += share.numerator * (self.parts // share.denominator)
            return dict(found)
        if self.collective == "alltoall":
            return {(a, b): gpus[a] * gpus[b] for a in every for b in every if a != b}
        gathers = self.collective == "gather"
        return {((each, home) if gathers else (home, each)): gpus[each] for each in every if each != home}

    @cached_property
    def to_sinks(self) -> bool:
        """True if fewer endpoints receive than send: then flows are listed by where they end."""
        return len({sink for _, sink in self.demands}) < len({source for source, _ in self.demands})

    @cached_property
    def groups(self) -> dict[int, dict[int, int]]:
        """For each endpoint where flows start (`to_sinks`: end), the parts of the message for each other end."""
        found: dict[int, dict[int, int]] = {}
        for (source, sink), count in self.demands.items():
            near, far = (sink, source) if self.to_sinks else (source, sink)
            found.setdefault(near, {})[far] = count
        return found


@dataclass(frozen=True, slots=True)
class BlockFlow:
    """A flow of all elements: seconds, and for each group of the demand the (link, load in messages) that it uses."""

    seconds: Fraction
    loads: Mapping[int, tuple[tuple[int, Fraction], ...]]


@dataclass(frozen=True, slots=True)
class ExchangeCertificate(Priced):
    """The bound `seconds` = size_bytes * crossing / supply; see `optcc.verify.bounds.exchange_replay`."""

    FORMAT: ClassVar[str] = EXCHANGE_FORMAT

    network: FlowNetwork
    demand: BlockDemand
    size_bytes: int
    prices: tuple[Fraction, ...]
    crossing: Fraction
    supply: Fraction
    seconds: Fraction
    achieved: BlockFlow | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.size_bytes <= SIZE_BYTES_MAX:
            raise SolverError(f"certificate: size {self.size_bytes}: must be 0 to {SIZE_BYTES_MAX} bytes")
        for what, values, length in (
            ("prices", self.prices, len(self.network.ports)),
            ("endpoints with ranks", self.demand.gpus, len(self.network.endpoints)),
        ):
            if len(values) != length:
                raise SolverError(f"certificate: {len(values)} {what}: must be {length}")
        for price in self.prices:
            if price < 0 or price.denominator != 1:
                raise SolverError(f"certificate: price {price}: must be a whole number and not negative")

    @classmethod
    def of(
        cls,
        network: FlowNetwork,
        demand: BlockDemand,
        size_bytes: int,
        prices: Sequence[Fraction],
        achieved: BlockFlow | None = None,
    ) -> ExchangeCertificate:
        """The certificate of these prices, scaled to the least whole numbers, with all that follows from them."""
        scale = Fraction(lcm(*(price.denominator for price in prices)))
        scale /= gcd(*(int(price * scale) for price in prices)) or 1
        scaled = tuple(price * scale for price in prices)
        crossing = least_paid(network, demand, scaled)
        supply = sum((port.rate * price for port, price in zip(network.ports, scaled, strict=True)), Fraction(0))
        seconds = size_bytes * crossing / supply if supply else Fraction(0)
        return cls(network, demand, size_bytes, scaled, crossing, supply, seconds, achieved)

    @property
    def collective(self) -> str:
        return self.demand.collective

    def reached(self) -> BlockFlow | None:
        return self.achieved

    def _content(self) -> dict[str, object]:
        demand, achieved = self.demand, self.achieved
        return {
            "model": EXCHANGE_MODEL,
            "collective": demand.collective,
            "gpus": list(demand.gpus),
            "root": demand.root,
            "blocks": None
            if demand.blocks is None
            else [{"from": source, "to": sink, "share": write_ratio(share)} for source, sink, share in demand.blocks],
            "size_bytes": self.size_bytes,
            "seconds": write_ratio(self.seconds),
            "demand": write_ratio(self.crossing),
            "supply": write_ratio(self.supply),
            **network_content(self.network),
            "prices": [write_ratio(price) for price in self.prices],
            "achieved": None
            if achieved is None
            else {
                "seconds": write_ratio(achieved.seconds),
                "flows": [
                    {
                        "endpoint": endpoint,
                        "links": [link for link, _ in loads],
                        "loads": [write_ratio(load) for _, load in loads],
                    }
                    for endpoint, loads in achieved.loads.items()
                ],
            },
        }


def least_paid(network: FlowNetwork, demand: BlockDemand, prices: Sequence[Fraction]) -> Fraction:
    """What all elements together pay at least per message: shares times distances.

    `prices` are whole numbers. Raises TopologyError if an endpoint cannot reach one to which it must send.
    """
    lengths = [sum(int(prices[port]) for port in link.ports) for link in network.links]
    starts = list(demand.groups)
    away = distances(network, lengths, starts, backward=demand.to_sinks)
    unreached = sum(lengths) + 1
    paid = 0
    for column, start in enumerate(starts):
        steps = away[:, column].tolist()
        for far, count in demand.groups[start].items():
            if steps[far] >= unreached:
                source, sink = (far, start) if demand.to_sinks else (start, far)
                raise TopologyError(
                    f"network: {network.nodes[source]} cannot reach {network.nodes[sink]}: "
                    f"{demand.collective} needs a way"
                )
            paid += steps[far] * count
    return Fraction(paid, demand.parts)


def distances(network: FlowNetwork, lengths: Sequence[int], starts: Sequence[int], *, backward: bool = False) -> Any:
    """The distance of every node from each of `starts` (`backward`: to it), as whole numbers: nodes x starts.

    It ends when no link shortens a distance, that is when for every link the distance at its head is at most that at
    its tail plus its length. This alone makes the result a lower bound on the length of every path (Bellman and Ford).
    A node that is not reached has one more than the sum of all lengths.
    """
    import numpy as np  # not at the top: a certificate of trees is replayed without it

    farthest = sum(lengths) + 1
    exact: Any = np.int64 if 2 * farthest < _INT64_MAX else np.object_
    away: Any = np.full((network.n_nodes, len(starts)), farthest, dtype=exact)
    away[list(starts), range(len(starts))] = 0
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for link, length in zip(network.links, lengths, strict=True):
        tail, head = (link.head, link.tail) if backward else (link.tail, link.head)
        into[head].append((tail, length))
    ways = [
        (head, [tail for tail, _ in each], np.array([[length] for _, length in each], dtype=exact))
        for head, each in into.items()
    ]
    changed = True
    while changed:
        changed = False
        for head, tails, steps in ways:
            nearer = np.minimum(away[head], (away[tails] + steps).min(axis=0))
            if (nearer != away[head]).any():
                away[head], changed = nearer, True
    return away
