"""The smallest case in which a schedule still fails: fewest ranks, then fewest segments, then fewest bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from optcc.errors import OptccError
from optcc.plan import Plan
from optcc.topology import Topology
from optcc.verdict import Counterexample, Verdict

TRANSFERS_MAX = 200_000
"""Limit on the transfers of all plans tried together: about two seconds of compilation and verification."""
ELEMENTS = (1, 2, 3)
"""Sizes to try, in elements per section: first one element, then enough for sections to be split."""

Make = Callable[[Topology, int, int], tuple[Plan, Verdict]]
"""Compiles and judges a case: (topology, segments, bytes) to a plan and its verdict."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """A case that is refuted by the same property; with fewer ranks, segments or bytes none was found."""

    topology: Topology
    segments: int
    size_bytes: int
    counterexample: Counterexample

    def __str__(self) -> str:
        ranks = f"{self.topology.n_ranks} rank" + "s" * (self.topology.n_ranks > 1)
        segments = f"{self.segments} segment" + "s" * (self.segments > 1)
        return f"smallest case that fails: {ranks}, {segments}, {self.size_bytes} B"

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "ranks": self.topology.n_ranks,
            "segments": self.segments,
            "size_bytes": self.size_bytes,
            "counterexample": self.counterexample.as_json(),
        }


def shrink(
    make: Make, found: Counterexample, topology: Topology, segments: int, size_bytes: int, itemsize: int
) -> Smallest:
    """The smallest case that `make` refutes by the same property as `found`, the counterexample of the given case.

    The servers tried are the first ones of `topology`, and the slowest one with the first others. Cases that the
    schedule does not accept are skipped. The search ends after `TRANSFERS_MAX` transfers.
    """
    smallest = Smallest(topology, segments, size_bytes, found)
    budget = TRANSFERS_MAX
    for case in _cases(topology, segments, size_bytes, itemsize):
        if budget < 0:
            break
        try:
            plan, verdict = make(*case)
        except OptccError:
            continue
        budget -= len(plan)
        if verdict.counterexample is not None and verdict.counterexample.property == found.property:
            return Smallest(*case, verdict.counterexample)
    return smallest


def _cases(topology: Topology, segments: int, size_bytes: int, itemsize: int) -> Iterator[tuple[Topology, int, int]]:
    """Every smaller case, the smallest first."""
    for servers in range(1, len(topology.servers) + 1):
        smaller = _parts(topology, servers)
        for count in _few(segments):
            for part in smaller:
                for elements in ELEMENTS:
                    size = elements * part.n_ranks * count * itemsize
                    if size < size_bytes:
                        yield part, count, size
                if size_bytes and (servers, count) < (len(topology.servers), segments):
                    yield part, count, size_bytes


def _few(segments: int) -> list[int]:
    return [count for count in (1, 2, 3, 4, 8, 16, 32) if count < segments] + [segments]


def _parts(topology: Topology, servers: int) -> list[Topology]:
    """`servers` of the servers: the first ones, and the slowest with the first ones of the others."""
    everyone = range(len(topology.servers))
    slowest = min(everyone, key=lambda each: (min(topology.out[each], topology.in_[each]), each))
    others = [each for each in everyone if each != slowest]
    choices = {tuple(range(servers)), tuple(sorted([slowest, *others[: servers - 1]]))}
    return [
        replace(topology, servers=tuple(topology.servers[each] for each in choice), text="")
        for choice in sorted(choices)
    ]
