"""Files of plans and transfers: exact there and back, and everything else refused with the path to the field."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optcc import codec
from optcc.arrays import Lists, column
from optcc.codec import read_plan, read_transfers, write_plan, write_transfers
from optcc.collective import COLLECTIVES, DTYPE_BYTES, REDUCTIONS, ROOTED, Collective
from optcc.errors import CodecError, PlanError
from optcc.plan import FORMAT, KINDS, RECV, RECV_REDUCE_SEND, SEND, Channel, Plan
from optcc.schedule import COPY, OPS, REDUCE
from optcc.timing import MODELS, Model
from optcc.transfers import Transfers

TRANSFER_COLUMNS = ("src", "dst", "op", "src_offset", "dst_offset", "bytes", "segment", "stage", "line")
PLAN_COLUMNS = (
    *("lane_rank", "kind", "in_channel", "out_channel", "src_offset", "dst_offset", "bytes"),
    *("recv_transfer", "send_transfer"),
)


def halves(scratch_bytes: int = 0) -> Transfers:
    """AllReduce of four float32 over two ranks, which swap their halves."""
    return Transfers(
        collective=Collective("allreduce", 2),
        reduction="sum",
        dtype="float32",
        size_bytes=16,
        scratch_bytes=scratch_bytes,
        stages=("reduce-scatter", "all-gather"),
        src=column([0, 1, 1, 0]),
        dst=column([1, 0, 0, 1]),
        op=column([REDUCE, REDUCE, COPY, COPY]),
        src_offset=column([0, 8, 0, 8]),
        dst_offset=column([0, 8, 0, 8]),
        bytes=column([8, 8, 8, 8]),
        segment=column([0, 0, 0, 0]),
        stage=column([0, 0, 1, 1]),
        line=column([30, 30, 32, 32]),
        after=Lists.of([[], [], [0], [1]]),
        order=Lists.of([[], [], [1], [0]]),
    )


def two_ranks() -> Plan:
    """A plan for `halves`; rank 1 has a second lane with nothing in it."""
    return Plan(
        name="halves",
        transfers=halves(),
        channels=(Channel(0, 1, 2), Channel(1, 0, 1)),
        lane_rank=column([0, 1, 1]),
        lanes=Lists.of([[0, 1, 2], [3, 4, 5], []]),
        kind=column([SEND, RECV_REDUCE_SEND, RECV] * 2),
        in_channel=column([-1, 1, 1, -1, 0, 0]),
        out_channel=column([0, 0, -1, 1, 1, -1]),
        src_offset=column([0, -1, -1, 8, -1, -1]),
        dst_offset=column([-1, 8, 0, -1, 0, 8]),
        bytes=column([8] * 6),
        recv_transfer=column([-1, 1, 2, -1, 0, 3]),
        send_transfer=column([0, 3, -1, 1, 2, -1]),
        after=Lists.of([[], [], [0], [], [], [3, 4]]),
    )


def same_transfers(a: Transfers, b: Transfers) -> bool:
    """Equal in everything, the author's lines included."""
    heads = [(t.collective, t.reduction, t.dtype, t.size_bytes, t.scratch_bytes, t.stages) for t in (a, b)]
    return (
        heads[0] == heads[1]
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in TRANSFER_COLUMNS)
        and list(a.after) == list(b.after)
        and list(a.order) == list(b.order)
    )


def same_plans(a: Plan, b: Plan) -> bool:
    """Equal in everything."""
    return (
        (a.name, a.channels, a.digest, a.ports) == (b.name, b.channels, b.digest, b.ports)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in PLAN_COLUMNS)
        and list(a.lanes) == list(b.lanes)
        and list(a.after) == list(b.after)
        and same_transfers(a.transfers, b.transfers)
    )


PLAN = two_ranks()
PLAN_BYTES = write_plan(PLAN)
TRANSFERS_BYTES = write_transfers(halves())


def refusal(data: bytes) -> str:
    """The message with which `read_plan` refuses `data`."""
    with pytest.raises(CodecError) as caught:
        read_plan(data)
    return str(caught.value)


def edited(*path: str | int, value: object) -> bytes:
    """The plan's file with the value at `path` replaced."""
    document = json.loads(PLAN_BYTES)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(document).encode() + b"\n"


