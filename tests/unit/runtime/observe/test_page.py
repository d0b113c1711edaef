"""Pages: what is written without a lock is read whole or not at all, also while it is being written."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optcc.errors import CodecError, InputError
from optcc.runtime.observe import page as page_module
from optcc.runtime.observe.page import (
    BEGIN,
    BEGUN,
    DONE,
    END,
    LOCK,
    OPEN,
    RECORDS,
    UNKNOWN_NS,
    UNKNOWN_S,
    PageContents,
    PageWriter,
    plain_mark,
    read_page,
)
from optcc.runtime.observe.recorder import CLOCKED_EVERY, CLOCKED_FIRST, POSTED, FlightRecorder, KnownPlan
from optcc.runtime.taps.ring import RingReader, RingWriter


def writer(page: PageWriter) -> Callable[[float, int, int, int, int, int, int, int], None]:
    """What writes a record."""
    return FlightRecorder(page, 1, float)._write


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    page = PageWriter(tmp_path / "page", b"identity", n_events=4)
    write = writer(page)
    for number in range(3):
        write(number / 2, 1, 2, 3, 4, number, 1 << 40, -7)
    page.publish(b"status")
    page.longs[DONE] = 9
    contents = read_page(tmp_path / "page")
    assert (contents.identity, contents.status, contents.words[DONE]) == (b"identity", b"status", 9)
    assert [(each.number, each.at_s, each.d, each.x, each.y) for each in contents.records] == [
        (number + 1, number / 2, number, 1 << 40, -7) for number in range(3)
    ]


def test_nobody_sees_a_page_or_a_ring_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks for them whenever it likes: what it finds by name it can read."""
    looks: list[list[str]] = []
    inner = os.posix_fallocate

    def fallocate(file: int, offset: int, n_bytes: int) -> None:
        look()
        inner(file, offset, n_bytes)
        look()

    def look() -> None:
        found = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        looks.append([path.name for path in found])
        for path in found:
            if path.suffix == ".page":
                assert read_page(path).identity == b"identity"
            else:
                assert RingReader.open(path).identity == b"identity"

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    PageWriter(tmp_path / "job.0.page", b"identity")
    RingWriter(tmp_path / "job.0.ring", b"identity", 1 << 12)
    look()
    assert looks == [[], [], ["job.0.page"], ["job.0.page"], looks[-1]]
    assert sorted(looks[-1]) == ["job.0.page", "job.0.ring"]


def test_the_ring_keeps_the_last_events() -> None:
    page = PageWriter(None, b"", n_events=4)
    write = writer(page)
    for number in range(10):
        write(0.0, 1, 0, 0, 0, number, 0, 0)
    # A fifth record might be under way in the place of the oldest.
    assert [each.d for each in page.contents().records] == [7, 8, 9]


@dataclass
class Run:
    """One that the recorder may take note of; it began at `due_s - deadline_s`."""

    due_s: float
    number: int = 0
    waited_from_s: float = UNKNOWN_S
    deadline_s: float = 60.0


class Recorded:
    """A recorder of plan 1, which is one of all ranks and remembered, and of messages, and its page."""

    def __init__(self, n_events: int = 8, is_clocked: bool = True) -> None:
        self.now_s = 0.0
        self.page = PageWriter(None, b"", n_events)
        self.recorder = FlightRecorder(self.page, 2, lambda: self.now_s)
        self.recorder.plans[1] = KnownPlan(1, "ring", "allreduce", "float32", "sum", 8, "0", 4)
        self.recorder._plain.append(plain_mark(1))
        if not is_clocked:
            self.recorder._clock_at = 10

    def begin(self, at_s: float, plan: int = 1) -> Run:
        run = Run(at_s + 60.0)
        self.recorder.begin(plan, run, at_s)
        return run

    def end(self, at_s: float, run: Run, waited_s: float = 0.0, plan: int = 1) -> None:
        self.now_s = at_s
        if self.recorder.is_clocking:
            self.recorder.waited_s += waited_s
        self.recorder.end(plan, run)

    def seen(self) -> list[tuple[int, float, int]]:
        return [(each.kind, each.at_s, each.x) for each in self.page.contents().records]

    def counts(self) -> tuple[int, int, int]:
        words = self.page.contents().words
        return words[BEGUN], words[DONE], words[OPEN]


