"""The two things that we ask of torch's autograd engine: in which backward are we, and when does it end?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable


def current_task() -> int:
    """The number of the backward that is running in this thread; a backward inside a backward has its own."""
    return torch._C._current_graph_task_id()


def when_it_ends(callback: Callable[[], None]) -> None:
    """Called at the end of the backward that is running, if it does not raise; may raise, out of `backward()`."""
    Variable._execution_engine.queue_callback(callback)
