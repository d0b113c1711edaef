"""Where a plan runs: in the user's output, or in memory of its own with copies around it; and its slots.

Arrays that do not fit are refused through `Executor` in `test_runtime`.
"""

from __future__ import annotations

import numpy as np
import pytest

from optcc.runtime.buffers import ALIGNMENT, COPIED_BYTES_MAX, RECV, PlanBuffers, PlanMemory, aligned, touched
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.samples import ring
from optcc.runtime.state import RankProgram

RANK, N_RANKS = 1, 3


def buffers_of(size_bytes: int, reduction: str = "sum") -> PlanBuffers:
    """The memory of a ring at one rank; the handle of each channel is its number."""
    plan = ring(N_RANKS, size_bytes, "float32", reduction, segments=2)
    kernels = NumpyKernels("float32", reduction)
    program, handles = RankProgram(plan, RANK), range(len(plan.channels))
    memory = PlanMemory(kernels.view, touched, aligned, -1, reads_input=False)
    return PlanBuffers(plan, RANK, program, handles, memory, in_order=False)


@pytest.mark.parametrize(
    ("size_bytes", "moves"), [(COPIED_BYTES_MAX, False), (COPIED_BYTES_MAX + 12, True)], ids=["short", "long"]
)
def test_a_plan_that_is_tied_is_tied_to_other_arrays_only_if_they_are_long(size_bytes: int, moves: bool) -> None:
    buffers = buffers_of(size_bytes)
    first, second = (np.zeros(size_bytes // 4, np.float32) for _ in range(2))
    arrays = buffers.arrange(first, first)
    assert arrays.address == first.ctypes.data and arrays.before is arrays.after is None
    buffers.tie(arrays)
    again = buffers.arrange(second, second)
    assert (again.address == second.ctypes.data) == moves
    assert (again.before is None) == (again.after is None) == moves
    assert again.output is second
    assert buffers.arrange(first, first).address == first.ctypes.data


def test_an_input_that_is_elsewhere_is_copied_into_the_output_first() -> None:
    send, recv = np.arange(24, dtype=np.float32), np.zeros(24, np.float32)
    arrays = buffers_of(96).arrange(send, recv)
    assert arrays.before is not None and arrays.after is None and arrays.source is None
    target, source = arrays.before
    assert (target.ctypes.data, source.ctypes.data) == (recv.ctypes.data, send.ctypes.data)
    assert target.nbytes == source.nbytes == 96


def test_slots_do_not_overlap_and_begin_at_a_cache_line() -> None:
    data = np.zeros(25, np.float32)
    buffers = buffers_of(100)
    bound = buffers.tie(buffers.arrange(data, data))
    slots = {(view.ctypes.data, view.nbytes) for code, _, view, _ in bound if code == RECV}
    assert len({address for address, _ in slots}) > 1
    assert all(address % ALIGNMENT == 0 and n_bytes <= ALIGNMENT for address, n_bytes in slots)


def test_an_average_is_divided_once_in_every_byte_of_the_output() -> None:
    data = np.zeros(24, np.float32)
    for reduction, n_bytes in (("sum", 0), ("avg", 96)):
        buffers = buffers_of(96, reduction)
        buffers.tie(buffers.arrange(data, data))
        assert sum(part.nbytes for part, _ in buffers.averages) == n_bytes
