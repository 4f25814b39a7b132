"""What ranks save after a failure (`ddp.on_failure`), in the round machine: which path the next generation gets."""

from __future__ import annotations

from job_story import Story, agent, running, spec

from rendezvous.codec import from_agent_bytes, read_from_agent
from rendezvous.rounds.snapshot import decode_state, encode_state
from rendezvous.values.events import AgentStopped
from rendezvous.values.types import SavedState


def paths_after(story: Story, **saved: SavedState) -> set[str]:
    """A rank fails, both nodes stop and say what their ranks have saved: the paths that the next ranks get."""
    story.fails("a", 0)
    for node in ("a", "b"):
        story.happens(AgentStopped(agent(node), story.state.generation, saved=saved.get(node)))
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
    assert paths_after(story) == {"/eight"}
    # Its processes have counted their steps from their own start.
    assert paths_after(story, b=SavedState(2, "/later")) == {"/later"}


def test_a_service_that_restarts_knows_the_path() -> None:
    story = running(spec(2, restarts=5), "a", "b")
    paths_after(story, a=SavedState(8, "/eight"))
    kept = decode_state(encode_state(story.state))
    assert (kept.saved, kept.saved_in) == (story.state.saved, 1)


def test_the_message_has_it() -> None:
    told = AgentStopped(agent("a"), 3, saved=SavedState(8, "/eight"))
    assert read_from_agent(from_agent_bytes(told), told.agent) == told
