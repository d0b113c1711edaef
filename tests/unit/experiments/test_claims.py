"""Claims: verdicts follow the numbers, numbers follow the records, and no row is empty."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from optcc.errors import InputError
from optcc.experiments import claim_values
from optcc.experiments.claims import (
    COLUMNS,
    ByNumber,
    ByReason,
    ClaimOutcome,
    ClaimRow,
    ClaimValue,
    FromRecord,
    Paper,
    PaperClaim,
    Sense,
    Stated,
    decide,
    kinds_of,
    package_table,
    table_of,
)
from optcc.experiments.failover_speed import FailoverSpeed
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.lost_nics import LostNicsRecord
from optcc.experiments.mid_collective import MidCollective
from optcc.experiments.observation_cost import OFF, ObservationCost
from optcc.experiments.paper_claims import CLAIMS
from optcc.experiments.peers_record import PeerComparison
from optcc.experiments.record import RECORDS, Recorded
from optcc.experiments.reranking import Reranking
from optcc.experiments.schedule_record import ScheduleRatios
from optcc.experiments.training import TrainingStudy
from optcc.experiments.training_failures import TrainingFailures

PACKAGE = [(kind.own_path.name, kind.read()) for kind in kinds_of(CLAIMS)]
TABLE = table_of(CLAIMS, PACKAGE)
ROWS = {row.claim.key: row for row in TABLE.rows}
DECIDED = (ClaimOutcome.REPRODUCED, ClaimOutcome.EXCEEDED, ClaimOutcome.DIFFERS)


def by(sense: Sense, tolerance: float = 0.0) -> ByNumber:
    return ByNumber("simulated", sense, tolerance, "it is so")


@pytest.mark.parametrize(
    ("sense", "ends", "tolerance", "found", "outcome"),
    [
        ("less", (2, 6), 0, (1, 6), "reproduced"),
        ("less", (2, 6), 0, (1, 1.9), "exceeded"),
        ("less", (2, 6), 0.1, (1, 1.9), "reproduced"),
        ("less", (2, 6), 0, (1, 6.1), "differs"),
        ("less", (2, 6), 0.05, (1, 6.1), "reproduced"),
        ("less", (None, 1), 0, (0, 0), "reproduced"),
        ("more", (99, None), 0, (99, 100), "reproduced"),
        ("more", (99, None), 0, (98.9, 100), "differs"),
        ("more", (90, 95), 0, (96, 97), "exceeded"),
        ("same", (22, 22), 0.1, (20, 20), "reproduced"),
        ("same", (22, 22), 0.1, (19, 19.7), "differs"),
        ("same", (22, 22), 0.1, (24.3, 30), "differs"),
        ("same", (-1, -1), 0.02, (-1.01, -1.01), "reproduced"),
        ("same", (-1, -1), 0.02, (-1.03, -1.03), "differs"),
    ],
)
def test_a_number_decides_with_a_tolerance(
    sense: Sense, ends: tuple[float, float], tolerance: float, found: tuple[float, float], outcome: str
) -> None:
    assert decide(Stated("x", "y", *ends), ClaimValue(*found, "z"), by(sense, tolerance)) == outcome


def test_what_is_given_must_suffice_for_the_verdict() -> None:
    paper, found = Paper("a", "b"), FromRecord(Reranking, lambda _: ClaimValue(1, 1, "1"))
    PaperClaim("k", paper, "says", Stated("1", "s", None, 1.0), by("less"), found)
    for wrong in (
        lambda: PaperClaim("k", paper, "says", Stated("1", "s", 1.0, None), by("less"), found),
        lambda: PaperClaim("k", paper, "says", Stated("1", "s", None, 1.0), by("less"), measured=found),
        lambda: PaperClaim("k", paper, "says", Stated("1", "s"), ByReason(ClaimOutcome.UNTESTED, "")),
        lambda: PaperClaim("k", paper, "says", Stated("1", "s", None, 1.0), by("less", 1.0), found),
        lambda: Stated("1", "s", 2.0, 1.0),
        lambda: Stated("", "s"),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_every_kind_of_record_must_be_there_once() -> None:
    with pytest.raises(InputError, match=r"claims: 0 records of optcc-schedules/2: must be one"):
        table_of(CLAIMS, [each for each in PACKAGE if not isinstance(each[1], ScheduleRatios)])
    with pytest.raises(InputError, match=r"claims: 2 records of optcc-schedules/2: must be one"):
        table_of(CLAIMS, [*PACKAGE, *(each for each in PACKAGE if isinstance(each[1], ScheduleRatios))])


@pytest.mark.parametrize(
    ("kind", "lists"),
    [
        (FailureStudy, {"cells": ()}),
        (TrainingStudy, {"cells": ()}),
        (TrainingFailures, {"runs": ()}),
        (PeerComparison, {"losses": ()}),
        (Reranking, {"rows": ()}),
        (ScheduleRatios, {"cases": ()}),
        (LostNicsRecord, {"rows": ()}),
        (MidCollective, {"rows": ()}),
    ],
)
def test_a_record_that_lacks_a_case_is_named(kind: type[Recorded], lists: dict[str, Any]) -> None:
    records = [
        (name, replace(record, **lists) if isinstance(record, kind) else record)  # type: ignore[type-var]
        for name, record in PACKAGE
    ]
    message = rf"record '{kind.own_path.name}': lacks a case of claim \w+, \w+: must be of a whole study"
    with pytest.raises(InputError, match=message):
        table_of(CLAIMS, records)


# The claims themselves


@pytest.mark.parametrize("row", TABLE.rows, ids=lambda row: row.claim.key)
def test_no_row_is_empty(row: ClaimRow) -> None:
    assert all(cell.strip() for cell in row.cells())
    assert not any("|" in cell or "\n" in cell for cell in row.cells())
    assert set(row.found) == {each for each in COLUMNS if row.claim.value(each) is not None}
    assert bool(row.records) == bool(row.found)
    if row.outcome in DECIDED:
        assert isinstance(row.claim.judged, ByNumber)
        assert row.claim.judged.of in row.found
    else:
        assert isinstance(row.claim.judged, ByReason)
    if row.outcome not in (ClaimOutcome.REPRODUCED, ClaimOutcome.EXCEEDED):
        assert row.verdict == f"{row.outcome} because {row.claim.judged.because}"


def test_every_statement_that_was_asked_for_is_there() -> None:
    assert len(ROWS) == len(CLAIMS)
    stated = " | ".join(claim.stated.text for claim in CLAIMS)
    asked = "2 to 6 %|57 %|O(1/p)|less than 1 %|less than 3 %|0.8 %|2.4 %|12 ms|145 ms|560 ms|22 %|85 to 89 %|95 %"
    for each in f"{asked}|above 99 %|12.18x|47x|sub-linear|0.4 to 6.8 %|2 to 15 times".split("|"):
        assert each in stated, each


def test_names_and_versions_of_records() -> None:
    assert ROWS["R20"].records == ("failover-speed (optcc-failover-speed/1)",)
    assert {name for row in TABLE.rows for name in row.records} == {
        f"{path.removesuffix('.json')} ({record.format})" for path, record in PACKAGE
    }
    assert package_table(CLAIMS) == TABLE


def test_values_are_those_of_the_files() -> None:
    """Computed again from the JSON of the records."""
    file = json.loads((RECORDS / "lost-nics.json").read_bytes())
    over = [
        100 * (row["seconds"] / row["fault_free_s"] - 1)
        for row in file["rows"]
        if row["schedule"] == "optcc-nics"
        and row["case"]["servers"] == 16
        and row["case"]["lost"] == row["case"]["gpus"] / 2
    ]
    found = ROWS["O7"].found["simulated"]
    assert (found.least, found.most) == pytest.approx((min(over), max(over)))
    file = json.loads((RECORDS / "peers-on-fabric.json").read_bytes())
    (ours,) = (each["run_s"] - each["before_s"] for each in file["losses"] if each["side"] == "ours")
    peers = [each for each in file["losses"] if each["side"] == "peer"]
    went_on_s = [each["run_s"] - each["before_s"] for each in peers if each["run_s"]]
    hung_s = [each["limit_s"] - each["before_s"] for each in peers]
    assert ROWS["R23"].found["measured"].most == pytest.approx(min(went_on_s or hung_s) / ours)
    file = json.loads((RECORDS / "training.json").read_bytes())
    (cell,) = (e for e in file["cells"] if (e["job"], e["pattern"]) == ("2.7B on 2 servers", "uniform 2"))
    (mean,) = (100 * each["mean"] for each in cell["overheads"] if each["schedule"] == "r2ccl-allreduce")
    assert ROWS["R7"].found["simulated"].most == pytest.approx(mean)
    file = json.loads((RECORDS / "observation-cost.json").read_bytes())
    costs = []
    for case in ("norms", "tenth"):
        rows = {e["case"]: e["seconds"] for e in file["rows"] if (e["bed"], e["size_bytes"]) == ("loopback", 2**26)}
        beside = [e for e in file["rows"] if (e["bed"], e["size_bytes"], e["beside"]) == ("loopback", 2**26, "a drain")]
        off = next(each["seconds"] for each in beside if each["case"] == "off")
        costs.append(
            100 * statistics.median(a - b for a, b in zip(rows[case], off, strict=True)) / statistics.median(off)
        )
    assert ROWS["D1"].found["measured"].most == pytest.approx(max(costs))


def slower(value: Any, field: str, factor: float) -> Any:
    """A frozen struct with a field that is `factor` times as large."""
    return msgspec.structs.replace(value, **{field: getattr(value, field) * factor})


def slow_schedules(record: ScheduleRatios) -> ScheduleRatios:
    return replace(record, cases=tuple(slower(each, "seconds", 1.2) for each in record.cases))


def slow_failover(record: FailoverSpeed) -> FailoverSpeed:
    return replace(record, trials=tuple(msgspec.structs.replace(each, run_s=each.run_s + 1) for each in record.trials))


def slow_peers(record: PeerComparison) -> PeerComparison:
    def run(each: Any) -> Any:
        return each if each.bed == "healthy" else msgspec.structs.replace(each, seconds=[9 * s for s in each.seconds])

    return replace(record, runs=tuple(run(each) for each in record.runs))


def cheap_taps(record: ObservationCost) -> ObservationCost:
    """Every case takes what `off` takes, and 0.1 % more."""

    def row(each: Any) -> Any:
        off = record.row((each.bed, each.size_bytes, each.beside), OFF).seconds
        return each if each.case == OFF else msgspec.structs.replace(each, seconds=[1.001 * second for second in off])

    return replace(record, rows=tuple(row(each) for each in record.rows))


def exposed(record: TrainingStudy) -> TrainingStudy:
    """Overheads of 1.24 % for two failed NICs, 5 % for one."""

    def cell(each: Any) -> Any:
        mean = 0.0124 if each.pattern == "uniform 2" else 0.05
        return msgspec.structs.replace(
            each, overheads=tuple(msgspec.structs.replace(one, mean=mean) for one in each.overheads)
        )

    return replace(record, cells=tuple(cell(each) for each in record.cells))


def gainful(record: Reranking) -> Reranking:
    def row(each: Any) -> Any:
        seconds = {**each.seconds, "r2ccl-rails": each.seconds["nccl-ring"] / 1.22}
        return msgspec.structs.replace(each, seconds=seconds)

    return replace(record, rows=tuple(row(each) for each in record.rows))


def close_servers(record: LostNicsRecord) -> LostNicsRecord:
    def row(each: Any) -> Any:
        return (
            msgspec.structs.replace(each, seconds=1.05 * each.fault_free_s) if each.schedule == "optcc-nics" else each
        )

    return replace(record, rows=tuple(row(each) for each in record.rows))


@pytest.mark.parametrize(
    ("kind", "made_anew", "verdicts"),
    [
        (ScheduleRatios, slow_schedules, {"O1": "differs", "O4": "differs", "O5": "differs", "R13": "differs"}),
        (FailoverSpeed, slow_failover, {"R20": "differs"}),
        (PeerComparison, slow_peers, {"O6": "differs", "R17": "differs"}),
        (ObservationCost, cheap_taps, {"D1": "exceeded"}),
        (TrainingStudy, exposed, {"R1": "differs", "R3": "differs", "R7": "reproduced", "R8": "differs"}),
        (Reranking, gainful, {"R14": "reproduced"}),
        (LostNicsRecord, close_servers, {"O7": "reproduced"}),
    ],
)
def test_a_record_that_is_made_anew_changes_the_verdict(
    kind: type[Recorded], made_anew: Callable[[Any], Recorded], verdicts: dict[str, str]
) -> None:
    records = [(name, made_anew(record) if isinstance(record, kind) else record) for name, record in PACKAGE]
    anew = {row.claim.key: row for row in table_of(CLAIMS, records).rows}
    for key, outcome in verdicts.items():
        assert str(ROWS[key].outcome) != outcome, key
        assert str(anew[key].outcome) == outcome, key
        assert anew[key].found != ROWS[key].found
    # Rows of other records stay.
    others = [row for row in TABLE.rows if not any(kind.format in name for name in row.records)]
    assert others and all(anew[row.claim.key] == row for row in others)


def test_counts_say_how_many() -> None:
    assert TABLE.counts().startswith(f"{len(CLAIMS)} claims: ")
    assert sum(int(word) for word in TABLE.counts().split(":")[1].split() if word.isdecimal()) == len(CLAIMS)


def test_a_peer_that_went_on_after_a_loss_counts_before_those_that_hung() -> None:
    record = PeerComparison.read(RECORDS / "peers-on-fabric.json")
    losses = [
        msgspec.structs.replace(each, run_s=each.before_s + 2.0) if each.contender == "Gloo" else each
        for each in record.losses
    ]
    (ours_s,) = (each.stall_s for each in losses if each.side == "ours")
    found = claim_values.peer_over_ours(replace(record, losses=tuple(losses)))
    assert ours_s is not None and found.most == pytest.approx(2.0 / ours_s) and "Gloo over ours" in found.text
