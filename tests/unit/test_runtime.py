"""The run-time: the machine step by step, the executor on the loopback, agreement, deadlines, shaped ports."""

from __future__ import annotations

import random
import threading
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.errors import (
    DeadlineExceeded,
    InputError,
    MismatchError,
    OptccError,
    PlanError,
    RankLost,
    RuntimeFault,
    TopologyError,
)
from optcc.plan import RECV, RECV_REDUCE_SEND, SEND, Channel, Plan
from optcc.runtime.barrier import NEVER
from optcc.runtime.conformance import check_transport
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import expected_output, make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.handle import Handle
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.plan_handshake import Terms, explain
from optcc.runtime.samples import Draft, exchange, ring
from optcc.runtime.state import Action, Compute, PostRecv, PostSend, RankMachine, RankProgram
from optcc.runtime.transport import RECEIVED, Event
from optcc.runtime.transports.loopback import LoopbackNetwork, LoopbackTransport, max_min_rates, run_ranks
from optcc.schedule import COPY, REDUCE
from optcc.topology import Topology
from optcc.verdict import PROPERTIES, PROVED, UNKNOWN, Verdict, sealed
from optcc.verify.plan import verify_plan

DATA = [(dtype, reduction) for dtype in DTYPE_BYTES for reduction in reductions_of(dtype)]


def proved(plan: Plan) -> Verdict:
    return verify_plan(plan)


def machine_of(plan: Plan, rank: int, window: int = 2) -> RankMachine:
    return RankMachine(RankProgram(plan, rank), window)


def short(actions: list[Action]) -> list[str]:
    """Actions as words: `recv c0 s1`, `send #3 c1`, `compute #2`."""
    words = []
    for action in actions:
        if isinstance(action, PostRecv):
            words.append(f"recv c{action.channel} s{action.slot}")
        elif isinstance(action, PostSend):
            words.append(f"send #{action.instruction} c{action.channel}")
        else:
            words.append(f"{'reduce' if action.reduce else 'copy'} #{action.instruction}")
    return words


def relay(n_messages: int, slots: int) -> Plan:
    """Rank 0 sends to rank 1, which reduces and passes on to rank 2. No allreduce, for steps only."""
    draft = Draft(channels=[Channel(0, 1, slots), Channel(1, 2, slots)])
    for message in range(n_messages):
        first = draft.transfer(0, 1, REDUCE, 4 * message, 4 * message, 4)
        second = draft.transfer(1, 2, COPY, 4 * message, 4 * message, 4)
        draft.add(0, 0, SEND, 4, send=(0, first), src_offset=4 * message)
        draft.add(1, 0, RECV_REDUCE_SEND, 4, recv=(0, first), send=(1, second), dst_offset=4 * message)
        draft.add(2, 0, RECV, 4, recv=(1, second), dst_offset=4 * message)
    return draft.finish("relay", 3, 4 * n_messages, "int32", "sum")


