"""Send gradients as 8-bit numbers with a common scale, in both directions.

The bucket is divided into one slice per rank, and each rank averages its slice. It receives this slice from all ranks,
averages it in full precision, quantizes the result and sends it to all ranks. So each element is sent twice as one
byte, for any number of ranks. All ranks get the same bits.

There is one scale per message, or, for higher accuracy, one per chunk of `chunk` elements. With error feedback a rank
stores the rounding error of its message. For its own slice it also stores the rounding error of the average, because no
other rank has it.
"""

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from ddp.comm_hooks.plain import checked_buffer
from ddp.comm_hooks.resumable import Resumable
from ddp.comm_hooks.staged import Stages
from ddp.groups.single_tensor import all_gather
from ddp.telemetry.coded import WrongValue

_LARGEST = 127.0
_SCALE_BYTES = 4


class Quantized(Resumable):
    """State of `quantized`. `chunk`: how many elements share a scale; None: one scale per message."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        chunk: int | None = None,
        *,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(process_group)
        if chunk is not None and chunk < 8:
            raise WrongValue(
                f"invalid chunk={chunk}: too small, because each chunk needs a scale of 4 bytes. Use 8 or more"
            )
        self.chunk = chunk
        self.error_feedback = error_feedback


def quantized(state: Quantized, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.run(bucket, _stages(state, checked_buffer(bucket, "quantized"), bucket.parameters()))


def _stages(state: Quantized, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> Stages:
    group, numel = state.group, sum(parameter.numel() for parameter in parameters)
    size, me = group.size(), group.rank()
    chunks, chunk = _cut(numel, size, state.chunk)
    padded = buffer.new_zeros(size * chunks * chunk, dtype=torch.float32)
    gradient = padded[:numel].copy_(buffer[:numel])
    if state.error_feedback:
        state.errors.add_to(gradient, parameters)
    slices = padded.view(size, chunks, chunk)

    sent = _pack(slices, whole=state.chunk is None)
    got = torch.empty_like(sent)
    yield [dist.all_to_all_single(got, sent, group=group, async_op=True)]

    average = _unpack(got, chunks, chunk).mean(0, keepdim=True)
    mine = _pack(average, whole=state.chunk is None)
    everything = mine.new_empty(size * mine.numel())
    yield [all_gather(everything, mine.view(-1), group)]

    if state.error_feedback:
        slices.sub_(_unpack(sent, chunks, chunk))
        # All ranks lose this rounding error of the average, and only we can compensate for it: hence times `size`.
        slices[me].add_((average - _unpack(mine, chunks, chunk))[0], alpha=size)
        state.errors.keep(gradient.clone(), parameters)
    averages = _unpack(everything.view(size, -1), chunks, chunk)
    buffer[:numel].copy_(averages.view(-1)[:numel])
    return buffer


def _cut(numel: int, size: int, chunk: int | None) -> tuple[int, int]:
    """Return the number of chunks in a rank's slice and of elements in a chunk; both are the same on all ranks."""
    each = -(-numel // size)
    if chunk is None or chunk > each:
        chunk = max(1, each)
    chunk = -(-chunk // _SCALE_BYTES) * _SCALE_BYTES
    return max(1, -(-each // chunk)), chunk


def _pack(values: torch.Tensor, whole: bool) -> torch.Tensor:
    """Pack (messages, chunks, elements) into one row of bytes for each message: its scales, then its elements."""
    largest = values.abs().amax(-1, keepdim=True)
    if whole:
        largest = largest.amax().expand_as(largest)
    scale = (largest / _LARGEST).contiguous()
    # A scale of NaN or Inf makes its whole chunk NaN or Inf. That is intended: an overflow must stay visible.
    levels = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(1.0).round()
    levels = levels.clamp(-_LARGEST, _LARGEST).to(torch.int8)
    rows = values.shape[0]
    return torch.cat([scale.view(rows, -1).view(torch.uint8), levels.view(rows, -1).view(torch.uint8)], dim=1)


def _unpack(rows: torch.Tensor, chunks: int, chunk: int) -> torch.Tensor:
    scales = rows[:, : chunks * _SCALE_BYTES].contiguous().view(torch.float32)
    levels = rows[:, chunks * _SCALE_BYTES :].contiguous().view(torch.int8)
    return levels.view(-1, chunks, chunk) * scales.view(-1, chunks, 1)
