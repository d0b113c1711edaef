"""A rank of `reducing_job`: reduces as often as rank 0 is told to, over a socket, and says how long it took."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import click
import numpy as np

from optcc.cli import main
from optcc.errors import EXIT_DONE
from optcc.experiments.reducing_job import PEER, SLICES, WHOLE
from optcc.job import init
from optcc.runtime.slices import SLICE_S

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Reducer:
    """What the ranks reduce with: an AllReduce from one array to another, a broadcast of rank 0's, and the epoch of
    the plans."""

    rank: int
    n_ranks: int
    all_reduce: Callable[[Any, Any], object]
    broadcast: Callable[[Any], object]
    epoch: Callable[[], int]


@contextmanager
def reducer_of(way: str) -> Iterator[Reducer]:
    """The one that is asked for; collective."""
    if way == PEER:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        yield Reducer(world.rank, world.size, world.Allreduce, world.Bcast, lambda: 0)
        return
    with init(deadline_s=_DEADLINE_S, slice_s=SLICE_S if way == SLICES else math.inf) as comm:
        yield Reducer(
            *(comm.rank, comm.n_ranks),
            all_reduce=lambda array, out: comm.all_reduce(array, out=out),
            broadcast=comm.broadcast,
            epoch=lambda: comm.epoch,
        )


def differ(count: int, total: int, squares: int) -> bool:
    """Whether so many numbers are not all the same, by their sum and that of their squares.

    >>> differ(3, 2 + 2 + 2, 4 + 4 + 4), differ(3, 1 + 2 + 3, 1 + 4 + 9), differ(2, 0 + 1, 0 + 1)
    (False, True, True)
    """
    return count * squares != total * total


def serve(reducer: Reducer, size_bytes: int, channel: IO[str] | None) -> None:
    """Runs until rank 0, which has the channel, is told to end, or that is closed."""
    array = np.full(size_bytes // 4, reducer.rank + 1, np.float32)
    out, go, told_by_all = np.empty_like(array), np.zeros(1, np.int64), np.zeros(3, np.int64)
    told_here = np.zeros(3, np.int64)
    total = sum(range(1, reducer.n_ranks + 1))
    # At the end of the last run: plans change before what is told between runs, too.
    epoch = reducer.epoch()
    while True:
        if channel is not None:
            line = channel.readline()
            go[0] = bool(line) and json.loads(line)["run"]
        reducer.broadcast(go)
        if not go[0]:
            return
        began_s = time.monotonic()
        reducer.all_reduce(array, out)
        seconds = time.monotonic() - began_s
        now = reducer.epoch()
        told_here[:] = np.count_nonzero(out != total), now, now * now
        out[:] = 0
        reducer.all_reduce(told_here, told_by_all)
        if channel is not None:
            wrong, epochs, squares = map(int, told_by_all)
            is_split = differ(reducer.n_ranks, epochs, squares)
            told = {"seconds": seconds, "wrong": wrong, "epochs": now - epoch, "is_split": is_split}
            epoch = now
            channel.write(json.dumps(told) + "\n")
            channel.flush()


@click.command()
@click.argument("path")
@click.argument("size_bytes", type=int)
@click.argument("way", type=click.Choice([SLICES, WHOLE, PEER]))
def command(path: str, size_bytes: int, way: str) -> int:
    """Be a rank; rank 0 is told what to do over the socket at PATH."""
    with reducer_of(way) as reducer:
        if reducer.rank:
            serve(reducer, size_bytes, None)
            return EXIT_DONE
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(path)
            with wire.makefile("rw", encoding="utf-8") as channel:
                serve(reducer, size_bytes, channel)
    return EXIT_DONE


if __name__ == "__main__":
    main(command=command)
