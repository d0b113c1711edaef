"""Pipelines of MSCCL++, judged for several sizes of the call: what is proved, planted faults, how long they take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from optcc.errors import CodecError
from optcc.verdict import PROVED, REFUTED
from optcc.verify.gpu import mscclpp, mscclpp_pipeline
from optcc.verify.gpu.mscclpp import read_mscclpp, verify_mscclpp
from optcc.verify.gpu.mscclpp_pipeline import OPS_MAX, sizes_to_judge
from optcc.verify.gpu.mscclpp_plan import plan_of_mscclpp
from optcc.verify.gpu.operations import StepCounterexample
from tests.unit.verify.gpu.mscclpp_sample import both, plan
from tests.unit.verify.gpu.test_mscclpp_plan import WORD_S, seconds

LOOPS = (
    "START loop 32 1; put i0 > SP.0; nop; signal P; sem_release 0; end"
    "|loop 32 1; sem_acquire 0; wait P; nop; re i0 s0 > i0; end"
)
"""A block sends part after part, another one adds up what has come."""
AHEAD = (
    "START loop 32 1; sem_acquire 1; put i0 > SP.0; nop; signal P; sem_release 0; end"
    "|loop 32 1; sem_acquire 0; wait P; nop; re i0 s0 > i0; nop; sem_release 1; end"
)
"""The first is at most as many turns ahead as semaphore 1 has at the start."""
STUCK = AHEAD.replace("sem_acquire 1; put", "put").replace(
    "sem_release 0; end|", "sem_acquire 1; end; loop 32 1; sem_release 0; end|"
)
"""Stuck from one turn more on than semaphore 1 has at the start."""
PORT = "START loop 32 1; pwsf* i0 > SP.0; wait* P; nop; re i0 s0 > i0; end"
CHUNKS = "START loop 48 2; put i0x2 > SP.0x2; nop; signal P; wait P; nop; re i0x2 s0x2 > i0x2; end"
UNITS = "START loop 32 1; put i0 > SP.0; nop; signal P; end; loop 32 1; wait P; end; nop; loop 64 1; re i0 s0 > i0; end"
THREE = (
    "rlxsignal {0} {1}; rlxwait {0} {1}; nop; loop 32 1; put i0 i0 > S{0}.{2} S{1}.{2}; nop; signal {0} {1}; "
    "wait {0} {1}; nop; re i0 {3} > o0; end; nop; signal {0}' {1}'; wait {0}' {1}'"
)


def three(*terms: str) -> bytes:
    """Each of three GPUs gives its input to the others, and adds up these places."""
    others = ((1, 2), (0, 2), (0, 1))
    blocks = [[THREE.format(*each, gpu, terms[gpu])] for gpu, each in enumerate(others)]
    return plan(blocks, in_place=False)


def copied(data: bytes) -> bytes:
    """Each GPU adds up the three inputs in the order of scratch space, its own put there first."""
    text = json.loads(data)
    for number, gpu in enumerate(text["gpus"]):
        (pipeline,) = [op for op in gpu["threadblocks"][0]["ops"] if op["name"] == "pipeline"]
        place = {"index": 0, "size": 1}
        own = [{"type": "i", **place}], [{"type": "s", "index": number, "size": 1}]
        pipeline["ops"].insert(0, {"name": "copy", "src_buff": own[0], "dst_buff": own[1]})
        pipeline["ops"][-1]["src_buff"] = [{"type": "s", "index": at, "size": 1} for at in range(3)]
    return json.dumps(text, indent=1).encode()


RIGHT = {
    "two blocks": both(LOOPS, semaphores=[0]),
    "a few turns ahead": both(AHEAD, semaphores=[0, 2]),
    "over a port": both(PORT),
    "two chunks": both(CHUNKS, chunks=2),
    "two units": both(UNITS),
    "three GPUs": copied(three("s1 s2", "s0 s2", "s0 s1")),
}
WITHOUT = LOOPS.replace("START", "rlxsignal P'; rlxwait P'; nop;").replace("; sem_release 0", "")
FAULTS = {
    "a pipeline lacks a wait": (both(LOOPS.replace("wait P; ", ""), semaphores=[0]), "matching", (0, 0, 6), 0),
    "a semaphore is released and not acquired": (
        both(LOOPS.replace("sem_acquire 0; ", ""), semaphores=[0]),
        "matching",
        (0, 0, 7),
        0,
    ),
    "one wait for all turns": (
        both(LOOPS.replace("wait P; ", "").replace("0; end|", "0; end|wait P; nop; "), semaphores=[0]),
        "matching",
        (0, 0, 6),
        1,
    ),
    "each turn waits for a turn of the next pipeline": (
        both(STUCK, semaphores=[0, 0]),
        "deadlock",
        (0, 0, 7),
        0,
    ),
    "stuck in the third turn": (both(STUCK, semaphores=[0, 2]), "deadlock", (0, 0, 7), 2),
    "read by one block, written by another": (both(WITHOUT.replace("sem_acquire 0; ", "")), "races", (0, 1, 3), 0),
    "signalled before all threads have put": (
        both(LOOPS.replace("put i0 > SP.0; nop; ", "put i0 > SP.0; "), semaphores=[0]),
        "races",
        (0, 1, 4),
        0,
    ),
    "added up in the turn before": (
        both(LOOPS.replace("wait P; nop; re i0 s0 > i0; end", "nop; re i0 s0 > i0; wait P; end"), semaphores=[0]),
        "races",
        (1, 0, 4),
        0,
    ),
    "the other block's turns are twice as long": (
        both(LOOPS.replace("|loop 32 1", "|loop 64 1"), semaphores=[0]),
        "matching",
        (0, 0, 6),
        1,
    ),
    "not flushed": (both(PORT.replace("pwsf*", "pws*")), "races", (0, 0, 7), 0),
    "another place": (both(LOOPS.replace("s0 > i0", "s1 > i0"), semaphores=[0]), "result", (0, 1, 4), 0),
    "another place, behind two pipelines": (both(UNITS.replace("i0 s0 >", "i0 s1 >")), "result", (0, 0, 11), 0),
    "half of the chunks": (both(CHUNKS.replace("48 2", "48 1"), chunks=2), "result", (-1, -1, -1), -1),
    "too many chunks": (both(LOOPS.replace("32 1", "32 2"), semaphores=[0]), "limits", (0, 0, 4), 2),
    "a different order at each GPU": (three("s1 s2", "s0 s2", "s1 s0"), "agreement", (-1, -1, -1), -1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_pipeline_is_proved(name: str) -> None:
    verdict = verify_mscclpp(RIGHT[name])
    assert verdict.verdict == PROVED, verdict.counterexample
    (said,) = [words for property_, words in verdict.conditions if "pipelines" in words]
    assert re.fullmatch(r"pipelines: chunks of \d+(, \d+){2,} B", said)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_pipeline_is_refuted(name: str) -> None:
    data, property_, at, turn = FAULTS[name]
    found = verify_mscclpp(data, "wrong.json").counterexample
    assert isinstance(found, StepCounterexample) and found.property == property_, found
    if turn >= 0:
        assert (found.gpu, found.thread_block, found.step, found.file) == (*at, "wrong.json"), found
        assert f"in turn {turn} of its pipeline" in found.summary, found
        block = json.loads(data)["gpus"][found.gpu]["threadblocks"][found.thread_block]
        listed = [each for op in block["ops"] for each in (op, *op.get("ops", ()))]
        lines = data.decode().splitlines()[found.line - 1 :]
        assert lines[0].strip() == "{" and f'"name": "{listed[found.step]["name"]}"' in lines[1]


def test_only_many_turns_show_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is as many turns ahead as a semaphore lets it: the large size has three more."""
    data = both(STUCK, semaphores=[0, 8])
    assert verify_mscclpp(data).properties["deadlock"] == REFUTED
    few = sizes_to_judge(read_mscclpp(data))
    assert few == (16, [1, 2, 3, 4, 21])
    monkeypatch.setattr(mscclpp, "sizes_to_judge", lambda file: (16, [1, 2, 3, 4]))
    assert verify_mscclpp(data).verdict == PROVED


