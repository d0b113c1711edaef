"""When a rank is declared lost, and when no rail is left. No I/O.

A rank says bye on every connection when it closes, and whether it does so because of a failure. A rank that is gone
without a bye refuses connections: its listeners live as long as it does. It is lost for those that wait for it; they
leave after a failure, and so the others learn of it. A rank that no rail reaches for `stall_s` may be alive.
"""

from __future__ import annotations

from collections.abc import Mapping

from optcc.errors import AllRailsFailed, RankLost, RuntimeFault
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.outbound import Outbound

_REFUSED_S = 1.0


def find_failure(
    local: LocalRank, outbounds: Mapping[int, Outbound], inbounds: Mapping[int, Inbound]
) -> RuntimeFault | None:
    """The failure that makes further waiting useless, if there is one."""
    for peer, has_failed in local.left.items():
        if has_failed:
            return _lost(local, peer, "it has left after a failure")
        to, from_ = outbounds.get(peer), inbounds.get(peer)
        # A rank that leaves repeats its last states: what it has taken is acknowledged.
        misses = to is not None and to.has_work() and not to.is_joined()
        if misses or (from_ is not None and from_.has_work() and not from_.is_joined()):
            return _lost(local, peer, "it has left before it had taken and sent all")
    for peer, to in outbounds.items():
        if to.dark_s and peer not in local.left and not to.is_joined():
            failure = _unreachable(local, peer, to, inbounds.get(peer))
            if failure is not None:
                return failure
    return None


def _unreachable(local: LocalRank, peer: int, to: Outbound, from_: Inbound | None) -> RuntimeFault | None:
    """What follows from no rail of a peer being joined."""
    if not (to.has_work() or (from_ is not None and from_.has_work())):
        # If it refuses, it may have left in good order, and its bye was lost.
        return None
    refusals = [rail.refused for rail in to.rails]
    # If all refuse, it is gone. One alone may be a NIC's trouble. The bye may still come over connections of its own,
    # which break if it said none.
    is_refused = all(refusals) or (any(refusals) and to.dark_s >= _REFUSED_S)
    if is_refused and (from_ is None or not from_.is_joined()):
        return _lost(local, peer, "it refuses connections")
    if to.dark_s >= local.settings.stall_s:
        names = ", ".join(rail.name for rail in to.rails)
        return AllRailsFailed(f"rank {local.rank}: no rail to rank {peer} up for {to.dark_s:.1f} s ({names})")
    return None


def _lost(local: LocalRank, peer: int, why: str) -> RankLost:
    return RankLost(f"rank {local.rank}: rank {peer} is lost: {why}")
