"""`Verdict`: the result of verifying a plan, as a value that a run-time checks and a cache stores.

Anybody can make a `Verdict`; a run-time believes those that are sealed. A seal is a MAC over the whole verdict with a
key of this process, and two places set it: the verifier (`optcc.verify.plan`), and `optcc.files.VerdictCache` for an
entry that carries the seal of the user's own key.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import asdict, dataclass, field, replace

from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN
from optcc.show import Card, Shown

PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"
PROPERTIES = ("matching", "deadlock", "races", "result", "agreement")
FURTHER = ("translation", "timing", "limits")
"""Properties that are judged only against a given schedule, topology or target."""
_KEY = secrets.token_bytes(32)
"""Of this process, and of those forked from it."""
LINES_MAX = 20
"""Limit on the lines of a counterexample."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Why a property fails, in words: the rank, the bytes, and the transfers or instructions involved."""

    property: str
    summary: str
    rank: int | None = None
    first_byte: int | None = None
    last_byte: int | None = None
    trace: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.property not in (*PROPERTIES, *FURTHER, "replay"):
            raise AssertionError(self.property)
        if len(self.trace) >= LINES_MAX:
            front, back = (LINES_MAX - 1) // 2, (LINES_MAX - 3) // 2
            cut = f"... {len(self.trace) - front - back} more"
            object.__setattr__(self, "trace", (*self.trace[:front], cut, *self.trace[-back:]))

    def __str__(self) -> str:
        lines = [f"{self.property}: {self.summary}"]
        lines += [f"  {line}" for line in self.trace]
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "trace": list(self.trace)}


@dataclass(frozen=True, slots=True)
class Verdict(Shown):
    """The verdict on a plan and on each property judged, with the counterexample of a refuted one.

    A property after a failed one is `unknown`. `verifier` is the version of what has judged; `conditions` are what a
    property holds under, by its name, where that is not part of the plan: ports and rates, or a run-time's version.
    """

    digest: str
    properties: dict[str, str]
    counterexample: Counterexample | None = None
    verifier: str = ""
    conditions: tuple[tuple[str, str], ...] = ()
    seal: bytes = field(default=b"", repr=False, compare=False)

    def __post_init__(self) -> None:
        # Not asserts, which `python -O` removes: of fewer properties all may be proved.
        if not set(PROPERTIES) <= set(self.properties) <= {*PROPERTIES, *FURTHER}:
            raise AssertionError(self.properties)
        if not set(self.properties.values()) <= {PROVED, REFUTED, UNKNOWN}:
            raise AssertionError(self.properties)
        if (REFUTED in self.properties.values()) != (self.counterexample is not None):
            raise AssertionError(f"{self.properties}: {self.counterexample}")

    def and_also(self, name: str, found: Counterexample | None, condition: str = "") -> Verdict:
        """This verdict extended by property `name`: refuted by `found`, proved under `condition` if that is None.

        If this verdict is not proved, `name` is unknown. The extended verdict has no seal.
        """
        judged = UNKNOWN if self.verdict != PROVED else PROVED if found is None else REFUTED
        return replace(
            self,
            properties=self.properties | {name: judged},
            counterexample=found if judged == REFUTED else self.counterexample,
            conditions=(*self.conditions, (name, condition)) if condition and judged != UNKNOWN else self.conditions,
            seal=b"",
        )

    @property
    def is_sealed(self) -> bool:
        """Whether the verifier has made this verdict, exactly as it is, in this process."""
        return _is_plain(self) and hmac.compare_digest(self.seal, _mac(self))

    @property
    def verdict(self) -> str:
        """`proved` if every property is, `refuted` if one is, else `unknown`."""
        values = set(self.properties.values())
        return REFUTED if REFUTED in values else PROVED if values == {PROVED} else UNKNOWN

    @property
    def exit_code(self) -> int:
        """The exit code of a command for this verdict."""
        return {PROVED: EXIT_DONE, REFUTED: EXIT_REFUTED, UNKNOWN: EXIT_UNKNOWN}[self.verdict]

    def card(self) -> Card:
        return Card(f"{self.verdict} ({self.digest[:12]})", ("property", "verdict"), tuple(self.properties.items()))


def sealed(verdict: Verdict) -> Verdict:
    """`verdict` with a seal: only for what makes a verdict by verifying, or has checked that of the cache."""
    return replace(verdict, seal=_mac(verdict))


def _is_plain(verdict: Verdict) -> bool:
    """Whether its texts are texts and its properties a dict: what is made to look like them may read otherwise."""
    pairs = (*verdict.properties.items(), *verdict.conditions, (verdict.digest, verdict.verifier))
    texts = all(type(each) is str for pair in pairs for each in pair)
    return texts and type(verdict.properties) is dict and type(verdict.conditions) is tuple


def _mac(verdict: Verdict) -> bytes:
    said = (verdict.digest, sorted(verdict.properties.items()), verdict.verifier, verdict.conditions)
    return hmac.digest(_KEY, repr((said, str(verdict.counterexample))).encode(), "sha256")