class TestMachine:
    def test_fused_computes_then_frees_its_slot_then_sends(self) -> None:
        plan = relay(3, slots=1)
        machine = machine_of(plan, 1)
        first = machine.program.first
        assert short(machine.start()) == ["recv c0 s0"]
        assert short(machine.arrived(0)) == [f"reduce #{first}"]
        assert short(machine.local_done(first)) == ["recv c0 s0", f"send #{first} c1"]
        assert short(machine.sent(1)) == []
        assert machine.n_done == 1

    def test_slots_bound_the_receives_that_are_posted(self) -> None:
        assert short(machine_of(relay(5, slots=3), 2).start()) == ["recv c1 s0", "recv c1 s1", "recv c1 s2"]

    def test_a_lane_shares_its_slots_between_channels_in_its_own_order(self) -> None:
        draft = Draft(channels=[Channel(0, 2, 1), Channel(1, 2, 1)])
        for source in (1, 0):
            transfer = draft.transfer(source, 2, COPY, 0, 4 * source, 4)
            draft.add(source, 0, SEND, 4, send=(source, transfer), src_offset=0)
            draft.add(2, 0, RECV, 4, recv=(source, transfer), dst_offset=4 * source)
        machine = machine_of(draft.finish("two", 3, 8, "int32", "sum"), 2)
        assert short(machine.start()) == ["recv c1 s0"]
        (compute,) = machine.arrived(1)
        assert isinstance(compute, Compute)
        assert short(machine.local_done(compute.instruction)) == ["recv c0 s0"]

    @pytest.mark.parametrize(("window", "n_sends"), [(1, 1), (2, 2), (9, 5)])
    def test_window_bounds_what_a_lane_has_issued(self, window: int, n_sends: int) -> None:
        machine = machine_of(relay(5, slots=2), 0, window)
        assert len(machine.start()) == n_sends
        assert len(machine.sent(0)) == (1 if n_sends < 5 else 0)

    def test_a_message_that_comes_before_its_turn_waits_in_its_slot(self) -> None:
        machine = machine_of(relay(4, slots=4), 1, window=1)
        machine.start()
        assert len(machine.arrived(0)) == 1
        assert machine.arrived(0) == []
        first = machine.program.first
        assert short(machine.local_done(first)) == [f"send #{first} c1"]
        assert short(machine.sent(1)) == [f"reduce #{first + 1}"]

    def test_fused_sends_keep_the_order_of_their_channel(self) -> None:
        """Two fused receives from two ranks into one out-channel; the second message comes first."""
        draft = Draft(channels=[Channel(0, 2, 2), Channel(1, 2, 2), Channel(2, 3, 2)])
        for source in (0, 1):
            into, out = (
                draft.transfer(source, 2, REDUCE, 0, 4 * source, 4),
                draft.transfer(2, 3, COPY, 0, 4 * source, 4),
            )
            draft.add(source, 0, SEND, 4, send=(source, into), src_offset=0)
            draft.add(2, 0, RECV_REDUCE_SEND, 4, recv=(source, into), send=(2, out), dst_offset=4 * source)
            draft.add(3, 0, RECV, 4, recv=(2, out), dst_offset=4 * source)
        machine = machine_of(draft.finish("join", 4, 8, "int32", "sum"), 2)
        machine.start()
        first = machine.program.first
        machine.arrived(1)
        assert short(machine.local_done(first + 1)) == []
        machine.arrived(0)
        assert short(machine.local_done(first)) == [f"send #{first} c2", f"send #{first + 1} c2"]

    def test_impossible_events_are_our_own_mistake(self) -> None:
        machine = machine_of(relay(2, slots=1), 1)
        machine.start()
        machine.arrived(0)
        with pytest.raises(AssertionError, match="was not posted"):
            machine.arrived(0)
        with pytest.raises(AssertionError, match="sent but was not posted"):
            machine.sent(1)
        with pytest.raises(AssertionError, match="no computation"):
            machine.local_done(machine.program.first + 1)

    def test_report_names_what_every_open_instruction_waits_for(self) -> None:
        machine = machine_of(relay(2, slots=1), 1)
        machine.start()
        assert "receive-reduce-send bytes 0..3 waits for message 0 of channel 0->1" in machine.report()

    def test_a_machine_runs_again(self) -> None:
        machine = machine_of(relay(2, slots=2), 0)
        for _ in range(3):
            assert len(machine.start()) == 2
            assert machine.sent(0) == machine.sent(0) == []
            assert machine.done

    def test_refuses_a_window_or_a_rank_that_cannot_be(self) -> None:
        with pytest.raises(InputError, match="window 0: must be at least one"):
            machine_of(relay(1, 1), 0, window=0)
        with pytest.raises(InputError, match="rank 3: must be below 3"):
            RankProgram(relay(1, 1), 3)


