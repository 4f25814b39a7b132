"""Buffers: when rank 0's are sent to everybody, when not, and hooks that do it another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from models import Buffered, Convolutions, buffers, observe, square
from register import case
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

if TYPE_CHECKING:
    from trial import Trial


@case(2, 4, synced=({},), named=({"forward_sync_buffers": True},), off=({"forward_sync_buffers": False},))
def sent_before_each_forward(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Buffered(), **given)
    trial.note("will sync", model.will_sync_module_buffers())
    for step in range(3):
        square(model(trial.data(4, 4, step=step))).backward()
        buffers(trial, f"step {step}", model)
        observe(trial, f"step {step}", model)


@case(2, without_no_sync=(False,), within_no_sync=(True,))
def in_a_pass_that_is_not_averaged(trial: Trial, alone: bool) -> None:
    """After a pass under no_sync the next forward does not send buffers; the one after does."""
    from contextlib import nullcontext

    model = trial.wrap(Buffered())
    for step in range(4):
        with model.no_sync() if alone and step in (0, 1) else nullcontext():
            square(model(trial.data(4, 4, step=step))).backward()
        buffers(trial, f"step {step}", model)
        trial.note("flags", [model.require_backward_grad_sync, model.require_forward_param_sync])


@case(2, train=(True,), evaluation=(False,))
def in_passes_without_gradients(trial: Trial, training: bool) -> None:
    model = trial.wrap(Buffered())
    for step in range(3):
        model.train(training)
        with torch.no_grad():
            trial.note("out", model(trial.data(4, 4, step=step)))
        buffers(trial, f"step {step}", model)
    model.train()
    square(model(trial.data(4, 4))).backward()
    observe(trial, "after", model)


@case()
def changed_by_hand_on_one_rank(trial: Trial) -> None:
    model = trial.wrap(Buffered())
    square(model(trial.data(4, 4))).backward()
    model.module.total.fill_(100 + trial.rank)
    model.module.register_buffer("late", torch.full((2,), float(trial.rank)))
    square(model(trial.data(4, 4, step=1))).backward()
    buffers(trial, "after", model)


@case()
def replaced_by_another_tensor(trial: Trial) -> None:
    model = trial.wrap(Buffered())
    for step in range(3):
        square(model(trial.data(4, 4, step=step))).backward()
        model.module.total = model.module.total.clone() + trial.rank
        buffers(trial, f"step {step}", model)


@case()
def none_at_all(trial: Trial) -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("nothing", None)
    model = trial.wrap(module)
    trial.note("will sync", model.will_sync_module_buffers())
    square(model(trial.data(4, 4))).backward()
    observe(trial, "after", model)


@case()
def shared_by_two_modules(trial: Trial) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Buffered(), Buffered()
            self.two.register_buffer("total", self.one.total)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.two(self.one(x))
            return out

    model = trial.wrap(Two())
    for step in range(2):
        square(model(trial.data(4, 4, step=step))).backward()
        buffers(trial, f"step {step}", model)


@case()
def two_forwards_of_a_normalised_model(trial: Trial) -> None:
    """Sending buffers in the second forward leaves the first one's graph whole."""
    model = trial.wrap(Convolutions())
    for step in range(2):
        model.zero_grad()
        one, two = (model(trial.data(2, 3, 8, 8, step=2 * step + i)) for i in range(2))
        (square(one) + square(two)).backward()
        observe(trial, f"step {step}", model)
        buffers(trial, f"step {step}", model)


HOOKS: dict[str, Any] = {}


def averaged(state: Any, named: dict[str, torch.Tensor]) -> Any:
    futures = []
    for buffer in named.values():
        if buffer.is_floating_point():
            buffer.div_(dist.get_world_size())
            futures.append(dist.all_reduce(buffer, async_op=True).get_future())
    return futures


def averaged_at_once(state: Any, named: dict[str, torch.Tensor]) -> None:
    state.append(sorted(named))
    for buffer in named.values():
        if buffer.is_floating_point():
            buffer.div_(dist.get_world_size())
            dist.all_reduce(buffer)


@case(
    2,
    post_futures=("POST_FORWARD", averaged),
    post=("POST_FORWARD", averaged_at_once),
    pre=("PRE_FORWARD", averaged_at_once),
)
def hooks(trial: Trial, where: str, hook: Any) -> None:
    model = trial.wrap(Buffered())
    calls: list[Any] = []
    model._register_buffer_comm_hook(calls, hook, getattr(Location, where))
    for step in range(3):
        square(model(trial.data(4, 4, step=step))).backward()
        buffers(trial, f"step {step}", model)
        observe(trial, f"step {step}", model)
    trial.note("calls", calls)


@case()
def a_hook_that_cannot_be_called(trial: Trial) -> None:
    model = trial.wrap(Buffered())
    trial.attempt("registering", lambda: model._register_buffer_comm_hook(None, 3))


@case(2, post=("POST_FORWARD",), pre=("PRE_FORWARD",))
def hooks_under_no_sync(trial: Trial, where: str) -> None:
    model = trial.wrap(Buffered())
    calls: list[Any] = []
    model._register_buffer_comm_hook(calls, averaged_at_once, getattr(Location, where))
    for step in range(4):
        if step in (1, 2):
            with model.no_sync():
                square(model(trial.data(4, 4, step=step))).backward()
        else:
            square(model(trial.data(4, 4, step=step))).backward()
        trial.note(f"step {step}: calls", len(calls))
        buffers(trial, f"step {step}", model)
