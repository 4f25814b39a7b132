"""Orders of operators. An order that restarts the world does not use the restart budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.rounds import healing, reloading
from rendezvous.rounds.growing import consider_growth
from rendezvous.rounds.policy import plan_restart, room_to_grow
from rendezvous.rounds.sealing import gather, tell_progress
from rendezvous.rounds.stopping import order_stop
from rendezvous.values.events import Persist
from rendezvous.values.state import Exclusion, JobState, Phase, is_live, world_nodes
from rendezvous.values.types import Decision, DecisionKind, SourceChange

if TYPE_CHECKING:
    from rendezvous.rounds.reading import Result
    from rendezvous.values.events import Effect

DRAINED = "drained by an operator: "


def drain(state: JobState, node: str, reason: str, now: float) -> Result:
    exclusion = Exclusion(DRAINED + reason)
    if state.phase is Phase.ENDED or state.excluded.get(node) == exclusion:
        return state, ()
    member = state.members.get(node)
    state = replace(state, excluded=state.excluded.plus(node, exclusion))
    if state.phase is Phase.FORMING:
        state = healing.without_parked(state, node)
    if is_live(state) and member is not None and member.node_rank is not None:
        plan = plan_restart(state, in_place=not healing.obstacle_to_order(state))
        words = f"draining {node}: {reason}; {plan.words}"
        return order_stop(state, plan.decision(words, state.generation), now)
    return _reconsider(state, now)


def resume_node(state: JobState, node: str, now: float) -> Result:
    if state.phase is Phase.ENDED or node not in state.excluded:
        return state, ()
    return readmit(state, [node], now)


def readmit(state: JobState, nodes: list[str], now: float) -> Result:
    excluded, failures = state.excluded, state.node_failures
    for node in nodes:
        excluded, failures = excluded.minus(node), failures.minus(node)
    state = replace(state, excluded=excluded, node_failures=failures)
    return _reconsider(state, now)


def _reconsider(state: JobState, now: float) -> Result:
    effects: tuple[Effect, ...] = ()
    if state.phase is Phase.FORMING and state.spec is not None:
        state, effects = gather(state, now)
        if state.phase is Phase.FORMING:  # send waiting agents the new reason and number at once
            state, effects = tell_progress(state)
    elif is_live(state):
        state, effects = consider_growth(state, now)
    return state, (Persist(), *effects)


def resize(state: JobState, min_nodes: int, max_nodes: int, now: float) -> Result:
    is_invalid = not 1 <= min_nodes <= max_nodes
    same = (min_nodes, max_nodes) == (state.min_nodes, state.max_nodes)
    if state.spec is None or state.phase is Phase.ENDED or is_invalid or same:
        return state, ()
    state = replace(state, min_nodes=min_nodes, max_nodes=max_nodes)
    asked = f"resized by an operator to {min_nodes}:{max_nodes}"
    if not is_live(state):
        return _reconsider(state, now)
    in_place = not healing.obstacle_to_order(state)
    if world_nodes(state) > max_nodes:
        shrink = Decision(DecisionKind.SHRINK, asked, state.generation, in_place=in_place)
        return order_stop(state, shrink, now)
    if room_to_grow(state):
        return order_stop(state, Decision(DecisionKind.GROW, asked, state.generation, in_place=in_place), now)
    return _reconsider(state, now)


def restart(state: JobState, reason: str, now: float) -> Result:
    """Restart all ranks, also those that could keep their processes: the script may have changed."""
    if not is_live(state):
        return state, ()
    plan = plan_restart(state)
    words = f"ordered by an operator: {reason}; {plan.words}"
    return order_stop(state, plan.decision(words, state.generation), now)


def reload(state: JobState, reason: str, steps: int, now: float) -> Result:
    """Restart all ranks with the edited files of the script. Ranks that still start are not stopped."""
    if state.phase is not Phase.RUNNING or not 0 <= steps <= reloading.MOST_STEPS:
        return state, ()
    plan = plan_restart(state)
    words = f"{reason}; {plan.words} and the edited script"
    decision = replace(plan.decision(words, state.generation), sources=SourceChange.RELOAD)
    return order_stop(reloading.ordered(state, steps), decision, now)
