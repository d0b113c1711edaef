"""`Transport` and `Clock`: all that the engine knows of the world outside its rank.

A transport moves whole messages over the channels of a plan. A channel is FIFO: the i-th message sent is the i-th
received, into a view of the same length, and its events are reported in that order. A send is reported only after the
peer has posted the receive that takes it: the plan's proof counts on it that no message arrives without a slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from optcc.errors import InputError, RuntimeFault
from optcc.plan import Channel
from optcc.runtime.protocol.agreement import Epoch, Shares
from optcc.runtime.protocol.flows import Traffic

Bytes = npt.NDArray[np.uint8]
"""A contiguous one-dimensional array of bytes."""

SENT, RECEIVED = 0, 1
Event = tuple[int, int]
"""(SENT or RECEIVED, handle of the channel)."""
EPOCH_NEWS = -1
"""In place of a handle: something has happened to the epochs of the job (`Agrees`), and to no channel."""

WOKEN = -2
"""In place of a handle: another thread has woken this one (`Wakes`)."""

COLLECTIVE_TIMEOUT_S = 60.0


class Clock(Protocol):
    """Where the time comes from."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Gives the processor away for about `seconds`."""
        ...


class MonotonicClock:
    """The clock of the machine."""

    __slots__ = ()

    # Asked many times a message, hence no functions around them.
    now_s = staticmethod(time.perf_counter)
    sleep_s = staticmethod(time.sleep)


class Transport(Protocol):
    """One rank's end of the network; used by one thread at a time.

    A view that was posted belongs to the transport until its event is reported: a send's bytes must not change, a
    receive's must not be read.
    """

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        ...

    @property
    def n_ranks(self) -> int:
        """Ranks on the network."""
        ...

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """The handle of each channel, -1 for those that do not start or end here.

        `carried` is how many bytes go over each channel in a run, if that is known: with several NICs of unequal rates,
        what goes over which.

        The k-th channel from a rank to a rank within a group is the same one in every call: plans of one group run one
        after another, plans of different groups at the same time. Every rank must open the same channels of the same
        groups in the same order. A group below zero has one channel from a rank to a rank, which these two open, each
        when it likes.
        """
        ...

    def post_send(self, channel: int, view: Bytes) -> None:
        """Queues `view` as the next message of a channel that starts here; does not wait."""
        ...

    def post_recv(self, channel: int, view: Bytes) -> None:
        """Queues `view`, exactly as long as the message, as the next to fill on a channel that ends here."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """What has happened since the last call; waits at most `timeout_s` for something, then returns nothing.

        Raises RankLost if a rank is known to be gone.
        """
        ...

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """Every rank's payload, by rank; all payloads of one call have the same length.

        Raises DeadlineExceeded if some rank has not called it within `timeout_s`, RankLost if one is gone.
        """
        ...

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Returns once every rank has called it; raises as `allgather` does."""
        ...

    def abort(self, cause: str) -> None:
        """This rank gives up: every other rank's present or next wait ends in RankLost.

        Afterwards the transport can only be closed, here and there.
        """
        ...

    def close(self) -> None:
        """Gives everything back; further calls of `close` do nothing."""
        ...


@runtime_checkable
class Defers(Protocol):
    """A transport that has things to tell its peers which can go with the next message, if there is one at once."""

    def defer_reports(self) -> Callable[[], None]:
        """From now on they may wait until what this returns is called; whoever asks for it must call it whenever this
        rank may not call again for long, after events."""
        ...


@runtime_checkable
class WaitsForHosts(Protocol):
    """A transport that may wait for hosts without a live rail (`optcc.runtime.partition`)."""

    @property
    def partition_s(self) -> float:
        """How long it waits for one, seconds, by which deadlines are later; 0 if such a host ends the job."""
        ...


