"""Random runs of the protocol in simulated time, every promise checked: one seed as a story, or many as a record.

    optcc experiment swarm --seed 7 --trace
    optcc experiment swarm --seeds 0:2000
    optcc experiment swarm --seeds 0:100000 -o experiments/records/swarm.json

`optcc.runtime.sim.swarm` says what a seed makes and what is checked. The exit code is 1 if a promise was broken; for
each such seed the command that repeats it is printed. The record is a file of its own format, `optcc-swarm/1`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, head, record_command
from optcc.runtime.sim.swarm import run_seed
from optcc.runtime.sim.swarm_program import Violation
from optcc.show import Card

_BLOCK_SEEDS = 50
SEEDS_MAX = 10**9


class SwarmViolation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seed that broke a promise, and which."""

    seed: int
    what: str


@dataclass(frozen=True, slots=True)
class SwarmRuns(Measured):
    """The runs of `seeds` from the first to before the last: events, simulated and processor seconds, what happened."""

    format: ClassVar[str] = "optcc-swarm/1"
    own_path: ClassVar[Path] = RECORDS / "swarm.json"
    docs_page: ClassVar[str] = ""

    machine: dict[str, Any]
    versions: dict[str, str]
    seeds: tuple[int, int]
    events: int
    simulated_s: float
    processor_s: float
    counts: dict[str, int]
    violations: tuple[SwarmViolation, ...]

    def check_fields(self, check: Check) -> None:
        first, last = self.seeds
        check("seeds", self.seeds, 0 <= first < last, "be a range")
        check("events", self.events, self.events > 0, "be above 0")
        for number, each in enumerate(self.violations):
            check(f"violations[{number}].seed", each.seed, first <= each.seed < last, "be one of the seeds")

    def card(self) -> Card:
        first, last = self.seeds
        rows = (
            ("seeds", f"{first} to {last - 1}"),
            ("violations", str(len(self.violations))),
            ("events", f"{self.events:,}"),
            ("simulated time", f"{self.simulated_s:,.0f} s"),
            ("processor time of a seed", f"{1e3 * self.processor_s / (last - first):.1f} ms"),
            *((name.replace("_", " "), f"{count:,}") for name, count in sorted(self.counts.items())),
        )
        return Card("random runs of the protocol", ("what", "how much"), rows)

    def remarks(self) -> Sequence[str]:
        return [line for each in self.violations for line in (each.what, f"  {repeat_command(each.seed)}")]

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.violations else EXIT_DONE


def repeat_command(seed: int) -> str:
    """The command that repeats a seed."""
    return f"optcc experiment swarm --seed {seed} --trace"


@dataclass(frozen=True)
class SwarmBlock:
    """The sums over a few seeds."""

    events: int
    simulated_s: float
    processor_s: float
    counts: dict[str, int]
    violations: tuple[SwarmViolation, ...]


def run_block(seeds: range) -> SwarmBlock:
    """Runs some seeds in this process."""
    events, simulated_s, started = 0, 0.0, time.process_time()
    counts: Counter[str] = Counter()
    violations: list[SwarmViolation] = []
    for seed in seeds:
        try:
            outcome = run_seed(seed)
        except Violation as violation:
            violations.append(SwarmViolation(seed, str(violation)))
        except Exception as error:  # whatever else a seed makes the protocol raise is a violation as well
            violations.append(SwarmViolation(seed, f"seed {seed}: {type(error).__name__}: {error}"))
        else:
            events, simulated_s = events + outcome.n_events, simulated_s + outcome.simulated_s
            counts.update(outcome.counts)
    return SwarmBlock(events, simulated_s, time.process_time() - started, dict(counts), tuple(violations))


def run_seeds(first: int, last: int, cells: RecordCells = HERE) -> SwarmRuns:
    """Runs the seeds from `first` to before `last`."""
    starts = range(first, last, _BLOCK_SEEDS)
    units = {f"seeds from {at}": (at, min(at + _BLOCK_SEEDS, last)) for at in starts}
    blocks = cells.spread(units, _run_block, SwarmBlock).values()
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(block.counts)
    return SwarmRuns(
        **head(),
        seeds=(first, last),
        events=sum(block.events for block in blocks),
        simulated_s=round(math.fsum(block.simulated_s for block in blocks), 3),
        processor_s=round(math.fsum(block.processor_s for block in blocks), 3),
        counts=dict(sorted(counts.items())),
        violations=tuple(each for block in blocks for each in block.violations),
    )


def _run_block(seeds: tuple[int, int]) -> SwarmBlock:
    return run_block(range(*seeds))


def tell_seed(seed: int, *, trace: bool) -> int:
    """Runs one seed, with its story if there is to be a `trace`; the exit code."""
    try:
        outcome = run_seed(seed, click.echo if trace else None)
    except Violation as violation:
        click.echo(str(violation))
        click.echo(f"  {repeat_command(seed)}")
        return EXIT_REFUTED
    shown = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(outcome.counts.items()) if count)
    click.echo(
        f"seed {seed}: {outcome.n_events} events in {outcome.simulated_s:.3f} simulated s; {shown or 'no fault'}"
    )
    return EXIT_DONE


def parse_seeds(text: str) -> tuple[int, int]:
    """The range A:B.

    >>> parse_seeds("0:2000")
    (0, 2000)
    """
    first, colon, last = text.partition(":")
    if not colon or not (first.isdecimal() and last.isdecimal()) or not int(first) < int(last) <= SEEDS_MAX:
        raise InputError(f"--seeds {text}: must be A:B, A below B, at most {SEEDS_MAX}")
    return int(first), int(last)


@record_command(SwarmRuns, RecordForm(quick={"seeds": "0:100"}, spreads=True, jobs=2, part="seed", output="nowhere"))
@click.option("--seed", type=click.IntRange(0, SEEDS_MAX), help="One seed.")
@click.option("--seeds", metavar="A:B", help="The seeds from A to before B; 0:2000 if neither is given.")
@click.option("--trace", is_flag=True, help="With --seed: tell what happens.")
def command(seed: int | None, seeds: str | None, trace: bool, cells: RecordCells) -> SwarmRuns | int:
    """Run the protocol in simulated time with random messages and faults, and check every promise."""
    if seed is not None:
        if seeds is not None or click.get_current_context().params["output"] is not None:
            raise InputError("--seed goes with neither --seeds nor -o")
        return tell_seed(seed, trace=trace)
    if trace:
        raise InputError("--trace needs --seed")
    return run_seeds(*parse_seeds(seeds or "0:2000"), cells)
