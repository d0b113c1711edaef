"""What runs is what was proved: ways to have a run-time run something else, each of which is refused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc.arrays import Lists, column, frozen
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import EXIT_REFUTED, EXIT_UNKNOWN, PlanError, PlanRefuted, PlanUnproved
from optcc.files import VerdictCache
from optcc.plan import Channel, Plan
from optcc.planner import Planner, build, look_up, prove
from optcc.runtime.executor import Executor
from optcc.runtime.plan_handshake import refuse
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.schedules.ring import ring
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Counterexample, Verdict
from optcc.verify.plan import VERSION, verify_plan
from optcc.verify.plan.ratio import judge_ratio
from optcc.verify.plan.report import Questions, judge
from optcc.verify.plan.source_version import TRUSTED, source_version
from optcc.verify.plan.verify_transfers import free_plan, verify_transfers
from tests.test_house import ROOT
from tests.unit.verify.test_trusted_core import rests_on

ALL_PROVED = dict.fromkeys(PROPERTIES, PROVED)


def ring_plan(n_ranks: int = 3, size_bytes: int = 48) -> Plan:
    return compile_schedule(ring(n_ranks=n_ranks), size_bytes=size_bytes)


def wrong_plan() -> Plan:
    """A ring whose last copy goes to the place of another."""
    plan = ring_plan()
    offsets = plan.dst_offset.copy()
    offsets[offsets >= 0] = 0
    return replace(plan, dst_offset=column(offsets))


# A plan is nobody's to change -----------------------------------------------------------------------------------------


def test_a_plan_keeps_nothing_of_its_maker() -> None:
    """Every array that a plan was made of, changed afterwards through the maker's own reference."""
    source = ring_plan()
    for part in (Plan, Transfers):
        of: Any = source if part is Plan else source.transfers
        for field in fields(part):
            value = getattr(of, field.name)
            if isinstance(value, np.ndarray):
                mine = value.copy()
                made = replace(of, **{field.name: mine})
                mine[:] = 0
                assert (getattr(made, field.name) == value).all(), field.name
            elif isinstance(value, Lists):
                starts, values = value.starts.copy(), value.values.copy()
                made = replace(of, **{field.name: Lists(starts, values)})
                starts[:] = 0
                values[:] = 0
                kept = getattr(made, field.name)
                assert (kept.starts == value.starts).all() and (kept.values == value.values).all(), field.name


