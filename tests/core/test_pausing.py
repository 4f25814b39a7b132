"""Ranks that are paused, not ended: what a node does with them in every phase, and when it gives them up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_supervision import AGENT, CAUSE, OUTCOME, RUNNING, STORE, assignment, run

from launcher.exchange import (
    AbortGroups,
    Action,
    AgentEvent,
    AgentPhase,
    CannotHeal,
    Finish,
    Grace,
    GraceOver,
    InspectLast,
    Isolated,
    OpenStore,
    PauseRanks,
    RankEnded,
    RankHeals,
    RankParked,
    Send,
    SignalRanks,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    Supervision,
    Sweep,
    Swept,
    ZygoteReplaced,
)
from launcher.supervision import SIGKILL, SIGTERM, step
from rendezvous.values.events import (
    AgentJoined,
    AgentStopped,
    Assigned,
    Ended,
    HealReady,
    RankFailed,
    Refused,
    Stop,
    StoreAt,
    Waiting,
)
from rendezvous.values.types import (
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
)

WHY = f"rank {CAUSE.rank} on {CAUSE.node}: {CAUSE.reason}"
ALL_STOP = (SignalRanks(SIGTERM), StartGrace(1))
JOIN = AgentJoined(AGENT, JobSpec("job", 2, 2), NodeFacts("a", "a.lan", 2))
HEALING = replace(RUNNING, heals=(0, 1), is_ready=True, join=JOIN)


def heal(generation: int = 1, kind: DecisionKind = DecisionKind.RESTART) -> Stop:
    return Stop(generation, Decision(kind, "again", generation, CAUSE, in_place=True))


def plain(generation: int = 1) -> Stop:
    return Stop(generation, Decision(DecisionKind.RESTART, "again", generation, CAUSE))


def in_place(generation: int = 2, nproc: int = 2) -> Assigned:
    return Assigned(replace(assignment(generation), in_place=True, nproc=nproc))


PAUSING, _ = step(HEALING, heal())
SWEEPING, _ = run(PAUSING, RankParked(1, 0), RankParked(1, 1))
PARKED, _ = run(SWEEPING, Swept(1))
ASSIGNED, _ = step(PARKED, in_place())
CONTINUED, _ = run(ASSIGNED, StoreListens(2, STORE), StoreAt(2, STORE))


# --- which ranks can be paused --------------------------------------------------------------------------


def test_the_service_hears_when_all_live_ranks_can_be_paused_and_when_this_changes() -> None:
    state, actions = step(RUNNING, RankHeals(1, 1, True))
    assert actions == ()
    state, actions = step(state, RankHeals(1, 0, True))
    assert actions == (Send(HealReady(AGENT, 1, True)),)
    assert step(state, RankHeals(1, 0, True)) == (state, ())
    state, actions = step(state, RankHeals(1, 0, False))
    assert actions == (Send(HealReady(AGENT, 1, False)),)
    assert state.heals == (1,)


def test_a_rank_that_an_exception_takes_out_of_its_loop_does_not_keep_the_others_from_healing() -> None:
    state, actions = run(HEALING, RankHeals(1, 0, False), RankEnded(1, 0, CAUSE))
    ready = [Send(HealReady(AGENT, 1, each)) for each in (False, True)]
    assert actions == [*ready, Send(RankFailed(AGENT, 1, CAUSE))]  # the service decides on the failure
    assert step(state, heal())[1][0] == PauseRanks(1, (1,), WHY)


def test_a_script_that_cannot_heal_says_why() -> None:
    why = "rank 1 communicates before state.run: broadcast at train.py:17"
    state, actions = step(HEALING, CannotHeal(1, 1, why))
    assert actions == (Send(HealReady(AGENT, 1, False, why)),)
    assert not state.is_ready


@pytest.mark.parametrize(
    "fact", [RankHeals(0, 0, False), CannotHeal(0, 0, "so"), RankParked(0, 0), GraceOver(0, Grace.UNASKED)]
)
@pytest.mark.parametrize("state", [HEALING, PAUSING, PARKED, CONTINUED])
def test_reports_of_another_generation_are_ignored(state: Supervision, fact: AgentEvent) -> None:
    assert step(state, fact) == (state, ())


# --- the stop in place ----------------------------------------------------------------------------------


def test_ranks_are_paused_then_swept_around_and_reported() -> None:
    state, actions = step(HEALING, heal())
    assert actions == (PauseRanks(1, (0, 1), WHY), StartGrace(1))
    state, actions = step(state, RankParked(1, 1))
    assert actions == ()
    state, actions = step(state, RankParked(1, 0))
    assert actions == (Sweep(1, kept=(0, 1)),)
    state, actions = step(state, Swept(1))
    assert actions == (Send(AgentStopped(AGENT, 1, parked=(0, 1))),)
    assert (state.phase, state.live, state.parked) == (AgentPhase.JOINING, (0, 1), (0, 1))


def test_parked_ranks_continue_and_the_missing_ones_are_started() -> None:
    state, _ = run(HEALING, RankEnded(1, 0, CAUSE), heal(), RankParked(1, 1), Swept(1))
    state, actions = run(state, in_place(), StoreListens(2, STORE), StoreAt(2, STORE))
    assert isinstance(actions[0], OpenStore)
    assert actions[-1] == StartRanks(replace(assignment(2), in_place=True), STORE, kept=(1,))
    assert (state.live, state.parked, state.heals, state.in_place) == ((0, 1), (), (1,), False)
    assert step(state, RankHeals(2, 0, True))[1] == (Send(HealReady(AGENT, 2, True)),)


def test_a_node_that_lost_no_rank_is_ready_again_at_once() -> None:
    _, actions = step(ASSIGNED, StoreAt(2, STORE))
    assert actions[1:] == (Send(HealReady(AGENT, 2, True)),)


def test_only_ranks_that_heal_are_paused() -> None:
    state, actions = step(replace(HEALING, heals=(1,)), heal())
    others = (SignalRanks(SIGTERM, (0,)), AbortGroups(1, WHY, (0,)))
    assert actions == (PauseRanks(1, (1,), WHY), *others, StartGrace(1))
    state, actions = run(state, RankParked(1, 1), RankEnded(1, 0, None))
    assert actions == [Sweep(1, kept=(1,))]


def test_a_rank_that_does_not_park_in_time_is_killed_and_the_others_are_not() -> None:
    state, actions = run(PAUSING, RankParked(1, 0), GraceOver(1))
    assert actions == [SignalRanks(SIGKILL, (1,))]
    state, actions = step(state, RankEnded(1, 1, None))
    assert actions == (Sweep(1, kept=(0,)),)
    assert step(SWEEPING, GraceOver(1)) == (SWEEPING, ())


def test_the_culprit_of_a_hang_is_ended_soon() -> None:
    state, actions = step(replace(HEALING, accused=(replace(CAUSE, local_rank=0),)), heal())
    accused = (SignalRanks(SIGTERM, (0,)), AbortGroups(1, WHY, (0,)), StartGrace(1, Grace.OF_ACCUSED))
    assert actions == (PauseRanks(1, (1,), WHY), *accused, StartGrace(1))
    assert step(state, GraceOver(1, Grace.OF_ACCUSED))[1] == (SignalRanks(SIGKILL, (0,)),)


def test_nobody_left_to_pause_is_a_plain_restart() -> None:
    state, actions = run(HEALING, RankEnded(1, 0, CAUSE), RankEnded(1, 1, CAUSE), heal(), Swept(1))
    assert actions[-2:] == [Sweep(1), Send(AgentStopped(AGENT, 1))]
    assert state.live == ()


def test_a_doubtful_cause_is_examined_before_ranks_are_paused() -> None:
    cause = replace(CAUSE, failure=FailureClass.CONSEQUENCE)
    order = Stop(1, Decision(DecisionKind.RESTART, "again", 1, cause, in_place=True))
    assert step(HEALING, order)[1][0] == InspectLast(1)


@pytest.mark.parametrize("kind", [DecisionKind.GROW, DecisionKind.SHRINK, DecisionKind.WAIT])
def test_every_change_of_the_world_can_be_in_place(kind: DecisionKind) -> None:
    state, _ = run(HEALING, heal(kind=kind), RankParked(1, 0), RankParked(1, 1), Swept(1))
    assert state.parked == (0, 1)


# --- parked without being asked -----------------------------------------------------------------------


def test_a_rank_that_parks_because_its_collective_failed_waits_for_the_order() -> None:
    state, actions = step(HEALING, RankParked(1, 1))
    assert actions == (StartGrace(1, Grace.UNASKED),)
    state, actions = step(state, heal())
    assert actions == (PauseRanks(1, (0,), WHY), StartGrace(1))
    assert step(state, GraceOver(1, Grace.UNASKED)) == (state, ())
    state, actions = step(state, RankParked(1, 0))
    assert actions == (Sweep(1, kept=(0, 1)),)


def test_all_ranks_parked_before_the_order() -> None:
    state, _ = run(HEALING, RankParked(1, 1), RankParked(1, 0))
    state, actions = step(state, heal())
    assert actions == (Sweep(1, kept=(0, 1)),)


def test_if_nobody_reports_a_failure_the_parked_rank_does() -> None:
    state, _ = step(HEALING, RankParked(1, 1))
    state, actions = step(state, GraceOver(1, Grace.UNASKED))
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, RankFailed)
    cause = action.message.cause
    assert (cause.rank, cause.local_rank, cause.failure) == (1, 1, FailureClass.CONSEQUENCE)
    assert state.phase is AgentPhase.RUNNING


# --- parked ranks without a place -------------------------------------------------------------------------

LOST = (
    Waiting("the job runs without this node", 2, 2, stands_by=True),
    Refused("come back", 75, retryable=True),
    Refused("no", 77),
    Ended(OUTCOME),
    Isolated("cut off"),
    StopRequested(15, "SIGTERM"),
    Assigned(assignment(2)),
    in_place(nproc=1),
    plain(2),
)


@pytest.mark.parametrize("fact", LOST, ids=lambda fact: type(fact).__name__)
def test_parked_ranks_that_have_no_place_are_stopped_first(fact: AgentEvent) -> None:
    state, actions = step(PARKED, fact)
    assert tuple(each for each in actions if not isinstance(each, Send)) == ALL_STOP
    assert state.phase is AgentPhase.STOPPING
    state, actions = run(state, GraceOver(1))
    assert actions == [SignalRanks(SIGKILL)]
    state, actions = run(state, RankEnded(1, 0, None), RankEnded(1, 1, None))
    assert actions == [Sweep(1)]
    state, actions = step(state, Swept(1))
    assert (state.live, state.parked) == ((), ())
    assert state.phase is (
        AgentPhase.DONE if any(isinstance(a, Finish) for a in actions) else AgentPhase.JOINING
    )


def test_a_plain_restart_that_overtakes_parked_ranks_begins_after_they_have_ended() -> None:
    state, _ = run(PARKED, Assigned(assignment(2)), StoreAt(2, STORE))
    state, actions = run(state, RankEnded(1, 0, None), RankEnded(1, 1, None), Swept(1))
    assert actions == [Sweep(1), OpenStore(2), Send(JOIN)]  # StoreAt comes again
    state, actions = step(state, StoreAt(2, STORE))
    assert actions == (StartRanks(assignment(2), STORE),)


@pytest.mark.parametrize(
    "fact", [Waiting("for a replacement", 1, 2), StoreLost(0, "killed"), ZygoteReplaced("so", 137)]
)
def test_parked_ranks_wait_for_others(fact: AgentEvent) -> None:
    assert step(PARKED, fact) == (PARKED, ())


def test_a_world_that_fails_before_its_ranks_start_keeps_the_parked_ranks() -> None:
    state, actions = run(ASSIGNED, heal(2), Swept(2))
    assert actions == [Sweep(2, kept=(0, 1)), Send(AgentStopped(AGENT, 2, parked=(0, 1)))]
    state, actions = run(state, in_place(3), StoreListens(3, STORE), StoreAt(3, STORE))
    assert StartRanks(replace(assignment(3), in_place=True), STORE, kept=(0, 1)) in actions
    state, actions = step(ASSIGNED, plain(2))
    assert actions == (SignalRanks(SIGTERM), StartGrace(2))


def test_a_store_that_is_lost_before_the_start_keeps_the_parked_ranks() -> None:
    _, actions = run(ASSIGNED, StoreListens(2, STORE), StoreLost(2, "killed"))
    assert actions[-1] == Send(AgentStopped(AGENT, 2, parked=(0, 1)))


def test_a_store_that_cannot_open_ends_the_agent_after_its_parked_ranks() -> None:
    state, actions = step(ASSIGNED, StoreFailed(2, "the port is taken"))
    assert actions[-2:] == (SignalRanks(SIGTERM), StartGrace(2))
    _, actions = run(state, RankEnded(1, 0, None), RankEnded(1, 1, None), Swept(2))
    assert isinstance(actions[-1], Finish)


def test_a_stop_that_was_missed_is_answered_with_the_parked_ranks() -> None:
    assert step(PARKED, heal(2))[1] == (Send(AgentStopped(AGENT, 2, parked=(0, 1))),)


# --- the stop in place becomes another one -----------------------------------------------------------------


@pytest.mark.parametrize(
    "fact",
    [
        Refused("come back", 75, retryable=True),
        Refused("no", 77),
        Ended(OUTCOME),
        Assigned(assignment(2)),
        plain(),
    ],
    ids=lambda fact: type(fact).__name__,
)
@pytest.mark.parametrize("state", [PAUSING, SWEEPING], ids=["pausing", "sweeping"])
def test_a_stop_in_place_becomes_a_stop_of_all(state: Supervision, fact: AgentEvent) -> None:
    after, actions = step(state, fact)
    assert actions == ALL_STOP
    assert step(after, Swept(1)) == (after, ())  # of the sweep around the parked ranks
    after, actions = run(after, RankEnded(1, 0, None), RankEnded(1, 1, None))
    assert actions == [Sweep(1)]
    assert step(after, Swept(1))[0].live == ()


def test_ctrl_c_while_ranks_are_paused() -> None:
    state, actions = step(PAUSING, StopRequested(2, "SIGINT"))
    assert SignalRanks(2) in actions
    state, actions = step(state, StopRequested(2, "SIGINT"))
    assert actions == (SignalRanks(SIGKILL),)


def test_the_same_order_twice_changes_nothing() -> None:
    assert step(PAUSING, heal()) == (PAUSING, ())
    assert step(SWEEPING, heal()) == (SWEEPING, ())


# --- ends of ranks that were paused -----------------------------------------------------------------------


def test_a_parked_rank_that_ends_during_the_stop_is_a_failure_and_the_sweep_is_not_repeated() -> None:
    state, actions = step(SWEEPING, RankEnded(1, 1, CAUSE))
    assert actions == (Send(RankFailed(AGENT, 1, CAUSE)),)
    _, actions = step(state, Swept(1))
    assert actions == (Send(AgentStopped(AGENT, 1, parked=(0,))),)


def test_a_rank_that_has_not_entered_run_dies_and_the_others_can_be_paused() -> None:
    """The service must know before it decides about the failure."""
    state = replace(RUNNING, heals=(0,), join=JOIN)
    _, actions = step(state, RankEnded(1, 1, CAUSE))
    assert actions[0] == Send(HealReady(AGENT, 1, True))
    assert isinstance(actions[1], Send)
    assert isinstance(actions[1].message, RankFailed)


def test_the_end_of_the_last_rank_does_not_make_its_node_ready() -> None:
    state = replace(RUNNING, live=(0,), join=JOIN)
    _, actions = step(state, RankEnded(1, 0, None))
    assert not any(isinstance(a, Send) and isinstance(a.message, HealReady) for a in actions)


def test_a_parked_rank_that_ends_before_the_next_generation_is_started_anew() -> None:
    """The service must know: if it was the last one of the job, new ranks would join nobody."""
    waits, actions = step(PARKED, RankEnded(1, 0, CAUSE))
    assert actions == (Send(AgentStopped(AGENT, 1, parked=(1,))),)
    assert waits.parked == waits.live == (1,)
    state, actions = step(ASSIGNED, RankEnded(1, 0, CAUSE))
    assert actions == (Send(RankFailed(AGENT, 2, CAUSE)),)
    assert state.parked == state.live == (1,)
    _, actions = step(state, StoreAt(2, STORE))
    assert StartRanks(replace(assignment(2), in_place=True), STORE, kept=(1,)) in actions


def test_a_parked_rank_that_exits_with_0_fails_in_the_world_that_counts_on_it() -> None:
    _, (sent,) = step(ASSIGNED, RankEnded(1, 0, None))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, RankFailed)
    assert (sent.message.generation, sent.message.cause.rank) == (2, 0)
    assert sent.message.cause.reason == "ended while it was paused"


def test_the_service_counts_on_a_rank_that_has_ended_meanwhile() -> None:
    """The report of its end was under way when the next world was sealed."""
    waits, _ = step(PARKED, RankEnded(1, 0, CAUSE))
    told = in_place()
    told = replace(told, assignment=replace(told.assignment, parked=(0, 1)))
    _, actions = step(waits, told)
    failed = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, RankFailed)]
    assert [(each.generation, each.cause.local_rank) for each in failed] == [(2, 0)]


def test_a_stop_that_comes_again_is_answered_again_and_no_rank_is_touched() -> None:
    assert step(PARKED, heal()) == (PARKED, (Send(AgentStopped(AGENT, 1, parked=(0, 1))),))


def test_a_world_that_is_sealed_during_the_sweep_keeps_the_paused_ranks() -> None:
    """An earlier answer of this node was on its way, and another stop had begun."""
    state, actions = step(SWEEPING, in_place())
    assert actions == ()
    state, _ = step(state, Swept(1))
    assert (state.phase, state.parked, state.generation) == (AgentPhase.JOINING, (0, 1), 2)


def test_the_end_of_a_kept_rank_counts_whatever_generation_its_report_names() -> None:
    """The zygote has reported the end with the old number while the agent let the rank continue."""
    later = replace(assignment(2), in_place=True, rank_offset=6)
    state, _ = run(PARKED, Assigned(later), StoreAt(2, STORE))
    state, actions = step(state, RankEnded(1, 1, CAUSE))
    assert actions == (Send(RankFailed(AGENT, 2, replace(CAUSE, rank=7))),)
    assert step(state, RankEnded(1, 1, CAUSE)) == (state, ())


def test_a_late_end_of_a_rank_that_was_started_anew_is_ignored() -> None:
    state, _ = run(HEALING, RankEnded(1, 0, CAUSE), heal(), RankParked(1, 1), Swept(1))
    state, _ = run(state, in_place(), StoreAt(2, STORE))
    assert step(state, RankEnded(1, 0, CAUSE)) == (state, ())


def test_the_loss_of_the_zygote_while_ranks_are_parked_is_a_plain_start() -> None:
    state, _ = run(PARKED, RankEnded(1, 0, CAUSE), RankEnded(1, 1, CAUSE), ZygoteReplaced("it was lost", 137))
    _, actions = run(state, in_place(), StoreListens(2, STORE), StoreAt(2, STORE))
    assert actions[-1] == StartRanks(replace(assignment(2), in_place=True), STORE)


# --- whatever the order of facts --------------------------------------------------------------------------

ANY: tuple[AgentEvent, ...] = (
    *LOST,
    *(
        fact
        for g in (1, 2)
        for r in (0, 1)
        for fact in (RankHeals(g, r, True), RankParked(g, r), RankEnded(g, r, CAUSE))
    ),
    *(fact for g in (1, 2) for fact in (heal(g), plain(g), StoreAt(g, STORE), Swept(g), GraceOver(g))),
    *(GraceOver(1, kind) for kind in Grace),
    in_place(),
    in_place(3),
    ZygoteReplaced("it was lost", 137),
)


@given(st.sampled_from([HEALING, PAUSING, PARKED, ASSIGNED]), st.lists(st.sampled_from(ANY), max_size=12))
@settings(max_examples=1500)
def test_parked_ranks_are_never_forgotten(state: Supervision, facts: list[AgentEvent]) -> None:
    """Each process of the node is continued, or has ended before the next one of its local rank is started."""
    running = set(state.live)
    for fact in facts:
        if isinstance(fact, RankEnded) and fact.local_rank in running:
            is_known = fact.generation == state.generation or fact.local_rank in (*state.kept, *state.parked)
            if is_known and fact.generation <= state.generation:
                running.discard(fact.local_rank)
        state, actions = step(state, fact)
        for action in actions:
            _check(action, state, running)
        if state.phase in (AgentPhase.JOINING, AgentPhase.DONE):
            assert set(state.live) == set(state.parked)
        assert set(state.parked) <= set(state.live)
        assert running == set(state.live)


def _check(action: Action, state: Supervision, running: set[int]) -> None:
    match action:
        case StartRanks(mine, _, kept):
            assert set(kept) == running, "a process that nobody continues"
            assert not kept or mine.in_place
            running |= set(range(mine.nproc))
        case Sweep(_, _, kept):
            assert set(kept) == running, "a sweep that ends a rank, or spares one that has ended"
        case Finish():
            assert not running
        case Send(AgentStopped() as stopped):
            assert set(stopped.parked) == running
