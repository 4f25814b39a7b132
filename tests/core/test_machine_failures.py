from __future__ import annotations

import itertools

import pytest
from job_story import Story, agent, running, spec

from rendezvous.rounds.view import summary_of
from rendezvous.values.events import (
    AgentLeft,
    AgentLost,
    Assigned,
    DeadlineReached,
    Ended,
    JobAborted,
    JobResized,
    NodeDrained,
    NodeHealth,
    NodeResumed,
    Notice,
    Persist,
    RestartOrdered,
    Stop,
    Waiting,
)
from rendezvous.values.job_state import DECISIONS_KEPT, Phase
from rendezvous.values.types import Decision, DecisionKind, FailureClass, Outcome, PolicyAction, PolicyRule

LOST = FailureClass.NODE_LOST


def outcome(story: Story) -> Outcome:
    assert story.state.outcome is not None
    return story.state.outcome


def decision(story: Story) -> Decision:
    return story.state.decisions[-1]


def test_a_failure_is_told_to_all_at_once_and_the_next_world_waits_for_every_reaping() -> None:
    story = running(spec(2), "a", "b").fails("b", 2)
    assert story.effects[0] == Persist()
    (stop,) = story.told("a")
    assert stop == story.told("b")[0]
    assert isinstance(stop, Stop)
    assert stop.decision.kind is DecisionKind.RESTART
    assert stop.decision.reason == (
        "rank 2 on b: ValueError: bad batch; restarting with the same nodes (restart 1 of 3)"
    )
    story.stop("b")
    assert story.effects == ()
    story.stop("a")
    told = story.told("a")[0]
    assert isinstance(told, Assigned)
    assert (told.assignment.generation, told.assignment.restart_count, told.assignment.max_restarts) == (
        2,
        1,
        3,
    )


def test_many_failures_of_one_generation_cost_one_restart() -> None:
    story = running(spec(2), "a", "b")
    for rank, node in ((0, "a"), (1, "a"), (2, "b"), (3, "b")):
        story.fails(node, rank)
    assert story.stop("a", "b").state.restarts_used == 1
    assert len(story.state.decisions) == 1


def test_the_first_cause_is_the_same_in_every_order_of_arrival() -> None:
    reports = [
        ("a", 0, FailureClass.CONSEQUENCE, None),
        ("a", 1, FailureClass.SIGNAL, None),
        ("b", 2, FailureClass.USER_EXCEPTION, 7),
        ("b", 3, FailureClass.USER_EXCEPTION, 5),
    ]
    for order in itertools.permutations(reports):
        story = running(spec(2, restarts=0), "a", "b")
        for node, rank, failure, step_no in order:
            story.fails(node, rank, failure, step=step_no, exit_code=10 + rank)
        end = outcome(story.stop("a", "b"))
        assert (end.exit_code, [c.rank for c in end.causes]) == (13, [3, 2, 1, 0])


def test_without_restarts_the_job_fails_with_the_cause_s_own_code() -> None:
    story = running(spec(2, restarts=0), "a", "b").fails("a", 1, exit_code=137).stop("a", "b")
    assert outcome(story).exit_code == 137
    assert outcome(story).reason == "no restarts are allowed (--max-restarts 0)"
    assert [type(m) for m in story.told("b")] == [Ended]


def test_a_failed_job_never_exits_with_zero() -> None:
    story = running(spec(1, restarts=0), "a").fails("a", 0, exit_code=0).stop("a")
    assert outcome(story).exit_code == 1


def test_a_rule_about_the_true_cause_counts_even_if_a_consequence_came_first() -> None:
    rules = (PolicyRule(FailureClass.OUT_OF_MEMORY, PolicyAction.FAIL),)
    story = running(spec(2, rules=rules), "a", "b").fails("a", 0, FailureClass.CONSEQUENCE)
    assert decision(story).kind is DecisionKind.RESTART
    story.fails("b", 2, FailureClass.OUT_OF_MEMORY).stop("a", "b")
    assert outcome(story).reason == "--failure-policy ends the job on out-of-memory"


