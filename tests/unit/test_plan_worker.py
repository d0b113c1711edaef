"""Plans made by a process beside, for NICs that carry other rates."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from optcc import planner as planning
from optcc.collective import Collective
from optcc.errors import TopologyError
from optcc.plan import Plan, PlanRequest
from optcc.plan_process import NICENESS, serve
from optcc.plan_worker import PlanWorker
from optcc.planner import Planner
from optcc.runtime.protocol.agreement import Shares
from optcc.topology import Nic, Pod, Server, Topology
from optcc.verdict import Verdict
from optcc.verify.plan import verify_plan

WANTED = PlanRequest(Collective("allreduce", 4), 1 << 20, "float32", "sum")
HALF = (((1.0, 1.0),), ((0.5, 0.5),), ((1.0, 1.0),), ((1.0, 1.0),))
DONE_S = 60.0


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PlanWorker]:
    """A process of this test's own, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    worker = PlanWorker()
    monkeypatch.setattr(planning, "WORKER", worker)
    yield worker
    worker.close()


def wait(planner: Planner, shares: Shares, wanted: list[PlanRequest]) -> None:
    is_there = planner.prepare(shares, wanted)
    until_s = time.monotonic() + DONE_S
    while not is_there():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_plans_are_there_when_they_are_said_to_be(worker: PlanWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(Topology.parse("4@100MB/s"), schedules={"allreduce": "shares"}, segments=4)
    expected = Planner(Topology.parse("4@100MB/s,1=50MB/s"), schedules={"allreduce": "shares"}, segments=4)(*WANTED)
    others = [WANTED._replace(size_bytes=1 << 16), PlanRequest(Collective("broadcast", 4, 2), 4096, "int32", "sum")]
    # However quickly they are made: another rank of this machine would have to make them again.
    wait(planner, HALF, [WANTED, *others])
    monkeypatch.setattr(planning, "build", _refuse)
    plan, verdict = planner.under(HALF)(*WANTED)
    assert plan.digest == expected[0].digest and verdict == expected[1]
    assert planner.under(HALF)(*others[1])[0].collective.root == 2


def test_what_was_stored_is_not_made_again(worker: PlanWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(Topology.parse("4@100MB/s"), schedules={"allreduce": "shares"}, segments=4)
    monkeypatch.setattr(planning, "WORTH_STORING_S", 0.0)
    first = planner.under(HALF)(*WANTED)[0]
    monkeypatch.setattr(planning, "build", _refuse)
    again = Planner(Topology.parse("4@100MB/s"), schedules={"allreduce": "shares"}, segments=4)
    wait(again, HALF, [WANTED])
    assert worker._process is None
    assert again.under(HALF)(*WANTED)[0].digest == first.digest
    other = Planner(Topology.parse("4@100MB/s"), schedules={"allreduce": "shares"}, segments=5)
    with pytest.raises(AssertionError, match="made again"):
        other.under(HALF)(*WANTED)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("made again")


@pytest.mark.parametrize("n_nics", [1, 2])
def test_the_process_begins_with_a_plan_for_a_loss(
    n_nics: int, worker: PlanWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server's second NIC, or, where all have one, of half of its rate."""
    nics = tuple(Nic(rail, Fraction(10**8), Fraction(10**8)) for rail in range(n_nics))
    topology = Topology(tuple(Server(f"h{number}", 1, nics) for number in range(4)))
    planner = Planner(topology, schedules={"allreduce": "shares"}, segments=4)
    planner.get_ready(WANTED)
    lost = ((1.0, 1.0), (0.0, 0.0)) if n_nics == 2 else ((0.5, 0.5),)
    under = planner.under((lost, *[((1.0, 1.0),) * n_nics] * 3))
    until_s = time.monotonic() + DONE_S
    assert under._store is not None
    while under._store.get(under._key(WANTED), WANTED) is None:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    # It does all the work of it, though another job may have stored the plan.
    digest, proved = under(*WANTED)[0].digest, list[str]()

    def note(plan: Plan) -> Verdict:
        proved.append(plan.digest)
        return verify_plan(plan)

    monkeypatch.setattr(planning, "verify_plan", note)
    monkeypatch.setattr(planning, "load_at_once", lambda: proved.append("with all loaded"))
    planning.make_plans(under._work([WANTED]))
    assert not proved
    planning.make_plans(under._work([WANTED], is_anew=True))
    assert proved == ["with all loaded", digest]
    # It replies to what is asked for now, not to what it began with.
    assert worker.make(planner._work([WANTED]))


def test_who_has_no_process_waits_for_a_plan_until_another_rank_has_stored_it(
    worker: PlanWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on at once then; if none comes, it makes the plan itself."""
    topology = Topology.parse("4@100MB/s")
    planner, other = (Planner(topology, schedules={"allreduce": "shares"}, segments=4) for _ in range(2))
    monkeypatch.setattr(planning, "_YIELD_S", DONE_S)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            planning.make_plans(other.under(HALF)._work([WANTED]))

    monkeypatch.setattr(time, "sleep", sleep)
    planner.under(HALF)._make_ready([WANTED])
    assert looks == [planning._LOOK_S] * 3 and not worker.is_there
    monkeypatch.setattr(planning, "_YIELD_S", 0.0)
    planner.under(HALF)._make_ready([WANTED._replace(size_bytes=1 << 16)])
    assert worker.is_there and len(looks) == 3


def test_the_process_leaves_processors_to_traffic(worker: PlanWorker) -> None:
    work = Planner(Topology.parse("3@1GB/s"), schedules={"allreduce": "ring"})._work([WANTED])
    assert worker.make(work)
    assert worker._process is not None
    assert os.getpriority(os.PRIO_PROCESS, worker._process.pid) == min(19, os.nice(0) + NICENESS)


def test_a_process_that_ends_is_replaced(worker: PlanWorker) -> None:
    work = Planner(Topology.parse("3@1GB/s"), schedules={"allreduce": "ring"})._work([WANTED])
    assert worker.make(work)
    process = worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert worker.make(work) and worker._process is not process


def test_the_process_goes_on_after_what_cannot_be_made() -> None:
    done: list[bytes] = []

    def do(line: bytes) -> None:
        if b"wrong" in line:
            raise ValueError(line)
        done.append(line)

    replies = io.BytesIO()
    serve(io.BytesIO(b"one\nwrong\n quiet\nthree\n"), replies, do)
    assert done == [b"one\n", b" quiet\n", b"three\n"] and replies.getvalue() == b"..."


def test_what_is_asked_for_arrives_as_it_is(worker: PlanWorker) -> None:
    """Rates are fractions, and a topology has pods, failed NICs and costs."""
    nics = (Nic(0, Fraction(10**8, 3), Fraction(1, 7)), Nic(1, Fraction(5), Fraction(6), failed=True))
    servers = tuple(Server(f"h{number}", 1, nics) for number in range(4))
    pods = (Pod("p", (0, 1), Fraction(3), Fraction(4, 9)),)
    topology = Topology(servers, pods=pods, latency_s=Fraction(1, 10**5), overhead_s=Fraction(1, 3 * 10**6))
    planner = Planner(topology, schedules={"allreduce": "ring"}, slots=3, ports="fair", segments=7, by_rail=True)
    heard = msgspec.json.decode(planner._work([WANTED]), type=planning._Work, dec_hook=lambda kind, text: kind(text))
    assert heard.topology == topology and heard.requests == [WANTED]
    options = {name: getattr(heard.options, name) for name in ("schedules", "slots", "ports", "segments", "by_rail")}
    again = Planner(heard.topology, **options)
    assert again._key(WANTED) == planner._key(WANTED)


def test_without_a_cache_plans_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", "/proc/nowhere")
    planner = Planner(Topology.parse("4@100MB/s"), schedules={"allreduce": "ring"})
    wait(planner, HALF, [WANTED])
    assert planner.under(HALF)(*WANTED)[0].name == "ring"


def test_a_server_that_is_cut_off_has_no_plan() -> None:
    planner = Planner(Topology.parse("2@100MB/s"))
    gone = (((1.0, 1.0),), ((0.0, 0.0),))
    with pytest.raises(TopologyError):
        planner.under(gone)
    assert planner.prepare(gone, [WANTED])()
