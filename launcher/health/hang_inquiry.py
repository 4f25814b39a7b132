"""The agent's part of a hang inquiry. Functions without I/O, used by launcher/supervision.py.

The agent reports that a rank has stalled (`RanksStalled`), reports the state of each rank on request (`Examined`), and
takes the stacks of the culprit before it reports its failure (`RankFailed`). The service names the culprit, because it
receives the reports of all agents. An agent without ranks replies at once, so that the service does not wait for it.

The reason for a stop may be only the consequence of an earlier failure. Then the agent reads the status pages of its
ranks again before it stops them, and sends the result with `AgentStopped`; see rendezvous/diagnosing/post_mortem.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from launcher.exchange import (
    AbortGroups,
    CommunicationFailed,
    ConditionMet,
    Inspected,
    InspectLast,
    InspectRanks,
    Send,
    StacksTaken,
    StallDetected,
    TakeStacks,
)
from launcher.supervised import Phase
from rendezvous.values.events import Accused, Examine, Examined, RankFailed, RanksStalled
from rendezvous.values.types import DecisionKind

if TYPE_CHECKING:
    from launcher.exchange import Action
    from launcher.supervised import Step, Supervision
    from rendezvous.values.types import Decision

_PEERS_STAY = (
    DecisionKind.GROW,
    DecisionKind.FINISH,
)  # until the stop: the ranks may still finish together


def inquire(
    state: Supervision,
    event: Examine | Accused | StallDetected | Inspected | StacksTaken | CommunicationFailed | ConditionMet,
) -> Step:
    agent, generation = state.agent, event.generation
    if generation != state.generation or state.phase is not Phase.RUNNING:
        silent = Send(Examined(agent, generation, ()))
        return state, ((silent,) if isinstance(event, Examine | Inspected) else ())
    match event:
        case StallDetected():
            return state, (Send(RanksStalled(agent, generation)),)
        case Examine():
            return state, (InspectRanks(generation),)
        case Inspected(_, reports):
            return state, (Send(Examined(agent, generation, reports)),)
        case Accused(_, cause):
            return replace(state, accused=(*state.accused, cause)), (TakeStacks(generation, cause),)
        case StacksTaken(_, cause) | CommunicationFailed(_, cause) | ConditionMet(_, cause):
            return state, (Send(RankFailed(agent, generation, cause)),)
        case _:
            assert_never(event)


def before_a_stop(state: Supervision, decision: Decision) -> tuple[Action, ...]:
    """Actions before the ranks are stopped: a rank of the generation is lost, so no collective can complete."""
    if decision.kind in _PEERS_STAY or decision.is_interrupt:
        return ()
    looks = (
        decision.cause is not None and decision.cause.may_be_a_consequence and state.phase is Phase.RUNNING
    )
    released = () if decision.in_place else release(state, why(decision))  # in place, a pause releases them
    return (*((InspectLast(state.generation),) if looks else ()), *released)


def release(state: Supervision, reason: str) -> tuple[Action, ...]:
    running = state.phase is Phase.RUNNING and bool(state.live)
    return (AbortGroups(state.generation, reason),) if running else ()


def why(decision: Decision) -> str:
    cause = decision.cause
    who = f"rank {cause.rank} on {cause.node}" if cause is not None and not cause.uncertain else ""
    return f"{who}: {cause.reason}" if cause is not None and who else decision.reason
