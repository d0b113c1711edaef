"""One plan at one rank, one run at a time, each waited for: the engine for who needs no more."""

from __future__ import annotations

from optcc.errors import InputError
from optcc.plan import Plan
from optcc.runtime.engine import DEADLINE_S, Engine
from optcc.runtime.kernels import Array, Kernels
from optcc.runtime.state import WINDOW
from optcc.runtime.transport import Bytes, Clock, Transport
from optcc.verdict import Verdict


class Executor:
    """One rank's executor of `plan`: one run at a time, each waited for.

    Making one is collective, as `Engine.prepare`, which says what the arguments are and what is raised. After a failed
    run the executor and its transport can only be closed. Executors over one transport take turns, on the same
    channels, and messages are divided between rails as suits the last one made: for several plans take an Engine.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        verdict: Verdict,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        kernels: Kernels | None = None,
        clock: Clock | None = None,
    ) -> None:
        if rank != transport.rank:
            raise InputError(f"rank {rank}: must be the transport's, {transport.rank}")
        self.plan, self.rank, self.deadline_s = plan, rank, deadline_s
        engine = Engine(transport, clock=clock)
        self._prepared = engine.prepare(plan, verdict, window=window, deadline_s=deadline_s, kernels=kernels)

    def run(self, buffer: Bytes) -> None:
        """Executes the plan once on `buffer`, in place; see `PersistentPlan.start_in` and `Handle.wait`."""
        self._prepared.start_in(buffer).wait()

    def all_reduce(self, send: Array, recv: Array) -> None:
        """recv = the reduction of every rank's `send`; see `PersistentPlan.start` and `Handle.wait`.

        Raises InputError if the plan is no allreduce, and as those.
        """
        if self.plan.collective.name != "allreduce":
            raise InputError(f"plan {self.plan.name}: {self.plan.collective.name}: must be an allreduce")
        self._prepared.start(send, recv).wait()
