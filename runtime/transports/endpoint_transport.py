"""What the drivers of `optcc.runtime.protocol` share: all of a `Transport` but the wire, the wait and the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from optcc.errors import DeadlineExceeded, RuntimeFault
from optcc.plan import Channel
from optcc.runtime.device_paths import DevicePath
from optcc.runtime.protocol.agreement import Epoch, Shares
from optcc.runtime.protocol.channel import RecvChannel, SendChannel
from optcc.runtime.protocol.endpoint import LINGER_S, Endpoint
from optcc.runtime.protocol.exchange import Exchange
from optcc.runtime.protocol.flows import LEAST_S, FlowTally, Rail, Traffic
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.liveness import Connection, KernelReport
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.membership import FAREWELL_S
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.settings import Counts, NicEntry, RailCount
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Bytes, Clock, Event

CONCLUDE_S = 10.0
"""The ranks agree on a failure much sooner, in time that this one has watched."""


class EndpointTransport(ABC):
    """One rank's end of a network whose protocol is `self._endpoint`; see `Transport` for its promises."""

    _endpoint: Endpoint
    device_path: DevicePath | None = None
    """See `optcc.runtime.device_paths.KeepsPath`."""
    _clock: Clock
    _is_closed = _has_concluded = _regroups = False

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        return self._endpoint.rank

    @property
    def n_ranks(self) -> int:
        """Ranks of the job."""
        return len(self._endpoint.book)

    @property
    def endpoint(self) -> Endpoint:
        """The protocol of this rank, for whoever observes it."""
        return self._endpoint

    @property
    def rails(self) -> tuple[RailCount, ...]:
        """The traffic of each NIC of this rank so far, in the order in which they were given."""
        counts = self._endpoint.rail_counts[: len(self._endpoint.own_nics)]
        return tuple(replace(rail) for rail in counts)

    @property
    def inside(self) -> RailCount | None:
        """The traffic of this rank inside its host; None if it is not known which ranks are there, or it is alone."""
        endpoint = self._endpoint
        return replace(endpoint.rail_counts[-1]) if endpoint.insides else None

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank the first one of its host; itself if it is not known which ranks are on one."""
        return self._endpoint.hosts

    @property
    def partition_s(self) -> float:
        """See `optcc.runtime.transport.WaitsForHosts`."""
        return self._endpoint.settings.partition_s

    @property
    def counts(self) -> Counts:
        """What has happened so far."""
        return replace(self._endpoint.counts)

    @property
    def nics(self) -> tuple[tuple[NicEntry, ...], ...]:
        """The NICs of every rank, by rank, in the order in which they were given."""
        return tuple(tuple(nics) for nics in self._endpoint.book)

    def keep_to_own_nics(self) -> None:
        """What plans that are opened from now on carry goes over NICs of the sender alone, as long as one is up, where
        ranks of one host share its NICs: NIC j of k belongs to rank j r / k of r. Every rank calls this, or none."""
        self._endpoint.keeps_to_own = True

    def pairs(self, src: int, dst: int) -> list[tuple[int, int]]:
        """The rails that join two ranks: the numbers of their NICs at both ends."""
        return self._endpoint.pairs(src, dst)

    def joined(self, src: int, dst: int) -> list[bool]:
        """For each rail of a pair, whether a connection to `dst` is up; all are if this rank is not `src`."""
        if src != self.rank:
            return [True] * len(self.pairs(src, dst))
        return [rail.connection is not None for rail in self._endpoint.outbound(dst).direct]

    def open_over(self, channels: Sequence[Channel], rails: Sequence[int], group: int = 0) -> list[int]:
        """`open`, where each channel goes over one rail of its pair alone: the number in `pairs`, for each channel."""
        return self._endpoint.open_over(channels, rails, group)

    def set_rates(self, rates: Sequence[Sequence[tuple[int, int]]]) -> None:
        """By rank, what its NICs send and receive, bytes/s, in place of what was declared; see `Endpoint.set_rates`."""
        self._endpoint.set_rates(rates)

    @property
    def at_start(self) -> Shares:
        """See `optcc.runtime.transport.KnowsRates`."""
        return self._endpoint.at_start

    def start_from(self, shares: Shares) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.now_s = self._clock.now_s()
        self._endpoint.start_from(shares)
        self._flush()

    def first_mark(self, after_s: float, *, may_be_new: bool = False) -> int | None:
        """See `optcc.runtime.transport.KnowsRates`."""
        marks, now_s = self._endpoint.rates.marks, self._clock.now_s()
        return None if marks is None else marks.first_between(after_s, now_s if may_be_new else now_s - LEAST_S)

    def traffic_since(self, number: int, until: int | None = None) -> Traffic | None:
        """See `optcc.runtime.transport.KnowsRates`."""
        marks = self._endpoint.rates.marks
        if marks is None:
            return None
        return (
            marks.since(number, self._clock.now_s(), self._carried()) if until is None else marks.between(number, until)
        )

    def _carried(self) -> dict[Rail, FlowTally]:
        """What the connections have carried so far, as far as the kernel says."""
        connections = self._endpoint.rates.connections().items()
        return {
            rail: FlowTally(connection.session, report.acked_bytes, report.open_s)
            for rail, connection in connections
            if (report := self._report(connection)) is not None
        }

    @property
    def may_measure(self) -> bool:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.now_s = self._clock.now_s()
        return self._endpoint.epochs.may_measure

    def know_shares(self, shares: Shares, took_s: float, *, is_told: bool) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.now_s = self._clock.now_s()
        self._endpoint.know_shares(shares, took_s, is_told=is_told)
        self._flush()

    def stripe_for(self, shares: Shares) -> None:
        """See `optcc.runtime.transport.Agrees`."""
        self._endpoint.now_s = self._clock.now_s()
        self._endpoint.stripe_for(shares)
        self._flush()

    def trust_shares(self, shares: Shares) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.now_s = self._clock.now_s()
        self._endpoint.trust_shares(shares)
        self._flush()

    def want_plans(self) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.epochs.want_plans()

    def weigh_by(self, least_s: Callable[[Shares], float], ran_s: Callable[[], float]) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.epochs.least_s, self._endpoint.epochs.ran_s = least_s, ran_s

    def note_slow_runs(self, count: int) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self._endpoint.now_s = self._clock.now_s()
        self._endpoint.epochs.note_slow_runs(count)

    # --- epochs

    def join_epochs(self, *, measures: bool = False) -> None:
        """See `optcc.runtime.transport.Agrees`."""
        self._endpoint.epochs.is_on, self._endpoint.epochs.measures = True, measures

    def begin_collective(self) -> int | None:
        """See `optcc.runtime.transport.Agrees`."""
        epochs, marks = self._endpoint.epochs, self._endpoint.rates.marks
        number, epoch = epochs.agreement.next, epochs.agreement.begin()
        if epoch is not None and epochs.measures and marks is not None:
            now_s = self._clock.now_s()
            if marks.is_due(now_s):
                marks.note(number, now_s, self._carried())
        return epoch

    @property
    def wanted_epoch(self) -> Epoch | None:
        """See `optcc.runtime.transport.Agrees`."""
        return self._endpoint.epochs.agreement.wanted

    def epoch_ready(self, ahead: int) -> None:
        """See `optcc.runtime.transport.Agrees`."""
        self._endpoint.epochs.agreement.ready(ahead)
        self._endpoint.epochs.spread()
        self._flush()

    # --- the driver

    @abstractmethod
    def _write(self, connection: Established) -> None:
        """Writes what the wire takes."""

    @abstractmethod
    def _report(self, connection: Connection) -> KernelReport | None:
        """The counters of the connection as they are now; None where they are not known."""

    @abstractmethod
    def _flush(self) -> None:
        """Writes everything that waits, and carries out what the endpoint asks for."""

    @abstractmethod
    def _progress(self, holds: Callable[[], bool] | None, timeout_s: float) -> None:
        """Reads and writes until `holds()`, a failure, or `timeout_s` have passed; looks at least once if it must.

        None stands for waiting until there are events.
        """

    @abstractmethod
    def _hang_up(self) -> None:
        """Says bye on every connection, and gives everything back that `regroup` does not need."""

    @abstractmethod
    def _renew(self, endpoint: Endpoint) -> None:
        """After `_hang_up`: the protocol of this rank is another one, on the same NICs."""

    @abstractmethod
    def _give_back(self) -> None:
        """Gives everything back."""

    # --- regrouping

    @property
    def job(self) -> bytes:
        """See `optcc.runtime.transport.Regroups`."""
        return self._endpoint.job

    @property
    def departed(self) -> frozenset[int]:
        """See `optcc.runtime.transport.Regroups`."""
        return frozenset(rank for rank, has_failed in self._endpoint.left.items() if not has_failed)

    @property
    def regroups(self) -> bool:
        """See `optcc.runtime.transport.Regroups`."""
        return self._regroups

    def regroup(self, members: Collection[int], job: bytes, partition_s: float = 0.0) -> None:
        """See `optcc.runtime.transport.Regroups`."""
        assert self._regroups, "the transport has given everything back"
        self.close()
        old = self._endpoint
        endpoint = Endpoint(
            *(replace(old.settings, partition_s=partition_s), old.rank, old.book),
            job=job,
            secret=old.secret,
            draw=old.draw,
            checksum=old.checksum,
            now_s=self._clock.now_s(),
            insides=old.insides,
        )
        endpoint.keeps_to_own = old.keeps_to_own
        endpoint.addresses_told.take_over(old.addresses_told)
        # Nobody waits for those that have left in good order, nor dials them.
        endpoint.left.update(dict.fromkeys(sorted(set(range(self.n_ranks)) - set(members)), False))
        self._renew(endpoint)
        self._endpoint = endpoint
        self._is_closed = self._has_concluded = False
        # A rank that comes back is another process, with other memory.
        self.device_path = None

    def release(self) -> None:
        """See `optcc.runtime.transport.Regroups`."""
        self.close()
        if self._regroups:
            self._regroups = False
            self._give_back()

    # --- Transport

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`. Connections to the destinations are begun, not waited for."""
        return self._endpoint.open(channels, group, carried)

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._send(*self._endpoint.sending(channel), view.data)

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`. The slots of long messages are reported at once, of eager ones when this rank waits."""
        self._receive(*self._endpoint.receiving(channel), view.data)

    def bind_send(self, channel: int, view: Bytes) -> Callable[[], None]:
        """See `optcc.runtime.transport.Binds`."""
        return partial(self._send, *self._endpoint.sending(channel), view.data)

    def bind_recv(self, channel: int, view: Bytes) -> Callable[[], None]:
        """See `optcc.runtime.transport.Binds`."""
        return partial(self._receive, *self._endpoint.receiving(channel), view.data)

    def _send(self, outbound: Outbound, channel: SendChannel, view: memoryview) -> None:
        endpoint = self._endpoint
        endpoint.now_s = self._clock.now_s()
        connection = endpoint.send_on(outbound, channel, view)
        if connection is not None:
            self._write(connection)
        if endpoint.to_send or endpoint.to_report:
            self._flush()

    def _receive(self, inbound: Inbound, channel: RecvChannel, view: memoryview) -> None:
        if self._endpoint.receive_on(inbound, channel, view):
            self._flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport`; raises AllRailsFailed and MismatchError too."""
        endpoint = self._endpoint
        if not endpoint.events:
            if self._is_closed:
                raise endpoint.failure or RuntimeFault(f"rank {self.rank}: the transport is closed")
            self._progress(None, timeout_s)
            if not endpoint.events:
                endpoint.reports.release_all()
                self._flush()
                if endpoint.failure is not None:
                    raise endpoint.failure
        events = endpoint.poll_events()
        if endpoint.to_send or endpoint.to_report:
            self._flush()
        return events

    def defer_reports(self) -> Callable[[], None]:
        """See `optcc.runtime.transport.Defers`."""
        self._endpoint.settle_later()
        return self._settle

    def _settle(self) -> None:
        if self._endpoint.reports.is_owed and not self._is_closed:
            self._endpoint.reports.release_owed()
            self._flush()

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """See `Transport`; raises AllRailsFailed too, and MismatchError if the payloads differ in length."""
        endpoint = self._endpoint
        endpoint.now_s = self._clock.now_s()
        exchange = Exchange(endpoint, payload)
        timeout_s += self.partition_s
        self._flush()
        self._progress(exchange.step, timeout_s)
        if not exchange.step():
            if endpoint.failure is not None:
                raise endpoint.failure
            waited = f"rank {self.rank}: waited {timeout_s:g} s in vain for other ranks to agree"
            raise self.conclude(DeadlineExceeded(waited))
        return exchange.parts

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""
        self.allgather(b"", timeout_s)

    def abort(self, cause: str) -> None:
        """See `Transport`. The peers that answer at once know why before this returns."""
        self.conclude(RuntimeFault(f"rank {self.rank}: {cause}"), cause)
        self.close()

    def conclude(self, error: RuntimeFault, cause: str = "") -> RuntimeFault:
        """See `optcc.runtime.transport.Concludes`."""
        endpoint = self._endpoint
        membership = endpoint.membership
        if self._has_concluded or self._is_closed or membership.agreement.is_decided:
            return endpoint.failure or error
        self._has_concluded = True
        # What ends every wait must not end this one.
        own, endpoint.failure = endpoint.failure or error, None
        endpoint.now_s = self._clock.now_s()
        membership.find_error(cause or f"{type(error).__name__}: {error}", is_late=isinstance(error, DeadlineExceeded))
        self._flush()
        self._progress(lambda: membership.agreement.is_decided, CONCLUDE_S)
        endpoint.failure = membership.conclude(own)
        return endpoint.failure

    def close(self) -> None:
        """See `Transport`. Peers that still wait for this rank learn that it has left."""
        if self._is_closed:
            return
        endpoint = self._endpoint
        endpoint.reports.release_all()
        self._flush()
        if endpoint.failure is not None:
            self.conclude(endpoint.failure)
        # Another rank that is found lost while this one waits to leave is no failure of this one, nor of its peers.
        failure, endpoint.failure = endpoint.failure, None
        endpoint.begin_leaving()
        if failure is None:
            # `may_leave` ends the wait; the limit is twice that, should this process be stopped meanwhile.
            self._progress(endpoint.may_leave, 2 * max(LINGER_S, self.partition_s))
        else:
            self._progress(endpoint.membership.is_known, FAREWELL_S)
        endpoint.failure = failure
        self._is_closed = True
        self._hang_up()
