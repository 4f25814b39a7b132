"""State recovery: rebuild a job from its agents after the service has lost its state. Pure.

A service with a store in memory knows no jobs after a restart, while ranks still run. So an agent reports at each join
the last generation that it knows, and its place in it while its ranks run. If the job does not know this generation,
the round forms again, and the service stops no agent meanwhile. When all nodes of that world have joined, each with its
old place, the same world is sealed again under the same number. For the agents nothing changes, and their ranks
continue. Any other world gets a number above all known ones, and starts its ranks again. The number of restarts used
and the list of decisions are lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.rounds.ranks import form_world
from rendezvous.values.types import Decision, DecisionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.values.events import AgentJoined
    from rendezvous.values.state import JobState, Member
    from rendezvous.values.types import World


def reminded(state: JobState, event: AgentJoined) -> JobState:
    if event.generation <= max(state.generation, state.forgotten):
        return state
    return replace(state, forgotten=event.generation)


def is_forgotten(state: JobState) -> bool:
    """Whether agents report a generation that this state does not know."""
    return state.forgotten > state.generation


def nodes_remembered(state: JobState) -> int:
    """The number of nodes of the forgotten world; 0 if no member runs in it any more."""
    if not is_forgotten(state):
        return 0
    sizes = (m.ran.n_nodes for m in state.members.values() if m.ran and m.ran.generation == state.forgotten)
    return max(sizes, default=0)


def next_generation(state: JobState) -> int:
    return max(state.generation, state.forgotten) + 1


def same_world_again(state: JobState, chosen: Sequence[Member]) -> World | None:
    """The forgotten world, if these nodes form exactly that world, each in its old place."""
    if not is_forgotten(state):
        return None
    held = {m.agent.node: m.ran.node_rank for m in chosen if m.ran and m.ran.generation == state.forgotten}
    if len(held) < len(chosen) or sorted(held.values()) != list(range(len(chosen))):
        return None
    world = form_world(state.forgotten, [(m.agent, m.facts) for m in chosen], held)
    return world if all(_had_this_place(world, m) for m in chosen) else None


def _had_this_place(world: World, member: Member) -> bool:
    assert member.ran is not None
    ran, place = member.ran, world.placements[member.ran.node_rank]
    size = sum(p.facts.nproc for p in world.placements)
    then = (ran.n_nodes, ran.rank_offset, ran.nproc, ran.world_size)
    return then == (len(world.placements), place.rank_offset, place.facts.nproc, size)


def remark(state: JobState, *, again: bool) -> tuple[Decision, ...]:
    """The decision that records the recovery. People read it later."""
    if not is_forgotten(state):
        return ()
    lost = f"the rendezvous had lost the job's state (generation {state.forgotten})"
    if again:
        words = f"{lost}; its nodes are all here, and their ranks go on"
        return (Decision(DecisionKind.IGNORE, words, state.forgotten),)
    return (Decision(DecisionKind.RESTART, f"{lost}; starting afresh", state.forgotten),)
