"""`Verdict`: the result of verifying a plan, as a value that a run-time checks and a cache stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN
from optcc.show import Card, Shown

PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"
PROPERTIES = ("matching", "deadlock", "races", "result", "agreement")
FURTHER = ("translation", "timing", "limits")
"""Properties that are judged only against a given schedule, topology or target."""
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
        assert self.property in (*PROPERTIES, *FURTHER, "replay"), self.property
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

    A property after a failed one is `unknown`.
    """

    digest: str
    properties: dict[str, str]
    counterexample: Counterexample | None = None

    def __post_init__(self) -> None:
        assert set(PROPERTIES) <= set(self.properties) <= {*PROPERTIES, *FURTHER}, self.properties
        assert (REFUTED in self.properties.values()) == (self.counterexample is not None)

    def and_also(self, name: str, found: Counterexample | None) -> Verdict:
        """This verdict extended by property `name`: refuted by `found`, proved if that is None.

        If this verdict is not proved, `name` is unknown.
        """
        if self.verdict != PROVED:
            return replace(self, properties=self.properties | {name: UNKNOWN})
        judged = PROVED if found is None else REFUTED
        return replace(self, properties=self.properties | {name: judged}, counterexample=found)

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
