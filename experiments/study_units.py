"""What the options of a study may be, and how its record says them."""

from __future__ import annotations

from optcc.errors import InputError
from optcc.experiments.failure_model import WORDS

TRIALS_MAX = 10**5


def check_numbers(trials: int, seed: int) -> None:
    """Raises InputError if an option of a study is out of range."""
    if not 1 <= trials <= TRIALS_MAX:
        raise InputError(f"--trials {trials}: must be from 1 to {TRIALS_MAX}")
    if not 0 <= seed < WORDS:
        raise InputError(f"--seed {seed}: must be from 0 to 2**64 - 1")


def command_for(study: str, trials: int, seed: int, *, quick: bool) -> tuple[str, ...]:
    """The command that makes the record."""
    options = ("--trials", str(trials), "--seed", str(seed), *(("--quick",) if quick else ()))
    return ("optcc", "study", study, *options)
