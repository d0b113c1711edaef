"""How a message is cut into chunks for its rails: without gaps, and in proportion."""

from __future__ import annotations

from itertools import pairwise

import pytest

from optcc.errors import InputError
from optcc.runtime.protocol.striping import Striping


@pytest.mark.parametrize("parts", [(1,), (1, 1), (2, 1), (10, 7), (1, 1, 1), (100, 100, 50), (25, 24), (1000, 3)])
def test_messages_are_cut_without_gaps_and_in_proportion(parts: tuple[int, ...]) -> None:
    striping = Striping.of(parts)
    assert set(striping.turns) == set(range(len(parts)))
    for n_bytes in (0, 1, 63, 65_536, 1_000_003, 8 << 20):
        for chunk_bytes in (1000, 1 << 20):
            pieces = sorted(striping.cut(n_bytes, chunk_bytes))
            assert pieces[0].start == 0 and pieces[-1].end == n_bytes
            assert all(before.end == after.start for before, after in pairwise(pieces))
            assert all(piece.end - piece.start <= chunk_bytes + 64 for piece in pieces)
            for rail, part in enumerate(parts):
                over = sum(piece.end - piece.start for piece in pieces if piece.rail == rail)
                assert over == pytest.approx(n_bytes * part / sum(parts), abs=64)


def test_rails_take_turns_with_the_pieces_of_a_long_message() -> None:
    rails = [piece.rail for piece in Striping.of([2, 1]).cut(12 << 20, 1 << 20)]
    assert rails.count(0) == 8
    assert all(set(rails[at : at + 3]) == {0, 1} for at in range(0, 12, 3))


@pytest.mark.parametrize(("parts", "words"), [((), "0 rails"), ((1,) * 17, "17 rails"), ((1, 0), "rate 0 B/s")])
def test_parts_that_cannot_be_are_refused(parts: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Striping.of(parts)
