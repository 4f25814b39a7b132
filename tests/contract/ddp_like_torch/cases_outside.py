"""Layers of the wrapped module that are applied after its forward: their gradients arrive before the outputs'."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from cases_better import Course, same_start
from models import observe, square
from register import case, same
from torch import nn

if TYPE_CHECKING:
    from trial import Trial

STEPS = 6


class Headless(nn.Module):
    """Its heads are applied by the caller, unless `inside`."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, wide)
        self.last = nn.Sequential(nn.Linear(wide, 3), nn.Linear(3, 3))
        self.inside = False

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x)
        return (self.last(self.head(features)), None) if self.inside else (features, self.head)


def applied(model: Any, module: Headless, x: torch.Tensor) -> torch.Tensor:
    out, head = model(x)
    result: torch.Tensor = out if head is None else module.last(head(out))
    return result


@case(
    2,
    3,
    plain=({}, {}),
    view=({"gradient_as_bucket_view": True}, {}),
    static=({"static_graph": True}, {}),
    small=({"bucket_cap_mb": 0.0002}, {}),
    kept=({}, {"set_to_none": False}),
    kept_view=({"gradient_as_bucket_view": True}, {"set_to_none": False}),
    # A head as large as a chunk is watched on its own.
    wide=({}, {"wide": 8192}),
    # The heads leave the forward when the order of arrival has been learned.
    late=({}, {"inside_for": 3}),
    late_kept=({}, {"inside_for": 3, "set_to_none": False}),
    late_kept_view=({"gradient_as_bucket_view": True}, {"inside_for": 3, "set_to_none": False}),
    late_wide=({}, {"inside_for": 3, "set_to_none": False, "wide": 8192}),
    no_sync=({}, {"local": (1, 3)}),
    no_sync_late=({}, {"local": (1, 4), "inside_for": 3}),
)
def layers_applied_after_the_forward(trial: Trial, given: dict[str, Any], how: dict[str, Any]) -> None:
    model = trial.wrap(same_start(lambda: Headless(how.get("wide", 4))), **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if "wide" not in how else 1e-5)
    local = how.get("local", ())
    for step in range(STEPS):
        model.module.inside = step < how.get("inside_for", 0)
        with model.no_sync() if step in local else contextlib.nullcontext():
            square(applied(model, model.module, trial.data(4, 6, step=step))).backward()
        observe(trial, f"step {step}", model, alike=step not in local)
        if step not in local:
            optimizer.step()
            optimizer.zero_grad(set_to_none=how.get("set_to_none", True))


@same("raised RuntimeError in step 0")
def layers_applied_after_the_forward_that_are_looked_for(trial: Trial) -> None:
    """With find_unused_parameters: a search from the outputs does not find them."""
    looked_for(trial)


@same("raised RuntimeError in step 3")
def layers_that_leave_the_forward_and_are_looked_for(trial: Trial) -> None:
    looked_for(trial, inside_for=3)


@same("raised RuntimeError in step 0")
def layers_applied_after_the_forward_whose_buckets_might_be_skipped(trial: Trial) -> None:
    looked_for(trial, skip_all_reduce_unused_params=True)


def looked_for(trial: Trial, inside_for: int = 0, **given: Any) -> None:
    module = same_start(Headless)
    with Course(trial, module) as course:
        model = trial.wrap(module, find_unused_parameters=True, bucket_cap_mb=0.0002, **given)
        for step in range(STEPS):
            course.point = f"step {step}"
            module.inside = step < inside_for
            model.zero_grad()
            square(applied(model, module, trial.data(4, 6, step=step))).backward()

        def alone(m: Any, rank: int) -> None:
            square(applied(m, m, trial.data(4, 6, step=STEPS - 1, rank=rank))).backward()

        course.ends(module, alone)


class Replayed(torch.autograd.Function):
    """As torch.cuda.make_graphed_callables makes it: a backward that returns gradients and runs no hooks."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.module, ctx.x = module, x
        ctx.save_for_backward(*parameters)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        names = [name for name, _ in ctx.module.named_parameters()]
        copies = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = torch.func.functional_call(ctx.module, dict(zip(names, copies, strict=True)), (ctx.x,))
        return None, None, *torch.autograd.grad(out, copies, gradient)


@same("silently wrong")
def a_wrapper_whose_forward_is_a_graph(trial: Trial) -> None:
    """The first backward after the capture is averaged: its forward was the last one of the capture."""
    module = same_start(lambda: nn.Linear(4, 4))
    with Course(trial, module) as course:
        model = trial.wrap(module)
        parameters = list(module.parameters())
        for step in range(3):
            model.zero_grad()
            square(model(trial.data(3, 4, step=step))).backward()
        model.zero_grad()
        torch.autograd.grad(square(model(trial.data(3, 4))), parameters)  # the capture
        model.forward = lambda x: Replayed.apply(module, x, *parameters)
        for number in ("first", "second"):
            course.point = f"the {number} backward"
            model.zero_grad()
            square(model(trial.data(3, 4, step=9))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 4, step=9, rank=rank))).backward())
