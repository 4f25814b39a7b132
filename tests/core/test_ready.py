from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.reducer.launch_order import LaunchOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def launch_full(order: LaunchOrder) -> list[int]:
    launched = []
    while (bucket := order.claim()) is not None:
        launched.append(bucket)
        order.release()
    return launched


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_buckets_are_launched_once_each_in_order_as_soon_as_they_may(
    sizes: list[int], chance: object
) -> None:
    arrivals = [bucket for bucket, size in enumerate(sizes) for _ in range(size)]
    chance.shuffle(arrivals)  # type: ignore[attr-defined]
    order = LaunchOrder(sizes)
    left = list(sizes)
    launched: list[int] = []
    for bucket in arrivals:
        order.arrived(bucket)
        left[bucket] -= 1
        launched += launch_full(order)
        assert launched == list(range(len(launched)))
        assert all(left[i] == 0 for i in launched)
        # Nothing that is full waits behind others that have gone.
        assert len(launched) == len(left) or left[len(launched)] > 0
    assert order.complete
    assert launched == list(range(len(sizes)))


def test_a_full_bucket_waits_for_the_ones_before_it() -> None:
    order = LaunchOrder([2, 1])
    order.arrived(1)
    assert (order.may_launch, order.claim(), order.complete) == (False, None, False)
    order.arrived(0, count=2)
    assert order.may_launch
    assert (launch_full(order), order.complete) == ([0, 1], True)


def test_only_one_may_launch_at_a_time() -> None:
    order = LaunchOrder([1, 1])
    order.arrived(0)
    order.arrived(1)
    assert order.claim() == 0
    assert order.claim() is None  # another thread leaves bucket 1 to the owner of the claim
    order.release()
    assert not order.complete
    assert order.claim() == 1
    assert not order.complete
    order.release()
    assert order.complete


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LaunchOrder([1, 0])
    with pytest.raises(ValueError, match="bucket 0 waits for 1"):
        LaunchOrder([1]).arrived(0, count=2)
    with pytest.raises(ValueError, match="but 0 arrived"):
        LaunchOrder([1]).arrived(0, count=0)
    with pytest.raises(ValueError, match="no bucket is being launched"):
        LaunchOrder([1]).release()


# --- every interleaving of threads ----------------------------------------------------------------


def one_thread(
    order: LaunchOrder, arrivals: Sequence[int], transcript: list[str], fails_on: int | None
) -> Iterator[None]:
    """The steps of `LaunchQueue`. Each `yield` is a moment at which another thread may run."""
    for bucket in arrivals:
        order.arrived(bucket)
        yield
        if not order.may_launch:
            continue
        yield
        claimed = order.claim()
        while claimed is not None:
            yield
            transcript.append(f"begin {claimed}")
            yield
            transcript.append(f"end {claimed}")
            yield
            order.release()
            if claimed == fails_on:
                return  # its hook raises, and this thread runs no other hook
            claimed = order.claim()


def interleavings(steps: int) -> Iterator[list[int]]:
    """Every order of `steps` steps of each of two threads."""
    for chosen in itertools.combinations(range(2 * steps), steps):
        yield [int(at in chosen) for at in range(2 * steps)]


def run_all(threads: list[Iterator[None]], schedule: Sequence[int]) -> None:
    """Run the threads by the schedule, and then to their ends."""
    for number in schedule:
        next(threads[number], None)
    for thread in threads:
        for _ in thread:
            pass


@pytest.mark.parametrize("shares", [((0, 2), (1, 3)), ((3, 0), (2, 1)), ((1, 0), (0, 1)), ((2, 2), (0, 1))])
def test_threads_launch_in_order_and_one_at_a_time_however_they_interleave(
    shares: tuple[tuple[int, ...], ...],
) -> None:
    everything = [bucket for share in shares for bucket in share]
    sizes = [everything.count(bucket) for bucket in range(max(everything) + 1)]
    wanted = [f"{what} {bucket}" for bucket in range(len(sizes)) for what in ("begin", "end")]
    tried = 0
    for schedule in interleavings(5):
        order, transcript = LaunchOrder(sizes), list[str]()
        run_all([one_thread(order, share, transcript, None) for share in shares], schedule)
        assert transcript == wanted, schedule
        assert order.complete
        tried += 1
    assert tried == 252


def test_a_launch_that_fails_leaves_the_other_buckets_to_the_other_threads() -> None:
    for schedule in interleavings(5):
        order, transcript = LaunchOrder([1, 1, 1]), list[str]()
        run_all([one_thread(order, share, transcript, 0) for share in ((0,), (1, 2))], schedule)
        assert transcript[:2] == ["begin 0", "end 0"]
        begun = [line for line in transcript if line.startswith("begin")]
        assert begun == sorted(set(begun)), schedule
        for bucket in (bucket for bucket in range(3) if order.pending[bucket]):
            order.arrived(bucket)  # `Round.complete` gathers and launches the rest
        assert [*map("begin {}".format, launch_full(order))] == ["begin 0", "begin 1", "begin 2"][
            len(begun) :
        ]
        assert order.complete
