"""Durations are read and written in one way."""

from __future__ import annotations

import pytest

from rendezvous.values.durations import duration_text, seconds_in


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5h", 5400.0),
        ("20us", 20e-6),
        ("2min", 120.0),
        ("2m", 120.0),
        (" 3 d ", 259_200.0),
        ("-1s", -1.0),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert seconds_in(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5 weeks", "1e3", "5mm", "٣s", "9" * 60, "inf", "nan"])
def test_what_is_not_a_duration_is_known(text: str) -> None:
    assert seconds_in(text) is None


def test_a_duration_is_written() -> None:
    assert [duration_text(each) for each in (2.54, 119.0, 600.0, 7800.0)] == [
        "2.5 s",
        "119.0 s",
        "10 min",
        "2 h 10 min",
    ]