def test_a_plan_comes_back_the_same() -> None:
    again = read_plan(PLAN_BYTES)
    assert same_plans(again, PLAN)
    assert write_plan(again) == PLAN_BYTES


@pytest.mark.parametrize("ports", MODELS)
def test_a_plan_may_name_the_ports_that_it_is_ordered_for(ports: Model) -> None:
    """No run depends on them, so its digest is the same; a file that lost or changed them is found out."""
    plan = replace(PLAN, ports=ports)
    data = write_plan(plan)
    assert plan.digest == PLAN.digest
    assert same_plans(read_plan(data), plan)
    document = json.loads(data)
    assert document["ports"] == ports
    assert "ports" not in json.loads(PLAN_BYTES)
    del document["ports"]
    for other in ({}, {"ports": MODELS[MODELS.index(ports) - 1]}):
        assert refusal(json.dumps(document | other).encode() + b"\n").startswith("$.origin_digest")


def test_writing_changes_nothing() -> None:
    plan = two_ranks()
    before = plan.digest
    write_plan(plan)
    write_transfers(plan.transfers)
    assert same_plans(plan, two_ranks())
    assert plan.digest == before


def test_a_plan_without_instructions() -> None:
    """One rank has nothing to do."""
    empty: dict[str, Any] = dict.fromkeys((*TRANSFER_COLUMNS,), column([]))
    none = Lists.of([])
    transfers = Transfers(Collective("allreduce", 1), "sum", "int32", 0, 0, (), **empty, after=none, order=none)
    columns: dict[str, Any] = dict.fromkeys(PLAN_COLUMNS, column([]))
    plan = Plan(name="nothing", transfers=transfers, channels=(), lanes=none, after=none, **columns)
    assert same_plans(read_plan(write_plan(plan)), plan)


def test_layout_of_the_file_does_not_matter() -> None:
    """Another program may have written it: spaces and the sequence of keys are free."""
    document = dict(reversed(json.loads(PLAN_BYTES).items()))
    assert same_plans(read_plan(json.dumps(document, indent=3).encode() + b"\n"), PLAN)


def test_an_instruction_is_a_line_of_named_fields() -> None:
    lines = PLAN_BYTES.decode().splitlines()
    assert (
        '{"id":1,"kind":"receive-reduce-send","bytes":8,"after":[],"in_channel":1,"out_channel":0,"dst_offset":8,'
        '"recv_transfer":1,"send_transfer":3},' in lines
    )
    assert '{"src":0,"dst":1,"slots":2},' in lines


def test_the_file_lists_the_names_that_the_nouns_know() -> None:
    for names, literal in (
        (KINDS, codec._Kind),
        (OPS, codec._Op),
        (MODELS, codec._Ports),
        ((*COLLECTIVES, codec.CUSTOM), codec._CollectiveName),
        (REDUCTIONS, codec._Reduction),
        (tuple(DTYPE_BYTES), codec._Dtype),
    ):
        assert get_args(literal) == names
    assert FORMAT == "optcc-plan/1"


