"""What is left of a job: it always fits, the newest events stay, and bytes that cannot be read are nothing."""

from __future__ import annotations

import os
from dataclasses import replace

from rendezvous.rounds.event_log import LoggedEvent, Past, TimePoint, decode_past, encode_past
from rendezvous.values.questions import RestartTimes
from rendezvous.values.rank_time import JobTime, TimeSpent

_NOTES = tuple(LoggedEvent(i, 1.0e9 + i, 1, "remark", "node", os.urandom(1000).hex()) for i in range(200))
_PAST = Past(1.0, 2.0, "journal", _NOTES, tuple(RestartTimes(i, stop_s=1.0, node="n") for i in range(50)))


_POINTS = tuple(
    TimePoint(i, 1, i, JobTime(8, TimeSpent(forward=1.234 * i, waiting=0.567 * i))) for i in range(300)
)


def test_it_is_read_as_it_was_written() -> None:
    past = replace(_PAST, points=_POINTS)
    assert decode_past(encode_past(past, 10**9)) == past


def test_a_chart_takes_little_room_and_gives_way_to_events() -> None:
    past = Past(1.0, 2.0, "journal", _NOTES[:8], points=_POINTS)
    assert len(encode_past(replace(past, notes=()), 10**9)) < 8 * 1024
    found = decode_past(encode_past(past, len(encode_past(past, 10**9)) - 1))
    assert found == replace(past, points=_POINTS[::2])


def test_it_fits_and_the_newest_events_stay() -> None:
    for most in (64 * 1024, 4096, 1500):
        data = encode_past(_PAST, most)
        assert len(data) <= most
        found = decode_past(data)
        assert found.notes == _NOTES[len(_NOTES) - len(found.notes) :]
        assert (found.began_at, found.ended_at) == (1.0, 2.0)
    assert len(decode_past(encode_past(_PAST, 64 * 1024)).notes) > 20


def test_what_cannot_be_read_is_nothing() -> None:
    data = encode_past(replace(_PAST, notes=_NOTES[:2]), 10**9)
    for broken in (b"", b"x", data[:-3], data[:20] + b"?" + data[21:], b"ddp-past 9\n" + data[11:]):
        assert decode_past(broken) == Past()
