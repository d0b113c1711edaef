"""Every figure and number from records, into a folder: all of them, or nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optcc.errors import InputError, OptccError
from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.claims import ClaimsTable, kinds_of
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.failure_trace import FailureTrace
from optcc.experiments.gpu_battery import GpuBattery
from optcc.experiments.lost_nics import LostNicsRecord
from optcc.experiments.mid_collective import MidCollective
from optcc.experiments.paper_claims import CLAIMS
from optcc.experiments.passing_congestion import PassingCongestion
from optcc.experiments.peers_record import PeerComparison
from optcc.experiments.record import RECORDS, Record, Recorded
from optcc.experiments.schedule_record import ScheduleRatios
from optcc.experiments.seen_failure import SeenFailure
from optcc.experiments.soak import Soak
from optcc.experiments.training_failures import TrainingFailures
from optcc.experiments.untold import Untold
from optcc.files import replace_file
from optcc.paper_figures import (
    allreduce_bars,
    bound_curves,
    claims_table,
    congestion_steps,
    failure_curves,
    failure_trace_steps,
    failure_views,
    gallery,
    gpu_battery_dots,
    lost_nics_curves,
    mid_collective_dots,
    numbers,
    peer_dots,
    report,
    schedule_curves,
    server_gpus_curves,
    size_curves,
    soak_spans,
    sources,
    style,
    training_curves,
    untold_dots,
)
from optcc.paper_figures.gallery import Exhibit
from optcc.paper_figures.numbers import Number
from optcc.paper_figures.sources import Source
from optcc.show import Card, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureKind:
    """How a kind of record is drawn: `names` are those of its figures, without drawing, and `tables` gives a table for
    each, by the name of its files; `says` is what the figure says."""

    name: str
    says: str
    record: type[Recorded]
    names: Callable[[Any], Sequence[str]]
    tables: Callable[[Any], Mapping[str, Any]]
    draw: Callable[[Any], Figure]
    numbers: Callable[[Any], dict[str, Number]]


def _single(module: Any, record: type[Recorded]) -> FigureKind:
    """A module that makes one figure of a record."""
    return FigureKind(
        *(module.NAME, module.SAYS, record, lambda _: (module.NAME,)),
        lambda each: {module.NAME: module.data(each)},
        *(module.draw, module.numbers),
    )


FIGURES = (
    _single(bound_curves, BoundCurves),
    _single(schedule_curves, ScheduleRatios),
    _single(failure_curves, FailureStudy),
    _single(lost_nics_curves, LostNicsRecord),
    _single(server_gpus_curves, LostNicsRecord),
    _single(training_curves, TrainingFailures),
    _single(gpu_battery_dots, GpuBattery),
    _single(failure_views, SeenFailure),
    _single(congestion_steps, PassingCongestion),
    _single(untold_dots, Untold),
    _single(mid_collective_dots, MidCollective),
    _single(failure_trace_steps, FailureTrace),
    _single(soak_spans, Soak),
    FigureKind(
        *(peer_dots.NAME, peer_dots.SAYS, PeerComparison, peer_dots.names),
        *(peer_dots.tables, peer_dots.draw, peer_dots.numbers),
    ),
)
"""Figures of one record each. Bars are drawn from all measurements together."""
MANIFEST_FORMAT = "optcc-figures/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Drawn:
    """One figure or table: its files by name, its numbers, and the records it was made from; what a figure says."""

    name: str
    files: dict[str, bytes]
    numbers: dict[str, Number]
    sources: tuple[Source, ...]
    says: str = ""

    def for_report(self) -> report.ReportFigure | None:
        """The figure as an SVG; None if this is no figure, or has no SVG."""
        picture = self.files.get(f"{self.name}.svg")
        if picture is None:
            return None
        return report.ReportFigure(self.name, self.says, picture, "image/svg+xml", self.sources)


@dataclass(frozen=True)
class WrittenFigures(Shown):
    """What a build wrote: each file's path, with the records that are in it; and what it left out, and why."""

    files: tuple[tuple[Path, tuple[Source, ...]], ...]
    left_out: tuple[str, ...] = ()

    def card(self) -> Card:
        rows = tuple((str(path), ", ".join(each.name for each in sources)) for path, sources in self.files)
        return Card(f"{len(rows)} files", ("file", "records"), rows)

    def as_json(self) -> list[dict[str, object]]:
        """For each file its path and its records."""
        return [{"file": str(path), "records": [each.as_json() for each in sources]} for path, sources in self.files]


