"""Ours and peers: what is started and how, which runs count, the record, and the figure of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import msgspec
import pytest

from optcc.errors import CodecError, InputError, RuntimeFault
from optcc.experiments import peers_comparison, peers_contenders, peers_on_fabric
from optcc.experiments.fabric import WIRE_OVERHEAD, FabricSpec
from optcc.experiments.late_rank import seconds_after
from optcc.experiments.peers import common_nics
from optcc.experiments.peers_comparison import REPEATS_MAX, Comparison, ContenderRuns, least_seconds_after
from optcc.experiments.peers_contenders import (
    BEDS,
    FEW,
    LEAST,
    LEFT_OUT,
    LONG,
    ONE_HOST,
    ONE_NIC,
    OUR_SETTINGS,
    OURS_ALL,
    OURS_LATE,
    STANDARD,
    Bed,
    PeerJob,
    jobs,
    late_beds,
    our_case,
)
from optcc.experiments.peers_on_fabric import stages
from optcc.experiments.peers_rank import plan_of, wires_of
from optcc.experiments.peers_record import (
    AFTER_LOSS,
    HEALTHY,
    OURS,
    PEER,
    Loss,
    PeerComparison,
    PeerRun,
    Session,
)
from optcc.experiments.peers_team import Turn, last_words
from optcc.experiments.rank_lines import Hung
from optcc.experiments.record import STEAL_MAX
from optcc.paper_figures import build, peer_dots
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import Meet, Meeting


def run(contender: str, side: str, seconds: list[float], *, bed: str = HEALTHY, **fields: Any) -> PeerRun:
    count = len(seconds)
    given = {"steal": [0.0] * count, "cpu_s": [1.0] * count, "busy_s": [2.0] * count, "wrong": 0, "rejected": 0}
    known = {"topology": "4@100MB/s", "hosts": 4, "nics": 2, "nic_rate": "400Mbit/s", "size_bytes": 2**26}
    known |= {"dtype": "float32", "settings": ""}
    return PeerRun(
        contender=contender,
        side=side,
        bed=bed,
        bound_s=1.0,
        predicted_s=None,
        seconds=seconds,
        **{**known, **given, **fields},
    )


NEXT = run("optimal (tcp)", OURS, [1.1], bed=AFTER_LOSS)
SESSION = Session(
    ["python", "-m", "optcc.experiments.peers_on_fabric"], "2026-11-21 16:35 UTC", {"cores": 2}, {"optcc": "0.1.0"}
)
RECORD = PeerComparison(
    "AllReduce",
    1.0074,
    (SESSION,),
    {"Intel MPI": "proprietary, left out"},
    (
        run("ring (tcp)", OURS, [1.02, 1.01, 1.5]),
        run("ring (mpi)", OURS, [1.03]),
        run("MPICH, UCX", PEER, [1.4]),
        run("Open MPI ring, TCP", PEER, [1.05]),
        run("optimal (tcp)", OURS, [1.04], bed="one NIC at half"),
        run("Open MPI ring, TCP", PEER, [2.4], bed="one NIC at half"),
    ),
    (
        Loss("optimal (tcp)", OURS, 4, 2**26, 1.0, 0.4, 10.0, 2.5, "went on", NEXT),
        Loss("MPICH, UCX", PEER, 4, 2**26, 1.4, 0.5, 10.0, None, "hung for 10 s, ended", None),
    ),
)


# What is started


def test_what_cannot_be_run_here_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_contenders, "mptcp_library", lambda: "")
    started, absent = jobs((), "", "/nowhere/python")
    assert [job.name for job in started] == ["open-mpi", "open-mpi-ucx"]
    assert "--mpich" in absent["MPICH, UCX"]
    assert "/nowhere/python" in absent["Gloo"]
    assert "mptcpize" in absent["Open MPI ring, MPTCP"]
    assert {"Open MPI default, TCP", "MPICH, OFI", "Intel MPI", "NCCL, RCCL"} <= set(absent)


def test_the_extent_says_how_much_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_contenders, "mptcp_library", lambda: "/lib/libmptcpwrap.so.0")
    monkeypatch.setattr(peers_contenders, "_lacks", lambda python, package, how: None)
    names = {extent: {job.name for job in jobs((), "x", "x", extent)[0]} for extent in (FEW, STANDARD, LONG)}
    assert names[FEW] < names[STANDARD] < names[LONG]
    contenders = {extent: {c.contender for job in jobs((), "x", "x", extent)[0] for c in job.cases} for extent in names}
    least = {c.contender for job in jobs((), "x", "x", LEAST)[0] for c in job.cases}
    assert contenders[FEW] - least == {"Open MPI ring, TCP"}
    assert names[LONG] - names[STANDARD] == {"open-mpi-default", "mpich-ofi"}
    assert len(names[LONG]) == 7


def test_another_messaging_layer_is_asked_for_once(tmp_path: Path) -> None:
    given = {"agent": "/run/a/agent", "hostfile": "/run/a/hosts", "nics": 2, "ranks": 4, "exported": ["PATH"]}
    by_name = {job.name: job for job in jobs((), "", "")[0]}
    words = by_name["open-mpi-ucx"].arguments(**given, extra=by_name["open-mpi-ucx"].extra)
    assert words.count("pml") == 1
    assert words[words.index("pml") + 1] == "ucx"
    words = by_name["open-mpi"].arguments(**given)
    assert words[words.index("pml") + 1] == "ob1"


def test_mpich_gets_an_agent_that_can_be_executed(tmp_path: Path) -> None:
    job = PeerJob("mpich", sys.executable, "mpich", ())
    words = job.arguments(
        agent=str(tmp_path / "agent"), hostfile=str(tmp_path / "hosts"), nics=2, ranks=3, exported=["A", "B"]
    )
    assert words[-2:] == ["-n", "3"]
    assert words[words.index("-genvlist") + 1] == "A,B"
    listed = Path(words[words.index("-f") + 1]).read_text(encoding="ascii")
    assert listed.split() == ["10.99.0.1", "10.99.0.2", "10.99.0.3"]
    agent = Path(words[words.index("-launcher-exec") + 1])
    assert agent.stat().st_mode & 0o777 == 0o700
    assert f"/bin/sh {tmp_path / 'agent'}" in agent.read_text(encoding="ascii")


def test_declared_rates_are_those_of_the_bed() -> None:
    declared = {bed.name: bed.declared("400Mbit/s") for bed in BEDS}
    assert declared[HEALTHY] == "50MB/s"
    assert declared["one NIC at half"] == "50MB/s,h3.eth1=25MB/s"
    assert declared["two stragglers"].count("=") == 4


def test_a_segment_is_half_a_mebibyte_until_there_are_few_or_many() -> None:
    found = {size: our_case("optimal", "tcp", "4@50MB/s", size).config["segments"] for size in (2**19, 2**25, 2**29)}
    assert found == {2**19: 32, 2**25: 64, 2**29: 512}


def test_the_standard_set_has_every_state_and_the_goals_have_theirs() -> None:
    found = stages(2**26, STANDARD)
    assert {bed.name for stage in found if stage.hosts == 4 and stage.size_bytes == 2**26 for bed in stage.beds} == {
        bed.name for bed in BEDS
    }
    assert {(stage.hosts, stage.size_bytes) for stage in found} == {(h, s) for h in (4, 8) for s in (2**26, 2**28)}
    assert all(ONE_HOST in stage.beds for stage in found if stage.hosts == 8 or stage.is_long)
    assert [stage.rounds for stage in found] == [5, 3, 3, 3, 3]
    assert sum(stage.loses for stage in found) == 1
    assert all(stage.beds == BEDS for stage in stages(2**26, LONG))


def test_the_last_host_of_any_number_is_late_by_a_reduce_scatter_of_the_others() -> None:
    late, slow_too = late_beds(8)
    assert late.declared("100Mbit/s") == "12.5MB/s"
    assert slow_too.declared("100Mbit/s") == "12.5MB/s,h7.eth0=6.25MB/s,h7.eth1=6.25MB/s"
    # Each of seven ranks sends six sevenths of the message.
    assert late.late_s(8, 7 * 10**6, "100Mbit/s") == Fraction(6 * 10**6, 25 * 10**6) * Fraction(WIRE_OVERHEAD)
    assert not any(bed.late for bed in BEDS)


def test_stragglar_gains_from_the_delay_over_ports_that_are_shared_as_these_are() -> None:
    case = our_case("stragglar", "tcp", "4@50MB/s", 2**26).config
    late_s = late_beds(4)[0].late_s(4, 2**26, "200Mbit/s")
    seconds = seconds_after(plan_of(case, 2**26, "float32"), wires_of(case), late_s, case["ports"])
    bound_s = float(least_seconds_after(wires_of(case), 2**26, late_s))
    # Of four ranks: four rounds of a third, where a ring takes two times three quarters.
    assert bound_s * 4 / 3 < seconds < 1.05 * bound_s * 4 / 3


def test_every_schedule_that_is_compared_has_settings() -> None:
    for name in {name for names in (*OURS_ALL.values(), *OURS_LATE.values()) for name in names}:
        case = our_case(name, "tcp", "4@50MB/s", 2**26)
        assert case.contender == f"{name} (tcp)"
        segments = OUR_SETTINGS[name].get("segments", 128)
        assert f"segments={segments}" in case.settings.split()
        assert "topology" not in case.settings


def test_nics_that_not_every_rank_has_are_left_out() -> None:
    mine = [HostNic("eth0", "10.0.0.1"), HostNic("eth1", "10.0.1.1")]
    named = [("eth0", "10.0.0.1"), ("eth1", "10.0.1.1")]

    def meet(*others: list[tuple[str, str]]) -> Meet:
        def meet(record: bytes) -> Meeting:
            return Meeting(0, 1 + len(others), b"", b"", (record, *map(msgspec.json.encode, others)))

        return meet

    assert common_nics(mine, meet(named)) == (["eth0", "eth1"], "10.0.0.1")
    assert common_nics(mine, meet([("eth1", "10.0.1.2")])) == (["eth1"], "10.0.1.1")
    assert common_nics(mine, meet([("ib0", "10.9.0.2")])) == (["eth0"], "10.0.0.1")


def test_the_last_words_of_a_job_name_the_cause() -> None:
    said = "Traceback\n  File x\noptcc.errors.InputError: eth7: no such NIC\n-----\nprterun noticed that rank 2 ended"
    assert last_words(said) == "optcc.errors.InputError: eth7: no such NIC"
    assert last_words("one\n two  words \n----") == "two words"
    assert last_words("") == "without a word"


# The summary


def test_the_summary_has_the_best_of_either_side_over_the_bound() -> None:
    rows = {row[3]: row[5:] for row in RECORD.summary().rows}
    assert rows[HEALTHY] == (
        "-",
        "-",
        "1.020 (1.010 to 1.500)",
        "-",
        "1.050 (1.050 to 1.050)",
        "Open MPI ring, TCP",
        "1",
    )
    assert rows["one NIC at half"] == (
        "1.040 (1.040 to 1.040)",
        "-",
        "-",
        "-",
        "2.400 (2.400 to 2.400)",
        "Open MPI ring, TCP",
        "1",
    )
    assert rows[AFTER_LOSS] == ("1.100 (1.100 to 1.100)", "-", "-", "-", "-", "-", "1")


# Which runs count


@dataclass
class Script:
    """A team that answers with what it was given."""

    answers: list[Turn | RuntimeFault]
    asked: list[int] = field(default_factory=list)

    def turn(self, number: int, limit_s: float | None = None, during: Iterator[None] | None = None) -> Turn:
        self.asked.append(number)
        answer = self.answers.pop(0)
        if isinstance(answer, RuntimeFault):
            raise answer
        return answer


def turn(seconds: float, steal: float = 0.0, wrong: int = 0) -> Turn:
    return Turn(seconds, steal, 1.0, 1.0, wrong)


def tally(*answers: Turn | RuntimeFault) -> ContenderRuns:
    return ContenderRuns(Script(list(answers)), 3, our_case("ring", "tcp", "4@50MB/s", 2**26))  # type: ignore[arg-type]


def test_a_disturbed_run_is_repeated_and_the_quiet_one_counts() -> None:
    found = tally(turn(1.3, 2 * STEAL_MAX), turn(1.0), turn(1.1))
    found.run()
    found.run()
    assert [each.seconds for each in found.turns] == [1.0, 1.1]
    assert found.rejected == 1


def test_after_some_repeats_the_least_disturbed_one_counts() -> None:
    steals = [STEAL_MAX * factor for factor in (4, 2, 3, 5)]
    assert len(steals) == REPEATS_MAX + 1
    found = tally(*(turn(1.0 + steal, steal) for steal in steals))
    found.run()
    assert [each.steal for each in found.turns] == [2 * STEAL_MAX]
    assert found.rejected == REPEATS_MAX


def test_plans_are_for_the_state_of_the_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = "4@50MB/s,3=37.5MB/s"
    config: list[Any] = []
    spec = FabricSpec.parse("4x2@200Mbit/s")
    fabric: Any = SimpleNamespace(topology_text="4@50MB/s".strip, state=lambda: SimpleNamespace(spec=spec))

    @contextlib.contextmanager
    def in_state(hosts: Any, *_: Any) -> Iterator[None]:
        hosts.topology_text = slow.strip
        yield

    monkeypatch.setattr(peers_comparison, "in_state", in_state)
    monkeypatch.setattr(Comparison, "_predict", lambda *_: True)

    def no_jobs(ours: Sequence[Any], *_: Any) -> tuple[list[Any], dict[str, str]]:
        config.extend(ours)
        return [], {}

    monkeypatch.setattr(peers_comparison, "jobs", no_jobs)
    Comparison(2**16, 1, "", "", "200Mbit/s").compare(fabric, ONE_NIC, tmp_path, LEAST)
    assert {case.config["topology"] for case in config} == {slow}


def test_a_plan_for_other_rates_has_no_prediction() -> None:
    for topology, predicted_s in (("4@50MB/s", 2.0), ("4@50MB/s,3=37.5MB/s", None)):
        timed = tally(turn(1.3))
        timed.run()
        asked = Comparison(2**26, 1, "", "", "200Mbit/s")
        asked.predicted_s = {(timed.case.contender, topology): 2.0}
        run = asked._made(timed, Bed("some"), topology, FabricSpec.parse("4x2@200Mbit/s"))
        assert run.predicted_s == predicted_s


def test_wrong_elements_count_even_in_runs_that_do_not() -> None:
    found = tally(turn(1.0, 2 * STEAL_MAX, wrong=5), turn(1.0, wrong=2))
    found.run()
    assert found.wrong == 7


def test_a_run_that_hangs_is_said_and_ends_the_contender() -> None:
    found = tally(Hung("no answer within 60 s"))
    found.run()
    assert found.turns == []
    assert found.failed == "no answer within 60 s"


def test_data_that_goes_over_the_control_network_does_not_count() -> None:
    found = tally(turn(1.0))
    found.run()
    found.check_control(2**20, 2**26)
    assert found.failed == ""
    found.check_control(2**23, 2**26)
    assert found.failed == "8MiB went over the control network"


# The command


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str, str, str, int, int]]:
    """What the command asks for: hosts, size, state, extent, rate, rounds and warm-up; nothing is started."""
    asked: list[tuple[int, int, str, str, str, int, int]] = []

    def compare(self: Comparison, fabric: int, bed: Bed, folder: Path, extent: str = STANDARD) -> None:
        asked.append((fabric, self.size_bytes, bed.name, extent, self.rate, self.rounds, self.warmup))
        self.runs.append(run("ring (tcp)", OURS, [2.0], bed=bed.name, hosts=fabric, size_bytes=self.size_bytes))

    monkeypatch.setattr(peers_on_fabric, "can_make_namespaces", lambda: None)
    monkeypatch.setattr(peers_on_fabric, "_hosts", lambda hosts, rate: contextlib.nullcontext((hosts, Path())))
    monkeypatch.setattr(Comparison, "compare", compare)
    monkeypatch.setattr(Comparison, "lose", lambda self, fabric, folder: None)
    return asked


def call(*words: str) -> int:
    with mock.patch.object(sys, "argv", ["peers", *words]):
        code = peers_on_fabric.command.main(list(words), standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_the_part_with_so_many_hosts_joins_a_record(
    tmp_path: Path, compared: list[tuple[int, int, str, str, str, int, int]]
) -> None:
    path = tmp_path / "peers.json"
    replace(RECORD, wire_overhead=float(Fraction(WIRE_OVERHEAD))).write(path)
    assert call("--hosts", "8", "--join", "-o", str(path)) == 0
    states = ("one host at half", "one NIC at half", HEALTHY, "one host late", "one host late and at half")
    short = [(8, 2**26, name, FEW, "100Mbit/s", 3, 0) for name in states]
    assert compared == [*short, *((8, 2**28, name, LEAST, "100Mbit/s", 3, 0) for name in ("one host at half", HEALTHY))]
    found = PeerComparison.read(path)
    assert {each.hosts for each in found.runs if each.session == 0} == {4}
    assert {each.hosts for each in found.runs if each.session == 1} == {8}
    assert found.sessions[1].command[-4:] == ["8", "--join", "-o", str(path)]
    assert found.losses == RECORD.losses


def test_one_state_can_be_of_any_hosts_size_and_rate(
    tmp_path: Path, compared: list[tuple[int, int, str, str, str, int, int]]
) -> None:
    words = ("--bed", "two stragglers", "--hosts", "8", "--size", "1MiB", "--rate", "1Gbit/s", "--few", "--rounds", "7")
    assert call(*words, "-o", str(tmp_path / "peers.json")) == 0
    assert compared == [(8, 2**20, "two stragglers", FEW, "1Gbit/s", 7, 0)]
    assert call("--quick", "-o", str(tmp_path / "peers.json")) == 0
    assert {each[0] for each in compared[1:]} == {4}
    assert all(each[1:2] + each[4:] == (2**23, "400Mbit/s", 2, 1) for each in compared[1:])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--few",), "--few and --least: go with --bed"),
        (("--bed", "half"), "--bed 'half': must be one of healthy; one NIC at half"),
        (("--join", "-o", "/nowhere/peers.json"), "/nowhere/peers.json"),
        (("--hosts", "6"), "'6' is not one of '4', '8'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    compared: list[tuple[int, int, str, str, str, int, int]], words: tuple[str, ...], part: str
) -> None:
    with pytest.raises((InputError, click.UsageError)) as refusal:
        call(*words)
    assert part in str(refusal.value)
    assert compared == []


def test_a_record_of_other_headers_is_refused_before_anything_is_made(
    tmp_path: Path, compared: list[tuple[int, int, str, str, str, int, int]]
) -> None:
    RECORD.write(tmp_path / "peers.json")
    with pytest.raises(InputError, match=r"wire overhead 1\.00737\d*: must be the 1\.0074 of the record"):
        call("--join", "-o", str(tmp_path / "peers.json"))
    assert compared == []


# The record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    RECORD.write(tmp_path / "peers.json")
    assert PeerComparison.read(tmp_path / "peers.json") == RECORD


LATER = Session(["python", "--bed", HEALTHY], "2026-11-22 09:00 UTC", {"cores": 2}, {"optcc": "0.2.0"})


def test_a_state_that_is_measured_again_replaces_all_contenders_of_it() -> None:
    newer = replace(
        RECORD,
        sessions=(LATER,),
        absent={"Gloo": "not installed", f"Gloo: 8 hosts, {HEALTHY}, 64MiB": "no answer"},
        runs=(
            run("Gloo", PEER, [1.2]),
            run("ring (tcp)", OURS, [2.2], hosts=8, bed="one host at half"),
            run("ring (tcp)", OURS, [1.2], hosts=8),
        ),
        losses=(),
    )
    older = replace(RECORD, absent={**RECORD.absent, f"Gloo: 4 hosts, {HEALTHY}, 64MiB": "hung"})
    both = PeerComparison.from_bytes(older.with_newer(newer).to_bytes())
    assert [(each.hosts, each.bed, each.contender, each.session) for each in both.runs] == [
        (4, HEALTHY, "Gloo", 1),
        (4, "one NIC at half", "optimal (tcp)", 0),
        (4, "one NIC at half", "Open MPI ring, TCP", 0),
        (8, HEALTHY, "ring (tcp)", 1),
        (8, "one host at half", "ring (tcp)", 1),
    ]
    assert both.losses == RECORD.losses
    assert both.sessions == (SESSION, LATER)
    assert set(both.absent) == {"Intel MPI", f"Gloo: 8 hosts, {HEALTHY}, 64MiB"}, "Gloo has been run, here and now"


def test_a_session_of_which_nothing_is_left_is_forgotten() -> None:
    again = RECORD.with_newer(replace(RECORD, sessions=(LATER,)))
    assert again == replace(RECORD, sessions=(LATER,))
    assert again.with_newer(replace(RECORD, runs=(), losses=(), sessions=(SESSION,))) == again
    with pytest.raises(InputError, match="wire overhead 2: must be the"):
        RECORD.with_newer(replace(RECORD, wire_overhead=2))


def test_medians_are_of_undisturbed_runs() -> None:
    disturbed = run("x", PEER, [1.0, 9.0, 2.0], steal=[0.0, 0.5, 0.0], cpu_s=[3.0, 90.0, 5.0])
    assert disturbed.median_s == 1.5
    assert disturbed.bound_percent == pytest.approx(100 / 1.5)
    assert disturbed.cpu_s_per_gb == pytest.approx(4.0 / (2 * 3 * 2**26 / 1e9))
    assert run("x", PEER, [4.0, 2.0, 6.0], steal=[1.0] * 3).median_s == 4.0


def test_the_reference_is_the_best_peer_on_healthy_hosts() -> None:
    assert RECORD.fault_free_s(RECORD.runs[-1]) == 1.05
    assert RECORD.fault_free_s(replace_run(RECORD.runs[-1], hosts=8)) is None
    rows = {row[1]: row for row in RECORD.card().rows if "half" in row[0]}
    assert rows["Open MPI ring, TCP"][5] == "+128.6 %"
    assert RECORD.card().rows[-1][0] == "4x2 after the loss"
    assert [part.title for part in RECORD.parts()] == [
        f"4 hosts, {bed}, 64MiB, NICs of 400Mbit/s, T* 1 s" for bed in (HEALTHY, "one NIC at half", "after the loss")
    ]
    assert RECORD.losses_card().rows[1][-2:] == ("-", "hung for 10 s, ended")


def replace_run(each: PeerRun, **fields: Any) -> PeerRun:
    return msgspec.structs.replace(each, **fields)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"seconds": []}, r"\$\.runs\[0\]\.seconds: \[\]: must be above zero"),
        ({"seconds": [1.0, 0.0]}, r"\$\.runs\[0\]\.seconds"),
        ({"steal": []}, r"\$\.runs\[0\]\.steal: \[\]: must have as many"),
        ({"bound_s": 0.0}, r"bound_s: 0.0: must be above zero"),
        ({"side": "theirs"}, r"side: 'theirs': must be ours or peer"),
        ({"wrong": -1}, "wrong: -1: must not be negative"),
        ({"session": 1}, r"\$\.runs\[0\]\.session: 1: must be the number of one of 1 sessions"),
    ],
)
def test_numbers_that_cannot_be_are_refused(fields: dict[str, Any], part: str) -> None:
    broken = replace(RECORD, runs=(replace_run(RECORD.runs[1], **fields), *RECORD.runs))
    with pytest.raises(CodecError, match=part):
        PeerComparison.from_bytes(broken.to_bytes(), "r.json")


# The figure


def test_the_figure_has_a_panel_for_each_state_and_one_for_the_loss() -> None:
    table = peer_dots.data(RECORD, 2**26)
    assert [panel.bed for panel in table.panels] == [HEALTHY, "one NIC at half", peer_dots.LOST]
    assert [name for name, _ in table.contenders] == [
        *("ring (tcp)", "optimal (tcp)", "ring (mpi)"),
        *("MPICH, UCX", "Open MPI ring, TCP"),
    ]
    assert table.panels[-1].words == (("MPICH, UCX", "hung"),)
    found = peer_dots.numbers(table)
    assert found["4-hosts/one NIC at half/optimal (tcp)/over-bound-percent"].text == "4.0"
    assert found["4-hosts/after the loss/optimal (tcp)/stall"].value == 1.5
    assert found["4-hosts/after the loss/MPICH, UCX/outcome"].text == "hung"
    assert found["4-hosts/nic-rate"].text == "400Mbit/s"


def test_the_figure_is_drawn_from_the_record_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    RECORD.write(tmp_path / "peers.json")
    build.build([tmp_path / "peers.json"], tmp_path / "out", quick=True)
    assert (tmp_path / "out" / "peer-dots-64MiB.png").read_bytes().startswith(b"\x89PNG")
    figure = peer_dots.draw(peer_dots.data(RECORD, 2**26))
    ids = {str(each.get_gid()) for axes in figure.axes for each in (*axes.lines, *axes.texts) if each.get_gid()}
    assert "dot:4:one NIC at half:optimal (tcp)" in ids
    assert "word:4:after the loss:MPICH, UCX" in ids
    assert sum(each.startswith("dot:") for each in ids) == len(RECORD.runs) + 1


def test_an_empty_row_says_that_it_was_not_run_and_the_notes_say_why() -> None:
    pytest.importorskip("matplotlib")
    table = peer_dots.data(replace(RECORD, absent={"MPICH, UCX: further states": "too slow"}), 2**26)
    *states, lost = table.panels
    assert table.not_run(states[-1], "MPICH, UCX") == "too slow"
    assert table.not_run(lost, "ring (tcp)") == peer_dots.ONE_JOB
    assert table.not_run(lost, "Open MPI ring, TCP") == LEFT_OUT
    figure = peer_dots.draw(table)
    drawn = {str(each.get_gid()): each.get_text() for axes in figure.axes for each in axes.texts if each.get_gid()}
    every = [(panel, name) for panel in table.panels for name, _ in table.contenders]
    assert {gid for gid in drawn if gid.startswith("empty:")} == {
        f"empty:{panel.hosts}:{panel.bed}:{name}" for panel, name in every if name not in panel.contenders
    }
    notes = [each.get_text() for each in figure.texts]
    assert f"{drawn['empty:4:after the loss:ring (tcp)']}: {peer_dots.ONE_JOB}." in notes
    assert any(note.startswith("hung: ") and " 10 s" in note for note in notes)


def test_panels_that_do_not_fit_beside_each_other_stand_below_with_the_contenders_they_have() -> None:
    few = [run(name, OURS, [1.1], bed=f"state {n}") for n, name in enumerate(["ring (tcp)", "optimal (tcp)"] * 3)]
    table = peer_dots.data(replace(RECORD, runs=(*RECORD.runs, *few)), 2**26)
    lines = table.lines()
    assert [panel for line in lines for panel in line.panels] == list(table.panels)
    assert [len(line.panels) for line in lines] == [4, 4, 1]
    assert lines[0].contenders == table.contenders
    assert [name for name, _ in lines[1].contenders] == ["ring (tcp)", "optimal (tcp)"]


def test_the_figure_says_by_how_much_a_host_is_late() -> None:
    assert not any(note.startswith("late") for note in peer_dots.data(RECORD, 2**26).notes)
    late = run("stragglar (tcp)", OURS, [1.3], bed="one host late", late_s=2.317)
    notes = peer_dots.data(replace(RECORD, runs=(*RECORD.runs, late)), 2**26).notes
    assert notes[0] == "late: by 2.3 s; time and T* count from when that host begins."


def test_a_second_record_of_the_kind_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = []
    for name, title in (("a", "one"), ("b", "two")):
        paths.append(tmp_path / f"{name}.json")
        replace(RECORD, title=title).write(paths[-1])
    with pytest.raises(InputError, match="a second figure peer-dots"):
        build.build(paths, tmp_path / "out", quick=True)
