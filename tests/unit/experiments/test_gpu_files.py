"""The record of verdicts on other tools' files: made from folders, damaged ones refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from optcc.errors import CodecError, InputError
from optcc.experiments.gpu_files import GpuFiles, judge_folder
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from tests.unit.verify.gpu.msccl_sample import ring
from tests.unit.verify.gpu.mscclpp_sample import both

SOURCE = "owner/name@0123456={}"


def test_a_folder_is_judged_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "right.xml").write_bytes(ring(3))
    (tmp_path / "wrong.xml").write_bytes(ring(3, ["s", "rrcs", "rcs", "rcs", "r"]))
    (tmp_path / "other.xml").write_text("<system/>", encoding="ascii")
    rows = judge_folder(SOURCE.format(tmp_path))
    assert [(row.file, row.verdict, row.property) for row in rows] == [
        ("deep/right.xml", PROVED, ""),
        ("wrong.xml", REFUTED, "result"),
    ]
    assert rows[1].where.startswith("wrong.xml: line 7, GPU 0, thread block 0, step 3")
    assert (rows[0].gpus, rows[0].steps, rows[0].runtimes) == (3, 15, "msccl, rccl, msccl-executor")
    (tmp_path / "plan.json").write_bytes(both("START put i0 > SP.0; MEET re i0 s0 > i0"))
    (tmp_path / "steps.json").write_bytes(both("signal P; wait P|signal P; wait P"))
    (tmp_path / "more.json").write_text("{}", encoding="ascii")
    plans = judge_folder(SOURCE.format(tmp_path))[1:3]
    assert [(row.file, row.verdict, row.gpus, row.steps) for row in plans] == [
        ("plan.json", PROVED, 2, 18),
        ("steps.json", UNKNOWN, 2, 8),
    ]
    record = GpuFiles((*rows, *plans))
    assert GpuFiles.from_bytes(record.to_bytes()) == record


def test_sources_must_be_there(tmp_path: Path) -> None:
    for source in ("name", SOURCE.format(tmp_path)):
        with pytest.raises(InputError, match="source"):
            judge_folder(source)
    (tmp_path / "bad.xml").write_bytes(b"<algo/>")
    with pytest.raises(CodecError, match=r"file 'bad.xml': line 1"):
        judge_folder(SOURCE.format(tmp_path))


def test_the_record_has_files_of_each_repository() -> None:
    record = GpuFiles.read()
    found = {(row.repository, row.verdict) for row in record.rows}
    assert {repository for repository, _ in found} == {
        "Azure/msccl-scheduler",
        "ROCm/rccl",
        "microsoft/msccl-tools",
        "microsoft/mscclpp",
    }
    assert {verdict for _, verdict in found} == {PROVED, REFUTED, UNKNOWN}


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b'"proved"', b'"good"', r"\$\.rows\[\d+\]\.verdict"),
        (b'"property": "agreement"', b'"property": ""', r"\$\.rows\[\d+\]\.property"),
        (b'"sha256": "', b'"sha256": "x', r"\$\.rows\[0\]\.sha256"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    with pytest.raises(CodecError, match=path):
        GpuFiles.from_bytes(GpuFiles.read().to_bytes().replace(before, after, 1))
