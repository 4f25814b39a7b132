"""A service that has lost the job's state takes it up from what the agents say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from job_story import Story, agent, running, spec

from rendezvous.rounds import admission
from rendezvous.rounds.admission import reported_state_problem, resume
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLost,
    Assigned,
    DeadlineReached,
    Ended,
    NodeDrained,
    RankFailed,
    RanksFinished,
    Stop,
    StoreAt,
    Waiting,
)
from rendezvous.values.job_state import Phase
from rendezvous.values.types import (
    Assignment,
    Cause,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    RestartBudget,
)

if TYPE_CHECKING:
    import pytest


def before_the_loss(job: JobSpec, *nodes: str) -> dict[str, Assignment]:
    """What each node stood in at generation 3."""
    story = running(job, *nodes)
    for _ in range(2):
        story.fails(nodes[0], 0).stop(*nodes).runs()
    return {node: told.assignment for node in nodes for told in _assigned(story.joins(node), node)}


def _assigned(story: Story, node: str) -> list[Assigned]:
    return [message for message in story.told(node) if isinstance(message, Assigned)]


def comes_back(story: Story, node: str, generation: int, place: Assignment | None) -> Story:
    facts = NodeFacts(node, f"{node}.lan", 2)
    return story.happens(AgentJoined(agent(node), story.spec, facts, generation, place))


def test_the_same_world_goes_on_under_the_same_number() -> None:
    job = spec(3)
    places = before_the_loss(job, "a", "b", "c")
    story = Story(job)
    for node in ("c", "a"):
        comes_back(story, node, 3, places[node])
        assert story.told(node) == [Assigned(places[node])]  # to wait would mean to stop
    comes_back(story, "b", 3, places["b"])
    assert (story.state.phase, story.state.generation) == (Phase.SEALED, 3)
    told = {node: _assigned(story, node)[0].assignment for node in places}
    for node, place in places.items():
        assert replace(told[node], reason="") == replace(place, reason="")
    assert [type(m) for m in story.runs().told("c")] == [StoreAt]
    story.happens(RanksFinished(agent("a"), 3)).finish("b", "c")
    assert story.state.outcome is not None
    assert story.state.outcome.succeeded


def test_what_fails_then_is_decided_as_ever() -> None:
    job = spec(2)
    places = before_the_loss(job, "a", "b")
    story = Story(job)
    for node in ("a", "b"):
        comes_back(story, node, 3, places[node])
    story.runs()
    cause = Cause("b", 2, 0, FailureClass.USER_EXCEPTION, "ValueError", 1, ran_s=60.0)
    story.happens(RankFailed(agent("b"), 3, cause))
    assert [type(m) for m in story.told("a")] == [Stop]
    assert story.stop("a", "b").state.generation == 4
    assert story.state.restarts_used == 3  # the first two are not forgotten


def test_those_who_wait_for_the_others_are_not_told_to_stop() -> None:
    job = spec(2)
    places = before_the_loss(job, "a", "b")
    story = comes_back(Story(job), "a", 3, places["a"])
    story.passes(5.0)
    assert story.state.phase is Phase.FORMING
    assert not any(isinstance(m, Waiting) for m in story.told("a"))
    assert comes_back(story, "a", 3, places["a"]).told("a") == [Assigned(places["a"])]


def test_another_world_gets_a_number_that_nobody_has_heard_of() -> None:
    """A node came anew, and one had stopped its ranks: everybody starts afresh."""
    job = spec(2)
    places = before_the_loss(job, "a", "b")
    for newcomer, generation in (("x", 0), ("b", 3)):
        story = comes_back(Story(job), "a", 3, places["a"])
        comes_back(story, newcomer, generation, None)
        assert story.state.generation == 4
        assert [m.assignment.generation for m in _assigned(story, "a")] == [4]
        decision = story.state.decisions[-1]
        assert (decision.kind, decision.generation) == (DecisionKind.RESTART, 3)
        assert "had lost the state of the job" in decision.reason


def test_other_ranks_on_a_node_make_another_world() -> None:
    job = spec(2)
    places = before_the_loss(job, "a", "b")
    story = comes_back(Story(job), "a", 3, places["a"])
    comes_back(story, "b", 3, replace(places["b"], nproc=1, world_size=3))
    assert story.state.generation == 4


def test_one_who_comes_after_the_round_was_sealed_without_it_stands_by() -> None:
    job = spec(1, 2, last_call_s=1.0)
    places = before_the_loss(job, "a", "b")
    story = Story(job).joins("x").passes(2.0)
    assert story.state.generation == 1
    comes_back(story, "a", 3, places["a"])
    assert [type(m) for m in story.told("a")] == [Waiting]
    story.runs().fails("x", 0).stop("x")
    assert story.state.generation == 4


def test_a_service_that_remembers_is_not_impressed() -> None:
    story = running(spec(2), "a", "b")
    place = _assigned(story.joins("a"), "a")[0].assignment
    before = story.state
    comes_back(story, "a", 1, place)
    assert story.state.forgotten == 0
    assert story.state.world == before.world


def test_nonsense_about_the_past_is_refused() -> None:
    place = before_the_loss(spec(2), "a", "b")["a"]
    assert reported_state_problem(3, place) == ""
    assert reported_state_problem(0, None) == ""
    assert "generation -1" in reported_state_problem(-1, None)
    assert "generation 9223372036854775807" in reported_state_problem(2**63 - 1, None)
    assert "in generation 3" in reported_state_problem(4, place)
    assert "node rank 7 of 2" in reported_state_problem(3, replace(place, node_rank=7))


# --- resume -------------------------------------------------------------------------------------------


def taken_over(story: Story, now: float) -> Story:
    """From what was written last, by a service whose clock shows `now`."""
    story.state, story.effects = resume(story.state, now)
    story.now, story.deadline = now, story.state.deadline_at
    return story


def test_everyone_is_told_where_it_stands_and_gets_a_fresh_lease() -> None:
    story = taken_over(running(spec(2), "a", "b", "c"), 5.0)
    assert [type(m) for m in story.told("b")] == [Assigned, StoreAt]
    assert story.deadline == 20.0
    story.now = 19.9
    assert story.happens(DeadlineReached()).state.phase is Phase.RUNNING


def test_agents_that_connect_late_after_a_takeover_have_their_time_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3,623 of 10,000 were lost instead of being told the decision: it was made before they had connected again."""
    monkeypatch.setattr(admission, "_CROWD", 1)  # so that these three are one: their first lease is 45 s
    job = spec(3, stop_budget_s=5.0)
    story = taken_over(running(job, "a", "b", "c"), 100.0)
    story.fails("a", 0).stop("a", "b")
    story.now = 134.0  # the last one connects again
    story.happens(DeadlineReached())
    comes_back(story, "c", 1, None)
    assert isinstance(story.told("c")[-1], Stop)
    assert story.stop("c").state.generation == 2
    assert len(story.state.members) == 3


