"""A sweep over sizes is one figure of curves, with the bound; fewer sizes stay bars."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from optcc.errors import InputError
from optcc.experiments.record import BenchTiming, Record, Samples, busbw
from optcc.paper_figures import build, size_curves

SIZES = (1 << 12, 1 << 16, 1 << 20)


def row(schedule: str, size: int, **changes: object) -> BenchTiming:
    """A time of twice the bound, which is a millisecond a MiB."""
    bound_s = 1e-3 * size / 2**20
    samples = Samples([2 * bound_s, 1.5 * bound_s, 3 * bound_s], [0.0] * 3, 0)
    made = BenchTiming(schedule, "given", "4@1GB/s", 4, size, "float32", "sum", 4, "", bound_s, bound_s, samples, None)
    return msgspec.structs.replace(made, **changes)


def record(*rows: BenchTiming) -> Record:
    return Record("AllReduce", ("optcc", "bench"), "given", 1.0, {"cores": 2}, {"optcc": "0.1"}, rows)


SWEPT = record(*(row(name, size) for size in SIZES for name in ("ring", "optcc")))


def test_three_sizes_are_a_sweep_and_two_are_bars() -> None:
    (sweep,) = size_curves.sweeps(SWEPT)
    assert sweep.name == "size-curves-allreduce-4ranks" and sweep.where == "given on 4@1GB/s"
    assert [(name, [each.size_bytes for each in rows]) for name, rows in sweep.curves] == [
        ("ring", list(SIZES)),
        ("optcc", list(SIZES)),
    ]
    assert size_curves.without_sweeps(SWEPT) is None
    few = replace(SWEPT, rows=SWEPT.rows[:4])
    assert size_curves.sweeps(few) == () and size_curves.without_sweeps(few) == few
    # A size of nothing has no place on a logarithmic axis.
    nothing = row("ring", 0, bound_s=None)
    assert size_curves.sweeps(replace(few, rows=(nothing, *few.rows))) == ()
    halves = [msgspec.structs.replace(each, bed="one half", dtype="float64") for each in SWEPT.rows]
    both = size_curves.sweeps(record(*SWEPT.rows, *halves, row("ring", 512, ranks=2)))
    assert [each.name for each in both] == [sweep.name, "size-curves-allreduce-4ranks-float64-sum-one-half"]


def test_curves_are_the_medians_and_the_bound() -> None:
    (sweep,) = size_curves.sweeps(SWEPT)
    figure = size_curves.draw(sweep)
    drawn = {line.get_gid(): line for axes in figure.axes for line in axes.lines}
    assert set(drawn) == {f"{kind}:{name}" for kind in ("time", "busbw") for name in ("ring", "optcc", "bound")}
    assert np.asarray(drawn["time:ring"].get_xdata()).tolist() == list(SIZES)
    assert np.asarray(drawn["time:ring"].get_ydata()).tolist() == pytest.approx([2e-3 * size / 2**20 for size in SIZES])
    bound = busbw(2**20, 1e-3, 4, "allreduce")
    assert np.asarray(drawn["busbw:bound"].get_ydata()).tolist() == pytest.approx([bound] * 3)
    assert np.asarray(drawn["busbw:optcc"].get_ydata()).tolist() == pytest.approx([bound / 2] * 3)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "1 ms" in labels and not any("$" in label for label in labels)
    assert size_curves.numbers(sweep)["ring/1MiB/bound-percent"].value == pytest.approx(50.0)


def test_build_draws_one_figure_for_a_sweep_beside_bars(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    record(*SWEPT.rows, row("ring", 1 << 10, bed="half")).write(file)
    made = build.build([file], tmp_path / "out", quick=True)
    names = sorted(path.name for path, _ in made.files)
    assert [name for name in names if name.endswith(".png")] == [
        "allreduce-bars-1KiB-4ranks.png",
        "size-curves-allreduce-4ranks.png",
    ]
    other = tmp_path / "again.json"
    SWEPT.write(other)
    with pytest.raises(InputError, match=r"bench.json, again.json: a second figure size-curves-allreduce-4ranks"):
        build.build([file, other], tmp_path / "out2", quick=True)
