"""The record of the bound is what the formulas give and nothing else; the figure draws exactly the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from optcc.errors import CodecError, InputError
from optcc.experiments import bound_record
from optcc.experiments.bound_record import BoundCurve, BoundCurves, BoundPoint, curves
from optcc.experiments.made import unstamped
from optcc.paper_figures import bound_curves, build, style
from optcc.verify.bounds.predictions import one_straggler_optimum
from tests.unit.verify.bounds.formulas import two_straggler_optimum

pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = BoundCurves("title", ("make",), curves((4, 8), (1, 2), steps=8))


def line(figure: Figure, gid: str) -> list[tuple[float, float]]:
    """The points of the only line with this id."""
    (found,) = figure.findobj(lambda each: each.get_gid() == gid)
    data: Any = found
    return [(float(x), float(y)) for x, y in zip(*data.get_data(), strict=True)]


# The record


def test_the_committed_record_is_what_the_formulas_give() -> None:
    """Exactly, curve by curve, for all but the largest clusters."""
    record = BoundCurves.read(BoundCurves.own_path)
    assert [(c.stragglers, c.ranks) for c in record.curves] == [
        (count, ranks) for count in bound_record.STRAGGLERS for ranks in bound_record.RANKS
    ]
    small = curves(bound_record.RANKS[:4])
    assert tuple(c for c in record.curves if c.ranks in bound_record.RANKS[:4]) == small
    assert record.to_bytes() == unstamped(BoundCurves.own_path.read_bytes())


def test_the_committed_record_agrees_with_the_formulas_written_out() -> None:
    """One and two stragglers, every size."""
    for curve in BoundCurves.read(BoundCurves.own_path).curves:
        formula = {1: one_straggler_optimum, 2: two_straggler_optimum}.get(curve.stragglers)
        for point in curve.points:
            slowdown = 1 / (1 - point.lost)
            assert point.ring == slowdown
            if formula is not None:
                unit = Fraction(2 * (curve.ranks - 1), curve.ranks)
                assert point.optimal == formula(curve.ranks, slowdown) / unit


def test_points_stand_where_the_bound_bends() -> None:
    """p = 4, one straggler: l = 5/3, two fifths lost."""
    points = {point.lost: point.optimal for point in SMALL.curves[0].points}
    assert points[Fraction(2, 5)] == Fraction(10, 9)
    assert points[Fraction(0)] == 1


def test_round_trip(tmp_path: Path) -> None:
    """Written and read."""
    SMALL.write(tmp_path / "a.json")
    assert BoundCurves.read(tmp_path / "a.json") == SMALL


def edited(edit: Callable[[Any], object]) -> bytes:
    """The small record with one thing changed."""
    value = json.loads(SMALL.to_bytes())
    edit(value)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda v: v.update(format="optcc-bounds/2"), r"\$\.format"),
        (lambda v: v.update(more=1), "more"),
        (lambda v: v.pop("columns"), "columns"),
        (lambda v: v["columns"].reverse(), r"\$\.columns"),
        (lambda v: v.update(curves=[]), r"\$\.curves"),
        (lambda v: v["curves"].append(v["curves"][0]), r"\$\.curves.*different"),
        (lambda v: v["curves"][1].update(ranks=1), r"\$\.curves\[1\]\.ranks: 1"),
        (lambda v: v["curves"][1].update(stragglers=9), r"\$\.curves\[1\]\.stragglers: 9"),
        (lambda v: v["curves"][0].update(points=v["curves"][0]["points"][:1]), "at least two points"),
        (lambda v: v["curves"][0]["points"].reverse(), r"\$\.curves\[0\]\.points: .*must rise"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(1, "4/2"), r"points\[2\]: '4/2': must be a/b"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(1, "0.5"), "must be a/b"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(1, "1/0"), "must be a/b"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(2, "1/2"), "must be from 1 to the ring's"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(2, "9/1"), "must be from 1 to the ring's"),
        (lambda v: v["curves"][0]["points"][-1].__setitem__(0, "1/1"), "must be below 1"),
        (lambda v: v["curves"][0]["points"][2].append("1/1"), r"points\[2\]|points\[\.\.\.\]"),
        (lambda v: v["curves"][0]["points"][2].__setitem__(0, 0.5), "points"),
    ],
)
def test_what_is_no_record_is_refused(edit: Callable[[Any], object], why: str) -> None:
    """With the path to the field."""
    with pytest.raises(CodecError, match=why):
        BoundCurves.from_bytes(edited(edit), "r.json")


def test_no_json() -> None:
    """Nor is this."""
    for data in (b"", b"[]", b"[" * 100_000, b"\xff"):
        with pytest.raises(CodecError, match=r"r\.json"):
            BoundCurves.from_bytes(data, "r.json")


# The figure


def test_lines_are_the_record() -> None:
    """Every point of every curve, above as it is, below as percent."""
    figure = bound_curves.draw(bound_curves.data(SMALL))
    for curve in SMALL.curves:
        key = f"{curve.stragglers}:{curve.ranks}"
        assert line(figure, f"optimal:{key}") == [(float(100 * p.lost), float(p.optimal)) for p in curve.points]
        assert line(figure, f"log-optimal:{key}") == [
            (float(100 * p.lost), float(100 * (p.optimal - 1))) for p in curve.points if p.optimal > 1
        ]
    ring = line(figure, "ring:1")
    assert all(y == pytest.approx(1 / (1 - x / 100)) for x, y in ring)


def test_everything_drawn_is_within_the_axes_and_no_text_is_cut() -> None:
    """The committed record: T* nowhere leaves its panel, and all text lies on the paper."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = bound_curves.draw(bound_curves.data(BoundCurves.read(BoundCurves.own_path)))
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for each in axes.lines:
            if "ring" not in str(each.get_gid()):
                assert low <= 1 and max(y for _, y in line(figure, str(each.get_gid()))) <= high
    with style.applied():
        canvas: Any = FigureCanvasAgg(figure)
        box = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height


