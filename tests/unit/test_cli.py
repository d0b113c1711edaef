"""The command line: exit codes, one line on stderr an error, the JSON that scripts read, files whole or absent."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optcc import cli
from optcc.codec import read_plan, write_plan
from optcc.collective import COLLECTIVES, ROOTED, Collective
from optcc.errors import EXIT_REFUTED
from optcc.planner import find_schedule
from optcc.topology import Topology
from optcc.verdict import LINES_MAX, PROPERTIES, PROVED
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.failover import encoding, exploration, induction
from tests.negative.edits import Draft

FLAT = ["--topology", "3@50MB/s,2=25MB/s", "--size", "12KiB", "--segments", "2"]

AUTHOR = '''
from optcc.dsl import Program, schedule


@schedule
def wrong(program: Program) -> None:
    """Rank 1's input is lost."""
    for segment in program.pipeline(sections=1):
        segment[0].copy(src=0, dst=1)


@schedule
def nothing(program: Program) -> None:
    """Writes nothing."""


@schedule
def mistaken(program: Program) -> None:
    """Names a rank that is not there."""
    for segment in program.pipeline(sections=1):
        segment[0].reduce(src=0, dst=99)


@schedule
def broken(program: Program) -> None:
    """Its own bug."""
    raise ZeroDivisionError("over nothing")


@schedule
def floating(program: Program) -> None:
    """Sections that are no number of sections."""
    for segment in program.pipeline(sections=2.0):
        segment[0].reduce(src=0, dst=1)


@schedule
def needy(program: Program, depth: int) -> None:
    """A parameter that nobody gives."""


