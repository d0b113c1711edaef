"""The battery's figure draws exactly its record, here one of the stand-in that is made in the test."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optcc.experiments.gpu_battery import PARTS, GpuBattery, describe_device
from optcc.experiments.gpu_collectives import BatteryLine
from optcc.experiments.kernel_bench import CudaDevice, measure
from optcc.paper_figures import build, gpu_battery_dots, sources
from tests.unit.paper_figures.test_figures import check_legible
from tests.unit.stand_in_cupy import StandIn

pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")


@pytest.fixture(scope="module")
def record() -> GpuBattery:
    """Of two parts and some kernels; no time means anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", StandIn(3, 1))
        found = [PARTS[part](True) for part in ("overlap", "step")]
        kernels = tuple(
            row for size in (1 << 12, 1 << 14) for row in measure(CudaDevice(), size, 1, ("float32", "int8"))
        )
        timings = tuple(row for each in found for row in each.timings)
        lines = tuple(each.line for each in found)
        return GpuBattery(describe_device(), {}, {}, True, lines, timings, kernels)


def dots(figure: Any, gid: str) -> list[tuple[float, float]]:
    """The dots of the only artist with this id."""
    (found,) = figure.findobj(lambda each: each.get_gid() == gid)
    return [(float(x), float(y)) for x, y in zip(*found.get_data(), strict=True)]


def test_every_dot_is_the_records(record: GpuBattery) -> None:
    table = gpu_battery_dots.data(record)
    figure = gpu_battery_dots.draw(table)
    dtypes = ["float32", "int8"]
    drawn = []
    for size, kernels in table.panels:
        for kernel in kernels:
            for share, place in dots(figure, f"kernel:{size}:{kernel}"):
                drawn.append((size, kernel, dtypes[int(place)], share))
    said = [(row.size_bytes, row.kernel, row.dtype, 100 * row.copy_share) for row in record.kernels]
    assert sorted(drawn) == sorted(said) and len(drawn) > 8
    assert [x for x, _ in dots(figure, "ratio")] == [row.ratio for row in record.timings]
    assert dots(figure, "least:4096")[0][0] == 90
    check_legible(figure)
    numbers = gpu_battery_dots.numbers(table)
    assert numbers["wrong"].value == 0 and numbers["cases"].value == sum(line.cases for line in record.lines)
    assert numbers["4KiB/least/copy-share-percent"].value == min(share for size, _, _, share in said if size == 4096)


def test_wrong_elements_are_in_the_title(record: GpuBattery) -> None:
    wrong = replace(record, lines=(BatteryLine("step", 7, 3, ""),))
    figure = gpu_battery_dots.draw(gpu_battery_dots.data(wrong))
    assert "GPU battery on stand-in: 3 wrong elements in 7 cases" in [text.get_text() for text in figure.texts]
    check_legible(figure)


def test_a_record_without_kernels_or_times_is_drawn(record: GpuBattery) -> None:
    for part in (replace(record, kernels=()), replace(record, timings=())):
        check_legible(gpu_battery_dots.draw(gpu_battery_dots.data(part)))


def test_it_is_drawn_from_a_record_and_left_out_without(record: GpuBattery, tmp_path: Path) -> None:
    path = tmp_path / "battery.json"
    path.write_bytes(record.to_bytes())
    written = build.build([path], tmp_path / "out", quick=True)
    assert written.left_out == ()
    assert "gpu-battery.png" in [file.name for file, _ in written.files]
    told = json.loads((tmp_path / "out" / "numbers.json").read_bytes())
    assert told["gpu-battery"]["wrong"] == 0
    others = [kind for kind in build.FIGURES if kind.name != "gpu-battery"]
    read = sources.read([kind.record.own_path for kind in others])
    commands = {"gpu-battery.json": "optcc experiment gpu-battery"}
    line = "gpu-battery: left out: no record gpu-battery.json: optcc experiment gpu-battery"
    assert build.left_out_of(read, commands) == (line,)
