"""`optcc show`: every byte is in the picture once and at its ports, and the tables and the JSON say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest

from optcc import cli
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import EnvironmentMissing, InputError, PlanError, TopologyError
from optcc.paper_figures import style
from optcc.paper_figures import timeline as drawing
from optcc.paper_figures.timeline import (
    BARS_MAX,
    IDLE,
    OTHER,
    PORTS_MAX,
    STAGE_COLOURS,
    Timeline,
    draw,
    port_intervals,
    timeline,
)
from optcc.planner import build_plan
from optcc.schedules.ring import ring
from optcc.simulate import MODELS, Model
from optcc.topology import Nic, Server, Topology
from tests.sample import sampled

pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
HALF = "4@50MB/s,3=25MB/s"
WORDS = ["show", "ring", "--topology", HALF, "--size", "1MiB", "--segments", "2"]
SERVERS = """
latency = "5us"
[[servers]]
count = 2
gpus = 2
fabric = "400MB/s"
nics = [{ rail = 0, rate = "50MB/s" }]
"""
SVG = "{http://www.w3.org/2000/svg}"
PNG = b"\x89PNG\r\n\x1a\n"


@schedule
def stepwise(program: Program) -> None:
    """A stage for every step of a broadcast around the ring, the later ones of fewer bytes."""
    for segment in program.pipeline(sections=2 * program.n_ranks):
        for rank in range(program.n_ranks - 1):
            with program.stage(f"step {rank}"):
                for section in range(2 * (program.n_ranks - rank)):
                    segment[section].copy(src=rank, dst=rank + 1)


def shown(topology: str = HALF, size: int = 2**20, segments: int = 2, model: Model = "fifo") -> Timeline:
    """The ring on a topology; the schedule itself does not ask how many GPUs a server has."""
    parsed = Topology.parse(topology)
    built = ring(n_ranks=parsed.n_ranks, segments=segments)
    return timeline(
        compile_schedule(built, size_bytes=size, topology=parsed, ports="exclusive" if model != "fifo" else "fifo"),
        parsed,
        model,
    )


def bars(figure: Figure) -> dict[str, list[tuple[float, float, float, float]]]:
    """Left, right, top and bottom of every bar, by id."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for each in figure.axes[0].collections:
        for path in each.get_paths():
            corners = np.asarray(path.vertices)
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            place = (float(left), float(right), round(float(top), 6), round(float(bottom), 6))
            found.setdefault(str(each.get_gid()), []).append(place)
    return found


def pixels(figure: Figure) -> Any:
    """The image of a picture that is one."""
    (image,) = figure.axes[0].images
    return np.asarray(image.get_array())


def said(figure: Figure) -> str:
    """All that is written in a figure."""
    return " ".join(each.get_text() for each in (*figure.texts, *figure.axes[0].texts))


def rgb(colour: str) -> list[int]:
    """The parts of `#rrggbb`."""
    return list(bytes.fromhex(colour[1:]))


