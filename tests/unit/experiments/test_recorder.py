"""What every experiment can: a smaller version, to go on after an interruption, progress, and one line if it cannot."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from optcc.commands.experiment import EXPERIMENTS
from optcc.errors import CodecError, InputError
from optcc.experiments import cells as cells_module
from optcc.experiments import recorder
from optcc.experiments.cells import Partial, RecordCells, progress
from optcc.experiments.made import Made, made_at, said_date
from optcc.experiments.record import RECORDS
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.show import Card

COMMITTED = {path: path.read_bytes() for path in RECORDS.glob("*.json")}


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cell of the stand-in."""

    name: str
    seconds: float
    share: Fraction


class Unlisted:
    """A format that is none of `record_kinds`, which other tests go through."""

    format: ClassVar[str] = "optcc-test-stand-in/1"


@dataclass(frozen=True, slots=True)
class StandIn(Unlisted, Measured):
    """A record of rows."""

    own_path: ClassVar[Path] = RECORDS / "there is none.json"
    rooms: ClassVar[tuple[str, ...]] = ("schedules",)

    names: tuple[str, ...]

    def card(self) -> Card:
        return Card("rows", ("name",), tuple((name,) for name in self.names))


def command(form: RecordForm, done: list[str], fails_at: str = "") -> click.Command:
    """An experiment of as many cells as `--count` says, which notes what it measures, and is interrupted in one."""

    def measure(name: str) -> Row:
        if name == fails_at:
            raise KeyboardInterrupt
        done.append(name)
        return Row(name, 1 / 3, Fraction(1, 3))

    @record_command(StandIn, form)
    @click.option("--count", default=4)
    def experiment(count: int, cells: RecordCells) -> StandIn:
        rows = list(cells.each({f"cell {each}": partial(measure, f"cell {each}") for each in range(count)}, Row))
        assert all((row.seconds, row.share) == (1 / 3, Fraction(1, 3)) for row in rows)
        return StandIn(tuple(row.name for row in rows))

    return experiment


def run(experiment: click.Command, *words: object) -> Result:
    return CliRunner().invoke(experiment, [str(word) for word in words], standalone_mode=False)


# --- going on after an interruption -----------------------------------------------------------------------------------


