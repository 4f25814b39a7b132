"""Every agent ends with the same first cause, in whatever order the reports of several nodes arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from job_story import Story, agent, running, spec

from rendezvous.rounds.policy import first_cause_order
from rendezvous.values.events import AgentLost, AgentStopped, Event, RankFailed
from rendezvous.values.types import Cause, FailureClass

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
        ran_s=st.just(60.0),
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


ORDERS = st.lists(st.integers(0, 5), min_size=9, max_size=9)


@settings(max_examples=150, deadline=None)
@given(FATES, ORDERS, ORDERS, st.sampled_from((0, 3)))
def test_the_first_cause_does_not_depend_on_the_order_of_arrival(
    fates: dict[str, Fate], one: list[int], other: list[int], restarts: int
) -> None:
    first = told_to_all(restarts, interleaved(fates, one))
    assert told_to_all(restarts, interleaved(fates, other)) == first


@settings(max_examples=150, deadline=None)
@given(FATES, ORDERS)
def test_it_is_the_local_cause_of_the_earliest_step_and_the_lowest_rank(
    fates: dict[str, Fate], order: list[int]
) -> None:
    first = told_to_all(0, interleaved(fates, order))
    told = [cause for fate in fates.values() for cause in fate.failures]
    own = [cause for cause in told if cause.failure is not FailureClass.CONSEQUENCE]
    if own:
        assert first == min(own, key=lambda c: (c.step is None, c.step or 0, c.rank))
    elif any(fate.lost for fate in fates.values()):
        assert first.failure is FailureClass.NODE_LOST
    else:
        assert first in told


@given(causes("a"), st.text(max_size=5))
def test_no_wall_clock_has_a_say(found: tuple[Cause, ...], at: str) -> None:
    for cause in found:
        assert first_cause_order(replace(cause, at=at)) == first_cause_order(cause)
