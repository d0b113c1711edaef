"""A campaign against the verifier: mutants by the hundred thousand, each judged by two verifiers that share no code.

    python -m tests.differential.campaign --mutants 100000 --seed 1 --jobs 2 [--out FILE.json]

Mutants that a constructor refuses, and those that take the naive verifier too many states, do not count: others take
their place until the asked number has been judged. The large ones are still judged, by the naive verifier's least
states alone, and counted apart. Prints what came out by level, by mistake and by schedule, and every disagreement with
the number from which `tests.differential.mutants.draw_mutant` makes the mutant again. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.differential.mutants import REFUSED, TOO_LARGE, Mutant, draw_mutant, judge

STATES_MAX = 1_000_000
"""A mutant with more states than this, over some tenths of a second of work, is too large."""
CHUNK = 100
SEEDS_PER_CAMPAIGN = 10**8
CHUNK_SECONDS_MAX = 600.0
DIFFERENCES_SHOWN_MAX = 20
OUTCOMES = (*("matching", "deadlock", "races", "result", "agreement", "still right", "unknown", REFUSED, TOO_LARGE),)


@dataclass
class Tally:
    """What came out: `counts[heading, name, outcome]`, and the disagreements."""

    drawn: int = 0
    judged: int = 0
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def add(self, mutant: Mutant, outcome: str) -> None:
        """Counts one mutant under every heading."""
        self.drawn += 1
        self.judged += outcome not in (REFUSED, TOO_LARGE)
        base = mutant.base
        for heading, name in (
            ("all", "all"),
            ("level", mutant.level),
            *(("mistake", f"{mutant.level}: {operator}") for operator in mutant.operators),
            ("schedule", base.name),
            ("ranks", str(base.ranks)),
            ("slots", str(base.slots)),
            ("fused", str(base.fused)),
            ("ports", base.ports),
        ):
            self.counts[heading, name, outcome] += 1
        if outcome == REFUSED:
            self.counts["refused by", mutant.refused, outcome] += 1

    def merge(self, other: Tally) -> None:
        """Adds what another one counted."""
        self.drawn += other.drawn
        self.judged += other.judged
        self.counts += other.counts
        self.differences += other.differences

    def total(self, outcome: str) -> int:
        """Mutants with this outcome."""
        return self.counts["all", "all", outcome]

    def table(self) -> str:
        """The counts as text."""
        lines = []
        seen = [outcome for outcome in OUTCOMES if self.total(outcome)]
        width = max(len(name) for _, name, _ in self.counts) if self.counts else 0
        for heading in dict.fromkeys(heading for heading, _, _ in self.counts):
            lines.append(f"{heading:{width}}  " + "  ".join(seen))
            for name in sorted({name for each, name, _ in self.counts if each == heading}):
                row = (f"{self.counts[heading, name, outcome]:>{len(outcome)}}" for outcome in seen)
                lines.append(f"{name:{width}}  " + "  ".join(row))
            lines.append("")
        return "\n".join(lines)


def judge_seed(seed: int, tally: Tally, states_max: int = STATES_MAX) -> None:
    """Draws, judges and counts one mutant."""
    mutant = draw_mutant(seed)
    if mutant.plan is None:
        tally.add(mutant, REFUSED)
        return
    judgement = judge(mutant.plan, states_max)
    outcome = judgement.outcome
    if outcome == TOO_LARGE:
        judgement = judge(mutant.plan, states_max, way="least")
        tally.counts["too large, by least states", judgement.outcome, TOO_LARGE] += 1
    tally.add(mutant, outcome)
    if judgement.difference:
        tally.differences.append(f"{mutant}: {judgement.difference}")


def judge_chunk(first: int) -> Tally:
    """The tally of `CHUNK` seeds; an exception is a disagreement too."""
    tally = Tally()
    for seed in range(first, first + CHUNK):
        try:
            judge_seed(seed, tally)
        except Exception as error:  # a crash of either verifier must name its mutant, and not end the campaign
            tally.differences.append(f"mutant {seed}: {type(error).__name__}: {error}")
    return tally


def run(mutants: int, seed: int, jobs: int, tell: Callable[[str], None]) -> Tally:
    """Judges `mutants` mutants of campaign `seed` on `jobs` processes."""
    tally = Tally()
    first = seed * SEEDS_PER_CAMPAIGN
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        while tally.judged < mutants and len(tally.differences) < DIFFERENCES_SHOWN_MAX:
            chunks = max(1, -(-(mutants - tally.judged) // CHUNK))
            results = pool.imap(judge_chunk, range(first, first + chunks * CHUNK, CHUNK))
            for done in range(chunks):
                tally.merge(results.next(CHUNK_SECONDS_MAX))
                if done % 100 == 99:
                    tell(f"{tally.judged} judged of {tally.drawn}, {len(tally.differences)} disagreements")
            first += chunks * CHUNK
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100_000, help="how many to judge")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="where to write the counts as JSON")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    tally = run(options.mutants, options.seed, options.jobs, lambda line: print(line, file=sys.stderr))
    seconds = time.monotonic() - start
    print(tally.table())
    print(f"seed {options.seed}: {tally.judged} judged of {tally.drawn} drawn in {seconds:.0f} s")
    for difference in tally.differences[:DIFFERENCES_SHOWN_MAX]:
        print(f"DISAGREEMENT {difference}")
    if options.out is not None:
        rows = [[*key, count] for key, count in sorted(tally.counts.items())]
        record = {"seed": options.seed, "judged": tally.judged, "drawn": tally.drawn, "seconds": round(seconds, 1)}
        text = json.dumps(record | {"differences": tally.differences, "counts": rows}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 1 if tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
