"""The measured rates of NICs: what this rank's send, what peers say of theirs, and how data is divided by them. No I/O.

Each rank judges its own NICs (`nic_meter`) and tells its peers. A rank that learns of a slower NIC divides anew what it
has still to send; this needs no agreement, since the sender says over which rail a chunk goes. A NIC that is down is
told in the same way, so that peers route around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optcc.runtime.protocol.frames import RATE_FRAME, RATE_NICS_MAX, rate_word, read_rate_word
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.nic_meter import LOADED_BYTES, LOOKS_MIN, WINDOW_S, Carried, NicMeter, weigh
from optcc.runtime.protocol.outbound import Outbound, Rail
from optcc.runtime.striping import divide

_AS_FAST = 0.85
_RATE_UNIT = 1 << 12


class Rates:
    """The rates of all NICs as far as this rank knows them, as shares of what is declared.

    A destination NIC that takes in less than declared looks like a source NIC that sends less: data is held up either
    way. `carried` is what the plan that was opened last has each pair carry, bytes.
    """

    def __init__(self, local: LocalRank, outbounds: Mapping[int, Outbound]) -> None:
        self._local, self._outbounds = local, outbounds
        self.is_on = local.settings.learn_rates and len(local.own_nics) > 1
        self.carried: dict[tuple[int, int], int] = {}
        self._meters = [NicMeter() for _ in local.own_nics]
        self._unsure = [False] * len(self._meters)
        self._shares: dict[tuple[int, int], float] = {}
        self._down: set[tuple[int, int]] = set()
        self._heard: dict[tuple[int, int], int] = {}
        self._n_said, self._began_s = 0, 0.0

    def forget(self) -> None:
        """The declared rates are others: what was measured in parts of the old ones counts no more."""
        self._meters = [NicMeter() for _ in self._local.own_nics]
        self._shares.clear()
        for count in self._local.rail_counts:
            count.out_share = 1.0
        self.divide_anew()

    def look(self, now_s: float) -> None:
        """Samples whether each NIC is backlogged, and judges the NICs at the end of a window."""
        n_nics = len(self._meters)
        loaded, busy = [False] * n_nics, [False] * n_nics
        for out in self._outbounds.values():
            for rail in out.rails:
                connection = rail.connection
                if connection is not None and connection.awaits:
                    self._unsure[rail.mine] |= connection.suspect
                    if connection.waiting_bytes >= LOADED_BYTES:
                        busy[rail.mine] = True
                        loaded[rail.mine] |= not self._is_slower(out.peer, rail)
        for meter, is_loaded in zip(self._meters, loaded, strict=True):
            meter.look(is_loaded, is_loaded and not all(busy))
        if now_s - self._began_s >= WINDOW_S and (not any(busy) or self._meters[0].n_looks >= LOOKS_MIN):
            self._close(now_s - self._began_s)
            self._began_s = now_s

    def _is_slower(self, peer: int, rail: Rail) -> bool:
        """True if the destination NIC is known to be slower than the source NIC: then the traffic says nothing of the
        latter."""
        mine = self._local.own_nics[rail.mine][3] * self.share(self._local.rank, rail.mine)
        return self._local.book[peer][rail.theirs][4] < _AS_FAST * mine

    def share(self, rank: int, nic: int) -> float:
        """The share of its declared out rate that a NIC is known to have."""
        return self._shares.get((rank, nic), 1.0)

    def _close(self, took_s: float) -> None:
        """Ends a window, which says nothing of a NIC one of whose connections was suspected."""
        carried = [Carried() for _ in self._meters]
        for out in self._outbounds.values():
            for rail in out.rails:
                if rail.connection is not None:
                    n_bytes, busy_s, open_s = rail.connection.take_carried()
                    before = carried[rail.mine]
                    after = before._replace(n_bytes=before.n_bytes + n_bytes)
                    if not self._is_slower(out.peer, rail):
                        after = Carried(
                            after.n_bytes,
                            before.own_bytes + n_bytes,
                            before.busy_s + busy_s,
                            before.open_s + open_s,
                            max(before.longest_s, open_s),
                        )
                    carried[rail.mine] = after
        for nic, (meter, each) in enumerate(zip(self._meters, carried, strict=True)):
            if self._unsure[nic]:
                meter.drop()
            else:
                meter.close(each, took_s)
        self._unsure = [False] * len(self._meters)
        self._judge()

    def _judge(self) -> None:
        """Tells the rates of this rank's NICs if they have changed."""
        local = self._local
        known = [self.share(local.rank, nic) for nic in range(len(self._meters))]
        shares = weigh(self._meters, [nic[3] for nic in local.own_nics], known)
        if shares != known:
            self.know(shares)

    def know(self, shares: Sequence[float]) -> None:
        """The NICs of this rank have these shares of their declared rates: tells the peers, and divides anew."""
        for nic, share in enumerate(shares):
            self._shares[self._local.rank, nic] = self._local.rail_counts[nic].out_share = share
        self._publish()

    def note_nic(self, nic: int, is_up: bool) -> None:
        """The kernel says that a NIC of this rank has gone down, or is back."""
        own = self._local.rank, nic
        self._shares.setdefault(own, 1.0)
        (self._down.discard if is_up else self._down.add)(own)
        self._publish()

    def _publish(self) -> None:
        self._n_said += 1
        for peer in dict.fromkeys(connection.peer for connection in self._local.up):
            self.tell(peer)
        self.divide_anew()

    def tell(self, peer: int) -> None:
        """Tells a peer the rates of this rank's NICs that are, or were, below what is declared."""
        for nic in range(min(len(self._meters), RATE_NICS_MAX)):
            own = self._local.rank, nic
            if own in self._shares:
                share = 0.0 if own in self._down else self._shares[own]
                self._local.say(peer, RATE_FRAME, rate_word(self._n_said, nic, share))

    def hear(self, peer: int, number: int) -> None:
        """What a peer says of one of its NICs, unless a later report has come before."""
        count, nic, share = read_rate_word(number)
        if nic < len(self._local.book[peer]) and count > self._heard.get((peer, nic), 0):
            self._heard[peer, nic] = count
            if share:
                self._shares[peer, nic] = share
            (self._down.discard if share else self._down.add)((peer, nic))
            self.divide_anew()

    def divide_anew(self) -> None:
        """Divides what this rank has still to send by the rates that are known now."""
        local = self._local
        if not self.is_on or (not self._down and all(share == 1 for share in self._shares.values())):
            for out in self._outbounds.values():
                out.take_parts(None)
            return
        rates = [[self._rates(rank, nic) for nic in range(len(nics))] for rank, nics in enumerate(local.book)]
        parts = divide(self.carried, {pair: local.pairs(*pair) for pair in self.carried}, rates)
        for peer, out in self._outbounds.items():
            alone = [min(rates[local.rank][rail.mine][0], rates[peer][rail.theirs][1]) for rail in out.rails]
            if len(alone) > 1:
                out.take_parts([max(1, part) for part in parts.get((local.rank, peer), alone)])

    def _rates(self, rank: int, nic: int) -> tuple[int, int]:
        """What a NIC sends and receives, in parts of what is declared; next to nothing if it is down."""
        if (rank, nic) in self._down:
            return 1, 1
        *_, out, in_ = self._local.book[rank][nic]
        return max(1, round(_RATE_UNIT * out * self.share(rank, nic))), _RATE_UNIT * in_
