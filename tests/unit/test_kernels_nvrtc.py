"""The CUDA text compiled for real GPUs, by the compiler that CuPy uses; nothing runs."""

from __future__ import annotations

import re

import pytest

from optcc.collective import DTYPE_BYTES
from optcc.runtime.cupy_kernels import source
from tests.unit.device_code import PAIRS, compile_for_gpu, no_nvrtc

pytestmark = pytest.mark.skipif(no_nvrtc() is not None, reason=str(no_nvrtc()))
ENTRY = re.compile(r"\.entry (\w+)\(.*?\n\}\n", re.DOTALL)
VECTOR = {
    "ld": r"\bld(\.global)?(\.nc)?\.v(4\.[ubf]32|2\.[ubf]64)\b",
    "st": r"\bst(\.global)?\.v(4\.[ubf]32|2\.[ubf]64)\b",
}


def count_vectors(body: str, kind: str) -> int:
    """Loads ("ld") or stores ("st") of 16 bytes."""
    return len(re.findall(VECTOR[kind], body))


@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_every_kernel_compiles_and_moves_16_bytes_at_once(architecture: str) -> None:
    """To machine code, for Ampere and Hopper: each kernel reads each operand and writes each result as vectors."""
    ptx, machine_code = compile_for_gpu(source(PAIRS), architecture)
    assert machine_code[:4] == b"\x7fELF"
    bodies = {match.group(1): match.group(0) for match in ENTRY.finditer(ptx)}
    names = {f"{kernel}_{dtype}" for kernel in ("copy", "divide") for dtype in DTYPE_BYTES}
    reducing = "reduce", "forward", "batch"
    names |= {f"{kernel}_{dtype}_{reduction}" for kernel in reducing for dtype, reduction in PAIRS}
    assert set(bodies) == names
    for name, body in bodies.items():
        kernel = name.partition("_")[0]
        # A batch has each of the others, and a copy to where the result goes too.
        loads, stores = {"reduce": (2, 1), "forward": (2, 2), "batch": (6, 5)}.get(kernel, (1, 1))
        assert (count_vectors(body, "ld"), count_vectors(body, "st")) == (loads, stores), name
        assert ".local" not in body, f"{name}: its operands are not in registers"
    assert "cvt.rn.f16.f32" in bodies["reduce_float16_sum"]
    assert "cvt.rn" not in bodies["reduce_bfloat16_sum"]
    # Subnormal numbers are kept, and divisions rounded.
    assert ".ftz" not in ptx and "div.approx" not in ptx and "div.full" not in ptx
    assert "div.rn.f32" in bodies["divide_bfloat16"] and "div.rn.f64" in bodies["divide_float64"]


def test_an_error_is_told() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        compile_for_gpu(source([("int8", "bor")]) + "nonsense", "sm_90")
