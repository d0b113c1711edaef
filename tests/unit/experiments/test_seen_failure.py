"""A NIC that dies in a training run: the record that comes with the package, its figure, and how both are made."""

from __future__ import annotations

import numpy as np
import pytest

from optcc.errors import CodecError
from optcc.experiments.fabric import can_make_namespaces
from optcc.experiments.seen_failure import FAILS_IN, NIC, SeenFailure, TrainedNetwork, measure
from optcc.paper_figures import failure_views


def check_seen(record: SeenFailure) -> None:
    """What must be seen of any such run."""
    rank, nic = int(NIC[1]), NIC.partition(".")[2]
    assert (record.explained.kind, record.explained.nics) == ("rails", ((rank, nic),))
    rails = {(each.rank, rail.name): rail.state for each in record.status.ranks for rail in each.rails}
    assert [key for key, state in rails.items() if state == "down"] == [(rank, nic)]
    place = record.nics.index(NIC)
    assert {each.states[place] for each in record.samples if each.at_s > 1} == {"down"}
    assert max(each.receiving[place] for each in record.samples if each.at_s > 1) == 0
    assert 0 <= record.first_down_s < record.replanned_s
    # The mean is the same at every rank, and not that of one of them.
    outputs = [each for each in record.norms if each.point == "output"]
    by_rank = [[each.l2 for each in outputs if each.rank == rank] for rank in range(4)]
    n_common = min(map(len, by_rank))
    assert n_common > 5
    assert all(each[-n_common:] == by_rank[0][-n_common:] for each in by_rank)
    assert max(by_rank[0]) < 0.9 * min(each.l2 for each in record.norms if each.point == "input")
    assert record.steps[-1].loss < 0.8 * record.steps[0].loss


def test_the_record_shows_what_the_page_says() -> None:
    record = SeenFailure.read()
    check_seen(record)
    first, last = record.steps[0].epoch, record.steps[-1].epoch
    assert first < last
    assert record.seconds(first) < record.seconds(last)
    before, after = (trace.seconds / trace.predicted_s for trace in record.traces)
    assert 0.9 < after < 1.1
    # The plan of equal hosts has few messages, one behind the other, whose costs the rates do not tell.
    assert len(record.traces[0].src) < len(record.traces[1].src)
    assert 0.9 < before < 1.2


def test_the_figure_shows_what_the_record_says() -> None:
    record = SeenFailure.read()
    table = failure_views.data(record)
    figure = failure_views.draw(table)
    drawn = {line.get_gid(): np.asarray(line.get_xydata()) for axes in figure.axes for line in axes.get_lines()}
    place = record.nics.index(NIC)
    assert drawn[f"nic:{NIC}"].tolist() == [[each.at_s, each.receiving[place] / 1e6] for each in record.samples]
    assert drawn["steps"][-1].tolist() == [
        record.steps[-1].ended_s,
        record.steps[-1].ended_s - record.steps[-1].began_s,
    ]
    outputs = [[each.at_s, each.l2] for each in record.norms if (each.point, each.rank) == ("output", 3)]
    assert drawn["norm:output:3"].tolist() == outputs
    bars = {each.get_gid(): each for axes in figure.axes for each in axes.collections}
    after = record.traces[1]
    spans = bars["trace:after:2:out"].get_paths()
    assert len(spans) == after.src.count(2)
    assert failure_views.numbers(table)["after/allreduce-seconds"].value == after.seconds


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-seen-failure/1", b"optcc-seen-failure/2", r"\$\.format"),
        (b'"failed": "h2', b'"failed": "h9', r"\$\.failed"),
        (b'"when": "after"', b'"when": "later"', r"\$\.traces"),
        (b'"receiving": [', b'"receiving": [1.0, ', r"\$\.samples\[0\]"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = SeenFailure.read().to_bytes()
    assert before in data
    with pytest.raises(CodecError, match=path):
        SeenFailure.from_bytes(data.replace(before, after, 1))


def test_the_gradient_is_that_of_the_loss() -> None:
    network = TrainedNetwork(3)

    def loss() -> float:
        return network.gradient(np.random.default_rng(5))[0]

    _, gradient = network.gradient(np.random.default_rng(5))
    n_outputs = 300
    for index in (7, 1_234_567, len(gradient) - 3):
        before, step = network.parameters[index], np.float32(0.05)
        network.parameters[index] = before + step
        above = loss()
        network.parameters[index] = before - step
        below = loss()
        network.parameters[index] = before
        # The network descends half of the sum over outputs; the loss is their mean.
        assert (above - below) / (2 * 0.05) == pytest.approx(2 * gradient[index] / n_outputs, rel=0.05, abs=1e-6)


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.skipif(can_make_namespaces() is not None, reason="needs the right to make network namespaces")
def test_it_can_be_seen_again() -> None:
    record = measure(FAILS_IN + 20)
    check_seen(record)
