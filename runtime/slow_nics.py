"""NICs that hold up a job, found in its own traffic by all ranks together: nothing is sent but what was counted.

Ranks tell each other what their connections have carried since runs are slow (`optcc.runtime.protocol.flows`), in two
exchanges of small messages, where to measure the NICs takes rounds of long ones with nothing else under way.
"""

from __future__ import annotations

from itertools import permutations
from typing import Protocol, runtime_checkable

import numpy as np

from optcc.runtime.probe import ProbedTransport
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.flows import FlowEnds, NicFlow, most, slow_ways
from optcc.runtime.transport import KnowsRates

RANKS_MAX = 32
"""More ranks do not tell each other of their traffic: each reads what all say of their connections to all."""
UNSURE = 0.2
"""Of a NIC that carries the same both ways, the traffic may have filled one by so much less than the other."""
_NOTHING = 0
"""In place of the number of a collective, plus one."""


@runtime_checkable
class RemeasuredTransport(ProbedTransport, KnowsRates, Protocol):
    """A transport whose NICs can be measured, and that stripes by what they carry."""


def slow_nics(
    transport: RemeasuredTransport, since_s: float, known: Shares, may_measure: bool
) -> tuple[dict[tuple[int, int], float] | None, bool]:
    """The NICs, (rank, number), that carry less than the `known` shares, the same both ways, and what share that is, by
    the traffic since collectives are slow: by rank 0's clock since `since_s`. And what that rank says of whether NICs
    `may_measure`. Collective.

    None if it is not certain, or not the same both ways: where a NIC is slow one way, what it carries the other way is
    hidden unless that is no more.
    """
    mark = transport.first_mark(since_s) if transport.n_ranks <= RANKS_MAX else None
    word = 2 * (_NOTHING if mark is None else mark + 1) + may_measure
    word = int.from_bytes(transport.allgather(word.to_bytes(8, "big"))[0], "big")
    number, may_measure = word // 2, bool(word % 2)
    if number == _NOTHING:
        return None, may_measure
    return _named(transport, number - 1, known), may_measure


def _named(transport: RemeasuredTransport, number: int, known: Shares) -> dict[tuple[int, int], float] | None:
    """`slow_nics` by the traffic since a collective."""
    declared = [[nic[3:5] for nic in nics] for nics in transport.nics]
    rates = {
        (rank, nic, is_out): pair[not is_out] * known[rank][nic][not is_out]
        for rank, nics in enumerate(declared)
        for nic, pair in enumerate(nics)
        for is_out in (True, False)
    }
    flows, seconds = _exchange(transport, number)
    found = slow_ways(flows, seconds, rates)
    if found is None:
        return None
    shares: dict[tuple[int, int], float] = {}
    for rank, nic in {way[:2] for way in found}:
        # Ranks that have noticed that a NIC sends slowly send more over others: then it is not busy all the time.
        ways = [(rank, nic, True), (rank, nic, False)]
        out, in_ = (
            found.get(way, most(flows, way)) / each for way, each in zip(ways, declared[rank][nic], strict=True)
        )
        if min(out, in_) < (1 - UNSURE) * max(out, in_):
            return None
        shares[rank, nic] = max(out, in_)
    return shares


def _exchange(transport: RemeasuredTransport, number: int) -> tuple[dict[FlowEnds, NicFlow], float]:
    """The flows between all ranks since that collective began, and for how long, seconds; none if some rank does not
    know its own."""
    rank = transport.rank
    rails = {pair: transport.pairs(*pair) for pair in permutations(range(transport.n_ranks), 2)}
    # By destination and rail; what would be this rank's own has the seconds.
    own = np.zeros((transport.n_ranks, max(map(len, rails.values())), 2))
    traffic = transport.traffic_since(number)
    if traffic is not None:
        own[rank] = traffic.seconds
        for (mine, peer, theirs), flow in traffic.flows.items():
            own[peer, rails[rank, peer].index((mine, theirs))] = flow
    everyone = [np.frombuffer(each).reshape(own.shape) for each in transport.allgather(own.tobytes())]
    seconds = [float(each[rank, 0, 0]) for rank, each in enumerate(everyone)]
    if min(seconds) <= 0:
        return {}, 0.0
    flows = {
        (src, mine, dst, theirs): NicFlow(*everyone[src][dst, rail].tolist())
        for (src, dst), joined in rails.items()
        for rail, (mine, theirs) in enumerate(joined)
    }
    return flows, sum(seconds) / len(seconds)
