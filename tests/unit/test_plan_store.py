"""Plans in the cache directory: the same plan comes back, or none."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from optcc.errors import OptccError
from optcc.plan import Plan
from optcc.plan_store import PLANS_MAX, PlanStore, pack_plan, unpack_plan
from optcc.planner import build_plan
from optcc.topology import Topology


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    topology = Topology.parse("4@1GB/s,2=500MB/s")
    names = ("ring", "optcc", "direct", "ring-all-gather", "chain-reduce")
    return [build_plan(name, topology, 1 << 16, ports="fair", segments=4) for name in names]


def test_a_plan_comes_back_as_it_was(plans: list[Plan]) -> None:
    for plan in plans:
        again = unpack_plan(pack_plan(plan))
        assert again.digest == plan.digest and again.name == plan.name and again.ports == plan.ports
        assert again.transfers.stages == plan.transfers.stages and again.channels == plan.channels
        assert (again.transfers.segment == plan.transfers.segment).all()
        assert again.transfers.order.values.tolist() == plan.transfers.order.values.tolist()


def test_what_is_damaged_is_no_plan(plans: list[Plan], tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.put("a", plans[0])
    (path,) = store.directory.glob("*.npz")
    whole = path.read_bytes()
    for data in (
        b"",
        b"no zip",
        whole[:100],
        whole[: len(whole) // 2],
        whole.replace(b"optcc-plan-columns/1", b"x" * 20),
    ):
        path.write_bytes(data)
        assert store.get("a") is None
    n_found = 0
    for at in range(0, len(whole), max(1, len(whole) // 200)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        found = store.get("a")
        n_found += found is not None
        assert found is None or found.digest == plans[0].digest
    assert n_found < 150
    path.write_bytes(whole)
    found = store.get("a")
    assert found is not None and found.digest == plans[0].digest and store.get("b") is None


def test_the_oldest_give_way(plans: list[Plan], tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    for number in range(PLANS_MAX + 5):
        store.put(str(number), plans[3])
        os.utime(store._path(str(number), ".npz"), (number, number))
    store.put("last", plans[0])
    assert len(list(store.directory.glob("*.npz"))) == PLANS_MAX
    assert store.get("0") is None and store.get("last") is not None


def test_a_store_that_cannot_be_written_forgets(plans: list[Plan], tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    store = PlanStore(tmp_path)
    store.put("a", plans[0])
    with store.alone("a"):
        assert store.get("a") is None


def test_one_at_a_time_makes_a_plan(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    inside: list[int] = []
    seen: list[int] = []

    def make(number: int) -> None:
        with store.alone("key"):
            inside.append(number)
            seen.append(len(inside))
            threading.Event().wait(0.02)
            inside.remove(number)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [1] * 5


def test_no_pickle_is_read(tmp_path: Path, plans: list[Plan]) -> None:
    import numpy as np

    file = tmp_path / "x.npz"
    np.savez(file, head=np.array([{"format": "x"}], dtype=object))
    with pytest.raises((ValueError, KeyError, OptccError)):
        unpack_plan(file.read_bytes())
