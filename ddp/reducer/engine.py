"""Two queries to torch's autograd engine: which backward is running, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable


def current_task() -> int:
    """Return the number of the backward that runs in this thread. A nested backward has its own number."""
    return torch._C._current_graph_task_id()


def when_it_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward ends without an error. `backward()` raises what `callback` raises."""
    Variable._execution_engine.queue_callback(callback)
