"""State that is kept when the process of a rank is restarted, and a sampler that resumes within an epoch.

Most names need torch. In a process that has imported torch, as a script and the zygote have, all are imported at once,
and each fork inherits them. Otherwise they are imported on first use: a tool can read names of commits without torch.
"""

from __future__ import annotations

import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.elastic.files.checkpoint import CheckpointError
    from ddp.elastic.files.writer import CommitError
    from ddp.elastic.images.image import DamagedImage
    from ddp.elastic.images.kept_images import ScratchError
    from ddp.elastic.own import PerRank
    from ddp.elastic.request import (
        CheckpointRequest,
        checkpoint_done,
        checkpoint_request,
        checkpoint_requested,
    )
    from ddp.elastic.resume import Resumed
    from ddp.elastic.sampler import ElasticSampler
    from ddp.elastic.state import State

__all__ = [
    "CheckpointError",
    "CheckpointRequest",
    "CommitError",
    "CommitRejected",
    "DamagedImage",
    "ElasticSampler",
    "PerRank",
    "Resumed",
    "ScratchError",
    "State",
    "checkpoint_done",
    "checkpoint_request",
    "checkpoint_requested",
]

_FROM = {
    "CheckpointError": "files.checkpoint",
    "CheckpointRequest": "request",
    "CommitError": "files.writer",
    "CommitRejected": "rejected",
    "DamagedImage": "images.image",
    "ElasticSampler": "sampler",
    "PerRank": "own",
    "Resumed": "resume",
    "ScratchError": "images.kept_images",
    "State": "state",
    "checkpoint_done": "request",
    "checkpoint_request": "request",
    "checkpoint_requested": "request",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'ddp.elastic' has no attribute {name!r}")
    globals()[name] = found = resolve_name(f"ddp.elastic.{_FROM[name]}:{name}")
    return found


if sys.modules.get("torch") is not None:
    for _name in _FROM:
        __getattr__(_name)
