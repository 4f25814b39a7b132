"""Hooks on several threads, as autograd runs them for a module on several devices. The threads here are real."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from fake_group import FakeGroup, begin_backward, give_gradient, parameters_of, reducer_of

from ddp.reducer import reducer as under_test

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


def test_an_error_of_a_launch_is_raised_in_the_thread_that_launches(pool: ThreadPoolExecutor) -> None:
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1, 1, 1]), group, bucket_bytes=FOUR_BYTES)
    begin_backward(reducer)

    def fail_in_the_first(turn: int) -> None:
        if turn == 0:
            raise RuntimeError("out of words")

    group.during = fail_in_the_first
    first = pool.submit(give_gradient, reducer, 0, 1.0)
    with pytest.raises(RuntimeError, match="out of words"):
        first.result(DEADLINE_S)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        reducer.check_finished()


def share_out(count: int, n_threads: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    owners = [chance.randrange(n_threads) for _ in range(count)]
    shares = [[i for i in range(count) if owners[i] == thread] for thread in range(n_threads)]
    for share in shares:
        chance.shuffle(share)
    return shares


@pytest.mark.parametrize("counter", ["compiled", "python"])
@pytest.mark.parametrize("as_views", [False, True])
def test_threads_that_race_launch_full_buckets_in_order(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, as_views: bool, counter: str
) -> None:
    """Four threads, buckets of three parameters whose gradients arrive on any of them."""
    if counter == "python":
        monkeypatch.setattr(under_test, "new_counter", under_test.PythonArrivals)
    group, count = FakeGroup(), 60
    parameters = parameters_of([1] * count)
    reducer = reducer_of(parameters, group, bucket_bytes=3 * FOUR_BYTES, as_views=as_views)
    sent: list[list[float]] = []
    group.during = lambda _turn: sent.append(group.launched[-1].tolist())
    for seed in range(30):
        group.launched.clear()
        sent.clear()
        step = begin_backward(reducer)
        step.waiting = Yielding(step.waiting)
        start = threading.Barrier(4)

        def run(share: list[int], start: threading.Barrier = start) -> None:
            start.wait(DEADLINE_S)
            for index in share:
                give_gradient(reducer, index, 1.0 + index)

        for done in [pool.submit(run, share) for share in share_out(count, 4, seed)]:
            done.result(DEADLINE_S)
        assert [tensor.data_ptr() for tensor in group.launched] == flats(reducer)
        assert sent == [[(1.0 + i) / 2 for i in range(at, at + 3)] for at in range(0, count, 3)]
        reducer._finalize()
        assert [value(parameter) for parameter in parameters] == [1.0 + i for i in range(count)]
    assert group.overlaps == 0


def value(parameter: torch.Tensor) -> float:
    assert parameter.grad is not None
    return parameter.grad.item()
