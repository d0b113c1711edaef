"""Channels and semaphores of a plan of MSCCL++: their ends, the threads that use them, and whether the counts match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from optcc.verify.gpu.mscclpp_file import MscclppBlock, MscclppGpu, MscclppOp, MscclppPlan, is_push
from optcc.verify.gpu.operations import StepCounterexample, StepPlace, counter

SYNC = frozenset(("nop", "barrier"))
SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
_WAITS = ("wait", "rlxwait")
Paired = Mapping[tuple[int, int], tuple[int, int]]
"""For each channel of a GPU, GPU and channel at its other end."""
ChannelEnd = tuple[bool, int, int]
"""Whether it is a semaphore and no channel; its GPU and number."""
ThreadName = tuple[int, int, int]
"""GPU, thread block, and thread of this."""


def channels_of(gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> list[int]:
    """The GPU's channels that an operation of this block names: those of memory are counted first, then ports."""
    first = len(gpu.peers()) if op.by_port else 0
    numbers = [block.channel(op.reach, each) for each in op.channel_ids]
    return [first + number for number in numbers if number is not None]


def pair_channels(plan: MscclppPlan) -> dict[tuple[int, int], tuple[int, int]]:
    """For each channel of a GPU the other end: its k-th of a type to a peer is the peer's k-th back."""
    ends: dict[tuple[str, int, int], list[int]] = {}
    for gpu in plan.gpus:
        numbered = enumerate([(kind, peer) for kind in ("memory", "port") for peer in gpu.peers(kind)])
        for number, (kind, peer) in numbered:
            ends.setdefault((kind, gpu.id, peer), []).append(number)
    paired: dict[tuple[int, int], tuple[int, int]] = {}
    for (kind, one, other), own in ends.items():
        theirs = ends.get((kind, other, one), [])
        for k, number in enumerate(own):
            paired[one, number] = (other, theirs[k]) if k < len(theirs) else (other, -1 - number)
    return paired


@dataclass(slots=True)
class Users:
    """The threads that have each port channel move something; and for words that several threads put or take, with
    nothing in their block that orders them, the threads that put them."""

    pushers: dict[tuple[int, int], list[ThreadName]] = field(default_factory=dict)
    shared: dict[ChannelEnd, list[ThreadName]] = field(default_factory=dict)

    @staticmethod
    def first(plan: MscclppPlan, key: ChannelEnd) -> int:
        """How many words are there at the start."""
        is_semaphore, gpu, number = key
        return plan.gpus[gpu].semaphores[number].init_value if is_semaphore else 0


def users_of(plan: MscclppPlan, peer: Paired) -> Users:
    """Who uses the channels and semaphores of a plan."""
    found = Users()
    puts: dict[ChannelEnd, list[tuple[ThreadName, int]]] = {}
    takes: dict[ChannelEnd, list[tuple[ThreadName, int]]] = {}
    for gpu, block, op, phase in _in_phases(plan):
        numbers = channels_of(gpu, block, op)
        for thread, number in enumerate(numbers):
            name = (gpu.id, block.id, thread)
            if is_push(op):
                found.pushers.setdefault((gpu.id, number), []).append(name)
            if op.name in SIGNALS:
                puts.setdefault((False, *peer[gpu.id, number]), []).append((name, phase))
            elif op.name in _WAITS:
                takes.setdefault((False, gpu.id, number), []).append((name, phase))
        if op.name in ("sem_acquire", "sem_release"):
            used = puts if op.name == "sem_release" else takes
            for thread, number in enumerate(op.semaphore_ids):
                used.setdefault((True, gpu.id, number), []).append(((gpu.id, block.id, thread), phase))
    found.pushers = {end: list(dict.fromkeys(who)) for end, who in found.pushers.items()}
    for key in dict.fromkeys((*puts, *takes)):
        if _are_several(puts.get(key, [])) or _are_several(takes.get(key, [])):
            found.shared[key] = list(dict.fromkeys(name for name, _ in puts.get(key, [])))
    return found


def _in_phases(plan: MscclppPlan) -> Iterator[tuple[MscclppGpu, MscclppBlock, MscclppOp, int]]:
    """Each operation, and how many before it in its block let all threads of the block meet."""
    for gpu in plan.gpus:
        for block in gpu.threadblocks:
            phase = 0
            for op in block.ops:
                phase += op.name in SYNC
                yield gpu, block, op, phase


def _are_several(uses: list[tuple[ThreadName, int]]) -> bool:
    """Whether two blocks are among them, or two threads of a block in one phase."""
    in_phase: dict[int, int] = {}
    blocks = {name[:2] for name, _ in uses}
    return len(blocks) > 1 or any(in_phase.setdefault(phase, name[2]) != name[2] for name, phase in uses)


def match(
    file_name: str, plan: MscclppPlan, peer: Paired, places: list[list[list[StepPlace]]]
) -> StepCounterexample | None:
    """A channel that is not waited for as often as it is signalled, or a semaphore that a call leaves changed.

    `places` are those of the operations, by GPU and block.
    """
    sent: dict[tuple[int, int], list[StepPlace]] = {}
    awaited: dict[tuple[int, int], list[StepPlace]] = {}
    held: dict[tuple[int, int], list[StepPlace]] = {}
    balance: dict[tuple[int, int], int] = {}
    for gpu in plan.gpus:
        for block in gpu.threadblocks:
            for k, op in enumerate(block.ops):
                place = places[gpu.id][block.id][k]
                for number in channels_of(gpu, block, op) if op.name in (*SIGNALS, *_WAITS) else ():
                    if op.name in SIGNALS:
                        sent.setdefault(peer[gpu.id, number], []).append(place)
                    else:
                        awaited.setdefault((gpu.id, number), []).append(place)
                for number in op.semaphore_ids if op.name.startswith("sem") else ():
                    held.setdefault((gpu.id, number), []).append(place)
                    change = 1 if op.name == "sem_release" else -1
                    balance[gpu.id, number] = balance.get((gpu.id, number), 0) + change
    for key in dict.fromkeys((*sent, *awaited)):
        out, into = sent.get(key, []), awaited.get(key, [])
        if len(out) != len(into):
            place = (out if len(out) > len(into) else into)[min(len(out), len(into))]
            what = f"a channel of GPU {key[0]} is signalled {len(out)} times and waited for {len(into)} times"
            return counter(file_name, "matching", what, place)
    for key, change in balance.items():
        if change:
            what = f"semaphore {key[1]} ends {abs(change)} {'above' if change > 0 else 'below'} its start"
            return counter(file_name, "matching", what, held[key][-1])
    return None
