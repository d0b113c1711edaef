"""NICs that hold up a job, found in its own traffic by all ranks together: nothing is sent but what was counted.

Ranks tell each other what their connections have carried since runs are slow (`optcc.runtime.protocol.flows`), in two
exchanges of small messages, where to measure the NICs takes rounds of long ones with nothing else under way.
"""

from __future__ import annotations

import math
import struct
from itertools import permutations
from typing import Protocol, runtime_checkable

import numpy as np

from optcc.runtime.guesses import Guess
from optcc.runtime.probe import ProbedTransport
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.flows import MARK_S, FlowEnds, NicFlow, most, rate_of, slow_ways
from optcc.runtime.transport import KnowsRates

RANKS_MAX = 32
"""More ranks do not tell each other of their traffic: each reads what all say of their connections to all."""
UNSURE, UNSURE_BUSY = 0.2, 0.35
"""Of a NIC that carries the same both ways, the traffic may have filled one by so much less than the other; and by the
second, if that other one is known to have been full: acknowledgements wait there, so that less is sent."""
_NOTHING = -1
"""In place of the number of a collective, or of a rank."""
_QUESTION = struct.Struct(">qq?dqqd")


@runtime_checkable
class RemeasuredTransport(ProbedTransport, KnowsRates, Protocol):
    """A transport whose NICs can be measured, and that stripes by what they carry."""


def slow_nics(
    transport: RemeasuredTransport,
    span_s: tuple[float, float],
    known: Shares,
    may_measure: bool,
    pace: float = 1.0,
    guess: Guess | None = None,
) -> tuple[dict[tuple[int, int], float] | None, bool]:
    """The NICs, (rank, number), that carry less than the `known` shares, the same both ways, and what share that is, by
    the traffic while collectives were slow: in `span_s` by rank 0's clock, whose end is infinite if they still are; by
    that rank's `guess` if the traffic says nothing. And what that rank says of whether NICs `may_measure`. Collective.

    Where other collectives are quick, and the slow ones take 1 / `pace` as long, by that rank, a NIC carries no more
    than such a part of what is known while they are slow; the traffic says what it does on the average.

    None if it is not certain, or not the same both ways: where a NIC is slow one way, what it carries the other way is
    hidden unless that is no more.
    """
    marks = _marks_of(transport, *span_s) if transport.n_ranks <= RANKS_MAX else (_NOTHING, _NOTHING)
    question = _QUESTION.pack(*marks, may_measure, pace, *(guess or Guess(_NOTHING, _NOTHING, 0.0)))
    number, until, may_measure, pace, *guessed = _QUESTION.unpack(transport.allgather(question)[0])
    found = None if number == _NOTHING else _named(transport, number, until, known)
    guess = Guess(*guessed)
    if found is not None:
        found = {(rank, nic): min(share, pace * max(known[rank][nic])) for (rank, nic), share in found.items()}
    elif guess.rank != _NOTHING:
        found = {guess[:2]: guess.share}
    return found, may_measure


def _marks_of(transport: RemeasuredTransport, begin_s: float, end_s: float) -> tuple[int, int]:
    """The first collectives that were marked in a time and after it, if there are both; the second is `_NOTHING` if the
    time has no end."""
    if end_s < math.inf:
        first, last = (transport.first_mark(each - MARK_S / 2, may_be_new=True) for each in (begin_s, end_s))
        return (_NOTHING, _NOTHING) if first is None or last is None else (first, last)
    first = transport.first_mark(begin_s)
    return _NOTHING if first is None else first, _NOTHING


def _named(
    transport: RemeasuredTransport, number: int, until: int, known: Shares
) -> dict[tuple[int, int], float] | None:
    """`slow_nics` by the traffic between two collectives, or since one."""
    declared = [[nic[3:5] for nic in nics] for nics in transport.nics]
    rates = {
        (rank, nic, is_out): pair[not is_out] * known[rank][nic][not is_out]
        for rank, nics in enumerate(declared)
        for nic, pair in enumerate(nics)
        for is_out in (True, False)
    }
    flows, seconds = _exchange(transport, number, None if until == _NOTHING else until)
    found = slow_ways(flows, seconds, rates)
    if found is None:
        return None
    shares: dict[tuple[int, int], float] = {}
    for rank, nic in {way[:2] for way in found}:
        # Ranks that have noticed that a NIC sends slowly send more over others: then it is not busy all the time.
        ways = [(rank, nic, True), (rank, nic, False)]
        both = [found[way] if way in found else most(flows, way) for way in ways]
        (less, is_less_full), (more, is_full) = sorted(
            (each.rate / rate, way in found) for way, each, rate in zip(ways, both, declared[rank][nic], strict=True)
        )
        if less < (1 - (UNSURE_BUSY if is_full else UNSURE)) * more:
            return None
        if is_less_full:
            # It was busy both ways for as long as it was either way.
            busy_s = max(each.busy_s for each in both)
            at_declared_s = (each.n_bytes / rate for each, rate in zip(both, declared[rank][nic], strict=True))
            more = rate_of(seconds, max(at_declared_s), busy_s)
        shares[rank, nic] = more
    return shares


def _exchange(transport: RemeasuredTransport, number: int, until: int | None) -> tuple[dict[FlowEnds, NicFlow], float]:
    """The flows between all ranks from when that collective began until another did, or now, and for how long, seconds;
    none if some rank does not know its own."""
    rank = transport.rank
    rails = {pair: transport.pairs(*pair) for pair in permutations(range(transport.n_ranks), 2)}
    # By destination and rail; what would be this rank's own has the seconds.
    own = np.zeros((transport.n_ranks, max(map(len, rails.values())), 2))
    traffic = transport.traffic_since(number, until)
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
