"""Lines to and from ranks: in order, within a limit for all of them together, and over when a socket is closed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from optcc.experiments.rank_lines import Exited, Hung, RankLines


@pytest.fixture
def job() -> Iterator[tuple[RankLines, list[socket.socket]]]:
    """Two ranks, and their ends."""
    lines, ends = RankLines(), []
    for _ in range(2):
        own, its = socket.socketpair()
        lines.add(own)
        ends.append(its)
    yield lines, ends
    lines.close()
    for each in ends:
        each.close()


def test_every_rank_is_told_and_heard_in_order(job: tuple[RankLines, list[socket.socket]]) -> None:
    lines, ends = job
    lines.tell({"turn": 1})
    assert [json.loads(each.recv(100)) for each in ends] == [{"turn": 1}] * 2
    for rank in (1, 0):
        ends[rank].sendall(b'{"rank": %d}\n{"rank": 9}\n' % rank)
    assert len(lines) == 2 and lines.hear(5.0) == [{"rank": 0}, {"rank": 1}]
    assert lines.hear(5.0) == [{"rank": 9}] * 2


def test_the_limit_is_for_all_ranks_together(job: tuple[RankLines, list[socket.socket]]) -> None:
    lines, ends = job
    ends[0].sendall(b"{}\n")
    began_s = time.monotonic()
    with pytest.raises(Hung, match=r"^rank 1: no answer within 0\.2 s$"):
        lines.hear(0.2)
    assert time.monotonic() - began_s >= 0.19


def test_a_rank_that_has_exited_is_named(job: tuple[RankLines, list[socket.socket]]) -> None:
    lines, ends = job
    ends[0].sendall(b"{}\n")
    ends[1].close()
    with pytest.raises(Exited, match=r"^rank 1: ended$"):
        lines.hear(5.0)
