"""The state machine of one agent: decides what happens to the ranks of its node. Without I/O; `launcher.agent` runs it.

Theory of operation
-------------------
    Joining --StoreReached--> Running --Stop--> Stopping --swept--> Joining (next generation)
       |                         |                 |
       +---- Ended, Refused, a stop signal: running ranks are stopped first ----> Done

The agent reports to the service (`RankFailed`, `RanksFinished`, `AgentStopped`) and carries out its decisions
(`Assigned`, `StoreAt`, `Stop`, `Ended`). It does not decide anything about the job. Every stop follows the same steps:
signal the ranks, kill them when their time is over ("how ranks are stopped" below), kill the remaining child processes,
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
    NEXT: >joining AgentStopped AgentJoined OpenStore PrepareNode
    ENDS: >done Finish
    FAILED: RankFailed RanksFinished
    GRACE: SignalRanks AbortGroups StartGrace
    HURRY: SignalRanks Sweep
    PLACED: OpenStore PrepareNode

  | event               | Joining                       | Running                        | Stopping                 |
  | ------------------- | ----------------------------- | ------------------------------ | ------------------------ |
  | Waiting             | PARKED                        | STOPS Sweep                    | -                        |
  | Refused             | ENDS AgentJoined PARKED       | STOPS Sweep                    | ALL noted                |
  | Assigned            | PLACED noted PARKED           | STOPS Sweep                    | ALL noted                |
  | StoreAt             | STARTS ReachStore noted       | -                              | -                        |
  | CheckpointRequested | noted                         | AskCheckpoint noted            | -                        |
  | Examine             | Examined                      | Examined InspectRanks          | Examined                 |
  | Accused             | -                             | TakeStacks                     | -                        |
  | Notice              | -                             | -                              | -                        |
  | Stop                | PARKED AgentStopped Sweep     | STOPS RELEASE Sweep            | ALL noted                |
  | Ended               | ENDS PARKED                   | STOPS Sweep                    | ALL noted                |
  | GpusFound           | noted                         | noted                          | noted                    |
  | NodePrepared        | OpenStore ReachStore noted    | -                              | -                        |
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

In Joining and Stopping, ranks may be parked ("ranks that are paused instead of ended"): PARKED stops them with signals,
and ALL turns a stop in place into a stop of all ranks.

A test compares the table with the code.

Two replies of the service mean that the job continued without this node: `Waiting` while the ranks of this node run,
and a `Refused` that may be retried. In both cases the ranks of this node are stopped first.

Before a node starts its ranks, it connects to the store. If it cannot connect, it reports this as the failure of its
first rank. Then the service decides, and every node reports which two nodes cannot connect.

The service requests a checkpoint before the job grows. A scheduler's signal requests one before it takes this node.
After the checkpoint, the agent sends `CheckpointTaken` to the service, or stops as the signal requires. The agent makes
one decision alone: it stops ranks that make no progress while the service is unreachable for too long (`Isolated`, see
launcher/progress.py). It reports this when the service is reachable again. In a stop, a rank that was identified as the
cause of a hang gets a shorter grace period.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from launcher.exchange import (
    AbortGroups,
    Action,
    AgentEvent,
    AgentPhase,
    AskCheckpoint,
    CannotHeal,
    CheckpointOver,
    CheckpointSignal,
    CommunicationFailed,
    ConditionMet,
    Finish,
    GpusFound,
    Grace,
    GraceOver,
    Inspected,
    InspectLast,
    InspectRanks,
    Isolated,
    LastInspected,
    NodePrepared,
    OpenStore,
    PauseRanks,
    PrepareNode,
    RankEnded,
    RankHeals,
    RankParked,
    ReachStore,
    Send,
    SignalRanks,
    StacksTaken,
    StallDetected,
    StartFailed,
    StartGrace,
    StartRanks,
    Step,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    StoreReached,
    Supervision,
    Sweep,
    Swept,
    TakeStacks,
    ZygoteReplaced,
)
from rendezvous.values.cause_text import code_of_refusal
from rendezvous.values.contracts import TRY_AGAIN
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
    Examined,
    HealReady,
    Notice,
    RankFailed,
    RanksFinished,
    RanksStalled,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.types import Assignment, Cause, Decision, DecisionKind, FailureClass, StoreAddress


def step(state: Supervision, event: AgentEvent) -> Step:
    if state.phase is AgentPhase.DONE:
        return state, ()
    match event:
        case Assigned(assignment):
            return _assigned(state, assignment)
        case GpusFound() | NodePrepared():
            return _prepared(state, event)
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
            return pause(state, event)
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
    if state.phase is not AgentPhase.JOINING:  # the Stop message was lost
        state = replace(state, overtaken_by=assignment)
        if state.phase is AgentPhase.RUNNING:
            return begin_stopping(state)
        return (state, ()) if state.in_place and assignment.in_place else stop_after_all(state)
    if state.live and not (assignment.in_place and max(state.live) < assignment.nproc):
        return begin_stopping(replace(state, overtaken_by=assignment))
    missing = missing_ranks(state, assignment)
    frees_memory = state.has_gpus and state.assignment is not None and not assignment.in_place
    is_prepared = not (frees_memory or assignment.check_first)
    state = replace(state, assignment=assignment, store_told=False, store=None, over=False, stop_signal=0)
    state = replace(state, is_interrupted=False, is_hurried=False)
    state = replace(state, checkpoint="", preempted=None, accused=(), last_seen=(), is_prepared=is_prepared)
    if not is_prepared:
        return state, (*missing, PrepareNode(assignment, frees_memory))
    return state, (*missing, *_if(assignment.node_rank == 0, OpenStore(assignment.generation)))


def _prepared(state: Supervision, event: GpusFound | NodePrepared) -> Step:
    """The address of the store may have arrived in the meantime."""
    if isinstance(event, GpusFound):
        return replace(state, has_gpus=True), ()
    mine, store = state.assignment, state.store
    if mine is None or state.is_prepared or not state.awaits_store(event.generation):
        return state, ()
    state = replace(state, is_prepared=True)
    if mine.node_rank:
        return state, (() if store is None else (ReachStore(mine, store),))
    return state, (OpenStore(event.generation),)


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
    if not state.is_prepared:
        return state, ()
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
    state = replace(state, phase=AgentPhase.RUNNING, live=tuple(range(assignment.nproc)), parked=())
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
    if state.phase is AgentPhase.JOINING:
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
        if state.phase is AgentPhase.STOPPING:
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
    if state.phase is AgentPhase.RUNNING or (state.phase is AgentPhase.JOINING and state.live and stands_by):
        return begin_stopping(state)
    return state, ()


def _swept(state: Supervision, generation: int) -> Step:
    if state.phase is not AgentPhase.STOPPING or generation != state.generation or not state.has_stopped:
        return state, ()
    if state.finish is not None:
        return replace(state, phase=AgentPhase.DONE), (state.finish,)
    overtaken_by, rejoins = state.overtaken_by, state.rejoins
    state = replace(state, phase=AgentPhase.JOINING, overtaken_by=None, rejoins=False, in_place=False)
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
    running = state.phase is AgentPhase.RUNNING  # otherwise the ranks get the request when they start
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
    if event.generation != state.generation or state.phase is not AgentPhase.RUNNING:
        return state, ()
    wanted, stop = state.checkpoint, state.preempted
    state = replace(state, checkpoint="", preempted=None)
    told = _if(bool(wanted) and event.taken, Send(CheckpointTaken(state.agent, state.generation)))
    if stop is None:
        return state, told
    state, actions = stop_requested(state, stop)
    return state, (*told, *actions)


def _isolated(state: Supervision, reason: str) -> Step:
    if state.phase is AgentPhase.JOINING and state.live:  # parked ranks, which the job may have replaced
        return begin_stopping(state)
    if state.phase is not AgentPhase.RUNNING or state.assignment is None or not state.live:
        return state, ()
    report = failed_for(state, state.assignment, reason, FailureClass.NETWORK, TRY_AGAIN)
    released = release(state, reason)
    state, actions = begin_stopping(state)
    return state, (report, *released, *actions)


def _gave_up(state: Supervision, reason: str) -> Step:
    finish = state.finish or Finish(TRY_AGAIN, reason)
    return replace(state, phase=AgentPhase.DONE, live=(), parked=()), (
        Send(AgentLeft(state.agent, reason)),
        finish,
    )


# --- how a stop begins -----------------------------------------------------------------------------
#
# By an order, by a signal, or because the job continues without the node. A stop that has begun in place becomes a
# stop of all ranks if something happens that leaves the parked ranks no place.


def stop(state: Supervision, generation: int, decision: Decision) -> Step:
    """The order of the service. It may come twice, the second time with another decision."""
    if generation > state.generation and state.join is not None:  # it ended while this node was disconnected
        return _stop_missed(state, generation, decision, state.join)
    if generation != state.generation:
        return state, ()
    state = replace(state, job_failed=decision.kind is DecisionKind.FAIL)
    state = replace(state, is_interrupted=state.is_interrupted or decision.is_interrupt)
    if state.phase is AgentPhase.STOPPING:
        return (state, ()) if decision.in_place else stop_after_all(state)
    if state.phase is AgentPhase.JOINING and state.over and state.live and decision.in_place:
        return answer(state, generation)  # again: its ranks are parked, and nothing else is left
    # In Joining, the generation was stopped before its ranks started. Its store may already run.
    first = before_a_stop(state, decision)
    state, actions = begin_stopping(state, decision)
    return state, (*first, *actions)


def _stop_missed(state: Supervision, generation: int, decision: Decision, join: AgentJoined) -> Step:
    if state.phase is not AgentPhase.JOINING or (state.live and not decision.in_place):
        return given_up(state, join)
    return answer(replace(state, missed=generation, last_seen=()), generation)


def begin_stopping(state: Supervision, decision: Decision | None = None) -> Step:
    if state.preempted is not None:  # the scheduler takes this node anyway
        signum, name = state.preempted.signum, state.preempted.name
        state = replace(state, preempted=None, is_interrupted=signum == SIGINT)
        return leave(state, f"stopped by {name}", 128 + signum)
    state = replace(state, phase=AgentPhase.STOPPING, over=True, checkpoint="")
    if decision is not None and decision.in_place:
        return pause_ranks(state, why(decision))
    if not state.live:
        return state, (sweep(state),)
    return signal_ranks(state)


def given_up(state: Supervision, join: AgentJoined) -> Step:
    """The service has declared this node lost, and may have replaced it: stop its ranks."""
    if state.phase is AgentPhase.JOINING and not state.live:
        return state, (Send(join),)
    state = replace(state, rejoins=True, overtaken_by=None)
    return stop_after_all(state) if state.phase is AgentPhase.STOPPING else begin_stopping(state)


def finish(state: Supervision, action: Finish) -> Step:
    """The first reason decides the exit code: after a stop signal, the agent exits with the code of that signal."""
    if state.finish is None:
        state = replace(state, finish=action)
    assert state.finish is not None
    if state.phase is AgentPhase.STOPPING:
        return stop_after_all(state)
    if state.phase is AgentPhase.JOINING and not state.live:
        return replace(state, phase=AgentPhase.DONE), (state.finish,)
    return begin_stopping(state)


def stop_requested(state: Supervision, event: StopRequested) -> Step:
    # The interrupt of another node is not the first signal of this one: people type Ctrl-C on all nodes at once.
    is_repeated = state.finish is not None or (state.job_failed and not state.is_interrupted)
    if state.phase is AgentPhase.STOPPING and is_repeated:
        return hurry(state)
    state = replace(state, preempted=None, is_interrupted=event.signum == SIGINT)
    return leave(state, f"stopped by {event.name}", 128 + event.signum)


def leave(state: Supervision, reason: str, exit_code: int) -> Step:
    """Leave the job because of a local decision: notify the service first, and do not wait for its reply."""
    state, actions = finish(state, Finish(exit_code, reason))
    return state, (Send(AgentLeft(state.agent, reason, state.is_interrupted)), *actions)


# --- ranks that are paused instead of ended --------------------------------------------------------
#
# The agent's part of a heal in place.
#
# A rank *heals* while it is inside `State.run` of `ddp.elastic`: its guard can pause it. The agent tells the service
# when all live ranks of its node heal, and why a script never can (`HealReady`).
#
#     Stop(in_place)            ranks that heal are paused, the others get SIGTERM
#     RankParked                a rank has left its collectives, and waits
#     GraceOver                 a rank that has neither parked nor ended is killed
#     all have parked or ended  Sweep, which spares the parked ranks; then AgentStopped(parked)
#     StoreAt                   StartRanks: parked ranks continue, the missing ones are started
#
# So each rank is paused on its own. One that does not park in time is started again, as in a restart.
#
# Parked ranks are live. They continue only in a generation that is assigned in place. Every other way on stops them
# with signals first: a world without this node, the end of the job, a plain restart, a loss of contact. If a parked
# rank ends while its node waits for the next generation, it is started again there; that is not a failure of this
# generation. But the service must know: if it was the last one of the job, the new ranks would find no rank to join.
#
# A rank may park before it is asked to, because its collective has failed. The reason is usually the end of another
# rank, which the agent of that rank reports. If no stop follows, the agent reports the parked rank itself: otherwise
# ranks could wait for each other forever, for example after an error of the network.

_ENDED_PAUSED = "ended while it was paused"
_LOST_PEERS = "lost the connection to its peers, and no other failure was reported"


def pause(state: Supervision, event: RankHeals | CannotHeal | RankParked | GraceOver) -> Step:
    known = event.generation == state.generation
    if not known or (not isinstance(event, GraceOver) and event.local_rank not in state.live):
        return state, ()
    match event:
        case RankHeals(_, local_rank, heals) if state.phase is AgentPhase.RUNNING:
            return _rank_heals(state, local_rank, heals=heals)
        case CannotHeal(generation, _, reason) if state.phase is AgentPhase.RUNNING:
            return replace(state, is_ready=False), (Send(HealReady(state.agent, generation, False, reason)),)
        case RankParked(_, local_rank) if local_rank not in state.parked:
            return _rank_parked(state, local_rank)
        case GraceOver():
            return _unasked(state)
        case _:
            return state, ()


def _rank_heals(state: Supervision, local_rank: int, *, heals: bool) -> Step:
    others = tuple(rank for rank in state.heals if rank != local_rank)
    return report_ready(replace(state, heals=tuple(sorted((*others, local_rank))) if heals else others))


def report_ready(state: Supervision) -> Step:
    """Tell the service if this has changed: whether all live ranks can be paused."""
    is_ready = set(state.live) == set(state.heals)
    if state.phase is not AgentPhase.RUNNING or not state.live or is_ready == state.is_ready:
        return state, ()
    told = Send(HealReady(state.agent, state.generation, is_ready))
    return replace(state, is_ready=is_ready), (told,)


def _rank_parked(state: Supervision, local_rank: int) -> Step:
    state = replace(state, parked=tuple(sorted((*state.parked, local_rank))))
    if state.phase is AgentPhase.RUNNING:
        return state, (StartGrace(state.generation, Grace.UNASKED),)
    return sweep_in_place(state)


def answer(state: Supervision, generation: int) -> Step:
    """Tell the service that the ranks of this generation are parked or reaped."""
    return state, (Send(AgentStopped(state.agent, generation, state.last_seen, state.parked)),)


def missing_ranks(state: Supervision, assignment: Assignment) -> tuple[Action, ...]:
    """The service counts on paused ranks of this node that have ended meanwhile: report their end in this world."""
    lost = (rank for rank in assignment.parked if rank not in state.parked)
    node, failure = state.agent.node, FailureClass.EXIT_CODE
    causes = (Cause(node, assignment.rank_offset + i, i, failure, _ENDED_PAUSED, exit_code=1) for i in lost)
    return tuple(Send(RankFailed(state.agent, assignment.generation, cause)) for cause in causes)


def parked_rank_ended(state: Supervision, event: RankEnded, assignment: Assignment) -> Step:
    """A parked rank, which is no longer live, has ended before it continued. `state` is that of a node that waits."""
    if state.over:  # no later world is known
        return answer(state, max(state.generation, state.missed))
    rank, node = assignment.rank_offset + event.local_rank, state.agent.node
    cause = event.cause or Cause(
        node, rank, event.local_rank, FailureClass.EXIT_CODE, _ENDED_PAUSED, exit_code=1
    )
    return state, (Send(RankFailed(state.agent, state.generation, replace(cause, rank=rank))),)


def _unasked(state: Supervision) -> Step:
    """Report a rank that has parked although no failure was reported."""
    mine = state.assignment
    if mine is None or state.phase is not AgentPhase.RUNNING or not state.parked:
        return state, ()
    first = min(state.parked)
    failure = FailureClass.CONSEQUENCE
    cause = Cause(state.agent.node, mine.rank_offset + first, first, failure, _LOST_PEERS, exit_code=1)
    return state, (Send(RankFailed(state.agent, state.generation, cause)),)


# --- the stop in place -----------------------------------------------------------------------------


def pause_ranks(state: Supervision, reason: str) -> Step:
    """Begin: the ranks that cannot be paused, and those that are the cause of a hang, are ended."""
    generation = state.generation
    running = [rank for rank in state.live if rank not in state.parked]
    paused = tuple(rank for rank in running if rank in state.heals and rank not in state.accused_ranks)
    others = tuple(rank for rank in running if rank not in paused)
    state = replace(state, in_place=True, is_sweeping=False, stop_signal=SIGTERM)
    if state.has_stopped:
        return sweep_in_place(state)
    actions: list[Action] = []
    if paused:
        actions.append(PauseRanks(generation, paused, reason))
    if others:
        actions += [SignalRanks(SIGTERM, others), AbortGroups(generation, reason, others)]
    if state.accused:
        actions.append(StartGrace(generation, Grace.OF_ACCUSED))
    return state, (*actions, StartGrace(generation))


def sweep_in_place(state: Supervision) -> Step:
    """Sweep when no rank runs, and once only: the zygote may start new ranks after the first sweep."""
    if not state.in_place or state.is_sweeping or not state.has_stopped:
        return state, ()
    return replace(state, is_sweeping=True), (sweep(state),)


def stop_after_all(state: Supervision) -> Step:
    """End all ranks: the stop was in place, and its ranks have no place any more."""
    if not state.in_place:
        return state, ()
    state = replace(state, in_place=False, is_sweeping=False)
    return signal_ranks(state) if state.live else (state, ())


# --- how ranks are stopped -------------------------------------------------------------------------
#
# Which signal they get, and how long they have.
#
#     Ctrl-C    SIGINT --2/3 of T--> release of collectives --T--> SIGTERM --5 s--> SIGKILL
#     any other stop       SIGTERM --------------------------T--> SIGKILL
#
# T is `--shutdown-timeout`. Python turns SIGINT into KeyboardInterrupt, so that `except`, `finally` and `atexit` run.
# The default action for SIGTERM ends the process at once. After a failure this is wanted: a rank that waits in a
# collective ends without delay, and the restart can begin. A rank that has work to do before its end handles SIGTERM,
# and has T.
#
# After Ctrl-C all ranks may still communicate, for example to write a checkpoint together. But a rank that waits in a
# collective for a rank that has ended does not see the interrupt. So after two thirds of the time its collective is
# aborted. It then returns to Python, and can still save.
#
# A second stop signal kills the ranks at once. See docs/decisions/0003.
#
# In a stop in place, ranks that are paused get no signal before T, and those that have parked none at all.

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
    if fact.generation != state.generation or state.phase is not AgentPhase.STOPPING or not state.live:
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


# --- hangs -----------------------------------------------------------------------------------------
#
# The agent's part of a hang inquiry.
#
# The agent reports that a rank has stalled (`RanksStalled`), reports the state of each rank on request (`Examined`),
# and takes the stacks of the culprit before it reports its failure (`RankFailed`). The service names the culprit,
# because it receives the reports of all agents. An agent without ranks replies at once, so that the service does not
# wait for it.
#
# The reason for a stop may be only the consequence of an earlier failure. Then the agent reads the status pages of
# its ranks again before it stops them, and sends the result with `AgentStopped`; see
# rendezvous/diagnosing/diagnosis.py.

_PEERS_STAY = (
    DecisionKind.GROW,
    DecisionKind.FINISH,
)  # until the stop: the ranks may still finish together


def inquire(
    state: Supervision,
    event: Examine | Accused | StallDetected | Inspected | StacksTaken | CommunicationFailed | ConditionMet,
) -> Step:
    agent, generation = state.agent, event.generation
    if generation != state.generation or state.phase is not AgentPhase.RUNNING:
        silent = Send(Examined(agent, generation, ()))
        return state, ((silent,) if isinstance(event, Examine | Inspected) else ())
    match event:
        case StallDetected():
            return state, (Send(RanksStalled(agent, generation)),)
        case Examine():
            return state, (InspectRanks(generation),)
        case Inspected(_, reports):
            return state, (Send(Examined(agent, generation, reports)),)
        case Accused(_, cause):
            return replace(state, accused=(*state.accused, cause)), (TakeStacks(generation, cause),)
        case StacksTaken(_, cause) | CommunicationFailed(_, cause) | ConditionMet(_, cause):
            return state, (Send(RankFailed(agent, generation, cause)),)
        case _:
            assert_never(event)


def before_a_stop(state: Supervision, decision: Decision) -> tuple[Action, ...]:
    """Actions before the ranks are stopped: a rank of the generation is lost, so no collective can complete."""
    if decision.kind in _PEERS_STAY or decision.is_interrupt:
        return ()
    looks = (
        decision.cause is not None
        and decision.cause.may_be_a_consequence
        and state.phase is AgentPhase.RUNNING
    )
    released = () if decision.in_place else release(state, why(decision))  # in place, a pause releases them
    return (*((InspectLast(state.generation),) if looks else ()), *released)


def release(state: Supervision, reason: str) -> tuple[Action, ...]:
    running = state.phase is AgentPhase.RUNNING and bool(state.live)
    return (AbortGroups(state.generation, reason),) if running else ()


def why(decision: Decision) -> str:
    cause = decision.cause
    who = f"rank {cause.rank} on {cause.node}" if cause is not None and not cause.uncertain else ""
    return f"{who}: {cause.reason}" if cause is not None and who else decision.reason


# --- no rank can start, or the zygote is lost ------------------------------------------------------


def failed_for(
    state: Supervision, assignment: Assignment, reason: str, failure: FailureClass, exit_code: int
) -> Action:
    """Report a failure of the node as the failure of its first rank, because no rank is running."""
    cause = Cause(state.agent.node, assignment.rank_offset, 0, failure, reason, exit_code)
    return Send(RankFailed(state.agent, assignment.generation, cause))


def cannot_start(
    state: Supervision, assignment: Assignment, reason: str, failure: FailureClass, exit_code: int
) -> Step:
    """Report the failure, and that the node has stopped.

    The service may ignore the failure, but must not wait for the ranks of this node.
    """
    report = failed_for(state, assignment, reason, failure, exit_code)
    state, stopped = answer(replace(state, last_seen=()), assignment.generation)
    return replace(state, over=True), (report, *stopped)


def store_lost(state: Supervision, event: StoreLost) -> Step:
    """Fail this generation at once: ranks that connect later would wait for the store until its timeout."""
    mine = state.assignment
    if mine is None or event.generation != state.generation or state.over:
        return state, ()
    if state.phase is AgentPhase.RUNNING:
        return state, (failed_for(state, mine, event.reason, FailureClass.NETWORK, TRY_AGAIN),)
    return cannot_start(state, mine, event.reason, FailureClass.NETWORK, TRY_AGAIN)


def zygote_replaced(state: Supervision, event: ZygoteReplaced) -> Step:
    match state.phase:
        case AgentPhase.JOINING if state.assignment is not None and state.assignment.node_rank == 0:
            return _store_lost_with_zygote(state, state.assignment, event)
        case AgentPhase.STOPPING if not state.live:
            return state, (sweep(state),)
        case _:
            return state, ()


def _store_lost_with_zygote(state: Supervision, assignment: Assignment, event: ZygoteReplaced) -> Step:
    """Fail this generation if other nodes have the store's address: their ranks would wait for the lost store."""
    if state.over:
        return state, ()
    if not state.store_told:
        return state, _if(state.is_prepared, OpenStore(assignment.generation))
    return cannot_start(state, assignment, event.reason, FailureClass.SIGNAL, event.exit_code)
