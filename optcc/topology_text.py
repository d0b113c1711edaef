"""The text form of a `Topology`, and its TOML files."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from optcc.collective import RANKS_MAX
from optcc.errors import InputError, TopologyError, did_you_mean
from optcc.graph import MI250_GPUS, Graph, GraphLink, mi250, torus
from optcc.servers import Nic, Pod, Server, enclose
from optcc.units import parse_rate, parse_time

_HEAD = re.compile(
    r"([0-9]{1,6})(?:x([0-9]{1,4}))?@([^+]+?)(?:\+(.+?))?(/rails)?(?:/([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?))?"
)
_SHARE = re.compile(r"(?:([0-9]{1,4})|([0-9]{1,4})\.\.([0-9]{1,4}))/([0-9]{1,4})")
SERVERS = {"dgx-a100": "8@25GB/s+300GB/s", "dgx-h100": "8@50GB/s+450GB/s"}
"""Servers by name: GPUs, the rate of each one's NIC, and what each exchanges inside."""
_NAMED = re.compile(rf"([0-9]{{1,6}})x({'|'.join(SERVERS)})(?![a-z0-9-])")
_MI250 = re.compile(r"([0-9]{1,4})xmi250")
_FORMS = (
    "of a form like 8@50GB/s, 4x8@50GB/s, 4x8@50GB/s+450GB/s, torus:4x4@50GB/s, or 4x and one of "
    f"{', '.join([*SERVERS, 'mi250'])}"
)
_LIKE_NAMED = re.compile(r"[0-9]{1,6}x([a-z][a-z0-9-]*)", re.IGNORECASE)
_TORUS = re.compile(r"torus:([0-9]{1,4}(?:x[0-9]{1,4}){0,3})@(.+)")


class Parts(NamedTuple):
    """What a `Topology` is made of; `graph` where there is more than servers with NICs can say."""

    servers: tuple[Server, ...]
    latency_s: Fraction = Fraction(0)
    rail_only: bool = False
    pods: tuple[Pod, ...] = ()
    text: str = ""
    overhead_s: Fraction = Fraction(0)
    graph: Graph | None = None


def is_text(name: str) -> bool:
    """True for a text form, false for the name of a file."""
    return not name.endswith(".toml") and ("@" in name or bool(_NAMED.match(name) or _MI250.fullmatch(name)))


def _meant(text: str) -> str:
    """What to add to a message if a text names a server that resembles one of those with a name."""
    named = _LIKE_NAMED.match(text)
    return "" if named is None else did_you_mean(named[1].lower(), (*SERVERS, "mi250"))


def _parse_pair(text: str) -> tuple[Fraction, Fraction]:
    """`OUT` or `OUT:IN` in bytes/s."""
    out, colon, in_ = text.partition(":")
    rate = parse_rate(out)
    return rate, parse_rate(in_) if colon else rate


def parse_text(text: str) -> Parts:
    """The parts of a topology from its text form.

    Raises InputError for a text that is no topology.
    """
    graph = _parse_graph(text)
    if graph is not None:
        return graph
    named = _NAMED.sub(lambda match: f"{match[1]}x{SERVERS[match[2]]}", text, count=1)
    head, *overrides = named.split(",")
    match = _HEAD.fullmatch(head.strip())
    if match is None:
        raise InputError(f"topology {text!r}: must be {_FORMS}")
    n_servers, per_server = int(match[1]), int(match[2] or 1)
    if n_servers < 1 or per_server < 1:
        raise InputError(f"topology {text!r}: must have at least one server and one GPU a server")
    if n_servers * per_server > RANKS_MAX:
        raise InputError(f"topology {text!r}: must have at most {RANKS_MAX} ranks")
    out, in_ = _parse_pair(match[3])
    fabric = parse_rate(match[4]) if match[4] is not None else None
    own = fabric is not None
    nics = [tuple(Nic(rail, out, in_, gpu=rail if own else None) for rail in range(per_server))] * n_servers
    seen: set[int] = set()
    for override in overrides:
        index_text, equals, value = override.partition("=")
        if not equals or not index_text.strip().isdecimal():
            raise InputError(f"topology {text!r}: {override!r}: must look like 3=25GB/s, 2=3/8 or 2=4..7/8")
        index = int(index_text)
        if index >= n_servers:
            raise InputError(f"topology {text!r}: server {index} does not exist: must be below {n_servers}")
        if index in seen:
            raise InputError(f"topology {text!r}: server {index} is named twice")
        seen.add(index)
        nics[index] = _override(text, nics[index], value.strip())
    servers = tuple(Server(f"h{index}", per_server, own, fabric) for index, own in enumerate(nics))
    n_nics = 1 if match[5] else per_server  # rail-only, a pod has an uplink for each rail
    return Parts(
        servers, rail_only=match[5] is not None, pods=_pods(text, match, n_nics * out, n_nics * in_), text=text
    )


