"""The relations and invariants of the induction hold of what explorations and random walks of the table meet."""

from __future__ import annotations

from dataclasses import replace as change

import pytest

from optcc.failover import (
    RECEIVER_ROWS,
    SENDER_ROWS,
)
from optcc.verify.failover.configurations import QUICK, Config
from optcc.verify.failover.encoding import check_encoding, check_invariants
from optcc.verify.failover.induction import RECEIVER_RELATIONS, SENDER_RELATIONS

WILD = Config(
    *(4, 40, 7),
    *(7, 7, 7, 7, 7, 3),
    early=None,
    one_way=True,
    stepwise=True,
)
"""Too large to explore: for random walks."""


def test_the_relations_are_those_of_the_table() -> None:
    assert set(SENDER_RELATIONS) == {row.name for row in SENDER_ROWS}
    assert set(RECEIVER_RELATIONS) == {row.name for row in RECEIVER_ROWS}
    checked = check_encoding(QUICK[3:5], walks=[change(WILD, n_rails=3, n_chunks=12, window=5)], n_moves=600, seed=3)
    assert int(checked.how.split()[0]) > 1000


@pytest.mark.slow
def test_the_relations_are_those_of_the_table_in_long_walks() -> None:
    for seed in range(5):
        print(check_encoding(QUICK if seed == 0 else (), walks=[WILD], n_moves=1500, seed=seed))


def test_the_invariants_hold_in_every_explored_state() -> None:
    for config in (Config(n_chunks=2, window=2), Config(n_chunks=1, window=1, replans=1)):
        assert "states, evaluated exactly" in check_invariants(config).how