def test_an_ignored_failure_is_noted_and_the_node_may_finish() -> None:
    rules = (PolicyRule(FailureClass.EXIT_CODE, PolicyAction.IGNORE, 9),)
    story = running(spec(2, rules=rules), "a", "b").fails("a", 0, FailureClass.EXIT_CODE, exit_code=9)
    assert decision(story).kind is DecisionKind.IGNORE
    assert story.state.phase is Phase.RUNNING
    assert story.told("a") == [Notice(1, decision(story).reason)]
    story.fails("a", 1, FailureClass.EXIT_CODE, exit_code=9)  # the node's last rank
    assert outcome(story.finish("b")).succeeded
    lost = running(spec(1, rules=(PolicyRule(LOST, PolicyAction.IGNORE),)), "a")
    assert outcome(lost.happens(AgentLost(agent("a"), "gone"))).succeeded


def test_a_node_that_can_start_no_rank_is_not_waited_for_if_that_is_ignored() -> None:
    rules = (PolicyRule(FailureClass.NETWORK, PolicyAction.IGNORE),)
    story = running(spec(2, rules=rules), "a", "b").fails("b", 2, FailureClass.NETWORK).stop("b")
    assert story.state.phase is Phase.RUNNING
    assert outcome(story.finish("a")).succeeded


def test_a_node_that_stops_its_ranks_without_an_order_breaks_the_world() -> None:
    story = running(spec(2), "a", "b").stop("b")
    assert (story.state.phase, decision(story).kind) == (Phase.STOPPING, DecisionKind.RESTART)


# --- lost nodes


def test_a_lost_node_is_not_waited_for_and_a_spare_takes_its_place() -> None:
    story = running(spec(2), "a", "b", "c").happens(AgentLost(agent("a"), "its stream broke"))
    assert decision(story).kind is DecisionKind.RESTART_WITH_SPARE
    assert decision(story).reason.startswith(
        "node a was lost: its stream broke; restarting with 1 spare node"
    )
    assert story.stop("b").nodes() == ["c", "b"]
    assert story.state.restarts_used == 1


def test_an_elastic_job_shrinks_and_only_who_must_moves() -> None:
    story = running(spec(1, 3), "a", "b", "c").happens(AgentLost(agent("a"), "gone"))
    assert decision(story).kind is DecisionKind.SHRINK
    assert story.stop("b", "c").nodes() == ["c", "b"]


def test_more_nodes_lost_while_the_others_stop_are_told_of_as_well() -> None:
    story = running(spec(1, 3), "a", "b", "c").happens(AgentLost(agent("c"), "gone"))
    assert decision(story).reason.endswith("continuing with 2 of 3 nodes (restart 1 of 3)")
    story.happens(AgentLost(agent("b"), "gone")).stop("a")
    assert decision(story).reason.endswith("continuing with 1 of 3 nodes (restart 1 of 3)")
    (told,) = (each for each in story.told("a") if isinstance(each, Assigned))
    assert told.assignment.reason == decision(story).reason


def test_a_replacement_is_awaited_for_a_bounded_time() -> None:
    story = (
        running(spec(2, replacement_timeout_s=60.0), "a", "b")
        .happens(AgentLost(agent("b"), "gone"))
        .stop("a")
    )
    assert decision(story).kind is DecisionKind.WAIT
    assert isinstance(story.told("a")[0], Waiting)
    assert story.passes(59).joins("c").nodes() == ["a", "c"]
    story = (
        running(spec(2, replacement_timeout_s=60.0), "a", "b")
        .happens(AgentLost(agent("b"), "gone"))
        .stop("a")
    )
    story.passes(60)
    assert outcome(story).reason.startswith("no replacement joined within 60 s; 1 of 2 nodes are left: a")
    assert (outcome(story).exit_code, outcome(story).first_cause) == (1, decision(story).cause)


def test_a_silent_node_is_lost_when_its_lease_runs_out_and_not_before() -> None:
    story = running(spec(2, lease_s=3.0), "a", "b")
    story.now += 2.9
    assert story.happens(DeadlineReached()).state.phase is Phase.RUNNING
    story.now += 0.1
    story.happens(DeadlineReached())
    assert "no heartbeat for 3 s" in decision(story).reason
    assert [d.kind for d in story.state.decisions] == [DecisionKind.WAIT], "both are gone: one decision"


