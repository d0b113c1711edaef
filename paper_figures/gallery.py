"""The page of the manual with every figure: what it says, its records, and the commands that make it again.

`optcc figures --quick --gallery docs` writes it, from the modules of the figures and the records that come along.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optcc.experiments.made import said_date
from optcc.paper_figures.report import command_of, provenances
from optcc.paper_figures.sources import Source

FILE = "gallery.md"
_WIDTH = 135
_HEAD = """# Gallery
"""
_INTRODUCTION = (
    "Every figure of the records in `experiments/records/`: what it says, what it is drawn from, and the commands that "
    "make the figure and the record again. This page is written by `optcc figures --quick --gallery docs`; "
    "`optcc figures` alone draws all of them for print (PDF, SVG, PNG), with their numbers for prose (`numbers.tex`, "
    "`numbers.json`) and the page `report.html`. Records that no figure is about are tables there."
)


@dataclass(frozen=True)
class Exhibit:
    """A figure: its name, what it says, and the records that it is drawn from."""

    name: str
    says: str
    sources: tuple[Source, ...]

    @property
    def picture(self) -> str:
        """The file of its picture."""
        return f"{self.name}.png"


def page(shown: Sequence[Exhibit], commands: Mapping[str, str]) -> str:
    """The page; `commands` has by which command a record of that file name is made."""
    return "\n".join([_HEAD, f"{_wrapped(_INTRODUCTION)}\n", *(_section(each, commands) for each in shown)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _section(each: Exhibit, commands: Mapping[str, str]) -> str:
    files = " ".join(f"--record experiments/records/{source.name}" for source in each.sources)
    lines = [f"    optcc figures {files} --out figures", *(_made(source, commands) for source in each.sources)]
    records = ", ".join(f"`{source.name}` ({_when(source)})" for source in each.sources)
    code = "\n".join(lines)
    return f"""## {each.name}

{_wrapped(each.says)}

![{each.name}]({each.picture})

From {records}.

{code}
"""


def _made(source: Source, commands: Mapping[str, str]) -> str:
    return f"    {command_of(source, commands)}"


def _when(source: Source) -> str:
    """When its measurements ended, in words."""
    dates = dict.fromkeys(each.date for each in provenances(source))
    return f"measured {' and '.join(dates)}" if dates != {said_date(source.made): None} else said_date(source.made)