# Intervals


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("topology", [HALF, "4@50MB/s,1=20MB/s:30MB/s", "2@1GB/s", "servers.toml"])
def test_intervals_carry_what_the_ports_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str, model: Model
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("servers.toml").write_text(SERVERS, encoding="utf-8")
    timed = shown(topology, model=model)
    intervals = port_intervals(timed.transfers, timed.topology, timed.timing)
    carried_s = np.bincount(intervals.port, intervals.share * (intervals.end_s - intervals.start_s))
    assert carried_s == pytest.approx(timed.timing.port_busy_s)
    assert sorted(intervals.transfer.tolist()) == sorted([*range(len(timed.transfers))] * 2)
    assert float(intervals.share.max()) <= 1 + 1e-9
    assert float(intervals.start_s.min()) == 0
    assert float(intervals.end_s.max()) <= timed.seconds * (1 + 1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_uplinks_have_no_intervals_and_the_picture_says_so(model: Model) -> None:
    timed = shown("4@1GB/s/2:1", model=model)
    intervals = port_intervals(timed.transfers, timed.topology, timed.timing)
    named = {timed.timing.port_names[port] for port in intervals.port.tolist()}
    assert named == {f"{way} h{server}" for way in ("out", "in") for server in range(4)}
    carried_s = np.bincount(intervals.port, intervals.share * (intervals.end_s - intervals.start_s))
    assert carried_s == pytest.approx(timed.timing.port_busy_s[: len(carried_s)])
    assert "not drawn at uplinks" in said(draw(timed))


def test_rails_with_ports_of_their_own_are_refused() -> None:
    """A transfer is at several of them."""
    two = (Nic(0, Fraction(10**9), Fraction(10**9)), Nic(1, Fraction(10**9), Fraction(10**9)))
    servers = (Server("a", 1, two), Server("b", 1, two[:1]), Server("c", 1, two[:1]))
    topology = Topology(servers, rail_only=True)
    timed = timeline(build_plan("ring", topology, 3000), topology)
    with pytest.raises(TopologyError, match="rails have ports of their own"):
        port_intervals(timed.transfers, topology, timed.timing)


@pytest.mark.parametrize("model", ["fifo", "exclusive"])
@pytest.mark.parametrize("latency", ["0s", "3ms"])
def test_a_port_has_one_transfer_at_a_time(model: Model, latency: str) -> None:
    topology = cli.with_latency(Topology.parse("5@50MB/s,2=20MB/s:25MB/s"), latency)
    timed = timeline(build_plan("ring", topology, 2**20, segments=3), topology, model)
    intervals = port_intervals(timed.transfers, topology, timed.timing)
    for port in range(len(timed.timing.port_names)):
        own = np.flatnonzero(intervals.port == port)
        own = own[np.argsort(intervals.start_s[own])]
        assert (intervals.end_s[own][:-1] <= intervals.start_s[own][1:] + 1e-9 * timed.seconds).all()


def test_a_transfer_inside_a_server_is_at_fabric_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("servers.toml").write_text(SERVERS, encoding="utf-8")
    timed = shown("servers.toml", segments=1)
    intervals = port_intervals(timed.transfers, timed.topology, timed.timing)
    for transfer, port in zip(intervals.transfer.tolist(), intervals.port.tolist(), strict=True):
        src, dst = int(timed.transfers.src[transfer]), int(timed.transfers.dst[transfer])
        name = timed.timing.port_names[port]
        rank = src if name.startswith("out") else dst
        inside = src // 2 == dst // 2
        assert name.split(" ", 1)[1] == (f"h{rank // 2} gpu {rank % 2}" if inside else f"h{rank // 2}")


# The noun


def test_a_timeline_is_frozen_and_its_times_are_of_its_transfers() -> None:
    timed = shown()
    with pytest.raises(FrozenInstanceError):
        timed.name = "other"  # type: ignore[misc]
    other = shown(segments=1)
    with pytest.raises(PlanError, match=r"^timeline of ring: times of 24 transfers: must be 48$"):
        replace(timed, timing=other.timing)
    with pytest.raises(TopologyError, match="5 ranks"):
        timeline(build_plan("ring", timed.topology, 64, segments=1), Topology.parse("5@1GB/s"))


def test_stages_say_what_moves_and_when() -> None:
    timed = shown()
    scatter, gather = timed.stages()
    assert (scatter.name, gather.name) == ("reduce-scatter", "all-gather")
    assert scatter.transfers == gather.transfers == 24
    assert scatter.bytes == gather.bytes == 3 * 2**20
    assert (scatter.start_s, gather.end_s) == (0.0, timed.seconds)
    assert scatter.end_s == float(timed.timing.end_s[timed.transfers.stage == 0].max())
    assert [row[0] for row in timed.stage_card().rows] == ["reduce-scatter", "all-gather"]


def test_a_stage_without_transfers_has_no_times() -> None:
    empty = shown(size=0)
    assert [(stage.transfers, stage.bytes, stage.start_s, stage.end_s) for stage in empty.stages()] == [
        (0, 0, None, None)
    ] * 2
    assert empty.stage_card().rows[0] == ("reduce-scatter", "0", "0B", "-", "-")


def test_transfers_are_listed_by_their_start() -> None:
    timed = shown()
    card = timed.transfer_card(45)
    assert card.title == "45 of 48 transfers, by their start"
    assert card.shown_rows() == card.rows
    assert card.rows[0] == ("0 s", "2.621 ms", "0->1", "reduce", "128KiB", "0", "0", "reduce-scatter")
    assert len(card.rows) == 45
    assert timed.transfer_card(45).rows[:7] == timed.transfer_card(7).rows
    assert len(timed.transfer_card(1000).rows) == 48


def test_a_notebook_shows_the_picture() -> None:
    timed = shown()
    assert ElementTree.fromstring(timed._repr_svg_()).tag == f"{SVG}svg"
    assert not hasattr(timed, "_repr_html_"), "it would be shown instead of the picture"
    assert repr(timed) == f"Timeline('ring', {timed.seconds:.6g} s, transfers=48)"


# The picture


def test_a_bar_for_each_transfer_at_each_of_its_ports() -> None:
    timed = shown()
    found = bars(draw(timed))
    assert {key: len(each) for key, each in found.items()} == {"idle": 8, "bars:0": 48, "bars:1": 48}
    intervals = port_intervals(timed.transfers, timed.topology, timed.timing)
    rows = sorted({(top, bottom) for *_, top, bottom in found["idle"]})
    assert len(rows) == 8
    expected = sorted(
        (float(start), float(end), rows[port][1])
        for start, end, port in zip(intervals.start_s, intervals.end_s, intervals.port, strict=True)
    )
    drawn = sorted((left, right, bottom) for key in ("bars:0", "bars:1") for left, right, _, bottom in found[key])
    assert np.array(drawn) == pytest.approx(np.array(expected))


def test_the_area_of_the_bars_is_the_percentage_beside_them() -> None:
    timed = shown(model="exclusive")
    figure = draw(timed)
    found = bars(figure)
    rows = sorted({(top, bottom) for *_, top, bottom in found["idle"]})
    area = dict.fromkeys([bottom for _, bottom in rows], 0.0)
    for key in ("bars:0", "bars:1"):
        for left, right, top, bottom in found[key]:
            area[bottom] += (right - left) * (bottom - top)
    shares = [area[bottom] / (bottom - top) / timed.seconds for top, bottom in rows]
    assert shares == pytest.approx(list(timed.timing.utilisation().values()))
    beside = [each.get_text() for each in figure.axes[0].texts if each.get_text().endswith("%")]
    assert beside == [f"{100 * share:.0f} %" for share in shares]
    assert min(bottom - top for _, _, top, bottom in found["bars:0"]) == pytest.approx((rows[0][1] - rows[0][0]) / 2)


def test_ports_and_stages_are_named() -> None:
    timed = shown()
    figure = draw(timed)
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == list(timed.timing.port_names)
    (legend,) = figure.legends
    assert [each.get_text() for each in legend.get_texts()] == ["reduce-scatter", "all-gather", "idle"]
    assert f"Predicted on {HALF}: fifo ports, no latency, 48 transfers in 2 segments." in said(figure)


@pytest.mark.parametrize("model", MODELS)
def test_an_image_shows_what_bars_show(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    monkeypatch.setattr(drawing, "BARS_MAX", 0)
    timed = shown(model=model)
    figure = draw(timed)
    image = pixels(figure)
    assert "Drawn as an image" in said(figure)
    colours = [rgb(each) for each in (*STAGE_COLOURS[:2], IDLE, "#ffffff")]
    of_colour = [(image == colour).all(axis=2) for colour in colours]
    assert sum(int(each.sum()) for each in of_colour) == image.shape[0] * image.shape[1]
    inked = ~of_colour[3][:, 0]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], inked, [False]))))
    shares = [
        float((of_colour[0] | of_colour[1])[top:bottom].mean())
        for top, bottom in zip(edges[::2], edges[1::2], strict=True)
    ]
    assert shares == pytest.approx(list(timed.timing.utilisation().values()), abs=0.03)


