"""Execution plans of MSCCL++ 0.7, read strictly, and put into the form of 0.8, which the verifier performs.

In 0.7 a channel has a buffer at both ends: an operation names the pair, and a channel of its block between such two.
The executor takes the local end of what is put or got from the channel; `srcs` and `dsts` give only offsets. What else
differs, as src/executor and src/include/execution_kernel.hpp of microsoft/mscclpp v0.7.0 have it:

- Names: `rs`, `rrc`, `rrcs`, `rspkt`, `rpkt` are `res`, `rre`, `rres`, `respkt`, `repkt` of 0.8; `cpkt` unpacks
  (`upkt`), and `tpkt` is what 0.8 calls `cpkt`. Channels may be called `sm` and `proxy`, their names in 0.6.
- With protocol LL the scratch space always has two halves for packets, whatever `use_double_scratch_buffer` says. Other
  data would lie in the first half, across packets: that is refused.
- `flush` flushes the channels that it names. The k-th destination of `rppkt` gets the k-th source.
- Chunks are counted in `chunkGroups` groups of the input: chunks of a multiple of 16 B, which divide the message, begin
  where they would with one group.
- A GPU makes known those of its buffers that have the type of a remote end of its own channels, and to the GPUs that
  reach them; it fails where no channel leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal

import msgspec

from optcc.errors import CodecError
from optcc.strict_json import check_no_key_twice, decode
from optcc.verify.gpu.mscclpp_file import (
    BYTES_MAX,
    CELLS_MAX,
    GPUS_MAX,
    Access,
    Buffer,
    Bytes,
    ChannelRefs,
    Chunks,
    MscclppBlock,
    MscclppChannel,
    MscclppFile,
    MscclppGpu,
    MscclppOp,
    MscclppOperand,
    MscclppPlan,
    RemoteBuffer,
    RemoteBufferRefs,
    Small,
    SwitchGroup,
)

_Kind = Literal["memory", "sm", "port", "proxy", "nvls"]
_KINDS: dict[str, Access] = {
    "memory": "memory",
    "sm": "memory",
    "port": "port",
    "proxy": "port",
    "nvls": "switch",
    "none": "none",
}
_Key = tuple[Buffer, Buffer, Access]
"""Local buffer, remote buffer and type of a channel."""
_PER_OPERATION_MAX = 8
RESULT_IN_PLACE = {"allgather": "i", "reducescatter": "o"}
"""The buffer that is a part of the other one, in place."""


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    src: Buffer
    dst: Buffer


class _End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A channel of the block between such buffers, and the chunk at its remote end."""

    id: Small
    off: Chunks = 0