def test_sizes_are_those_that_the_file_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(**fields: Any) -> tuple[int, list[int]]:
        return sizes_to_judge(read_mscclpp(both(LOOPS, semaphores=[0], **fields)))

    assert sizes() == (16, [1, 2, 3, 4, 5])
    assert sizes(max_message_size=33) == (16, [1, 2, 3])
    assert sizes(min_message_size=100, max_message_size=128) == (16, [7, 8])
    monkeypatch.setattr(mscclpp_pipeline, "_SCRATCH_BYTES", 128)
    assert sizes(reuse_resources=True) == (16, [1, 2])
    with pytest.raises(CodecError, match=re.escape("$.min_message_size: 64: chunks cut short in scratch space")):
        sizes(reuse_resources=True, min_message_size=64)
    with pytest.raises(CodecError, match="chunks of 48 B: cut short in scratch space"):
        plan_of_mscclpp(both(LOOPS, semaphores=[0], reuse_resources=True), 48)
    with pytest.raises(CodecError, match=f"operations in all turns of pipelines: must be at most {OPS_MAX}"):
        verify_mscclpp(both(LOOPS, semaphores=[0], min_message_size=2**24))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"unit_size": 32', '"unit_size": 24', "iter_context.unit_size: 24: must be a multiple of 16"),
        ('"unit_size": 32', '"unit_size": 0', "iter_context.unit_size: 0"),
        ('"num_chunks": 1', '"num_chunks": 0', "iter_context.num_chunks: 0"),
        (
            '"name": "pipeline"',
            '"name": "nop"',
            "ops[3]: nop: pipelines, and no others, must have iter_context and ops",
        ),
        ('"name": "put"', '"name": "pipeline"', "ops[3].ops[0].name: pipeline: must not be in a pipeline"),
        ('"name": "put"', '"name": "ppkt"', "ops[3].ops[0].name: ppkt: packets in a pipeline, all in every turn"),
        ('"name": "put"', '"name": "push"', "ops[3].ops[0].name: 'push': must be one of nop"),
        ('"name": "put"', '"name": "put", "tbg_info": {"tb_id": 0, "tbg_size": 2}', "ops[3].ops[0].tbg_info: turns go"),
        ('"buffer_id": 2', '"buffer_id": 9', "ops[3].ops[0].dst_buff[0].buffer_id: 9: the block has no such"),
    ],
)
def test_what_is_no_pipeline_is_refused_with_its_path(old: str, new: str, says: str) -> None:
    data = RIGHT["two blocks"].decode()
    assert old in data
    with pytest.raises(CodecError, match=re.escape(says)):
        verify_mscclpp(data.replace(old, new, 1).encode())


