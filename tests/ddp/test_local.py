"""Gradients are averaged when torch's class averages them. Others stay on their rank, and one line says so."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from test_training import batch, close, expected, gradients, loss_of, mlp
from torch import nn

import ddp.shm  # noqa: F401
from ddp import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ranks import Ranks


@contextmanager
def messages() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddp")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def step(wrapped: DistributedDataParallel, rank: int, number: int = 0) -> None:
    wrapped.zero_grad()
    loss_of(wrapped, batch(rank, number)).backward()
    close(gradients(wrapped), expected(wrapped.module, 2, number))


def stays(module: nn.Module, wrapped: DistributedDataParallel, rank: int, number: int) -> None:
    """The gradients of a backward past the wrapper are those of this rank."""
    plain = copy.deepcopy(wrapped.module)
    wrapped.zero_grad()
    plain.zero_grad()
    loss_of(module, batch(rank, number)).backward()
    loss_of(plain, batch(rank, number)).backward()
    close(gradients(wrapped), gradients(plain))


def past(rank: int, given: dict[str, Any]) -> list[str]:
    wrapped = DistributedDataParallel(mlp(), **given)
    with messages() as said:
        for number in range(6):
            step(wrapped, rank, number)
            if number in (0, 3, 4) and rank == 0:  # alone, as for a saliency map or an attack
                stays(wrapped.module, wrapped, rank, number)
    return said


@pytest.mark.parametrize(
    "given",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}],
)
def test_a_backward_past_the_wrapper_on_one_rank_stays_there_and_one_line_says_so(
    two_ranks: Ranks, given: dict[str, Any]
) -> None:
    mine, others = two_ranks(past, given)
    (line,) = [each for each in mine if "is not averaged" in each]
    assert line.startswith("A backward on rank 0 computed a gradient of 4.")
    assert "test_training.py:" in line or "test_local.py:" in line
    assert not [each for each in others if "is not averaged" in each]


def meant(rank: int) -> list[str]:
    wrapped = DistributedDataParallel(mlp())
    step(wrapped, rank)
    with messages() as said:
        with wrapped.no_sync():
            loss = loss_of(wrapped, batch(rank))
        loss.backward()  # its forward ran under no_sync()
        with wrapped.no_sync():
            loss_of(wrapped.module, batch(rank)).backward()
        another = DistributedDataParallel(wrapped.module)
        step(another, rank)
    return said


def test_nothing_is_said_about_gradients_that_are_meant_to_stay(two_ranks: Ranks) -> None:
    assert two_ranks(meant) == [[], []]


class Pause(torch.autograd.Function):
    """Lets the backward of another thread go on to its end."""

    events: tuple[threading.Event, threading.Event]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        begun, middle = Pause.events
        begun.set()
        assert middle.wait(60)
        return grads[0]


def beside_another_model(rank: int) -> None:
    """The backward of a model that nobody wraps begins before ours, and ends in the middle of it, on one rank."""
    wrapped = DistributedDataParallel(mlp())
    weight = torch.ones(3, requires_grad=True)
    for number in range(6):
        begun, middle = Pause.events = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: Pause.apply(weight).sum().backward())
        if rank == 0 and number in (3, 5):
            other.start()
            assert begun.wait(60)

        def go_on(*_ignored: Any, other: Any = other, middle: Any = middle) -> None:
            middle.set()
            if other.ident:
                other.join(60)

        hook = wrapped.module[2].register_full_backward_hook(go_on)
        step(wrapped, rank, number)
        hook.remove()


def test_a_backward_of_another_model_in_another_thread_makes_no_difference(two_ranks: Ranks) -> None:
    two_ranks(beside_another_model)


def hooked_wrapper(rank: int) -> None:
    """As with torch's class, what a hook of the wrapper does to gradients that are being averaged is lost."""
    group = dist.new_group(backend="shm")  # averages in place
    modules = [torch.nn.Linear(700, 700, bias=False) for _ in range(2)]
    plain, wrapped = (DistributedDataParallel(each, process_group=group) for each in modules)
    plain.load_state_dict(wrapped.state_dict())
    wrapped.register_full_backward_hook(lambda *_: (wrapped.module.weight.grad.mul_(2), None)[1])
    given = torch.full((2, 700), rank + 1.0, requires_grad=True)
    for each in (plain, wrapped):
        each(given).sum().backward()
    assert torch.equal(plain.module.weight.grad, wrapped.module.weight.grad)


