"""The order in which a plan adds: expressions that are those of an interpreter in exact arithmetic, and of the run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from optcc import cli
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import InputError
from optcc.plan import Plan
from optcc.planner import build
from optcc.runtime.communicator import Communicator
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.schedules.ring import ring
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verify.plan import verify_plan
from optcc.verify.plan.additions import addition_orders


def evaluate(expression: str, inputs: np.ndarray) -> np.ndarray:
    """What an expression makes of the ranks' inputs, in the arithmetic of their type."""
    value = eval(re.sub(r"\d+", lambda rank: f"inputs[{rank.group()}]", expression), {"inputs": inputs})
    assert isinstance(value, np.ndarray)
    return value


def result_of(plan: Plan, inputs: np.ndarray) -> np.ndarray:
    """Rank 0's result of an AllReduce by this plan."""

    def body(rank: int, transport: Transport) -> np.ndarray:
        comm = Communicator(transport, lambda *_: (plan, verify_plan(plan)))
        return np.asarray(comm.all_reduce(inputs[rank].copy()))

    return run_ranks(len(inputs), body)[0]


@pytest.mark.parametrize(
    "name", ["ring", "recursive-doubling", "shares", "optimal", "double-binary-tree", "rank-order"]
)
@pytest.mark.parametrize("ports", ["exclusive", "fifo", "fair"])
def test_a_run_gives_the_bits_of_the_expressions(name: str, ports: Model) -> None:
    """Each element is that of one of the expressions, and so many are as are said."""
    inputs = np.random.default_rng(7).standard_normal((5, 1003)).astype(np.float32)
    plan = build(name, Topology.parse("5@1GB/s,1=300MB/s"), inputs[0].nbytes, segments=3, ports=ports).plan
    orders = addition_orders(plan)
    assert sum(orders.values()) == inputs[0].nbytes
    result = result_of(plan, inputs)
    agrees = {text: int((evaluate(text, inputs).view(np.uint32) == result.view(np.uint32)).sum()) for text in orders}
    assert all(4 * agrees[text] >= n_bytes for text, n_bytes in orders.items())
    some = np.any([evaluate(text, inputs).view(np.uint32) == result.view(np.uint32) for text in orders], axis=0)
    assert some.all()


def test_each_slice_of_a_ring_begins_at_another_rank() -> None:
    """Around the ring from there; of ten elements two slices have three, and two have two."""
    assert addition_orders(compile_schedule(ring(n_ranks=4), size_bytes=40)) == {
        "0 + ((1 + 2) + 3)": 12,
        "((0 + 3) + 1) + 2": 12,
        "((0 + 1) + 2) + 3": 8,
        "(0 + (2 + 3)) + 1": 8,
    }


def test_a_plan_that_is_not_proved_has_no_order() -> None:
    @schedule
    def half(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=1, dst=0)

    with pytest.raises(InputError, match="half: must be proved before its additions are looked at"):
        addition_orders(compile_schedule(half(n_ranks=2), size_bytes=36))


def test_the_command_says_in_which_order_a_plan_adds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "rank-order", "--topology", "4@1GB/s,3=500MB/s", "--size", "64KiB", "--additions"]
    assert cli.run(words) == 0
    assert "64KiB are ((0 + 1) + 2) + 3, of the inputs of these ranks" in capsys.readouterr().out
