"""`Planner`: plans for a `Communicator`, from the schedule library, compiled for a topology and verified.

    comm = Communicator(transport, Planner(Topology.parse("4@1GB/s,3=500MB/s")))

Also the steps that it consists of, for those that need one of them alone: `find_schedule` (a name to a definition),
`build` (a definition to a plan), `prove` (a plan to its proof), `smallest_failure` (a refutation to a smaller one).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cache
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from optcc.collective import COLLECTIVES, DTYPE_BYTES, Collective
from optcc.compiled import load_at_once
from optcc.compiler import TimedPlan, compile_schedule, costed_s, try_segments
from optcc.dsl import Definition
from optcc.errors import (
    ArgumentError,
    InputError,
    OptccError,
    PlanRefuted,
    PlanUnproved,
    SolverUnknown,
    TopologyError,
    did_you_mean,
)
from optcc.files import VerdictCache, cache_directory
from optcc.flow_paths import FLOW_OF
from optcc.plan import Plan, PlanRequest
from optcc.plan_store import PlanStore
from optcc.plan_worker import PlanWorker
from optcc.rail_shares import shares_by_rail
from optcc.runtime.protocol.agreement import Shares
from optcc.schedule import Schedule
from optcc.schedules.auto import Choice, choose, pooled_bound_s
from optcc.schedules.auto_collectives import choose_for
from optcc.schedules.equal_trees import equal_trees
from optcc.schedules.hierarchical_nics import hierarchical_nics
from optcc.schedules.nccl_ring import nccl_ring
from optcc.schedules.nccl_tree import nccl_tree
from optcc.schedules.nic_trees import nic_trees
from optcc.schedules.optcc_nics import optcc_nics
from optcc.schedules.optimal import optimal
from optcc.schedules.r2ccl_nics import r2ccl_nics, r2ccl_rails
from optcc.schedules.rank_order import rank_order, rank_order_reduce_scatter
from optcc.schedules.registry import SCHEDULES
from optcc.schedules.send_recv import send_recv
from optcc.schedules.server_stars import star_all_gather, star_reduce_scatter
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import MODELS, Model, Timing
from optcc.topology import Topology
from optcc.tree_packing import PACKED, PACKED_OF
from optcc.units import show_time
from optcc.verdict import PROVED, REFUTED, Verdict
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.bounds.exchange import is_exchange
from optcc.verify.plan import VERSION, verify_plan
from optcc.verify.plan.report import Questions, judge
from optcc.verify.plan.shrink import Smallest, shrink

FOR_NICS = (nccl_ring, nccl_tree, hierarchical_nics, r2ccl_rails, r2ccl_nics, optcc_nics, equal_trees, nic_trees)
STARS = (star_all_gather, star_reduce_scatter)
LIBRARY: Mapping[str, Definition] = {
    **SCHEDULES,
    **{each.name: each for each in (*FOR_NICS, *STARS, PACKED, *PACKED_OF.values(), *FLOW_OF.values())},
}
"""Every schedule by its name: those for any cluster, and those for NICs of GPUs and for graphs."""
MESSAGES: Mapping[str, Definition] = {send_recv.name: send_recv}
"""What has a name besides: messages between pairs of ranks, each the direct way."""
AUTO = "auto"
"""As a schedule's name: the one that chooses among the others; as a number of segments: chosen by simulation."""

SCHEDULE_OF: Mapping[str, str] = dict.fromkeys((*COLLECTIVES, "alltoallv"), AUTO)
"""By collective, the schedule that `Planner` takes unless another is given."""
RANK_ORDER: Mapping[str, str] = {"allreduce": rank_order.name, "reducescatter": rank_order_reduce_scatter.name}
"""The `schedules` of a `Planner` with which AllReduce and ReduceScatter add in the order of the ranks, whatever the
plan: no NIC that is lost, slow or back changes a bit."""

