"""What a case of the corpus is, and two ways to write one: in the language, or as a plan in a few words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.plan import KINDS, Channel, Plan
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verdict import Counterexample, Verdict
from optcc.verify.plan import verify_plan
from tests.negative.edits import Draft, Row, edit_transfers, transfer_rows

Author = Callable[[Program], None]
ITEM = 4
"""Bytes of an element: everything here is float32."""


@dataclass(frozen=True)
class Case:
    """A mistake of class `number`, and what must be said of it.

    `make` makes a plan, or what else `check` takes. `expected` is the property that must be refuted, with those before
    it proved, or the name of the error that must refuse it. The counterexample, or the error's message, must contain
    every one of `names`, and say `rank` and the bytes `at` where they are given.
    """

    number: int
    what: str
    make: Callable[[], Any]
    expected: str
    names: tuple[str, ...]
    rank: int | None
    at: tuple[int, int] | None
    check: Callable[[Any], Counterexample | Verdict | None]


@dataclass(frozen=True)
class Corpus:
    """The cases of a file, which register themselves."""

    cases: list[Case]

    def __call__(
        self,
        number: int,
        expected: str,
        *names: str,
        rank: int | None = None,
        at: tuple[int, int] | None = None,
        check: Callable[[Any], Counterexample | Verdict | None] = verify_plan,
    ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Registers a function that makes what is wrong; its name says what that is."""

        def register(make: Callable[[], Any]) -> Callable[[], Any]:
            what = make.__name__.strip("_").replace("_", " ")
            self.cases.append(Case(number, what, make, expected, names, rank, at, check))
            return make

        return register


def compiled(
    function: Author,
    ranks: int,
    elements: int = 6,
    collective: str = "allreduce",
    *,
    slots: int = 2,
    fused: bool = False,
    root: int = 0,
    segments: int = 1,
    reduction: str = "sum",
) -> Plan:
    """The plan of an author's function."""
    built = schedule(collective=collective)(function)(n_ranks=ranks, segments=segments, root=root)
    return compile_schedule(built, size_bytes=ITEM * elements, slots=slots, fused=fused, reduction=reduction)


def library(
    name: str, ranks: int, elements: int, *, segments: int = 1, slots: int = 2, fused: bool = False, ports: str = ""
) -> Draft:
    """A plan of the library to be spoiled, its last rank degraded; as written where no `ports` are given."""
    topology = Topology.parse(f"{ranks}@50MB/s,{ranks - 1}=25MB/s")
    built = SCHEDULES[name].build(topology, segments)
    size_bytes = ITEM * elements
    if not ports:
        return Draft.of(compile_schedule(built, size_bytes=size_bytes, slots=slots, fused=fused))
    assert ports in ("exclusive", "fifo")
    return Draft.of(
        compile_schedule(
            built,
            size_bytes=size_bytes,
            slots=slots,
            fused=fused,
            topology=topology,
            ports="fifo" if ports == "fifo" else "exclusive",
        )
    )


def change(draft: Draft, transfer: int, **values: int) -> None:
    """Changes a transfer, and with it the instructions that perform it: the mistake is in the transfer alone."""
    rows = transfer_rows(draft.transfers)
    rows[transfer] |= values
    draft.transfers = edit_transfers(draft.transfers, rows)
    new = rows[transfer]
    for row in draft.rows:
        if transfer == row.recv_transfer:
            row.dst_offset, row.bytes = new["dst_offset"], new["bytes"]
            if row.in_channel < 0:
                row.src_offset = new["src_offset"]
        elif transfer == row.send_transfer:
            row.src_offset, row.bytes = new["src_offset"], new["bytes"]


