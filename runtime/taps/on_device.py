"""Taps where the arrays of a plan are in a GPU's memory: what is taken is copied out beside the collective.

A chunk is copied to page-locked memory on the stream OUT, behind what was queued on COMPUTE so far, and condensed on
the host once the GPU has passed the copy: at the next turn of the engine's loop after that. Neither the host nor the
kernels of other chunks wait for it. What is queued later and writes where such a copy still reads comes behind OUT, and
so does the caller's stream at the end of a run. What arrives in a slot of the host's memory is condensed there at once.

Theory of what is read when:

    input      behind the caller's mark, before any kernel
    sent       when the state machine asks for the message: all that it is made of is on COMPUTE by then. It is the
               array that is read; the copy of it that the transport gets is made by the same stream
    arrived    when the state machine asks for its computation: before that is queued. A slot of the GPU's memory is
               given to the next message once COMPUTE is past the computation, which therefore comes behind OUT
    result     when the computation is done, or queued, before what follows from it is
    output     behind what divides it and brings it to its place

The block of a run is done when its last copy is: with the run, or when this rank is inside the run-time the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.runtime.buffers import BoundAction
from optcc.runtime.cupy_kernels import address_of
from optcc.runtime.device_streams import COMPUTE, OUT, DeviceStreams
from optcc.runtime.taps.layout import TapLayout
from optcc.runtime.taps.policy import ARRIVED, INPUT, OUTPUT, RESULT, SENT

_ALIGNMENT = 256
STAGINGS_MAX = 4
"""Of runs of one plan so many may be copied out at a time; of another one nothing is taken."""
Bytes = npt.NDArray[np.uint8]


class StagedTaking:
    """What takes chunks of one run on a GPU: `take(point, instruction, chunk)` condenses one that is in host memory,
    and `finish(number)` ends the block.

    `staging` is page-locked memory of `staged_bytes`, given back by `release`.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        staging: Bytes,
        wants: Callable[[str, int], bool],
        take: Callable[[str, int, Any], None],
        finish: Callable[[int], None],
        release: Callable[[Bytes], None],
    ) -> None:
        self._streams, self._staging, self._at = streams, staging, 0
        self._wants, self._take, self._finish, self._release = wants, take, finish, release
        # What OUT may still be reading: the first byte and the one after the last, by copy.
        self._reading: dict[int, tuple[int, int]] = {}
        self._n_copies = self._n_left = 0
        self._number: int | None = None

    def begins(self, given: Any) -> None:
        """See `optcc.runtime.watching.RunTaps`."""
        if given is not None:
            self._copy(INPUT, -1, given)

    def sending(self, entry: BoundAction) -> None:
        """See `optcc.runtime.watching.RunTaps`."""
        self._copy(SENT, entry[3], entry[2])

    def computing(self, entry: BoundAction) -> None:
        """See `optcc.runtime.watching.RunTaps`; `entry` has the arrays, not their addresses."""
        _, instruction, target, source = entry
        if isinstance(source, np.ndarray):
            if self._wants(ARRIVED, instruction):
                self._take(ARRIVED, instruction, source)
        elif self._copy(ARRIVED, instruction, source):
            self._order_behind_copies()
        begin = address_of(target)
        if any(start < begin + target.nbytes and begin < stop for start, stop in self._reading.values()):
            self._order_behind_copies()

    def computed(self, entry: BoundAction) -> None:
        """See `optcc.runtime.watching.RunTaps`."""
        self._copy(RESULT, entry[1], entry[2])

    def ending(self) -> None:
        """The output is about to be divided and brought to its place."""
        self._order_behind_copies()

    def ends(self, output: Any, number: int) -> None:
        """See `optcc.runtime.watching.RunTaps`; what is queued on COMPUTE from now on comes behind all copies."""
        if output is not None:
            self._copy(OUTPUT, -1, output)
        self._order_behind_copies()
        self._number = number
        self._end_if_done()

    def wrapped(self, calls: list[Callable[[], Any]], bound: list[BoundAction]) -> list[Callable[[], Any]]:
        """Steps on a GPU are never remembered."""
        raise AssertionError(f"{len(calls)} calls of {len(bound)} actions on a GPU")

    def settle(self) -> None:
        """Waits for the GPU, and ends the block."""
        self._streams.streams[OUT].synchronize()
        while self._n_left and self._streams.advance():
            pass

    def _copy(self, point: str, instruction: int, chunk: Any) -> bool:
        """Queues a copy of a chunk, if it is wanted; whether it is."""
        if not self._wants(point, instruction):
            return False
        streams, n_bytes, address = self._streams, chunk.nbytes, address_of(chunk)
        host = self._staging[self._at : self._at + n_bytes]
        assert host.nbytes == n_bytes, f"{point} of instruction {instruction}: more than was reserved"
        self._at += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        self._n_copies += 1
        self._n_left += 1
        copy = self._n_copies
        self._reading[copy] = address, address + n_bytes
        with streams.device:
            streams.order(OUT, COMPUTE)
            streams.copy_out(address_of(host), address, n_bytes)

        def copied() -> None:
            self._reading.pop(copy, None)
            self._n_left -= 1
            self._take(point, instruction, host)
            self._end_if_done()

        streams.after(OUT, copied)
        return True

    def _order_behind_copies(self) -> None:
        """What is queued on COMPUTE from now on does not write what OUT still reads."""
        if self._reading:
            with self._streams.device:
                self._streams.order(COMPUTE, OUT)
            self._reading.clear()

    def _end_if_done(self) -> None:
        if self._number is not None and not self._n_left:
            self._finish(self._number)
            self._release(self._staging)


def staged_bytes(layouts: Sequence[TapLayout]) -> int:
    """How much page-locked memory a run takes at most: each chunk once, however much of it is taken."""
    chunks: dict[tuple[str, int], int] = {}
    for layout in layouts:
        for point, places in layout.places.items():
            for instruction, taken in places.items():
                spec = layout.specs[taken[0][0]]
                chunks[point, instruction] = spec.stop - spec.start
    return sum(-(-n_bytes // _ALIGNMENT) * _ALIGNMENT for n_bytes in chunks.values())
