"""Which nodes stay out of the next worlds for a time: unfit nodes, stragglers, and nodes that failed often. Pure."""

from __future__ import annotations

from dataclasses import replace

from rendezvous.diagnosing.stragglers import nodes_to_exclude
from rendezvous.rounds.reading import spec_of
from rendezvous.values.state import Exclusion, JobState
from rendezvous.values.types import StragglerPolicy


def without_unfit_and_slow(state: JobState, now: float) -> JobState:
    return _without_stragglers(_without_unfit(state, now), now)


def _without_unfit(state: JobState, now: float) -> JobState:
    """As long as enough nodes remain: a job that needs all its nodes continues with them."""
    here = [node for node in state.members if node not in state.excluded]
    for node in [node for node in here if node in state.unfit][: max(0, len(here) - state.min_nodes)]:
        state = exclude(state, node, f"it is unfit: {state.unfit[node]}", now, for_health=True)
    return state


def _without_stragglers(state: JobState, now: float) -> JobState:
    if spec_of(state).stragglers.policy is not StragglerPolicy.EXCLUDE:
        return state
    here = [node for node in state.members if node not in state.excluded]
    for node, reason in nodes_to_exclude(state.straggler_state, here, state.min_nodes).items():
        state = exclude(state, node, reason, now)
    return state


def exclude(state: JobState, node: str, reason: str, now: float, *, for_health: bool = False) -> JobState:
    until = now + spec_of(state).node_cooldown_s
    exclusion = Exclusion(
        f"{reason}; the node is admitted again after {spec_of(state).node_cooldown_s:g} s", until, for_health
    )
    soonest = until if state.timers.readmit_at is None else min(until, state.timers.readmit_at)
    return replace(
        state,
        excluded=state.excluded.plus(node, exclusion),
        timers=replace(state.timers, readmit_at=soonest),
    )
