from __future__ import annotations

import time

import pytest
from job_story import Story, agent, running, spec

from rendezvous.machine import step
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentLost,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    CheckpointTaken,
    Disagreement,
    Ended,
    Persist,
    RanksFinished,
    RankTimesReported,
    RefusalKind,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import JobSpec, NodeFacts, ScaleUp, StoreAddress


def test_one_node_goes_the_same_way_as_many() -> None:
    story = Story(spec(1)).joins("a")
    assert isinstance(story.effects[0], Persist)
    (told,) = story.told("a")
    assert isinstance(told, Assigned)
    assert (told.assignment.generation, told.assignment.restart_count, told.assignment.world_size) == (
        1,
        0,
        2,
    )
    assert isinstance(story.runs().told("a")[0], StoreAt)
    (end,) = story.finish("a").told("a")
    assert isinstance(end, Ended)
    assert (end.outcome.succeeded, end.outcome.exit_code) == (True, 0)


def test_a_fixed_world_seals_with_the_last_node_and_nobody_is_told_before_it_is_written() -> None:
    story = Story(spec(2)).joins("b")
    (waiting,) = story.told("b")
    assert waiting == Waiting("waiting for 1 more node", 1, 2)
    assert not any(isinstance(e, Persist) for e in story.effects)
    story.joins("a")
    assert story.nodes() == ["a", "b"]
    assert story.effects[0] == Persist()
    assert [type(m) for m in story.told("a") + story.told("b")] == [Assigned, Assigned]


def test_an_elastic_world_waits_for_a_last_call_that_starts_anew_up_to_a_bound() -> None:
    story = Story(spec(1, 9, last_call_s=2.0, last_call_bound_s=5.0)).joins("a")
    for node in ("b", "c", "d"):
        story.passes(1.5)
        assert story.state.phase is Phase.FORMING
        story.joins(node)
    story.passes(0.6)  # the bound, 5 s after the minimum was there
    assert story.nodes() == ["a", "b", "c", "d"]


def test_an_elastic_world_seals_at_its_maximum_at_once() -> None:
    assert Story(spec(1, 2)).joins("a", "b").state.phase is Phase.SEALED


def test_a_last_call_is_off_when_too_few_are_left() -> None:
    story = Story(spec(2, 4)).joins("a", "b").happens(AgentLost(agent("b"), "its stream broke")).passes(30)
    assert story.state.phase is Phase.FORMING


def test_progress_is_told_to_all_who_wait() -> None:
    story = Story(spec(3)).joins("a", "b").passes(1.0)
    assert story.told("a") == [Waiting("waiting for 1 more node", 2, 3)]


def test_a_round_that_stays_too_small_ends_with_who_came() -> None:
    story = Story(spec(3, join_timeout_s=600.0)).joins("b", "a").passes(600)
    (end,) = story.told("a")
    assert isinstance(end, Ended)
    assert end.outcome.exit_code == 75
    assert end.outcome.reason.startswith("only 2 of 3 nodes joined within 600 s: b, a")
    (late,) = story.joins("c").told("c")
    assert isinstance(late, Refused)
    assert (late.kind, late.exit_code) == (RefusalKind.JOB_OVER, 75)


def test_an_empty_round_forgets_the_spec() -> None:
    story = Story(spec(2)).joins("a").happens(AgentLost(agent("a"), "its stream broke"))
    assert story.state.spec is None
    assert story.deadline is None
    story.joins("b", job=spec(1))
    assert story.state.phase is Phase.SEALED


# --- admission


@pytest.mark.parametrize(
    ("other", "disagreement"),
    [
        (spec(4), Disagreement("min_nodes", "2", "4")),
        (spec(2, entry_point="x.py"), Disagreement("entry_point", "''", "x.py")),
        (spec(2, nproc="8"), Disagreement("nproc", "''", "8")),
        (spec(2, restarts=9), Disagreement("budget", "3", "9")),
        (spec(2, join_timeout_s=9.0), Disagreement("join_timeout_s", "600.0", "9.0")),
        (spec(2, lease_s=9.0), Disagreement("lease_s", "15.0", "9.0")),
    ],
)
def test_specs_that_disagree_are_refused_and_the_round_goes_on(
    other: JobSpec, disagreement: Disagreement
) -> None:
    story = Story(spec(2)).joins("a")
    before = story.state
    (refused,) = story.joins("b", job=other).told("b")
    assert isinstance(refused, Refused)
    assert (refused.exit_code, refused.disagreement) == (78, disagreement)
    assert story.state is before
    assert story.joins("b").state.phase is Phase.SEALED


