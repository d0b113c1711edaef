"""Dumps: as JSON there and back, in the format of PyTorch's recorder, and nothing else is taken for one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from optcc.errors import CodecError, InputError
from optcc.runtime.communicator import Communicator
from optcc.runtime.observe.dump import FlightDump, read_dump, write_dump
from optcc.runtime.observe.page import BEGIN, END
from optcc.runtime.observe.recorder import ARRIVED, POSTED
from optcc.runtime.observe.status import WantedRun
from optcc.runtime.observe.torch_dump import torch_dump, write_torch_dumps
from optcc.runtime.transports.sim import SimTransport
from tests.unit.runtime.observe.observed_ranks import fly


def mixed(comm: Communicator, _: SimTransport) -> None:
    comm.all_reduce(np.ones(30_000, np.float32))
    comm.all_gather(np.ones(10, np.int64))
    comm.all_reduce(np.ones(30_000, np.float32))


@pytest.fixture(scope="module")
def dumps() -> list[FlightDump]:
    return fly(mixed, n_ranks=2)


def test_there_and_back(dumps: list[FlightDump], tmp_path: Path) -> None:
    for dump in dumps:
        assert read_dump(write_dump(dump, tmp_path / "made")) == dump


def test_every_message_is_recorded_at_both_ends(dumps: list[FlightDump]) -> None:
    sent = {(each.x, each.c, each.d, each.b) for each in dumps[0].records if each.kind == POSTED}
    came = {(each.x, each.c, each.d, 1) for each in dumps[1].records if each.kind == ARRIVED}
    assert sent == came
    assert len(sent) >= 4
    runs = [(each.kind, each.x) for each in dumps[0].records if each.kind in (BEGIN, END)]
    assert runs == [(BEGIN, 1), (END, 1), (BEGIN, 2), (END, 2), (BEGIN, 3), (END, 3)]
    assert (dumps[0].begun, dumps[0].done) == (3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other/1"}, "must be 'optcc-flight/1'"),
        ({"events": [[1, 0.5, "jumped", 0, 0, 0, 0, 0, 0]]}, "must be a kind of event"),
        ({"events": [[1]]}, "array of at least length 9"),
        ({"more": 1}, r"\$\.more: unknown key"),
    ],
)
def test_other_files_are_refused(
    dumps: list[FlightDump], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(json.loads(dumps[0].encode()) | change), encoding="utf-8")
    with pytest.raises(CodecError, match=message):
        read_dump(path)


def test_a_rank_must_be_one_of_the_job(dumps: list[FlightDump], tmp_path: Path) -> None:
    said = json.loads(dumps[0].encode())
    said["identity"]["rank"] = 7
    (tmp_path / "file.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(CodecError, match="rank 7 of 2"):
        read_dump(tmp_path / "file.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_dump(tmp_path / "absent.json")


def test_in_the_format_of_torch(dumps: list[FlightDump], tmp_path: Path) -> None:
    """Its reader asks for these fields; that it reads them is tested in tests/torch, where it is."""
    paths = write_torch_dumps(dumps, tmp_path)
    assert [path.name for path in paths] == ["optcc_trace_rank_0", "optcc_trace_rank_1"]
    said = pickle.loads(paths[1].read_bytes())
    assert said["pg_config"] == {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    assert [(each["profiling_name"], each["collective_seq_id"], each["state"]) for each in said["entries"]] == [
        ("nccl:all_reduce", 1, "completed"),
        ("nccl:all_gather", 2, "completed"),
        ("nccl:all_reduce", 3, "completed"),
    ]
    assert said["entries"][1]["input_sizes"] == [[10]]
    assert said["entries"][1]["output_sizes"] == [[20]]
    assert said["entries"][0]["time_discovered_completed_ns"] > said["entries"][0]["time_created_ns"]


def test_what_was_refused_is_told_to_torch_until_another_collective_has_taken_its_place(
    dumps: list[FlightDump],
) -> None:
    first, *_ = dumps
    plan = msgspec.structs.replace(first.status.plans[0], number=0, n_bytes=40)

    def entries(run: int) -> list[dict[str, Any]]:
        status = msgspec.structs.replace(first.status, wanted=WantedRun(run, 1.0, plan))
        found: list[dict[str, Any]] = torch_dump(msgspec.structs.replace(first, status=status))["entries"]
        return found

    assert [each["state"] for each in entries(3)] == ["completed"] * 3
    *_, last = entries(4)
    assert (last["collective_seq_id"], last["state"], last["input_sizes"]) == (4, "scheduled", [[10]])
    assert last["time_discovered_started_ns"] is last["time_discovered_completed_ns"] is None
