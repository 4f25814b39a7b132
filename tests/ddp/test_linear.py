"""The reducer's work in one backward grows with the number of parameters, chunks and buckets, not with their product.

The test counts executed instructions of the reducer, not time.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fake_group import FakeGroup, begin_backward, give_gradient, parameters_of, reducer_of

from ddp.reducer import plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

FOUR_BYTES = 4


def instructions(action: Callable[[], object]) -> int:
    """Count the instructions that `action` executes in this package."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if "/ddp/reducer/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def backward(n_buckets: int, per_bucket: int, *, keep: bool) -> tuple[int, int]:
    """The instructions of all hooks, and those of the end. With `keep`, gradients exist before the backward."""
    n = n_buckets * per_bucket
    reducer = reducer_of(parameters_of([1] * n), FakeGroup(), bucket_bytes=per_bucket * FOUR_BYTES)
    assert (len(reducer.sender.buckets), len(reducer.chunks)) == (n_buckets, n)
    for round_number in range(2):
        begin_backward(reducer)
        if round_number and keep:
            for parameter in reducer.parameters:
                parameter.grad = parameter.detach().clone()
    hooks = instructions(lambda: [give_gradient(reducer, i, 1.0) for i in range(n)])
    end = instructions(reducer._finalize)
    return hooks, end


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("buckets", "per_bucket"), [(32, 1), (1, 32), (8, 4)])
def test_four_times_as_many_buckets_or_chunks_take_four_times_the_instructions(
    monkeypatch: pytest.MonkeyPatch, buckets: int, per_bucket: int, keep: bool
) -> None:
    each_is_a_chunk = replace(plan.choose("cpu", "fake", plan.Capabilities()), chunk=FOUR_BYTES)
    monkeypatch.setattr(plan, "choose", lambda *_: each_is_a_chunk)
    small = backward(buckets, per_bucket, keep=keep)
    more_buckets = backward(4 * buckets, per_bucket, keep=keep)
    longer_buckets = backward(buckets, 4 * per_bucket, keep=keep)
    for name, at in (("hooks", 0), ("end", 1)):
        assert small[at] > 300, name  # it counts
        assert more_buckets[at] <= 4.2 * small[at], name
        assert longer_buckets[at] <= 4.2 * small[at], name
