"""What `.grad` is: an object of one's own or a view, the same as before or another, and who may hold on to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import Convolutions, Mlp, observe, square
from register import case

if TYPE_CHECKING:
    from trial import Trial

VIEW = {"gradient_as_bucket_view": True}
PLAIN: dict[str, Any] = {}


def backward(trial: Trial, model: Any, step: int) -> None:
    square(model(trial.data(4, 8, step=step))).backward()


@case(plain=(PLAIN, False), plain_none=(PLAIN, True), view=(VIEW, False), view_none=(VIEW, True))
def identity(trial: Trial, given: dict[str, Any], set_to_none: bool) -> None:
    """Whether the object of the step before is still there, by the flag and the way of zeroing."""
    model = trial.wrap(Mlp(), **given)
    before: dict[str, Any] = {}
    for step in range(4):
        model.zero_grad(set_to_none=set_to_none)
        backward(trial, model, step)
        for name, parameter in model.named_parameters():
            if step > 1:  # in the first step buckets may be laid out anew
                trial.note(f"step {step} {name}: same object", parameter.grad is before[name])
            before[name] = parameter.grad


@case(plain_none=(PLAIN, True), plain_keep=(PLAIN, False))
def an_old_gradient_is_the_holders_own(trial: Trial, given: dict[str, Any], set_to_none: bool) -> None:
    """Without views, what somebody took from `.grad` is not written to by later steps, if it was let go of."""
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        backward(trial, model, step)
    held = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in held]
    model.zero_grad(set_to_none=set_to_none)
    backward(trial, model, 7)
    trial.note("held kept", [torch.equal(a, b) for a, b in zip(held, values, strict=True)])
    observe(trial, "after", model)


@case(plain=(PLAIN,), view=(VIEW,))
def gradients_share_no_memory_with_each_other(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad(set_to_none=step == 1)
        backward(trial, model, step)
        for parameter in model.parameters():
            others = [p.grad.clone() for p in model.parameters() if p is not parameter]
            parameter.grad.mul_(3)
            now = [p.grad for p in model.parameters() if p is not parameter]
            trial.note("others kept", [torch.equal(a, b) for a, b in zip(others, now, strict=True)])
        observe(trial, f"step {step}", model)


@case(plain=(PLAIN,), view=(VIEW,))
def a_view_cannot_be_detached(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        backward(trial, model, step)
    trial.attempt("detach_", lambda: next(model.parameters()).grad.detach_())


@case(plain=(PLAIN,), view=(VIEW,))
def replaced_by_hand(trial: Trial, given: dict[str, Any]) -> None:
    """Somebody puts gradients of their own there, between steps; they are added to, and averaged."""
    model = trial.wrap(Mlp(), **given)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + trial.rank + step)
        backward(trial, model, step)
        observe(trial, f"step {step}", model)


@case(plain=(PLAIN,), view=(VIEW,))
def scaled_in_place_between(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(4):
        backward(trial, model, step)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5 + trial.rank)
        observe(trial, f"step {step}", model, alike=False)


@case(plain=(PLAIN,), view=(VIEW,))
def moved_by_an_optimizer_that_sets_data(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(3):
        model.zero_grad()
        backward(trial, model, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data - 0.1 * parameter.grad
        observe(trial, f"step {step}", model)


@case(plain=(PLAIN,), view=(VIEW,))
def strides_follow_the_parameter(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Convolutions().to(memory_format=torch.channels_last), **given)
    for step in range(3):
        model.zero_grad()
        square(model(trial.data(2, 3, 8, 8, step=step))).backward()
        for name, parameter in model.named_parameters():
            trial.note(f"{name} like its parameter", parameter.grad.stride() == parameter.stride())


@case(plain=(PLAIN,), view=(VIEW,), find=({"find_unused_parameters": True},))
def form_of_a_gradient(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    for step in range(2):
        model.zero_grad()
        backward(trial, model, step)
        grads = [p.grad for p in model.parameters()]
        trial.note("leaf", [g.is_leaf for g in grads])
        trial.note("requires_grad", [g.requires_grad for g in grads])
        trial.note("grad_fn", [g.grad_fn is None for g in grads])
        trial.note("dtype", [str(g.dtype) for g in grads])


@case(plain=(PLAIN, "tensor"), view=(VIEW, "tensor"), post=(PLAIN, "post"), post_view=(VIEW, "post"))
def hooks_on_parameters(trial: Trial, given: dict[str, Any], kind: str) -> None:
    """A tensor hook changes this rank's part before it is averaged; a post-accumulate hook sees it arrive."""
    module = Mlp(depth=2)
    calls: list[str] = []
    for name, parameter in module.named_parameters():
        if kind == "tensor":
            parameter.register_hook(lambda grad, name=name: calls.append(name) or grad * (2 + trial.rank))
        else:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    model = trial.wrap(module, **given)
    for step in range(3):
        model.zero_grad()
        backward(trial, model, step)
        trial.note("calls", sorted(calls))
        observe(trial, f"step {step}", model)


@case(plain=(PLAIN,), view=(VIEW,))
def hooks_on_parameters_set_later(trial: Trial, given: dict[str, Any]) -> None:
    module = Mlp(depth=2)
    model = trial.wrap(module, **given)
    handles = []
    for step in range(4):
        if step == 1:
            handles = [p.register_hook(lambda grad: grad * 3) for p in module.parameters()]
        if step == 3:
            for handle in handles:
                handle.remove()
        model.zero_grad()
        backward(trial, model, step)
        observe(trial, f"step {step}", model)


@case(plain=(PLAIN,), view=(VIEW,))
def hooks_on_modules(trial: Trial, given: dict[str, Any]) -> None:
    module = Mlp(depth=2)
    calls: list[str] = []
    module.layers[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    module.layers[0].register_forward_hook(lambda *_: calls.append("post"))
    module.layers[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    model = trial.wrap(module, **given)
    model.register_forward_hook(lambda *_: calls.append("outer"))
    model.register_full_backward_hook(lambda *_: calls.append("outer backward"))
    for step in range(2):
        model.zero_grad()
        backward(trial, model, step)
        trial.note("calls", list(calls))
        observe(trial, f"step {step}", model)


@case(plain=(PLAIN,), view=(VIEW,))
def autograd_grad_goes_past(trial: Trial, given: dict[str, Any]) -> None:
    """torch.autograd.grad accumulates nowhere: its results are the rank's own."""
    model = trial.wrap(Mlp(depth=2), **given)
    loss = square(model(trial.data(4, 8)))
    for name, grad in zip(
        dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        trial.note(name, grad)
    trial.note("nothing accumulated", [p.grad is None for p in model.parameters()])


@case(none=(True,), keep=(False,))
def gradients_zeroed_by_the_module(trial: Trial, set_to_none: bool) -> None:
    model = trial.wrap(Mlp(), **VIEW)
    for step in range(3):
        backward(trial, model, step)
        observe(trial, f"step {step}", model)
        model.module.zero_grad(set_to_none=set_to_none)
        observe(trial, f"step {step}: zeroed", model)
