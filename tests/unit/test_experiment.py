"""`optcc experiment`: every record has its command, and nothing is written before it is asked for."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc import cli
from optcc.commands.experiment import EXPERIMENTS, LIST, NOT_MADE, OTHERWISE
from optcc.errors import EXIT_BAD_INPUT, EXIT_DONE
from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.made import made_of, said_code, said_date, unstamped
from optcc.experiments.record import RECORDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.fixture(autouse=True)
def handler_is_kept() -> Iterator[None]:
    """The command sets a handler of SIGTERM, which later tests are not to have."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_lets_clean_up_run() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert cli.run(["experiment", LIST]) == EXIT_DONE
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_every_record_is_made_by_one_experiment() -> None:
    made = [each.record for each in EXPERIMENTS.values()]
    assert len(set(made)) == len(made)
    assert {each.name for each in RECORDS.glob("*.json")} - set(OTHERWISE) == set(made)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_writes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli.optcc, ["experiment", name, "--help"])
    assert said.exit_code == EXIT_DONE
    assert f"experiment {name} [OPTIONS]" in said.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_option_that_there_is_not_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["experiment", name, "--nonsense"]) == EXIT_BAD_INPUT
    assert "No such option" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_take_a_file_for_their_record(name: str) -> None:
    options = [word for each in EXPERIMENTS[name].load().params for word in each.opts]
    assert "-o" in options


@pytest.mark.parametrize("name", [name for name, each in EXPERIMENTS.items() if "emulated hosts" in each.needs])
def test_what_runs_on_emulated_hosts_has_peers_or_says_why_not(name: str) -> None:
    peers, _, reason = EXPERIMENTS[name].peers.partition(":")
    if peers == "none":
        assert reason.strip()
        return
    measured = (RECORDS / EXPERIMENTS[name].record).read_text("utf-8").lower()
    for peer in peers.split(", "):
        assert peer
        assert f'"{peer.lower()}' in measured or f" {peer.lower()}" in measured


def test_the_list_says_what_each_answers() -> None:
    said = CliRunner().invoke(cli.optcc, ["experiment", LIST, "--json"])
    found = {each["name"]: each for each in json.loads(said.output)}
    assert set(found) == set(EXPERIMENTS)
    assert found["bound-curves"]["record"] == BoundCurves.own_path.name
    assert all(each["question"] for each in found.values())
    for each in found.values():
        made = made_of((RECORDS / each["record"]).read_bytes())
        assert (each["made"], each["code"]) == (said_date(made), said_code(made))


def test_a_record_that_is_not_there_is_not_made_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcc.commands.experiment.RECORDS", tmp_path)
    said = CliRunner().invoke(cli.optcc, ["experiment", LIST, "--json"])
    assert {each["made"] for each in json.loads(said.output)} == {NOT_MADE}


@pytest.mark.slow
def test_an_experiment_writes_the_record_that_comes_with_the_package(tmp_path: Path) -> None:
    assert cli.run(["experiment", "bound-curves", "-o", str(tmp_path / "curves.json")]) == EXIT_DONE
    assert unstamped((tmp_path / "curves.json").read_bytes()) == unstamped(BoundCurves.own_path.read_bytes())


def test_a_name_that_resembles_one_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["experiment", "swrm"]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == "optcc: No such experiment 'swrm'; did you mean swarm?\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_experiments_that_there_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"optcc experiment ([a-z-]+)", text))
    assert names <= {LIST, *EXPERIMENTS}
    modules = {each.module for each in EXPERIMENTS.values()}
    assert not modules & set(re.findall(r"python -m (optcc[a-z_.]+)", text))
