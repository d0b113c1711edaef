"""The swarm's command: one seed, many seeds, their record."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments import swarm
from optcc.experiments.swarm import SwarmRuns, SwarmViolation, command, parse_seeds, repeat_command, run_seeds
from optcc.runtime.sim.swarm_program import Violation


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_one_seed_tells_its_story() -> None:
    code, output = run("--seed", "3", "--trace")
    assert code == EXIT_DONE
    assert "is delivered" in output and "seed 3: " in output.splitlines()[-1]


def test_the_record_is_the_same_however_many_processes_there_are(tmp_path: Path) -> None:
    code, output = run("--seeds", "0:4", "-o", str(tmp_path / "runs.json"))
    runs = SwarmRuns.read(tmp_path / "runs.json")
    again = run_seeds(0, 4)
    assert code == EXIT_DONE and "violations" in output
    assert (runs.events, runs.simulated_s, runs.counts) == (again.events, again.simulated_s, again.counts)
    assert runs.violations == ()


def test_a_violation_ends_in_1_and_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, log: object = None) -> None:
        raise Violation(f"seed {seed}: wrong bytes")

    monkeypatch.setattr(swarm, "run_seed", broken)
    for arguments in (("--seed", "7"), ("--seeds", "7:8", "--jobs", "1")):
        code, output = run(*arguments)
        assert code == EXIT_REFUTED
        assert "seed 7: wrong bytes" in output and repeat_command(7) in output
    assert run_seeds(7, 8).violations == (SwarmViolation(7, "seed 7: wrong bytes"),)


@pytest.mark.parametrize("text", ["5:3", "3:3", "3", "a:b", "0:9999999999"])
def test_seeds_that_are_no_range_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="must be A:B"):
        parse_seeds(text)


@pytest.mark.parametrize("arguments", [("--trace",), ("--seed", "1", "--seeds", "0:2")])
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(InputError):
        run(*arguments)
