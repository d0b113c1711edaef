"""StragglAR: rounds in which no port is used twice, their number, and the schedule that is made of them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.schedules.stragglar import stragglar, stragglar_rounds
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

ONE_MORE = (6, 12)
"""Those p up to 33 for which a round more is needed than the lower bound."""


def fewest(p: int) -> int:
    """p - 2 + ceil(log2 p), the lower bound; 0 for one rank."""
    return p - 2 + (p - 1).bit_length() if p > 1 else 0


@pytest.mark.parametrize("exponent", [1, 2, 3, 4, 5, 6])
def test_powers_of_two_take_the_papers_rounds(exponent: int) -> None:
    p = 2**exponent
    assert len(stragglar_rounds(p)) == p + exponent - 2


@pytest.mark.parametrize("p", range(1, 34))
def test_rounds_are_fewest_or_one_more(p: int) -> None:
    assert len(stragglar_rounds(p)) == fewest(p) + (p in ONE_MORE)


@pytest.mark.parametrize("p", [*range(1, 18), 32, 33])
def test_a_round_uses_every_port_once_and_sends_only_what_is_there(p: int) -> None:
    """At the end every rank has had every section exactly once."""
    late = p - 1
    holders: dict[int, set[int]] = {}
    for owner, copies in stragglar_rounds(p):
        sending = [src for _, src, _ in copies]
        receiving = [dst for _, _, dst in copies]
        if owner is not None:
            sending += [owner, late]
            receiving += [owner, late]
        assert len(set(sending)) == len(sending)
        assert len(set(receiving)) == len(receiving)
        assert all(src in holders[section] and dst not in holders[section] for section, src, dst in copies)
        for section, _, dst in copies:
            holders[section].add(dst)
        if owner is not None:
            assert owner not in holders
            holders[owner] = {owner, late}
    assert holders == {section: set(range(p)) for section in range(p - 1)}


def test_rounds_of_nobody_are_refused() -> None:
    with pytest.raises(ScheduleError, match="0 ranks: must be at least one"):
        stragglar_rounds(0)


@pytest.mark.parametrize("p", [*range(1, 10), 13, 16])
def test_stragglar_is_proved(p: int) -> None:
    """Any late rank, any size: none, one element, a prime, ragged, more than enough."""
    for count in (0, 1, 13, 210) if p < 10 else (97,):
        for late in {0, p // 2, p - 1}:
            plan = compile_schedule(stragglar(n_ranks=p, segments=1 + count % 2, straggler=late), size_bytes=4 * count)
            verdict = verify_plan(plan)
            assert verdict.verdict == PROVED, verdict.counterexample


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_every_section_is_exchanged_once_and_spread_to_all_others(p: int) -> None:
    built = stragglar(n_ranks=p, straggler=0)
    stages = [each.stage for each in built]
    q = p - 1
    assert stages.count("1 reduce-scatter") == q * (q - 1)
    assert stages.count("2 exchange") == 4 * q
    assert stages.count("3 spread") == q * (q - 1)
    assert [shape.sections for shape in built.segments] == [q]
    assert not any(0 in (each.src, each.dst) for each in built if each.stage == "1 reduce-scatter")
    assert not any(each.dst == 0 for each in built if each.stage == "3 spread")


@pytest.mark.parametrize("p", [4, 8, 16])
def test_it_takes_about_a_reduce_scatter_and_the_rounds(p: int) -> None:
    """If nobody is late after all: p - 2 and then the paper's rounds, in the written order, of 100 bytes at 1 B/s."""
    plan = compile_schedule(stragglar(n_ranks=p, straggler=p - 1), size_bytes=100 * (p - 1))
    rounds = simulate(plan, Topology.parse(f"{p}@1B/s"), model="fifo").seconds / 100
    assert fewest(p) < rounds < 1.2 * (p - 2 + fewest(p))


@pytest.mark.parametrize(
    ("text", "late"), [("4@50MB/s", 3), ("4@50MB/s,1=25MB/s", 1), ("1@50MB/s", 0), ("3@50MB/s,0=50MB/s:1MB/s", 0)]
)
def test_the_slowest_is_taken_to_be_late(text: str, late: int) -> None:
    assert stragglar.configure(Topology.parse(text)) == {"straggler": late}


@pytest.mark.parametrize("text", ["4@50MB/s,1=25MB/s,2=10MB/s", "2x2@50MB/s"])
def test_several_stragglers_and_several_gpus_are_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="schedule stragglar accepts endpoints of one rate"):
        stragglar.build(Topology.parse(text))


@pytest.mark.parametrize("straggler", [-1, 4])
def test_a_straggler_that_is_no_rank_is_refused(straggler: int) -> None:
    with pytest.raises(ScheduleError, match=f"straggler {straggler}: must be a rank from 0 to 3"):
        stragglar(n_ranks=4, straggler=straggler)


def test_segments_share_the_message_equally() -> None:
    built = stragglar(n_ranks=4, segments=3, straggler=2)
    assert [shape.share for shape in built.segments] == [Fraction(1, 3)] * 3
    assert len(built) == 3 * len(stragglar(n_ranks=4, straggler=2))
