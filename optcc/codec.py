"""Plans and transfers as files: `optcc-plan/1` (strict JSON) and `optcc-transfers/1` (JSON lines).

Both formats are written field by field in docs/plan-format.md. A file is data from a stranger: every value has a type
and a bound, a key is known and stands there once, nothing is converted to what it is not, and whatever is wrong is a
CodecError that starts with the path to the field:

    $.ranks[2].lanes[0][5].bytes: -4: must be an integer >= 1
    line 12: $.op: "add": must be one of "reduce", "copy"

Writing checks its own output by the same rules, so that what cannot be read is not written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec

from optcc.arrays import Lists, column
from optcc.collective import RANKS_MAX, ROOTED, Collective, CollectiveCell
from optcc.errors import CodecError, OptccError
from optcc.plan import FORMAT, KINDS, Channel, Plan
from optcc.schedule import OPS
from optcc.strict_json import check_no_key_twice, decode, show
from optcc.transfers import Transfers
from optcc.units import SIZE_BYTES_MAX

TRANSFERS_FORMAT = "optcc-transfers/1"
FILE_BYTES_MAX = 2**30
NAME_LENGTH_MAX = 1000
CUSTOM = "custom"
"""In files, the name of a collective that is declared by its cells; `called` is its own."""

_Index = Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=SIZE_BYTES_MAX)]
_RankCount = Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_CollectiveName = Literal[
    "allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall", "gather", "scatter", "custom"
]
_Reduction = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]
_Dtype = Literal["float32", "float64", "int32", "int64", "float16", "bfloat16", "int8", "uint8"]
_Op = Literal["reduce", "copy"]
_Ports = Literal["fifo", "exclusive", "fair"]
_Kind = Literal["send", "receive", "receive-reduce", "receive-reduce-send", "receive-copy-send", "copy", "reduce"]
_Share = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,40}(/[1-9][0-9]{0,39})?$")]
_ABSENT: Any = ""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An object of a file. A field with the default -1 or `_ABSENT` may be absent; these are out of its bounds."""


class _Cell(_Strict):
    share: _Share
    before: list[_Index]
    after: list[tuple[_Index, list[_Index]]]


class _Collective(_Strict):
    name: _CollectiveName
    ranks: _RankCount
    root: _Index
    called: _Name = _ABSENT
    cells: list[_Cell] = []


class _Channel(_Strict):
    src: _Index
    dst: _Index
    slots: _Positive


class _Transfer(_Strict):
    id: _Index
    src: _Index
    dst: _Index
    op: _Op
    src_offset: _Index
    dst_offset: _Index
    bytes: _Positive
    segment: _Index
    stage: _Name
    after: list[_Index]
    order: list[_Index]


class _PlanTransfer(_Transfer, kw_only=True):
    line: _Index


class _Instruction(_Strict):
    id: _Index
    kind: _Kind
    bytes: _Positive
    after: list[_Index]
    in_channel: _Index = -1
    out_channel: _Index = -1
    src_offset: _Index = -1
    dst_offset: _Index = -1
    recv_transfer: _Index = -1
    send_transfer: _Index = -1


class _Rank(_Strict):
    rank: _Index
    lanes: list[list[_Instruction]]


class _Head(_Strict, kw_only=True):
    format: Literal["optcc-plan/1"]
    digest: _Digest
    origin_digest: _Digest
    name: _Name
    collective: _Collective
    reduction: _Reduction
    dtype: _Dtype
    size_bytes: _Index
    scratch_bytes: _Index
    ports: _Ports = _ABSENT
    stages: list[_Name]


class _PlanFile(_Head, kw_only=True):
    channels: list[_Channel]
    transfers: list[_PlanTransfer]
    ranks: list[_Rank]


class _TransfersHead(_Strict):
    format: Literal["optcc-transfers/1"]
    ranks: _RankCount
    collective: _CollectiveName
    reduction: _Reduction
    dtype: _Dtype
    size_bytes: _Index
    scratch_bytes: _Index
    root: _Index = -1
    called: _Name = _ABSENT
    cells: list[_Cell] = []


_PLAN_DECODER = msgspec.json.Decoder(_PlanFile)
_HEAD_DECODER = msgspec.json.Decoder(_TransfersHead)
_TRANSFER_DECODER = msgspec.json.Decoder(_Transfer)