def run_in_random_order(plan: Plan, window: int, rng: random.Random) -> list[np.ndarray]:
    """All machines of a plan over a network that picks what happens next at random; the final buffers."""
    machines = [machine_of(plan, rank, window) for rank in range(plan.n_ranks)]
    dtype, reduction = plan.transfers.dtype, plan.transfers.reduction
    kernels = NumpyKernels(dtype, reduction)
    buffers = [np.zeros(plan.buffer_bytes, dtype=np.uint8) for _ in machines]
    for rank, buffer in enumerate(buffers):
        count = plan.size_bytes // DTYPE_BYTES[dtype]
        buffer[: plan.size_bytes] = make_input(rank, count, dtype, reduction).view(np.uint8)
    slots: dict[tuple[int, int, int], np.ndarray] = {}
    sends: list[deque[PostSend]] = [deque() for _ in plan.channels]
    recvs: list[deque[PostRecv]] = [deque() for _ in plan.channels]
    happenings: list[tuple[str, int, int]] = []
    computes: list[tuple[int, Compute]] = []

    def take(rank: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Compute):
                computes.append((rank, action))
            else:
                (sends if isinstance(action, PostSend) else recvs)[action.channel].append(action)  # type: ignore[arg-type]

    for rank, machine in enumerate(machines):
        take(rank, machine.start())
    while True:
        ready = [channel for channel in range(len(plan.channels)) if sends[channel] and recvs[channel]]
        pick = rng.randrange(len(ready) + len(computes) + len(happenings) or 1)
        if pick < len(ready):
            channel = ready[pick]
            source, target = plan.channels[channel].src, plan.channels[channel].dst
            send, recv = sends[channel].popleft(), recvs[channel].popleft()
            assert send.bytes == recv.bytes
            slots[target, recv.lane, recv.slot] = buffers[source][send.offset : send.offset + send.bytes].copy()
            happenings += [("sent", source, channel), ("arrived", target, channel)]
        elif pick - len(ready) < len(computes):
            rank, compute = computes.pop(pick - len(ready))
            target_view = kernels.view(buffers[rank][compute.dst_offset : compute.dst_offset + compute.bytes])
            if compute.slot >= 0:
                source_view = kernels.view(slots[rank, compute.lane, compute.slot])
            else:
                source_view = kernels.view(buffers[rank][compute.src_offset : compute.src_offset + compute.bytes])
            (kernels.reduce if compute.reduce else kernels.copy)(target_view, source_view)
            take(rank, machines[rank].local_done(compute.instruction))
        elif happenings:
            kind, rank, channel = happenings.pop(pick - len(ready) - len(computes))
            take(rank, getattr(machines[rank], kind)(channel))
        else:
            break
    assert all(machine.done for machine in machines), [machine.report() for machine in machines]
    return buffers


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_ranks=st.integers(2, 4),
    window=st.integers(1, 4),
    slots=st.integers(1, 3),
    count=st.integers(0, 40),
    parts=st.integers(1, 3),
    which=st.sampled_from(["ring", "exchange"]),
)
def test_every_interleaving_gives_the_same_result(
    seed: int, n_ranks: int, window: int, slots: int, count: int, parts: int, which: str
) -> None:
    if which == "ring":
        plan = ring(n_ranks, 4 * count, "int32", "sum", segments=parts, slots=slots)
    else:
        plan = exchange(n_ranks, 4 * count, "int32", "sum", parts=parts, slots=slots)
    for rank, buffer in enumerate(run_in_random_order(plan, window, random.Random(seed))):
        assert wrong_elements(plan, rank, buffer[: plan.size_bytes].view(np.int32)) == 0


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_the_samples_are_proved(n_ranks: int) -> None:
    for slots in (1, 3):
        for plan in (ring(n_ranks, 400, segments=2, slots=slots), exchange(n_ranks, 400, parts=2, slots=slots)):
            assert verify_plan(plan).verdict == PROVED


def all_reduce_everywhere(plan: Plan, *, window: int = 2, topology: Topology | None = None) -> list[int]:
    """Wrong elements by rank, after an out-of-place and an in-place run on the loopback."""

    def body(rank: int, transport: LoopbackTransport) -> int:
        executor = Executor(plan, rank, transport, proved(plan), window=window, deadline_s=20)
        transfers = plan.transfers
        count = plan.size_bytes // DTYPE_BYTES[transfers.dtype]
        send = make_input(rank, count, transfers.dtype, transfers.reduction)
        kept, recv = send.copy(), np.zeros_like(send)
        executor.all_reduce(send, recv)
        assert np.array_equal(send, kept)
        executor.all_reduce(send, send)
        return wrong_elements(plan, rank, recv) + wrong_elements(plan, rank, send)

    return run_ranks(plan.n_ranks, body, topology=topology, deadline_s=30)


