"""The suite that every transport passes: what `optcc.runtime.transport.Transport` promises, tried out.

    check_transport(make)

is called by every rank of a network, in its own thread or process, with a `make` that returns this rank's end of a
network that nobody has used yet. It raises AssertionError, naming the check, for a promise that is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from optcc.errors import DeadlineExceeded, RankLost
from optcc.plan import Channel
from optcc.runtime.transport import RECEIVED, SENT, Bytes, Clock, MonotonicClock, Transport

DEADLINE_S = 30.0
_PAUSES_S = (0.2, 1.0)
SIZES_BYTES = (1, 7, 64, 4096, 65537, 1 << 20, 4 << 20)


def check_transport(make: Callable[[], Transport], *, clock: Clock | None = None) -> list[str]:
    """Runs every check on the transport that `make` returns and closes it; the names of the checks.

    Raises AssertionError for a broken promise, DeadlineExceeded if a check waits longer than `DEADLINE_S`.
    """
    transport = make()
    bench = _Bench(transport, clock or MonotonicClock())
    checks: tuple[Callable[[_Bench], None], ...] = (
        *(_gathers, _keeps_handles, _keeps_order, _carries_every_size, _carries_both_ways, _queues_sends),
        *(_waits_for_the_receiver, _keeps_many_channels_apart, _keeps_groups_apart, _returns_when_nothing_happens),
        *(_meets_at_barriers, _needs_nothing_of_who_is_done),
    )
    names: list[str] = []
    for check in checks:
        names.append(check.__name__.strip("_").replace("_", " "))
        try:
            check(bench)
        except AssertionError as error:
            raise AssertionError(f"transport, rank {transport.rank}: {names[-1]}: {error}") from error
        transport.barrier(DEADLINE_S)
    _ends_the_waits_of_all(bench)
    transport.close()
    transport.close()
    return [*names, "ends the waits of all", "closes twice"]


class _Bench:
    """A transport and a count of its events."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self.transport, self.clock = transport, clock
        self.rank, self.n_ranks = transport.rank, transport.n_ranks
        self.seen: dict[tuple[int, int], int] = {}

    def open(self, channels: Sequence[Channel], group: int = 0) -> list[int]:
        self.seen.clear()
        return self.transport.open(channels, group)

    def count(self, kind: int, handle: int) -> int:
        return self.seen.get((kind, handle), 0)

    def take(self, timeout_s: float) -> None:
        for event in self.transport.poll(timeout_s):
            self.seen[event] = self.seen.get(event, 0) + 1

    def until(self, kind: int, handle: int, count: int, exactly: bool = True) -> None:
        """Polls until `count` events of this kind have been seen on the channel, and no more if `exactly`."""
        deadline = self.clock.now_s() + DEADLINE_S
        while self.count(kind, handle) < count:
            if self.clock.now_s() > deadline:
                raise DeadlineExceeded(f"{self.count(kind, handle)} of {count} events {kind} on channel {handle}")
            self.take(0.5)
        assert not exactly or self.count(kind, handle) == count, "more events than messages"


