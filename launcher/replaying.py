"""The state machine of an agent, as `ddpctl replay` runs it: an entry point, because ddpctl imports no launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher import supervision
from launcher.exchange import Action, AgentEvent, Supervision
from rendezvous.replay.records import Machine

if TYPE_CHECKING:
    from launcher.exchange import Step


def machine() -> Machine:
    return Machine("agent", Supervision, AgentEvent, Action, _step)


def _step(state: Supervision, event: AgentEvent, _now: float) -> Step:
    return supervision.step(state, event)