def drawn_kinds() -> tuple[type[Recorded], ...]:
    """The kinds of records that have a figure. The report shows every other one as a table."""
    return tuple(dict.fromkeys((Record, *(kind.record for kind in FIGURES))))


def build(
    paths: Sequence[Path],
    out: Path,
    *,
    quick: bool = False,
    commands: Mapping[str, str] | None = None,
    gallery_folder: Path | None = None,
) -> WrittenFigures:
    """Draws every figure from the records at `paths`, or from those of the package if there are none, into `out`.

    Files are SVG, PDF, PNG and a PNG of twice the resolution (`quick`: one PNG), the table of the papers' claims if all
    its records are there, `numbers.tex`, `numbers.json` and `manifest.json`, which names each figure's records with
    their SHA-256; and, unless `quick`, the page `report.html` with all of it, in which `commands` says by which command
    a record of that file name is made; with `gallery_folder`, a page of the manual and its pictures there. Nothing is
    written before everything is drawn, and each file is replaced whole.

    Raises InputError for a record that is missing or a folder that cannot be written, CodecError for a broken record,
    EnvironmentMissing without matplotlib.
    """
    read = sources.read(paths or sources.find(RECORDS))
    style.require_matplotlib()
    claims = _claims_of(read)
    drawn = draw_all(read, claims, quick=quick)
    files = {name: (content, each.sources) for each in drawn for name, content in each.files.items()}
    found = {each.name: each.numbers for each in drawn}
    files["numbers.tex"] = (numbers.as_tex(found), read)
    files["numbers.json"] = (numbers.as_json(found), read)
    if not quick:
        pictures = [each for figure in drawn if (each := figure.for_report()) is not None]
        files[report.FILE] = (report.page(read, pictures, claims, commands or {}), read)
    files[MANIFEST] = (manifest(drawn), read)  # written last, since it lists the others
    for folder in (out, gallery_folder):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"folder {str(folder)!r}: cannot be made: {error.strerror}") from None
    for name, (content, _) in files.items():
        replace_file(out / name, content)
    if gallery_folder is not None:
        shown = exhibits(read)
        for exhibit in shown:
            replace_file(gallery_folder / exhibit.picture, files[exhibit.picture][0])
        replace_file(gallery_folder / gallery.FILE, gallery.page(shown, commands or {}).encode())
    left_out = () if paths else left_out_of(read, commands or {})
    return WrittenFigures(tuple((out / name, each) for name, (_, each) in files.items()), left_out)


def left_out_of(read: Sequence[Source], commands: Mapping[str, str]) -> tuple[str, ...]:
    """For each figure of which there is no record, which record that is and, from `commands`, how it is made."""
    return tuple(
        f"{kind.name}: left out: no record {kind.record.own_path.name}: {commands.get(kind.record.own_path.name, '')}"
        for kind in FIGURES
        if not any(isinstance(source.record, kind.record) for source in read)
    )


def draw_all(read: Sequence[Source], claims: ClaimsTable | None, *, quick: bool) -> tuple[Drawn, ...]:
    """Every figure that the records give, and the table of the claims, if there is one; drawn and not yet written."""
    return (
        *_draw_bars(read, quick),
        *_draw_sweeps(read, quick),
        *(each for kind in FIGURES for each in _draw_kind(kind, read, quick)),
        *(() if claims is None else (_draw_claims(read, claims),)),
    )