def test_two_nodes_cannot_have_the_same_node_rank_nor_one_that_is_not_there() -> None:
    story = Story(spec(2)).joins("a", node_rank=1)
    (refused,) = story.joins("b", node_rank=1).told("b")
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("--node-rank 1 is set on a and on b")
    (refused,) = story.joins("b", node_rank=2).told("b")
    assert refused == Refused("--node-rank 2 of b: use 0 to 1", 78)
    assert story.joins("b", node_rank=0).nodes() == ["b", "a"]


def test_a_node_without_ranks_is_refused() -> None:
    assert isinstance(Story(spec(1)).joins("a", nproc=0).told("a")[0], Refused)


def test_an_ill_node_sits_out_and_returns_with_better_health_or_after_the_cool_down() -> None:
    story = Story(spec(2, node_cooldown_s=50.0)).joins("a", healthy=False, health_note="GPU 3 is gone")
    (waiting,) = story.told("a")
    assert isinstance(waiting, Waiting)
    assert waiting.reason == (
        "a is excluded: it failed its health check: GPU 3 is gone; the node is admitted again after 50 s"
    )
    assert story.joins("b").state.phase is Phase.FORMING
    assert story.passes(50).state.phase is Phase.SEALED
    healed = Story(spec(2)).joins("a", healthy=False).joins("b").joins("a", life=2)
    assert healed.state.phase is Phase.SEALED


def test_a_resumed_session_is_told_where_it_stands() -> None:
    story = running(spec(2), "a", "b").joins("b")
    assert [type(m) for m in story.told("b")] == [Assigned, StoreAt]
    story.fails("a", 0).joins("b")
    assert [type(m) for m in story.told("b")] == [Stop]
    assert not any(isinstance(e, Persist) for e in story.effects)


# --- signs of life


def test_a_heartbeat_renews_the_lease_and_is_not_written() -> None:
    story = running(spec(2), "a", "b").happens(AgentHeard(agent("a")))
    assert story.effects == ()


def test_a_stranger_who_beats_is_told_to_join_again() -> None:
    story = running(spec(1), "a")
    before = story.state
    (told,) = story.happens(AgentHeard(agent("x"))).told("x")
    assert isinstance(told, Refused)
    assert told.retryable
    assert story.state is before
    story.finish("a")
    assert isinstance(story.happens(AgentHeard(agent("a"))).told("a")[0], Ended)
    (late,) = story.happens(AgentHeard(agent("x"))).told("x")
    assert isinstance(late, Refused)
    assert (late.kind, late.exit_code) == (RefusalKind.JOB_OVER, 77)


def test_stale_generations_and_lives_change_nothing() -> None:
    story = running(spec(2), "a", "b").fails("a", 0).stop("a", "b").runs()
    before = story.state
    for stale in (
        RanksFinished(agent("a"), 1),
        RanksFinished(agent("a", 9), 2),
        RanksFinished(agent("x"), 2),
    ):
        assert story.happens(stale).state is before
        assert story.effects == ()


def test_a_rank_of_another_node_is_not_an_agents_to_report() -> None:
    story = running(spec(2), "a", "b")
    before = story.state
    assert story.fails("a", 3).state is before


def test_a_retired_life_stays_out() -> None:
    story = Story(spec(3)).joins("a", "b").joins("a", life=2)
    before = story.state
    (told,) = story.joins("a", life=1).told("a")
    assert story.told("b") == [], "a refusal that tells nothing about the options"
    assert isinstance(told, Refused)
    assert (told.exit_code, told.retryable) == (77, False)
    assert story.happens(AgentHeard(agent("a", 1))).told("a") == [told]
    assert story.state is before


def test_who_left_stays_out_with_that_life() -> None:
    story = running(spec(1, 2), "a", "b").happens(AgentLeft(agent("b"), "goodbye"))
    before = story.state
    (told,) = story.joins("b").told("b")
    assert isinstance(told, Refused)
    assert (told.exit_code, told.retryable) == (77, False)
    assert story.state is before


# --- more nodes than the world has


def test_scale_up_never_keeps_the_newcomer_standing_by() -> None:
    story = Story(spec(1, 3, scale_up=ScaleUp.NEVER)).joins("a").passes(2).runs().joins("b")
    assert story.told("b") == [
        Waiting(
            "the job runs without this node; the node is on standby: "
            "it gets in when a node is missing (--scale-up never)",
            2,
            1,
            stands_by=True,
        )
    ]
    assert story.fails("a", 0).stop("a").nodes() == ["a"]


