"""What holds at any time at an endpoint, between two events: `optcc.runtime.protocol` states it, and this checks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optcc.failover import DATA, NOWHERE, Event, is_fresh
from optcc.runtime.protocol.channel import SendChannel
from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.frames import EAGER_BYTES, EARLY_CHUNKS_MAX
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.leg import QUEUE_BYTES, READ_BYTES
from optcc.runtime.protocol.outbound import Outbound

_DARK_S = 1.5


def broken_invariants(endpoint: Endpoint) -> Iterator[str]:
    """Each one that is broken, in words."""
    held = 0
    for peer, outbound in endpoint.outbounds.items():
        connections = outbound.connections
        held += len(connections)
        for what in _of_outbound(outbound, connections, endpoint.settings.window):
            yield f"to rank {peer}: {what}"
        if peer not in endpoint.left:
            for connection in connections:
                if connection._queue and not connection.blocked and connection not in endpoint.to_send:
                    yield f"to rank {peer}: {len(connection._queue)} chunks wait, and nobody is to write them"
    for peer, inbound in endpoint.inbounds.items():
        held += sum(each is not None for each in inbound.connections)
        for what in _of_inbound(inbound):
            yield f"from rank {peer}: {what}"
    for leg in endpoint.relays.legs:
        if leg.n_waiting_bytes > QUEUE_BYTES + READ_BYTES:
            yield f"{leg.n_waiting_bytes} B wait to be passed on"
        if leg.n_waiting_bytes and not leg.blocked and leg not in endpoint.to_report:
            yield f"{leg.n_waiting_bytes} B wait to be passed on, and nobody is to write them"
    if held != len(endpoint.up):
        yield f"{len(endpoint.up)} connections are up, the rails hold {held}"


def not_looked_for(endpoint: Endpoint) -> set[int]:
    """The peers that are waited for, have not been connected for long, and are not dialled."""
    return {
        peer
        for peer, inbound in endpoint.inbounds.items()
        if inbound._dark_s > _DARK_S
        and inbound.has_work()
        and peer not in endpoint.outbounds
        and peer not in endpoint.left
    }


def _of_outbound(outbound: Outbound, connections: Sequence[SendConnection], window: int) -> Iterator[str]:
    is_used = [outbound._is_used(rail) for rail in range(len(outbound.rails))]
    # Channels share few ways to stripe.
    used_by_rails = dict[tuple[int, ...], int]()
    for k, channel in outbound._channels.items():
        sender, rails = channel.sender, tuple(channel.rails)
        if len(sender.out) > window:
            yield f"channel {k}: {len(sender.out)} chunks are out, window {window}"
        if len(channel.chunks) != channel.posted - sender.acked:
            yield f"channel {k}: {len(channel.chunks)} chunks are kept of {sender.acked} to {channel.posted}"
        used = used_by_rails.get(rails)
        if used is None:
            used = used_by_rails[rails] = _bits([is_used[rail] for rail in rails])
        if sender.up & (1 << len(rails)) - 1 != used:
            yield f"channel {k}: the table has {sender.up:b} up, used are {used:b}"
        if sender.stalled and any(is_used):
            yield f"channel {k}: stalled, and a rail is used"
    for connection in connections:
        if not connection._queue:
            continue
        if connection.is_avoided:
            yield f"{len(connection._queue)} chunks wait for a connection that is avoided"
        for owner, number, epoch, view in connection._queue:
            if view is None or owner.is_stale(number, epoch) or not isinstance(owner, SendChannel):
                continue
            virtual = owner.sender.out[number - owner.acked]
            if virtual != NOWHERE and owner.rails[virtual] != connection.rail:
                yield f"channel {owner.k}: chunk {number} of rail {owner.rails[virtual]} waits for {connection.rail}"
        if len(connection._queue) > 2 * (window + 1) * len(outbound._channels):
            yield f"{len(connection._queue)} chunks wait for one connection"


def _bits(flags: Sequence[bool]) -> int:
    """A number with these bits, the lowest first."""
    bits = 0
    for flag in reversed(flags):
        bits = bits << 1 | flag
    return bits


def _of_inbound(inbound: Inbound) -> Iterator[str]:
    is_used = [each is not None and not each.is_avoided for each in inbound.connections]
    rails = inbound._rails
    used, all_rails = _bits([is_used[rail] for rail in rails]), (1 << len(rails)) - 1
    for k, channel in inbound._channels.items():
        receiver = channel.receiver
        if receiver.up & all_rails != used:
            yield f"channel {k}: the table has {receiver.up:b} up, used are {used:b}"
        if len(channel.slots) != channel.posted - receiver.delivered and receiver.delivered <= channel.posted:
            yield f"channel {k}: {len(channel.slots)} slots of {receiver.delivered} to {channel.posted}"
        if receiver.delivered > channel.posted:
            yield f"channel {k}: {receiver.delivered} chunks are delivered into {channel.posted} slots"
        if channel.early:
            early = [len(chunk) for chunk in channel.early.values()]
            if len(early) > EARLY_CHUNKS_MAX or any(n_bytes > EAGER_BYTES for n_bytes in early):
                yield f"channel {k}: early chunks of {early} B are kept"
        for number, connection in channel.arriving.items():
            if connection.is_closed:
                yield f"channel {k}: chunk {number} counts as coming over a connection that was given up"
            elif not connection._left or connection._chunk[1:] != (k, number):
                yield f"channel {k}: chunk {number} counts as coming over a connection on which it does not come"
    for coming in inbound.connections:
        if coming is not None and coming._left and coming._slot is None:
            epoch, k, number = coming._chunk
            # What comes may be padding.
            if k >= 0 and is_fresh(inbound._link, inbound._channels[k].receiver, Event(DATA, 0, epoch, number)):
                yield f"channel {k}: chunk {number} comes and is wanted, and its bytes are discarded"