def test_the_examples_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text(encoding="utf-8")
    plan, transfers = (block.encode() for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    assert write_plan(read_plan(plan)) == plan
    assert write_transfers(read_transfers(transfers)) == transfers
    with pytest.raises(CodecError):
        read_plan(transfers)


@pytest.mark.parametrize("name", ["ring", "optcc"])
def test_compiled_plans_come_back_the_same(name: str) -> None:
    from optcc.compiler import compile_schedule, plan_transfers
    from optcc.planner import find_schedule
    from optcc.topology import Topology

    topology = Topology.parse("5@50GB/s,1=25GB/s")
    schedule = find_schedule(name).build(topology, 3)
    plan = compile_schedule(schedule, size_bytes=4 * 1021, dtype="int32", reduction="max", topology=topology)
    assert same_plans(read_plan(write_plan(plan)), plan)
    transfers = plan_transfers(plan)
    again = read_transfers(write_transfers(transfers))
    used = tuple(dict.fromkeys(transfers.stages[stage] for stage in transfers.stage.tolist()))
    assert again.stages == used
    assert same_transfers(again, replace(transfers, line=again.line, stage=again.stage, stages=used))


INSTRUCTION = ("ranks", 1, "lanes", 0, 1)


@pytest.mark.battery(34)
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "optcc-plan/2", '$.format: "optcc-plan/2": must be "optcc-plan/1"'),
        ((*INSTRUCTION, "bytes"), -4, "$.ranks[1].lanes[0][1].bytes: -4: must be an integer >= 1"),
        ((*INSTRUCTION, "bytes"), 2**70, f"$.ranks[1].lanes[0][1].bytes: {2**70}: must be an integer <= {2**60}"),
        ((*INSTRUCTION, "bytes"), 8.0, "$.ranks[1].lanes[0][1].bytes: 8.0: must be an integer"),
        ((*INSTRUCTION, "bytes"), "8", '$.ranks[1].lanes[0][1].bytes: "8": must be an integer'),
        ((*INSTRUCTION, "bytes"), True, "$.ranks[1].lanes[0][1].bytes: true: must be an integer"),
        ((*INSTRUCTION, "bytes"), None, "$.ranks[1].lanes[0][1].bytes: null: must be an integer"),
        ((*INSTRUCTION, "bytes"), float("nan"), "$.ranks[1].lanes[0][1].bytes: NaN: must be an integer"),
        ((*INSTRUCTION, "bytes"), float("-inf"), "$.ranks[1].lanes[0][1].bytes: -Infinity: must be an integer"),
        ((*INSTRUCTION, "bytes"), {}, "$.ranks[1].lanes[0][1].bytes: an object: must be an integer"),
        ((*INSTRUCTION, "src_offset"), -1, "$.ranks[1].lanes[0][1].src_offset: -1: must be an integer >= 0"),
        ((*INSTRUCTION, "kind"), "recv", '$.ranks[1].lanes[0][1].kind: "recv": must be one of "send", "receive", '),
        ((*INSTRUCTION, "hint"), 1, "$.ranks[1].lanes[0][1].hint: unknown key: must be one of id, kind, "),
        ((*INSTRUCTION, "a b"), 1, '$.ranks[1].lanes[0][1]["a b"]: unknown key'),
        ((*INSTRUCTION, "id"), 5, "$.ranks[1].lanes[0][1].id: 5: must be 4"),
        ((*INSTRUCTION, "after"), [0, "1"], '$.ranks[1].lanes[0][1].after[1]: "1": must be an integer'),
        (("ranks", 1, "rank"), 0, "$.ranks[1].rank: 0: must be 1"),
        (("ranks", 0, "lanes"), 3, "$.ranks[0].lanes: 3: must be an array"),
        (("ranks", 0, "lanes", 0), {}, "$.ranks[0].lanes[0]: an object: must be an array"),
        (("ranks", 0, "lanes", 0, 0), [], "$.ranks[0].lanes[0][0]: an array of 0: must be an object"),
        (("ranks",), [], "$.ranks: an array of 0: must have 2 ranks"),
        (("collective", "ranks"), 10**9, "$.collective.ranks: 1000000000: must be an integer <= 65536"),
        (("collective", "root"), 2, "$: root 2: must be a rank below 2"),
        (("size_bytes",), 15, "$: size 15 B: must be a whole number of float32 elements of 4 B"),
        (("ports",), "open", '$.ports: "open": must be one of "fifo", "exclusive", "fair"'),
        (("ports",), "", '$.ports: "": must be one of "fifo", "exclusive", "fair"'),
        (("ports",), None, '$.ports: null: must be one of "fifo", "exclusive", "fair"'),
        (("name",), "x" * 2000, f'$.name: "{"x" * 56}...: must be a string of length <= 1000'),
        (("stages", 1), "reduce-scatter", '$.stages[1]: "reduce-scatter": must be there once'),
        (("transfers", 2, "stage"), "gather", '$.transfers[2].stage: "gather": must be one of $.stages'),
        (("transfers", 2, "id"), 0, "$.transfers[2].id: 0: must be 2"),
        (("transfers", 2, "op"), "add", '$.transfers[2].op: "add": must be one of "reduce", "copy"'),
        (("transfers", 2, "after"), [9], "$: transfers: after must name transfers below 4"),
        (("channels", 0, "dst"), 0, "$: channel 0->0: src and dst must be two ranks below 2"),
        (("channels", 0, "slots"), 0, "$.channels[0].slots: 0: must be an integer >= 1"),
        (("channels", 0, "slots"), 3, '$.digest: "'),
        (("digest",), "0" * 64, f'$.digest: "{"0" * 64}": must be the digest of the content, "{PLAN.digest}"'),
        (("digest",), "abc", "$.digest: "),
        (("name",), "other", '$.origin_digest: "'),
        (("transfers", 3, "order"), [], '$.origin_digest: "'),
        (("transfers", 3, "after"), [0], '$.origin_digest: "'),
        (("transfers", 3, "line"), 1, '$.origin_digest: "'),
        (("transfers", 3, "bytes"), 4, '$.digest: "'),
    ],
)
def test_what_is_wrong_is_named_with_its_path(path: tuple[str | int, ...], value: object, message: str) -> None:
    assert refusal(edited(*path, value=value)).startswith(message)


