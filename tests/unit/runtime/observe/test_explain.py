"""`explain` names the culprit of planted failures, in simulated time: what the dumps of all ranks show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from optcc.errors import InputError
from optcc.runtime.communicator import Communicator
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.observe.dump import GONE, STOPPED, FlightDump
from optcc.runtime.observe.explain import explain
from optcc.runtime.observe.page import EventRecord
from optcc.runtime.observe.recorder import KnownPlan
from optcc.runtime.observe.status import (
    FailureStatus,
    Note,
    RailStatus,
    RankIdentity,
    RankStatus,
    RunningRun,
    WaitedFor,
)
from optcc.runtime.transports.sim import SimTransport
from tests.sample import sampled
from tests.unit.runtime.observe.observed_ranks import N_RANKS, Failure, Program, fly

CULPRIT = 2
SIZE = 100_000
"""Floats of a collective: long enough for its messages to be recorded one by one."""


def reduce(comm: Communicator, times: int = 3, size: int = SIZE, op: str = "sum", dtype: Any = np.float32) -> None:
    for _ in range(times):
        comm.all_reduce(np.ones(size, dtype), op)


def well(comm: Communicator, transport: SimTransport) -> None:
    reduce(comm, 6)


def instead(act: Callable[[Communicator, SimTransport], None], before: int = 3, after: int = 3) -> Program:
    """Collectives at every rank, between which the culprit does something else."""

    def program(comm: Communicator, transport: SimTransport) -> None:
        reduce(comm, before)
        if comm.rank == CULPRIT:
            act(comm, transport)
        reduce(comm, after)

    return program


def fail(comm: Communicator, transport: SimTransport) -> None:
    raise Failure("the loss is not a number")


def interrupt(comm: Communicator, transport: SimTransport) -> None:
    raise KeyboardInterrupt


def first(act: Callable[[Communicator], Any]) -> Program:
    """The first collective of the culprit is another one."""

    def program(comm: Communicator, transport: SimTransport) -> None:
        if comm.rank == CULPRIT:
            act(comm)
        else:
            reduce(comm, 1)

    return program


def leaves(comm: Communicator, transport: SimTransport) -> None:
    reduce(comm, 3 if comm.rank == CULPRIT else 6)


def swapped(comm: Communicator, transport: SimTransport) -> None:
    """Two collectives that were made ready by all are begun in another order by one rank."""
    arrays = np.ones(SIZE, np.float32), np.ones(2 * SIZE, np.float32)
    plans = [comm.all_reduce_init(each) for each in arrays]
    if comm.rank == CULPRIT:
        plans.reverse()
    for plan in plans:
        plan.start().wait()


def circle(comm: Communicator, transport: SimTransport) -> None:
    """Every rank receives from the one before it before it sends."""
    got = np.zeros(8, np.float32)
    comm.recv(got, (comm.rank - 1) % comm.n_ranks)
    comm.send(got, (comm.rank + 1) % comm.n_ranks)


def unequal_messages(comm: Communicator, transport: SimTransport) -> None:
    if comm.rank == 1:
        comm.send(np.ones(4, np.float32), CULPRIT)
    if comm.rank == CULPRIT:
        comm.recv(np.zeros(5, np.float32), 1)
    comm.barrier()


def skips(comm: Communicator, transport: SimTransport) -> None:
    reduce(comm, 2 if comm.rank == CULPRIT else 3)
    if comm.rank == CULPRIT:
        transport.clock.sleep_s(10.0)


def naps(seconds: float) -> Program:
    """The culprit comes late to every collective."""

    def program(comm: Communicator, transport: SimTransport) -> None:
        for _ in range(6):
            if comm.rank == CULPRIT:
                transport.clock.sleep_s(seconds)
            reduce(comm, 1)

    return program


class SlowKernels(NumpyKernels):
    """Those of a processor that computes for 2 ms where others compute at once."""

    def __init__(self, transport: SimTransport, dtype: str, reduction: str) -> None:
        super().__init__(dtype, reduction)
        add = self.reduce

        def reduce(target: Any, source: Any) -> None:
            transport.clock.sleep_s(2e-3)
            add(target, source)

        self.reduce = reduce


class WrongKernels(NumpyKernels):
    """Sums are one too large in one element."""

    def __init__(self, transport: SimTransport, dtype: str, reduction: str) -> None:
        super().__init__(dtype, reduction)
        add = self.reduce

        def reduce(target: Any, source: Any) -> None:
            add(target, source)
            target[-1] += 1

        self.reduce = reduce


def at_culprit(change: Callable[[FlightDump], FlightDump | None]) -> Callable[[list[FlightDump]], list[FlightDump]]:
    """What is read of the culprit's page is something else: its process has gone, or nothing is left."""

    def changed(dumps: list[FlightDump]) -> list[FlightDump]:
        found = [change(dump) if dump.rank == CULPRIT else dump for dump in dumps]
        return [dump for dump in found if dump is not None]

    return changed


