"""What a seed makes of a swarm's run: hosts, their NICs and settings, messages, and faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from optcc.runtime.protocol.settings import Settings

STALL_S = 5.0
INFINITY = float("inf")
_SEGMENTS_MAX = 500


@dataclass(frozen=True)
class SwarmFault:
    """What befalls NIC `nic` of `rank` from `at_s`, for `for_s` seconds (infinity: for good).

    Kinds: `down` (link), `hole`, `hole-out`, `hole-in` (blackholes), `loss`, `slow`, `freeze` (all is delayed),
    `reset`, `refuse` (connections are refused); and of a whole rank, `nic` being -1: `busy` (the process does not
    look), `crash`.
    """

    at_s: float
    kind: str
    rank: int
    nic: int
    for_s: float

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.nic < 0 else f"rank {self.rank} NIC {self.nic}"
        return f"{self.at_s:.4f} s: {where} {self.kind} for {self.for_s:.3f} s"


@dataclass(frozen=True)
class SwarmChannel:
    """The messages of one channel: their sizes, and how many are posted ahead at each end."""

    src: int
    dst: int
    group: int
    sizes: tuple[int, ...]
    ahead_send: int
    ahead_recv: int


@dataclass(frozen=True)
class Scenario:
    """All that a seed makes.

    `names` and `rates` of the NICs, by rank; `turn_s` of a host's loop; `pauses`: how likely a program computes after a
    message; `payload_bytes` of a rank at the barriers. If a rank `stays`, it does not leave before all faults have
    ended, so that no fault excuses a failure.
    """

    seed: int
    names: tuple[tuple[str, ...], ...]
    rates: tuple[tuple[tuple[int, int], ...], ...]
    settings: Settings
    lanes: tuple[SwarmChannel, ...]
    faults: tuple[SwarmFault, ...]
    latency_s: float
    segment_bytes: int
    buffer_bytes: tuple[int, int]
    corrupt: float
    ends_with_barrier: bool
    pauses: float
    payload_bytes: int
    stays: bool
    turn_s: float

    def describe(self) -> str:
        """A few lines."""
        lines = [
            f"seed {self.seed}: {len(self.rates)} ranks, NICs {'+'.join(str(len(nics)) for nics in self.rates)}, "
            f"{len(self.lanes)} channels, {sum(len(lane.sizes) for lane in self.lanes)} messages of "
            f"{sum(sum(lane.sizes) for lane in self.lanes)} B, chunks of {self.settings.chunk_bytes} B, window "
            f"{self.settings.window}{', crc' if self.settings.crc else ''}{', replan' if self.settings.replan else ''}"
            f"{', rates learnt' if self.settings.learn_rates else ''}",
        ]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    shape = rng.choice(("ring", "ring", "pairs", "pairs", "any", "any", "any", "talk", "talk", "load"))
    n_ranks, n_nics = rng.choice((2, 2, 3, 3, 4, 5, 6)), rng.choice((1, 2, 2, 2, 3, 4))
    if shape == "load":
        n_ranks, n_nics = rng.choice((2, 2, 3)), rng.choice((2, 2, 3))
    names = _make_names(rng, n_ranks, n_nics, same=shape == "load")
    base = 12_500_000 if shape == "load" else rng.choice((12_500_000, 25_000_000, 125_000_000))
    uneven = rng.random() < 0.4

    def rate() -> int:
        return int(base * rng.choice((1, 1, 0.5, 0.25))) if uneven else base

    rates = tuple(tuple((rate(), rate()) for _ in nics) for nics in names)
    crc = rng.random() < (0.6 if shape == "load" else 0.3)
    chunk_bytes, window = rng.choice((1024, 8192, 32768, 1 << 20)), rng.choice((1, 2, 8, 32))
    if shape == "load":
        chunk_bytes, window = 32768, 32
    learns = rng.random() < (0.9 if shape == "load" else 0.5)
    settings = Settings(
        chunk_bytes, window, crc, rng.random() < (0.6 if shape == "load" else 0.3), learns, 0.1, STALL_S, 5.0
    )
    lanes = _make_lanes(rng, n_ranks, shape)
    size_bytes = sum(sum(lane.sizes) for lane in lanes)
    lasts_s = 0.01 + size_bytes / (base * n_nics)
    faults = _make_faults(rng, names, max(0.05, 2 * lasts_s), shape)
    faults += _make_close_faults(random.Random(-1 - seed), names, lasts_s)
    segment_bytes = rng.choice((1448, 8948, 65536))
    buffer_bytes = rng.choice(((4096, 16384), (65536, 262144), (1 << 20, 1 << 20)))
    if shape == "load":
        segment_bytes, buffer_bytes = 65536, (131072, 262144)
    return Scenario(
        *(seed, names, rates, settings, lanes, tuple(sorted(faults, key=lambda fault: fault.at_s))),
        latency_s=rng.choice((10e-6, 50e-6, 1e-3)),
        # Kernels join segments of long transfers.
        segment_bytes=max(segment_bytes, size_bytes // _SEGMENTS_MAX),
        buffer_bytes=buffer_bytes,
        corrupt=rng.choice((0.0, 0.01, 0.04)) if crc else 0.0,
        ends_with_barrier=rng.random() < 0.7,
        pauses=rng.choice((0.0, 0.0, 0.05)),
        payload_bytes=rng.choice((0, 0, 5, 3000, 20_000)),
        stays=rng.random() < 0.7,
        turn_s=rng.choice((0.0, 20e-6, 20e-6, 200e-6)),
    )


def _make_names(rng: random.Random, n_ranks: int, n_nics: int, *, same: bool) -> tuple[tuple[str, ...], ...]:
    """The names of the NICs: the same everywhere, or only in part, or nowhere; their number may differ as well."""
    style = 0.0 if same else rng.random()
    all_names = [f"eth{number}" for number in range(4)]
    if style < 0.65:
        return (tuple(all_names[:n_nics]),) * n_ranks
    if style < 0.9:
        # Those that all have in common, and others.
        common = rng.randint(1, n_nics)
        several = []
        for _ in range(n_ranks):
            own = all_names[:common] + rng.sample(all_names[common:], rng.randint(0, 4 - common))
            several.append(tuple(rng.sample(own, len(own))))
        return tuple(several)
    return tuple(tuple(f"r{rank}p{number}" for number in range(rng.randint(1, 4))) for rank in range(n_ranks))


def _make_lanes(rng: random.Random, n_ranks: int, shape: str) -> tuple[SwarmChannel, ...]:
    """A few channels, of a ring, of all pairs, or any; short, long and mixed messages.

    In a talk two ranks answer each other's short messages; a load keeps NICs busy for some time.
    """
    pairs = [(src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst]
    if shape == "ring":
        pairs = [(rank, (rank + 1) % n_ranks) for rank in range(n_ranks)]
    elif shape == "pairs":
        pairs = rng.sample(pairs, min(len(pairs), 8))
    elif shape == "any":
        pairs = [rng.choice(pairs) for _ in range(rng.randint(1, 4))]
    else:
        src, dst = rng.sample(range(n_ranks), 2)
        pairs = [(src, dst), (dst, src)] if shape == "talk" else [(src, dst)]
    kind = rng.choice(("short", "long", "mixed", "cut"))
    if shape in ("talk", "load"):
        kind = "short" if shape == "talk" else "load"
    least, largest, most = {
        "short": (0, 2000, 20),
        "long": (20_000, 200_000, 6),
        "mixed": (0, 60_000, 6),
        "cut": (40_000, 90_000, 6),
        "load": (300_000, 400_000, 24),
    }[kind]
    lanes: list[SwarmChannel] = []
    numbers: Counter[tuple[int, int]] = Counter()
    for src, dst in pairs:
        for _ in range(rng.choice((1, 1, 2))):
            group = min(numbers[src, dst], rng.choice((0, 3)))
            numbers[src, dst] += 1
            sizes = tuple(
                rng.randint(0, 500) if kind == "mixed" and rng.random() < 0.5 else rng.randint(least, largest)
                for _ in range(most if kind == "load" else rng.randint(1, most))
            )
            lanes.append(SwarmChannel(src, dst, group, sizes, rng.choice((1, 1, 4)), rng.choice((1, 2, 4))))
    return tuple(lanes)


def _make_faults(
    rng: random.Random, names: Sequence[Sequence[str]], within_s: float, shape: str
) -> tuple[SwarmFault, ...]:
    """Faults that end, now and then one that does not, and seldom a rank that is killed or cut off."""
    faults: list[SwarmFault] = []
    n_ranks = len(names)
    kinds = ("down", "hole", "hole", "hole-out", "hole-in", "loss", "slow", "freeze", "reset")
    style = rng.choice(("none", "few", "few", "same", "storm", "storm"))
    count = {"none": 0, "few": rng.randint(1, 3), "same": rng.randint(2, 6), "storm": rng.randint(4, 12)}[style]
    first, victim = rng.choice(kinds), rng.randrange(n_ranks)
    number = rng.randrange(len(names[victim]))
    at_s = 0.0
    for _ in range(count):
        if style == "same":
            # One NIC fails, is healed, and fails again; or another one next.
            at_s += rng.expovariate(4 / within_s) + rng.choice((0.0, 0.05, 0.12))
            for_s = rng.choice((0.03, 0.08, 0.15, 0.3))
            nic = rng.choice((number, rng.randrange(len(names[victim]))))
            faults.append(SwarmFault(at_s, first, victim, nic, for_s))
            at_s += for_s
        else:
            for_s = rng.choice((0.002, 0.03, 0.06, 0.15, 0.4, 1.0))
            rank = rng.randrange(n_ranks)
            nic = rng.randrange(len(names[rank]))
            faults.append(SwarmFault(rng.uniform(0, within_s), rng.choice(kinds), rank, nic, for_s))
    if rng.random() < 0.15:
        faults += _make_lasting_faults(rng, names, within_s)
    if shape == "load" and rng.random() < 0.8:
        faults.append(SwarmFault(rng.uniform(0, 0.1), "slow", rng.choice((0, 1)), 0, rng.choice((0.6, 1.5))))
    if rng.random() < 0.3:
        for_s = rng.choice((0.01, 0.2, 0.7))
        faults.append(SwarmFault(rng.uniform(0, within_s), "busy", rng.randrange(n_ranks), -1, for_s))
    if rng.random() < 0.1:
        # Its listener refuses while its connections are reset: it is dialled again and again.
        rank, at_s = rng.randrange(n_ranks), rng.uniform(0, within_s)
        nic = rng.randrange(len(names[rank]))
        faults.append(SwarmFault(at_s, "refuse", rank, nic, rng.choice((0.05, 0.3))))
        faults.append(SwarmFault(at_s, "reset", rank, nic, 0.0))
    if rng.random() < 0.04:
        # A process sleeps for longer than a rail may be missing: nobody has watched that time.
        rank, at_s = rng.randrange(n_ranks), rng.uniform(0, within_s)
        faults += [SwarmFault(at_s, "hole", rank, nic, 0.6) for nic in range(len(names[rank]))]
        faults.append(SwarmFault(at_s + rng.uniform(0.05, 0.5), "busy", rng.randrange(n_ranks), -1, 1.2 * STALL_S))
    if rng.random() < 0.07:
        rank, at_s = rng.randrange(n_ranks), rng.uniform(0, within_s)
        if rng.random() < 0.7:
            faults.append(SwarmFault(at_s, "crash", rank, -1, INFINITY))
        else:
            faults += [SwarmFault(at_s, "hole", rank, nic, INFINITY) for nic in range(len(names[rank]))]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _make_close_faults(rng: random.Random, names: Sequence[Sequence[str]], lasts_s: float) -> tuple[SwarmFault, ...]:
    """Now and then a fault while messages are on their way, however short that is, and soon another one."""
    if rng.random() < 0.7:
        return ()
    at_s, kinds = rng.uniform(0.001, 0.004 + 2 * lasts_s), ("down", "hole", "hole-in", "hole-out", "freeze", "reset")
    faults: list[SwarmFault] = []
    rank = rng.randrange(len(names))
    nic = rng.randrange(len(names[rank]))
    for _ in range(rng.choice((1, 2, 2, 3))):
        faults.append(SwarmFault(at_s, rng.choice(kinds), rank, nic, rng.choice((0.03, 0.08, 0.15, 0.3))))
        at_s += rng.choice((rng.uniform(0, 0.004), rng.uniform(0, 0.03), rng.uniform(0.04, 0.12)))
        if rng.random() < 0.3:
            nic = rng.randrange(len(names[rank]))
    return tuple(faults)


def _make_lasting_faults(rng: random.Random, names: Sequence[Sequence[str]], within_s: float) -> list[SwarmFault]:
    """Faults for good, of NICs of one name, where every pair has others in common."""
    common = set(names[0]).intersection(*names)
    if len(common) < 2:
        return []
    kind, name = rng.choice(("down", "hole", "hole-out", "hole-in")), rng.choice(sorted(common))
    victims = rng.sample(range(len(names)), rng.randint(1, len(names)))
    return [SwarmFault(rng.uniform(0, within_s), kind, rank, names[rank].index(name), INFINITY) for rank in victims]
