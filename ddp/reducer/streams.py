"""Order a launch after the copies into its bucket if they ran on another stream.

A copy runs on the current stream of the thread that gathers. The thread that launches may be another one, with another
current stream on the bucket's device. A collective waits only for the current stream of the thread that launches it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def note(streams: dict[int, list[torch.Stream]], bucket: int, device: torch.device) -> None:
    """Record the stream on which a chunk of a bucket was gathered."""
    if not has_streams(device.type):
        return
    stream = torch.accelerator.current_stream(device)
    known = streams.setdefault(bucket, [])
    if stream not in known:
        known.append(stream)


def follow(streams: Sequence[torch.Stream], device: torch.device) -> None:
    """Let the current stream of the device wait for these streams. The host does not wait."""
    if not streams:
        return
    current = torch.accelerator.current_stream(device)
    for stream in streams:
        if stream != current:
            current.wait_stream(stream)


@cache
def has_streams(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type