def write_plan(plan: Plan) -> bytes:
    """`plan` as an `optcc-plan/1` file, one channel, transfer or instruction a line.

    `read_plan(write_plan(plan))` is the same plan, column by column.
    Raises CodecError if the plan is one that the format cannot say: a stage that is
    named twice, a number or a name beyond the bounds.
    """
    transfers = plan.transfers
    _check_stages(transfers.stages)
    head = _Head(
        format="optcc-plan/1",
        digest=plan.digest,
        origin_digest=_origin_digest(plan),
        name=plan.name,
        collective=_Collective(
            _file_name(transfers.collective),
            plan.n_ranks,
            transfers.collective.root,
            *_declaration(transfers.collective),
        ),
        reduction=_known(transfers.reduction),
        dtype=_known(transfers.dtype),
        size_bytes=transfers.size_bytes,
        scratch_bytes=transfers.scratch_bytes,
        ports=plan.ports or _ABSENT,
        stages=list(transfers.stages),
    )
    channels = (_Channel(channel.src, channel.dst, channel.slots) for channel in plan.channels)
    rows = (
        _PlanTransfer(*fields, line=line)
        for fields, line in zip(_transfer_rows(transfers), transfers.line.tolist(), strict=True)
    )
    try:
        said = {key: getattr(head, key) for key in _Head.__struct_fields__ if getattr(head, key) is not _ABSENT}
        fields = b",\n".join(_encode(key) + b": " + _encode(value) for key, value in said.items())
        data = b"{\n%b,\n%b,\n%b,\n%b\n}\n" % (
            fields,
            _array(b'"channels": ', map(_encode, channels)),
            _array(b'"transfers": ', map(_encode, rows)),
            _array(b'"ranks": ', _encoded_ranks(plan)),
        )
    except UnicodeEncodeError as error:
        raise CodecError(f"$: a name has a character that UTF-8 cannot say: {error}") from None
    decode(data, _PLAN_DECODER)
    return data


def read_plan(data: bytes) -> Plan:
    """The plan of an `optcc-plan/1` file.

    Raises CodecError, its message starting with the path to the field, if the file breaks the format, if it says
    something that no plan can be, or if its digests are not those of its content.
    """
    _check_ends(data, "$")
    file = decode(data, _PLAN_DECODER)
    check_no_key_twice(data, _PlanFile, "$")
    _check_stages(file.stages)
    for index, row in enumerate(file.transfers):
        _check_id(f"$.transfers[{index}].id", row.id, index)
        if row.stage not in file.stages:
            raise CodecError(f"$.transfers[{index}].stage: {show(row.stage)}: must be one of $.stages")
    if len(file.ranks) != file.collective.ranks:
        raise CodecError(f"$.ranks: an array of {len(file.ranks)}: must have {file.collective.ranks} ranks")
    instructions: list[_Instruction] = []
    for rank, entry in enumerate(file.ranks):
        _check_id(f"$.ranks[{rank}].rank", entry.rank, rank)
        for lane, lane_instructions in enumerate(entry.lanes):
            for position, each in enumerate(lane_instructions):
                _check_id(f"$.ranks[{rank}].lanes[{lane}][{position}].id", each.id, len(instructions))
                instructions.append(each)
    try:
        plan = _plan_of(file, instructions)
    except OptccError as error:
        raise CodecError(f"$: {error}") from None
    for path, given, found in (
        ("$.digest", file.digest, plan.digest),
        ("$.origin_digest", file.origin_digest, _origin_digest(plan)),
    ):
        if given != found:
            raise CodecError(f'{path}: "{given}": must be the digest of the content, "{found}"')
    return plan


def write_transfers(transfers: Transfers) -> bytes:
    """`transfers` in the neutral form: a header, then one transfer a line; all of it JSON.

    The form has no place for the author's lines (`line`), and of `stages` it keeps the names that are used.
    Raises CodecError if a number or a name is beyond the bounds of the form.
    """
    collective = transfers.collective
    called, cells = _declaration(collective)
    head = _TransfersHead(
        format="optcc-transfers/1",
        ranks=collective.n_ranks,
        collective=_file_name(collective),
        reduction=_known(transfers.reduction),
        dtype=_known(transfers.dtype),
        size_bytes=transfers.size_bytes,
        scratch_bytes=transfers.scratch_bytes,
        root=collective.root if collective.name in ROOTED else -1,
        called=called,
        cells=cells,
    )
    try:
        lines = [_encode(head), *(_encode(_Transfer(*fields)) for fields in _transfer_rows(transfers))]
    except UnicodeEncodeError as error:
        raise CodecError(f"line 1: $: a name has a character that UTF-8 cannot say: {error}") from None
    _decode_lines(lines)
    return b"\n".join((*lines, b""))


