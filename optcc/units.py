"""Sizes, rates and times: how people write them, and exact numbers for what they wrote.

    size    bytes, an int                 64MiB  1G  4096  0
    rate    bytes per second, a Fraction  400Gbit/s  50GB/s  1GiB/s
    time    seconds, a Fraction           5us  1.5ms  2s

Letters alone are binary, as in nccl-tests (`1G` is 2**30); `GB` is decimal, `GiB` binary, bits are decimal.
"""

from __future__ import annotations

import re
from fractions import Fraction

from optcc.errors import InputError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_LETTER = {"K": 2**10, "k": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = r"([+-]?[0-9]+(?:\.[0-9]+)?)"
_RATIO = r"([+-]?[0-9]+(?:\.[0-9]+|/[0-9]+)?)"
_SIZE = re.compile(_NUMBER + r"\s*(?:([kKMGT]?)B|([KMGT]i)B|([kKMGT]))?")
_RATE = re.compile(_RATIO + r"\s*(?:([kKMGT]?)bit/s|([kKMGT]?)B/s|([KMGT]i)B/s)")
_TIME = re.compile(_NUMBER + r"\s*(s|ms|us|µs|ns)")
_TIME_UNIT = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "µs": Fraction(1, 10**6)}
_TIME_UNIT["ns"] = Fraction(1, 10**9)
_LENGTH_MAX = 80
_DIGITS = 12
SIZE_BYTES_MAX = 2**60


def parse_size(text: str) -> int:
    """Bytes of `text`.

    >>> parse_size("64MiB"), parse_size("1G"), parse_size("1GB"), parse_size("0")
    (67108864, 1073741824, 1000000000, 0)

    Raises InputError if the text is not a size, is negative, or is no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LENGTH_MAX else None
    if match is None:
        raise InputError(f"size {text!r}: write bytes, or a number with K, M, G, KB, KiB, MB, MiB, GB, GiB")
    number, decimal, binary, letter = match.groups()
    unit = _BINARY[binary] if binary else _LETTER[letter] if letter else _DECIMAL[decimal or ""]
    size = Fraction(number) * unit
    if size < 0:
        raise InputError(f"size {text!r}: must not be negative")
    if size.denominator != 1:
        raise InputError(f"size {text!r}: must be a whole number of bytes")
    if size > SIZE_BYTES_MAX:
        raise InputError(f"size {text!r}: must be at most 2**60 bytes")
    return int(size)


def parse_rate(text: str) -> Fraction:
    """Bytes per second of `text`, exact.

    >>> parse_rate("400Gbit/s") == parse_rate("50GB/s") == 50 * 10**9
    True
    >>> parse_rate("12.5MB/s"), parse_rate("1/3B/s")
    (Fraction(12500000, 1), Fraction(1, 3))

    Raises InputError if the text is not a rate, or is zero or negative.
    """
    match = _RATE.fullmatch(text.strip()) if len(text) <= _LENGTH_MAX else None
    if match is None:
        raise InputError(f"rate {text!r}: write a number with Gbit/s, GB/s or GiB/s (also K, M, T)")
    number, bits, decimal, binary = match.groups()
    if re.search("/0*$", number):
        raise InputError(f"rate {text!r}: must not divide by zero")
    if bits is not None:
        rate = Fraction(number) * _DECIMAL[bits] / 8
    else:
        rate = Fraction(number) * (_BINARY[binary] if binary else _DECIMAL[decimal])
    if rate <= 0:
        raise InputError(f"rate {text!r}: must be above zero")
    return rate


def parse_time(text: str) -> Fraction:
    """Seconds of `text`, exact.

    >>> parse_time("5us")
    Fraction(1, 200000)

    Raises InputError if the text is not a time, or is negative.
    """
    match = _TIME.fullmatch(text.strip()) if len(text) <= _LENGTH_MAX else None
    if match is None:
        raise InputError(f"time {text!r}: write a number with s, ms, us or ns")
    seconds = Fraction(match[1]) * _TIME_UNIT[match[2]]
    if seconds < 0:
        raise InputError(f"time {text!r}: must not be negative")
    return seconds


def show_size(size_bytes: int) -> str:
    """A size as people read it, exact.

    >>> show_size(67108864), show_size(1000)
    ('64MiB', '1000B')
    """
    for unit, factor in reversed(_BINARY.items()):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}B"
    return f"{size_bytes}B"


def show_rate(rate: Fraction) -> str:
    """A rate as people read it, exact: `parse_rate` gives the same number back.

    >>> show_rate(Fraction(25 * 10**6)), show_rate(Fraction(50 * 10**9)), show_rate(Fraction(10**9, 3))
    ('25MB/s', '50GB/s', '1000000000/3B/s')
    """
    for unit in ("T", "G", "M", "K", ""):
        scaled = rate / _DECIMAL[unit]
        if scaled >= 1 and (scaled * 10**_DIGITS).denominator == 1:
            return f"{_decimal(scaled)}{unit}B/s"
    return f"{_decimal(rate) if (rate * 10**_DIGITS).denominator == 1 else rate}B/s"


def show_time(seconds: float) -> str:
    """A time as people read it, four digits.

    >>> show_time(2.684354), show_time(0.000005)
    ('2.684 s', '5.000 us')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}" if seconds * factor >= 1000 else f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e9:.3f} ns" if seconds else "0 s"


def _decimal(number: Fraction) -> str:
    """A number whose decimals end within `_DIGITS` digits, exactly."""
    whole, rest = divmod(number * 10**_DIGITS, 10**_DIGITS)
    return f"{whole}.{int(rest):0{_DIGITS}d}".rstrip("0").rstrip(".")
