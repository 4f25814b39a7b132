"""The messages of a node under torch's agent, against the real round machine: no torch, no network."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ddp_launch_wings.torchrun.backend import (
    NodeState,
    fail_job,
    finish,
    give_to_torch,
    handle_message,
    leave,
    next_rendezvous,
)
from rendezvous.machine import step
from rendezvous.values.events import AgentJoined, AgentLost, Refused, StoreOpened, Tell
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    PolicyAction,
    PolicyRule,
    RestartBudget,
    StoreAddress,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_launch_wings.torchrun.backend import Transition
    from rendezvous.values.events import Event, ToAgent

SPEC = JobSpec(
    "job", 2, 2, budget=RestartBudget(9), rules=(PolicyRule(FailureClass.SIGNAL, PolicyAction.FAIL),)
)
FINAL = Cause("", 0, 0, FailureClass.SIGNAL, "rank 3: killed", 137)


class Wire:
    """Messages arrive at once and in order. Messages to `deaf` nodes are held back."""

    def __init__(self, *nodes: str, spec: JobSpec = SPEC) -> None:
        self.state, self.spec = JobState(), spec
        self.at: dict[str, NodeState] = {}
        self.deaf: dict[str, list[ToAgent]] = {}
        self._events: deque[Event] = deque()
        for node in nodes:
            self.arrives(node)

    def arrives(self, node: str) -> None:
        agent = AgentId(node, "1")
        self.at[node] = NodeState(agent, AgentJoined(agent, self.spec, NodeFacts(node, node, 1)))
        self.does(node, next_rendezvous)

    def does(self, node: str, act: Callable[[NodeState], Transition]) -> None:
        self.at[node], said = act(self.at[node])
        self._events += said
        self._settle()

    def happens(self, event: Event) -> None:
        self._events.append(event)
        self._settle()

    def hears_again(self, node: str) -> None:
        for message in self.deaf.pop(node):
            self._deliver(node, message)
        self._settle()

    def _settle(self) -> None:
        while self._events:
            self.state, effects = step(self.state, self._events.popleft(), 100.0)
            for effect in effects:
                if isinstance(effect, Tell) and effect.agent.node in self.at:
                    self._tell(effect.agent.node, effect.message)

    def _tell(self, node: str, message: ToAgent) -> None:
        if node in self.deaf:
            self.deaf[node].append(message)
        else:
            self._deliver(node, message)

    def _deliver(self, node: str, message: ToAgent) -> None:
        self.at[node], said = handle_message(self.at[node], message)
        self._events += said

    def assigned(self, node: str) -> Assignment:
        found = self.at[node].assigned
        assert found is not None
        return found

    def opens_store(self) -> None:
        keeper = next(s for s in self.at.values() if s.assigned is not None and s.assigned.node_rank == 0)
        self.happens(
            StoreOpened(keeper.agent, self.state.generation, StoreAddress("h", self.state.generation))
        )

    def runs(self) -> Wire:
        self.opens_store()
        for name, node in self.at.items():
            if node.assigned is not None:
                self.does(name, partial(give_to_torch, assignment=node.assigned))
        return self

    def running(self) -> dict[str, tuple[int, int]]:
        """node -> (generation, node rank)"""
        ran = {n: s.running for n, s in self.at.items()}
        return {n: (a.generation, a.node_rank) for n, a in ran.items() if a is not None}


def test_nodes_meet_and_finish() -> None:
    wire = Wire("a", "b").runs()
    assert wire.running() == {"a": (1, 0), "b": (1, 1)}
    assert not any(s.must_rejoin for s in wire.at.values())
    wire.does("a", finish)
    assert wire.at["a"].outcome is None
    wire.does("b", finish)
    assert all(s.outcome is not None and s.outcome.succeeded for s in wire.at.values())
    assert not any(s.must_rejoin for s in wire.at.values())


def test_a_failure_brings_the_peer_as_well_and_costs_one_restart() -> None:
    wire = Wire("a", "b").runs()
    wire.does("b", next_rendezvous)
    assert wire.at["a"].must_rejoin
    assert wire.at["a"].assigned is None  # nobody starts before everybody is reaped
    wire.does("a", next_rendezvous)
    wire.runs()
    assert wire.running() == {"a": (2, 0), "b": (2, 1)}
    assert wire.state.restarts_used == 1


def test_two_failures_at_once_are_one() -> None:
    wire = Wire("a", "b").runs()
    wire.deaf["b"] = []
    wire.does("a", next_rendezvous)
    wire.does("b", next_rendezvous)  # its ranks failed too, before it heard of anything
    wire.hears_again("b")
    wire.runs()
    assert wire.running() == {"a": (2, 0), "b": (2, 1)}
    assert wire.state.restarts_used == 1


@pytest.mark.parametrize("wished_before", [False, True])
def test_giving_up_ends_the_job_for_all_and_is_its_cause(wished_before: bool) -> None:
    wire = Wire("a", "b").runs()
    if wished_before:
        wire.does("a", next_rendezvous)
    wire.does("b", partial(fail_job, cause=FINAL))
    if not wished_before:
        assert wire.at["a"].must_rejoin
        wire.does("a", next_rendezvous)
    outcome = wire.at["a"].outcome
    assert outcome is not None
    assert (outcome.succeeded, outcome.exit_code) == (False, 137)
    assert outcome.first_cause is not None
    assert (outcome.first_cause.node, outcome.first_cause.reason) == ("b", "rank 3: killed")


def test_a_lost_node_is_replaced() -> None:
    wire = Wire("a", "b").runs()
    del wire.at["b"]
    wire.happens(AgentLost(AgentId("b", "1"), "its stream broke"))
    assert wire.at["a"].must_rejoin
    wire.does("a", next_rendezvous)
    assert wire.state.phase is Phase.FORMING
    wire.arrives("c")
    wire.runs()
    assert wire.running() == {"a": (2, 0), "c": (2, 1)}


def test_the_lost_one_explains_the_others() -> None:
    """Its peers' ranks fail because of it, and may be reported first."""
    wire = Wire("a", "b").runs()
    wire.does("a", next_rendezvous)
    del wire.at["b"]
    wire.happens(AgentLost(AgentId("b", "1"), "its stream broke"))
    assert wire.state.failures[-1][1].failure is FailureClass.NODE_LOST


