"""The streams of other packages, as the engine takes them: here those of a torch that is not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optcc.runtime.arguments import stream_of
from tests.unit.stand_in_cupy import StandIn


class Tensor:
    """Torch's, to the type check."""


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_tensor_comes_on_torchs_current_stream(
    number: int, is_old: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy 14 warns of `ExternalStream`, which older ones have alone; the stream is of the tensor's GPU."""
    cupy = StandIn(seed, 2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with cupy.cuda.Device(number):
        stream, array = cupy.cuda.Stream(non_blocking=True), cupy.zeros(3, np.float32)
    if is_old:
        del cupy.cuda.Stream.from_external
    else:
        monkeypatch.setattr(cupy.cuda, "ExternalStream", refused)
    pointers = {number: stream.ptr}
    current = lambda device: SimpleNamespace(cuda_stream=pointers[device])  # noqa: E731 - torch's function
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=SimpleNamespace(current_stream=current))
    )
    found = stream_of(Tensor(), array)
    assert (found, found.device_id) == (stream, number)
    pointers[number] = 0
    assert stream_of(Tensor(), array) is cupy.cuda.Stream.null


def refused(*_: Any) -> None:
    raise DeprecationWarning("ExternalStream is deprecated")