def test_a_missing_key_is_named() -> None:
    document = json.loads(PLAN_BYTES)
    del document["ranks"][1]["lanes"][0][1]["bytes"]
    assert refusal(json.dumps(document).encode() + b"\n") == "$.ranks[1].lanes[0][1].bytes: missing: must be given"


def test_a_field_that_the_kind_needs() -> None:
    document = json.loads(PLAN_BYTES)
    del document["ranks"][1]["lanes"][0][1]["dst_offset"]
    message = refusal(json.dumps(document).encode() + b"\n")
    assert message == "$: instruction 4 (receive-reduce-send): dst_offset must be given"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"id":4,', b'"id":4,"id":4,', "$.ranks[1].lanes[0][1].id: must be there once"),
        (b'"name": ', b'"name": "x",\n"name": ', "$.name: must be there once"),
        (b'"slots":1', b'"slots":-1,"slots":1', "$.channels[1].slots: must be there once"),
        (b'"slots":1', b'"slots":1,"sl\\u006fts":1', "$.channels[1].slots: must be there once"),
        (b'"slots":1', b'"slots":1e999', "$.channels[1].slots: Infinity: must be an integer"),
        (b'"slots":1', b'"slots":1e0', "$.channels[1].slots: 1.0: must be an integer"),
        (b'"slots":1', b'"slots":' + b"9" * 5000, "$.channels[1].slots: "),
        (b'"slots":1', b'"slots":' + b"[" * 10**5, "$.channels[1].slots: "),
        (b'"slots":1', b'"slots":' + b"[" * 10**5 + b"]" * 10**5, "$.channels[1].slots: "),
        (b'"slots":1', b'"x":' + b'{"x":' * 10**5 + b"1" + b"}" * 10**5, "$.channels[1]: "),
        (b'"slots":1', b'"slots":01', "$: not JSON: "),
        (b'"halves"', b'"\xff"', "$: not UTF-8: "),
        (b'"halves"', b'"\\ud800"', "$: not JSON: "),
        (b"{\n", b"\xef\xbb\xbf{\n", "$: not JSON: "),
        (b"]\n}\n", b"]\n}{}\n", "$: not JSON: "),
        (b"]\n}\n", b"]\n}", "$: 1917 B without a line break at the end: must be the whole file"),
    ],
)
def test_what_is_not_this_format(old: bytes, new: bytes, message: str) -> None:
    assert PLAN_BYTES.count(old) == 1 or old == b"{\n"
    shown = re.sub(r"\d+ B without", "1917 B without", refusal(PLAN_BYTES.replace(old, new, 1)))
    assert shown.startswith(message)


@pytest.mark.parametrize("data", [b"", b"\n", b"null\n", b"[]\n", b"{}\n", b"[" * 10**6 + b"\n", b'"' * 3 + b"\n"])
def test_what_is_no_plan_at_all(data: bytes) -> None:
    assert refusal(data).startswith("$")


def test_a_file_that_is_too_long_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FILE_BYTES_MAX", 100)
    assert refusal(PLAN_BYTES) == f"$: {len(PLAN_BYTES)} B: must be at most 100 B"


@pytest.mark.battery(34)
def test_a_file_cut_anywhere_is_refused() -> None:
    for length in range(len(PLAN_BYTES)):
        assert refusal(PLAN_BYTES[:length]).startswith("$")


def test_what_could_not_be_read_is_not_written() -> None:
    for wrong, path in (
        (replace(PLAN, name="x" * 1001), "$.name: "),
        (replace(PLAN, name="\ud800"), "$: a name has a character that UTF-8 cannot say"),
        (replace(PLAN, transfers=replace(PLAN.transfers, line=column([1, -2, 3, 4]))), "$.transfers[1].line: -2"),
        (replace(PLAN, transfers=replace(PLAN.transfers, stages=("a", "a"))), "$.stages[1]: "),
    ):
        with pytest.raises(CodecError, match=f"^{re.escape(path)}"):
            write_plan(wrong)


