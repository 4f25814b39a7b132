from __future__ import annotations

import pytest
from job_story import Story, running, spec

from rendezvous.rounds.policy import decide, in_words
from rendezvous.values.events import Waiting
from rendezvous.values.types import (
    UNLIMITED,
    Cause,
    CrashLoop,
    DecisionKind,
    FailureClass,
    JobSpec,
    PolicyAction,
    PolicyRule,
    RestartBudget,
)


def reason(story: Story) -> str:
    return story.state.decisions[-1].reason


def test_the_budget_is_used_up_in_words() -> None:
    story = running(spec(1, restarts=3), "a")
    for _ in range(3):
        story.fails("a", 0).stop("a").runs()
    story.fails("a", 0).stop("a")
    assert reason(story) == "--max-restarts is used up (3 of 3)"
    assert story.state.outcome is not None
    assert (story.state.outcome.exit_code, story.state.outcome.is_crash_loop) == (3, False)
    assert story.state.outcome.restarts == 3


def test_a_budget_without_a_limit_is_not_told_as_a_number() -> None:
    story = running(JobSpec("job", budget=RestartBudget(UNLIMITED)), "a").fails("a", 0)
    assert reason(story).endswith("restarting with the same nodes (restart 1, no limit)")


def test_a_budget_per_window_forgets() -> None:
    job = JobSpec("job", budget=RestartBudget(2, 3600.0))
    story = running(job, "a")
    for _ in range(5):
        story.passes(2000)
        story.fails("a", 0).stop("a").runs()
    assert story.state.outcome is None
    story.fails("a", 0)
    assert reason(story) == "--max-restarts is used up (2 of 2 within 3600 s)"


def test_a_rank_that_fails_at_once_three_times_running_ends_the_job() -> None:
    story = running(spec(2, restarts=9, crash_loop=CrashLoop(3)), "a", "b")
    for _ in range(2):
        story.fails("a", 1, ran_s=0.2).stop("a", "b").runs()
    story.fails("a", 1, ran_s=0.2).stop("a", "b")
    assert (
        reason(story) == "rank 1 failed within 1 s of its start 3 times in a row; the job ends (--crash-loop)"
    )
    assert story.state.outcome is not None
    assert (story.state.outcome.exit_code, story.state.outcome.is_crash_loop) == (79, True)
    assert story.state.decisions[-1].is_crash_loop


@pytest.mark.parametrize(("rank", "ran_s"), [(0, 0.2), (1, 30.0)])
def test_another_rank_or_a_longer_life_breaks_the_streak(rank: int, ran_s: float) -> None:
    story = running(spec(2, restarts=9, crash_loop=CrashLoop(3)), "a", "b")
    for r, s in ((1, 0.2), (1, 0.2), (rank, ran_s), (1, 0.2)):
        story.fails("a", r, ran_s=s).stop("a", "b").runs()
    assert story.state.outcome is None


def test_the_streak_is_about_the_first_cause_not_the_first_report() -> None:
    story = running(spec(2, restarts=9, crash_loop=CrashLoop(3)), "a", "b")
    for _ in range(3):
        story.fails("b", 2, FailureClass.CONSEQUENCE, ran_s=0.3).fails("a", 0, ran_s=0.2).stop("a", "b")
        if story.state.outcome is None:
            story.runs()
    assert story.state.outcome is not None
    assert story.state.outcome.reason.startswith("rank 0 failed within 1 s")


def test_there_is_no_crash_loop_rule_by_default() -> None:
    story = running(spec(1, restarts=9), "a")
    for _ in range(6):
        story.fails("a", 0, ran_s=0.1).stop("a").runs()
    assert story.state.outcome is None


@pytest.mark.parametrize(
    ("code", "kind"), [(7, DecisionKind.FAIL), (8, DecisionKind.IGNORE), (9, DecisionKind.IGNORE)]
)
def test_a_rule_for_one_exit_code_outranks_the_class(code: int, kind: DecisionKind) -> None:
    rules = (
        PolicyRule(FailureClass.EXIT_CODE, PolicyAction.FAIL, 7),
        PolicyRule(FailureClass.EXIT_CODE, PolicyAction.RESTART),
        PolicyRule(FailureClass.EXIT_CODE, PolicyAction.IGNORE),
    )
    story = running(spec(1, rules=rules), "a").fails("a", 0, FailureClass.EXIT_CODE, exit_code=code)
    assert story.state.decisions[-1].kind is kind


def test_a_node_can_be_left_out_on_its_first_failure() -> None:
    rules = (PolicyRule(FailureClass.HARDWARE, PolicyAction.RESTART_WITHOUT_NODE),)
    story = running(spec(2, rules=rules, node_cooldown_s=600.0), "a", "b", "c")
    story.fails("a", 0, FailureClass.HARDWARE)
    assert story.state.decisions[-1].kind is DecisionKind.RESTART_WITH_SPARE
    assert story.stop("a", "b").nodes() == ["c", "b"]
    (waiting,) = story.told("a")
    assert isinstance(waiting, Waiting)
    assert (
        waiting.reason
        == "a is excluded: --failure-policy excludes a node on hardware; the node is admitted again after 600 s"
    )
    story.passes(600)
    assert "a" not in story.state.excluded


def test_a_node_that_fails_too_often_sits_out_if_the_job_can_do_without() -> None:
    story = running(spec(1, 2, restarts=9, node_failure_limit=2), "a", "b")
    story.fails("b", 2, FailureClass.HARDWARE).stop("a", "b").runs()
    story.fails("b", 2, FailureClass.CONSEQUENCE).fails("b", 3, FailureClass.HARDWARE).stop("a", "b")
    assert story.nodes() == ["a"]
    assert "2 failures of this job happened on it" in reason(story)
    alone = running(spec(1, restarts=9, node_failure_limit=2), "a")
    for _ in range(4):
        alone.fails("a", 0, FailureClass.HARDWARE).stop("a").runs()
    assert alone.nodes() == ["a"]


def test_an_exception_of_the_script_is_not_held_against_the_node() -> None:
    story = running(spec(1, 2, restarts=9, node_failure_limit=1), "a", "b").fails("b", 2).stop("a", "b")
    assert story.nodes() == ["a", "b"]


def test_a_judgement_does_not_change_the_state() -> None:
    story = running(spec(2), "a", "b")
    before = story.state
    cause = story.fails("a", 0).state.causes[0]
    assert decide(before, cause, story.now) == decide(before, cause, story.now)
    assert before.restarts_used == 0


def test_a_consequence_is_never_told_as_the_cause() -> None:
    lost = Cause("a", 0, 0, FailureClass.CONSEQUENCE, "Connection closed by peer", 1)
    assert in_words(lost) == "rank 0 on a lost the connection to its peers"
