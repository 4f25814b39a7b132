"""Every short story of a job of two nodes: all orders of all events, up to a depth, from three beginnings.

Time stands still but for deadlines; states that differ only in when they were reached count once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_invariants import check_step

from rendezvous.machine import step
from rendezvous.values.events import (
    AgentJoined,
    AgentLeft,
    AgentLost,
    AgentStopped,
    DeadlineReached,
    Event,
    NodeDrained,
    RankFailed,
    RanksFinished,
    RestartOrdered,
    StoreOpened,
)
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import (
    AgentId,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    RestartBudget,
    StoreAddress,
)

_STATES_BOUND = 2_500
_A, _A2, _B = AgentId("a", "1"), AgentId("a", "2"), AgentId("b", "1")
_WORLDS = {
    "fixed": JobSpec("two", 2, 2, budget=RestartBudget(1)),
    "elastic": JobSpec("two", 1, 2, budget=RestartBudget(1)),
    "no restarts": JobSpec("two", 2, 2),
}


def _events(spec: JobSpec, generation: int) -> list[Event]:
    """All that can happen, some of it stale: of the generation before, of an older life."""
    happen: list[Event] = [DeadlineReached(), NodeDrained("b", "repairs"), RestartOrdered("a whim")]
    for agent in (_A, _A2, _B):
        happen += [
            AgentJoined(agent, spec, NodeFacts(agent.node, agent.node, 1)),
            AgentLost(agent, "its stream broke"),
            RanksFinished(agent, generation),
            AgentStopped(agent, generation),
            AgentStopped(agent, generation - 1),
            StoreOpened(agent, generation, StoreAddress(agent.node, 1)),
        ]
        for rank in (0, 1):
            cause = Cause(agent.node, rank, 0, FailureClass.USER_EXCEPTION, "it failed", 1, ran_s=9.0)
            happen.append(RankFailed(agent, generation, cause))
    happen.append(AgentLeft(_B, "goodbye"))
    return happen


def _timeless(state: JobState, now: float) -> JobState:
    timers = state.timers.shifted(-now)
    return replace(
        state,
        timers=timers,
        deadline_at=timers.earliest(),
        leases=FrozenMap((node, 0.0) for node in state.members),
        as_of=0.0,
        restart_times=tuple(0.0 for _ in state.restart_times),
        arrivals=0,
        decisions=(),
        failures=(),
    )


def _next(state: JobState, event: Event) -> JobState:
    now = 0.0
    if isinstance(event, DeadlineReached):
        if state.deadline_at is None:
            return state
        now = state.deadline_at
    after, effects = step(state, event, now)
    check_step(state, event, after, effects)
    return state if after is state else _timeless(after, now)


@pytest.mark.parametrize("spec", _WORLDS.values(), ids=_WORLDS.keys())
def test_every_short_story_keeps_the_invariants(spec: JobSpec) -> None:
    seen = {JobState(): None}
    frontier = [JobState()]
    phases: dict[Phase, int] = {}
    while frontier and len(seen) < _STATES_BOUND:
        reached: dict[JobState, None] = {}
        for state in frontier:
            for event in _events(spec, state.generation):
                after = _next(state, event)
                if after not in seen:
                    reached[after] = None
                    seen[after] = None
                    phases[after.phase] = phases.get(after.phase, 0) + 1
        frontier = list(reached)
    assert set(phases) == set(Phase), "a phase that no story reached was not tried"
    assert all(s.restarts_used <= spec.budget.limit for s in seen)