def test_a_world_that_breaks_before_it_met_is_never_handed_out() -> None:
    wire = Wire("a", "b")
    broken = wire.assigned("a")
    del wire.at["b"]
    wire.happens(AgentLost(AgentId("b", "1"), "its stream broke"))
    assert wire.state.phase is Phase.FORMING  # `a` said by itself that nothing runs
    wire.does("a", partial(give_to_torch, assignment=broken))
    assert wire.at["a"].running is None
    wire.arrives("c")
    wire.runs()
    assert wire.running() == {"a": (2, 0), "c": (2, 1)}


def test_cast_out_it_reaps_and_joins_again() -> None:
    wire = Wire("a", "b").runs()
    wire.deaf["b"] = []
    wire.happens(AgentLost(AgentId("b", "1"), "silent for a lease"))
    wire.does("a", next_rendezvous)
    wire.deaf["b"] = [Refused("the job goes on without this agent", 75, retryable=True)]
    wire.hears_again("b")
    assert wire.at["b"].must_rejoin
    assert wire.at["b"].assigned is None
    wire.does("b", next_rendezvous)
    wire.runs()
    assert wire.running() == {"a": (2, 0), "b": (2, 1)}


def test_leaving_is_no_failure_of_the_job() -> None:
    spec = JobSpec("job", 1, 2, budget=RestartBudget(9))
    wire = Wire("a", "b", spec=spec).runs()
    wire.does("b", partial(leave, reason="SIGTERM"))
    wire.does("a", next_rendezvous)
    wire.runs()
    assert wire.running()["a"] == (2, 0)
    assert wire.state.decisions[-1].kind is DecisionKind.SHRINK
    assert wire.state.restarts_used == 0


def test_done_though_told_to_restart_it_leaves() -> None:
    """torch's agent waits for its peers where nothing can call it back; then it ends."""
    wire = Wire("a", "b").runs()
    wire.does("a", next_rendezvous)
    wire.does("b", finish)
    assert "b" not in wire.state.members
    assert wire.state.phase is Phase.FORMING


def test_refused_for_good_there_is_nothing_more_to_say() -> None:
    other = JobSpec("job", 2, 2, version="another")
    wire = Wire("a")
    wire.spec = other
    wire.arrives("b")
    refused = wire.at["b"].refused
    assert refused is not None
    assert "version" in refused.reason
    assert wire.at["b"].over
    assert next_rendezvous(wire.at["b"])[1] == leave(wire.at["b"], "x")[1] == ()


def test_what_is_heard_twice_changes_nothing() -> None:
    wire = Wire("a", "b")
    assignment = wire.assigned("a")
    wire.runs()
    before = dict(wire.at)
    wire.does("a", lambda s: (s, (s.joining,)))  # as a session that resumes does: all is told again
    assert wire.at == before
    assert wire.at["a"].running == assignment
