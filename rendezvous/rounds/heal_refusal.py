"""What agents report about healing in place: nodes whose ranks can be paused, and scripts that cannot be healed. Pure.

It may turn out only when a new rank joins the paused ones that a script cannot be healed in place: the new rank
communicates before `State.run`, and the others do not. Then all ranks restart, which counts as a restart, and the job
is not healed in place again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.rounds import healing
from rendezvous.rounds.policy import plan_restart, restarts_spent
from rendezvous.rounds.reading import Result, spec_of
from rendezvous.rounds.stopping import order_stop
from rendezvous.values.events import Persist
from rendezvous.values.state import JobState, is_live, world_nodes
from rendezvous.values.types import Cause, Decision, DecisionKind, Recover

if TYPE_CHECKING:
    from rendezvous.values.events import HealReady
    from rendezvous.values.state import Member


def heal_ready(state: JobState, event: HealReady, member: Member, now: float) -> Result:
    """Note whether a node's ranks can be paused. `member` is in the current world.

    It is stored once, when all nodes are ready: then a service that takes over need not wait for them to say so again
    before it decides about a failure.
    """
    if spec_of(state).recover is Recover.RESTART:
        return state, ()
    node, before = member.agent.node, state.ready
    if event.ready != (node in before):
        state = replace(state, ready=before.plus(node, True) if event.ready else before.minus(node))
    if not event.refusal or state.refusal:
        all_are = state.ready is not before and len(state.ready) == world_nodes(state)
        return state, (Persist(),) if all_are else ()
    state = replace(state, refusal=event.refusal)
    if is_live(state) and len(state.parked):
        return _restart_all(state, member, now)
    return state, (Persist(),)


def _restart_all(state: JobState, member: Member, now: float) -> Result:
    """Restart all ranks of a generation that was formed in place. If a failure led to it, this counts as a restart."""
    origin = _failure_before(state)
    plan = plan_restart(state)
    reason = f"{state.refusal}; all ranks restart"
    if origin is None:
        return order_stop(state, plan.decision(reason, state.generation), now)
    if spent := restarts_spent(state, now):
        state = replace(state, causes=state.causes.plus(origin.rank, origin))
        fail = Decision(
            DecisionKind.FAIL, f"not in place: {state.refusal}; {spent}", state.generation, origin
        )
        return order_stop(state, fail, now)
    return order_stop(healing.recounted(state, now), plan.decision(reason, state.generation), now)


def _failure_before(state: JobState) -> Cause | None:
    generation, cause = state.failures[-1] if state.failures else (0, None)
    return cause if generation == state.generation - 1 else None
