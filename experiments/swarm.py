"""Random runs of the protocol in simulated time, every promise checked: one seed as a story, or many as a record.

    optcc experiment swarm --seed 7 --trace
    optcc experiment swarm --seeds 0:2000
    optcc experiment swarm --seeds 0:100000 -o experiments/records/swarm.json

`optcc.runtime.sim.swarm` says what a seed makes and what is checked. The exit code is 1 if a promise was broken; for
each such seed the command that repeats it is printed. The record is a file of its own format, `optcc-swarm/1`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.cli import echo_card
from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, head
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
    counts: Counter[str]
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
    return SwarmBlock(events, simulated_s, time.process_time() - started, counts, tuple(violations))


def run_seeds(first: int, last: int, jobs: int) -> SwarmRuns:
    """Runs the seeds from `first` to before `last` in so many processes."""
    blocks = [range(at, min(at + _BLOCK_SEEDS, last)) for at in range(first, last, _BLOCK_SEEDS)]
    total = SwarmBlock(0, 0.0, 0.0, Counter(), ())
    for number, block in enumerate(_run_blocks(blocks, jobs), start=1):
        total = SwarmBlock(
            total.events + block.events,
            total.simulated_s + block.simulated_s,
            total.processor_s + block.processor_s,
            total.counts + block.counts,
            total.violations + block.violations,
        )
        if sys.stderr.isatty():
            done = min(first + number * _BLOCK_SEEDS, last) - first
            click.echo(f"\r{done} of {last - first} seeds, {len(total.violations)} violations", nl=False, err=True)
    if sys.stderr.isatty():
        click.echo(err=True)
    return SwarmRuns(
        **head(),
        seeds=(first, last),
        events=total.events,
        simulated_s=round(total.simulated_s, 3),
        processor_s=round(total.processor_s, 3),
        counts=dict(sorted(total.counts.items())),
        violations=total.violations,
    )


def _run_blocks(blocks: Sequence[range], jobs: int) -> Iterator[SwarmBlock]:
    if jobs == 1:
        yield from map(run_block, blocks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_block, blocks)


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


@click.command()
@click.option("--seed", type=click.IntRange(0, SEEDS_MAX), help="One seed.")
@click.option("--seeds", metavar="A:B", help="The seeds from A to before B; 0:2000 if neither is given.")
@click.option("--trace", is_flag=True, help="With --seed: tell what happens.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Processes.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a record of the seeds there."
)
def command(seed: int | None, seeds: str | None, trace: bool, jobs: int, output: Path | None) -> int:
    """Run the protocol in simulated time with random messages and faults, and check every promise."""
    if seed is not None:
        if seeds is not None or output is not None:
            raise InputError("--seed goes with neither --seeds nor -o")
        return tell_seed(seed, trace=trace)
    if trace:
        raise InputError("--trace needs --seed")
    runs = run_seeds(*parse_seeds(seeds or "0:2000"), jobs)
    if output is not None:
        runs.write_made(output)
    echo_card(runs)
    for line in runs.remarks():
        click.echo(line)
    return runs.exit_code
