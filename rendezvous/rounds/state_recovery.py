"""State recovery: rebuild a job from its agents after the service has lost its state. Pure.

A service that keeps its state in memory has lost all jobs after a restart, but their ranks may still run. So at each
join an agent reports the last generation that it knows. If its ranks still run, it also reports its assignment in that
generation. If the service does not know the generation, it collects the nodes again, and does not stop any agent during
that time. When all nodes of that world have joined, each with its old place, the service seals the same world again
under the same number. For the agents nothing changes, and their ranks continue. Any other world gets a number above all
known ones, and its ranks are restarted. The assignments also say how many restarts and heals the job has used. The
list of decisions is lost.
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


def remember_generation(state: JobState, event: AgentJoined) -> JobState:
    if event.generation <= max(state.generation, state.forgotten):
        return state
    return replace(state, forgotten=event.generation)


def is_forgotten(state: JobState) -> bool:
    """Whether agents report a generation that this state does not know."""
    return state.forgotten > state.generation


def forgotten_size(state: JobState) -> int:
    """The number of nodes of the forgotten world; 0 if no member still has ranks of that world."""
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


def with_used_restarts(state: JobState, chosen: Sequence[Member]) -> JobState:
    """The restarts and heals that these nodes know of, if the service does not."""
    for ran in (member.ran for member in chosen if member.ran is not None):
        restarts, heals = ran.restart_count - ran.heals, ran.heals
        state = replace(
            state,
            restarts_used=max(state.restarts_used, restarts),
            heals_used=max(state.heals_used, heals),
        )
    return state


def recovered_decision(state: JobState, *, again: bool) -> tuple[Decision, ...]:
    """The decision that records the recovery, for users."""
    if not is_forgotten(state):
        return ()
    generation = f"generation {state.forgotten}; `ddp-rendezvous --store` keeps it"
    lost = f"the rendezvous service had lost the state of the job ({generation})"
    if again:
        words = f"{lost}; all nodes have joined again, and their ranks continue"
        return (Decision(DecisionKind.IGNORE, words, state.forgotten),)
    return (Decision(DecisionKind.RESTART, f"{lost}; restarting the ranks", state.forgotten),)
