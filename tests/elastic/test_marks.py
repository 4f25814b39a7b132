"""A mark of a commit() call: what the objects do not hold any more in the next step comes back."""

from __future__ import annotations

import random

import torch
from torch import nn

from ddp.elastic.live import Live, drop_gradients


def training() -> tuple[dict[str, object], dict[str, object]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, {"step": 0, "seen": [1]}


def forward(objects: dict[str, object]) -> torch.Tensor:
    return objects["model"](torch.ones(3, 4) + torch.rand(3, 4)).sum()  # type: ignore[operator]


def test_a_step_that_was_interrupted_before_the_optimizer_is_repeated_to_the_last_bit() -> None:
    objects, fields = training()
    objects["optimizer"].step()  # type: ignore[attr-defined]
    live = Live(objects, fields)
    live.mark(5)
    first = forward(objects)
    first.backward()
    drawn = random.random()
    fields["seen"].append(2)  # type: ignore[attr-defined]
    fields["step"] = 1
    objects["scheduler"].step()  # type: ignore[attr-defined]
    assert live.number == 5
    live.restore()
    drop_gradients(objects)
    assert fields == {"step": 0, "seen": [1]}
    assert objects["optimizer"].param_groups[0]["lr"] == 0.1  # type: ignore[attr-defined]
    assert all(each.grad is None for each in objects["model"].parameters())  # type: ignore[attr-defined]
    assert torch.equal(forward(objects), first)
    assert random.random() == drawn


def test_after_a_step_of_the_optimizer_the_mark_is_no_state_any_more() -> None:
    objects, fields = training()
    live = Live(objects, fields)
    assert live.number is None
    live.mark(5)
    objects["optimizer"].step()  # type: ignore[attr-defined]
    assert live.number is None
    live.mark(6)
    assert live.number == 6
    live.end()
    live.mark(7)
    objects["optimizer"].step()  # type: ignore[attr-defined]
    assert live.number == 7, "it still watches"
