"""Collectives on GPUs that are not there: every order that CUDA allows gives NumPy's bits, and what once did not.

The orders are drawn from seeds by a stand-in for CuPy and a network that is as unkind (`tests.unit.device_ranks`). For
each thing that keeps the order there is a test that takes it away and sees wrong numbers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from optcc.collective import DTYPE_BYTES
from optcc.errors import InputError, MismatchError, RuntimeFault
from optcc.experiments.kernel_bench import count_wrong, round_values
from optcc.plan import Plan
from optcc.planner import Planner
from optcc.runtime import device_actions
from optcc.runtime.communicator import Communicator
from optcc.runtime.concurrent_engines import THREAD_ENGINES
from optcc.runtime.cupy_kernels import CupyKernels, address_of
from optcc.runtime.device_actions import DeviceActions
from optcc.runtime.device_lanes import DeviceLaneMemory
from optcc.runtime.device_paths import DIRECT, IPC, DevicePath, path_of
from optcc.runtime.device_streams import COMPUTE, INTO, OUT, DeviceStreams, Ready
from optcc.runtime.samples import exchange, ring
from optcc.runtime.shared_lanes import SharedLanes
from optcc.runtime.stored_types import stored_dtype
from optcc.runtime.transport import RECEIVED
from optcc.runtime.transports.loopback import LoopbackNetwork, LoopbackTransport, run_ranks
from optcc.topology import Topology
from optcc.verify.plan import verify_plan
from tests.sample import sampled
from tests.unit.device_ranks import Job, as_processes
from tests.unit.stand_in_cupy import DEVICE_BYTES, POISON, CUDARuntimeError, DeviceArray, Event, StandIn, Stream

COUNT = 301
SHORT, LONG = 1 << 18, 64
"""What is fused: everything, or only what is shorter than any message here."""
ORDERS_MAX = 600
"""Orders until one must show what is missing: the rarest fault shows in one of thirty, and not in the same ones each
time."""


class Case(NamedTuple):
    """What is run: through which memory, with which messages fused, on what elements, how many at once; and which ranks
    share GPU memory, if messages may go by CUDA IPC."""

    direct: bool
    fused_bytes: int
    dtype: str
    reduction: str
    kind: str = "ring"
    window: int = 1
    hosts: tuple[int, ...] | None = None


CASES = (
    *(Case(False, SHORT, dtype, op) for dtype, op in (("float32", "avg"), ("bfloat16", "sum"), ("int8", "bxor"))),
    *(Case(False, LONG, dtype, op) for dtype, op in (("float64", "sum"), ("float16", "max"), ("int32", "prod"))),
    *(Case(True, SHORT, dtype, op) for dtype, op in (("bfloat16", "avg"), ("int64", "min"), ("uint8", "sum"))),
    Case(True, LONG, "float16", "sum"),
    Case(False, SHORT, "float32", "sum", window=3),
    Case(False, LONG, "bfloat16", "avg", window=3),
    Case(True, SHORT, "float64", "avg", window=3),
    Case(False, SHORT, "int32", "sum", "exchange"),
    Case(False, LONG, "float32", "sum", "exchange"),
    Case(True, SHORT, "float64", "max", "exchange"),
    Case(False, SHORT, "float32", "avg", hosts=(0, 0, 0)),
    Case(False, LONG, "bfloat16", "sum", window=3, hosts=(0, 0, 0)),
    Case(False, SHORT, "int32", "prod", window=3, hosts=(0, 0, -1)),
    Case(False, LONG, "float16", "max", "exchange", hosts=(0, -1, 0)),
)


class Prepared(NamedTuple):
    """A case made ready: its job, what each rank gives, and what each must get."""

    cupy: StandIn
    job: Job
    inputs: list[Any]
    wanted: list[Any]


@cache
def plan_of(kind: str, dtype: str, reduction: str) -> Plan:
    """A ring of three ranks, whose instructions send what they reduce, or an exchange through scratch."""
    n_bytes = COUNT * DTYPE_BYTES[dtype]
    return ring(3, n_bytes, dtype, reduction, segments=2) if kind == "ring" else exchange(3, n_bytes, dtype, reduction)


def draw(dtype: str, rank: int, count: int = COUNT) -> Any:
    """Elements whose sum depends on its order."""
    rng = np.random.default_rng(rank)
    if dtype.startswith(("float", "bfloat")):
        return round_values(rng.standard_normal(count) * 4.0 ** rng.integers(-3, 3, count), dtype)
    return rng.integers(0, 100, count).astype(dtype)


def job_of(case: Case, cupy: StandIn, plan: Plan, patch: pytest.MonkeyPatch) -> Job:
    """The case's plan, ready at every rank."""
    if case.hosts is not None:
        as_processes(cupy, patch)
    return Job(cupy, plan, direct=case.direct, window=case.window, hosts=case.hosts)


