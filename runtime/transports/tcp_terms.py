"""What each rank says of itself when the ranks of the TCP transport meet, and what all must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from optcc.errors import InputError, MismatchError
from optcc.runtime.protocol.hello import JOB_BYTES, SECRET_BYTES
from optcc.runtime.protocol.settings import NicEntry, differs
from optcc.runtime.rendezvous import Meeting


class TcpTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's record when the ranks meet: what all must agree on, and its NICs."""

    version: int
    chunk_bytes: int
    window: int
    crc: bool
    nics: tuple[NicEntry, ...]
    inside: NicEntry | None = None
    # Absent where it is off, so that the record of who does not use it is what it was.
    authenticate: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    partition_s: float | msgspec.UnsetType = msgspec.UNSET
    regroups: Literal[True] | msgspec.UnsetType = msgspec.UNSET


def read_insides(everyone: Sequence[TcpTerms]) -> list[NicEntry]:
    """What each rank listens at for those of its host; none unless all say it, and two are on one host."""
    insides = [terms.inside for terms in everyone if terms.inside is not None]
    return insides if len({inside[0] for inside in insides}) < len(insides) == len(everyone) else []


def read_book(meeting: Meeting, own: TcpTerms) -> list[TcpTerms]:
    """Every rank's record; raises MismatchError, naming who, if ranks are set up differently."""
    if len(meeting.secret) != SECRET_BYTES or len(meeting.job) != JOB_BYTES:
        raise InputError(f"secret of {len(meeting.secret)} B: must be {SECRET_BYTES} B, and the job {JOB_BYTES} B")
    book: list[TcpTerms] = []
    for rank, record in enumerate(meeting.records):
        try:
            terms = msgspec.json.decode(record, type=TcpTerms)
        except msgspec.DecodeError as error:
            raise MismatchError(f"rank {rank}: its record is not one: {error}") from error
        for field in ("version", "chunk_bytes", "window", "crc"):
            ours, theirs = getattr(own, field), getattr(terms, field)
            if ours != theirs:
                raise differs(rank, meeting.rank, field, theirs, ours)
        if terms.authenticate != own.authenticate:
            raise differs(rank, meeting.rank, "authenticate", terms.authenticate is True, own.authenticate is True)
        if terms.partition_s != own.partition_s:
            raise differs(rank, meeting.rank, "partition_s", terms.partition_s or 0.0, own.partition_s or 0.0)
        if terms.regroups != own.regroups:
            raise differs(rank, meeting.rank, "regroups", terms.regroups is True, own.regroups is True)
        if not terms.nics:
            raise MismatchError(f"rank {rank} has no NIC")
        book.append(terms)
    return book
