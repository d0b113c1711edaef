"""`auto` beside every schedule on real transports: the best, the ratio, and the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from optcc import cli
from optcc.errors import EXIT_DONE, CodecError
from optcc.experiments.auto_measured import (
    COLLECTIVES,
    FABRIC,
    LOOPBACK,
    TRANSPORTS,
    AutoMeasured,
    MeasuredRow,
    bench_words,
    rounds_of,
    row_of,
    schedules_of,
)
from optcc.experiments.record import BenchTiming, Record, Samples
from optcc.topology import Topology

OURS = (1.0, 1.0, 1.0, 1.0, 2.2, 1.1, 1.1, 1.1)
OTHERS: dict[str, tuple[float, ...]] = {
    "ring": (0.9, 0.9, 0.9, 0.9, 2.0, 1.0, 1.0, 1.0),
    "direct": (1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1),
}
ROW = MeasuredRow("loopback", "allreduce", 1 << 20, "tree", 4, OURS, OTHERS, (), 0)
RECORD = AutoMeasured({"cores": 2}, {"optcc": "0"}, LOOPBACK, FABRIC, (ROW,))


def test_the_best_of_the_first_rounds_is_held_against_auto_in_the_others() -> None:
    """Whoever is lucky in the rounds in which it is chosen has nothing of that, and a slow round slows down both."""
    assert ROW.best == "ring"
    assert ROW.ratios == pytest.approx((1.1, 1.1, 1.1))
    assert ROW.is_beyond


def test_a_spread_across_the_goal_is_not_beyond_it() -> None:
    wide = msgspec.structs.replace(ROW, seconds=(1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.2, 1.2))
    assert wide.ratios == pytest.approx((1.0, 1.1, 1.2))
    assert not wide.is_beyond
    (remark,) = replace(RECORD, rows=(wide, ROW)).remarks()
    assert remark == (
        "In 2 of 2 cases auto takes more than 1.05 of another plan by the median, "
        "in 1 in three quarters of the rounds or more."
    )


def test_what_the_token_buckets_of_emulated_nics_may_send_at_once_does_not_count() -> None:
    """16 MiB take 503 ms at least on four hosts of 400 Mbit/s, 1 MiB 31 ms, of which a bucket of 8 ms is a quarter."""
    long, short = (
        msgspec.structs.replace(ROW, transport="TCP over NICs", size_bytes=size) for size in (16 << 20, 1 << 20)
    )
    assert [RECORD.is_by_rates(row) for row in (long, short, ROW)] == [True, False, True]
    (remark,) = replace(RECORD, rows=(long, short)).remarks()
    assert remark == (
        "In 1 of 1 cases auto takes more than 1.05 of another plan by the median, "
        "in 1 in three quarters of the rounds or more. So it does in 1 of the 1 over NICs whose lower bound is below "
        "160 ms, which do not count: an emulated NIC that was idle sends at once what it carries in 8 ms."
    )


def test_the_plan_of_auto_is_no_better_than_itself() -> None:
    alike = msgspec.structs.replace(ROW, same=("ring",))
    assert (alike.best, alike.ratios) == (ROW.best, ROW.ratios)
    assert not alike.is_over and not alike.is_beyond


def _timing(schedule: str, size: int, digest: str, seconds: float) -> BenchTiming:
    samples = Samples([seconds] * 4, [0.0] * 4, 1)
    return BenchTiming(schedule, "", "", 4, size, "float32", "sum", 2, digest, None, None, samples, None)


def test_a_row_is_made_of_the_record_of_a_bench() -> None:
    took = (("ring", "a", 1.0), ("ring", "a", 1.1), ("direct", "b", 2.0))
    timings = tuple(_timing(name, 4096, digest, seconds) for name, digest, seconds in took)
    row = row_of("loopback", Record("", (), "", 1.0, {}, {}, timings))
    assert (row.size_bytes, row.chosen, row.best, row.same, row.wrong) == (4096, "ring", "ring", ("ring",), 3)
    assert row.schedules == {"ring": (1.1,) * 4, "direct": (2.0,) * 4}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_auto_runs_beside_every_schedule_that_accepts_the_ranks(collective: str) -> None:
    names = schedules_of(collective, Topology.parse(LOOPBACK))
    assert len(names) > 1
    for transport in TRANSPORTS:
        words = bench_words(transport, collective, 16384, rounds_of(16384, 4))
        assert [words[at + 1] for at, word in enumerate(words) if word == "--schedule"] == ["auto", *names]
        assert [words[words.index(option) + 1] for option in ("-b", "-e", "-n")] == ["16384", "16384", "16"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert AutoMeasured.read(path) == RECORD
    assert "| tree, 4 | 1.05e+03 ms | ring | 1.100 (1.100 to 1.100) | 0 |" in RECORD.markdown()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"transport": "post"}, "transport"),
        ({"collective": "gather"}, "collective"),
        ({"seconds": ()}, "seconds"),
        ({"schedules": {}}, "schedules"),
        ({"schedules": {"ring": (1.0,) * 7}}, r"schedules\[ring\]"),
        ({"same": ("tree",)}, "same"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], path: str, tmp_path: Path) -> None:
    wrong = tmp_path / "record.json"
    replace(RECORD, rows=(msgspec.structs.replace(ROW, **change),)).write(wrong)
    with pytest.raises(CodecError, match=rf"rows\[0\]\.{path}"):
        AutoMeasured.read(wrong)


@pytest.mark.slow
def test_the_smaller_version_runs(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    assert cli.run(["experiment", "auto-measured", "--quick", "-o", str(path)]) == EXIT_DONE
    (row,) = AutoMeasured.read(path).rows
    assert (row.transport, row.collective, row.size_bytes, row.wrong) == ("loopback", "broadcast", 64 << 10, 0)
    assert set(row.schedules) == set(schedules_of("broadcast", Topology.parse(LOOPBACK)))
