"""Files of shared memory: whole when they are found, and nothing is left of those that are never whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from optcc.runtime.observe.page import PageWriter, read_page
from optcc.runtime.observe.shared_file import UNFINISHED, new_shared_file
from optcc.runtime.taps.ring import RingReader, RingWriter


def make_page(path: Path) -> None:
    PageWriter(path, b"{}", 8)


def make_ring(path: Path) -> None:
    RingWriter(path, b"{}", 1 << 12)


MAKE: dict[str, Callable[[Path], None]] = {"job.0": make_page, "job.0.ring": make_ring}


@pytest.mark.parametrize("name", MAKE)
def test_nobody_finds_a_page_or_ring_before_it_is_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process finds by that name is looked at whenever the file grows, and when it is there."""
    path = tmp_path / name
    seen: list[str] = []
    fallocate, link = os.posix_fallocate, os.link

    def note_fallocate(*args: int) -> None:
        seen.extend(each.name for each in tmp_path.iterdir())
        fallocate(*args)

    def note_link(src: str, dst: Path) -> None:
        assert not path.exists() and Path(src).name.endswith(UNFINISHED)
        link(src, dst)
        assert (RingReader.open(path).identity if "ring" in name else read_page(path).identity) == b"{}"

    monkeypatch.setattr(os, "posix_fallocate", note_fallocate)
    monkeypatch.setattr(os, "link", note_link)
    MAKE[name](path)
    assert len(seen) == 1 and seen[0].endswith(UNFINISHED)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 1


@pytest.mark.parametrize("name", MAKE)
def test_where_there_is_one_it_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"before")
    with pytest.raises(FileExistsError):
        MAKE[name](tmp_path / name)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(name, b"before")]


def test_nothing_is_left_where_there_is_no_room_or_what_is_written_first_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError), new_shared_file(tmp_path / "one", 4096):
        raise KeyError

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"), new_shared_file(tmp_path / "two", 4096):
        raise AssertionError("there is none")
    assert not list(tmp_path.iterdir())
