from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.reducer.launch_order import arrived, begin


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_buckets_are_launched_once_each_in_order_as_soon_as_they_may(
    sizes: list[int], chance: object
) -> None:
    arrivals = [bucket for bucket, size in enumerate(sizes) for _ in range(size)]
    chance.shuffle(arrivals)  # type: ignore[attr-defined]
    state = begin(sizes)
    left = list(sizes)
    launched: list[int] = []
    for bucket in arrivals:
        state, launches = arrived(state, bucket)
        left[bucket] -= 1
        launched += launches
        assert launched == list(range(len(launched)))
        assert all(left[i] == 0 for i in launched)
        # Nothing that is full waits behind others that have gone.
        assert len(launched) == len(left) or left[len(launched)] > 0
    assert state.complete
    assert launched == list(range(len(sizes)))


def test_a_full_bucket_waits_for_the_ones_before_it() -> None:
    state = begin([2, 1])
    state, launches = arrived(state, 1)
    assert (list(launches), state.complete) == ([], False)
    state, launches = arrived(state, 0, count=2)
    assert (list(launches), state.complete) == ([0, 1], True)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        begin([1, 0])
    with pytest.raises(ValueError, match="bucket 0 waits for 1"):
        arrived(begin([1]), 0, count=2)
    with pytest.raises(ValueError, match="but 0 arrived"):
        arrived(begin([1]), 0, count=0)
