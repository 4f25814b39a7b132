"""Hooks on several threads, as autograd runs them for a module on several devices. The threads here are real."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from fake_group import FakeGroup, begin_backward, give_gradient, parameters_of, reducer_of

from ddp.reducer import arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ddp.reducer.reducer import Reducer

DEADLINE_S = 60.0
FOUR_BYTES = 4  # one parameter of one element per bucket


class Yielding(list[int]):
    """A list that lets another thread run between a read and the following write."""

    def __getitem__(self, at: Any) -> Any:
        value = super().__getitem__(at)
        time.sleep(0)  # releases the interpreter lock
        return value


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def flats(reducer: Reducer) -> list[int]:
    return [bucket.payload[0].data_ptr() for bucket in reducer.sender.buckets]


def test_a_thread_leaves_its_bucket_to_the_thread_that_is_launching(pool: ThreadPoolExecutor) -> None:
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1, 1, 1]), group, bucket_bytes=FOUR_BYTES)
    seen = begin_backward(reducer)
    in_the_middle, go_on = threading.Event(), threading.Event()

    def stop_in_the_first(turn: int) -> None:
        if turn == 0:
            in_the_middle.set()
            assert go_on.wait(DEADLINE_S)

    group.during = stop_in_the_first
    first = pool.submit(give_gradient, reducer, 0, 1.0)
    assert in_the_middle.wait(DEADLINE_S)
    for index in (1, 2):  # these hooks return at once: they do not wait for the launch, and do not launch
        pool.submit(give_gradient, reducer, index, 1.0).result(DEADLINE_S)
    assert len(group.launched) == 1
    go_on.set()
    first.result(DEADLINE_S)
    assert [tensor.data_ptr() for tensor in group.launched] == flats(reducer)
    assert len(set(group.threads)) == 1
    assert [work.tensor.data_ptr() for work in seen.queue.works] == flats(reducer)
    assert group.overlaps == 0


def test_the_end_of_a_backward_waits_for_the_thread_that_is_launching(pool: ThreadPoolExecutor) -> None:
    group = FakeGroup()
    parameters = parameters_of([1, 1])
    reducer = reducer_of(parameters, group, bucket_bytes=FOUR_BYTES)
    begin_backward(reducer)
    in_the_middle, go_on, at_the_end = threading.Event(), threading.Event(), threading.Event()

    def stop_in_the_first(turn: int) -> None:
        if turn == 0:
            in_the_middle.set()
            assert go_on.wait(DEADLINE_S)

    def end() -> None:
        at_the_end.set()
        reducer._backward_ended()

    group.during = stop_in_the_first
    first = pool.submit(give_gradient, reducer, 0, 3.0)
    assert in_the_middle.wait(DEADLINE_S)
    last = pool.submit(end)  # parameter 1 has no gradient in this backward
    assert at_the_end.wait(DEADLINE_S)
    assert len(group.launched) == 1
    go_on.set()
    first.result(DEADLINE_S)
    last.result(DEADLINE_S)
    assert (len(group.launched), group.overlaps) == (2, 0)
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [3.0]


def test_an_error_of_a_launch_is_raised_in_the_thread_that_launches(pool: ThreadPoolExecutor) -> None:
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1, 1, 1]), group, bucket_bytes=FOUR_BYTES)
    seen = begin_backward(reducer)
    in_the_middle, go_on = threading.Event(), threading.Event()

    def fail_in_the_first(turn: int) -> None:
        if turn == 0:
            in_the_middle.set()
            assert go_on.wait(DEADLINE_S)
            raise RuntimeError("out of words")

    group.during = fail_in_the_first
    first = pool.submit(give_gradient, reducer, 0, 1.0)
    assert in_the_middle.wait(DEADLINE_S)
    pool.submit(give_gradient, reducer, 1, 1.0).result(DEADLINE_S)
    go_on.set()
    with pytest.raises(RuntimeError, match="out of words"):
        first.result(DEADLINE_S)
    assert len(group.launched) == 1
    pool.submit(give_gradient, reducer, 2, 1.0).result(DEADLINE_S)  # another device may still be computing
    assert [tensor.data_ptr() for tensor in group.launched] == flats(reducer)
    # A Work belongs to its bucket, although the first bucket has none.
    works = [None if work is None else work.tensor.data_ptr() for work in seen.queue.works]
    assert works == [None, *flats(reducer)[1:]]


def test_hooks_of_a_failed_backward_do_not_count_in_the_next_one(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reports an error to the script while the hooks of another device still run."""
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1, 1]), group, bucket_bytes=FOUR_BYTES)
    task = threading.local()
    monkeypatch.setattr("ddp.reducer.engine.current_task", lambda: getattr(task, "number", 7))
    reducer._end_task = 7
    begin_backward(reducer)
    give_gradient(reducer, 0, 1.0)
    reducer.rebuilt = True
    reducer.check_finished()  # the next forward: the backward with the number 7 has not ended
    task.number = 8
    seen = begin_backward(reducer)
    late = pool.submit(give_gradient, reducer, 1, 5.0)
    late.result(DEADLINE_S)
    assert seen.counts == [0, 0]
    give_gradient(reducer, 0, 1.0)
    give_gradient(reducer, 1, 1.0)
    assert seen.counts == [1, 1]