@pytest.fixture(scope="module")
def prepare() -> Iterator[Callable[[Case], Prepared]]:
    """Makes a case ready, once."""
    with pytest.MonkeyPatch.context() as patch:

        @cache
        def make(case: Case) -> Prepared:
            plan = plan_of(case.kind, case.dtype, case.reduction)
            inputs = [draw(case.dtype, rank) for rank in range(plan.n_ranks)]
            with np.errstate(all="ignore"):
                wanted = Job(None, plan).reference(inputs, COUNT)
            cupy = StandIn(0, 2)
            patch.setitem(sys.modules, "cupy", cupy)
            patch.setattr(device_actions, "FUSED_BYTES_MAX", case.fused_bytes)
            return Prepared(cupy, job_of(case, cupy, plan, patch), inputs, wanted)

        def get(case: Case) -> Prepared:
            made = make(case)
            patch.setitem(sys.modules, "cupy", made.cupy)
            patch.setattr(device_actions, "FUSED_BYTES_MAX", case.fused_bytes)
            return made

        yield get


@pytest.fixture(autouse=True)
def nothing_left_under_way() -> Iterator[None]:
    """What a test leaves under way would be driven in another one, by whoever waits there."""
    yield
    left, THREAD_ENGINES.running = THREAD_ENGINES.running, {}
    assert not left


def run_order(made: Prepared, seed: int, dtype: str) -> int:
    """Wrong elements of one run in the order of `seed`.

    Inputs are made on the caller's stream, late; it goes on working behind the run, and its arrays are freed as soon as
    it does not need them.
    """
    cupy, job = made.cupy, made.job
    cupy.draw(seed)
    job.network.rng.seed(seed)
    streams, handles = [], []
    outputs: list[Any] = []
    for rank, plan in enumerate(job.plans):
        with cupy.cuda.Device(rank % cupy.n_devices):
            stream = cupy.cuda.Stream(non_blocking=True) if (seed + rank) % 2 else cupy.cuda.Stream.null
            with stream:
                given = cupy.asarray(made.inputs[rank])
                # In place at times.
                out = given if seed % 3 == 0 else cupy.empty(COUNT, stored_dtype(dtype))
                handles.append(plan.start(given, out))
            streams.append(stream)
            outputs.append(out)
            del given, out
    job.drive(handles, seed)
    wrong = 0
    for rank, stream in enumerate(streams):
        with cupy.cuda.Device(rank % cupy.n_devices), stream:
            found = outputs[rank].copy()
            # Its memory may be somebody else's now, behind what is queued on this stream.
            outputs[rank] = None
            cupy.zeros(COUNT, stored_dtype(dtype))
            wrong += count_wrong(found.get(), made.wanted[rank], dtype)
    return wrong


def wrong_in(made: Prepared, case: Case, seeds: Sequence[int]) -> int:
    """Wrong elements over some orders."""
    return sum(run_order(made, seed, case.dtype) for seed in seeds)


def test_memory_that_was_freed_keeps_what_queued_work_reads() -> None:
    """Work of its own stream: whatever its next owner queues there comes after that."""
    cupy = StandIn(seed=1)
    cupy.eagerness = 0.0
    zeros = cupy.asarray(np.zeros(COUNT, np.bool_))
    count, address = cupy.count_nonzero(zeros), zeros.data.ptr
    del zeros
    again = cupy.empty(COUNT, np.bool_)
    assert again.data.ptr == address and int(count) == 0
    del again
    cupy.run_all()
    assert np.all(cupy.empty(COUNT, np.uint8).get() == POISON)