def test_large_plans_become_small_images() -> None:
    timed = shown("8@50MB/s,3=25MB/s", size=2**26, segments=40)
    assert 2 * len(timed.transfers) > BARS_MAX
    picture = timed._repr_svg_()
    assert "<image" in picture
    assert len(picture) < 2**20
    assert len(shown("8@50MB/s,3=25MB/s", size=2**26, segments=2)._repr_svg_()) < 2**20


def test_of_too_many_ports_the_busiest_are_drawn() -> None:
    slow = PORTS_MAX // 2 + 9
    topology = Topology.parse(f"{slow + 1}@50MB/s,{slow}=25MB/s")
    plan = compile_schedule(ring(n_ranks=slow + 1), size_bytes=2**20)
    figure = draw(timeline(plan, topology))
    assert f"{PORTS_MAX} of {2 * slow + 2} ports, those of the busiest servers." in said(figure)
    image = pixels(figure)
    last = image[-1]
    assert (last == rgb(IDLE)).all(axis=1).mean() < 0.1, "the straggler is busy all the time, and in the last row"


def test_the_smallest_of_too_many_stages_share_a_colour() -> None:
    n_stages = len(STAGE_COLOURS) + 2
    topology = Topology.parse(f"{n_stages + 1}@1GB/s")
    plan = compile_schedule(stepwise(n_ranks=n_stages + 1), size_bytes=2**16, topology=topology)
    figure = draw(timeline(plan, topology))
    (legend,) = figure.legends
    names = {each.get_text() for each in legend.get_texts()}
    assert names == {*(f"step {number}" for number in range(len(STAGE_COLOURS))), "2 other stages", "idle"}
    others = [each for each in figure.axes[0].collections if each.get_gid() == f"bars:{len(STAGE_COLOURS)}"]
    assert sum(len(each.get_paths()) for each in others) == 2 * (6 + 4)
    faces = np.concatenate([np.asarray(each.get_facecolor(), dtype=np.float64) for each in others])
    assert (255 * faces[:, :3]).round().astype(int).tolist() == [rgb(OTHER)] * len(faces)


