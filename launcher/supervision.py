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

    STARTS: >running StartRanks AskCheckpoint HealReady
    CANNOT: RankFailed AgentStopped
    STOPS: >stopping SignalRanks StartGrace AgentLeft
    RELEASE: AbortGroups PauseRanks InspectLast
    PARKED: >stopping SignalRanks StartGrace
    ALL: SignalRanks StartGrace
    NEXT: >joining AgentStopped AgentJoined ChangeSources OpenStore
    ENDS: >done Finish
    FAILED: RankFailed RanksFinished
    GRACE: SignalRanks AbortGroups StartGrace
    HURRY: SignalRanks Sweep
    PLACED: ChangeSources OpenStore

  | event               | Joining                       | Running                        | Stopping                 |
  | ------------------- | ----------------------------- | ------------------------------ | ------------------------ |
  | Waiting             | PARKED                        | STOPS Sweep                    | -                        |
  | Refused             | ENDS AgentJoined PARKED       | STOPS Sweep                    | ALL noted                |
  | Assigned            | PLACED noted PARKED           | STOPS Sweep                    | ALL noted                |
  | StoreAt             | STARTS ReachStore             | -                              | -                        |
  | CheckpointRequested | noted                         | AskCheckpoint noted            | -                        |
  | Examine             | Examined                      | Examined InspectRanks          | Examined                 |
  | Accused             | -                             | TakeStacks                     | -                        |
  | Notice              | -                             | -                              | -                        |
  | Stop                | PARKED AgentStopped Sweep     | STOPS RELEASE Sweep            | ALL noted                |
  | Ended               | ENDS PARKED                   | STOPS Sweep                    | ALL noted                |
  | StoreListens        | StoreOpened                   | -                              | -                        |
  | StoreFailed         | ENDS AgentLeft PARKED         | -                              | -                        |
  | StoreLost           | CANNOT                        | RankFailed                     | -                        |
  | StoreReached        | STARTS CANNOT                 | -                              | -                        |
  | RankEnded           | RankFailed AgentStopped       | FAILED HealReady noted         | RankFailed Sweep noted   |
  | RankHeals           | -                             | HealReady noted                | -                        |
  | CannotHeal          | -                             | HealReady                      | -                        |
  | RankParked          | -                             | StartGrace                     | Sweep noted              |
  | Swept               | -                             | -                              | ENDS NEXT                |
  | GraceOver           | -                             | RankFailed                     | GRACE                    |
  | StopRequested       | ENDS AgentLeft PARKED         | STOPS Sweep                    | AgentLeft HURRY ALL      |
  | CheckpointSignal    | ENDS AgentLeft PARKED         | STOPS AskCheckpoint Sweep      | AgentLeft HURRY ALL      |
  | CheckpointOver      | -                             | STOPS CheckpointTaken Sweep    | -                        |
  | Isolated            | PARKED                        | STOPS AbortGroups RankFailed   | -                        |
  | StallDetected       | -                             | RanksStalled                   | -                        |
  | Inspected           | Examined                      | Examined                       | Examined                 |
  | LastInspected       | noted                         | noted                          | noted                    |
  | StacksTaken         | -                             | RankFailed                     | -                        |
  | CommunicationFailed | -                             | RankFailed                     | -                        |
  | ConditionMet        | -                             | RankFailed                     | -                        |
  | ZygoteReplaced      | CANNOT OpenStore              | -                              | Sweep                    |
  | StartFailed         | ENDS AgentLeft                | ENDS AgentLeft                 | ENDS AgentLeft           |

In Joining and Stopping, ranks may be parked (launcher/pausing.py): PARKED stops them with signals, and ALL turns a stop
in place into a stop of all ranks.

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

