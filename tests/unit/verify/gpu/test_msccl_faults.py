"""A planted fault of each class of mistakes in MSCCL's XML: refuted, and the step named where it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from optcc.verdict import PROPERTIES, PROVED, REFUTED
from optcc.verify.gpu.msccl import verify_msccl
from optcc.verify.gpu.operations import StepCounterexample
from tests.unit.verify.gpu.msccl_sample import algo, ring


@dataclass(frozen=True)
class XmlFault:
    """A mistake of class `number`; the counterexample must name this GPU, thread block and step (-1: none).

    `right` is the file without the mistake, which must be proved.
    """

    number: int
    what: str
    wrong: bytes
    right: bytes
    property: str
    at: tuple[int, int, int]
    says: str


def pair(first: str, second: str, **options: object) -> bytes:
    """Two GPUs with a thread block each, which send to each other."""
    return algo([[(1, 1, 0, first)], [(0, 0, 0, second)]], **options)  # type: ignore[arg-type]


def staged(first: str, second: str, other: str = "s i0; r i0", **options: object) -> bytes:
    """GPU 0 receives in thread block 0 and goes on in thread block 1; GPU 1 has one."""
    return algo([[(-1, 1, 0, first), (1, -1, 0, second)], [(0, 0, 0, other)]], **options)  # type: ignore[arg-type]


def summed(*orders: str) -> bytes:
    """Three GPUs exchange their inputs, and each adds up what it has in the order that `orders` says."""
    gpus = []
    for rank, order in enumerate(orders):
        near, far = (rank + 1) % 3, (rank + 2) % 3
        exchange = [(near, near, min(rank, near), "s i0; r s0 !"), (far, far, min(rank, far), "s i0; r s1 !")]
        gpus.append([*exchange, (-1, -1, 0, f"nop @1.1; cpy {order.split()[0]} s2 @0.1; " + order.split(" ", 1)[1])])
    return algo(gpus)


PAIR = pair("s i0; r i0", "rrc i0; s i0")
RING = ring(3)
STAGED = staged("r s0 !", "re s0 i0 @0.0; s i0")
GATHER = pair("s i0; r o1", "s i0; r o0", coll="allgather", chunks=2)
OUT = pair("s i0; r o0", "rrc i0 o0; s o0", in_place=0)
TWICE = staged("r s0 !; r s0 @1.0 !", "re s0 i0 @0.0 !; re s0 i1 @0.1; s i0 x2", "s i0; s i1; r i0 x2", chunks=2)
LONG = 'minBytes="0" maxBytes="{}"'


def big(size: int) -> bytes:
    """Eight chunks are sent before any is taken: safe for calls in which they are two messages at most."""
    first = "s i0 x8; rrc i8 x8; s i8 x8; r i0 x8"
    second = "s i8 x8; rrc i0 x8; s i0 x8; r i8 x8"
    return pair(first, second, chunks=16, head=LONG.format(size))


FAULTS = (
    XmlFault(
        1, "double reduction", pair("s i0; s i0; r i0", "rrc i0; rrc i0; s i0"), PAIR, "result", (1, 0, 1), "2 times"
    ),
    XmlFault(
        2,
        "a contribution is missing",
        ring(3, ["s", "rrcs", "rcs", "rcs", "r"]),
        RING,
        "result",
        (0, 0, 3),
        "i[0] lacks the contribution i[0] of GPU 2",
    ),
    XmlFault(
        3,
        "wrong chunk",
        pair("s i0 x4; r i0 x4", "rrc i4 i0 x4; s i0 x4", chunks=8, proto="LL"),
        pair("s i0 x8; r i0 x8", "rrc i0 x8; s i0 x8", chunks=8, proto="LL"),
        "result",
        (1, 0, 0),
        "which does not belong there",
    ),
    XmlFault(
        4,
        "counts in another order",
        pair("s i0 x2; s i2; r i0 x3", "rrc i2; rrc i0 x2; s i0 x3", chunks=3),
        pair("s i0 x2; s i2; r i0 x3", "rrc i0 x2; rrc i2; s i0 x3", chunks=3),
        "matching",
        (1, 0, 0),
        "2 chunks are sent, 1 are received",
    ),
    XmlFault(
        5,
        "another channel",
        algo([[(1, 1, 0, "s i0; r i0")], [(0, -1, 0, "s i0"), (-1, 0, 1, "rrc i0 !")]]),
        PAIR,
        "matching",
        (0, 0, 0),
        "no thread block of GPU 1 receives from GPU 0 on channel 0",
    ),
    XmlFault(6, "both wait", pair("r i0; s i0", "rrc i0; s i0"), PAIR, "deadlock", (0, 0, 0), "2 steps wait"),
    XmlFault(
        7,
        "more messages than the connection holds",
        pair("s i0; s i1; s i2; rrc i3; rrc i4; rrc i5", "s i3; s i4; s i5; rrc i0; rrc i1; rrc i2", chunks=6),
        big(2**20),
        "deadlock",
        (0, 0, 2),
        "to take one of 2 messages",
    ),
    XmlFault(
        8,
        "two blocks wait for each other",
        staged("r s0 @1.0 !", "re s0 i0 @0.0 !; s i0"),
        STAGED,
        "deadlock",
        (0, 0, 0),
        "2 steps wait for each other",
    ),
    XmlFault(
        9,
        "read before it is written",
        staged("r s0 !", "re s0 i0; s i0"),
        STAGED,
        "races",
        (0, 0, 0),
        "while a step that nothing orders with this one reads GPU 0 s[0]",
    ),
    XmlFault(
        10,
        "written before it is read",
        staged("r s0 !; r s0 !", "re s0 i0 @0.0 !; re s0 i1 @0.1; s i0 x2", "s i0; s i1; r i0 x2", chunks=2),
        TWICE,
        "races",
        (0, 1, 0),
        "GPU 0 s[0]",
    ),
    XmlFault(
        11,
        "received where a send still reads",
        algo([[(1, -1, 0, "s i0"), (-1, 1, 0, "r i0")], [(0, -1, 0, "s i0"), (-1, 0, 0, "r i0")]]),
        PAIR,
        "races",
        (1, 1, 0),
        "writes it while",
    ),
    XmlFault(
        12,
        "a slot of scratch is used again too soon",
        staged(
            "r s0 !; r s1 !; r s0 !",
            "re s0 i0 @0.0; re s1 i1 @0.1; re s0 i2 @0.2; s i0 x3",
            "s i0 x1; s i1; s i2; r i0 x3",
            chunks=3,
        ),
        staged(
            "r s0 !; r s1 !; r s0 @1.0 !",
            "re s0 i0 @0.0 !; re s1 i1 @0.1; re s0 i2 @0.2; s i0 x3",
            "s i0; s i1; s i2; r i0 x3",
            chunks=3,
        ),
        "races",
        (0, 0, 2),
        "GPU 0 s[0]",
    ),
    XmlFault(
        13,
        "a stale read of scratch",
        staged("r s0 !; r s1 !", "re s0 i0 @0.1 !; re s0 i1; s i0 x2", "s i0; s i1; r i0 x2", chunks=2),
        TWICE,
        "result",
        (0, 1, 1),
        "which does not belong there",
    ),
    XmlFault(
        14,
        "input and output are one place",
        algo([[(1, 1, 0, "s i0; r o1")], [(-1, 0, 0, "r o1"), (0, -1, 0, "s i0 @0.0")]], coll="allgather", chunks=2),
        GATHER,
        "deadlock",
        (1, 1, 0),
        "which nothing sets",
    ),
    XmlFault(
        14,
        "received onto the input of a call in place",
        algo([[(1, 1, 0, "s i0; r o1")], [(-1, 0, 0, "r o1"), (0, -1, 0, "s i0")]], coll="allgather", chunks=2),
        GATHER,
        "races",
        (1, 1, 0),
        "GPU 1 o[1]",
    ),
    XmlFault(
        15,
        "the input is changed",
        pair("s i0; r o0", "rrc i0; s i0; cpy i0 o0", in_place=0),
        OUT,
        "result",
        (1, 0, 0),
        "changes i[0]",
    ),
    XmlFault(
        16, "read, and never written", pair("s s0; r i0", "rrc i0; s i0"), PAIR, "result", (0, 0, 0), "never written"
    ),
    XmlFault(
        17,
        "passed on without the update",
        ring(3, ["s", "rrcs", "rcs", "rcs", "r"]).replace(
            b'type="rcs" srcbuf="i" srcoff="1"', b'type="rrs" srcbuf="i" srcoff="1"'
        ),
        RING,
        "result",
        (0, 0, 3),
        "lacks",
    ),
    XmlFault(
        18,
        "the sender's place as operand",
        pair("s i0 x2; r i0 x2", "rrc s0 i0 x2; s i0 x2", chunks=2),
        pair("s i0 x2; r i0 x2", "rrc i0 x2; s i0 x2", chunks=2),
        "result",
        (1, 0, 0),
        "never written",
    ),
    XmlFault(
        19,
        "a copy that overlaps itself",
        pair("cpy i0 i1 x2; s i0 x3; r i0 x3", "rrc i0 x3; s i0 x3", chunks=3, proto="LL"),
        pair("s i0 x3; r i0 x3", "rrc i0 x3; s i0 x3", chunks=3, proto="LL"),
        "races",
        (0, 0, 0),
        "at another offset",
    ),
    XmlFault(
        20, "a message is left", pair("s i0; r i0; s i0", "rrc i0; s i0"), PAIR, "matching", (0, 0, 2), "never received"
    ),
    XmlFault(
        21,
        "orders of addition differ",
        summed(*["i0 re s0 s2 !; re s1 s2 !; cpy s2 i0"] * 3),
        summed(
            "i0 re s0 s2 !; re s1 s2 !; cpy s2 i0",
            "s1 re i0 s2 !; re s0 s2 !; cpy s2 i0",
            "s0 re s1 s2 !; re i0 s2 !; cpy s2 i0",
        ),
        "agreement",
        (1, 2, 4),
        "different orders",
    ),
    XmlFault(
        22,
        "scratch taken for zero",
        pair("s i0; rrc s0 i0", "rrc i0; s i0"),
        PAIR,
        "result",
        (0, 0, 1),
        "depends on what was never written",
    ),
    XmlFault(
        23,
        "the last chunk is left out",
        pair("s i0 x2; r i0 x2", "rrc i0 x2; s i0 x2", chunks=3),
        pair("s i0 x3; r i0 x3", "rrc i0 x3; s i0 x3", chunks=3, proto="LL"),
        "result",
        (0, -1, -1),
        "",
    ),
    XmlFault(
        23,
        "the last chunk is passed on without the sum",
        pair("s i0 x3; r i0 x3", "r s0 x3; re s0 i0 x2; s i0 x3", chunks=3, proto="LL"),
        pair("s i0 x3; r i0 x3", "r s0 x3; re s0 i0 x3; s i0 x3", chunks=3, proto="LL"),
        "result",
        (0, 0, 1),
        "i[2] lacks the contribution i[2] of GPU 0",
    ),
    XmlFault(
        24,
        "a step of 72 chunks",
        pair("s i0 x72; r i0 x72", "rrc i0 x72; s i0 x72", chunks=72, proto="LL"),
        pair("s i0 x71; r i0 x71", "rrc i0 x71; s i0 x71", chunks=71, proto="LL"),
        "limits",
        (0, 0, 0),
        "cnt 72: must be at most 71",
    ),
    XmlFault(
        24,
        "257 steps",
        pair("s i0; r i0" + "; cpy i0 s0" * 255, "rrc i0; s i0"),
        pair("s i0; r i0" + "; cpy i0 s0" * 254, "rrc i0; s i0"),
        "limits",
        (0, 0, -1),
        "257 steps: must be at most 256",
    ),
    XmlFault(
        25,
        "a peer that has no connection",
        algo([[(1, 1, 0, "s i0; r i0"), (2, -1, 1, "s i0")], [(0, 0, 0, "rrc i0; s i0")], []]),
        PAIR,
        "matching",
        (0, 1, 0),
        "no thread block of GPU 2 receives",
    ),
    XmlFault(
        26, "offered for sizes for which it deadlocks", big(2**24), big(2**20), "deadlock", (0, 0, 0), "of 1 chunks"
    ),
    XmlFault(
        26,
        "offered for no size",
        pair("s i0; r i0", "rrc i0; s i0", head='minBytes="8" maxBytes="4"'),
        PAIR,
        "limits",
        (-1, -1, -1),
        "minBytes 8: must be at most maxBytes 4",
    ),
    XmlFault(27, "no step at all", algo([[], []]), PAIR, "result", (0, -1, -1), "lacks"),
    XmlFault(
        27,
        "steps that change nothing",
        algo([[(-1, -1, 0, "cpy i0 s0; cpy s0 i0")]] * 2),
        PAIR,
        "result",
        (0, 0, 1),
        "lacks the contribution i[0] of GPU 1",
    ),
)
RIGHT_FILES = sorted({fault.right for fault in FAULTS})


def named(fault: XmlFault) -> str:
    return f"{fault.number}-{fault.what.replace(' ', '-')}"


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_planted_fault_is_refuted(fault: XmlFault) -> None:
    verdict = verify_msccl(fault.wrong, "wrong.xml")
    found = verdict.counterexample
    assert isinstance(found, StepCounterexample), verdict.properties
    assert (found.property, (found.gpu, found.thread_block, found.step)) == (fault.property, fault.at), found
    assert fault.says in str(found), found
    assert found.file == "wrong.xml" and f"wrong.xml: line {found.line}" in found.summary
    order = ("limits", *PROPERTIES)
    place = order.index(found.property)
    assert [verdict.properties[each] for each in order[: place + 1]] == [PROVED] * place + [REFUTED]


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_the_line_is_that_of_the_element_named(fault: XmlFault) -> None:
    found = verify_msccl(fault.wrong).counterexample
    assert isinstance(found, StepCounterexample)
    lines = fault.wrong.decode().splitlines()
    line = lines[found.line - 1]
    names = (("step", "s", found.step), ("tb", "id", found.thread_block), ("gpu", "id", found.gpu))
    element, key, number = next((each for each in names if each[2] >= 0), ("algo", "name", "sample"))
    assert re.match(f'<{element} {key}="{number}"', line), line
    before = "\n".join(lines[: found.line])
    assert found.gpu < 0 or before.rindex("<gpu id=") == before.rindex(f'<gpu id="{found.gpu}"')


@pytest.mark.parametrize("right", RIGHT_FILES, ids=range(len(RIGHT_FILES)))
def test_without_the_fault_it_is_proved(right: bytes) -> None:
    verdict = verify_msccl(right)
    assert verdict.verdict == PROVED, verdict.counterexample


def test_each_class_has_a_fault_whose_step_is_named() -> None:
    assert {fault.number for fault in FAULTS if min(fault.at) >= 0} == set(range(1, 28))
