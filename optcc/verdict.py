"""`Verdict`: what the verifier says of a plan, as a value that a run-time can ask for and a cache can keep."""

from __future__ import annotations

from dataclasses import dataclass

from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN
from optcc.show import Card, Shown

PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"
PROPERTIES = ("matching", "deadlock", "races", "result", "agreement")


@dataclass(frozen=True, slots=True)
class Counterexample:
    """Why a property fails, for a person: where, which bytes, and the transfers or instructions that do it."""

    property: str
    summary: str
    rank: int | None = None
    first_byte: int | None = None
    last_byte: int | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.property}: {self.summary}"]
        lines += [f"  {line}" for line in self.trace]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Verdict(Shown):
    """One verdict for a plan and one for each property; a refuted one comes with its counterexample.

    A property that could not be asked because an earlier one fails is `unknown`.
    """

    digest: str
    properties: dict[str, str]
    counterexample: Counterexample | None = None

    def __post_init__(self) -> None:
        assert set(self.properties) == set(PROPERTIES), self.properties
        assert (REFUTED in self.properties.values()) == (self.counterexample is not None)

    @property
    def verdict(self) -> str:
        """`proved` if every property is, `refuted` if one is, else `unknown`."""
        values = set(self.properties.values())
        return REFUTED if REFUTED in values else PROVED if values == {PROVED} else UNKNOWN

    @property
    def exit_code(self) -> int:
        """What a command returns for this verdict."""
        return {PROVED: EXIT_DONE, REFUTED: EXIT_REFUTED, UNKNOWN: EXIT_UNKNOWN}[self.verdict]

    def card(self) -> Card:
        return Card(f"{self.verdict} ({self.digest[:12]})", ("property", "verdict"), tuple(self.properties.items()))
