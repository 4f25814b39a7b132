"""The state machine of one agent: decides what happens to the ranks of its node. Without I/O; `launcher.agent` runs it.

Theory of operation
-------------------
    Joining --StoreReached--> Running --Stop--> Stopping --swept--> Joining (next generation)
       |                         |                 |
       +---- Ended, Refused, a stop signal: running ranks are stopped first ----> Done

The agent reports to the service (`RankFailed`, `RanksFinished`, `AgentStopped`) and carries out its decisions
(`Assigned`, `StoreAt`, `Stop`, `Ended`). It does not decide anything about the job. Every stop follows the same steps:
signal the ranks, kill them when their time is over (launcher/stop_sequence.py), kill the remaining child processes,
report the stop. Events of other generations are ignored.

The table lists, for each event and phase, all possible effects: actions (for a `Send` its message), `>` with the next
phase, `noted` if only the state changes, `-` if nothing changes. In Done, every event is ignored. A word in capitals is
a group; at least one effect of the group follows:

    STARTS: >running StartRanks AskCheckpoint
    CANNOT: RankFailed AgentStopped
    STOPS: >stopping SignalRanks StartGrace AgentLeft
    NEXT: >joining AgentStopped AgentJoined OpenStore
    ENDS: >done Finish
    GRACE: SignalRanks AbortGroups StartGrace
    HURRY: SignalRanks Sweep

  | event               | Joining                      | Running                             | Stopping               |
  | ------------------- | ---------------------------- | ----------------------------------- | ---------------------- |
  | Waiting             | -                            | STOPS Sweep                         | -                      |
  | Refused             | ENDS AgentJoined             | STOPS Sweep                         | noted                  |
  | Assigned            | OpenStore noted              | STOPS Sweep                         | noted                  |
  | StoreAt             | STARTS ReachStore            | -                                   | -                      |
  | CheckpointRequested | noted                        | AskCheckpoint noted                 | -                      |
  | Examine             | Examined                     | Examined InspectRanks               | Examined               |
  | Accused             | -                            | TakeStacks                          | -                      |
  | Notice              | -                            | -                                   | -                      |
  | Stop                | >stopping AgentStopped Sweep | STOPS AbortGroups InspectLast Sweep | noted                  |
  | Ended               | ENDS                         | STOPS Sweep                         | noted                  |
  | StoreListens        | StoreOpened                  | -                                   | -                      |
  | StoreFailed         | ENDS AgentLeft               | -                                   | -                      |
  | StoreLost           | CANNOT                       | RankFailed                          | -                      |
  | StoreReached        | STARTS CANNOT                | -                                   | -                      |
  | RankEnded           | -                            | RankFailed RanksFinished noted      | RankFailed Sweep noted |
  | Swept               | -                            | -                                   | ENDS NEXT              |
  | GraceOver           | -                            | -                                   | GRACE                  |
  | StopRequested       | ENDS AgentLeft               | STOPS Sweep                         | AgentLeft HURRY        |
  | CheckpointSignal    | ENDS AgentLeft               | STOPS AskCheckpoint Sweep           | AgentLeft HURRY        |
  | CheckpointOver      | -                            | STOPS CheckpointTaken Sweep         | -                      |
  | Isolated            | -                            | STOPS AbortGroups RankFailed        | -                      |
  | StallDetected       | -                            | RanksStalled                        | -                      |
  | Inspected           | Examined                     | Examined                            | Examined               |
  | LastInspected       | noted                        | noted                               | noted                  |
  | StacksTaken         | -                            | RankFailed                          | -                      |
  | CommunicationFailed | -                            | RankFailed                          | -                      |
  | ZygoteReplaced      | CANNOT OpenStore             | -                                   | Sweep                  |
  | StartFailed         | ENDS AgentLeft               | ENDS AgentLeft                      | ENDS AgentLeft         |

A test compares the table with the code.

Two replies of the service mean that the job continued without this node: `Waiting` while the ranks of this node run,
and a `Refused` that may be retried. In both cases the ranks of this node are stopped first.

Before a node starts its ranks, it connects to the store. If it cannot connect, it reports this as the failure of its
first rank. Then the service decides, and every node reports which two nodes cannot connect.

The service requests a checkpoint before the job grows. A scheduler's signal requests one before it takes this node.
After the checkpoint, the agent sends `CheckpointTaken` to the service, or stops as the signal requires. The agent makes
one decision alone: it stops ranks that make no progress while the service is unreachable for too long (`Isolated`, see
launcher/progress.py). It reports this when the service is reachable again. For hangs see
launcher/health/hang_inquiry.py. In a stop, a rank that was identified as the cause of a hang gets a shorter grace
period.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from launcher.exchange import (
    Action,
    AgentEvent,
    AskCheckpoint,
    CheckpointOver,
    CheckpointSignal,
    CommunicationFailed,
    Finish,
    GraceOver,
    Inspected,
    Isolated,
    LastInspected,
    OpenStore,
    RankEnded,
    ReachStore,
    Send,
    StacksTaken,
    StallDetected,
    StartFailed,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    StoreReached,
    Swept,
    ZygoteReplaced,
)
from launcher.health.hang_inquiry import before_a_stop, release
from launcher.health.hang_inquiry import step as inquire
from launcher.start_failure import cannot_start, failed_for, store_lost, zygote_replaced
from launcher.stop_sequence import SIGINT, grace_over, hurry, signal_ranks, sweep
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

TRY_AGAIN = 75


def step(state: Supervision, event: AgentEvent) -> Step:
    if state.phase is Phase.DONE:
        return state, ()
    match event:
        case Assigned(assignment):
            return _assigned(state, assignment)
        case StoreListens(generation, store):
            return _store_listens(state, generation, store)
        case StoreFailed(generation, reason):
            return _leave(state, reason, TRY_AGAIN) if state.awaits_store(generation) else (state, ())
        case StoreLost():
            return store_lost(state, event)
        case StoreAt(generation, store):
            return _store_at(state, generation, store)
        case StoreReached():
            return _store_reached(state, event)
        case RankEnded():
            return _rank_ended(state, event)
        case Stop(generation, decision):
            return _stop(state, generation, decision)
        case GraceOver():
            return grace_over(state, event)
        case Swept(generation):
            return _swept(state, generation)
        case Ended(outcome):
            return _finish(state, Finish(outcome.exit_code, outcome.reason, outcome))
        case Refused(retryable=True) if state.join is not None:
            return _given_up(state, state.join)
        case Refused(reason, exit_code):
            return _finish(state, Finish(exit_code, reason))
        case StopRequested():
            return _stop_requested(state, event)
        case CheckpointRequested(generation, reason):
            return _checkpoint_requested(state, generation, reason)
        case CheckpointSignal():
            return _checkpoint_signal(state, event)
        case CheckpointOver():
            return _checkpoint_over(state, event)
        case Isolated(reason):
            return _isolated(state, reason)
        case ZygoteReplaced():
            return zygote_replaced(state, event)
        case StartFailed(reason):
            return _gave_up(state, reason)
        case Examine() | Accused() | StallDetected() | Inspected() | StacksTaken() | CommunicationFailed():
            return inquire(state, event)
        case LastInspected(generation, reports):
            return (state if generation != state.generation else replace(state, last_seen=reports)), ()
        case Notice():
            return state, ()
        case Waiting():  # while the ranks of this node run: the other nodes have left their generation
            return _begin_stopping(state) if state.phase is Phase.RUNNING else (state, ())
        case _:
            assert_never(event)


def _if(condition: bool, *actions: Action) -> tuple[Action, ...]:
    return actions if condition else ()


def _assigned(state: Supervision, assignment: Assignment) -> Step:
    if assignment.generation <= state.generation:
        return state, ()
    if state.phase is not Phase.JOINING:  # the Stop message was lost
        state = replace(state, overtaken_by=assignment)
        return _begin_stopping(state) if state.phase is Phase.RUNNING else (state, ())
    state = replace(state, assignment=assignment, store_told=False, store=None, over=False, stop_signal=0)
    state = replace(state, is_interrupted=False, is_hurried=False)
    state = replace(state, checkpoint="", preempted=None, accused=(), last_seen=())
    return state, _if(assignment.node_rank == 0, OpenStore(assignment.generation))


def _store_listens(state: Supervision, generation: int, store: StoreAddress) -> Step:
    if not state.awaits_store(generation):
        return state, ()
    return replace(state, store_told=True), (Send(StoreOpened(state.agent, generation, store)),)


def _store_at(state: Supervision, generation: int, store: StoreAddress) -> Step:
    """Start the ranks if the store can be reached. An agent that resumes its session receives this event twice."""
    mine = state.assignment
    if mine is None or not state.awaits_store(generation) or state.store is not None:
        return state, ()
    state = replace(state, store=store)
    if mine.node_rank == 0:  # the store runs on this node
        return _start(state, mine, store)
    return state, (ReachStore(mine, store),)


def _store_reached(state: Supervision, event: StoreReached) -> Step:
    if state.assignment is None or state.store is None or not state.awaits_store(event.generation):
        return state, ()
    if not event.problem:
        return _start(state, state.assignment, state.store)
    return cannot_start(state, state.assignment, event.problem, FailureClass.NETWORK, TRY_AGAIN)


def _start(state: Supervision, assignment: Assignment, store: StoreAddress) -> Step:
    state = replace(state, phase=Phase.RUNNING, live=tuple(range(assignment.nproc)))
    asked = _if(bool(state.checkpoint), AskCheckpoint(assignment, state.checkpoint, has_deadline=False))
    return state, (StartRanks(assignment, store), *asked)


def _rank_ended(state: Supervision, event: RankEnded) -> Step:
    if event.generation != state.generation or event.local_rank not in state.live:
        return state, ()
    live = tuple(rank for rank in state.live if rank != event.local_rank)
    state = replace(state, live=live)
    actions: list[Action] = []
    if event.cause is not None:
        actions.append(Send(RankFailed(state.agent, state.generation, event.cause)))
    if not live:
        if state.phase is Phase.STOPPING:
            actions.append(sweep(state))
        else:  # also if the service ignored the failure of some of them
            actions.append(Send(RanksFinished(state.agent, state.generation)))
    return state, tuple(actions)


def _stop(state: Supervision, generation: int, decision: Decision) -> Step:
    if generation > state.generation and state.join is not None:  # it ended while this node was disconnected
        if state.phase is not Phase.JOINING:
            return _given_up(state, state.join)
        return state, (Send(AgentStopped(state.agent, generation)),)
    if generation != state.generation:
        return state, ()
    state = replace(state, job_failed=decision.kind is DecisionKind.FAIL)
    state = replace(state, is_interrupted=state.is_interrupted or decision.is_interrupt)
    # In Joining, the generation was stopped before its ranks started. Its store may already run.
    if state.phase not in (Phase.JOINING, Phase.RUNNING):
        return state, ()
    first = before_a_stop(state, decision)
    state, actions = _begin_stopping(state)
    return state, (*first, *actions)


def _begin_stopping(state: Supervision) -> Step:
    if state.preempted is not None:  # the scheduler takes this node anyway
        signum, name = state.preempted.signum, state.preempted.name
        state = replace(state, preempted=None, is_interrupted=signum == SIGINT)
        return _leave(state, f"stopped by {name}", 128 + signum)
    state = replace(state, phase=Phase.STOPPING, over=True, checkpoint="")
    if not state.live:
        return state, (sweep(state),)
    return signal_ranks(state)


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
        return state, (*actions, *([Send(state.join)] if state.join else ()))  # StoreAt must come again
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
    """The first reason decides the exit code: after a stop signal, the agent exits with the code of that signal."""
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


def _stop_requested(state: Supervision, event: StopRequested) -> Step:
    # The interrupt of another node is not the first signal of this one: people type Ctrl-C on all nodes at once.
    is_repeated = state.finish is not None or (state.job_failed and not state.is_interrupted)
    if state.phase is Phase.STOPPING and is_repeated:
        return hurry(state)
    state = replace(state, preempted=None, is_interrupted=event.signum == SIGINT)
    return _leave(state, f"stopped by {event.name}", 128 + event.signum)


def _leave(state: Supervision, reason: str, exit_code: int) -> Step:
    """Leave the job because of a local decision: notify the service first, and do not wait for its reply."""
    state, actions = _finish(state, Finish(exit_code, reason))
    return state, (Send(AgentLeft(state.agent, reason, state.is_interrupted)), *actions)


# --- checkpoints and isolation ------------------------------------------------------------------


def _checkpoint_requested(state: Supervision, generation: int, reason: str) -> Step:
    mine = state.assignment
    if mine is None or generation != state.generation or state.over or state.checkpoint:
        return state, ()
    running = state.phase is Phase.RUNNING  # otherwise the ranks get the request when they start
    state = replace(state, checkpoint=reason)
    return state, _if(
        running and bool(state.live) and state.preempted is None,
        AskCheckpoint(mine, reason, has_deadline=False),
    )


def _checkpoint_signal(state: Supervision, event: CheckpointSignal) -> Step:
    """A second signal, or a signal while no rank runs, does not request a checkpoint; it has its usual effect."""
    able = state.phase is Phase.RUNNING and bool(state.live) and state.preempted is None
    if not able or state.assignment is None:
        return (state, ()) if event.stop is None else _stop_requested(state, event.stop)
    reason = f"{event.name}: the scheduler will preempt this node"
    return replace(state, preempted=event.stop), (AskCheckpoint(state.assignment, reason, has_deadline=True),)


def _checkpoint_over(state: Supervision, event: CheckpointOver) -> Step:
    if event.generation != state.generation or state.phase is not Phase.RUNNING:
        return state, ()
    wanted, stop = state.checkpoint, state.preempted
    state = replace(state, checkpoint="", preempted=None)
    told = _if(bool(wanted) and event.taken, Send(CheckpointTaken(state.agent, state.generation)))
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
