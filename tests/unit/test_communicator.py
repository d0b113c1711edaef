"""Communicators: every collective is exact, many overlap, failures end all of them, and nothing leaks."""

from __future__ import annotations

import contextlib
import os
import random
import re
import runpy
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest

from optcc.collective import DTYPE_BYTES, Collective
from optcc.errors import DeadlineExceeded, InputError, MismatchError, PlanError, RankLost, RuntimeFault
from optcc.experiments.executor_speed import ImmediateTransport
from optcc.plan import Plan
from optcc.planner import Planner
from optcc.runtime import communicator
from optcc.runtime.buffers import COPIED_BYTES_MAX
from optcc.runtime.communicator import Communicator
from optcc.runtime.concurrent_engines import THREAD_ENGINES
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import expected_output, make_input
from optcc.runtime.handle import Handle
from optcc.runtime.meeting_file import in_file
from optcc.runtime.nics import nics_of
from optcc.runtime.samples import exchange, ring
from optcc.runtime.transport import Bytes, Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.sim import SimNetwork, run_sim
from optcc.runtime.transports.tcp import TcpTransport
from optcc.topology import Topology
from optcc.verdict import PROPERTIES, UNKNOWN, Verdict
from optcc.verify.plan import verify_plan

T = TypeVar("T")
DONE_S = 60.0
MIX = [
    (dtype, op, count)
    for (dtype, op), count in zip(
        [
            *(("float32", "sum"), ("float64", "max"), ("int32", "avg"), ("int64", "prod"), ("bfloat16", "sum")),
            *(("float16", "min"), ("uint8", "bxor"), ("float32", "avg"), ("int8", "sum"), ("float32", "sum")),
        ],
        (1, 40_001, 777, 0, 5_000, 63, 100_000, 20_000, 3, 60_000),
        strict=True,
    )
]
"""Ten AllReduces of different types, reductions and lengths."""


