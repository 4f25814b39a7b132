"""Complete the sums of all processes where the sum of the process group has another order.

It has the form of a communication hook. Each process has one row for each node of its cover: the gradients of a bucket,
in the layout of the bucket. Each process receives its slice of all rows, adds them in the order of the tree, and sends
the total to all. Each element of a row is sent once, and each element of the total is sent once to every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp.comm_hooks.staged import Staged, Stages
from ddp.elastic import logical_ranks
from ddp.groups.single_tensor import all_gather
from ddp.reducer.bucket_sender import gradient_strides

if TYPE_CHECKING:
    from ddp.elastic.logical_sums import LogicalSums
    from ddp.reducer.grad_bucket import GradBucket


class Exchange:
    """The state of the hook: the sums of this process, and where the rows of the others belong."""

    def __init__(self, sums: LogicalSums, group: dist.ProcessGroup, logical_world: int) -> None:
        self.sums = sums
        self.group = group
        self.logical_world = logical_world
        self.covers = logical_ranks.covers(logical_world, group.size())
        self.n_rows = max(map(len, self.covers))
        self.staged = Staged()
        self.index_of = {id(parameter): i for i, parameter in enumerate(sums.parameters)}


def exchange(state: Exchange, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.staged.add(bucket, _stages(state, bucket.buffer(), bucket.parameters()))  # type: ignore[arg-type]


def _stages(state: Exchange, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> Stages:
    group, numel = state.group, buffer.numel()
    size, share = group.size(), -(-numel // group.size())
    sent = buffer.new_zeros(size, state.n_rows, share)
    for number, row in enumerate([*_rows_of_rest(state, buffer, parameters), buffer]):
        padded = row.new_zeros(size * share)
        padded[:numel].copy_(row)
        sent[:, number] = padded.view(size, share)
    received = torch.empty_like(sent)
    yield [dist.all_to_all_single(received, sent, group=group, async_op=True)]

    parts = {
        node: received[process, number]
        for process, nodes in enumerate(state.covers)
        for number, node in enumerate(nodes)
    }
    mine = logical_ranks.total(parts, state.logical_world, torch.add)
    whole = mine.new_empty(size * share)
    yield [all_gather(whole, mine, group)]

    buffer.copy_(whole[:numel])
    return buffer


def _rows_of_rest(
    state: Exchange, buffer: torch.Tensor, parameters: list[torch.Tensor]
) -> list[torch.Tensor]:
    rows = []
    for sums in state.sums.rest():
        row, offset = torch.zeros_like(buffer), 0
        for parameter in parameters:
            gradient = sums[state.index_of[id(parameter)]]
            if gradient is not None:
                place = row.as_strided(parameter.shape, gradient_strides(parameter), offset)
                place.copy_(gradient)
            offset += parameter.numel()
        rows.append(row)
    return rows
