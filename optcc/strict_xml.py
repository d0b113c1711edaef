"""Strict XML: elements with attributes and their lines, and nothing else of XML.

A file is data from a stranger. A document type, which could declare entities that grow or name other files, is refused
where it begins; so are processing instructions, CDATA and text, and what exceeds a size. What is wrong is a CodecError
that starts with the line:

    line 7: <step>: cnt "x": must be an integer from 0 to 71
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.parsers import expat

from optcc.errors import CodecError

BYTES_MAX = 2**26
ELEMENTS_MAX = 2**20
DEPTH_MAX = 8
ATTRIBUTE_LENGTH_MAX = 255
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
"""Without zeros in front: `strtol` of base 0, which other readers use, takes 010 for eight."""


@dataclass(slots=True)
class XmlElement:
    """An element: its name, the line on which it begins, its attributes, and the elements in it."""

    name: str
    line: int
    attributes: Mapping[str, str]
    children: list[XmlElement] = field(default_factory=list)

    def fail(self, what: str) -> CodecError:
        """The error that says `what` of this element."""
        return CodecError(f"line {self.line}: <{self.name}>: {what}")

    def check(self, required: Sequence[str], optional: Sequence[str] = (), children: Sequence[str] = ()) -> None:
        """Raises CodecError unless the element has the `required` attributes, and none but those and the `optional`
        ones, and only `children` of these names."""
        for name in required:
            if name not in self.attributes:
                raise self.fail(f"attribute {name}: missing")
        for name in self.attributes:
            if name not in required and name not in optional:
                raise self.fail(f"attribute {name}: must be one of {', '.join((*required, *optional))}")
        for child in self.children:
            if child.name not in children:
                rule = f"must be <{'> or <'.join(children)}>" if children else "must not be here"
                raise child.fail(f"in <{self.name}>: {rule}")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """The attribute `name`, an integer from `low` to `high`; `default` if it is missing and there is one."""
        text = self.attributes.get(name)
        if text is None and default is not None:
            return default
        if text is None or not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
            shown = "missing" if text is None else f'"{text[:60]}"'
            raise self.fail(f"{name} {shown}: must be an integer from {low} to {high}")
        return int(text)

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        """The attribute `name`, one of `allowed`."""
        text = self.attributes.get(name, "")
        if text not in allowed:
            raise self.fail(f'{name} "{text[:60]}": must be one of {", ".join(allowed)}')
        return text


def parse_xml(data: bytes) -> XmlElement:
    """The root element of a file.

    >>> root = parse_xml(b'<a x="1">' + bytes([10]) + b'<b/></a>')
    >>> root.integer("x", 0, 9), [(each.name, each.line) for each in root.children]
    (1, [('b', 2)])

    Raises CodecError for what is not well formed, for all that is neither an element nor a comment, and for a file
    that exceeds `BYTES_MAX`, `ELEMENTS_MAX`, `DEPTH_MAX` or `ATTRIBUTE_LENGTH_MAX`.
    """
    if len(data) > BYTES_MAX:
        raise CodecError(f"{len(data)} B of XML: must be at most {BYTES_MAX} B")
    return _Reader().read(data)


class _Reader:
    """Builds the tree while expat reads."""

    def __init__(self) -> None:
        self._roots: list[XmlElement] = []
        self._open: list[XmlElement] = []
        self._count = 0
        parser = self._parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.StartDoctypeDeclHandler = lambda *_: self._refuse("a document type")
        parser.EntityDeclHandler = lambda *_: self._refuse("an entity")
        parser.ExternalEntityRefHandler = self._refuse_entity
        parser.ProcessingInstructionHandler = lambda *_: self._refuse("a processing instruction")
        parser.StartCdataSectionHandler = lambda: self._refuse("CDATA")

    def read(self, data: bytes) -> XmlElement:
        try:
            self._parser.Parse(data, True)
        except expat.ExpatError as error:
            raise CodecError(f"line {error.lineno}: not XML: {expat.ErrorString(error.code)}") from None
        except (UnicodeError, LookupError, ValueError) as error:
            raise CodecError(f"line {self._parser.CurrentLineNumber}: not XML: {error}") from None
        return self._roots[0]

    def _refuse(self, what: str) -> None:
        raise CodecError(f"line {self._parser.CurrentLineNumber}: {what}: must not be in the file")

    def _refuse_entity(self, *_: object) -> int:
        self._refuse("an external entity")
        return 0

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        element = XmlElement(name, self._parser.CurrentLineNumber, attributes)
        self._count += 1
        if self._count > ELEMENTS_MAX:
            raise element.fail(f"must be at most {ELEMENTS_MAX} elements")
        if len(self._open) == DEPTH_MAX:
            raise element.fail(f"must be at most {DEPTH_MAX} elements deep")
        for key, text in attributes.items():
            if len(text) > ATTRIBUTE_LENGTH_MAX:
                raise element.fail(f"{key}: {len(text)} characters: must be at most {ATTRIBUTE_LENGTH_MAX}")
        (self._open[-1].children if self._open else self._roots).append(element)
        self._open.append(element)

    def _end(self, _: str) -> None:
        self._open.pop()

    def _text(self, text: str) -> None:
        if text.strip():
            self._refuse(f"text {text.strip()[:60]!r}")