def hand(
    ranks: int,
    transfers: str,
    lanes: Mapping[int, str],
    *,
    elements: int,
    scratch: int = 0,
    slots: int | Mapping[int, int] = 1,
    collective: str = "allreduce",
    reduction: str = "sum",
    root: int = 0,
) -> Plan:
    """A plan in a few words.

    `transfers` has one a line, numbered from 0: `0>1 reduce 2:4` is elements 2 and 3, `0>1 copy 0:1@5` goes to element
    5. `lanes[rank]` has the lanes of a rank with `|` between them. In a lane `s3` sends transfer 3, `r3` receives it,
    `l3` performs it locally, `r3s4` is fused, and `s3<r1,l2` waits for `r1` and `l2`. `slots` is for all ranks, or for
    each receiving one.
    """
    lines = [line.split() for line in transfers.strip().splitlines()]
    rows = [_transfer(*line) for line in lines]
    ends = sorted({(row["src"], row["dst"]) for row in rows if row["src"] != row["dst"]})
    empty = Lists.of([[]] * len(rows))
    columns: dict[str, Any] = {name: column(row[name] for row in rows) for name in rows[0]}
    zero = column(np.zeros(len(rows), dtype=np.int64))
    made = Transfers(
        Collective(collective, ranks, root),
        reduction,
        "float32",
        ITEM * elements,
        ITEM * scratch,
        ("by hand",),
        **columns,
        segment=zero,
        stage=zero,
        line=zero,
        after=empty,
        order=empty,
    )
    named: dict[tuple[int, str], Row] = {}
    waits: list[tuple[Row, int, str]] = []
    plan_lanes: list[list[Row]] = []
    lane_rank: list[int] = []
    for rank, text in sorted(lanes.items()):
        for lane in text.split("|"):
            lane_rank.append(rank)
            plan_lanes.append([])
            for word in lane.split():
                name, _, behind = word.partition("<")
                row = _instruction(name, rows, ends)
                plan_lanes[-1].append(row)
                for part in (name, *re.findall(r"[rsl]\d+", name)):
                    named[rank, part] = row
                waits += [(row, rank, each) for each in behind.split(",") if each]
    for row, rank, each in waits:
        row.after.append(named[rank, each])
    channels = [Channel(src, dst, slots if isinstance(slots, int) else slots[dst]) for src, dst in ends]
    return Draft("by hand", made, channels, lane_rank, plan_lanes).build()


def _transfer(ranks: str, op: str, where: str) -> dict[str, int]:
    src, dst = map(int, ranks.split(">"))
    span, _, to = where.partition("@")
    first, stop = map(int, span.split(":"))
    return {
        "src": src,
        "dst": dst,
        "op": ("reduce", "copy").index(op),
        "src_offset": ITEM * first,
        "dst_offset": ITEM * (int(to) if to else first),
        "bytes": ITEM * (stop - first),
    }


def _instruction(name: str, rows: list[dict[str, int]], ends: list[tuple[int, int]]) -> Row:
    """The instruction of that name, as its transfers say."""
    parts = {part[0]: int(part[1:]) for part in re.findall(r"[rsl]\d+", name)}
    into, out = parts.get("r", parts.get("l")), parts.get("s")
    comes = rows[into] if into is not None else None
    goes = rows[out] if out is not None else None
    if "l" in parts:
        kind = "reduce" if comes is not None and comes["op"] == 0 else "copy"
    elif comes is None:
        kind = "send"
    elif goes is None:
        kind = "receive-reduce" if comes["op"] == 0 else "receive"
    else:
        kind = "receive-reduce-send" if comes["op"] == 0 else "receive-copy-send"
    row = comes if comes is not None else goes
    assert row is not None
    return Row(
        KINDS.index(kind),
        ends.index((comes["src"], comes["dst"])) if comes is not None and "r" in parts else -1,
        ends.index((goes["src"], goes["dst"])) if goes is not None else -1,
        row["src_offset"] if kind in ("send", "copy", "reduce") else -1,
        comes["dst_offset"] if comes is not None else -1,
        row["bytes"],
        into if into is not None else -1,
        out if out is not None else -1,
    )
