"""A record says when and by which code it was made, and is called older only if that code is another now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.experiments import made
from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.made import (
    CURRENT,
    NO_DATE,
    UNDATED,
    UNKNOWN,
    Made,
    made_at,
    made_of,
    said_code,
    said_date,
    stamped,
    unstamped,
)
from optcc.experiments.record import RECORDS
from optcc.experiments.recorder import RecordForm, record_command
from optcc.experiments.reranking import Reranking
from optcc.paper_figures import report, sources

PLAIN, BOUNDS = Reranking.own_path.read_bytes(), unstamped(BoundCurves.own_path.read_bytes())


@pytest.mark.parametrize("data", [unstamped(PLAIN), BOUNDS], ids=["plain", "own bytes"])
def test_the_line_goes_in_and_out_and_the_rest_stays(data: bytes) -> None:
    first, second = Made("2026-11-25 10:00 UTC", {"runtime": "aa"}), Made("", {"verify": "b"})
    assert made_of(data) is None
    assert made_of(stamped(data, first)) == first
    assert stamped(stamped(data, first), second) == stamped(data, second)
    assert unstamped(stamped(data, first)) == data
    assert json.loads(stamped(data, first)) == json.loads(data) | {"made": {"date": first.date, "rooms": first.rooms}}


def test_every_kind_reads_what_it_wrote_with_the_line(tmp_path: Path) -> None:
    plain, bounds = Reranking.read(), BoundCurves.read()
    plain.write_made(tmp_path / "plain.json")
    bounds.write_made(tmp_path / "bounds.json")
    assert Reranking.read(tmp_path / "plain.json") == plain
    assert BoundCurves.read(tmp_path / "bounds.json") == bounds
    dated, undated = made_at(tmp_path / "plain.json"), made_at(tmp_path / "bounds.json")
    assert dated is not None and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", dated.date)
    assert set(dated.rooms) == {*Reranking.rooms, "experiments.reranking"} and all(dated.rooms.values())
    assert undated is not None and said_date(undated) == NO_DATE


def test_records_that_are_to_be_the_same_bytes_have_no_time_in_them(tmp_path: Path) -> None:
    BoundCurves.read().write_made(tmp_path / "a.json")
    BoundCurves.read().write_made(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_only_rooms_whose_source_changed_make_a_record_older() -> None:
    now = Made.now(("runtime", "experiments.reranking"))
    assert now.changed() == () and said_code(now) == CURRENT
    before = Made(now.date, now.rooms | {"runtime": "0" * 16, "gone": "1" * 16})
    assert before.changed() == ("runtime", "gone")
    assert said_code(before) == "older than runtime, gone"
    assert (said_date(None), said_code(None)) == (UNDATED, UNKNOWN)


def test_a_digest_follows_names_and_sources_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "_TOP", tmp_path)

    def digest() -> str:
        made.room_digest.cache_clear()
        return made.room_digest("runtime")

    try:
        assert digest() == ""
        room = tmp_path / "runtime"
        for folder in ("a", "__pycache__", "commands"):
            (room / folder).mkdir(parents=True)
        (room / "a" / "x.py").write_text("1")
        first = digest()
        for ignored in ("notes.md", "__pycache__/x.py", "commands/x.py"):
            (room / ignored).write_text("1")
        assert digest() == first != ""
        (room / "a" / "x.py").write_text("2")
        assert digest() != first
        (room / "a" / "x.py").write_text("1")
        assert digest() == first
        (room / "a" / "x.py").rename(room / "a" / "y.py")
        assert digest() != first
    finally:
        made.room_digest.cache_clear()


def test_a_broken_line_is_no_news_and_no_failure() -> None:
    broken = stamped(BOUNDS, Made("", {})).replace(b'"rooms"', b'"roms"')
    assert made_of(broken) is None
    assert made_at(RECORDS / "no such file") is None


def test_the_report_names_the_age_of_each_record(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    Reranking.read().write_made(new)
    old.write_bytes(stamped(new.read_bytes(), Made("2026-01-02 03:04 UTC", {"verify": "0" * 16})))
    (tmp_path / "none.json").write_bytes(unstamped(PLAIN))
    page = report.page(sources.read([old, new, tmp_path / "none.json"]), (), None, {}).decode()
    rows = {
        name: next(row for row in page.split("<tr>")[::-1] if f"{name}.json" in row) for name in ("old", "new", "none")
    }
    assert "2026-01-02 03:04 UTC" in rows["old"] and "older than verify" in rows["old"]
    assert CURRENT in rows["new"] and UNDATED in rows["none"]


def test_an_experiment_writes_the_line(tmp_path: Path) -> None:
    @record_command(Reranking, RecordForm(quick=""))
    def command() -> Reranking:
        return Reranking.read()

    done = CliRunner().invoke(command, ["-o", str(tmp_path / "r.json")], standalone_mode=False)
    assert done.exit_code == 0, done.exception
    written = made_at(tmp_path / "r.json")
    assert written is not None and said_code(written) == CURRENT
