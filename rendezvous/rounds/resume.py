"""Take over a job from its snapshot, after the service has crashed or another replica has given up the job.

The times in a snapshot use the clock of the process that wrote it. After a resume, each timeout keeps the remaining
time that it had in the snapshot. The service sends every member the current state, since the member may have missed it.
Every member gets a new lease, since its heartbeats could not arrive in the meantime. This first lease is at least 15 s
long, because a disconnected agent tries to reconnect only every few seconds while its ranks run. In a large job it is
longer: the service accepts thousands of agents one after the other, and those that wait for it are not lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.rounds.sealing import missed_messages
from rendezvous.values.events import Effect, SetDeadline, Tell
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.state import by_arrival

if TYPE_CHECKING:
    from rendezvous.values.state import JobState, Result

_FIRST_LEASE_S = 15.0  # at least
_CROWD = 400  # members: more of them have a longer first lease ...
_MAX_TIME_FACTOR = 4.0  # ... in proportion, up to this factor, as the patience of agents (session_rules.py)


def resume(state: JobState, now: float) -> Result:
    state = _with_own_clock(state, now)
    messages: list[Effect] = [
        Tell(m.agent, message) for m in by_arrival(state) for message in missed_messages(state, m)
    ]
    return state, (*messages, SetDeadline(state.deadline_at))


def _with_own_clock(state: JobState, now: float) -> JobState:
    by_s = now - state.as_of
    timers, renewed_at = replace(state.timers.shifted(by_s), examine_at=None), now
    if state.spec is not None and len(state.members) and state.outcome is None:
        timers = replace(timers, lease_check_at=now + state.spec.lease_s)
        factor = min(max(1.0, len(state.members) / _CROWD), _MAX_TIME_FACTOR)
        renewed_at = now + max(0.0, factor * _FIRST_LEASE_S - state.spec.lease_s)
    excluded = (
        (n, x if x.until is None else replace(x, until=x.until + by_s)) for n, x in state.excluded.items()
    )
    return replace(
        state,
        as_of=now,
        timers=timers,
        deadline_at=timers.earliest(),
        leases=FrozenMap((node, renewed_at) for node in state.members),
        excluded=FrozenMap(excluded),
        restart_times=tuple(at + by_s for at in state.restart_times),
        heal_times=tuple(at + by_s for at in state.heal_times),
        examination=None,
    )
