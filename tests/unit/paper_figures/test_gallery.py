"""The gallery in the manual is what the modules of the figures and the records say, with a picture of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.commands.experiment import commands_of_records
from optcc.commands.figures import command
from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.gpu_battery import GpuBattery
from optcc.experiments.record import RECORDS
from optcc.paper_figures import build, gallery, sources

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_in_the_manual_is_what_is_generated() -> None:
    """Written anew by: optcc figures --quick --gallery docs."""
    shown = build.exhibits(sources.read(sources.find(RECORDS)))
    page = gallery.page(shown, commands_of_records())
    assert page == (DOCS / gallery.FILE).read_text(encoding="utf-8")
    assert len({each.name for each in shown}) == len(shown)
    assert all((DOCS / each.picture).read_bytes().startswith(b"\x89PNG") for each in shown)
    absent = set() if GpuBattery.own_path.exists() else {GpuBattery}
    assert {type(source.record) for each in shown for source in each.sources} == set(build.drawn_kinds()) - absent


def test_the_option_writes_the_page_and_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record, out, docs = BoundCurves.own_path, tmp_path / "out", tmp_path / "docs"
    words = ["--quick", "--quiet", "--record", str(record), "--out", str(out), "--gallery", str(docs)]
    done = CliRunner().invoke(command, words, standalone_mode=False)
    assert done.exit_code == 0, done.exception
    assert {each.name for each in docs.iterdir()} == {"gallery.md", "bound-curves.png"}
    assert (docs / "bound-curves.png").read_bytes() == (out / "bound-curves.png").read_bytes()
    assert "optcc experiment bound-curves" in (docs / "gallery.md").read_text()