def heard_from(story: Story, *nodes: str, until: float) -> Story:
    """Twice a second from these, and nothing from anybody else."""
    while story.now < until:
        story.now += 0.5
        for node in nodes:
            story.happens(AgentHeard(agent(node)))
        if story.deadline is not None and story.now >= story.deadline:
            story.happens(DeadlineReached())
    return story


def test_an_agent_that_comes_back_late_finds_its_world_as_it_was() -> None:
    """It had found nobody for long, and so tries every few seconds only."""
    story = heard_from(taken_over(running(spec(2), "a", "b"), 100.0), "a", until=108.0)
    assert story.state.phase is Phase.RUNNING
    assert [type(m) for m in story.joins("b").told("b")] == [Assigned, StoreAt]
    assert heard_from(story, "a", "b", until=120.0).state.phase is Phase.RUNNING


def test_an_agent_that_does_not_come_back_is_lost_after_its_first_lease() -> None:
    story = taken_over(running(spec(1, 2), "a", "b"), 100.0)
    assert heard_from(story, "a", until=114.5).state.phase is Phase.RUNNING
    assert heard_from(story, "a", until=115.0).state.phase is Phase.STOPPING
    assert list(story.state.members) == ["a"]


def test_a_short_lease_does_not_shorten_the_first_one() -> None:
    story = taken_over(running(spec(1, 2, lease_s=4.0), "a", "b"), 100.0)
    assert heard_from(story, "a", until=114.5).state.phase is Phase.RUNNING
    assert heard_from(story, "a", until=115.0).state.phase is Phase.STOPPING


