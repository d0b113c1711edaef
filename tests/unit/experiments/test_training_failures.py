"""The record of training while a NIC fails: its phases, what is held against what, its figure. The training itself runs
in tests/torch, where torch is."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from optcc.errors import EXIT_DONE, EXIT_REFUTED, CodecError, EnvironmentMissing, InputError
from optcc.experiments import training_failures
from optcc.experiments.docs_tables import DOCS
from optcc.experiments.training_failures import (
    QUICK_GPT,
    WARM_STEPS,
    WAYS,
    LongTraining,
    NicEvent,
    TrainedRun,
    TrainingFailures,
    command,
    events_of,
    long_command,
)
from optcc.experiments.training_rank import LETTERS, make_text
from optcc.paper_figures import training_curves

EVENTS = (NicEvent(5, "down", "h1.eth0"), NicEvent(9, "back", "h1.eth0"))
LOSSES = tuple(3.0 / (1 + step) for step in range(12))


def run(**changes: Any) -> TrainedRun:
    """A job of twelve steps: of a second each, two while the NIC is down."""
    step_s = tuple(2.0 if 5 < step < 9 else 1.0 for step in range(12))
    made = TrainedRun(
        "optcc", "stay", "ddp", EVENTS, LOSSES, step_s, "ab", "cd", "", 0.0, 40_000_000, 11, 6, 0.0, ((5, 1, "lost"),)
    )
    return msgspec.structs.replace(made, **changes)


HEALTHY = run(events=(), step_s=(1.0,) * 12, notes=())
LOST = run(
    backend="gloo", plans="", losses=LOSSES[:6], step_s=(1.0,) * 6, parameters_sha256="", ended="rank 0: x", ended_s=30
)


def record(*runs: TrainedRun) -> TrainingFailures:
    return TrainingFailures(
        {"cores": 2}, {"optcc": "0.1"}, "2.13", 4, 2, "200Mbit/s", QUICK_GPT, 10_000_000, 12, 2, 1 << 22, 1, 30.0, runs
    )


def test_a_phase_leaves_out_the_steps_of_events_and_the_first_ones() -> None:
    found = [(state, list(steps)) for state, steps in run().phases()]
    assert found == [("healthy", [3, 4]), ("down", [6, 7, 8]), ("back", [10, 11])]
    assert [run().median_s(steps) for _, steps in run().phases()] == [1.0, 2.0, 1.0]
    assert [list(steps) for _, steps in LOST.phases()] == [[3, 4], [], []]
    assert [state for state, _ in HEALTHY.phases()] == ["healthy"] and WARM_STEPS == 3


def test_the_bound_is_that_of_the_nics_that_are_left() -> None:
    """Four ranks: 2 (p - 1) / p of the message at 50 MB/s; one host at half: (2 p - 1) / p, as the paper's formula."""
    whole_s = 1.5 * 40e6 / 50e6 * 9014 / 8948
    assert record(run()).bound_s(run(), "healthy") == pytest.approx(whole_s)
    assert record(run()).bound_s(run(), "back") == pytest.approx(whole_s)
    lost_s = record(run()).bound_s(run(), "down")
    assert whole_s < record(run()).bound_s(run(), "half") < lost_s < 2 * whole_s
    assert lost_s == pytest.approx(float(Fraction(4, 3)) * whole_s, rel=1e-6)


def test_ours_must_have_the_bits_of_the_healthy_run() -> None:
    changing = run(plans="change", losses_sha256="xx")
    good = record(HEALTHY, run(), msgspec.structs.replace(HEALTHY, plans="change"), changing, LOST)
    assert [good.is_same(each) for each in good.runs] == [True, True, True, False, False]
    assert good.faults() == [] and good.exit_code == EXIT_DONE
    for changed in ({"losses_sha256": "xx"}, {"parameters_sha256": "xx"}):
        bad = record(HEALTHY, run(**changed))
        assert bad.faults() == ["optcc, plans stay: the bits are not those of the healthy run"]
        assert bad.exit_code == EXIT_REFUTED
    cut = msgspec.structs.replace(LOST, backend="optcc", plans="change")
    assert record(HEALTHY, cut).faults() == ["optcc, plans change: rank 0: x"]
    # What another backend does is no fault of ours.
    assert record(LOST).exit_code == EXIT_DONE
    rows = good.card().rows
    assert [row[0] for row in rows] == ["T* of the gradients alone", "optcc, plans stay", "optcc, plans change", "gloo"]
    # T* of 40 MB over two NICs of 25 MB/s is 1.21 s, and a third more over one of them at one host.
    assert rows[1][1:] == ("1.00 s", "1.00 s", "2.00 s", "1.00 s", "+60%", "trained on", "yes")
    assert rows[3][1:] == ("-", "1.00 s", "-", "-", "-", "ended in step 6", "-")
    assert record(run(wrap="fsdp")).card().rows[1][-3:] == ("-", "trained on", "-")
    assert "gloo: rank 0: x (30.0 s later)" in good.remarks()


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["x:down:h1.eth0"], "must be STEP:KIND:NIC"),
        (["5:gone:h1.eth0"], "with a kind of half, down, back"),
        (["5:down:h1"], "must be one NIC"),
        (["5:down:h1.eth0", "5:back:h1.eth0"], r"events in steps \[5, 5\]: must be in different steps"),
        (["0:down:h1.eth0"], "from 1 to 11"),
        (["12:down:h1.eth0"], "from 1 to 11"),
    ],
)
def test_events_that_cannot_be(texts: list[str], rule: str) -> None:
    assert events_of(["9:back:h1.eth0", "5:down:h1.eth0"], 12) == EVENTS
    with pytest.raises(InputError, match=rule):
        events_of(texts, 12)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"plans": "never"}, r"runs\[0\]\.plans: 'never': must fit the backend"),
        ({"wrap": "none"}, r"runs\[0\]\.wrap: 'none': must be one of ddp, fsdp"),
        ({"losses": LOSSES[:4]}, r"runs\[0\]\.losses: 4: must be as many as step_s"),
        ({"step_s": (0.0,) * 12}, r"runs\[0\]\.step_s: 0.0: must be above zero"),
        ({"ended": "rank 1: y"}, r"runs\[0\]\.ended: 'rank 1: y': must say why"),
        ({"events": EVENTS[::-1]}, r"runs\[0\]\.events: \[9, 5\]: must be in the order"),
    ],
)
def test_a_damaged_record_is_refused(changed: dict[str, Any], path: str) -> None:
    whole = record(HEALTHY, run(), LOST)
    assert TrainingFailures.from_bytes(whole.to_bytes()) == whole
    with pytest.raises(CodecError, match=path):
        TrainingFailures.from_bytes(record(run(**changed)).to_bytes())
    with pytest.raises(CodecError, match=r"\$\.runs: 0"):
        TrainingFailures.from_bytes(replace(whole, runs=()).to_bytes())