@pytest.mark.parametrize("case", sampled([(each,) for each in CASES], every=3), ids=str)
def test_every_order_gives_numpys_bits(case: Case, prepare: Callable[[Case], Prepared], seed: int) -> None:
    """15 orders of each case."""
    made = prepare(case)
    for number in range(15):
        assert run_order(made, seed + number, case.dtype) == 0, f"seed {seed + number}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_thousand_orders(case: Case, prepare: Callable[[Case], Prepared], seed: int) -> None:
    made = prepare(case)
    for number in range(10_000 // len(CASES)):
        assert run_order(made, seed + number, case.dtype) == 0, f"seed {seed + number}"


# --- what keeps the order ---------------------------------------------------------------------------------------------


def without_order(later: int, earlier: int) -> Callable[[pytest.MonkeyPatch], None]:
    """One stream does not wait for another any more."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        order = DeviceStreams.order

        def partly(streams: DeviceStreams, this: int, other: int) -> None:
            if (this, other) != (later, earlier):
                order(streams, this, other)

        patch.setattr(DeviceStreams, "order", partly)

    return plant


def without_after(stream: int) -> Callable[[pytest.MonkeyPatch], None]:
    """The host goes on at once."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        after = DeviceStreams.after

        def partly(streams: DeviceStreams, this: int, go_on: Callable[[], None]) -> None:
            go_on() if this == stream else after(streams, this, go_on)

        patch.setattr(DeviceStreams, "after", partly)

    return plant


def without_mark(patch: pytest.MonkeyPatch) -> None:
    """The run does not wait for the caller's stream."""
    patch.setattr(DeviceStreams, "wait_for_mark", lambda streams, mark: None)


def without_end(patch: pytest.MonkeyPatch) -> None:
    """The caller's stream does not wait for the run."""
    patch.setattr(Ready, "order", lambda ready, stream: None)


def without_message_order(patch: pytest.MonkeyPatch) -> None:
    """A message is posted as soon as it is complete, before others of its channel."""
    send = DeviceActions.send

    def hurry(actions: DeviceActions, channel: int, view: Any, instruction: int) -> None:
        actions._outgoing.pop(channel, None)
        send(actions, channel, view, instruction)

    patch.setattr(DeviceActions, "send", hurry)


def without_credit(patch: pytest.MonkeyPatch) -> None:
    """A message is copied into the slot of the one before, without waiting for its own credit."""
    follow = SharedLanes._follow

    def hurry(lanes: SharedLanes, channel: int, event: tuple[int, int]) -> None:
        """The next message, too, where there is one: into the slot of this."""
        (offset,) = lanes._coming[channel][0].view(np.uint64) if event[0] == RECEIVED else (0,)
        follow(lanes, channel, event)
        if event[0] == RECEIVED and lanes._queues[channel]:
            memory = cast(DeviceLaneMemory, lanes._memory)
            view, (base, _) = lanes._queues[channel][0], memory._opened[lanes._receivers[channel]]
            with memory._streams.device:
                memory._streams.copy_across(base + int(offset), address_of(view), view.nbytes)

    patch.setattr(SharedLanes, "_follow", hurry)


def goes_wrong(made: Prepared, seed: int, dtype: str) -> bool:
    """Whether there are wrong elements, or a message is not as long as its receive, which its rank may tell another."""
    try:
        return run_order(made, seed, dtype) > 0
    except (ValueError, RuntimeFault):
        made.job.give_up()
        return True


@pytest.mark.parametrize(
    ("case", "plant"),
    [
        (CASES[0], without_mark),
        (CASES[0], without_end),
        (CASES[0], without_after(COMPUTE)),
        (CASES[6], without_after(COMPUTE)),
        (CASES[3], without_after(OUT)),
        (CASES[3], without_after(INTO)),
        (CASES[3], without_order(OUT, COMPUTE)),
        (CASES[3], without_order(COMPUTE, INTO)),
        (CASES[11], without_order(INTO, COMPUTE)),
        (CASES[10], without_message_order),
        (CASES[16], without_after(OUT)),
        (CASES[17], without_after(COMPUTE)),
        (CASES[17], without_order(OUT, COMPUTE)),
        (CASES[17], without_credit),
    ],
    ids=lambda each: str(each) if isinstance(each, Case) else each.__qualname__.split(".")[0],
)
def test_what_keeps_the_order_is_missed(
    case: Case, plant: Callable[[pytest.MonkeyPatch], None], prepare: Callable[[Case], Prepared]
) -> None:
    """Without it some order gives wrong numbers, or the plan's protocol notices."""
    made = prepare(case)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        fresh = made._replace(job=job_of(case, made.cupy, made.job.plan, patch))
        assert any(goes_wrong(fresh, number, case.dtype) for number in range(ORDERS_MAX))


# --- faults that there were -------------------------------------------------------------------------------------------


def ring_planner(*request: Any) -> Any:
    """Any AllReduce as a ring."""
    collective, size_bytes, dtype, reduction = request
    plan = ring(collective.n_ranks, size_bytes, dtype, reduction, segments=2)
    return plan, verify_plan(plan)


class ReachingTransport(LoopbackTransport):
    """The loopback, for a library that reaches the memory of GPUs."""

    device_path: DevicePath | None = DevicePath(DIRECT, "a test says so")
    cupy: StandIn

    def no_device_memory(self) -> str:
        return ""

    def post_send(self, channel: int, view: Any) -> None:
        super().post_send(channel, view if isinstance(view, np.ndarray) else self.cupy.host_bytes(view))

    def post_recv(self, channel: int, view: Any) -> None:
        super().post_recv(channel, view if isinstance(view, np.ndarray) else self.cupy.host_bytes(view))


class KeepingTransport(LoopbackTransport):
    """The loopback, for processes of one host that share GPU memory."""

    device_path: DevicePath | None = None


def run_reaching(cupy: StandIn, n_ranks: int, body: Callable[[int, ReachingTransport], Any]) -> list[Any]:
    """Ranks as threads over such a transport."""

    def run(rank: int, transport: LoopbackTransport) -> Any:
        reaching = ReachingTransport(transport._network, rank)
        reaching.cupy = cupy
        return body(rank, reaching)

    return run_ranks(n_ranks, run)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, seed: int) -> StandIn:
    """Two GPUs that are not there."""
    made = StandIn(seed, 2)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@pytest.mark.parametrize("direct", [True, False])
