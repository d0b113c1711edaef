"""The table of the papers' claims as Markdown, LaTeX (booktabs) and HTML, from one source.

The claims are those of `optcc.experiments.paper_claims`; every number of ours in the table is computed from a record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape

from optcc.experiments.claims import COLUMNS, ClaimsTable, table_of
from optcc.experiments.paper_claims import CLAIMS
from optcc.experiments.record import Recorded
from optcc.paper_figures.numbers import Number, escaped
from optcc.show import Card

NAME = "claims"
TITLE = "What the papers state, and ours"
_WIDTHS = ("", *(f"p{{{share}\\linewidth}}" for share in (0.15, 0.1, 0.12, 0.11, 0.1, 0.14, 0.09)))
"""Columns in LaTeX: the key as wide as it is, then shares of a line, as on a page in landscape."""
_TEX_HEAD = r"""% Made by `optcc figures` from records. Do not edit.
% Needs \usepackage{booktabs,longtable}, and a page in landscape.
"""
_STYLE = (
    "body{font:14px/1.4 sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
    "th,td{border-bottom:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
    "thead th{border-bottom:2px solid #1a1a1a}"
)


def table(records: Sequence[tuple[str, Recorded]]) -> ClaimsTable:
    """The table from records with the names of their files. Raises InputError if a kind is not there just once."""
    return table_of(CLAIMS, records)


def files(claims: ClaimsTable) -> dict[str, bytes]:
    """The table in each form, by the name of its file."""
    return {
        f"{NAME}.md": f"# {TITLE}\n\n{claims.markdown()}".encode(),
        f"{NAME}.tex": as_tex(claims),
        f"{NAME}.html": as_html(claims),
    }


def as_tex(claims: ClaimsTable) -> bytes:
    """A `longtable` for each paper, with the rules of booktabs."""
    parts = [f"{_TEX_HEAD}\\noindent {_tex(claims.counts())}\n", *(_tex_table(card) for card in claims.cards())]
    return "\n".join(parts).encode()


def _tex_table(card: Card) -> str:
    head = " & ".join(map(_tex, card.columns))
    rows = (" & ".join(map(_tex, row)) for row in card.rows)
    lines = (
        rf"\begin{{longtable}}{{@{{}}l{''.join(_WIDTHS)}@{{}}}}",
        rf"\caption{{{_tex(card.title)}}}\\",
        rf"\toprule {head} \\ \midrule \endfirsthead",
        rf"\toprule {head} \\ \midrule \endhead",
        r"\bottomrule \endfoot",
        *(rf"{row} \\" for row in rows),
        r"\end{longtable}",
    )
    return "".join(f"{line}\n" for line in lines)


def as_html(claims: ClaimsTable) -> bytes:
    """A page that needs nothing else."""
    tables = "".join(html_tables(claims))
    head = f'<meta charset="utf-8"><title>{as_html_text(TITLE)}</title><style>{_STYLE}</style>'
    body = f"<h1>{as_html_text(TITLE)}</h1>\n<p>{as_html_text(claims.counts())}</p>\n{tables}"
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}</body>\n</html>\n'.encode()


def html_tables(claims: ClaimsTable, heading: str = "h2") -> Iterator[str]:
    """A heading and a table for each paper."""
    for card in claims.cards():
        yield f"<{heading}>{as_html_text(card.title)}</{heading}>\n{html_table(card)}"


def html_table(card: Card) -> str:
    """All rows of a card, without its title."""
    heads = "".join(f"<th>{as_html_text(column)}</th>" for column in card.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{as_html_text(cell)}</td>' for cell in row)}</tr>\n" for row in card.rows)
    body = f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>"
    return f"<table>\n{body}\n</table>\n"


def numbers(claims: ClaimsTable) -> dict[str, Number]:
    """Each value as `KEY/simulated`, with its text; and its verdict as `KEY/verdict`."""
    found: dict[str, Number] = {}
    for row in claims.rows:
        for column in COLUMNS:
            if column in row.found:
                found[f"{row.claim.key}/{column}"] = Number(row.found[column].most, _plain(row.found[column].text))
        found[f"{row.claim.key}/verdict"] = Number(str(row.outcome), str(row.outcome))
    return found


def _with_code(text: str, plain: Callable[[str], str], code: str) -> str:
    """`text` with what is between backquotes put into `code`, and every part through `plain`."""
    parts = re.split("`([^`]*)`", text)
    return "".join(code.format(plain(part)) if at % 2 else plain(part) for at, part in enumerate(parts))


def _plain(text: str) -> str:
    return text.replace("`", "")


def _tex(text: str) -> str:
    return _with_code(text, escaped, r"\texttt{{{}}}")


def as_html_text(text: str) -> str:
    """`text`, what is between backquotes as code."""
    return _with_code(text, escape, "<code>{}</code>")
