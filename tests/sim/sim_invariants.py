"""What must hold for every single step of the machine, whatever led there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_heal_invariants import check_paused_ranks, check_stop_in_place
from sim_violation import require

from rendezvous.values.events import (
    AgentHeard,
    AgentStopped,
    CheckpointTaken,
    HealReady,
    JobResized,
    Persist,
    RankFailed,
    RanksFinished,
    Stop,
    StoreOpened,
    Tell,
)
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import DecisionKind, ScaleUp, World

if TYPE_CHECKING:
    from rendezvous.values.events import Effect, Event

_REPORTS = (StoreOpened, RankFailed, RanksFinished, AgentStopped, CheckpointTaken, HealReady)


def check_step(before: JobState, event: Event, after: JobState, effects: tuple[Effect, ...]) -> None:
    persists = [e for e in effects if isinstance(e, Persist)]
    require(
        not persists or (effects[0] == Persist() and len(persists) == 1), "Persist is not first, and once"
    )
    if after is before:
        require(not persists, "a step that changes nothing is written")
        return
    heard_of = max(before.generation, after.forgotten)  # by agents; more than it knows where it was deposed
    require(after.generation in (before.generation, heard_of, heard_of + 1), "generations go up by one")
    _fenced(before, event)
    if isinstance(event, AgentHeard):
        require(not persists, "a heartbeat is written")
    if before.phase is Phase.ENDED:
        require(after.outcome == before.outcome, "the outcome changed")
    if after.world is not before.world and after.world is not None:
        require(bool(persists), "a world is not written")
        _well_formed(after.world, after)
        if before.world is not None:
            _stable(before.world, after.world)
    if after.phase is Phase.STOPPING and before.phase is not Phase.STOPPING:
        _all_told_to_stop(after, effects)
        _grown_at_a_checkpoint(before, event, after)
        check_stop_in_place(before, event, after)
    check_paused_ranks(before, event, after, effects)
    if after.phase is not before.phase and after.phase is not Phase.FORMING:
        require(bool(persists), f"{after.phase} is not written")


def _fenced(before: JobState, event: Event) -> None:
    """A stale report changes nothing; and this one changed something."""
    if not isinstance(event, _REPORTS):
        return
    require(event.generation == before.generation, f"a report of generation {event.generation} counted")
    member = before.members.get(event.agent.node)
    require(
        member is not None and member.agent == event.agent,
        f"a report of another life of {event.agent} counted",
    )


def _well_formed(world: World, state: JobState) -> None:
    n = len(world.placements)
    require(state.min_nodes <= n <= state.max_nodes, f"a world of {n} nodes")
    require(world.generation == state.generation, "the world has another generation")
    require([p.node_rank for p in world.placements] == list(range(n)), "node ranks are not 0..n-1")
    ranks = [r for p in world.placements for r in range(p.rank_offset, p.rank_offset + p.facts.nproc)]
    require(ranks == list(range(world.size)), "ranks are not 0..size-1")
    nodes = [p.agent.node for p in world.placements]
    require(len(set(nodes)) == n, "a node is in the world twice")
    require(not any(node in state.excluded for node in nodes), "an excluded node is in the world")


def _stable(old: World, new: World) -> None:
    held = {p.agent.node: p.node_rank for p in old.placements}
    for p in new.placements:
        rank = held.get(p.agent.node)
        kept = rank is None or rank == p.node_rank or rank >= len(new.placements)
        require(kept, f"{p.agent.node} moved from node rank {rank} to {p.node_rank}")


def _grown_at_a_checkpoint(before: JobState, event: Event, after: JobState) -> None:
    """Of its own accord, and where that was asked for, a world stops to grow with the last node's checkpoint."""
    decision, spec = after.decision, after.spec
    if decision is None or decision.kind is not DecisionKind.GROW or isinstance(event, JobResized):
        return
    if spec is not None and spec.scale_up is ScaleUp.AT_CHECKPOINT:
        due = list(before.checkpoints_due)
        last = isinstance(event, CheckpointTaken) and due == [event.agent.node]
        require(last, f"the world grows before the checkpoints of {due}")


def _all_told_to_stop(state: JobState, effects: tuple[Effect, ...]) -> None:
    told = {e.agent for e in effects if isinstance(e, Tell) and isinstance(e.message, Stop)}
    mine = {m.agent for m in state.members.values() if m.node_rank is not None}
    require(mine <= told, f"not told to stop: {sorted(mine - told)}")
    require(
        state.decision is not None and state.decision.kind is not DecisionKind.IGNORE,
        "a stop needs a decision",
    )