def _parse_graph(text: str) -> Parts | None:
    """The parts of a graph with a text form; None if this is another text."""
    torus_of = _TORUS.fullmatch(text)
    boxes = _MI250.fullmatch(text)
    if torus_of is not None:
        sizes = [int(size) for size in torus_of[1].split("x")]
        if prod(sizes) > RANKS_MAX:
            raise InputError(f"topology {text!r}: must have at most {RANKS_MAX} ranks")
        try:
            graph = torus(sizes, *_parse_pair(torus_of[2]))
        except TopologyError as error:
            raise InputError(f"topology {text!r}: {error}") from None
        return Parts(enclose(graph, graph.gpus), text=text, graph=graph)
    if boxes is None:
        return None
    if not 0 < int(boxes[1]) * MI250_GPUS <= RANKS_MAX:
        raise InputError(f"topology {text!r}: must have at least one box and at most {RANKS_MAX} ranks")
    graph = mi250(int(boxes[1]))
    return Parts(enclose(graph, [name.partition(" ")[0] for name in graph.gpus]), text=text, graph=graph)


def _pods(text: str, match: re.Match[str], out: Fraction, in_: Fraction) -> tuple[Pod, ...]:
    """The pods that `/4:2` makes of servers which send `out` and receive `in_` bytes/s; none without it."""
    if match[6] is None:
        return ()
    n_servers, size, over = int(match[1]), int(match[6]), Fraction(match[7])
    if size < 1 or n_servers % size or size == n_servers:
        raise InputError(f"topology {text!r}: pods of {size}: must divide the {n_servers} servers into two or more")
    if over <= 0:
        raise InputError(f"topology {text!r}: oversubscribed {match[7]}: must be above zero")
    firsts = range(0, n_servers, size)
    members = (tuple(range(first, first + size)) for first in firsts)
    return tuple(Pod(f"pod{index}", own, size * out / over, size * in_ / over) for index, own in enumerate(members))


def _override(text: str, nics: tuple[Nic, ...], value: str) -> tuple[Nic, ...]:
    """The NICs of a server after `=3/8` or `=4..7/8` (which are left) or `=RATE` (all have another rate)."""
    share = _SHARE.fullmatch(value)
    if share is None:
        out, in_ = _parse_pair(value)
        return tuple(replace(nic, out=out, in_=in_) for nic in nics)
    first, last = (0, int(share[1]) - 1) if share[1] is not None else (int(share[2]), int(share[3]))
    if int(share[4]) != len(nics) or last >= len(nics) or first > last + 1:
        n = len(nics)
        raise InputError(f"topology {text!r}: {value!r}: must be K/{n} with K at most {n}, its NICs, or I..J/{n}")
    return tuple(replace(nic, failed=not first <= place <= last) for place, nic in enumerate(nics))


class _FileNic(msgspec.Struct, forbid_unknown_fields=True, rename={"in_": "in"}):
    rail: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    rate: str | None = None
    out: str | None = None
    in_: str | None = None
    failed: bool = False
    gpu: Annotated[int, msgspec.Meta(ge=0, le=1023)] | None = None


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


