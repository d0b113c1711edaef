"""`Tap`: of which chunks what is taken, how often, and at what cost at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec

from optcc.errors import InputError, did_you_mean
from optcc.plan import Plan
from optcc.strict_json import decode
from optcc.units import parse_size

FULL, SAMPLE, NORMS, HISTOGRAM, CHECKSUM, GUARD = "full", "sample", "norms", "histogram", "checksum", "guard"
WHATS = (FULL, SAMPLE, NORMS, HISTOGRAM, CHECKSUM, GUARD)
"""What is taken of a chunk: its bytes, every so many of its elements, their norms, how many have which binary exponent,
the CRC-32 of its bytes, and how many are NaN or infinite."""
INPUT, SENT, ARRIVED, RESULT, OUTPUT = "input", "sent", "arrived", "result", "output"
What = Literal["full", "sample", "norms", "histogram", "checksum", "guard"]
Point = Literal["input", "sent", "arrived", "result", "output"]
POINTS: tuple[Point, ...] = ("input", "sent", "arrived", "result", "output")
"""Where it is taken; see `optcc.runtime.taps`."""
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_NO_LIMIT = 1 << 40
BLOCK_S_MAX = 60.0
TAPS_MAX = 64


class Tap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is taken.

    `collective`, `plan` and `stage` are names or patterns such as `reduce*`; `segments` and `ranks` are numbers, none
    for all; `ranks` are those at which it is taken, counted within the plan. Taken is one of `every` runs of a plan,
    and in it one of `chunks` chunks, others at each such run; of a sample, one of `stride` elements. A run may take
    `budget_bytes` of the ring, and all of them `share` of the time since the tap was attached. `when_full` and
    `block_s`, in seconds, say what happens if the ring has no room.

    >>> Tap.parse("norms,checksum collective=allreduce stage=reduce* every=10").stage
    'reduce*'

    Raises InputError, on `check`, for what cannot be.
    """

    what: tuple[What, ...]
    collective: str = "*"
    plan: str = "*"
    stage: str = "*"
    segments: tuple[_Index, ...] = ()
    ranks: tuple[_Index, ...] = ()
    points: tuple[Point, ...] = ("result",)
    every: _Count = 1
    chunks: _Count = 1
    stride: _Count = 16
    budget_bytes: _Count = _NO_LIMIT
    share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    when_full: Literal["drop", "sample", "block"] = "drop"
    block_s: Annotated[float, msgspec.Meta(ge=0.0, le=BLOCK_S_MAX)] = 1.0

    @classmethod
    def parse(cls, text: str) -> Tap:
        """The tap in words: what is taken, then `field=value` for what differs from the defaults.

        Raises InputError, naming the word.
        """
        whats, *words = text.split() or [""]
        fields: dict[str, Any] = {"what": whats.split(",")}
        for word in words:
            name, equals, value = word.partition("=")
            if name not in _READERS or not equals:
                known = ", ".join(_READERS)
                raise InputError(f"tap {text!r}: {word!r}: must be one of {known}{did_you_mean(name, _READERS)}")
            try:
                fields[_FIELDS.get(name, name)] = _READERS[name](value)
            except ValueError:
                raise InputError(f"tap {text!r}: {name}: {value!r}: must be a number, or several as 0,2-5") from None
        return _converted(fields, f"tap {text!r}")

    def check(self) -> Tap:
        """Itself; raises InputError, naming the field and the rule, for what cannot be."""
        return _converted(msgspec.to_builtins(self), "tap")

    def selects(self, plan: Plan, rank: int) -> bool:
        """True if runs of `plan` may be of interest at `rank`, one of the plan's."""
        return (
            fnmatchcase(plan.collective.name, self.collective)
            and fnmatchcase(plan.name, self.plan)
            and (not self.ranks or rank in self.ranks)
        )

    def takes_of(self, stage: str, segment: int) -> bool:
        """True if transfers of this stage and segment are of interest."""
        return fnmatchcase(stage, self.stage) and (not self.segments or segment in self.segments)


def _converted(fields: Any, where: str) -> Tap:
    try:
        tap = msgspec.convert(fields, Tap)
    except msgspec.ValidationError as error:
        rule, _, at = str(error).partition(" - at `$.")
        raise InputError(f"{where}: {at.rstrip('`') or 'tap'}: {rule}") from None
    for name, values in (("what", tap.what), ("points", tap.points)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"{where}: {name}: {', '.join(values) or 'none'}: must be one or more, each once")
    return tap


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= high - low < 1 << 16:
            raise ValueError
        found += range(low, high + 1)
    return tuple(found)


_FIELDS = {"budget": "budget_bytes", "full": "when_full", "block": "block_s"}
_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("collective", "plan", "stage", "full"), str),
    **dict.fromkeys(("segments", "ranks"), _numbers),
    **dict.fromkeys(("every", "chunks", "stride"), int),
    **dict.fromkeys(("share", "block"), float),
    "points": lambda text: tuple(text.split(",")),
    "budget": parse_size,
}

FORMAT: Literal["optcc-taps/1"] = "optcc-taps/1"


class _TapsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["optcc-taps/1"]
    taps: Annotated[tuple[Tap, ...], msgspec.Meta(max_length=TAPS_MAX)]
    ring_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 36)]


_DECODER = msgspec.json.Decoder(_TapsFile)


def encode_taps(taps: Sequence[Tap], ring_bytes: int) -> bytes:
    """Taps as a file of the format `optcc-taps/1`."""
    return msgspec.json.encode(_TapsFile(FORMAT, tuple(taps), ring_bytes))


def decode_taps(data: bytes, path: str) -> tuple[tuple[Tap, ...], int]:
    """The taps in such a file and the length of ring that is wanted, bytes; raises CodecError or InputError."""
    file = decode(data, _DECODER, path)
    return tuple(each.check() for each in file.taps), file.ring_bytes
