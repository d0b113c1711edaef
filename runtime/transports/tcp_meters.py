"""What the TCP transport makes of the rates that its NICs turn out to have: who is told, and how it divides by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optcc.runtime.striping import divide
from optcc.runtime.transports.nic_rates import LOADED_BYTES, WINDOW_S, Carried, NicMeter, weigh
from optcc.runtime.transports.tcp_rails import WATCH_S
from optcc.runtime.transports.tcp_wire import RATE_FRAME, RATE_NICS_MAX, rate_word, read_rate_word

if TYPE_CHECKING:
    from optcc.runtime.transports.tcp_routes import Hub, Rail

_AS_FAST = 0.85
_LOOK_S_MAX = 2 * WATCH_S
_RATE_UNIT = 1 << 12


class Meters:
    """What the NICs turn out to send, as far as it is known here, and how this rank divides by it.

    Each rank judges its own NICs (`optcc.runtime.transports.nic_rates`), and tells the ranks that it is joined to. Who
    learns that a NIC is slower divides anew what it has still to send; nobody else need agree, since the sender says
    over which rail a piece goes. A NIC at the other end that takes in less than declared counts as one here that sends
    less: what goes there is held up either way. `carried` is what the plan that was opened last has the pairs carry.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.is_on = hub.settings.learn_rates and len(hub.nics) > 1
        self.carried: dict[tuple[int, int], int] = {}
        self._meters = [NicMeter() for _ in hub.nics]
        self._shares: dict[tuple[int, int], float] = {}
        self._down: set[tuple[int, int]] = set()
        self._heard: dict[tuple[int, int], int] = {}
        self._n_said, self._began_s = 0, 0.0

    def look(self, now_s: float, elapsed_s: float) -> None:
        """Is anything on its way over the NICs? At the end of a window: what does that say? `elapsed_s` is how long ago
        the last look was."""
        loaded, busy = [False] * len(self._meters), [False] * len(self._meters)
        is_unsure = elapsed_s > _LOOK_S_MAX
        for out in self._hub.outs.values():
            for rail in out.rails:
                line = rail.line
                if line is not None and line.awaits:
                    is_unsure |= line.suspect
                    if line.waiting_bytes >= LOADED_BYTES:
                        busy[rail.mine] = True
                        loaded[rail.mine] |= not self._is_slower(out.peer, rail)
        for meter, is_loaded in zip(self._meters, loaded, strict=True):
            meter.look(is_loaded, is_loaded and not all(busy))
        if is_unsure or now_s - self._began_s >= WINDOW_S:
            self._close(now_s - self._began_s, is_unsure)
            self._began_s = now_s

    def _is_slower(self, peer: int, rail: Rail) -> bool:
        """True if the NIC at the other end is known to be slower than what this rank's sends: it says nothing here."""
        mine = self._hub.nics[rail.mine].out_rate * self.share(self._hub.rank, rail.mine)
        return self._hub.book[peer][rail.theirs][4] < _AS_FAST * mine

    def share(self, rank: int, nic: int) -> float:
        """Of what a NIC is declared to send, which share it does."""
        return self._shares.get((rank, nic), 1.0)

    def _close(self, took_s: float, is_unsure: bool) -> None:
        """The end of a window; unless it `is_unsure` what it says."""
        carried = [[0.0] * len(Carried._fields) for _ in self._meters]
        for out in self._hub.outs.values():
            for rail in out.rails:
                if rail.line is not None:
                    n_bytes, busy_s, free_s = rail.line.take_carried()
                    own = (0, 0.0, 0.0) if self._is_slower(out.peer, rail) else (n_bytes, busy_s, free_s)
                    for i, value in enumerate((n_bytes, *own)):
                        carried[rail.mine][i] += value
        for meter, (all_bytes, own_bytes, own_busy_s, own_free_s) in zip(self._meters, carried, strict=True):
            if is_unsure:
                meter.drop()
            else:
                meter.close(Carried(int(all_bytes), int(own_bytes), own_busy_s, own_free_s), took_s)
        if not is_unsure:
            self._judge()

    def _judge(self) -> None:
        """Says what the NICs of this rank send if that is something new."""
        hub = self._hub
        known = [self.share(hub.rank, nic) for nic in range(len(self._meters))]
        shares = weigh(self._meters, [nic.out_rate for nic in hub.nics], known)
        if shares != known:
            self.know(shares)

    def know(self, shares: Sequence[float]) -> None:
        """The NICs of this rank send these shares of their declared rates: that is told, and what is to be sent divided
        anew."""
        for nic, share in enumerate(shares):
            self._shares[self._hub.rank, nic] = self._hub.rails[nic].out_share = share
        self._spread()

    def note_nic(self, nic: int, is_up: bool) -> None:
        """The kernel says that a NIC of this rank has gone down, or is back."""
        own = self._hub.rank, nic
        self._shares.setdefault(own, 1.0)
        (self._down.discard if is_up else self._down.add)(own)
        self._spread()

    def _spread(self) -> None:
        self._n_said += 1
        for peer in self._hub.outs.keys() | self._hub.ins.keys():
            self.tell(peer)
        self.divide_anew()

    def tell(self, peer: int) -> None:
        """Tells a peer what the NICs of this rank send, if that is less than declared, or was."""
        for nic in range(min(len(self._meters), RATE_NICS_MAX)):
            own = self._hub.rank, nic
            if own in self._shares:
                share = 0.0 if own in self._down else self._shares[own]
                self._hub.say(peer, RATE_FRAME, rate_word(self._n_said, nic, share))

    def hear(self, peer: int, number: int) -> None:
        """What a peer says of one of its NICs; a word that others have overtaken says nothing."""
        count, nic, share = read_rate_word(number)
        if nic < len(self._hub.book[peer]) and count > self._heard.get((peer, nic), 0):
            self._heard[peer, nic] = count
            if share:
                self._shares[peer, nic] = share
            (self._down.discard if share else self._down.add)((peer, nic))
            self.divide_anew()

    def divide_anew(self) -> None:
        """Divides what this rank has still to send by what is known now."""
        hub = self._hub
        if not self.is_on or (not self._down and all(share == 1 for share in self._shares.values())):
            for out in hub.outs.values():
                out.take_parts(None)
            return
        rates = [[self._rates(rank, nic) for nic in range(len(nics))] for rank, nics in enumerate(hub.book)]
        parts = divide(self.carried, {pair: hub.pairs(*pair) for pair in self.carried}, rates)
        for peer, out in hub.outs.items():
            alone = [min(rates[hub.rank][rail.mine][0], rates[peer][rail.theirs][1]) for rail in out.rails]
            if len(alone) > 1:
                out.take_parts([max(1, part) for part in parts.get((hub.rank, peer), alone)])

    def _rates(self, rank: int, nic: int) -> tuple[int, int]:
        """What a NIC sends and receives, in parts of what is declared; as good as nothing if it is down."""
        if (rank, nic) in self._down:
            return 1, 1
        *_, out, in_ = self._hub.book[rank][nic]
        return max(1, round(_RATE_UNIT * out * self.share(rank, nic))), _RATE_UNIT * in_
