"""Ranks that meet in a file: all of them or none, whatever former jobs have left in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optcc.errors import DeadlineExceeded, InputError, MismatchError, OptccError
from optcc.runtime.meeting_file import in_file
from optcc.runtime.rendezvous import Meeting
from tests.unit.runtime.test_rendezvous import check_met, gather

SOON_S = 20.0
WAITER = """
import sys
from optcc.runtime.meeting_file import in_file

path, rank, n_ranks = sys.argv[1], *map(int, sys.argv[2:])
print(in_file(path, rank, n_ranks)(b"of a process").records)
"""


@contextmanager
def waiting_process(path: Path, rank: int, n_ranks: int) -> Iterator[subprocess.Popen[str]]:
    """A process that waits at the file for the others."""
    command = [sys.executable, "-c", WAITER, str(path), str(rank), str(n_ranks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            end_s = time.monotonic() + SOON_S
            while not (path.exists() and path.stat().st_size):
                assert process.poll() is None and time.monotonic() < end_s
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("n_ranks", [1, 5])
def test_ranks_meet_in_a_file_and_remove_it(n_ranks: int, tmp_path: Path) -> None:
    path, records = tmp_path / "job", [bytes([rank]) * (rank * 7) for rank in range(n_ranks)]
    check_met(gather([in_file(path, rank, n_ranks) for rank in range(n_ranks)], records), records)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_waits_in_vain_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job"
    (late,) = gather([in_file(path, 0, 2, timeout_s=0.1)], [b""])
    assert isinstance(late, DeadlineExceeded) and "in vain for ranks 1 to meet" in str(late)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_rank_has_left_does_not_count(tmp_path: Path) -> None:
    """Whichever rank of the next job comes first, it does not meet the one that is gone."""
    for first in (0, 1):
        path, records = tmp_path / f"job {first}", [b"new 0", b"new 1"]
        with waiting_process(path, 0, 2) as process:
            assert path.stat().st_mode & 0o777 == 0o600
            process.send_signal(signal.SIGKILL)
            process.wait(SOON_S)
        assert path.exists(), "nobody could remove it"
        met: dict[int, Meeting] = {}

        def meet(rank: int, path: Path = path, records: list[bytes] = records, met: dict[int, Meeting] = met) -> None:
            met[rank] = in_file(path, rank, 2, timeout_s=SOON_S)(records[rank])

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (first, 1 - first)]
        threads[0].start()
        time.sleep(0.1)
        assert not met, "one rank alone does not meet anybody"
        threads[1].start()
        for thread in threads:
            thread.join(SOON_S)
        check_met([met[0], met[1]], records)
        assert not path.exists()


def test_a_rank_that_ends_before_all_have_met_is_replaced(tmp_path: Path) -> None:
    """Rank 1 waits on, and meets the one that comes instead, with another secret."""
    path, met = tmp_path / "job", list[Meeting | OptccError]()
    with waiting_process(path, 0, 3) as process:
        waiter = threading.Thread(target=lambda: met.extend(gather([in_file(path, 1, 3)], [b"one"])))
        waiter.start()
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(SOON_S)
    others = gather([in_file(path, 0, 3), in_file(path, 2, 3)], [b"zero", b"two"])
    waiter.join(SOON_S)
    zero, two = others
    (one,) = met
    check_met([zero, one, two], [b"zero", b"one", b"two"])
    assert not path.exists()


def test_a_rank_that_is_there_twice_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "job"
    with waiting_process(path, 0, 2) as process:
        with pytest.raises(InputError, match="rank 0 is there already: must be a file of this job alone"):
            in_file(path, 0, 2)(b"")
        meeting = in_file(path, 1, 2)(b"here")
        assert process.stdout is not None
        assert process.stdout.read().strip() == str(meeting.records) == str((b"of a process", b"here"))


def test_ranks_that_do_not_say_the_same_number_are_all_told(tmp_path: Path) -> None:
    path = tmp_path / "job"
    told = gather([in_file(path, 0, 2), in_file(path, 1, 3)], [b"", b""])
    assert [type(each) for each in told] == [MismatchError, MismatchError]
    assert len({str(each) for each in told}) == 1
    assert "for 2 ranks; rank 1 is one of 3" in str(told[0]) or "for 3 ranks; rank 0 is one of 2" in str(told[0])
    assert not path.exists(), "the next job finds nothing"


def test_a_file_that_is_not_this_users_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.touch(0o600)
    path.chmod(0o644)
    with pytest.raises(InputError, match="mode 0600"):
        in_file(path, 1, 2)(b"")
    path.chmod(0o600)
    path.write_text('{"n_ranks": 2, "surprise": 1}')
    with pytest.raises(InputError, match="must be a file of this job alone"):
        in_file(path, 1, 2)(b"")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(InputError):
        in_file(tmp_path / "link", 1, 2)(b"")
    with pytest.raises(InputError, match="must be at most 4096 B"):
        in_file(tmp_path / "other", 0, 1)(bytes(5000))
    with pytest.raises(InputError, match="rank 2 of 2"):
        in_file(path, 2, 2)


def test_a_file_that_somebody_has_emptied_is_said_to_be(tmp_path: Path) -> None:
    path, told = tmp_path / "job", list[Meeting | OptccError]()
    waiter = threading.Thread(target=lambda: told.extend(gather([in_file(path, 0, 2)], [b""])))
    waiter.start()
    end_s = time.monotonic() + SOON_S
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.truncate(path, 0)
    waiter.join(SOON_S)
    assert isinstance(told[0], InputError) and "somebody has emptied it" in str(told[0])
