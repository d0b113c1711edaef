"""Kernels: the same results in plain Python and compiled, whichever is cheaper, and one compiled version of each."""

from __future__ import annotations

import builtins
import importlib
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from optcc import compile_kernels
from optcc import compiled as compiled_module
from optcc.arrays import Column
from optcc.compiled import Tier, _is_cached, compiled, compiled_at_once, load_at_once, row
from optcc.compiler import compile_schedule, plan_transfers
from optcc.faults import FaultPlan
from optcc.planner import build
from optcc.schedules.ring import ring
from optcc.simulate import MODELS, simulate
from optcc.topology import Topology
from optcc.verify.plan.report import Questions, judge
from optcc.verify.plan.timing import exact_makespan
from optcc.verify.plan.translation import check_translation
from tests.negative.edits import Draft

PLAIN, COMPILED = (math.inf, math.inf), (-1.0, -1.0)


def _next(number: int, step: int) -> int:
    return number + step


def _walk(steps: Column) -> int:
    now = 0
    for step in steps:
        now = _next(now, step)
    return _next(_next(now, 1), 2)


class Kinds(NamedTuple):
    """Arrays of several types."""

    small: Any
    real: Any
    true: Any


def _gather(kinds: Kinds, table: Any, out: Column) -> float:
    """Reads and writes each type; the row of a table is a view of it."""
    line = row(table, 1)
    for at in range(len(line)):
        line[at] += at
        kinds.true[at] = line[at] > 4
        kinds.real[at] = kinds.real[at] / 3
        kinds.small[at] = -kinds.small[at]
        out[0] += line[at] * kinds.small[at]
    return float(kinds.real[2] * 0.1)


def _return_argument(values: Column) -> Column:
    return values


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[float, float]], None]]:
    """A function that decides how all kernels run; they are looked up anew each time."""

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("optcc."):
                for made in (getattr(module, "_kernels", None), getattr(module, "kernels", None)):
                    getattr(made, "cache_clear", int)()

    def use(limits: tuple[float, float]) -> None:
        forget()
        monkeypatch.setattr("optcc.compiled.tier", Tier(*limits))

    yield use
    forget()


@pytest.mark.parametrize("name", ["ring", "optcc", "optimal", "double-binary-tree", "stragglar"])
def test_plain_python_and_numba_give_the_same_bytes(name: str, tiers: Callable[[tuple[float, float]], None]) -> None:
    """Plans by their digests, verdicts, and every time of every transfer on every kind of ports."""
    topology = Topology.parse("4@50GB/s,3=25GB/s")
    seen = []
    for limits in (PLAIN, COMPILED):
        tiers(limits)
        found: list[object] = []
        for model in MODELS:
            built = build(name, topology, 100_000, segments=3, ports=model)
            timing = simulate(built.plan, topology, model=model)
            verdict = judge(built.plan, Questions(built.schedule)).verdict
            times = (timing.start_s, timing.sent_s, timing.taken_s, timing.end_s)
            found.append((built.plan.digest, verdict.properties, timing.critical, [each.tobytes() for each in times]))
        seen.append(found)
    assert seen[0] == seen[1]


def _everything() -> list[object]:
    """What every kernel is called for: plans that are made, verified, simulated on all ports, with faults, timed."""
    slow, pods = Topology.parse("4@50GB/s,3=25GB/s"), Topology.parse("8@1GB/s/4:2")
    rails = Topology.parse("4x2@50GB/s,3=1/2")
    found: list[object] = []
    for name, topology in (("optimal", slow), ("ring", pods), ("ring", slow), ("hierarchical", rails)):
        for ports in MODELS:
            built = build(name, topology, 100_000, segments=2, ports=ports)
            plan = built.plan
            faults = FaultPlan.parse("1/0@1us..3us=1/2") if topology is not pods else None
            for timing in (
                simulate(plan, topology, model=ports),
                simulate(plan_transfers(plan), topology, model=ports),
                simulate(plan, topology, model=ports, faults=faults),
            ):
                found += [timing.end_s.tobytes(), timing.start_s.tobytes(), timing.critical]
            found += [plan.digest, judge(plan, Questions(built.schedule)).verdict.properties]
            if ports != "fair" and topology is slow:
                found.append(exact_makespan(plan, topology, model=ports).seconds)
    draft = Draft.of(compile_schedule(ring(n_ranks=4), size_bytes=400, fused=False))
    next(instruction for instruction in draft.rows if instruction.after).after.clear()
    found.append(str(check_translation(ring(n_ranks=4), draft.build())))
    return found


