"""A small job as a transition system: the real round machine, agents, their streams, and faults that are counted.

`model_checker.py` explores every interleaving of its actions. An agent here is what the protocol asks of one: it takes
the messages of the service in their order, whenever it likes, and has the real replay of a session. Time passes only
when an agent that lives has nothing to do at once, and then to the next deadline, with a heartbeat of each.

Faults, orders and changes of the replica are counted (`Left`). All other actions happen by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sim_invariants import check_step
from sim_violation import require

from rendezvous.machine import step
from rendezvous.rounds.admission import renew_leases, resume
from rendezvous.session_replay import SessionReplay
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentLost,
    AgentStopped,
    Assigned,
    DeadlineReached,
    Ended,
    HealReady,
    JobAborted,
    JobResized,
    NodeDrained,
    NodeResumed,
    Notice,
    Persist,
    RankFailed,
    RanksFinished,
    Refused,
    RestartOrdered,
    Stop,
    StoreAt,
    StoreOpened,
    Tell,
    Waiting,
)
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import NOT_KEPT, JobState, Phase
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    StoreAddress,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rendezvous.values.events import Effect, Event, FromAgent, ToAgent

    Action = tuple[str, Callable[[], "World"]]

_NOT_STORED = {each.name: each.default for each in fields(JobState) if each.metadata == NOT_KEPT}
STORE = StoreAddress("a", 1)


@dataclass(frozen=True, slots=True)
class Agent:
    id: AgentId
    replay: SessionReplay
    inbox: tuple[ToAgent, ...] = ()
    is_connected: bool = False
    lives: bool = True
    place: Assignment | None = None  # of the last world that it was told
    runs: bool = False  # its rank does
    stop: Stop | None = None  # which it has not answered
    has_failed: bool = False  # its rank, in this generation
    outcome: Outcome | None = None

    @property
    def node(self) -> str:
        return self.id.node

    @property
    def is_up(self) -> bool:
        return self.lives and self.outcome is None


@dataclass(frozen=True, slots=True)
class Left:
    """What may still go wrong, and be ordered."""

    faults: int = 0
    orders: int = 0
    replicas: int = 0  # changes of the replica that has the job


@dataclass(frozen=True)
class World:
    spec: JobSpec
    nodes: tuple[str, ...]
    left: Left
    agents: tuple[Agent, ...] = ()  # one of each node at most
    lives: FrozenMap[str, int] = field(default_factory=FrozenMap)
    state: JobState = field(default_factory=JobState)
    stored: JobState = field(default_factory=JobState)  # what a replica that takes over begins with
    now: float = 0.0

    # --- what can happen

    def actions(self) -> Iterator[Action]:
        """Those that happen by themselves."""
        urgent = [action for agent in self.agents if agent.is_up for action in self._urgent(agent)]
        yield from urgent
        for agent in self.agents:
            if agent.is_up and agent.runs and agent.stop is None:
                yield from self._of_a_rank(agent)
            if agent.is_up and agent.is_connected and not agent.inbox and not self._is_member(agent):
                yield f"{agent.node} sends a heartbeat", partial(self.stepped, AgentHeard(agent.id))
            if not agent.lives and self._is_member(agent):
                yield (
                    f"the stream of {agent.node} is lost",
                    partial(self.stepped, AgentLost(agent.id, "gone")),
                )
        for node in self.nodes if self.state.phase is not Phase.ENDED else ():
            if not any(agent.node == node and (agent.is_up or agent.outcome) for agent in self.agents):
                yield f"{node} starts an agent", partial(self._booted, node)
        if not urgent and self.state.deadline_at is not None:
            yield "time passes", self._later

    def faults(self) -> Iterator[Action]:
        less = replace(self.left, faults=self.left.faults - 1)
        if less.faults >= 0 and self.state.phase is not Phase.ENDED:
            for agent in self.agents:
                if agent.is_up:
                    yield f"{agent.node} dies", partial(self._died, agent, less)
                    yield f"{agent.node} leaves", partial(self._leaves, agent, less)
                    if agent.runs and agent.stop is None and not agent.has_failed:
                        yield (
                            f"the rank of {agent.node} is killed",
                            partial(self._fails, agent, FailureClass.SIGNAL, less),
                        )
        less = replace(self.left, replicas=self.left.replicas - 1)
        if less.replicas >= 0:
            yield "another replica takes over", partial(self._taken_over, less)

    def orders(self) -> Iterator[Action]:
        less = replace(self.left, orders=self.left.orders - 1)
        if less.orders < 0 or self.state.phase is Phase.ENDED:
            return
        most = self.state.max_nodes
        orders: list[Event] = [
            *(NodeDrained(node, "repairs") for node in self.nodes[:1]),
            *(NodeResumed(node) for node in self.state.excluded),
            JobResized(1, max(1, most - 1)),
            JobResized(1, most + 1),
            RestartOrdered("a whim"),
            JobAborted("enough"),
        ]
        for order in orders:
            yield str(order), partial(replace(self, left=less).stepped, order)

    def has_ended(self) -> bool:
        """Everyone who is up knows the outcome, and nothing waits."""
        return self.state.phase is Phase.ENDED and not any(agent.is_up for agent in self.agents)

    # --- agents

    def _urgent(self, agent: Agent) -> Iterator[Action]:
        if not agent.is_connected:
            yield f"{agent.node} connects", partial(self._connects, agent)
        elif agent.inbox:
            yield f"{agent.node} reads {type(agent.inbox[0]).__name__}", partial(self._reads, agent)
        elif agent.stop is not None:
            yield f"{agent.node} has stopped", partial(self._stops, agent)
        elif self._opens(agent):
            opened = StoreOpened(agent.id, agent.replay.generation, STORE)
            yield f"{agent.node} opens the store", partial(self._sends, agent, opened)

    def _of_a_rank(self, agent: Agent) -> Iterator[Action]:
        generation, place = agent.replay.generation, agent.place
        assert place is not None
        sent = {type(report) for report in agent.replay.reports}
        if agent.has_failed or RanksFinished in sent:
            return
        if place.can_heal and HealReady not in sent:
            yield (
                f"{agent.node} can pause",
                partial(self._sends, agent, HealReady(agent.id, generation, True)),
            )
        if self._misses_peer(agent):
            yield (
                f"{agent.node} misses a peer",
                partial(self._fails, agent, FailureClass.CONSEQUENCE, self.left),
            )
        elif all(p is not None and (p.runs or _is_over(p, generation)) for p in self._peers(agent)):
            yield f"{agent.node} finishes", partial(self._finishes, agent)

    def _peers(self, agent: Agent) -> list[Agent | None]:
        """The agents of the other nodes of its world; None: it is gone."""
        world = self.state.world
        if world is None or world.generation != agent.replay.generation:
            return []
        by_id = {each.id: each for each in self.agents}
        return [by_id.get(p.agent) for p in world.placements if p.agent != agent.id]

    def _misses_peer(self, agent: Agent) -> bool:
        generation = agent.replay.generation
        return any(
            peer is None or not peer.lives or peer.has_failed or _has_stopped(peer, generation)
            for peer in self._peers(agent)
        )

    def _opens(self, agent: Agent) -> bool:
        place, reports = agent.place, agent.replay.reports
        is_first = place is not None and place.node_rank == 0 and place.generation == agent.replay.generation
        return (
            is_first
            and not agent.runs
            and agent.replay.running is not None
            and not any(isinstance(report, StoreOpened) for report in reports)
        )

    def _booted(self, node: str) -> World:
        life = self.lives.get(node, 0) + 1
        agent = AgentId(node, str(life))
        joined = AgentJoined(agent, self.spec, NodeFacts(node, node, 1))
        newcomer = Agent(agent, SessionReplay().sent(joined))
        others = tuple(a for a in self.agents if a.node != node)
        agents = tuple(sorted((*others, newcomer), key=lambda a: a.node))
        return replace(self, agents=agents, lives=self.lives.plus(node, life))

    def _connects(self, agent: Agent) -> World:
        world = self._with(replace(agent, is_connected=True, inbox=()))
        for message in agent.replay.messages():
            world = world.stepped(message)
        return world

    def _sends(self, agent: Agent, message: FromAgent) -> World:
        return self._with(replace(agent, replay=agent.replay.sent(message))).stepped(message)

    def _fails(self, agent: Agent, how: FailureClass, left: Left) -> World:
        assert agent.place is not None
        cause = Cause(agent.node, agent.place.rank_offset, 0, how, how.value, 1)
        world = replace(self, left=left)
        failed = replace(agent, has_failed=True, runs=False)
        return world._sends(failed, RankFailed(agent.id, agent.replay.generation, cause))

    def _finishes(self, agent: Agent) -> World:
        return self._sends(replace(agent, runs=False), RanksFinished(agent.id, agent.replay.generation))

    def _stops(self, agent: Agent) -> World:
        assert agent.stop is not None
        ready = any(isinstance(r, HealReady) for r in agent.replay.reports)
        parks = agent.stop.decision.in_place and agent.runs and ready and not agent.has_failed
        answer = AgentStopped(agent.id, agent.stop.generation, parked=(0,) if parks else ())
        return self._sends(replace(agent, stop=None, runs=False), answer)

    def _reads(self, agent: Agent) -> World:
        message, *rest = agent.inbox
        again = agent.replay.reports_for(message)
        told = _told(replace(agent, inbox=tuple(rest), replay=agent.replay.received(message)), message)
        world = self._with(told)
        for report in again:
            world = world.stepped(report)
        return world

    def _died(self, agent: Agent, left: Left) -> World:
        return replace(self._with(replace(agent, lives=False, runs=False, inbox=())), left=left)

    def _leaves(self, agent: Agent, left: Left) -> World:
        gone = replace(self._with(replace(agent, lives=False, runs=False, inbox=())), left=left)
        return gone.stepped(AgentLeft(agent.id, "asked to")) if agent.is_connected else gone

    def _is_member(self, agent: Agent) -> bool:
        member = self.state.members.get(agent.node)
        return member is not None and member.agent == agent.id and self.state.phase is not Phase.ENDED

    def _with(self, agent: Agent) -> World:
        return replace(self, agents=tuple(agent if a.id == agent.id else a for a in self.agents))

    # --- the service

    def stepped(self, event: Event) -> World:
        after, effects = step(self.state, event, self.now)
        check_step(self.state, event, after, effects)
        stored = after if any(isinstance(e, Persist) for e in effects) else self.stored
        world = replace(self, state=after, stored=stored)
        if after.phase is Phase.SEALED and after.generation > self.state.generation:
            world._check_sealed()
        if after.outcome is not None and self.state.outcome is None:
            world._check_outcome()
        return world._performed(effects)

    def _performed(self, effects: tuple[Effect, ...]) -> World:
        told = {}
        for effect in effects:
            if isinstance(effect, Tell):
                told.setdefault(effect.agent, []).append(effect.message)
        agents = tuple(_with_mail(a, told.get(a.id, ())) for a in self.agents)
        return replace(self, agents=agents)

    def _later(self) -> World:
        assert self.state.deadline_at is not None
        now = max(self.now, self.state.deadline_at)
        heard = {agent.id: now for agent in self.agents if agent.is_up and agent.is_connected}
        world = replace(self, now=now, state=renew_leases(self.state, heard))
        return world.stepped(DeadlineReached())

    def _taken_over(self, left: Left) -> World:
        state, effects = resume(replace(self.stored, **_NOT_STORED), self.now)
        agents = tuple(replace(agent, is_connected=False, inbox=()) for agent in self.agents)
        return replace(self, left=left, state=state, agents=agents)._performed(effects)

    # --- properties of the whole, besides those of each step

    def _check_sealed(self) -> None:
        """No rank of an older world runs, except where its agent is not a member any more."""
        for agent in self.agents:
            old = agent.runs and agent.replay.generation < self.state.generation
            require(
                not (old and self._is_member(agent)), f"the rank of {agent.node} still runs at the next seal"
            )

    def _check_outcome(self) -> None:
        """A job succeeds only if the ranks of all nodes of its world have finished."""
        outcome, world = self.state.outcome, self.state.world
        assert outcome is not None
        require(self.state.restarts_used <= self.spec.budget.limit, "too many restarts")
        if outcome.succeeded:
            assert world is not None
            waiting = {a.id for a in self.agents if a.lives and (a.runs or a.has_failed)}
            require(not waiting & {p.agent for p in world.placements}, "success before all have finished")

    def key(self) -> int:
        """A hash of all that can matter for what follows. Times count from now."""
        left = self.left
        stored = (
            _key_of(self.stored, self.stored.as_of)
            if left.replicas and self.stored is not self.state
            else None
        )
        agents = tuple(map(_key_of_agent, self.agents))
        return hash((agents, left, _key_of(self.state, self.now), stored))


def _with_mail(agent: Agent, messages: Sequence[ToAgent]) -> Agent:
    """Without those that change nothing in an agent that has read all others."""
    if not (agent.is_connected and agent.is_up):
        return agent
    inbox = list(agent.inbox)
    idle = not agent.runs and agent.replay.running is None
    for message in messages:
        if not isinstance(message, Notice) and not (isinstance(message, Waiting) and idle and not inbox):
            inbox.append(message)
    return agent if len(inbox) == len(agent.inbox) else replace(agent, inbox=tuple(inbox))


def _told(agent: Agent, message: ToAgent) -> Agent:
    match message:
        case Assigned(place):
            return _assigned(agent, place)
        case StoreAt(generation):
            mine = agent.place is not None and agent.place.generation == generation
            starts = mine and agent.stop is None and not agent.has_failed and not _is_over(agent, generation)
            return replace(agent, runs=agent.runs or starts)
        case Stop(generation):  # an agent that has not heard of this generation answers, too
            current = generation == agent.replay.generation
            return replace(agent, stop=message) if current and not _has_stopped(agent, generation) else agent
        case Waiting():
            return replace(agent, runs=False)
        case Refused(retryable=True):
            return replace(agent, runs=False, stop=None, place=None, is_connected=False, inbox=())
        case Refused():
            return replace(agent, lives=False, runs=False, inbox=())
        case Ended(outcome):
            require(not agent.runs or not outcome.succeeded, "success while a rank runs")
            return replace(agent, runs=False, outcome=outcome, inbox=())
    return agent


def _assigned(agent: Agent, place: Assignment) -> Agent:
    before = agent.place
    if before is not None and before.generation == place.generation:
        same = (before.node_rank, before.n_nodes) == (place.node_rank, place.n_nodes)
        require(same, f"two places of {agent.node} in generation {place.generation}")
        return agent
    require(before is None or before.generation < place.generation, "generations go back")
    require(not agent.runs, f"{agent.node} gets a place while its rank runs")
    return replace(agent, place=place, has_failed=False, stop=None)


def _is_over(agent: Agent, generation: int) -> bool:
    over = (AgentStopped, RanksFinished, RankFailed)
    return any(isinstance(r, over) and r.generation == generation for r in agent.replay.reports)


def _has_stopped(agent: Agent, generation: int) -> bool:
    return any(isinstance(r, AgentStopped) and r.generation == generation for r in agent.replay.reports)


def _key_of_agent(agent: Agent) -> Any:
    mine = agent.replay
    inbox = tuple(type(each) if isinstance(each, Waiting | Ended) else each for each in agent.inbox)
    flags = (agent.is_connected, agent.lives, agent.runs, agent.has_failed, agent.outcome is None)
    return (agent.id, mine.generation, mine.running, mine.reports, inbox, agent.stop, flags)


_TIMES = {"timers", "leases", "deadline_at", "as_of", "excluded", "heal_times", "restart_times"}
_HISTORY = {
    "decisions",
    "failures",
    "arrivals",
    "time",
    "spec",
    "outcome",
}  # `decisions`: only their last matters
_PLAIN = [name for name in JobState.__slots__ if name not in _TIMES | _HISTORY]


def _key_of(state: JobState, now: float) -> Any:
    timers = state.timers.shifted(-now)
    plain = tuple(getattr(state, name) for name in _PLAIN)
    excluded = tuple((n, x.until and x.until - now) for n, x in state.excluded.items())
    leases = tuple(sorted((n, at - now) for n, at in state.leases.items()))
    order = tuple(m.agent for m in sorted(state.members.values(), key=lambda m: m.arrival))
    return (plain, timers, excluded, leases, order, state.decisions[-1:])
