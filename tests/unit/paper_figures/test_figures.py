"""Figures: the numbers of the record and no others, at the right heights, in every format, all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner

from optcc.cli import run
from optcc.commands.figures import command
from optcc.errors import CodecError, EnvironmentMissing, InputError, OptccError
from optcc.experiments.gpu_battery import GpuBattery
from optcc.experiments.record import RECORDS, BenchTiming, Record, Samples
from optcc.paper_figures import allreduce_bars, build, numbers, sources, style
from optcc.paper_figures.allreduce_bars import Bar, BarTable, Group
from optcc.paper_figures.numbers import Number

pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[3]
NAME = "allreduce-bars-64MiB-4ranks"
HEALTHY, HALF = "4@50MB/s", "4@50MB/s,3=25MB/s"
WHERE = "4 emulated hosts, 2 NICs of 200Mbit/s each"
PNG = b"\x89PNG\r\n\x1a\n"


def samples(median_s: float, wrong: int = 0) -> Samples:
    """Five undisturbed runs around `median_s`, and one that was disturbed and far off."""
    spread = [median_s, median_s - 0.02, median_s + 0.03, median_s - 0.01, median_s + 0.01, 9.0]
    return Samples(spread, [0.0] * 5 + [0.5], wrong)


def row(schedule: str, bed: str, median_s: float, predicted_s: float | None = None, wrong: int = 0) -> BenchTiming:
    """One row of the demo."""
    topology, bound_s = (HEALTHY, 2.028) if bed == "healthy" else (HALF, 2.704)
    timings = samples(median_s, wrong)
    return BenchTiming(
        schedule, bed, topology, 4, 64 * 2**20, "float32", "sum", 16, "d", bound_s, predicted_s, timings, None
    )


ROWS = (
    row("optcc", "half", 2.83, 2.79),
    row("mpi", "half", 4.11),
    row("ring", "half", 4.07, 4.057),
    row("ring", "healthy", 2.03, 2.029),
    row("mpi", "healthy", 2.09),
)


def record(rows: Sequence[BenchTiming] = ROWS, bed: str = WHERE) -> Record:
    """The demo's record."""
    return Record("AllReduce", ("optcc", "demo"), bed, 1.0074, {"cores": 2}, {"optcc": "0.1"}, tuple(rows))


def changed(one: BenchTiming, **changes: Any) -> BenchTiming:
    """`one` with other values."""
    return msgspec.structs.replace(one, **changes)


def write(folder: Path, *records: Record) -> list[Path]:
    """The records as files."""
    paths = [folder / f"record{number}.json" for number in range(len(records))]
    for path, each in zip(paths, records, strict=True):
        each.write(path)
    return paths


def artist(figure: Figure, gid: str) -> Any:
    """The only artist with this id."""
    found: list[Artist] = figure.findobj(lambda each: each.get_gid() == gid)
    assert len(found) == 1, (gid, found)
    return found[0]


def ids(figure: Figure, what: str) -> set[str]:
    """What stands behind `what:` in the ids of all artists."""
    known = {each.get_gid() or "" for each in figure.findobj()}
    return {gid.removeprefix(f"{what}:") for gid in known if gid.startswith(f"{what}:")}


# Numbers


def test_data_is_exactly_what_the_record_says() -> None:
    def bar(schedule: str, seconds: float, bound_s: float, predicted_s: float | None) -> Bar:
        over = 100 * (seconds / bound_s - 1)
        return Bar(schedule, seconds, seconds - 0.02, seconds + 0.03, 5, 6, predicted_s, over, 0)

    table = allreduce_bars.data([record()])
    case = table.case
    assert (case.size_bytes, case.dtype, case.reduction, case.ranks) == (64 * 2**20, "float32", "sum", 4)
    assert (case.where, case.wire_overhead, case.name) == (WHERE, 1.0074, NAME)
    assert table.groups == (
        Group("healthy", HEALTHY, 2.028, (bar("mpi", 2.09, 2.028, None), bar("ring", 2.03, 2.028, 2.029))),
        Group(
            "half",
            HALF,
            2.704,
            (bar("mpi", 4.11, 2.704, None), bar("ring", 4.07, 2.704, 4.057), bar("optcc", 2.83, 2.704, 2.79)),
        ),
    )