def test_the_text_is_of_its_seed_and_can_be_learnt() -> None:
    text = make_text(1, 50_000)
    assert len(text) == 50_000 and set(text) == set(LETTERS)
    assert text == make_text(1, 50_000) != make_text(2, 50_000)
    words = text.split()[:-1]
    pairs = set(pairwise(words))
    assert len(pairs) < 3.2 * len(set(words))


def test_without_torch_the_command_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_failures, "find_spec", lambda name: None)
    said = CliRunner().invoke(command, ["-o", str(tmp_path / "x.json")])
    assert "torch is not installed: make test-torch" in str(said.exception)
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(EnvironmentMissing, match="torch is not installed"):
        CliRunner().invoke(long_command, ["-o", str(tmp_path / "x.json")], catch_exceptions=False)


def test_the_figure_has_every_job_and_event() -> None:
    fsdp = [msgspec.structs.replace(each, wrap="fsdp") for each in (HEALTHY, run())]
    changing = [msgspec.structs.replace(each, plans="change") for each in (HEALTHY, run())]
    table = training_curves.data(record(HEALTHY, run(), *changing, LOST, *fsdp))
    assert [wrap for wrap, _ in table.columns] == ["ddp", "fsdp"]
    figure = training_curves.draw(table)
    drawn = {str(line.get_gid()): line for axes in figure.axes for line in axes.lines if line.get_gid()}
    assert len(figure.axes) == 4
    assert len([gid for gid in drawn if gid.startswith("loss:")]) == 7
    assert np.asarray(drawn["loss:optcc, plans stay:events"].get_ydata()).tolist() == list(LOSSES)
    assert np.asarray(drawn["step:gloo:events"].get_xdata()).tolist() == [3, 4, 5]
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said == ["down", "back"]
    found = training_curves.numbers(table)
    assert found["ddp/optcc-stay/events/1-down/step-seconds"].value == 2.0
    assert found["ddp/gloo/events/steps"].value == 6
    assert found["ddp/optcc-change/events/steps-with-the-healthy-loss"].value == 12


def test_the_figure_names_every_way_to_train() -> None:
    """Of a record that anybody may make."""
    for backend, plans in WAYS.values():
        alone = msgspec.structs.replace(HEALTHY, backend=backend, plans=plans)
        (legend,) = training_curves.draw(training_curves.data(record(alone))).legends
        (name,) = [each.get_text() for each in legend.get_texts()]
        assert name.lower() == alone.name


def test_the_record_of_the_package_says_what_the_docs_say() -> None:
    found = TrainingFailures.read()
    assert found.faults() == []
    ours = [each for each in found.runs if each.backend == "optcc" and each.plans == "stay" and each.events]
    assert {each.wrap for each in ours} == {"ddp", "fsdp"}
    for each in ours:
        assert found.is_same(each) and {event.kind for event in each.events} == {"half", "down", "back"}
    change = next(each for each in found.runs if each.wrap == "ddp" and each.plans == "change" and each.events)
    assert [event.step for event in change.events] == [6, 14, 20, 30]
    half, down = change.step_s[6:14], change.step_s[20:30]
    text = (DOCS / "pytorch.md").read_text(encoding="utf-8")
    assert [took > 1.2 * half[-1] for took in half] == [True, True, *[False] * 6]
    assert f"after two steps, the longest of which takes {max(half):.1f} s; with the NIC down" in text
    assert f"takes longer than {max(down):.1f} s." in text


def test_the_long_training_has_the_bits_of_the_healthy_one_and_comes_back_to_its_time() -> None:
    found = LongTraining.read()
    assert found.faults() == [] and found.steps == 200
    ours = next(each for each in found.runs if each.wrap == "ddp" and each.plans == "stay" and each.events)
    assert [(each.step, each.kind) for each in ours.events] == [(50, "down"), (100, "back")]
    assert found.is_same(ours)
    before_s, down_s, back_s = (ours.median_s(steps) or 0.0 for _, steps in ours.phases())
    assert back_s < 1.1 * before_s < down_s
    order = next(each for each in found.runs if each.plans == "order" and each.events)
    assert found.is_same(order) and order.events == ours.events
    beyond = found.beyond_bound(order, "down")
    assert beyond is not None and beyond <= 0.01
    gloo = [each for each in found.runs if each.backend == "gloo" and each.events]
    assert [(each.wrap, len(each.losses), bool(each.ended)) for each in gloo] == [("ddp", 50, True), ("fsdp", 50, True)]
