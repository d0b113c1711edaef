"""A rank of `training_failures`: trains a small GPT on text from a seed, with DDP or FSDP2, and says a line a step.

Standard input is a socket: the first line that comes is the `RankSetup`, and what the rank says goes out over it. torch
is imported when a rank starts, and by nothing else here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from fractions import Fraction
from typing import IO, Any

import click
import msgspec

from optcc.cli import main
from optcc.errors import EXIT_DONE
from optcc.servers import Nic, Server
from optcc.topology import Topology
from optcc.units import parse_rate

LETTERS = "abcdefghijklmnopqrstuvwxyz "
WORDS, FOLLOWERS, TEXT_LENGTH = 400, 3, 200_000
MESSAGE_S = Fraction(2, 10_000)
"""What a message costs besides its bytes, where it is declared and not measured."""


class GptShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer over the letters of `LETTERS`, in float32."""

    width: int
    layers: int
    heads: int
    context: int


class RankSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is told: which one it is, how it meets the others, and what it trains.

    `plans` is "change" (as `init_process_group("optcc")` does by itself), "stay" (declared rates, and the same plans
    whatever happens), "order" (plans change, and sums have the order of the ranks) or empty for another backend.
    """

    rank: int
    ranks: int
    store: str
    backend: str
    plans: str
    wrap: str
    gpt: GptShape
    steps: int
    sequences: int
    bucket_bytes: int
    seed: int
    timeout_s: float
    nics: int
    nic_rate: str


def make_text(seed: int, length: int = TEXT_LENGTH) -> str:
    """So many letters: words in which each is followed by one of a few, so that there is something to learn.

    >>> make_text(1, 20) == make_text(1, 20), len(set(make_text(1))) == len(LETTERS)
    (True, True)
    """
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS[:-1], k=draw.randint(2, 9))) for _ in range(WORDS)]
    follows = [draw.choices(range(WORDS), k=FOLLOWERS) for _ in words]
    parts, place, total = [], 0, 0
    while total < length:
        parts.append(words[place])
        total += len(words[place]) + 1
        place = draw.choice(follows[place])
    return " ".join(parts)[:length]


def make_gpt(shape: GptShape) -> Any:
    """The model: takes (sequences, context) letters, and gives the logits of each next one."""
    import torch
    from torch import nn

    class Gpt(nn.Module):  # type: ignore[misc] # torch is Any
        """Embeddings, blocks with the norm first, and a head of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(len(LETTERS), shape.width)
            self.places = nn.Embedding(shape.context, shape.width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    shape.width, shape.heads, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(shape.layers)
            )
            self.head = nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, len(LETTERS)))
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.context))

        def forward(self, letters: Any) -> Any:
            hidden = self.letters(letters) + self.places(torch.arange(letters.shape[1]))
            for block in self.blocks:
                hidden = block(hidden, src_mask=self.mask, is_causal=True)
            return self.head(hidden)

    return Gpt()


class _Flight:
    """How many buckets a step has, and the most that were under way at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started = self.now = self.most = 0
        self.bytes = 0

    def begin(self, n_bytes: int) -> None:
        with self._lock:
            self.started, self.now, self.bytes = self.started + 1, self.now + 1, self.bytes + n_bytes
            self.most = max(self.most, self.now)

    def end(self, future: Any) -> Any:
        with self._lock:
            self.now -= 1
        return future.value()[0]


def mean_bucket(flight, bucket):  # type: ignore[no-untyped-def] # torch looks at annotations
    """DDP's own hook, counted: the mean of a bucket of gradients over all ranks."""
    import torch.distributed as dist

    buffer = bucket.buffer()
    flight.begin(buffer.numel() * buffer.element_size())
    buffer.div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(flight.end)


