"""Authors' mistakes, each refused at the line that makes it; and the structure of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from optcc.collective import Collective
from optcc.dsl import Chunk, Definition, Program, Segment, schedule
from optcc.errors import InputError, OptccError, ScheduleError, TopologyError
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology

HERE = Path(__file__).name


def only(program: Program, sections: int = 2, scratch: int = 1) -> Segment:
    """The first segment of a pipeline."""
    return next(program.pipeline(sections=sections, scratch=scratch))


def unknown_src(program: Program) -> None:
    only(program)[0].reduce(src=3, dst=0)  # wrong


def unknown_dst(program: Program) -> None:
    only(program)[0].copy(src=0, dst=-1)  # wrong


def rank_of_another_type(program: Program) -> None:
    only(program)[0].copy(src=0, dst="1")  # type: ignore[arg-type]  # wrong


def self_transfer(program: Program) -> None:
    only(program)[0].reduce(src=1, dst=1)  # wrong


def self_transfer_in_scratch(program: Program) -> None:
    segment = only(program)
    segment[0].copy(src=0, dst=0, into=segment.scratch(0))
    segment.scratch(0).copy(src=0, dst=0, into=segment.scratch(0))  # wrong


def section_out_of_range(program: Program) -> None:
    segment = only(program)
    segment[1].reduce(src=0, dst=1)
    segment[2].reduce(src=0, dst=1)  # wrong


def negative_section(program: Program) -> None:
    only(program)[-1].reduce(src=0, dst=1)  # wrong


def scratch_out_of_range(program: Program) -> None:
    only(program).scratch(0, 1)  # wrong


def scratch_section_out_of_range(program: Program) -> None:
    only(program).scratch(2)  # wrong


def scratch_never_written(program: Program) -> None:
    segment = only(program)
    segment[0].copy(src=0, dst=1, into=segment.scratch(0))
    segment.scratch(0).reduce(src=2, dst=0, into=segment[0])  # wrong: rank 1 has it, rank 2 has not


def scratch_of_another_segment(program: Program) -> None:
    one, two = program.pipeline(2, sections=1, scratch=1)
    one[0].copy(src=0, dst=1, into=one.scratch(0))
    two.scratch(0).copy(src=1, dst=0, into=two[0])  # wrong


def reduce_into_nothing(program: Program) -> None:
    segment = only(program)
    segment[0].reduce(src=0, dst=1, into=segment.scratch(0))  # wrong


def into_another_section(program: Program) -> None:
    segment = only(program)
    segment[0].copy(src=0, dst=1, into=segment[1])  # wrong


def stage_in_stage(program: Program) -> None:
    with program.stage("outer"):
        only(program)[0].reduce(src=0, dst=1)
        with program.stage("inner"):  # wrong
            pass


def no_sections(program: Program) -> None:
    program.pipeline(sections=0)  # wrong


def no_segments(program: Program) -> None:
    program.pipeline(0, sections=1)  # wrong


def share_above_one(program: Program) -> None:
    program.pipeline(sections=1, share=Fraction(3, 2))  # wrong


def negative_scratch(program: Program) -> None:
    program.pipeline(sections=1, scratch=-1)  # wrong


def in_a_helper(program: Program) -> None:
    def helper(chunk: Chunk) -> None:
        chunk.reduce(src=0, dst=7)  # wrong

    helper(only(program)[0])


def into_a_chunk_of_another_program(program: Program) -> None:
    other = only(Program("other", Collective("allreduce", 3), 1))
    only(program)[0].copy(src=0, dst=1, into=other[0])  # wrong


MISTAKES: tuple[Callable[[Program], None], ...] = (
    *(unknown_src, unknown_dst, rank_of_another_type, self_transfer, self_transfer_in_scratch, section_out_of_range),
    *(negative_section, scratch_out_of_range, scratch_section_out_of_range, scratch_never_written),
    *(scratch_of_another_segment, reduce_into_nothing, into_another_section, stage_in_stage, no_sections, no_segments),
    *(share_above_one, negative_scratch, in_a_helper, into_a_chunk_of_another_program),
)


@pytest.mark.parametrize("function", MISTAKES, ids=lambda function: str(function.__name__))
def test_mistakes_are_refused_at_their_line(function: Callable[[Program], None]) -> None:
    """The message starts with the file and the line of the mistake."""
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "# wrong" in text)
    with pytest.raises(ScheduleError) as refusal:
        schedule(function)(n_ranks=3, segments=1)
    assert str(refusal.value).startswith(f"{HERE}:{line}: ")


def test_a_chunk_of_a_finished_program_is_refused() -> None:
    """A chunk kept from an earlier call must not swallow transfers."""
    kept: list[Chunk] = []

    @schedule
    def leaky(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            kept.append(segment[0])
            kept[0].reduce(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    assert len(leaky(n_ranks=2)) == 2
    with pytest.raises(ScheduleError, match=f"{HERE}:"):
        leaky(n_ranks=2)


@pytest.mark.parametrize("shares", [[Fraction(1, 2)], [Fraction(1, 2), Fraction(2, 3)], [1, 1]])
def test_shares_must_add_up(shares: list[Fraction | int]) -> None:
    """Pipelines that leave out a part of the message, or claim too much of it."""

    @schedule
    def parts(program: Program) -> None:
        for share in shares:
            for segment in program.pipeline(sections=1, share=share):
                segment[0].reduce(src=0, dst=1)

    with pytest.raises(ScheduleError, match=str(sum(shares))):
        parts(n_ranks=2)


def test_a_stage_ends_with_its_mistake() -> None:
    """After an exception inside a stage the next stage may begin."""
    program = Program("x", Collective("allreduce", 2))
    with pytest.raises(ZeroDivisionError), program.stage("one"):
        raise ZeroDivisionError
    with program.stage("two"):
        only(program)[0].reduce(src=0, dst=1)
    assert program.finish().stages == ("one", "two")


def test_transfers_keep_order_line_and_stage() -> None:
    """What is written down is what comes out."""

    @schedule
    def pair(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            with program.stage("there"):
                segment[0].reduce(src=1, dst=0)
            with program.stage("back"):
                segment[0].copy(src=0, dst=1)

    built = pair(n_ranks=2, segments=3)
    assert [str(each) for each in built] == [
        text for s in range(3) for text in (f"1->0 s{s} c0 reduce [there]", f"0->1 s{s} c0 copy [back]")
    ]
    lines, first = inspect.getsourcelines(pair.function)
    assert {each.line for each in built} == {first + i for i, text in enumerate(lines) if "segment[0]." in text}
    assert pair.name == "pair"
    assert pair.collective == "allreduce"


def test_ranks_that_cannot_be() -> None:
    """No ranks, an unknown collective."""
    with pytest.raises(InputError):
        SCHEDULES["ring"](n_ranks=0)
    with pytest.raises(InputError):
        schedule(collective="gossip")(lambda _: None)(n_ranks=2)


@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("p", range(1, 8))
def test_ring_structure(p: int, segments: int) -> None:
    """2p(p - 1) transfers a segment, neighbours only, every link equally often, every chunk reduced then copied."""
    built = SCHEDULES["ring"](n_ranks=p, segments=segments)
    rows = list(built)
    assert len(rows) == 2 * p * (p - 1) * segments
    assert all(each.dst == (each.src + 1) % p for each in rows)
    for s in range(segments):
        for c in range(p):
            ops = [each.op for each in rows if (each.segment, each.section) == (s, c)]
            assert ops == ["reduce"] * (p - 1) + ["copy"] * (p - 1)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("p", range(2, 8))
def test_optcc_structure(p: int, segments: int) -> None:
    """Per section: q reductions and q copies, two of them through the straggler; the patterns alternate."""
    for straggler in {0, p // 2, p - 1}:
        built = SCHEDULES["optcc"](n_ranks=p, segments=segments, stragglers=(straggler,))
        q = p - 1
        assert built.stages == tuple(sorted(built.stages, key=lambda name: built.stages.index(name)))
        for s, shape in enumerate(built.segments):
            assert shape.sections == q
            assert shape.share == Fraction(1, segments)
            for c in range(q):
                own = [each for each in built if (each.segment, each.section) == (s, c)]
                assert [each.op for each in own].count("reduce") == q
                assert [each.op for each in own].count("copy") == q
                touching = [each for each in own if straggler in (each.src, each.dst)]
                if s % 2 == 0:
                    assert [(each.dst, each.op) == (straggler, "reduce") for each in touching] == [True, False]
                else:
                    assert (touching[0].src, touching[0].op) == (straggler, "reduce")
                    assert (touching[-1].dst, touching[-1].op) == (straggler, "copy")
                    assert len(touching) == 2


@pytest.mark.parametrize(
    ("text", "straggler"),
    [("4@50GB/s", 3), ("4@50GB/s,1=25GB/s", 1), ("4@50GB/s,0=25GB/s:50GB/s", 0), ("3@50GB/s,2=50GB/s:10GB/s", 2)],
)
def test_optcc_finds_the_straggler(text: str, straggler: int) -> None:
    """The slowest endpoint either way; the last one when all are equal."""
    assert SCHEDULES["optcc"].configure(Topology.parse(text)) == {"stragglers": (straggler,), "gpus": 1}


@pytest.mark.parametrize("text", ["3@50GB/s,1=25GB/s,2=10GB/s", "4@50GB/s,1=60GB/s"])
def test_optcc_refuses_what_it_does_not_accept(text: str) -> None:
    """Several stragglers beside a single healthy rank; the message says what is accepted."""
    with pytest.raises(TopologyError, match="schedule optcc accepts"):
        SCHEDULES["optcc"].build(Topology.parse(text))


def test_every_schedule_says_what_it_is() -> None:
    """The library is its own manual."""
    for name, definition in SCHEDULES.items():
        assert isinstance(definition, Definition)
        assert definition.name == name
        assert definition.summary
        assert definition.accepts
        assert definition.paper


@pytest.mark.parametrize("parameters", [{"stragglers": (4,)}, {"stragglers": (-1,)}])
def test_a_straggler_that_is_no_rank(parameters: dict[str, Any]) -> None:
    """Called directly with a rank that does not exist, a schedule is refused, not built without a straggler."""
    with pytest.raises(OptccError):
        SCHEDULES["optcc"](n_ranks=4, segments=2, **parameters)
