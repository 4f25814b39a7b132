"""When the running backward of torch's autograd engine ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp.telemetry import torch_api, torch_names

if TYPE_CHECKING:
    from collections.abc import Callable


_engine = torch_api.get(torch_names.ENGINE)


def when_it_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward ends without an error. `backward()` raises what `callback` raises."""
    _engine.queue_callback(callback)
