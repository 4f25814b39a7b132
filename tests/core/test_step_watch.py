"""One whole step of a rank, put together from looks at its status page."""

from __future__ import annotations

import pytest

from launcher.answers.desk import Looks, looked
from rendezvous.values.rank_view import Collective, RankPhase, RankView

# A rank whose steps take 1 s. It has two buckets.
PHASES = (
    *((0.0, RankPhase.DATA), (0.1, RankPhase.FORWARD), (0.4, RankPhase.BACKWARD)),
    *((0.8, RankPhase.COMMUNICATE), (0.9, RankPhase.OPTIMIZER)),
)
BUCKETS = ((0.5, 0.7), (0.75, 0.9))


def page(at: float) -> RankView:
    """At this time on the clock of the rank, which began at 0."""
    step, within = divmod(at, 1.0)
    began, phase = [each for each in PHASES if each[0] <= within + 1e-9][-1]
    calls = []
    for number in range(2 * (int(step) + 1)):
        of, bucket = divmod(number, 2)
        start, end = (of + each for each in BUCKETS[bucket])
        if start <= at:
            calls.append(
                Collective(
                    number + 1,
                    "0",
                    number + 1,
                    "all_reduce",
                    "float32",
                    1000,
                    is_async=True,
                    entered_s=at - start,
                    finished_s=at - end if end <= at else None,
                )
            )
    return RankView(
        0,
        known=True,
        phase=phase,
        phase_s=within - began,
        step=int(step),
        step_s=within,
        last_step_s=1.0 if step else 0.0,
        mean_step_s=1.0 if step else 0.0,
        collectives=tuple(calls[-16:]),
    )


@pytest.mark.parametrize("first", [0.0, 0.35, 0.97, 5.2])
@pytest.mark.parametrize("every", [0.004, 0.031])
def test_a_whole_step_is_seen_with_exact_times(first: float, every: float) -> None:
    looks, at = Looks(), first
    while looks.seen is None:
        looks = looked(looks, page(at), at + 1000.0)  # the clock of the agent is another one
        at += every
        assert at < first + 3
    seen = looks.seen
    assert seen.step == int(first) + 2
    assert seen.duration_s == pytest.approx(1.0)
    assert [each.phase for each in seen.phases] == [phase for _, phase in PHASES]
    ends = [*(start for start, _ in PHASES[1:]), 1.0]
    for each, (start, _), end in zip(seen.phases, PHASES, ends, strict=True):
        assert (each.start_s, each.end_s) == (pytest.approx(start, abs=1e-6), pytest.approx(end, abs=1e-6))
    spans = [(each.start_s, each.end_s) for each in seen.calls]
    assert spans == [(pytest.approx(a), pytest.approx(b)) for a, b in BUCKETS]


def test_more_collectives_than_the_page_holds_are_all_seen() -> None:
    """The page has the last 16; looks in between add up."""
    looks = Looks()
    for n in range(101):
        at = n / 50
        calls = tuple(
            Collective(k, "0", k, "all_reduce", entered_s=at - k / 50, finished_s=at - k / 50 - 0.001)
            for k in range(max(1, n - 15), n)
        )
        view = RankView(0, known=True, step=int(at), step_s=at % 1, last_step_s=1.0, collectives=calls)
        looks = looked(looks, view, at)
    assert looks.seen is not None
    assert len(looks.seen.calls) == 50


def test_nothing_is_told_before_a_whole_step_has_ended() -> None:
    looks = Looks()
    for n in range(90):
        looks = looked(looks, page(0.5 + n / 100), n / 100)
    assert looks.seen is None
