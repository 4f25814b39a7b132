"""What one agent does with its node's ranks: a pure machine, driven by `launcher.agent`.

Theory of operation
-------------------
    Joining --StoreReached--> Running --Stop--> Stopping --swept--> Joining (next generation)
       |                         |                 |
       +---- Ended, Refused, a stop signal: whatever runs is stopped first ----> Done

The agent reports facts (`RankFailed`, `RanksFinished`, `AgentStopped`) and carries out decisions (`Assigned`,
`StoreAt`, `Stop`, `Ended`); it decides nothing about the job. Every way of stopping is one path: signal the
ranks, start the grace clock, kill when it runs out, sweep what they left behind, and only then say so.
Facts and messages of another generation than the current one change nothing.

    | fact                | Joining                      | Running                        | Stopping               |
    | ------------------- | ---------------------------- | ------------------------------ | ---------------------- |
    | Waiting             | -                            | STOPS Sweep                    | -                      |
    | Refused             | ENDS AgentJoined             | STOPS Sweep                    | noted                  |
    | Assigned            | OpenStore noted              | STOPS Sweep                    | noted                  |
    | StoreAt             | STARTS ReachStore            | -                              | -                      |
    | CheckpointRequested | noted                        | AskCheckpoint noted            | -                      |
    | Examine             | Examined                     | Examined LookAtRanks           | Examined               |
    | Accused             | -                            | TakeStacks                     | -                      |
    | Notice              | -                            | -                              | -                      |
    | Stop                | >stopping AgentStopped Sweep | STOPS BreakOff LookBack Sweep  | noted                  |
    | Ended               | ENDS                         | STOPS Sweep                    | noted                  |
    | StoreListens        | StoreOpened                  | -                              | -                      |
    | StoreFailed         | ENDS AgentLeft               | -                              | -                      |
    | StoreLost           | CANNOT                       | RankFailed                     | -                      |
    | StoreReached        | STARTS CANNOT                | -                              | -                      |
    | RankEnded           | -                            | RankFailed RanksFinished noted | RankFailed Sweep noted |
    | Swept               | -                            | -                              | ENDS NEXT              |
    | GraceOver           | -                            | -                              | SignalRanks            |
    | StopRequested       | ENDS AgentLeft               | STOPS Sweep                    | AgentLeft SignalRanks  |
    | CheckpointSignal    | ENDS AgentLeft               | STOPS AskCheckpoint Sweep      | AgentLeft SignalRanks  |
    | CheckpointOver      | -                            | STOPS CheckpointTaken Sweep    | -                      |
    | Isolated            | -                            | STOPS BreakOff RankFailed      | -                      |
    | StallDetected     | -                            | RanksStalled                     | -                      |
    | RanksSeen           | Examined                     | Examined                       | Examined               |
    | LastSeen            | noted                        | noted                          | noted                  |
    | StacksTaken         | -                            | RankFailed                     | -                      |
    | CommunicationFailed | -                            | RankFailed                     | -                      |
    | ZygoteReplaced      | CANNOT OpenStore             | -                              | Sweep                  |
    | StartFailed         | ENDS AgentLeft               | ENDS AgentLeft                 | ENDS AgentLeft         |

Each cell lists all that a fact may bring about in that phase: actions (for a `Send` its message), `>` with the next
phase, `noted` for a change without either, `-` for nothing. In Done nothing follows. Groups, of which at least a part
follows each time:

    STARTS: >running StartRanks AskCheckpoint
    CANNOT: RankFailed AgentStopped
    STOPS: >stopping SignalRanks StartGrace AgentLeft
    NEXT: >joining AgentStopped AgentJoined OpenStore
    ENDS: >done Finish

A test compares the table with the code.

Two answers of the service say that the world went on without us: `Waiting` while our ranks run, and a `Refused`
that may be retried. Either way the ranks here are stopped first.

Before ranks start, a node tries to reach the store; one that cannot reports that as the failure of its first rank,
so that the service decides and everybody hears which two nodes cannot talk.

A checkpoint is asked of the ranks by the service (the world is to grow) or by a scheduler's signal (this node is
about to go). The ranks' answer goes where the question came from: `CheckpointTaken`, or the stop that the signal
meant. Only one thing is decided here: ranks that make no progress while the service is out of reach for too long
are stopped (`Isolated`, see launcher/progress.py), and that is told as soon as it can be. What follows where ranks
stand still is in launcher/health/hang_inquiry.py; of a generation that is stopped, an accused rank gets a short grace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from launcher.exchange import (
    Action,
    AskCheckpoint,
    CheckpointOver,
    CheckpointSignal,
    CommunicationFailed,
    Fact,
    Finish,
    GraceOver,
    Isolated,
    LastSeen,
    OpenStore,
    RankEnded,
    RanksSeen,
    ReachStore,
    Send,
    SignalRanks,
    StacksTaken,
    StallDetected,
    StartFailed,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    StoreReached,
    Sweep,
    Swept,
    ZygoteReplaced,
)
from launcher.health.hang_inquiry import before_a_stop, release
from launcher.health.hang_inquiry import step as inquire
from launcher.start_failure import cannot_start, failed_for, store_lost, zygote_replaced
from launcher.supervised import Phase, Step, Supervision
from rendezvous.values.events import (
    Accused,
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    CheckpointTaken,
    Ended,
    Examine,
    Notice,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.types import (
    Assignment,
    Decision,
    DecisionKind,
    FailureClass,
    StoreAddress,
)

SIGTERM, SIGKILL = 15, 9
TRY_AGAIN = 75


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
        case StoreLost():
            return store_lost(state, fact)
        case StoreAt(generation, store):
            return _store_at(state, generation, store)
        case StoreReached():
            return _store_reached(state, fact)
        case RankEnded():
            return _rank_ended(state, fact)
        case Stop(generation, decision):
            return _stop(state, generation, decision)
        case GraceOver():
            return _grace_over(state, fact)
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
        case CheckpointRequested(generation, reason):
            return _checkpoint_requested(state, generation, reason)
        case CheckpointSignal():
            return _checkpoint_signal(state, fact)
        case CheckpointOver():
            return _checkpoint_over(state, fact)
        case Isolated(reason):
            return _isolated(state, reason)
        case ZygoteReplaced():
            return zygote_replaced(state, fact)
        case StartFailed(reason):
            return _gave_up(state, reason)
        case Examine() | Accused() | StallDetected() | RanksSeen() | StacksTaken() | CommunicationFailed():
            return inquire(state, fact)
        case LastSeen(generation, reports):
            return (state if generation != state.generation else replace(state, last_seen=reports)), ()
        case Notice():
            return state, ()
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
    state = replace(state, assignment=assignment, store_told=False, store=None, over=False, stop_signal=0)
    state = replace(state, checkpoint="", preempted=None, accused=(), last_seen=())
    return state, _if(assignment.node_rank == 0, OpenStore(assignment.generation))


def _store_listens(state: Supervision, generation: int, store: StoreAddress) -> Step:
    if not state.awaits_store(generation):
        return state, ()
    return replace(state, store_told=True), (Send(StoreOpened(state.agent, generation, store)),)


def _store_at(state: Supervision, generation: int, store: StoreAddress) -> Step:
    """Told twice to an agent that resumes its session."""
    mine = state.assignment
    if mine is None or not state.awaits_store(generation) or state.store is not None:
        return state, ()
    state = replace(state, store=store)
    if mine.node_rank == 0:  # it is this node's own
        return _start(state, mine, store)
    return state, (ReachStore(mine, store),)


def _store_reached(state: Supervision, fact: StoreReached) -> Step:
    if state.assignment is None or state.store is None or not state.awaits_store(fact.generation):
        return state, ()
    if not fact.problem:
        return _start(state, state.assignment, state.store)
    return cannot_start(state, state.assignment, fact.problem, FailureClass.NETWORK, TRY_AGAIN)


def _start(state: Supervision, assignment: Assignment, store: StoreAddress) -> Step:
    state = replace(state, phase=Phase.RUNNING, live=tuple(range(assignment.nproc)))
    asked = _if(bool(state.checkpoint), AskCheckpoint(assignment, state.checkpoint, hurried=False))
    return state, (StartRanks(assignment, store), *asked)


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
    if generation > state.generation and state.join is not None:  # sealed and broken up while we were away
        if state.phase is not Phase.JOINING:
            return _given_up(state, state.join)
        return state, (Send(AgentStopped(state.agent, generation)),)
    if generation != state.generation:
        return state, ()
    state = replace(state, job_failed=decision.kind is DecisionKind.FAIL)
    # In Joining it was sealed, and broken up before the ranks started: a store may run already.
    if state.phase not in (Phase.JOINING, Phase.RUNNING):
        return state, ()
    first = before_a_stop(state, decision)
    state, actions = _begin_stopping(state)
    return state, (*first, *actions)


def _begin_stopping(state: Supervision) -> Step:
    if state.preempted is not None:  # this node goes all the same
        signum, name = state.preempted.signum, state.preempted.name
        return _leave(replace(state, preempted=None), f"stopped by {name}", 128 + signum)
    state = replace(state, phase=Phase.STOPPING, over=True, checkpoint="")
    if not state.live:
        return state, (Sweep(state.generation),)
    state = replace(state, stop_signal=SIGTERM)
    hurry = _if(bool(state.accused), StartGrace(state.generation, of_accused=True))
    return state, (SignalRanks(SIGTERM), *hurry, StartGrace(state.generation))


def _grace_over(state: Supervision, fact: GraceOver) -> Step:
    if fact.generation != state.generation or state.phase is not Phase.STOPPING or not state.live:
        return state, ()
    if not fact.of_accused:
        return _kill(state)
    still = tuple(rank for rank in state.accused if rank in state.live)
    return state, _if(bool(still), SignalRanks(SIGKILL, still))


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
        state, actions = _assigned(state, overtaken_by)
        return state, (*actions, *([Send(state.join)] if state.join else ()))  # its store was told meanwhile
    return state, (Send(AgentStopped(state.agent, generation, state.last_seen)),)


def _given_up(state: Supervision, join: AgentJoined) -> Step:
    """The service has declared this node lost, and may have replaced it: stop its ranks."""
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
    return _leave(replace(state, preempted=None), f"stopped by {fact.name}", 128 + fact.signum)


def _leave(state: Supervision, reason: str, exit_code: int) -> Step:
    """Of our own accord: the others are told first, and not waited for."""
    state, actions = _finish(state, Finish(exit_code, reason))
    return state, (Send(AgentLeft(state.agent, reason)), *actions)


# --- checkpoints, and being cut off ------------------------------------------------------------------


def _checkpoint_requested(state: Supervision, generation: int, reason: str) -> Step:
    mine = state.assignment
    if mine is None or generation != state.generation or state.over or state.checkpoint:
        return state, ()
    running = state.phase is Phase.RUNNING  # else at their start
    state = replace(state, checkpoint=reason)
    return state, _if(
        running and bool(state.live) and state.preempted is None,
        AskCheckpoint(mine, reason, hurried=False),
    )


def _checkpoint_signal(state: Supervision, fact: CheckpointSignal) -> Step:
    """A second signal, or one while no rank runs, is not asked twice: it means what it always means."""
    able = state.phase is Phase.RUNNING and bool(state.live) and state.preempted is None
    if not able or state.assignment is None:
        return (state, ()) if fact.stop is None else _stop_requested(state, fact.stop)
    reason = f"{fact.name}: this node is about to go"
    return replace(state, preempted=fact.stop), (AskCheckpoint(state.assignment, reason, hurried=True),)


def _checkpoint_over(state: Supervision, fact: CheckpointOver) -> Step:
    if fact.generation != state.generation or state.phase is not Phase.RUNNING:
        return state, ()
    wanted, stop = state.checkpoint, state.preempted
    state = replace(state, checkpoint="", preempted=None)
    told = _if(bool(wanted) and fact.taken, Send(CheckpointTaken(state.agent, state.generation)))
    if stop is None:
        return state, told
    state, actions = _stop_requested(state, stop)
    return state, (*told, *actions)


def _isolated(state: Supervision, reason: str) -> Step:
    if state.phase is not Phase.RUNNING or state.assignment is None or not state.live:
        return state, ()
    report = failed_for(state, state.assignment, reason, FailureClass.NETWORK, TRY_AGAIN)
    released = release(state, reason)
    state, actions = _begin_stopping(state)
    return state, (report, *released, *actions)


def _gave_up(state: Supervision, reason: str) -> Step:
    finish = state.finish or Finish(TRY_AGAIN, reason)
    return replace(state, phase=Phase.DONE, live=()), (Send(AgentLeft(state.agent, reason)), finish)
