"""Ranks stand still: the agent's part in finding out why. Pure; steps of launcher/supervision.py.

The agent says that its ranks are still (`RanksStill`), tells how each of them is when it is asked (`Examined`), and
looks where an accused one stands before it reports its failure (`RankFailed`). Who is to blame is for the service to
say, which hears all agents. An agent that runs no ranks says so at once: nobody need wait for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from launcher.exchange import (
    CommunicationFailed,
    LookAtRanks,
    RanksSeen,
    RanksStandStill,
    Send,
    StacksTaken,
    TakeStacks,
)
from launcher.supervised import Phase
from rendezvous.events import Accused, Examine, Examined, RankFailed, RanksStill

if TYPE_CHECKING:
    from launcher.supervised import Step, Supervision


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
            return state, (Send(RanksStill(agent, generation)),)
        case Examine():
            return state, (LookAtRanks(generation),)
        case RanksSeen(_, sights):
            return state, (Send(Examined(agent, generation, sights)),)
        case Accused(_, cause):
            return replace(state, accused=(*state.accused, cause.local_rank)), (
                TakeStacks(generation, cause),
            )
        case StacksTaken(_, cause) | CommunicationFailed(_, cause):
            return state, (Send(RankFailed(agent, generation, cause)),)
        case _:
            assert_never(fact)
