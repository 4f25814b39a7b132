"""A step of a job: when its buckets are reduced, and how much of that the computation hides.

Collectives run one after another, in the order of the buckets, beside the computation. A collective begins when its
bucket is complete on the slowest rank. What remains when the backward has ended is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from launcher.plan import stragglers
from launcher.plan.buckets import DEFAULT_CAP_MB, buckets_of
from launcher.plan.network import all_reduce, over_nodes, reduce_scatter

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.plan.network import Cluster, Transport
    from launcher.plan.profile import Profile

# The time that each bucket costs the thread that computes gradients: its hook, its copies, its launch.
BUCKET_S = 40e-6


@dataclass(frozen=True)
class StepTime:
    """One micro-batch. Its seconds are `compute_s + waiting_s + exposed_s`."""

    compute_s: float
    waiting_s: float  # for the slowest rank
    exposed_s: float  # communication that nothing hides
    communication_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.waiting_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        return self.compute_s / self.seconds


def ddp(
    profile: Profile, cluster: Cluster, transport: Transport, cap_mb: float = DEFAULT_CAP_MB, cadence: int = 1
) -> StepTime:
    """DDP, which averages every `cadence` micro-batches (`no_sync` before)."""

    def reduce(nbytes: float) -> float:
        return all_reduce(cluster, transport, nbytes)

    exposed, total = _overlapped(profile, cap_mb, reduce)
    return _step(profile, cluster.ranks, exposed, total, cadence)


def hsdp(profile: Profile, cluster: Cluster, transport: Transport) -> StepTime:
    """Parameters are sharded over the ranks of a node, and replicated between nodes.

    Each node gathers its parameters in the forward and again in the backward, and scatters gradients. Nodes reduce
    shards. Together these have the size of the model, so the link carries as much as with hierarchical DDP.
    """
    members = cluster.ranks_per_node

    def reduce(nbytes: float) -> float:
        inside = 2 * reduce_scatter(cluster.inside, members, nbytes)  # gather parameters, scatter gradients
        return inside + over_nodes(cluster, transport, nbytes)

    exposed, total = _overlapped(profile, DEFAULT_CAP_MB, reduce)
    gathered = reduce_scatter(cluster.inside, members, profile.nbytes)
    return _step(profile, cluster.ranks, exposed + max(0.0, gathered - profile.rest_s), total + gathered, 1)


def diloco(profile: Profile, cluster: Cluster, transport: Transport, every: int) -> StepTime:
    """DDP inside each node; the parameters are averaged between nodes every `every` steps, which nothing hides."""
    alone = replace(cluster, nodes=1)
    inside = ddp(profile, alone, transport)
    outer = over_nodes(cluster, transport, profile.nbytes) / every
    waiting = stragglers.slowest(profile.step_samples, cluster.nodes) / sqrt(every)
    return StepTime(
        inside.compute_s, inside.waiting_s + waiting, inside.exposed_s + outer, inside.communication_s + outer
    )


def _overlapped(profile: Profile, cap_mb: float, reduce: Callable[[float], float]) -> tuple[float, float]:
    """Seconds of communication after the backward, and in total."""
    free = total = 0.0
    buckets = buckets_of(profile.gradients, cap_mb)
    for number, bucket in enumerate(buckets):
        seconds = reduce(bucket.nbytes)
        # The hooks of the buckets before delay this one.
        free = max(free, bucket.ready_s + number * BUCKET_S) + seconds
        total += seconds
    return (max(0.0, free - profile.backward_s), total) if total else (0.0, 0.0)


def _step(profile: Profile, ranks: int, exposed: float, total: float, cadence: int) -> StepTime:
    waiting = stragglers.slowest(profile.step_samples, ranks)
    return StepTime(profile.compute_s, waiting / sqrt(cadence), exposed / cadence, total / cadence)
