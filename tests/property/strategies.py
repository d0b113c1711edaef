"""Schedules as authors might write them, drawn at random; and what they mean, by running them one by one in numpy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from optcc.dsl import Definition, Program, schedule
from optcc.schedule import DATA, REDUCE, Layout, Schedule

Buffer = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trees:
    """A random AllReduce over trees: `sections` sections, their trees drawn from `seed`.

    With `scratch`, some reductions go through a scratch slot of the parent and a local operation there; a rank keeps
    a copy that nobody needs. With `mixed`, the sections' steps are shuffled together.
    """

    seed: int
    n_ranks: int
    sections: int
    segments: int
    scratch: bool
    mixed: bool
    two_pipelines: bool = False

    def definition(self) -> Definition:
        """The schedule function."""
        choice = self

        @schedule
        def trees(program: Program) -> None:
            rng = random.Random(choice.seed)
            shares = [Fraction(1, 3), Fraction(2, 3)] if choice.two_pipelines else [Fraction(1)]
            for share in shares:
                for segment in program.pipeline(sections=choice.sections, share=share, scratch=2):
                    steps: list[list[tuple[str, int, int, int]]] = []
                    for section in range(choice.sections):
                        ups = random_tree(rng, choice.n_ranks)
                        root = ups[-1][1] if ups else 0
                        downs = [(parent, child) for child, parent in reversed(random_tree(rng, choice.n_ranks, root))]
                        own: list[tuple[str, int, int, int]] = []
                        for src, dst in ups:
                            kind = "scratch" if choice.scratch and rng.random() < 0.4 else "reduce"
                            own.append((kind, src, dst, section))
                        own += [("copy", src, dst, section) for src, dst in downs]
                        if choice.scratch:
                            at = rng.randrange(len(own) + 1)
                            own.insert(at, ("keep", rng.randrange(choice.n_ranks), 0, section))
                        steps.append(own)
                    for kind, src, dst, section in merged(rng, steps, choice.mixed):
                        if kind == "reduce":
                            segment[section].reduce(src=src, dst=dst)
                        elif kind == "copy":
                            segment[section].copy(src=src, dst=dst)
                        elif kind == "keep":
                            segment[section].copy(src=src, dst=src, into=segment.scratch(section, 1))
                        else:
                            segment[section].copy(src=src, dst=dst, into=segment.scratch(section))
                            segment.scratch(section).reduce(src=dst, dst=dst, into=segment[section])

        return trees

    def build(self) -> Schedule:
        """The schedule."""
        return self.definition()(n_ranks=self.n_ranks, segments=self.segments)


def random_tree(rng: random.Random, n_ranks: int, root: int | None = None) -> list[tuple[int, int]]:
    """(child, parent) edges of a random tree, children before their parents; the last parent is the root."""
    ranks = list(range(n_ranks))
    rng.shuffle(ranks)
    if root is not None:
        ranks.remove(root)
        ranks.insert(0, root)
    shape = rng.choice(("any", "path", "star"))
    edges = []
    for position, rank in enumerate(ranks[1:], start=1):
        parent = {"any": rng.randrange(position), "path": position - 1, "star": 0}[shape]
        edges.append((rank, ranks[parent]))
    return edges[::-1]


def merged(
    rng: random.Random, steps: list[list[tuple[str, int, int, int]]], mixed: bool
) -> list[tuple[str, int, int, int]]:
    """The steps of all sections in one sequence, each section's in its own order."""
    if not mixed:
        return [step for own in steps for step in own]
    rest = [list(own) for own in steps if own]
    result = []
    while rest:
        own = rng.choice(rest)
        result.append(own.pop(0))
        rest = [each for each in rest if each]
    return result


def interpret(program: Schedule, count: int, seed: int) -> tuple[list[Buffer], list[Buffer]]:
    """(inputs, outputs) of every rank, running the transfers of `program` one by one, as they stand."""
    rng = np.random.default_rng(seed)
    layout = Layout.of(program.segments, 8 * count, "int64")
    inputs = [rng.integers(-(10**6), 10**6, size=count, dtype=np.int64) for _ in range(program.n_ranks)]
    held = [np.zeros((program.scratch_slots + 1, count), dtype=np.int64) for _ in inputs]
    for buffer, own in zip(held, inputs, strict=True):
        buffer[0] = own
    columns = (
        program.src,
        program.dst,
        program.op,
        program.segment,
        program.section,
        program.src_slot,
        program.dst_slot,
    )
    for src, dst, op, segment, section, src_slot, dst_slot in zip(*(each.tolist() for each in columns), strict=True):
        at = slice(layout.first[segment][section], layout.stop[segment][section])
        value = held[src][src_slot - DATA, at].copy()
        if op == REDUCE:
            held[dst][dst_slot - DATA, at] += value
        else:
            held[dst][dst_slot - DATA, at] = value
    return inputs, [buffer[0] for buffer in held]


def tree_schedules(ranks_max: int = 6) -> st.SearchStrategy[Trees]:
    """Random tree schedules."""
    return st.builds(
        Trees,
        seed=st.integers(0, 2**32 - 1),
        n_ranks=st.integers(1, ranks_max),
        sections=st.integers(1, 5),
        segments=st.integers(1, 4),
        scratch=st.booleans(),
        mixed=st.booleans(),
        two_pipelines=st.booleans(),
    )
