"""What ranks save after a failure (`ddp.on_failure`), in the round machine: which path the next generation gets."""

from __future__ import annotations

from job_story import Story, agent, running, spec

from rendezvous.codec import from_agent_bytes, read_from_agent
from rendezvous.rounds.snapshot import decode_state, encode_state
from rendezvous.values.events import AgentStopped
from rendezvous.values.types import Reached, SavedState


def paths_after(story: Story, steps: int | None = 9, **saved: SavedState) -> set[str]:
    """A rank fails after some steps, and both nodes say what they have saved: the paths that the next ranks get."""
    story.fails("a", 0)
    reached = None if steps is None else Reached(steps)
    for node in ("a", "b"):
        told = AgentStopped(agent(node), story.state.generation, reached=reached, saved=saved.get(node))
        story.happens(told)
    assigned = story.places()
    assert set(assigned) == {"a", "b"}
    story.runs()
    return {each.resume_path for each in assigned.values()}


def test_all_nodes_are_told_the_path_that_one_has() -> None:
    story = running(spec(2, restarts=5), "a", "b")
    assert paths_after(story) == {""}
    assert paths_after(story, b=SavedState(7, "/seven")) == {"/seven"}


def test_the_furthest_of_a_generation_counts_and_then_the_latest_generation() -> None:
    story = running(spec(2, restarts=5), "a", "b")
    assert paths_after(story, a=SavedState(8, "/eight"), b=SavedState(7, "/seven")) == {"/eight"}
    # Its processes have counted their steps from their own start.
    assert paths_after(story, b=SavedState(2, "/later")) == {"/later"}


def test_a_path_is_forgotten_when_later_ranks_have_trained_and_saved_nothing() -> None:
    """Otherwise a script would go back to it, behind checkpoints that it has written since."""
    story = running(spec(2, restarts=9), "a", "b")
    eight = SavedState(8, "/eight")
    assert paths_after(story, a=eight) == {"/eight"}
    assert paths_after(story, steps=0) == {"/eight"}  # it failed while it started
    assert paths_after(story, steps=3) == {""}
    assert paths_after(story, a=eight) == {"/eight"}
    assert paths_after(story, steps=None) == {""}  # not known


def test_a_service_that_restarts_knows_the_path() -> None:
    story = running(spec(2, restarts=5), "a", "b")
    paths_after(story, a=SavedState(8, "/eight"))
    kept = decode_state(encode_state(story.state))
    assert (kept.saved, kept.saved_in) == (story.state.saved, 1)


def test_the_message_has_it() -> None:
    told = AgentStopped(agent("a"), 3, saved=SavedState(8, "/eight"))
    assert read_from_agent(from_agent_bytes(told), told.agent) == told
