"""What people do to a command line: interrupts, full disks, pipes, files that exit, numbers that are none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optcc import cli

RING = ("ring", "--topology", "2@1GB/s", "--size", "1KiB")

SWALLOWED = """
import ctypes, os, signal, sys
import click
from optcc.cli import main

# What a shell starts in the background ignores interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

@ctypes.CFUNCTYPE(None)
def callback():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # Python runs the handler between two instructions
        pass

@click.command()
def command():
    callback()
    print("went on")

main([], command)
"""


def _run(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    argv = ["-c", code] if code else ["-m", *words]
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120)


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert cli.run([*words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("optcc: ")
    return err


def test_an_interrupt_inside_a_callback_of_c_code_counts() -> None:
    """ctypes, and so llvmlite's object cache, drops the exception: the command goes on, but does not end with 0."""
    done = _run(code=SWALLOWED)
    assert done.stdout == "went on\n"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "optcc: interrupted")


@pytest.mark.battery(41)
def test_an_interrupt_elsewhere_ends_the_command_at_once() -> None:
    done = _run(code=SWALLOWED.replace("@ctypes.CFUNCTYPE(None)", ""))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\noptcc: interrupted\n")


@pytest.mark.battery(41)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("verify", *RING), ("--help",)])
def test_a_full_disk_is_one_error(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "optcc", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (1, "optcc: output: No space left on device\n")


def test_more_than_there_is_memory_is_one_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate 1000. GiB")

    monkeypatch.setattr("optcc.experiments.bench_messages.make_input", refuse)
    words = ("bench", "--transport", "loopback", "--topology", "2@1GB/s", "-b", "1K")
    assert _refused(capsys, *words) == "optcc: out of memory: Unable to allocate 1000. GiB\n"


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "mine.py': cannot be imported: SystemExit: 0"), ("function", "mine.py:5: SystemExit: 0")],
)
@pytest.mark.parametrize("command", ["compile", "verify"])
def test_a_schedule_that_exits_is_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str, message: str, command: str
) -> None:
    file = tmp_path / "mine.py"
    lines = ["import sys", "from optcc.dsl import schedule", "@schedule", "def mine(program):", "    sys.exit(0)"]
    file.write_text("\n".join([*lines, *(["sys.exit(0)"] if place == "file" else [])]), encoding="utf-8")
    output = ("-o", str(tmp_path / "plan")) if command == "compile" else ()
    assert message in _refused(capsys, command, f"{file}:mine", *RING[1:], *output)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("statement", ["1 / 0", "sys.exit(0)", "topology.nothing"])
def test_a_mistake_in_configure_is_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, statement: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys\nfrom optcc.dsl import schedule\n"
        f"def configure(topology):\n    return {{'x': {statement}}}\n"
        "@schedule(configure=configure)\ndef mine(program, x):\n    pass\n",
        encoding="utf-8",
    )
    assert "mine.py:4: configure: " in _refused(capsys, "verify", f"{file}:mine", *RING[1:])


@pytest.mark.parametrize("words", [("verify",), ("simulate", "--topology", "2@1GB/s")])
def test_a_pipe_as_a_plan_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Nobody writes to it: to open it would wait for ever."""
    pipe = tmp_path / "plan"
    os.mkfifo(pipe)
    assert "must be a file, not a pipe" in _refused(capsys, words[0], "--plan", str(pipe), *words[1:])


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "soon"])
def test_a_deadline_is_a_time(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    bench = ("bench", "--transport", "loopback", "--topology", "2@1GB/s", "-b", "1K", "--deadline", seconds)
    rule = f"{seconds!r}: must be a number of seconds above zero"
    assert f"--deadline {rule}" in _refused(capsys, *bench)
    assert f"--time-limit {rule}" in _refused(capsys, "bound", "2@1GB/s", "--size", "8", "--time-limit", seconds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--eps", "-1"), "--eps '-1': must not be negative"),
        (("--eps", "x"), "--eps 'x': must be a number such as 2, 1.5 or 8/7"),
        (("--eps", "nan"), "--eps 'nan': must be a number"),
        (("--eps", "1/0"), "--eps '1/0': must be a number"),
        (("--slowdown", "1:x"), "--slowdown 'x': must be a number"),
        (("--slowdown", "1:8"), "--slowdown: the topology must have one endpoint that is slower"),
    ],
)
def test_claims_are_numbers(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert message in _refused(capsys, "verify", *RING, *words)


ROOT = Path(__file__).parents[2]
ENTRIES = sorted(
    ".".join(("optcc", *path.relative_to(ROOT).with_suffix("").parts))
    for path in (ROOT / "experiments").rglob("*.py")
    if re.search(r"^if __name__ == ", path.read_text(encoding="utf-8"), re.MULTILINE)
)


ALL_IN_ONE = """
import contextlib, io, json, runpy, sys
told = {}
for module in sys.argv[1:]:
    out, err, sys.argv = io.StringIO(), io.StringIO(), [module, "--nonsense"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code
    told[module] = [code, out.getvalue(), err.getvalue()]
    sys.modules.pop(module, None)
print(json.dumps(told))
"""
"""In one process, which imports once what all of them import."""


def test_every_entry_point_reads_options(tmp_path: Path) -> None:
    """An option that there is not is refused, and not taken for the name of a file."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, *ENTRIES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == ENTRIES
    for module, (code, out, err) in told.items():
        assert (code, out) == (2, ""), module
        assert "No such option" in err, module
    assert list(tmp_path.iterdir()) == []


def test_there_are_entry_points() -> None:
    assert {"optcc.experiments.docs_tables", "optcc.experiments.peers_rank"} <= set(ENTRIES)
