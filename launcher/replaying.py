"""The state machine of an agent, as `ddpctl replay` runs it: an entry point, because ddpctl imports no launcher."""

from __future__ import annotations

from launcher import supervision
from launcher.exchange import Action, AgentEvent, Step, Supervision
from rendezvous.replay.records import Machine


def machine() -> Machine:
    return Machine("agent", Supervision, AgentEvent, Action, _step)


def _step(state: Supervision, event: AgentEvent, _now: float) -> Step:
    return supervision.step(state, event)
