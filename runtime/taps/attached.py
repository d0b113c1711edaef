"""The engine's side of taps: what is reserved before a run, and taken within it.

The engine calls `TapSet.open` when a run is started, and with the `TappedRun` that it gets, if any, at each action.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from optcc.errors import InputError
from optcc.plan import Plan
from optcc.runtime.buffers import RECV, REDUCE_FIRST, SEND, BoundAction
from optcc.runtime.device_streams import DeviceStreams
from optcc.runtime.state import RankProgram
from optcc.runtime.taps.layout import BLOCK_HEAD_BYTES, TapLayout
from optcc.runtime.taps.on_device import STAGINGS_MAX, Bytes, StagedTaking, staged_bytes
from optcc.runtime.taps.policy import ARRIVED, INPUT, OUTPUT, RESULT, SENT, TAPS_MAX, Tap
from optcc.runtime.taps.ring import (
    BLOCKED_NS,
    BUDGET_RUNS,
    BYTES,
    COUNTERS,
    DRAIN_PID,
    FULL_RUNS,
    RECORDS,
    RUNS,
    SPENT_NS,
    TIME,
    TIME_RUNS,
    UNSEEN_RUNS,
    RingWriter,
)

logger = logging.getLogger("optcc.events")

_NS = 1e9
_TURN_S = 1e-3
"""How long runs go on while there is no room, before it is looked for again."""
_LAYOUTS_MAX = 256
"""So many layouts are kept; one more, and all are made anew."""


class OnGpu(Protocol):
    """What has page-locked memory for a plan on a GPU, and queues its work."""

    @property
    def streams(self) -> DeviceStreams:
        """Where it is queued."""
        ...

    def pinned(self, n_bytes: int) -> Bytes:
        """Page-locked memory of the host."""
        ...


class TappedPlan(Protocol):
    """What taps know of a prepared plan: the transport's ranks by those of the plan, its number among the plans of
    these ranks and that of the run that is about to begin, the bytes of this rank's input and output, and the GPU that
    it runs on, if any."""

    ranks: Sequence[int]
    serial: int
    n_runs: int
    input_bytes: tuple[int, int]
    output_bytes: tuple[int, int]

    @property
    def plan(self) -> Plan:
        """The plan."""
        ...

    @property
    def program(self) -> RankProgram:
        """This rank's part of it."""
        ...

    @property
    def on_device(self) -> OnGpu | None:
        """Its actions there; None in the host's memory."""
        ...


class _Block:
    """The room of a tap in one run."""

    __slots__ = ("begin", "layout")

    def __init__(self, layout: TapLayout, begin: int) -> None:
        self.layout, self.begin = layout, begin


class TappedRun:
    """A run that taps look at: its records are taken as it comes to them."""

    __slots__ = ("_blocks", "_bytes", "_memory", "_now_s", "_ring", "_words")

    def __init__(self, ring: RingWriter, now_s: Callable[[], float], blocks: list[_Block]) -> None:
        self._ring = ring
        self._bytes, self._memory, self._words = ring.bytes, ring.memory, ring.words
        self._now_s, self._blocks = now_s, blocks

    def sending(self, entry: BoundAction) -> None:
        """A message is about to be handed to the transport."""
        self._take(SENT, entry[3], entry[2])

    def computing(self, entry: BoundAction) -> None:
        """What has arrived is about to be reduced or copied."""
        code, instruction, _, source = entry
        self._take(ARRIVED, instruction, source[1] if code == REDUCE_FIRST else source)

    def computed(self, entry: BoundAction) -> None:
        """It has been."""
        self._take(RESULT, entry[1], entry[2])

    def begins(self, given: Any) -> None:
        """The run begins, with these bytes as the input of the rank, if it has any."""
        if given is not None:
            self._take(INPUT, -1, given)

    def ends(self, output: Any, number: int) -> None:
        """The run is over, with this output; `number` is what the status calls it."""
        if output is not None:
            self._take(OUTPUT, -1, output)
        self.finish(number)

    def finish(self, number: int) -> None:
        """Nothing is taken any more."""
        for block in self._blocks:
            self._ring.finish(block.begin, number)

    def ending(self) -> None:
        """Nothing is queued that the end of the run would be behind."""

    def staged(self, streams: DeviceStreams, staging: Bytes, release: Callable[[Bytes], None]) -> StagedTaking:
        """The same where the arrays are on a GPU, by way of `staging`."""
        return StagedTaking(streams, staging, self._wants, self._take, self.finish, release)

    def wrapped(self, calls: list[Callable[[], Any]], bound: list[BoundAction]) -> list[Callable[[], Any]]:
        """The calls of a plan whose steps are remembered, with those of the records around them."""
        made = list(calls)
        for index, entry in enumerate(bound):
            code = entry[0]
            if code == RECV:
                continue
            if code == SEND:
                if self._wants(SENT, entry[3]):
                    made[index] = _before(self.sending, entry, calls[index])
            elif self._wants(ARRIVED, entry[1]) or self._wants(RESULT, entry[1]):
                made[index] = _around(self, entry, calls[index])
        return made

    def _wants(self, point: str, instruction: int) -> bool:
        return any(instruction in block.layout.places[point] for block in self._blocks)

    def _take(self, point: str, instruction: int, data: Any) -> None:
        for block in self._blocks:
            places = block.layout.places[point].get(instruction)
            if places is None:
                continue
            begin, bytes_, now_s = block.begin, self._bytes, self._now_s()
            chunk = data.view(np.uint8)
            for number, start, stop, condense in places:
                condense(bytes_[begin + start : begin + stop], chunk)
                # Never 0, which says that there is no record.
                TIME.pack_into(self._memory, begin + BLOCK_HEAD_BYTES + 8 * number, now_s or 1e-9)
            self._words[SPENT_NS] += int((self._now_s() - now_s) * _NS)


