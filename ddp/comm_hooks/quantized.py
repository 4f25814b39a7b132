"""Gradients as eight-bit numbers with a common scale, both ways.

Each rank averages one slice: it is sent that slice by all ranks, adds it up at full precision, quantizes the average,
and sends it to all. So every element travels as one byte twice, however many ranks there are, and all ranks end up
with the same bits.

The scale is of a whole message, or, finer, of each chunk of a given number of elements. With error feedback a rank
remembers what its message lost, and for its own slice also what the average lost, which only it knows.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ddp.comm_hooks.plain import accepted
from ddp.comm_hooks.resumable import Resumable
from ddp.comm_hooks.staged import Stages
from ddp.groups.single_tensor import all_gather

_LARGEST = 127.0
_SCALE_BYTES = 4


class Quantized(Resumable):
    """`chunk`: how many elements have a scale in common; None: all of a bucket."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        chunk: int | None = None,
        *,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(process_group)
        if chunk is not None and chunk < 8:
            raise ValueError(f"chunk={chunk}: a scale takes four bytes; give it eight elements at least")
        self.chunk = chunk
        self.error_feedback = error_feedback


def quantized(state: Quantized, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.run(bucket, _stages(state, accepted(bucket, "quantized"), bucket.parameters()))


def _stages(state: Quantized, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> Stages:
    group, numel = state.group, sum(parameter.numel() for parameter in parameters)
    size, me = group.size(), group.rank()
    chunks, chunk = _cut(numel, size, state.chunk)
    padded = buffer.new_zeros(size * chunks * chunk, dtype=torch.float32)
    gradient = padded[:numel].copy_(buffer[:numel])
    if state.error_feedback:
        state.errors.add_to(gradient, parameters)
    slices = padded.view(size, chunks, chunk)

    sent = _packed(slices, whole=state.chunk is None)
    got = torch.empty_like(sent)
    yield [dist.all_to_all_single(got, sent, group=group, async_op=True)]

    average = _unpacked(got, chunks, chunk).mean(0, keepdim=True)
    mine = _packed(average, whole=state.chunk is None)
    everything = mine.new_empty(size * mine.numel())
    yield [all_gather(everything, mine.view(-1), group)]

    if state.error_feedback:
        slices.sub_(_unpacked(sent, chunks, chunk))
        # The others lost this too: of their part in the average, all of it is ours to make good.
        slices[me].add_((average - _unpacked(mine, chunks, chunk))[0], alpha=size)
        state.errors.keep(gradient.clone(), parameters)
    averages = _unpacked(everything.view(size, -1), chunks, chunk)
    buffer[:numel].copy_(averages.view(-1)[:numel])
    return buffer


def _cut(numel: int, size: int, chunk: int | None) -> tuple[int, int]:
    """How many chunks a rank's slice has, and how many elements a chunk; both the same for all ranks."""
    each = -(-numel // size)
    if chunk is None or chunk > each:
        chunk = max(1, each)
    chunk = -(-chunk // _SCALE_BYTES) * _SCALE_BYTES
    return max(1, -(-each // chunk)), chunk


def _packed(values: torch.Tensor, whole: bool) -> torch.Tensor:
    """(messages, chunks, elements) -> one row of bytes for each message: its scales, then its elements."""
    largest = values.abs().amax(-1, keepdim=True)
    if whole:
        largest = largest.amax().expand_as(largest)
    scale = (largest / _LARGEST).contiguous()
    # A scale that is not finite makes all that it stands for so, as it should: an overflow must be seen.
    levels = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(1.0).round()
    levels = levels.clamp(-_LARGEST, _LARGEST).to(torch.int8)
    rows = values.shape[0]
    return torch.cat([scale.view(rows, -1).view(torch.uint8), levels.view(rows, -1).view(torch.uint8)], dim=1)


def _unpacked(rows: torch.Tensor, chunks: int, chunk: int) -> torch.Tensor:
    scales = rows[:, : chunks * _SCALE_BYTES].contiguous().view(torch.float32)
    levels = rows[:, chunks * _SCALE_BYTES :].contiguous().view(torch.int8)
    return levels.view(-1, chunks, chunk) * scales.view(-1, chunks, 1)
