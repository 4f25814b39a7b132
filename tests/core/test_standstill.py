"""A job that fails again and again without a further training step ends, however slowly it fails."""

from __future__ import annotations

from itertools import pairwise

from job_story import Story, running, spec

from rendezvous.rounds.snapshot import decode_state, encode_state
from rendezvous.values.events import AgentStopped, RestartOrdered
from rendezvous.values.job_state import Phase
from rendezvous.values.types import CrashLoop, FailureClass, JobSpec, Reached, Recover, RestartBudget

KILLED = FailureClass.SIGNAL
PER_HOUR = RestartBudget(10, 3600.0)


def job(limit: int = 3, **fields: object) -> JobSpec:
    rule = CrashLoop(times=3, within_s=1.0, without_step=limit)
    return JobSpec("job", crash_loop=rule, **{"budget": PER_HOUR, **fields})  # type: ignore[arg-type]


def fail(
    story: Story, step: int | None, *, numbered: bool = True, rank: int = 0, after_s: float = 420.0
) -> Story:
    """The rank fails some minutes after the start, when the ranks have finished `step` steps."""
    story.passes(after_s).fails("a", rank, KILLED, ran_s=after_s, step=None)
    reached = None if step is None else Reached(step, numbered)
    member = story.state.members["a"]
    story.happens(AgentStopped(member.agent, story.state.generation, reached=reached))
    return story.runs() if story.state.phase is Phase.SEALED else story


def reason(story: Story) -> str:
    assert story.state.outcome is not None
    return story.state.outcome.reason


def test_a_job_that_fails_at_the_same_step_ends_although_its_budget_never_does() -> None:
    story = running(job(5), "a")
    for _ in range(4):
        fail(story, 100)
    assert story.state.outcome is None
    fail(story, 100)
    assert reason(story) == (
        "the job failed 5 times in a row without getting beyond step 100; it ends (--crash-loop)"
    )
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 79


def test_without_the_rule_such_a_job_never_ends() -> None:
    story = running(job(0), "a")
    for _ in range(50):
        fail(story, 100)
    assert story.state.outcome is None


def test_a_job_that_gets_further_each_time_goes_on() -> None:
    story = running(job(2), "a")
    for step in range(1, 40):
        fail(story, step)
    assert story.state.outcome is None


def test_a_rollback_is_not_progress() -> None:
    """It resumes from step 50 each time, and does not reach step 100 again."""
    story = running(job(3), "a")
    for step in (100, 60, 70):
        fail(story, step)
    assert "3 times in a row without getting beyond step 100" in reason(story)


def test_progress_begins_the_count_again() -> None:
    story = running(job(3), "a")
    for step in (100, 100, 101, 101, 102, 102, 103):
        fail(story, step)
    assert story.state.outcome is None


def test_a_job_that_does_20_steps_per_start_goes_on() -> None:
    """It may save a checkpoint and resume from it, however fast and however often it fails in the same way."""
    story = running(job(3), "a")
    for _ in range(9):
        story.passes(1).fails("a", 0, KILLED, ran_s=0.9, step=20)
        agent = story.state.members["a"].agent
        story.happens(AgentStopped(agent, story.state.generation, reached=Reached(20))).runs()
    assert story.state.outcome is None


def test_fewer_steps_of_new_processes_are_progress() -> None:
    story = running(job(2), "a")
    for step in (1000, 30, 20, 25):
        fail(story, step, numbered=False)
    assert story.state.outcome is None


def test_no_step_at_all_after_steps_is_no_progress_whatever_fails() -> None:
    story = running(job(3), "a")
    for step, rank in ((40, 0), (0, 1), (0, 0)):
        fail(story, step, numbered=False, rank=rank)
    assert "3 times in a row without finishing a step" in reason(story)


def test_a_job_that_never_takes_steps_ends_only_if_it_fails_in_the_same_way() -> None:
    """A server of predictions never finishes a step. Failures of several kinds do not end it."""
    serving, broken = running(job(3), "a"), running(job(3), "a")
    for i in range(8):
        fail(serving, 0, numbered=False, rank=i % 2)
    assert serving.state.outcome is None
    for _ in range(3):
        fail(broken, 0, numbered=False)
    assert "3 times in a row without finishing a step" in reason(broken)


def test_a_program_without_known_steps_has_only_the_rule_of_times() -> None:
    story = running(job(2), "a")
    for _ in range(30):
        fail(story, None)
    assert story.state.outcome is None
    for _ in range(3):
        story.passes(420)
        fail(story, None, after_s=0.5)
    assert "within 1 s of its start 3 times in a row" in reason(story)


