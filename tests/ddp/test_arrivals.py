"""Hooks that count gradients: the compiled counter and the one in Python do the same, and the reducer loses nothing."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from fake_group import FakeGroup, begin_backward, give_gradient, parameters_of, reducer_of
from hypothesis import given
from hypothesis import strategies as st

from ddp.reducer import arrivals
from ddp.reducer.arrivals import PythonArrivals

if TYPE_CHECKING:
    from collections.abc import Callable

compiled = pytest.importorskip("ddp.reducer._arrivals", reason="the compiled counter is not installed")
KINDS = [compiled.Arrivals, PythonArrivals]

N, N_CHUNKS = 6, 3
numbers = st.integers(0, N - 1)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("hook"), numbers),
        st.tuples(st.just("task"), st.sampled_from([1, 2])),
        st.tuples(st.just("take"), st.none()),
        st.tuples(
            st.just("arm"),
            st.tuples(
                st.lists(st.integers(0, 1), min_size=N, max_size=N),
                st.lists(st.integers(0, N_CHUNKS - 1), min_size=N, max_size=N),
            ),
        ),
    ),
    max_size=40,
)


def transcript(kind: Callable[..., Any], script: list[tuple[str, Any]]) -> list[object]:
    """What a counter calls and returns."""
    task, lines = [1], list[object]()
    counter = kind(
        lambda: task[0], lambda i: lines.append(("arrived", i)), lambda c: lines.append(("chunk", c))
    )
    hooks = [counter.hook(i) for i in range(N)]
    for what, argument in script:
        if what == "hook":
            assert hooks[argument]((), (None,)) is None
        elif what == "task":
            task[0] = argument
        elif what == "take":
            lines.append(counter.take())
        else:
            states, chunk_of = argument
            waiting = [
                sum(1 for i in range(N) if chunk_of[i] == c and not states[i]) for c in range(N_CHUNKS)
            ]
            counter.arm(1, states, chunk_of, waiting)
    return [*lines, counter.take()]


@given(actions)
def test_both_counters_do_the_same(script: list[tuple[str, Any]]) -> None:
    assert transcript(compiled.Arrivals, script) == transcript(PythonArrivals, script)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_is_complete_once_and_unusual_gradients_go_to_the_reducer(kind: Callable[..., Any]) -> None:
    script = [
        *[("hook", 0), ("arm", ([1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 2]))],  # not armed: 0 goes to the reducer
        *[("hook", 2), ("hook", 1), ("hook", 1), ("hook", 5)],
        *[("task", 2), ("hook", 3), ("task", 1), ("hook", 0)],
    ]
    assert transcript(kind, script) == [
        *[("arrived", 0), ("chunk", 0), ("arrived", 1), ("chunk", 2), ("arrived", 3), ("arrived", 0)],
        ([2, 1, 5], [0, 2, 0]),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_the_reducer_reach_autograd(kind: Callable[..., Any]) -> None:
    def fail(_number: int) -> None:
        raise KeyError("a hook failed")

    counter = kind(lambda: 1, fail, fail)
    with pytest.raises(KeyError, match="a hook failed"):
        counter.hook(0)()
    counter.arm(1, [0], [0], [1])
    with pytest.raises(KeyError, match="a hook failed"):
        counter.hook(0)()


def test_the_compiled_counter_refuses_numbers_that_do_not_fit() -> None:
    counter = compiled.Arrivals(lambda: 1, print, print)
    for given_numbers in (([0], [1], [1]), ([2], [0], [1]), ([0], [0], [5]), ([0, 0], [0], [1])):
        with pytest.raises(ValueError, match="internal error"):
            counter.arm(1, *given_numbers)
    assert counter.take() is None
    with pytest.raises(ValueError, match="negative"):
        counter.hook(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_counter_keeps_its_reducer_neither_alive_nor_in_a_cycle(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "new", kind)
    reducer = reducer_of(parameters_of([1, 1]), FakeGroup(), bucket_bytes=4)
    hook, gone = reducer.setup.arrivals.hook(0), weakref.ref(reducer)
    del reducer
    gc.collect()
    assert gone() is None
    hook()  # the engine may still call it


@pytest.mark.parametrize("kind", KINDS)
def test_the_reducer_is_called_once_per_chunk(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "new", kind)
    group = FakeGroup()
    reducer = reducer_of(parameters_of([1] * 12), group, bucket_bytes=16, strict=True)
    calls: list[int] = []
    arrived = type(reducer).arrived
    monkeypatch.setattr(type(reducer), "arrived", lambda self, i: (calls.append(i), arrived(self, i)))
    reducer.setup.arrivals = kind(
        lambda: -1, lambda i: type(reducer).arrived(reducer, i), reducer._chunk_complete
    )
    seen = begin_backward(reducer)
    for i in range(11):
        give_gradient(reducer, i, 1.0 + i)
    assert (calls, len(group.launched)) == ([0], 2)
    reducer._backward_ended()  # the last parameter has no gradient
    assert seen.counts == [1] * 11 + [0]
    assert seen.order == list(range(11))
    assert len(group.launched) == 3
    with pytest.raises(RuntimeError, match="p11"):
        reducer.check_finished()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_gradient_of_a_parameter_is_refused_also_if_hooks_count(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "new", kind)
    reducer = reducer_of(parameters_of([1, 1, 1]), FakeGroup(), bucket_bytes=8)
    begin_backward(reducer)
    give_gradient(reducer, 0, 1.0)
    give_gradient(reducer, 1, 1.0)
    with pytest.raises(RuntimeError, match="p1"):
        give_gradient(reducer, 1, 1.0)
