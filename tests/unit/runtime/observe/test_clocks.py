"""Clocks that are wrong by seconds are aligned to within what the messages allow."""

from __future__ import annotations

import random

import msgspec
import numpy as np

from optcc.runtime.communicator import Communicator
from optcc.runtime.observe.clocks import HappenedBefore, align
from optcc.runtime.observe.merged import MergedDumps
from optcc.runtime.transports.sim import SimTransport
from tests.unit.runtime.observe.observed_ranks import fly


def test_offsets_keep_every_order() -> None:
    """Ten rings of messages one way, and nothing but the ends of collectives the other way."""
    rng = random.Random(5)
    offsets = [0.0, 3.0, -50.0, 1e4]
    hosts = {rank: str(rank) for rank in range(4)}
    orders = []
    for turn in range(10):
        for src in range(4):
            dst, at_s = (src + 1) % 4, turn + rng.random()
            arrived_s = at_s + 1e-3 + rng.random() * 1e-2
            orders.append(HappenedBefore(src, at_s - offsets[src], dst, arrived_s - offsets[dst]))
    found = align(range(4), orders, hosts)
    for rank in range(4):
        assert abs(found[rank].offset_s - offsets[rank]) <= found[rank].within_s + 1e-9
        assert found[rank].within_s < 0.03
    for each in orders:
        assert each.before_s + found[each.before].offset_s <= each.after_s + found[each.after].offset_s + 1e-9


def test_ranks_of_one_host_share_a_clock() -> None:
    found = align([0, 1], [HappenedBefore(0, 5.0, 1, 1.0)], {0: "a", 1: "a"})
    assert found[1] == (0.0, 0.0)


def test_what_is_not_known_is_said() -> None:
    apart = align([0, 1], [HappenedBefore(0, 0.0, 1, 3.0)], {0: "a", 1: "b"})
    assert apart[1].within_s == np.inf
    torn = align([0, 1], [HappenedBefore(0, 0.0, 1, -5.0), HappenedBefore(1, 0.0, 0, 1.0)], {0: "a", 1: "b"})
    assert torn[1] == (0.0, np.inf)


def test_dumps_of_hosts_with_other_clocks_are_merged() -> None:
    """Simulated ranks share one clock: what is added to those of two of them is found again."""

    def program(comm: Communicator, transport: SimTransport) -> None:
        for _ in range(3):
            comm.all_reduce(np.ones(50_000, np.float32))

    dumps = fly(program)
    wrong = {0: 0.0, 1: 100.0, 2: -7.5, 3: 0.25}
    changed = []
    for dump in dumps:
        identity = msgspec.structs.replace(dump.identity, boot=f"host {dump.rank}")
        records = tuple(each._replace(at_s=each.at_s + wrong[dump.rank]) for each in dump.records)
        changed.append(msgspec.structs.replace(dump, identity=identity, records=records))
    merged = MergedDumps(changed)
    for rank, seconds in wrong.items():
        assert abs(merged.clocks[rank].offset_s + seconds) <= merged.clocks[rank].within_s
    assert merged.within_s < 1e-3