@pytest.mark.parametrize(("topology", "size"), [("1@1GB/s", 2**10), ("3@1GB/s", 0)])
def test_nothing_to_show_is_shown(topology: str, size: int) -> None:
    timed = shown(topology, size)
    figure = draw(timed)
    assert "No transfer uses a port." in said(figure)
    assert timed._repr_svg_().startswith("<?xml")
    assert timed.as_json()["seconds"] == 0


def test_text_stays_inside_the_picture() -> None:
    name = "a-schedule-with-a-name-that-does-not-end"
    text = ",".join(["9@50MB/s", *(f"{server}={server + 1}MB/s" for server in range(9))])
    timed = replace(shown(text), name=name)
    figure = draw(timed)
    with style.applied():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
        room = figure.bbox
        boxes = [each.get_window_extent(renderer) for each in (*figure.texts, *figure.axes[0].texts, *figure.legends)]
        boxes += [each.get_window_extent(renderer) for each in figure.axes[0].get_yticklabels()]
    assert all(room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1 for box in boxes)
    lines = sorted((each.get_window_extent(renderer).y0, each.get_window_extent(renderer).y1) for each in figure.texts)
    assert all(below[1] <= above[0] + 1 for below, above in pairwise(lines))


ENDINGS = {".svg": b"<?xml", ".png": PNG, ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The timeline in each form, with few and with many bars, saved by another process in another place."""
    folder = tmp_path_factory.mktemp("elsewhere")
    code = (
        "import sys; from optcc.paper_figures import timeline; from optcc.cli import run\n"
        "for bars_max in map(int, sys.argv[2].split(',')):\n"
        "    timeline.BARS_MAX = bars_max\n"
        "    for ending in sys.argv[3].split(','):\n"
        "        assert run([*sys.argv[4:], '-o', f'{sys.argv[1]}/{bars_max}{ending}', '--json']) == 0\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    words = [str(folder), f"0,{BARS_MAX}", ",".join(ENDINGS), *WORDS]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.mark.parametrize("ending", sampled(ENDINGS, every=len(ENDINGS)))
@pytest.mark.parametrize("bars_max", [pytest.param(0, marks=pytest.mark.slow), BARS_MAX])
def test_the_same_timeline_gives_the_same_bytes(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, ending: str, bars_max: int
) -> None:
    monkeypatch.setattr(drawing, "BARS_MAX", bars_max)
    shown().save(tmp_path / f"one{ending}")
    one, two = (tmp_path / f"one{ending}").read_bytes(), (elsewhere / f"{bars_max}{ending}").read_bytes()
    assert one == two
    assert one.startswith(ENDINGS[ending])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    timed = shown()
    for name in ("picture.gif", "picture"):
        with pytest.raises(InputError, match=rf"{name}': must end in \.svg, \.png or \.pdf"):
            timed.save(tmp_path / name)
    with pytest.raises(InputError, match="no/folder"):
        timed.save(tmp_path / "no" / "folder" / "picture.svg")
    assert list(tmp_path.iterdir()) == []
    timed.save(str(tmp_path / "PICTURE.PNG"))
    assert (tmp_path / "PICTURE.PNG").read_bytes().startswith(PNG)


# The command


def test_command_prints_stages_and_the_first_transfers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*WORDS, "--rows", "3"]) == 0
    stages, _, transfers = capsys.readouterr().out.partition("\n\n")
    assert stages.splitlines()[0] == "ring: allreduce of 1MiB in 62.915 ms (fifo ports), 48 transfers in 2 segments"
    assert [line.split()[:2] for line in stages.splitlines()[2:]] == [["reduce-scatter", "24"], ["all-gather", "24"]]
    assert transfers.splitlines()[0] == "3 of 48 transfers, by their start"
    assert len(transfers.splitlines()) == 5
    assert cli.run([*WORDS, "--rows", "0"]) == 0
    assert "by their start" not in capsys.readouterr().out


def test_command_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", "optcc", "--topology", HALF, "--segments", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_command_prints_json_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "ring.svg"
    assert cli.run([*WORDS, "-o", str(picture), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"seconds", "ports", "stages", "transfers", "verdict"}
    assert answer["transfers"] == 48
    assert answer["ports"]["out h3"] == pytest.approx(1.0)
    assert answer["ports"]["in h0"] == pytest.approx(0.5)
    assert set(answer["stages"]) == {"reduce-scatter", "all-gather"}
    assert set(answer["stages"]["all-gather"]) == {"transfers", "bytes", "start", "end"}
    assert answer["stages"]["all-gather"]["end"] == answer["seconds"]
    assert cli.run(["simulate", *WORDS[1:], "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert (simulated["seconds"], simulated["utilisation"]) == (answer["seconds"], answer["ports"])
    assert picture.read_bytes().startswith(b"<?xml")
    assert cli.run([*WORDS, "-o", str(picture)]) == 0
    assert f"timeline drawn in {picture}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--rows", "-1"], "--rows"),
        (["--model", "none"], "--model 'none': must be "),
        (["--latency", "5"], "'5'"),
        (["-o", "ring.gif"], "must end in .svg"),
        (["-o", "/no/such/folder/ring.svg"], "/no/such/folder/ring.svg"),
        (["--segments", "0"], "--segments '0'"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    assert cli.run([*WORDS, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err


def test_without_matplotlib_only_pictures_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.run(WORDS) == 0
    assert "reduce-scatter" in capsys.readouterr().out
    assert cli.run([*WORDS, "-o", str(tmp_path / "ring.svg")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pip install 'optcc[viz]'" in err
    with pytest.raises(EnvironmentMissing):
        shown()._repr_svg_()
    assert list(tmp_path.iterdir()) == []


def test_importing_loads_no_matplotlib() -> None:
    code = "import sys, optcc.commands.show; print('matplotlib' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
