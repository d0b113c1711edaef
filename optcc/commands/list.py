"""`optcc list`."""

from __future__ import annotations

import click

from optcc.cli import echo_card, echo_json, json_option
from optcc.collective import COLLECTIVES
from optcc.planner import AUTO, LIBRARY
from optcc.show import Card, WholeCard

SUMMARY = "The schedule and the segments that are predicted to be fastest for the size."


def _card() -> Card:
    rows = tuple((each.name, each.collective, each.accepts, each.paper) for each in LIBRARY.values())
    rows = (*rows, (AUTO, "all", "what one of the candidates accepts", SUMMARY))
    return WholeCard("schedules", ("name", "collective", "accepts", "paper"), rows)


@click.command("list", epilog="Example: optcc list --json")
@json_option
def command(as_json: bool) -> None:
    """The schedules of the library: what they compute, which topologies they accept, where they come from."""
    if not as_json:
        echo_card(_card())
        return
    echo_json(
        [
            {
                "name": each.name,
                "collectives": [each.collective],
                "accepts": each.accepts,
                "paper": each.paper,
                "summary": each.summary,
            }
            for each in LIBRARY.values()
        ]
        + [
            {
                "name": AUTO,
                "collectives": [*COLLECTIVES, "alltoallv"],
                "accepts": "what one of the candidates accepts",
                "paper": "",
                "summary": SUMMARY,
            }
        ]
    )
