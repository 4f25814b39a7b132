"""A process group without peers, for tests of the reducer in one process. It records what is launched, and by whom."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ddp.reducer.bucket_sender import ReducerSettings
from ddp.reducer.plan import limits
from ddp.reducer.reducer import Reducer, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import AllreduceOptions


class DoneWork:
    """A finished all-reduce. `tensor` is what it averaged."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self, *_timeout: object) -> bool:
        return True


class FakeGroup:
    """Two ranks that always have the same gradients: the sum is twice the own value."""

    def __init__(self) -> None:
        self.during: Callable[[int], None] = lambda _turn: None  # is called in the middle of each all-reduce
        self.launched: list[torch.Tensor] = []
        self.threads: list[int] = []
        self.overlaps = 0
        self.averaged = 0  # the number of all-reduces with AVG
        self._running = 0

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def name(self) -> str:
        return "fake"

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> DoneWork:
        averages = options.reduceOp == dist.ReduceOp.AVG
        self.averaged += averages
        self._running += 1
        self.overlaps += self._running > 1
        turn = len(self.launched)
        self.launched.append(tensors[0])
        self.threads.append(threading.get_ident())
        try:
            self.during(turn)
        finally:
            self._running -= 1
        tensors[0].mul_(1 if averages else 2)
        return DoneWork(tensors[0])


def parameters_of(sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.zeros(size, requires_grad=True) for size in sizes]


def reducer_of(
    parameters: list[torch.Tensor], group: FakeGroup, *, bucket_bytes: int, **given: Any
) -> Reducer:
    """A reducer with small buckets and a hook on every parameter. Its buckets are in the order of `parameters`."""
    limit = limits(bucket_bytes, bucket_bytes, (), whole_at_first=False)
    settings = ReducerSettings((cast("Any", group),), limit, **given)
    names = [f"p{i}" for i in range(len(parameters))]
    reducer = Reducer(parameters, names, [False] * len(parameters), settings)
    reducer.sender.adopt(reducer.sender.make_plan(range(len(parameters))))
    reducer._cut()
    reducer.rebuilt = True
    reducer.when_it_ends = lambda callback: None  # type: ignore[method-assign]
    return reducer


def begin_backward(reducer: Reducer) -> Step:
    """A step whose end is reported by the test."""
    for parameter in reducer.parameters:
        parameter.grad = None
    reducer.prepare_for_backward([])
    assert reducer.step is not None
    return reducer.step


def give_gradient(reducer: Reducer, index: int, value: float) -> None:
    """What autograd does: add to `.grad`, then call the hook on the same thread."""
    with torch.no_grad():
        reducer.parameters[index].grad = torch.full_like(reducer.parameters[index], value)
    reducer.hooks.report(index)
