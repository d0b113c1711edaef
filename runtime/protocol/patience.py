"""How long to wait before a NIC that is said to carry more again is believed. No I/O, no clock."""

from __future__ import annotations

from math import inf

PATIENCE_S = 0.25
"""At first."""


class Patience:
    """Waits for `growth` times as long each time that it was too short, up to `max_s`: a NIC failed, or became slow, no
    later than `calm_s` after it was believed.

    >>> patience = Patience(8.0, calm_s=10.0)
    >>> patience.believe(20.0)
    >>> patience.note_worse(25.0)
    >>> patience.seconds
    0.5
    >>> patience.believe(30.0)
    >>> patience.note_worse(50.0)
    >>> patience.seconds
    0.25
    """

    __slots__ = ("_believed_s", "_calm_s", "_growth", "_max_s", "seconds")

    def __init__(self, max_s: float, calm_s: float, growth: float = 2.0) -> None:
        self.seconds, self._max_s, self._calm_s, self._growth = PATIENCE_S, max_s, calm_s, growth
        # When it was last believed, if nothing has become worse since.
        self._believed_s = inf

    def believe(self, now_s: float) -> None:
        """There are to be plans for what is said."""
        self._believed_s = now_s

    def note_worse(self, now_s: float) -> None:
        """A NIC carries less than plans are for."""
        if self._believed_s < inf:
            is_soon = now_s < self._believed_s + self._calm_s
            self.seconds = min(self._max_s, self._growth * self.seconds) if is_soon else PATIENCE_S
            self._believed_s = inf