def test_lanes_must_be_sorted_by_rank() -> None:
    """Else the numbers of the instructions would change when a plan is written."""
    with pytest.raises(PlanError, match="lanes must be sorted by rank"):
        replace(
            PLAN,
            lane_rank=column([1, 0]),
            lanes=Lists.of([[0], [1]]),
            kind=column([RECV, SEND]),
            in_channel=column([0, -1]),
            out_channel=column([-1, 0]),
            src_offset=column([-1, 0]),
            dst_offset=column([0, -1]),
            bytes=column([8, 8]),
            recv_transfer=column([0, -1]),
            send_transfer=column([-1, 0]),
            after=Lists.of([[], []]),
        )


# The transfers form


def transfers_refusal(data: bytes) -> str:
    """The message with which `read_transfers` refuses `data`."""
    with pytest.raises(CodecError) as caught:
        read_transfers(data)
    return str(caught.value)


def test_transfers_come_back_without_the_authors_lines() -> None:
    again = read_transfers(TRANSFERS_BYTES)
    assert same_transfers(again, replace(halves(), line=column([0] * 4)))
    assert write_transfers(again) == TRANSFERS_BYTES


def test_the_neutral_form_has_exactly_the_promised_keys() -> None:
    head, *rows = map(json.loads, write_transfers(halves(scratch_bytes=8)).decode().splitlines())
    assert head == {
        **{"format": "optcc-transfers/1", "ranks": 2, "collective": "allreduce", "reduction": "sum"},
        **{"dtype": "float32", "size_bytes": 16, "scratch_bytes": 8},
    }
    assert rows[2] == {
        **{"id": 2, "src": 1, "dst": 0, "op": "copy", "src_offset": 0, "dst_offset": 0, "bytes": 8},
        **{"segment": 0, "stage": "all-gather", "after": [0], "order": [1]},
    }
    assert len(rows) == 4


@pytest.mark.parametrize("name", COLLECTIVES)
def test_only_a_rooted_collective_has_a_root(name: str) -> None:
    rooted = name in ROOTED
    transfers = replace(halves(), collective=Collective(name, 2, root=1 if rooted else 0))
    data = write_transfers(transfers)
    assert (b'"root":1' in data) == rooted
    assert read_transfers(data).collective == transfers.collective
    if rooted:
        message = transfers_refusal(data.replace(b',"root":1', b""))
        assert message == f"line 1: $.root: must be given for {name}"
    else:
        message = transfers_refusal(data.replace(b',"size', b',"root":0,"size', 1))
        assert message == f"line 1: $.root: must be absent for {name}"


@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (1, b"transfers/1", b"transfers/2", '$.format: "optcc-transfers/2": must be "optcc-transfers/1"'),
        (1, b'"ranks":2', b'"ranks":0', "$.ranks: 0: must be an integer >= 1"),
        (1, b'"ranks":2', b'"ranks":2,"x":1', "$.x: unknown key: must be one of format, ranks, "),
        (1, b'"ranks":2', b'"ranks":2,"ranks":2', "$.ranks: must be there once"),
        (1, b'"ranks":2', b'"ranks":1', "$: transfers: src 0..1: must be from 0 to 0"),
        (1, b'"size_bytes":16', b'"size_bytes":15', "$: size 15 B: must be a whole number of float32 elements"),
        (3, b'"bytes":8', b'"bytes":-8', "$.bytes: -8: must be an integer >= 1"),
        (3, b'"bytes":8', b'"bytes":NaN', "$.bytes: NaN: must be an integer"),
        (3, b'"bytes":8', b'"bytes":8,"bytes":4', "$.bytes: must be there once"),
        (3, b'"op":"reduce"', b'"op":"add"', '$.op: "add": must be one of "reduce", "copy"'),
        (3, b'"op":"reduce",', b"", "$.op: missing: must be given"),
        (3, b'"id":1', b'"id":2', "$.id: 2: must be 1"),
        (3, b'"after":[]', b'"after":[true]', "$.after[0]: true: must be an integer"),
        (3, b'"after":[]', b'"after":' + b"[" * 10**5, "$.after"),
        (4, b"}", b"", "$: not JSON: "),
        (4, b"}", b"}\n", None),
        (4, b"}", b"} {}", "$: not JSON: "),
        (5, b'"line', b"", None),
    ],
)
def test_what_is_wrong_in_transfers_is_named_with_its_line(
    line: int, old: bytes, new: bytes, message: str | None
) -> None:
    lines = TRANSFERS_BYTES.split(b"\n")
    if message is None:
        lines.insert(line, b"")  # An empty line is no transfer.
        assert transfers_refusal(b"\n".join(lines)).startswith(f"line {line + 1}: $: not JSON: ")
        return
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    assert transfers_refusal(b"\n".join(lines)).startswith(f"line {line}: {message}")