def test_slots_are_not_filled_behind_the_first_message(cupy: StandIn, direct: bool) -> None:
    """They were filled with zeros on the stream while the library already wrote what had come."""
    cupy.eagerness = 0.0

    def body(rank: int, transport: Any) -> list[float]:
        with Communicator(transport, ring_planner) as comm:
            total = comm.all_reduce(cupy.asarray(np.full(1001, rank + 1.0)))
            return sorted(set(total.tolist()))

    results = run_reaching(cupy, 3, body) if direct else run_ranks(3, body)
    assert results == [[6.0]] * 3


def test_each_call_is_on_the_stream_that_is_current_then(cupy: StandIn) -> None:
    """Kernels were kept without their stream: the second call, on another one, returned 3 for 6."""
    cupy.eagerness = 0.0

    def body(rank: int, transport: Any) -> list[list[float]]:
        found = []
        with Communicator(transport, ring_planner) as comm:
            for turn in (1, 2):
                with cupy.cuda.Stream(non_blocking=True):
                    array = cupy.asarray(np.zeros(500))
                    array.fill(turn)
                    found.append(sorted(set(comm.all_reduce(array).tolist())))
        return found

    assert run_ranks(3, body) == [[[3.0], [6.0]]] * 3


class Foreign:
    """An array of another package in a GPU's memory, whose stream is not known."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array_namespace__(self) -> Any:
        return Foreign

    @staticmethod
    def from_dlpack(array: Any) -> Foreign:
        return Foreign(array.__dlpack__())

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        return self.array.__dlpack__(stream=stream)


@pytest.mark.parametrize("direct", [False, True])
def test_every_collective_on_a_gpu(cupy: StandIn, direct: bool) -> None:
    """Blocking, started, persistent, with arrays of another package; results are where the arrays are."""
    cupy.eagerness = 0.05
    planner = Planner(Topology.parse("3@1GB/s"))

    def body(rank: int, transport: Any) -> None:
        device = rank % 2
        with Communicator(transport, planner) as comm, cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True):
            mine = cupy.asarray(np.arange(12, dtype=np.int32) + rank)
            total = comm.start_all_reduce(mine)
            largest = comm.all_reduce(mine, "max")
            assert largest.device.id == device and largest.tolist() == list(range(2, 14))
            assert total.result().tolist() == [3 * each + 3 for each in range(12)]
            assert comm.reduce_scatter(mine).tolist() == [3 * each + 3 for each in range(4 * rank, 4 * rank + 4)]
            assert comm.all_gather(mine[:2]).tolist() == [[each, each + 1] for each in range(3)]
            assert comm.all_to_all(mine).tolist() == [4 * rank + i + other for other in range(3) for i in range(4)]
            moved = mine.copy()
            assert comm.all_to_all(moved, out=moved).tolist()[:4] == [4 * rank + i for i in range(4)]
            assert comm.broadcast(mine.copy(), 1).tolist() == list(range(1, 13))
            reduced = comm.reduce(mine, "sum", 2)
            assert reduced is None if rank != 2 else reduced.tolist() == [3 * each + 3 for each in range(12)]
            step = comm.all_reduce_init(mine, out=mine)
            for _ in range(2):
                step.start().wait()
            assert mine.tolist()[0] == 9
            foreign = comm.all_reduce(Foreign(mine), "max")
            assert isinstance(foreign, Foreign) and foreign.array.tolist()[0] == 9
            on_host = comm.all_reduce(np.ones(3))
            assert on_host.tolist() == [3.0] * 3

    run_reaching(cupy, 3, body) if direct else run_ranks(3, body)


def test_messages_between_gpus_and_hosts(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent behind what the caller has queued, received before what it queues then; also to itself, and kept ones."""
    cupy.eagerness = 0.0
    stream_waits = Ready.order

    def body(rank: int, transport: Any) -> list[Any]:
        gpu = cupy.cuda.Device(rank % 2)
        with gpu:
            stream = cupy.cuda.Stream(non_blocking=True)
        with Communicator(transport, ring_planner) as comm, gpu, stream:
            mine = cupy.empty(700, np.int32)
            mine.fill(rank + 1)
            got = cupy.empty(700, np.int32)
            sent = comm.start_send(mine, (rank + 1) % 3)
            mine.fill(99)  # it has been taken
            comm.start_send(mine, (rank + 1) % 3, tag=5)
            handle = comm.start_recv(got, (rank - 1) % 3)
            handle.wait()
            first = got.copy()
            sent.wait()
            on_host = comm.recv(np.zeros(700, np.int32), (rank - 1) % 3, tag=5)
            assert set(on_host.tolist()) == {99}
            comm.start_send(np.array([1.0, 2.0, 3.0]), rank, 7)
            assert comm.recv(cupy.empty(3, np.float64), rank, 7).tolist() == [1.0, 2.0, 3.0]
            return sorted(set(first.tolist()))

    assert run_ranks(3, body) == [[3], [1], [2]]
    # And without the order of the streams it would not be so in every order.
    wrong = 0
    for seed in range(10):
        cupy.draw(seed)
        cupy.eagerness = 0.0
        monkeypatch.setattr(Ready, "order", lambda ready, stream: None)
        wrong += run_ranks(3, body_of_one_message(cupy)) != [2] * 3
        monkeypatch.setattr(Ready, "order", stream_waits)
        assert run_ranks(3, body_of_one_message(cupy)) == [2] * 3
    assert wrong