def declared_topology(setup: RankSetup) -> Topology:
    """Equal hosts of so many NICs, each a rail."""
    rate = parse_rate(setup.nic_rate)
    nics = tuple(Nic(rail, rate, rate) for rail in range(setup.nics))
    servers = tuple(Server(f"h{number}", 1, nics) for number in range(setup.ranks))
    return Topology(servers, overhead_s=MESSAGE_S)


def _join(setup: RankSetup) -> None:
    import torch.distributed as dist

    options = None
    if setup.backend == "optcc":
        import optcc.torch
        from optcc.planner import RANK_ORDER
        from optcc.torch.connect import Options

        optcc.torch.register()
        ways = {
            "stay": Options(declared_topology(setup), measure=False, replan=False),
            "order": Options(schedules=RANK_ORDER),
        }
        options = ways.get(setup.plans, Options())
    dist.init_process_group(
        setup.backend,
        init_method=setup.store,
        rank=setup.rank,
        world_size=setup.ranks,
        timeout=timedelta(seconds=setup.timeout_s),
        pg_options=options,
    )


def _wrapped(setup: RankSetup, gpt: Any, flight: _Flight) -> Any:
    if setup.wrap == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (setup.ranks,))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
        return gpt
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(gpt, bucket_cap_mb=setup.bucket_bytes / 2**20)
    wrapped.register_comm_hook(flight, mean_bucket)
    return wrapped


def _digest(model: Any) -> str:
    """SHA-256 over this rank's part of all parameters."""
    found = hashlib.sha256()
    for each in model.parameters():
        own = each.to_local() if hasattr(each, "to_local") else each
        found.update(own.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(setup: RankSetup, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Trains, and says of each step its loss and its seconds; at the end what is left: the digest of the parameters."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(setup.seed)
    text = torch.tensor([LETTERS.index(letter) for letter in make_text(setup.seed)])
    _join(setup)
    gpt, flight = make_gpt(setup.gpt), _Flight()
    parameters = sum(each.numel() for each in gpt.parameters())
    model = _wrapped(setup, gpt, flight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    say({"parameters": parameters})
    window = torch.arange(setup.gpt.context + 1)
    began_s = time.monotonic()
    for step in range(setup.steps):
        flight.started = flight.most = flight.bytes = 0
        draw = torch.Generator().manual_seed((setup.seed * 100_000 + step) * setup.ranks + setup.rank)
        starts = torch.randint(len(text) - len(window), (setup.sequences, 1), generator=draw)
        letters = text[starts + window]
        optimizer.zero_grad()
        loss = cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        ended_s = time.monotonic()
        row = {"step": step, "loss": loss.item(), "seconds": ended_s - began_s}
        say(row | {"buckets": flight.started, "in_flight": flight.most, "bytes": flight.bytes})
        began_s = ended_s
    say({"parameters_sha256": _digest(model)})
    dist.destroy_process_group()


class _Notes(logging.Handler):
    """What the run-time says of NICs and plans, kept for the next line."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it."""
        self._notes.append(record.getMessage())

    def take(self) -> list[str]:
        """What has come since the last call."""
        self.acquire()
        taken, self._notes = self._notes, []
        self.release()
        return taken


def _run(channel: IO[str]) -> None:
    setup = msgspec.json.decode(channel.readline(), type=RankSetup)
    notes = _Notes()
    logger = logging.getLogger("optcc.nics")
    logger.addHandler(notes)
    logger.propagate = False

    def say(value: Mapping[str, Any]) -> None:
        channel.write(json.dumps({**value, "notes": notes.take()}) + "\n")
        channel.flush()

    try:
        train(setup, say)
    except Exception as error:  # whatever a backend raises is the result
        say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        # A backend that has failed may wait for ever in what runs at exit.
        os._exit(1)


@click.command()
def command() -> int:
    """Be a rank; what it needs to know comes by standard input."""
    with socket.socket(fileno=os.dup(0)) as wire, wire.makefile("rw", encoding="utf-8") as channel:
        _run(channel)
    return EXIT_DONE


if __name__ == "__main__":
    main(command=command)
