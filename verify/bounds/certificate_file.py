"""A strict reader of `optcc-certificate/1` and `optcc-exchange/1` files; `replay` and `replay_exchange` then check the
numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec

from optcc.collective import RANKS_MAX
from optcc.errors import CodecError, OptccError, SolverError
from optcc.strict_json import check_no_key_twice, decode, show
from optcc.units import SIZE_BYTES_MAX
from optcc.verify.bounds.certificate import Achieved, Certificate, Cut, PackedTree
from optcc.verify.bounds.exchange import EXCHANGE_FORMAT, BlockDemand, BlockFlow, ExchangeCertificate
from optcc.verify.bounds.network import BROADCAST, REDUCE, Demand, FlowLink, FlowNetwork, SharedPort

FILE_BYTES_MAX = 2**28
DIGITS_MAX = 4000
COUNT_MAX = 2**20
NAME_LENGTH_MAX = 1000
_RATIONAL = re.compile(r"(-?[1-9][0-9]*|0)/([1-9][0-9]*)")
_Value = TypeVar("_Value")
_Item = TypeVar("_Item")
_Array = Annotated[list[_Item], msgspec.Meta(max_length=COUNT_MAX)]
_Index = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
_Kind = Literal["reduce", "broadcast"]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An object of the file; all fields are required."""


class _Port(_Strict):
    name: _Name
    rate: str


class _Link(_Strict):
    tail: _Index
    head: _Index
    ports: _Array[_Index]


class _Cut(_Strict):
    kind: _Kind
    nodes: _Array[_Index]
    weight: str


class _ByKind(_Strict):
    reduce: _Array[str]
    broadcast: _Array[str]


class _Tree(_Strict):
    kind: _Kind
    root: _Index
    weight: str
    paths: _Array[_Array[_Index]]


class _Achieved(_Strict):
    seconds: str
    roots: _Array[str]
    loads: _ByKind
    trees: _Array[_Tree] | None


class _Block(msgspec.Struct, forbid_unknown_fields=True, gc=False, rename={"source": "from", "sink": "to"}):
    source: _Index
    sink: _Index
    share: str


class _GroupFlow(_Strict):
    endpoint: _Index
    links: _Array[_Index]
    loads: _Array[str]


class _Flow(_Strict):
    seconds: str
    flows: _Array[_GroupFlow]


class _ExchangeFile(_Strict):
    format: Literal["optcc-exchange/1"]
    digest: str
    model: Literal["paths between the endpoints of this network, fluid, no latency"]
    collective: _Name
    gpus: _Array[Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]]
    root: _Index
    blocks: _Array[_Block] | None
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)]
    seconds: str
    demand: str
    supply: str
    endpoints: _Array[_Name]
    switches: _Array[_Name]
    ports: _Array[_Port]
    links: _Array[_Link]
    prices: _Array[str]
    achieved: _Flow | None


class _Head(msgspec.Struct):
    format: str = ""


class _File(_Strict):
    format: Literal["optcc-certificate/1"]
    digest: str
    model: Literal["trees on the endpoints of this network, fluid, no latency"]
    collective: Literal["allreduce", "reducescatter", "allgather", "broadcast", "reduce"]
    roots: _Array[str] | None
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)]
    seconds: str
    demand: str
    supply: str
    endpoints: _Array[_Name]
    switches: _Array[_Name]
    ports: _Array[_Port]
    links: _Array[_Link]
    cuts: _Array[_Cut]
    prices: _Array[str]
    potentials: _ByKind
    achieved: _Achieved | None


_DECODER = msgspec.json.Decoder(_File)
_EXCHANGE_DECODER = msgspec.json.Decoder(_ExchangeFile)
_HEAD_DECODER = msgspec.json.Decoder(_Head)


def read_either(data: bytes) -> Certificate | ExchangeCertificate:
    """The certificate in a file of either format; raises what the readers of both raise."""
    try:
        head = _HEAD_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        head = _Head()  # the reader says what is wrong
    return read_exchange(data) if head.format == EXCHANGE_FORMAT else read_certificate(data)


def read_certificate(data: bytes) -> Certificate:
    """The certificate in an `optcc-certificate/1` file.

    Raises CodecError, path first, for a file that is not one; SolverError if its digest does not match its content.
    Whether its numbers follow from each other is for `replay`.
    """
    if len(data) > FILE_BYTES_MAX:
        raise CodecError(f"$: {len(data)} B: must be at most {FILE_BYTES_MAX} B")
    file = decode(data, _DECODER)
    check_no_key_twice(data, _File, "$")
    network = _network(file)
    n_nodes, n_switches = network.n_nodes, len(network.switches)
    roots = None if file.roots is None else _rationals(file.roots, "$.roots", len(network.endpoints))
    demand = _make("$.roots", lambda: Demand(file.collective, roots))
    cuts = tuple(
        Cut(cut.kind, _indices(cut.nodes, f"$.cuts[{i}].nodes", n_nodes), _rational(cut.weight, f"$.cuts[{i}].weight"))
        for i, cut in enumerate(file.cuts)
    )
    prices = _rationals(file.prices, "$.prices", len(network.ports))
    potentials = _by_kind(file.potentials, "$.potentials", n_switches)
    crossing, supply = _rational(file.demand, "$.demand"), _rational(file.supply, "$.supply")
    seconds = _rational(file.seconds, "$.seconds")
    achieved = None if file.achieved is None else _achieved(file.achieved, network)
    certificate = _make(
        "$.cuts",
        lambda: Certificate(
            network, demand, file.size_bytes, cuts, prices, potentials, crossing, supply, seconds, achieved
        ),
    )
    _check_digest(file.digest, certificate.digest)
    return certificate


