"""A failure that only tells of a consequence, and the pages of all ranks beside it: what did it come of?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from job_story import Story, agent, running, spec
from test_diagnosis import absent, call, waiting

from rendezvous.values.events import AgentStopped, Ended, Stop
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import DecisionKind, Doubt, FailureClass

if TYPE_CHECKING:
    from rendezvous.values.rank_view import RankReport

MISFIT = {"failure": FailureClass.USER_EXCEPTION, "doubt": Doubt.SHARED_ERROR, "reason": "gloo: another size"}
LOST = {"failure": FailureClass.CONSEQUENCE, "reason": "Connection closed by peer"}
LATE = {
    "failure": FailureClass.CONSEQUENCE,
    "reason": "RuntimeError: Timed out waiting 1000ms for recv operation",
}


def died(rank: int, seq: int = 9, numel: int = 1000) -> RankReport:
    """Of an error within its collective number `seq`, which stands on its page as entered."""
    report = waiting(rank, 4, seq)
    return replace(report, calls=(call(seq, numel=numel),), alive=False, process="Z")


def left(rank: int, came_to: int) -> RankReport:
    return absent(rank, 4, came_to, alive=False, process="Z")


def after(story: Story, **seen: tuple[RankReport, ...]) -> Story:
    """Both nodes (of two ranks each) have stopped, and tell what they saw."""
    for node in ("a", "b"):
        story.happens(AgentStopped(agent(node), 1, seen.get(node, ())))
    return story


def failed(how: dict[str, object], rank: int = 0, restarts: int = 2) -> Story:
    story = running(spec(2, restarts=restarts), "a", "b")
    return story.fails("ab"[rank // 2], rank, how.pop("failure"), **how)  # type: ignore[arg-type]


def verdict(story: Story) -> str:
    return story.state.decisions[-1].reason


def doubtful(story: Story, failure: FailureClass) -> str:
    """The reason of the last failure, of which nobody is certain."""
    _generation, cause = story.state.failures[-1]
    assert (cause.failure, cause.doubt, cause.suspects) == (failure, Doubt.CULPRIT, (1,))
    return cause.reason


@pytest.mark.parametrize("how", [MISFIT, LOST])
def test_the_one_with_another_shape_is_named_whoever_failed(how: dict[str, object]) -> None:
    story = after(failed(dict(how)), a=(died(0), waiting(1, 4, 9)), b=(waiting(2, 4, 9), died(3, numel=16)))
    assert (
        "rank 3 on b: entered all_reduce #9 (16 x float32), while ranks 0-2 entered all_reduce #9"
        in verdict(story)
    )
    _generation, cause = story.state.failures[-1]
    assert (cause.rank, cause.node, cause.failure) == (3, "b", FailureClass.USER_EXCEPTION)
    assert str(how["reason"]) in cause.traceback
    assert not cause.uncertain
    assert story.state.node_failures.get("b", 0) == 0  # the script's fault, not the machine's


def test_where_there_is_no_majority_both_sides_are_told_and_nobody_is_blamed() -> None:
    other = replace(waiting(2, 4, 9), calls=(call(9, numel=16),))
    story = after(failed(dict(LOST)), a=(died(0), waiting(1, 4, 9)), b=(other, replace(other, rank=3)))
    (_generation, cause) = story.state.failures[-1]
    assert cause.doubt is Doubt.SHARED_ERROR
    assert verdict(story).startswith(
        "user-exception; the ranks called different collectives: ranks 0 and 1 entered all_reduce #9"
    )
    assert "ranks 2 and 3 entered all_reduce #9 (16 x float32)" in verdict(story)


def test_one_that_ended_well_while_others_went_on_is_named() -> None:
    story = after(failed(dict(LOST)), a=(died(0), left(1, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    assert (
        "rank 1 on a: exited without an error; ranks 0, 2 and 3 have waited for it for 3.2 s in all_reduce #9"
        in verdict(story)
    )
    _generation, cause = story.state.failures[-1]
    assert (cause.rank, cause.failure, cause.exit_code) == (1, FailureClass.EXIT_CODE, 3)


def test_whom_a_rank_waited_for_as_long_as_its_group_lets_it_is_named() -> None:
    story = failed(dict(LATE)).fails("a", 1, FailureClass.CONSEQUENCE, reason="stopped by the launcher")
    after(story, a=(died(0), absent(1, 4, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    assert "rank 1 on a: has made no progress for 3.2 s in its data loader (sleeping" in verdict(story)
    assert "ranks 0, 2 and 3 have waited for it for 3.2 s in all_reduce #9" in verdict(story)
    _generation, cause = story.state.failures[-1]
    assert (cause.rank, cause.failure, cause.exit_code) == (1, FailureClass.HANG, 124)
    assert not cause.uncertain


def test_one_that_may_have_waited_unseen_is_named_without_certainty() -> None:
    story = running(spec(1, restarts=2), "a").fails("a", 0, **LATE)  # type: ignore[arg-type]
    sleeper = absent(1, 2, 8, phase=RankPhase.FORWARD)
    story.happens(AgentStopped(agent("a"), 1, (replace(died(0), groups=waiting(0, 2, 9).groups), sleeper)))
    told = doubtful(story, FailureClass.HANG)
    assert "has made no progress for 3.2 s in its forward pass" in told


def test_where_no_page_shows_what_was_waited_in_whoever_was_elsewhere_is_named_without_certainty() -> None:
    sleeper = absent(1, 4, 8, phase=RankPhase.FORWARD, calls=())
    backward = absent(2, 4, 8, phase=RankPhase.BACKWARD, calls=())
    story = after(failed(dict(LATE)), a=(exiting(0, 0.1), sleeper), b=(backward, replace(backward, rank=3)))
    told = doubtful(story, FailureClass.HANG)
    assert told.startswith("has made no progress for 3.2 s in its forward pass (sleeping")


def test_who_has_not_come_yet_when_a_connection_breaks_is_not_the_reason() -> None:
    story = after(failed(dict(LOST)), a=(died(0), absent(1, 4, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    assert story.state.failures[-1][1].rank == 0


def exiting(rank: int, ago_s: float) -> RankReport:
    """Its script is over, and no page shows what it waited in."""
    return replace(left(rank, 8), calls=(), phase=RankPhase.EXITING, phase_s=ago_s)


def test_one_that_ended_well_before_peers_were_lost_unseen_is_named_without_certainty() -> None:
    others = (exiting(2, 0.3), exiting(3, 0.2))
    story = after(failed(dict(LOST)), a=(exiting(0, 0.4), exiting(1, 1.0)), b=others)
    assert doubtful(story, FailureClass.EXIT_CODE).startswith(
        "exited without an error before rank 0 lost the connection to its peers; Connection"
    )


def test_one_that_ended_well_after_peers_were_lost_is_not_named() -> None:
    story = after(failed(dict(LOST)), a=(exiting(0, 2.0), exiting(1, 1.0)))
    assert story.state.failures[-1][1].reason == LOST["reason"]


def test_who_says_what_was_lost_comes_before_who_was_merely_stopped() -> None:
    story = running(spec(2, restarts=0), "a", "b")
    story.fails("b", 2, **LOST, traceback="Traceback", exit_code=1)  # type: ignore[arg-type]
    story.fails("a", 0, FailureClass.CONSEQUENCE, reason="stopped by the launcher (SIGTERM)", exit_code=143)
    after(story)
    (ended,) = (m for m in story.told("a") if isinstance(m, Ended))
    assert (ended.outcome.first_cause.rank, ended.outcome.exit_code) == (2, 1)  # type: ignore[union-attr]


def test_one_that_has_failed_itself_has_not_ended_well() -> None:
    story = failed(dict(LOST)).fails("a", 1, FailureClass.CONSEQUENCE)
    after(story, a=(died(0), left(1, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    assert story.state.failures[-1][1].rank == 0


def test_an_error_of_its_own_explains_itself() -> None:
    own = {"failure": FailureClass.USER_EXCEPTION, "reason": "ValueError"}
    story = after(failed(own), a=(died(0), left(1, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    assert story.state.failures[-1][1].reason == "ValueError"


@pytest.mark.parametrize("seen", [{}, {"a": (died(0), waiting(1, 4, 9))}])
def test_where_the_pages_show_nothing_the_cause_stays(seen: dict[str, tuple[RankReport, ...]]) -> None:
    story = after(failed(dict(LOST)), **seen)
    (_generation, cause) = story.state.failures[-1]
    assert (cause.rank, cause.failure) == (0, FailureClass.CONSEQUENCE)


def test_a_job_without_restarts_ends_with_the_same_words() -> None:
    story = failed(dict(LOST), restarts=0)
    (stop,) = (m for m in story.told("a") if isinstance(m, Stop))
    assert stop.decision.kind is DecisionKind.FAIL
    after(story, a=(died(0), left(1, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    (ended,) = (m for m in story.told("a") if isinstance(m, Ended))
    assert ended.outcome.first_cause is not None
    assert (ended.outcome.first_cause.rank, ended.outcome.exit_code) == (1, 3)


def test_what_was_seen_of_one_generation_is_forgotten_with_the_next() -> None:
    story = after(failed(dict(LOST)), a=(died(0), left(1, 8)), b=(waiting(2, 4, 9), waiting(3, 4, 9)))
    story.runs().fails("a", 0, FailureClass.CONSEQUENCE)
    for node in ("a", "b"):
        story.happens(AgentStopped(agent(node), 2))
    assert story.state.failures[-1][1].rank == 0


def test_a_node_speaks_of_its_own_ranks_only() -> None:
    story = after(
        failed(dict(LOST)),
        a=(died(0), left(1, 8), replace(left(2, 8), rank=-1)),
        b=(left(0, 3), waiting(2, 4, 9)),
    )
    assert story.state.failures[-1][1].rank == 1
