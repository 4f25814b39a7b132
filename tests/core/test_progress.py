"""When an agent that is cut off stops its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.progress import ProgressSigns, contact_lost, in_words, is_hopeless, is_over, pause_s, updated

TIMEOUT_S = 10.0


def over_after(*signs: ProgressSigns) -> bool:
    isolation = contact_lost(signs[0])
    for each in signs[1:]:
        isolation = updated(isolation, each)
    return is_over(isolation, TIMEOUT_S)


def test_both_silences_must_have_lasted() -> None:
    still = [ProgressSigns(float(at)) for at in range(100, 111)]
    assert not over_after(*still[:-1])
    assert over_after(*still)
    busy_until_105 = [ProgressSigns(s.at, cpu_s=min(s.at, 105.0)) for s in still]
    assert not over_after(*busy_until_105)
    assert not over_after(*busy_until_105, ProgressSigns(114.9, cpu_s=105.0))
    assert over_after(*busy_until_105, ProgressSigns(115.0, cpu_s=105.0))


@pytest.mark.parametrize(
    ("later", "goes_on"),
    [
        (ProgressSigns(110.0, cpu_s=9.0), True),
        (ProgressSigns(110.0, output_bytes=1), True),
        (ProgressSigns(110.0, cpu_s=0.4), False),  # what waiting costs
        (ProgressSigns(110.0, cpu_s=-3.0), False),  # a child ended, and took its share along
    ],
)
def test_signs_of_progress(later: ProgressSigns, goes_on: bool) -> None:
    assert over_after(ProgressSigns(100.0), later) is not goes_on


def test_where_steps_are_told_nothing_else_counts() -> None:
    spinning = ProgressSigns(110.0, cpu_s=9.0, output_bytes=5, step=7)
    assert over_after(ProgressSigns(100.0, step=7), spinning)
    assert not over_after(ProgressSigns(100.0, step=6), spinning)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=60))
def test_ranks_that_work_are_never_stopped_however_long_it_takes(pauses: list[float]) -> None:
    at, signs = 0.0, [ProgressSigns(0.0)]
    for pause in pauses:
        at += pause
        signs.append(ProgressSigns(at, cpu_s=at))
        assert not over_after(*signs)


def test_it_is_told_in_words_and_looked_at_often_enough() -> None:
    isolation = updated(
        updated(contact_lost(ProgressSigns(0.0)), ProgressSigns(5.0, output_bytes=1)),
        ProgressSigns(20.0, output_bytes=1),
    )
    assert "for 20 s" in in_words(isolation)
    assert "no progress for 15 s" in in_words(isolation)
    assert (pause_s(2.0), pause_s(3600.0)) == (0.2, 10.0)


def test_a_node_without_ranks_is_not_isolated_but_hopeless_in_the_end() -> None:
    isolation = contact_lost(ProgressSigns(0.0, ranks=2))
    isolation = updated(isolation, ProgressSigns(10.0, ranks=0))
    assert isolation.idle_since == 10.0
    isolation = updated(isolation, ProgressSigns(40.0, ranks=0))
    assert not is_over(isolation, 5.0)
    assert not is_hopeless(isolation, 31.0)
    assert is_hopeless(isolation, 30.0)
    assert not is_hopeless(updated(isolation, ProgressSigns(50.0, ranks=1)), 30.0)


def test_a_node_that_never_had_ranks_waits_from_the_moment_contact_was_lost() -> None:
    assert is_hopeless(updated(contact_lost(ProgressSigns(5.0, ranks=0)), ProgressSigns(6.0, ranks=0)), 1.0)
