"""Execution plans of MSCCL++ 0.7: what is right is proved, a planted fault is refuted where it is, the rest refused."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from optcc.cli import run
from optcc.errors import CodecError
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.gpu.mscclpp import verify_mscclpp
from optcc.verify.gpu.operations import StepCounterexample
from tests.unit.verify.gpu.mscclpp_sample import both
from tests.unit.verify.gpu.mscclpp_sample_07 import both_07, plan_07
from tests.unit.verify.gpu.test_mscclpp import EXCHANGE as EXCHANGE_08
from tests.unit.verify.gpu.test_mscclpp_plan import SIZE, seconds

EXCHANGE = "START put i0 > SP.0; MEET re i0 s0 > i0"
READ = "signal iiP; wait iiP; nop; {}; nop; signal iiP'; wait iiP'"
PACKETS = "ppkt i0 > SP.0; nop; rpkt i0 s0 > i0"
HALVES = ("ppkt i1 > SP.0; rspkt i0 s0 > i0 SP.1; cpkt s1 > i1", "ppkt i0 > SP.0; rspkt i1 s0 > i1 SP.1; cpkt s1 > i0")
PORT = "signal isP; wait isP; nop; put* i0 > SP.0; signal* isP; flush* isP; wait* isP; nop; re i0 s0 > i0"
HANDED = (
    "ppkt i0 > S1.0; copy i0 > o0; cpkt s2 > o2; cpkt s3 > o1",
    "ppkt i0 i0 > S0.3 S2.3; copy i0 > o1; rppkt s0 s1 > S2.2 S0.2; cpkt s0 > o0; cpkt s1 > o2",
    "ppkt i0 > S1.1; copy i0 > o2; cpkt s2 > o0; cpkt s3 > o1",
)


def handed_on(middle: str = HANDED[1]) -> bytes:
    """An AllGather out of place of three GPUs, of which GPU 1 hands the packets of the others on."""
    return plan_07([[HANDED[0]], [middle], [HANDED[2]]], coll="allgather", proto="LL", chunks=(1, 3), in_place=False)


RIGHT = {
    "exchange": both_07(EXCHANGE),
    "names of channels in 0.6": both_07(PORT, memory="sm", port="proxy"),
    "barrier": both_07(EXCHANGE + "; barrier 0 2|barrier 0 2; copy i0 > s3; nop; copy s3 > i0"),
    "read, reduce, copy": both_07(READ.format("rrc i0 IP.0 > o0"), chunks=1, in_place=False),
    "and send": both_07(READ.format("rrcs i0 IP.0 > i0 IP.0"), READ.format("nop")),
    "reduce and send": both_07("START put i0 > SP.0; MEET rs i0 s0 > o0 SP.1; MEET", chunks=1, in_place=False),
    "get": both_07(READ.format("get IP.0 > s0") + "; nop; re i0 s0 > i0"),
    "packets": both_07(PACKETS, proto="LL"),
    "reduced packets": both_07(*HALVES, proto="LL", chunks=(2, 0)),
    "packets of scratch over a port": both_07("tpkt i0 > s1; nop; ppkt* s1 > SP.0; rpkt i0 s0 > i0", proto="LL"),
    "packets handed on, each its own": handed_on(),
    "flush": both_07(PORT),
    "buffers of memory and of port channels": both_07(
        *(f"signal isP; wait isP; nop; pwsf* i0 > OP.{rank}; copy i0 > o{rank}; wait* ioP" for rank in (0, 1)),
        coll="allgather",
        chunks=(1, 2),
        in_place=False,
    ),
    "put, signal and flush": both_07(PORT.replace("put*", "pwsf*").replace("signal* isP; flush* isP; ", "")),
    "a switch": both_07(READ.format("glres i0 > i0"), READ.format("nop")),
    "allgather": both_07(
        *(READ.format(f"put i0 > OP.{rank}") + f"; copy i0 > o{rank}" for rank in (0, 1)),
        coll="allgather",
        chunks=(1, 2),
        in_place=False,
    ),
}


@dataclass(frozen=True)
class Fault07:
    """A mistake; the counterexample must name this GPU, thread block and operation (-1: none), and say this."""

    wrong: bytes
    property: str
    at: tuple[int, int, int]
    says: str


def without_channels(text: bytes, gpu: int) -> bytes:
    plan = json.loads(text)
    plan["gpus"][gpu] |= {"channels": [], "threadblocks": []}
    return json.dumps(plan, indent=1).encode()


FAULTS = {
    "a lost signal": Fault07(
        both_07(EXCHANGE, EXCHANGE.replace("signal isP; ", "").replace("START", "wait isP; nop;")),
        "matching",
        (0, 0, 1),
        "wait with GPU 1: a channel of GPU 0 is signalled 0 times and waited for 1 times",
    ),
    "both wait": Fault07(
        both_07("wait isP; signal isP; nop; put i0 > SP.0; MEET re i0 s0 > i0"), "deadlock", (0, 0, 0), "waits for ever"
    ),
    "a wrong chunk": Fault07(both_07(EXCHANGE.replace("SP.0", "SP.1")), "result", (0, 0, 8), "never written"),
    "twice": Fault07(
        both_07(EXCHANGE.replace("i0 s0 >", "i0 s0 s0 >")), "result", (0, 0, 8), "re i[0] + s[0] + s[0] into i[0]"
    ),
    "no nop behind a wait": Fault07(
        both_07(EXCHANGE.replace("MEET", "nop; signal isP'; wait isP';")), "races", (0, 0, 3), "s[0]"
    ),
    "scratch is used again by the next call": Fault07(
        both_07(EXCHANGE.replace("START ", "")), "races", (1, 0, 0), "GPU 0 s[0]"
    ),
    "get takes the offsets of the other side": Fault07(
        both_07(READ.format("get IP.0 > s1") + "; nop; re i0 s1 > i0", chunks=(2, 0)), "result", (0, 0, 8), "never"
    ),
    "written while a GPU reads": Fault07(
        both_07(READ.format("rrcs i0 IP.0 > i0 IP.0")), "races", (0, 0, 3), "rrcs i[0] + remote 0 [0]"
    ),
    "not flushed": Fault07(both_07(PORT.replace("flush* isP; ", "")), "races", (0, 0, 7), "i[0]"),
    "packets handed on to the wrong GPU": Fault07(
        handed_on(HANDED[1].replace("s0 s1", "s1 s0")), "result", (0, 0, 2), "does not belong"
    ),
    "a packet that never comes": Fault07(
        both_07(PACKETS, PACKETS.replace("SP.0", "SP.1"), proto="LL"), "deadlock", (0, 0, 2), "rpkt i[0] + s[0]"
    ),
    "packets without room": Fault07(both_07(PACKETS), "limits", (0, 0, 0), "must be LL for packets"),
    "groups that do not divide": Fault07(
        both_07(EXCHANGE, chunks=(3, 0), groups=2), "limits", (0, -1, -1), "chunkGroups 2: must divide the 3 chunks"
    ),
    "halves that differ": Fault07(
        both_07(PACKETS, proto="LL").replace(b'"scratchChunks": 4', b'"scratchChunks": 5', 1),
        "limits",
        (1, -1, -1),
        "scratchChunks 4: must be 5, as at GPU 0",
    ),
    "a GPU to which no channel leads": Fault07(
        without_channels(both_07("put i0 > SP.0"), 1), "limits", (0, -1, -1), "no channel of another GPU leads here"
    ),
    "17 channels of a block": Fault07(
        both_07(EXCHANGE).replace(b'"cids": [\n        0,', b'"cids": [' + 16 * b"0, ", 1),
        "limits",
        (0, 0, -1),
        "17 channels of a type: must be at most 16",
    ),
    "65 operations": Fault07(both_07(EXCHANGE + "; nop" * 56), "limits", (0, 0, -1), "must be at most 64"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_proved(name: str) -> None:
    verdict = verify_mscclpp(RIGHT[name])
    assert verdict.verdict == PROVED, verdict.counterexample
    assert dict(verdict.conditions)["limits"].startswith("the loader of MSCCL++ 0.7;")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refuted(name: str) -> None:
    fault = FAULTS[name]
    found = verify_mscclpp(fault.wrong, "wrong.json").counterexample
    assert isinstance(found, StepCounterexample), name
    assert (found.property, (found.gpu, found.thread_block, found.step)) == (fault.property, fault.at), found
    assert fault.says in str(found) and found.file == "wrong.json", found
    if found.step >= 0:
        op = json.loads(fault.wrong)["gpus"][found.gpu]["threadblocks"][found.thread_block]["ops"][found.step]
        lines = fault.wrong.decode().splitlines()[found.line - 1 :]
        assert lines[0].strip() == "{" and f'"name": "{op["name"]}"' in lines[1]


def test_a_buffer_is_made_known_by_a_gpu_with_a_channel_to_such_a_one() -> None:
    plan = json.loads(both_07(EXCHANGE))
    plan["gpus"][1]["channels"][0]["dstbuff"] = "o"
    plan["gpus"][1]["threadblocks"] = []
    found = verify_mscclpp(json.dumps(plan, indent=1).encode()).counterexample
    assert found is not None and found.property == "limits" and found.rank == 0
    assert "GPU 1 has a channel to o here, which is made known only by a GPU with a channel to o" in found.summary


def test_a_packet_tells_only_of_the_source_that_it_was_made_of() -> None:
    """GPU 1 has the packet of i[0] and says so: i[1], which goes to GPU 2, may still be read."""

    def races(place: str) -> str:
        gpus = [
            ["signal is1 is2; wait is1 is2; nop; ppkt i0 i1 > S1.0 S2.0", f"wait is1'; nop; copy i2 > {place}"],
            ["signal is0; wait is0; nop; cpkt s0 > i2; nop; signal is0'"],
            ["signal is0; wait is0; nop; cpkt s0 > i2"],
        ]
        return verify_mscclpp(plan_07(gpus, coll="custom", proto="LL", chunks=(3, 0))).properties["races"]

    assert (races("i0"), races("i1")) == (PROVED, REFUTED)


def test_an_unknown_collective_promises_nothing() -> None:
    assert verify_mscclpp(both_07(EXCHANGE, coll="sendrecv")).verdict == UNKNOWN


def test_times_are_those_of_the_same_plan_in_08() -> None:
    """The signals of the start are relaxed in 0.8, which takes as long."""
    assert seconds(RIGHT["exchange"]) == seconds(both(EXCHANGE_08))
    ahead, behind = "signal P; wait P; nop; ", "; nop; signal P'; wait P'"
    sent = both(f"{ahead}rres i0 IP.0 > i0 IP.0{behind}", f"{ahead}nop{behind}")
    assert seconds(RIGHT["and send"]) == seconds(sent) > 2 * SIZE / 1e9


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(RIGHT["exchange"])
    assert run(["verify", str(path)]) == 0
    assert "the loader of MSCCL++ 0.7" in capsys.readouterr().out
    assert run(["simulate", str(path), "--topology", "2@1GB/s", "--size", "1600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 1600 / 1e9
    path.write_bytes(FAULTS["no nop behind a wait"].wrong)
    assert run(["verify", str(path), "--json"]) == 1
    path.write_bytes(RIGHT["exchange"].replace(b'"off": 0', b'"off": -1', 1))
    capsys.readouterr()
    assert run(["verify", str(path)]) == 2
    assert "$.gpus[0].threadblocks[0].ops[0].o_cids[0].off: -1" in capsys.readouterr().err


OP = "$.gpus[0].threadblocks[0].ops[3]"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"name": "put"', '"name": "pipeline"', f"{OP}.name: 'pipeline': must be one of nop, barrier"),
        ('"name": "put"', '"name": "res"', f"{OP}.name: 'res': must be one of"),
        ('"name": "put"', '"name": "rs"', f"{OP}.srcbuff: missing: rs must have it"),
        ('"name": "put"', '"name": "signal"', f"{OP}.srcs: signal must not have it"),
        ('"name": "put"', '"name": "pws"', f"{OP}.ctype: memory: must be one of port, proxy for pws"),
        ('"name": "put"', '"name": "ppkt", "barrier_id": 1', f"{OP}.barrier_id: ppkt must not have it"),
        ('"ctype": "memory"', '"ctype": "switch"', "ops[0].ctype"),
        ('"cnt": 1', '"cnt": 0', "ops[0].cnt: 0"),
        ('"srcs": [', '"srcs": [{"buff": "i", "off": 0},', f"{OP}.srcs: 2 of them: must be as many as o_cids"),
        ('"buff": "i"', '"buff": "s"', f"{OP}.srcs[0].buff: s: must be i, which is what the executor takes"),
        ('"id": 0,\n', '"id": 9,\n', "$.gpus[0].id: 9: must be 0"),
        (
            '"connectedTo": [\n      1',
            '"connectedTo": [\n      0',
            "$.gpus[0].channels[0].connectedTo: 0: must be another",
        ),
        ('"srcbuff": "i"', '"srcbuff": "x"', "ops[8].srcbuff"),
        ('"dstbuff": "s"', '"buff": "s"', "$.gpus[0].channels[0].buff: must not be given with type memory"),
        (
            '"cids": [\n        0',
            '"cids": [\n        7',
            "channels[0].cids: 7: the GPU has 2 channels memory from i to s",
        ),
        ('"inputChunks": 1', '"inputChunks": 99999999', "$.gpus[0].inputChunks: 99999999"),
        ('"inputChunks": 1', '"inputChunks": 524288', "parts of chunks"),
        ('"chunkGroups": 1', '"chunkGroups": 0', "$.gpus[0].chunkGroups: 0"),
        ('"chunkGroups": 1', '"chunkGroups": 1, "extra": 1', "extra"),
        ('"scratchChunks": 4', '"scratchChunks": 4, "scratchChunks": 4', "scratchChunks: must be there once"),
    ],
)
def test_what_is_not_a_plan_is_refused_with_its_path(old: str, new: str, says: str) -> None:
    data = both_07(EXCHANGE).decode()
    assert old in data
    with pytest.raises(CodecError, match=re.escape(says)):
        verify_mscclpp(data.replace(old, new, 1).encode())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (both_07(PACKETS + "; copy i0 > s3", proto="LL"), "ops[3].dstbuff: scratch space that has packets"),
        (both_07("ppkt i0 > OP.0", proto="LL"), "ops[0].o_buff.dst: o: must be s, where packets are"),
        (both_07("ppkt* i0 > SP.0", proto="LL"), "ops[0].srcs: i: must be s, where packets are"),
        (both_07("cpkt o0 > i0", proto="LL"), "ops[0].srcbuff: o: must be s, where packets are"),
        (both_07("rpkt i0 o0 > i0", proto="LL"), "ops[0].srcs[0].buff: o: must be s"),
        (both_07("put i0 > IP.0", coll="allgather", chunks=(1, 2)), "ops[0].o_buff.dst: i of another GPU in a call in"),
        (both_07("re i0 o0 > i0", coll="reducescatter", chunks=(2, 1)), "ops[0].srcs: o among srcs in a call in place"),
        (both_07("barrier 0 0"), "ops[0].nthread_blocks: 0: must be 1 or more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_judged_is_refused_with_its_path(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=re.escape(f"$.gpus[0].threadblocks[0].{says}")):
        verify_mscclpp(data)


# Against an interpreter of the file's own keys ------------------------------------------------------------------------


@dataclass
class Machine07:
    """Runs thread blocks in an order drawn by `choice`, whole operations at a time; None for a cell never written.

    It knows memory channels and packets of two halves, and shares no code with the verifier.
    """

    plan: dict[str, Any]
    choice: random.Random
    calls: int = 2
    memory: dict[tuple[int, str, int], float | None] = field(default_factory=dict)
    packets: dict[tuple[int, int, int], tuple[int, float | None]] = field(default_factory=dict)
    words: dict[tuple[int, int], deque[int]] = field(default_factory=dict)

    def run(self) -> bool:
        """Whether all blocks end, and every GPU has the sum in each call."""
        n = len(self.plan["gpus"])
        at = {(g, b): [0, 0] for g, gpu in enumerate(self.plan["gpus"]) for b, _ in enumerate(gpu["threadblocks"])}
        call = [-1] * n
        good = True
        while True:
            for g in range(n):
                own = [each for (gpu, _), each in at.items() if gpu == g]
                if call[g] < self.calls and all(each[0] == call[g] + 1 for each in own):
                    for chunk in range(self.plan["gpus"][g]["inputChunks"]):
                        wanted = sum(10**other * (call[g] + 1) + chunk for other in range(n))
                        good = good and (call[g] < 0 or self.memory[g, "i", chunk] == wanted)
                        self.memory[g, "i", chunk] = 10**g * (call[g] + 2) + chunk
                    call[g] += 1
            ready = [key for key, each in at.items() if each[0] == call[key[0]] < self.calls]
            self.choice.shuffle(ready)
            key = next((key for key in ready if self.step(key, at[key])), None)
            if key is None:
                return good and all(each == self.calls for each in call)

    def step(self, key: tuple[int, int], at: list[int]) -> bool:
        block = self.plan["gpus"][key[0]]["threadblocks"][key[1]]
        if not self.perform(key[0], block, block["ops"][at[1]], at[0]):
            return False
        at[1] += 1
        if at[1] == len(block["ops"]):
            at[:] = [at[0] + 1, 0]
        return True

    def ends(self, gpu: int, block: dict[str, Any], op: dict[str, Any], side: str) -> list[tuple[int, int, str, int]]:
        """Number of the channel at the GPU, its peer, the buffer there and the chunk, of each channel."""
        pair: Any = op.get(f"{side}_buff")
        found = []
        numbered = [
            (channel["srcbuff"], channel["dstbuff"], peer)
            for channel in self.plan["gpus"][gpu]["channels"]
            for peer in channel["connectedTo"]
        ]
        for end in op.get(f"{side}_cids", ()):
            (refs,) = [each for each in block["channels"] if (each["src"], each["dst"]) == (pair["src"], pair["dst"])]
            there = [k for k, each in enumerate(numbered) if each[:2] == (pair["src"], pair["dst"])]
            number = there[refs["cids"][end["id"]]]
            found.append((number, numbered[number][2], pair["dst"], end["off"]))
        return found

    def other_end(self, gpu: int, number: int) -> tuple[int, int]:
        mine = [peer for channel in self.plan["gpus"][gpu]["channels"] for peer in channel["connectedTo"]]
        peer, k = mine[number], mine[:number].count(mine[number])
        back = [each for channel in self.plan["gpus"][peer]["channels"] for each in channel["connectedTo"]]
        return peer, [at for at, each in enumerate(back) if each == gpu][k]

    def perform(self, gpu: int, block: dict[str, Any], op: dict[str, Any], call: int) -> bool:
        """Does an operation; false if it must wait."""
        name, memory = op["name"], self.memory
        into, out = self.ends(gpu, block, op, "i"), self.ends(gpu, block, op, "o")
        if name == "signal":
            for number, *_ in out:
                self.words.setdefault(self.other_end(gpu, number), deque()).append(1)
        if name == "wait":
            if not all(self.words.get((gpu, number)) for number, *_ in into):
                return False
            for number, *_ in into:
                self.words[gpu, number].popleft()
        local = [(gpu, each["buff"], each["off"]) for each in op.get("srcs", ())]
        if name in ("put", "ppkt"):
            for (_, peer, buffer, off), place in zip(out, local, strict=True):
                self.store(name == "ppkt", (peer, buffer, off), memory.get(place), call)
            return True
        if name == "get":
            for (_, peer, buffer, off), each in zip(into, op["dsts"], strict=True):
                memory[gpu, op["i_buff"]["src"], off] = memory.get((peer, buffer, each["off"]))
            return True
        if "srcbuff" not in op:
            return True
        if name in ("cpkt", "rpkt", "rspkt"):
            local += [(gpu, "s", op["srcoff"])] if name == "cpkt" else []
            got = [self.packets.get((gpu, off, call % 2), (-1, None)) for _, _, off in local]
            if any(flag != call for flag, _ in got):
                return False
            values = [value for _, value in got]
        else:
            values = [memory.get(place) for place in (*local, *(each[1:] for each in into))]
        values += [] if name == "cpkt" else [memory.get((gpu, op["srcbuff"], op["srcoff"]))]
        total = None if None in values else sum(each for each in values if each is not None)
        self.store(name == "tpkt", (gpu, op["dstbuff"], op["dstoff"]), total, call)
        for _, peer, buffer, off in out:
            self.store(name == "rspkt", (peer, buffer, off), total, call)
        return True

    def store(self, is_packet: bool, place: tuple[int, str, int], value: float | None, call: int) -> None:
        if is_packet:
            self.packets[place[0], place[2], call % 2] = (call, value)
        else:
            self.memory[place] = value


def spoil(plan: dict[str, Any], choice: random.Random) -> None:
    """Takes out, doubles or swaps an operation, or changes an offset of one, if anything."""
    ops = choice.choice(plan["gpus"])["threadblocks"][0]["ops"]
    at, how = choice.randrange(len(ops)), choice.randrange(4)
    if how == 0:
        del ops[at]
    elif how == 1:
        ops.insert(at, ops[at])
    elif how == 2 and at:
        ops[at - 1], ops[at] = ops[at], ops[at - 1]
    elif how == 3:
        places = [place for key in ("i_cids", "o_cids", "srcs", "dsts") for place in ops[at].get(key, ())]
        if places:
            choice.choice(places)["off"] ^= 1
        elif "srcoff" in ops[at]:
            ops[at]["srcoff"] ^= 1


KNOWN = ("exchange", "and send", "get", "packets", "reduced packets")


def compare(seeds: range) -> tuple[int, int]:
    """How many spoiled plans are proved, and how many the machine finds wrong; asserts that none is both."""
    proved = wrong = 0
    for seed in seeds:
        choice = random.Random(seed)
        plan = json.loads(RIGHT[choice.choice(KNOWN)])
        spoil(plan, choice)
        is_proved = verify_mscclpp(json.dumps(plan).encode()).verdict == PROVED
        is_wrong = not all(Machine07(plan, random.Random(each)).run() for each in range(4))
        assert not (is_proved and is_wrong), f"seed {seed}"
        proved, wrong = proved + is_proved, wrong + is_wrong
    return proved, wrong


def test_no_spoiled_plan_that_an_interpreter_finds_wrong_is_proved() -> None:
    proved, wrong = compare(range(60))
    assert proved >= 8 and wrong >= 12, (proved, wrong)


@pytest.mark.slow
def test_many_spoiled_plans_that_an_interpreter_finds_wrong_are_not_proved() -> None:
    proved, wrong = compare(range(60, 700))
    assert proved >= 80 and wrong >= 120, (proved, wrong)


def test_a_race_that_no_order_of_whole_operations_shows_is_refuted() -> None:
    """The interpreter runs whole operations: a thread that is early is not among its orders."""
    data = FAULTS["no nop behind a wait"].wrong
    assert all(Machine07(json.loads(data), random.Random(seed)).run() for seed in range(4))
    assert verify_mscclpp(data).properties["races"] == REFUTED
