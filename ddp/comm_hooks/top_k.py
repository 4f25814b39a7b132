"""Send only the largest elements of a gradient; the others accumulate until they are large enough.

Each rank sends the indices and values of its own largest elements to all ranks. If the share is small, this sends less
than an all-reduce: each selected element takes 8 bytes (float32) from each rank to each other rank.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from ddp.comm_hooks.plain import checked_buffer
from ddp.comm_hooks.resumable import Resumable
from ddp.comm_hooks.staged import Stages
from ddp.groups.single_tensor import all_gather
from ddp.telemetry.coded import WrongValue


class TopK(Resumable):
    """State of `top_k`. `share`: the share of a bucket's elements to send. Without error feedback the rest is lost."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        share: float = 0.01,
        *,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group)
        if not 0 < share <= 1:
            raise WrongValue(
                f"invalid share={share}. Use a fraction of the elements that is greater than 0 and at most 1"
            )
        self.share = share
        self.error_feedback = error_feedback


def top_k(state: TopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.run(bucket, _stages(state, checked_buffer(bucket, "top_k"), bucket.parameters()))


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
        gradient.index_fill_(0, places, 0)
        state.errors.keep(gradient, parameters)
    average = buffer[:numel].zero_()
    # Rank by rank, so that all ranks add in the same order. An index occurs only once in the message of a rank.
    for some, there in zip(all_values.chunk(size), all_places.chunk(size), strict=True):
        average.index_add_(0, there.long(), some)
    average.div_(size)
    return buffer
