"""`MscclppFile`: an execution plan of MSCCL++ in JSON, read strictly, with the line of every operation.

The format is that of 0.8 and 0.9, in which remote buffers are objects of their own; `mscclpp_file_07` puts plans of 0.7
into it. What a `pipeline` does depends on the size of the call: `optcc.verify.gpu.mscclpp_pipeline` writes it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Annotated, Literal

import msgspec

from optcc.errors import CodecError
from optcc.strict_json import check_no_key_twice, decode

BYTES_MAX = 2**26
CELLS_MAX = 2**19
BLOCKS_MAX = 1024
GPUS_MAX = 256
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}\n,]', re.DOTALL)

Small = Annotated[int, msgspec.Meta(ge=0, le=2**15)]
Chunks = Annotated[int, msgspec.Meta(ge=0, le=CELLS_MAX)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Buffer = Literal["i", "o", "s"]
Version = Literal["0.7", "0.8"]
Access = Literal["memory", "port", "switch", "none"]
NAMES = (
    *("nop", "barrier", "signal", "wait", "rlxsignal", "rlxwait", "sem_acquire", "sem_release"),
    *("put", "pws", "pwsf", "flush", "get", "copy", "re", "res", "rre", "rres", "glres", "gstore"),
    *("ppkt", "rppkt", "respkt", "repkt", "recpkt", "recspkt", "upkt", "cpkt", "gstorepkt"),
    "pipeline",
)
UNIT_STEP = 16
"""What the unit of a pipeline is a multiple of, in bytes: kernels move words of so many, and drop what is over."""


class MscclppOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place of `size` chunks: in a buffer of this GPU, of another, or of all of a switch channel's group.

    The language of MSCCL++ writes a `rank` too, which its loader does not read.
    """

    index: Chunks
    size: Annotated[int, msgspec.Meta(ge=1, le=CELLS_MAX)]
    type: Buffer | None = None
    buffer_id: Small | None = None
    switch_channel_id: Small | None = None
    rank: Small | None = None


class ThreadBlockGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of an operation's places a thread block does."""

    tb_id: Small
    tbg_size: Annotated[int, msgspec.Meta(ge=1, le=64)]


class IterContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far each turn of a pipeline goes, in bytes, and how many chunks all of them go."""

    unit_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    num_chunks: Annotated[int, msgspec.Meta(ge=1, le=2**15)]


class MscclppOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation; ids are those of its thread block's own lists. A pipeline has `ops`."""

    name: str
    src_buff: list[MscclppOperand] = []
    dst_buff: list[MscclppOperand] = []
    channel_ids: list[Small] = []
    channel_type: Access = "none"
    semaphore_ids: list[Small] = []
    barrier_id: Small | None = None
    num_threadblocks: Small | None = None
    tbg_info: ThreadBlockGroup | None = None
    reduce_op: str = "sum"
    iter_context: IterContext | None = None
    ops: list[MscclppOp] = []

    @property
    def word(self) -> str:
        """Its name in the file."""
        return self.name

    @property
    def by_port(self) -> bool:
        """Whether it goes through a proxy."""
        return self.channel_type == "port"

    @property
    def reach(self) -> str:
        """The type of the channels that it uses, and by which its remote buffers are reached."""
        return "port" if self.by_port else "memory"


class ChannelRefs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Channels of the GPU that a thread block uses."""

    channel_type: Access
    channel_ids: list[Small]
    buff: Buffer | None = None


class RemoteBufferRefs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Remote buffers of the GPU that a thread block uses."""

    access_channel_type: Access
    remote_buffer_ids: list[Small]


class MscclppBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A thread block."""

    id: Small
    ops: list[MscclppOp]
    channels: list[ChannelRefs] = []
    remote_buffer_refs: list[RemoteBufferRefs] = []

    def listed(self) -> list[MscclppOp]:
        """The operations as the loader numbers them: those of a pipeline stand behind it."""
        return [each for op in self.ops for each in (op, *op.ops)]

    def channel(self, kind: str, number: int) -> int | None:
        """The GPU's number of the block's channel `number` of that type; None if the block has no such."""
        own = [each for refs in self.channels if refs.channel_type == kind for each in refs.channel_ids]
        return own[number] if number < len(own) else None

    def buffer(self, number: int, kind: str = "memory") -> int | None:
        """The GPU's number of the block's remote buffer `number` of those reached by channels of that type."""
        own = [
            each
            for refs in self.remote_buffer_refs
            if refs.access_channel_type == kind
            for each in refs.remote_buffer_ids
        ]
        return own[number] if number < len(own) else None


class SwitchGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs of a switch channel."""

    size: Small
    ranks: list[Small]


