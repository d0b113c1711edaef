"""What `limits` calls proved, the loaders' own checks accept: counted in the file, without the writer's code."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import cache
from typing import Any

import pytest

from optcc.errors import OptccError
from optcc.export import write_msccl_xml, write_mscclpp_json
from optcc.plan import Plan
from optcc.planner import build
from optcc.topology import Topology
from optcc.verify.plan.limits import check_limits

INT16, INT8, INT32 = 2**15 - 1, 2**7 - 1, 2**31 - 1
CASES = [
    (name, topology, size, segments)
    for name in ("ring", "direct", "optcc", "shares", "recursive-doubling", "bidirectional-ring")
    for topology in ("2@50GB/s", "4@50GB/s", "8@50GB/s", "16@50GB/s,3=25GB/s")
    for size, segments in ((983_040, 1), (983_040, 8), (62_914_560, 64), (2**28 * 15, 4), (2**31, 1))
]


def msccl_loads(file: bytes) -> str:
    """What the parser of MSCCL has no room for; empty if it takes the file."""
    algo = ElementTree.fromstring(file)
    gpus = algo.findall("gpu")
    for gpu in gpus:
        blocks = gpu.findall("tb")
        steps = [step for block in blocks for step in block.findall("step")]
        if 1 + len(gpus) + len(blocks) + len(steps) > 4095:
            return "nodes"
        if len(blocks) > 216 or any(int(each.get("chan", "0")) >= 32 for each in blocks):
            return "blocks"
        for block in blocks:
            if len(block.findall("step")) > 256:
                return "steps"
        for step in steps:
            if not 0 <= int(step.get("cnt", "0")) < 72:
                return "count"
            if int(step.get("depid", "-1")) > INT8 or int(step.get("deps", "-1")) >= 256:
                return "dependency"
            if max(int(step.get("srcoff", "0")), int(step.get("dstoff", "0"))) > INT16:
                return "offset"
    return "name" if len(algo.get("name", "")) > 63 or int(algo.get("nchannels", "0")) > 32 else ""


def mscclpp_loads(file: bytes) -> str:
    """What the loader of MSCCL++ has no room for; empty if it takes the file."""
    plan = json.loads(file)
    if not 0 <= plan["min_message_size"] <= INT32:
        return "size"
    for gpu in plan["gpus"]:
        for block in gpu["threadblocks"]:
            if len(block["ops"]) > 64 or len(block.get("channels", ())) > 16:
                return "operations"
            for op in block["ops"]:
                if any(not 0 <= value < 2**32 for value in numbers(op)):
                    return "numbers"
    return ""


def numbers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [each for part in value.values() for each in numbers(part)]
    if isinstance(value, list):
        return [each for part in value for each in numbers(part)]
    return [value] if isinstance(value, int) else []


LOADERS = {"msccl-xml": (write_msccl_xml, msccl_loads), "mscclpp-json": (write_mscclpp_json, mscclpp_loads)}


@cache
def plans(most: int) -> list[Plan]:
    """Those with so many instructions at most."""
    found = []
    for name, topology, size, segments in CASES:
        try:
            plan = build(name, Topology.parse(topology), size, segments=segments).plan
        except OptccError:
            continue
        if len(plan) <= most:
            found.append(plan)
    return found


@pytest.mark.parametrize("most", [1_500, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", LOADERS)
def test_what_fits_its_limits_is_loaded(target: str, most: int) -> None:
    write, loads = LOADERS[target]
    fitting = refused = 0
    for plan in plans(most):
        if check_limits(plan, target) is None:
            wrong = loads(write(plan))
            assert not wrong, f"{plan!r}: {wrong}"
            fitting += 1
        else:
            refused += 1
    assert fitting >= 15 and refused >= (10 if most > 1_500 else 5), (fitting, refused)
