"""Port channels of MSCCL++, over which a proxy moves data later: what orders it, and which race each lack allows."""

from __future__ import annotations

import json
import re

import pytest

from optcc.errors import CodecError
from optcc.verdict import PROVED, REFUTED
from optcc.verify.gpu.mscclpp import verify_mscclpp
from optcc.verify.gpu.mscclpp_executor import MscclppExecutor
from optcc.verify.gpu.mscclpp_plan import plan_of_mscclpp
from optcc.verify.gpu.operations import StepCounterexample
from tests.unit.verify.gpu.mscclpp_sample import both, plan
from tests.unit.verify.gpu.test_mscclpp_plan import LATENCY_S, SIZE, WORD_S, seconds

FLUSHED = "START pwsf* i0 > SP.0; wait* P; nop; re i0 s0 > i0"
PUT = "START put* i0 > SP.0; nop; signal* P; wait* P; nop; re i0 s0 > {}"
ACKNOWLEDGED = PUT.format("o0") + "; nop; signal P'; wait P'"
PACKETS = "START cpkt i0 > s1; nop; ppkt* s1 > SP.0; nop; repkt i0 s0 > i0"
RIGHT = {
    "flushed": both(FLUSHED),
    "acknowledged": both(ACKNOWLEDGED, in_place=False),
    "signal of its own thread, without a nop": both(
        ACKNOWLEDGED.replace("0; nop; signal*", "0; signal*"), in_place=False
    ),
    "put with signal": both(ACKNOWLEDGED.replace("put*", "pws*").replace("signal* P; ", ""), in_place=False),
    "flush with a destination": both(PUT.format("i0").replace("signal* P", "signal* P; flush* P > SP.0")),
    "packets": both(PACKETS, proto="LL"),
    "two chunks by one operation": both(
        "START put* i0 i1 > SP.0 SP.1; nop; pwsf* i0 > SP.0; wait* P; nop; re i0x2 s0x2 > i0x2", chunks=2
    ),
    "allgather": both(
        "START pwsf* i0 > OP.0; wait* P", "START pwsf* i0 > OP.1; wait* P", coll="allgather", chunks=(1, 2)
    ),
}
RACES = {
    "written while the proxy may still read it": (both(PUT.format("i0")), (0, 0, 8), "i[0]"),
    "the executor's flush of no destination flushes nothing": (
        both(PUT.format("i0").replace("signal* P", "signal* P; flush* P")),
        (0, 0, 9),
        "i[0]",
    ),
    "signalled, and not flushed": (
        both(FLUSHED.replace("pwsf*", "pws*")),
        (0, 0, 6),
        "i[0]",
    ),
    "the call ends before the proxy has read the input": (
        both(PUT.format("o0"), in_place=False),
        (0, 0, 3),
        "i[0]",
    ),
    "a signal of another channel does not tell of it": (
        both(ACKNOWLEDGED.replace("signal* P; wait* P", "signal P'; wait P'"), in_place=False),
        (0, 0, 8),
        "s[0]",
    ),
    "put before its source was there": (
        both(
            "START copy i0 > s1; put* s1 > SP.0; nop; signal* P; wait* P; nop; re i0 s0 > o0; nop; signal P'; wait P'",
            in_place=False,
        ),
        (1, 0, 4),
        "s[1]",
    ),
    "packets made again while they are read": (
        both(PACKETS.replace("START ", ""), proto="LL"),
        (1, 0, 0),
        "(packets)",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_proved(name: str) -> None:
    verdict = verify_mscclpp(RIGHT[name])
    assert verdict.verdict == PROVED, verdict.counterexample


@pytest.mark.parametrize("name", RACES)
def test_a_race_with_the_proxy_is_refuted(name: str) -> None:
    data, at, cell = RACES[name]
    verdict = verify_mscclpp(data, "ports.json")
    found = verdict.counterexample
    assert verdict.properties["races"] == REFUTED and isinstance(found, StepCounterexample)
    assert ((found.gpu, found.thread_block, found.step), found.file) == (at, "ports.json"), found
    assert cell in found.summary, found


HALVES = {
    "at once": "cpkt i0 > s1; nop; ppkt* s1 > SP.0; nop; repkt i0 s0 > i0",
    "one after the other": "cpkt i0x2 > s2x2; nop; ppkt* s2x2 > SP.0x2; nop; repkt i0 s0 > i0; repkt i1 s1 > i1",
}


@pytest.mark.parametrize("name", HALVES)
def test_packets_of_the_next_call_tell_that_those_of_this_one_were_moved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their source is written again two calls later; nothing else says that the proxy has read it."""
    data = both(HALVES[name], proto="LL", chunks=1 + (name != "at once"), use_double_scratch_buffer=True)
    verdict = verify_mscclpp(data)
    assert verdict.verdict == PROVED, verdict.counterexample
    monkeypatch.setattr(MscclppExecutor, "_learn_moved", lambda *_: None)
    assert verify_mscclpp(data).properties["races"] == REFUTED


def test_other_faults_of_ports() -> None:
    for data, property_ in (
        (both(FLUSHED.replace("wait* P; ", "")), "matching"),
        (both("wait* P; nop; " + FLUSHED.replace("; wait* P", "")), "deadlock"),
        (both(FLUSHED.replace("SP.0", "SP.1")), "result"),
        (both(FLUSHED.replace("SP.0", "SP.4")), "limits"),
        (both(PACKETS.replace("cpkt i0 > s1", "nop"), proto="LL"), "deadlock"),
        (both(PACKETS.replace("cpkt i0 > s1", "cpkt i0 > s2"), proto="LL"), "deadlock"),
    ):
        assert verify_mscclpp(data).properties[property_] == REFUTED, property_


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pws i0 > SP.0", "channel_type: memory: must be port for pws"),
        ("ppkt* i0 > SP.0", "src_buff[0].type: i: must be s"),
        ("put* i0 > SP.0|put* i0 > SP.1", "by two threads: is not judged"),
        ("put* i0 i0 > SP.0 SP.1; signal* P; nop", "by two threads: is not judged"),
        ("pws* i0 i0 > SP.0 SP.1; nop", "by two threads: is not judged"),
    ],
)
def test_what_is_not_judged_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(CodecError, match=re.escape(says)):
        verify_mscclpp(both(text, proto="LL"))


def test_only_what_a_proxy_does_goes_over_a_port() -> None:
    data = both(FLUSHED).replace(b'"pwsf"', b'"pws"').replace(b'"wait"', b'"barrier"')
    with pytest.raises(CodecError, match="channel_type: port: barrier must not have it"):
        verify_mscclpp(data)


def test_a_put_goes_to_the_gpu_of_its_channel() -> None:
    text = json.loads(plan([["put* i0 > S1.0"], ["nop"], ["nop"]]))
    op = text["gpus"][0]["threadblocks"][0]["ops"][0]
    for ids, says in (([1], "a buffer of GPU 1: must be of GPU 2, its channel's"), ([], "0 channels: must be as many")):
        op["channel_ids"] = ids
        with pytest.raises(CodecError, match=says):
            verify_mscclpp(json.dumps(text).encode())


def test_double_scratch_space_takes_only_packets() -> None:
    assert verify_mscclpp(both(PACKETS, proto="LL", use_double_scratch_buffer=True)).verdict == PROVED
    with pytest.raises(CodecError, match="in two halves"):
        verify_mscclpp(both(FLUSHED, use_double_scratch_buffer=True))


@pytest.mark.parametrize("name", RIGHT)
def test_they_are_timed(name: str) -> None:
    """The data, and the signals behind it and before it, which follow at once."""
    made = plan_of_mscclpp(RIGHT[name], SIZE)
    moved = int(made.transfers.bytes[made.transfers.stage == 0].sum()) // 2
    signals = int((made.transfers.stage == 2).sum()) // 2
    assert seconds(RIGHT[name]) == pytest.approx(moved / 1e9, abs=(signals + 1) * WORD_S)


def test_a_signal_follows_what_its_channel_moves() -> None:
    found = seconds(both(FLUSHED), latency_s=LATENCY_S)
    assert found == pytest.approx(SIZE / 1e9 + 2 * float(LATENCY_S), abs=3 * WORD_S)