def test_pipelines_in_pipelines_without_end_are_refused() -> None:
    deep = b'{"name": "pipeline", "ops": [' * 3000 + b"]}" * 3000
    with pytest.raises(CodecError):
        verify_mscclpp(
            RIGHT["two blocks"].replace(b'{"name": "nop"}', deep).replace(b'"ops": [', b'"ops": [' + deep, 1)
        )


def test_operations_of_pipelines_count() -> None:
    """A block has room for 64, those of its pipelines and the pipelines themselves included."""
    for nops, verdict in ((57, PROVED), (58, REFUTED)):
        data = both(LOOPS.replace("put i0 > SP.0; nop;", "put i0 > SP.0;" + "nop;" * nops), semaphores=[0])
        found = verify_mscclpp(data)
        assert found.verdict == verdict
        assert found.counterexample is None or "65 operations: must be at most 64" in found.counterexample.summary


@pytest.mark.parametrize(("name", "turns"), [("two blocks", 4), ("a few turns ahead", 4), ("over a port", 4)])
def test_they_are_timed(name: str, turns: int) -> None:
    """The parts follow each other, a signal behind each; what is received last is added at once."""
    size = 32 * turns - 16
    made = plan_of_mscclpp(RIGHT[name], size)
    parts = made.transfers.bytes[(made.transfers.stage == 0) & (made.transfers.src == 0)].tolist()
    assert parts == [32] * (turns - 1) + [16]
    assert seconds(RIGHT[name], size) == pytest.approx(size / 1e9 + (turns + 1) * WORD_S)


@pytest.mark.parametrize("text", [LOOPS, PORT])
def test_a_turn_behind_the_end_moves_nothing(text: str) -> None:
    """Of two turns the second begins where the places end."""
    data = both(text.replace("32 1", "32 2"), semaphores=[0])
    made = plan_of_mscclpp(data, 32)
    assert made.transfers.bytes[(made.transfers.stage == 0) & (made.transfers.src == 0)].tolist() == [32]
    assert seconds(data, 32) == pytest.approx(32 / 1e9 + 3 * WORD_S)
