"""Ranks stand still: the agent's part in finding out why. Pure; steps of launcher/supervision.py.

The agent says that its ranks are still (`RanksStalled`), tells how each of them is when it is asked (`Examined`), and
looks where an accused one stands before it reports its failure (`RankFailed`). Who is to blame is for the service to
say, which hears all agents. An agent that runs no ranks says so at once: nobody need wait for it.

An order to stop may have a reason that only tells of a consequence. Then the agent looks at its ranks' pages once more
before it stops anybody, and says with `AgentStopped` what it saw; see rendezvous/diagnosing/post_mortem.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from launcher.exchange import (
    BreakOff,
    CommunicationFailed,
    LookAtRanks,
    LookBack,
    RanksSeen,
    RanksStandStill,
    Send,
    StacksTaken,
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
)  # until they are stopped: they may still finish together


def step(
    state: Supervision,
    fact: Examine | Accused | RanksStandStill | RanksSeen | StacksTaken | CommunicationFailed,
) -> Step:
    agent, generation = state.agent, fact.generation
    if generation != state.generation or state.phase is not Phase.RUNNING:
        silent = Send(Examined(agent, generation, ()))
        return state, ((silent,) if isinstance(fact, Examine | RanksSeen) else ())
    match fact:
        case RanksStandStill():
            return state, (Send(RanksStalled(agent, generation)),)
        case Examine():
            return state, (LookAtRanks(generation),)
        case RanksSeen(_, reports):
            return state, (Send(Examined(agent, generation, reports)),)
        case Accused(_, cause):
            return replace(state, accused=(*state.accused, cause.local_rank)), (
                TakeStacks(generation, cause),
            )
        case StacksTaken(_, cause) | CommunicationFailed(_, cause):
            return state, (Send(RankFailed(agent, generation, cause)),)
        case _:
            assert_never(fact)


def before_a_stop(state: Supervision, decision: Decision) -> tuple[Action, ...]:
    """Of a world that has lost somebody: nothing that its ranks do together can succeed any more."""
    if decision.kind in _PEERS_STAY:
        return ()
    looks = (
        decision.cause is not None and decision.cause.may_be_a_consequence and state.phase is Phase.RUNNING
    )
    return (*((LookBack(state.generation),) if looks else ()), *release(state, _why(decision)))


def release(state: Supervision, reason: str) -> tuple[Action, ...]:
    running = state.phase is Phase.RUNNING and bool(state.live)
    return (BreakOff(state.generation, reason),) if running else ()


def _why(decision: Decision) -> str:
    cause = decision.cause
    who = f"rank {cause.rank} on {cause.node}" if cause is not None and not cause.uncertain else ""
    return f"{who}: {cause.reason}" if cause is not None and who else decision.reason
