"""Where bytes of the message lie at a rank whose input or output is several parts of it."""

from __future__ import annotations

import random

import pytest

from optcc.runtime.scattered import INPUT, OUTPUT, WORK, MemoryLayout, Place


def places(rng: random.Random, length: int) -> list[Place]:
    """Some parts of `length` bytes, in order."""
    bounds = sorted(rng.sample(range(length + 1), 2 * rng.randrange(1, 4)))
    return list(zip(bounds[::2], bounds[1::2], strict=True))


@pytest.mark.battery(38)
def test_a_row_is_read_and_a_column_written_in_the_users_arrays() -> None:
    """Rank 1 of three: blocks 3, 4, 5 are given, blocks 1, 4, 7 are got; its own block is copied."""
    blocks = [(10 * block, 10 * block + 10) for block in range(9)]
    layout = MemoryLayout([(30, 60)], [blocks[1], blocks[4], blocks[7]], [blocks[3], blocks[5]], [blocks[1], blocks[7]])
    assert layout.find(*blocks[3]) == (INPUT, 0) and layout.find(*blocks[5]) == (INPUT, 20)
    assert layout.find(*blocks[1]) == (OUTPUT, 0) and layout.find(*blocks[7]) == (OUTPUT, 20)
    assert (layout.before, layout.after, layout.work_bytes) == ([(OUTPUT, 10, 10, 10)], [], 0)


def test_an_input_that_is_written_to_is_copied() -> None:
    layout = MemoryLayout([(0, 10), (20, 30)], [(40, 50)], [(0, 10)], [(0, 10), (40, 50)])
    assert layout.find(0, 10) == (WORK, 0)
    assert (layout.before, layout.after) == ([(WORK, 0, 0, 10)], [])


@pytest.mark.parametrize("seed", range(200))
def test_every_access_has_one_home_and_every_byte_one_place(seed: int) -> None:
    rng = random.Random(seed)
    inputs, outputs, reads, writes = (places(rng, 40) for _ in range(4))
    layout = MemoryLayout(inputs, outputs, reads, writes)
    # The bytes that end up in each place, copies before a run included, must be those of the message.
    home_of: dict[int, tuple[int, int]] = {}
    for start, stop in (*reads, *writes):
        found = layout.find(start, stop)
        assert found is not None
        for byte in range(start, stop):
            place = found[0], found[1] + byte - start
            assert home_of.setdefault(byte, place) == place
    assert len(set(home_of.values())) == len(home_of)
    given = [byte for start, stop in inputs for byte in range(start, stop)]
    got = [byte for start, stop in outputs for byte in range(start, stop)]
    memory: dict[tuple[int, int], int] = {(INPUT, at): byte for at, byte in enumerate(given)}
    for home, at, mine, length in layout.before:
        for offset in range(length):
            memory[home, at + offset] = given[mine + offset]
    for byte, place in home_of.items():
        if byte in given:
            assert memory[place] == byte
        if byte in got:
            memory[place] = byte
    for home, at, mine, length in layout.after:
        for offset in range(length):
            memory[OUTPUT, mine + offset] = memory.get((home, at + offset), got[mine + offset])
    for at, byte in enumerate(got):
        if byte in home_of or byte in given:
            assert memory[OUTPUT, at] == byte
    for start, stop in writes:
        assert all(home_of[byte][0] != INPUT for byte in range(start, stop))
