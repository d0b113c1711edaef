"""`NicLog`: which states of NICs have a line, and which have none."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from optcc.runtime.nic_log import PAUSE_S, SETTLE_S, NicLog

BOTH, NONE = [True, True], [1.0, 1.0]


@dataclass
class _Connection:
    nic: int
    is_avoided: bool = False


FIRST, SECOND = _Connection(0), _Connection(1)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "optcc.nics")
    return caplog


def test_a_silent_nic_has_a_line_once_that_lasts_and_another_one_when_it_is_back(
    lines: pytest.LogCaptureFixture,
) -> None:
    log = NicLog(3, ["eth0", "eth1"])
    log.look(0.0, BOTH, [FIRST, SECOND], NONE)
    log.look(5.0, BOTH, [FIRST, _Connection(1, is_avoided=True)], NONE)
    log.look(5.0 + SETTLE_S / 2, BOTH, [FIRST], NONE)
    assert not lines.messages
    log.look(5.0 + SETTLE_S, BOTH, [FIRST], NONE)
    log.look(6.0, BOTH, [FIRST], NONE)
    assert lines.messages == ["optcc: rank 3: eth1 is silent: messages go over the other NICs"]
    log.look(8.0, BOTH, [FIRST, SECOND], NONE)
    log.look(8.0 + SETTLE_S, BOTH, [FIRST, SECOND], NONE)
    assert lines.messages[1:] == [f"optcc: rank 3: eth1 is back after {3 + SETTLE_S:.1f} s"]


def test_a_link_that_is_down_has_a_line_at_once_even_if_it_is_the_only_one(lines: pytest.LogCaptureFixture) -> None:
    log = NicLog(0, ["eth0"])
    log.look(2.0, [True], [FIRST], [1.0])
    log.look(2.1, [False], [], [1.0])
    assert lines.messages == ["optcc: rank 0: eth0 is down: there is no other NIC"]


def test_peers_that_leave_and_rails_that_were_never_joined_have_none(lines: pytest.LogCaptureFixture) -> None:
    log = NicLog(0, ["eth0", "eth1"])
    for now_s in (0.0, 1.0, 2.0):
        log.look(now_s, BOTH, [FIRST], NONE)
    log.look(3.0, BOTH, [FIRST, SECOND], NONE)
    for now_s in (4.0, 5.0, 6.0):
        log.look(now_s, BOTH, [], NONE)
    assert not lines.messages


def test_a_nic_that_flaps_has_a_line_a_second_at_most(lines: pytest.LogCaptureFixture) -> None:
    for steps, least in ((5, 1), (40, 5)):
        lines.clear()
        log = NicLog(0, ["eth0", "eth1"])
        for step in range(1000):
            is_up = step // steps % 2 == 0
            log.look(step / 100, [True, is_up], [FIRST, SECOND] if is_up else [FIRST], NONE)
        assert least <= len(lines.messages) <= 10 / PAUSE_S


def test_a_measured_rate_has_a_line_when_it_has_changed(lines: pytest.LogCaptureFixture) -> None:
    log = NicLog(1, ["eth0", "eth1"])
    for now_s, share in ((0.0, 1.0), (2.0, 0.95), (4.0, 0.5), (4.1, 0.4), (6.0, 0.45), (8.0, 1.0)):
        log.look(now_s, BOTH, [FIRST, SECOND], [1.0, share])
    assert lines.messages == [f"optcc: rank 1: eth1 sends at {share} % of its declared rate" for share in (50, 100)]


def test_a_rank_that_is_waited_for_has_a_line_and_another_one_when_it_is_back(lines: pytest.LogCaptureFixture) -> None:
    log = NicLog(0, ["eth0"])
    for now_s, peers in ((1.0, set[int]()), (2.0, {2}), (3.0, {1, 2}), (14.5, {1})):
        log.note_absent(now_s, peers, 60.0)
    assert lines.messages == [
        "optcc: rank 0: no rail to rank 2 is left: it is waited for, up to 60 s",
        "optcc: rank 0: no rail to rank 1 is left: it is waited for, up to 60 s",
        "optcc: rank 0: rank 2 is back after another 12.5 s",
    ]