def test_records_of_one_bed_each_make_one_figure() -> None:
    apart = [record([each for each in ROWS if each.bed == bed], bed) for bed in ("half", "healthy")]
    table = allreduce_bars.data(apart)
    assert table.case.where == ""
    assert table.groups == allreduce_bars.data([record()]).groups


def test_all_runs_disturbed() -> None:
    loud = changed(ROWS[0], out_of_place=Samples([3.0, 2.0, 4.0], [0.5, 0.5, 0.5], 0))
    (bar,) = allreduce_bars.data([record([loud])]).bars
    assert (bar.seconds, bar.least_s, bar.greatest_s, bar.quiet, bar.runs) == (3.0, 2.0, 4.0, 0, 3)


def test_in_place_runs_count_where_there_are_no_others() -> None:
    (bar,) = allreduce_bars.data([record([changed(ROWS[0], out_of_place=None, in_place=samples(3.0, 7))])]).bars
    assert (bar.seconds, bar.wrong) == (3.0, 7)


def test_each_size_is_a_case() -> None:
    both = record([ROWS[0], changed(ROWS[0], size_bytes=2**20, dtype="int64", reduction="max")])
    first, second = allreduce_bars.cases([both])
    assert (first.name, second.name) == (NAME, "allreduce-bars-1MiB-4ranks-int64-max")
    assert allreduce_bars.data([both], second).case == second
    with pytest.raises(InputError, match=r"2 cases in the records .*: must be one"):
        allreduce_bars.data([both])
    with pytest.raises(InputError, match="0 cases in the records"):
        allreduce_bars.data([])
    with pytest.raises(InputError, match="must be one of the cases"):
        allreduce_bars.data([record()], second)


def test_a_schedule_is_measured_once() -> None:
    with pytest.raises(InputError, match=r"^healthy .*: ring was measured 2 times: must be once"):
        allreduce_bars.data([record(), record()])


def test_bounds_agree() -> None:
    with pytest.raises(CodecError, match=r"bounds of 2.7 s and 2.704 s: must be one"):
        allreduce_bars.data([record([*ROWS[:2], changed(ROWS[2], bound_s=2.7)])])


def test_numbers_are_those_of_the_table() -> None:
    found = allreduce_bars.numbers(allreduce_bars.data([record()]))
    assert found["half/optcc/seconds"] == Number(2.83, "2.83")
    assert found["half/optcc/over-bound-percent"].value == 100 * (2.83 / 2.704 - 1)
    assert found["half/optcc/over-bound-percent"].text == "4.7"
    assert found["half/bound"] == Number(2.704, "2.704")
    assert found["half/optcc/runs"].value == 6
    assert found["half/optcc/undisturbed"].value == 5
    assert found["wire-overhead-percent"].text == "0.74"
    assert found["size"] == Number(64 * 2**20, "64MiB")
    assert "half/mpi/predicted" not in found


def test_tex() -> None:
    text = numbers.as_tex({"a_b": {"x y/z": Number(1.5, "1.5"), "t": Number("", "50 % & {#_$~^\\}")}}).decode()
    assert r"\expandafter\def\csname optcc/a-b/x-y/z\endcsname{1.5}" in text
    assert r"{50 \% \& \{\#\_\$\textasciitilde{}\textasciicircum{}\textbackslash{}\}}" in text
    with pytest.raises(InputError, match="another one is called a-b/x in TeX"):
        numbers.as_tex({"a_b": {"x": Number.whole(1)}, "a-b": {"x": Number.whole(2)}})


# The picture


