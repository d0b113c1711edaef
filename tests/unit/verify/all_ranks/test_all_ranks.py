"""A schedule for every number of ranks: what is proved, what is refuted, what is unknown, and never the wrong one."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from optcc import cli
from optcc.arrays import column
from optcc.dsl import Definition, Program, schedule
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN
from optcc.planner import LIBRARY, find_schedule
from optcc.schedules import direct as direct_module
from optcc.schedules import hierarchical as hierarchical_module
from optcc.schedules import optcc as optcc_module
from optcc.schedules import ring as ring_module
from optcc.schedules.optimal import tree_pairs
from optcc.schedules.registry import SCHEDULES
from optcc.trees import Tree
from optcc.verdict import PROVED, REFUTED, UNKNOWN, Counterexample
from optcc.verify.all_ranks import induction, invariants, proof
from optcc.verify.all_ranks.cases import Instance, cases_of, instances_of
from optcc.verify.all_ranks.chunk_program import ProofStops, chunk_of
from optcc.verify.all_ranks.induction import Proof, ask, prove_moves, prove_tree
from optcc.verify.all_ranks.invariants import Invariant, learn
from optcc.verify.all_ranks.proof import prove_all_ranks
from optcc.verify.all_ranks.symbolic import Loop, Move, Node, OutsideSubset, Reading, code_of, transfers_of
from optcc.verify.all_ranks.symbolic_interpreter import read
from optcc.verify.all_ranks.symbolic_terms import (
    FALSE,
    TRUE,
    Formula,
    Le,
    Term,
    both,
    choose,
    either,
    eq,
    holds,
    le,
    mod,
    no,
    put,
)
from optcc.verify.smt import Checked, Claim, Sat
from tests.sample import sampled

PROVEN = (
    *("ring", "bidirectional-ring", "direct", "ring-reduce-scatter", "ring-all-gather"),
    *("chain-broadcast", "chain-reduce", "tree-broadcast", "tree-reduce", "r2ccl-balance"),
)
OPEN = ("r2ccl-nics",)


def planted(folder: Path, module: ModuleType, name: str, *changes: tuple[str, str]) -> Definition:
    """The schedule `name` of a module whose source has been changed."""
    source = inspect.getsource(module)
    for old, new in changes:
        assert source.count(old) >= 1, old
        source = source.replace(old, new, 1)
    path = folder / f"planted_{abs(hash((changes, name)))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    found = getattr(made, name)
    assert isinstance(found, Definition)
    return found


def ring_reading() -> Reading:
    return read(SCHEDULES["ring"], cases_of(SCHEDULES["ring"])[0].case)


# What is proved -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROVEN)
def test_a_schedule_is_proved_for_every_number_of_ranks(name: str) -> None:
    judged = prove_all_ranks(SCHEDULES[name], p_checked=9)
    assert (judged.verdict, judged.exit_code, judged.reached) == (PROVED, EXIT_DONE, "")
    assert judged.lemmas and all(lemma.proved for lemma in judged.lemmas)
    assert any(isinstance(lemma.answer, Claim) for lemma in judged.lemmas)
    said = "has every rank once, or is empty" if name == "r2ccl-balance" else "names every rank once"
    assert len(judged.assumptions) == name.startswith(("chain-", "tree-", "r2ccl-"))
    assert all(said in each for each in judged.assumptions)
    assert "p = 2..9" in judged.checked


@pytest.mark.slow
def test_optcc_is_proved_with_any_straggler_and_any_number_of_gpus() -> None:
    judged = prove_all_ranks(SCHEDULES["optcc"], p_checked=6)
    assert judged.verdict == PROVED, judged.reached
    assert len(judged.cases) == 4
    names = [lemma.name for lemma in judged.lemmas]
    for kind in (0, 1):  # patterns 1-2-3-4 and 3-1-4-2
        for what in ("result", "agreement"):
            assert sum(f"segments {kind} mod 2, {what}" in name for name in names) == 4


def test_optcc_is_proved_with_any_straggler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "cases_of", lambda found: cases_of(found)[:2])
    judged = prove_all_ranks(SCHEDULES["optcc"], p_checked=6)
    assert judged.verdict == PROVED, judged.reached


@pytest.mark.slow
def test_hierarchical_is_proved_for_any_number_of_servers_and_gpus() -> None:
    judged = prove_all_ranks(SCHEDULES["hierarchical"], p_checked=6)
    assert judged.verdict == PROVED, judged.reached
    assert len([case for case in judged.cases if "server" in case]) == 3


def test_optimal_is_proved_for_any_rates_if_its_pairs_of_trees_have_one_root() -> None:
    judged = prove_all_ranks(SCHEDULES["optimal"], p_checked=6)
    assert judged.verdict == PROVED, judged.reached
    assert sum("one root" in each for each in judged.assumptions) == 1
    assert all("one root" in each or "is not read, and raises no error" in each for each in judged.assumptions)
    assert any("assumes" in row for row in judged.card().rows)


def test_what_is_assumed_of_tree_pairs_holds_where_it_was_tried() -> None:
    seed = 7
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for p in range(2, 40):
        rates = rng.integers(1, 9, (2, p)).astype(float)
        gpus = rng.integers(1, 4, p).tolist() if p % 2 else [1] * p
        pairs = tree_pairs(rates[0], rates[1], gpus)
        for _ in range(3 * p):
            up, down = next(pairs)
            assert up.root == down.root and len(up) == len(down) == sum(gpus)


def test_the_symbolic_program_is_what_the_schedule_function_writes() -> None:
    for name in (*PROVEN[:5], "optcc", "hierarchical"):
        definition = SCHEDULES[name]
        for covered in cases_of(definition):
            reading = read(definition, covered.case)
            compared = 0
            for p in range(2, 21):
                for instance in instances_of(definition, p)[:6]:
                    sizes = covered.sizes_of(p, instance.parameters)
                    if sizes is None:
                        continue
                    for segments in (1, 2, 3) if p < 8 else (2,):
                        written = definition(p, segments, **instance.parameters)
                        columns = (written.src, written.dst, written.op, written.segment, written.section)
                        assert transfers_of(reading, sizes, segments) == list(
                            zip(*(c.tolist() for c in columns), strict=True)
                        )
                        compared += 1
            assert compared > 4, (name, covered.case.name)


@schedule
def in_any_order(program: Program, order: Sequence[int] = ()) -> None:
    """A ring of the ranks in some order; rank 0 by its number, not its place, would be another."""
    p = program.n_ranks
    ranks = tuple(order) or tuple(program.ranks)
    for segment in program.pipeline(sections=p):
        for step in range(p - 1):
            for i in range(p):
                segment[(i - step) % p].reduce(src=ranks[i], dst=ranks[(i + 1) % p])
        for step in range(p - 1):
            for i in range(p):
                segment[(i + 1 - step) % p].copy(src=ranks[i], dst=ranks[(i + 1) % p])


@schedule
def by_place_and_number(program: Program, order: Sequence[int] = ()) -> None:
    """A star whose middle is the first of the order for the reduction, and rank 0 for the broadcast."""
    p = program.n_ranks
    ranks = tuple(order) or tuple(program.ranks)
    for segment in program.pipeline(sections=1):
        for i in range(1, p):
            segment[0].reduce(src=ranks[i], dst=ranks[0])
        for rank in range(1, p):
            segment[0].copy(src=0, dst=rank)


@schedule
def beyond_the_order(program: Program, order: Sequence[int] = ()) -> None:
    """A star that takes one rank too many once there are more than 70."""
    p = program.n_ranks
    ranks = tuple(order) or tuple(program.ranks)
    for segment in program.pipeline(sections=1):
        for i in range(1, p):
            segment[0].reduce(src=ranks[i], dst=ranks[0])
        for i in range(1, p):
            segment[0].copy(src=ranks[0], dst=ranks[i])
        for i in range(70, p):
            segment[0].copy(src=ranks[0], dst=ranks[i + 1])


def test_an_order_of_the_ranks_may_be_any() -> None:
    judged = prove_all_ranks(in_any_order, p_checked=5)
    assert judged.verdict == PROVED, judged.reached
    assert judged.cases == ("p >= 2, any order",)
    assert sum("tuple(order) has every rank once, or is empty" in each for each in judged.assumptions) == 1
    assert any(lemma.name.endswith("order") for lemma in judged.lemmas)
    shuffled = [each.parameters.get("order") for each in instances_of(SCHEDULES["r2ccl-balance"], 5)]
    assert (1, 3, 0, 2, 4) in shuffled


def test_ranks_by_place_and_by_number_are_not_mixed() -> None:
    with pytest.raises(OutsideSubset, match="entries of a list, and others"):
        read(by_place_and_number, cases_of(by_place_and_number)[0].case)
    judged = prove_all_ranks(beyond_the_order, p_checked=5)
    assert judged.verdict == UNKNOWN


# What is refuted, or unknown, and never proved ------------------------------------------------------------------------

RING_FAULTS = (
    ("for step in range(p - 1)", "for step in range(p - 2)"),
    ("(ranks - step) % p", "(ranks - step - 1) % p"),
    ("(ranks - step) % p", "(ranks - step + 1) % p"),
    ("right = (ranks + 1) % p", "right = (ranks + 2) % p"),
    ("(right - step) % p", "(ranks - step) % p"),
    ("segment.copy", "segment.reduce"),
    ("segment.reduce", "segment.copy"),
)
OPTCC_FAULTS = (
    (
        "range(q - 1), range(q), shards):\n                chunk = segment[shard * q + (i - step - 1) % q]",
        "range(q - 2), range(q), shards):\n                chunk = segment[shard * q + (i - step - 1) % q]",
    ),
    ("(i - step - 1) % q]", "(i - step) % q]"),
    ("segment[shard * q + (i - step) % q]", "segment[shard * q + (i - step - 1) % q]"),
    ("dst=ring[shard][(i + 1) % q]", "dst=ring[shard][(i + 2) % q]"),
    ("segment[shard * q + owner].copy(src=straggler * gpus + shard, dst=ring[shard][owner])", "pass"),
    ("segment[shard * q + owner].copy(src=ring[shard][owner], dst=straggler * gpus + shard)", "pass"),
    ("segment % 2 == 0", "segment % 2 == 0 or segment == 2"),
)
OTHER_SEED = ("dst=ring[shard][(owner + 1) % q]", "dst=ring[shard][owner]")
"""Right as well: the straggler seeds the end of the chain."""
THIRD_SEGMENT = ("if segment % 2 == 0 else None", "if segment % 3 < 2 else 0")
"""Wrong from the third segment on."""


def smallest_wrong(definition: Definition) -> int | None:
    """The least p for which the plan of some instance is wrong, found without the proof."""
    for p in range(2, 9):
        with suppress(proof._Refuted):
            assert proof._check_each(definition, [p], 3, time.monotonic() + 60) == ((p,), True)
            continue
        return p
    return None


@pytest.mark.parametrize("change", RING_FAULTS)
def test_a_planted_fault_in_the_ring_is_refuted_with_the_smallest_number_of_ranks(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    definition = planted(tmp_path, ring_module, "ring", change)
    judged = prove_all_ranks(definition, p_checked=8)
    assert judged.verdict == REFUTED and judged.exit_code == EXIT_REFUTED
    assert judged.smallest_p == smallest_wrong(definition)
    assert judged.counterexample is not None and len(str(judged.counterexample).splitlines()) <= 20
    assert not judged.lemmas


@pytest.mark.parametrize("change", OPTCC_FAULTS)
def test_a_planted_fault_in_optcc_is_refuted_or_unknown(tmp_path: Path, change: tuple[str, str]) -> None:
    definition = planted(tmp_path, optcc_module, "optcc", change)
    judged = prove_all_ranks(definition, p_checked=4)
    wrong = smallest_wrong(definition)
    assert judged.verdict == (UNKNOWN if wrong is None else REFUTED), (wrong, judged.reached)
    assert judged.smallest_p == wrong


@pytest.mark.slow
def test_another_right_schedule_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "cases_of", lambda found: cases_of(found)[:2])
    judged = prove_all_ranks(planted(tmp_path, optcc_module, "optcc", OTHER_SEED), p_checked=4)
    assert judged.verdict == PROVED, judged.reached


def test_a_fault_in_the_third_segment_is_refuted(tmp_path: Path) -> None:
    judged = prove_all_ranks(planted(tmp_path, optcc_module, "optcc", THIRD_SEGMENT), p_checked=4)
    assert (judged.verdict, judged.smallest_p) == (REFUTED, 2)


def lemmas_fail(definition: Definition, number: int) -> bool:
    """Whether the proof of a case fails by Z3's word, where nothing is run first to see whether it is right."""
    case = cases_of(definition)[number].case
    try:
        reading = read(definition, case)
    except OutsideSubset:
        return True
    names = [name for name, _ in case.sizes]
    sizes = [dict.fromkeys(names, size) for size in range(2, 6 if len(names) == 1 else 4)]
    try:
        prove_moves(reading)
        for walk in reading.walks:
            for body in walk.bodies:
                chunk = chunk_of(reading, walk.families[0], body)
                proof = Proof(chunk, definition.collective, learn(chunk, definition.collective, sizes), "")
                proof.run()
    except ProofStops as stops:
        why = str(stops)
    else:
        return False
    assert "fails for" in why or "tells the cases apart" in why
    return True


