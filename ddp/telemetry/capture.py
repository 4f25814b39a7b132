"""Whether the current stream records a graph, such as a CUDA graph, instead of running its work.

During a capture, work has no result yet. The device refuses to be asked whether something is done, and to be waited
for: either question breaks the capture. So nothing of ours asks, and what would need an answer is refused in words.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def is_capturing() -> bool:
    """Whether the current stream of this thread records a graph. Does not import torch or initialize a device."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    ask = _question(accelerator.type)
    return ask is not None and ask()


@cache
def _question(device_type: str) -> Callable[[], bool] | None:
    """Return the function of torch.cuda, torch.xpu or another device's module, if it has one."""
    import torch

    ask: Callable[[], bool] | None = getattr(
        torch.get_device_module(device_type), "is_current_stream_capturing", None
    )
    return ask