def test_a_node_that_stands_by_is_told_once_what_ranks_have_imported() -> None:
    story = Story(spec(1, 1)).joins("a").passes(2).runs().joins("b")
    began = RankTimesReported(agent("a"), (), ("ddp", "torch._dynamo"))
    (told,) = story.happens(began).told("b")
    assert isinstance(told, Waiting)
    assert (told.stands_by, told.imports) == (True, ("ddp", "torch._dynamo"))
    assert not story.happens(began).told("b")
    (newer,) = story.joins("c").told("c")
    assert isinstance(newer, Waiting)
    assert newer.imports == told.imports


def test_scale_up_on_restart() -> None:
    story = Story(spec(1, 3)).joins("a").passes(2).runs().joins("b").passes(60)
    assert story.nodes() == ["a"]
    assert story.fails("a", 0).stop("a").nodes() == ["a", "b"]


def test_scale_up_immediate_gathers_for_a_last_call_and_costs_nothing() -> None:
    story = Story(spec(1, 4, restarts=0, scale_up=ScaleUp.IMMEDIATE)).joins("a").passes(2).runs().joins("b")
    assert story.state.phase is Phase.RUNNING
    story.passes(2)
    assert story.state.phase is Phase.STOPPING
    story.stop("a")
    assert {place.restart_count for place in story.places().values()} == {0}, "torchrun keeps 0, too"
    story.runs()
    assert story.nodes() == ["a", "b"]
    assert story.joins("c", "d").state.phase is Phase.STOPPING, "the world can be full: no last call"
    assert story.state.restarts_used == 0


def test_spares_are_kept_back_from_growth() -> None:
    story = Story(spec(1, 3, spares=1)).joins("a").passes(2).runs().joins("b")
    assert story.fails("a", 0).stop("a").nodes() == ["a"]
    assert story.runs().joins("c").fails("a", 0).stop("a").nodes() == ["a", "b"]


ASKED = CheckpointRequested(1, "more nodes have joined; the job restarts with them after this checkpoint")
AT_CHECKPOINT = spec(2, 4, scale_up=ScaleUp.AT_CHECKPOINT)


def test_scale_up_at_a_checkpoint_that_every_node_has_taken() -> None:
    story = Story(AT_CHECKPOINT).joins("a", "b").passes(2).runs()
    before = story.state
    assert story.happens(CheckpointTaken(agent("a"), 1)).state is before, "nobody asked"
    story.joins("c")
    assert [story.told(node)[-1] for node in ("a", "b")] == [ASKED, ASKED]
    before = story.state
    assert story.happens(CheckpointTaken(agent("a"), 0)).state is before
    assert story.happens(CheckpointTaken(agent("c"), 1)).state is before, "c runs nothing"
    assert story.happens(CheckpointTaken(agent("a"), 1)).state.phase is Phase.RUNNING, "b writes yet"
    again = story.state
    assert story.happens(CheckpointTaken(agent("a"), 1)).state is again
    assert not [m for m in story.joins("d").told("a") if m == ASKED], "asked once"
    story.happens(CheckpointTaken(agent("b"), 1)).stop("a", "b")
    assert story.nodes() == ["a", "b", "c", "d"]
    assert story.state.restarts_used == 0


def test_a_checkpoint_is_asked_for_again_where_the_answer_may_be_lost_and_when_ranks_start() -> None:
    story = Story(AT_CHECKPOINT).joins("a", "b").passes(2).joins("c")
    assert not any(isinstance(m, CheckpointRequested) for m in story.told("a")), "its ranks do not run yet"
    story.runs()
    assert story.told("a") == [StoreAt(1, StoreAddress("h", 1)), ASKED]
    story.happens(CheckpointTaken(agent("a"), 1))
    assert ASKED not in story.joins("a").told("a"), "a has answered"
    assert story.joins("b").told("b")[-1] == ASKED


def test_a_checkpoint_for_nodes_that_are_gone_again_changes_nothing_and_the_next_is_asked_for() -> None:
    story = Story(AT_CHECKPOINT).joins("a", "b").passes(2).runs().joins("c")
    story.happens(AgentLeft(agent("c"), "changed its mind"))
    for node in ("a", "b"):
        story.happens(CheckpointTaken(agent(node), 1))
    assert story.state.phase is Phase.RUNNING
    assert story.joins("d").told("b") == [ASKED]


# --- fewer nodes than it had


