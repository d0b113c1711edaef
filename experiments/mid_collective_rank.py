"""A rank of `mid_collective`: reduces as often as rank 0 is told to, over a socket, and says how long it took."""

from __future__ import annotations

import json
import math
import socket
import time
from typing import IO

import click
import numpy as np

from optcc.cli import main
from optcc.errors import EXIT_DONE
from optcc.job import init
from optcc.runtime.communicator import Communicator
from optcc.runtime.slices import SLICE_S

_DEADLINE_S = 120.0


def serve(comm: Communicator, size_bytes: int, channel: IO[str] | None) -> None:
    """Runs until rank 0, which has the channel, is told to end, or that is closed."""
    array = np.full(size_bytes // 4, comm.rank + 1, np.float32)
    out, go, wrong = np.empty_like(array), np.zeros(1, np.int64), np.zeros(1, np.int64)
    total = sum(range(1, comm.n_ranks + 1))
    while True:
        if channel is not None:
            line = channel.readline()
            go[0] = bool(line) and json.loads(line)["run"]
        comm.broadcast(go)
        if not go[0]:
            return
        epoch, began_s = comm.epoch, time.monotonic()
        comm.all_reduce(array, out=out)
        seconds = time.monotonic() - began_s
        wrong[0] = np.count_nonzero(out != total)
        out[:] = 0
        comm.all_reduce(wrong, out=wrong)
        if channel is not None:
            told = {"seconds": seconds, "wrong": int(wrong[0]), "epochs": comm.epoch - epoch}
            channel.write(json.dumps(told) + "\n")
            channel.flush()


@click.command()
@click.argument("path")
@click.argument("size_bytes", type=int)
@click.argument("arm")
def command(path: str, size_bytes: int, arm: str) -> int:
    """Be a rank; rank 0 is told what to do over the socket at PATH."""
    with init(deadline_s=_DEADLINE_S, slice_s=SLICE_S if arm == "slices" else math.inf) as comm:
        if comm.rank:
            serve(comm, size_bytes, None)
            return EXIT_DONE
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(path)
            with wire.makefile("rw", encoding="utf-8") as channel:
                serve(comm, size_bytes, channel)
    return EXIT_DONE


if __name__ == "__main__":
    main(command=command)
