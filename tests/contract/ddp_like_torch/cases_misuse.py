"""Mistakes: the same type of error at the same point as torch's, and a message that names the parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from models import Mlp, SometimesUnused, Tied, square
from register import case
from torch import nn

if TYPE_CHECKING:
    from trial import Trial


@case(
    2,
    3,
    plain=({},),
    view=({"gradient_as_bucket_view": True},),
    tiny=({"bucket_cap_mb": 0.0002},),
    says={"second forward": [r"layers\.1\.weight", r"layers\.3\.bias", "find_unused_parameters", r"rank"]},
)
def unused_without_the_flag(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap_strictly(SometimesUnused(), **given)
    trial.attempt("first step", lambda: square(model(trial.data(3, 6), used=(0, 2))).backward())
    trial.attempt("second forward", lambda: model(trial.data(3, 6, step=1), used=(0, 2)))


@case(says={"second forward": [r"\bb\.weight", "rank"]})
def an_output_left_out_without_the_flag(trial: Trial) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x), self.b(x)

    model = trial.wrap_strictly(Two())
    trial.attempt("first step", lambda: square(model(trial.data(3, 4))[0]).backward())
    trial.attempt("second forward", lambda: model(trial.data(3, 4)))


@case()
def nothing_used_at_all(trial: Trial) -> None:
    """An output that does not depend on any parameter."""

    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = trial.wrap(Past())
    trial.attempt("backward", lambda: square(model(trial.data(3, 4))).backward())


@case(never=("never",), forward_twice=("twice",))
def a_backward_that_never_ran(trial: Trial, how: str) -> None:
    """Forward only, again and again: nothing is waiting, so nothing is wrong."""
    model = trial.wrap(Mlp())
    for step in range(3):
        trial.attempt(f"forward {step}", lambda step=step: model(trial.data(4, 8, step=step)))
    if how == "twice":
        trial.attempt("backward", lambda: square(model(trial.data(4, 8))).backward())
        trial.attempt("forward", lambda: model(trial.data(4, 8)))


@case(plain=({},), find=({"find_unused_parameters": True},))
def a_late_static_graph(trial: Trial, given: dict[str, Any]) -> None:
    model = trial.wrap(Mlp(), **given)
    square(model(trial.data(4, 8))).backward()
    trial.attempt("making it static", model._set_static_graph)


@case()
def a_static_graph_that_changes(trial: Trial) -> None:
    model = trial.wrap(SometimesUnused(depth=3), static_graph=True)
    trial.attempt("first step", lambda: square(model(trial.data(3, 6), used=(0, 1))).backward())
    trial.attempt("second step", lambda: square(model(trial.data(3, 6), used=(0, 2))).backward())


@case()
def an_error_in_forward(trial: Trial) -> None:
    """It comes through as it is, and the next step is an ordinary one."""
    model = trial.wrap(Mlp())
    square(model(trial.data(4, 8))).backward()
    trial.attempt("forward", lambda: model(trial.data(4, 9)))
    model.zero_grad()
    trial.attempt("next", lambda: square(model(trial.data(4, 8))).backward())
    for name, parameter in model.named_parameters():
        trial.note(name, parameter.grad, alike=True)


@case()
def an_error_in_forward_under_no_sync(trial: Trial) -> None:
    """The flag is put back when the block is left by an exception."""
    model = trial.wrap(Mlp())
    try:
        with model.no_sync():
            model(trial.data(4, 9))
    except RuntimeError as error:
        trial.note("raised", trial.caught_as(error))
    trial.note("flag", model.require_backward_grad_sync)
    square(model(trial.data(4, 8))).backward()
    for name, parameter in model.named_parameters():
        trial.note(name, parameter.grad, alike=True)


@case()
def no_sync_within_no_sync(trial: Trial) -> None:
    model = trial.wrap(Mlp())
    with model.no_sync():
        with model.no_sync():
            trial.note("inner", model.require_backward_grad_sync)
        trial.note("outer", model.require_backward_grad_sync)
        square(model(trial.data(4, 8))).backward()
    trial.note("after", model.require_backward_grad_sync)
    for name, parameter in model.named_parameters():
        trial.note(name, parameter.grad)


@case()
def warned_when_nothing_is_unused(trial: Trial) -> None:
    model = trial.wrap(Tied(), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        trial.attempt("step", lambda: square(model(torch.arange(6) % 7)).backward())


@case()
def unknown_attribute(trial: Trial) -> None:
    model = trial.wrap(Mlp())
    trial.attempt("reading", lambda: model.no_such_thing)
    trial.attempt("of the module", lambda: model.layers)


@case()
def called_with_too_much(trial: Trial) -> None:
    model = trial.wrap(Mlp())
    trial.attempt("calling", lambda: model(trial.data(4, 8), 1, 2))
    trial.attempt("by name", lambda: model(trial.data(4, 8), none=2))
