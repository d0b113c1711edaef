"""Strict XML: what a stranger's file may not do."""

from __future__ import annotations

import pytest

from optcc import strict_xml
from optcc.errors import CodecError
from optcc.strict_xml import parse_xml

ENTITIES = b'<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;&b;">]><a x="&c;"/>'
EXTERNAL = b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>'


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (ENTITIES, "line 1: a document type: must not be in the file"),
        (EXTERNAL, "line 1: a document type"),
        (b"<a>\n<?run me?></a>", "line 2: a processing instruction"),
        (b"<a>\n<![CDATA[x]]></a>", "line 2: CDATA"),
        (b"<a>\nx</a>", "line 2: text 'x'"),
        (b'<a x="&b;"/>', "line 1: not XML: undefined entity"),
        (b"<a>" * 9 + b"</a>" * 9, "at most 8 elements deep"),
        (b'<a x="1" x="2"/>', "not XML: duplicate attribute"),
        (b"<a/><a/>", "not XML: junk after document element"),
        (b"", "not XML: no element found"),
        (b"\xff\xfe<", "not XML"),
        (b'<?xml version="1.0" encoding="utf-7"?><a/>', "not XML"),
    ],
)
def test_what_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(CodecError) as raised:
        parse_xml(data)
    assert says in str(raised.value)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_xml, "BYTES_MAX", 10)
    with pytest.raises(CodecError, match="11 B of XML: must be at most 10 B"):
        parse_xml(b"<a>    </a>")
    monkeypatch.setattr(strict_xml, "BYTES_MAX", 100)
    monkeypatch.setattr(strict_xml, "ELEMENTS_MAX", 3)
    with pytest.raises(CodecError, match="at most 3 elements"):
        parse_xml(b"<a><b/><b/><b/></a>")


@pytest.mark.parametrize("text", ["", "1.0", "1e3", "+1", " 1", "0x1", "9" * 30, "10", "-1", "01", "-00"])
def test_integers_are_integers_in_their_range(text: str) -> None:
    with pytest.raises(CodecError, match="must be an integer from 0 to 9"):
        parse_xml(f'<a x="{text}"/>'.encode()).integer("x", 0, 9)
