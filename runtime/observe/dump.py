"""A dump: what was read of a rank's page, as a JSON file.

    {"format": "optcc-flight/1", "identity": {...}, "status": {...}, "process": "...", "begun": 7, "done": 6,
     "is_driven": true, "events": [[number, seconds, "posted", a, b, c, d, x, y], ...]}

The kinds of events and what their numbers are: `optcc.runtime.observe.recorder`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from optcc.errors import CodecError
from optcc.files import read_file, replace_file
from optcc.runtime.observe.page import BEGUN, DONE, IS_DRIVEN, EventRecord, PageContents
from optcc.runtime.observe.recorder import KINDS
from optcc.runtime.observe.status import RankIdentity, RankStatus
from optcc.strict_json import decode

FORMAT = "optcc-flight/1"
ALIVE, STOPPED, GONE, UNKNOWN = "alive", "stopped", "gone", "unknown"
"""The process of a rank when its page was read: unknown to the rank itself, and on other hosts."""
_DUMP_BYTES_MAX = 1 << 28


class FlightDump(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of one rank; `records` oldest first."""

    identity: RankIdentity
    status: RankStatus
    process: str
    begun: int
    done: int
    is_driven: bool
    records: tuple[EventRecord, ...]

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.identity.rank

    @classmethod
    def of(cls, page: PageContents, process: str = UNKNOWN) -> FlightDump:
        """What a page says. Raises CodecError if it is not one, or its rank was killed before it said anything."""
        try:
            identity = msgspec.json.decode(page.identity, type=RankIdentity)
            status = msgspec.json.decode(page.status, type=RankStatus)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CodecError(f"page: {error}") from None
        words = page.words
        return cls(identity, status, process, words[BEGUN], words[DONE], words[IS_DRIVEN] > 0, page.records)

    def encode(self) -> bytes:
        """The dump as a file."""
        events = [(each.number, each.at_s, KINDS[each.kind], *each[3:]) for each in self.records]
        fields = {
            "format": FORMAT,
            "identity": self.identity,
            "status": self.status,
            "process": self.process,
            "begun": self.begun,
            "done": self.done,
            "is_driven": self.is_driven,
            "events": events,
        }
        return msgspec.json.encode(fields)


class _Event(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int
    at_s: float
    kind: str
    a: int
    b: int
    c: int
    d: int
    x: int
    y: int


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    identity: RankIdentity
    status: RankStatus
    process: str
    begun: int
    done: int
    is_driven: bool
    events: tuple[_Event, ...]


_DECODER = msgspec.json.Decoder(_File)


def write_dump(dump: FlightDump, folder: Path) -> Path:
    """Writes `flight-JOB-rankR.json` into a folder, which is made; raises InputError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flight-{dump.identity.job}-rank{dump.rank}.json"
    replace_file(path, dump.encode())
    return path


def read_dump(path: Path) -> FlightDump:
    """The dump in a file. Raises CodecError, naming the file, if it is none, InputError if it cannot be read."""
    file = decode(read_file(path, _DUMP_BYTES_MAX), _DECODER, f"file {str(path)!r}: $")
    if file.format != FORMAT:
        raise CodecError(f"file {str(path)!r}: format {file.format!r}: must be {FORMAT!r}")
    if not 0 <= file.identity.rank < file.identity.n_ranks:
        raise CodecError(f"file {str(path)!r}: rank {file.identity.rank} of {file.identity.n_ranks}: must be below")
    records = []
    for each in file.events:
        if each.kind not in KINDS:
            raise CodecError(f"file {str(path)!r}: event {each.number}: {each.kind!r}: must be a kind of event")
        records.append(EventRecord(each.number, each.at_s, KINDS.index(each.kind), *msgspec.structs.astuple(each)[3:]))
    return FlightDump(
        *(file.identity, file.status, file.process, file.begun, file.done, file.is_driven), tuple(records)
    )
