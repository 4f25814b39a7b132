"""The first cause: the order of ends on a node, then the steps, then the first report; never a stopped rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from job_story import Story, agent, running, spec

from rendezvous.rounds.policy import first_cause_order
from rendezvous.values.events import AgentLost, AgentStopped, Event, RankFailed
from rendezvous.values.job_state import Phase
from rendezvous.values.types import Cause, FailureClass, PolicyAction, PolicyRule

NODES = ("a", "b", "c")  # of two ranks each
CLASSES = (
    FailureClass.CONSEQUENCE,
    FailureClass.NETWORK,
    FailureClass.USER_EXCEPTION,
    FailureClass.SIGNAL,
)


@dataclass(frozen=True, slots=True)
class Fate:
    """What one node has to say, in this order: its agent's messages do not overtake each other."""

    failures: tuple[Cause, ...]
    lost: bool

    def events(self, node: str) -> list[Event]:
        told: list[Event] = [RankFailed(agent(node), 1, cause) for cause in self.failures]
        last = AgentLost(agent(node), "power") if self.lost else AgentStopped(agent(node), 1)
        return [*told, last]


def causes(node: str) -> st.SearchStrategy[tuple[Cause, ...]]:
    first = 2 * NODES.index(node)
    one = st.builds(
        Cause,
        st.just(node),
        st.integers(first, first + 1),
        st.just(0),
        st.sampled_from(CLASSES),
        st.just("it failed"),
        st.integers(1, 3),
        step=st.one_of(st.none(), st.integers(0, 3)),
        ran_s=st.sampled_from((60.0, 61.0, 62.0)),
        at=st.sampled_from(("", "1970-01-01", "2099-01-01")),
    )
    return st.lists(one, max_size=2, unique_by=lambda cause: cause.rank).map(tuple)


FATES = st.fixed_dictionaries({n: st.builds(Fate, causes(n), st.booleans()) for n in NODES}).filter(
    lambda fates: any(fate.failures or fate.lost for fate in fates.values())
)


def interleaved(fates: dict[str, Fate], order: list[int]) -> list[Event]:
    """One order of arrival. Nobody answers a stop before there was a reason for one."""
    left = {node: fate.events(node) for node, fate in fates.items()}
    arrived: list[Event] = []
    for pick in order * 3:
        able = [n for n, events in left.items() if events and (arrived or _is_new(events[0]))]
        if able:
            arrived.append(left[able[pick % len(able)]].pop(0))
    assert not any(left.values())
    return arrived


def _is_new(event: Event) -> bool:
    return not isinstance(event, AgentStopped)


def told_to_all(restarts: int, arrived: list[Event]) -> Cause:
    """The generation is over: what was its first cause?"""
    story: Story = running(spec(3, restarts=restarts), *NODES)
    for event in arrived:
        story.happens(event)
    if restarts:
        ((generation, cause),) = story.state.failures
        assert generation == 1
        return cause
    outcome = story.state.outcome
    assert outcome is not None
    assert outcome.first_cause is not None
    assert outcome.causes[0] == outcome.first_cause
    return outcome.first_cause


def steps(cause: Cause) -> tuple[bool, int]:
    return cause.step is None, cause.step or 0


ORDERS = st.lists(st.integers(0, 5), min_size=9, max_size=9)


@settings(max_examples=150, deadline=None)
@given(FATES, ORDERS, ORDERS, st.sampled_from((0, 3)))
def test_the_first_cause_does_not_depend_on_the_order_of_arrival(
    fates: dict[str, Fate], one: list[int], other: list[int], restarts: int
) -> None:
    """Only if two nodes have failed at the same step, the first report counts."""
    first = told_to_all(restarts, interleaved(fates, one))
    second = told_to_all(restarts, interleaved(fates, other))
    if second.node == first.node:
        assert second == first
    else:
        assert first_cause_order(second)[:2] == first_cause_order(first)[:2]


@settings(max_examples=150, deadline=None)
@given(FATES, ORDERS)
def test_it_is_the_first_local_cause_of_its_node_and_the_earliest_step_of_all_nodes(
    fates: dict[str, Fate], order: list[int]
) -> None:
    first = told_to_all(0, interleaved(fates, order))
    told = [cause for fate in fates.values() for cause in fate.failures]
    own = [cause for cause in told if cause.failure is not FailureClass.CONSEQUENCE]
    if own:
        here = [cause for cause in own if cause.node == first.node]
        assert first.ran_s == min(cause.ran_s for cause in here)
        first_ends = [
            min((c for c in own if c.node == node), key=lambda c: (c.ran_s, steps(c), c.rank))
            for node in {cause.node for cause in own}
        ]
        assert steps(first) == min(steps(cause) for cause in first_ends)
    elif any(fate.lost for fate in fates.values()):
        assert first.failure is FailureClass.NODE_LOST
    else:
        assert first in told