@pytest.mark.parametrize("change", RING_FAULTS)
def test_the_lemmas_fail_for_a_planted_fault_in_the_ring(tmp_path: Path, change: tuple[str, str]) -> None:
    assert lemmas_fail(planted(tmp_path, ring_module, "ring", change), 0)


@pytest.mark.parametrize("change", sampled([(each,) for each in OPTCC_FAULTS], every=3))
def test_the_lemmas_fail_for_a_planted_fault_in_optcc(tmp_path: Path, change: tuple[str, str]) -> None:
    assert lemmas_fail(planted(tmp_path, optcc_module, "optcc", change), 1)


@pytest.mark.parametrize(
    ("module", "name", "change"),
    sampled(
        [
            (direct_module, "direct", ("for step in range(1, p)", "for step in range(2, p)")),
            (direct_module, "direct", ("segment.copy(ranks,", "segment.copy((ranks + 1) % p,")),
            (hierarchical_module, "hierarchical", ("(gpu - 1 - step) % g, (server", "(gpu - step) % g, (server")),
            (hierarchical_module, "hierarchical", ("(server + 1 - step) % n_servers", "(server - step) % n_servers")),
            (hierarchical_module, "hierarchical", ("for turn in range(n_servers)", "for turn in range(n_servers - 1)")),
        ],
        every=2,
    ),
)
def test_the_lemmas_fail_for_planted_faults_elsewhere(
    tmp_path: Path, module: ModuleType, name: str, change: tuple[str, str]
) -> None:
    assert lemmas_fail(planted(tmp_path, module, name, change), -1)


