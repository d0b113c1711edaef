"""Strict JSON: a typed reader that says where a file is wrong, and by which rule.

A file is data from a stranger. `decode` reads it into a msgspec type: every value has a type and a bound, a key is
known, nothing is converted to another type. `check_no_key_twice` refuses repeated keys, which JSON allows and parsers
read differently. What is wrong is a CodecError that starts with the path to the field:

    $.ranks[2].lanes[0][5].bytes: -4: must be an integer >= 1
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from optcc.errors import CodecError

SHOWN_LENGTH_MAX = 60
_File = TypeVar("_File")


def decode(data: bytes, decoder: msgspec.json.Decoder[_File], path: str = "$") -> _File:
    """The object that `data` holds; raises CodecError with the path to the first field that is wrong."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise CodecError(f"{path}: not UTF-8: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CodecError(_explain(data, decoder.type, path, error)) from None


def check_no_key_twice(data: bytes, wanted: Any, path: str) -> None:
    """Refuses an object with a key that stands there twice: parsers differ in which of the two they take.

    `data` is a valid file otherwise, so this pass keeps nothing of it.
    """
    twice = False

    def look(pairs: list[tuple[str, None]]) -> None:
        nonlocal twice
        twice = twice or len(dict(pairs)) != len(pairs)

    json.loads(data, object_pairs_hook=look)
    if twice:
        raise CodecError(_explain(data, wanted, path, None))


class _Twice:
    """Stands in a parsed document for an object in which `key` is there more than once."""

    def __init__(self, key: str) -> None:
        self.key = key


def _object(pairs: list[tuple[str, object]]) -> dict[str, object] | _Twice:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            return _Twice(key)
        found[key] = value
    return found


def _explain(data: bytes, wanted: Any, path: str, error: Exception | None) -> str:
    """What is wrong with `data`, path first: found by reading it once more without types.

    Where the standard library cannot read it either, what msgspec says has to do.
    """
    try:
        document = json.loads(data, object_pairs_hook=_object)
        complaint = _find_twice(document, path) or _find_fault(document, wanted, path)
        if complaint is not None:
            return complaint
    except UnicodeDecodeError as problem:
        return f"{path}: not UTF-8: {problem}"
    except (ValueError, RecursionError):
        pass
    assert error is not None
    if isinstance(error, RecursionError):
        return f"{path}: nested too deeply: must be a file of this format"
    if not isinstance(error, msgspec.ValidationError):
        return f"{path}: not JSON: {error}"
    rule, _, where = str(error).partition(" - at `$")
    return f"{path}{where.rstrip('`')}: {rule}"


def _find_twice(value: object, path: str) -> str | None:
    """The first key in `value` that is there twice."""
    if isinstance(value, _Twice):
        return f"{path}{_step(value.key)}: must be there once"
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        inner = ((_step(key), each) for key, each in value.items())
    elif isinstance(value, list):
        inner = ((f"[{index}]", each) for index, each in enumerate(value))
    return next((found for step, each in inner if (found := _find_twice(each, path + step)) is not None), None)


def _find_fault(value: object, wanted: Any, path: str) -> str | None:
    """The first value inside `value` that is not what the type `wanted` says, with the rule; None if all is well."""
    if wanted is msgspec.Raw:
        return None
    try:
        msgspec.convert(value, wanted)
        return None
    except msgspec.ValidationError as error:
        rule = str(error)
    wanted = _bare(wanted)
    if isinstance(value, dict) and isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        fields = {field.encode_name: field for field in msgspec.structs.fields(wanted)}
        for key, field in fields.items():
            if key in value:
                fault = _find_fault(value[key], field.type, path + _step(key))
                if fault is not None:
                    return fault
            elif field.required:
                return f"{path}.{key}: missing: must be given"
        for key in value:
            if key not in fields:
                return f"{path}{_step(key)}: unknown key: must be one of {', '.join(fields)}"
    if isinstance(value, list) and get_origin(wanted) is list:
        for index, each in enumerate(value):
            fault = _find_fault(each, get_args(wanted)[0], f"{path}[{index}]")
            if fault is not None:
                return fault
    return f"{path}: {show(value)}: must be {_rule(rule, wanted)}"


def _bare(wanted: Any) -> Any:
    """The type without its bounds, and without None if that is the only other choice."""
    if get_origin(wanted) is Annotated:
        return _bare(get_args(wanted)[0])
    if get_origin(wanted) in (Union, UnionType):
        others = [each for each in get_args(wanted) if each is not NoneType]
        return _bare(others[0]) if len(others) == 1 else wanted
    return wanted


def _rule(rule: str, wanted: Any) -> str:
    """What msgspec expected, in words.

    >>> _rule("Expected `int` >= 1", int), _rule("Expected `str`, got `int`", str)
    ('an integer >= 1', 'a string')
    """
    if get_origin(wanted) is Literal:
        names = ", ".join(show(name) for name in get_args(wanted))
        return f"one of {names}" if len(get_args(wanted)) > 1 else names
    expected = rule.partition(" - at `")[0].partition(", got ")[0].removeprefix("Expected ")
    for word, plain in (("int", "an integer"), ("str", "a string"), ("array", "an array"), ("object", "an object")):
        expected = expected.replace(f"`{word}`", plain)
    return expected


def _step(key: str) -> str:
    """One step of a path."""
    return f".{key}" if key.isidentifier() and len(key) <= SHOWN_LENGTH_MAX else f"[{show(key)}]"


def show(value: object) -> str:
    """A value of a file in one short piece."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= SHOWN_LENGTH_MAX else f"{text[: SHOWN_LENGTH_MAX - 3]}..."
