"""The wheel, installed with the dependencies that it names and no extra, does what the README claims."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("install")
"""One process makes the environment that all of these use."""
ROOT = Path(__file__).parents[1]
WINGS = ("schedules", "verify", "runtime", "experiments", "paper_figures")
TIMEOUT_S = 300
SPOKEN = re.compile(r"[A-Za-z0-9._-]+")


def _closure(requirements: list[str]) -> set[str]:
    """The distributions that are needed for `requirements`, theirs included, and that are installed here."""
    found: set[str] = set()
    todo = [text for text in requirements if "extra ==" not in text]
    while todo:
        match = SPOKEN.match(todo.pop())
        assert match is not None
        name = match[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            needs = metadata.requires(name)
        except metadata.PackageNotFoundError:  # for another Python or platform
            continue
        found.add(name)
        todo += [text for text in needs or () if "extra ==" not in text]
    return found


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Makes what a distribution has installed visible in another environment."""
    for file in distribution.files or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`optcc` in an environment of its own: the wheel, and the closure of its dependencies without extras.

    Dependencies are links to those of this environment, so that nothing is downloaded.
    """
    work = tmp_path_factory.mktemp("install")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("optcc", *WINGS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    build = (*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(source))
    done = subprocess.run(build, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    (wheel,) = work.glob("optcc-*.whl")
    environment = work / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = (*pip, "--python", str(python), "install", "--no-compile", "--no-deps", "--no-index", str(wheel))
    done = subprocess.run(install, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (installed,) = metadata.distributions(name="optcc", path=[str(site)])
    for name in _closure(installed.requires or []):
        _link(metadata.distribution(name), site)
    return environment / "bin" / "optcc"


def _json(command: Path, *words: str) -> dict[str, object]:
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["HOME"] = str(command.parent)
    done = subprocess.run(
        [command, *words, "--json"],
        cwd=command.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_no_extra_is_there(command: Path) -> None:
    python = command.with_name("python")
    extras = ("mpi4py", "isal", "matplotlib", "pytest")
    code = f"from importlib.util import find_spec; print(*filter(find_spec, {extras}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.slow
def test_a_proof_for_all_ranks(command: Path) -> None:
    assert _json(command, "verify", "ring", "--all-ranks")["verdict"] == "proved"


def test_a_proof_of_a_plan(command: Path) -> None:
    answer = _json(command, "verify", "ring", "--topology", "8@1GB/s", "--size", "1MiB")
    assert answer["verdict"] == "proved"


@pytest.mark.slow
def test_a_bound_by_a_linear_program(command: Path, tmp_path: Path) -> None:
    """The closed form, and a topology for which there is none."""
    assert _json(command, "bound", "4@50MB/s,3=25MB/s", "--size", "100MB")["seconds_exact"] == "4/1"
    nic = '{ rail = RAIL, rate = "1GB/s", failed = FAILED }'
    servers = [
        ", ".join(nic.replace("RAIL", str(j)).replace("FAILED", str(j == lost).lower()) for j in (0, 1))
        for lost in (-1, -1, 0, 1)
    ]
    file = tmp_path / "rails.toml"
    file.write_text(
        "rail_only = true\n" + "".join(f"[[servers]]\nnics = [{each}]\n" for each in servers), encoding="utf-8"
    )
    assert _json(command, "bound", str(file), "--size", "1GB")["seconds_exact"] == "1/1"


def test_a_simulation_is_compiled(command: Path) -> None:
    """Two million transfers: plain Python would take minutes for them."""
    answer = _json(command, "simulate", "ring", "--as-written", "--topology", "1024@1GB/s", "--size", "1GiB")
    assert answer["transfers"] == 2 * 1024 * 1023
    assert float(str(answer["transfers_per_second"])) > 100_000
