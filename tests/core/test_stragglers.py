"""Who is slower than its peers, and in what: never somebody who only waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_story import Story, agent, running, spec

from rendezvous.codec import encode
from rendezvous.control.ctl_text import job_text
from rendezvous.diagnosing import stragglers
from rendezvous.diagnosing.stragglers import PHASES, WINDOWS_TO_CLEAR, WINDOWS_TO_NAME, slow_ranks
from rendezvous.rounds.event_log import lines
from rendezvous.rounds.view import view_of
from rendezvous.session_replay import SessionReplay
from rendezvous.values.events import AgentJoined, NodeHealth, Notice, PhaseTimesReported
from rendezvous.values.rank_time import PhaseTimes, Slowness, SlowRank, StragglerState
from rendezvous.values.types import FailureClass, NodeFacts, StragglerPolicy, StragglerRule

RULE = StragglerRule()
USUAL = PhaseTimes(0, 1, data_s=0.02, forward_s=0.1, backward_s=0.2, optimizer_s=0.03, idle_s=0.01)


def world(size: int, slow: int, phase: str, seconds: float, hidden_in: str) -> dict[int, PhaseTimes]:
    """One rank takes longer in one phase; its peers wait for it: seen as waiting, or hidden in another phase."""
    phase_times = {}
    for rank in range(size):
        where = phase if rank == slow else hidden_in
        phase_times[rank] = replace(USUAL, rank=rank, **{where: getattr(USUAL, where) + seconds})
    return phase_times


@given(
    st.integers(2, 12), st.data(), st.sampled_from(list(PHASES)), st.floats(0.2, 50.0), st.floats(-0.1, 0.1)
)
def test_whoever_is_slow_is_named_with_its_phase_and_nobody_else(
    size: int, data: st.DataObject, phase: str, seconds: float, noise: float
) -> None:
    slow = data.draw(st.integers(0, size - 1))
    phase_times = world(size, slow, phase, seconds, "waiting_s")
    odd = data.draw(st.integers(0, size - 1))
    phase_times[odd] = replace(phase_times[odd], forward_s=phase_times[odd].forward_s * (1 + noise))
    found = slow_ranks(phase_times, 1.5)
    assert list(found) == [slow]
    assert found[slow].phase == phase


@given(st.integers(3, 12), st.data(), st.sampled_from(list(PHASES)), st.floats(0.2, 50.0))
def test_where_waits_are_hidden_nobody_innocent_is_named(
    size: int, data: st.DataObject, hidden_in: str, seconds: float
) -> None:
    """In a data loader nobody waits for a peer."""
    slow = data.draw(st.integers(0, size - 1))
    phase = data.draw(st.sampled_from([name for name in PHASES if name != hidden_in]))
    found = slow_ranks(world(size, slow, phase, seconds, hidden_in), 1.5)
    if hidden_in != "data_s":
        assert set(found) <= {slow}
        assert (slow in found) == (phase == "data_s")


def test_a_pair_knows_which_of_the_two_waits() -> None:
    assert list(slow_ranks(world(2, 1, "data_s", 0.5, "backward_s"), 1.5)) == [1]
    assert list(slow_ranks(world(2, 1, "forward_s", 0.5, "waiting_s"), 1.5)) == [1]
    assert not slow_ranks(world(2, 1, "forward_s", 0.5, "backward_s"), 1.5)


@given(st.integers(1, 20), st.floats(0.0, 100.0))
def test_equals_are_no_stragglers(size: int, scale: float) -> None:
    spans = {name: getattr(USUAL, name) * scale for name in PHASES}
    assert not slow_ranks({rank: replace(USUAL, rank=rank, **spans) for rank in range(size)}, 1.5)


def test_what_does_not_matter_in_a_step_is_not_told() -> None:
    phase_times = {rank: replace(USUAL, rank=rank, data_s=0.001 + 0.004 * (rank == 1)) for rank in range(4)}
    assert not slow_ranks(phase_times, 1.5)


def test_half_as_slow_again_is_named_without_an_option() -> None:
    """As measured: sleeps of 0.3 s and 0.2 s in the script."""
    phase_times = {
        rank: replace(USUAL, rank=rank, data_s=0.291 if rank == 2 else 0.195, waiting_s=0.096 * (rank != 2))
        for rank in range(3)
    }
    assert list(slow_ranks(phase_times, RULE.factor)) == [2]
    assert not slow_ranks(phase_times, 1.5)


def test_two_slow_ones_of_five_are_both_named() -> None:
    phase_times = {
        rank: replace(
            USUAL, rank=rank, data_s=0.5 if rank in (1, 3) else 0.02, waiting_s=0.5 * (rank % 2 == 0)
        )
        for rank in range(5)
    }
    assert list(slow_ranks(phase_times, 1.5)) == [1, 3]


# --- in the job ----------------------------------------------------------------------------------------

STEPS = 10


def tells(story: Story, window: int, slow: str | None = None, steps: int = STEPS) -> list[str]:
    """All nodes (two ranks each) tell what they have spent by the end of that window. -> notes of the job"""
    said: list[str] = []
    for place in story.state.world.placements if story.state.world else ():
        node, first = place.agent.node, place.rank_offset
        extra = {node: 0.4 * steps * window} if node == slow else {}
        phase_times = tuple(
            PhaseTimes(
                rank, steps * window, data_s=0.1 * steps * window + extra.get(node, 0.0) * (rank == first)
            )
            for rank in (first, first + 1)
        )
        event, before = PhaseTimesReported(place.agent, story.state.generation, phase_times), story.state
        story.happens(event)
        said += [f"{line.kind}: {line.text}" for line in lines(event, before, story.state)]
    return said


def test_named_after_some_windows_once_and_cleared_when_it_keeps_up() -> None:
    story = running(spec(3), "a", "b", "c")
    said = [tells(story, window, "b") for window in range(1, 3 + WINDOWS_TO_NAME)]
    text = "rank 2 on b is slower than its peers: 500 ms per step in its data loader, its peers 100 ms"
    assert said == [[]] * WINDOWS_TO_NAME + [[f"straggler: {text}"], []]
    assert [node.health for node in view_of("job", story.state, 0.0).nodes] == [(), (text,), ()]
    caught_up = [
        PhaseTimes(rank, 1000 + STEPS * n, data_s=100.0 + n)
        for n in range(WINDOWS_TO_CLEAR + 1)
        for rank in range(6)
    ]
    heard: list[str] = []
    for n in range(WINDOWS_TO_CLEAR + 1):
        now = caught_up[6 * n : 6 * n + 6]
        for i, node in enumerate("abc"):
            event, before = PhaseTimesReported(agent(node), 1, tuple(now[2 * i : 2 * i + 2])), story.state
            story.happens(event)
            heard += [line.text for line in lines(event, before, story.state)]
    assert heard == ["rank 2 on b is no longer a straggler"]
    assert not story.state.straggler_state.slow_ranks


def test_its_own_agent_and_the_first_one_are_told() -> None:
    story = running(spec(3), "a", "b", "c")
    for window in range(1, 2 + WINDOWS_TO_NAME):
        tells(story, window, "c")
    assert isinstance(story.told("a")[0], Notice)
    assert story.told("a") == story.told("c")
    assert not story.told("b")


def test_no_window_closes_without_all_nodes_and_enough_steps() -> None:
    story = running(spec(2), "a", "b")
    for n in range(1, 9):
        story.happens(PhaseTimesReported(agent("a"), 1, (PhaseTimes(0, 10 * n, data_s=9.0 * n),)))
    assert not story.state.straggler_state.base
    for n in range(1, 9):
        assert tells(story, n, "b", steps=1) == []


def test_late_foreign_and_unwanted_reports_change_nothing() -> None:
    story = running(spec(2), "a", "b")
    before = story.state
    story.happens(PhaseTimesReported(agent("a"), 0, (PhaseTimes(0, 10),)))
    story.happens(PhaseTimesReported(agent("a", 9), 1, (PhaseTimes(0, 10),)))
    assert story.state is before
    story.happens(PhaseTimesReported(agent("a"), 1, (PhaseTimes(3, 10),)))
    assert story.state.straggler_state.reports["a"] == ()
    off = running(spec(2, stragglers=StragglerRule(StragglerPolicy.OFF)), "a", "b")
    before = off.state
    assert tells(off, 1, "a") == []
    assert off.state is before


@pytest.mark.parametrize("policy", [StragglerPolicy.REPORT, StragglerPolicy.EXCLUDE])
def test_an_excluded_straggler_sits_out_at_the_next_restart_and_not_before(policy: StragglerPolicy) -> None:
    story = running(spec(2, 3, stragglers=StragglerRule(policy)), "a", "b", "c")
    for window in range(1, 2 + WINDOWS_TO_NAME):
        tells(story, window, "b")
    assert story.state.generation == 1
    assert not len(story.state.excluded)
    story.fails("a", 0, FailureClass.USER_EXCEPTION).stop("a", "b", "c")
    assert story.state.generation == 2
    assert story.nodes() == (["a", "c"] if policy is StragglerPolicy.EXCLUDE else ["a", "b", "c"])
    assert not story.state.straggler_state.slow_ranks


def test_a_straggler_that_the_job_cannot_do_without_stays() -> None:
    story = running(spec(3, stragglers=StragglerRule(StragglerPolicy.EXCLUDE)), "a", "b", "c")
    for window in range(1, 2 + WINDOWS_TO_NAME):
        tells(story, window, "b")
    story.fails("a", 0).stop("a", "b", "c")
    assert story.nodes() == ["a", "b", "c"]


def test_of_several_the_slowest_sits_out_first() -> None:
    slow_ranks = {
        rank: SlowRank(node, 3, 0, True, Slowness("data_s", own_s, 0.1))
        for rank, node, own_s in ((0, "a", 0.3), (2, "b", 0.9), (4, "c", 0.5), (5, "c", 0.6))
    }
    straggler_state = StragglerState(slow_ranks=stragglers.FrozenMap(slow_ranks.items()))
    assert list(stragglers.nodes_to_exclude(straggler_state, ["a", "b", "c", "d"], 2)) == ["b", "c"]


# --- a node's health -----------------------------------------------------------------------------------


def test_a_nodes_complaints_are_noted_shown_and_forgotten_with_it() -> None:
    story = running(spec(2), "a", "b")
    event, before = NodeHealth(agent("b"), "memory is low", ("memory is low",)), story.state
    story.happens(event)
    assert [(line.kind, line.text) for line in lines(event, before, story.state)] == [
        ("health", "b: memory is low")
    ]
    assert view_of("job", story.state, 0.0).nodes[1].health == ("memory is low",)
    assert "\n\nhealth:\n  b: memory is low" in job_text(encode(view_of("job", story.state, 0.0)))
    before = story.state
    story.happens(event)
    story.happens(NodeHealth(agent("b", 7), "of another life", ("x",)))
    assert story.state is before
    story.joins("b", life=2)
    assert not len(story.state.health)


def test_a_resumed_session_says_the_last_word_on_health_again() -> None:
    joined = AgentJoined(agent("a"), spec(), NodeFacts("a", "a", 1))
    last = NodeHealth(agent("a"), "it is over")
    replay = SessionReplay().sent(joined).sent(NodeHealth(agent("a"), "hot", ("hot",))).sent(last)
    assert replay.messages()[1:] == (last,)


def unfit(node: str, why: str = "GPU 0 has fallen off the bus") -> NodeHealth:
    texts = (why,) if why else ()
    return NodeHealth(agent(node), why or "GPU 0 responds again", texts, why)


def test_an_unfit_node_sits_out_at_the_next_restart_and_returns_when_it_is_fit() -> None:
    story = running(spec(2, 3), "a", "b", "c")
    story.happens(unfit("b"))
    assert (story.state.generation, len(story.state.excluded)) == (1, 0)  # the present world is not affected
    story.fails("a", 0).stop("a", "b", "c").runs()
    assert story.nodes() == ["a", "c"]
    assert story.state.excluded["b"].reason.startswith("it is unfit: GPU 0 has fallen off the bus")
    story.passes(10 * 600.0)
    assert "b" in story.state.excluded  # as long as it is unfit
    story.happens(unfit("b", ""))
    assert not len(story.state.excluded)
    story.fails("a", 0).stop("a", "c")
    assert sorted(story.nodes()) == ["a", "b", "c"]


def test_a_spare_takes_the_place_of_an_unfit_node_and_an_unfit_spare_of_none() -> None:
    story = running(spec(2, spares=2), "a", "b", "c", "d")
    story.happens(unfit("c")).happens(unfit("b"))
    story.fails("a", 0).stop("a", "b")
    assert sorted(story.nodes()) == ["a", "d"]


def test_an_unfit_node_that_the_job_cannot_do_without_stays() -> None:
    story = running(spec(2), "a", "b")
    story.happens(unfit("b"))
    story.fails("a", 0).stop("a", "b")
    assert story.nodes() == ["a", "b"]


def test_good_news_of_a_node_that_failed_its_preflight_does_not_admit_it() -> None:
    story = running(spec(2), "a", "b").joins("c", healthy=False, health_note="checkpoints cannot be written")
    story.happens(NodeHealth(agent("c"), "memory use is high", ("memory use is high",)))
    story.happens(NodeHealth(agent("c"), "memory use has decreased", ()))
    assert "c" in story.state.excluded


def test_a_new_agent_of_an_unfit_node_is_judged_anew() -> None:
    story = running(spec(2, 3), "a", "b", "c")
    story.happens(unfit("b"))
    story.joins("b", life=2)
    assert not len(story.state.unfit)