def test_agents_of_a_large_job_have_longer_to_come_back() -> None:
    """A service accepts them one after the other. Those that still wait for it are not lost."""
    nodes = [f"node{number}" for number in range(800)]
    story = taken_over(running(spec(1, 800), *nodes), 100.0)
    assert heard_from(story, "node0", until=129.5).state.phase is Phase.RUNNING
    assert heard_from(story, "node0", until=130.0).state.phase is Phase.STOPPING


def test_who_was_heard_after_a_take_over_has_an_ordinary_lease() -> None:
    story = heard_from(taken_over(running(spec(1, 2), "a", "b"), 100.0), "a", "b", until=102.0)
    assert heard_from(story, "a", until=116.0).state.phase is Phase.RUNNING
    assert heard_from(story, "a", until=118.0).state.phase is Phase.STOPPING
    assert list(story.state.members) == ["a"]


def test_what_was_left_of_a_timeout_is_left_of_it_on_another_clock() -> None:
    story = running(spec(1, 2, stop_budget_s=45.0), "a", "b").fails("a", 0)
    taken_over(story, -7000.0)
    assert [type(m) for m in story.told("a")] == [Stop]
    assert story.stop("a").passes(44.0).state.phase is Phase.STOPPING
    assert story.passes(1.0).nodes() == ["a"]


def test_the_budget_s_window_and_exclusions_move_along() -> None:
    story = running(JobSpec("job", budget=RestartBudget(1, 100.0)), "a").fails("a", 0).stop("a").runs()
    taken_over(story, 1e6).happens(NodeDrained("x", "fans"))
    assert story.passes(99).fails("a", 0).stop("a").state.outcome is not None
    story = running(JobSpec("job", budget=RestartBudget(1, 100.0)), "a").fails("a", 0).stop("a").runs()
    assert taken_over(story, 1e6).passes(101).fails("a", 0).stop("a").state.outcome is None


def test_an_ended_job_stays_ended_and_asks_for_no_deadline() -> None:
    story = taken_over(running(spec(1), "a").finish("a"), 3.0)
    assert [type(m) for m in story.told("a")] == [Ended]
    assert story.deadline is None
    before = story.state
    assert story.happens(AgentLost(agent("a"), "gone")).state is before


def test_a_store_from_a_backup_learns_the_later_world_from_its_agents() -> None:
    """The state is of generation 1, the agents run in generation 3. Without that, nobody ever answered them."""
    job = spec(2)
    places = before_the_loss(job, "a", "b")
    story = comes_back(running(job, "a", "b"), "a", 3, places["a"])
    assert story.told("a")[-1:] == [Assigned(places["a"])]
    comes_back(story, "b", 3, places["b"])
    assert (story.state.phase, story.state.generation) == (Phase.SEALED, 3)
    cause = Cause("b", 2, 0, FailureClass.USER_EXCEPTION, "ValueError", 1, ran_s=60.0)
    story.runs().happens(RankFailed(agent("b"), 3, cause))
    assert isinstance(story.told("a")[-1], Stop)
    assert story.stop("a", "b").state.generation == 4


def test_a_store_from_a_backup_where_a_node_joined_later_or_all_have_stopped() -> None:
    job = spec(2)
    places = before_the_loss(job, "a", "b")
    for node, place in (("x", places["a"]), ("a", None)):
        story = comes_back(running(job, "a", "b"), node, 3, place if node == "x" else None)
        for other in ("a", "b"):
            comes_back(story, other, 3, places[other] if node == "x" else None)
        assert story.state.generation >= 3
        assert _assigned(story, "b")[-1].assignment.generation == story.state.generation