def test_an_interrupted_record_goes_on_with_the_cells_that_it_lacks(tmp_path: Path) -> None:
    output, form = tmp_path / "r.json", RecordForm(quick="")
    first: list[str] = []
    assert run(command(form, first, fails_at="cell 2"), "-o", output).exit_code
    assert first == ["cell 0", "cell 1"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json.partial"]
    second: list[str] = []
    assert run(command(form, second), "-o", output, "--resume").exit_code == 0
    assert second == ["cell 2", "cell 3"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    whole: list[str] = []
    assert run(command(form, whole), "-o", tmp_path / "whole.json").exit_code == 0
    assert StandIn.read(output) == StandIn.read(tmp_path / "whole.json")


def test_an_unfinished_record_is_not_begun_anew_by_mistake(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    run(command(RecordForm(quick=""), [], fails_at="cell 2"), "-o", output)
    before = (tmp_path / "r.json.partial").read_bytes()
    done: list[str] = []
    refused = run(command(RecordForm(quick=""), done), "-o", output)
    assert isinstance(refused.exception, InputError) and "give --resume to go on with it" in str(refused.exception)
    assert done == [] and (tmp_path / "r.json.partial").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "change", "said"),
    [
        (("--count", "5"), None, "count 4, schedules"),
        (("--quick",), None, "must be 'optcc-test-stand-in/1, quick, count 4"),
        ((), lambda made: Made(made.date, dict.fromkeys(made.rooms, "0" * 16)), "schedules 0000000000000000"),
    ],
)
def test_cells_of_other_settings_or_other_code_are_refused(
    words: tuple[str, ...], change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, form = tmp_path / "r.json", RecordForm(quick={})
    run(command(form, [], fails_at="cell 2"), "-o", output)
    if change is not None:
        now = StandIn.made_now()
        monkeypatch.setattr(StandIn, "made_now", classmethod(lambda cls, quick=False: change(now)))
    refused = run(command(form, []), "-o", output, "--resume", *words)
    assert isinstance(refused.exception, CodecError)
    assert said in str(refused.exception) and "delete it to start again" in str(refused.exception)
    assert not output.exists()


def test_a_kept_cell_that_is_none_is_refused(tmp_path: Path) -> None:
    cells = RecordCells(Partial(tmp_path / "p", "x", {"cell 0": {"name": "cell 0"}}))
    with pytest.raises(CodecError, match=r"unfinished record: cell 0: .*seconds"):
        list(cells.each({"cell 0": lambda: Row("", 0.0, Fraction(1))}, Row))


# --- a smaller version ------------------------------------------------------------------------------------------------


def test_a_quick_record_says_so_and_is_written_where_it_is_told_only(tmp_path: Path) -> None:
    experiment = command(RecordForm(quick={"count": 1}), [])
    done = run(experiment, "--quick")
    assert done.exit_code == 0 and "no record is written without -o FILE" in done.stderr
    assert not StandIn.own_path.exists()
    assert run(experiment, "--quick", "-o", tmp_path / "r.json").exit_code == 0
    made = made_at(tmp_path / "r.json")
    assert made is not None and made.quick and said_date(made).endswith(", quick")
    assert StandIn.read(tmp_path / "r.json").names == ("cell 0",)
    assert run(experiment, "--quick", "--count", "2", "-o", tmp_path / "two.json").exit_code == 0
    assert StandIn.read(tmp_path / "two.json").names == ("cell 0", "cell 1")


def test_a_whole_record_does_not_say_that_it_is_quick(tmp_path: Path) -> None:
    assert run(command(RecordForm(quick={}), []), "-o", tmp_path / "r.json").exit_code == 0
    made = made_at(tmp_path / "r.json")
    assert made is not None and not made.quick
    assert b"quick" not in (tmp_path / "r.json").read_bytes()


def test_no_committed_record_is_a_quick_one() -> None:
    found = [made_at(path) for path in COMMITTED]
    assert not [made for made in found if made is not None and made.quick]


def test_rows_of_a_former_record_make_it_as_old_as_that(tmp_path: Path) -> None:
    former = Made("", {"runtime": "a", "gone": "b"})
    assert Made("now", {"runtime": "c", "verify": "d"}).joined_to(former).rooms == {"runtime": "a", "verify": ""}
    assert Made("now", {"runtime": "c"}).joined_to(None).changed({"runtime": "c"}) == ("runtime",)

    @record_command(StandIn, RecordForm(quick=""))
    def experiment(cells: RecordCells) -> StandIn:
        cells.join(tmp_path / "former.json")
        return StandIn(())

    StandIn(()).write_made(tmp_path / "former.json", Made("", {"schedules": "a"}))
    assert run(experiment, "-o", tmp_path / "r.json").exit_code == 0
    made = made_at(tmp_path / "r.json")
    assert made is not None and made.rooms["schedules"] == "a"


# --- every experiment of the registry ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """What the function of an experiment was called with."""

    options: dict[str, Any]
    cells: RecordCells | None


def form_of(name: str) -> tuple[click.Command, RecordForm]:
    """The command of an experiment, and its form."""
    experiment = EXPERIMENTS[name].load()
    assert experiment.callback is not None
    form = inspect.getclosurevars(experiment.callback).nonlocals["form"]
    assert isinstance(form, RecordForm)
    return experiment, form


def arguments(experiment: click.Command) -> list[str]:
    """What the command cannot do without."""
    return [str(RECORDS) for each in experiment.params if isinstance(each, click.Argument) and each.required]


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """Puts a function that measures one cell, the committed record, in the place of the experiment's."""
    experiment, _ = form_of(name)
    assert experiment.callback is not None
    place = inspect.getclosurevars(experiment.callback).nonlocals
    kind, measure = place["kind"], place["measure"]
    taken: list[Taken] = []
    record = kind.read() if kind.own_path.exists() else None

    def measured(**options: Any) -> Any:
        cells = options.pop("cells", None)
        taken.append(Taken(options, cells))
        if cells is not None:
            list(cells.each({"a cell": lambda: 1}, int))
        return record

    measured.__signature__ = inspect.signature(measure)  # type: ignore[attr-defined]
    closure = experiment.callback.__closure__
    assert closure is not None
    cell = closure[experiment.callback.__code__.co_freevars.index("measure")]
    monkeypatch.setattr(cell, "cell_contents", measured)
    return taken


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_the_same_options(name: str) -> None:
    experiment, form = form_of(name)
    options = {word for each in experiment.params for word in each.opts}
    assert {"--quick", "--resume", "--json", "--markdown", "-o"} <= options
    assert ("--jobs" in options) or not form.spreads
    if not isinstance(form.quick, str):
        assert set(form.quick) <= {each.name for each in experiment.params}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_quick_run_is_smaller_or_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment, form = form_of(name)
    taken = stand_in(name, monkeypatch)
    done = run(experiment, *arguments(experiment), "--quick")
    if isinstance(form.quick, str):
        assert isinstance(done.exception, InputError) and taken == []
        assert str(done.exception) == f"--quick: there is no smaller version: {form.quick}"
    else:
        assert done.exception is None, done.exception
        whole = {each.name: each.default for each in experiment.params}
        (only,) = taken
        assert only.options.get("quick") or any(only.options[each] != whole[each] for each in form.quick)
        assert {each: only.options[each] for each in form.quick} == dict(form.quick)
    assert {path: path.read_bytes() for path in RECORDS.glob("*.json")} == COMMITTED
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_goes_on_or_says_in_one_line_that_it_cannot(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment, form = form_of(name)
    taken = stand_in(name, monkeypatch)
    words = (*arguments(experiment), "--resume", "-o", tmp_path / "r.json")
    done = run(experiment, *words)
    if form.one_session:
        assert isinstance(done.exception, InputError) and taken == []
        assert str(done.exception) == f"--resume: an interrupted run cannot be continued: {form.one_session}"
        return
    assert done.exception is None, done.exception
    (only,) = taken
    assert only.cells is not None and only.cells.done == {"a cell": 1}
    assert (tmp_path / "r.json").is_file() and not (tmp_path / "r.json.partial").exists()


# --- progress ---------------------------------------------------------------------------------------------------------


class _Terminal:
    """Standard error that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_how_far_it_is_and_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress() as report:
        assert list(RecordCells(report=report).each({"one": lambda: 1, "two": lambda: 2}, int)) == [1, 2]
    assert "2/2" in terminal.text and "left" in terminal.text


def test_elsewhere_nothing_is_said(tmp_path: Path) -> None:
    with progress() as report:
        assert report is cells_module.quiet
    done = run(command(RecordForm(quick={}), []), "-o", tmp_path / "r.json")
    assert done.stderr == f"record: {tmp_path / 'r.json'}\n"


def test_json_prints_the_record(tmp_path: Path) -> None:
    done = run(command(RecordForm(quick={}), []), "--json", "-o", tmp_path / "r.json")
    assert json.loads(done.stdout) == {"format": StandIn.format, "names": [f"cell {each}" for each in range(4)]}


def test_cells_that_were_timed_are_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, slots=True)
    class Timed(Unlisted, Measured):
        own_path: ClassVar[Path] = RECORDS / "there is none.json"
        rooms: ClassVar[tuple[str, ...]] = ("schedules",)
        machine: dict[str, Any]

    @record_command(Timed, RecordForm(quick=""))
    def experiment(cells: RecordCells) -> Timed:
        list(cells.each({"a": lambda: 1, "b": lambda: 1 // 0}, int))
        return Timed({})

    output = tmp_path / "r.json"
    assert isinstance(run(experiment, "-o", output).exception, ZeroDivisionError)
    monkeypatch.setattr(recorder, "this_machine", lambda: {"cores": 3, "processor": "another"})
    refused = run(experiment, "-o", output, "--resume")
    assert isinstance(refused.exception, CodecError) and "3 cores of another" in str(refused.exception)
