"""A step of a job: when its buckets are reduced, and how much of that the computation hides.

Collectives run one after another, in the order of the buckets, beside the computation. A collective begins when its
bucket is complete on the slowest rank. What remains when the backward has ended is exposed.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, sqrt
from statistics import NormalDist, median
from typing import Any

# The profile of a step: what the ranks have recorded, as values.

FORMAT = 1


class BadProfile(ValueError):
    """The file is not a profile that this release can read."""


@dataclass(frozen=True)
class Gradient:
    nbytes: int
    ready_s: float  # after the start of the backward


@dataclass(frozen=True)
class Profile:
    """One step of one rank without communication between nodes.

    `gradients` are in the order in which they become ready. `backward_s` ends with the last gradient. `rest_s` is the
    remainder of a step: data, forward, optimizer, and the script's own work.
    """

    gradients: tuple[Gradient, ...]
    backward_s: float
    rest_s: float
    step_samples: tuple[float, ...]  # the computing of single steps, of all ranks
    ranks: int
    device: str
    # Bytes and seconds of all-reduces between the ranks of this machine; empty for one rank.
    inside: tuple[tuple[int, float], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        return self.backward_s + self.rest_s


def merged(records: list[dict[str, Any]]) -> Profile:
    """Merge the records of the ranks. The rank with the median step is the one whose gradients are used."""
    steps = sorted(records, key=lambda record: median(_computing(record)))
    middle = steps[len(steps) // 2]
    gradients = sorted(
        (Gradient(int(nbytes), float(ready)) for nbytes, ready in middle["gradients"]),
        key=lambda gradient: gradient.ready_s,
    )
    backward = max((gradient.ready_s for gradient in gradients), default=0.0)
    samples = tuple(seconds for record in records for seconds in _computing(record))
    return Profile(
        tuple(gradients),
        backward,
        max(0.0, median(_computing(middle)) - backward),
        samples,
        len(records),
        str(middle["device"]),
        tuple((int(nbytes), float(seconds)) for nbytes, seconds in middle.get("inside", ())),
    )


def _computing(record: dict[str, Any]) -> list[float]:
    return [float(seconds) for seconds in record["steps"]]


def to_text(profile: Profile) -> str:
    fields = {
        "format": FORMAT,
        "gradients": [[one.nbytes, one.ready_s] for one in profile.gradients],
        "backward_s": profile.backward_s,
        "rest_s": profile.rest_s,
        "step_samples": list(profile.step_samples),
        "ranks": profile.ranks,
        "device": profile.device,
        "inside": [list(point) for point in profile.inside],
    }
    return json.dumps(fields, indent=1)


def from_text(text: str) -> Profile:
    """Read what `to_text` has written; raise `BadProfile` with the reason."""
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise BadProfile(f"its format is {fields['format']}, and this release reads format {FORMAT}")
        profile = Profile(
            tuple(Gradient(int(nbytes), float(ready)) for nbytes, ready in fields["gradients"]),
            float(fields["backward_s"]),
            float(fields["rest_s"]),
            tuple(map(float, fields["step_samples"])),
            int(fields["ranks"]),
            str(fields["device"]),
            tuple((int(nbytes), float(seconds)) for nbytes, seconds in fields["inside"]),
        )
    except BadProfile:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadProfile(
            f"it is not a profile of `ddp-launch plan` ({type(error).__name__}: {error})"
        ) from None
    if not profile.gradients or not profile.step_samples or profile.compute_s <= 0:
        raise BadProfile("it contains no gradients or no steps")
    return profile


# --- how much longer the slowest of many ranks takes ------------------------------------------------
#
# The steps of one rank vary. All ranks wait for the slowest one, so the mean step of a job is the expected maximum of
# as many samples as there are ranks. Few samples are measured, and jobs have thousands of ranks, so the maximum comes
# from a distribution: normal, with the median and the median deviation of the samples. Both ignore rare outliers of
# the profiled machine. Ranks are assumed to be independent.

_TO_SIGMA = 1.4826  # of the median absolute deviation, for a normal distribution


def deviation(samples: Sequence[float]) -> float:
    middle = median(samples)
    return _TO_SIGMA * median(abs(sample - middle) for sample in samples)


def slowest(samples: Sequence[float], ranks: int) -> float:
    """How much longer than the median the slowest of `ranks` ranks takes, on average, in seconds."""
    if ranks == 1:
        return 0.0
    # The expected maximum of n normal values, by Blom's approximation.
    return deviation(samples) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


# --- network ----------------------------------------------------------------------------------------
#
# How long an all-reduce takes: a function of its bytes, the nodes, the ranks of a node, and the links.
#
# A message of n bytes over a link takes `latency + n / bandwidth`. From this follow the known formulas, for P members:
#
# - ring: 2 (P - 1) messages of n/P bytes, one after the other;
# - tree: the data goes up and down a binary tree, in a pipeline: 2 log2(P) latencies, and twice the data;
# - hierarchical: the ranks of a node reduce inside the node, the nodes reduce in a ring or a tree, and the result is
#   copied inside the node. Each node sends one copy of the data, not one per rank.
#
# A flat ring of all ranks crosses each link between nodes once in each direction, because the ranks of a node are
# neighbours in the ring.


@dataclass(frozen=True)
class Link:
    bandwidth: float  # bytes per second, in each direction
    latency_s: float

    def message(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True)
class MeasuredLink(Link):
    """Takes as long as was measured for the nearest sizes. Bandwidth and latency are for larger messages."""

    points: tuple[tuple[float, float], ...]  # bytes of a message, and its seconds, in the order of the bytes

    def message(self, nbytes: float) -> float:
        above = bisect_left(self.points, (nbytes, 0.0))
        if above == 0:
            return self.points[0][1]
        size, seconds = self.points[above - 1]
        if above == len(self.points):
            return seconds + (nbytes - size) / self.bandwidth
        next_size, next_seconds = self.points[above]
        return seconds + (next_seconds - seconds) * (nbytes - size) / (next_size - size)


@dataclass(frozen=True)
class Transport:
    """What a library adds to the links. `checked` says against which runs the constants were checked."""

    name: str
    is_hierarchical: bool
    has_trees: bool
    share: float  # of the link's bandwidth that the data gets
    message_s: float  # per message, besides the link's latency: threads that wake up, kernels that start
    collective_s: float  # per collective: its launch, its copies
    byte_s: float  # per byte of a collective: copies and sums that do not overlap with the network
    error: float | None = None  # the largest error of a step on held-out runs
    checked: str = ""


@dataclass(frozen=True)
class Cluster:
    nodes: int
    ranks_per_node: int
    link: Link  # between nodes
    inside: Link  # between the ranks of a node

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def all_reduce(cluster: Cluster, transport: Transport, nbytes: float) -> float:
    """Seconds for one all-reduce of all ranks."""
    if cluster.ranks == 1:
        return 0.0
    own = transport.collective_s + nbytes * transport.byte_s
    between = _slower(cluster.link, transport)
    if cluster.nodes == 1:
        return own + _ring(cluster.inside, cluster.ranks_per_node, nbytes)
    if transport.is_hierarchical:
        inside = _ring(cluster.inside, cluster.ranks_per_node, nbytes)
        return own + inside + _between_nodes(between, cluster.nodes, nbytes, transport.has_trees)
    return own + _flat_ring(cluster, between, nbytes)


def reduce_scatter(link: Link, members: int, nbytes: float) -> float:
    """Seconds for a reduce-scatter or an all-gather in a ring: half an all-reduce."""
    return _ring(link, members, nbytes) / 2


def over_nodes(cluster: Cluster, transport: Transport, nbytes: float) -> float:
    """Seconds for an all-reduce between nodes only, with the link shared by all ranks of a node."""
    if cluster.nodes == 1:
        return 0.0
    link = _slower(cluster.link, transport)
    own = transport.collective_s + nbytes * transport.byte_s
    return own + _between_nodes(link, cluster.nodes, nbytes, transport.has_trees)


def _slower(link: Link, transport: Transport) -> Link:
    return Link(link.bandwidth * transport.share, link.latency_s + transport.message_s)


def _between_nodes(link: Link, nodes: int, nbytes: float, has_trees: bool) -> float:
    ring = _ring(link, nodes, nbytes)
    return min(ring, _tree(link, nodes, nbytes)) if has_trees else ring


def _ring(link: Link, members: int, nbytes: float) -> float:
    return 2 * (members - 1) * link.message(nbytes / members) if members > 1 else 0.0


def _tree(link: Link, members: int, nbytes: float) -> float:
    return 2 * ceil(log2(members)) * link.latency_s + 2 * nbytes / link.bandwidth


def _flat_ring(cluster: Cluster, link: Link, nbytes: float) -> float:
    """In each of its steps some message crosses each link, so the slower of both kinds of link determines the time."""
    part = nbytes / cluster.ranks
    inside = cluster.inside.message(part) if cluster.ranks_per_node > 1 else 0.0
    return 2 * (cluster.ranks - 1) * max(link.message(part), inside)


# --- transports -------------------------------------------------------------------------------------
#
# The constants of each transport: fitted to runs by `bench/plan.py`, or taken from published figures.

_CHECKED = "2 to 8 ranks on CPUs, over links of 200 and 400 Mbit/s"  # docs/plan.md has the table
GLOO = Transport(
    "gloo",
    is_hierarchical=False,
    has_trees=False,
    share=0.96,
    message_s=17e-5,
    collective_s=1e-4,
    byte_s=0.0,
    error=0.07,
    checked=_CHECKED,
)
HIER = Transport(
    "hier",
    is_hierarchical=True,
    has_trees=False,
    share=0.96,
    message_s=9e-5,
    collective_s=0.0,
    byte_s=0.0,
    error=0.10,
    checked=_CHECKED,
)
# Latencies and shares as NVIDIA publishes them for NCCL with InfiniBand. No run has checked them.
NCCL = Transport(
    "nccl", is_hierarchical=True, has_trees=True, share=0.9, message_s=5e-6, collective_s=2e-5, byte_s=0.0
)
TRANSPORTS = {transport.name: transport for transport in (GLOO, HIER, NCCL)}

# Between the ranks of one machine, if the profile did not measure it.
SHARED_MEMORY = Link(4e9, 10e-6)
NVLINK = Link(2e11, 3e-6)


def usual(device: str) -> Transport:
    return HIER if device == "cpu" else NCCL


def usual_inside(device: str) -> Link:
    return SHARED_MEMORY if device == "cpu" else NVLINK


def measured_link(points: tuple[tuple[int, float], ...], ranks: int) -> MeasuredLink:
    """The link inside a machine from all-reduces of several sizes, as if each had been a ring."""
    messages = 2 * (ranks - 1)
    (_, quickest), (nbytes, seconds) = min(points), max(points)
    bandwidth = messages * nbytes / ranks / max(seconds - quickest, 1e-9)
    taken = tuple((nbytes / ranks, seconds / messages) for nbytes, seconds in sorted(points))
    return MeasuredLink(bandwidth, quickest / messages, taken)


# --- which gradients are reduced together, and when a bucket is complete ----------------------------

MIB = 1024 * 1024
FIRST_BYTES = MIB  # DDP's first bucket is small, so that communication begins early
DEFAULT_CAP_MB = 25.0
CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 400.0)


@dataclass(frozen=True)
class Bucket:
    nbytes: int
    ready_s: float


def buckets_of(gradients: Sequence[Gradient], cap_mb: float = DEFAULT_CAP_MB) -> tuple[Bucket, ...]:
    """DDP's rule: a bucket is closed with the gradient that reaches its limit, in the order of arrival."""
    made: list[Bucket] = []
    limit, nbytes, ready = min(FIRST_BYTES, int(cap_mb * MIB)), 0, 0.0
    for gradient in gradients:
        nbytes, ready = nbytes + gradient.nbytes, max(ready, gradient.ready_s)
        if nbytes >= limit:
            made.append(Bucket(nbytes, ready))
            limit, nbytes = int(cap_mb * MIB), 0
    return (*made, Bucket(nbytes, ready)) if nbytes else tuple(made)


# --- step model -------------------------------------------------------------------------------------

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
    waiting = slowest(profile.step_samples, cluster.nodes) / sqrt(every)
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
    waiting = slowest(profile.step_samples, ranks)
    return StepTime(profile.compute_s, waiting / sqrt(cadence), exposed / cadence, total / cadence)