def _pattern(n_bytes: int, seed: int) -> Bytes:
    return ((np.arange(n_bytes, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(13)) + seed & 0xFF).astype(
        np.uint8
    )


def _neighbours(bench: _Bench) -> tuple[list[Channel], int, int]:
    """A ring of channels, rank r's being number r; the channels out of and into this rank."""
    n = bench.n_ranks
    ring = [Channel(rank, (rank + 1) % n, 2) for rank in range(n)]
    return ring, bench.rank, (bench.rank - 1) % n


def _gathers(bench: _Bench) -> None:
    for number in range(3):
        got = bench.transport.allgather(bytes([bench.rank, number]) * 24, DEADLINE_S)
        assert got == [bytes([rank, number]) * 24 for rank in range(bench.n_ranks)], got


def _keeps_handles(bench: _Bench) -> None:
    if bench.n_ranks < 2:
        return
    pair = [Channel(0, 1, 2), Channel(1, 0, 2), Channel(0, 1, 1)]
    first = bench.open(pair)
    assert bench.open([pair[1], pair[0]]) == [first[1], first[0]], "the k-th channel of a pair must stay the same one"
    own = [handle for handle in first if handle >= 0]
    assert len(set(own)) == len(own), "channels must have handles of their own"
    assert (len(own) == 3) == (bench.rank in (0, 1)), "a handle for the channels of this rank, -1 for the others"


def _keeps_order(bench: _Bench) -> None:
    if bench.n_ranks < 2:
        return
    ring, out, in_ = _neighbours(bench)
    handles = bench.open(ring)
    # Short and long messages take different ways through most libraries, and must not overtake each other.
    sizes = [3, 200_000, 5, 70_000, 1, 1, 500_000, 2] * 4
    sends = [_pattern(size, number + bench.rank) for number, size in enumerate(sizes)]
    recvs = [np.zeros(size, dtype=np.uint8) for size in sizes]
    for view in recvs:
        bench.transport.post_recv(handles[in_], view)
    for view in sends:
        bench.transport.post_send(handles[out], view)
    for number, view in enumerate(recvs):
        bench.until(RECEIVED, handles[in_], number + 1, exactly=False)
        assert np.array_equal(view, _pattern(len(view), number + in_)), f"message {number} of {len(view)} B"
    bench.until(SENT, handles[out], len(sizes))


def _carries_every_size(bench: _Bench) -> None:
    if bench.n_ranks < 2:
        return
    ring, out, in_ = _neighbours(bench)
    handles = bench.open(ring)
    for number, size in enumerate(SIZES_BYTES):
        view = np.zeros(size + 2, dtype=np.uint8)
        bench.transport.post_recv(handles[in_], view[1:-1])
        bench.transport.post_send(handles[out], _pattern(size, bench.rank))
        bench.until(RECEIVED, handles[in_], number + 1)
        bench.until(SENT, handles[out], number + 1)
        assert np.array_equal(view[1:-1], _pattern(size, in_)), f"{size} B"
        assert view[0] == view[-1] == 0, f"{size} B: written past its ends"


def _carries_both_ways(bench: _Bench) -> None:
    """Every rank sends to every rank at once, without deadlock."""
    n, me, size = bench.n_ranks, bench.rank, 1 << 18
    channels = [Channel(src, dst, 1) for src in range(n) for dst in range(n) if src != dst]
    handles = bench.open(channels)
    views: dict[int, Bytes] = {}
    for handle, channel in zip(handles, channels, strict=True):
        if channel.src == me:
            bench.transport.post_send(handle, _pattern(size, me * n + channel.dst))
    for handle, channel in zip(handles, channels, strict=True):
        if channel.dst == me:
            views[handle] = np.zeros(size, dtype=np.uint8)
            bench.transport.post_recv(handle, views[handle])
    for handle, channel in zip(handles, channels, strict=True):
        if channel.dst == me:
            bench.until(RECEIVED, handle, 1)
            assert np.array_equal(views[handle], _pattern(size, channel.src * n + me)), f"from rank {channel.src}"
        elif channel.src == me:
            bench.until(SENT, handle, 1)


def _queues_sends(bench: _Bench) -> None:
    """Many more sends than there are posted receives, which come one at a time into one slot."""
    if bench.n_ranks < 2:
        return
    ring, out, in_ = _neighbours(bench)
    handles = bench.open(ring)
    count, size = 50, 9000
    for number in range(count):
        bench.transport.post_send(handles[out], _pattern(size, number))
    slot = np.zeros(size, dtype=np.uint8)
    for number in range(count):
        bench.transport.post_recv(handles[in_], slot)
        bench.until(RECEIVED, handles[in_], number + 1)
        assert np.array_equal(slot, _pattern(size, number)), f"message {number}"
    bench.until(SENT, handles[out], count)


def _waits_for_the_receiver(bench: _Bench) -> None:
    """A send, however short, is not reported before its receive has been posted."""
    if bench.n_ranks < 2:
        return
    ring, out, in_ = _neighbours(bench)
    handles = bench.open(ring)
    bench.transport.post_send(handles[out], _pattern(8, 1))
    for _ in range(3):
        bench.take(0.01)
    assert bench.count(SENT, handles[out]) == 0, "sent before it was received"
    bench.transport.barrier(DEADLINE_S)
    bench.transport.post_recv(handles[in_], np.zeros(8, dtype=np.uint8))
    bench.until(SENT, handles[out], 1)
    bench.until(RECEIVED, handles[in_], 1)


def _keeps_many_channels_apart(bench: _Bench) -> None:
    """Sixteen channels of one pair, received in the opposite order of sending."""
    if bench.n_ranks < 2:
        return
    n, me, count = bench.n_ranks, bench.rank, 16
    channels = [Channel(rank, (rank + 1) % n, 2) for rank in range(n) for _ in range(count)]
    handles = bench.open(channels)
    left = (me - 1) % n
    outs, ins = handles[me * count : (me + 1) * count], handles[left * count : (left + 1) * count]
    views = [np.zeros(1000, dtype=np.uint8) for _ in ins]
    for k, handle in enumerate(outs):
        bench.transport.post_send(handle, _pattern(1000, k))
    for k in reversed(range(count)):
        bench.transport.post_recv(ins[k], views[k])
    for k in range(count):
        bench.until(RECEIVED, ins[k], 1)
        bench.until(SENT, outs[k], 1)
        assert np.array_equal(views[k], _pattern(1000, k)), f"channel {k}"


def _keeps_groups_apart(bench: _Bench) -> None:
    """The same channels in three groups, their messages interleaved, and received in another order than sent."""
    if bench.n_ranks < 2:
        return
    ring, out, in_ = _neighbours(bench)
    channels = [channel for channel in ring for _ in range(2)]
    groups = (0, 7, 3)
    handles = {group: bench.open(channels, group) for group in groups}
    own = [handle for group in groups for handle in handles[group] if handle >= 0]
    assert len(set(own)) == len(own), "groups must have channels of their own"
    assert bench.open(channels, 7) == handles[7], "the k-th channel of a pair and a group must stay the same one"
    sizes = (5, 100_000, 64)
    views: dict[tuple[int, int, int], Bytes] = {}
    for message, size in enumerate(sizes):
        for group in groups:
            for k in range(2):
                bench.transport.post_send(handles[group][2 * out + k], _pattern(size, 10 * group + 3 * k + message))
    for group in reversed(groups):
        for k in reversed(range(2)):
            for message, size in enumerate(sizes):
                view = views[group, k, message] = np.zeros(size, dtype=np.uint8)
                bench.transport.post_recv(handles[group][2 * in_ + k], view)
    for group in groups:
        for k in range(2):
            bench.until(RECEIVED, handles[group][2 * in_ + k], len(sizes))
            bench.until(SENT, handles[group][2 * out + k], len(sizes))
    for (group, k, message), view in views.items():
        assert np.array_equal(view, _pattern(len(view), 10 * group + 3 * k + message)), f"group {group} channel {k}"


def _returns_when_nothing_happens(bench: _Bench) -> None:
    bench.open([])
    begin = bench.clock.now_s()
    assert bench.transport.poll(0.0) == []
    assert bench.transport.poll(0.02) == []
    assert bench.clock.now_s() - begin < 5.0, "poll must return when its time is over"


def _meets_at_barriers(bench: _Bench) -> None:
    """Nobody leaves a barrier before the last has come: here, rank 0."""
    bench.transport.barrier(DEADLINE_S)
    if bench.rank == 0:
        bench.clock.sleep_s(0.05)
    begin = bench.clock.now_s()
    bench.transport.barrier(DEADLINE_S)
    waited_s = bench.clock.now_s() - begin
    assert bench.rank == 0 or waited_s > 0.02, f"left after {waited_s:.3f} s, before rank 0 had come"


def _needs_nothing_of_who_is_done(bench: _Bench) -> None:
    """A rank that has seen all its events does something else for a while; nobody waits for it meanwhile."""
    if bench.n_ranks < 2:
        return
    n, me, lanes, count = bench.n_ranks, bench.rank, 8, 12
    handles = bench.open([Channel(rank, (rank + 1) % n, 2) for rank in range(n) for _ in range(lanes)])
    outs, ins = handles[me * lanes : (me + 1) * lanes], handles[(me - 1) % n * lanes : ((me - 1) % n + 1) * lanes]
    slot = np.zeros(64, dtype=np.uint8)
    # Who waits in vain is late by the whole pause. A busy machine may hold a rank back too: hence a longer second try.
    for pause_s in _PAUSES_S:
        bench.seen.clear()
        bench.transport.barrier(DEADLINE_S)
        begin = bench.clock.now_s()
        for number in range(count):
            for k in range(lanes):
                bench.transport.post_recv(ins[k], slot)
                bench.transport.post_send(outs[k], slot)
            for k in range(lanes):
                bench.until(RECEIVED, ins[k], number + 1)
        for k in range(lanes):
            bench.until(SENT, outs[k], count)
        took_s = bench.clock.now_s() - begin
        bench.clock.sleep_s(pause_s)
        everyone = [float(each) for each in bench.transport.allgather(f"{took_s:020.9f}".encode(), DEADLINE_S)]
        if max(everyone) - min(everyone) < 0.9 * pause_s:
            return
    raise AssertionError(f"seconds until each rank was done: {everyone}: somebody waited for who was done before")


def _ends_the_waits_of_all(bench: _Bench) -> None:
    """Rank 0 gives up: the others, who wait for messages of each other, learn of it. The last check of all."""
    if bench.n_ranks < 2:
        return
    handles = bench.open([Channel(0, dst, 1) for dst in range(1, bench.n_ranks)])
    if bench.rank == 0:
        bench.transport.barrier(DEADLINE_S)
        bench.transport.abort("on purpose")
        return
    bench.transport.post_recv(handles[bench.rank - 1], np.zeros(1, dtype=np.uint8))
    begin = bench.clock.now_s()
    try:
        # Rank 0 may have left the barrier, and given up, while others are still in it.
        bench.transport.barrier(DEADLINE_S)
        while bench.clock.now_s() - begin < DEADLINE_S:
            bench.take(0.5)
    except RankLost:
        return
    raise AssertionError(f"transport, rank {bench.rank}: ends the waits of all: no RankLost in {DEADLINE_S:g} s")
