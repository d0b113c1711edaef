"""Lower bounds on the time of a collective: exact closed forms, with proofs of the bound and of its tightness.

The model
---------
p endpoints on a non-blocking core; endpoint v sends at most out_v and receives at most in_v bytes/s at once, full
duplex. The message has n bytes. A schedule moves *elements*: a transfer carries, for each of its elements, one value
of the element's size that depends on inputs of that element only. Reduction, forwarding, splitting and any order are
allowed; the bounds also hold for linear mixtures of elements (docs/bounds.md). "Reached" refers to the fluid limit:
with k pipelined segments the time is (1 + O(1/k)) times the closed form.

AllReduce
---------
    T* = n * max( max_v 1/out_v, max_v 1/in_v, 2(p - 1)/sum_v out_v, 2(p - 1)/sum_v in_v )

*Lower bound.* (a) The others need v's contribution, and v needs the result: v sends and receives at least n bytes
(cuts; this holds in any model). (b) Each element needs 2(p - 1) transfers. Order the
transfers of one element by their completion, and stop at the first one after which some endpoint r knows all p
contributions. Until then each of the other p - 1 endpoints has sent at least once, or r would lack its contribution:
p - 1 transfers. Only r knows all of them, since a transfer informs only its receiver; so each of the others receives at
least once later: another p - 1 transfers. So all sends together, and all receives together, carry 2(p - 1) n bytes.

*Tight.* Reduce along an in-tree to r and broadcast along an out-tree from r, for any fixed r. The numbers of
children in the out-tree may be any integers d >= 0 that sum up to p - 1 with d_r >= 1 (such a tree exists for each of
them, and the vectors are the integer points of an integral simplex), so mixtures of out-trees make d any *real*
vector of that kind. Endpoint v sends [v != r] + d_v times the data, which is any vector s >= 1 with the sum 2(p - 1).
Likewise the in-tree makes the receives any such vector, independently of the sends, so that out and in may differ.
T >= T* is exactly the condition under which s_v = T out_v / n can be reduced to such a vector. The transfers of one
period form a bipartite multigraph between out ports and in ports, which has a timetable as long as the busiest port
(König's edge colouring), so a pipeline of the mixture runs at that rate.

Broadcast from r, Reduce to r, AllGather, ReduceScatter
-------------------------------------------------------
Let w_v be the share of the result that starts at v (Broadcast: w_r = 1; AllGather: w_v = 1/p).

    T = n * max( max_v (1 - w_v)/in_v, max_v w_v/out_v, (p - 1)/sum_v out_v )

*Lower bound*, even with coding: v must receive the 1 - w_v that it lacks and send the w_v that only it has; all
receives together are sum_v (1 - w_v) = p - 1, and each is sent by some endpoint, receivers of a broadcast included.
*Tight*: share w_r goes along out-trees from r. Their children are e_r + (p - 2) times a point of
the unit simplex, so together the sends are w + (p - 2) times a point of the simplex: any vector s >= w with the sum
p - 1. Every endpoint receives exactly 1 - w_v. Reduce and ReduceScatter are the same with all transfers reversed: swap
out and in.

Servers with a fabric of finite rate
------------------------------------
`collective_bound` also covers servers of g GPUs that exchange at most f bytes/s each way per GPU inside the server,
beside the pooled NICs (the model of `optcc.simulate`: traffic between servers uses the NICs, traffic inside uses the
fabric). For any set S of servers, take their GPUs as single parties and every other server as one: for N servers
these are p_S = N + sum_S (g - 1) parties. (b) holds for parties as for endpoints: 2(p_S - 1) transfers of each element
go from one party to another, each through a fabric port of a server in S or out of some server (into some server). So

    out and fabrics   2(p_S - 1) n / (sum_v out_v + sum_S g f), and with in for out
    around s          2 g n / (g f + out_s + in_s): the parties are the GPUs of s, and all other servers together
                      g n / (g f + in_s), with out for in: each GPU of s receives and sends n bytes
                      g n / (g f + sum_{v != s} out_v), with in for out: what enters s leaves another server
    without s         2(p_S - 1) n / (sum_{v != s} (out_v + in_v) + sum_S g f): what s sends enters another server

Only those S need be considered that take the servers with the largest 2(g - 1)/(g f) first: for a given time t the
demand sum_v out_v t + sum_s min(g f t, 2(g - 1)n) >= 2(N - 1)n + 2 sum_s (g - 1)n is hardest for
S = {s: g f t < 2(g - 1)n}. The other collectives have (b) with one p_S - 1; at the root's server of a Broadcast
(Reduce) g - 1 fabric ports count, those of the GPUs that receive (send).

*Tight* where `Bound.tight` is true: for Broadcast, Reduce, AllGather, ReduceScatter always; for AllReduce if out =
in at every server, or if no fabric binds (g f T >= 2(g - 1) n). The witness: inside a server the trees fall
into 1 + y pieces, each joined to the others through NICs; y = 0 where the fabric is fast enough, else as many as it
lacks, half of them for the in-tree and half for the out-tree. In other cases tightness is open; no counterexample is
known.

Pods with uplinks
-----------------
Traffic from a pod to servers outside uses its uplink one way, traffic to the pod the other way. For any set W of pods,
take each pod in W, and every server outside of W, as a party: the arguments for endpoints hold for parties,
independently of what happens inside them. With p_W = p - sum_W (servers of the pod - 1) parties,

    up and down of a pod  n / up, n / down: the others need its contributions, and it needs theirs
    out and up of W       2(p_W - 1) n / (sum of out_v outside of W + sum of up in W), and with in and down

For a given time t the demand is hardest for W = {pods: (sum of out_v in it - up) t > 2 (its servers - 1) n}, so that
only those W need be considered that take the pods with the least 2 (servers - 1)/(sum of out_v - up) first. For the
other collectives a pod has the share of its servers together, and (b) one p_W - 1. Tightness is open here, and
`Bound.tight` is false where an uplink carries less than its servers.

Latency
-------
If each message takes at least a seconds, every bound above becomes T + a: the last byte needed is sent by T - a.
If a port also has one message at a time, for a seconds or more, then any of these collectives (n > 0) takes
ceil(log2 p) a: the ranks that hold r's contribution at most double in each interval [ka, (k+1)a), since a message
that arrives in it left before ka from a rank that knew it then, and two arrivals from one port are a apart. A
schedule with a chain of D dependent transfers takes D a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from optcc.collective import PERSONALISED, Collective
from optcc.errors import InputError, TopologyError
from optcc.show import Card, Shown
from optcc.topology import Pod, Topology
from optcc.units import show_rate, show_size, show_time

POOLED = "pooled endpoints, non-blocking core"
FABRIC = "pooled endpoints and GPU fabrics, non-blocking core"
PODS = ", but for uplinks of pods"
"""Comes after one of them."""
TITLES = {
    "allreduce": "AllReduce",
    "reducescatter": "ReduceScatter",
    "allgather": "AllGather",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "alltoall": "AllToAll",
    "alltoallv": "AllToAll-v",
    "gather": "Gather",
    "scatter": "Scatter",
}
"""The names of collectives in text."""


@dataclass(frozen=True, slots=True)
class BoundTerm:
    """One term of a lower bound: `port` must carry `bytes` at `rate` bytes/s.

    `ports` are the ports whose rates add up to `rate`: `out NAME`, `in NAME` of a server, `fabric NAME` of its GPUs.
    """

    port: str
    bytes: Fraction
    rate: Fraction
    ports: tuple[str, ...] = ()

    @property
    def seconds(self) -> Fraction:
        """Bytes over rate."""
        return self.bytes / self.rate


@dataclass(frozen=True, slots=True)
class Bound(Shown):
    """A lower bound in exact seconds, with all terms whose maximum it is.

    `tight`: schedules approach it with growing numbers of segments.
    """

    model: str
    size_bytes: int
    terms: tuple[BoundTerm, ...]
    collective: str = "allreduce"
    tight: bool = True

    @property
    def seconds(self) -> Fraction:
        """The largest term; zero if nothing crosses the network."""
        return max((term.seconds for term in self.terms), default=Fraction(0))

    @property
    def binding_terms(self) -> tuple[BoundTerm, ...]:
        """The terms that attain the maximum."""
        seconds = self.seconds
        return tuple(term for term in self.terms if term.seconds == seconds)

    @property
    def binding(self) -> tuple[str, ...]:
        """The ports of the binding terms."""
        return tuple(term.port for term in self.binding_terms)

    def card(self) -> Card:
        seconds = self.seconds
        slowest_first = sorted(self.terms, key=lambda term: -term.seconds)
        rows = tuple(
            (
                term.port,
                f"{float(term.bytes):.6g}",
                show_rate(term.rate),
                show_time(float(term.seconds)),
                "binds" if term.seconds == seconds else "",
            )
            for term in slowest_first
        )
        name = TITLES.get(self.collective, self.collective)
        title = f"no {name} of {show_size(self.size_bytes)} is faster than {show_time(float(seconds))}"
        return Card(title, ("port", "bytes", "rate", "time", ""), rows)


def allreduce_bound(topology: Topology, size_bytes: int) -> Bound:
    """The bound of the theorem for AllReduce of `size_bytes`, servers as endpoints with their surviving NICs pooled.

    Every binding port is listed with the bytes it must carry. The bound holds for any latency and any fabrics.

    >>> str(allreduce_bound(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000).seconds)
    '4'

    Raises InputError for a negative size, TopologyError for servers that talk rail by rail and lost different rails.
    """
    return collective_bound(topology, size_bytes, fabric=False)


def collective_bound(
    topology: Topology,
    size_bytes: int,
    collective: str | Collective = "allreduce",
    root: int = 0,
    *,
    fabric: bool = True,
) -> Bound:
    """The bound for one of `optcc.collective.COLLECTIVES` or a declared one; `size_bytes` is the whole message.

    `root` is a rank, where there is only a name. The message of an AllToAll is that of all ranks together.

    For AllGather and ReduceScatter each rank owns size_bytes / ranks exactly; where that is no whole number of
    elements, real shares differ from it by less than one element. Fabrics of finite rate count unless `fabric` is
    false.

    >>> four = Topology.parse("4@50MB/s,3=25MB/s")
    >>> [str(collective_bound(four, 100_000_000, name).seconds) for name in ("allgather", "broadcast")]
    ['3', '4']
    >>> collective_bound(four, 100_000_000, "broadcast", root=3).binding
    ('out h3',)
    >>> collective_bound(four, 400_000_000, "alltoall").binding
    ('out h3', 'in h3')

    Raises InputError for a negative size or a collective or root that does not exist, TopologyError for servers that
    talk rail by rail and lost different rails.
    """
    if size_bytes < 0:
        raise InputError(f"size {size_bytes}: must not be negative")
    if isinstance(collective, str):
        collective = Collective(collective, topology.n_ranks, root)
    if topology.wired is None or not (collective.cells or collective.name in PERSONALISED):
        require_pooled(topology)
    if collective.cells or collective.name in PERSONALISED:
        return _exchange_bound(topology, size_bytes, collective)
    name = collective.name
    parties = _parties(topology, name, collective.root, fabric)
    model = FABRIC if any(each.fabric for each in parties) else POOLED
    if topology.pods:
        model += PODS
    if topology.n_ranks == 1 or size_bytes == 0:
        return Bound(model, size_bytes, (), name)
    pods = _slow_pods(topology, parties)
    terms = tuple(
        replace(term, bytes=term.bytes * size_bytes)
        for term in (
            *_nic_terms(parties, name),
            *_fabric_terms(parties, name),
            *_pod_terms(parties, pods, name),
        )
    )
    bound = Bound(model, size_bytes, terms, name)
    return replace(bound, tight=_is_tight(parties, bound) and not pods)


def _exchange_bound(topology: Topology, size_bytes: int, collective: Collective) -> Bound:
    """What each server must send and receive, and each pod; of fabrics, only that of a server which is alone."""
    pods = topology.pooled_pods
    limited = any(server.fabric is not None and server.gpus > 1 for server in topology.servers)
    alone = topology.servers[0] if len(topology.servers) == 1 else None
    model = (FABRIC if alone and limited else POOLED) + (PODS if topology.pods else "")
    if topology.n_ranks == 1 or size_bytes == 0:
        return Bound(model, size_bytes, (), collective.name)
    groups: Sequence[int] = topology.rank_server
    if alone is not None:
        # Its GPUs are endpoints.
        rate = alone.fabric if limited else None
        groups = range(topology.n_ranks)
        ends = [] if rate is None else [(f"fabric {alone.name} of rank {rank}", rate, rate) for rank in groups]
        sides = [(label, label, out, in_) for label, out, in_ in ends]
    else:
        sides = [(f"out {each.name}", f"in {each.name}", each.out, each.in_) for each in topology.servers]
    out, in_ = _crossing(collective, groups, len(set(groups)))
    loads: list[tuple[str, Fraction, Fraction, tuple[str, ...]]] = []
    for (to, from_, out_rate, in_rate), sent, received in zip(sides, out, in_, strict=bool(sides)):
        loads += [(to, sent, out_rate, (to,)), (from_, received, in_rate, (from_,))]
    if sides and alone is None:
        both = max(sum(out, Fraction(0)), sum(in_, Fraction(0)))  # every byte that is sent is received
        rates = (sum((each[2] for each in sides), Fraction(0)), sum((each[3] for each in sides), Fraction(0)))
        loads.append(("out of all endpoints together", both, rates[0], tuple(each[0] for each in sides)))
        loads.append(("in of all endpoints together", both, rates[1], tuple(each[1] for each in sides)))
    for pod in pods:
        inside = [int(server in pod.servers) for server in topology.rank_server]
        up, down = (shares[1] for shares in _crossing(collective, inside, 2))
        loads += [(f"up {pod.name}", up, pod.up, (f"up {pod.name}",))]
        loads += [(f"down {pod.name}", down, pod.down, (f"down {pod.name}",))]
    terms = tuple(BoundTerm(label, size_bytes * share, rate, ports) for label, share, rate, ports in loads if share)
    once = all(len(cell.after) <= 1 and all(len(ranks) == 1 for _, ranks in cell.after) for cell in collective.cells)
    return Bound(model, size_bytes, terms, collective.name, tight=once and not limited and not pods)


def _crossing(collective: Collective, group: Sequence[int], n_groups: int) -> tuple[list[Fraction], list[Fraction]]:
    """The shares of the message that each group of ranks must send and receive; `group[r]` is that of rank r."""
    p, here = collective.n_ranks, group[collective.root]
    sizes = [sum(each == number for each in group) for number in range(n_groups)]
    if collective.name == "alltoall":
        shares = [Fraction(size * (p - size), p * p) for size in sizes]
        return shares, shares
    if collective.name in PERSONALISED:
        others = [Fraction(0) if number == here else Fraction(size, p) for number, size in enumerate(sizes)]
        own = [1 - Fraction(sizes[here], p) if number == here else Fraction(0) for number in range(n_groups)]
        return (others, own) if collective.name == "gather" else (own, others)
    out, in_ = [Fraction(0)] * n_groups, [Fraction(0)] * n_groups
    for cell in collective.cells:
        senders: set[int] = set()
        receivers: set[int] = set()
        for rank, contributors in cell.after:
            remote = {group[each] for each in contributors} - {group[rank]}
            senders |= remote
            receivers |= {group[rank]} if remote else set()
        for number in senders:
            out[number] += cell.share
        for number in receivers:
            in_[number] += cell.share
    return out, in_


_Side = Callable[[Sequence["_Party"]], tuple[tuple[str, ...], Fraction]]


@dataclass(frozen=True, slots=True)
class _Party:
    """A server: `share` of the result starts (or ends) there; `fabric` is the sum of its counted fabric ports, 0: no
    limit."""

    name: str
    gpus: int
    out: Fraction
    in_: Fraction
    share: Fraction
    fabric: Fraction


def _parties(topology: Topology, collective: str, root: int, fabric: bool) -> list[_Party]:
    root_server, n_ranks = topology.rank_server[root], topology.n_ranks
    rooted = collective in ("broadcast", "reduce")
    parties = []
    for index, server in enumerate(topology.servers):
        share = Fraction(int(index == root_server)) if rooted else Fraction(server.gpus, n_ranks)
        # The root of a Broadcast receives nothing, and the root of a Reduce sends nothing, inside its server.
        n_ports = server.gpus - int(rooted and index == root_server)
        finite = fabric and server.fabric is not None and server.gpus > 1
        rate = n_ports * server.fabric if finite and server.fabric is not None else Fraction(0)
        parties.append(_Party(server.name, server.gpus, server.out, server.in_, share, rate))
    return parties


def _out(parties: Sequence[_Party]) -> tuple[tuple[str, ...], Fraction]:
    return tuple(f"out {each.name}" for each in parties), sum((each.out for each in parties), Fraction(0))


def _in(parties: Sequence[_Party]) -> tuple[tuple[str, ...], Fraction]:
    return tuple(f"in {each.name}" for each in parties), sum((each.in_ for each in parties), Fraction(0))


def _nic_terms(parties: Sequence[_Party], collective: str) -> Iterator[BoundTerm]:
    """Bytes as multiples of the message: what each server sends and receives, and all servers together."""
    n_servers = len(parties)
    if n_servers == 1:
        return
    rounds = _rounds(collective)
    for direction in ("out", "in"):
        for each in parties:
            amount = _least(each, collective, direction)
            if amount:
                rate = each.out if direction == "out" else each.in_
                yield BoundTerm(f"{direction} {each.name}", amount, rate, (f"{direction} {each.name}",))
    for direction, side in _sides(collective):
        ports, rate = side(parties)
        yield BoundTerm(f"{direction} of all endpoints together", Fraction(rounds * (n_servers - 1)), rate, ports)


def _rounds(collective: str) -> int:
    """The number of trees per element: in-tree and out-tree, or one of them."""
    return 2 if collective == "allreduce" else 1


def _sides(collective: str) -> list[tuple[str, _Side]]:
    """The sides on which all ports together can bind; on the other side each endpoint carries just its own minimum."""
    sides: dict[str, list[tuple[str, _Side]]] = {
        "allreduce": [("out", _out), ("in", _in)],
        "broadcast": [("out", _out)],
        "allgather": [("out", _out)],
        "reduce": [("in", _in)],
        "reducescatter": [("in", _in)],
    }
    return sides[collective]


def _least(party: _Party, collective: str, direction: str) -> Fraction:
    """The bytes that a server must send or receive."""
    if collective == "allreduce":
        return Fraction(1)
    spreads = collective in ("broadcast", "allgather")
    return party.share if spreads == (direction == "out") else 1 - party.share


def _fabric_terms(parties: Sequence[_Party], collective: str) -> Iterator[BoundTerm]:
    """The terms with fabrics; see the head of this file."""
    slow = [each for each in parties if each.fabric]
    rounds, n_servers = _rounds(collective), len(parties)
    # Chain of sets S: the server whose fabric takes longest for its g - 1 comes first.
    slow.sort(key=lambda each: Fraction(each.gpus - 1) / each.fabric, reverse=True)
    for direction, side in _sides(collective):
        nics = side(parties) if n_servers > 1 else ((), Fraction(0))
        label = f"{direction} of all endpoints" if n_servers > 1 else ""
        yield from _chain(slow, rounds, n_servers, label, nics)
    if n_servers == 1:
        return
    for each in slow:
        others = [other for other in parties if other is not each]
        fabric = (f"fabric {each.name}",)
        for direction, own, other in (("out", _out, _in), ("in", _in, _out)):
            amount = each.gpus - 1 + _least(each, collective, direction)
            if collective != "allreduce" and direction == _sides(collective)[0][0]:
                continue
            back = "in" if direction == "out" else "out"
            for label, (ports, rate) in (
                (f"{direction} {each.name}", own([each])),
                (f"{back} of all but {each.name}", other(others)),
            ):
                yield BoundTerm(f"fabric {each.name} and {label}", amount, each.fabric + rate, fabric + ports)
        if collective == "allreduce":
            (out, out_rate), (in_, in_rate) = _out([each]), _in([each])
            label = f"fabric {each.name}, out {each.name} and in {each.name}"
            rate = each.fabric + out_rate + in_rate
            yield BoundTerm(label, Fraction(2 * each.gpus), rate, fabric + out + in_)
    if collective == "allreduce" and slow:
        least = min(_out(parties)[1], _in(parties)[1])
        for each in parties:
            others = [other for other in parties if other is not each]
            (out, out_rate), (in_, in_rate) = _out(others), _in(others)
            if out_rate + in_rate < least:
                nics = (out + in_, out_rate + in_rate)
                yield from _chain(slow, rounds, n_servers, f"out and in of all but {each.name}", nics)


def _chain(
    slow: Sequence[_Party], rounds: int, n_servers: int, label: str, nics: tuple[tuple[str, ...], Fraction]
) -> Iterator[BoundTerm]:
    """The terms of the sets S that are prefixes of `slow`, with the NICs `nics`."""
    ports, rate = nics
    amount = Fraction(rounds * (n_servers - 1))
    names: list[str] = []
    for each in slow:
        names.append(each.name)
        ports, rate, amount = (f"fabric {each.name}", *ports), rate + each.fabric, amount + rounds * (each.gpus - 1)
        fabrics = "all fabrics" if len(names) == len(slow) > 3 else f"fabric {', '.join(names)}"
        if len(names) > 3 and len(names) < len(slow):
            fabrics = f"fabric {names[0]} and {len(names) - 1} more"
        yield BoundTerm(f"{fabrics} and {label}" if label else fabrics, amount, rate, ports)


def _slow_pods(topology: Topology, parties: Sequence[_Party]) -> list[tuple[Pod, list[_Party]]]:
    """The pods, with their servers, whose uplink has less rate one way than their NICs; not a pod of all servers."""
    found = []
    for pod in topology.pooled_pods:
        inside = [parties[server] for server in pod.servers]
        is_slow = pod.up < _out(inside)[1] or pod.down < _in(inside)[1]
        if is_slow and len(inside) < len(parties):
            found.append((pod, inside))
    return found


def _pod_terms(
    parties: Sequence[_Party], pods: Sequence[tuple[Pod, list[_Party]]], collective: str
) -> Iterator[BoundTerm]:
    """The terms with uplinks; see the head of this file."""
    rounds = _rounds(collective)
    for pod, inside in pods:
        share = sum((each.share for each in inside), Fraction(0))
        whole = _Party(pod.name, 0, pod.up, pod.down, share, Fraction(0))
        for way, direction, rate in (("up", "out", pod.up), ("down", "in", pod.down)):
            amount = _least(whole, collective, direction)
            if amount:
                yield BoundTerm(f"{way} {pod.name}", amount, rate, (f"{way} {pod.name}",))
    for direction, side in _sides(collective):
        way = "up" if direction == "out" else "down"
        spared = [(side(inside)[1] - (pod.up if way == "up" else pod.down), pod, inside) for pod, inside in pods]
        taken = sorted((each for each in spared if each[0] > 0), key=lambda each: (len(each[2]) - 1) / each[0])
        ports, rate = side(parties)
        amount, left = Fraction(rounds * (len(parties) - 1)), set(ports)
        for number, (less, pod, inside) in enumerate(taken, start=1):
            amount, rate = amount - rounds * (len(inside) - 1), rate - less
            left = left - set(side(inside)[0]) | {f"{way} {pod.name}"}
            if amount:
                names = ", ".join(each.name for _, each, _ in taken[:number]) if number <= 3 else f"{number} pods"
                label = f"{way} {names} and {direction} of all others" if len(left) > number else f"{way} {names}"
                yield BoundTerm(label, amount, rate, tuple(sorted(left)))


def _is_tight(parties: Sequence[_Party], bound: Bound) -> bool:
    if bound.collective != "allreduce" or all(each.out == each.in_ for each in parties):
        return True
    carried = bound.seconds / bound.size_bytes
    return all(not each.fabric or each.fabric * carried >= 2 * (each.gpus - 1) for each in parties)


@dataclass(frozen=True, slots=True)
class LatencyBound(Shown):
    """A bound that includes message latency.

    `rounds` is the number of sequential messages if a port has one at a time; 0 where ports may have many in flight,
    as in `optcc.simulate`.
    """

    fluid: Bound
    latency_s: Fraction
    rounds: int

    @property
    def seconds(self) -> Fraction:
        """max(fluid + latency, rounds * latency); zero if nothing crosses the network."""
        if not self.fluid.terms:
            return Fraction(0)
        return max(self.fluid.seconds + self.latency_s, self.rounds * self.latency_s)

    @property
    def binding(self) -> tuple[str, ...]:
        """`latency` where the rounds bind, else the ports of the fluid bound."""
        if self.fluid.terms and self.seconds > self.fluid.seconds + self.latency_s:
            return ("latency",)
        return self.fluid.binding

    def card(self) -> Card:
        rows = [
            ("bandwidth", show_time(float(self.fluid.seconds))),
            ("one message more", show_time(float(self.fluid.seconds + self.latency_s))),
        ]
        if self.rounds:
            rows.append((f"{self.rounds} messages in a row", show_time(float(self.rounds * self.latency_s))))
        name = TITLES.get(self.fluid.collective, self.fluid.collective)
        title = f"no {name} of {show_size(self.fluid.size_bytes)} is faster than {show_time(float(self.seconds))}"
        return Card(title, ("because of", "time"), tuple(rows))


def latency_bound(
    topology: Topology, size_bytes: int, collective: str = "allreduce", root: int = 0, *, exclusive: bool = True
) -> LatencyBound:
    """The bound with the topology's latency; `exclusive`: a rank sends one message at a time, and receives one.

    >>> eight = Topology.parse("8@50GB/s").with_latency(Fraction(5, 10**6))
    >>> latency_bound(eight, 1024).seconds == 3 * Fraction(5, 10**6)
    True

    Raises what `collective_bound` raises.
    """
    fluid = collective_bound(topology, size_bytes, collective, root)
    rounds = latency_rounds(topology.n_ranks) if exclusive else 0
    return LatencyBound(fluid, topology.latency_s, rounds)


def latency_rounds(n_ranks: int) -> int:
    """ceil(log2 n_ranks): the number of sequential messages until every rank depends on every other.

    >>> [latency_rounds(p) for p in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (n_ranks - 1).bit_length()


def require_pooled(topology: Topology) -> None:
    """Raises TopologyError where NICs cannot be pooled: they belong to GPUs, or the core is rail-only and servers lost
    different rails."""
    if topology.wired is not None:
        raise TopologyError(f"{topology!r}: messages take the links of GPUs: this bound needs NICs that are pooled")
    if not topology.rail_only:
        return
    rails = [
        sorted((nic.rail, nic.out, nic.in_) for nic in server.nics if not nic.failed) for server in topology.servers
    ]
    if any(each != rails[0] for each in rails):
        raise TopologyError(f"{topology!r}: servers differ rail by rail: this bound needs a core that joins the rails")