WORTH_STORING_S = 0.05
"""Plans that take longer are stored: for other ranks on this machine, and for the next job."""
READIED_MAX = 4
_YIELD_S, _LOOK_S = 0.05, 4e-3
WORKER = PlanWorker()


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a `Planner` but its topology; `schedules` has all collectives."""

    schedules: dict[str, str]
    slots: int | None
    ports: Model
    segments: int | str
    by_rail: bool


class Planner:
    """Called with (collective, size in bytes, dtype, reduction): the plan and its proof; the same at every rank.

    `schedules` replaces entries of `SCHEDULE_OF`; `segments` and `by_rail` are those of `build`, `slots` and `ports`
    those of `optcc.compiler.compile_schedule`. Proofs, and plans that took long, are kept in the user's cache.

    Raises InputError for an unknown name or a schedule of another collective, TopologyError if a schedule does not
    accept the topology, PlanRefuted, with the counterexample, for a refuted plan.

    >>> plan, verdict = Planner(Topology.parse("4@1GB/s"))(Collective("broadcast", 4, root=2), 1024, "int32", "sum")
    >>> plan.name, plan.collective.root, verdict.verdict
    ('tree-broadcast', 2, 'proved')
    """

    def __init__(
        self,
        topology: Topology,
        *,
        schedules: Mapping[str, str] | None = None,
        slots: int | None = None,
        ports: Model = "exclusive",
        segments: int | str = AUTO,
        by_rail: bool = False,
    ) -> None:
        self.topology = topology
        self._options = _Options({**SCHEDULE_OF, **(schedules or {})}, slots, ports, segments, by_rail)
        self._cache = verdict_cache()
        directory = cache_directory(os.environ)
        self._store = PlanStore(directory) if directory is not None else None
        # What the background has made ready.
        self._made: dict[PlanRequest, tuple[Plan, Verdict]] = {}
        self._under: dict[Shares, Planner] = {}
        self._worth_storing_s = WORTH_STORING_S
        self._readied: set[PlanRequest] = set()

    def __call__(self, collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
        if collective.n_ranks != self.topology.n_ranks:
            raise InputError(f"topology of {self.topology.n_ranks} ranks: must have {collective.n_ranks}")
        request = PlanRequest(collective, size_bytes, dtype, reduction)
        made = self._made.pop(request, None)
        if made is not None:
            return made
        plan = self._stored(request)
        if plan.collective != collective:
            raise InputError(f"schedule {plan.name}: {plan.collective.name}: must be for {collective.name}")
        return plan, prove(plan, self._cache)

    def _stored(self, request: PlanRequest) -> Plan:
        """The plan from the store, where that another process may be about to put it; or a new one."""
        store = self._store
        if store is None or self._schedule_of(request) not in (AUTO, *LIBRARY):
            return self._build(request)
        key = self._key(request)
        plan = store.get(key, request)
        if plan is not None:
            return plan
        with store.alone(key):
            plan = store.get(key, request)
            if plan is None:
                began_s = time.perf_counter()
                plan = self._build(request)
                if time.perf_counter() - began_s > self._worth_storing_s:
                    store.put(key, plan)
            return plan

    def _schedule_of(self, request: PlanRequest) -> str:
        """The name of the schedule; raises InputError if none is known for a declared collective."""
        name = request.collective.name
        if name not in self._options.schedules:
            raise InputError(
                f"collective {name!r}: must have a schedule: Planner(topology, schedules={{{name!r}: ...}})"
            )
        return self._options.schedules[name]

    def _build(self, request: PlanRequest) -> Plan:
        options = self._options
        return build(
            self._schedule_of(request),
            self.topology,
            request.size_bytes,
            dtype=request.dtype,
            reduction=request.reduction,
            segments=options.segments,
            slots=options.slots,
            ports=options.ports,
            root=request.collective.root,
            collective=request.collective,
            by_rail=options.by_rail,
        ).plan

    def least_s(self, request: PlanRequest, shares: Shares | None = None) -> float:
        """A lower bound on how long an AllReduce, Broadcast or Reduce takes, seconds: servers pool their NICs, which
        carry these shares of what the topology says, or all of it; see `under`.

        >>> asked = PlanRequest(Collective("broadcast", 4, root=3), 10**9, "float32", "sum")
        >>> planner = Planner(Topology.parse("4@1GB/s,3=500MB/s:1GB/s"))
        >>> planner.least_s(asked), planner.least_s(asked._replace(collective=Collective("reduce", 4, root=3)))
        (2.0, 1.0)
        """
        topology = self.topology if shares is None else self.topology.under(shares)
        root = request.collective.root
        if request.collective.name == "allreduce":
            return pooled_bound_s(topology, request.size_bytes)
        ports = (topology.out, topology.in_) if request.collective.name == "broadcast" else (topology.in_, topology.out)
        others = [rate for rank, rate in enumerate(ports[1]) if rank != root]
        return request.size_bytes / float(min(ports[0][root], *others))

    # --- other rates

    def under(self, shares: Shares) -> Planner:
        """A planner for NICs that carry these shares, out and in, of what the topology says, by rank and NIC.

        Raises TopologyError if a server is cut off by it.
        """
        if shares not in self._under:
            self._under = {shares: Planner(self.topology.under(shares), **msgspec.structs.asdict(self._options))}
        return self._under[shares]

    def for_ranks(self, ranks: Sequence[int]) -> Planner:
        """A planner for collectives among these ranks, counted from 0 in the order given; see `Topology.of_ranks`."""
        return Planner(self.topology.of_ranks(ranks), **msgspec.structs.asdict(self._options))

    def prepare(self, shares: Shares, wanted: Sequence[PlanRequest]) -> Callable[[], bool]:
        """Begins to make such plans in the background; what it returns tells whether they are there."""
        try:
            changed = self.under(shares)
        except OptccError:
            return lambda: True
        thread = threading.Thread(target=changed._make_ready, args=(wanted,), name="optcc plans", daemon=True)
        thread.start()
        return lambda: not thread.is_alive()

    def get_ready(self, request: PlanRequest) -> None:
        """Starts the process that makes plans in the background, unless one of this machine has started it. So that it
        has loaded what that takes, it makes and proves plans for the first few requests for when a NIC is lost or slow,
        though they may be stored."""
        if self._store is None or request in self._readied or len(self._readied) == READIED_MAX:
            return
        self._readied.add(request)
        if WORKER.is_there or self._store.take_for_good("process"):
            for share in (0.0, 0.5):
                with suppress(OptccError):  # a cluster that has no such plan
                    WORKER.get_ready(self._after_a_loss(share)._work([request], is_anew=True))

    def _after_a_loss(self, share: float) -> Planner:
        """A planner for when the last NIC of the first server that has several, or else of the first one, carries such
        a share of its rate."""
        servers = self.topology.servers
        changed = next((number for number, server in enumerate(servers) if len(server.nics) > 1), 0)
        shares = [[(0.0, 0.0) if nic.failed else (1.0, 1.0) for nic in server.nics] for server in servers]
        shares[changed][-1] = (share, share)
        return self.under(tuple(map(tuple, shares)))

    def _make_ready(self, requests: Sequence[PlanRequest]) -> None:
        """Has a process make the plans that are not in the store, and reads them."""
        store = self._store
        if store is None:
            return
        with suppress(OSError, OptccError):
            stored = {request: store.get(self._key(request), request) for request in requests}
            if None in stored.values():
                if not WORKER.is_there:
                    self._await_others(stored)
                with store.turn():
                    if missing := _missing(self._look_up(stored)):
                        WORKER.make(self._work(missing))
                stored = self._look_up(stored)
            for request, plan in stored.items():
                if plan is not None:
                    self._made[request] = plan, prove(plan, self._cache)

    def _await_others(self, stored: Mapping[PlanRequest, Plan | None]) -> None:
        """Waits a little, for another rank of this machine may have a process that has loaded everything."""
        assert self._store is not None
        keys = [self._key(request) for request in _missing(stored)]
        until_s = time.monotonic() + _YIELD_S
        while not all(map(self._store.has, keys)) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _look_up(self, stored: Mapping[PlanRequest, Plan | None]) -> dict[PlanRequest, Plan | None]:
        """`stored` with the plans that were put into the store meanwhile."""
        assert self._store is not None
        found = {request: self._store.get(self._key(request), request) for request in _missing(stored)}
        return {**stored, **found}

    def _work(self, requests: list[PlanRequest], *, is_anew: bool = False) -> bytes:
        """What `make_plans` is to do."""
        return msgspec.json.encode(_Work(self.topology, self._options, requests, is_anew), enc_hook=str)

    def _key(self, request: PlanRequest) -> str:
        """All that a plan of this planner follows from, and the version of what makes it."""
        schedule = self._schedule_of(request)
        options = msgspec.structs.replace(self._options, schedules={request.collective.name: schedule})
        return repr((_source_version(), options, astuple(self.topology), tuple(request)))


def _missing(plans: Mapping[PlanRequest, Plan | None]) -> list[PlanRequest]:
    return [request for request, plan in plans.items() if plan is None]


class _Work(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of a `Planner`, what it is asked for, and whether to make that anew though it may be stored."""

    topology: Topology
    options: _Options
    requests: list[PlanRequest]
    is_anew: bool


