"""Which signals ranks get, in which order, and what a second request does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_story import agent, running, spec
from test_supervision import AGENT, KILL, RUNNING, STORE, TERM, assignment, run

from launcher.exchange import (
    AbortGroups,
    AgentPhase,
    Grace,
    GraceOver,
    RankEnded,
    Send,
    SignalRanks,
    StartGrace,
    StopRequested,
    StoreListens,
    Sweep,
)
from launcher.supervision import SIGINT, SIGTERM, step
from rendezvous.values.events import AgentLeft, AgentStopped, Assigned, Ended, Stop, StoreAt
from rendezvous.values.types import Decision, DecisionKind

CTRL_C, TERMINATE = StopRequested(2, "SIGINT"), StopRequested(15, "SIGTERM")
OF_ANOTHER = Stop(1, Decision(DecisionKind.FAIL, "stopped by SIGINT on b", 1, is_interrupt=True))
ASKED = (SignalRanks(SIGINT), StartGrace(1, Grace.TOGETHER), StartGrace(1))


def test_ctrl_c_is_sigint_then_sigterm_then_sigkill() -> None:
    state, actions = step(RUNNING, CTRL_C)
    assert actions == (Send(AgentLeft(AGENT, "stopped by SIGINT", ends_job=True)), *ASKED)
    state, actions = step(state, GraceOver(1, Grace.TOGETHER))
    assert [type(action) for action in actions] == [AbortGroups]
    state, actions = step(state, GraceOver(1))
    assert actions == (SignalRanks(SIGTERM), StartGrace(1, Grace.LAST))
    state, actions = step(state, GraceOver(1, Grace.LAST))
    assert actions == KILL


def test_a_signal_of_a_scheduler_is_sigterm_and_only_this_node_leaves() -> None:
    state, actions = step(RUNNING, TERMINATE)
    assert actions == (Send(AgentLeft(AGENT, "stopped by SIGTERM", ends_job=False)), *TERM)
    assert step(state, GraceOver(1))[1] == KILL


@pytest.mark.parametrize("kind", Grace)
def test_a_clock_changes_nothing_once_all_ranks_have_ended(kind: Grace) -> None:
    state, _ = run(RUNNING, CTRL_C, RankEnded(1, 0, None), RankEnded(1, 1, None))
    assert step(state, GraceOver(1, kind)) == (state, ())


@pytest.mark.parametrize("second", [CTRL_C, TERMINATE])
def test_a_second_signal_kills_and_does_not_wait_for_detached_processes(second: StopRequested) -> None:
    state, actions = run(RUNNING, CTRL_C, second)
    assert tuple(actions[-1:]) == KILL
    assert step(state, GraceOver(1, Grace.TOGETHER))[1] == ()  # there is nothing to release any more
    state, actions = run(state, RankEnded(1, 0, None), RankEnded(1, 1, None))
    assert actions == [Sweep(1, hurried=True)]


def test_a_second_signal_ends_the_wait_for_detached_processes() -> None:
    state, actions = run(RUNNING, CTRL_C, RankEnded(1, 0, None), RankEnded(1, 1, None))
    assert actions[-1] == Sweep(1)
    assert step(state, CTRL_C)[1][-1] == Sweep(1, hurried=True)


def test_ctrl_c_on_another_node_is_the_same_here() -> None:
    state, actions = step(RUNNING, OF_ANOTHER)
    assert actions == ASKED  # their collectives may still complete
    assert step(state, GraceOver(1))[1] == (SignalRanks(SIGTERM), StartGrace(1, Grace.LAST))


def test_ctrl_c_on_all_nodes_at_once_is_the_first_signal_of_each() -> None:
    state, _ = step(RUNNING, OF_ANOTHER)
    state, actions = step(state, CTRL_C)
    assert actions == (Send(AgentLeft(AGENT, "stopped by SIGINT", ends_job=True)),)
    assert step(state, CTRL_C)[1] == KILL


def test_the_next_generation_begins_as_any() -> None:
    state = replace(
        RUNNING, phase=AgentPhase.JOINING, live=(), over=True, is_interrupted=True, is_hurried=True
    )
    state, _ = run(state, Assigned(assignment(2)), StoreListens(2, STORE), StoreAt(2, STORE))
    state, actions = step(state, Stop(2, Decision(DecisionKind.GROW, "more nodes", 2)))
    assert actions == (SignalRanks(SIGTERM), StartGrace(2))
    assert run(state, RankEnded(2, 0, None), RankEnded(2, 1, None))[1] == [Sweep(2)]


# --- the service ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2)])
def test_ctrl_c_on_one_node_ends_the_job_on_all(nodes: tuple[int, int]) -> None:
    story = running(spec(*nodes, restarts=3), "a", "b")
    story.happens(AgentLeft(agent("b"), "stopped by SIGINT", ends_job=True))
    order = story.told("a")[-1]
    assert isinstance(order, Stop)
    assert order.decision.is_interrupt
    story.happens(AgentStopped(agent("a"), 1))
    end = story.told("a")[-1]
    assert isinstance(end, Ended)
    assert (end.outcome.exit_code, end.outcome.reason) == (130, "stopped by SIGINT on b")
    assert end.outcome.first_cause is None


def test_ctrl_c_while_a_restart_stops_the_ranks_ends_the_job() -> None:
    story = running(spec(2, restarts=3), "a", "b").fails("a", 0)
    story.happens(AgentLeft(agent("b"), "stopped by SIGINT", ends_job=True)).stop("a")
    end = story.told("a")[-1]
    assert isinstance(end, Ended)
    assert end.outcome.exit_code == 130


def test_ctrl_c_on_a_spare_is_its_own_business() -> None:
    story = running(spec(1, 1, restarts=0), "a", "b")
    before = story.state.phase
    story.happens(AgentLeft(agent("b"), "stopped by SIGINT", ends_job=True))
    assert story.state.phase is before
