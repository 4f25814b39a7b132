"""State that is kept when the process of a rank is restarted, and a sampler that resumes within an epoch."""

from __future__ import annotations

from ddp.elastic.files.checkpoint import CheckpointError
from ddp.elastic.files.writer import CommitError
from ddp.elastic.images.image import DamagedImage
from ddp.elastic.images.scratch import ScratchError
from ddp.elastic.logical.logical_world import LogicalWorld
from ddp.elastic.own import PerRank
from ddp.elastic.request import CheckpointRequest, checkpoint_done, checkpoint_request, checkpoint_requested
from ddp.elastic.resume import Resumed
from ddp.elastic.sampler import ElasticSampler
from ddp.elastic.state import State

__all__ = [
    "CheckpointError",
    "CheckpointRequest",
    "CommitError",
    "DamagedImage",
    "ElasticSampler",
    "LogicalWorld",
    "PerRank",
    "Resumed",
    "ScratchError",
    "State",
    "checkpoint_done",
    "checkpoint_request",
    "checkpoint_requested",
]
