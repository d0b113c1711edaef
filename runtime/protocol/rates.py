"""The measured rates of NICs: what this rank's send, what peers say of theirs, and how data is divided by them. No I/O.

Each rank judges its own NICs (`nic_meter`) and tells its peers, which tell theirs: every rank knows of all. A rank that
learns of a slower NIC divides anew what it has still to send; this needs no agreement, since the sender says over which
rail a chunk goes. A NIC that is down is told in the same way, so that peers route around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optcc.runtime.protocol.agreement import Shares, is_change
from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.faster_trials import FasterTrials
from optcc.runtime.protocol.flows import FlowMarks, Rail
from optcc.runtime.protocol.frames import RATE_FRAME, RATE_NICS_MAX, RATE_RANKS_MAX, RateWord
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.nic_meter import CHANGE, LOADED_BYTES, LOOKS_MIN, WINDOW_S, Carried, NicMeter, weigh
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.rail import Rail as OutboundRail
from optcc.runtime.protocol.trials import Trials
from optcc.runtime.striping import divide, least_of_hosts

LEAST_SHARE = 1 / 12
"""A NIC that carries a smaller share of its rate than the best one of its host by this factor carries nothing: a chunk
that it had would hold up more than it saves."""
DOUBTED_SHARE = 1 / 64
_AS_FAST = 0.85
_FAST, _FASTER, _FASTER_BYTES, _FASTER_S = 0.75, 1.3, 1 << 17, 0.05
_AT_ONCE_S, _TICK_S = 0.01, 1e-3
"""A NIC that was idle lets through at once what it carries in so long: in a window, once."""
_WAITED_S = 0.5
_RATE_UNIT = 1 << 12


def usable(nics: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The shares of the NICs of a host, without those that are worth nothing.

    >>> usable([(1.0, 0.9), (0.02, 1.0), (0.5, 0.4)])
    ((1.0, 0.9), (0.0, 0.0), (0.5, 0.4))
    """
    least = LEAST_SHARE * max(map(min, nics))
    return tuple(share if min(share) >= least else (0.0, 0.0) for share in nics)


@dataclass(slots=True)
class _Faster:
    """What went to a NIC that is known to be slow: the share that it showed `before`, if that was faster, and what went
    since then, for how long the receiver had room."""

    before: float = 0.0
    n_bytes: int = 0
    open_s: float = 0.0


