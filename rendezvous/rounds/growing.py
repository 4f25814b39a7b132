"""When nodes that stand by enlarge the world, as `--scale-up` has it.

    never          not
    on-restart     with the next restart, whatever it is for (see `sealing.choose`)
    immediate      at once: a last call for more, then everybody stops and the larger world is sealed
    at-checkpoint  every node of the world is asked for a checkpoint; when the last one has taken it, as above

A request for a checkpoint is durable and said again to whoever resumes its session; an answer is not, and a node
that is asked again asks its ranks again. The worst that comes of a lost answer is one checkpoint too many.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.rounds.policy import growth
from rendezvous.rounds.sealing import Result, checkpoint_request, last_call, spec_of, world_of
from rendezvous.rounds.stopping import order_stop
from rendezvous.values.events import Persist, Tell
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.state import JobState, Phase, is_live, world_nodes
from rendezvous.values.types import Decision, DecisionKind, ScaleUp


def consider_growth(state: JobState, now: float) -> Result:
    """A node came to stand by (or was let back in): does the world grow?"""
    if spec_of(state).scale_up is ScaleUp.AT_CHECKPOINT:
        return consider_checkpoint(state)
    more = growth(state)
    if not is_live(state) or spec_of(state).scale_up is not ScaleUp.IMMEDIATE or more <= 0:
        return state, ()
    if more >= state.max_nodes - world_nodes(state):
        return grow(state, now)
    return replace(state, timers=last_call(state.timers, spec_of(state), now)), ()


def grow(state: JobState, now: float) -> Result:
    """Not when a node has finished already: the job is about to end by itself."""
    if len(state.pending) < world_nodes(state):
        return state, ()
    more = "more nodes are here"
    return order_stop(state, Decision(DecisionKind.GROW, f"{more}; growing the world", state.generation), now)


# --- at a checkpoint -----------------------------------------------------------------------------------


def consider_checkpoint(state: JobState) -> Result:
    """Once: those who come while it is awaited are taken along. Ranks that do not run yet cannot be asked."""
    if spec_of(state).scale_up is not ScaleUp.AT_CHECKPOINT or state.phase is not Phase.RUNNING:
        return state, ()
    if len(state.checkpoints_due) or growth(state) <= 0:
        return state, ()
    agents = [place.agent for place in world_of(state).placements]
    state = replace(state, checkpoints_due=FrozenMap((agent.node, True) for agent in agents))
    return state, (Persist(), *(Tell(agent, checkpoint_request(state)) for agent in agents))


def checkpoint_taken(state: JobState, node: str, now: float) -> Result:
    if state.phase is not Phase.RUNNING or node not in state.checkpoints_due:
        return state, ()
    state = replace(state, checkpoints_due=state.checkpoints_due.minus(node))
    if len(state.checkpoints_due):
        return state, ()
    state = replace(state, checkpoints_due=EMPTY)
    return grow(state, now) if growth(state) > 0 else (state, (Persist(),))