def test_a_hook_of_the_wrapper_does_not_change_the_average(two_ranks: Ranks) -> None:
    two_ranks(hooked_wrapper)


def hooks_that_go(rank: int) -> None:
    """While a hook of the script exists, each gradient is taken as it arrives, and later many at once again."""
    wrapped = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))))
    core, given = wrapped.reducer.core, torch.full((2, 3), rank + 1.0)
    counts, averages = [], []
    for hooked in (False, True, False):
        handle = wrapped.module[0].weight.register_hook(lambda _: None) if hooked else None
        wrapped.zero_grad()
        wrapped(given).sum().backward()
        counts.append(len(core.chunks))
        averages.append([p.grad.clone() for p in wrapped.parameters()])
        if handle is not None:
            handle.remove()
    assert counts[1] == 8 > counts[0] == counts[2]
    assert all(torch.equal(*each) for other in averages[1:] for each in zip(averages[0], other, strict=True))


def test_gradients_are_taken_one_by_one_only_while_there_are_hooks(two_ranks: Ranks) -> None:
    two_ranks(hooks_that_go)


def frozen_in_between(rank: int) -> None:
    """As a GAN does: the generator's step needs no gradients of the discriminator."""
    for given in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        wrapped = DistributedDataParallel(mlp(), **given)
        for number in range(4):
            step(wrapped, rank, number)
            out = wrapped(batch(rank, number))
            wrapped.module.requires_grad_(False)
            out.sum().backward()
            wrapped.module.requires_grad_(True)


def test_parameters_may_be_frozen_between_forward_and_backward(two_ranks: Ranks) -> None:
    two_ranks(frozen_in_between)


def touched_by_one_rank(rank: int) -> None:
    """A gradient that is exactly -0.0 on one rank only."""

    class Touching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layer, self.gain = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y - 0.0 * self.gain.sum() if rank == 0 else y

    wrapped = DistributedDataParallel(Touching(), find_unused_parameters=True)
    for number in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, number)).backward()
        grad = wrapped.module.gain.grad
        assert grad is not None
        assert not grad.any()


def test_a_gradient_of_negative_zero_is_a_gradient_on_all_ranks(two_ranks: Ranks) -> None:
    two_ranks(touched_by_one_rank)


def unfrozen(rank: int) -> list[str]:
    module = mlp()
    module[0].requires_grad_(False)
    wrapped = DistributedDataParallel(module)
    with messages() as said:
        for number in range(4):
            module[0].requires_grad_(number > 1)
            loss_of(wrapped, batch(rank, number)).backward()
    return said


def test_parameters_that_are_unfrozen_stay_local_and_one_line_says_so(two_ranks: Ranks) -> None:
    for rank, said in enumerate(two_ranks(unfrozen)):
        (line,) = said
        assert f"on rank {rank}, 0.weight, 0.bias were added, or requires_grad was set" in line


def pickled(rank: int) -> None:
    assert pickle.loads(
        pickle.dumps(DistributedDataParallel(mlp(), strict=True))
    ).reducer.core.settings.strict
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    for group in (everyone, alone):
        wrapped = DistributedDataParallel(mlp(), process_group=group)
        for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
            assert other.process_group is other.reducer.core.sender.group is group
    step(pickle.loads(pickle.dumps(DistributedDataParallel(mlp(), process_group=everyone))), rank)
    parts = [pickle.dumps(DistributedDataParallel(mlp(), process_group=group)) for group in (everyone, alone)]
    dist.destroy_process_group(everyone)
    dist.destroy_process_group(alone)
    step(pickle.loads(parts[0]), rank)
    with pytest.raises(RuntimeError, match=rf"for the ranks \[{rank}\], and no process group here"):
        pickle.loads(parts[1])


def test_a_pickle_comes_back_on_a_group_of_the_same_ranks(two_ranks: Ranks) -> None:
    two_ranks(pickled)
