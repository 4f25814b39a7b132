"""A job told in one line per event, for tests of the round machine."""

from __future__ import annotations

from dataclasses import replace

from rendezvous.machine import step
from rendezvous.values.events import (
    AgentJoined,
    AgentStopped,
    Assigned,
    DeadlineReached,
    Effect,
    Event,
    HealReady,
    RankFailed,
    RanksFinished,
    SetDeadline,
    StoreOpened,
    Tell,
    ToAgent,
)
from rendezvous.values.job_state import JobState
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    RestartBudget,
    StoreAddress,
)


def agent(node: str, life: int = 1) -> AgentId:
    return AgentId(node, str(life))


def spec(least: int = 2, most: int | None = None, restarts: int = 3, **fields: object) -> JobSpec:
    return JobSpec("job", least, most or least, budget=RestartBudget(restarts), **fields)  # type: ignore[arg-type]


class Story:
    def __init__(self, job: JobSpec) -> None:
        self.spec, self.state, self.now = job, JobState(), 100.0
        self.effects: tuple[Effect, ...] = ()
        self.deadline: float | None = None

    def happens(self, event: Event) -> Story:
        self.state, self.effects = step(self.state, event, self.now)
        for effect in self.effects:
            if isinstance(effect, SetDeadline):
                self.deadline = effect.at
        return self

    def told(self, node: str) -> list[ToAgent]:
        return [e.message for e in self.effects if isinstance(e, Tell) and e.agent.node == node]

    def joins(self, *nodes: str, life: int = 1, job: JobSpec | None = None, **facts: object) -> Story:
        for node in nodes:
            its = replace(NodeFacts(node, f"{node}.lan", 2), **facts)  # type: ignore[arg-type]
            self.happens(AgentJoined(agent(node, life), job or self.spec, its))
        return self

    def runs(self) -> Story:
        world = self.state.world
        assert world is not None
        first = world.placements[0].agent
        return self.happens(StoreOpened(first, world.generation, StoreAddress("h", world.generation)))

    def fails(
        self, node: str, rank: int, failure: FailureClass = FailureClass.USER_EXCEPTION, **more: object
    ) -> Story:
        cause = Cause(node, rank, rank % 2, failure, "ValueError: bad batch", 3, ran_s=60.0)
        cause = replace(cause, **more)  # type: ignore[arg-type]
        return self.happens(RankFailed(self._agent(node), self.state.generation, cause))

    def stop(self, *nodes: str) -> Story:
        for node in nodes:
            self.happens(AgentStopped(self._agent(node), self.state.generation))
        return self

    def ready(self, *nodes: str, ready: bool = True, refusal: str = "") -> Story:
        """The ranks of these nodes train inside State.run, or no longer do."""
        for node in nodes:
            self.happens(HealReady(self._agent(node), self.state.generation, ready, refusal))
        return self

    def park(self, *nodes: str) -> Story:
        """These nodes stop in place: all ranks that have not failed are paused."""
        for node in nodes:
            member = self.state.members[node]
            assert self.state.world is not None
            assert member.node_rank is not None
            first = self.state.world.placements[member.node_rank].rank_offset
            left = tuple(i for i in range(member.facts.nproc) if first + i not in self.state.causes)
            self.happens(AgentStopped(member.agent, self.state.generation, parked=left))
        return self

    def places(self) -> dict[str, Assignment]:
        """The assignments that the last event has sent, by node."""
        sent = [e for e in self.effects if isinstance(e, Tell) and isinstance(e.message, Assigned)]
        return {e.agent.node: e.message.assignment for e in sent if isinstance(e.message, Assigned)}

    def finish(self, *nodes: str) -> Story:
        for node in nodes:
            self.happens(RanksFinished(self._agent(node), self.state.generation))
        return self

    def passes(self, seconds: float) -> Story:
        """Every deadline that falls due on the way is reached; agents that are members are heard all along."""
        end = self.now + seconds
        while self.deadline is not None and self.deadline <= end:
            self.now = self.deadline
            leases = self.state.leases
            for node in list(leases):
                leases = leases.plus(node, self.now)
            self.state = replace(self.state, leases=leases)
            self.happens(DeadlineReached())
            if self.state.deadline_at == self.now:
                raise AssertionError("a deadline that does not move")
        self.now = end
        return self

    def _agent(self, node: str) -> AgentId:
        member = self.state.members.get(node)
        return member.agent if member else agent(node)

    def nodes(self) -> list[str]:
        assert self.state.world is not None
        return [p.agent.node for p in self.state.world.placements]


def running(job: JobSpec, *nodes: str) -> Story:
    return Story(job).joins(*nodes).runs()
