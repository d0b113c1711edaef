"""Every figure and number from records, into a folder: all of them, or nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optcc.errors import InputError, OptccError
from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.peers_record import PeerComparison
from optcc.experiments.record import Record
from optcc.experiments.schedule_record import ScheduleRatios
from optcc.files import replace_file
from optcc.paper_figures import (
    allreduce_bars,
    bound_curves,
    failure_curves,
    numbers,
    peer_dots,
    schedule_curves,
    sources,
    style,
)
from optcc.paper_figures.numbers import Number
from optcc.paper_figures.sources import Source
from optcc.show import Card, Shown

MANIFEST_FORMAT = "optcc-figures/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Drawn:
    """One figure: its files by name, its numbers, and the records it was made from."""

    name: str
    files: dict[str, bytes]
    numbers: dict[str, Number]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Written(Shown):
    """What a build wrote: each file's path, with the records that are in it."""

    files: tuple[tuple[Path, tuple[Source, ...]], ...]

    def card(self) -> Card:
        rows = tuple((str(path), ", ".join(each.name for each in sources)) for path, sources in self.files)
        return Card(f"{len(rows)} files", ("file", "records"), rows)

    def as_json(self) -> list[dict[str, object]]:
        """For each file its path and its records."""
        return [{"file": str(path), "records": [each.as_json() for each in sources]} for path, sources in self.files]


def build(paths: Sequence[Path], out: Path, *, quick: bool = False) -> Written:
    """Draws every figure from the records at `paths`, or from those of the package if there are none, into `out`.

    Files are SVG, PDF, PNG and a PNG of twice the resolution (`quick`: one PNG), `numbers.tex`, `numbers.json` and
    `manifest.json`, which names each figure's records with their SHA-256. Nothing is written before everything is
    drawn, and each file is replaced whole.

    Raises InputError for a record that is missing or a folder that cannot be written, CodecError for a broken record,
    EnvironmentMissing without matplotlib.
    """
    read = sources.read(paths or sources.find(sources.records_folder()))
    drawn = draw_all(read, quick=quick)
    files = {name: (content, each.sources) for each in drawn for name, content in each.files.items()}
    found = {each.name: each.numbers for each in drawn}
    files["numbers.tex"] = (numbers.as_tex(found), read)
    files["numbers.json"] = (numbers.as_json(found), read)
    files[MANIFEST] = (manifest(drawn), read)  # the last to be written: it speaks of the others
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder {str(out)!r}: cannot be made: {error.strerror}") from None
    for name, (content, _) in files.items():
        replace_file(out / name, content)
    return Written(tuple((out / name, each) for name, (_, each) in files.items()))


def draw_all(read: Sequence[Source], *, quick: bool) -> tuple[Drawn, ...]:
    """Every figure that the records give, drawn and not yet written."""
    style.require_matplotlib()
    return (
        *_draw_bars(read, quick),
        *_draw_curves(read, quick),
        *_draw_schedules(read, quick),
        *_draw_failures(read, quick),
        *_draw_peers(read, quick),
    )


def _draw_bars(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """A figure of times for each case in the measurements."""
    measured = [(source, source.record) for source in read if isinstance(source.record, Record)]
    cases = allreduce_bars.cases([record for _, record in measured])
    names = [case.name for case in cases]
    taken: set[str] = set()
    for case in cases:
        # The same collective on other hosts is another figure, and then both say where.
        name = case.name if names.count(case.name) == 1 else f"{case.name}-{_slug(case.where)}"
        own = [each for each in measured if case in allreduce_bars.cases([each[1]])]
        said = ", ".join(source.name for source, _ in own)
        if name in taken:
            raise InputError(f"records {said}: a second figure {name}: draw it into another folder")
        taken.add(name)
        try:
            table = allreduce_bars.data([record for _, record in own], case)
        except OptccError as error:
            raise type(error)(f"records {said}: {error}") from None
        figure = allreduce_bars.draw(table)
        files = {f"{name}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
        yield Drawn(name, files, allreduce_bars.numbers(table), tuple(source for source, _ in own))


def _draw_curves(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """The figure of the bound, if a record of it is there."""
    found = [(source, source.record) for source in read if isinstance(source.record, BoundCurves)]
    _require_one(bound_curves.NAME, [source for source, _ in found])
    for source, record in found:
        table = bound_curves.data(record)
        figure = bound_curves.draw(table)
        files = {f"{bound_curves.NAME}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
        yield Drawn(bound_curves.NAME, files, bound_curves.numbers(table), (source,))


def _draw_schedules(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """The figure of schedules in simulation, if a record of it is there."""
    found = [(source, source.record) for source in read if isinstance(source.record, ScheduleRatios)]
    _require_one(schedule_curves.NAME, [source for source, _ in found])
    for source, record in found:
        table = schedule_curves.data(record)
        figure = schedule_curves.draw(table)
        files = {f"{schedule_curves.NAME}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
        yield Drawn(schedule_curves.NAME, files, schedule_curves.numbers(table), (source,))


def _draw_failures(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """The figure of failures, if a record of them is there."""
    found = [(source, source.record) for source in read if isinstance(source.record, FailureStudy)]
    _require_one(failure_curves.NAME, [source for source, _ in found])
    for source, record in found:
        table = failure_curves.data(record)
        figure = failure_curves.draw(table)
        files = {f"{failure_curves.NAME}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
        yield Drawn(failure_curves.NAME, files, failure_curves.numbers(table), (source,))


def _draw_peers(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """A figure of ours and peers for each size, if a record of them is there."""
    found = [(source, source.record) for source in read if isinstance(source.record, PeerComparison)]
    _require_one(peer_dots.NAME, [source for source, _ in found])
    for source, record in found:
        for size_bytes in peer_dots.sizes(record):
            table = peer_dots.data(record, size_bytes)
            figure = peer_dots.draw(table)
            files = {f"{table.name}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
            yield Drawn(table.name, files, peer_dots.numbers(table), (source,))


def _require_one(figure: str, found: Sequence[Source]) -> None:
    if len(found) > 1:
        said = ", ".join(source.name for source in found)
        raise InputError(f"records {said}: a second figure {figure}: draw it into another folder")


def manifest(drawn: Sequence[Drawn]) -> bytes:
    """Which files were made from which records."""
    figures = {
        each.name: {"files": list(each.files), "records": [source.as_json() for source in each.sources]}
        for each in drawn
    }
    return (json.dumps({"format": MANIFEST_FORMAT, "figures": figures}, indent=1) + "\n").encode()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "unnamed"
