"""What one agent does with its node's ranks: a pure machine, driven by `launcher.agent`.

Theory of operation
-------------------
    Joining --StoreAt--> Running --Stop--> Stopping --swept--> Joining (next generation)
       |                    |                 |
       +---- Ended, Refused, a stop signal: whatever runs is stopped first ----> Done

The agent reports facts (`RankFailed`, `RanksFinished`, `AgentStopped`) and carries out decisions (`Assigned`,
`StoreAt`, `Stop`, `Ended`); it decides nothing about the job. Every way of stopping is one path: signal the
ranks, start the grace clock, kill when it runs out, sweep what they left behind, and only then say so.
Facts and messages of another generation than the current one change nothing.

    | state    | Assigned      | StoreAt | rank ended          | Stop          | Ended      | signal    | swept        |
    |----------|---------------|---------|---------------------|---------------|------------|-----------|--------------|
    | Joining  | store         | start   | -                   | sweep, answer | exit       | exit      | -            |
    | Running  | stop, then so | -       | report              | signal, grace | stop, exit | stop,exit | -            |
    | Stopping | note          | -       | report; last: sweep | -             | note       | kill      | answer, exit |
    | Done     | -             | -       | -                   | -             | -          | -         | -            |

Two answers of the service say that the world went on without us: `Waiting` while our ranks run, and a `Refused`
that may be retried. Either way the ranks here are stopped first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from rendezvous.events import (
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    Ended,
    FromAgent,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    ToAgent,
    Waiting,
)
from rendezvous.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    Outcome,
    StoreAddress,
)

SIGTERM, SIGKILL = 15, 9
TRY_AGAIN = 75


class Phase(StrEnum):
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


# --- facts of this node ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreListens:
    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The port that was asked for cannot be had."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankEnded:
    """`cause` None: it ended well."""

    generation: int
    local_rank: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class Swept:
    """Nothing that the generation's ranks had started is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    generation: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal that ends the job reached this agent."""

    signum: int
    name: str


@dataclass(frozen=True, slots=True)
class ZygoteReplaced:
    """The zygote died, its ranks and the store with it; told after their `RankEnded`. Another one serves."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """No rank can be started here, and none is left."""

    reason: str


Fact = (
    ToAgent
    | StoreListens
    | StoreFailed
    | RankEnded
    | Swept
    | GraceOver
    | StopRequested
    | ZygoteReplaced
    | StartFailed
)

# --- what the shell is to do -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    message: FromAgent


@dataclass(frozen=True, slots=True)
class OpenStore:
    generation: int


@dataclass(frozen=True, slots=True)
class StartRanks:
    assignment: Assignment
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class SignalRanks:
    signum: int


@dataclass(frozen=True, slots=True)
class StartGrace:
    generation: int


@dataclass(frozen=True, slots=True)
class Sweep:
    generation: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The agent is done. `outcome` None: it was stopped or refused; `reason` says how."""

    exit_code: int
    reason: str = ""
    outcome: Outcome | None = None


Action = Send | OpenStore | StartRanks | SignalRanks | StartGrace | Sweep | Finish


@dataclass(frozen=True, slots=True)
class Supervision:
    agent: AgentId
    phase: Phase = Phase.JOINING
    assignment: Assignment | None = None
    live: tuple[int, ...] = ()  # local ranks that have not ended
    store_told: bool = False  # this generation's store is known to the others
    over: bool = False  # this generation was stopped here; what still speaks of it comes late
    job_failed: bool = False  # it ends once everything everywhere is stopped
    stop_signal: int = 0  # the signal we last sent the ranks
    join: AgentJoined | None = None  # what to say again when the service has given us up
    rejoins: bool = False  # it did: join anew once everything here is stopped
    overtaken_by: Assignment | None = None  # a world was sealed while our ranks of an older one still ran
    finish: Finish | None = None  # what to do once everything here is stopped

    @property
    def generation(self) -> int:
        return -1 if self.assignment is None else self.assignment.generation

    def awaits_store(self, generation: int) -> bool:
        return self.phase is Phase.JOINING and generation == self.generation and not self.over


