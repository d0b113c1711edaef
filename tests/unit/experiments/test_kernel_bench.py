"""The kernels' record: it is made, refused when damaged, and what the docs show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.errors import CodecError, InputError
from optcc.experiments import kernel_bench
from optcc.experiments.kernel_bench import CpuDevice, KernelSpeed, KernelTiming, Steps, check, command, measure
from optcc.runtime.kernels import Array


def test_the_record_has_every_case() -> None:
    record = KernelSpeed.read()
    assert record.wrong == 0 and record.device == "cpu"
    for dtype in DTYPE_BYTES:
        assert {row.kernel for row in record.rows if row.dtype == dtype} >= {*reductions_of(dtype)} - {"avg"}


def test_a_measurement_comes_back_from_its_file() -> None:
    rows = measure(CpuDevice(), 4096, 3, ["bfloat16", "uint8"])
    assert len(rows) == 4 + 1 + 1 + 7 + 1 + 1
    for row in rows:
        assert len(row.seconds) == len(row.copy_seconds) == 3
    record = KernelSpeed("cpu", {}, {}, 0, tuple(row for row in rows if min(*row.seconds, *row.copy_seconds) > 0))
    assert KernelSpeed.from_bytes(record.to_bytes()) == record
    with pytest.raises(InputError, match="0 rounds of 64 B: must be"):
        measure(CpuDevice(), 64, 0)
    with pytest.raises(InputError, match="of 12 B: must be"):
        measure(CpuDevice(), 12, 1)


def test_the_share_is_of_the_copys_bandwidth() -> None:
    """Twice the copy's time for three halves of its bytes is three quarters; the median is over rounds."""
    row = KernelTiming("float32", "sum", 1000, 3, [2.0, 2.0, 9.0], [1.0, 1.0, 1.0])
    assert row.copy_share == pytest.approx(0.75)
    assert row.message_bytes_per_s == 500


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-kernels/1", b"optcc-kernels/2", r"\$\.format"),
        (b'"moved"', b'"moves"', r"\$\.rows"),
        (b'"seconds": [', b'"seconds": [-1.0,', r"\$\.rows\[0\]\.seconds"),
        (b'"copy_seconds": [', b'"copy_seconds": [1.0,', r"\$\.rows\[0\]\.copy_seconds"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = KernelSpeed("cpu", {}, {}, 0, (KernelTiming("int8", "sum", 8, 3, [1.0], [1.0]),)).to_bytes()
    data = data.replace(b"\n", b"").replace(b'": [   ', b'": [')
    assert before in data
    with pytest.raises(CodecError, match=path):
        KernelSpeed.from_bytes(data.replace(before, after, 1))


class Broken(CpuDevice):
    """A processor that adds where it should multiply."""

    def kernels(self, dtype: str, reduction: str) -> Steps:
        return super().kernels(dtype, "sum" if reduction == "prod" else reduction)


def test_wrong_kernels_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_bench, "COUNTS", (0, 33))
    monkeypatch.setattr(kernel_bench, "OFFSETS", ((0, 1),))
    said: list[str] = []
    assert check(Broken(), 0, said.append) > 100
    assert [line.split(":")[0] for line in said if not line.endswith(" 0 wrong")] == [f"{d} prod" for d in DTYPE_BYTES]
    monkeypatch.setattr(kernel_bench, "measure", lambda device, size, rounds: [])
    out = tmp_path / "record.json"
    for made, code, last in ((Broken, 1, "FAILED"), (CpuDevice, 0, "OK")):
        monkeypatch.setattr(kernel_bench, "CpuDevice", made)
        result = CliRunner().invoke(command, ["-o", str(out)], standalone_mode=False)
        assert result.return_value == code, result.output
        assert result.output.rstrip().endswith(last)
        assert (KernelSpeed.read(out).wrong == 0) == (code == 0)


def test_bytes_around_an_operand_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes one element too many."""

    class TooLong(CpuDevice):
        def kernels(self, dtype: str, reduction: str) -> Steps:
            kernels = super().kernels(dtype, reduction)

            class Longer:
                def __getattr__(self, name: str) -> object:
                    return getattr(kernels, name)

                def finish(self, data: Array, n_ranks: int) -> None:
                    block = np.lib.stride_tricks.as_strided(data, (len(data) + 1,))
                    block[-1] = 0

            return Longer()  # type: ignore[return-value]

    assert kernel_bench.check_case(TooLong(), "int32", "sum", 10, (0, 0), np.random.default_rng(0)) == 4
