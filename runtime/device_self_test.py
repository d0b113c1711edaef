"""What self-tests of paths between GPUs send, and how ranks tell each other what was wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from optcc.runtime.plan_handshake import Gathers

SELF_TEST_BYTES = (1, 4097, (1 << 20) + 3)
"""Lengths that libraries send in different ways."""
MARGIN_BYTES = 64
"""What lies around a message, and must stay as it is."""
POISON = 0x5A
_TEXT_BYTES = 256


def first_text(ranks: Gathers, text: str, timeout_s: float) -> str:
    """The first text that some rank has, with the rank; empty if none has; collective."""
    told = ranks.allgather(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES), timeout_s)
    texts = [each.decode(errors="replace").rstrip() for each in told]
    return next((f"rank {rank}: {each}" for rank, each in enumerate(texts) if each), "")


def pattern(rank: int, n_bytes: int) -> Any:
    """What a rank sends: bytes of which no two places, ranks or lengths have the same for long."""
    return np.random.default_rng((rank, n_bytes)).integers(0, 256, n_bytes, dtype=np.uint8)


def framed(rank: int, n_bytes: int) -> Any:
    """What must be found around and in the place of a message of `rank`."""
    found = np.full(n_bytes + 2 * MARGIN_BYTES, POISON, dtype=np.uint8)
    found[MARGIN_BYTES : MARGIN_BYTES + n_bytes] = pattern(rank, n_bytes)
    return found