def make_plans(work: bytes) -> None:
    """Makes the plans that another process has asked for, as JSON, and stores them; raises what planning raises."""
    asked = msgspec.json.decode(work, type=_Work, dec_hook=lambda kind, text: kind(text))
    planner = Planner(asked.topology, **msgspec.structs.asdict(asked.options))
    # Else whoever asks would have to make them anew.
    planner._worth_storing_s = 0.0
    if asked.is_anew:
        load_at_once()
    for request in asked.requests:
        with suppress(OptccError):
            if asked.is_anew and planner._store is not None:
                plan = planner._build(request)
                planner._store.put(planner._key(request), plan)
                planner._cache.put(verify_plan(plan))
            else:
                planner(*request)


@cache
def _source_version() -> str:
    """What changes with the source of this package."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def find_schedule(name: str) -> Definition:
    """The schedule of the library or of `MESSAGES` with that name, or `FILE.py:FUNCTION` of the user's own.

    Raises InputError if there is no such schedule.
    """
    path, colon, function = name.rpartition(":")
    if colon:
        defined = {each: made for each, made in vars(_load_file(Path(path))).items() if isinstance(made, Definition)}
        if function not in defined:
            rule = f"{path} has no function {function} under @schedule{did_you_mean(function, defined)}"
            raise InputError(f"schedule {name!r}: {rule}")
        return defined[function]
    if name in MESSAGES:
        return MESSAGES[name]
    if name not in LIBRARY:
        known = f"must be one of {', '.join(LIBRARY)}, {AUTO}, or FILE.py:FUNCTION"
        raise InputError(f"schedule {name!r}: {known}{did_you_mean(name, (*LIBRARY, AUTO))}")
    return LIBRARY[name]


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise InputError(f"schedule file {str(path)!r}: no such file")
    spec = importlib.util.spec_from_file_location(f"optcc_user_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"schedule file {str(path)!r}: must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except OptccError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"schedule file {str(path)!r}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


class Built(NamedTuple):
    """A plan, the schedule that it was compiled from, and how to make others; `choice` or `compared` if `auto` chose
    it, `timing` under the ports that it is ordered for if its segments were chosen by it. If it is near the bound
    without that, it takes at most about `seconds`."""

    plan: Plan
    schedule: Schedule
    definition: Definition
    segments: int
    choice: Choice | None = None
    timing: Timing | None = None
    compared: Card | None = None
    seconds: float | None = None

    @property
    def certificate(self) -> str | None:
        """What in the certificate of a bound (`optcc bound --achievable`) the schedule is made from, if it is.

        >>> build("packed", Topology.parse("2x2@50GB/s+450GB/s"), 2**20, segments=4).certificate
        'packing of 2 pairs of trees'
        """
        name, n_stages = self.definition.name, len(self.schedule.stages)
        if name in {each.name for each in FLOW_OF.values()}:
            return "flow"
        if name in {each.name for each in PACKED_OF.values()}:
            return f"packing of {n_stages} trees"
        return f"packing of {n_stages // 2} pairs of trees" if name == PACKED.name else None


def build(
    name: str,
    topology: Topology,
    size_bytes: int,
    *,
    dtype: str = "float32",
    reduction: str = "sum",
    segments: int | str = AUTO,
    slots: int | None = None,
    ports: Model = "exclusive",
    root: int = 0,
    by_rail: bool = False,
    collective: Collective | None = None,
    best_s: float = inf,
    near_s: float = 0.0,
) -> Built:
    """The schedule called `name`, compiled; the number of segments is chosen by simulation unless given.

    `collective` is what is wanted: `auto` chooses for it, an AllReduce unless it is given, and a schedule of a declared
    one is built for its cells. With `by_rail` and fair ports `auto` takes NICs to reach those of their own rail alone,
    as they do over TCP. `best_s` is what the fastest schedule so far takes: a slower one need not be tuned, nor one
    be timed that takes at most `near_s` (`optcc.compiler.try_segments`).

    Raises InputError for a name, a model of ports or segments that cannot be, and what building and compiling raise.
    """
    if ports not in MODELS:
        raise ArgumentError(f"ports {ports!r}: must be one of {', '.join(MODELS)}")
    made_for: dict[str, Any] = {"dtype": dtype, "reduction": reduction, "slots": slots, "ports": ports}
    if name == AUTO:
        if collective is not None and collective.name != "allreduce":
            number = segments if isinstance(segments, int) else None
            options = dict(made_for)
            options["more"] = tuple(MESSAGES.values())
            if topology.wired is not None:
                options["more"] += (*STARS, *PACKED_OF.values(), *FLOW_OF.values())
                options["enough_s"] = _near_bound_s(topology, size_bytes, collective)
            return _chosen(choose_for(collective, topology, size_bytes, segments=number, **options))
        if segments != AUTO:
            raise ArgumentError(f"segments {segments}: must be left out with the schedule {AUTO}, which chooses them")
        if topology.wired is not None:
            return _fastest_of(ON_LINKS, topology, size_bytes, **made_for)
        if _keeps_rails_apart(topology) and not (by_rail and ports == "fair" and _shares_rails(topology)):
            return _fastest_of(ON_RAILS, topology, size_bytes, **made_for)
        return _chosen(_choose(topology, size_bytes, by_rail=by_rail, **made_for))
    if name == rank_order.name and segments == AUTO and topology.wired is None:
        return _chosen(_choose(topology, size_bytes, by_rail=by_rail, in_rank_order=True, **made_for), compares=False)
    definition = _where_its_model_ends(find_schedule(name), topology).under(ports)
    if collective is not None and collective.cells:
        definition = definition.of(collective)
    made: TimedPlan | None = None
    if isinstance(segments, str):
        segments, made = try_segments(
            *(definition, topology),
            size_bytes=size_bytes,
            dtype=dtype,
            slots=slots,
            ports=ports,
            best_s=best_s,
            near_s=near_s,
        )
    if made is not None and reduction == "sum" and root == 0:
        return Built(made.plan, made.schedule, definition, segments, timing=made.timing, seconds=made.seconds)
    schedule = definition.build(topology, segments, root=root)
    plan = compile_schedule(schedule, size_bytes=size_bytes, topology=topology, **made_for)
    return Built(plan, schedule, definition, segments)


def _choose(topology: Topology, size_bytes: int, *, by_rail: bool, ports: Model, **options: Any) -> Choice:
    """`choose` among schedules for pooled NICs; with `by_rail` and fair ports, for NICs that reach those of their rail
    alone."""
    rails = shares_by_rail(topology) if by_rail and ports == "fair" else None
    if rails is None:
        if by_rail and ports == "fair" and _keeps_rails_apart(topology):
            # Messages are striped by what all pairs need of each rail, and pooled NICs are as good.
            topology = replace(topology, rail_only=False, text="")
        return choose(topology, size_bytes, ports=ports, **options)
    return choose(rails.usable, size_bytes, ports=ports, parts=rails.shares, **options)


def _near_bound_s(topology: Topology, size_bytes: int, collective: Collective) -> float:
    """`NEAR_BOUND` times the certified bound on an exchange; zero if none is found, and for other collectives."""
    if is_exchange(collective):
        with suppress(SolverUnknown):
            return NEAR_BOUND * float(least_seconds(topology, size_bytes, collective))
    return 0.0


def _where_its_model_ends(definition: Definition, topology: Topology) -> Definition:
    """`definition`; or `packed` in the place of `optimal` where GPUs are linked or rails cannot be pooled, and those of
    `ON_NICS` where NICs belong to GPUs."""
    if definition is optimal:
        return PACKED if topology.wired is not None or _keeps_rails_apart(topology) else definition
    if topology.wired is None or topology.graph is not None:
        return definition
    return ON_NICS.get(definition.name, definition)


def _keeps_rails_apart(topology: Topology) -> bool:
    """Whether servers kept different rails of a rail-only network, so that their NICs cannot be pooled."""
    return topology.rail_only and len(topology.rails_kept) > 1


def _shares_rails(topology: Topology) -> bool:
    """Whether any two servers have kept a common rail."""
    return all(set(one) & set(other) for one, other in combinations(topology.rails_kept, 2))


ON_NICS: Mapping[str, Definition] = {
    "ring": nccl_ring,
    "double-binary-tree": nccl_tree,
    "hierarchical": hierarchical_nics,
    "r2ccl-balance": r2ccl_rails,
    "r2ccl-allreduce": r2ccl_nics,
    "optcc": optcc_nics,
}
"""What takes the place of a schedule for servers of one GPU, as it runs on servers whose NICs belong to GPUs."""


ON_LINKS = (equal_trees.name, PACKED.name, nic_trees.name, "hierarchical")
"""The candidates of `auto` for an AllReduce where NICs belong to GPUs, or the topology is a graph. A few trees of one
share each need no linear program; its packing comes nearer where rates or rails divide the message unevenly, and
where GPUs have links of their own it is the only one."""
ON_RAILS = (PACKED.name, "r2ccl-balance", "recursive-doubling", "direct")
"""Those where servers of one GPU kept different rails: of the last two, short messages take few steps."""


NEAR_BOUND = 1.03
"""No further schedule is tried after one that takes at most so many times the certified bound."""
MANY_RANKS, NEAR_OF_MANY = 128, 1.08
"""For more ranks it may take so many times the bound: plans have too few segments to fill the pipeline sooner, and the
linear program of a packing takes minutes."""


def _fastest_of(
    names: Sequence[str],
    topology: Topology,
    size_bytes: int,
    *,
    dtype: str,
    reduction: str,
    slots: int | None,
    ports: Model,
) -> Built:
    """The schedule of these that is predicted to be fastest, of those that have a route for each of their transfers.

    Where servers are equal, the last one comes second. Raises TopologyError if none has a route.
    """
    best: Built | None = None
    best_s, best_cost_s, least_s, certified = inf, inf, pooled_bound_s(topology, size_bytes), False
    near = NEAR_BOUND if topology.n_ranks <= MANY_RANKS else NEAR_OF_MANY
    rows: list[tuple[str, str, str]] = []
    equal = len({(server.gpus, server.nics, server.fabric) for server in topology.servers}) == 1
    for name in (names[0], *names[:0:-1]) if equal else names:
        if best is not None and best_s <= near * least_s:
            rows.append((name, "-", "not tried: near the bound already"))
            continue
        try:
            options: dict[str, Any] = {"dtype": dtype, "reduction": reduction, "slots": slots, "ports": ports}
            built = build(name, topology, size_bytes, **options, best_s=best_s, near_s=near * least_s)
            if built.seconds is None:
                timing = simulate(built.plan, topology, model=ports)
                built = built._replace(timing=timing, seconds=timing.seconds)
        except (TopologyError, SolverUnknown) as refusal:
            rows.append((name, "-", str(refusal)))
            continue
        assert built.seconds is not None
        at_most = "at most about " if built.timing is None else ""
        rows.append((name, str(built.segments), at_most + show_time(built.seconds)))
        costs_s = costed_s(built.plan, built.seconds, topology)
        if costs_s < best_cost_s:
            best, best_s, best_cost_s = built, built.seconds, costs_s
        if best_s > near * least_s and not certified:  # the linear program is the better bound, and takes longer
            certified = True
            with suppress(SolverUnknown):  # for very many servers: the bound over pooled ones stays
                least_s = float(least_seconds(topology, size_bytes, built.plan.collective))
    if best is None:
        why = "; ".join(f"{name}: {refusal}" for name, _, refusal in rows)
        raise TopologyError(f"{topology!r}: {AUTO} has no schedule for it: {why}")
    title = f"{best.definition.name} is predicted to be fastest under {ports} ports"
    return best._replace(compared=Card(title, ("schedule", "segments", "time"), tuple(rows)))


def _chosen(choice: Choice, *, compares: bool = True) -> Built:
    """What was chosen, and unless it `compares` nothing, among what."""
    taken = choice.taken
    definition = find_schedule(taken.name)
    return Built(choice.plan, choice.schedule, definition, taken.segments, choice if compares else None)


def build_plan(name: str, topology: Topology, size_bytes: int, **options: Any) -> Plan:
    """The plan of `build`."""
    return build(name, topology, size_bytes, **options).plan


def verdict_cache() -> VerdictCache:
    """The user's cache of proofs by this version of the verifier."""
    return VerdictCache(cache_directory(os.environ), VERSION)


