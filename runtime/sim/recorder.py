"""What befalls ranks in a simulated run, told by wrapping the protocol's methods from outside: a story, and counts.

The protocol itself logs nothing. `Recorder` is a context manager; within it every `Endpoint` of the process is watched.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from optcc.failover import TIMEOUT
from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.frames import EXCHANGE
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.local import Established, LocalRank
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.rates import Rates
from optcc.runtime.protocol.reports import ReportHistory
from optcc.runtime.protocol.suspicion import Suspicion

Tell = Callable[[int, str], None]
"""(rank, what befell it)."""


@contextmanager
def replaced(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Within it, calls of a method go to `method`, whose first argument is the method itself."""
    former = getattr(owner, name)

    @functools.wraps(former)
    def instead(*arguments: Any, **options: Any) -> Any:
        return method(former, *arguments, **options)

    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, former)


class Recorder:
    """Counts what happens by kind, and tells it. `tell` None: counts only.

    >>> recorder = Recorder()
    >>> with recorder:
    ...     recorder.counts.total()
    0
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self._tell = tell
        self.counts: Counter[str] = Counter()
        self._stack = ExitStack()
        self._rank = -1

    def __enter__(self) -> Recorder:
        for owner, name in _WATCHED:
            method = getattr(self, f"_{owner.__name__.lower()}_{name.strip('_')}")
            self._stack.enter_context(replaced(owner, name, method))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def note(self, rank: int, kind: str, what: str = "") -> None:
        """Something of a kind befell a rank; without words it only counts."""
        self.counts[kind] += 1
        if what and self._tell is not None:
            self._tell(rank, what)

    # --- connections

    def _endpoint_join(self, former: Any, endpoint: Endpoint, accepting: Any) -> Any:
        connection = former(endpoint, accepting)
        self.note(endpoint.rank, "accepted", f"{_rail(endpoint, connection)} is up")
        return connection

    def _outbound_joined(self, former: Any, out: Outbound, dialing: Any, proof: bytes) -> Any:
        kind = "rejoined" if out.was_joined else "joined"
        connection = former(out, dialing, proof)
        self.note(out._local.rank, kind, f"{_rail(out._local, connection)} is up")
        return connection

    def _outbound_dial(self, former: Any, out: Outbound, rail: Any, number: int) -> None:
        if rail.refused:
            self.note(out._local.rank, "dialled after a refusal", f"dials rank {out.peer} over {rail.name} again")
        former(out, rail, number)

    def _endpoint_dial_failed(self, former: Any, endpoint: Endpoint, dialing: Any, *, refused: bool) -> None:
        if refused:
            nic = endpoint.own_nics[dialing.nic][0]
            self.note(endpoint.rank, "refused", f"is refused by rank {dialing.peer} over {nic}")
        former(endpoint, dialing, refused=refused)

    def _outbound_lose(self, former: Any, out: Outbound, connection: Any, error: Any, **options: Any) -> None:
        self._lose(out._local, connection, error, "outbound")
        former(out, connection, error, **options)

    def _inbound_lose(self, former: Any, inbound: Inbound, connection: Any, error: Any, **options: Any) -> None:
        self._lose(inbound._local, connection, error, "inbound")
        former(inbound, connection, error, **options)

    def _lose(self, endpoint: LocalRank, connection: Established, error: Exception, direction: str) -> None:
        if not connection.is_closed:
            self.counts[f"{direction} connections given up: {error}"] += 1
            self.note(endpoint.rank, "connections given up", f"gives up {_rail(endpoint, connection)}: {error}")

    def _suspicion_tell(self, former: Any, suspicion: Suspicion, connection: Established) -> None:
        endpoint = suspicion._local
        if connection.suspect:
            self.note(endpoint.rank, "suspected", f"suspects {_rail(endpoint, connection)}")
        else:
            self.note(endpoint.rank, "no longer suspected", f"no longer suspects {_rail(endpoint, connection)}")
        former(suspicion, connection)

    def _outbound_update_avoided(self, former: Any, out: Outbound) -> None:
        before = {each: each.is_avoided for each in out.connections}
        former(out)
        for connection, was_avoided in before.items():
            if connection.is_avoided != was_avoided:
                how = "no longer avoids" if was_avoided else "avoids"
                self.note(out._local.rank, how, f"{how} {_rail(out._local, connection)}")

    def _endpoint_nic_changed(self, former: Any, endpoint: Endpoint, nic: int, is_up: bool) -> None:
        state = "up" if is_up else "down"
        self.note(endpoint.rank, f"NIC {state}", f"hears that its NIC {endpoint.own_nics[nic][0]} is {state}")
        former(endpoint, nic, is_up)

    def _endpoint_nic_moved(self, former: Any, endpoint: Endpoint, nic: int, address: str, port: int) -> None:
        what = f"hears that its NIC {endpoint.own_nics[nic][0]} is at {address} port {port} now"
        self.note(endpoint.rank, "NIC at another address", what)
        former(endpoint, nic, address, port)

    # --- chunks and messages

    def _sendconnection_put(
        self, former: Any, connection: SendConnection, owner: Any, number: int, epoch: int, view: Any
    ) -> None:
        former(connection, owner, number, epoch, view)
        if view is not None and number < owner.highest:
            what = f"sends chunk {number} of {_channel(owner.k)} to rank {connection.peer} again"
            what += f", over rail {connection.rail}"
            self.note(self._rank, "chunks sent again", what)

    def _outbound_at_sender(self, former: Any, out: Outbound, channel: Any, event: Any) -> None:
        # A connection does not know whose it is: what is put on one is put in these steps.
        self._rank = rank = out._local.rank
        epoch = channel.sender.epoch
        if event.kind == TIMEOUT:
            what = f"sends what is out on {_channel(channel.k)} to rank {out.peer} again: its timer rang"
            self.note(rank, "timer rang", what)
        former(out, channel, event)
        if channel.sender.epoch != epoch:
            what = f"begins epoch {channel.sender.epoch} of {_channel(channel.k)} to rank {out.peer}"
            self.note(rank, "epochs begun", f"{what} at chunk {channel.sender.start}")

    def _inbound_begin(self, former: Any, inbound: Inbound, *arguments: Any) -> Any:
        counts = inbound._local.counts
        before = counts.suppressed
        slot = former(inbound, *arguments)
        if counts.suppressed != before:
            _, _, k, number, _ = arguments
            what = f"has chunk {number} of {_channel(k)} from rank {inbound.peer} already, or needs it no more"
            self.note(inbound._local.rank, "chunks suppressed", what)
        return slot

    def _inbound_complete(self, former: Any, inbound: Inbound, *arguments: Any) -> None:
        end = inbound._channels[arguments[2]]
        before = len(end.early)
        former(inbound, *arguments)
        self._note_early(inbound, end, before)

    def _inbound_take_eager(self, former: Any, inbound: Inbound, *arguments: Any) -> bool:
        end = inbound._channels.get(arguments[2])
        before = len(end.early) if end is not None else 0
        is_taken: bool = former(inbound, *arguments)
        if end is not None:
            self._note_early(inbound, end, before)
        return is_taken

    def _note_early(self, inbound: Inbound, end: Any, before: int) -> None:
        if len(end.early) > before:
            self.note(inbound._local.rank, "early chunks")

    def _inbound_note_delivery(self, former: Any, inbound: Inbound, channel: Any, is_last: bool) -> None:
        former(inbound, channel, is_last)
        if is_last:
            what = f"message {channel.n_received - 1} of {_channel(channel.k)} from rank {inbound.peer} is delivered"
            self.note(inbound._local.rank, "messages of a barrier" if channel.k == EXCHANGE else "messages", what)

    def _outbound_report(self, former: Any, out: Outbound, channel: Any) -> None:
        former(out, channel)
        what = f"message {channel.n_sent - 1} of {_channel(channel.k)} to rank {out.peer} counts as sent"
        self.note(out._local.rank, "messages sent", what)

    def _outbound_post_eager(self, former: Any, out: Outbound, *arguments: Any) -> Any:
        connection = former(out, *arguments)
        if connection is not None:
            self.note(out._local.rank, "eager messages at once")
        return connection

    def _reporthistory_note_carried(self, former: Any, history: ReportHistory) -> None:
        former(history)
        self.note(-1, "reports carried by messages")

    # --- rates and ranks

    def _rates_know(self, former: Any, rates: Rates, nic: int, out: float, in_: float) -> None:
        what = f"finds that its NIC {nic} has {out:.2f} of its rate out and {in_:.2f} of that in"
        self.note(rates._local.rank, "rates measured", what)
        former(rates, nic, out, in_)

    def _outbound_take_parts(self, former: Any, out: Outbound, parts: Any, *, is_agreed: bool = False) -> None:
        before = out._parts
        former(out, parts, is_agreed=is_agreed)
        if out._parts != before:
            shown = "as declared" if out._parts is None else ", ".join(f"{part:.2f}" for part in out._parts)
            self.note(out._local.rank, "parts changed", f"divides what goes to rank {out.peer}: {shown}")

    def _endpoint_note_controls(self, former: Any, endpoint: Endpoint, connection: Established) -> None:
        was_there = connection.peer not in endpoint.left
        former(endpoint, connection)
        if was_there and connection.peer in endpoint.left:
            how = "after a failure" if endpoint.left[connection.peer] else "in good order"
            self.note(endpoint.rank, "byes", f"hears that rank {connection.peer} leaves {how}")

    def _localrank_fail(self, former: Any, endpoint: LocalRank, failure: Exception) -> None:
        if endpoint.failure is None:
            self.note(endpoint.rank, f"failures: {type(failure).__name__}", f"gives up: {failure}")
        former(endpoint, failure)


_WATCHED: tuple[tuple[type, str], ...] = (
    (Endpoint, "_join"),
    (Endpoint, "_note_controls"),
    (Endpoint, "dial_failed"),
    (LocalRank, "fail"),
    (Endpoint, "nic_changed"),
    (Endpoint, "nic_moved"),
    (Inbound, "_note_delivery"),
    (Inbound, "begin"),
    (Inbound, "complete"),
    (Inbound, "lose"),
    (Inbound, "take_eager"),
    (Outbound, "_at_sender"),
    (Outbound, "_dial"),
    (Outbound, "_report"),
    (Outbound, "joined"),
    (Outbound, "lose"),
    (Outbound, "post_eager"),
    (Outbound, "take_parts"),
    (Outbound, "update_avoided"),
    (Rates, "know"),
    (ReportHistory, "note_carried"),
    (SendConnection, "put"),
    (Suspicion, "tell"),
)


def _channel(k: int) -> str:
    return "the barrier" if k == EXCHANGE else f"channel {k}"


def _rail(endpoint: LocalRank, connection: Established) -> str:
    """A connection in words."""
    is_sender = isinstance(connection, SendConnection)
    src, dst = (endpoint.rank, connection.peer) if is_sender else (connection.peer, endpoint.rank)
    pairs = endpoint.pairs(src, dst)
    if connection.rail == len(pairs):
        return f"the connection {'to' if is_sender else 'from'} rank {connection.peer} through other ranks"
    mine: int = pairs[connection.rail][not is_sender]
    return f"the connection {'to' if is_sender else 'from'} rank {connection.peer} over {endpoint.own_nics[mine][0]}"
