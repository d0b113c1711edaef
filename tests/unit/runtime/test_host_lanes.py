"""Memory that ranks of one host share: segments, who shares them, and plans whose messages go through them."""

from __future__ import annotations

import errno
import gc
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import RuntimeFault
from optcc.plan import Plan
from optcc.planner import Planner
from optcc.runtime import host_lanes, host_memory
from optcc.runtime.communicator import Communicator
from optcc.runtime.conformance import check_transport
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.host_memory import HostPath, SharedSegment, open_segment, path_of, share_memory
from optcc.runtime.nics import HostNic
from optcc.runtime.samples import exchange, ring
from optcc.runtime.shared_lanes import SharedLanes
from optcc.runtime.transport import RECEIVED
from optcc.runtime.transports.tcp import TcpTransport, open_tcp
from optcc.schedules.optcc import optcc
from optcc.topology import Topology
from tests.unit.device_ranks import Job
from tests.unit.rank_threads import Room, run_threads
from tests.unit.runtime.transports.tcp_ranks import plan_of, reduce_over, without_faults

T = TypeVar("T")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in `/dev/shm` for the segments of a test; when it is over, none has a name."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="optcc-test-") as made:
        monkeypatch.setattr(host_memory, "FOLDER", made)
        yield Path(made)
        assert list(Path(made).iterdir()) == []