def test_every_kernel_runs_in_plain_python(
    tiers: Callable[[tuple[float, float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On memoryviews, which lack what arrays can do as a whole; and gives what the compiled ones give."""
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("optcc", "schedules", "verify")
        for path in (Path(__file__).parents[2] / folder).rglob("*.py")
        if path.name != "static_order.py"  # it compiles at once
    )
    called = set(re.findall(r"kernels\(\)\.(\w+)\(", source))
    assert len(called) > 25
    tiers(PLAIN)
    ran: set[str] = set()
    run = Tier.run

    def record(tier: Tier, kernel: Any, rows: int, arguments: tuple[Any, ...]) -> Any:
        ran.add(kernel.__name__.removeprefix("_"))
        return run(tier, kernel, rows, arguments)

    monkeypatch.setattr(Tier, "run", record)
    plain = _everything()
    assert called - ran == set()
    tiers(COMPILED)
    assert _everything() == plain


def test_the_step_that_fills_the_cache_calls_what_commands_call(
    tiers: Callable[[tuple[float, float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making plans, proving and simulating them; but for mistakes, and transfers with constraints of their own."""
    called: set[tuple[str, str]] = set()
    run = Tier.run

    def record(tier: Tier, kernel: Any, rows: int, arguments: tuple[Any, ...]) -> Any:
        called.add((kernel.__module__, kernel.__name__))
        return run(tier, kernel, rows, arguments)

    monkeypatch.setattr(Tier, "run", record)
    monkeypatch.setattr("optcc.compile_kernels.compile_always", lambda: None)
    tiers(PLAIN)
    compile_kernels.main()
    filled = set(called)
    called.clear()
    tiers(PLAIN)
    _everything()
    assert {name for _, name in called - filled} <= {"_walk_back", "count_constraints", "list_constraints"}
    assert ("optcc.passes.list_schedule", "_run_fifo") in filled


@pytest.mark.parametrize("limits", [PLAIN, COMPILED])
def test_arrays_of_every_type_are_read_and_written(
    limits: tuple[float, float], tiers: Callable[[tuple[float, float]], None]
) -> None:
    tiers(limits)
    kinds = Kinds(np.array([1, 2, 3], dtype=np.int32), np.array([1.0, 2.0, 5.0]), np.zeros(3, dtype=bool))
    table, out = np.arange(6).reshape(2, 3), np.zeros(1, dtype=np.int64)
    assert compiled((_gather,), globals()).gather(kinds, table, out) == 5.0 / 3 * 0.1
    assert kinds.small.tolist() == [-1, -2, -3]
    assert kinds.real.tolist() == [1 / 3, 2 / 3, 5 / 3]
    assert kinds.true.tolist() == [False, True, True]
    assert (table.tolist(), out.tolist()) == ([[0, 1, 2], [3, 5, 7]], [-34])


def test_an_array_comes_back_as_one(tiers: Callable[[tuple[float, float]], None]) -> None:
    tiers(PLAIN)
    values = np.arange(3)
    returned = compiled((_return_argument,), globals()).return_argument(values)
    assert isinstance(returned, np.ndarray) and np.shares_memory(returned, values)


def test_a_process_compiles_once_it_has_spent_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in the cache are loaded early, others compiled late; a call with many rows never is plain Python."""
    clock = iter(range(100))
    monkeypatch.setattr("optcc.compiled.time.thread_time", lambda: next(clock))  # each run takes a second
    for cached, calls in ((True, 2), (False, 5)):
        monkeypatch.setattr("optcc.compiled._is_cached", lambda kernel, cached=cached: cached)
        tier = Tier(loaded_s=2.5, compiled_s=5.5)
        ran = 0
        while tier.is_plain(_walk, 10):  # type: ignore[arg-type]
            assert tier.run(_walk, 10, (np.array([1]),)) == 4  # type: ignore[arg-type]
            ran += 1
        assert ran == calls
    tier = Tier(loaded_s=0.25, compiled_s=2.5)
    assert tier.is_plain(_walk, 10_000)  # type: ignore[arg-type]
    assert not tier.is_plain(_walk, 10_000_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_process_that_loads_loops_at_once_waits_for_none_to_be_compiled(
    is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optcc.compiled._is_cached", lambda _: is_cached)
    monkeypatch.setattr("optcc.compiled.tier", Tier(loaded_s=0.4, compiled_s=3.0))
    assert compiled_module.tier.is_plain(_walk, 10)  # type: ignore[arg-type]
    load_at_once()
    assert compiled_module.tier.is_plain(_walk, 10) != is_cached  # type: ignore[arg-type]


def test_the_compiled_kernel_takes_the_place_of_the_plain_one(tiers: Callable[[tuple[float, float]], None]) -> None:
    numba = pytest.importorskip("numba")
    tiers((0.0, 0.0))
    kernels = compiled((_next, _walk), globals())
    first = kernels.walk
    assert first(np.array([], dtype=np.int64)) == 3  # no row costs nothing
    assert kernels.walk is first
    assert first(np.array([3, 4])) == 10
    assert isinstance(kernels.walk, type(numba.njit(_next)))
    assert _is_cached.__wrapped__(_walk)


def test_what_was_never_compiled_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not _is_cached.__wrapped__(_walk)
    (tmp_path / "folder").mkdir()
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    (tmp_path / "folder" / f"test_compiled._walk-{_walk.__code__.co_firstlineno}.{version}.nbi").touch()
    assert _is_cached.__wrapped__(_walk)


def test_small_cases_do_not_import_numba() -> None:
    """Eight ranks, a mebibyte: what a newcomer tries first."""
    code = """
import sys
from optcc.cli import run
topology = ["--topology", "8@1GB/s,3=500MB/s", "--size", "1MiB"]
assert [run(["verify", "ring", *topology]), run(["simulate", "ring", *topology])] == [0, 0]
sys.exit("numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_callers_share_one_version_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, a variable that begins as one, and numbers of 32 and of 64 bits."""
    numba = pytest.importorskip("numba")
    njit = numba.njit
    # What comes from the cache has needed no callees.
    monkeypatch.setattr(numba, "njit", lambda *given, cache=False, **options: njit(*given, **options))
    kernels = compiled_at_once((_next, _walk), globals())
    for dtype in (np.int32, np.int64):
        assert kernels.walk(np.array([3, 4], dtype=dtype)) == _walk(np.array([3, 4])) == 10
    assert len(kernels.walk.signatures) == 2
    assert kernels.next.signatures == [(numba.int64, numba.int64)]


def test_without_numba_the_functions_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "numba":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert compiled_at_once((_next, _walk), globals()).walk is _walk


def test_a_cache_entry_that_names_a_module_of_another_version_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade in place: the entries of the old version stay, and a module has another name since."""
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for types in ("types_before", "types_after"):
        (tmp_path / f"{types}.py").write_text("from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n")
        (tmp_path / "upgraded.py").write_text(f"from {types} import Pair\ndef double(pair):\n    return 2 * pair.a\n")
        importlib.invalidate_caches()
        module = importlib.import_module("upgraded")
        assert compiled_at_once((module.double,), vars(module)).double(module.Pair(21)) == 42
        del sys.modules[types], sys.modules["upgraded"]
        (tmp_path / f"{types}.py").unlink()


def test_threads_that_need_a_kernel_at_the_same_time_load_it_once(tmp_path: Path) -> None:
    """In a process that has not imported numba yet, of which a thread would see half while another imports it."""
    program = """
import sys, threading
from optcc.runtime.compiled_kernels import find_compiled
sys.setswitchinterval(1e-6)
found, start = [], threading.Barrier(8)
def look():
    start.wait()
    found.append(find_compiled("bfloat16", "sum"))
threads = [threading.Thread(target=look) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
assert len(found) == 8 and found[0] is not None and len(set(map(id, found))) == 1, found
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
