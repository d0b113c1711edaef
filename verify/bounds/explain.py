"""Explanation of a bound: its binding terms, the gain from more bandwidth, and the times of known schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from optcc.show import Card, Shown
from optcc.topology import Nic, Server, Topology
from optcc.units import show_rate, show_size, show_time
from optcc.verify.bounds.closed_forms import (
    PODS,
    TITLES,
    Bound,
    BoundTerm,
    LatencyBound,
    collective_bound,
    latency_bound,
)
from optcc.verify.bounds.predictions import Prediction, predictions

MORE = Fraction(1, 10)
"""The relative increase of bandwidth of a `Gain`."""
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Gain:
    """The time saved by more bandwidth at one place, in exact seconds.

    `both_s`, `out_s`, `in_s`: with both directions, only out, only in increased by `MORE`. `price` is the derivative
    for both: the relative decrease of the bound per small relative increase of bandwidth (1 for a straggler that alone
    binds). `kind`: endpoint, fabric (always both ways), or nic: one NIC, where `where` names all equal ones of its
    server.
    """

    kind: str
    where: str
    out: Fraction
    in_: Fraction
    both_s: Fraction
    out_s: Fraction
    in_s: Fraction
    price: Fraction


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """A bound with its reasons, its gains (the largest first) and the schedules' predicted times."""

    bound: Bound
    latency: LatencyBound
    gains: tuple[Gain, ...]
    predictions: tuple[Prediction, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The bound in sentences: what binds, whether it is tight, what would help, what latency adds."""
        return tuple(_words(self))

    def card(self) -> Card:
        """Schedules against the bound, slowest first, then those whose formula does not apply."""
        known = [each for each in self.predictions if each.seconds is not None]
        known.sort(key=lambda each: each.seconds or 0, reverse=True)
        rows = [
            (each.schedule, show_time(float(each.seconds or 0)), _ratio(each.ratio(self.bound)), each.source)
            for each in known
        ]
        rows += [(each.schedule, "n/a", "", each.reason) for each in self.predictions if each.seconds is None]
        name = TITLES[self.bound.collective]
        title = f"{name} of {show_size(self.bound.size_bytes)}: {show_time(float(self.bound.seconds))} at best"
        return Card(title, ("schedule", "predicted", "/ bound", "source, or why not"), tuple(rows))

    def gain_card(self) -> GainCard:
        """The gains as a card of their own."""
        return GainCard(self.bound, self.gains)

    def as_json(self) -> dict[str, object]:
        """Plain values; fractions as "a/b"."""
        return {
            "words": list(self.words),
            "tight": self.bound.tight,
            "latency_seconds": float(self.latency.seconds),
            "gains": [
                {
                    "kind": each.kind,
                    "where": each.where,
                    "out": exact(each.out),
                    "in": exact(each.in_),
                    "saved_both": exact(each.both_s),
                    "saved_out": exact(each.out_s),
                    "saved_in": exact(each.in_s),
                    "price": exact(each.price),
                }
                for each in self.gains
            ],
            "schedules": [
                {
                    "name": each.schedule,
                    "source": each.source,
                    "seconds": None if each.seconds is None else float(each.seconds),
                    "seconds_exact": None if each.seconds is None else exact(each.seconds),
                    "ratio": None if (ratio := each.ratio(self.bound)) is None else float(ratio),
                    "reason": each.reason or None,
                }
                for each in self.predictions
            ],
        }


@dataclass(frozen=True, slots=True)
class GainCard(Shown):
    """Gains, for showing."""

    bound: Bound
    gains: tuple[Gain, ...]

    def card(self) -> Card:
        worth = [each for each in self.gains if each.both_s or each.out_s or each.in_s]
        rows = [
            (
                each.where,
                show_rate(each.out) if each.out == each.in_ else f"{show_rate(each.out)}:{show_rate(each.in_)}",
                *(_saved(seconds, self.bound.seconds) for seconds in (each.both_s, each.out_s, each.in_s)),
                f"{float(each.price):.3g}",
            )
            for each in worth
        ]
        if len(worth) < len(self.gains):
            rows.append(("anywhere else" if worth else "anywhere", "", "-", "-", "-", "0"))
        title = f"what {float(100 * MORE):g} % more bandwidth in one place would save"
        return Card(title, ("where", "rate", "both ways", "out only", "in only", "% per %"), tuple(rows))


def explain(
    topology: Topology, size_bytes: int, collective: str = "allreduce", root: int = 0, *, segments: int | None = None
) -> Explanation:
    """The full explanation of the bound; `segments` adds OptCC with that many.

    >>> told = explain(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000)
    >>> told.words[0]
    'h3 decides: 100000000B must leave it at 25MB/s, and as much must reach it, which takes 4.000 s.'
    >>> told.gains[0].where, str(told.gains[0].both_s), str(told.gains[0].price)
    ('h3', '4/11', '1')

    Raises what `collective_bound` raises.
    """
    bound = collective_bound(topology, size_bytes, collective, root)
    return Explanation(
        bound,
        latency_bound(topology, size_bytes, collective, root),
        gains(topology, bound, root),
        predictions(topology, size_bytes, collective, root, segments=segments),
    )


def gains(topology: Topology, bound: Bound, root: int = 0) -> tuple[Gain, ...]:
    """The gain at each endpoint, each fabric, and each kind of NIC where a server has several."""
    buyer = _Buyer(topology, bound, root)
    found = [gain for index in range(len(topology.servers)) for gain in buyer.at(index)] if bound.terms else []
    return tuple(sorted(found, key=lambda each: (-each.both_s, -each.price, each.kind != "endpoint")))


class _Buyer:
    """Recomputes the bound with more bandwidth where that can matter: at ports of every binding term."""

    def __init__(self, topology: Topology, bound: Bound, root: int) -> None:
        self.topology, self.bound, self.root = topology, bound, root
        self.seconds = bound.seconds
        self.terms = sorted(bound.terms, key=lambda term: term.seconds, reverse=True)
        self.members = [frozenset(term.ports) for term in self.terms]
        self.n_binding = len(bound.binding_terms)
        # The listed terms are complete, except where fabrics or uplinks choose among sets of servers.
        self.complete = not topology.pods and all(each.fabric is None or each.gpus == 1 for each in topology.servers)

    def at(self, index: int) -> Iterator[Gain]:
        server = self.topology.servers[index]
        if len(self.topology.servers) > 1:
            yield self._gain("endpoint", server.name, index, server.out, server.in_)
            alike: dict[tuple[Fraction, Fraction], list[int]] = {}
            for place, nic in enumerate(server.nics):
                if not nic.failed:
                    alike.setdefault((nic.out, nic.in_), []).append(place)
            if sum(map(len, alike.values())) > 1:
                for (out, in_), places in alike.items():
                    which = f"each of {len(places)} NICs" if len(alike) == 1 else f"NIC {_list([*map(str, places)])}"
                    yield self._gain("nic", f"{server.name}, {which}", index, out, in_)
        if server.fabric is not None and server.gpus > 1:
            yield self._fabric_gain(server, index, server.fabric)

    def _gain(self, kind: str, where: str, index: int, out: Fraction, in_: Fraction) -> Gain:
        name = self.topology.servers[index].name
        more_out, more_in = {f"out {name}": out}, {f"in {name}": in_}
        more_both = more_out | more_in
        both_s, out_s, in_s = (self._saved(index, more) for more in (more_both, more_out, more_in))
        return Gain(kind, where, out, in_, both_s, out_s, in_s, self._price(more_both))

    def _fabric_gain(self, server: Server, index: int, rate: Fraction) -> Gain:
        more = {f"fabric {server.name}": rate}
        saved = self._saved(index, more)
        # A term counts the GPUs' ports of a server as one port; some collectives count one GPU less.
        shares = [self._fabric_share(term, server, rate) for term in self.terms[: self.n_binding]]
        return Gain("fabric", f"{server.name} fabric", rate, rate, saved, Fraction(0), Fraction(0), min(shares))

    def _fabric_share(self, term: BoundTerm, server: Server, rate: Fraction) -> Fraction:
        if f"fabric {server.name}" not in term.ports:
            return Fraction(0)
        rooted = self.bound.collective in ("broadcast", "reduce")
        at_root = self.topology.servers[self.topology.rank_server[self.root]] is server
        return (server.gpus - (rooted and at_root)) * rate / term.rate

    def _price(self, more: Mapping[str, Fraction]) -> Fraction:
        """-dT/T per dr/r, of the binding term that falls slowest."""
        return min(
            sum((rate for port, rate in more.items() if port in self.members[number]), Fraction(0)) / term.rate
            for number, term in enumerate(self.terms[: self.n_binding])
        )

    def _saved(self, index: int, more: Mapping[str, Fraction]) -> Fraction:
        """The decrease of the bound in seconds if these ports get `MORE` of these rates in addition."""
        if any(self.members[number].isdisjoint(more) for number in range(self.n_binding)):
            return Fraction(0)
        if not self.complete:
            return self.seconds - self._asked_again(index, more)
        left = Fraction(0)
        for term, members in zip(self.terms, self.members, strict=True):
            if term.seconds <= left:
                break
            extra = sum((rate for port, rate in more.items() if port in members), Fraction(0))
            left = max(left, term.bytes / (term.rate + MORE * extra))
        return self.seconds - left

    def _asked_again(self, index: int, more: Mapping[str, Fraction]) -> Fraction:
        """The bound of the topology with more bandwidth."""
        server = self.topology.servers[index]
        out = more.get(f"out {server.name}", Fraction(0)) * MORE
        in_ = more.get(f"in {server.name}", Fraction(0)) * MORE
        fabric = more.get(f"fabric {server.name}", Fraction(0)) * MORE
        place = next((place for place, nic in enumerate(server.nics) if not nic.failed), None)
        nics = tuple(_wider(nic, out, in_) if at == place else nic for at, nic in enumerate(server.nics))
        changed = replace(server, nics=nics, fabric=server.fabric + fabric if server.fabric is not None else None)
        servers = (*self.topology.servers[:index], changed, *self.topology.servers[index + 1 :])
        topology = replace(self.topology, servers=servers, rail_only=False, pods=self.topology.pooled_pods)
        return collective_bound(topology, self.bound.size_bytes, self.bound.collective, self.root).seconds


def _wider(nic: Nic, out: Fraction, in_: Fraction) -> Nic:
    return replace(nic, out=nic.out + out, in_=nic.in_ + in_)


def _words(told: Explanation) -> Iterator[str]:
    bound = told.bound
    name = TITLES[bound.collective]
    if not bound.terms:
        yield f"{name} of {show_size(bound.size_bytes)} takes no time: nothing has to cross the network."
        return
    yield from _reasons(bound)
    if bound.tight:
        yield "A pipelined mixture of trees comes as close to it as one likes: no bound can be higher."
    else:
        why = "pods have slow uplinks" if PODS in bound.model else "out and in differ, and a fabric is in the way"
        yield f"It is not proved that a schedule reaches it: {why}."
    best = told.gains[0]
    if best.both_s:
        same = [each.where for each in told.gains if each.both_s == best.both_s and each.kind == best.kind]
        each = "at any one of " if len(same) > 1 else "at "
        saved = _saved(best.both_s, bound.seconds)
        yield f"{float(100 * MORE):g} % more bandwidth {each}{_list(same)} would save {saved}."
    else:
        yield "More bandwidth in one place alone would save nothing: several bind at once."
    if told.latency.latency_s:
        latency = show_time(float(told.latency.latency_s))
        total = show_time(float(told.latency.seconds))
        if told.latency.binding == ("latency",):
            yield f"With {latency} a message, {told.latency.rounds} of them in a row take longer than that: {total}."
        else:
            yield f"With {latency} a message it is {total}."


def _reasons(bound: Bound) -> Iterator[str]:
    """One sentence for each endpoint or set that binds."""
    seconds = show_time(float(bound.seconds))
    terms = {term.ports: term for term in bound.binding_terms}
    for ports, term in list(terms.items()):
        amount, rate = _amount(term.bytes), show_rate(term.rate)
        if len(ports) == 1 and ports[0].startswith(("out ", "in ")):
            way, _, who = ports[0].partition(" ")
            back = terms.get((f"in {who}",)) if way == "out" else terms.get((f"out {who}",))
            if back is not None and (back.bytes, back.rate) == (term.bytes, term.rate):
                if way == "out":
                    yield (
                        f"{who} decides: {amount} must leave it at {rate}, and as much must reach it, "
                        f"which takes {seconds}."
                    )
                continue
            verb = "leave" if way == "out" else "reach"
            yield f"{who} decides: {amount} must {verb} it at {rate}, which takes {seconds}."
        elif all(port.startswith(("out ", "in ")) for port in ports) and "together" in term.port:
            way = "out" if ports[0].startswith("out ") else "in"
            other = "in" if way == "out" else "out"
            back = terms.get(tuple(f"{other} {port.partition(' ')[2]}" for port in ports))
            if back is not None and (back.bytes, back.rate) == (term.bytes, term.rate):
                if way == "out":
                    yield (
                        f"All endpoints together decide: {amount} must cross the network, and they send and receive "
                        f"{rate} in all, which takes {seconds}."
                    )
                continue
            verb = "send" if way == "out" else "receive"
            yield (
                f"All endpoints together decide: {amount} must cross the network, and they {verb} {rate} in all, "
                f"which takes {seconds}."
            )
        else:
            yield f"{term.port} decide together: {amount} must pass them at {rate} in all, which takes {seconds}."


def _amount(amount: Fraction) -> str:
    return show_size(int(amount)) if amount.denominator == 1 else f"{float(amount):.6g}B"


def _saved(seconds: Fraction, of: Fraction) -> str:
    return f"{show_time(float(seconds))} ({float(100 * seconds / of):.3g} %)" if seconds else "-"


def _ratio(ratio: Fraction | None) -> str:
    return "" if ratio is None else f"{float(ratio):.4f}"


def _list(names: list[str]) -> str:
    shown = names if len(names) <= _NAMED_MAX else [*names[: _NAMED_MAX - 1], f"{len(names) - _NAMED_MAX + 1} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def exact(number: Fraction) -> str:
    """A fraction as "a/b", also where b is 1.

    >>> exact(Fraction(4))
    '4/1'
    """
    return f"{number.numerator}/{number.denominator}"
