from __future__ import annotations

from job_story import Story, agent, running, spec

from rendezvous.rounds.admission import resume
from rendezvous.values.events import (
    AgentHeard,
    AgentLost,
    Assigned,
    DeadlineReached,
    Ended,
    NodeDrained,
    Stop,
    StoreAt,
)
from rendezvous.values.state import Phase
from rendezvous.values.types import JobSpec, RestartBudget


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