def prove(plan: Plan, cache: VerdictCache) -> Verdict:
    """The proof of `plan`, from `cache` or made now.

    Raises PlanRefuted with the counterexample if the plan is refuted, PlanUnproved if nothing is known.
    """
    verdict = look_up(plan, cache)
    if verdict.verdict != PROVED:
        refused = PlanRefuted if verdict.verdict == REFUTED else PlanUnproved
        raise refused(f"{plan.name}: {verdict.verdict}, so it does not run: {verdict.counterexample}")
    return verdict


def look_up(plan: Plan, cache: VerdictCache) -> Verdict:
    """The verdict on `plan`, from `cache` or made now."""
    verdict = cache.get(plan.digest)
    if verdict is None:
        verdict = verify_plan(plan)
        cache.put(verdict)
    return verdict


def smallest_failure(
    built: Built, verdict: Verdict, topology: Topology, size_bytes: int, **options: Any
) -> Smallest | None:
    """The smallest case that `verdict`'s property refutes, compiled with the same `options` as `built`.

    None if the plan was not refuted, or by a property of this size or topology alone (`timing`, `limits`).
    """
    if verdict.counterexample is None or verdict.counterexample.property in ("timing", "limits"):
        return None
    compiling = {key: value for key, value in options.items() if value is not None}

    def make(smaller: Topology, segments: int, size: int) -> tuple[Plan, Verdict]:
        schedule = built.definition.build(smaller, segments)
        plan = compile_schedule(schedule, size_bytes=size, topology=smaller, **compiling)
        return plan, judge(plan, Questions(schedule)).verdict

    itemsize = DTYPE_BYTES[built.plan.transfers.dtype]
    return shrink(make, verdict.counterexample, topology, built.segments, size_bytes, itemsize)
