"""`Topology`: servers, their GPUs and NICs, and what each NIC can carry each way.

A rank is a GPU; ranks are numbered through the servers in order. An endpoint is a server with its surviving NICs
pooled: what it can send and receive at once. The core between servers never blocks, unless they are grouped in pods
whose uplinks carry less than their servers together. Rates are exact (`Fraction`, bytes/s).

The text form fits in one argument:

    8@50GB/s                     eight endpoints, 50 GB/s out and in
    8@50GB/s,3=25GB/s,5=10GB/s   endpoints 3 and 5 degraded
    8@50GB/s,3=25GB/s:50GB/s     endpoint 3 sends at 25, receives at 50
    4x8@50GB/s,2=3/8             four servers of eight GPUs and eight NICs; server 2 keeps 3 of its 8 NICs
    16@50GB/s/4:2                pods of four servers; a pod's uplink carries half of what its four send and receive
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec

from optcc.errors import InputError, TopologyError
from optcc.show import Card, Shown
from optcc.units import parse_rate, parse_time, show_rate, show_time

RANKS_MAX = 65536
_HEAD = re.compile(r"([0-9]{1,6})(?:x([0-9]{1,4}))?@(.+?)(?:/([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?))?")
_SHARE = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Nic:
    """One NIC on one rail. `out` and `in_` are bytes/s; a failed NIC keeps its place and carries nothing."""

    rail: int
    out: Fraction
    in_: Fraction
    failed: bool = False

    def __post_init__(self) -> None:
        if self.rail < 0:
            raise TopologyError(f"rail {self.rail}: must not be negative")
        if self.out <= 0 or self.in_ <= 0:
            raise TopologyError(
                f"NIC on rail {self.rail}: rates {self.out} out, {self.in_} in: must be above zero (or failed)"
            )


@dataclass(frozen=True, slots=True)
class Server:
    """GPUs and NICs behind one intra-server fabric.

    `fabric` is what one GPU sends and receives inside the server, bytes/s; None: never the bottleneck.
    """

    name: str
    gpus: int
    nics: tuple[Nic, ...]
    fabric: Fraction | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise TopologyError(f"server {self.name}: {self.gpus} GPUs: must have at least one")
        if self.fabric is not None and self.fabric <= 0:
            raise TopologyError(f"server {self.name}: fabric rate {self.fabric}: must be above zero")

    @property
    def out(self) -> Fraction:
        """Bytes/s that the surviving NICs send together."""
        return sum((nic.out for nic in self.nics if not nic.failed), Fraction(0))

    @property
    def in_(self) -> Fraction:
        """Bytes/s that the surviving NICs receive together."""
        return sum((nic.in_ for nic in self.nics if not nic.failed), Fraction(0))


@dataclass(frozen=True, slots=True)
class Pod:
    """Servers, by number, behind one leaf switch: what they send to others goes up its uplink, what they receive from
    others comes down, `up` and `down` bytes/s at most. What they send each other does not use it.

    On a rail-only network a pod has a leaf switch, and an uplink of these rates, for every rail.
    """

    name: str
    servers: tuple[int, ...]
    up: Fraction
    down: Fraction

    def __post_init__(self) -> None:
        if not self.servers:
            raise TopologyError(f"pod {self.name}: must have at least one server")
        if self.up <= 0 or self.down <= 0:
            raise TopologyError(f"pod {self.name}: uplink {self.up} up, {self.down} down: must be above zero")


@dataclass(frozen=True, slots=True)
class Topology(Shown):
    """The cluster: servers on a core (or rail by rail), and the latency of a message in seconds.

    `overhead_s` is the processor time of a rank for each message that it sends or receives, LogGP's o. The port models
    know nothing of it; schedules and segments are chosen with it (`optcc.timing.with_overhead`).

    The core is not blocking but for the uplinks of `pods`; a server without a pod is on it directly.

    >>> t = Topology.parse("4x8@50GB/s,2=3/8")
    >>> t.n_ranks, len(t.servers), show_rate(t.servers[2].out)
    (32, 4, '150GB/s')

    Raises TopologyError from the constructor if a server is cut off or in two pods, or a name is used twice.
    """

    servers: tuple[Server, ...]
    latency_s: Fraction = Fraction(0)
    rail_only: bool = False
    pods: tuple[Pod, ...] = ()
    text: str = field(default="", compare=False)
    overhead_s: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if not self.servers:
            raise TopologyError("topology: must have at least one server")
        if self.n_ranks > RANKS_MAX:
            raise TopologyError(f"topology: {self.n_ranks} ranks: must be at most {RANKS_MAX}")
        names = [server.name for server in self.servers]
        for name in {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ():
            raise TopologyError(f"server {name}: the name is used twice")
        if self.latency_s < 0:
            raise TopologyError(f"latency {self.latency_s}: must not be negative")
        if self.overhead_s < 0:
            raise TopologyError(f"overhead {self.overhead_s}: must not be negative")
        if len(self.servers) > 1:
            for server in self.servers:
                if server.out == 0:
                    raise TopologyError(f"server {server.name}: no NIC is left, so it cannot reach any other server")
        if self.pods:
            self._check_pods()

    def _check_pods(self) -> None:
        seen: dict[int, str] = {}
        for number, pod in enumerate(self.pods):
            if pod.name in {other.name for other in self.pods[:number]}:
                raise TopologyError(f"pod {pod.name}: the name is used twice")
            for server in pod.servers:
                if not 0 <= server < len(self.servers):
                    raise TopologyError(f"pod {pod.name}: server {server}: must be below {len(self.servers)}")
                if server in seen:
                    raise TopologyError(f"pod {pod.name}: server {server} is in {seen[server]}: must be in one pod")
                seen[server] = pod.name

    @property
    def n_ranks(self) -> int:
        """GPUs of all servers."""
        return sum(server.gpus for server in self.servers)

    @property
    def rank_server(self) -> tuple[int, ...]:
        """For each rank, the index of its server."""
        return tuple(index for index, server in enumerate(self.servers) for _ in range(server.gpus))

    @property
    def is_flat(self) -> bool:
        """True if every server is one GPU: rank and endpoint are the same thing."""
        return all(server.gpus == 1 for server in self.servers)

    @property
    def out(self) -> tuple[Fraction, ...]:
        """Bytes/s that each endpoint sends at most."""
        return tuple(server.out for server in self.servers)

    @property
    def in_(self) -> tuple[Fraction, ...]:
        """Bytes/s that each endpoint receives at most."""
        return tuple(server.in_ for server in self.servers)

    @property
    def rails_kept(self) -> set[tuple[int, ...]]:
        """The rails that a server has NICs left on, each such set once: several if servers lost different ones."""
        return {tuple(sorted(nic.rail for nic in server.nics if not nic.failed)) for server in self.servers}

    @property
    def server_pod(self) -> tuple[int, ...]:
        """For each server, the index of its pod; -1: it is in none."""
        of = {server: index for index, pod in enumerate(self.pods) for server in pod.servers}
        return tuple(of.get(server, -1) for server in range(len(self.servers)))

    @property
    def pooled_pods(self) -> tuple[Pod, ...]:
        """The pods, and on a rail-only network all uplinks of a pod as one: of the rails that some server keeps."""
        rails = {nic.rail for server in self.servers for nic in server.nics if not nic.failed}
        count = len(rails) if self.rail_only else 1
        return tuple(replace(pod, up=count * pod.up, down=count * pod.down) for pod in self.pods)

    def with_latency(self, latency_s: Fraction) -> Topology:
        """The same cluster with another latency."""
        return replace(self, latency_s=latency_s)

    def healthy(self) -> Topology:
        """The cluster before anything failed: every endpoint at the best rate that any of them has each way.

        The NICs of a server become one, and so do the uplinks of a pod on a rail-only network.
        """
        out, in_ = max(self.out), max(self.in_)
        servers = tuple(
            replace(server, nics=(Nic(0, out, in_),)) if len(self.servers) > 1 else server for server in self.servers
        )
        return replace(self, servers=servers, pods=self.pooled_pods, text="")

    def scaled(self, factor: Fraction) -> Topology:
        """The rate of every NIC and uplink times `factor`: how bytes on a wire become payload once headers are paid."""
        servers = tuple(
            replace(server, nics=tuple(replace(nic, out=nic.out * factor, in_=nic.in_ * factor) for nic in server.nics))
            for server in self.servers
        )
        pods = tuple(replace(pod, up=pod.up * factor, down=pod.down * factor) for pod in self.pods)
        return replace(self, servers=servers, pods=pods)

    def under(self, shares: Sequence[Sequence[tuple[float, float]]]) -> Topology:
        """The cluster when the NICs carry these shares, out and in, of what it says; by server and NIC. A NIC without
        one of the two has failed.

        Where a server's NICs are not those of `shares`, such as one pooled NIC for all, the NICs in `shares` count as
        equal. Raises TopologyError if a server is cut off, or for another number of servers.

        >>> cluster = Topology.parse("2@100MB/s")
        >>> cluster.under([[(1.0, 1.0), (0.0, 0.0)], [(1.0, 0.5), (1.0, 1.0)]])
        Topology('2@50MB/s,1=100MB/s:75MB/s')
        """
        if len(shares) != len(self.servers):
            raise TopologyError(f"shares of {len(shares)} servers: must be of {len(self.servers)}")
        servers = tuple(
            replace(server, nics=tuple(starmap(_under, zip(server.nics, _fit(nics, len(server.nics)), strict=True))))
            for server, nics in zip(self.servers, shares, strict=True)
        )
        return replace(self, servers=servers, text="")

    def of_ranks(self, ranks: Sequence[int]) -> Topology:
        """The cluster as some of its ranks have it to themselves, counted from 0 in the order given.

        Servers keep their NICs and lose GPUs; pods are left out. Where the order is not that of the servers, each rank
        is a server of its own, with its part of the NICs' rates.

        >>> Topology.parse("2x2@1GB/s").of_ranks([0, 2, 3]).rank_server
        (0, 1, 1)
        >>> Topology.parse("2x2@1GB/s").of_ranks([2, 0, 3]).out
        (Fraction(1000000000, 1), Fraction(2000000000, 1), Fraction(1000000000, 1))

        Raises InputError for a rank that does not exist or is named twice.
        """
        if len(set(ranks)) < len(ranks) or not ranks or not 0 <= min(ranks) <= max(ranks) < self.n_ranks:
            raise InputError(f"ranks {list(ranks)}: must be different ones below {self.n_ranks}")
        at = [self.rank_server[rank] for rank in ranks]
        if at == sorted(at):
            kept = [replace(self.servers[server], gpus=at.count(server)) for server in dict.fromkeys(at)]
        else:
            kept = [
                replace(
                    self.servers[server],
                    name=f"{self.servers[server].name}-{number}",
                    gpus=1,
                    nics=tuple(
                        replace(nic, out=nic.out / at.count(server), in_=nic.in_ / at.count(server))
                        for nic in self.servers[server].nics
                    ),
                )
                for number, server in enumerate(at)
            ]
        return replace(self, servers=tuple(kept), pods=(), text="")

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from its text form, or from the TOML file of that name.

        Raises InputError for a text that is no topology, TopologyError for one that cannot be.
        """
        if text.endswith(".toml") or "@" not in text:
            return cls.from_toml(Path(text))
        return _parse_text(text)

    @classmethod
    def from_toml(cls, path: Path) -> Topology:
        """A topology from a TOML file; the schema is in docs/topology.md."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"topology {str(path)!r}: no such file, and not of the form 8@50GB/s") from None
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"topology {str(path)!r}: not TOML: {error}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"topology {str(path)!r}: cannot be read: {error}") from None
        try:
            file = msgspec.convert(document, _File)
        except msgspec.ValidationError as error:
            raise InputError(f"topology {str(path)!r}: {error}") from None
        return _from_file(file, str(path))

    def to_toml(self) -> str:
        """The text of a file for `from_toml`, which makes the same topology of it.

        >>> print(Topology.parse("2@50GB/s").to_toml())
        latency = "0ns"
        overhead = "0ns"
        rail_only = false
        <BLANKLINE>
        [[servers]]
        name = "h0"
        gpus = 1
        nics = [
          { rail = 0, out = "50GB/s", in = "50GB/s" },
        ]
        <BLANKLINE>
        [[servers]]
        name = "h1"
        gpus = 1
        nics = [
          { rail = 0, out = "50GB/s", in = "50GB/s" },
        ]
        <BLANKLINE>
        """
        times = (("latency", self.latency_s), ("overhead", self.overhead_s))
        lines = [f'{name} = "{float(seconds * 10**9):.15g}ns"' for name, seconds in times]
        lines += [f"rail_only = {str(self.rail_only).lower()}", ""]
        for pod in self.pods:
            lines += ["[[pods]]", f"name = {json.dumps(pod.name)}"]
            lines += [f'{way} = "{show_rate(rate)}"' for way, rate in (("up", pod.up), ("down", pod.down))]
            lines.append("")
        for server, pod_number in zip(self.servers, self.server_pod, strict=True):
            lines += ["[[servers]]", f"name = {json.dumps(server.name)}", f"gpus = {server.gpus}"]
            lines += [f'fabric = "{show_rate(server.fabric)}"'] if server.fabric is not None else []
            lines += [f"pod = {json.dumps(self.pods[pod_number].name)}"] if pod_number >= 0 else []
            lines.append("nics = [")
            for nic in server.nics:
                failed = ", failed = true" if nic.failed else ""
                rates = f'out = "{show_rate(nic.out)}", in = "{show_rate(nic.in_)}"'
                lines.append(f"  {{ rail = {nic.rail}, {rates}{failed} }},")
            lines += ["]", ""]
        return "\n".join(lines)

    def card(self) -> Card:
        rows = tuple(
            (
                server.name,
                str(server.gpus),
                f"{sum(not nic.failed for nic in server.nics)}/{len(server.nics)}",
                show_rate(server.out) if server.out else "-",
                show_rate(server.in_) if server.in_ else "-",
            )
            for server in self.servers
        )
        latency = f", latency {show_time(float(self.latency_s))}" if self.latency_s else ""
        per = "-" if not self.rail_only else "- a rail"
        rows += tuple((pod.name, per, "-", show_rate(pod.up), show_rate(pod.down)) for pod in self.pods)
        pods = f" in {len(self.pods)} pods" if self.pods else ""
        rails = ", rail-only" if self.rail_only else ""
        title = f"{len(self.servers)} servers{pods}, {self.n_ranks} ranks{rails}{latency}"
        return Card(title, ("server or pod" if self.pods else "server", "GPUs", "NICs", "out", "in"), rows)

    def __repr__(self) -> str:
        pods = f", {len(self.pods)} pods" if self.pods and not self.text else ""
        return f"Topology({self.text or endpoint_text(self.out, self.in_)!r}{pods})"


def endpoint_text(out: Sequence[Fraction], in_: Sequence[Fraction]) -> str:
    """The shortest text form for endpoints of these rates: the commonest pair is the base, the others are named.

    >>> endpoint_text([Fraction(50), Fraction(50), Fraction(25)], [Fraction(50)] * 3)
    '3@50B/s,2=25B/s:50B/s'
    """
    pairs = list(zip(out, in_, strict=True))
    base = max(pairs, key=pairs.count)
    others = [f",{index}={_show_pair(*pair)}" for index, pair in enumerate(pairs) if pair != base]
    return f"{len(pairs)}@{_show_pair(*base)}{''.join(others)}"


def _show_pair(out: Fraction, in_: Fraction) -> str:
    return show_rate(out) if out == in_ else f"{show_rate(out)}:{show_rate(in_)}"


def _parse_pair(text: str) -> tuple[Fraction, Fraction]:
    """`OUT` or `OUT:IN` in bytes/s."""
    out, colon, in_ = text.partition(":")
    rate = parse_rate(out)
    return rate, parse_rate(in_) if colon else rate


def _fit(shares: Sequence[tuple[float, float]], n_nics: int) -> list[tuple[float, float]]:
    """The shares of `n_nics` NICs: these, or their mean for each."""
    if len(shares) == n_nics:
        return list(shares)
    alive = [share if min(share) > 0 else (0.0, 0.0) for share in shares]
    return [(fmean(out for out, _ in alive), fmean(in_ for _, in_ in alive))] * n_nics


def _under(nic: Nic, share: tuple[float, float]) -> Nic:
    if min(share) <= 0:
        return replace(nic, failed=True)
    return replace(nic, out=nic.out * Fraction(share[0]), in_=nic.in_ * Fraction(share[1]))


def _parse_text(text: str) -> Topology:
    head, *overrides = text.split(",")
    match = _HEAD.fullmatch(head.strip())
    if match is None:
        raise InputError(f"topology {text!r}: must start like 8@50GB/s or 4x8@50GB/s")
    n_servers, per_server = int(match[1]), int(match[2] or 1)
    if n_servers < 1 or per_server < 1:
        raise InputError(f"topology {text!r}: must have at least one server and one GPU a server")
    if n_servers * per_server > RANKS_MAX:
        raise InputError(f"topology {text!r}: must have at most {RANKS_MAX} ranks")
    out, in_ = _parse_pair(match[3])
    nics = [tuple(Nic(rail, out, in_) for rail in range(per_server))] * n_servers
    seen: set[int] = set()
    for override in overrides:
        index_text, equals, value = override.partition("=")
        if not equals or not index_text.strip().isdecimal():
            raise InputError(f"topology {text!r}: {override!r}: must look like 3=25GB/s or 2=3/8")
        index = int(index_text)
        if index >= n_servers:
            raise InputError(f"topology {text!r}: server {index} does not exist: must be below {n_servers}")
        if index in seen:
            raise InputError(f"topology {text!r}: server {index} is named twice")
        seen.add(index)
        nics[index] = _override(text, nics[index], value.strip())
    servers = tuple(Server(f"h{index}", per_server, own) for index, own in enumerate(nics))
    return Topology(servers, pods=_pods(text, match, per_server * out, per_server * in_), text=text)


def _pods(text: str, match: re.Match[str], out: Fraction, in_: Fraction) -> tuple[Pod, ...]:
    """The pods that `/4:2` makes of servers which send `out` and receive `in_` bytes/s; none without it."""
    if match[4] is None:
        return ()
    n_servers, size, over = int(match[1]), int(match[4]), Fraction(match[5])
    if size < 1 or n_servers % size or size == n_servers:
        raise InputError(f"topology {text!r}: pods of {size}: must divide the {n_servers} servers into two or more")
    if over <= 0:
        raise InputError(f"topology {text!r}: oversubscribed {match[5]}: must be above zero")
    firsts = range(0, n_servers, size)
    members = (tuple(range(first, first + size)) for first in firsts)
    return tuple(Pod(f"pod{index}", own, size * out / over, size * in_ / over) for index, own in enumerate(members))


def _override(text: str, nics: tuple[Nic, ...], value: str) -> tuple[Nic, ...]:
    """The NICs of a server after `=3/8` (some are lost) or `=RATE` (all have another rate)."""
    share = _SHARE.fullmatch(value)
    if share is None:
        out, in_ = _parse_pair(value)
        return tuple(Nic(nic.rail, out, in_) for nic in nics)
    kept, total = int(share[1]), int(share[2])
    if total != len(nics) or kept > total:
        raise InputError(f"topology {text!r}: {value!r}: must be K/{len(nics)} with K at most {len(nics)}, its NICs")
    return tuple(replace(nic, failed=position >= kept) for position, nic in enumerate(nics))


class _FileNic(msgspec.Struct, forbid_unknown_fields=True, rename={"in_": "in"}):
    rail: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    rate: str | None = None
    out: str | None = None
    in_: str | None = None
    failed: bool = False


class _FileServer(msgspec.Struct, forbid_unknown_fields=True):
    nics: list[_FileNic]
    count: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)] = 1
    gpus: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    name: str | None = None
    fabric: str | None = None
    pod: str | None = None


class _FilePod(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    rate: str | None = None
    up: str | None = None
    down: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    servers: list[_FileServer]
    pods: list[_FilePod] = []
    latency: str = "0s"
    overhead: str = "0s"
    rail_only: bool = False


def _from_file(file: _File, path: str) -> Topology:
    servers: list[Server] = []
    members: dict[str, list[int]] = {pod.name: [] for pod in file.pods}
    for position, entry in enumerate(file.servers):
        where = f"topology {path!r}: servers[{position}]"
        if entry.count > 1 and entry.name is not None:
            raise InputError(f"{where}.name: {entry.name!r}: must be absent when count is above 1")
        if entry.pod is not None and entry.pod not in members:
            raise InputError(f"{where}.pod: {entry.pod!r}: must be the name of one of pods")
        try:
            nics = tuple(_file_nic(nic) for nic in entry.nics)
            fabric = parse_rate(entry.fabric) if entry.fabric is not None else None
            for _ in range(entry.count):
                if entry.pod is not None:
                    members[entry.pod].append(len(servers))
                servers.append(Server(entry.name or f"h{len(servers)}", entry.gpus, nics, fabric))
        except (InputError, TopologyError) as error:
            raise InputError(f"{where}: {error}") from None
    pods: list[Pod] = []
    for position, pod in enumerate(file.pods):
        try:
            up, down = _both_ways(f"pod {pod.name}", pod.rate, "up", pod.up, "down", pod.down)
            pods.append(Pod(pod.name, tuple(members[pod.name]), up, down))
        except (InputError, TopologyError) as error:
            raise InputError(f"topology {path!r}: pods[{position}]: {error}") from None
    latency_s = _file_time(path, "latency", file.latency)
    overhead_s = _file_time(path, "overhead", file.overhead)
    try:
        return Topology(tuple(servers), latency_s, file.rail_only, tuple(pods), path, overhead_s)
    except TopologyError as error:
        raise TopologyError(f"topology {path!r}: {error}") from None


def _file_time(path: str, name: str, text: str) -> Fraction:
    try:
        return parse_time(text)
    except InputError as error:
        raise InputError(f"topology {path!r}: {name}: {error}") from None


def _file_nic(nic: _FileNic) -> Nic:
    out, in_ = _both_ways(f"NIC on rail {nic.rail}", nic.rate, "out", nic.out, "in", nic.in_)
    return Nic(nic.rail, out, in_, nic.failed)


def _both_ways(
    what: str, rate: str | None, there: str, there_rate: str | None, back: str, back_rate: str | None
) -> tuple[Fraction, Fraction]:
    """The rates of something for which a file gives either `rate`, or one for each way."""
    if rate is not None and (there_rate is not None or back_rate is not None):
        raise InputError(f"{what}: give either rate, or {there} and {back}")
    if rate is None and (there_rate is None or back_rate is None):
        raise InputError(f"{what}: give rate, or both {there} and {back}")
    first, second = rate or there_rate, rate or back_rate
    assert first is not None and second is not None
    return parse_rate(first), parse_rate(second)
