"""The record of servers that lost NICs: every line is there, ours is near the bound, and a case made again is equal."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from optcc.errors import CodecError
from optcc.experiments.lost_nics import CASES, CLAIM_GPUS, FIELD, GPUS, LOST, LostNics, LostNicsRecord, measure
from optcc.paper_figures import lost_nics_curves, server_gpus_curves


def test_the_record_has_every_schedule_and_ours_is_near_the_bound() -> None:
    record = LostNicsRecord.read()
    assert set(CASES) == set(record.cases)
    assert {LostNics(servers, GPUS, lost) for servers in (4, 8, 16) for lost in LOST} <= set(CASES)
    for case in record.cases:
        found = record.of(case)
        slower = {"r2ccl-nics"} if case.lost == 0 else set()
        assert set(FIELD) - slower <= set(found)
        assert 1 - 1e-9 <= record.ours(case).ratio <= 1.05
        # Equal shards: every GPU's shard enters the slow server, unless the fabrics are what takes longest.
        lost = Fraction(case.lost)
        across = 2 * Fraction(case.servers - 1, case.servers) * 2**30 / ((case.gpus - lost) * 50 * 10**9)
        assert record.ours(case).forestcoll_s >= float(across) * (1 - 1e-9)


def test_ours_beats_two_halves_of_equal_shards_by_what_the_bound_allows() -> None:
    record = LostNicsRecord.read()
    half = record.ours(LostNics(4, GPUS, 4))
    assert half.forestcoll_s / half.bound_s == pytest.approx(1.5)
    assert half.forestcoll_s / half.seconds > 1.48


@pytest.mark.parametrize("name", [pytest.param("nccl-tree", marks=pytest.mark.slow), "equal-trees"])
def test_a_case_gives_what_the_record_says(name: str) -> None:
    case = LostNics(4, GPUS, 7)
    said = LostNicsRecord.read().of(case)[name]
    row = measure(case, name, transfers_max=70_000)
    assert row is not None
    assert (row.bound_s, row.forestcoll_s, row.fault_free_s) == (said.bound_s, said.forestcoll_s, said.fault_free_s)
    assert row.tried == said.tried[: len(row.tried)]
    assert said.seconds <= row.seconds < 1.1 * said.seconds


def test_servers_of_one_gpu_lose_a_share_of_their_nic() -> None:
    assert [float(rate) for rate in LostNics(3, 1, 0.5).topology.out] == [50e9, 50e9, 25e9]
    row = measure(LostNics(3, 1, 0.5), "optcc-nics", transfers_max=100)
    assert row is not None
    assert row.ratio > 1


def test_the_figure_shows_what_the_record_says() -> None:
    record = LostNicsRecord.read()
    table = lost_nics_curves.data(record)
    assert [servers for servers, _ in table.panels] == [4, 8, 16]
    for _, lines in table.panels:
        assert set(lines) >= {*FIELD, "ours"}
        assert [lost for lost, _ in lines["ours"]] == list(LOST)
    lines = dict(table.panels)[4]
    assert dict(lines["nccl-ring"])[4] == record.of(LostNics(4, GPUS, 4))["nccl-ring"].ratio
    assert dict(lines["ours"])[4] == record.ours(LostNics(4, GPUS, 4)).ratio
    figure = lost_nics_curves.draw(table)
    drawn = {line.get_gid(): line for axes in figure.axes for line in axes.get_lines()}
    for servers, each in table.panels:
        for name, points in each.items():
            line = drawn[f"line:{servers}:{name}"]
            assert np.asarray(line.get_xydata()).tolist() == [list(point) for point in points]
    assert "4-servers/4-lost/ours/over-bound-percent" in lost_nics_curves.numbers(table)


def test_the_claim_is_drawn_and_tabled_by_gpus_a_server_in_percent_over_the_fault_free_ring() -> None:
    record = LostNicsRecord.read()
    table = server_gpus_curves.data(record)
    figure = server_gpus_curves.draw(table)
    drawn = {line.get_gid(): np.asarray(line.get_xydata()).tolist() for ax in figure.axes for line in ax.get_lines()}
    shown = {cells[0]: dict(zip(record.claim().columns, cells, strict=True)) for cells in record.claim().rows}
    assert [servers for servers, _ in table.panels][-1] == 16
    for servers, lines in table.panels:
        for name, column in {**{each: each for each in FIELD}, "ours": "ours", "bound": "T*"}.items():
            assert drawn[f"line:{servers}:{name}"] == [list(point) for point in lines[name]]
            assert [gpus for gpus, _ in lines[name]] == list(CLAIM_GPUS)
            for gpus, percent in lines[name]:
                assert shown[f"{servers} x {gpus}"][column] == f"{percent:.1f}"
                key = f"{servers}-servers/{gpus}-gpus/{name}/over-fault-free-percent"
                assert server_gpus_curves.numbers(table)[key].text == f"{percent:.1f}"
        for gpus, percent in lines["bound"]:
            # The result enters the slow server at half of the rate: 2 n/B, over 2 (p - 1)/p n/B of p GPUs.
            assert percent == pytest.approx(100 / (servers * gpus - 1))


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-lost-nics/1", b"optcc-lost-nics/2", r"\$\.format"),
        (b'"schedule": "', b'"schedule": "some', r"\$\.rows\[0\]\.schedule"),
        (b'"seconds": 0.', b'"seconds": 0.0000', r"\$\.rows\[0\]\.seconds"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = LostNicsRecord.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        LostNicsRecord.from_bytes(data.replace(before, after, 1))
