"""`optcc bench --device gpu` on a stand-in for CuPy: right, checked where the arrays are, and it says which way."""

from __future__ import annotations

import json
import sys

import pytest

from optcc import cli
from optcc.errors import InputError
from optcc.experiments.bench_messages import check_device
from optcc.runtime import device_actions
from optcc.runtime.cupy_kernels import CupyKernels
from tests.unit.stand_in_cupy import StandIn

LOOPBACK = ("bench", "--transport", "loopback", "--device", "gpu", "-n", "2")


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, seed: int) -> StandIn:
    """Two GPUs that are not there."""
    made = StandIn(seed, 2)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@pytest.mark.parametrize("fused_bytes", [1 << 18, pytest.param(64, marks=pytest.mark.slow)])
def test_every_collective_is_right_on_a_gpu(
    fused_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cupy: StandIn
) -> None:
    monkeypatch.setattr(device_actions, "FUSED_BYTES_MAX", fused_bytes)
    for words in (
        ("-b", "0", "-e", "4004", "-f", "2002", "-t", "3", "-d", "bfloat16", "-o", "avg"),
        ("-b", "4K", "-t", "2", "-g", "2", "-d", "int8", "--collective", "all_to_all_perf"),
        ("-b", "1000", "-t", "3", "-z", "0", "-m", "3", "--collective", "all_gather_perf"),
        ("-b", "0", "-e", "4004", "-i", "4004", "-t", "3", "--collective", "alltoallv_perf"),
        ("-b", "4004", "-t", "3", "--collective", "sendrecv_perf"),
    ):
        assert cli.run([*LOOPBACK, *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["out_of_bounds"] == 0
        assert told["config"]["devices"][1] == "gpu:1 stand-in, staged: loopback is memory of this process"
    assert any(name.startswith("divide_bfloat16") for name in cupy.launches)


def test_the_header_says_where_arrays_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*LOOPBACK, "-b", "1000", "-t", "3"]) == 0
    out = capsys.readouterr().out
    assert "# arrays of rank 0, 2 on gpu:0 stand-in, staged: loopback is memory of this process\n" in out
    assert "# arrays of rank 1 on gpu:1 stand-in" in out and "# Out of bounds values : 0 OK" in out
    assert cli.run([*LOOPBACK[:-3], "gpu:1", "-b", "1000", "-t", "3"]) == 0
    assert "# arrays of rank 0, 1, 2 on gpu:1" in capsys.readouterr().out


def test_wrong_elements_are_found_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CupyKernels, "finish", lambda *_: None)
    assert cli.run([*LOOPBACK, "-b", "1000", "-t", "3", "-o", "avg"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--device", "gpu:2", "-t", "2"), "--device gpu:2: must be below 2, the GPUs of this host"),
        (("--device", "tpu", "-t", "2"), "--device 'tpu': must be cpu, gpu or gpu:N"),
        (("--device", "gpu", "--peer", "mpi"), "--device gpu: must be cpu with --peer mpi"),
        (("-G", "1"), "-G 1: must be 0: messages need the host"),
    ],
)
def test_what_cannot_be_is_bad_input(words: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--transport", "loopback", "-b", "1000", "-n", "1", *words]) == 2
    assert what in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.run([*LOOPBACK, "-b", "1000", "-t", "2"]) == 2
    assert "GPU: " in capsys.readouterr().err


def test_names_of_devices() -> None:
    assert [check_device(each) for each in ("cpu", "gpu", "gpu:12")] == ["cpu", "gpu", "gpu:12"]
    for text in ("cpu:1", "gpu:", "gpu:-1", "GPU", ""):
        with pytest.raises(InputError, match="must be cpu, gpu or gpu:N"):
            check_device(text)
