"""Healing in place: whether ranks that survive keep their processes.

Theory of operation
-------------------
A heal is a restart in which the ranks that survive are paused and not reaped. Everything else is the same: the stop of
a generation, its answers, the seal, the number of the next generation, its TCPStore.

    HealReady        the live ranks of a node can be paused, because they train inside `ddp.elastic`'s `State.run`
    Stop(in_place)   each agent pauses the ranks that can be paused, and reaps the others
    AgentStopped     names the ranks that are `parked`, which means paused
    Assigned         `in_place` if a node of the new world has parked ranks: they continue, and new ranks join them

A node that does not report in time, or that is lost, has no parked ranks. If no parked rank is left when the world is
sealed, the new generation is a plain restart. Nothing has to be undone for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.types import Recover

if TYPE_CHECKING:
    from rendezvous.rounds.sealing import Result
    from rendezvous.values.events import HealReady
    from rendezvous.values.state import JobState, Member


def heal_ready(state: JobState, event: HealReady, member: Member) -> Result:
    """Note whether a node's ranks can be paused. `member` is in the current world."""
    assert state.spec is not None
    if state.spec.recover is Recover.RESTART:
        return state, ()
    node = member.agent.node
    if event.ready == (node in state.ready):
        return state, ()
    ready = state.ready.plus(node, True) if event.ready else state.ready.minus(node)
    return replace(state, ready=ready), ()
