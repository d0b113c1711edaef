"""What only a real GPU shows: order between the caller's streams and a collective, arrays of other packages, captures.

The stand-in for CuPy runs work in orders that CUDA allows; here CUDA itself chooses. Work of the caller is slow (a
kernel that spins), so that a collective that did not wait for it, or whose output were read too early, gives other
numbers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from optcc.errors import InputError
from optcc.planner import Planner
from optcc.runtime.arguments import stream_of
from optcc.runtime.communicator import Communicator
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.topology import Topology

pytestmark = pytest.mark.gpu

SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long now, end;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    for (end = now + ns; now < end;) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
}
"""
SHORT, LONG = 1001, 300_001
"""Elements of float32: a message that one kernel takes, and one that goes by copy engines."""
ROUNDS = 60


def on_ranks(n_ranks: int, body: Callable[[Communicator, Any], Any]) -> list[Any]:
    """`body(communicator, cupy)` on each rank, a thread whose current GPU is the first."""
    import cupy

    planner = Planner(Topology.parse(f"{n_ranks}@1GB/s"))

    def run(_rank: int, transport: Transport) -> Any:
        with cupy.cuda.Device(0), Communicator(transport, planner) as communicator:
            return body(communicator, cupy)

    return run_ranks(n_ranks, run, deadline_s=120)


def spinning(cupy: Any) -> Callable[[float], None]:
    """Has the current stream wait so many microseconds."""
    kernel = cupy.RawKernel(SPIN, "spin")
    return lambda micros: kernel((1,), (1,), (np.uint64(1000 * micros),))


@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_collective_comes_between_the_callers_work(count: int, n_ranks: int) -> None:
    """Input that is still being made is waited for; what reads the output waits for it; input may be overwritten."""

    def body(communicator: Communicator, cupy: Any) -> int:
        spin, stream, wrong = spinning(cupy), cupy.cuda.Stream(non_blocking=True), 0
        rng = np.random.default_rng(communicator.rank)
        with stream:
            given, got = cupy.zeros(count, np.float32), cupy.zeros(count, np.float32)
            for number in range(ROUNDS):
                spin(float(rng.integers(0, 300)))
                given.fill(number + communicator.rank)
                handle = communicator.start_all_reduce(given, out=got)
                if number % 2:
                    handle.wait()
                else:
                    while not handle.test():
                        pass
                read = got + 1
                given.fill(-1000)
                got.fill(-2000)
                total = n_ranks * number + n_ranks * (n_ranks - 1) // 2 + 1
                wrong += int(cupy.count_nonzero(read != total))
        return wrong

    assert on_ranks(n_ranks, body) == [0] * n_ranks


def test_another_stream_waits_for_the_event() -> None:
    def body(communicator: Communicator, cupy: Any) -> int:
        spin, wrong = spinning(cupy), 0
        first, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with first:
            array = cupy.zeros(LONG, np.float32)
        for number in range(ROUNDS):
            with first:
                spin(200.0)
                array.fill(number)
                handle = communicator.start_all_reduce(array)
                handle.wait()
            with other:
                other.wait_event(handle.event)
                wrong += int(cupy.count_nonzero(handle.output != 2 * number))
        return wrong

    assert on_ranks(2, body) == [0, 0]


def test_every_collective_over_arrays_on_a_gpu() -> None:
    def body(communicator: Communicator, cupy: Any) -> list[bool]:
        rank, n_ranks = communicator.rank, communicator.n_ranks
        every = np.arange(n_ranks * 1200, dtype=np.int32).reshape(n_ranks, 1200)
        mine, total = cupy.asarray(every[rank]), every.sum(axis=0, dtype=np.int32)
        blocks = every.reshape(n_ranks, n_ranks, -1)
        gathered = communicator.gather(mine, root=1)
        reduced = communicator.reduce(mine, root=2)
        scattered = communicator.scatter(cupy.asarray(every) if rank == 0 else None, root=0, out=cupy.empty_like(mine))
        given = cupy.asarray(every[1] if rank == 1 else np.zeros_like(every[0]))
        sent = cupy.zeros_like(mine)
        begun = communicator.start_recv(sent, (rank - 1) % n_ranks)
        communicator.send(mine, (rank + 1) % n_ranks)
        begun.wait()
        pairs = [
            (communicator.all_reduce(mine), total),
            (communicator.reduce_scatter(mine), total.reshape(n_ranks, -1)[rank]),
            (communicator.all_gather(mine), every),
            (communicator.broadcast(given, root=1), every[1]),
            (communicator.all_to_all(mine), blocks[:, rank].reshape(-1)),
            (scattered, every[rank]),
            (sent, every[(rank - 1) % n_ranks]),
            *([(gathered, every)] if rank == 1 else []),
            *([(reduced, total)] if rank == 2 else []),
        ]
        return [np.array_equal(cupy.asnumpy(got), wanted) for got, wanted in pairs]

    for found in on_ranks(3, body):
        assert all(found), found


def test_a_stream_that_captures_is_refused_and_may_be_used_afterwards() -> None:
    def body(communicator: Communicator, cupy: Any) -> bool:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.ones(SHORT, np.float32)
            communicator.all_reduce(array)
            stream.synchronize()
            stream.begin_capture()
            try:
                with pytest.raises(InputError, match="captures a CUDA graph"):
                    communicator.all_reduce(array)
                array += 1
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            total = communicator.all_reduce(array)
            return bool((total == 2 * communicator.n_ranks).all())

    assert on_ranks(2, body) == [True, True]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"no {package}")


@needs("torch")
def test_tensors_of_torch_on_torchs_stream() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")

    def body(communicator: Communicator, cupy: Any) -> int:
        spin, wrong = spinning(cupy), 0
        for is_side in (False, True):
            stream = torch.cuda.Stream() if is_side else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                tensor = torch.zeros(LONG, device="cuda")
                for number in range(ROUNDS // 2):
                    with stream_of(tensor, cupy.asarray(tensor)):
                        spin(200.0)
                    tensor.fill_(number + communicator.rank)
                    got = communicator.all_reduce(tensor)
                    assert isinstance(got, torch.Tensor) and got.is_cuda
                    wrong += int((got != 2 * number + 1).sum().item())
                half = torch.full((SHORT,), 3.0, device="cuda", dtype=torch.bfloat16)
                out = communicator.all_reduce(half.view(torch.int16).view(torch.uint16), dtype="bfloat16")
                wrong += int((out.view(torch.bfloat16) != 6).sum().item())
        return wrong

    assert on_ranks(2, body) == [0, 0]


JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp, numpy as np
from tests.gpu.test_on_a_gpu import on_ranks

def body(communicator, cupy):
    given = jnp.arange(300_001, dtype=jnp.float32) + communicator.rank
    handle = communicator.start_all_reduce(given)
    got = handle.result()
    handle.event.synchronize()
    return isinstance(got, jax.Array) and np.array_equal(np.asarray(got), 2 * np.arange(300_001, dtype=np.float32) + 1)

assert on_ranks(2, body) == [True, True]
"""


@needs("jax")
def test_arrays_of_jax() -> None:
    """In a process of its own: JAX takes most of a GPU's memory unless told not to."""
    ran = subprocess.run([sys.executable, "-c", JAX], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
