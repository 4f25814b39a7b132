"""Reloads in the round machine: who is stopped, what is taken again after a failure, and what counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from job_story import Story, agent, running, spec

from launcher import supervision
from launcher.exchange import ChangeSources, OpenStore, Supervision
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.snapshot import decode_state, encode_state
from rendezvous.rounds.view import summary_of
from rendezvous.service.calls import NotNow
from rendezvous.service.operations import prepared
from rendezvous.values.events import AgentStopped, Assigned, Persist, RankFailed, ReloadOrdered, Stop
from rendezvous.values.job_state import Phase
from rendezvous.values.types import (
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    PolicyAction,
    PolicyRule,
    Reached,
    Recover,
    SourceChange,
)


def last(story: Story) -> Decision:
    return story.state.decisions[-1]


def reload(story: Story, steps: int = 10) -> Story:
    return story.happens(ReloadOrdered("ann reloads the script", steps))


def reloaded(story: Story, reached: Reached | None = None) -> Story:
    """Both nodes have stopped, and run the edited script."""
    reload(story)
    for node in ("a", "b"):
        story.happens(AgentStopped(agent(node), story.state.generation, reached=reached))
    return story.runs()


def sources(story: Story) -> tuple[int, int]:
    """The edition that all nodes were assigned, and the generation from which its files are."""
    (found,) = {(each.edition, each.kept_from) for each in story.places().values()}
    return found


def test_a_reload_is_stored_before_it_is_told_and_uses_no_budget() -> None:
    story = reload(running(spec(2, restarts=0), "a", "b"))
    assert story.effects[0] == Persist()
    for node in ("a", "b"):
        (stop,) = story.told(node)
        assert isinstance(stop, Stop)
        assert (stop.decision.sources, stop.decision.title) == (SourceChange.RELOAD, "reload")
        assert stop.decision.reason == (
            "ann reloads the script; restarting with the same nodes and the edited script"
        )
    story.stop("a", "b")
    assert sources(story) == (1, 0)
    assert (story.state.restarts_used, story.state.generation) == (0, 2)
    assert summary_of("j", story.runs().state).reloads == 1


def test_a_reload_stops_all_ranks_although_they_could_keep_their_processes() -> None:
    story = running(spec(2, recover=Recover.AUTO), "a", "b").ready("a", "b")
    assert not last(reload(story)).in_place


@pytest.mark.parametrize("failure", [FailureClass.USER_EXCEPTION, FailureClass.SIGNAL, FailureClass.HANG])
def test_a_failure_before_the_first_step_takes_the_earlier_files_again(failure: FailureClass) -> None:
    story = reloaded(running(spec(2, restarts=0), "a", "b")).fails("b", 2, failure)
    assert (last(story).kind, last(story).title) == (DecisionKind.RESTART, "rollback")
    assert "the edited script failed before its first step after the reload" in last(story).reason
    story.stop("a", "b")
    assert sources(story) == (2, 1)
    summary = summary_of("j", story.runs().state)
    assert (summary.restarts, summary.reloads, summary.rollbacks, summary.trial_until) == (0, 1, 1, 0)
    assert story.state.failures[-1][0] == 2  # `ddpctl why` tells it
    assert not len(story.state.node_failures)
    story.fails("b", 2)
    assert last(story).kind is DecisionKind.FAIL, "the earlier files have no other ones before them"


@pytest.mark.parametrize(
    ("reached", "step", "is_early"),
    [
        (Reached(100, numbered=True), 109, True),
        (Reached(100, numbered=True), 110, False),
        (Reached(100), 9, True),
        (Reached(100), 10, False),
        (None, 9, True),
    ],
)
def test_steps_count_from_where_the_job_was_if_the_script_numbers_them(
    reached: Reached | None, step: int, is_early: bool
) -> None:
    story = reloaded(running(spec(2), "a", "b"), reached).fails("a", 0, step=step)
    assert (last(story).sources is SourceChange.ROLLBACK) == is_early
    assert story.state.restarts_used == (0 if is_early else 1)


def test_a_program_without_steps_is_not_on_trial_for_ever() -> None:
    story = reloaded(running(spec(2), "a", "b")).fails("a", 0, ran_s=3600.0)
    assert last(story).sources is SourceChange.NONE


def test_a_failure_after_the_first_steps_restarts_the_edited_files() -> None:
    story = reloaded(running(spec(2), "a", "b")).fails("a", 0, step=10).stop("a", "b")
    assert sources(story) == (1, 0)


@pytest.mark.parametrize("rule", [PolicyAction.FAIL, PolicyAction.RESTART_WITHOUT_NODE])
def test_the_failure_policy_does_not_prevent_a_rollback(rule: PolicyAction) -> None:
    job = spec(2, rules=(PolicyRule(FailureClass.USER_EXCEPTION, rule),))
    assert last(reloaded(running(job, "a", "b")).fails("a", 0)).sources is SourceChange.ROLLBACK


def test_failures_that_are_ignored_or_end_the_job_by_a_condition_take_nothing_back() -> None:
    job = spec(2, rules=(PolicyRule(FailureClass.USER_EXCEPTION, PolicyAction.IGNORE),))
    assert last(reloaded(running(job, "a", "b")).fails("a", 0)).kind is DecisionKind.IGNORE
    assert last(reloaded(running(spec(2), "a", "b")).fails("a", 0, final=True)).kind is DecisionKind.FAIL


def test_a_lost_node_is_no_failure_of_the_script_and_the_reload_stays_on_trial() -> None:
    story = reloaded(running(spec(2, restarts=5), "a", "b"))
    story.fails("a", 0, FailureClass.NODE_LOST).stop("a", "b")
    assert sources(story) == (1, 0)
    assert story.state.restarts_used == 1
    story.runs().fails("b", 2).stop("a", "b")
    assert sources(story) == (2, 1)


def test_the_first_cause_decides_although_another_report_came_first() -> None:
    """A connection that breaks may be the script's fault, or that of a node that is lost."""
    consequence = FailureClass.CONSEQUENCE
    story = reloaded(running(spec(2), "a", "b")).fails("b", 2, consequence)
    assert last(story).sources is SourceChange.ROLLBACK
    assert story.state.restarts_used == 0
    story.happens(RankFailed(agent("a"), 2, Cause("a", 0, 0, FailureClass.NODE_LOST, "node a was lost", 1)))
    story.stop("a", "b")
    assert sources(story) == (1, 0)
    assert (story.state.restarts_used, story.state.reload.rollbacks) == (1, 0)