number = 3
'''

SHORT = """
from optcc.dsl import schedule

@schedule
def short(program):
    p = program.n_ranks
    for segment in program.pipeline(sections=p):
        for step in range(p - 1 if p < 4 else p - 2):
            for rank in program.ranks:
                segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
        for step in range(p - 1):
            for rank in program.ranks:
                segment[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)
"""

MISTAKEN = f"mine.py:{AUTHOR[: AUTHOR.index('dst=99')].count(chr(10)) + 1}: 0->99"


@pytest.fixture
def author(tmp_path: Path) -> Path:
    """A user's own file of schedules."""
    path = tmp_path / "mine.py"
    path.write_text(AUTHOR, encoding="utf-8")
    return path


def done(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """The JSON that a command prints; its exit code must be `code`, and stderr empty."""
    assert cli.run([*words, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that ends with exit code 2 and prints nothing else."""
    assert cli.run(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("optcc: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    return err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Name, collectives, accepted topologies and paper of every schedule."""
    rows = done(capsys, "list")
    assert {"ring", "optcc"} <= {row["name"] for row in rows}
    for row in rows:
        assert {"name", "collectives", "accepts", "paper"} <= set(row)
        assert isinstance(row["collectives"], list)
    assert cli.run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]


def test_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds, exactly and as a float, what binds, and the certificate."""
    answer = done(capsys, "bound", "4@50MB/s,3=25MB/s", "--size", "100MB")
    promised = {"seconds", "seconds_exact", "binding", "certificate"}
    assert set(answer) == promised | {"achievable_exact", "gap", "explanation", "solver"}
    assert answer["seconds_exact"] == "4/1"
    assert answer["seconds"] == 4.0
    assert answer["binding"] == ["out h3", "in h3"]
    assert Fraction(answer["certificate"]["seconds"]) == 4
    assert answer["solver"] is None
    assert done(capsys, "bound", "4@50MB/s", "--size", "0")["seconds_exact"] == "0/1"


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_bound_by_a_solver(capsys: pytest.CaptureFixture[str], solver: str) -> None:
    """The linear program's certificate supports the closed form."""
    words = ("bound", "4@50MB/s,3=25MB/s", "--size", "100MB", "--solver", solver)
    answer = done(capsys, *words, "--achievable")
    assert answer["solver"] == solver
    assert (answer["seconds_exact"], answer["achievable_exact"], answer["gap"]) == ("4/1", "4/1", "0/1")
    assert done(capsys, "bound", "4@50MB/s", "--size", "0", "--solver", solver)["seconds_exact"] == "0/1"
    assert cli.run(list(words)) == 0
    assert f"exactly 4 s (linear program solved by {solver}); certificate replayed" in capsys.readouterr().out


def test_bound_by_a_solver_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("bound", "4@50MB/s", "--size", "1MB", "--solver")
    assert refused(capsys, *words, "glpk") == "optcc: --solver 'glpk': must be one of highs, cbc\n"
    monkeypatch.setitem(sys.modules, "pulp", None)
    assert "pulp is not installed: pip install" in refused(capsys, *words, "cbc")


def test_a_solver_must_support_the_closed_form(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than the closed form proves is an error, not an answer."""
    half = lp_bound(Topology.parse("4@50MB/s"), "allreduce", 500_000)
    monkeypatch.setattr("optcc.verify.bounds.certified.lp_bound", lambda *_, **__: half)
    assert cli.run(["bound", "4@50MB/s", "--size", "1MB", "--solver", "cbc"]) == EXIT_REFUTED
    assert "must not be less than the closed form" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ring", "optcc"])
def test_verify(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Verdict, one verdict for each property, no counterexample, seconds."""
    answer = done(capsys, "verify", name, *FLAT)
    assert {"verdict", "properties", "counterexample", "seconds"} <= set(answer)
    assert answer["verdict"] == "proved"
    assert answer["properties"] == dict.fromkeys((*PROPERTIES, "translation"), "proved")
    assert answer["counterexample"] is answer["smallest"] is answer["makespan"] is None
    assert answer["seconds"] >= 0
    assert answer["slots"] >= answer["least_slots"] >= 1


def test_verify_refutes(capsys: pytest.CaptureFixture[str], author: Path) -> None:
    """Exit code 1, and where the result is wrong."""
    answer = done(capsys, "verify", f"{author}:wrong", "--topology", "2@1GB/s", "--size", "8", code=1)
    assert answer["verdict"] == "refuted"
    assert answer["properties"]["result"] == "refuted"
    assert answer["counterexample"]["property"] == "result"
    assert answer["counterexample"]["rank"] == 0
    assert (answer["counterexample"]["first_byte"], answer["counterexample"]["last_byte"]) == (0, 7)
    assert cli.run(["verify", f"{author}:wrong", "--topology", "2@1GB/s", "--size", "8"]) == 1
    assert "contribution of rank 1 missing" in capsys.readouterr().out
    assert done(capsys, "verify", f"{author}:nothing", "--topology", "2@1GB/s", "--size", "1MiB", code=1)


def test_verify_shows_the_smallest_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """JSON has both counterexamples, of the plan asked about and of the smallest case; people see the latter."""
    path = tmp_path / "short.py"
    path.write_text(SHORT, encoding="utf-8")
    words = ("verify", f"{path}:short", "--topology", "9@1GB/s", "--size", "64KiB", "--segments", "4")
    answer = done(capsys, *words, code=1)
    assert answer["counterexample"]["last_byte"] > answer["smallest"]["counterexample"]["last_byte"]
    smallest = {key: answer["smallest"][key] for key in ("ranks", "segments", "size_bytes")}
    assert smallest == {"ranks": 4, "segments": 1, "size_bytes": 16}
    assert cli.run([*words]) == 1
    told = capsys.readouterr().out
    assert "smallest case that fails: 4 ranks, 1 segment, 16 B" in told
    assert "(line 10)" in told
    assert len(told[told.index("result: ") :].splitlines()) <= LINES_MAX


def test_verify_claims_about_time(capsys: pytest.CaptureFixture[str]) -> None:
    """What a ring over a port at half rate takes, exactly; a tick less, or a smaller factor, is refuted."""
    words = ("verify", "ring", "--topology", "4@1GB/s,3=500MB/s", "--size", "12MB", "--segments", "1")
    right = done(capsys, *words, "--promise", "36ms")
    assert right["properties"]["timing"] == "proved"
    assert Fraction(right["makespan"]["seconds_exact"]) == Fraction(36, 1000)
    late = done(capsys, *words, "--promise", "35.999ms", code=1)
    assert (late["verdict"], late["counterexample"]["property"]) == ("refuted", "timing")
    assert "h3" in late["counterexample"]["summary"]
    assert late["smallest"] is None
    bound = 24  # l n / B = 2 * 12 ms
    assert done(capsys, *words, "--eps", f"{Fraction(36, bound) - 1}")["verdict"] == "proved"
    assert done(capsys, *words, "--eps", "0.499", code=1)["verdict"] == "refuted"


def test_verify_judges_time_on_the_ports_of_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fair ports by simulation: no exact time. A plan from a file as well; a name that is none is refused."""
    topology = ("--topology", "4@50MB/s,3=25MB/s")
    size = (*topology, "--size", "1MiB", "--segments", "64")
    answer = done(capsys, "verify", "optimal", *size, "--ports", "fair", "--eps", "0.02")
    assert answer["properties"]["timing"] == "proved"
    shown = answer["makespan"]
    assert (shown["model"], shown["seconds_exact"]) == ("fair", None)
    assert shown["seconds"] == done(capsys, "simulate", "optimal", *size, "--model", "fair")["seconds"]
    path = tmp_path / "plan"
    done(capsys, "compile", "optimal", *size, "--ports", "fair", "-o", str(path))
    for words in ((), ("--ports", "fair")):
        kept = done(capsys, "verify", "--plan", str(path), *topology, "--eps", "0.02", *words)
        assert kept["makespan"] == shown
    for ports in ("fifo", "exclusive"):
        exact = done(capsys, "verify", "ring", *size, "--ports", ports, "--eps", "9")["makespan"]
        assert exact["model"] == ports and "/" in exact["seconds_exact"]
    wrong = refused(capsys, "verify", "--plan", str(path), *topology, "--ports", "open")
    assert "--ports 'open': must be one of fifo, exclusive, fair" in wrong
    slow = refused(capsys, "verify", "optimal", *size, "--ports", "fair", "--slowdown", "1:8")
    assert "--slowdown with --ports fair" in slow


def test_a_plan_file_knows_the_ports_that_it_is_ordered_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are the default; to time it on others is said, and a contradiction is refused."""
    topology = ("--topology", "4@50MB/s,3=25MB/s")
    path = str(tmp_path / "plan")
    size = (*topology, "--size", "1MiB", "--segments", "16")
    for ports in ("fifo", "exclusive", "fair"):
        done(capsys, "compile", "optcc", *size, "--ports", ports, "-o", path)
        simulated = done(capsys, "simulate", "--plan", path, *topology)
        assert simulated["model"] == ports
        again = done(capsys, "simulate", "--plan", path, *topology, "--model", ports)
        assert simulated["seconds"] == again["seconds"]
        assert done(capsys, "simulate", "--plan", path, *topology, "--model", "fifo")["model"] == "fifo"
        assert done(capsys, "verify", "--plan", path, *topology, "--eps", "9")["makespan"]["model"] == ports
        assert capsys.readouterr().err == ""
        other = "exclusive" if ports == "fifo" else "fifo"
        wrong = refused(capsys, "simulate", "--plan", path, *topology, "--ports", other)
        assert f"--ports {other}: the plan is ordered for {ports}" in wrong
        assert cli.run(["verify", "--plan", path, *topology, "--ports", other, "--eps", "9"]) == 0
        assert f"the plan is ordered for {ports} ports, and timed on {other} ones" in capsys.readouterr().err


def test_verify_limits_of_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    """Too many steps for a thread block are refuted for that target alone."""
    words = ("verify", "ring", "--topology", "4@1GB/s", "--size", "1MiB", "--segments", "64")
    assert done(capsys, *words)["verdict"] == "proved"
    answer = done(capsys, *words, "--target", "msccl-xml", code=1)
    assert answer["counterexample"]["property"] == "limits"
    assert "'nope'" in refused(capsys, *words, "--target", "nope")


def test_verify_for_all_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Proved by lemmas; refuted with the fewest ranks; unknown, with the line; nothing else may be asked."""
    answer = done(capsys, "verify", "direct", "--all-ranks")
    assert answer["properties"] == dict.fromkeys(PROPERTIES, "proved")
    assert len(answer["lemmas"]) > 5
    path = tmp_path / "short.py"
    path.write_text(SHORT, encoding="utf-8")
    answer = done(capsys, "verify", f"{path}:short", "--all-ranks", code=1)
    assert (answer["verdict"], answer["properties"]["result"], answer["smallest_p"]) == ("refuted", "refuted", 4)
    assert cli.run(["verify", f"{path}:short", "--all-ranks"]) == 1
    assert "(line 10)" in capsys.readouterr().out
    path.write_text(SHORT.replace("p < 4 else p - 2", "p < 999 else p - 2"), encoding="utf-8")
    answer = done(capsys, "verify", f"{path}:short", "--all-ranks", code=3)
    assert (answer["verdict"], answer["properties"]["result"]) == ("unknown", "unknown")
    assert answer["reached"]
    assert "no other question" in refused(capsys, "verify", "ring", "--all-ranks", "--size", "8")
    assert "NAME" in refused(capsys, "verify", "--all-ranks")


@pytest.mark.slow
def test_verify_the_failover_protocol(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """States, lemmas, and the encoding held against the table."""
    asked = ((encoding, "check_encoding"), (exploration, "check_replay"), (induction, "prove_invariants"))
    for module, name in asked:  # once, and printed twice
        monkeypatch.setattr(module, name, cache(getattr(module, name)))
    answer = done(capsys, "verify", "--failover")
    assert (answer["verdict"], answer["properties"]) == ("proved", {"replay": "proved"})
    assert answer["states"] > 10**5
    assert set(answer["lemmas"].values()) == {"proved"}
    assert cli.run(["verify", "--failover"]) == 0
    assert "26 of 26 lemmas" in capsys.readouterr().out
    assert "no NAME" in refused(capsys, "verify", "ring", "--failover")
    assert "--thorough" in refused(capsys, "verify", "ring", "--thorough")


def test_verify_a_file_of_transfers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The neutral form is recognised by its first line, and judged by what it means."""
    path = tmp_path / "ring.jsonl"
    done(capsys, "compile", "ring", *FLAT, "--format", "transfers", "-o", str(path))
    answer = done(capsys, "verify", "--plan", str(path))
    assert answer["properties"] == dict.fromkeys(PROPERTIES, "proved")
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    rows[-1] = json.dumps(json.loads(rows[-1]) | {"after": []})
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    answer = done(capsys, "verify", "--plan", str(path), code=1)
    assert answer["counterexample"]["property"] == "races"
    assert "no plan" in refused(capsys, "verify", "--plan", str(path), "--topology", "3@1GB/s", "--eps", "1")


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds, the bound, their ratio, and how fast the simulation was."""
    answer = done(capsys, "simulate", "optcc", *FLAT, "--latency", "5us")
    assert {"seconds", "bound_seconds", "ratio", "transfers", "transfers_per_second"} <= set(answer)
    assert answer["ratio"] == pytest.approx(answer["seconds"] / answer["bound_seconds"])
    assert answer["ratio"] >= 1
    assert answer["transfers"] == 16
    assert done(capsys, "simulate", "ring", "--topology", "1@1GB/s", "--size", "1M")["seconds"] == 0


def test_simulate_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The same keys, for as many ranks as one likes; a slow rank makes the ring take 2(p - 1) slow steps."""
    words = ("simulate", "ring", "--as-written", "--topology", "1024@50GB/s,3=25GB/s", "--size", "1024MB")
    answer = done(capsys, *words)
    assert set(answer) == set(done(capsys, "simulate", "ring", *FLAT))
    assert answer["transfers"] == 2 * 1024 * 1023
    assert answer["seconds"] == pytest.approx(2 * 1023 * 1e6 / 25e9)
    for extra in (("--model", "fair"), ("--slots", "2"), ("--ports", "fifo")):
        assert "--as-written" in refused(capsys, *words, *extra)
    assert "'nope'" in refused(capsys, *words, "--reduction", "nope")


def test_simulate_with_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a NIC lost half-way costs half as much again in the half that is left; waiting costs the whole outage."""
    words = ("simulate", "ring", "--topology", "4@1GB/s", "--size", "16MB", "--segments", "1", "--model", "exclusive")
    whole = done(capsys, *words)["seconds"]
    assert whole == pytest.approx(0.024)
    answer = done(capsys, *words, "--faults", "3/0@12ms=1/2")
    assert answer["fault_free_seconds"] == pytest.approx(whole)
    assert answer["seconds"] == pytest.approx(0.036)
    assert [each["seconds"] for each in answer["costs"]] == pytest.approx([0.012])
    waited = done(capsys, *words, "--faults", "3/0@12ms..15ms", "--policy", "wait")
    assert waited["overhead"] == pytest.approx(3 / 24)
    noisy = [done(capsys, *words, "--jitter", seed)["seconds"] for seed in ("1", "1", "2")]
    assert noisy[0] == noisy[1] != noisy[2]
    assert cli.run([*words, "--faults", "3/0@12ms=1/2"]) == 0
    assert "3/0@12.000 ms=1/2" in capsys.readouterr().out
    assert "need --faults" in refused(capsys, *words, "--policy", "wait")
    assert "'hope'" in refused(capsys, *words, "--faults", "3/0@1ms..2ms", "--policy", "hope")
    assert "must look like" in refused(capsys, *words, "--faults", "everything")
    assert "server" in refused(capsys, *words, "--faults", "9/0@1ms..2ms")


def test_compile_verify_and_simulate_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan goes through a file unchanged; the transfers are JSON lines of the contract."""
    plan_file, transfers_file = tmp_path / "plan", tmp_path / "transfers"
    answer = done(capsys, "compile", "optcc", *FLAT, "-o", str(plan_file))
    assert answer["file"] == str(plan_file)
    checked = done(capsys, "verify", "--plan", str(plan_file), "--topology", "3@50MB/s")
    assert (checked["verdict"], checked["digest"]) == ("proved", answer["digest"])
    assert done(capsys, "simulate", "--plan", str(plan_file), "--topology", "3@50MB/s,2=25MB/s")["transfers"] == 16

    done(capsys, "compile", "optcc", *FLAT, "--format", "transfers", "-o", str(transfers_file))
    head, *rows = [json.loads(line) for line in transfers_file.read_text(encoding="utf-8").splitlines()]
    assert head == {
        **{"format": "optcc-transfers/1", "ranks": 3, "collective": "allreduce", "reduction": "sum"},
        **{"dtype": "float32", "size_bytes": 12288, "scratch_bytes": 0},
    }
    keys = {"id", "src", "dst", "op", "src_offset", "dst_offset", "bytes", "segment", "stage", "after", "order"}
    assert [row["id"] for row in rows] == list(range(16))
    for row in rows:
        assert set(row) >= keys
        assert row["op"] in ("reduce", "copy")


def test_compiling_again_gives_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files of one plan are equal, and no other file is left."""
    for name in ("one", "two"):
        assert cli.run(["compile", "optcc", *FLAT, "-o", str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("nope", "nope"),
        ("verify", "NAME"),
        ("verify ring", "--topology and --size"),
        ("verify ring --plan x", "either"),
        ("verify nope --topology 2@1GB/s --size 8", "'nope'"),
        ("verify ring extra --topology 2@1GB/s --size 8", "extra"),
        ("verify ring --topology 2@1GB/s --size 6", "size 6"),
        ("verify ring --topology 2@1GB/s --size -8", "'-8'"),
        ("verify ring --topology 2@0GB/s --size 8", "'0GB/s'"),
        ("verify bidirectional-ring --topology 2x2@1GB/s --size 8", "one GPU a server"),
        ("verify ring --topology nowhere.toml --size 8", "nowhere.toml"),
        ("verify ring --topology 2@1GB/s --size 8 --dtype half", "'half'"),
        ("verify ring --topology 2@1GB/s --size 8 --reduction xor", "'xor'"),
        ("verify ring --topology 2@1GB/s --size 8 --segments 0", "--segments '0'"),
        ("verify ring --topology 2@1GB/s --size 8 --segments many", "--segments 'many'"),
        ("verify ring --topology 2@1GB/s --size 8 --slots 0", "0 slots"),
        ("verify ring --topology 2@1GB/s --size 8 --slots 99999999999999999999", "slots"),
        ("verify ring --topology 2@1GB/s --size 8 --nonsense", "--nonsense"),
        ("verify optcc --topology 3@9MB/s,1=1MB/s,2=2MB/s --size 8", "optcc accepts"),
        ("verify --plan /no/such/file", "/no/such/file"),
        ("verify nowhere.py:x --topology 2@1GB/s --size 8", "no such file"),
        ("bound 2@1GB/s", "--size"),
        ("bound --size 8", "TOPOLOGY"),
        ("simulate ring --topology 2@1GB/s", "--size"),
        ("simulate ring --topology 2@1GB/s --size 8 --latency 5", "'5'"),
        ("simulate ring --topology 2@1GB/s --size 8 --model none", "'none'"),
        ("compile ring --topology 2@1GB/s --size 8", "-o"),
        ("compile ring --topology 2@1GB/s --size 8 -o /no/such/folder/file", "/no/such/folder/file"),
        ("compile ring --topology 2@1GB/s --size 8 -o /tmp", "/tmp"),
        ("compile ring --topology 2@1GB/s --size 8 --format bad -o /tmp/optcc-none", "'bad'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: str, part: str) -> None:
    """The line names the field, and nothing is printed on stdout."""
    assert part in refused(capsys, *words.split())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mistaken", MISTAKEN),
        ("absent", "absent"),
        ("number", "number"),
        ("broken", "over nothing"),
        ("floating", "sections"),
        ("needy", "depth"),
    ],
)
def test_mistakes_of_an_author_are_bad_input(
    capsys: pytest.CaptureFixture[str], author: Path, name: str, part: str
) -> None:
    """Whatever goes wrong in the author's file is exit code 2 and one line, never a traceback nor `refuted`."""
    assert part in refused(capsys, "verify", f"{author}:{name}", "--topology", "2@1GB/s", "--size", "8")


def test_a_file_that_is_no_python(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A syntax error in the author's file."""
    (tmp_path / "no.py").write_text("def (", encoding="utf-8")
    assert "no.py" in refused(capsys, "verify", f"{tmp_path}/no.py:x", "--topology", "2@1GB/s", "--size", "8")


@pytest.mark.parametrize("keep", [0, 1, 100, -2, -1])
def test_a_cut_plan_is_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, keep: int) -> None:
    """A file cut anywhere, at the last line break too."""
    path = tmp_path / "plan"
    assert cli.run(["compile", "ring", *FLAT, "-o", str(path)]) == 0
    capsys.readouterr()
    path.write_bytes(path.read_bytes()[:keep])
    refused(capsys, "verify", "--plan", str(path))
    refused(capsys, "simulate", "--plan", str(path), "--topology", "3@1GB/s")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"size_bytes":', '"size_bytes" :1'),
        ('"reduce"', '"add"'),
        ('"slots":2', '"slots":3'),
        ('"kind":"send"', '"kind":"spend"'),
        ('"src_offset":0', '"src_offset":4'),
        ('"after":[]', '"after":[0]'),
        ('"ranks"', '"Ranks"'),
        ("[", "[["),
    ],
)
def test_a_tampered_plan_is_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str) -> None:
    """One change anywhere, and the file is not what its digest says."""
    path = tmp_path / "plan"
    assert cli.run(["compile", "ring", *FLAT, "-o", str(path)]) == 0
    capsys.readouterr()
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    refused(capsys, "verify", "--plan", str(path))


def test_a_wrong_plan_in_a_sound_file_is_refuted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file is fine, the plan is not: exit code 1 and the property."""
    path = tmp_path / "plan"
    assert cli.run(["compile", "ring", *FLAT, "-o", str(path)]) == 0
    capsys.readouterr()
    draft = Draft.of(read_plan(path.read_bytes()))
    next(row for row in draft.rows if row.after).after.clear()
    path.write_bytes(write_plan(draft.build()))
    answer = done(capsys, "verify", "--plan", str(path), code=1)
    assert answer["counterexample"]["property"] == "races"
    refused(capsys, "verify", "--plan", str(path), "--topology", "4@1GB/s")


def test_a_failed_compile_leaves_the_old_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bad input touches nothing."""
    path = tmp_path / "plan"
    path.write_text("old", encoding="utf-8")
    refused(capsys, "compile", "ring", "--topology", "2@1GB/s", "--size", "7", "-o", str(path))
    assert path.read_text(encoding="utf-8") == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`--help` ends with exit code 0 and shows how to call it."""
    assert cli.run([command, "--help"]) == 0
    assert "optcc " in capsys.readouterr().out


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """`--debug` adds the traceback; the exit code stays."""
    assert cli.run(["verify", "nope", "--topology", "2@1GB/s", "--size", "8", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_main_exits_with_the_code() -> None:
    """`main` leaves with what `run` returns."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(["list", "--json"])
    assert leaving.value.code == 0


def test_a_bound_keeps_its_certificate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Written, replayed, refused once a number is altered, refused as bad input once cut."""
    file = tmp_path / "bound.json"
    where = ("4@50MB/s,3=25MB/s", "--size", "100MB")
    assert done(capsys, "bound", *where, "--achievable", "--certificate", str(file))["gap"] == "0/1"
    told = done(capsys, "replay", str(file), "--topology", where[0])
    assert (told["verdict"], told["seconds_exact"], told["gap"]) == ("proved", "4/1", "0/1")
    text = file.read_text(encoding="utf-8")
    altered = text.replace('"seconds":"4/1"', '"seconds":"3/1"', 1)
    assert altered != text
    file.write_text(altered, encoding="utf-8")
    assert cli.run(["replay", str(file)]) == 1
    file.write_text(text[: len(text) // 2], encoding="utf-8")
    assert cli.run(["replay", str(file)]) == 2


def test_a_bound_for_servers_that_lost_different_rails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No closed form: the linear program answers, certified from both sides."""
    nic = '{ rail = RAIL, rate = "1GB/s", failed = FAILED }'

    def server(lost: int) -> str:
        nics = [nic.replace("RAIL", str(j)).replace("FAILED", str(j == lost).lower()) for j in (0, 1)]
        return f"[[servers]]\nnics = [{', '.join(nics)}]\n"

    file = tmp_path / "rails.toml"
    file.write_text("rail_only = true\n" + "".join(map(server, (-1, -1, 0, 1))), encoding="utf-8")
    answer = done(capsys, "bound", str(file), "--size", "1GB")
    assert (answer["gap"], answer["explanation"]) == ("0/1", None)
    assert answer["seconds_exact"] == answer["achievable_exact"] == "1/1"


def test_the_ratio_on_an_interval_of_slowdowns(capsys: pytest.CaptureFixture[str]) -> None:
    """The least eps is exact: it is proved, a hair less is refuted, and nonsense is bad input."""
    words = ("verify", "optcc", "--topology", "4@1GB/s,3=500MB/s", "--size", "12MiB", "--segments", "8", "--slots", "1")
    ratio = done(capsys, *words, "--slowdown", "1:8")["ratio"]
    assert (ratio["least_eps"], ratio["worst_slowdown"], ratio["verdict"]) == ("23/60", "5/3", None)
    assert done(capsys, *words, "--slowdown", "1:8", "--eps", "23/60")["ratio"]["verdict"] == "proved"
    less = done(capsys, *words, "--slowdown", "1:8", "--eps", "22/60", code=1)
    assert (less["verdict"], less["ratio"]["verdict"]) == ("proved", "refuted")
    for wrong in (("--slowdown", "x"), ("--eps", "x"), ("--slowdown", "1:8", "--eps", "1/0"), ("--slowdown", "8:1")):
        assert cli.run([*words, *wrong]) == 2


def test_numbers_of_a_refuted_schedule_are_never_shown_without_saying_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "loses.py"
    path.write_text(AUTHOR)
    name, file = f"{path}:wrong", str(tmp_path / "out")
    flat = ("--topology", "2@1GB/s", "--size", "8")
    for words in (
        ("simulate", name, *flat),
        ("show", name, *flat),
        ("compile", name, *flat, "-o", file),
        ("simulate", "--plan", file, *flat[:2]),
    ):
        for as_json in ((), ("--json",)):
            assert cli.run([*words, *as_json]) == 1
            said = capsys.readouterr()
            assert (
                said.err.startswith("optcc: wrong: refuted, so it does not run; the ")
                and len(said.err.splitlines()) == 1
            )
            assert not as_json or json.loads(said.out)["verdict"] == "refuted"
    assert cli.run(["simulate", name, *flat, "--as-written", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] is None
    assert cli.run(["simulate", name, *flat, "--as-written"]) == 0
    assert "not judged" in capsys.readouterr().out
    bench = ["bench", "--transport", "loopback", "--topology", "2@1GB/s", "--schedule", name, "-b", "8", "-e", "8"]
    for checked in "01":
        assert cli.run([*bench, "-c", checked]) == 1
        said = capsys.readouterr()
        assert not said.out and said.err.startswith("optcc: wrong: refuted, so it does not run: ")
    assert cli.run([*bench[:6], "ring", *bench[7:], "-c", "0"]) == 0
    assert "# Out of bounds values : N/A" in capsys.readouterr().out


def test_a_name_that_is_almost_right_is_met_with_the_one_it_resembles(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(AUTHOR)
    two = ("--topology", "2@1GB/s", "--size", "1K")
    for words, part in (
        (["benhc"], "No such command 'benhc'; did you mean bench?"),
        (["simulate", "optimall", "--topology", "2@1GB/s", "--size", "1K"], "; did you mean optimal?"),
        (
            ["bench", "--transport", "tpc"],
            "--transport 'tpc': must be one of mpi, tcp, ucx, loopback; did you mean tcp?",
        ),
        (
            ["bench", "-o", "summ"],
            "-o 'summ': must be one of sum, prod, min, max, avg, band, bor, bxor, all; did you mean sum?",
        ),
        (
            ["simulate", "ring", *two, "--reduction", "summ"],
            "--reduction 'summ': must be one of sum, prod, min, max, avg",
        ),
        (["simulate", "ring", *two, "--reduction", "summ"], "; did you mean sum?"),
        (["simulate", "ring", *two, "--dtype", "flot32"], "; did you mean float32?"),
        (["bound", "4xdgx-h10", "--size", "1K"], "; did you mean dgx-h100?"),
        (["bound", "4xDGX-A100,3=7/8", "--size", "1K"], "; did you mean dgx-a100?"),
        (["simulate", f"{own}:wrnog", *two], "has no function wrnog under @schedule; did you mean wrong?"),
    ):
        assert cli.run(words) == 2
        said = capsys.readouterr().err
        assert part in said and len(said.splitlines()) == 1
    assert cli.run(["xyz"]) == 2
    assert capsys.readouterr().err == "optcc: No such command 'xyz'\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("optcc be", {"bench"}),
        ("optcc simulate opti", {"optimal"}),
        ("optcc bench --transport t", {"tcp"}),
        ("optcc bench -o b", {"band", "bor", "bxor"}),
        ("optcc simulate --dtype fl", {"float64", "float32", "float16"}),
        ("optcc simulate --reduction m", {"min", "max"}),
        ("optcc bench --collective all", {"allreduce", "allgather", "alltoall", "alltoallv"}),
    ],
)
def test_the_shell_completes(
    words: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_OPTCC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit):
        cli.run([])
    assert {line.partition(",")[2] for line in capsys.readouterr().out.splitlines()} == offered


@pytest.mark.parametrize("collective", [*COLLECTIVES, "all_gather_perf"])
def test_auto_is_chosen_for_a_collective(collective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", "2"] if collective in ROOTED else []
    asked = ["auto", "--collective", collective, *root, "--topology", "2x2@50GB/s+450GB/s", "--size", "64KiB"]

    def run_json(*words: str) -> Any:
        assert cli.run([*words, *asked, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = run_json("simulate", "--ports", "fair")
    name = collective.replace("all_gather_perf", "allgather")
    made = find_schedule(found["schedule"]).computes(4)
    assert (made.name, found["verdict"]) == (name, PROVED)
    assert 1 <= found["ratio"] < 3
    assert run_json("verify")["verdict"] == PROVED
    assert run_json("show")["verdict"] == PROVED
    file = tmp_path / "auto.plan"
    assert cli.run(["compile", *asked, "--explain", "-o", str(file)]) == 0
    assert found["schedule"] in capsys.readouterr().out
    wanted = read_plan(file.read_bytes()).collective
    assert wanted == Collective(name, 4, 2 if root else 0)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["simulate", "ring", "--collective", "broadcast"], "must be the schedule auto"),
        (["simulate", "ring", "--root", "1"], "must be the schedule auto"),
        (["simulate", "auto", "--collective", "broadcats"], "--collective 'broadcats': must be one of"),
        (["verify", "auto", "--collective", "allgather", "--root", "1"], "--root 1: needs --collective broadcast"),
        (["compile", "auto", "--collective", "reduce", "--root", "4", "-o", "x"], "root 4: must be a rank below 4"),
        (
            ["compile", "auto", "--collective", "reduce", "--pad", "--format", "msccl-xml", "-o", "x"],
            "--pad with --coll",
        ),
        (["show", "auto", "--root", "0"], "--root 0: needs --collective"),
        (["verify", "auto", "--collective", "allgather", "--all-ranks"], "takes the NAME of a schedule"),
    ],
)
def test_a_collective_that_cannot_be_asked_for_is_refused(
    words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, "--topology", "4@1GB/s", "--size", "64KiB"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert rule in err


@pytest.mark.parametrize(
    ("name", "certificate"),
    [("packed", "packing of 2 pairs of trees"), ("packed-broadcast", "packing of 2 trees"), ("flow-gather", "flow")],
)
def test_a_schedule_says_which_part_of_a_certificate_it_is_made_from(
    name: str, certificate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [name, "--topology", "2x2@50GB/s+450GB/s", "--size", "64KiB", "--segments", "4"]
    for words in (["simulate", *asked], ["compile", *asked, "-o", str(tmp_path / "a.plan")]):
        assert cli.run([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["certificate"] == certificate
        assert cli.run(words) == 0
        assert f"\nmade from the {certificate} in the certificate of its bound" in capsys.readouterr().out
        assert cli.run([*words[:1], "ring", *words[2:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["certificate"] is None
