"""When standby nodes enlarge the world, by the policy of `--scale-up`.

    never          the world does not grow
    on-restart     at the next restart, whatever its reason (see `sealing.choose`)
    immediate      at once: wait briefly for more nodes, then stop all ranks and form the larger world
    at-checkpoint  ask every node of the world for a checkpoint; when all have taken it, proceed as for immediate

The service stores a request for a checkpoint, and sends it again to an agent that resumes its session. It does not
store an answer: an agent that gets the request again asks its ranks again. So a lost answer costs at most one
additional checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.rounds.healing import obstacle_to_order
from rendezvous.rounds.policy import growth
from rendezvous.rounds.reading import Result, spec_of, world_of
from rendezvous.rounds.sealing import checkpoint_request, last_call
from rendezvous.rounds.stopping import order_stop
from rendezvous.values.events import Persist, Tell
from rendezvous.values.frozen_map import EMPTY, FrozenMap
from rendezvous.values.state import JobState, Phase, is_live, world_nodes
from rendezvous.values.types import Decision, DecisionKind, ScaleUp


def consider_growth(state: JobState, now: float) -> Result:
    """Decide whether the world grows after a node became a standby, or was admitted again."""
    if spec_of(state).scale_up is ScaleUp.AT_CHECKPOINT:
        return consider_checkpoint(state)
    more = growth(state)
    if not is_live(state) or spec_of(state).scale_up is not ScaleUp.IMMEDIATE or more <= 0:
        return state, ()
    if more >= state.max_nodes - world_nodes(state):
        return grow(state, now)
    return replace(state, timers=last_call(state.timers, spec_of(state), now)), ()


def grow(state: JobState, now: float) -> Result:
    """Order a stop to grow the world, unless all ranks of a node have finished: then the job is about to end."""
    if len(state.pending) < world_nodes(state):
        return state, ()
    in_place = not obstacle_to_order(state)
    how = "the world grows in place" if in_place else "restarting with a larger world"
    reason = f"more nodes have joined; {how}"
    return order_stop(state, Decision(DecisionKind.GROW, reason, state.generation, in_place=in_place), now)


# --- at a checkpoint -----------------------------------------------------------------------------------


def consider_checkpoint(state: JobState) -> Result:
    """Request one checkpoint, from running ranks. Nodes that join before it is complete enter the new world too."""
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
