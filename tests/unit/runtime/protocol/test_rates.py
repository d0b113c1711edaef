"""What a rank makes of the rates of NICs: what it tells, what it hears, and how it divides what it sends."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optcc.plan import Channel
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.frames import RATE_FRAME, RATE_TURNS, RateWord, control_header
from optcc.runtime.protocol.nic_meter import LOADED_BYTES, Carried
from optcc.runtime.protocol.rates import Rates
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import Network, endpoint_of

RATE = 25_000_000


def looked(waiting: tuple[int, int], theirs: int = RATE, hosts: tuple[int, ...] = (0, 1)) -> list[tuple[int, int]]:
    """(loaded, alone) of both NICs after a look at which so much waits on them; the peer's first NIC takes `theirs`."""
    connections = [SimpleNamespace(awaits=True, suspect=False, waiting_bytes=n) for n in waiting]
    rails = [SimpleNamespace(mine=nic, theirs=nic, connection=each) for nic, each in enumerate(connections)]
    book = [[("", "", 0, RATE, RATE)] * 2, [("", "", 0, RATE, theirs), ("", "", 0, RATE, RATE)]]
    local: Any = SimpleNamespace(
        rank=0,
        own_nics=book[0],
        book=book,
        settings=SimpleNamespace(learn_rates=True),
        is_inside=lambda src, dst: src == dst,
        hosts=hosts,
        mates=[[mate for mate, other in enumerate(hosts) if other == host] for host in hosts],
    )
    outbounds: Any = {1: SimpleNamespace(peer=1, direct=rails)}
    rates = Rates(local, outbounds)
    rates.look(0.01)
    return [(meter._loaded, meter._alone) for meter in rates._meters]


@pytest.mark.parametrize("other_bytes", [0, LOADED_BYTES])
def test_a_nic_is_alone_only_while_nothing_much_waits_on_the_other(other_bytes: int) -> None:
    wanted = [(1, 1), (0, 0)] if other_bytes == 0 else [(1, 0), (1, 0)]
    assert looked((LOADED_BYTES, other_bytes)) == wanted


def test_nics_that_others_of_the_host_use_too_are_not_judged() -> None:
    assert looked((LOADED_BYTES, 0), hosts=(0, 1, 0)) == [(0, 0), (0, 0)]


