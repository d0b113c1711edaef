"""Verdicts on the algorithms and plans for GPUs that public repositories hold, or that their tools write, as a record.

The files stay where they are: of each the record has its name, repository, commit and SHA-256. Nothing random is in
it. The record is a file of its own format, `optcc-gpu-files/1`; the one that comes with the package is made by

    optcc experiment gpu-files OWNER/NAME@COMMIT=FOLDER ...

from checkouts, and from folders of what the examples of microsoft/msccl-tools and of microsoft/mscclpp print;
docs/other-files.md says how.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import click
import msgspec

from optcc.errors import CodecError, InputError
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, record_command
from optcc.files import read_file
from optcc.show import Card
from optcc.strict_xml import BYTES_MAX
from optcc.verdict import PROVED, REFUTED, UNKNOWN, Verdict
from optcc.verify.gpu.msccl import verify_msccl
from optcc.verify.gpu.msccl_file import MscclFile
from optcc.verify.gpu.mscclpp import verify_mscclpp

_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{7,40})=(?P<folder>.+)")
_HEAD_BYTES = 4096


class GpuFileVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, and what was said of it: `property` is the one refuted, `where` its counterexample's first line.

    The verdict on a file with something that is not judged is `unknown`, and `runtimes` is empty.
    """

    repository: str
    commit: str
    file: str
    sha256: str
    collective: str
    protocol: str
    gpus: int
    steps: int
    runtimes: str
    verdict: str
    property: str = ""
    where: str = ""
    trace: list[str] = []


@dataclass(frozen=True, slots=True)
class GpuFiles(Measured):
    """The rows, by repository and file."""

    format: ClassVar[str] = "optcc-gpu-files/1"
    own_path: ClassVar[Path] = RECORDS / "gpu-files.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "other-files.md"

    rows: tuple[GpuFileVerdict, ...]

    def check_fields(self, check: Check) -> None:
        check("rows", len(self.rows), bool(self.rows), "be one or more")
        for number, row in enumerate(self.rows):
            at = f"rows[{number}]"
            check(f"{at}.verdict", row.verdict, row.verdict in (PROVED, REFUTED, UNKNOWN), "be a verdict")
            check(f"{at}.sha256", row.sha256, bool(re.fullmatch("[0-9a-f]{64}", row.sha256)), "be a SHA-256")
            check(f"{at}.property", row.property, (row.verdict == REFUTED) == bool(row.property), "say what is refuted")

    def card(self) -> Card:
        commits = {(row.repository, row.commit) for row in self.rows}
        versions = Counter(repository for repository, _ in commits)
        rows = tuple(
            (
                f"{row.repository}@{row.commit[:7]}" if versions[row.repository] > 1 else row.repository,
                row.file,
                f"{row.collective}, {row.protocol}",
                str(row.gpus),
                f"{row.steps:,}",
                f"{row.verdict}: {row.property}" if row.property else row.verdict,
            )
            for row in self.rows
        )
        counts = {each: sum(row.verdict == each for row in self.rows) for each in (PROVED, REFUTED, UNKNOWN)}
        title = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return Card(title, ("repository", "file", "collective", "GPUs", "steps", "verdict"), rows)

    def remarks(self) -> Sequence[str]:
        return [row.where for row in self.rows if row.where]


def judge_file(repository: str, commit: str, name: str, data: bytes) -> GpuFileVerdict:
    """The row of one file; raises CodecError if it is no algorithm and no plan."""
    try:
        about, verdict = _judge_xml(name, data) if name.endswith(".xml") else _judge_json(name, data)
    except CodecError as error:
        raise CodecError(f"file {name!r}: {error}") from None
    found = None if verdict is None else verdict.counterexample
    return GpuFileVerdict(
        repository,
        commit,
        name,
        hashlib.sha256(data).hexdigest(),
        *about,
        "" if verdict is None else dict(verdict.conditions).get("limits", "").partition(";")[0],
        UNKNOWN if verdict is None else verdict.verdict,
        "" if found is None else found.property,
        "" if found is None else found.summary,
        [] if found is None else list(found.trace),
    )


About = tuple[str, str, int, int]
"""Collective, protocol, GPUs and steps."""


def _judge_xml(name: str, data: bytes) -> tuple[About, Verdict]:
    file = MscclFile.parse(data)
    steps = sum(len(block.steps) for gpu in file.gpus for block in gpu.blocks)
    return (file.collective, file.protocol, file.n_gpus, steps), verify_msccl(data, Path(name).name)


def _judge_json(name: str, data: bytes) -> tuple[About, Verdict | None]:
    """None for a plan with something that is not judged."""
    plan = json.loads(data)
    steps = sum(len(block["ops"]) for gpu in plan["gpus"] for block in gpu["threadblocks"])
    about = (str(plan["collective"]), str(plan["protocol"]), len(plan["gpus"]), steps)
    try:
        return about, verify_mscclpp(data, Path(name).name)
    except CodecError as error:
        if "is not judged" not in str(error):
            raise
        return about, None


def judge_folder(source: str) -> list[GpuFileVerdict]:
    """The rows of all algorithms in the folder of a source, `OWNER/NAME@COMMIT=FOLDER`, by name."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise InputError(f"source {source!r}: must be OWNER/NAME@COMMIT=FOLDER")
    folder = Path(match["folder"])
    rows = []
    for path in sorted((*folder.rglob("*.xml"), *folder.rglob("*.json"))):
        data = read_file(path, BYTES_MAX)
        if b"<algo" in data[:_HEAD_BYTES] or (path.suffix == ".json" and b'"threadblocks"' in data):
            name = path.relative_to(folder).as_posix()
            rows.append(judge_file(match["repository"], match["commit"], name, data))
    if not rows:
        raise InputError(f"source {source!r}: has no file with <algo> or threadblocks")
    return rows


@record_command(GpuFiles)
@click.argument("sources", nargs=-1)
def command(sources: tuple[str, ...]) -> GpuFiles:
    """Judge all algorithms in the folders of SOURCES, each OWNER/NAME@COMMIT=FOLDER."""
    return GpuFiles(tuple(row for source in sources for row in judge_folder(source)))
