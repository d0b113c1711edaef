"""Pipelines, and port channels of several blocks: the verifier against an interpreter that performs them byte by byte.

What the interpreter finds wrong in some order must not be proved; what it never finds wrong may still be refuted, since
a race need not show. Plans are spoiled at random, within their pipelines and around them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from optcc.errors import CodecError
from optcc.verdict import PROVED
from optcc.verify.gpu.mscclpp import read_mscclpp, verify_mscclpp
from optcc.verify.gpu.mscclpp_pipeline import has_pipelines, sizes_to_judge
from tests.differential.mscclpp_interpreter import CELL, Interpreter
from tests.unit.verify.gpu.test_mscclpp_pipelines import FAULTS, RIGHT
from tests.unit.verify.gpu.test_mscclpp_ports import SHARED, SHARED_FAULTS, two_blocks

PLANS = [*RIGHT.values(), *(two_blocks(text) for text in SHARED.values())]
WRONG = {
    **{name: data for name, (data, property_, *_) in FAULTS.items() if property_ not in ("limits", "agreement")},
    **{name: two_blocks(text) for name, (text, *_) in SHARED_FAULTS.items()},
}
ORDERS = 12


def performs(data: bytes, orders: int = ORDERS) -> bool:
    """Whether the interpreter finds nothing wrong, in any size that is judged."""
    file, text = read_mscclpp(data), json.loads(data)
    cell, sizes = sizes_to_judge(file) if has_pipelines(file) else (CELL, [1, 2])
    return all(Interpreter(text, size * cell // CELL, seed).run() for size in sizes[::-1] for seed in range(orders))


def test_the_interpreter_performs_right_plans() -> None:
    for number, data in enumerate(PLANS):
        assert performs(data, 3), number


@pytest.mark.parametrize("name", WRONG)
def test_the_interpreter_finds_planted_faults(name: str) -> None:
    assert not performs(WRONG[name], 60)


def spoil(text: dict[str, Any], choice: random.Random) -> None:
    """Takes out, doubles, swaps or moves an operation, or changes a number, in a pipeline or beside it."""
    block = choice.choice(choice.choice(text["gpus"])["threadblocks"])
    lists = [block["ops"], *(op["ops"] for op in block["ops"] if op["name"] == "pipeline")]
    ops = (lists[-1] if choice.random() < 0.8 else lists[0]) or block["ops"]
    if not ops:
        return
    at = choice.randrange(len(ops))
    op, how = ops[at], choice.randrange(6)
    if how == 0:
        del ops[at]
    elif how == 1:
        ops.insert(at, json.loads(json.dumps(op)))
    elif how == 2:
        ops.insert(choice.randrange(len(ops)), ops.pop(at))
    elif how == 3 and op["name"] == "pipeline":
        op["iter_context"][choice.choice(["unit_size", "num_chunks"])] *= 2
    elif how == 4 and "semaphore_ids" in op:
        op["semaphore_ids"] = [choice.randrange(2)]
    else:
        operands = [*op.get("src_buff", ()), *op.get("dst_buff", ())]
        if operands:
            choice.choice(operands)["index"] += choice.choice([-1, 1])


def compare(seeds: range) -> tuple[int, int, int]:
    """How many spoiled plans are proved, refuted and found wrong by the interpreter, and refuted only."""
    proved = wrong = only = 0
    for seed in seeds:
        choice = random.Random(seed)
        text = json.loads(choice.choice(PLANS))
        for _ in range(choice.choice([1, 1, 2])):
            spoil(text, choice)
        data = json.dumps(text).encode()
        try:
            verdict = verify_mscclpp(data)
        except CodecError:
            continue
        refuted = {name for name, each in verdict.properties.items() if each != PROVED}
        if "limits" in refuted or refuted == {"agreement"}:
            continue
        right = performs(data)
        assert right or refuted, f"seed {seed}: proved, and the interpreter finds a fault"
        proved, wrong, only = proved + (not refuted), wrong + (not right), only + (right and bool(refuted))
    return proved, wrong, only


def test_spoiled_plans_that_are_proved_are_right() -> None:
    proved, wrong, only = compare(range(30))
    print(proved, wrong, only)
    assert proved >= 2 and wrong >= 8, (proved, wrong, only)


@pytest.mark.slow
def test_many_spoiled_plans_that_are_proved_are_right() -> None:
    proved, wrong, only = compare(range(30, 1_000))
    print(proved, wrong, only)
    assert proved >= 50 and wrong >= 300 and only < wrong, (proved, wrong, only)