PATIENT = spec(1, 3, shrink_after_s=20.0)


def test_who_asked_for_it_waits_for_a_replacement_before_shrinking() -> None:
    story = Story(PATIENT).joins("a", "b", "c").runs()
    story.happens(AgentLost(agent("c"), "power")).stop("a", "b")
    assert "unless a replacement joins within 20 s" in story.state.decisions[-1].reason
    assert story.state.phase is Phase.FORMING
    assert "waiting for a replacement" in story.told("a")[-1].reason  # type: ignore[union-attr]
    assert story.passes(19).joins("d").nodes() == ["a", "b", "d"]


def test_it_shrinks_when_no_replacement_comes_and_a_partial_one_does_not_shorten_the_wait() -> None:
    story = Story(PATIENT).joins("a", "b", "c").runs()
    for node in ("b", "c"):
        story.happens(AgentLost(agent(node), "power"))
    story.stop("a").passes(5).joins("d").passes(14)
    assert story.state.phase is Phase.FORMING
    assert story.passes(1).nodes() == ["a", "d"]


def test_without_that_wish_survivors_go_on_at_once() -> None:
    story = Story(spec(1, 3)).joins("a", "b", "c").runs()
    story.happens(AgentLost(agent("c"), "power")).stop("a", "b")
    assert (story.state.phase, story.nodes()) == (Phase.SEALED, ["a", "b"])


def test_a_world_does_not_grow_when_a_node_has_finished_already() -> None:
    story = (
        Story(spec(2, 3, scale_up=ScaleUp.IMMEDIATE)).joins("a", "b").passes(2).runs().finish("a").joins("c")
    )
    assert story.state.phase is Phase.RUNNING


# --- the store


def test_only_node_rank_0_opens_the_store_and_only_once() -> None:
    story = Story(spec(2)).joins("a", "b")
    sealed = story.state
    assert story.happens(StoreOpened(agent("b"), 1, StoreAddress("b.lan", 1))).state is sealed
    before = story.runs().state
    assert story.happens(StoreOpened(agent("a"), 1, StoreAddress("a.lan", 2))).state is before
    for early in (RanksFinished(agent("a"), 1), AgentStopped(agent("a"), 1)):
        story.state = sealed
        assert story.happens(early).state is sealed


def test_a_node_that_is_alone_may_import_torch_for_as_long_as_it_takes() -> None:
    story = Story(spec(1, join_timeout_s=2.0)).joins("a").passes(10_000)
    assert story.runs().state.phase is Phase.RUNNING


def test_a_short_join_timeout_does_not_limit_the_start_of_the_store() -> None:
    story = Story(spec(2, join_timeout_s=2.0)).joins("a", "b").passes(500)
    assert story.runs().state.phase is Phase.RUNNING


def test_an_agent_that_stops_too_late_is_told_to_join_again() -> None:
    story = Story(spec(1)).joins("a").runs().fails("a", 0).passes(50)
    assert not story.state.members
    (told,) = story.stop("a").told("a")
    assert isinstance(told, Refused)
    assert told.retryable
    assert story.joins("a", life=2).state.phase is Phase.SEALED


def test_a_store_that_never_opens_costs_its_node_the_place() -> None:
    story = Story(spec(2, join_timeout_s=600.0)).joins("a", "b", "c").passes(600)
    assert story.state.decisions[-1].reason.startswith("node a did not open its TCPStore within 600 s")
    assert story.stop("b").nodes() == ["c", "b"]


# --- cost


def cost_of_a_job(n: int) -> tuple[float, float]:
    """Of n joins and of n heartbeats, in seconds of the processor."""
    state, job, began = JobState(), spec(n), time.process_time()
    for i in range(n):
        state, _ = step(state, AgentJoined(agent(f"n{i}"), job, NodeFacts(f"n{i}", "x", 8)), i * 1e-4)
    joined = time.process_time()
    for i in range(n):
        state, _ = step(state, AgentHeard(agent(f"n{i}")), 2.0)
    assert state.phase is Phase.SEALED
    return joined - began, time.process_time() - joined


def test_ten_thousand_joins_and_heartbeats_stay_linear() -> None:
    """What grew with the square would cost twenty times what twenty jobs of five hundred do, on any machine."""
    small = [cost_of_a_job(500) for _ in range(20)]
    joins, heartbeats = cost_of_a_job(10_000)
    assert joins < 5 * sum(cost for cost, _ in small)
    assert heartbeats < 5 * sum(cost for _, cost in small)
