"""The accelerator of this process, of whatever kind: `torch.accelerator`, and what that does not offer."""

from __future__ import annotations

from typing import Any

import torch


def current() -> torch.device | None:
    """The type of the accelerator, without an index; None if there is none that can be used."""
    return torch.accelerator.current_accelerator(check_available=True)


def rng_state() -> dict[str, torch.Tensor]:
    """The state of its random number generator, under the name of its type; empty without an accelerator."""
    device, module = _with_generator()
    return {} if module is None else {device: module.get_rng_state()}


def set_rng_state(states: dict[str, Any]) -> None:
    """Set a state that `rng_state` has returned. The state of another type of accelerator is left alone."""
    device, module = _with_generator()
    if module is not None and device in states:
        module.set_rng_state(states[device])


def seed(number: int) -> None:
    """Seed its random number generator, if there is one."""
    _device, module = _with_generator()
    if module is not None and hasattr(module, "manual_seed"):
        module.manual_seed(number)


def _with_generator() -> tuple[str, Any]:
    device = current()
    if device is None:
        return "", None
    module = torch.get_device_module(device)
    return device.type, module if hasattr(module, "get_rng_state") else None