def test_the_lemmas_hold_where_nothing_is_planted(tmp_path: Path) -> None:
    assert not lemmas_fail(SCHEDULES["ring"], 0)
    assert not lemmas_fail(SCHEDULES["direct"], 0)


LATE = (
    ("right = (ranks + 1) % p", "right = (ranks + 1 + p // 7) % p"),
    ("    for segment in", "    turns = p - 1 if p <= 6 else p - 2\n    for segment in"),
    ("for step in range(p - 1):\n", "for step in range(p - 1 - (p > 60)):\n"),
    pytest.param(
        ("for step in range(p - 1):\n", "for step in range(p - 1):\n              if p < 60 or step < 50:\n"),
        marks=pytest.mark.slow,
    ),
    pytest.param(("for step in range(p - 1):\n", "for step in range(min(p - 1, 63)):\n"), marks=pytest.mark.slow),
    pytest.param(
        ("for step in range(p - 1):\n", "for step in [step for step in range(p - 1) if step < 63]:\n"),
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize("change", LATE)
def test_what_is_right_for_few_ranks_only_is_never_proved(tmp_path: Path, change: tuple[str, str]) -> None:
    definition = planted(tmp_path, ring_module, "ring", change)
    judged = prove_all_ranks(definition, p_checked=6, budget_s=20)
    assert judged.verdict == UNKNOWN
    assert "line" in judged.reached


RANDOM_RING = """
from optcc.dsl import Program, schedule

@schedule
def made(program: Program) -> None:
    p = program.n_ranks
    for segment in program.pipeline(sections=p):
        for step in range({first}, p - {less}):
            for rank in program.ranks:
                segment[(rank {way} step + {off}) % p].reduce(src=rank, dst=(rank + {to}) % p)
        for step in range(p - {less_too}):
            for rank in program.ranks:
                segment[(rank {way} step + {off_too}) % p].copy(src=rank, dst=(rank + {to_too}) % p)
"""


def random_ring(folder: Path, rng: np.random.Generator, number: int) -> Definition:
    """A ring, either way round, with the section that it starts at drawn, and every second time with a fault."""
    clockwise, off = bool(rng.integers(0, 2)), int(rng.integers(-2, 3))
    way, to = ("-", 1) if clockwise else ("+", -1)
    values = {"first": 0, "less": 1, "way": way, "off": off, "to": to, "less_too": 1, "off_too": off + to, "to_too": to}
    if number % 2:
        name = str(rng.choice([name for name in values if name != "way"]))
        values[name] = int(str(values[name])) + int(rng.choice([-1, 1]))
    path = folder / f"random_{number}.py"
    path.write_text(RANDOM_RING.format(**values))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.made
    assert isinstance(found, Definition)
    return found


def judge_random_rings(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, count: int, budget_s: float) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(invariants.Runner, "goes_wrong", lambda *_: False)
    monkeypatch.setattr(proof, "_compared", lambda *_: induction.InductionLemma("reading", "", Checked("", ""), 0.0))
    n_proved = 0
    for number in range(count):
        definition = random_ring(folder, rng, number)
        try:
            proof._prove_case(definition, cases_of(definition)[0], 4, time.monotonic() + budget_s)
        except ProofStops:
            assert number % 2, "a ring that starts anywhere is proved"
        else:
            n_proved += 1
            assert smallest_wrong(definition) is None
    assert n_proved >= count / 2


@pytest.mark.slow
def test_random_rings_are_proved_only_if_they_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_random_rings(tmp_path, monkeypatch, seed=5, count=2, budget_s=20)


@pytest.mark.slow
def test_many_random_rings_are_proved_only_if_they_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_random_rings(tmp_path, monkeypatch, seed=6, count=20, budget_s=10)


@schedule
def nothing(program: Program) -> None:
    """No pipeline."""


def test_a_schedule_that_writes_nothing_is_refuted() -> None:
    judged = prove_all_ranks(nothing, p_checked=3)
    assert (judged.verdict, judged.smallest_p) == (REFUTED, 2)


def test_a_fault_from_seven_ranks_up_is_refuted_with_seven(tmp_path: Path) -> None:
    change = (
        "for step in range(p - 1):\n",
        "for step in range(p - 1):\n                if p > 6 and step == 5: continue\n",
    )
    judged = prove_all_ranks(planted(tmp_path, ring_module, "ring", change), p_checked=8)
    assert (judged.verdict, judged.smallest_p) == (REFUTED, 7)


@schedule
def one_root(program: Program) -> None:
    """Up a chain and down a star, both with root 1."""
    others = [rank for rank in program.ranks if rank != 1]
    for segment in program.pipeline(sections=1):
        segment[0].reduce_along(Tree.chain([1, *others]))
        segment[0].broadcast_along(Tree(column([1, *others]), column([-1, *(1 for _ in others)])))


@schedule
def two_roots(program: Program) -> None:
    """Up a chain with root 1, down one with root 0."""
    for segment in program.pipeline(sections=1):
        segment[0].reduce_along(Tree.chain([1, *(rank for rank in program.ranks if rank != 1)]))
        segment[0].broadcast_along(Tree.chain([0, *(rank for rank in program.ranks if rank != 0)]))


def test_trees_of_one_root_are_proved_and_others_not() -> None:
    assert prove_all_ranks(two_roots, p_checked=4).verdict == REFUTED
    with pytest.raises(ProofStops, match="different roots"):
        induction.check_along(read(two_roots, cases_of(two_roots)[0].case), "allreduce")
    reading = read(SCHEDULES["optimal"], cases_of(SCHEDULES["optimal"])[0].case)
    with pytest.raises(ProofStops, match="no reduce along"):
        induction.check_along(reading, "reduce")


@pytest.mark.parametrize("name", OPEN)
def test_what_is_not_read_is_unknown_and_says_which_line(name: str) -> None:
    judged = prove_all_ranks(find_schedule(name), p_checked=6)
    assert judged.verdict == UNKNOWN and judged.exit_code == EXIT_UNKNOWN and not judged.lemmas
    assert "; line 10" in judged.reached and "parameter 'inner'" in judged.reached
    assert judged.reached.endswith("p = 6 are proved")


OF_ONE_TOPOLOGY = (
    *("hierarchical-nics", "r2ccl-nics", "optcc-nics", "star-all-gather", "star-reduce-scatter"),
    *("flow-all-to-all", "flow-all-to-all-v", "flow-gather", "flow-scatter"),
)
"""Schedules without a proof for all ranks: each says why."""


@pytest.mark.parametrize("name", OF_ONE_TOPOLOGY)
def test_a_schedule_for_one_topology_says_what_of_it_is(name: str) -> None:
    judged = prove_all_ranks(find_schedule(name), p_checked=6)
    assert judged.verdict == UNKNOWN and judged.smallest_p is None
    why = find_schedule(name).one_topology
    assert why and judged.reached.startswith(f"every plan is judged on its own, for its topology: {why}; line ")
    assert judged.reached.endswith("are proved")


def test_auto_is_no_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "auto", "--all-ranks"]) == 2
    assert "--all-ranks: auto: must be a schedule: auto chooses one" in capsys.readouterr().err


