"""What the ranks run, with torchrun's variables: `python programs.py NAME OUT`. A failed assertion fails the test."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PROGRAMS: dict[str, Callable[[], Any]] = {}
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8]
FLOATS = TYPES[:4]
SIZES = [(1,), (33, 5), (40_000,)]


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function that tests name."""
    PROGRAMS[function.__name__] = function
    return function


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, another draw for each rank: of these every order of additions gives the same bits."""
    random = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(1, 4, shape, generator=random).to(dtype)


def same(ours: Any, theirs: Any, what: str) -> None:
    """Equal bit for bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype, what
        assert torch.equal(mine, other), f"{what}: {mine} {other}"


def error_of(call: Callable[[], Any]) -> Exception | None:
    """What it raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return error
    return None


@program
def operations() -> None:
    """Every operation against Gloo's, in one process."""
    gloo = dist.new_group(backend="gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    ops = dist.ReduceOp
    cases = [(dtype, SIZES[k % len(SIZES)]) for k, dtype in enumerate(TYPES)] + [
        (torch.float32, each) for each in SIZES
    ]
    for seed, (dtype, shape) in enumerate(cases):
        mine = sample(shape, dtype, seed)
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, *([] if dtype in FLOATS else [ops.BAND, ops.BOR, ops.BXOR])):
            got = [mine.clone() for _ in range(2)]
            for each, group in zip(got, (None, gloo), strict=True):
                dist.all_reduce(each, op, group)
            same(got[:1], got[1:], f"all_reduce {op} {dtype} {shape}")
        average = mine.clone()
        dist.all_reduce(average, ops.AVG)
        total = mine.double()
        dist.all_reduce(total, group=gloo)
        exact = total / n_ranks
        assert torch.allclose(average.double(), exact if dtype in FLOATS else exact.trunc(), rtol=1e-2), dtype
        for root in range(n_ranks):
            got = [mine.clone() for _ in range(2)]
            for each, group in zip(got, (None, gloo), strict=True):
                dist.broadcast(each, root, group)
            same(got[:1], got[1:], f"broadcast {dtype}")
            got = [mine.clone() for _ in range(2)]
            for each, group in zip(got, (None, gloo), strict=True):
                dist.reduce(each, root, group=group)
            if rank == root:
                same(got[:1], got[1:], f"reduce {dtype}")
            gathered = [[torch.zeros_like(mine) for _ in range(n_ranks)] for _ in range(2)]
            for outs, group in zip(gathered, (None, gloo), strict=True):
                dist.gather(mine, outs if rank == root else None, root, group)
            same(gathered[0], gathered[1], f"gather {dtype}")
            parts = [torch.zeros_like(mine) for _ in range(2)]
            blocks = [mine + k for k in range(n_ranks)] if rank == root else None
            for part, group in zip(parts, (None, gloo), strict=True):
                dist.scatter(part, blocks, root, group)
            same(parts[:1], parts[1:], f"scatter {dtype}")
        lists = [[torch.zeros_like(mine) for _ in range(n_ranks)] for _ in range(2)]
        for outs, group in zip(lists, (None, gloo), strict=True):
            dist.all_gather(outs, mine, group)
        same(lists[0], lists[1], f"all_gather {dtype}")
        whole = torch.zeros(n_ranks * mine.numel(), dtype=dtype)
        dist.all_gather_into_tensor(whole, mine.reshape(-1))
        same([whole], [torch.cat([each.reshape(-1) for each in lists[1]])], f"all_gather_into_tensor {dtype}")
        summed = mine.clone()
        dist.all_reduce(summed, group=gloo)
        wide = sample((n_ranks * 5, *shape[1:]), dtype, seed)
        piece, every = torch.zeros((5, *shape[1:]), dtype=dtype), wide.clone()
        dist.reduce_scatter_tensor(piece, wide)
        dist.all_reduce(every, group=gloo)
        same([piece], [every.chunk(n_ranks)[rank]], f"reduce_scatter_tensor {dtype}")
        piece = torch.zeros_like(piece)
        dist.reduce_scatter(piece, list(wide.chunk(n_ranks)))
        same([piece], [every.chunk(n_ranks)[rank]], f"reduce_scatter {dtype}")
        turned = [torch.zeros_like(wide) for _ in range(2)]
        for out, group in zip(turned, (None, gloo), strict=True):
            dist.all_to_all_single(out, wide, group=group)
        same(turned[:1], turned[1:], f"all_to_all_single {dtype}")
        sizes = [[(r + 2 * k) % 4 for k in range(n_ranks)] for r in range(n_ranks)]
        rows = sample((sum(sizes[rank]), 3), dtype, seed)
        takes = [sizes[k][rank] for k in range(n_ranks)]
        turned = [torch.zeros((sum(takes), 3), dtype=dtype) for _ in range(2)]
        for out, group in zip(turned, (None, gloo), strict=True):
            dist.all_to_all_single(out, rows, takes, sizes[rank], group=group)
        same(turned[:1], turned[1:], f"all_to_all_single with sizes {dtype}")
        outs = [torch.zeros((k, 3), dtype=dtype) for k in takes]
        dist.all_to_all(outs, [torch.full((k, 3), rank).to(dtype) for k in sizes[rank]])
        same(outs, [torch.full((k, 3), src).to(dtype) for src, k in enumerate(takes)], "all_to_all")
    dist.barrier()