def body_of_one_message(cupy: StandIn) -> Callable[[int, Any], int]:
    """A message to itself, looked at on a stream that does not wait for the host."""

    def body(rank: int, transport: Any) -> int:
        gpu = cupy.cuda.Device(rank % 2)
        with gpu:
            stream = cupy.cuda.Stream(non_blocking=True)
        with Communicator(transport, ring_planner) as comm, gpu, stream:
            got = cupy.empty(50, np.uint8)
            comm.start_send(np.full(50, 2, np.uint8), rank)
            comm.start_recv(got, rank).wait()
            return int(got.copy().get()[0])

    return body


def test_blocks_and_messages_from_anyone_on_a_gpu(cupy: StandIn) -> None:
    """Behind what is queued on the caller's stream, and before what it queues then; some blocks empty or on the host;
    in 20 orders."""

    def body(rank: int, transport: Any) -> None:
        gpu = cupy.cuda.Device(rank % 2)
        with gpu:
            stream = cupy.cuda.Stream(non_blocking=True)
        with Communicator(transport, ring_planner) as comm, gpu, stream:
            blocks = [cupy.empty((rank + dst) % 3 * 200, np.int32) for dst in range(3)]
            for dst, block in enumerate(blocks):
                block.fill(10 * rank + dst)
            out: list[Any] = [cupy.empty((rank + src) % 3 * 200, np.int32) for src in range(3)]
            if rank == 2:
                out[0] = np.zeros(out[0].size, np.int32)
            for each in out:
                each.fill(-1)
            handles = comm.start_exchange(blocks, out)
            for block in blocks:
                block.fill(99)  # they have been taken
            for handle in handles:
                handle.wait()
            for src, each in enumerate(out):
                found = each if isinstance(each, np.ndarray) else each.copy().get()
                assert set(found.tolist()) <= {10 * src + rank} and found.size == (rank + src) % 3 * 200
            from_anyone = [cupy.empty(300, np.float64) for _ in range(3)] if rank == 0 else []
            begun = [comm.start_recv_any(each, 4) for each in from_anyone]
            mine = cupy.empty(300, np.float64)
            mine.fill(rank + 0.5)
            sent = comm.start_send(mine, 0, 4)
            for each, array in zip(begun, from_anyone, strict=True):
                assert each.handle.result() is array
                assert set(array.copy().get().tolist()) == {each.source + 0.5}
            sent.wait()

    for number in range(20):
        cupy.draw(cupy.rng.randrange(1 << 30) + number)
        run_ranks(3, body)


