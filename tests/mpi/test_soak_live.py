"""A job on emulated hosts under random faults, for twenty seconds."""

from __future__ import annotations

import pytest

from optcc.experiments.soak import KINDS, soak


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.netns
@pytest.mark.nft
@pytest.mark.mpi
def test_no_random_fault_costs_a_bit_or_the_job() -> None:
    record = soak(8 << 20, 20.0, seed=2)
    assert record.wrong == record.splits == 0 and record.recovered_s >= 0
    assert len(record.faults) >= 8 and len({fault.kind for fault in record.faults}) > len(KINDS) // 2
    first_s, last_s = record.faults[0].began_s, record.faults[-1].began_s
    assert sum(first_s <= run.began_s <= last_s for run in record.runs) >= 10
