"""The README's tour works: its files are written, its commands run, and they print what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120


@dataclass(frozen=True)
class Shown:
    """A command of the tour and the output that the README shows for it; `...` stands for anything."""

    command: str
    output: str

    def pattern(self) -> re.Pattern[str]:
        """What the real output must match."""
        return re.compile(re.escape(self.output.strip()).replace(re.escape("..."), ".*"), re.DOTALL)


def tour() -> Iterator[tuple[str, str] | Shown]:
    """In reading order: (file name, text) for each file, and each command with what it shows."""
    for language, block in FENCE.findall(README.read_text(encoding="utf-8")):
        if language == "python":
            first = block.partition("\n")[0]
            yield first.removeprefix("# "), block
        elif language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield Shown(command, output)


@pytest.mark.mpi
def test_the_tour_prints_what_the_readme_shows(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    steps = list(tour())
    assert sum(isinstance(step, Shown) for step in steps) >= 7
    for step in steps:
        if not isinstance(step, Shown):
            (tmp_path / step[0]).write_text(step[1], encoding="utf-8")
            continue
        done = subprocess.run(
            step.command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        refused = "refuted" in step.output
        assert done.returncode == (1 if refused else 0), f"{step.command}\n{done.stdout}{done.stderr}"
        assert step.pattern().fullmatch(done.stdout.strip()), (
            f"{step.command}\n{done.stdout}\n--- shown ---\n{step.output}"
        )
    assert list((tmp_path / "figures").glob("*.png"))


def test_the_tour_mends_the_line_it_names() -> None:
    """The line that the tour mends is the all-gather's."""
    files = [step for step in tour() if not isinstance(step, Shown)]
    line = files[0][1].splitlines()[16]
    assert ".copy(" in line
    assert any(step.command.startswith("sed -i '17s") for step in tour() if isinstance(step, Shown))
