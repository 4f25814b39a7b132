"""The whole table of the supervision machine, and what no order of facts may bring about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.exchange import (
    AbortGroups,
    Action,
    AgentEvent,
    AskCheckpoint,
    CheckpointOver,
    CheckpointSignal,
    CommunicationFailed,
    Finish,
    GpusFound,
    GraceOver,
    Isolated,
    NodePrepared,
    OpenStore,
    PrepareNode,
    RankEnded,
    ReachStore,
    Send,
    SignalRanks,
    StartFailed,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreReached,
    Sweep,
    Swept,
    ZygoteReplaced,
)
from launcher.supervision import SIGKILL, SIGTERM, AgentPhase, Supervision, step
from rendezvous.values.error_codes import Code
from rendezvous.values.events import (
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    CheckpointTaken,
    Ended,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    Doubt,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    StoreAddress,
)

AGENT = AgentId("a", "1")
STORE = StoreAddress("a", 29500)
CAUSE = Cause("a", 0, 0, FailureClass.EXIT_CODE, "exit code 5", 5)
OUTCOME = Outcome(False, "no restarts are allowed (--max-restarts 0)", 5, CAUSE)
FAILED = Finish(5, OUTCOME.reason, OUTCOME)
STOPPED = Finish(143, "stopped by SIGTERM")


def assignment(generation: int = 1, node_rank: int = 0) -> Assignment:
    return Assignment(generation, node_rank, 2, 2 * node_rank, 2, 4, "default", 0, 4, 0, 3, "a")


def restart(generation: int = 1) -> Stop:
    return Stop(generation, Decision(DecisionKind.RESTART, "again", generation, CAUSE))


def fail(generation: int = 1) -> Stop:
    return Stop(generation, Decision(DecisionKind.FAIL, "enough", generation, CAUSE))


NEW = Supervision(AGENT)
SEALED = replace(NEW, assignment=assignment())
TOLD = replace(SEALED, store_told=True)
REACHING = replace(NEW, assignment=assignment(node_rank=1), store=STORE)
RUNNING = replace(TOLD, store=STORE, phase=AgentPhase.RUNNING, live=(0, 1))
LAST = replace(RUNNING, live=(1,))
IDLE = replace(RUNNING, live=())
STOPPING = replace(RUNNING, phase=AgentPhase.STOPPING, over=True, stop_signal=SIGTERM)
LAST_STOPPING = replace(STOPPING, live=(1,))
SWEEPING = replace(STOPPING, live=())
LEAVING = replace(STOPPING, finish=STOPPED)
REJOINING = replace(SWEEPING, phase=AgentPhase.JOINING)
DONE = replace(SWEEPING, phase=AgentPhase.DONE, finish=STOPPED)

BROKEN = AbortGroups(1, f"rank {CAUSE.rank} on {CAUSE.node}: {CAUSE.reason}")
CUT = AbortGroups(1, "cut off")
TERM = (SignalRanks(SIGTERM), StartGrace(1))
KILL = (SignalRanks(SIGKILL),)
GOODBYE = Send(AgentLeft(AGENT, STOPPED.reason))
LOST = ZygoteReplaced("the zygote was lost", 137)
CANNOT = StartFailed("no rank can be started here")
GIVES_UP = (Send(AgentLeft(AGENT, CANNOT.reason)), Finish(75, CANNOT.reason))
ASK = AskCheckpoint(assignment(), "more nodes", has_deadline=False)
ASK_HURRIED = AskCheckpoint(assignment(), "SIGUSR1: the scheduler will preempt this node", has_deadline=True)
UNREACHED = Send(RankFailed(AGENT, 1, Cause("a", 2, 0, FailureClass.NETWORK, "no route", 75)))
CUT_OFF = Send(RankFailed(AGENT, 1, Cause("a", 0, 0, FailureClass.NETWORK, "cut off", 75)))
REAPED = Send(AgentStopped(AGENT, 1))
ZYGOTE_CAUSE = Cause("a", 0, 0, FailureClass.SIGNAL, LOST.reason, 137)

# fact -> what is done about it in each state; a state that is not named does nothing
STATES = {
    "new": NEW,
    "sealed": SEALED,
    "told": TOLD,
    "reaching": REACHING,
    "running": RUNNING,
    "last": LAST,
    "idle": IDLE,
    "stopping": STOPPING,
    "last stopping": LAST_STOPPING,
    "sweeping": SWEEPING,
    "leaving": LEAVING,
    "rejoining": REJOINING,
    "done": DONE,
}
JOINING = ("new", "sealed", "told", "reaching", "rejoining")
ENDS = {name: (Finish(5, OUTCOME.reason, OUTCOME),) for name in JOINING}
LEFT_BEHIND = {**dict.fromkeys(("running", "last"), TERM), "idle": (Sweep(1),)}
TABLE: list[tuple[AgentEvent, dict[str, tuple[Action, ...]]]] = [
    (Waiting("more nodes", 1, 2), LEFT_BEHIND),
    (Assigned(assignment(1)), {"new": (OpenStore(1),)}),
    (Assigned(assignment(2)), {**dict.fromkeys(JOINING, (OpenStore(2),)), **LEFT_BEHIND}),
    (Assigned(assignment(2, node_rank=1)), LEFT_BEHIND),
    (
        StoreListens(1, STORE),
        dict.fromkeys(("sealed", "told", "reaching"), (Send(StoreOpened(AGENT, 1, STORE)),)),
    ),
    (StoreListens(0, STORE), {}),
    (
        StoreFailed(1, "port in use"),
        dict.fromkeys(
            ("sealed", "told", "reaching"), (Send(AgentLeft(AGENT, "port in use")), Finish(75, "port in use"))
        ),
    ),
    (StoreFailed(0, "port in use"), {}),
    (StoreAt(1, STORE), dict.fromkeys(("sealed", "told"), (StartRanks(assignment(), STORE),))),
    (StoreAt(0, STORE), {}),
    (StoreReached(1), {"reaching": (StartRanks(assignment(node_rank=1), STORE),)}),
    (StoreReached(1, "no route"), {"reaching": (UNREACHED, REAPED)}),
    (StoreReached(0, "no route"), {}),
    (CheckpointRequested(1, "more nodes"), dict.fromkeys(("running", "last"), (ASK,))),
    (CheckpointRequested(0, "more nodes"), {}),
    (CheckpointOver(1, taken=True), {}),
    (CheckpointOver(0, taken=True), {}),
    (CheckpointSignal("SIGUSR1", None), dict.fromkeys(("running", "last"), (ASK_HURRIED,))),
    (Isolated("cut off"), dict.fromkeys(("running", "last"), (CUT_OFF, CUT, *TERM))),
    (RankEnded(1, 1, None), {"last": (Send(RanksFinished(AGENT, 1)),), "last stopping": (Sweep(1),)}),
    (
        RankEnded(1, 1, CAUSE),
        {
            **dict.fromkeys(("running", "stopping", "leaving"), (Send(RankFailed(AGENT, 1, CAUSE)),)),
            "last": (Send(RankFailed(AGENT, 1, CAUSE)), Send(RanksFinished(AGENT, 1))),
            "last stopping": (Send(RankFailed(AGENT, 1, CAUSE)), Sweep(1)),
        },
    ),
    (RankEnded(0, 1, CAUSE), {}),
    (RankEnded(1, 7, CAUSE), {}),
    (
        restart(),
        {
            **dict.fromkeys(("running", "last"), (BROKEN, *TERM)),
            **dict.fromkeys(("sealed", "told", "reaching", "idle", "rejoining"), (Sweep(1),)),
        },
    ),
    (
        fail(),
        {
            **dict.fromkeys(("running", "last"), (BROKEN, *TERM)),
            **dict.fromkeys(("sealed", "told", "reaching", "idle", "rejoining"), (Sweep(1),)),
        },
    ),
    (restart(0), {}),
    (GraceOver(1), dict.fromkeys(("stopping", "last stopping", "leaving"), KILL)),
    (GraceOver(0), {}),
    (Swept(1), {"sweeping": (Send(AgentStopped(AGENT, 1)),)}),
    (Swept(0), {}),
    (Ended(OUTCOME), {**ENDS, **dict.fromkeys(("running", "last"), TERM), "idle": (Sweep(1),)}),
    (
        Refused("other spec", 78),
        {
            **dict.fromkeys(JOINING, (Finish(78, "other spec", code=Code.REJECTED),)),
            **dict.fromkeys(("running", "last"), TERM),
            "idle": (Sweep(1),),
        },
    ),
    (
        StopRequested(15, "SIGTERM"),
        {
            **dict.fromkeys(JOINING, (GOODBYE, STOPPED)),
            **dict.fromkeys(("running", "last"), (GOODBYE, *TERM)),
            "idle": (GOODBYE, Sweep(1)),
            **dict.fromkeys(("stopping", "last stopping", "sweeping"), (GOODBYE,)),
            "leaving": KILL,
        },
    ),
    (
        LOST,
        {
            "sealed": (OpenStore(1),),
            "told": (Send(RankFailed(AGENT, 1, ZYGOTE_CAUSE)), REAPED),
            "sweeping": (Sweep(1),),
        },
    ),
    (
        CANNOT,
        {
            **dict.fromkeys((name for name in STATES if name not in ("done", "leaving")), GIVES_UP),
            "leaving": (Send(AgentLeft(AGENT, CANNOT.reason)), STOPPED),
        },
    ),
]
CELLS = [(state, fact, answers.get(state, ())) for fact, answers in TABLE for state in STATES]


@pytest.mark.parametrize(
    ("name", "fact", "expected"), CELLS, ids=lambda v: v if isinstance(v, str) else type(v).__name__
)
def test_table(name: str, fact: AgentEvent, expected: tuple[Action, ...]) -> None:
    after, actions = step(STATES[name], fact)
    assert actions == expected
    if isinstance(fact, RankEnded) and fact.generation == 1:
        assert after.live == tuple(rank for rank in STATES[name].live if rank != fact.local_rank)
    if any(isinstance(action, Finish) for action in actions):
        assert after.phase is AgentPhase.DONE


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize(
    "fact",
    [fact for fact, _ in TABLE if getattr(fact, "generation", 1) == 0],
    ids=lambda fact: type(fact).__name__,
)
def test_other_generations_change_nothing(name: str, fact: AgentEvent) -> None:
    assert step(STATES[name], fact) == (STATES[name], ())


def test_signal_while_a_failed_job_stops_only_hurries_it() -> None:
    state, _ = step(RUNNING, fail())
    state, actions = step(state, StopRequested(2, "SIGINT"))
    assert actions == KILL
    assert state.finish is None  # the outcome is still to come, and is told


def test_a_failed_generation_that_is_restarted_starts_clean() -> None:
    state, _ = run(RUNNING, RankEnded(1, 0, CAUSE), restart(), RankEnded(1, 1, None), Swept(1))
    state, _ = run(state, Assigned(assignment(2)), StoreListens(2, STORE), StoreAt(2, STORE))
    state, actions = run(state, RankEnded(2, 0, None), RankEnded(2, 1, None))
    assert actions == [Send(RanksFinished(AGENT, 2))]


def test_first_word_counts_when_several_end_the_job() -> None:
    _, actions = run(
        RUNNING, StopRequested(15, "SIGTERM"), Ended(OUTCOME), RankEnded(1, 0, None), RankEnded(1, 1, None)
    )
    assert actions[-1] == Sweep(1)
    _, actions = run(replace(LEAVING, live=()), Ended(OUTCOME), Swept(1))
    assert actions == [STOPPED]


def run(state: Supervision, *facts: AgentEvent) -> tuple[Supervision, list[Action]]:
    actions: list[Action] = []
    for fact in facts:
        state, more = step(state, fact)
        actions += more
    return state, actions


GENERATIONS = st.sampled_from((1, 1, 1, 1, 2, 2, 0))  # mostly to the point
CAUSES = st.sampled_from((None, CAUSE))
FACTS: st.SearchStrategy[AgentEvent] = st.one_of(
    st.builds(Assigned, st.builds(assignment, GENERATIONS, st.integers(0, 1))),
    st.builds(StoreListens, GENERATIONS, st.just(STORE)),
    st.builds(StoreFailed, GENERATIONS, st.just("port in use")),
    st.builds(StoreAt, GENERATIONS, st.just(STORE)),
    st.builds(StoreReached, GENERATIONS, st.sampled_from(("", "no route"))),
    st.builds(CheckpointRequested, GENERATIONS, st.just("more nodes")),
    st.builds(CheckpointOver, GENERATIONS, st.booleans()),
    st.just(CheckpointSignal("SIGUSR1", None)),
    st.just(CheckpointSignal("SIGTERM", StopRequested(15, "SIGTERM"))),
    st.just(Isolated("cut off")),
    st.builds(RankEnded, GENERATIONS, st.integers(0, 1), CAUSES),
    st.builds(restart, GENERATIONS),
    st.builds(fail, GENERATIONS),
    st.builds(GraceOver, GENERATIONS),
    st.builds(Swept, GENERATIONS),
    st.just(Ended(OUTCOME)),
    st.just(Refused("other spec", 78)),
    st.just(StopRequested(15, "SIGTERM")),
    st.just(LOST),
    st.just(CANNOT),
    st.just(Waiting("more nodes", 1, 2)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(FACTS, max_size=40))
def test_no_order_of_facts_breaks_a_promise(facts: list[AgentEvent]) -> None:
    state, started, finished = NEW, list[int](), False
    for fact in facts:
        before = state
        state, actions = step(state, fact)
        assert not (finished and actions), "nothing is done after the end"
        for action in actions:
            match action:
                case StartRanks(given_assignment):
                    started.append(given_assignment.generation)
                case Send(AgentStopped()):
                    assert isinstance(fact, Swept)
                    assert not before.live
                case Send(RanksFinished()):
                    assert not state.live
                    assert not state.failed
                case Sweep() | Finish():
                    assert not state.live
                    finished = finished or isinstance(action, Finish)
    assert len(set(started)) == len(started), "a generation's ranks are started once"
    assert started == sorted(started)


@settings(max_examples=400, deadline=None)
@given(st.lists(FACTS, max_size=30))
def test_a_stop_signal_always_leads_to_the_end_once_ranks_end(facts: list[AgentEvent]) -> None:
    state, _ = run(NEW, *facts)
    ended = [RankEnded(state.generation, rank, CAUSE) for rank in (0, 1)]
    outcome = [] if not state.job_failed else [Ended(OUTCOME)]
    state, _ = run(
        state,
        StopRequested(15, "SIGTERM"),
        *ended,
        Swept(state.generation),
        *outcome,
        StopRequested(2, "INT"),
    )
    assert state.phase is AgentPhase.DONE


JOIN = AgentJoined(AGENT, JobSpec("job", 2, 2), NodeFacts("a", "10.0.0.1", 2))
GIVEN_UP = Refused("the lease ran out", 75, retryable=True)


def test_given_up_by_the_service_it_reaps_before_it_joins_again() -> None:
    state, actions = step(replace(RUNNING, join=JOIN), GIVEN_UP)
    assert actions == TERM
    for local_rank in (0, 1):
        state, _ = step(state, RankEnded(1, local_rank, CAUSE))
    state, actions = step(state, Swept(1))
    assert actions == (Send(JOIN),)
    assert step(state, Assigned(assignment(2)))[1] == (OpenStore(2),)


def test_given_up_with_nothing_running_it_joins_again_at_once() -> None:
    assert step(replace(NEW, join=JOIN), GIVEN_UP)[1] == (Send(JOIN),)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_node_is_prepared_beside_what_the_service_says(node_rank: int) -> None:
    """It waits for GPU memory, or checks itself again, for up to half a minute."""
    next_one = assignment(2, node_rank)
    freed, _ = step(replace(REJOINING, assignment=assignment(), over=False), GpusFound())
    waiting, actions = step(freed, Assigned(next_one))
    assert actions == (PrepareNode(next_one, frees_memory=True),)
    assert step(waiting, Ended(OUTCOME))[1] == (FAILED,)
    stopped, actions = step(waiting, restart(2))
    assert actions == (Sweep(2),)
    assert step(stopped, NodePrepared(2)) == (stopped, ())
    assert step(waiting, LOST)[1] == (), "the store is not open yet"
    assert step(waiting, NodePrepared(1)) == (waiting, ())
    ready, actions = step(waiting, NodePrepared(2))
    assert actions == ((OpenStore(2),) if node_rank == 0 else ())
    assert step(ready, NodePrepared(2)) == (ready, ())
    if node_rank:
        told, actions = step(waiting, StoreAt(2, STORE))
        assert actions == ()
        assert step(told, NodePrepared(2))[1] == (ReachStore(next_one, STORE),)


def test_a_node_is_prepared_only_if_there_is_something_to_do() -> None:
    gpus = replace(REJOINING, has_gpus=True)
    assert step(replace(NEW, has_gpus=True), Assigned(assignment()))[1] == (OpenStore(1),)
    assert step(gpus, Assigned(replace(assignment(2), in_place=True)))[1] == (OpenStore(2),)
    again = replace(assignment(2), check_first=True)
    assert step(REJOINING, Assigned(again))[1] == (PrepareNode(again, frees_memory=False),)


def test_overtaken_by_a_newer_world_it_takes_its_place_once_the_old_ranks_are_reaped() -> None:
    state, actions = step(RUNNING, Assigned(assignment(3)))
    assert actions == TERM
    for local_rank in (0, 1):
        state, _ = step(state, RankEnded(1, local_rank, None))
    state, actions = step(state, Swept(1))
    assert actions == (OpenStore(3),)
    assert step(state, StoreAt(3, STORE))[1] == (StartRanks(assignment(3), STORE),)


def test_what_was_told_of_the_newer_world_meanwhile_is_asked_for_again() -> None:
    state, _ = step(replace(RUNNING, live=(), join=JOIN), Assigned(assignment(3, node_rank=1)))
    assert step(state, StoreAt(3, STORE)) == (state, ()), "the old ranks are not reaped yet"
    state, actions = step(state, Swept(1))
    assert actions == (Send(JOIN),)
    assert step(state, StoreAt(3, STORE))[1] == (ReachStore(assignment(3, node_rank=1), STORE),)
    assert step(state, restart(3))[1] == (Sweep(3),)


def test_a_world_that_was_broken_up_before_it_was_heard_of_is_not_waited_for() -> None:
    waiting = replace(REJOINING, join=JOIN)
    assert step(waiting, restart(2)) == (replace(waiting, missed=2), (Send(AgentStopped(AGENT, 2)),))
    state, actions = run(replace(RUNNING, live=(), join=JOIN), restart(2), Swept(1))
    assert actions == [Sweep(1), Send(JOIN)]
    assert step(state, restart(2))[1] == (Send(AgentStopped(AGENT, 2)),)


# --- breaking off


@pytest.mark.parametrize("kind", list(DecisionKind))
def test_who_lost_nobody_is_not_broken_off(kind: DecisionKind) -> None:
    _, actions = step(RUNNING, Stop(1, Decision(kind, "why", 1)))
    stays = kind in (DecisionKind.GROW, DecisionKind.FINISH)
    assert actions == (TERM if stays else (AbortGroups(1, "why"), *TERM))


def test_why_is_said_by_name_unless_that_is_in_doubt() -> None:
    doubtful = replace(CAUSE, doubt=Doubt.CULPRIT)
    _, actions = step(RUNNING, Stop(1, Decision(DecisionKind.RESTART, "hang", 1, doubtful)))
    assert AbortGroups(1, "hang") in actions


def test_an_error_that_nobody_waits_for_is_a_failure_at_once() -> None:
    failed = CommunicationFailed(1, CAUSE)
    assert step(RUNNING, failed)[1] == (Send(RankFailed(AGENT, 1, CAUSE)),)
    assert step(STOPPING, failed)[1] == ()
    assert step(RUNNING, replace(failed, generation=0))[1] == ()


# --- reaching the store, checkpoints, being cut off


def test_a_node_that_does_not_keep_the_store_looks_whether_it_reaches_it_and_once() -> None:
    state, actions = step(replace(REACHING, store=None), StoreAt(1, STORE))
    assert (state, actions) == (REACHING, (ReachStore(assignment(node_rank=1), STORE),))
    assert step(state, StoreAt(1, STORE)) == (state, ()), "told again when a session resumes"


def test_who_cannot_reach_the_store_waits_for_the_decision() -> None:
    state, actions = run(REACHING, StoreReached(1, "no route"), restart())
    assert actions == [UNREACHED, REAPED, Sweep(1)]
    assert run(state, Swept(1))[1] == [Send(AgentStopped(AGENT, 1))]


def test_ranks_do_not_start_at_a_store_that_was_lost_with_its_zygote() -> None:
    state, _ = step(TOLD, LOST)
    assert step(state, StoreAt(1, STORE)) == (state, ())


def test_a_checkpoint_asked_for_while_ranks_start_is_asked_of_them_then() -> None:
    _, actions = run(REACHING, CheckpointRequested(1, "more nodes"), StoreReached(1))
    assert actions[1:] == [AskCheckpoint(assignment(node_rank=1), "more nodes", has_deadline=False)]


def test_the_answer_goes_where_the_question_came_from() -> None:
    asked, _ = step(RUNNING, CheckpointRequested(1, "more nodes"))
    assert step(asked, CheckpointOver(1, taken=True))[1] == (Send(CheckpointTaken(AGENT, 1)),)
    assert step(asked, CheckpointOver(1, taken=False))[1] == ()
    going, _ = step(RUNNING, CheckpointSignal("SIGTERM", StopRequested(15, "SIGTERM")))
    for taken in (True, False):
        state, actions = step(going, CheckpointOver(1, taken))
        assert actions == (GOODBYE, *TERM)
        assert state.finish == STOPPED


def test_both_questions_get_their_answer() -> None:
    both, _ = run(
        RUNNING,
        CheckpointSignal("SIGTERM", StopRequested(15, "SIGTERM")),
        CheckpointRequested(1, "more nodes"),
    )
    _, actions = step(both, CheckpointOver(1, taken=True))
    assert actions == (Send(CheckpointTaken(AGENT, 1)), GOODBYE, *TERM)


@pytest.mark.parametrize("other", [restart(), Assigned(assignment(2)), Isolated("cut off")])
def test_a_node_that_is_about_to_go_goes_whatever_stops_its_ranks_first(other: AgentEvent) -> None:
    state, _ = run(RUNNING, CheckpointSignal("SIGTERM", StopRequested(15, "SIGTERM")), other)
    _, actions = run(state, RankEnded(1, 0, None), RankEnded(1, 1, None), Swept(1))
    assert actions[-1] == STOPPED


def test_a_second_signal_does_not_wait_for_the_checkpoint() -> None:
    signal = CheckpointSignal("SIGTERM", StopRequested(15, "SIGTERM"))
    assert run(RUNNING, signal, signal)[1][1:] == [GOODBYE, *TERM]
    assert step(NEW, signal)[1] == (GOODBYE, STOPPED), "there is nobody to ask"


def test_ranks_stopped_for_isolation_are_answered_for_once_the_service_is_back() -> None:
    ends = (RankEnded(1, 0, CAUSE), RankEnded(1, 1, CAUSE), Swept(1))
    state, actions = run(RUNNING, Isolated("cut off"), *ends)
    assert actions[0] == CUT_OFF
    assert actions[-1] == Send(AgentStopped(AGENT, 1))
    assert step(state, Assigned(assignment(1)))[1] == (), "those ranks are gone"
    assert run(state, restart(), Swept(1))[1] == [Sweep(1), Send(AgentStopped(AGENT, 1))]
    assert step(state, Assigned(assignment(2)))[1] == (OpenStore(2),)
