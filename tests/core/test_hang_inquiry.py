"""Ranks stand still: what the agent's machine does about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.exchange import (
    AbortGroups,
    AgentPhase,
    Grace,
    GraceOver,
    Inspected,
    InspectLast,
    InspectRanks,
    LastInspected,
    RankEnded,
    Send,
    SignalRanks,
    StacksTaken,
    StallDetected,
    StartGrace,
    Supervision,
    Sweep,
    Swept,
    TakeStacks,
)
from launcher.supervision import SIGKILL, SIGTERM, step
from rendezvous.values.events import (
    Accused,
    AgentStopped,
    Assigned,
    Examine,
    Examined,
    RankFailed,
    RanksStalled,
    Stop,
)
from rendezvous.values.rank_view import RankReport
from rendezvous.values.types import AgentId, Assignment, Cause, Decision, DecisionKind, Doubt, FailureClass

AGENT = AgentId("a", "1")
MINE = Assignment(1, 0, 2, 0, 2, 4, "default", 0, 4, 0, 3, "a")
RUNNING = Supervision(AGENT, AgentPhase.RUNNING, MINE, live=(0, 1))
STOPPING = replace(RUNNING, phase=AgentPhase.STOPPING, over=True, stop_signal=SIGTERM)
CAUSE = Cause("a", 1, 1, FailureClass.HANG, "makes no progress", 124)
REPORTS = (RankReport(0), RankReport(1))


@pytest.mark.parametrize(
    ("fact", "done"),
    [
        (StallDetected(1), Send(RanksStalled(AGENT, 1))),
        (Examine(1), InspectRanks(1)),
        (Inspected(1, REPORTS), Send(Examined(AGENT, 1, REPORTS))),
        (Accused(1, CAUSE), TakeStacks(1, CAUSE)),
        (StacksTaken(1, CAUSE), Send(RankFailed(AGENT, 1, CAUSE))),
    ],
)
def test_while_ranks_run(fact: object, done: object) -> None:
    assert step(RUNNING, fact)[1] == (done,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state", [STOPPING, Supervision(AGENT), replace(RUNNING, assignment=replace(MINE, generation=2))]
)
def test_an_agent_without_these_ranks_says_so_at_once_and_does_nothing_else(state: Supervision) -> None:
    nothing = (Send(Examined(AGENT, 1, ())),)
    assert step(state, Examine(1)) == (state, nothing)
    assert step(state, Inspected(1, REPORTS)) == (state, nothing)
    for fact in (StallDetected(1), Accused(1, CAUSE), StacksTaken(1, CAUSE)):
        assert step(state, fact) == (state, ())


def test_a_rank_that_ends_while_its_stacks_are_taken_has_hung() -> None:
    state, _ = step(RUNNING, Accused(1, CAUSE))
    ended = Cause("a", 1, 1, FailureClass.SIGNAL, "killed by SIGSEGV", 139)
    state, (told,) = step(state, RankEnded(1, 1, ended))
    assert told == Send(RankFailed(AGENT, 1, replace(CAUSE, traceback=ended.reason)))


def test_an_accused_rank_gets_a_short_grace_when_all_are_stopped() -> None:
    state, _ = step(RUNNING, Accused(1, CAUSE))
    state, actions = step(state, Stop(1, Decision(DecisionKind.RESTART, "again", 1, CAUSE)))
    assert actions[-3:] == (SignalRanks(SIGTERM), StartGrace(1, Grace.OF_ACCUSED), StartGrace(1))
    assert step(state, GraceOver(1, Grace.OF_ACCUSED))[1] == (SignalRanks(SIGKILL, (1,)),)
    assert step(replace(state, live=(0,)), GraceOver(1, Grace.OF_ACCUSED))[1] == ()
    assert step(state, GraceOver(1))[1] == (SignalRanks(SIGKILL),)


LOST = Cause("b", 2, 0, FailureClass.CONSEQUENCE, "lost its peers", 1)
MISFIT = Cause("b", 2, 0, FailureClass.USER_EXCEPTION, "of another size", 1, doubt=Doubt.SHARED_ERROR)


def stopped_for(cause: Cause | None, state: Supervision = RUNNING) -> tuple[object, ...]:
    return step(state, Stop(1, Decision(DecisionKind.RESTART, "again", 1, cause)))[1]


@pytest.mark.parametrize("cause", [LOST, MISFIT])
def test_before_all_are_stopped_for_a_mere_consequence_their_pages_are_looked_at(cause: Cause) -> None:
    first, second, third, *_ = stopped_for(cause)
    assert first == InspectLast(1)
    assert isinstance(second, AbortGroups)
    assert third == SignalRanks(SIGTERM)
    assert stopped_for(cause, replace(RUNNING, live=())) == (InspectLast(1), Sweep(1))


@pytest.mark.parametrize("cause", [CAUSE, replace(CAUSE, doubt=Doubt.CULPRIT), None])
def test_for_any_other_reason_nobody_looks_back(cause: Cause | None) -> None:
    assert InspectLast(1) not in stopped_for(cause)


def test_what_was_seen_is_told_when_all_are_stopped_and_only_of_that_generation() -> None:
    state, _ = step(replace(RUNNING, live=()), Stop(1, Decision(DecisionKind.RESTART, "again", 1, LOST)))
    state, _ = step(state, LastInspected(0, (RankReport(7),)))
    state, _ = step(state, LastInspected(1, REPORTS))
    state, told = step(state, Swept(1))
    assert told == (Send(AgentStopped(AGENT, 1, REPORTS)),)
    state, _ = step(state, Assigned(replace(MINE, generation=2)))
    assert state.last_seen == ()
