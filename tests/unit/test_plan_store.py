"""Plans in the cache directory: the same plan comes back, or none."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from optcc.errors import OptccError
from optcc.plan import Plan
from optcc.plan_store import FORMAT, PLANS_MAX, PlanStore, pack_plan, unpack_plan
from optcc.planner import build_plan
from optcc.topology import Topology


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    topology = Topology.parse("4@1GB/s,2=500MB/s")
    names = ("ring", "optcc", "direct", "ring-all-gather", "chain-reduce", "direct-all-to-all-v")
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
    assert not store.has("a")
    store.put("a", plans[0])
    assert store.has("a") and not store.has("b")
    (path,) = store.directory.glob("*.plan")
    whole = path.read_bytes()
    for data in (
        b"",
        b"no zip",
        whole[:100],
        whole[: len(whole) // 2],
        whole.replace(FORMAT.encode(), b"x" * len(FORMAT)),
    ):
        path.write_bytes(data)
        assert store.get("a", plans[0].request) is None
    n_found = 0
    for at in range(0, len(whole), max(1, len(whole) // 200)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        found = store.get("a", plans[0].request)
        n_found += found is not None
    assert n_found == 0
    path.write_bytes(whole)
    found = store.get("a", plans[0].request)
    assert found is not None and found.digest == plans[0].digest and store.get("b", plans[0].request) is None


def test_the_oldest_give_way(plans: list[Plan], tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    for number in range(PLANS_MAX + 5):
        store.put(str(number), plans[0])
        os.utime(store._path(str(number), ".plan"), (number, number))
    store.put("last", plans[0])
    assert len(list(store.directory.glob("*.plan"))) == PLANS_MAX
    assert store.get("0", plans[0].request) is None and store.get("last", plans[0].request) is not None


def test_a_store_that_cannot_be_written_forgets(plans: list[Plan], tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    store = PlanStore(tmp_path)
    store.put("a", plans[0])
    with store.alone("a"):
        assert store.get("a", plans[0].request) is None


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


def test_what_is_no_plan_is_refused(plans: list[Plan]) -> None:
    whole = pack_plan(plans[0])
    for data in (b"", whole[:-8], whole + bytes(8), whole[:8] + b"[]" + whole[10:], b"\xff" * 100, whole[:100]):
        with pytest.raises((ValueError, KeyError, TypeError, OptccError)):
            unpack_plan(data)


def test_a_file_serves_its_own_key_request_and_user_alone(
    plans: list[Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of this user in each other's place, of another user, with another digest, and for something else."""
    store, plan, other = PlanStore(tmp_path), plans[0], plans[2]
    store.put("a", plan)
    store.put("b", other)
    a, b = (store._path(key, ".plan") for key in "ab")
    kept = a.read_bytes(), b.read_bytes()
    a.write_bytes(kept[1])
    assert store.get("a", plan.request) is None
    a.write_bytes(kept[0][:32] + bytes.fromhex(other.digest) + kept[0][64:])
    assert store.get("a", plan.request) is None
    a.write_bytes(kept[0])
    assert store.get("a", plan.request._replace(reduction="max")) is None
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    PlanStore(stranger).put("a", other)
    a.write_bytes(PlanStore(stranger)._path("a", ".plan").read_bytes())
    assert store.get("a", plan.request) is None
    assert len(caplog.messages) == 4 and all("the plan is made again" in line for line in caplog.messages)
    a.write_bytes(kept[0])
    found = store.get("a", plan.request)
    assert found is not None and found.digest == found.compute_digest() == plan.digest


def test_a_stored_plan_cannot_be_changed(plans: list[Plan], tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.put("a", plans[0])
    found = store.get("a", plans[0].request)
    assert found is not None
    for each in (found.dst_offset, found.lanes.values, found.transfers.src):
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            each.setflags(write=True)
