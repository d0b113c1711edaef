"""The peer `nccl` before it runs: what is missing, and what it lacks, is said. How it runs is in `tests/mpi`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from optcc.collective import Collective
from optcc.commands.bench import command
from optcc.errors import ArgumentError, EnvironmentMissing, InputError
from optcc.experiments.nccl_peer import NcclPeer, load_nccl
from optcc.runtime.rendezvous import Meeting
from tests.unit import stand_in_nccl
from tests.unit.stand_in_cupy import StandIn
from tests.unit.stand_in_nccl import Nccl

ELSEWHERE = ("", "another host", "0000:00:00.0")


def make(dtype: str = "float32", reduction: str = "sum", name: str = "allreduce", other: Any = ELSEWHERE) -> NcclPeer:
    """The peer on GPU 0 at the first of two ranks; the other one says `other`, or the same."""

    def meet(record: bytes) -> Meeting:
        return Meeting(0, 2, b"", b"", (record, record if other is None else msgspec.json.encode(other)))

    return NcclPeer(meet, dtype, reduction, Collective(name, 2), 0)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, seed: int) -> StandIn:
    """With NCCL."""
    made = StandIn(seed)
    made.cuda.nccl = Nccl(made)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def test_without_nccl_it_says_so(cupy: StandIn) -> None:
    for nccl in (None, SimpleNamespace(available=False)):
        cupy.cuda.nccl = nccl
        with pytest.raises(EnvironmentMissing, match="rank 0: peer nccl: CuPy finds no NCCL: pip install nvidia-nccl"):
            make()


def test_a_binding_that_cupy_does_not_import_itself_is_found(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is since CuPy 14."""
    there = cupy.cuda.nccl
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", there)
    del cupy.cuda.nccl
    assert load_nccl() is there


@pytest.mark.parametrize("is_old", [False, True])
def test_the_id_of_a_job_comes_as_cupy_wants_it(cupy: StandIn, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in_nccl, "Communicator", lambda _, n_ranks, rank: (n_ranks, rank))
    cupy.cuda.nccl = Nccl(cupy, is_old=is_old)
    assert make()._comm == (2, 0)


def test_a_rank_without_it_is_named_at_all(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentMissing, match="rank 1: GPU: none"):
        make(other=("GPU: none", "", ""))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EnvironmentMissing, match=r"rank 0: GPU: .*pip install 'optcc"):
        make()


def test_two_ranks_of_one_gpu_are_refused(cupy: StandIn) -> None:
    with pytest.raises(EnvironmentMissing, match=r"ranks 0 and 1 are on the GPU 0000:00:00.0 of .*: NCCL takes one"):
        make(other=None)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (("bfloat16", "sum"), "it has no bfloat16"),
        (("int32", "bxor"), "it has no bxor"),
        (("int32", "sum", "gather"), "gather: must be one of allreduce"),
    ],
)
def test_what_it_lacks_is_said(cupy: StandIn, given: tuple[str, ...], what: str) -> None:
    with pytest.raises(ArgumentError, match=f"peer nccl: {what}"):
        make(*given)


def test_pieces_that_are_not_equal_are_refused(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.nccl, "NcclCommunicator", lambda *_: None)
    peer = make(name="allgather")
    with pytest.raises(ArgumentError, match="peer nccl: allgather: 5 elements of 2 ranks: must be equal pieces"):
        peer.run(cupy.zeros(3, "float32"), cupy.zeros(5, "float32"))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--peer", "nccl"), "--peer nccl: must be with --device gpu"),
        (("--peer", "nccl", "--device", "gpu", "--schedule", "ring"), "--schedule ring, --peer nccl: --peer nccl must"),
        (("--peer", "nccl", "--device", "gpu", "--peer", "mpi"), "--peer nccl, --peer mpi: --peer nccl must be alone"),
        (("--peer", "nccl", "--device", "gpu", "--transport", "loopback", "-g", "2"), "--peer nccl: needs --transport"),
        (("--device-path", "ipc"), "--device-path ipc: must be with --device gpu"),
    ],
)
def test_a_bench_of_it_is_in_a_job_of_its_own_on_gpus(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError, match=what):
        CliRunner().invoke(command, list(words), standalone_mode=False, catch_exceptions=False)
