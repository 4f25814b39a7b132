"""From the first word of ranks that stand still to a decision: who is asked, for how long, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_story import Story, agent, running, spec
from test_diagnosis import absent, waiting

from rendezvous.rounds.hang_examination import ANSWER_WITHIN_S, ASK_AGAIN_S, STACKS_WITHIN_S, TIMES_ASKED
from rendezvous.rounds.snapshot import decode_state, encode_state
from rendezvous.values.events import Accused, Examine, Examined, RankFailed, RanksStalled, Stop
from rendezvous.values.job_state import JobState, Phase, Stage
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import DecisionKind, Doubt, FailureClass, PolicyAction, PolicyRule

REPORTS = {"a": (waiting(0, 4, 12), waiting(1, 4, 12)), "b": (waiting(2, 4, 12), absent(3, 4, 11))}


def two_nodes(**how: object) -> Story:
    return running(spec(2, restarts=2, **how), "a", "b")


def still(story: Story, node: str = "a") -> Story:
    return story.happens(RanksStalled(agent(node), story.state.generation))


def tell(story: Story, node: str, *reports: object, generation: int = 1) -> Story:
    told = reports or REPORTS[node]
    return story.happens(Examined(agent(node), generation, tuple(told)))  # type: ignore[arg-type]


def stage(story: Story) -> Stage | None:
    return story.state.examination.stage if story.state.examination is not None else None


def accused(story: Story, node: str) -> list[Accused]:
    return [message for message in story.told(node) if isinstance(message, Accused)]


def test_all_are_asked_and_the_guilty_ones_agent_is_told() -> None:
    story = still(two_nodes())
    assert story.told("a") == story.told("b") == [Examine(1)]
    tell(story, "a")
    assert story.effects == ()
    (told,) = accused(tell(story, "b"), "b")
    cause = told.cause
    assert (cause.node, cause.rank, cause.local_rank, cause.failure) == ("b", 3, 1, FailureClass.HANG)
    assert cause.reason.startswith("has made no progress for 3.2 s in its data loader")
    assert (cause.exit_code, cause.step, cause.uncertain) == (124, 11, False)
    assert "rank 0 has made no progress" in cause.traceback


def test_one_that_was_away_when_it_was_asked_is_asked_again_as_soon_as_it_speaks() -> None:
    story = tell(still(two_nodes()), "a")
    assert still(story, "a").effects == ()
    assert still(story, "b").told("b") == [Examine(1)]
    assert accused(tell(story, "b"), "b")


def test_its_report_is_a_failure_like_any_other() -> None:
    story = tell(tell(still(two_nodes()), "a"), "b")
    (told,) = accused(story, "b")
    story.happens(RankFailed(agent("b"), 1, replace(told.cause, traceback="its stacks")))
    (stop,) = story.told("a")
    assert isinstance(stop, Stop)
    assert stop.decision.kind is DecisionKind.RESTART
    assert stop.decision.reason.startswith("rank 3 on b: has made no progress for 3.2 s in its data loader")
    assert (story.state.examination, story.state.timers.examine_at) == (None, None)
    story.stop("a", "b").runs()
    assert (story.state.generation, story.state.phase) == (2, Phase.RUNNING)
    assert story.state.node_failures["b"] == 1


def test_an_agent_that_does_not_say_where_its_rank_stands_is_not_waited_for() -> None:
    story = tell(tell(still(two_nodes()), "a"), "b")
    story.passes(STACKS_WITHIN_S - 0.1)
    assert story.state.phase is Phase.RUNNING
    story.passes(0.2)
    assert story.state.phase is Phase.STOPPING
    assert story.state.causes[3].reason.endswith("(its agent did not send the stacks)")


def test_an_agent_that_does_not_answer_is_not_waited_for() -> None:
    story = tell(still(two_nodes()), "a")
    for _ in range(TIMES_ASKED - 1):
        story.passes(ANSWER_WITHIN_S + ASK_AGAIN_S + 0.1)
        assert stage(story) is Stage.ASKING
        tell(story, "a")
    story.passes(ANSWER_WITHIN_S + 0.1)
    assert stage(story) is Stage.ACCUSING
    causes = list(story.state.examination.accused.values())
    assert sorted(cause.rank for cause in causes) == [2, 3]
    assert all(cause.uncertain for cause in causes)
    assert tell(story, "b").effects == ()  # too late


def test_an_agent_that_comes_back_late_is_heard() -> None:
    story = tell(still(two_nodes()), "a")
    story.passes(ANSWER_WITHIN_S + ASK_AGAIN_S + 0.1)
    (told,) = accused(tell(tell(story, "a"), "b"), "b")
    assert (told.cause.rank, told.cause.uncertain) == (3, False)


def test_a_rank_within_its_budget_is_waited_for_and_then_asked_again() -> None:
    story = tell(still(two_nodes()), "a")
    saving = absent(3, 4, 11, phase=RankPhase.CHECKPOINT, limit_s=5.2)
    tell(story, "b", waiting(2, 4, 12), saving)
    assert not story.told("b")
    assert still(story).effects == ()  # nobody is asked twice
    story.passes(1.9)
    assert story.state.examination is not None
    assert story.state.examination.stage is Stage.PATIENCE
    story.passes(0.2)
    assert story.state.examination.stage is Stage.ASKING


def test_what_turns_out_to_be_in_order_is_forgotten() -> None:
    story = still(two_nodes())
    for node in REPORTS:
        tell(story, node, *(replace(report, stalled_s=0.0) for report in REPORTS[node]))
    assert (story.state.examination, story.state.timers.examine_at) == (None, None)
    assert still(story).told("b") == [Examine(1)]


def test_words_of_another_generation_or_rank_change_nothing() -> None:
    story = two_nodes()
    assert story.happens(RanksStalled(agent("a"), 7)).effects == ()
    assert story.happens(RanksStalled(agent("a", life=9), 1)).effects == ()
    still(story)
    before = story.state
    assert tell(story, "a", generation=7).state is before
    tell(story, "a", *REPORTS["b"])  # not its ranks
    assert story.state.examination is not None
    assert story.state.examination.reports["a"] == ()
    assert tell(story, "a").effects == ()


def test_a_verdict_that_is_not_certain_does_not_count_against_the_node() -> None:
    story = still(two_nodes(rules=(PolicyRule(FailureClass.HANG, PolicyAction.RESTART_WITHOUT_NODE),)))
    tell(story, "a", waiting(0, 4, 12), waiting(1, 4, 12))
    tell(story, "b", waiting(2, 4, 12), waiting(3, 4, 12))
    (told,) = accused(story, "a")
    story.happens(RankFailed(agent("a"), 1, told.cause))
    assert story.state.decision is not None
    assert told.cause.doubt is Doubt.NO_RANK
    story.stop("a", "b")
    assert len(story.state.node_failures) == 0
    assert len(story.state.excluded) == 0


def test_a_hang_that_is_ignored_as_asked_is_looked_at_seldom() -> None:
    story = still(two_nodes(rules=(PolicyRule(FailureClass.HANG, PolicyAction.IGNORE),)))
    (told,) = accused(tell(tell(story, "a"), "b"), "b")
    story.happens(RankFailed(agent("b"), 1, told.cause))
    assert story.state.phase is Phase.RUNNING
    assert still(story).effects == ()
    story.passes(15.1)
    assert story.state.examination is not None
    assert story.state.examination.stage is Stage.ASKING
    tell(tell(story, "a"), "b")
    assert not story.told("b")
    assert story.state.examination.stage is Stage.PATIENCE


def test_a_stop_for_another_reason_ends_it() -> None:
    story = tell(still(two_nodes()), "a").fails("b", 2)
    assert (story.state.phase, story.state.examination) == (Phase.STOPPING, None)
    assert tell(story, "b").effects == ()


def test_it_is_no_part_of_a_snapshot() -> None:
    story = tell(still(two_nodes()), "a")
    kept = decode_state(encode_state(story.state))
    assert isinstance(kept, JobState)
    assert kept.examination is None
    assert kept.world == story.state.world


@pytest.mark.parametrize(("doubt", "checks"), [(Doubt.CULPRIT, True), (None, False)])
def test_nodes_are_checked_again_after_a_hang_without_a_certain_culprit(
    doubt: Doubt | None, checks: bool
) -> None:
    story = running(spec(2), "a", "b").fails("a", 0, FailureClass.HANG, doubt=doubt).stop("a", "b")
    assert [place.check_first for place in story.places().values()] == [checks, checks]
    story.runs().fails("a", 0).stop("a", "b")
    assert not any(place.check_first for place in story.places().values())
