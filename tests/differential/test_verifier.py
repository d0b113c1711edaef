"""`verify_plan` against the naive verifier, which tries every interleaving, on the library, and on plans in which a
slot is freed at another time than one may think.

Wrong plans are in `test_mutants` and in `tests/negative`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.plan import Plan
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED
from optcc.verify.plan import verify_plan
from tests.differential.naive_verifier import naive_verify
from tests.negative.cases import hand
from tests.negative.edits import Draft
from tests.negative.waiting import freed_slot, passed_around
from tests.sample import sampled

LIBRARY = [
    (name, ranks, segments, slots, fused)
    for name, (ranks, segments), slots, fused in product(
        SCHEDULES, ((2, 1), (2, 2), (2, 3), (3, 1)), (1, 2), (False, True)
    )
]


def library_plan(name: str, ranks: int, segments: int, slots: int, fused: bool) -> Plan:
    """A plan of the library with one element a chunk, last rank degraded."""
    topology = Topology.parse(f"{ranks}@50MB/s,{ranks - 1}=25MB/s")
    built = SCHEDULES[name].build(topology, segments)
    return compile_schedule(built, size_bytes=4 * ranks * segments, topology=topology, slots=slots, fused=fused)


@pytest.mark.parametrize(("name", "ranks", "segments", "slots", "fused"), sampled(LIBRARY, every=7))
def test_the_library_survives_every_interleaving(name: str, ranks: int, segments: int, slots: int, fused: bool) -> None:
    """No interleaving of a library plan deadlocks, races or gives a wrong result."""
    plan = library_plan(name, ranks, segments, slots, fused)
    assert verify_plan(plan).verdict == PROVED
    naive = naive_verify(plan, limit=4_000_000)
    assert naive.problems == {}
    assert naive.states > len(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "slots", "fused"), list(product(SCHEDULES, (3, 4), (1, 2), (False, True))))
def test_larger_plans_survive_the_most_patient_run_time(name: str, ranks: int, slots: int, fused: bool) -> None:
    """Two segments on three and four ranks, every interleaving of the run-time that waits the most."""
    plan = library_plan(name, ranks, 2 if ranks == 3 else 1, slots, fused)
    assert verify_plan(plan).verdict == PROVED
    assert naive_verify(plan, windows=(1,), limit=10_000_000).problems == {}


def test_a_message_that_was_taken_had_a_free_slot() -> None:
    """Nothing else orders the third sum here: its slot is free, so the second one is done, and so on."""

    @schedule
    def there_and_back(program: Program) -> None:
        for segment in program.pipeline(sections=3):
            for section in (2, 0, 1):
                segment[section].reduce(src=1, dst=0)
            for section in (0, 1, 2):
                segment[section].copy(src=0, dst=1)

    draft = Draft.of(compile_schedule(there_and_back(n_ranks=2), size_bytes=12, slots=1, fused=False))
    draft.find(0, "send", 2).after.clear()
    plan = draft.build()
    assert naive_verify(plan).problems == {}
    assert verify_plan(plan).verdict == PROVED
    draft.channels = [replace(channel, slots=6) for channel in draft.channels]
    assert "races" in naive_verify(draft.build()).problems
    assert verify_plan(draft.build()).properties["races"] == REFUTED


# --- when a slot is free ---
# A plain receive frees its slot when it is done. A fused one frees it when its message is taken, before it has sent.


def races_are_proved(plan: Plan) -> bool:
    """By both verifiers, which must agree."""
    proved = verify_plan(plan).properties["races"] == PROVED
    assert proved == ("races" not in naive_verify(plan).problems)
    return proved


def test_a_plain_receive_is_done_when_it_frees_its_slot() -> None:
    """So with one slot what comes after the freed slot comes after what was received; with three nothing orders it."""
    assert races_are_proved(freed_slot(slots=1, fused=False))
    assert not races_are_proved(freed_slot(slots=3, fused=False))


def test_a_fused_receive_is_not_done_when_it_frees_its_slot() -> None:
    """The same plan races once its first receive is fused: it may still be sending."""
    assert not races_are_proved(freed_slot(slots=1, fused=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_fused_receive_frees_its_slot_before_it_has_sent(ranks: int) -> None:
    """Around a circle with one slot each all pass on at once; were slots freed by done sends, nobody could."""
    plan = passed_around(ranks)
    assert verify_plan(plan).properties["deadlock"] == PROVED
    assert "deadlock" not in naive_verify(plan, limit=1_000_000).problems


def test_a_slot_is_not_free_before_its_message_is_taken() -> None:
    """Rank 2's slot is for rank 1's message, which waits for rank 0, which waits for a slot of rank 2."""
    text = "0>2 copy 0:1\n0>1 copy 0:1\n1>2 copy 0:1@1"
    lanes = {0: "s0 s1<s0", 1: "r1s2", 2: "r2 r0"}
    one, two = (hand(3, text, lanes, elements=1, scratch=1, slots=slots, collective="broadcast") for slots in (1, 2))
    assert verify_plan(one).properties["deadlock"] == REFUTED
    assert "deadlock" in naive_verify(one).problems
    assert verify_plan(two).properties["deadlock"] == PROVED
    assert "deadlock" not in naive_verify(two).problems
