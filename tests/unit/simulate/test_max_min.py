"""The rates of fair ports: after any change they are those of max-min fairness, also where few are found anew."""

from __future__ import annotations

import numpy as np
import pytest

from optcc.simulate import max_min
from optcc.simulate.ports import Pairs, link, unlink

N_PORTS, STEPS = 60, 150


def make_pairs(rng: np.random.Generator, between: bool) -> Pairs:
    """Some pairs of out ports (even) and in ports (odd); if `between`, half of them also share one of four more."""
    outs, ins = np.meshgrid(np.arange(0, N_PORTS, 2), np.arange(1, N_PORTS, 2), indexing="ij")
    ends = np.column_stack((outs.ravel(), ins.ravel()))
    ends = ends[rng.permutation(len(ends))[:250]]
    if between:
        up = np.where(rng.random(len(ends)) < 0.5, -1, N_PORTS + 2 * rng.integers(0, 2, len(ends)))
        ends = np.column_stack((ends, up, np.where(up < 0, -1, up + 1)))
    n_ports = N_PORTS + 4
    used = ends[ends >= 0].ravel()
    lists = np.zeros((n_ports, 2), dtype=np.int32)
    lists[1:, 0] = np.cumsum(np.bincount(used, minlength=n_ports))[:-1]
    both = np.hstack((ends, np.zeros_like(ends))).astype(np.int32)
    return Pairs(both, np.zeros(len(used), dtype=np.int32), lists)


def check_fair(pairs: Pairs, flows: max_min.Flows, ports: max_min.Floats) -> None:
    """No port gives more than it has, and every flow has a full port that gives no other flow more: Bertsekas and
    Gallager's criterion."""
    sides = pairs.ends.shape[1] // 2
    carried, most = np.zeros(len(ports)), np.zeros(len(ports))
    active = np.flatnonzero(flows.active)
    for pair in active:
        for port in pairs.ends[pair, :sides]:
            if port >= 0:
                carried[port] += flows.rate[pair] * flows.active[pair]
                most[port] = max(most[port], flows.rate[pair])
    assert (carried <= ports * (1 + 1e-12)).all()
    for pair in active:
        own = [port for port in pairs.ends[pair, :sides] if port >= 0]
        assert any(
            carried[port] >= ports[port] * (1 - 1e-12) and flows.rate[pair] >= most[port] * (1 - 1e-12) for port in own
        )


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rates_stay_fair_when_flows_come_and_go_and_ports_change(
    seed: int, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to three changes at a time, so that few rates are found anew; a port may stand still."""
    rng = np.random.default_rng(seed)
    pairs = make_pairs(rng, between)
    n_pairs, n_ports = len(pairs.ends), len(pairs.lists)
    flows, scratch = max_min.make_flows(np.zeros(0), n_pairs), max_min.make_scratch(n_pairs, n_ports)
    ports = rng.integers(5, 50, n_ports) * rng.choice([1.0, 0.37], n_ports)
    kept: list[bool] = []
    relax = max_min.relax

    def spy(*args: object) -> int:
        found: int = relax(*args)  # type: ignore[arg-type]
        kept.append(found >= 0)
        return found

    monkeypatch.setattr(max_min, "relax", spy)
    for step in range(STEPS):
        for _ in range(int(rng.integers(1, 4))):
            if step > STEPS // 3 and rng.random() < 0.2:
                port = int(rng.integers(n_ports))
                ports[port] = float(rng.choice([0.0, 3.0, 20.5]))
                max_min.mark(scratch, port)
                continue
            pair = int(rng.integers(n_pairs))
            before = flows.active[pair]
            flows.active[pair] = 0 if before and rng.random() < 0.6 else before + 1
            if before == 0:
                link(pairs, pair)
            elif flows.active[pair] == 0:
                unlink(pairs, pair)
                flows.rate[pair] = scratch.level[pair] = 0.0
            for port in pairs.ends[pair, : pairs.ends.shape[1] // 2]:
                if port >= 0:
                    max_min.mark(scratch, int(port))
        for at in range(max_min.share(flows, pairs, scratch, ports)):
            flows.rate[scratch.pairs[at]] = scratch.level[scratch.pairs[at]]
        check_fair(pairs, flows, ports)
    assert sum(kept) > STEPS / 2, f"seed {seed}: nearly all were found anew"


def test_what_spreads_too_far_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all rates are found anew, and nothing is left in the line."""
    rng = np.random.default_rng(0)
    pairs = make_pairs(rng, False)
    flows, scratch = (
        max_min.make_flows(np.zeros(0), len(pairs.ends)),
        max_min.make_scratch(len(pairs.ends), len(pairs.lists)),
    )
    ports = rng.integers(5, 50, len(pairs.lists)).astype(np.float64)
    for pair in range(len(pairs.ends)):
        flows.active[pair] = 1
        link(pairs, pair)
        max_min.mark(scratch, int(pairs.ends[pair, 0]))
    monkeypatch.setattr(max_min, "_RELAXED_SHARE", 0)
    few = ports[:1]  # as many tries as there are rates
    assert max_min.relax(flows, pairs, scratch, np.concatenate((few, ports[1:])), scratch.filled.max()) == -1
    assert (scratch.rank < 0).all()
    assert not scratch.seen.any()