def test_transfers_cut_inside_a_line_are_refused() -> None:
    for length in range(len(TRANSFERS_BYTES)):
        if not TRANSFERS_BYTES[:length].endswith(b"\n"):
            assert transfers_refusal(TRANSFERS_BYTES[:length]).startswith("line ")


# Fuzz: whatever is done to a file, it is refused with a CodecError or still says the same


def holds(data: bytes) -> None:
    """`data` is either refused, and by its path, or it is the same plan."""
    complaint = None
    try:
        plan = read_plan(data)
    except CodecError as error:
        complaint = str(error)
    assert same_plans(plan, PLAN) if complaint is None else complaint.startswith("$")


@given(st.lists(st.tuples(st.integers(0, len(PLAN_BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_fuzz_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(PLAN_BYTES)
    for place, byte in changes:
        data[place] = byte
    holds(bytes(data))


@given(st.integers(0, len(PLAN_BYTES)), st.integers(0, len(PLAN_BYTES)), st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_fuzz_pieces(start: int, stop: int, piece: bytes) -> None:
    holds(PLAN_BYTES[:start] + piece + PLAN_BYTES[stop:])


NUMBERS = [match.span() for match in re.finditer(rb"(?<=[:\[,])-?\d+(?=[,}\]])", PLAN_BYTES)]
STRANGE = ["NaN", "Infinity", "-Infinity", "1e999", "-1", str(2**70), str(2**63), "0.5", '"1"', "null", "true", "{}"]


@pytest.mark.battery(34)
@given(
    st.sampled_from(NUMBERS), st.sampled_from(STRANGE) | st.integers(-(2**65), 2**65).map(str) | st.just("[" * 10**5)
)
@settings(max_examples=500, deadline=None)
def test_fuzz_numbers(span: tuple[int, int], number: str) -> None:
    holds(PLAN_BYTES[: span[0]] + number.encode() + PLAN_BYTES[span[1] :])


KEYS = list(re.finditer(rb'("\w+"):\s?("[^"]*"|\d+|\[\]|\[\d+\])', PLAN_BYTES))


@pytest.mark.battery(34)
@given(st.sampled_from(KEYS), st.sampled_from([b"0", b'"x"', b"[]", b"null", b"NaN", b"1", b"{}"]) | st.none())
@settings(max_examples=300, deadline=None)
def test_fuzz_keys_twice(match: re.Match[bytes], value: bytes | None) -> None:
    again = match[0] if value is None else match[1] + b":" + value
    message = refusal(PLAN_BYTES[: match.start()] + again + b"," + PLAN_BYTES[match.start() :])
    assert value == b"NaN" or message.endswith(f".{match[1].decode()[1:-1]}: must be there once")


@pytest.mark.battery(34)
@given(st.integers(0, len(PLAN_BYTES)), st.integers(1, 10**5), st.sampled_from([b"[", b'{"a":', b'{"ranks":[']))
@settings(max_examples=100, deadline=None)
def test_fuzz_nesting(place: int, depth: int, opening: bytes) -> None:
    holds(PLAN_BYTES[:place] + opening * depth + PLAN_BYTES[place:])


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_fuzz_anything(data: bytes) -> None:
    assert refusal(data + b"\n").startswith("$")


@given(st.lists(st.tuples(st.integers(0, len(TRANSFERS_BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_fuzz_transfers(changes: list[tuple[int, int]]) -> None:
    """No digest here: what is still a file of this form is read."""
    data = bytearray(TRANSFERS_BYTES)
    for place, byte in changes:
        data[place] = byte
    complaint = "line"
    try:
        read_transfers(bytes(data))
    except CodecError as error:
        complaint = str(error)
    assert complaint.startswith("line")
