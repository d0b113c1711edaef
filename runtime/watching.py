"""Who looks on while an engine runs: a watcher of what is rare, and taps of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from optcc.errors import RuntimeFault
from optcc.plan import Plan
from optcc.runtime.buffers import BoundAction


class Watcher(Protocol):
    """Who is told of an engine's end, and of what is rare."""

    def note(self, kind: str, text: str, ranks: Sequence[int] = ()) -> None:
        """Something rare has happened, for which these ranks are at fault."""
        ...

    def preparing(self, plan: Plan | None) -> None:
        """The ranks are about to agree on a plan, or have agreed on it."""
        ...

    def failing(self, error: RuntimeFault) -> None:
        """The engine is about to give up its runs, which are still as they were; must not raise."""
        ...

    def failed(self, error: RuntimeFault, cause: str) -> None:
        """It has given up: what it raises, and what it has told the other ranks; must not raise."""
        ...

    def closing(self) -> None:
        """The transport is about to be given back."""
        ...


class RunTaps(Protocol):
    """What takes chunks of one run (`optcc.runtime.taps`)."""

    def begins(self, given: Any) -> None:
        """The input of the rank is there."""
        ...

    def ending(self) -> None:
        """Every instruction is done; what is left is to divide, and to copy the output."""
        ...

    def ends(self, output: Any, number: int) -> None:
        """The run is over."""
        ...

    def sending(self, entry: BoundAction) -> None:
        """A message is about to be handed to the transport."""
        ...

    def computing(self, entry: BoundAction) -> None:
        """What has arrived is about to be reduced or copied."""
        ...

    def computed(self, entry: BoundAction) -> None:
        """It has been."""
        ...

    def wrapped(self, calls: list[Callable[[], Any]], bound: list[BoundAction]) -> list[Callable[[], Any]]:
        """The calls of a plan whose steps are remembered, with what is taken around them."""
        ...
