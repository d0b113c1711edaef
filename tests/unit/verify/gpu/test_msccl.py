"""The verifier of MSCCL's XML: what is right is proved, as its run-times read it, and what they refuse is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from optcc.cli import run
from optcc.errors import CodecError, InputError, OptccError
from optcc.export import write_msccl_xml
from optcc.planner import build
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.gpu import msccl_file
from optcc.verify.gpu.msccl import verify_msccl
from optcc.verify.plan.limits import check_limits
from tests.golden.readers import Fault, check_allreduce, run_msccl
from tests.unit.verify.gpu.msccl_sample import algo, ring

PAIR = [[(1, 1, 0, "s i0; r i0")], [(0, 0, 0, "rrc i0; s i0")]]
EXPORTED = [
    ("ring", "2@50GB/s", 2, 1),
    ("ring", "5@50GB/s", 5, 2),
    ("direct", "4@50GB/s", 4, 1),
    ("recursive-doubling", "4@50GB/s", 4, 1),
    ("optcc", "4@50GB/s,3=25GB/s", 24, 2),
    ("shares", "3@50GB/s", 12, 1),
]


def exported(name: str, topology: str, elements: int, segments: int) -> bytes:
    return write_msccl_xml(build(name, Topology.parse(topology), 4 * elements, segments=segments).plan)


@pytest.mark.parametrize("case", EXPORTED, ids=str)
def test_our_own_files_are_proved(case: tuple[str, str, int, int]) -> None:
    verdict = verify_msccl(exported(*case), target="msccl")
    assert set(verdict.properties.values()) == {PROVED}, verdict.counterexample
    assert dict(verdict.conditions)["deadlock"].startswith("connections with room for 2 messages")


@pytest.mark.parametrize(
    ("coll", "chunks", "gpus"),
    [
        ("reducescatter", 2, [[(1, 1, 0, "s i1; rrc i0 i0")], [(0, 0, 0, "s i0; rrc i1 i1")]]),
        ("reduce_scatter", 2, [[(1, 1, 0, "s i1; rrc i0 i0")], [(0, 0, 0, "s i0; rrc i1 i1")]]),
        ("allgather", 2, [[(1, 1, 0, "s i0; r o1")], [(0, 0, 0, "s o1; r o0")]]),
        ("alltoall", 2, [[(1, 1, 0, "s i1; r s0; cpy s0 i1")], [(0, 0, 0, "s i0; r i0")]]),
        ("broadcast", 2, [[(-1, 1, 0, "r i0 x2")], [(0, -1, 0, "s i0 x2")]]),
        ("reduce", 1, [[(1, -1, 0, "s i0")], [(-1, 0, 0, "rrc i0")]]),
    ],
)
def test_other_collectives(coll: str, chunks: int, gpus: list[list[tuple[int, int, int, str]]]) -> None:
    declared = (2, 1) if coll == "reduce_scatter" else None
    verdict = verify_msccl(algo(gpus, coll=coll, chunks=chunks, declared=declared))
    assert verdict.verdict == PROVED, verdict.counterexample
    root = "root 1" if coll in ("broadcast", "reduce") else None
    assert dict(verdict.conditions).get("result") == root


def test_a_custom_collective_promises_nothing_that_could_be_judged() -> None:
    verdict = verify_msccl(algo(PAIR, coll="custom"))
    assert verdict.verdict == UNKNOWN and verdict.exit_code == 3
    assert verdict.properties["races"] == PROVED and verdict.properties["result"] == UNKNOWN


def test_out_of_place_and_in_place_are_two_questions() -> None:
    """A broadcast that a root sends on only from its output is right in place alone."""
    gpus = [[(1, -1, 0, "s o0")], [(-1, 0, 0, "r o0")]]
    assert verify_msccl(algo(gpus, coll="broadcast", in_place=1, out_of_place=0)).verdict == PROVED
    found = verify_msccl(algo(gpus, coll="broadcast", in_place=1, out_of_place=1)).counterexample
    assert found is not None and "out of place" in found.trace


def refusal(text: str, *, target: str = "msccl", **options: object) -> str:
    gpus = [[(1, 1, 0, "s i0; r i0 !"), (-1, -1, 1, text)], PAIR[1]]
    found = verify_msccl(algo(gpus, scratch=64, **options), target=target).counterexample  # type: ignore[arg-type]
    return "" if found is None else str(found)


def test_what_a_nop_waits_for_the_next_step_waits_for() -> None:
    assert refusal("nop @0.1; cpy i0 s1 @0.0") == ""
    assert refusal("nop @0.2; cpy i0 s1 @0.0").startswith("deadlock")  # the flag of block 0 is 1 at the end
    assert "must itself wait" in refusal("nop @0.1; cpy s0 s1")


def test_the_flag_of_a_nop_is_never_set() -> None:
    gpus = [[(1, 1, 0, "s i0; r i0 !"), (-1, -1, 0, "nop @0.1 !; cpy i0 s0 @0.1 !"), (-1, -1, 0, "cpy s0 s3 @1.0")]]
    assert verify_msccl(algo([*gpus, PAIR[1]])).verdict == PROVED  # the copy behind it has a higher number
    gpus[0][1] = (-1, -1, 0, "nop @0.1 !; cpy i0 s0 @0.1")
    found = verify_msccl(algo([*gpus, PAIR[1]])).counterexample
    assert found is not None and "waits for a flag of thread block 1 of at least 0, which nothing sets" in str(found)


def test_a_wait_between_two_reductions_of_one_chain_is_too_late() -> None:
    """The loader joins the two, and gives what the nop waits for to the step behind them."""
    blocks = [(1, 1, 0, "s i0; r i0 !"), (-1, 1, 1, "r s0 !")]
    other = [(0, 0, 0, "rrc i0; s i0 !"), (0, -1, 1, "s i0 @0.1")]
    for text, races in (
        ("cpy i0 s2 @0.1 !; re s1 s2; nop @1.0; re s0 s2; cpy s2 s3 @1.0", REFUTED),
        ("cpy i0 s2 @0.1 !; re s1 s2 !; re s0 s2 @1.0; cpy s2 s3", PROVED),
    ):
        verdict = verify_msccl(algo([[*blocks, (-1, -1, 0, text)], other]))
        assert verdict.properties["races"] == races, verdict.counterexample
        assert races == PROVED or "GPU 0 s[0]" in str(verdict.counterexample)


def test_a_chain_of_reductions_has_a_limit() -> None:
    assert refusal("cpy i0 s0 @0.9; " + "; ".join(["re s1 s0"] * 16)).startswith("deadlock")
    chain = "; ".join(["re s1 s0 !"] * 17 + ["re s1 s0"] * 17)
    assert "more than 16 re in a row" in refusal(chain)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("; ".join(["cpy s1 s0"] * 65), {"target": "rccl"}, "65 steps: must be at most 64"),
        ("; ".join(["cpy s1 s0"] * 65), {"target": "msccl"}, ""),
        ("cpy i0 s64", {}, "dstoff 64: must be below s_chunks 64"),
        ("cpy i0 s0 x72", {}, "cnt 72: must be at most 71"),
        ("cpy i0 s0 @128.0", {}, "depid 128: must be at most 127"),
        ("cpy i0 s0", {"declared": (0, 1)}, "srcoff 0: must be below i_chunks 0"),
        ("cpy i0 s0", {"declared": (2, 1)}, "i_chunks 2: must be 0, or nchunksperloop 1"),
        ("cpy s0 s1", {"declared": (2, 1), "target": "rccl"}, ""),
        ("cpy i0 s0", {"head": "", "target": "rccl"}, "minBytes: missing"),
        ("cpy s0 s1", {"head": ""}, ""),
        ("cpy i0 s0 x4", {}, "i[0:4] is outside of i, which has 1 chunks"),
    ],
)
def test_limits_of_run_times(text: str, options: dict[str, object], says: str) -> None:
    found = refusal(text, **options)  # type: ignore[arg-type]
    assert says in found and (says != "" or found == "")


def test_what_their_reader_of_xml_does_not_know() -> None:
    data = algo(PAIR)
    tricks = ((b' id="0"', b"  id='0'"), (b"<algo", b'<?xml version="1.0"?><algo'), (b"<tb ", b"<tb\n"))
    for old, new in tricks:
        found = verify_msccl(data.replace(old, new, 1)).counterexample
        assert found is not None and "attributes in double quotes" in found.summary
    assert verify_msccl(b"<!-- a comment -->\n" + data.replace(b"\n", b"\n  ")).verdict == PROVED


def test_low_latency_protocols_load_the_local_operand_before_the_message_comes() -> None:
    """GPU 1 passes on what it was sent when block 1 had written s0: that orders what is read behind the message."""
    gpus = [
        [(-1, 1, 0, "rrc s0 i0"), (1, -1, 1, "cpy i1 s0; s i1")],
        [(0, -1, 0, "s i0 @1.0"), (-1, 0, 1, "r s0 !")],
    ]
    for proto, races in (("Simple", PROVED), ("LL", REFUTED), ("LL128", REFUTED)):
        verdict = verify_msccl(algo(gpus, proto=proto, coll="custom", chunks=2))
        assert verdict.properties["races"] == races


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'ngpus="2"', b'ngpus="3"', "line 1: <algo>: ngpus 3: GPU 2 is missing"),
        (b'<gpu id="1"', b'<gpu id="0"', "line 9: <tb>: send 0, recv 0: must not be the GPU itself"),
        (b"</algo>", b'<gpu id="0" i_chunks="0" o_chunks="0" s_chunks="0"/></algo>', "id 0: is on line 2 already"),
        (b'cnt="1"', b'cnt="1e9"', 'line 4: <step>: cnt "1e9": must be an integer from 1 to 32768'),
        (b'cnt="1"', b'cnt="0"', 'line 4: <step>: cnt "0": must be an integer from 1'),
        (b'type="s"', b'type="send"', 'line 4: <step>: type "send": must be one of s, r,'),
        (b'recv="1"', b'recv="0"', "line 3: <tb>: send 1, recv 0: must not be the GPU itself"),
        (b'recv="1"', b'recv="-1"', "line 5: <step>: type r: receives"),
        (b' hasdep="0"', b"", "line 4: <step>: attribute hasdep: missing"),
        (b' hasdep="0"', b' hasdep="0" when="now"', "line 4: <step>: attribute when: must be one of"),
        (b'coll="allreduce"', b'coll="scan"', 'line 1: <algo>: coll "scan": must be one of allreduce'),
        (b'inplace="1"', b'inplace="0"', "one of them must be 1"),
        (b'<tb id="0"', b'<tb id="1"', "line 2: <gpu>: thread block 0 is missing"),
        (b"<tb ", b"<block ", "line 3: not XML: mismatched tag"),
        (b"<algo ", b'<!DOCTYPE algo [<!ENTITY a "aaaa">]><algo ', "line 1: a document type: must not be in the file"),
        (b"<gpu ", b"text<gpu ", "line 2: text 'text': must not be in the file"),
        (b'name="sample"', b'name="' + b"x" * 256 + b'"', "name: 256 characters: must be at most 255"),
    ],
)
def test_what_is_not_an_algorithm_is_refused_with_its_line(old: bytes, new: bytes, says: str) -> None:
    data = algo(PAIR).replace(old, new, 1)
    if b"<block " in new:
        says = "not XML: mismatched tag"
    with pytest.raises(CodecError, match=re.escape(says)):
        verify_msccl(data)


@pytest.mark.parametrize(
    ("limit", "most", "says"),
    [
        ("CELLS_MAX", 10, "18 chunks in all: must be at most 10"),
        ("BLOCKS_MAX", 1, "2 thread blocks in all: must be at most 1"),
        ("CLOCKS_MAX", 7, "8 steps by thread blocks in all: must be at most 7"),
    ],
)
def test_what_would_need_too_much_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, says: str
) -> None:
    monkeypatch.setattr(msccl_file, limit, most)
    with pytest.raises(CodecError, match=f"line 1: <algo>: {says}"):
        verify_msccl(algo(PAIR))


def test_a_target_must_be_known() -> None:
    with pytest.raises(InputError, match="must be one of msccl, rccl, msccl-executor"):
        verify_msccl(ring(2), target="nccl")


def spoiled(data: bytes, choice: random.Random) -> bytes:
    """The file with one attribute of a step or block changed."""
    spots = list(re.finditer(rb'(srcoff|dstoff|depid|deps|hasdep|chan|type|cnt)="([^"]*)"', data))
    unused = {b"s": b"dstoff", b"r": b"srcoff", b"rcs": b"srcoff"}
    while True:
        spot = choice.choice(spots)
        name = spot[1]
        kind = re.search(rb'type="(\w+)"', data[data.rindex(b"<", 0, spot.start()) :])
        if kind is None or unused.get(kind[1]) != name:
            break
    if name == b"type":
        new = choice.choice([b"s", b"r", b"rrc", b"rrcs", b"rcs", b"cpy"])
    elif name == b"hasdep":
        new = b"0" if spot[2] == b"1" else b"1"
    else:
        new = str(max(-1, int(spot[2]) + choice.choice([-1, 1, 2]))).encode()
    return data[: spot.start(2)] + new + data[spot.end(2) :]


def performs(data: bytes) -> bool | None:
    """Whether the machines of the exports' tests, which share no code with the verifier, find nothing wrong.

    None for what they refuse though it may do no harm: waits for a step without a flag, idle nops, places that no
    step reads.
    """
    try:
        for seed in range(4):
            check_allreduce(run_msccl(data, seed=seed))
    except Fault as fault:
        return None if re.search("waits for ever|out of the buffer|merged|a nop waits|lost", str(fault)) else False
    except KeyError:
        return False
    return True


def compare(seeds: range) -> tuple[int, int]:
    """How many spoiled files both call right, and how many wrong; asserts that they never differ."""
    files = [exported(*case) for case in EXPORTED[:5]]
    right = wrong = 0
    for seed in seeds:
        choice = random.Random(seed)
        data = spoiled(choice.choice(files), choice)
        try:
            properties = verify_msccl(data, target="msccl").properties
        except CodecError:
            continue
        proved = {each for name, each in properties.items() if name != "agreement"} == {PROVED}
        expected = performs(data)
        assert expected in (None, proved), f"seed {seed}"
        right, wrong = right + (expected is True), wrong + (expected is False)
    return right, wrong


def test_spoiled_files_get_the_verdict_of_an_interpreter() -> None:
    right, wrong = compare(range(120))
    assert right >= 10 and wrong >= 20, (right, wrong)


@pytest.mark.slow
def test_many_spoiled_files_get_the_verdict_of_an_interpreter() -> None:
    right, wrong = compare(range(60, 6_000))
    assert right >= 500 and wrong >= 1_500, (right, wrong)


@pytest.mark.parametrize("target", ["msccl", "rccl", "msccl-executor"])
def test_limits_of_a_plan_are_those_of_the_loader_that_reads_its_file(target: str) -> None:
    fits = build("ring", Topology.parse("4@50GB/s"), 4 * 4, segments=1).plan
    assert check_limits(fits, target) is None
    large = build("ring", Topology.parse("24@50GB/s"), 4 * 48, segments=2).plan
    found = check_limits(large, target)
    assert (found is None) == (target == "msccl")
    assert found is None or "steps: must be at most 64" in found.summary


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.xml"
    path.write_bytes(ring(3))
    assert run(["verify", str(path)]) == 0
    assert "limits holds for msccl, rccl, msccl-executor" in capsys.readouterr().out
    path.write_bytes(ring(3, ["s", "rrcs", "rcs", "rcs", "r"]))
    assert run(["verify", str(path), "--json", "--target", "rccl"]) == 1
    found = json.loads(capsys.readouterr().out)["counterexample"]
    shown = {key: found[key] for key in ("file", "line", "gpu", "thread_block", "step", "property")}
    assert shown == {"file": "ring.xml", "line": 7, "gpu": 0, "thread_block": 0, "step": 3, "property": "result"}
    path.write_bytes(b"<algo/>")
    assert run(["verify", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"optcc: file '{path}': line 1: <algo>: attribute name: missing")
    for argv in (["--size", "1MiB"], ["--target", "mpi"], ["--promise", "1s"]):
        assert run(["verify", str(path), *argv]) == 2
    path.write_bytes(b"{}")
    assert run(["verify", str(path)]) == 2


def test_errors_are_of_the_package() -> None:
    assert issubclass(CodecError, OptccError)
