"""What must hold after every step, told from outside: from events, effects, writes and what ranks do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_agent_invariants import check_agent_step
from sim_invariants import check_step
from sim_violation import Violation, require

from launcher.exchange import AgentPhase, Send
from rendezvous.values.events import (
    Accused,
    AgentJoined,
    AgentStopped,
    Assigned,
    Ended,
    RankFailed,
    RanksFinished,
    Stop,
    StoreAt,
    StoreOpened,
)
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    World,
)

if TYPE_CHECKING:
    from sim_agent import SimAgent
    from sim_transcript import Transcript
    from sim_world import SimWorld

    from launcher.exchange import Action, AgentEvent, Finish, Supervision
    from rendezvous.service.owner import Transition
    from rendezvous.values.events import Event, FromAgent

__all__ = ["Monitor", "Violation"]

STOP_BOUND_S = 25.0


class Monitor:
    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._slices: dict[tuple[int, int], tuple[AgentId, Assignment]] = {}
        self._stores: dict[int, object] = {}
        self._stops: dict[int, Decision] = {}
        self._given_up: dict[int, set[AgentId]] = {}  # generation -> members of its world that were lost
        self._started: dict[int, set[AgentId]] = {}
        self._blamed: dict[int, list[RankFailed]] = {}  # reports that counted
        self._finished: dict[int, set[str]] = {}
        self._paused: dict[
            AgentId, set[int]
        ] = {}  # generations for which an agent has said that it paused ranks
        self._stopping_since: dict[int, float] = {}
        self._written = JobState()
        self._finishes: list[tuple[SimAgent, Finish]] = []
        self.steps = 0
        self.state_was_lost = False  # then agents reap before they start what was sealed meanwhile
        self.transcript: Transcript | None = None

    # --- the service

    def stepped(self, before: JobState, event: Event, transition: Transition) -> None:
        self.steps += 1
        after = transition.state
        if self.transcript is not None:
            self.transcript.service_stepped(self._world.clock.now, before, event, transition)
        self._stop_is_bounded(before)
        check_step(before, event, after, transition.effects)
        self._note_losses(before, after)
        if isinstance(event, RankFailed) and after is not before:
            self._blamed.setdefault(event.generation, []).append(event)
        if isinstance(event, (RanksFinished, RankFailed, AgentStopped)) and before.phase is Phase.RUNNING:
            node = event.agent.node
            if node in before.pending and node not in after.pending:  # finished, or its failures are ignored
                self._finished.setdefault(event.generation, set()).add(node)

    def _stop_is_bounded(self, state: JobState) -> None:
        """The budget of the stop, and what crashes of the service may add to it."""
        if state.phase is Phase.STOPPING:
            now = self._world.clock.now
            since = self._stopping_since.setdefault(state.generation, now)
            require(now - since < STOP_BOUND_S, f"generation {state.generation} stops for ever")

    def _note_losses(self, before: JobState, after: JobState) -> None:
        if after.members is before.members:
            return
        for node, member in before.members.items():
            now = after.members.get(node)
            if now is None or now.agent != member.agent:
                self._given_up.setdefault(before.generation, set()).add(member.agent)

    def _all_reaped(self, world: World) -> None:
        """Nobody is sealed into a world while its ranks of an older one live, unless it was given up then."""
        for agent in self._world.agents:
            is_placed = any(each.agent == agent.id for each in world.placements)
            running = agent.ranks.unreaped
            if not is_placed or running is None or not agent.is_alive:
                continue
            excused = any(agent.id in lost for g, lost in self._given_up.items() if g >= running)
            require(excused, f"{agent.id} is sealed into {world.generation} while its ranks of {running} run")

    def written(self, state: JobState) -> None:
        before, self._written = self._written, state
        require(state.generation >= before.generation, "a written generation went back")
        if state.world is not None and state.generation > before.generation and not self.state_was_lost:
            self._all_reaped(state.world)
        if state.world is not None and state.generation > before.generation:
            self._paused_truly(state, state.world)
        same = state.generation == before.generation and state.world is not None
        require(not same or state.world == before.world, "two worlds were written for one generation")
        require(before.phase is not Phase.ENDED, "written after the end")
        require(state.restarts_used <= self._world.spec.budget.limit, "more restarts than the budget has")
        final = {d.generation: d for d in state.decisions if d.cause is not None}
        restarts = [d for d in final.values() if d.kind not in _NO_RESTART]
        generations = [d.generation for d in restarts]
        plain = [g for g in generations if not final[g].in_place]
        require(len(plain) <= state.restarts_used, "a restart after a failure counts as a heal")
        charged = state.restarts_used + state.heals_used
        require(len(generations) <= charged, "a restart after a failure was not charged")
        require(state.heals_used <= self._world.spec.heal_budget.limit, "more heals than the budget has")

    def _paused_truly(self, state: JobState, world: World) -> None:
        """A world counts only on paused ranks that this very agent has reported for the generation before."""
        for place in world.placements:
            told = world.generation - 1 in self._paused.get(place.agent, ())
            require(
                told or place.agent.node not in state.parked,
                f"{place.agent} has not said that it pauses ranks",
            )

    def about_to_tell(self, message: object) -> None:
        """Nobody is told what is not written: a crash right now must not unsay it."""
        store = self._world.store.state
        match message:
            case Assigned(a) if not self.state_was_lost:  # else it may only confirm what an agent said
                require(store.generation >= a.generation, f"{a.generation} was told and not written")
            case StoreAt(generation, address):
                known = store.generation > generation or store.store == address
                require(known or store.phase is not Phase.SEALED, "a store was told and not written")
            case Stop(generation, decision):
                require(decision in store.decisions, f"the stop of {generation} was told and not written")
            case Ended():
                require(store.outcome is not None, "the end was told and not written")

    # --- the agents

    def gave_up(self, agent: SimAgent) -> None:
        require(not agent.session.was_reached, f"{agent.id} gives up a service that it had reached")
        began_healed = self._world.healed_at is not None and agent.session.started_at >= self._world.healed_at
        require(not began_healed, f"{agent.id} does not find the service")

    def stream_begins(self, agent: SimAgent, messages: tuple[FromAgent, ...]) -> None:
        joined, *reports = messages
        assert isinstance(joined, AgentJoined)
        of_ranks = [
            r for r in reports if isinstance(r, (StoreOpened, RankFailed, RanksFinished, AgentStopped))
        ]
        for report in of_ranks:
            require(report.generation == joined.generation, f"{agent.id} repeats an older report: {report}")
        stopped = any(isinstance(report, AgentStopped) for report in of_ranks)
        require(not (stopped and joined.running), f"{agent.id} claims a place whose ranks were stopped")

    def still_cut_off(self, agent: SimAgent) -> None:
        """Ranks that get nowhere while the service is out of reach are stopped in time."""
        ranks, since = agent.ranks, agent.cut_off_since
        if since is None or ranks.gets_on or agent.state.phase is not AgentPhase.RUNNING or not ranks.live:
            return
        for_s = self._world.clock.now - max(since, ranks.idle_since)
        require(for_s < 1.5 * agent.isolation_timeout_s + 2.0, f"{agent.id} is cut off, and its ranks run on")

    def told(self, agent: SimAgent, message: object) -> None:
        match message:
            case Assigned(a):
                self._one_world(agent.id, a)
            case StoreAt(generation, address):
                require(
                    self._stores.setdefault(generation, address) == address, "two stores in one generation"
                )
            case Stop(generation, decision):
                first = self._stops.setdefault(generation, decision)
                aborted = decision.cause is None and decision.kind is DecisionKind.FAIL
                require(first == decision or aborted, f"two decisions about {generation}")
            case Ended(outcome):
                running = agent.ranks.running
                stopped = agent.state.phase is AgentPhase.STOPPING
                alive = (
                    running is not None and not stopped and agent.id not in self._given_up.get(running, ())
                )
                require(not alive, f"the end was told to {agent.id} while its ranks run ({outcome.reason})")

    def _one_world(self, agent: AgentId, mine: Assignment) -> None:
        key = (mine.generation, mine.node_rank)
        require(self._slices.setdefault(key, (agent, mine)) == (agent, mine), f"two slices {key}")
        for (generation, node_rank), (_, other) in self._slices.items():
            if generation != mine.generation or node_rank == mine.node_rank:
                continue
            require(other.world_size == mine.world_size, "two worlds in one generation")
            apart = other.rank_offset + other.nproc <= mine.rank_offset
            require(apart or mine.rank_offset + mine.nproc <= other.rank_offset, "ranks overlap")

    def accused(self, agent: SimAgent, cause: Cause) -> None:
        require(cause.node == agent.node, "a rank of another node is accused")
        innocent = agent.ranks.stuck != agent.ranks.generation
        require(cause.uncertain or not innocent, f"{cause} is blamed with certainty, and innocent")

    def ranks_start(self, agent: SimAgent, assignment: Assignment, kept: tuple[int, ...]) -> None:
        generation, left = assignment.generation, agent.ranks.unreaped
        require(left is None, f"{agent.id} starts {generation} before {left} is reaped")
        require(
            set(kept) == agent.ranks.live,
            f"{agent.id} continues {kept} in {generation}, not {agent.ranks.live}",
        )
        require(agent.ranks.live <= agent.ranks.parked, f"{agent.id} continues ranks that are not paused")
        require(
            assignment.in_place or not kept,
            f"{agent.id} continues {kept} in {generation}, where others restart",
        )
        starters = self._started.setdefault(generation, set())
        require(agent.id not in starters, f"{agent.id} starts {generation} twice")
        starters.add(agent.id)

    def sweeps(self, agent: SimAgent, kept: tuple[int, ...]) -> None:
        require(agent.ranks.live <= agent.ranks.parked, f"{agent.id} sweeps while its ranks run")
        require(set(kept) >= agent.ranks.live, f"{agent.id} sweeps what belongs to paused ranks")

    def agent_stepped(
        self, agent: SimAgent, before: Supervision, fact: AgentEvent, actions: tuple[Action, ...]
    ) -> None:
        if self.transcript is not None:
            now = self._world.clock.now
            self.transcript.agent_stepped(now, agent.node, before, fact, agent.state, actions)
        check_agent_step(before, fact, agent.state, actions)
        if isinstance(fact, Accused) and fact.generation == agent.ranks.generation:
            self.accused(agent, fact.cause)
        for action in actions:
            if isinstance(action, Send):
                self._reported(agent, action.message)

    def _reported(self, agent: SimAgent, message: FromAgent) -> None:
        """What an agent says of its ranks is so."""
        ranks = agent.ranks
        match message:
            case AgentStopped(_, generation, parked=parked):
                if parked:
                    self._paused.setdefault(agent.id, set()).add(generation)
                told = ranks.unreaped is None or ranks.generation > generation
                require(told, f"{agent.id} answers for {generation} before it is reaped")
                require(
                    set(parked) == ranks.live == ranks.parked, f"{agent.id} says that {parked} are paused"
                )
            case RankFailed(_, generation) if agent.state.phase is AgentPhase.JOINING:
                self._world.training.broken.add(generation)
            case RanksFinished(_, generation):
                require(
                    ranks.running != generation, f"{agent.id} says that {generation} finished; its ranks run"
                )

    def contact(self, agent: SimAgent, held: bool) -> None:
        if self.transcript is not None:
            self.transcript.contact(self._world.clock.now, agent.node, held)

    def isolated(self, agent: SimAgent) -> None:
        """Only ranks that make no progress are stopped for isolation."""
        require(not (agent.ranks.live and agent.ranks.gets_on), f"{agent.id} stops ranks that get on")

    def agent_finished(self, agent: SimAgent, finish: Finish) -> None:
        require(not agent.ranks.live, f"{agent.id} ends while its ranks run")
        self._finishes.append((agent, finish))

    # --- the end

    def ended(self) -> None:
        state = self._world.service.job.state
        outcome = state.outcome
        require(
            outcome is not None and outcome.succeeded == (outcome.exit_code == 0),
            "exit code and success differ",
        )
        assert outcome is not None
        for agent, finish in self._finishes:
            same = finish.exit_code == outcome.exit_code
            require(same or bool(agent.excuse), f"{agent.id} ends with {finish}, the job with {outcome}")
        if outcome.succeeded:
            self._all_finished(state)
        if outcome.first_cause is not None:
            self._fair_verdict(state, outcome.first_cause.failure)

    def _all_finished(self, state: JobState) -> None:
        done = self._finished.get(state.generation, set())
        assert state.world is not None
        nodes = {p.agent.node for p in state.world.placements}
        require(bool(nodes & done) and nodes <= done, f"succeeded without {sorted(nodes - done)}")

    def _fair_verdict(self, state: JobState, blamed: FailureClass) -> None:
        reports = self._blamed.get(state.generation, [])
        ignored = {rule.failure for rule in self._world.spec.rules}
        real = [r for r in reports if r.cause.failure not in (FailureClass.CONSEQUENCE, *ignored)]
        require(not real or blamed is not FailureClass.CONSEQUENCE, "a consequence is shown as the cause")


_NO_RESTART = (DecisionKind.FAIL, DecisionKind.IGNORE, DecisionKind.FINISH)
