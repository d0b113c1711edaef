"""One page with everything: the papers' claims, every figure, timelines to zoom and ask, the records.

`page` makes it; it needs no network and no other file, and the same records give the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from optcc.experiments.claims import ClaimsTable
from optcc.experiments.made import UNKNOWN, said_code, said_date
from optcc.experiments.seen_failure import SeenFailure
from optcc.paper_figures import claims_table, interactive, report_timelines
from optcc.paper_figures.claims_table import as_html_text
from optcc.paper_figures.sources import Source
from optcc.show import Card, Shown

FILE = "report.html"
TITLE = "optcc: claims, figures, timelines, records"
_GIB = 2**30
NO_BOKEH = (
    "The timelines are not here, since Bokeh was not installed where this page was made: pip install 'optcc[viz]'"
)
_STYLE = (
    "body{font:14px/1.45 sans-serif;color:#1a1a1a;margin:2em auto;max-width:1150px;padding:0 1em}"
    "h1{font-size:1.6em}h2{border-bottom:2px solid #1a1a1a;margin-top:2.5em}h3{margin:2em 0 .3em}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em}.wide{overflow-x:auto}"
    "th,td{border-bottom:1px solid #ccc;padding:.25em .6em;text-align:left;vertical-align:top}"
    "thead th{border-bottom:2px solid #1a1a1a}figure{margin:1em 0 2.5em}figure img{max-width:100%;zoom:1.4}"
    ".from{color:#5f5f5f;font-size:.9em}summary{cursor:pointer}#records td{overflow-wrap:anywhere;min-width:5em}"
    "nav a{margin-right:1.5em}"
)


@dataclass(frozen=True)
class ReportFigure:
    """A figure: its picture in a form that a browser shows, what it says, and the records that it was made from."""

    name: str
    says: str
    picture: bytes
    media: str
    sources: tuple[Source, ...]


def page(
    read: Sequence[Source],
    figures: Sequence[ReportFigure],
    claims: ClaimsTable | None,
    commands: Mapping[str, str],
) -> bytes:
    """The page of the records `read`. `commands` has by which command a record of that file name is made.

    `claims` is None if the records are not all those of the claims. Timelines are there if a record of a failure that
    was seen is, and Bokeh.
    """
    seen = [source.record for source in read if isinstance(source.record, SeenFailure)]
    parts = {
        "claims": ("The papers' claims", "" if claims is None else _claims(claims)),
        "figures": ("Figures", "".join(_figure(each, commands) for each in figures)),
        "timelines": ("Timelines", "".join(_timelines(seen))),
        "tables": ("Records without a figure", "".join(tables(read, figures, commands))),
        "records": ("Records", _records(read, figures, claims, commands)),
    }
    there = {name: part for name, part in parts.items() if part[1]}
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, (title, _) in there.items())
    body = "".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>\n{text}</section>\n' for name, (title, text) in there.items()
    )
    head = f'<meta charset="utf-8"><title>{escape(TITLE)}</title><style>{_STYLE}</style>'
    said = "Made by <code>optcc figures</code> from records, and from nothing else."
    top = f"<h1>{escape(TITLE)}</h1>\n<p>{said}</p>\n<nav>{links}</nav>\n"
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{top}{body}</body>\n</html>\n'.encode()


def _claims(claims: ClaimsTable) -> str:
    return f"<p>{escape(claims.counts())}</p>\n" + "".join(
        f'<div class="wide">{each}</div>\n' for each in claims_table.html_tables(claims)
    )


def _figure(figure: ReportFigure, commands: Mapping[str, str]) -> str:
    data = base64.b64encode(figure.picture).decode()
    name = escape(figure.name)
    made = ", ".join(f"{source.name} ({command_of(source, commands)})" for source in figure.sources)
    return (
        f'<figure id="figure-{name}"><figcaption><h3>{name}</h3><p>{as_html_text(figure.says)}</p></figcaption>'
        f'<img alt="{name}" src="data:{figure.media};base64,{data}">'
        f'<p class="from">From {escape(made)}.</p></figure>\n'
    )


def _timelines(seen: Sequence[SeenFailure]) -> Iterator[str]:
    """The groups of charts, and the library that draws them."""
    if not seen:
        return
    if not interactive.is_installed():
        yield f"<p>{escape(NO_BOKEH)}</p>\n"
        return
    yield (
        "<p>Drag to move along the time, turn the wheel to zoom, point at a bar to see what it is; "
        "an entry of a legend shows and hides its bars.</p>\n"
    )
    yield f"<script>{interactive.library()}</script>\n"
    for at, record in enumerate(seen):
        for number, group in enumerate(report_timelines.groups(record)):
            target = f"timeline-{at}-{number}"
            yield f"<h3>{escape(group.title)}</h3><p>{as_html_text(group.says)}</p>\n"
            yield f'<div class="timeline" id="{target}"></div>\n'
            yield f"<script>Bokeh.embed.embed_item({interactive.item(group.charts, target)});</script>\n"


def tables(read: Sequence[Source], figures: Sequence[ReportFigure], commands: Mapping[str, str]) -> Iterator[str]:
    """The tables of the records that are in no figure."""
    drawn = {source.name for figure in figures for source in figure.sources}
    for source in read:
        if source.name not in drawn and isinstance(source.record, Shown):
            card = source.record.card()
            yield (
                f'<details id="table-{escape(source.name)}">'
                f"<summary>{escape(source.name)}: {escape(card.title)}</summary>"
                f'<div class="wide">{claims_table.html_table(card)}</div>'
                f'<p class="from">{escape(command_of(source, commands))}</p></details>\n'
            )


# Records


def _records(
    read: Sequence[Source], figures: Sequence[ReportFigure], claims: ClaimsTable | None, commands: Mapping[str, str]
) -> str:
    """Where each record comes from."""
    rows = []
    claimed = set() if claims is None else {name.partition(" ")[0] for row in claims.rows for name in row.records}
    for source in read:
        drawn = [figure.name for figure in figures if source in figure.sources]
        shown = [*drawn, *(["claims"] if source.name.removesuffix(".json") in claimed else [])]
        if not drawn and isinstance(source.record, Shown):
            shown.append("table")
        for each in provenances(source):
            command = " ".join(each.command) or commands.get(source.name, UNKNOWN)
            where = (each.date, each.code, each.machine, each.versions, source.sha256)
            rows.append((source.name, ", ".join(shown) or "-", command, *where))
    columns = ("record", "shown in", "made by", "date", "code", "machine", "versions", "SHA-256")
    return f'<div class="wide">{claims_table.html_table(Card("", columns, tuple(rows)))}</div>'


def command_of(source: Source, commands: Mapping[str, str]) -> str:
    """By which command a record is made again."""
    recorded = provenances(source)[0].command
    return commands.get(source.name) or " ".join(recorded) or f"by a command that is {UNKNOWN}"


@dataclass(frozen=True)
class Provenance:
    """What a record says of where a measurement was made, in words; `UNKNOWN` where it does not.

    `code` says whether what it measures has changed since.
    """

    command: tuple[str, ...]
    date: str
    code: str
    machine: str
    versions: str


def provenances(source: Source) -> tuple[Provenance, ...]:
    """One for each session of a record that has several, else one."""
    sessions: Sequence[Any] = getattr(source.record, "sessions", ()) or (source.record,)
    return tuple(
        Provenance(
            tuple(getattr(each, "command", ())),
            getattr(each, "finished", said_date(source.made)),
            said_code(source.made),
            _words(getattr(each, "machine", {})),
            _words(_versions(each)),
        )
        for each in sessions
    )


def _versions(record: object) -> dict[str, Any]:
    """Of packages, of other tools, and of the two checkouts of a comparison."""
    found: dict[str, Any] = dict(getattr(record, "versions", {}))
    found |= dict(getattr(record, "tools", {}))
    torch = getattr(record, "torch", None)
    found |= {"torch": torch} if isinstance(torch, str) else {}
    for side in ("old", "new"):
        commit = getattr(getattr(record, side, None), "commit", None)
        found |= {side: commit} if commit else {}
    return found


def _words(values: Mapping[str, Any]) -> str:
    said = [
        f"memory {value / _GIB:.1f} GiB" if name == "memory_bytes" else f"{name} {value}"
        for name, value in values.items()
    ]
    return ", ".join(said) or UNKNOWN
