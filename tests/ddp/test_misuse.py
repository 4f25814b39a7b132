"""What cannot give the same gradients on every rank is an error with a name, and what can go on goes on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from test_training import batch, close, expected, gradients, loss_of, mlp
from torch import nn

from ddp import DistributedDataParallel

if TYPE_CHECKING:
    from ranks import Ranks


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use = "left"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self, self.use)(x)
        return out


def outside(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp(), strict=True)
    loss_of(wrapped, batch(rank)).backward()
    with pytest.raises(RuntimeError, match=r"rank \d .*4\.\w+.*test_misuse\.py:\d+.*no_sync"):
        loss_of(wrapped.module, batch(rank)).backward()
    with wrapped.no_sync():
        loss_of(wrapped.module, batch(rank)).backward()
    newer = DistributedDataParallel(wrapped.module, strict=True)
    newer.zero_grad()
    loss_of(newer, batch(rank)).backward()
    close(gradients(newer), expected(newer.module, 2))
    wrapped.zero_grad()
    loss_of(wrapped, batch(rank)).backward()


def test_a_backward_past_a_strict_wrapper_is_an_error_unless_it_is_meant(two_ranks: Ranks) -> None:
    two_ranks(outside)


def too_small(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp())

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.ones(1))
        return future

    wrapped.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=r"holds 1 elements, but its bucket has \d+"):
        loss_of(wrapped, batch(rank)).backward()


def test_a_hook_cannot_return_less_than_its_bucket(two_ranks: Ranks) -> None:
    two_ranks(too_small)


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("trap")


class Trapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.second(Trap.apply(x) if self.armed else x)
        return out


def trapped(rank: int) -> None:
    """Gradients of the second layer have arrived when the backward raises, as under torch's class."""
    wrapped = DistributedDataParallel(Trapped())
    loss_of(wrapped, batch(rank)).backward()
    wrapped.module.armed = True
    with pytest.raises(ArithmeticError):
        loss_of(wrapped, batch(rank)).backward()
    wrapped.module.armed = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            wrapped(batch(rank))


def test_a_backward_that_raised_in_its_middle_is_an_error_at_the_next_forward(two_ranks: Ranks) -> None:
    two_ranks(trapped)


def forgotten(rank: int) -> None:
    module = mlp()
    for step in range(3):
        wrapped = DistributedDataParallel(module)
        for i in range(3):
            wrapped.zero_grad()
            loss_of(wrapped, batch(rank, i)).backward()
        reducer = weakref.ref(wrapped.reducer)
        del wrapped
        assert reducer() is None, step
    module.zero_grad()
    loss_of(module, batch(rank)).backward()


def test_a_wrapper_that_is_dropped_leaves_nothing_behind(two_ranks: Ranks) -> None:
    two_ranks(forgotten)


def changed(rank: int) -> None:
    module = mlp()
    module[2].requires_grad_(False)
    wrapped = DistributedDataParallel(module, strict=True)
    loss_of(wrapped, batch(rank)).backward()
    module[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=rf"rank {rank}.*2.weight, 2.bias were added, or requires_grad"):
        wrapped(batch(rank))
    module[2].requires_grad_(False)
    module.add_module("head", nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match=r"head\.weight, head\.bias were added"):
        wrapped(batch(rank))


def test_a_strict_wrapper_refuses_parameters_that_are_unfrozen_or_added(two_ranks: Ranks) -> None:
    two_ranks(changed)


def differing(rank: int, what: str) -> str:
    width, given = 4, {}
    layer = nn.Linear(4, 4)
    if what == "shape":
        width += rank == 1
    elif what == "dtype" and rank == 1:
        layer = layer.double()
    elif what == "option":
        given = {"find_unused_parameters": rank == 1}
    layers = [layer, nn.Linear(width, 4)]
    if what == "count" and rank == 1:
        layers.pop()
    with pytest.raises(RuntimeError) as error:
        DistributedDataParallel(nn.Sequential(*layers), **given)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", "parameter '1.weight' (params[2]) of rank 1 with sizes [4, 5] appears not to match"),
        ("dtype", "parameter '0.weight' (params[0]) of rank 1 with dtype torch.float64"),
        (
            "option",
            "find_unused_parameters=False on rank 0, but find_unused_parameters=True on rank 1",
        ),
        ("count", "Rank 0 has 4 params, while rank 1 has inconsistent 2 params"),
    ],
)
def test_models_that_differ_are_told_apart_on_every_rank(three_ranks: Ranks, what: str, said: str) -> None:
    said_by_all = three_ranks(differing, what)
    assert len(set(said_by_all)) == 1
    assert said in said_by_all[0]


def outside_alone(rank: int) -> None:
    mine = [dist.new_group([0]), dist.new_group([1])][rank]
    wrapped = DistributedDataParallel(mlp(), process_group=mine)
    for model in (wrapped, wrapped.module, wrapped):
        loss_of(model, batch(rank)).backward()


def test_a_rank_without_others_may_call_the_wrapped_module_as_it_likes(two_ranks: Ranks) -> None:
    two_ranks(outside_alone)