class TestExecutor:
    @pytest.mark.parametrize(("dtype", "reduction"), DATA)
    @pytest.mark.parametrize("n_ranks", [1, 2, 3])
    def test_equals_numpy(self, n_ranks: int, dtype: str, reduction: str) -> None:
        size_bytes = 37 * DTYPE_BYTES[dtype]
        for plan in (
            ring(n_ranks, size_bytes, dtype, reduction, segments=2),
            exchange(n_ranks, size_bytes, dtype, reduction, parts=2),
        ):
            assert all_reduce_everywhere(plan) == [0] * n_ranks

    @pytest.mark.parametrize("window", [1, 2, 16])
    @pytest.mark.parametrize("slots", [1, 4])
    def test_any_window_and_any_slots(self, window: int, slots: int) -> None:
        assert all_reduce_everywhere(ring(4, 1 << 16, segments=6, slots=slots), window=window) == [0] * 4

    def test_nothing_to_do(self) -> None:
        assert all_reduce_everywhere(ring(3, 0)) == [0] * 3
        assert all_reduce_everywhere(ring(1, 4096)) == [0]

    def test_runs_of_several_plans_follow_each_other_on_one_transport(self) -> None:
        plans = [ring(3, 4096, segments=3), exchange(3, 1024), ring(3, 240, segments=1)]

        def body(rank: int, transport: LoopbackTransport) -> int:
            executors = [Executor(plan, rank, transport, proved(plan), deadline_s=20) for plan in plans]
            wrong = 0
            for turn in range(30):
                plan, executor = plans[turn % 3], executors[turn % 3]
                data = make_input(rank, plan.size_bytes // 4, "float32", "sum", seed=turn)
                executor.all_reduce(data, data)
                wrong += wrong_elements(plan, rank, data, seed=turn)
            return wrong

        assert run_ranks(3, body) == [0, 0, 0]

    def test_refuses_arrays_that_do_not_fit(self) -> None:
        plan = ring(1, 64)
        with LoopbackNetwork(None, 1) as network:
            executor = Executor(plan, 0, network.transport(0), proved(plan))
            good = np.zeros(16, dtype=np.float32)
            for send, recv, message in (
                (good.astype(np.float64), good, "send: float64: must be the plan's float32"),
                (good, good[:8], "recv: 32 B: must be the plan's 64 B"),
                (np.zeros(32, dtype=np.float32)[::2], good, "send: must be contiguous"),
            ):
                with pytest.raises(InputError, match=message):
                    executor.all_reduce(send, recv)
            pool = np.zeros(24, dtype=np.float32)
            with pytest.raises(InputError, match="send and recv overlap"):
                executor.all_reduce(pool[:16], pool[8:])
            frozen = good.copy()
            frozen.setflags(write=False)
            with pytest.raises(InputError, match="read-only"):
                executor.all_reduce(good, frozen)
            with pytest.raises(InputError, match="buffer: 65 B: must be the plan's 64 B"):
                executor.run(np.zeros(65, dtype=np.uint8))
            with pytest.raises(InputError, match="must be aligned to float32"):
                executor.run(np.zeros(66, dtype=np.uint8)[1:65])

    @pytest.mark.parametrize("flaw", ["unknown", "another plan's"])
    def test_an_unproved_plan_is_refused_at_every_rank(self, flaw: str) -> None:
        plan = ring(2, 64)
        properties = dict.fromkeys(PROPERTIES, UNKNOWN if flaw == "unknown" else PROVED)
        verdict = Verdict(plan.digest if flaw == "unknown" else ring(2, 128).digest, properties)

        def body(rank: int, transport: LoopbackTransport) -> str:
            with pytest.raises(PlanError, match="must be") as caught:
                Executor(plan, rank, transport, verdict)
            return str(caught.value)

        assert "must be proved" in run_ranks(2, body)[0] or flaw != "unknown"

    def test_a_plan_for_other_ranks_is_refused(self) -> None:
        with LoopbackNetwork(None, 1) as network, pytest.raises(PlanError, match="2 ranks on a network of 1"):
            Executor(ring(2, 64), 0, network.transport(0), proved(ring(2, 64)))


class TestAgreement:
    @pytest.mark.battery(30, 40)
    def test_every_rank_names_who_differs(self) -> None:
        def body(rank: int, transport: LoopbackTransport) -> str:
            plan = ring(4, 1024 if rank == 2 else 4096)
            with pytest.raises(MismatchError) as caught:
                Executor(plan, rank, transport, proved(plan))
            return str(caught.value)

        assert run_ranks(4, body) == ["rank 2 differs from ranks 0, 1, 3: size_bytes 1024 instead of 4096"] * 4

    def test_a_rank_without_a_proof_is_named_and_refuses(self) -> None:
        plan = ring(3, 64)
        unknown = Verdict(plan.digest, dict.fromkeys(PROPERTIES, UNKNOWN))

        def body(rank: int, transport: LoopbackTransport) -> str:
            with pytest.raises(MismatchError) as caught:
                Executor(plan, rank, transport, unknown if rank == 1 else proved(plan))
            return str(caught.value)

        assert set(run_ranks(3, body)) == {"rank 1 differs from ranks 0, 2: verdict not proved instead of proved"}

    def test_explains_every_field_and_the_digest_last(self) -> None:
        one, other = Terms.of(ring(2, 64), True), Terms.of(ring(2, 64, "int32", "max"), True)
        assert explain([one, one]) == ""
        assert explain([one, other]) == (
            "rank 1 differs from rank 0: dtype int32 instead of float32; "
            "rank 1 differs from rank 0: reduction max instead of sum"
        )
        slots = Terms.of(ring(2, 64, slots=3), True)
        assert explain([one, slots]).startswith("rank 1 differs from rank 0: the plan's digest ")

    def test_records_come_back_as_they_were(self) -> None:
        for plan in (ring(3, 4096, "int64", "avg"), exchange(2, 8, "float64", "prod")):
            terms = Terms.of(plan, True)
            assert Terms.unpack(terms.pack()) == terms
        with pytest.raises(MismatchError, match="must be a record of optcc"):
            Terms.unpack(b"nonsense")


class TestFailure:
    def test_a_blocked_plan_ends_at_its_deadline_and_says_what_it_waited_for(self) -> None:
        draft = Draft(channels=[Channel(1, 0, 1)])
        transfer = draft.transfer(1, 0, COPY, 0, 0, 4)
        draft.add(0, 0, RECV, 4, recv=(0, transfer), dst_offset=0)
        plan = draft.finish("blocked", 2, 4, "int32", "sum")
        mistaken = sealed(Verdict(plan.digest, dict.fromkeys(PROPERTIES, PROVED)))

        def body(rank: int, transport: LoopbackTransport) -> None:
            executor = Executor(plan, rank, transport, mistaken, deadline_s=0.2)
            buffer = np.zeros(1, dtype=np.int32).view(np.uint8)
            if rank == 1:
                return executor.run(buffer)
            with pytest.raises(DeadlineExceeded, match="waits for message 0 of channel 1->0"):
                executor.run(buffer)
            with pytest.raises(RuntimeFault, match="a former run failed"):
                executor.run(buffer)
            return None

        begin = time.perf_counter()
        run_ranks(2, body, deadline_s=10)
        assert time.perf_counter() - begin < 5

    def test_the_failure_of_a_rank_ends_the_others_at_once(self) -> None:
        plan = ring(3, 4096)
        seen: list[str] = []

        def body(rank: int, transport: LoopbackTransport) -> None:
            executor = Executor(plan, rank, transport, proved(plan), deadline_s=30)
            if rank == 1:
                raise ValueError("broken on purpose")
            try:
                executor.run(np.zeros(4096, dtype=np.uint8))
            except OptccError as error:
                seen.append(f"{type(error).__name__}: {error}")
                raise

        begin = time.perf_counter()
        with pytest.raises(ValueError, match="broken on purpose"):
            run_ranks(3, body, deadline_s=30)
        assert time.perf_counter() - begin < 5
        assert seen == ["RankLost: rank 1 is lost: ValueError: broken on purpose"] * 2

    def test_ranks_that_never_come_are_named(self) -> None:
        def body(rank: int, transport: LoopbackTransport) -> None:
            if rank != 1:
                transport.allgather(b"x", 0.1)

        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s in vain for ranks 1 to agree"):
            run_ranks(3, body, deadline_s=10)

    def test_ranks_that_do_not_end_are_named(self) -> None:
        stuck = threading.Event()
        with pytest.raises(DeadlineExceeded, match=r"ranks 1: not done after 0\.2 s"):
            run_ranks(2, lambda rank, _: stuck.wait(0.5) if rank else True, deadline_s=0.2)

    def test_a_lost_rank_is_known_to_a_poll(self) -> None:
        with LoopbackNetwork(None, 2) as network:
            transport = network.transport(0)
            network.abort(1, "unplugged")
            with pytest.raises(RankLost, match="rank 1 is lost: unplugged"):
                transport.poll(1.0)


class TestLoopback:
    @pytest.mark.parametrize("n_ranks", [1, 2, 3])
    def test_keeps_the_promises_of_a_transport(self, n_ranks: int) -> None:
        assert len(run_ranks(n_ranks, lambda _, transport: check_transport(lambda: transport))[0]) == 14

    @pytest.mark.parametrize("text", ["3@1GB/s,1=400MB/s", "1x3@1GB/s"])
    def test_keeps_them_with_shaped_ports(self, text: str) -> None:
        topology = Topology.parse(text)
        run_ranks(3, lambda _, transport: check_transport(lambda: transport), topology=topology)

    def test_what_a_poll_has_returned_does_not_grow(self) -> None:
        """Another rank's thread may report an event while it is looked at: the event then came twice."""
        with LoopbackNetwork(None, 2) as network:
            sender, receiver = (network.transport(rank) for rank in range(2))
            (there,), (here,) = (each.open([Channel(0, 1, 1)]) for each in (sender, receiver))
            nothing = receiver.poll(0.0)
            receiver.post_recv(here, np.zeros(4, np.uint8))
            sender.post_send(there, np.ones(4, np.uint8))
            assert nothing == []
            assert receiver.poll(0.0) == [(RECEIVED, here)]

    def test_refuses_a_topology_that_it_cannot_be(self) -> None:
        with pytest.raises(InputError, match="topology of 3 ranks: must have 2"):
            LoopbackNetwork(Topology.parse("3@1GB/s"), 2)
        rails = Topology(Topology.parse("2@1GB/s").servers, rail_only=True)
        with pytest.raises(TopologyError, match="must not be rail-only"):
            LoopbackNetwork(rails, 2)

    def test_a_port_at_half_rate_takes_twice_as_long(self) -> None:
        # Long enough that some milliseconds of another process do not decide.
        plan = ring(3, 12 << 20, segments=4)

        def body(rank: int, transport: LoopbackTransport) -> float:
            executor = Executor(plan, rank, transport, proved(plan), deadline_s=20)
            data = np.zeros(plan.size_bytes, dtype=np.uint8)
            times: list[float] = []
            for _ in range(3):
                transport.barrier()
                begin = time.perf_counter()
                executor.run(data)
                transport.barrier()
                times.append(time.perf_counter() - begin)
            return min(times)

        whole, half = (
            max(run_ranks(3, body, topology=Topology.parse(text))) for text in ("3@80MB/s", "3@80MB/s,1=40MB/s")
        )
        assert 1.8 < half / whole < 2.2
        assert 0.99 < whole / (4 / 3 * plan.size_bytes / 80e6) < 1.25

    def test_latency_is_paid_once_a_message(self) -> None:
        topology = Topology.parse("2@1GB/s").with_latency(Topology.parse("2@50B/s").out[0] / 1000)  # 50 ms

        def body(rank: int, transport: LoopbackTransport) -> float:
            (handle,) = transport.open([Channel(0, 1, 4)])
            views = [np.zeros(10, dtype=np.uint8) for _ in range(4)]
            transport.barrier()
            begin = time.perf_counter()
            for view in views:
                (transport.post_recv if rank else transport.post_send)(handle, view)
            seen = 0
            while seen < 4:
                seen += len(transport.poll(1.0))
            return time.perf_counter() - begin

        sent_s, received_s = run_ranks(2, body, topology=topology)
        # Four latencies are 0.2 s, and who sends waits for none.
        assert 0.049 < received_s < 0.15 and sent_s < received_s - 0.03

    def test_rates_are_max_min_fair(self) -> None:
        assert max_min_rates([], []) == []
        assert max_min_rates([(0, 1)], [4.0, 9.0]) == [4.0]
        # Three flows out of port 0, one of them into a slow port: the others take what it leaves.
        assert max_min_rates([(0, 1), (0, 2), (0, 3)], [10.0, 2.0, 9.0, 9.0]) == [2.0, 4.0, 4.0]

    @settings(max_examples=8, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), shaped=st.booleans())
    def test_fuzz_is_exact(self, seed: int, shaped: bool) -> None:
        rng = random.Random(seed)
        n_ranks = rng.randint(2, 4)
        size_bytes = 8 * rng.randint(0, 5000)
        dtype, reduction = rng.choice(DATA)
        slots, window = rng.randint(1, 3), rng.randint(1, 4)
        if rng.random() < 0.5:
            plan = ring(n_ranks, size_bytes, dtype, reduction, segments=rng.randint(1, 4), slots=slots)
        else:
            plan = exchange(n_ranks, size_bytes, dtype, reduction, parts=rng.randint(1, 3), slots=slots)
        topology = Topology.parse(f"{n_ranks}@{rng.randint(20, 200)}MB/s,1=15MB/s") if shaped else None
        assert all_reduce_everywhere(plan, window=window, topology=topology) == [0] * n_ranks


