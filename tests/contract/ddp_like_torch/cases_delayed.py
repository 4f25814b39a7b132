"""Parameters whose all-reduce is delayed to the gradient of another: torch averages them, or not, without a word."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from cases_better import RIGHT, SILENT, Course, same_start
from models import Mlp, SometimesUnused, square
from register import better
from torch import nn

if TYPE_CHECKING:
    from trial import Trial


def wide() -> nn.Module:
    """All but its first layer takes a while to average."""
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 200_000))


def delaying(trial: Trial, module: nn.Module) -> Any:
    """All but the first layer to the first weight, whose gradient comes last."""
    named = list(module.named_parameters())
    return trial.wrap(module, delay_all_reduce_named_params=named[2:], param_to_hook_all_reduce=named[0][1])


@better(torch=(SILENT, RIGHT), ours=RIGHT)
def delayed_parameters(trial: Trial) -> None:
    """torch does not wait for what was delayed: its backward may end first."""
    module = same_start(wide)
    with Course(trial, module) as course:
        model = delaying(trial, module)
        course.point = "backward"
        for step in range(3):
            model.zero_grad()
            model(trial.data(4, 8, step=step)).pow(2).sum().backward()
        course.ends(module, lambda m, rank: m(trial.data(4, 8, step=2, rank=rank)).pow(2).sum().backward())


@better(torch=SILENT, ours="raised RuntimeError in backward", says={"outcome": [r"\b0\.weight", r"rank \d"]})
def a_delayed_parameter_whose_gradient_comes_last(trial: Trial) -> None:
    """After that of the parameter which its all-reduce was delayed to."""
    module = same_start(Mlp)
    with Course(trial, module) as course:
        named = list(module.named_parameters())
        model = trial.wrap(
            module, delay_all_reduce_named_params=named[:2], param_to_hook_all_reduce=named[-1][1]
        )
        course.point = "backward"
        square(model(trial.data(4, 8))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())


@better(torch=SILENT, ours="raised RuntimeError in backward", says={"outcome": ["zero_grad"]})
def delayed_gradients_let_go_of_between_forward_and_backward(trial: Trial) -> None:
    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = delaying(trial, module)
        loss = square(model(trial.data(4, 8)))
        model.zero_grad()
        course.point = "backward"
        loss.backward()
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())


@better(torch=SILENT, ours="raised RuntimeError in backward", says={"outcome": ["param_to_hook_all_reduce"]})
def delayed_to_a_parameter_that_is_not_used(trial: Trial) -> None:
    module = same_start(SometimesUnused)
    with Course(trial, module) as course:
        named = list(module.named_parameters())
        model = trial.wrap(
            module,
            find_unused_parameters=True,
            delay_all_reduce_named_params=named[4:],
            param_to_hook_all_reduce=named[0][1],
        )
        course.point = "backward"
        square(model(trial.data(3, 6), used=(1, 2, 3))).backward()
        course.ends(module, lambda m, rank: square(m(trial.data(3, 6, rank=rank), used=(1, 2, 3))).backward())


@better(torch=SILENT, ours=RIGHT)
def a_copy_of_a_model_with_delayed_parameters(trial: Trial) -> None:
    """A copy of a parameter has lost the hook that starts their all-reduce."""
    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = copy.deepcopy(delaying(trial, module))
        course.point = "backward"
        square(model(trial.data(4, 8))).backward()
        course.ends(model.module, lambda m, rank: square(m(trial.data(4, 8, rank=rank))).backward())


@better(torch=(), ours="raised RuntimeError in joining", says={"outcome": ["delay_all_reduce_named_params"]})
def delayed_parameters_and_inputs_that_are_not_even(trial: Trial) -> None:
    """Under torch a rank without input meets the delayed all-reduce with another one, and Gloo ends the process."""
    module = same_start(Mlp)
    with Course(trial, module) as course:
        model = delaying(trial, module)
        course.point = "joining"
        with model.join():
            for step in range(1 + trial.rank):
                square(model(trial.data(4, 8, step=step))).backward()
