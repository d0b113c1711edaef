"""When a connection is suspect or silent, by the kernel's counters, which are made up here."""

from __future__ import annotations

import pytest

from optcc.runtime.protocol.liveness import Connection, KernelReport

IDLE = KernelReport(0, 0, 0, 1000, 0, 0, 0.0)


def judge(
    connection: Connection, report: KernelReport | None, elapsed_s: float, limit_s: float, round_trip_s: float = 0.0
) -> bool:
    connection.kernel = report
    return connection.is_silent(elapsed_s, limit_s, round_trip_s)


def test_only_unanswered_bytes_make_a_connection_silent() -> None:
    connection, report = Connection(), IDLE
    assert not any(judge(connection, report, 0.1, 0.3) for _ in range(10)), "nothing is on its way"
    report = report._replace(in_flight_bytes=3)
    for acked in range(1, 10):
        report = report._replace(acked_bytes=acked)
        assert not judge(connection, report, 0.1, 0.3), "some are acknowledged each time"
    assert [judge(connection, report, 0.1, 0.3) for _ in range(3)] == [False, False, True]
    report = report._replace(acked_bytes=10)
    assert not judge(connection, report, 10.0, 0.3)


def test_a_connection_without_counters_is_never_silent() -> None:
    connection = Connection()
    assert not any(judge(connection, None, 0.1, 0.3) for _ in range(10))
    assert connection.awaits and not connection.suspect


@pytest.mark.parametrize(
    ("unsent", "window", "is_silent"), [(5000, 0, False), (5000, 999, False), (5000, 1000, True), (10, 10, True)]
)
def test_bytes_that_cannot_leave_are_silent_unless_the_window_is_full(
    unsent: int, window: int, is_silent: bool
) -> None:
    connection, report = Connection(), IDLE._replace(unsent_bytes=unsent, window_bytes=window)
    assert any(judge(connection, report, 0.1, 0.3) for _ in range(10)) == is_silent


def test_a_probe_of_a_closed_window_that_is_not_answered_is_silence() -> None:
    """The kernel of a peer that computes answers probes: its window stays closed, and the path is there."""
    connection, report = Connection(), IDLE._replace(unsent_bytes=5000, window_bytes=0, probes=1)
    assert [judge(connection, report, 0.1, 0.3) for _ in range(4)] == [False, False, False, True]
    assert not judge(connection, report._replace(probes=0), 0.1, 0.3)


def test_a_connection_is_not_silent_before_its_own_habits_say_so() -> None:
    connection, report = Connection(), IDLE._replace(in_flight_bytes=1000)
    for acked in (1, 2):
        report = report._replace(acked_bytes=acked)
        assert not any(judge(connection, report, 0.1, 0.9) for _ in range(5))
    # It has been without an answer for half a second: one and a half times that is allowed, unless a timer has fired.
    report = report._replace(acked_bytes=3)
    assert [judge(connection, report, 0.1, 0.1) for _ in range(12)].index(True) in (7, 8)
    report = report._replace(acked_bytes=4, timeouts=1)
    assert [judge(connection, report, 0.1, 0.2) for _ in range(3)] == [False, False, True]
    slow, report = Connection(), report._replace(timeouts=0)
    assert [judge(slow, report, 0.1, 0.1, 0.15) for _ in range(4)] == [False, False, False, True], "a queue at the NIC"
    slow, report = Connection(), report._replace(round_trip_s=0.2)
    assert [judge(slow, report, 0.1, 0.1) for _ in range(5)] == [False] * 4 + [True], "a long way"


def test_a_connection_is_not_suspected_while_a_queue_may_be_in_the_way() -> None:
    connection, report = Connection(), IDLE._replace(in_flight_bytes=1000)
    connection.queue_s = 0.25
    found = [(judge(connection, report, 0.1, 0.4), connection.suspect) for _ in range(5)]
    assert [suspect for _, suspect in found] == [False] * 3 + [True] * 2
    assert [silent for silent, _ in found] == [False] * 4 + [True], "it is found silent no later"


def test_a_far_path_is_not_suspected_before_it_can_have_answered() -> None:
    """The first sample may come as soon as bytes have left, and counts for more; the next one after the answer."""
    connection = Connection()
    report = IDLE._replace(in_flight_bytes=3, round_trip_s=0.1, least_round_trip_s=0.1)
    judge(connection, IDLE, 0.02, 0.1)
    assert not any(judge(connection, report, 0.01, 0.1) or connection.suspect for _ in range(11))
    assert not any(judge(connection, report, 0.01, 0.1) for _ in range(2)) and connection.suspect


def test_half_way_to_silence_a_connection_is_suspect() -> None:
    connection, report = Connection(), IDLE._replace(in_flight_bytes=1000)
    judge(connection, report, 0.1, 0.4)
    suspect = []
    for _ in range(3):
        judge(connection, report, 0.1, 0.4)
        suspect.append(connection.suspect)
    judge(connection, report._replace(acked_bytes=1), 0.1, 0.4)
    assert suspect == [False, True, True] and not connection.suspect and connection.awaits
    judge(connection, report._replace(acked_bytes=1, in_flight_bytes=0), 0.1, 0.4)
    assert not connection.awaits, "nothing is on its way: nobody need look"


def test_what_a_connection_has_carried_is_counted_from_one_question_to_the_next() -> None:
    connection = Connection()
    judge(connection, IDLE._replace(acked_bytes=100, busy_s=0.5, open_s=0.25), 0.1, 0.4)
    assert connection.take_carried() == (100, 0.5, 0.25)
    judge(
        connection, IDLE._replace(acked_bytes=150, busy_s=0.75, open_s=0.25, in_flight_bytes=7, unsent_bytes=5), 0.1, 1
    )
    assert connection.take_carried() == (50, 0.25, 0.0) and connection.waiting_bytes == 12
    assert connection.take_carried() == (0, 0.0, 0.0)


def test_bytes_have_not_been_unanswered_since_before_they_were_sent() -> None:
    connection = Connection()
    judge(connection, IDLE, 0.1, 0.3)
    sent = IDLE._replace(in_flight_bytes=1000)
    assert not judge(connection, sent, 5.0, 0.3) and not connection.suspect, "sent since the last sample"
    assert [judge(connection, sent, 0.1, 0.3) for _ in range(3)] == [False, False, True]


def test_a_suspicion_ends_with_an_acknowledgement_and_not_with_a_longer_round_trip() -> None:
    connection, report = Connection(), IDLE._replace(in_flight_bytes=1000)
    for _ in range(4):
        judge(connection, report, 0.1, 0.5)
    assert connection.suspect
    judge(connection, report._replace(round_trip_s=2.0), 0.1, 0.5)
    assert connection.suspect
    judge(connection, report._replace(round_trip_s=2.0, acked_bytes=1), 0.1, 0.5)
    assert not connection.suspect and connection.answers