@runtime_checkable
class Regroups(Transport, Protocol):
    """A transport some of whose ranks can begin anew without the others (`optcc.runtime.surviving`)."""

    @property
    def regroups(self) -> bool:
        """Whether it was made for that; else it has given everything back when it is closed."""
        ...

    @property
    def job(self) -> bytes:
        """The name under which its ranks know each other."""
        ...

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank the first one of its host."""
        ...

    @property
    def departed(self) -> frozenset[int]:
        """The ranks that are known to have closed, and not because of a failure."""
        ...

    def regroup(self, members: Collection[int], job: bytes, partition_s: float = 0.0) -> None:
        """Closes, and begins anew with these ranks under another name: all its channels are to be opened again.

        Their hosts are waited for `partition_s` seconds if that is above 0 (`optcc.runtime.partition`). What was posted
        before is over: no view of it is read or written any more. Members that come later are waited for like any rank.
        """
        ...

    def release(self) -> None:
        """Closes, and gives back what `close` keeps for `regroup`."""
        ...


@runtime_checkable
class Wakes(Protocol):
    """A transport whose `poll` another thread can end."""

    def wake_by(self, file: int) -> None:
        """From now on `poll` returns an event of `WOKEN` when the eventfd `file` is set, which it sets back."""
        ...


@runtime_checkable
class Binds(Protocol):
    """A transport that can be told once of messages that are posted again and again from and to the same memory."""

    def bind_send(self, channel: int, view: Bytes) -> Callable[[], None]:
        """`post_send` of `view`, to be called as often as one likes."""
        ...

    def bind_recv(self, channel: int, view: Bytes) -> Callable[[], None]:
        """`post_recv` of `view`, to be called as often as one likes."""
        ...


@runtime_checkable
class Concludes(Protocol):
    """A transport whose ranks agree on the failure that ends a run: which ranks are at fault, and the first cause."""

    def conclude(self, error: RuntimeFault, cause: str = "") -> RuntimeFault:
        """This rank has an error of its own, which the others learn with its `cause`, the error itself unless given.

        Waits until all ranks that answer agree, for a second or so. Returns what this rank is to raise: `error`, naming
        who kept it waiting if a deadline has passed, or what another rank has found before.
        """
        ...


@runtime_checkable
class Agrees(Protocol):
    """A transport whose ranks agree on what their NICs carry; see `optcc.runtime.protocol.agreement`."""

    def join_epochs(self, *, measures: bool = False) -> None:
        """From now on this rank takes part; collective. Events of `EPOCH_NEWS` say when to look again.

        With `measures` the ranks measure their NICs before the first collective of an epoch in which rates are others,
        or nothing is (`optcc.runtime.remeasuring`).
        """
        ...

    def begin_collective(self) -> int | None:
        """The number of the epoch under which the next collective runs, which begins now; None if it must wait for
        `EPOCH_NEWS`."""
        ...

    @property
    def wanted_epoch(self) -> Epoch | None:
        """An epoch that waits until this rank has its plans, if there is one."""
        ...

    def stripe_for(self, shares: Shares) -> None:
        """Plans that are opened from now on are for NICs that carry these shares of what the transport has declared;
        the same at every rank, before the same collective. Their messages are cut for that."""
        ...

    def epoch_ready(self, ahead: int) -> None:
        """This rank has the plans of `wanted_epoch`, and begins so many collectives before it knows that all have."""
        ...


@runtime_checkable
class KnowsRates(Protocol):
    """A transport that stripes messages by what its NICs carry, and tells other ranks."""

    @property
    def at_start(self) -> Shares:
        """What the NICs carry in epoch 0, as shares of what the transport has declared."""
        ...

    def start_from(self, shares: Shares) -> None:
        """From the start some NICs carry nothing, the others all that the transport has declared; the same at every
        rank, before the first collective. One that comes back is measured before it is used."""
        ...

    def first_mark(self, after_s: float, *, may_be_new: bool = False) -> int | None:
        """The number of the first collective from a time on, by this rank's clock, of which the transport has kept what
        its connections had carried before; None if there is none, or it has just begun, unless it `may_be_new`."""
        ...

    def traffic_since(self, number: int, until: int | None = None) -> Traffic | None:
        """What this rank's connections have carried since that collective began, up to now or to when `until` began;
        None if that is not known."""
        ...

    @property
    def may_measure(self) -> bool:
        """At rank 0: whether NICs may be measured again, though nothing is known to have changed; not soon after they
        were."""
        ...

    def know_shares(self, shares: Shares, took_s: float, *, is_told: bool) -> None:
        """The NICs were measured, or the traffic was asked if it `is_told`, which took so long. They carry these shares
        of what the transport has declared, the same at every rank, before the same collective."""
        ...

    def trust_shares(self, shares: Shares) -> None:
        """Plans are now for NICs that carry these shares, all of which but the lost ones were measured before: what the
        traffic has said since, while others waited for what a lost NIC had carried, is over."""
        ...

    def want_plans(self) -> None:
        """The NICs were measured in the epoch that has just begun, and there is to be one in which plans are for that:
        rank 0 proposes it."""
        ...

    def weigh_by(self, least_s: Callable[[Shares], float], ran_s: Callable[[], float]) -> None:
        """The least that a run takes where NICs carry such shares, seconds, or 0.0 if that is not known; for how long
        runs have been under way so far, in all. The more the present plans have cost beyond the least, the sooner NICs
        that may be back are tried, and believed."""
        ...

    def note_slow_runs(self, count: int) -> None:
        """At rank 0: so many of its last runs, without a break, took longer than usual, for which NICs may be the
        cause."""
        ...


RESERVED = 1 << 14
"""The number of a pair's channel in group -1; that in group -2 has the next. MPI has tags up to twice that."""


class ChannelNumbers:
    """Numbers the channels of every pair over all groups, as they are first opened.

    The numbers are equal at all ranks, because all open the same channels in the same order. Groups below zero have
    one channel of a pair each, whose number is known beforehand: either of the two may open it, at any time.

    >>> numbers = ChannelNumbers()
    >>> numbers.take([Channel(0, 1, 2), Channel(1, 0, 2), Channel(0, 1, 2)])
    [(0, 1, 0), (1, 0, 0), (0, 1, 1)]
    >>> numbers.take([Channel(0, 1, 2)]), numbers.take([Channel(0, 1, 2)], group=1)
    ([(0, 1, 0)], [(0, 1, 2)])
    >>> numbers.take([Channel(0, 1, 1)], group=-2)
    [(0, 1, 16385)]
    """

    __slots__ = ("_numbers", "_opened")

    def __init__(self) -> None:
        self._opened: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple[int, int, int, int], int] = {}

    def take(self, channels: Sequence[Channel], group: int = 0) -> list[tuple[int, int, int]]:
        """(src, dst, number) for each channel."""
        seen: dict[tuple[int, int], int] = {}
        keys: list[tuple[int, int, int]] = []
        for channel in channels:
            src, dst = pair = channel.src, channel.dst
            k = seen.get(pair, 0)
            seen[pair] = k + 1
            if group < 0:
                if k:
                    raise InputError(f"channel {src}->{dst}: group {group}: must be opened once")
                keys.append((src, dst, RESERVED - 1 - group))
                continue
            number = self._numbers.get((group, src, dst, k))
            if number is None:
                number = self._numbers[group, src, dst, k] = self._opened.get(pair, 0)
                self._opened[pair] = number + 1
            keys.append((src, dst, number))
        return keys
