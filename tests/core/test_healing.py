"""Healing in place: ranks that survive keep their processes, and when they cannot, all ranks restart as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_story import Story, agent, running, spec

from rendezvous.rounds.admission import resume
from rendezvous.rounds.event_log import lines
from rendezvous.rounds.snapshot import decode_state, encode_state
from rendezvous.rounds.view import summary_of
from rendezvous.values.events import (
    AgentLeft,
    AgentLost,
    AgentStopped,
    Ended,
    HealReady,
    JobAborted,
    JobResized,
    NodeDrained,
    NodeResumed,
    Persist,
    RestartOrdered,
    Stop,
    Tell,
    Waiting,
)
from rendezvous.values.job_state import Phase
from rendezvous.values.types import (
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    PolicyAction,
    PolicyRule,
    Recover,
    RestartBudget,
    ScaleUp,
)

KILLED = FailureClass.SIGNAL
RAISED = FailureClass.USER_EXCEPTION


def job(least: int = 2, most: int | None = None, restarts: int = 3, **fields: object) -> JobSpec:
    return spec(least, most, restarts, **{"recover": Recover.AUTO, **fields})


def healing(wanted: JobSpec, *nodes: str) -> Story:
    """A running job in which every rank can be paused."""
    return running(wanted, *nodes).ready(*nodes)


def decision(story: Story) -> Decision:
    return story.state.decisions[-1]


# --- a rank dies -------------------------------------------------------------------------------------


def test_a_rank_dies_and_the_others_keep_their_processes() -> None:
    story = healing(job(), "a", "b").fails("b", 3, KILLED)
    assert story.effects[0] == Persist()
    assert {type(m) for node in "ab" for m in story.told(node)} == {Stop}
    first = decision(story)
    assert (first.kind, first.in_place, first.title) == (DecisionKind.RESTART, True, "heal")
    assert first.reason.endswith("; healing in place with the same nodes (heal 1, no limit)")
    story.park("a", "b")
    assert story.state.phase is Phase.SEALED
    assert story.effects[0] == Persist()
    assert [place.in_place for place in story.places().values()] == [True, True]
    assert (story.state.heals_used, story.state.restarts_used) == (1, 0)
    assert summary_of("job", story.state).heals == 1


def test_a_heal_needs_no_restarts() -> None:
    story = healing(job(restarts=0), "a", "b").fails("a", 0, KILLED).park("a", "b")
    assert story.state.phase is Phase.SEALED


def test_a_node_on_which_no_rank_is_left_has_new_ranks_that_join() -> None:
    story = healing(job(), "a", "b").fails("b", 2, KILLED).fails("b", 3, KILLED).park("a", "b")
    assert "b" not in story.state.parked
    assert story.places()["b"].in_place


def test_the_journal_and_the_decisions_call_it_a_heal() -> None:
    story = healing(job(), "a", "b")
    before = story.state
    story.fails("b", 3, KILLED)
    event = AgentStopped(agent("a"), 1)  # any: the lines follow from the states
    (line,) = [each for each in lines(event, before, story.state) if each.kind == "decision"]
    assert line.text.startswith("heal: rank 3 on b: ")


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        (DecisionKind.RESTART_WITH_SPARE, "heal-with-spare"),
        (DecisionKind.SHRINK, "shrink-in-place"),
        (DecisionKind.GROW, "grow-in-place"),
        (DecisionKind.WAIT, "wait-for-replacement"),
    ],
)
def test_other_decisions_in_place_have_their_own_titles(kind: DecisionKind, title: str) -> None:
    assert Decision(kind, "", 1, in_place=True).title == title
    assert Decision(kind, "", 1).title == kind


# --- when it is not possible -------------------------------------------------------------------------


def test_without_the_option_nothing_is_in_place() -> None:
    story = healing(spec(), "a", "b").fails("b", 3, KILLED)
    assert not len(story.state.ready)
    assert not decision(story).in_place
    assert not story.park("a", "b").places()["a"].in_place


@pytest.mark.parametrize(
    ("recover", "words"),
    [
        (Recover.AUTO, "restarting with the same nodes (restart 1 of 3)"),
        (
            Recover.IN_PLACE,
            "not in place: no rank trains inside State.run of ddp.elastic; restarting with the same nodes "
            "(restart 1 of 3)",
        ),
    ],
)
def test_a_script_that_did_not_opt_in_is_restarted(recover: Recover, words: str) -> None:
    story = running(job(recover=recover), "a", "b").fails("b", 3, KILLED)
    assert not decision(story).in_place
    assert decision(story).reason.endswith(f"bad batch; {words}")


def test_recover_restart_starts_all_ranks_anew_although_they_could_be_paused() -> None:
    story = healing(job(recover=Recover.RESTART), "a", "b").fails("b", 3, KILLED)
    assert not decision(story).in_place


def test_a_node_that_left_run_does_not_count() -> None:
    story = healing(job(), "a", "b").ready("a", "b", ready=False).fails("b", 3, KILLED)
    assert not decision(story).in_place


def test_the_only_node_that_is_ready_is_lost_and_all_restart() -> None:
    story = running(job(1, 2), "a", "b").ready("b").happens(AgentLost(agent("b"), "its link broke"))
    assert not decision(story).in_place


def test_the_last_rank_of_the_only_ready_node_dies_and_all_restart() -> None:
    story = running(job(), "a", "b", "c").ready("b")
    story.happens(HealReady(agent("b"), 1, ready=True)).fails("b", 2, KILLED)
    assert decision(story).in_place
    alone = Story(job(2)).joins("a").joins("b", nproc=1).runs().ready("b").fails("b", 2, KILLED)
    assert not decision(alone).in_place


@pytest.mark.parametrize(
    ("failure", "rule", "in_place"),
    [
        (RAISED, None, False),
        (RAISED, PolicyAction.HEAL, True),
        (RAISED, PolicyAction.RESTART, False),
        (KILLED, None, True),
        (KILLED, PolicyAction.RESTART, False),
        (KILLED, PolicyAction.HEAL, True),
        (FailureClass.HANG, None, True),
        (FailureClass.CONSEQUENCE, None, True),
    ],
)
def test_the_policy_says_which_failures_are_healed(
    failure: FailureClass, rule: PolicyAction | None, in_place: bool
) -> None:
    rules = () if rule is None else (PolicyRule(failure, rule),)
    story = healing(job(rules=rules), "a", "b").fails("b", 3, failure)
    assert decision(story).in_place is in_place


def test_heal_as_a_rule_restarts_where_it_cannot_heal() -> None:
    rules = (PolicyRule(RAISED, PolicyAction.HEAL),)
    story = running(job(rules=rules), "a", "b").fails("b", 3, RAISED)
    assert (decision(story).kind, decision(story).in_place) == (DecisionKind.RESTART, False)


def test_an_exception_behind_a_lost_connection_is_not_healed() -> None:
    """The first report is a consequence, and the stop is in place. The true cause is an error of the script."""
    story = healing(job(), "a", "b").fails("a", 0, FailureClass.CONSEQUENCE)
    assert decision(story).in_place
    story.fails("b", 2, RAISED).park("a", "b")
    last = decision(story)
    assert (last.kind, last.in_place) == (DecisionKind.RESTART, False)
    assert "not in place: an exception of the script" in last.reason
    assert last.reason.endswith("(restart 1 of 3)")
    assert [place.in_place for place in story.places().values()] == [False, False]
    assert (story.state.heals_used, story.state.restarts_used) == (0, 1)


def test_nobody_could_be_paused_and_all_restart_as_a_restart() -> None:
    story = healing(job(), "a", "b").fails("b", 3, KILLED).stop("a", "b")
    last = decision(story)
    assert not last.in_place
    assert (
        "not in place: no rank could be paused in time; restarting with the same nodes (restart 1"
        in last.reason
    )
    assert [place.in_place for place in story.places().values()] == [False, False]
    assert (story.state.heals_used, story.state.restarts_used) == (0, 1)


def test_nobody_could_be_paused_and_no_restart_is_left() -> None:
    story = healing(job(restarts=0), "a", "b").fails("b", 3, KILLED).stop("a", "b")
    assert story.state.phase is Phase.ENDED
    assert decision(story).reason == (
        "not in place: no rank could be paused in time; no restarts are allowed (--max-restarts 0)"
    )
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 3


def test_heals_that_end_as_restarts_use_up_the_restarts() -> None:
    story = healing(job(restarts=2), "a", "b")
    for _ in range(2):
        story.fails("b", 3, KILLED).stop("a", "b").runs().ready("a", "b")
    story.fails("b", 3, KILLED).stop("a", "b")
    assert story.state.outcome is not None
    assert "--max-restarts is used up (2 of 2)" in story.state.outcome.reason


# --- the budget --------------------------------------------------------------------------------------


def test_after_the_heals_come_the_restarts_and_then_the_end() -> None:
    story = healing(job(restarts=1, heal_budget=RestartBudget(2), recover=Recover.IN_PLACE), "a", "b")
    for used in (1, 2):
        story.fails("b", 3, KILLED)
        assert decision(story).reason.endswith(f"(heal {used} of 2)")
        story.park("a", "b").runs()
    story.fails("b", 3, KILLED)
    assert "not in place: --max-heals is used up (2 of 2); restarting" in decision(story).reason
    story.stop("a", "b").runs().ready("a", "b").fails("b", 3, KILLED)
    assert decision(story).kind is DecisionKind.FAIL
    assert decision(story).reason == (
        "not in place: --max-heals is used up (2 of 2); --max-restarts is used up (1 of 1)"
    )
    assert not decision(story).in_place
    story.stop("a", "b")
    assert story.state.outcome is not None
    assert (story.state.outcome.heals, story.state.outcome.restarts) == (2, 1)


def test_no_heals_are_allowed() -> None:
    story = healing(job(heal_budget=RestartBudget(0), recover=Recover.IN_PLACE), "a", "b").fails(
        "b", 3, KILLED
    )
    assert "not in place: no heals are allowed (--max-heals 0); restarting" in decision(story).reason


def test_a_window_of_heals_forgets() -> None:
    story = healing(job(restarts=0, heal_budget=RestartBudget(1, 600.0)), "a", "b")
    for _ in range(3):
        story.fails("b", 3, KILLED).park("a", "b").runs().passes(700)
    assert story.state.outcome is None
    story.fails("b", 3, KILLED).park("a", "b").runs().passes(100)
    story.state, story.effects = resume(story.state, 1e6)  # by a service with another clock
    story.now = 1e6
    assert decision(story.fails("b", 3, KILLED)).kind is DecisionKind.FAIL


# --- nodes -------------------------------------------------------------------------------------------


def test_a_node_is_lost_and_a_spare_takes_its_place() -> None:
    story = healing(job(2), "a", "b").joins("c").happens(AgentLost(agent("a"), "its link broke"))
    assert decision(story).title == "heal-with-spare"
    story.park("b")
    assert story.nodes() == ["c", "b"]
    assert {node: place.in_place for node, place in story.places().items()} == {"b": True, "c": True}


def test_a_node_is_lost_and_the_world_shrinks() -> None:
    story = healing(job(1, 2), "a", "b").happens(AgentLost(agent("a"), "its link broke"))
    assert decision(story).title == "shrink-in-place"
    story.park("b")
    assert story.nodes() == ["b"]
    assert story.places()["b"].in_place


def test_paused_ranks_wait_for_a_replacement() -> None:
    story = healing(job(2), "a", "b").happens(AgentLost(agent("a"), "its link broke"))
    assert decision(story).kind is DecisionKind.WAIT
    assert "waiting for 1 replacement node; the other ranks are paused" in decision(story).reason
    (waiting,) = story.park("b").told("b")
    assert isinstance(waiting, Waiting)
    assert not waiting.stands_by  # which would stop its paused ranks
    story.passes(10).joins("c")
    assert {node: place.in_place for node, place in story.places().items()} == {"b": True, "c": True}
    assert story.state.heals_used == 1


def test_the_paused_node_is_lost_while_the_job_waits() -> None:
    story = healing(job(2), "a", "b").happens(AgentLost(agent("a"), "its link broke")).park("b")
    story.happens(AgentLost(agent("b"), "its link broke too")).joins("c", "d")
    assert [place.in_place for place in story.places().values()] == [False, False]
    assert decision(story).reason.endswith("no paused rank is left: all ranks restart")
    assert (story.state.heals_used, story.state.restarts_used) == (0, 1)


def test_the_paused_node_is_lost_while_the_job_waits_and_no_restart_is_left() -> None:
    story = healing(job(2, restarts=0), "a", "b").happens(AgentLost(agent("a"), "its link broke")).park("b")
    story.happens(AgentLost(agent("b"), "its link broke too")).joins("c")
    assert story.state.phase is Phase.FORMING
    story.joins("d")
    assert story.state.outcome is not None
    assert story.state.outcome.reason == (
        "not in place: no paused rank is left; no restarts are allowed (--max-restarts 0)"
    )
    assert (story.state.outcome.heals, story.state.outcome.restarts) == (0, 0)
    assert story.state.outcome.first_cause is not None
    assert story.state.outcome.first_cause.node == "a"


def test_the_paused_node_starts_a_new_agent_while_the_job_waits() -> None:
    story = healing(job(2), "a", "b").happens(AgentLost(agent("a"), "its link broke")).park("b")
    story.joins("b", life=2).joins("c")
    assert not any(place.in_place for place in story.places().values())


def test_a_paused_node_is_drained_and_comes_back_before_the_seal() -> None:
    """It was told to stand by, so it has stopped its paused ranks."""
    story = healing(job(2), "a", "b").happens(AgentLost(agent("a"), "its link broke")).park("b")
    story.happens(NodeDrained("b", "repairs")).happens(NodeResumed("b")).joins("c")
    assert story.state.phase is Phase.SEALED
    assert not any(place.in_place for place in story.places().values())


def test_the_only_paused_rank_ends_while_it_waits() -> None:
    story = Story(job(2)).joins("a").joins("b", nproc=1).runs().ready("a", "b")
    story.happens(AgentLost(agent("a"), "its link broke")).park("b")
    story.happens(AgentStopped(agent("b"), 1)).joins("c")
    assert not any(place.in_place for place in story.places().values())


@pytest.mark.parametrize("late", [True, False])
def test_a_paused_rank_ends_before_the_others_have_stopped(late: bool) -> None:
    """A late copy of the first report does not bring it back."""
    story = healing(job(), "a", "b").fails("b", 3, KILLED).park("a").happens(AgentStopped(agent("a"), 1))
    if late:
        story.happens(AgentStopped(agent("a"), 1, parked=(0, 1)))
    story.stop("b")
    assert not any(place.in_place for place in story.places().values())


def test_a_node_that_stops_too_late_is_lost_and_has_no_paused_ranks() -> None:
    story = healing(job(1, 2), "a", "b").fails("b", 3, KILLED).park("a").passes(46)
    assert story.nodes() == ["a"]
    assert list(story.state.parked) == ["a"]


def test_a_paused_node_is_lost_before_the_others_have_stopped() -> None:
    story = healing(job(1, 2), "a", "b").fails("b", 3, KILLED).park("a")
    story.happens(AgentLost(agent("a"), "its link broke")).stop("b")
    assert story.nodes() == ["b"]
    assert not story.places()["b"].in_place


def test_two_ranks_die_at_once() -> None:
    story = healing(job(), "a", "b").fails("a", 0, KILLED).fails("b", 2, KILLED).park("a", "b")
    assert dict(story.state.parked.items()) == {"a": (1,), "b": (1,)}
    assert story.state.heals_used == 1


def test_another_rank_dies_while_the_world_heals() -> None:
    """Ranks of the new world have not reported yet. Those that were paused can be paused again."""
    story = healing(job(), "a", "b").fails("a", 0, KILLED).park("a", "b").runs().fails("a", 0, KILLED)
    assert decision(story).in_place
    story.park("a", "b").runs()
    assert story.state.heals_used == 2


def test_a_node_dies_after_the_seal_and_before_the_ranks_continue() -> None:
    story = healing(job(2), "a", "b").joins("c").fails("a", 0, KILLED).park("a", "b")
    assert story.state.phase is Phase.SEALED
    story.happens(AgentLost(agent("a"), "its link broke"))
    assert (story.state.phase, decision(story).title) == (Phase.STOPPING, "heal-with-spare")
    story.park("b")
    assert {node: place.in_place for node, place in story.places().items()} == {"b": True, "c": True}


def test_an_assignment_names_the_paused_ranks_that_the_service_counts_on() -> None:
    story = healing(job(), "a", "b").fails("b", 3, KILLED).park("a", "b")
    assert {node: place.parked for node, place in story.places().items()} == {"a": (0, 1), "b": (0,)}


def test_the_only_paused_rank_ends_after_the_seal_and_all_restart() -> None:
    """The other ranks of its node have not started, so nobody is left to join."""
    story = healing(job(), "a", "b").fails("a", 1, KILLED).stop("b").park("a")
    assert story.places()["b"].in_place
    story.fails("a", 0, FailureClass.EXIT_CODE)
    assert (decision(story).kind, decision(story).in_place) == (DecisionKind.RESTART, False)


def test_an_interrupt_and_an_abort_end_a_heal() -> None:
    for event in (JobAborted("enough"), AgentLeft(agent("b"), "stopped by SIGINT", ends_job=True)):
        story = healing(job(), "a", "b").fails("a", 0, KILLED).happens(event).park("a")
        if story.state.phase is not Phase.ENDED:
            story.park("b")
        assert [type(m) for m in story.told("a")] == [Ended]


# --- without a failure -------------------------------------------------------------------------------


def test_the_world_grows_in_place() -> None:
    story = (
        Story(job(1, 2, restarts=0, scale_up=ScaleUp.IMMEDIATE))
        .joins("a")
        .passes(2)
        .runs()
        .ready("a")
        .joins("b")
    )
    assert decision(story).title == "grow-in-place"
    assert decision(story).reason == "more nodes have joined; the world grows in place"
    story.park("a")
    assert {node: place.in_place for node, place in story.places().items()} == {"a": True, "b": True}
    assert (story.state.heals_used, story.state.restarts_used) == (0, 0)


def test_a_node_leaves_and_the_others_go_on_in_place() -> None:
    story = healing(job(1, 2, restarts=0), "a", "b").happens(AgentLeft(agent("a"), "stopped by SIGTERM"))
    assert decision(story).title == "shrink-in-place"
    assert story.park("b").places()["b"].in_place
    assert story.state.heals_used == 0


def test_an_operator_drains_a_node_in_place() -> None:
    story = healing(job(1, 2), "a", "b").happens(NodeDrained("a", "repairs"))
    assert decision(story).title == "shrink-in-place"
    story.park("a", "b")
    assert story.nodes() == ["b"]
    assert story.places()["b"].in_place
    (waiting,) = story.told("a")
    assert isinstance(waiting, Waiting)
    assert waiting.stands_by


def test_an_operator_resizes_in_place() -> None:
    story = healing(job(1, 3), "a", "b", "c").happens(JobResized(1, 2))
    assert decision(story).title == "shrink-in-place"


def test_an_order_to_restart_restarts_all_ranks() -> None:
    story = healing(job(), "a", "b").happens(RestartOrdered("the script has changed"))
    assert not decision(story).in_place
    assert not story.stop("a", "b").places()["a"].in_place


# --- a script that cannot be healed ------------------------------------------------------------------

REFUSAL = "rank 3 communicates before State.run: dist.broadcast at train.py:17"


def refused(wanted: JobSpec) -> Story:
    story = healing(wanted, "a", "b").fails("b", 3, KILLED).park("a", "b").runs()
    return story.ready("b", ready=False, refusal=REFUSAL)


def test_a_refusal_of_a_new_rank_restarts_all_ranks_and_no_heal_follows() -> None:
    story = refused(job())
    assert decision(story).reason == f"{REFUSAL}; all ranks restart"
    assert not decision(story).in_place
    assert (story.state.heals_used, story.state.restarts_used) == (0, 1)
    story.fails("b", 3, RAISED).stop("a", "b").runs().ready("a", "b").fails("a", 0, KILLED)
    assert not decision(story).in_place
    assert (decision(story).kind, story.state.restarts_used) == (DecisionKind.RESTART, 2)


def test_a_refusal_without_a_restart_left_ends_the_job_with_the_failure_that_was_healed() -> None:
    story = refused(job(restarts=0)).stop("a", "b")
    assert story.state.outcome is not None
    assert (
        story.state.outcome.reason == f"not in place: {REFUSAL}; no restarts are allowed (--max-restarts 0)"
    )
    assert story.state.outcome.first_cause is not None
    assert story.state.outcome.first_cause.failure is KILLED
    assert story.state.outcome.exit_code == 3


def test_a_refusal_after_growth_costs_nothing() -> None:
    story = (
        Story(job(1, 2, restarts=0, scale_up=ScaleUp.IMMEDIATE))
        .joins("a")
        .passes(2)
        .runs()
        .ready("a")
        .joins("b")
    )
    story.park("a").runs().ready("b", ready=False, refusal=REFUSAL)
    assert (story.state.phase, story.state.restarts_used) == (Phase.STOPPING, 0)
    assert not story.stop("a", "b").places()["a"].in_place


def test_an_early_refusal_is_kept_and_stops_nothing() -> None:
    story = healing(job(recover=Recover.IN_PLACE), "a", "b").ready("b", ready=False, refusal=REFUSAL)
    assert story.state.phase is Phase.RUNNING
    assert story.effects == (Persist(),)
    story.ready("a", "b").fails("b", 3, KILLED)
    assert f"not in place: {REFUSAL}; restarting" in decision(story).reason


def test_the_journal_names_a_refusal_once() -> None:
    story = healing(job(), "a", "b")
    event, before = HealReady(agent("b"), 1, ready=False, refusal=REFUSAL), story.state
    first = story.happens(event).state
    assert [line.text for line in lines(event, before, first)] == [
        f"the job cannot be healed in place: {REFUSAL}"
    ]
    again = story.ready("a", ready=False, refusal="another reason").state
    assert list(lines(event, first, again)) == []


def test_a_refusal_during_the_stop_counts() -> None:
    story = healing(job(), "a", "b").fails("b", 3, KILLED).ready("a", ready=False, refusal=REFUSAL)
    story.park("a", "b")
    assert not any(place.in_place for place in story.places().values())


# --- the service resumes -----------------------------------------------------------------------------


def resumed(story: Story) -> list[Tell]:
    story.state = decode_state(encode_state(story.state))
    story.state, effects = resume(story.state, story.now)
    return [e for e in effects if isinstance(e, Tell)]


def test_a_service_that_resumes_during_the_stop_asks_for_it_in_place_again() -> None:
    story = healing(job(), "a", "b").fails("b", 3, KILLED).park("a")
    stops = [e.message for e in resumed(story) if isinstance(e.message, Stop)]
    assert [stop.decision.in_place for stop in stops] == [True, True]
    story.happens(AgentStopped(agent("a"), 1, parked=(0, 1))).park("b")
    assert [place.in_place for place in story.places().values()] == [True, True]


def test_a_service_that_resumes_after_the_seal_sends_the_same_assignments() -> None:
    story = healing(job(), "a", "b").fails("b", 3, KILLED).park("a", "b")
    sent = {e.agent.node: e.message for e in story.effects if isinstance(e, Tell)}
    assert {e.agent.node: e.message for e in resumed(story)} == sent


def test_a_service_that_resumes_while_ranks_wait_still_heals() -> None:
    story = healing(job(2), "a", "b").happens(AgentLost(agent("a"), "its link broke")).park("b")
    resumed(story)
    story.joins("c")
    assert {node: place.in_place for node, place in story.places().items()} == {"b": True, "c": True}


def test_a_service_that_resumes_before_the_failure_knows_who_can_be_paused() -> None:
    """The failure may be the first message that it gets."""
    story = running(job(), "a", "b").ready("a")
    assert Persist() not in story.effects
    story.ready("b")
    assert story.effects == (Persist(),)
    resumed(story)
    story.fails("b", 2, KILLED).fails("b", 3, KILLED)
    assert decision(story).in_place


def test_the_first_world_is_not_in_place_and_says_whether_ready_is_wanted() -> None:
    for wanted, can_heal in ((job(1), True), (spec(1), False)):
        place = Story(wanted).joins("a").places()["a"]
        assert (place.can_heal, place.in_place) == (can_heal, False)


def test_a_report_of_another_generation_changes_nothing() -> None:
    story = running(job(), "a", "b")
    before = story.state
    story.happens(HealReady(agent("a"), 2, ready=True)).happens(HealReady(agent("a", life=7), 1, ready=True))
    assert story.state is before


def test_paused_ranks_after_a_stop_that_is_not_in_place_do_not_count() -> None:
    """An agent may have paused its ranks before it got the order that overtakes the first one."""
    story = running(job(), "a", "b").fails("b", 3, KILLED)
    assert not decision(story).in_place
    story.park("a", "b")
    assert not any(place.in_place for place in story.places().values())
    assert not len(story.state.parked)


def test_a_decision_that_fails_the_job_is_never_in_place() -> None:
    rules = (PolicyRule(KILLED, PolicyAction.FAIL),)
    story = healing(job(rules=rules), "a", "b").fails("b", 3, KILLED)
    assert (decision(story).kind, decision(story).in_place) == (DecisionKind.FAIL, False)
    assert replace(decision(story), reason="").title == "fail"
