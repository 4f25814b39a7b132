"""How ranks are stopped: which signal they get, and how long they have. Pure; steps of launcher/supervision.py.

    Ctrl-C    SIGINT --2/3 of T--> release of collectives --T--> SIGTERM --5 s--> SIGKILL
    any other stop       SIGTERM --------------------------T--> SIGKILL

T is `--shutdown-timeout`. Python turns SIGINT into KeyboardInterrupt, so that `except`, `finally` and `atexit` run. The
default action for SIGTERM ends the process at once. After a failure this is wanted: a rank that waits in a collective
ends without delay, and the restart can begin. A rank that has work to do before its end handles SIGTERM, and has T.

After Ctrl-C all ranks may still communicate, for example to write a checkpoint together. But a rank that waits in a
collective for a rank that has ended does not see the interrupt. So after two thirds of the time its collective is
aborted. It then returns to Python, and can still save.

A second stop signal kills the ranks at once. See docs/decisions/0003.

In a stop in place (launcher/pausing.py), ranks that are paused get no signal before T, and those that have parked none
at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.exchange import AbortGroups, Grace, SignalRanks, StartGrace, Sweep
from launcher.supervised import Phase

if TYPE_CHECKING:
    from launcher.exchange import Action, GraceOver
    from launcher.supervised import Step, Supervision

SIGINT, SIGTERM, SIGKILL = 2, 15, 9


def signal_ranks(state: Supervision) -> Step:
    """Send the first signal, and start the clocks."""
    generation = state.generation
    accused = (StartGrace(generation, Grace.OF_ACCUSED),) if state.accused else ()
    if not state.is_interrupted:
        state = replace(state, stop_signal=SIGTERM)
        return state, (SignalRanks(SIGTERM), *accused, StartGrace(generation))
    state = replace(state, stop_signal=SIGINT)
    together = StartGrace(generation, Grace.TOGETHER)
    return state, (SignalRanks(SIGINT), *accused, together, StartGrace(generation))


def grace_over(state: Supervision, fact: GraceOver) -> Step:
    if fact.generation != state.generation or state.phase is not Phase.STOPPING or not state.live:
        return state, ()
    match fact.kind:
        case Grace.OF_ACCUSED:
            still = tuple(
                rank for rank in state.accused_ranks if rank in state.live and not _stays(state, rank)
            )
            return state, ((SignalRanks(SIGKILL, still),) if still else ())
        case Grace.TOGETHER:
            release = AbortGroups(
                fact.generation, "the job was interrupted, and this collective did not complete"
            )
            return state, ((release,) if state.stop_signal == SIGINT else ())
        case Grace.FULL if state.stop_signal == SIGINT:
            last = StartGrace(fact.generation, Grace.LAST)
            return replace(state, stop_signal=SIGTERM), (SignalRanks(SIGTERM), last)
        case _:
            return kill(state)


def kill(state: Supervision) -> Step:
    if state.in_place:
        late = tuple(rank for rank in state.live if not _stays(state, rank))
        return (replace(state, stop_signal=SIGKILL), (SignalRanks(SIGKILL, late),)) if late else (state, ())
    return replace(state, stop_signal=SIGKILL), (SignalRanks(SIGKILL),)


def hurry(state: Supervision) -> Step:
    """A stop signal was repeated: nothing gets any more time."""
    state = replace(state, is_hurried=True)
    state, actions = kill(state)
    return state, (*actions, *(() if state.live else (sweep(state),)))


def sweep(state: Supervision) -> Action:
    return Sweep(state.generation, state.is_hurried, state.parked if state.in_place else ())


def _stays(state: Supervision, rank: int) -> bool:
    return state.in_place and rank in state.parked