def killed(dump: FlightDump) -> FlightDump:
    """The page of a process that said nothing after its last status: as it was when it was killed."""
    status = msgspec.structs.replace(dump.status, state="running", failure=None)
    return msgspec.structs.replace(dump, status=status, process=GONE)


def stopped(dump: FlightDump) -> FlightDump:
    return msgspec.structs.replace(killed(dump), process=STOPPED)


@dataclass(frozen=True)
class Case:
    """A planted failure: what runs, what `explain` must say of it."""

    name: str
    program: Program
    kind: str
    culprits: tuple[int, ...] = (CULPRIT,)
    says: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    nics: tuple[tuple[int, str], ...] = ()
    change: Callable[[list[FlightDump]], list[FlightDump]] = list


DEADLINE: dict[str, Any] = {"deadline_s": 1.0}
CASES = [
    Case("nothing", well, "nothing", ()),
    Case("an exception", instead(fail), "error", says="Failure: the loss is not a number"),
    Case("an interrupt", instead(interrupt), "error", says="KeyboardInterrupt"),
    Case("cancelled", instead(lambda comm, _: comm.abort("enough")), "error", says="enough"),
    Case("leaves early", leaves, "late", says="has not begun run 4", options=DEADLINE),
    Case("uses what it has closed", instead(lambda comm, _: comm.close()), "error", says="is closed"),
    Case("another size", first(lambda comm: reduce(comm, 1, SIZE + 1)), "mismatch", says="size_bytes"),
    Case("another type", first(lambda comm: reduce(comm, 1, dtype=np.float64)), "mismatch", says="size_bytes"),
    Case("another reduction", first(lambda comm: reduce(comm, 1, op="max")), "mismatch", says="reduction max"),
    Case("another collective", first(lambda comm: comm.broadcast(np.ones(SIZE, np.float32))), "mismatch",
         says="collective broadcast"),
    Case("another schedule", well, "mismatch", says="digest", options={"schedules": {CULPRIT: "direct"}}),
    Case("another size, later", instead(lambda comm, _: reduce(comm, 1, SIZE + 1)), "mismatch",
         says="In the place of run 4", options=DEADLINE),
    Case("another order", swapped, "order", says="In run 1 rank 2 has begun", options=DEADLINE),
    Case("another length", unequal_messages, "mismatch", (1, CULPRIT), says="16 B"),
    Case("a circle of receives", circle, "circle", (0, 1, 2, 3), options=DEADLINE),
    Case("computes for too long", instead(lambda _, t: t.clock.sleep_s(30.0)), "late", says="run 4", options=DEADLINE),
    Case("one collective less", skips, "late", says="has not begun run 3", options=DEADLINE),
    Case("comes late each time", naps(0.05), "slow", says="later than the others"),
    Case("a slow processor", well, "slow", says="computes for", options={"kernels": {CULPRIT: SlowKernels}}),
    Case("a wrong kernel", well, "wrong", says="must be",
         options={"kernels": {CULPRIT: WrongKernels}, "check_every": 3}),
    Case("a NIC down", well, "rails", says="link is down", options={"faults": "2/1@10ms"}, nics=((2, "eth1"),)),
    Case("a NIC flaps", well, "rails", options={"faults": "2/1@8ms..12ms, 2/1@20ms..24ms"}, nics=((2, "eth1"),)),
    Case("a blackhole", well, "rails", options={"faults": "2/1@5ms:in"}, nics=((2, "eth1"),)),
    Case("two NICs down", well, "rails", (1, 2), options={"faults": "2/1@6ms, 1/0@9ms"},
         nics=((2, "eth1"), (1, "eth0"))),
    Case("all NICs down", well, "nic", options={"faults": "2/0@10ms, 2/1@10ms"}, nics=((2, "eth0"), (2, "eth1"))),
    Case("both NICs slow", well, "slow", says="rate of the others", options={"faults": "2/0@0s=1/10, 2/1@0s=1/10"}),
    Case(
        "killed", instead(lambda _, t: t._host.crash()), "gone", says="process", options={"deadline_s": 3.0},
        change=at_culprit(killed),
    ),
    Case(
        "killed, and nothing is left of it", instead(lambda _, t: t._host.crash()), "gone", says="has left no dump",
        options={"deadline_s": 3.0}, change=at_culprit(lambda _: None),
    ),
    Case(
        "stopped", instead(lambda _, t: t.clock.sleep_s(30.0)), "stopped", says="is stopped", options=DEADLINE,
        change=at_culprit(stopped),
    ),
]  # fmt: skip


