"""Adds up the time of all ranks of a job, and divides the time of their collectives. Pure.

A rank cannot tell waiting for slower ranks from communicating: both happen inside of a collective. The job can: in any
span of time, the rank that spends the smallest share of it in collectives waits for no rank, or for less than any other
rank. This share is communication, and what the others spend beyond it is waiting for others. Nodes report at different
times, so the smallest share is taken from the latest report of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.rank_time import JobTime, NodeTime, RankTime, TimeSpent, TimeState, sum_of
from rendezvous.values.rank_view import Repeat

_SHORTEST_S = 1e-3  # a report so soon after the one before says nothing about shares


def reported(state: TimeState, node: str, incarnation: str, ranks: tuple[RankTime, ...]) -> TimeState:
    before, gone = state.nodes.get(node), state.gone
    if before is not None and (before.incarnation, len(before.ranks)) != (incarnation, len(ranks)):
        spent = (rank.spent for rank in before.divided())
        hidden = gone.hidden + sum(rank.hidden for rank in before.ranks)
        gone = JobTime(gone.ranks, sum_of([gone.spent, *spent]), hidden)
        before = None
    report = _divided(before, NodeTime(incarnation, ranks), state.nodes, node)
    return replace(state, nodes=state.nodes.plus(node, report), gone=gone)


def _divided(before: NodeTime | None, now: NodeTime, nodes: FrozenMap[str, NodeTime], node: str) -> NodeTime:
    shares, parts = [], []
    for i, rank in enumerate(now.ranks):
        earlier = before.ranks[i].spent if before is not None else TimeSpent()
        passed = rank.spent.total - earlier.total
        spent = max(0.0, rank.spent.communication - earlier.communication)
        parts.append((passed, spent))
        if passed >= _SHORTEST_S:
            shares.append(spent / passed)
    share = min(shares, default=before.share if before is not None else None)
    others = (each.share for name, each in nodes.items() if name != node)
    least = min((each for each in (share, *others) if each is not None), default=0.0)
    waited = []
    for i, (passed, spent) in enumerate(parts):
        so_far = before.waited[i] if before is not None else 0.0
        waits = so_far + max(0.0, spent - least * passed)
        waited.append(min(waits, now.ranks[i].spent.communication))
    return replace(now, waited=tuple(waited), share=share)


def ranks_of(state: TimeState, nodes: Iterable[str]) -> tuple[RankTime, ...]:
    """The time of the ranks on these nodes, in order."""
    found = (state.nodes[node].divided() for node in nodes if node in state.nodes)
    return tuple(sorted((rank for ranks in found for rank in ranks), key=lambda rank: rank.rank))


def whole(state: TimeState) -> JobTime | None:
    """The time of all ranks together, also of nodes that are lost; None if no rank shows what it does."""
    ranks = [rank for each in state.nodes.values() for rank in each.divided()]
    if not any(rank.has_page for rank in ranks):
        return None
    hidden = state.gone.hidden + sum(rank.hidden for rank in ranks)
    return JobTime(len(ranks), sum_of([state.gone.spent, *(rank.spent for rank in ranks)]), hidden)


def next_repeat(state: TimeState, nodes: Iterable[str]) -> Repeat:
    """What the ranks after a restart do again: the steps since the last checkpoint that any rank has taken."""
    ranks = [rank for node in nodes if node in state.nodes for rank in state.nodes[node].ranks]
    steps = max((rank.steps for rank in ranks), default=0)
    saved = max((rank.saved_steps for rank in ranks), default=0)
    if any(rank.numbers_steps for rank in ranks):
        up_to = max(steps, state.repeat.up_to)
        return Repeat(up_to=up_to if up_to > saved else 0)
    return Repeat(steps=max(0, steps - saved, state.repeat.steps - saved))


def next_generation(state: TimeState, nodes: Iterable[str]) -> TimeState:
    """The ranks of the next generation begin. `nodes`: of the world before."""
    repeat = next_repeat(state, nodes)
    begun = {
        node: replace(each, ranks=tuple(replace(rank, steps=0, saved_steps=0) for rank in each.ranks))
        for node, each in state.nodes.items()
    }
    return replace(state, nodes=FrozenMap(begun.items()), repeat=repeat)