Step = tuple[Supervision, tuple[Action, ...]]


def step(state: Supervision, fact: Fact) -> Step:
    if state.phase is Phase.DONE:
        return state, ()
    match fact:
        case Assigned(assignment):
            return _assigned(state, assignment)
        case StoreListens(generation, store):
            return _store_listens(state, generation, store)
        case StoreFailed(generation, reason):
            return _leave(state, reason, TRY_AGAIN) if state.awaits_store(generation) else (state, ())
        case StoreAt(generation, store):
            return _start(state, generation, store)
        case RankEnded():
            return _rank_ended(state, fact)
        case Stop(generation, decision):
            return _stop(state, generation, decision)
        case GraceOver(generation):
            return _grace_over(state, generation)
        case Swept(generation):
            return _swept(state, generation)
        case Ended(outcome):
            return _finish(state, Finish(outcome.exit_code, outcome.reason, outcome))
        case Refused(retryable=True) if state.join is not None:
            return _given_up(state, state.join)
        case Refused(reason, exit_code):
            return _finish(state, Finish(exit_code, reason))
        case StopRequested():
            return _stop_requested(state, fact)
        case ZygoteReplaced():
            return _zygote_replaced(state, fact)
        case StartFailed(reason):
            return _gave_up(state, reason)
        case Waiting():  # for a world; if ours still runs, it is one that the others have left
            return _begin_stopping(state) if state.phase is Phase.RUNNING else (state, ())
        case _:
            assert_never(fact)


def _if(condition: bool, *actions: Action) -> tuple[Action, ...]:
    return actions if condition else ()


def _assigned(state: Supervision, assignment: Assignment) -> Step:
    if assignment.generation <= state.generation:
        return state, ()
    if state.phase is not Phase.JOINING:  # the order to stop was lost on its way
        state = replace(state, overtaken_by=assignment)
        return _begin_stopping(state) if state.phase is Phase.RUNNING else (state, ())
    state = replace(state, assignment=assignment, store_told=False, over=False, stop_signal=0)
    return state, _if(assignment.node_rank == 0, OpenStore(assignment.generation))


def _store_listens(state: Supervision, generation: int, store: StoreAddress) -> Step:
    if not state.awaits_store(generation):
        return state, ()
    return replace(state, store_told=True), (Send(StoreOpened(state.agent, generation, store)),)


def _start(state: Supervision, generation: int, store: StoreAddress) -> Step:
    if state.assignment is None or not state.awaits_store(generation):
        return state, ()
    live = tuple(range(state.assignment.nproc))
    return replace(state, phase=Phase.RUNNING, live=live), (StartRanks(state.assignment, store),)


def _rank_ended(state: Supervision, fact: RankEnded) -> Step:
    if fact.generation != state.generation or fact.local_rank not in state.live:
        return state, ()
    live = tuple(rank for rank in state.live if rank != fact.local_rank)
    state = replace(state, live=live)
    actions: list[Action] = []
    if fact.cause is not None:
        actions.append(Send(RankFailed(state.agent, state.generation, fact.cause)))
    if not live:
        if state.phase is Phase.STOPPING:
            actions.append(Sweep(state.generation))
        else:  # also where the service chose to ignore how some of them ended
            actions.append(Send(RanksFinished(state.agent, state.generation)))
    return state, tuple(actions)


def _stop(state: Supervision, generation: int, decision: Decision) -> Step:
    if generation != state.generation:
        return state, ()
    state = replace(state, job_failed=decision.kind is DecisionKind.FAIL)
    # In Joining it was sealed, and broken up before the ranks started: a store may run already.
    return _begin_stopping(state) if state.phase in (Phase.JOINING, Phase.RUNNING) else (state, ())


