"""The GPU's kernels without a GPU: the CUDA text runs on the processor, bit for bit against float64, under a CuPy that
is made of it; and the parts that need no kernels at all."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.errors import EnvironmentMissing, InputError
from optcc.experiments import kernel_bench
from optcc.experiments.kernel_bench import (
    COUNTS,
    EXACT_COUNT_MAX,
    OFFSETS,
    CudaDevice,
    check,
    check_case,
    check_moves,
    count_wrong,
    draw_operand,
    open_values,
    reference,
    reference_average,
    round_values,
)
from optcc.runtime.cupy_kernels import (
    BLOCKS_MAX,
    THREADS,
    CupyKernels,
    count_blocks,
    load_cupy,
    source,
)
from optcc.runtime.mpi_library import is_cuda_aware
from optcc.runtime.stored_types import stored_dtype
from tests.sample import sampled
from tests.unit.device_code import PAIRS, build_library, launch, no_compiler, run_text
from tests.unit.stand_in_cupy import StandIn

needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason=str(no_compiler()))
EVERY = [(dtype, reduction) for dtype in DTYPE_BYTES for reduction in reductions_of(dtype)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every kernel, for the processor."""
    return build_library(tmp_path_factory.mktemp("kernels"), source(PAIRS))


@pytest.fixture
def cupy(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int) -> StandIn:
    """A CuPy whose kernels are the real text."""
    made = StandIn(seed, 1, run_text(library))
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@needs_compiler
class TestText:
    @pytest.mark.parametrize(("dtype", "reduction"), sampled(EVERY, every=5))
    def test_every_dtype_reduction_size_and_alignment(
        self, dtype: str, reduction: str, cupy: StandIn, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        device = CudaDevice()
        for count in (
            (0, 1, 2, 3, 7, 18) if dtype == "float64" else (0, 1, 2, 3, 7, 15, 16, 17, 1000)
        ):  # fractions are slow
            for offsets in (*OFFSETS, (int(rng.integers(0, 16)), int(rng.integers(0, 16)))):
                assert check_case(device, dtype, reduction, count, offsets, rng) == 0, (count, offsets)

    @pytest.mark.parametrize("dtype", DTYPE_BYTES)
    def test_copies(self, dtype: str, cupy: StandIn, seed: int) -> None:
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
            launch(library, f"reduce_{dtype}_sum", (blocks, 1), threads, (*addresses, 2017))
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
            ("equal(x, y)) return a | b", "equal(x, y)) return a", "float32", "min"),  # either zero
            ("!equal(x, x) ? a : b", "false ? a : b", "float16", "max"),  # a NaN is lost
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
        made = StandIn(0, 1, run_text(build_library(tmp_path, text.replace(right, wrong))))
        monkeypatch.setitem(sys.modules, "cupy", made)
        assert check_case(CudaDevice(), dtype, reduction, 8001, (1, 1), np.random.default_rng(0)) > 0


@needs_compiler
class TestCupyKernels:
    def test_calls_only_queue(self, cupy: StandIn) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        kernels = CupyKernels("int32", "sum", stream, 0)
        with stream:
            dst, src = cupy.asarray(np.arange(5, dtype=np.int32)), cupy.asarray(np.ones(5, dtype=np.int32))
        cupy.eagerness = 0.0
        stream.synchronize()
        kernels.reduce(dst.data.ptr, src.data.ptr, 5)
        kernels.reduce(dst.data.ptr, src.data.ptr, 5)
        assert cupy.host_bytes(dst).view(np.int32).tolist() == [0, 1, 2, 3, 4]
        stream.synchronize()
        assert cupy.host_bytes(dst).view(np.int32).tolist() == [2, 3, 4, 5, 6]

    def test_nothing_is_not_launched(self, cupy: StandIn) -> None:
        kernels = CupyKernels("float32", "avg", cupy.cuda.Stream(non_blocking=True), 0)
        cupy.launches.clear()
        kernels.reduce(0, 0, 0)
        kernels.copy(0, 0, 0)
        kernels.finish(0, 3, 0)
        assert cupy.launches == []

    def test_kernels_are_loaded_once_a_device_and_before_they_are_used(self, library: ctypes.CDLL) -> None:
        """A kernel's first run may wait for the device and take memory (CUDA's lazy loading)."""
        cupy = StandIn(0, 2, run_text(library))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", cupy)
            for device_id in (0, 1, 0):
                with cupy.cuda.Device(device_id):
                    CupyKernels("int8", "bor", cupy.cuda.Stream(non_blocking=True), device_id)
        warmed = ["reduce_int8_bor", "forward_int8_bor", "copy_int8", "divide_int8", "batch_int8_bor"]
        assert cupy.launches == warmed * 2

    def test_the_script_for_a_gpu_runs(self, cupy: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """From the check to the record, on two reductions and in little time; the stand-in's clock counts launches."""
        monkeypatch.setattr(kernel_bench, "DTYPE_BYTES", {"bfloat16": 2, "int8": 1})
        monkeypatch.setattr(kernel_bench, "reductions_of", lambda dtype: ("sum", "avg"))
        monkeypatch.setattr(kernel_bench, "COUNTS", (0, 17))
        out = tmp_path / "record.json"
        result = CliRunner().invoke(
            kernel_bench.command, ["--device", "gpu", "--size", "4096", "--rounds", "2", "-o", str(out)]
        )
        assert result.exit_code == 0, result.output
        record = kernel_bench.KernelSpeed.read(out)
        assert (record.device, record.wrong, record.machine["gpu"]) == ("gpu", 0, "stand-in")
        assert {row.kernel for row in record.rows} == {"sum", "sum, forwarded", "copy", "avg, division"}
        assert all(seconds > 0 for row in record.rows for seconds in row.seconds)


class TestWithoutKernels:
    def test_blocks(self) -> None:
        for n_bytes in (0, 1, 16, 4096, 4097, 10**6, 10**10):
            blocks = count_blocks(n_bytes)
            assert blocks * THREADS * 16 >= n_bytes
            assert (blocks - 1) * THREADS * 16 < max(n_bytes, 1)
        assert count_blocks(1 << 60) == BLOCKS_MAX

    def test_averages_of_many_elements_are_held_to_their_own_digits(self, seed: int) -> None:
        """Of few elements of float64 the average is held to fractions, of many to what NumPy divides."""
        total = draw_operand("float64", EXACT_COUNT_MAX + 1, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            long, short = (reference_average("float64", each, 7) for each in (total, total[:100]))
        assert count_wrong(long[:100], short, "float64") == 0

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
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(EnvironmentMissing, match=r"GPU: .*: pip install 'optcc\[gpu\]'"):
            load_cupy()
        with pytest.raises(EnvironmentMissing, match="GPU"):
            CudaDevice()
        broken = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 0)))
        monkeypatch.setitem(sys.modules, "cupy", broken)
        with pytest.raises(EnvironmentMissing, match="GPU: none"):
            load_cupy()

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


@pytest.mark.gpu
def test_every_kernel_on_this_machines_gpu(seed: int) -> None:
    assert check(CudaDevice(), seed) == 0