def read_transfers(data: bytes) -> Transfers:
    """The transfers of an `optcc-transfers/1` file; `line` is 0 throughout, `stages` stand in order of appearance.

    A file that lost whole lines at its end is still a file of this form, only of another schedule: verify what you
    read. Raises CodecError, its message starting with the line and the path to the field, for anything else.
    """
    _check_ends(data, "line 1: $")
    lines = data.split(b"\n")[:-1]
    head, rows = _decode_lines(lines)
    for number, line in enumerate(lines, start=1):
        check_no_key_twice(line, _TransfersHead if number == 1 else _Transfer, f"line {number}: $")
    if (head.root >= 0) != (head.collective in ROOTED):
        rule = "must be given" if head.collective in ROOTED else "must be absent"
        raise CodecError(f"line 1: $.root: {rule} for {head.collective}")
    for index, row in enumerate(rows):
        _check_id(f"line {index + 2}: $.id", row.id, index)
    try:
        collective = _collective_of(head.collective, head.ranks, max(head.root, 0), head.called, head.cells)
        return _transfers_of(head, collective, tuple(dict.fromkeys(row.stage for row in rows)), rows)
    except OptccError as error:
        raise CodecError(f"line 1: $: {error}") from None


def _file_name(collective: Collective) -> Any:
    """The name of a collective in files."""
    return CUSTOM if collective.cells else collective.name


def _declaration(collective: Collective) -> tuple[Any, list[_Cell]]:
    """What a file says of a declared collective beside its name: what it is called, and its cells."""
    cells = [
        _Cell(str(cell.share), list(cell.before), [(rank, list(ranks)) for rank, ranks in cell.after])
        for cell in collective.cells
    ]
    return (collective.name if cells else _ABSENT), cells


def _collective_of(name: str, n_ranks: int, root: int, called: str, cells: Sequence[_Cell]) -> Collective:
    """The collective that a file says; raises CodecError where the cells do not go with its name, InputError as it."""
    if (name == CUSTOM) != bool(cells) or bool(called) != bool(cells):
        raise CodecError(f"collective {name}: cells and called: must be given for {CUSTOM}, and absent for the others")
    declared = (
        CollectiveCell(
            Fraction(cell.share), tuple(cell.before), tuple((rank, tuple(ranks)) for rank, ranks in cell.after)
        )
        for cell in cells
    )
    return Collective(called if cells else name, n_ranks, root, tuple(declared))


def _known(name: str) -> Any:
    """A name that the nouns have checked, where the file's type lists the same names one by one."""
    return name


_ENCODER = msgspec.json.Encoder()


def _encode(value: object) -> bytes:
    return _ENCODER.encode(value)


def _array(before: bytes, lines: Iterable[bytes]) -> bytes:
    """A JSON array with one entry a line."""
    body = b",\n".join(lines)
    return before + (b"[\n" + body + b"\n]" if body else b"[]")


def _transfer_rows(transfers: Transfers) -> Iterable[tuple[Any, ...]]:
    """The fields of `_Transfer`, one tuple a transfer."""
    return zip(
        range(len(transfers)),
        transfers.src.tolist(),
        transfers.dst.tolist(),
        (OPS[op] for op in transfers.op.tolist()),
        transfers.src_offset.tolist(),
        transfers.dst_offset.tolist(),
        transfers.bytes.tolist(),
        transfers.segment.tolist(),
        (transfers.stages[stage] for stage in transfers.stage.tolist()),
        transfers.after,
        transfers.order,
        strict=True,
    )


def _encoded_ranks(plan: Plan) -> list[bytes]:
    """`{"rank": r, "lanes": [...]}` for every rank."""
    rows = zip(
        range(len(plan)),
        (KINDS[kind] for kind in plan.kind.tolist()),
        plan.bytes.tolist(),
        plan.after,
        plan.in_channel.tolist(),
        plan.out_channel.tolist(),
        plan.src_offset.tolist(),
        plan.dst_offset.tolist(),
        plan.recv_transfer.tolist(),
        plan.send_transfer.tolist(),
        strict=True,
    )
    lines = [_encode(_Instruction(*row)) for row in rows]
    lanes: list[list[bytes]] = [[] for _ in range(plan.n_ranks)]
    for rank, lane in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        lanes[rank].append(_array(b"", (lines[index] for index in lane)))
    return [b'{"rank":%d,%b}' % (rank, _array(b'"lanes":', own)) for rank, own in enumerate(lanes)]


