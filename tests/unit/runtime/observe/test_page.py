"""Pages: what is written without a lock is read whole or not at all, also while it is being written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optcc.errors import CodecError, InputError
from optcc.runtime.observe.page import DONE, LOCK, RECORDS, PageWriter, read_page
from optcc.runtime.taps.ring import RingReader, RingWriter


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    page = PageWriter(tmp_path / "page", b"identity", n_events=4)
    write = page.recorder()
    for number in range(3):
        write(number / 2, 1, 2, 3, 4, number, 1 << 40, -7)
    page.publish(b"status")
    page.words[DONE] = 9
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
    write = page.recorder()
    for number in range(10):
        write(0.0, 1, 0, 0, 0, number, 0, 0)
    # A fifth record might be under way in the place of the oldest.
    assert [each.d for each in page.contents().records] == [7, 8, 9]


def test_what_is_half_written_is_not_read() -> None:
    page = PageWriter(None, b"", n_events=4)
    write = page.recorder()
    for number in range(3):
        write(0.0, 1, 0, 0, 0, number, 0, 0)
    page.publish(b"whole")
    page.words[RECORDS] = 4  # Counted, and not written.
    page.words[LOCK] += 1  # Killed within `publish`.
    contents = page.contents()
    assert [each.d for each in contents.records] == [1, 2]
    assert contents.status == b""


WRITER = """
import sys
from pathlib import Path
from optcc.runtime.observe.page import PageWriter
page = PageWriter(Path(sys.argv[1]), b"", n_events=64)
write, number = page.recorder(), 0
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
    with pytest.raises(InputError, match="at least one"):
        PageWriter(None, b"", n_events=0)


def test_a_page_that_does_not_fit_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        PageWriter(tmp_path / "page", b"")
    assert not (tmp_path / "page").exists()