class Net(torch.nn.Module):  # type: ignore[misc] # torch is Any
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(model: torch.nn.Module, steps: int = 12, optimizer: Any = None) -> list[float]:
    """The job's mean loss of each step; every rank has data of its own."""
    random = torch.Generator().manual_seed(dist.get_rank())
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 20, generator=random)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


@program
def data_parallel() -> list[float]:
    """DDP with several buckets: the same losses twice, and the same parameters at all ranks."""
    from torch.nn.parallel import DistributedDataParallel

    runs = []
    for _ in range(2):
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
        runs.append(trained(model))
        for each in model.parameters():
            first = each.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, each), "parameters differ between ranks"
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0]
    return runs[0]


@program
def groups_and_messages() -> None:
    """Groups of some ranks, several at a time; messages in any order, from anyone, in a batch; what is coalesced."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    evens, odds = dist.new_group(list(range(0, n_ranks, 2))), dist.new_group(list(range(1, n_ranks, 2)))
    ends = dist.new_group([n_ranks - 1, 0], use_local_synchronization=True) if rank in (0, n_ranks - 1) else None
    mine = evens if rank % 2 == 0 else odds
    whole, part = torch.full((1000,), float(rank)), torch.full((2000,), float(rank))
    works = [dist.all_reduce(whole, async_op=True), dist.all_reduce(part, group=mine, async_op=True)]
    if ends is not None:
        both = torch.full((10,), float(rank))
        works.append(dist.all_reduce(both, dist.ReduceOp.MAX, ends, async_op=True))
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    assert whole[0] == sum(range(n_ranks))
    assert part[0] == sum(range(rank % 2, n_ranks, 2))
    assert ends is None or both[0] == n_ranks - 1

    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    got = torch.zeros(3, 4, dtype=torch.float16).t()
    begun = [dist.irecv(got, left, tag=2), dist.isend(torch.full((4, 3), rank, dtype=torch.float16), right, tag=2)]
    for work in begun:
        assert work is not None
        work.wait()
    assert (got == left).all()
    outs = [torch.zeros(5), torch.zeros(7)]
    batch = [dist.P2POp(dist.irecv, out, left, tag=k) for k, out in enumerate(outs)]
    batch += [dist.P2POp(dist.isend, torch.full_like(outs[k], rank + k), right, tag=k) for k in (1, 0)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert [out[0].item() for out in outs] == [left, left + 1]
    if rank == 0:
        seen = set()
        for _ in range(n_ranks - 1):
            number = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(number)
            assert number.item() == source
            seen.add(source)
        assert seen == set(range(1, n_ranks))
    else:
        dist.send(torch.tensor([rank]), 0)

    tensors = [torch.full((k + 1,), float(rank)) for k in range(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in tensors:
            dist.all_reduce(each)
    manager.wait()
    assert all((each == sum(range(n_ranks))).all() for each in tensors)
    uneven = [torch.zeros(k + 1) for k in range(n_ranks)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert all((each == k).all() for k, each in enumerate(uneven))
    objects: list[Any] = [None] * n_ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": k} for k in range(n_ranks)]

    # Memory that does not lie in order, and the same memory in operations that follow each other at once.
    turned = torch.arange(12.0).reshape(3, 4).t()
    dist.all_reduce(turned)
    assert torch.equal(turned, n_ranks * torch.arange(12.0).reshape(3, 4).t())
    chain = torch.ones(100_000)
    for _ in range(3):
        dist.all_reduce(chain, async_op=True)
        dist.broadcast(chain[:50_000], 0, async_op=True)
    dist.barrier()
    assert (chain == n_ranks**3).all()

    # What follows a future may wait for another operation.
    def again(future: Any) -> torch.Tensor:
        tensor: torch.Tensor = future.value()[0]
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        return tensor * 2

    first = dist.all_reduce(torch.ones(8), async_op=True).get_future().then(again)
    assert (first.wait() == 2 * n_ranks**2).all()

    refused: list[tuple[str, Callable[[], Any]]] = [
        ("must be one of torch.float32", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16))),
        ("BOR of torch.float32: must be of integers", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR)),
        ("AVG of torch.bool", lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)),
        ("must be dense", lambda: dist.broadcast(torch.ones(2).to_sparse(), 0)),
        ("input_split_sizes", lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), None, [1] * n_ranks)),
        ("must fit", lambda: dist.all_gather_into_tensor(torch.ones(5 * n_ranks + 1), torch.ones(5))),
    ]
    for wrong, call in refused:
        assert wrong in str(error_of(call)), wrong
    dist.barrier()


@program
def sharded() -> list[list[float]]:
    """FSDP2, ZeRO, tensor parallelism and functional collectives on meshes of four ranks."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=("rows", "columns"))
    sums = functional.all_reduce(torch.full((3,), float(rank)), "sum", (mesh, 0))
    assert (sums + 0 == sum(k for k in range(n_ranks) if k % 2 == rank % 2)).all()
    blocks = functional.all_to_all_single(torch.arange(4.0) + 10 * rank, None, None, dist.group.WORLD)
    assert (blocks + 0).tolist() == [10.0 * k + rank for k in range(n_ranks)]
    both = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", dist.group.WORLD)
    assert all((each + 0 == n_ranks).all() for each in both)

    losses = []
    for two_dimensional in (False, True):
        model = Net()
        for layer in (model.layers[0], model.layers[2]):
            fully_shard(layer, mesh=mesh if two_dimensional else mesh["columns"])
        fully_shard(model, mesh=mesh if two_dimensional else mesh["columns"])
        losses.append(trained(model, 6))
    model = Net()
    parallelize_module(model.layers, mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shared = torch.randn(8, 20, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(model(shared), Net()(shared), atol=1e-6)
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    losses.append(trained(model, 6, optimizer))
    return losses


@program
def timeouts() -> None:
    """An operation that is late ends the group at both ranks; a timeout of `wait` does not."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        assert "Timed out" in str(error_of(lambda: work.wait(timedelta(milliseconds=50))))
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(torch.ones(5))
    if rank == 0:
        assert "Timed out" in str(error_of(lambda: dist.barrier(group)))
        assert isinstance(error_of(lambda: dist.all_reduce(torch.ones(1), group=group)), dist.DistBackendError)
    dist.barrier()
    if rank == 1:
        assert isinstance(error_of(lambda: dist.all_reduce(torch.ones(1), group=group)), dist.DistBackendError)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == 2).all()


@program
def lost_rank() -> str:
    """Rank 1 is killed in the middle: the others are told by whom, long before the timeout."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = error_of(lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(5)])
    assert isinstance(error, dist.DistBackendError)
    assert time.monotonic() - began < 30
    return str(error)


def culprit_calls(operation: Callable[[int], Any]) -> str:
    """What this rank is told when rank 1 calls an operation with 1, and the others with 0."""
    error = error_of(lambda: operation(int(dist.get_rank() == 1)))
    assert isinstance(error, dist.DistBackendError)
    return str(error)


@program
def disagreements() -> list[str]:
    """Rank 1 wants another size than the others, which is refused; then another collective, which all have run before:
    that ends with the timeout. What every rank knows after the first goes to a folder, for torchfrtrace."""
    from optcc.runtime.observe.jobs import read_job
    from optcc.runtime.observe.torch_dump import write_torch_dumps

    folder, n_ranks = Path(os.environ["OPTCC_STATUS_DIR"]), dist.get_world_size()
    whole = torch.zeros(1000 * n_ranks)
    dist.all_reduce(torch.ones(1000))
    dist.all_gather_into_tensor(whole, torch.ones(1000))
    said = [culprit_calls(lambda more: dist.all_reduce(torch.ones(2000 + more)))]
    if dist.get_rank() == 0:
        write_torch_dumps(read_job(folder), folder / "refused")
        (folder / "read").touch()
    while not (folder / "read").exists():
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1000))
    dist.group.WORLD.set_timeout(timedelta(seconds=1))

    def either(is_other: int) -> None:
        if is_other:
            dist.all_gather_into_tensor(whole, torch.ones(1000))
        else:
            dist.all_reduce(torch.ones(1000))

    return [*said, culprit_calls(either)]