def test_bars_and_bounds_stand_where_they_must() -> None:
    table = allreduce_bars.data([record()])
    figure = allreduce_bars.draw(table)
    edges = []
    for group in table.groups:
        line = artist(figure, f"bound:{group.bed}")
        assert list(line.get_ydata()) == [group.bound_s, group.bound_s]
        assert artist(figure, f"bound-label:{group.bed}").get_text() == f"{group.bound_s} s"
        for bar in group.bars:
            known = f"{group.bed}:{bar.schedule}"
            patch = artist(figure, f"bar:{known}")
            assert (patch.get_y(), patch.get_height()) == (0, bar.seconds)
            left, right = patch.get_x(), patch.get_x() + patch.get_width()
            assert line.get_xdata()[0] < left < right < line.get_xdata()[1]
            edges += [left, right]
            ((_, low), (_, high)) = artist(figure, f"whisker:{known}").get_segments()[0]
            assert (low, high) == pytest.approx((bar.least_s, bar.greatest_s))
            if bar.predicted_s is not None:
                assert list(artist(figure, f"predicted:{known}").get_ydata()) == [bar.predicted_s]
    assert edges == sorted(edges)
    assert ids(figure, "bar") == {"healthy:mpi", "healthy:ring", "half:mpi", "half:ring", "half:optcc"}
    assert ids(figure, "predicted") == {"healthy:ring", "half:ring", "half:optcc"}
    assert ids(figure, "wrong") == set()
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.get_figwidth() == style.COLUMN_IN


def test_text_over_the_bars() -> None:
    rows = [*ROWS, row("optimal", "half", 2.69, wrong=12)]
    figure = allreduce_bars.draw(allreduce_bars.data([record(rows)]))
    assert artist(figure, "over:half:optcc").get_text() == "+4.7\u202f%"
    assert artist(figure, "over:half:optimal").get_text() == "−0.5\u202f%"
    assert artist(figure, "over:half:ring").get_text() == "+51\u202f%"
    assert artist(figure, "bar:half:optimal").get_edgecolor()[0] > 0.7
    wrong = [each for each in figure.findobj() if each.get_gid() == "wrong:half:optimal"]
    assert {each.get_text() for each in wrong} == {"12", "wrong"}  # type: ignore[attr-defined]
    assert {each.get_color() for each in wrong} == {style.WRONG}  # type: ignore[attr-defined]
    assert ids(figure, "wrong") == {"half:optimal"}


def crowd(n_schedules: int) -> BarTable:
    """Two beds of many schedules with long names, some of them wrong."""
    names = [f"r2ccl-allreduce-{number}" for number in range(n_schedules)]
    rows = [
        row(name, bed, 2.1 + number / 3, 2.4, 12345 * (number == 2))
        for bed in ("healthy", "half")
        for number, name in enumerate(names)
    ]
    return allreduce_bars.data([record(rows)])


def lonely() -> BarTable:
    """One run of one schedule, without topology, bound or prediction, in microseconds."""
    timing = Samples([0.00012], [0.0], 0)
    one = changed(ROWS[0], bed="given", topology="", bound_s=None, predicted_s=None, out_of_place=timing)
    return allreduce_bars.data([replace(record([one], "given"), wire_overhead=1.0)])


def check_legible(figure: Figure) -> None:
    """Every text is within the figure, touches no other, and has no mark-up of formulas that is not set."""
    from matplotlib.backends import backend_agg
    from matplotlib.text import Text

    with style.applied():
        canvas: Any = backend_agg.FigureCanvasAgg(figure)
        canvas.draw()
        axes = [each for both in figure.axes for each in (both.xaxis, both.yaxis)]
        hidden = {
            label
            for axis in axes
            for tick in axis.get_major_ticks()
            for label in (tick.label1, tick.label2)
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        }
        texts = [each for each in figure.findobj(Text) if isinstance(each, Text) and each.get_text().strip()]
        texts = [each for each in texts if each not in hidden]
        boxes = [(each, Text.get_window_extent(each, canvas.get_renderer())) for each in texts if each.get_visible()]
    everything = figure.bbox
    for number, (one, box) in enumerate(boxes):
        assert one.get_parse_math() or not re.search(r"\$|\^|\b[A-Z]_", one.get_text()), one.get_text()
        assert everything.x0 - 1 <= box.x0 and box.x1 <= everything.x1 + 1, one.get_text()
        assert everything.y0 - 1 <= box.y0 and box.y1 <= everything.y1 + 1, one.get_text()
        for other, beside in boxes[number + 1 :]:
            if one.get_rotation() % 90 or other.get_rotation() % 90:
                continue  # sloping names have boxes far larger than they are
            overlap_x = min(box.x1, beside.x1) - max(box.x0, beside.x0)
            overlap_y = min(box.y1, beside.y1) - max(box.y0, beside.y0)
            assert overlap_x <= 1 or overlap_y <= 2, (one.get_text(), other.get_text())