class Rates:
    """The rates of all NICs as far as this rank knows them, as shares of what is declared.

    `version` grows with every change of `known`; `down` has the ranks and NICs that carry nothing. `carried` is what
    the plan that was opened last has each pair carry, bytes.
    """

    def __init__(self, local: LocalRank, outbounds: Mapping[int, Outbound]) -> None:
        self._local, self._outbounds = local, outbounds
        self.is_on = local.settings.learn_rates and len(local.own_nics) > 1
        # What a rank gets of a NIC that others of its host use too says little of the NIC.
        self._is_alone = len(local.mates[local.rank]) == 1
        self.carried: dict[tuple[int, int], int] = {}
        self._meters = [NicMeter() for _ in local.own_nics]
        self._unsure = [False] * len(self._meters)
        self._was_measured = [False] * len(self._meters)
        # The NICs of this rank that carried next to nothing, beside another one, when they were measured.
        self.worthless: set[int] = set()
        self.version = 0
        # What was measured, and the last word, of NICs that are, or were, other than declared.
        self._shares: dict[tuple[int, int], tuple[float, float]] = {}
        self.down: set[tuple[int, int]] = set()
        self._words: dict[tuple[int, int], RateWord] = {}
        # The share that rails from this rank carry of what the NICs at both ends do, where it is less.
        self._paths: dict[Rail, float] = {}
        # When something last waited on each rail; how often its receiver was faster than known, and how much.
        self._waited_s: dict[Rail, float] = {}
        self._faster: dict[Rail, _Faster] = {}
        self.trials = Trials(local, self, self.connections)
        self.faster_trials = FasterTrials(local, self._slow_nics, self._note_whole)
        # None where NICs are shared.
        self.marks = FlowMarks() if self.is_on and self._is_alone else None
        self._began_s = 0.0

    def forget(self) -> None:
        """The declared rates are others: what was measured in parts of the old ones counts no more."""
        self._meters = [NicMeter() for _ in self._local.own_nics]
        self._unsure = [False] * len(self._meters)
        self._shares.clear()
        self._paths.clear()
        self.worthless.clear()
        for nic in range(len(self._meters)):
            self.trials.drop(nic)
        for count in self._local.rail_counts:
            count.out_share = count.in_share = 1.0
        for rank, nic in list(self._words):
            if rank == self._local.rank:
                self._publish(nic)
        self.version += 1
        self.divide_anew()

    def _is_agreed(self) -> bool:
        """True if the NICs carry what plans are for, or more: plans are for that soon, if it is true."""
        agreed = self._local.agreed
        if not agreed or self._paths:
            return False
        carried = [usable([self.shared(rank, nic) for nic in range(len(nics))]) for rank, nics in enumerate(agreed)]
        pairs = (
            pair
            for is_of, was_of in zip(carried, agreed, strict=True)
            for shares in zip(is_of, was_of, strict=True)
            for pair in zip(*shares, strict=True)
        )
        return not any(is_change(is_, was) and (is_ < was or not was) for is_, was in pairs)

    def known(self, rank: int, nic: int) -> tuple[float, float]:
        """The shares of the rates in `local.book` that a NIC sends and receives, as far as known; 0.0 if it is down."""
        return (0.0, 0.0) if (rank, nic) in self.down else self._shares.get((rank, nic), (1.0, 1.0))

    def shared(self, rank: int, nic: int) -> tuple[float, float]:
        """`known` of a NIC that the ranks of a host share: the least that one of them says, as each finds out by itself
        what befalls it."""
        outs, ins = zip(*(self.known(mate, nic) for mate in self._local.mates[rank]), strict=True)
        return min(outs), min(ins)

    def _own(self, nic: int) -> tuple[float, float]:
        """The shares that were measured of a NIC of this rank, whether it is down or not."""
        return self._shares.get((self._local.rank, nic), (1.0, 1.0))

    def look(self, now_s: float) -> None:
        """Samples whether each NIC is backlogged, and judges the NICs at the end of a window, unless shared."""
        if not self._is_alone:
            return
        n_nics = len(self._meters)
        loaded, busy = [False] * n_nics, [False] * n_nics
        for out in self._between_hosts():
            for rail in out.direct:
                connection = rail.connection
                if connection is not None and connection.awaits:
                    self._unsure[rail.mine] |= connection.suspect
                    if connection.waiting_bytes >= LOADED_BYTES:
                        busy[rail.mine] = True
                        if not (self.trials.is_padded(connection) or self.faster_trials.is_tried(rail.mine)):
                            self._waited_s[rail.mine, out.peer, rail.theirs] = now_s
                        loaded[rail.mine] |= not self._is_slower(out.peer, rail)
        for meter, is_loaded in zip(self._meters, loaded, strict=True):
            meter.look(is_loaded, is_loaded and not all(busy))
        self.trials.look(now_s)
        self.faster_trials.look(now_s)
        if now_s - self._began_s >= WINDOW_S and (not any(busy) or self._meters[0].n_looks >= LOOKS_MIN):
            self._close(now_s - self._began_s)
            self._began_s = now_s

    def _between_hosts(self) -> list[Outbound]:
        """The directions that go over NICs."""
        local = self._local
        return [out for out in self._outbounds.values() if not local.is_inside(local.rank, out.peer)]

    def _is_slower(self, peer: int, rail: OutboundRail) -> bool:
        """True if the destination NIC is known to be slower than the source NIC: then the traffic says nothing of the
        latter."""
        local = self._local
        out = local.own_nics[rail.mine][3] * self.known(local.rank, rail.mine)[0]
        return local.book[peer][rail.theirs][4] * self.known(peer, rail.theirs)[1] < _AS_FAST * out

    def _close(self, took_s: float) -> None:
        """Ends a window, which says nothing of a NIC one of whose connections was suspected."""
        carried = [Carried() for _ in self._meters]
        for out in self._between_hosts():
            for rail in out.direct:
                if rail.connection is not None:
                    n_bytes, busy_s, open_s = rail.connection.take_carried()
                    if not (n_bytes or busy_s or open_s):
                        continue
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
                    else:
                        self._note_faster((rail.mine, out.peer, rail.theirs), n_bytes, open_s)
                    carried[rail.mine] = after
        for nic, (meter, each) in enumerate(zip(self._meters, carried, strict=True)):
            if self._unsure[nic]:
                meter.drop()
            else:
                meter.close(each, took_s)
        self._unsure = [False] * len(self._meters)
        self._judge()

    def _judge(self) -> None:
        """Takes note of the rates of this rank's NICs if they have changed."""
        local = self._local
        before: list[float] = []
        for nic in range(len(self._meters)):
            paths = [share for rail, share in self._paths.items() if rail[0] == nic]
            before.append(self._own(nic)[0] * min(paths, default=1.0))
        outs = weigh(self._meters, [nic[3] for nic in local.own_nics], before, self._was_measured)
        for nic, (out, known) in enumerate(zip(outs, before, strict=True)):
            if out != known:
                self._note_out(nic, out)

    def _note_out(self, nic: int, share: float) -> None:
        """A NIC of this rank sends such a share of its declared rate.

        Slow to one peer alone it may be the peer's NIC, or the path; until that is found out it is this one.
        """
        local = self._local
        out, in_ = self._own(nic)
        paths = {rail: path for rail, path in self._paths.items() if rail[0] == nic}
        if paths and share > out * min(paths.values()):
            for rail in paths:
                self._set_path(rail, min(1.0, share / out))
            self.divide_anew()
            return
        if self._was_measured[nic] and share > out:
            # Its traffic shows too much: see `faster_trials`.
            return
        for rail in paths:
            self._set_path(rail, 1.0)
        self.know(nic, share, in_)
        self.trials.drop(nic)
        waited = [
            rail
            for rail, at_s in self._waited_s.items()
            if rail[0] == nic and local.now_s - at_s <= _WAITED_S and local.up_to(rail[1])
        ]
        if share < out and len(waited) == 1 and len(local.book) > 2:
            self.trials.suspect(waited[0], share, out)

    def _slow_nics(self) -> dict[int, tuple[float, float]]:
        """This rank's NICs that are used, and were measured to be slow."""
        used = usable([self.known(self._local.rank, nic) for nic in range(len(self._meters))])
        return {nic: share for nic, share in enumerate(used) if self._was_measured[nic] and 0 < min(share) < 1}

    def _note_whole(self, nic: int, is_out: bool) -> None:
        """A NIC of this rank that was measured carries more again, out or in, and the other way if it was slow both
        ways: all, as far as known."""
        out, in_ = self._own(nic)
        self._meters[nic] = NicMeter()
        self.know(nic, *((1.0, 1.0) if not is_change(out, in_) else (1.0, in_) if is_out else (out, 1.0)))

    def _set_path(self, rail: Rail, share: float) -> None:
        """A rail carries such a share of what its NICs do."""
        if share < 1:
            self._paths[rail] = share
        else:
            self._paths.pop(rail, None)

    def clear_out(self, rail: Rail, out: float, path: float) -> None:
        """What was laid to this rank's NIC is the receiver's doing, or the path's, which carries such a share."""
        nic = rail[0]
        self._meters[nic] = NicMeter()
        self._set_path(rail, path)
        self.know(nic, out, self._own(nic)[1])

    def connections(self) -> dict[Rail, SendConnection]:
        """The connections that are up from this rank."""
        return {
            (rail.mine, out.peer, rail.theirs): rail.connection
            for out in self._between_hosts()
            for rail in out.direct
            if rail.connection is not None
        }

    def path(self, rail: Rail) -> float:
        """The share that a rail from this rank carries of what the NICs at both ends do."""
        return self._paths.get(rail, 1.0)

    def know_in(self, nic: int, share: float) -> None:
        """A NIC of this rank takes in such a share of its declared rate, as its senders have found."""
        out, in_ = self._own(nic)
        share = share if share < _FAST else 1.0
        if self._was_measured[nic] and in_ / CHANGE < share < in_ * CHANGE:
            # What senders find is less certain.
            return
        if share != in_:
            self.know(nic, out, share)

    def _note_faster(self, rail: Rail, n_bytes: int, open_s: float) -> None:
        """What went to a NIC that is known to be slow: twice in a row that is faster clears it.

        Where NICs were measured, what an idle one lets through at once does not count, nor do times of a few ticks of
        the kernel's clock: what was measured is known too well to be doubted for that.
        """
        _, peer, theirs = rail
        known, own_nics = self.known(peer, theirs)[1], self._local.own_nics
        best = 1.0
        if not any(self._was_measured):
            best = max((meter.at_least or 0.0) / own[3] for meter, own in zip(self._meters, own_nics, strict=True))
        if not 0 < known < 1 or not best:
            self._faster.pop(rail, None)
            return
        faster = self._faster.setdefault(rail, _Faster())
        at_once_s, least_s = (_AT_ONCE_S, _FASTER_S) if any(self._was_measured) else (0.0, _TICK_S)
        faster.n_bytes += n_bytes - round(at_once_s * self._local.book[peer][theirs][4])
        faster.open_s += open_s
        if faster.n_bytes < _FASTER_BYTES or faster.open_s < least_s:
            return
        share = faster.n_bytes / faster.open_s / (best * self._local.book[peer][theirs][4])
        if share >= _FASTER * known and faster.before:
            self.trials.healed(rail, min(1.0, share, faster.before))
        self._faster[rail] = _Faster(share if share >= _FASTER * known and not faster.before else 0.0)

    def know(self, nic: int, out: float, in_: float) -> None:
        """A NIC of this rank sends and receives these shares of its declared rates: tells the peers, divides anew."""
        count = self._local.rail_counts[nic]
        self._shares[self._local.rank, nic] = count.out_share, count.in_share = out, in_
        self._publish(nic)

    def take_measured(self, shares: Sequence[tuple[float, float]]) -> None:
        """This rank's NICs were measured, with nothing else under way: what the traffic has said before is over.

        A NIC that carried nothing keeps its rate for when it does again.
        """
        self._meters = [NicMeter() for _ in self._meters]
        self._paths.clear()
        used = usable(shares)
        for nic, share in enumerate(shares):
            self.trials.drop(nic)
            if min(share) > 0:
                self._was_measured[nic] = True
                (self.worthless.discard if min(used[nic]) > 0 else self.worthless.add)(nic)
                if share != self._own(nic):
                    self.know(nic, *share)
        self.version += 1
        self.divide_anew()

    def start_from(self, shares: Shares) -> None:
        """NICs that carry nothing from the start: until one has been measured, next to nothing goes there."""
        for rank, nics in enumerate(shares):
            for nic, share in enumerate(nics):
                if min(share) <= 0:
                    self._shares[rank, nic] = DOUBTED_SHARE, DOUBTED_SHARE
                    self._take_down((rank, nic), True)
                    if rank == self._local.rank:
                        self._publish(nic)

    def doubt(self, nic: int) -> None:
        """A NIC of this rank that was silent is heard again: until it has been measured, next to nothing goes there."""
        self.worthless.discard(nic)
        self._meters[nic] = NicMeter()
        self._shares[self._local.rank, nic] = DOUBTED_SHARE, DOUBTED_SHARE

    def note_nic(self, nic: int, is_up: bool) -> None:
        """The kernel says that a NIC of this rank has gone down, or is back."""
        self._take_down((self._local.rank, nic), not is_up)
        self._publish(nic)

    def _take_down(self, which: tuple[int, int], is_down: bool) -> None:
        """A NIC carries nothing, or something again: its connections are looked at soon."""
        if is_down != (which in self.down):
            (self.down.add if is_down else self.down.discard)(which)
            self._local.look_within(0.0)

    def _publish(self, nic: int) -> None:
        """Tells the peers what is known of a NIC of this rank."""
        own = self._local.rank, nic
        if nic < RATE_NICS_MAX and own[0] < RATE_RANKS_MAX:
            before = self._words.get(own)
            self._words[own] = RateWord(before.turn + 1 if before else 1, *own, *self.known(*own))
            self._say(own)
        self.version += 1
        self.divide_anew()

    def _say(self, which: tuple[int, int], but: int = -1) -> None:
        """Tells all peers but one the last word on a NIC."""
        self._local.say_to_all(RATE_FRAME, [self._words[which].number], but)

    def tell(self, peer: int) -> None:
        """Tells a peer the rates of all NICs that are, or were, below what is declared."""
        self._local.say(peer, RATE_FRAME, *(word.number for word in self._words.values()))

    def hear(self, peer: int, number: int) -> None:
        """What a peer says of a NIC, its own or another's, unless that is known; the others are told."""
        word = RateWord.read(number)
        which, book = (word.rank, word.nic), self._local.book
        if word.rank == self._local.rank or word.rank >= len(book) or word.nic >= len(book[word.rank]):
            return
        before = self._words.get(which)
        if before is not None and not word.is_after(before.turn):
            return
        self._words[which] = word
        is_up = bool(word.out and word.in_)
        if is_up:
            self._shares[which] = word.out, word.in_
        self._take_down(which, not is_up)
        self._say(which, but=peer)
        if word.in_ != (1.0 if before is None else before.in_):
            # It explains what paths seemed to.
            for rail in [each for each in self._paths if each[1:] == which]:
                self._set_path(rail, 1.0)
        self.version += 1
        self.divide_anew()

    def divide_anew(self) -> None:
        """Divides what this rank has still to send by the rates that are known now."""
        local, outs = self._local, self._between_hosts()
        is_declared = not self.down and all(shares == (1, 1) for shares in self._shares.values())
        if not self.is_on or (is_declared and not self._paths):
            for out in outs:
                out.take_parts(None)
            return
        is_agreed = self._is_agreed()
        rates = least_of_hosts([self._rates(rank) for rank in range(len(local.book))], local.hosts)
        paths: dict[tuple[int, int, int, int], float] = {}
        for (mine, peer, theirs), share in self._paths.items():
            paths[local.rank, peer, mine, theirs] = share * min(rates[local.rank][mine][0], rates[peer][theirs][1])
        joined = {pair: local.pairs(*pair) for pair in self.carried if not local.is_inside(*pair)}
        parts = divide(self.carried, joined, rates, paths, local.hosts)
        for out in outs:
            alone = [
                min(rates[local.rank][rail.mine][0], rates[out.peer][rail.theirs][1])
                * self.path((rail.mine, out.peer, rail.theirs))
                for rail in out.direct
            ]
            if len(alone) > 1:
                out.take_parts([max(1, part) for part in parts.get((local.rank, out.peer), alone)], is_agreed=is_agreed)

    def _rates(self, rank: int) -> list[tuple[int, int]]:
        """What the NICs of a rank send and receive, in parts of what is declared; next to nothing if one is down."""
        declared = self._local.book[rank]
        shares = usable([self.known(rank, nic) for nic in range(len(declared))])
        return [
            (max(1, round(_RATE_UNIT * nic[3] * out)), max(1, round(_RATE_UNIT * nic[4] * in_)))
            for nic, (out, in_) in zip(declared, shares, strict=True)
        ]
