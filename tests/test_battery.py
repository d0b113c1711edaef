"""Every case of the battery has a test or says why not, and the manual has the table of them."""

from __future__ import annotations

from tests.battery import CASES, PAGE, holders, page_with_table


def test_every_case_is_held_or_open() -> None:
    tests = holders()
    assert set(tests) <= set(range(1, len(CASES) + 1)) and len(CASES) == 42
    for number, case in enumerate(CASES, 1):
        assert bool(tests.get(number)) != bool(case.open_because), f"case {number}: {case.what}"


def test_the_manual_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == page_with_table(page), "python -m tests.battery writes it"