@given(causes("a"), st.text(max_size=5))
def test_no_wall_clock_has_a_say(found: tuple[Cause, ...], at: str) -> None:
    for cause in found:
        assert first_cause_order(replace(cause, at=at)) == first_cause_order(cause)


def failed(story: Story, node: str, rank: int, ran_s: float, **known: object) -> None:
    cause = Cause(node, rank, rank % 2, FailureClass.EXIT_CODE, "exit code 7", 7, ran_s=ran_s, **known)  # type: ignore[arg-type]
    story.happens(RankFailed(agent(node), 1, cause))


def first_cause_of(story: Story) -> Cause:
    outcome = story.stop("a", "b").state.outcome
    assert outcome is not None
    assert outcome.first_cause is not None
    return outcome.first_cause


def test_a_rank_that_ends_after_another_one_of_its_node_is_not_the_first_cause() -> None:
    """A peer that sees the end of its own connection to a rank, whatever the numbers and steps of the two are."""
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "a", 1, 5.001, step=9)
    failed(story, "a", 0, 5.002, step=8)
    assert first_cause_of(story).rank == 1


def test_a_rank_that_began_to_exit_first_is_the_first_cause_although_it_ended_later() -> None:
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "a", 0, 5.002)
    failed(story, "a", 1, 5.001)
    assert first_cause_of(story).rank == 1


def test_of_two_nodes_the_lower_step_counts_and_then_the_first_report() -> None:
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "b", 3, 5.2, step=8)
    failed(story, "a", 0, 5.1, step=8)
    assert first_cause_of(story).rank == 3
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "b", 3, 5.1, step=8)
    failed(story, "a", 0, 5.2, step=7)
    assert first_cause_of(story).rank == 0


def test_a_rank_that_loses_a_connection_after_another_one_has_ended_is_a_consequence() -> None:
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "a", 1, 5.001)
    failed(story, "a", 0, 5.002, lost_peer=True)
    assert first_cause_of(story).rank == 1
    assert story.state.outcome is not None
    assert [cause.failure for cause in story.state.outcome.causes] == [
        FailureClass.EXIT_CODE,
        FailureClass.CONSEQUENCE,
    ]


def test_a_rank_that_loses_a_connection_first_has_failed_by_itself() -> None:
    """To another process, as a service of the user. Both ranks are named."""
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "a", 0, 5.001, lost_peer=True)
    failed(story, "a", 1, 5.002)
    assert first_cause_of(story).rank == 0
    assert story.state.outcome is not None
    assert [cause.failure for cause in story.state.outcome.causes] == [FailureClass.EXIT_CODE] * 2


def test_of_two_nodes_a_lost_connection_is_the_consequence_whatever_arrives_first() -> None:
    """Neither its class nor the limit on failures of its node decides before all reports have arrived."""
    rules = (PolicyRule(FailureClass.EXIT_CODE, PolicyAction.FAIL),)
    story = running(spec(2, restarts=3, rules=rules, node_failure_limit=1), "a", "b")
    failed(story, "a", 0, 5.2, lost_peer=True, step=3)
    assert story.state.phase is Phase.STOPPING
    story.fails("b", 2, FailureClass.USER_EXCEPTION)
    story.stop("a", "b")
    assert story.state.outcome is None
    ((_generation, first),) = story.state.failures
    assert first.rank == 2


def test_a_lost_connection_alone_is_a_failure_of_its_class() -> None:
    rules = (PolicyRule(FailureClass.EXIT_CODE, PolicyAction.FAIL),)
    story = running(spec(2, restarts=3, rules=rules), "a", "b")
    failed(story, "a", 0, 5.2, lost_peer=True)
    assert first_cause_of(story).failure is FailureClass.EXIT_CODE


def test_a_lost_connection_is_a_consequence_of_a_lost_node() -> None:
    story = running(spec(2, restarts=0), "a", "b")
    failed(story, "a", 0, 5.2, lost_peer=True)
    story.happens(AgentLost(agent("b"), "power")).stop("a")
    assert story.state.outcome is not None
    assert story.state.outcome.first_cause is not None
    assert story.state.outcome.first_cause.failure is FailureClass.NODE_LOST


def test_what_a_stopped_rank_raises_is_neither_the_first_cause_nor_a_reason_to_end_the_job() -> None:
    """A rule of --failure-policy for exceptions, and the handler of SIGTERM of another node's rank raises one."""
    rules = (PolicyRule(FailureClass.USER_EXCEPTION, PolicyAction.FAIL),)
    story = running(spec(2, restarts=3, rules=rules), "a", "b")
    story.fails("b", 2, FailureClass.SIGNAL)
    stopped = Cause("a", 0, 0, FailureClass.CONSEQUENCE, "stopped by the launcher (SIGTERM)", 1, stopped=True)
    story.happens(RankFailed(agent("a"), 1, stopped))
    story.stop("a", "b")
    assert story.state.outcome is None
    assert story.state.restarts_used == 1
    ((_generation, first),) = story.state.failures
    assert first.rank == 2
