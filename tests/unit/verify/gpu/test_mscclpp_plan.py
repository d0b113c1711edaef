"""Execution plans of MSCCL++ as plans: how long they take by hand, that they move the same bytes, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from optcc import cli
from optcc.errors import CodecError, InputError, OptccError, PlanError
from optcc.export import write_mscclpp_json
from optcc.planner import build
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.gpu.mscclpp_plan import ITEM, STAGES, plan_of_mscclpp
from optcc.verify.plan import verify_plan
from tests.unit.verify.gpu.mscclpp_sample import both, plan
from tests.unit.verify.gpu.test_mscclpp import EXCHANGE, FAULTS, PACKETS, RIGHT, gather, summed

SIZE = 24_000
LATENCY_S = Fraction(1, 10**6)
WORD_S = ITEM / 1e9


def seconds(data: bytes, size: int = SIZE, *, latency_s: Fraction = Fraction(0)) -> float:
    """At 1 GB/s."""
    n_gpus = len(json.loads(data)["gpus"])
    topology = replace(Topology.parse(f"{n_gpus}@1GB/s"), latency_s=latency_s)
    return float(simulate(plan_of_mscclpp(data, size), topology, model="fifo").seconds)


@pytest.mark.parametrize(
    ("name", "data", "bytes_", "signals"),
    [
        ("all inputs, a signal before and one behind", both(EXCHANGE), SIZE, 2),
        ("half the output", gather(0, 1), SIZE // 2, 2),
        ("reading is asked for", RIGHT["get"], SIZE, 3),
        ("packets tell of themselves", both(PACKETS, proto="LL"), SIZE, 0),
        ("no signal before", both(EXCHANGE.replace("START ", "")), SIZE, 1),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_time_by_hand(name: str, data: bytes, bytes_: int, signals: int) -> None:
    """Messages one after the other; a latency for each, but that a signal behind a put follows it at once."""
    expected = bytes_ / 1e9 + signals * WORD_S
    assert seconds(data) == pytest.approx(expected), name
    latencies = 1 + signals - (b'"get"' not in data and signals > 0)
    assert seconds(data, latency_s=LATENCY_S) == pytest.approx(expected + latencies * float(LATENCY_S)), name


def test_three_gpus_share_ports() -> None:
    """Each sends its input twice: signals go to two peers too, those of the start one behind the other."""
    found = seconds(summed(*["re s0 s1 s2 > i0"] * 3), SIZE)
    assert found == pytest.approx(2 * SIZE / 1e9 + 4 * WORD_S)


def test_what_a_block_waits_for() -> None:
    """A block puts at once, or behind a signal that another block of its GPU has told it of."""
    told = "signal P; wait P; nop; sem_release 0|sem_acquire 0; nop; put i0 > SP.0"
    barrier = "signal P; wait P; barrier 0 2|barrier 0 2; put i0 > SP.0"
    before = "sem_release 0; signal P; wait P|sem_acquire 0; nop; put i0 > SP.0"
    for text, messages in ((told, 2), (barrier, 2), (before, 1), ("put i0 > SP.0", 1)):
        found = seconds(both(text, semaphores=[0]), latency_s=LATENCY_S)
        assert found == pytest.approx(SIZE / 1e9 + messages * float(LATENCY_S), abs=2 * WORD_S), text


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_becomes_a_plan_that_ends(name: str) -> None:
    made = plan_of_mscclpp(RIGHT[name], SIZE)
    properties = verify_plan(made).properties
    assert properties["matching"] == properties["deadlock"] == PROVED
    assert seconds(RIGHT[name]) >= (SIZE / 2 if name == "allgather" else SIZE) / 1e9


@pytest.mark.parametrize(
    "case",
    [("ring", 2), ("ring", 4), ("direct", 4), ("recursive-doubling", 4), ("direct-all-to-all", 3)],
    ids=str,
)
def test_an_exported_plan_moves_what_it_did(case: tuple[str, int]) -> None:
    """In a time of its plan, or longer: by signals, and where a block waits for all it has done."""
    name, ranks = case
    topology = Topology.parse(f"{ranks}@1GB/s")
    built = build(name, topology, 64 * 5040, segments=1, ports="fifo").plan
    back = plan_of_mscclpp(write_mscclpp_json(built), 64 * 5040)
    is_message = back.transfers.stage == STAGES.index("messages")
    moved = built.transfers.bytes[built.transfers.src != built.transfers.dst].sum()
    assert back.transfers.bytes[is_message].sum() == moved
    times = [simulate(each, topology, model="fifo").seconds for each in (built, back)]
    assert times[0] <= times[1] <= 1.01 * times[0]


def test_groups_of_blocks_share_a_transfer() -> None:
    text: dict[str, Any] = json.loads(both("START put i0 > SP.0; put i0 > SP.0; MEET re i0 s0 > i0"))
    for gpu in text["gpus"]:
        for number, at in enumerate((3, 4)):
            gpu["threadblocks"][0]["ops"][at]["tbg_info"] = {"tb_id": number, "tbg_size": 2}
    made = plan_of_mscclpp(json.dumps(text).encode(), SIZE)
    assert sorted(made.transfers.bytes[made.transfers.stage == 0].tolist()) == [SIZE // 2] * 4


def test_a_wrong_file_is_timed_or_stands() -> None:
    for fault in FAULTS:
        if fault.property in ("races", "result", "agreement") and fault.number != 27:
            size = 3 * SIZE
            assert seconds(fault.wrong, size) > 0
        elif fault.property in ("matching", "deadlock"):
            with pytest.raises(PlanError, match=fault.says):
                plan_of_mscclpp(fault.wrong, SIZE)


def test_what_cannot_be_timed_is_refused() -> None:
    for data, size, rule in (
        (both(EXCHANGE, chunks=2), 1_004, "must be a multiple of 8: the file has 2 chunks"),
        (both(EXCHANGE), 0, "must be a multiple of 4"),
        (both(EXCHANGE, min_message_size=512), 508, "must be from 512 to 18446744073709551615, as the file says"),
        (both(EXCHANGE, max_message_size=512), 516, "must be from 0 to 512"),
        (both(EXCHANGE, coll="send_recv"), 400, "collective send_recv: must be a known collective"),
    ):
        with pytest.raises(InputError, match=rule):
            plan_of_mscclpp(data, size)
    text = json.loads(both("START nop; MEET nop"))
    for gpu in text["gpus"]:
        groups = [{"size": 1, "ranks": [0, 1]}]
        gpu["channels"].append({"channel_type": "switch", "buffer_type": "i", "rank_groups": groups})
        gpu["threadblocks"][0]["channels"].append({"channel_type": "switch", "channel_ids": [0]})
    place = [{"switch_channel_id": 0, "index": 0, "size": 1}]
    text["gpus"][0]["threadblocks"][0]["ops"][3] = {"name": "glres", "src_buff": place, "dst_buff": place}
    with pytest.raises(InputError, match="line 1: glres: must be an operation without a switch"):
        plan_of_mscclpp(json.dumps(text).encode(), SIZE)
    with pytest.raises(PlanError, match="outside of s"):
        plan_of_mscclpp(both(EXCHANGE.replace("SP.0", "SP.4")), SIZE)
    for wrong in (b"{}", b"[", plan([["nop"]]).replace(b"nop", b"pipeline")):
        with pytest.raises(CodecError):
            plan_of_mscclpp(wrong, SIZE)
    assert issubclass(PlanError, OptccError)


def test_the_commands_take_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(both(EXCHANGE))
    words = [str(path), "--topology", "2@1GB/s", "--size", str(SIZE)]
    assert cli.run(["simulate", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] == pytest.approx(SIZE / 1e9 + 2 * WORD_S) and told["verdict"] == PROVED
    assert cli.run(["show", *words]) == 0
    assert "signals" in capsys.readouterr().out
    path.write_bytes(both(EXCHANGE.replace("START ", "")))
    assert cli.run(["show", *words]) == cli.run(["simulate", *words]) == 1
    said = capsys.readouterr().err
    assert "plan.json: refuted; the time is of a file that would not give the result; races" in said
    path.write_bytes(b"{}")
    assert cli.run(["simulate", *words]) == 2
    assert "plan.json" in capsys.readouterr().err