def test_a_generation_without_a_report_counts_neither_way() -> None:
    story = running(job(3), "a")
    for step in (100, None, 100, None, 100):
        fail(story, step)
    assert "3 times in a row" in reason(story)


def test_heals_without_a_step_end_the_job_too() -> None:
    """The counts of the survivors go on, so the same count means that no step was finished, whoever failed."""
    story = running(
        spec(1, restarts=0, recover=Recover.AUTO, crash_loop=CrashLoop(without_step=3)), "a"
    ).ready("a")
    for rank in (0, 1, 0):
        story.passes(420).fails("a", rank, KILLED, ran_s=420.0)
        survivor = 1 - rank
        stopped = AgentStopped(
            story.state.members["a"].agent, story.state.generation, parked=(survivor,), reached=Reached(7)
        )
        story.happens(stopped)
        if story.state.phase is Phase.SEALED:
            assert story.places()["a"].in_place
            story.runs().ready("a")
    assert "3 times in a row each time after 7 steps" in reason(story)


def test_after_failures_without_a_step_ranks_are_not_healed_in_place() -> None:
    """Heals have no limit by default, restarts have."""
    story = running(spec(1, restarts=1, recover=Recover.AUTO), "a").ready("a")
    for heals in range(5):
        assert story.state.heals_used == heals
        story.passes(420).fails("a", 0, KILLED, ran_s=420.0)
        agent = story.state.members["a"].agent
        stopped = AgentStopped(agent, story.state.generation, parked=(1,), reached=Reached(7))
        story.happens(stopped).runs().ready("a")
    assert (story.state.heals_used, story.state.restarts_used) == (5, 0)
    story.passes(420).fails("a", 0, KILLED, ran_s=420.0)
    assert story.state.restarts_used == 1


def test_a_heal_with_a_step_in_between_goes_on() -> None:
    story = running(
        spec(1, restarts=0, recover=Recover.AUTO, crash_loop=CrashLoop(without_step=2)), "a"
    ).ready("a")
    for step in range(20):
        story.passes(1).fails("a", 0, KILLED, ran_s=1.0)
        agent = story.state.members["a"].agent
        story.happens(AgentStopped(agent, story.state.generation, parked=(1,), reached=Reached(step + 1)))
        story.runs().ready("a")
    assert story.state.outcome is None
    assert story.state.heals_used == 20


def test_orders_of_an_operator_do_not_count_as_failures() -> None:
    story = running(job(3), "a")
    for _ in range(2):
        fail(story, 100)
    for _ in range(4):
        story.happens(RestartOrdered("a whim"))
        agent = story.state.members["a"].agent
        story.happens(AgentStopped(agent, story.state.generation, reached=Reached(100, numbered=True))).runs()
    assert story.state.outcome is None
    story.happens(RestartOrdered("a whim"))
    story.happens(
        AgentStopped(
            story.state.members["a"].agent, story.state.generation, reached=Reached(200, numbered=True)
        )
    ).runs()
    fail(story, 200)
    assert story.state.outcome is None


def test_the_furthest_node_counts() -> None:
    story = running(spec(2, restarts=9, crash_loop=CrashLoop(without_step=2)), "a", "b")
    for left, right in pairwise((1, 2, 1, 3, 1, 4)):
        story.fails("a", 0, KILLED)
        for node, step in (("a", left), ("b", right)):
            agent = story.state.members[node].agent
            story.happens(
                AgentStopped(agent, story.state.generation, reached=Reached(max(left, right, step), True))
            )
        if story.state.phase is Phase.SEALED:
            story.runs()
    assert story.state.outcome is not None  # 2, 2: the highest of each generation does not grow


def test_a_failed_rank_counts_its_own_steps_if_agents_do_not() -> None:
    story = running(job(2), "a")
    for _ in range(2):
        story.passes(420).fails("a", 0, KILLED, ran_s=420.0, step=0).stop("a")
        if story.state.phase is Phase.SEALED:
            story.runs()
    assert "2 times in a row without finishing a step" in reason(story)


def test_a_service_that_resumes_keeps_the_count() -> None:
    story = running(job(3), "a")
    for _ in range(2):
        fail(story, 100)
        story.state = decode_state(encode_state(story.state))
    fail(story, 100)
    assert "3 times in a row" in reason(story)