class _Local(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    buff: Buffer
    off: Chunks


class _Dependency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tb: Small
    step: Small


class _Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation; `src`, `dst` (ranks) and `deps` are not read by the loader."""

    name: str
    ctype: _Kind | Literal["none"] | None = None
    i_buff: _Pair | None = None
    i_cids: list[_End] | None = None
    o_buff: _Pair | None = None
    o_cids: list[_End] | None = None
    src: Small | None = None
    srcs: list[_Local] | None = None
    srcbuff: Buffer | None = None
    srcoff: Chunks | None = None
    dst: Small | None = None
    dsts: list[_Local] | None = None
    dstbuff: Buffer | None = None
    dstoff: Chunks | None = None
    cnt: Annotated[int, msgspec.Meta(ge=1, le=CELLS_MAX)] | None = None
    deps: list[_Dependency] | None = None
    nthread_blocks: Small | None = None
    barrier_id: Small | None = None


class _Refs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    src: Buffer
    dst: Buffer
    ctype: _Kind
    cids: list[Small]


class _Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Small
    ops: list[_Op]
    channels: list[_Refs]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Chunks
    ranks: list[Small]


class _Channel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Channels between buffers `srcbuff` and `dstbuff`, or with type `nvls` of `buff` to each of `rankGroups`."""

    type: _Kind
    srcbuff: Buffer | None = None
    dstbuff: Buffer | None = None
    connected_to: list[Small] | None = None
    buff: Buffer | None = None
    rank_groups: list[_Group] | None = None


class _Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    id: Small
    input_chunks: Chunks
    output_chunks: Chunks
    scratch_chunks: Chunks
    chunk_groups: Annotated[int, msgspec.Meta(ge=1, le=CELLS_MAX)]
    threadblocks: list[_Block]
    channels: list[_Channel]


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    collective: str
    protocol: Literal["Simple", "LL"]
    inplace: bool
    gpus: Annotated[list[_Gpu], msgspec.Meta(min_length=1, max_length=GPUS_MAX)]
    num_threads_per_block: Small = 1024
    use_double_scratch_buffer: bool = False
    min_message_size: Bytes = 0
    max_message_size: Bytes = 2**64 - 1


class WrittenOp(MscclppOp, frozen=True):
    """An operation under its name in 0.8; `written` is the one in the file."""

    written: str = ""

    @property
    def word(self) -> str:
        return self.written


@dataclass(frozen=True, slots=True)
class _Form:
    """How the operands of an operation are given: its name in 0.8, the keys that it must have, and its channels.

    `packets` are the keys whose places are packets; these must be in scratch space.
    """

    name: str
    keys: tuple[str, ...]
    kinds: tuple[Access, ...] = ()
    packets: tuple[str, ...] = ()


_IN, _OUT = ("i_buff", "i_cids", "ctype"), ("o_buff", "o_cids", "ctype")
_FROM, _TO = ("srcbuff", "srcoff", "cnt"), ("dstbuff", "dstoff", "cnt")
_BOTH: tuple[Access, ...] = ("memory", "port")
FORMS = {
    "nop": _Form("nop", ()),
    "barrier": _Form("barrier", ("barrier_id", "nthread_blocks")),
    "signal": _Form("signal", _OUT, _BOTH),
    "wait": _Form("wait", _IN, _BOTH),
    "flush": _Form("flush", _OUT, ("port",)),
    "put": _Form("put", (*_OUT, "srcs", "cnt"), _BOTH),
    "pws": _Form("pws", (*_OUT, "srcs", "cnt"), ("port",)),
    "pwsf": _Form("pwsf", (*_OUT, "srcs", "cnt"), ("port",)),
    "ppkt": _Form("ppkt", (*_OUT, "srcs", "cnt"), _BOTH, ("o_buff",)),
    "rppkt": _Form("rppkt", (*_OUT, "srcs", "cnt"), _BOTH, ("o_buff", "srcs")),
    "get": _Form("get", (*_IN, "dsts", "cnt"), ("memory",)),
    "copy": _Form("copy", (*_FROM, *_TO)),
    "re": _Form("re", (*_FROM, *_TO, "srcs")),
    "rs": _Form("res", (*_OUT, *_FROM, *_TO, "srcs"), ("memory",)),
    "rrc": _Form("rre", (*_IN, *_FROM, *_TO), ("memory",)),
    "rrcs": _Form("rres", (*_IN, *_OUT, *_FROM, *_TO), ("memory",)),
    "rpkt": _Form("repkt", (*_FROM, *_TO, "srcs"), (), ("srcs",)),
    "rspkt": _Form("respkt", (*_OUT, *_FROM, *_TO, "srcs"), ("memory",), ("o_buff", "srcs")),
    "cpkt": _Form("upkt", (*_FROM, *_TO), (), ("srcbuff",)),
    "tpkt": _Form("cpkt", (*_FROM, *_TO), (), ("dstbuff",)),
    "glres": _Form("glres", ("i_cids", "o_cids", "ctype", *_FROM, *_TO), ("switch",)),
}
_ALLOWED = frozenset(("name", "ctype", "cnt", "src", "dst", "deps"))
"""Keys that any operation may have, since the loader does not read them there."""


@cache
def _decoder() -> msgspec.json.Decoder[_Plan]:
    return msgspec.json.Decoder(_Plan)


def is_mscclpp_07(data: bytes) -> bool:
    """Whether these bytes are meant as a plan of 0.7 or older: only there keys are written `inputChunks`."""
    return b'"inputChunks"' in data and b'"input_chunks"' not in data


def parse_mscclpp_07(data: bytes) -> MscclppFile:
    """Reads a plan of 0.7; raises CodecError, with the path to the field, for what is not one or not judged."""
    if len(data) > BYTES_MAX:
        raise CodecError(f"{len(data)} B: must be at most {BYTES_MAX} B")
    plan = decode(data, _decoder())
    check_no_key_twice(data, _Plan, "$")
    for number, gpu in enumerate(plan.gpus):
        if gpu.id != number:
            raise CodecError(f"$.gpus[{number}].id: {gpu.id}: must be {number}, its place")
    has_packets = any(op.name in _PACKET_NAMES for gpu in plan.gpus for block in gpu.threadblocks for op in block.ops)
    in_halves = plan.protocol == "LL" and has_packets
    gpus = [_GpuReader(plan, gpu, in_halves).read() for gpu in plan.gpus]
    made = MscclppPlan(
        plan.name,
        plan.collective,
        plan.protocol,
        plan.inplace,
        gpus,
        num_threads_per_block=plan.num_threads_per_block,
        use_double_scratch_buffer=in_halves,
        min_message_size=plan.min_message_size,
        max_message_size=plan.max_message_size,
    )
    return MscclppFile.of(made, data, "0.7", tuple(_unloadable(plan, gpus, in_halves)))


_PACKET_NAMES = frozenset(name for name, form in FORMS.items() if form.packets)


@dataclass(slots=True)
class _GpuReader:
    """One GPU, with its channels by the buffers at their ends."""

    plan: _Plan
    gpu: _Gpu
    in_halves: bool
    ends: dict[Access, list[tuple[Buffer, Buffer, int]]] = field(default_factory=lambda: {"memory": [], "port": []})
    by_key: dict[_Key, list[int]] = field(default_factory=dict)
    groups: list[tuple[Buffer, SwitchGroup]] = field(default_factory=list)

    def read(self) -> MscclppGpu:
        """The GPU in the form of 0.8: for each channel a remote buffer of the same number."""
        path = f"$.gpus[{self.gpu.id}]"
        for number, channel in enumerate(self.gpu.channels):
            self._add_channel(f"{path}.channels[{number}]", channel)
        ends = self.ends
        return MscclppGpu(
            self.gpu.id,
            self.gpu.input_chunks,
            self.gpu.output_chunks,
            self.gpu.scratch_chunks,
            [self._block(f"{path}.threadblocks[{k}]", k, each) for k, each in enumerate(self.gpu.threadblocks)],
            [
                *(MscclppChannel(kind, [peer for _, _, peer in ends[kind]]) for kind in _BOTH),
                *(MscclppChannel("switch", buffer_type=buffer, rank_groups=[group]) for buffer, group in self.groups),
            ],
            [RemoteBuffer(peer, remote, [kind]) for kind in _BOTH for _, remote, peer in ends[kind]],
        )

    def _add_channel(self, path: str, channel: _Channel) -> None:
        kind, n_gpus = _KINDS[channel.type], len(self.plan.gpus)
        keys = {each.name: each.encode_name for each in msgspec.structs.fields(_Channel)}
        wanted = {"type", "buff", "rankGroups"} if kind == "switch" else {"type", "srcbuff", "dstbuff", "connectedTo"}
        given = {key for name, key in keys.items() if getattr(channel, name) is not None}
        for key in sorted(given ^ wanted):
            rule = "missing: must be given" if key in wanted else "must not be given"
            raise CodecError(f"{path}.{key}: {rule} with type {channel.type}")
        if kind == "switch":
            assert channel.buff is not None
            for group in channel.rank_groups or ():
                if any(rank >= n_gpus for rank in group.ranks):
                    raise CodecError(f"{path}.rankGroups: {max(group.ranks)}: must be below {n_gpus}")
                self.by_key.setdefault((channel.buff, channel.buff, kind), []).append(len(self.groups))
                self.groups.append((channel.buff, SwitchGroup(group.size, group.ranks)))
            return
        assert channel.srcbuff is not None and channel.dstbuff is not None
        for peer in channel.connected_to or ():
            if peer >= n_gpus or peer == self.gpu.id:
                raise CodecError(f"{path}.connectedTo: {peer}: must be another GPU of the {n_gpus}")
            self.by_key.setdefault((channel.srcbuff, channel.dstbuff, kind), []).append(len(self.ends[kind]))
            self.ends[kind].append((channel.srcbuff, channel.dstbuff, peer))

    def _block(self, path: str, number: int, block: _Block) -> MscclppBlock:
        if block.id != number:
            raise CodecError(f"{path}.id: {block.id}: must be {number}, its place")
        own: dict[Access, list[int]] = {"memory": [], "port": [], "switch": []}
        places: dict[_Key, list[int]] = {}
        for at, refs in enumerate(block.channels):
            key = (refs.src, refs.dst, _KINDS[refs.ctype])
            there = self.by_key.get(key, [])
            for each in refs.cids:
                if each >= len(there):
                    what = f"the GPU has {len(there)} channels {refs.ctype} from {refs.src} to {refs.dst}"
                    raise CodecError(f"{path}.channels[{at}].cids: {each}: {what}")
                places.setdefault(key, []).append(len(own[key[2]]))
                own[key[2]].append(there[each])
        behind = {"memory": 0, "port": len(self.ends["memory"])}
        ops = [_OpReader(self, f"{path}.ops[{k}]", op, places).read() for k, op in enumerate(block.ops)]
        return MscclppBlock(
            number,
            ops,
            [ChannelRefs(kind, ids) for kind, ids in own.items()],
            [RemoteBufferRefs(kind, [behind[kind] + each for each in own[kind]]) for kind in _BOTH],
        )


@dataclass(slots=True)
class _OpReader:
    """One operation of a block whose channels between two buffers are `places`."""

    of: _GpuReader
    path: str
    op: _Op
    places: dict[_Key, list[int]]

    def read(self) -> MscclppOp:
        """The operation in the form of 0.8."""
        op = self.op
        form = FORMS.get(op.name)
        if form is None:
            raise CodecError(f"{self.path}.name: {op.name[:60]!r}: must be one of {', '.join(FORMS)}")
        kind = _KINDS[op.ctype or "none"]
        self._check_keys(form, kind)
        self._check_buffers(form, kind)
        if op.name == "barrier":
            if not op.nthread_blocks:
                raise CodecError(f"{self.path}.nthread_blocks: {op.nthread_blocks}: must be 1 or more")
            return WrittenOp("barrier", barrier_id=op.barrier_id, num_threadblocks=op.nthread_blocks, written=op.name)
        sources, targets, ids = self._sides(kind)
        if op.name in ("signal", "wait", "flush"):
            sources, targets = [], []
        return WrittenOp(form.name, sources, targets, ids, kind, written=op.name)

    def _check_keys(self, form: _Form, kind: Access) -> None:
        """Raises CodecError for keys that are missing, or that the operation does not have."""
        op = self.op
        given = [name for name in op.__struct_fields__ if getattr(op, name) is not None]
        for name in form.keys:
            if name not in given:
                raise CodecError(f"{self.path}.{name}: missing: {op.name} must have it")
        for name in given:
            if name not in form.keys and name not in _ALLOWED:
                raise CodecError(f"{self.path}.{name}: {op.name} must not have it")
        if form.kinds and kind not in form.kinds:
            names = [name for name, each in _KINDS.items() if each in form.kinds]
            raise CodecError(f"{self.path}.ctype: {op.ctype}: must be one of {', '.join(names)} for {op.name}")
        for name in ("i_cids", "o_cids", "srcs", "dsts"):
            most = 1 if kind == "switch" else _PER_OPERATION_MAX
            count = len(getattr(op, name) or ())
            if name in form.keys and not 1 <= count <= most:
                raise CodecError(f"{self.path}.{name}: {count} of them: must be 1 to {most}")
        for one, other in (("srcs", "o_cids"), ("dsts", "i_cids")):
            if op.name in _PAIRS and one in form.keys and len(_of(op, one)) != len(_of(op, other)):
                what = f"must be as many as {other}, the k-th goes with the k-th"
                raise CodecError(f"{self.path}.{one}: {len(_of(op, one))} of them: {what}")

    def _check_buffers(self, form: _Form, kind: Access) -> None:
        """Raises CodecError for buffers other than those that the executor takes, and for what is not judged."""
        op = self.op
        for name, pair in (("srcs", op.o_buff), ("dsts", op.i_buff)):
            places: Sequence[_Local] = getattr(op, name) or ()
            end = pair.src if pair is not None and op.name in _PAIRS and op.name != "rppkt" else None
            for number, each in enumerate(places):
                must = "s" if name in form.packets else end or places[0].buff
                if each.buff != must:
                    rule = f"must be {must}, which is what the executor takes"
                    raise CodecError(f"{self.path}.{name}[{number}].buff: {each.buff}: {rule}")
        remote = {
            "i_buff.dst": op.i_buff.dst if op.i_buff else None,
            "o_buff.dst": op.o_buff.dst if op.o_buff else None,
        }
        srcs = op.srcs[0].buff if op.srcs else None
        local: dict[str, Buffer | None] = {"srcbuff": op.srcbuff, "dstbuff": op.dstbuff, "srcs": srcs}
        packets = {*form.packets, *(f"{name}.dst" for name in form.packets)}
        if kind == "port" and form.packets:  # the proxy takes them from there as packets
            local["o_buff.src"] = op.o_buff.src if op.o_buff else None
            packets |= {"srcs", "o_buff.src"}
        for name, buffer in (*remote.items(), *local.items()):
            if name in packets and buffer is not None and buffer != "s":
                raise CodecError(f"{self.path}.{name}: {buffer}: must be s, where packets are")
        if op.name in ("signal", "wait", "flush"):
            return
        for name, buffer in (*remote.items(), *local.items(), ("dsts", op.dsts[0].buff if op.dsts else None)):
            if self.of.in_halves and buffer == "s" and name not in packets:
                what = "scratch space that has packets, for other data: is not judged, the two would overlap"
                raise CodecError(f"{self.path}.{name}: {what}")
            part = RESULT_IN_PLACE.get(self.of.plan.collective) if self.of.plan.inplace else None
            if buffer == part is not None and (name in remote or (name == "srcs" and op.name in ("re", "rs"))):
                what = "of another GPU" if name in remote else "among srcs"
                rule = "is not judged: the executor adds the offset of this GPU's own part"
                raise CodecError(f"{self.path}.{name}: {buffer} {what} in a call in place: {rule}")

    def _sides(self, kind: Access) -> tuple[list[MscclppOperand], list[MscclppOperand], list[int]]:
        """Sources, destinations and channels."""
        op, count = self.op, self.op.cnt or 0
        if op.name == "glres":
            assert op.i_cids and op.o_cids and op.srcbuff and op.dstbuff
            into = self._channel("o_cids", op.dstbuff, op.dstbuff, "switch", op.o_cids[0])
            out = self._channel("i_cids", op.srcbuff, op.srcbuff, "switch", op.i_cids[0])
            return (
                [MscclppOperand(op.srcoff or 0, count, switch_channel_id=out)],
                [MscclppOperand(op.dstoff or 0, count, switch_channel_id=into)],
                [],
            )
        ids: list[int] = []
        sources = [] if op.srcbuff is None else [MscclppOperand(op.srcoff or 0, count, op.srcbuff)]
        targets = [] if op.dstbuff is None else [MscclppOperand(op.dstoff or 0, count, op.dstbuff)]
        for name, pair, ends, side in (
            ("i_cids", op.i_buff, op.i_cids, sources),
            ("o_cids", op.o_buff, op.o_cids, targets),
        ):
            for each in ends or ():
                assert pair is not None
                number = self._channel(name, pair.src, pair.dst, kind, each)
                side.append(MscclppOperand(each.off, count, buffer_id=number))
                ids.append(number)
        sources += [MscclppOperand(each.off, count, each.buff) for each in op.srcs or ()]
        targets += [MscclppOperand(each.off, count, each.buff) for each in op.dsts or ()]
        return sources, targets, [] if op.name in ("rrc", "rrcs", "rs", "rspkt", "get") else ids

    def _channel(self, name: str, local: Buffer, remote: Buffer, kind: Access, end: _End) -> int:
        """The number of a channel among those of the block of its type."""
        there = self.places.get((local, remote, kind), [])
        if end.id >= len(there):
            what = f"the block has {len(there)} channels {self.op.ctype} from {local} to {remote}"
            raise CodecError(f"{self.path}.{name}: {end.id}: {what}")
        return there[end.id]


_PAIRS = frozenset(("put", "pws", "pwsf", "ppkt", "rppkt", "get"))
"""Operations whose k-th place goes with the k-th channel."""


def _of(item: msgspec.Struct, name: str) -> list[object]:
    """The value of a field as a list: empty where it is not given."""
    value = getattr(item, name)
    return value if isinstance(value, list) else [] if value is None else [value]


def _unloadable(plan: _Plan, gpus: Sequence[MscclppGpu], in_halves: bool) -> list[tuple[int, str]]:
    """GPUs at which the loader fails, or waits for ever, with the reason; what would be laid out wrong, too."""
    wrong = []
    reached: dict[int, dict[str, int]] = {}
    for gpu in gpus:
        for remote in gpu.remote_buffers:
            reached.setdefault(remote.rank, {}).setdefault(remote.type, gpu.id)
    for written, gpu in zip(plan.gpus, gpus, strict=True):
        chunks = written.input_chunks or written.output_chunks
        if not chunks:
            wrong.append(
                (gpu.id, "inputChunks and outputChunks 0: one of them must be more, to say how long a chunk is")
            )
        elif chunks % written.chunk_groups:
            wrong.append((gpu.id, f"chunkGroups {written.chunk_groups}: must divide the {chunks} chunks"))
        if in_halves and written.scratch_chunks != plan.gpus[0].scratch_chunks:
            rule = f"must be {plan.gpus[0].scratch_chunks}, as at GPU 0: the halves for packets would differ"
            wrong.append((gpu.id, f"scratchChunks {written.scratch_chunks}: {rule}"))
        if gpu.id not in reached:
            wrong.append((gpu.id, "no channel of another GPU leads here: the loader fails without"))
        known = {remote.type for remote in gpu.remote_buffers}
        for buffer, other in reached.get(gpu.id, {}).items():
            if buffer not in known:
                what = f"GPU {other} has a channel to {buffer} here, which is made known only by a GPU with a channel"
                wrong.append((gpu.id, f"{what} to {buffer} of its own"))
    return wrong
