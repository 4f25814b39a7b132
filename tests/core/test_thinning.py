"""Which commits are written to a slow store: all ranks must write some of the same, without talking about it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddp.elastic.commits import Thinning

N_DUE = 512


def written(takes_intervals: float, changes_at: int = 0, then: float = 0.0) -> set[int]:
    """The commits that a rank writes, which needs so many intervals between due commits for one of them."""
    thinning, busy_until, found = Thinning(), 0.0, set()
    for index in range(N_DUE):
        takes, thinning = thinning.ask(index, busy_until > index)
        if takes:
            found.add(index)
            busy_until = index + (then if changes_at and index >= changes_at else takes_intervals)
    return found


def test_a_store_that_is_fast_enough_gets_every_commit() -> None:
    assert written(0.9) == set(range(N_DUE))


def test_a_slow_store_gets_what_it_can_take() -> None:
    found = written(3.5)
    assert N_DUE / 10 < len(found) < N_DUE / 3.5


def test_a_store_that_becomes_fast_again_soon_gets_every_commit() -> None:
    found = written(20.0, changes_at=200, then=0.5)
    assert set(range(400, N_DUE)) <= found


@given(st.lists(st.floats(0.1, 12.0), min_size=2, max_size=6))
def test_ranks_of_any_speeds_complete_commits(speeds: list[float]) -> None:
    complete = set.intersection(*map(written, speeds))
    gaps = [
        later - earlier
        for earlier, later in zip([0, *sorted(complete)], [*sorted(complete), N_DUE], strict=True)
    ]
    assert max(gaps) <= 8 * max(1.0, *speeds), (sorted(complete)[:20], max(gaps))
