"""The compiler's transfers, run by an interpreter that knows nothing of the compiler; and the interpreter itself."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.differential.transfers_interpreter import ITEM_BYTES, check
from tests.sample import sampled

Row = dict[str, Any]


def header(ranks: int, count: int, scratch: int = 0, **changes: object) -> Row:
    """A header for `count` elements of float32."""
    return {
        "format": "optcc-transfers/1",
        "ranks": ranks,
        "collective": "allreduce",
        "reduction": "sum",
        "dtype": "float32",
        "size_bytes": 4 * count,
        "scratch_bytes": 4 * scratch,
        **changes,
    }


def transfer(number: int, src: int, dst: int, op: str, elements: tuple[int, int], *after: int) -> Row:
    """A transfer of the elements from the first up to the second, in place."""
    first, stop = elements
    at = {"src_offset": 4 * first, "dst_offset": 4 * first, "bytes": 4 * (stop - first)}
    return {
        **{"id": number, "src": src, "dst": dst, "op": op, **at, "segment": 0, "stage": op},
        **{"after": list(after), "order": []},
    }


def text(head: Row, rows: list[Row]) -> str:
    """The file."""
    return "".join(json.dumps(each) + "\n" for each in (head, *rows))


def halves() -> list[Row]:
    """AllReduce of four elements over two ranks, which swap their halves: each half is reduced and sent back."""
    return [
        transfer(0, 0, 1, "reduce", (0, 2)),
        transfer(1, 1, 0, "reduce", (2, 4)),
        transfer(2, 1, 0, "copy", (0, 2), 0),
        transfer(3, 0, 1, "copy", (2, 4), 1),
    ]


def chain(ranks: int) -> list[Row]:
    """AllReduce of three elements along a chain and back."""
    there = [transfer(i, i, i + 1, "reduce", (0, 3), *range(max(i - 1, 0), i)) for i in range(ranks - 1)]
    back = [
        transfer(ranks - 1 + i, ranks - 1 - i, ranks - 2 - i, "copy", (0, 3), ranks - 2 + i) for i in range(ranks - 1)
    ]
    return there + back


@pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_correct_files_pass(reduction: str, dtype: str) -> None:
    assert check(text(header(2, 4, reduction=reduction, dtype=dtype), halves())) == []
    assert check(text(header(4, 3, reduction=reduction, dtype=dtype), chain(4))) == []


def test_one_rank_and_no_element_need_no_transfer() -> None:
    assert check(text(header(1, 5), [])) == []
    assert check(text(header(3, 0), [])) == []


def test_through_scratch() -> None:
    """Both ranks send at once: into scratch space, then a local reduce."""
    there = {"src_offset": 0, "dst_offset": 8, "bytes": 8}
    here = {"src_offset": 8, "dst_offset": 0, "bytes": 8}
    rows = [
        transfer(0, 0, 1, "copy", (0, 2)) | there,
        transfer(1, 1, 0, "copy", (0, 2)) | there,
        transfer(2, 0, 0, "reduce", (0, 2), 0, 1) | here,
        transfer(3, 1, 1, "reduce", (0, 2), 0, 1) | here,
    ]
    assert check(text(header(2, 2, scratch=2), rows)) == []
    # Without the wait for one's own send, the input may change while it is read.
    rows[2]["after"] = [1]
    assert any("race: rank 0, bytes 0..7" in problem for problem in check(text(header(2, 2, scratch=2), rows)))


def test_scratch_is_garbage_at_the_start() -> None:
    rows = [*halves(), transfer(4, 0, 0, "copy", (0, 1), 2) | {"src_offset": 16}]
    assert any("rank 0 element 0: misses" in problem for problem in check(text(header(2, 4, scratch=1), rows)))


def test_double_reduction() -> None:
    rows = halves()
    rows.insert(1, transfer(1, 0, 1, "reduce", (0, 2), 0))
    rows[2:] = [
        transfer(2, 1, 0, "reduce", (2, 4)),
        transfer(3, 1, 0, "copy", (0, 2), 1),
        transfer(4, 0, 1, "copy", (2, 4), 2),
    ]
    problems = check(text(header(2, 4), rows))
    assert not any("race" in problem for problem in problems)
    assert "seed 1: rank 0 element 0: misses the inputs of ranks [], has [((0, 0), 1)] too much" in problems
    assert any("wrong numbers" in problem for problem in problems)


def test_missing_contribution() -> None:
    rows = chain(4)
    rows[1] = transfer(1, 1, 2, "copy", (0, 3), 0)
    problems = check(text(header(4, 3), rows))
    assert "seed 1: rank 0 element 0: misses the inputs of ranks [2], has [] too much" in problems


def test_element_left_out() -> None:
    rows = halves()
    rows[3] = transfer(3, 0, 1, "copy", (2, 3), 1)
    problems = check(text(header(2, 4), rows))
    assert "seed 1: rank 1 element 3: misses the inputs of ranks [0], has [] too much" in problems


def test_wrong_offset() -> None:
    rows = halves()
    rows[0]["src_offset"] = 4
    rows[0]["after"] = [3]
    problems = check(text(header(2, 4), rows))
    assert any("rank 0 element 0: misses the inputs of ranks [0], has [((0, 1), 1)]" in problem for problem in problems)


def test_race_that_no_sequence_shows() -> None:
    """Two reduces into one place add up in either order, one after the other; at the same time they do not."""
    rows = [
        transfer(0, 0, 2, "reduce", (0, 1)),
        transfer(1, 1, 2, "reduce", (0, 1)),
        transfer(2, 2, 0, "copy", (0, 1), 0, 1),
        transfer(3, 2, 1, "copy", (0, 1), 0, 1),
    ]
    problems = check(text(header(3, 1), rows))
    assert problems == ["race: rank 2, bytes 0..3: #0 0->2 reduce 0..3 and #1 1->2 reduce 0..3"]
    rows[1]["after"] = [0]
    assert check(text(header(3, 1), rows)) == []


def test_order_is_not_enough() -> None:
    rows = halves()
    rows[2]["after"], rows[2]["order"] = [], [0]
    problems = check(text(header(2, 4), rows))
    assert any(problem.startswith("race: ") for problem in problems)
    assert any("seed" in problem for problem in problems)


def test_local_operation_on_its_own_bytes() -> None:
    rows = [*halves(), transfer(4, 0, 0, "reduce", (0, 2), 2)]
    assert any("race: rank 0, bytes 0..7: #4" in problem for problem in check(text(header(2, 4), rows)))


@pytest.mark.parametrize("key", ["after", "order"])
def test_cycle(key: str) -> None:
    rows = halves()
    rows[0][key] = [2]
    assert check(text(header(2, 4), rows)) == ["malformed: a cycle among transfers [0, 2]"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"id": 7}, "id 7 is not 0"),
        ({"src": 2}, "no such rank"),
        ({"op": "add"}, "op"),
        ({"bytes": 0}, "nothing to do"),
        ({"bytes": 6}, "bytes cuts an element"),
        ({"src_offset": 12}, "src_offset leaves the buffer"),
        ({"after": [4]}, "after"),
        ({"extra": 1}, "keys"),
        ({"dst_offset": -4}, "dst_offset -4"),
    ],
)
def test_malformed_lines(change: Row, complaint: str) -> None:
    rows = halves()
    rows[0] |= change
    [problem] = check(text(header(2, 4), rows))
    assert problem.startswith("malformed: line 2: ")
    assert complaint in problem


def test_malformed_files() -> None:
    good = text(header(2, 4), halves())
    for bad in ("", good[:-1], good[:-20], good.replace("optcc-transfers/1", "optcc-transfers/2"), "[]\n"):
        [problem] = check(bad)
        assert problem.startswith("malformed: ")


COUNTS = [0, 1, 2, 5, 7, 12, 31, 64]


TYPED = (
    *(("float32", "sum"), ("float64", "max"), ("int32", "prod"), ("int64", "avg")),
    *(("bfloat16", "sum"), ("float16", "avg"), ("int8", "bxor"), ("uint8", "min")),
)


@pytest.mark.parametrize(
    ("name", "ranks", "dtype", "reduction"),
    sampled(((name, ranks, *typed) for name, ranks, typed in product(("ring", "optcc"), range(2, 7), TYPED)), every=3),
)
def test_compiled_schedules_are_correct(name: str, ranks: int, dtype: str, reduction: str) -> None:
    """What the compiler writes is an AllReduce for every ragged size, whatever overlaps."""
    from optcc.codec import write_transfers
    from optcc.compiler import compile_schedule, plan_transfers
    from optcc.planner import find_schedule
    from optcc.topology import Topology

    topology = Topology.parse(f"{ranks}@50GB/s,1=25GB/s")
    for segments in (1, 3):
        schedule = find_schedule(name).build(topology, segments)
        for count in COUNTS:
            plan = compile_schedule(
                schedule,
                size_bytes=count * ITEM_BYTES[dtype],
                dtype=dtype,
                reduction=reduction,
                topology=topology,
            )
            problems = check(write_transfers(plan_transfers(plan)).decode())
            assert problems == [], f"{segments} segments, {count} elements"


@pytest.mark.parametrize("name", ["ring", "optcc"])
def test_a_compiled_schedule_is_wrong_without_any_one_of_its_transfers(name: str) -> None:
    """The interpreter is no rubber stamp: every transfer that is made empty of effect is missed."""
    from optcc.codec import write_transfers
    from optcc.compiler import compile_schedule, plan_transfers
    from optcc.planner import find_schedule
    from optcc.topology import Topology

    topology = Topology.parse("3@50GB/s,1=25GB/s")
    plan = compile_schedule(
        find_schedule(name).build(topology, 2), size_bytes=48, dtype="float32", reduction="sum", topology=topology
    )
    head, *rows = map(json.loads, write_transfers(plan_transfers(plan)).decode().splitlines())
    assert check(text(head, rows)) == []
    for victim in range(len(rows)):
        kept = [row for row in rows if row["id"] != victim]
        waits = set(rows[victim]["after"]), set(rows[victim]["order"])
        for row in kept:  # Whoever waited for it waits for what it waited for, so that nothing else changes.
            for key, inherited in zip(("after", "order"), waits, strict=True):
                old = set(row[key])
                new = old - {victim} | inherited if victim in old else old
                row[f"new {key}"] = sorted(each - (each > victim) for each in new)
        without = [
            {
                **{key: value for key, value in row.items() if not key.startswith("new ")},
                **{"id": row["id"] - (row["id"] > victim), "after": row["new after"], "order": row["new order"]},
            }
            for row in kept
        ]
        assert any("misses" in problem or "too much" in problem for problem in check(text(head, without))), rows[victim]
