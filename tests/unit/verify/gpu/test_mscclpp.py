"""The verifier of MSCCL++'s execution plans: what is right is proved, a planted fault of each class is refuted."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optcc.cli import run
from optcc.errors import CodecError
from optcc.export import write_mscclpp_json
from optcc.planner import build
from optcc.topology import Topology
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN
from optcc.verify.gpu import mscclpp_file
from optcc.verify.gpu.mscclpp import verify_mscclpp
from optcc.verify.gpu.operations import StepCounterexample
from tests.golden.readers import Fault, MscclppMachine, check_allreduce
from tests.unit.verify.gpu.mscclpp_sample import both, plan

EXCHANGE = "START put i0 > SP.0; MEET re i0 s0 > i0"
TWO = "START put i0x2 > SP.0x2; MEET re i0x2 s0x2 > i0x2"
GATHER = "START put i0 > OP.{}; MEET"
STUCK = (
    "START loop 32 1; put i0 > SP.0; nop; signal P; sem_acquire 1; end; loop 32 1; sem_release 0; end"
    "|loop 32 1; sem_acquire 0; wait P; nop; re i0 s0 > i0; nop; sem_release 1; end"
)
"""A block that has no more turns than semaphore 1 has at the start before it releases semaphore 0."""
PACKETS = "ppkt i0 > SP.0; nop; repkt i0 s0 > i0"


def gather(first: int, second: int) -> bytes:
    return both(GATHER.format(first), GATHER.format(second), coll="allgather", chunks=(1, 2))


def summed(*orders: str) -> bytes:
    """Three GPUs exchange their inputs, and each adds up what it has in its own order."""
    gpus = []
    for rank, order in enumerate(orders):
        a, b = (rank + 1) % 3, (rank + 2) % 3
        text = f"rlxsignal {a} {b}; rlxwait {a} {b}; nop; put i0 i0 > S{a}.{rank} S{b}.{rank}; nop; "
        gpus.append([f"{text}signal {a}' {b}'; wait {a}' {b}'; nop; copy i0 > s{rank}; nop; {order}"])
    return plan(gpus)


@dataclass(frozen=True)
class PlanFault:
    """A mistake of class `number`; the counterexample must name this GPU, thread block and operation (-1: none)."""

    number: int
    what: str
    wrong: bytes
    property: str
    at: tuple[int, int, int]
    says: str


FAULTS = (
    PlanFault(1, "double reduction", both(EXCHANGE.replace("s0 > i0", "s0 s0 > i0")), "result", (0, 0, 8), "2 times"),
    PlanFault(
        2, "a contribution is missing", both(EXCHANGE.replace("re i0 s0", "copy s0")), "result", (0, 0, 8), "lacks"
    ),
    PlanFault(
        3, "wrong chunk", both(TWO.replace("put i0x2 > SP.0x2", "put i0x2 > SP.1x2"), chunks=2), "result", (0, 0, 8), ""
    ),
    PlanFault(
        4, "another chunk is taken than was put", both(EXCHANGE.replace("i0 s0", "i0 s1")), "result", (0, 0, 8), "never"
    ),
    PlanFault(
        5,
        "another channel",
        both(EXCHANGE.replace("MEET", "nop; signal P'; wait P; nop; ")),
        "matching",
        (1, 0, 6),
        "signalled",
    ),
    PlanFault(
        6, "both wait", both("wait P; signal P; START put i0 > SP.0; MEET re i0 s0 > i0"), "deadlock", (0, 0, 0), "ever"
    ),
    PlanFault(
        7,
        "more puts than there are credits",
        both("sem_acquire 0; nop; " + EXCHANGE + "; nop; sem_release 0", semaphores=[0]),
        "deadlock",
        (0, 0, 0),
        "waits for ever",
    ),
    PlanFault(
        8,
        "two blocks wait for each other",
        both(EXCHANGE + "; sem_acquire 0; sem_release 1|sem_acquire 1; sem_release 0", semaphores=[0, 0]),
        "deadlock",
        (0, 0, 9),
        "waits for ever",
    ),
    PlanFault(
        9,
        "no barrier behind a wait",
        both(EXCHANGE.replace("MEET", "nop; signal P'; wait P'; ")),
        "races",
        (0, 0, 3),
        "s[0]",
    ),
    PlanFault(
        10,
        "written before it is read",
        both(EXCHANGE.replace("re i0", "put i0 > SP.0; nop; re i0")),
        "races",
        (1, 0, 8),
        "s[0]",
    ),
    PlanFault(
        11,
        "written where a put still reads",
        both(EXCHANGE + "|copy i0 > s3; nop; copy s3 > i0"),
        "races",
        (1, 1, 2),
        "i[0]",
    ),
    PlanFault(
        12,
        "scratch is used again by the next call",
        both(EXCHANGE.replace("START ", "")),
        "races",
        (1, 0, 0),
        "GPU 0 s[0]",
    ),
    PlanFault(
        13,
        "a stale read of scratch",
        both("START put i0 > SP.0; MEET re i0 s0 > i0; re i1 s0 > i1", chunks=2),
        "result",
        (0, 0, 9),
        "does not belong",
    ),
    PlanFault(14, "put onto the input of a call in place", gather(0, 0), "races", (0, 0, 3), "o[0]"),
    PlanFault(
        15,
        "the input is changed",
        both(EXCHANGE + "; nop; copy i0 > o0", in_place=False),
        "result",
        (0, 0, 8),
        "changes i[0]",
    ),
    PlanFault(
        16, "read, and never written", both(EXCHANGE.replace("put i0", "put s2")), "result", (1, 0, 3), "never written"
    ),
    PlanFault(
        17,
        "passed on without the update",
        both("START nop; MEET copy s0 > i0", "START put i0 > SP.0; MEET re i0 s1 > i0"),
        "result",
        (0, 0, 8),
        "lacks",
    ),
    PlanFault(
        18,
        "the executor's get takes the offsets of the other side",
        both("START get IP.0 > s1; nop; signal P'; wait P'; nop; re i0 s1 > i0", chunks=2),
        "result",
        (0, 0, 8),
        "never written",
    ),
    PlanFault(
        19,
        "a copy that overlaps itself",
        both("copy i0x2 > i1x2; nop; " + EXCHANGE, chunks=3),
        "races",
        (0, 0, 0),
        "offset",
    ),
    PlanFault(20, "a signal is left", both(EXCHANGE + "; signal P'"), "matching", (0, 0, 9), "signalled 2 times"),
    PlanFault(
        21,
        "orders of addition differ",
        summed("re s0 s1 s2 > i0", "re s1 s2 s0 > i0", "re s0 s1 s2 > i0"),
        "agreement",
        (1, 0, 10),
        "orders",
    ),
    PlanFault(
        22,
        "scratch taken for zero",
        both(EXCHANGE.replace("re i0 s0", "re i0 s0 s3")),
        "result",
        (0, 0, 8),
        "never written",
    ),
    PlanFault(23, "the last chunk is left out", both(TWO, chunks=3), "result", (0, -1, -1), "lacks"),
    PlanFault(
        23,
        "the last chunk is taken without the sum",
        both(TWO.replace("i0x2 >", "i0x3 >", 1).replace("SP.0x2", "SP.0x3") + "; copy s2 > i2", chunks=3),
        "result",
        (0, 0, 9),
        "i[2] lacks",
    ),
    PlanFault(
        24, "a barrier too many", both(EXCHANGE + "; barrier 16 1"), "limits", (0, 0, 9), "barrier_id 16: must be below"
    ),
    PlanFault(
        24, "65 operations", both(EXCHANGE + "; nop" * 56), "limits", (0, 0, -1), "65 operations: must be at most 64"
    ),
    PlanFault(
        25,
        "a channel that the peer lacks",
        both(EXCHANGE, "nop", without=(1, 0)),
        "matching",
        (0, 0, 0),
        "signalled 1 times",
    ),
    PlanFault(
        26, "offered for sizes that wrap", both(EXCHANGE, min_message_size=2**31), "limits", (-1, -1, -1), "below 2^31"
    ),
    PlanFault(
        26,
        "offered for no size",
        both(EXCHANGE, min_message_size=64, max_message_size=32),
        "limits",
        (-1, -1, -1),
        "min_message_size 64: must be at most max_message_size 32",
    ),
    PlanFault(
        26,
        "offered for sizes for which it deadlocks",
        both(STUCK, semaphores=[0, 2]),
        "deadlock",
        (0, 0, 7),
        "in turn 2 of its pipeline",
    ),
    PlanFault(27, "no operation at all", both("nop"), "result", (0, -1, -1), "lacks"),
    PlanFault(
        27,
        "operations that change nothing",
        both("copy i0 > s0; nop; copy s0 > i0"),
        "result",
        (0, 0, 2),
        "lacks the contribution i[0] of GPU 1",
    ),
)
RIGHT = {
    "exchange": both(EXCHANGE),
    "two chunks": both(TWO, chunks=2),
    "allgather": gather(0, 1),
    "semaphore": both("sem_acquire 0; nop; " + EXCHANGE + "; nop; sem_release 0", semaphores=[1]),
    "barrier": both(EXCHANGE + "; barrier 0 2|barrier 0 2; copy i0 > s3; nop; copy s3 > i0"),
    "out of place": both(EXCHANGE.replace("s0 > i0", "s0 > o0"), in_place=False),
    "sums in one order": summed(*["re s0 s1 s2 > i0"] * 3),
    "packets": both(PACKETS, proto="LL", use_double_scratch_buffer=True),
    "get": both("START get IP.0 > s0; nop; signal P'; wait P'; nop; re i0 s0 > i0"),
    "62 operations": both(EXCHANGE + "; nop" * 55),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_proved(name: str) -> None:
    verdict = verify_mscclpp(RIGHT[name])
    assert verdict.verdict == PROVED, verdict.counterexample


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.what.replace(' ', '-')}")
def test_a_planted_fault_is_refuted(fault: PlanFault) -> None:
    verdict = verify_mscclpp(fault.wrong, "wrong.json")
    found = verdict.counterexample
    assert isinstance(found, StepCounterexample), verdict.properties
    assert (found.property, (found.gpu, found.thread_block, found.step)) == (fault.property, fault.at), found
    assert fault.says in str(found) and found.file == "wrong.json", found
    order = ("limits", *PROPERTIES)
    place = order.index(found.property)
    assert [verdict.properties[each] for each in order[: place + 1]] == [PROVED] * place + [REFUTED]
    if found.step >= 0:
        block = json.loads(fault.wrong)["gpus"][found.gpu]["threadblocks"][found.thread_block]
        op = [each for op in block["ops"] for each in (op, *op.get("ops", ()))][found.step]
        lines = fault.wrong.decode().splitlines()[found.line - 1 :]
        assert lines[0].strip() == "{" and f'"name": "{op["name"]}"' in lines[1]


def test_each_class_has_a_fault_whose_operation_is_named() -> None:
    assert {fault.number for fault in FAULTS if min(fault.at) >= 0} == set(range(1, 28))


def test_packets_need_double_scratch_space_or_a_start_together() -> None:
    single = verify_mscclpp(both(PACKETS, proto="LL")).counterexample
    assert single is not None and single.property == "races" and "(packets)" in single.summary
    assert verify_mscclpp(both("START " + PACKETS, proto="LL")).verdict == PROVED
    simple = verify_mscclpp(both(PACKETS)).counterexample
    assert simple is not None and "must be LL for packets" in simple.summary


def test_packets_tell_what_was_read_and_begun() -> None:
    """Each GPU sums up a half for both: in one half of scratch space, without another signal, call after call."""
    text = (
        "ppkt i{0} > S{0}.0; nop; respkt i{1} s0 > i{1} S{0}.1; nop; upkt s1 > i{0}",
        "ppkt i{0} > S{0}.0; nop; respkt i{1} s0 > i{1} S{0}.1; nop; upkt s1 > i{0}",
    )
    gpus = [[each.format(1 - number, number)] for number, each in enumerate(text)]
    verdict = verify_mscclpp(plan(gpus, chunks=2, proto="LL"))
    assert verdict.verdict == PROVED, verdict.counterexample
    early = [[text[0].format(1, 0).replace("nop; upkt", "nop; ppkt i1 > S1.0; nop; upkt")], gpus[1]]
    assert verify_mscclpp(plan(early, chunks=2, proto="LL")).properties["races"] == REFUTED


def test_data_in_two_halves_of_scratch_space_is_not_judged() -> None:
    with pytest.raises(CodecError, match=re.escape("$.gpus[0].threadblocks[0].ops[3]: scratch space of other GPUs")):
        verify_mscclpp(both(EXCHANGE, use_double_scratch_buffer=True))


def test_a_relaxed_signal_carries_no_data() -> None:
    data = both(EXCHANGE.replace("MEET", "nop; rlxsignal P'; rlxwait P'; nop; "))
    assert verify_mscclpp(data).properties["races"] == REFUTED


def test_a_switch_adds_up_and_stores_at_all() -> None:
    text = json.loads(both("START nop; MEET nop"))
    for gpu in text["gpus"]:
        groups = [{"size": 1, "ranks": [0, 1]}]
        gpu["channels"].append({"channel_type": "switch", "buffer_type": "i", "rank_groups": groups})
        gpu["threadblocks"][0]["channels"].append({"channel_type": "switch", "channel_ids": [0]})
    place = [{"switch_channel_id": 0, "index": 0, "size": 1}]
    glres = {"name": "glres", "src_buff": place, "dst_buff": place, "channel_type": "switch"}
    text["gpus"][0]["threadblocks"][0]["ops"][3] = glres
    assert verify_mscclpp(json.dumps(text).encode()).verdict == PROVED
    gstore = glres | {"name": "gstore", "src_buff": [{"type": "i", "rank": 0, "index": 0, "size": 1}]}
    text["gpus"][0]["threadblocks"][0]["ops"][3] = gstore
    lacking = verify_mscclpp(json.dumps(text).encode()).counterexample
    assert lacking is not None and "i[0] lacks the contribution i[0] of GPU 1" in lacking.summary
    text["gpus"][0]["threadblocks"][0]["ops"][3] = glres
    text["gpus"][1]["threadblocks"][0]["ops"][3] = glres
    assert verify_mscclpp(json.dumps(text).encode()).properties["races"] == REFUTED
    del text["gpus"][1]["channels"][-1]["buffer_type"]
    unread = verify_mscclpp(json.dumps(text, indent=1).encode()).counterexample
    assert isinstance(unread, StepCounterexample) and (unread.property, unread.gpu) == ("limits", 1)
    assert "a switch channel without buffer_type" in unread.summary


def test_a_group_of_blocks_shares_a_place() -> None:
    text = json.loads(both("START put i0 > SP.0; MEET re i0 s0 > i0|nop"))
    for gpu in text["gpus"]:
        ops = gpu["threadblocks"][0]["ops"]
        for at in (3, 8):
            ops[at]["tbg_info"] = {"tb_id": 0, "tbg_size": 2}
    found = verify_mscclpp(json.dumps(text).encode()).counterexample
    assert found is not None and found.property == "result" and "lacks" in found.summary
    for gpu in text["gpus"]:
        ops = gpu["threadblocks"][0]["ops"]
        for at in (8, 3):
            ops.insert(at + 1, ops[at] | {"tbg_info": {"tb_id": 1, "tbg_size": 2}})
    assert verify_mscclpp(json.dumps(text).encode()).verdict == PROVED


def test_a_remote_place_must_be_in_its_buffer() -> None:
    found = verify_mscclpp(both(EXCHANGE.replace("SP.0", "SP.4"))).counterexample
    assert found is not None and found.property == "limits"
    assert "remote 2 [4] is outside of s, which has 4 chunks at GPU 1" in found.summary


@pytest.mark.parametrize(("coll", "chunks"), [("allreduce", (1, 0)), ("allgather", (0, 2)), ("reducescatter", (2, 0))])
def test_a_side_without_chunks_is_no_promise_of_nothing(coll: str, chunks: tuple[int, int]) -> None:
    """In place the plan may name one side only; what does nothing is wrong for two GPUs all the same."""
    found = verify_mscclpp(both("nop", coll=coll, chunks=chunks)).counterexample
    assert found is not None and found.property == "result", found


def test_in_place_one_side_is_enough() -> None:
    assert verify_mscclpp(both(EXCHANGE, chunks=(1, 0))).verdict == PROVED
    assert verify_mscclpp(both(EXCHANGE.replace("i0", "o0"), chunks=(1, 0))).verdict == PROVED
    without = both(EXCHANGE, chunks=(1, 0), in_place=False)
    found = verify_mscclpp(without).counterexample
    assert found is not None and "o[0] of the output is never written" in found.summary


def test_unknown_collectives_promise_nothing() -> None:
    assert verify_mscclpp(both(EXCHANGE, coll="send_recv")).verdict == UNKNOWN


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"name": "put"', '"name": "pipeline"', "$.gpus[0].threadblocks[0].ops[3]: pipeline: pipelines, and no others"),
        ('"name": "put"', '"name": "push"', "must be one of nop, barrier"),
        ('"id": 0', '"id": 7', "$.gpus[0].id: 7: must be 0"),
        ('"index": 0', '"index": -1', "$.gpus[0].threadblocks[0].ops[3].src_buff[0].index: -1"),
        ('"size": 1', '"size": 2', "operands must be of one size"),
        ('"buffer_id": 2', '"buffer_id": 9', "the block has no such"),
        ('"buffer_id": 2', '"type": "s"', "must have buffer_id, and not type"),
        ('"rank": 1', '"rank": 2', "$.gpus[0].remote_buffers[0].rank: 2: must be below 2"),
        ('"channel_type": "memory"', '"channel_type": "none"', "must be memory or port, others are not judged"),
        ('"channel_type": "memory"', '"channel_type": "port"', "the block has no such channel"),
        ('"name": "sample"', '"name": "sample", "name": "sample"', "name"),
        ('"protocol"', '"extra": 1, "protocol"', "extra"),
        ("{", "[", "$"),
        ('"input_chunks"', '"inputChunks"', "$.gpus[0].input_chunks: missing: must be given"),
    ],
)
def test_what_is_not_a_plan_is_refused_with_its_path(old: str, new: str, says: str) -> None:
    data = both(EXCHANGE).decode()
    with pytest.raises(CodecError, match=re.escape(says)):
        verify_mscclpp(data.replace(old, new, 1).encode())


@pytest.mark.parametrize(
    ("limit", "most", "says"), [("CELLS_MAX", 15, "20 parts of chunks"), ("BLOCKS_MAX", 1, "2 thread blocks")]
)
def test_what_would_need_too_much_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, says: str
) -> None:
    monkeypatch.setattr(mscclpp_file, limit, most)
    with pytest.raises(CodecError, match=rf"\$.gpus: {says} in all: must be at most {most}"):
        verify_mscclpp(both(EXCHANGE))


# Against the machine of the exports' tests ----------------------------------------------------------------------------

EXPORTED = [("ring", 2), ("ring", 3), ("direct", 3), ("direct", 4), ("recursive-doubling", 4)]


def exported(name: str, ranks: int) -> dict[str, Any]:
    built = build(name, Topology.parse(f"{ranks}@50GB/s"), 16 * ranks * 4, segments=1)
    found: dict[str, Any] = json.loads(write_mscclpp_json(built.plan))
    return found


@pytest.mark.parametrize("case", EXPORTED, ids=str)
def test_our_own_files_are_proved(case: tuple[str, int]) -> None:
    verdict = verify_mscclpp(json.dumps(exported(*case)).encode())
    assert verdict.verdict == PROVED, verdict.counterexample


def spoil(text: dict[str, Any], choice: random.Random) -> None:
    """Takes out, doubles or swaps an operation, or changes a number of one."""
    ops = choice.choice(choice.choice(text["gpus"])["threadblocks"])["ops"]
    at = choice.randrange(len(ops))
    how = choice.randrange(4)
    if how == 0:
        del ops[at]
    elif how == 1:
        ops.insert(at, ops[at])
    elif how == 2 and at:
        ops[at - 1], ops[at] = ops[at], ops[at - 1]
    else:
        operands = [*ops[at].get("src_buff", ()), *ops[at].get("dst_buff", ())]
        if operands:
            choice.choice(operands)["index"] += choice.choice([-1, 1])
        elif ops[at].get("channel_ids"):
            ops[at]["channel_ids"][0] ^= 1


def performs(text: dict[str, Any]) -> bool | None:
    """Whether the machine finds nothing wrong in two calls; None for what it does not know."""
    try:
        for seed in range(3):
            check_allreduce(MscclppMachine(text, seed, calls=2).run(), times=2)
    except Fault as fault:
        return None if re.search("channels come in pairs|read before anything", str(fault)) else False
    except (KeyError, IndexError):
        return None
    return True


def compare(seeds: range) -> tuple[int, int]:
    """How many spoiled plans both call right, and how many wrong; asserts that they never differ."""
    right = wrong = 0
    for seed in seeds:
        choice = random.Random(seed)
        text = exported(*choice.choice(EXPORTED[:4]))
        spoil(text, choice)
        try:
            properties = verify_mscclpp(json.dumps(text).encode()).properties
        except CodecError:
            continue
        proved = {each for name, each in properties.items() if name != "agreement"} == {PROVED}
        expected = performs(text)
        assert expected in (None, proved), f"seed {seed}"
        right, wrong = right + (expected is True), wrong + (expected is False)
    return right, wrong


def test_spoiled_plans_get_the_verdict_of_an_interpreter() -> None:
    right, wrong = compare(range(40))
    assert right >= 2 and wrong >= 15, (right, wrong)


@pytest.mark.slow
def test_many_spoiled_plans_get_the_verdict_of_an_interpreter() -> None:
    right, wrong = compare(range(40, 1_500))
    assert right >= 100 and wrong >= 500, (right, wrong)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(both(EXCHANGE))
    assert run(["verify", str(path)]) == 0
    assert "races holds for 2 calls" in capsys.readouterr().out
    path.write_bytes(both(EXCHANGE.replace("START ", "")))
    assert run(["verify", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["counterexample"]
    assert (found["file"], found["gpu"], found["thread_block"], found["step"]) == ("plan.json", 1, 0, 0)
    assert run(["verify", str(path), "--target", "rccl"]) == 2
    path.write_bytes(b"{}")
    assert run(["verify", str(path)]) == 2
    assert "plan.json" in capsys.readouterr().err
