"""The report: one page that needs nothing from elsewhere, with every claim, figure, timeline and record."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from dataclasses import replace
from html import unescape
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.claims import package_table
from optcc.experiments.gpu_battery import GpuBattery
from optcc.experiments.made import UNDATED, UNKNOWN
from optcc.experiments.paper_claims import CLAIMS
from optcc.experiments.peers_record import PeerComparison
from optcc.experiments.record import RECORDS, Recorded
from optcc.experiments.reranking import Reranking
from optcc.experiments.seen_failure import SeenFailure
from optcc.paper_figures import build, interactive, report, report_timelines, sources
from optcc.paper_figures.interactive import BarChart, BarLayer, TimeMark
from optcc.paper_figures.report import Provenance, ReportFigure, provenances
from optcc.paper_figures.sources import Source

needs_bokeh = pytest.mark.skipif(not interactive.is_installed(), reason="no Bokeh: pip install 'optcc[viz]'")
SEEN = SeenFailure.read()
TABLE = package_table(CLAIMS)
GROUPS = report_timelines.groups(SEEN)
COMMANDS = {"reranking.json": "optcc experiment reranking"}


@pytest.fixture(scope="module")
def read() -> tuple[Source, ...]:
    return sources.read([RECORDS / name for name in ("seen-failure.json", "reranking.json")])


def made(read: tuple[Source, ...]) -> str:
    """The page of two records, of which one is in two figures."""
    figures = [
        ReportFigure(name, f"what `{name}` says", b"<svg/>" + name.encode(), "image/svg+xml", (read[0],))
        for name in ("first", "second")
    ]
    return report.page(read, figures, TABLE, COMMANDS).decode()


@needs_bokeh
def test_it_has_everything_twice_the_same_and_nothing_from_elsewhere(
    read: tuple[Source, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = GROUPS[1:2]
    monkeypatch.setattr(report_timelines, "groups", lambda record: few if record is read[0].record else ())
    page = made(read)
    own = page.replace(interactive.library(), "")
    assert len(own) < len(page) - 100_000
    assert not re.search(r"https?:|url\(|@import|<link|<iframe", own)
    loads = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", own)
    assert loads
    assert all(each.startswith(("data:image/svg+xml;base64,", "#")) for each in loads)
    for name in ("first", "second"):
        assert b64encode(b"<svg/>" + name.encode()).decode() in own
        assert f"what <code>{name}</code> says" in own
    text = unescape(re.sub(r"<[^>]*>", "", own))
    assert all(claim.says.replace("`", "") in text for claim in CLAIMS)
    assert 'id="table-reranking.json"' in own and 'id="table-seen-failure.json"' not in own
    assert all(each.sha256 in own for each in read)
    assert COMMANDS["reranking.json"] in own
    assert own.count('class="timeline"') == own.count("Bokeh.embed.embed_item(") == len(few)
    assert made(read) == page


def test_without_bokeh_it_says_so(read: tuple[Source, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    page = report.page(read, (), None, {}).decode()
    assert "pip install &#x27;optcc[viz]&#x27;" in page
    assert "embed_item" not in page and "<script" not in page
    assert 'id="claims"' not in page and 'id="figures"' not in page


# Timelines


def test_a_plan_that_is_not_made_any_more_is_left_out() -> None:
    before, _ = SEEN.traces
    turned = msgspec.structs.replace(before, src=before.dst, dst=before.src)
    more = msgspec.structs.replace(before, **{name: getattr(before, name)[:-1] for name in ("src", "dst")})
    for other in (turned, more):
        assert report_timelines.traced_plan(SEEN, other) is None
    plan = report_timelines.traced_plan(SEEN, before)
    assert plan is not None and (plan.name, len(plan.transfers)) == (before.plan, len(before.src))


def test_the_failure_is_marked_and_the_failed_nic_is_down() -> None:
    (chart,) = GROUPS[0].charts
    assert [mark.at for mark in chart.marks if SEEN.failed in mark.text] == [0.0]
    (down,) = (layer for layer in chart.layers if layer.name == "NIC down")
    assert set(down.columns["NIC"]) == {SEEN.failed}
    assert min(down.columns["left"]) == SEEN.first_down_s
    steps = next(layer for layer in chart.layers if layer.name == "step that is traced")
    assert steps.columns["step"] == [trace.step for trace in SEEN.traces]


def test_measured_bars_are_the_times_of_the_record_beside_the_prediction() -> None:
    for trace, group in zip(SEEN.traces, GROUPS[1:3], strict=True):
        predicted, measured = group.charts
        assert "predicted, fair" in predicted.title and "measured" in measured.title
        n = len(trace.src)
        assert [sum(len(layer.columns["left"]) for layer in chart.layers) for chart in group.charts] == [2 * n, 2 * n]
        left = sorted(each for layer in measured.layers for each in layer.columns["left"])
        assert np.allclose(left, sorted(2 * [1e3 * each for each in trace.posted_s]), atol=1e-6)
        assert max(max(layer.columns["right"]) for layer in measured.layers) == pytest.approx(1e3 * trace.seconds)
        assert max(max(layer.columns["right"]) for layer in predicted.layers) == pytest.approx(1e3 * trace.predicted_s)
        for layer in measured.layers:
            assert {"transfer", "stage", "bytes"} <= {word for word, _ in layer.hover}
            assert set(layer.columns["stage"]) == {layer.name}


@pytest.mark.parametrize(
    "chart", [chart for group in GROUPS[1:] for chart in group.charts], ids=lambda each: each.title
)
def test_no_bar_lies_on_another_and_each_is_in_its_row(chart: BarChart) -> None:
    at: dict[tuple[int, float], list[tuple[float, float]]] = {}
    for layer in chart.layers:
        names = ("left", "right", "top", "bottom", "port")
        for left, right, top, bottom, port in zip(*(layer.columns[name] for name in names), strict=True):
            row = int(top)
            assert row < top < bottom < row + 1 and chart.rows[row] == port
            at.setdefault((row, top), []).append((left, right))
    for bars in at.values():
        ordered = sorted(bars)
        assert all(one[1] <= two[0] + 1e-5 for one, two in pairwise(ordered))


# The charts


def small(title: str = "") -> BarChart:
    columns: dict[str, list[Any]] = {"left": [0.0], "right": [2.0], "top": [0.1], "bottom": [0.9], "what": ["<b>"]}
    return BarChart(title, "s", ("row",), 0.0, 2.0, (BarLayer("layer", "#000000", columns, (("what", "what"),)),))


@needs_bokeh
def test_an_item_is_safe_in_a_script_and_numbers_its_objects_anew() -> None:
    chart = replace(small("</script>"), marks=(TimeMark(1.0, "mark"),))
    text = interactive.item([chart], "there")
    assert "<" not in text
    found = json.loads(text)
    assert found["target_id"] == "there"
    assert re.findall(r'"(p\d+)"', text) == []
    assert found["root_id"] == found["doc"]["roots"][0]["id"]
    assert text == interactive.item([chart], "there") != interactive.item([small()], "there")


# Where records come from


def test_every_record_that_comes_along_is_in_a_figure_or_a_table() -> None:
    """And those of a kind that has a figure are in no table."""
    read = sources.read(sources.find(RECORDS))
    drawn = build.drawn_kinds()
    pictures = [
        ReportFigure(source.name, "", b"<svg/>", "image/svg+xml", (source,))
        for source in read
        if isinstance(source.record, drawn)
    ]
    others = [source for source in read if not isinstance(source.record, drawn)]
    assert len(others) + len(pictures) == len(read) > len(pictures) > 0
    there = [kind for kind in drawn if kind is not GpuBattery or GpuBattery.own_path.exists()]
    assert all(any(isinstance(source.record, kind) for source in read) for kind in there)
    tables = "".join(report.tables(read, pictures, {}))
    rows = {
        name: text.count("<tr>")
        for name, _, text in (each.partition('">') for each in tables.split('<details id="table-')[1:])
    }
    assert set(rows) == {source.name for source in others}
    assert all(count >= 2 for count in rows.values()), rows


def test_provenance_is_what_the_record_says() -> None:
    def of(record: Recorded) -> tuple[Provenance, ...]:
        return provenances(Source("r.json", "", record))

    (seen,) = of(SEEN)
    assert seen.command == () and seen.date == UNDATED and seen.code == UNKNOWN
    assert f"processor {SEEN.machine['processor']}" in seen.machine
    assert f"numpy {SEEN.versions['numpy']}" in seen.versions
    peers = PeerComparison.read()
    assert [each.date for each in of(peers)] == [session.finished for session in peers.sessions]
    (bounds,) = of(BoundCurves.read())
    assert bounds.command and bounds.machine == UNKNOWN
    (reranked,) = of(Reranking.read())
    assert reranked.versions != UNKNOWN