@pytest.mark.parametrize(("theirs", "is_loaded"), [(RATE, True), (RATE * 9 // 10, True), (RATE // 2, False)])
def test_a_nic_that_waits_for_a_slower_one_at_the_other_end_is_not_loaded(theirs: int, is_loaded: bool) -> None:
    assert looked((LOADED_BYTES, 0), theirs) == [(is_loaded, is_loaded), (0, 0)]


def test_rails_carry_what_their_nics_turn_out_to_be_good_for() -> None:
    """The rates are not declared; then a rank finds that its second NIC sends a third of what the first one does, and
    later that it does not: the others hear of it, and what goes out from then on is divided so, or as before."""
    network = Network(2, learn_rates=True)
    handles = network.open((0, 1), (1, 0))
    network.barrier()
    network.until(network.all_up)
    views = [np.zeros(4 << 20, np.uint8) for _ in range(2)]
    seen: list[list[list[float]]] = [[], []]
    for share in (1 / 3, 1.0):
        network.endpoints[0].rates.know(1, share, 1.0)
        network.barrier()
        before = [[rail.sent_bytes for rail in endpoint.rail_counts] for endpoint in network.endpoints]
        for _ in range(12):
            for rank in range(2):
                network.post_send(rank, handles[rank][rank], views[0])
                network.post_recv(rank, handles[rank][1 - rank], views[1])
            for rank in range(2):
                events = network.poll(rank)
                assert sorted(events) == sorted([(SENT, handles[rank][rank]), (RECEIVED, handles[rank][1 - rank])])
        for rank, endpoint in enumerate(network.endpoints):
            sent = [rail.sent_bytes - at for rail, at in zip(endpoint.rail_counts, before[rank], strict=True)]
            seen[rank].append([sent[0] / sum(sent), endpoint.rates.known(0, 1)[0], endpoint.rail_counts[1].out_share])
    first, second = seen
    assert [each[0] for each in first] == pytest.approx([0.75, 0.5], abs=0.03), first
    assert [each[0] for each in second] == pytest.approx([0.5, 0.5], abs=0.03), "its own NICs are as declared"
    for rank, each_seen in enumerate((first, second)):
        assert [each[1] for each in each_seen] == pytest.approx([1 / 3, 1.0], abs=1e-3), "both know"
        assert [each[2] for each in each_seen] == ([1 / 3, 1.0] if rank == 0 else [1.0, 1.0])


def test_ranks_learn_that_a_nic_is_down_and_divide_by_it() -> None:
    """Three ranks that all send to each other: rank 2 has one NIC left, so that the others go round it."""
    pairs = [(src, dst) for src in range(3) for dst in range(3) if src != dst]
    network = Network(3, learn_rates=True)
    network.open(*pairs, carried=[1 << 20] * len(pairs))
    network.barrier()
    network.until(network.all_up)
    parts: list[list[list[float]]] = [[], [], []]
    for is_up in (False, True):
        network.endpoints[2].rates.note_nic(0, is_up)
        network.barrier()
        for rank, endpoint in enumerate(network.endpoints):
            parts[rank] += [list(endpoint.outbounds[peer]._parts or ()) for peer in range(3) if peer != rank]
    assert parts[0][0] == pytest.approx([1.0, 0.0], abs=0.05), "to rank 1, past the NIC that is busy with rank 2"
    assert parts[0][1] == parts[1][1] == parts[2][0] == pytest.approx([0.0, 1.0], abs=0.01), "all that rank 2 has left"
    assert parts[0][2:] == parts[1][2:] == parts[2][2:] == [[], []], "as declared"


def test_messages_of_plans_that_are_opened_for_agreed_rates_keep_to_how_they_are_cut() -> None:
    """NICs of rank 0 are slow: over a channel that was opened before, chunks are divided; over one opened since, they
    go as both ends cut them, until a NIC carries less than that. More does not matter."""
    network = Network(2, rates=(1000, 1000), learn_rates=True)
    ((old,), _) = network.open((0, 1), carried=[1 << 20])
    network.barrier()
    network.until(network.all_up)
    shares = (((0.8, 1.0), (0.5, 1.0)), ((1.0, 1.0), (1.0, 1.0)))
    for endpoint in network.endpoints:
        endpoint.rates.take_measured(shares[endpoint.rank])
        endpoint.stripe_for(shares)
    network.barrier()
    (new,), (new_in,) = (each.open([Channel(0, 1, 1)], 1, [1 << 20]) for each in network.endpoints)
    out, channels = network.endpoints[0].outbounds[1], [network.endpoints[0].sending(each)[1] for each in (old, new)]
    assert [out._divides(each) for each in channels] == [True, False]
    assert channels[1].striping.parts[0] == pytest.approx(1.6 * channels[1].striping.parts[1], rel=0.02)
    assert network.endpoints[1].receiving(new_in)[1].striping.parts == channels[1].striping.parts

    def divides(out_share: float) -> list[bool]:
        network.endpoints[0].rates.know(1, out_share, 1.0)
        return [out._divides(each) for each in channels]

    assert divides(1.0) == [True, False] and divides(0.3) == [True, True] and divides(0.48) == [True, False]
    network.endpoints[0].rates.note_nic(0, False)
    assert [out._divides(each) for each in channels] == [True, True]
    # Where a NIC is known to be lost, nothing is cut for it.
    for endpoint in network.endpoints:
        endpoint.stripe_for((((0.0, 0.0), (0.5, 1.0)), ((1.0, 1.0), (1.0, 1.0))))
    (last,), _ = (each.open([Channel(0, 1, 1)], 2, [1 << 20]) for each in network.endpoints)
    assert network.endpoints[0].sending(last)[1].striping.parts[0] == 0


def cut_for(shares: Shares, pair: tuple[int, int], *, keeps_to_own: bool, n_nics: int = 4) -> tuple[int, ...]:
    """What each rail of a pair carries of a plan for NICs that carry these shares, in percent; the same at both ends.

    Two hosts of two ranks; between them each rank sends to the one in its place.
    """
    pairs = [(0, 2), (1, 3), (2, 0), (3, 1)]
    parts: list[tuple[int, ...]] = []
    for rank in pair:
        endpoint = endpoint_of(rank, 4, n_nics, (1000,) * n_nics, ranks_per_host=2, learn_rates=True)
        endpoint.keeps_to_own = keeps_to_own
        endpoint.stripe_for(shares)
        handles = endpoint.open([Channel(*each, 1) for each in pairs], 0, [1 << 20] * len(pairs))
        end = (endpoint.sending if rank == pair[0] else endpoint.receiving)(handles[pairs.index(pair)])[1]
        parts.append(end.striping.parts)
    assert parts[0] == parts[1]
    return tuple(round(100 * part / sum(parts[0])) for part in parts[0])


def shares_of(*given: tuple[int, int, float], n_nics: int = 4) -> Shares:
    """Of four ranks, where NIC (rank, number, share) is as given and all others are as declared."""
    return tuple(
        tuple(
            next(((share, share) for at, its, share in given if (at, its) == (rank, nic)), (1.0, 1.0))
            for nic in range(n_nics)
        )
        for rank in range(4)
    )


@pytest.mark.parametrize(
    ("given", "pair", "own", "pooled"),
    [
        ((), (0, 2), (50, 50, 0, 0), (25, 25, 25, 25)),
        (((0, 1, 0.5), (1, 1, 0.5)), (0, 2), (67, 33, 0, 0), (29, 14, 29, 29)),
        (((0, 1, 0.5), (1, 1, 0.5)), (1, 3), (0, 0, 50, 50), (29, 14, 29, 29)),
        (((0, 1, 0.5), (1, 1, 0.5)), (2, 0), (67, 33, 0, 0), (29, 14, 29, 29)),
        (((0, 1, 0.0), (1, 1, 0.0)), (0, 2), (100, 0, 0, 0), (33, 0, 33, 33)),
        (((0, 1, 0.0), (1, 1, 0.0)), (2, 0), (100, 0, 0, 0), (33, 0, 33, 33)),
        # One of its ranks has found out that the NIC is lost.
        (((1, 1, 0.0),), (0, 2), (100, 0, 0, 0), (33, 0, 33, 33)),
        # None is left of its own.
        (((0, 0, 0.0), (0, 1, 0.0)), (0, 2), (0, 0, 50, 50), (0, 0, 50, 50)),
    ],
)
def test_messages_between_hosts_of_several_ranks_are_cut_for_the_agreed_rates(
    given: tuple[tuple[int, int, float], ...],
    pair: tuple[int, int],
    own: tuple[int, ...],
    pooled: tuple[int, ...],
) -> None:
    for keeps_to_own, wanted in ((True, own), (False, pooled)):
        parts = cut_for(shares_of(*given), pair, keeps_to_own=keeps_to_own)
        assert parts == pytest.approx(wanted, abs=1), (keeps_to_own, parts)
        assert [part == 0 for part in parts] == [part == 0 for part in wanted]


def test_a_nic_that_ranks_share_is_agreed_to_carry_the_least_that_one_of_them_knows() -> None:
    """A rank of a host learns later, or never, that one of the NICs is lost: what was agreed is true for it too."""
    endpoint = endpoint_of(1, 4, 4, (1000,) * 4, ranks_per_host=2, learn_rates=True)
    endpoint.rates.hear(0, RateWord(1, 0, 1, 0.0, 0.0).number)
    assert endpoint.rates.known(1, 1) == (1.0, 1.0)
    assert endpoint.rates.shared(1, 1) == endpoint.rates.shared(0, 1) == (0.0, 0.0)
    endpoint.stripe_for(shares_of((0, 1, 0.0), (1, 1, 0.0)))
    assert endpoint.rates._is_agreed()
    endpoint.rates.hear(0, RateWord(2, 0, 1, 1.0, 1.0).number)
    assert endpoint.rates.shared(1, 1) == endpoint.rates.shared(0, 1) == (1.0, 1.0)


def test_a_nic_that_was_measured_is_not_faster_because_others_have_little_to_send() -> None:
    """The NICs of rank 0, at half of what they can, send to one that was measured to take in half: what that lets
    through at once after a pause, in a few milliseconds of each window, says nothing."""
    network = Network(2, rates=(10**8, 10**8), learn_rates=True)
    network.open((0, 1), (1, 0))
    network.until(network.all_up)
    for endpoint, in_ in zip(network.endpoints, (1.0, 0.5), strict=True):
        endpoint.rates.take_measured(((1.0, 1.0), (1.0, in_)))
    network.settle()
    rates = network.endpoints[0].rates
    for meter in rates._meters:
        for _ in range(8):
            meter.close(Carried(4_000_000, 4_000_000, 0.08, 0.08, 0.08), 0.08)
    for n_bytes, open_s, known in ((4_000_000, 0.08, 0.5), (1_000_000, 0.012, 0.5), (7_600_000, 0.08, 1.0)):
        for _ in range(20):
            rates._note_faster((1, 1, 1), n_bytes, open_s)
        network.settle()
        assert network.endpoints[1].rates.known(1, 1)[1] == pytest.approx(known, abs=1e-3), n_bytes


def test_a_nic_that_was_measured_is_as_slow_as_that_until_a_trial_has_shown_more() -> None:
    """Its meter may show as much as it will."""
    endpoint = endpoint_of(0, 2, 2, (10**8,) * 2, learn_rates=True)
    rates = endpoint.rates
    rates.take_measured(((1.0, 1.0), (0.5, 0.5)))
    for meter in rates._meters:
        for _ in range(8):
            meter.close(Carried(8_000_000, 8_000_000, 0.08, 0.08, 0.08), 0.08)
    rates._judge()
    assert rates.known(0, 1) == (0.5, 0.5) and rates._slow_nics() == {1: (0.5, 0.5)}
    for shares, is_out, found in (
        ((0.5, 0.5), True, (1.0, 1.0)),
        ((0.5, 0.51), False, (1.0, 1.0)),
        ((0.5, 0.8), True, (1.0, 0.8)),
        ((0.5, 0.3), False, (0.5, 1.0)),
    ):
        rates.take_measured(((1.0, 1.0), shares))
        rates._note_whole(1, is_out)
        assert rates.known(0, 1) == found
    # One that is out of use is tried in another way.
    rates.take_measured(((1.0, 1.0), (0.05, 0.05)))
    assert not rates._slow_nics()
    # What the traffic alone says is taken back by the traffic.
    learned = endpoint_of(0, 2, 2, (10**8,) * 2, learn_rates=True).rates
    learned.know(1, 0.5, 0.5)
    assert not learned._slow_nics()


def test_slow_nics_are_tried_at_every_tick_and_padding_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(2, rates=(10**8, 10**8), learn_rates=True)
    network.open((0, 1), (1, 0))
    network.until(network.all_up)
    endpoint = network.endpoints[0]
    rates, looked = endpoint.rates, list[float]()
    monkeypatch.setattr(rates.faster_trials, "look", looked.append)
    for nic, is_tried in ((0, False), (1, True)):
        connection = network.outbound(0, 1, nic)
        monkeypatch.setattr(connection, "awaits", True)
        monkeypatch.setattr(connection, "waiting_bytes", LOADED_BYTES)
        monkeypatch.setattr(rates.faster_trials, "is_tried", lambda nic, is_tried=is_tried: is_tried and nic == 1)
    rates.look(network.now_s + 1.0)
    assert looked == [network.now_s + 1.0] and set(rates._waited_s) == {(0, 1, 0)}


def test_a_rank_that_joins_later_is_told_the_rates_that_differ() -> None:
    network = Network(3, learn_rates=True)
    network.open((0, 1))
    network.until(network.all_up)
    network.endpoints[0].rates.know(1, 0.25, 1.0)
    network.open((0, 2))
    network.until(network.all_up)
    for endpoint in network.endpoints:
        assert endpoint.rates.known(0, 1) == pytest.approx((0.25, 1.0), abs=1e-3)


def test_ranks_that_are_not_joined_hear_of_each_other_s_nics() -> None:
    """A ring of five: what is told goes round, once."""
    network = Network(5, learn_rates=True)
    network.open(*((rank, (rank + 1) % 5) for rank in range(5)))
    network.until(network.all_up)
    network.endpoints[2].rates.know(0, 0.5, 0.75)
    network.endpoints[2].rates.note_nic(1, False)
    network.settle()
    for endpoint in network.endpoints:
        assert endpoint.rates.known(2, 0) == pytest.approx((0.5, 0.75), abs=1e-3)
        assert endpoint.rates.known(2, 1) == (0.0, 0.0) and endpoint.rates.version == 2
    network.endpoints[2].rates.note_nic(1, True)
    network.settle()
    assert [endpoint.rates.known(2, 1) for endpoint in network.endpoints] == [(1.0, 1.0)] * 5


def test_a_rate_that_has_been_overtaken_says_nothing() -> None:
    network = Network(2, learn_rates=True)
    network.open((0, 1), (1, 0))
    network.until(network.all_up)
    endpoint, connection = network.endpoints[0], network.outbound(0, 1, 0)

    def hear(count: int, nic: int, share: float, rank: int = 1) -> None:
        endpoint.received(
            connection, control_header(connection.session, RATE_FRAME, RateWord(count, rank, nic, share, share).number)
        )
        after = endpoint.rates.version
        assert endpoint.rates.known(0, 1) == (1.0, 1.0), "nobody knows better than the rank itself"
        versions.append(after)

    versions = [endpoint.rates.version]
    half = pytest.approx((0.5, 0.5), abs=1e-3)
    hear(2, 1, 0.5)
    hear(1, 1, 0.25)
    assert endpoint.rates.known(1, 1) == half
    hear(3, 1, 0.0)
    assert endpoint.rates.known(1, 1) == (0.0, 0.0)
    hear(4, 1, 0.5)
    hear(5, 7, 0.25)
    hear(5, 1, 0.25, rank=9)
    hear(5, 1, 0.25, rank=0)
    assert endpoint.rates.known(1, 1) == half and endpoint.rates.known(1, 7) == (1.0, 1.0), "it has no such NIC"
    assert [after > before for before, after in pairwise(versions)] == [True, False, True, True, False, False, False]
    hear(RATE_TURNS // 2, 1, 0.1)
    hear(RATE_TURNS - 1, 1, 0.2)
    hear(0, 1, 0.5)
    assert endpoint.rates.known(1, 1) == half, "the count begins anew"


def test_the_kernel_buffers_little_for_slow_rails() -> None:
    network = Network(2, learn_rates=True)
    network.open((0, 1))
    network.until(network.all_up)
    endpoint = network.endpoints[0]
    for share, wanted in ((0.25, [False, True]), (1.0, [False, False])):
        endpoint.rates.know(1, share, 1.0)
        assert [network.outbound(0, 1, rail).holds_little for rail in range(2)] == wanted
        assert endpoint.to_limit == [network.outbound(0, 1, 1)]
        endpoint.to_limit.clear()


def test_chunks_that_wait_for_a_socket_are_divided_anew() -> None:
    """Nothing was written yet when the rank learns that a NIC is down: the other one carries all."""
    network = Network(2, learn_rates=True, chunk_bytes=1 << 16)
    (handle,), _ = network.open((0, 1))
    network.until(network.all_up)
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    into = np.zeros_like(data)
    network.post_recv(1, handle, into)
    network.settle()
    endpoint = network.endpoints[0]
    before = [rail.sent_bytes for rail in endpoint.rail_counts]
    assert endpoint.post_send(handle, data.data) is None
    endpoint.rates.note_nic(1, False)
    assert network.poll(0) == [(SENT, handle)] and network.poll(1) == [(RECEIVED, handle)]
    assert np.array_equal(data, into)
    sent = [rail.sent_bytes - at for rail, at in zip(endpoint.rail_counts, before, strict=True)]
    assert sent[0] > 0.9 * sum(sent), sent