def _plan_of(file: _PlanFile, instructions: Sequence[_Instruction]) -> Plan:
    """The plan that `file` says, `instructions` being all of its instructions in order."""
    head = file.collective
    collective = _collective_of(head.name, head.ranks, head.root, head.called, head.cells)
    lane_lengths = [len(lane) for entry in file.ranks for lane in entry.lanes]
    kind_number = {kind: number for number, kind in enumerate(KINDS)}
    return Plan(
        name=file.name,
        transfers=_transfers_of(
            file, collective, tuple(file.stages), file.transfers, [row.line for row in file.transfers]
        ),
        channels=tuple(Channel(channel.src, channel.dst, channel.slots) for channel in file.channels),
        lane_rank=column(entry.rank for entry in file.ranks for _ in entry.lanes),
        lanes=Lists(column(accumulate(lane_lengths, initial=0)), column(range(len(instructions)))),
        kind=column(kind_number[each.kind] for each in instructions),
        in_channel=column(each.in_channel for each in instructions),
        out_channel=column(each.out_channel for each in instructions),
        src_offset=column(each.src_offset for each in instructions),
        dst_offset=column(each.dst_offset for each in instructions),
        bytes=column(each.bytes for each in instructions),
        recv_transfer=column(each.recv_transfer for each in instructions),
        send_transfer=column(each.send_transfer for each in instructions),
        after=Lists.of([each.after for each in instructions]),
        ports=file.ports or None,
    )


def _transfers_of(
    head: _Head | _TransfersHead,
    collective: Collective,
    stages: tuple[str, ...],
    rows: Sequence[_Transfer],
    lines: Sequence[int] | None = None,
) -> Transfers:
    """The transfers that `rows` say; the author's lines are 0 where the file has none."""
    op_number = {op: number for number, op in enumerate(OPS)}
    stage_number = {stage: number for number, stage in enumerate(stages)}
    return Transfers(
        collective=collective,
        reduction=head.reduction,
        dtype=head.dtype,
        size_bytes=head.size_bytes,
        scratch_bytes=head.scratch_bytes,
        stages=stages,
        src=column(row.src for row in rows),
        dst=column(row.dst for row in rows),
        op=column(op_number[row.op] for row in rows),
        src_offset=column(row.src_offset for row in rows),
        dst_offset=column(row.dst_offset for row in rows),
        bytes=column(row.bytes for row in rows),
        segment=column(row.segment for row in rows),
        stage=column(stage_number[row.stage] for row in rows),
        line=column([0] * len(rows) if lines is None else lines),
        after=Lists.of([row.after for row in rows]),
        order=Lists.of([row.order for row in rows]),
    )


def _origin_digest(plan: Plan) -> str:
    """SHA-256 over what `Plan.digest` leaves out: names, ports, where the transfers come from and in which sequence.

    A plan that does not name its ports has the digest that it had before plans could.
    """
    t = plan.transfers
    head: dict[str, Any] = {"format": FORMAT, "name": plan.name, "stages": t.stages}
    if plan.ports is not None:
        head["ports"] = plan.ports
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for each in (t.segment, t.stage, t.line, t.after.starts, t.after.values, t.order.starts, t.order.values):
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each.astype("<i8").tobytes())
    return digest.hexdigest()


def _check_ends(data: bytes, path: str) -> None:
    """Refuses what is too long to look at, and what was cut after its last closing brace."""
    if len(data) > FILE_BYTES_MAX:
        raise CodecError(f"{path}: {len(data)} B: must be at most {FILE_BYTES_MAX} B")
    if not data.endswith(b"\n"):
        raise CodecError(f"{path}: {len(data)} B without a line break at the end: must be the whole file")


def _check_id(path: str, given: int, index: int) -> None:
    if given != index:
        raise CodecError(f"{path}: {given}: must be {index}, as numbers run from 0 without gaps")


def _check_stages(stages: Sequence[str]) -> None:
    """Transfers refer to a stage by its name, so a name must mean one stage."""
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        if stage in seen:
            raise CodecError(f"$.stages[{index}]: {show(stage)}: must be there once")
        seen.add(stage)


def _decode_lines(lines: Sequence[bytes]) -> tuple[_TransfersHead, list[_Transfer]]:
    head = decode(lines[0], _HEAD_DECODER, "line 1: $")
    try:
        return head, [_TRANSFER_DECODER.decode(line) for line in lines[1:]]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        for number, line in enumerate(lines[1:], start=2):
            decode(line, _TRANSFER_DECODER, f"line {number}: $")
        raise
