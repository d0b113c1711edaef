"""What ranks under a launcher say of a failure: the same one is said once."""

from __future__ import annotations

from typing import Any

import pytest

from optcc.commands.launched import abort_on_failure
from optcc.errors import AllRailsFailed, Cancelled, RankLost, RuntimeFault
from optcc.runtime.transport import MonotonicClock


class Job:
    """A rank of a job of three; `Abort` ends it."""

    n_ranks = 3

    def __init__(self, rank: int) -> None:
        self.rank, self.comm = rank, self

    def Abort(self, code: int) -> None:  # noqa: N802 - as in MPI
        raise SystemExit(code)


@pytest.mark.parametrize(
    ("fault", "speaker"),
    [
        (RankLost("rank {}: rank 0 is lost: ValueError: odd", culprits=[0]), 1),
        (RankLost("rank {}: rank 2 is lost: it does not answer", culprits=[2]), 0),
        (AllRailsFailed("rank {}: no rail to rank 1 (eth0)", culprits=[1]), 0),
    ],
)
def test_what_all_raise_is_said_by_the_first_that_is_not_at_fault(
    fault: RuntimeFault, speaker: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: dict[int, list[float]] = {}
    for rank in range(3):
        waits[rank] = []
        monkeypatch.setattr(MonotonicClock, "sleep_s", staticmethod(waits[rank].append))
        job: Any = Job(rank)
        said = str(fault).format(rank)
        with pytest.raises(SystemExit) as ended, abort_on_failure(job):
            raise type(fault)(said, culprits=fault.culprits)
        assert ended.value.code == 1
        assert capsys.readouterr().err == f"optcc: {said}\n", "also by the others, should nobody have said it"
    assert [rank for rank, each in waits.items() if not each] == [speaker]


def test_what_one_rank_alone_raises_it_says_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(MonotonicClock, "sleep_s", staticmethod(waits.append))
    job: Any = Job(2)
    with pytest.raises(SystemExit), abort_on_failure(job):
        raise Cancelled("rank 2: enough")
    assert waits == [] and capsys.readouterr().err == "optcc: rank 2: enough\n"
