"""The state machine of the service, as a replay runs it."""

from __future__ import annotations

from rendezvous.machine import step
from rendezvous.replay.records import Machine
from rendezvous.rounds.admission import renew_leases
from rendezvous.rounds.resume import resume
from rendezvous.values.events import Effect, Event
from rendezvous.values.state import JobState


def machine() -> Machine:
    return Machine("service", JobState, Event, Effect, step, resume, renew_leases)