def sample(collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
    """A plan made by hand: round a ring, or by an exchange that needs scratch, whichever the length says."""
    make = ring if size_bytes // DTYPE_BYTES[dtype] % 2 else exchange
    plan = make(collective.n_ranks, size_bytes, dtype, reduction)
    return plan, verify_plan(plan)


def run_tcp(n_ranks: int, function: Callable[[Transport], T], folder: Path) -> list[T]:
    """`function` with a TCP transport over loopback, once a rank, in threads of this process."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            nics = nics_of({"OPTCC_SOCKET_IFNAME": "=lo"})
            transport = TcpTransport(in_file(folder / "meeting", rank, n_ranks), nics)
            try:
                results[rank] = function(transport)
            finally:
                transport.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise next((error for error in failures if not isinstance(error, RankLost)), failures[0])
    return [results[rank] for rank in range(n_ranks)]


def on_loopback(n_ranks: int, function: Callable[[Communicator], T], **settings: Any) -> list[T]:
    settings = {"plan_for": sample, "deadline_s": 20.0, **settings}
    return run_ranks(n_ranks, lambda _, transport: function(Communicator(transport, **settings)), deadline_s=DONE_S)


def wanted(comm: Communicator, name: str, count: int, dtype: str, op: str, root: int = 0, seed: int = 0) -> Any:
    return expected_output(Collective(name, comm.n_ranks, root), count, dtype, op, comm.rank, seed=seed)[0]


class TestCollectives:
    @pytest.mark.parametrize("topology", ["4@1GB/s", "3@1GB/s,1=500MB/s", "1@1GB/s"])
    @pytest.mark.parametrize("count", [0, 1, 24_000])
    def test_all_are_exact_with_plans_of_the_library(self, topology: str, count: int) -> None:
        def body(comm: Communicator) -> None:
            n, me = comm.n_ranks, comm.rank
            root = n - 1
            for dtype, op in (("float32", "sum"), ("int64", "avg")):
                array = make_input(me, count, dtype, op)
                kept = array.copy()
                total = wanted(comm, "allreduce", count, dtype, op)
                assert np.array_equal(comm.all_reduce(array, op), total)
                own = slice(count * me // n, count * (me + 1) // n)
                assert np.array_equal(comm.reduce_scatter(array, op), total[own])
                reduced = comm.reduce(array, op, root)
                assert reduced is None if me != root else np.array_equal(reduced, total)
                assert np.array_equal(comm.broadcast(array.copy(), root), make_input(root, count, dtype, op))
                gathered = comm.all_gather(array)
                assert gathered.shape == (n, count)
                assert all(np.array_equal(gathered[rank], make_input(rank, count, dtype, op)) for rank in range(n))
                assert np.array_equal(array, kept)

        planner = Planner(Topology.parse(topology), schedules={"allreduce": "ring"})
        on_loopback(Topology.parse(topology).n_ranks, body, plan_for=planner)

    def test_arrays_of_any_shape_in_place_and_out_of_place(self) -> None:
        def body(comm: Communicator) -> None:
            cube = make_input(comm.rank, 4 * 5 * 6, "float32", "sum").reshape(4, 5, 6)
            total = wanted(comm, "allreduce", 120, "float32", "sum").reshape(4, 5, 6)
            assert np.array_equal(comm.all_reduce(cube), total)
            assert comm.all_reduce(cube, out=cube) is cube
            assert np.array_equal(cube, total)
            assert comm.all_reduce(np.array(2.0)) == 6.0
            whole = np.zeros((comm.n_ranks, 5), dtype=np.int32)
            whole[comm.rank] = comm.rank
            assert comm.all_gather(whole[comm.rank], whole) is whole
            assert whole[:, 0].tolist() == [0, 1, 2]

        def plan_for(collective: Collective, size: int, dtype: str, op: str) -> tuple[Plan, Verdict]:
            return (sample if collective.name == "allreduce" else planner)(collective, size, dtype, op)

        planner = Planner(Topology.parse("3@1GB/s"))
        on_loopback(3, body, plan_for=plan_for)

    def test_memory_changes_from_run_to_run(self) -> None:
        """Short arrays are copied to where the plan is tied, long ones have it tied to them."""

        def body(comm: Communicator) -> None:
            for count in (COPIED_BYTES_MAX // 4 - 1, COPIED_BYTES_MAX // 4 + 1):
                arrays = [np.empty(count, dtype=np.float32) for _ in range(3)]
                for seed in range(9):
                    array = arrays[seed * 2 % 3]
                    array[:] = make_input(comm.rank, count, "float32", "sum", seed=seed)
                    comm.all_reduce(array, out=array)
                    assert np.array_equal(array, wanted(comm, "allreduce", count, "float32", "sum", seed=seed)), seed

        on_loopback(2, body)

    def test_what_cannot_be_is_refused(self) -> None:
        def body(comm: Communicator) -> None:
            good = np.zeros(8, dtype=np.float32)
            calls: list[tuple[Callable[[], Any], str]] = [
                (lambda: comm.all_reduce([1.0]), "array: list: must be an array"),
                (lambda: comm.all_reduce(np.float32(1.0)), "array: float32: must be an array"),
                (lambda: comm.all_gather(3), "array: int: must be an array"),
                (lambda: comm.reduce_scatter_init(good, out=[0.0]), "out: list: must be an array"),
                (
                    lambda: comm.all_reduce(Foreign(good[::-1].astype(">f4"))),
                    "array: Foreign: cannot be used where it is",
                ),
                (lambda: comm.all_reduce(good, "mean"), "reduction 'mean': must be one of"),
                (lambda: comm.all_reduce(good, "bor"), "reduction 'bor' of float32"),
                (lambda: comm.all_reduce(good.astype(">f4")), r"send: >f4: must be the plan's float32"),
                (lambda: comm.all_reduce(np.zeros(3, dtype=complex)), "dtype 'complex128': must be one of"),
                (lambda: comm.all_reduce(good, out=good[:4]), "recv: 16 B: must be the plan's 32 B"),
                (lambda: comm.all_reduce(good[::2]), "send: must be contiguous"),
                (lambda: comm.reduce(good, root=1), "root 1: must be a rank below 1"),
            ]
            for call, message in calls:
                with pytest.raises(InputError, match=message):
                    call()
            assert comm.all_reduce(good).tolist() == [0.0] * 8

        on_loopback(1, body)

    def test_a_plan_for_something_else_is_refused(self) -> None:
        def other(collective: Collective, size: int, dtype: str, op: str) -> tuple[Plan, Verdict]:
            return sample(collective, 2 * size, dtype, op)

        def unproved(collective: Collective, size: int, dtype: str, op: str) -> tuple[Plan, Verdict]:
            plan, _ = sample(collective, size, dtype, op)
            return plan, Verdict(plan.digest, dict.fromkeys(PROPERTIES, UNKNOWN))

        array = np.zeros(8)
        with pytest.raises(InputError, match="allreduce of 128 B float64 by sum on 2 ranks: must be allreduce of 64 B"):
            on_loopback(2, lambda comm: comm.all_reduce(array), plan_for=other)
        with pytest.raises(PlanError, match="must be proved before it runs"):
            on_loopback(2, lambda comm: comm.all_reduce(array), plan_for=unproved)

    def test_ranks_that_call_different_things_all_learn_of_it(self) -> None:
        def body(comm: Communicator) -> str:
            with pytest.raises(MismatchError) as caught:
                comm.all_reduce(np.zeros(4 + comm.rank // 2), "sum")
            return str(caught.value)

        assert on_loopback(3, body) == ["rank 2 differs from ranks 0, 1: size_bytes 40 instead of 32"] * 3

    def test_ranks_whose_channels_are_not_the_same_learn_of_it(self) -> None:
        """Rank 1 has closed a plan that the others keep."""

        def body(comm: Communicator) -> str:
            several = [comm.all_reduce_init(np.ones(5)) for _ in range(2)]
            if comm.rank == 1:
                several[0].close()
            with pytest.raises(MismatchError) as caught:
                comm.all_reduce_init(np.ones(5))
            return str(caught.value)

        assert on_loopback(3, body) == ["rank 1 differs from ranks 0, 2: group 1 instead of 3"] * 3


class Foreign:
    """An array of another package: it offers the array API's exchange and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OldForeign(Foreign):
    """One of a form that cannot say whether memory may be written, as torch's was."""

    def __dlpack__(self, *, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__(stream=stream)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.array


class TestForeignArrays:
    @pytest.mark.parametrize("kind", [Foreign, OldForeign])
    def test_their_memory_is_used_where_it_is(self, kind: Callable[[Any], Any]) -> None:
        def body(comm: Communicator) -> None:
            mine, out = make_input(comm.rank, 501, "float32", "sum"), np.zeros(501, dtype=np.float32)
            given, wrapped = kind(mine), kind(out)
            assert comm.all_reduce(given, out=wrapped) is wrapped
            assert np.array_equal(out, wanted(comm, "allreduce", 501, "float32", "sum"))
            assert np.array_equal(comm.all_reduce(given), out)
            assert comm.all_reduce(given, out=given) is given
            assert np.array_equal(mine, out)

        on_loopback(2, body)

    def test_what_is_read_only_is_refused_as_an_output(self) -> None:
        fixed = np.zeros(4)
        fixed.flags.writeable = False
        with pytest.raises(InputError, match="recv: read-only"):
            on_loopback(1, lambda comm: comm.all_reduce(Foreign(fixed), out=Foreign(fixed)))

    def test_results_are_of_the_kind_that_came(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package = ModuleType("foreign_package")
        monkeypatch.setattr(package, "from_dlpack", Foreign, raising=False)
        monkeypatch.setitem(sys.modules, "foreign_package", package)
        monkeypatch.setattr(Foreign, "__module__", "foreign_package.arrays")
        results = on_loopback(2, lambda comm: comm.all_reduce(Foreign(np.ones(3))))
        assert [type(each) for each in results] == [Foreign] * 2
        assert [each.array.tolist() for each in results] == [[2.0] * 3] * 2


class TestPersistent:
    @pytest.mark.parametrize("count", [12, 24_001])
    def test_all_collectives_run_again_on_what_the_arrays_hold(self, count: int) -> None:
        def body(comm: Communicator) -> None:
            n, me, root = comm.n_ranks, comm.rank, 1
            array, whole = np.zeros(count), np.zeros(count)
            made = [
                comm.all_reduce_init(array),
                comm.reduce_scatter_init(array),
                comm.all_gather_init(array),
                comm.reduce_init(array, "sum", root),
                comm.broadcast_init(whole, root),
            ]
            assert len({each.requests[0].collective.name for each in made}) == 5
            for seed in range(3):
                array[:] = make_input(me, count, "float64", "sum", seed=seed)
                whole[:] = array
                handles = [each.start() for each in made]
                total, piece, gathered, reduced, spread = (handle.result() for handle in handles)
                sums = wanted(comm, "allreduce", count, "float64", "sum", seed=seed)
                assert np.array_equal(total, sums)
                assert np.array_equal(piece, sums[count * me // n : count * (me + 1) // n])
                assert all(np.array_equal(gathered[r], make_input(r, count, "float64", "sum", seed)) for r in range(n))
                assert reduced is None if me != root else np.array_equal(reduced, sums)
                assert spread is whole and np.array_equal(whole, make_input(root, count, "float64", "sum", seed))
            for each in made:
                each.close()

        on_loopback(3, body, plan_for=Planner(Topology.parse("3@1GB/s"), schedules={"allreduce": "ring"}))


class TestExchanges:
    @pytest.mark.parametrize("topology", ["1@1GB/s", "3@1GB/s,1=500MB/s", "2x2@1GB/s", "4@1GB/s"])
    @pytest.mark.parametrize("width", [0, 3, 30_000])
    def test_all_to_all_gather_and_scatter(self, topology: str, width: int) -> None:
        def body(comm: Communicator) -> None:
            n, me, root = comm.n_ranks, comm.rank, comm.n_ranks - 1
            inputs = [make_input(rank, n * width, "float32", "sum").reshape(n, width) for rank in range(n)]
            column = np.stack([each[me] for each in inputs])
            assert np.array_equal(comm.all_to_all(inputs[me]), column)
            moving = inputs[me].copy()
            assert comm.all_to_all(moving, out=moving) is moving
            assert np.array_equal(moving, column)
            gathered = comm.gather(inputs[me], root)
            assert gathered is None if me != root else np.array_equal(gathered, np.stack(inputs))
            part = np.zeros(width, dtype=np.float32)
            assert comm.scatter(inputs[me] if me == root else None, root, part) is part
            assert np.array_equal(part, inputs[root][me])
            again = comm.all_to_all_init(moving)
            for turn in range(2):
                moving[:] = inputs[me] + turn
                assert np.array_equal(again.start().result(), column + turn)

        on_loopback(Topology.parse(topology).n_ranks, body, plan_for=Planner(Topology.parse(topology)))

    def test_all_to_all_v(self) -> None:
        def body(comm: Communicator) -> None:
            n, me = comm.n_ranks, comm.rank
            counts = [[(src + 2 * dst) % 4 * 1000 for dst in range(n)] for src in range(n)]
            inputs = [make_input(rank, sum(row), "int64", "sum") for rank, row in enumerate(counts)]
            whole = [np.split(each, np.cumsum(row)[:-1])[me] for each, row in zip(inputs, counts, strict=True)]
            assert np.array_equal(comm.all_to_all_v(inputs[me], counts[me]), np.concatenate(whole))
            assert np.array_equal(
                comm.all_to_all_v_init(inputs[me], counts[me]).start().result(), np.concatenate(whole)
            )
            assert comm.all_to_all_v(inputs[me][:0], [0] * n).size == 0
            with pytest.raises(InputError, match="must add up to"):
                comm.all_to_all_v(inputs[me][:1], [5] * n)

        on_loopback(3, body, plan_for=Planner(Topology.parse("3@1GB/s")))

    def test_over_tcp(self, tmp_path: Path) -> None:
        def body(transport: Transport) -> None:
            with Communicator(transport, Planner(Topology.parse("3@1GB/s"), ports="fair"), deadline_s=20.0) as comm:
                inputs = [make_input(rank, 90_000, "float32", "sum").reshape(3, -1) for rank in range(3)]
                assert np.array_equal(
                    comm.all_to_all(inputs[comm.rank]), np.stack([each[comm.rank] for each in inputs])
                )
                gathered = comm.gather(inputs[comm.rank], 1)
                assert gathered is None if comm.rank != 1 else np.array_equal(gathered, np.stack(inputs))

        run_tcp(3, body, tmp_path)

    @pytest.mark.parametrize("op", ["sum", "avg", "max"])
    def test_a_declared_collective_of_the_documentation(self, op: str, tmp_path: Path) -> None:
        page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
        code = next(each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "# halo.py" in each)
        file = tmp_path / "halo.py"
        file.write_text(code, encoding="utf-8")
        (halo, all_pairs) = (runpy.run_path(str(file))[name] for name in ("halo", "all_pairs"))

        def body(comm: Communicator) -> None:
            n, me = comm.n_ranks, comm.rank
            for declared in (halo(n), all_pairs(n)):
                count = 100 * len(declared.cells)
                given = np.concatenate(
                    [make_input(me, count, "float64", op)[a:b] for a, b, _ in declared.before(me, count)]
                )
                expected = expected_output(declared, count, "float64", op, me)[0]
                whole = np.concatenate([expected[a:b] for a, b, _ in declared.after(me, count)])
                assert np.array_equal(comm.perform(declared, given, op), whole)
                assert np.array_equal(comm.perform(declared, given, op, out=given), whole)

        schedules = {"halo": f"{file}:swap_halos", "all_pairs": f"{file}:exchange"}
        on_loopback(4, body, plan_for=Planner(Topology.parse("4@1GB/s"), schedules=schedules))
        wrong = code.replace("            edge.copy(src=(rank + 1) % p, dst=rank)\n", "")
        assert wrong != code
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(PlanError, match=r"refuted, so it does not run: .*contribution of rank"):
            on_loopback(4, body, plan_for=Planner(Topology.parse("4@1GB/s"), schedules=schedules))

    def test_what_cannot_be_is_refused(self) -> None:
        def body(comm: Communicator) -> None:
            odd = np.zeros(3)
            calls: list[tuple[Callable[[], Any], str]] = [
                (lambda: comm.all_to_all(odd), "array: 3 elements: must be a multiple of 2"),
                (lambda: comm.scatter(odd if comm.rank == 0 else None, 0, None), "array: 3 elements|out: NoneType"),
                (lambda: comm.all_to_all_v(odd, [1, 1, 1]), "must be 2 numbers, none below zero"),
                (lambda: comm.all_to_all_v(odd, [4, -1]), "must be 2 numbers, none below zero"),
                (lambda: comm.gather(odd, 2), "root 2: must be a rank below 2"),
                (
                    lambda: comm.perform(
                        Collective.declared("mine", 2, before=[(0, 0)], after=[(1, 0, [0])]), odd, out=odd
                    ),
                    "collective 'mine': must have a schedule",
                ),
            ]
            for call, message in calls:
                with pytest.raises(InputError, match=message):
                    call()

        on_loopback(2, body, plan_for=Planner(Topology.parse("2@1GB/s")))


def mixed(comm: Communicator) -> int:
    """Starts all of MIX at once, twice, ends them in an order of this rank's own; wrong elements."""
    wrong = 0
    order = random.Random(comm.rank)
    for seed in range(2):
        handles: list[tuple[Handle, Any]] = []
        for dtype, op, count in MIX:
            array = make_input(comm.rank, count, dtype, op, seed=seed)
            total = wanted(comm, "allreduce", count, dtype, op, seed=seed)
            handles.append((comm.start_all_reduce(array, op, dtype=dtype), total))
        order.shuffle(handles)
        for handle, total in handles:
            wrong += int(np.count_nonzero(handle.result() != total))
    comm.barrier()
    return wrong


class TestManyAtOnce:
    def test_ten_of_different_kinds_are_exact_on_loopback(self) -> None:
        assert on_loopback(3, mixed) == [0] * 3

    def test_ten_of_different_kinds_are_exact_on_shaped_ports(self) -> None:
        topology = Topology.parse("3@200MB/s,1=50MB/s")
        bodies = run_ranks(3, lambda _, transport: mixed(Communicator(transport, sample)), topology=topology)
        assert bodies == [0] * 3

    def test_ten_of_different_kinds_are_exact_in_simulated_time(self) -> None:
        network = SimNetwork(3, seed=5)
        assert run_sim(network, lambda _, t: mixed(Communicator(t, sample, clock=t.clock))) == [0] * 3

    def test_ten_of_different_kinds_are_exact_over_tcp(self, tmp_path: Path) -> None:
        assert run_tcp(3, lambda transport: mixed(Communicator(transport, sample)), tmp_path) == [0] * 3

    def test_those_of_one_kind_follow_each_other(self) -> None:
        def body(comm: Communicator) -> None:
            arrays = [make_input(comm.rank, 501, "float32", "sum", seed=seed) for seed in range(8)]
            handles = [comm.start_all_reduce(array, out=array) for array in arrays]
            assert not handles[-1].done
            for seed in reversed(range(8)):
                assert np.array_equal(
                    handles[seed].result(), wanted(comm, "allreduce", 501, "float32", "sum", seed=seed)
                )
            assert all(handle.done for handle in handles)

        on_loopback(3, body)

    def test_a_rank_may_wait_before_the_others_have_made_ready(self) -> None:
        """Rank 0 makes the second plan ready while rank 1 still waits for the first run, and needs rank 0 for it."""

        def body(comm: Communicator) -> None:
            first = make_input(comm.rank, 30_001, "float32", "sum")
            handle = comm.start_all_reduce(first)
            if comm.rank:
                handle.wait()
            second = comm.all_reduce_init(make_input(comm.rank, 11, "int64", "max"), "max")
            assert np.array_equal(handle.result(), wanted(comm, "allreduce", 30_001, "float32", "sum"))
            assert np.array_equal(second.start().result(), wanted(comm, "allreduce", 11, "int64", "max"))

        on_loopback(3, body, deadline_s=5.0)

    def test_persistent_ones_of_one_kind_overlap_and_run_again(self) -> None:
        def body(comm: Communicator) -> None:
            arrays = [make_input(comm.rank, 301, "float32", "sum", seed=seed) for seed in range(3)]
            several = [comm.all_reduce_init(array) for array in arrays]
            for turn in range(3):
                for array, seed in zip(arrays, range(3), strict=True):
                    array[:] = make_input(comm.rank, 301, "float32", "sum", seed=seed + turn)
                handles = [each.start() for each in several]
                for seed, handle in enumerate(handles):
                    total = wanted(comm, "allreduce", 301, "float32", "sum", seed=seed + turn)
                    assert np.array_equal(handle.result(), total)
            for each in several:
                each.close()
            with pytest.raises(InputError, match="closed: must be prepared again"):
                several[0].start()

        on_loopback(3, body)

    def test_test_never_waits_and_makes_progress(self) -> None:
        def body(comm: Communicator) -> int:
            handle = comm.start_all_reduce(np.ones(1001, dtype=np.float32))
            if comm.rank == 0:
                assert not handle.wait(0.01)
                (comm.engine.transport).allgather(b"go")
            else:
                (comm.engine.transport).allgather(b"go")
            looks, until_s = 0, time.monotonic() + 20
            while not handle.test() and time.monotonic() < until_s:
                looks += 1
            assert handle.done and (handle.output == comm.n_ranks).all()
            return looks

        on_loopback(2, body)

    def test_plans_that_are_not_used_give_way_and_their_channels_are_used_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(communicator, "PLANS_MAX", 2)

        def body(comm: Communicator) -> int:
            highest = []
            for turn in range(3):
                for count in (11, 13, 15, 17, 19):
                    array = make_input(comm.rank, count, "int32", "sum", seed=turn)
                    total = wanted(comm, "allreduce", count, "int32", "sum", seed=turn)
                    assert np.array_equal(comm.all_reduce(array), total)
                highest.append(
                    max(
                        comm.engine.transport.open(plan.plan.channels, plan.group)[comm.rank]
                        for plan in comm._plans.values()
                    )
                )
            assert len(set(highest)) == 1
            return len(comm._plans)

        assert on_loopback(3, body) == [2] * 3


class TestFailure:
    def test_cancelling_ends_every_run_at_every_rank(self) -> None:
        def body(comm: Communicator) -> list[str]:
            handles = [comm.start_all_reduce(np.ones(count, dtype=np.float32)) for count in (5_001, 7, 5_001)]
            comm.barrier()
            never = comm.all_reduce_init(np.ones(9))
            if comm.rank == 1:
                pending = never.start()
                pending.cancel("on purpose")
                handles.append(pending)
            else:
                handles.append(never.start())
            errors = []
            for handle in handles[-1:]:
                with pytest.raises(RuntimeFault) as caught:
                    handle.wait()
                errors.append(f"{type(caught.value).__name__}: {caught.value}")
            with pytest.raises(RuntimeFault, match="a former run failed"):
                comm.all_reduce(np.ones(3))
            return errors

        begin = time.monotonic()
        assert on_loopback(3, body) == [
            ["RankLost: rank 1 is lost: Cancelled: rank 1: on purpose"],
            ["Cancelled: rank 1: on purpose"],
            ["RankLost: rank 1 is lost: Cancelled: rank 1: on purpose"],
        ]
        assert time.monotonic() - begin < 10

    def test_a_run_that_is_done_stays_done(self) -> None:
        def body(comm: Communicator) -> None:
            handle = comm.start_all_reduce(np.ones(3))
            handle.wait()
            handle.cancel()
            assert handle.test() and comm.all_reduce(np.ones(3)).tolist() == [2.0] * 3

        on_loopback(2, body)

    def test_a_deadline_ends_every_run_at_every_rank(self, tmp_path: Path) -> None:
        def body(transport: Transport) -> list[str]:
            comm = Communicator(transport, sample, deadline_s=0.3 if transport.rank == 0 else 20.0)
            late = comm.all_reduce_init(np.ones(5))
            other = comm.all_reduce_init(np.ones(7))
            if comm.rank == 2:
                time.sleep(0.8)
                waiting = [other.start()]
            else:
                waiting = [other.start(), late.start()]
            names = []
            for handle in waiting:
                with pytest.raises(RuntimeFault) as caught:
                    handle.wait()
                names.append(type(caught.value).__name__)
            return names

        begin = time.monotonic()
        # The others see rank 0 leave, or find it gone.
        assert run_tcp(3, body, tmp_path) == [["DeadlineExceeded"] * 2, ["RankLost"] * 2, ["RankLost"]]
        assert time.monotonic() - begin < 10

    def test_an_exception_of_the_program_ends_the_others(self) -> None:
        def body(comm: Communicator) -> None:
            with comm:
                comm.all_reduce(np.ones(5))
                if comm.rank == 1:
                    raise ValueError("broken on purpose")
                with pytest.raises(RankLost, match="rank 1 is lost: Cancelled: rank 1: ValueError: broken on purpose"):
                    comm.all_reduce(np.ones(5))

        with pytest.raises(ValueError, match="broken on purpose"):
            on_loopback(3, body)

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (lambda: np.zeros(5, dtype="datetime64[s]"), "InputError: "),
            (lambda: "five", "InputError: "),
            (lambda: 5 // 0, "ZeroDivisionError: "),
        ],
    )
    def test_bad_input_at_one_rank_is_known_to_all_over_tcp(
        self, wrong: Callable[[], Any], why: str, tmp_path: Path
    ) -> None:
        def body(transport: Transport) -> str:
            def use() -> None:
                with Communicator(transport, sample, deadline_s=20.0) as comm:
                    comm.all_reduce(np.ones(5))
                    comm.all_reduce(wrong() if comm.rank == 1 else np.ones(5))

            with pytest.raises((InputError, ZeroDivisionError) if transport.rank == 1 else RankLost) as caught:
                use()
            error = caught.value
            if isinstance(error, RankLost):
                assert error.culprits == (1,)
                return str(error)
            return f"rank 1 is lost: Cancelled: rank 1: {type(error).__name__}: {error}"

        first, own, last = run_tcp(3, body, tmp_path)
        assert why in own and (first, last) == (f"rank 0: {own}", f"rank 2: {own}")

    def test_barriers_meet_and_miss(self) -> None:
        def body(comm: Communicator) -> None:
            for _ in range(20):
                comm.barrier()
            if comm.rank == 2:
                time.sleep(0.5)
                return
            with pytest.raises((DeadlineExceeded, RankLost)):
                comm.barrier(0.1)

        on_loopback(3, body)

    def test_closing_with_runs_under_way_gives_them_up(self) -> None:
        def body(comm: Communicator) -> None:
            init = comm.all_reduce_init(np.ones(5))
            if comm.rank == 0:
                init.start()
                return comm.close()
            handle = init.start()
            with pytest.raises(RankLost, match="closed with 1 runs under way"):
                handle.wait()
            return None

        on_loopback(2, body)


def open_files() -> int:
    """Open files of this process, but for the folder that some rank's thread is just reading to count them."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += not str(each.readlink()).startswith("/proc/")
    return count


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_small(comm: Communicator, n_runs: int) -> tuple[int, int]:
    """By how much open files and resident memory grow over `n_runs`, after up to a thousand to warm up."""
    array = np.ones(64, dtype=np.float32)
    before = (0, 0)
    for run in range(n_runs + min(n_runs, 1000)):
        if run == min(n_runs, 1000):
            comm.barrier()
            before = open_files(), resident_bytes()
        array[:] = 1.0
        comm.all_reduce(array, out=array)
        assert array[0] == array[-1] == comm.n_ranks
    comm.barrier()
    return open_files() - before[0], resident_bytes() - before[1]


class TestLeaks:
    def test_ten_thousand_in_a_row_leave_no_object_behind(self) -> None:
        """Every byte that Python allocates is counted. A table that grows once, as the interpreter's do, is no leak."""
        engine = Engine(ImmediateTransport(2))
        plan, verdict = sample(Collective("allreduce", 2), 4 * 65, "float32", "sum")
        prepared = engine.prepare(plan, verdict)
        send, recv = np.zeros(65, dtype=np.float32), np.zeros(65, dtype=np.float32)

        def run(times: int) -> None:
            for _ in range(times):
                prepared.start(send, recv).wait()

        run(100)
        grown = []
        tracemalloc.start()
        try:
            for _ in range(2):
                before = tracemalloc.get_traced_memory()[0]
                run(5_000)
                grown.append(tracemalloc.get_traced_memory()[0] - before)
        finally:
            tracemalloc.stop()
        assert min(grown) < 5_000, grown

    def test_a_thousand_in_a_row_over_tcp_leave_nothing_behind(self, tmp_path: Path) -> None:
        for files, memory in run_tcp(2, lambda transport: many_small(Communicator(transport, sample), 1000), tmp_path):
            assert files <= 0
            assert memory < 4 << 20

    @pytest.mark.slow
    @pytest.mark.realtime
    @pytest.mark.parametrize("n_ranks", [2, 4])
    def test_ten_thousand_in_a_row_over_tcp_leave_nothing_behind(self, n_ranks: int, tmp_path: Path) -> None:
        grown = run_tcp(n_ranks, lambda transport: many_small(Communicator(transport, sample), 10_000), tmp_path)
        assert all(files <= 0 and memory < 4 << 20 for files, memory in grown), grown

    def test_ten_thousand_in_a_row_on_loopback_leave_nothing_behind(self) -> None:
        for files, memory in on_loopback(2, lambda comm: many_small(comm, 10_000)):
            assert files <= 0
            assert memory < 4 << 20


def test_the_example_of_the_docs_runs_in_one_process(tmp_path: Path) -> None:
    """The other one runs in tests/mpi/test_mpi_runtime.py."""
    text = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n# in_one_process\.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = tmp_path / "in_one_process.py"
    script.write_text(block, encoding="utf-8")
    runpy.run_path(str(script))


class TestTwoCommunicators:
    @pytest.mark.parametrize("n_ranks", [2, 3])
    def test_they_make_progress_whatever_the_order_in_which_they_are_waited_for(
        self, tmp_path: Path, n_ranks: int
    ) -> None:
        """Long messages: each run needs its rank again and again, while that waits for the other communicator."""
        count = 300_001

        def program(first: Transport) -> None:
            nics = nics_of({"OPTCC_SOCKET_IFNAME": "=lo"})
            second = TcpTransport(in_file(tmp_path / "second", first.rank, n_ranks), nics)
            with (
                Communicator(first, sample, deadline_s=20.0) as one,
                Communicator(second, sample, deadline_s=20.0) as two,
            ):
                arrays = [np.full(count, float(comm.rank + 1)) for comm in (one, two)]
                handles = [comm.start_all_reduce(array) for comm, array in zip((one, two), arrays, strict=True)]
                for handle in handles if first.rank else handles[::-1]:
                    assert np.all(handle.result() == n_ranks * (n_ranks + 1) / 2)
                assert not THREAD_ENGINES.running

        run_tcp(n_ranks, program, tmp_path)

    @pytest.mark.parametrize("failure", [RankLost("planted"), ValueError("planted")], ids=repr)
    def test_one_that_fails_says_so_when_it_is_waited_for(self, failure: Exception) -> None:
        """The other one goes on, whatever the failure."""

        def program(_: int, transport: Transport) -> None:
            broken = _Broken(transport)
            bad, good = Engine(broken), Engine(transport)
            plan, verdict = sample(Collective("allreduce", 2), 8000, "float64", "sum")
            of_bad, of_good = bad.prepare(plan, verdict), good.prepare(plan, verdict)
            broken.post_send = broken.post_recv = lambda channel, view: None
            broken.poll = _raising(failure)
            broken.abort = lambda cause: None
            lost = of_bad.start(np.ones(1000), np.empty(1000))
            handle = of_good.start(np.ones(1000), np.empty(1000))
            assert np.all(handle.result() == 2.0)
            with pytest.raises(RuntimeFault, match="planted"):
                lost.wait()

        run_ranks(2, program, deadline_s=20.0)


class _Broken:
    """A transport on which nothing comes any more, once its methods are replaced."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.post_send: Callable[[int, Bytes], None] = transport.post_send
        self.post_recv: Callable[[int, Bytes], None] = transport.post_recv
        self.poll: Callable[[float], list[Any]] = transport.poll
        self.abort: Callable[[str], None] = transport.abort

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _raising(failure: Exception) -> Callable[[float], list[Any]]:
    """A `poll` that fails."""

    def poll(_: float) -> list[Any]:
        raise failure

    return poll


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm, a: comm.split("a"), "color 'a': must be an integer, not str"),
        (lambda comm, a: comm.split(1.5), "color 1.5: must be an integer, not float"),
        (lambda comm, a: comm.split(0, "x"), "key 'x': must be an integer"),
        (lambda comm, a: comm.split(0, None), "key None: must be an integer"),
        (lambda comm, a: comm.broadcast(a, "x"), "root 'x': must be an integer"),
        (lambda comm, a: comm.broadcast(a, 0.0), "root 0.0: must be an integer"),
        (lambda comm, a: comm.reduce(a, "sum", None), "root None: must be an integer"),
        (lambda comm, a: comm.gather(a, 0.0), "root 0.0: must be an integer"),
        (lambda comm, a: comm.scatter(a, "x"), "root 'x': must be an integer"),
        (lambda comm, a: comm.broadcast_init(a, [0]), r"root \[0\]: must be an integer"),
        (lambda comm, a: comm.send(a, "x"), "dest 'x': must be an integer"),
        (lambda comm, a: comm.send(a, 0, 1.0), "tag 1.0: must be an integer"),
        (lambda comm, a: comm.recv(a, None), "source None: must be an integer"),
        (lambda comm, a: comm.recv(a, 0, "t"), "tag 't': must be an integer"),
        (lambda comm, a: comm.start_recv_any(a, "t"), "tag 't': must be an integer"),
        (lambda comm, a: comm.all_to_all_v(a, [8.5]), "counts 8.5: must be an integer"),
        (lambda comm, a: comm.all_to_all_v(a, None), "counts: NoneType: must be 1 numbers"),
        (lambda comm, a: comm.perform(None, a), "collective: NoneType: must be a Collective"),
        (lambda comm, a: comm.perform("allreduce", a), "collective: str: must be a Collective"),
    ],
)
def test_arguments_of_another_type_are_refused(call: Callable[[Communicator, Any], Any], message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(InputError, match=f"^{message}"):
            call(comm, np.zeros(8))

    on_loopback(1, body, plan_for=Planner(Topology.parse("1@1GB/s")))


def test_integers_of_numpy_are_integers() -> None:
    def body(comm: Any) -> None:
        one, last = np.ones(2), np.int64(1)
        part = comm.split(np.uint8(comm.rank), np.int32(0))
        assert part is not None and part.n_ranks == 1
        # A comparison is a color, too.
        assert comm.split(comm.rank < 2) is not None
        assert comm.reduce(one, root=last) is None or comm.rank == 1
        assert comm.broadcast(one, last) is one
        if comm.rank == 0:
            comm.send(one, last, np.int16(3))
        else:
            comm.recv(one, np.uint32(0), last + 2)
        assert comm.all_to_all_v(one, np.ones(2, dtype=np.int32)).tolist() == [1, 1]

    on_loopback(2, body, plan_for=Planner(Topology.parse("2@1GB/s")))
