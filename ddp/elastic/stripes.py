"""Which rank keeps what for others: stripes of k data chunks and m parity chunks, each on another node.

A *rail* has one rank of each node: the ranks with local index 0 form a rail, those with local index 1 the next one. On
a node with fewer ranks, one of them is in several rails; there it only keeps parity. In a rail, the nodes are divided
into groups of at least k + m. Each member of a group cuts its image into k chunks. A stripe has m parity chunks, on
the members j, j + 1, ..., and a data chunk of each of the next k members, in a circle. So each member has k chunks in
as many stripes, and parity of m others: memory and work are equal on all nodes.

                 member 0   member 1   member 2   member 3         k = 3, m = 1
    stripe 0     parity     chunk 0    chunk 1    chunk 2
    stripe 1     chunk 2    parity     chunk 0    chunk 1
    ...

The nodes of one failure domain (a host, a rack, a unit of --topology) are dealt to different groups, as far as
possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp.elastic.redundancy import Code

_ALIGN = 64

Domain = tuple[str, ...]  # from the largest unit to the smallest


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    node: str
    domain: Domain = ()


@dataclass(frozen=True, slots=True)
class Stripe:
    number: int
    data: tuple[
        int | None, ...
    ]  # the ranks of the data chunks: chunk i of the image is at place i. None: empty
    parity: tuple[int, ...]  # ranks; the first one computes all parity chunks


def chunk_bytes(n_bytes: int, k: int) -> int:
    """The size of each chunk of an image; the last ones may have less, or nothing."""
    return -(-n_bytes // (k * _ALIGN)) * _ALIGN


def chunk_range(n_bytes: int, k: int, chunk: int) -> tuple[int, int]:
    """Where a chunk begins and ends in an image of this size."""
    size = chunk_bytes(n_bytes, k)
    return min(chunk * size, n_bytes), min((chunk + 1) * size, n_bytes)


def layout(places: Sequence[Place], code: Code) -> tuple[Stripe, ...]:
    """The stripes of a job with at least k + m nodes. `places`: of all ranks."""
    ranks_of: dict[str, list[int]] = {}
    domains: dict[str, Domain] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place.node, []).append(rank)
        domains.setdefault(place.node, place.domain)
    found: list[Stripe] = []
    groups = _groups(domains, code.n_nodes)
    for rail in range(max(map(len, ranks_of.values()))):
        for group in groups:
            members = [_member(ranks_of[node], rail) for node in group]
            if any(has_data for _rank, has_data in members):
                found += _circle(members, code, len(found))
    return tuple(found)


def _member(ranks: list[int], rail: int) -> tuple[int, bool]:
    """The rank of a node in a rail, and whether its image is protected there."""
    return ranks[rail % len(ranks)], rail < len(ranks)


def _groups(domains: dict[str, Domain], least: int) -> list[list[str]]:
    """Deal the nodes to groups. Nodes of one domain are neighbours in the sorted list, so they get different groups."""
    nodes = sorted(domains, key=lambda node: domains[node])
    n_groups = len(nodes) // least
    return [_spread(nodes[number::n_groups], domains) for number in range(n_groups)]


def _spread(nodes: list[str], domains: dict[str, Domain]) -> list[str]:
    """Order the nodes of a group so that those of one domain are far from each other in the circle."""
    met: dict[Domain, int] = {}
    keys = {}
    for position, node in enumerate(nodes):
        turn = met[domains[node]] = met.get(domains[node], -1) + 1
        keys[node] = (turn, position)
    return sorted(nodes, key=keys.__getitem__)


def _circle(members: list[tuple[int, bool]], code: Code, first: int) -> list[Stripe]:
    found: list[Stripe] = []
    size = len(members)
    for j in range(size):
        parity = tuple(members[(j + i) % size][0] for i in range(code.m))
        data = [members[(j + code.m + i) % size] for i in range(code.k)]
        if any(has_data for _rank, has_data in data):
            kept = tuple(rank if has_data else None for rank, has_data in data)
            found.append(Stripe(first + len(found), kept, parity))
    return found


def weak_domains(places: Sequence[Place], stripes: Sequence[Stripe], m: int) -> tuple[Domain, ...]:
    """The largest domains with so many nodes in one stripe that their loss cannot be repaired.

    A domain that all nodes share is left out: nothing else can be done there.
    """
    units = {place.domain[:depth] for place in places for depth in range(1, len(place.domain) + 1)}
    weak: list[Domain] = []
    for unit in sorted(units, key=lambda unit: (len(unit), unit)):
        inside = {rank for rank, place in enumerate(places) if place.domain[: len(unit)] == unit}
        if len(inside) == len(places) or any(unit[: len(known)] == known for known in weak):
            continue
        if len({places[rank].node for rank in inside}) > 1 and any(
            sum(rank in inside for rank in (*stripe.data, *stripe.parity)) > m for stripe in stripes
        ):
            weak.append(unit)
    return tuple(weak)