@pytest.mark.parametrize("part", ["mark", "order", "copy"])
def test_what_keeps_the_order_of_blocks_is_missed(part: str, cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the caller's stream before or after the copies, or the wait for those out, some order is wrong."""

    def body(rank: int, transport: Any) -> bool:
        with cupy.cuda.Device(rank):
            stream = cupy.cuda.Stream(non_blocking=True)
        with Communicator(transport, ring_planner) as comm, cupy.cuda.Device(rank), stream:
            blocks = [cupy.empty(200, np.int32) for _ in range(2)]
            for block in blocks:
                block.fill(rank)
            out = [cupy.empty(200, np.int32) for _ in range(2)]
            for handle in comm.start_exchange(blocks, out):
                handle.wait()
            return all(set(each.copy().get().tolist()) == {src} for src, each in enumerate(out))

    if part == "mark":
        monkeypatch.setattr(DeviceStreams, "wait_for_mark", lambda streams, mark: None)
    elif part == "order":
        monkeypatch.setattr(Ready, "order", lambda ready, stream: None)
    else:
        monkeypatch.setattr(Stream, "synchronize", lambda stream: None)
    found = []
    for number in range(20):
        cupy.draw(number)
        found.append(all(run_ranks(2, body)))
    assert not all(found)


@pytest.mark.parametrize("kind", ["own", "legacy"])
def test_a_stream_that_captures_a_graph_is_refused(cupy: StandIn, kind: str) -> None:
    """Before anything is queued or posted: the same call succeeds once the capture has ended. Nor does such a stream
    wait for a run; the legacy stream cannot be used while a blocking stream captures."""

    def body(rank: int, transport: Any) -> list[int]:
        with Communicator(transport, ring_planner) as comm, cupy.cuda.Device(rank):
            stream = cupy.cuda.Stream(non_blocking=kind == "own")
            with stream:
                array = cupy.asarray(np.full(40, rank + 1))
                stream.synchronize()
            cupy.capturing.add(stream.ptr)
            with stream if kind == "own" else cupy.cuda.Stream.null:
                for call in (
                    lambda: comm.all_reduce(array),
                    lambda: comm.start_send(array, 1 - rank),
                    lambda: comm.start_recv(array, 1 - rank),
                    lambda: comm.start_exchange([array] * 2, [array] * 2),
                ):
                    with pytest.raises(InputError, match="stream: captures a CUDA graph: must not while collectives"):
                        call()
            with cupy.cuda.Stream(non_blocking=True):
                handle = comm.start_all_reduce(array)
                handle.wait()
                with stream if kind == "own" else cupy.cuda.Stream.null, pytest.raises(InputError, match="captures"):
                    handle.wait()
                found = handle.result().tolist()
            cupy.capturing.discard(stream.ptr)
            with stream:
                return sorted({*found, *comm.all_reduce(array).tolist()})

    assert run_ranks(2, body) == [[3], [3]]


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6], CASES[13], CASES[16], CASES[18]], ids=str)
def test_a_run_allocates_nothing(case: Case, prepare: Callable[[Case], Prepared]) -> None:
    made = prepare(case)
    cupy, job = made.cupy, made.job
    arrays = []
    for rank in range(job.plan.n_ranks):
        with cupy.cuda.Device(rank % 2):
            arrays.append((cupy.asarray(made.inputs[rank]), cupy.empty(COUNT, stored_dtype(case.dtype))))
    for turn in range(3):
        before = cupy.n_allocations
        job.drive([plan.start(*each) for plan, each in zip(job.plans, arrays, strict=True)], turn)
        # The first run ties the plan to its arrays.
        assert not turn or cupy.n_allocations == before


