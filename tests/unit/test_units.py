"""Sizes, rates and times as people write them: exact numbers, and refusals that show the text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optcc.errors import InputError
from optcc.units import parse_rate, parse_size, parse_time, show_rate, show_size, show_time


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1K", 1024),
        ("1k", 1024),
        ("1KB", 1000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("64MiB", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("1G", 2**30),
        ("1GB", 10**9),
        ("2TB", 2 * 10**12),
        ("8B", 8),
        (" 8 MiB ", 8 * 2**20),
        ("0.1KB", 100),
        ("1152921504606846976", 2**60),
    ],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    """Every unit of the contract, letters alone binary."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "-4KiB",
        "1.5",
        "0.3KiB",
        "1e3",
        "64Mib",
        "64mb",
        "KiB",
        "1 2",
        "0x10",
        "nan",
        "inf",
        "1PB",
        "1,5K",
    ],
)
def test_sizes_that_are_none_are_refused_by_name(text: str) -> None:
    """The message shows the text that was given."""
    with pytest.raises(InputError, match="size ") as refusal:
        parse_size(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", ["1152921504606846977", "9" * 30, "9" * 5000, "999999TiB999", "2000000TiB"])
def test_huge_sizes_are_refused(text: str) -> None:
    """Nothing above 2**60 bytes, and no text of arbitrary length."""
    with pytest.raises(InputError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400Gbit/s", 50 * 10**9),
        ("50GB/s", 50 * 10**9),
        ("1GiB/s", 2**30),
        ("1bit/s", Fraction(1, 8)),
        ("12.5MB/s", 12_500_000),
        ("0.1B/s", Fraction(1, 10)),
        ("1kbit/s", 125),
        ("3 MB/s", 3_000_000),
    ],
)
def test_rates_are_exact(text: str, rate: Fraction | int) -> None:
    """Bits and bytes, decimal and binary."""
    assert parse_rate(text) == rate
    assert isinstance(parse_rate(text), Fraction)


@pytest.mark.parametrize(
    "text",
    ["", "0GB/s", "0.0bit/s", "-1GB/s", "50", "50GB", "50Gb/s", "GB/s", "1e9B/s", "50GB/s/s", "1Gibit/s", "9" * 50],
)
def test_rates_that_are_none_are_refused_by_name(text: str) -> None:
    """Zero, negative and nonsense."""
    with pytest.raises(InputError, match="rate ") as refusal:
        parse_rate(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5us", Fraction(5, 10**6)),
        ("5µs", Fraction(5, 10**6)),
        ("1.5ms", Fraction(3, 2000)),
        ("2s", Fraction(2)),
        ("7ns", Fraction(7, 10**9)),
        ("0s", Fraction(0)),
    ],
)
def test_times_are_exact(text: str, seconds: Fraction) -> None:
    """Every unit of time."""
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "-5us", "5 min", "us", "1e-6s"])
def test_times_that_are_none_are_refused_by_name(text: str) -> None:
    """Negative and nonsense."""
    with pytest.raises(InputError, match="time ") as refusal:
        parse_time(text)
    assert repr(text) in str(refusal.value)


@given(st.integers(0, 2**60))
def test_shown_sizes_read_back(size: int) -> None:
    """`show_size` is exact."""
    assert parse_size(show_size(size)) == size


@given(st.integers(1, 10**15), st.integers(0, 6))
def test_shown_rates_read_back(number: int, digits: int) -> None:
    """`show_rate` is exact for rates whose decimals end, as `parse_rate` promises."""
    rate = Fraction(number, 10**digits)
    shown = show_rate(rate)
    if "/s" in shown and "/" not in shown.removesuffix("/s"):
        assert parse_rate(shown) == rate


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (1.0, "1.000 s"), (0.0025, "2.500 ms"), (5e-6, "5.000 us"), (3e-9, "3.000 ns")]
)
def test_shown_times(seconds: float, text: str) -> None:
    """The largest unit of which there is at least one."""
    assert show_time(seconds) == text
