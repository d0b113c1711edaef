"""Configurations of the failover protocol that cannot be explored are rejected."""

from __future__ import annotations

import pytest

from optcc.errors import InputError
from optcc.verify.failover.configurations import Config


def test_configurations_that_cannot_be_are_rejected() -> None:
    with pytest.raises(InputError, match="failures 8: must be from 0 to 7"):
        Config(failures=8)
    with pytest.raises(InputError, match="5 rails: an exploration takes from 1 to 4"):
        Config(n_rails=5)
    with pytest.raises(InputError, match="0 chunks"):
        Config(n_chunks=0)