def test_who_does_not_stop_in_time_is_lost() -> None:
    story = running(spec(1, 2, stop_budget_s=45.0), "a", "b").fails("a", 0).stop("a").passes(44)
    assert story.state.phase is Phase.STOPPING
    assert story.passes(1).nodes() == ["a"]


def test_the_true_cause_may_be_a_loss_that_shows_while_stopping() -> None:
    story = running(spec(2, restarts=0), "a", "b").fails("a", 0, FailureClass.CONSEQUENCE)
    story.happens(AgentLost(agent("b"), "its stream broke")).stop("a")
    cause = outcome(story).first_cause
    assert cause is not None
    assert (cause.failure, cause.node) == (LOST, "b")


def test_a_new_life_of_an_agent_costs_one_restart_and_keeps_its_rank() -> None:
    story = running(spec(2), "a", "b").joins("a", life=2)
    assert decision(story).reason.startswith("node a started a new agent; restarting with the same nodes")
    assert story.stop("b").nodes() == ["a", "b"]
    assert (story.state.restarts_used, story.state.generation) == (1, 2)
    again = running(spec(2), "a", "b").fails("b", 2).joins("a", life=2).stop("b")
    assert (again.nodes(), again.state.restarts_used) == (["a", "b"], 1)


def test_a_drained_node_that_starts_a_new_agent_is_not_one_of_the_same_nodes() -> None:
    story = running(spec(2), "a", "b", "c").joins("a", life=2).happens(NodeDrained("a", "fans"))
    story.fails("b", 2).stop("b")
    assert (story.nodes(), decision(story).kind) == (["c", "b"], DecisionKind.RESTART_WITH_SPARE)


def test_a_node_lost_after_its_ranks_finished_breaks_nothing() -> None:
    story = running(spec(2), "a", "b").finish("a").happens(AgentLost(agent("a"), "gone"))
    assert decision(story).kind is DecisionKind.IGNORE
    assert outcome(story.finish("b")).succeeded


def test_a_goodbye_that_leaves_enough_nodes_is_no_failure() -> None:
    story = running(spec(1, 2, restarts=0), "a", "b").happens(AgentLeft(agent("b"), "SIGTERM"))
    assert decision(story).reason == "node b left: SIGTERM; continuing with 1 of 2 nodes"
    assert story.stop("a").state.restarts_used == 0
    fixed = running(spec(2, restarts=0), "a", "b").happens(AgentLeft(agent("b"), "SIGTERM")).stop("a")
    assert outcome(fixed).reason == "no restarts are allowed (--max-restarts 0)"


# --- orders


def test_a_drained_node_makes_room_and_may_come_back() -> None:
    story = running(spec(2, restarts=0), "a", "b", "c").happens(NodeDrained("a", "fans"))
    story.stop("a", "b")
    assert story.nodes() == ["c", "b"]
    (waiting,) = story.told("a")
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "a is excluded: drained by an operator: fans"
    before = story.state
    assert story.happens(NodeDrained("a", "fans")).state is before
    story.happens(NodeResumed("a"))
    assert len(story.state.excluded) == 0
    assert (story.state.restarts_used, story.happens(NodeResumed("a")).effects) == (0, ())


def asks(story: Story, node: str) -> Story:
    return story.happens(NodeHealth(agent(node), "bad GPU", ("bad GPU",), "bad GPU", is_asked=True))


def test_a_spare_takes_over_from_a_node_that_a_rank_asks_to_leave_out() -> None:
    story = asks(running(spec(2, restarts=0), "a", "b", "c"), "b")
    assert decision(story).reason == "b is excluded: bad GPU; restarting with 1 spare node"
    story.fails("b", 2)  # the rank that has asked, and raises
    assert story.stop("a", "b").nodes() == ["a", "c"]
    assert story.state.restarts_used == 0
    story.passes(3600)
    assert "b" in story.state.excluded
    before = story.state
    assert asks(story, "b").state.decisions == before.decisions