def test_a_lost_node_hides_no_error_of_the_script() -> None:
    story = reloaded(running(spec(2), "a", "b")).fails("b", 2, FailureClass.NODE_LOST)
    assert story.state.restarts_used == 1
    story.fails("a", 0).stop("a", "b")
    assert sources(story) == (2, 1)
    assert (story.state.restarts_used, story.state.reload.rollbacks) == (0, 1)


def test_without_steps_on_trial_there_is_no_rollback() -> None:
    story = reload(running(spec(2), "a", "b"), steps=0).stop("a", "b").runs().fails("a", 0)
    assert last(story).sources is SourceChange.NONE


@pytest.mark.parametrize("steps", [-1, 10_000_000])
def test_an_impossible_number_of_steps_changes_nothing(steps: int) -> None:
    story = running(spec(2), "a", "b")
    before = story.state
    assert reload(story, steps).state is before


def test_a_world_that_is_not_complete_is_not_reloaded() -> None:
    story = Story(spec(2)).joins("a")
    before = story.state
    assert reload(story).state is before


def test_a_second_reload_goes_back_to_the_files_of_the_first() -> None:
    story = reloaded(running(spec(2), "a", "b"))
    reloaded(story)
    story.fails("a", 0).stop("a", "b")
    assert sources(story) == (3, 2)
    reloaded(story.runs())  # once more, from the files of generation 2, which run in generation 4
    story.fails("a", 0).stop("a", "b")
    assert sources(story) == (5, 2)


def test_rollbacks_do_not_end_the_job_as_a_crash_loop() -> None:
    story = running(spec(2), "a", "b")
    for _ in range(10):
        reloaded(story).fails("a", 0, ran_s=0.1).stop("a", "b").runs()
    assert story.state.phase is Phase.RUNNING
    assert story.state.reload.rollbacks == 10


def test_a_reload_survives_the_store() -> None:
    story = reload(running(spec(2), "a", "b"))
    assert decode_state(encode_state(story.state)).reload == story.state.reload


# --- the agent -------------------------------------------------------------------------------------------


def test_an_agent_changes_its_sources_before_it_gives_orders_to_the_zygote() -> None:
    story = reload(running(spec(1), "a")).stop("a")
    mine = story.places()["a"]
    state, actions = supervision.step(
        Supervision(agent("a")), Assigned(replace(mine, generation=1, edition=0))
    )
    assert not any(isinstance(each, ChangeSources) for each in actions)
    _, actions = supervision.step(state, Assigned(mine))
    assert _orders(actions) == [ChangeSources(0), OpenStore(2)]


def test_an_agent_that_joins_later_is_told_which_files_run() -> None:
    story = running(spec(1), "a")
    reload(story).stop("a").runs().fails("a", 0).stop("a")
    _, actions = supervision.step(Supervision(agent("a", 2)), Assigned(story.places()["a"]))
    assert _orders(actions) == [ChangeSources(1), OpenStore(3)]


def _orders(actions: tuple[object, ...]) -> list[object]:
    return [each for each in actions if isinstance(each, ChangeSources | OpenStore)]


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.FORMING, "job 'j' waits for nodes. Try again when its ranks run"),
        (Phase.SEALED, "job 'j' is just starting its ranks"),
        (Phase.STOPPING, "job 'j' is just stopping its ranks"),
    ],
)
def test_a_job_that_does_not_run_is_not_reloaded(phase: Phase, words: str) -> None:
    job: Any = SimpleNamespace(job_id="j", state=SimpleNamespace(phase=phase))
    with pytest.raises(NotNow, match=words):
        asyncio.run(prepared(job, pb.ReloadJobRequest(job_id="j"), "somebody", ""))