class MscclppChannel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Channels of one type: one to each GPU of `connected_to`, or one to each of `rank_groups`."""

    channel_type: Access
    connected_to: list[Small] = []
    buff: Buffer | None = None
    buffer_type: Buffer | None = None
    rank_groups: list[SwitchGroup] = []


class RemoteBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of another GPU."""

    rank: Small
    type: Buffer
    access_channel_types: list[Access] = []


class Semaphore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A counter of the GPU that its thread blocks share."""

    init_value: Small


class MscclppGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU."""

    id: Small
    input_chunks: Chunks
    output_chunks: Chunks
    scratch_chunks: Chunks
    threadblocks: list[MscclppBlock]
    channels: list[MscclppChannel] = []
    remote_buffers: list[RemoteBuffer] = []
    semaphores: list[Semaphore] = []

    def peers(self, kind: str = "memory") -> list[int]:
        """The peer of each channel of that type."""
        return [peer for each in self.channels if each.channel_type == kind for peer in each.connected_to]

    def groups(self) -> list[tuple[str, list[int]]]:
        """The buffer and the GPUs of each switch channel."""
        return [
            (each.buffer_type or "i", group.ranks)
            for each in self.channels
            if each.channel_type == "switch"
            for group in each.rank_groups
        ]


class MscclppPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a plan, in the form of 0.8."""

    name: str
    collective: str
    protocol: Literal["Simple", "LL"]
    inplace: bool
    gpus: Annotated[list[MscclppGpu], msgspec.Meta(min_length=1, max_length=GPUS_MAX)]
    reuse_resources: bool = False
    num_threads_per_block: Small = 1024
    use_double_scratch_buffer: bool = False
    buffer_alignment: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    min_message_size: Bytes = 0
    max_message_size: Bytes = 2**64 - 1


@cache
def _decoder() -> msgspec.json.Decoder[MscclppPlan]:
    return msgspec.json.Decoder(MscclppPlan)


@dataclass(frozen=True, slots=True)
class MscclppFile:
    """A plan; `lines[gpu]` is the line of each GPU, `op_lines[gpu][block]` those of the operations that are listed.

    Every chunk is `parts` cells, so that thread blocks of a group have whole ones. `unloadable` are GPUs at which the
    loader of `version` fails, with the reason. Where pipelines have been written out, `steps` are the numbers of the
    operations as the loader has them.
    """

    plan: MscclppPlan
    lines: list[int]
    op_lines: list[list[list[int]]]
    parts: int
    version: Version = "0.8"
    unloadable: tuple[tuple[int, str], ...] = ()
    steps: list[list[list[int]]] | None = None

    @classmethod
    def parse(cls, data: bytes) -> MscclppFile:
        """Reads a file; raises CodecError, with the path to the field, for what is not such a plan or not judged."""
        if len(data) > BYTES_MAX:
            raise CodecError(f"{len(data)} B: must be at most {BYTES_MAX} B")
        plan = decode(data, _decoder())
        check_no_key_twice(data, MscclppPlan, "$")
        for number, gpu in enumerate(plan.gpus):
            path = f"$.gpus[{number}]"
            if gpu.id != number:
                raise CodecError(f"{path}.id: {gpu.id}: must be {number}, its place")
            _check_gpu(path, gpu, len(plan.gpus))
            if plan.use_double_scratch_buffer:
                _check_halves(path, gpu)
        return cls.of(plan, data)

    @classmethod
    def of(
        cls,
        plan: MscclppPlan,
        data: bytes,
        version: Version = "0.8",
        unloadable: tuple[tuple[int, str], ...] = (),
    ) -> MscclppFile:
        """The file with a plan that was read from these bytes; raises CodecError if it is too large to be judged."""
        groups = [
            op.tbg_info.tbg_size for gpu in plan.gpus for block in gpu.threadblocks for op in block.ops if op.tbg_info
        ]
        parts = lcm(*groups)
        cells = parts * sum(gpu.input_chunks + gpu.output_chunks + 2 * gpu.scratch_chunks for gpu in plan.gpus)
        if cells > CELLS_MAX:
            raise CodecError(f"$.gpus: {cells} parts of chunks in all: must be at most {CELLS_MAX}")
        blocks = sum(len(gpu.threadblocks) for gpu in plan.gpus)
        if blocks > BLOCKS_MAX:
            raise CodecError(f"$.gpus: {blocks} thread blocks in all: must be at most {BLOCKS_MAX}")
        lines: dict[tuple[object, ...], int] = dict(_object_lines(data))
        return cls(
            plan,
            [lines["gpus", number] for number in range(len(plan.gpus))],
            [
                [
                    [
                        lines["gpus", g, "threadblocks", b, "ops", k, *inner]
                        for k, op in enumerate(block.ops)
                        for inner in ((), *(("ops", j) for j in range(len(op.ops))))
                    ]
                    for b, block in enumerate(gpu.threadblocks)
                ]
                for g, gpu in enumerate(plan.gpus)
            ],
            parts,
            version,
            unloadable,
        )

    def step(self, gpu: int, block: int, k: int) -> int:
        """The number that the loader gives to the k-th operation."""
        return k if self.steps is None else self.steps[gpu][block][k]

    def flushed(self, op: MscclppOp) -> int:
        """How many of its channels a `flush` flushes: 0.8 counts destinations, of which its language writes none."""
        return len(op.channel_ids if self.version == "0.7" else op.dst_buff)


def _check_gpu(path: str, gpu: MscclppGpu, n_gpus: int) -> None:
    """Raises CodecError for ids that name nothing, and for what is not judged."""
    for number, channel in enumerate(gpu.channels):
        for peer in (*channel.connected_to, *(rank for group in channel.rank_groups for rank in group.ranks)):
            if peer >= n_gpus or (channel.channel_type in ("memory", "port") and peer == gpu.id):
                raise CodecError(f"{path}.channels[{number}]: {peer}: must be another GPU of the {n_gpus}")
    for number, buffer in enumerate(gpu.remote_buffers):
        if buffer.rank >= n_gpus:
            raise CodecError(f"{path}.remote_buffers[{number}].rank: {buffer.rank}: must be below {n_gpus}")
    counts = {"memory": len(gpu.peers()), "port": len(gpu.peers("port")), "switch": len(gpu.groups())}
    for number, block in enumerate(gpu.threadblocks):
        at = f"{path}.threadblocks[{number}]"
        if block.id != number:
            raise CodecError(f"{at}.id: {block.id}: must be {number}, its place")
        for kind, count in counts.items():
            used = [each for refs in block.channels if refs.channel_type == kind for each in refs.channel_ids]
            if used and max(used) >= count:
                raise CodecError(f"{at}.channels: {kind} channel {max(used)}: must be below {count}")
        buffers = [each for refs in block.remote_buffer_refs for each in refs.remote_buffer_ids]
        if buffers and max(buffers) >= len(gpu.remote_buffers):
            raise CodecError(f"{at}.remote_buffer_refs: {max(buffers)}: must be below {len(gpu.remote_buffers)}")
        for k, op in enumerate(block.ops):
            _check_op(f"{at}.ops[{k}]", gpu, block, op)


def _check_halves(path: str, gpu: MscclppGpu) -> None:
    """Raises CodecError for data, not packets, in the scratch space of other GPUs: the executor writes it to the first
    half in every call, and reads its own in the half of the call."""
    for number, block in enumerate(gpu.threadblocks):
        for k, op in ((k, each) for k, one in enumerate(block.ops) for each in (one, *one.ops)):
            for operand in (*op.src_buff, *op.dst_buff) if op.name in _DATA else ():
                buffer = None if operand.buffer_id is None else block.buffer(operand.buffer_id, op.reach)
                channel = (
                    None if operand.switch_channel_id is None else block.channel("switch", operand.switch_channel_id)
                )
                is_scratch = buffer is not None and gpu.remote_buffers[buffer].type == "s"
                is_scratch = is_scratch or (op.by_port and operand.type == "s")
                if is_scratch or (channel is not None and gpu.groups()[channel][0] == "s"):
                    what = "scratch space of other GPUs in two halves, for other than packets"
                    raise CodecError(f"{path}.threadblocks[{number}].ops[{k}]: {what}: is not judged")


_DATA = frozenset(("put", "pws", "pwsf", "get", "res", "rre", "rres", "glres", "gstore"))
_SHAPES = {
    **dict.fromkeys(("copy", "upkt", "cpkt", "glres", "gstore", "gstorepkt"), (1, 1, 1, 1)),
    **dict.fromkeys(("put", "pws", "pwsf", "get", "ppkt"), (1, 8, 1, 8)),
    "flush": (0, 0, 0, 8),
    "rppkt": (1, 1, 1, 8),
    **dict.fromkeys(("re", "rre", "repkt"), (2, 10, 1, 1)),
    **dict.fromkeys(("res", "rres", "respkt"), (2, 10, 2, 10)),
    "recpkt": (2, 10, 2, 2),
    "recspkt": (2, 10, 3, 10),
}
"""Fewest and most operands at `src_buff` and at `dst_buff`."""
FROM_REMOTE = {"get": 0, "rre": 1, "rres": 1}
"""Operations whose sources are remote from this one on."""
TO_REMOTE = {
    "put": 0,
    "pws": 0,
    "pwsf": 0,
    "flush": 0,
    "res": 1,
    "rres": 1,
    "ppkt": 0,
    "rppkt": 0,
    "respkt": 1,
    "recspkt": 2,
}
"""Operations whose destinations are remote from this one on."""
PAIRED = frozenset(("put", "pws", "pwsf", "get", "ppkt"))
"""Operations whose k-th source goes to the k-th destination."""


def is_paired(op: MscclppOp) -> bool:
    """Whether the k-th source goes to the k-th destination; of `rppkt` where it has more than one, as in 0.7."""
    return op.name in PAIRED or (op.name == "rppkt" and len(op.src_buff) > 1)


_WORDS = frozenset(("signal", "wait", "rlxsignal", "rlxwait"))
PUSHES = frozenset(("put", "pws", "pwsf", "ppkt", "rppkt"))
"""What a port channel moves: its k-th destination is written through its k-th channel."""


def is_push(op: MscclppOp) -> bool:
    """Whether a proxy moves what the operation names."""
    return op.by_port and op.name in PUSHES


_PORT_ONLY = frozenset(("pws", "pwsf", "flush"))
OVER_SWITCH = {"glres": "both", "gstore": "dst", "gstorepkt": "dst"}


def _check_op(path: str, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
    if op.name not in NAMES:
        raise CodecError(f"{path}.name: {op.name[:60]!r}: must be one of {', '.join(NAMES)}")
    if op.name == "pipeline" or op.iter_context is not None or op.ops:
        _check_pipeline(path, gpu, block, op)
    low, high, low_to, high_to = _SHAPES.get(op.name, (0, 0, 0, 0))
    if not (low <= len(op.src_buff) <= high and low_to <= len(op.dst_buff) <= high_to):
        rule = f"{op.name} must have {low} to {high} and {low_to} to {high_to}"
        raise CodecError(f"{path}: {len(op.src_buff)} sources, {len(op.dst_buff)} destinations: {rule}")
    if op.name in PAIRED and len(op.src_buff) != len(op.dst_buff):
        raise CodecError(f"{path}: {len(op.src_buff)} sources: must be as many as destinations")
    if op.reduce_op != "sum":
        raise CodecError(f"{path}.reduce_op: {op.reduce_op}: must be sum, whatever it is the executor adds up")
    if op.tbg_info is not None and op.tbg_info.tb_id >= op.tbg_info.tbg_size:
        raise CodecError(f"{path}.tbg_info.tb_id: {op.tbg_info.tb_id}: must be below {op.tbg_info.tbg_size}")
    if len({operand.size for operand in (*op.src_buff, *op.dst_buff)}) > 1:
        raise CodecError(f"{path}: operands must be of one size")
    for side, first, operands in (
        ("src_buff", FROM_REMOTE.get(op.name, 99), op.src_buff),
        ("dst_buff", TO_REMOTE.get(op.name, 99), op.dst_buff),
    ):
        for number, operand in enumerate(operands):
            switched = OVER_SWITCH.get(op.name) in ("both", side[:3])
            field = "switch_channel_id" if switched else "buffer_id" if number >= first else "type"
            given = [name for name in ("type", "buffer_id", "switch_channel_id") if getattr(operand, name) is not None]
            if given != [field]:
                raise CodecError(f"{path}.{side}[{number}]: must have {field}, and not {', '.join(given) or 'nothing'}")
            if field == "buffer_id" and block.buffer(operand.buffer_id or 0, op.reach) is None:
                raise CodecError(
                    f"{path}.{side}[{number}].buffer_id: {operand.buffer_id}: the block has no such buffer"
                )
            if field == "switch_channel_id" and block.channel("switch", operand.switch_channel_id or 0) is None:
                number_ = operand.switch_channel_id
                raise CodecError(f"{path}.{side}[{number}].switch_channel_id: {number_}: the block has no such channel")
    _check_ids(path, gpu, block, op)


def _check_pipeline(path: str, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
    if op.name != "pipeline" or op.iter_context is None or not op.ops:
        raise CodecError(f"{path}: {op.name}: pipelines, and no others, must have iter_context and ops")
    unit = op.iter_context.unit_size
    if unit % UNIT_STEP:
        raise CodecError(f"{path}.iter_context.unit_size: {unit}: must be a multiple of {UNIT_STEP}")
    for number, each in enumerate(op.ops):
        at = f"{path}.ops[{number}]"
        if each.name == "pipeline":
            raise CodecError(f"{at}.name: pipeline: must not be in a pipeline")
        if each.name.endswith("pkt"):
            raise CodecError(f"{at}.name: {each.name}: packets in a pipeline, all in every turn: is not judged")
        if each.tbg_info is not None:
            raise CodecError(f"{at}.tbg_info: turns go beyond a thread block's part: is not judged in a pipeline")
        _check_op(at, gpu, block, each)


def _check_ids(path: str, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
    """Channels, semaphores and barriers of an operation that waits or signals."""
    if op.name in _PORT_ONLY and not op.by_port:
        raise CodecError(f"{path}.channel_type: {op.channel_type}: must be port for {op.name}")
    if op.by_port and op.name not in (*_WORDS, *PUSHES, "flush"):
        raise CodecError(f"{path}.channel_type: port: {op.name} must not have it, the executor reads memory there")
    if op.name in _WORDS and op.channel_type not in ("memory", "port"):
        raise CodecError(f"{path}.channel_type: {op.channel_type}: must be memory or port, others are not judged")
    if op.name in _WORDS or op.by_port:
        for each in op.channel_ids:
            if block.channel(op.reach, each) is None:
                raise CodecError(f"{path}.channel_ids: {each}: the block has no such channel")
    if op.by_port and op.name in PUSHES:
        _check_push(path, gpu, block, op)
    if op.name in ("sem_acquire", "sem_release"):
        for each in op.semaphore_ids:
            if each >= len(gpu.semaphores):
                raise CodecError(f"{path}.semaphore_ids: {each}: must be below {len(gpu.semaphores)}")
    if op.name == "barrier" and (op.barrier_id is None or not op.num_threadblocks):
        raise CodecError(f"{path}: a barrier must have barrier_id and num_threadblocks")


def _check_push(path: str, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
    """What goes through a proxy: a channel for each destination, and to the GPU of that channel."""
    if len(op.channel_ids) != len(op.dst_buff):
        raise CodecError(f"{path}.channel_ids: {len(op.channel_ids)} channels: must be as many as destinations")
    for number, (operand, each) in enumerate(zip(op.dst_buff, op.channel_ids, strict=True)):
        buffer, channel = block.buffer(operand.buffer_id or 0, "port"), block.channel("port", each)
        assert buffer is not None and channel is not None
        rank, peer = gpu.remote_buffers[buffer].rank, gpu.peers("port")[channel]
        if rank != peer:
            raise CodecError(f"{path}.dst_buff[{number}]: a buffer of GPU {rank}: must be of GPU {peer}, its channel's")
    for number, operand in enumerate(op.src_buff):
        if op.name == "ppkt" and operand.type != "s":
            rule = "must be s, the executor takes what a port channel puts for packets"
            raise CodecError(f"{path}.src_buff[{number}].type: {operand.type}: {rule}")


def _object_lines(data: bytes) -> Iterator[tuple[tuple[object, ...], int]]:
    """The path of every object in valid JSON, such as ("gpus", 0), with the line on which it begins.

    >>> list(_object_lines(b'{"a": [{},' + bytes([10]) + b' {"b": {}}]}'))
    [((), 1), (('a', 0), 1), (('a', 1), 2), (('a', 1, 'b'), 2)]
    """
    at: list[int | str] = []  # of every open array the index, of every open object the key
    line = 1
    for match in _TOKEN.finditer(data):
        token = match[0]
        if token == b"\n":
            line += 1
        elif token in (b"{", b"["):
            if token == b"{":
                yield tuple(at), line
            at.append("" if token == b"{" else 0)
        elif token in (b"}", b"]"):
            at.pop()
        elif token != b",":
            if at and isinstance(at[-1], str):
                at[-1] = token[1:-1].decode("utf-8", "replace")
        elif isinstance(at[-1], int):
            at[-1] += 1
