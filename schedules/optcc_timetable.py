"""OptCC's timetable in closed form, for one straggler: when each transfer starts, without a scheduler.

The compiler orders the ports of OptCC by a list schedule, as it does for every schedule (`optcc.passes.timetable`).
Here is what there is to find: a timetable that can be written down and proved, for all p, l and k, and the least time
that any order of the same transfers can take.

A slot is the time of one section through a healthy port, n/(qkB): q = p - 1 healthy servers, k segments. The straggler
takes l slots for a section. Segments with an even number run 1-2-3-4, those with an odd one 3-1-4-2. Time is cut into
periods, one for each segment, in which every section makes one step of the same kind.

**fifo.** All sections of a segment go around the ring side by side: stage 1 is a block of q - 1 slots in which every
port of the ring is busy, and so is stage 4. Segment s has its stage 1 in period s, which is P = max(lq, 2q - 1) slots
long, and in each of the straggler's ports a block of lq. For l >= 2 a period of the healthy is

    stage 1 | one slot to the straggler | stage 4 | rest, its last slot from the straggler

and below that one slot is for both directions, in between:

    stage 1 | to the straggler ... from the straggler | stage 4

The network stores what comes from all owners in that one slot, and what the straggler has sent before.

**exclusive.** A transfer with the straggler holds both ports, so the sections must come one after the other: those of a
segment are 2 slots apart, and a period is 2q slots. A slot here is max(l, 2)/2 of the slots above.

`ClosedForm.least` is below every order, by what each port must do: the in port of the straggler takes nothing before a
section has made the q - 1 steps of stage 1, and takes klq slots; a healthy port has 2q - 1 sections a segment (under
exclusive ports 2(q - 1) and l slots). For l >= 2 the fifo timetable takes exactly that, so it is the best there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from optcc.errors import InputError

Model = Literal["fifo", "exclusive"]


class Start(NamedTuple):
    """When a transfer's first byte leaves, and when its in port begins to take it, in slots."""

    leaves: Fraction
    taken: Fraction


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The timetable of OptCC on `ranks` ranks, one of them `slowdown` times slower, with an even number of `segments`.

    >>> form = ClosedForm(4, Fraction(2), 8)
    >>> form.period, form.total, form.least
    (Fraction(6, 1), Fraction(50, 1), Fraction(50, 1))
    >>> form.starts(3, segment=0, section=1)
    Start(leaves=Fraction(8, 1), taken=Fraction(11, 1))

    Raises InputError for ranks, a slowdown or segments that cannot be.
    """

    ranks: int
    slowdown: Fraction
    segments: int
    model: Model = "fifo"

    def __post_init__(self) -> None:
        if self.ranks < 3:
            raise InputError(f"{self.ranks} ranks: must be at least 3, or there is no ring beside the straggler")
        if self.slowdown < 1:
            raise InputError(f"slowdown {self.slowdown}: must be at least 1")
        if self.segments < 2 or self.segments % 2:
            raise InputError(f"{self.segments} segments: must be even, and at least 2")
        if self.model not in ("fifo", "exclusive"):
            raise InputError(f"model {self.model!r}: must be fifo or exclusive")

    @property
    def healthy(self) -> int:
        """q: the servers of the ring, and the sections of a segment."""
        return self.ranks - 1

    @property
    def width(self) -> Fraction:
        """Slots from one step of the timetable to the next."""
        return Fraction(1) if self.model == "fifo" else max(self.slowdown, Fraction(2)) / 2

    @property
    def period(self) -> Fraction:
        """Slots from one segment to the next."""
        if self.model == "exclusive":
            return 2 * self.healthy * self.width
        return max(self.slowdown * self.healthy, Fraction(2 * self.healthy - 1))

    @property
    def lead(self) -> Fraction:
        """Slots by which the straggler starts before the ring: min(l - 1, 1 - 1/q) q where l < 2, else none.

        Its first block ends with the slot in which the healthy take it all.
        """
        if self.model == "exclusive" or self.slowdown >= 2:
            return Fraction(0)
        return self.slowdown * self.healthy + self.healthy - 1 - self.period

    @property
    def returned_after(self) -> int:
        """Periods after stage 1 of a segment 1-2-3-4 in which it comes back from the straggler.

        One, if the straggler's block in is far enough before its block out; else three, as the even ones are taken.
        """
        if self.model == "exclusive":
            return 3
        ready = self.slowdown * (self.healthy + 1) + 2 * (self.healthy - 1)
        return 1 if self.slowdown >= 2 or 2 * self.period >= ready else 3

    @property
    def total(self) -> Fraction:
        """Slots until all is done.

        With P the `period` and d the `lead`: fifo kP + q - 1 + d, two periods more if segments come back after three;
        exclusive (k + 3)P + 1 less 1/q of a period.
        """
        q, k = self.healthy, self.segments
        if self.model == "exclusive":
            return (k + 3) * self.period - 2 * self.width + 1
        return (k - 1 + self.returned_after) * self.period + q - 1 + self.lead

    @property
    def least(self) -> Fraction:
        """Slots below which no order of the same transfers can be done."""
        q, k = self.healthy, self.segments
        passing = Fraction(1) if self.model == "fifo" else self.slowdown
        return max(k * self.slowdown * q + q - 1, k * (2 * (q - 1) + passing))

    def starts(self, stage: int, segment: int, section: int, step: int = 0) -> Start:
        """When the transfer of this `stage` (1 to 4) starts; `step` is 0 to q - 2 in stages 1 and 4, else 0.

        Raises InputError for a transfer that there is not.
        """
        steps = self.healthy - 1 if stage in (1, 4) else 1
        given = ((stage - 1, 4), (segment, self.segments), (section, self.healthy), (step, steps))
        if not all(0 <= value < count for value, count in given):
            what = f"stage {stage}, segment {segment}, section {section}, step {step}"
            sizes = f"{self.segments} segments of {self.healthy} sections, {steps} steps"
            raise InputError(f"{what}: must be one of stages 1 to 4, {sizes}, counted from 0")
        if self.model == "exclusive":
            at = self.width * (self._exclusive(stage, segment, section) + step)
            return Start(at, at)
        q, slowdown, period, two_gaps = self.healthy, self.slowdown, self.period, self.slowdown >= 2
        passed = segment % 2 == 0
        first = self.lead + segment * period
        back = segment + self.returned_after if passed else segment - 1  # the period in which the healthy take it back
        end = self.lead + (back + 1) * period - (0 if two_gaps else q - 1)
        if stage == 1:
            return Start(first + step, first + step)
        if stage == 2:
            return Start(first + q - 1, first + q - 1 + slowdown * section)
        if stage == 3:
            return Start(end - slowdown * (q - section), end - 1)
        if not passed:
            at = first + (q if two_gaps else period - (q - 1))
        elif segment + 2 == self.segments:  # the last one has no stage 1 before it
            at = end + (0 if two_gaps else q - 1)
        else:
            at = end + (q if two_gaps else period)
        return Start(at + step, at + step)

    def _exclusive(self, stage: int, segment: int, section: int) -> int:
        """The start of a section's first step in the stage, in steps of the timetable."""
        q = self.healthy
        passed = segment % 2 == 0
        if stage == 1:
            return 2 * q * segment + 2 * section + 3
        if stage == 2:
            return 2 * q * (segment + 1) + 2 * section + 2
        if stage == 3:
            return 2 * q * (segment + 3) + 2 * section if passed else 2 * q * (segment - 1) + 2 * ((section + 1) % q)
        return 2 * q * (segment + (3 if passed else 1)) + 2 * section + q + 2
