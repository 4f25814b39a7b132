"""How buckets take gradients that existed before the backward, and give the averages back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fake_group import FakeGroup, parameters_of, reducer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.reducer.reducer import Reducer

SIZES = [3, 5, 2]
BUCKET_BYTES = 1024


def backward(reducer: Reducer, grads: Sequence[float | None]) -> None:
    """Add to `.grad` in place, as autograd does if it exists."""
    reducer.prepare_for_backward([])
    for i, value in enumerate(grads):
        parameter = reducer.parameters[i]
        if value is None:
            reducer.hooks.report(i)  # autograd computed an undefined gradient
            continue
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, value)
            else:
                parameter.grad += value
        reducer.hooks.report(i)
    reducer._finalize()


def values(reducer: Reducer) -> list[float | None]:
    """The gradient of each parameter, whose elements are all equal."""
    found: list[float | None] = []
    for parameter in reducer.parameters:
        if parameter.grad is None:
            found.append(None)
        else:
            (one,) = set(parameter.grad.tolist())
            found.append(one)
    return found


@pytest.mark.parametrize("as_views", [False, True])
def test_gradients_that_are_zeroed_in_place_are_averaged_in_the_same_memory(as_views: bool) -> None:
    reducer = reducer_of(parameters_of(SIZES), FakeGroup(), bucket_bytes=BUCKET_BYTES, as_views=as_views)
    (bucket,) = reducer.sender.buckets
    places = []
    for step in range(4):
        for parameter in reducer.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        backward(reducer, [1.0 + step, 2.0 + step, 3.0 + step])
        assert values(reducer) == [1.0 + step, 2.0 + step, 3.0 + step]
        places.append((bucket.payload[0].data_ptr(), [p.grad.data_ptr() for p in reducer.parameters]))  # type: ignore[union-attr]
    assert all(place == places[0] for place in places)


def test_gradients_of_the_script_keep_their_memory_and_the_bucket_keeps_its_own() -> None:
    reducer = reducer_of(parameters_of(SIZES), FakeGroup(), bucket_bytes=BUCKET_BYTES)
    own = [torch.zeros_like(parameter) for parameter in reducer.parameters]
    for parameter, grad in zip(reducer.parameters, own, strict=True):
        parameter.grad = grad
    (bucket,) = reducer.sender.buckets
    flats = set()
    for step in range(3):
        backward(reducer, [1.0, 2.0, 3.0])
        assert values(reducer) == [1.0 * (step + 1), 2.0 * (step + 1), 3.0 * (step + 1)]
        assert all(p.grad is grad for p, grad in zip(reducer.parameters, own, strict=True))
        flats.add(bucket.payload[0].data_ptr())
    assert len(flats) == 1


def test_some_members_have_no_gradient() -> None:
    reducer = reducer_of(parameters_of(SIZES), FakeGroup(), bucket_bytes=BUCKET_BYTES)
    reducer.parameters[0].grad = torch.full_like(reducer.parameters[0], 4.0)
    backward(reducer, [1.0, None, 2.0])
    assert values(reducer) == [5.0, 0.0, 2.0]  # as with torch's class: it does not look for unused parameters


def test_a_gradient_with_a_graph_is_averaged_as_well() -> None:
    """backward(create_graph=True)"""
    reducer = reducer_of(parameters_of(SIZES), FakeGroup(), bucket_bytes=BUCKET_BYTES)
    reducer.prepare_for_backward([])
    for i, parameter in enumerate(reducer.parameters):
        parameter.grad = parameter * 0 + float(i + 1)
        reducer.hooks.report(i)
    reducer._finalize()
    assert values(reducer) == [1.0, 2.0, 3.0]
    assert all(p.grad is not None and p.grad.requires_grad for p in reducer.parameters)


def test_a_gradient_that_the_script_holds_receives_the_average() -> None:
    """As with torch's class, `.grad` stays the tensor that a hook of the script has seen."""
    reducer = reducer_of(parameters_of(SIZES), FakeGroup(), bucket_bytes=BUCKET_BYTES)
    backward(reducer, [1.0, 2.0, 3.0])
    held = [parameter.grad for parameter in reducer.parameters]
    for parameter in reducer.parameters:
        parameter.grad = None
    backward(reducer, [4.0, 5.0, 6.0])
    assert [grad.tolist()[0] for grad in held if grad is not None] == [1.0, 2.0, 3.0]


def test_a_view_whose_memory_the_script_replaces_is_taken_back_into_the_bucket() -> None:
    """`p.grad.data = ...`"""
    reducer = reducer_of(parameters_of(SIZES), FakeGroup(), bucket_bytes=BUCKET_BYTES, as_views=True)
    for step in range(3):
        backward(reducer, [1.0, 2.0, 3.0])
        assert values(reducer) == [1.0, 2.0, 3.0], step
        for parameter in reducer.parameters:
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data * 7
            if step:
                parameter.grad = None
            else:
                parameter.grad.zero_()
    (bucket,) = reducer.sender.buckets
    backward(reducer, [1.0, 2.0, 3.0])
    flat = bucket.payload[0]
    places = [p.grad.untyped_storage().data_ptr() for p in reducer.parameters if p.grad is not None]
    assert places == [flat.untyped_storage().data_ptr()] * 3
