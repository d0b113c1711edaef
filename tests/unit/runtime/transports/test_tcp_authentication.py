"""Authenticated frames over real sockets: results to the bit, damage that is sent again, and ranks that differ."""

from __future__ import annotations

import threading

import pytest

from optcc.errors import InputError, MismatchError
from optcc.runtime.protocol.sealing import TAG_BYTES, Sealer
from optcc.runtime.transports.tcp import TcpTransport, authenticates
from tests.unit.rank_threads import Room
from tests.unit.runtime.transports.tcp_ranks import SMALL, nics_of, plan_of, reduce_over, run_tcp, without_faults


def test_wrong_tags_cost_their_connections_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Sealer.seal, [0]

    def damaged(sealer: Sealer, content: bytes) -> bytes:
        record = real(sealer, content)
        if len(content) < 1000:
            return record
        calls[0] += 1
        at = {20: len(record) - TAG_BYTES, 45: len(record) // 2}.get(calls[0] % 50)
        return record if at is None else record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]

    monkeypatch.setattr(Sealer, "seal", damaged)
    plan, verdict = plan_of("ring", 60_001, "float32")

    def body(_: int, transport: TcpTransport) -> tuple[list[bytes], int]:
        return reduce_over(transport, plan, verdict, 3), transport.counts.damaged

    results = run_tcp(4, body, authenticate=True, **SMALL)
    assert [result for result, _ in results] == without_faults("ring", 60_001, "float32", 3)
    assert sum(n_damaged for _, n_damaged in results) > 0


def test_ranks_of_which_one_authenticates_say_who() -> None:
    room, seen = Room(2), list[str]()

    def body(rank: int) -> None:
        with pytest.raises(MismatchError) as caught:
            TcpTransport(room.meet(rank), nics_of(rank, 1), authenticate=rank == 1)
        seen.append(str(caught.value))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert sorted(seen) == [
        "rank 0 differs from rank 1: authenticate False instead of True",
        "rank 1 differs from rank 0: authenticate True instead of False",
    ]


@pytest.mark.parametrize("authenticate", [False, True])
def test_the_record_of_a_rank_is_what_it_was_unless_it_authenticates(authenticate: bool) -> None:
    room, records = Room(1), list[bytes]()

    def meet(record: bytes) -> object:
        records.append(record)
        return room.meet(0)(record)

    TcpTransport(meet, nics_of(0, 1), authenticate=authenticate).close()  # type: ignore[arg-type]
    assert records[0].endswith(b',"inside":null,"authenticate":true}' if authenticate else b',"inside":null}')


def test_the_variable_is_zero_or_one() -> None:
    assert not authenticates({"OPTCC_AUTHENTICATE": "0"}) and not authenticates({"OPTCC_AUTHENTICATE": ""})
    with pytest.raises(InputError, match=r"^OPTCC_AUTHENTICATE 'yes': must be 0 or 1$"):
        authenticates({"OPTCC_AUTHENTICATE": "yes"})
