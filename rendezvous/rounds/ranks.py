"""Members -> World: which node gets which node rank, and where its global and role ranks begin.

A node that stays keeps its node rank. When the world shrinks, only the nodes whose rank no longer exists move to free
ranks. A new node that asks for a free rank with --node-rank gets it. The other new nodes get the remaining ranks in
natural order. This is the order of the scheduler's index, then of the host name. Numbers in host names are compared as
numbers, so node2 comes before node10. Nodes that have reported their place in the network (--topology) stand beside
nodes of the same place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rendezvous.rounds.blocks import grouped, path_of, seated
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.types import Assignment, Placement, World

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rendezvous.rounds.blocks import Path
    from rendezvous.values.types import AgentId, NodeFacts

    Candidate = tuple[AgentId, NodeFacts]
    NaturalKey = tuple[tuple[int, int, str], ...]

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(text: str) -> NaturalKey:
    parts = _DIGITS.split(text)
    # Split with a group: text at even places, digits at odd ones. Digits sort before text.
    return tuple((0, int(p), "") if i % 2 else (1, 0, p) for i, p in enumerate(parts) if p)


def natural_order(candidate: Candidate) -> tuple[object, ...]:
    agent, facts = candidate
    index = facts.scheduler_index
    return (
        index is None,
        index or 0,
        natural_key(facts.host),
        natural_key(agent.node),
        agent.node,
    )


def node_ranks(candidates: Sequence[Candidate], previous: Mapping[str, int]) -> dict[str, int]:
    """Node name -> node rank, 0..n-1. `previous`: the ranks in the previous world."""
    n = len(candidates)
    taken: dict[int, str] = {}
    displaced: list[Candidate] = []
    newcomers: list[Candidate] = []
    for candidate in candidates:
        rank = previous.get(candidate[0].node)
        if rank is None:
            newcomers.append(candidate)
        elif rank < n:
            taken[rank] = candidate[0].node
        else:
            displaced.append(candidate)
    newcomers = _grant_claims(newcomers, taken, n)
    displaced.sort(key=lambda c: previous[c[0].node])
    newcomers.sort(key=natural_order)
    newcomers = sorted(grouped(newcomers, _path), key=_claim)
    queue = [*displaced, *newcomers]
    paths = {candidate[0].node: _path(candidate) for candidate in candidates}
    near = {rank: paths[node] for rank, node in taken.items()}
    free = [rank for rank in range(n) if rank not in taken]
    for rank, index in seated(free, near, [_path(candidate) for candidate in queue]):
        taken[rank] = queue[index][0].node
    return {taken[rank]: rank for rank in range(n)}


def _path(candidate: Candidate) -> Path:
    return path_of(candidate[1].block)


def _claim(candidate: Candidate) -> tuple[bool, int]:
    rank = candidate[1].node_rank
    return (rank is None, rank or 0)


def _grant_claims(newcomers: list[Candidate], taken: dict[int, str], n: int) -> list[Candidate]:
    left: list[Candidate] = []
    for candidate in newcomers:
        rank = candidate[1].node_rank
        if rank is not None and rank < n and rank not in taken:
            taken[rank] = candidate[0].node
        else:
            left.append(candidate)
    return left


def form_world(generation: int, candidates: Sequence[Candidate], previous: Mapping[str, int]) -> World:
    ranks = node_ranks(candidates, previous)
    rank_offset = 0
    role_offsets: dict[str, int] = {}
    placements: list[Placement] = []
    for agent, facts in sorted(candidates, key=lambda c: ranks[c[0].node]):
        role_offset = role_offsets.get(facts.role, 0)
        placements.append(Placement(agent, facts, len(placements), rank_offset, role_offset))
        rank_offset += facts.nproc
        role_offsets[facts.role] = role_offset + facts.nproc
    return World(generation, tuple(placements))


def role_sizes(world: World) -> FrozenMap[str, int]:
    sizes: dict[str, int] = {}
    for p in world.placements:
        sizes[p.facts.role] = sizes.get(p.facts.role, 0) + p.facts.nproc
    return FrozenMap(sizes.items())


def assignment(
    world: World, place: Placement, sizes: FrozenMap[str, int], restart_count: int, max_restarts: int
) -> Assignment:
    """One node's part of the world. `sizes` are its `role_sizes`, computed once per world and not once per node."""
    return Assignment(
        generation=world.generation,
        node_rank=place.node_rank,
        n_nodes=len(world.placements),
        rank_offset=place.rank_offset,
        nproc=place.facts.nproc,
        world_size=sum(sizes.values()),
        role=place.facts.role,
        role_rank_offset=place.role_rank_offset,
        role_world_size=sizes[place.facts.role],
        restart_count=restart_count,
        max_restarts=max_restarts,
        store_host=world.placements[0].facts.address,
        store_node=world.placements[0].agent.node,
    )
