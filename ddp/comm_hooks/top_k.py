"""Only the largest elements of a gradient travel; the others wait, added up, until they are large enough.

Each rank sends the places and values of its own largest elements to all. That is less than an all-reduce as long as
the share is small: a chosen element takes 8 bytes (float32) from each rank to each rank.
"""

import math

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ddp.comm_hooks.plain import accepted
from ddp.comm_hooks.resumable import Resumable
from ddp.comm_hooks.staged import Stages
from ddp.groups.single_tensor import all_gather


class TopK(Resumable):
    """`share`: of a bucket's elements, how many travel. Without error feedback the others are lost."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        share: float = 0.01,
        *,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group)
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: give a share of the elements, above 0 and at most 1")
        self.share = share
        self.error_feedback = error_feedback


def top_k(state: TopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.run(bucket, _stages(state, accepted(bucket, "top_k"), bucket.parameters()))


def _stages(state: TopK, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> Stages:
    size, numel = state.group.size(), sum(parameter.numel() for parameter in parameters)
    gradient = buffer[:numel].clone()
    if state.error_feedback:
        state.errors.add_to(gradient, parameters)
    count = math.ceil(numel * state.share)
    wide = torch.int32 if numel < 2**31 else torch.int64
    places = gradient.abs().topk(count, sorted=False).indices
    values = gradient[places]

    all_places = torch.empty(size * count, dtype=wide, device=buffer.device)
    all_values = values.new_empty(size * count)
    yield [
        all_gather(all_places, places.to(wide), state.group),
        all_gather(all_values, values, state.group),
    ]

    if state.error_feedback:
        gradient[places] = 0
        state.errors.keep(gradient, parameters)
    average = buffer[:numel].zero_()
    # Rank after rank, so that the sum has one order everywhere; no place occurs twice in one rank's message.
    for some, there in zip(all_values.chunk(size), all_places.chunk(size), strict=True):
        average.index_add_(0, there.long(), some)
    average.div_(size)
    return buffer