def _draw_bars(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """A figure of times for each case in the measurements that is in no sweep over sizes."""
    for name, case, own in _bars(read):
        try:
            table = allreduce_bars.data([record for _, record in own], case)
        except OptccError as error:
            said = ", ".join(source.name for source, _ in own)
            raise type(error)(f"records {said}: {error}") from None
        figure = allreduce_bars.draw(table)
        files = {f"{name}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
        yield Drawn(name, files, allreduce_bars.numbers(table), tuple(source for source, _ in own), allreduce_bars.SAYS)


def _bars(read: Sequence[Source]) -> Iterator[tuple[str, allreduce_bars.BarCase, list[tuple[Source, Record]]]]:
    """The name of each figure of bars, its case, and the measurements of it.

    Raises InputError if two have one name.
    """
    measured = [
        (source, rest)
        for source in read
        if isinstance(source.record, Record) and (rest := size_curves.without_sweeps(source.record)) is not None
    ]
    cases = allreduce_bars.cases([record for _, record in measured])
    names = [case.name for case in cases]
    taken: set[str] = set()
    for case in cases:
        # The same collective on other hosts is another figure; then both names contain the place.
        name = case.name if names.count(case.name) == 1 else f"{case.name}-{_slug(case.where)}"
        own = [each for each in measured if case in allreduce_bars.cases([each[1]])]
        if name in taken:
            said = ", ".join(source.name for source, _ in own)
            raise InputError(f"records {said}: a second figure {name}: draw it into another folder")
        taken.add(name)
        yield name, case, own


def _draw_sweeps(read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """A figure for each sweep over sizes in the measurements."""
    taken: dict[str, str] = {}
    for source in read:
        for sweep in size_curves.sweeps(source.record) if isinstance(source.record, Record) else ():
            if sweep.name in taken:
                said = f"{taken[sweep.name]}, {source.name}"
                raise InputError(f"records {said}: a second figure {sweep.name}: draw it into another folder")
            taken[sweep.name] = source.name
            figure = size_curves.draw(sweep)
            files = {f"{sweep.name}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
            yield Drawn(sweep.name, files, size_curves.numbers(sweep), (source,), size_curves.SAYS)


def _draw_kind(kind: FigureKind, read: Sequence[Source], quick: bool) -> Iterator[Drawn]:
    """The figures of one kind of record, if a record of it is there."""
    found = [source for source in read if isinstance(source.record, kind.record)]
    if len(found) > 1:
        said = ", ".join(source.name for source in found)
        raise InputError(f"records {said}: a second figure {kind.name}: draw it into another folder")
    for source in found:
        for name, table in kind.tables(source.record).items():
            figure = kind.draw(table)
            files = {f"{name}{ending}": style.render(figure, ending) for ending in style.formats(quick)}
            yield Drawn(name, files, kind.numbers(table), (source,), kind.says)


def _draw_claims(read: Sequence[Source], table: ClaimsTable) -> Drawn:
    return Drawn(claims_table.NAME, claims_table.files(table), claims_table.numbers(table), _claimed(read))


def _claims_of(read: Sequence[Source]) -> ClaimsTable | None:
    """The table of the papers' claims, if all its records are there."""
    own = _claimed(read)
    if not all(any(isinstance(source.record, kind) for source in own) for kind in kinds_of(CLAIMS)):
        return None
    return claims_table.table([(source.name, source.record) for source in own])


def _claimed(read: Sequence[Source]) -> tuple[Source, ...]:
    """The records that the claims are about."""
    return tuple(source for source in read if isinstance(source.record, kinds_of(CLAIMS)))


def exhibits(read: Sequence[Source]) -> tuple[Exhibit, ...]:
    """Every figure that the records give, not drawn: what a gallery says of it."""
    found = [Exhibit(name, allreduce_bars.SAYS, tuple(source for source, _ in own)) for name, _, own in _bars(read)]
    for source in read:
        record = source.record
        for sweep in size_curves.sweeps(record) if isinstance(record, Record) else ():
            found.append(Exhibit(sweep.name, size_curves.SAYS, (source,)))
    for kind in FIGURES:
        for source in read:
            if isinstance(source.record, kind.record):
                found += [Exhibit(name, kind.says, (source,)) for name in kind.names(source.record)]
    return tuple(found)


def manifest(drawn: Sequence[Drawn]) -> bytes:
    """Which files were made from which records."""
    figures = {
        each.name: {"files": list(each.files), "records": [source.as_json() for source in each.sources]}
        for each in drawn
    }
    return (json.dumps({"format": MANIFEST_FORMAT, "figures": figures}, indent=1) + "\n").encode()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "unnamed"
