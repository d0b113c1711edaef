"""Agreement before the first byte: all ranks are about to run the same verified plan, or none runs anything.

Every rank sends one record of fixed size and gets all of them, so all ranks come to the same conclusion.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from optcc.collective import COLLECTIVES, DTYPE_BYTES, REDUCTIONS, check_dtype
from optcc.errors import MismatchError
from optcc.plan import Plan
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S
from optcc.transfers import Transfers
from optcc.verdict import PROVED, Verdict

PROTOCOL = 3
"""Version of the run-time's protocol: ranks of different versions refuse to run together."""

_RECORD = struct.Struct("<8sIIQIIIIIHH32s")
_MAGIC = b"optcc-ag"
_DTYPES = tuple(DTYPE_BYTES)
_COLLECTIVES = (*COLLECTIVES, "declared")
"""The last stands for all that are declared; plans for different ones have different digests."""
_CACHED = {"digest", "instruction_lane", "instruction_rank"}
"""What a plan keeps beside its fields, once it was asked for."""
_MESSAGES = ("through the host's memory", "by CUDA IPC")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a rank is about to run. Fields stand in the order in which a disagreement is explained."""

    protocol: int
    n_ranks: int
    size_bytes: int
    dtype: str
    reduction: str
    collective: str
    root: int
    group: int
    messages: str
    verdict: str
    digest: str

    @classmethod
    def of(cls, plan: Plan, proved: bool, group: int = 0, shared: bool = False) -> Terms:
        """The terms of a plan, whether this rank holds a proof of it, the group of its channels, and whether its ranks
        exchange handles of GPU memory."""
        t, c = plan.transfers, plan.collective
        verdict = "proved" if proved else "not proved"
        name = c.name if not c.cells else _COLLECTIVES[-1]
        what = t.size_bytes, t.dtype, t.reduction, name, c.root
        return cls(PROTOCOL, plan.n_ranks, *what, group, _MESSAGES[shared], verdict, plan.digest)

    def pack(self) -> bytes:
        """The record."""
        codes = (_DTYPES.index(self.dtype), REDUCTIONS.index(self.reduction), _COLLECTIVES.index(self.collective))
        proved = int(self.verdict == "proved")
        return _RECORD.pack(
            *(_MAGIC, self.protocol, self.n_ranks, self.size_bytes, *codes, self.root, self.group),
            *(_MESSAGES.index(self.messages), proved),
            bytes.fromhex(self.digest),
        )

    @classmethod
    def unpack(cls, record: bytes) -> Terms:
        """The terms in a record; raises MismatchError if it is not one."""
        if len(record) != _RECORD.size or record[: len(_MAGIC)] != _MAGIC:
            raise MismatchError(f"agreement: {record[:8]!r} of {len(record)} B: must be a record of optcc")
        _, protocol, n_ranks, size_bytes, *codes, proved, digest = _RECORD.unpack(record)
        dtype, reduction, collective, root, group, messages = codes
        return cls(
            *(protocol, n_ranks, size_bytes, _name(_DTYPES, dtype), _name(REDUCTIONS, reduction)),
            *(_name(_COLLECTIVES, collective), root, group, _name(_MESSAGES, messages)),
            *("proved" if proved else "not proved", digest.hex()),
        )


def refuse(plan: Plan, verdict: Verdict, n_ranks: int) -> str:
    """Why this plan must not run here; empty if it may.

    Nothing is believed here but the verifier: the digest is computed again, and the verdict must carry its seal.
    """
    if type(plan) is not Plan or type(verdict) is not Verdict:
        return f"plan {type(plan).__name__}, verdict {type(verdict).__name__}: must be a Plan and a Verdict themselves"
    added = vars(plan).keys() - {field.name for field in fields(plan)} - _CACHED
    if added or type(plan.transfers) is not Transfers:
        what = ", ".join(sorted(added)) or f"transfers {type(plan.transfers).__name__}"
        return f"plan: {what}: must be nothing but what a Plan has"
    for name in _CACHED - {"digest"}:  # made again from the columns, which the digest is of
        vars(plan).pop(name, None)
    if plan.compute_digest() != plan.digest:
        return f"plan {plan.digest[:12]}: was changed since its digest was computed: must be as it was proved"
    if verdict.digest != plan.digest:
        return f"plan {plan.digest[:12]}: the verdict is of {verdict.digest[:12]}: must be of the plan that runs"
    if verdict.verdict != PROVED:
        return f"plan {plan.digest[:12]}: {verdict.verdict}: must be proved before it runs"
    if not verdict.is_sealed:
        return f"plan {plan.digest[:12]}: the verdict was not made by the verifier: take that of verify_plan"
    if plan.n_ranks != n_ranks:
        return f"plan {plan.digest[:12]}: {plan.n_ranks} ranks on a network of {n_ranks}: must be equal"
    itemsize = check_dtype(plan.transfers.dtype)
    for label, offsets in (("src_offset", plan.src_offset), ("dst_offset", plan.dst_offset), ("bytes", plan.bytes)):
        wrong = np.flatnonzero((offsets >= 0) & (offsets % itemsize != 0))
        if len(wrong):
            return f"instruction {wrong[0]}: {label} {offsets[wrong[0]]}: must be a multiple of {itemsize} B"
    return ""


class Gathers(Protocol):
    """The ranks that agree."""

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """As `Transport.allgather`."""
        ...


def agree(
    ranks: Gathers,
    plan: Plan,
    *,
    proved: bool = True,
    group: int = 0,
    shared: bool = False,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> list[Terms]:
    """Exchanges the terms of every rank; returns them once they are known to be equal.

    Raises MismatchError at every rank, naming who differs in what, if any two ranks differ.
    """
    records = ranks.allgather(Terms.of(plan, proved, group, shared).pack(), timeout_s)
    terms = [Terms.unpack(record) for record in records]
    disagreement = explain(terms)
    if disagreement:
        raise MismatchError(disagreement, culprits=differing(terms))
    return terms


def differing(terms: Sequence[Terms]) -> list[int]:
    """The ranks that differ from the majority in the first field in which any do."""
    for field in Terms.__slots__:
        values = [getattr(each, field) for each in terms]
        norm = Counter(values).most_common(1)[0][0]
        found = [rank for rank, value in enumerate(values) if value != norm]
        if found:
            return found
    return []


def explain(terms: Sequence[Terms]) -> str:
    """Who differs from the majority in which field; empty if nobody does.

    The digest, which differs whenever anything does, is named only where nothing else explains it.
    """
    parts: list[str] = []
    for field in Terms.__slots__:
        if field == "digest" and parts:
            break
        values = [getattr(each, field) for each in terms]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        # most_common is stable: of equally common values, the lowest rank's is called the norm.
        norm = counts.most_common(1)[0][0]
        usual = _ranks([rank for rank, value in enumerate(values) if value == norm])
        for other in dict.fromkeys(value for value in values if value != norm):
            ranks = [rank for rank, value in enumerate(values) if value == other]
            verb = "differs" if len(ranks) == 1 else "differ"
            label = "the plan's digest" if field == "digest" else field
            shown, wanted = (other[:12], norm[:12]) if field == "digest" else (other, norm)
            parts.append(f"{_ranks(ranks)} {verb} from {usual}: {label} {shown} instead of {wanted}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _name(names: Sequence[str], code: int) -> str:
    return names[code] if code < len(names) else f"code {code}"