from launcher import pausing
from launcher.exchange import (
    Action,
    AgentEvent,
    AskCheckpoint,
    CannotHeal,
    ChangeSources,
    CheckpointOver,
    CheckpointSignal,
    CommunicationFailed,
    ConditionMet,
    Finish,
    Grace,
    GraceOver,
    Inspected,
    Isolated,
    LastInspected,
    OpenStore,
    RankEnded,
    RankHeals,
    RankParked,
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
from launcher.health.hang_inquiry import inquire, release
from launcher.pausing import (
    answer,
    missing_ranks,
    parked_rank_ended,
    report_ready,
    stop_after_all,
    sweep_in_place,
)
from launcher.start_failure import cannot_start, failed_for, store_lost, zygote_replaced
from launcher.stop_sequence import grace_over, sweep
from launcher.stopping import begin_stopping, finish, given_up, leave, stop, stop_requested
from launcher.supervised import Phase, Step, Supervision
from rendezvous.values.events import (
    Accused,
    AgentLeft,
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
from rendezvous.values.outcome_codes import code_of_refusal
from rendezvous.values.types import Assignment, Cause, FailureClass, StoreAddress

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
            return leave(state, reason, TRY_AGAIN) if state.awaits_store(generation) else (state, ())
        case StoreLost():
            return store_lost(state, event)
        case StoreAt(generation, store):
            return _store_at(state, generation, store)
        case StoreReached():
            return _store_reached(state, event)
        case RankEnded():
            return _rank_ended(state, event)
        case Stop(generation, decision):
            return stop(state, generation, decision)
        case RankHeals() | CannotHeal() | RankParked() | GraceOver(kind=Grace.UNASKED):
            return pausing.pause(state, event)
        case GraceOver():
            return grace_over(state, event)
        case Swept(generation):
            return _swept(state, generation)
        case Ended(outcome):
            return finish(state, Finish(outcome.exit_code, outcome.reason, outcome))
        case Refused(retryable=True) if state.join is not None:
            return given_up(state, state.join)
        case Refused(reason, exit_code):
            return finish(state, Finish(exit_code, reason, code=code_of_refusal(event)))
        case StopRequested():
            return stop_requested(state, event)
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
        case ConditionMet():
            return inquire(state, event)
        case LastInspected(generation, reports):
            return (state if generation != state.generation else replace(state, last_seen=reports)), ()
        case Notice():
            return state, ()
        case Waiting(stands_by=stands_by):
            return _waiting(state, stands_by=stands_by)
        case _:
            assert_never(event)


def _if(condition: bool, *actions: Action) -> tuple[Action, ...]:
    return actions if condition else ()


def _assigned(state: Supervision, assignment: Assignment) -> Step:
    if assignment.generation <= state.generation:
        return state, ()
    if state.phase is not Phase.JOINING:  # the Stop message was lost
        state = replace(state, overtaken_by=assignment)
        if state.phase is Phase.RUNNING:
            return begin_stopping(state)
        return (state, ()) if state.in_place and assignment.in_place else stop_after_all(state)
    is_other = (0 if state.assignment is None else state.assignment.edition) != assignment.edition
    if state.live and (is_other or not (assignment.in_place and max(state.live) < assignment.nproc)):
        return begin_stopping(replace(state, overtaken_by=assignment))
    missing = missing_ranks(state, assignment)
    sources = _if(is_other, ChangeSources(assignment.kept_from))
    state = replace(state, assignment=assignment, store_told=False, store=None, over=False, stop_signal=0)
    state = replace(state, is_interrupted=False, is_hurried=False)
    state = replace(state, checkpoint="", preempted=None, accused=(), last_seen=())
    return state, (*missing, *sources, *_if(assignment.node_rank == 0, OpenStore(assignment.generation)))


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
    kept = state.live  # all of them are parked
    state = replace(state, phase=Phase.RUNNING, live=tuple(range(assignment.nproc)), parked=())
    state = replace(state, kept=kept, heals=kept, is_ready=False)
    asked = _if(bool(state.checkpoint), AskCheckpoint(assignment, state.checkpoint, has_deadline=False))
    state, told = report_ready(state)
    return state, (StartRanks(assignment, store, kept), *asked, *told)


def _rank_ended(state: Supervision, event: RankEnded) -> Step:
    """The report of a rank that kept its process may name an older generation, if its end and a heal crossed."""
    is_late = event.generation < state.generation and event.local_rank in (*state.kept, *state.parked)
    if event.local_rank not in state.live or not (is_late or event.generation == state.generation):
        return state, ()
    state, mine = _without(state, event.local_rank), state.assignment
    if mine is None:
        return state, ()
    if state.phase is Phase.JOINING:
        return parked_rank_ended(state, event, mine)
    state, told = report_ready(state)  # first: it may be the only rank that could not be paused
    actions: list[Action] = [*told]
    if event.cause is not None:
        rank = mine.rank_offset + event.local_rank
        cause = replace(event.cause, rank=rank) if is_late else _why(state, event.cause)
        actions.append(Send(RankFailed(state.agent, state.generation, cause)))
    if state.in_place:
        state, swept = sweep_in_place(state)
        return state, (*actions, *swept)
    if not state.live:
        if state.phase is Phase.STOPPING:
            actions.append(sweep(state))
        else:  # also if the service ignored the failure of some of them
            actions.append(Send(RanksFinished(state.agent, state.generation)))
    return state, tuple(actions)


def _why(state: Supervision, end: Cause) -> Cause:
    """A rank that ends while its stacks are taken is still the one that hung. How it ended is added."""
    hang = next((cause for cause in state.accused if cause.local_rank == end.local_rank), None)
    return end if hang is None else replace(hang, traceback=end.traceback or end.reason)


def _without(state: Supervision, local_rank: int) -> Supervision:
    live, heals, parked = (
        tuple(rank for rank in ranks if rank != local_rank)
        for ranks in (state.live, state.heals, state.parked)
    )
    return replace(state, live=live, heals=heals, parked=parked)


def _waiting(state: Supervision, *, stands_by: bool) -> Step:
    """While ranks of this node run, the other nodes have left their generation. Parked ranks may wait for others."""
    if state.phase is Phase.RUNNING or (state.phase is Phase.JOINING and state.live and stands_by):
        return begin_stopping(state)
    return state, ()


def _swept(state: Supervision, generation: int) -> Step:
    if state.phase is not Phase.STOPPING or generation != state.generation or not state.has_stopped:
        return state, ()
    if state.finish is not None:
        return replace(state, phase=Phase.DONE), (state.finish,)
    overtaken_by, rejoins = state.overtaken_by, state.rejoins
    state = replace(state, phase=Phase.JOINING, overtaken_by=None, rejoins=False, in_place=False)
    if rejoins and state.join is not None:
        return state, (Send(state.join),)
    if overtaken_by is not None:
        state, actions = _assigned(state, overtaken_by)
        return state, (*actions, *([Send(state.join)] if state.join else ()))  # StoreAt must come again
    return answer(state, generation)


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
    if not (state.trains_undisturbed and state.live) or state.assignment is None:
        return (state, ()) if event.stop is None else stop_requested(state, event.stop)
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
    state, actions = stop_requested(state, stop)
    return state, (*told, *actions)


def _isolated(state: Supervision, reason: str) -> Step:
    if state.phase is Phase.JOINING and state.live:  # parked ranks, which the job may have replaced
        return begin_stopping(state)
    if state.phase is not Phase.RUNNING or state.assignment is None or not state.live:
        return state, ()
    report = failed_for(state, state.assignment, reason, FailureClass.NETWORK, TRY_AGAIN)
    released = release(state, reason)
    state, actions = begin_stopping(state)
    return state, (report, *released, *actions)


def _gave_up(state: Supervision, reason: str) -> Step:
    finish = state.finish or Finish(TRY_AGAIN, reason)
    return replace(state, phase=Phase.DONE, live=(), parked=()), (
        Send(AgentLeft(state.agent, reason)),
        finish,
    )
