"""Hooks that count gradients: the compiled counter and the one in Python do the same, and the reducer loses nothing."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_group import FakeGroup, begin_backward, give_gradient, parameters_of, reducer_of
from hypothesis import given
from hypothesis import strategies as st

from ddp.reducer import reducer as under_test
from ddp.reducer.reducer import GradientHooks, PythonArrivals, Reducer, new_counter

if TYPE_CHECKING:
    from collections.abc import Callable

compiled = pytest.importorskip("ddp.reducer._arrivals", reason="the compiled counter is not installed")
KINDS = [compiled.Arrivals, PythonArrivals]

N, N_CHUNKS = 6, 3
numbers = st.integers(0, N - 1)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("hook"), numbers),
        st.tuples(st.just("settle"), st.sets(numbers)),
        st.tuples(st.sampled_from(["arm", "disarm", "take_used", "left"]), st.none()),
        st.tuples(st.just("watch"), st.booleans()),
        st.tuples(
            st.just("plan"),
            st.tuples(
                st.lists(st.integers(0, 2), min_size=N, max_size=N),
                st.lists(st.integers(0, N_CHUNKS - 1), min_size=N, max_size=N),
                st.booleans(),
            ),
        ),
    ),
    max_size=40,
)


def transcript(kind: Callable[..., Any], script: list[tuple[str, Any]]) -> list[object]:
    """What a counter calls and returns."""
    lines = list[object]()
    counter = kind(
        *(
            lambda i, name=name: lines.append((name, i))  # type: ignore[misc]
            for name in ("begin", "complete", "surplus", "local")
        )
    )
    # Of the last parameters the gradients are missing.
    hooks = [counter.hook(i, SimpleNamespace(grad=i if i < N - 2 else None)) for i in range(N)]
    settled: set[int] = set()
    planned = False
    for what, argument in script:
        if what == "hook":
            assert hooks[argument]((), (None,)) is None
        elif what == "plan":
            expected, chunk_of, exact = argument
            counter.plan(expected, chunk_of, N_CHUNKS, exact)
            planned, settled = True, set()
        elif what == "settle":
            if planned:  # the reducer settles a parameter once
                lines.append(counter.settle(sorted(argument - settled)))
                settled |= argument
        elif what == "watch":
            counter.watch(argument)
        else:
            lines.append(getattr(counter, what)())
            settled = set() if what == "arm" else settled
    return [*lines, counter.disarm(), counter.left(), counter.take_used()]


@given(actions)
def test_both_counters_do_the_same(script: list[tuple[str, Any]]) -> None:
    assert transcript(compiled.Arrivals, script) == transcript(PythonArrivals, script)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_is_complete_once_and_a_surplus_gradient_goes_to_the_reducer(
    kind: Callable[..., Any],
) -> None:
    script = [
        *[
            ("hook", 0),
            ("plan", ([1, 1, 1, 2, 1, 1], [0, 0, 0, 1, 1, 2], False)),
            ("watch", True),
            ("hook", 0),
        ],
        *[("watch", False), ("hook", 0), ("arm", None), ("hook", 2), ("settle", {0})],
        *[("hook", 1), ("hook", 1), ("hook", 5), ("hook", 3), ("hook", 4), ("hook", 3), ("hook", 0)],
    ]
    assert transcript(kind, script) == [
        *[("local", 0), None, ("begin", 2), [], ("complete", 0), ("surplus", 1), ("complete", 2)],
        *[("complete", 1), ("surplus", 0), [2, 1, 5, 4, 3], [0] * 6, [1] * 6],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_the_reducer_reach_autograd(kind: Callable[..., Any]) -> None:
    def fail(_number: int) -> None:
        raise KeyError("a hook failed")

    for calls in ((fail, print, print, print), (print, fail, print, print)):
        counter = kind(*calls)
        counter.plan([1], [0], 1, False)
        counter.arm()
        with pytest.raises(KeyError, match="a hook failed"):
            counter.hook(0, None)()


def test_the_compiled_counter_refuses_numbers_that_do_not_fit() -> None:
    counter = compiled.Arrivals(print, print, print, print)
    for given_numbers in (([1], [1], 1), ([-1], [0], 1), ([1, 1], [0], 1), ([1], [0], -1)):
        with pytest.raises(ValueError, match="internal error"):
            counter.plan(*given_numbers, False)
    with pytest.raises(ValueError, match="internal error"):
        counter.settle([0])
    assert (counter.disarm(), counter.left(), counter.take_used()) == ([], [], [])
    with pytest.raises(ValueError, match="negative"):
        counter.hook(-1, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_counter_keeps_its_reducer_neither_alive_nor_in_a_cycle(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "new_counter", kind)
    reducer = reducer_of(parameters_of([1, 1]), FakeGroup(), bucket_bytes=4)
    hook, gone = reducer.counter.hook(0, None), weakref.ref(reducer)
    del reducer
    gc.collect()
    assert gone() is None
    hook()  # the engine may still call it


@pytest.mark.parametrize("kind", KINDS)
def test_the_reducer_is_called_once_per_chunk(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "new_counter", kind)
    calls: list[int] = []
    complete = Reducer._chunk_complete
    monkeypatch.setattr(Reducer, "_chunk_complete", lambda self, i: (calls.append(i), complete(self, i))[1])
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1] * 12), group, bucket_bytes=16)
    reducer.sender._collectives.costs = replace(reducer.sender.costs, chunk=2**40)
    reducer._cut()
    begin_backward(reducer)
    for i in range(11):
        give_gradient(reducer, i, 1.0 + i)
    assert (calls, len(group.launched)) == ([0, 1], 2)
    with pytest.raises(RuntimeError, match="p11"):
        reducer.check_finished()
    give_gradient(reducer, 11, 1.0)
    assert len(group.launched) == 3
    reducer._finalize()
    assert reducer.previous is not None
    assert reducer.previous.order == list(range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_gradient_of_a_parameter_is_refused(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "new_counter", kind)
    reducer = reducer_of(parameters_of([1, 1, 1]), FakeGroup(), bucket_bytes=8)
    begin_backward(reducer)
    give_gradient(reducer, 0, 1.0)
    give_gradient(reducer, 1, 1.0)
    with pytest.raises(RuntimeError, match="p1"):
        give_gradient(reducer, 1, 1.0)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_hooks_that_could_not_be_made_are_deleted_without_an_error() -> None:
    frozen = torch.zeros(1)
    counter = new_counter(*[lambda _index: None] * 4)
    with pytest.raises(AttributeError, match="next_functions"):
        GradientHooks([frozen], counter)
    gc.collect()