def views(mine: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Read-only arrays whose memory is still that of `mine`."""
    locked = mine.view()
    locked.setflags(write=False)
    stepped = mine[:]
    stepped.setflags(write=False)
    wrapped = np.frombuffer(memoryview(mine.data).toreadonly(), np.int64)
    return [mine, locked, stepped, locked[:], wrapped]


@pytest.mark.parametrize("number", range(5))
def test_a_read_only_view_is_copied(number: int) -> None:
    mine = np.arange(8)
    kept = frozen(views(mine)[number])
    mine[0] = 99
    assert kept[0] == 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        kept.setflags(write=True)


def test_what_owns_its_memory_is_copied_even_if_read_only() -> None:
    mine = column(range(4))
    kept = frozen(mine)
    mine.setflags(write=True)
    mine[0] = 99
    assert kept[0] == 0 and frozen(kept) is kept and frozen(kept[1:]).base is not None


def test_channels_are_kept_as_they_were() -> None:
    plan = ring_plan()
    mine: list[Channel] = list(plan.channels)
    made = replace(plan, channels=mine)  # type: ignore[arg-type]
    mine.clear()
    assert made.channels == plan.channels and made.digest == plan.digest


# A verdict is the verifier's ------------------------------------------------------------------------------------------

Forge = Callable[[Plan, Verdict], tuple[Plan, Verdict]]


def tampered(plan: Plan, **changes: Any) -> Plan:
    """The same object with other fields, set by force."""
    for name, value in changes.items():
        object.__setattr__(plan, name, value)
    return plan


def stored_digest(plan: Plan, digest: str) -> Plan:
    vars(plan)["digest"] = digest
    return plan


def poisoned(verdict: Verdict) -> Verdict:
    """A refuted verdict whose properties are overwritten in place."""
    verdict.properties.update(ALL_PROVED)
    object.__setattr__(verdict, "counterexample", None)
    return verdict


FORGERIES: dict[str, Forge] = {
    "made by hand": lambda plan, proof: (plan, Verdict(plan.digest, ALL_PROVED)),
    "made by hand with the version": lambda plan, proof: (plan, Verdict(plan.digest, ALL_PROVED, verifier=VERSION)),
    "with the seal of another": lambda plan, proof: (
        plan,
        Verdict(plan.digest, ALL_PROVED, None, VERSION, (), proof.seal),
    ),
    "replaced digest": lambda plan, proof: (plan, replace(proof, digest=plan.digest)),
    "digest set by force": lambda plan, proof: (plan, tampered_verdict(proof, digest=plan.digest)),
    "of another plan": lambda plan, proof: (plan, proof),
    "cached digest": lambda plan, proof: (stored_digest(plan, proof.digest), proof),
    "refuted, and overwritten": lambda plan, proof: (plan, poisoned(verify_plan(plan))),
    "refuted, without its counterexample": lambda plan, proof: (
        plan,
        tampered_verdict(verify_plan(plan), properties=ALL_PROVED, counterexample=None),
    ),
    "extended": lambda plan, proof: (plan, replace(proof, digest=plan.digest).and_also("limits", None, "any")),
    "an empty seal": lambda plan, proof: (plan, Verdict(plan.digest, ALL_PROVED, None, VERSION, (), b"")),
    "a subclass": lambda plan, proof: (plan, Trusting(plan.digest, ALL_PROVED)),
    "columns set by force": lambda plan, proof: (
        tampered(sound := ring_plan(), dst_offset=plan.dst_offset),
        verify_plan(ring_plan()) if sound.digest else proof,
    ),
    "columns set by force, digest too": lambda plan, proof: (
        stored_digest(tampered(ring_plan(), dst_offset=plan.dst_offset), ring_plan().digest),
        verify_plan(ring_plan()),
    ),
    "columns set by force before the digest": lambda plan, proof: (
        tampered(ring_plan(), dst_offset=plan.dst_offset),
        verify_plan(ring_plan()),
    ),
    "transfers' columns set by force": lambda plan, proof: (
        tampered(ring_plan(), transfers=ring_plan(3, 96).transfers),
        verify_plan(ring_plan()),
    ),
    "a method set by force": lambda plan, proof: (shadowed(plan, proof.digest), proof),
    "a digest that reads as another": lambda plan, proof: (plan, replace(proof, digest=Disguised(plan.digest))),
    "properties that read as others": lambda plan, proof: (plan, masked(verify_plan(plan))),
    "slots set by force": lambda plan, proof: (
        tampered(ring_plan(), channels=tuple(replace(each, slots=9) for each in plan.channels)),
        verify_plan(ring_plan()),
    ),
    "lanes set by force": lambda plan, proof: (
        tampered(made := ring_plan(), lanes=Lists(made.lanes.starts, made.lanes.values[::-1].copy())),
        verify_plan(ring_plan()),
    ),
    "after dropped by force": lambda plan, proof: (
        tampered(ring_plan(), after=Lists.empty(len(plan))),
        verify_plan(ring_plan()),
    ),
    "kinds set by force": lambda plan, proof: (
        tampered(made := ring_plan(), kind=column(np.where(made.kind == 3, 4, made.kind))),
        verify_plan(ring_plan()),
    ),
    "transfers judged as such": lambda plan, proof: (
        free := free_plan(ring_plan().transfers),
        verify_transfers(free.transfers),
    ),
    "a translation without the proof": lambda plan, proof: (
        plan,
        replace(proof, digest=plan.digest, properties=ALL_PROVED | {"translation": PROVED}),
    ),
    "unknown taken for proved": lambda plan, proof: (plan, Verdict(plan.digest, dict.fromkeys(PROPERTIES, UNKNOWN))),
}


class Disguised(str):
    """A text that shows another one, for which there is a seal."""

    def __repr__(self) -> str:
        return repr(ring_plan().digest)


class Masked(dict[str, str]):
    """Properties of which the items are others."""

    said: Any = ()

    def items(self) -> Any:
        return self.said


def masked(verdict: Verdict) -> Verdict:
    """A refuted verdict whose properties are those of a proof, and its own to its seal."""
    mask = Masked(ALL_PROVED)
    mask.said = verdict.properties.items()
    return tampered_verdict(verdict, properties=mask)


def shadowed(plan: Plan, digest: str) -> Plan:
    """The plan with attributes that stand before those of its class."""
    vars(plan).update(compute_digest=lambda: digest, digest=digest)
    return plan


class Trusting(Verdict):
    """Says of itself that it is sealed."""

    @property
    def is_sealed(self) -> bool:
        return True


def tampered_verdict(verdict: Verdict, **changes: Any) -> Verdict:
    for name, value in changes.items():
        object.__setattr__(verdict, name, value)
    return verdict


@pytest.mark.parametrize("name", FORGERIES)
def test_a_plan_that_was_not_proved_does_not_run(name: str) -> None:
    """Refused at every rank, and by the check that the run-time makes."""
    plan, verdict = FORGERIES[name](wrong_plan(), verify_plan(ring_plan()))
    assert refuse(plan, verdict, 3)

    def body(rank: int, transport: LoopbackTransport) -> str:
        with pytest.raises(PlanError, match=r"must be|verify_plan") as caught:
            Executor(plan, rank, transport, verdict)
        return str(caught.value)

    assert all(run_ranks(3, body))


def test_what_a_plan_keeps_of_its_columns_is_made_again() -> None:
    plan, sound = ring_plan(), ring_plan()
    vars(plan)["instruction_rank"] = column([0] * len(plan))
    assert not refuse(plan, verify_plan(sound), 3)
    assert (plan.instruction_rank == sound.instruction_rank).all()


def test_the_verifiers_own_verdict_is_taken() -> None:
    plan = ring_plan()
    report = judge(plan, Questions(ring(n_ranks=3), target="optcc")).verdict
    for verdict in (verify_plan(plan), report):
        assert verdict.is_sealed and not refuse(plan, verdict, 3)
        assert verdict.verifier == VERSION
    assert not report.and_also("timing", None).is_sealed


def test_only_the_verifier_and_the_cache_set_seals() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in ("optcc", "verify", "runtime", "experiments", "schedules")
        for path in (ROOT / folder).rglob("*.py")
        if "optcc/verify" not in path.as_posix()
        and "sealed" in (text := path.read_text(encoding="utf-8"))
        and any(
            isinstance(node, ast.Name) and node.id == "sealed" and isinstance(node.ctx, ast.Load)
            for node in ast.walk(ast.parse(text))
        )
    }
    links = {each.name for each in (ROOT / "optcc").iterdir() if each.is_symlink()}
    users = {each for each in users if each.split("/")[1] not in links}
    assert users == {"optcc/files.py", "verify/plan/__init__.py", "verify/plan/report.py"}


def test_the_version_is_that_of_all_the_source_that_a_verdict_rests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ROOT / "optcc"
    trusted = {each.resolve() for each in rests_on("optcc.verify.plan")}
    assert {(package / name).resolve() for name in TRUSTED} == trusted
    assert source_version() == source_version() == VERSION
    read = Path.read_bytes
    for name in TRUSTED:
        with monkeypatch.context() as patch:
            changed = (package / name).resolve()
            patch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.resolve() == changed))  # noqa: B023
            assert source_version() != VERSION, name


# Exit codes and caches ------------------------------------------------------------------------------------------------


def test_a_refuted_plan_ends_with_exit_code_1_and_an_unknown_one_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = VerdictCache(None, VERSION)
    with pytest.raises(PlanRefuted, match="so it does not run") as refuted:
        prove(wrong_plan(), cache)
    assert refuted.value.exit_code == EXIT_REFUTED
    unknown = Verdict(ring_plan().digest, dict.fromkeys(PROPERTIES, UNKNOWN))
    monkeypatch.setattr("optcc.planner.verify_plan", lambda plan: unknown)
    with pytest.raises(PlanUnproved) as unproved:
        prove(ring_plan(), cache)
    assert unproved.value.exit_code == EXIT_UNKNOWN


def test_a_forged_entry_does_not_let_a_plan_run(tmp_path: Path) -> None:
    """The entry of a proved plan, rewritten for one that is wrong."""
    cache = VerdictCache(tmp_path, VERSION)
    sound, wrong = ring_plan(), wrong_plan()
    cache.put(look_up(sound, cache))
    [path] = tmp_path.glob("*.json")
    forged = cache._path(tmp_path, wrong.digest)
    forged.write_text(path.read_text().replace(sound.digest, wrong.digest))
    with pytest.raises(PlanRefuted):
        prove(wrong, cache)
    cache.put(Verdict(wrong.digest, ALL_PROVED, verifier=VERSION))
    with pytest.raises(PlanRefuted):
        prove(wrong, cache)
    assert prove(sound, cache).is_sealed


def test_a_planner_makes_again_what_another_has_put_into_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("optcc.planner.WORTH_STORING_S", 0.0)
    topology, collective = Topology.parse("3@1GB/s"), Collective("allreduce", 3)
    planner = Planner(topology, schedules={"allreduce": "ring"})
    plan, _ = planner(collective, 48, "float32", "sum")
    other, _ = planner(collective, 48, "float32", "max")
    mine, theirs = (planner._store._path(planner._key(each.request), ".plan") for each in (plan, other))  # type: ignore[union-attr]
    mine.write_bytes(theirs.read_bytes())
    again, proof = Planner(topology, schedules={"allreduce": "ring"})(collective, 48, "float32", "sum")
    assert (again.digest, proof.digest) == (plan.digest, plan.digest) != (other.digest, other.digest)
    assert len(caplog.messages) == 2  # the second time alone, with the lock


OPTIMISED = """
import sys
import numpy as np
from dataclasses import replace
from optcc.arrays import column
from optcc.compiler import compile_schedule
from optcc.schedules.ring import ring
from optcc.verdict import Counterexample, Verdict
from optcc.verify.plan import verify_plan
assert False, "must be removed"
plan = compile_schedule(ring(n_ranks=3), size_bytes=48)
print(verify_plan(plan).verdict)
for name in ("dst_offset", "src_offset", "bytes", "kind", "recv_transfer"):
    for at in range(len(plan)):
        for more in (-16, 16, 1):
            values = getattr(plan, name).copy()
            values[at] += more
            try:
                print(name, at, verify_plan(replace(plan, **{name: column(values)})).verdict)
            except Exception as error:
                print(name, at, type(error).__name__, error)
five = "matching", "deadlock", "races", "result", "agreement"
for wrong in ({"matching": "proved"}, {}, dict.fromkeys(five, "fine")):
    try:
        print(Verdict("0" * 64, wrong).verdict)
    except AssertionError:
        print("refused")
"""


def test_python_without_asserts_judges_alike() -> None:
    code = OPTIMISED.replace('assert False, "must be removed"\n', "")
    environ = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    said = [
        subprocess.run(
            [sys.executable, *flags, "-c", text], env=environ, capture_output=True, text=True, check=True, timeout=120
        )
        for flags, text in (((), code), (("-O",), OPTIMISED))
    ]
    assert said[0].stdout == said[1].stdout
    assert said[0].stdout.count("refuted") > 50 and said[0].stdout.count("refused") == 3


# Conditions of a verdict ----------------------------------------------------------------------------------------------


def test_timing_names_slots_ports_and_rates_and_the_other_order() -> None:
    """Two slots at equal rates: 345 us in the lanes' order, and 390 us if ports serve what is ready first."""
    topology = Topology.parse("6@1GB/s")
    for slots, other in ((2, "; if ports serve what is ready first (optcc simulate), 390.016 us"), (1, "")):
        plan = build("shares", topology, 180_000, slots=slots, segments=2, ports="exclusive").plan
        verdict = judge(plan, Questions(topology=topology, promise_s=Fraction(1))).verdict
        assert verdict.properties["timing"] == PROVED
        said = f"exclusive ports in the lanes' order, {slots} slots, no latency, on Topology('6@1GB/s'){other}"
        assert verdict.conditions == (("timing", said),)


def test_an_interval_names_its_ends_and_the_simulator_agrees_within() -> None:
    """Twenty random slowdowns of each interval, simulated with the one slot and the ports that the condition names."""
    seed = 11
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for low, high in ((1, 2), (2, 8), (Fraction(3, 2), Fraction(5, 3))):
        for name, n_ranks in (("ring", 4), ("optcc", 5)):
            topology = Topology.parse(f"{n_ranks}@1GB/s,3=500MB/s")
            plan = build(name, topology, 960_000, slots=1, segments=2, ports="exclusive").plan
            ratio = judge_ratio(plan, topology, Fraction(low), Fraction(high), None)
            assert f"from {low} to {high}, both included, of rank 3 alone; exclusive ports" in ratio.conditions
            assert "1 slots, no latency" in ratio.conditions and ratio.as_json()["conditions"] == ratio.conditions
            (makespan,) = ratio.study.makespans
            for at in (low, high, *rng.uniform(float(low), float(high), 20)):
                slowdown = Fraction(at).limit_denominator(1000)
                slowdown = min(max(slowdown, Fraction(low)), Fraction(high))
                healthy, slow = 1000 * slowdown.numerator, 1000 * slowdown.denominator
                slowed = Topology.parse(f"{n_ranks}@{healthy}B/s,3={slow}B/s")
                simulated = simulate(plan, slowed, model="exclusive").seconds
                assert simulated == pytest.approx(float(makespan(slowdown)) * 960_000 / healthy, rel=1e-9), slowdown


def test_limits_name_the_reader() -> None:
    plan = ring_plan()
    assert dict(judge(plan, Questions(target="msccl-xml")).verdict.conditions)["limits"].startswith(
        "msccl-xml: the inter"
    )
    assert "0.8" in dict(judge(ring_plan(3, 480), Questions(target="mscclpp-json")).verdict.conditions)["limits"]


def test_a_refuted_or_unknown_property_has_no_condition() -> None:
    verdict = judge(wrong_plan(), Questions(target="optcc")).verdict
    assert verdict.verdict == REFUTED and verdict.conditions == ()
    with pytest.raises(AssertionError):
        Verdict("0" * 64, ALL_PROVED | {"races": REFUTED})
    with pytest.raises(AssertionError):
        Verdict("0" * 64, ALL_PROVED, Counterexample("races", "two writes"))


MISREAD = """
from dataclasses import replace
from optcc.schedules.ring import ring
from optcc.verify.all_ranks import proof
from optcc.verify.all_ranks.symbolic import Loop, Move
from optcc.verify.all_ranks.symbolic_terms import Term, mod
read = proof.read

def shifted(node):
    if isinstance(node, Move):
        return replace(node, section=mod(node.section + 1, Term.var("p")))
    return replace(node, body=tuple(map(shifted, node.body)))

def misread(definition, case):
    found = read(definition, case)
    return replace(found, walks=tuple(
        replace(walk, bodies=tuple(tuple(map(shifted, body)) for body in walk.bodies)) for walk in found.walks
    ))

print(proof.prove_all_ranks(ring, p_checked=4).verdict)
proof.read = misread
judged = proof.prove_all_ranks(ring, p_checked=4)
print(judged.verdict, "read wrongly" in judged.reached)
"""


def test_without_asserts_a_misread_schedule_is_not_proved() -> None:
    environ = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-O", "-c", MISREAD], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "proved\nunknown True\n"