def test_a_run_is_seen_from_its_beginning_on() -> None:
    ranks = Recorded()
    assert (ranks.seen(), ranks.counts()) == ([], (0, 0, 0))
    run = ranks.begin(1.0)
    assert (ranks.seen(), ranks.counts()) == ([(BEGIN, 1.0, 1)], (1, 0, 1))
    ranks.now_s = 2.0
    ranks.recorder._write(2.0, POSTED, 1, 0, 0, 0, 1, 0)
    ranks.end(3.0, run, waited_s=0.5)
    assert ranks.seen() == [(BEGIN, 1.0, 1), (POSTED, 2.0, 1), (END, 3.0, 1)]
    assert ranks.counts() == (1, 1, 0)
    begin, _, end = ranks.page.contents().records
    assert (begin.a, end.a, end.y) == (1, 1, 500_000_000)


def test_a_plain_run_is_seen_from_its_beginning_on() -> None:
    """One that is short, alone, of all ranks, and whose waits are not clocked, is recorded by fewer steps."""
    ranks = Recorded(is_clocked=False)
    run = ranks.begin(1.0)
    assert (ranks.seen(), ranks.counts()) == ([(BEGIN, 1.0, 1)], (1, 0, 1))
    ranks.end(3.0, run, waited_s=0.5)
    assert (ranks.seen(), ranks.counts()) == ([(BEGIN, 1.0, 1), (END, 3.0, 1)], (1, 1, 0))
    assert ranks.page.contents().records[-1].y == UNKNOWN_NS
    ranks.end(6.0, ranks.begin(5.0, plan=0), plan=0)
    assert (ranks.seen()[2:], ranks.counts()) == ([(BEGIN, 5.0, -1), (END, 6.0, -1)], (1, 1, 0))
    ranks.recorder.failed()
    assert ranks.counts() == (1, 1, 0)


def test_plain_runs_go_round_the_ring() -> None:
    """What is in the place of the next record is of a run that was over long ago."""
    ranks = Recorded(n_events=4, is_clocked=False)
    for number in range(1, 10):
        run = ranks.begin(2.0 * number)
        assert (ranks.seen()[-1], ranks.counts()) == ((BEGIN, 2.0 * number, number), (number, number - 1, number))
        ranks.end(2.0 * number + 1.0, run)
        assert (ranks.seen()[-1], ranks.counts()) == ((END, 2.0 * number + 1.0, number), (number, number, 0))
    assert [at_s for kind, at_s, _ in ranks.seen() if kind == END] == [15.0, 17.0, 19.0]


def test_the_waits_of_some_short_runs_are_clocked() -> None:
    ranks = Recorded(n_events=256)
    for number in range(120):
        ranks.end(2.0 * number + 1.0, ranks.begin(2.0 * number), waited_s=0.25)
    ends = [each for each in ranks.page.contents().records if each.kind == END]
    clocked = [each.x for each in ends if each.y != UNKNOWN_NS]
    assert clocked == [*range(1, CLOCKED_FIRST + 1), *range(CLOCKED_FIRST + CLOCKED_EVERY, 121, CLOCKED_EVERY)]
    assert {each.y for each in ends} == {UNKNOWN_NS, 250_000_000}
    assert ranks.counts() == (120, 120, 0)


@pytest.mark.parametrize("is_clocked", [True, False])
def test_runs_that_overlap_are_seen(is_clocked: bool) -> None:
    ranks = Recorded(is_clocked=is_clocked)
    first, second, message = ranks.begin(1.0), ranks.begin(2.0), ranks.begin(3.0, plan=0)
    assert (ranks.seen(), ranks.counts()) == ([(BEGIN, 1.0, 1), (BEGIN, 2.0, 2), (BEGIN, 3.0, -1)], (2, 0, 1))
    ranks.end(4.0, second)
    ranks.end(5.0, first)
    third = ranks.begin(6.0)
    ranks.end(7.0, message, plan=0)
    assert (ranks.seen()[3:], ranks.counts()) == (
        [(END, 4.0, 2), (END, 5.0, 1), (BEGIN, 6.0, 3), (END, 7.0, -1)],
        (3, 2, 3),
    )
    ranks.end(8.0, third)
    assert (ranks.seen()[-1], ranks.counts()) == ((END, 8.0, 3), (3, 3, 0))


