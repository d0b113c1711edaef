"""What records say: which transfer went wrong, which rank a NaN comes from, and how the numbers are distributed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.collective import FLOATS
from optcc.errors import InputError
from optcc.plan import Plan
from optcc.runtime.stored_types import stored_dtype
from optcc.runtime.taps.condense import condense, value_of
from optcc.runtime.taps.policy import ARRIVED, FULL, GUARD, INPUT, NORMS, OUTPUT, RESULT, SENT
from optcc.runtime.taps.records import ChunkRecord
from optcc.runtime.taps.stages import stage_ranks, stage_values

_CAUSES = {
    SENT: "rank {src} sends something else than it had computed",
    ARRIVED: "it was changed on its way from rank {src} to rank {dst}",
    RESULT: "rank {rank} has computed it wrongly",
    INPUT: "the input of rank {rank} is another one",
    OUTPUT: "rank {rank} has copied or divided it wrongly",
}
Run = tuple[int, int]
"""Number of the plan among the plans of its ranks, and of the run."""


class WrongChunk(NamedTuple):
    """A record that is not what the interpreter has at that stage: `element` is the first that differs, where the
    bytes themselves were taken, or -1."""

    record: ChunkRecord
    element: int
    text: str


class StageCheck(NamedTuple):
    """What comparing the records of a run with the interpreter gave: how many were compared, and those that differ,
    what came first before what follows from it."""

    run: Run
    n_compared: int
    wrong: tuple[WrongChunk, ...]


class NanOrigin(NamedTuple):
    """Where what is not finite in a run comes from: the ranks, one if the records suffice, whose contribution it is;
    none if a reduction of finite numbers has made it."""

    run: Run
    ranks: tuple[int, ...]
    record: ChunkRecord
    text: str


class RunStatistics(NamedTuple):
    """The norms of all chunks of a run that one rank had at one point, such as the gradients of a training step:
    how many, their Euclidean norm, extremes, and how many are not finite."""

    run: Run
    rank: int
    point: str
    n: int
    l2: float
    least: float
    largest: float
    n_not_finite: int


def by_run(records: Iterable[ChunkRecord], plan: Plan) -> dict[Run, list[ChunkRecord]]:
    """The records of each run of a plan, in their order."""
    found: dict[Run, list[ChunkRecord]] = defaultdict(list)
    for record in records:
        if record.digest == plan.digest:
            found[record.plan_number, record.run].append(record)
    return dict(sorted(found.items()))


def check_stages(
    plan: Plan,
    records: Iterable[ChunkRecord],
    inputs: Mapping[int, npt.NDArray[Any]] | None = None,
    *,
    ranks: Sequence[int] | None = None,
) -> list[StageCheck]:
    """Compares the records of each run with what the interpreter computes from the inputs: those given, by rank, or
    else those that were taken in full.

    `ranks` are the job's, by rank of the plan. Raises InputError if an input is neither given nor taken.
    """
    checks = []
    for run, found in by_run(records, plan).items():
        taken: dict[tuple[int, str, int], list[ChunkRecord]] = defaultdict(list)
        for record in found:
            taken[record.rank, record.point, record.transfer].append(record)
        known = _inputs(plan, found, inputs, ranks)
        wrong: list[WrongChunk] = []
        n_compared = 0
        for stage in stage_values(plan, known):
            rank = stage.rank if ranks is None else ranks[stage.rank]
            for record in taken.pop((rank, stage.point, stage.transfer), ()):
                n_compared += 1
                if record.data != condense(record.what, stage.data, record.dtype, record.stride):
                    wrong.append(_wrong(plan, record, stage.data))
        if taken:
            key = next(iter(taken))
            raise InputError(f"record of rank {key[0]}, {key[1]} of transfer {key[2]}: must be one of plan {plan.name}")
        checks.append(StageCheck(run, n_compared, tuple(wrong)))
    return checks


def _inputs(
    plan: Plan,
    records: list[ChunkRecord],
    given: Mapping[int, npt.NDArray[Any]] | None,
    ranks: Sequence[int] | None,
) -> dict[int, npt.NDArray[np.uint8]]:
    if given is not None:
        return {rank: np.ascontiguousarray(each).reshape(-1).view(np.uint8) for rank, each in given.items()}
    full = {r.rank: np.frombuffer(r.data, dtype=np.uint8) for r in records if (r.point, r.what) == (INPUT, FULL)}
    known = {}
    for rank in range(plan.n_ranks):
        at = rank if ranks is None else ranks[rank]
        if at in full:
            known[rank] = full[at]
        elif plan.collective.before(rank, plan.size_bytes):
            raise InputError(f"input of rank {at}: must be given, or taken: full points=input")
    return known


def _wrong(plan: Plan, record: ChunkRecord, wanted: npt.NDArray[np.uint8]) -> WrongChunk:
    element, detail = -1, ""
    if record.what == FULL:
        kind = stored_dtype(record.dtype)
        got, must = np.frombuffer(record.data, dtype=kind), wanted.view(kind)
        bits = np.dtype(f"u{kind.itemsize}")
        element = int((got.view(bits) != must.view(bits)).argmax())
        detail = f": element {element} is {got[element]}, must be {must[element]}"
    cause = _CAUSES[record.point].format(src=record.src, dst=record.dst, rank=record.rank)
    where = f"transfer {plan.transfers.describe(record.transfer)}" if record.transfer >= 0 else record.point
    return WrongChunk(record, element, f"run {record.run} of plan {record.plan_number}, {where}: {cause}{detail}")


def trace_nans(plan: Plan, records: Iterable[ChunkRecord], *, ranks: Sequence[int] | None = None) -> list[NanOrigin]:
    """Which rank contributed what is NaN or infinite, from records of the guard, norms or bytes of transfers.

    A sum is finite only if all that was added to it is: every finite chunk clears those whose contributions it holds.
    Whoever is left of the contributors to one that is not is its origin. That a reduction of finite numbers has made an
    infinite one is seen where the inputs were taken too. `ranks` are the job's, by rank of the plan.
    """
    if plan.transfers.dtype not in FLOATS or not plan.collective.reduces:
        return []
    known = {(each.rank, each.point, each.transfer): each for each in stage_ranks(plan)}
    rank_of = {rank if ranks is None else ranks[rank]: rank for rank in range(plan.n_ranks)}
    origins: list[NanOrigin] = []
    for run, found in by_run(records, plan).items():
        bad: list[ChunkRecord] = []
        cleared: dict[int, int] = defaultdict(int)
        finite_inputs = 0
        for record in found:
            n_wrong = _n_not_finite(record)
            if n_wrong is None or record.transfer < 0:
                if n_wrong == 0 and record.point == INPUT:
                    finite_inputs |= 1 << rank_of[record.rank]
                continue
            if n_wrong:
                bad.append(record)
                continue
            stage = known[rank_of[record.rank], record.point, record.transfer]
            for start, _, contributors in stage.contributors:
                cleared[start] |= contributors
        origins += _origins(run, bad, known, rank_of, cleared, finite_inputs)
    return origins


def _n_not_finite(record: ChunkRecord) -> int | None:
    """How many elements are not; None if the record does not say."""
    if record.what == FULL:
        guard = value_of(GUARD, condense(GUARD, np.frombuffer(record.data, np.uint8), record.dtype, 1), record.dtype)
        return int(guard.n_nan + guard.n_inf)
    if record.what in (GUARD, NORMS):
        return int(record.value.n_nan + record.value.n_inf)
    return None


def _origins(
    run: Run,
    bad: list[ChunkRecord],
    known: Mapping[Any, Any],
    rank_of: Mapping[int, int],
    cleared: Mapping[int, int],
    finite_inputs: int,
) -> list[NanOrigin]:
    """The smallest sets of ranks that explain every chunk that is not finite."""
    job_rank = {own: rank for rank, own in rank_of.items()}
    suspects = []
    for record in bad:
        stage = known[rank_of[record.rank], record.point, record.transfer]
        left = everyone = 0
        for start, _, contributors in stage.contributors:
            left |= contributors & ~cleared[start] & ~finite_inputs
            everyone |= contributors
        suspects.append((left.bit_count(), everyone.bit_count(), record.at_s, record, left))
    origins: list[NanOrigin] = []
    named = 0
    for count, _, _, record, left in sorted(suspects, key=lambda each: each[:3]):
        if left & named or (not count and origins):
            continue
        named |= left
        ranks = tuple(job_rank[rank] for rank in range(left.bit_length()) if left >> rank & 1)
        who = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else ""
        cause = f"comes from {who}" if who else f"was made by the reduction at rank {record.rank} of finite numbers"
        at = f"stage {record.stage!r}, bytes {record.start}..{record.stop - 1}"
        text = f"run {run[1]} of plan {run[0]}, {at}: what is not finite {cause}"
        origins.append(NanOrigin(run, ranks, record, text))
    return origins


def statistics(records: Iterable[ChunkRecord]) -> list[RunStatistics]:
    """The norms that were taken, put together by run, rank and point."""
    rows: dict[tuple[Run, int, str], list[Any]] = defaultdict(list)
    for record in records:
        if record.what == NORMS:
            rows[(record.plan_number, record.run), record.rank, record.point].append(record.value)
    return [
        RunStatistics(
            *key,
            sum(each.n for each in values),
            float(sum(each.square_sum for each in values)) ** 0.5,
            min(each.least for each in values),
            max(each.largest for each in values),
            sum(each.n_nan + each.n_inf for each in values),
        )
        for key, values in sorted(rows.items())
    ]