def test_shared_memory_is_opened_once_a_plan_and_used_again(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank opens that of whom it sends to; after the plan it is closed, and the next plan needs no other."""
    as_processes(cupy, monkeypatch)
    plan = plan_of("ring", "int32", "sum")
    allocated = []
    for _ in range(2):
        job = Job(cupy, plan, hosts=(0, 0, 0))
        allocated.append(len(cupy._exports))
        assert sorted(count for _, count in cupy._opened.values()) == [1, 1, 1]
        for each in job.plans:
            each.close()
        assert sorted(count for _, count in cupy._opened.values()) == [0, 0, 0]
    assert allocated == [3, 3]


def test_an_engine_that_closes_closes_the_memory_of_others(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plans that nobody has closed; its own memory is free for the next engine of the process."""
    as_processes(cupy, monkeypatch)

    def body(rank: int, transport: Any) -> list[int]:
        keeping = KeepingTransport(transport._network, rank)
        keeping.device_path = DevicePath(IPC, "a test says so", (0, 0, 0))
        with Communicator(keeping, ring_planner) as comm:
            found = [comm.all_reduce(cupy.asarray(np.full(n, rank + 1))).tolist()[-1] for n in (7, 500)]
            assert sum(count for (process, _, _), (_, count) in cupy._opened.items() if process == cupy.process()) == 2
            comm.barrier()
        return found

    for _ in range(2):
        assert run_ranks(3, body) == [[6, 6]] * 3
        assert not any(count for _, count in cupy._opened.values())
    assert len(cupy._exports) == 6


def test_what_one_rank_cannot_open_all_stage(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """They had agreed on CUDA IPC; the plan is made again, and so are those to come."""
    as_processes(cupy, monkeypatch)
    opens = cupy.cuda.runtime.ipcOpenMemHandle

    def refuse(handle: bytes, flags: int = 1) -> int:
        if cupy.process() == "optcc-rank-1":
            raise CUDARuntimeError("cudaErrorPeerAccessUnsupported: peer access is not supported")
        return int(opens(handle, flags))

    monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", refuse)
    said = set()

    def body(rank: int, transport: Any) -> list[int]:
        keeping = KeepingTransport(transport._network, rank)
        keeping.device_path = DevicePath(IPC, "a test says so", (0, 0, 0))
        with Communicator(keeping, ring_planner) as comm:
            found = [comm.all_reduce(cupy.asarray(np.full(n, rank + 1))).tolist()[0] for n in (7, 500)]
        said.add(str(path_of(keeping)))
        return found

    assert run_ranks(3, body) == [[6, 6]] * 3
    (why,) = said
    assert why.startswith("staged: CUDA IPC: plan ") and "rank 1: CUDARuntimeError: cudaErrorPeerAccessUns" in why


def test_a_rank_that_stages_and_one_that_does_not_are_told(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    as_processes(cupy, monkeypatch)

    def body(rank: int, transport: Any) -> None:
        keeping = KeepingTransport(transport._network, rank)
        keeping.device_path = DevicePath(IPC, "a test says so", (0, 0, 0)) if rank != 1 else None
        with Communicator(keeping, ring_planner) as comm:
            comm.all_reduce(cupy.asarray(np.ones(7)))

    with pytest.raises(MismatchError, match="rank 1 differs from ranks 0, 2: messages through the host's memory inst"):
        run_ranks(3, body)


def test_the_length_of_fused_messages_is_that_of_when_it_was_made(
    prepare: Callable[[Case], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is not taken as a long one by actions that have no memory for long ones."""
    case = next(each for each in CASES if not each.direct and each.fused_bytes > 64)
    made = prepare(case)
    monkeypatch.setattr(device_actions, "FUSED_BYTES_MAX", 64)
    assert wrong_in(made, case, range(3)) == 0


def test_short_messages_of_a_turn_are_one_launch(prepare: Callable[[Case], Prepared]) -> None:
    made = prepare(CASES[10])
    made.cupy.launches.clear()
    wrong_in(made, CASES[10], range(10))
    assert "batch_float32_sum" in made.cupy.launches and "forward_float32_sum" in made.cupy.launches


def test_arrays_must_be_where_the_plan_is(prepare: Callable[[Case], Prepared]) -> None:
    made = prepare(CASES[0])
    cupy, plan = made.cupy, made.job.plans[0]
    here = cupy.asarray(made.inputs[0])
    with cupy.cuda.Device(1):
        elsewhere = cupy.asarray(made.inputs[0])
    with pytest.raises(InputError, match="recv: in the host's memory: must be in the memory of GPU 0"):
        plan.start(here, made.inputs[0])
    with pytest.raises(InputError, match="send: in the memory of GPU 1: must be in the memory of GPU 0"):
        plan.start(elsewhere, here)
    on_host = Job(None, made.job.plan).plans[0]
    with pytest.raises(InputError, match="send: in the memory of GPU 0: must be in the host's memory"):
        on_host.start(here, here)


def test_the_stream_on_which_a_run_is_waited_for_comes_behind_it(prepare: Callable[[Case], Prepared]) -> None:
    """And any other by the handle's event."""
    made = prepare(CASES[0])
    cupy, job = made.cupy, made.job
    for seed in range(10):
        cupy.draw(seed)
        cupy.eagerness = 0.0
        handles, outputs = [], []
        for rank, plan in enumerate(job.plans):
            with cupy.cuda.Device(rank % 2), cupy.cuda.Stream(non_blocking=True):
                outputs.append(cupy.empty(COUNT, np.float32))
                handles.append(plan.start(cupy.asarray(made.inputs[rank]), outputs[-1]))
        job.drive(handles, seed)
        for rank, (handle, out) in enumerate(zip(handles, outputs, strict=True)):
            with cupy.cuda.Device(rank % 2):
                with cupy.cuda.Stream(non_blocking=True):
                    assert handle.wait()
                    assert count_wrong(out.get(), made.wanted[rank], "float32") == 0
                with cupy.cuda.Stream(non_blocking=True) as third:
                    third.wait_event(handle.event)
                    assert count_wrong(out.get(), made.wanted[rank], "float32") == 0


def test_after_a_failure_nothing_is_queued_that_touches_the_arrays(prepare: Callable[[Case], Prepared]) -> None:
    made = prepare(CASES[0])
    cupy = made.cupy
    job = Job(cupy, made.job.plan)
    cupy.draw(0)
    cupy.eagerness = 0.0
    handles = []
    for rank, plan in enumerate(job.plans):
        with cupy.cuda.Device(rank % 2):
            handles.append(plan.start(cupy.asarray(made.inputs[rank]), cupy.empty(COUNT, np.float32)))
    handles[0].test()
    handles[0].cancel()
    for plan in job.plans[:1]:
        streams = plan.engine.streams_of(0)
        assert streams.is_idle and all(stream.n_done == stream.n_queued for stream in streams.streams)
    job.give_up()


def test_an_error_of_the_gpu_ends_the_run_by_its_name(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's `Event.done` is False for ever then: nobody waits until the deadline."""
    copy = CupyKernels.copy

    def astray(kernels: CupyKernels, dst: int, src: int, count: int) -> None:
        copy(kernels, dst + DEVICE_BYTES // 2, src, count)

    # What every run begins with: its input is copied into its output.
    monkeypatch.setattr(CupyKernels, "copy", astray)

    def body(rank: int, transport: Any) -> None:
        with cupy.cuda.Device(rank % 2), Communicator(transport, ring_planner, deadline_s=60) as comm:
            comm.all_reduce(cupy.asarray(np.ones(500)))

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        run_ranks(3, body)
    assert time.monotonic() - started < 20


def test_two_loopback_networks_do_not_share_a_stream(cupy: StandIn) -> None:
    """Each engine has its own three, which the legacy default stream does not wait for."""
    networks = [LoopbackNetwork(None, 1) for _ in range(2)]
    for network in networks:
        comm = Communicator(network.transport(0), ring_planner)
        streams = comm.whole_engine.streams_of(1)
        assert all(stream.non_blocking and stream.device_id == 1 for stream in streams.streams)
        assert comm.whole_engine.streams_of(1) is streams
    assert len({id(stream) for stream in cupy._streams.values()}) == 2 + 2 * 3


class TestStandIn:
    """What the tests above count on."""

    def test_memory_is_no_memory_of_the_processor(self, cupy: StandIn) -> None:
        array = cupy.empty(4, np.int32)
        assert not hasattr(array, "__array_interface__") and array.data.ptr >> 62
        with pytest.raises(TypeError, match="not allowed"):
            np.asarray(array)
        assert cupy.host_bytes(array).tolist() == [POISON] * 16

    def test_work_is_late_and_unordered_between_streams(self) -> None:
        seen = set()
        for seed in range(20):
            cupy = StandIn(seed)
            cupy.eagerness = 0.0
            done: list[int] = []
            for number in range(3):
                stream = cupy.cuda.Stream(non_blocking=True)
                stream.launch_host_func(done.append, number)
            assert not done
            cupy.run_all()
            seen.add(tuple(done))
        assert len(seen) > 3

    def test_the_legacy_stream_waits_for_blocking_streams_alone(self) -> None:
        for seed in range(20):
            cupy = StandIn(seed)
            cupy.eagerness = 0.0
            done: list[str] = []
            for non_blocking in (False, True):
                stream = cupy.cuda.Stream(non_blocking=non_blocking)
                for _ in range(5):
                    stream.launch_host_func(done.append, "free" if non_blocking else "before")
            cupy.cuda.Stream.null.launch_host_func(done.append, "null")
            cupy.cuda.Stream.null.synchronize()
            assert done.count("before") == 5 and done[-1] == "null"
            if done.count("free") < 5:
                break
        else:
            pytest.fail("the non-blocking stream was waited for in every order")

    def test_events_are_as_they_were_recorded_when_they_were_waited_for(self, cupy: StandIn) -> None:
        cupy.eagerness = 0.0
        first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        event = cupy.cuda.Event()
        assert event.done
        second.wait_event(event)  # never recorded: no wait
        event.record(first)
        second.wait_event(event)
        done: list[int] = []
        first.launch_host_func(done.append, 1)
        event.record(first)
        second.synchronize()
        assert (first.n_done >= 1 and not event.done) or done == [1]

    def test_freed_memory_is_handed_out_again_while_it_is_in_use(self, cupy: StandIn) -> None:
        array = cupy.empty(100, np.uint8)
        address = array.data.ptr
        with cupy.cuda.Stream(non_blocking=True):
            assert cupy.empty(100, np.uint8).data.ptr != address
        del array
        assert cupy.empty(50, np.uint8).data.ptr == address

    @pytest.mark.slow
    @pytest.mark.skipif(find_spec("cupy") is None, reason="no CuPy: pip install 'optcc[gpu]'")
    def test_it_has_nothing_that_cupy_lacks(self) -> None:
        """In another process, which needs no GPU."""
        cupy = StandIn()
        names = [f"cupy.{name}" for name in vars(StandIn) if not name.startswith("_")]
        names += [f"cupy.cuda.{name}" for name in vars(cupy.cuda)]
        names += [f"cupy.cuda.runtime.{name}" for name in vars(cupy.cuda.runtime)]
        for kind, where in ((DeviceArray, "ndarray"), (Stream, "cuda.Stream"), (Event, "cuda.Event")):
            names += [f"cupy.{where}.{name}" for name in vars(kind) if not name.startswith("__")]
        ours = {"draw", "run_all", "host_address", "host_bytes", "cupy"}
        names = [name for name in names if name.rpartition(".")[2] not in ours]
        code = f"import operator, cupy\nfor name in {names!r}: operator.attrgetter(name[5:])(cupy)"
        ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        assert ran.returncode == 0 and len(names) > 40, ran.stderr

    def test_a_kernel_reaches_its_own_device_and_locked_pages(self, cupy: StandIn) -> None:
        cupy.eagerness = 0.0
        with cupy.cuda.Device(1):
            other = cupy.empty(4, np.uint8)
        runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
        mine = cupy.empty(4, np.uint8)
        runtime.memcpyAsync(mine.data.ptr, other.data.ptr, 4, runtime.memcpyDeviceToDevice, stream.ptr)
        with pytest.raises(RuntimeError, match="memory of device 1 on device 0"):
            stream.synchronize()
        with pytest.raises(RuntimeError, match="not match with the current device"), cupy.cuda.Device(1), stream:
            pass
