"""The lower bound with lost bandwidth: T* over the fault-free ring, for many sizes of clusters, as a record.

Nothing is measured: `curves` evaluates the closed forms of `optcc.verify.bounds.predictions` on topologies, exactly.
The record is a file of its own format, `optcc-bounds/1`; rationals are text, "a/b" in lowest terms. The one that comes
with the package is made by

    optcc experiment bound-curves
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import msgspec

from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, decode, lines_of, text_of
from optcc.experiments.recorder import SECONDS, Answer, RecordForm, record_command
from optcc.show import Card
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.predictions import optimum, ring

TITLE = "T* and the ring over the fault-free ring, equal stragglers"
COLUMNS = ("lost", "ring", "optimal")
RANKS = (4, 8, 16, 64, 256, 1024)
STRAGGLERS = (1, 2, 3, 4)
STEPS = 64
LOST_MAX = Fraction(3, 4)
_RATIONAL = re.compile(r"(0|[1-9][0-9]{0,40})/([1-9][0-9]{0,40})")
_NODES_MAX = 2**20
_BEYOND_POWERS = range(7, 13)


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """At the share `lost` of the stragglers' bandwidth: the ring's and the optimal time over the fault-free ring's."""

    lost: Fraction
    ring: Fraction
    optimal: Fraction


@dataclass(frozen=True, slots=True)
class BoundCurve:
    """`stragglers` of `ranks` endpoints have lost the same share; points in rising order of it."""

    ranks: int
    stragglers: int
    points: tuple[BoundPoint, ...]


class _Curve(msgspec.Struct, forbid_unknown_fields=True):
    ranks: int
    stragglers: int
    points: list[tuple[str, str, str]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    title: str
    command: list[str]
    columns: list[str]
    curves: list[_Curve]


@dataclass(frozen=True, slots=True)
class BoundCurves(Answer):
    """The record: how it was made, and its curves."""

    format: ClassVar[str] = "optcc-bounds/1"
    own_path: ClassVar[Path] = RECORDS / "bound-curves.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    is_dated: ClassVar[bool] = False

    title: str
    command: tuple[str, ...]
    curves: tuple[BoundCurve, ...]

    def card(self) -> Card:
        """Of each curve the largest times over the fault-free ring."""
        rows = tuple(
            (
                str(curve.ranks),
                str(curve.stragglers),
                str(len(curve.points)),
                *(f"{float(max(getattr(each, name) for each in curve.points)):.3f}" for name in COLUMNS[1:]),
            )
            for curve in self.curves
        )
        return Card(self.title, ("ranks", "stragglers", "points", *(f"{name}, at most" for name in COLUMNS[1:])), rows)

    def to_bytes(self) -> bytes:
        """The record as a file, a line for each curve's points."""
        curves = [
            {
                "ranks": curve.ranks,
                "stragglers": curve.stragglers,
                "points": [[text_of(each.lost), text_of(each.ring), text_of(each.optimal)] for each in curve.points],
            }
            for curve in self.curves
        ]
        head = {"format": self.format, "title": self.title, "command": list(self.command), "columns": list(COLUMNS)}
        return lines_of(head, {"curves": curves})

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> BoundCurves:
        file, check = decode(data, name, _File, cls.format)
        check("columns", file.columns, tuple(file.columns) == COLUMNS, f"be {list(COLUMNS)}")
        check("curves", file.curves, bool(file.curves), "have at least one curve")
        curves = []
        for number, curve in enumerate(file.curves):
            field = f"curves[{number}]"
            check(f"{field}.ranks", curve.ranks, 2 <= curve.ranks <= _NODES_MAX, f"be from 2 to {_NODES_MAX}")
            check(f"{field}.stragglers", curve.stragglers, 1 <= curve.stragglers <= curve.ranks, "be 1 to the ranks")
            check(f"{field}.points", curve.points, len(curve.points) > 1, "have at least two points")
            points = []
            for place, texts in enumerate(curve.points):
                where = f"{field}.points[{place}]"
                for text in texts:
                    match = _RATIONAL.fullmatch(text)
                    check(where, text, match is not None and text == text_of(Fraction(text)), "be a/b in lowest terms")
                point = BoundPoint(*(Fraction(text) for text in texts))
                check(where, texts[0], point.lost < 1, "be below 1")
                check(where, texts[2], 1 <= point.optimal <= point.ring, "be from 1 to the ring's")
                points.append(point)
            rising = all(one.lost < other.lost for one, other in pairwise(points))
            check(f"{field}.points", [text_of(each.lost) for each in points], rising, "rise")
            curves.append(BoundCurve(curve.ranks, curve.stragglers, tuple(points)))
        keys = [(curve.ranks, curve.stragglers) for curve in curves]
        check("curves", keys, len(set(keys)) == len(keys), "be of different ranks or stragglers")
        return cls(file.title, tuple(file.command), tuple(curves))


def stragglers(ranks: int, count: int, lost: Fraction) -> Topology:
    """`ranks` endpoints of rate 1, the last `count` of which have lost a share of it."""
    servers = []
    for index in range(ranks):
        rate = 1 - lost if index >= ranks - count else Fraction(1)
        servers.append(Server(f"h{index}", 1, (Nic(0, rate, rate),)))
    return Topology(tuple(servers))


def curves(
    ranks: Sequence[int] = RANKS, counts: Sequence[int] = STRAGGLERS, steps: int = STEPS
) -> tuple[BoundCurve, ...]:
    """A curve for each number of stragglers and of ranks: at multiples of 1/steps, and about where the bound bends."""
    return tuple(_curve(p, count, steps) for count in counts for p in ranks if count <= p)


def _curve(ranks: int, count: int, steps: int) -> BoundCurve:
    shares = {Fraction(step, steps) for step in range(int(LOST_MAX * steps) + 1)}
    if count < ranks:
        # l = 2l(p - 1)/(l(p - s) + s): from there on the stragglers bind, and not the sum.
        slowdown = Fraction(2 * (ranks - 1) - count, ranks - count)
        bend = 1 - 1 / slowdown
        # It rises steeply beyond, so points are closer there.
        beyond = {bend + Fraction(1, 2**power) for power in _BEYOND_POWERS}
        shares |= {share for share in (bend, *beyond) if bend > 0 and share <= LOST_MAX}
    # Not `fault_free` of each topology: where all are slow, it cannot know the healthy rate.
    unit = ring(stragglers(ranks, 0, Fraction(0)), 1)
    points = []
    for lost in sorted(shares):
        topology = stragglers(ranks, count, lost)
        points.append(BoundPoint(lost, ring(topology, 1) / unit, optimum(topology, 1) / unit))
    return BoundCurve(ranks, count, tuple(points))


@record_command(BoundCurves, RecordForm(quick=SECONDS, one_session=SECONDS))
def command() -> BoundCurves:
    """Evaluate all curves and write the record."""
    return BoundCurves(TITLE, ("optcc", "experiment", "bound-curves"), curves())
