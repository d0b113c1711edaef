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
        ("signal* P; wait* P|signal* P; wait* P", "used by several threads, and nothing orders its waits"),
        ("rlxsignal P; rlxwait P|rlxsignal P; rlxwait P", "used by several threads, and nothing orders its waits"),
        ("sem_release 0; sem_acquire 0|sem_release 0; sem_acquire 0", "several threads, and nothing orders its waits"),
    ],
)
def test_what_is_not_judged_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(CodecError, match=re.escape(says)):
        verify_mscclpp(both(text, proto="LL", semaphores=[0]))


SUM = "re i0x2 s0x2 > o0x2; nop; signal P'; wait P'"
SHARED = {
    "one signals for both": "START sem_release 1; put* i0 > SP.0; sem_acquire 0; nop; signal* P; wait* P; nop; "
    f"{SUM}|sem_acquire 1; nop; put* i1 > SP.1; sem_release 0",
    "both signal": "START sem_release 1; pws* i0 > SP.0; wait* P; wait* P; nop; "
    f"{SUM}|sem_acquire 1; nop; pws* i1 > SP.1",
    "one flushes for both": "START sem_release 1; put* i0 > SP.0; sem_acquire 0; nop; pwsf* i0 > SP.0; wait* P; nop; "
    "re i0x2 s0x2 > i0x2|sem_acquire 1; nop; put* i1 > SP.1; sem_release 0",
    "both wait, one after the other": "START sem_release 1; pws* i0 > SP.0; wait* P; sem_release 1; "
    f"sem_acquire 0; nop; {SUM}|sem_acquire 1; nop; pws* i1 > SP.1; sem_acquire 1; wait* P; sem_release 0",
}
TWO_SIGNALS = SHARED["both signal"]


def two_blocks(text: str) -> bytes:
    return both(text, chunks=2, in_place="> i0x2" in text, semaphores=[0, 0])


@pytest.mark.parametrize("name", SHARED)
def test_a_port_channel_of_two_blocks_is_judged(name: str) -> None:
    verdict = verify_mscclpp(two_blocks(SHARED[name]))
    assert verdict.verdict == PROVED, verdict.counterexample


SHARED_FAULTS = {
    "whose signal comes first is not fixed": (
        TWO_SIGNALS.replace(
            "wait* P; wait* P; nop; re i0x2 s0x2 > o0x2",
            "wait* P; nop; re i0 s0 > o0; nop; wait* P; nop; re i1 s1 > o1",
        ),
        "races",
        (0, 0, 7),
    ),
    "the other block's put is not known to be told": (
        SHARED["one signals for both"].replace("sem_acquire 0; nop; signal* P", "nop; signal* P; nop; sem_acquire 0"),
        "races",
        (1, 0, 11),
    ),
    "the other block's put is not known to be flushed": (
        SHARED["one flushes for both"].replace(
            "sem_acquire 0; nop; pwsf* i0 > SP.0", "pwsf* i0 > SP.0; nop; sem_acquire 0"
        ),
        "races",
        (1, 0, 10),
    ),
    "both put to one place": (TWO_SIGNALS.replace("i1 > SP.1", "i1 > SP.0"), "races", (1, 1, 2)),
    "one waits too little": (TWO_SIGNALS.replace("wait* P; wait* P", "wait* P"), "matching", (0, 1, 2)),
    "the blocks wait for each other": (
        TWO_SIGNALS.replace("START sem_release 1; pws* i0 > SP.0;", "START pws* i0 > SP.0;").replace(
            SUM, SUM + "; sem_release 1"
        ),
        "deadlock",
        (0, 0, 5),
    ),
    "the wrong chunk": (TWO_SIGNALS.replace("i1 > SP.1", "i0 > SP.1"), "result", (0, 0, 8)),
}


@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_a_fault_in_a_port_channel_of_two_blocks_is_refuted(name: str) -> None:
    text, property_, at = SHARED_FAULTS[name]
    found = verify_mscclpp(two_blocks(text), "ports.json").counterexample
    assert isinstance(found, StepCounterexample) and found.property == property_, found
    assert ((found.gpu, found.thread_block, found.step), found.file) == (at, "ports.json"), found
    assert found.line > 1


@pytest.mark.parametrize("name", SHARED)
def test_a_port_channel_of_two_blocks_is_timed(name: str) -> None:
    data = two_blocks(SHARED[name])
    made = plan_of_mscclpp(data, SIZE)
    moved = int(made.transfers.bytes[made.transfers.stage == 0].sum()) // 2
    signals = int((made.transfers.stage == 2).sum()) // 2
    assert moved >= SIZE
    assert seconds(data) == pytest.approx(moved / 1e9, abs=(signals + 1) * WORD_S)


def test_tokens_of_two_blocks_are_not_told_apart() -> None:
    """Whose token an acquire takes is not fixed, however late the other block's comes: this was proved once."""
    late = "sem_acquire 1; nop; sem_release 2; sem_acquire 3; nop; sem_release 0"
    added = "sem_acquire 0; nop; re i0 s0 > i0; nop; sem_acquire 0"
    text = f"sem_release 1; nop; sem_acquire 2; nop; sem_release 3|{added}|{EXCHANGED}|{late}"
    found = verify_mscclpp(both(text, semaphores=[0] * 4)).counterexample
    assert isinstance(found, StepCounterexample) and found.property == "races"
    assert (found.thread_block, found.step) == (1, 2)
    right = text.replace(added, "sem_acquire 0; sem_acquire 0; nop; re i0 s0 > i0")
    assert verify_mscclpp(both(right, semaphores=[0] * 4)).verdict == PROVED


def test_a_token_that_comes_after_another_is_told_apart() -> None:
    """The third block releases when the second has told it of the first one's token."""
    text = f"{EXCHANGED}|sem_acquire 0; nop; re i0 s0 > i0; sem_release 1; sem_acquire 0|sem_acquire 1; sem_release 0"
    verdict = verify_mscclpp(both(text, semaphores=[0] * 2))
    assert verdict.verdict == PROVED, verdict.counterexample


def test_a_token_that_might_have_been_taken_before_is_not_judged() -> None:
    """The other GPU's second block lets the third one go, which may be before the first one releases."""
    with pytest.raises(CodecError, match="step 2: sem_release: used by several threads, and which of its signals"):
        verify_mscclpp(
            both("sem_release 0|sem_acquire 0; signal P; sem_acquire 0|wait P; nop; sem_release 0", semaphores=[0])
        )


EXCHANGED = "START put i0 > SP.0; nop; signal P; wait P; nop; sem_release 0"


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
