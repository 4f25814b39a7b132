"""What the reducer does with the capabilities of a backend. The group is a fake that offers the methods of NCCL's."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_group import FakeGroup, begin_backward, give_gradient, parameters_of, reducer_of

from ddp.reducer import collectives, plan
from ddp.reducer.collectives import BucketCollectives

if TYPE_CHECKING:
    from ddp.reducer.reducer import Reducer


class NcclLike(FakeGroup):
    """Averages, and allocates tensors in memory of its own."""

    def __init__(self, *, allocates: bool = True, fails: bool = False) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self._allocates, self._fails = allocates, fails

    def name(self) -> str:
        return "nccl"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self._allocates

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._fails:
            raise RuntimeError("Backend hccl does not support allocateTensor")
        self.allocated.append(torch.empty(size, dtype=dtype))
        return self.allocated[-1]


def step(reducer: Reducer) -> list[list[float]]:
    begin_backward(reducer)
    for i in range(len(reducer.parameters)):
        give_gradient(reducer, i, 0.1 * (i + 1))
    reducer._finalize()
    return [parameter.grad.tolist() for parameter in reducer.parameters]  # type: ignore[union-attr]


def test_a_backend_that_averages_gets_undivided_gradients() -> None:
    group = NcclLike()
    reducer = reducer_of(parameters_of([2, 3]), group, bucket_bytes=4)
    sent: list[float] = []
    group.during = lambda _turn: sent.append(group.launched[-1][0].item())
    wanted = [torch.full((2,), 0.1).tolist(), torch.full((3,), 0.2).tolist()]
    assert step(reducer) == wanted
    assert group.averaged == 2
    assert sent == [wanted[0][0], wanted[1][0]]  # no pass has scaled them, not even with a rounding


def test_within_a_join_the_sum_is_divided_by_the_ranks_with_input() -> None:
    group = NcclLike()
    reducer = reducer_of(parameters_of([2]), group, bucket_bytes=4)
    reducer.sender.within_join = True
    step(reducer)
    assert (len(group.launched), group.averaged) == (1, 0)


def test_other_backends_get_divided_gradients() -> None:
    group = FakeGroup()
    reducer = reducer_of(parameters_of([2]), group, bucket_bytes=4)
    step(reducer)
    assert (len(group.launched), group.averaged) == (1, 0)


def accelerated(group: FakeGroup, monkeypatch: pytest.MonkeyPatch, variable: str | None) -> BucketCollectives:
    """Collectives that take the group's device for an accelerator."""
    if variable is None:
        monkeypatch.delenv("DDP_DISABLE_COMM_MEM", raising=False)
    else:
        monkeypatch.setenv("DDP_DISABLE_COMM_MEM", variable)
    choose = plan.choose
    monkeypatch.setattr(plan, "choose", lambda _type, *others: choose("cuda", *others))
    groups: Any = [group]
    return BucketCollectives(groups, torch.device("cpu"))


@pytest.mark.parametrize(("variable", "count"), [("0", 1), ("1", 0), (None, 0)])
def test_buckets_are_in_memory_of_the_backend_if_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, count: int
) -> None:
    group = NcclLike()
    storage = accelerated(group, monkeypatch, variable).allocate(5, torch.float32, torch.device("cpu"))
    assert (len(group.allocated), storage.shape) == (count, (5,))
    if count:
        assert storage is group.allocated[0]


@pytest.mark.parametrize("group", [NcclLike(allocates=False), FakeGroup()])
def test_a_backend_without_an_allocator_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, group: FakeGroup
) -> None:
    made = accelerated(group, monkeypatch, "0")
    assert not made.costs.registered_memory
    assert made.allocate(5, torch.float32, torch.device("cpu")).shape == (5,)


def test_an_allocator_that_fails_is_named_once_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some backends say that they can allocate, and cannot."""
    made = accelerated(NcclLike(fails=True), monkeypatch, "0")
    with caplog.at_level(logging.WARNING, "ddp"):
        for _ in range(2):
            assert made.allocate(5, torch.float32, torch.device("cpu")).shape == (5,)
    (line,) = caplog.messages
    assert "does not support allocateTensor" in line


def test_groups_with_different_backends_have_no_common_name() -> None:
    groups: Any = [FakeGroup(), NcclLike()]
    assert collectives.backend_name(groups, torch.device("cpu")) == ""
    assert not BucketCollectives(groups, torch.device("cpu")).divides
    same: Any = [NcclLike(), NcclLike()]
    assert BucketCollectives(same, torch.device("cpu")).divides


def test_one_chunk_per_bucket_needs_one_copy_per_bucket() -> None:
    reducer = reducer_of(parameters_of([1] * 6), FakeGroup(), bucket_bytes=12)
    reducer.sender._collectives.costs = replace(reducer.sender.costs, chunk=2**40)
    reducer._cut()
    assert [chunk.members for chunk in reducer.chunks] == [(0, 1, 2), (3, 4, 5)]