def test_all_others_may_be_proved() -> None:
    assert {name for name, each in LIBRARY.items() if each.one_topology} == set(OF_ONE_TOPOLOGY)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIBRARY.keys() - set(OF_ONE_TOPOLOGY)))
def test_every_other_schedule_of_the_library_is_proved_within_a_minute(name: str) -> None:
    judged = prove_all_ranks(find_schedule(name))
    assert judged.verdict == PROVED, judged.reached
    assert judged.seconds <= 60


@schedule
def carried(program: Program) -> None:
    """A loop that carries a number from turn to turn."""
    p = program.n_ranks
    at = 0
    for segment in program.pipeline(sections=1):
        for _ in range(p - 1):
            segment[0].reduce(src=(at + 1) % p, dst=at)
            at = (at + 1) % p


@schedule
def returns_early(program: Program) -> None:
    """A loop that is left before its end."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1):
        for rank in range(1, p):
            segment[0].reduce(src=rank, dst=0)
            if rank > 3:
                return


@schedule
def rotates(program: Program) -> None:
    """Right, but roots follow the number of the segment."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1):
        root = segment.index % p
        for step in range(1, p):
            segment[0].reduce(src=(root + step) % p, dst=root)
        for step in range(1, p):
            segment[0].copy(src=root, dst=(root + step) % p)