_QUICK = ("bound-curves",)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, id=k.name, marks=() if k.name in _QUICK else pytest.mark.slow)
        for k in build.FIGURES
        # That of a GPU may not be there.
        if k.record.own_path.exists() or k.record is not GpuBattery
    ],
)
def test_figures_of_the_records_that_come_along_are_legible(kind: build.FigureKind) -> None:
    (source,) = sources.read([kind.record.own_path])
    for table in kind.tables(source.record).values():
        check_legible(kind.draw(table))


@pytest.mark.parametrize(
    "table",
    [allreduce_bars.data([record()]), crowd(3), crowd(5), crowd(12), lonely()],
    ids=["demo", "six", "ten", "crowd", "lonely"],
)
def test_no_text_touches_another(table: BarTable) -> None:
    """Also with the whole figure around it."""
    check_legible(allreduce_bars.draw(table))


def test_many_bars_stay_in_a_column_with_shorter_percents() -> None:
    names = ("mpi", "ring", "r2ccl-balance", "r2ccl-allreduce", "optcc", "optimal")
    rows = [*(row(name, "half", 2.83 if name == "optcc" else 4.1) for name in names), *ROWS[3:]]
    figure = allreduce_bars.draw(allreduce_bars.data([record(rows)]))
    assert figure.get_figwidth() == style.COLUMN_IN
    assert artist(figure, "over:half:optcc").get_text() == "+5"


def test_beds_of_one_name_are_told_apart() -> None:
    other = changed(row("ring", "half", 3.0), topology="4@50MB/s,2=25MB/s")
    table = allreduce_bars.data([record([ROWS[2], other])])
    assert ids(allreduce_bars.draw(table), "bar") == {f"half-{HALF}:ring", "half-4@50MB/s,2=25MB/s:ring"}
    found = allreduce_bars.numbers(table)
    assert (found[f"half-{HALF}/ring/seconds"].value, found["half-4@50MB/s,2=25MB/s/ring/seconds"].value) == (4.07, 3.0)


def test_names_are_names() -> None:
    """Dollars are no formulas, control characters no broken XML."""
    figure = allreduce_bars.draw(
        allreduce_bars.data([record([row("$\\frac{x$", "half", 3.0), row("a\0b", "half", 3.0)])])
    )
    content = style.render(figure, ".svg")
    assert ElementTree.fromstring(content).tag.endswith("svg")


def test_a_colour_belongs_to_a_name() -> None:
    known = ["mpi", "ring", "r2ccl-balance", "r2ccl-allreduce", "optcc", "optimal"]
    assert len({style.colour(name) for name in known}) == len(known)
    assert style.colour("new") == style.colour("new")
    assert sorted([*known[::-1], "a"], key=style.order) == [*known, "a"]


def test_nothing_global_changes() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = allreduce_bars.draw(allreduce_bars.data([record()]))
    style.render(figure, ".svg")
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.size": 40, "axes.facecolor": "red"}):
        same = allreduce_bars.draw(allreduce_bars.data([record()]))
    assert style.render(same, ".svg") == style.render(figure, ".svg")


# Files


