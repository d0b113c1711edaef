"""`Number`: a value from a record and how prose writes it; files of them for TeX and for programs.

Use `\\input{numbers}` and then `\\optccnumber{allreduce-bars-64MiB-4ranks/half/optcc/seconds}`; TeX stops at a
key that does not exist, so text cannot cite a number that is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from optcc.errors import InputError

_HEADER = r"""% Made by `optcc figures` from records. Do not edit.
\providecommand{\optccnumber}[1]{%
  \ifcsname optcc/#1\endcsname\csname optcc/#1\endcsname\else\errmessage{optcc: there is no number #1}\fi}
"""
_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {each: "\\" + each for each in "{}#$%&_"}


@dataclass(frozen=True, slots=True)
class Number:
    """A value as it is, and as text."""

    value: float | str
    text: str

    @classmethod
    def seconds(cls, value: float) -> Number:
        """Seconds, four digits.

        >>> Number.seconds(2.70416).text
        '2.704'
        """
        return cls(value, f"{value:.4g}")

    @classmethod
    def percent(cls, value: float, digits: int = 1) -> Number:
        """Percent, one digit after the point by default; zero has no sign.

        >>> Number.percent(50.46).text, Number.percent(-0.04).text
        ('50.5', '0.0')
        """
        return cls(value, f"{value:z.{digits}f}")

    @classmethod
    def whole(cls, value: int) -> Number:
        """A count."""
        return cls(value, str(value))


def as_json(figures: Mapping[str, Mapping[str, Number]]) -> bytes:
    """`{figure: {key: value}}`, values with every digit."""
    values = {name: {key: number.value for key, number in numbers.items()} for name, numbers in figures.items()}
    return (json.dumps(values, indent=1) + "\n").encode()


def as_tex(figures: Mapping[str, Mapping[str, Number]]) -> bytes:
    """A definition for each number, called `figure/key` with a hyphen for characters that are special in TeX.

    Raises InputError if two names become the same.
    """
    lines: dict[str, str] = {}
    for name, numbers in figures.items():
        for key, number in numbers.items():
            word = re.sub(r"[^A-Za-z0-9./-]", "-", f"{name}/{key}")
            if word in lines:
                raise InputError(f"number {name}/{key}: another one is called {word} in TeX as well: rename one")
            lines[word] = rf"\expandafter\def\csname optcc/{word}\endcsname{{{escaped(number.text)}}}"
    return (_HEADER + "".join(f"{line}\n" for line in lines.values())).encode()


def escaped(text: str) -> str:
    """Text for TeX: special characters are escaped, characters that do not print replaced."""
    return "".join(_TEX.get(each, each if each.isprintable() else "?") for each in text)