def test_a_node_that_nobody_can_replace_stays_until_somebody_can() -> None:
    story = asks(running(spec(2), "a", "b"), "b")
    words = "no other node can take over from b, so the job continues with it (bad GPU)"
    assert story.told("b") == [Notice(1, words)]
    assert story.state.phase is Phase.RUNNING
    story.joins("c").fails("a", 0).stop("a", "b")
    assert story.nodes() == ["a", "c"]


def test_a_round_counts_a_resumed_node_and_not_a_drained_one() -> None:
    story = Story(spec(2)).joins("a").happens(NodeDrained("b", "fans")).joins("b")
    assert story.state.phase is Phase.FORMING
    assert story.happens(NodeResumed("b")).state.phase is Phase.SEALED


def test_who_waits_hears_of_a_drained_node_and_of_its_return() -> None:
    story = Story(spec(3)).joins("a", "b").happens(NodeDrained("a", "fans"))
    why = "a is excluded: drained by an operator: fans"
    assert story.told("a") == [Waiting(why, 1, 3, stands_by=True)]
    assert story.told("b") == [Waiting(f"waiting for 2 more nodes ({why})", 1, 3)]
    shown = summary_of("job", story.state)
    assert (shown.members, shown.reason) == (1, "1 of 3 nodes have joined")
    assert story.happens(NodeResumed("a")).told("a") == [Waiting("waiting for 1 more node", 2, 3)]


def test_a_running_job_is_not_stopped_for_a_size_that_it_cannot_have() -> None:
    story = running(spec(1), "a", "b").happens(JobResized(3, 4))
    assert story.state.phase is Phase.RUNNING
    assert decision(story.joins("c").happens(JobResized(3, 5))).kind is DecisionKind.GROW


def test_resizing_shrinks_grows_and_seals() -> None:
    story = running(spec(2), "a", "b").happens(JobResized(1, 1))
    assert decision(story).kind is DecisionKind.SHRINK
    assert story.stop("a", "b").nodes() == ["a"]
    story.runs().happens(JobResized(1, 2))
    assert decision(story).kind is DecisionKind.GROW
    assert story.stop("a").nodes() == ["a", "b"]
    assert story.state.restarts_used == 0
    before = story.state
    assert story.happens(JobResized(3, 1)).state is before
    assert Story(spec(2)).joins("a").happens(JobResized(1, 1)).state.phase is Phase.SEALED


def test_an_ordered_restart_is_free() -> None:
    story = running(spec(2, restarts=0), "a", "b").happens(RestartOrdered("new code")).stop("a", "b")
    assert (story.state.generation, story.state.restarts_used) == (2, 0)
    before = story.stop("a").state
    assert story.happens(RestartOrdered("again")).state is not before, "a sealed world restarts too"


def test_a_job_that_ends_already_keeps_its_reason() -> None:
    story = running(spec(2), "a", "b").happens(JobAborted("first"))
    before = story.state
    assert story.happens(JobAborted("second")).state is before
    assert outcome(story.stop("a", "b")).reason == "aborted by an operator: first"


@pytest.mark.parametrize("stage", ["forming", "running", "stopping", "ended"])
def test_an_abort_ends_the_job_wherever_it_is(stage: str) -> None:
    story = Story(spec(2)).joins("a")
    if stage != "forming":
        story.joins("b").runs()
    if stage == "stopping":
        story.fails("a", 0)
    if stage == "ended":
        before = story.finish("a", "b").state
        assert story.happens(JobAborted("enough")).state is before
        return
    story.happens(JobAborted("enough"))
    if stage != "forming":
        story.stop("a", "b")
    assert (outcome(story).exit_code, outcome(story).reason) == (143, "aborted by an operator: enough")


def test_the_log_of_decisions_is_bounded() -> None:
    story = running(spec(1, restarts=10_000), "a")
    for _ in range(DECISIONS_KEPT + 20):
        story.fails("a", 0).stop("a").runs()
    assert len(story.state.decisions) == DECISIONS_KEPT