def test_every_format_is_written(tmp_path: Path) -> None:
    paths = write(tmp_path, record())
    out = tmp_path / "deep" / "out"
    written = build.build(paths, out)
    expected = {f"{NAME}.svg", f"{NAME}.pdf", f"{NAME}.png", f"{NAME}@2x.png"}
    others = {"numbers.tex", "numbers.json", "manifest.json", "report.html"}
    assert {path.name for path in out.iterdir()} == expected | others == {path.name for path, _ in written.files}
    assert ElementTree.parse(out / f"{NAME}.svg").getroot().tag.endswith("svg")
    pdf = (out / f"{NAME}.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-") and b"/FontFile2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf
    small, large = ((out / f"{NAME}{each}").read_bytes() for each in (".png", "@2x.png"))
    assert small.startswith(PNG) and large.startswith(PNG)
    widths = [int.from_bytes(each[16:20], "big") for each in (small, large)]
    assert widths == [680, 1360]
    picture = b64encode((out / f"{NAME}.svg").read_bytes()).decode()
    assert f'src="data:image/svg+xml;base64,{picture}"' in (out / "report.html").read_text(encoding="utf-8")
    digest = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert manifest["figures"] == {
        NAME: {"files": sorted(expected, key=_ending), "records": [{"file": "record0.json", "sha256": digest}]}
    }
    assert json.loads((out / "numbers.json").read_bytes())[NAME]["half/optcc/seconds"] == 2.83
    tex = (out / "numbers.tex").read_text(encoding="utf-8")
    assert rf"\csname optcc/{NAME}/half/optcc/seconds\endcsname{{2.83}}" in tex


def _ending(name: str) -> int:
    return style.formats(quick=False).index(name.removeprefix(NAME))


def test_quick_draws_one_png(tmp_path: Path) -> None:
    build.build(write(tmp_path, record()), tmp_path / "out", quick=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"{NAME}.png", "numbers.tex", "numbers.json", "manifest.json"}


