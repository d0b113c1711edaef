"""The kernels on the processor: every dtype x reduction against float64, and what docs/kernels.md states."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc.collective import (
    BITWISE,
    DTYPE_BYTES,
    FLOATS,
    REDUCTIONS,
    Collective,
    check_reduction_of,
    reductions_of,
)
from optcc.errors import InputError
from optcc.experiments.kernel_bench import (
    COUNTS,
    OFFSETS,
    CpuDevice,
    check_case,
    check_moves,
    count_wrong,
    draw_operand,
    open_values,
    reference,
    round_values,
)
from optcc.passes.bind import bind
from optcc.runtime import compiled_kernels, kernels
from optcc.runtime.exact_inputs import expected_output, make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.kernels import BLOCK_BYTES, NumpyKernels, divide, from_bfloat16, to_bfloat16
from optcc.runtime.samples import ring
from optcc.runtime.stored_types import is_stored_as, stored_dtype
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.schedules.ring import ring as ring_schedule
from optcc.verify.plan import verify_plan

EVERY = [(dtype, reduction) for dtype in DTYPE_BYTES for reduction in reductions_of(dtype)]
INTEGERS = [dtype for dtype in DTYPE_BYTES if dtype not in FLOATS]


def stored(values: list[float], dtype: str) -> Any:
    """A list as an array of `dtype`."""
    return round_values(np.array(values), dtype) if dtype in FLOATS else np.array(values).astype(dtype)


def reduced(dtype: str, reduction: str, *steps: list[float]) -> list[Any]:
    """The steps, one after the other, by the kernels."""
    dst, *sources = (stored(each, dtype) for each in steps)
    kernel = NumpyKernels(dtype, reduction)
    with np.errstate(all="ignore"):
        for source in sources:
            kernel.reduce(dst, source)
    values: list[Any] = open_values(dst, dtype).tolist()
    return values


class TestAgainstFloat64:
    @pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
    @pytest.mark.parametrize(("dtype", "reduction"), EVERY)
    def test_every_dtype_reduction_size_and_alignment(
        self, dtype: str, reduction: str, compiled: bool, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        device = CpuDevice(compiled=compiled)
        for count in COUNTS[:5] if dtype == "float64" else COUNTS:  # fractions are slow
            for offsets in OFFSETS[:1] if count > 1000 else OFFSETS:
                assert check_case(device, dtype, reduction, count, offsets, rng) == 0, (count, offsets)

    @pytest.mark.parametrize("dtype", DTYPE_BYTES)
    def test_copies(self, dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for count in COUNTS:
            for offsets in OFFSETS:
                assert check_moves(CpuDevice(), dtype, count, offsets, rng) == 0

    def test_the_reference_itself_rounds_as_fractions_do(self, seed: int) -> None:
        """bfloat16 and float16 by hand: nearest, ties to even, in every binade."""
        rng = np.random.default_rng(seed)
        for dtype, digits, least, largest in (("float16", 11, -24, 65504), ("bfloat16", 8, -133, 255 * 2**120)):
            values = np.ldexp(rng.standard_normal(3000), rng.integers(least - 3, 20 if digits == 11 else 130, 3000))
            for value, found in zip(values, open_values(round_values(values, dtype), dtype), strict=True):
                exact = Fraction(float(value))
                quantum = Fraction(2) ** max(int(np.frexp(value)[1]) - digits, least)
                nearest = round(exact / quantum) * quantum
                wanted = float(nearest) if abs(nearest) <= largest else float(np.copysign(np.inf, value))
                assert found == wanted, (value, dtype)

    def test_the_reference_sees_a_wrong_bit(self) -> None:
        rng = np.random.default_rng(0)
        dst, src = draw_operand("bfloat16", 1000, rng), draw_operand("bfloat16", 1000, rng)
        wanted = reference("bfloat16", "sum", dst, src)
        broken = wanted.copy()
        broken[123] ^= 1
        assert count_wrong(wanted, wanted, "bfloat16") == 0
        assert count_wrong(broken, wanted, "bfloat16") == 1

    def test_blocks_have_no_seams(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for dtype in ("bfloat16", "float32"):
            count = 2 * BLOCK_BYTES // DTYPE_BYTES[dtype] + 3
            assert check_case(CpuDevice(compiled=False), dtype, "max", count, (0, 0), rng) == 0


class TestSemantics:
    @pytest.mark.battery(39)
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max"])
    def test_a_nan_in_either_operand_makes_a_nan(self, dtype: str, reduction: str) -> None:
        nan = float("nan")
        assert np.isnan(reduced(dtype, reduction, [nan, 1.0, nan], [1.0, nan, nan])).all()

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_infinities(self, dtype: str) -> None:
        inf = float("inf")
        assert np.isnan(reduced(dtype, "sum", [inf], [-inf])).all()
        assert np.isnan(reduced(dtype, "prod", [inf], [0.0])).all()
        assert reduced(dtype, "sum", [inf, -inf], [1.0, -inf]) == [inf, -inf]
        assert reduced(dtype, "min", [inf, -inf], [1.0, 1.0]) == [1.0, -inf]

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("compiled", [True, False])
    def test_minus_zero_is_below_zero(self, dtype: str, compiled: bool) -> None:
        zeros, others = stored([0.0, 0.0, -0.0, -0.0], dtype), stored([0.0, -0.0, 0.0, -0.0], dtype)
        for reduction, wanted in (("min", [0, 1, 1, 1]), ("max", [0, 0, 0, 1]), ("sum", [0, 0, 0, 1])):
            dst = zeros.copy()
            NumpyKernels(dtype, reduction, compiled=compiled).reduce(dst, others)
            assert np.signbit(open_values(dst, dtype)).tolist() == wanted

    @pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 255.0 * 2**120)])
    def test_overflow_is_infinite(self, dtype: str, largest: float) -> None:
        assert reduced(dtype, "sum", [largest, -largest], [largest, -largest]) == [float("inf"), float("-inf")]
        assert reduced(dtype, "prod", [largest], [2.0]) == [float("inf")]
        assert reduced(dtype, "sum", [largest], [1.0]) == [largest]

    @pytest.mark.parametrize(("dtype", "step"), [("float16", 2048.0), ("bfloat16", 256.0), ("float32", 2.0**24)])
    def test_every_step_rounds_to_the_type(self, dtype: str, step: float) -> None:
        """One and one more are each lost beside the first number that has no room for them; in a wider sum they would
        not be. And together first, they count."""
        assert reduced(dtype, "sum", [step], [1.0], [1.0]) == [step]
        assert reduced(dtype, "sum", [1.0], [1.0], [step]) == [step + 2]

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_integers_wrap_around(self, dtype: str) -> None:
        limits = np.iinfo(dtype)
        dst = np.array([limits.max], dtype=dtype)
        NumpyKernels(dtype, "sum").reduce(dst, np.array([1], dtype=dtype))
        assert dst.tolist() == [limits.min]
        dst = np.array([limits.max], dtype=dtype)
        NumpyKernels(dtype, "prod").reduce(dst, np.array([3], dtype=dtype))
        assert dst.tolist() == [np.array(int(limits.max) * 3 % 2**64, dtype=np.uint64).astype(dtype)]

    @pytest.mark.parametrize("dtype", ["int8", "uint8"])
    @pytest.mark.parametrize("n_ranks", [1, 2, 3, 127, 128, 129, 255, 256, 1000])
    def test_an_average_of_bytes_truncates_for_any_number_of_ranks(self, dtype: str, n_ranks: int) -> None:
        every = np.arange(256, dtype=np.uint8).view(dtype)
        found = every.copy()
        NumpyKernels(dtype, "avg").finish(found, n_ranks)
        assert found.tolist() == [int(Fraction(int(each), n_ranks)) for each in every]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_an_average_is_the_exact_quotient_rounded_once(self, dtype: str) -> None:
        """Although it is divided in float32 first: no quotient by few ranks is that close to the middle."""
        bits = np.arange(1 << 16, dtype=np.uint16)
        values = bits.view(stored_dtype(dtype))
        finite = open_values(values, dtype)
        for n_ranks in (2, 3, 7, 127, 1000, 2048):
            found = values.copy()
            with np.errstate(all="ignore"):
                divide(found, n_ranks, dtype)
                wanted = round_values(finite / n_ranks, dtype)
            assert count_wrong(found, wanted, dtype) == 0

    def test_what_finish_leaves_alone(self) -> None:
        for reduction in REDUCTIONS:
            data = np.array([9], dtype=np.int32)
            NumpyKernels("int32", reduction).finish(data, 2)
            assert data.tolist() == [4 if reduction == "avg" else 9]

    def test_copies_may_overlap(self) -> None:
        data = np.arange(10, dtype=np.int8)
        NumpyKernels("int8", "sum").copy(data[2:], data[:-2])
        assert data.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]


class TestBfloat16:
    def test_every_bfloat16_comes_back(self) -> None:
        bits = np.arange(1 << 16, dtype=np.uint16)
        values = from_bfloat16(bits)
        assert count_wrong(to_bfloat16(values), bits, "bfloat16") == 0
        assert np.array_equal(values, open_values(bits, "bfloat16"), equal_nan=True)

    @pytest.mark.battery(39)
    def test_rounding_is_to_nearest_even_and_one_nan(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        values = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
        with np.errstate(invalid="ignore"):
            wide = values.astype(np.float64)
        assert count_wrong(to_bfloat16(values), round_values(wide, "bfloat16"), "bfloat16") == 0
        assert set(to_bfloat16(values[np.isnan(values)]).tolist()) == {0x7FC0}


class TestChoice:
    def test_bits_are_for_integers(self) -> None:
        for dtype in DTYPE_BYTES:
            for reduction in BITWISE:
                if dtype in INTEGERS:
                    assert check_reduction_of(reduction, dtype) == reduction
                    continue
                with pytest.raises(InputError, match=f"'{reduction}' of {dtype}: must be one of sum, prod"):
                    check_reduction_of(reduction, dtype)
                with pytest.raises(InputError, match=f"of {dtype}"):
                    NumpyKernels(dtype, reduction)
                with pytest.raises(InputError, match=f"of {dtype}"):
                    make_input(0, 1, dtype, reduction)
                with pytest.raises(InputError, match=f"of {dtype}"):
                    bind(ring_schedule(n_ranks=2), 16, dtype, reduction)
        for reductions in ("mean", ""):
            with pytest.raises(InputError, match="must be one of sum"):
                check_reduction_of(reductions, "int8")
        with pytest.raises(InputError, match="must be one of float32"):
            reductions_of("half")

    def test_another_packages_bfloat16_is_one(self) -> None:
        class Foreign:
            dtype = type("Dtype", (), {"name": "bfloat16", "isnative": True})()

        assert is_stored_as(Foreign(), "bfloat16")  # type: ignore[arg-type]
        assert not is_stored_as(Foreign(), "float16")  # type: ignore[arg-type]
        assert is_stored_as(np.zeros(1, np.float16), "float16")

    def test_bytes_in_another_order_are_not_of_the_type(self) -> None:
        for dtype in ("float32", "float16", "int64"):
            assert is_stored_as(np.zeros(1, dtype), dtype)
            assert not is_stored_as(np.zeros(1, np.dtype(dtype).newbyteorder()), dtype)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_without_numba_numpy_does_it(self, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled_kernels, "find_spec", lambda name: None)
        for reduction in ("sum", "min"):
            assert compiled_kernels.find_compiled(dtype, reduction) is None
            assert check_case(CpuDevice(), dtype, reduction, 33, (0, 1), np.random.default_rng(0)) == 0

    def test_a_processor_without_float16_leaves_it_to_numpy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled_kernels, "_converts_half", lambda: False)
        loaded = compiled_kernels._load_all()
        assert hasattr(loaded, "sum_bfloat16") and not hasattr(loaded, "sum_float16")

    def test_a_kernel_is_compiled_before_its_first_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        monkeypatch.setattr(kernels, "find_compiled", lambda dtype, reduction: lambda dst, src: calls.append(len(dst)))
        NumpyKernels("bfloat16", "sum")
        assert calls == [0]


class TestInputs:
    @pytest.mark.parametrize(("dtype", "reduction"), EVERY)
    def test_every_order_gives_the_same_bits_for_127_ranks(self, dtype: str, reduction: str, seed: int) -> None:
        rng, n_ranks, count = random.Random(seed), 127, 50
        wanted, defined = expected_output(Collective("allreduce", n_ranks), count, dtype, reduction, 0, seed)
        assert defined.all()
        kernel = NumpyKernels(dtype, reduction)
        for _ in range(3):
            parts = [make_input(rank, count, dtype, reduction, seed) for rank in range(n_ranks)]
            while len(parts) > 1:  # a random tree
                other = parts.pop(rng.randrange(len(parts)))
                kernel.reduce(parts[rng.randrange(len(parts))], other)
            kernel.finish(parts[0], n_ranks)
            assert np.array_equal(parts[0], wanted)

    @pytest.mark.parametrize(("dtype", "reduction"), EVERY)
    @pytest.mark.parametrize("n_ranks", [2, 8])
    def test_a_lost_or_misplaced_contribution_shows(self, dtype: str, reduction: str, n_ranks: int) -> None:
        count, kernel = 256, NumpyKernels(dtype, reduction)
        wanted, _ = expected_output(Collective("allreduce", n_ranks), count, dtype, reduction, 0)
        for victim in range(n_ranks):
            for moved in (False, True):
                inputs = [make_input(rank, count, dtype, reduction) for rank in range(n_ranks)]
                if moved:
                    inputs[victim] = np.roll(inputs[victim], 16)
                else:
                    del inputs[victim]
                total = inputs[0].copy()
                for each in inputs[1:]:
                    kernel.reduce(total, each)
                kernel.finish(total, n_ranks)
                assert np.count_nonzero(total != wanted) > 3, (victim, moved)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8"])
    def test_a_ring_runs_in_every_new_type(self, dtype: str) -> None:
        for reduction in reductions_of(dtype):
            plan = ring(3, 1001 * DTYPE_BYTES[dtype], dtype, reduction, segments=2)
            verdict = verify_plan(plan)

            def body(rank: int, transport: LoopbackTransport, plan: Any = plan, verdict: Any = verdict) -> int:
                executor = Executor(plan, rank, transport, verdict, deadline_s=20)
                data = make_input(rank, 1001, dtype, plan.transfers.reduction)
                out = np.zeros_like(data)
                executor.all_reduce(data, out)
                return wrong_elements(plan, rank, out)

            assert run_ranks(3, body) == [0, 0, 0]

    def test_a_message_of_another_type_is_refused(self) -> None:
        with pytest.raises(InputError, match="message: float32: must be the plan's bfloat16"):
            wrong_elements(ring(1, 8, "bfloat16"), 0, np.zeros(4, dtype=np.float32))


def test_the_docs_name_every_type_and_reduction() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    for name in (*DTYPE_BYTES, *REDUCTIONS):
        assert f"`{name}`" in page
