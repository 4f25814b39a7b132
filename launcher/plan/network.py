"""How long an all-reduce takes: a function of its bytes, the nodes, the ranks of a node, and the links.

A message of n bytes over a link takes `latency + n / bandwidth`. From this follow the known formulas, for P members:

- ring: 2 (P - 1) messages of n/P bytes, one after the other;
- tree: the data goes up and down a binary tree, in a pipeline: 2 log2(P) latencies, and twice the data;
- hierarchical: the ranks of a node reduce inside the node, the nodes reduce in a ring or a tree, and the result is
  copied inside the node. Each node sends one copy of the data, not one per rank.

A flat ring of all ranks crosses each link between nodes once in each direction, because the ranks of a node are
neighbours in the ring.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log2


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