class _FileGpu(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    server: str | None = None


class _FileLink(msgspec.Struct, forbid_unknown_fields=True, rename={"from_": "from"}):
    from_: str
    to: str
    rate: str
    back: str | None = None
    one_way: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    servers: list[_FileServer] = []
    gpus: list[_FileGpu] = []
    switches: list[str] = []
    links: list[_FileLink] = []
    pods: list[_FilePod] = []
    latency: str = "0s"
    overhead: str = "0s"
    rail_only: bool = False


def read_toml(path: Path) -> Parts:
    """The parts of a topology from a TOML file; the schema is in docs/topology.md."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"topology {str(path)!r}: no such file, and not {_FORMS}{_meant(str(path))}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"topology {str(path)!r}: not TOML: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"topology {str(path)!r}: cannot be read: {error}") from None
    try:
        file = msgspec.convert(document, _File)
    except msgspec.ValidationError as error:
        raise InputError(f"topology {str(path)!r}: {error}") from None
    if not file.gpus and not file.links and not file.switches:
        if "servers" not in document:
            raise InputError(f"topology {str(path)!r}: must have servers, or gpus and links")
        return _from_servers(file, str(path))
    if file.servers or file.pods or file.rail_only:
        raise InputError(f"topology {str(path)!r}: gpus and links: must stand without servers, pods and rail_only")
    return _from_links(file, str(path))


def _from_links(file: _File, path: str) -> Parts:
    """A graph: GPUs, switches, and links between them."""
    number: dict[str, int] = {}
    for what, names in (("gpus", [gpu.name for gpu in file.gpus]), ("switches", file.switches)):
        for position, name in enumerate(names):
            if name in number:
                raise InputError(f"topology {path!r}: {what}[{position}]: {name!r}: the name is used twice")
            number[name] = len(number)
    if not 0 < len(file.gpus) <= RANKS_MAX:
        raise InputError(f"topology {path!r}: gpus: {len(file.gpus)}: must be from 1 to {RANKS_MAX}")
    links: dict[tuple[int, int], Fraction] = {}
    for position, link in enumerate(file.links):
        where = f"topology {path!r}: links[{position}]"
        for label, name in (("from", link.from_), ("to", link.to)):
            if name not in number:
                raise InputError(f"{where}.{label}: {name!r}: must be one of gpus or switches")
        if link.from_ == link.to:
            raise InputError(f"{where}.to: {link.to!r}: must be another node")
        if link.one_way and link.back is not None:
            raise InputError(f"{where}.back: must be absent when one_way is true")
        tail, head = number[link.from_], number[link.to]
        ways = [((tail, head), "rate", link.rate)]
        if not link.one_way:
            ways.append(((head, tail), "rate" if link.back is None else "back", link.back or link.rate))
        for ends, label, rate in ways:
            if ends in links:
                raise InputError(f"{where}: {link.from_!r} and {link.to!r} are linked already: must be one link")
            try:
                links[ends] = parse_rate(rate)
            except InputError as error:
                raise InputError(f"{where}.{label}: {error}") from None
    made = tuple(GraphLink(tail, head, rate) for (tail, head), rate in links.items())
    graph = Graph(tuple(gpu.name for gpu in file.gpus), tuple(file.switches), made)
    homes = [gpu.server or gpu.name for gpu in file.gpus]
    for position, home in enumerate(homes):
        if position and home != homes[position - 1] and home in homes[:position]:
            raise InputError(f"topology {path!r}: gpus[{position}].server: {home!r}: its GPUs must follow each other")
    latency_s, overhead_s = _file_time(path, "latency", file.latency), _file_time(path, "overhead", file.overhead)
    return Parts(enclose(graph, homes), latency_s, text=path, overhead_s=overhead_s, graph=graph)


def _from_servers(file: _File, path: str) -> Parts:
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
    return Parts(tuple(servers), latency_s, file.rail_only, tuple(pods), path, overhead_s)


def _file_time(path: str, name: str, text: str) -> Fraction:
    try:
        return parse_time(text)
    except InputError as error:
        raise InputError(f"topology {path!r}: {name}: {error}") from None


def _file_nic(nic: _FileNic) -> Nic:
    out, in_ = _both_ways(f"NIC on rail {nic.rail}", nic.rate, "out", nic.out, "in", nic.in_)
    return Nic(nic.rail, out, in_, nic.failed, nic.gpu)


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