def on_two_hosts(function: Callable[[int, TcpTransport], T], n_ranks: int = 4, n_hosts: int = 2) -> list[T]:
    """Ranks as threads: two on a host, the others on the next, which have a NIC each."""
    room = Room(n_ranks)

    def make(rank: int) -> TcpTransport:
        host = min(n_hosts - 1, rank // 2)
        nics = [HostNic("r0", f"127.0.1.{host + 1}")]
        return TcpTransport(room.meet(rank), nics, inside=HostNic(f"inside {host}", "127.0.0.1"))

    return run_threads(n_ranks, make, function)


def sent_inside(transport: TcpTransport) -> int:
    """Bytes that this rank has sent to those of its host by sockets."""
    assert transport.inside is not None
    return transport.inside.sent_bytes


# --- segments ---------------------------------------------------------------------------------------------------------


def test_a_segment_is_opened_by_its_name_and_only_by_this_user(folder: Path) -> None:
    segment = SharedSegment(3 * 4096 + 5)
    (name,) = folder.iterdir()
    assert stat.S_IMODE(name.stat().st_mode) == 0o600
    other = open_segment(segment.record)
    segment.forget()
    with pytest.raises(FileNotFoundError):
        open_segment(segment.record)
    other[:] = 7
    assert (segment.array == 7).all() and segment.array.nbytes == 3 * 4096 + 5
    segment.free()  # who still refers to it reads zeros
    assert not segment.array.any() and not other.any()


def test_a_segment_keeps_no_file_open() -> None:
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    segments = [SharedSegment(4096) for _ in range(5)]
    others = [open_segment(each.record) for each in segments]
    for each in segments:
        each.forget()
    assert len(list(Path("/proc/self/fd").iterdir())) == before and len(others) == 5


def test_its_memory_ends_with_the_last_reference() -> None:
    def n_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(host_memory._PREFIX)

    gc.collect()
    before = n_mapped()
    segment = SharedSegment(5 * MIB)
    segment.forget()
    part: Any = segment.array[4096:8192].view(np.float32)
    del segment
    assert n_mapped() == before + 1
    del part
    assert n_mapped() == before


def test_no_room_is_an_error_and_leaves_nothing(folder: Path) -> None:
    found = os.statvfs(folder)
    if not found.f_blocks:
        pytest.skip("no limit in /dev/shm")
    with pytest.raises(OSError, match="No space left") as error:
        SharedSegment((found.f_blocks + 1) * found.f_frsize)
    assert error.value.errno == errno.ENOSPC and list(folder.iterdir()) == []


def test_what_is_not_the_segment_that_was_named_is_not_opened(folder: Path) -> None:
    segment = SharedSegment(4096)
    (name,) = folder.iterdir()
    os.truncate(name, 4000)
    with pytest.raises(OSError, match=r"4000 B of user .*must be 4096 B"):
        open_segment(segment.record)
    name.unlink()
    name.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        open_segment(segment.record)
    segment.forget()


# --- who shares memory ------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_share_memory() -> None:
    def body(_: int, transport: TcpTransport) -> HostPath:
        assert path_of(transport).why.startswith("not tried")
        return share_memory(transport)

    (path,) = set(on_two_hosts(body, 5))
    assert (path.hosts, str(path)) == ((0, 0, 2, 2, 2), "shared memory: 5 of 5 ranks")


def test_a_transport_that_shares_memory_keeps_its_promises() -> None:
    def body(_: int, transport: TcpTransport) -> int:
        share_memory(transport)
        return len(check_transport(lambda: transport))

    assert on_two_hosts(body, 3, 1) == [14] * 3


def test_a_host_with_a_rank_that_cannot_or_will_not_uses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers with a /dev/shm each; other hosts share memory all the same."""
    opens = host_memory.open_segment

    def body(rank: int, transport: TcpTransport) -> HostPath:
        cannot.add(threading.get_ident() if rank == 1 else 0)
        transport.barrier()
        return share_memory(transport, refused="turned off" if rank in refusing else "")

    def elsewhere(record: bytes) -> Any:
        if threading.get_ident() in cannot:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return opens(record)

    cannot: set[int] = set()
    refusing: set[int] = {2}
    (path,) = set(on_two_hosts(body))
    assert (path.hosts, str(path)) == ((0, 0, -1, -1), "shared memory: 2 of 4 ranks; rank 2: turned off")
    monkeypatch.setattr(host_memory, "open_segment", elsewhere)
    refusing, cannot = set(), set()
    (path,) = set(on_two_hosts(body))
    assert path.hosts == (-1, -1, 2, 2)
    assert str(path).startswith("shared memory: 2 of 4 ranks; rank 1: cannot open the segment of rank 0 in /dev/shm/")
    assert str(path).endswith("No such file or directory")


def test_another_segment_of_that_name_is_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "open_segment", lambda record: np.zeros(len(record), np.uint8))
    (path,) = set(on_two_hosts(lambda _, transport: share_memory(transport), 2, 1))
    assert path.hosts == () and "the segment of rank 1" in path.why and path.why.endswith("is another one")


def test_where_nothing_can_be_made_they_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_path", lambda name: f"/nowhere/{name.hex()}")
    (path,) = set(on_two_hosts(lambda _, transport: share_memory(transport), 2, 1))
    assert path.hosts == () and path.why.endswith("No such file or directory")


def test_who_names_an_interface_or_says_so_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcc.runtime.transports.tcp.inside_of", lambda nics, environ: HostNic("here", "127.0.0.1"))

    def paths(environ: dict[str, str], **options: Any) -> set[str]:
        room = Room(2)

        def make(rank: int) -> TcpTransport:
            return open_tcp(room.meet(rank), [HostNic("r0", "127.0.1.1")], environ, **options)

        return set(run_threads(2, make, lambda _, transport: str(path_of(transport))))

    assert paths({}) == {"shared memory: 2 of 2 ranks"}
    assert paths({}, shared_memory=False) == {"TCP: rank 0: turned off"}
    assert paths({"OPTCC_INSIDE_IFNAME": "in"}) == {"TCP: rank 0: OPTCC_INSIDE_IFNAME names the interface"}


def test_names_that_a_killed_process_left_are_removed(folder: Path) -> None:
    kept = SharedSegment(4096)
    (young,) = folder.iterdir()
    old = folder / f"{host_memory._PREFIX}ab"
    old.touch()
    os.utime(old, (time.time() - 4000,) * 2)
    on_two_hosts(lambda _, transport: share_memory(transport), 2, 1)
    assert list(folder.iterdir()) == [young]
    kept.forget()


# --- plans ------------------------------------------------------------------------------------------------------------


def test_reduces_to_the_bits_of_loopback_and_sends_no_data_inside() -> None:
    plan, verdict = plan_of("optcc", 262_144, "float32")
    sent = {}

    def body(rank: int, transport: TcpTransport) -> list[bytes]:
        share_memory(transport)
        results = reduce_over(transport, plan, verdict, 2)
        sent[rank] = sent_inside(transport)
        return results

    assert on_two_hosts(body) == without_faults("optcc", 262_144, "float32", 2)
    assert max(sent.values()) < 1 << 16, sent


def all_reduces(transport: TcpTransport, sizes: list[int], n_ranks: int) -> Communicator:
    comm = Communicator(transport, Planner(Topology.parse(f"{n_ranks}@1GB/s"), schedules={"allreduce": "ring"}))
    for size in sizes:
        given = np.full(size // 4, 1 + comm.rank, np.float32)
        assert (comm.all_reduce(given) == n_ranks * (n_ranks + 1) / 2).all()
    return comm


def test_short_messages_go_by_sockets() -> None:
    def body(_: int, transport: TcpTransport) -> bool:
        share_memory(transport)
        comm = all_reduces(transport, [3 * host_lanes.SHARED_BYTES_MIN], 3)
        assert comm.last_plan is not None
        return comm.last_plan.shared is None

    assert all(on_two_hosts(body, 3, 1))


def test_a_plan_for_which_there_is_no_room_goes_by_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At all ranks, and the next plan for which there is room does not."""
    allocates = os.posix_fallocate
    full = [True]

    def allocate(file: int, start: int, n_bytes: int) -> None:
        if n_bytes > 4096 and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocates(file, start, n_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)

    def body(_: int, transport: TcpTransport) -> list[bool]:
        share_memory(transport)
        found = []
        for size, is_full in ((3 * MIB, True), (6 * MIB, False)):
            transport.barrier()
            full[0] = is_full
            transport.barrier()
            comm = all_reduces(transport, [size], 3)
            assert comm.last_plan is not None
            found.append(comm.last_plan.shared is None)
            comm.drop_plans()
        return found

    assert on_two_hosts(body, 3, 1) == [[True, False]] * 3
    (said,) = [record.message for record in caplog.records if "shared memory" in record.message]
    assert said.endswith("no shared memory inside hosts: rank 0: [Errno 28] No space left on device")


def test_a_plan_that_is_closed_gives_its_memory_back(folder: Path) -> None:
    def body(_: int, transport: TcpTransport) -> bool:
        share_memory(transport)
        comm = all_reduces(transport, [3 * MIB], 3)
        prepared = comm.last_plan
        assert prepared is not None and prepared.shared is not None
        segment = prepared.shared._memory._segment  # type: ignore[attr-defined]
        assert segment.array.any() and list(folder.iterdir()) == []
        comm.barrier()
        comm.drop_plans()
        return bool(segment.array.any())

    assert on_two_hosts(body, 3, 1) == [False] * 3


def test_a_child_that_is_forked_does_not_disturb_and_frees_nothing() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        share_memory(transport)
        comm = all_reduces(transport, [3 * MIB], 2)
        prepared = comm.last_plan
        assert prepared is not None and prepared.shared is not None
        segment = prepared.shared._memory._segment  # type: ignore[attr-defined]
        before = segment.array.copy()
        comm.barrier()
        if rank == 0:
            child = os.fork()
            if not child:
                try:
                    prepared.close()
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert (segment.array == before).all()
        comm.barrier()
        assert (comm.all_reduce(np.ones(3 * MIB // 4, np.float32)) == 2).all()

    on_two_hosts(body, 2, 1)


# --- in every order ---------------------------------------------------------------------------------------------------

COUNT = 600
HOSTS = [(0, 0, 0, 0), (0, 0, 2, 2), (0, 0, 0, -1)]


def plans() -> list[Plan]:
    topology = Topology.parse("4@1GB/s,3=500MB/s")
    return [
        ring(4, COUNT * 4, segments=3),
        exchange(4, COUNT * 4, parts=6),
        compile_schedule(optcc.build(topology, 2), size_bytes=COUNT * 4, dtype="float32", topology=topology),
    ]


def wrong_in(job: Job, seed: int) -> int:
    """Wrong elements of a run in the order of a seed, over a network that writes anything where a message arrives."""
    job.network.rng = random.Random(seed)
    inputs = [make_input(rank, COUNT, "float32", "sum", seed) for rank in range(4)]
    outputs = job.reference(inputs, COUNT)
    return sum(wrong_elements(job.plan, rank, each, seed) for rank, each in enumerate(outputs))


@pytest.mark.parametrize("plan", plans(), ids=["ring", "exchange", "optcc"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_is_right_in_every_order(plan: Plan, hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lanes, "SHARED_BYTES_MIN", 0)
    for window in (1, 3):
        job = Job(None, plan, window=window, hosts=hosts)
        assert all(each.shared is not None and each.shared.channels for each in job.plans)
        assert [wrong_in(job, seed) for seed in range(12)] == [0] * 12


def without_credit(patch: pytest.MonkeyPatch) -> None:
    """A message is copied into the slot of the one before, without waiting for its own credit."""
    follow = SharedLanes._follow

    def hurry(lanes: SharedLanes, channel: int, event: tuple[int, int]) -> None:
        (offset,) = lanes._coming[channel][0].view(np.uint64) if event[0] == RECEIVED else (0,)
        follow(lanes, channel, event)
        if event[0] == RECEIVED and lanes._queues[channel]:
            lanes._memory.write(lanes._receivers[channel], int(offset), lanes._queues[channel][0], lambda: None)

    patch.setattr(SharedLanes, "_follow", hurry)


def with_early_notice(patch: pytest.MonkeyPatch) -> None:
    """The notice of a message is sent before it is copied."""
    send = SharedLanes.post_send

    def hurry(lanes: SharedLanes, channel: int, view: Any) -> None:
        send(lanes, channel, view)
        if channel in lanes.handles:
            lanes._transport.post_send(channel, np.zeros(1, np.uint8))

    patch.setattr(SharedLanes, "post_send", hurry)


@pytest.mark.parametrize("plant", [without_credit, with_early_notice])
def test_a_fault_in_the_order_of_credit_copy_and_notice_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lanes, "SHARED_BYTES_MIN", 0)
    plan = exchange(4, COUNT * 4, parts=6)
    plant(monkeypatch)

    def goes_wrong(seed: int) -> bool:
        try:
            return wrong_in(Job(None, plan, window=3, hosts=HOSTS[0]), seed) > 0
        except (AssertionError, RuntimeFault, ValueError):
            return True

    assert any(goes_wrong(seed) for seed in range(30))
