"""Files are replaced whole or not at all, and the cache believes nobody."""

from __future__ import annotations

import json
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from optcc.errors import InputError
from optcc.files import KEY_BYTES, VerdictCache, cache_directory, cache_key, read_file, replace_file
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Counterexample, Verdict, sealed

DIGEST = "ab" * 32


def names(directory: Path) -> list[str]:
    """What lies in `directory`."""
    return sorted(entry.name for entry in directory.iterdir())


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace_file(path, b"one")
    replace_file(path, b"two" * 10**6)
    assert read_file(path, 3 * 10**6) == b"two" * 10**6
    assert names(tmp_path) == ["plan.json"]


def test_modes(tmp_path: Path) -> None:
    """A new file follows the umask; an old one keeps its mode."""
    path = tmp_path / "plan.json"
    previous = os.umask(0o027)
    try:
        replace_file(path, b"one")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        replace_file(path, b"two")
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(previous)


def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_device_stays_a_device() -> None:
    replace_file(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()


def test_only_what_is_to_last_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    replace_file(tmp_path / "plan.json", b"one", lasts=False)
    assert not synced and (tmp_path / "plan.json").read_bytes() == b"one"
    replace_file(tmp_path / "plan.json", b"two")
    assert len(synced) == 2, "the file and its folder"


@pytest.mark.parametrize("step", ["write", "fsync", "fchmod", "close"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def fail(*arguments: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises((InputError, KeyboardInterrupt)) as caught:
            replace_file(path, b"new")
    if isinstance(error, OSError):
        assert str(caught.value) == f"file {str(path)!r}: cannot be written: No space left on device"
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["plan.json"]


def test_a_failing_rename_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def fail(*arguments: object) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InputError, match="Read-only file system"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["plan.json"]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no/plan.json': cannot be written: No such file or directory"):
        replace_file(tmp_path / "no" / "plan.json", b"")
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        replace_file(tmp_path, b"")
    with pytest.raises(InputError, match="cannot be written: "):
        replace_file(tmp_path / "a\0b", b"")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="cannot be written: "):
        replace_file(loop, b"")


def test_temporary_files_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f".optcc-{os.getpid()}-0.tmp"
    other.write_bytes(b"theirs")
    replace_file(tmp_path / "plan.json", b"ours")
    assert other.read_bytes() == b"theirs"
    assert names(tmp_path) == [other.name, "plan.json"]


def test_reading_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(InputError, match=r"plan.json': must be at most 4 B"):
        read_file(path, 4)
    with pytest.raises(InputError, match="'/dev/zero': must be at most 100 B"):
        read_file(Path("/dev/zero"), 100)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none': cannot be read: No such file or directory"):
        read_file(tmp_path / "none", 1)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_file(tmp_path, 1)
    with pytest.raises(InputError, match="cannot be read: "):
        read_file(tmp_path / "a\0b", 1)


# The cache


def proof(digest: str = DIGEST, version: str = "verifier/1") -> Verdict:
    """Everything is proved, as that version of the verifier says it."""
    return sealed(Verdict(digest, dict.fromkeys(PROPERTIES, PROVED), verifier=version))


def entries(directory: Path) -> list[str]:
    """The verdicts in the cache."""
    return [name for name in names(directory) if name.endswith(".json")]


def test_where_the_cache_lies(tmp_path: Path) -> None:
    chosen, home = tmp_path / "cache", tmp_path / "home"
    assert cache_directory({"XDG_CACHE_HOME": str(chosen), "HOME": str(home)}) == chosen / "optcc"
    assert cache_directory({"HOME": str(home)}) == home / ".cache" / "optcc"
    assert cache_directory({"XDG_CACHE_HOME": "relative", "HOME": str(home)}) == home / ".cache" / "optcc"
    assert cache_directory({"XDG_CACHE_HOME": "", "HOME": str(home)}) == home / ".cache" / "optcc"
    assert stat.S_IMODE((chosen / "optcc").stat().st_mode) == 0o700
    assert cache_directory({}) is None
    assert cache_directory({"HOME": "relative"}) is None
    assert cache_directory({"HOME": "/a\0b"}) is None


def test_no_cache_where_it_cannot_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    directory, elsewhere = tmp_path / "optcc", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)
    assert cache_directory(environ) is None
    directory.unlink()
    directory.write_bytes(b"")
    assert cache_directory(environ) is None
    directory.unlink()
    directory.mkdir()
    directory.chmod(0o770)
    assert cache_directory(environ) is None
    directory.chmod(0o755)
    assert cache_directory(environ) == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache_directory(environ) is None


def test_no_cache_where_it_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) is None


def test_a_proof_is_kept(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path, "verifier/1")
    assert cache.get(DIGEST) is None
    cache.put(proof())
    assert cache.get(DIGEST) == proof()
    assert cache.get("cd" * 32) is None
    assert VerdictCache(tmp_path, "verifier/2").get(DIGEST) is None
    [name] = entries(tmp_path)
    assert set(name.removesuffix(".json")) <= set("0123456789abcdef")


def test_only_a_proof_is_kept(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path, "verifier/1")
    refuted = dict.fromkeys(PROPERTIES, PROVED) | {"races": REFUTED}
    version = "verifier/1"
    cache.put(sealed(Verdict(DIGEST, refuted, Counterexample("races", "two writes"), version)))
    cache.put(sealed(Verdict(DIGEST, dict.fromkeys(PROPERTIES, UNKNOWN), verifier=version)))
    cache.put(Verdict(DIGEST, dict.fromkeys(PROPERTIES, PROVED), verifier=version))
    cache.put(proof(version="verifier/2"))
    assert names(tmp_path) == []


def test_no_directory_is_no_cache() -> None:
    cache = VerdictCache(None, "verifier/1")
    cache.put(proof())
    assert cache.get(DIGEST) is None


def test_strange_names_stay_in_the_directory(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    cache = VerdictCache(inner, "../../version")
    cache.put(proof("../x", "../../version"))
    assert cache.get("../x") == proof("../x", "../../version")
    assert names(tmp_path) == ["inner"]


def stored(directory: Path) -> Path:
    """A cache with one proof, and its file."""
    VerdictCache(directory, "verifier/1").put(proof())
    [path] = directory.glob("*.json")
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"format": "optcc-verdict/0"},
        {"digest": "cd" * 32},
        {"version": "verifier/2"},
        {"properties": {}},
        {"properties": dict.fromkeys(PROPERTIES, UNKNOWN)},
        {"properties": {**dict.fromkeys(PROPERTIES, PROVED), "more": PROVED}},
        {"properties": 1},
        {"more": 1},
        {"seal": ""},
        {"seal": "0" * 64},
        {"seal": "\u2603"},
        {"seal": 0},
    ],
)
def test_what_put_has_not_written_is_a_miss_with_one_line(
    tmp_path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path)
    cache = VerdictCache(tmp_path, "verifier/1")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert cache.get(DIGEST) is None
    [line] = caplog.messages
    assert str(path) in line and line.endswith("the plan is judged again")
    cache.put(proof())
    assert cache.get(DIGEST) == proof()


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff", b"[" * 10**4, b" " * 2**17, b"null", b'"\\ud800"'])
def test_garbage_is_a_miss(tmp_path: Path, garbage: bytes) -> None:
    path = stored(tmp_path)
    path.write_bytes(garbage)
    assert VerdictCache(tmp_path, "verifier/1").get(DIGEST) is None


def test_every_cut_is_a_miss(tmp_path: Path) -> None:
    path = stored(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert VerdictCache(tmp_path, "verifier/1").get(DIGEST) is None


def test_what_is_not_our_own_file_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    path = stored(directory)
    cache = VerdictCache(directory, "verifier/1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert cache.get(DIGEST) is None
    real = path.rename(tmp_path / "real")
    path.symlink_to(real)
    assert cache.get(DIGEST) is None
    path.unlink()
    path.mkdir()
    assert cache.get(DIGEST) is None
    cache.put(proof())  # In the way, and no error.
    path.rmdir()
    if sys.platform != "win32":
        os.mkfifo(path)
        assert cache.get(DIGEST) is None


def test_a_cache_that_cannot_be_written_is_silent(tmp_path: Path) -> None:
    VerdictCache(tmp_path / "none", "verifier/1").put(proof())
    assert names(tmp_path) == []


def test_an_entry_of_another_user_counts_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole directories that were copied, and keys that were replaced, cut or put aside."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    path = stored(mine)
    (other / path.name).write_bytes(path.read_bytes())
    assert VerdictCache(other, "verifier/1").get(DIGEST) is None
    key = mine / "key"
    whole = key.read_bytes()
    assert (len(whole), stat.S_IMODE(key.stat().st_mode)) == (KEY_BYTES, 0o600)
    for changed in (bytes(KEY_BYTES), whole[:-1], b"", whole + b"x"):
        key.write_bytes(changed)
        assert VerdictCache(mine, "verifier/1").get(DIGEST) is None
    assert len(caplog.messages) == 5
    key.unlink()
    key.symlink_to(tmp_path / "elsewhere")
    assert cache_key(mine) is None
    VerdictCache(mine, "verifier/1").put(proof())
    key.unlink()
    key.write_bytes(whole)
    assert VerdictCache(mine, "verifier/1").get(DIGEST) == proof()


def test_an_entry_serves_one_plan_alone(tmp_path: Path) -> None:
    """A proof of one plan in the place of another's."""
    cache, other = VerdictCache(tmp_path, "verifier/1"), "cd" * 32
    path = stored(tmp_path)
    cache.put(proof(other))
    [second] = [each for each in tmp_path.glob("*.json") if each != path]
    second.write_bytes(path.read_bytes())
    assert cache.get(other) is None
    second.write_text(path.read_text().replace(DIGEST, other))
    assert cache.get(other) is None and cache.get(DIGEST) == proof()


def test_all_who_need_the_key_at_once_find_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        keys = set(threads.map(lambda _: cache_key(tmp_path), range(64)))
    assert len(keys) == 1 and None not in keys
    assert names(tmp_path) == ["key"]
