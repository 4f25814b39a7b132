"""GossipGraD (Daily and others 2018): in each step a rank averages its gradients with one partner only.

The cost of a step does not grow with the number of ranks. A gradient reaches all ranks after about log2(ranks) steps.
After each such cycle of log2(ranks) steps, all ranks shuffle the order of the ranks in the same way. The replicas are
no longer identical, only similar. So average the parameters every few steps (`ddp.averaging`), and before you save
them.
"""

import random
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from ddp.comm_hooks.plain import NUMBERS, checked_buffer
from ddp.comm_hooks.resumable import Resumable
from ddp.comm_hooks.staged import Stages
from ddp.telemetry.coded import WrongValue


class Topology(Enum):
    DISSEMINATION = (
        "dissemination"  # distances 1, 2, 4, ... in turn: a rank sends to one rank and receives from another
    )
    CUBE = "cube"  # pairs of ranks exchange gradients; needs a power of two of ranks


class Gossip(Resumable):
    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        topology: str | Topology = Topology.DISSEMINATION,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        self.topology = Topology(topology)
        self.seed = seed

    def partners(self) -> tuple[int, int]:
        """The rank to send to and the rank to receive from in this step, numbered within the group."""
        return partners(self.topology, self.group.size(), self.group.rank(), self.step, self.seed)


def partners(topology: Topology, size: int, rank: int, step: int, seed: int) -> tuple[int, int]:
    if topology is Topology.CUBE and size & (size - 1):
        raise WrongValue(f"invalid topology 'cube': {size} ranks are not a power of two. Use 'dissemination'")
    stages = max(1, (size - 1).bit_length())
    round_, stage = divmod(step, stages)
    order = list(range(size))
    random.Random(seed * 1_000_003 + round_).shuffle(order)
    place, distance = order.index(rank), 1 << stage
    if topology is Topology.CUBE and size > 1:
        return order[place ^ distance], order[place ^ distance]
    return order[(place + distance) % size], order[(place - distance) % size]


def gossip_grad(state: Gossip, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.run(bucket, _stages(state, checked_buffer(bucket, "gossip_grad", NUMBERS), bucket.index()))


def _stages(state: Gossip, buffer: torch.Tensor, index: int) -> Stages:
    to, source = state.partners()
    if to == state.group.rank():
        return buffer
    theirs = torch.empty_like(buffer)
    yield dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, buffer, dist.get_global_rank(state.group, to), state.group, index),
            dist.P2POp(dist.irecv, theirs, dist.get_global_rank(state.group, source), state.group, index),
        ]
    )
    return buffer.add_(theirs).div_(2)
