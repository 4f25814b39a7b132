"""A service that has lost the job's state takes it up from what the agents say."""

from __future__ import annotations

from dataclasses import replace

from job_story import Story, agent, running, spec

from rendezvous.rounds.admission import reported_state_problem
from rendezvous.values.events import AgentJoined, Assigned, RankFailed, RanksFinished, Stop, StoreAt, Waiting
from rendezvous.values.state import Phase
from rendezvous.values.types import Assignment, Cause, DecisionKind, FailureClass, JobSpec, NodeFacts


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
