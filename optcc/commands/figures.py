"""`optcc figures`."""

from __future__ import annotations

from pathlib import Path

import click

from optcc.cli import echo_card, echo_json, json_option
from optcc.commands.experiment import commands_of_records
from optcc.paper_figures.build import build


@click.command("figures", epilog="Example: optcc figures --record results/demo.json --out results")
@click.option("--quick", is_flag=True, help="One PNG of each figure, nothing else to look at.")
@click.option(
    "--record",
    "records",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A record; may be repeated. Without it, the records that come with optcc.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("paper_figures/out"),
    show_default=True,
    metavar="DIR",
    help="Where to put the files.",
)
@click.option(
    "--gallery",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write gallery.md there, with a PNG of each figure.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@json_option
def command(
    quick: bool, records: tuple[Path, ...], out: Path, gallery: Path | None, quiet: bool, as_json: bool
) -> None:
    """Draw every figure from records, and write down its numbers for prose (numbers.tex, numbers.json).

    With all records of the papers' claims, as without --record: their table too (claims.md, claims.tex, claims.html).
    Unless --quick: all of it as one page without network, report.html, with timelines to zoom and ask.
    """
    written = build(records, out, quick=quick, commands=commands_of_records(), gallery_folder=gallery)
    if quiet:
        return
    if as_json:
        echo_json(written.as_json())
    else:
        echo_card(written)
        for line in written.left_out:
            click.echo(f"# {line}")