@pytest.mark.slow
def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = write(tmp_path, record())
    build.build(paths, tmp_path / "first")
    code = "import sys; from optcc.cli import main; main(sys.argv[1:])"
    words = ["figures", "--record", str(paths[0]), "--out", str(tmp_path / "second"), "--quiet"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert f"{NAME}.svg" in names
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_each_figure_names_its_own_records(tmp_path: Path) -> None:
    smaller = record([changed(each, size_bytes=2**20) for each in ROWS])
    build.build(write(tmp_path, record(), smaller), tmp_path / "out", quick=True)
    figures = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["figures"]
    assert {name: [each["file"] for each in figure["records"]] for name, figure in figures.items()} == {
        NAME: ["record0.json"],
        "allreduce-bars-1MiB-4ranks": ["record1.json"],
    }


def test_the_same_run_on_other_hosts_is_another_figure(tmp_path: Path) -> None:
    build.build(write(tmp_path, record(), record(bed="4 threads on ports")), tmp_path / "out", quick=True)
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {f"{NAME}-4-emulated-hosts-2-nics-of-200mbit-s-each.png", f"{NAME}-4-threads-on-ports.png"}
    again = [record(), replace(record(), wire_overhead=1.5)]
    with pytest.raises(InputError, match=r"^records record1.json: a second figure"):
        build.build(write(tmp_path, *again), tmp_path / "out", quick=True)


def test_a_record_given_twice_counts_once(tmp_path: Path) -> None:
    (path,) = write(tmp_path, record())
    (tmp_path / "link.json").symlink_to(path)
    assert len(sources.read([path, path, tmp_path / "link.json"])) == 1


def test_nothing_is_written_when_drawing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, record())
    out = tmp_path / "out"
    build.build(paths, out)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    write(tmp_path, record([row("ring", "half", 3.3)]))
    real = style.render

    def fail(figure: Figure, ending: str) -> bytes:
        if ending == "@2x.png":
            raise InputError("drawing failed")
        return real(figure, ending)

    monkeypatch.setattr(style, "render", fail)
    with pytest.raises(InputError, match="drawing failed"):
        build.build(paths, out)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    with pytest.raises(InputError, match="drawing failed"):
        build.build(paths, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Bad input


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"\$\.rows: \[\]: must have at least one row"),
        ([changed(ROWS[0], out_of_place=None)], r"\$\.rows\[0\]\.out_of_place: None: must be given, or in_place"),
        ([changed(ROWS[0], out_of_place=Samples([], [], 0))], r"seconds: \[\]: must have at least one timing"),
        (
            [changed(ROWS[0], out_of_place=Samples([1.0], [], 0))],
            r"steal: \[\]: must have as many numbers as seconds, 1",
        ),
        (
            [ROWS[1], changed(ROWS[0], in_place=Samples([0.0], [0.0], 0))],
            r"rows\[1\]\.in_place\.seconds\[0\]: 0.0: must",
        ),
        ([changed(ROWS[0], out_of_place=Samples([1.0], [0.0], -1))], r"wrong: -1: must not be negative"),
        ([changed(ROWS[0], bound_s=-1.0)], r"\$\.rows\[0\]\.bound_s: -1.0: must not be negative"),
        ([changed(ROWS[0], predicted_s=-1.0)], r"\$\.rows\[0\]\.predicted_s: -1.0: must not be negative"),
        ([changed(ROWS[0], ranks=0)], r"\$\.rows\[0\]\.ranks: 0: must be at least 1"),
        ([changed(ROWS[0], size_bytes=-1)], r"size_bytes: -1: must not be negative"),
        ([changed(ROWS[0], schedule="")], r"schedule: '': must be a name"),
        ([changed(ROWS[0], bed="")], r"bed: '': must be a name"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, rows: list[BenchTiming], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        allreduce_bars.data([record(rows)])
    (path,) = write(tmp_path, record(rows))
    with pytest.raises(CodecError, match=message) as caught:
        build.build([path], tmp_path / "out")
    assert str(caught.value).startswith(f"record {str(path)!r}: $.")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overhead", [0.5, float("inf"), float("nan")])
def test_a_wire_that_carries_less_than_its_payload_is_refused(overhead: float) -> None:
    with pytest.raises(CodecError, match=r"\$\.wire_overhead: .*: must be at least 1"):
        allreduce_bars.data([replace(record(), wire_overhead=overhead)])


def test_contradictions_name_the_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^records record0.json, record1.json: healthy .* measured 2 times"):
        build.build(write(tmp_path, record(), record()), tmp_path / "out")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'optcc\[viz\]'"):
        build.build(write(tmp_path, record()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_importing_loads_no_matplotlib() -> None:
    code = "import sys, optcc.commands.figures; print('matplotlib' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


# The command


def test_command_prints_files_with_their_records(tmp_path: Path) -> None:
    (path,) = write(tmp_path, record())
    out = tmp_path / "out"
    done = CliRunner().invoke(command, ["--record", str(path), "--out", str(out), "--quick", "--json"])
    assert done.exit_code == 0, done.output
    listed = json.loads(done.stdout)
    own = [{"file": "record0.json", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
    assert [each["file"] for each in listed] == [
        str(out / name) for name in (f"{NAME}.png", "numbers.tex", "numbers.json", "manifest.json")
    ]
    assert all(each["records"] == own for each in listed)


def test_command_shows_a_table(tmp_path: Path) -> None:
    (path,) = write(tmp_path, record())
    done = CliRunner().invoke(command, ["--record", str(path), "--out", str(tmp_path / "out"), "--quick"])
    assert done.exit_code == 0, done.output
    assert f"{NAME}.png" in done.stdout


def test_help_has_an_example() -> None:
    assert "Example: optcc figures --record" in CliRunner().invoke(command, ["--help"]).output


@pytest.mark.parametrize("kind", ["missing", "broken", "folder"])
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "record.json"
    if kind == "broken":
        path.write_bytes(b"{}")
    elif kind == "folder":
        path.mkdir()
    assert run(["figures", "--record", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert str(path) in said.err


def test_the_packages_records_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RECORDS.resolve() == ROOT / "experiments" / "records"
    folder = tmp_path / "records"
    folder.mkdir()
    monkeypatch.setattr(build, "RECORDS", folder)
    with pytest.raises(InputError, match=r"^no record in '.*records': make one with optcc demo"):
        build.build([], tmp_path / "out")
    write(folder, record())
    build.build([], tmp_path / "out", quick=True)
    assert (tmp_path / "out" / f"{NAME}.png").is_file()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OptccError, match=r"folder '.*file/out': cannot be made: "):
        build.build(write(tmp_path, record()), tmp_path / "file" / "out", quick=True)


def test_every_record_of_the_package_is_known() -> None:
    """A new kind of record is either drawn or said not to be, or `optcc figures` refuses the folder."""
    paths = sources.find(RECORDS)
    assert [source.name for source in sources.read(paths)] == [path.name for path in paths]
