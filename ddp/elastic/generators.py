"""The state of torch's random number generators, saved per rank: dropout, for example, continues its sequence."""

from __future__ import annotations

from typing import Any

import torch

from ddp.groups import accelerator


def get() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state()} | accelerator.rng_state()


def set(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    accelerator.set_rng_state(states)
