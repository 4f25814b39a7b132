"""Reads parts of a job's state that the rules of the state machine often need. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.events import Effect
from rendezvous.values.state import JobState

if TYPE_CHECKING:
    from rendezvous.values.state import Member
    from rendezvous.values.types import JobSpec, World

Result = tuple[JobState, tuple[Effect, ...]]


def spec_of(state: JobState) -> JobSpec:
    assert state.spec is not None, "internal error: the job has no spec"
    return state.spec


def world_of(state: JobState) -> World:
    assert state.world is not None, "internal error: the job has no world"
    return state.world


def by_arrival(state: JobState) -> list[Member]:
    return sorted(state.members.values(), key=lambda m: m.arrival)