@program
def gradient_norms() -> dict[str, list[list[float]]]:
    """DDP with taps on: by the bytes of a bucket, what torch says of its gradients before and after they are reduced,
    a row for each step: L2 norm, least and largest of both."""
    from torch.nn.parallel import DistributedDataParallel

    from optcc.observe import Tap, ask_for

    folder = Path(os.environ["OPTCC_STATUS_DIR"])
    if dist.get_rank() == 0:
        (page,) = folder.glob("*.0.page")
        ask_for(folder, page.name.partition(".")[0], [Tap.parse("norms points=input,output")])
    attached = torch.zeros(1)
    while not attached.item():
        attached = torch.tensor([float((folder / f"{page_name(folder)}.ring").exists())])
        dist.all_reduce(attached, dist.ReduceOp.MIN)
    found: dict[str, list[list[float]]] = {}

    def numbers(bucket: Any) -> list[float]:
        return [bucket.double().norm().item(), bucket.min().item(), bucket.max().item()]

    def hook(state, bucket):  # type: ignore[no-untyped-def] # torch looks at annotations
        buffer = bucket.buffer().div_(dist.get_world_size())
        row = numbers(buffer)
        found.setdefault(str(buffer.numel() * buffer.element_size()), []).append(row)

        def reduced(future: Any) -> Any:
            (own,) = future.value()
            row.extend(numbers(own))
            return own

        return dist.all_reduce(buffer, async_op=True).get_future().then(reduced)

    # One bucket in the first step, then three: DDP makes them anew once it has seen in which order gradients come.
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0002)
    model.register_comm_hook(None, hook)
    trained(model, 4)
    return found


def page_name(folder: Path) -> str:
    """The job of this process and its rank, as its files are called."""
    (page,) = folder.glob(f"*.{dist.get_rank()}.page")
    return page.stem


@program
def again() -> None:
    """A group that is destroyed and made again, in the same store."""
    for turn in range(3):
        if turn:
            dist.init_process_group("optcc")
        total = torch.ones(2)
        dist.all_reduce(total)
        assert (total == dist.get_world_size()).all()
        dist.destroy_process_group()


if __name__ == "__main__":
    name, out = sys.argv[1:3]
    backend = os.environ.get("OPTCC_TEST_BACKEND", "optcc")
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    answer = PROGRAMS[name]()
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(answer), encoding="utf-8")
    if backend == "gloo":
        # With torch 2.13 a process that has trained over Gloo is aborted at its end now and then.
        dist.barrier()
        os._exit(0)
    if dist.is_initialized():
        dist.destroy_process_group()
