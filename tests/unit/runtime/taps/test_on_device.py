"""Taps of arrays on GPUs that are not there: what is copied out is what the interpreter has, in every order that CUDA
allows, and what keeps that so is missed when it is taken away."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from optcc.plan import Plan
from optcc.runtime import device_actions
from optcc.runtime.concurrent_engines import THREAD_ENGINES
from optcc.runtime.device_streams import COMPUTE, OUT, DeviceStreams
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import make_input
from optcc.runtime.samples import exchange, ring
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.control import attach_taps
from optcc.runtime.taps.findings import check_stages
from optcc.runtime.taps.on_device import STAGINGS_MAX, StagedTaking
from optcc.runtime.taps.policy import Tap
from optcc.runtime.taps.records import ChunkRecord, take_records
from tests.unit.device_ranks import Job
from tests.unit.runtime.taps.tapped_ranks import EVERYTHING
from tests.unit.stand_in_cupy import StandIn

COUNT, N_RANKS = 301, 3
FUSED, COPIED = 1 << 18, 64
"""The longest message that one kernel takes: all, or only what is shorter than any here."""
RING_BYTES = 1 << 18
N_ORDERS = 12
TURNS_MAX = 10_000


class Case(NamedTuple):
    """How messages travel: through which memory, by kernels or by copies, in which plan."""

    direct: bool
    fused_bytes: int
    kind: str = "ring"
    window: int = 1
    reduction: str = "sum"


CASES = (
    Case(False, FUSED, reduction="avg"),
    Case(False, COPIED, window=3),
    Case(True, FUSED, reduction="avg"),
    Case(True, COPIED, window=3),
    Case(False, FUSED, "exchange"),
    Case(False, COPIED, "exchange"),
    Case(True, FUSED, "exchange"),
)


class Tapped:
    """A plan on GPUs with taps at every rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, case: Case, *taps: Tap) -> None:
        self.cupy = StandIn(0, 2)
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        monkeypatch.setattr(device_actions, "FUSED_BYTES_MAX", case.fused_bytes)
        make = ring if case.kind == "ring" else exchange
        self.plan: Plan = make(N_RANKS, 4 * COUNT, "float32", case.reduction)
        self.job = Job(self.cupy, self.plan, direct=case.direct, window=case.window)
        self.engines = [each.engine for each in self.job.plans if isinstance(each.engine, Engine)]
        self.taps: list[TapSet] = [
            attach_taps(engine, "job", None, taps or [EVERYTHING], RING_BYTES) for engine in self.engines
        ]
        self.inputs = [make_input(rank, COUNT, "float32", "sum") for rank in range(N_RANKS)]

    def start(self, seed: int) -> list[Any]:
        """Begins a run at every rank; the caller's work goes on behind it, on arrays that it overwrites."""
        cupy = self.cupy
        cupy.draw(seed)
        self.job.network.rng.seed(seed)
        handles = []
        for rank, plan in enumerate(self.job.plans):
            with cupy.cuda.Device(rank % cupy.n_devices):
                given = cupy.asarray(self.inputs[rank])
                handles.append(plan.start(given, given if seed % 2 else cupy.empty(COUNT, np.float32)))
        return handles

    def run(self, seed: int) -> None:
        """One run, whose arrays are overwritten by the caller as soon as that may be."""
        handles = self.start(seed)
        self.job.drive(handles, seed)
        for rank, handle in enumerate(handles):
            with self.cupy.cuda.Device(rank % self.cupy.n_devices):
                handle.output[:] = np.full(COUNT, 7.0, np.float32)

    def settle(self) -> list[ChunkRecord]:
        """What was taken, once the GPUs have done everything."""
        for _ in range(TURNS_MAX):
            if not any(each._staged for each in self.taps):
                break
            for engine in self.engines:
                engine.drive_once()
        return [record for taps in self.taps for record in take_records(taps, "job")]

    def n_wrong(self, seeds: Sequence[int]) -> int:
        """Chunks that are not the interpreter's, or that were not taken, over some orders."""
        wrong = 0
        for seed in seeds:
            self.run(seed)
            records = self.settle()
            wanted = sum(len(layout.specs) for taps in self.taps for layout in taps._layouts.values())
            (check,) = check_stages(self.plan, records)
            wrong += len(check.wrong) + (wanted - len(records))
        return wrong