@cache
def dumps_of(name: str) -> tuple[FlightDump, ...]:
    (case,) = (each for each in CASES if each.name == name)
    return tuple(case.change(fly(case.program, **case.options)))


@pytest.mark.parametrize("case", sampled(CASES, every=2), ids=lambda case: case.name)
def test_names_the_culprit(case: Case) -> None:
    found = explain(dumps_of(case.name))
    assert (found.kind, found.culprits) == (case.kind, case.culprits), found.text
    assert case.says in found.text
    if case.nics:
        assert set(found.nics) == set(case.nics), found.text


NEEDS_ONE_CLOCK = ("both NICs slow",)
"""In a ring every message goes one way: which of them takes long, clocks that are as uncertain do not tell. Nobody must
be blamed for that."""
SKEWS = (12.5, -3600.0, 86400.75, -10.0)
"""Seconds that the clocks of the ranks are ahead of one clock."""
_CLOCK = ("at_s", "now_s", "since_s", "moved_s", "clock_s", "last_failure_s")


def shifted(said: Any, by_s: float) -> Any:
    """What a rank says whose clock is so much ahead: durations, and times of day, are as they were."""
    if isinstance(said, EventRecord):
        return said._replace(at_s=said.at_s + by_s)
    if isinstance(said, msgspec.Struct):
        fields = {each: getattr(said, each) for each in said.__struct_fields__}
        return msgspec.structs.replace(
            said, **{each: value + by_s if each in _CLOCK else shifted(value, by_s) for each, value in fields.items()}
        )
    return tuple(shifted(each, by_s) for each in said) if isinstance(said, tuple) else said


def of_hosts_with_other_clocks(dump: FlightDump) -> FlightDump:
    changed: FlightDump = shifted(dump, SKEWS[dump.rank])
    identity = msgspec.structs.replace(changed.identity, host=f"h{dump.rank}", boot=f"host {dump.rank}")
    return msgspec.structs.replace(changed, identity=identity)


@pytest.mark.parametrize("case", sampled(CASES, every=4), ids=lambda case: case.name)
def test_names_the_culprit_by_clocks_that_are_wrong(case: Case) -> None:
    """Every rank on a host of its own, with a clock that is ten seconds to a day ahead or behind."""
    straight = dumps_of(case.name)
    found = explain([of_hosts_with_other_clocks(each) for each in straight])
    if case.name in NEEDS_ONE_CLOCK:
        assert found.kind == "nothing", found.text
    else:
        assert (found.kind, found.culprits) == (case.kind, case.culprits), found.text
        assert case.says in found.text
    assert set(case.nics) <= set(found.nics)
    for (who, whom, seconds), expected in zip(found.waits, explain(straight).waits, strict=True):
        assert (who, whom) == expected[:2]
        assert seconds == pytest.approx(expected[2], abs=1e-6)
    assert "Clocks of the hosts are aligned" in found.text


def test_every_time_of_a_dump_is_shifted() -> None:
    """A field with seconds that is neither a clock's, nor known as something else, would be left out above."""
    others = {"started_s", "wall_s"}
    kinds = (FlightDump, RankIdentity, RankStatus, RunningRun, RailStatus, Note, FailureStatus, WaitedFor, KnownPlan)
    names = {name for kind in kinds for name in kind.__struct_fields__ if name.endswith("_s")}
    assert names | {"at_s"} == {*_CLOCK, *others}


def test_there_are_failures_of_twenty_kinds() -> None:
    assert len(CASES) > 20


def test_dumps_must_be_of_one_job() -> None:
    dumps = fly(well, n_ranks=2)
    other = msgspec.structs.replace(dumps[1], identity=msgspec.structs.replace(dumps[1].identity, job="other"))
    with pytest.raises(InputError, match="one job"):
        explain([dumps[0], other])
    with pytest.raises(InputError, match="one of each"):
        explain([dumps[0], dumps[0]])
    with pytest.raises(InputError, match="at least one"):
        explain([])
    assert N_RANKS > 2
