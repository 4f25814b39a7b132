"""Whether the current stream records a graph, such as a CUDA graph, instead of running its work.

During a capture, work has no result yet. The device refuses to be asked whether something is done, and to be waited
for: either question breaks the capture. So our code does not ask, and refuses with a message what would need an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def is_capturing() -> bool:
    """Whether the current stream of this thread records a graph. Does not import torch or initialize a device."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    has_device, ask = _questions(accelerator.type)
    return has_device() and ask()


@cache
def _questions(device_type: str) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Return the functions of torch.cuda, torch.xpu or another device's module: is it in use, and does it capture?

    A build for a device is also used where there is none. There, the second question is an error of the driver.
    """
    import torch

    module = torch.get_device_module(device_type)
    ask = getattr(module, "is_current_stream_capturing", None)
    return (getattr(module, "is_initialized", _yes), ask) if ask is not None else (_no, _no)


def _yes() -> bool:
    return True


def _no() -> bool:
    return False