def _begin_stopping(state: Supervision) -> Step:
    state = replace(state, phase=Phase.STOPPING, over=True)
    if not state.live:
        return state, (Sweep(state.generation),)
    state = replace(state, stop_signal=SIGTERM)
    return state, (SignalRanks(SIGTERM), StartGrace(state.generation))


def _grace_over(state: Supervision, generation: int) -> Step:
    due = generation == state.generation and state.phase is Phase.STOPPING and bool(state.live)
    return _kill(state) if due else (state, ())


def _kill(state: Supervision) -> Step:
    return replace(state, stop_signal=SIGKILL), (SignalRanks(SIGKILL),)


def _swept(state: Supervision, generation: int) -> Step:
    if state.phase is not Phase.STOPPING or generation != state.generation or state.live:
        return state, ()
    if state.finish is not None:
        return replace(state, phase=Phase.DONE), (state.finish,)
    overtaken_by, rejoins = state.overtaken_by, state.rejoins
    state = replace(state, phase=Phase.JOINING, overtaken_by=None, rejoins=False)
    if rejoins and state.join is not None:
        return state, (Send(state.join),)
    if overtaken_by is not None:
        return _assigned(state, overtaken_by)
    return state, (Send(AgentStopped(state.agent, generation)),)


def _given_up(state: Supervision, join: AgentJoined) -> Step:
    """The service holds us for lost, and may have replaced us: what runs here is nobody's any more."""
    match state.phase:
        case Phase.JOINING:
            return state, (Send(join),)
        case Phase.RUNNING:
            return _begin_stopping(replace(state, rejoins=True, overtaken_by=None))
        case _:
            return replace(state, rejoins=True, overtaken_by=None), ()


def _finish(state: Supervision, finish: Finish) -> Step:
    """The first word counts: an agent that was told to stop by a signal exits as that signal asks."""
    if state.finish is None:
        state = replace(state, finish=finish)
    match state.phase:
        case Phase.RUNNING:
            return _begin_stopping(state)
        case Phase.STOPPING:
            return state, ()
        case _:
            assert state.finish is not None
            return replace(state, phase=Phase.DONE), (state.finish,)


def _stop_requested(state: Supervision, fact: StopRequested) -> Step:
    if state.phase is Phase.STOPPING and (state.finish is not None or state.job_failed):
        return _kill(state)
    return _leave(state, f"stopped by {fact.name}", 128 + fact.signum)


def _leave(state: Supervision, reason: str, exit_code: int) -> Step:
    """Of our own accord: the others are told first, and not waited for."""
    state, actions = _finish(state, Finish(exit_code, reason))
    return state, (Send(AgentLeft(state.agent, reason)), *actions)


# --- the zygote --------------------------------------------------------------------------------------


def _zygote_replaced(state: Supervision, fact: ZygoteReplaced) -> Step:
    match state.phase:
        case Phase.JOINING if state.assignment is not None and state.assignment.node_rank == 0:
            return state, _if(not state.over, _store_lost(state, state.assignment, fact))
        case Phase.STOPPING if not state.live:
            return state, (Sweep(state.generation),)
        case _:
            return state, ()


def _store_lost(state: Supervision, assignment: Assignment, fact: ZygoteReplaced) -> Action:
    """Where its address is known already, ranks would wait for it in vain: that attempt has failed."""
    if not state.store_told:
        return OpenStore(assignment.generation)
    cause = Cause(
        state.agent.node, assignment.rank_offset, 0, FailureClass.SIGNAL, fact.reason, fact.exit_code
    )
    return Send(RankFailed(state.agent, assignment.generation, cause))


def _gave_up(state: Supervision, reason: str) -> Step:
    finish = state.finish or Finish(TRY_AGAIN, reason)
    return replace(state, phase=Phase.DONE, live=()), (Send(AgentLeft(state.agent, reason)), finish)
