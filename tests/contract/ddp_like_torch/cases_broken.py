"""After a backward that raised: under torch the next forward raises; under ours what would go wrong does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cases_better import RIGHT, Course, same_start
from models import Mlp, square
from register import better
from torch import nn

if TYPE_CHECKING:
    from trial import Trial


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp()

    def forward(self, x: torch.Tensor, breaks: bool) -> torch.Tensor:
        first = self.layers.layers[0](x)
        if breaks:
            first.register_hook(_break)
        return torch.tanh(self.layers.layers[2](self.layers.layers[1](first)))


def _break(_grad: torch.Tensor) -> None:
    raise ValueError("as it was to be")


@better(
    torch="raised RuntimeError in forward",
    ours="raised RuntimeError in backward",
    says={"outcome": ["zero_grad", r"layers\.2\.weight"]},
)
def going_on_from_what_a_broken_backward_has_left(trial: Trial) -> None:
    """What has been sent by then is no longer a gradient of this rank alone, and cannot be added to."""
    module = same_start(Breaking)
    with Course(trial, module) as course:
        model = trial.wrap(module, bucket_cap_mb=0.0002)
        for step in range(3):
            model.zero_grad()
            square(model(trial.data(4, 8, step=step), False)).backward()
        model.zero_grad()
        try:
            square(model(trial.data(4, 8, step=3), True)).backward()
        except ValueError:
            course.point = "forward"
        loss = square(model(trial.data(4, 8, step=4), False))
        course.point = "backward"
        loss.backward()


@better(torch="raised RuntimeError in forward", ours=RIGHT)
def a_broken_backward_and_then_gradients_from_zero(trial: Trial) -> None:
    module = same_start(Breaking)
    with Course(trial, module) as course:
        model = trial.wrap(module, bucket_cap_mb=0.0002)
        for breaks in (False, False, True, False):
            model.zero_grad(set_to_none=trial.rank == 0)
            try:
                course.point = "forward"
                loss = square(model(trial.data(4, 8), breaks))
                course.point = "backward"
                loss.backward()
            except ValueError:
                continue
        course.ends(module, lambda m, rank: square(m(trial.data(4, 8, rank=rank), False)).backward())
