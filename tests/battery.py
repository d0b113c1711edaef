"""The battery of failures: 42 cases, and the tests that hold each. `python -m tests.battery` writes the table of
docs/failover.md.

A test holds a case if it has the marker `battery` with the number of the case. A case without a test is open, and the
table says so with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "failover.md"
BEGIN, END = "<!-- battery: begin -->\n", "<!-- battery: end -->\n"


class BatteryCase(NamedTuple):
    """What befalls a job, and what must come of it; `open_because` is empty if tests hold all of it."""

    what: str
    wanted: str
    open_because: str = ""


CASES = (
    BatteryCase("a link goes down in mid-run", "exact; the other rails carry it; then the plan for what is left"),
    BatteryCase("a link is down before the first byte", "it carries nothing; a line in the log"),
    BatteryCase("a link goes down at one end", "both ends know within a loaded round trip"),
    BatteryCase("two rails go down, 0 to 500 ms apart", "exact while one is left"),
    BatteryCase("a rail fails while chunks are sent again", "exact; nothing is added twice"),
    BatteryCase("all rails of a host go down", "`AllRailsFailed` in time at every rank, inputs intact"),
    BatteryCase("hosts of one NIC", "a short loss is waited for, a long one named"),
    BatteryCase("a NIC flaps ten times, every 50 ms to 5 s", "exact; plans do not flap"),
    BatteryCase("a rail returns after an hour", "used again"),
    BatteryCase("peers see a rail return ten seconds apart", "they agree, and use it"),
    BatteryCase("a NIC's address changes", "told by its rank, and dialled there; a stranger's word is refused"),
    BatteryCase("a blackhole", "found in 0.1 s; exact"),
    BatteryCase("a blackhole one way", "the same"),
    BatteryCase("acknowledgements alone are lost", "copies are suppressed"),
    BatteryCase("5 % loss, reordering, copies", "exact"),
    BatteryCase("rates of 3 : 1 and 10 : 1", "90 % of the sum; bytes by rate"),
    BatteryCase("a rate collapses in mid-run", "measured; faster than a plan that keeps its shares"),
    BatteryCase("rails of 1 ms and 50 ms", "the slow one does not hold up the fast one"),
    BatteryCase("one bit flips in a payload", "refused, sent again, counted (with checksums)"),
    BatteryCase("a damaged header or length", "costs the connection, nothing else"),
    BatteryCase("a NIC damages everything", "left alone"),
    BatteryCase("a process is killed", "all others name it within two seconds"),
    BatteryCase("a process stands still, for a while or for ever", "waited for, then named"),
    BatteryCase("an exception in one rank", "all others learn the first cause"),
    BatteryCase("a rank ends while ranks meet, replan or leave", "no hang; named; no file left open"),
    BatteryCase("rank 0 ends, which proposes plans", "a typed error, no split decision"),
    BatteryCase("port scans: connect and close, pieces of a hello", "ignored"),
    BatteryCase("callers that say nothing", "shut out"),
    BatteryCase("a wrong secret, a replayed or reflected hello", "refused"),
    BatteryCase("ranks of other set-up, version or plan", "refused, with who differs in what"),
    BatteryCase("a length of 4 GiB is announced", "no memory for it"),
    BatteryCase("very many callers", "files bounded, the job goes on"),
    BatteryCase("a reader stands still", "queues bounded, waited for"),
    BatteryCase("a plan file: cut, fields twice, deep nesting, huge numbers", "exit code 2, with the path"),
    BatteryCase("a plan that misses, doubles, deadlocks or overflows", "refuted by a counterexample"),
    BatteryCase("a step of a plan deleted, swapped or sent elsewhere", "refuted, as by the naive verifier"),
    BatteryCase("a solver's answer is wrong", "refused by the exact check"),
    BatteryCase("counts of 0, 1, below the ranks, long, strided", "exact, or a clear error"),
    BatteryCase("float16, bfloat16, NaN, infinity", "as declared, to the bit"),
    BatteryCase("ranks disagree on operation, size or type", "every rank says who"),
    BatteryCase("Ctrl-C, a full disk", "no process left; exit codes 130 and 1"),
    BatteryCase("simulation against run-time", "one table, the same classes"),
)


def holders() -> dict[int, list[str]]:
    """By case: the tests that are marked with it, `file::function`, in the order of their files."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for function in ast.walk(ast.parse(text if "mark.battery" in text else "")):
            if isinstance(function, ast.FunctionDef):
                for case in _marked(function):
                    found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{function.name}")
    return found


def _marked(function: ast.FunctionDef) -> Iterator[int]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.battery":
            yield from map(ast.literal_eval, decorator.args)


def table() -> str:
    """The table in Markdown."""
    tests = holders()
    lines = ["| | what befalls a job | what must come of it | tests |", "|---|---|---|---|"]
    for number, case in enumerate(CASES, 1):
        held = "<br>".join(f"`{name}`" for name in tests.get(number, []))
        why = f"**open**: {case.open_because}" if case.open_because else ""
        lines.append(f"| {number} | {case.what} | {case.wanted} | {'<br>'.join(filter(None, (why, held)))} |")
    return "\n".join(lines) + "\n"


def page_with_table(page: str) -> str:
    """The page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