class TestKernels:
    def test_an_integer_average_truncates_toward_zero(self) -> None:
        kernels = NumpyKernels("int64", "avg")
        data = np.array([-(2**63), -7, -6, -1, 0, 1, 7, 2**63 - 1], dtype=np.int64)
        kernels.finish(data, 3)
        assert data.tolist() == [-(2**63 // 3), -2, -2, 0, 0, 0, 2, (2**63 - 1) // 3]

    @pytest.mark.battery(39)
    @pytest.mark.parametrize("reduction", reductions_of("float32"))
    def test_a_nan_stays_a_nan(self, reduction: str) -> None:
        kernels = NumpyKernels("float32", reduction)
        dst = np.array([np.nan, 1.0], dtype=np.float32)
        kernels.reduce(dst, np.array([1.0, np.nan], dtype=np.float32))
        assert np.isnan(dst).all()

    def test_floats_are_summed_in_the_order_of_the_plan(self) -> None:
        kernels = NumpyKernels("float32", "sum")
        dst = np.array([1e8], dtype=np.float32)
        for value in (1.0, -1e8):
            kernels.reduce(dst, np.array([value], dtype=np.float32))
        assert dst[0] == 0.0


class TestCheck:
    @pytest.mark.parametrize(("dtype", "reduction"), DATA)
    def test_one_wrong_element_is_one(self, dtype: str, reduction: str) -> None:
        plan = ring(3, 100 * DTYPE_BYTES[dtype], dtype, reduction)
        output, defined = expected_output(plan.collective, 100, dtype, reduction, 1)
        assert defined.all()
        assert wrong_elements(plan, 1, output) == 0
        output[17] += 1
        assert wrong_elements(plan, 1, output) == 1

    def test_inputs_depend_on_rank_place_and_seed(self) -> None:
        a = make_input(0, 4096, "int32", "sum")
        for other in (
            make_input(1, 4096, "int32", "sum"),
            make_input(0, 4096, "int32", "sum", seed=1),
            np.roll(a, 1024),
        ):
            assert (a != other).mean() > 0.9


class _Silence(LoopbackTransport):
    """Nothing ever comes, and time passes only in `poll`."""

    def __init__(self) -> None:
        super().__init__(LoopbackNetwork(None, 1), 0)
        self.at_s = 0.0
        self.waits_s: list[float] = []

    def now_s(self) -> float:
        return self.at_s

    def sleep_s(self, seconds: float) -> None:
        self.at_s += seconds

    def poll(self, timeout_s: float) -> list[Event]:
        self.waits_s.append(timeout_s)
        self.at_s += timeout_s
        return []


class _Message:
    """What a handle may be of."""

    observed = 0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def report(self) -> str:
        return "nothing comes"


@pytest.mark.parametrize("deadline_s", [0.05, 0.4])
def test_the_loop_waits_until_a_deadline_or_a_look_and_no_longer(deadline_s: float) -> None:
    silence = _Silence()
    engine = Engine(silence, clock=silence)
    looks: list[float] = []
    engine.look_aside = lambda: looks.append(silence.at_s) or 0.25  # type: ignore[func-returns-value]
    engine.enter(Handle(_Message(engine), None, 10.0))
    assert not engine.wait_for(NEVER, 0.9)
    assert looks == [0.0, 0.25, 0.5, 0.75]
    assert silence.at_s == 0.9
    # One that is due before the next look, or behind two more.
    engine.enter(Handle(_Message(engine), None, deadline_s))
    with pytest.raises(DeadlineExceeded, match=rf"not done after {deadline_s} s: nothing comes"):
        engine.wait_for(NEVER, 5.0)
    assert silence.at_s == pytest.approx(0.9 + deadline_s)
    assert max(silence.waits_s) <= 0.25