def read_exchange(data: bytes) -> ExchangeCertificate:
    """The certificate in an `optcc-exchange/1` file; raises as `read_certificate` does."""
    if len(data) > FILE_BYTES_MAX:
        raise CodecError(f"$: {len(data)} B: must be at most {FILE_BYTES_MAX} B")
    file = decode(data, _EXCHANGE_DECODER)
    check_no_key_twice(data, _ExchangeFile, "$")
    network = _network(file)
    blocks = None
    if file.blocks is not None:
        blocks = tuple(
            (block.source, block.sink, _rational(block.share, f"$.blocks[{i}].share"))
            for i, block in enumerate(file.blocks)
        )
    demand = _make("$.collective", lambda: BlockDemand(file.collective, tuple(file.gpus), file.root, blocks))
    prices = _rationals(file.prices, "$.prices", len(network.ports))
    crossing, supply = _rational(file.demand, "$.demand"), _rational(file.supply, "$.supply")
    seconds = _rational(file.seconds, "$.seconds")
    achieved = None if file.achieved is None else _flow(file.achieved, network)
    certificate = _make(
        "$.prices",
        lambda: ExchangeCertificate(network, demand, file.size_bytes, prices, crossing, supply, seconds, achieved),
    )
    _check_digest(file.digest, certificate.digest)
    return certificate


def _flow(file: _Flow, network: FlowNetwork) -> BlockFlow:
    path = "$.achieved"
    loads: dict[int, tuple[tuple[int, Fraction], ...]] = {}
    for i, group in enumerate(file.flows):
        endpoint = _index(group.endpoint, f"{path}.flows[{i}].endpoint", len(network.endpoints))
        if endpoint in loads:
            raise CodecError(f"{path}.flows[{i}].endpoint: {endpoint}: must be there once")
        links = _indices(group.links, f"{path}.flows[{i}].links", len(network.links))
        loads[endpoint] = tuple(
            zip(links, _rationals(group.loads, f"{path}.flows[{i}].loads", len(links)), strict=True)
        )
    return BlockFlow(_rational(file.seconds, f"{path}.seconds"), loads)


def _check_digest(claimed: str, follows: str) -> None:
    if claimed != follows:
        raise SolverError(f"certificate: digest {claimed[:16]}...: its content has {follows[:16]}...: altered")


def _network(file: _File | _ExchangeFile) -> FlowNetwork:
    rates = [_rational(port.rate, f"$.ports[{index}].rate") for index, port in enumerate(file.ports)]
    ports = [
        _make(f"$.ports[{index}].rate", partial(SharedPort, port.name, rate))
        for index, (port, rate) in enumerate(zip(file.ports, rates, strict=True))
    ]
    n_nodes = len(file.endpoints) + len(file.switches)
    links = tuple(
        FlowLink(
            _index(link.tail, f"$.links[{number}].tail", n_nodes),
            _index(link.head, f"$.links[{number}].head", n_nodes),
            _indices(link.ports, f"$.links[{number}].ports", len(ports)),
        )
        for number, link in enumerate(file.links)
    )
    return _make("$.links", lambda: FlowNetwork(tuple(file.endpoints), tuple(file.switches), tuple(ports), links))


def _achieved(file: _Achieved, network: FlowNetwork) -> Achieved:
    path = "$.achieved"
    return Achieved(
        _rational(file.seconds, f"{path}.seconds"),
        _rationals(file.roots, f"{path}.roots", len(network.endpoints)),
        _by_kind(file.loads, f"{path}.loads", len(network.links)),
        None
        if file.trees is None
        else tuple(_tree(tree, f"{path}.trees[{index}]", network) for index, tree in enumerate(file.trees)),
    )


def _tree(file: _Tree, path: str, network: FlowNetwork) -> PackedTree:
    return PackedTree(
        file.kind,
        _index(file.root, f"{path}.root", len(network.endpoints)),
        _rational(file.weight, f"{path}.weight"),
        tuple(_indices(each, f"{path}.paths[{i}]", len(network.links)) for i, each in enumerate(file.paths)),
    )


def _by_kind(file: _ByKind, path: str, length: int) -> dict[str, tuple[Fraction, ...]]:
    return {
        REDUCE: _rationals(file.reduce, f"{path}.reduce", length),
        BROADCAST: _rationals(file.broadcast, f"{path}.broadcast", length),
    }


def _make(path: str, construct: Callable[[], _Value]) -> _Value:
    """Constructs a value; what its constructor rejects is a CodecError at `path`."""
    try:
        return construct()
    except CodecError:
        raise
    except OptccError as error:
        raise CodecError(f"{path}: {error}") from None


def _index(number: int, path: str, count: int) -> int:
    if number >= count:
        raise CodecError(f"{path}: {number}: must be an integer from 0 to {count - 1}")
    return number


def _indices(numbers: Iterable[int], path: str, count: int) -> tuple[int, ...]:
    return tuple(_index(number, f"{path}[{position}]", count) for position, number in enumerate(numbers))


def _rational(text: str, path: str) -> Fraction:
    match = _RATIONAL.fullmatch(text) if len(text) <= 2 * DIGITS_MAX else None
    if match is None or max(len(match[1]), len(match[2])) > DIGITS_MAX:
        raise CodecError(f'{path}: {show(text)}: must be a rational "a/b" of at most {DIGITS_MAX} digits each')
    number = Fraction(int(match[1]), int(match[2]))
    if number.denominator != int(match[2]):
        raise CodecError(f"{path}: {show(text)}: must be in lowest terms")
    return number


def _rationals(texts: Sequence[str], path: str, length: int) -> tuple[Fraction, ...]:
    if len(texts) != length:
        raise CodecError(f"{path}: an array of {len(texts)}: must be an array of {length}")
    return tuple(_rational(text, f"{path}[{index}]") for index, text in enumerate(texts))
