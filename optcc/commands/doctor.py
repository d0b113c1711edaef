"""`optcc doctor`: what this host has, what is misconfigured, why it matters and what to do."""

from __future__ import annotations

import dataclasses

import click

from optcc.cli import echo_card, echo_json, json_option
from optcc.errors import EXIT_DONE, EXIT_REFUTED
from optcc.runtime.doctor.examine import examine
from optcc.runtime.doctor.finding import NOTE, OK, RANKS, RANKS_HERE, WRONG, Finding, Need
from optcc.runtime.doctor.system import Host
from optcc.show import Card, Shown


@dataclasses.dataclass(frozen=True)
class Findings(Shown):
    """Findings to be shown, the worst first: a long card is cut at its end."""

    findings: tuple[Finding, ...]

    def card(self) -> Card:
        worst_first = sorted(self.findings, key=lambda each: (WRONG, NOTE, OK).index(each.verdict))
        rows = tuple((each.verdict, each.area, each.name, each.value) for each in worst_first)
        wrong = sum(each.verdict == WRONG for each in self.findings)
        return Card(f"{len(rows)} findings, {wrong} wrong", ("verdict", "area", "what", "value"), rows)


@click.command("doctor", epilog="Example: optcc doctor --ranks 16 --ranks-here 8")
@click.option("--ranks", type=int, default=RANKS, show_default=True, help="Ranks of the largest job.")
@click.option("--ranks-here", type=int, default=None, help="How many of them on this host; 8, or all if fewer.")
@click.option("--all", "everything", is_flag=True, help="Also say why each thing that is ok matters.")
@json_option
def command(ranks: int, ranks_here: int | None, everything: bool, as_json: bool) -> int:
    """Look at NICs, MPI, UCX, GPU, limits, namespaces, processors, packages and the cache of this host.

    Exits with 0 if nothing is wrong, 1 if something is. A note is no fault: something is missing that only some
    commands need, or is slower than it must be. Nothing is changed.
    """
    need = Need(ranks, min(RANKS_HERE, max(1, ranks)) if ranks_here is None else ranks_here)
    findings = examine(Host(), need)
    wrong = [each for each in findings if each.verdict == WRONG]
    if as_json:
        counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in (OK, NOTE, WRONG)}
        echo_json({"findings": [dataclasses.asdict(each) for each in findings], **counts})
    else:
        echo_card(Findings(tuple(findings)))
        for each in findings:
            if everything or each.verdict != OK:
                click.echo(
                    f"{each.verdict}: {each.area}, {each.name}: {each.why}" + (f"\n    {each.do}" if each.do else "")
                )
    return EXIT_REFUTED if wrong else EXIT_DONE
