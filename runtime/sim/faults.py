"""How the faults of a scenario befall a simulated network: at a time, or with a frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optcc.runtime.protocol.frames import DATA_STATE_FRAME, STATE_FRAME
from optcc.runtime.sim.host import SimulatedHost
from optcc.runtime.sim.network import SimulatedNetwork
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.sim.scenario import INFINITY, LEAVING, SwarmFault
from optcc.runtime.sim.stream import Flow

FREEZE_S_MAX = 0.09


class FaultInjector:
    """Lets faults begin and end.

    `begun`: those that have begun, and when. `rates` are the NICs' declared ones, by rank; `note` is told the story.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        hosts: Sequence[SimulatedHost],
        rates: Sequence[Sequence[tuple[int, int]]],
        note: Callable[[str], None],
    ) -> None:
        self._network, self._hosts, self._rates, self._note = network, hosts, rates, note
        self.begun: list[tuple[SwarmFault, float]] = []

    def plan(self, faults: Sequence[SwarmFault]) -> None:
        """Before the network's clock runs."""
        for fault in faults:
            begin = self._begin if fault.trigger is None else self._arm
            self._network.clock.after(fault.at_s, lambda begin=begin, fault=fault: begin(fault))  # type: ignore[misc]

    def trigger_leaving(self, rank: int) -> None:
        """A rank begins to leave."""
        for nic, triggers in list(self._network.triggers.items()):
            for trigger in list(triggers) if nic.rank == rank else ():
                trigger(LEAVING, None)

    def _arm(self, fault: SwarmFault) -> None:
        """The fault begins when its trigger says so."""
        trigger, clock = fault.trigger, self._network.clock
        assert trigger is not None
        triggers, left = self._network.triggers[self._network.nics[fault.rank, fault.nic]], [trigger.count]

        def note(kind: int, flow: Flow | None) -> None:
            if clock.now_s > fault.at_s + trigger.armed_s:
                triggers.remove(note)
            elif trigger.kind == (STATE_FRAME if kind == DATA_STATE_FRAME else kind):
                left[0] -= 1
                if not left[0]:
                    triggers.remove(note)
                    if trigger.delay_s:
                        clock.after(trigger.delay_s, lambda: self._begin(fault, flow))
                    else:
                        self._begin(fault, flow)

        triggers.append(note)

    def _begin(self, fault: SwarmFault, flow: Flow | None = None) -> None:
        host = self._hosts[fault.rank]
        self.begun.append((fault, self._network.clock.now_s))
        self._note(str(fault))
        if fault.kind == "crash":
            host.crash()
        elif fault.kind == "break":
            assert flow is not None, "only a frame says which connection"
            self._network.break_(flow)
        elif fault.kind == "busy":
            if not host.is_stopped:
                host.compute(fault.for_s)
        else:
            nic = self._network.nics[fault.rank, fault.nic]
            if fault.kind == "freeze":
                network = self._network
                nic.out_free_s = max(nic.out_free_s, network.clock.now_s) + min(fault.for_s, FREEZE_S_MAX)
            self._change(nic, fault.kind, begins=True)
            if fault.for_s < INFINITY and fault.kind not in ("reset", "freeze"):
                self._network.clock.after(fault.for_s, lambda: self._heal(nic, fault.kind))

    def _heal(self, nic: SimulatedNic, kind: str) -> None:
        # A fault for good outlives others.
        now_s = self._network.clock.now_s
        for other, at_s in self.begun:
            is_same = (other.rank, other.nic, other.kind) == (nic.rank, nic.number, kind)
            if is_same and now_s < at_s + other.for_s - 1e-9:
                return
        self._note(f"rank {nic.rank} NIC {nic.number} healed of {kind}")
        self._change(nic, kind, begins=False)

    def _change(self, nic: SimulatedNic, kind: str, *, begins: bool) -> None:
        network = self._network
        if kind in ("down", "move"):
            if kind == "move" and not begins:
                network.move(nic)
            network.set_link(nic, not begins)
        elif kind == "loss":
            nic.loss = 0.05 if begins else 0.0
        elif kind == "slow":
            declared = float(self._rates[nic.rank][nic.number][0])
            nic.out_rate = declared / 8 if begins else declared
        elif kind == "reset":
            network.reset_over(nic)
        elif kind == "refuse":
            nic.refuses = begins
        elif kind == "freeze":
            pass
        else:
            holes = {"hole": (True, True), "hole-out": (True, False), "hole-in": (False, True)}[kind]
            network.set_open(
                nic,
                out=not begins if holes[0] else nic.out_open,
                in_=not begins if holes[1] else nic.in_open,
            )
