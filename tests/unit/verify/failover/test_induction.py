"""The failover protocol for any number of chunks: every lemma holds, and a wrong relation fails its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optcc.errors import SolverError
from optcc.failover import (
    RECEIVER_ROWS,
    SENDER_ROWS,
)
from optcc.verdict import PROVED, REFUTED
from optcc.verify.failover.configurations import QUICK
from optcc.verify.failover.encoding import check_encoding
from optcc.verify.failover.induction import RECEIVER_RELATIONS, SENDER_RELATIONS, prove_invariants


def test_every_row_keeps_the_invariants_for_any_number_of_chunks_and_any_window() -> None:
    pytest.importorskip("z3")
    lemmas = prove_invariants()
    assert {lemma.name for lemma in lemmas} == {
        *("start", "safety", "network"),
        *(row.name for row in SENDER_ROWS),
        *(row.name for row in RECEIVER_ROWS),
    }
    assert {lemma.name: lemma.verdict for lemma in lemmas} == dict.fromkeys((each.name for each in lemmas), PROVED)


@pytest.mark.parametrize(
    ("row", "relation", "lemma"),
    [
        ("fresh chunk", "accepts any epoch", "fresh chunk"),
        ("new ack", "frees one too many", "new ack"),
        ("change", "begins one later", "change"),
        ("sender's rail lost", "resends nothing", "sender's rail lost"),
    ],
)
def test_a_wrong_relation_fails_its_lemma_and_the_comparison_with_the_table(
    row: str, relation: str, lemma: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("z3")
    table: Any = SENDER_RELATIONS if row in SENDER_RELATIONS else RECEIVER_RELATIONS
    right = table[row]

    def wrong(logic: Any, v: Any, w: Any, k: Any) -> Any:
        if relation == "accepts any epoch":
            return right(logic, v, w, {**k, "event epoch": v["epoch there"]})
        if relation == "frees one too many":
            return right(logic, v, {**w, "acked": w["acked"] - 1, "freed": w["freed"] - 1}, k)
        if relation == "begins one later":
            return right(logic, v, {**w, "start there": w["start there"] - 1}, k)
        return _resends_nothing(right, logic, v, w, k)

    monkeypatch.setitem(table, row, wrong)
    verdicts = {each.name: each.verdict for each in prove_invariants()}
    assert verdicts[lemma] == REFUTED
    if relation != "accepts any epoch":
        with pytest.raises(SolverError, match="is not what the relation says"):
            check_encoding(QUICK[3:4])


def _resends_nothing(right: Callable[..., Any], logic: Any, v: Any, w: Any, k: Any) -> Any:
    """The relation of a rail that is lost, with what was out on it not sent again although another rail is up."""
    lost = k["x on lost rail"]
    shown = {**w, "out on rail": logic.any_of((w["out on rail"], logic.all_of((lost, w["any rail"]))))}
    return logic.all_of((right(logic, v, shown, k), logic.implies(lost, logic.no(w["out on rail"]))))