def test_numbers_are_the_record_at_one_half() -> None:
    """1/(p - 1) for one straggler."""
    numbers = bound_curves.numbers(bound_curves.data(SMALL))
    assert numbers["half/1-stragglers/8-ranks/overhead-percent"].value == pytest.approx(100 / 7)
    assert numbers["half/1-stragglers/8-ranks/ring-overhead-percent"].text == "100.0"
    assert len(numbers) == 2 * len(SMALL.curves)


def test_one_curve_is_enough() -> None:
    """One panel, one line."""
    alone = replace(
        SMALL, curves=(BoundCurve(4, 1, (BoundPoint(*map(Fraction, (0, 1, 1))), SMALL.curves[0].points[-1])),)
    )
    figure = bound_curves.draw(bound_curves.data(alone))
    assert len(figure.axes) == 2


def test_build_draws_it_and_names_its_record(tmp_path: Path) -> None:
    """Beside nothing else; two such records are one too many."""
    for name in ("a.json", "b.json"):
        SMALL.write(tmp_path / name)
    build.build([tmp_path / "a.json"], tmp_path / "out", quick=True)
    manifest = json.loads((tmp_path / "out" / build.MANIFEST).read_bytes())
    assert [each["file"] for each in manifest["figures"]["bound-curves"]["records"]] == ["a.json"]
    assert (tmp_path / "out" / "bound-curves.png").read_bytes().startswith(b"\x89PNG")
    assert b"bound-curves/half/1-stragglers/4-ranks/overhead-percent" in (tmp_path / "out" / "numbers.tex").read_bytes()
    with pytest.raises(InputError, match=r"a\.json, b\.json: a second figure bound-curves"):
        build.build([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "again", quick=True)
    assert not (tmp_path / "again").exists()
