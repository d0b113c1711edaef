"""What a seed makes of a swarm's run: hosts, their NICs and settings, messages, and faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from optcc.runtime.protocol.frames import (
    BYE_FRAME,
    CHANGE_FRAME,
    DATA_FRAME,
    DOUBT_FRAME,
    GONE_FRAME,
    RATE_FRAME,
    STATE_FRAME,
)
from optcc.runtime.protocol.settings import Settings

STALL_S = 5.0
INFINITY = float("inf")
_MESSAGES = {
    "talk": "short",
    "farewell": "eager",
    "load": "load",
    "copies": "large",
    "turnover": "many",
    "closed": "large",
    "half-open": "cut",
    "damage": "large",
}
LEAVING = 0
_CORRUPT = {"copies": (0.0, 0.0, 0.01), "half-open": (0.04,), "damage": (0.04,)}
_FRAME_FAULTS = ("hole", "hole-in", "hole-out", "reset", "break", "break", "freeze", "down")
_FRAMES = (*(DATA_FRAME, STATE_FRAME) * 3, *(CHANGE_FRAME, DOUBT_FRAME) * 2, GONE_FRAME, RATE_FRAME, BYE_FRAME)
_SEGMENTS_MAX = 200
_TRIES = 10
_SHAPES = (
    *("ring", "pairs", "any", "talk", "load", "copies", "farewell") * 2,
    *("any", "copies", "copies", "talk", "turnover", "closed", "half-open", "damage"),
)
"""Beside what they say: `talk`, two ranks exchange short messages; `load`, NICs are busy for some time, so that rates
are measured; `copies`, large chunks on fast NICs that stand still for a while, so that they come twice; `farewell`,
ranks that leave at once after short messages; `turnover`, plans are changed while many chunks are out; `closed`, a rank
computes, its window is full, and the sender is cut off; `half-open`, a rank computes while damaged data comes, and
cannot say that it closes the connection; `damage`, bits flip in chunks on a slow rail while plans are changed because
other rails are lost. New shapes go to the end: the scenarios of most seeds stay what they were."""


@dataclass(frozen=True)
class Trigger:
    """A fault begins `delay_s` after the `count`-th segment leaves its NIC that starts with a frame of `kind`.

    With a delay of 0 it begins before that segment. It waits for `armed_s` seconds from `at_s` of the fault. Of the
    kind `LEAVING`: when its rank begins to leave.
    """

    kind: int
    count: int
    delay_s: float
    armed_s: float

    def __str__(self) -> str:
        when = "it begins to leave" if self.kind == LEAVING else f"frame {self.count} of kind {self.kind}"
        return f"{1e6 * self.delay_s:.0f} us after {when}"


@dataclass(frozen=True)
class SwarmFault:
    """What befalls NIC `nic` of `rank` from `at_s`, for `for_s` seconds (infinity: for good), or from its `trigger` on.

    Kinds: `down` (link), `move` (the link is down, and comes back with another address), `hole`, `hole-out`, `hole-in`
    (blackholes), `loss`, `slow`, `freeze` (all is delayed), `reset`, `break` (a reset of the one connection that
    triggers it), `refuse` (connections are refused); and of a whole rank, `nic` being -1 or that of the trigger: `busy`
    (the process does not look), `crash`.
    """

    at_s: float
    kind: str
    rank: int
    nic: int
    for_s: float
    trigger: Trigger | None = None

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.nic < 0 else f"rank {self.rank} NIC {self.nic}"
        when = "" if self.trigger is None else f", {self.trigger}"
        return f"{self.at_s:.4f} s{when}: {where} {self.kind} for {self.for_s:.3f} s"

    @property
    def begins_by_s(self) -> float:
        """When it has begun, if it begins at all."""
        return self.at_s + (0.0 if self.trigger is None else self.trigger.armed_s + self.trigger.delay_s)


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
    ended, so that no fault excuses a failure. `n_collectives` are begun by every rank, under epochs that all agree on.
    If the hosts are `is_severed`, some pairs share no rail in the end.
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
    n_collectives: int
    is_severed: bool

    def describe(self) -> str:
        """A few lines."""
        lines = [
            f"seed {self.seed}: {len(self.rates)} ranks, NICs {'+'.join(str(len(nics)) for nics in self.rates)}, "
            f"{len(self.lanes)} channels, {sum(len(lane.sizes) for lane in self.lanes)} messages of "
            f"{sum(sum(lane.sizes) for lane in self.lanes)} B, chunks of {self.settings.chunk_bytes} B, window "
            f"{self.settings.window}{', crc' if self.settings.crc else ''}{', replan' if self.settings.replan else ''}"
            f"{', rates learnt' if self.settings.learn_rates else ''}"
            f"{f', {self.n_collectives} collectives' if self.n_collectives else ''}",
        ]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    shape = rng.choice(_SHAPES)
    n_ranks, n_nics = rng.choice((2, 2, 3, 3, 4, 5, 6)), rng.choice((1, 2, 2, 2, 3, 4))
    base = rng.choice((12_500_000, 25_000_000, 125_000_000))
    chunk_bytes, window = rng.choice((1024, 8192, 32768, 1 << 20)), rng.choice((1, 2, 8, 32))
    crc, learns, replan = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.3
    segment_bytes = rng.choice((1448, 8948, 65536))
    buffer_bytes = rng.choice(((4096, 16384), (65536, 262144), (1 << 20, 1 << 20)))
    uneven = rng.random() < 0.4
    if shape == "load":
        n_ranks, n_nics, base = rng.choice((2, 2, 3)), rng.choice((2, 2, 3)), 12_500_000
        chunk_bytes, window, learns = 32768, 32, rng.random() < 0.9
        crc, replan = rng.random() < 0.6, rng.random() < 0.6
        segment_bytes, buffer_bytes = 65536, (131072, 262144)
    elif shape == "copies":
        n_ranks, n_nics, base, uneven = rng.choice((2, 2, 3)), rng.choice((2, 2, 3)), 125_000_000, False
        chunk_bytes, window = rng.choice((32768, 1 << 17, 1 << 20)), rng.choice((2, 8, 32))
        crc, replan = rng.random() < 0.85, rng.random() < 0.7
        buffer_bytes = rng.choice(((4096, 16384), (16384, 65536)))
    elif shape == "turnover":
        n_ranks, n_nics, chunk_bytes, window, replan = 2, rng.choice((3, 4)), 1024, rng.choice((8, 32)), True
    elif shape == "closed":
        n_ranks, n_nics, base, buffer_bytes = 2, rng.choice((1, 2)), 125_000_000, (4096, 16384)
    elif shape == "half-open":
        n_ranks, n_nics, crc, chunk_bytes = 2, rng.choice((1, 2)), True, rng.choice((8192, 32768))
        segment_bytes, buffer_bytes = 1448, (1 << 20, 1 << 20)
    elif shape == "damage":
        n_ranks, n_nics, base, uneven, crc, replan = 2, rng.choice((3, 4)), 12_500_000, False, True, True
        chunk_bytes, window, segment_bytes = 32768, rng.choice((8, 32)), 1448
    elif shape == "farewell":
        n_ranks, n_nics = rng.choice((2, 2, 3)), rng.choice((2, 2, 3))
        chunk_bytes = rng.choice((8192, 32768))
        buffer_bytes = rng.choice(((4096, 16384), (65536, 262144)))

    def rate() -> int:
        return int(base * rng.choice((1, 1, 0.5, 0.25))) if uneven else base

    names = _make_names(rng, n_ranks, n_nics, same=shape in ("load", "copies", "turnover", "damage"))
    rates = tuple(tuple((rate(), rate()) for _ in nics) for nics in names)
    settings = Settings(chunk_bytes, window, crc, replan, learns, 0.1, STALL_S, 5.0)
    lanes = _make_lanes(rng, n_ranks, shape)
    size_bytes = sum(sum(lane.sizes) for lane in lanes)
    lasts_s = 0.01 + size_bytes / (base * n_nics)
    faults = _make_faults(rng, names, max(0.05, 2 * lasts_s), shape)
    faults += _make_close_faults(rng, names, lasts_s)
    faults += _make_frame_faults(rng, names, shape)
    severing = _make_severing_faults(random.Random(-1 - seed), names, max(0.05, 2 * lasts_s))
    if severing and not any(fault.for_s == INFINITY for fault in faults):
        faults += severing
    else:
        severing = ()
    return Scenario(
        *(seed, names, rates, settings, lanes, tuple(sorted(faults, key=lambda fault: fault.at_s))),
        latency_s=rng.choice((10e-6, 50e-6, 1e-3)),
        # Kernels join segments of long transfers.
        segment_bytes=max(segment_bytes, size_bytes // _SEGMENTS_MAX),
        buffer_bytes=buffer_bytes,
        corrupt=rng.choice(_CORRUPT.get(shape, (0.0, 0.01, 0.04))) if crc else 0.0,
        ends_with_barrier=shape != "farewell" and rng.random() < 0.7,
        pauses=rng.choice((0.0, 0.0, 0.05, 0.2)),
        payload_bytes=rng.choice((0, 0, 5, 3000, 20_000)),
        stays=shape == "half-open" or (shape != "farewell" and rng.random() < 0.7) or bool(severing),
        turn_s=rng.choice((0.0, 50e-6, 50e-6, 200e-6)),
        n_collectives=rng.choice((0, 0, 4, 12, 30)),
        is_severed=bool(severing),
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

    `_SHAPES` says what the others are.
    """
    pairs = [(src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst]
    if shape == "ring":
        pairs = [(rank, (rank + 1) % n_ranks) for rank in range(n_ranks)]
    elif shape == "pairs":
        pairs = rng.sample(pairs, min(len(pairs), 6))
    elif shape in ("any", "copies"):
        pairs = [rng.choice(pairs) for _ in range(rng.randint(1, 4))]
    else:
        src, dst = rng.sample(range(n_ranks), 2)
        is_one_way = shape == "load" or (shape == "farewell" and rng.random() < 0.5)
        pairs = [(src, dst)] if is_one_way else [(src, dst), (dst, src)]
        if shape in ("turnover", "closed", "half-open", "damage"):
            pairs = [(0, 1)]
    kind = rng.choice(("short", "long", "mixed", "cut"))
    kind = _MESSAGES.get(shape, kind)
    least, largest, most = {
        "short": (0, 2000, 10),
        "long": (20_000, 200_000, 4),
        "mixed": (0, 60_000, 4),
        "cut": (40_000, 90_000, 4),
        "eager": (0, 16_000, 12),
        "large": (100_000, 400_000, 4),
        "load": (300_000, 400_000, 18),
        "many": (20_000, 60_000, 12),
    }[kind]
    lanes: list[SwarmChannel] = []
    numbers: Counter[tuple[int, int]] = Counter()
    for src, dst in pairs:
        for _ in range(rng.choice((1, 1, 2) if shape not in ("talk", "farewell") else (1, 2, 3))):
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
    faults += _make_shape_faults(rng, names, within_s, shape)
    faults += _make_rank_faults(rng, names, within_s, shape)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _make_shape_faults(
    rng: random.Random, names: Sequence[Sequence[str]], within_s: float, shape: str
) -> list[SwarmFault]:
    """Those that make a shape what it is; processes that do not look; a NIC that refuses connections."""
    faults: list[SwarmFault] = []
    n_ranks = len(names)
    if shape == "load" and rng.random() < 0.8:
        at_s, rank = rng.uniform(0, 0.1), rng.choice((0, 1))
        faults.append(SwarmFault(at_s, "slow", rank, 0, rng.choice((0.6, 1.5))))
        if rng.random() < 0.6:
            # Another NIC stands still, long enough to be suspected; and what waits for the slow one is lost.
            at_s += rng.uniform(0.02, 0.3)
            faults.append(SwarmFault(at_s, "freeze", rank, 1, rng.uniform(0.05, 0.09)))
            faults.append(SwarmFault(at_s + rng.uniform(0.06, 0.2), "reset", rank, 0, 0.0))
        else:
            trigger = Trigger(RATE_FRAME, rng.choice((1, 2, 3)), rng.uniform(0, 0.06), 2.0)
            faults.append(SwarmFault(0.0, "reset", rank, 0, 0.0, trigger))
    if rng.random() < (0.3 if shape != "farewell" else 0.7):
        for_s = rng.choice((0.01, 0.2, 0.7) if shape != "farewell" else (0.2, 1.3, 2.0))
        faults.append(SwarmFault(rng.uniform(0, within_s), "busy", rng.randrange(n_ranks), -1, for_s))
    if rng.random() < 0.1:
        # Its listener refuses while its connections are reset: it is dialled again and again.
        rank, at_s = rng.randrange(n_ranks), rng.uniform(0, within_s)
        nic = rng.randrange(len(names[rank]))
        faults.append(SwarmFault(at_s, "refuse", rank, nic, rng.choice((0.05, 0.3))))
        faults.append(SwarmFault(at_s, "reset", rank, nic, 0.0))
    if shape == "closed":
        at_s = rng.uniform(0.001, 0.006)
        faults.append(SwarmFault(at_s, "busy", 1, -1, 1.3))
        at_s += rng.uniform(0.02, 0.9)
        faults += [SwarmFault(at_s, "hole", 0, nic, INFINITY) for nic in range(len(names[0]))]
    if shape == "half-open":
        at_s = rng.uniform(0.001, 0.004)
        faults.append(SwarmFault(at_s, "busy", 1, -1, 0.2))
        faults += [SwarmFault(at_s + 0.1, "hole-out", 1, nic, 0.4) for nic in range(len(names[1]))]
    return faults


def _make_rank_faults(
    rng: random.Random, names: Sequence[Sequence[str]], within_s: float, shape: str
) -> list[SwarmFault]:
    """Now and then faults of all NICs of a rank or of its process, for a while or for good."""
    faults: list[SwarmFault] = []
    n_ranks = len(names)
    if rng.random() < 0.1:
        # All NICs of a rank at once, for a while.
        rank, kind = rng.randrange(n_ranks), rng.choice(("hole", "hole-out", "hole-out"))
        at_s, for_s = rng.uniform(0, within_s), rng.choice((0.12, 0.2, 0.4))
        faults += [SwarmFault(at_s, kind, rank, nic, for_s) for nic in range(len(names[rank]))]
    if rng.random() < (0.04 if shape != "farewell" else 0.15):
        # A process sleeps for longer than a rail may be missing: nobody has watched that time.
        rank, at_s = rng.randrange(n_ranks), rng.uniform(0, within_s)
        faults += [SwarmFault(at_s, "hole", rank, nic, 0.6) for nic in range(len(names[rank]))]
        at_s += rng.uniform(0.05, 0.5)
        faults.append(SwarmFault(at_s, "busy", rng.randrange(n_ranks), -1, 1.2 * STALL_S))
    if rng.random() < 0.1:
        rank, at_s = rng.randrange(n_ranks), rng.choice((0.0, rng.uniform(0, within_s), rng.uniform(0, within_s)))
        if rng.random() < 0.35:
            faults.append(SwarmFault(at_s, "crash", rank, -1, INFINITY))
        else:
            if rng.random() < 0.7:
                # What it sends to a rank that computes has filled that rank's window.
                faults.append(SwarmFault(at_s * rng.random(), "busy", rng.randrange(n_ranks), -1, 1.3))
            faults += [SwarmFault(at_s, "hole", rank, nic, INFINITY) for nic in range(len(names[rank]))]
    return faults


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


def _make_frame_faults(rng: random.Random, names: Sequence[Sequence[str]], shape: str) -> tuple[SwarmFault, ...]:
    """Now and then faults that begin with a frame of some kind: just before it leaves, on its way, or just after."""
    faults: list[SwarmFault] = []
    if rng.random() < 0.15:
        # What a rank reports is lost, on all of its NICs; the other end has nothing to send that would show it.
        rank, count, for_s = rng.randrange(len(names)), rng.choice((1, 2, 3, 5)), rng.choice((0.12, 0.2, 0.4))
        report = Trigger(STATE_FRAME, count, 0.0, 1.0)
        faults += [SwarmFault(0.0, "hole-out", rank, nic, for_s, report) for nic in range(len(names[rank]))]
    if shape not in ("copies", "farewell", "talk", "turnover", "damage") and rng.random() < 0.5:
        return tuple(faults)
    for _ in range(rng.choice((1, 2, 2, 3))):
        rank = rng.randrange(len(names))
        nic = rng.randrange(len(names[rank]))
        frame, kind = rng.choice(_FRAMES), rng.choice(_FRAME_FAULTS)
        count, for_s = rng.choice((1, 1, 2, 3, 5, 9, rng.randint(1, 20))), rng.choice((0.03, 0.08, 0.15, 0.4))
        if shape == "copies" and rng.random() < 0.6:
            frame, kind, for_s = DATA_FRAME, "freeze", rng.uniform(0.05, 0.09)
        elif shape == "copies" and rng.random() < 0.6:
            frame, kind = DATA_FRAME, "reset"
        elif shape == "talk" and rng.random() < 0.6:
            frame, kind = STATE_FRAME, "break"
        delay_s = rng.choice((0.0, 1e-5, 1e-4, 1e-3, rng.uniform(0, 0.03)))
        faults.append(SwarmFault(0.0, kind, rank, nic, for_s, Trigger(frame, count, delay_s, 1.0)))
    if shape == "farewell" and rng.random() < 0.3:
        # A rank is cut off with its last messages, and is stopped while it waits for their acknowledgements.
        rank = rng.randrange(len(names))
        faults += [
            SwarmFault(0.0, "hole", rank, nic, 0.6, Trigger(LEAVING, 1, 0.0, 1.0)) for nic in range(len(names[rank]))
        ]
        stop = Trigger(LEAVING, 1, rng.uniform(0.02, 0.4), 1.0)
        faults.append(SwarmFault(0.0, "busy", rank, 0, rng.choice((1.3, 2.0)), stop))
    if shape == "copies" and rng.random() < 0.6:
        # Second copies take their time.
        faults += [SwarmFault(0.0, "slow", rank, 0, 1.0) for rank in range(len(names))]
    if shape == "talk":
        rank = rng.randrange(len(names))
        for nic in range(len(names[rank])):
            last = Trigger(STATE_FRAME, rng.randint(1, 25), 0.0, 1.0)
            faults.append(SwarmFault(0.0, "break", rank, nic, 0.0, last))
    if shape == "damage":
        # Other rails are lost while a chunk arrives over the slow one: its epoch is over when its checksum is compared.
        slow, *others = rng.sample(range(len(names[0])), len(names[0]))
        faults.append(SwarmFault(0.0, "slow", 0, slow, 0.4))
        for nic in others[1:]:
            lost = Trigger(DATA_FRAME, rng.randint(1, 12), 0.0, 1.0)
            faults.append(SwarmFault(0.0, "reset", 0, nic, 0.0, lost))
    if shape == "turnover":
        # A rail is lost, so that a change is proposed, and then the rail with the proposal.
        rank, nics = 0, range(len(names[0]))
        lost = Trigger(DATA_FRAME, rng.randint(1, 12), 0.0, 1.0)
        faults.append(SwarmFault(0.0, "reset", rank, rng.choice(nics), 0.0, lost))
        change = Trigger(CHANGE_FRAME, 1, 0.0, 1.0)
        faults += [SwarmFault(0.0, "hole", rank, nic, rng.choice((0.12, 0.3)), change) for nic in nics]
    return tuple(faults)


def _make_lasting_faults(rng: random.Random, names: Sequence[Sequence[str]], within_s: float) -> list[SwarmFault]:
    """Faults for good, of NICs of one name, where every pair has others in common."""
    common = set(names[0]).intersection(*names)
    if len(common) < 2:
        return []
    kind, name = rng.choice(("down", "hole", "hole-out", "hole-in")), rng.choice(sorted(common))
    victims = rng.sample(range(len(names)), rng.randint(1, len(names)))
    return [SwarmFault(rng.uniform(0, within_s), kind, rank, names[rank].index(name), INFINITY) for rank in victims]


def _make_severing_faults(
    rng: random.Random, names: Sequence[Sequence[str]], within_s: float
) -> tuple[SwarmFault, ...]:
    """Now and then faults for good that leave some pairs no rail, and all ranks joined through others."""
    if rng.random() < 0.8 or len(names) < 3 or len(set(names)) > 1 or len(names[0]) < 2:
        return ()
    nics = range(len(names[0]))
    for _ in range(_TRIES):
        kept = [set(rng.sample(nics, rng.randint(1, len(nics)))) for _ in names]
        pairs = [(one, other) for one in range(len(names)) for other in range(one)]
        joined = [pair for pair in pairs if kept[pair[0]] & kept[pair[1]]]
        reached, before = {0}, set[int]()
        while reached != before:
            before = set(reached)
            reached.update(rank for pair in joined for rank in pair if reached & set(pair))
        if len(reached) == len(names) and len(joined) < len(pairs):
            kind = rng.choice(("down", "down", "hole", "hole-out", "hole-in"))
            at_s = rng.uniform(0, within_s)
            return tuple(
                SwarmFault(at_s + rng.choice((0.0, 0.0, rng.uniform(0, 0.1))), kind, rank, nic, INFINITY)
                for rank in range(len(names))
                for nic in nics
                if nic not in kept[rank]
            )
    return ()