@pytest.fixture(autouse=True)
def nothing_left_under_way() -> Iterator[None]:
    """What a test leaves under way would be driven in another one, by whoever waits there."""
    yield
    THREAD_ENGINES.running = {}


@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_the_interpreters_in_every_order(case: Case, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    tapped = Tapped(monkeypatch, case)
    assert tapped.n_wrong(range(seed, seed + N_ORDERS)) == 0
    points = {point for taps in tapped.taps for layout in taps._layouts.values() for point in layout.places}
    assert points == {"input", "sent", "arrived", "result", "output"}
    assert [taps.counters["unseen_runs"] for taps in tapped.taps] == [0] * N_RANKS
    tapped.job.give_up()


def test_condensed_chunks_are_the_interpreters(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    tap = Tap(("norms", "checksum", "guard"), points=("input", "sent", "result", "output"))
    tapped = Tapped(monkeypatch, CASES[0], tap)
    tapped.run(seed)
    records = tapped.settle()
    assert {each.what for each in records} == {"norms", "checksum", "guard"}
    # Checksums and norms cannot be computed back: the values are those of the same chunks in full.
    whole = Tapped(monkeypatch, CASES[0], Tap(("full",), points=tap.points))
    whole.run(seed)
    full = {(each.rank, each.point, each.transfer): each.value for each in whole.settle()}
    norms = [each for each in records if each.what == "norms"]
    assert len(norms) == len(full)
    for each in norms:
        chunk = full[each.rank, each.point, each.transfer]
        assert each.value.n == len(chunk)
        assert each.value.square_sum == pytest.approx(float(np.dot(chunk.astype(np.float64), chunk)), rel=1e-6)
    tapped.job.give_up()
    whole.job.give_up()


def without_order(patch: pytest.MonkeyPatch, later: int, earlier: int) -> None:
    """One stream does not wait for another any more, where taps ask for it."""
    inner = DeviceStreams.order
    patch.setattr(DeviceStreams, "order", lambda s, a, b: None if (a, b) == (later, earlier) else inner(s, a, b))


@pytest.mark.parametrize("what", ["copies behind kernels", "kernels behind copies", "what overwrites behind copies"])
def test_what_keeps_the_order_is_missed(what: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of messages that the copy engines do not carry, so that only taps use the stream OUT."""
    tapped = Tapped(monkeypatch, Case(True, FUSED))
    with monkeypatch.context() as patch:
        if what == "copies behind kernels":
            without_order(patch, OUT, COMPUTE)
        elif what == "kernels behind copies":
            without_order(patch, COMPUTE, OUT)
        else:
            patch.setattr(StagedTaking, "ending", lambda self: None)
            patch.setattr(StagedTaking, "computing", lambda self, entry: None)
        tapped.job.network.rng.seed(seed)
        assert tapped.n_wrong(range(seed, seed + 40)) > 0
    tapped.job.give_up()


def test_the_host_never_waits_for_a_copy(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Runs end while copies are under way; what has none left to use is left out and counted."""
    tapped = Tapped(monkeypatch, Case(True, FUSED), Tap(("norms",), points=("output",)))
    # The GPU passes no copy of a tap.
    monkeypatch.setattr(DeviceStreams, "after", _only_kernels)
    for number in range(STAGINGS_MAX + 2):
        tapped.run(seed + number)
    assert [len(taps._staged) for taps in tapped.taps] == [STAGINGS_MAX] * N_RANKS
    assert [taps.counters["unseen_runs"] for taps in tapped.taps] == [2] * N_RANKS
    assert [taps.counters["runs"] for taps in tapped.taps] == [STAGINGS_MAX] * N_RANKS
    tapped.job.give_up()


_after = DeviceStreams.after


def _only_kernels(streams: DeviceStreams, stream: int, go_on: Any) -> None:
    if stream != OUT:
        _after(streams, stream, go_on)


def test_what_is_under_way_is_taken_when_the_job_ends(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    tapped = Tapped(monkeypatch, CASES[0])
    tapped.run(seed)
    for engine in tapped.engines:
        engine.close()
    records = [record for taps in tapped.taps for record in take_records(taps, "job")]
    (check,) = check_stages(tapped.plan, records)
    assert not check.wrong
    assert len(records) == sum(taps.counters["records"] for taps in tapped.taps) > 0
