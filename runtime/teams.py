"""`RankTeam`: some ranks of an engine, which make plans ready among themselves; see `Communicator.split`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optcc.errors import RuntimeFault
from optcc.plan import Plan
from optcc.runtime.channel_groups import PLANS_OF_TEAM_MAX, ChannelGroups
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.engine import DEADLINE_S, Engine
from optcc.runtime.kernels import Kernels
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.point_to_point import Mail
from optcc.runtime.state import WINDOW
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Transport
from optcc.verdict import Verdict

EXCHANGE_TAG = -1
"""The tag of the messages by which a team agrees; those of programs are not below zero."""


class RankTeam:
    """What an engine does for all ranks, for `ranks` of its transport, of which this one is number `rank`.

    Its runs are driven by the engine, together with those of the others, and fail together. Teams of one `number` have
    no rank in common; two ranks make the plans of the teams that both are in ready in the same order.
    """

    def __init__(self, engine: Engine, ranks: Sequence[int], rank: int, number: int) -> None:
        self.engine, self.ranks, self.rank, self.number = engine, tuple(ranks), rank, number
        self.n_ranks = len(self.ranks)
        self.mail = Mail(engine, self.ranks, rank, number)
        self._groups = ChannelGroups(number * PLANS_OF_TEAM_MAX)

    @property
    def transport(self) -> Transport:
        """The engine's."""
        return self.engine.transport

    @property
    def failure(self) -> RuntimeFault | None:
        """Why nothing can run any more."""
        return self.engine.failure

    def prepare(
        self,
        plan: Plan,
        verdict: Verdict,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        kernels: Kernels | None = None,
        device: DevicePlace | None = None,
    ) -> PersistentPlan:
        """`Engine.prepare` for this team."""
        at = self.rank, self.ranks
        return self.engine.prepare_among(self, at, self._groups, plan, verdict, window, deadline_s, kernels, device)

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """Every member's payload, by rank; all have the same length. Runs go on meanwhile.

        Raises DeadlineExceeded if some member has not come within `timeout_s`, and what a run raises.
        """
        self.engine.check_alive()
        mine = np.frombuffer(payload, dtype=np.uint8)
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        views = {rank: np.empty(len(payload), dtype=np.uint8) for rank in others}
        views[self.rank] = mine
        handles = [self.mail.receive(views[rank], rank, EXCHANGE_TAG, timeout_s) for rank in others]
        handles += [self.mail.send(mine, rank, EXCHANGE_TAG, timeout_s) for rank in others]
        for handle in handles:
            handle.wait()
        return [views[rank].tobytes() for rank in range(self.n_ranks)]

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Returns once every member has called it; raises as `allgather`."""
        self.allgather(b"\0", timeout_s)

    def abort(self, cause: str) -> None:
        """Gives up every run of the engine, at all its ranks."""
        self.engine.abort(cause)

    def close(self) -> None:
        """The transport stays the engine's."""
