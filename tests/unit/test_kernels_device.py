"""The GPU's kernels without a GPU: the CUDA text runs on the processor, bit for bit against float64, under a CuPy that
is made of it; and the parts that need no kernels at all."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.errors import EnvironmentMissing, InputError
from optcc.experiments import kernel_bench
from optcc.experiments.kernel_bench import (
    COUNTS,
    OFFSETS,
    CudaDevice,
    check,
    check_case,
    check_moves,
    count_wrong,
    draw_operand,
    open_values,
    reference,
    round_values,
)
from optcc.runtime import cupy_kernels
from optcc.runtime.cupy_kernels import (
    BLOCKS_PER_PROCESSOR,
    EMPTY,
    FILL,
    THREADS,
    CupyKernels,
    DeviceStaging,
    PinnedStaging,
    count_blocks,
    is_cuda_aware,
    source,
    staging_order,
)
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.kernels import kernels_for, memory_of
from optcc.runtime.samples import ring
from optcc.runtime.stored_types import stored_dtype
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.verify.plan import verify_plan
from tests.unit.device_code import PAIRS, FakeCupy, build_library, launch, no_compiler, on_device

needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason=str(no_compiler()))
EVERY = [(dtype, reduction) for dtype in DTYPE_BYTES for reduction in reductions_of(dtype)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every kernel, for the processor."""
    return build_library(tmp_path_factory.mktemp("kernels"), source(PAIRS))