@schedule
def depends_on_p(program: Program) -> None:
    """Another pipeline for many ranks."""
    p = program.n_ranks
    if p < 100:
        for segment in program.pipeline(sections=1):
            for rank in range(1, p):
                segment[0].reduce(src=rank, dst=0)
            for rank in range(1, p):
                segment[0].copy(src=0, dst=rank)
    else:
        for segment in program.pipeline(sections=1):
            segment[0].reduce(src=1, dst=0)


@schedule
def used_up(program: Program) -> None:
    """An iterator that is empty when the second segment comes."""
    p = program.n_ranks
    others = (rank for rank in range(1, p))
    for segment in program.pipeline(sections=1):
        for rank in others:
            segment[0].reduce(src=rank, dst=0)


@schedule
def first_of_three(program: Program) -> None:
    """A remainder that no remainder of the segment's number decides: it was looked for without end."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1):
        root = min(3, segment.index) % 3
        for step in range(1, p):
            segment[0].reduce(src=(root + step) % p, dst=root)


@schedule
def star(program: Program) -> None:
    """Everyone to rank 0 and back."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1):
        for rank in range(1, p):
            segment[0].reduce(src=rank, dst=0)
        for rank in range(1, p):
            segment[0].copy(src=0, dst=rank)


@schedule
def disagreeing(program: Program) -> None:
    """Ranks 0 and 1 reduce in different orders, the others copy from 0."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1):
        for rank in range(1, p):
            segment[0].reduce(src=rank, dst=0)
        for rank in range(1, p):
            segment[0].copy(src=0, dst=rank)
        segment[0].reduce(src=0, dst=1)


@pytest.mark.parametrize(
    ("definition", "construct"),
    [
        (carried, "at: has no value here, or is carried"),
        (returns_early, "a return inside"),
        (rotates, "line \\d+"),
        (depends_on_p, "pipeline inside of a loop or a condition"),
        (used_up, "used up"),
        (first_of_three, "a remainder modulo 3 that does not follow"),
    ],
)
def test_a_construct_outside_of_the_subset_stops_the_proof(definition: Definition, construct: str) -> None:
    with pytest.raises((OutsideSubset, ProofStops), match=construct):
        proof._prove_case(definition, cases_of(definition)[0], 6, time.monotonic() + 20)


@pytest.mark.parametrize("definition", [star, one_root])
def test_a_schedule_of_ones_own_is_proved(definition: Definition) -> None:
    judged = prove_all_ranks(definition, p_checked=6)
    assert judged.verdict == PROVED, judged.reached


def test_a_reduction_after_the_last_copy_is_not_proved() -> None:
    with pytest.raises(ProofStops, match="adds what is there"):
        proof._prove_case(disagreeing, cases_of(disagreeing)[0], 6, time.monotonic() + 20)


# The proof itself is distrusted ---------------------------------------------------------------------------------------


def wrong_invariants(right: Invariant, loop: str) -> list[Invariant]:
    turn = Term.var(loop)
    return [
        Invariant(TRUE, right.stamp),
        Invariant(FALSE, right.stamp),
        Invariant(right.has, TRUE),
        Invariant(no(right.has), right.stamp),
        Invariant(put(right.has, {loop: turn + 1}), right.stamp),
        Invariant(put(right.has, {"r0": Term.var("y0"), "y0": Term.var("r0")}), right.stamp),
        Invariant(either(right.has, eq(Term.var("r0"), 0)), right.stamp),
    ]


@pytest.mark.parametrize("name", ["ring", pytest.param("optcc", marks=pytest.mark.slow)])
def test_a_wrong_invariant_makes_a_lemma_fail(name: str) -> None:
    case = cases_of(SCHEDULES[name])[-1 if name == "ring" else 1].case
    reading = read(SCHEDULES[name], case)
    chunk = chunk_of(reading, 0, reading.walks[0].bodies[0])
    sizes = [{case.sizes[0][0]: size} for size in range(2, 8) if size >= case.sizes[0][1]]
    right = learn(chunk, "allreduce", sizes)
    proof = Proof(chunk, "allreduce", right, "")
    proof.run()
    assert proof.lemmas and all(isinstance(lemma.answer, Claim) for lemma in proof.lemmas)
    for loop, invariant in right.items():
        for wrong in wrong_invariants(invariant, loop):
            broken = Proof(chunk, "allreduce", {**right, loop: wrong}, "")
            with pytest.raises(ProofStops):
                broken.run()
            assert not broken.lemmas[-1].proved


def test_a_missing_invariant_stops_the_proof() -> None:
    reading = ring_reading()
    with pytest.raises(ProofStops, match="never reached"):
        Proof(chunk_of(reading, 0, reading.walks[0].bodies[0]), "allreduce", {}, "").run()


def changed(reading: Reading, change: Callable[[Move], Move]) -> Reading:
    """The reading with every transfer changed."""

    def deep(node: Node) -> Node:
        if isinstance(node, Loop):
            return replace(node, body=tuple(map(deep, node.body)))
        return change(node) if isinstance(node, Move) else node

    walks = [replace(walk, bodies=tuple(tuple(map(deep, body)) for body in walk.bodies)) for walk in reading.walks]
    return replace(reading, walks=tuple(walks))


def test_ranks_and_sections_that_do_not_exist_are_noticed() -> None:
    reading = ring_reading()
    assert all(lemma.proved for lemma in prove_moves(reading))
    for change in (
        lambda move: replace(move, dst=move.src + 1),
        lambda move: replace(move, dst=move.src),
        lambda move: replace(move, section=move.section + 1),
        lambda move: replace(move, src=move.src - 1),
    ):
        with pytest.raises(ProofStops, match="that exist"):
            prove_moves(changed(reading, change))


def test_what_is_read_wrongly_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def misread(definition: Definition, case: object) -> Reading:
        return changed(ring_reading(), lambda move: replace(move, section=mod(move.section + 1, Term.var("p"))))

    monkeypatch.setattr(proof, "read", misread)
    judged = prove_all_ranks(SCHEDULES["ring"], p_checked=4)
    assert judged.verdict == UNKNOWN and "read wrongly for p = 2, 1 segments" in judged.reached


def test_a_proof_that_a_concrete_plan_contradicts_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(definition: Definition, instance: Instance, segments: int) -> bool:
        if instance.n_ranks == proof.P_FIRST + 1:
            raise proof._Refuted(instance.n_ranks, Counterexample("result", "made up"))
        return True

    monkeypatch.setattr(proof, "_check", check)
    with pytest.raises(AssertionError, match="proved for every number of ranks, refuted for 17"):
        prove_all_ranks(SCHEDULES["ring"], p_checked=18)


def test_the_lemmas_on_trees_are_claimed_and_fail_for_children_before_parents() -> None:
    assert all(isinstance(lemma.answer, Claim) for lemma in prove_tree())
    j, up = Term.var("j"), Term.var("up")
    assert isinstance(ask("order", "without order", [le(1, j)], le(up, j - 1)).answer, Sat)


# Terms and formulas ---------------------------------------------------------------------------------------------------


def random_formula(rng: np.random.Generator, depth: int) -> Formula:
    x, y, n = Term.var("x"), Term.var("y"), Term.var("n")
    if depth == 0:
        terms = [x, y, mod(x - y, n), mod(x + y * 2, n), n, Term.of(int(rng.integers(-2, 3)))]
        left, right = (terms[int(at)] for at in rng.integers(0, len(terms), 2))
        return le(left, right) if rng.random() < 0.5 else eq(left, right)
    parts = [random_formula(rng, depth - 1) for _ in range(3)]
    made: list[Formula] = [both(*parts), either(*parts), no(parts[0]), choose(*parts)]
    return made[int(rng.integers(0, len(made)))]


def test_z3_and_numpy_and_python_agree_on_formulas() -> None:
    seed = 3
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        formula = random_formula(rng, 2)
        values = {
            name: int(value) for name, value in zip("xyn", (*rng.integers(-3, 9, 2), rng.integers(1, 6)), strict=True)
        }
        truth = bool(holds(formula, values))
        assert truth == eval(code_of(formula), dict(values))
        facts = [eq(Term.var(name), value) for name, value in values.items()]
        if abs(values["x"]) + 2 * abs(values["y"]) < 2 * values["n"]:  # as many turns as are told apart
            lemma = ask("formula", "it is so", facts, formula if truth else no(formula))
            assert lemma.proved, (str(formula), values)
        assert not ask("formula", "it is not so", facts, no(formula) if truth else formula).proved


def test_terms_have_one_normal_form() -> None:
    p, i = Term.var("p"), Term.var("i")
    assert (p + i) * (p - i) == p * p - i * i
    assert mod(mod(i, p), p) == mod(i, p)
    assert isinstance(no(le(i, p)), Le) and no(no(le(i, p))) == le(i, p)


# How a verdict is shown -----------------------------------------------------------------------------------------------


def test_a_verdict_has_plain_values_and_a_card() -> None:
    judged = prove_all_ranks(SCHEDULES["direct"], p_checked=5)
    plain = judged.as_json()
    assert plain["verdict"] == PROVED and plain["smallest_p"] is None
    lemmas = plain["lemmas"]
    assert isinstance(lemmas, list) and {lemma["verdict"] for lemma in lemmas} == {"proved"}
    assert {lemma["by"] for lemma in lemmas} > {"checked"}
    card = judged.card()
    assert card.title == "direct, for every number of ranks: proved"
    assert any("result" in row[0] for row in card.rows)
    assert any(isinstance(lemma.answer, Checked) for lemma in judged.lemmas)
