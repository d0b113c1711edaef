"""Plans that can be edited: the rows of a plan as mutable records in lanes, and back to a `Plan`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from optcc.arrays import Lists, column
from optcc.plan import KINDS, Channel, Plan
from optcc.transfers import Transfers

TRANSFER_COLUMNS = ("src", "dst", "op", "src_offset", "dst_offset", "bytes", "segment", "stage", "line")


@dataclass(eq=False)
class Row:
    """One instruction; `after` names other rows by themselves, so that moving rows keeps what they mean."""

    kind: int
    in_channel: int
    out_channel: int
    src_offset: int
    dst_offset: int
    bytes: int
    recv_transfer: int
    send_transfer: int
    after: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]

    def become(self, name: str) -> None:
        """Changes the kind."""
        self.kind = KINDS.index(name)


@dataclass
class Draft:
    """A plan taken apart: change `lanes`, `channels` or `transfers`, then `build`."""

    name: str
    transfers: Transfers
    channels: list[Channel]
    lane_rank: list[int]
    lanes: list[list[Row]]

    @classmethod
    def of(cls, plan: Plan) -> Draft:
        """Takes `plan` apart."""
        columns = (plan.kind, plan.in_channel, plan.out_channel, plan.src_offset, plan.dst_offset, plan.bytes)
        values = zip(*(each.tolist() for each in (*columns, plan.recv_transfer, plan.send_transfer)), strict=True)
        rows = [Row(*each) for each in values]
        for row, after in zip(rows, plan.after, strict=True):
            row.after = [rows[each] for each in after]
        lanes = [[rows[i] for i in lane] for lane in plan.lanes]
        return cls(plan.name, plan.transfers, list(plan.channels), plan.lane_rank.tolist(), lanes)

    @property
    def rows(self) -> list[Row]:
        """All rows, lane by lane."""
        return [row for lane in self.lanes for row in lane]

    def lane_of(self, row: Row) -> list[Row]:
        """The lane in which `row` stands."""
        return next(lane for lane in self.lanes if any(each is row for each in lane))

    def remove(self, row: Row) -> None:
        """Takes `row` out; what waited for it waits for what it waited for."""
        lane = self.lane_of(row)
        lane[:] = [each for each in lane if each is not row]
        for other in self.rows:
            if any(each is row for each in other.after):
                other.after = [each for each in (*other.after, *row.after) if each is not row and each is not other]

    def find(self, rank: int, kind: str, nth: int = 0) -> Row:
        """The n-th row of that kind on `rank`."""
        found = [row for at, lane in zip(self.lane_rank, self.lanes, strict=True) for row in lane if at == rank]
        return [row for row in found if row.name == kind][nth]

    def build(self) -> Plan:
        """The plan; raises PlanError where it is none."""
        number = {id(row): i for i, row in enumerate(self.rows)}
        rows = self.rows
        starts, lanes = 0, []
        for lane in self.lanes:
            lanes.append(list(range(starts, starts + len(lane))))
            starts += len(lane)
        return Plan(
            self.name,
            self.transfers,
            tuple(self.channels),
            lane_rank=column(self.lane_rank),
            lanes=Lists.of(lanes),
            kind=column(row.kind for row in rows),
            in_channel=column(row.in_channel for row in rows),
            out_channel=column(row.out_channel for row in rows),
            src_offset=column(row.src_offset for row in rows),
            dst_offset=column(row.dst_offset for row in rows),
            bytes=column(row.bytes for row in rows),
            recv_transfer=column(row.recv_transfer for row in rows),
            send_transfer=column(row.send_transfer for row in rows),
            after=Lists.of([sorted({number[id(each)] for each in row.after}) for row in rows]),
        )


def edit_transfers(transfers: Transfers, rows: list[dict[str, int]]) -> Transfers:
    """`transfers` with other rows (as from `transfer_rows`), without dependencies."""
    empty = Lists.of([[]] * len(rows))
    columns: dict[str, Any] = {name: column(row[name] for row in rows) for name in TRANSFER_COLUMNS}
    return replace(transfers, **columns, after=empty, order=empty)


def transfer_rows(transfers: Transfers) -> list[dict[str, int]]:
    """The rows of `transfers` as dictionaries that can be changed."""
    values = {name: getattr(transfers, name).tolist() for name in TRANSFER_COLUMNS}
    return [{name: int(values[name][i]) for name in TRANSFER_COLUMNS} for i in range(len(transfers))]