@pytest.fixture
def fake(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """A CuPy whose GPU is the processor."""
    cupy = FakeCupy(library)
    monkeypatch.setattr(cupy_kernels, "load_cupy", lambda: cupy)
    yield cupy
    cupy_kernels._load_functions.cache_clear()


@needs_compiler
class TestText:
    @pytest.mark.parametrize(("dtype", "reduction"), EVERY)
    def test_every_dtype_reduction_size_and_alignment(
        self, dtype: str, reduction: str, fake: FakeCupy, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        device = CudaDevice()
        for count in (0, 1, 2, 3, 7, 18) if dtype == "float64" else (*range(20), 1000):  # fractions are slow
            for offsets in (*OFFSETS, (int(rng.integers(0, 16)), int(rng.integers(0, 16)))):
                assert check_case(device, dtype, reduction, count, offsets, rng) == 0, (count, offsets)

    @pytest.mark.parametrize("dtype", DTYPE_BYTES)
    def test_copy_pack_and_unpack(self, dtype: str, fake: FakeCupy, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for count in COUNTS:
            for offsets in OFFSETS:
                assert check_moves(CudaDevice(), dtype, count, offsets, rng) == 0, (count, offsets)

    @pytest.mark.parametrize("blocks", [1, 3])
    @pytest.mark.parametrize("threads", [1, 32, 256])
    def test_any_geometry_gives_the_same(self, library: ctypes.CDLL, blocks: int, threads: int, seed: int) -> None:
        """Threads take several vectors each, or none."""
        rng = np.random.default_rng(seed)
        for dtype in ("bfloat16", "int8", "float64"):
            dst, src = draw_operand(dtype, 2017, rng), draw_operand(dtype, 2017, rng)
            wanted = reference(dtype, "sum", dst, src)
            addresses = (each.__array_interface__["data"][0] for each in (dst, src))
            launch(library, f"reduce1_{dtype}_sum", (blocks, 1), threads, (*addresses, 2017))
            assert count_wrong(dst, wanted, dtype) == 0

    def test_every_float16_opens_and_closes(self, library: ctypes.CDLL) -> None:
        """The conversions that stand for one instruction each on a GPU."""
        bits = np.arange(1 << 16, dtype=np.uint16)
        values = bits.view(np.float16)
        wide = np.array([library.widen(int(each)) for each in bits], dtype=np.float32)
        with np.errstate(invalid="ignore"):
            assert np.array_equal(wide, values.astype(np.float32), equal_nan=True)
        assert np.array_equal(np.signbit(wide), np.signbit(values))
        closed = np.array([library.narrow(float(each)) for each in wide], dtype=np.uint16)
        assert count_wrong(closed.view(np.float16), values, "float16") == 0

    @pytest.mark.parametrize(("dtype", "function"), [("float16", "narrow"), ("bfloat16", "narrow_brain")])
    def test_closing_rounds_to_nearest_even(self, library: ctypes.CDLL, dtype: str, function: str, seed: int) -> None:
        """Any float32, and the middles between two numbers and what is next to them."""
        rng = np.random.default_rng(seed)
        some = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32)
        with np.errstate(all="ignore"):
            numbers = np.arange(0, 1 << 16, 7, dtype=np.uint16).view(stored_dtype(dtype))
            around = open_values(numbers, dtype).astype(np.float32).view(np.uint32)
        half = np.uint32(1 << (12 if dtype == "float16" else 15))
        bits = np.concatenate((some, around + half, around + half - np.uint32(1), around + half + np.uint32(1)))
        values = bits.view(np.float32)
        found = np.array([getattr(library, function)(float(each)) for each in values], dtype=np.uint16)
        with np.errstate(all="ignore"):
            wanted = round_values(values.astype(np.float64), dtype)
        assert count_wrong(found.view(wanted.dtype), wanted, dtype) == 0

    @pytest.mark.parametrize(
        ("right", "wrong", "dtype", "reduction"),
        [
            ("(raw >> 16 & 1)", "1", "bfloat16", "sum"),  # ties go up
            ("x == y) return a | b", "x == y) return a", "float32", "min"),  # either zero
            ("x != x ? a : b", "false ? a : b", "float16", "max"),  # a NaN is lost
            ("singles = count -", "singles = count - (vectors > 0) -", "int8", "sum"),  # the last element is left out
            ("if (Forward) out[place] = own", "", "int32", "bxor"),  # single elements are not handed on
        ],
    )
    def test_a_wrong_text_is_seen(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        right: str,
        wrong: str,
        dtype: str,
        reduction: str,
    ) -> None:
        text = source([(dtype, reduction)])
        assert right in text
        fake = FakeCupy(build_library(tmp_path, text.replace(right, wrong)))
        monkeypatch.setattr(cupy_kernels, "load_cupy", lambda: fake)
        assert check_case(CudaDevice(), dtype, reduction, 1001, (1, 1), np.random.default_rng(0)) > 0


@needs_compiler
class TestCupyKernels:
    def test_the_array_chooses_the_kernels(self, fake: FakeCupy) -> None:
        array = on_device(np.zeros(4, dtype=np.float32))
        chosen, staging = memory_of(array, "float32", "sum")
        assert isinstance(chosen, CupyKernels) and isinstance(staging, PinnedStaging)
        assert isinstance(memory_of(array, "float32", "sum", direct=True)[1], DeviceStaging)
        assert chosen.stream is fake.current[-1]
        with pytest.raises(InputError, match="must be one of sum"):
            kernels_for(array, "float32", "bxor")

    def test_calls_only_queue_and_marks_tell_when(self, fake: FakeCupy) -> None:
        stream = fake.new_stream()
        kernels = CupyKernels("int32", "sum", stream=stream)
        dst, src = on_device(np.arange(5, dtype=np.int32)), on_device(np.ones(5, dtype=np.int32))
        kernels.reduce(dst, src)
        mark = kernels.mark()
        kernels.reduce(dst, src)
        assert dst.tolist() == [0, 1, 2, 3, 4] and not kernels.is_reached(mark)
        mark.synchronize()
        assert kernels.is_reached(mark) and dst.tolist() == [1, 2, 3, 4, 5]
        stream.synchronize()
        assert dst.tolist() == [2, 3, 4, 5, 6]
        assert not fake.current[0].queue, "nothing on another stream"

    def test_many_operands_take_few_launches(self, fake: FakeCupy) -> None:
        kernels = CupyKernels("uint8", "bor", stream=fake.new_stream())
        parts = [on_device(np.full(33, 1 << bit, dtype=np.uint8)) for bit in range(7)]
        kernels.reduce_many(parts[0], parts[1:])
        assert fake.launches == ["reduce4_uint8_bor", "reduce2_uint8_bor"]
        kernels.stream.synchronize()
        assert set(parts[0].tolist()) == {127}

    def test_nothing_is_not_launched(self, fake: FakeCupy) -> None:
        kernels = CupyKernels("float32", "avg", stream=fake.new_stream())
        nothing = on_device(np.zeros(0, dtype=np.float32))
        kernels.reduce(nothing, nothing)
        kernels.copy(nothing, nothing)
        kernels.finish(nothing, 3)
        kernels.pack(nothing, [])
        assert fake.launches == []

    def test_copies_may_overlap(self, fake: FakeCupy) -> None:
        kernels = CupyKernels("int8", "sum", stream=fake.new_stream())
        data = on_device(np.arange(100, dtype=np.int8))
        kernels.copy(data[3:], data[:-3])
        kernels.stream.synchronize()
        assert data.tolist() == [0, 1, 2, *range(97)]

    def test_copies_take_bytes_too(self, fake: FakeCupy) -> None:
        kernels = CupyKernels("float64", "sum", stream=fake.new_stream())
        dst, src = (on_device(np.full(48, value, dtype=np.uint8)) for value in (1, 2))
        kernels.copy(dst[8:40], src[8:40])
        kernels.stream.synchronize()
        assert dst.tolist() == [1] * 8 + [2] * 32 + [1] * 8

    def test_the_script_for_a_gpu_runs(self, fake: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """From the check to the record, on two reductions and in little time; the fake's clock counts launches."""
        monkeypatch.setattr(kernel_bench, "DTYPE_BYTES", {"bfloat16": 2, "int8": 1})
        monkeypatch.setattr(kernel_bench, "reductions_of", lambda dtype: ("sum", "avg"))
        monkeypatch.setattr(kernel_bench, "COUNTS", (0, 17))
        out = tmp_path / "record.json"
        result = CliRunner().invoke(
            kernel_bench.command, ["--device", "gpu", "--size", "4096", "--rounds", "2", "-o", str(out)]
        )
        assert result.exit_code == 0, result.output
        record = kernel_bench.KernelSpeed.read(out)
        assert (record.device, record.wrong, record.machine["gpu"]) == ("gpu", 0, "a processor")
        for row in record.rows:
            assert row.seconds == [0.001, 0.001] and row.copy_share == row.moved / 2

    def test_a_graph_repeats_the_local_part(self, fake: FakeCupy) -> None:
        kernels = CupyKernels("bfloat16", "sum", stream=fake.new_stream())
        ones = [on_device(round_values(np.ones(40), "bfloat16")) for _ in range(3)]

        def work() -> None:
            kernels.reduce(ones[0], ones[1])
            kernels.copy(ones[2], ones[0])

        graph = kernels.capture(work)
        kernels.stream.synchronize()
        assert open_values(np.asarray(ones[0]), "bfloat16")[0] == 1.0, "captured, not run"
        for turn in range(3):
            graph.launch(kernels.stream)
            kernels.stream.synchronize()
            assert set(open_values(np.asarray(ones[2]), "bfloat16")) == {2.0 + turn}

    def test_the_default_stream_is_not_captured(self, fake: FakeCupy) -> None:
        stream = fake.new_stream()
        stream.ptr = 0
        with pytest.raises(InputError, match="stream: the default one"):
            CupyKernels("float32", "sum", stream=stream).capture(lambda: None)

    def test_tables_are_kept_but_not_without_end(self, fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cupy_kernels, "TABLES_MAX", 2)
        kernels = CupyKernels("int32", "sum", stream=fake.new_stream())
        out = on_device(np.zeros(4, dtype=np.int32))
        pieces = [on_device(np.full(4, value, dtype=np.int32)) for value in range(5)]
        for piece in (*pieces, pieces[-1]):
            kernels.pack(out, [piece])
            kernels.stream.synchronize()
            assert out.tolist() == piece.tolist()
        assert len(kernels._tables) <= 2


@needs_compiler
class TestStaging:
    @pytest.mark.parametrize("n_bytes", [0, 1, 63, 64, 65, 128, 1000])
    @pytest.mark.parametrize("pinned", [True, False])
    def test_there_and_back(self, n_bytes: int, pinned: bool, fake: FakeCupy) -> None:
        """Nothing is read before it is there, however late the GPU is."""
        stream = fake.new_stream()
        staging = PinnedStaging(stream, slot_bytes=64)
        kernels = CupyKernels("uint8", "sum", stream=stream)
        sent = (np.arange(n_bytes) % 251).astype(np.uint8)
        host = staging.host(n_bytes) if pinned else np.zeros(n_bytes, dtype=np.uint8)
        device, ones = staging.device(n_bytes), on_device(np.ones(n_bytes, dtype=np.uint8))
        host[:] = sent
        staging.load(device, host)
        if pinned:
            kernels.mark().synchronize()
        host[:] = 0xEE  # free again
        kernels.reduce(device, ones)
        staging.store(host, device)
        if pinned:
            kernels.mark().synchronize()
        assert host.tolist() == (sent + 1).tolist()

    def test_many_messages_through_the_same_slots(self, fake: FakeCupy, seed: int) -> None:
        rng = np.random.default_rng(seed)
        stream = fake.new_stream()
        staging = PinnedStaging(stream, slot_bytes=16)
        devices = [staging.device(50) for _ in range(6)]
        messages = [rng.integers(0, 256, 50, dtype=np.uint8) for _ in devices]
        for device, message in zip(devices, messages, strict=True):
            staging.load(device, message.copy())
        for device, message in zip(devices, messages, strict=True):
            back = np.zeros(50, dtype=np.uint8)
            staging.store(back, device)
            assert back.tolist() == message.tolist()
        assert len(staging._pinned) == 2

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize(("dtype", "reduction"), [("bfloat16", "avg"), ("int8", "bxor"), ("float32", "sum")])
    def test_the_engine_runs_a_ring_on_device_memory(
        self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dtype: str, reduction: str, direct: bool
    ) -> None:
        """Each rank with a GPU of its own, whose work is late until somebody asks."""
        fakes = [FakeCupy(library) for _ in range(3)]
        plan = ring(3, 1001 * DTYPE_BYTES[dtype], dtype, reduction, segments=2)
        verdict = verify_plan(plan)
        made: list[Any] = []
        for fake in fakes:
            monkeypatch.setattr(cupy_kernels, "load_cupy", lambda fake=fake: fake)
            stream = fake.new_stream()
            # Who asks whether a mark is reached lets the GPU go on for a while.
            kernels = CupyKernels(dtype, reduction, stream=stream)
            made.append((kernels, (DeviceStaging if direct else PinnedStaging)(stream)))

        def body(rank: int, transport: LoopbackTransport) -> int:
            kernels, staging = made[rank]
            prepared = Engine(transport).prepare(
                plan, verdict, kernels=_Impatient(kernels), staging=staging, deadline_s=20
            )
            data = on_device(make_input(rank, 1001, dtype, reduction))
            out = on_device(np.zeros_like(np.asarray(data)))
            prepared.start(data, out).wait()
            kernels.stream.synchronize()
            return wrong_elements(plan, rank, np.asarray(out))

        assert run_ranks(3, body) == [0, 0, 0]


class _Impatient:
    """Kernels whose GPU does one thing each time that it is asked whether it has done enough."""

    def __init__(self, kernels: CupyKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def is_reached(self, mark: Any) -> bool:
        stream = self._kernels.stream
        stream.run_up_to(min(stream.n_done + 1, len(stream.queue)))
        return self._kernels.is_reached(mark)


class TestWithoutKernels:
    @pytest.mark.parametrize("n_slots", [1, 2, 3])
    @pytest.mark.parametrize("n_chunks", [0, 1, 2, 3, 7])
    def test_slots_are_filled_and_emptied_in_turn(self, n_chunks: int, n_slots: int) -> None:
        held: dict[int, int] = {}
        emptied: list[int] = []
        full = 0
        for act, chunk in staging_order(n_chunks, n_slots):
            slot = chunk % n_slots
            if act == FILL:
                assert slot not in held, "a slot that is full is filled"
                held[slot] = chunk
            else:
                assert act == EMPTY and held.pop(slot) == chunk
                emptied.append(chunk)
            full = max(full, len(held))
        assert emptied == list(range(n_chunks))
        assert full == min(n_slots, n_chunks), "fills run ahead"

    def test_blocks(self) -> None:
        for n_bytes in (0, 1, 16, 4096, 4097, 10**6, 10**10):
            blocks = count_blocks(n_bytes, 132)
            assert 1 <= blocks <= 132 * BLOCKS_PER_PROCESSOR
            threads = blocks * THREADS
            assert threads * 16 >= n_bytes or blocks == 132 * BLOCKS_PER_PROCESSOR
            assert (blocks - 1) * THREADS * 16 < max(n_bytes, 1)

    def test_the_text_has_each_kernel_once(self) -> None:
        text = source([("int8", "sum"), ("int8", "avg"), ("int8", "bor"), ("float64", "min")])
        for line in (
            "OPTCC_TYPE(int8)",
            "OPTCC_TYPE(float64)",
            "OPTCC_REDUCTION(int8, sum, int8_sum)",
            "OPTCC_REDUCTION(int8, bor, int8_bor)",
            "OPTCC_REDUCTION(float64, min_, float64_min)",
        ):
            assert text.splitlines().count(line) == 1
        assert "#include" not in text, "NVRTC has no headers here"
        with pytest.raises(InputError, match="must be one of sum"):
            source([("float16", "band")])

    def test_without_a_gpu_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "cupy", None)
        cupy_kernels.load_cupy.cache_clear()
        with pytest.raises(EnvironmentMissing, match=r"GPU: .*: pip install 'optcc\[gpu\]'"):
            kernels_for(on_device(np.zeros(1)), "float64", "sum")
        with pytest.raises(EnvironmentMissing, match="GPU"):
            CudaDevice()
        broken = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 0)))
        monkeypatch.setitem(__import__("sys").modules, "cupy", broken)
        with pytest.raises(EnvironmentMissing, match="GPU: none"):
            cupy_kernels.load_cupy()

    @pytest.mark.parametrize(
        ("kinds", "aware"), [("system", False), ("system,cuda:device,mpi", True), ("cuda", True), ("cudanot", False)]
    )
    def test_mpi_says_whether_it_takes_device_memory(self, kinds: str, aware: bool) -> None:
        info = SimpleNamespace(Get=lambda key: kinds if key == "mpi_memory_alloc_kinds" else None)
        mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=lambda: info), __file__=None)
        assert is_cuda_aware(mpi) is aware

    @pytest.mark.parametrize(("answer", "aware"), [(0, False), (1, True), (None, False)])
    def test_or_a_function_of_its_own(self, answer: int | None, aware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        library = SimpleNamespace() if answer is None else SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)
        monkeypatch.setattr(ctypes, "CDLL", {"mpi.so": library}.__getitem__)
        info = SimpleNamespace(Get=lambda key: None)
        mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=lambda: info), __file__="mpi.so")
        assert is_cuda_aware(mpi) is aware

    def test_the_fake_is_late(self) -> None:
        """What the staging tests count on: queued work is not done until somebody waits."""
        stream = FakeCupy(ctypes.CDLL(None)).new_stream()
        done: list[int] = []
        for number in range(3):
            stream.add(partial(done.append, number))
        assert done == []
        stream.run_up_to(2)
        assert done == [0, 1]
        assert struct.calcsize("P") == 8, "the launch passes every parameter as eight bytes"


@pytest.mark.gpu
def test_every_kernel_on_this_machines_gpu(seed: int) -> None:
    assert check(CudaDevice(), seed) == 0