def test_the_beginning_of_an_open_run_outlives_the_ring() -> None:
    """Its messages may be more than the ring has room for."""
    ranks = Recorded(n_events=4)
    run = ranks.begin(1.0)
    for _ in range(9):
        ranks.recorder._write(2.0, POSTED, 1, 0, 0, 0, 1, 0)
    assert ranks.seen()[0] == (BEGIN, 1.0, 1)
    ranks.end(3.0, run)
    assert (ranks.seen()[0], ranks.seen()[-1]) == ((BEGIN, 1.0, 1), (END, 3.0, 1))


def test_a_run_that_was_counted_and_not_closed_is_seen_once() -> None:
    ranks = Recorded()
    ranks.end(2.0, ranks.begin(1.0))
    ranks.page.longs[OPEN] = 1  # Killed before it was stored that no run is open.
    assert ranks.seen() == [(BEGIN, 1.0, 1), (END, 2.0, 1)]


def test_an_open_run_is_read_whole_or_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may come between the words of one run and those of the next one."""
    ranks = Recorded()
    ranks.begin(1.0)
    inner, n_reads = page_module._WORDS, 0

    class Torn:
        @staticmethod
        def unpack_from(memory: mmap.mmap, at: int) -> tuple[Any, ...]:
            nonlocal n_reads
            n_reads += 1
            words = inner.unpack_from(memory, at)
            return (*words[:4], 7, 6.0, *words[6:]) if n_reads == 1 else words

    monkeypatch.setattr(page_module, "_WORDS", Torn)
    contents: PageContents = ranks.page.contents()
    assert [(each.a, each.at_s) for each in contents.records] == [(1, 1.0)]


def test_what_is_half_written_is_not_read() -> None:
    page = PageWriter(None, b"", n_events=4)
    write = writer(page)
    for number in range(3):
        write(0.0, 3, 0, 0, 0, number, 0, 0)
    page.publish(b"whole")
    page.longs[RECORDS] = 4  # Counted, and not written.
    page.longs[LOCK] += 1  # Killed within `publish`.
    contents = page.contents()
    assert [each.d for each in contents.records] == [1, 2]
    assert contents.status == b""


WRITER = """
import sys
from pathlib import Path
from optcc.runtime.observe.page import PageWriter
from optcc.runtime.observe.recorder import FlightRecorder
page = PageWriter(Path(sys.argv[1]), b"", n_events=64)
write, number = FlightRecorder(page, 1, float)._write, 0
while True:
    number += 1
    page.publish(bytes([number % 256]) * (50_000 + number % 50_000))
    for _ in range(16):
        write(float(number), 1, number, number, number, number, number, number)
    if number == 10:
        print("begun", flush=True)
"""


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    """Of a process that rewrites it without a break."""
    page = tmp_path / "page"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(page)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            n_read = 0
            for _ in range(500):
                contents = read_page(page)
                n_read += bool(contents.status)
                assert len(set(contents.status)) <= 1
                for each in contents.records:
                    assert {each.a, each.b, each.c, each.d, each.x, each.y} == {int(each.at_s)}
        finally:
            writer.kill()
    assert n_read > 30


def test_a_page_must_be_this_users_and_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(CodecError, match="must be a rank's page"):
        read_page(tmp_path / "short")
    (tmp_path / "other").write_bytes(b"x" * 200_000)
    with pytest.raises(CodecError, match="must be a rank's page"):
        read_page(tmp_path / "other")
    PageWriter(tmp_path / "page", b"")
    (tmp_path / "link").symlink_to("page")
    with pytest.raises(OSError, match="symbolic"):
        read_page(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CodecError, match="must be this user's"):
        read_page(tmp_path / "page")


def test_a_page_is_not_made_twice(tmp_path: Path) -> None:
    page = PageWriter(tmp_path / "page", b"")
    with pytest.raises(FileExistsError):
        PageWriter(tmp_path / "page", b"")
    page.close(keep=True)
    assert (tmp_path / "page").exists()
    with pytest.raises(InputError, match="at least 2"):
        PageWriter(None, b"", n_events=1)


def test_a_page_that_does_not_fit_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        PageWriter(tmp_path / "page", b"")
    assert not (tmp_path / "page").exists()
