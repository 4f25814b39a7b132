"""Take over a job from its snapshot: after a crash of the service, or from another replica that owned it.

The times in the snapshot are on the clock of the process that wrote it, so only differences are used: the remaining
time of each timeout is the same as when the snapshot was written. The service sends every
member its current state, since the member may have missed it. Every member gets a new lease, since its heartbeats
could not arrive meanwhile. This first lease is three times as long, because a disconnected agent retries only every
few seconds while its ranks run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.rounds.sealing import by_arrival, where_it_stands
from rendezvous.values.events import Effect, SetDeadline, Tell
from rendezvous.values.frozen_map import FrozenMap

if TYPE_CHECKING:
    from rendezvous.rounds.sealing import Result
    from rendezvous.values.state import JobState

_FIRST_LEASE = 3.0  # in leases


def resume(state: JobState, now: float) -> Result:
    state = _on_this_clock(state, now)
    told: list[Effect] = [
        Tell(m.agent, word) for m in by_arrival(state) for word in where_it_stands(state, m)
    ]
    return state, (*told, SetDeadline(state.deadline_at))


def _on_this_clock(state: JobState, now: float) -> JobState:
    by_s = now - state.as_of
    timers, heard_at = replace(state.timers.shifted(by_s), examine_at=None), now
    if state.spec is not None and len(state.members) and state.outcome is None:
        timers = replace(timers, lease_check_at=now + state.spec.lease_s)
        heard_at = now + (_FIRST_LEASE - 1.0) * state.spec.lease_s
    excluded = (
        (n, x if x.until is None else replace(x, until=x.until + by_s)) for n, x in state.excluded.items()
    )
    return replace(
        state,
        as_of=now,
        timers=timers,
        deadline_at=timers.earliest(),
        leases=FrozenMap((node, heard_at) for node in state.members),
        excluded=FrozenMap(excluded),
        restart_times=tuple(at + by_s for at in state.restart_times),
        examination=None,
    )