def _before(note: Callable[[BoundAction], None], entry: BoundAction, call: Callable[[], Any]) -> Callable[[], Any]:
    def tapped() -> None:
        note(entry)
        call()

    return tapped


def _around(run: TappedRun, entry: BoundAction, call: Callable[[], Any]) -> Callable[[], Any]:
    def tapped() -> None:
        run.computing(entry)
        call()
        run.computed(entry)

    return tapped


class TapSet:
    """The taps of one rank, over `ring`. `keep` writes what a drain must know: a layout as a line, and a plan.

    `now_s` is the engine's clock; `drive` goes on with its runs for so many seconds, None where nothing may be waited
    for. `drain_is_alive` says whether a drain is there to wait for.
    """

    def __init__(
        self,
        ring: RingWriter,
        now_s: Callable[[], float],
        keep: Callable[[bytes, Plan], None],
        drain_is_alive: Callable[[int], bool] = lambda pid: pid > 0,
    ) -> None:
        self.ring, self._now_s, self._keep, self._drain_is_alive = ring, now_s, keep, drain_is_alive
        self.taps: tuple[Tap, ...] = ()
        self._since_s = now_s()
        self._n_layouts = 0
        self._layouts: dict[tuple[str, int, int, int], TapLayout] = {}
        # What was kept, where the ring is memory of this process.
        self.layouts: list[bytes] = []
        self.plans: dict[str, Plan] = {}
        # Nanoseconds that each tap's blocks have cost are not told apart: a share is that of all of them.
        self._spent_at_ns = 0
        # Page-locked memory that runs on GPUs have given back, by its length, and those that use some.
        self._stagings: dict[int, list[Bytes]] = {}
        self._staged: dict[StagedTaking, int] = {}

    def set(self, *taps: Tap) -> None:
        """From the next run on, these are the taps. Raises InputError for what cannot be."""
        if len(taps) > TAPS_MAX:
            raise InputError(f"{len(taps)} taps: must be at most {TAPS_MAX}")
        self.taps = tuple(each.check() for each in taps)
        self._layouts.clear()
        self._stagings.clear()
        self._since_s, self._spent_at_ns = self._now_s(), self.ring.words[SPENT_NS]

    def open(self, prepared: TappedPlan, drive: Callable[[float], None] | None) -> TappedRun | StagedTaking | None:
        """Reserves the room of a run, number `prepared.n_runs`, for all taps that want it; None if no tap does, or
        none has room."""
        wanted = [
            (index, tap)
            for index, tap in enumerate(self.taps)
            if tap.selects(prepared.plan, prepared.program.rank) and (prepared.n_runs - 1) % tap.every == 0
        ]
        staging = None
        on_device = prepared.on_device
        if wanted and on_device is not None:
            staging = self._take_staging(wanted, prepared, on_device)
            if staging is None:
                self.ring.words[UNSEEN_RUNS] += 1
                return None
        blocks = [self._reserve(index, tap, prepared, drive) for index, tap in wanted]
        run = TappedRun(self.ring, self._now_s, [block for block in blocks if block is not None])
        if staging is None or on_device is None:
            return run if any(blocks) else None
        if not any(blocks):
            self._stagings.setdefault(staging.nbytes, []).append(staging)
            return None
        made = run.staged(on_device.streams, staging, lambda memory: self._give_staging(made, memory))
        self._staged[made] = prepared.serial
        return made

    def close(self) -> None:
        """No run follows."""
        for run in list(self._staged):
            # Of a GPU that has failed there is nothing more.
            with suppress(Exception):
                run.settle()
        self.ring.close()

    @property
    def counters(self) -> dict[str, int]:
        """What was taken and dropped so far, by `optcc.runtime.taps.ring.COUNTERS`."""
        return {name: self.ring.words[word] for name, word in COUNTERS.items()}

    def _take_staging(self, wanted: list[tuple[int, Tap]], prepared: TappedPlan, gpu: OnGpu) -> Bytes | None:
        """Page-locked memory for a run; None if too many runs of the plan have some, or there is none."""
        if list(self._staged.values()).count(prepared.serial) >= STAGINGS_MAX:
            return None
        layouts = [self._layout(index, tap, prepared, self._phase(tap, prepared)) for index, tap in wanted]
        n_bytes = staged_bytes(layouts)
        free = self._stagings.get(n_bytes)
        if free:
            return free.pop()
        try:
            return gpu.pinned(n_bytes)
        except Exception as error:
            logger.warning("optcc: taps: no %d B of page-locked memory: %s", n_bytes, error)
            return None

    def _give_staging(self, run: StagedTaking, memory: Bytes) -> None:
        self._staged.pop(run, None)
        self._stagings.setdefault(memory.nbytes, []).append(memory)

    def _phase(self, tap: Tap, prepared: TappedPlan) -> int:
        return (prepared.n_runs - 1) // tap.every % tap.chunks

    def _reserve(
        self, index: int, tap: Tap, prepared: TappedPlan, drive: Callable[[float], None] | None
    ) -> _Block | None:
        layout = self._layout(index, tap, prepared, self._phase(tap, prepared))
        if not layout.specs:
            return None
        if layout.n_bytes > tap.budget_bytes:
            self._dropped(BUDGET_RUNS, layout)
            return None
        now_s = self._now_s()
        if self.ring.words[SPENT_NS] - self._spent_at_ns > tap.share * (now_s - self._since_s) * _NS:
            self._dropped(TIME_RUNS, layout)
            return None
        begin = self._try(layout, prepared, now_s)
        if begin is None and tap.when_full == "block" and drive is not None and layout.n_bytes <= self.ring.capacity:
            begin = self._wait(layout, tap, prepared, drive)
        whole = layout
        if begin is None and tap.when_full == "sample":
            step = 2
            while begin is None and step < 2 * len(whole.specs):
                layout = self._thinned(whole, step, prepared)
                begin, step = self._try(layout, prepared, now_s), 2 * step
        if begin is None:
            self._dropped(FULL_RUNS, whole)
            return None
        if layout is not whole:
            # The run was not dropped, some of its records were.
            self._dropped(FULL_RUNS, whole)
            self._count(FULL_RUNS, -1, -len(layout.specs), -layout.record_bytes)
        self._count(RUNS, 1, len(layout.specs), layout.record_bytes)
        return _Block(layout, begin)

    def _try(self, layout: TapLayout, prepared: TappedPlan, now_s: float) -> int | None:
        return self.ring.reserve(
            *(layout.n_bytes, len(layout.specs), layout.number, prepared.serial, prepared.n_runs, now_s)
        )

    def _wait(self, layout: TapLayout, tap: Tap, prepared: TappedPlan, drive: Callable[[float], None]) -> int | None:
        """Room that the drain makes, while all other runs go on; None after `block_s`, or without a drain."""
        words, since_s = self.ring.words, self._now_s()
        begin = None
        while begin is None and self._drain_is_alive(words[DRAIN_PID]):
            left_s = since_s + tap.block_s - self._now_s()
            if left_s <= 0:
                break
            drive(min(left_s, _TURN_S))
            begin = self._try(layout, prepared, self._now_s())
        words[BLOCKED_NS] += int((self._now_s() - since_s) * _NS)
        return begin

    def _dropped(self, why: int, layout: TapLayout) -> None:
        self._count(why, 1, len(layout.specs), layout.record_bytes)

    def _count(self, first: int, runs: int, records: int, n_bytes: int) -> None:
        words = self.ring.words
        words[first] += runs
        words[first + RECORDS - RUNS] += records
        words[first + BYTES - RUNS] += n_bytes

    def _layout(self, index: int, tap: Tap, prepared: TappedPlan, phase: int) -> TapLayout:
        key = prepared.plan.digest, prepared.program.rank, index, phase
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            given, wanted = prepared.input_bytes, prepared.output_bytes
            layout = TapLayout(tap, prepared.program, (given[1] - given[0], wanted[1] - wanted[0]), phase)
            self._layouts[key] = layout
            self._write(layout, prepared)
        return layout

    def _thinned(self, whole: TapLayout, step: int, prepared: TappedPlan) -> TapLayout:
        layout = whole.thinned(step)
        if not layout.number:
            self._write(layout, prepared)
        return layout

    def _write(self, layout: TapLayout, prepared: TappedPlan) -> None:
        if layout.specs:
            self._n_layouts += 1
            layout.number = self._n_layouts
            self._keep(layout.encode(layout.number, prepared.program.rank, tuple(prepared.ranks)), prepared.plan)