def test_a_hook_cannot_end_the_backward_of_its_own_model() -> None:
    """It would wait for itself."""
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1, 1]), group, bucket_bytes=FOUR_BYTES)
    begin_backward(reducer)
    group.during = lambda _turn: reducer._backward_ended()
    with pytest.raises(RuntimeError, match="Do not run this model in its own hook"):
        give_gradient(reducer, 0, 1.0)


def share_out(count: int, n_threads: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    owners = [chance.randrange(n_threads) for _ in range(count)]
    shares = [[i for i in range(count) if owners[i] == thread] for thread in range(n_threads)]
    for share in shares:
        chance.shuffle(share)
    return shares


@pytest.mark.parametrize("counter", ["round", "compiled", "python"])
@pytest.mark.parametrize("as_views", [False, True])
def test_threads_that_race_launch_full_buckets_in_order(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, as_views: bool, counter: str
) -> None:
    """Four threads, buckets of three parameters whose gradients arrive on any of them."""
    if counter == "python":
        monkeypatch.setattr(arrivals, "new", arrivals.PythonArrivals)
    group, count = FakeGroup(), 60
    parameters = parameters_of([1] * count)
    reducer = reducer_of(parameters, group, bucket_bytes=3 * FOUR_BYTES, as_views=as_views)
    sent: list[list[float]] = []
    group.during = lambda _turn: sent.append(group.launched[-1].tolist())
    for seed in range(30):
        group.launched.clear()
        sent.clear()
        seen = begin_backward(reducer)
        seen.waiting, seen.counts = Yielding(seen.waiting), Yielding(seen.counts)
        seen.counted_by_hooks = counter == "round"  # the hooks do not count in this round
        start = threading.Barrier(4)

        def run(share: list[int], start: threading.Barrier = start) -> None:
            start.wait(DEADLINE_S)
            for index in share:
                give_gradient(reducer, index, 1.0 + index)

        for done in [pool.submit(run, share) for share in share_out(count, 4, seed)]:
            done.result(DEADLINE_S)
        assert [tensor.data_ptr() for tensor in group.launched] == flats(reducer)
        assert sent == [[(1.0 + i) / 2 for i in range(at, at + 3)] for at in range(0, count, 3)]
        reducer._backward_ended()
        assert [value(parameter) for parameter in parameters] == [1.0 + i for i in range(count)]
    assert group.overlaps == 0


def value(parameter: torch.Tensor) -> float:
    assert parameter.grad is not None
    return parameter.grad.item()
